"""Commands that run on this host: ``bench``, ``replay``, ``demo``, ``tune`` and ``doctor``."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ficco.problems.products import OPERATORS
from ficco.problems.scaling import SCALED
from ficco.problems.sizes import ASKABLE
from ficco.tools import cli, launch
from ficco.tools.bench import cases
from ficco.tools.bench.cases import OPTIONAL, BenchSettings, Case, Replayed
from ficco.tools.cli import CSV, FAMILIES, FILE, FLAG, GATHERS, NAMES, NUMBER, STEPS
from ficco.tools.tune.effort import STEPS as TUNED
from ficco.tools.tune.effort import TuneSettings

if TYPE_CHECKING:
    from ficco.tools.bench.candidates import BenchCandidate


# Bench.


#: Seconds that starting the ranks, drawing and one shape's verification may take on top.
BENCH_START_S = 180.0

#: Options of products. :data:`KINDS` are the other kinds: modules of ``ficco.tools.bench``.
OF_PRODUCTS = ("set", "shapes", "dtype", "without")
KINDS = ("attention", "experts", *STEPS)


#: Help of the options whose help is long.
HELP = {
    "operator": f"operators of one family, each on all shapes: {', '.join(OPERATORS)}; "
    f"{', '.join(FAMILIES['attention'])}; experts; a family's name for all of it; layers for "
    "forward and backward of two layers of Llama 3 70B, with their weights sharded; fsdp for those "
    f"of six blocks of Llama 3 8B under FSDP2 (default: {cases.OPERATOR}, or those of the set)",
    "set": f"shapes of products: {', '.join(cases.SETS)}; scattering operators take them with n "
    "and k exchanged (default: measured, on CPUs cpu; for all-to-alls experts-gain and experts)",
    "dtype": "dtypes, or kinds of float8 operands with scales, in place of the shapes' own: "
    + ", ".join(cases.DTYPES),
    "schedules": "ficco schedules, such as shard-overlap:tail=4 (default: a list). Of products, "
    "the suffix @symmetric puts the shard in symmetric memory, @stages=2 leaves memory for two "
    "steps; candidates stands for those that auto compares, candidates=3 for the three of library "
    "products that are predicted to be fastest",
    "mode": "modes, separated by commas: queued, idle, graph; a replay has no graph, CPU ranks "
    "only idle (default: all that the ranks have)",
    "without": f"baselines to leave out: {', '.join(OPTIONAL)}; the native one has been seen to "
    "hang",
    "machine": "a name or a file that says when rows arrive (default: of this GPU)",
    "products": "first measure what products take on this GPU, in about 20 s, for auto and for "
    "what peers send",
    "out": "folder for the pictures (default: a new one in the folder for temporary files)",
    "tuned operator": "measure only the collectives of these operators, time --shapes for each of "
    "them (for scattering operators with n and k exchanged), and only their problems of --from-log "
    f"(default: all collectives; --shapes for the operator in their column op, or {GATHERS})",
    "tuned shapes": "time all candidates for these shapes: columns name, m, n, k; optionally op",
    "from-log": "time all candidates for the calls of a program that ran with "
    "options(log_problems=FILE)",
    "tolerance": "with --check: share by which a point may be off (default: 0.25; on CPUs 1)",
    "ranks": "start so many ranks and make a call, which shows what reaches a peer; the report on "
    "auto is then for as many (default: start none; auto for a GPU each, or 4)",
    "selftest": "start ranks (default: a GPU each, or 2) and test the engine's assumptions",
    "report": "report of --selftest, and its JSON next to it (default: ficco-selftest-<date>.md)",
    "read": "print what a report proves and refutes of docs/api/amd-claims.md, and write the "
    "machine file of its host next to it",
}


def _add_measured(parser: Any) -> Any:
    """Add the options that select the measured workloads; return their group."""
    measured = parser.add_argument_group("what is measured")
    add = measured.add_argument
    add("--operator", **NAMES, choices=cli.OPERATOR_NAMES, help=HELP["operator"])
    add("--set", **NAMES, choices=list(cases.SETS), help=HELP["set"])
    add("--shapes", **CSV, help="shapes of products: columns name, m, n, k; optionally op")
    add("--dtype", **NAMES, choices=cases.DTYPES, help=HELP["dtype"])
    add("--only", **NAMES, help="only the shapes with these names")
    add("--schedules", **NAMES, help=HELP["schedules"])
    add("--mode", help=HELP["mode"])
    return measured


def _add_output(parser: Any) -> Any:
    """Add the limits and the files of a bench; returns the group of files."""
    add = parser.add_argument
    add("--rounds", type=int, default=25, help="at most so many rounds per shape (default: 25)")
    add("--seconds", type=float, default=300, help="time for all shapes (default: 300)")
    add("--seed", type=int, default=0, help="seed of the order and the operands (default: 0)")
    output = parser.add_argument_group("output")
    cli.add_files(output, "ficco-bench", "set")
    output.add_argument("--json", **FLAG, help="print the rows as JSON")
    return output


def add_bench(parser: Any) -> None:
    add = _add_measured(parser).add_argument
    add("--without", **NAMES, choices=OPTIONAL, default=[], help=HELP["without"])
    cli.add_ranks(parser)
    add = _add_output(parser).add_argument
    add("--timelines", **FLAG, help="trace and draw the first shape")


def run_bench(arguments: argparse.Namespace) -> int:
    from ficco.tools.bench.frames import records
    from ficco.tools.bench.harness import bench, show_ways
    from ficco.tools.bench.measure import modes_of
    from ficco.tools.bench.report import show_best

    device, ranks = place(arguments)
    kind = kind_of(arguments)
    measurement = partial(_others, kind=kind) if kind in KINDS else _products
    subject, settings_of_kind = measurement(arguments, device)
    graphs = kind not in KINDS and "world" not in arguments
    replayed = None
    if "world" in arguments:
        subject = f"replay-{arguments.world}-{subject}"
        replayed = _played(arguments, kind, settings_of_kind["cases"])
    settings = BenchSettings(
        **settings_of_kind,
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        seed=arguments.seed,
        timelines=getattr(arguments, "timelines", False),
        modes=modes_of(device, arguments.mode, graphs),
        device=device,
        quiet=arguments.json,
        replayed=replayed,
        csv=fresh(arguments.out, arguments.name or named(subject, device, ranks)),
        command=cli.command(),
    )
    how: Any = {"device": device, "timeout_s": arguments.seconds + BENCH_START_S}
    rows = launch.launch(bench, arguments.ranks, settings, **how)
    if rows is None:  # under torchrun, a rank other than 0
        return 0
    if arguments.json:
        print(json.dumps(records(rows)))
    elif kind in KINDS:
        show_ways(settings.subject, rows)
    else:
        show_best(rows)
    for path in (settings.csv, *drawn(settings.csv), reported(settings.csv)):
        print(f"wrote {path}", file=sys.stderr)
    bad = []
    for row in rows[rows["status"].isin(("wrong", "failed"))].to_dict("records"):
        names = [row[name] for name in ("candidate", "way", "case", "layer") if row.get(name)]
        bad.append(f"{row['status']}: {' on '.join(names)}: {row['note']}")
    for line in dict.fromkeys(bad):  # once, not in every mode
        print(line, file=sys.stderr)
    return 1 if bad else 0


def add_replay(parser: Any) -> None:
    _add_measured(parser)
    parser.add_argument("--world", **NUMBER, required=True, help="ranks of the group")
    parser.add_argument("--rank", type=int, default=0, help="be this one (default: 0)")
    parser.add_argument("--machine", help=HELP["machine"])
    parser.add_argument("--products", **FLAG, help=HELP["products"])
    _add_output(parser)


def run_replay(arguments: argparse.Namespace) -> int:
    world, rank = arguments.world, arguments.rank
    if world < 2:
        raise ValueError(f"--world: required at least 2 ranks, got {world}")
    if not 0 <= rank < world:
        raise ValueError(f"--rank: required 0 to {world - 1}, got {rank}")
    if "graph" in (arguments.mode or ""):
        raise ValueError("--mode: required queued or idle, got graph")
    if steps := {*STEPS}.intersection(arguments.operator or ()):
        name = steps.pop()
        raise ValueError(f"--operator: required one of a call, got {name}; `ficco bench` has it")
    if launch.default_device() != "cuda":
        raise ValueError("required a GPU, whose copy engines are the clock of a replay")
    # All hardware queues: in a shared queue, the courier's stream would block a lane.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    vars(arguments).update(ranks=1, device="cuda")
    return run_bench(arguments)


def kind_of(arguments: argparse.Namespace) -> str:
    """The family of the operators, or layers. Names of families are replaced by their operators."""
    named = arguments.operator or (GATHERS,)
    names = [name for one in named for name in FAMILIES.get(one, (one,))]
    arguments.operator = names if arguments.operator else None
    kinds = (ASKABLE[name].whose if name in ASKABLE else name for name in names)
    kind, *others = dict.fromkeys(kinds)
    if others:
        raise ValueError(f"--operator: required one family, got {kind} and {others[0]}")
    unserved = (*OF_PRODUCTS, *("schedules", "timelines") * (kind in STEPS))
    for name in unserved if kind in KINDS else ():
        if getattr(arguments, name, None):
            raise ValueError(f"--{name}: required none for {kind}")
    return kind


def place(arguments: argparse.Namespace) -> tuple[str, int]:
    """The device and the number of ranks of a measurement."""
    device = arguments.device or launch.default_device()
    ranks = launch.check_ranks(arguments.ranks, device)
    launch.check_seconds(arguments.seconds)
    if arguments.rounds < 1:
        raise ValueError(f"--rounds: required a number above 0, got {arguments.rounds}")
    if arguments.set and arguments.shapes:
        raise ValueError("--set and --shapes: required one of them, got both")
    return device, ranks


def named(subject: str, device: str, ranks: int) -> str:
    """Name of the files of a run: subject, machine and date."""
    from ficco.tools import doctor

    kind = next(one["name"] for one in doctor.devices() if one["kind"].startswith(device))
    machine = f"{ranks}x {kind}" if device == "cuda" else f"{ranks} cpu ranks"
    machine = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    return f"{subject}_{machine}_{datetime.now(UTC):%Y-%m-%d}"


def fresh(folder: Path, name: str) -> Path:
    """A CSV file that does not exist yet: rows are appended. Raises as :func:`writable`, and for a
    name with a folder."""
    if Path(name).name != name:
        raise ValueError(f"--name: required a name without a folder, got {name!r}; see --out")
    path = cli.writable(folder) / f"{name}.csv"
    number = 1
    while path.exists() and launch.own_rank() == 0:
        number += 1
        path = path.with_name(f"{name}-{number}.csv")
    return path


# Kinds of measurements.


#: Name of a measurement, and the fields of :class:`ficco.tools.bench.cases.BenchSettings` that
#: depend on its kind.
Measurement = tuple[str, dict[str, Any]]


def _products(arguments: argparse.Namespace, device: str) -> Measurement:
    from ficco.tools.bench import frames, products
    from ficco.tools.bench.candidates import choose

    shapes, subject = chosen(arguments, device)
    candidates = choose(arguments.schedules, getattr(arguments, "without", ()), device)
    if arguments.schedules:
        _servable(candidates, shapes)
    kind = products.SUBJECT
    if "world" in arguments:
        kind = replace(kind, schema=frames.REPLAY)
    return subject, {"subject": kind, "cases": tuple(shapes), "schedules": candidates}


def _played(arguments: argparse.Namespace, kind: str, shapes: Sequence[Any]) -> Replayed:
    """The rank that is replayed, on whose GPU also products of float8 or experts are measured."""
    from ficco.machine import SCALED_PRODUCTS
    from ficco.tools.tune.products import refitted

    recipes = {one.dtype.partition("-")[2] for one in shapes if one.dtype in SCALED}
    blocks = *sorted(map(SCALED_PRODUCTS.__getitem__, recipes)), *["experts"] * (kind == "experts")
    measure = partial(refitted, more=blocks) if arguments.products else None
    where = {"world": arguments.world, "rank": arguments.rank, "machine": arguments.machine}
    return Replayed(products=measure, **where)


def _others(arguments: argparse.Namespace, device: str, kind: str) -> Measurement:
    """Layers, layers of experts, or attention."""
    from ficco.schedules import Schedule

    room: Any = import_module(f"ficco.tools.bench.{kind}")
    wanted, names = arguments.operator, arguments.schedules or ()
    shapes_of_kind = [
        one for one in room.SHAPES[device] if getattr(one, "operator", kind) in wanted
    ]
    return kind, {
        "subject": room.SUBJECT,
        "cases": tuple(_only(arguments, shapes_of_kind)),
        "schedules": tuple(one if one == "auto" else str(Schedule.parse(one)) for one in names),
    }


def _only(arguments: argparse.Namespace, shapes: Sequence[Any]) -> list[Any]:
    """Those that ``--only`` names, of shapes; all without it."""
    by_name = dict.fromkeys(case.name for case in shapes)
    for name in arguments.only or ():
        if name not in by_name:
            raise ValueError(f"--only: required some of {', '.join(by_name)}, got {name!r}")
    return [case for case in shapes if not arguments.only or case.name in arguments.only]


def chosen(arguments: argparse.Namespace, device: str) -> tuple[list[Case], str]:
    """The shapes of the command line, and their name in files."""
    operators = arguments.operator
    if arguments.shapes or arguments.set:
        names, selected = (
            arguments.set or [arguments.shapes.stem],
            cli.shapes(arguments, arguments.set),
        )
        if operators:
            selected = [case.on(operator) for operator in operators for case in selected]
    else:  # each operator has its own
        wanted = operators or [cases.OPERATOR]
        pairs = [(one, name) for one in wanted for name in cases.default_sets(one, device)]
        names = list(dict.fromkeys(name for _, name in pairs))
        selected = [case.on(one) for one, name in pairs for case in cases.SETS[name]()]
    selected = cases.of_dtypes(_only(arguments, selected), arguments.dtype or ())
    return selected, "-".join([*names, *(arguments.dtype or ())])


def _servable(candidates: Sequence[BenchCandidate], shapes: Sequence[Case]) -> None:
    """Refuse a schedule that none of the operators can take."""
    from ficco.tools.bench.candidates import reason_against

    by_kind = {(case.operator, case.dtype): case for case in shapes}
    problems = [case.problem(2) for case in by_kind.values()]
    for candidate in candidates:
        reasons = [reason_against(candidate, problem) for problem in problems]
        if reasons and all(reasons):
            raise ValueError(f"--schedules: {reasons[0]}")


def drawn(csv: Path, out: Path | None = None) -> list[Path]:
    """Draw the rows of a CSV file, to files whose names begin with its name, or as ``out``."""
    from ficco.tools.bench.frames import place, read_description, schema_of
    from ficco.tools.bench.report import draw

    schema = schema_of(csv)
    title = f"{csv.stem}: {place(about)}" if (about := read_description(csv)) else csv.stem
    return draw(schema, schema.read(csv), out or csv.with_suffix(".png"), title)


def reported(csv: Path) -> Path:
    """Write the report of a CSV file of a bench next to it."""
    from ficco.tools.bench import frames, harness, report

    schema, about = frames.schema_of(csv), frames.read_description(csv)
    rows, path = schema.read(csv), csv.with_suffix(".md")
    if "kind" in rows:
        rows = frames.REPLAY.read(csv)  # its columns include those of all benches of products
        pictures = sorted(csv.parent.glob(f"{csv.stem}_*.png"))
        text = report.report(rows, about, csv.stem, pictures)
    else:
        rooms = (import_module(f"ficco.tools.bench.{kind}") for kind in KINDS)
        subjects = [room.SUBJECT for room in rooms if room.SUBJECT.schema is schema]
        if not subjects:
            raise ValueError(f"--report: required the CSV of a bench, got {csv}")
        text = harness.report(subjects[0], rows, about, csv.stem)
    path.write_text(text)
    return path


# Demo.


#: Seconds after which a demo has hung; it takes about fifteen.
DEMO_S = 300.0


def add_demo(parser: Any) -> None:
    cli.add_ranks(parser, "ranks to start (default: 4, or a GPU each)")
    parser.add_argument("--out", type=Path, help=HELP["out"])


def run_demo(arguments: argparse.Namespace) -> int:
    from ficco.tools.bench.demo import demo

    device = arguments.device or launch.default_device()
    out = arguments.out and cli.writable(arguments.out)
    return launch.launch(demo, arguments.ranks, device, out, device=device, timeout_s=DEMO_S)


# Tune.


#: Seconds that starting the ranks and their libraries may take on top, and how much longer than
#: estimated the steps may take before a run has hung.
TUNE_START_S = 120.0
PATIENCE = 4.0

#: Tolerance of the points of ``--check``, as a share. On CPUs ranks share cores with whatever else
#: runs: on an idle host points were up to 1.3 times as much, beside other work up to twice.
TOLERANCE = {"cuda": 0.25, "cpu": 1.0}

#: Options that ``--check`` refuses.
NOT_CHECKED = ("only", "operator", "shapes", "from_log", "fresh")


def add_tune(parser: Any) -> None:
    measured = parser.add_argument_group("what is measured")
    add = measured.add_argument
    add("--quick", **FLAG, help="measure for less time, and less exactly")
    text = f"these steps: {', '.join(TUNED)}"
    add("--only", nargs="+", metavar="STEP", choices=TUNED, help=text)
    add("--operator", **NAMES, choices=OPERATORS, help=HELP["tuned operator"])
    add("--shapes", **CSV, help=HELP["tuned shapes"])
    add("--from-log", **FILE, help=HELP["from-log"])
    add("--check", **FLAG, help="compare a few points with the file; change nothing")
    add("--tolerance", type=float, help=HELP["tolerance"])
    how = parser.add_argument_group("how")
    cli.add_ranks(how)
    how.add_argument("--fresh", **FLAG, help="begin anew instead of continuing an interrupted run")
    how.add_argument("--out", **FILE, help="the machine's file (default: the user's own)")


def run_tune(arguments: argparse.Namespace) -> int:
    from ficco.dma.engine import fingerprint
    from ficco.machine import user_dir
    from ficco.tools.tune.run import default_name, opened, tune

    _refuse(arguments)
    device = arguments.device or launch.default_device()
    ranks = launch.check_ranks(arguments.ranks, device, 2)  # one has no peer
    here = fingerprint(device, launch.ranks_of_a_host(ranks))
    path = arguments.out or user_dir() / f"{default_name(here)}.yaml"
    if arguments.check:
        return _check(arguments, device, ranks, path)
    if not (arguments.fresh and path.is_file()):
        opened(path, here)  # raises for a wrong file before ranks are started
    settings = TuneSettings(
        path=path.absolute(),
        device=device,
        quick=arguments.quick,
        only=tuple(arguments.only or ()),
        fresh=arguments.fresh,
        operators=tuple(arguments.operator or ()),
        problems=tuple(_problems(arguments, ranks, device)),
        command=cli.command(),
    )
    if not settings.steps:
        raise ValueError("--only shapes: required --shapes or --from-log with them, got none")
    seconds = sum(settings.seconds(name) for name in settings.steps)
    timeout_s = TUNE_START_S + PATIENCE * seconds
    outcome = launch.launch(tune, arguments.ranks, settings, device=device, timeout_s=timeout_s)
    if launch.own_rank():
        return 1 if outcome.error or outcome.failures else 0
    if outcome.error:
        print(f"ficco tune: error: {outcome.error}", file=sys.stderr)
        return 2
    print(f"wrote {path}", file=sys.stderr)
    if arguments.out is not None:
        used = shlex.quote(str(path.absolute()))
        print(f"use it with FICCO_MACHINE={used}", file=sys.stderr)
    for name, why in outcome.failures.items():
        print(f"ficco tune: error: {name}: {why}; what the file had was left", file=sys.stderr)
    if outcome.failures:
        print("run the same command again to measure what is left", file=sys.stderr)
    return 1 if outcome.failures else 0


def _refuse(arguments: argparse.Namespace) -> None:
    """Refuse options that say nothing together."""
    tolerance = arguments.tolerance
    if tolerance is not None and not arguments.check:
        raise ValueError(f"--tolerance: required with --check, got {tolerance} without it")
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"--tolerance: required a number above 0, got {tolerance}")
    for name in NOT_CHECKED if arguments.check else ():
        if getattr(arguments, name):
            without = f"required without --{name.replace('_', '-')}"
            raise ValueError(f"--check: {without}; it looks at a few points of each block")


def _problems(arguments: argparse.Namespace, ranks: int, device: str) -> list[Any]:
    from ficco.ops import problem_log
    from ficco.tools.tune.calls import from_cases

    problems = []
    if arguments.shapes:
        read = cases.read(arguments.shapes)
        problems += from_cases(read, ranks, device, arguments.operator or ())
    if arguments.from_log:
        wanted = arguments.operator or OPERATORS
        # Operands of float8 are made in the kinds that shapes are measured in.
        logged = [
            one
            for one in problem_log.read(arguments.from_log, ranks)
            if one.kind_of_operands in cases.DTYPES and one.operator in wanted
        ]
        if not logged:
            of = f" of {', '.join(arguments.operator)}" if arguments.operator else ""
            raise ValueError(
                f"--from-log: required a problem of {ranks} ranks{of} in {arguments.from_log}, got "
                "none; run the program with options(log_problems=...) on as many ranks"
            )
        problems += logged
    return list(dict.fromkeys(problems))


def _check(arguments: argparse.Namespace, device: str, ranks: int, path: Path) -> int:
    from ficco.dma.engine import fingerprint
    from ficco.machine import load
    from ficco.tools.tune.run import check, report

    tolerance, again = arguments.tolerance or TOLERANCE[device], _again(arguments)
    if not path.exists():
        raise ValueError(
            f"--check: required a machine's file, got none at {path}; run `{again}` first, or give "
            "another file with --out"
        )
    machine = load(path)
    here = fingerprint(device, ranks)
    if not here.matches(machine):
        raise ValueError(
            f"{path}: required a machine of {here.ranks} ranks of {here.accelerator}, as here, got "
            f"{machine.ranks} of {machine.accelerator}; give another file with --out"
        )
    how: Any = {"device": device, "timeout_s": TUNE_START_S * 2}
    points = launch.launch(check, arguments.ranks, machine, device, **how)
    if not launch.own_rank():
        print(report(points, tolerance, again))
    return 0 if all(point.holds(tolerance) for point in points) else 1


def _again(arguments: argparse.Namespace) -> str:
    """The command that measures the machine that was checked."""
    words = ["ficco", "tune"]
    for name in ("ranks", "device", "out"):
        if (value := getattr(arguments, name)) is not None:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


# Doctor.


#: Seconds after which the ranks of ``doctor`` have hung.
DOCTOR_S = 120.0


def add_doctor(parser: Any) -> None:
    add = parser.add_argument
    add("--json", **FLAG, help="print JSON")
    cli.add_ranks(parser, HELP["ranks"])
    add("--selftest", **FLAG, help=HELP["selftest"])
    add("--report", **FILE, help=HELP["report"])
    add("--read", **FILE, help=HELP["read"])


def run_doctor(arguments: argparse.Namespace) -> int:
    from ficco.tools import doctor

    if arguments.read and (arguments.selftest or arguments.report):
        raise ValueError("--read: required without --selftest and --report, which write a report")
    if arguments.read:
        return _read(arguments.read)
    if arguments.selftest:
        return _selftest(arguments)
    if arguments.report is not None:
        raise ValueError("--report: required with --selftest, which writes it; got it alone")
    device, ranks = arguments.device or launch.default_device(), arguments.ranks
    if ranks is not None:
        launch.check_ranks(ranks, device)  # before the report, which takes seconds
    report = doctor.report(ranks, device)
    report["extra"] = {
        one: "installed" if cli.is_installed(one) else cli.not_installed(one) for one in cli.EXTRA
    }
    if ranks is not None:
        how: Any = {"device": device, "timeout_s": DOCTOR_S}
        name, seen = launch.launch(doctor.after_a_call, ranks, device, **how)
        report["engines"][name] = seen
        report["call"] = {"ranks": ranks, "engine": name, "result": "right on every rank"}
    if arguments.json:
        print(json.dumps(report))
    else:
        doctor.show(report)
    return 0


def _selftest(arguments: argparse.Namespace) -> int:
    from datetime import date

    from ficco.tools.selftest import run as selftest

    path = arguments.report or Path(f"ficco-selftest-{date.today()}.md")
    path = path.with_suffix(".md") if path.suffix == ".json" else path
    for one in (path, path.parent / f"{path.stem}.json"):
        existed = one.exists()
        try:
            one.open("a").close()
        except OSError as error:
            why = f"required a file that can be written, got {one} ({error.strerror})"
            raise ValueError(f"--report: {why}") from None
        if not existed:
            one.unlink()
    about = selftest.about() if arguments.device != "cpu" else {}
    if obstacle := about.get("obstacle"):
        raise ValueError(f"{obstacle}. With --device cpu the engine for CPUs is tested")
    run = selftest.selftest(arguments.device or launch.default_device(), arguments.ranks)
    report = selftest.document(run, about or selftest.about())
    path.write_text(selftest.markdown(report))
    path.with_suffix(".json").write_text(json.dumps(report, indent=1))
    if arguments.json:
        print(json.dumps(report))
    else:
        selftest.show(report, path)
    return 1 if run.failed else 0


def _read(path: Path) -> int:
    """Print what a report says about the claims of the pages, and write its machine file."""
    from ficco.machine import save
    from ficco.tools.selftest import run as selftest

    report = selftest.read(path)
    try:
        claims, machine = selftest.claims(report), selftest.machine(report)
        none = [f"docs/api/amd-claims.md makes no claims about the engine {report['engine']}"]
    except KeyError as missing:
        raise ValueError(f"--read: required a whole report, got {path} without {missing}") from None
    where = path.with_suffix(".yaml")
    print("\n".join(claims or none))
    if machine is None:
        print("no machine file: the report has no figures of the machine", file=sys.stderr)
        return 0
    save(machine, where)
    used = shlex.quote(str(where.absolute()))
    print(f"wrote {where}; use it with FICCO_MACHINE={used}", file=sys.stderr)
    return 0
