"""Schedules beyond the named ones, found by prediction (after FlashOverlap, sections 3.4 and 4).

The search starts at the best candidates and changes one thing at a time, as long as the prediction
falls: uneven pieces, a finely cut end, sizes that end on whole waves of the GEMM, groups of waves
of one product whose tiles wait, one or two compute lanes, groups that grow; where products travel,
pieces of columns, and own products that add themselves to sums. It counts predictions instead of
seconds, so that every rank and every process finds the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import gcd

from ficco.heuristics.candidates import predictable, serves, suited
from ficco.heuristics.model import MODES, Predict, Prediction, by_loss, predictions, worst_ratio
from ficco.machine import Machine
from ficco.problem import Problem
from ficco.schedules import Schedule, refusal

#: Predictions of a search, each in all its modes; together they take a part of 200 ms.
BUDGET = 32

#: Candidates from which it starts.
STARTS = 3

#: Parts of a shard, at whose boundaries ends of GEMM waves are looked for.
PARTS = 16

#: Relative sizes of pieces: falling, so that the product after the last copy is short, and
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
    predicted: Sequence[Prediction],
    machine: Machine,
    mode: str,
    predict: Predict,
    budget: int = BUDGET,
) -> tuple[Prediction, ...]:
    """Predictions of schedules beyond those in ``predicted``, in the order of the search."""
    modes = MODES[mode]
    seen = {one.schedule: one for one in predicted}
    known = len(seen)
    score = worst_ratio(predicted, modes)  # below 1 is a gain

    starts = [one for one in by_loss(predicted, modes) if not one.serial][:STARTS]
    for number, start in enumerate(starts):
        here: Prediction | None = start
        allowed = known + budget * (number + 1) // len(starts)
        while here is not None and len(seen) < allowed:
            least, walked = score(here), here.schedule
            here = None
            for schedule in _neighbours(walked, problem, machine):
                if len(seen) >= allowed:
                    break
                if schedule not in seen:
                    (seen[schedule],) = predictions(problem, [schedule], machine, modes, predict)
                if score(seen[schedule]) < least:
                    here = seen[schedule]
                    break
    return tuple(seen.values())[known:]


def _neighbours(schedule: Schedule, problem: Problem, machine: Machine) -> Iterator[Schedule]:
    """Schedules that differ in one thing, as far as they are possible and predictable."""
    for other in _changes(schedule, problem, machine):
        if other == schedule or refusal(problem, other) or not serves(other, machine):
            continue
        if predictable(other, problem, machine):
            yield suited(other, problem, machine)


def _changes(schedule: Schedule, problem: Problem, machine: Machine) -> Iterator[Schedule]:
    kind, tiled = problem.kind, schedule.grouping == "tiled"
    if schedule.own:
        return
    for sizes in wave_groups(schedule, problem, machine) if tiled else ():
        yield replace(schedule, pieces=sizes)
    for lanes in () if tiled else (1, 2):
        yield replace(schedule, compute=lanes)
    for tail in sorted(TAILS, key=lambda other: abs(other - schedule.tail)):
        yield replace(schedule, tail=tail)
    if schedule.dims == 1 and not (kind.inner or tiled):
        for sizes in waves(schedule, problem, machine):
            yield replace(schedule, pieces=sizes)
    for pieces in UNEVEN:
        yield replace(schedule, pieces=pieces)
    if tiled:  # the rest is about several products
        return
    if not schedule.uniform and schedule.dims == 1:
        for grouping in ("unfused", "growing", "shrinking", "fused"):
            yield replace(schedule, grouping=grouping)
    if kind.scatters or kind.inner:
        # Products of pieces of columns do not add up (of rows, where A is transposed); own products
        # may add themselves to the sum of the others.
        if schedule.grouping in ("fused", "unfused"):
            yield replace(schedule, dims=3 - schedule.dims)
        if not schedule.uniform and schedule.grouping != "ring":
            yield replace(schedule, beta=not schedule.beta)


def waves(schedule: Schedule, problem: Problem, machine: Machine) -> list[tuple[int, ...]]:
    """Relative sizes of two pieces whose products end on whole waves, as far as there are such.

    Of the first pieces of 1 to 15 sixteenths of a shard, the two with which the products of both
    pieces take least time; of equal ones, those whose first piece is nearest to three quarters.
    """
    ranks = range(problem.world)
    gemm = machine.products(problem.scaling)
    rows = max(problem.block(i, j) for i in ranks for j in ranks)
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
    return [(part // gcd(part, PARTS), (PARTS - part) // gcd(part, PARTS)) for part in best]


def wave_groups(
    schedule: Schedule, problem: Problem, machine: Machine
) -> Iterator[tuple[int, ...]]:
    """Relative sizes of pieces that are groups of whole waves of tiles, one step from those of a
    schedule: its own, moved to ends of waves; with a first or a last wave of their own; with one
    group that ends a wave sooner or later, or that joins the next; with one more group.

    Ends of waves are those of the block that is multiplied first. None where all tiles of a block
    are done in one wave.
    """
    ranks = range(problem.world)
    rows = max(problem.block(i, j) for i in ranks for j in ranks)
    if machine.tiled is None or not problem.flops:
        return
    most, units = max(map(problem.product_rows, ranks)), machine.tiled.units
    how = {"itemsize": problem.itemsize}
    height, width, split = machine.tiled.tile(most, problem.n, problem.k, **how)
    blocks, across = -(-rows // height), -(-problem.n // width)
    waves = range(1, blocks * across // units + 1)
    ends = sorted({wave * units // across for wave in waves} - {0, blocks})
    if split > 1 or not ends:
        return
    pieces = schedule.pieces or problem.world
    weights = pieces if isinstance(pieces, tuple) else (1,) * pieces
    parts = [part / sum(weights) for part in accumulate(weights[:-1])]
    now = {min(ends, key=lambda end: abs(end / blocks - part)) for part in parts}
    steps = [now, now | {ends[0]}, now | {ends[-1]}]
    for one, two in pairwise(ends):
        steps += [now - {a} | {b} for a, b in ((one, two), (two, one)) if a in now]
    steps += [now - {end} if end in now else now | {end} for end in ends]
    for bounds in steps:
        sizes = [b - a for a, b in pairwise((0, *sorted(bounds), blocks))]
        yield tuple(size // gcd(*sizes) for size in sizes)
