"""Plans of a gather whose rows the caller's own kernel consumes, as they arrive (TileLink)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ficco.plan.model import Plan, Products, Region
from ficco.problems.products import Problem
from ficco.problems.specification import AnyProblem, Specification
from ficco.schedules.builder import Builder, WordAllocator
from ficco.schedules.space import Schedule
from ficco.schedules.tiled import TiledGatherStage, TiledGatherWorld


@dataclass(frozen=True)
class Gathering(AnyProblem):
    """An all-gather of A [m/W, k] whose rows the caller consumes.

    Its Plans are proven like those of a product with one column: whatever the caller makes of the
    rows, each of them is read where it has arrived, and counts once.

    Attributes:
        rows: number of rows of each rank.
        k: columns of A.
        dtype: its name.
        symmetric: A is in symmetric memory, so that peers can read it in place.
    """

    rows: tuple[int, ...]
    k: int
    dtype: str
    symmetric: bool = False

    operator, hosts = "arriving", 1

    @cached_property
    def world(self) -> int:
        return len(self.rows)

    @cached_property
    def product(self) -> Problem:
        """The product that stands for what the caller does."""
        rows, k = self.rows, self.k
        return Problem("all_gather_matmul", rows, 1, k, self.dtype, symmetric=self.symmetric)

    @property
    def specification(self) -> Specification:
        return self.product.specification

    def __str__(self) -> str:
        return str(self.product).replace("all_gather_matmul", "arriving").replace(" n=1,", "")


class ArrivingPiece(NamedTuple):
    """Rows that arrive together: ``first`` to ``last``, exclusive, of the gathered A, which are
    those of the rank ``peer``."""

    first: int
    last: int
    peer: int


class ArrivingStage(TiledGatherStage):
    """One rank's steps: own rows and copies as for a tiled product, then the caller's step. All
    rows have their place in staging, in the order of the ranks."""

    callers, label = True, "caller"

    def _own_is_separate(self) -> bool:
        return True  # even without own rows: the caller's step must be there

    def _own_rows(self) -> Region:
        if not self.peers:
            return super()._own_rows()
        rows = self.world.block(self.me, self.me)
        return Region("staging", self.me, *rows, 0, self.problem.k)

    def _keep_own(self) -> None:
        """Copy the own rows to their place among those of the peers."""
        if self.peers and self.problem.block(self.me, self.me):
            self._place("compute0", super()._own_rows(), self._own_rows())


def gathering(problem: Gathering, schedule: Schedule, ranks: Sequence[int]) -> list[Plan]:
    """Plans of ranks for a tiled schedule.

    Raises:
        ValueError: the schedule is not tiled.
    """
    if schedule.grouping != "tiled":
        raise ValueError(f"schedule: required a tiled one to gather by, got {schedule}")
    words = WordAllocator(problem.world)
    world = TiledGatherWorld(problem.product, schedule, words, own_lands=True)
    plans = []
    for rank in ranks:
        builder = Builder(problem, rank)
        stage = ArrivingStage(world, builder)
        stage.run()
        if builder.peers:
            builder.retire(stage.silent())
        plans.append(builder.plan(str(schedule), world.buffers, words))
    return plans


def callers_step(plan: Plan) -> int:
    """Index of the step that stands for the user's own work on arriving rows."""
    return next(
        i
        for i, step in enumerate(plan.steps)
        if isinstance(step.work, Products) and step.work.callers
    )


def own_rows(plan: Plan) -> tuple[int, int]:
    """First and last row, exclusive, of the rank's own rows among those of all."""
    exchange, me = plan.problem.specification.exchange, plan.rank
    first = exchange.lands(me, me)
    return first, first + exchange.block(me, me)


def pieces_of(plan: Plan) -> tuple[ArrivingPiece, ...]:
    """Arriving pieces in the expected order. Piece ``i`` has the ``i``-th of the consecutive words
    of the step's gates."""
    lands, me = plan.problem.specification.exchange.lands, plan.rank
    offsets = [lands(peer, me) for peer in range(plan.problem.world)]
    gates = plan.steps[callers_step(plan)].gates
    return tuple(
        ArrivingPiece(gate.first, gate.last, bisect_right(offsets, gate.first) - 1)
        for gate in gates
    )
