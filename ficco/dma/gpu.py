"""GPUs of any vendor: copy engines, signals on streams and the vendor's BLAS, through PyTorch.

Every lane is a stream; ``compute0`` is the caller's own. Buffers are symmetric memory, mapped into
every process of the group. A signal is a 32-bit word in the waiter's memory: posted by a stream
write after the copy, by a 4-byte copy where stream writes do not reach a peer, or by a kernel;
waited for by a stream wait, which takes no SM, or by a kernel. Everything specific to a vendor is
in a :class:`ficco.dma.driver.Driver`, chosen once. If the driver supports it, calls are recorded
and replayed, and launches of ficco's kernels carry out the signals around them.

Ordering: a write or copy on a stream is performed after the preceding copy is complete.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from ficco.compute.attention import apply_op, attend_op, merge, merge_op, spans
from ficco.compute.buffers import buffers_of
from ficco.compute.products import accumulation, add_up, apply, matmul_op, place_op
from ficco.compute.program import Call, Op, Part, Program, Slot, Symmetric
from ficco.compute.ragged_blocks import by_copies, moves
from ficco.compute.tiled.products import TileTypes
from ficco.compute.tiled.worklist import MAX_GATES, Work
from ficco.dma.driver import (
    WAIT_32,
    WORD,
    WRITE_32,
    Batch,
    Driver,
    Event,
    Lanes,
    Mechanisms,
    MemOp,
    Stream,
    drained,
)
from ficco.dma.engine import Capabilities, Span
from ficco.dma.gpu_network import network_of
from ficco.dma.host import Hosts
from ficco.dma.lane_ops import (
    KernelBatch,
    Launch,
    Memops,
    Posts,
    Replays,
    Run,
    by_launches,
    copied_together,
    enqueue,
    enqueue_beside,
    enqueue_first,
    enqueue_rest,
    joined,
    parted,
)
from ficco.dma.memories import (
    GATE,
    MEMORIES,
    SCRATCH,
    Allocate,
    OwnWords,
    SlotWords,
    Words,
    align,
    open_engines,
)
from ficco.dma.tiles import LIMIT_S, TiledStep, order, types_of
from ficco.dma.watch import MAX_WATCHED, Flight, SlotState, Watch, WatchedEngine, wanted
from ficco.errors import BackendError, warn_once
from ficco.hip_kernels.launch import COMBINES, MAX_PARTS, PEER_BLOCKS, Kernels, Signals, gates
from ficco.machine import Machine
from ficco.plan import Applied, Attending, Plan, Product, Reduction, Region, Signal, Transfer
from ficco.plan.parts import exchanged
from ficco.problems.products import Problem
from ficco.problems.specification import MERGE, PLACED
from ficco.schedules import Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Seconds that closing waits for peers to unmap this rank's memory, and for streams. A peer's
#: watchdog may first allow 2 s for the calls before an aborted one to end.
CLOSE_S = 3.0
#: Enqueues the body of a call, or the rest of the body.
Body = Callable[[Run, Call], None]
#: Products of a tiled step: this rank's own rows, the rows before them and the rows after them.
TILED_PRODUCTS = 3


class GpuEngine(WatchedEngine):
    """See the module's docstring."""

    asynchronous = True

    def __init__(
        self,
        group: ProcessGroup,
        driver: Driver,
        signals: str,
        timeout_s: float,
        hosts: Hosts | None = None,
    ) -> None:
        super().__init__(group, driver, hosts)
        self.name, self.timeout_s = driver.name, timeout_s
        self.replayed = Replays(driver)
        self._writes_reach: bool | None = None if signals == "auto" else signals == "write"
        self._signals, self._serial = signals, 0
        # By capturing stream, 0 if eager: graphs may overlap, cuBLAS has a workspace per stream.
        self._streams: dict[int, dict[str, Stream]] = {0: {}}
        self._lanes: dict[tuple[int, bool], Lanes] = {}  # by the caller's stream
        self._allocate: Allocate | None = None
        self.means = Mechanisms()
        try:
            with driver.aside():
                self._open()
        except BaseException:
            with contextlib.suppress(BackendError):  # raise the first error
                self.close()
            raise
        with GATE.closed():
            open_engines.add(self)

    def _open(self) -> None:
        """Allocate the resources of all calls, and agree with the peers on mechanisms."""
        driver = self.driver
        self.side, self._rescue = driver.stream_for("side"), driver.stream_for("rescue")
        self.watched = driver.host((2 * MAX_WATCHED + 2) * WORD)
        self.means = driver.means(self)
        self.packs_columns = not self.means.rectangles
        self._allocate = self._source()
        if self.means.kernels:
            kernels, late = self._kernels, self.watched + 2 * MAX_WATCHED * WORD
            self._batch = lambda ops: KernelBatch(ops, kernels, late)

    def connect(self) -> None:
        if self.hosts.count > 1:
            with self.driver.aside():
                self._network = network_of(self, self._batch)
            uncaptured = self.means.uncaptured or self._network.uncaptured
            self.means = replace(self.means, uncaptured=uncaptured)

    def _source(self) -> Allocate:
        return MEMORIES[self.means.memory](self)

    def settle(self, stream: Any) -> None:
        if not drained(partial(self.driver.idle, stream), self.timeout_s):
            raise BackendError("stream query", "not ready", "a stream does not end")

    # Memory.

    def symmetric(self, nbytes: int) -> Symmetric:
        assert self._allocate is not None
        if self._network is not None and self._network.threaded:
            # PyTorch's rendezvous holds the interpreter lock while it waits for the device.
            self.synchronize()
        if not self.capturing():  # a capture forbids freeing memory
            with self.driver.aside():
                self.graveyard.sweep(self.timeout_s)
        self._serial += 1
        with self.driver.aside():
            return self._allocate(nbytes, self._serial)

    def slot_bytes(self, words: int, nbytes: int) -> int:
        return self._data(words) + nbytes

    def _data(self, words: int) -> int:
        """Offset of the data in the memory of a slot, in bytes."""
        return align((words + SCRATCH) * WORD) if self.means.words == "slot" else 0

    def slot(self, memory: Symmetric, words: int, nbytes: int, captured: bool) -> Slot:
        with self.driver.aside():
            untested = self._writes_reach is None
            slot_words: Words
            if self.means.words == "slot":
                slot_words = SlotWords(memory, words, self.rank)
                constant = MemOp(WRITE_32, slot_words.constant(1), 1)
                self.driver.batch([constant]).enqueue(self.side.handle)
                self.settle(self.side.handle)
            else:
                slot_words = OwnWords(
                    self, self.means.words, words + untested, self._serial, self.means.constants
                )
            if untested:
                # Test a word of no signal: the peer's first call may have begun. Peers may differ.
                self._writes_reach = self.means.kernels or all(
                    self.driver.writes_reach(self.side.handle, slot_words.address(peer, words))
                    for peer in self.hosts.here
                    if peer != self.rank
                )
        state = self._state(slot_words, captured)
        return Slot(memory, words, nbytes, self._data(words), captured, state=state)

    # Signals.

    def _words(self, program: Program) -> Words:
        assert program.slot is not None
        words: Words = program.slot.state.words
        return words

    def _addresses(self, program: Program, signals: Sequence[Signal]) -> list[int]:
        words = self._words(program)
        with self.driver.aside():  # the first use of a peer's word maps it
            return [words.address(signal.waiter, signal.word) for signal in signals]

    def _memops(self, program: Program, step: int, ops: Sequence[MemOp]) -> Op:
        return Memops(program.plan.steps[step].lane, self._batch(ops))

    def wait(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        pairs = zip(self._addresses(program, signals), map(wanted, signals), strict=True)
        return self._memops(program, step, [MemOp(WAIT_32, *pair) for pair in pairs])

    def clear(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        pairs = zip(self._addresses(program, signals), signals, strict=True)
        ops = [MemOp(WRITE_32, at, 1 - wanted(signal)) for at, signal in pairs]
        return self._memops(program, step, ops)

    def post(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        pairs = zip(self._addresses(program, signals), map(wanted, signals), strict=True)
        ops = [MemOp(WRITE_32, *pair) for pair in pairs]
        if self._writes_reach or self.means.kernels:
            return self._memops(program, step, ops)
        sources = [self._words(program).constant(op.value) for op in ops]
        return Memops(program.plan.steps[step].lane, Posts(ops, sources, self.driver))

    # Order.

    def enter(self, program: Program, lane: str) -> Op | None:
        if lane in ("compute0", "sync"):  # execute() orders these lanes
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
            return None  # the sync lane begins after all others
        lane, event = steps[step].lane, self._event(program, step)
        if steps[step].op not in ("copy", "network") or not self.means.writes_before_events:
            return lambda call: event.record(call.state[lane])
        write = self.driver.batch([MemOp(WRITE_32, self._words(program).nobodys, 0)])

        def op(call: Call) -> None:
            write.enqueue(call.state[lane])
            event.record(call.state[lane])

        return op

    def _event(self, program: Program, step: int) -> Event:
        key = "event", step
        if key not in program.state:
            program.state[key] = self.driver.event()
        event: Event = program.state[key]
        return event

    # Copies.

    def batched(self, machine: Machine | None) -> float:
        most, warning = self.driver.batched(machine.batched_copies if machine is not None else 0)
        if warning and self.rank == 0:
            warn_once(warning)
        return most

    def exchanges(self, plan: Plan) -> bool:
        runs = [run for index in range(len(plan.steps)) if (run := exchanged(plan, index))]
        if not runs or not self.driver.fuses or not self._sums_by_kernel:
            return False
        kernels, blocks = self._kernels_or_none, len(plan.steps[runs[0][1]].posts)
        if kernels is None or blocks > kernels.most_that_spin:
            return False
        row_bytes = plan.nbytes(Region("out", self.rank, 0, 1, 0, plan.shape("out")[1]))
        return len(runs[0]) <= MAX_PARTS and row_bytes % 16 == 0

    def _exchange(self, program: Program, steps: Sequence[int], reduction: Reduction) -> Op:
        """The launch of a two-shot (:func:`ficco.plan.parts.exchanged`)."""
        plan, places, kernels = program.plan, buffers_of(program), self._kernels
        lane, views = plan.steps[steps[0]].lane, [places.view(part) for part in reduction.parts]
        result, sends, keeps = places.view(reduction.out), list[Any](), list[Any]()
        for step in (plan.steps[index] for index in steps[1:]):
            move, words = step.work, self._addresses(program, step.posts or step.waits)
            assert isinstance(move, Transfer)
            if move.local:
                keeps.append((places.place(move.src)[0], words[0], places.view(move.dst)))
            else:
                sends.append((places.place(move.dst)[0], words[0]))

        def work(call: Call, signals: Signals) -> None:
            homes = [(come, word, view(call)) for come, word, view in keeps]
            rest = sends, homes, len(words), signals, call.state[lane]
            kernels.two_shot(result(call), [view(call) for view in views], *rest)

        return Launch(work, self._counter(program, lane), self._words(program).own, sums=True)

    def copies(self, program: Program, steps: Sequence[int]) -> Op:
        plan, places = program.plan, buffers_of(program)
        lane = plan.steps[steps[0]].lane
        if isinstance(reduction := plan.steps[steps[0]].work, Reduction):
            return self._exchange(program, steps, reduction)
        transfers = [one for index in steps if isinstance(one := plan.steps[index].work, Transfer)]
        if len(steps) > 1 and transfers[0].mover == "dma":  # columns of one copy go by the kernel
            apart = super().copies(program, steps)
            return copied_together(program, lane, transfers, self.driver, apart)
        targets = [places.place(transfer.dst) for transfer in transfers]
        sources = [places.source(transfer.src) for transfer in transfers]
        width, height = places.size(transfers[0].src)
        kernels, arrived = self._kernels, width and height and self._counter(program, lane)

        def work(call: Call, signals: Signals | None) -> None:
            origins = [source(call) for source in sources]
            ends = tuple([(to, at) for (to, _), (at, _) in zip(targets, origins, strict=True)])
            shape = targets[0][1], origins[0][1], width, height
            kernels.copies(ends, shape, call.state[lane], signals=signals)

        if not arrived:
            return Launch(work, 0, range(0))
        spins = PEER_BLOCKS * len(targets) <= kernels.most_that_spin
        return Launch(work, arrived, self._words(program).own, spins)

    def _counter(self, program: Program, lane: str) -> int:
        """Address of the word that counts the blocks of a lane's launches; 0 if the lane has no
        such word, or if launches carry no signals."""
        if not self.driver.fuses:
            return 0
        return self._words(program).counter(program.plan.lanes.index(lane))

    def copy(self, program: Program, step: int, transfer: Transfer) -> Op:
        if transfer.mover == "kernel":
            return self.copies(program, (step,))
        lane, places = program.plan.steps[step].lane, buffers_of(program)
        if by_copies(program.plan, transfer):
            return self._copy_filled(program, step, transfer)
        if transfer.batch > 1:
            return self._copy_strided(program, step, transfer)
        src, dst = transfer.src, transfer.dst
        width, height = places.size(src)
        to, dst_pitch = places.place(dst)
        source = places.source(src)
        flat = self.driver.copy(to, width * height, (dst.rank, src.rank))
        rectangle = None
        if self.means.rectangles:
            rectangle = self.driver.rectangle(to, dst_pitch, width, height)
        pitched = None if rectangle else self._copy_columns(program, step, transfer, flat)

        def op(call: Call) -> None:
            at, pitch = source(call)
            stream = call.state[lane]
            if (pitch == width == dst_pitch) or height == 1:  # contiguous at both ends
                flat(at, stream)
            elif rectangle:
                rectangle(at, pitch, stream)
            elif pitched:
                pitched(call, at, pitch)

        return op

    def _copy_filled(self, program: Program, step: int, transfer: Transfer) -> Op:
        """Copy the rows that a call has: to a peer by one call of the driver, if it can batch
        copies; within the device by one launch, since such copies are kernels in any case."""
        lane, places = program.plan.steps[step].lane, buffers_of(program)
        src, dst = transfer.src, transfer.dst
        source, target = places.row(src), places.row(dst)
        pitch, _ = places.size(dst)
        rows_of = moves(program.plan, transfer)
        copies = self.driver.copies((dst.rank, src.rank), program.batched)
        if dst.rank == src.rank and self.keeps_made and not pitch % 16:
            kernels = self._kernels_or_none
            copies = kernels.copy_runs if kernels else copies

        def op(call: Call) -> None:
            assert call.filled is not None
            src_rows, dst_rows, rows = rows_of(call.filled)
            if len(rows):
                # If the buffer consists of parts, one part has all of the rows.
                src_row, dst_row = int(src_rows[0]), int(dst_rows[0])
                at = src_rows * pitch + (source(call, src_row) - src_row * pitch)
                to = dst_rows * pitch + (target(call, dst_row) - dst_row * pitch)
                copies(to, at, rows * pitch, call.state[lane])

        return op

    def _copy_strided(self, program: Program, step: int, transfer: Transfer) -> Op:
        """Copy a batch of blocks of contiguous rows, by one 2D copy with a row for each block."""
        lane, places = program.plan.steps[step].lane, buffers_of(program)
        src, dst, count = transfer.src, transfer.dst, transfer.batch
        row, _ = places.size(src)
        (to, pitch), source = places.place(dst), places.source(src)
        down, across, width = transfer.src_stride * row, transfer.dst_stride * row, row * src.rows
        assert pitch == row and not places.cuts_rows(src)
        ranks = dst.rank, src.rank
        if self.means.rectangles:
            rectangle = self.driver.rectangle(to, across, width, count)
            return lambda call: rectangle(source(call)[0], down, call.state[lane])
        copies = [self.driver.copy(to + i * across, width, ranks) for i in range(count)]

        def op(call: Call) -> None:
            at, _ = source(call)
            for i, copy in enumerate(copies):
                copy(at + i * down, call.state[lane])

        return op

    def _copy_columns(
        self, program: Program, step: int, transfer: Transfer, flat: Callable[[int, Any], None]
    ) -> Callable[[Call, int, int], None]:
        """Copy parts of rows if the vendor has no 2D copies: packed into one ``flat`` copy if the
        destination is packed, else by ficco's kernel or row by row."""
        lane, places = program.plan.steps[step].lane, buffers_of(program)
        src, dst = transfer.src, transfer.dst
        ranks = dst.rank, src.rank
        width, height = places.size(src)
        to, dst_pitch = places.place(dst)
        # Compile now: to peers, compilation within a call would look like a late rank.
        cuts = height > 1 and (places.cuts_rows(src) or places.cuts_rows(dst))
        kernels = self._kernels_or_none if cuts else None
        if dst_pitch == width and src.rank == self.rank:
            pack = self._pack(program, lane, src)
            return lambda call, at, pitch: flat(pack(call), call.state[lane])
        if kernels is not None:
            copies = self.copies(program, (step,))
            return lambda call, at, pitch: copies(call)
        rows = [self.driver.copy(to + row * dst_pitch, width, ranks) for row in range(height)]

        def by_row(call: Call, at: int, pitch: int) -> None:
            for row, copy in enumerate(rows):
                copy(at + row * pitch, call.state[lane])

        return by_row

    def _pack(self, program: Program, lane: str, region: Region) -> Callable[[Call], int]:
        """A function that packs columns for the next copy of a lane and returns their address."""
        assert program.slot is not None
        places = buffers_of(program)
        packs: dict[str, tuple[int, torch.Tensor]] = program.slot.state.packs
        view, dtype = places.view(region), places.dtype(region)
        nbytes, kernels = math.prod(places.size(region)), self._kernels_or_none

        def by_torch(packed: torch.Tensor, call: Call) -> None:
            packed.copy_(view(call))

        def pack(call: Call) -> int:
            if lane not in packs or packs[lane][1].numel() < nbytes:
                with self.driver.aside():  # keep the smaller one: it may be in use
                    packs[lane] = self.driver.local(nbytes)
            address, buffer = packs[lane]
            packed = buffer[:nbytes].view(dtype).view(region.rows, region.cols)
            if kernels is not None:
                kernels.place(packed, view(call), call.state[lane])
            else:
                self.driver.on_lane(lane, partial(by_torch, packed))(call)
            return address

        return pack

    @cached_property
    def _kernels(self) -> Kernels:
        with self.driver.aside():
            return self.driver.kernels()

    @cached_property
    def _kernels_or_none(self) -> Kernels | None:
        """ficco's kernels for work that PyTorch can do, too; None if they are not available."""
        try:
            return self._kernels
        except BackendError as error:
            self.driver.forgive()
            warn_once(f"PyTorch's operations are used in place of ficco's kernels: {error}")
        except NotImplementedError:  # a warning has said why
            pass
        return None

    # Products and sums.

    def place(self, program: Program, step: int, transfer: Transfer) -> Op:
        if transfer.function:
            _ = self._kernels_or_none  # load now: no call may load code after its first wait
        if transfer.function == MERGE:
            return self._on_lane(program, step, merge_op(program, step, transfer, self.merge))
        if by_copies(program.plan, transfer):
            return self._copy_filled(program, step, transfer)
        casts = transfer.factors is not None and transfer.src.elements
        kernels = self._kernels_or_none if casts else None
        if kernels is None or transfer.factors is None:
            return self._on_lane(program, step, place_op(program, transfer, self._apply))
        lane, view = program.plan.steps[step].lane, buffers_of(program).view
        src, dst, factors = view(transfer.src), view(transfer.dst), view(transfer.factors)
        return lambda call: kernels.cast(dst(call), factors(call), src(call), call.state[lane])

    def _apply(self, function: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """Apply a function on the current stream; one pass over memory if ficco's kernel serves."""
        kernels = self._kernels_or_none if self.keeps_made else None
        if kernels is not None and gates(function, out, x):
            kernels.gate(function, out, x, self.driver.stream(self.driver.caller()))
        else:
            apply(function, x, out)

    def merge(self, out: torch.Tensor, lse: torch.Tensor | None, parts: Sequence[Part]) -> None:
        """Merge parts of attention on the current stream, by ficco's kernel if available."""
        kernels, stream = self._kernels_or_none, self.driver.stream(self.driver.caller())
        for rows, present in spans(out.shape[2], parts, MAX_PARTS):
            operands = out[:, :, rows], None if lse is None else lse[:, :, rows], present
            if kernels is None or len(present) > MAX_PARTS:
                merge(*operands)
            else:
                kernels.merge(*operands, stream)

    def matmul(self, program: Program, step: int, products: Sequence[Product]) -> Op:
        lane = program.plan.steps[step].lane
        op = matmul_op(program, products, self.driver.add_product, lane)
        return self._on_lane(program, step, op)

    def attend(self, program: Program, step: int, attends: Sequence[Attending]) -> Op:
        return self._on_lane(program, step, attend_op(program, step, attends))

    def apply(self, program: Program, step: int, applied: Applied) -> Op:
        return self._on_lane(program, step, apply_op(program, applied))

    def tiled(self, program: Program, step: int) -> Op:
        tiled, places = program.plan.steps[step], buffers_of(program)
        gates, words = map(partial(self._addresses, program), (tiled.gates, tiled.announces))
        late = self.watched + 2 * MAX_WATCHED * WORD
        op = TiledStep(program.plan, tiled, places, gates, words, late, self.driver)
        program.state.setdefault("before", []).append(op.prepare)
        return op

    def tiled_product(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
    ) -> Callable[[], None]:
        products, work = self.driver.tiled(), Work((a.shape[0],), b.shape[1], a.shape[1])
        late, b_rows = self.watched + 2 * MAX_WATCHED * WORD, b.stride(1) == 1
        types = TileTypes.of(a.dtype)
        with self.driver.aside():
            tiles = products.best(work, types, b_rows)
            product = products.prepare(tiles, types, b_rows, late=late, limit_s=LIMIT_S)
        driver = self.driver
        relaunch = product.launch([a], b, [out], driver.stream(driver.caller()))
        assert relaunch is not None, "operands of a measurement need no copies"
        return lambda: relaunch(driver.stream(driver.caller()))

    def reduce(self, program: Program, step: int, reduction: Reduction) -> Op:
        lane, places = program.plan.steps[step].lane, buffers_of(program)
        views, out = [places.view(part) for part in reduction.parts], reduction.out
        result, factor = places.view(out), program.plan.buffer[out.buffer].factor
        kernels = self._kernels_or_none if self._sums_by_kernel else None

        def parts(call: Call) -> list[torch.Tensor]:
            return [view(call) for view in views]

        if kernels is None or len(views) > MAX_PARTS:
            add = lambda call: add_up(result(call), parts(call), factor)  # noqa: E731
            return self._on_lane(program, step, add)

        def work(call: Call, signals: Signals) -> None:
            kernels.one_shot(result(call), parts(call), signals, call.state[lane])

        at_peers = any(part.rank != self.rank for part in reduction.parts)
        if self.driver.fuses and at_peers and lane == "compute0" and factor == 1:
            arrived, mine = self._counter(program, lane), self._words(program).own
            return Launch(work, arrived, mine, sums=True, reads=True)
        return lambda call: kernels.reduce(result(call), parts(call), call.state[lane], factor)

    def combine(
        self,
        out: torch.Tensor,
        rows: torch.Tensor,
        picked: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> bool:
        kernels = self._kernels_or_none if self.keeps_made else None
        if kernels is None or rows.dtype not in COMBINES or rows.shape[1] * rows.itemsize % 16:
            return False
        stream = self.driver.stream(self.driver.caller())
        kernels.combine(out, rows, picked, weights, stream)
        return True

    def route(
        self, chosen: torch.Tensor, groups: int, capacity: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        kernels = self._kernels_or_none if self.keeps_made else None
        if kernels is None:
            return None
        return kernels.route(chosen, groups, capacity, self.driver.stream(self.driver.caller()))

    #: Whether ficco's kernel sums parts, if available.
    _sums_by_kernel = True

    def collective(self, program: Program, step: int) -> Op:
        return self._on_lane(program, step, super().collective(program, step))

    def cross(self, program: Program, step: int) -> Op:
        assert self._network is not None
        program.state["network"] = True
        return self._network.op(program, step)

    def _on_lane(self, program: Program, step: int, op: Op) -> Op:
        return self.driver.on_lane(program.plan.steps[step].lane, op)

    # Running.

    def execute(self, program: Program, call: Call) -> None:
        if torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self.execute(program, call)
        GATE.inside.append(None)  # `with GATE` would add two calls
        try:
            if GATE.shut:
                GATE.wait()
            GATE.passed += 1
            self._execute(program, call)
        finally:
            GATE.inside.pop()

    @contextlib.contextmanager
    def around(self, program: Program, call: Call) -> Iterator[None]:
        slot = program.slot
        with GATE:  # until the whole call is enqueued
            with self._on_device():
                run, raw = self._enter(program, call)
                flight = self._begin(program, call, raw)
                try:
                    enqueue_first(run, call)
                except BaseException:
                    self._abort(run, call, slot, flight)
                    raise
            try:
                yield
            finally:  # also after an error: peers wait for rows, and for the slot
                with self._on_device():
                    self._carry_out(run, call, slot, flight, enqueue_rest)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def words(self, program: Program, call: Call) -> torch.Tensor:
        step = next(step for step in program.plan.steps if step.op == "call")
        if program.slot is None or not step.gates:
            return torch.zeros(0, dtype=torch.int32, device=self.device)
        words, first = self._words(program), step.gates[0].word
        memory = program.slot.memory
        assert isinstance(words, SlotWords) and memory is not None
        span = memory.tensor[first * WORD : (first + len(step.gates)) * WORD]
        return span.view(torch.int32)

    def await_rows(self, program: Program, call: Call, gate: int) -> None:
        waits: dict[int, Batch] = program.state.setdefault("await rows", {})
        if gate not in waits:
            step = next(step for step in program.plan.steps if step.op == "call")
            at = self._addresses(program, step.gates[gate : gate + 1])
            waits[gate] = self._batch([MemOp(WAIT_32, at[0], wanted(step.gates[gate]))])
        waits[gate].enqueue(self.driver.stream(self.driver.caller()))

    def _execute(self, program: Program, call: Call, in_turn: bool = False) -> None:
        """Enqueue a call. Most calls take none of the methods below, which saves their host time.
        ``in_turn``: the launches of tiled products have their turn."""
        known, raw = program.state, self.driver.caller()
        call.state = self._lanes.get((raw, False))
        if call.state is None or "flights" not in known:
            self._enter(program, call)
        run, slot, flights = known["run"], program.slot, known.get("flights")
        if run.before and not in_turn:
            for prepare in run.before:
                prepare(call)
            turn = order(self.driver)
            with turn.lock:
                turn.begin(raw)
                return self._execute(program, call, in_turn=True)
        if flights is None or slot is None:
            return self._carry_out(run, call, slot, self._begin(program, call, raw), enqueue)
        end, state, recording = call.state["compute0"], slot.state, None
        if run.recordable and self.replays and self.replayed.possible and call.filled is None:
            recording = self.replayed.find(program, call, raw)
        if slot.words and state.retired is not None:
            state.retired.hold(end)
        flight = flights.begin(program.number, raw, end)
        try:
            if recording is not None and run.parts is None:
                recording.replay(end)
            elif recording is not None:
                enqueue_beside(recording, run.parts[1], call)
            elif run.lanes:
                enqueue(run, call)
            else:
                for op in run.body:
                    op(call)
            if run.tail:
                end = self._hand_on(run, call, state)
            flight.after.record(end)
            state.retired, flight.whole = flight.after, True
        except BaseException:
            self._abort(run, call, slot, flight)
            raise

    def _enter(self, program: Program, call: Call) -> tuple[Run, int]:
        """Prepare the lanes of a call; return its program and the caller's raw stream."""
        slot = program.slot
        key = self.driver.caller(), bool(slot and slot.captured)
        lanes = self._lanes.get(key)
        if lanes is None:
            with self.driver.aside():
                caller = self.driver.stream(key[0])
                streams = self._streams.setdefault(key[0] * key[1], {})
                lanes = self._lanes[key] = Lanes(self.driver, caller, streams, "captured" * key[1])
        call.state = lanes
        return program.state.get("run") or self._run(program), key[0]

    def _carry_out(
        self, run: Run, call: Call, slot: Slot | None, flight: Flight | None, body: Body
    ) -> None:
        """Enqueue the body or the rest of it, the tail and the end. A capture joins all streams."""
        if slot is None:
            return body(run, call)
        state, stream = slot.state, call.state["compute0"]
        try:
            body(run, call)
            end = self._hand_on(run, call, state) if run.tail else stream
            if flight is not None:
                flight.after.record(end)
                state.retired, flight.whole = flight.after, True
                return
            state.retired = state.done
            state.done.record(end)
            if slot.captured and slot.words:
                state.done.hold(stream)
            elif slot.captured:  # only the watchdog needs the end
                self.driver.join_aside(state.done, stream)
        except BaseException:
            self._abort(run, call, slot, flight)
            raise

    def _hand_on(self, run: Run, call: Call, state: SlotState) -> Any:
        """Enqueue the tail of a call after its body, and return the stream of the tail."""
        stream, end = call.state["compute0"], call.state[run.tail_lane]
        state.over.record(stream)
        state.over.hold(end)
        for op in run.tail:
            op(call)
        return end

    def _run(self, program: Program) -> Run:
        """Prepare a program for :meth:`execute`, once."""
        ops, begin, slot = list(program.ops), None, program.slot
        if slot is not None and isinstance(watch := slot.state.watch, Watch):
            begin = self._batch([watch.begin(slot.number(program))])
            ops.append(("sync", Memops("sync", self._batch([watch.end()]))))
        elif slot is not None:
            slot.number(program)
            program.state["flights"] = slot.state.watch
        ops = joined(ops, self._batch) if self.driver.fuses else ops
        own = [(lane, op) for lane, op in ops if lane != "sync"]
        body = [op for _, op in own]
        tail = [op for lane, op in ops if lane == "sync"]
        lanes = tuple(lane for lane in program.plan.lanes if lane not in ("compute0", "sync"))
        tail_lane = "sync"
        if "base" in program.state:
            base = program.state["base"]
            body.insert(0, lambda call: base.record(call.state["compute0"]))
        elif self.driver.fuses and tail and body and not lanes and program.plan.words:
            kernels = self._kernels_or_none
            if kernels is not None:
                folded = by_launches(body, begin, tail, kernels, self._words(program).own)
                if folded is not None:
                    (body, tail), begin, tail_lane = folded, None, "compute0"
        before = tuple(program.state.get("before", ()))
        parts = parted(own, program.plan.steps) if before else None
        alone = {"base", "network"}.isdisjoint(program.state) and bool(parts or not before)
        recordable = alone and bool(program.plan.words) and slot is not None and not slot.captured
        run = Run(body, begin, tail, tail_lane, lanes, before, parts, recordable)
        program.state["run"] = run
        return run

    def stamp(self, program: Program, step: int, end: bool) -> Op:
        if "base" not in program.state:
            program.state["base"] = self.driver.event(timing=True)
        event = program.state["stamp", step, end] = self.driver.event(timing=True)
        lane = program.plan.steps[step].lane
        return lambda call: event.record(call.state[lane])

    def spans(self, program: Program, call: Call) -> list[Span]:
        self.synchronize()
        base = program.state["base"]

        def seconds(index: int, end: bool) -> float:
            return float(base.seconds_to(program.state["stamp", index, end]))

        return [
            Span(index, step.lane, seconds(index, False), seconds(index, True))
            for index, step in enumerate(program.plan.steps)
        ]

    def capturing(self) -> int:
        number = self.driver.capturing()
        if number and self.means.uncaptured:
            raise NotImplementedError(self.means.uncaptured)
        return number

    def synchronize(self) -> None:
        with GATE.waiting():
            self.driver.synchronize()

    # Capabilities and closing.

    def capabilities(self) -> Capabilities:
        means = self.means
        post = {
            None: f"not known before the first call: a {means.post} to the {means.place} where it "
            "reaches, else a 4-byte copy",
            True: f"{means.post} to the {means.place}",
            False: f"4-byte copy to the {means.place}",
        }[self._writes_reach]
        if means.kernels:
            post = f"a kernel of ficco's that writes to the {means.place}"
        return Capabilities(
            engine=self.name,
            post=post + (" (asked for)" if self._signals != "auto" else ""),
            wait=means.wait,
            copy=means.copy,
            movers=("dma", "kernel") if self.driver.has_kernels else ("dma",),
            products=self.driver.products(),
            accumulate="float32 sums of m x n by " + accumulation(),
            capture=not means.uncaptured,
            partial_signals=not self.driver.untiled,
            tiles=not self.driver.untiled,
            scaled=True,
            functions=PLACED,
            network=self._network.name if self._network is not None else "",
        )

    def unscaled(self, problem: Problem) -> str:
        return self.driver.unscaled(problem) if problem.scaling else ""

    def wordless(self) -> str:
        if self.means.words == "slot":
            return super().wordless()
        return f"the {self.name} engine has no words where kernels can wait; gather by a collective"

    def untiled(self, problem: Problem, schedule: Schedule) -> str:
        if why := self.driver.untiled:
            return why
        cut = schedule.pieces or self.world
        gates = (cut if isinstance(cut, int) else len(cut)) * (self.world - 1) + schedule.tail - 1
        if gates > MAX_GATES:
            return f"a product waits for at most {MAX_GATES} pieces, got {gates}"
        spec = problem.given.specification
        types = types_of((*spec.operands[:2], spec.results[0]), problem.scaling)
        return self.driver.tiled().serves(types, TILED_PRODUCTS, problem.n, problem.k)

    def copy_engines(self) -> int | None:
        return self.driver.copy_engines()

    def close(self) -> None:
        with GATE.closed():
            open_engines.discard(self)
        errors: list[BackendError] = []

        def attempt(step: Callable[[], Any]) -> Any:
            """Run a step of closing; an error does not keep the later steps from running."""
            try:
                return step()
            except BackendError as error:
                errors.append(error)

        with contextlib.ExitStack() as stack:
            attempt(lambda: stack.enter_context(self.driver.aside()))
            dead, end = self.graveyard.dead, time.monotonic() + CLOSE_S
            dead += [memory for memory in self.graveyard.living if memory not in dead]
            streams = [stream.handle for stream in self.driver.streams]
            # After an error streams may wait for peers that never post.
            while (self.driver.waits_to_close or dead) and time.monotonic() < end:
                if attempt(lambda: all(map(self.driver.idle, streams))) is not False:
                    break
                attempt(self._satisfy)
                time.sleep(1e-3)
            while any(memory.awaited() for memory in dead) and time.monotonic() < end:
                attempt(self.graveyard.sweep)
                time.sleep(1e-3)
            if self._network is not None:
                attempt(self._network.close)
                self._network = None
            self.graveyard.leave()
            self._allocate = None
            self._lanes.clear()
            self.replayed.close()
            for streams_of in self._streams.values():
                streams_of.clear()
            attempt(self.driver.close)
        if errors:
            raise errors[0]
