"""Decisions kept between processes, one small file each, in the user's cache directory.

A decision is a function of the problem, the kind of call, the machine and the code that decides.
The last two name the folder, so that another machine file or another version starts afresh. The
cache is a convenience: faults are warned of once, and the decision is made again.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path

from ficco.machine.atomic import write
from ficco.machine.find import home
from ficco.problem import digest
from ficco.schedules import Schedule
from ficco.warn import warn_once

#: What of this package a decision depends on.
CODE = ("problem.py", "plan", "schedules", "simulate", "machine", "heuristics")


class Saved:
    """The decisions saved for one machine."""

    def __init__(self, machine_digest: int, folder: Path | None = None) -> None:
        self.folder = (folder or cache_dir()) / f"decisions-{version()}-{machine_digest:010x}"

    def get(self, key: str) -> tuple[Schedule, str] | None:
        """The schedule and the reason saved under a key; None if missing or damaged."""
        path = self._path(key)
        try:
            data = json.loads(path.read_text())
            if data["key"] != key:
                return None  # another key with the same digest
            return Schedule.parse(str(data["schedule"])), str(data["reason"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            warn_once(f"a saved decision cannot be used and is made again: {path}: {error}")
            return None

    def put(self, key: str, schedule: Schedule, reason: str) -> None:
        """Save a decision. Readers see all of it or nothing."""
        path = self._path(key)
        data = {"key": key, "schedule": str(schedule), "reason": reason}
        try:
            write(path, json.dumps(data), durable=False)
        except OSError as error:
            warn_once(f"decisions are not saved: {self.folder}: {error.strerror}")

    def _path(self, key: str) -> Path:
        return self.folder / f"{digest(key):010x}.json"


#: The folder of saved decisions, in place of the usual one.
FOLDER_VARIABLE = "FICCO_CACHE_DIR"


def cache_dir() -> Path:
    """The folder of files that ficco can make again."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "ficco"


@lru_cache(maxsize=1)
def version() -> str:
    """The version of the code that decides: a release, or the state of a checkout.

    By the sizes and times of its files, since reading them takes longer than a decision may.
    """
    package = Path(__file__).resolve().parent.parent
    files = []
    for name in CODE:
        path = package / name
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            about = file.stat()
            files.append((file.name, about.st_size, about.st_mtime_ns))
    return f"{digest(repr(files)):010x}"
