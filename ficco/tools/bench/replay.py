"""One rank of a group on one GPU, without peers: rows of peers arrive when a described link would
deliver them.

The GPU engine runs the rank's Plans with real products, streams and signals. A *courier* on a
separate stream plays the peers: :func:`arrivals` simulates all ranks on a Machine, and the courier
writes this rank's signal words at the simulated times. A copy engine is the courier's clock: before
each word, a row of copies from the host takes the time until the word is due; writes of an unused
word take a time that is shorter than a copy. The courier uses no SM and no thread of the host. The
rank's own copies to and from peers become copies to the host that take as long as the link would.

To prove results right, :func:`brought` carries out the Plans of all ranks, and the courier copies
the rows of the peers, without a schedule in time.

The replay leaves out the traffic of the link (the host's bus carries a tenth of the bytes), cold
caches, and peers that are late because of this rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import ficco
from ficco.accelerator import gpu
from ficco.compute.buffers import Buffers, buffers_of
from ficco.compute.program import Call, Op, Program, Slot, Symmetric
from ficco.compute.scaled import dequantized
from ficco.dma import engine_name, make_engine
from ficco.dma.driver import WAIT_32, WORD, WRITE_32, Batch, Driver, Event, MemOp
from ficco.dma.engine import Capabilities
from ficco.dma.gpu import GpuEngine, wanted
from ficco.dma.memories import Allocate, Words, align
from ficco.dma.patience import limit_of
from ficco.heuristics.families import crossing, family_of, last_arrival
from ficco.machine import Fingerprint, Machine, find, nearest, save
from ficco.ops.operands import Scales, plain_scales
from ficco.options import current
from ficco.plan import Plan, Reduction, Region, Signal, Step, Transfer
from ficco.problems.products import Problem
from ficco.problems.specification import AnyProblem
from ficco.runtime.board import Board
from ficco.runtime.workspace import SLOTS, Workspace, adopt, workspace_of
from ficco.schedules import Schedule
from ficco.simulate.events import Simulation
from ficco.tools.bench.cases import Replayed
from ficco.tools.bench.inputs import Draw, Operands, draw_normal
from ficco.tools.bench.measure import HOST_ROWS, DeviceClock, Item, Runner, Stopwatch

#: Bytes of the buffers that the courier copies between; longer copies are several.
ROOM = 64 << 20
#: Least seconds of a courier's copy, and most copies of a call, which is the capacity of a stream.
#: On an H100 5 us are 64 KiB, and the row's time deviates by 1.5 %. The bus is idle between two
#: copies. Longer copies keep the bus busy and delay the GPU's commands: kernels of 45 us begin 0.2
#: us later during copies of 64 KiB, 1.1 us later during 512 KiB, and 1.4 us later during one large
#: copy. Single words at a distance of 64 bytes deviate by 3 %, and take a quarter longer during
#: copies to the host (2026-11-27, by a program that is not part of the project).
TICK, TICKS = 5e-6, 400
#: Bytes of a copy that is to take no time.
LEAST_BYTES = WORD
#: Bytes of the words that this rank posts to one peer.
PEER_WORDS = 1 << 20
#: To measure paces: numbers of writes, number of copies, sizes of copies; pieces of a row, and rows
#: of each kind.
PACE_WRITES, PACE_COPIES, PACE_BYTES = (0, 8, 32), 8, (64 << 10, 256 << 10, 1 << 20, 2 << 20)
PACE_PIECES, PACE_ROWS = 8, 9
#: Weight of the latest call in the courier's delays.
LEARNS = 0.5

#: Rows that copies bring to a rank.
Images = Mapping[Transfer, torch.Tensor]


# Deliveries of a link, and their times.


class Arrival(NamedTuple):
    """One signal of a peer. ``at``: seconds after the start of the call. ``transfers``: the copies
    that it announces; the copy of factors, too, for float8."""

    at: float
    signal: Signal
    transfers: tuple[Transfer, ...] = ()


def plans_of(plan: Plan, packs_columns: bool = False) -> tuple[Plan, ...]:
    """The Plans of all ranks of a call, from one rank's Plan.

    Raises:
        NotImplementedError: its staging is capped.
    """
    if plan.stages:
        raise _without_peers("staging in turns")
    return _plans(plan.problem, plan.schedule, packs_columns)


@lru_cache(maxsize=16)
def _plans(problem: AnyProblem, schedule: str, packs_columns: bool) -> tuple[Plan, ...]:
    family = family_of(problem)
    return tuple(family.plans(problem, Schedule.parse(schedule), packs_columns=packs_columns))


def arrivals(every: Sequence[Plan], machine: Machine, mode: str, rank: int) -> list[Arrival]:
    """Signals that peers post to a rank, in order of arrival.

    Args:
        every: the Plans of all ranks; ``mode``: as :func:`ficco.simulate.simulate`.
    """
    simulation = Simulation(every, machine, mode)
    simulation.run()
    coming = []
    for one in simulation.ranks:
        untold: dict[str, list[Transfer]] = {}  # by lane, since its last signal
        for step in one.plan.steps if one.number != rank else ():
            if (transfer := _to(rank, step)) is not None:
                untold.setdefault(step.lane, []).append(transfer)
            for signal in step.posts:
                if signal.waiter == rank and not signal.released:
                    transfers = tuple(untold.pop(step.lane, ()))
                    coming.append(Arrival(simulation.known[rank, signal.word], signal, transfers))
    return sorted(coming, key=lambda arrival: arrival.at)


def _to(rank: int, step: Step) -> Transfer | None:
    return move if (move := step.copy) and move.dst.rank == rank else None


def brought(
    every: Sequence[Plan],
    machine: Machine,
    operands: Sequence[Mapping[str, torch.Tensor]],
    rank: int,
) -> dict[Transfer, torch.Tensor]:
    """Rows that copies bring to a rank. All steps of all ranks are carried out one by one, in the
    order of their simulated ends.

    ``operands``: the tensors ``a`` and ``b`` of every rank, and the factors of float8 operands, as
    the buffers of its Plan.
    """
    memory = {(name, r): tensor for r, own in enumerate(operands) for name, tensor in own.items()}
    for plan in every:
        for buffer in plan.buffers:
            if (buffer.name, plan.rank) not in memory:
                shape, dtype = buffer.shapes[plan.rank], getattr(torch, buffer.dtype)
                like = operands[plan.rank]["a"]
                memory[buffer.name, plan.rank] = like.new_empty(shape, dtype=dtype)
    images: dict[Transfer, torch.Tensor] = {}
    ran = Simulation(every, machine, "queued").run()
    timed = [(stop, r, step) for r, steps in enumerate(ran) for step, _, stop in steps]
    for _, _, step in sorted(timed, key=lambda one: one[:2]):  # after the steps it waits for
        _carry_out(step, memory)
        if (transfer := _to(rank, step)) is not None:
            images[transfer] = _part(memory, transfer.src).clone()
    return images


def _part(
    memory: Mapping[tuple[str, int], torch.Tensor], region: Region, down: int = 0
) -> torch.Tensor:
    """A region, or the region ``down`` rows below it."""
    rows, cols = slice(region.row + down, region.row_stop + down), slice(*region[4:])
    return memory[region.buffer, region.rank][rows, cols]


def _carry_out(step: Step, memory: Mapping[tuple[str, int], torch.Tensor]) -> None:
    if isinstance(work := step.work, Transfer):
        _part(memory, work.dst).copy_(_part(memory, work.src))
    for product, i in ((one, i) for one in step.products for i in range(one.batch)):
        a, out = _part(memory, product.a, i * product.a_stride), product.out
        b = _part(memory, product.b)
        if product.factors:
            of_a, of_b = product.factors
            a = dequantized(a, _part(memory, of_a, i * product.factor_stride))
            b = dequantized(b, _part(memory, of_b))
        total = (a.t() if product.transposed else a) @ b
        target = _part(memory, out, i * product.out_stride)
        if product.accumulate or product.addend is not None:
            total = total + (target if (to := product.addend) is None else _part(memory, to))
        target.copy_(total)
    if isinstance(work, Reduction):
        parts = [_part(memory, part).float() for part in work.parts]
        _part(memory, work.out).copy_(torch.stack(parts).sum(0))


# The engine.


class LocalMapped(Symmetric):
    """Symmetric memory with only this rank's part, and the words of its peers' parts."""

    def __init__(self, engine: GpuEngine, nbytes: int, serial: int) -> None:
        self._driver, self.serial, self.nbytes = engine.driver, serial, (nbytes := align(nbytes))
        span = min(nbytes, PEER_WORDS)
        with torch.inference_mode(False):  # calls of other modes use it, too
            self.tensor = torch.zeros(nbytes, dtype=torch.uint8, device=engine.device)
            self.peers = torch.zeros(engine.world, span, dtype=torch.uint8, device=engine.device)
        engine.driver.synchronize()
        self.addresses = [peer.data_ptr() for peer in self.peers]
        self.addresses[engine.rank] = self.tensor.data_ptr()

    def part(self, rank: int) -> torch.Tensor:
        raise NotImplementedError("a replay has no memory of peers to read by kernels")

    def free(self) -> None:
        driver = self._driver
        if not all(driver.idle(stream.handle) for stream in driver.streams):
            _stuck.append((self.tensor, self.peers))  # of a call that was broken off
        self.tensor = self.peers = torch.empty(0, dtype=torch.uint8)


#: Memory that streams may still write to.
_stuck: list[tuple[torch.Tensor, torch.Tensor]] = []


class ReplayEngine(GpuEngine):
    """The GPU engine of a rank whose peers are played.

    Attributes:
        courier: plays the peers; to be set before the first call.
        images: rows that copies bring to this rank; None if copies only take their time.
        latest: the program of the latest call.
    """

    courier: ReplayPeers

    def __init__(self, *arguments: Any) -> None:
        self.images: Images | None = None
        self.latest: Program | None = None
        self._turns: deque[Slot] = deque(maxlen=SLOTS)
        super().__init__(*arguments)

    def _source(self) -> Allocate:
        return partial(LocalMapped, self)

    def capabilities(self) -> Capabilities:
        played = "copies to and from the host that take as long as the link would"
        return replace(super().capabilities(), movers=("dma",), copy=played)

    def copy(self, program: Program, step: int, transfer: Transfer) -> Op:
        lane, arrives = program.plan.steps[step].lane, transfer.dst.rank == self.rank
        seconds = crossing(self.courier.machine, program.plan.moved_bytes(transfer))
        passes, places = self.courier.crossing(seconds), buffers_of(program)

        def op(call: Call) -> None:
            if self.images is None:
                passes(call.state[lane])
            elif arrives:
                bring(self.driver, places, transfer, self.images, call.state[lane])

        return op

    def copies(self, program: Program, steps: Sequence[int]) -> Op:
        raise _without_peers("mover 'kernel'")

    def refuses(self, problem: Problem, schedule: Schedule) -> str:
        if schedule.mover == "collective":
            return str(_without_peers("the collective of the group's library"))
        return super().refuses(problem, schedule)

    def reduce(self, program: Program, step: int, reduction: Reduction) -> Op:
        if any(part.rank != self.rank for part in reduction.parts):
            raise _without_peers("sums in peers' memory")
        return super().reduce(program, step, reduction)

    def execute(self, program: Program, call: Call) -> None:
        if program.slot is not None and program.plan.words:
            self.courier.accompany(program)
            self._turns.append(program.slot)
            self.latest = program
        super().execute(program, call)

    @property
    def next_slot(self) -> Slot | None:
        """The slot of the next call, once calls have taken all by turns."""
        return self._turns[0] if len(self._turns) == SLOTS else None


def _without_peers(need: str) -> NotImplementedError:
    return NotImplementedError(f"a replay has no peers for {need}; take another schedule")


def _dense(places: Buffers, region: Region) -> bool:
    """Whether the rows of a region lie one right after the other."""
    return region.rows == 1 or places.place(region)[1] == places.size(region)[0]


def portable(places: Buffers, images: Images) -> Images:
    """Images in pinned host memory, for rows that land densely. A copy within the device may be a
    kernel, which cannot run while a waiting product holds all processors."""
    return {
        transfer: torch.empty_like(image, device="cpu", pin_memory=image.is_cuda).copy_(image)
        if _dense(places, transfer.dst)
        else image
        for transfer, image in images.items()
    }


def bring(driver: Driver, places: Buffers, transfer: Transfer, images: Images, stream: Any) -> None:
    """Copy the rows of a transfer from their image to where they land."""
    region, image = transfer.dst, images[transfer]
    if not region.elements:
        return
    to, pitch = places.place(region)
    width, height = places.size(region)
    if _dense(places, region):
        driver.copy_from_host(to, image.data_ptr(), width * height, stream)
    else:
        driver.rectangle(to, pitch, width, height)(image.data_ptr(), width, stream)


# The courier.


@lru_cache(maxsize=1)
def _rooms(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of the host and of the device that couriers copy between."""
    size, kind = (ROOM,), torch.uint8
    pinned = torch.empty(size, dtype=kind, pin_memory=device.type == "cuda")
    return pinned, torch.empty(size, dtype=kind, device=device)


