"""A log of a program's problems, as lines of JSON for ``ficco tune --from-log``."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict

from ficco.problem import Problem

#: Names the file if :attr:`ficco.Options.log_problems` does not.
VARIABLE = "FICCO_LOG_PROBLEMS"

_noted: set[tuple[str, Problem]] = set()


def note(path: str | None, problem: Problem, rank: int) -> None:
    """Append a problem that this process sees for the first time; rank 0 writes for all. Problems
    of float8 operands, which cannot be tuned, are left out.

    Warns if the file cannot be written; the call itself goes on.
    """
    path = path or os.environ.get(VARIABLE)
    if not path or rank or problem.scaling or (path, problem) in _noted:
        return
    _noted.add((path, problem))
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(problem)) + "\n")  # one write: lines do not mix
    except (OSError, ValueError) as error:  # ValueError: no name for a file
        why = getattr(error, "strerror", None) or error
        warnings.warn(f"{path!r}: problems are not logged: {why}", stacklevel=2)
