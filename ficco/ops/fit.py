"""Plans that fit into the memory that ``workspace_bytes`` allows.

Gathering operators use their staging as a ring of steps. Scattering operators run by columns of b.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from ficco.dma.engine import Engine
from ficco.errors import FiccoError
from ficco.heuristics import Decision
from ficco.plan import Plan, aligned
from ficco.problems.products import Problem
from ficco.problems.specification import ALIGNMENT
from ficco.runtime.workspace import Workspace
from ficco.schedules import GRANULE, Schedule, StagingTooSmall, plan

#: Schedules that ``auto`` tries under a memory cap if no candidate fits.
FINER = tuple(f"hetero-fused-1d:pieces={pieces}" for pieces in (8, 16, 32, 64))


class Fit(NamedTuple):
    """A rank's plan, and how its calls fit under a memory cap.

    Attributes:
        single: calls take one slot, and so wait for each other.
        columns: a call runs as several, each on this number of columns of b; 0: as one.
    """

    plan: Plan
    single: bool = False
    columns: int = 0


class _NoRoom(ValueError):
    """A schedule does not fit under the memory cap."""


def fitted(workspace: Workspace, problem: Problem, schedule: Schedule, cap: int | None) -> Fit:
    """Return a schedule's plan on this rank, with slots of at most ``cap`` bytes (None: no cap).

    Raises:
        ValueError: the plan does not fit under the cap.
        NotImplementedError: the engine lacks the schedule's mover, or a product whose tiles wait.
        FiccoError: the schedule uses a collective, and the group can run no more collectives.
    """
    try:
        return _fitted(workspace, problem, schedule, cap)
    except _NoRoom as error:
        raise ValueError(str(error)) from None


def first_fit(workspace: Workspace, problem: Problem, decision: Decision, cap: int | None) -> Fit:
    """Return the plan of the best schedule that the engine accepts and that fits under the cap, or
    else the plan of the library's collective, where it serves the problem."""
    for schedule in _in_order(decision):
        if not workspace.engine.refuses(problem, schedule):
            with contextlib.suppress(_NoRoom):
                return _fitted(workspace, problem, schedule, cap)
    last = decision.schedule if problem.transposed else Schedule.parse("serial:collective")
    return fitted(workspace, problem, last, cap)


def keep_to_cap(engine: Engine, whole: Plan, cap: int | None) -> None:
    """Refuse a plan that takes slots of more than ``cap`` bytes and has no smaller form.

    Raises:
        ValueError: the plan takes more.
    """
    needed = engine.slot_bytes(whole.words, whole.slot_bytes) if whole.words else 0
    if cap is not None and needed > cap:
        raise ValueError(
            f"workspace_bytes: required at least {needed} for all pieces of {whole.problem}, got "
            f"{cap}; allow more"
        )


def _in_order(decision: Decision) -> Iterator[Schedule]:
    """Yield the schedules to try, the best first."""
    yield decision.schedule
    yield from decision.others  # predicted only when read
    yield from map(Schedule.parse, FINER)


def _fitted(workspace: Workspace, problem: Problem, schedule: Schedule, cap: int | None) -> Fit:
    engine = workspace.engine
    if why := engine.refuses(problem, schedule):
        raise NotImplementedError(why)
    whole = plan(problem, schedule, engine.rank, packs_columns=engine.packs_columns)
    if whole.collective and engine.out_of_step:
        raise FiccoError(
            f"schedule {schedule}: a collective of this group was broken off before, so its ranks "
            "may take old data for data of this call; destroy the group and make a new one, or "
            "use another schedule"
        )
    if cap is None or not whole.words:
        return Fit(whole)
    if schedule.own and not problem.kind.scatters:
        needed = engine.slot_bytes(whole.words, whole.slot_bytes)
        if needed > cap:
            raise _NoRoom(
                f"workspace_bytes: required at least {needed} for schedule {schedule} on "
                f"{problem}, got {cap}; allow more, or use another schedule"
            )
        return Fit(whole, single=True)
    if not problem.kind.scatters:
        make = partial(plan, problem, schedule, engine.rank, packs_columns=engine.packs_columns)
        try:
            return Fit(ring(engine, whole, cap, lambda room: make(staging_bytes=room)), single=True)
        except ValueError as error:
            raise _NoRoom(str(error)) from None
    words = engine.slot_bytes(whole.words, 0)
    data_bytes = max(0, cap - words)
    if words + whole.slot_bytes <= cap:
        return Fit(whole, single=True)
    granule = max(GRANULE, problem.cuts[1])
    columns = problem.n * data_bytes // max(whole.slot_bytes, 1) // granule * granule
    while columns and _bytes_of(whole, columns) > data_bytes:  # buffers are rounded up
        columns -= granule
    if not columns:
        fewest = min(granule, problem.n)
        raise _NoRoom(
            f"workspace_bytes: required at least {words + _bytes_of(whole, fewest)} for "
            f"{fewest} columns of schedule {schedule} on {problem}, got {cap}; allow more, or use "
            "serial:collective"
        )
    return Fit(whole, single=True, columns=columns)


def ring(engine: Engine, whole: Plan, cap: int, make: Callable[[int], Plan]) -> Plan:
    """Return the plan of a gather whose staging is a ring if its slot would exceed ``cap`` bytes.
    ``make`` returns the plan for a number of bytes of staging.

    Raises:
        ValueError: the largest step does not fit.
    """
    others = whole.slot_bytes - aligned(whole.buffer["staging"].nbytes(whole.rank))
    other_bytes = engine.slot_bytes(whole.words, others)
    try:
        return make(max(0, cap - other_bytes) // ALIGNMENT * ALIGNMENT)
    except StagingTooSmall as error:
        raise ValueError(
            f"workspace_bytes: required at least {other_bytes + aligned(error.needed)} for one "
            f"step of schedule {whole.schedule} on {whole.problem}, got {cap}; allow more or cut "
            "finer (pieces=)"
        ) from None


def _bytes_of(whole: Plan, columns: int) -> int:
    """Return the bytes of a slot's data for a number of columns of b."""
    n = max(whole.shape("b")[1], 1)
    sizes = (whole.buffer[name].nbytes(whole.rank) for name in whole.offsets)
    return sum(aligned(-(-size * columns // n)) for size in sizes)
