"""Operations of a call on a lane, and how neighbours on a lane are merged into fewer.

A launch of the copy kernel, or of a sum over peers' memory, can carry out the waits and writes
before and after it. Nothing here touches the device before an operation is called. Calls are
recorded, and replayed for operands at the same addresses to save host time.
"""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from ficco.compute.buffers import buffers_of, operands_key
from ficco.compute.program import Call, Op, Program, callers
from ficco.dma.driver import (
    WAIT_32,
    WORD,
    Batch,
    Driver,
    Fused,
    Lanes,
    MemOp,
    Recording,
    behind,
    in_front,
    script,
)
from ficco.dma.memories import GATE
from ficco.errors import BackendError
from ficco.hip_kernels.launch import Kernels, Script, Signals
from ficco.plan import Plan, Step, Transfer

#: Seconds after which a waiting kernel gives up; the watchdog ends it long before.
KERNEL_WAIT_S = 86400.0


@dataclass(frozen=True)
class Run:
    """A program as :meth:`GpuEngine.execute` enqueues it.

    Attributes:
        body: operations that the caller's stream waits for.
        begin: tells the watchdog that the call begins; None if an event or a launch does.
        tail: on the lane ``tail_lane``, signals to peers and the watchdog's word of the end.
        lanes: lanes that run concurrently with the caller's stream.
        before: preparations of tiled launches, called before anything is enqueued.
        parts: for a body with tiled launches, which take longer in a recording: the part that is
            recorded and the part that is not; None if they cannot be separated.
        recordable: false for collectives, which use no words; captured calls; timed calls; and
            calls between hosts, which hand each exchange to a thread or to a counting library.
        recorded: recordings of the body, by the addresses of the operands.
        seen: addresses of operands that have occurred once.
    """

    body: list[Op]
    begin: Batch | None
    tail: list[Op]
    tail_lane: str
    lanes: tuple[str, ...]
    before: tuple[Op, ...] = ()
    parts: tuple[Run, Run] | None = None
    recordable: bool = False
    recorded: dict[Any, _Recorded] = field(default_factory=dict)
    seen: set[Any] = field(default_factory=set)


@dataclass(frozen=True)
class Memops:
    """An operation of nothing but waits and writes. Neighbours on a lane are merged."""

    lane: str
    batch: Batch

    @property
    def ops(self) -> tuple[MemOp, ...]:
        return self.batch.ops

    @property
    def whole(self) -> bool:
        """Whether the batch can neither be split nor merged with others."""
        return isinstance(self.batch, Posts)

    def __call__(self, call: Call) -> None:
        self.batch.enqueue(call.state[self.lane])


class Posts:
    """Posts by 4-byte copies, where stream writes do not reach a peer.

    Attributes:
        ops: the equivalent stream writes.
    """

    def __init__(self, ops: Sequence[MemOp], sources: Sequence[int], driver: Driver) -> None:
        """``sources``: addresses of words that hold the values of ``ops``."""
        self.ops = tuple(ops)
        copies = [driver.copy(op.address, WORD) for op in ops]
        self._copies = list(zip(copies, sources, strict=True))

    def enqueue(self, stream: Any) -> None:
        for copy, source in self._copies:
            copy(source, stream)


class KernelBatch:
    """Waits and writes by ficco's kernels: one launch for each run of waits or of writes. While a
    launch waits, one block spins on the device."""

    def __init__(self, ops: Sequence[MemOp], kernels: Kernels, late: int) -> None:
        """``late``: address of a word that is written when a kernel gives up."""
        self.ops, self._kernels, self._late = tuple(ops), kernels, late
        self._runs: list[tuple[bool, list[tuple[int, int]]]] = []
        for op in self.ops:
            waits = op.kind == WAIT_32
            if not self._runs or self._runs[-1][0] != waits:
                self._runs.append((waits, []))
            self._runs[-1][1].extend(op.words)

    def enqueue(self, stream: Any) -> None:
        for waits, words in self._runs:
            if waits:
                self._kernels.wait(words, KERNEL_WAIT_S, self._late, stream)
            else:
                self._kernels.post(words, stream)


