"""Timelines: when the steps of a call run on each lane, as data.

A Timeline comes from the Plans of all ranks and a Machine (:mod:`ficco.simulate`) or from the Spans
of a traced call (:mod:`ficco.bench.traces`). In both, a wait is the time on a lane between the end
of the previous step and the start of the step that had to wait.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ficco.errors import ConfigError
from ficco.plan import OPS, Plan, Step, unknown
from ficco.problem import Problem

#: Kinds of bars: the operations of steps, and ``"wait"``.
KINDS = (*OPS, "wait")

#: Names of kinds in files of earlier versions.
OLD_KINDS = {"gather": "collective"}

#: The lane for signals to peers at the end of a call; the caller's stream does not wait for it.
SYNC_LANE = "sync"

#: Waits shorter than this fraction of the whole call are left out, as clock noise.
SHORT_WAIT = 0.002

#: The format that a file of Timelines states.
FORMAT = "ficco-timelines-1"


@dataclass(frozen=True)
class Bar:
    """One step, or one wait, on a lane. Times are seconds after the call began on its rank."""

    lane: str
    label: str
    kind: str
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Timeline:
    """The bars of every rank, in the order of their start."""

    title: str
    ranks: tuple[tuple[Bar, ...], ...]

    @property
    def stop_s(self) -> float:
        """When the callers' streams of all ranks go on: the end of the last lane but ``sync``."""
        return max((bar.stop_s for bars in self.ranks for bar in bars if _counts(bar)), default=0.0)


def _counts(bar: Bar) -> bool:
    return bar.lane != SYNC_LANE


def work(plan: Plan, step: Step) -> tuple[float, float]:
    """Floating-point operations of a step, and the bytes that it moves, or reads and writes for a
    sum."""
    flops = sum(2.0 * p.batch * p.out.elements * p.b.rows for p in step.products)
    if step.op == "collective":
        return flops, float(_received(plan, step))
    moved = plan.nbytes(step.transfer.src) if step.transfer else 0
    if step.reduction:  # all bytes that are read and written
        moved = sum(map(plan.nbytes, (*step.reduction.parts, step.reduction.out)))
    return flops, float(moved)


def _received(plan: Plan, step: Step) -> int:
    """Bytes that a collective brings to a rank from all others."""
    problem, rank = plan.problem, plan.rank
    assert isinstance(problem, Problem) and step.transfer is not None
    peers = [peer for peer in range(problem.world) if peer != rank]
    rows = sum(problem.block(peer, rank) for peer in peers)
    if problem.kind.returns:
        rows += sum(problem.rows[peer] for peer in peers)
    return plan.nbytes(step.transfer.src._replace(row=0, row_stop=rows))


def assemble(title: str, ranks: Sequence[Sequence[tuple[Step, float, float]]]) -> Timeline:
    """The Timeline of every rank's steps, each with its start and stop, in the order of starts."""
    whole = max((stop for steps in ranks for _, _, stop in steps), default=0.0)
    found = []
    for steps in ranks:
        bars: list[Bar] = []
        before: dict[str, float] = {}
        for step, start, stop in steps:
            if step.op not in OPS:
                raise unknown(step, "a timeline")
            since = before.get(step.lane, 0.0)
            if (step.waits or step.after) and start - since > SHORT_WAIT * whole:
                bars.append(Bar(step.lane, f"wait: {step.label}", "wait", since, start))
            bars.append(Bar(step.lane, step.label, step.op, start, stop))
            before[step.lane] = stop
        found.append(tuple(bars))
    return Timeline(title, tuple(found))


def dumps(timelines: Sequence[Timeline]) -> str:
    """Timelines as JSON."""
    return json.dumps({"format": FORMAT, "timelines": [asdict(one) for one in timelines]})


def loads(text: str, source: str) -> list[Timeline]:
    """Timelines from JSON; ``source`` is the file that errors name.

    Raises:
        ConfigError: the text is not what :func:`dumps` writes.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(source, "file", f"required JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ConfigError(source, "format", f"required {FORMAT!r}, got {got!r}")
    try:
        return [
            Timeline(str(one["title"]), tuple(tuple(map(_bar, bars)) for bars in one["ranks"]))
            for one in data["timelines"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        expected = f"required titles and bars as ficco writes them: {error!r}"
        raise ConfigError(source, "timelines", expected) from None


def _bar(found: dict[str, Any]) -> Bar:
    bar = Bar(
        str(found["lane"]),
        str(found["label"]),
        OLD_KINDS.get(str(found["kind"]), str(found["kind"])),
        float(found["start_s"]),
        float(found["stop_s"]),
    )
    if bar.kind not in KINDS:
        raise ValueError(f"kind {bar.kind!r} is none of {', '.join(KINDS)}")
    return bar
