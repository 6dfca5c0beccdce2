"""The harness: whatever is timed is a workload with variants.

A workload is one case on one rank: a product, attention, a layer of experts, a step of layers. Its
variants are the ways to compute it. Each variant is proven right, then all variants are timed in
shuffled, interleaved rounds; the time of a round is that of the slowest rank.

A part is only the computation, with all data there, or only the communication. *Ideal* is the
longer of the two parts, and *in turn* their sum.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, count
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from rich.console import Console

from ficco.accelerator import gpu
from ficco.dma.engine import fingerprint
from ficco.errors import FiccoError
from ficco.heuristics import decide
from ficco.machine import Machine
from ficco.machine.model import ATTENTION, flat
from ficco.plan import Plan
from ficco.problems.specification import AnyProblem
from ficco.runtime.calls import timing_steps
from ficco.runtime.workspace import workspace_of
from ficco.simulate import simulate
from ficco.simulate.timeline import Timeline, assemble, dumps, work
from ficco.tools.bench import frames
from ficco.tools.bench.cases import BenchSettings
from ficco.tools.bench.draw import draw, trace
from ficco.tools.bench.measure import CALLS_IN_GRAPH, Item, Runner, Stopwatch, Times
from ficco.tools.bench.replay import replayed_watch
from ficco.tools.bench.report import (
    IDEAL,
    MODE_WORDS,
    Series,
    about_table,
    fastest,
    over,
    spread,
)
from ficco.tools.launch import local_device

Tick = Callable[[str], None]

#: Kinds of parts.
COMPUTED, MOVED = "computed", "moved"

#: Errors of variants that cannot run here.
REFUSALS = ("ValueError", "NotImplementedError")

#: After one of ficco's own errors peers can be stuck: the bench ends.
FATAL = (FiccoError,)

#: Calls with fresh inputs that must be right before a variant is timed; as many replays.
CHECKS = 2

#: Share of a case's seconds that its rounds get, however long the preparation took.
LEAST_SHARE = 0.25


class Variant(NamedTuple):
    """One way to compute a workload.

    Attributes:
        call: computes it once, from the current data.
        part: kind of part; empty for the whole.
        baseline: speed-ups are over the fastest baseline.
        schedule: of a call of ficco's.
        needs_peers: the call needs peers that run.
        context: entered around calls, outside of the timed part.
        lacks: why the variant cannot run here.
    """

    call: Callable[[], torch.Tensor]
    part: str = ""
    baseline: bool = False
    schedule: str = ""
    needs_peers: bool = False
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    lacks: str = ""


@dataclass
class Checked:
    """A variant that was proven right, or the reason why it is not timed.

    Attributes:
        runner: its calls; None if it is not timed.
        schedule: of a call of ficco's.
        status, note: columns of its rows if it is not timed.
        columns: further columns of its rows if it is timed.
        replay: its calls, captured in a graph.
        graph_status, graph_note: why there is no replay.
    """

    name: str
    runner: Runner | None = None
    schedule: str = ""
    status: str = "ok"
    note: str = ""
    columns: dict[str, Any] = field(default_factory=dict)
    replay: Callable[[], None] | None = None
    graph_status: str = "skipped"
    graph_note: str = ""


class Workload:
    """A case on one rank, and the variants that compute it.

    Attributes:
        problem: of a call of ficco's.
        dtype: of the rows that peers send.
        schedules: of ficco's variants; empty for those of the subject.

    Raises:
        ValueError: the case cannot be measured here; the same on every rank.
    """

    problem: AnyProblem
    dtype = torch.bfloat16

    def __init__(self, case: Any, watch: Stopwatch, schedules: Sequence[Any] = ()) -> None:
        self.case, self.watch, self.schedules = case, watch, schedules
        self.group, self.device = watch.group, watch.device

    def generator(self, seed: int) -> torch.Generator:
        """Draws numbers that differ from rank to rank."""
        own = seed * self.watch.world + self.watch.rank
        return torch.Generator(self.device).manual_seed(own)

    # Overridden by each kind of workload.

    def variants(self) -> dict[str, Variant]:
        """All variants, by name."""
        raise NotImplementedError

    def fill(self, seed: int, exact: bool = False) -> None:
        """Draw random data, or data for which all variants are exact."""
        raise NotImplementedError

    def right(self, result: torch.Tensor) -> bool:
        """Whether a result of exact data is right. Collective."""
        raise NotImplementedError

    def others(self, call: Callable[[], Any]) -> float:
        """Share of kernels other than the library's in the time of a call's kernels; NaN if
        unknown."""
        return math.nan

    def by_ficco(
        self, call: Callable[[str], torch.Tensor], usual: Sequence[str]
    ) -> dict[str, Variant]:
        """Variants by ficco, by schedule: the schedules of the bench, or ``usual`` without any."""
        alone = not self.watch.has_peers
        return {
            name: Variant(partial(call, name), schedule=name, baseline=alone and name == "serial")
            for name in self.schedules or usual
        }

    # Proofs.

    @cached_property
    def offered(self) -> Mapping[str, Any]:
        """Variants that these ranks can run, by name."""
        has_peers, variants = self.watch.has_peers, self.variants().items()
        offered = {name: one for name, one in variants if has_peers or not one.needs_peers}
        if copies := self.watch.arrivals(self.problem):
            offered = {copies: Variant(torch.Tensor, MOVED), **offered}
        return offered

    def checked(self, graph: bool, tick: Tick) -> list[Checked]:
        """Prove every variant right, captured in a graph too if ``graph``. Collective."""
        checked = []
        for name, variant in self.offered.items():
            tick(f"verify {name}")
            checked.append(self._checked(name, variant))
        return checked

    def lacks(self, variant: Any) -> str:
        """Why a variant cannot run here; empty if it can, and is proven next. Collective."""
        return str(variant.lacks)

    def _checked(self, name: str, variant: Any) -> Checked:
        if why := self.lacks(variant):
            return Checked(name, status="skipped", note=why)
        value, why = self.watch.together(partial(self.prove, variant), fatal=FATAL)
        if value is None:
            if not self.watch.has_peers:
                self.watch.free()  # the next call has an engine of its own
            status = "skipped" if why.startswith(REFUSALS) else "failed"
            return Checked(name, status=status, note=why)
        runner, mine = value
        why, columns = self.judge(self.watch.gather(mine))
        if why:
            return Checked(name, status="wrong", note=why, columns=columns)
        return Checked(name, runner, variant.schedule, columns=columns)

    def prove(self, variant: Any) -> tuple[Runner, Any]:
        """A variant's calls, and what :meth:`judge` takes of each rank. Of a part, and of a rank
        that is replayed, the proof shows only that the calls run."""
        right, shows = True, self.watch.has_peers and not variant.part
        for seed in range(1, 1 + CHECKS):
            if shows:
                self.fill(seed, exact=True)
            with variant.context():
                result = variant.call()
            right &= not shows or self.right(result)
        return Runner(variant.call, context=variant.context), right

    def judge(self, everyone: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        """Why a variant is wrong, from what all ranks saw, and columns of its rows."""
        return wrong_ranks(everyone), {}

    def annotate(self, checked: Sequence[Checked]) -> None:
        """Add the columns that need calls with random data. Collective."""
        for one in checked:
            if one.schedule:
                if one.schedule == "auto":
                    known = workspace_of(self.group, self.device).known(None)
                    mode = "queued" if self.watch.on_gpu else "idle"
                    taken = decide(self.problem, machine=known.machine, mode=mode).schedule
                    one.columns["took"] = str(taken)
                if self.watch.on_gpu:
                    one.columns["others"] = max(self.watch.gather(self.others(one.runner.run)))

    # Rows.

    def label(self, name: str) -> dict[str, str]:
        """Columns that name a variant."""
        return {"way": name}

    def columns(self, one: Checked, mode: str) -> dict[str, Any]:
        """Columns of a timed variant besides its figures."""
        return one.columns

    def figures(self, times: Series, queued: Series | None) -> pd.DataFrame:
        """Figures of a mode, indexed by variant, as columns of the schema."""
        frame = pd.DataFrame(times)

        def chosen(keep: Callable[[Variant], bool]) -> pd.Series | None:
            return fastest(frame, [name for name, one in self.offered.items() if keep(one)])

        computed = chosen(lambda one: one.part == COMPUTED)
        moved = chosen(lambda one: one.part == MOVED)
        baseline = chosen(lambda one: one.baseline)
        bound = in_turn = None
        if computed is not None and moved is not None:
            bound, in_turn = np.maximum(computed, moved), computed + moved
            frame = frame.assign(**{IDEAL: bound})
        references = {"speedup": baseline, "share": bound, "in_turn": in_turn}
        ratios = {name: over(reference, frame) for name, reference in references.items()}
        whole = [name for name in frame if name == IDEAL or not self.offered[name].part]
        return spread(frame).join(pd.DataFrame(ratios).loc[whole])

    def renamed(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows that repeat others under another name."""
        return []


