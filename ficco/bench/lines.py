"""One line per shape and mode: what reports and pictures say of a bench's rows. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from ficco.bench.stats import NONE, ROLES, geomean, worst
from ficco.bench.table import Row, operators
from ficco.schedules import Schedule

if TYPE_CHECKING:
    from rich.table import Table

#: Modes in the order in which reports take them.
MODES = ("queued", "idle", "graph")


@dataclass(frozen=True)
class Line:
    """One shape in one mode; None for what was not measured.

    Attributes:
        shape: any row of the shape.
        gemm, collective, copies, ideal: what bounds it.
        serial, pytorch: the better serial composition, the faster path of PyTorch's op.
        best: the fastest ficco schedule, which is known in hindsight alone.
        auto: what a call with nothing else set takes.
        overlap: the shard overlap of PyTorch's Async TP, as a ficco schedule.
        best_1d, best_2d: the fastest ficco schedule with row pieces, and with column pieces.
        pieces: the paper's schedules with the vendor's collective.
    """

    shape: Row
    gemm: Row | None
    collective: Row | None
    copies: Row | None
    ideal: Row | None
    serial: Row | None
    pytorch: Row | None
    best: Row | None
    auto: Row | None
    overlap: Row | None
    best_1d: Row | None
    best_2d: Row | None
    pieces: Row | None

    @property
    def balance(self) -> float:
        """The GEMM's time over that of the fastest communication."""
        moves = [row.ms for row in (self.collective, self.copies) if row]
        return self.gemm.ms / min(moves) if self.gemm and moves else NONE


def lines(rows: Iterable[Row], mode: str) -> list[Line]:
    """A Line per shape that was measured in a mode, in the order of the rows."""
    shapes: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row.mode == mode and row.ok:
            shapes.setdefault((row.operator, row.case), {})[row.candidate] = row
    return [_line(found) for found in shapes.values()]


def _line(found: dict[str, Row]) -> Line:
    def fastest(rows: Iterable[Row | None]) -> Row | None:
        return min((row for row in rows if row), key=lambda row: row.ms, default=None)

    ours = [row for row in found.values() if row.kind == "ficco"]
    # auto is one of the others, under another name.
    ours = [row for row in ours if row.candidate != "auto"] or ours
    return Line(
        shape=next(iter(found.values())),
        gemm=found.get(ROLES.gemm),
        collective=found.get(ROLES.collective),
        copies=found.get(ROLES.copies),
        ideal=found.get(ROLES.ideal),
        serial=fastest(found.get(name) for name in ROLES.serials),
        pytorch=fastest(found.get(name) for name in ROLES.pytorch),
        best=fastest(ours),
        auto=found.get("auto"),
        overlap=found.get("shard-overlap"),
        best_1d=fastest(row for row in ours if dims(row) == 1),
        best_2d=fastest(row for row in ours if dims(row) == 2),
        pieces=found.get("ficco-rccl"),
    )


def dims(row: Row) -> int:
    """Whether a ficco row's schedule cuts shards by rows, 1, or by columns, 2; 0 for ``auto``."""
    name = row.candidate.partition("@")[0]
    return 0 if name == "auto" else Schedule.parse(name).dims


def modes(rows: Sequence[Row]) -> list[str]:
    """The modes in which something was measured."""
    return [mode for mode in MODES if any(row.mode == mode and row.ok for row in rows)]


def mean_and_worst(found: Iterable[Row | None], figure: str) -> tuple[float, float]:
    """Geometric mean and smallest of a figure over rows."""
    values = [getattr(row, figure) for row in found if row]
    values = [value for value in values if not math.isnan(value)]
    return geomean(values), worst(values)


def summary(rows: Sequence[Row]) -> Iterator[Table]:
    """For a terminal: what the best schedule reaches on each shape, a table per operator and
    mode."""
    from rich.markup import escape
    from rich.table import Table

    figures = (("share", "of ideal"), ("speedup", "x serial"), ("vs_pytorch", "x PyTorch"))
    for operator, mode in product(operators(rows), modes(rows)):
        there = lines([row for row in rows if row.operator == operator], mode)
        if not there:
            continue
        table = Table(title=f"{operator}: best schedule per shape, {mode}", title_justify="left")
        for heading in ("shape", "ms", *(heading for _, heading in figures), "schedule"):
            table.add_column(
                heading, justify="left" if heading in ("shape", "schedule") else "right"
            )
        for line in there:
            if line.best:
                cells = [number(getattr(line.best, name)) for name, _ in figures]
                shape, name = escape(line.shape.case), escape(line.best.candidate)
                table.add_row(shape, f"{line.best.ms:.3f}", *cells, name)
        best = [line.best for line in there]
        for i, what in enumerate(("geometric mean", "worst")):
            cells = [number(mean_and_worst(best, name)[i]) for name, _ in figures]
            table.add_row(what, "", *cells, "", style="bold")
        yield table


def number(value: float) -> str:
    """A ratio as text; nothing for NaN."""
    return "" if math.isnan(value) else f"{value:.2f}"
