"""The command line: ``python -m ficco --help`` lists the commands.

Exit codes: 0, all is well; 1, something failed or a result was wrong; 2, the input was wrong; 130,
interrupted; 141, whoever reads the output left early. What the extra ``bench`` has is imported by
the commands that need it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
from collections.abc import Sequence

from ficco.cli import bench, demo, doctor, explain, plan, plot, simulate, tune
from ficco.cli.site import PACKAGES, not_installed, require_extra
from ficco.errors import ConfigError, FiccoError, InvalidArgument
from ficco.launch import RankFailed, check_load
from ficco.version import version

PROGRAM = "ficco"

#: Commands that need the extra ``bench`` whatever they are asked for; others need it for pictures.
WITH_EXTRA = ("demo", "bench", "simulate", "plot", "tune")

#: Exit code where whoever reads the output left early, as a shell has it for the signal SIGPIPE.
READER_LEFT = 141

#: In the order in which the help lists them. Each has ``options``, which adds its options to a
#: parser, and ``run``, which takes what is parsed and gives the exit code.
MODULES = (demo, bench, explain, plan, simulate, plot, tune, doctor)
COMMANDS = {module.__name__.rpartition(".")[2]: module for module in MODULES}


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
        parsed = _parser().parse_args(arguments)
    except SystemExit as end:  # argparse has printed what is wrong, or the help
        return int(end.code or 0)

    try:
        if parsed.command in WITH_EXTRA:
            require_extra()
        if not getattr(parsed, "oversubscribe", True):
            check_load(parsed.ranks, parsed.device)
        return int(COMMANDS[parsed.command].run(parsed) or 0)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Hide communication behind the matrix product that depends on it."
    )
    parser.add_argument(
        "--version", action="version", version=f"{PROGRAM} {version()}", help="print the version"
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    for name, module in COMMANDS.items():
        _, _, text = " ".join((module.__doc__ or "").split()).partition(": ")
        text = text.removesuffix(".")
        module.options(commands.add_parser(name, help=text, description=text))
    return parser
