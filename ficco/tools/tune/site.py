"""The site of a step of a tuning run, which takes the times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

import ficco
from ficco.machine import Machine, Provenance
from ficco.problems.scaling import operands_of
from ficco.tools.bench.measure import MeasuredCalls, Runner, Stopwatch, Times
from ficco.tools.tune.effort import Effort

Tick = Callable[[str], None]


@dataclass
class Site:
    """The ranks, machine and effort of a step, which takes the times.

    Attributes:
        source: makes the provenance of a block, from ``"measured"`` or ``"fitted"`` and a note.
    """

    watch: Stopwatch
    effort: Effort
    machine: Machine
    source: Callable[[str, str], Provenance]
    tick: Tick = lambda action: None

    @property
    def world(self) -> int:
        return self.watch.world

    def provenance(self, kind: str, note: str) -> Provenance:
        """Provenance of a block; the note mentions times that are not by the clock."""
        if self.crowded:
            note += f"; what {self.world} ranks take of the {cores()} cores that they share"
        return self.source(kind, note)

    @property
    def itemsize(self) -> int:
        return int(getattr(torch, operands_of(self.effort.dtype)[0]).itemsize)

    def parts(self) -> MeasuredCalls:
        """The calls to measure, with operands of their own."""
        name, scaling = operands_of(self.effort.dtype)
        return MeasuredCalls(self.watch.group, self.watch.device, getattr(torch, name), scaling)

    def gathers(
        self, a: torch.Tensor, b: torch.Tensor, schedules: Iterable[str]
    ) -> dict[str, Callable[[], Any]]:
        """Calls of ``all_gather_matmul``, by schedule."""
        call = partial(ficco.all_gather_matmul, a, b, group=self.watch.group)
        return {name: partial(call, schedule=name) for name in schedules}

    @property
    def crowded(self) -> bool:
        """Whether ranks share their cores, so that all are busy during a call."""
        return not self.watch.on_gpu and self.world >= cores()

    def time(self, step: str, calls: dict[str, Any], **how: Any) -> dict[str, Times]:
        """Time calls in the seconds of a step, or in a ``share`` of them; the rest of ``how`` as
        :meth:`Stopwatch.time` takes it.

        Ranks that share cores are timed by CPU time: that of all threads of all ranks in a call,
        divided by the number of cores. The clock would include other processes of the host, most in
        calls with many waiting threads.
        """
        share = how.pop("share", 1.0)
        how = {"least": self.effort.least, "most": 40, "tick": self.tick, **how}
        how["seconds"] = self.effort.seconds[step] * share
        if not self.crowded:
            return self.watch.time(calls, **how)
        spent: dict[str, list[float]] = {name: [] for name in calls}
        counted = {name: _counted(call, spent[name]) for name, call in calls.items()}
        series = self.watch.time(counted, **how)
        rounds = max(map(len, series.values()), default=0)  # the first calls warm up
        everyone = self.watch.gather({name: times[-rounds:] for name, times in spent.items()})
        return {
            name: np.sum([times[name] for times in everyone], axis=0) / cores() for name in series
        }


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _counted(call: Any, spent: list[float]) -> Runner:
    """The call, which appends its CPU time in this process to ``spent``."""
    runner = call if isinstance(call, Runner) else Runner(call)

    def run() -> Any:
        begin = time.process_time()
        result = runner.run()
        spent.append(time.process_time() - begin)
        return result

    return replace(runner, run=run)
