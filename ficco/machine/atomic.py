"""Atomic writing of files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write a file atomically, and create its folders. A reader sees the old text or the new one.

    Once the function has returned, the new text survives a loss of power. A process that dies
    during the write leaves a hidden file in the folder.

    Raises:
        OSError: the folder cannot be written, or the disk is full. The old file is unchanged.
    """
    part = path.with_name(f".{path.name.lstrip('.')}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    with suppress(OSError):  # sync the new name, too, where the system can sync folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
