"""``ficco characterize``: measure what cutting and overlapping cost: decomposition and contention
loss.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from ficco.bench.cases import of_dtypes
from ficco.cli.bench import START_S, measured, place, run_settings
from ficco.cli.site import CSV, add_dtypes, add_files, add_ranks, add_rounds, refuse_others, shapes
from ficco.scaling import SCALED

#: Bytes of the shards whose communication is measured without products, and seconds for everything.
SIZES = {
    "cuda": tuple(size << 20 for size in (1, 2, 4, 8, 16, 32, 64, 128)),
    "cpu": tuple(size << 10 for size in (64, 256, 1024)),
}
SECONDS = {"cuda": 120.0, "cpu": 20.0}


def options(parser: Any) -> None:
    parser.add_argument(
        "--set",
        choices=("measured", "small", "scenarios", "cpu"),
        help="shapes (default: measured; on CPUs cpu)",
    )
    parser.add_argument("--shapes", **CSV, help="shapes: columns name, m, n, k")
    add_dtypes(parser)
    text = "only products, cut as so many ranks cut them: on one rank, with no peer"
    parser.add_argument("--parts", type=int, metavar="W", help=text)
    add_ranks(parser)
    parser.add_argument(
        "--seconds", type=float, help="time for everything (default: 120; on CPUs 20)"
    )
    add_rounds(parser)
    add_files(parser, "ficco-characterize", "losses")
    text = "measure nothing; draw the pictures of an earlier run next to its CSV"
    parser.add_argument("--plot", **CSV, help=text)


def run(arguments: argparse.Namespace) -> int:
    from ficco.bench.characterize import LossSettings, characterize
    from ficco.bench.frames import LOSSES
    from ficco.bench.plots import draw_next_to

    if arguments.plot:
        refuse_others(arguments, options, "plot")
        for path in draw_next_to(arguments.plot, LOSSES.read(arguments.plot)):
            print(f"wrote {path}", file=sys.stderr)
        return 0
    parts = arguments.parts or 0
    if arguments.parts is not None and parts < 2:
        raise ValueError(f"--parts: required 2 or more, got {parts}")
    device, ranks = place(arguments, 1 if parts else 2)  # one has no peer
    seconds = SECONDS[device] if arguments.seconds is None else arguments.seconds
    cases = shapes(arguments, [arguments.set or ("measured" if device == "cuda" else "cpu")])
    cases = of_dtypes(cases, arguments.dtype or ())
    if not parts and any(case.dtype in SCALED for case in cases):
        raise ValueError("--dtype: required --parts for operands of float8, got none")
    told = run_settings(arguments, "losses", device, ranks) | {"seconds": seconds}
    settings = LossSettings(cases=tuple(cases), sizes=SIZES[device], parts=parts, **told)
    draw = partial(draw_next_to, settings.csv)
    return measured(characterize, arguments, settings, START_S + 3 * seconds, draw)
