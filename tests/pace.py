"""How fast this core is right now, for tests of what something may take on a quiet one."""

from __future__ import annotations

import time
from heapq import heappop, heappush

#: Seconds of :func:`_work` on a quiet core of the machine on which the limits were set.
QUIET_S = 0.017


def _work() -> int:
    """What a simulation does most: queues, tuples and dictionaries."""
    queue: list[tuple[float, int, tuple[int, int]]] = []
    seen: dict[tuple[int, int], float] = {}
    for i in range(20_000):
        heappush(queue, (i * 7919 % 10007 / 3.0, i, (i, i + 1)))
        if i % 3 == 0:
            at, _, pair = heappop(queue)
            seen[pair] = seen.get(pair, 0.0) + at
    return len(seen)


def slower() -> float:
    """How many times longer than on that core things take now, at least 1: neighbours of a shared
    machine take cache and clock away, which no process's own time leaves out."""
    started = time.process_time()
    _work()
    return max(1.0, (time.process_time() - started) / QUIET_S)
