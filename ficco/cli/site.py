"""What the commands share that decide and simulate: the machine, and files that pictures go to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ficco import launch
from ficco.dma.engine import fingerprint
from ficco.heuristics import Where, problem_of_sizes, where
from ficco.machine import Fingerprint
from ficco.problem import OPERATORS, Problem

#: The operator that is asked about unless another is named.
GATHERS = "all_gather_matmul"

#: The sizes of a product.
SIZES = {"m": "rows that a rank multiplies", "n": "columns of one rank's B", "k": "columns of A"}

#: The machine that is simulated unless another is named; the one that was measured most.
MACHINE = "h200-4"


def site(
    machine: str | None, world: int | None, *, captured: bool = False, default: str | None = None
) -> Where:
    """The machine of ``--machine``, of the environment, or the default or this host's."""

    def here() -> Fingerprint:
        device = launch.default_device()
        return fingerprint(device, launch.check_ranks(None, device))

    asked = here() if default is None else default
    return where(machine, world, asked, captured=captured)


def add_ranks(parser: Any, started: str = "(default: a GPU each, or 4)") -> None:
    """Add the options that say how many ranks are started, and on what."""
    parser.add_argument("--ranks", type=int, help=f"ranks to start {started}")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="cuda is any vendor's GPU (default: cuda where torch sees one)",
    )


def add_sizes(parser: Any, required: bool = False) -> None:
    """Add the options that say what the sizes of a product are."""
    for name, what in SIZES.items():
        parser.add_argument(f"--{name}", type=int, required=required, help=what)
    parser.add_argument("--world", type=int, help="number of ranks (default: the machine's)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: bfloat16)")


def add_operator(parser: Any) -> None:
    """Add the options that say which operator is asked about, and how its rows are spread."""

    parser.add_argument(
        "--operator",
        default=GATHERS,
        metavar="NAME",
        help=f"one of {', '.join(OPERATORS)} (default: {GATHERS})",
    )
    parser.add_argument(
        "--rows",
        help="rows of each rank if they differ: 3,4,5; for an all-to-all a table with a line per "
        "sender: 3,4;5,6",
    )


def missing(arguments: Any) -> str:
    """Which of --m, --n and --k were not given."""
    return ", ".join(f"--{name}" for name in "mnk" if getattr(arguments, name) is None)


def problem(arguments: Any, world: int) -> Problem:
    """The Problem that options ask about.

    Raises:
        ValueError: an option is wrong, or they do not fit together.
    """

    operator, rows = arguments.operator, None
    if arguments.rows:
        table = [
            [_whole("--rows", size) for size in line.split(",")]
            for line in arguments.rows.split(";")
        ]
        rows = table if len(table) > 1 else table[0]
    return problem_of_sizes(
        operator, arguments.m, arguments.n, arguments.k, arguments.dtype, world, rows
    )


def _whole(option: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{option}: required whole numbers, got {text!r}")
    return int(text)


def picture(path: Path | None, option: str = "--draw") -> None:
    """Refuse a file that no picture can be drawn to, before anything is computed.

    Raises:
        ValueError: its name has no suffix, or one of no format.
    """
    if path is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in known:
        raise ValueError(
            f"{option}: required a file with one of the suffixes {', '.join(known)}, got {path}"
        )
