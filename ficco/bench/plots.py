"""Pictures from rows: of a bench, and of losses, as in figures 7 to 10 of the FiCCO paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ficco.bench.characterize import (
    COLLECTIVE,
    COPY_CIL,
    COPY_DIL,
    GEMM_CIL,
    GEMM_DIL,
    PIECES,
    SHARDS,
)
from ficco.bench.draw import BLACK, BLUE, GREEN, GREY, LIGHT, ORANGE, PURPLE, SAND, picture
from ficco.bench.frames import place, read_description
from ficco.bench.stats import balance, by_operator, geomean, lines, modes

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
    """Draw all pictures for which there are rows, of a bench or of losses, to files that begin with
    ``stem``; those of several operators one by one; returns them."""
    if "loss" in rows:
        return _draw_losses(rows[rows["status"] == "ok"], stem, title)
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


def _legend_beside(axes: Any, title: str = "") -> None:
    axes.legend(title=title or None, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


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
            means = pd.Series({role: geomean(there[role, "speedup"]) for role in MEANS}).dropna()
            names, colours = zip(*(DRAWN[role] for role in means.index), strict=True)
            names = [name.replace(" ", "\n", 1) for name in names]
            right.bar_label(right.bar(names, means, color=colours), fmt="%.2f")
            right.axhline(1, color=GREY, linewidth=0.8)
            right.set_ylabel(f"geometric mean of {len(there)} shapes")
        _legend_below(figure, panels[0, 0])


# Losses.

#: Inches.
HEIGHT = 3.4

#: What a kind of communication is called and drawn in.
MOVERS = (
    (PIECES, "copies in pieces (FiCCO)", BLUE),
    (SHARDS, "copies of whole shards", LIGHT),
    (COLLECTIVE, "vendor's collective", ORANGE),
)


def _draw_losses(rows: pd.DataFrame, stem: Path, title: str) -> list[Path]:
    drawn = []
    for name, make, needs in (
        ("gemm-dil", gemm_dil, {GEMM_DIL}),
        ("communication-dil", communication_dil, {COPY_DIL}),
        ("cil", cil, {GEMM_CIL, COPY_CIL}),
        ("proportion", proportion, {GEMM_DIL, GEMM_CIL, COPY_DIL, COPY_CIL}),
    ):
        if needs <= set(rows["loss"]):
            drawn.append(stem.with_name(f"{stem.name}_{name}.png"))
            make(rows, drawn[-1], title)
    return drawn


def _loss_bars(axes: Any, names: Sequence[str], series: Iterable[tuple[str, Any, str]]) -> None:
    """Grouped bars over shapes, each with its geometric mean in the legend."""
    labelled = (
        (f"{label}: {geomean(values):.2f}", values, colour) for label, values, colour in series
    )
    _bars(axes, [name.replace("x", "\n") for name in names], labelled)
    _legend_beside(axes, "geometric means")


def _ratios(rows: pd.DataFrame, names: Sequence[str], **where: Any) -> list[float]:
    """The ratios of some cases, of the rows whose columns have these values."""
    there = rows[(rows[list(where)] == pd.Series(where)).all(axis=1)]
    return list(
        there.drop_duplicates("case", keep="last").set_index("case")["ratio"].reindex(names)
    )


def gemm_dil(rows: pd.DataFrame, path: Path, title: str) -> Any:
    """Decomposition loss of products by shape and cut (figure 7)."""
    of = rows[rows["loss"] == GEMM_DIL]
    names = list(of["case"].unique())
    colours = {"rows": (BLUE, LIGHT), "columns": (ORANGE, SAND)}
    series = [
        (f"{parts} parts by {cut}", _ratios(of, names, cut=cut, parts=parts), colours[cut][i % 2])
        for cut in ("rows", "columns")
        for i, parts in enumerate(sorted(of["parts"].unique()))
    ]
    with picture(path, max(6.0, 1.2 * len(names) + 2), HEIGHT, title) as figure:
        axes = figure.subplots()
        _loss_bars(axes, names, series)
        axes.set_ylabel("time of the parts / of the whole")
    return figure


def communication_dil(rows: pd.DataFrame, path: Path, title: str) -> Any:
    """Decomposition loss of communication over the size of a shard (figure 8)."""
    with picture(path, 6.0, HEIGHT, title) as figure:
        axes = figure.subplots()
        for mover, label, colour in MOVERS:
            of = rows[(rows["loss"] == COPY_DIL) & (rows["mover"] == mover)]
            points = of.set_index(of["nbytes"] / 2**20)["ratio"].sort_index()
            if len(points):
                axes.plot(points, "o-", label=f"{label}: {geomean(points):.2f}", color=colour)
        axes.axhline(1, color=BLACK, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set_xlabel("MiB of a shard")
        axes.set_ylabel("time in W pieces / at once")
        _legend_beside(axes, "geometric means")
    return figure


def cil(rows: pd.DataFrame, path: Path, title: str) -> Any:
    """Contention loss of products and of communication (figure 9)."""
    names = list(rows["case"][rows["m"] > 0].unique())
    losses = ((GEMM_CIL, "product in W parts"), (COPY_CIL, "communication"))
    with picture(path, max(9.0, 2.2 * len(names) + 2), HEIGHT, title) as figure:
        for axes, (loss, what) in zip(figure.subplots(1, 2), losses, strict=True):
            series = [
                (label, _ratios(rows, names, loss=loss, mover=mover), colour)
                for mover, label, colour in MOVERS
            ]
            _loss_bars(axes, names, series)
            axes.set_ylabel(f"{what}: time under contention / without")
    return figure


def proportion(rows: pd.DataFrame, path: Path, title: str) -> Any:
    """How much of what is lost is decomposition, and how much contention (figure 10).

    Shapes are sorted by operations. The communication of a shape takes the decomposition loss of
    the shard whose size is nearest to its own.
    """
    products = rows[rows["m"] > 0].drop_duplicates("case")
    flops = products["m"].astype(float) * products["n"] * products["k"]
    names = list(products["case"].loc[flops.sort_values(kind="stable").index])
    under = _ratios(rows, names, loss=GEMM_CIL, mover=PIECES)
    panels = [
        (f"product, {n} parts", _ratios(rows, names, loss=GEMM_DIL, cut="rows", parts=n), under)
        for n in sorted(rows["parts"][rows["loss"] == GEMM_DIL].unique())
    ]
    sizes = rows[(rows["loss"] == COPY_DIL) & (rows["mover"] == PIECES)].set_index("nbytes")
    of = rows[rows["loss"] == COPY_CIL].drop_duplicates("case", keep="last").set_index("case")
    nearest = (abs(sizes.index - nbytes).argmin() for nbytes in of["nbytes"].reindex(names))
    cut = [sizes["ratio"].iloc[row] for row in nearest]
    copied = _ratios(rows, names, loss=COPY_CIL, mover=PIECES)
    panels.append(("communication in pieces", cut, copied))
    with picture(path, 3.2 * len(panels) + 1, HEIGHT, title) as figure:
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (what, dil, contended) in zip(all_axes, panels, strict=True):
            losses = np.maximum(np.array([dil, contended]) - 1, 0)
            of_cut, of_contention = losses / np.where(losses.any(axis=0), losses.sum(axis=0), 1)
            places = range(len(names))
            axes.bar(places, of_cut, 0.7, label="decomposition", color=BLUE)
            axes.bar(places, of_contention, 0.7, bottom=of_cut, label="contention", color=ORANGE)
            axes.set_xticks(places, [name.replace("x", "\n") for name in names])
            axes.set_title(what)
        all_axes[0].set_ylabel("share of the loss")
        _legend_beside(all_axes[-1])
    return figure
