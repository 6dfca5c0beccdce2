"""What every run is told, and its description, in a JSON file next to its CSV file."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ficco import doctor
from ficco.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What every run is told.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        rounds: most rounds of a shape.
        seconds: time for everything, shared among the shapes.
        csv: the file that rows are appended to, shape by shape.
        command: the command line, for the description of the figures.
    """

    device: str
    rounds: int
    seconds: float
    csv: Path
    command: str = ""

    def write_description(self, ranks: int, **more: Any) -> None:
        """Write the description of the run next to its CSV file."""
        description = {**describe(self.device, ranks, self.command), **more}
        self.csv.with_suffix(".json").write_text(json.dumps(description, indent=2) + "\n")


def describe(device: str, ranks: int, command: str) -> dict[str, Any]:
    """The machine, the versions and the command: what a figure is worth nothing without."""
    kinds = [one for one in doctor.devices() if one["kind"].startswith(device)]
    names = dict.fromkeys(one["name"] for one in kinds)
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "commit": commit(),
        "device": " and ".join(names),
        "ranks": ranks,
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


def read_description(path: Path) -> dict[str, Any]:
    """The description next to a CSV file; empty if there is none."""
    file = path.with_suffix(".json")
    if not file.exists():
        return {}
    try:
        description = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(str(file), "file", f"required JSON: {error}") from None
    if not isinstance(description, dict):
        raise ConfigError(str(file), "file", "required a JSON object")
    return description
