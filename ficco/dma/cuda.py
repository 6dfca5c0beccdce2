"""NVIDIA GPUs: copy engines, stream memory operations and cuBLAS, through PyTorch.

Every lane is a stream; ``compute0`` is the caller's own. Buffers are PyTorch's symmetric memory,
mapped into every process of the group, and copies between them run on the copy engines. A signal
is a 32-bit word in the waiter's memory: posted by a stream write behind the copy or, where the
driver refuses stream writes to a peer, by a 4-byte copy; waited for by a stream wait, which takes
no SM. A launch of the copy kernel, or of a sum at the peers, posts by itself and, where no product
runs beside it, waits by itself, with its blocks.

Ordering: a stream's write, or copy, is performed after the copy in front of it is complete. A wait
asks for a flush of remote writes where the device offers it. Where it does not (H100 and H200 over
NVLink), a completed peer copy is visible in the receiver's memory before the word that follows it
on the same path.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ficco.dma import cuda_driver as cu
from ficco.dma.blas import library
from ficco.dma.cublaslt import WORKSPACE, CublasLt
from ficco.dma.cuda_ops import Copies, Memops, OneShot, Posts, by_launches, joined
from ficco.dma.engine import (
    Call,
    Capabilities,
    Op,
    Program,
    Slot,
    Symmetric,
)
from ficco.dma.gate import Gate
from ficco.dma.memops import (
    WAIT_32,
    WRITE_32,
    WRITE_64,
    MemOp,
)
from ficco.dma.products import accumulation
from ficco.dma.rendezvous import Rendezvous, symmetric
from ficco.dma.streams import (
    MAX_WATCHED,
    WORD,
    Flight,
    Flights,
    Mapped,
    Places,
    StreamEngine,
    Watch,
    align,
    enqueue,
    wanted,
)
from ficco.errors import BackendError
from ficco.hip_kernels import (
    MAX_PARTS,
    Kernels,
    TorchKernels,
    can_compile,
    kernels,
)
from ficco.plan import Reduction, Signal, Transfer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Words behind a slot's signals: a 0 and a 1 to copy from, one that nobody reads, and one for each
#: of so many lanes, where the blocks of a launch of copies are counted.
CONSTANTS, COUNTED_LANES = 3, 13
SCRATCH = CONSTANTS + COUNTED_LANES
#: Recordings that are kept, over all programs. One takes about 0.2 MB of the device's memory (H200,
#: 2 ranks, growing).
MAX_RECORDED = 512

#: Seconds between two looks at whether calls are over.
PAUSE_S = 1e-4

_gate = Gate()
#: The engines of this process that are not closed; changed and gone through at a closed gate.
_engines: weakref.WeakSet[CudaEngine] = weakref.WeakSet()

#: What changes the kernels that PyTorch picks for the same operands.
_SETTINGS = [
    getter
    for name in (
        "_get_cublas_allow_fp16_accumulation",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_blas_preferred_backend",
        "_get_deterministic_algorithms",
        "_get_sm_carveout_experimental",
    )
    if (getter := getattr(torch._C, name, None)) is not None
]
# Newer releases refuse to answer by the old name once the new one has been used.
if hasattr(torch._C, "_get_fp32_precision_getter"):
    _SETTINGS.append(lambda: torch._C._get_fp32_precision_getter("cuda", "matmul"))
else:
    _SETTINGS.append(torch._C._get_cublas_allow_tf32)


class CudaMemory(Mapped):
    """PyTorch's symmetric memory."""

    def __init__(self, nbytes: int, engine: CudaEngine, serial: int) -> None:
        self.serial, self.nbytes = serial, nbytes
        # Not on the caller's stream, which may be captured, nor in the caller's mode.
        with cu.uncaptured(), torch.cuda.stream(engine.side), torch.inference_mode(False):
            self.tensor = symmetric(nbytes, engine.device)
            self.tensor.zero_()
            engine.side.synchronize()
            # Every rank has zeroed its part before any rank learns of it.
            self._handle = engine.rendezvous.meet(
                self.tensor, engine.timeout_s, engine.operator, engine.interrupt
            )
        self.addresses = list(self._handle.buffer_ptrs)

    def part(self, rank: int) -> torch.Tensor:
        return self._handle.get_buffer(rank, (self.nbytes,), torch.uint8)

    def free(self) -> None:
        del self.tensor, self._handle