@dataclass(frozen=True)
class Launch:
    """An operation of one kernel launch, which also carries out waits and writes around its work.

    Attributes:
        work: launches the kernel with its signals; with None for copies without signals.
        arrived: address of the word that counts blocks of the launch; 0 if the launch cannot carry
            out signals.
        mine: addresses of this rank's own words.
        spins: the launch has so few blocks that all may spin.
        sums: the launch sums data in peers' memory, and carries out all waits and writes before.
        reads: peers read nothing that the launch writes, so a first post need not be a release.
        around: waits and writes that the launch carries out.
    """

    work: Callable[[Call, Any], None]
    arrived: int
    mine: range
    spins: bool = False
    sums: bool = False
    reads: bool = False
    around: Fused = Fused()

    @cached_property
    def signals(self) -> Signals | None:
        bare = self.around == Fused() and not self.sums
        return None if bare else self.around.signals(self.arrived, self.mine, self.reads)

    def __call__(self, call: Call) -> None:
        self.work(call, self.signals)


@dataclass(frozen=True)
class Scripted:
    """Waits and writes on the caller's stream, by one kernel launch."""

    kernels: Kernels
    script: Script

    def __call__(self, call: Call) -> None:
        self.kernels.script(self.script, call.state["compute0"])


def copied_together(
    program: Program, lane: str, transfers: Sequence[Transfer], driver: Driver, apart: Op
) -> Op:
    """Copies of whole rows to several peers, in any order, by one call of the driver; the operation
    ``apart`` if the caller's rows are not contiguous."""
    first, places = transfers[0], buffers_of(program)
    sources = [places.source(one.src) for one in transfers]
    shapes = [places.size(one.src) for one in transfers]
    targets = [places.place(one.dst) for one in transfers]
    to = np.array([address for address, _ in targets], np.int64)
    sizes = np.array([width * height for width, height in shapes], np.int64)
    copies = driver.copies((first.dst.rank, first.src.rank), program.batched)

    def op(call: Call) -> None:
        origins = [source(call) for source in sources]
        pitches = zip(shapes, targets, origins, strict=True)
        if all(h == 1 or w == near == far for (w, h), (_, far), (_, near) in pitches):
            copies(to, np.array([at for at, _ in origins], np.int64), sizes, call.state[lane])
        else:
            apart(call)

    return op


#: Operations that wait, or that may take over waits.
_MAY_BE_STUCK = Memops, Launch


def enqueue(run: Run, call: Call) -> None:
    """Enqueue the body of a program. Its lanes fork from the caller's stream and join it."""
    if run.lanes or run.begin is not None:
        _begin(run, call)
    for op in run.body:
        op(call)
    if run.lanes:
        _end(run, call)


def enqueue_first(run: Run, call: Call) -> None:
    """Enqueue the operations before the caller's step."""
    _begin(run, call)
    for op in run.body[: run.body.index(callers)]:
        op(call)


def enqueue_rest(run: Run, call: Call) -> None:
    """Enqueue the operations after the caller's step."""
    for op in run.body[run.body.index(callers) :]:
        op(call)
    _end(run, call)


def enqueue_beside(recording: Recording, rest: Run, call: Call) -> None:
    """Replay the recorded part of a program, on the first lane of the rest; enqueue the rest."""
    lanes = call.state
    _begin(rest, call)
    lanes.fork.hold(lanes[rest.lanes[0]])
    recording.replay(lanes[rest.lanes[0]])
    for op in rest.body:
        op(call)
    _end(rest, call)


