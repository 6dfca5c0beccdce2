"""What a tuning run has done, beside the file that it writes: an interrupted run goes on there.

The machine is saved before the journal is, so that a step that is noted is in the file. Both are
replaced as a whole; whatever is killed when, the next run finds the one or the other state.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ficco.errors import ConfigError
from ficco.machine.atomic import write as write_file


@dataclass(frozen=True)
class Journal:
    """Steps of a run that are done.

    Attributes:
        settings: what the run measures, in words; another run with the same goes on with it.
        began: when it began.
        done: names of its steps that are in the file.
    """

    settings: str
    began: str
    done: tuple[str, ...] = ()

    def with_done(self, step: str) -> Journal:
        return replace(self, done=(*self.done, step))


def path_of(machine: Path) -> Path:
    """Where the journal of a machine's file lies; its name hides it from those who look there."""
    return machine.with_name(f".{machine.stem}.tune.json")


def read(machine: Path) -> Journal | None:
    """The journal beside a file; None if there is none. A damaged one counts as none."""
    try:
        data: Any = json.loads(path_of(machine).read_text())
        return Journal(str(data["settings"]), str(data["began"]), tuple(map(str, data["done"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(journal: Journal, machine: Path) -> None:
    """Write it, entirely or not at all.

    Raises:
        ConfigError: the folder cannot be written, or the disk is full.
    """
    try:
        write_file(path_of(machine), json.dumps(asdict(journal)))
    except OSError as error:
        raise ConfigError(
            str(machine),
            "folder",
            f"cannot be written: {error.strerror}; give another file with --out, or another "
            "folder with FICCO_CONFIG_DIR",
        ) from None


def remove(machine: Path) -> None:
    """Forget the run: it is over."""
    with suppress(OSError):
        path_of(machine).unlink()
