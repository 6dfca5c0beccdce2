"""Ways of making the same thing, timed against each other and against their parts: attention, and
layers of experts.

A part is what is computed, with all there, or what travels, with nothing computed. *Ideal* is the
longer of the two, and *in turn* their sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from ficco.heuristics import decide
from ficco.problems.specification import AnyProblem
from ficco.runtime.workspace import workspace_of
from ficco.tools.bench.calls import Runner
from ficco.tools.bench.frames import RunSettings, Schema
from ficco.tools.bench.replay_run import Replayed
from ficco.tools.bench.report import MODE_WORDS, about_table
from ficco.tools.bench.series import Stopwatch
from ficco.tools.bench.stats import IDEAL, fastest, over, spread
from ficco.tools.bench.tables import cells, markdown
from ficco.tools.bench.traces import trace_all, write
from ficco.tools.bench.verify import FATAL
from ficco.tools.launch import local_device

#: Kinds of parts.
COMPUTED, MOVED = "computed", "moved"

#: Errors of ways that cannot be had.
REFUSALS = ("ValueError", "NotImplementedError")

#: Calls with fresh inputs that must be right before a way is timed.
CHECKS = 2


class Way(NamedTuple):
    """One way.

    Attributes:
        call: makes it once, of the data that there are.
        part: which part it is; empty for the whole.
        baseline: speed-ups are over the fastest of these.
        schedule: of a call of ficco's.
        meets: it needs peers that are there.
        context: what it runs inside of.
        lacks: why it is not here.
    """

    call: Callable[[], torch.Tensor]
    part: str = ""
    baseline: bool = False
    schedule: str = ""
    meets: bool = False
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    lacks: str = ""


class Workload(Protocol):
    """What one rank has of a case, and the ways to make it.

    Attributes:
        problem: what a call of ficco's is.
        shape: columns of the case.
    """

    @property
    def problem(self) -> AnyProblem: ...

    @property
    def shape(self) -> dict[str, Any]: ...

    def ways(self, schedules: Sequence[str]) -> dict[str, Way]:
        """By name; of ficco's, those of these schedules, or of some for none."""

    def fill(self, seed: int, exact: bool = False) -> None:
        """Random data, or such of which all ways make exactly the same."""

    def right(self, result: torch.Tensor) -> bool:
        """Whether a result of exact data is right. Collective."""

    def others(self, call: Callable[[], Any]) -> float:
        """The share of what is not a library's in the time of a call's kernels; NaN if unknown."""


@dataclass(frozen=True)
class Subject:
    """What has several ways.

    Attributes:
        name: of the files.
        schema: the columns of rows.
        work: of a case, on the ranks of a stopwatch.
        heads: columns of the report that say what a case is, from those of the schema as text.
        about: what the ways are, in words.
    """

    name: str
    schema: Schema
    work: Callable[[Any, Stopwatch], Workload]
    heads: Callable[[pd.DataFrame], dict[str, pd.Series]]
    about: str


@dataclass(frozen=True, kw_only=True)
class WaySettings(RunSettings):
    """What is timed.

    Attributes:
        cases: of the subject.
        schedules: of ficco's ways; those of the subject for none.
        timelines: draw one traced call per schedule of the first case.
        replayed: the rank that is replayed; None where all are there.
    """

    subject: Subject
    cases: tuple[Any, ...]
    modes: tuple[str, ...]
    schedules: tuple[str, ...] = ()
    timelines: bool = False
    replayed: Replayed | None = None


@torch.no_grad()
def time_ways(settings: WaySettings) -> pd.DataFrame | None:
    """Measure; collective. The rows on rank 0, None elsewhere."""
    device = local_device(settings.device)
    if settings.replayed:
        watch: Stopwatch = settings.replayed.watch(settings.csv, device)
    else:
        watch = Stopwatch(dist.group.WORLD, device)
    end = time.monotonic() + settings.seconds

    def steps() -> Iterator[list[dict[str, Any]]]:
        for number, case in enumerate(settings.cases):
            left = end - time.monotonic()
            if watch.barrier.decide(left < 0):
                note = f"out of time ({settings.seconds:.0f} s)"
                yield [{"case": case.name, "world": watch.world, "status": "skipped", "note": note}]
                continue
            share, drawn = left / (len(settings.cases) - number), settings.timelines and number == 0
            yield list(_case(case, watch, settings, share, drawn))
            watch.release()

    writer = dist.get_rank()  # of the processes that are there
    more = {"note": watch.note} if watch.note else {}
    rows = settings.record(settings.subject.schema, steps(), writer, watch.world, **more)
    watch.close()
    return rows


