"""Attention by heads on GPUs: against float64, between other calls, in graphs, and gradients. With
``FICCO_TESTS_RANKS_PER_GPU=4`` four ranks share a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import equal, exact, replays
from ranks import Rank, ranks, run, wider
from test_attention import AttentionCase
from test_ulysses import SCHEDULES, attended, cases, differentiated

import ficco

pytestmark = pytest.mark.multigpu

SIZES = (64, 128, 256)


def _masks(at: Rank, dtype: str) -> None:
    for iteration, case in enumerate(cases(at.world, 96)):
        size, schedule = (
            SIZES[iteration % 3],
            (*SCHEDULES, "auto")[iteration % (len(SCHEDULES) + 1)],
        )
        attended(at, replace(case, size=size, dtype=dtype), iteration, schedule)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@ranks(2, 4)
def test_no_further_from_float64_than_the_library(world: int, dtype: str) -> None:
    run(world, _masks, dtype, device="cuda", timeout=280)


def _calls(at: Rank) -> None:
    case = AttentionCase(512, 16, 4, 128, dtype="bfloat16", causal=True)
    for iteration in range(30):
        attended(
            at,
            replace(case, batch=1 + iteration % 2),
            iteration,
            SCHEDULES[iteration % len(SCHEDULES)],
        )
        exact(at, equal(at.world, 64, 32, 16, dtype="bfloat16"), iteration)


def test_between_other_calls() -> None:
    run(wider(), _calls, device="cuda", timeout=280)


def _gradients(at: Rank) -> None:
    for iteration, case in enumerate(cases(at.world, 96)):
        size, schedule = SIZES[iteration % 3], SCHEDULES[iteration % len(SCHEDULES)]
        wide = replace(case, size=size, dtype="bfloat16")
        differentiated(at, wide, iteration, schedule, iteration % 2 > 0)


@ranks(2, 4)
def test_gradients(world: int) -> None:
    run(world, _gradients, device="cuda", timeout=280)


def _graphs(at: Rank) -> None:
    case = AttentionCase(256, 8, 2, 128, dtype="bfloat16", causal=True)
    mine = slice(at.rank * case.rows, (at.rank + 1) * case.rows)

    def shards(iteration: int) -> list[torch.Tensor]:
        return [one[:, :, mine].contiguous() for one in case.whole(at.world, iteration, at.device)]

    q, k, v = shards(0)

    def call() -> torch.Tensor:
        return ficco.ulysses_attention(q, k, v, causal=True, schedule=SCHEDULES[-1])

    def renew(iteration: int) -> None:
        for here, there in zip((q, k, v), shards(iteration), strict=True):
            here.copy_(there)

    replays(at, call, renew)


def test_graphs() -> None:
    run(wider(), _graphs, device="cuda", fresh=True, timeout=120)
