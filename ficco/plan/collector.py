"""The garbage collector, out of the way while many tuples are made or read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: So many new objects count as old at once. With fewer, nothing that a caller has is touched.
MANY = 1 << 17


@contextmanager
def paused() -> Iterator[None]:
    """No collection meanwhile.

    The plans of many ranks are millions of tuples with no cycle among them: the collector would
    find nothing, and walk them all again and again; behind, too, for as long as a fifth of what it
    took to make them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled and gc.get_count()[0] > MANY and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # from the youngest generation to the oldest, unread
        if enabled:
            gc.enable()
