"""The garbage collector, out of the way while many tuples are made or read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collection meanwhile.

    The plans of many ranks are millions of tuples with no cycle among them: the collector would
    find nothing, and walk them all again and again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
