"""Calls that a watchdog follows by events, on streams that a test advances."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ficco.dma.watch import Flights


class Stream:
    """A stream that counts enqueued work; a test sets how much is done."""

    def __init__(self) -> None:
        self.enqueued = self.done = 0


class Event:
    """A driver's event: over if never recorded, or once all earlier work is done."""

    def __init__(self) -> None:
        self.stream, self.at = Stream(), 0

    def record(self, stream: Stream) -> None:
        self.stream, self.at = stream, stream.enqueued

    def over(self) -> bool:
        return self.stream.done >= self.at


class Caller:
    """A stream with calls that each enqueue one unit of work."""

    def __init__(self, flights: Flights, key: int) -> None:
        self.flights, self.key, self.stream = flights, key, Stream()

    def other_work(self) -> None:
        self.stream.enqueued += 1

    def call(self, number: int) -> None:
        flight = self.flights.begin(number, self.key, self.stream)
        self.stream.enqueued += 1
        flight.after.record(self.stream)
        flight.whole = True


def flights() -> tuple[Flights, list[Event]]:
    events: list[Event] = []

    def make() -> Event:
        events.append(Event())
        return events[-1]

    return Flights(make), events


def test_the_running_call_is_the_first_unfinished_one() -> None:
    watched, _ = flights()
    caller = Caller(watched, 1)
    assert watched.look() == (0, False) and watched.idle()
    caller.other_work()
    for number in (7, 8, 8):
        caller.call(number)
    assert watched.look() == (0, False), "its turn has not come"
    assert not watched.idle()
    caller.stream.done = 1
    assert watched.look() == (7, True)
    assert watched.look() == (7, False)
    caller.stream.done = 2
    assert watched.look() == (8, True)
    assert watched.look() == (8, False)
    caller.stream.done = 3
    assert watched.look() == (8, True), "another call of the same program"
    caller.stream.done = 4
    assert watched.look() == (0, True) and watched.look() == (0, False) and watched.idle()


def test_a_stuck_call_is_reported_while_another_stream_runs() -> None:
    watched, _ = flights()
    stuck, busy = Caller(watched, 1), Caller(watched, 2)
    busy.call(1)
    stuck.call(5)
    assert watched.look()[0] in (1, 5)
    busy.stream.done = busy.stream.enqueued
    assert watched.look()[0] == 5
    for number in range(10, 20):
        busy.call(number)
        assert watched.look() == (5, False)
        busy.stream.done = busy.stream.enqueued
    assert not watched.idle()


def test_a_call_in_which_the_host_hangs_runs_until_it_is_dropped() -> None:
    """For example, the library may wait for peers before it returns."""
    watched, _ = flights()
    caller = Caller(watched, 1)
    flight = watched.begin(3, 1, caller.stream)
    assert watched.look() == (3, True) and watched.look() == (3, False) and not watched.idle()
    flight.after.record(caller.stream)
    flight.whole = True
    assert watched.look() == (0, True) and watched.idle()
    caller.call(1)
    watched.drop(watched.begin(2, 1, caller.stream))
    caller.stream.done = caller.stream.enqueued
    assert watched.look() == (0, False) and watched.idle()
    caller.call(3)
    assert watched.look() == (3, True)


@pytest.mark.parametrize("key", [1, 2])
def test_a_call_begins_while_another_thread_queries_events(key: int) -> None:
    """It does not wait, is the first of its stream or not, and is watched from then on."""
    for name, seen in (("look", (0, False)), ("idle", False)):
        watched, _ = flights()
        first, second, begun = Caller(watched, 1), Caller(watched, key), list[bool]()
        first.call(5)
        first.stream.done = 1

        def over(event: Event, second: Caller = second, begun: list[bool] = begun) -> bool:
            if not begun:
                begun.append(True)
                with ThreadPoolExecutor() as thread:
                    thread.submit(second.call, 6).result(20)
            return event.stream.done >= event.at

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Event, "over", over)
            assert getattr(watched, name)() in (seen, (6, True)) and begun
        assert not watched.idle() and watched.look()[0] == watched.oldest() == 6


def test_the_oldest_call_is_known_without_a_query_and_without_the_lock() -> None:
    """Another thread is inside the driver, with the lock."""
    watched, _ = flights()
    first, second = Caller(watched, 1), Caller(watched, 2)
    second.call(5)
    first.call(6)
    first.call(7)

    def oldest() -> int:
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as thread, watched._lock:
            patch.setattr(Event, "over", lambda self: pytest.fail("queried"))
            return thread.submit(watched.oldest).result(20)

    assert oldest() == 5
    second.stream.done = second.stream.enqueued
    assert not watched.idle() and oldest() == 6
    first.stream.done = first.stream.enqueued
    assert watched.idle() and oldest() == 0


def test_events_are_reused_and_queried_only_by_the_watchdog() -> None:
    """There are as many events as calls in flight between two looks of the watchdog. A query by a
    call would break the capture of another stream."""
    watched, events = flights()
    callers = Caller(watched, 1), Caller(watched, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Event, "over", lambda self: pytest.fail("queried"))
        for number in range(1, 4):
            callers[0].call(number)
    assert len(events) == 6
    for number in range(4, 50):
        caller = callers[number % 2]
        for idle in callers:
            idle.stream.done = idle.stream.enqueued
        assert watched.look()[0] == 0
        for _ in range(3):
            caller.call(number)
    assert len(events) == 6
