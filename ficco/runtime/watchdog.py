"""Finds calls that are stuck on a GPU, ranks that disagree, and ranks that have failed.

A call on a GPU returns long before its work is over, and cannot raise an error that occurs later.
Instead a thread polls the progress of calls and the agreement board. Eager calls on CUDA record
events when they begin and end; captured calls, and all calls through HIP, write words to pinned
host memory. The thread makes no call that could break a capture.
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

from ficco.compute.program import Program, Slot
from ficco.dma.engine import Engine, Missing, timed_out
from ficco.dma.patience import DEFAULT_S, Patience
from ficco.errors import REVIVE, BackendError, FiccoError, SignalTimeout
from ficco.runtime.board import Board

#: Seconds between two looks.
PERIOD_S = 0.05
#: Seconds for which a call still runs once the process of a rank has ended: what that has posted is
#: there by then, and a call that has all it needs is over.
ENDED_S = 0.5
#: Seconds that freeing the streams of a stuck call may take before the process ends.
RELEASE_S = 10.0
#: Seconds that earlier calls have to end by themselves after a call was broken off.
SETTLE_S = 2.0


class Watched(Protocol):
    """What the watchdog reads of a :class:`ficco.runtime.workspace.Workspace`."""

    engine: Engine
    board: Board
    calls: int
    error: FiccoError | None

    @property
    def slots(self) -> list[Slot]:
        """All slots on which calls may be in flight."""

    def fail(self, error: BaseException) -> None:
        """Refuse all further calls with this error, and tell the peers."""


class Watchdog:
    """A thread that watches one workspace until it is stopped or has found a fault."""

    def __init__(self, workspace: Watched) -> None:
        self._workspace = workspace
        self._waits: dict[int, Patience] = {}  # slot -> since its running call was first seen
        # Rank -> when its process was first seen to have ended, or its connection to have broken.
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
                if (error := self._found()) is not None:
                    self._act(error)
                    break
            # Calls that were enqueued after the stuck one are stuck, too, once they begin.
            while not self._stop.wait(PERIOD_S):
                self._release()
        except BaseException:  # nobody would end a stuck call from here on
            traceback.print_exc()
            self._exit("the watchdog failed")

    def _found(self) -> FiccoError | None:
        """What is wrong, if only that it cannot be told."""
        try:
            return self._look()
        except Exception as error:
            traceback.print_exc()
            return FiccoError(
                f"the watchdog failed with {type(error).__name__}: {error}. Calls of this group "
                f"are no longer watched. {REVIVE}"
            )

    def _release(self) -> bool:
        """Whether this rank's streams could be freed."""
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
        there = {id(slot) for slot in slots}
        for rank in set(range(workspace.board.world)) - self._ended.keys():
            if workspace.board.ended(rank) or rank in workspace.engine.lost:
                self._ended[rank] = now
        self._waits = {key: wait for key, wait in self._waits.items() if key in there}
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
        # A mismatch comes first: mismatched calls can end, with wrong results, before a timeout.
        # An error of this workspace, too: a call that broke off may have left others waiting.
        return workspace.error or workspace.board.mismatch(workspace.calls) or stuck

    def _orphaned(self, slot: Slot, running: int, seconds: float) -> SignalTimeout | None:
        """The error of a call that waits for a signal of a rank whose process has ended."""
        if (program := slot.programs.get(running)) is None:
            return None
        missing = self._workspace.engine.missing(slot, program)
        if missing is None or missing.peer not in self._ended:
            return None
        return self._timed_out(program, missing, seconds, ended=True)

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
        if silent and missing.peer not in silent:  # it waits for a rank that waits for this one
            missing = Missing(missing.step, silent[0])
        return self._timed_out(program, missing, seconds)

    def _timed_out(
        self, program: Program, missing: Missing, seconds: float, ended: bool = False
    ) -> SignalTimeout:
        host = self._workspace.engine.hosts.named(missing.peer)
        return timed_out(program.plan, missing, seconds, ended, host)

    def _act(self, error: FiccoError) -> None:
        workspace = self._workspace
        if workspace.error is not None:  # an exception has already reported it to the caller
            end = time.monotonic() + SETTLE_S
            with contextlib.suppress(BackendError):  # a device that is lost runs nothing
                while not workspace.engine.idle(workspace.slots) and time.monotonic() < end:
                    time.sleep(PERIOD_S)
            return
        workspace.fail(error)
        print(f"ficco: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if self.on_timeout == "abort":
            workspace.board.close()  # which tells other hosts what was found
            self._exit("on_timeout='abort'")
        if not self._release():
            self._exit("the streams could not be freed")
