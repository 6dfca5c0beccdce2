"""All checks in their order, on real ranks, and on new ranks where those cannot go on."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import ficco
from ficco.dma import WAYS as ENGINE_WAYS
from ficco.dma import engine_name, variable
from ficco.dma.engine import fingerprint
from ficco.errors import BackendError, PeerFailed, RankMismatch, SignalTimeout
from ficco.machine import Fingerprint, Machine, known, loads
from ficco.options import current
from ficco.problems.products import OPERATORS, Problem
from ficco.schedules import NAMED, refusal
from ficco.tools import doctor, probe
from ficco.tools.bench.cases import OPERATOR as GATHER
from ficco.tools.bench.cases import SETS
from ficco.tools.launch import RankFailed, check_ranks, launch, local_device, under_torchrun
from ficco.tools.selftest import checks, kernels
from ficco.tools.selftest.checks import NotOffered, Passed, Rank, SelftestSettings
from ficco.tools.tune.effort import TuneSettings


@dataclass(frozen=True)
class Check:
    """An assumption; ``instead`` is the fallback if it does not hold.

    An ``exclusive`` check has new ranks, since it leaves ranks in an undefined state. ``limits``:
    time limit as a multiple of the settings' limit.
    """

    name: str
    run: Callable[[Rank, ProcessGroup], Passed]
    instead: str
    exclusive: bool = False
    limits: int = 1

    def on(self, engine: str) -> Check:
        """The check with the advice for an engine."""
        advice = probe.ADVICE.get(engine, {}).get(self.name)
        return replace(self, instead=f"{self.instead}; {advice}") if advice else self


COLLECTIVE = "schedule='serial:collective', or PyTorch's own collectives"


def _shape(at: Rank, group: ProcessGroup, name: str) -> Passed:
    """Time a shape by the library's collective and product, and by ficco's schedules."""
    case = next(one for one in SETS[at.settings.shapes]() if one.name == name)
    problem, lanes = case.problem(at.world), checks.all_at_once(at)
    schedules = ["serial:collective", "serial", lanes, "auto"]
    checks.proven(at, group, schedules, (checks.operands_of(at, problem), 1))
    sizes = problem.rows[at.rank], problem.n, problem.k
    dtype = getattr(torch, problem.dtype)
    series = checks.call_times(
        at, group, schedules, sizes, dtype, seconds=at.settings.shape_seconds
    )
    ms = {schedule: 1e3 * statistics.median(times) for schedule, times in series.items()}
    at.note(ms=ms)
    seen = ", ".join(f"{schedule} {one:.3f}" for schedule, one in ms.items())
    gain = ms["serial:collective"] / ms["auto"]
    return Passed(f"exact; ms: {seen}; auto is {gain:.2f} times as fast as the collective")


def _figures(at: Rank, group: ProcessGroup) -> Passed:
    """Measure a machine's file by the steps of ``ficco tune --quick``."""
    if at.world == 1:
        raise NotOffered("one rank has no peer")
    try:
        from ficco.tools.tune.run import default_name, tune
    except ImportError as error:
        raise NotOffered(f"{error}; pip install 'ficco[bench]'") from None
    everyone, device = dist.group.WORLD, at.device.type
    settings = TuneSettings(
        path=Path(at.folder, f"{default_name(fingerprint(device, at.world))}.yaml"),
        device=device,
        quick=True,
        only=at.settings.figures,
        command="ficco doctor --selftest",
    )
    outcome = tune(settings)
    at.settle()  # no rank uses the memory of a peer any more
    ficco.close(everyone)
    at.conclude(filter(None, (outcome.error, *map(": ".join, outcome.failures.items()))))
    return Passed(f"{len(outcome.done)} steps of ficco tune --quick: {', '.join(outcome.done)}")


