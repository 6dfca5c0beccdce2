"""One tuning run on all ranks: step by step, each saved before the next begins.

Each step measures one block of a Machine on all ranks together; every rank ends it with the same
figures, those of the slowest rank. Only rank 0 reads and writes files, and tells the others, and
only rank 0 prints: progress to stderr, figures to stdout. A step that fails leaves its block as it
was and the run goes on; the next run measures what is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch.distributed as dist
from rich.console import Console

import ficco
from ficco.dma.engine import fingerprint
from ficco.dma.host import hosts_of
from ficco.errors import ConfigError
from ficco.machine import (
    Machine,
    Provenance,
    dumps,
    loads,
    save,
    tuned_key,
)
from ficco.tools import doctor
from ficco.tools.bench.frames import Forecast, bar, commit
from ficco.tools.bench.series import Stopwatch
from ficco.tools.launch import local_device
from ficco.tools.tune import calls, communication, products
from ficco.tools.tune.effort import NETWORK, STEPS, TuneSettings, name_of
from ficco.tools.tune.files import Journal, changes, opened, rounded
from ficco.tools.tune.site import Site

#: Seconds that a call may wait for its peers while tuning.
TIMEOUT_S = 30.0

#: What measures the block of each step; None leaves the block as it is.
MEASURES: dict[str, Callable[[Site], Any]] = {
    "gemm": products.gemm,
    **products.MORE,
    "tiled": products.tiled,
    "attention": products.attention,
    "copies": communication.copies,
    "kernel_copies": communication.kernel_copies,
    "topology": communication.topology,
    **{name: partial(communication.collective, name=name) for name in communication.EXCHANGES},
    "memory": products.memory,
    "contention": communication.contention,
    "host": calls.host,
    "thresholds": calls.thresholds,
    NETWORK: communication.network,
}


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        machine: with all that was measured.
        done: steps of this run, in order; ``earlier`` those of the one that it continued.
        failures: steps that failed, with the reason.
        error: why the run could not begin, or could not save; empty otherwise.
    """

    machine: Machine | None = None
    done: list[str] = field(default_factory=list)
    earlier: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    error: str = ""


def tune(settings: TuneSettings) -> Outcome:
    """Measure and save; collective. The outcome is the same on every rank."""
    with ficco.options(timeout_s=TIMEOUT_S, on_timeout="raise"):
        return _TuningRun(settings).run()


