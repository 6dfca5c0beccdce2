"""Commands that need no GPU: ``simulate``, ``plan``, ``explain`` and ``plot``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ficco.errors import ConfigError
from ficco.plan.render import SECONDS, column, legend, seconds_text
from ficco.problems.products import OPERATORS
from ficco.problems.sizes import ASKABLE, MODES, problem_of
from ficco.tools import cli, launch
from ficco.tools.bench import cases
from ficco.tools.bench.cases import BenchSettings, Case
from ficco.tools.cli import CSV, FILE, FLAG, GATHERS, MACHINE, NUMBER
from ficco.tools.cli.measure import BENCH_START_S, drawn, reported

if TYPE_CHECKING:
    import pandas as pd

    from ficco.machine import Machine
    from ficco.simulate.timeline import Timeline


#: Help of the options whose help is long.
HELP = {
    "schedules": "names such as growing:compute=2 (default: all named ones)",
    "set": "shapes that ship with ficco (default: measured)",
    "mode": "queued: the host runs ahead; idle: the GPU waits for it (default: queued; on CPUs "
    "idle, since the caller itself carries out the call)",
    "workspace-bytes": "cap on staging (gathering operators); pieces then share it as a ring",
    "machine": f"machine that auto and --draw go by: a name or a file (default: {MACHINE})",
    "from-log": "instead: schedules of problems that a program logged with "
    "options(log_problems=FILE)",
    "files": "timelines of ficco simulate or bench --timelines, drawn side by side; or CSV files "
    "of bench, replay or simulate, each drawn next to it",
    "out": "png or svg; of a CSV of products the start of the names of two pictures (default: "
    "timelines.png, or the CSV's name)",
}


# Simulate.


def add_simulate(parser: Any) -> None:
    parser.add_argument("schedules", nargs="*", help=HELP["schedules"])
    problems = parser.add_argument_group("what")
    problems.add_argument("--set", choices=list(cases.SETS), metavar="NAME", help=HELP["set"])
    problems.add_argument("--shapes", **CSV, help="shapes: columns name, m, n, k")
    cli.add_sizes(parser)
    where = parser.add_argument_group("where")
    where.add_argument("--machine", help=f"a name or a file (default: {MACHINE})")
    cli.add_world(where)
    where.add_argument("--mode", choices=MODES, help=HELP["mode"])
    add = parser.add_argument_group("output").add_argument
    add("--json", **FLAG, help="print the rows as JSON")
    add("--csv", **FILE, help="write the rows")
    add("--draw", **FILE, help="with one shape: draw its timeline (png, svg)")
    add("--trace", **FILE, help="with one shape: write its trace for Perfetto")
    add("--timelines", **FILE, help="with one shape: write its timelines, for ficco plot")


def write(timelines: Sequence[Timeline], arguments: argparse.Namespace) -> None:
    """Write what ``--draw`` and ``--trace`` ask for."""
    from ficco.tools.bench.draw import draw, trace

    if arguments.draw:
        ranks = [0] if len(timelines) > 1 else None  # all ranks of one call
        print(f"wrote {draw(timelines, arguments.draw, ranks=ranks)}", file=sys.stderr)
    if arguments.trace:
        print(f"wrote {trace(timelines, arguments.trace)}", file=sys.stderr)


def run_simulate(arguments: argparse.Namespace) -> int:
    import pandas as pd

    from ficco.schedules import NAMED, Schedule
    from ficco.tools.bench import simulated
    from ficco.tools.bench.frames import append, records

    cli.picture(arguments.draw)
    where = cli.site(arguments.machine, cli.ranks_per_host(arguments), host=MACHINE)
    mode = arguments.mode or ("idle" if where.mode == "idle" else "queued")
    if "auto" in arguments.schedules:
        raise ValueError(
            f"schedules: required one of {', '.join(NAMED)}, got 'auto', which stands for one of "
            "them; `ficco explain` says for which"
        )
    schedules = [Schedule.parse(name) for name in arguments.schedules] or None
    requests = list(_problems(arguments, where.world * arguments.hosts))
    drawn = arguments.draw or arguments.trace or arguments.timelines
    if drawn and len(requests) > 1:
        raise ValueError(
            f"--draw, --trace, --timelines: required one shape, got {len(requests)}; "
            "give it with --m, --n and --k"
        )
    machine, problems = where.simulated, [one for one, _ in requests]
    simulate = partial(simulated.simulate_problem, machine=machine, mode=mode, schedules=schedules)
    rows = pd.concat([simulate(one, shape) for one, shape in requests], ignore_index=True)
    if arguments.json:
        print(json.dumps(records(rows)))
    else:
        names = (one.operator if one.operator in OPERATORS else str(one) for one in problems)
        print(", ".join(dict.fromkeys(names)))  # with the sizes of those that are no products
        required, values = ASKABLE[problems[0].operator].required, cli.sizes(arguments)
        heads = "m, n per rank, k" if "m" in required else ", ".join(required).replace("_", " ")
        texts = (str(values.get(name)) for name in required)
        _print_rows(rows, f"{heads}; candidate", ", ".join(texts))
    if arguments.csv:
        arguments.csv.unlink(missing_ok=True)
        print(f"wrote {append(arguments.csv, rows)}", file=sys.stderr)
    if drawn:
        _timelines(arguments, requests[0][0], machine, mode)
    return 0


def _problems(arguments: argparse.Namespace, world: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The requested problems, each with the columns that describe it in rows."""
    from ficco.tools.bench.simulated import shape_of

    values, operator = cli.sizes(arguments), arguments.operator
    if sum([bool(values), arguments.set is not None, arguments.shapes is not None]) > 1:
        raise ValueError("required one of --set, --shapes, and --m with --n and --k; got several")
    if values or operator not in (None, *OPERATORS):
        hosts = arguments.hosts
        one: Any = problem_of(operator or GATHERS, world, arguments.dtype, values, hosts=hosts)
        if one.operator in OPERATORS:
            case = Case("x".join(map(str, (one.m, one.n, one.k))), one.m, one.n, one.k)
            yield one, shape_of(case, one)
        else:
            yield one, {"case": str(one), "dtype": arguments.dtype}
        return
    for case in cli.shapes(arguments, [arguments.set or "measured"]):
        case = case.on(operator or case.operator)
        problem = replace(case.problem(world), hosts=arguments.hosts)
        yield problem, shape_of(case, problem)