def parted(ops: Sequence[tuple[str, Op]], steps: Sequence[Step]) -> tuple[Run, Run] | None:
    """Split a body into the part that a recording may hold, and the rest.

    The rest are the lanes that share events with the caller's stream, directly or through other
    lanes. None if all lanes do.

    Args:
        ops: the operations of the body, each with its lane.
        steps: the steps of the Plan.
    """
    shared = {frozenset((step.lane, steps[index].lane)) for step in steps for index in step.after}
    linked = {"compute0"}
    while more := {lane for pair in shared if pair & linked for lane in pair} - linked - {"sync"}:
        linked |= more
    lanes = list(dict.fromkeys(lane for lane, _ in ops))
    unlinked = [lane for lane in lanes if lane not in linked]
    if not unlinked:
        return None
    recorded = [op for lane, op in ops if lane not in linked]
    rest = [op for lane, op in ops if lane in linked]
    others = [lane for lane in lanes if lane in linked and lane != "compute0"]
    return (
        Run(recorded, None, [], "sync", tuple(unlinked)),
        Run(rest, None, [], "sync", (unlinked[0], *others)),
    )


def _begin(run: Run, call: Call) -> None:
    lanes = call.state
    stream = lanes["compute0"]
    if run.begin is not None or run.lanes:
        lanes.fork.record(stream)
    if run.begin is not None:  # before any operation that can get stuck
        lanes.fork.hold(lanes["sync"])
        run.begin.enqueue(lanes["sync"])


def _end(run: Run, call: Call) -> None:
    lanes = call.state
    for lane in run.lanes:
        event = lanes.joins[lane]
        event.record(lanes[lane])
        event.hold(lanes["compute0"])
    # Parts of attention are merged on any lane. Until then no later work of the lane where a part
    # was allocated may reuse its memory.
    attended = [lane for lane in run.lanes if call.parts and lane.startswith("compute")]
    if attended:
        lanes.fork.record(lanes["compute0"])
    for lane in attended:
        lanes.fork.hold(lanes[lane])


MakeBatch = Callable[[Sequence[MemOp]], Batch]


def joined(ops: Iterable[tuple[str, Op]], batch: MakeBatch) -> list[tuple[str, Op]]:
    """Merge neighbouring operations of each lane where possible. Each has its lane with it."""
    merged: list[tuple[str, Op]] = []
    for lane, op in ops:
        pending: tuple[Op, ...] = (op,)
        while len(pending) == 1 and merged and merged[-1][0] == lane:
            pending = _joined(lane, merged.pop()[1], pending[0], batch)
        merged += [(lane, op) for op in pending]
    return merged


def _joined(lane: str, left: Op, right: Op, batch: MakeBatch) -> tuple[Op, ...]:
    """Merge two neighbouring operations of a lane, so that they take as few driver calls and as
    little time of the stream as possible."""

    def memops(ops: tuple[MemOp, ...]) -> tuple[Op, ...]:
        return (Memops(lane, batch(ops)),) if ops else ()

    # A spinning block takes an SM from products: none may spin while products run.
    spins = lane.startswith("compute")
    if isinstance(left, Memops) and isinstance(right, Memops):
        if not (left.whole or right.whole):
            return (Memops(lane, batch((*left.ops, *right.ops))),)
    elif isinstance(left, Memops) and isinstance(right, Launch) and right.arrived:
        if right.sums:
            around = replace(right.around, front=(*left.ops, *right.around.front))
            if around.fits:
                return (replace(right, around=around),)
        elif not left.whole:
            rest, around = in_front(left.ops, right.around, right.mine, spins and right.spins)
            return *memops(rest), replace(right, around=around)
    elif isinstance(left, Launch) and isinstance(right, Memops) and left.arrived and not left.sums:
        around, rest = behind(right.ops, left.around, spins)
        if not (right.whole and rest):
            return replace(left, around=around), *memops(rest)
    return left, right


