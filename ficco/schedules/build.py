"""Builds Plans from a Problem and a Schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ficco.plan.collector import paused
from ficco.plan.model import Plan, Product, Region, Step, Transfer
from ficco.problem import Problem
from ficco.schedules.gather import Gather, GatherWorld
from ficco.schedules.inner import InnerGather
from ficco.schedules.one_shot import OneShot, OneShotWorld
from ficco.schedules.scatter import Scatter, ScatterWorld
from ficco.schedules.space import Schedule


def plan(problem: Problem, schedule: Schedule, rank: int, staging_bytes: int | None = None) -> Plan:
    """The Plan of one rank.

    ``staging_bytes`` caps the staging of gathering operators: if the pieces do not all fit, they
    use it as a ring.

    Raises:
        ValueError: the schedule cannot serve the operator, or the cap is too small for its largest
            step.
    """
    return _plans(problem, schedule, [rank], staging_bytes)[0]


def plans(problem: Problem, schedule: Schedule, staging_bytes: int | None = None) -> list[Plan]:
    """The Plans of all ranks."""
    with paused():
        return _plans(problem, schedule, list(range(problem.world)), staging_bytes)


def refusal(problem: Problem, schedule: Schedule) -> str:
    """Why a schedule cannot serve a Problem; empty if it can."""
    kind = problem.kind
    if (schedule.beta or schedule.grouping == "one-shot") and not kind.sums:
        what = schedule.grouping if schedule.grouping in ("ring", "one-shot") else "beta"
        return (
            f"schedule {schedule}: {what} is for operators that sum over ranks, which "
            f"{problem.operator} does not; leave it out"
        )
    return ""


def same_plans(problem: Problem, schedules: Iterable[Schedule]) -> dict[Schedule, Schedule]:
    """For every schedule, the first of them that leads to the same Plans.

    With one peer, for example, growing, shrinking and shard-overlap are the same steps.

    Raises:
        ValueError: as :func:`plan`.
    """
    by_first: dict[Plan, list[Schedule]] = {}
    found: dict[Schedule, Schedule] = {}
    for schedule in schedules:
        there = by_first.setdefault(_nameless(plan(problem, schedule, 0)), [])
        for other in there:  # usually none: most schedules differ in the plan of rank 0 already
            if _all_nameless(problem, schedule) == _all_nameless(problem, other):
                found[schedule] = other
                break
        else:
            there.append(schedule)
            found[schedule] = schedule
    return found


def _nameless(plan: Plan) -> Plan:
    return replace(plan, schedule="")


def _all_nameless(problem: Problem, schedule: Schedule) -> list[Plan]:
    return [_nameless(plan) for plan in plans(problem, schedule)]


def _plans(
    problem: Problem, schedule: Schedule, ranks: list[int], staging_bytes: int | None
) -> list[Plan]:
    if why := refusal(problem, schedule):
        raise ValueError(why)
    if schedule.mover == "collective" and problem.world > 1:
        return [_collective(problem, schedule, rank) for rank in ranks]
    if schedule.grouping == "one-shot":
        summed = OneShotWorld(problem, schedule)
        return [OneShot(summed, rank).build() for rank in ranks]
    if problem.kind.scatters:
        there = ScatterWorld(problem, schedule)
        return [Scatter(there, rank).build() for rank in ranks]
    world = GatherWorld(problem, schedule, staging_bytes)
    gather = InnerGather if problem.kind.inner else Gather
    return [gather(world, rank).build() for rank in ranks]


def _collective(problem: Problem, schedule: Schedule, rank: int) -> Plan:
    """The library's collective and one product: the baseline."""

    def whole(buffer: str, rows: int, cols: int) -> Region:
        return Region(buffer, rank, 0, rows, 0, cols)

    rows, n, k = problem.product_rows(rank), problem.n, problem.k
    a = whole("a", problem.left_rows(rank), k)
    out = whole("out", problem.out_rows(rank), n)
    made = out
    if not problem.kind.scatters:
        a, moved = whole("gathered", rows, k), Transfer(a, whole("gathered", rows, k))
    else:
        if not problem.kind.returns:  # else the library sums in place
            made = whole("partial", rows, n)
        moved = Transfer(made, out)
    product = Product(a, 0, problem.b_rows(rank), made, transposed=problem.kind.inner)
    steps = [
        Step("collective", "compute0", problem.kind.collective, transfer=moved),
        Step("matmul", "compute0", "all", products=(product,)),
    ]
    if problem.kind.scatters:
        steps.reverse()
    return Plan(problem, str(schedule), rank, tuple(steps), (0, 0), (0, 0), False, False, 0)
