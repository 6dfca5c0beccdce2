"""Which machine this host is.

Sources in this order, the first that has one:

1. the argument, and 2. the environment variable ``FICCO_MACHINE``: a path, or the name of a user
   or shipped file without its ``.yaml``;
3. the user's files, by fingerprint, and 4. those that ship with ficco, likewise.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from pathlib import Path

from ficco.errors import ConfigError
from ficco.machine.files import load
from ficco.machine.model import Machine
from ficco.warn import warn_once

#: Names a machine: a path, or the name of a file.
VARIABLE = "FICCO_MACHINE"

#: The folder of the user's files, in place of the usual one.
FOLDER_VARIABLE = "FICCO_CONFIG_DIR"

_SUFFIX = ".yaml"


@dataclass(frozen=True)
class Fingerprint:
    """What a host is known by: its devices' name, as the driver gives it, and how many ranks."""

    accelerator: str
    ranks: int

    def matches(self, machine: Machine) -> bool:
        """Whether a machine describes such a host; case does not matter."""
        return self.ranks == machine.ranks and self.resembles(machine)

    def resembles(self, machine: Machine) -> bool:
        """Same accelerator, any rank count."""
        names = {name.casefold() for name in (machine.accelerator, *machine.also)}
        return self.accelerator.casefold() in names


def find(name_or_path: str | None, fingerprint: Fingerprint | None) -> Machine | None:
    """The machine of this host; None if nobody described it.

    A file that is damaged and was not asked for is warned of, once, and passed over.

    Raises:
        ConfigError: the argument or ``FICCO_MACHINE`` names no file, or a damaged one.
    """
    for name, asker in ((name_or_path, "machine"), (os.environ.get(VARIABLE), VARIABLE)):
        if name:
            return load(_named(name, asker))
    return None if fingerprint is None else known(fingerprint)


def known(fingerprint: Fingerprint) -> Machine | None:
    """The machine whose file says that it is such a host, whatever the environment names."""
    return next(filter(fingerprint.matches, _machines()), None)


def nearest(fingerprint: Fingerprint) -> Machine | None:
    """A machine of the same accelerator and the nearest number of ranks, by their ratio.

    Its figures per rank hold for groups of other sizes, too; its tuned entries do not.
    """
    alike = filter(fingerprint.resembles, _machines())
    return min(alike, key=lambda one: abs(log(one.ranks / fingerprint.ranks)), default=None)


def _machines() -> Iterator[Machine]:
    """The user's machines, then those that ship."""
    for path in (*_files(user_dir()), *_files(configs())):
        try:
            yield load(path)
        except ConfigError as error:
            warn_once(f"passed over: {error}")


def home() -> Path:
    """The user's home; a path that does not exist where it is unknown, as in a container whose user
    has no name."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")


def user_dir() -> Path:
    """The folder of the user's machines; it need not exist."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder)
    return Path(os.environ.get("XDG_CONFIG_HOME") or home() / ".config") / "ficco"


def configs() -> Path:
    """The folder of the files that ship with ficco: inside a wheel, next to the package in a
    checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def _files(folder: Path) -> list[Path]:
    """The machines of a folder in the order of their names; half-written ones are hidden files.
    A folder that may not be looked into is warned of and passed over."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        warn_once(f"passed over: {folder}: {error.strerror}")
        return []
    return [folder / name for name in names if name.endswith(_SUFFIX) and name[0] != "."]


def _named(name: str, asker: str) -> Path:
    given = Path(name)
    with contextlib.suppress(RuntimeError):  # the ~ of nobody
        given = given.expanduser()
    for path in (given, *(folder / f"{name}{_SUFFIX}" for folder in (user_dir(), configs()))):
        with contextlib.suppress(OSError, ValueError):  # no name for a file, or no way to it
            if path.is_file():
                return path
    stems = sorted({file.stem for folder in (user_dir(), configs()) for file in _files(folder)})
    raise ConfigError(
        asker,
        name,
        f"required a file, or one of {', '.join(stems)} (of {user_dir()} and of those that ship)",
    )
