"""Projections and experts compiled by Inductor on GPUs, bitwise as eager; the contract has other
backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Rank, on_ranks, ranks
from test_traced import WAYS, expert_layer, experts, projections, same, trained

import ficco

pytestmark = pytest.mark.gpu


def _around(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Both projections, and sums between them that no compiler rounds in another way."""
    *heads, last = weights
    q, k, v = ficco.ulysses_project(x, *heads, size=4)  # type: ignore[call-arg]
    return ficco.ulysses_output(q + k + v, last)


@ranks(1, 2, 4)
@on_ranks(timeout=90)
def test_projections(at: Rank) -> None:
    torch._dynamo.reset()
    first, second = (projections(at, kv_heads=4) for _ in range(2))
    with torch.no_grad():
        for one in (*first, *second):  # whole numbers, of which sums are exact
            one.round_()
    compiled = torch.compile(_around, fullgraph=True)
    same(trained(compiled, second), trained(_around, first))


@ranks(1, 2)
@pytest.mark.parametrize("way", WAYS, ids=str)
@on_ranks(timeout=90)
def test_experts(at: Rank, way: dict[str, Any]) -> None:
    torch._dynamo.reset()
    layer, first, second = expert_layer(**way), experts(at, way=way), experts(at, way=way)
    compiled = torch.compile(layer, fullgraph=True)
    same(trained(compiled, second, 4), trained(layer, first, 4))
    torch.cuda.synchronize()
