"""``ficco explain``: say which schedule a call would take, why, and what is predicted of the
others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from ficco.plan.amounts import seconds_text
from ficco.problems.products import OPERATORS
from ficco.tools import launch
from ficco.tools.bench.cases import BenchSettings, Case
from ficco.tools.cli.bench import START_S
from ficco.tools.cli.site import (
    FILE,
    FLAG,
    add_ranks_of_rows,
    add_sizes,
    picture,
    problem,
    ranks_per_host,
    require_extra,
    site,
    sizes,
)

#: Seconds that ``--measure`` times; starting ranks and proving candidates right take more.
MEASURE_S = 20.0


def options(parser: Any) -> None:
    add_sizes(parser)
    add_ranks_of_rows(parser)
    parser.add_argument("--schedule", default="auto", help="schedule to explain (default: auto)")
    parser.add_argument("--machine", help="a name or a file (default: this host's)")
    parser.add_argument("--captured", **FLAG, help="the call is captured in a graph")
    text = "instead: what each problem takes that a program noted with options(log_problems=FILE)"
    parser.add_argument("--from-log", **FILE, help=text)
    parser.add_argument("--measure", **FLAG, help="also time the candidates on this host")
    parser.add_argument(
        "--seconds", type=float, help=f"time for --measure (default: {MEASURE_S:g})"
    )
    parser.add_argument("--json", **FLAG, help="print everything as JSON")
    parser.add_argument("--draw", **FILE, help="draw the candidates (png, svg)")


def run(arguments: argparse.Namespace) -> int:
    from ficco.heuristics import decide

    if arguments.from_log:
        return _from_log(arguments)
    _refuse(arguments)
    asked = site(arguments.machine, ranks_per_host(arguments), captured=arguments.captured)
    asked_of = problem(arguments, asked.world)
    if arguments.measure and asked_of.operator not in OPERATORS:
        raise ValueError(
            f"--measure: required an operator of products, got {asked_of.operator}; "
            "`ficco bench --attention` and `ficco bench --experts` time the others"
        )
    decision = decide(asked_of, arguments.schedule, machine=asked.machine, mode=asked.mode)
    measured, bad = _measure(arguments, decision) if arguments.measure else ({}, False)
    if arguments.json:
        print(json.dumps(as_json(decision, measured), indent=2))
    else:
        _print(decision, measured)
    if arguments.draw:
        from ficco.tools.bench.simulated import draw

        print(f"wrote {draw(decision, measured, arguments.draw)}", file=sys.stderr)
    return 1 if bad else 0


def _from_log(arguments: argparse.Namespace) -> int:
    """A line for each problem of a log, or as JSON."""
    from ficco.heuristics import decide
    from ficco.ops import problem_log

    for name in (*sizes(arguments), "rows", "measure", "draw"):
        if getattr(arguments, name) not in (None, False):
            raise ValueError(f"--{name}: required without --from-log, whose problems have sizes")
    problems = problem_log.read(arguments.from_log, arguments.world)
    if not problems:
        raise ValueError(f"--from-log: required a problem in {arguments.from_log}, got none")
    decisions = []
    for one in problems:
        asked = site(arguments.machine, one.local_world, captured=arguments.captured)
        mode = asked.mode
        decisions.append(decide(one, arguments.schedule, machine=asked.machine, mode=mode))
    if arguments.json:
        print(json.dumps([as_json(decision, {}) for decision in decisions], indent=2))
        return 0
    for decision in decisions:
        print(problem_log.choice(decision))
    return 0


def _refuse(arguments: argparse.Namespace) -> None:
    """Refuse options that say nothing together.

    Raises:
        ValueError: which one, and what it needs.
    """
    if arguments.rows and arguments.measure:
        raise ValueError("--measure: required without --rows; it times equal rows only")
    if (seconds := arguments.seconds) is not None:
        if not arguments.measure:
            raise ValueError(f"--seconds: required with --measure, got {seconds:g} without it")
        launch.check_seconds(seconds)
    picture(arguments.draw)


def _measure(
    arguments: argparse.Namespace, decision: Any
) -> tuple[dict[str, dict[str, float]], bool]:
    """Seconds of every candidate by mode, measured on the ranks of this host, and whether one was
    wrong or failed.

    Raises:
        ValueError: this problem cannot be measured here.
    """
    from ficco.tools.bench import products
    from ficco.tools.bench.candidates import parse
    from ficco.tools.bench.harness import bench
    from ficco.tools.bench.measure import modes_of

    require_extra()
    asked, device = decision.problem, launch.default_device()
    sizes = asked.m, asked.n, asked.k, asked.kind_of_operands
    case = Case("explained", *sizes, operator=asked.operator)
    names = [one.schedule for one in decision.candidates] or [str(decision.schedule)]
    with tempfile.TemporaryDirectory(prefix="ficco-explain-") as folder:
        settings = BenchSettings(
            subject=products.SUBJECT,
            cases=(case,),
            schedules=tuple(map(parse, names)),
            modes=tuple(mode for mode in modes_of(device, None) if mode != "graph"),
            device=device,
            rounds=200,
            seconds=arguments.seconds or MEASURE_S,
            csv=Path(folder) / "explained.csv",
            quiet=True,
        )
        limit = settings.seconds + START_S
        rows = launch.launch(bench, asked.world, settings, device=device, timeout_s=limit)
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
                "gemm_decomposition": one.losses and one.losses.gemm,
                "copy_decomposition": one.losses and one.losses.copies,
                "contention": one.losses and one.losses.contention,
                "extra_bytes": one.extra_bytes,
            }
            for one in decision.candidates
        ],
    }


def _print(decision: Any, measured: dict[str, dict[str, float]]) -> None:
    import shutil

    from ficco.heuristics.decide import too_large

    print(decision.problem)
    print(f"{decision.schedule}\n  {decision.why}")
    for one in decision.candidates:
        if one.schedule == str(decision.schedule):
            if why := too_large(decision.problem, 0, one.extra_bytes, decision.machine):
                print(f"  {why}")
    if decision.candidates:
        on_terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
        print(decision.table(measured, shutil.get_terminal_size().columns if on_terminal else None))
    else:  # measured only
        for mode, seconds in measured.get(str(decision.schedule), {}).items():
            print(f"measured {mode}: {seconds_text(seconds)}")
