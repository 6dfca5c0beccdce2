"""``ficco bench``."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser."""
    from ficco.bench.command import add as add_options

    text = "time operators by schedules, the serial composition and PyTorch's fused ops, paired"
    parser = commands.add_parser("bench", help=text, description=text)
    add_options(parser)
    parser.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    from ficco.bench.command import run as run_bench

    return run_bench(arguments)