class _TuningRun:
    """A run on this rank; on rank 0 it says what it does, and about how long it will take."""

    def __init__(self, settings: TuneSettings) -> None:
        self.settings = settings
        self.group = dist.group.WORLD
        self.rank, self.world = self.group.rank(), self.group.size()
        self.device = local_device(settings.device)
        self.hosts = hosts_of(self.group, TIMEOUT_S, "tune")
        self.here = fingerprint(settings.device, self.hosts.near.size())
        self.date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        self.console = Console(stderr=True, quiet=self.rank != 0)

    def run(self) -> Outcome:
        if (self.hosts.count > 1) != (self.settings.steps == (NETWORK,)):
            return Outcome(
                error="--only: ranks of one host measure all steps but 'network', and those of "
                f"several hosts that one alone; got {', '.join(self.settings.steps)} on "
                f"{self.hosts.count}"
            )
        error, begun = self._on_rank_0(self._begin)
        if error:
            return Outcome(error=error)
        machine, journal = begun
        outcome, settings = Outcome(machine, earlier=journal.done), self.settings
        todo = {n: settings.seconds(n) for n in settings.steps if n not in journal.done}
        forecast, steps, whole = Forecast(todo), len(todo), sum(todo.values())
        if journal.done:
            self._say(f"continues an interrupted run; done: {', '.join(journal.done)}")
        self._say(
            f"{self.here.accelerator}, {self.world} ranks: {steps} steps, about {whole:.0f} s; "
            f"every one is saved to {settings.path}"
        )
        watch = Stopwatch(self.group, self.device, hosts=self.hosts)
        for number, (name, own) in enumerate(todo.items(), 1):
            title, began = f"[{number}/{steps}] {name}", time.monotonic()
            site = Site(watch, settings.effort, machine, self._source)
            past = whole - sum(forecast.rest.values())
            with bar(self.console, title, whole, past) as show:

                def tick(what: str, past=past, own=own, began=began, show=show) -> None:
                    show(past + min(time.monotonic() - began, own), what)

                site.tick = tick
                measured, why = watch.together(partial(self._measure, name, site), named=True)
            watch, closing = self._after(watch, bool(why))
            spent = time.monotonic() - began
            forecast.over(name, None if why or closing else spent)
            if why := why or closing:
                outcome.failures[name] = why
                self._say(f"{title}: failed after {spent:.1f} s: {why}")
                continue
            before, machine = machine, measured
            journal = journal.with_done(name)
            error, _ = self._on_rank_0(partial(self._keep, machine, journal))
            if error:
                outcome.error = error
                break
            outcome.machine = machine
            outcome.done.append(name)
            left = f"about {forecast.left:.0f} s left" if forecast.rest else "done"
            self._say(f"{title}: {spent:.1f} s; {left}")
            self._show(name, before, machine)
        watch.close()
        if not outcome.error and not outcome.failures and self.rank == 0:
            Journal.remove(settings.path)
        return outcome

    def _say(self, text: str, console: Console | None = None) -> None:
        (console or self.console).print(text, markup=False, highlight=False, soft_wrap=True)

    def _show(self, name: str, before: Machine, after: Machine) -> None:
        """The figures of a step, old against new."""
        if name in STEPS:
            lines = [
                f"{name}.{what}: {old} -> {new}" for what, old, new in changes(before, after, name)
            ]
        else:
            entry = after.tuned[-1]
            old = next((one for one in before.tuned if tuned_key(one) == tuned_key(entry)), None)
            lines = [
                f"{name}, {mode}: {getattr(old, mode, '-')} -> {getattr(entry, mode)}, "
                f"{seconds * 1e3:.3f} ms, {serial / seconds:.2f} times as fast as serial"
                for mode, seconds, serial in zip(
                    ("queued", "idle"), entry.seconds, entry.serial, strict=True
                )
            ]
        for line in lines:
            self._say(f"  {line}", Console(quiet=self.rank != 0))

    def _begin(self) -> tuple[Machine, Journal]:
        settings = self.settings
        machine = opened(settings.path, self.here, settings.fresh)
        text = settings.describe(self.here)
        journal = None if settings.fresh else Journal.read(settings.path)
        if journal is None or journal.settings != text or not settings.path.exists():
            journal = Journal(text)
        journal.write(settings.path)  # before anything is measured in vain
        return machine, journal

    def _keep(self, machine: Machine, journal: Journal) -> None:
        save(machine, self.settings.path)
        journal.write(self.settings.path)

    def _on_rank_0(self, action: Callable[[], Any]) -> tuple[str, Any]:
        """The error of rank 0 in words, or its result, on every rank."""
        outcome: list[Any] = ["", None]
        if self.rank == 0:
            try:
                outcome[1] = action()
            except (ConfigError, OSError) as error:
                outcome[0] = str(error)
        dist.broadcast_object_list(outcome, group_src=0, group=self.group)
        return outcome[0], outcome[1]

    def _measure(self, name: str, site: Site) -> Machine:
        """The machine with what a step has measured, which a file can hold."""
        if name in MEASURES:
            measured = MEASURES[name](site)
            if measured is None:
                return site.machine
            block = {name: rounded(measured)}
            single = Machine("block", self.here.accelerator, self.here.ranks, **block)
            loads(dumps(single), str(self.settings.path))  # else the step has failed
            return replace(site.machine, **block)
        problem = next(p for p in self.settings.problems if name_of(p) == name)
        entry, left_out = calls.best(site, problem)
        for other, why in left_out.items():
            self._say(f"  {other} was not measured: {why}")
        return calls.with_entry(site.machine, rounded(entry))

    def _after(self, watch: Stopwatch, failed: bool) -> tuple[Stopwatch, str]:
        """Free what the step held. After a failure, ranks begin with a new barrier."""
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
