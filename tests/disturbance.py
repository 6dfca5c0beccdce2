"""Delays, stalls and kills of calls of the CPU engine.

Each verb of the engine makes an operation, which this module wraps. A Program keeps the operations
that it was compiled with, so ranks on CPUs :func:`install` the wrappers before their first call.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NoReturn

from ficco.compute.program import Call, Op, Program
from ficco.dma.cpu import SLICE_S, CpuEngine, Stopped
from ficco.errors import SignalTimeout

VERBS = (
    *("wait", "post", "join", "copy", "place", "cross", "collective"),
    *("matmul", "attend", "apply", "reduce"),
)


@dataclass(frozen=True)
class Disturbance:
    """Delays, a stall or a kill in the calls of a process.

    Attributes:
        delay_s: every copy first sleeps for a random time of up to this many seconds.
        verbs: the operations that sleep; by default copies.
        share: the share of these operations that sleeps.
        stall: rank and index of a step that never ends. The stuck rank's own call raises
            SignalTimeout once one of its waits, or twice the timeout, has run out.
        kill: rank and index of a step that ends the process, like ``kill -9``.
        seed: seed of the random delays, which differ between ranks.
    """

    delay_s: float = 0.0
    stall: tuple[int, int] | None = None
    kill: tuple[int, int] | None = None
    seed: int = 0
    verbs: tuple[str, ...] = ("copy",)
    share: float = 1.0
    _random: dict[int, random.Random] = field(default_factory=dict, compare=False, repr=False)

    def delay(self, rank: int) -> float:
        """The next delay of a rank in seconds."""
        generator = self._random.setdefault(rank, random.Random(f"{self.seed} {rank}"))
        if self.share < 1 and generator.random() >= self.share:
            return 0.0
        return generator.uniform(0, self.delay_s)


_active: Disturbance | None = None


@contextmanager
def disturb(disturbance: Disturbance) -> Iterator[None]:
    """Disturb all CPU engines of this process."""
    global _active
    before, _active = _active, disturbance
    try:
        yield
    finally:
        _active = before


def install() -> None:
    """Wrap the verbs of the CPU engine, once in a process."""
    for verb in VERBS:
        setattr(CpuEngine, verb, _disturbed(getattr(CpuEngine, verb)))


def _disturbed(verb: Callable[..., Op]) -> Callable[..., Op]:
    @wraps(verb)
    def make(engine: CpuEngine, program: Program, step: int, *arguments: Any) -> Op:
        op, here = verb(engine, program, step, *arguments), (engine.rank, step)

        def disturbed(call: Call) -> None:
            if _active is not None:
                # A call that runs only on the caller's thread has no lane that could fail.
                failed = getattr(call.state, "failed", None) or threading.Event()
                if _active.kill == here:
                    os.kill(os.getpid(), signal.SIGKILL)
                if _active.stall == here:
                    _stall(engine.rank, failed, call.state.timeout_s)
                if verb.__name__ in _active.verbs and _active.delay_s:
                    failed.wait(_active.delay(engine.rank))
            op(call)

        return disturbed

    return make


def _stall(rank: int, failed: threading.Event, timeout_s: float) -> NoReturn:
    begin = time.monotonic()
    while not failed.wait(SLICE_S):
        if (seconds := time.monotonic() - begin) > 2 * timeout_s:
            raise SignalTimeout(
                operator="disturbance",
                rank=rank,
                peer=rank,
                step="stalled on purpose",
                schedule="any",
                seconds=seconds,
            )
    raise Stopped
