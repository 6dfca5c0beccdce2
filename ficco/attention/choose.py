"""Which schedule attention takes: the fastest of a few, by simulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from ficco.attention.gradient import AttentionGradient
from ficco.attention.heads import HeadsProblem
from ficco.attention.heads_plans import heads_plans
from ficco.attention.plans import attention_plans
from ficco.attention.problem import AttentionProblem
from ficco.machine import Machine
from ficco.plan import Plan
from ficco.schedules import Schedule
from ficco.simulate import simulate

#: What is compared. Growing groups are few calls of a library; the others wait less for the first
#: or after the last piece.
CANDIDATES = (
    "growing",
    "growing:pull",
    "shard-overlap",
    "shard-overlap:pull",
    "hetero-fused-1d:pieces=2",
    "hetero-fused-1d:pieces=2,copy=4",
    "serial",
)
#: What is taken where no machine is known.
DEFAULT = "growing"

#: The same for attention by heads. More pieces are more calls of a library on fewer heads.
OF_HEADS = (
    "serial",
    *(f"uniform-fused-1d:pieces={pieces}" for pieces in (2, 4, 8)),
    *(f"uniform-fused-1d:pieces={pieces},copy=4" for pieces in (2, 4, 8)),
)
DEFAULT_OF_HEADS = "uniform-fused-1d:pieces=4"


class AttentionChoice(NamedTuple):
    """A schedule, why it, and the predicted seconds of all that were compared, the fastest
    first."""

    schedule: Schedule
    reason: str
    predicted: tuple[tuple[str, float], ...] = ()


@lru_cache(maxsize=256)
def choose(
    problem: AttentionProblem | AttentionGradient, machine: Machine | None, mode: str = "queued"
) -> AttentionChoice:
    """The schedule for a problem on a machine; ``mode`` as of :func:`ficco.simulate.simulate`."""

    def plans(schedule: Schedule) -> list[Plan]:
        return attention_plans(problem, schedule)

    return _fastest(plans, CANDIDATES, DEFAULT, machine if problem.world > 1 else None, mode)


@lru_cache(maxsize=256)
def choose_for_heads(
    problem: HeadsProblem, machine: Machine | None, mode: str = "queued"
) -> AttentionChoice:
    """The same for attention by heads."""

    def plans(schedule: Schedule) -> list[Plan]:
        return heads_plans(problem, schedule)

    return _fastest(plans, OF_HEADS, DEFAULT_OF_HEADS, machine if problem.world > 1 else None, mode)


def _fastest(
    plans: Callable[[Schedule], list[Plan]],
    candidates: tuple[str, ...],
    default: str,
    machine: Machine | None,
    mode: str,
) -> AttentionChoice:
    if machine is None:
        return AttentionChoice(Schedule.parse(default), "no machine description, or one rank")
    try:
        seconds = {
            name: simulate(plans(Schedule.parse(name)), machine, mode).stop_s for name in candidates
        }
    except ValueError as error:  # of a machine that lacks a block
        return AttentionChoice(Schedule.parse(default), str(error))
    best = sorted(seconds, key=seconds.__getitem__)
    reason = f"fastest of {len(best)} in simulation on {machine.name}: {seconds[best[0]]:.3g} s"
    return AttentionChoice(
        Schedule.parse(best[0]), reason, tuple((name, seconds[name]) for name in best)
    )
