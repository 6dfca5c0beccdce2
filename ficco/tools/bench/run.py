"""One bench, on every rank: verify, then time, shape by shape."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import pandas as pd
import torch.distributed as dist
from rich.console import Console

from ficco.accelerator import gpu
from ficco.problems.products import Problem
from ficco.runtime.workspace import SLOTS, workspace_of
from ficco.tools.bench.calls import caller, taken
from ficco.tools.bench.candidates import BenchCandidate, moved_bytes, named_again, of_problem
from ficco.tools.bench.cases import Case
from ficco.tools.bench.frames import BENCH, RunSettings, Schema
from ficco.tools.bench.inputs import Operands
from ficco.tools.bench.measure import CALLS_IN_GRAPH, Item, rounds
from ficco.tools.bench.report import show_shape
from ficco.tools.bench.series import Stopwatch, slowest
from ficco.tools.bench.stats import summarise
from ficco.tools.bench.tables import bar
from ficco.tools.bench.traces import trace_all, write
from ficco.tools.bench.verify import Checked, Verifier, accuracy
from ficco.tools.launch import local_device

Tick = Callable[[str], None]

#: A row, as columns of ``ficco.tools.bench.frames.BENCH``.
BenchRow = dict[str, Any]

#: Of a shape's seconds, what its rounds have however long it took to prepare them.
LEAST_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class BenchSettings(RunSettings):
    """What is benched, and how.

    Attributes:
        cases, candidates, modes: what; of the candidates, each operator those that it has.
        timelines: draw one traced call per schedule of the first shape.
        quiet: print no tables.
        seed: of the order in a round and of the random operands.
    """

    cases: tuple[Case, ...]
    candidates: tuple[BenchCandidate, ...]
    modes: tuple[str, ...]
    timelines: bool = False
    quiet: bool = False
    seed: int = 0


def bench(settings: BenchSettings) -> pd.DataFrame | None:
    """Measure; collective. The rows on rank 0, None elsewhere."""
    return Bench(settings).run()


class Bench:
    """The ranks of a job, which bench together."""

    schema: Schema = BENCH

    def __init__(self, settings: BenchSettings) -> None:
        self.settings = settings
        self.deadline = time.monotonic() + settings.seconds
        self.preparing = 0.0  # seconds that the longest preparation of a shape has taken
        self.device = local_device(settings.device)
        self.watch = self._stopwatch()
        self.group, self.rank, self.world = self.watch.group, self.watch.rank, self.watch.world
        self.verifier = Verifier(self.watch)
        self.console = Console(stderr=True, quiet=self.rank != 0)

    def _stopwatch(self) -> Stopwatch:
        # Without a limit: a rank that fails here ends, and brings its peers down.
        return Stopwatch(dist.group.WORLD, self.device, timeout_s=math.inf)

    def _operands(self, problem: Problem) -> Operands:
        return Operands(problem, self.rank, self.device)

    def _description(self) -> dict[str, Any]:
        """What the description of the run says beyond that of every run."""
        more = {"calls_in_graph": CALLS_IN_GRAPH} if "graph" in self.settings.modes else {}
        return {"hosts": self.watch.hosts.count, **more}

    def run(self) -> pd.DataFrame | None:
        more = self._description()
        rows = self.settings.record(self.schema, self._cases(), self.rank, self.world, **more)
        self.watch.close()
        return rows

    def _cases(self) -> Iterator[list[BenchRow]]:
        cases = self.settings.cases
        for number, case in enumerate(cases):
            rows = self._case(case, number, self.deadline - time.monotonic(), len(cases) - number)
            yield rows
            if self.rank == 0 and not self.settings.quiet:
                show_shape(self.schema.frame(rows))

    def _case(self, case: Case, number: int, left: float, cases: int) -> list[BenchRow]:
        """Measure one of so many shapes in its share of the seconds that are left."""
        began = time.monotonic()
        free_bytes = self.verifier.free_bytes()
        case = case.fitted(self.world, free_bytes)
        why = case.skipped(self.world, free_bytes)
        if self.watch.barrier.decide(left < self.preparing):
            why = why or f"out of time ({self.settings.seconds:.0f} s)"
        if why:
            return [{**self._shape(case), "status": "skipped", "note": why}]
        problem = case.problem(self.world)
        operands = self._operands(problem)
        engine = workspace_of(self.watch.group, self.device).engine
        candidates = of_problem(
            *(self.settings.candidates, problem, engine),
            lambda: taken(problem, self.group, self.device).others,
        )
        again = named_again(candidates, problem)
        candidates = tuple(one for one in candidates if one not in again)
        title = f"[{number + 1}/{len(self.settings.cases)}] {case.operator} {case.name}"
        steps = len(candidates) * (1 + ("graph" in self.settings.modes)) + self.settings.rounds
        with bar(self.console, title, steps) as show:
            done_steps = count(1)

            def tick(what: str) -> None:
                show(next(done_steps), what)

            checked = self._verify(candidates, operands, tick)
            operands.random(self.settings.seed)
            if problem.kind.sums:
                self._errors(checked, operands)
            spent = time.monotonic() - began
            self.preparing = max(self.preparing, spent)
            items = [
                Item(mode, one.name, one.runner, one.replay if mode == "graph" else None)
                for mode in self.settings.modes
                for one in checked
                if one.runner is not None and (mode != "graph" or one.replay is not None)
            ]
            # The first preparation is that of the libraries, too, and no reason for few rounds.
            seconds = max(left / cases - spent, left / cases * LEAST_SHARE)
            where = self.watch.clock, self.watch.barrier, self.settings.rounds, seconds
            done = rounds(items, *where, seed=self.settings.seed + number, tick=tick)
        rows = self._rows(case, checked, items, done)
        rows += [
            {**row, "candidate": one.name, "note": f"the same steps as {timed.name}"}
            for one, timed in again.items()
            for row in rows
            if row["candidate"] == timed.name
        ]
        if self.settings.timelines and number == 0:
            self._timelines(operands, checked)
        items.clear()
        checked.clear()  # graphs go before the memory that they use
        self.watch.free()
        return rows

    def _verify(
        self, candidates: Sequence[BenchCandidate], operands: Operands, tick: Tick
    ) -> list[Checked]:
        """Every candidate, proven right or with the reason why not."""
        operands.exact_b()
        checked = []
        for candidate in candidates:
            tick(f"verify {candidate.name}")
            checked.append(self.verifier.eager(candidate, operands))
        # From here on all share one workspace, as in a program that uses several schedules.
        self.verifier.renew(operands, any(candidate.symmetric for candidate in candidates))
        if "graph" in self.settings.modes:
            self._capture(checked, operands, tick)
        return checked

    def _errors(self, checked: list[Checked], operands: Operands) -> None:
        """What is left of exactness on random operands."""
        error = accuracy(operands, self.group)
        for one in checked:
            if one.runner is not None and one.runner.proof is None and not one.is_part:
                with one.runner.context():
                    mine = error(one.runner.run())
                one.error = max(self.watch.gather(mine))

    def _capture(self, checked: list[Checked], operands: Operands, tick: Tick) -> None:
        there = [one for one in checked if one.runner is not None]
        # A graph owns the memory of its calls, which take turns on slots.
        ours = sum(one.candidate.ours for one in there)
        need = ours * SLOTS * moved_bytes(operands.problem)
        free = self.verifier.free_bytes()
        pool = gpu.graph_pool_handle()
        for one in there:
            tick(f"capture {one.name}")
            if need > free / 2:
                one.graph_note = f"all graphs would hold {need >> 30} of {free >> 30} GiB"
            else:
                self.verifier.graph(one, operands, pool)

    def _rows(
        self, case: Case, checked: list[Checked], items: list[Item], done: int
    ) -> list[BenchRow]:
        everyone = self.watch.gather([(item.times_s, item.host_s) for item in items])
        times: dict[str, dict[str, Any]] = {mode: {} for mode in self.settings.modes}
        host: dict[tuple[str, str], float] = {}
        for item, *of_ranks in zip(items, *everyone, strict=True):
            of_times, of_hosts = zip(*of_ranks, strict=True)
            times[item.mode][item.name] = slowest(of_times)
            host[item.mode, item.name] = max(of_hosts) * 1e6
        by_name = {one.name: one for one in checked}
        rows = []
        for mode, series in times.items():
            queued = times.get("queued") if mode == "graph" else None
            figures = summarise(series, queued).to_dict("index") if series else {}
            for name in dict.fromkeys((*figures, *by_name)):
                one = by_name.get(name) or Checked(BenchCandidate(name, "bound"))
                row = {**self._shape(case), "mode": mode, "candidate": name}
                row["kind"] = one.candidate.kind
                if name in figures:
                    row |= {"status": "ok", "note": self._chosen(case, one, mode), "rounds": done}
                    row |= {**figures[name], "extra_bytes": one.extra_bytes, "error": one.error}
                    row["host_us"] = host.get((mode, name), math.nan)
                elif one.runner is None:
                    row |= {"status": one.status, "note": one.note}
                else:
                    row |= {"status": one.graph_status, "note": one.graph_note}
                rows.append(row)
        return rows

    def _chosen(self, case: Case, one: Checked, mode: str) -> str:
        """What ``auto`` stands for."""
        if one.candidate.schedule != "auto":
            return ""
        kind = "idle" if not self.watch.on_gpu else "queued" if mode == "graph" else "eager"
        decision = taken(case.problem(self.world), self.group, self.device, kind)
        return f"is {decision.schedule} ({decision.source})"

    def _shape(self, case: Case) -> BenchRow:
        names = ("operator", "label", "m", "n", "k", "dtype")
        return {"case": case.name, "world": self.world, **{n: getattr(case, n) for n in names}}

    def _timelines(self, operands: Operands, checked: list[Checked]) -> None:
        ours = [one.candidate for one in checked if one.runner and one.candidate.ours]
        schedules = dict.fromkeys(one.schedule for one in ours)
        calls = {name: caller(operands, self.group, name) for name in schedules}
        timelines = trace_all(calls, self.group, self.device)
        if self.rank == 0:
            write(timelines, self.settings.csv)