def wrong_ranks(rights: Sequence[bool]) -> str:
    """Ranks whose results are wrong, in words; empty if all are right."""
    wrong = [rank for rank, right in enumerate(rights) if not right]
    return f"wrong result on ranks {wrong}" if wrong else ""


#: Columns of a report: heading, column of the rows, factor and format.
Shown = Sequence[tuple[str, str, float, str]]

OF_WAYS: Shown = (
    ("ms", "ms", 1.0, ".3f"),
    ("of ideal", "share", 1.0, ".2f"),
    ("x baseline", "speedup", 1.0, ".2f"),
    ("x in turn", "in_turn", 1.0, ".2f"),
    ("others", "others", 1.0, ".3f"),
)

HOW = (
    "All ways and parts run in shuffled order in every round; a round's time is that of its "
    "slowest rank, and ratios are medians of those of the rounds. *Ideal* is the longer of what "
    "is computed and what travels, each exclusively, *in turn* one after the other. Before a way "
    "is timed its results must be right, exactly, on data that have one right result; in a "
    "replay, where nobody sends rows, results are not looked at. *Others* is the share of what is"
    " not a library's in the time of the kernels."
)


@dataclass(frozen=True)
class Subject:
    """A kind of workload.

    Attributes:
        name: of the files.
        schema: columns of the rows.
        work: the workload of a case, on the ranks of a stopwatch, with some schedules.
        heads: columns of :func:`tables` that describe a case, from the columns of the schema as
            text; None if the kind has tables of its own.
        about, how: text of the report about the variants, and about the protocol.
        shown: columns of the report.
        gradients: calls record gradients.
        show: prints the rows of a case.
    """

    name: str
    schema: frames.Schema
    work: Callable[[Any, Stopwatch, Sequence[Any]], Workload]
    heads: Callable[[pd.DataFrame], dict[str, pd.Series]] | None = None
    about: str = ""
    how: str = HOW
    shown: Shown = OF_WAYS
    gradients: bool = False
    show: Callable[[pd.DataFrame], None] | None = None


