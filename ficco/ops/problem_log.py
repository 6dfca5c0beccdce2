"""Logs of a program's problems: lines of JSON, for ``ficco tune`` and ``ficco explain --from-log``,
and log messages with the schedule of each problem."""

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
    """Append a problem that this process sees for the first time; rank 0 writes for all ranks.

    Warns if the file cannot be written; the call itself continues.
    """
    if not path or rank or (path, problem) in _noted:
        return
    _noted.add((path, problem))
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(problem)) + "\n")  # one write: lines do not mix
    except (OSError, ValueError) as error:  # ValueError: not a file name
        why = getattr(error, "strerror", None) or error
        warnings.warn(f"{path!r}: problems are not logged: {why}", stacklevel=2)


def read(path: Path, world: int | None = None) -> list[Problem]:
    """Return the problems of a log, each once and without empty ones. With ``world``, return only
    problems of that number of ranks.

    Raises:
        ConfigError: the file cannot be read, or a line does not describe a problem.
    """
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
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
            extra: Any = {"blocks": blocks, "scaling": scaling, "hosts": data.get("hosts", 1)}
            extra["transposed"] = data.get("transposed", False)
            logged[Problem(str(data["operator"]), *sizes, **extra)] = None
        except (ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:
            why = f"{type(error).__name__}: {error}"
            expected = f"required a problem as options(log_problems=...) writes it: {why}"
            raise ConfigError(str(path), f"line {number}", expected) from None
    return [problem for problem in logged if problem.flops and world in (None, problem.world)]


def say(on: bool, decision: Decision, taken: str, purpose: str, rank: int) -> None:
    """Log the schedule of a problem that this process sees for the first time, on rank 0.

    ``taken``: schedule of the plan; it differs from the decision if that cannot be used. If the
    option turns the log on, the line goes to the standard error unless the program has handlers.
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
    """Return a line with a problem, its schedule and the reason."""
    decided, machine = str(decision.schedule), decision.machine
    text = f"{decision.problem}{purpose and ', ' + purpose}: {taken or decided}"
    if taken and taken != decided:
        text += f" in place of {decided}"
    known = machine is None or machine.name in decision.reason
    suffix = "" if machine is None or known else f"; machine {machine.name}"
    return f"{text} ({decision.why}{suffix})"
