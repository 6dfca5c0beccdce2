"""Operands of every operator: small integers with one right product, compared exactly, and random
ones to time with.

Legend: L rows of this rank's left operand, O rows of its result, P rows that it multiplies; K, N as
in the product.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ficco.accelerator import gpu
from ficco.problem import Problem

#: Nonzero elements in a column of the exact B; of all ranks together, where products are summed.
#: With elements of A up to 3 in size no sum leaves +-192, which bfloat16 holds exactly (up to 256),
#: whatever k is, and in whatever order is added.
TERMS = 64
LARGEST = 3

#: Elements of B that are drawn at once: a bound on what that takes, in 8-byte integers.
ELEMENTS = 1 << 26

#: Overwrites a tensor with numbers of a generator.
Draw = Callable[[torch.Tensor, torch.Generator], object]


@dataclass
class Operands:
    """The operands of one rank, overwritten in place, so that captured calls see new ones.

    ``whole_OK`` is what this rank's result is one product of: the gathered A, transposed or not;
    the blocks that all ranks have for this one; or, where products are summed, the sum of all
    ranks' A, since all have the same B. Each rank makes it by itself: no communication that could
    be wrong takes part in the reference. ``a_symmetric_LK`` is the left operand once more, in
    memory that peers can read; whoever needs it sets it.
    """

    problem: Problem
    rank: int
    device: torch.device
    a_LK: torch.Tensor = field(init=False)
    whole_OK: torch.Tensor = field(init=False)
    b_KN: torch.Tensor = field(init=False)
    a_symmetric_LK: torch.Tensor | None = None

    def __post_init__(self) -> None:
        problem, rank = self.problem, self.rank
        self.a_LK = self.empty(problem.left_rows(rank), problem.k)
        rows = (problem.product_rows if problem.kind.inner else problem.out_rows)(rank)
        self.whole_OK = self.empty(rows, problem.k)
        self.b_KN = self.empty(problem.b_rows(rank), problem.n)

    def empty(self, rows: int, cols: int) -> torch.Tensor:
        """A matrix like the operands, not initialised."""
        return torch.empty(rows, cols, dtype=getattr(torch, self.problem.dtype), device=self.device)

    @property
    def multiplied_PK(self) -> torch.Tensor:
        """What this rank multiplies: its own A, or what it gathers."""
        return self.a_LK if self.problem.kind.scatters else self._whole

    def exact(self, iteration: int) -> None:
        """Small integers; A depends on iteration, rank, block and row, so that stale data shows.

        B depends only on the sizes; :meth:`exact_b` sets it.
        """
        self._fill(
            iteration, lambda a, numbers: a.random_(-LARGEST, LARGEST + 1, generator=numbers)
        )

    def exact_b(self) -> None:
        """A sparse B of 1 and -1 whose columns take their terms from different rows."""
        k_count, n_count = self.b_KN.shape
        terms = max(1, TERMS // self.problem.world) if self.problem.kind.sums else TERMS
        stride = max(1, -(-k_count // terms))
        k = torch.arange(k_count, device=self.device)[:, None]
        width = max(1, ELEMENTS // max(k_count, 1))
        for first in range(0, n_count, width):
            n = torch.arange(first, min(first + width, n_count), device=self.device)
            sign = 1 - 2 * ((k // stride + n) % 2)
            self.b_KN[:, first : first + width] = torch.where((k + 7 * n) % stride == 0, sign, 0)

    def random(self, seed: int) -> None:
        """Normal data, as in training: GEMMs take longer on it than on small integers."""
        self._fill(seed, lambda tensor, generator: tensor.normal_(generator=generator))
        generator = torch.Generator(self.device)
        generator.manual_seed(seed)
        self.b_KN.normal_(generator=generator).mul_(max(self.b_KN.shape[0], 1) ** -0.5)

    def reference(self) -> torch.Tensor:
        """The result by the library, from what only this rank computed."""
        return torch.mm(self._whole, self.b_KN)

    @property
    def _whole(self) -> torch.Tensor:
        return self.whole_OK.t() if self.problem.kind.inner else self.whole_OK

    def _fill(self, iteration: int, draw: Draw) -> None:
        """Draw all blocks of A that this rank has, and those that its result consists of."""
        generator = torch.Generator(self.device)
        problem, rank, ranks = self.problem, self.rank, range(self.problem.world)
        # Whether A has a block for each rank; else all of it is for all.
        in_blocks = problem.kind.scatters or problem.kind.blocks

        def draw_block(tensor: torch.Tensor, src: int, part: int) -> None:
            generator.manual_seed((iteration * len(ranks) + src) * len(ranks) + part)
            draw(tensor, generator)

        for dst in ranks if in_blocks else (0,):
            first, rows = problem.leaves(rank, dst), problem.block(rank, dst)
            draw_block(self.a_LK[first : first + rows], rank, dst)
        for src, dst in product(ranks, ranks if problem.kind.returns else (rank,)):
            part, rows = dst if in_blocks else 0, problem.block(src, dst)
            if problem.kind.returns:
                first, rows = problem.offsets[dst], problem.rows[dst]
            else:
                first = 0 if problem.kind.sums else problem.lands(src, rank)
            there = self.whole_OK[first : first + rows]
            if src and problem.kind.sums:
                block = torch.empty_like(there)
                draw_block(block, src, part)
                there += block
            else:
                draw_block(there, src, part)
        if self.a_symmetric_LK is not None:
            self.a_symmetric_LK.copy_(self.a_LK)


Call = Callable[[], torch.Tensor]

#: Makes a call; its result, and a figure of it such as its seconds.
Measure = Callable[[Call], tuple[torch.Tensor, float]]


class ExactCall(NamedTuple):
    """One call.

    Attributes:
        name: of what was called.
        wrong: how many elements of the result are wrong, on its device, which is not waited for:
            what ``compare`` gave.
        figure: what ``measure`` gave.
    """

    name: str
    wrong: torch.Tensor
    figure: float


def seconds(group: ProcessGroup, device: torch.device) -> Measure:
    """Times calls by the host's clock, each begun by all ranks together and waited for."""

    def wait() -> None:
        if device.type == "cuda":
            gpu.synchronize()

    def measure(call: Call) -> tuple[torch.Tensor, float]:
        wait()
        dist.barrier(group)
        start = time.perf_counter()
        result = call()
        wait()
        return result, time.perf_counter() - start

    return measure


