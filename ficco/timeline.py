"""When the steps of a call run, lane by lane: as planned, as measured, as a picture, as a trace.

A Timeline comes from the Plans of all ranks and a cost per step (:func:`planned`) or from the
Spans of a traced call (:func:`measured`). Both show a wait as the time between the step before on
the lane and the step that had to wait.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ficco.plan import Plan, Signal, Step

if TYPE_CHECKING:
    from ficco.dma.engine import Span

#: Colours of the kinds of bars, also where hues are hard to tell apart: dark, middle, light.
COLOURS = {
    "matmul": "#2a5d8f",
    "copy": "#e08a1e",
    "gather": "#a05a8a",
    "place": "#7a9a3a",
    "wait": "#dddddd",
}

#: Waits shorter than this part of the whole call are left out, as noise of the clock.
SHORT_WAIT = 0.002

Cost = Callable[[Plan, Step], float]


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
        """When the last bar of any rank ends."""
        return max((bar.stop_s for bars in self.ranks for bar in bars), default=0.0)


@dataclass(frozen=True)
class Rates:
    """What a step costs on paper. The defaults are rounded from one H200 of four on a switch.

    Attributes:
        flops: floating-point operations per second of a library GEMM.
        link_bytes: bytes per second into one rank, and out of it.
        place_bytes: bytes per second of a copy within a rank.
        start_s: seconds before the first byte of a copy, or the first tile of a product.
    """

    flops: float = 7e14
    link_bytes: float = 3.8e11
    place_bytes: float = 2e12
    start_s: float = 1e-5

    def __call__(self, plan: Plan, step: Step) -> float:
        """Seconds that a step takes once it runs."""
        flops, moved = work(plan, step)
        if step.op == "matmul":
            return self.start_s * len(step.products) + flops / self.flops
        if step.op in ("copy", "gather", "place"):
            rate = self.place_bytes if step.op == "place" else self.link_bytes
            return self.start_s + moved / rate
        return 0.0

    @classmethod
    def of(cls, plans: Sequence[Plan], timeline: Timeline) -> Rates:
        """Rates at which the steps of a measured call ran, in the mean."""
        spent: dict[str, float] = defaultdict(float)
        done: dict[str, float] = defaultdict(float)
        for bar in (bar for bars in timeline.ranks for bar in bars):
            spent["copy" if bar.kind == "gather" else bar.kind] += bar.stop_s - bar.start_s
        for plan in plans:
            for step in plan.steps:
                done["copy" if step.op == "gather" else step.op] += max(work(plan, step))
        default = cls()
        return cls(
            flops=done["matmul"] / spent["matmul"] if spent["matmul"] else default.flops,
            link_bytes=done["copy"] / spent["copy"] if spent["copy"] else default.link_bytes,
            place_bytes=done["place"] / spent["place"] if spent["place"] else default.place_bytes,
            start_s=0.0,
        )


def work(plan: Plan, step: Step) -> tuple[float, float]:
    """Floating-point operations of a step, and the bytes that it brings."""
    flops = sum(2.0 * p.batch * p.out.elements * (p.k_last - p.k_first) for p in step.products)
    moved = step.transfer.src.elements if step.transfer else 0
    if step.op == "gather" and step.transfer:  # all shards but the rank's own
        moved = step.transfer.dst.elements - moved
    return flops, float(moved * plan.problem.itemsize)


def measured(title: str, plans: Sequence[Plan], spans: Sequence[Sequence[Span]]) -> Timeline:
    """The Timeline of a traced call: a Plan and its Spans for every rank."""
    ranks = []
    for plan, found in zip(plans, spans, strict=True):
        in_order = sorted(found, key=lambda span: span.start)
        ranks.append([(plan.steps[span.step], span.start, span.stop) for span in in_order])
    return _timeline(title, ranks)


def planned(title: str, plans: Sequence[Plan], cost: Cost) -> Timeline:
    """The Plans of all ranks, every step as soon as it can run.

    A rank has one port out and one port in, and a copy takes both of its ends for as long as it
    lasts; copies that are ready at the same time go in enqueue order. A collective takes both ports
    of its rank, and waits for no other.

    Raises:
        ValueError: the plans wait for each other for ever.
    """
    lanes = [(plan.rank, lane) for plan in plans for lane in plan.lanes]
    queues = {
        (rank, lane): [i for i, step in enumerate(plans[rank].steps) if step.lane == lane]
        for rank, lane in lanes
    }
    head = dict.fromkeys(lanes, 0)
    free = dict.fromkeys(lanes, 0.0)
    ports: dict[tuple[str, int], float] = {}
    posted: dict[Signal, float] = {}
    done: list[dict[int, float]] = [{} for _ in plans]
    ranks: list[list[tuple[Step, float, float]]] = [[] for _ in plans]

    def ready(rank: int, lane: str) -> tuple[float, int, int] | None:
        """When the next step of a lane can start; None while that is not known."""
        queue = queues[rank, lane]
        if head[rank, lane] == len(queue):
            return None
        index = queue[head[rank, lane]]
        step = plans[rank].steps[index]
        times = [free[rank, lane]]
        for signal in step.waits:
            if not signal.released:
                if signal not in posted:
                    return None
                times.append(posted[signal])
        for earlier in step.after:
            if earlier not in done[rank]:
                return None
            times.append(done[rank][earlier])
        times += [ports.get(port, 0.0) for port in _ports(step)]
        return max(times), index, rank

    left = sum(len(plan.steps) for plan in plans)
    while left:
        able = [(found, lane) for lane in lanes if (found := ready(*lane)) is not None]
        if not able:
            raise ValueError("the plans wait for each other for ever")
        (start, index, rank), lane = min(able)
        step = plans[rank].steps[index]
        stop = start + cost(plans[rank], step)
        free[lane] = done[rank][index] = stop
        ports.update(dict.fromkeys(_ports(step), stop))
        posted.update(dict.fromkeys(step.posts, stop))
        ranks[rank].append((step, start, stop))
        head[lane] += 1
        left -= 1
    return _timeline(title, ranks)


def _ports(step: Step) -> Iterator[tuple[str, int]]:
    if step.op in ("copy", "gather") and step.transfer:
        yield "out", step.transfer.src.rank
        yield "in", step.transfer.dst.rank


def _timeline(title: str, ranks: Sequence[Sequence[tuple[Step, float, float]]]) -> Timeline:
    whole = max((stop for steps in ranks for _, _, stop in steps), default=0.0)
    found = []
    for steps in ranks:
        bars: list[Bar] = []
        before: dict[str, float] = {}
        for step, start, stop in steps:
            since = before.get(step.lane, 0.0)
            if (step.waits or step.after) and start - since > SHORT_WAIT * whole:
                bars.append(Bar(step.lane, f"wait: {step.label}", "wait", since, start))
            bars.append(Bar(step.lane, step.label, step.op, start, stop))
            before[step.lane] = stop
        found.append(tuple(bars))
    return Timeline(title, tuple(found))


def draw(
    timelines: Sequence[Timeline],
    path: str | Path,
    columns: int = 1,
    ranks: Sequence[int] | None = None,
    note: str = "",
) -> Path:
    """Draw Timelines in a grid, lanes as rows; the suffix of ``path`` is the format.

    Args:
        timelines: row by row of the grid.
        path: the picture.
        columns: Timelines side by side, for example the planned and the measured one.
        ranks: the ranks to show; None for all.
        note: a line above the grid.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = [range(len(t.ranks)) if ranks is None else ranks for t in timelines]
    lanes = [
        [(r, lane) for r in rs for lane in _lanes(t.ranks[r])]
        for t, rs in zip(timelines, shown, strict=True)
    ]
    rows = -(-len(timelines) // columns)
    heights = [
        max(len(names) for names in lanes[i * columns : (i + 1) * columns]) for i in range(rows)
    ]
    figure = Figure(
        figsize=(max(7.0, 6.5 * columns), sum(0.24 * h + 0.75 for h in heights) + 0.8),
        layout="constrained",
    )
    grid = figure.subplots(
        rows, columns, squeeze=False, gridspec_kw={"height_ratios": [h + 1.5 for h in heights]}
    )
    for axes in grid.flat[len(timelines) :]:
        axes.set_axis_off()
    for i, (timeline, names) in enumerate(zip(timelines, lanes, strict=True)):
        row = i // columns
        beside = timelines[row * columns : (row + 1) * columns]
        _draw_one(grid.flat[i], timeline, names, max(t.stop_s for t in beside))
    there = {bar.kind for timeline in timelines for bars in timeline.ranks for bar in bars}
    kinds = [kind for kind in COLOURS if kind in there]
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=kind) for kind in kinds],
        loc="outside lower center",
        ncols=len(kinds),
        frameon=False,
    )
    if note:
        figure.suptitle(note, fontsize=10)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _lanes(bars: Sequence[Bar]) -> list[str]:
    """Lanes that copy or compute, compute first."""
    seen = {bar.lane for bar in bars if bar.kind not in ("sync", "wait")}
    return sorted(seen, key=lambda lane: (not lane.startswith("compute"), lane))


