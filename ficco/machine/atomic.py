"""Files that are written entirely or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write a file, and the folders that it lies in: a reader sees the old text or the new one.

    The new text survives a loss of power from here on. A process that dies while it writes leaves a
    hidden file in the folder.

    Raises:
        OSError: the folder cannot be written, or the disk is full. The old file is as it was.
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
    with suppress(OSError):  # the name, too, where folders can be synced
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
