"""Pictures of losses in the manner of figures 7 to 10 of the FiCCO paper, from rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from ficco.bench.pictures import BLACK, BLUE, LIGHT, ORANGE, SAND, picture
from ficco.bench.stats import geomean

#: Inches.
HEIGHT = 3.4

#: What a kind of communication is called and drawn in.
MOVERS = (
    (PIECES, "copies in pieces (FiCCO)", BLUE),
    (SHARDS, "copies of whole shards", LIGHT),
    (COLLECTIVE, "vendor's collective", ORANGE),
)


def draw(rows: pd.DataFrame, stem: Path, title: str) -> list[Path]:
    """Draw all pictures for which there are rows, to files that begin with ``stem``."""
    there = rows[rows["status"] == "ok"]
    pictures: tuple[tuple[str, tuple[str, ...], Callable[..., Any]], ...] = (
        ("gemm-dil", (GEMM_DIL,), gemm_dil),
        ("communication-dil", (COPY_DIL,), communication_dil),
        ("cil", (GEMM_CIL, COPY_CIL), cil),
        ("proportion", (GEMM_DIL, GEMM_CIL, COPY_DIL, COPY_CIL), proportion),
    )
    drawn = []
    for name, needs, make in pictures:
        if set(needs) <= set(there["loss"]):
            drawn.append(stem.with_name(f"{stem.name}_{name}.png"))
            make(there, drawn[-1], title)
    return drawn


def _cases(rows: pd.DataFrame) -> list[str]:
    return list(rows["case"][rows["m"] > 0].unique())


def _bars(axes: Any, names: Sequence[str], series: Sequence[tuple[str, list[float], str]]) -> None:
    """Grouped bars over shapes, each with its geometric mean in the legend."""
    width = 0.8 / max(len(series), 1)
    for i, (label, values, colour) in enumerate(series):
        left = [x - 0.4 + (i + 0.5) * width for x in range(len(names))]
        axes.bar(left, values, width, label=f"{label}: {geomean(values):.2f}", color=colour)
    axes.axhline(1, color=BLACK, linewidth=0.8)
    axes.set_xticks(range(len(names)), [name.replace("x", "\n") for name in names])
    axes.legend(title="geometric means")


def _ratios(rows: pd.DataFrame, names: Sequence[str], **where: Any) -> list[float]:
    """The ratios of some cases, of the rows whose columns have these values."""
    there = rows[(rows[list(where)] == pd.Series(where)).all(axis=1)]
    return list(
        there.drop_duplicates("case", keep="last").set_index("case")["ratio"].reindex(names)
    )


def gemm_dil(rows: pd.DataFrame, path: Path, title: str) -> Any:
    """Decomposition loss of products by shape and cut (figure 7)."""
    of = rows[rows["loss"] == GEMM_DIL]
    names = _cases(of)
    colours = {"rows": (BLUE, LIGHT), "columns": (ORANGE, SAND)}
    series = [
        (f"{parts} parts by {cut}", _ratios(of, names, cut=cut, parts=parts), colours[cut][i % 2])
        for cut in ("rows", "columns")
        for i, parts in enumerate(sorted(of["parts"].unique()))
    ]
    with picture(path, max(6.0, 1.2 * len(names) + 2), HEIGHT, title) as figure:
        axes = figure.subplots()
        _bars(axes, names, series)
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
        axes.legend(title="geometric means")
    return figure


def cil(rows: pd.DataFrame, path: Path, title: str) -> Any:
    """Contention loss of products and of communication (figure 9)."""
    names = _cases(rows)
    losses = ((GEMM_CIL, "product in W parts"), (COPY_CIL, "communication"))
    with picture(path, max(9.0, 2.2 * len(names) + 2), HEIGHT, title) as figure:
        for axes, (loss, what) in zip(figure.subplots(1, 2), losses, strict=True):
            series = [
                (label, _ratios(rows, names, loss=loss, mover=mover), colour)
                for mover, label, colour in MOVERS
            ]
            _bars(axes, names, series)
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
        all_axes[0].legend()
    return figure
