"""Finds calls that are stuck on a GPU, ranks that disagree, and ranks that have failed.

A call on a GPU returns before its work is over, and cannot raise an error that occurs later. So a
thread polls the progress of calls and the agreement board. Eager calls on CUDA record events when
they begin and end; captured calls, and all calls through HIP, write words to pinned host memory.
The thread makes no call that could break a capture.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from functools import partial
from typing import Protocol

from ficco.compute.program import Slot
from ficco.dma.engine import Engine, Missing
from ficco.dma.patience import DEFAULT_S, Patience
from ficco.errors import REVIVE, BackendError, FiccoError, SignalTimeout
from ficco.runtime.board import Board

#: Seconds between two polls.
PERIOD_S = 0.05
#: Seconds that a call gets after the process of a rank has ended. By then all signals that the rank
#: posted have arrived, and a call that needs no further signal is over.
ENDED_S = 0.5
#: Seconds that freeing the streams of a stuck call may take before the process ends.
RELEASE_S = 10.0
#: Seconds that earlier calls get to end by themselves after a call was interrupted.
SETTLE_S = 2.0


class Watched(Protocol):
    """Part of :class:`ficco.runtime.workspace.Workspace` that the watchdog uses."""

    engine: Engine
    board: Board
    calls: int
    error: FiccoError | None

    @property
    def slots(self) -> list[Slot]:
        """Slots with calls that may be in flight."""

    def fail(self, error: BaseException) -> None:
        """Make all further calls raise this error, and publish it to the peers."""


class Watchdog:
    """Thread that watches one workspace until it is stopped or finds a fault."""

    def __init__(self, workspace: Watched) -> None:
        self._workspace = workspace
        self._waits: dict[int, Patience] = {}  # by slot, since its running call was seen
        # By rank: time of the first poll after its process ended or its connection broke.
        self._ended: dict[int, float] = {}
        self._stop = threading.Event()
        self.timeout_s = DEFAULT_S
        self.on_timeout = "abort"
        self._thread = threading.Thread(target=self._run, name="ficco watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(PERIOD_S):
                if (error := self._fault()) is not None:
                    self._act(error)
                    break
            # Calls enqueued after the stuck call get stuck as well once they begin.
            while not self._stop.wait(PERIOD_S):
                self._release()
        except BaseException:  # a stuck call would never end without this thread
            traceback.print_exc()
            self._exit("the watchdog failed")

    def _fault(self) -> FiccoError | None:
        """The fault of the workspace, or the failure to look for one; None if all is well."""
        try:
            return self._look()
        except Exception as error:
            traceback.print_exc()
            return FiccoError(
                f"the watchdog failed with {type(error).__name__}: {error}. Calls of this group "
                f"are no longer watched. {REVIVE}"
            )

    def _release(self) -> bool:
        """Free this rank's streams from stuck waits; returns whether that succeeded."""
        try:
            return self._workspace.engine.release(self._workspace.slots, RELEASE_S)
        except Exception:
            traceback.print_exc()
            return False

    def _exit(self, why: str) -> None:
        print(f"ficco: {why}, ending this process", file=sys.stderr, flush=True)
        os._exit(1)

    def _look(self) -> FiccoError | None:
        workspace = self._workspace
        now = time.monotonic()
        stuck: FiccoError | None = None
        slots = workspace.slots
        present = {id(slot) for slot in slots}
        for rank in set(range(workspace.board.world)) - self._ended.keys():
            if workspace.board.ended(rank) or rank in workspace.engine.lost:
                self._ended[rank] = now
        self._waits = {key: wait for key, wait in self._waits.items() if key in present}
        for slot in slots:
            running, ended = workspace.engine.pulse(slot)
            if not running:
                self._waits.pop(id(slot), None)
                continue
            if ended or id(slot) not in self._waits:
                self._waits[id(slot)] = Patience()
                continue
            wait = self._waits[id(slot)]
            stuck = stuck or wait.ends(self.timeout_s, partial(self._timeout, slot, running))
            if self._ended and now - max(wait.begin, *self._ended.values()) > ENDED_S:
                stuck = stuck or self._orphaned(slot, running, wait.seconds)
        # An error of this workspace comes first: an interrupted call may have left others waiting.
        # A mismatch comes next: mismatched calls can end before a timeout, with wrong results.
        return workspace.error or workspace.board.mismatch(workspace.calls) or stuck

    def _orphaned(self, slot: Slot, running: int, seconds: float) -> SignalTimeout | None:
        """The error of a call that waits for a signal of a rank whose process has ended."""
        if (program := slot.programs.get(running)) is None:
            return None
        missing = self._workspace.engine.missing(slot, program)
        if missing is None or missing.peer not in self._ended:
            return None
        return self._workspace.engine.timed_out(program.plan, missing, seconds, ended=True)

    def _timeout(self, slot: Slot, running: int, seconds: float) -> SignalTimeout:
        engine = self._workspace.engine
        program = slot.programs.get(running)
        if program is None:  # forgotten since it was called
            return SignalTimeout(operator=engine.operator, rank=engine.rank, seconds=seconds)
        missing = engine.missing(slot, program)
        if missing is None:
            operator, schedule = program.plan.problem.operator, program.plan.schedule
            return SignalTimeout(
                operator=operator, rank=engine.rank, schedule=schedule, seconds=seconds
            )
        silent = self._workspace.board.silent()
        if silent and missing.peer not in silent:  # the peer itself waits for a silent rank
            missing = Missing(missing.step, silent[0])
        return engine.timed_out(program.plan, missing, seconds)

    def _act(self, error: FiccoError) -> None:
        workspace = self._workspace
        if workspace.error is not None:  # the caller has got it as an exception
            end = time.monotonic() + SETTLE_S
            with contextlib.suppress(BackendError):  # raised by a lost device, which is idle
                while not workspace.engine.idle(workspace.slots) and time.monotonic() < end:
                    time.sleep(PERIOD_S)
            return
        workspace.fail(error)
        print(f"ficco: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if self.on_timeout == "abort":
            workspace.board.close()  # publishes the error to other hosts
            self._exit("on_timeout='abort'")
        if not self._release():
            self._exit("the streams could not be freed")
