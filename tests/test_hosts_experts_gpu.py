"""Layers of experts over several hosts on GPUs, beyond the contract: larger blocks, and graphs.
Ranks of one machine stand for hosts, as in :mod:`test_hosts_gpu`."""

from __future__ import annotations

import pytest
import torch
from cases import replays
from experts import Layer, data, part, weights_of
from ranks import Rank, need_own_gpus, run
from test_experts_gpu import larger
from test_hosts import host_of
from test_hosts_experts import over

import ficco

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize(("hosts", "local"), [(2, 1), (2, 2)])
def test_larger_blocks(hosts: int, local: int) -> None:
    run(hosts * local, over, hosts, larger, device="cuda")


def _graphs(at: Rank) -> None:
    layer = Layer((64,) * at.world, 4 * at.world, 2, 64, 32, 64, True, dtype=torch.bfloat16)

    def given(iteration: int) -> list[torch.Tensor]:
        made = data(layer, at.rank, iteration)
        return [one.to(at.device) for one in (made.tokens, made.indices, made.weights)]

    operands = given(0)
    up, down = (part(one, at.rank, at.world).to(at.device) for one in weights_of(layer))

    def renew(iteration: int) -> None:
        for here, new in zip(operands, given(iteration), strict=True):
            here.copy_(new)

    with host_of(at, 2):
        replays(at, lambda: ficco.experts(*operands, up, down, capacity=40), renew)


def test_graphs_where_nccl_goes_between() -> None:
    need_own_gpus(2)
    run(2, _graphs, device="cuda", fresh=True, timeout=120)
