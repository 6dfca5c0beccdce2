"""The command line: ``python -m ficco --help`` lists the commands.

Exit codes: 0, success; 1, a failure or a wrong result; 2, wrong input; 130, interrupted; 141, the
reader of the output left early.

Parsing imports neither PyTorch nor NumPy, so that help and refused options take no second. The
module of a command is imported for its options; everything else when the command runs. Packages of
the extra ``bench`` are imported by the commands that need them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shlex
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ficco.errors import ConfigError, FiccoError, InvalidArgument
from ficco.problems.scaling import CAST_KINDS
from ficco.problems.sizes import ASKABLE, Size, problem_of
from ficco.tools import launch
from ficco.tools.bench.cases import DTYPES, SETS, Case, read
from ficco.tools.launch import RankFailed, check_load
from ficco.version import version

if TYPE_CHECKING:
    from ficco.heuristics import Where
    from ficco.machine import Fingerprint
    from ficco.problems.specification import AnyProblem


PROGRAM = "ficco"

#: Commands that need the extra ``bench`` whatever they are asked for; others need it for pictures.
WITH_EXTRA = ("demo", "bench", "simulate", "plot", "tune")

#: Exit code where whoever reads the output left early, as a shell has it for the signal SIGPIPE.
READER_LEFT = 141

#: The commands in the order of the help: the module of this package that has the command, and its
#: help. Module ``m`` has ``add_NAME``, which adds the options of a command to a parser, and
#: ``run_NAME``, which takes the parsed options and returns the exit code.
COMMANDS = {
    "demo": (
        "measure",
        "run every schedule and operator here, compare them with the plain product, draw them",
    ),
    "bench": (
        "measure",
        "time operators by schedules, the serial composition and PyTorch's fused ops, paired",
    ),
    "explain": (
        "plan",
        "say which schedule a call would take, why, and what is predicted of the others",
    ),
    "plan": ("plan", "print or draw what a schedule does for given sizes; needs no GPU"),
    "simulate": ("plan", "predict schedules on a described machine; needs no GPU"),
    "plot": ("plan", "draw timelines, simulated and measured, side by side"),
    "tune": (
        "measure",
        "measure this machine, and which schedules are fastest on it, for schedule='auto'",
    ),
    "doctor": (
        "measure",
        "print versions, devices, links, engines, and what would be used and why",
    ),
}


def main() -> int:
    """Run the command line of this process; the exit code."""
    import warnings

    def in_a_line(text: Warning | str, *_: object) -> str:
        return f"{PROGRAM}: warning: {text}\n"

    warnings.formatwarning = in_a_line
    code = run(sys.argv[1:])
    if sys.stdout is None:  # closed from the start
        return code
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    if not _reader_left():
        return code
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed again at the end
    return READER_LEFT


def run(arguments: Sequence[str]) -> int:
    """Run a command; the exit code. Errors become one line on the standard error."""
    try:
        parsed = _parser(arguments).parse_args(arguments)
    except SystemExit as end:  # argparse has printed the error or the help
        return int(end.code or 0)

    try:
        if parsed.command in WITH_EXTRA:
            require_extra()
        if not getattr(parsed, "oversubscribe", True):
            check_load(parsed.ranks, parsed.device)
        return int(_function("run", parsed.command)(parsed) or 0)
    except RankFailed as error:
        if error.details:
            print(error.details, file=sys.stderr)
        return _fail(error, 1)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in PACKAGES:
            raise
        return _fail(not_installed(package), 2)
    except BrokenPipeError as error:
        return READER_LEFT if _reader_left() else _fail(error, 1)
    except InvalidArgument as error:
        option = f"--{error.argument.replace('_', '-')}: {error.args[1]}"
        return _fail(option if error.argument in parsed else error, 2)
    except (ValueError, NotImplementedError, ConfigError, OSError) as error:
        return _fail(error, 2)
    except FiccoError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _reader_left() -> bool:
    """Whether the reader of the output has left: ``ficco plan ... | head``."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _fail(error: object, code: int) -> int:
    print(f"{PROGRAM}: error: {error}", file=sys.stderr)
    return code


def _function(verb: str, command: str) -> Callable[[Any], Any]:
    """``add_COMMAND`` or ``run_COMMAND``, from the module that has the command."""
    module = import_module(f"{__name__}.{COMMANDS[command][0]}")
    function: Callable[[Any], Any] = getattr(module, f"{verb}_{command}")
    return function


def _parser(names: Container[str] = COMMANDS) -> argparse.ArgumentParser:
    """Knows all commands, and the options of the commands in ``names``."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Hide communication behind the matrix product that depends on it."
    )
    parser.add_argument(
        "--version", action="version", version=f"{PROGRAM} {version()}", help="print the version"
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    for name, (_, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name in names:
            _function("add", name)(command)
    return parser


# Options, shapes, the machine and files of several commands.


#: The operator that is asked about unless another is named.
GATHERS = "all_gather_matmul"

DTYPE_TEXT = (
    f"{', '.join((*DTYPES, *CAST_KINDS))}; of -cast, the call casts A from bfloat16 "
    "(default: bfloat16)"
)

#: The machine that is simulated unless another is named; the one that was measured most.
MACHINE = "h200-4"

#: Packages of the extra ``bench``, for figures, pictures and tables; ``import ficco`` needs none.
PACKAGES = ("pandas", "matplotlib", "rich")

#: Kinds of options, as argparse takes them.
FLAG: dict[str, Any] = {"action": "store_true"}
NAMES: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
CSV: dict[str, Any] = {"type": Path, "metavar": "CSV"}


def not_installed(package: str) -> str:
    """Error text for a package of the extra that is not installed."""
    return f'{package}: required, and not installed; `pip install "ficco[bench]"` adds it'


def require_extra() -> None:
    """Refuse to begin what needs the extra.

    Raises:
        ModuleNotFoundError: a package is missing; its ``name`` is one of ``PACKAGES``.
    """
    for package in PACKAGES:
        installed = False
        with suppress(ValueError):  # imports of it are blocked
            installed = find_spec(package) is not None
        if not installed:
            raise ModuleNotFoundError(not_installed(package), name=package)


def site(
    machine: str | None, world: int | None, *, captured: bool = False, default: str | None = None
) -> Where:
    """The machine of ``--machine``, of the environment, or the default or this host's."""

    from ficco.heuristics import where

    def here() -> Fingerprint:
        from ficco.dma.engine import fingerprint

        device = launch.default_device()
        return fingerprint(device, launch.check_ranks(None, device))

    host = here() if default is None else default
    return where(machine, world, host, captured=captured)


