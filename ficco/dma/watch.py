"""Progress of the calls on a slot, for the watchdog: by words that calls write, or by events. A
stuck call is freed by writing the words that it waits for."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from ficco.compute.program import Call, Program, Slot
from ficco.dma.driver import (
    WORD,
    WRITE_32,
    WRITE_64,
    Driver,
    Event,
    MemOp,
    Stream,
    StreamEngine,
    drained,
)
from ficco.dma.engine import Missing
from ficco.dma.gpu_network import GpuNetwork
from ficco.dma.host import Hosts
from ficco.dma.lane_ops import MakeBatch, Run
from ficco.dma.memories import Graveyard, OwnWords, Words
from ficco.errors import BackendError
from ficco.plan import Signal

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Seconds that a rank may take to read its own words.
READ_S = 2.0
#: Seconds between two attempts to free stuck streams.
FREE_S = 0.01
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
        self._flying = defaultdict[int, deque[Flight]](deque)  # by stream, the oldest first
        self._landed: list[Flight] = []  # complete flights, whose events are reused
        self._serials = count(1)
        self._seen = 0  # serial of the call that was running at the last look

    def begin(self, number: int, key: int, stream: Any) -> Flight:
        """Begin a call of the program ``number`` on a stream, which ``key`` identifies."""
        try:  # without the lock: the watchdog only adds to the one list and takes from the other
            flight = self._landed.pop()
        except IndexError:
            flight = Flight(self._make(), self._make())
        flight.number, flight.serial, flight.whole = number, next(self._serials), False
        flight.before.record(stream)
        self._flying[key].append(flight)
        return flight

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
            streams = list(self._flying.values())  # calls add others
            running = [flight for calls in streams if (flight := self._first(calls))]
            seen = [flight for flight in running if flight.serial == self._seen] or running
            previous, self._seen = self._seen, seen[0].serial if seen else 0
            return (seen[0].number if seen else 0), self._seen != previous

    def oldest(self) -> int:
        """The number of the oldest call that is not known to have ended, 0 if none. Takes no lock,
        since a thread inside the driver may hold it."""
        calls = [flight for calls in list(self._flying.values()) for flight in list(calls)[:1]]
        return min(calls, key=lambda flight: flight.serial).number if calls else 0

    def idle(self) -> bool:
        """Whether all calls are complete."""
        with self._lock:
            for flying in list(self._flying.values()):
                calls = len(flying)  # a thread may begin another meanwhile
                if calls and flying[calls - 1].over():
                    self._landed += [flying.popleft() for _ in range(calls)]
            return not any(list(self._flying.values()))

    def _first(self, flying: deque[Flight]) -> Flight | None:
        """The oldest incomplete call of a stream, if it has begun."""
        # Bisect, since calls end in order, and querying an event takes microseconds.
        complete = bisect_left(flying, True, key=lambda flight: not flight.over())
        self._landed += [flying.popleft() for _ in range(complete)]
        return flying[0] if flying and flying[0].before.over() else None


def wanted(signal: Signal) -> int:
    """The value that a signal posts and waits for. A new slot is zeroed, so 0 is the rest value of
    every word. ``released`` words rest posted in a Plan: for them 0 means free."""
    return 0 if signal.released else 1


@dataclass(eq=False)
class SlotState:
    """The engine's state of a slot.

    Attributes:
        watch: progress of the slot's calls, for the watchdog.
        over: event after the latest call on the caller's stream.
        done: event after the slot has been handed on.
        retired: the last event of the latest call; None before the first.
        captured: the slot belongs to a graph, whose replays record no events.
        packs: by lane, the buffer where columns are packed: its address and its bytes.
    """

    watch: Watch | Flights
    words: Words | None
    over: Event
    done: Event
    captured: bool
    retired: Event | None = None
    packs: dict[str, tuple[int, torch.Tensor]] = field(default_factory=dict)

    def idle(self) -> bool:
        """Whether all calls are complete."""
        if not self.watch.idle():
            return False
        by_events = self.captured or isinstance(self.watch, Flights)
        return by_events or self.retired is None or self.retired.over()


class WatchedEngine(StreamEngine):
    """A GPU engine that shows the watchdog of its group the progress of calls."""

    _batch: MakeBatch
    _network: GpuNetwork | None
    _rescue: Stream  #: stream that writes and reads words while calls are stuck

    def __init__(self, group: ProcessGroup, driver: Driver, hosts: Hosts | None) -> None:
        super().__init__(group, driver.device, hosts)
        self.driver, self.graveyard = driver, Graveyard()
        self.in_capture = driver.in_capture  # type: ignore[method-assign]
        self._batch, self._network = driver.batch, None
        self._free_watches = list(range(MAX_WATCHED))  # pairs of words that no slot uses
        self._states: set[SlotState] = set()
        self._read_buffer = 0, 0  # pinned memory for words: address and number of words

    # Slots.

    def watch(self, captured: bool) -> Slot:
        return Slot(None, captured=captured, state=self._state(None, captured))

    def _state(self, words: Words | None, captured: bool) -> SlotState:
        driver = self.driver
        with driver.aside():
            watch: Watch | Flights
            if driver.watches_by_events and not captured:
                watch = Flights(driver.event)
            else:
                watch = Watch(self.watched, self._free_watches)
            if words is not None and words.count > self._read_buffer[1]:
                # Not once calls are stuck: CUDA may then wait for their streams.
                self._read_buffer = driver.host(words.count * WORD), words.count
            state = SlotState(watch, words, driver.event(), driver.event(), captured)
        self._states.add(state)
        return state

    def discard(self, slot: Slot) -> None:
        state: SlotState = slot.state
        self._states.discard(state)
        if isinstance(state.watch, Watch):
            state.watch.give_back()
        if isinstance(state.words, OwnWords):
            state.words.free()
        super().discard(slot)

    def retire(self, slot: Slot) -> None:
        if slot.state.retired is not None:
            drained(slot.state.retired.over, math.inf, self.interrupt)

    def quiet(self) -> bool:
        with self.driver.aside():
            return all(state.idle() for state in list(self._states))  # other threads may add states

    def idle(self, slots: Sequence[Slot]) -> bool:
        with self.driver.aside():
            return all(slot.state.idle() for slot in slots)

    # Calls.

    def _begin(self, program: Program, call: Call, raw: int) -> Flight | None:
        """Order a call after the last one on its slot; return its flight if watched by events."""
        slot = program.slot
        if slot is not None and slot.words and (retired := slot.state.retired) is not None:
            # The words are at rest only after that event, which may be on another stream.
            retired.hold(call.state["compute0"])
        if slot is None or not isinstance(watch := slot.state.watch, Flights):
            return None
        return watch.begin(slot.number(program), raw, call.state["compute0"])

    def _abort(self, run: Run, call: Call, slot: Slot | None, flight: Flight | None) -> None:
        """Remove an aborted call from the watchdog."""
        if slot is None:
            return
        watch: Watch | Flights = slot.state.watch
        if flight is not None:
            assert isinstance(watch, Flights)
            watch.drop(flight)
        elif isinstance(watch, Watch):
            with contextlib.suppress(BackendError):  # raise the first error
                self._batch([watch.end()]).enqueue(call.state[run.tail_lane])

    # The watchdog.

    def pulse(self, slot: Slot) -> tuple[int, bool]:
        watch: Watch | Flights = slot.state.watch
        if isinstance(watch, Watch):
            return watch.look()
        with self.driver.aside():
            return watch.look()

    def begun(self, slot: Slot) -> tuple[int, bool]:
        watch: Watch | Flights = slot.state.watch
        return watch.look() if isinstance(watch, Watch) else (watch.oldest(), False)

    def missing(self, slot: Slot, program: Program) -> Missing | None:
        steps = program.plan.steps
        if slot.memory is None:
            return Missing(next(i for i, step in enumerate(steps) if step.op == "collective"))
        if self._network is not None and (crossing := self._network.missing(program.plan)):
            return crossing
        words = self._read(slot)
        late = [
            Missing(index, signal.poster, wanted(signal), words[signal.word], signal)
            for index, step in enumerate(steps)
            for signal in (*step.waits, *step.gates)
            if words[signal.word] != wanted(signal)
        ]
        # Prefer missing data of a peer: the `released` words of a slot in use are 1 in any case.
        return min(late, key=lambda wait: bool(wait.signal and wait.signal.released), default=None)

    def _read(self, slot: Slot) -> list[int]:
        """Read this rank's words of a slot, from any thread."""
        words: Words = slot.state.words
        with self.driver.aside():
            at = target = self._read_buffer[0]
            for address, count in words.runs(self.rank):
                self.driver.copy_to_host(at, address, count * WORD, self._rescue.handle)
                at += count * WORD
            if not drained(partial(self.driver.idle, self._rescue.handle), READ_S):
                raise BackendError("stream query", "not ready", "the copy does not end")
        return list((ctypes.c_uint32 * words.count).from_address(target))

    @property
    def lost(self) -> set[int]:
        return self._network.lost if self._network is not None else set()

    def release(self, slots: Sequence[Slot], seconds: float) -> bool:
        """Write the wanted value of every wait, repeatedly, until no call is running."""
        end = time.monotonic() + seconds
        aborting = False
        with self.driver.aside():
            while True:
                if self._network is not None:
                    self._network.give_up()
                try:
                    self._satisfy()
                    if all(slot.state.idle() for slot in slots):
                        return True
                except BackendError:
                    if self._dead():
                        return True
                if time.monotonic() > end:
                    return False
                stuck = [slot for slot in slots if slot.memory is None]
                if not aborting and any(slot.state.watch.look()[0] for slot in stuck):
                    aborting = True
                    threading.Thread(target=self._abort_collective, daemon=True).start()
                time.sleep(FREE_S)

    def _satisfy(self) -> None:
        """Write the wanted value to every word of this rank."""
        rescue = self._rescue.handle
        if not self.driver.idle(rescue):
            return  # with more writes each time, the stream would never drain
        retired = [memory for memory in self.graveyard.dead if isinstance(memory, OwnWords)]
        for words in [*(state.words for state in list(self._states)), *retired]:
            if words is not None:
                addresses = [words.address(self.rank, i) for i in range(words.count)]
                ops = [MemOp(WRITE_32, at, i >= self.world) for i, at in enumerate(addresses)]
                self._batch(ops).enqueue(rescue)

    def _dead(self) -> bool:
        """Whether the device has failed, so that no call runs or waits on it any more."""
        try:
            self.driver.idle(self._rescue.handle)
        except BackendError:
            return True
        return False

    def _abort_collective(self) -> None:
        """Make the group's library abort; may take as long as its peers do."""
        with contextlib.suppress(RuntimeError):
            self.group._get_backend(self.device).abort()
