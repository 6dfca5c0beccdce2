"""Mutual exclusion between graph recordings, device-wide waits and calls of a process.

While a call is recorded as a graph, no thread may wait for the whole device: the wait fails, and
the recording may fail, too (CUDA Programming Guide, "Prohibited and Unhandled Operations").
PyTorch waits for the device to free symmetric memory, and holds the interpreter lock meanwhile. No
call of another thread may then be half enqueued, or in flight: its peers may wait for the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Excludes graph recordings while a thread of the process waits for the whole device.

    ``with gate:`` surrounds the code that enqueues a call. A call waits here only while the gate is
    closed, not for other calls, recordings or device-wide waits.

    Attributes:
        passed: number of calls that have entered.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler or a finalizer may take it in the thread that holds it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._calls = self._recordings = self._waiting = 0
        self.passed = 0

    def __enter__(self) -> None:
        with self._lock:  # half the cost of taking the condition
            self._calls += 1
            self.passed += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1

    @contextmanager
    def recording(self) -> Iterator[bool]:
        """Record a call within this block; yields False if a recording is not allowed now."""
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
        """Wait for recordings to end and exclude new ones, to wait for the device in the block."""
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
        """Let no call begin within this block; yields whether no call is half enqueued."""
        with self._changed:
            yield not self._calls


#: The gate of this process.
GATE = Gate()