def add_ranks(parser: Any, ranks: str = "ranks to start (default: a GPU each, or 4)") -> None:
    """Add ``--ranks``, ``--device`` and ``--oversubscribe``."""
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
    """Add ``--dtype``, the dtypes of shapes."""
    text = "dtypes, or kinds of float8 operands with scales, in place of the shapes' own: "
    text += ", ".join(DTYPES)
    parser.add_argument("--dtype", **NAMES, choices=DTYPES, help=text)


def add_fields(parser: Any, settings: Any, *names: str) -> None:
    """Add options for fields of a dataclass, which were declared as
    :func:`ficco.tools.bench.cases.option`."""
    declared = {one.name: one for one in fields(settings)}
    for name in names:
        default, how = declared[name].default, dict(declared[name].metadata)
        if isinstance(default, bool):
            how |= FLAG
        elif isinstance(default, (int, float)):
            how = {"type": type(default), **how, "help": f"{how['help']} (default: {default})"}
        parser.add_argument(f"--{name}", default=default, **how)


def field_values(arguments: Any, settings: Any) -> dict[str, Any]:
    """The fields of a dataclass that :func:`add_fields` made options of."""
    names = [one.name for one in fields(settings) if one.metadata and one.name in arguments]
    values = {name: getattr(arguments, name) for name in names}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def add_files(parser: Any, folder: str, subject: str) -> None:
    """Add ``--out`` and ``--name``, the files of a measurement."""
    parser.add_argument(
        "--out", type=Path, default=Path(folder), help=f"folder (default: {folder})"
    )
    parser.add_argument("--name", help=f"name of the files (default: {subject}, machine and date)")


def add_sizes(parser: Any) -> None:
    """Add ``--operator`` and the sizes of every operator."""
    text = f"one of {', '.join(ASKABLE)} (default: {GATHERS})"
    parser.add_argument("--operator", metavar="NAME", help=text)
    options: dict[str, dict[str, Size]] = {}  # by name, whose
    for askable in ASKABLE.values():
        for name, size in askable.sizes.items():
            options.setdefault(name, {}).setdefault(askable.whose, size)
    groups: dict[str, Any] = {}
    for name, sizes in options.items():
        (whose, size), *others = sizes.items()
        text = "; ".join([size.text, *(f"of {other}: {one.text}" for other, one in others)])
        text += f": {' or '.join(size.names)} (default: {size.default})" * bool(size.names)
        kind: dict[str, Any] = {"type": size.kind, "metavar": "NAME" if size.names else "N"}
        if size.kind is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        if whose not in groups:
            groups[whose] = parser.add_argument_group(f"sizes of {whose}")
        option = f"--{name.replace('_', '-')}"
        groups[whose].add_argument(option, **kind, dest=name, default=None, help=text)
    parser.add_argument("--dtype", metavar="NAME", default="bfloat16", help=DTYPE_TEXT)


def sizes(arguments: Any) -> dict[str, Any]:
    """The sizes on the command line."""
    names = {name for askable in ASKABLE.values() for name in askable.sizes}
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def add_world(parser: Any) -> None:
    """Add ``--world`` and ``--hosts``."""
    parser.add_argument(
        "--world", type=int, help="number of ranks (default: the machine's on each host)"
    )
    parser.add_argument("--hosts", type=int, default=1, help="hosts of the ranks (default: 1)")


def add_ranks_of_rows(parser: Any) -> None:
    """Add ``--world``, ``--hosts`` and ``--rows``."""
    add_world(parser)
    parser.add_argument(
        "--rows",
        help="rows of each rank if they differ: 3,4,5; for an all-to-all a table with a line per "
        "sender: 3,4;5,6",
    )


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


def problem(arguments: Any, local_world: int) -> AnyProblem:
    """The problem of the options; ``local_world``: ranks of each host.

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
    world, hosts = local_world * arguments.hosts, arguments.hosts
    request = arguments.operator or GATHERS, world, arguments.dtype, sizes(arguments)
    return problem_of(*request, rows=rows, hosts=hosts)


def refuse_others(
    arguments: argparse.Namespace, options: Callable[[Any], object], *allowed: str
) -> None:
    """Refuse options other than ``allowed``; one of those is present.

    Raises:
        ValueError: another of the command's options is given, too.
    """
    parser = argparse.ArgumentParser()
    options(parser)
    used = next(name for name in allowed if getattr(arguments, name))
    for name, default in vars(parser.parse_args([])).items():
        if name not in allowed and getattr(arguments, name) != default:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: required without --{used}, which measures nothing")


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
