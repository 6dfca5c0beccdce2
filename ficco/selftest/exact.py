"""Calls with integers whose results are known exactly, and what was wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch.distributed import ProcessGroup

import ficco
from ficco.bench.calls import call
from ficco.bench.cases import OPERATOR as GATHER
from ficco.bench.cases import Case
from ficco.bench.inputs import Operands, exact_calls
from ficco.problem import OPERATORS, Problem
from ficco.selftest.rank import Passed, Rank

#: Wrong calls that are named; the others are counted.
NAMED_CALLS = 4

#: Rows per rank, k and n.
Shape = tuple[int, int, int]


def operands_of(at: Rank, shape: Shape, operator: str = GATHER) -> Operands:
    """Operands with so many rows per rank, or per pair of ranks."""
    rows, k, n = shape
    case = Case("", rows * at.world, n, k, at.settings.dtype, operator=operator)
    return _made(at, case.problem(at.world))


def uneven_operands(at: Rank, operator: str) -> Operands:
    """Operands of which some ranks, or pairs of ranks, have no rows."""
    rows, k, n = odd(at.settings.small)
    ranks = range(at.world)
    table = [[rows * ((i + 2 * j) % 3) for j in ranks] for i in ranks]
    sizes = (n, k, at.settings.dtype)
    if OPERATORS[operator].blocks:
        return _made(at, Problem.of_blocks(operator, table, *sizes))
    if OPERATORS[operator].returns:  # the operator itself decides who sums what
        case = Case("", sum(table[0]) + 1, *sizes, operator=operator)
        return _made(at, case.problem(at.world))
    return _made(at, Problem(operator, tuple(table[0]), *sizes))


def _made(at: Rank, problem: Problem) -> Operands:
    operands = Operands(problem, at.rank, at.device)
    operands.exact_b()
    return operands


def odd(shape: Shape) -> Shape:
    """Sizes that nothing divides."""
    rows, k, n = shape
    return rows - 7, k - 3, n - 1


def exact(
    at: Rank, group: ProcessGroup, schedules: Iterable[str], where: Operands | Shape, count: int
) -> list[str]:
    """Calls of schedules with changing integers, and what was wrong with them; on operands, or on
    those of an all-gather of so many rows per rank."""
    operands = where if isinstance(where, Operands) else operands_of(at, where)
    make = partial(call, operands.problem, operands.a_LK, operands.b_KN, group)
    return compared(at, group, {name: partial(make, name) for name in schedules}, operands, count)


def compared(
    at: Rank,
    group: ProcessGroup,
    calls: Mapping[str, Callable[[], torch.Tensor]],
    operands: Operands,
    count: int,
) -> list[str]:
    """Calls that read these operands, enqueued without a wait, and what was wrong with them."""
    compare = partial(wrong_rows, operands=operands)
    made = list(exact_calls(calls, operands, count, first=at.iteration, compare=compare))
    at.iteration += len(made)
    ficco.synchronize(group)
    wrong = [(one.name, number, one.wrong.tolist()) for number, one in enumerate(made, 1)]
    lines = [
        f"{name}, call {number} of {len(made)}: {sum(many)} wrong elements{_whose(many)}"
        for name, number, many in wrong
        if any(many)
    ]
    if len(lines) > NAMED_CALLS:
        lines[NAMED_CALLS:] = [f"so were {len(lines) - NAMED_CALLS} more of {len(made)} calls"]
    return lines


def wrong_rows(result: torch.Tensor, operands: Operands) -> torch.Tensor:
    """Wrong elements in the rows that each rank gave or has summed, on the device; one number where
    every row is of all ranks, or of this one."""
    problem, rank = operands.problem, operands.rank
    wrong = (result != operands.reference()).sum(1)
    kind = problem.kind
    if kind.inner or (kind.sums and not kind.returns):
        return wrong.sum()[None]
    of = [
        problem.rows[peer] if kind.sums else problem.block(peer, rank)
        for peer in range(problem.world)
    ]
    return torch.stack([part.sum() for part in wrong.split(of)])


def _whose(wrong: Sequence[int]) -> str:
    """Whose rows are wrong, where they are of several ranks."""
    ranks = [rank for rank, count in enumerate(wrong) if count]
    return f", in the rows of ranks {ranks}" if len(wrong) > 1 else ""


def proven(
    at: Rank,
    group: ProcessGroup,
    schedules: Sequence[str],
    *cases: tuple[Operands | Shape, int],
) -> int:
    """So many calls of each schedule in each case, all right on all ranks; their number."""
    at.conclude(
        line for where, count in cases for line in exact(at, group, schedules, where, count)
    )
    return len(schedules) * sum(count for _, count in cases)


def in_turn(at: Rank, group: ProcessGroup, schedules: Sequence[str], what: str) -> Passed:
    """Small and large calls of some schedules."""
    small, large, repeat = at.settings.small, at.settings.large, at.settings.repeat
    calls = proven(at, group, schedules, (small, repeat), (odd(small), repeat), (large, 1))
    return Passed(f"{calls} calls exact{what}")
