"""Float8 operands over several hosts. The scales travel with the rows."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from ranks import Rank, on_ranks
from test_fp8 import OPERATORS, SERVED
from test_fp8_quantize import cast_exactly, every_schedule
from test_hosts import TOPOLOGIES, host_of, problem_of, served

from ficco.problems.products import OPERATORS as PRODUCTS
from ficco.problems.scaling import CASTS, Scaling
from ficco.proof import check
from ficco.schedules import plans

KINDS = [
    *(Scaling(name, "float8_e4m3fn") for name in SERVED),
    *(Scaling(name, "float8_e4m3fn", source="bfloat16") for name in CASTS),
]


@pytest.mark.parametrize("operator", OPERATORS)
def test_plans_are_proven(operator: str) -> None:
    for turn, (scaling, topology) in enumerate(product(KINDS, TOPOLOGIES)):
        rows = "equal" if scaling.recipe == "block" else ("equal", "uneven", "few")[turn % 3]
        options: Any = {"dtype": "float8_e4m3fn", "scaling": scaling}
        problem = problem_of(operator, *topology, rows, 48, 256, **options)
        assert len(schedules := served(problem)) > 10
        for schedule in schedules[turn % 8 :: 8]:
            check(plans(problem, schedule))


@pytest.mark.parametrize("operator", OPERATORS)
@on_ranks(4)
def test_schedules_cast_exactly(at: Rank, operator: str) -> None:
    names = served(problem_of(operator, 2, 2, "equal"))[::2]
    candidates = every_schedule(operator, 4, "cpu", every=4)
    cases = [case.on(schedule=str(name)) for case, name in zip(candidates, names, strict=False)]
    if PRODUCTS[operator].sums:  # sums are rounded between hosts
        cases = [case.on(out=torch.float32, bias=False) for case in cases]
    with host_of(at, 2):
        assert cast_exactly(at, cases) == len(cases) > 5
