"""Transfers between hosts on GPUs: by NCCL (RCCL) on a lane's stream, or by gloo through the host.

The library is NCCL if NCCL is the caller's group's backend for GPUs, else gloo, which also serves
ranks that share a GPU. Both use a separate group of ficco's. The calling thread never waits, and
steps run in the order in which they are enqueued.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ficco.compute.buffers import buffers_of
from ficco.compute.program import Call, Op, Program
from ficco.dma.collectives import LONGEST_S
from ficco.dma.driver import WAIT_32, WORD, WRITE_32, MemOp, StreamEngine, drained
from ficco.dma.engine import Missing
from ficco.dma.lane_ops import MakeBatch
from ficco.dma.memories import align
from ficco.dma.messages import (
    GlooLinks,
    PeerExchange,
    bytes_of,
    joined,
    joint_room,
    messages,
    most_bytes,
    parts_of,
    put_together,
    take_apart,
)
from ficco.dma.patience import Patience
from ficco.errors import BackendError, FiccoError, SignalTimeout
from ficco.plan import Plan

#: Thread blocks, and so SMs, that NCCL may take from products for transfers between hosts. The
#: variable NCCL_MAX_CTAS takes precedence. Assumed: never measured on a network between hosts.
MAX_CTAS = 4
#: The longest pause in seconds between two polls of a word that a stream writes.
LOOK_S = 1e-4
#: Seconds that closing waits for the library.
CLOSE_S = 3.0
#: NCCL's name of the error of a lost peer.
REMOTE = "ncclRemoteError"
#: PyTorch's variable for what its watchdog does when a peer is lost, and the value for nothing. By
#: default it ends the process before ficco's watchdog can report which rank is missing.
ON_ERROR, NOTHING = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"


class GpuNetwork(ABC):
    """A rank's connections with other hosts. The constructor is collective.

    Attributes:
        name: description of the library, for reports.
        uncaptured: why graphs do not capture transfers, and what to do; empty if they do.
        lost: ranks of other hosts whose connection has broken.
    """

    name: str
    uncaptured: str = ""
    #: Whether a thread of this process completes the steps.
    threaded = False

    def __init__(self, engine: StreamEngine, batch: MakeBatch) -> None:
        """``batch`` prepares waits and writes of a stream."""
        self._engine, self._batch = engine, batch
        self.lost: set[int] = set()

    @abstractmethod
    def op(self, program: Program, step: int) -> Op:
        """Send and receive the data of a step, on the step's lane."""

    @abstractmethod
    def missing(self, plan: Plan) -> Missing | None:
        """The network step that the lane executes, and the peer that it waits for; None if it is
        not a step of this Plan."""

    @abstractmethod
    def give_up(self) -> None:
        """Release the lane from its waits, whether data arrives or not. May be called again."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. All calls are complete or have been given up."""


def network_of(engine: StreamEngine, batch: MakeBatch) -> GpuNetwork:
    """The network of an engine whose ranks are on several hosts. Collective.

    Raises:
        SignalTimeout: a rank of another host is absent, or cannot be reached.
    """
    backend = engine.group._get_backend(engine.device).name().lower()
    return (NcclNetwork if backend == "nccl" else GlooRelay)(engine, batch)


# gloo, through host memory.


class _Job(NamedTuple):
    """A network step for the relay's thread: contiguous bytes to send and receive."""

    plan: Plan
    step: int
    parts: Sequence[tuple[bool, int, torch.Tensor]]


class _Staged(NamedTuple):
    """A message in host memory, and a function for the tensors of a call on the device."""

    outward: bool
    peer: int
    data: torch.Tensor
    parts: Callable[[Call], list[torch.Tensor]]