def by_launches(
    body: Sequence[Op],
    begin: Batch | None,
    tail: Sequence[Op],
    kernels: Kernels,
    mine: Container[int],
) -> tuple[list[Op], list[Op]] | None:
    """Fold the begin and the tail of a call of one lane into launches on the caller's stream; None
    if that is not possible, or slower than a second stream.

    Args:
        body: operations of the caller's stream; at least one.
        begin: tells the watchdog that a captured call begins; None for an eager call.
        tail: operations after the body.
        mine: addresses of this rank's own words.

    Returns:
        Body and tail, both for the caller's stream.
    """
    batches = [op for op in tail if isinstance(op, Memops)]
    rear = tuple(op for batch in batches for op in batch.ops)
    if len(batches) < len(tail) or not Fused(rear=rear).fits:
        return None
    folded: list[Op] = [*body]
    if begin is not None:
        # The first operation that can get stuck writes the word of the watchdog. To the watchdog a
        # replay that has not reached it looks like a call that is only enqueued.
        at = next((i for i, op in enumerate(folded) if isinstance(op, _MAY_BE_STUCK)), 0)
        first = folded[at]
        if isinstance(first, Launch) and first.arrived:
            around = replace(first.around, begin=begin.ops)
            folded[at] = replace(first, around=around)
        elif isinstance(first, Memops) and not first.whole:
            around = Fused(begin.ops, first.ops)
            folded[at] = Scripted(kernels, script(first.ops, mine, aside=begin.ops))
        else:
            return None
        if not around.fits:
            return None
    if isinstance(last := folded[-1], Launch) and last.sums:
        folded[-1] = replace(last, around=replace(last.around, rear=rear))
        return folded, []
    if begin is None:
        return None
    return folded, [Scripted(kernels, script(rear, mine))]


#: Recordings to keep, over all programs. A recording takes about 0.2 MB of the device's memory
#: (H200, 2 ranks, growing).
MAX_RECORDED = 512

#: Recordings that an engine makes without regard to their use, and replays of each that pay for
#: further ones. A recording takes 0.3 ms, and a replay saves 0.1 ms (2 H200). Operands of a decoder
#: with a growing cache have new addresses again and again.
FREE_RECORDINGS, PAYING_REPLAYS = 128, 4

#: Calls after which a recording that none of them used makes room. Calls that take turns, as in
#: training, are fewer, and keep the recordings that there is room for.
UNUSED_CALLS = 16 * MAX_RECORDED


#: Getters of the numerical settings that affect which kernels run for the same operands, by the
#: dtype of the products that a setting is for; "" for all. A recording keeps PyTorch's preferred
#: BLAS and share of SMs: to read both would take 20 us of a call whose caches are cold (x86-64).
_SETTINGS = [
    (getter, dtype)
    for name, dtype in (
        ("_get_cublas_allow_fp16_accumulation", "float16"),
        ("_get_cublas_allow_fp16_reduced_precision_reduction", "float16"),
        ("_get_cublas_allow_bf16_reduced_precision_reduction", "bfloat16"),
        ("_get_deterministic_algorithms", ""),
        ("_get_cudnn_sdp_enabled", "every"),
    )
    if (getter := getattr(torch._C, name, None)) is not None
]
# In newer releases the old getter raises once the new API has been used.
if hasattr(torch._C, "_get_fp32_precision_getter"):
    _SETTINGS.append((partial(torch._C._get_fp32_precision_getter, "cuda", "matmul"), "float32"))
else:
    _SETTINGS.append((torch._C._get_cublas_allow_tf32, "float32"))


def settings_of(plan: Plan) -> list[Callable[[], Any]]:
    """Getters of the settings that affect which kernels run for a Plan: all of them for attention,
    whose libraries may have products of any dtype."""
    dtypes = {"", *(buffer.dtype for buffer in plan.buffers)}
    every = any(step.op == "attend" for step in plan.steps)
    return [getter for getter, dtype in _SETTINGS if every or dtype in dtypes]


class _Recorder:
    """A stream, its lanes and a memory pool to record the calls of one caller's stream. Recordings
    share them, since their replays follow each other on that stream."""

    def __init__(self, driver: Driver) -> None:
        self.stream, self.pool = driver.stream_for("recorded compute0"), torch.cuda.MemPool()
        self.lanes = Lanes(driver, self.stream.handle, {}, "recorded")


