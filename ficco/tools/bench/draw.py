"""Style and colours of all pictures; Timelines as pictures and as traces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ficco.simulate.timeline import Bar, Timeline

if TYPE_CHECKING:
    import pandas as pd

BLUE, LIGHT, ORANGE, SAND = "#2a5d8f", "#6f9fca", "#e08a1e", "#f0c48a"
GREEN, PURPLE, GREY, BLACK = "#7a9a3a", "#a05a8a", "#b8b8b8", "#333333"

STYLE = {
    "figure.titlesize": 9,
    **dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize"), 8),
    **dict.fromkeys(("legend.fontsize", "legend.title_fontsize"), 7),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 7),
    "lines.linewidth": 1,
    "lines.markersize": 4,
}


@contextmanager
def picture(path: Path, width: float, height: float, title: str = "") -> Iterator[Any]:
    """A figure of ``width`` x ``height`` inches, saved on exit; the suffix of ``path`` is the
    format."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        if title:
            figure.suptitle(title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)


def bars(
    panels: Mapping[str, pd.DataFrame], path: Path, title: str, bound: float | None = None
) -> Path:
    """Draw a panel for each frame: a group of bars for each row, and in the group a bar for each
    column. The suffix of ``path`` is the format.

    Args:
        panels: frames by title. Missing figures have no bar.
        bound: a dashed line that the legend calls ideal.
    """
    heights = [frame.size + 2 for frame in panels.values()]
    with picture(path, 8, 0.17 * sum(heights) + 0.6, title) as figure:
        split = {"height_ratios": heights}
        grid = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw=split)[:, 0]
        for axes, (heading, frame) in zip(grid, panels.items(), strict=True):
            colours = [BLUE, LIGHT, ORANGE, SAND][: frame.shape[1]]
            frame.plot.barh(ax=axes, width=0.8, color=colours, legend=False, ylabel="")
            for drawn, values in zip(axes.containers, frame.values.T, strict=True):
                labels = ["" if value != value else f"{value:.3g}" for value in values]
                axes.bar_label(drawn, labels, padding=2)
            axes.invert_yaxis()
            axes.margins(x=0.12)
            axes.set_title(heading, loc="left")
            if bound is not None:
                axes.axvline(bound, color=BLACK, linewidth=1, linestyle="--", label="ideal")
            if bound is not None or frame.shape[1] > 1:
                axes.legend(loc="upper right")
    return path


#: Colours of the kinds of bars; dark, middle and light, for readers who cannot see hues.
COLOURS = {
    **dict.fromkeys(("matmul", "attend", "apply", "call"), BLUE),
    **dict.fromkeys(("copy", "send"), ORANGE),
    "receive": SAND,
    **dict.fromkeys(("collective", "network"), PURPLE),
    "place": GREEN,
    "reduce": "#4f7a5a",
    "wait": "#dddddd",
}


