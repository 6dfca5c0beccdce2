"""The version of ficco."""

from __future__ import annotations

import re
from pathlib import Path


def version() -> str:
    """Return the version of this checkout, or of the installed distribution."""
    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    try:
        declared = re.search(r'(?m)^name = "ficco"\nversion = "([^"]+)"', project.read_text())
    except OSError:
        declared = None
    if declared:
        return declared[1]
    from importlib import metadata

    try:
        return metadata.version("ficco")
    except metadata.PackageNotFoundError:
        return "unknown"
