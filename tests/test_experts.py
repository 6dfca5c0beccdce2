"""Expert-parallel layers on CPU ranks: exact results and gradients, routes, faults."""

from __future__ import annotations

from typing import Any

import torch
from experts import Data, Layer, data, part, plain, weights_of
from ranks import Rank, ranks, run

import ficco

SCHEDULES = (
    "auto",
    "serial",
    "shard-overlap",
    "growing",
    "shrinking:compute=2",
    "hetero-fused-1d:pieces=2",
    "uniform-unfused-1d:pieces=2,copy=2",
)


def call(at: Rank, layer: Layer, given: Data, iteration: int = 0, **ways: Any) -> torch.Tensor:
    up, down = (part(one, at.rank, at.world) for one in weights_of(layer, iteration))
    ways = {"activation": "relu", "capacity": 5} | ways
    moved = (one.to(at.device) for one in (given.tokens, given.indices, given.weights))
    return ficco.experts(*moved, up.to(at.device), down.to(at.device), **ways)


def every_way(at: Rank, layer: Layer) -> None:
    for iteration, name in enumerate(SCHEDULES):
        given = data(layer, at.rank, iteration)
        for ways in (
            {"capacity": 5},
            {"capacity": 2},
            {"capacity": 3, "on_overflow": "again"},
            {"capacity": None},
        ):
            found = call(at, layer, given, iteration, schedule=name, **ways)
            drops = ways.get("on_overflow") != "again"
            wanted = plain(
                given, *weights_of(layer, iteration), ways["capacity"] if drops else None
            )
            assert found.dtype == layer.dtype and found.shape == wanted.shape
            assert torch.equal(found.cpu(), wanted.to(layer.dtype)), f"rank {at.rank} {name} {ways}"


LAYERS = {
    1: [Layer((5,)), Layer((0,), gated=True)],
    2: [
        Layer((6, 9)),
        Layer((7, 0), experts=2, top_k=1, gated=True),
        Layer((5, 5), experts=6, routes="one", dtype=torch.bfloat16, k=4, h=3),
    ],
    3: [Layer((4, 0, 7), experts=6, gated=True), Layer((0, 0, 1), experts=3, top_k=1)],
    4: [
        Layer((6, 3, 0, 9), experts=8, top_k=3),
        Layer((5, 5, 5, 5), experts=4, routes="few", gated=True),
        Layer((4, 4, 4, 4), experts=8, routes="one"),
        Layer((0, 0, 0, 0)),
    ],
}


@ranks(1, 2, 3, 4)
def test_it_equals_all_experts_in_one_process(world: int) -> None:
    for layer in LAYERS[world]:
        run(world, every_way, layer)
