"""Figures as frames: the columns of each kind of CSV file, how such files are read and written, and
frames of text as tables.

A row has the figures of one measurement. A missing figure is NaN, and empty in a file. A JSON file
next to the CSV file describes the settings and the host of a run. Files that cannot be read, or
that are of another kind, raise ``ConfigError``.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ficco.errors import ConfigError
from ficco.plan.render import legend
from ficco.tools import doctor

#: By the type of a column: its dtype in a frame, and its default.
KINDS: dict[type, tuple[str, Any]] = {
    str: ("object", ""),
    int: ("int64", 0),
    float: ("float64", math.nan),
}


@dataclass(frozen=True)
class Schema:
    """The columns of one kind of file.

    Attributes:
        columns: their types, in the order of the file.
        optional: values of columns that a file may lack, since it is older or trimmed.
        case: column with the name of a case.
        ways: columns that name the measured variant of a case.
        figure: column of the figure that pictures show.
    """

    columns: Mapping[str, type]
    optional: Mapping[str, Any] = field(default_factory=dict)
    case: str = "case"
    ways: tuple[str, ...] = ("way",)
    figure: str = "ms"

    def frame(self, rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
        """A frame of rows. Columns that a row does not have get their default; others raise
        ``KeyError``."""
        empty = {name: KINDS[kind][1] for name, kind in self.columns.items()}
        filled = [{**empty, **row} for row in rows]
        if unknown := {name for row in filled for name in row} - empty.keys():
            raise KeyError(f"required columns of the schema, got {sorted(unknown)}")
        dtypes = {name: KINDS[kind][0] for name, kind in self.columns.items()}
        return pd.DataFrame(filled, columns=list(empty)).astype(dtypes)

    def read(self, path: Path) -> pd.DataFrame:
        """The rows of a CSV file."""
        rows = read_text(path, [name for name in self.columns if name not in self.optional])
        for name, kind in self.columns.items():
            if name in rows:
                rows[name] = _parsed(path, rows[name], kind)
            else:
                rows[name] = self.optional[name]
        return rows[list(self.columns)]


def _parsed(path: Path, cells: pd.Series, kind: type) -> pd.Series:
    """The cells of a column as its type; None marks a cell that was cut off."""
    dtype, empty = KINDS[kind]
    values, wrong = cells, cells.isna()
    if kind is not str:
        values = pd.to_numeric(cells.where(cells != ""), errors="coerce")
        wrong |= values.isna() & ((cells != "") | (kind is int))
    if kind is int:
        wrong |= values % 1 != 0
    if wrong.any():
        row = int(wrong.to_numpy().argmax())
        cell = cells.iloc[row]
        why = f"required a {'whole ' * (kind is int)}number, got {cell!r}"
        where = f"row {row + 1}, {cells.name}"
        raise ConfigError(str(path), where, "the row ends before it" if pd.isna(cell) else why)
    return values.astype(dtype)


def read_text(path: Path, required: Sequence[str] = ()) -> pd.DataFrame:
    """The cells of a CSV file as text; None where a row ends early."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # rows longer than the header
            # The other engine does not tell a row that was cut off from one with empty cells.
            how: Any = {"keep_default_na": False, "index_col": False, "engine": "python"}
            cells = pd.read_csv(path, dtype=object, **how)
    except OSError as error:
        raise ConfigError(str(path), "file", f"cannot be read: {error.strerror}") from None
    except (ValueError, pd.errors.ParserWarning) as error:  # also of text that cannot be decoded
        raise ConfigError(str(path), "file", f"required a CSV file: {error}") from None
    if missing := [name for name in required if name not in cells]:
        why = f"required columns {', '.join(missing)}, got {', '.join(map(str, cells.columns))}"
        raise ConfigError(str(path), "header", why)
    return cells