def _timelines(arguments: argparse.Namespace, problem: Any, machine: Machine, mode: str) -> None:
    from ficco.heuristics.families import family_of
    from ficco.schedules import Schedule
    from ficco.simulate import simulate
    from ficco.simulate.timeline import dumps

    family = family_of(problem)
    schedules = [Schedule.parse(name) for name in arguments.schedules]
    timelines = [
        simulate(family.plans(problem, schedule), machine, mode, f"{schedule}: simulated")
        for schedule in schedules or family.schedules(problem, machine)
    ]
    write(timelines, arguments)
    if arguments.timelines:
        arguments.timelines.parent.mkdir(parents=True, exist_ok=True)
        arguments.timelines.write_text(dumps(timelines))
        print(f"wrote {arguments.timelines}", file=sys.stderr)


def _print_rows(rows: pd.DataFrame, heading: str, sizes: str) -> None:
    """Print the rows as a table. ``heading``: of the first column, sizes first. ``sizes``: sizes of
    an operator other than products."""
    import pandas as pd

    from ficco.tools.bench.frames import cells, show, show_meanings
    from ficco.tools.bench.simulated import BOUNDS

    bound = rows["candidate"].isin(BOUNDS)
    columns = {heading: rows["candidate"], "time": column(rows["ms"] * 1e-3, SECONDS)}
    columns["x serial"] = cells(rows["speedup"].where(~bound | (rows["candidate"] == "ideal")))
    text = pd.DataFrame({**columns, "of ideal": cells(rows["share"].where(~bound))})
    tables: list[pd.DataFrame] = []
    starts, ends = [], []
    for (case, *_), mine in rows.groupby(["case", *"mnk"], sort=False):
        sizes_text = ", ".join(str(mine[name].iloc[0]) for name in "mnk")
        title = sizes_text if case == sizes_text.replace(", ", "x") else f"{case}: {sizes_text}"
        title = title if mine["m"].iloc[0] else sizes
        starts.append(sum(map(len, tables)))
        tables += [pd.DataFrame([[title, "", "", ""]], columns=list(text)), text.loc[mine.index]]
        ends.append(sum(map(len, tables)) - 1)
    machine, world, hosts, mode = rows.iloc[0][["machine", "world", "hosts", "mode"]]
    over = f" on {hosts} hosts" if hosts > 1 else ""
    title = f"simulated on {machine}, {world} ranks{over}, {mode}"
    show(title, pd.concat(tables), bold=starts, sections=ends)
    show_meanings([*rows["candidate"], *text])


