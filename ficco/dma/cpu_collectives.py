"""Collectives of the group's library whose errors name the absent rank.

The library itself waits for half an hour, or reports a lost connection. Here a lane waits for a
collective in slices, and every rank counts the collectives that it has started in shared memory.
"""

from __future__ import annotations

import atexit
import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
import torch.distributed as dist

from ficco.compute.program import Call, Op, Program
from ficco.dma import collectives
from ficco.dma.collectives import LONGEST_S
from ficco.dma.cpu_lanes import SLICE_S, CallState, CpuMemory
from ficco.dma.engine import Engine, Missing, timed_out
from ficco.dma.host import dead
from ficco.dma.patience import Patience
from ficco.errors import BackendError, SignalTimeout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

#: Seconds after a lost connection within which the death of a peer's process is detected.
DEATH_S = 1.0
#: Bytes of symmetric memory that each rank's count takes.
COUNT_BYTES = 64


def collective(engine: Engine, memory: CpuMemory, program: Program, step: int) -> Op:
    """The exchange of a step. ``memory`` holds the number of collectives each rank has started."""
    plan, group = program.plan, engine.group
    counts = [part.view(torch.int64) for part in memory.parts]
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
            for start in collectives.starts(plan, step, group, call.tensors, timeout):
                collect(engine, program, call, step, missing, start)
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
    start: collectives.Start,
) -> None:
    """Run a collective, or raise an error that names the missing rank."""
    state: CallState = call.state
    patience = Patience()

    def timeout(seconds: float) -> SignalTimeout:
        peer, ended = missing()
        host = engine.hosts.named(peer)
        return timed_out(program.plan, Missing(step, peer), seconds, ended, host)

    work: Work | None = None
    try:
        while True:
            failed = True  # whether an error is a failure, not the end of a slice
            try:
                work = work or start()
                if work is not None:
                    failed = work.is_completed()
                    work.wait(timedelta(seconds=SLICE_S))
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
_unfinished: list[tuple[Work, ProcessGroup]] = []
#: Groups that aborted a collective: their ranks may have started different numbers of them.
_out_of_step: WeakSet[ProcessGroup] = WeakSet()


def out_of_step(group: ProcessGroup) -> bool:
    """Whether a group aborted a collective."""
    return group in _out_of_step


@atexit.register
def _leave_unfinished() -> None:
    """Never free unfinished collectives, so that the process exits at once."""
    if _unfinished:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_unfinished))
