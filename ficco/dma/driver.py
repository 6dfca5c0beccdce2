"""What the GPU engine needs of a vendor: one subclass of :class:`Driver`, and a row in ``choose``.

Addresses are plain numbers. A stream is what the vendor's binding takes for one; PyTorch calls the
GPUs of every vendor "cuda".
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from ficco.compute.products import library
from ficco.compute.program import Op
from ficco.compute.tiled.products import TiledProducts
from ficco.dma.engine import Engine
from ficco.dma.memops import MemOp
from ficco.hip_kernels.launch import Kernels, Numbers
from ficco.problems.products import Problem

#: Copies bytes on a stream: from where to where, and how many each. None of them is 0.
Copies = Callable[[Numbers, Numbers, Numbers, Any], None]
#: Bytes of a signal word.
WORD = 4
#: Priorities of streams: before products, with them, and apart from both. Streams of a priority may
#: share hardware queues, in which one that waits holds up what comes after it.
URGENT, PLAIN, RESCUE = -1, 0, 1


def drained(
    idle: Callable[[], bool], seconds: float, interrupt: Callable[[], None] | None = None
) -> bool:
    """Ask again and again whether something is idle; False if it takes too long. ``interrupt`` is
    called meanwhile, and may raise."""
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
    """A vendor's event, by handles of streams."""

    def record(self, stream: Any) -> None:
        """It is over when what is on the stream now is."""

    def hold(self, stream: Any) -> None:
        """What comes on the stream waits for it; for nothing if it was never recorded."""

    def over(self) -> bool:
        """Whether what was on the stream at its latest record is over."""

    def seconds_to(self, later: Any) -> float:
        """From this one to a later one, if both tell the time."""


class Batch(Protocol):
    """Waits and writes with fixed values, carried out in order."""

    ops: tuple[MemOp, ...]

    def enqueue(self, stream: Any) -> None: ...


class Recording(Protocol):
    """What streams were given, to be given again."""

    def replay(self, stream: Any) -> None: ...


class Handles(Protocol):
    """Memory of the device that processes share by handles."""

    def malloc(self, nbytes: int, kind: str) -> int:
        """Memory that can be shared: ``"plain"``, or a kind for words."""

    def free(self, address: int) -> Any:
        """Give back what was allocated."""

    def fill(self, address: int, nbytes: int, stream: Any) -> None:
        """Zero memory."""

    def share(self, address: int) -> bytes:
        """A handle by which another process opens an allocation, equally long for all."""

    def open_shared(self, handle: bytes) -> int:
        """Map what another process shares."""

    def close_shared(self, address: int) -> Any:
        """Unmap it."""


@dataclass(frozen=True)
class Stream:
    """A stream that no other library uses, as the vendor and as PyTorch take it."""

    handle: Any
    torch: torch.cuda.Stream | None
    priority: int


