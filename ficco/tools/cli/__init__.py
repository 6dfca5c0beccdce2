"""The command line: ``python -m ficco --help`` lists the commands.

Exit codes: 0, success; 1, a failure or a wrong result; 2, wrong input; 130, interrupted; 141, the
reader of the output left early. Functions raise ``ValueError`` for options that are wrong or do not
fit together.

Parsing imports neither PyTorch nor NumPy, so that help and refused options take no second. The
module of a command is imported for its options; everything else when the command runs. Packages of
the extra ``bench`` are imported by the commands that need them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ficco.errors import ConfigError, FiccoError, InvalidArgument
from ficco.problems.products import OPERATORS
from ficco.problems.scaling import CAST_KINDS
from ficco.problems.sizes import ASKABLE, Size, problem_of
from ficco.tools import launch
from ficco.tools.bench.cases import DTYPES, SETS, Case, read
from ficco.tools.bench.cases import OPERATOR as GATHERS
from ficco.tools.launch import RankFailed, check_load
from ficco.version import version

if TYPE_CHECKING:
    from ficco.heuristics import Where
    from ficco.machine import Fingerprint
    from ficco.problems.specification import AnyProblem


PROGRAM = "ficco"

#: Commands that need the extra ``bench`` whatever they are asked for; others need it for pictures.
WITH_EXTRA = ("demo", "bench", "replay", "simulate", "plot", "tune")

#: Exit code where whoever reads the output left early, as a shell has it for the signal SIGPIPE.
READER_LEFT = 141

#: Advice after an interruption, for commands that save their steps.
CONTINUES = {"tune": "; the same command continues after the steps that are saved"}


class Command(NamedTuple):
    """A command.

    Attributes:
        module: module of this package. It has ``add_NAME``, which adds the options of the command
            to a parser, and ``run_NAME``, which takes the parsed options and returns the exit code.
        help: what the command does.
        example: the words of an example, for the help.
        words: its words before the options. ``[OPERATOR]`` stands for ``--operator``.
    """

    module: str
    help: str
    example: str
    words: str = ""


#: The commands in the order of the help.
COMMANDS = {
    "demo": Command(
        "measure",
        "run every schedule and operator here, compare them with the plain product, draw them",
        "--ranks 2",
    ),
    "explain": Command(
        "plan",
        "say which schedule a call would take, why, and what is predicted of the others",
        "--m 8192 --n 3584 --k 4096 --machine h200-4",
        "[OPERATOR]",
    ),
    "plan": Command(
        "plan",
        "print or draw what a schedule does for given sizes; needs no GPU",
        "growing:tail=4 --m 8192 --n 3584 --k 4096 --world 4",
        "[OPERATOR] SCHEDULE",
    ),
    "simulate": Command(
        "plan",
        "predict schedules on a described machine; needs no GPU",
        "growing serial --m 8192 --n 3584 --k 4096 --machine h200-4",
        "[OPERATOR] [SCHEDULE ...]",
    ),
    "bench": Command(
        "measure",
        "time operators by schedules, the serial composition and PyTorch's fused ops, paired",
        "all_gather_matmul --ranks 2 --seconds 60 --schedules candidates auto",
        "[OPERATOR ...]",
    ),
    "replay": Command(
        "measure",
        "time operators on one GPU, where rows of peers arrive when a link would bring them",
        "--world 4 --machine h200-4 --schedules candidates=3 auto",
        "[OPERATOR ...]",
    ),
    "plot": Command(
        "plan",
        "draw timelines, or the CSV of any command",
        "ficco-bench/NAME.csv --report",
        "FILE [FILE ...]",
    ),
    "tune": Command(
        "measure",
        "measure this machine, and which schedules are fastest on it, for schedule='auto'",
        "--ranks 4",
    ),
    "doctor": Command(
        "measure",
        "print versions, devices, links, engines, and what would be used and why",
        "--ranks 2",
    ),
}

#: Families of operators that share their sizes, and their operators.
FAMILIES = {
    one.whose: tuple(name for name, other in ASKABLE.items() if other.whose == one.whose)
    for one in ASKABLE.values()
}

#: Steps, which bench takes like an operator; names that may follow a command.
STEPS = ("layers", "fsdp")
OPERATOR_NAMES = tuple(dict.fromkeys((*ASKABLE, *FAMILIES, *STEPS)))


#: Errors of argparse, and the same in the words of other errors, without the quotes of names that
#: argparse prints before Python 3.12.
WORDING: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"argument (\S+): invalid int value: (.*)", r"\1: required a whole number, got \2"),
    (r"argument (\S+): invalid float value: (.*)", r"\1: required a number, got \2"),
    (
        r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)",
        lambda e: f"{e[1]}: required one of " + e[3].replace("'", "") + f", got {e[2]}",
    ),
    (r"argument (\S+): expected (.*)", r"\1: required \2, got none"),
    (
        r"the following arguments are required: command",
        f"required command, got none; `{PROGRAM} --help` lists all",
    ),
    (r"the following arguments are required: (.*)", r"required \1, got none"),
)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line. It takes no abbreviated options.

    Attributes:
        operator: the operator whose sizes the help lists.
    """

    operator = GATHERS

    def __init__(self, **how: Any) -> None:
        super().__init__(**how, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        for pattern, text in WORDING:
            message = re.sub(pattern, text, message)
        self.exit(2, f"{self.prog}: error: {message}\n")


def main() -> int:
    """Run the command line of this process; the exit code."""
    import warnings

    def in_a_line(text: Warning | str, *_: object) -> str:
        return f"{PROGRAM}: warning: {text}\n"

    warnings.formatwarning = in_a_line
    if sys.stdout is None:  # closed from the start
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    code = run(sys.argv[1:])
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    if not _reader_left():
        return code
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed again at the end
    return READER_LEFT


def run(arguments: Sequence[str]) -> int:
    """Run a command; the exit code. Errors become one line on the standard error."""
    arguments = _named(arguments)
    try:
        parsed, unknown = _parser(arguments).parse_known_args(arguments)
    except SystemExit as end:  # argparse has printed the error or the help
        return int(end.code or 0)
    program = f"{PROGRAM} {parsed.command}"
    _fail = partial(_report, program)
    if unknown:
        return _fail(_unknown(unknown[0], parsed.command), 2)

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
        if package not in EXTRA:
            raise
        return _fail(not_installed(package), 2)
    except BrokenPipeError as error:
        return READER_LEFT if _reader_left() else _fail(error, 1)
    except InvalidArgument as error:
        option = f"--{error.argument.replace('_', '-')}: {error.args[1]}"
        return _fail(option if error.argument in parsed else error, 2)
    except (ValueError, NotImplementedError, ConfigError) as error:
        return _fail(error, 2)
    except OSError as error:
        return _fail(_file_error(error), 2)
    except FiccoError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail(f"interrupted{CONTINUES.get(parsed.command, '')}", 130)


def _reader_left() -> bool:
    """Whether the reader of the output has left: ``ficco plan ... | head``."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _unknown(argument: str, command: str) -> str:
    """Error text for an argument that the parser does not know."""
    program, text = f"{PROGRAM} {command}", f"unknown argument {argument}"
    if "[OPERATOR" in COMMANDS[command].words and not argument.startswith("-"):
        usage = f"{program} {COMMANDS[command].words} [options]"
        text += f"; required `{usage}`, with OPERATOR one of {', '.join(OPERATOR_NAMES)}"
    return f"{text}; `{program} --help` lists all"


def _file_error(error: OSError) -> str:
    """Error text for a file that cannot be read or written, or for another error of the system."""
    if error.filename is None:
        return str(error)
    required = "required a file that can be read or written"
    return f"{error.filename}: {required}, got: {error.strerror}; name another"


def _report(program: str, error: object, code: int) -> int:
    print(f"{program}: error: {error}", file=sys.stderr)
    return code


def _named(arguments: Sequence[str]) -> list[str]:
    """Arguments whose operators are options: of ``plan experts``, ``plan --operator experts``."""
    command, *rest = arguments or [""]
    takes_operator = command in COMMANDS and "[OPERATOR" in COMMANDS[command].words
    if takes_operator and rest and rest[0] in OPERATOR_NAMES:
        rest.insert(0, "--operator")
    return [command, *rest] if arguments else []


def _function(verb: str, command: str) -> Any:
    """``add_COMMAND`` or ``run_COMMAND``, from the module that has the command."""
    module = import_module(f"{__name__}.{COMMANDS[command].module}")
    return getattr(module, f"{verb}_{command}")


def _parser(arguments: Sequence[str] = tuple(COMMANDS)) -> Parser:
    """Knows all commands, and the options of the commands in ``arguments``."""
    parser = Parser(
        prog=PROGRAM, description="Hide communication behind the matrix product that depends on it."
    )
    parser.add_argument(
        "--version", action="version", version=f"{PROGRAM} {version()}", help="print the version"
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    named = [after for one, after in pairwise(arguments) if one == "--operator"]
    for name, one in COMMANDS.items():
        usage = " ".join(["%(prog)s", *one.words.split(), "[options]"])
        texts = {"help": one.help, "description": one.help}
        texts["epilog"] = f"example: {PROGRAM} {name} {one.example}"
        command = commands.add_parser(name, **texts, usage=usage)
        command.operator = operator_of(named[0]) if named else GATHERS
        if name in arguments:
            _function("add", name)(command)
    return parser


# Options, shapes, the machine and files of several commands.


#: Kinds of operands that a plan or a prediction can be for. float64 is for CPUs.
OPERAND_KINDS = (*DTYPES, *CAST_KINDS, "float64")

DTYPE_TEXT = (
    f"{', '.join(OPERAND_KINDS)}; of -cast, the call casts A from bfloat16 (default: bfloat16)"
)

#: Help of ``--rows``.
ROWS = (
    "rows of each rank if they differ: 3,4,5; for an all-to-all a table with a line per sender: "
    "3,4;5,6"
)

#: The machine that is simulated unless another is named; the one that was measured most.
MACHINE = "h200-4"

#: Packages of the extra ``bench``, for figures, pictures and tables; ``import ficco`` needs none.
EXTRA = ("pandas", "matplotlib", "rich")

#: Kinds of options, as argparse takes them.
FLAG: dict[str, Any] = {"action": "store_true"}
NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}
NAMES: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
CSV: dict[str, Any] = {"type": Path, "metavar": "CSV"}


def is_installed(package: str) -> bool:
    with suppress(ValueError):  # imports of it are blocked
        return find_spec(package) is not None
    return False


def not_installed(package: str) -> str:
    """Error text for a package of the extra that is not installed."""
    return f'{package}: required, and not installed; `pip install "ficco[bench]"` adds it'


def require_extra() -> None:
    """Refuse to begin what needs the extra.

    Raises:
        ModuleNotFoundError: a package is missing; its ``name`` is one of ``EXTRA``.
    """
    for package in EXTRA:
        if not is_installed(package):
            raise ModuleNotFoundError(not_installed(package), name=package)


def site(
    machine: str | None,
    world: int | None,
    *,
    captured: bool = False,
    host: Fingerprint | str | None = None,
) -> Where:
    """The machine of ``--machine``, of the environment, or of ``host``: by default this host's."""
    from ficco.heuristics import where

    if host is None:
        from ficco.dma.engine import fingerprint

        device = launch.default_device()
        host = fingerprint(device, launch.check_ranks(None, device))
    return where(machine, world, host, captured=captured)


def add_ranks(parser: Any, ranks: str = "ranks to start (default: a GPU each, or 4)") -> None:
    add = parser.add_argument
    add("--ranks", **NUMBER, help=ranks)
    text = "cuda is any vendor's GPU (default: cuda where torch sees one)"
    add("--device", choices=("cpu", "cuda"), help=text)
    text = f"start more than {launch.RANKS_PER_CORE} CPU ranks per core"
    add("--oversubscribe", **FLAG, help=text)


def add_files(parser: Any, folder: str, subject: str) -> None:
    """Add ``--out`` and ``--name``, the files of a measurement."""
    add = parser.add_argument
    add("--out", type=Path, default=Path(folder), help=f"folder (default: {folder})")
    add("--name", help=f"name of the files (default: {subject}, machine and date)")


def operator_of(name: str) -> str:
    """An operator by its name, or the first of a family."""
    return FAMILIES.get(name, (name,))[0]


def add_sizes(parser: Parser) -> None:
    """Add ``--operator`` and the sizes of every operator. The help lists those of the parser's."""
    text = f"one of {', '.join(ASKABLE)}, or a family: {', '.join(FAMILIES)} (default: {GATHERS})"
    parser.add_argument("--operator", metavar="NAME", type=operator_of, help=text)
    mine = ASKABLE.get(parser.operator, ASKABLE[GATHERS])
    others = ", ".join(name for name in FAMILIES if name != mine.whose)
    text = f"`{parser.prog} FAMILY --help` lists the sizes of other families: {others}"
    group = parser.add_argument_group(f"sizes of {mine.whose}", text)
    options: dict[str, Size] = {}
    for one in (mine, *ASKABLE.values(), mine):
        options |= one.sizes
    for name, size in options.items():
        text, kind = size.text, NUMBER
        if size.kind is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        elif size.names:
            text += f": {' or '.join(size.names)} (default: {size.default})"
            kind = {"metavar": "NAME"}
        text = text if name in mine.sizes else argparse.SUPPRESS
        option = f"--{name.replace('_', '-')}"
        group.add_argument(option, **kind, dest=name, default=None, help=text)
    kinds: Any = {"choices": OPERAND_KINDS, "metavar": "NAME", "default": "bfloat16"}
    parser.add_argument("--dtype", **kinds, help=DTYPE_TEXT)


def sizes(arguments: Any) -> dict[str, Any]:
    names = {name for askable in ASKABLE.values() for name in askable.sizes}
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def add_world(parser: Any) -> None:
    add = parser.add_argument
    add("--world", **NUMBER, help="number of ranks (default: the machine's on each host)")
    add("--hosts", **NUMBER, default=1, help="hosts of the ranks (default: 1)")


def add_ranks_of_rows(parser: Parser) -> None:
    add_world(parser)
    parser.add_argument("--rows", help=ROWS if parser.operator in OPERATORS else argparse.SUPPRESS)


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
    """The problem of the options; ``local_world``: ranks of each host."""
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


def picture(path: Path | None, option: str = "--draw") -> None:
    """Refuse a file that no picture can be drawn to, before anything is computed."""
    if path is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in known:
        wanted = f"required a file with one of the suffixes {', '.join(known)}"
        raise ValueError(f"{option}: {wanted}, got {path}")


def command() -> str:
    """The command line of this process, for the description of figures."""
    return shlex.join(["python", "-m", "ficco", *sys.argv[1:]])


def writable(folder: Path) -> Path:
    """A folder of ``--out``, which is created; refused before anything is measured in vain."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--out: required a folder that can be written to, got {folder} ({error.strerror})"
        ) from None
    return folder
