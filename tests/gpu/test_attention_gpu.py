"""Attention of a shared sequence on GPUs: results and gradients, for masks and head sizes that
different libraries serve."""

from __future__ import annotations

import random

import pytest
import torch
from ranks import Rank, on_ranks, ranks, run
from subjects import SUBJECTS, Case, exact
from test_attention import not_finite

import ficco
from ficco.compute.attention import CUDNN_ROWS
from ficco.tools.bench.attention import nothing_merged

pytestmark = pytest.mark.multigpu

SIZES = (64, 128, 256)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["all_gather_attention", "ulysses_attention"])
@ranks(2, 4)
@on_ranks()
def test_many_rows_and_wide_heads(at: Rank, name: str, dtype: str) -> None:
    """Results and gradients, by flash attention or cuDNN, between other calls."""
    subject, chance = SUBJECTS[name], random.Random(name)
    assert CUDNN_ROWS <= 128
    for turn, schedule in enumerate(subject.schedules(at.world) * 2):
        case = subject.case(chance, at.world, "many", "cuda").on(schedule=schedule, dtype=dtype)
        exact(at, subject, case.on(sizes=(*case.sizes[:4], SIZES[turn % 3])), turn)
        product = SUBJECTS["matmul_all_reduce"]
        exact(at, product, product.case(chance, at.world, "equal", "cuda"), turn)


# By flash attention, where keys at -inf make NaN, and by cuDNN.
@pytest.mark.parametrize(("value", "rows"), [(torch.nan, 16), (torch.nan, 256), (-torch.inf, 256)])
def test_scores_that_are_not_finite_are_not_merged_as_zeros(value: float, rows: int) -> None:
    case = Case((rows,) * 2, (rows, 1, 8, 2, 128), "bfloat16")
    run(2, not_finite, value, case, device="cuda")


@on_ranks(2)
def test_a_bench_can_skip_merging(at: Rank) -> None:
    q, k, v = torch.randn(3, 1, 8, 256, 64, dtype=torch.bfloat16, device=at.device)
    merged = ficco.all_gather_attention(q, k, v, causal=True)
    with nothing_merged():
        assert not torch.equal(ficco.all_gather_attention(q, k, v, causal=True), merged)
    assert torch.equal(ficco.all_gather_attention(q, k, v, causal=True), merged)
