"""AMD GPUs: SDMA copies, stream memory operations and hipBLASLt, through hip-python and PyTorch.

Every lane is a stream; ``compute0`` is the caller's own. Buffers are allocations that every process
of the group maps, copies between them are the runtime's. A signal is a 32-bit word in the waiter's
memory: posted by a stream write behind the copy or, where such writes do not reach a peer, by a
4-byte copy. :data:`WAYS` says where words lie and what waits for them.

Ordering: a stream's write, or copy, is performed after the copy in front of it is complete.

``hipStreamBatchMemOp``, which both series of the binding have, would enqueue several words by one
call. It is not used: its documentation promises no order among its operations, and until July 2026
AMD's runtime carried them out side by side (ROCm/rocm-systems #8911 says so).

Written without a card. ``docs/amd.md`` says what was proven, and on what. Tensors on the CPU are
served on a double of the HIP library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from ficco.dma import hip_api as hip
from ficco.dma.blas import library
from ficco.dma.engine import (
    Call,
    Capabilities,
    Op,
    Program,
    Slot,
    Symmetric,
)
from ficco.dma.hip_binding import HipBinding
from ficco.dma.hip_memory import MEMORIES, HipMemory, Meeting, Words
from ficco.dma.hip_work import CallbackWork, TorchWork, Work
from ficco.dma.products import accumulation
from ficco.dma.rendezvous import Rendezvous
from ficco.dma.streams import (
    MAX_WATCHED,
    WORD,
    Places,
    StreamEngine,
    Watch,
    align,
    enqueue,
    wanted,
)
from ficco.errors import BackendError, ConfigError
from ficco.hip_kernels import MAX_PARTS, Kernels, can_compile
from ficco.plan import Reduction, Region, Signal, Transfer
from ficco.warn import warn_once

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Sizes of symmetric memory are multiples of these bytes, of the second if they are larger.
PAGE, LARGE = 4096, 1 << 21
#: Seconds that closing waits for peers to let go of this rank's memory, and for streams. A peer's
#: watchdog may first give calls in front of one that was broken off 2 s to end.
CLOSE_S = 3.0
#: Seconds after which a waiting kernel gives up; the watchdog ends it long before.
KERNEL_WAIT_S = 86400.0
#: Which of :data:`ficco.dma.hip_api.COPIES` moves the bytes.
COPY_VARIABLE = "FICCO_HIP_COPY"
#: Which of :data:`ficco.dma.hip_memory.MEMORIES` buffers come from.
MEMORY_VARIABLE = "FICCO_HIP_MEMORY"
#: Which of :data:`WAYS` signals go, in place of the first that this machine allows.
WAY_VARIABLE = "FICCO_HIP_SIGNALS"
#: Which of :data:`COLUMNS` is taken, in place of 2D copies where the runtime has them.
COLUMNS_VARIABLE = "FICCO_HIP_COLUMNS"
#: Which of :data:`EVENTS` is taken, in place of the one for this kind of device.
EVENT_VARIABLE = "FICCO_HIP_EVENTS"

#: Where signal words lie and what waits for them, the best first. The API promises the first, but
#: not that processes can share such memory. AMD's runtime waits on any memory by default.
WAYS = {
    "signal": "hipStreamWaitValue32 on signal memory",
    "uncached": "hipStreamWaitValue32 on uncached memory, which the API does not promise",
    "kernel": "a kernel of ficco's that polls uncached memory",
}

#: How the end of a copy is told to other lanes of the same rank. On NVIDIA's GPUs an event right
#: behind a copy is not seen before the copies behind it are over, too; behind a write it is.
EVENTS = {
    "plain": "an event right behind the copy",
    "write": "an event behind a stream write behind the copy",
}


#: How pieces of columns travel. In the source of AMD's runtime of 2024 a 2D copy is a kernel's, so
#: that packing alone leaves the way to the peer to SDMA engines.
COLUMNS = {"2d": "hipMemcpy2DAsync", "pack": "packing or ficco's kernel"}

#: What each of the ways of signals needs.
_NEEDS = {
    "signal": "stream waits (hipDeviceAttributeCanUseStreamWaitValue) on signal memory that "
    "processes can share",
    "uncached": "stream waits on memory that is no signal, which AMD's runtime has unless "
    "GPU_STREAMOPS_CP_WAIT=1 is set",
    "kernel": "a compiler for ficco's kernels, ROCm's clang or hiprtc",
}

_MakeEvent = Callable[[], hip.Event]
#: Addresses and values of 32-bit words.
_Values = Sequence[tuple[int, int]]


def _write(words: _Values, stream: Any) -> None:
    for address, value in words:
        hip.write_32(stream, address, value)


def _wait(words: _Values, stream: Any) -> None:
    for address, value in words:
        hip.wait_equal(stream, address, value)


class _Watch(Watch):
    """What a slot's calls write there."""

    def __init__(self, base: int, index: int) -> None:
        self.begun = base + 2 * index * WORD
        self.end = [(self.begun + WORD, 1), (self.begun, 0)]
        super().__init__((ctypes.c_uint32 * 2).from_address(self.begun))


