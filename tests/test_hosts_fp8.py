"""Float8 operands over several hosts: their factors travel with the rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import test_fp8
import test_fp8_quantize
import torch
from ranks import Rank, run
from test_fp8 import E4M3, FNUZ, OPERATORS, ScaledCase, drawn
from test_hosts import SCHEDULES, TOPOLOGIES, host_of, network
from test_operators import BLOCKS, SUMS, rows_for

from ficco.problems.products import Problem
from ficco.problems.scaling import CASTS, RECIPES, Scaling
from ficco.proof import PlanError, check
from ficco.schedules import Schedule, plans, refusal

KINDS = [
    *(Scaling(name, "float8_e4m3fn") for name, rules in RECIPES.items() if not rules.needs),
    *(Scaling(name, "float8_e4m3fn", source="bfloat16") for name in CASTS),
]


def problem_of(operator: str, hosts: int, local: int, scaling: Scaling, kind: str) -> Problem:
    rows = rows_for(operator, hosts * local, "equal" if scaling.recipe == "block" else kind)
    make: Any = Problem.of_blocks if operator in BLOCKS else Problem
    return make(operator, rows, 48, 256, "float8_e4m3fn", scaling=scaling, hosts=hosts)


def served(problem: Problem) -> list[Schedule]:
    every = map(Schedule.parse, SCHEDULES)
    return [schedule for schedule in every if not refusal(problem, schedule)]


@pytest.mark.parametrize("scaling", KINDS, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_plans_are_proven(operator: str, scaling: Scaling) -> None:
    for (hosts, local), kind in zip(TOPOLOGIES, ("equal", "ragged", "sparse") * 2, strict=True):
        problem = problem_of(operator, hosts, local, scaling, kind)
        assert len(schedules := served(problem)) > 10
        for schedule in schedules:
            check(plans(problem, schedule))


@pytest.mark.parametrize("scaling", KINDS[:3], ids=str)
def test_factors_that_stay_behind_are_missed(scaling: Scaling) -> None:
    problem = problem_of("all_gather_matmul", 2, 2, scaling, "equal")
    found = plans(problem, Schedule.parse("hetero-fused-1d:pieces=2"))
    bare = []
    for plan in found:
        steps = list(plan.steps)
        for one in network(steps):
            moves = [move for move in steps[one].moves if "scale" not in move.src.buffer]
            assert one != network(steps)[0] or len(moves) < len(steps[one].moves)
            steps[one] = steps[one]._replace(moves=tuple(moves))
        bare.append(replace(plan, steps=tuple(steps)))
    with pytest.raises(PlanError, match="nobody has written"):
        check(bare)


def cases_of(operator: str, world: int, hosts: int, device: str = "cpu") -> list[ScaledCase]:
    chance = random.Random(f"{operator} {world} {hosts}")
    names = served(problem_of(operator, hosts, world // hosts, KINDS[1], "equal"))
    cases = [drawn(chance, operator, world, device, str(name)) for name in ("auto", *names)]
    if operator not in SUMS:
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
@pytest.mark.parametrize(("hosts", "local"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_every_schedule_is_exact(operator: str, hosts: int, local: int) -> None:
    world = hosts * local
    cases = cases_of(operator, world, hosts)
    found = run(world, exact_over, hosts, test_fp8.all_exact, cases)
    assert found == [len(cases)] * world


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_schedule_casts_exactly(operator: str) -> None:
    cases = []
    for turn, case in enumerate(cases_of(operator, 4, 2)):
        recipe = CASTS[turn % len(CASTS)]
        right = E4M3 if case.dtypes[1] == FNUZ or recipe == "block" else case.dtypes[1]
        k = 256 if recipe == "block" else case.k
        cases.append(case.on(recipe=recipe, k=k, replicated=False, dtypes=(E4M3, right)))
    assert run(4, exact_over, 2, test_fp8_quantize.cast_exactly, cases) == [len(cases)] * 4
