"""CPUs: shared host memory, POSIX semaphores and PyTorch's own matrix product.

The engine runs every Plan on any Linux machine and is the one in which calls can be disturbed on
purpose. Every lane is a thread; ``compute0`` is the caller's own. Buffers lie in host memory that
the ranks share, a signal is a semaphore in the waiter's memory. A call is over when it returns, so
it raises its errors itself.

Ordering: what a lane wrote before it posts a semaphore is seen by the lane whose wait takes it, see
:class:`ficco.dma.host.Semaphores`. Lanes of one rank order each other through threading events.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import signal as unix_signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist

from ficco.dma.blas import library
from ficco.dma.collectives import Collectives, Start
from ficco.dma.engine import (
    Call,
    Capabilities,
    Engine,
    Op,
    Program,
    Slot,
    Span,
    Symmetric,
    step_name,
)
from ficco.dma.host import SEMAPHORE_STRIDE, HostMemory, semaphores
from ficco.dma.products import multiply
from ficco.errors import BackendError, SignalTimeout
from ficco.plan import Product, Reduction, Region, Signal, Transfer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

#: Seconds between two looks of a waiting lane at failures of other lanes, the clock and
#: :attr:`Engine.interrupt`.
SLICE_S = 0.02
#: What stands for a time limit that a duration of the library cannot hold, such as infinity.
LONGEST_S = 1e9
#: Seconds that closing the engine waits for a lane.
JOIN_S = 1.0
#: Seconds within which a peer whose connection is lost turns out to be dead, if it is.
DEATH_S = 1.0
#: Buffers in slots begin at multiples of this many bytes.
ALIGNMENT = 64


@dataclass(frozen=True)
class Disturbance:
    """Trouble on purpose, for tests.

    Attributes:
        delay_s: every copy first sleeps for a random time of up to this many seconds.
        bandwidth: bytes per second that no copy exceeds.
        stall: rank and index of a step that never ends. The stuck rank's own call raises
            SignalTimeout once one of its waits, or twice the timeout, has run out.
        kill: rank and index of a step at which the process ends, as if by ``kill -9``.
        seed: of the random delays; every rank has its own.
    """

    delay_s: float = 0.0
    bandwidth: float | None = None
    stall: tuple[int, int] | None = None
    kill: tuple[int, int] | None = None
    seed: int = 0


_disturbance: Disturbance | None = None


@contextmanager
def disturb(disturbance: Disturbance) -> Iterator[None]:
    """Disturb all CPU engines of this process that have no disturbance of their own."""
    global _disturbance
    before, _disturbance = _disturbance, disturbance
    try:
        yield
    finally:
        _disturbance = before


class CpuMemory(Symmetric):
    """Host memory of all ranks; ``parts`` are theirs as bytes, by rank."""

    def __init__(self, engine: CpuEngine, nbytes: int, serial: int) -> None:
        self.serial, self.nbytes = serial, nbytes
        self.host = HostMemory(
            engine.group,
            max(nbytes, 1),
            engine.timeout_s,
            f"allocation {serial}",
            engine.operator,
            # A rank alone in wanting memory learns here that its call is not that of its peers.
            interrupt=lambda: engine.interrupt(),
        )
        self.parts = [
            torch.frombuffer(part, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
            for part in self.host.maps
        ]
        self.tensor = self.parts[engine.rank]
        self.addresses = [self.host.address(rank) for rank in range(engine.world)]

    def free(self) -> None:
        """Let go of it; tensors in it, and calls under way, keep it mapped."""
        self.parts, self.addresses = [], []
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.host.close()


class _Stopped(Exception):
    """Another lane of this call has failed."""


class _Run:
    """One call under way: its lanes' common state."""

    def __init__(
        self, lanes: int, recorded: Sequence[int], timeout_s: float, slot: Slot | None
    ) -> None:
        # What waits need of the slot: a stuck lane may outlast it, and its addresses must stay
        # mapped. Behind the words lie marks, a byte per lane, see CpuEngine._expire.
        self.parts: list[torch.Tensor] = []
        if slot is not None:
            assert isinstance(slot.memory, CpuMemory)
            self.parts, self.pids = slot.memory.parts, slot.memory.host.pids
            marks = slot.words * SEMAPHORE_STRIDE
            self.marks = [part[marks : marks + SEMAPHORE_STRIDE] for part in self.parts]
        self.timeout_s = timeout_s
        self.recorded = {step: threading.Event() for step in recorded}
        self.stamps: list[tuple[int, bool, float]] = []
        self.blocked: dict[str, tuple[int, Signal, int, float]] = {}  # lane -> its long wait
        self.began = time.perf_counter()
        self.failed = threading.Event()
        self.error: BaseException | None = None
        self._lanes = lanes
        self._lock = threading.Lock()
        self.over = threading.Event()

    def carry_out(self, ops: Sequence[Op], call: Call) -> None:
        """Run one lane."""
        try:
            # Grad and inference mode belong to a thread; only here both hold for all lanes, and
            # only inference mode may write to tensors of either kind.
            with torch.inference_mode():
                for op in ops:
                    if self.failed.is_set():
                        break
                    op(call)
        except _Stopped:
            pass
        except BaseException as error:  # also KeyboardInterrupt: the other lanes have to stop
            self.fail(error)
        finally:
            with self._lock:
                self._lanes -= 1
                if not self._lanes:
                    self.over.set()

    def fail(self, error: BaseException) -> None:
        """Keep the first error and stop all lanes."""
        with self._lock:
            self.error = self.error or error
        self.failed.set()

    def check(self) -> None:
        if self.failed.is_set():
            raise _Stopped


