"""Float8 operands over several hosts: their factors travel with the rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import test_fp8_quantize
import torch
from ranks import Rank, run
from test_fp8 import E4M3, FNUZ, OPERATORS, ScaledCase, drawn
from test_hosts import ROWS, TOPOLOGIES, host_of, rows_of, served

from ficco.problems.products import OPERATORS as PRODUCTS
from ficco.problems.products import Problem
from ficco.problems.scaling import CASTS, RECIPES, Scaling
from ficco.proof import check
from ficco.schedules import plans

KINDS = [
    *(Scaling(name, "float8_e4m3fn") for name, rules in RECIPES.items() if not rules.needs),
    *(Scaling(name, "float8_e4m3fn", source="bfloat16") for name in CASTS),
]


def problem_of(operator: str, hosts: int, local: int, scaling: Scaling, kind: str) -> Problem:
    rows = rows_of(operator, hosts * local, "equal" if scaling.recipe == "block" else kind)
    make: Any = Problem.of_blocks if PRODUCTS[operator].blocks else Problem
    made: Problem = make(operator, rows, 48, 256, "float8_e4m3fn", scaling=scaling, hosts=hosts)
    return made


@pytest.mark.parametrize("operator", OPERATORS)
def test_plans_are_proven(operator: str) -> None:
    for turn, (scaling, (hosts, local)) in enumerate(product(KINDS, TOPOLOGIES)):
        problem = problem_of(operator, hosts, local, scaling, list(ROWS)[turn % 3])
        assert len(schedules := served(problem)) > 10
        for schedule in schedules[turn % 5 :: 5]:
            check(plans(problem, schedule))


def cases_of(operator: str, world: int, hosts: int, device: str = "cpu") -> list[ScaledCase]:
    chance = random.Random(f"{operator} {world} {hosts}")
    names = served(problem_of(operator, hosts, world // hosts, KINDS[1], "equal"))
    cases = [drawn(chance, operator, world, device, str(name)) for name in ("auto", *names)]
    if not PRODUCTS[operator].sums:
        return cases
    # Sums are rounded on their way from host to host.
    return [case.on(out=torch.float32, bias=False) for case in cases]


def exact_over(
    at: Rank,
    hosts: int,
    exactly: Callable[[Rank, Sequence[ScaledCase]], int],
    cases: Sequence[ScaledCase],
) -> int:
    with host_of(at, hosts):
        return exactly(at, cases)


@pytest.mark.parametrize("operator", OPERATORS)
def test_schedules_cast_exactly(operator: str) -> None:
    cases = []
    for turn, case in enumerate(cases_of(operator, 4, 2)[::2]):
        recipe = CASTS[turn % len(CASTS)]
        right = E4M3 if case.dtypes[1] == FNUZ or recipe == "block" else case.dtypes[1]
        k = 256 if recipe == "block" else case.k
        cases.append(case.on(recipe=recipe, k=k, replicated=False, dtypes=(E4M3, right)))
    assert run(4, exact_over, 2, test_fp8_quantize.cast_exactly, cases) == [len(cases)] * 4