# Plan.


def add_plan(parser: Any) -> None:
    add = parser.add_argument
    add("schedule", help="a name such as hetero-fused-1d:pieces=4,pull, or auto")
    cli.add_sizes(parser)
    cli.add_ranks_of_rows(parser)
    add("--rank", **NUMBER, default=0, help="the rank to print (default: 0)")
    add("--workspace-bytes", **NUMBER, help=HELP["workspace-bytes"])
    add("--machine", help=HELP["machine"])
    add("--draw", **FILE, help="draw the timeline (png, svg)")
    add("--trace", **FILE, help="write a trace for Perfetto")
    add("--json", **FLAG, help="print the steps as JSON")
    add("--promela", **FILE, help="write a model of all ranks for SPIN; - prints it, and only it")


def run_plan(arguments: argparse.Namespace) -> int:
    from ficco.heuristics import decide
    from ficco.heuristics.decide import too_large
    from ficco.heuristics.families import family_of
    from ficco.plan import render
    from ficco.proof import check
    from ficco.simulate import simulate
    from ficco.tools.promela import promela

    where = cli.site(arguments.machine, cli.ranks_per_host(arguments), host=MACHINE)
    wanted = cli.problem(arguments, where.world)
    if not 0 <= arguments.rank < wanted.world:
        raise ValueError(f"--rank: required 0 to {wanted.world - 1}, got {arguments.rank}")
    cli.picture(arguments.draw)
    drawn = where.simulated if arguments.draw or arguments.trace else None
    family = family_of(wanted)
    decision = decide(wanted, arguments.schedule, machine=where.machine, mode=where.mode)
    plans = family.plans(wanted, decision.schedule, staging_bytes=arguments.workspace_bytes)
    check(plans)
    one = plans[arguments.rank]
    if arguments.promela is not None:
        model = promela(plans)
        if str(arguments.promela) == "-":
            print(model, end="")
            return 0
        arguments.promela.parent.mkdir(parents=True, exist_ok=True)
        arguments.promela.write_text(model)
    if arguments.json:
        print(json.dumps(_plan_json(one, decision)))
    else:
        print(render(one))
        print(_plan_text(one, decision))
        print(PLAN_LEGEND)
        if why := too_large(wanted, one.rank, one.extra_bytes, where.machine):
            print(why)
    if drawn is not None:
        mode = "idle" if where.mode == "idle" else "queued"
        write([simulate(plans, drawn, mode)], arguments)
    return 0


#: Meaning of the steps of a Plan, whichever there are.
PLAN_LEGEND = (
    "a line is a lane, a column a tick; 2.0 is piece 0 of rank 2, 2.0>1 its copy to rank 1\n"
    "acquire waits until peers have memory for the call, retire tells them that it is over"
)


def _plan_text(plan: Any, decision: Any) -> str:
    ring = f", {plan.stages} steps at once" if plan.stages else ""
    return (
        f"schedule {decision}\n"
        f"checked for all {plan.problem.world} ranks: exact cover, no race, no deadlock\n"
        f"{len(plan.steps)} steps on {len(plan.lanes)} lanes, {plan.words} signal words{ring}"
    )


