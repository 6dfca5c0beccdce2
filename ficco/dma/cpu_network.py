"""What goes between hosts on CPUs: sends and receives of a gloo group, waited for by a thread.

gloo's wait blocks, and a time limit on it would break all of the group's connections. So one thread
waits, and lanes look after it: they see that their call has failed, that ranks disagree, and the
time.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ficco.dma.buffers import buffers_of
from ficco.dma.cpu_collectives import DEATH_S, LONGEST_S
from ficco.dma.cpu_lanes import SLICE_S, CallState, Lane
from ficco.dma.engine import Call, Engine, Missing, Op, Program, timed_out
from ficco.errors import SignalTimeout

if TYPE_CHECKING:
    from torch.distributed import Work


#: Groups with messages under way when their call failed: to free one would wait for them.
_left: list[dist.ProcessGroupGloo] = []


@atexit.register
def _leave() -> None:
    """Never free them, so that the process exits at once."""
    if _left:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_left))


class _Wait:
    """Starts works and waits for their end.

    Attributes:
        over: all have ended, or one has failed.
        peer: of the work that is waited for, or of the one that failed.
        error: of that one.
    """

    def __init__(self, starts: list[tuple[int, Callable[[], Work]]], seconds: float) -> None:
        self.over, self.peer = threading.Event(), starts[0][0] if starts else 0
        self.error: RuntimeError | None = None
        self._limit = timedelta(seconds=min(seconds, LONGEST_S))
        self._works: list[tuple[int, Work]] = []  # which keep their tensors
        try:  # at once, so that messages keep their order
            for peer, start in starts:
                self.peer = peer
                self._works.append((peer, start()))
        except RuntimeError as error:
            self.error = error
            self.over.set()

    def run(self) -> None:
        try:
            for peer, work in self._works:
                self.peer = peer
                work.wait(self._limit)
        except RuntimeError as error:
            self.error = error
        self.over.set()


class GlooNetwork:
    """A rank's connections with other hosts, by a group of its own, since the caller's has other
    uses. The constructor is collective."""

    def __init__(self, engine: Engine) -> None:
        self._engine, limit = engine, timedelta(seconds=min(engine.timeout_s, LONGEST_S))
        store = engine.hosts.store("network")
        begin = time.monotonic()
        try:
            self._group: Any = dist.ProcessGroupGloo(store, engine.rank, engine.world, limit)
        except RuntimeError as error:
            raise SignalTimeout(
                operator=engine.operator,
                rank=engine.rank,
                step=f"connect with the ranks of other hosts: {error}",
                seconds=time.monotonic() - begin,
            ) from error
        self._waiter = Lane("network waits")
        self._sent: Counter[int] = Counter()  # by peer: messages have numbers
        self._received: Counter[int] = Counter()
        self._broken = False

    def op(self, program: Program, step: int) -> Op:
        """Send and receive what a step moves."""
        view, me = buffers_of(program).view, program.plan.rank
        moves = []
        for move in program.plan.steps[step].moves:
            outward = move.src.rank == me
            mine = view(move.src if outward else move.dst)
            if move.src.elements:
                moves.append((outward, move.dst.rank if outward else move.src.rank, mine))

        def op(call: Call) -> None:
            starts: list[tuple[int, Callable[[], Work]]] = []
            landed = []
            for outward, peer, mine in moves:
                part = mine(call)
                if outward:
                    number, self._sent[peer] = self._sent[peer], self._sent[peer] + 1
                    data = part.contiguous().view(torch.uint8)
                    starts.append((peer, partial(self._group.send, [data], peer, number)))
                else:
                    number, self._received[peer] = self._received[peer], self._received[peer] + 1
                    data = part if part.is_contiguous() else torch.empty_like(part.contiguous())
                    landed.append((part, data))
                    data = data.view(torch.uint8)
                    starts.append((peer, partial(self._group.recv, [data], peer, number)))
            self._await(program, step, call.state, starts)
            for part, data in landed:
                if part is not data:
                    part.copy_(data)

        return op

    def _await(
        self,
        program: Program,
        step: int,
        state: CallState,
        starts: list[tuple[int, Callable[[], Work]]],
    ) -> None:
        begin, engine = time.monotonic(), self._engine
        wait = _Wait(starts, state.timeout_s + DEATH_S)
        if not wait.over.is_set():
            self._waiter.submit(wait.run)
        late = partial(timed_out, program.plan)
        try:
            while not wait.over.wait(SLICE_S):
                state.check()
                engine.interrupt()
                if (seconds := time.monotonic() - begin) > state.timeout_s:
                    host = engine.hosts.named(wait.peer)
                    raise late(Missing(step, wait.peer), seconds, host=host)
            if wait.error is None:
                return
            lost = time.monotonic()
            while time.monotonic() - lost < DEATH_S:  # the peer may say why it is gone
                state.check()
                engine.interrupt()
                time.sleep(SLICE_S)
            seconds, host = time.monotonic() - begin, engine.hosts.named(wait.peer)
            raise late(Missing(step, wait.peer), seconds, ended=True, host=host) from wait.error
        except BaseException:
            self._broken = True
            raise

    def close(self) -> None:
        """Leave the group. After a failure what is under way stays so until gloo gives up."""
        self._waiter.close(join=False)
        if self._broken:
            _left.append(self._group)
