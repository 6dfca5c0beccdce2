"""The rule behind ``schedule="auto"``."""

from __future__ import annotations

from dataclasses import dataclass

from ficco.problem import Problem
from ficco.schedules import Schedule


@dataclass(frozen=True)
class Decision:
    """The schedule chosen, who chose it, and why.

    Attributes:
        schedule: the choice.
        source: ``"caller"`` or ``"rule"``.
        reason: in words.
    """

    schedule: Schedule
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.schedule} ({self.source}: {self.reason})"


def decide(problem: Problem, wanted: str | Schedule = "auto") -> Decision:
    """Choose the schedule; depends on the problem alone, so that every rank chooses the same."""
    if isinstance(wanted, Schedule):
        return Decision(wanted, "caller", "given")
    if wanted != "auto":
        return Decision(Schedule.parse(wanted), "caller", "given")
    if problem.world == 1:
        return Decision(Schedule.parse("serial"), "rule", "one rank has nothing to wait for")
    return Decision(Schedule.parse("growing"), "rule", "few, large products")
