"""The command line: ``python -m ficco --help`` lists the commands.

Exit codes: 0, all is well; 1, something failed or a result was wrong; 2, the input was wrong; 130,
interrupted; 141, whoever reads the output left early.

Parsing imports neither PyTorch nor NumPy, so that help and refused options take no second: what
reads options is imported for the command that was asked for, and all else when it runs. What the
extra ``bench`` has is imported by the commands that need it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
from collections.abc import Container, Sequence
from importlib import import_module
from typing import Any

from ficco.errors import ConfigError, FiccoError, InvalidArgument
from ficco.tools.launch import RankFailed, check_load
from ficco.version import version

PROGRAM = "ficco"

#: Commands that need the extra ``bench`` whatever they are asked for; others need it for pictures.
WITH_EXTRA = ("demo", "bench", "simulate", "plot", "tune")

#: Exit code where whoever reads the output left early, as a shell has it for the signal SIGPIPE.
READER_LEFT = 141

#: What the help says of each command, in its order. A command is a module of this package that
#: has ``options``, which adds its options to a parser, and ``run``, which takes what is parsed and
#: gives the exit code.
COMMANDS = {
    "demo": "run every schedule and operator here, compare them with the plain product, draw them",
    "bench": "time operators by schedules, the serial composition and PyTorch's fused ops, paired",
    "explain": "say which schedule a call would take, why, and what is predicted of the others",
    "plan": "print or draw what a schedule does for given sizes; needs no GPU",
    "simulate": "predict schedules on a described machine; needs no GPU",
    "plot": "draw timelines, simulated and measured, side by side",
    "tune": "measure this machine, and which schedules are fastest on it, for schedule='auto'",
    "doctor": "print versions, devices, links, engines, and what would be used and why",
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
    except SystemExit as end:  # argparse has printed what is wrong, or the help
        return int(end.code or 0)

    from ficco.tools.cli.site import PACKAGES, not_installed, require_extra

    try:
        if parsed.command in WITH_EXTRA:
            require_extra()
        if not getattr(parsed, "oversubscribe", True):
            check_load(parsed.ranks, parsed.device)
        return int(_module(parsed.command).run(parsed) or 0)
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
    """Whether what is printed goes into a pipe that nobody reads: ``ficco plan ... | head``."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _fail(error: object, code: int) -> int:
    print(f"{PROGRAM}: error: {error}", file=sys.stderr)
    return code


def _module(name: str) -> Any:
    return import_module(f"{__name__}.{name}")


def _parser(asked: Container[str] = COMMANDS) -> argparse.ArgumentParser:
    """Knows all commands, and the options of those in ``asked``."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Hide communication behind the matrix product that depends on it."
    )
    parser.add_argument(
        "--version", action="version", version=f"{PROGRAM} {version()}", help="print the version"
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name in asked:
            _module(name).options(command)
    return parser
