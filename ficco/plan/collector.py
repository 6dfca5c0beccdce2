"""Pauses the garbage collector while many tuples are made or read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: If more objects than this are new, all move to the oldest generation; else none is touched.
MANY = 1 << 17
#: Python 3.12 freezes some objects itself (375 in 3.12.1); a caller who does freezes all it has.
FROZEN = 1000


@contextmanager
def paused() -> Iterator[None]:
    """No garbage collection within the block.

    The plans of many ranks are millions of tuples without cycles: the collector would walk them
    again and again, and find nothing. It would do so after the block, too, for up to a fifth of the
    time that making them took.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled and gc.get_count()[0] > MANY and gc.get_freeze_count() < FROZEN:
            gc.freeze()
            gc.unfreeze()  # moves all objects to the oldest generation without reading them
        if enabled:
            gc.enable()