def _plan_json(plan: Any, decision: Any) -> dict[str, Any]:
    return {
        "problem": asdict(plan.problem),
        **_fields(plan, "schedule rank lanes words"),
        **_fields(decision, "source reason"),
        "buffers": [
            {
                **_fields(one, "name holds dtype"),
                "shape": plan.shape(one.name),
                **_fields(one, "memory layout"),
            }
            for one in plan.buffers
        ],
        **_fields(plan, "stages extra_bytes"),
        "steps": [
            {
                **_fields(step, "op lane label after"),
                "waits": [signal.name for signal in step.waits],
                "posts": [signal.name for signal in step.posts],
                **{
                    key: [{"signal": one.name, "rows": (one.first, one.last)} for one in signals]
                    for key, signals in _fields(step, "gates announces").items()
                },
                "work": _plain(step.work),
            }
            for step in plan.steps
        ],
    }


def _fields(value: Any, names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names.split()}


def _plain(value: Any) -> Any:
    """Regions, and what consists of them, as JSON has them."""
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    return list(map(_plain, value)) if isinstance(value, tuple) else value


# Explain.


#: Seconds of ``--measure`` for timing; the start of ranks and the proofs take more.
MEASURE_S = 20.0


def add_explain(parser: Any) -> None:
    add = parser.add_argument
    cli.add_sizes(parser)
    cli.add_ranks_of_rows(parser)
    add("--schedule", default="auto", help="schedule to explain (default: auto)")
    add("--machine", help="a name or a file (default: this host's)")
    add("--captured", **FLAG, help="the call is captured in a graph")
    add("--from-log", **FILE, help=HELP["from-log"])
    add("--measure", **FLAG, help="also time the candidates on this host")
    add("--seconds", type=float, help=f"time for --measure (default: {MEASURE_S:g})")
    add("--json", **FLAG, help="print everything as JSON")
    add("--draw", **FILE, help="draw the candidates (png, svg)")


def run_explain(arguments: argparse.Namespace) -> int:
    from ficco.heuristics import decide

    if arguments.from_log:
        return _from_log(arguments)
    if arguments.rows and arguments.measure:
        raise ValueError("--measure: required without --rows; it times equal rows only")
    if (seconds := arguments.seconds) is not None:
        if not arguments.measure:
            raise ValueError(f"--seconds: required with --measure, got {seconds:g} without it")
        launch.check_seconds(seconds)
    cli.picture(arguments.draw)
    where = cli.site(arguments.machine, cli.ranks_per_host(arguments), captured=arguments.captured)
    wanted = cli.problem(arguments, where.world)
    if arguments.measure and wanted.operator not in OPERATORS:
        raise ValueError(
            f"--measure: required an operator of products, got {wanted.operator}; "
            f"`ficco bench {wanted.operator}` times it"
        )
    decision = decide(wanted, arguments.schedule, machine=where.machine, mode=where.mode)
    measured, bad = _measure(arguments, decision) if arguments.measure else ({}, False)
    if arguments.json:
        print(json.dumps(as_json(decision, measured), indent=2))
    else:
        _print_decision(decision, measured)
    if arguments.draw:
        from ficco.tools.bench.simulated import draw

        print(f"wrote {draw(decision, measured, arguments.draw)}", file=sys.stderr)
    return 1 if bad else 0


def _from_log(arguments: argparse.Namespace) -> int:
    """A line for each problem of a log, or as JSON."""
    from ficco.heuristics import decide
    from ficco.ops import problem_log

    for name in (*cli.sizes(arguments), "operator", "rows", "measure", "seconds", "draw"):
        if getattr(arguments, name) not in (None, False):
            raise ValueError(
                f"--from-log: required without --{name.replace('_', '-')}, since the log has the "
                "problems; leave one of the two out"
            )
    problems = problem_log.read(arguments.from_log, arguments.world)
    if not problems:
        raise ValueError(f"--from-log: required a problem in {arguments.from_log}, got none")
    decisions = []
    for one in problems:
        where = cli.site(arguments.machine, one.local_world, captured=arguments.captured)
        how = {"machine": where.machine, "mode": where.mode}
        decisions.append(decide(one, arguments.schedule, **how))
    if arguments.json:
        print(json.dumps([as_json(decision, {}) for decision in decisions], indent=2))
    else:
        print(*map(problem_log.choice, decisions), sep="\n")
    return 0