#: Fallbacks of checks that fail, by the name of the check or by the first word of the name.
INSTEAD = {
    "device and engine": COLLECTIVE,
    "memory of peers": COLLECTIVE,
    "signals, first way": "options(signals='copy')",
    "signals": "the first way",
    "order of copy and signal": "options(signals='copy'); options(replay=False) if only that is "
    "right",
    "2D copies": "schedules whose names end in 1d, which copy whole rows, if you ask for them; "
    "without 2D copies the engine packs columns, or copies them by ficco's kernel or row by row",
    "schedule": "another schedule=; 'auto' does not know that it fails",
    "product whose tiles wait": "another schedule= than tiled; 'auto' takes it only where it was "
    "measured",
    "schedule serial:collective": "schedule='serial'",
    "operator": "PyTorch's own collective and product",
    "copies by kernel": "the mover dma: leave the knob kernel out",
    "kernels": "PyTorch's operations, and signals by stream writes and waits",
    "graphs": "calls outside of graphs",
    "bandwidth of pairs": "nothing: plans take all pairs to be alike; look at the links that ficco "
    "doctor lists, or leave a rank of the slow pair out",
    "bandwidth of all pairs": "schedules with fewer copy lanes (copy=), in case that lanes run one "
    "after the other",
    "products beside copies": "copies by compute units, which slow products down",
    "copies of every size": "shorter copies, by schedules of more pieces (pieces=)",
    "2D copies of every size": "schedules whose names end in 1d, or of more pieces (pieces=)",
    "kernel copies of every size": "the mover dma: leave the knob kernel out",
    "figures of the machine": "the figures of a machine file that is here already, if any; run "
    "ficco tune",
    "timeouts": "a limit of your own for each call",
    "batches of copies": "copies one by one: leave batched_copies out of the machine file",
    "time": "nothing: ficco bench times it by more schedules",
}


def _check(
    name: str, run: Callable[..., Passed], /, limits: int = 1, exclusive: bool = False, **how: Any
) -> Check:
    instead = INSTEAD.get(name) or INSTEAD[name.split()[0]]
    return Check(name, partial(run, **how), instead, exclusive, limits)


#: Checks of every engine, in their order.
CHECKS = (
    _check("device and engine", checks.device),
    _check("memory of peers", checks.memory),
    _check("signals, first way", checks.signals, way="auto"),
    _check("signals by write", checks.signals, way="write"),
    _check("signals by copy", checks.signals, way="copy"),
    _check("order of copy and signal", checks.ordering, limits=2),
    _check("2D copies", checks.columns),
    *(
        _check(f"schedule {name}", checks.schedule, name=name)
        for name in NAMED
        if name != "tiled"  # it does not take all sizes
        and not refusal(Problem(GATHER, (1, 1), 1, 1, "float32"), NAMED[name])
    ),
    _check("product whose tiles wait", checks.tiles),
    _check("schedule serial:collective", checks.collective),
    *(
        _check(f"operator {name}", checks.operator, limits=2, operator=name)
        for name in OPERATORS
        if name != GATHER
    ),
    _check("copies by kernel", checks.mover),
    _check("kernels", kernels.own),
    _check("graphs", checks.graph),
    _check("bandwidth of pairs", checks.bandwidth_of_pairs, limits=2),
    _check("bandwidth of all pairs", checks.bandwidth_of_all, limits=3),
    _check("products beside copies", checks.overlap),
    _check("copies of every size", checks.sizes, limits=2),
    _check("2D copies of every size", checks.sizes, limits=2, schedules=checks.HALVES, cols=1024),
    _check("kernel copies of every size", checks.sizes, limits=2, schedules=checks.BY_KERNEL),
    _check("figures of the machine", _figures, limits=6, exclusive=True),
    _check("timeouts", checks.timeout, exclusive=True),
)


def _of_engine(engine: str) -> Iterator[Check]:
    """Checks of an engine: attributes of the device, kinds of memory, and values of its choices."""
    knob, choices = variable(engine), ENGINE_WAYS[engine]
    for name, instead in probe.ATTRIBUTES.get(engine, {}).items():
        yield Check(
            f"attribute {name}", partial(checks.attribute, engine=engine, name=name), instead
        )
    for kind, instead in probe.SHARED.get(engine, {}).items():
        yield Check(f"sharing of {kind} memory", partial(checks.sharing, kind=kind), instead)
    for choice, values in choices.items():
        instead = f"leave {choice} out of {knob}, or name another of {', '.join(values)}"
        for value in values:
            run = partial(checks.way, variable=knob, choice=choice, value=value)
            yield Check(f"{knob}={choice}={value}", run, instead)
    for value in choices.get("copy", ()):
        run, instead = partial(checks.sizes, **{knob: f"copy={value}"}), f"another copy= in {knob}"
        yield Check(f"{knob}=copy={value}, every size", run, instead, limits=2)
    if "batch" in choices.get("copy", ()):
        yield _check("batches of copies", checks.batches, limits=3, variable=knob)


