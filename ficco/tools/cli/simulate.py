"""``ficco simulate``: predict schedules on a described machine; needs no GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ficco.plan.amounts import seconds_text
from ficco.problems.products import OPERATORS
from ficco.problems.sizes import ASKABLE, MODES, problem_of
from ficco.tools.bench import cases
from ficco.tools.bench.cases import Case
from ficco.tools.cli.site import (
    CSV,
    FILE,
    FLAG,
    GATHERS,
    MACHINE,
    add_sizes,
    add_world,
    picture,
    ranks_per_host,
    shapes,
    site,
    sizes,
)

if TYPE_CHECKING:
    import pandas as pd

    from ficco.machine import Machine
    from ficco.simulate.timeline import Timeline


def options(parser: Any) -> None:
    parser.add_argument(
        "schedules", nargs="*", help="names such as growing:compute=2 (default: all named ones)"
    )
    what = parser.add_argument_group("what")
    text = "shapes that ship with ficco (default: measured)"
    what.add_argument("--set", choices=list(cases.SETS), metavar="NAME", help=text)
    what.add_argument("--shapes", **CSV, help="shapes: columns name, m, n, k")
    add_sizes(parser)
    where = parser.add_argument_group("where")
    where.add_argument("--machine", help=f"a name or a file (default: {MACHINE})")
    add_world(where)
    where.add_argument(
        "--mode",
        choices=MODES,
        help="queued: the host runs ahead; idle: the GPU waits for it (default: queued; on CPUs "
        "idle, since the caller itself carries out the call)",
    )
    result = parser.add_argument_group("output")
    result.add_argument("--json", **FLAG, help="print the rows as JSON")
    result.add_argument("--csv", **FILE, help="write the rows")
    result.add_argument("--draw", **FILE, help="with one shape: draw its timeline (png, svg)")
    result.add_argument("--trace", **FILE, help="with one shape: write its trace for Perfetto")
    text = "with one shape: write its timelines, for ficco plot"
    result.add_argument("--timelines", **FILE, help=text)


def write(timelines: Sequence[Timeline], arguments: argparse.Namespace) -> None:
    """Write what ``--draw`` and ``--trace`` ask for."""
    from ficco.tools.bench.draw import draw, trace

    if arguments.draw:
        ranks = [0] if len(timelines) > 1 else None  # all ranks of one call
        print(f"wrote {draw(timelines, arguments.draw, ranks=ranks)}", file=sys.stderr)
    if arguments.trace:
        print(f"wrote {trace(timelines, arguments.trace)}", file=sys.stderr)


def run(arguments: argparse.Namespace) -> int:
    import pandas as pd

    from ficco.schedules import NAMED, Schedule
    from ficco.tools.bench import simulated
    from ficco.tools.bench.frames import append, records

    picture(arguments.draw)
    asked = site(arguments.machine, ranks_per_host(arguments), default=MACHINE)
    mode = arguments.mode or ("idle" if asked.mode == "idle" else "queued")
    if "auto" in arguments.schedules:
        raise ValueError(
            f"schedules: required one of {', '.join(NAMED)}, got 'auto', which stands for one of "
            "them; `ficco explain` says for which"
        )
    schedules = [Schedule.parse(name) for name in arguments.schedules] or None
    found = list(_asked(arguments, asked.world * arguments.hosts))
    drawn = arguments.draw or arguments.trace or arguments.timelines
    if drawn and len(found) > 1:
        raise ValueError(
            f"--draw, --trace, --timelines: required one shape, got {len(found)}; "
            "give it with --m, --n and --k"
        )
    machine, problems = asked.simulated, [one for one, _ in found]
    rows = pd.concat(
        [simulated.simulate_problem(one, shape, machine, mode, schedules) for one, shape in found],
        ignore_index=True,
    )
    if arguments.json:
        print(json.dumps(records(rows)))
    else:
        print(", ".join(dict.fromkeys(map(_what, problems))))
        names = ASKABLE[problems[0].operator].required
        what = "m, n per rank, k" if "m" in names else ", ".join(names).replace("_", " ")
        given = sizes(arguments)
        _print(rows, f"{what}; candidate", ", ".join(str(given.get(name)) for name in names))
    if arguments.csv:
        arguments.csv.unlink(missing_ok=True)
        print(f"wrote {append(arguments.csv, rows)}", file=sys.stderr)
    if drawn:
        _timelines(arguments, found[0][0], machine, mode)
    return 0


def _asked(arguments: argparse.Namespace, world: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Problems, and what rows say of them."""
    from ficco.tools.bench.simulated import shape_of

    given, operator = sizes(arguments), arguments.operator
    if sum([bool(given), arguments.set is not None, arguments.shapes is not None]) > 1:
        raise ValueError("required one of --set, --shapes, and --m with --n and --k; got several")
    if given or operator not in (None, *OPERATORS):
        hosts = arguments.hosts
        one: Any = problem_of(operator or GATHERS, world, arguments.dtype, given, hosts=hosts)
        if one.operator in OPERATORS:
            case = Case("x".join(map(str, (one.m, one.n, one.k))), one.m, one.n, one.k)
            yield one, shape_of(case, one)
        else:
            yield one, {"case": str(one), "dtype": arguments.dtype}
        return
    for case in shapes(arguments, [arguments.set or "measured"]):
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


def _what(problem: Any) -> str:
    """What stands above a table: sizes are in it, but none of those that have defaults."""
    return problem.operator if problem.operator in OPERATORS else str(problem)


def _print(rows: pd.DataFrame, heading: str, sizes: str) -> None:
    """The rows as a table. ``heading``: of what is in its first column, sizes first; ``sizes``: of
    a call of another operator than products."""
    import pandas as pd

    from ficco.tools.bench.frames import cells, show
    from ficco.tools.bench.simulated import BOUNDS

    bound = rows["candidate"].isin(BOUNDS)
    text = pd.DataFrame(
        {
            heading: rows["candidate"],
            "time": (rows["ms"] * 1e-3).map(seconds_text),
            "x serial": cells(rows["speedup"].where(~bound | (rows["candidate"] == "ideal"))),
            "of ideal": cells(rows["share"].where(~bound)),
        }
    )
    tables: list[pd.DataFrame] = []
    starts, ends = [], []
    for case, mine in rows.groupby("case", sort=False):
        given = ", ".join(str(mine[name].iloc[0]) for name in "mnk")
        title = given if case == given.replace(", ", "x") else f"{case}: {given}"
        title = title if mine["m"].iloc[0] else sizes
        starts.append(sum(map(len, tables)))
        tables += [pd.DataFrame([[title, "", "", ""]], columns=list(text)), text.loc[mine.index]]
        ends.append(sum(map(len, tables)) - 1)
    machine, world, hosts, mode = rows.iloc[0][["machine", "world", "hosts", "mode"]]
    over = f" on {hosts} hosts" if hosts > 1 else ""
    title = f"simulated on {machine}, {world} ranks{over}, {mode}"
    show(title, pd.concat(tables), bold=starts, sections=ends)
