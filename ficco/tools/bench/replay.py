"""One rank of a group on one GPU, with no peers: what they would send arrives when a described link
would deliver it.

The rank's Plans run through the GPU engine with its own products, streams and signals. Its peers
are played by a *courier*, a stream of its own: :func:`arrivals` simulates all ranks on a Machine,
and the courier writes this rank's signal words at those times. Its clock is a copy engine: before
each word come copies from the host, one after the other, that take as long as is left until then,
or writes of a word that nobody reads where that is less than a copy takes. That takes no SM and no
thread of the host. The rank's own copies to and from peers become copies to the host that take as
long as the link would.

Where the results have to be right, :func:`brought` carries out the Plans of all ranks, and the
courier brings their rows, however long that takes.

Not in it: the link's traffic (that of the host's bus instead, a tenth of the bytes), caches that
other work has cooled, and peers that are late because of this rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from ficco.compute.buffers import Buffers, buffers_of
from ficco.compute.program import Call, Op, Program, Slot, Symmetric
from ficco.compute.scaled import dequantized
from ficco.dma.driver import WAIT_32, WORD, WRITE_32, Batch, Driver, Event, MemOp
from ficco.dma.engine import Capabilities
from ficco.dma.gpu import GpuEngine, wanted
from ficco.dma.memories import Allocate, Words, align
from ficco.heuristics.families import crossing, family_of
from ficco.machine import Machine
from ficco.plan import Plan, Reduction, Region, Signal, Step, Transfer
from ficco.problems.products import Problem
from ficco.problems.specification import AnyProblem
from ficco.runtime.workspace import SLOTS
from ficco.schedules import Schedule
from ficco.simulate.events import Simulation

#: Bytes of the buffers that the courier copies between; longer copies are several.
ROOM = 64 << 20
#: Seconds of one of its copies, at least, and how many a call has, at most: streams hold no more.
#: On an H100 5 us are 64 KiB, and time that passes by these deviates by 1.5 %. Between two the bus
#: is idle. Longer copies keep it busy, so that a GPU gets its own commands late: kernels of 45 us
#: begin 0.2 us later beside copies of 64 KiB, 1.1 us beside 512 KiB, 1.4 beside one large copy.
#: Single words that lie 64 bytes apart deviate by 3 %, and take a quarter longer beside copies to
#: the host (2026-11-27, by a program that is not part of the project).
TICK, TICKS = 5e-6, 400
#: Bytes of a copy that is to take no time.
LEAST_BYTES = WORD
#: Bytes of the words that this rank posts to one peer.
PEER_WORDS = 1 << 20
#: Writes, copies and sizes of copies by which paces are measured, how many of these are in a row,
#: and rows of each.
PACE_WRITES, PACE_COPIES, PACE_BYTES = (0, 8, 32), 8, (64 << 10, 256 << 10, 1 << 20, 2 << 20)
PACE_PIECES, PACE_ROWS = 8, 9
#: Weight of the latest call in what the courier learns.
LEARNS = 0.5

#: What copies to a rank bring.
Images = Mapping[Transfer, torch.Tensor]


# What a link delivers, and when.


class Arrival(NamedTuple):
    """One signal of a peer: the seconds after the begin of the call at which it is seen, and the
    copies whose rows it tells of: one, or that of their factors and theirs."""

    at: float
    signal: Signal
    transfers: tuple[Transfer, ...] = ()


def plans_of(plan: Plan, packs_columns: bool = False) -> tuple[Plan, ...]:
    """The Plans of all ranks of which one has this Plan.

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
    """What the peers of a rank post to it, in the order in which it is seen.

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
                    told = tuple(untold.pop(step.lane, ()))
                    coming.append(Arrival(simulation.known[rank, signal.word], signal, told))
    return sorted(coming, key=lambda arrival: arrival.at)


def _to(rank: int, step: Step) -> Transfer | None:
    return move if (move := step.copy) and move.dst.rank == rank else None


def brought(
    every: Sequence[Plan],
    machine: Machine,
    operands: Sequence[Mapping[str, torch.Tensor]],
    rank: int,
) -> dict[Transfer, torch.Tensor]:
    """The rows that copies bring to a rank, from the steps of all ranks, carried out one by one in
    the order in which they end on a Machine.

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
    for _, _, step in sorted(timed, key=lambda one: one[:2]):  # each after what it waits for
        _carry_out(step, memory)
        if (transfer := _to(rank, step)) is not None:
            images[transfer] = _part(memory, transfer.src).clone()
    return images


