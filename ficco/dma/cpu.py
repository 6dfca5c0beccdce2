"""CPUs: shared host memory, POSIX semaphores and PyTorch's own matrix product.

The reference engine: it runs every Plan on any Linux machine. Every lane is a thread; ``compute0``
is the caller's own. Buffers lie in host memory that the ranks share, and a signal is a semaphore in
the waiter's memory. Calls are synchronous. A call raises the error of the lane that fails first;
the other lanes stop at their next operation or wait slice.

Ordering: writes of a lane before it posts a semaphore are visible to the lane whose wait takes it,
see :class:`ficco.dma.host.Semaphores`. Lanes of one rank synchronize through threading events.

A collective of the library itself waits for half an hour, or reports a lost connection. Here a lane
waits for it in slices, and every rank counts the collectives that it has started in shared memory,
so that an error names the absent rank.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from ficco.compute.attention import apply_op, attend_op, merge, merge_op
from ficco.compute.buffers import buffers_of
from ficco.compute.products import add_up, library, matmul_op, place_op
from ficco.compute.program import Call, Op, Program, Slot, Symmetric, callers
from ficco.compute.ragged_blocks import filled, move_op
from ficco.dma import collectives
from ficco.dma.collectives import LONGEST_S
from ficco.dma.engine import Capabilities, Engine, Missing, Span
from ficco.dma.host import SEMAPHORE_STRIDE, Hosts, Meeting, dead, semaphores
from ficco.dma.messages import (
    GlooLinks,
    PeerExchange,
    bytes_of,
    joined,
    joint_room,
    messages,
    never_freed,
    parts_of,
    take_apart,
)
from ficco.dma.patience import Patience
from ficco.errors import BackendError, SignalTimeout
from ficco.plan import Applied, Attending, Product, Reduction, Signal, Transfer
from ficco.problems.specification import MERGE, PLACED

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


#: Seconds after which a waiting lane checks for failures of other lanes, the timeout and
#: :attr:`Engine.interrupt`.
SLICE_S = 0.02
SLICE = timedelta(seconds=SLICE_S)
#: Seconds that closing the engine waits for a lane.
JOIN_S = 1.0


class CpuMemory(Symmetric):
    """Host memory of all ranks of a host. ``parts`` are the ranks' uint8 tensors and ``pids`` their
    process ids, by rank of the group."""

    def __init__(self, engine: Engine, nbytes: int, serial: int) -> None:
        self.serial, self.nbytes = serial, nbytes
        self.host = Meeting(engine, f"allocation {serial}", max(nbytes, 1))
        parts = [
            torch.frombuffer(part, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
            for part in self.host.maps
        ]
        addresses = [self.host.address(place) for place in range(len(parts))]
        # Ranks of other hosts have empty parts.
        self.parts = engine.hosts.spread(parts, torch.empty(0, dtype=torch.uint8, device="cpu"))
        self.addresses = engine.hosts.spread(addresses, 0)
        self.pids = engine.hosts.spread(self.host.pids, 0)
        self.tensor = self.parts[engine.rank]

    def part(self, rank: int) -> torch.Tensor:
        part: torch.Tensor = self.parts[rank]
        return part

    def free(self) -> None:
        """Drop the memory. Tensors of it and calls in flight keep it mapped."""
        self.parts, self.addresses = [], []
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.host.close()


class Stopped(Exception):
    """Stops a lane: another lane of the call has failed."""


class CallState:
    """State shared by the lanes of a call in flight."""

    def __init__(self, program: Program, timeout_s: float) -> None:
        slot, lanes, moves = program.slot, program.state["lanes"], program.state["moves"]
        # Keep the parts of the slot mapped, since a stuck lane may outlive the slot. After the
        # words come marks, one byte per lane, see CpuEngine._late.
        self.parts: list[torch.Tensor] = []
        if slot is not None:
            assert isinstance(slot.memory, CpuMemory)
            self.parts, self.pids = slot.memory.parts, slot.memory.pids
            marks = slot.words * SEMAPHORE_STRIDE
            self.marks = [part[marks : marks + SEMAPHORE_STRIDE] for part in self.parts]
        self.timeout_s = timeout_s
        self.patience: Patience | None = None  # set by the first wait longer than a slice
        self.recorded = {step: threading.Event() for step in program.state["recorded"]}
        #: By network step: set once it has sent, set once it is complete, and its receives.
        self.sent = {step: threading.Event() for step in moves}
        self.moved = {step: threading.Event() for step in moves}
        self.coming: dict[int, Any] = {}
        self.stamps: list[tuple[int, bool, float]] = []
        #: The gates of the caller's step, if the call has one: as words, and as events for waits.
        self.words: torch.Tensor | None = None
        self.arrived: list[threading.Event] = []
        #: By lane: step, signal, its address and the start of a wait longer than a slice.
        self.blocked: dict[str, tuple[int, Signal, int, float]] = {}
        self.began = time.perf_counter()
        self.failed = threading.Event()
        self.error: BaseException | None = None
        self._lanes = len(lanes) - (FIRST in lanes)
        self._lock = threading.Lock()
        self.done = threading.Event()

    def run_lane(self, ops: Sequence[Op], call: Call) -> None:
        """Run one lane, or the rest of it."""
        try:
            self.run(ops, call)
        finally:
            with self._lock:
                self._lanes -= 1
                if not self._lanes:
                    self.done.set()

    def run(self, ops: Sequence[Op], call: Call) -> None:
        """Run some operations of a lane."""
        try:
            # Grad and inference mode are per thread, so that each lane sets its own; only in
            # inference mode may it write to inference tensors and to those that require grad.
            with torch.inference_mode():
                for op in ops:
                    if self.failed.is_set():
                        break
                    op(call)
        except Stopped:
            pass
        except BaseException as error:  # also KeyboardInterrupt: the other lanes have to stop
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Keep the first error and stop all lanes."""
        with self._lock:
            self.error = self.error or error
        self.failed.set()

    def check(self) -> None:
        if self.failed.is_set():
            raise Stopped

    def arrives(self, gate: int) -> None:
        """Open a gate of the caller's step: its rows have arrived."""
        assert self.words is not None
        self.words[gate] = 1
        self.arrived[gate].set()


