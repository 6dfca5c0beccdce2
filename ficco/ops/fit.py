"""Plans that keep to the memory that is allowed (``workspace_bytes``).

Gathering operators turn their staging into a ring of steps; scattering ones go by columns of b.
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

#: What ``auto`` tries under a memory cap if no schedule that it compared keeps to the cap.
FINER = tuple(f"hetero-fused-1d:pieces={pieces}" for pieces in (8, 16, 32, 64))


class Fit(NamedTuple):
    """A rank's plan, and how its calls keep to a cap.

    Attributes:
        single: calls of it take one slot, and so wait for each other.
        columns: a call is several, of so many columns of b each; 0: it is one.
    """

    plan: Plan
    single: bool = False
    columns: int = 0


class _NoRoom(ValueError):
    """A schedule needs more memory than is allowed."""


def fitted(workspace: Workspace, problem: Problem, schedule: Schedule, cap: int | None) -> Fit:
    """A schedule's plan on this rank, with slots of at most ``cap`` bytes; None: any.

    Raises:
        ValueError: it cannot keep to the cap.
        NotImplementedError: the engine lacks the schedule's mover, or a product whose tiles wait.
        FiccoError: it takes a collective of a group that can have no more.
    """
    try:
        return _fitted(workspace, problem, schedule, cap)
    except _NoRoom as error:
        raise ValueError(str(error)) from None


def first_fit(workspace: Workspace, problem: Problem, decision: Decision, cap: int | None) -> Fit:
    """The same for the schedule that was decided on; if the engine refuses that or it does not keep
    to the cap, for the best of those that it does not refuse and that do; if none does, for the
    collective of the group's library, where that serves the problem."""
    for schedule in _in_order(decision):
        if not workspace.engine.refuses(problem, schedule):
            with contextlib.suppress(_NoRoom):
                return _fitted(workspace, problem, schedule, cap)
    last = decision.schedule if problem.transposed else Schedule.parse("serial:collective")
    return fitted(workspace, problem, last, cap)


def keep_to_cap(engine: Engine, whole: Plan, cap: int | None) -> None:
    """Refuse a plan that has no smaller form and takes slots of more than ``cap`` bytes.

    Raises:
        ValueError: it does.
    """
    needed = engine.slot_bytes(whole.words, whole.slot_bytes) if whole.words else 0
    if cap is not None and needed > cap:
        raise ValueError(
            f"workspace_bytes: required at least {needed} for all pieces of {whole.problem}, got "
            f"{cap}; allow more"
        )


def _in_order(decision: Decision) -> Iterator[Schedule]:
    yield decision.schedule
    yield from decision.others  # predicted only if asked for
    yield from map(Schedule.parse, FINER)


def _fitted(workspace: Workspace, problem: Problem, schedule: Schedule, cap: int | None) -> Fit:
    engine = workspace.engine
    if why := engine.refuses(problem, schedule):
        raise NotImplementedError(why)
    whole = plan(problem, schedule, engine.rank, packs_columns=engine.packs_columns)
    if whole.collective and engine.out_of_step:
        raise FiccoError(
            f"schedule {schedule}: a collective of this group was broken off before, so that its "
            "ranks may take data of that for data of this one; destroy the group and make a new "
            "one, or use another schedule"
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
    left = max(0, cap - words)
    if words + whole.slot_bytes <= cap:
        return Fit(whole, single=True)
    granule = max(GRANULE, problem.cuts[1])
    columns = problem.n * left // max(whole.slot_bytes, 1) // granule * granule
    while columns and _bytes_of(whole, columns) > left:  # buffers are rounded up
        columns -= granule
    if not columns:
        few = min(granule, problem.n)
        raise _NoRoom(
            f"workspace_bytes: required at least {words + _bytes_of(whole, few)} for "
            f"{few} columns of schedule {schedule} on {problem}, got {cap}; allow more, or use "
            "serial:collective"
        )
    return Fit(whole, single=True, columns=columns)


def ring(engine: Engine, whole: Plan, cap: int, make: Callable[[int], Plan]) -> Plan:
    """The plan of a gather whose staging becomes a ring if its slot takes more than ``cap`` bytes;
    ``make`` plans it with so many bytes of staging.

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
    """Bytes of a slot's data for so many columns of b."""
    n = max(whole.shape("b")[1], 1)
    sizes = (whole.buffer[name].nbytes(whole.rank) for name in whole.offsets)
    return sum(aligned(-(-size * columns // n)) for size in sizes)
