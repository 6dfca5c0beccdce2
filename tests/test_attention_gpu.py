"""Attention whose keys arrive, on GPUs: against float64, between other calls, in graphs. With
``FICCO_TESTS_RANKS_PER_GPU=4`` four ranks share a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import equal, exact, replays
from ranks import Rank, ranks, run, wider
from test_attention import AttentionCase, attended, cases, differentiated, not_finite

import ficco
from ficco.tools.bench.attention import nothing_merged

pytestmark = pytest.mark.multigpu

SCHEDULES = (
    "auto",
    "growing",
    "growing:pull",
    "shard-overlap",
    "hetero-fused-1d:pieces=2",
    "growing:compute=2",
    "growing:tail=2,compute=2",
    "serial",
)


SIZES = (64, 128, 256)


def _masks(at: Rank, dtype: str) -> None:
    for iteration, case in enumerate(cases(at.world, 96)):
        size, schedule = SIZES[iteration % 3], SCHEDULES[iteration % len(SCHEDULES)]
        wide = replace(case, heads=8, kv_heads=2, size=size, dtype=dtype)
        attended(at, wide, iteration, schedule)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@ranks(2, 4)
def test_no_further_from_float64_than_the_library(world: int, dtype: str) -> None:
    run(world, _masks, dtype, device="cuda", timeout=280)


# By flash attention, for which keys at -inf make NaN, and by cuDNN.
@pytest.mark.parametrize(("what", "rows"), [(torch.nan, 16), (torch.nan, 256), (-torch.inf, 256)])
def test_scores_that_are_not_finite_are_not_merged_as_zeros(what: float, rows: int) -> None:
    case = AttentionCase(rows, 8, 2, 128, dtype="bfloat16")
    run(2, not_finite, what, case, device="cuda", timeout=100)


def _calls(at: Rank) -> None:
    case = AttentionCase(512, 16, 4, 128, dtype="bfloat16", causal=True, placement="head-tail")
    for iteration in range(30):
        schedule = SCHEDULES[iteration % len(SCHEDULES)]
        attended(at, replace(case, batch=1 + iteration % 2), iteration, schedule)
        exact(at, equal(at.world, 64, 32, 16, dtype="bfloat16"), iteration)


def test_between_other_calls() -> None:
    run(wider(), _calls, device="cuda", timeout=280)


def _unmerged(at: Rank) -> None:
    q, k, v = torch.randn(3, 1, 8, 256, 64, dtype=torch.bfloat16, device=at.device)
    made = ficco.all_gather_attention(q, k, v, causal=True)
    with nothing_merged():
        assert not torch.equal(ficco.all_gather_attention(q, k, v, causal=True), made)
    assert torch.equal(ficco.all_gather_attention(q, k, v, causal=True), made)


def test_a_bench_can_leave_merging_out() -> None:
    run(2, _unmerged, device="cuda")


def _gradients(at: Rank) -> None:
    for iteration, case in enumerate(cases(at.world, 96)):
        size, schedule = SIZES[iteration % 3], SCHEDULES[iteration % len(SCHEDULES)]
        wide = replace(case, heads=8, kv_heads=2, size=size, dtype="bfloat16")
        differentiated(at, wide, iteration, schedule)


@ranks(2, 4)
def test_gradients(world: int) -> None:
    run(world, _gradients, device="cuda", timeout=280)


def _graphs(at: Rank, schedule: str) -> Any:
    case = AttentionCase(256, 8, 2, 128, dtype="bfloat16", causal=True, placement="head-tail")
    mine = case.positions(at.rank, at.world).to(at.device)

    def shards(iteration: int) -> list[torch.Tensor]:
        return [one[:, :, mine].contiguous() for one in case.whole(at.world, iteration, at.device)]

    q, k, v = shards(0)

    def call() -> torch.Tensor:
        how = {"causal": True, "placement": "head-tail", "schedule": schedule}
        return ficco.all_gather_attention(q, k, v, **how)

    def renew(iteration: int) -> None:
        for here, there in zip((q, k, v), shards(iteration), strict=True):
            here.copy_(there)

    replays(at, call, renew)


@pytest.mark.parametrize("schedule", ["growing", "growing:compute=2"])
def test_graphs(schedule: str) -> None:
    run(wider(), _graphs, schedule, device="cuda", fresh=True, timeout=120)
