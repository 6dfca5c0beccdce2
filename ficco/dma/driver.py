"""The interface between the GPU engine and a vendor's runtime.

A vendor is one subclass of :class:`Driver` and one row in ``ficco.dma.ENGINES``. Addresses are
integers, and streams are objects of the vendor's binding. PyTorch calls the GPUs of every vendor
"cuda".
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from ficco.compute.products import library
from ficco.compute.program import Op
from ficco.compute.tiled.products import TiledProducts
from ficco.dma.engine import ALLOCATORS, Engine
from ficco.hip_kernels.launch import MAX_SIGNALS, Kernels, Numbers, Script, ScriptStep, Signals
from ficco.problems.products import Problem

#: Kinds of MemOp, as CUDA's driver calls them.
WAIT_32, WRITE_32, WRITE_64 = "WAIT_VALUE_32", "WRITE_VALUE_32", "WRITE_VALUE_64"


class MemOp(NamedTuple):
    """A wait for a 32-bit word to equal a value, or a write of a 32-bit or 64-bit word."""

    kind: str
    address: int
    value: int

    @property
    def words(self) -> tuple[tuple[int, int], ...]:
        """Address and value of each 32-bit word, in the order in which they are written."""
        if self.kind != WRITE_64:
            return ((self.address, self.value),)
        return (self.address + 4, self.value >> 32), (self.address, self.value & 0xFFFFFFFF)


@dataclass(frozen=True)
class Fused:
    """Waits and writes that a launch carries out around its work.

    Attributes:
        begin: writes at the start of the launch. No other operation is ordered after them.
        front: carried out before any of the work. Every block carries out the waits at the end of
            ``front``; one block carries out the operations before them.
        rear: carried out once, after all of the work.
    """

    begin: tuple[MemOp, ...] = ()
    front: tuple[MemOp, ...] = ()
    rear: tuple[MemOp, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether one launch has room for the operations."""
        return max(len(self.begin) + len(self.front), len(self.rear)) <= MAX_SIGNALS

    def signals(self, arrived: int, mine: Container[int], reads: bool = False) -> Signals:
        """Arguments of a launch. ``mine``: this rank's words; ``reads``: as of :class:`Launch`."""
        front = script(self.front, mine, everyone=True, aside=self.begin)
        return Signals(arrived, front, script(self.rear, mine, released=reads))


def in_front(
    ops: Sequence[MemOp], around: Fused, mine: Container[int], spins: bool
) -> tuple[tuple[MemOp, ...], Fused]:
    """Fold the operations before a launch of copies into it: writes go after its work, since the
    copies need not wait for them; waits go before its work if the launch may spin (``spins``). This
    rank's own words (``mine``) are written before words of peers. Returns the operations that stay
    on the stream before the launch, and those that the launch carries out."""
    # Writes do not move past waits of the launch: a peer may have to see them first.
    writes = [] if around.front else list(takewhile(_writes, reversed(ops)))[::-1]
    rest = ops[: len(ops) - len(writes)]
    waits = list(takewhile(lambda op: spins and not _writes(op), reversed(rest)))[::-1]
    own = [op for op in writes if op.address in mine]
    others = [op for op in writes if op.address not in mine]
    rear_own = list(takewhile(lambda op: _writes(op) and op.address in mine, around.rear))
    rear = (*own, *rear_own, *others, *around.rear[len(rear_own) :])
    folded = replace(around, front=(*waits, *around.front), rear=rear)
    if not folded.fits:
        return tuple(ops), around
    return tuple(rest[: len(rest) - len(waits)]), folded


def behind(ops: Sequence[MemOp], around: Fused, spins: bool) -> tuple[Fused, tuple[MemOp, ...]]:
    """Fold the operations after a launch of copies into it, but none from the first wait on if the
    launch may not spin. Returns all that the launch carries out, and the rest."""
    taken = tuple(takewhile(lambda op: spins or _writes(op), ops))
    folded = replace(around, rear=(*around.rear, *taken))
    return (folded, tuple(ops[len(taken) :])) if folded.fits else (around, tuple(ops))


def _writes(op: MemOp) -> bool:
    return op.kind != WAIT_32