def append(path: Path, rows: pd.DataFrame) -> Path:
    """Append rows to a CSV file. A new file gets a header, and its folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows.to_csv(
        path,
        mode="a",
        header=not path.exists(),
        index=False,
        lineterminator="\n",
        float_format=lambda value: f"{value:.0f}" if value.is_integer() else f"{value:.6g}",
    )
    return path


def records(rows: pd.DataFrame) -> Any:
    """Rows for JSON, as a list; a missing figure is None."""
    return rows.astype(object).where(rows.notna(), None).to_dict("records")


def _columns(kind: type, names: str) -> dict[str, type]:
    return dict.fromkeys(names.split(), kind)


#: m, n, k: sizes of a product as one rank sees it. world: ranks.
_PRODUCT = {**_columns(int, "m n k"), "dtype": str, "world": int}

#: status: ``ok``, ``skipped``, ``failed`` or ``wrong``; note says why. rounds: how many there are.
_STATUS = {"status": str, "note": str, "rounds": int}

#: Milliseconds of the slowest rank: median over the rounds, and quartiles.
_SPREAD = _columns(float, "ms ms_low ms_high")

#: One candidate on one shape in one mode.
#:
#: label: where the shape is from. mode: empty for a shape that was not measured. kind: as in
#: :mod:`ficco.tools.bench.candidates`. speedup: over the better serial composition. share: of the
#: ideal. efficiency: overlap efficiency (Flux). vs_pytorch: over the faster path of PyTorch's fused
#: op. vs_queued: queued time over this one. host_us: microseconds that the host takes to enqueue
#: one of several calls in a row, on the slowest rank. extra_bytes: peak memory besides operands and
#: result, on the rank that takes most. error: of operators that sum, error of random sums against
#: float64 as a share of their root mean square, on the rank where it is largest. ms_even, ms_odd:
#: medians of every second round. A schedule chosen by one half is measured by the other.
BENCH = Schema(
    _columns(str, "operator case label")
    | _PRODUCT
    | _columns(str, "mode candidate kind")
    | _STATUS
    | _SPREAD
    | _columns(float, "speedup share efficiency vs_pytorch vs_queued host_us extra_bytes error")
    | _columns(float, "ms_even ms_odd"),
    {"operator": "all_gather_matmul", "label": ""}  # older files have one operator
    | dict.fromkeys(("ms_low", "ms_high", "vs_queued", "error", "ms_even", "ms_odd"), math.nan),
    ways=("candidate",),
)

#: Columns of a replay. off_us: largest deviation in microseconds of a peer's signal from its
#: planned time; median over the rounds.
REPLAY = Schema(
    BENCH.columns | {"off_us": float}, {**BENCH.optional, "off_us": math.nan}, ways=BENCH.ways
)

#: One way of one layer in one mode; sizes as in :class:`ficco.tools.bench.layers.Layer`.
#:
#: speedup, vs_pytorch: over the fastest way by collectives, and over PyTorch's Async TP. error:
#: largest difference from the step by collectives, as a share of the root mean square.
LAYERS = Schema(
    {"layer": str, **_columns(int, "tokens hidden columns inner"), "dtype": str, "world": int}
    | _columns(str, "mode way")
    | _STATUS
    | _SPREAD
    | _columns(float, "speedup vs_pytorch error extra_bytes"),
    case="layer",
)

#: One variant of a workload (:mod:`ficco.tools.bench.harness`).
#:
#: took: what ``auto`` stood for. speedup: over the fastest baseline. share, in_turn: the longer of
#: the two parts, and their sum, over it. others: share of kernels other than the library's in the
#: time of its kernels.
_WAY = (
    _columns(str, "mode way took")
    | _STATUS
    | _SPREAD
    | _columns(float, "speedup share in_turn others")
)
_LATER = {"took": "", "share": math.nan, "in_turn": math.nan, "others": math.nan}

#: Of a layer of experts. tokens: of each rank; capacity: rows of each rank for each expert.
EXPERTS = Schema(
    {"case": str, **_columns(int, "experts tokens k inner top_k"), "dtype": str, "skew": float}
    | _columns(int, "world capacity")
    | _WAY,
    {**_LATER, "skew": 0.0},
)

#: Of attention. sequence: positions of all ranks; causal: 0 or 1.
ATTENTION = Schema(
    _columns(str, "case operator")
    | _columns(int, "sequence heads kv_heads head_size causal")
    | {"dtype": str, "world": int}
    | _WAY
)

#: A loss by cutting or contention; sizes are 0 where only communication is measured.
#:
#: nbytes: of a shard that is communicated. cut: ``rows`` or ``columns`` of A. parts: of the product
#: or the shard. alone_ms, ms: medians of the whole and of the parts, or without and under
#: contention. ratio: the loss, the median of the ratios of the rounds. alone_us, us: microseconds
#: of the rounds, with blanks between them.
LOSSES = Schema(
    _columns(str, "loss case")
    | _PRODUCT
    | {"nbytes": int, "cut": str, "parts": int, "mover": str, "rounds": int}
    | _columns(float, "alone_ms ms ratio")
    | _columns(str, "alone_us us status note"),
    ways=("loss", "cut", "parts", "mover"),
    figure="ratio",
)

#: One candidate on one shape, simulated: a schedule, or one of
#: ``ficco.tools.bench.simulated.BOUNDS``. m, n and k are 0 where the operator has no such sizes;
#: ``case`` then has all that there are.
SIMULATED = Schema(
    _columns(str, "case label")
    | _PRODUCT
    | _columns(int, "hosts")
    | _columns(str, "machine mode candidate")
    | _columns(float, "ms speedup share"),
    {"hosts": 1},
    ways=("candidate",),
)

#: Every kind of file.
SCHEMAS = (BENCH, REPLAY, LAYERS, EXPERTS, ATTENTION, LOSSES, SIMULATED)


def schema_of(path: Path) -> Schema:
    """The kind of a CSV file, by its header."""
    columns = {*read_text(path)}
    for schema in SCHEMAS:
        if schema.columns.keys() - schema.optional.keys() <= columns <= schema.columns.keys():
            return schema
    why = "required the columns of a CSV of bench, replay or simulate, got "
    raise ConfigError(str(path), "header", why + ", ".join(columns))


def describe(device: str, command: str, ranks: int = 1) -> dict[str, Any]:
    """Describe a run: date, command, commit, device, ranks and versions."""
    here = [one["name"] for one in doctor.devices() if one["kind"].startswith(device)]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "commit": commit(),
        "device": " and ".join(dict.fromkeys(here)),
        "ranks": ranks,
        "versions": {name: value for name, value in doctor.versions().items() if value},
    }


def place(about: Mapping[str, Any]) -> str:
    """Ranks, hosts and device of a description, in words."""
    hosts = f" on {about['hosts']} hosts" if about.get("hosts", 1) > 1 else ""
    return f"{about.get('ranks', '?')} ranks{hosts}, {about.get('device', '')}"


def commit() -> str:
    """The commit of the checkout that ficco is imported from; empty outside of one."""
    folder = Path(__file__).resolve().parent
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    how: dict[str, Any] = {"stderr": subprocess.DEVNULL, "text": True, "timeout": 10}
    with suppress(OSError, subprocess.SubprocessError):
        return str(subprocess.check_output(git, **how)).strip()
    return ""


def read_description(path: Path) -> dict[str, Any]:
    """The description next to a CSV file; empty if there is none."""
    file = path.with_suffix(".json")
    try:
        description = json.loads(file.read_text()) if file.exists() else {}
    except ValueError as error:
        raise ConfigError(str(file), "file", f"required JSON: {error}") from None
    if not isinstance(description, dict):
        raise ConfigError(str(file), "file", "required a JSON object")
    return description


# Tables of text, for Markdown and for a terminal; a progress bar.


def cells(values: pd.Series, form: str = ".2f") -> pd.Series:
    """Figures as text; nothing for NaN."""
    return values.map(lambda value: "" if pd.isna(value) else format(value, form)).astype(object)


def markdown(heads: Sequence[str], rows: pd.DataFrame | Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    body = rows.itertuples(index=False) if isinstance(rows, pd.DataFrame) else rows
    lines = [heads, ["---"] * len(heads), *body]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def show(
    title: str,
    rows: pd.DataFrame,
    left: Sequence[int] = (0,),
    bold: Sequence[int] = (),
    sections: Sequence[int] = (),
    width: int = 120,
) -> None:
    """Print a table. ``width`` is for output that is no terminal.

    Args:
        rows: text; the names of the columns are the headings.
        left: columns that are aligned to the left.
        bold: rows to stress.
        sections: rows after which a line is drawn.
    """
    table = Table(title=escape(title) or None, title_justify="left")
    for number, heading in enumerate(rows.columns):
        justify, overflow = ("left", "fold") if number in left else ("right", "ellipsis")
        table.add_column(escape(heading), justify=justify, overflow=overflow)
    for number, row in enumerate(rows.itertuples(index=False)):
        style = "bold" if number in bold else ""
        table.add_row(*map(escape, row), style=style, end_section=number in sections)
    console = Console(width=None if sys.stdout.isatty() else width)
    with console.capture() as captured:  # rich would end the process where the reader has left
        console.print(table, highlight=False)
    print(captured.get(), end="")


#: Meanings of headings and of rows of tables on a terminal.
MEANINGS = {
    "gemm": "the whole GEMM of the library, and nothing else",
    "collective": "the library's collective, and nothing else",
    "copies": "the copies of the operator, and nothing else",
    "ideal": "the longer of computation and communication, each timed separately",
    "of ideal": "ideal over this time; above 1 if the parts took longer than within the call",
    "x serial": "the better serial composition over this time",
    "x PyTorch": "PyTorch's fused operator over this time",
    "x baseline": "the fastest baseline over this time",
    "x in turn": "computation, then communication, over this time",
    "x collectives": "the fastest step by collectives over this time",
    "x Async TP": "PyTorch's Async TP over this time",
    "others": "share of kernels other than the library's",
    "host us": "host time to enqueue one of several calls",
    "off us": "largest deviation of a peer's signal from its planned time",
    "extra MiB": "memory of a rank besides operands and result",
}


def show_meanings(names: Iterable[str]) -> None:
    """Print the meanings of headings and rows that need an explanation."""
    present = set(names)
    meanings = {name: text for name, text in MEANINGS.items() if name in present}
    print(legend(meanings, shutil.get_terminal_size((120, 24)).columns))


@contextmanager
def bar(
    console: Console, title: str, total: float, done: Callable[[], float]
) -> Iterator[Callable[[str], None]]:
    """Show the progress towards ``total``, which ``done`` tells.

    Yields:
        a function that takes the current action in words.
    """
    if not console.is_terminal:
        console.print(f"{title} ...", markup=False, highlight=False, soft_wrap=True)
    title_column, action = (
        TextColumn(text, markup=False) for text in ("{task.fields[title]}", "{task.description}")
    )
    columns = title_column, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), action
    how: Any = {"transient": True, "disable": not console.is_terminal}
    with Progress(*columns, console=console, **how) as shown:
        task = shown.add_task("", total=total, completed=done(), title=title)
        yield lambda action: shown.update(task, completed=done(), description=action)