class _Lane:
    """A thread that works off the operations of one lane, call after call."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon: a lane that is stuck must not keep the process from ending.
        self._thread = threading.Thread(
            target=_work, args=(self._jobs,), name=f"ficco {name}", daemon=True
        )
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self, join: bool) -> None:
        self._jobs.put(None)
        if join and threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds the operands of the call


class CpuEngine(Engine):
    """See the module's docstring.

    Attributes:
        operator: what errors of an allocation say was running.
        disturbance: trouble on purpose, for tests; goes before that of :func:`disturb`.
    """

    name = "cpu"
    operator = "ficco"

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.disturbance: Disturbance | None = None
        self._random: tuple[Disturbance, random.Random] | None = None
        self._serial = 0
        self._lanes: dict[str, _Lane] = {}
        self._roll: CpuMemory | None = None  # collectives that each rank has begun
        self._calls = 0  # under way
        self._closed = threading.Event()

    @property
    def out_of_step(self) -> bool:
        return self.group in _out_of_step

    # Memory.

    def symmetric(self, nbytes: int) -> CpuMemory:
        self._serial += 1
        return CpuMemory(self, nbytes, self._serial)

    def free(self, memory: Symmetric) -> None:
        assert isinstance(memory, CpuMemory)
        memory.free()

    def slot_bytes(self, words: int, room: tuple[int, int]) -> int:
        return _offsets(words, room)[2]

    def slot(self, memory: Symmetric, words: int, room: tuple[int, int], captured: bool) -> Slot:
        assert isinstance(memory, CpuMemory)
        first = memory.addresses[self.rank]
        for word in range(words):
            # The words by which peers hand the slot over rest at 1, see ficco.plan.Signal.
            semaphores().init(first + word * SEMAPHORE_STRIDE, int(word < self.world))
        memory.host.barrier(self.timeout_s)
        return Slot(memory, words, room, _offsets(words, room)[:2], captured)

    def retire(self, slot: Slot) -> None:
        pass  # a call is over when it returns

    # Signals.

    def _word(self, program: Program, signal: Signal) -> int:
        slot = program.slot
        assert slot is not None and isinstance(slot.memory, CpuMemory)
        return slot.memory.addresses[signal.waiter] + signal.word * SEMAPHORE_STRIDE

    def wait(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        words = [(signal, self._word(program, signal)) for signal in signals]
        take = semaphores().try_wait

        def op(call: Call) -> None:
            for signal, word in words:
                if not take(word):
                    self._wait(program, call, step, signal, word)

        return self._disturbed(step, op)

    def _wait(self, program: Program, call: Call, step: int, signal: Signal, word: int) -> None:
        run: _Run = call.state
        lane = program.plan.steps[step].lane
        begin = time.monotonic()
        while not semaphores().wait(word, SLICE_S):
            run.check()
            self.interrupt()
            if lane not in run.blocked:
                run.blocked[lane] = (step, signal, word, begin)
                self._mark(program, run, lane, 1)
            if time.monotonic() - begin > run.timeout_s:
                self._expire(program, run)
        if run.blocked.pop(lane, None):
            self._mark(program, run, lane, 0)

    def post(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        words = [self._word(program, signal) for signal in signals]
        post = semaphores().post

        def op(call: Call) -> None:
            for word in words:
                post(word)

        return self._disturbed(step, op)

    def clear(self, program: Program, step: int, signals: Sequence[Signal]) -> Op | None:
        return None  # a wait takes what was posted

    def record(self, program: Program, step: int) -> Op:
        return lambda call: call.state.recorded[step].set()

    def join(self, program: Program, step: int, earlier: int) -> Op:
        def op(call: Call) -> None:
            while not call.state.recorded[earlier].wait(SLICE_S):
                call.state.check()

        return self._disturbed(step, op)

    # Whom to blame. Where several lanes of a rank wait, one of the peers may itself only wait for
    # another. Every rank therefore marks the lanes that wait in the slot, for its peers to see.

    def _mark(self, program: Program, run: _Run, lane: str, value: int) -> None:
        run.marks[self.rank][program.plan.lanes.index(lane) % SEMAPHORE_STRIDE] = value

    def _expire(self, program: Program, run: _Run) -> NoReturn:
        """Raise for the wait whose peer most likely is the cause: dead, or not waiting itself."""

        def order(wait: tuple[int, Signal, int, float]) -> tuple[bool, bool, float]:
            peer = wait[1].poster
            return not _dead(run.pids[peer]), bool(run.marks[peer].any()), wait[3]

        step, signal, word, begin = min(list(run.blocked.values()), key=order)
        seconds = time.monotonic() - begin
        raise self._timeout(program, step, signal.poster, seconds, 1, semaphores().value(word))

    def _timeout(
        self,
        program: Program,
        step: int,
        peer: int | None,
        seconds: float,
        wanted: int | None,
        found: int | None,
    ) -> SignalTimeout:
        plan = program.plan
        return SignalTimeout(
            operator=plan.problem.operator,
            rank=self.rank,
            peer=peer,
            step=step_name(plan.steps[step]),
            schedule=plan.schedule,
            seconds=seconds,
            wanted=wanted,
            found=found,
        )

    # Copies.

    def copy(self, program: Program, step: int, transfer: Transfer, mover: str) -> Op:
        src, dst = (self._rectangle(program, region) for region in transfer[:2])
        nbytes = transfer.src.elements * program.plan.problem.itemsize
        move = _move if mover == "dma" else torch.Tensor.copy_

        def op(call: Call) -> None:
            begin = time.monotonic()
            disturbance = self.disturbance or _disturbance
            if disturbance is not None and disturbance.delay_s:
                delay = self._generator(disturbance).uniform(0, disturbance.delay_s)
                call.state.failed.wait(delay)
            move(dst(call), src(call))
            if disturbance is not None and disturbance.bandwidth:
                rest = nbytes / disturbance.bandwidth - (time.monotonic() - begin)
                call.state.failed.wait(max(rest, 0))

        return self._disturbed(step, op)

    def place(self, program: Program, step: int, transfer: Transfer) -> Op:
        src, dst = (self._rectangle(program, region) for region in transfer[:2])

        def op(call: Call) -> None:
            dst(call).copy_(src(call))

        return self._disturbed(step, op)

    def collective(self, program: Program, step: int) -> Op:
        """As all engines do, but a rank that does not come is a timeout of this call and named.

        By itself the library waits for half an hour, or says that a connection is lost.
        """
        if self._roll is None:
            self._roll = self.symmetric(ALIGNMENT)
        counts = [part.view(torch.int64) for part in self._roll.parts]
        pids = self._roll.host.pids
        exchange = Collectives(program.plan.problem, self.rank, self.group)

        def missing() -> int | None:
            """The rank that is dead, or has begun fewer collectives than this one."""
            peers = [rank for rank in range(self.world) if rank != self.rank]
            dead = [rank for rank in peers if _dead(pids[rank])]
            late = [rank for rank in peers if counts[rank][0] < counts[self.rank][0]]
            return next(iter(dead + late), None)

        def op(call: Call) -> None:
            counts[self.rank][0] += 1
            # Its own time limit, which it keeps even where the call is broken off: see _outlive().
            patience = timedelta(seconds=min(call.state.timeout_s, LONGEST_S) + 1)
            buffers = call.a, call.partial, call.gathered, call.out
            begun: list[Work] = []
            try:
                for start in exchange.starts(*buffers, patience):
                    self._collect(program, call, step, missing, partial(_begin, start, begun))
            except BaseException:
                _out_of_step.add(self.group)
                _outlive(self.group, begun)
                raise

        return self._disturbed(step, op)

    def _collect(
        self,
        program: Program,
        call: Call,
        step: int,
        missing: Callable[[], int | None],
        start: Start,
    ) -> None:
        """Run a collective, or raise for the rank that is missing."""
        run: _Run = call.state
        begin = time.monotonic()
        work = None
        while True:
            failed = True  # if this raises; unless it is only the end of a slice
            try:
                work = work or start()
                if work is not None:
                    failed = work.is_completed()
                    work.wait(timedelta(seconds=SLICE_S))
                return
            except RuntimeError as error:
                run.check()
                self.interrupt()  # ranks that disagree also fail here
                while failed and missing() is None:
                    self.interrupt()
                    # A connection is lost a little before the peer's process is gone.
                    if time.monotonic() - begin > DEATH_S:
                        library = str(dist.get_backend(self.group))
                        text = str(error)
                        raise BackendError(f"collective of {library}", "error", text) from error
                    time.sleep(SLICE_S)
                seconds = time.monotonic() - begin
                if failed or (seconds > run.timeout_s and not work.is_completed()):
                    raise self._timeout(program, step, missing(), seconds, None, None) from error

    def _rectangle(
        self, program: Program, region: Region, batch: int = 1, stride: int = 0
    ) -> Callable[[Call], torch.Tensor]:
        """Finds a region in a call's operands or in shared memory, which a Program knows already.

        With ``batch`` there are several, ``stride`` rows apart.
        """

        def view(whole: torch.Tensor) -> torch.Tensor:
            pitch, step = whole.stride()
            start = whole.storage_offset() + region.row * pitch + region.col * step
            shape, strides = (region.rows, region.cols), (pitch, step)
            if batch > 1:
                return whole.as_strided((batch, *shape), (stride * pitch, *strides), start)
            return whole.as_strided(shape, strides, start)

        buffer = region.buffer
        if buffer in ("staging", "publish") or (buffer == "a" and region.rank != self.rank):
            found = view(self._shared(program, buffer, region.rank))
            return lambda call: found
        name = {"sum": "sums"}.get(buffer, buffer)
        return lambda call: view(getattr(call, name))

    def _shared(self, program: Program, buffer: str, rank: int) -> torch.Tensor:
        """A symmetric buffer of any rank as a matrix, with as many rows as there is room for."""
        plan, slot = program.plan, program.slot
        rows, cols = plan.shape(buffer, rank)
        if buffer == "a":
            assert program.source is not None
            memory, start = program.source
            nbytes = rows * cols * plan.problem.itemsize
        else:
            assert slot is not None
            index = ("staging", "publish").index(buffer)
            memory, start, nbytes = slot.memory, slot.offsets[index], slot.room[index]
        assert isinstance(memory, CpuMemory)
        rows = nbytes // max(cols * plan.problem.itemsize, 1)
        part = memory.parts[rank][start : start + rows * cols * plan.problem.itemsize]
        return part.view(getattr(torch, plan.problem.dtype)).as_strided((rows, cols), (cols, 1))

    # Products.

    def matmul(self, program: Program, step: int, products: Sequence[Product]) -> Op:
        parts = [
            (
                product,
                self._rectangle(program, product.a, product.batch, product.a_stride),
                self._rectangle(program, product.out, product.batch, product.out_stride),
                product.addend and self._rectangle(program, product.addend),
            )
            for product in products
        ]

        def op(call: Call) -> None:
            for product, a, out, addend in parts:
                b = call.b[product.k_first : product.k_last, product.out.col : product.out.col_stop]
                left, to = a(call), out(call)
                added = addend(call) if addend else to if product.accumulate else None
                _multiply(left.t() if product.transposed else left, b, to, added)

        return self._disturbed(step, op)

    def reduce(self, program: Program, step: int, reduction: Reduction) -> Op:
        parts = [self._rectangle(program, part) for part in reduction.parts]
        out = self._rectangle(program, reduction.out)
        # float64 is served here alone, and keeps its own precision.
        wide = torch.float64 if program.plan.problem.dtype == "float64" else torch.float32

        def op(call: Call) -> None:
            # No pass over memory beside the sums themselves. The result comes last: a part may lie
            # where it goes.
            first, *others = (part(call) for part in parts)
            result, total = out(call), first.to(wide)
            for i, other in enumerate(others[:-1]):
                total = total + other if i == 0 else total.add_(other)
            if not others:
                result.copy_(total)
            elif result.dtype == wide:
                torch.add(total, others[-1], out=result)
            else:
                result.copy_(total + others[-1])

        return self._disturbed(step, op)

    # Disturbances.

    def _disturbed(self, step: int, op: Op) -> Op:
        def disturbed(call: Call) -> None:
            disturbance = self.disturbance or _disturbance
            if disturbance is not None:
                if disturbance.kill == (self.rank, step):
                    os.kill(os.getpid(), unix_signal.SIGKILL)
                if disturbance.stall == (self.rank, step):
                    self._stall(call.state)
            op(call)

        return disturbed

    def _stall(self, run: _Run) -> NoReturn:
        begin = time.monotonic()
        while not self._closed.wait(SLICE_S):
            run.check()
            if (seconds := time.monotonic() - begin) > 2 * run.timeout_s:
                raise SignalTimeout(
                    operator="disturbance",
                    rank=self.rank,
                    peer=self.rank,
                    step="stalled on purpose",
                    schedule="any",
                    seconds=seconds,
                )
        raise _Stopped

    def _generator(self, disturbance: Disturbance) -> random.Random:
        if self._random is None or self._random[0] is not disturbance:
            generator = random.Random(f"{disturbance.seed} {self.rank}")
            self._random = disturbance, generator
        return self._random[1]

    # Running.

    def execute(self, program: Program, call: Call) -> None:
        lanes = program.state.get("lanes")
        if lanes is None:
            lanes = program.state["lanes"] = {"compute0": []}
            for lane, op in program.ops:
                lanes.setdefault(lane, []).append(op)
            steps = program.plan.steps
            program.state["recorded"] = sorted({i for step in steps for i in step.after})
        slot = program.slot
        run = call.state = _Run(len(lanes), program.state["recorded"], self.timeout_s, slot)
        self._calls += 1
        try:
            for lane, ops in lanes.items():
                if lane != "compute0":
                    self._lane(lane).submit(partial(run.carry_out, ops, call))
            run.carry_out(lanes["compute0"], call)
            run.over.wait()
        except BaseException as error:  # Ctrl-C: no lane may write to the result any more
            run.fail(error)
            run.over.wait(JOIN_S)
        finally:
            self._calls -= 1
        if run.error is not None:
            raise run.error
        # A call may get through on what peers sent for another one. Data from all of them has come,
        # and so have their entries on the board.
        self.interrupt()

    def _lane(self, name: str) -> _Lane:
        if name not in self._lanes:
            self._lanes[name] = _Lane(name)
        return self._lanes[name]

    def stamp(self, program: Program, step: int, end: bool) -> Op:
        return lambda call: call.state.stamps.append((step, end, time.perf_counter()))

    def spans(self, program: Program, call: Call) -> list[Span]:
        run: _Run = call.state
        times = {(step, end): when - run.began for step, end, when in run.stamps}
        return [
            Span(step, program.plan.steps[step].lane, start, times[step, True])
            for (step, end), start in sorted(times.items())
            if not end and (step, True) in times
        ]

    def capturing(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass  # a call is over when it returns

    def capabilities(self) -> Capabilities:
        return Capabilities(
            engine="cpu",
            post="sem_post on a process-shared POSIX semaphore in the waiter's memory",
            wait="sem_wait with a time limit; POSIX orders memory around both (XBD 4.12)",
            copy="memmove by a thread per lane, one per row where rows are not adjacent; it shares "
            "the cores and the memory bandwidth with the products. Operands whose rows are "
            "strided inside are copied by PyTorch",
            movers=("dma", "kernel"),
            products=library(self.device),
            accumulate="into the product for float32 and float64; for bfloat16 and float16 into a "
            "float32 buffer of the product's size, from float32 copies of the pieces and of their "
            "rows of b, rounded once",
            capture=False,
        )

    def copy_engines(self) -> int:
        # A lane's thread copies, but all of them share the cores and the bandwidth of memory.
        return 1

    def close(self) -> None:
        self._closed.set()
        for lane in self._lanes.values():
            # At the end of a process a call of another thread may be stuck: leave its lanes alone.
            lane.close(join=not self._calls)
        self._lanes.clear()
        if self._roll is not None:
            self._roll.free()
            self._roll = None


#: Collectives that were broken off, with their groups: to free one waits, inside the garbage
#: collector or at the end of the process, until its library has given up.
_unfinished: list[tuple[Work, ProcessGroup]] = []
#: Groups of which a collective was broken off: their ranks may have begun different numbers.
_out_of_step: WeakSet[ProcessGroup] = WeakSet()


def _begin(start: Start, begun: list[Work]) -> Work | None:
    if (work := start()) is not None:
        begun.append(work)
    return work


def _outlive(group: ProcessGroup, begun: list[Work]) -> None:
    """Keep a group until its collectives are over."""
    kept = [*_unfinished, *[(work, group) for work in begun]]
    _unfinished[:] = [pair for pair in kept if not pair[0].is_completed()]


@atexit.register
def _leave_unfinished() -> None:
    """Let the process end at once: these are freed with it."""
    if _unfinished:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_unfinished))


def _offsets(words: int, room: tuple[int, int]) -> tuple[int, int, int]:
    """Where staging, publish and the end of a slot lie, behind the words and the lanes' marks."""
    staging = (words + 1) * SEMAPHORE_STRIDE
    publish = staging + _align(room[0])
    return staging, publish, publish + _align(room[1])


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _dead(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _move(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy a rectangle by memmove, row by row unless rows are adjacent on both sides."""
    rows, cols = src.shape
    if src.stride(1) != 1 and cols > 1:
        dst.copy_(src)
        return
    width = cols * src.element_size()
    to, to_pitch = dst.data_ptr(), dst.stride(0) * src.element_size()
    at, at_pitch = src.data_ptr(), src.stride(0) * src.element_size()
    if to_pitch == at_pitch == width:
        rows, width = 1, rows * width
    for row in range(rows):
        ctypes.memmove(to + row * to_pitch, at + row * at_pitch, width)


def _multiply(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, addend: torch.Tensor | None
) -> None:
    """``out = (addend +) a @ b``, or a batch of such products with a common b, in out's dtype."""
    a, b = a.to(out.dtype), b.to(out.dtype)
    multiply(a, b.unsqueeze(0).expand(a.shape[0], -1, -1) if a.dim() == 3 else b, out, addend)
