"""What the engines have in common whose lanes are a device's streams: buffers as matrices, what
PyTorch does on a lane, events between lanes, and what the watchdog reads."""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch

from ficco.dma.engine import Call, Engine, Missing, Op, Program, Slot, Span, Symmetric
from ficco.dma.products import multiply
from ficco.errors import BackendError
from ficco.hip_kernels import Kernels, Signals
from ficco.plan import Product, Region, Signal, Transfer

#: Bytes of a signal word.
WORD = 4
#: Slots that one engine can watch by words: three for each graph, on HIP as many for eager calls.
MAX_WATCHED = 4096


def align(nbytes: int, to: int = 512) -> int:
    """``nbytes``, rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to


def wanted(signal: Signal) -> int:
    """The value that is posted and waited for. Memory is zero when a slot is made: that is at rest
    for all words but, in the meaning of a Plan, those that hand a slot over, where 0 says free."""
    return 0 if signal.released else 1


class Event(Protocol):
    """A vendor's event, by handles of streams."""

    def record(self, stream: Any) -> None:
        """It is over when what is on the stream now is."""

    def hold(self, stream: Any) -> None:
        """What comes on the stream waits for it."""

    def over(self) -> bool:
        """Whether what was on the stream at its latest record is over."""


class Mapped(Symmetric):
    """Symmetric memory that has an address here on every rank.

    Attributes:
        addresses: of all ranks' parts, mapped here.
    """

    addresses: list[int]

    @abstractmethod
    def part(self, rank: int) -> torch.Tensor:
        """A rank's part as bytes, for kernels of this device to read."""


class Watch:
    """Two words in pinned host memory that a slot's calls write: the number of the program that
    runs, 0 for none, and whether a call has ended."""

    def __init__(self, words: Any) -> None:
        self._words = words  # of numpy or ctypes

    def running(self) -> int:
        return int(self._words[0])

    def look(self) -> tuple[int, bool]:
        """The number of the program that runs, and whether a call has ended since the latest
        look."""
        running, ended = self.running(), bool(self._words[1])
        if ended:
            self._words[1] = 0
        return running, ended


class Places:
    """Which of an engine's pairs of words for a :class:`Watch` are free."""

    def __init__(self) -> None:
        self._free = list(range(MAX_WATCHED))

    def take(self) -> int:
        """One of them.

        Raises:
            NotImplementedError: there is none left.
        """
        if not self._free:
            raise NotImplementedError(
                f"more than {MAX_WATCHED // 3} graphs capture ficco calls; capture more calls in "
                "each, or let go of some with ficco.close(group)"
            )
        return self._free.pop()

    def give_back(self, index: int) -> None:
        """The slot that it was taken for is gone."""
        self._free.append(index)


def enqueue(body: Sequence[Op], beside: Sequence[str], call: Call) -> None:
    """Enqueue the operations of a call; in the end the caller's stream waits for the lanes that
    run beside it."""
    for op in body:
        op(call)
    lanes = call.state
    stream = lanes["compute0"]
    for lane in beside:
        event = lanes.joins[lane]
        event.record(lanes[lane])
        event.hold(stream)


@dataclass(eq=False)
class Flight:
    """A call on a stream: an event in front of it, and one behind it once all of it is enqueued.

    They are used again for later calls, of which ``serial`` is another one's each time.
    """

    before: Event
    behind: Event
    number: int = 0
    serial: int = 0
    whole: bool = False

    def over(self) -> bool:
        return self.whole and self.behind.over()


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
        flight.behind.record(stream)
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
            found = [flight for flight in running if flight.serial == self._seen] or running
            before, self._seen = self._seen, found[0].serial if found else 0
            return (found[0].number if found else 0), self._seen != before

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


@dataclass(frozen=True)
class KernelCopies:
    """An operation that copies rows of one shape by the kernel.

    Attributes:
        targets, sources: address and row pitch in bytes of both ends of each copy; a source may be
            another one in each call.
        width, height: bytes of a row, and how many.
    """

    kernels: Kernels
    lane: str
    targets: list[tuple[int, int]]
    sources: list[Callable[[Call], tuple[int, int]]]
    width: int
    height: int

    def __call__(self, call: Call, signals: Signals | None = None) -> None:
        """With ``signals`` there must be something to copy."""
        found = [source(call) for source in self.sources]
        ends = tuple((to, at) for (to, _), (at, _) in zip(self.targets, found, strict=True))
        pitches = self.targets[0][1], found[0][1]
        stream = call.state[self.lane]
        self.kernels.copies(ends, *pitches, self.width, self.height, stream, signals=signals)