def bench(settings: BenchSettings) -> pd.DataFrame | None:
    """Measure; collective. The rows on rank 0, None elsewhere."""
    device, subject = local_device(settings.device), settings.subject
    if settings.replayed:
        watch: Stopwatch = replayed_watch(settings.replayed, settings.csv, device)
    else:
        # Without a limit: a rank that fails here ends, and brings its peers down.
        watch = Stopwatch(dist.group.WORLD, device, timeout_s=math.inf)
    schema, csv, writes = subject.schema, settings.csv, dist.get_rank() == 0
    run = _Bench(settings, watch, Console(stderr=True, quiet=not writes))
    if writes:  # without a description a figure is worth nothing
        about = frames.describe(settings.device, settings.command, watch.world)
        about |= {"hosts": watch.hosts.count}
        about |= {"calls_in_graph": CALLS_IN_GRAPH} if "graph" in settings.modes else {}
        about |= {"note": watch.note} if watch.note else {}
        csv.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n")
    written = [schema.frame(())]
    with torch.set_grad_enabled(subject.gradients):
        for number, case in enumerate(settings.cases):
            written.append(schema.frame(run.case(case, number)))
            watch.release()
            if writes:
                frames.append(csv, written[-1])
                if subject.show is not None and not settings.quiet:
                    subject.show(written[-1])
    watch.close()
    return pd.concat(written, ignore_index=True) if writes else None


