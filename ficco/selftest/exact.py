"""Calls with integers whose results are known exactly, and what was wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

import ficco
from ficco.bench.calls import call
from ficco.bench.cases import OPERATOR as GATHER
from ficco.bench.cases import Case
from ficco.bench.inputs import Operands
from ficco.problem import OPERATORS, Problem
from ficco.selftest.rank import Found, Rank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Wrong calls that are named; the others are counted.
NAMED_CALLS = 4


def operands_of(at: Rank, shape: tuple[int, int, int], operator: str = GATHER) -> Operands:
    """Operands with so many rows per rank, or per pair of ranks."""
    rows, k, n = shape
    case = Case("", rows * at.world, n, k, at.settings.dtype, operator=operator)
    made = Operands(case.problem(at.world), at.rank, at.device)
    made.exact_b()
    return made


def uneven_operands(at: Rank, operator: str) -> Operands:
    """Operands of which some ranks, or pairs of ranks, have no rows."""
    rows, k, n = odd(at.settings.small)
    ranks = range(at.world)
    table = [[rows * ((i + 2 * j) % 3) for j in ranks] for i in ranks]
    sizes = (n, k, at.settings.dtype)
    if OPERATORS[operator].blocks:
        problem = Problem.of_blocks(operator, table, *sizes)
    elif OPERATORS[operator].returns:  # which says by itself who sums what
        problem = Case("", sum(table[0]) + 1, *sizes, operator=operator).problem(at.world)
    else:
        problem = Problem(operator, tuple(table[0]), *sizes)
    made = Operands(problem, at.rank, at.device)
    made.exact_b()
    return made


def wrong_rows(found: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Wrong elements in the rows that each rank gave or has summed, on the device; one number where
    every row is of all ranks, or of this one."""
    problem, rank = operands.problem, operands.rank
    wrong = (found != operands.reference()).sum(1)
    kind = problem.kind
    if kind.inner or (kind.sums and not kind.returns):
        return wrong.sum()[None]
    of = [
        problem.rows[peer] if kind.sums else problem.block(peer, rank)
        for peer in range(problem.world)
    ]
    return torch.stack([part.sum() for part in wrong.split(of)])


def sentences(wrong: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """Sentences about calls whose results were wrong. Reads the device."""
    counts = [(name, many.tolist()) for name, many in wrong]
    lines = [
        f"{name}: {sum(many)} wrong elements{_whose(many)}" for name, many in counts if any(many)
    ]
    if len(lines) > NAMED_CALLS:
        lines[NAMED_CALLS:] = [f"so were {len(lines) - NAMED_CALLS} more of {len(wrong)} calls"]
    return lines


def _whose(wrong: Sequence[int]) -> str:
    """Whose rows are wrong, where they are of several ranks."""
    ranks = [rank for rank, count in enumerate(wrong) if count]
    return f", in the rows of ranks {ranks}" if len(wrong) > 1 else ""


def exact(
    at: Rank, group: ProcessGroup, schedules: Sequence[str], shape: tuple[int, int, int], count: int
) -> list[str]:
    """Calls of the all-gather with changing integers, and what was wrong with them."""
    return exact_on(at, group, schedules, operands_of(at, shape), count)


def exact_on(
    at: Rank, group: ProcessGroup, schedules: Sequence[str], operands: Operands, count: int
) -> list[str]:
    """Calls with changing integers one behind the other, and what was wrong with them.

    The left operand is overwritten as soon as its call is enqueued, and nothing waits in between:
    stale data, and data read too late, change the result.
    """
    wrong = []
    for schedule in schedules:
        for number in range(count):
            at.iteration += 1
            operands.exact(at.iteration)
            found = call(operands.problem, operands.a_LK, operands.b_KN, group, schedule)
            name = f"{schedule}, call {number + 1} of {count}"
            wrong.append((name, wrong_rows(found, operands)))
    ficco.synchronize(group)
    return sentences(wrong)


def in_turn(at: Rank, group: ProcessGroup, schedules: Sequence[str], what: str) -> Found:
    """Small and large calls of some schedules."""
    settings = at.settings
    problems = exact(at, group, schedules, settings.small, settings.repeat)
    problems += exact(at, group, schedules, odd(settings.small), settings.repeat)
    problems += exact(at, group, schedules, settings.large, 1)
    at.conclude(problems)
    calls = len(schedules) * (2 * settings.repeat + 1)
    return Found(f"{calls} calls exact{what}")


def odd(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Sizes that nothing divides."""
    rows, k, n = shape
    return rows - 7, k - 3, n - 1
