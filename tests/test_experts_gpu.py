"""Layers of experts on GPUs: exact, with gradients, in graphs, when the host runs ahead. With
``FICCO_TESTS_RANKS_PER_GPU=4`` four ranks share a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from experts import Layer, data, plain, weights_of
from ranks import Rank, ranks, run
from test_experts import LAYERS, call, every_way, gradients

import ficco

pytestmark = pytest.mark.gpu


@ranks(1, 2, 4)
@pytest.mark.parametrize("split", ["experts", "columns"])
def test_it_equals_all_experts_in_one_process(world: int, split: str) -> None:
    for layer in LAYERS[world]:
        wide = layer if split == "experts" else replace(layer, h=12, experts=layer.experts + 1)
        run(world, every_way, wide, split, device="cuda")


@ranks(2, 4)
@pytest.mark.parametrize(
    "ways", [{"capacity": 3}, {"capacity": None}, {"capacity": 3, "split": "columns"}], ids=str
)
def test_gradients_equal_those_of_one_process(world: int, ways: dict[str, Any]) -> None:
    for layer in LAYERS[world]:
        if layer.dtype == torch.float32:
            run(world, gradients, replace(layer, h=12), ways, device="cuda")


def larger(at: Rank) -> None:
    """Larger blocks, in bfloat16."""
    layer = Layer((700,) * at.world, 4 * at.world, 2, 64, 32, 512, True, dtype=torch.bfloat16)
    for iteration, name in enumerate(("shard-overlap", "growing:compute=2,copy=2", "serial")):
        given = data(layer, at.rank, iteration)
        found = call(at, layer, given, iteration, capacity=256, schedule=name)
        wanted = plain(given, *weights_of(layer, iteration), 256)
        # What each expert makes is rounded once, then the sum.
        atol = float(wanted.abs().max()) * 2**-7
        torch.testing.assert_close(found.float().cpu(), wanted, rtol=0, atol=atol)


@ranks(2, 4)
def test_larger_blocks(world: int) -> None:
    run(world, larger, device="cuda")


def ahead(at: Rank) -> None:
    """The host runs ahead, on two streams, ranks out of step; other calls are between."""
    layer, kept = Layer((33,) * at.world, 2 * at.world, gated=True), []
    other = torch.cuda.Stream()
    for iteration in range(30):
        if (iteration + at.rank) % 5 == 0:
            torch.cuda._sleep(200_000)
        given = data(layer, at.rank, iteration)
        stream = torch.cuda.current_stream() if iteration % 3 else other
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = call(at, layer, given, iteration % 2, capacity=9 + iteration % 2)
        torch.cuda.current_stream().wait_stream(stream)
        wanted = plain(given, *weights_of(layer, iteration % 2), 9 + iteration % 2)
        kept.append((found, wanted))
        ones = torch.ones(4, 8, device=at.device)
        ficco.all_gather_matmul(ones, torch.eye(8, device=at.device))
    for found, wanted in kept:
        assert torch.equal(found.cpu(), wanted)


@ranks(2, 4)
def test_the_host_runs_ahead(world: int) -> None:
    run(world, ahead, device="cuda")


def captured(at: Rank) -> None:
    """A graph of a layer with a capacity serves other tokens and routes."""
    layer = Layer((33,) * at.world, 2 * at.world)
    up, down = (one.to(at.device) for one in weights_of(layer))
    each = layer.experts // at.world
    own = [one[at.rank * each : (at.rank + 1) * each].contiguous() for one in (up, down)]
    first = data(layer, at.rank)
    static = [one.to(at.device) for one in (first.tokens, first.indices, first.weights)]

    def layer_call() -> torch.Tensor:
        return ficco.experts(*static, *own, capacity=12, activation="relu")

    for _ in range(3):
        layer_call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = layer_call()
    for iteration in range(5):
        given = data(layer, at.rank, iteration)
        for one, two in zip(static, (given.tokens, given.indices, given.weights), strict=True):
            one.copy_(two)
        graph.replay()
        wanted = plain(given, *weights_of(layer), 12)
        assert torch.equal(made.cpu(), wanted), f"replay {iteration}"
    torch.cuda.synchronize()


@ranks(2, 4)
def test_graphs_serve_other_routes(world: int) -> None:
    run(world, captured, device="cuda")