class _Bench:
    """A run on this rank."""

    def __init__(self, settings: BenchSettings, watch: Stopwatch, console: Console) -> None:
        self.settings, self.watch, self.console = settings, watch, console
        self.subject = settings.subject
        self.deadline = time.monotonic() + settings.seconds
        self.preparing = 0.0  # seconds of the longest preparation of a case
        if watch.note:
            console.print(watch.note, highlight=False)

    def _shape(self, case: Any) -> dict[str, Any]:
        columns = self.subject.schema.columns
        sizes = {name: value for name, value in vars(case).items() if name in columns}
        return {self.subject.schema.case: case.name, "world": self.watch.world, **sizes}

    def case(self, case: Any, number: int) -> list[dict[str, Any]]:
        watch, settings, began = self.watch, self.settings, time.monotonic()
        left = self.deadline - began
        if watch.barrier.decide(left < self.preparing):
            note = f"out of time ({settings.seconds:.0f} s)"
            return [{**self._shape(case), "status": "skipped", "note": note}]
        try:
            work = self.subject.work(case, watch, settings.schedules)
        except ValueError as error:
            return [{**self._shape(case), "status": "skipped", "note": str(error)}]
        shape = self._shape(work.case)
        share = left / (len(settings.cases) - number)
        try:
            return self._timed(work, shape, began, share, number)
        except FiccoError as error:
            if watch.has_peers:
                raise
            return [{**shape, "status": "failed", "note": str(error).splitlines()[0]}]

    def _timed(
        self, work: Workload, shape: dict[str, Any], began: float, share: float, number: int
    ) -> list[dict[str, Any]]:
        """Prove and time the variants of a workload in its share of the seconds."""
        watch, settings = self.watch, self.settings
        graph = "graph" in settings.modes
        name = f"{getattr(work.case, 'operator', '')} {work.case.name}".strip()
        title = f"[{number + 1}/{len(settings.cases)}] {name}"
        steps = len(work.offered) * (1 + graph) + settings.rounds
        with frames.bar(self.console, title, steps, partial(next, count())) as tick:
            checked = work.checked(graph, tick)
            work.fill(settings.seed)
            timed = [one for one in checked if one.runner is not None]
            ours = [one.runner for one in timed if one.runner is not None and one.schedule]
            watch.settle(ours, work.dtype)
            work.annotate(checked)
            spent = time.monotonic() - began
            self.preparing = max(self.preparing, spent)
            items = [
                Item(mode, one.name, one.runner, one.replay if mode == "graph" else None)
                for mode in settings.modes
                for one in timed
                if one.runner is not None and (mode != "graph" or one.replay is not None)
            ]
            # The first preparation is that of the libraries, too, and no reason for few rounds.
            seconds = max(share - spent, share * LEAST_SHARE)
            how: dict[str, Any] = {"most": settings.rounds, "seed": settings.seed + number}
            done, times = watch.rounds(items, seconds=seconds, tick=tick, **how)
        rows = self._rows(work, shape, checked, dict(zip(items, times, strict=True)), done)
        if settings.timelines and number == 0:
            calls: dict[str, Callable[[], Any]] = {}
            for one in timed:
                if one.runner is not None and one.schedule:
                    calls.setdefault(one.schedule, one.runner.run)
            timelines = timelines_of(calls, watch)
            if watch.rank == 0:  # drawn, and written for Perfetto and for ``ficco plot``
                stem = settings.csv.with_suffix("")
                draw(timelines, f"{stem}_timelines.png", columns=2, ranks=[0])
                trace(timelines, f"{stem}_trace.json")
                Path(f"{stem}_timelines.json").write_text(dumps(timelines))
        return [*rows, *work.renamed(rows)]

    def _rows(
        self,
        work: Workload,
        shape: dict[str, Any],
        checked: Sequence[Checked],
        timed: Mapping[Item, tuple[Times, float]],
        done: int,
    ) -> list[dict[str, Any]]:
        series: dict[str, dict[str, Any]] = {mode: {} for mode in self.settings.modes}
        seen: dict[tuple[str, str], dict[str, float]] = {}
        columns = self.subject.schema.columns
        for item, (times, host_s) in timed.items():
            series[item.mode][item.name] = times
            own = {"host_us": host_s * 1e6, **self.watch.figures(item, done)}
            seen[item.mode, item.name] = {key: own[key] for key in own if key in columns}
        by_name = {one.name: one for one in checked}
        rows = []
        for mode, of_mode in series.items():
            queued = series.get("queued") if mode == "graph" else None
            figures = work.figures(of_mode, queued).to_dict("index") if of_mode else {}
            for name in dict.fromkeys((*figures, *by_name)):
                one = by_name.get(name) or Checked(name)
                row = {**shape, "mode": mode, **work.label(name)}
                if name in figures:
                    row |= {"status": "ok", "rounds": done, **work.columns(one, mode)}
                    row |= {**seen.get((mode, name), {}), **figures[name]}
                elif one.runner is None:
                    row |= {"status": one.status, "note": one.note, **one.columns}
                else:
                    row |= {"status": one.graph_status, "note": one.graph_note}
                rows.append(row)
        return rows