def _part(
    memory: Mapping[tuple[str, int], torch.Tensor], region: Region, down: int = 0
) -> torch.Tensor:
    """A region, or what lies so many rows below it."""
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
    """Symmetric memory of which this rank's part is there, and of its peers' the words."""

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


#: Memory to which streams may still write.
_stuck: list[tuple[torch.Tensor, torch.Tensor]] = []


class ReplayEngine(GpuEngine):
    """The GPU engine of a rank whose peers are played.

    Attributes:
        courier: plays them; to be set before the first call.
        images: what copies bring to this rank; None where they take their time and bring nothing.
        latest: the program of the latest call.
    """

    courier: Courier

    def __init__(self, *made: Any) -> None:
        self.images: Images | None = None
        self.latest: Program | None = None
        self._turns: deque[Slot] = deque(maxlen=SLOTS)
        super().__init__(*made)

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
            raise _without_peers("sums of what lies at the peers")
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


def _without_peers(what: str) -> NotImplementedError:
    return NotImplementedError(f"a replay has no peers for {what}; take another schedule")


def _dense(places: Buffers, region: Region) -> bool:
    """Whether the rows of a region lie one right after the other."""
    return region.rows == 1 or places.place(region)[1] == places.size(region)[0]


def portable(places: Buffers, images: Images) -> Images:
    """Images as they are brought: rows that land densely from pinned memory of the host. A copy
    within the device may be a kernel, which finds no processor beside a product that waits."""
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
        """Bytes of the copy that takes so long, at least the shortest."""
        return max(int((seconds - self.start) * self.rate) // WORD * WORD, LEAST_BYTES)

    @classmethod
    def fitted(cls, sizes: Sequence[int], seconds: Sequence[float]) -> Pace:
        """The one of copies that took so long, by relative errors."""
        slope, start = np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds))
        return cls(max(float(start), 0.0), 1 / float(slope))


@dataclass(frozen=True)
class Paces:
    """What takes time on a stream, and how long.

    Attributes:
        word: seconds of the write of a signal word, and of a stamp after it.
        write: of one more write.
        copies: of copies from the host, one after the other.
        own: of single copies to the host, each with the write of a word and a stamp after it, while
            others come from the host.
        tick: seconds of the shortest copies by which time is to pass.
    """

    word: float = 0.0
    write: float = 1.0
    copies: Pace = Pace(0.0, 1.0)
    own: Pace = Pace(0.0, 1.0)
    tick: float = TICK


class Piece(NamedTuple):
    """What the courier does for some arrivals: copies or writes that end ``at`` so many seconds
    after the begin, then it writes their words, and stamps the time."""

    at: float
    arrivals: tuple[Arrival, ...]
    words: Batch
    stamp: Event


@dataclass
class Timetable:
    """What the courier does in one call: it takes over this rank's slot and hands on those of the
    peers, waits for the begin, then goes piece by piece.

    Attributes:
        tick: seconds of its copies, at least.
        delays: of each piece the seconds that it takes besides what its copies or writes take on an
            idle device: until the begin is seen, and what other work costs them. Learnt from calls
            of all timetables that share them.
    """

    opening: Batch
    pieces: tuple[Piece, ...]
    tick: float
    delays: list[float]

    def durations(self) -> list[float]:
        """Seconds of the copies or writes of each piece. None is early; one without any still takes
        the time of its word."""
        now, durations = 0.0, []
        for piece, delay in zip(self.pieces, self.delays, strict=True):
            durations.append(max(piece.at - now - delay, 0.0))
            now += durations[-1] + delay
        return durations

    def learn(self, begun: Event) -> None:
        """From the latest call, which is over."""
        before = 0.0
        for index, duration in enumerate(self.durations()):
            after = begun.seconds_to(self.pieces[index].stamp)
            self.delays[index] += LEARNS * (after - before - duration - self.delays[index])
            before = after


