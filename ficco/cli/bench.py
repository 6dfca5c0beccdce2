"""``ficco bench``, and the files that commands write."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ficco import doctor, launch
from ficco.bench import cases
from ficco.bench.candidates import OPTIONAL, BenchCandidate, choose, refused
from ficco.bench.cases import Case
from ficco.bench.measure import modes_of
from ficco.cli.site import add_ranks
from ficco.problem import OPERATORS

if TYPE_CHECKING:
    import pandas as pd


#: Seconds that starting the ranks, drawing and one shape's verification may take on top.
START_S = 180.0

#: Options that a replay has, named as in ``ReplaySettings``.
PLAYED = ("rank", "machine", "link_gb_s", "latency_us", "gap_us", "products")


def add(commands: Any) -> None:
    """Add the command to the parser."""
    text = "time operators by schedules, the serial composition and PyTorch's fused ops, paired"
    parser = commands.add_parser("bench", help=text, description=text)
    parser.set_defaults(run=_bench)
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--operator",
        nargs="+",
        choices=list(OPERATORS),
        metavar="NAME",
        help=f"operators, each on all shapes: {', '.join(OPERATORS)} (default: {cases.OPERATOR}, "
        "or those of the set)",
    )
    what.add_argument(
        "--set",
        nargs="+",
        choices=list(cases.SETS),
        metavar="NAME",
        help=f"shapes: {', '.join(cases.SETS)}; scattering operators take them with n and k "
        "exchanged (default: measured, on CPUs cpu; for all-to-alls experts-gain and experts)",
    )
    what.add_argument(
        "--shapes", type=Path, metavar="CSV", help="shapes: columns name, m, n, k; optionally op"
    )
    what.add_argument("--only", nargs="+", metavar="NAME", help="only the shapes with these names")
    what.add_argument(
        "--schedules",
        nargs="+",
        metavar="NAME",
        help="ficco schedules, such as shard-overlap:tail=4; the suffix @symmetric puts the shard "
        "in symmetric memory, @stages=2 leaves memory for two steps; candidates stands for those "
        "that auto compares, candidates=3 for the three of library products that are predicted to "
        "be fastest (default: a list)",
    )
    what.add_argument(
        "--without",
        nargs="+",
        choices=OPTIONAL,
        default=[],
        help="baselines to leave out; PyTorch's native path has been seen to hang",
    )
    what.add_argument(
        "--layers",
        action="store_true",
        help="instead of products: forward and backward of two layers of Llama 3 70B, with their "
        "weights sharded",
    )
    what.add_argument(
        "--mode",
        help="modes, separated by commas: queued, idle, graph; CPU ranks have only idle (default: "
        "all that the ranks have)",
    )
    played = parser.add_argument_group(
        "on one GPU, where rows of peers arrive when a link would bring them"
    )
    played.add_argument(
        "--replay", type=int, metavar="W", help="be one rank of W, whose peers are not there"
    )
    played.add_argument("--rank", type=int, help="be this one (default: 0)")
    played.add_argument(
        "--machine", help="a name or a file that says when rows arrive (default: of this GPU)"
    )
    played.add_argument(
        "--link-gb-s", type=float, metavar="GB/S", help="rate of a copy, in place of the machine's"
    )
    played.add_argument(
        "--latency-us", type=float, metavar="US", help="latency of one, in place of the machine's"
    )
    played.add_argument(
        "--gap-us", type=float, metavar="US", help="time between two, in place of the machine's"
    )
    played.add_argument(
        "--products",
        action="store_true",
        help="first measure what products take on this GPU, in about 20 s, for auto and for what "
        "peers send",
    )
    how = parser.add_argument_group("how")
    add_ranks(how)
    how.add_argument(
        "--rounds", type=int, default=25, help="at most so many rounds per shape (default: 25)"
    )
    how.add_argument(
        "--seconds", type=float, default=300, help="time for all shapes (default: 300)"
    )
    how.add_argument(
        "--seed", type=int, default=0, help="seed of the order and the operands (default: 0)"
    )
    result = parser.add_argument_group("output")
    result.add_argument(
        "--out", type=Path, default=Path("ficco-bench"), help="folder (default: ficco-bench)"
    )
    result.add_argument("--name", help="name of the files (default: set, machine and date)")
    result.add_argument("--timelines", action="store_true", help="trace and draw the first shape")
    result.add_argument("--json", action="store_true", help="print the rows as JSON")
    later = parser.add_argument_group("from a CSV of an earlier bench, measuring nothing")
    later.add_argument("--plot", type=Path, metavar="CSV", help="draw its pictures")
    later.add_argument("--report", type=Path, metavar="CSV", help="write its report next to it")


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.plot or arguments.report:
        for path in _pictures(arguments.plot) if arguments.plot else ():
            print(f"wrote {path}")
        if arguments.report:
            print(f"wrote {_report(arguments.report)}")
        return 0

    _check_replay(arguments)
    settings_of = _layers if arguments.layers else _products
    measure, settings, finish = settings_of(arguments, *place(arguments))
    rows = launch.launch(
        measure,
        arguments.ranks,
        settings,
        device=settings.device,
        timeout_s=arguments.seconds + START_S,
    )
    if rows is None:  # under torchrun, a rank other than 0
        return 0
    for path in (settings.csv, *finish(rows)):
        print(f"wrote {path}", file=sys.stderr)
    bad = rows[rows["status"].isin(("wrong", "failed"))]
    for row in bad.to_dict("records"):
        what = row["candidate"] if "candidate" in row else row["way"]
        where = row["case"] if "case" in row else row["layer"]
        print(f"{row['status']}: {what} on {where}: {row['note']}", file=sys.stderr)
    return 1 if len(bad) else 0


def _check_replay(arguments: argparse.Namespace) -> None:
    """Refuse what a replay cannot have, and what is for a replay where there is none."""
    world, rank = arguments.replay, arguments.rank or 0
    if world is None:
        for name in PLAYED:
            if (given := getattr(arguments, name)) is not None and given is not False:
                raise ValueError(f"--{name.replace('_', '-')}: required with --replay")
        return
    for name in ("ranks", "layers", "timelines"):
        if getattr(arguments, name):
            raise ValueError(f"--replay: required without --{name}, which is for ranks that meet")
    if (arguments.device or launch.default_device()) != "cuda":
        raise ValueError("--replay: required a GPU, whose copy engines are its clock")
    if not 0 <= rank < world or world < 2:
        raise ValueError(f"--replay: required one of at least 2 ranks, got {rank} of {world}")
    if "graph" in (arguments.mode or ""):
        raise ValueError("--mode: required queued or idle for --replay, got graph")
    arguments.ranks = 1
    # All there are: in one that it shares, the stream that plays the peers would hold up a lane.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def place(arguments: argparse.Namespace) -> tuple[str, int]:
    """The device and the number of ranks of a measurement.

    Raises:
        ValueError: they are not here, or options do not fit together.
    """

    device = arguments.device or launch.default_device()
    ranks = launch.check_ranks(arguments.ranks, device)
    if arguments.seconds is not None:
        launch.check_seconds(arguments.seconds)
    if arguments.rounds < 1:
        raise ValueError(f"--rounds: required a number above 0, got {arguments.rounds}")
    if arguments.set and arguments.shapes:
        raise ValueError("--set and --shapes: required one of them, got both")
    return device, ranks


def run_settings(
    arguments: argparse.Namespace, what: str, device: str, ranks: int
) -> dict[str, Any]:
    """What every measurement of something is told: :class:`ficco.bench.frames.RunSettings`."""
    return {
        "device": device,
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "csv": fresh(arguments.out, arguments.name or named(what, device, ranks)),
        "command": shlex.join(["python", "-m", "ficco", *sys.argv[1:]]),
    }


def _products(arguments: argparse.Namespace, device: str, ranks: int) -> tuple[Any, Any, Any]:
    """The bench of products: the function of the ranks, what it takes, and what follows from
    the rows."""
    from ficco.bench.frames import records
    from ficco.bench.report import show_best
    from ficco.bench.run import BenchSettings, bench

    shapes, what = chosen(arguments, device)
    candidates = choose(arguments.schedules, arguments.without)
    if arguments.schedules:
        _servable(candidates, shapes)
    modes = modes_of(device, arguments.mode)
    measure: Any = bench
    kind: Any = BenchSettings
    more: dict[str, Any] = {}
    if arguments.replay:
        from ficco.bench.replay_run import ReplaySettings, replay
        from ficco.tune.products import refitted

        measure, kind, modes = replay, ReplaySettings, tuple(m for m in modes if m != "graph")
        what, more["world"] = f"replay-{arguments.replay}-{what}", arguments.replay
        more |= {name: getattr(arguments, name) for name in PLAYED}
        more |= {"rank": arguments.rank or 0, "products": refitted if arguments.products else None}
    settings = kind(
        cases=tuple(shapes),
        candidates=candidates,
        modes=modes,
        timelines=arguments.timelines,
        quiet=arguments.json,
        seed=arguments.seed,
        **more,
        **run_settings(arguments, what, device, ranks),
    )

    def finish(rows: pd.DataFrame) -> list[Path]:
        if arguments.json:
            print(json.dumps(records(rows)))
        else:
            show_best(rows)
        return [*_pictures(settings.csv), _report(settings.csv)]

    return measure, settings, finish


def _layers(arguments: argparse.Namespace, device: str, ranks: int) -> tuple[Any, Any, Any]:
    """The bench of layers, as :func:`_products`."""
    from ficco.bench import layers
    from ficco.bench.frames import read_description

    for name in ("set", "shapes", "only", "operator", "schedules", "timelines", "json"):
        if getattr(arguments, name):
            raise ValueError(f"--layers: required without --{name}, which is for products")
    settings = layers.LayerSettings(
        layers=layers.SHAPES[device],
        modes=tuple(mode for mode in modes_of(device, arguments.mode) if mode != "graph"),
        **run_settings(arguments, "layers", device, ranks),
    )

    def finish(rows: pd.DataFrame) -> list[Path]:
        path = settings.csv.with_suffix(".md")
        path.write_text(layers.report(rows, read_description(settings.csv), path.stem))
        print(path.read_text())
        return [path]

    return layers.layers, settings, finish


def chosen(arguments: argparse.Namespace, device: str) -> tuple[list[Case], str]:
    """The shapes of the command line, and what they are called.

    Raises:
        ValueError: there is no shape of a name that was asked for.
    """
    operators = arguments.operator
    if arguments.shapes:
        what, shapes = [arguments.shapes.stem], cases.read(arguments.shapes)
    elif arguments.set:
        what, shapes = (
            arguments.set,
            [case for name in arguments.set for case in cases.SETS[name]()],
        )
    else:  # each operator has its own
        wanted = operators or [cases.OPERATOR]
        pairs = [(one, name) for one in wanted for name in cases.default_sets(one, device)]
        what = list(dict.fromkeys(name for _, name in pairs))
        shapes = [case.on(one) for one, name in pairs for case in cases.SETS[name]()]
        operators = None
    if operators:
        shapes = [case.on(operator) for operator in operators for case in shapes]
    there = [case.name for case in shapes]
    for name in arguments.only or ():
        if name not in there:
            raise ValueError(f"--only: required some of {', '.join(there)}, got {name!r}")
    kept = [case for case in shapes if not arguments.only or case.name in arguments.only]
    return kept, "-".join(what)


def _servable(candidates: Sequence[BenchCandidate], shapes: Sequence[Case]) -> None:
    """Refuse a schedule that none of the operators can take."""

    by_operator = {case.operator: case.problem(2) for case in shapes}
    for candidate in candidates:
        reasons = [refused(candidate, problem) for problem in by_operator.values()]
        if reasons and all(reasons):
            raise ValueError(f"--schedules: {reasons[0]}")


def named(what: str, device: str, ranks: int) -> str:
    """The name of the files of a run: what, the machine and the day."""

    kind = next(one["name"] for one in doctor.devices() if one["kind"].startswith(device))
    machine = f"{ranks}x {kind}" if device == "cuda" else f"{ranks} cpu ranks"
    machine = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    return f"{what}_{machine}_{datetime.now(timezone.utc):%Y-%m-%d}"


def writable(folder: Path) -> Path:
    """A folder of ``--out``, which is created; refused before anything is measured in vain.

    Raises:
        ValueError: it cannot be written to.
    """
    why = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f" ({error.strerror})"
    if why or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"--out: required a folder that can be written to, got {folder}{why}")
    return folder


def fresh(folder: Path, name: str) -> Path:
    """A CSV file that does not exist yet: rows are appended. Raises as :func:`writable`."""

    path = writable(folder) / f"{name}.csv"
    number = 1
    while path.exists() and launch.own_rank() == 0:
        number += 1
        path = path.with_name(f"{name}-{number}.csv")
    return path


def _pictures(csv: Path) -> list[Path]:
    from ficco.bench import plots
    from ficco.bench.frames import REPLAY  # whose columns are those of all benches and more

    return plots.draw_next_to(csv, REPLAY.read(csv))


def _report(csv: Path) -> Path:
    from ficco.bench.frames import REPLAY, read_description
    from ficco.bench.report import report

    pictures = sorted(csv.parent.glob(f"{csv.stem}_*.png"))
    path = csv.with_suffix(".md")
    path.write_text(report(REPLAY.read(csv), read_description(csv), csv.stem, pictures))
    return path