class SoleLane:
    """State of a call that runs on the caller's thread alone: see :class:`CallState`."""

    __slots__ = ("timeout_s",)

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def check(self) -> None:
        """No other lane can fail."""


class Lane:
    """A thread that runs the operations of one lane, call after call."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], int] | None] = SimpleQueue()
        # A daemon, so that a stuck lane does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"ficco {name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job in this lane, with PyTorch's thread limit of the calling thread."""
        self._jobs.put((job, torch.get_num_threads()))

    def _work(self) -> None:
        while (submitted := self._jobs.get()) is not None:
            job, threads = submitted
            # OpenMP and MKL have a limit per thread. PyTorch sets the limit of a new thread when
            # the limit is read, but not before a product: MKL would then start its default number
            # of threads, which spin between products.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            job()
            del job, submitted  # both reference the operands of the call

    def close(self, join: bool) -> None:
        self._jobs.put(None)
        if join and threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)


#: Seconds after a lost connection within which the death of a peer's process is detected.
DEATH_S = 1.0
#: Bytes of symmetric memory that each rank's count takes.
COUNT_BYTES = 64


def collective(engine: Engine, memory: CpuMemory, program: Program, step: int) -> Op:
    """The exchange of a step. ``memory`` holds the number of collectives each rank has started."""
    group, exchange = engine.group, collectives.LibraryExchange(program.plan, step, engine.group)
    # Arrays: PyTorch takes microseconds to add to an element.
    counts = [part.view(torch.int64).numpy() for part in memory.parts]
    mine, pids = counts[engine.rank], memory.pids
    peers = [peer for peer in range(engine.world) if peer != engine.rank and pids[peer]]

    def missing() -> tuple[int | None, bool]:
        """A rank that is dead or has started fewer collectives than this rank, and whether it is
        dead."""
        for peer in peers:
            if dead(pids[peer]):
                return peer, True
        return next((peer for peer in peers if counts[peer][0] < mine[0]), None), False

    def op(call: Call) -> None:
        mine[0] += 1
        # The library's own timeout, which stays in force after the call has failed.
        timeout = timedelta(seconds=min(call.state.timeout_s, LONGEST_S) + 1)
        try:
            for start in exchange.starts(timeout):
                collect(engine, program, call, step, missing, partial(start, call.tensors))
        except BaseException:
            _out_of_step.add(group)
            raise

    return op