class Courier:
    """Plays the peers of one rank.

    Attributes:
        machine: says when they post.
        paces: of what takes time.
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
        """Enqueue what accompanies the next call, a call of a program; it waits for :meth:`go`."""
        self._played, self._prepared, self._gone = None, program, False
        if program is not None:
            self._enqueue(self.timetable(program), buffers_of(program))

    def go(self) -> None:
        """The peers begin with what comes on the caller's stream next: with the latest call's Plan,
        unless they were told before."""
        self._gone, driver = True, self.engine.driver
        caller = driver.stream(driver.caller())
        self._go.enqueue(caller)
        self._begun.record(caller)

    def accompany(self, program: Program) -> None:
        """A call of a program is about to be enqueued."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            self.prepare(program)
            self._prepared = None
        elif prepared is not program:
            raise RuntimeError(f"the courier was prepared for {prepared.plan.schedule}")
        if not self._gone:
            self.go()

    def errors(self) -> list[float]:
        """By how many seconds the words of the latest call came later than planned, in the order of
        the plan. The call is over."""
        pieces = self._played.pieces if self._played else ()
        return [
            self._begun.seconds_to(piece.stamp) - arrival.at
            for piece in pieces
            for arrival in piece.arrivals
        ]

    def learn(self) -> None:
        """Let the next call of the kind of the latest one, which is over, be closer to its plan."""
        if self._played is not None:
            self._played.learn(self._begun)

    def _enqueue(self, timetable: Timetable, places: Buffers | None) -> None:
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

    def timetable(self, program: Program) -> Timetable:
        """What accompanies the calls of a program in the mode in force."""
        key = "courier", self.mode
        if key not in program.state:
            made = program.state[key] = self._timetable(program)
            kind = program.plan.problem, program.plan.schedule, self.mode
            made.delays = self._delays.setdefault(kind, made.delays)  # of both slots
        timetable: Timetable = program.state[key]
        return timetable

    def _timetable(self, program: Program) -> Timetable:
        engine, plan = self.engine, program.plan
        every = plans_of(plan, engine.packs_columns)
        coming = arrivals(every, self.machine, self.mode, engine.rank)
        assert program.slot is not None
        words: Words = program.slot.state.words
        me, peers = engine.rank, [peer for peer in range(engine.world) if peer != engine.rank]
        theirs = [words.address(peer, me) for peer in peers]
        opening = [
            *(MemOp(WAIT_32, at, 0) for at in theirs),
            *(MemOp(WRITE_32, at, 1) for at in theirs),
            *(MemOp(WRITE_32, words.address(me, peer), 0) for peer in peers),
        ]
        begin = MemOp(WAIT_32, self._flag, 1), MemOp(WRITE_32, self._flag, 0)
        pieces = tuple(self._pieces(coming, words))
        tick = max(self.paces.tick, pieces[-1].at / TICKS if pieces else 0.0)
        batch = engine.driver.batch([*opening, *begin])
        return Timetable(batch, pieces, tick, [0.0] * len(pieces))

    def _pieces(self, coming: Sequence[Arrival], words: Words) -> list[Piece]:
        """Those that follow each other sooner than words can be written come together."""
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
        """Enqueues what takes so long together with a signal word: copies from the host, each of
        which takes a tick or more, or else writes."""
        left = seconds - self.paces.word
        if count := int(max(left, 0.0) / tick):
            return self._ticks(count, self.paces.copies.nbytes(left / count))
        return self._writes(int(max(left, 0.0) / self.paces.write))

    def crossing(self, seconds: float) -> Callable[[Any], None]:
        """Enqueues a copy of the rank's own, which takes so long together with a signal word."""
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
        """Measure the paces on a device that is idle otherwise."""
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
        """Seconds of one of several pieces in a row: what passes time, a word and a stamp."""
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