@dataclass(frozen=True)
class Pace:
    """How copies between host and device follow each other on a stream: one of s bytes takes
    ``start + s / rate`` seconds."""

    start: float
    rate: float

    def nbytes(self, seconds: float) -> int:
        """Bytes of a copy that takes ``seconds``; at least the shortest copy."""
        return max(int((seconds - self.start) * self.rate) // WORD * WORD, LEAST_BYTES)

    @classmethod
    def fitted(cls, sizes: Sequence[int], seconds: Sequence[float]) -> Pace:
        """Fit the pace of copies to measured seconds, by relative errors."""
        slope, start = np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds))
        return cls(max(float(start), 0.0), 1 / float(slope))


@dataclass(frozen=True)
class Paces:
    """Seconds of operations on a stream.

    Attributes:
        word: seconds of the write of a signal word, and of a stamp after it.
        write: of one more write.
        copies: of copies from the host, one after the other.
        own: single copies to the host, each followed by the write of a word and a stamp, during
            copies from the host.
        tick: least seconds of a courier's copy.
    """

    word: float = 0.0
    write: float = 1.0
    copies: Pace = Pace(0.0, 1.0)
    own: Pace = Pace(0.0, 1.0)
    tick: float = TICK


class Piece(NamedTuple):
    """The courier's work for some arrivals: copies or writes that end ``at`` seconds after the
    start, then the writes of their words, then a time stamp."""

    at: float
    arrivals: tuple[Arrival, ...]
    words: Batch
    stamp: Event


