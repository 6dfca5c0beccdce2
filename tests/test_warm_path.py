"""What a warm eager call costs on the caller's thread: calls of ficco's Python functions, the files
that they are in, and changes from file to file.

The measured rank begins its call after its peer, so all signals have arrived when it waits for
them. Otherwise a wait takes three more calls. Comprehensions are left out, since Python 3.12 makes
no calls of them.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from ranks import Rank, run

import ficco

PACKAGE = str(Path(ficco.__file__).parent)
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>"}


class Cost(NamedTuple):
    """Files, calls and changes of file of a call."""

    files: int
    calls: int
    changes: int


#: The most that a warm call may cost. Raise a figure only with a reason; lower it with the code.
LIMITS = {
    "all_gather_matmul": Cost(10, 44, 20),
    "matmul_reduce_scatter": Cost(10, 46, 22),
    "all_gather_attention": Cost(11, 79, 27),
}


def call(operator: str) -> Any:
    if operator == "all_gather_attention":
        q = torch.ones(1, 4, 32, 16)
        return ficco.all_gather_attention(q, q, q)
    a, b = torch.ones(64, 32), torch.ones(32, 16)
    return getattr(ficco, operator)(a, b, schedule="growing")


def cost(operator: str) -> tuple[Cost, Counter[str]]:
    """The cost of a call, and its calls by file and function."""
    calls: Counter[str] = Counter()
    files: list[str] = []

    def count(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        inside = code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS
        if event == "call" and inside:
            file = code.co_filename[len(PACKAGE) + 1 :]
            calls[f"{file}:{code.co_name}"] += 1
            if not files or files[-1] != file:
                files.append(file)

    sys.setprofile(count)
    try:
        call(operator)
    finally:
        sys.setprofile(None)
    return Cost(len(set(files)), calls.total(), len(files)), calls


def costs(at: Rank, operator: str) -> list[tuple[Cost, Counter[str]]]:
    """The costs of several warm calls of a rank that begins after its peer."""
    found = []
    ficco.close()  # an operand is looked up in the symmetric memory of earlier tests
    for _ in range(4):
        call(operator)
    for _ in range(5):
        at.barrier()
        if at.rank == 0:
            time.sleep(0.05)
        found.append(cost(operator))
    return found


@pytest.mark.parametrize("operator", LIMITS)
def test_a_warm_call_costs_no_more_than_its_limits(operator: str) -> None:
    least, calls = min(run(2, costs, operator)[0], key=lambda one: one[0].calls)
    limit = LIMITS[operator]
    above = [name for name in Cost._fields if getattr(least, name) > getattr(limit, name)]
    table = "\n".join(f"  {number:3} {name}" for name, number in sorted(calls.items()))
    assert not above, f"{operator}: {least}, limit {limit}\n{table}"
