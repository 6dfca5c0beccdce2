"""``ficco explain``."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

#: Seconds that ``--measure`` takes, beside starting the ranks and proving every candidate right.
MEASURE_S = 20.0

#: The file with the problems of ``--rule-table``, where it is filled in.
TABLE = "rule-table"


def add(commands: Any) -> None:
    """Add the command to the parser."""
    text = "say which schedule a call would take, why, and what is predicted of the others"
    parser = commands.add_parser("explain", help=text, description=text)
    parser.add_argument("--m", type=int, help="rows of the gathered A")
    parser.add_argument("--n", type=int, help="columns of one rank's B")
    parser.add_argument("--k", type=int, help="columns of A")
    parser.add_argument("--world", type=int, help="number of ranks (default: the machine's)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--schedule", default="auto", help="explain this one (default: auto)")
    parser.add_argument("--machine", help="a name or a file (default: this host's)")
    parser.add_argument("--captured", action="store_true", help="the call is captured in a graph")
    parser.add_argument("--search", action="store_true", help="look beyond the named schedules")
    parser.add_argument("--measure", action="store_true", help="time the candidates here, too")
    parser.add_argument(
        "--seconds", type=float, default=MEASURE_S, help="for --measure (default: %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw the candidates (png, svg)")
    parser.add_argument(
        "--rule-table",
        action="store_true",
        help="what the paper's rule takes for its Table I on --machine, in Markdown",
    )
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help=f"put that table between {TABLE}'s markers"
    )
    parser.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    if arguments.rule_table:
        return _rule_table(arguments)
    import ficco
    from ficco.machine import find

    for name in ("m", "n", "k"):
        if getattr(arguments, name) is None:
            raise ValueError(f"--{name}: required a size, got none")
    machine = find(arguments.machine, None)
    world = arguments.world
    if world is None and machine is not None:
        world = machine.ranks
    if world is None:
        raise ValueError("--world: required the number of ranks or a --machine, got none")
    decision = ficco.explain(
        "all_gather_matmul",
        m=arguments.m,
        n=arguments.n,
        k=arguments.k,
        dtype=arguments.dtype,
        world=world,
        schedule=arguments.schedule,
        captured=arguments.captured,
        machine=machine,
        search=arguments.search,
    )
    measured = _measure(arguments, decision) if arguments.measure else {}
    if arguments.json:
        print(json.dumps(as_json(decision, measured), indent=2))
    else:
        _print(decision, measured)
    if arguments.draw:
        from ficco.bench.decisions import draw

        print(f"wrote {draw(decision, measured, arguments.draw)}")
    return 0


def _measure(arguments: argparse.Namespace, decision: Any) -> dict[str, dict[str, float]]:
    """Seconds of every candidate by mode, measured on the ranks of this host."""
    from ficco.bench.candidates import parse
    from ficco.bench.cases import Case
    from ficco.bench.measure import modes_of
    from ficco.bench.run import Settings, bench
    from ficco.launch import default_device, launch

    problem, device = decision.problem, default_device()
    names = [one.schedule for one in decision.candidates] or [str(decision.schedule)]
    with tempfile.TemporaryDirectory(prefix="ficco-explain-") as folder:
        settings = Settings(
            cases=(Case("explained", problem.m, problem.n, problem.k, problem.dtype),),
            candidates=tuple(map(parse, names)),
            modes=tuple(mode for mode in modes_of(device, None) if mode != "graph"),
            device=device,
            rounds=200,
            seconds=arguments.seconds,
            csv=Path(folder) / "explained.csv",
            quiet=True,
        )
        rows = launch(bench, problem.world, settings, device=device)
    found: dict[str, dict[str, float]] = {}
    for row in rows or ():
        if row.ok:
            found.setdefault(row.candidate, {})[row.mode] = row.ms * 1e-3
    return found


def as_json(decision: Any, measured: dict[str, dict[str, float]]) -> dict[str, Any]:
    """A decision as data for other programs; all times are seconds."""
    return {
        "problem": str(decision.problem),
        "schedule": str(decision.schedule),
        "source": decision.source,
        "reason": decision.reason,
        "machine": decision.machine and decision.machine.name,
        "mode": decision.mode,
        "candidates": [
            {
                "schedule": one.schedule,
                "predicted": {"queued": one.queued, "idle": one.idle},
                "measured": measured.get(one.schedule, {}),
                "share_of_ideal": one.share,
                "gemm_decomposition": one.losses.gemm,
                "copy_decomposition": one.losses.copies,
                "contention": one.losses.contention,
                "extra_bytes": one.extra_bytes,
            }
            for one in decision.candidates
        ],
    }


def _print(decision: Any, measured: dict[str, dict[str, float]]) -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    from ficco.heuristics.model import seconds_text

    console = Console(width=None if sys.stdout.isatty() else 160)
    print(decision.problem)
    print(f"{decision.schedule}\n  {decision.source}: {decision.reason}")
    table = Table()
    table.add_column("schedule", overflow="fold")
    modes = [m for m in ("queued", "idle") if any(m in times for times in measured.values())]
    heads = ["queued", "idle", *(f"measured {mode}" for mode in modes)]
    heads += ["of ideal", "DIL gemm", "DIL copies", "CIL", "memory"]
    for head in heads:
        table.add_column(head, justify="right")
    for one in decision.candidates:
        times = measured.get(one.schedule, {})
        table.add_row(
            one.schedule,
            seconds_text(one.queued),
            "" if one.idle is None else seconds_text(one.idle),
            *(seconds_text(times[mode]) if mode in times else "" for mode in modes),
            f"{one.share:.2f}",
            f"{one.losses.gemm:.2f}",
            f"{one.losses.copies:.2f}",
            f"{one.losses.contention:.2f}",
            f"{one.extra_bytes / 2**20:.1f} MiB",
            style="bold" if one.schedule == str(decision.schedule) else None,
        )
    if decision.candidates:
        console.print(table, highlight=False)
    else:  # measured alone
        for mode, seconds in measured.get(str(decision.schedule), {}).items():
            print(f"measured {mode}: {seconds_text(seconds)}")


def _rule_table(arguments: argparse.Namespace) -> int:
    from ficco.bench.cases import scenarios
    from ficco.bench.decisions import rule_table
    from ficco.bench.report import put_between
    from ficco.machine import find

    machine = find(arguments.machine or "mi300x-8", None)
    assert machine is not None
    text = rule_table(machine, scenarios())
    if arguments.into is None:
        print(text)
        return 0
    put_between(arguments.into, TABLE, text)
    print(f"wrote {arguments.into}")
    return 0