class StreamEngine(Engine):
    """An engine whose calls are enqueued on streams; ``call.state`` has their handles by lane, and
    the event ``fork``, at which the lanes begin."""

    asynchronous = True

    @property
    @abstractmethod
    def _kernels(self) -> Kernels:
        """ficco's kernels, of which copies by kernel are; raises where they are not to be had."""

    @abstractmethod
    def _new_event(self) -> Event:
        """An event that programs keep."""

    @abstractmethod
    def _before_event(self, program: Program) -> Callable[[Any], None] | None:
        """What a stream is given between a copy and an event, where the event would be late."""

    @abstractmethod
    def _on_lane(self, program: Program, step: int, op: Op) -> Op:
        """The operation, with what PyTorch does in it ordered on the step's lane."""

    @abstractmethod
    def _read(self, slot: Slot) -> list[int]:
        """The words of a slot of this rank, from any thread; empty if that takes too long."""

    @abstractmethod
    def _seconds(self, program: Program, since: Any, until: Any) -> float:
        """Between two stamps of a program, by their names in its state."""

    # Order.

    def enter(self, program: Program, lane: str) -> Op | None:
        if lane in ("compute0", "sync"):  # execute() sees to them
            return None
        return lambda call: call.state.fork.hold(call.state[lane])

    def join(self, program: Program, step: int, earlier: int) -> Op | None:
        lane = program.plan.steps[step].lane
        if lane == "sync":
            return None
        event = self._event(program, earlier)
        return lambda call: event.hold(call.state[lane])

    def record(self, program: Program, step: int) -> Op | None:
        steps = program.plan.steps
        if not any(step in later.after for later in steps if later.lane != "sync"):
            return None  # the sync lane begins when all others are over
        lane, event = steps[step].lane, self._event(program, step)
        before = self._before_event(program) if steps[step].op == "copy" else None
        if before is None:
            return lambda call: event.record(call.state[lane])

        def op(call: Call) -> None:
            before(call.state[lane])
            event.record(call.state[lane])

        return op

    def _event(self, program: Program, step: int) -> Event:
        key = "event", step
        if key not in program.state:
            program.state[key] = self._new_event()
        found: Event = program.state[key]
        return found

    # Buffers.

    def _address(self, program: Program, region: Region) -> tuple[int, int]:
        """Address and row pitch in bytes of a symmetric buffer of any rank."""
        slot, buffer = program.slot, program.plan.buffer[region.buffer]
        memory: Symmetric | None
        if buffer.memory != "slot":
            assert program.source is not None
            memory, start = program.source
        else:
            assert slot is not None
            memory, start = slot.memory, slot.data + program.plan.offsets[buffer.name]
        assert isinstance(memory, Mapped)
        pitch = buffer.shapes[region.rank][1] * buffer.itemsize
        return memory.addresses[region.rank] + start, pitch

    def _at(self, program: Program, region: Region) -> tuple[int, int]:
        """Address and row pitch in bytes of a region of a symmetric buffer."""
        buffer = program.plan.buffer[region.buffer]
        base, pitch = self._address(program, region)
        if buffer.layout == "columns":
            elements = region.col * buffer.rows + region.row * region.cols
            return base + elements * buffer.itemsize, region.cols * buffer.itemsize
        return base + region.row * pitch + region.col * buffer.itemsize, pitch

    def _source(self, program: Program, region: Region) -> Callable[[Call], tuple[int, int]]:
        """Address and row pitch in bytes of what a copy reads, for each call: one of its own
        operands or results, or what lies in symmetric memory."""
        buffer = program.plan.buffer[region.buffer]
        if region.rank != self.rank or buffer.memory == "slot":
            fixed = self._at(program, region)
            return lambda call: fixed
        itemsize, name = buffer.itemsize, buffer.name

        def own(call: Call) -> tuple[int, int]:
            whole = call.tensors[name]
            pitch = whole.stride(0) * itemsize
            return whole.data_ptr() + region.row * pitch + region.col * itemsize, pitch

        return own

    def _tensor(self, program: Program, call: Call, name: str) -> torch.Tensor:
        """A whole buffer of this rank as a matrix."""
        tensor = call.tensors.get(name)
        return self._shared(program, name, self.rank) if tensor is None else tensor

    def _shared(self, program: Program, name: str, rank: int) -> torch.Tensor:
        """A whole buffer of any rank in a slot's symmetric memory as a matrix."""
        key = name, rank
        if key not in program.state:
            slot, buffer = program.slot, program.plan.buffer[name]
            assert slot is not None and isinstance(slot.memory, Mapped)
            rows, cols = buffer.rows, buffer.shapes[rank][1]
            start = slot.data + program.plan.offsets[name]
            with torch.inference_mode(False):  # calls of other modes use it, too
                part = slot.memory.tensor if rank == self.rank else slot.memory.part(rank)
                flat = part[start : start + rows * cols * buffer.itemsize]
                program.state[key] = flat.view(getattr(torch, buffer.dtype)).view(rows, cols)
        found: torch.Tensor = program.state[key]
        return found

    def _view(self, program: Program, call: Call, region: Region) -> torch.Tensor:
        if region.rank == self.rank:
            whole = self._tensor(program, call, region.buffer)
        else:
            whole = self._shared(program, region.buffer, region.rank)
        buffer = program.plan.buffer[region.buffer]
        if buffer.layout == "columns":
            at = whole.storage_offset() + region.col * buffer.rows + region.row * region.cols
            return whole.as_strided((region.rows, region.cols), (region.cols, 1), at)
        view = whole if region.rows == whole.shape[0] else whole[region.row : region.row_stop]
        return view if region.cols == whole.shape[1] else view[:, region.col : region.col_stop]

    def _batch(
        self, program: Program, call: Call, region: Region, batch: int, stride: int
    ) -> torch.Tensor:
        """So many regions, each ``stride`` rows below the one before."""
        view = self._view(program, call, region)
        pitch, step = view.stride()
        shape, strides = (batch, region.rows, region.cols), (stride * pitch, pitch, step)
        return view.as_strided(shape, strides, view.storage_offset())

    # Copies.

    def _target(self, program: Program, region: Region) -> tuple[int, int]:
        """Address and row pitch in bytes of where a copy leads."""
        return self._at(program, region)

    def copies(self, program: Program, steps: Sequence[int]) -> Op:
        return self._kernel_copies(program, steps)

    def _kernel_copies(self, program: Program, steps: Sequence[int]) -> KernelCopies:
        plan = program.plan
        lane = plan.steps[steps[0]].lane
        transfers = [one for index in steps if (one := plan.steps[index].transfer) is not None]
        targets = [self._target(program, transfer.dst) for transfer in transfers]
        sources = [self._source(program, transfer.src) for transfer in transfers]
        first = transfers[0].src
        width, height = first.cols * plan.buffer[first.buffer].itemsize, first.rows
        return KernelCopies(self._kernels, lane, targets, sources, width, height)

    # What PyTorch does.

    def place(self, program: Program, step: int, transfer: Transfer) -> Op:
        src, dst = transfer.src, transfer.dst

        def op(call: Call) -> None:
            self._view(program, call, dst).copy_(self._view(program, call, src))

        return self._on_lane(program, step, op)

    def matmul(self, program: Program, step: int, products: Sequence[Product]) -> Op:
        lane = program.plan.steps[step].lane
        parts = [self._product(program, product, lane) for product in products]

        def op(call: Call) -> None:
            for part in parts:
                part(call)

        return self._on_lane(program, step, parts[0] if len(parts) == 1 else op)

    def _product(self, program: Program, product: Product, lane: str) -> Op:
        batched = product.batch > 1

        def op(call: Call) -> None:
            b = self._view(program, call, product.b)
            if batched:
                a = self._batch(program, call, product.a, product.batch, product.a_stride)
                out = self._batch(program, call, product.out, product.batch, product.out_stride)
                b = b.unsqueeze(0).expand(product.batch, -1, -1)
            else:
                a = self._view(program, call, product.a)
                a = a.t() if product.transposed else a
                out = self._view(program, call, product.out)
            addend = out if product.accumulate else None
            if product.addend is not None:
                addend = self._view(program, call, product.addend)
                if self._added(addend, a, b, out, call.state[lane]):
                    return
            multiply(a, b, out, addend)

        return op

    def _added(
        self,
        addend: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        stream: Any,
    ) -> bool:
        """Whether a library has been asked for the sum that reads the addend where it lies;
        PyTorch copies it first."""
        return False

    # Watching.

    def spans(self, program: Program, call: Call) -> list[Span]:
        self.synchronize()
        return [
            Span(
                index,
                step.lane,
                self._seconds(program, "base", ("stamp", index, False)),
                self._seconds(program, "base", ("stamp", index, True)),
            )
            for index, step in enumerate(program.plan.steps)
        ]

    def pulse(self, slot: Slot) -> tuple[int, bool]:
        watch: Watch | Flights = slot.state.watch
        return watch.look()

    def missing(self, slot: Slot, program: Program) -> Missing | None:
        steps = program.plan.steps
        if slot.memory is None:
            return Missing(next(i for i, step in enumerate(steps) if step.op == "collective"))
        words: list[int] = []
        with contextlib.suppress(BackendError):
            words = self._read(slot)
        if not words:
            return None
        late = [
            Missing(index, signal, wanted(signal), words[signal.word])
            for index, step in enumerate(steps)
            for signal in step.waits
            if words[signal.word] != wanted(signal)
        ]
        # A slot that is taken says 1 from then on: a peer's data that is missing tells more.
        late.sort(key=lambda missing: missing.signal is not None and missing.signal.released)
        return late[0] if late else None

    def _abort_collective(self) -> None:
        """Make the group's library give up; may take as long as its peers do."""
        with contextlib.suppress(RuntimeError):
            self.group._get_backend(self.device).abort()
