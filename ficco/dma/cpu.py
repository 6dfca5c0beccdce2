"""CPUs: shared host memory, POSIX semaphores and PyTorch's own matrix product.

The reference engine: it runs every Plan on any Linux machine. Every lane is a thread; ``compute0``
is the caller's own. Buffers lie in host memory that the ranks share, and a signal is a semaphore in
the waiter's memory. Calls are synchronous and raise their own errors.

Ordering: writes of a lane before it posts a semaphore are visible to the lane whose wait takes it,
see :class:`ficco.dma.host.Semaphores`. Lanes of one rank synchronize through threading events.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from ficco.compute.attention import attend_op, merge, merge_op
from ficco.compute.buffers import buffers_of, gathered_rows
from ficco.compute.heads import apply_op
from ficco.compute.products import add_up, library, matmul_op, place_op
from ficco.compute.program import Call, Op, Program, Slot, Symmetric, callers
from ficco.compute.ragged_blocks import filled, move_op
from ficco.dma.cpu_collectives import COUNT_BYTES, collective, out_of_step
from ficco.dma.cpu_lanes import JOIN_S, SLICE_S, CallState, CpuMemory, Lane
from ficco.dma.cpu_network import GlooNetwork
from ficco.dma.engine import Capabilities, Engine, Missing, Span, timed_out
from ficco.dma.host import SEMAPHORE_STRIDE, dead, semaphores
from ficco.dma.hosts import Hosts
from ficco.dma.patience import Patience
from ficco.errors import SignalTimeout
from ficco.plan import Applied, Attending, Product, Reduction, Signal, Transfer
from ficco.problems.specification import MERGE, PLACED

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


#: Lanes of a call with a caller's step: the operations before that step, and waits for its gates.
FIRST, ARRIVALS = "compute0 first", "arrivals"
#: The lane that receives from other hosts while the network lane sends.
RECEIVES = "network receives"


class CpuEngine(Engine):
    """See the module's docstring.

    Attributes:
        operator: name of the operator in errors of an allocation.
        bandwidth: limit of each copy in bytes per second, to make copies visible in a timeline;
            None for no limit.
    """

    name = "cpu"
    operator = "ficco"
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
        return out_of_step(self.group)

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
        state: CallState = call.state
        lane = program.plan.steps[step].lane
        begin = time.monotonic()
        while not semaphores().wait(word, SLICE_S):
            state.check()
            self.interrupt()
            if lane not in state.blocked:
                state.blocked[lane] = (step, signal, word, begin)
                self._mark(program, state, lane, 1)
            # Read the word after the process state: a peer may post and then end.
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
        host = self.hosts.named(signal.poster)
        return timed_out(program.plan, missing, time.monotonic() - begin, ended, host)

    # Copies.

    def copy(self, program: Program, step: int, transfer: Transfer, mover: str) -> Op:
        places, batch = buffers_of(program), transfer.batch
        nbytes = program.plan.moved_bytes(transfer)
        move = _move if mover == "dma" else torch.Tensor.copy_
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

    def network(self, program: Program, step: int) -> Op:
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
        return lambda call: add_up(out(call), [part(call) for part in parts])

    # Running.

    def execute(self, program: Program, call: Call) -> None:
        with self.around(program, call):
            pass

    @contextmanager
    def around(self, program: Program, call: Call) -> Iterator[None]:
        lanes = program.state.get("lanes")
        if lanes is None:
            lanes = program.state["lanes"] = self._by_lane(program)
            steps = program.plan.steps
            program.state["recorded"] = sorted({i for step in steps for i in step.after})
            program.state["moves"] = [i for i, step in enumerate(steps) if step.op == "network"]
        state = call.state = CallState(
            len(lanes) - (FIRST in lanes),
            program.state["recorded"],
            self.timeout_s,
            program.slot,
            program.state["moves"],
        )
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
            state.run(lanes.get(FIRST, ()), call)
            try:
                if not state.failed.is_set():
                    yield
            except BaseException as error:
                state.fail(error)
            state.run_lane(lanes["compute0"], call)
            state.done.wait()
        except BaseException as error:  # Ctrl-C: stop lanes from writing to the result
            state.fail(error)
            state.done.wait(JOIN_S)
        finally:
            self._in_flight -= 1
        if state.error is not None:
            raise state.error
        # A call can succeed with data that peers sent for a different call. Once the data of all
        # peers is there, so are their entries on the board: compare them now.
        self.interrupt()

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

    def rows(self, program: Program, call: Call) -> torch.Tensor:
        return gathered_rows(program, call)

    def await_rows(self, program: Program, call: Call, gate: int) -> None:
        state: CallState = call.state
        while not state.arrived[gate].wait(SLICE_S):
            if state.error is not None:
                raise state.error

    def stamp(self, program: Program, step: int, end: bool) -> Op:
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
