"""Pictures of a bench, from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ficco.bench.roles import balance, by_operator, lines, modes
from ficco.bench.stats import geomean

#: What the first picture compares: name, role, colour.
SHARES = (
    ("serial", "serial", "#b8b8b8"),
    ("PyTorch fused op", "pytorch", "#e08a1e"),
    ("shard overlap", "overlap", "#7a9a3a"),
    ("ficco, best schedule", "best", "#2a5d8f"),
)

#: What the second picture draws over the balance of GEMM and communication.
CURVES = (
    ("ideal", "ideal", "#333333"),
    ("shard overlap", "overlap", "#7a9a3a"),
    ("ficco, best schedule", "best", "#2a5d8f"),
)

#: Of what the second picture shows geometric means.
MEANS = (
    ("ideal", "ideal", "#333333"),
    ("shard\noverlap", "overlap", "#7a9a3a"),
    ("ficco\n1D", "best_1d", "#2a5d8f"),
    ("ficco\n2D", "best_2d", "#6f9fca"),
    ("ficco-\nrccl", "pieces", "#a05a8a"),
    ("PyTorch\nfused op", "pytorch", "#e08a1e"),
)


def draw(rows: pd.DataFrame, stem: Path, title: str) -> list[Path]:
    """Draw all pictures to files that begin with ``stem``, those of several operators one by one;
    returns them."""
    drawn = []
    several = rows["operator"].nunique() > 1
    for operator, mine in by_operator(rows):
        if not (there := modes(mine)):
            continue
        start = f"{stem.name}_{operator}" if several else stem.name
        share, speedup = (stem.with_name(f"{start}_{name}.png") for name in ("share", "speedup"))
        stem.parent.mkdir(parents=True, exist_ok=True)
        shares(mine, there, share, f"{title}, {operator}" if several else title)
        speedups(mine, there, speedup, f"{title}, {operator}" if several else title)
        drawn += [share, speedup]
    return drawn


def shares(rows: pd.DataFrame, modes_there: Sequence[str], path: Path, title: str) -> None:
    """Share of the ideal by shape, a panel per mode."""
    from matplotlib.figure import Figure

    by_mode = {mode: lines(rows, mode) for mode in modes_there}
    widest = max(map(len, by_mode.values()))
    figure = Figure(
        figsize=(max(6.0, 1.3 * widest + 2), 2.9 * len(by_mode) + 0.6), layout="constrained"
    )
    panels = figure.subplots(len(by_mode), 1, squeeze=False)[:, 0]
    width = 0.8 / len(SHARES)
    for axes, (mode, there) in zip(panels, by_mode.items(), strict=True):
        for i, (name, role, colour) in enumerate(SHARES):
            values = there[role, "share"].reset_index(drop=True).dropna()
            if len(values):
                left = values.index - 0.4 + (i + 0.5) * width
                axes.bar(left, values, width, label=name, color=colour)
        axes.axhline(1, color="#333333", linewidth=0.8)
        names = [_shape(row) for _, row in there["shape"].iterrows()]
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


def _shape(row: pd.Series) -> str:
    m, n, k = row["m"], row["n"], row["k"]
    return f"{row['case']}\n" * (row["case"] != f"{m}x{n}x{k}") + f"m {m}\nn {n}\nk {k}"


def speedups(rows: pd.DataFrame, modes_there: Sequence[str], path: Path, title: str) -> None:
    """Speed-up over the better serial composition against the GEMM/communication ratio, and its
    geometric means over the shapes (figures 13 and 14 of the FiCCO paper), a row per mode."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2 * len(modes_there) + 0.6), layout="constrained")
    panels = figure.subplots(
        len(modes_there), 2, squeeze=False, gridspec_kw={"width_ratios": [1.4, 1]}
    )
    for (left, right), mode in zip(panels, modes_there, strict=True):
        there = lines(rows, mode)
        order = balance(there).sort_values(kind="stable")
        for name, role, colour in CURVES:
            points = there[role, "speedup"].reindex(order.index).set_axis(order).dropna()
            left.plot(points, "o-", label=name, color=colour, markersize=4, linewidth=1)
        left.axhline(1, color="#b8b8b8", linewidth=0.8)
        left.set_xscale("log", base=2)
        left.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        left.set_xlabel("time of the GEMM / time of the communication", fontsize=8)
        left.set_ylabel(f"speed-up over serial, {mode}", fontsize=8)
        left.legend(fontsize=7)
        means = pd.Series({name: geomean(there[role, "speedup"]) for name, role, _ in MEANS})
        colours = pd.Series({name: colour for name, _, colour in MEANS})[means.notna()]
        means = means.dropna()
        right.bar(means.index, means, color=list(colours))
        for x, value in enumerate(means):
            right.text(x, value, f"{value:.2f}", ha="center", va="bottom", fontsize=7)
        right.axhline(1, color="#b8b8b8", linewidth=0.8)
        right.set_ylabel(f"geometric mean of {len(there)} shapes", fontsize=8)
        for axes in (left, right):
            axes.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)
