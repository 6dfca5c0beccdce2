"""``ficco characterize``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ficco import launch
from ficco.bench import cases
from ficco.cli.bench import START_S, place, run_settings
from ficco.cli.site import add_ranks
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
    add_ranks(parser)
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
    from ficco.bench.characterize import LossSettings, characterize
    from ficco.bench.frames import LOSSES

    if arguments.plot:
        _draw(LOSSES.read(arguments.plot), arguments.plot)
        return 0
    device, ranks = place(arguments)
    at_least_two(ranks)
    seconds = SECONDS[device] if arguments.seconds is None else arguments.seconds
    name = arguments.set or ("measured" if device == "cuda" else "cpu")
    shapes = cases.read(arguments.shapes) if arguments.shapes else cases.SETS[name]()
    told = run_settings(arguments, "losses", device, ranks) | {"seconds": seconds}
    settings = LossSettings(cases=tuple(shapes), sizes=SIZES[device], **told)
    rows = launch.launch(
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
