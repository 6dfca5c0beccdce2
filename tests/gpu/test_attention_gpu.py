"""Attention of a sequence that ranks share, on GPUs: masks and sizes of heads that libraries serve
in different ways, no further from float64 than the library, results and gradients. With
``FICCO_TESTS_RANKS_PER_GPU=4`` four ranks share a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import test_attention
import test_ulysses
import torch
from cases import equal, exact
from ranks import Rank, ranks, run
from test_attention import AttentionCase, not_finite

import ficco
from ficco.compute.attention import CUDNN_ROWS
from ficco.tools.bench.attention import nothing_merged

pytestmark = pytest.mark.multigpu

GATHERED = (
    "auto",
    "growing",
    "growing:pull",
    "shard-overlap",
    "hetero-fused-1d:pieces=2",
    "growing:compute=2",
    "growing:tail=2,compute=2",
    "serial",
)
BY_HEADS = (*test_ulysses.SCHEDULES, "auto")
SIZES = (64, 128, 256)


def _gathered(at: Rank, dtype: str, gradients: bool) -> None:
    called = test_attention.differentiated if gradients else test_attention.attended
    rows = 96 if gradients or dtype == "float16" else 2 * CUDNN_ROWS  # by flash attention or cuDNN
    for iteration, case in enumerate(test_attention.cases(at.world, rows)):
        size, schedule = SIZES[iteration % 3], GATHERED[iteration % len(GATHERED)]
        called(at, replace(case, heads=8, kv_heads=2, size=size, dtype=dtype), iteration, schedule)
        exact(at, equal(at.world, 64, 32, 16, dtype="bfloat16"), iteration)  # between others


def _by_heads(at: Rank, dtype: str, gradients: bool) -> None:
    called = test_ulysses.differentiated if gradients else test_ulysses.attended
    for iteration, case in enumerate(test_ulysses.cases(at.world, 96)):
        size, schedule = SIZES[iteration % 3], BY_HEADS[iteration % len(BY_HEADS)]
        called(at, replace(case, size=size, dtype=dtype), iteration, schedule)
        exact(at, equal(at.world, 64, 32, 16, dtype="bfloat16"), iteration)


@pytest.mark.parametrize(
    ("dtype", "gradients"), [("bfloat16", False), ("float16", False), ("bfloat16", True)]
)
@pytest.mark.parametrize("calls", [_gathered, _by_heads])
@ranks(2, 4)
def test_no_further_from_float64_than_the_library(
    world: int, calls: Callable[..., None], dtype: str, gradients: bool
) -> None:
    run(world, calls, dtype, gradients, device="cuda", timeout=280)


# By flash attention, for which keys at -inf make NaN, and by cuDNN.
@pytest.mark.parametrize(("what", "rows"), [(torch.nan, 16), (torch.nan, 256), (-torch.inf, 256)])
def test_scores_that_are_not_finite_are_not_merged_as_zeros(what: float, rows: int) -> None:
    case = AttentionCase(rows, 8, 2, 128, dtype="bfloat16")
    run(2, not_finite, what, case, device="cuda", timeout=100)


def _unmerged(at: Rank) -> None:
    q, k, v = torch.randn(3, 1, 8, 256, 64, dtype=torch.bfloat16, device=at.device)
    made = ficco.all_gather_attention(q, k, v, causal=True)
    with nothing_merged():
        assert not torch.equal(ficco.all_gather_attention(q, k, v, causal=True), made)
    assert torch.equal(ficco.all_gather_attention(q, k, v, causal=True), made)


def test_a_bench_can_leave_merging_out() -> None:
    run(2, _unmerged, device="cuda")
