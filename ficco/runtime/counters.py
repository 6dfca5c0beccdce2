"""Counts of calls by group and operator, and blocks within which each call must overlap.

Each cached kind of call has an :class:`Increment`, so a warm call adds two numbers and tests one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ficco.errors import NotOverlapped
from ficco.heuristics import Decision
from ficco.heuristics.candidates import is_serial
from ficco.heuristics.families import family_of
from ficco.plan import Plan
from ficco.schedules import Schedule


class CallCounts(NamedTuple):
    """Calls of an operator in a group, on this rank.

    Attributes:
        calls: all calls.
        overlapped: calls whose schedule overlaps, or that have nothing to hide: of one rank, or
            with an empty result.
        serial: the other calls by source of the decision (:class:`ficco.Decision`), and by
            ``"limits"`` where the engine or ``workspace_bytes`` ruled out the decision.
        left: collectives of PyTorch's that stayed, under their name. A graph's collectives count
            once, in the compile pass; collectives of a layer with its own kernel, or of a layer
            that an integration leaves to its client, at each call.
        hidden_s: seconds that serial would have taken longer, as the decisions measured or
            predicted it. Calls that were decided without times add nothing.
    """

    calls: int
    overlapped: int
    serial: dict[str, int]
    left: int
    hidden_s: float


@dataclass
class Sums:
    """Sums over the calls that have the same group, operator and source of a serial schedule."""

    calls: int = 0
    hidden_s: float = 0.0


class Increment(NamedTuple):
    """Addition of one call to ``sums``: the call, and ``hidden_s`` of its
    :class:`ficco.Decision`, 0 if it is unknown."""

    sums: Sums
    hidden_s: float = 0.0


#: Call, schedule, reason and remedy: arguments of the NotOverlapped of a call that hides nothing.
Exposure = tuple[str, str, str, str]


@dataclass(frozen=True, eq=False)
class Expectation:
    """A block of :func:`ficco.expect`; ``group`` is a name, or None for all groups."""

    overlapped: bool
    group: str | None


#: Open blocks, innermost last, of all threads, since autograd has threads of its own.
blocks: list[Expectation] = []

#: By name of the group, operator, and source: "" for overlapped calls, ``_LEFT`` for collectives.
_sums: dict[tuple[str, str, str], Sums] = {}
_LEFT = "left"

_REMEDIES = {
    "caller": "pass schedule='auto', or a schedule that overlaps",
    "fallback": "tune the machine, or pass a schedule that overlaps",
    "limits": "raise workspace_bytes, or pass a schedule that the engine has",
}


def account_of(
    group: str, plan: Plan, decision: Decision | None
) -> tuple[Increment, Exposure | None]:
    """The increment of a new kind of call, and its exposure; None if it hides communication.
    ``decision``: None if there was no choice."""
    problem, schedule, source, exposure = plan.problem, Schedule.parse(plan.schedule), "", None
    hidden_s = (decision and decision.schedule == schedule and decision.hidden_s) or 0.0
    exposes = is_serial(schedule) and problem.world > 1 and not family_of(problem).empty(problem)
    if decision and exposes:
        source, reason = decision.source, decision.why
        if decision.schedule != schedule:
            source, reason = "limits", f"in place of {decision.schedule}, {reason}"
        remedy = _REMEDIES.get(source, "pass a schedule that overlaps to take it nevertheless")
        exposure = str(problem), plan.schedule, reason, remedy
    sums = _sums.setdefault((group, problem.operator, source), Sums())
    return Increment(sums, hidden_s), exposure


def refuse(group: str, exposure: Exposure) -> None:
    """Raise ``NotOverlapped`` if the innermost open block of the group expects overlap."""
    wanted = (block.overlapped for block in reversed(blocks) if block.group in (None, group))
    if next(wanted, False):
        raise NotOverlapped(*exposure)


def refuse_collective(
    group: str, collective: str, reason: str, remedy: str = "see docs/compile.md"
) -> None:
    """As :func:`refuse`, for a collective of PyTorch's that stays."""
    refuse(group, (f"{collective} of group {group}", "collective", reason, remedy))


def count_collective(group: str, collective: str) -> None:
    """Count a collective of PyTorch's that stays."""
    _sums.setdefault((group, collective, _LEFT), Sums()).calls += 1


def stays(group: str, collective: str, reason: str, remedy: str = "see docs/compile.md") -> None:
    """Count an eager collective of PyTorch's, or refuse it. A compiler does not trace this: in
    graphs the compile pass sees collectives."""
    if not torch.compiler.is_compiling():
        refuse_collective(group, collective, reason, remedy)
        count_collective(group, collective)


@torch._disable_dynamo
def open_block(block: Expectation) -> None:
    """Open a block. A compiler would open and close it while it traces a function."""
    blocks.append(block)


def counters(*, reset: bool = False) -> dict[tuple[str, str], CallCounts]:
    """Return counts of this rank's calls by name of the group and operator::

        for (group, operator), counts in ficco.counters(reset=True).items():
            log({f"ficco/{operator}/{name}": n for name, n in counts._asdict().items()})

    A backward counts as the operators that it runs. A call that ``workspace_bytes`` divides counts
    as its parts, and a captured call once, however often its graph is replayed. Closed groups
    keep their counts. A warm call spends less than a microsecond on counting.

    Args:
        reset: count from zero afterwards.
    """
    by_source: dict[tuple[str, str], dict[str, Sums]] = {}
    for (group, operator, source), sums in list(_sums.items()):  # threads may add others
        if sums.calls:
            by_source.setdefault((group, operator), {})[source] = replace(sums)
        if reset:
            sums.calls, sums.hidden_s = 0, 0.0
    counts = {}
    for key, sources in by_source.items():
        hidden_s = sum(sums.hidden_s for sums in sources.values())
        serial = {source: sums.calls for source, sums in sources.items()}
        left, total, overlapped = serial.pop(_LEFT, 0), sum(serial.values()), serial.pop("", 0)
        counts[key] = CallCounts(total, overlapped, serial, left, hidden_s)
    return counts