def script(
    ops: Sequence[MemOp],
    mine: Container[int],
    everyone: bool = False,
    aside: Sequence[MemOp] = (),
    released: bool = False,
) -> Script:
    """Waits and writes of a stream as a script of one launch, after the writes ``aside``, which no
    other step is ordered after. With ``everyone`` every block carries out the waits at the end. The
    first of a run of writes to peers (words that are not in ``mine``) is a release: the run becomes
    visible after all writes before it. ``released``: a run at the beginning needs no release.
    """
    steps = [ScriptStep(op.address, op.value, wide=op.kind == WRITE_64) for op in aside]
    for op in ops:
        to_peer = _writes(op) and op.address not in mine
        wide, release = op.kind == WRITE_64, to_peer and not released
        steps.append(ScriptStep(op.address, op.value, not _writes(op), wide, release))
        released = to_peer
    shared = len(list(takewhile(lambda step: step.waits, reversed(steps)))) if everyone else 0
    return Script(tuple(steps), len(aside), len(steps) - shared)


#: Copies bytes on a stream: arrays of destinations, sources and nonzero sizes, and the stream.
Copies = Callable[[Numbers, Numbers, Numbers, Any], None]
#: Bytes of a signal word.
WORD = 4
#: Priorities of streams: above products, equal to products, and below both. Streams of a priority
#: may share a hardware queue. A waiting stream then delays the work enqueued after it.
URGENT, PLAIN, RESCUE = -1, 0, 1


def drained(
    idle: Callable[[], bool], seconds: float, interrupt: Callable[[], None] | None = None
) -> bool:
    """Poll ``idle`` until it returns True; False after ``seconds``. ``interrupt`` is called
    between polls, and may raise."""
    end, pause = time.monotonic() + seconds, 1e-5
    while not idle():
        if interrupt is not None:
            interrupt()
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return True


class Event(Protocol):
    """A vendor's event. Its methods take stream handles."""

    def record(self, stream: Any) -> None:
        """Record the event after all work that the stream has now."""

    def hold(self, stream: Any) -> None:
        """Let later work of the stream wait for the event. No wait if it was never recorded."""

    def over(self) -> bool:
        """Whether all work before the latest record is complete."""

    def seconds_to(self, later: Any) -> float:
        """Seconds from this event to a later one; both must be timing events."""


class Batch(Protocol):
    """Waits and writes with fixed values, carried out in order."""

    ops: tuple[MemOp, ...]

    def enqueue(self, stream: Any) -> None: ...


class Recording(Protocol):
    """Recorded work of streams, which can be enqueued again."""

    def replay(self, stream: Any) -> None: ...


class Handles(Protocol):
    """Memory of the device that processes share by handles."""

    def malloc(self, nbytes: int, kind: str) -> int:
        """Allocate memory that can be shared; ``kind`` is ``"plain"`` or a kind for words."""

    def free(self, address: int) -> Any:
        """Free an allocation."""

    def fill(self, address: int, nbytes: int, stream: Any) -> None:
        """Zero memory."""

    def share(self, address: int) -> bytes:
        """The handle by which another process opens an allocation. All have equal length."""

    def open_shared(self, handle: bytes) -> int:
        """Map an allocation of another process."""

    def close_shared(self, address: int) -> Any:
        """Unmap an allocation of another process."""


@dataclass(frozen=True)
class Stream:
    """A stream that no other library uses: the vendor's handle and PyTorch's object."""

    handle: Any
    torch: torch.cuda.Stream | None
    priority: int


@dataclass(frozen=True)
class Mechanisms:
    """The mechanisms that the ranks of a group have agreed on.

    Attributes:
        memory: a key of :data:`ficco.dma.memories.MEMORIES`.
        words: ``"slot"`` if signal words are in the memory of the slot, else the kind of memory
            that is allocated for them.
        kernels: ficco's kernels post and wait, instead of the stream.
        rectangles: the vendor has 2D copies; otherwise Plans have to pack columns.
        uncaptured: why graphs do not capture signals, and what to do; empty if they do.
        writes_before_events: put a stream write between a copy and an event, which would complete
            late otherwise.
        constants: address of a 0 and a 1 to copy from, and of a word that is never read, if words
            are not in the memory of the slot.
        post, place, wait, copy: descriptions for ``doctor``: how a word is posted, in which memory,
            how it is waited for, and the copy mechanism.
    """

    memory: str = "torch"
    words: str = "slot"
    kernels: bool = False
    rectangles: bool = True
    uncaptured: str = ""
    writes_before_events: bool = False
    constants: int = 0
    post: str = "stream write"
    place: str = "peer's memory"
    wait: str = ""
    copy: str = ""