class GlooRelay(GpuNetwork):
    """A thread that sends data which streams have copied to pinned memory, and receives into it.

    The stream writes a word when it reaches a step, and waits for a second word, which the thread
    writes when the step is complete. The thread never calls the device's runtime, so neither full
    streams nor threads that wait for them can block it. All steps use the same memory, since they
    run one after the other.
    """

    name = "gloo through pinned host memory"
    threaded = True
    uncaptured = (
        "gloo moves the data between the hosts of this group, which graphs cannot capture; make "
        "the call outside of the capture, or use an NCCL group"
    )

    def __init__(self, engine: StreamEngine, batch: MakeBatch) -> None:
        super().__init__(engine, batch)
        self._links = GlooLinks(engine)
        self._reached = engine.driver.host(WORD)
        self._done = engine.driver.waitable(engine.means.words)
        # All are kept: the thread may drop the last view of one, and to free pinned memory PyTorch
        # calls the device's runtime.
        self._pinned = [torch.empty(0, dtype=torch.uint8, device="cpu")]
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._current: tuple[_Job, PeerExchange] | None = None
        self._stopped, self._writing = False, threading.Lock()
        thread = threading.Thread(target=self._serve, name="ficco network", daemon=True)
        thread.start()

    def op(self, program: Program, step: int) -> Op:
        lane, driver = program.plan.steps[step].lane, self._engine.driver
        if not (moves := messages(program.plan, step)):
            return lambda call: None
        plan, dtype = program.plan, buffers_of(program).dtype
        buffers = self._buffers([most_bytes(plan, move) for move in moves])
        staged = [
            _Staged(move.outward, move.peer, data.view(dtype(move.region)), parts_of(program, move))
            for move, data in zip(moves, buffers, strict=True)
        ]
        reach, wait = MemOp(WRITE_32, self._reached, 1), MemOp(WAIT_32, self._done, 1)
        meet = self._batch([reach, wait, MemOp(WRITE_32, self._done, 0)])

        def pack(call: Call) -> None:
            for message in staged:
                if message.outward and (parts := message.parts(call)):
                    put_together(parts, message.data[: _elements(parts)])

        def land(call: Call) -> None:
            for message in staged:
                if not message.outward and (parts := message.parts(call)):
                    take_apart(message.data[: _elements(parts)], parts)

        begin, end = (driver.on_lane(lane, function) for function in (pack, land))

        def op(call: Call) -> None:
            counts = [(msg, count) for msg in staged if (count := _elements(msg.parts(call)))]
            if not counts:
                return
            begin(call)
            parts = [(msg.outward, msg.peer, bytes_of(msg.data[:count])) for msg, count in counts]
            self._jobs.put(_Job(plan, step, parts))
            meet.enqueue(call.state[lane])
            end(call)

        return op

    def _buffers(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Buffers of the given sizes in bytes, cut from the pinned memory."""
        total = sum(aligned := [align(size) for size in sizes])
        with torch.inference_mode(False):  # calls of other modes use it, too
            if total > (before := self._pinned[-1].numel()):  # older buffers stay in use
                with self._engine.driver.aside():
                    self._pinned.append(self._engine.driver.pinned(max(total, 2 * before)))
            parts = self._pinned[-1][:total].split(aligned)
            return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def _serve(self) -> None:
        reached, done = map(ctypes.c_uint32.from_address, (self._reached, self._done))
        while (job := self._jobs.get()) is not None:
            pause = 1e-5
            while not reached.value:
                if self._stopped:
                    return
                time.sleep(pause)
                pause = min(2 * pause, LOOK_S)
            reached.value = 0
            exchange = self._links.exchange(job.parts)
            self._current = job, exchange
            exchange.run()
            if exchange.error is not None:
                self.lost.add(exchange.peer)
                return
            self._current = None
            with self._writing:
                if self._stopped:
                    return
                done.value = 1

    def missing(self, plan: Plan) -> Missing | None:
        if (current := self._current) is None or current[0].plan is not plan:
            return None
        job, exchange = current
        return Missing(job.step, exchange.peer)

    def give_up(self) -> None:
        with self._writing:
            self._stopped = True
        ctypes.c_uint32.from_address(self._done).value = 1

    def close(self) -> None:
        with self._writing:
            self._stopped = True
        self._jobs.put(None)
        self._links.broken = self._current is not None
        self._links.close()


def _elements(parts: Sequence[torch.Tensor]) -> int:
    return sum(part.numel() for part in parts)


# NCCL, on the lane's stream.


class NcclNetwork(GpuNetwork):
    """NCCL's sends and receives, grouped for each step.

    The stream writes the number of a step, from 1, to a host word before the step, and 0 after it.
    The word shows the step at which a lane is stuck.
    """

    def __init__(self, engine: StreamEngine, batch: MakeBatch) -> None:
        super().__init__(engine, batch)
        self.name = f"NCCL on at most {MAX_CTAS} SMs (NCCL_MAX_CTAS)"
        self._at = engine.driver.host(WORD)
        self._connected: set[tuple[bool, int]] = set()
        self._aborted = False
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=LONGEST_S)  # ficco's watchdog enforces timeouts
        options.config.max_ctas = MAX_CTAS
        store = engine.hosts.store("network")
        with _variable(ON_ERROR, NOTHING):
            self._backend = dist.ProcessGroupNCCL(store, engine.rank, engine.world, options)
        self._group: Any = dist.ProcessGroup(store, engine.rank, engine.world)
        kind = dist.ProcessGroup.BackendType.NCCL
        self._group._register_backend(engine.device, kind, self._backend)
        self._group._set_default_backend(kind)
        self._connect({(outward, peer) for peer in engine.hosts.rail for outward in (True, False)})

    def _connect(self, ways: set[tuple[bool, int]]) -> None:
        """Send to peers, or receive from them, for the first time. NCCL then connects and blocks
        its thread. Both ends of a connection call this at the same step."""
        engine = self._engine
        failed: list[RuntimeError] = []

        def connect() -> None:
            try:
                with engine.driver.aside(), torch.cuda.stream(engine.side.torch):
                    words = torch.zeros(len(ways), 1, dtype=torch.uint8, device=engine.device)
                    self._move(
                        [(*way, word) for way, word in zip(sorted(ways), words, strict=True)]
                    )
            except RuntimeError as error:
                failed.append(error)

        def late(seconds: float) -> SignalTimeout:
            why = f": {failed[0]}" if failed else ""
            return SignalTimeout(
                operator=engine.operator,
                rank=engine.rank,
                peer=min(peer for _, peer in ways),
                step=f"connect with the ranks of other hosts{why}",
                seconds=seconds,
            )

        def interrupt() -> None:
            engine.interrupt()
            if error := patience.ends(engine.timeout_s, late):
                raise error

        patience = Patience()
        thread = threading.Thread(target=connect, name="ficco connects", daemon=True)
        thread.start()
        drained(lambda: not thread.is_alive(), math.inf, interrupt)
        if failed:
            raise late(patience.seconds) from failed[0]
        with engine.driver.aside():
            drained(partial(engine.driver.idle, engine.side.handle), math.inf, interrupt)
        self._connected |= ways

    def _move(self, parts: Sequence[tuple[bool, int, torch.Tensor]]) -> None:
        """Enqueue sends and receives on the current stream, as one NCCL group."""
        group, device = self._group, self._engine.device
        group._start_coalescing(device)
        for outward, peer, data in parts:
            (group.send if outward else group.recv)([data], peer, 0)
        group._end_coalescing(device).wait()  # the stream waits, not this thread

    def op(self, program: Program, step: int) -> Op:
        lane = program.plan.steps[step].lane
        if not (transfers := messages(program.plan, step)):
            return lambda call: None
        if new := {(move.outward, move.peer) for move in transfers} - self._connected:
            if self._engine.capturing():
                raise NotImplementedError(
                    f"rank {self._engine.rank} has not exchanged data with rank "
                    f"{min(peer for _, peer in new)} of another host yet, and NCCL cannot connect "
                    "in a capture; make the call once before the capture"
                )
            self._connect(new)
        moves = [(message, parts_of(program, message)) for message in transfers]
        reached, over = (self._batch([MemOp(WRITE_32, self._at, n)]) for n in (step + 1, 0))

        def move(call: Call) -> None:
            # In a capture NCCL registers the buffers it can. Replays of long messages hung, it
            # seems if only one end was registered. Both ends now use memory of the graph's pool.
            parts, landings, capturing = [], [], bool(self._engine.capturing())
            for message, rows_of in moves:
                if not (rows := rows_of(call)):
                    continue
                data = joined(rows) if message.outward else joint_room(rows)
                if capturing and data is rows[0]:
                    data = data.clone() if message.outward else torch.empty_like(data)
                if not message.outward:
                    landings.append((data, rows))
                parts.append((message.outward, message.peer, bytes_of(data)))
            if not parts:
                return
            try:
                self._move(parts)
            except RuntimeError as error:
                raise self._refused(program.plan, step, error) from error
            for data, rows in landings:
                take_apart(data, rows)

        carry_out = self._engine.driver.on_lane(lane, move)

        def op(call: Call) -> None:
            reached.enqueue(call.state[lane])
            carry_out(call)
            over.enqueue(call.state[lane])

        return op

    def _refused(self, plan: Plan, step: int, error: RuntimeError) -> FiccoError:
        """The error of a step that NCCL refuses, for example after a peer was lost."""
        if REMOTE not in str(error):
            return BackendError("send and receive of NCCL", "error", str(error))
        missing = Missing(step, self._peer(plan, step))
        return self._engine.timed_out(plan, missing, 0.0, ended=True)

    def _peer(self, plan: Plan, step: int) -> int | None:
        """The peer that a step waits for: the one it receives from, since a receive waits longer
        than a send; None if there are several."""
        moves = messages(plan, step)
        peers = {move.peer for move in moves if not move.outward} or {move.peer for move in moves}
        return peers.pop() if len(peers) == 1 else None

    def missing(self, plan: Plan) -> Missing | None:
        step = ctypes.c_uint32.from_address(self._at).value - 1
        if not 0 <= step < len(plan.steps) or plan.steps[step].op != "network":
            return None
        return Missing(step, self._peer(plan, step))

    def give_up(self) -> None:
        if not self._aborted:
            self._aborted = True
            threading.Thread(target=self._backend.abort, daemon=True).start()

    def close(self) -> None:
        # Do not abort: data that a peer has yet to receive may still be in this process.
        thread = threading.Thread(target=self._backend.shutdown, daemon=True)
        if not self._aborted:
            thread.start()
            thread.join(CLOSE_S)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable, which libraries read, within this block."""
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous
