"""Calls that a watchdog follows by events, on streams that do as they are told."""

from __future__ import annotations

import pytest

from ficco.dma.watch import Flights


class Stream:
    """Work is enqueued by number, and done when the test says so."""

    def __init__(self) -> None:
        self.given = self.done = 0


class Event:
    """As the driver's: over if it was never recorded, or once what was in front of it is done."""

    def __init__(self) -> None:
        self.stream, self.at = Stream(), 0

    def record(self, stream: Stream) -> None:
        self.stream, self.at = stream, stream.given

    def over(self) -> bool:
        return self.stream.done >= self.at


class Caller:
    """A stream of which each call is some work."""

    def __init__(self, flights: Flights, key: int) -> None:
        self.flights, self.key, self.stream = flights, key, Stream()

    def other_work(self) -> None:
        self.stream.given += 1

    def call(self, number: int) -> None:
        flight = self.flights.begin(number, self.key, self.stream)
        self.stream.given += 1
        flight.end(self.stream)


def flights() -> tuple[Flights, list[Event]]:
    made: list[Event] = []

    def make() -> Event:
        made.append(Event())
        return made[-1]

    return Flights(make), made


def test_what_runs_is_the_call_whose_turn_it_is() -> None:
    found, _ = flights()
    caller = Caller(found, 1)
    assert found.look() == (0, False) and found.idle()
    caller.other_work()
    for number in (7, 8, 8):
        caller.call(number)
    assert found.look() == (0, False), "its turn has not come"
    assert not found.idle()
    caller.stream.done = 1
    assert found.look() == (7, True)
    assert found.look() == (7, False)
    caller.stream.done = 2
    assert found.look() == (8, True)
    assert found.look() == (8, False)
    caller.stream.done = 3
    assert found.look() == (8, True), "another call of the same program"
    caller.stream.done = 4
    assert found.look() == (0, True) and found.look() == (0, False) and found.idle()


def test_a_stuck_call_is_seen_beside_those_of_another_stream() -> None:
    found, _ = flights()
    stuck, busy = Caller(found, 1), Caller(found, 2)
    busy.call(1)
    stuck.call(5)
    assert found.look()[0] in (1, 5)
    busy.stream.done = busy.stream.given
    assert found.look()[0] == 5
    for number in range(10, 20):
        busy.call(number)
        assert found.look() == (5, False)
        busy.stream.done = busy.stream.given
    assert not found.idle()


def test_a_call_that_the_host_is_stuck_in_runs_until_it_is_broken_off() -> None:
    """The library waits for its peers while it is being called, say."""
    found, _ = flights()
    caller = Caller(found, 1)
    flight = found.begin(3, 1, caller.stream)
    assert found.look() == (3, True) and found.look() == (3, False) and not found.idle()
    flight.end(caller.stream)
    assert found.look() == (0, True) and found.idle()
    caller.call(1)
    found.drop(found.begin(2, 1, caller.stream))
    caller.stream.done = caller.stream.given
    assert found.look() == (0, False) and found.idle()
    caller.call(3)
    assert found.look() == (3, True)


def test_events_are_used_again_and_asked_by_the_watchdog_alone() -> None:
    """As many as calls are under way between two looks of the watchdog. Whoever else asked an event
    while another stream is captured would break the capture."""
    found, made = flights()
    callers = Caller(found, 1), Caller(found, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Event, "over", lambda self: pytest.fail("asked"))
        for number in range(1, 4):
            callers[0].call(number)
    assert len(made) == 6
    for number in range(4, 50):
        caller = callers[number % 2]
        for one in callers:
            one.stream.done = one.stream.given
        assert found.look()[0] == 0
        for _ in range(3):
            caller.call(number)
    assert len(made) == 6
