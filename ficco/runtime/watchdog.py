"""Finds calls that are stuck on a GPU, ranks that disagree, and ranks that have failed.

A call on a GPU returns before its work is over, and cannot raise an error that occurs later. So a
thread polls the progress of calls and the agreement board. Eager calls on CUDA record events when
they begin and end; captured calls, and all calls through HIP, write words to pinned host memory.
The thread makes no call that could break a capture.

A call of the driver can block without limit while another thread of the process is inside the
driver: with CUDA, copies do while a thread loads a kernel or instantiates a graph, which may wait
for the device (docs/results/engine.md). So a second thread makes the calls of the driver, and the
watchdog waits for it as long as it has time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from ficco.compute.program import Program, Slot
from ficco.dma.engine import Engine, Missing
from ficco.dma.patience import DEFAULT_S, Patience
from ficco.errors import REVIVE, BackendError, FiccoError, SignalTimeout
from ficco.runtime.board import Board

#: Seconds between two polls.
PERIOD_S = 0.05
#: Seconds that a call gets after the process of a rank has ended. By then all signals that the rank
#: posted have arrived, and a call that needs no further signal is over.
ENDED_S = 0.5
#: Seconds that the driver gets to answer; more than ``READ_S`` of ``ficco.dma.watch``.
ANSWER_S = 3.0
#: Seconds that freeing the streams of a stuck call may take before the process ends.
RELEASE_S = 10.0
#: Seconds that closing gives the streams of interrupted calls.
CLOSE_S = 2.0
#: Seconds that earlier calls get to end by themselves after a call was interrupted.
SETTLE_S = 2.0

#: Why a process ends whose streams stay stuck.
UNFREED = "the streams could not be freed"

T = TypeVar("T")


class Watched(Protocol):
    """Part of :class:`ficco.runtime.workspace.Workspace` that the watchdog uses."""

    engine: Engine
    board: Board
    calls: int
    error: FiccoError | None
    thread: int

    @property
    def slots(self) -> list[Slot]:
        """Slots with calls that may be in flight."""

    def post_enqueued(self) -> None:
        """Post a call that a thread has begun to enqueue."""

    def fail(self, error: BaseException) -> None:
        """Make all further calls raise this error, and publish it to the peers."""


class DriverThread:
    """A thread that calls the driver for another thread, which must not block."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ficco driver calls", daemon=True)
        self._thread.start()

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Make a call after the earlier ones."""
        answer: Future[T] = Future()
        self._calls.put((answer, call))
        return answer

    def ask(self, call: Callable[[], T], seconds: float) -> T:
        """Make a call and return its result.

        Raises:
            TimeoutError: the driver does not answer in time.
        """
        answer = self.begin(call)
        try:
            return answer.result(seconds)
        finally:
            answer.cancel()  # if it has not begun

    def stop(self) -> None:
        """End the thread after its calls."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            answer, call = entry
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(call())
                except BaseException as error:
                    answer.set_exception(error)


