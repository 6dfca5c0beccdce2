"""Schedules of one's own: functions that make Plans, by names that stand where a schedule's does.

A Plan is proven (:func:`ficco.plan.check`), with those of all other ranks, before a problem is
first predicted or run with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from ficco.plan.collector import paused
from ficco.plan.model import Plan
from ficco.problems.products import Problem
from ficco.schedules.space import KNOBS, NAMED, OWN, Schedule

#: Makes the Plan of a rank; ``ValueError`` for a problem that it does not serve.
PlanFunction = Callable[[Problem, int], Plan]


def register(name: str, *, candidate: bool = False) -> Callable[[PlanFunction], PlanFunction]:
    """Register a schedule of one's own, as a decorator of the function that makes its Plans.

    All ranks register the same. The gradients of its calls take ``"auto"``.

    Args:
        name: name of the schedule, used like names of other schedules: letters, digits, ``-`` and
            ``_``.
        candidate: ``auto`` compares it where the machine is described, and takes it where it is
            predicted to be fastest.

    Raises:
        ValueError: the name cannot be one, or is taken.

    Example::

        @ficco.schedules.register("two-halves")
        def two_halves(problem, rank):
            ...
            return builder.plan("two-halves", buffers, words)
    """
    if not name or not name.replace("-", "").replace("_", "").isalnum() or name == "auto":
        raise ValueError(f"name: required letters, digits, - and _, other than auto, got {name!r}")
    if name in NAMED or any(name == knob.axis for knob in KNOBS):
        raise ValueError(f"name: required one that ficco does not use, got {name!r}")

    def add(function: PlanFunction) -> PlanFunction:
        if OWN.setdefault(name, function) is not function:
            raise ValueError(f"name: required one that is not registered yet, got {name!r}")
        if candidate:
            _candidates[name] = None
        return function

    return add


_candidates: dict[str, None] = {}


def own_candidates() -> tuple[str, ...]:
    """Names of registered schedules that ``auto`` compares."""
    return tuple(_candidates)


@lru_cache(maxsize=256)
def own_plans(problem: Problem, schedule: Schedule) -> tuple[Plan, ...]:
    """The Plans of all ranks, proven.

    Raises:
        ValueError: the function does not serve the problem, or its Plans are wrong: the text is
            that of the proof.
    """
    from ficco.proof import PlanError, check  # importing ficco need not load the proof

    name, plans = schedule.own, []
    for rank in range(problem.world):
        plan = OWN[name](problem, rank)
        if not isinstance(plan, Plan) or plan.problem != problem or plan.rank != rank:
            raise ValueError(
                f"schedule {name}: required the Plan of rank {rank} for {problem}, got {plan!r:.80}"
            )
        plans.append(replace(plan, schedule=name))
    try:
        with paused():
            check(plans)
    except PlanError as error:
        raise ValueError(f"schedule {name}: its plans for {problem} are wrong: {error}") from error
    return tuple(plans)
