"""Dataclasses as lines of CSV files, a column for each field."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from ficco.bench.stats import NONE
from ficco.errors import ConfigError

T = TypeVar("T")

#: From the text of a cell, by the annotation of its field.
TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": lambda text: float(text) if text else NONE,
    "str": str,
}


#: Marks a field that came later than some files.
LATER = "later"


def columns(kind: type[Any]) -> tuple[str, ...]:
    """The header of a file of such rows."""
    return tuple(field.name for field in fields(kind))


def append(path: Path, kind: type[T], rows: Iterable[T]) -> None:
    """Append rows to a CSV file; a new one gets the header."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(columns(kind))
        for row in rows:
            writer.writerow([_cell(getattr(row, name)) for name in columns(kind)])


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return f"{value:.0f}" if value.is_integer() else f"{value:.6g}"
    return value


def read(path: Path, kind: type[T]) -> list[T]:
    """The rows of a CSV file. An older one lacks the columns of :data:`LATER` fields, which then
    have their defaults.

    Raises:
        ConfigError: the file cannot be read, or is not of this form.
    """
    there = fields(kind)  # type: ignore[arg-type]
    found = lines(path, [one.name for one in there if not one.metadata.get(LATER)])

    made = []
    for number, line in enumerate(found, 1):
        values = {}
        for field in there:
            if field.name not in line:
                continue
            text: str | None = line[field.name]
            try:
                if text is None:
                    raise ValueError("the row ends before it")
                values[field.name] = TYPES[str(field.type)](text)
            except ValueError as error:
                raise ConfigError(str(path), f"row {number}, {field.name}", str(error)) from None
        made.append(kind(**values))
    return made


def lines(path: Path, required: Sequence[str] = ()) -> list[dict[str, str]]:
    """The lines of a CSV file, by the names in its header.

    Raises:
        ConfigError: the file cannot be read, is no CSV, or lacks a required column.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            there = list(reader.fieldnames or ())
            found = list(reader)
    except OSError as error:
        raise ConfigError(str(path), "file", f"cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(str(path), "file", f"required a CSV file as text: {error}") from None
    if missing := [name for name in required if name not in there]:
        raise ConfigError(
            str(path), "header", f"required columns {', '.join(missing)}, got {', '.join(there)}"
        )
    return found
