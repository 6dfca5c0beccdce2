"""One tuning run on all ranks: step by step, each saved before the next begins.

Rank 0 alone reads and writes files, and tells the others. A step that fails leaves its block as it
was and the run goes on; the next run does what is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ficco
from ficco import doctor
from ficco.bench.about import commit
from ficco.bench.series import Stopwatch
from ficco.dma.engine import fingerprint
from ficco.errors import ConfigError
from ficco.launch import local_device
from ficco.machine import (
    COLLECTIVES,
    Fingerprint,
    Machine,
    Provenance,
    dumps,
    loads,
    save,
)
from ficco.problem import OPERATORS, Problem
from ficco.tune import journal as journals
from ficco.tune import shapes
from ficco.tune.effort import Effort, effort
from ficco.tune.file import opened, rounded
from ficco.tune.journal import Journal
from ficco.tune.say import Reporter
from ficco.tune.site import Site
from ficco.tune.steps import STEPS

#: Seconds that a call may wait for its peers while tuning.
TIMEOUT_S = 30.0

#: The name for all given shapes where steps are chosen.
SHAPES = "shapes"


@dataclass(frozen=True)
class Settings:
    """What is tuned, and where the figures go.

    Attributes:
        path: the machine's file.
        device: ``"cpu"`` or ``"cuda"``.
        quick: measure in short.
        only: names of steps; empty for all.
        operators: whose collectives are measured; empty for all. The all-gather always is, since
            those that were not measured are reckoned from it.
        problems: whose candidates are measured exhaustively.
        fresh: begin anew, whatever an interrupted run has done.
        command: the command line, for the provenance of the figures.
    """

    path: Path
    device: str
    quick: bool = False
    only: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    fresh: bool = False
    command: str = ""

    @property
    def effort(self) -> Effort:
        return effort(self.device, self.quick)

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the steps, in order."""
        wanted = [step.name for step in STEPS if not self.only or step.name in self.only]
        if self.operators:
            kinds = {OPERATORS[name].collective for name in self.operators}
            others = {COLLECTIVES[kind] for kind in {*COLLECTIVES} - {*kinds, "all-gather"}}
            wanted = [name for name in wanted if name not in others]
        if not self.only or SHAPES in self.only:
            wanted += [shapes.name_of(problem) for problem in self.problems]
        return tuple(wanted)

    def describe(self, fingerprint: Fingerprint) -> str:
        """What another run must share to go on with this one."""
        return f"{fingerprint} {self.effort.name} {' '.join(self.steps)}"

    def seconds(self, step: str) -> float:
        """About how long a step takes."""
        share = shapes.QUICK_SHARE if self.quick else 1.0
        return self.effort.seconds.get(step, 2 * share * shapes.SECONDS[self.device])


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        machine: with all that was measured.
        done: steps of this run, in order; ``earlier`` those of the one that it went on with.
        failures: steps that failed, with the reason.
        error: why the run could not begin, or could not save; empty otherwise.
    """

    machine: Machine | None = None
    done: list[str] = field(default_factory=list)
    earlier: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    error: str = ""


def tune(settings: Settings) -> Outcome:
    """Measure and save; collective. The outcome is the same on every rank."""
    run = _Run(settings)
    with ficco.options(timeout_s=TIMEOUT_S, on_timeout="raise"):
        return run.run()


class _Run:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.group = dist.group.WORLD
        self.rank, self.world = self.group.rank(), self.group.size()
        self.device = local_device(settings.device)
        self.reporter = Reporter(self.rank, settings.seconds)
        self.here = fingerprint(settings.device, self.world)
        self.date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        self.outcome = Outcome()

    def run(self) -> Outcome:
        error, machine, journal = self._told(self._begin)
        if error:
            return Outcome(error=error)
        outcome = self.outcome
        outcome.machine, outcome.earlier = machine, journal.done
        settings, reporter = self.settings, self.reporter
        reporter.plan(self.here, settings.steps, journal.done, settings.path)
        watch = Stopwatch(self.group, self.device)
        todo = [name for name in settings.steps if name not in journal.done]
        for number, name in enumerate(todo):
            site = Site(watch, settings.effort, machine, self._source)
            began = time.monotonic()
            with reporter.progress(number, todo) as site.tick:
                measured, why = watch.together(
                    lambda n=name, s=site: self._measure(n, s), named=True
                )
            watch, closing = self._after(watch, bool(why))
            why = why or closing
            taken = time.monotonic() - began
            if why:
                outcome.failures[name] = why
                reporter.failed(number, todo, taken, why)
                continue
            before, machine = machine, measured
            journal = journal.with_done(name)
            error, _, _ = self._told(lambda m=machine, j=journal: self._keep(m, j))
            if error:
                outcome.error = error
                break
            outcome.machine = machine
            outcome.done.append(name)
            reporter.done(number, todo, taken)
            reporter.change(name, before, machine)
        watch.close()
        if not outcome.error and not outcome.failures and self.rank == 0:
            journals.remove(settings.path)
        return outcome

    # Files, on rank 0.

    def _begin(self) -> tuple[Machine, Journal]:
        settings = self.settings
        machine = opened(settings.path, self.here, settings.fresh)
        text = settings.describe(self.here)
        journal = None if settings.fresh else journals.read(settings.path)
        if journal is None or journal.settings != text or not settings.path.exists():
            journal = Journal(text, self.date)
        journals.write(journal, settings.path)  # before anything is measured in vain
        return machine, journal

    def _keep(self, machine: Machine, journal: Journal) -> tuple[None, None]:
        save(machine, self.settings.path)
        journals.write(journal, self.settings.path)
        return None, None

    def _told(self, action: Callable[[], tuple[Any, Any]]) -> tuple[str, Any, Any]:
        """What rank 0 did, on every rank: the error in words, or two results."""
        told: list[Any] = [None]
        if self.rank == 0:
            try:
                told = [("", *action())]
            except (ConfigError, OSError) as error:
                told = [(str(error), None, None)]
        dist.broadcast_object_list(told, group_src=0, group=self.group)
        found: tuple[str, Any, Any] = told[0]
        return found

    # Measuring.

    def _measure(self, name: str, site: Site) -> Machine:
        """The machine with what a step has measured, which a file can hold."""
        for step in STEPS:
            if step.name == name:
                measured = step.measure(site)
                if measured is None:
                    return site.machine
                block = {name: rounded(measured)}
                alone = Machine("block", self.here.accelerator, self.world, **block)
                loads(dumps(alone), str(self.settings.path))  # else the step has failed
                return replace(site.machine, **block)
        problem = next(p for p in self.settings.problems if shapes.name_of(p) == name)
        best = shapes.measure(site, problem, self.settings.quick)
        for left_out, why in best.left_out.items():
            self.reporter.say(f"  {left_out} was not measured: {why}")
        return shapes.with_entry(site.machine, rounded(best.entry))

    def _after(self, watch: Stopwatch, failed: bool) -> tuple[Stopwatch, str]:
        """Free what the step held. Ranks that failed in its midst are brought into step again."""
        if failed:
            watch.close()
            watch = Stopwatch(self.group, self.device)
        try:
            watch.release()
        except RuntimeError as error:
            return watch, f"{type(error).__name__}: {error}"
        return watch, ""

    def _source(self, kind: str, note: str) -> Provenance:
        versions = doctor.versions()
        return Provenance(
            source=kind,
            date=self.date,
            command=self.settings.command,
            driver=str(versions["driver"]),
            torch=str(versions["torch"]),
            commit=commit() or f"ficco {versions['ficco']}",
            note=note,
        )
