"""What several commands share: options, shapes, the machine, and files that are written."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ficco import launch
from ficco.bench.cases import DTYPES, SETS, Case, read
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

#: What figures, pictures and tables need, and nothing that a program with ficco imports: the
#: extra ``bench``.
PACKAGES = ("pandas", "matplotlib", "rich")

#: Kinds of options, as argparse takes them.
FLAG: dict[str, Any] = {"action": "store_true"}
NAMES: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
CSV: dict[str, Any] = {"type": Path, "metavar": "CSV"}


def not_installed(package: str) -> str:
    """What to do about a package of the extra that is not installed."""
    return f'{package}: required, and not installed; `pip install "ficco[bench]"` adds it'


def require_extra() -> None:
    """Refuse to begin what needs the extra.

    Raises:
        ModuleNotFoundError: a package is missing; its ``name`` is one of ``PACKAGES``.
    """
    for package in PACKAGES:
        there = False
        with suppress(ValueError):  # imports of it are blocked
            there = find_spec(package) is not None
        if not there:
            raise ModuleNotFoundError(not_installed(package), name=package)


def site(
    machine: str | None, world: int | None, *, captured: bool = False, default: str | None = None
) -> Where:
    """The machine of ``--machine``, of the environment, or the default or this host's."""

    def here() -> Fingerprint:
        device = launch.default_device()
        return fingerprint(device, launch.check_ranks(None, device))

    asked = here() if default is None else default
    return where(machine, world, asked, captured=captured)


def add_ranks(parser: Any, ranks: str = "ranks to start (default: a GPU each, or 4)") -> None:
    """Add the options that say how many ranks are started, and on what."""
    parser.add_argument("--ranks", type=int, help=ranks)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="cuda is any vendor's GPU (default: cuda where torch sees one)",
    )
    parser.add_argument(
        "--oversubscribe",
        **FLAG,
        help=f"start more than {launch.RANKS_PER_CORE} CPU ranks per core",
    )


def add_dtypes(parser: Any) -> None:
    """Add the option that says what the operands of shapes are."""
    text = "dtypes, or kinds of float8 operands with scales, in place of the shapes' own: "
    text += ", ".join(DTYPES)
    parser.add_argument("--dtype", **NAMES, choices=DTYPES, help=text)


def add_rounds(parser: Any) -> None:
    """Add the option that says how often each shape is measured."""
    text = "at most so many rounds per shape (default: 25)"
    parser.add_argument("--rounds", type=int, default=25, help=text)


def add_files(parser: Any, folder: str, what: str) -> None:
    """Add the options that say where a measurement writes to."""
    parser.add_argument(
        "--out", type=Path, default=Path(folder), help=f"folder (default: {folder})"
    )
    parser.add_argument("--name", help=f"name of the files (default: {what}, machine and date)")


def add_sizes(parser: Any, required: bool = False) -> None:
    """Add the options that say what the sizes of a product are."""
    for name, what in SIZES.items():
        parser.add_argument(f"--{name}", type=int, required=required, help=what)
    parser.add_argument(
        "--world", type=int, help="number of ranks (default: the machine's on each host)"
    )
    parser.add_argument("--hosts", type=int, default=1, help="hosts of the ranks (default: 1)")
    text = f"{', '.join(DTYPES)} (default: bfloat16)"
    parser.add_argument("--dtype", default="bfloat16", metavar="NAME", help=text)


def add_operator(parser: Any) -> None:
    """Add the options that say which operator is asked about, and how its rows are spread."""
    text = f"one of {', '.join(OPERATORS)} (default: {GATHERS})"
    parser.add_argument("--operator", default=GATHERS, metavar="NAME", help=text)
    parser.add_argument(
        "--rows",
        help="rows of each rank if they differ: 3,4,5; for an all-to-all a table with a line per "
        "sender: 3,4;5,6",
    )


def missing(arguments: Any) -> str:
    """Which of --m, --n and --k were not given."""
    return ", ".join(f"--{name}" for name in "mnk" if getattr(arguments, name) is None)


def shapes(arguments: Any, sets: Iterable[str]) -> list[Case]:
    """The shapes of ``--shapes``, else those of these sets."""
    if arguments.shapes:
        return read(arguments.shapes)
    return [case for name in sets for case in SETS[name]()]


def ranks_per_host(arguments: Any) -> int | None:
    """Of ``--world`` and ``--hosts``; None for the machine's."""
    if arguments.hosts < 1 or (arguments.world or 0) % arguments.hosts:
        raise ValueError(f"--hosts: required a divisor of --world, got {arguments.hosts}")
    return None if arguments.world is None else arguments.world // arguments.hosts


def problem(arguments: Any, local_world: int) -> Problem:
    """The Problem that options ask about, with so many ranks on each host.

    Raises:
        ValueError: an option is wrong, or they do not fit together.
    """
    rows: Any = None
    if arguments.rows:
        table = [line.split(",") for line in arguments.rows.split(";")]
        for size in (size for line in table for size in line):
            if not size.strip().isdecimal():
                raise ValueError(f"--rows: required whole numbers, got {size!r}")
        rows = [list(map(int, line)) for line in table]
        rows = rows if len(rows) > 1 else rows[0]
    sizes = (arguments.m, arguments.n, arguments.k, arguments.dtype)
    hosts = arguments.hosts
    return problem_of_sizes(arguments.operator, *sizes, local_world * hosts, rows, hosts)


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


def command() -> str:
    """The command line of this process, for the description of figures."""
    return shlex.join(["python", "-m", "ficco", *sys.argv[1:]])


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
