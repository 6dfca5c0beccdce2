"""Float8 operands and layers on GPUs: cases of the library's GEMM, and jittered calls."""

from __future__ import annotations

import random

import pytest
import torch
from ranks import Rank, backend_on_gpus, ranks, run
from test_fp8 import (  # noqa: F401  collected here, with this module's device
    DTYPES,
    OPERATORS,
    SERVED,
    ScaledCase,
    all_exact,
    call,
    drawn,
    sample,
    schedules,
    test_forms_of_operands,
    test_memory_keeps_to_its_cap,
    test_tiled_products_have_their_factors,
)
from test_fp8_layers import test_functions_are_exact  # noqa: F401  the same
from test_fp8_quantize import (  # noqa: F401  the same
    test_every_schedule_casts_exactly,
    test_layouts_of_cast_operands,
)
from test_gpu import jittered

pytestmark = pytest.mark.multigpu


# Cases of the library's GEMM, on one GPU.


def library_cases(recipe: str) -> list[ScaledCase]:
    """Dtypes of results, with a bias where the library allows it; fast sums, exact in any
    accumulator since they have few terms; few rows and partial blocks; cuts of k, which
    accumulate in float32; dtypes of operands."""
    case = ScaledCase("all_gather_matmul", (64,), 256, 144, recipe, "serial")
    cases = [case.on(out=torch.float32), case.on(fast=True)]
    for out in (torch.bfloat16, torch.float16):
        cases += [case.on(out=out, bias=bias) for bias in (False, True)]
    for m, k, n in ((4, 128, 16), (4, 400, 272), (12, 640, 128), (3, 16, 16)):
        if recipe != "block" or m % 4 == 0:
            cases.append(case.on(rows=(m,), k=k, n=n))
    cases.append(case.on(k=512, schedule="uniform-fused-2d:pieces=3"))
    dtypes_of_operands = DTYPES[1:3] if recipe != "block" else ()
    return cases + [case.on(dtypes=dtypes) for dtypes in dtypes_of_operands]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", SERVED)
def test_cases_of_the_library(recipe: str) -> None:
    run(1, all_exact, library_cases(recipe), device="cuda")


# Jitter.


def _jitter(at: Rank, seed: int, calls: int) -> int:
    chance = random.Random(seed)
    by_nccl = backend_on_gpus(at.world) == "nccl"
    names = [
        (operator, name)
        for operator in OPERATORS
        for name in schedules(operator)
        if name != "auto" and (by_nccl or "collective" not in name)
    ]
    kinds = [
        drawn(chance, operator, at.world, "cuda", name)
        for operator, name in chance.sample(names, 40)
    ]

    def once(index: int, case: ScaledCase) -> tuple[torch.Tensor, torch.Tensor]:
        operands, expected = sample(case, at, index)
        y = call(case, operands)
        operands.a.view(torch.uint8).fill_(22)
        operands.scales["scale_a"].fill_(3)
        return y, expected

    return jittered(at, seed, calls, kinds, once)


@ranks(2, 4)
def test_jittered_calls(world: int) -> None:
    calls = 1000 if world == 4 else 300
    assert run(world, _jitter, world, calls, device="cuda") == [calls] * world