class _SlotState:
    """What the engine keeps with a slot."""

    def __init__(self, watch: _Watch, index: int, words: Words | None, event: _MakeEvent) -> None:
        self.watch, self.index, self.words = watch, index, words
        self.over = event()  # the caller's stream is through with the latest call
        self.retired = event()  # and the slot has been handed on
        self.used = False
        self.packs: dict[str, tuple[int, torch.Tensor]] = {}  # by lane: address, and its bytes


class _Lanes(dict[str, Any]):
    """Streams of a call's lanes, each made when first asked for."""

    def __init__(self, caller: Any, work: Work, event: _MakeEvent, captured: bool) -> None:
        super().__init__(compute0=caller)
        self.work, self._event = work, event
        # A stream that is being captured is closed to eager calls of other threads.
        self._prefix = "captured " if captured else ""
        self.fork = event()
        self.joins: dict[str, hip.Event] = {}

    def __missing__(self, lane: str) -> Any:
        with hip.uncaptured():
            self.joins[lane] = self._event()
            # Urgent: hardware queues of their own, no place behind a long GEMM.
            priority = hip.PLAIN if lane.startswith("compute") else hip.URGENT
            found = self[lane] = self.work.stream(self._prefix + lane, priority)
        return found


@dataclass(frozen=True)
class _Run:
    """A program as :meth:`HipEngine.execute` goes through it.

    ``body`` is what the caller's stream waits for, ``tail`` what peers and the watchdog are told
    afterwards; ``lanes`` run beside the caller's stream.
    """

    body: list[Op]
    tail: list[Op]
    lanes: tuple[str, ...]


def _choice(variable: str, values: Iterable[str]) -> str | None:
    """The value of an environment variable, None if it is not set."""
    found = os.environ.get(variable) or None
    if found is not None and found not in values:
        raise ConfigError(variable, found, f"required one of {', '.join(values)}")
    return found


