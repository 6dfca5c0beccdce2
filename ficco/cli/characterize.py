"""``ficco characterize``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ficco.cli.bench import START_S, command_line, fresh, named
from ficco.cli.tune import at_least_two

#: Bytes of the shards whose communication is measured without products, and seconds for everything.
SIZES = {
    "cuda": tuple(size << 20 for size in (1, 2, 4, 8, 16, 32, 64, 128)),
    "cpu": tuple(size << 10 for size in (64, 256, 1024)),
}
SECONDS = {"cuda": 120.0, "cpu": 6.0}


def add(commands: Any) -> None:
    """Add the command to the parser."""
    text = "measure what cutting and overlapping cost: decomposition and contention loss"
    parser = commands.add_parser("characterize", help=text, description=text)
    parser.add_argument(
        "--set",
        choices=("measured", "small", "scenarios", "cpu"),
        help="shapes (default: measured; on CPUs cpu)",
    )
    parser.add_argument("--shapes", type=Path, metavar="CSV", help="shapes: columns name, m, n, k")
    parser.add_argument("--ranks", type=int, help="ranks to start (default: a GPU each, or 4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda is any vendor's GPU")
    parser.add_argument(
        "--seconds", type=float, help="time for everything (default: 120; on CPUs 6)"
    )
    parser.add_argument(
        "--rounds", type=int, default=25, help="at most so many rounds (default: 25)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("ficco-characterize"),
        help="folder (default: ficco-characterize)",
    )
    parser.add_argument("--name", help="name of the files (default: losses, machine and date)")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="CSV",
        help="measure nothing; draw the pictures of an earlier run next to its CSV",
    )
    parser.set_defaults(run=_characterize)


def _characterize(arguments: argparse.Namespace) -> int:
    from ficco.bench import cases
    from ficco.bench.characterize import LossSettings, characterize
    from ficco.bench.frames import LOSSES
    from ficco.launch import check_ranks, check_seconds, default_device, launch

    if arguments.plot:
        _draw(LOSSES.read(arguments.plot), arguments.plot)
        return 0
    device = arguments.device or default_device()
    ranks = at_least_two(check_ranks(arguments.ranks, device))
    seconds = SECONDS[device] if arguments.seconds is None else check_seconds(arguments.seconds)
    if arguments.rounds < 1:
        raise ValueError(f"--rounds: required a number above 0, got {arguments.rounds}")
    if arguments.set and arguments.shapes:
        raise ValueError("--set and --shapes: required one of them, got both")
    chosen = arguments.set or ("measured" if device == "cuda" else "cpu")
    shapes = cases.read(arguments.shapes) if arguments.shapes else cases.SETS[chosen]()
    name = arguments.name or named("losses", device, ranks)
    settings = LossSettings(
        cases=tuple(shapes),
        sizes=SIZES[device],
        device=device,
        seconds=seconds,
        csv=fresh(arguments.out, name),
        command=command_line(),
        rounds=arguments.rounds,
    )
    rows = launch(
        characterize, arguments.ranks, settings, device=device, timeout_s=START_S + 3 * seconds
    )
    if rows is None:  # under torchrun, a rank other than 0
        return 0
    print(f"wrote {settings.csv}", file=sys.stderr)
    _draw(rows, settings.csv)
    bad = rows[rows["status"] == "failed"]
    for row in bad.itertuples():
        print(f"ficco: error: {row.case}: {row.note}", file=sys.stderr)
    return 1 if len(bad) else 0


def _draw(rows: Any, csv: Path) -> None:
    from ficco.bench.plots import draw_next_to

    for path in draw_next_to(csv, rows):
        print(f"wrote {path}", file=sys.stderr)