class Watchdog:
    """Thread that watches one workspace until it is stopped or finds a fault."""

    def __init__(self, workspace: Watched) -> None:
        self._workspace = workspace
        self._waits: dict[int, Patience] = {}  # by slot, since its running call was seen
        # By rank: time of the first poll after its process ended or its connection broke.
        self._ended: dict[int, float] = {}
        self._stop, self._driver = threading.Event(), DriverThread()
        # The call for pulses that the driver has not answered, its time, and the polls since then.
        self._question: tuple[Future[dict[int, tuple[int, bool]]], float] | None = None
        self._polls = 0
        self.timeout_s = DEFAULT_S
        self.on_timeout = "abort"
        self._thread = threading.Thread(target=self._run, name="ficco watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the threads. After an error this frees the streams, since interrupted calls may wait
        forever. If the driver does not answer then, which would block closing, the process ends."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._workspace.error is not None and self._release(CLOSE_S) is None:
            self._exit(UNFREED)
        self._driver.stop()

    def _run(self) -> None:
        try:
            while not self._stop.wait(PERIOD_S):
                if (error := self._fault()) is not None:
                    self._act(error)
                    break
            # Calls enqueued after the stuck call get stuck as well once they begin.
            while not self._stop.wait(PERIOD_S):
                if self._release(RELEASE_S) is None and self._begun():
                    self._exit(UNFREED)
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

    def _release(self, seconds: float) -> bool | None:
        """Free this rank's streams from stuck waits; returns whether that succeeded, None if the
        driver does not answer."""
        free = partial(self._workspace.engine.release, self._workspace.slots, seconds)
        try:
            return self._driver.ask(free, RELEASE_S + ANSWER_S)
        except TimeoutError:
            return None
        except Exception:
            traceback.print_exc()
            return False

    def _begun(self) -> bool:
        """Whether a call has begun and is not known to have ended."""
        workspace = self._workspace
        return any(running for running, _ in map(workspace.engine.begun, workspace.slots))

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
        pulses, at = self._pulses(slots)
        for slot in slots:
            running, ended = pulses.get(id(slot), (None, False))
            if running is None:
                continue
            if not running:
                self._waits.pop(id(slot), None)
                continue
            if ended or id(slot) not in self._waits:
                self._waits[id(slot)] = Patience()
                continue
            begin = self._waits[id(slot)].begin
            limit, error = self.timeout_s, partial(self._timeout, slot, running)
            stuck = stuck or self._waits[id(slot)].ends(limit, error, at - begin)
            if self._ended and at - max(begin, *self._ended.values()) > ENDED_S:
                stuck = stuck or self._orphaned(slot, running, at - begin)
        workspace.post_enqueued()
        # An error of this workspace comes first: an interrupted call may have left others waiting.
        # A mismatch comes next: mismatched calls can end before a timeout, with wrong results.
        return workspace.error or workspace.board.mismatch(workspace.calls) or stuck

    def _pulses(self, slots: list[Slot]) -> tuple[dict[int, tuple[int, bool]], float]:
        """:meth:`Engine.pulse` by slot, and a time at which the calls ran. If the driver does not
        answer, pulses are not known at first, and then they are :meth:`Engine.begun`."""
        engine = self._workspace.engine
        if self._question is None:
            pulses = self._driver.begin(lambda: {id(slot): engine.pulse(slot) for slot in slots})
            self._question, self._polls = (pulses, time.monotonic()), 0
        pulses, at = self._question  # kept until it is answered: `pulse` tells of each end once
        try:
            known = pulses.result(PERIOD_S)
            self._question = None
            return known, at
        except TimeoutError:
            # By polls, since a process that was stopped meanwhile has had no time to answer.
            self._polls += 1
            late = slots if self._polls * 2 * PERIOD_S > ANSWER_S else []
            return {id(slot): engine.begun(slot) for slot in late}, time.monotonic()

    def _missing(
        self, slot: Slot, program: Program, seconds: float
    ) -> Missing | SignalTimeout | None:
        """:meth:`Engine.missing`. If the signal words cannot be read, the error of the call, which
        names a rank whose process has ended, or one that does not answer."""
        workspace, limit = self._workspace, ANSWER_S if self._question is None else 0.0
        try:
            return self._driver.ask(partial(workspace.engine.missing, slot, program), limit)
        except BackendError as error:
            why = str(error)
        except TimeoutError:
            frames, main = sys._current_frames(), threading.main_thread().ident or 0
            frame = frames.get(workspace.thread) or frames[main]
            why = (
                "the driver did not answer: another thread of this process is inside it, perhaps "
                f"at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            )
        peer = next(iter(list(self._ended) or workspace.board.silent()), None)
        named = workspace.engine.timed_out(
            program.plan, Missing(0, peer), seconds, bool(self._ended)
        )
        return SignalTimeout(**named.facts | {"step": f"unknown, since {why}"})

    def _orphaned(self, slot: Slot, running: int, seconds: float) -> SignalTimeout | None:
        """The error of a call that waits for a signal of a rank whose process has ended, as far as
        that can be read."""
        if (program := slot.programs.get(running)) is None:
            return None
        missing = self._missing(slot, program, seconds)
        if isinstance(missing, SignalTimeout):
            return missing
        if missing is None or missing.peer not in self._ended:
            return None
        return self._workspace.engine.timed_out(program.plan, missing, seconds, ended=True)

    def _timeout(self, slot: Slot, running: int, seconds: float) -> SignalTimeout:
        engine = self._workspace.engine
        program = slot.programs.get(running)
        if program is None:  # forgotten since it was called
            return SignalTimeout(operator=engine.operator, rank=engine.rank, seconds=seconds)
        missing = self._missing(slot, program, seconds)
        if isinstance(missing, SignalTimeout):
            return missing
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
            idle = partial(workspace.engine.idle, workspace.slots)
            # A lost device, which is idle, raises an error.
            with contextlib.suppress(BackendError, TimeoutError):
                while not self._driver.ask(idle, SETTLE_S) and time.monotonic() < end:
                    time.sleep(PERIOD_S)
            return
        workspace.fail(error)
        print(f"ficco: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if self.on_timeout == "abort":
            workspace.board.close()  # publishes the error to other hosts
            self._exit("on_timeout='abort'")
        if not self._release(RELEASE_S):
            self._exit(UNFREED)