def collect(
    engine: Engine,
    program: Program,
    call: Call,
    step: int,
    missing: Callable[[], tuple[int | None, bool]],
    start: Callable[[], Work | None],
) -> None:
    """Run a collective, or raise an error that names the missing rank."""
    state: CallState | SoleLane = call.state
    patience = Patience()

    def timeout(seconds: float) -> SignalTimeout:
        peer, ended = missing()
        return engine.timed_out(program.plan, Missing(step, peer), seconds, ended)

    work: Work | None = None
    try:
        while True:
            failed = True  # whether an error is a failure, not the end of a slice
            try:
                work = work or start()
                if work is not None:
                    failed = work.is_completed()
                    work.wait(SLICE)
                return
            except RuntimeError as error:
                state.check()
                engine.interrupt()  # a disagreement of ranks also ends up here
                # A connection is lost shortly before the peer's process is gone.
                lost = time.monotonic()
                while failed and not missing()[1] and time.monotonic() - lost < DEATH_S:
                    engine.interrupt()
                    time.sleep(SLICE_S)
                if failed and missing()[0] is None:
                    library = str(dist.get_backend(engine.group))
                    text = str(error)
                    raise BackendError(f"collective of {library}", "error", text) from error
                if failed:
                    raise timeout(patience.seconds) from error
                late = work is not None and not work.is_completed()
                if late and (gives_up := patience.ends(state.timeout_s, timeout)):
                    raise gives_up from error
    except BaseException:
        _unfinished[:] = [pair for pair in _unfinished if not pair[0].is_completed()]
        if work is not None:
            _unfinished.append((work, engine.group))
        raise


#: Collectives in flight when their call failed, with their groups, which must outlive them. Freeing
#: a collective waits, in the garbage collector or at exit, until its library gives up.
_unfinished: list[tuple[Work, ProcessGroup]] = never_freed([])
#: Groups that aborted a collective: their ranks may have started different numbers of them.
_out_of_step: WeakSet[ProcessGroup] = WeakSet()


