"""Attention over several hosts on GPUs, beyond the contract: graphs and lost ranks. Ranks of one
machine stand for hosts, as in :mod:`test_hosts_gpu`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from cases import replays
from ranks import Rank, need_own_gpus, run
from test_attention import AttentionCase
from test_hosts import PATIENCE_S, assert_all_learn, host_of, losing

import ficco

pytestmark = pytest.mark.multigpu

#: Attention to keys that are gathered, and by heads.
OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "gathered": partial(ficco.all_gather_attention, placement="head-tail"),
    "by-heads": ficco.ulysses_attention,
}


def _graphs(at: Rank, name: str, schedule: str) -> None:
    case = AttentionCase(256, 8, 2, 128, dtype="bfloat16", causal=True, placement="head-tail")
    mine = case.positions(at.rank, at.world).to(at.device)

    def shards(iteration: int) -> list[torch.Tensor]:
        return [one[:, :, mine].contiguous() for one in case.whole(at.world, iteration, at.device)]

    q, k, v = shards(0)

    def renew(iteration: int) -> None:
        for here, there in zip((q, k, v), shards(iteration), strict=True):
            here.copy_(there)

    with host_of(at, 2):
        replays(at, lambda: OPERATORS[name](q, k, v, causal=True, schedule=schedule), renew)


@pytest.mark.parametrize(
    ("name", "schedule"), [("gathered", "growing"), ("by-heads", "uniform-fused-1d:pieces=2")]
)
def test_graphs_where_nccl_goes_between(name: str, schedule: str) -> None:
    need_own_gpus(2)
    run(2, _graphs, name, schedule, device="cuda", fresh=True, timeout=120)


def _bereaved(at: Rank, victims: Sequence[int], name: str) -> Any:
    """What a rank learns of others that are lost, in a call or its backward."""
    with ficco.options(timeout_s=PATIENCE_S, on_timeout="raise"):
        os.environ["FICCO_HOST"] = f"host-{at.rank // (at.world // 2)}"
        shards = [
            torch.ones(1, 8, 64, 64, device=at.device, dtype=torch.bfloat16, requires_grad=True)
            for _ in "qkv"
        ]

        def once() -> None:
            OPERATORS[name](*shards, causal=True).sum().backward()
            ficco.synchronize()

        for _ in range(3):
            once()
        return losing(at, victims, signal.SIGKILL, lambda: [once() for _ in range(3)])


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("world", [2, 4])
def test_every_survivor_learns_of_a_lost_rank(world: int, name: str) -> None:
    victims = (world - 1,)
    where: Any = {"device": "cuda", "fresh": True, "catch": True, "lost": victims}
    assert_all_learn(run(world, _bereaved, victims, name, **where), victims)
