"""Layers of experts on GPUs: routes that the contract lacks, and larger blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from experts import Layer, data, plain, weights_of
from ranks import Rank, ranks, run
from test_experts import LAYERS, call, every_way
from test_hosts_experts import over

pytestmark = pytest.mark.multigpu


@ranks(2, 4)
@pytest.mark.parametrize("split", ["experts", "columns"])
def test_tokens_of_few_experts(world: int, split: str) -> None:
    for layer in LAYERS[world]:
        if layer.routes != "spread":
            wide = layer if split == "experts" else replace(layer, h=12, experts=layer.experts + 1)
            run(world, every_way, wide, split, device="cuda")


def larger(at: Rank) -> None:
    layer = Layer((700,) * at.world, 4 * at.world, 2, 64, 32, 512, True, dtype=torch.bfloat16)
    for iteration, name in enumerate(("shard-overlap", "growing:compute=2,copy=2", "serial")):
        inputs = data(layer, at.rank, iteration)
        result = call(at, layer, inputs, iteration, capacity=256, schedule=name)
        expected = plain(inputs, *weights_of(layer, iteration), 256)
        # Each expert's output is rounded once, then the sum.
        atol = float(expected.abs().max()) * 2**-7
        torch.testing.assert_close(result.float().cpu(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize(("hosts", "local"), [(1, 2), (1, 4), (2, 1), (2, 2)])
def test_larger_blocks(hosts: int, local: int) -> None:
    run(hosts * local, over, hosts, larger, device="cuda")
