"""Calls of all_gather_matmul with exact results.

Inputs are small integers, so that every sum is exact in every dtype and any order, and results are
compared with no tolerance. They depend on the iteration, the rank, the row and the column: a
stale, missing or misplaced piece changes the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ranks import Rank, leave

import ficco
from ficco.dma.engine import Span
from ficco.plan import Plan
from ficco.problems.products import Problem
from ficco.runtime.calls import timing_steps

#: Upper limit of the terms in one element's sum. With |a| <= 3 and |b| = 1 sums are in [-192, 192],
#: and bfloat16 holds every integer up to 256.
TERMS = 64

#: Layouts of b, and of a_shard, also in memory of ficco.empty.
B_LAYOUTS = "plain", "transposed", "columns", "every-other-row"
A_LAYOUTS = *B_LAYOUTS, "leading", "leading-permuted", "offset"
SYMMETRIC_LAYOUTS = "symmetric", "symmetric-rows", "symmetric-columns", "symmetric-leading"


@dataclass(frozen=True)
class Case:
    """One call, the same on every rank."""

    rows: tuple[int, ...]
    k: int
    n: int
    dtype: str = "float32"
    schedule: str = "auto"
    a: str = "plain"
    b: str = "plain"
    gathered: bool = False

    @property
    def m(self) -> int:
        return sum(self.rows)

    def on(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        equal = len(set(self.rows)) == 1
        rows = {} if equal else {"rows": list(self.rows)}
        gathered = {"return_gathered": True} if self.gathered else {}
        return {"schedule": self.schedule, **rows, **gathered}


def equal(world: int, rows: int, k: int, n: int, **rest: Any) -> Case:
    """A case with equal shards."""
    return Case((rows,) * world, k, n, **rest)


def gathered_bytes(problem: Problem) -> int:
    """Bytes of a gathered A, which a serial all-gather allocates."""
    return problem.m * problem.k * problem.itemsize


def _hash(rows: range, cols: range, seed: int, device: torch.device) -> torch.Tensor:
    """Unrelated integers in [0, 2**32) for every row, column and seed."""
    mask = 0xFFFFFFFF
    row, col = (torch.tensor(indices, dtype=torch.int64, device=device) for indices in (rows, cols))
    x = row[:, None] * 0x9E3779B1 + col[None, :] * 0x85EBCA77 + seed * 0xC2B2AE3D
    x = ((x & mask) ^ ((x & mask) >> 15)) * 0x2C1B3C6D & mask
    x = (x ^ (x >> 12)) * 0x297A2D39 & mask
    return x ^ (x >> 15)


def gathered_a(case: Case, iteration: int, device: torch.device) -> torch.Tensor:
    """A of all shards, contiguous."""
    seeds = _hash(range(case.m), range(case.k), iteration, device)
    return (seeds % 7 - 3).to(getattr(torch, case.dtype))


def shard_of(case: Case, rank: int, iteration: int, device: torch.device) -> torch.Tensor:
    """One rank's rows of A, contiguous."""
    return gathered_a(case, iteration, device).split(case.rows)[rank].clone()


