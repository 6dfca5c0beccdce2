"""What a program asks for and what it gets: its problems as lines of JSON, for ``ficco tune`` and
``ficco explain --from-log``, and a line in its own log on what each of them takes."""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ficco.errors import ConfigError
from ficco.heuristics import Decision
from ficco.problems.products import Problem
from ficco.problems.scaling import Scaling

LOGGER = logging.getLogger("ficco")

_noted: set[tuple[str, Problem]] = set()
_said: set[str] = set()


def note(path: str | None, problem: Problem, rank: int) -> None:
    """Append a problem that this process sees for the first time; rank 0 writes for all.

    Warns if the file cannot be written; the call itself goes on.
    """
    if not path or rank or (path, problem) in _noted:
        return
    _noted.add((path, problem))
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(problem)) + "\n")  # one write: lines do not mix
    except (OSError, ValueError) as error:  # ValueError: no name for a file
        why = getattr(error, "strerror", None) or error
        warnings.warn(f"{path!r}: problems are not logged: {why}", stacklevel=2)


def read(path: Path, world: int | None = None) -> list[Problem]:
    """The problems that a program has noted, each once, without empty ones; all of them, or those
    of so many ranks.

    Raises:
        ConfigError: the file cannot be read, or a line is not of a problem.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(str(path), "file", f"cannot be read: {error.strerror}") from None
    logged: dict[Problem, None] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            rows, n, k = tuple(map(int, data["rows"])), int(data["n"]), int(data["k"])
            blocks = tuple(tuple(map(int, sent)) for sent in data.get("blocks", ()))
            scaling = Scaling(**data["scaling"]) if data.get("scaling") else None
            sizes = rows, n, k, str(data["dtype"])
            more: Any = {"blocks": blocks, "scaling": scaling, "hosts": data.get("hosts", 1)}
            more["transposed"] = data.get("transposed", False)
            logged[Problem(str(data["operator"]), *sizes, **more)] = None
        except (ValueError, KeyError, TypeError, NotImplementedError) as error:
            why = f"{type(error).__name__}: {error}"
            wanted = f"required a problem as options(log_problems=...) writes it: {why}"
            raise ConfigError(str(path), f"line {number}", wanted) from None
    return [one for one in logged if one.flops and world in (None, one.world)]


def say(
    on: bool,
    decision: Decision,
    taken: str,
    purpose: str,
    rank: int,
) -> None:
    """Log what a problem takes that this process sees for the first time; rank 0 speaks for all.

    ``taken`` is the schedule of its plan, which may be another than the one decided on where that
    cannot be had. If the log is turned on by the option, the line is on the standard error
    unless the program has handlers of its own.
    """
    if rank:
        return
    if on:
        if not LOGGER.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            LOGGER.addHandler(handler)
        if not LOGGER.isEnabledFor(logging.INFO):
            LOGGER.setLevel(logging.INFO)
    elif not LOGGER.isEnabledFor(logging.INFO):
        return
    line = choice(decision, taken, purpose)
    if line not in _said:
        _said.add(line)
        LOGGER.info(line)


def choice(decision: Decision, taken: str = "", purpose: str = "") -> str:
    """A problem, the schedule that it takes and why, in a line."""
    wanted, machine = str(decision.schedule), decision.machine
    text = f"{decision.problem}{purpose and ', ' + purpose}: {taken or wanted}"
    if taken and taken != wanted:
        text += f" in place of {wanted}"
    known = machine is None or machine.name in decision.reason
    where = "" if machine is None or known else f"; machine {machine.name}"
    return f"{text} ({decision.why}{where})"