def draw(
    timelines: Sequence[Timeline],
    path: str | Path,
    columns: int = 1,
    ranks: Sequence[int] | None = None,
    note: str = "",
) -> Path:
    """Draw Timelines in a grid, lanes as rows; the suffix of ``path`` is the format.

    Args:
        timelines: row by row of the grid; one without ranks leaves its place free.
        path: the picture.
        columns: Timelines side by side, for example the planned and the measured one.
        ranks: the ranks to show; None for all.
        note: a line below the title.

    The title of the picture has the shared problem and source; titles of panels have those that
    differ. All panels have one scale, shown once per column. Times are of the ranks shown.
    """
    from matplotlib.patches import Patch

    if ranks is not None:
        timelines = [
            replace(one, ranks=tuple(bars * (rank in ranks) for rank, bars in enumerate(one.ranks)))
            for one in timelines
        ]
    lanes = [
        [(rank, lane) for rank, bars in enumerate(one.ranks) for lane in _lanes(bars)]
        for one in timelines
    ]
    rows = -(-len(timelines) // columns)
    heights = [
        max(len(names) for names in lanes[i * columns : (i + 1) * columns]) for i in range(rows)
    ]
    bars = [bar for timeline in timelines for bars in timeline.ranks for bar in bars]
    shown_kinds = {bar.way or bar.kind for bar in bars}
    until_s = max((one.stop_s for one in timelines), default=0.0)
    problems, sources = (
        list(dict.fromkeys(getattr(one, name) for one in timelines if one.ranks))
        for name in ("problem", "source")
    )
    world = max((len(one.ranks) for one in timelines), default=0)
    shown = "" if ranks is None else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    of_all = [*problems[:1], shown and f"{shown} of {world}"] if len(problems) < 2 else [shown]
    shared = len(sources) < 3 and "" not in sources
    title = [", ".join(filter(None, of_all)), *(sources if shared else ()), note]
    kinds = [Patch(color=COLOURS[kind], label=kind) for kind in COLOURS if kind in shown_kinds]
    size = max(7.0, 6.5 * columns), sum(0.24 * h + 0.5 for h in heights) + 1.0
    path = Path(path)
    with picture(path, *size, "\n".join(filter(None, title))) as figure:
        ratios = {"height_ratios": [height + 1.5 for height in heights]}
        grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw=ratios)
        for axes in grid.flat[len(timelines) :]:
            axes.set_axis_off()
        for i, (axes, timeline, names) in enumerate(zip(grid.flat, timelines, lanes, strict=False)):
            if not names:
                axes.set_axis_off()
                continue
            own = [timeline.problem] * (len(problems) > 1)
            own += [timeline.source] * (not shared)
            last = i + columns >= len(timelines)
            _draw_one(axes, timeline, names, until_s, ", ".join(filter(None, own)), last)
        figure.legend(
            handles=kinds, loc="outside lower center", ncols=max(len(kinds), 1), frameon=False
        )
    return path


def _lanes(bars: Iterable[Bar]) -> list[str]:
    """Lanes of a rank, those that compute first."""
    lanes = {bar.lane for bar in bars if bar.kind not in ("sync", "wait")}
    return sorted(lanes, key=lambda lane: (not lane.startswith("compute"), lane))


def _draw_one(
    axes: Any,
    timeline: Timeline,
    names: Sequence[tuple[int, str]],
    until_s: float,
    about: str,
    last: bool,
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
                color=COLOURS[bar.way or bar.kind],
                edgecolor="white",
                linewidth=0.4,
            )
    one_rank = len({rank for rank, _ in names}) == 1
    labels = [lane if one_rank else f"rank {rank} {lane}" for rank, lane in names]
    axes.set_yticks(range(len(names)), labels)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set(xlim=(0, max(until_s * scale, 1e-9)), axisbelow=True)
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(labelbottom=last)
    title = f"{timeline.title} ({timeline.stop_s * scale:.3g} {unit})"
    axes.set_title("\n".join(filter(None, (title, about))), loc="left")
    if last:
        axes.set_xlabel(f"time after the call began on the rank [{unit}]")


def trace(timelines: Sequence[Timeline], path: str | Path) -> Path:
    """Write Timelines as a trace file for Perfetto or ``chrome://tracing``."""
    events: list[dict[str, Any]] = []
    ranks = [(one.title, *rank) for one in timelines for rank in enumerate(one.ranks)]
    for process, (title, rank, bars) in enumerate(ranks, 1):
        meta = {"ph": "M", "pid": process}
        name = {"name": f"{title} rank {rank}"}
        events.append({**meta, "name": "process_name", "args": name})
        threads = {lane: i for i, lane in enumerate(dict.fromkeys(bar.lane for bar in bars))}
        for lane, thread in threads.items():
            events.append({**meta, "tid": thread, "name": "thread_name", "args": {"name": lane}})
        for bar in bars:
            start, stop = bar.start_s * 1e6, bar.stop_s * 1e6  # microseconds, by the format
            name = f"{bar.way} {bar.label}".strip()
            event = {"ph": "X", "pid": process, "tid": threads[bar.lane], "name": name}
            events.append({**event, "cat": bar.kind, "ts": start, "dur": stop - start})
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path
