"""What threads of one process may not do to a device at the same time.

While a call is recorded as a graph, nobody may wait for the whole device: the one who waits gets an
error, and so may the recording (CUDA Programming Guide, "Prohibited and Unhandled Operations"). And
PyTorch frees symmetric memory behind such a wait, in which it keeps the interpreter to itself: no
call of another thread may be half enqueued, or in flight, since its peers may wait for the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Keeps recordings and waits for the whole device apart, in one process. ``with gate:`` goes
    around whatever enqueues a call; calls wait here neither for each other nor for those who wait
    for the device.

    Attributes:
        passed: how many calls have gone in.
    """

    def __init__(self) -> None:
        # A signal's handler, or a finalizer, may come back in the thread that holds it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._calls = self._recordings = self._waiting = 0
        self.passed = 0

    def __enter__(self) -> None:
        with self._lock:  # half the cost of its condition
            self._calls += 1
            self.passed += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1

    @contextmanager
    def recording(self) -> Iterator[bool]:
        """A call is recorded here, if that is allowed now."""
        with self._changed:
            allowed = not self._waiting
            self._recordings += allowed
        try:
            yield allowed
        finally:
            with self._changed:
                self._recordings -= allowed
                self._changed.notify_all()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within this block nothing is recorded, so that one may wait for the whole device."""
        with self._changed:
            self._waiting += 1
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._recordings)
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    @contextmanager
    def closed(self) -> Iterator[bool]:
        """No call begins before the end; gives whether none is half enqueued, either."""
        with self._changed:
            yield not self._calls


#: That of this process.
GATE = Gate()
