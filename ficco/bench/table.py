"""Rows of figures: as CSV, and as printed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ficco.bench.cases import OPERATOR, Case
from ficco.bench.rows import LATER, append, columns
from ficco.bench.rows import read as read_rows
from ficco.bench.stats import NONE, ROLES
from ficco.problem import Problem

if TYPE_CHECKING:
    from rich.table import Table


#: Rows of each rank's part of a result whose errors are looked at.
ERROR_ROWS = 64


@dataclass(frozen=True)
class Row:
    """One candidate on one shape in one mode. A figure that does not exist is NaN, empty in CSV.

    Attributes:
        operator: what was asked for.
        case, label, m, n, k, dtype: the shape; n and k are those of one rank, and so is m of an
            all-to-all.
        world: number of ranks.
        mode: ``queued``, ``idle`` or ``graph``; empty for a shape that was not measured.
        candidate, kind: what was timed; kind as in :mod:`ficco.bench.candidates`.
        status: ``ok``, ``skipped``, ``failed`` or ``wrong``; note says why.
        rounds: how many rounds the figures are the median of.
        ms, ms_low, ms_high: milliseconds of the slowest rank, and their quartiles.
        speedup: over the better of both serial compositions.
        share: of the ideal.
        efficiency: overlap efficiency (Flux).
        vs_pytorch: over the faster path of PyTorch's fused op.
        vs_queued: queued time over this one.
        host_us: microseconds that the host takes to enqueue one of several calls in a row, on
            the slowest rank.
        extra_bytes: most memory beside operands and result, on the rank that takes most.
        error: of operators that sum: error of random sums against float64, as a share of their root
            mean square, on the rank where it is largest.
    """

    operator: str = field(default=OPERATOR, kw_only=True, metadata={LATER: True})
    case: str
    label: str
    m: int
    n: int
    k: int
    dtype: str
    world: int
    mode: str
    candidate: str
    kind: str
    status: str
    note: str = ""
    rounds: int = 0
    ms: float = NONE
    ms_low: float = NONE
    ms_high: float = NONE
    speedup: float = NONE
    share: float = NONE
    efficiency: float = NONE
    vs_pytorch: float = NONE
    vs_queued: float = NONE
    host_us: float = NONE
    extra_bytes: float = NONE
    error: float = field(default=NONE, metadata={LATER: True})

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def problem(self) -> Problem:
        """What was asked."""
        sizes = (self.m, self.n, self.k, self.dtype)
        return Case(self.case, *sizes, operator=self.operator).problem(self.world)


COLUMNS = columns(Row)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a CSV file; a new one gets the header."""
    append(path, Row, rows)


def read(path: Path) -> list[Row]:
    """The rows of a bench's CSV file. Raises as :func:`ficco.bench.rows.read`."""
    return read_rows(path, Row)


#: Figures of the printed table, in each mode: heading, field, format.
BY_MODE = (("ms", "ms", "{:.3f}"), ("ideal", "share", "{:.2f}"), ("host us", "host_us", "{:.0f}"))

#: Figures that do not depend on the mode.
ONCE = (("extra MiB", "extra_bytes", "{:.1f}"),)


def show(rows: Sequence[Row]) -> Iterator[Table | str]:
    """One shape's rows for a terminal: a table, fastest first, and what was left out."""
    from rich.markup import escape
    from rich.table import Table

    first = rows[0]
    sizes = f"m={first.m} n={first.n} k={first.k} {first.dtype}"
    shape = f"{of_operator(first)}{first.case}: {sizes}, {first.world} ranks"
    title = f"{shape}; {first.label}" if first.label else shape
    modes = list(dict.fromkeys(row.mode for row in rows if row.ok))
    if not modes:
        yield f"{escape(title)}: {escape(first.status)}: {escape(first.note)}"
        return
    table = Table(title=escape(title), title_justify="left")
    table.add_column("candidate", overflow="fold")
    figures = [
        (f"{mode}\n{heading}", name, text, mode)
        for mode in modes
        for heading, name, text in BY_MODE
        if any(_there(row, name) for row in rows if row.mode == mode)
    ]
    figures += [(*one, "") for one in ONCE if any(_there(row, one[1]) for row in rows)]
    for heading, *_ in figures:
        table.add_column(heading, justify="right")
    found: dict[str, dict[str, Row]] = {}
    for row in sorted(
        (row for row in rows if row.ok), key=lambda row: (modes.index(row.mode), row.ms)
    ):
        found.setdefault(row.candidate, {})[row.mode] = row
        found[row.candidate].setdefault("", row)
    for name, by_mode in found.items():
        note = f" ({by_mode[''].note})" if by_mode[""].note else ""
        cells = [_format(by_mode.get(mode), field, text) for _, field, text, mode in figures]
        style = "bold" if name == ROLES.ideal else ""
        table.add_row(escape(name + note), *cells, style=style)
    yield table
    for text in left_out(rows):
        yield f"  {escape(text)}"


def of_operator(row: Row) -> str:
    """The operator as a prefix; nothing for the one that needs no mention."""
    return "" if row.operator == OPERATOR else f"{row.operator} "


def operators(rows: Iterable[Row]) -> list[str]:
    """The operators of rows, in their order."""
    return list(dict.fromkeys(row.operator for row in rows))


def left_out(rows: Iterable[Row]) -> list[str]:
    """What was not measured, on which shapes, and why."""
    why: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if not row.ok:
            what = row.candidate or "the shape"
            where = f"{of_operator(row)}{row.case}"
            why.setdefault((what, f"{row.status}: {row.note}"), {})[where] = None
    return [f"{what} on {', '.join(cases)}: {note}" for (what, note), cases in why.items()]


def _there(row: Row, name: str) -> bool:
    return not math.isnan(getattr(row, name))


def _format(row: Row | None, name: str, text: str) -> str:
    if row is None or not _there(row, name):
        return ""
    return text.format(getattr(row, name) / (2**20 if name == "extra_bytes" else 1))


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows for machines: what does not exist is null."""
    return [
        {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(row).items()
        }
        for row in rows
    ]
