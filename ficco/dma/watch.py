"""What a watchdog reads of the calls on a slot: by words that they write, or by events."""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from ficco.dma.driver import WORD, Event
from ficco.dma.memops import WRITE_32, WRITE_64, MemOp

#: Slots that one engine can watch by words: three for each graph, and where eager calls are
#: watched so, too, as many for these.
MAX_WATCHED = 4096


class Watch:
    """Two words in pinned host memory that a slot's calls write: the number of the program that
    runs, 0 for none, and whether a call has ended."""

    def __init__(self, base: int, free: list[int]) -> None:
        """``base``: where pairs of words lie; ``free``: numbers of those that no slot has.

        Raises:
            NotImplementedError: there is none left.
        """
        if not free:
            raise NotImplementedError(
                f"more than {MAX_WATCHED // 3} graphs capture ficco calls; capture more calls in "
                "each, or let go of some with ficco.close(group)"
            )
        self._free, self._index = free, free.pop()
        self._begun = base + 2 * self._index * WORD
        self._words = (ctypes.c_uint32 * 2).from_address(self._begun)

    def begin(self, number: int) -> MemOp:
        return MemOp(WRITE_32, self._begun, number)

    def end(self) -> MemOp:
        """One write, since the words are adjacent."""
        return MemOp(WRITE_64, self._begun, 1 << 32)

    def idle(self) -> bool:
        """Whether no program runs."""
        return not self._words[0]

    def look(self) -> tuple[int, bool]:
        """The number of the program that runs, and whether a call has ended since the latest
        look."""
        running, ended = self._words[0], bool(self._words[1])
        if ended:
            self._words[1] = 0
        return running, ended

    def give_back(self) -> None:
        """The slot is gone."""
        self._free.append(self._index)


@dataclass(eq=False)
class Flight:
    """A call in flight on a stream: an event before it, and one after it once all of it is
    enqueued. Flights are pooled; ``serial`` identifies the call."""

    before: Event
    after: Event
    number: int = 0
    serial: int = 0
    whole: bool = False

    def over(self) -> bool:
        return self.whole and self.after.over()


class Flights:
    """Calls that tell by events that they begin and end, as a :class:`Watch` is told by words.

    Events take none of a stream's time. A second stream that writes words where a call begins does:
    small calls in a row took 26 us with events and 28 with words (2 H200, 512 x 3584 x 2048), and
    on some streams of a process, by what hardware queues they got, 32 and 37.
    """

    def __init__(self, make: Callable[[], Event]) -> None:
        self._make = make
        # A watchdog looks on; a signal's handler may come back in the thread that holds it.
        self._lock = threading.RLock()
        self._flying: dict[int, deque[Flight]] = {}  # by stream, the oldest first
        self._landed: list[Flight] = []  # for their events
        self._serials = count(1)
        self._seen = 0  # what was running at the latest look

    def begin(self, number: int, key: int, stream: Any) -> Flight:
        """A call of the program of that number begins on a stream, which is known by ``key``."""
        with self._lock:
            flight = self._landed.pop() if self._landed else Flight(self._make(), self._make())
            flight.number, flight.serial, flight.whole = number, next(self._serials), False
            flight.before.record(stream)
            self._flying.setdefault(key, deque()).append(flight)
        return flight

    def end(self, flight: Flight, stream: Any) -> None:
        """All of the call is enqueued; it is over when what is on the stream now is."""
        flight.after.record(stream)
        flight.whole = True

    def drop(self, flight: Flight) -> None:
        """The call was broken off: nobody is to wait for it."""
        with self._lock:
            for flying in self._flying.values():
                if flight in flying:
                    flying.remove(flight)

    def look(self) -> tuple[int, bool]:
        """The number of the program whose call runs, 0 if none does; and whether it is another
        call than at the latest look. For a watchdog: a call that begins asks no event, which
        would break a capture of another stream."""
        with self._lock:
            running = [flight for one in self._flying.values() if (flight := self._first(one))]
            seen = [flight for flight in running if flight.serial == self._seen] or running
            before, self._seen = self._seen, seen[0].serial if seen else 0
            return (seen[0].number if seen else 0), self._seen != before

    def idle(self) -> bool:
        """Whether all calls are over."""
        with self._lock:
            return all(not flying or flying[-1].over() for flying in self._flying.values())

    def _first(self, flying: deque[Flight]) -> Flight | None:
        """The oldest call of a stream that is not over, if it has begun."""
        # They end in order. A call that begins waits for this.
        over = bisect_left(flying, True, key=lambda flight: not flight.over())
        self._landed += [flying.popleft() for _ in range(over)]
        return flying[0] if flying and flying[0].before.over() else None