class Driver(ABC):
    """A vendor's runtime on one rank's device."""

    name: ClassVar[str]  #: name of the engine
    #: Bytes of an allocation of ``"signal"`` memory, which holds a single word.
    word_bytes: ClassVar[int] = 8
    #: Priority of the stream that releases stuck streams.
    rescue: ClassVar[int] = RESCUE
    #: The watchdog sees the begin and end of eager calls by events; otherwise by words.
    watches_by_events: ClassVar[bool] = False
    #: Neighbouring waits and writes become one batch, or are carried out by kernel launches.
    fuses: ClassVar[bool] = False
    #: Calls are recorded, and replayed for operands at the same addresses: :meth:`record`.
    records: ClassVar[bool] = False
    #: Memory in use must not be freed: closing waits for streams.
    waits_to_close: ClassVar[bool] = False

    def __init__(self, device: torch.device, index: int) -> None:
        self.device, self.index = device, index
        self.streams: list[Stream] = []  # streams that this driver has created

    def _lacks(self, feature: str) -> NotImplementedError:
        """The error of an optional feature that this driver does not have."""
        return NotImplementedError(f"the {self.name} driver offers no {feature}")

    # The device.

    @abstractmethod
    def use(self) -> None:
        """Make the device current in this thread."""

    @abstractmethod
    def uncaptured(self) -> contextlib.AbstractContextManager[None]:
        """Let the thread allocate and query events within this block, even while a graph is
        captured."""

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Make the device current within this block, without disturbing a capture."""
        with torch.cuda.device(self.device), self.uncaptured():
            self.use()
            yield

    @abstractmethod
    def means(self, engine: StreamEngine) -> Mechanisms:
        """Agree with the other ranks on mechanisms that all support. Collective.

        Raises:
            NotImplementedError: the ranks have no mechanism in common, or not the selected one.
        """

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    @abstractmethod
    def copy_engines(self) -> int | None:
        """See :meth:`Engine.copy_engines`."""

    def products(self) -> str:
        """Description of the library that multiplies matrices."""
        return library(self.device)

    def forgive(self) -> None:  # noqa: B027  not every vendor remembers errors
        """Forget an error that was expected."""

    def close(self) -> None:
        """Free the allocations of this driver. Work in flight, if any, will never end."""
        for stream in self.streams:
            with contextlib.suppress(RuntimeError):  # the device may have failed
                if stream.torch is not None and stream.torch.query():  # not a stuck stream
                    _spare.setdefault((self.index, stream.priority), []).append(stream.torch)
        self.streams.clear()

    # Streams and events.

    @abstractmethod
    def stream(self, raw: int) -> Any:
        """The object that is cheapest for the binding, from PyTorch's integer handle."""

    @abstractmethod
    def make_stream(self, priority: int) -> int:
        """Create a stream that does not wait for the null stream; returns its integer handle.
        Streams of PyTorch's pool do not serve: the pool hands each out several times."""

    def stream_for(self, name: str) -> Stream:
        """A stream for a lane, or for ``side``, ``uploads`` or ``rescue``."""
        lane = name.split()[-1]
        plain = PLAIN if lane.startswith("compute") else URGENT
        priority = self.rescue if lane == "rescue" else plain
        if spare := _spare.get((self.index, priority)):
            stream = spare.pop()
        else:
            stream = torch.cuda.ExternalStream(self.make_stream(priority), self.device)
        self.streams.append(Stream(self.stream(stream.cuda_stream), stream, priority))
        return self.streams[-1]

    @abstractmethod
    def idle(self, stream: Any) -> bool:
        """Whether all work of a stream is complete."""

    @abstractmethod
    def event(self, timing: bool = False) -> Event:
        """An event for ordering streams, or for timing."""

    def lasting_event(self) -> Event:
        """An event for ordering streams that outlives this driver."""
        return self.event()

    def caller(self) -> int:
        """PyTorch's integer handle of the caller's stream."""
        raw: int = torch._C._cuda_getCurrentRawStream(self.index)
        return raw

    #: Whether the caller's stream is captured.
    in_capture: Callable[[], bool] = staticmethod(torch._C._cuda_isCurrentStreamCapturing)

    def capturing(self) -> int:
        """Identifier of the capture that the caller's stream is in, 0 if none."""
        return self.capture_id(self.stream(self.caller())) if self.in_capture() else 0

    @abstractmethod
    def capture_id(self, stream: Any) -> int:
        """Identifier of the capture that a stream is in, 0 if none."""

    def external(self, event: Event) -> Event | None:
        """The event as an external event of graphs: each launch of a graph records it, or waits
        for it. None if the vendor's graphs have no external events."""
        return None

    def on_lane(self, lane: str, op: Op) -> Op:
        """The operation with the lane's stream as PyTorch's current stream."""
        if lane == "compute0":
            return op

        def on_lane(call: Any) -> None:
            previous = torch.cuda.current_stream(self.device)
            torch.cuda.set_stream(call.state.streams[lane].torch)
            try:
                op(call)
            finally:
                torch.cuda.set_stream(previous)

        return on_lane

    # Words.

    @abstractmethod
    def batch(self, ops: Sequence[MemOp]) -> Batch:
        """Prepare waits and writes of a stream."""

    @abstractmethod
    def writes_reach(self, stream: Any, address: int) -> bool:
        """Whether a stream may write to an address: writes a 0 there and waits for it."""

    # Copies, each prepared once as a function of the arguments that differ from call to call.

    @abstractmethod
    def copy(
        self, dst: int, nbytes: int, ranks: tuple[int, int] | None = None
    ) -> Callable[[int, Any], None]:
        """A function (source, stream) that copies bytes to ``dst``. ``ranks`` are the receiving and
        the sending rank; None for a signal."""

    def batched(self, measured: float) -> tuple[float, str]:
        """See :meth:`Engine.batched`, and a warning if this runtime has no such submission.
        ``measured``: :attr:`ficco.machine.Machine.batched_copies`."""
        return 0.0, ""

    def copies(self, ranks: tuple[int, int], batched: float = 0.0) -> Copies:
        """A function of destinations, sources, sizes and stream: many copies, in any order.
        ``batched``: :attr:`Program.batched`."""

        def copies(dst: Numbers, src: Numbers, sizes: Numbers, stream: Any) -> None:
            columns = (numbers.tolist() for numbers in (dst, src, sizes))
            for to, at, nbytes in zip(*columns, strict=True):
                self.copy(to, nbytes, ranks)(at, stream)

        return copies

    @abstractmethod
    def rectangle(
        self, dst: int, dst_pitch: int, width: int, height: int
    ) -> Callable[[int, int, Any], None]:
        """A function (source, source pitch, stream) that copies rows. Lengths are in bytes."""

    @abstractmethod
    def copy_to_host(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        """Copy bytes of the device to pinned host memory."""

    def copy_from_host(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        """Copy bytes of pinned host memory to the device."""
        raise self._lacks("copies from the host")

    # Memory.

    @abstractmethod
    def host(self, nbytes: int) -> int:
        """Allocate pinned host memory, zeroed, that the device can write. Freed on close."""

    def waitable(self, kind: str) -> int:
        """Allocate a host word, zeroed, that streams wait for and this process writes. Freed on
        close. ``kind`` is the kind of memory of signal words (:attr:`Mechanisms.words`)."""
        return self.host(WORD)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory as a uint8 tensor, not zeroed. Lives as long as its tensors."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def local(self, nbytes: int) -> tuple[int, torch.Tensor]:
        """Allocate device memory: its address, and a uint8 tensor of it. Freed on close."""
        raise self._lacks("memory of its own")

    @property
    def handles(self) -> Handles:
        """Allocation and mapping of memory that processes share by handles."""
        raise self._lacks("memory that is shared by handles")

    def tensor(self, address: int, nbytes: int) -> tuple[torch.Tensor, Any]:
        """A uint8 tensor of memory, and an object that lives as long as any view of it."""
        keeper = _Bytes(address, nbytes)
        with torch.inference_mode(False):  # calls of other modes use it, too
            return torch.as_tensor(keeper, device=self.device), keeper

    def peers(self, address: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of a peer's memory that is mapped in this process."""
        # Not by __cuda_array_interface__: PyTorch would put the tensor on the peer's device.
        storage = torch._C._construct_storage_from_data_pointer(address, self.device, nbytes)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    # ficco's kernels.

    @property
    @abstractmethod
    def has_kernels(self) -> bool:
        """Whether ``auto`` may choose the copy kernel."""

    @abstractmethod
    def kernels(self) -> Kernels:
        """ficco's kernels, compiled on first use.

        Raises:
            BackendError, NotImplementedError: the kernels are not available.
        """

    # Optional.

    #: Why a product whose tiles wait is not available; empty if it is.
    untiled: str = "there is no product whose tiles wait for this GPU"
    #: Ranks share this GPU, so that copies between them are kernels.
    shared: bool = False

    def unscaled(self, problem: Problem) -> str:
        """Why the library cannot multiply operands with a problem's scales, and what to do; empty
        if it can."""
        return ""

    def tiled(self) -> TiledProducts:
        """The products whose tiles wait."""
        raise self._lacks("product whose tiles wait")

    def add_product(
        self, addend: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, stream: Any
    ) -> bool:
        """Compute ``out = addend + a @ b`` without the copy of ``addend`` that PyTorch makes;
        False if that is not supported."""
        return False

    def join_aside(self, event: Event, stream: Any) -> None:
        """Join the work before an event to the graph that captures a stream, if possible without
        letting the stream wait for it."""
        event.hold(stream)

    def record(self, stream: Any, enqueue: Callable[[], None]) -> Recording:
        """Record the work that ``enqueue`` puts on a stream, instead of executing it."""
        raise self._lacks("recordings")


class _Bytes:
    """GPU memory with ``__cuda_array_interface__``, so that PyTorch can wrap it."""

    def __init__(self, address: int, nbytes: int) -> None:
        extent = {"data": (address, False), "shape": (nbytes,)}
        self.__cuda_array_interface__ = {**extent, "typestr": "|u1", "version": 2}


#: Streams of closed engines, by device and priority, to be reused: PyTorch keeps a BLAS workspace
#: for every stream that it has used.
_spare: dict[tuple[int, int], list[torch.cuda.Stream]] = {}


class Lanes(dict[str, Any]):
    """Stream handles of a call's lanes. Lanes fork from the caller's stream, ``compute0``, at the
    event ``fork`` and join it at the events ``joins``. Callers may share the other ``streams``."""

    def __init__(
        self, driver: Driver, caller: Any, streams: dict[str, Stream], mode: str = ""
    ) -> None:
        """``mode``: ``""`` for eager calls, else ``"captured"`` or ``"recorded"``."""
        super().__init__(compute0=caller)
        self._driver, self.streams, self.mode = driver, streams, mode
        self.fork = driver.event()
        self.joins: dict[str, Event] = {}  # by lane

    def __missing__(self, lane: str) -> Any:
        with self._driver.aside():
            if lane not in self.streams:
                self.streams[lane] = self._driver.stream_for(f"{self.mode} {lane}".strip())
            self.joins[lane] = self._driver.event()
        handle = self[lane] = self.streams[lane].handle
        return handle


class StreamEngine(Engine):
    """An engine whose lanes are streams: the interface for its driver and memory."""

    driver: Driver
    side: Stream  #: stream for work that must not wait for calls
    graveyard: Any  #: memory that is freed once all peers have unmapped it
    watched: int  #: address of the pinned words that watched calls write
    means: Mechanisms  #: mechanisms agreed on with the other ranks

    def allocate(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        if torch._C._cuda_getDevice() != self.device.index:
            return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
        tensor: torch.Tensor = ALLOCATORS._empty_strided_cuda(shape, strides, dtype)
        return tensor

    @abstractmethod
    def settle(self, stream: Any) -> None:
        """Wait for a stream of this engine that does not wait for peers."""

    @abstractmethod
    def quiet(self) -> bool:
        """Whether no call of this engine is in flight."""
