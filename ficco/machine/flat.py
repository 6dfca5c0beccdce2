"""A machine of a few numbers: one rate for each kind of work, and no contention."""

from __future__ import annotations

from ficco.machine.model import (
    Collective,
    Contention,
    Copies,
    Gemm,
    Host,
    Machine,
    Memory,
    Provenance,
    Topology,
)

#: Bytes at the ends of a curve of one rate; the curve is constant beyond its ends.
_LEAST, _MOST = 1.0, 1e15


def flat(
    flops: float,
    link_bytes: float,
    memory_bytes: float,
    *,
    ranks: int = 2,
    kind: str = "switch",
    start: float = 0.0,
    source: str = "assumed",
) -> Machine:
    """A Machine on which products, copies and memory have one rate each.

    Args:
        flops: floating-point operations per second of any product.
        link_bytes: bytes per second of a copy, and of a link or port.
        memory_bytes: bytes per second of reads and writes within a rank.
        ranks: number of ranks. The collective transfers the shards of all peers one by one.
        kind: topology, ``"switch"`` or ``"mesh"``.
        start: seconds before the first byte of a copy, or the first tile of a product.
        source: where the numbers come from.
    """
    provenance = Provenance(source)
    copies = Copies(64, start, start, ((_MOST, link_bytes),), provenance)
    return Machine(
        name="flat",
        accelerator="",
        ranks=ranks,
        topology=Topology(kind, link_bytes, provenance),
        copies=copies,
        kernel_copies=copies,
        all_gather=Collective(
            tuple((size, (ranks - 1) * size / link_bytes) for size in (_LEAST, _MOST)), provenance
        ),
        gemm=Gemm(
            peak=flops,
            units=1,
            launch=0.0,
            efficiency=1.0,
            start=start,
            bandwidth=float("inf"),
            provenance=provenance,
        ),
        memory=Memory(float("inf"), memory_bytes, provenance, latency=start),
        contention=Contention(1.0, 1.0, 1.0, 1.0, provenance),
        host=Host(0.0, 0.0, 0.0, 0.0, 0.0, provenance),
    )
