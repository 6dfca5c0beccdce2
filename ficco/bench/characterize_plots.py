"""Pictures of losses in the manner of figures 7 to 10 of the FiCCO paper, from rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
from ficco.bench.stats import geomean

_BLUE, _LIGHT, _ORANGE, _SAND, _GREY = "#2a5d8f", "#6f9fca", "#e08a1e", "#f0c48a", "#333333"

#: What a kind of communication is called and drawn in.
MOVERS = (
    (PIECES, "copies in pieces (FiCCO)", _BLUE),
    (SHARDS, "copies of whole shards", _LIGHT),
    (COLLECTIVE, "vendor's collective", _ORANGE),
)


def draw(rows: pd.DataFrame, stem: Path, title: str) -> list[Path]:
    """Draw all pictures for which there are rows, to files that begin with ``stem``."""
    there = rows[rows["status"] == "ok"]
    stem.parent.mkdir(parents=True, exist_ok=True)
    pictures: tuple[tuple[str, tuple[str, ...], Callable[..., Any]], ...] = (
        ("gemm-dil", (GEMM_DIL,), gemm_dil),
        ("communication-dil", (COPY_DIL,), communication_dil),
        ("cil", (GEMM_CIL, COPY_CIL), cil),
        ("proportion", (GEMM_DIL, GEMM_CIL, COPY_DIL, COPY_CIL), proportion),
    )
    drawn = []
    for name, needs, make in pictures:
        if set(needs) <= set(there["loss"]):
            figure = make(there)
            figure.suptitle(title, fontsize=9)
            path = stem.with_name(f"{stem.name}_{name}.png")
            figure.savefig(path, dpi=130)
            drawn.append(path)
    return drawn


def _figure(panels: int, width: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 3.4), layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _cases(rows: pd.DataFrame) -> list[str]:
    return list(rows["case"][rows["m"] > 0].unique())


def _bars(axes: Any, names: Sequence[str], series: Sequence[tuple[str, list[float], str]]) -> None:
    """Grouped bars over shapes, each with its geometric mean in the legend."""
    width = 0.8 / max(len(series), 1)
    for i, (label, values, colour) in enumerate(series):
        left = [x - 0.4 + (i + 0.5) * width for x in range(len(names))]
        axes.bar(left, values, width, label=f"{label}: {geomean(values):.2f}", color=colour)
    axes.axhline(1, color=_GREY, linewidth=0.8)
    axes.set_xticks(range(len(names)), [name.replace("x", "\n") for name in names], fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=6, title="geometric means", title_fontsize=6)


def _ratios(rows: pd.DataFrame, names: Sequence[str], **where: Any) -> list[float]:
    """The ratios of some cases, of the rows whose columns have these values."""
    there = rows[(rows[list(where)] == pd.Series(where)).all(axis=1)]
    return list(
        there.drop_duplicates("case", keep="last").set_index("case")["ratio"].reindex(names)
    )


def gemm_dil(rows: pd.DataFrame) -> Any:
    """Decomposition loss of products by shape and cut (figure 7)."""
    of = rows[rows["loss"] == GEMM_DIL]
    names = _cases(of)
    figure, (axes,) = _figure(1, max(6.0, 1.2 * len(names) + 2))
    colours = {"rows": (_BLUE, _LIGHT), "columns": (_ORANGE, _SAND)}
    series = [
        (f"{parts} parts by {cut}", _ratios(of, names, cut=cut, parts=parts), colours[cut][i % 2])
        for cut in ("rows", "columns")
        for i, parts in enumerate(sorted(of["parts"].unique()))
    ]
    _bars(axes, names, series)
    axes.set_ylabel("time of the parts / of the whole", fontsize=8)
    return figure


def communication_dil(rows: pd.DataFrame) -> Any:
    """Decomposition loss of communication over the size of a shard (figure 8)."""
    figure, (axes,) = _figure(1, 6.0)
    for mover, label, colour in MOVERS:
        of = rows[(rows["loss"] == COPY_DIL) & (rows["mover"] == mover)]
        points = of.set_index(of["nbytes"] / 2**20)["ratio"].sort_index()
        if len(points):
            text = f"{label}: {geomean(points):.2f}"
            axes.plot(points, "o-", label=text, color=colour, markersize=4, linewidth=1)
    axes.axhline(1, color=_GREY, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set_xlabel("MiB of a shard", fontsize=8)
    axes.set_ylabel("time in W pieces / at once", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6, title="geometric means", title_fontsize=6)
    return figure


def cil(rows: pd.DataFrame) -> Any:
    """Contention loss of products and of communication (figure 9)."""
    names = _cases(rows)
    figure, panels = _figure(2, max(9.0, 2.2 * len(names) + 2))
    for axes, loss, what in (
        (panels[0], GEMM_CIL, "product in W parts"),
        (panels[1], COPY_CIL, "communication"),
    ):
        series = [
            (label, _ratios(rows, names, loss=loss, mover=mover), colour)
            for mover, label, colour in MOVERS
        ]
        _bars(axes, names, series)
        axes.set_ylabel(f"{what}: time beside the other / alone", fontsize=8)
    return figure


def proportion(rows: pd.DataFrame) -> Any:
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
    figure, all_axes = _figure(len(panels), 3.2 * len(panels) + 1)
    for axes, (what, dil, contended) in zip(all_axes, panels, strict=True):
        losses = [(max(d - 1, 0.0), max(c - 1, 0.0)) for d, c in zip(dil, contended, strict=True)]
        shares = [d / (d + c) if d + c > 0 else 0.0 for d, c in losses]
        rest = [c / (d + c) if d + c > 0 else 0.0 for d, c in losses]
        axes.bar(range(len(names)), shares, 0.7, label="decomposition", color=_BLUE)
        axes.bar(range(len(names)), rest, 0.7, bottom=shares, label="contention", color=_ORANGE)
        axes.set_xticks(range(len(names)), [n.replace("x", "\n") for n in names], fontsize=6)
        axes.set_title(what, fontsize=8)
        axes.tick_params(axis="y", labelsize=7)
    all_axes[0].set_ylabel("share of the loss", fontsize=8)
    all_axes[0].legend(fontsize=6)
    return figure