def _measure(
    arguments: argparse.Namespace, decision: Any
) -> tuple[dict[str, dict[str, float]], bool]:
    """Seconds of every candidate by mode, measured on the ranks of this host, and whether one was
    wrong or failed.
    """
    from ficco.tools.bench import products
    from ficco.tools.bench.candidates import parse
    from ficco.tools.bench.harness import bench
    from ficco.tools.bench.measure import modes_of

    cli.require_extra()
    problem, device = decision.problem, launch.default_device()
    sizes = problem.m, problem.n, problem.k, problem.kind_of_operands
    case = Case("explained", *sizes, operator=problem.operator)
    names = [one.schedule for one in decision.candidates] or [str(decision.schedule)]
    with tempfile.TemporaryDirectory(prefix="ficco-explain-") as folder:
        settings = BenchSettings(
            subject=products.SUBJECT,
            cases=(case,),
            schedules=tuple(map(parse, names)),
            modes=modes_of(device, None, graphs=False),
            device=device,
            rounds=200,
            seconds=arguments.seconds or MEASURE_S,
            csv=Path(folder) / "explained.csv",
            quiet=True,
        )
        limit = settings.seconds + BENCH_START_S
        rows = launch.launch(bench, problem.world, settings, device=device, timeout_s=limit)
    measured: dict[str, dict[str, float]] = {}
    left_out: dict[str, bool] = {}  # once, not in every mode
    for row in () if rows is None else rows.itertuples():
        if row.status == "ok":
            measured.setdefault(row.candidate, {})[row.mode] = row.ms * 1e-3
        elif not row.candidate:  # the problem itself
            raise ValueError(f"--measure: {row.note}")
        else:
            said = f"{row.status}: {row.candidate}: {row.note}"
            left_out[said] = row.status in ("wrong", "failed")
    for said in left_out:
        print(said, file=sys.stderr)
    return measured, any(left_out.values())


def as_json(decision: Any, measured: dict[str, dict[str, float]]) -> dict[str, Any]:
    """A decision as data for other programs; all times are seconds."""
    candidates = [
        {
            "schedule": one.schedule,
            "predicted": _fields(one, "queued idle"),
            "measured": measured.get(one.schedule, {}),
            "share_of_ideal": one.share,
            "gemm_decomposition": one.losses and one.losses.gemm,
            "copy_decomposition": one.losses and one.losses.copies,
            "contention": one.losses and one.losses.contention,
            "extra_bytes": one.extra_bytes,
        }
        for one in decision.candidates
    ]
    return {
        **{name: str(getattr(decision, name)) for name in ("problem", "schedule")},
        **_fields(decision, "source reason"),
        "machine": decision.machine and decision.machine.name,
        "mode": decision.mode,
        "candidates": candidates,
    }


#: Meaning of the columns of the table.
LEGEND = {
    "queued": "the host runs ahead of the GPU, as in training",
    "idle": "the GPU waits for its host, as in decoding",
    "of ideal": "the longer of the whole GEMM and the whole communication, over the queued time",
    "DIL": "decomposition loss: time of the pieces one after the other, over that of the whole",
    "CIL": "contention loss: time of the call, over its time if copies and GEMMs did not slow each "
    "other down",
    "memory": "of a rank, besides operands and result",
}


