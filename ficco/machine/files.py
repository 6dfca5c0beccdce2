"""Machines as YAML files.

The schema is the dataclasses of :mod:`ficco.machine.model`: every field is a key, its annotation
says what is expected, and nothing is listed here twice. Quantities are written with their unit.

A file ends with the line ``...``, YAML's end of a document, so that one that was cut short is
noticed wherever the cut is.

Names of schedules in ``tuned`` are texts to this module: whoever takes one looks whether it still
exists. An entry of a schedule that is gone loads, is kept by ``save``, and is nobody's error.
"""

from __future__ import annotations

import math
import os
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from ficco.errors import ConfigError
from ficco.machine import units
from ficco.machine.atomic import write
from ficco.machine.model import Machine, OneOf, Points, Quantity
from ficco.problems.products import digest as digest_of_text

_END = "..."


def load(path: str | os.PathLike[str]) -> Machine:
    """The machine of a file.

    Raises:
        ConfigError: the file cannot be read, is cut short or no YAML, a key is missing or unknown,
            or a value is of another type, in another unit or impossible.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), "file", f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), "file", "required text in UTF-8") from None
    return loads(text, str(path))


def loads(text: str, source: str = "text") -> Machine:
    """The machine of a text; ``source`` stands for the file in messages. Raises as :func:`load`."""
    return _loaded(text, source)


#: Every group looks through all files for the machine of its host, and YAML is read slowly: 30 ms
#: for those that ship, on a shared AMD EPYC, 2026-11-23.
@lru_cache(maxsize=64)
def _loaded(text: str, source: str) -> Machine:
    from ficco.machine import text as as_yaml  # YAML is imported by the first machine that is read

    whole = text.split()[-1:] == [_END]
    early = f"ends early: required the line {_END!r} at its end; is it half-written?"
    try:
        data = as_yaml.parse(text)
    except as_yaml.Refused as error:
        also = "" if whole else f"; it also {early}"
        raise ConfigError(source, error.where, f"required YAML: {error}{also}") from None
    if not whole:
        raise ConfigError(source, "file", early)
    try:
        machine: Machine = _read(data, Machine, "")
    except _Wrong as wrong:
        raise ConfigError(source, wrong.key or "file", wrong.expected) from None
    object.__setattr__(machine, "source", source)
    return machine


def dumps(machine: Machine) -> str:
    """The machine as text that :func:`loads` reads back to an equal one."""
    from ficco.machine import text as as_yaml

    return f"{as_yaml.dump(_write(machine, Machine))}{_END}\n"


def save(machine: Machine, path: str | os.PathLike[str]) -> None:
    """Write a machine to a file, entirely or not at all: a reader sees the old file or the new one.

    Raises:
        ConfigError: the folder cannot be written, the disk is full, or the machine holds an
            impossible value. The old file is then as it was.
    """
    path = Path(path).resolve()  # of a link, what it leads to is replaced
    text = dumps(machine)
    loads(text, str(path))  # what could not be read again is not written
    try:
        write(path, text)
    except OSError as error:
        raise ConfigError(str(path), "file", f"cannot be written: {error.strerror}") from None


def digest(machine: Machine) -> int:
    """40-bit fingerprint of what a machine holds, without the texts that are for people.

    Machines of the same digest lead to the same decisions.
    """
    return digest_of_text(repr(_facts(machine)))


def _facts(value: Any) -> Any:
    if is_dataclass(value):
        named = [f.name for f in fields(value) if f.compare and f.name != "provenance"]
        return [(name, _facts(getattr(value, name))) for name in named]
    if isinstance(value, tuple):
        return [_facts(item) for item in value]
    return float(value) if isinstance(value, (int, float)) else value


class _Wrong(Exception):
    """A value at a key, and what was expected there."""

    def __init__(self, key: str, expected: str) -> None:
        self.key = key
        self.expected = expected


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _inner(hint: Any) -> tuple[Any, Any, bool]:
    """The type of a hint, the note of an Annotated or None, and whether None is allowed."""
    optional = False
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
        optional = True
    if get_origin(hint) is Annotated:
        kind, note = get_args(hint)
        return kind, note, optional
    return hint, None, optional


def _read(data: Any, hint: Any, key: str) -> Any:
    kind, note, optional = _inner(hint)
    if data is None and optional:
        return None
    if is_dataclass(kind):
        return _read_block(data, kind, key)
    if isinstance(note, Points):
        return _read_curve(data, note, key)
    if get_origin(kind) is tuple:
        return _read_tuple(data, kind, key)
    if kind is str:
        if not isinstance(data, str):
            raise _Wrong(key, f"required a text, got {data!r}")
        if isinstance(note, OneOf) and data not in note.texts:
            raise _Wrong(key, f"required one of {', '.join(note.texts)}, got {data!r}")
        return data
    note = note or Quantity()
    value = _number(data, note, key)
    if kind is int:
        if value != int(value):
            raise _Wrong(key, f"required a whole number, got {data!r}")
        return int(value)
    return value


def _read_block(data: Any, kind: Any, key: str) -> Any:
    if not isinstance(data, dict):
        raise _Wrong(key, f"required the keys of a {kind.__name__.lower()}, got {data!r}")
    known = {f.name: f for f in fields(kind) if f.compare}
    for name in data:
        if name not in known:
            expected = f"is unknown; known here are {', '.join(known)}"
            raise _Wrong(_join(key, str(name)), expected)
    values = {}
    for name, field in known.items():
        hint = _hints(kind)[name]
        if name in data:
            values[name] = _read(data[name], hint, _join(key, name))
        elif field.default is MISSING and field.default_factory is MISSING:
            raise _Wrong(_join(key, name), f"is missing; required {_wanted(hint)}")
    try:
        return kind(**values)
    except ValueError as error:
        raise _Wrong(key, str(error)) from None


def _read_curve(data: Any, note: Points, key: str) -> Any:
    if not isinstance(data, list) or not data:
        raise _Wrong(key, f"required a list of points [{note.show()}], got {data!r}")
    points: list[tuple[float, float]] = []
    for i, pair in enumerate(data):
        here = f"{key}[{i}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise _Wrong(here, f"required a point [{note.show()}], got {pair!r}")
        x = _number(pair[0], Quantity(note.x, above=0), f"{here}[0]")
        y = _number(pair[1], Quantity(note.y, above=0), f"{here}[1]")
        if points and x <= points[-1][0]:
            raise _Wrong(here, f"required sizes that rise from point to point, got {pair[0]!r}")
        points.append((x, y))
    return tuple(points)


def _read_tuple(data: Any, kind: Any, key: str) -> Any:
    arms = get_args(kind)
    if not isinstance(data, list):
        raise _Wrong(key, f"required a list, got {data!r}")
    if arms[-1] is not Ellipsis:
        if len(data) != len(arms):
            raise _Wrong(key, f"required a list of {len(arms)}, got {data!r}")
        return tuple(
            _read(x, arm, f"{key}[{i}]") for i, (x, arm) in enumerate(zip(data, arms, strict=True))
        )
    return tuple(_read(item, arms[0], f"{key}[{i}]") for i, item in enumerate(data))


def _number(data: Any, note: Quantity, key: str) -> float:
    if note.unit:
        try:
            value = units.parse(data, note.unit)
        except ValueError as error:
            raise _Wrong(key, str(error)) from None
    else:
        try:  # YAML takes 1e-3 for a text
            if isinstance(data, bool):
                raise ValueError
            value = float(data)
        except (TypeError, ValueError, OverflowError):
            raise _Wrong(key, f"required a number, got {data!r}") from None
    if not math.isfinite(value):
        raise _Wrong(key, f"required {note.show()}, got {data!r}, which is not finite")
    if not note.allows(value):
        raise _Wrong(key, f"required {note.show()}, got {data!r}")
    return value


def _wanted(hint: Any) -> str:
    kind, note, _ = _inner(hint)
    if isinstance(note, Points):
        return f"a list of points [{note.show()}]"
    if isinstance(note, OneOf):
        return f"one of {', '.join(note.texts)}"
    if kind in (int, float):
        return (note or Quantity()).show()
    if kind is str:
        return "a text"
    return "a list" if get_origin(kind) is tuple else "a block"


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _write(value: Any, hint: Any) -> Any:
    kind, note, _ = _inner(hint)
    if is_dataclass(kind) and value is not None:
        hints = _hints(kind)  # type: ignore[arg-type]
        return {
            f.name: _write(getattr(value, f.name), hints[f.name])
            for f in fields(kind)
            if f.compare and getattr(value, f.name) != f.default
        }
    if isinstance(note, Points):
        return [[_show(x, note.x), _show(y, note.y)] for x, y in value]
    if get_origin(kind) is tuple:
        arms = get_args(kind)
        each = [arms[0]] * len(value) if arms[-1] is Ellipsis else arms
        return [_write(item, arm) for item, arm in zip(value, each, strict=True)]
    if isinstance(note, Quantity) and note.unit:
        return units.show(value, note.unit)
    return kind(value) if kind in (int, float) else value


def _show(value: float, unit: str) -> Any:
    if unit:
        return units.show(value, unit)
    return int(value) if float(value).is_integer() else float(value)
