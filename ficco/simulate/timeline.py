"""Timelines: when the steps of a call run on each lane, as data.

A Timeline comes from the Plans of all ranks and a Machine (:mod:`ficco.simulate`) or from the Spans
of a timed call (:mod:`ficco.tools.bench.harness`). In both, a wait is the time on a lane between
the end of the previous step and the start of the step that had to wait.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ficco.errors import ConfigError
from ficco.plan import OPS, Applied, Attendings, Crossing, LibraryMove, Plan
from ficco.plan.model import Products, Reduction, Step, Transfer, unknown
from ficco.problems.mask import BACKWARD_PRODUCTS, FORWARD_PRODUCTS

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
    """One step, or one wait, on a lane. Times are seconds after the call began on its rank.

    Attributes:
        way: of a copy, ``"send"`` to a peer or ``"receive"`` from one; empty for all else.
    """

    lane: str
    label: str
    kind: str
    start_s: float
    stop_s: float
    way: str = ""


@dataclass(frozen=True)
class Timeline:
    """The bars of every rank, in the order of their start.

    Attributes:
        title: title of the picture, such as the schedule.
        problem: the problem; empty in files of earlier versions.
        source: simulator or engine, with the machine; empty in files of earlier versions.
    """

    title: str
    ranks: tuple[tuple[Bar, ...], ...]
    problem: str = ""
    source: str = ""

    @property
    def stop_s(self) -> float:
        """End of the last lane but ``sync``, when the callers' streams of all ranks go on."""
        bars = (bar for bars in self.ranks for bar in bars if bar.lane != SYNC_LANE)
        return max((bar.stop_s for bar in bars), default=0.0)


def work(plan: Plan, step: Step) -> tuple[float, float]:
    """Floating-point operations and bytes of a step. A sum counts the bytes that it reads and
    writes; a collective counts the bytes that the rank receives."""
    flops, nbytes = 0.0, 0
    match step.work:
        case Products(products):
            flops = sum(2.0 * p.batch * p.out.elements * p.b.rows for p in products)
        case Attendings(attends):
            for one in attends:
                per_pair = FORWARD_PRODUCTS if one.back is None else BACKWARD_PRODUCTS
                flops += 2.0 * per_pair * one.pairs * one.q.cols
        case Applied() as applied:
            flops = applied.flops
        case Transfer() as move:
            nbytes = plan.moved_bytes(move)
        case Crossing(moves):
            nbytes = sum(plan.moved_bytes(move) for move in moves if move.src.rank == plan.rank)
        case Reduction(parts, _, out):
            nbytes = sum(map(plan.nbytes, (*parts, out)))
        case LibraryMove(src):
            exchange, rank = plan.problem.specification.exchange, plan.rank
            peers = [peer for peer in range(plan.problem.world) if peer != rank]
            rows = sum(exchange.by_collective(peer, rank) for peer in peers)
            if step.label == "all-reduce":  # the sums of other ranks come back
                rows += sum(exchange.by_collective(rank, peer) for peer in peers)
            nbytes = plan.nbytes(src._replace(row=0, row_stop=rows))
    return flops, float(nbytes)


def assemble(
    title: str,
    plans: Sequence[Plan],
    ranks: Sequence[Sequence[tuple[Step, float, float]]],
    source: str = "",
) -> Timeline:
    """The Timeline of every rank's steps, each with its start and stop, in the order of starts."""
    whole = max((stop for steps in ranks for _, _, stop in steps), default=0.0)
    ranks_bars = []
    for plan, steps in zip(plans, ranks, strict=True):
        bars: list[Bar] = []
        stops: dict[str, float] = {}  # of each lane's previous step
        for step, start, stop in steps:
            if step.op not in OPS:
                raise unknown(step, "a timeline")
            since = stops.get(step.lane, 0.0)
            if (step.waits or step.after) and start - since > SHORT_WAIT * whole:
                bars.append(Bar(step.lane, f"wait: {step.label}", "wait", since, start))
            bars.append(Bar(step.lane, step.label, step.op, start, stop, _way(plan, step)))
            stops[step.lane] = stop
        ranks_bars.append(tuple(bars))
    return Timeline(title, tuple(ranks_bars), str(plans[0].problem), source)


def _way(plan: Plan, step: Step) -> str:
    if (move := step.copy) is None:
        return ""
    return "send" if move.src.rank == plan.rank else "receive"


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
            Timeline(
                str(one["title"]),
                tuple(tuple(map(_bar, bars)) for bars in one["ranks"]),
                str(one.get("problem", "")),
                str(one.get("source", "")),
            )
            for one in data["timelines"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        expected = f"required titles and bars as ficco writes them: {error!r}"
        raise ConfigError(source, "timelines", expected) from None


def _bar(data: dict[str, Any]) -> Bar:
    lane, label, kind = (str(data[name]) for name in ("lane", "label", "kind"))
    kind = OLD_KINDS.get(kind, kind)
    times = float(data["start_s"]), float(data["stop_s"])
    bar = Bar(lane, label, kind, *times, str(data.get("way", "")))
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    return bar
