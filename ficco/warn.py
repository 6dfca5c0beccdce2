"""Warnings that appear once, at the line of the caller's code."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

_PACKAGE = f"{Path(__file__).resolve().parent}{os.sep}"
_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Warn, unless this process has already issued the same warning."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=_outside())


def _outside() -> int:
    """Return the ``stacklevel`` of the first frame outside of this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _inside(frame):
        level, frame = level + 1, frame.f_back
    return level


def _inside(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)
