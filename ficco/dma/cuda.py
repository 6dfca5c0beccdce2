"""NVIDIA GPUs: copy engines, stream memory operations and cuBLAS, through PyTorch.

Every lane is a stream; ``compute0`` is the caller's own. Buffers are PyTorch's symmetric memory,
mapped into every process of the group, and copies between them run on the copy engines. A signal
is a 32-bit word in the waiter's memory: posted by a stream write behind the copy or, where the
driver refuses stream writes to a peer, by a 4-byte copy; waited for by a stream wait, which takes
no SM.

Ordering: a stream's write, or copy, is performed after the copy in front of it is complete. A wait
asks for a flush of remote writes where the device offers it. Where it does not (H100 and H200 over
NVLink), a completed peer copy is visible in the receiver's memory before the word that follows it
on the same path.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._symmetric_memory as symm_mem

from ficco.dma import cuda_driver as cu
from ficco.dma.engine import (
    Call,
    Capabilities,
    Engine,
    Op,
    Program,
    Slot,
    Span,
    Symmetric,
)
from ficco.dma.rendezvous import Rendezvous
from ficco.errors import BackendError
from ficco.plan import Product, Region, Signal, Transfer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

WORD = 4
#: Words behind a slot's signals that lanes have for themselves, one each.
SCRATCH = 256
#: Slots that one engine can watch: two for eager calls, two for every graph.
MAX_WATCHED = 4096


def _align(nbytes: int, to: int = 512) -> int:
    return -(-nbytes // to) * to


class CudaMemory(Symmetric):
    """PyTorch symmetric memory; ``addresses`` are those of all ranks, mapped here."""

    def __init__(self, nbytes: int, engine: CudaEngine, serial: int) -> None:
        self.serial, self.nbytes = serial, nbytes
        with cu.uncaptured():
            self.tensor = symm_mem.empty(nbytes, dtype=torch.uint8, device=engine.device)
            with torch.cuda.stream(engine.side):
                self.tensor.zero_()
            engine.side.synchronize()
            # Every rank has zeroed its part before any rank learns of it.
            self._handle = engine.rendezvous.meet(
                self.tensor, engine.timeout_s, engine.operator, engine.interrupt
            )
        self.addresses = list(self._handle.buffer_ptrs)

    def free(self) -> None:
        del self.tensor, self._handle


class _Watch:
    """Two words in pinned host memory that a slot's calls write."""

    def __init__(self, words: torch.Tensor, index: int) -> None:
        self._view = words.numpy()[2 * index : 2 * index + 2]
        # Adjacent, so that the end of a call is one write.
        self.begun = words.data_ptr() + 2 * index * WORD
        self.ended = self.begun + WORD

    def read(self) -> tuple[int, bool]:
        ended = bool(self._view[1])
        if ended:
            self._view[1] = 0
        return int(self._view[0]), ended


class _SlotState:
    """What the engine keeps with a slot."""

    def __init__(self, watch: _Watch) -> None:
        self.watch = watch
        self.over = cu.Event()  # the caller's stream is through with the latest call
        self.retired = cu.Event()  # and the slot has been handed on
        self.stream = 0  # number of the caller's stream of the latest call
        self.sync: Any = None  # and its sync lane
        self.begin = cu.Words([watch.begun])


@dataclass(frozen=True)
class _Run:
    """A program as :meth:`CudaEngine.execute` goes through it."""

    body: list[Op]
    tail: list[Op]
    forks: bool
    joined: list[tuple[Any, cu.Event]]
    sync: Any