#: Memory to be freed once no call is in flight.
_unwanted: list[CudaMemory] = []


class _Watch(Watch):
    """What a slot's calls write there."""

    def __init__(self, words: torch.Tensor, index: int) -> None:
        super().__init__(words.numpy()[2 * index : 2 * index + 2])
        # Adjacent, so that the end of a call is one write.
        self.begun = words.data_ptr() + 2 * index * WORD

    def begin(self, number: int) -> MemOp:
        return MemOp(WRITE_32, self.begun, number)

    def end(self) -> MemOp:
        return MemOp(WRITE_64, self.begun, 1 << 32)


class _Flights(Flights):
    """By CUDA's events."""

    def __init__(self) -> None:
        super().__init__(cu.Event)
        self._context = cu.context()

    def look(self) -> tuple[int, bool]:
        cu.use(self._context)  # a watchdog's thread has none
        with cu.uncaptured():
            return super().look()


class _Eager:
    """What the engine keeps with a slot of eager calls; eager collectives share nothing else."""

    def __init__(self) -> None:
        self.watch = _Flights()
        self.over = cu.Event()  # the caller's stream is through with the latest call
        self.retired: cu.Event | None = None  # and the slot has been handed on

    def idle(self) -> bool:
        return self.watch.idle()


class _Captured:
    """What the engine keeps with a slot of a graph. Who replays it records no events: the calls
    themselves write that they begin and end."""

    def __init__(self, watch: _Watch, index: int) -> None:
        self.watch, self.index = watch, index
        self.over, self.done = cu.Event(), cu.Event()
        self.retired: cu.Event | None = None

    def idle(self) -> bool:
        return not self.watch.running()


#: Streams of closed engines, by device and priority, to be used again: PyTorch keeps a workspace of
#: its BLAS for every stream that it has met.
_spare: dict[tuple[int, int], list[torch.cuda.Stream]] = {}


def _stream(priority: int) -> torch.cuda.Stream:
    """A stream of the current device that no other library uses."""
    device = torch.cuda.current_device()
    if spare := _spare.get((device, priority)):
        return spare.pop()
    return torch.cuda.ExternalStream(cu.make_stream(priority), device)


class _Lanes(dict[str, Any]):
    """Handles of the streams of a call's lanes, each made when first asked for."""

    def __init__(self, caller: int, streams: dict[str, torch.cuda.Stream]) -> None:
        """``streams`` may be shared: calls of several callers take turns on them."""
        super().__init__(compute0=cu.stream(caller))
        self.streams = streams
        self.fork = cu.Event()
        self.joins: dict[str, cu.Event] = {}

    def __missing__(self, lane: str) -> Any:
        with cu.uncaptured():
            if lane not in self.streams:
                # High priority: hardware queues of their own, no place behind a long GEMM.
                priority = 0 if lane.startswith("compute") else -1
                self.streams[lane] = _stream(priority)
            self.joins[lane] = cu.Event()
        handle = self[lane] = cu.stream(self.streams[lane].cuda_stream)
        return handle


class _Recorder:
    """Streams and a memory pool to record calls of one caller's stream with. Their graphs may share
    both: they are replayed one after the other, on that stream."""

    def __init__(self) -> None:
        self.stream = _stream(0)
        self.lanes = _Lanes(self.stream.cuda_stream, {})
        self.memory = torch.cuda.MemPool()


@dataclass(frozen=True)
class _Run:
    """A program as :meth:`CudaEngine.execute` goes through it.

    ``body`` is what the caller's stream waits for, ``tail`` what peers are told afterwards, on the
    lane ``tail_lane``; ``lanes`` run beside the caller's stream. Of a captured call ``begin`` and
    ``tail`` tell the watchdog, too, where no launch in the body does. ``recorded`` holds graphs of
    the body, by where the operands lie, ``seen`` where they lay once.
    """

    body: list[Op]
    begin: cu.Batch | None
    tail: list[Op]
    tail_lane: str
    lanes: tuple[str, ...]
    recorded: dict[Any, cu.Recording]
    seen: set[Any]


