"""Pictures from the rows of a bench."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ficco.tools.bench.draw import BLACK, BLUE, GREEN, GREY, LIGHT, ORANGE, PURPLE, picture
from ficco.tools.bench.frames import place, read_description
from ficco.tools.bench.stats import balance, by_operator, geomean, lines, modes

#: What is drawn, by role: name and colour.
DRAWN = {
    "serial": ("serial", GREY),
    "pytorch": ("PyTorch fused op", ORANGE),
    "overlap": ("shard overlap", GREEN),
    "auto": ("ficco, auto", BLUE),
    "best": ("ficco, best schedule", LIGHT),
    "ideal": ("ideal", BLACK),
    "best_1d": ("ficco 1D", BLUE),
    "best_2d": ("ficco 2D", LIGHT),
    "pieces": ("ficco rccl", PURPLE),
}

#: Roles that the first picture compares, that the second draws over the balance of GEMM and
#: communication, and of which it shows geometric means.
SHARES = ("serial", "pytorch", "overlap", "auto", "best")
CURVES = ("ideal", "overlap", "best")
MEANS = ("ideal", "overlap", "best_1d", "best_2d", "pieces", "pytorch")

#: Shapes in a row of the first picture.
MOST_SHAPES = 10


def draw_next_to(csv: Path, rows: pd.DataFrame) -> list[Path]:
    """Draw the rows of a CSV file, to files that begin with its name; returns them."""
    about = read_description(csv)
    title = f"{csv.stem}: {place(about)}"
    return draw(rows, csv.with_suffix(""), title)


def draw(rows: pd.DataFrame, stem: Path, title: str) -> list[Path]:
    """Draw all pictures for which there are rows, to files that begin with ``stem``; those of
    several operators one by one; returns them."""
    drawn = []
    several = rows["operator"].nunique() > 1
    for operator, mine in by_operator(rows):
        if not (there := modes(mine)):
            continue
        start = f"{stem.name}_{operator}" if several else stem.name
        share, speedup = (stem.with_name(f"{start}_{name}.png") for name in ("share", "speedup"))
        shares(mine, there, share, f"{title}, {operator}" if several else title)
        speedups(mine, there, speedup, f"{title}, {operator}" if several else title)
        drawn += [share, speedup]
    return drawn


def _bars(axes: Any, names: Sequence[str], series: Iterable[tuple[str, Any, str]]) -> None:
    """Grouped bars over shapes: of every group its label, its values and its colour."""
    series = list(series)
    width = 0.8 / max(len(series), 1)
    for i, (label, values, colour) in enumerate(series):
        left = np.arange(len(names)) - 0.4 + (i + 0.5) * width
        axes.bar(left, values, width, label=label, color=colour)
    axes.axhline(1, color=BLACK, linewidth=0.8)
    axes.set_xticks(range(len(names)), names)


def shares(rows: pd.DataFrame, modes_there: Sequence[str], path: Path, title: str) -> None:
    """Share of the ideal by shape, a panel per mode."""
    by_mode = {mode: lines(rows, mode) for mode in modes_there}
    shown = [
        (mode, measured, part)
        for mode, there in by_mode.items()
        for measured in [[role for role in SHARES if there[role, "share"].notna().any()]]
        for part in _in_rows(there)
    ]
    widest = max(len(part) for *_, part in shown)
    size = max(6.0, 1.3 * widest + 2), 2.9 * len(shown) + 0.6
    with picture(path, *size, title) as figure:
        panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
        for axes, (mode, measured, there) in zip(panels, shown, strict=True):
            series = [(DRAWN[role][0], there[role, "share"], DRAWN[role][1]) for role in measured]
            _bars(axes, [_shape(row) for _, row in there["shape"].iterrows()], series)
            axes.set_xlim(-0.6, widest - 0.4)
            axes.set_ylabel(f"share of ideal, {mode}")
        _legend_below(figure, panels[0])


def _in_rows(there: pd.DataFrame) -> list[pd.DataFrame]:
    """Shapes in rows of about the same length, ``MOST_SHAPES`` at most."""
    rows = -(-len(there) // MOST_SHAPES)
    length = -(-len(there) // rows)
    return [there.iloc[first : first + length] for first in range(0, len(there), length)]


def _legend_below(figure: Any, axes: Any) -> None:
    """What is in these axes, below all axes of the figure."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=max(len(names), 1), frameon=False
    )


def _shape(row: pd.Series) -> str:
    m, n, k = row["m"], row["n"], row["k"]
    return f"{row['case']}\n" * (row["case"] != f"{m}x{n}x{k}") + f"m {m}\nn {n}\nk {k}"


def speedups(rows: pd.DataFrame, modes_there: Sequence[str], path: Path, title: str) -> None:
    """Speed-up over the better serial composition against the GEMM/communication ratio, and its
    geometric means over the shapes (figures 13 and 14 of the FiCCO paper), a row per mode."""
    with picture(path, 10, 3.2 * len(modes_there) + 0.6, title) as figure:
        widths = {"width_ratios": [1.4, 1]}
        panels = figure.subplots(len(modes_there), 2, squeeze=False, gridspec_kw=widths)
        for (left, right), mode in zip(panels, modes_there, strict=True):
            there = lines(rows, mode, "speedup")
            order = balance(there).sort_values(kind="stable")
            for name, colour, role in ((*DRAWN[role], role) for role in CURVES):
                points = there[role, "speedup"].reindex(order.index).set_axis(order).dropna()
                left.plot(points, "o-", label=name, color=colour)
            left.axhline(1, color=GREY, linewidth=0.8)
            left.set_xscale("log", base=2)
            left.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            left.set_xlabel("time of the GEMM / time of the communication")
            left.set_ylabel(f"speed-up over serial, {mode}")
            means = pd.Series({role: geomean(there[role, "speedup"]) for role in MEANS}).dropna()
            names, colours = zip(*(DRAWN[role] for role in means.index), strict=True)
            names = [name.replace(" ", "\n", 1) for name in names]
            right.bar_label(right.bar(names, means, color=colours), fmt="%.2f")
            right.axhline(1, color=GREY, linewidth=0.8)
            right.set_ylabel(f"geometric mean of {len(there)} shapes")
        _legend_below(figure, panels[0, 0])