@dataclass
class Timetable:
    """The courier's work in one call: take over this rank's slot, hand on the slots of the peers,
    wait for the start, then do the pieces in order.

    Attributes:
        tick: seconds of its copies, at least.
        delays: of each piece, seconds beyond the time of its copies or writes on an idle device:
            latency of the start, and contention. Learnt from calls of all timetables that share the
            list.
    """

    opening: Batch
    pieces: tuple[Piece, ...]
    tick: float
    delays: list[float]

    def durations(self) -> list[float]:
        """Seconds of the copies or writes of each piece. No piece is early. A piece of no copies
        still takes the time of its word."""
        now, durations = 0.0, []
        for piece, delay in zip(self.pieces, self.delays, strict=True):
            durations.append(max(piece.at - now - delay, 0.0))
            now += durations[-1] + delay
        return durations

    def learn(self, begun: Event) -> None:
        """Learn the delays from the latest call, which has ended."""
        before = 0.0
        for index, duration in enumerate(self.durations()):
            after = begun.seconds_to(self.pieces[index].stamp)
            self.delays[index] += LEARNS * (after - before - duration - self.delays[index])
            before = after


class ReplayPeers:
    """Plays the peers of one rank.

    Attributes:
        machine: determines when peers post.
        paces: of operations on streams.
        mode: ``"queued"`` or ``"idle"``, of the calls from now on.
    """

    def __init__(self, engine: ReplayEngine, machine: Machine, paces: Paces | None = None) -> None:
        driver = engine.driver
        self.engine, self.machine, self.paces = engine, machine, paces or Paces()
        self.mode = "queued"
        self.stream = driver.stream_for("courier").handle
        self._host, self._room = (room.data_ptr() for room in _rooms(engine.device))
        self._words = torch.zeros(2, dtype=torch.int32, device=engine.device)
        driver.synchronize()
        self._flag, self._nobodys = (self._words.data_ptr() + i * WORD for i in range(2))
        self._go = driver.batch([MemOp(WRITE_32, self._flag, 1)])
        self._begun = driver.event(timing=True)
        self._played: Timetable | None = None
        self._delays: dict[tuple[AnyProblem, str, str], list[float]] = {}
        self._prepared: Program | None = None
        self._gone = False

    # Around a call.

    def prepare(self, program: Program | None) -> None:
        """Enqueue the courier's work for the next call, a call of ``program``; it waits for
        :meth:`go`."""
        self._played, self._prepared, self._gone = None, program, False
        if program is not None:
            self._enqueue(self.timetable(program), buffers_of(program))

    def go(self) -> None:
        """Start the peers at the next operation of the caller's stream: the latest call's Plan,
        unless they were started before."""
        self._gone, driver = True, self.engine.driver
        caller = driver.stream(driver.caller())
        self._go.enqueue(caller)
        self._begun.record(caller)

    def accompany(self, program: Program) -> None:
        """Prepare for a call of a program that is enqueued next."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            self.prepare(program)
            self._prepared = None
        elif prepared is not program:
            raise RuntimeError(f"the courier was prepared for {prepared.plan.schedule}")
        if not self._gone:
            self.go()

    def errors(self) -> list[float]:
        """Delays in seconds of the words of the latest call, which has ended, against the plan; in
        the order of the plan."""
        pieces = self._played.pieces if self._played else ()
        return [
            self._begun.seconds_to(piece.stamp) - arrival.at
            for piece in pieces
            for arrival in piece.arrivals
        ]

    def learn(self) -> None:
        """Correct the next call of the latest call's kind by the delays of the latest call, which
        has ended."""
        if self._played is not None:
            self._played.learn(self._begun)

    def _enqueue(self, timetable: Timetable, places: Buffers | None) -> None:
        """Enqueue the pieces: copies of real rows to ``places``, or copies that take as long."""
        images, stream = self.engine.images, self.stream
        timetable.opening.enqueue(stream)
        for piece, seconds in zip(timetable.pieces, timetable.durations(), strict=True):
            if images is None or places is None:
                self.passage(seconds, timetable.tick)(stream)
            else:
                for arrival in piece.arrivals:
                    for transfer in arrival.transfers:
                        bring(self.engine.driver, places, transfer, images, stream)
            piece.words.enqueue(stream)
            piece.stamp.record(stream)
        self._played = timetable

    # Timetables.

    def timetable(self, program: Program) -> Any:
        """The timetable of a program's calls in the current mode."""
        key = "courier", self.mode
        if key not in program.state:
            new = program.state[key] = self._timetable(program)
            kind = program.plan.problem, program.plan.schedule, self.mode
            new.delays = self._delays.setdefault(kind, new.delays)  # of both slots
        return program.state[key]

    def _timetable(self, program: Program) -> Timetable:
        """A new timetable, from a simulation of the Plans of all ranks."""
        engine, plan = self.engine, program.plan
        every = plans_of(plan, engine.packs_columns)
        coming = arrivals(every, self.machine, self.mode, engine.rank)
        assert program.slot is not None
        words: Words = program.slot.state.words
        me, peers = engine.rank, [peer for peer in range(engine.world) if peer != engine.rank]
        handed_over = [words.address(peer, me) for peer in peers]
        opening = [
            *(MemOp(WAIT_32, at, 0) for at in handed_over),
            *(MemOp(WRITE_32, at, 1) for at in handed_over),
            *(MemOp(WRITE_32, words.address(me, peer), 0) for peer in peers),
            *(MemOp(WAIT_32, self._flag, 1), MemOp(WRITE_32, self._flag, 0)),  # the start
        ]
        pieces = tuple(self._pieces(coming, words))
        tick = max(self.paces.tick, pieces[-1].at / TICKS if pieces else 0.0)
        return Timetable(engine.driver.batch(opening), pieces, tick, [0.0] * len(pieces))

    def _pieces(self, coming: Sequence[Arrival], words: Words) -> list[Piece]:
        """Pieces of the arrivals. Arrivals that follow each other faster than the writes of words
        share a piece."""
        driver, now, left, pieces = self.engine.driver, 0.0, deque(coming), []
        while left:
            at = max(left[0].at, now + self.paces.word)
            together = []
            while left and left[0].at <= at:
                together.append(left.popleft())
            posts = [
                MemOp(WRITE_32, words.address(one.waiter, one.word), wanted(one))
                for one in (arrival.signal for arrival in together)
            ]
            stamp = driver.event(timing=True)
            pieces.append(Piece(at, tuple(together), driver.batch(posts), stamp))
            now = at
        return pieces

    # Time.

    def passage(self, seconds: float, tick: float) -> Callable[[Any], None]:
        """A function that enqueues work of ``seconds``, including a signal word: copies from the
        host of at least a tick each, or writes."""
        left = seconds - self.paces.word
        if count := int(max(left, 0.0) / tick):
            return self._ticks(count, self.paces.copies.nbytes(left / count))
        return self._writes(int(max(left, 0.0) / self.paces.write))

    def crossing(self, seconds: float) -> Callable[[Any], None]:
        """A function that enqueues a copy of the rank itself of ``seconds``, including a signal
        word."""
        return self._outward(self.paces.own.nbytes(seconds))

    def _writes(self, count: int) -> Callable[[Any], None]:
        nobody = [MemOp(WRITE_32, self._nobodys, 0)] * count
        return self.engine.driver.batch(nobody).enqueue if nobody else lambda stream: None

    def _ticks(self, count: int, nbytes: int) -> Callable[[Any], None]:
        driver, size = self.engine.driver, min(nbytes, ROOM)

        def copy(stream: Any) -> None:
            for _ in range(count):
                driver.copy_from_host(self._room, self._host, size, stream)

        return copy

    def _outward(self, nbytes: int) -> Callable[[Any], None]:
        driver = self.engine.driver
        sizes = [ROOM] * (nbytes // ROOM) + [nbytes % ROOM] * (nbytes % ROOM > 0)

        def copy(stream: Any) -> None:
            for size in sizes:
                driver.copy_to_host(self._host, self._room, size, stream)

        return copy

    def measure(self) -> Paces:
        """Measure the paces on an otherwise idle device."""
        words = [self._row(self._writes(count)) for count in PACE_WRITES]
        write, word = np.polyfit(PACE_WRITES, words, 1)
        rows = [self._row(self._ticks(PACE_COPIES, nbytes)) for nbytes in PACE_BYTES]
        copies = Pace.fitted(PACE_BYTES, [(row - float(word)) / PACE_COPIES for row in rows])
        beside = self._ticks(TICKS, copies.nbytes(TICK))
        out = [self._row(self._outward(nbytes), beside) for nbytes in PACE_BYTES]
        self.paces = Paces(float(word), float(write), copies, Pace.fitted(PACE_BYTES, out))
        return self.paces

    def _row(
        self, passes: Callable[[Any], None], beside: Callable[[Any], None] | None = None
    ) -> float:
        """Seconds of a piece in a row of pieces: operations of ``passes``, a word and a stamp."""
        driver, taken = self.engine.driver, []
        begin = driver.batch([MemOp(WAIT_32, self._flag, 1), MemOp(WRITE_32, self._flag, 0)])
        word = driver.batch([MemOp(WRITE_32, self._nobodys, 0)])
        stamps = [driver.event(timing=True) for _ in range(PACE_PIECES + 1)]
        for _ in range(PACE_ROWS):
            begin.enqueue(self.stream)
            for stamp in stamps:
                passes(self.stream)
                word.enqueue(self.stream)
                stamp.record(self.stream)
            if beside is not None:
                beside(self.engine.side.handle)
            self.go()
            driver.synchronize()
            taken.append(stamps[0].seconds_to(stamps[-1]) / PACE_PIECES)
        return median(taken)


# The bench.


#: Name of the last arrival in rows; it is no call.
ARRIVALS = "copies"

#: Seconds that a call may wait for the courier.
TIMEOUT_S = 20.0

LIMITS = (
    "copies between host and GPU stand in for the link's traffic, nothing cools the caches, and "
    "peers are as a simulation has them, whatever this rank does"
)


def replayed_watch(settings: Replayed, csv: Path, device: torch.device) -> ReplayWatch:
    """A stopwatch of one rank, in a process group of one. ``auto`` decides by the stopwatch's
    machine, which is saved next to the CSV file."""
    ficco.set_options(on_timeout="raise", timeout_s=TIMEOUT_S)
    watch = ReplayWatch(settings, device)
    path = csv.with_name(f"{csv.stem}_machine.yaml").absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    save(watch.machine, path)
    ficco.set_options(machine=str(path))
    return watch


class ReplayOperands(Operands):
    """The operands of the replayed rank, and of its peers until random data are drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = range(self.problem.world)
        self.peers = {r: Operands(self.problem, r, self.device) for r in ranks if r != self.rank}

    def exact_b(self) -> None:
        super().exact_b()
        for peer in self.peers.values():
            peer.exact_b()

    def random(self, seed: int) -> None:
        self.peers.clear()
        super().random(seed)

    def _fill(self, iteration: int, draw: Draw, draw_factors: Draw) -> None:
        super()._fill(iteration, draw, draw_factors)
        for peer in self.peers.values():
            peer._fill(iteration, draw, draw_factors)


def proven(run: Callable[[], torch.Tensor], operands: ReplayOperands, workspace: Workspace) -> Any:
    """Fill the memory with NaN, then make a call during which the courier copies the peers'
    rows."""
    engine = workspace.engine
    assert isinstance(engine, ReplayEngine)
    with ficco.options(replay=False):
        run()  # makes the program and its plans known
        program = engine.latest
        assert program is not None
        for slot in workspace.slots:
            if slot.memory is not None:
                slot.memory.tensor[slot.data :].fill_(0xFF)
        every = plans_of(program.plan, engine.packs_columns)
        ranks = sorted({**operands.peers, operands.rank: operands}.items())
        everyone = [
            {"a": one.a_LK, "b": one.b_KN, **plain_scales(Scales(**one.scales), every[rank])}
            for rank, one in ranks
        ]
        images = brought(every, engine.courier.machine, everyone, engine.rank)
        engine.images = portable(buffers_of(program), images)
        try:
            result = run()
            engine.synchronize()
        finally:
            engine.images = None
    return result


class ReplayClock(DeviceClock):
    """Times calls whose peers a courier plays.

    Attributes:
        last_s: seconds of the last arrival, which is no call.
        programs: by candidate and slot.
        off_s: by mode and candidate, the largest deviation of an arrival in each timed call, in
            seconds.
    """

    def __init__(self, watch: ReplayWatch) -> None:
        super().__init__(dist.group.WORLD, watch.barrier)
        self._watch = watch
        self.programs: dict[tuple[str, int], Program] = {}
        self.last_s = 0.0
        self.off_s: dict[tuple[str, str], list[float]] = {}

    def time(self, item: Item) -> tuple[float, float]:
        if item.name == ARRIVALS:
            return self.last_s, 0.0
        engine = self._watch.engine
        engine.latest = None
        taken = super().time(item)
        if engine.latest is not None:
            self.programs[item.name, id(engine.latest.slot)] = engine.latest
            off = max(map(abs, engine.courier.errors()), default=0.0)
            engine.courier.learn()
            self.off_s.setdefault((item.mode, item.name), []).append(off)
        return taken

    def host(self, item: Item) -> float:
        if item.name == ARRIVALS:
            return math.nan
        return median(self.time(item)[1] for _ in range(HOST_ROWS))

    def _line_up(self, item: Item) -> None:
        courier, engine = self._watch.engine.courier, self._watch.engine
        courier.mode, slot = item.mode, engine.next_slot
        program = self.programs.get((item.name, id(slot)))
        prepared = program is not None and program.slot is slot  # not a program of a closed engine
        courier.prepare(program if prepared else None)
        if item.mode != "idle":
            # Enqueue nothing else: the courier may block a hardware queue.
            gpu._sleep(int(item.sleep_s * self._hertz))
        if prepared and item.mode == "idle":
            courier.go()  # at the start of the host; in queued mode, the peers start with the Plan


class ReplayWatch(Stopwatch):
    """A stopwatch of one rank, without peers."""

    clock: ReplayClock
    has_peers = False

    def __init__(self, settings: Replayed, device: torch.device) -> None:
        super().__init__(dist.group.WORLD, device)
        self.rank, self.world = settings.rank, settings.world
        # The group has no backend, since no rank communicates.
        self.group = dist.ProcessGroup(dist.HashStore(), self.rank, self.world)
        host = Fingerprint(gpu.get_device_name(device), self.world)
        machine = find(settings.machine, host) or nearest(host)
        if machine is None:
            raise ValueError(
                f"machine: required a name or a file, since none is of {host.accelerator}"
            )
        if machine.topology is None or machine.copies is None:
            raise ValueError(
                f"machine {machine.name}: required the blocks 'topology' and 'copies', which say "
                "when rows arrive; name another machine"
            )
        alike = machine if host.resembles(machine) else nearest(host) or machine
        self.machine = machine.with_devices_of(alike)
        self._devices = f"like those of {alike.name}"
        self._paces: Paces | None = None
        self.clock = ReplayClock(self)
        self._begin()
        if settings.products is not None:
            self.machine = settings.products(self, self.machine)
            self._devices = "as fast as this one"
            self.free()  # the courier goes by the machine

    @property
    def note(self) -> str:
        machine = self.machine
        assert machine.topology is not None and machine.copies is not None
        rate, latency = machine.topology.bandwidth / 1e9, machine.copies.latency * 1e6
        return (
            f"replay: one GPU plays rank {self.rank} of {self.world}; rows of others arrive as on "
            f"{machine.name} at {rate:.0f} GB/s and {latency:.0f} us, from GPUs {self._devices}; "
            f"`copies` is the last arrival. Limits: {LIMITS}"
        )

    def arrivals(self, problem: AnyProblem) -> str:
        moved = family_of(problem).received(problem, self.rank)
        self.clock.last_s = last_arrival(moved, self.machine)
        return ARRIVALS

    def operands(self, problem: Problem) -> ReplayOperands:
        return ReplayOperands(problem, self.rank, self.device)

    def proof(self, call: Callable[[], Any], operands: Operands) -> Callable[[], Any]:
        assert isinstance(operands, ReplayOperands)
        return partial(proven, call, operands, workspace_of(self.group, self.device))

    def settle(self, calls: Sequence[Runner], dtype: torch.dtype) -> None:
        for runner in calls:
            with runner.context():
                for _ in range(SLOTS):  # slots grow now, and not between calls that are timed
                    runner.run()
        self.engine.synchronize()
        for slot in workspace_of(self.group, self.device).slots:
            if slot.memory is None:
                continue
            data = slot.memory.tensor[slot.data :]
            draw_normal(data.view(dtype))  # products on zeros take less time

    def figures(self, item: Item, done: int) -> dict[str, float]:
        off_s = self.clock.off_s.pop((item.mode, item.name), [])
        return {"off_us": median(off_s[-done:]) * 1e6} if off_s else {}

    @property
    def engine(self) -> ReplayEngine:
        engine = workspace_of(self.group, self.device).engine
        assert isinstance(engine, ReplayEngine)
        return engine

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def free(self) -> None:
        self.clock.programs.clear()  # of a closed engine
        super().free()
        self._begin()

    def close(self) -> None:
        ficco.close(self.group)
        super().close()

    def _begin(self) -> None:
        """Make an engine with a courier."""
        options = current()
        limit = options.timeout_s or limit_of(self.group, self.device)
        arguments = (self.group, self.device, options.signals, limit)
        name = engine_name(self.device, options.engine)
        engine: Any = make_engine(name, *arguments, kind=ReplayEngine)
        engine.courier = ReplayPeers(engine, self.machine, self._paces)
        if self._paces is None:
            self._paces = engine.courier.measure()
        adopt(self.group, self.device, Board(dist.group.WORLD, limit), engine)
