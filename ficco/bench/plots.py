"""Pictures of a bench, from its rows alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ficco.bench.lines import Line, lines, mean_and_worst, modes
from ficco.bench.table import Row, operators

Pick = Callable[[Line], Row | None]

#: What the first picture compares: name, row, colour.
SHARES: tuple[tuple[str, Pick, str], ...] = (
    ("serial", lambda line: line.serial, "#b8b8b8"),
    ("PyTorch fused op", lambda line: line.pytorch, "#e08a1e"),
    ("shard overlap", lambda line: line.overlap, "#7a9a3a"),
    ("ficco, best schedule", lambda line: line.best, "#2a5d8f"),
)

#: What the second picture draws over the balance of GEMM and communication.
CURVES: tuple[tuple[str, Pick, str], ...] = (
    ("ideal", lambda line: line.ideal, "#333333"),
    ("shard overlap", lambda line: line.overlap, "#7a9a3a"),
    ("ficco, best schedule", lambda line: line.best, "#2a5d8f"),
)

#: Of what the second picture shows geometric means.
MEANS: tuple[tuple[str, Pick, str], ...] = (
    ("ideal", lambda line: line.ideal, "#333333"),
    ("shard\noverlap", lambda line: line.overlap, "#7a9a3a"),
    ("ficco\n1D", lambda line: line.best_1d, "#2a5d8f"),
    ("ficco\n2D", lambda line: line.best_2d, "#6f9fca"),
    ("ficco-\nrccl", lambda line: line.pieces, "#a05a8a"),
    ("PyTorch\nfused op", lambda line: line.pytorch, "#e08a1e"),
)


def draw(rows: Sequence[Row], stem: Path, title: str) -> list[Path]:
    """Draw all pictures to files that begin with ``stem``, those of several operators one by one;
    returns them."""
    there = operators(rows)
    if len(there) > 1:
        return [
            path
            for operator in there
            for path in draw(
                [row for row in rows if row.operator == operator],
                stem.with_name(f"{stem.name}_{operator}"),
                f"{title}, {operator}",
            )
        ]
    found = [mode for mode in modes(rows) if lines(rows, mode)]
    if not found:
        return []
    stem.parent.mkdir(parents=True, exist_ok=True)
    share = stem.with_name(stem.name + "_share.png")
    speedup = stem.with_name(stem.name + "_speedup.png")
    shares(rows, found, share, title)
    speedups(rows, found, speedup, title)
    return [share, speedup]


def shares(rows: Sequence[Row], found: Sequence[str], path: Path, title: str) -> None:
    """Share of the ideal by shape, a panel per mode."""
    from matplotlib.figure import Figure

    widest = max(len(lines(rows, mode)) for mode in found)
    figure = Figure(
        figsize=(max(6.0, 1.3 * widest + 2), 2.9 * len(found) + 0.6), layout="constrained"
    )
    panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for axes, mode in zip(panels, found, strict=True):
        there = lines(rows, mode)
        width = 0.8 / len(SHARES)
        for i, (name, pick, colour) in enumerate(SHARES):
            bars = [(x, pick(line)) for x, line in enumerate(there)]
            left = [x - 0.4 + (i + 0.5) * width for x, row in bars if row]
            if not left:
                continue
            axes.bar(left, [row.share for _, row in bars if row], width, label=name, color=colour)
        axes.axhline(1, color="#333333", linewidth=0.8)
        names = [_shape(line.shape) for line in there]
        axes.set_xticks(range(len(there)), names, fontsize=7)
        axes.set_ylabel(f"share of ideal, {mode}", fontsize=8)
        axes.tick_params(axis="y", labelsize=8)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(SHARES),
        fontsize=8,
        frameon=False,
    )
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)


def _shape(row: Row) -> str:
    named = row.case != f"{row.m}x{row.n}x{row.k}"
    return f"{row.case}\n" * named + f"m {row.m}\nn {row.n}\nk {row.k}"


def speedups(rows: Sequence[Row], found: Sequence[str], path: Path, title: str) -> None:
    """Speed-up over the better serial composition against the GEMM/communication ratio, and its
    geometric means over the shapes (figures 13 and 14 of the FiCCO paper), a row per mode."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2 * len(found) + 0.6), layout="constrained")
    panels = figure.subplots(len(found), 2, squeeze=False, gridspec_kw={"width_ratios": [1.4, 1]})
    for (left, right), mode in zip(panels, found, strict=True):
        there = sorted(lines(rows, mode), key=lambda line: line.balance)
        for name, pick, colour in CURVES:
            points = [(line.balance, row.speedup) for line in there if (row := pick(line))]
            left.plot(*_columns(points), "o-", label=name, color=colour, markersize=4, linewidth=1)
        left.axhline(1, color="#b8b8b8", linewidth=0.8)
        left.set_xscale("log", base=2)
        left.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        left.set_xlabel("time of the GEMM / time of the communication", fontsize=8)
        left.set_ylabel(f"speed-up over serial, {mode}", fontsize=8)
        left.legend(fontsize=7)
        means = [
            (name, mean_and_worst(map(pick, there), "speedup")[0], c) for name, pick, c in MEANS
        ]
        means = [one for one in means if one[1] == one[1]]
        right.bar(
            [n for n, _, _ in means], [v for _, v, _ in means], color=[c for _, _, c in means]
        )
        for x, (_, value, _) in enumerate(means):
            right.text(x, value, f"{value:.2f}", ha="center", va="bottom", fontsize=7)
        right.axhline(1, color="#b8b8b8", linewidth=0.8)
        right.set_ylabel(f"geometric mean of {len(there)} shapes", fontsize=8)
        for axes in (left, right):
            axes.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)


def _columns(points: Sequence[tuple[float, float]]) -> Any:
    return [x for x, _ in points], [y for _, y in points]
