"""Find the machine file that describes this host.

The first of these sources that has a machine:

1. the argument, and 2. the environment variable ``FICCO_MACHINE``: a path, or the name of a user
   or shipped file without its ``.yaml``;
3. the user's files, by fingerprint, and 4. the files that ship with ficco, by fingerprint.
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
