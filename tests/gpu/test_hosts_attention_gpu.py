"""Attention over several hosts on GPUs, beyond the contract and :mod:`test_hosts_gpu`: ranks that
are lost in a call or its backward."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from ranks import Rank, run
from test_hosts import PATIENCE_S, assert_all_learn, losing

import ficco

pytestmark = pytest.mark.multigpu

#: Attention to keys that are gathered, and by heads.
OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "gathered": partial(ficco.all_gather_attention, placement="head-tail"),
    "by-heads": ficco.ulysses_attention,
}


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