#: Checks of each engine. Only those of the engine in use are tried.
WAYS = {engine: tuple(_of_engine(engine)) for engine in ENGINE_WAYS}


def timed(settings: SelftestSettings) -> tuple[Check, ...]:
    """A check for each shape that is timed."""
    names = [case.name for case in SETS.get(settings.shapes, tuple)()]
    return tuple(_check(f"time of {name}", _shape, limits=2, name=name) for name in names)


# On ranks.

#: Seconds that ranks may take to start, first use of libraries included.
START_S = 60.0
#: Outcomes of a check on a rank, the most severe last. "left", the peers were gone, and "late", a
#: wait timed out, follow from a problem of another rank.
ORDER = ("ok", "left", "late", "not offered", "failed")
#: Verdicts on checks.
VERDICTS = ("ok", "not offered", "failed", "not tried")
#: Lines of a rank's output in the report.
LOG_LINES = 60


@dataclass(frozen=True)
class CheckResult:
    """Result of a check; ``verdict``: one of :data:`VERDICTS`. ``facts``: figures for programs."""

    check: str
    verdict: str
    seen: str
    instead: str = ""
    seconds: float = 0.0
    details: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class _RankJournal:
    """Journal of a rank: starts, outcomes and ends of checks, a JSON object per line. ``log``: file
    of its output."""

    def __init__(self, folder: str, rank: int) -> None:
        self.path, self.log = (Path(folder) / f"rank{rank}.{kind}" for kind in ("jsonl", "log"))

    def note(self, check: str, event: str, **more: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"check": check, "event": event, **more}) + "\n")

    def read(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The events of each check."""
        events: dict[str, dict[str, dict[str, Any]]] = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # the rank died while it wrote
                    event = json.loads(line)
                    events.setdefault(event["check"], {})[event["event"]] = event
        return events


def _on_a_rank(names: Sequence[str], settings: SelftestSettings, device: str, folder: str) -> None:
    """Run checks on this rank, one after the other."""
    rank, world = dist.get_rank(), dist.get_world_size()
    journal = _RankJournal(folder, rank)
    screen = os.fdopen(os.dup(2), "w")
    output = os.open(journal.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks share this machine
    patience = timedelta(seconds=3 * settings.limit_s)
    talk = dist.new_group(list(range(world)), backend="gloo", timeout=patience)
    at = Rank(rank, world, local_device(device), settings, talk, folder)
    _warm(at)
    at.settle()
    groups = (CHECKS, timed(settings), *WAYS.values())
    every = {check.name: check for group in groups for check in group}
    for check in (every[name] for name in names):
        if rank == 0:
            print(f"selftest: {check.name}", file=screen, flush=True)
        at.iteration = 10_000 * list(every).index(check.name)
        # Replaces the limit of launch(): the rank exits if a check hangs.
        faulthandler.dump_traceback_later(check.limits * settings.limit_s, exit=True)
        journal.note(check.name, "begin")
        at.facts, at.journal = {}, partial(journal.note, check.name, "facts")
        with ficco.options(timeout_s=settings.timeout_s, on_timeout="raise"):
            _attempt(at, check, journal)
        journal.note(check.name, "end")
    faulthandler.dump_traceback_later(settings.limit_s, exit=True)


def _warm(at: Rank) -> None:
    """Use libraries once, so that their start does not look like a late peer."""
    dtype = getattr(torch, at.settings.dtype)
    for kind in (dtype, torch.float32):
        a = torch.ones(2, 64, 64, dtype=kind, device=at.device)
        torch.bmm(a, a), torch.mm(a[0], a[1]), torch.addmm(a[0], a[0], a[1])
        torch.baddbmm(a, a, a), a.random_(-3, 4), (a != a.clone()).sum()
    with contextlib.suppress(NotImplementedError, BackendError, ImportError):  # see its check
        probe.own_kernels(at.device)


def _attempt(at: Rank, check: Check, journal: _RankJournal) -> None:
    """Run one check in a new group, and write its outcome. Raises if this rank cannot go on."""
    began = time.monotonic()

    def note(verdict: str, seen: str, details: str = "") -> None:
        said = {"verdict": verdict, "seen": seen, "details": details}
        journal.note(check.name, "outcome", **said, seconds=time.monotonic() - began)

    group = dist.new_group(list(range(at.world)))
    try:
        passed = check.run(at, group)
        note("ok", passed.seen, passed.details)
    except checks.CheckFailed as error:
        note("failed", str(error))
    except (NotOffered, NotImplementedError) as error:
        trace = "".join(traceback.format_exception(error))
        note("not offered", str(error), getattr(error, "details", "") or trace)
        if error.__cause__ is not None:  # the state of peers is unknown
            raise
    except (SignalTimeout, RankMismatch, PeerFailed, TimeoutError) as error:
        note("late", f"{type(error).__name__}: {error}", traceback.format_exc())
    except checks.PeerLeft as error:
        note("left", str(error))
    except Exception as error:
        note("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
        raise
    at.leave(group)


# Where the command was given.


@dataclass
class Selftest:
    """A run of all checks.

    Attributes:
        results: of :data:`CHECKS`, :func:`timed` and the engine's :data:`WAYS`, in this order.
        machine: text of the machine file, with the steps that were measured.
        logs: output of ranks, by launch and rank.
        starts: number of starts of ranks: for the checks, for each exclusive check, and after a
            check that broke the ranks.
    """

    device: str
    ranks: int
    settings: SelftestSettings
    engine: str
    results: list[CheckResult] = field(default_factory=list)
    machine: str = ""
    logs: dict[str, str] = field(default_factory=dict)
    starts: int = 0
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        return sum(result.verdict == "failed" for result in self.results)


def selftest(
    device: str, ranks: int | None = None, settings: SelftestSettings | None = None
) -> Selftest:
    """Run all checks on ranks of this machine, a GPU each, or two on CPUs; failed checks do not end
    the run.

    Raises:
        ValueError: that many ranks cannot run here.
    """
    if under_torchrun():
        raise ValueError("the self-test starts its ranks by itself; run it without torchrun")
    ranks = 2 if ranks is None and device == "cpu" else check_ranks(ranks, device)
    engine = engine_name(torch.device(device), current().engine)
    run = Selftest(device, ranks, settings or SelftestSettings.of(device), engine)
    began = time.monotonic()
    every = (*(check.on(engine) for check in CHECKS), *timed(run.settings), *WAYS[engine])
    left = list(every)
    results: dict[str, CheckResult] = {}
    while left:
        batch = [left[0]] if left[0].exclusive else [one for one in left if not one.exclusive]
        new = _launched(run, batch)
        results |= new
        if not any(check.name in new for check in batch):  # no check started
            why = new["start of ranks"].seen if new else "nothing was noted"
            untried = {one.name: CheckResult(one.name, "not tried", why) for one in left}
            results |= untried
        left = [check for check in left if check.name not in results]
    names = [check.name for check in every]
    run.results = [results[name] for name in names]
    run.results += [result for name, result in results.items() if name not in names]
    run.seconds = time.monotonic() - began
    return run


def _launched(run: Selftest, batch: Sequence[Check]) -> dict[str, CheckResult]:
    """Run checks on new ranks; the results of started checks."""
    settings, error = run.settings, None
    run.starts += 1
    with tempfile.TemporaryDirectory(prefix="ficco-selftest-") as folder:
        names = [check.name for check in batch]
        limit = START_S + sum(check.limits for check in batch) * settings.limit_s
        try:
            args = (names, settings, run.device, folder)
            launch(_on_a_rank, run.ranks, *args, device=run.device, timeout_s=limit)
        except RankFailed as failure:
            error = failure
        ranks = [_RankJournal(folder, rank) for rank in range(run.ranks)]
        journals = [journal.read() for journal in ranks]
        for rank, journal in enumerate(ranks):
            if error is not None and journal.log.exists():
                lines = journal.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                run.logs[f"rank {rank}, from {names[0]!r}"] = "\n".join(lines)
        for path in Path(folder).glob("*.yaml"):  # complete after every step of its check
            run.machine = path.read_text()
    seen = {check: [journal.get(check.name, {}) for journal in journals] for check in batch}
    results = {
        check.name: _result(check, events, error, settings)
        for check, events in seen.items()
        if any(events)
    }
    broken = any("end" not in journal.get(name, {}) for journal in journals for name in results)
    if error is not None and not broken:
        name = "end of ranks" if results else "start of ranks"
        results[name] = CheckResult(name, "failed", str(error), COLLECTIVE, details=error.details)
    return results


def _result(
    check: Check, events: list[dict[str, Any]], error: RankFailed | None, settings: SelftestSettings
) -> CheckResult:
    """The result of a check, from the journals of all ranks."""
    outcomes = {rank: one["outcome"] for rank, one in enumerate(events) if "outcome" in one}
    unfinished = [rank for rank, one in enumerate(events) if "begin" in one and "end" not in one]
    by_severity = sorted(outcomes.values(), key=lambda one: -ORDER.index(one["verdict"]))
    worst = next(iter(by_severity), {"verdict": "ok"})
    seconds = max((one["seconds"] for one in outcomes.values()), default=0.0)
    if unfinished and worst["verdict"] in ("ok", "left", "late") and error is not None:
        stuck = [rank for rank in unfinished if rank not in outcomes]
        limit = check.limits * settings.limit_s
        seen = f"{error}; ranks {stuck or unfinished} did not finish (limit {limit:.0f} s)"
        verdict, details = "failed", [error.details]
    else:
        verdict = "failed" if worst["verdict"] in ("left", "late") else worst["verdict"]
        alike = [rank for rank, one in outcomes.items() if one["seen"] == worst["seen"]]
        everywhere = verdict == "ok" or len(alike) == len(events)
        seen = worst["seen"] if everywhere else f"rank {alike[0]}: {worst['seen']}"
        details = []
    noted = next((one["facts"]["facts"] for one in events if "facts" in one), {})
    facts = {name: value for name, value in noted.items() if name != "doing"}
    if verdict == "failed" and noted.get("doing"):
        seen += f"; it tried {noted['doing']}"
    for rank, one in outcomes.items():
        if one["details"] and (one["verdict"] != "ok" or rank == 0):
            details.append(f"rank {rank}:\n{one['details']}")
    instead = "" if verdict == "ok" else check.instead
    text = "\n".join(filter(None, details))
    return CheckResult(check.name, verdict, seen, instead, seconds, text, facts)


# Output of a self-test.

#: Characters of an outcome in tables.
SHOWN = 300
#: Format of the JSON of a report.
FORMAT = "ficco self-test 1"
#: Parts of the report of the machine, and seconds that it may take.
ABOUT = ("versions", "devices", "links", "engines", "use")
ABOUT_S = 60.0
#: The check whose fact ``largest`` limits copies, and the least limit that is of use: smaller
#: pieces would leave most of the rate to the gaps between them.
_LONG_FAILED, LEAST_PIECE = ("copies of every size", "failed"), 1 << 20


def about() -> Any:
    """The report of ``ficco doctor``, by a separate process: this process uses no device, and a
    device that hangs must not block the report."""
    command = [sys.executable, "-m", "ficco", "doctor", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ABOUT_S, check=True)
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"versions": f"ficco doctor cannot tell: {error}"}


def document(run: Selftest, about: dict[str, Any]) -> dict[str, Any]:
    """The report, in types that JSON can hold; ``about``: result of :func:`about`."""
    names = ("engine", "device", "ranks", "failed", "starts", "machine", "logs")
    return {
        "format": FORMAT,
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        **{name: getattr(run, name) for name in names},
        "seconds": round(run.seconds, 1),
        "results": [asdict(result) for result in run.results],
        "about": about,
        "environment": doctor.environment(),
        "settings": asdict(run.settings),
    }


def read(path: Path) -> dict[str, Any]:
    """The report in a file of JSON, or in the one next to its text.

    Raises:
        ValueError: there is no such file, or it is no report.
    """
    where = path.with_suffix(".json")
    try:
        report: Any = json.loads(where.read_text())
    except (OSError, ValueError) as error:
        wanted = "required the JSON of `ficco doctor --selftest --report FILE`"
        raise ValueError(f"--read: {wanted}, got {where}, which cannot be read: {error}") from None
    form = report.get("format") if isinstance(report, dict) else type(report).__name__
    if form != FORMAT:
        why = f"required a report in the format {FORMAT!r}, got {form!r} in {where}"
        raise ValueError(f"--read: {why}; read it with the ficco that wrote it")
    return dict(report)


def show(report: dict[str, Any], path: Path) -> None:
    print(f"Self-test of {report['ranks']} ranks on {report['device']}")
    for result in report["results"]:
        print(f"{result['verdict']:11} {result['check']}: {result['seen'][:SHOWN]}")
        if result["instead"]:
            print(f"{'':11}   used instead: {result['instead']}")
    print(_summary(report))
    print(f"The report is in {path} and {path.with_suffix('.json')}; send both.")


def _summary(report: dict[str, Any]) -> str:
    verdicts = [result["verdict"] for result in report["results"]]
    counts = [f"{verdicts.count(one)} {one}" for one in VERDICTS]
    return f"{', '.join(counts)}; {report['seconds']:.0f} s."


def markdown(report: dict[str, Any]) -> str:
    results, about = report["results"], report["about"]
    verdicts = [result["verdict"] for result in results]
    later = len(verdicts) - 1 - verdicts.index("failed") if "failed" in verdicts else None
    after = "" if later is None else f"; {later} checks came after the first that failed"
    lines = [
        "# ficco self-test\n",
        f"{report['date']}, {report['ranks']} ranks on {report['device']}: {_summary(report)}",
        f"New ranks were started {report['starts']} times{after}.\n",
        "| check | verdict | what was seen | used instead | seconds |",
        "|---|---|---|---|---|",
    ]
    for one in results:
        row = [one[name] for name in ("check", "verdict", "seen", "instead")]
        lines.append(f"| {' | '.join(map(_cell, row))} | {one['seconds']:.1f} |")
    variables = "\n".join(f"{name}={value}" for name, value in report["environment"].items())
    blocks = {
        "Settings": "\n".join(f"{k}: {v}" for k, v in report["settings"].items()),
        **{part.capitalize(): json.dumps(about.get(part), indent=1) for part in ABOUT},
        "Environment": variables or "none of the variables that matter is set",
    }
    for one in results:
        if one["details"] or one["verdict"] == "failed":
            text = "\n".join(filter(None, (one["seen"], one["details"])))
            blocks[f"{one['check']}: {one['verdict']}"] = text
    blocks["Machine file"] = report["machine"]
    blocks |= {f"Output of {name}": log for name, log in report["logs"].items()}
    for title, text in blocks.items():
        if text:
            lines += ["", f"## {title}", "", "```text", text.replace("```", "'''"), "```"]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text as a cell of a Markdown table."""
    return " ".join(text[:SHOWN].split()).replace("|", "\\|")


# Verdicts of a report on the claims of the pages.

#: Verdict on a claim, by the most severe verdict of its checks.
CLAIMED = {
    "failed": "refuted",
    "not tried": "not tried",
    "not offered": "not offered",
    "ok": "proven",
}


def claims(report: dict[str, Any]) -> list[str]:
    """Rows of a Markdown table: each claim about the engine, the verdict, and the evidence; none if
    the pages make no claims about it."""
    results, engine = report["results"], report["engine"]
    if engine not in probe.CLAIMS:
        return []
    place = f"{report['ranks']} x {_fact(report, 'accelerator') or report['device']}"
    lines = ["| claim | verdict | evidence |", "|---|---|---|"]
    for claim, rows in probe.CLAIMS[engine].items():
        names = tuple(rows.split(", ")) if rows else ()
        tried = [one for one in results if one["check"].startswith(names)]
        verdicts = {one["verdict"] for one in tried} or {"not tried"}
        verdict = next(one for one in CLAIMED if one in verdicts)
        deciding = [f"{one['check']}: {one['seen']}" for one in tried if one["verdict"] == verdict]
        more = f" ({len(deciding)} rows like it)" if len(deciding) > 1 else ""
        seen = f"{place}, {report['date'][:10]}; {deciding[0]}{more}" if deciding else "no row"
        lines.append(f"| {claim} | {CLAIMED[verdict]} | {_cell(seen)} |")
    return lines


def machine(report: dict[str, Any]) -> Machine | None:
    """The machine of a report: measured figures, and the limit of copies if long ones fail; None
    if it has neither."""
    tried = (one for one in report["results"] if (one["check"], one["verdict"]) == _LONG_FAILED)
    limit = next((one["facts"].get("largest", 0) for one in tried), 0)
    limited = limit >= LEAST_PIECE
    if report["machine"]:
        measured = loads(report["machine"])
    elif (accelerator := _fact(report, "accelerator")) and limited:
        here = Fingerprint(accelerator, report["ranks"])
        measured = known(here) or Machine("self-test", accelerator, report["ranks"])
    else:
        return None
    batched = int(_fact(report, "batched") or 0)
    return replace(measured, largest_copy=limit if limited else 0, batched_copies=batched)


def _fact(report: dict[str, Any], name: str) -> Any:
    """A fact of the first check that has it; empty if no rank got that far."""
    facts = (one["facts"].get(name) for one in report["results"] if name in one["facts"])
    return next(facts, "")