class GlooNetwork:
    """Transfers between hosts by sends and receives of a gloo group. The constructor is collective.

    gloo's wait blocks, and a time limit on it would break all connections of the group. Threads
    therefore wait, and lanes poll the threads: a lane also checks for a failure of its call, ranks
    that disagree, and the timeout.

    gloo sends no data before the receiver has announced its receive, which takes one latency of the
    network. A call therefore posts all of its receives at the start, and waits for them on a
    separate lane while another lane sends step after step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._links = engine, GlooLinks(engine)
        self._sends, self._receives = Lane("network sends"), Lane("network receives")

    def send(self, program: Program, step: int) -> Op:
        """Send the data of a step. If the step posts signals, wait for its receives, too."""
        posts = bool(program.plan.steps[step].posts)
        outgoing = [message for message in messages(program.plan, step) if message.outward]
        moves = [(message.peer, parts_of(program, message)) for message in outgoing]

        def op(call: Call) -> None:
            state: CallState = call.state
            sent = [(peer, rows) for peer, rows_of in moves if (rows := rows_of(call))]
            parts = [(True, peer, bytes_of(joined(rows))) for peer, rows in sent]
            exchange = self._links.exchange(parts, state.timeout_s + DEATH_S)
            self._await(program, step, state, exchange, self._sends)
            state.sent[step].set()
            while posts and not state.moved[step].wait(SLICE_S):
                state.check()

        return op

    def receives(self, program: Program) -> list[Op]:
        """Operations that post all receives, then end step after step once it has also sent."""
        plan = program.plan
        moves = {
            index: [
                (message.peer, parts_of(program, message))
                for message in messages(plan, index)
                if not message.outward
            ]
            for index, step in enumerate(plan.steps)
            if step.op == "network"
        }

        def expect(call: Call) -> None:
            state: CallState = call.state
            for step, incoming in moves.items():
                parts, landings = [], []
                for peer, rows_of in incoming:
                    if rows := rows_of(call):
                        data = joint_room(rows)
                        landings.append((data, rows))
                        parts.append((False, peer, bytes_of(data)))
                exchange = self._links.exchange(parts, state.timeout_s + DEATH_S)
                self._links.expected.add(exchange)
                state.coming[step] = exchange, landings

        def receive(step: int, call: Call) -> None:
            state: CallState = call.state
            exchange, landings = state.coming.pop(step)
            self._await(program, step, state, exchange, self._receives)
            self._links.expected.remove(exchange)
            for data, rows in landings:
                take_apart(data, rows)
            while not state.sent[step].wait(SLICE_S):
                state.check()
            state.stamps.append((step, True, time.perf_counter()))
            state.moved[step].set()

        return [expect, *(partial(receive, step) for step in moves)]

    def _await(
        self, program: Program, step: int, state: CallState, exchange: PeerExchange, waiter: Lane
    ) -> None:
        patience, engine = Patience(), self._engine
        if not exchange.over.is_set():
            waiter.submit(exchange.run)

        def late(seconds: float, ended: bool = False) -> SignalTimeout:
            missing = Missing(step, exchange.peer)
            return engine.timed_out(program.plan, missing, seconds, ended)

        try:
            while not exchange.over.wait(SLICE_S):
                state.check()
                engine.interrupt()
                if error := patience.ends(state.timeout_s, late):
                    raise error
            if exchange.error is None:
                return
            lost = time.monotonic()
            while time.monotonic() - lost < DEATH_S:  # the peer may report why it failed
                state.check()
                engine.interrupt()
                time.sleep(SLICE_S)
            raise late(patience.seconds, ended=True) from exchange.error
        except BaseException:
            self._links.broken = True
            raise

    def close(self) -> None:
        """Leave the group."""
        for waiter in (self._sends, self._receives):
            waiter.close(join=False)
        self._links.close()


#: Lanes of a call with a caller's step: the operations before that step, and waits for its gates.
FIRST, ARRIVALS = "compute0 first", "arrivals"
#: The lane that receives from other hosts while the network lane sends.
RECEIVES = "network receives"


class CpuEngine(Engine):
    """See the module's docstring.

    Attributes:
        bandwidth: limit of each copy in bytes per second, to make copies visible in a timeline;
            None for no limit.
    """

    name = "cpu"
    bandwidth: float | None = None

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        hosts: Hosts | None = None,
        timeout_s: float = Engine.timeout_s,
    ) -> None:
        super().__init__(group, device, hosts)
        self.timeout_s, self._serial = timeout_s, 0
        self._lanes: dict[str, Lane] = {}
        self._counts: CpuMemory | None = None  # of the collectives that each rank has started
        self._in_flight = 0
        self._network: GlooNetwork | None = None

    def connect(self) -> None:
        if self.hosts.count > 1:
            self._network = GlooNetwork(self)

    @property
    def out_of_step(self) -> bool:
        return self.group in _out_of_step

    # Memory.

    def symmetric(self, nbytes: int) -> CpuMemory:
        self._serial += 1
        return CpuMemory(self, nbytes, self._serial)

    def slot_bytes(self, words: int, nbytes: int) -> int:
        return self._data(words) + nbytes

    def _data(self, words: int) -> int:
        """Offset of the data of a slot, after its words and the marks of its lanes."""
        return (words + 1) * SEMAPHORE_STRIDE

    def slot(self, memory: Symmetric, words: int, nbytes: int, captured: bool) -> Slot:
        assert isinstance(memory, CpuMemory)
        first = memory.addresses[self.rank]
        for word in range(words):
            # The words that hand the slot to the next call are 1 between calls: ficco.plan.Signal.
            semaphores().init(first + word * SEMAPHORE_STRIDE, int(word < self.world))
        memory.host.barrier(self.timeout_s)
        return Slot(memory, words, nbytes, self._data(words), captured)

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
                if take(word):
                    self._wait(program, call, step, signal, word)

        return op

    def _wait(self, program: Program, call: Call, step: int, signal: Signal, word: int) -> None:
        """Wait for a signal. Raise after the time limit, or once its poster ended without it."""
        state: CallState = call.state
        lane = program.plan.steps[step].lane
        begin = time.monotonic()
        while not semaphores().wait(word, SLICE_S):
            state.check()
            self.interrupt()
            if lane not in state.blocked:
                state.blocked[lane] = (step, signal, word, begin)
                self._mark(program, state, lane, 1)
            # Read the word after the process state, since a peer may post and then end.
            ended = dead(state.pids[signal.poster]) and not semaphores().value(word)
            limit, seconds = 0 if ended else state.timeout_s, time.monotonic() - begin
            patience = state.patience = state.patience or Patience()
            if late := patience.ends(limit, partial(self._late, program, state), seconds):
                raise late
        if state.blocked.pop(lane, None):
            self._mark(program, state, lane, 0)

    def post(self, program: Program, step: int, signals: Sequence[Signal]) -> Op:
        words = [self._word(program, signal) for signal in signals]
        post = semaphores().post

        def op(call: Call) -> None:
            for word in words:
                post(word)

        return op

    def record(self, program: Program, step: int) -> Op:
        if program.plan.steps[step].op == "network":
            return lambda call: None  # the lane that receives records it
        return lambda call: call.state.recorded[step].set()

    def join(self, program: Program, step: int, earlier: int) -> Op:
        moves = program.plan.steps[earlier].op == "network"

        def op(call: Call) -> None:
            events = call.state.moved if moves else call.state.recorded
            while not events[earlier].wait(SLICE_S):
                call.state.check()

        return op

    # The peer that a timeout names. If several lanes wait, one of their peers may itself wait for
    # another rank. Every rank therefore marks its waiting lanes in the slot, where peers read.

    def _mark(self, program: Program, state: CallState, lane: str, value: int) -> None:
        state.marks[self.rank][program.plan.lanes.index(lane) % SEMAPHORE_STRIDE] = value

    def _late(self, program: Program, state: CallState, _: float) -> SignalTimeout:
        """The error of the wait whose peer is the most likely cause: dead, or not waiting."""

        def order(wait: tuple[int, Signal, int, float]) -> tuple[bool, bool, float]:
            peer = wait[1].poster
            return not dead(state.pids[peer]), bool(state.marks[peer].any()), wait[3]

        step, signal, word, begin = min(list(state.blocked.values()), key=order)
        missing = Missing(step, signal.poster, 1, semaphores().value(word))
        ended = dead(state.pids[signal.poster])
        return self.timed_out(program.plan, missing, time.monotonic() - begin, ended)

    # Copies.

    def copy(self, program: Program, step: int, transfer: Transfer) -> Op:
        places, batch = buffers_of(program), transfer.batch
        nbytes = program.plan.moved_bytes(transfer)
        move = _move if transfer.mover == "dma" else torch.Tensor.copy_
        if filled(program.plan, transfer.src):
            return move_op(program, transfer, move)
        src = places.batch(transfer.src, batch, transfer.src_stride)
        dst = places.batch(transfer.dst, batch, transfer.dst_stride)

        def op(call: Call) -> None:
            begin = time.monotonic()
            move(dst(call), src(call))
            if self.bandwidth is not None:
                rest = nbytes / self.bandwidth - (time.monotonic() - begin)
                call.state.failed.wait(max(rest, 0))

        return op

    def place(self, program: Program, step: int, transfer: Transfer) -> Op:
        if transfer.function == MERGE:
            return merge_op(program, step, transfer, merge)
        return place_op(program, transfer)

    def cross(self, program: Program, step: int) -> Op:
        assert self._network is not None
        return self._network.send(program, step)

    def collective(self, program: Program, step: int) -> Op:
        """As on all engines, but a timeout of the call names the absent rank."""
        self._counts = self._counts or self.symmetric(COUNT_BYTES)
        return collective(self, self._counts, program, step)

    # Products.

    def matmul(self, program: Program, step: int, products: Sequence[Product]) -> Op:
        return matmul_op(program, products)

    def attend(self, program: Program, step: int, attends: Sequence[Attending]) -> Op:
        return attend_op(program, step, attends)

    def apply(self, program: Program, step: int, applied: Applied) -> Op:
        return apply_op(program, applied)

    def reduce(self, program: Program, step: int, reduction: Reduction) -> Op:
        view = buffers_of(program).view
        parts, out = [view(part) for part in reduction.parts], view(reduction.out)
        factor = program.plan.buffer[reduction.out.buffer].factor
        return lambda call: add_up(out(call), [part(call) for part in parts], factor)

    # Running.

    def execute(self, program: Program, call: Call) -> None:
        if program.plan.collective and "stamped" not in program.state:
            return self._alone(program, call)
        self._begin(program, call)
        self._end(program, call)

    def _alone(self, program: Program, call: Call) -> None:
        """Run a call of one lane, without the events that synchronize and stop lanes."""
        call.state = SoleLane(self.timeout_s)
        for _, op in program.ops:
            op(call)
        self.interrupt()  # as in `_end`

    @contextmanager
    def around(self, program: Program, call: Call) -> Iterator[None]:
        self._begin(program, call)
        try:
            yield
        except BaseException as error:
            call.state.fail(error)
        self._end(program, call)

    def _begin(self, program: Program, call: Call) -> None:
        """Start the lanes of a call, and run the operations before the caller's step."""
        lanes = program.state.get("lanes")
        if lanes is None:
            lanes = program.state["lanes"] = self._by_lane(program)
            steps = program.plan.steps
            program.state["recorded"] = sorted({i for step in steps for i in step.after})
            program.state["moves"] = [i for i, step in enumerate(steps) if step.op == "network"]
        state = call.state = CallState(program, self.timeout_s)
        self._in_flight += 1
        try:
            if gates := len(lanes.get(ARRIVALS, ())):
                state.words = torch.zeros(gates, dtype=torch.int32, device="cpu")
                state.arrived = [threading.Event() for _ in range(gates)]
            for lane, ops in lanes.items():
                if lane not in ("compute0", FIRST):
                    if lane not in self._lanes:
                        self._lanes[lane] = Lane(lane)
                    self._lanes[lane].submit(partial(state.run_lane, ops, call))
            if FIRST in lanes:
                state.run(lanes[FIRST], call)
        except BaseException as error:  # Ctrl-C
            raise self._stopped(state, error) from None
        if state.failed.is_set():
            self._end(program, call)

    def _end(self, program: Program, call: Call) -> None:
        """Run the rest of the caller's lane, and wait for the other lanes."""
        state: CallState = call.state
        try:
            state.run_lane(program.state["lanes"]["compute0"], call)
            state.done.wait()
        except BaseException as error:  # Ctrl-C
            raise self._stopped(state, error) from None
        self._in_flight -= 1
        if state.error is not None:
            raise state.error
        # A call can succeed with data that peers sent for a different call. Once the data of all
        # peers is there, so are their entries on the board: compare them now.
        self.interrupt()

    def _stopped(self, state: CallState, error: BaseException) -> BaseException:
        """Stop the lanes of an interrupted call from writing to the result; its first error."""
        state.fail(error)
        state.done.wait(JOIN_S)
        self._in_flight -= 1
        return state.error or error

    def _by_lane(self, program: Program) -> dict[str, list[Op]]:
        """The operations of each lane. A caller's step splits ``compute0``: earlier operations go
        to the lane ``FIRST``, and the lane ``ARRIVALS`` waits for the gates of the step."""
        lanes: dict[str, list[Op]] = {"compute0": []}
        for lane, op in program.ops:
            if op is callers:
                lanes[FIRST], lanes["compute0"] = lanes["compute0"], []
                if gates := self._gates(program):
                    lanes[ARRIVALS] = gates
            else:
                lanes.setdefault(lane, []).append(op)
        if self._network is not None and any(step.op == "network" for step in program.plan.steps):
            lanes[RECEIVES] = self._network.receives(program)
        return lanes

    def _gates(self, program: Program) -> list[Op]:
        """For each gate of the caller's step an operation that waits for it, then notifies."""
        steps = program.plan.steps
        index = next(i for i, step in enumerate(steps) if step.op == "call")

        def notify(gate: int, wait: Op, call: Call) -> None:
            wait(call)
            call.state.arrives(gate)

        return [
            partial(notify, gate, self.wait(program, index, (signal,)))
            for gate, signal in enumerate(steps[index].gates)
        ]

    def arrived(self, program: Program, step: int) -> Op:
        def op(call: Call) -> None:
            for event in call.state.arrived:
                while not event.wait(SLICE_S):
                    call.state.check()

        return op

    def words(self, program: Program, call: Call) -> torch.Tensor:
        state: CallState = call.state
        return (
            torch.zeros(0, dtype=torch.int32, device="cpu") if state.words is None else state.words
        )

    def await_rows(self, program: Program, call: Call, gate: int) -> None:
        state: CallState = call.state
        while not state.arrived[gate].wait(SLICE_S):
            if state.error is not None:
                raise state.error

    def stamp(self, program: Program, step: int, end: bool) -> Op:
        program.state["stamped"] = True
        if end and program.plan.steps[step].op == "network":
            return lambda call: None  # the lane that receives stamps it
        return lambda call: call.state.stamps.append((step, end, time.perf_counter()))

    def spans(self, program: Program, call: Call) -> list[Span]:
        state: CallState = call.state
        times = {(step, end): when - state.began for step, end, when in state.stamps}
        return [
            Span(step, program.plan.steps[step].lane, start, times[step, True])
            for (step, end), start in sorted(times.items())
            if not end and (step, True) in times
        ]

    def capabilities(self) -> Capabilities:
        return Capabilities(
            engine="cpu",
            post="sem_post on a process-shared POSIX semaphore in the waiter's memory",
            wait="sem_wait with a time limit; POSIX orders memory around both (POSIX.1-2017, 4.12)",
            copy="memmove by a thread per lane, one per row where rows are not adjacent; it shares "
            "the cores and the memory bandwidth with the products. Operands whose rows are "
            "strided inside are copied by PyTorch",
            movers=("dma", "kernel"),
            products=library(self.device),
            accumulate="into the product for float32 and float64; for bfloat16 and float16 into a "
            "float32 buffer of the product's size, from float32 copies of the pieces and of their "
            "rows of b, rounded once",
            capture=False,
            partial_signals=True,
            scaled=True,
            functions=PLACED,
            network="gloo" if self._network is not None else "",
        )

    def copy_engines(self) -> int:
        return 1  # every lane copies, but all share the cores and the memory bandwidth

    def close(self) -> None:
        for lane in self._lanes.values():
            # At exit a call of another thread may be stuck: do not join its lanes.
            lane.close(join=not self._in_flight)
        self._lanes.clear()
        if self._network is not None:
            self._network.close()
            self._network = None
        if self._counts is not None:
            self._counts.free()
            self._counts = None


def _move(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy a matrix, or a batch of matrices, by memmove: at once if the rows are adjacent at both
    ends, else row by row. PyTorch copies sources whose rows are not contiguous."""
    if src.dim() == 3:
        for dst_matrix, src_matrix in zip(dst, src, strict=True):
            _move(dst_matrix, src_matrix)
        return
    if src.stride(0) == dst.stride(0) == 1:  # both are transposed
        src, dst = src.t(), dst.t()
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
