"""Times of the first calls of each kind in a new process, and a profile of the very first call.

    torchrun --nproc-per-node 2 -m benchmarks.first_calls [--prepare] [--profile] [--libraries]

Prints milliseconds of six calls of each kind; the ranks synchronise between calls. A second run has
warm caches on disk. ``--libraries`` runs the same products with PyTorch's collectives and
``torch.mm``, which load their kernels at the first call, too. ``--prepare`` calls
``ficco.prepare`` for all kinds before the first call, and prints its time. ``--profile`` prints the
functions of the very first call by cumulative time; the profiler slows that call down.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import sys
import time
from collections.abc import Callable

BEGIN = time.perf_counter()

import torch  # noqa: E402  the import is timed
import torch.distributed as dist  # noqa: E402

TORCH = time.perf_counter()

import ficco  # noqa: E402

FICCO = time.perf_counter()

CALLS = 6
#: Number of functions that a profile prints.
FUNCTIONS = 60


def kinds(device: torch.device, world: int) -> dict[str, Callable[[], object]]:
    """A call of each kind, by name."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    a, b = random(2048 // world, 5120), random(896, 5120).t()
    c, d = random(8192 // world, 4096), random(3584, 4096).t()
    row, e = random(1, 14336 // world), random(4096, 14336 // world).t()
    f, g = random(8192, 4096 // world), random(4096, 4096 // world).t()
    q, k = random(1, 32, 8192 // world, 128), random(1, 8, 8192 // world, 128)
    return {
        "all-gather 2048 x 896 x 5120": lambda: ficco.all_gather_matmul(a, b),
        "all-gather 8192 x 3584 x 4096": lambda: ficco.all_gather_matmul(c, d),
        "all-reduce of one row": lambda: ficco.matmul_all_reduce(row, e),
        "reduce-scatter 8192 x 4096 x 4096": lambda: ficco.matmul_reduce_scatter(f, g),
        "tiled": lambda: ficco.all_gather_matmul(c, d, schedule="tiled"),
        "attention": lambda: ficco.all_gather_attention(q, k, k),
    }


def by_libraries(device: torch.device, world: int) -> dict[str, Callable[[], object]]:
    """The products of :func:`kinds` after or before a collective, by name."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def gathered(m: int, n: int, k: int) -> Callable[[], object]:
        a, b, out = random(m // world, k), random(n, k).t(), random(m, k)

        def call() -> torch.Tensor:
            dist.all_gather_into_tensor(out, a)
            return out @ b

        return call

    def summed(m: int, n: int, k: int, scattered: bool) -> Callable[[], object]:
        a, b, out = random(m, k // world), random(n, k // world).t(), random(m // world, n)

        def call() -> None:
            if scattered:
                dist.reduce_scatter_tensor(out, a @ b)
            else:
                dist.all_reduce(a @ b)

        return call

    return {
        "all-gather 2048 x 896 x 5120": gathered(2048, 896, 5120),
        "all-gather 8192 x 3584 x 4096": gathered(8192, 3584, 4096),
        "all-reduce of one row": summed(1, 4096, 14336, False),
        "reduce-scatter 8192 x 4096 x 4096": summed(8192, 4096, 4096, True),
    }


def synchronised(call: Callable[[], object]) -> float:
    """Milliseconds of a call from idle devices on all ranks to the end of its work."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def main(arguments: list[str]) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    ready, rank = time.perf_counter(), dist.get_rank()
    of = by_libraries if "--libraries" in arguments else kinds
    calls = of(device, dist.get_world_size())
    lines = [
        f"import torch {TORCH - BEGIN:.2f} s, import ficco {FICCO - TORCH:.2f} s, NCCL "
        f"{ready - FICCO:.2f} s"
    ]
    if "--prepare" in arguments:
        functions = list(calls.values())
        seconds = synchronised(lambda: ficco.prepare(lambda: [call() for call in functions])) / 1e3
        lines.append(f"ficco.prepare {seconds:.2f} s")
    profile = cProfile.Profile()
    if "--profile" in arguments:
        first_call = next(iter(calls.values()))
        synchronised(lambda: profile.runcall(first_call))
    for name, call in calls.items():
        times = [synchronised(call) for _ in range(CALLS)]
        lines.append(f"{name}: " + ", ".join(f"{ms:.2f}" for ms in times))
    if rank == 0:
        print("\n".join(lines), flush=True)
        if "--profile" in arguments:
            pstats.Stats(profile).sort_stats("cumulative").print_stats(FUNCTIONS)
    ficco.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