class CudaEngine(StreamEngine):
    """See the module's docstring."""

    name = "cuda"

    def __init__(
        self, group: ProcessGroup, device: torch.device, signals: str, timeout_s: float
    ) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(group, torch.device("cuda", index))
        if torch.version.cuda is None:
            raise NotImplementedError(
                "the cuda engine needs a CUDA build of PyTorch; this one has none"
            )
        if not cu.attribute("CAN_USE_64_BIT_STREAM_MEM_OPS", index):
            raise NotImplementedError(
                "the cuda engine needs stream memory operations, which this device or driver "
                "does not offer"
            )
        self.timeout_s = timeout_s
        self.rendezvous = Rendezvous(group, timeout_s)
        self._signals = signals
        self._serial = 0
        with torch.cuda.device(self.device), cu.uncaptured():
            self.side, self._rescue = _stream(-1), _stream(-1)
            self._watched = torch.zeros(2 * MAX_WATCHED, dtype=torch.int32, pin_memory=True)
        self._places = Places()
        self._states: set[_Eager | _Captured] = set()
        # Captured calls use streams of their own: a stream that is being captured is closed to
        # eager calls of other threads.
        self._streams: dict[bool, dict[str, torch.cuda.Stream]] = {False: {}, True: {}}
        self._lanes: dict[tuple[int, bool], _Lanes] = {}  # by the caller's stream
        self._recorders: dict[int, _Recorder] = {}
        self._recorded: deque[tuple[weakref.ref[_Run], Any]] = deque()  # the oldest first
        # What a graph launches is not bound to the order in which it was recorded: on one hardware
        # queue a wait could come before that which it waits for.
        self._recordable = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"
        self._flush = bool(cu.attribute("CAN_FLUSH_REMOTE_WRITES", index))
        self._writes_reach: bool | None = None if signals == "auto" else signals == "write"
        with _gate.closed():
            _engines.add(self)

    # Memory.

    def symmetric(self, nbytes: int) -> CudaMemory:
        self._serial += 1
        with torch.cuda.device(self.device):
            return CudaMemory(align(nbytes), self, self._serial)

    def free(self, memory: Symmetric) -> None:
        """Free it once no call of this process is in flight; where another thread begins one
        meanwhile, a later ``free`` does it."""
        assert isinstance(memory, CudaMemory)
        _unwanted.append(memory)
        passed, end = _gate.passed, time.monotonic() + self.timeout_s
        while time.monotonic() < end:
            with _gate.closed() as alone:
                if alone and all(engine.quiet() for engine in _engines):
                    # Fails where another thread captures a graph of its own, or the device has.
                    with contextlib.suppress(RuntimeError):
                        torch.cuda.synchronize(self.device)
                        while _unwanted:
                            _unwanted.pop().free()
                    return
                if _gate.passed != passed:
                    return
            time.sleep(PAUSE_S)

    def quiet(self) -> bool:
        """Whether no call is in flight here."""
        with torch.cuda.device(self.device), cu.uncaptured():
            return all(state.idle() for state in list(self._states))  # other threads add some

    def discard(self, slot: Slot) -> None:
        self._states.discard(slot.state)
        if isinstance(slot.state, _Captured):
            self._places.give_back(slot.state.index)
        super().discard(slot)

    def slot_bytes(self, words: int, nbytes: int) -> int:
        return align((words + SCRATCH) * WORD) + nbytes

    def slot(self, memory: Symmetric, words: int, nbytes: int, captured: bool) -> Slot:
        assert isinstance(memory, CudaMemory)
        data = align((words + SCRATCH) * WORD)
        with cu.uncaptured(), torch.cuda.device(self.device):
            if self._writes_reach is None:
                # Not a signal's: the peer's first call may have begun.
                peer = memory.addresses[(self.rank + 1) % self.world]
                nobodys = peer + (words + 2) * WORD
                self._writes_reach = cu.writes_reach(nobodys, self.side.cuda_stream)
            with torch.cuda.stream(self.side):
                memory.tensor[words * WORD :].view(torch.int32)[1].fill_(1)
            self.side.synchronize()
        return Slot(memory, words, nbytes, data, captured, state=self._state(captured))

    def watch(self, captured: bool) -> Slot:
        return Slot(None, captured=captured, state=self._state(captured))

    def _state(self, captured: bool) -> _Eager | _Captured:
        state: _Eager | _Captured
        with cu.uncaptured(), torch.cuda.device(self.device):
            if captured:
                index = self._places.take()
                state = _Captured(_Watch(self._watched, index), index)
            else:
                state = _Eager()
        self._states.add(state)
        return state

    def retire(self, slot: Slot) -> None:
        if slot.state.retired is not None:
            slot.state.retired.synchronize()

    # Signals.

    def _addresses(self, program: Program, signals: Sequence[Signal]) -> list[int]:
        slot = program.slot
        assert slot is not None and isinstance(slot.memory, CudaMemory)
        addresses = slot.memory.addresses
        return [addresses[signal.waiter] + signal.word * WORD for signal in signals]

    def _memops(self, program: Program, step: int, ops: Sequence[MemOp]) -> Op:
        return Memops(program.plan.steps[step].lane, cu.Batch(ops, self._flush))

    def wait(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        found = zip(self._addresses(program, signals), map(wanted, signals), strict=True)
        return self._memops(program, step, [MemOp(WAIT_32, *at) for at in found])

    def clear(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        found = zip(self._addresses(program, signals), signals, strict=True)
        ops = [MemOp(WRITE_32, at, 1 - wanted(signal)) for at, signal in found]
        return self._memops(program, step, ops)

    def post(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        lane = program.plan.steps[step].lane
        found = zip(self._addresses(program, signals), map(wanted, signals), strict=True)
        ops = [MemOp(WRITE_32, *post) for post in found]
        if self._writes_reach:
            return self._memops(program, step, ops)
        return Posts(lane, tuple(ops), tuple(self._scratch(program, op.value) for op in ops))

    def _scratch(self, program: Program, index: int) -> int:
        """Address of one of this rank's words behind the signals of a slot."""
        slot = program.slot
        assert slot is not None and isinstance(slot.memory, CudaMemory)
        return slot.memory.addresses[self.rank] + (slot.words + index) * WORD

    def _before_event(self, program: Program) -> Callable[[Any], None]:
        # Seen only once later copies of the stream are over, too (H200, driver 580); behind a
        # stream write at once.
        return cu.Batch([MemOp(WRITE_32, self._scratch(program, 2), 0)]).enqueue

    def _new_event(self) -> cu.Event:
        return cu.Event()

    # Copies.

    def copies(self, program: Program, steps: Sequence[int]) -> Op:
        copies = self._kernel_copies(program, steps)
        arrived = self._counter(program, copies.lane)
        if not arrived or not copies.width * copies.height:
            return copies
        return Copies(copies=copies, arrived=arrived, mine=self._own(program))

    def copy(self, program: Program, step: int, transfer: Transfer, mover: str) -> Op:
        if mover == "kernel":
            return self.copies(program, (step,))
        lane = program.plan.steps[step].lane
        src, dst = transfer.src, transfer.dst
        itemsize = program.plan.buffer[src.buffer].itemsize
        width, height = src.cols * itemsize, src.rows
        target, dst_pitch = self._target(program, dst)
        to, rectangle = cu.address(target), cu.Copy2D(width, height, dst_pitch)
        source = self._source(program, src)

        def op(call: Call) -> None:
            at, pitch = source(call)
            stream = call.state[lane]
            if (pitch == width == dst_pitch) or height == 1:
                cu.copy(to, at, width * height, stream)
            else:
                rectangle.enqueue(to, at, pitch, stream)

        return op

    @cached_property
    def _kernels_or_torch(self) -> Kernels | TorchKernels:
        with torch.cuda.device(self.device), cu.uncaptured():
            return kernels(self.device)

    @property
    def _kernels(self) -> Kernels:
        found = self._kernels_or_torch
        if isinstance(found, Kernels):
            return found
        raise NotImplementedError(
            "mover 'kernel': ficco's kernels could not be compiled here, as the warning says; "
            "leave the knob out"
        )

    @cached_property
    def _copies_by_kernel(self) -> bool:
        """Whether there is the kernel that copies: auto may take it."""
        return can_compile("cuda") and isinstance(self._kernels_or_torch, Kernels)

    # Products.

    @cached_property
    def _adder(self) -> CublasLt | None:
        with contextlib.suppress(OSError, BackendError), torch.cuda.device(self.device):
            with cu.uncaptured():
                return CublasLt()
        return None

    def _added(
        self,
        addend: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        stream: Any,
    ) -> bool:
        adder = self._adder
        if adder is None or not adder.serves(addend, a, b, out):
            return False
        # From the allocator, as PyTorch's own: a graph has its own, so that graphs may run side by
        # side.
        room = torch.empty(WORKSPACE, dtype=torch.uint8, device=self.device)
        return adder.multiply(addend, a, b, out, room, stream)

    def reduce(self, program: Program, step: int, reduction: Reduction) -> Op:
        lane, kernels = program.plan.steps[step].lane, self._kernels_or_torch
        if len(reduction.parts) > MAX_PARTS:
            kernels = TorchKernels()

        def parts(call: Call) -> tuple[torch.Tensor, list[torch.Tensor]]:
            out = self._view(program, call, reduction.out)
            return out, [self._view(program, call, part) for part in reduction.parts]

        there = any(part.rank != self.rank for part in reduction.parts)
        if there and lane == "compute0" and isinstance(kernels, Kernels):
            arrived, mine = self._counter(program, lane), self._own(program)
            return OneShot(kernels=kernels, parts=parts, arrived=arrived, mine=mine)
        return lambda call: kernels.reduce(*parts(call), call.state[lane])

    def _on_lane(self, program: Program, step: int, op: Op) -> Op:
        lane = program.plan.steps[step].lane
        if lane == "compute0":
            return op

        def on_lane(call: Call) -> None:
            before = torch.cuda.current_stream(self.device)
            torch.cuda.set_stream(call.state.streams[lane])
            try:
                op(call)
            finally:
                torch.cuda.set_stream(before)

        return on_lane

    # Running.

    def execute(self, program: Program, call: Call) -> None:
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self.execute(program, call)
        with _gate:
            self._execute(program, call)

    def _execute(self, program: Program, call: Call) -> None:
        slot = program.slot
        key = torch._C._cuda_getCurrentRawStream(self.device.index), bool(slot and slot.captured)
        lanes = self._lanes.get(key)
        if lanes is None:
            lanes = self._lanes[key] = _Lanes(key[0], self._streams[key[1]])
        call.state = lanes
        run = program.state.get("run") or self._run(program)
        if slot is None:
            return self._enqueue(run, call)
        state: _Eager | _Captured = slot.state
        if state.retired is not None and slot.words:
            # The words are at rest again, which a call on this stream does not know by itself.
            state.retired.hold(lanes["compute0"])
        if isinstance(state, _Captured):
            return self._capture(run, call, slot, state)
        flight = state.watch.begin(slot.number(program), key[0], lanes["compute0"])
        try:
            # Calls that share nothing are collectives, and traced ones are looked at step by step.
            replays = bool(slot.words) and "base" not in program.state
            replays = replays and self.replays and self._recordable
            self._call(run, call, key[0], state, flight, replays)
        except BaseException:
            state.watch.drop(flight)  # the watchdog has no business with it
            raise

    def _call(
        self, run: _Run, call: Call, raw: int, state: _Eager, flight: Flight, replays: bool
    ) -> None:
        """Enqueue a call, step by step or as it was recorded."""
        lanes = call.state
        end = stream = lanes["compute0"]
        recording = self._recording(run, call, raw) if replays else None
        if recording is not None:
            recording.replay(stream)
        else:
            self._enqueue(run, call)
        if run.tail:  # what peers are told is no business of the caller's stream
            end = lanes["sync"]
            state.over.record(stream)
            state.over.hold(end)
            for op in run.tail:
                op(call)
        state.watch.end(flight, end)
        state.retired = flight.behind

    def _capture(self, run: _Run, call: Call, slot: Slot, state: _Captured) -> None:
        """Enqueue a call while a graph captures it, so that all its streams join in the end."""
        lanes = call.state
        stream = lanes["compute0"]
        try:
            self._enqueue(run, call)
            state.over.record(stream)
            state.over.hold(lanes[run.tail_lane])
            for op in run.tail:
                op(call)
            state.retired = state.done
            state.done.record(lanes[run.tail_lane])
            if slot.words:
                state.done.hold(stream)
            else:  # the end is told to the watchdog alone
                cu.join_aside(state.done, stream)
        except BaseException:
            # The watchdog has no business with a call that was broken off.
            with contextlib.suppress(BackendError):
                cu.Batch([state.watch.end()]).enqueue(lanes[run.tail_lane])
            raise

    def _enqueue(self, run: _Run, call: Call) -> None:
        """Enqueue the body of a program; the lanes begin and end with the caller's stream."""
        lanes = call.state
        if run.begin is not None or run.lanes:
            lanes.fork.record(lanes["compute0"])
        if run.begin is not None:  # before anything can be stuck
            lanes.fork.hold(lanes["sync"])
            run.begin.enqueue(lanes["sync"])
        enqueue(run.body, run.lanes, call)

    def _run(self, program: Program) -> _Run:
        """What :meth:`execute` needs of a program, made once."""
        given, begin = list(program.ops), None
        if (slot := program.slot) is not None and slot.captured:
            watch = slot.state.watch
            begin = cu.Batch([watch.begin(slot.number(program))])
            given.append(("sync", Memops("sync", cu.Batch([watch.end()]))))
        ops = joined(given, self._flush)
        body = [op for lane, op in ops if lane != "sync"]
        tail = [op for lane, op in ops if lane == "sync"]
        beside = tuple(lane for lane in program.plan.lanes if lane not in ("compute0", "sync"))
        run = _Run(body, begin, tail, "sync", beside, {}, set())
        if "base" in program.state:
            body.insert(0, self._stamp(program.state["base"], "compute0"))
        elif tail and body and not beside and program.plan.words:
            kernels = self._kernels_or_torch
            if isinstance(kernels, Kernels):
                told = by_launches(body, begin, tail, kernels, self._own(program))
                if told is not None:
                    body, tail = told
                    run = replace(run, body=body, begin=None, tail=tail, tail_lane="compute0")
        program.state["run"] = run
        return run

    def _counter(self, program: Program, lane: str) -> int:
        """Address of the word where blocks of a lane's launches are counted; 0 if there is none."""
        number = program.plan.lanes.index(lane)
        return self._scratch(program, CONSTANTS + number) if number < COUNTED_LANES else 0

    def _own(self, program: Program) -> range:
        """Addresses of this rank's words of a program's slot."""
        slot = program.slot
        assert slot is not None and isinstance(slot.memory, CudaMemory)
        first = slot.memory.addresses[self.rank]
        return range(first, first + slot.words * WORD)

    def _recording(self, run: _Run, call: Call, raw: int) -> cu.Recording | None:
        """The body for operands that lie where these do; None at first sight."""
        key = (
            raw,
            *[(one.data_ptr(), one.stride()) for one in call.tensors.values()],
            *[setting() for setting in _SETTINGS],
        )
        recording = run.recorded.get(key)
        if recording is not None:
            return recording
        if key not in run.seen:
            if len(run.seen) >= MAX_RECORDED:
                run.seen.clear()
            run.seen.add(key)
            return None
        with _gate.recording() as allowed:
            recording = self._record(run, call, raw) if allowed else None
        if recording is not None:
            self._make_room()
            self._recorded.append((weakref.ref(run), key))
            run.recorded[key] = recording
        return recording

    def _make_room(self) -> None:
        """Let go of the oldest recording where there are too many, without those of programs that
        are gone."""
        if len(self._recorded) < MAX_RECORDED:
            return
        self._recorded = deque(entry for entry in self._recorded if entry[0]() is not None)
        while len(self._recorded) >= MAX_RECORDED:
            found, key = self._recorded.popleft()
            if (run := found()) is not None:
                del run.recorded[key]
                run.seen.discard(key)

    def _record(self, run: _Run, call: Call, raw: int) -> cu.Recording | None:
        """Record the body of a call; None, and never again, where that cannot be done."""
        lanes = call.state
        collecting = gc.isenabled()
        gc.disable()  # what it frees must not be freed during a capture
        try:
            recorder = self._recorders.get(raw)
            if recorder is None:  # not every allocator of PyTorch has pools
                recorder = self._recorders[raw] = _Recorder()
            call.state = recorder.lanes
            stream = recorder.lanes["compute0"]
            with torch.cuda.stream(recorder.stream), torch.cuda.use_mem_pool(recorder.memory):
                return cu.Recording(stream, lambda: self._enqueue(run, call))
        except (RuntimeError, BackendError) as error:
            warnings.warn(
                f"ficco enqueues calls step by step, since one could not be recorded: {error}",
                stacklevel=2,
            )
            self._recordable = False
            return None
        finally:
            call.state = lanes
            if collecting:
                gc.enable()

    def stamp(self, program: Program, step: int, end: bool) -> Op:
        program.state.setdefault("base", torch.cuda.Event(enable_timing=True))
        event = torch.cuda.Event(enable_timing=True)
        program.state["stamp", step, end] = event
        return self._stamp(event, program.plan.steps[step].lane)

    def _stamp(self, event: torch.cuda.Event, lane: str) -> Op:
        def op(call: Call) -> None:
            own = lane == "compute0"
            event.record(None if own else call.state.streams[lane])

        return op

    def _seconds(self, program: Program, since: Any, until: Any) -> float:
        return float(program.state[since].elapsed_time(program.state[until])) / 1e3

    def capturing(self) -> int:
        if not torch.cuda.is_current_stream_capturing():
            return 0
        return cu.capture_id(torch._C._cuda_getCurrentRawStream(self.device.index))

    def synchronize(self) -> None:
        with _gate.waiting():
            torch.cuda.synchronize(self.device)

    def idle(self, slots: Sequence[Slot]) -> bool:
        with torch.cuda.device(self.device), cu.uncaptured():
            return all(slot.state.idle() for slot in slots)

    # Watching.

    def _read(self, slot: Slot) -> list[int]:
        assert isinstance(slot.memory, CudaMemory)
        return cu.read_words(slot.memory.addresses[self.rank], slot.words, self._rescue, 2.0)

    def release(self, slots: Sequence[Slot], seconds: float) -> bool:
        """Write, again and again, what every wait wants, until no call is running."""
        end = time.monotonic() + seconds
        stream = self._rescue.cuda_stream
        parts, collectives = [], []
        for slot in slots:
            if slot.memory is None:
                collectives.append(slot.state.watch)
            else:
                assert isinstance(slot.memory, CudaMemory)
                base = slot.memory.addresses[self.rank]
                values = [0] * self.world + [1] * (slot.words - self.world)
                ops = [MemOp(WRITE_32, base + i * WORD, v) for i, v in enumerate(values)]
                parts.append(cu.Batch(ops))
        with torch.cuda.device(self.device), cu.uncaptured():
            aborting = False
            while True:
                for part in parts:
                    part.enqueue(stream)
                if self.idle(slots):
                    break
                if time.monotonic() > end:
                    return False
                if not aborting and any(watch.look()[0] for watch in collectives):
                    aborting = True
                    threading.Thread(target=self._abort_collective, daemon=True).start()
                time.sleep(0.01)
        return True

    # Words.

    @cached_property
    def _driver(self) -> str:
        version = cu.driver_version()
        return f"{version // 1000}.{version % 1000 // 10}"

    def capabilities(self) -> Capabilities:
        post = {
            None: "not known before the first call: a stream write where the driver lets it reach "
            "a peer, else a 4-byte copy",
            True: "stream write to the peer's memory",
            False: "4-byte copy to the peer's memory",
        }[self._writes_reach]
        order = (
            "with a flush of remote writes"
            if self._flush
            else "without a flush, which this device does not offer: relies on a peer's word "
            "arriving behind the copy in front of it"
        )
        return Capabilities(
            engine="cuda",
            post=post + (" (asked for)" if self._signals != "auto" else ""),
            wait=f"stream wait, {order}; the copy kernel posts by itself and, where no product "
            "runs beside it, waits by itself, as sums at the peers do",
            copy=f"cuMemcpyDtoDAsync on {self.copy_engines()} copy engines, driver {self._driver}",
            movers=("dma", "kernel") if self._copies_by_kernel else ("dma",),
            products=f"{library(self.device)}; cuBLASLt for sums that begin in another buffer",
            accumulate="float32 sums of m x n by " + accumulation(),
            capture=True,
        )

    def copy_engines(self) -> int:
        return int(cu.attribute("ASYNC_ENGINE_COUNT", self.device.index))

    def close(self) -> None:
        with _gate.closed():
            _engines.discard(self)
        self.rendezvous.close()
        used = [self._streams[False], self._streams[True]]
        for recorder in self._recorders.values():
            used += [recorder.lanes.streams, {"compute": recorder.stream}]
        used.append({"copy": self.side, "copy of words": self._rescue})
        with cu.uncaptured(), contextlib.suppress(RuntimeError):  # of a device that has failed
            for lane, stream in [pair for streams in used for pair in streams.items()]:
                if stream.query():  # else it is stuck
                    key = self.device.index, 0 if lane.startswith("compute") else -1
                    _spare.setdefault(key, []).append(stream)
        self._streams = {False: {}, True: {}}
        self._lanes.clear()
        self._recorders.clear()
        self._recorded.clear()
