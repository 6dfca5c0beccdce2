"""``ficco simulate``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ficco.amounts import seconds_text
from ficco.bench import cases
from ficco.bench.cases import Case
from ficco.bench.draw import draw, trace
from ficco.cli.site import GATHERS, MACHINE, missing, picture, site
from ficco.machine import Machine
from ficco.problem import OPERATORS
from ficco.schedules import NAMED, Schedule, plans
from ficco.simulate import MODES, simulate
from ficco.timeline import Timeline, dumps

if TYPE_CHECKING:
    import pandas as pd


def add(commands: Any) -> None:
    """Add the command to the parser."""
    text = "predict schedules on a described machine; needs no GPU"
    parser = commands.add_parser("simulate", help=text, description=text)
    parser.add_argument(
        "schedules", nargs="*", help="names such as growing:compute=2 (default: all named ones)"
    )
    what = parser.add_argument_group("what")
    what.add_argument("--set", help="shapes that ship with ficco (default: measured)")
    what.add_argument("--shapes", type=Path, metavar="CSV", help="shapes: columns name, m, n, k")
    what.add_argument("--m", type=int, help="one shape: rows that a rank multiplies,")
    what.add_argument("--n", type=int, help="columns of one rank's B,")
    what.add_argument("--k", type=int, help="columns of A")
    what.add_argument("--dtype", default="bfloat16", help="dtype of that shape (default: bfloat16)")
    what.add_argument(
        "--operator",
        help=f"an operator, such as matmul_reduce_scatter (default: {GATHERS}, or those of the "
        "set); scattering operators take sets and --shapes with n and k exchanged",
    )
    where = parser.add_argument_group("where")
    where.add_argument("--machine", help=f"a name or a file (default: {MACHINE})")
    where.add_argument("--world", type=int, help="ranks (default: the machine's)")
    where.add_argument(
        "--mode",
        help="queued: the host runs ahead; idle: the GPU waits for it (default: queued; on CPUs "
        "idle, since the caller itself carries out the call)",
    )
    result = parser.add_argument_group("output")
    result.add_argument("--json", action="store_true", help="print the rows as JSON")
    result.add_argument("--csv", type=Path, metavar="FILE", help="write the rows")
    result.add_argument(
        "--draw", type=Path, metavar="FILE", help="with one shape: draw its timeline (png, svg)"
    )
    result.add_argument(
        "--trace", type=Path, metavar="FILE", help="with one shape: write its trace for Perfetto"
    )
    result.add_argument(
        "--timelines",
        type=Path,
        metavar="FILE",
        help="with one shape: write its timelines, for ficco plot",
    )
    parser.set_defaults(run=_simulate)


def write(timelines: Sequence[Timeline], arguments: argparse.Namespace, note: str) -> None:
    """Write what ``--draw`` and ``--trace`` ask for."""

    if arguments.draw:
        ranks = [0] if len(timelines) > 1 else None  # all ranks of one call
        print(f"wrote {draw(timelines, arguments.draw, ranks=ranks, note=note)}", file=sys.stderr)
    if arguments.trace:
        print(f"wrote {trace(timelines, arguments.trace)}", file=sys.stderr)


def _simulate(arguments: argparse.Namespace) -> int:
    import pandas as pd

    from ficco.bench import simulated
    from ficco.bench.frames import append, records

    if arguments.mode not in (None, *MODES):
        raise ValueError(f"--mode: required one of {', '.join(MODES)}, got {arguments.mode!r}")
    picture(arguments.draw)
    asked = site(arguments.machine, arguments.world, default=MACHINE)
    world = asked.world
    mode = arguments.mode or ("idle" if asked.mode == "idle" else "queued")
    if "auto" in arguments.schedules:
        raise ValueError(
            f"schedules: required one of {', '.join(NAMED)}, got 'auto', which stands for one of "
            "them; `ficco explain` says for which"
        )
    if arguments.operator not in (None, *OPERATORS):
        raise ValueError(
            f"--operator: required one of {', '.join(OPERATORS)}, got {arguments.operator!r}"
        )
    schedules = [Schedule.parse(name) for name in arguments.schedules] or None
    cases = _cases(arguments)
    drawn = arguments.draw or arguments.trace or arguments.timelines
    if drawn and len(cases) > 1:
        raise ValueError(
            f"--draw, --trace, --timelines: required one shape, got {len(cases)}; "
            "give it with --m, --n and --k"
        )
    machine = asked.simulated
    rows = pd.concat(
        [simulated.simulate_case(case, machine, world, mode, schedules) for case in cases],
        ignore_index=True,
    )
    if arguments.json:
        print(json.dumps(records(rows)))
    else:
        print(", ".join(dict.fromkeys(case.operator for case in cases)))
        _print(rows)
    if arguments.csv:
        arguments.csv.unlink(missing_ok=True)
        print(f"wrote {append(arguments.csv, rows)}", file=sys.stderr)
    if drawn:
        _timelines(arguments, cases[0], machine, mode)
    return 0


def _cases(arguments: argparse.Namespace) -> list[Case]:

    sizes = [arguments.m, arguments.n, arguments.k]
    one = any(size is not None for size in sizes)
    if sum([one, arguments.set is not None, arguments.shapes is not None]) > 1:
        raise ValueError("required one of --set, --shapes, and --m with --n and --k; got several")
    if one:
        if absent := missing(arguments):
            given = ", ".join(f"--{name}" for name in "mnk" if f"--{name}" not in absent)
            raise ValueError(f"{absent}: required with {given}, got none")
        for name, size in zip("mnk", sizes, strict=True):
            if size < 0:
                raise ValueError(f"--{name}: required a size of at least 0, got {size}")
        name = "x".join(map(str, sizes))
        m, n, k = sizes
        return [cases.Case(name, m, n, k, arguments.dtype, operator=arguments.operator or GATHERS)]
    name = arguments.set or "measured"
    if not arguments.shapes and name not in cases.SETS:
        raise ValueError(f"--set: required one of {', '.join(cases.SETS)}, got {name!r}")
    shapes = list(cases.read(arguments.shapes) if arguments.shapes else cases.SETS[name]())
    return [case.on(arguments.operator) for case in shapes] if arguments.operator else shapes


def _timelines(arguments: argparse.Namespace, case: Case, machine: Machine, mode: str) -> None:
    from ficco.bench import simulated

    problem = case.problem(machine.ranks)
    schedules = [Schedule.parse(name) for name in arguments.schedules]
    timelines = [
        simulate(plans(problem, schedule), machine, mode, f"{schedule}: simulated")
        for schedule in schedules or simulated.default_schedules(problem, machine)
    ]
    write(timelines, arguments, f"{problem}\nsimulated on {machine.name}, {mode}")
    if arguments.timelines:
        arguments.timelines.parent.mkdir(parents=True, exist_ok=True)
        arguments.timelines.write_text(dumps(timelines))
        print(f"wrote {arguments.timelines}", file=sys.stderr)


def _print(rows: pd.DataFrame) -> None:
    import pandas as pd

    from ficco.bench.simulated import BOUNDS
    from ficco.bench.tables import cells, show

    bound = rows["candidate"].isin(BOUNDS)
    text = pd.DataFrame(
        {
            "m, n per rank, k; candidate": rows["candidate"],
            "time": (rows["ms"] * 1e-3).map(seconds_text),
            "x serial": cells(rows["speedup"].where(~bound | (rows["candidate"] == "ideal"))),
            "of ideal": cells(rows["share"].where(~bound)),
        }
    )
    heads, tables, ends = list(text), [], []
    for case, mine in rows.groupby("case", sort=False):
        sizes = ", ".join(str(mine[name].iloc[0]) for name in "mnk")
        title = sizes if case == sizes.replace(", ", "x") else f"{case}: {sizes}"
        tables += [pd.DataFrame([[title, "", "", ""]], columns=heads), text.loc[mine.index]]
        ends.append(sum(map(len, tables)))
    starts = [0, *ends[:-1]]
    machine, world, mode = rows.iloc[0][["machine", "world", "mode"]]
    show(
        f"simulated on {machine}, {world} ranks, {mode}",
        pd.concat(tables),
        bold=starts,
        sections=[end - 1 for end in ends],
    )
