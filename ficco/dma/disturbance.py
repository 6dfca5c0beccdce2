"""Trouble on purpose, for tests: calls of the CPU engine that are late, stuck or killed."""

from __future__ import annotations

import os
import random
import signal as unix_signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from ficco.dma.cpu_lanes import SLICE_S, Run, Stopped
from ficco.dma.engine import Call, Op
from ficco.errors import SignalTimeout


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


class Trouble:
    """What disturbs the operations of one engine.

    Attributes:
        own: the engine's own disturbance; goes before that of :func:`disturb`.
    """

    def __init__(self, rank: int) -> None:
        self.own: Disturbance | None = None
        self._rank = rank
        self._random: tuple[Disturbance, random.Random] | None = None
        self._closed = threading.Event()

    def disturbed(self, step: int, op: Op) -> Op:
        """An operation at which the step may stall or the process end."""

        def disturbed(call: Call) -> None:
            disturbance = self.own or _disturbance
            if disturbance is not None:
                if disturbance.kill == (self._rank, step):
                    os.kill(os.getpid(), unix_signal.SIGKILL)
                if disturbance.stall == (self._rank, step):
                    self._stall(call.state)
            op(call)

        return disturbed

    def slowed(self, nbytes: int, copy: Op) -> Op:
        """A copy of so many bytes that may begin late and take longer."""

        def slowed(call: Call) -> None:
            begin = time.monotonic()
            disturbance = self.own or _disturbance
            if disturbance is not None and disturbance.delay_s:
                delay = self._generator(disturbance).uniform(0, disturbance.delay_s)
                call.state.failed.wait(delay)
            copy(call)
            if disturbance is not None and disturbance.bandwidth:
                rest = nbytes / disturbance.bandwidth - (time.monotonic() - begin)
                call.state.failed.wait(max(rest, 0))

        return slowed

    def close(self) -> None:
        """End what is stalled."""
        self._closed.set()

    def _stall(self, run: Run) -> NoReturn:
        begin = time.monotonic()
        while not self._closed.wait(SLICE_S):
            run.check()
            if (seconds := time.monotonic() - begin) > 2 * run.timeout_s:
                raise SignalTimeout(
                    operator="disturbance",
                    rank=self._rank,
                    peer=self._rank,
                    step="stalled on purpose",
                    schedule="any",
                    seconds=seconds,
                )
        raise Stopped

    def _generator(self, disturbance: Disturbance) -> random.Random:
        if self._random is None or self._random[0] is not disturbance:
            generator = random.Random(f"{disturbance.seed} {self._rank}")
            self._random = disturbance, generator
        return self._random[1]
