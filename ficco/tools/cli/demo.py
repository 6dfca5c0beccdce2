"""``ficco demo``: run every schedule and operator here, compare them with the plain product, draw
them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ficco.tools import launch
from ficco.tools.cli.site import add_ranks, writable

#: Seconds after which a demo has hung; it takes about fifteen.
DEMO_S = 300.0


def options(parser: Any) -> None:
    add_ranks(parser, "ranks to start (default: 4, or a GPU each)")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the pictures (default: a new one in the folder for temporary files)",
    )


def run(arguments: argparse.Namespace) -> int:
    from ficco.tools.bench.demo import demo

    device = arguments.device or launch.default_device()
    out = arguments.out and writable(arguments.out)
    return launch.launch(demo, arguments.ranks, device, out, device=device, timeout_s=DEMO_S)
