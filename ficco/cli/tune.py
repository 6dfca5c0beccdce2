"""``ficco tune``."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from ficco import launch
from ficco.bench import cases
from ficco.cli.site import GATHERS, add_ranks
from ficco.dma.engine import fingerprint
from ficco.machine import load, user_dir
from ficco.problem import OPERATORS
from ficco.tune.effort import STEPS
from ficco.tune.files import default_name, opened

#: Seconds that starting the ranks and their libraries may take on top, and how much longer than
#: estimated the steps may take before a run has hung.
START_S = 120.0
PATIENCE = 4.0

#: Share by which a point of ``--check`` may be off.
TOLERANCE = 0.25

#: What ``--check`` has no use for.
NOT_CHECKED = ("only", "operator", "shapes", "from_log", "fresh")


def add(commands: Any) -> None:
    """Add the command to the parser."""

    text = "measure this machine, and which schedules are fastest on it, for schedule='auto'"
    parser = commands.add_parser("tune", help=text, description=text)
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--quick", action="store_true", help="measure for less time, and less exactly"
    )
    what.add_argument(
        "--only", nargs="+", metavar="STEP", choices=STEPS, help=f"these steps: {', '.join(STEPS)}"
    )
    what.add_argument(
        "--operator",
        nargs="+",
        metavar="NAME",
        choices=OPERATORS,
        help="measure only the collectives of these operators; take --shapes as shapes of theirs "
        "(scattering operators take them with n and k exchanged), and of --from-log only their "
        f"problems (default: all collectives; shapes of their own operator, or {GATHERS})",
    )
    what.add_argument(
        "--shapes",
        type=Path,
        metavar="CSV",
        help="time all candidates for these shapes: columns name, m, n, k; optionally op",
    )
    what.add_argument(
        "--from-log",
        type=Path,
        metavar="FILE",
        help="time all candidates for the calls of a program that ran with FICCO_LOG_PROBLEMS=FILE",
    )
    what.add_argument(
        "--check", action="store_true", help="compare a few points with the file; change nothing"
    )
    what.add_argument(
        "--tolerance",
        type=float,
        help=f"with --check: share by which a point may be off (default: {TOLERANCE})",
    )
    how = parser.add_argument_group("how")
    add_ranks(how)
    how.add_argument(
        "--fresh", action="store_true", help="begin anew instead of continuing an interrupted run"
    )
    how.add_argument(
        "--out", type=Path, metavar="FILE", help="the machine's file (default: the user's own)"
    )
    parser.set_defaults(run=_tune)


def _tune(arguments: argparse.Namespace) -> int:
    from ficco.tune.run import TuneSettings, tune

    _refuse(arguments)
    device = arguments.device or launch.default_device()
    ranks = at_least_two(launch.check_ranks(arguments.ranks, device))
    here = fingerprint(device, ranks)
    path = arguments.out or user_dir() / f"{default_name(here)}.yaml"
    if arguments.check:
        return _check(arguments, device, ranks, path)
    if not (arguments.fresh and path.is_file()):
        opened(path, here)  # says what is wrong with the file before any rank is started
    settings = TuneSettings(
        path=path.absolute(),
        device=device,
        quick=arguments.quick,
        only=tuple(arguments.only or ()),
        operators=tuple(arguments.operator or ()),
        problems=tuple(_problems(arguments, ranks, device)),
        fresh=arguments.fresh,
        command=shlex.join(["python", "-m", "ficco", *sys.argv[1:]]),
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
    if not arguments.check:
        if arguments.tolerance is not None:
            raise ValueError(
                f"--tolerance: required with --check, got {arguments.tolerance} without it"
            )
        return
    for name in NOT_CHECKED:
        if getattr(arguments, name):
            option = name.replace("_", "-")
            raise ValueError(
                f"--check: required without --{option}; it looks at a few points of each block"
            )
    if arguments.tolerance is not None and not arguments.tolerance > 0:
        raise ValueError(f"--tolerance: required a number above 0, got {arguments.tolerance}")


def at_least_two(ranks: int) -> int:
    """A number of ranks between which something passes.

    Raises:
        ValueError: it is 1.
    """
    if ranks < 2:
        raise ValueError(f"--ranks: required at least 2, since one has no peer, got {ranks}")
    return ranks


def _problems(arguments: argparse.Namespace, ranks: int, device: str) -> list[Any]:
    from ficco.tune.calls import from_cases, from_log

    problems = []
    if arguments.shapes:
        read = cases.read(arguments.shapes)
        problems += from_cases(read, ranks, device, arguments.operator or ())
    if arguments.from_log:
        wanted = arguments.operator or OPERATORS
        logged = [one for one in from_log(arguments.from_log, ranks) if one.operator in wanted]
        if not logged:
            of = f" of {', '.join(arguments.operator)}" if arguments.operator else ""
            raise ValueError(
                f"--from-log: required a problem of {ranks} ranks{of} in {arguments.from_log}, got "
                "none; run the program with FICCO_LOG_PROBLEMS on as many ranks"
            )
        problems += logged
    return list(dict.fromkeys(problems))


def _check(arguments: argparse.Namespace, device: str, ranks: int, path: Path) -> int:
    from ficco.tune.check import check, report

    tolerance = arguments.tolerance or TOLERANCE
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
    points = launch.launch(
        check, arguments.ranks, machine, device, device=device, timeout_s=START_S * 2
    )
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
