"""Schedules beyond the named ones, found by prediction (after FlashOverlap, sections 3.4 and 4).

The search starts at the best candidates and changes one thing at a time, as long as the prediction
falls: uneven pieces, a finely cut end, sizes that end on whole waves of the GEMM, one or two
compute lanes, groups that grow; where products travel, pieces of columns, and own products that add
themselves to sums. It counts predictions instead of seconds, so that every rank and every process
finds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from math import gcd

from ficco.heuristics.candidates import predictable, serves, suited
from ficco.heuristics.model import MODES, Predict, Prediction
from ficco.machine import Machine
from ficco.problem import Problem
from ficco.schedules import Schedule, refusal

#: Predictions of a search, each in all its modes; what they take is a part of 200 ms.
BUDGET = 32

#: Candidates from which it starts.
STARTS = 3

#: Steps in which the ends of GEMM waves are looked for, as parts of a shard.
PARTS = 16

#: Relative sizes of pieces: falling, so that the product behind the last copy is short, and
#: rising, so that the first product starts early.
UNEVEN: tuple[int | tuple[int, ...], ...] = (
    1,
    2,
    3,
    4,
    (2, 1),
    (3, 1),
    (1, 2),
    (1, 3),
    (3, 2, 1),
    (4, 2, 1),
    (1, 2, 4),
    (6, 1, 1),
)

TAILS = (1, 2, 3, 4, 6, 8)


def search(
    problem: Problem,
    found: Sequence[Prediction],
    machine: Machine,
    mode: str,
    predict: Predict,
    budget: int = BUDGET,
) -> tuple[Prediction, ...]:
    """Predictions of schedules beyond those in ``found``, in the order in which they were met."""
    modes = MODES[mode]
    best = {m: min(one.seconds[m] for one in found) for m in modes}
    seen = {one.schedule: one for one in found}
    known = len(seen)

    def score(one: Prediction) -> float:
        """The worst mode against the best candidate there; below 1 is a gain."""
        return max(one.seconds[m] / best[m] for m in modes)

    def look(schedule: Schedule) -> Prediction:
        if schedule not in seen:
            seconds = {m: predict(problem, schedule, machine, m) for m in modes}
            seen[schedule] = Prediction(schedule, seconds)
        return seen[schedule]

    starts = sorted((one for one in found if not one.serial), key=score)[:STARTS]
    for number, start in enumerate(starts):
        here = start
        allowed = known + budget * (number + 1) // len(starts)
        walking = True
        while walking and len(seen) < allowed:
            walking = False
            for schedule in _neighbours(here.schedule, problem, machine):
                if len(seen) >= allowed:
                    break
                there = look(schedule)
                if score(there) < score(here):
                    here, walking = there, True
                    break
    return tuple(seen.values())[known:]


def _neighbours(schedule: Schedule, problem: Problem, machine: Machine) -> Iterator[Schedule]:
    """Schedules that differ in one thing."""
    changes: list[Callable[[], Iterator[Schedule]]] = [
        lambda: (replace(schedule, compute=lanes) for lanes in (1, 2)),
        lambda: (replace(schedule, tail=tail) for tail in _near(TAILS, schedule.tail)),
        lambda: (replace(schedule, pieces=sizes) for sizes in _sizes(schedule, problem, machine)),
        lambda: _groupings(schedule),
    ]
    if problem.kind.scatters or problem.kind.inner:
        changes.append(lambda: _of_products(schedule))
    for change in changes:
        for other in change():
            if other == schedule or refusal(problem, other) or not serves(other, machine):
                continue
            if not predictable(other, problem, machine):
                continue
            yield suited(other, problem, machine)


def _near(values: Sequence[int], value: int) -> list[int]:
    """Values in the order of their distance."""
    return sorted(values, key=lambda other: abs(other - value))


def _groupings(schedule: Schedule) -> Iterator[Schedule]:
    if not schedule.uniform and schedule.dims == 1:
        for grouping in ("unfused", "growing", "shrinking", "fused"):
            yield replace(schedule, grouping=grouping)


def _of_products(schedule: Schedule) -> Iterator[Schedule]:
    """What there is for products that travel: pieces of columns, whose products do not add up (nor
    do they where A is transposed), and own products that add themselves to the sum of the
    others."""
    if schedule.grouping in ("fused", "unfused"):
        yield replace(schedule, dims=3 - schedule.dims)
    if not schedule.uniform and schedule.grouping != "ring":
        yield replace(schedule, beta=not schedule.beta)


def _sizes(
    schedule: Schedule, problem: Problem, machine: Machine
) -> Iterator[int | tuple[int, ...]]:
    if schedule.dims == 1 and not problem.kind.inner:
        yield from waves(schedule, problem, machine)
    yield from UNEVEN


def waves(schedule: Schedule, problem: Problem, machine: Machine) -> list[tuple[int, ...]]:
    """Two pieces whose products end on whole waves, as far as there are such, by relative size.

    Of the first pieces of 1 to 15 sixteenths of a shard, the two with which the products of both
    pieces take least time; of equals, those whose first piece is nearest to three quarters.
    """
    ranks = range(problem.world)
    gemm, rows = machine.gemm, max(problem.block(i, j) for i in ranks for j in ranks)
    if gemm is None or rows < PARTS:
        return []
    together = problem.world - 1 if schedule.grouping == "fused" else 1

    def spent(part: int) -> float:
        return sum(
            gemm.seconds(
                rows * share // PARTS * together,
                problem.n,
                problem.k,
                itemsize=problem.itemsize,
            )
            for share in (part, PARTS - part)
        )

    best = sorted(range(1, PARTS), key=lambda part: (round(spent(part), 9), abs(part - 12)))[:2]
    return [_reduced((part, PARTS - part)) for part in best]


def _reduced(sizes: tuple[int, ...]) -> tuple[int, ...]:
    common = reduce(gcd, sizes)
    return tuple(size // common for size in sizes)
