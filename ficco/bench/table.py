"""Rows of figures: as CSV, with the description of the machine beside it, and as printed."""

from __future__ import annotations

import csv
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ficco import doctor
from ficco.bench.stats import NONE, ROLES
from ficco.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One candidate on one shape in one mode. A figure that does not exist is NaN, empty in CSV.

    Attributes:
        case, label, m, n, k, dtype: the shape; n is that of one rank.
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
        host_us: microseconds that the host takes to enqueue a warm call, slowest rank.
        extra_bytes: most memory beside operands and result, on the rank that takes most.
    """

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

    @property
    def ok(self) -> bool:
        return self.status == "ok"


COLUMNS = tuple(field.name for field in fields(Row))


def write(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a CSV file; a new one gets the header."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow([_cell(getattr(row, name)) for name in COLUMNS])


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


def read(path: Path) -> list[Row]:
    """The rows of a CSV file.

    Raises:
        ConfigError: the file cannot be read, or is not of this form.
    """
    types = {"int": int, "float": lambda text: float(text) if text else NONE, "str": str}
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(str(path), "header", f"required columns {', '.join(missing)}")
            return [
                Row(**{f.name: types[str(f.type)](line[f.name]) for f in fields(Row)})
                for line in reader
            ]
    except OSError as error:
        raise ConfigError(str(path), "file", f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(str(path), "rows", str(error)) from None


def describe(device: str, ranks: int, **more: Any) -> dict[str, Any]:
    """The machine, the versions and the command: what a figure is worth nothing without."""
    kinds = [one for one in doctor.devices() if one["kind"].startswith(device)]
    names = dict.fromkeys(one["name"] for one in kinds)
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", "ficco", *sys.argv[1:]]),
        "commit": commit(),
        "device": " and ".join(names),
        "ranks": ranks,
        **more,
        "versions": {name: value for name, value in doctor.versions().items() if value},
    }


def commit() -> str:
    """The commit of the checkout that ficco is imported from; empty outside of one."""
    folder = Path(__file__).resolve().parent
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(
            git, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def write_description(path: Path, description: dict[str, Any]) -> None:
    """Write the description of a CSV file beside it."""
    path.with_suffix(".json").write_text(json.dumps(description, indent=2) + "\n")


def read_description(path: Path) -> dict[str, Any]:
    """The description that lies beside a CSV file; empty if there is none."""
    beside = path.with_suffix(".json")
    if not beside.exists():
        return {}
    try:
        found = json.loads(beside.read_text())
    except ValueError as error:
        raise ConfigError(str(beside), "file", f"required JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(str(beside), "file", "required a JSON object")
    return found


#: Columns of the printed table: heading, field, format.
PRINTED = (
    ("ms", "ms", "{:.3f}"),
    ("speed-up", "speedup", "{:.2f}"),
    ("of ideal", "share", "{:.2f}"),
    ("overlap", "efficiency", "{:.2f}"),
    ("x PyTorch", "vs_pytorch", "{:.2f}"),
    ("x queued", "vs_queued", "{:.2f}"),
    ("host us", "host_us", "{:.0f}"),
    ("extra MiB", "extra_bytes", "{:.1f}"),
)


def show(rows: Sequence[Row]) -> Table:
    """One shape's rows as a table for a terminal, fastest first within each mode."""
    from rich.markup import escape
    from rich.table import Table

    first = rows[0]
    title = f"{first.case}: m={first.m} n={first.n} k={first.k} {first.dtype}, {first.world} ranks"
    table = Table(title=escape(f"{title} {first.label}".strip()), title_justify="left")
    table.add_column("mode")
    table.add_column("candidate", overflow="fold")
    shown = [one for one in PRINTED if any(_there(row, one[1]) for row in rows)]
    for heading, _, _ in shown:
        table.add_column(heading, justify="right")
    if any(row.note for row in rows):
        table.add_column("note", overflow="fold")
    for row in sorted(rows, key=_order):
        cells = [_format(row, name, text) for _, name, text in shown]
        style = "bold" if row.candidate == ROLES.ideal else "" if row.ok else "dim"
        note = row.note if row.ok else f"{row.status}: {row.note}"
        table.add_row(row.mode, escape(row.candidate), *cells, escape(note), style=style)
    return table


def _order(row: Row) -> tuple[Any, ...]:
    return row.mode, math.isnan(row.ms), row.ms


def _there(row: Row, name: str) -> bool:
    return not math.isnan(getattr(row, name))


def _format(row: Row, name: str, text: str) -> str:
    value = getattr(row, name)
    if name == "extra_bytes":
        value /= 2**20
    return "" if math.isnan(value) else text.format(value)


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows for machines: what does not exist is null."""
    return [
        {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(row).items()
        }
        for row in rows
    ]