@dataclass(frozen=True)
class Means:
    """How the calls of a group are carried out, the same on all ranks.

    Attributes:
        memory: a key of :data:`ficco.dma.memories.MEMORIES`.
        words: ``"slot"`` if signal words lie in the memory of the slot, else the kind of memory
            that is allocated for them.
        kernels: ficco's kernels post and wait, not the stream.
        rectangles: the vendor copies columns; without, Plans have to pack them.
        uncaptured: why graphs do not capture signals, and what to do; empty if they do.
        writes_before_events: a stream write goes between a copy and an event, which would be seen
            late otherwise.
        constants: address of a 0 and a 1 to copy from, and a word that nobody reads, where words
            lie in memory of their own.
        post, place, wait, copy: for ``doctor``: how a word is posted, in what memory, how it is
            waited for, and what copies.
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
    """A vendor's runtime on the device of one rank, where the operands lie."""

    name: ClassVar[str]  #: of the engine
    #: Bytes of an allocation of the kind of memory for a single word.
    word_bytes: ClassVar[int] = 8
    #: Priority of the stream that frees stuck ones.
    rescue: ClassVar[int] = RESCUE
    #: Eager calls tell a watchdog by events that they begin and end; otherwise by words.
    watches_by_events: ClassVar[bool] = False
    #: Neighbouring waits and writes are enqueued at once, and launches carry out those around them.
    fuses: ClassVar[bool] = False
    #: Calls are recorded, and replayed for operands at the same addresses: :meth:`record`.
    records: ClassVar[bool] = False
    #: What is given back must not be in use: closing waits for streams.
    waits_to_close: ClassVar[bool] = False

    def __init__(self, device: torch.device, index: int) -> None:
        self.device, self.index = device, index
        self.streams: list[Stream] = []  # those that were made here

    def _lacks(self, what: str) -> NotImplementedError:
        """The error of a part that a driver may leave out."""
        return NotImplementedError(f"the {self.name} driver offers no {what}")

    # The device.

    @abstractmethod
    def use(self) -> None:
        """Make the device this thread's."""

    @abstractmethod
    def uncaptured(self) -> contextlib.AbstractContextManager[None]:
        """Within this block the thread may allocate, and ask what is over, although it captures a
        graph."""

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Within this block the device is this thread's, and a capture is not disturbed."""
        with torch.cuda.device(self.device), self.uncaptured():
            self.use()
            yield

    @abstractmethod
    def means(self, engine: StreamEngine) -> Means:
        """What all ranks can do. Collective.

        Raises:
            NotImplementedError: they cannot work together, or not as they were asked to.
        """

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    @abstractmethod
    def copy_engines(self) -> int | None:
        """See :meth:`Engine.copy_engines`."""

    def products(self) -> str:
        """What multiplies matrices, in words."""
        return library(self.device)

    def forgive(self) -> None:  # noqa: B027  not every vendor remembers errors
        """Forget an error that was expected."""

    def close(self) -> None:
        """Give back what was allocated here. Nothing is in flight, or what is will never end."""
        for stream in self.streams:
            with contextlib.suppress(RuntimeError):  # of a device that has failed
                if stream.torch is not None and stream.torch.query():  # else it is stuck
                    _spare.setdefault((self.index, stream.priority), []).append(stream.torch)
        self.streams.clear()

    # Streams and events.

    @abstractmethod
    def stream(self, raw: int) -> Any:
        """A stream as the binding likes it best, from what PyTorch calls it."""

    @abstractmethod
    def make_stream(self, priority: int) -> int:
        """A stream that does not wait for the null stream, as PyTorch calls it. Not one of
        PyTorch's own, which it hands out again and again."""

    def stream_for(self, name: str) -> Stream:
        """A stream for a lane, or for ``side``, ``uploads`` or ``rescue``."""
        lane = name.split()[-1]
        plain = PLAIN if lane.startswith("compute") else URGENT
        priority = self.rescue if lane == "rescue" else plain
        if spare := _spare.get((self.index, priority)):
            made = spare.pop()
        else:
            made = torch.cuda.ExternalStream(self.make_stream(priority), self.device)
        self.streams.append(Stream(self.stream(made.cuda_stream), made, priority))
        return self.streams[-1]

    @abstractmethod
    def idle(self, stream: Any) -> bool:
        """Whether everything on a stream is over."""

    @abstractmethod
    def event(self, timing: bool = False) -> Event:
        """An event for ordering streams, or for telling the time."""

    def lasting_event(self) -> Event:
        """An event for ordering streams that is not given back when this driver is closed."""
        return self.event()

    def caller(self) -> int:
        """The caller's stream, as PyTorch calls it."""
        raw: int = torch._C._cuda_getCurrentRawStream(self.index)
        return raw

    def capturing(self) -> int:
        """A number that tells graph captures of the caller's stream apart, 0 outside of one."""
        if not torch.cuda.is_current_stream_capturing():
            return 0
        return self.capture_id(self.stream(self.caller()))

    @abstractmethod
    def capture_id(self, stream: Any) -> int:
        """Number of the capture that a stream is in, 0 if none."""

    def external(self, event: Event) -> Event | None:
        """The same event for graphs: recorded, or waited for, whenever one that captured that is
        launched. None if the vendor's graphs cannot do so."""
        return None

    def on_lane(self, lane: str, op: Op) -> Op:
        """The operation, with what PyTorch does in it ordered on a lane."""
        if lane == "compute0":
            return op

        def on_lane(call: Any) -> None:
            before = torch.cuda.current_stream(self.device)
            torch.cuda.set_stream(call.state.streams[lane].torch)
            try:
                op(call)
            finally:
                torch.cuda.set_stream(before)

        return on_lane

    # Words.

    @abstractmethod
    def batch(self, ops: Sequence[MemOp]) -> Batch:
        """Waits and writes of a stream."""

    @abstractmethod
    def writes_reach(self, stream: Any, address: int) -> bool:
        """Whether a stream may write to an address; leaves a 0 there if so. Waits for it."""

    # Copies, each prepared once: a function of what differs from call to call.

    @abstractmethod
    def copy(
        self, dst: int, nbytes: int, ranks: tuple[int, int] | None = None
    ) -> Callable[[int, Any], None]:
        """Copies bytes from an address, on a stream. ``ranks`` are those at both ends, the
        receiving first; None for a signal."""

    def copies(self, ranks: tuple[int, int]) -> Copies:
        """Many copies, in any order: a function of destinations, sources, sizes and the stream."""

        def copies(dst: Numbers, src: Numbers, sizes: Numbers, stream: Any) -> None:
            each = (one.tolist() for one in (dst, src, sizes))
            for to, at, nbytes in zip(*each, strict=True):
                self.copy(to, nbytes, ranks)(at, stream)

        return copies

    @abstractmethod
    def rectangle(
        self, dst: int, dst_pitch: int, width: int, height: int
    ) -> Callable[[int, int, Any], None]:
        """Copies rows from an address and at a pitch, on a stream. Lengths are in bytes."""

    @abstractmethod
    def copy_to_host(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        """Copy bytes of the device to pinned host memory."""

    def copy_from_host(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        """Copy bytes of pinned host memory to the device."""
        raise self._lacks("copies from the host")

    # Memory.

    @abstractmethod
    def host(self, nbytes: int) -> int:
        """Pinned host memory, zeroed, that the device writes through to. Kept until closing."""

    def waitable(self, kind: str) -> int:
        """A word of the host, zeroed, that streams wait for and this process writes. Kept until
        closing. ``kind`` is that of signal words (:attr:`Means.words`)."""
        return self.host(WORD)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory as bytes, not zeroed. Kept as long as a tensor looks into it."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def local(self, nbytes: int) -> tuple[int, torch.Tensor]:
        """Memory of the device and the same as bytes. Kept until closing."""
        raise self._lacks("memory of its own")

    @property
    def handles(self) -> Handles:
        """Memory that processes share by handles, if the vendor has such."""
        raise self._lacks("memory that is shared by handles")

    def tensor(self, address: int, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Memory as bytes, and an object that lives as long as a tensor looks into it."""
        keeper = _Bytes(address, nbytes)
        with torch.inference_mode(False):  # calls of other modes use it, too
            return torch.as_tensor(keeper, device=self.device), keeper

    def peers(self, address: int, nbytes: int) -> torch.Tensor:
        """Memory of a peer that is mapped here, as bytes."""
        # PyTorch takes memory from other libraries for that of the device where it lies.
        storage = torch._C._construct_storage_from_data_pointer(address, self.device, nbytes)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    # ficco's kernels.

    @property
    @abstractmethod
    def has_kernels(self) -> bool:
        """Whether ``auto`` may take the kernel that copies."""

    @abstractmethod
    def kernels(self) -> Kernels:
        """ficco's kernels, compiled if need be.

        Raises:
            BackendError, NotImplementedError: they cannot be had.
        """

    # Optional.

    #: Why there is no product whose tiles wait; empty if there is one.
    untiled: str = "there is no product whose tiles wait for this GPU"
    #: Ranks share this GPU, so that copies between them are kernels.
    shared: bool = False

    def unscaled(self, problem: Problem) -> str:
        """Why the library multiplies no operands with such factors, and what to do; empty if it
        does."""
        return ""

    def tiled(self) -> TiledProducts:
        """The product whose tiles wait."""
        raise self._lacks("product whose tiles wait")

    def add_product(
        self, addend: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, stream: Any
    ) -> bool:
        """``out = addend + a @ b``, which reads the addend where it lies; False if that cannot be
        done. PyTorch copies it first."""
        return False

    def join_aside(self, event: Event, stream: Any) -> None:
        """Make what an event follows part of the graph that captures a stream, if possible without
        letting the stream wait for it."""
        event.hold(stream)

    def record(self, stream: Any, enqueue: Callable[[], None]) -> Recording:
        """Record what is enqueued from a stream on, in place of carrying it out."""
        raise self._lacks("recordings")


class _Bytes:
    """Memory of a GPU, as PyTorch takes it from other libraries."""

    def __init__(self, address: int, nbytes: int) -> None:
        where = {"data": (address, False), "shape": (nbytes,)}
        self.__cuda_array_interface__ = {**where, "typestr": "|u1", "version": 2}


#: Streams of closed engines, by device and priority: PyTorch keeps a workspace of its BLAS for
#: every stream that it has met, and so they are used again.
_spare: dict[tuple[int, int], list[torch.cuda.Stream]] = {}


class Lanes(dict[str, Any]):
    """Handles of the streams of a call's lanes, which begin at ``fork`` and end at ``joins``;
    ``compute0`` is the caller's own stream, ``streams`` has the others, on which several callers
    may take turns."""

    def __init__(
        self, driver: Driver, caller: Any, streams: dict[str, Stream], mode: str = ""
    ) -> None:
        """``mode``: empty for eager calls, else what is done to these: captured, or recorded."""
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
    """An engine whose lanes are streams of a device: what its driver and its memory use of it."""

    driver: Driver
    side: Stream  #: for what must not wait for calls
    graveyard: Any  #: memory that is freed once peers let go of it
    watched: int  #: pinned memory of words that watched calls write
    means: Means  #: what was agreed on with the other ranks

    @abstractmethod
    def settle(self, stream: Any) -> None:
        """Wait for a stream of this engine's that waits for nobody."""

    @abstractmethod
    def quiet(self) -> bool:
        """Whether no call is in flight here."""
