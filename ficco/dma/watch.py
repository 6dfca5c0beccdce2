"""Progress of the calls on a slot, for the watchdog: by words that calls write, or by events."""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from ficco.dma.driver import WORD, WRITE_32, WRITE_64, Event, MemOp

#: Slots that one engine can watch by words: three for each graph, and three for eager calls if the
#: driver watches eager calls by words.
MAX_WATCHED = 4096


class Watch:
    """Two words in pinned host memory that a slot's calls write: the number of the running program,
    0 if none, and whether a call has ended."""

    def __init__(self, base: int, free: list[int]) -> None:
        """``base``: address of the pairs of words; ``free``: indices of the unused pairs.

        Raises:
            NotImplementedError: all pairs are in use.
        """
        if not free:
            raise NotImplementedError(
                f"more than {MAX_WATCHED // 3} graphs capture ficco calls; capture more calls in "
                "each, or release some with ficco.close(group)"
            )
        self._free, self._index = free, free.pop()
        self._begun = base + 2 * self._index * WORD
        self._words = (ctypes.c_uint32 * 2).from_address(self._begun)

    def begin(self, number: int) -> MemOp:
        return MemOp(WRITE_32, self._begun, number)

    def end(self) -> MemOp:
        """A single 64-bit write of both words, which are adjacent."""
        return MemOp(WRITE_64, self._begun, 1 << 32)

    def idle(self) -> bool:
        """Whether no program runs."""
        return not self._words[0]

    def look(self) -> tuple[int, bool]:
        """The number of the running program, and whether a call has ended since the last look."""
        running, ended = self._words[0], bool(self._words[1])
        if ended:
            self._words[1] = 0
        return running, ended

    def give_back(self) -> None:
        """Return the pair of words of a freed slot."""
        self._free.append(self._index)


@dataclass(eq=False)
class Flight:
    """A call in flight on a stream: the events before and after it. ``whole``: all of the call is
    enqueued, so ``after`` is recorded. Flights are pooled; ``serial`` identifies the call."""

    before: Event
    after: Event
    number: int = 0
    serial: int = 0
    whole: bool = False

    def over(self) -> bool:
        return self.whole and self.after.over()


class Flights:
    """Calls whose progress events show, as words do for a :class:`Watch`.

    Events take no time of a stream, unlike a second stream that writes words when a call begins.
    Successive small calls took 26 us with events and 28 with words (2 H200, 512 x 3584 x 2048), and
    32 and 37 on some streams of a process, depending on their hardware queues.
    """

    def __init__(self, make: Callable[[], Event]) -> None:
        self._make = make
        # The watchdog takes it, too. Reentrant, for signal handlers in the thread that holds it.
        self._lock = threading.RLock()
        self._flying: dict[int, deque[Flight]] = {}  # by stream, the oldest first
        self._landed: list[Flight] = []  # complete flights, whose events are reused
        self._serials = count(1)
        self._seen = 0  # serial of the call that was running at the last look

    def begin(self, number: int, key: int, stream: Any) -> Flight:
        """Begin a call of the program ``number`` on a stream, which ``key`` identifies."""
        with self._lock:
            flight = self._landed.pop() if self._landed else Flight(self._make(), self._make())
            flight.number, flight.serial, flight.whole = number, next(self._serials), False
            flight.before.record(stream)
            self._flying.setdefault(key, deque()).append(flight)
        return flight

    def end(self, flight: Flight, stream: Any) -> None:
        """Record the end of a call after all work that the stream has now."""
        flight.after.record(stream)
        flight.whole = True

    def drop(self, flight: Flight) -> None:
        """Remove an aborted call, so that it is not waited for."""
        with self._lock:
            for flying in self._flying.values():
                if flight in flying:
                    flying.remove(flight)

    def look(self) -> tuple[int, bool]:
        """The number of the running program, 0 if none; and whether another call runs than at the
        last look. Only the watchdog calls this: in a call, a query of an event would break a
        capture of another stream."""
        with self._lock:
            running = [flight for calls in self._flying.values() if (flight := self._first(calls))]
            seen = [flight for flight in running if flight.serial == self._seen] or running
            previous, self._seen = self._seen, seen[0].serial if seen else 0
            return (seen[0].number if seen else 0), self._seen != previous

    def idle(self) -> bool:
        """Whether all calls are complete."""
        with self._lock:
            return all(not flying or flying[-1].over() for flying in self._flying.values())

    def _first(self, flying: deque[Flight]) -> Flight | None:
        """The oldest incomplete call of a stream, if it has begun."""
        # Bisect, since calls end in order, and a call that begins waits for this lock.
        complete = bisect_left(flying, True, key=lambda flight: not flight.over())
        self._landed += [flying.popleft() for _ in range(complete)]
        return flying[0] if flying and flying[0].before.over() else None
