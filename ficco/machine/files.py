"""Machines as YAML files.

The dataclasses of :mod:`ficco.machine.model` are the schema: every field is a key, and its
annotation defines the allowed values. Quantities are written with their unit and
converted by :class:`decimal.Decimal`, so a float that is written and read again is the same float.

A file ends with the line ``...``, YAML's end of a document. So a truncated file is detected
wherever the cut is.

The first of these sources that has a machine describes this host:

1. the argument, and 2. the environment variable ``FICCO_MACHINE``: a path, or the name of a user
   or shipped file without its ``.yaml``;
3. the user's files, by fingerprint, and 4. the files that ship with ficco, by fingerprint.

This module does not check names of schedules in ``tuned``; the code that takes an entry does. An
entry of a schedule that no longer exists loads without an error, and ``save`` keeps it.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from decimal import Decimal, InvalidOperation
from functools import cache, lru_cache
from math import log
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from ficco.errors import ConfigError, warn_once
from ficco.machine.model import Machine, OneOf, Points, Quantity
from ficco.problems.products import digest as digest_of_text

#: The last line of a file.
_END = "..."


def write(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a file atomically, and create its folders. A reader sees the old text or the new one.

    With ``durable`` the new text survives a loss of power once the function has returned. A process
    that dies during the write leaves a hidden file in the folder.

    Raises:
        OSError: the folder cannot be written, or the disk is full. The old file is unchanged.
    """
    part = path.with_name(f".{path.name.lstrip('.')}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    if not durable:
        return
    with suppress(OSError):  # sync the new name, too, where the system can sync folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load(path: str | os.PathLike[str]) -> Machine:
    """Load a machine from a file.

    Raises:
        ConfigError: the file cannot be read, is truncated or is not YAML; a key is missing or
            unknown; or a value has the wrong type or unit, or is impossible.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), "file", f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), "file", "required text in UTF-8") from None
    return loads(text, str(path))


def loads(text: str, source: str = "text") -> Machine:
    """Load a machine from a text. ``source`` replaces the path in messages. Raises like
    :func:`load`."""
    return _loaded(text, source)


#: Cached, since every group searches all files for the machine of its host, and parsing YAML is
#: slow: 30 ms for the shipped files, on a shared AMD EPYC, 2026-11-23.
@lru_cache(maxsize=64)
def _loaded(text: str, source: str) -> Machine:
    from ficco.machine import text as as_yaml  # late: import YAML with the first machine

    complete = text.split()[-1:] == [_END]
    truncated = f"ends early: required the line {_END!r} at its end; is it half-written?"
    try:
        data = as_yaml.parse(text)
    except as_yaml.Refused as error:
        also = "" if complete else f"; it also {truncated}"
        raise ConfigError(source, error.where, f"required YAML: {error}{also}") from None
    if not complete:
        raise ConfigError(source, "file", truncated)
    try:
        machine: Machine = _read(data, Machine, "")
    except _WrongValue as wrong:
        raise ConfigError(source, wrong.key or "file", wrong.expected) from None
    object.__setattr__(machine, "source", source)
    return machine


def dumps(machine: Machine) -> str:
    """The machine as text. :func:`loads` returns an equal machine from it."""
    from ficco.machine import text as as_yaml

    return f"{as_yaml.dump(_write(machine, Machine))}{_END}\n"


def save(machine: Machine, path: str | os.PathLike[str]) -> None:
    """Write a machine to a file atomically: a reader sees the old file or the new one.

    Raises:
        ConfigError: the folder cannot be written, the disk is full, or the machine holds an
            impossible value. The old file is then unchanged.
    """
    path = Path(path).resolve()  # replace the target of a link, not the link
    text = dumps(machine)
    loads(text, str(path))  # raises on values that a file cannot hold
    try:
        write(path, text)
    except OSError as error:
        raise ConfigError(str(path), "file", f"cannot be written: {error.strerror}") from None


def digest(machine: Machine) -> int:
    """40-bit fingerprint of the figures of a machine, without texts for human readers.

    Machines with the same digest lead to the same decisions.
    """
    return digest_of_text(repr(_figures(machine)))


def _figures(value: Any) -> Any:
    if is_dataclass(value):
        names = [f.name for f in fields(value) if f.compare and f.name != "provenance"]
        return [(name, _figures(getattr(value, name))) for name in names]
    if isinstance(value, tuple):
        return [_figures(entry) for entry in value]
    return float(value) if isinstance(value, (int, float)) else value


class _WrongValue(Exception):
    """A wrong value: its key, and the expected value in words."""

    def __init__(self, key: str, expected: str) -> None:
        self.key = key
        self.expected = expected


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _unwrapped(hint: Any) -> tuple[Any, Any, bool]:
    """The type of a hint, the note of an Annotated or None, and whether the value may be None."""
    optional = False
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
        optional = True
    if get_origin(hint) is Annotated:
        kind, note = get_args(hint)
        return kind, note, optional
    return hint, None, optional


def _read(data: Any, hint: Any, key: str) -> Any:
    kind, note, optional = _unwrapped(hint)
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
            raise _WrongValue(key, f"required a text, got {data!r}")
        if isinstance(note, OneOf) and data not in note.texts:
            raise _WrongValue(key, f"required one of {', '.join(note.texts)}, got {data!r}")
        return data
    note = note or Quantity()
    value = _number(data, note, key)
    if kind is int:
        if value != int(value):
            raise _WrongValue(key, f"required a whole number, got {data!r}")
        return int(value)
    return value


def _read_block(data: Any, kind: Any, key: str) -> Any:
    if not isinstance(data, dict):
        raise _WrongValue(key, f"required the keys of a {kind.__name__.lower()}, got {data!r}")
    known = {f.name: f for f in fields(kind) if f.compare}
    for name in data:
        if name not in known:
            expected = f"is unknown; known here are {', '.join(known)}"
            raise _WrongValue(_join(key, str(name)), expected)
    values = {}
    for name, field in known.items():
        hint = _hints(kind)[name]
        if name in data:
            values[name] = _read(data[name], hint, _join(key, name))
        elif field.default is MISSING and field.default_factory is MISSING:
            raise _WrongValue(_join(key, name), f"is missing; required {_expected(hint)}")
    try:
        return kind(**values)
    except ValueError as error:
        raise _WrongValue(key, str(error)) from None


def _read_curve(data: Any, note: Points, key: str) -> Any:
    if not isinstance(data, list) or not data:
        raise _WrongValue(key, f"required a list of points [{note.show()}], got {data!r}")
    points: list[tuple[float, float]] = []
    for i, pair in enumerate(data):
        point_key = f"{key}[{i}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise _WrongValue(point_key, f"required a point [{note.show()}], got {pair!r}")
        x = _number(pair[0], Quantity(note.x, above=0), f"{point_key}[0]")
        y = _number(pair[1], Quantity(note.y, above=0), f"{point_key}[1]")
        if points and x <= points[-1][0]:
            expected = f"required sizes that rise from point to point, got {pair[0]!r}"
            raise _WrongValue(point_key, expected)
        points.append((x, y))
    return tuple(points)


def _read_tuple(data: Any, kind: Any, key: str) -> Any:
    arms = get_args(kind)
    if not isinstance(data, list):
        raise _WrongValue(key, f"required a list, got {data!r}")
    if arms[-1] is Ellipsis:
        arms = (arms[0],) * len(data)
    if len(data) != len(arms):
        raise _WrongValue(key, f"required a list of {len(arms)}, got {data!r}")
    return tuple(_read(one, arms[i], f"{key}[{i}]") for i, one in enumerate(data))


def _number(data: Any, note: Quantity, key: str) -> float:
    if note.unit:
        try:
            value = quantity(data, note.unit)
        except ValueError as error:
            raise _WrongValue(key, str(error)) from None
    else:
        try:  # YAML parses 1e-3 as a text
            if isinstance(data, bool):
                raise ValueError
            value = float(data)
        except (TypeError, ValueError, OverflowError):
            raise _WrongValue(key, f"required a number, got {data!r}") from None
    if not math.isfinite(value):
        raise _WrongValue(key, f"required {note.show()}, got {data!r}, which is not finite")
    if not note.allows(value):
        raise _WrongValue(key, f"required {note.show()}, got {data!r}")
    return value


def _expected(hint: Any) -> str:
    kind, note, _ = _unwrapped(hint)
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
    kind, note, _ = _unwrapped(hint)
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
        kinds = [arms[0]] * len(value) if arms[-1] is Ellipsis else arms
        return [_write(entry, arm) for entry, arm in zip(value, kinds, strict=True)]
    if isinstance(note, Quantity) and note.unit:
        return quantity_text(value, note.unit)
    return kind(value) if kind in (int, float) else value


def _show(value: float, unit: str) -> Any:
    if unit:
        return quantity_text(value, unit)
    return int(value) if float(value).is_integer() else float(value)


_LARGE = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_SMALL = {"": 0, "m": -3, "u": -6, "n": -9, "p": -12}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}

#: Exponents of ten of the prefixes of each unit. Large units have no small prefixes, and vice
#: versa: ``mB`` is a typing error.
PREFIXES: dict[str, dict[str, int]] = {
    "B": _LARGE,
    "B/s": _LARGE,
    "FLOP": _LARGE,
    "FLOP/s": _LARGE,
    "s": _SMALL,
}

#: Examples of quantities by unit, for messages.
EXAMPLES = {
    "B": "'2 MiB'",
    "B/s": "'64 GB/s'",
    "FLOP": "'1.5e11 FLOP'",
    "FLOP/s": "'989 TFLOP/s'",
    "s": "'15 us'",
}


def quantity(text: object, unit: str) -> float:
    """The value, in the SI unit ``unit``, of a quantity such as ``"64 GB/s"``.

    Raises:
        ValueError: the number or the unit is missing or wrong.
    """
    number, _, suffix = str(text).strip().partition(" ")
    suffix = suffix.strip()
    factor = next((f for name, f in _names(unit) if name == suffix), None)
    try:
        if not isinstance(text, str) or factor is None:
            raise InvalidOperation
        value = float(Decimal(number) * factor)
    except (InvalidOperation, OverflowError):
        raise ValueError(
            f"required a quantity in {unit} such as {EXAMPLES[unit]}, got {text!r}"
        ) from None
    return value


def quantity_text(value: float, unit: str) -> str:
    """A quantity as text, with the prefix that leaves 1 to 3 digits before the point.

    Bytes are written in KiB, MiB, ... where that is shorter.
    """
    number = Decimal(repr(float(value)))
    table = PREFIXES[unit]
    fitting = [p for p, exponent in table.items() if p != "K" and number.adjusted() >= exponent]
    prefix = max(fitting, key=table.__getitem__) if fitting else min(table, key=table.__getitem__)
    if not number:
        prefix = ""
    text = f"{_digits(number.scaleb(-table[prefix]))} {prefix}{unit}"
    if unit == "B":
        binary = [
            f"{int(value) >> bits} {prefix}B"
            for prefix, bits in _BINARY.items()
            if value and value % 2**bits == 0
        ]
        text = min([text, *binary], key=len)
    return text


def _digits(number: Decimal) -> str:
    if abs(number.adjusted()) > 20:
        return str(number)
    digits = f"{number:f}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _names(unit: str) -> list[tuple[str, Decimal]]:
    names = [(prefix + unit, Decimal(10) ** e) for prefix, e in PREFIXES[unit].items()]
    if unit in ("B", "B/s"):
        names += [(prefix + unit, Decimal(2**bits)) for prefix, bits in _BINARY.items()]
    return names


#: Environment variable that names a machine: a path, or the name of a file.
VARIABLE = "FICCO_MACHINE"

#: Environment variable that replaces the default folder of the user's files.
FOLDER_VARIABLE = "FICCO_CONFIG_DIR"

_SUFFIX = ".yaml"


@dataclass(frozen=True)
class Fingerprint:
    """Identifies a kind of host: the driver's name of its devices, and the number of ranks."""

    accelerator: str
    ranks: int

    def matches(self, machine: Machine) -> bool:
        """Whether a machine has the same accelerator, ignoring case, and the same rank count."""
        return self.ranks == machine.ranks and self.resembles(machine)

    def resembles(self, machine: Machine) -> bool:
        """Whether a machine has the same accelerator, with any rank count."""
        names = {name.casefold() for name in (machine.accelerator, *machine.also)}
        return self.accelerator.casefold() in names


def find(name_or_path: str | None, fingerprint: Fingerprint | None) -> Machine | None:
    """The machine of this host; None if no file describes it.

    A damaged file that was not named is skipped with a warning, once.

    Raises:
        ConfigError: the argument or ``FICCO_MACHINE`` names no file, or a damaged one.
    """
    for name, origin in ((name_or_path, "machine"), (os.environ.get(VARIABLE), VARIABLE)):
        if name:
            return load(_named_path(name, origin))
    return None if fingerprint is None else known(fingerprint)


def known(fingerprint: Fingerprint) -> Machine | None:
    """The machine whose file matches a fingerprint; ``FICCO_MACHINE`` is ignored."""
    return next(filter(fingerprint.matches, _machines()), None)


def nearest(fingerprint: Fingerprint) -> Machine | None:
    """The machine of the same accelerator with the nearest number of ranks, by their ratio.

    Its figures per rank hold for groups of other sizes, too; its tuned entries do not.
    """
    alike = filter(fingerprint.resembles, _machines())
    return min(alike, key=lambda machine: abs(log(machine.ranks / fingerprint.ranks)), default=None)


def _machines() -> Iterator[Machine]:
    """The user's machines, then the shipped ones."""
    for path in (*_files(user_dir()), *_files(configs())):
        try:
            yield load(path)
        except ConfigError as error:
            warn_once(f"passed over: {error}")


def home() -> Path:
    """The user's home. If it is unknown, as in a container whose user has no name, a path that does
    not exist."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")


def user_dir() -> Path:
    """The folder of the user's machine files; it may not exist."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder)
    return Path(os.environ.get("XDG_CONFIG_HOME") or home() / ".config") / "ficco"


def cache_dir() -> Path:
    """The folder of files that ficco can make again; it may not exist."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "ficco"
    return Path(os.environ.get("FICCO_CACHE_DIR") or default)


def configs() -> Path:
    """The folder of the shipped machine files: in the package of a wheel, and next to the package
    in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def _files(folder: Path) -> list[Path]:
    """The machine files of a folder, sorted by name, without hidden files, which are half-written.
    A folder that cannot be listed is skipped with a warning."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        warn_once(f"passed over: {folder}: {error.strerror}")
        return []
    return [folder / name for name in names if name.endswith(_SUFFIX) and name[0] != "."]


def _named_path(name: str, origin: str) -> Path:
    """The file of a name or a path; ``origin`` says in errors which setting named it."""
    literal, folders = Path(name), (user_dir(), configs())
    with contextlib.suppress(RuntimeError):  # ~ of an unknown user
        literal = literal.expanduser()
    for path in (literal, *(folder / f"{name}{_SUFFIX}" for folder in folders)):
        with contextlib.suppress(OSError, ValueError):  # an invalid name, or no access
            if path.is_file():
                return path
    stems = sorted({file.stem for folder in folders for file in _files(folder)})
    raise ConfigError(
        origin,
        name,
        f"required a file, or one of {', '.join(stems)} (of {user_dir()} and of those that ship)",
    )
