"""Names of the steps of a tuning run, without what it takes to measure them."""

#: In order; ``shapes`` stands for all shapes that are given.
STEPS = (
    "gemm",
    "copies",
    "kernel_copies",
    "topology",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_reduce",
    "memory",
    "contention",
    "host",
    "thresholds",
    "shapes",
)
