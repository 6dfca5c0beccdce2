"""The files of a tuning run: the machine's, and the journal that an interrupted run continues from.

The machine is saved before the journal is, so that a step that is noted is in the file. Both are
replaced as a whole: whatever is killed when, the next run finds one state or the other.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ficco.errors import ConfigError
from ficco.machine import Fingerprint, Machine, dumps, known, load
from ficco.machine.files import write

_LONG = re.compile(r"-?\d+\.?\d*(e[+-]?\d+)?")


def default_name(here: Fingerprint) -> str:
    """Name of the user's file for a host: ``nvidia-h200-4``."""
    slug = re.sub(r"[^a-z0-9]+", "-", here.accelerator.lower()).strip("-")
    return f"{slug}-{here.ranks}"


def damaged(path: Path) -> Path:
    """Where a damaged file is kept."""
    return path.with_name(f"{path.name}.damaged")


def opened(path: Path, here: Fingerprint, fresh: bool = False) -> Machine:
    """The machine to begin with: that of the file, else what is known of such a host, else an empty
    one.

    Raises:
        ConfigError: the path is no file, or the file is damaged or of another kind of host.
    """
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "something else"
        raise ConfigError(str(path), "file", f"required a file, got {what}; name one with --out")
    if path.exists():
        try:
            machine = load(path)
        except ConfigError as error:
            if not fresh:
                why = f"{error.expected}. Nothing was measured; --fresh keeps this file as "
                why += f"{damaged(path).name} and begins anew"
                raise ConfigError(str(path), error.key, why) from None
            path.replace(damaged(path))
        else:
            for name in ("ranks", "accelerator"):
                wanted, got = getattr(here, name), getattr(machine, name)
                if not here.matches(machine) and got != wanted:
                    why = f"required {wanted}, as this run has, got {got}; figures of different "
                    why += "hosts are not merged: give another file with --out"
                    raise ConfigError(str(path), name, why)
            return machine
    alike = known(here)
    if alike is None:
        return Machine(path.stem, here.accelerator, here.ranks)
    return replace(alike, name=path.stem, source=str(path))


def rounded(value: Any) -> Any:
    """A block with its floats to five digits, which is more than measuring gives; the sizes of a
    curve's points stay as they are."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, tuple):
        if value and all(isinstance(item, tuple) for item in value):
            return tuple((size, *rounded(tuple(rest))) for size, *rest in value)
        return tuple(map(rounded, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: rounded(getattr(value, f.name)) for f in fields(value)})
    return value


def changes(old: Machine, new: Machine, block: str) -> list[tuple[str, str, str]]:
    """Name, figure before and figure after, of every figure of a block."""
    before, after = _figures(old, block), _figures(new, block)
    names = dict.fromkeys([*after, *before])
    return [(name, before.get(name, "-"), after.get(name, "-")) for name in names]


def _figures(machine: Machine, block: str) -> dict[str, str]:
    """The figures of a block by name, as a file would hold them, rounded; empty without it."""
    value = getattr(machine, block)
    if value is None:
        return {}
    single = Machine(machine.name, machine.accelerator, machine.ranks, **{block: value})
    data = yaml.safe_load(dumps(single))[block]
    data.pop("provenance", None)
    return {name: _text(figure, ", ") for name, figure in data.items()}


def _text(value: Any, between: str = ": ") -> str:
    if isinstance(value, list):
        return between.join(map(_text, value))
    return _LONG.sub(lambda m: f"{float(m[0]):.4g}" if len(m[0]) > 5 else m[0], str(value))


@dataclass(frozen=True)
class Journal:
    """Steps of a run that are done.

    Attributes:
        settings: what the run measures, in words; another run with the same continues it.
        done: names of its steps that are in the file.
    """

    settings: str
    done: tuple[str, ...] = ()

    @staticmethod
    def path(machine: Path) -> Path:
        """Where the journal of a machine's file lies, hidden from those who look for machines."""
        return machine.with_name(f".{machine.stem}.tune.json")

    @classmethod
    def read(cls, machine: Path) -> Journal | None:
        """The journal of a machine's file; None if there is none, or a damaged one."""
        try:
            data: Any = json.loads(cls.path(machine).read_text())
            return cls(str(data["settings"]), tuple(map(str, data["done"])))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def with_done(self, step: str) -> Journal:
        return replace(self, done=(*self.done, step))

    def write(self, machine: Path) -> None:
        """Write it, entirely or not at all.

        Raises:
            ConfigError: the folder cannot be written, or the disk is full.
        """
        try:
            write(self.path(machine), json.dumps(asdict(self)))
        except OSError as error:
            why = f"cannot be written: {error.strerror}; give another file with --out, or another "
            why += "folder with FICCO_CONFIG_DIR"
            raise ConfigError(str(machine), "folder", why) from None

    @classmethod
    def remove(cls, machine: Path) -> None:
        """Forget the run: it is over."""
        with suppress(OSError):
            cls.path(machine).unlink()
