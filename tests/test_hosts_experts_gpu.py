"""Layers of experts over several hosts on GPUs. Ranks of one machine stand for hosts by
``FICCO_HOST``, as in :mod:`test_hosts_gpu`: NCCL goes between hosts whose ranks have GPUs of their
own, gloo between those that share one (``FICCO_TESTS_RANKS_PER_GPU``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import replays
from experts import Layer, data, part, weights_of
from ranks import Rank, need_own_gpus, run
from test_experts import every_way, gradients
from test_experts_gpu import larger
from test_hosts import host_of
from test_hosts_experts import LAYERS, over

import ficco

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize("split", ["experts", "columns"])
@pytest.mark.parametrize(("hosts", "local"), [(2, 1), (2, 2), (4, 1)])
def test_it_equals_all_experts_in_one_process(hosts: int, local: int, split: str) -> None:
    for layer in LAYERS[hosts, local]:
        wide = layer if split == "experts" else replace(layer, h=12)
        run(hosts * local, over, hosts, every_way, wide, split, device="cuda")


@pytest.mark.parametrize(
    "ways", [{"capacity": 3}, {"capacity": None}, {"capacity": 3, "split": "columns"}], ids=str
)
@pytest.mark.parametrize(("hosts", "local"), [(2, 1), (2, 2)])
def test_gradients_equal_those_of_one_process(hosts: int, local: int, ways: dict[str, Any]) -> None:
    for layer in LAYERS[hosts, local]:
        if layer.dtype == torch.float32:
            some = replace(layer, h=12)
            run(hosts * local, over, hosts, gradients, some, ways, device="cuda")


@pytest.mark.parametrize(("hosts", "local"), [(2, 1), (2, 2)])
def test_larger_blocks(hosts: int, local: int) -> None:
    run(hosts * local, over, hosts, larger, device="cuda")


def _graphs(at: Rank) -> None:
    layer = Layer((64,) * at.world, 4 * at.world, 2, 64, 32, 64, True, dtype=torch.bfloat16)
    mine = data(layer, at.rank)
    tokens, indices, weights = (
        one.to(at.device) for one in (mine.tokens, mine.indices, mine.weights)
    )
    up, down = (part(one, at.rank, at.world).to(at.device) for one in weights_of(layer))

    def renew(iteration: int) -> None:
        there = data(layer, at.rank, iteration)
        for here, new in zip(
            (tokens, indices, weights), (there.tokens, there.indices, there.weights), strict=True
        ):
            here.copy_(new)

    def once() -> torch.Tensor:
        return ficco.experts(tokens, indices, weights, up, down, capacity=40)

    with host_of(at, 2):
        replays(at, once, renew)


def test_graphs_where_nccl_goes_between() -> None:
    need_own_gpus(2)
    run(2, _graphs, device="cuda", fresh=True, timeout=120)
