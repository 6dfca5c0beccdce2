"""Projections and experts compiled by Inductor on GPUs, bitwise equal to eager calls. The contract
has other backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Rank, on_ranks, ranks
from test_traced import WAYS, expert_layer, experts, projections, same, trained

import ficco

pytestmark = pytest.mark.gpu


def _around(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Both projections, and sums between them that every compiler rounds alike."""
    *heads, output = weights
    q, k, v = ficco.ulysses_project(x, *heads, size=4)  # type: ignore[call-arg]
    return ficco.ulysses_output(q + k + v, output)


@ranks(1, 2, 4)
@on_ranks()
def test_projections(at: Rank) -> None:
    torch._dynamo.reset()
    eager, traced = (projections(at, kv_heads=4) for _ in range(2))
    with torch.no_grad():
        for tensor in (*eager, *traced):  # sums of whole numbers are exact
            tensor.round_()
    compiled = torch.compile(_around, fullgraph=True)
    same(trained(compiled, traced), trained(_around, eager))


@ranks(1, 2)
@pytest.mark.parametrize("options", WAYS, ids=str)
@on_ranks()
def test_experts(at: Rank, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    layer = expert_layer(**options)
    eager, traced = (experts(at, way=options) for _ in range(2))
    compiled = torch.compile(layer, fullgraph=True)
    same(trained(compiled, traced, 4), trained(layer, eager, 4))
    torch.cuda.synchronize()
