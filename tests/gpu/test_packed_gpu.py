"""Packed documents in one call of flash attention, on GPUs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from cases import replays
from ranks import Rank, on_ranks, ranks, run, wider
from subjects import SUBJECTS, Case
from test_packed import MASKS, documents, trained

import ficco
from ficco.compute import attention as libraries

pytestmark = pytest.mark.multigpu


def served() -> Any:
    return mock.patch.object(libraries, "flash_of_several", wraps=libraries.flash_of_several)


@ranks(2, 4)
@on_ranks()
def test_results_and_gradients(at: Rank) -> None:
    for turn, mask in enumerate(MASKS):
        for size in (64, 128):
            facts = {**mask, "cu_seqlens": documents(192 * at.world, turn, 40)}
            with served() as calls:
                trained(at, (192, 1, 4 * at.world, 2, size), facts, "bfloat16", turn + size // 64)
                assert calls.call_count > 0


def _graphs(at: Rank) -> None:
    bounds = documents(256 * at.world, 3, 40)
    case = Case((256,) * at.world, (256, 1, 8, 2, 128))

    def shards(iteration: int) -> list[torch.Tensor]:
        operands = SUBJECTS["all_gather_attention"].make(case, at.rank, iteration)
        return [operand.to(at.device, torch.bfloat16) for operand in operands]

    q, k, v = shards(0)

    def call() -> torch.Tensor:
        with served() as calls:
            out = ficco.all_gather_attention(q, k, v, causal=True, cu_seqlens=bounds)
        if torch.cuda.is_current_stream_capturing():  # eager calls may be replays
            assert calls.call_count > 0  # the bounds of documents are cached by eager calls
        return out

    def renew(iteration: int) -> None:
        for old, new in zip((q, k, v), shards(iteration), strict=True):
            old.copy_(new)

    replays(at, call, renew)


def test_graphs() -> None:
    run(wider(), _graphs, device="cuda", fresh=True)