def tables(subject: Subject, rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The figures of each mode as text."""
    assert subject.heads is not None
    for mode, timed in rows[rows["status"] == "ok"].groupby("mode", sort=False):
        text = timed.astype(str)
        way = text["way"]
        if "took" in text:
            way = way.where(text["took"] == "", way + " (" + text["took"] + ")")
        figures = {
            heading: frames.cells(timed[column] * factor, form)
            for heading, column, factor, form in subject.shown
        }
        table = pd.DataFrame({**subject.heads(text), "way": way, **figures})
        yield str(mode), table.loc[:, (table != "").any()]


def show_ways(subject: Subject, rows: pd.DataFrame) -> None:
    """Print a table for each case and mode."""
    headings: list[str] = []
    for mode, table in tables(subject, rows):
        words = list(table)[: list(table).index("way")]
        headings += [name for name in table if name not in (*words, *headings)]
        print(f"{subject.name}, {mode}: {MODE_WORDS[mode]}")
        for case, ways in table.groupby(words, sort=False):
            print("; ".join(f"{word}: {text}" for word, text in zip(words, case, strict=True)))
            frames.show("", ways.drop(columns=words), width=100)
    frames.show_meanings(headings)
    for line in left_out(subject, rows):
        print(f"  {line}")


def left_out(subject: Subject, rows: pd.DataFrame) -> list[str]:
    """Lines for ways without figures."""
    missing = rows.loc[rows["note"] != "", ["way", subject.schema.case, "status", "note"]]
    lines = (
        f"{way or 'all ways'} of {case}: {status}: {note}"
        for way, case, status, note in missing.itertuples(index=False)
    )
    return list(dict.fromkeys(lines))


def report(subject: Subject, rows: pd.DataFrame, about: dict[str, Any], name: str) -> str:
    """The rows as Markdown."""
    parts = [f"# {name}", about_table(about), f"{subject.about} {subject.how}".strip()]
    for mode, table in tables(subject, rows):
        heading = f"## {mode.capitalize()}: {MODE_WORDS[mode]}"
        parts += [heading, frames.markdown(list(table), table)]
    if missing := left_out(subject, rows):
        parts += ["## Not measured", "\n".join(f"- {line}" for line in missing)]
    return "\n\n".join(part for part in parts if part) + "\n"


# Calls whose steps are timed.


#: Rate of steps whose time is too short to measure.
UNSEEN = 1e18

#: About 20 ms of a GPU: a timed call of hundreds of steps is enqueued by then.
SLEEP_CYCLES = 40_000_000


def timelines_of(calls: Mapping[str, Callable[[], Any]], watch: Stopwatch) -> list[Timeline]:
    """The planned and the measured Timeline of every call that is served here, in turn.

    The plan is simulated at the rates that the steps of the measured call reached, so that both
    differ in what waited for what. Collective; the result is the same on every rank.
    """
    timelines: list[Timeline] = []
    start = attrgetter("start")
    for name, call in calls.items():
        with suppress(NotImplementedError), timing_steps() as seen:
            call()  # first use is slow
            if watch.on_gpu:  # GPUs wait and begin together while their hosts enqueue
                gpu._sleep(SLEEP_CYCLES)
                dist.all_reduce(torch.zeros(1, device=watch.device), group=watch.group)
            call()
            if len(seen) != 2:  # each call is several, that go by columns
                continue
            plan, mine = seen[-1]
            bare: Any = plan.problem  # without its cached attributes, which have functions
            everyone = watch.gather((replace(plan, problem=replace(bare)), mine))
            plans = [plan for plan, _ in everyone]
            here = fingerprint(watch.device, watch.world).accelerator
            ranks = [
                [(plan.steps[one.step], one.start, one.stop) for one in sorted(spans, key=start)]
                for plan, spans in everyone
            ]
            real = assemble(f"{name}: measured", plans, ranks, f"measured on {here}")
            title, source = f"{name}: planned", f"planned at the rates measured on {here}"
            machine = machine_of(plans, real)
            timelines += [simulate(plans, machine, title=title, source=source), real]
    return timelines


def machine_of(plans: Sequence[Plan], timeline: Timeline) -> Machine:
    """A machine with the mean rates of the steps of a measured call.

    The rates include contention.
    """
    spent: dict[str, float] = defaultdict(float)
    done: dict[str, float] = defaultdict(float)
    for one in chain.from_iterable(timeline.ranks):
        spent["copy" if one.kind == "collective" else one.kind] += one.stop_s - one.start_s
    for plan in plans:
        for step in plan.steps:
            done["copy" if step.op == "collective" else step.op] += max(work(plan, step))
    for kind in ("attend", "apply"):  # at a share of the rate of products
        done["matmul"] += done[kind] / ATTENTION
        spent["matmul"] += spent[kind]
    done["place"] = 2 * done["place"] + done["reduce"]  # read and written
    spent["place"] += spent["reduce"]

    kinds = ("matmul", "copy", "place")
    rates = [done[one] / spent[one] if done[one] and spent[one] else UNSEEN for one in kinds]
    # A mesh: copies to one peer come one after the other, so that none share a link.
    return flat(*rates, ranks=len(plans), kind="mesh", source="measured")