def wrong_elements(result: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """How many elements differ from what is wanted, on the device; all, where the shapes do."""
    if result.shape != wanted.shape:
        return torch.tensor(max(result.numel(), wanted.numel(), 1), device=wanted.device)
    return (result != wanted).sum()


def exact_calls(
    calls: Mapping[str, Call],
    operands: Operands,
    count: int,
    *,
    first: int = 0,
    compare: Callable[[torch.Tensor], torch.Tensor] | None = None,
    measure: Measure = lambda call: (call(), 0.0),
    seed: int = 0,
) -> Iterator[ExactCall]:
    """Make all calls ``count`` times, in an order that is shuffled anew each time: the first has
    it easiest. Every call has integers of its own, so that stale data shows.

    All ranks must pass the same names, ``count``, ``first`` and ``seed``: inputs and order follow
    from them. Nothing but ``measure`` waits: the left operand is overwritten as soon as a call is
    enqueued, so that data that is read too late shows, too.

    Args:
        calls: by name, calls that read ``operands``, whose B must be exact already.
        first: number of the first inputs; each call takes the next, ``count * len(calls)`` in all.
        compare: gives the number of wrong elements of a result; by default those that differ from
            ``operands.reference()``.
    """
    order, names = random.Random(seed), list(calls)
    shuffled = (name for _ in range(count) for name in order.sample(names, len(names)))
    for iteration, name in enumerate(shuffled, first):
        operands.exact(iteration)
        result, figure = measure(calls[name])
        wrong = compare(result) if compare else wrong_elements(result, operands.reference())
        yield ExactCall(name, wrong, figure)
