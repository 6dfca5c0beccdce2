"""The machine's file that a tuning run writes: its name, what a run begins with, what it holds."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ficco.errors import ConfigError
from ficco.machine import Fingerprint, Machine, known, load


def default_name(here: Fingerprint) -> str:
    """Name of the user's file for a host: ``nvidia-h200-4``."""
    slug = re.sub(r"[^a-z0-9]+", "-", here.accelerator.lower()).strip("-")
    return f"{slug}-{here.ranks}"


def damaged(path: Path) -> Path:
    """Where a damaged file is kept."""
    return path.with_name(f"{path.name}.damaged")


def opened(path: Path, here: Fingerprint, fresh: bool = False) -> Machine:
    """The machine to begin with: that of the file, else what is known of such a host, else none of
    its figures.

    Raises:
        ConfigError: the file is none, or damaged, or of another kind of host.
    """
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "something else"
        raise ConfigError(str(path), "file", f"required a file, got {what}; name one with --out")
    if path.exists():
        try:
            found = load(path)
        except ConfigError as error:
            if not fresh:
                raise ConfigError(
                    str(path),
                    error.key,
                    f"{error.expected}. Nothing was measured; --fresh keeps this file as "
                    f"{damaged(path).name} and begins anew",
                ) from None
            path.replace(damaged(path))
        else:
            for name in ("ranks", "accelerator"):
                if not here.matches(found) and getattr(found, name) != getattr(here, name):
                    raise ConfigError(
                        str(path),
                        name,
                        f"required {getattr(here, name)}, as this run has, got "
                        f"{getattr(found, name)}; figures of different hosts are not merged: give "
                        "another file with --out",
                    )
            return found
    found = known(here)
    if found is None:
        return Machine(path.stem, here.accelerator, here.ranks)
    return replace(found, name=path.stem, source=str(path))


def rounded(value: Any) -> Any:
    """A block with its floats to five digits, which is more than measuring gives; the sizes of a
    curve's points stay what they are."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, tuple):
        if value and all(isinstance(item, tuple) for item in value):
            return tuple((size, *rounded(rest)) for size, *rest in value)
        return tuple(rounded(item) for item in value)
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: rounded(getattr(value, f.name)) for f in fields(value)})
    return value