class HipEngine(StreamEngine):
    """See the module's docstring.

    Attributes:
        work: how PyTorch's work gets into the order of streams.
        side: a stream for what must not wait behind calls.
    """

    name = "hip"

    def __init__(
        self, group: ProcessGroup, device: torch.device, signals: str, timeout_s: float
    ) -> None:
        count = hip.start()
        on_cpu = device.type == "cpu"
        if not on_cpu:
            index = torch.cuda.current_device() if device.index is None else device.index
            device = torch.device("cuda", index)
        super().__init__(group, device)
        self.timeout_s = timeout_s
        self.index = self.rank % count if on_cpu else device.index
        self.work: Work = self._work(on_cpu)
        self._signals = signals
        self._writes_reach: bool | None = None if signals == "auto" else signals == "write"
        self._copy_name = _choice(COPY_VARIABLE, hip.COPIES) or "dtod"
        self._copy = hip.COPIES[self._copy_name]
        self._serial = 0
        self._places = Places()
        self._memories: list[HipMemory] = []  # all that is not freed
        self._graveyard: list[HipMemory] = []  # to be freed once nobody uses it
        self._lanes: dict[tuple[int, bool], _Lanes] = {}  # by the caller's stream
        self._spent: list[int] = []  # allocations that are freed at the end
        self._host: list[int] = []
        self._events: weakref.WeakSet[hip.Event] = weakref.WeakSet()
        self._binding: HipBinding | None = None
        self._read_into = 0, 0  # pinned memory for words: address and how many
        self._writes_before_events = (
            _choice(EVENT_VARIABLE, EVENTS) or self.work.events
        ) == "write"
        self._write, self._wait = _write, _wait
        hip.use(self.index)
        self.side = self.work.stream("side", hip.URGENT)
        # In no hardware queue that a lane holds up which waits for a peer.
        self._rescue = self.work.stream("rescue", hip.RESCUE)
        try:
            self._open()
        except BaseException:
            with contextlib.suppress(BackendError):  # the first error tells more
                self.close()
            raise

    def _work(self, on_cpu: bool) -> Work:
        if not on_cpu:
            return TorchWork(self.device)
        adopt = hip.adopter()
        if adopt is None:
            raise NotImplementedError(
                "the hip engine serves tensors on a GPU; those on the CPU only on a double of the "
                "HIP library, for tests. Move the tensors to the GPU or use the cpu engine"
            )
        return CallbackWork(self.index, adopt)

    def _open(self) -> None:
        """Allocate what all calls use, and find the peers' devices."""
        nbytes = (2 * MAX_WATCHED + 2) * WORD
        self._watched = hip.malloc_host(nbytes)
        self._host.append(self._watched)
        ctypes.memset(self._watched, 0, nbytes)
        # A 0 and a 1 to copy from, room to try a rectangle in, and a word to try a capture with.
        self._constants = hip.malloc(64)
        self._spent.append(self._constants)
        hip.fill(self._constants, 64, self.side)
        hip.write_32(self.side, self._constants + WORD, 1)
        rectangles = hip.copies_2d(self._constants + 32, self.side)
        self.settle(self.side)
        self._captures = self._captures_writes(self._constants + 56)
        meeting = Meeting(self, "hip engine")
        self.indices = self._find(meeting.gather(hip.bus_id(self.index)))
        self.way = self._way(meeting)
        self.memory = self._memory(meeting)
        self._rectangles, self._columns = self._how_columns_travel(meeting, rectangles)
        self.packs_columns = not self._rectangles
        meeting.close()
        if self.way == "kernel":
            self._write, self._wait = self._kernels.post, self._wait_by_kernel

    def _captures_writes(self, word: int) -> bool:
        """Whether graphs capture stream writes, and so waits. AMD's runtime carried them out at
        once until July 2026 (ROCm/rocm-systems #8911): captured calls would have no signals."""
        if not hip.try_capture(self.side, word):
            return False
        hip.copy_to_host(self._watched, word, WORD, self.side)  # nobody watches yet
        self.settle(self.side)
        left = ctypes.c_uint32.from_address(self._watched)
        carried_out, left.value = bool(left.value), 0
        return not carried_out

    # What this machine allows, found out together.

    def _way(self, meeting: Meeting) -> str:
        """The first way of signals that all ranks can go."""
        wanted = _choice(WAY_VARIABLE, WAYS)
        tests = {
            "signal": self._shares_signals,
            "uncached": self._waits_on_uncached,
            "kernel": self._compiles,
        }
        for way in WAYS if wanted is None else [wanted]:
            if all(map(any, meeting.gather(bytes([tests[way](meeting)])))):
                return way
        if wanted is not None:
            raise NotImplementedError(
                f"{WAY_VARIABLE}={wanted} cannot be had on all ranks: it needs {_NEEDS[wanted]}; "
                "give all ranks that, or unset the variable and the hip engine takes what works"
            )
        raise NotImplementedError(
            f"the hip engine cannot signal by {' or by '.join(WAYS)} here: on some rank "
            "hipStreamWaitValue32 is missing, does not serve memory that processes share, or no "
            "compiler is there for ficco's kernels; install ROCm's clang, or hiprtc, on all ranks"
        )

    def _stream_waits(self) -> bool:
        return bool(hip.attribute("CanUseStreamWaitValue", self.index))

    def _shares_signals(self, meeting: Meeting) -> bool:
        """Whether this rank can wait on signal memory and reach that of the next one."""
        word = hip.malloc_signal() if self._stream_waits() else 0
        try:
            handles = meeting.gather((word and hip.try_share(word)) or bytes(hip.HANDLE_BYTES))
            peer = handles[(self.rank + 1) % self.world]
            can = bool(word) and any(peer) and (self.world == 1 or hip.try_open(peer))
            meeting.gather(b"")  # nobody has it mapped any more
        finally:
            if word:
                hip.free(word)
        return can

    def _waits_on_uncached(self, meeting: Meeting) -> bool:
        if not self._stream_waits():
            return False
        word = hip.malloc_uncached(hip.SIGNAL_BYTES)
        try:
            hip.fill(word, hip.SIGNAL_BYTES, self.side)
            return hip.try_wait(self.side, word, 0)
        finally:
            self.settle(self.side)
            hip.free(word)

    def _compiles(self, meeting: Meeting) -> bool:
        return can_compile(self.work.target().vendor)

    def _memory(self, meeting: Meeting) -> str:
        """Where all ranks get buffers from. PyTorch only if asked for: until July 2026 it mapped
        memory twice on ROCm (pytorch/pytorch #188673), and until April 2026 AMD's runtime copied
        by a kernel what is mapped like that (ROCm/rocm-systems #4784)."""
        asked = _choice(MEMORY_VARIABLE, MEMORIES) == "torch"
        return "torch" if all(map(any, meeting.gather(bytes([asked])))) else "ipc"

    def _how_columns_travel(self, meeting: Meeting, can: bool) -> tuple[bool, str]:
        """Whether all ranks copy columns by 2D copies, and how they do in words. If one does not,
        none does: a receiver's staging has another layout where its senders pack."""
        wanted = _choice(COLUMNS_VARIABLE, COLUMNS)
        mine = bytes([can, wanted == "2d", wanted == "pack"])
        cans, rectangles, packs = zip(*meeting.gather(mine), strict=True)
        found = all(cans) and not any(packs)
        if any(rectangles) and not found:
            raise NotImplementedError(
                f"{COLUMNS_VARIABLE}=2d, which a rank asks for, cannot be had on all: on some the "
                "runtime has no 2D copies, or the variable has another value; unset it on all ranks"
            )
        why = "" if found else ", for want of a 2D copy"
        if any(rectangles + packs):
            why = " (asked for)"
        return found, COLUMNS["2d" if found else "pack"] + why

    @cached_property
    def rendezvous(self) -> Rendezvous:
        """Where PyTorch's symmetric memory is made. Making it is collective."""
        return Rendezvous(self.group, self.timeout_s)

    @cached_property
    def _kernels(self) -> Kernels:
        hip.use(self.index)
        with hip.uncaptured():
            # Code that was loaded before something went wrong is unloaded at the end, too.
            self._binding = self._binding or HipBinding(self.work.target(), self.index)
            return Kernels(self._binding)

    @cached_property
    def _kernels_or_none(self) -> Kernels | None:
        """ficco's kernels for what PyTorch can do as well; None where there is no compiler."""
        try:
            return self._kernels
        except BackendError as error:
            hip.forgive()
            warn_once(f"PyTorch's operations are used in place of ficco's kernels: {error}")
            return None

    def _wait_by_kernel(self, words: _Values, stream: Any) -> None:
        # Past its end the watchdog has let it go on, or the process is gone.
        late = self._watched + 2 * MAX_WATCHED * WORD
        self._kernels.wait(words, KERNEL_WAIT_S, late, stream)

    def _find(self, places: list[bytes]) -> list[int]:
        """The number of every rank's device in this process, this rank's where it is not seen."""
        known = {hip.bus_id(index): index for index in range(hip.start())}
        found = [known.get(place, self.index) for place in places]
        for rank, index in enumerate(found):
            if index != self.index and not hip.reach(self.index, index):
                raise NotImplementedError(
                    f"device {self.index} of rank {self.rank} cannot access the memory of device "
                    f"{index} of rank {rank}; run on GPUs of one host that are linked, with no "
                    "partition or IOMMU setting between them (hipDeviceCanAccessPeer)"
                )
        return found

    def settle(self, stream: Any) -> None:
        """Wait for a stream of this engine's that waits for nobody."""
        if not hip.drain(stream, self.timeout_s):
            raise BackendError("hipStreamQuery", "hipErrorNotReady", "a stream does not end")

    # Memory.

    def symmetric(self, nbytes: int) -> HipMemory:
        hip.use(self.index)
        if not self.capturing():  # in which nothing may be freed
            self._sweep()
        self._serial += 1
        # Handles of more than 2 MiB were refused where they were no multiple of it (ROCm 4).
        nbytes = max(align(nbytes, PAGE if nbytes <= LARGE else LARGE), PAGE)
        with hip.uncaptured():
            made = MEMORIES[self.memory](self, nbytes, self._serial)
            self._memories.append(made)
            made.map()
        return made

    def free(self, memory: Symmetric) -> None:
        assert isinstance(memory, HipMemory)
        self._graveyard.append(memory)

    def discard(self, slot: Slot) -> None:
        super().discard(slot)
        self._places.give_back(slot.state.index)

    def _sweep(self) -> None:
        """Free what is no longer used, here or by peers."""
        for memory in list(self._graveyard):
            memory.let_go()
            if memory.freeable():
                memory.release()
                self._graveyard.remove(memory)
                self._memories.remove(memory)
        _sweep_left()

    def slot_bytes(self, words: int, nbytes: int) -> int:
        return nbytes

    def slot(self, memory: Symmetric, words: int, nbytes: int, captured: bool) -> Slot:
        assert isinstance(memory, HipMemory)
        hip.use(self.index)
        with hip.uncaptured():
            tried = self._writes_reach is None
            made = memory.words = Words(self, self.way, words + tried, self._serial)
            if tried:
                # Not a signal's word: the peer's first call may have begun. Pairs may differ.
                self._writes_reach = self.way == "kernel" or all(
                    hip.writes_reach(self.side, made.address(peer, words))
                    for peer in range(self.world)
                    if peer != self.rank
                )
        return Slot(memory, words, nbytes, 0, captured, state=self._slot_state(made))

    def watch(self, captured: bool) -> Slot:
        hip.use(self.index)
        return Slot(None, captured=captured, state=self._slot_state(None))

    def _slot_state(self, words: Words | None) -> _SlotState:
        index = self._places.take()
        with hip.uncaptured():
            return _SlotState(_Watch(self._watched, index), index, words, self._new_event)

    def retire(self, slot: Slot) -> None:
        while slot.state.used and not slot.state.retired.over():
            self.interrupt()
            time.sleep(1e-4)

    # Signals.

    def _addresses(self, program: Program, signals: Sequence[Signal]) -> list[tuple[int, int]]:
        """Where each signal's word is mapped here, and the value that is posted to it."""
        slot = program.slot
        assert slot is not None
        words: Words = slot.state.words
        with hip.uncaptured():  # a peer's word is mapped when it is first asked for
            return [(words.address(one.waiter, one.word), wanted(one)) for one in signals]

    def wait(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        lane, words = program.plan.steps[step].lane, self._addresses(program, signals)

        return lambda call: self._wait(words, call.state[lane])

    def clear(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        lane = program.plan.steps[step].lane
        words = [(address, 1 - value) for address, value in self._addresses(program, signals)]
        return lambda call: self._write(words, call.state[lane])

    def post(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        lane, words = program.plan.steps[step].lane, self._addresses(program, signals)
        if self._writes_reach:
            return lambda call: self._write(words, call.state[lane])

        def copy(call: Call) -> None:
            for address, value in words:
                hip.copy(address, self._constants + value * WORD, WORD, call.state[lane])

        return copy

    def _before_event(self, program: Program) -> Callable[[Any], None] | None:
        if not self._writes_before_events:
            return None
        nobodys = self._constants + 2 * WORD
        return lambda stream: hip.write_32(stream, nobodys, 0)

    def _new_event(self, timing: bool = False) -> hip.Event:
        made = hip.Event(timing)
        self._events.add(made)
        return made

    # Copies.

    def copy(self, program: Program, step: int, transfer: Transfer, mover: str) -> Op:
        if mover == "kernel":
            return self.copies(program, (step,))
        lane = program.plan.steps[step].lane
        src, dst = transfer.src, transfer.dst
        width, height = src.cols * program.plan.buffer[src.buffer].itemsize, src.rows
        to, dst_pitch = self._target(program, dst)
        by_kernel = None
        # Compiled now: in a call that would be taken for a peer that is late.
        if self._cuts_rows(program, transfer) and self._kernels_or_none is not None:
            by_kernel = self.copies(program, (step,))
        to_index, at_index = self.indices[dst.rank], self.indices[src.rank]
        source = self._source(program, src)
        view = src if src.rank == self.rank else None

        def op(call: Call) -> None:
            at, pitch = source(call)
            stream = call.state[lane]
            if (pitch == width == dst_pitch) or height == 1:
                self._copy(to, at, width * height, stream, to_index, at_index)
            elif self._rectangles:
                hip.copy_2d(to, dst_pitch, at, pitch, width, height, stream)
            elif dst_pitch == width and view is not None:
                packed = self._pack(program, call, lane, view)
                self._copy(to, packed, width * height, stream, to_index, at_index)
            elif by_kernel is not None:
                by_kernel(call)
            else:
                for row in range(height):
                    there, here = to + row * dst_pitch, at + row * pitch
                    self._copy(there, here, width, stream, to_index, at_index)

        return op

    def _cuts_rows(self, program: Program, transfer: Transfer) -> bool:
        """Whether a copy is of parts of rows, for which the runtime has no 2D copies."""
        src, dst, buffers = transfer.src, transfer.dst, program.plan.buffer
        widths = [buffers[end.buffer].shapes[end.rank][1] for end in (src, dst)]
        return not self._rectangles and src.rows > 1 and src.cols < max(widths)

    def _pack(self, program: Program, call: Call, lane: str, region: Region) -> int:
        """Bring columns together in front of a copy of the same lane; where they will lie."""
        nbytes = program.plan.nbytes(region)
        assert program.slot is not None
        packs = program.slot.state.packs
        if lane not in packs or packs[lane][1].numel() < nbytes:
            with hip.uncaptured():
                address = hip.malloc(nbytes)
                self._spent.append(address)  # the smaller one may still be in use
                packs[lane] = address, self.work.tensor(address, nbytes)[0]
        address, room = packs[lane]
        dtype = getattr(torch, program.plan.buffer[region.buffer].dtype)
        packed = room[:nbytes].view(dtype).view(region.rows, region.cols)
        if self._kernels_or_none is not None:
            self._kernels.place(packed, self._view(program, call, region), call.state[lane])
            return address

        def op(call: Call) -> None:
            packed.copy_(self._view(program, call, region))

        self.work.run(call.state[lane], op, call)
        return address

    # Products.

    def reduce(self, program: Program, step: int, reduction: Reduction) -> Op:
        lane = program.plan.steps[step].lane
        dtype = program.plan.buffer[reduction.out.buffer].dtype
        # float64 is served on a double alone, and keeps its own precision.
        wide = torch.float64 if dtype == "float64" else torch.float32

        def by_kernel(call: Call) -> None:
            parts = [self._view(program, call, part) for part in reduction.parts]
            out = self._view(program, call, reduction.out)
            self._kernels.reduce(out, parts, call.state[lane])

        def by_torch(call: Call) -> None:
            total = self._view(program, call, reduction.parts[0]).to(wide, copy=True)
            for part in reduction.parts[1:]:
                total += self._view(program, call, part)
            self._view(program, call, reduction.out).copy_(total)

        if self._sums_by_kernel and len(reduction.parts) <= MAX_PARTS:
            return by_kernel
        return self._on_lane(program, step, by_torch)

    @cached_property
    def _sums_by_kernel(self) -> bool:
        """Whether ficco's kernel adds parts up; a double has none, nor a machine without a
        compiler."""
        return self.device.type != "cpu" and self._kernels_or_none is not None

    def collective(self, program: Program, step: int) -> Op:
        return self._on_lane(program, step, super().collective(program, step))

    def _on_lane(self, program: Program, step: int, op: Op) -> Op:
        lane = program.plan.steps[step].lane
        return lambda call: self.work.run(call.state[lane], op, call)

    # Running.

    def execute(self, program: Program, call: Call) -> None:
        if self.device.type == "cuda" and torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.device):
                return self.execute(program, call)
        hip.use(self.index)
        slot = program.slot
        key = self.work.caller(), bool(slot and slot.captured)
        lanes = self._lanes.get(key)
        if lanes is None:
            with hip.uncaptured():
                lanes = _Lanes(hip.stream(key[0]), self.work, self._new_event, key[1])
            self._lanes[key] = lanes
        call.state = lanes
        run = program.state.get("run") or self._run(program)
        stream = lanes["compute0"]
        self.work.begin(call, key[1] or (slot is None and bool(self.work.capturing())))
        if slot is None:
            lanes.fork.record(stream)
            enqueue(run.body, run.lanes, call)
        else:
            self._call(program, slot, run, call)
        self.work.end(call, stream, self.interrupt)

    def _call(self, program: Program, slot: Slot, run: _Run, call: Call) -> None:
        """Enqueue a call on its slot. What peers and the watchdog are told is no business of the
        caller's stream."""
        lanes, state = call.state, slot.state
        stream, sync = lanes["compute0"], lanes["sync"]
        if state.used and slot.words:
            # The words are at rest again, which a call on this stream does not know by itself.
            state.retired.hold(stream)
        state.used = True
        lanes.fork.record(stream)
        lanes.fork.hold(sync)
        # Before anything can be stuck.
        self._write([(state.watch.begun, slot.number(program))], sync)
        try:
            enqueue(run.body, run.lanes, call)
            state.over.record(stream)
            state.over.hold(sync)
            for op in run.tail:
                op(call)
        except BaseException:
            # The watchdog has no business with a call that was broken off.
            with contextlib.suppress(BackendError):  # the first error tells more
                self._write(state.watch.end, sync)
            raise
        self._write(state.watch.end, sync)
        state.retired.record(sync)
        if slot.captured:
            state.retired.hold(stream)  # a capture ends with all its streams joined

    def _run(self, program: Program) -> _Run:
        """What :meth:`execute` needs of a program, made once."""
        body = [op for lane, op in program.ops if lane != "sync"]
        if "base" in program.state:
            base = program.state["base"]
            body.insert(0, lambda call: base.record(call.state["compute0"]))
        tail = [op for lane, op in program.ops if lane == "sync"]
        beside = tuple(lane for lane in program.plan.lanes if lane not in ("compute0", "sync"))
        run = program.state["run"] = _Run(body, tail, beside)
        return run

    def stamp(self, program: Program, step: int, end: bool) -> Op:
        if "base" not in program.state:
            program.state["base"] = self._new_event(timing=True)
        event = program.state["stamp", step, end] = self._new_event(timing=True)
        lane = program.plan.steps[step].lane
        return lambda call: event.record(call.state[lane])

    def _seconds(self, program: Program, since: Any, until: Any) -> float:
        return float(program.state[since].seconds_to(program.state[until]))

    def capturing(self) -> int:
        number = self.work.capturing()
        if number and not self._can_be_captured:
            raise NotImplementedError(
                "this ROCm carries stream writes out at once in place of capturing them in a "
                f"graph; set {WAY_VARIABLE}=kernel on all ranks, so that kernels signal, update "
                "ROCm, or make the call outside of the capture"
            )
        return number

    @property
    def _can_be_captured(self) -> bool:
        return self._captures or self.way == "kernel"

    def synchronize(self) -> None:
        hip.use(self.index)
        streams = list(self.work.streams.values())
        while not all(map(hip.idle, streams)):
            time.sleep(1e-4)
        self.work.settle()

    def idle(self, slots: Sequence[Slot]) -> bool:
        hip.use(self.index)
        with hip.uncaptured():
            return not any(
                slot.state.watch.running() or not (slot.captured or slot.state.retired.over())
                for slot in slots
            )

    # Watching.

    def _read(self, slot: Slot) -> list[int]:
        hip.use(self.index)
        with hip.uncaptured():
            target, room = self._read_into
            if room < slot.words:
                # Kept until the end: to free memory waits for streams, and some are stuck.
                target = hip.malloc_host(slot.words * WORD)
                self._host.append(target)
                self._read_into = target, slot.words
            for index in range(slot.words):
                address = slot.state.words.address(self.rank, index)
                hip.copy_to_host(target + index * WORD, address, WORD, self._rescue)
            if not hip.drain(self._rescue, 2.0):
                self._read_into = 0, 0  # still in use
                return []
        return list((ctypes.c_uint32 * slot.words).from_address(target))

    def release(self, slots: Sequence[Slot], seconds: float) -> bool:
        """Write, again and again, what every wait wants, until no call is running."""
        end = time.monotonic() + seconds
        watches = [slot.state.watch for slot in slots]
        if any(slot.memory is None and slot.state.watch.running() for slot in slots):
            threading.Thread(target=self._abort_collective, daemon=True).start()
        hip.use(self.index)
        with hip.uncaptured():
            while any(watch.running() for watch in watches):
                if time.monotonic() > end:
                    return False
                try:
                    self._satisfy()
                except BackendError:
                    if self._dead():
                        return True
                time.sleep(0.01)
        return True

    def _dead(self) -> bool:
        """Whether nothing runs on the device any more, so that no call waits there either."""
        try:
            hip.idle(self._rescue)
        except BackendError:
            return True
        return False

    def _satisfy(self) -> None:
        """Give every word of this rank the value that is waited for."""
        if not hip.idle(self._rescue):
            return  # once more behind it, again and again, and the stream would never be through
        for memory in self._memories:
            if memory.words is not None:
                words = [memory.words.address(self.rank, i) for i in range(memory.words.count)]
                values = [(at, int(i >= self.world)) for i, at in enumerate(words)]
                self._write(values, self._rescue)

    # What it does, and its end.

    def capabilities(self) -> Capabilities:
        to = "peer's signal memory" if self.way == "signal" else "peer's uncached memory"
        post = {
            None: f"not known before the first call: a stream write to the {to} where it reaches, "
            "else a 4-byte copy",
            True: f"hipStreamWriteValue32 to the {to}",
            False: f"4-byte copy to the {to}",
        }[self._writes_reach]
        if self.way == "kernel":
            post = f"a kernel of ficco's that writes to the {to}"
        on_shader = os.environ.get("GPU_STREAMOPS_CP_WAIT", "0") in ("", "0")
        by = "a kernel of the runtime's" if on_shader else "the command processor"
        copy = {
            "dtod": "hipMemcpyDtoDAsync",
            "peer": "hipMemcpyPeerAsync",
            "nocu": "hipMemcpyAsync without compute units",
        }[self._copy_name]
        source = "PyTorch's" if self.memory == "torch" else "its own"
        events = EVENTS["write" if self._writes_before_events else "plain"]
        return Capabilities(
            engine="hip",
            post=post + (" (asked for)" if self._signals != "auto" else ""),
            wait=WAYS[self.way]
            + (f", by {by} (GPU_STREAMOPS_CP_WAIT)" if self.way != "kernel" else "")
            + "; relies on a peer's word arriving behind the copy in front of it",
            copy=f"{copy} in memory of {source}, columns by {self._columns}, "
            f"ends told by {events}; HIP {hip.runtime_version()}",
            movers=("dma", "kernel") if can_compile(self.work.target().vendor) else ("dma",),
            products=library(self.device),
            accumulate="float32 sums of m x n by " + accumulation(),
            capture=self._can_be_captured,
        )

    def copy_engines(self) -> None:
        # AsyncEngineCount is no help: AMD's runtime answers with 8 queues, whatever the device.
        return None

    def close(self) -> None:
        hip.use(self.index)
        end = time.monotonic() + CLOSE_S
        streams = list(self.work.streams.values())
        errors: list[BackendError] = []

        def attempt(step: Callable[[], Any]) -> Any:
            """Whatever fails, the rest is given back, too."""
            try:
                return step()
            except BackendError as error:
                errors.append(error)

        # After an error streams may wait for peers that will not come.
        while attempt(lambda: all(map(hip.idle, streams))) is False and time.monotonic() < end:
            attempt(self._satisfy)
            time.sleep(1e-3)
        self._graveyard += [memory for memory in self._memories if memory not in self._graveyard]
        while self._graveyard and time.monotonic() < end:
            attempt(self._sweep)
            time.sleep(1e-3)
        _left.extend(self._graveyard)
        if "rendezvous" in self.__dict__:
            self.rendezvous.close()
        for address in self._spent:
            attempt(partial(hip.free, address))
        for address in self._host:
            attempt(partial(hip.free_host, address))
        if self._binding is not None:
            attempt(self._binding.close)
        self._lanes.clear()
        for event in list(self._events):
            attempt(event.destroy)
        for stream in self.work.take():
            attempt(partial(hip.destroy_stream, stream))
        if errors:
            raise errors[0]


#: Memory of closed engines that a peer, or a tensor of the caller's, used for longer than closing
#: waits. Later engines of the process free it.
_left: deque[HipMemory] = deque()


def _sweep_left() -> None:
    for _ in range(len(_left)):
        # Another thread sweeps, too; whoever closed the group has been told what fails.
        with contextlib.suppress(IndexError, BackendError):
            memory = _left.popleft()
            if memory.freeable():
                memory.release()
            else:
                _left.append(memory)
