"""``ficco tune``: measure this machine, and which schedules are fastest on it, for
schedule='auto'.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from ficco.problems.products import OPERATORS
from ficco.tools import launch
from ficco.tools.bench import cases
from ficco.tools.cli.site import (
    CSV,
    FILE,
    FLAG,
    GATHERS,
    NAMES,
    add_fields,
    add_ranks,
    command,
    field_values,
)
from ficco.tools.tune.effort import TuneSettings

#: Seconds that starting the ranks and their libraries may take on top, and how much longer than
#: estimated the steps may take before a run has hung.
START_S = 120.0
PATIENCE = 4.0

#: Share by which a point of ``--check`` may be off. On CPUs ranks share cores with whatever else
#: runs: on an idle host points were up to 1.3 times as much, beside other work up to twice.
TOLERANCE = {"cuda": 0.25, "cpu": 1.0}

#: What ``--check`` has no use for.
NOT_CHECKED = ("only", "operator", "shapes", "from_log", "fresh")


def options(parser: Any) -> None:
    what = parser.add_argument_group("what is measured")
    add_fields(what, TuneSettings, "quick", "only")
    what.add_argument(
        "--operator",
        **NAMES,
        choices=OPERATORS,
        help="measure only the collectives of these operators; take --shapes as shapes of theirs "
        "(scattering operators take them with n and k exchanged), and of --from-log only their "
        f"problems (default: all collectives; shapes of their own operator, or {GATHERS})",
    )
    text = "time all candidates for these shapes: columns name, m, n, k; optionally op"
    what.add_argument("--shapes", **CSV, help=text)
    text = "time all candidates for the calls of a program that ran with options(log_problems=FILE)"
    what.add_argument("--from-log", **FILE, help=text)
    what.add_argument("--check", **FLAG, help="compare a few points with the file; change nothing")
    text = "with --check: share by which a point may be off (default: 0.25; on CPUs 1)"
    what.add_argument("--tolerance", type=float, help=text)
    how = parser.add_argument_group("how")
    add_ranks(how)
    add_fields(how, TuneSettings, "fresh")
    how.add_argument("--out", **FILE, help="the machine's file (default: the user's own)")


def run(arguments: argparse.Namespace) -> int:
    from ficco.dma.engine import fingerprint
    from ficco.machine import user_dir
    from ficco.tools.tune.files import default_name, opened
    from ficco.tools.tune.run import tune

    _refuse(arguments)
    device = arguments.device or launch.default_device()
    ranks = launch.check_ranks(arguments.ranks, device, 2)  # one has no peer
    here = fingerprint(device, launch.ranks_of_a_host(ranks))
    path = arguments.out or user_dir() / f"{default_name(here)}.yaml"
    if arguments.check:
        return _check(arguments, device, ranks, path)
    if not (arguments.fresh and path.is_file()):
        opened(path, here)  # says what is wrong with the file before any rank is started
    settings = TuneSettings(
        path=path.absolute(),
        device=device,
        **field_values(arguments, TuneSettings),
        operators=tuple(arguments.operator or ()),
        problems=tuple(_problems(arguments, ranks, device)),
        command=command(),
    )
    if not settings.steps:
        raise ValueError("--only shapes: required --shapes or --from-log with them, got none")
    seconds = sum(settings.seconds(name) for name in settings.steps)
    timeout_s = START_S + PATIENCE * seconds
    outcome = launch.launch(tune, arguments.ranks, settings, device=device, timeout_s=timeout_s)
    if launch.own_rank():
        return 1 if outcome.error or outcome.failures else 0
    if outcome.error:
        print(f"ficco: error: {outcome.error}", file=sys.stderr)
        return 2
    print(f"wrote {path}", file=sys.stderr)
    if arguments.out is not None:
        used = shlex.quote(str(path.absolute()))
        print(f"use it with FICCO_MACHINE={used}", file=sys.stderr)
    for name, why in outcome.failures.items():
        print(f"ficco: error: {name}: {why}; what the file had was left", file=sys.stderr)
    if outcome.failures:
        print("run the same command again to measure what is left", file=sys.stderr)
    return 1 if outcome.failures else 0


def _refuse(arguments: argparse.Namespace) -> None:
    """Refuse options that say nothing together.

    Raises:
        ValueError: which one, and what it needs.
    """
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
        every = problem_log.read(arguments.from_log, ranks)
        # Operands of float8 are made in the kinds that shapes are measured in.
        named = [one for one in every if one.kind_of_operands in cases.DTYPES]
        logged = [one for one in named if one.operator in wanted]
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
    from ficco.tools.tune.check import check, report

    tolerance = arguments.tolerance or TOLERANCE[device]
    if not path.exists():
        raise ValueError(
            f"--check: required a machine's file, got none at {path}; run `{_again(arguments)}` "
            "first, or give another file with --out"
        )
    machine = load(path)
    here = fingerprint(device, ranks)
    if not here.matches(machine):
        raise ValueError(
            f"{path}: required a machine of {here.ranks} ranks of {here.accelerator}, as here, got "
            f"{machine.ranks} of {machine.accelerator}; give another file with --out"
        )
    how: Any = {"device": device, "timeout_s": START_S * 2}
    points = launch.launch(check, arguments.ranks, machine, device, **how)
    if not launch.own_rank():
        print(report(points, tolerance, _again(arguments)))
    return 0 if all(point.holds(tolerance) for point in points) else 1


def _again(arguments: argparse.Namespace) -> str:
    """The command that measures the machine that was checked."""
    words = ["ficco", "tune"]
    for name in ("ranks", "device", "out"):
        if (value := getattr(arguments, name)) is not None:
            words += [f"--{name}", str(value)]
    return shlex.join(words)