class CudaEngine(Engine):
    """See the module's docstring."""

    name = "cuda"
    asynchronous = True

    def __init__(self, group: ProcessGroup, device: torch.device, signals: str = "auto") -> None:
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
        self.rendezvous = Rendezvous(group, self.timeout_s)
        self._signals = signals
        self._serial = 0
        with torch.cuda.device(self.device), cu.uncaptured():
            # High priority: hardware queues of their own, and no place behind a long GEMM.
            self.side = torch.cuda.Stream(priority=-1)
            self._rescue = torch.cuda.Stream(priority=-1)
            self._lanes: dict[tuple[str, bool], torch.cuda.Stream] = {}
            self._watched = torch.zeros(2 * MAX_WATCHED, dtype=torch.int32, pin_memory=True)
        self._watches = 0
        self._callers: dict[int, Any] = {}  # streams of callers, by number
        self._fork = cu.Event()
        self._joins: dict[tuple[str, bool], cu.Event] = {}
        self._flush = bool(cu.attribute("CAN_FLUSH_REMOTE_WRITES", index))
        self._writes_reach: bool | None = None if signals == "auto" else signals == "write"

    # Memory.

    def symmetric(self, nbytes: int) -> CudaMemory:
        self._serial += 1
        with torch.cuda.device(self.device):
            return CudaMemory(_align(nbytes), self, self._serial)

    def free(self, memory: Symmetric) -> None:
        assert isinstance(memory, CudaMemory)
        memory.free()

    def slot_bytes(self, words: int, room: tuple[int, int]) -> int:
        return sum(map(_align, ((words + SCRATCH) * WORD, *room)))

    def slot(self, memory: Symmetric, words: int, room: tuple[int, int], captured: bool) -> Slot:
        assert isinstance(memory, CudaMemory)
        staging = _align((words + SCRATCH) * WORD)
        publish = staging + _align(room[0])
        if self._watches == MAX_WATCHED:
            raise NotImplementedError(f"more than {MAX_WATCHED // 2} graphs capture ficco calls")
        with cu.uncaptured(), torch.cuda.device(self.device):
            if self._writes_reach is None:
                # A word that rests at 0 and that no call is using yet.
                peer = memory.addresses[(self.rank + 1) % self.world]
                self._writes_reach = cu.writes_reach(peer, self.side.cuda_stream)
            state = _SlotState(_Watch(self._watched, self._watches))
        self._watches += 1
        return Slot(memory, words, room, (staging, publish), captured, state=state)

    def retire(self, slot: Slot) -> None:
        if slot.epoch:
            slot.state.retired.record(slot.state.sync)
            slot.state.retired.synchronize()

    # Lanes.

    def _lane(self, program: Program, name: str) -> torch.cuda.Stream | None:
        """The stream of a lane; None is the caller's own."""
        if name == "compute0":
            return None
        # Captured calls use streams of their own: a stream that is being captured is closed to
        # eager calls of other threads.
        key = (name, program.slot is not None and program.slot.captured)
        if key not in self._lanes:
            priority = 0 if name.startswith("compute") else -1
            with cu.uncaptured():
                self._lanes[key] = torch.cuda.Stream(self.device, priority=priority)
                self._joins[key] = cu.Event()
        return self._lanes[key]

    def _stream(self, program: Program, step: int) -> Any:
        """The handle of a step's lane, None for the caller's stream, known only in a call."""
        lane = self._lane(program, program.plan.steps[step].lane)
        return None if lane is None else cu.stream(lane.cuda_stream)

    # Signals.

    def _words(self, program: Program, signals: Sequence[Signal]) -> list[int]:
        slot = program.slot
        assert slot is not None and isinstance(slot.memory, CudaMemory)
        addresses = slot.memory.addresses
        return [addresses[signal.waiter] + signal.word * WORD for signal in signals]

    def wait(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        slot, stream = program.slot, self._stream(program, step)
        assert slot is not None
        comparison = "==" if slot.captured else ">="
        words = cu.Words(self._words(program, signals), wait=comparison, flush=self._flush)
        # The signals of a step rest at one value: it either takes slots over or waits for data.
        offset = slot.wanted(signals[0], 0)
        if slot.captured:
            return lambda call: words.enqueue(stream or call.state, offset)
        return lambda call: words.enqueue(stream or call.state, call.epoch + offset)

    def post(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        stream = self._stream(program, step)
        slot = program.slot
        assert slot is not None
        targets = self._words(program, signals)
        # The last post of a call also tells the watchdog that it is over.
        last = [slot.state.watch.begun] if program.plan.steps[step].lane == "sync" else []
        value = slot.posted(signals[0], 0) if slot.captured else None
        if self._writes_reach and not (last and slot.captured):
            words = cu.Words(targets, wide=last)
            if value is not None:
                return lambda call: words.enqueue(stream or call.state, value)
            return lambda call: words.enqueue(stream or call.state, call.epoch)

        over = cu.Words([], wide=last)
        if self._writes_reach:
            words = cu.Words(targets)

            def retire(call: Call) -> None:
                words.enqueue(stream, value or 0)
                over.enqueue(stream, call.epoch)

            return retire

        # One source word per lane of the slot: it is written and read in stream order.
        source = self._scratch(program, step)
        sample = cu.Words([source])

        def copy(call: Call) -> None:
            here = stream or call.state
            sample.enqueue(here, call.epoch if value is None else value)
            for target in targets:
                cu.copy(target, source, WORD, here)
            if last:
                over.enqueue(here, call.epoch)

        return copy

    def _scratch(self, program: Program, step: int) -> int:
        """Address of a word of this rank that a step's lane has for itself."""
        slot, plan = program.slot, program.plan
        lane = plan.lanes.index(plan.steps[step].lane)
        assert slot is not None and isinstance(slot.memory, CudaMemory) and lane < SCRATCH
        return slot.memory.addresses[self.rank] + (slot.words + lane) * WORD

    def clear(self, program: Program, step: int, signals: Sequence[Signal]) -> Op | None:
        slot = program.slot
        assert slot is not None
        if not slot.captured:
            return None  # eager calls count up
        stream = self._stream(program, step)
        taken = cu.Words(self._words(program, [s for s in signals if s.released]))
        fresh = cu.Words(self._words(program, [s for s in signals if not s.released]))

        def op(call: Call) -> None:
            taken.enqueue(stream or call.state, 1)
            fresh.enqueue(stream or call.state, 0)

        return op

    def enter(self, program: Program, lane: str) -> Op | None:
        stream = self._lane(program, lane)
        if stream is None or lane == "sync":  # execute() sees to them
            return None
        handle = cu.stream(stream.cuda_stream)
        return lambda call: self._fork.hold(handle)

    def record(self, program: Program, step: int) -> Op | None:
        steps = program.plan.steps
        if not any(step in later.after for later in steps if later.lane != "sync"):
            return None  # the sync lane begins when all others are over
        stream = self._stream(program, step)
        event = self._event(program, step)
        if steps[step].op != "copy":
            return lambda call: event.record(stream or call.state)
        # An event right behind a copy is not seen before the copies behind it are over, too
        # (H200, driver 580); behind a stream write it is seen at once.
        flush = cu.Words([self._scratch(program, step)])

        def op(call: Call) -> None:
            flush.enqueue(stream, 0)
            event.record(stream)

        return op

    def join(self, program: Program, step: int, earlier: int) -> Op | None:
        if program.plan.steps[step].lane == "sync":
            return None
        stream = self._stream(program, step)
        event = self._event(program, earlier)
        return lambda call: event.hold(stream or call.state)

    def _event(self, program: Program, step: int) -> cu.Event:
        found: cu.Event = program.state.setdefault(("event", step), cu.Event())
        return found

    # Copies.

    def copy(self, program: Program, step: int, transfer: Transfer, mover: str) -> Op:
        if mover != "dma":
            raise NotImplementedError(
                f"mover {mover!r} is not served by the cuda engine yet; leave the knob out"
            )
        stream = self._stream(program, step)
        src, dst = transfer
        itemsize = program.plan.problem.itemsize
        width, height = src.cols * itemsize, src.rows
        dst_base, dst_pitch = self._address(program, dst)
        to = cu.address(dst_base + dst.row * dst_pitch + dst.col * itemsize)
        rectangle = cu.Copy2D(width, height, dst_pitch)
        if src.buffer == "a" and src.rank == self.rank:

            def push(call: Call) -> None:
                pitch = call.a.stride(0) * itemsize
                at = call.a.data_ptr() + src.row * pitch + src.col * itemsize
                if (pitch == width == dst_pitch) or height == 1:
                    cu.copy(to, at, width * height, stream or call.state)
                else:
                    rectangle.enqueue(to, at, pitch, stream or call.state)

            return push
        src_base, src_pitch = self._address(program, src)
        at = cu.address(src_base + src.row * src_pitch + src.col * itemsize)
        if (src_pitch == width == dst_pitch) or height == 1:
            return lambda call: cu.copy(to, at, width * height, stream or call.state)
        return lambda call: rectangle.enqueue(to, at, src_pitch, stream or call.state)

    def _address(self, program: Program, region: Region) -> tuple[int, int]:
        """Address and row pitch in bytes of a symmetric buffer of any rank."""
        plan, slot = program.plan, program.slot
        assert slot is not None and isinstance(slot.memory, CudaMemory)
        row = plan.problem.k * plan.problem.itemsize
        if region.buffer == "staging":
            pitch = plan.staging[1] * plan.problem.itemsize
            return slot.memory.addresses[region.rank] + slot.offsets[0], pitch
        if region.buffer == "publish":
            return slot.memory.addresses[region.rank] + slot.offsets[1], row
        assert region.buffer == "a" and program.source is not None
        memory, offset = program.source
        assert isinstance(memory, CudaMemory)
        return memory.addresses[region.rank] + offset, row

    def place(self, program: Program, step: int, transfer: Transfer) -> Op:
        src, dst = transfer
        run = self._on_lane(program, step)

        def op(call: Call) -> None:
            self._view(program, call, dst).copy_(self._view(program, call, src))

        return run(op)

    # Products.

    def _tensor(self, program: Program, call: Call, name: str) -> torch.Tensor:
        """A whole buffer of this rank as a matrix."""
        if name in ("staging", "publish"):
            if name not in program.state:
                plan, slot = program.plan, program.slot
                assert slot is not None
                problem = plan.problem
                shape = plan.staging
                if name == "publish":
                    shape = (problem.rows[self.rank], problem.k)
                start = slot.offsets[name == "publish"]
                nbytes = shape[0] * shape[1] * problem.itemsize
                flat = slot.memory.tensor[start : start + nbytes]
                program.state[name] = flat.view(getattr(torch, problem.dtype)).view(shape)
            found: torch.Tensor = program.state[name]
            return found
        tensor = {"a": call.a, "out": call.out, "sum": call.sums, "gathered": call.gathered}[name]
        assert tensor is not None
        return tensor

    def _view(self, program: Program, call: Call, region: Region) -> torch.Tensor:
        whole = self._tensor(program, call, region.buffer)
        view = whole if region.rows == whole.shape[0] else whole[region.row : region.row_stop]
        return view if region.cols == whole.shape[1] else view[:, region.col : region.col_stop]

    def _batch(
        self, program: Program, call: Call, region: Region, batch: int, stride: int
    ) -> torch.Tensor:
        whole = self._tensor(program, call, region.buffer)
        pitch, step = whole.stride()
        return whole.as_strided(
            (batch, region.rows, region.cols),
            (stride * pitch, pitch, step),
            whole.storage_offset() + region.row * pitch + region.col * step,
        )

    def matmul(self, program: Program, step: int, products: Sequence[Product]) -> Op:
        parts = [self._product(program, product) for product in products]

        def op(call: Call) -> None:
            for part in parts:
                part(call)

        return self._on_lane(program, step)(parts[0] if len(parts) == 1 else op)

    def _product(self, program: Program, product: Product) -> Op:
        k = program.plan.problem.k
        whole_k = product.k_last - product.k_first == k
        batched = product.batch > 1

        def op(call: Call) -> None:
            b = call.b if whole_k else call.b[product.k_first : product.k_last]
            if batched:
                a = self._batch(program, call, product.a, product.batch, product.a_stride)
                out = self._batch(program, call, product.out, product.batch, product.out_stride)
                b = b.unsqueeze(0).expand(product.batch, -1, -1)
            else:
                a = self._view(program, call, product.a)
                out = self._view(program, call, product.out)
            _multiply(a, b, out, product.accumulate)

        return op

    def _on_lane(self, program: Program, step: int) -> Any:
        """Makes PyTorch enqueue an operation on the step's lane."""
        lane = self._lane(program, program.plan.steps[step].lane)
        if lane is None:
            return lambda op: op

        def wrap(op: Op) -> Op:
            def on_lane(call: Call) -> None:
                before = torch.cuda.current_stream(self.device)
                torch.cuda.set_stream(lane)
                try:
                    op(call)
                finally:
                    torch.cuda.set_stream(before)

            return on_lane

        return wrap

    # Running.

    def execute(self, program: Program, call: Call) -> None:
        if torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self.execute(program, call)
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        stream = self._callers.get(raw)
        if stream is None:
            stream = self._callers[raw] = cu.stream(raw)
        call.state = stream
        slot = program.slot
        run = program.state.get("run") or self._run(program)
        if slot is not None:
            state = slot.state
            if slot.epoch and (slot.captured or state.stream != raw):
                self._hand_over(slot, run.sync, stream)
            state.stream = raw
            call.epoch = slot.begin(program)
        if run.forks:
            self._fork.record(stream)
        if "base" in program.state:
            program.state["base"].record(torch.cuda.current_stream(self.device))
        for op in run.body:
            op(call)
        for lane, event in run.joined:
            event.record(lane)
            event.hold(stream)
        if slot is None:
            return
        # What peers and the watchdog are told is no business of the caller's stream.
        sync = run.sync
        self._fork.hold(sync)
        state.begin.enqueue(sync, call.epoch)
        state.over.record(stream)
        state.over.hold(sync)
        for op in run.tail:
            op(call)
        state.sync = sync
        if slot.captured:
            self._hand_over(slot, sync, stream)  # a capture ends with all its streams joined

    def _hand_over(self, slot: Slot, sync: Any, stream: Any) -> None:
        """Let a stream wait until the latest call on a slot is over."""
        slot.state.retired.record(sync)
        slot.state.retired.hold(stream)

    def _run(self, program: Program) -> _Run:
        """What :meth:`execute` needs of a program, made once."""
        captured = program.slot is not None and program.slot.captured
        lanes = {name: self._lane(program, name) for name in program.plan.lanes}
        joined = [
            (cu.stream(lane.cuda_stream), self._joins[name, captured])
            for name, lane in lanes.items()
            if lane is not None and name != "sync"
        ]
        sync = lanes.get("sync")
        run = program.state["run"] = _Run(
            body=[op for lane, op in program.ops if lane != "sync"],
            tail=[op for lane, op in program.ops if lane == "sync"],
            forks=any(lane is not None for lane in lanes.values()),
            joined=joined,
            sync=cu.stream(sync.cuda_stream) if sync is not None else None,
        )
        return run

    def stamp(self, program: Program, step: int, end: bool) -> Op:
        program.state.setdefault("base", torch.cuda.Event(enable_timing=True))
        event = torch.cuda.Event(enable_timing=True)
        program.state["stamp", step, end] = event
        lane = self._lane(program, program.plan.steps[step].lane)
        return lambda call: event.record(lane or torch.cuda.current_stream(self.device))

    def spans(self, program: Program, call: Call) -> list[Span]:
        torch.cuda.synchronize(self.device)
        base = program.state["base"]
        return [
            Span(
                index,
                step.lane,
                base.elapsed_time(program.state["stamp", index, False]) / 1e3,
                base.elapsed_time(program.state["stamp", index, True]) / 1e3,
            )
            for index, step in enumerate(program.plan.steps)
        ]

    def capturing(self) -> int:
        if not torch.cuda.is_current_stream_capturing():
            return 0
        return cu.capture_id(torch._C._cuda_getCurrentRawStream(self.device.index))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    # Watching.

    def pulse(self, slot: Slot) -> tuple[int, bool]:
        found: tuple[int, bool] = slot.state.watch.read()
        return found

    def missing(self, slot: Slot, program: Program, epoch: int) -> tuple[int, Signal, int] | None:
        assert isinstance(slot.memory, CudaMemory)
        try:
            words = cu.read_words(slot.memory.addresses[self.rank], slot.words, self._rescue, 2.0)
        except BackendError:
            words = []
        if not words:
            return None
        late: tuple[int, Signal, int] | None = None
        for index, step in enumerate(program.plan.steps):
            for signal in step.waits:
                wanted, value = slot.wanted(signal, epoch), words[signal.word]
                if value != wanted if slot.captured else value < wanted:
                    if not signal.released:
                        return index, signal, value
                    late = late or (index, signal, value)
        return late

    def release(self, slots: Sequence[Slot], seconds: float) -> bool:
        """Write, again and again, what every wait wants, until no call is running."""
        end = time.monotonic() + seconds
        stream = self._rescue.cuda_stream
        with torch.cuda.device(self.device), cu.uncaptured():
            while any(slot.state.watch.read()[0] for slot in slots):
                if time.monotonic() > end:
                    return False
                for slot in slots:
                    assert isinstance(slot.memory, CudaMemory)
                    base = slot.memory.addresses[self.rank]
                    words = [base + i * WORD for i in range(slot.words)]
                    released, ready = cu.Words(words[: self.world]), cu.Words(words[self.world :])
                    released.enqueue(stream, 0 if slot.captured else slot.epoch)
                    ready.enqueue(stream, 1 if slot.captured else slot.epoch)
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
        engines = cu.attribute("ASYNC_ENGINE_COUNT", self.device.index)
        return Capabilities(
            engine="cuda",
            post=post + (" (asked for)" if self._signals != "auto" else ""),
            wait=f"stream wait, {order}",
            copy=f"cuMemcpyDtoDAsync on {engines} copy engines, driver {self._driver}",
            movers=("dma",),
            accumulate="float32 sums of m x n by " + accumulation(),
            capture=True,
        )

    def close(self) -> None:
        self.rendezvous.close()
        self._lanes.clear()
        self._joins.clear()


def accumulation() -> str:
    """How half-precision column pieces add up in float32 with this PyTorch."""
    if _has_out_dtype():
        return "torch.addmm(out_dtype=float32) on the pieces as they are"
    return "a float32 GEMM of upcast pieces (twice their memory while it runs)"


def _has_out_dtype() -> bool:
    """PyTorch 2.8 and later multiply half-precision matrices into float32."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 8)


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    """``out (+)= a @ b`` for matrices or batches; sums are wider than the operands or equal."""
    batched = a.dim() == 3
    if a.dtype == out.dtype:
        if accumulate:
            (torch.baddbmm if batched else torch.addmm)(out, a, b, out=out)
        else:
            (torch.bmm if batched else torch.mm)(a, b, out=out)
        return
    if not _has_out_dtype():
        _multiply(a.float(), b.float(), out, accumulate)
    elif accumulate:
        add = torch.baddbmm if batched else torch.addmm
        add(out, a, b, out_dtype=out.dtype, out=out)
    else:
        (torch.bmm if batched else torch.mm)(a, b, out_dtype=out.dtype, out=out)