def _draw_one(
    axes: Any, timeline: Timeline, names: Sequence[tuple[int, str]], until_s: float
) -> None:
    scale, unit = (1e3, "ms") if until_s >= 1e-3 else (1e6, "us")
    row_of = {name: i for i, name in enumerate(names)}
    for rank, bars in enumerate(timeline.ranks):
        for bar in bars:
            row = row_of.get((rank, bar.lane))
            if row is None or bar.kind == "sync":
                continue
            axes.barh(
                row,
                (bar.stop_s - bar.start_s) * scale,
                left=bar.start_s * scale,
                height=0.5 if bar.kind == "wait" else 0.85,
                color=COLOURS[bar.kind],
                edgecolor="white",
                linewidth=0.4,
            )
    one_rank = len({rank for rank, _ in names}) == 1
    axes.set_yticks(
        range(len(names)),
        [lane if one_rank else f"rank {rank} {lane}" for rank, lane in names],
        fontsize=7,
    )
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, max(until_s * scale, 1e-9))
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(
        f"{timeline.title} ({timeline.stop_s * scale:.3g} {unit})", fontsize=8, loc="left"
    )


def trace(timelines: Sequence[Timeline], path: str | Path) -> Path:
    """Write Timelines as a trace file for Perfetto or ``chrome://tracing``."""
    events: list[dict[str, Any]] = []
    process = 0
    for timeline in timelines:
        for rank, bars in enumerate(timeline.ranks):
            process += 1
            name = {"name": f"{timeline.title} rank {rank}"}
            events.append({"ph": "M", "pid": process, "name": "process_name", "args": name})
            threads = {lane: i for i, lane in enumerate(dict.fromkeys(bar.lane for bar in bars))}
            for lane, thread in threads.items():
                meta = {"ph": "M", "pid": process, "tid": thread, "name": "thread_name"}
                events.append({**meta, "args": {"name": lane}})
            for bar in bars:
                events.append(
                    {
                        "ph": "X",
                        "pid": process,
                        "tid": threads[bar.lane],
                        "name": bar.label,
                        "cat": bar.kind,
                        "ts": bar.start_s * 1e6,  # microseconds, by the format
                        "dur": (bar.stop_s - bar.start_s) * 1e6,
                    }
                )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path
