"""Collectives of the group's library that name a rank that does not come.

By itself the library waits for half an hour, or says that a connection is lost. Here a lane looks
at a collective in slices, and every rank keeps count of those that it has begun, for its peers to
see.
"""

from __future__ import annotations

import atexit
import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
import torch.distributed as dist

from ficco.dma.collectives import Collectives, Start
from ficco.dma.cpu_lanes import SLICE_S, Run, timed_out
from ficco.dma.cpu_memory import CpuMemory
from ficco.dma.engine import Call, Engine, Op, Program
from ficco.dma.host import dead
from ficco.errors import BackendError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

#: What stands for a time limit that a duration of the library cannot hold, such as infinity.
LONGEST_S = 1e9
#: Seconds within which a peer whose connection is lost turns out to be dead, if it is.
DEATH_S = 1.0
#: Bytes of symmetric memory that each rank's count takes.
COUNT_BYTES = 64


class CpuCollectives:
    """The collectives of one engine. ``memory`` holds each rank's count of those it has begun."""

    def __init__(self, engine: Engine, memory: CpuMemory) -> None:
        self.engine, self.memory = engine, memory

    def op(self, program: Program, step: int) -> Op:
        rank, group = self.engine.rank, self.engine.group
        counts = [part.view(torch.int64) for part in self.memory.parts]
        pids = self.memory.host.pids
        exchange = Collectives(program.plan, step, rank, group)

        def missing() -> int | None:
            """The rank that is dead, or has begun fewer collectives than this one."""
            peers = [peer for peer in range(self.engine.world) if peer != rank]
            gone = [peer for peer in peers if dead(pids[peer])]
            late = [peer for peer in peers if counts[peer][0] < counts[rank][0]]
            return next(iter(gone + late), None)

        def op(call: Call) -> None:
            counts[rank][0] += 1
            # Its own time limit, which it keeps even where the call is broken off: see _outlive().
            patience = timedelta(seconds=min(call.state.timeout_s, LONGEST_S) + 1)
            begun: list[Work] = []
            try:
                for start in exchange.starts(call.tensors, patience):
                    self.collect(program, call, step, missing, partial(_begin, start, begun))
            except BaseException:
                _out_of_step.add(group)
                _outlive(group, begun)
                raise

        return op

    def collect(
        self,
        program: Program,
        call: Call,
        step: int,
        missing: Callable[[], int | None],
        start: Start,
    ) -> None:
        """Run a collective, or raise for the rank that is missing."""
        run: Run = call.state
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
                self.engine.interrupt()  # ranks that disagree also fail here
                while failed and missing() is None:
                    self.engine.interrupt()
                    # A connection is lost a little before the peer's process is gone.
                    if time.monotonic() - begin > DEATH_S:
                        library = str(dist.get_backend(self.engine.group))
                        text = str(error)
                        raise BackendError(f"collective of {library}", "error", text) from error
                    time.sleep(SLICE_S)
                seconds = time.monotonic() - begin
                if failed or (seconds > run.timeout_s and not work.is_completed()):
                    raise timed_out(program, step, missing(), seconds) from error


#: Collectives that were broken off, with their groups: to free one waits, inside the garbage
#: collector or at the end of the process, until its library has given up.
_unfinished: list[tuple[Work, ProcessGroup]] = []
#: Groups of which a collective was broken off: their ranks may have begun different numbers.
_out_of_step: WeakSet[ProcessGroup] = WeakSet()


def out_of_step(group: ProcessGroup) -> bool:
    """Whether a collective of a group was broken off."""
    return group in _out_of_step


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
