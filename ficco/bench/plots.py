"""Pictures of a bench, from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ficco.bench.pictures import BLACK, BLUE, GREEN, GREY, LIGHT, ORANGE, PURPLE, picture
from ficco.bench.roles import balance, by_operator, lines, modes
from ficco.bench.stats import geomean

#: What is drawn, by role: name and colour.
DRAWN = {
    "serial": ("serial", GREY),
    "pytorch": ("PyTorch fused op", ORANGE),
    "overlap": ("shard overlap", GREEN),
    "best": ("ficco, best schedule", BLUE),
    "ideal": ("ideal", BLACK),
    "best_1d": ("ficco 1D", BLUE),
    "best_2d": ("ficco 2D", LIGHT),
    "pieces": ("ficco rccl", PURPLE),
}

#: Roles that the first picture compares, that the second draws over the balance of GEMM and
#: communication, and of which it shows geometric means.
SHARES = ("serial", "pytorch", "overlap", "best")
CURVES = ("ideal", "overlap", "best")
MEANS = ("ideal", "overlap", "best_1d", "best_2d", "pieces", "pytorch")


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
        shares(mine, there, share, f"{title}, {operator}" if several else title)
        speedups(mine, there, speedup, f"{title}, {operator}" if several else title)
        drawn += [share, speedup]
    return drawn


def shares(rows: pd.DataFrame, modes_there: Sequence[str], path: Path, title: str) -> None:
    """Share of the ideal by shape, a panel per mode."""
    by_mode = {mode: lines(rows, mode) for mode in modes_there}
    size = max(6.0, 1.3 * max(map(len, by_mode.values())) + 2), 2.9 * len(by_mode) + 0.6
    with picture(path, *size, title) as figure:
        panels = figure.subplots(len(by_mode), 1, squeeze=False)[:, 0]
        width = 0.8 / len(SHARES)
        for axes, (mode, there) in zip(panels, by_mode.items(), strict=True):
            for i, role in enumerate(SHARES):
                values = there[role, "share"].reset_index(drop=True).dropna()
                if len(values):
                    name, colour = DRAWN[role]
                    left = values.index - 0.4 + (i + 0.5) * width
                    axes.bar(left, values, width, label=name, color=colour)
            axes.axhline(1, color=BLACK, linewidth=0.8)
            names = [_shape(row) for _, row in there["shape"].iterrows()]
            axes.set_xticks(range(len(there)), names)
            axes.set_ylabel(f"share of ideal, {mode}")
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=len(SHARES), frameon=False)


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
            there = lines(rows, mode)
            order = balance(there).sort_values(kind="stable")
            for name, colour, role in ((*DRAWN[role], role) for role in CURVES):
                points = there[role, "speedup"].reindex(order.index).set_axis(order).dropna()
                left.plot(points, "o-", label=name, color=colour)
            left.axhline(1, color=GREY, linewidth=0.8)
            left.set_xscale("log", base=2)
            left.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            left.set_xlabel("time of the GEMM / time of the communication")
            left.set_ylabel(f"speed-up over serial, {mode}")
            left.legend()
            means = pd.Series({role: geomean(there[role, "speedup"]) for role in MEANS}).dropna()
            names, colours = zip(*(DRAWN[role] for role in means.index), strict=True)
            names = [name.replace(" ", "\n", 1) for name in names]
            right.bar_label(right.bar(names, means, color=colours), fmt="%.2f")
            right.axhline(1, color=GREY, linewidth=0.8)
            right.set_ylabel(f"geometric mean of {len(there)} shapes")