def _case(
    case: Any, watch: Stopwatch, settings: WaySettings, seconds: float, drawn: bool
) -> Iterator[dict[str, Any]]:
    began = time.monotonic()
    try:
        work = settings.subject.work(case, watch)
    except ValueError as error:  # the same on every rank
        named = {"case": case.name, "world": watch.world}
        yield {**named, "status": "skipped", "note": str(error)}
        return
    shape = {"case": case.name, "world": watch.world, **work.shape}
    ways, timed, figures = _those_of(work, watch, settings.schedules), {}, {}
    for name, way in ways.items():
        right, why = (
            (None, way.lacks)
            if way.lacks
            else watch.together(partial(_proven, way, work, watch.meets), fatal=FATAL)
        )
        status = "skipped" if why.startswith(REFUSALS) or way.lacks else "failed"
        if right is not None and (wrong := _wrong(watch.gather(right))):
            status, why = "wrong", f"wrong result on ranks {wrong}"
        if why:
            yield {**shape, "way": name, "status": status, "note": why}
            if not watch.meets and not way.lacks:
                watch.free()  # the next call has an engine of its own
            continue
        timed[name] = Runner(way.call, context=way.context)
    work.fill(0)
    watch.fill()
    for name in timed:
        auto = ways[name].schedule == "auto"
        figures[name] = {"took": taken_by_auto(work.problem, watch) if auto else ""}
        if ways[name].schedule and watch.on_gpu:
            figures[name]["others"] = max(watch.gather(work.others(ways[name].call)))
    rest = max(seconds - (time.monotonic() - began), 0.0) / len(settings.modes)
    for mode in settings.modes:
        times = pd.DataFrame(watch.time(timed, seconds=rest, most=settings.rounds, mode=mode))
        for name, own in _figures(times, ways).to_dict("index").items():
            row = {"mode": mode, "way": name, "status": "ok", "rounds": len(times)}
            yield {**shape, **row, **own, **figures.get(name, {})}
    if drawn:
        calls = {ways[name].schedule: ways[name].call for name in timed if ways[name].schedule}
        timelines = trace_all(calls, watch.group, watch.device)
        if watch.rank == 0:
            write(timelines, settings.csv)


def _those_of(work: Workload, watch: Stopwatch, schedules: Sequence[str]) -> dict[str, Way]:
    """The ways that there can be with these ranks."""
    ways = {name: way for name, way in work.ways(schedules).items() if watch.meets or not way.meets}
    if copies := watch.arrivals(work.problem):
        ways = {copies: Way(torch.Tensor, MOVED), **ways}
    return ways


def _proven(way: Way, work: Workload, meets: bool) -> bool:
    """Whether a way is right, as far as that can be seen: of a part, and of rows that nobody sends,
    only that it runs."""
    right, shows = True, meets and not way.part
    for seed in range(1, 1 + CHECKS):
        if shows:
            work.fill(seed, exact=True)
        with way.context():
            result = way.call()
        right &= not shows or work.right(result)
    return right


def _wrong(rights: Sequence[bool]) -> list[int]:
    return [rank for rank, right in enumerate(rights) if not right]


def taken_by_auto(problem: AnyProblem, watch: Stopwatch) -> str:
    """The schedule that ``auto`` stands for."""
    machine = workspace_of(watch.group, watch.device).known(None).machine
    mode = "queued" if watch.on_gpu else "idle"
    return str(decide(problem, machine=machine, mode=mode).schedule)


def _figures(times: pd.DataFrame, ways: Mapping[str, Way]) -> pd.DataFrame:
    """By way, columns of the schema."""

    def named(chosen: Callable[[Way], bool]) -> pd.Series | None:
        return fastest(times, [name for name, way in ways.items() if chosen(way)])

    parts = [named(lambda way, part=part: way.part == part) for part in (COMPUTED, MOVED)]  # type: ignore[misc]
    found = times
    bound = in_turn = None
    if parts[0] is not None and parts[1] is not None:
        bound, in_turn = np.maximum(*parts), parts[0] + parts[1]
        found = times.assign(**{IDEAL: bound})
    figures = spread(found)
    whole = [name for name in found if name == IDEAL or not ways[name].part]
    ratios = {
        "speedup": over(named(lambda way: way.baseline), found),
        "share": over(bound, found),
        "in_turn": over(in_turn, found),
    }
    return figures.join(pd.DataFrame(ratios).loc[whole])


def report(subject: Subject, rows: pd.DataFrame, about: dict[str, Any], name: str) -> str:
    """The rows as Markdown."""
    parts = [f"# {name}", about_table(about), f"{subject.about} {HOW}"]
    for mode, found in rows[rows["mode"] != ""].groupby("mode", sort=False):
        text = found.astype(str)
        columns = {
            **subject.heads(text),
            "way": text["way"].where(text["took"] == "", text["way"] + ": " + text["took"]),
            "ms": cells(found["ms"], ".3f"),
            "of ideal": cells(found["share"]),
            "x baseline": cells(found["speedup"]),
            "x in turn": cells(found["in_turn"]),
            "others": cells(found["others"], ".3f"),
        }
        table = pd.DataFrame(columns)
        table = table.loc[:, (table != "").any()]
        parts += [f"## {mode.capitalize()}: {MODE_WORDS[mode]}", markdown(list(table), table)]
    missing = rows[rows["note"] != ""]
    if len(missing):
        texts = missing[["way", "case", "status", "note"]].itertuples(index=False)
        lines = [f"- {way} of {case}: {status}: {note}" for way, case, status, note in texts]
        parts += ["## Not measured", "\n".join(lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


HOW = (
    "All ways and parts run in shuffled order in every round; a round's time is that of its "
    "slowest rank, and ratios are medians of those of the rounds. *Ideal* is the longer of what "
    "is computed and what travels, each exclusively, *in turn* one after the other. Before a way "
    "is timed its results must be right, exactly, on data that have one right result; in a "
    "replay, where nobody sends rows, results are not looked at. *Others* is the share of what is"
    " not a library's in the time of the kernels."
)