@dataclass(eq=False)
class _Recorded:
    """A recording of a run. ``used``: how many calls the engine had made at its last use."""

    number: int
    run: weakref.ref[Run]
    key: Any
    recording: Recording
    used: int


class Replays:
    """The recordings of one engine."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._recorders: dict[int, _Recorder] = {}
        # The least recently used first. Runs own their recordings.
        self._recorded: OrderedDict[int, weakref.ref[_Recorded]] = OrderedDict()
        self._calls = self._total = self._replayed = 0  # calls, recordings, and replays
        # A graph need not launch its nodes in the order of recording: with a single hardware queue
        # a wait could be queued before the operation that it waits for.
        self.possible = driver.records and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"

    def __len__(self) -> int:
        return len(self._recorded)

    def find(self, program: Program, call: Call, raw: int) -> Recording | None:
        """The recording of a program for the addresses of a call's operands; None at their first
        use. ``raw`` is the caller's stream.

        At the second use, the calls on all slots are recorded at once, if there is room.
        """
        state = program.state
        settings = state.get("settings") or state.setdefault("settings", settings_of(program.plan))
        run: Run = state["run"]
        key = (raw, *operands_key(call), *[setting() for setting in settings])
        recorded = run.recorded.get(key)
        self._calls += 1
        if recorded is not None:
            self._replayed += 1
            recorded.used = self._calls
            self._recorded.move_to_end(recorded.number)
            return recorded.recording
        kin = [sibling.state.get("run") for sibling in program.siblings.values()]
        runs = [one for one in kin if one is not None and one.recordable] or [run]
        if not any(key in run.seen for run in runs):
            if len(runs[0].seen) >= MAX_RECORDED:
                runs[0].seen.clear()
            runs[0].seen.add(key)
            return None
        if not self._has_room():
            return None
        with GATE.recording() as allowed:
            for one in runs if allowed else ():
                if key in one.recorded or not self.possible or not self._has_room():
                    continue
                part = one.parts[0] if one.parts else one
                # Each recording has parts of attention of its own.
                if recording := self._record(part, replace(call, parts={}), raw):
                    self._total += 1
                    new = _Recorded(self._total, weakref.ref(one), key, recording, self._calls)
                    self._recorded[new.number], one.recorded[key] = weakref.ref(new), new
        recorded = run.recorded.get(key)
        return None if recorded is None else recorded.recording

    def close(self) -> None:
        self._recorders.clear()
        self._recorded.clear()

    def _has_room(self) -> bool:
        """Whether a recording may be added. If recordings pay, one that no call has used for long
        makes room."""
        if self._total >= FREE_RECORDINGS and self._replayed < PAYING_REPLAYS * self._total:
            return False
        while len(self._recorded) >= MAX_RECORDED:
            number, reference = next(iter(self._recorded.items()))
            if (oldest := reference()) is not None:  # else its program was freed
                if self._calls - oldest.used < UNUSED_CALLS:
                    return False
                if (run := oldest.run()) is not None:
                    del run.recorded[oldest.key]
                    run.seen.discard(oldest.key)
            del self._recorded[number]
        return True

    def _record(self, run: Run, call: Call, raw: int) -> Recording | None:
        """Record the body of a call, whose lanes change. If that fails, returns None and disables
        recordings."""
        collecting = gc.isenabled()
        gc.disable()  # it may free objects that must not be freed during a capture
        try:
            recorder = self._recorders.get(raw)
            if recorder is None:  # fails with allocators of PyTorch that have no pools
                recorder = self._recorders[raw] = _Recorder(self._driver)
            call.state = recorder.lanes
            with torch.cuda.stream(recorder.stream.torch), torch.cuda.use_mem_pool(recorder.pool):
                return self._driver.record(recorder.stream.handle, lambda: enqueue(run, call))
        except (RuntimeError, BackendError) as error:
            warnings.warn(
                f"ficco enqueues calls step by step, since a recording failed: {error}",
                stacklevel=2,
            )
            self.possible = False
            return None
        finally:
            if collecting:
                gc.enable()
