"""Host time of warm eager calls, and times of small calls whose GPU waits for its host.

    torchrun --nproc-per-node 2 -m benchmarks.host_time out.csv

Each figure is the median of paired rounds, in microseconds, of the slower rank. NCCL followed by
``torch.mm``, PyTorch's fused operator and ficco's schedules take turns in a shuffled order, which
is the same on all ranks. ``host`` is the time until the third of three calls in a row returns, from
an idle device. ``idle`` is the time from the first to the last work of a call on the device. The
last lines compare ``auto`` with the faster of the other libraries. No schedule is fitted to the
shapes of ``UNSEEN``.
"""

from __future__ import annotations

import csv
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

import ficco

#: Rows of the gathered A, columns of b, and k.
SHAPES = ((2048, 896, 5120), (8192, 3584, 4096), (256, 5120, 8192))
UNSEEN = (
    *((64, 2560, 5120), (128, 1792, 3072), (256, 1280, 4608), (384, 3328, 2560)),
    *((512, 896, 6144), (768, 2304, 4096), (1024, 1152, 7168), (1280, 640, 5120)),
    *((1536, 1536, 3584), (2048, 512, 2816), (2560, 1024, 4608), (3072, 768, 6656)),
    *((4096, 960, 5120), (1024, 14336, 8192), (2048, 6912, 5120), (8192, 960, 5120)),
)
GATHERS = ("auto", "serial:collective", "serial:kernel", "serial", "growing", "tiled")
SCATTERS = ("auto", "serial:collective", "growing", "tiled")
LIBRARY, FUSED = "NCCL and mm", "PyTorch fused"
WARM_UP, ROUNDS = 8, 31

Calls = dict[str, Callable[[], object]]


class Row(NamedTuple):
    """A figure: operator, mode, shape, timed call, and microseconds."""

    operator: str
    mode: str
    m: int
    n: int
    k: int
    call: str
    us: float


def gathers(m: int, n: int, k: int, world: int, device: torch.device) -> Calls:
    """Calls that multiply the gathered rows, by name."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    symmetric = symmetric_memory.empty(m // world, k, dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(symmetric, name)
    a = symmetric.normal_().clone()
    b = torch.randn(n, k, dtype=torch.bfloat16, device=device).t()

    def library() -> torch.Tensor:
        gathered = a.new_empty(m, k)
        dist.all_gather_into_tensor(gathered, a)
        return torch.mm(gathered, b)

    calls: Calls = {
        LIBRARY: library,
        FUSED: lambda: torch.ops.symm_mem.fused_all_gather_matmul(symmetric, [b], 0, name),
    }
    for schedule in GATHERS:
        calls[schedule] = partial(ficco.all_gather_matmul, a, b, schedule=schedule)
    return calls


def scatters(m: int, n: int, k: int, world: int, device: torch.device) -> Calls:
    """Calls that scatter the sum of all ranks' products, by name."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    a = torch.randn(m, k // world, dtype=torch.bfloat16, device=device)
    b = torch.randn(n, k // world, dtype=torch.bfloat16, device=device).t()

    def library() -> torch.Tensor:
        out = a.new_empty(m // world, n)
        dist.reduce_scatter_tensor(out, torch.mm(a, b))
        return out

    calls: Calls = {
        LIBRARY: library,
        FUSED: lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, name),
    }
    for schedule in SCATTERS:
        calls[schedule] = partial(ficco.matmul_reduce_scatter, a, b, schedule=schedule)
    return calls


OPERATORS = {"all_gather_matmul": gathers, "matmul_reduce_scatter": scatters}


def slowest(value: float) -> float:
    """The largest value of all ranks."""
    shared = torch.tensor([value], dtype=torch.float64, device="cuda")
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared.item())


def synchronise() -> None:
    """Make all ranks begin at the same time, with idle devices."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def host(call: Callable[[], object]) -> float:
    """Microseconds until a call returns, the third in a row."""
    synchronise()
    call(), call()
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def idle(call: Callable[[], object]) -> float:
    """Microseconds of a call on a device that waits for its host."""
    synchronise()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def usable(calls: Calls) -> Calls:
    """Warm up all calls and return those that run on all ranks."""
    served = {}
    # A later kind may need larger slots, which frees the programs of earlier kinds.
    for name, call in [*calls.items()] * 2:
        failed = 0.0
        try:
            for _ in range(WARM_UP):
                call()
        except (NotImplementedError, RuntimeError, ValueError) as error:
            failed = 1.0
            print(f"rank {dist.get_rank()}: {name}: {error}", file=sys.stderr)
        if slowest(failed):
            served.pop(name, None)
        else:
            served[name] = call
    return served


def timed(
    calls: Calls, time_of: Callable[[Callable[[], object]], float], order: random.Random
) -> dict[str, float]:
    """Median over the rounds of the slower rank's microseconds, by call."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        order.shuffle(names)
        for name in names:
            times[name].append(slowest(time_of(calls[name])))
    return {name: statistics.median(us) for name, us in times.items()}


def measure(rank: int, world: int, device: torch.device) -> list[Row]:
    rows: list[Row] = []
    # Orders differ from shape to shape, so that no call always follows the same other one.
    order = random.Random(7)
    for operator, candidates in OPERATORS.items():
        for mode, time_of, shapes in (("host", host, SHAPES), ("idle", idle, UNSEEN)):
            for shape in shapes:
                times = timed(usable(candidates(*shape, world, device)), time_of, order)
                rows += [Row(operator, mode, *shape, name, us) for name, us in times.items()]
                line = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
                if rank == 0:
                    print(f"{operator} {mode} {shape}: {line}", flush=True)
    return rows


def summary(rows: list[Row]) -> str:
    """``auto`` against the faster of the other libraries, by operator and mode."""
    lines = []
    for operator in OPERATORS:
        for mode in ("host", "idle"):
            shapes: dict[Any, dict[str, float]] = {}
            for row in rows:
                if (row.operator, row.mode) == (operator, mode):
                    shapes.setdefault(row[2:5], {})[row.call] = row.us
            ratios = {
                shape: min(us[LIBRARY], us.get(FUSED, float("inf"))) / us["auto"]
                for shape, us in shapes.items()
                if "auto" in us
            }
            if ratios:
                worst = min(ratios, key=lambda shape: ratios[shape])
                mean = statistics.geometric_mean(ratios.values())
                text = f"speed of auto against the faster library {mean:.3f}, worst"
                lines.append(f"{operator} {mode}: {text} {ratios[worst]:.3f} at {worst}")
    return "\n".join(lines)


def main(out: str) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rows = measure(dist.get_rank(), dist.get_world_size(), device)
    if dist.get_rank() == 0:
        with open(out, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Row._fields)
            writer.writerows(rows)
        print(summary(rows))
    ficco.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
