"""Which schedule attention takes: the fastest of a few, by simulation."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ficco.attention.gradient import AttentionGradient
from ficco.attention.plans import attention_plans
from ficco.attention.problem import AttentionProblem
from ficco.machine import Machine
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
    if machine is None or problem.world == 1:
        why = "no machine description" if machine is None else "one rank"
        return AttentionChoice(Schedule.parse(DEFAULT), why)
    try:
        seconds = {
            name: simulate(attention_plans(problem, Schedule.parse(name)), machine, mode).stop_s
            for name in CANDIDATES
        }
    except ValueError as error:  # of a machine that lacks a block
        return AttentionChoice(Schedule.parse(DEFAULT), str(error))
    best = sorted(seconds, key=seconds.__getitem__)
    reason = f"fastest of {len(best)} in simulation on {machine.name}: {seconds[best[0]]:.3g} s"
    return AttentionChoice(
        Schedule.parse(best[0]), reason, tuple((name, seconds[name]) for name in best)
    )
