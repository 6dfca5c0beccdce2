"""Where a step of a tuning run measures, and how it takes seconds there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ficco.bench.calls import Runner
from ficco.bench.series import Parts, Series, Stopwatch
from ficco.machine import Machine, Provenance
from ficco.tune.effort import Effort

Tick = Callable[[str], None]


@dataclass
class Site:
    """Where a step measures: the ranks, the operands, what is known so far, and how much to do.

    Attributes:
        source: makes the provenance of a block, from ``"measured"`` or ``"fitted"`` and a note.
    """

    watch: Stopwatch
    effort: Effort
    machine: Machine
    source: Callable[[str, str], Provenance]
    tick: Tick = lambda what: None

    @property
    def world(self) -> int:
        return self.watch.world

    def provenance(self, kind: str, note: str) -> Provenance:
        """Of a block, with how its times were taken where that is not by the clock."""
        if self.crowded:
            note += f"; what {self.world} ranks take of the {cores()} cores that they share"
        return self.source(kind, note)

    def parts(self) -> Parts:
        dtype = getattr(torch, self.effort.dtype)
        return Parts(self.watch.group, self.watch.device, dtype)

    @property
    def crowded(self) -> bool:
        """Whether ranks share their cores, so that all are busy while a call is under way."""
        return not self.watch.on_gpu and self.world >= cores()

    def time(self, step: str, calls: dict[str, Any], **settings: Any) -> dict[str, Series]:
        """Time calls in the seconds of a step, or a share of them.

        Ranks that share cores are timed by what the cores do: a call takes as long as all threads
        of all ranks together, over the cores. What else runs on the host does not count then; by
        the clock it would, and most where many threads wait for each other.
        """
        share = settings.pop("share", 1.0)
        settings.setdefault("least", self.effort.least)
        settings.setdefault("most", 40)
        settings |= {"seconds": self.effort.seconds[step] * share, "tick": self.tick}
        if not self.crowded:
            return self.watch.time(calls, **settings)
        spent: dict[str, list[float]] = {name: [] for name in calls}
        counted = {name: _counted(call, spent[name]) for name, call in calls.items()}
        found = self.watch.time(counted, **settings)
        rounds = len(next(iter(found.values())).times) if found else 0  # behind those to warm up
        everyone = self.watch.gather({name: times[-rounds:] for name, times in spent.items()})
        return {
            name: replace(
                one,
                times=tuple(
                    sum(by_rank) / cores()
                    for by_rank in zip(*(times[name] for times in everyone), strict=True)
                ),
            )
            for name, one in found.items()
        }


def cores() -> int:
    """Cores that this process can use."""
    return len(os.sched_getaffinity(0))


def needs_peers(site: Site) -> None:
    if site.world < 2:
        raise ValueError("ranks: required two or more to measure what passes between them, got 1")


def _counted(call: Any, spent: list[float]) -> Runner:
    """The call, which notes what all threads of this process took in it."""
    runner = call if isinstance(call, Runner) else Runner(call)

    def run() -> Any:
        begin = time.process_time()
        result = runner.run()
        spent.append(time.process_time() - begin)
        return result

    return replace(runner, run=run)