def _print_decision(decision: Any, measured: dict[str, dict[str, float]]) -> None:
    import shutil

    from ficco.heuristics.decide import too_large

    on_terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = shutil.get_terminal_size().columns if on_terminal else None
    why = f"  {decision.why}"
    print(decision.problem)
    print(decision.schedule)
    print(textwrap.fill(why, width, subsequent_indent="    ") if width else why)
    for one in decision.candidates:
        if one.schedule == str(decision.schedule):
            if large := too_large(decision.problem, 0, one.extra_bytes, decision.machine):
                print(f"  {large}")
    if decision.candidates:
        table = decision.table(measured, width)
        print(f"{table}\n")
        meanings = {head: text for head, text in LEGEND.items() if f"  {head}" in table}
        print(legend(meanings, width or 120))
    else:  # measured only
        for mode, seconds in measured.get(str(decision.schedule), {}).items():
            print(f"measured {mode}: {seconds_text(seconds)}")


# Plot.


#: Options of ``plot`` for timelines.
OF_TIMELINES = ("trace", "only", "ranks")


def add_plot(parser: Any) -> None:
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help=HELP["files"])
    add("--out", **FILE, help=HELP["out"])
    add("--trace", **FILE, help="write a trace for Perfetto")
    add("--only", metavar="TEXT", help="timelines with this in their title")
    add("--ranks", help="ranks of timelines: 0, 0,3 or all (default: 0)")
    add("--report", **FLAG, help="also write the report of the CSV of a bench anew")


def run_plot(arguments: argparse.Namespace) -> int:
    from ficco.tools.bench.draw import draw, trace

    cli.picture(arguments.out, "--out")
    tables = [path for path in arguments.files if path.suffix == ".csv"]
    if tables and len(tables) < len(arguments.files):
        raise ValueError("FILE: required timelines, or CSV files, got both")
    served = "timelines" if tables else "the CSV of a bench"
    for name in OF_TIMELINES if tables else ("report",):
        if getattr(arguments, name):
            raise ValueError(f"--{name}: required {served}")
    if len(tables) > 1 and arguments.out:
        raise ValueError(
            f"--out: required one CSV file, got {len(tables)}; without --out each picture "
            "has the name of its file"
        )
    for path in tables:
        if not (paths := drawn(path, arguments.out)):
            raise ValueError(f"{path}: required a row with a figure, got none")
        for written in [*paths, reported(path)] if arguments.report else paths:
            print(f"wrote {written}", file=sys.stderr)
    if tables:
        return 0
    chosen = [one for path in arguments.files for one in _read(path, arguments.only)]
    if not chosen:
        raise ValueError(f"--only: required part of a title, got {arguments.only!r}")
    timelines, columns = _arrange(chosen)
    ranks = _ranks(arguments.ranks or "0", timelines)
    out = arguments.out or Path("timelines.png")
    print(f"wrote {draw(timelines, out, columns=columns, ranks=ranks)}", file=sys.stderr)
    if arguments.trace:
        print(f"wrote {trace(timelines, arguments.trace)}", file=sys.stderr)
    return 0


def _read(path: Path, only: str | None) -> list[Timeline]:
    from ficco.simulate.timeline import loads

    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(str(path), "file", f"cannot be read: {why}") from None
    try:
        timelines = loads(text, str(path))
    except ConfigError as error:
        why = "required a file of `ficco simulate --timelines` or `ficco bench --timelines`, or a "
        raise ConfigError(str(path), error.key, f"{why}.csv ({error.expected})") from None
    return [one for one in timelines if only is None or only in one.title]


def _arrange(timelines: list[Timeline]) -> tuple[list[Timeline], int]:
    """Timelines row by row, and the number of columns; timelines of a schedule share a row."""
    from ficco.simulate.timeline import Timeline

    rows: dict[str, list[Timeline]] = {}
    for one in timelines:
        rows.setdefault(one.title.rpartition(": ")[0] or one.title, []).append(one)
    columns = max(map(len, rows.values()))
    padded = [[*row, *[Timeline("", ())] * (columns - len(row))] for row in rows.values()]
    return [one for row in padded for one in row], columns


def _ranks(text: str, timelines: list[Timeline]) -> list[int] | None:
    if text == "all":
        return None
    ranks = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
    least = min(len(one.ranks) for one in timelines if one.ranks)
    if any(not 0 <= rank < least for rank in ranks):
        raise ValueError(f"--ranks: required all, or ranks from 0 to {least - 1}, got {text!r}")
    return ranks