def weight_of(case: Case, rank: int, iteration: int, device: torch.device) -> torch.Tensor:
    """One rank's b, contiguous: 1 and -1 in at most ``TERMS`` places of a column, else 0."""
    rows, cols = range(case.k), range(case.n)
    signs = _hash(rows, cols, 31 * iteration + rank + 1, device) % 2 * 2 - 1
    places = torch.arange(case.k, device=device)[:, None] + torch.arange(case.n, device=device)
    chosen = places % (-(-case.k // TERMS) or 1) == 0
    return (signs * chosen).to(getattr(torch, case.dtype))


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, summed in float64."""
    return (a.double() @ b.double()).to(a.dtype)


def lay_a(case: Case, rank: int, plain: torch.Tensor, group: Any = None) -> torch.Tensor:
    """A shard in the layout of the case, surrounded by garbage."""
    rows, k = plain.shape
    most, halves = max(case.rows), 2 if rows % 2 == 0 else 1

    def symmetric(*shape: int) -> torch.Tensor:
        memory = ficco.empty(shape, dtype=plain.dtype, group=group, device=plain.device)
        return memory.fill_(99.0)

    garbage = partial(_garbage, plain)
    layouts: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: torch.empty_like(plain),
        "leading": lambda: garbage(halves, rows // halves, k),
        "leading-permuted": lambda: garbage(rows // halves, halves, k).transpose(0, 1),
        "columns": lambda: garbage(rows, k + 5)[:, 3 : 3 + k],
        "transposed": lambda: garbage(k, rows).t(),
        "every-other-row": lambda: garbage(2 * rows, k)[::2],
        "offset": lambda: garbage(rows * k + 3)[3:].view(rows, k),
        "symmetric": lambda: symmetric(most, k)[:rows],
        "symmetric-rows": lambda: symmetric(most + 3, k)[2 : 2 + rows],
        "symmetric-columns": lambda: symmetric(most, k + 5)[:rows, 3 : 3 + k],
        "symmetric-leading": lambda: symmetric(most, k)[:rows].view(halves, rows // halves, k),
    }
    a = layouts[case.a]()
    return a.copy_(plain.view(a.shape))


def lay_b(case: Case, plain: torch.Tensor) -> torch.Tensor:
    """b in the layout of the case."""
    (k, n), garbage = plain.shape, partial(_garbage, plain)
    layouts: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: torch.empty_like(plain),
        "transposed": lambda: garbage(n, k).t(),
        "columns": lambda: garbage(k, n + 5)[:, 3 : 3 + n],
        "every-other-row": lambda: garbage(2 * k, n)[::2],
    }
    return layouts[case.b]().copy_(plain)


def _garbage(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.full(shape, 99.0, dtype=like.dtype, device=like.device)


@dataclass
class CallData:
    """Operands and exact results of one call on one rank."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    gathered: torch.Tensor


def make(at: Rank, case: Case, iteration: int, group: Any = None) -> CallData:
    """Operands and exact results. Collective where the layout is symmetric."""
    rank = at.rank if group is None else group.rank()
    device = at.device
    a = gathered_a(case, iteration, device)
    shard = a.split(case.rows)[rank]
    weight = weight_of(case, rank, iteration, device)
    return CallData(lay_a(case, rank, shard, group), lay_b(case, weight), product(a, weight), a)


def call(case: Case, a: torch.Tensor, b: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Call the operator; return the product and, if the case returns it, the gathered A."""
    result = ficco.all_gather_matmul(a, b, group=group, **case.arguments())
    return list(result) if case.gathered else [result]


@contextmanager
def own_group(at: Rank) -> Iterator[Any]:
    """A group of all ranks whose calls may fail; it is closed at the end."""
    group = dist.new_group(list(range(at.world)))
    yield group
    at.barrier()
    leave(group)


def replays(at: Rank, call: Callable[[], torch.Tensor], renew: Callable[[int], None]) -> None:
    """Fail unless replays of a captured call equal eager calls for operands of later iterations."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    at.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for iteration in range(1, 6):
        renew(iteration)
        eager = call().clone()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, eager), iteration
        at.barrier()


def timed(data: CallData, schedule: str) -> tuple[torch.Tensor, Plan, list[Span]]:
    """The result, Plan and recorded spans of a call that times its steps."""
    with timing_steps() as recorded:
        out = ficco.all_gather_matmul(data.a, data.b, schedule=schedule)
    ((plan, spans),) = recorded
    return out, plan, spans


def compare(name: str, result: torch.Tensor, want: torch.Tensor, about: str) -> None:
    """Fail unless a result is contiguous and equals ``want`` in dtype, shape, device and values."""
    facts = [(t.dtype, tuple(t.shape), t.device.type) for t in (result, want)]
    if facts[0] != facts[1]:
        raise AssertionError(f"{about}: {name} is {facts[0]}, wanted {facts[1]}")
    if not result.is_contiguous():
        raise AssertionError(f"{about}: {name} is not contiguous")
    if not torch.equal(result, want):
        wrong = (result != want).nonzero().cpu()
        rows = sorted(set(wrong[:, 0].tolist()))
        spot = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{about}: {len(wrong)} of {want.numel()} elements of {name} are wrong, in rows "
            f"{rows[:20]}; at {spot} found {result[spot].item()}, wanted {want[spot].item()}"
        )


def verify(case: Case, results: Sequence[torch.Tensor], data: CallData, about: str = "") -> None:
    """Fail unless all elements of a call's results are exact."""
    about = f"{about} {case}"
    compare("the product", results[0], data.out, about)
    if case.gathered:
        compare("the gathered A", results[1], data.gathered, about)


def exact(at: Rank, case: Case, iteration: int, group: Any = None) -> None:
    """Check all elements of one call's results, and that the call does not change its operands."""
    data = make(at, case, iteration, group)
    a, b = data.a.clone(), data.b.clone()
    results = call(case, data.a, data.b, group)
    verify(case, results, data, f"rank {at.rank}, iteration {iteration}:")
    if not (torch.equal(a, data.a) and torch.equal(b, data.b)):
        raise AssertionError(f"rank {at.rank}: {case} changed its operands")


def all_exact(at: Rank, cases: Sequence[Case], first: int = 0) -> int:
    """Check consecutive calls; return their number."""
    for iteration, case in enumerate(cases, start=first):
        exact(at, case, iteration)
    return len(cases)
