"""Reference of a layer of experts, in one process: all experts, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, and the routes of its tokens: ``"spread"``, ``"one"`` expert for all, or
    experts of ``"few"`` ranks."""

    tokens: tuple[int, ...]
    experts: int = 4
    top_k: int = 2
    k: int = 8
    h: int = 6
    n: int = 8
    gated: bool = False
    routes: str = "spread"
    dtype: torch.dtype = torch.float32

    @property
    def world(self) -> int:
        return len(self.tokens)


@dataclass
class Data:
    """Operands of one rank: small integers that depend on rank and iteration."""

    tokens: torch.Tensor
    indices: torch.Tensor
    weights: torch.Tensor

    def leaves(self) -> Data:
        return Data(
            self.tokens.clone().requires_grad_(),
            self.indices,
            self.weights.clone().requires_grad_(),
        )


def integers(shape: tuple[int, ...], seed: int, low: int = -2, high: int = 3) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).float()


def data(layer: Layer, rank: int, iteration: int = 0) -> Data:
    t, seed = layer.tokens[rank], 1000 * iteration + 10 * rank
    generator = torch.Generator().manual_seed(seed + 1)
    most = {"spread": layer.experts, "one": layer.top_k, "few": max(layer.top_k, 2)}[layer.routes]
    scores = torch.rand((t, most), generator=generator)
    if layer.routes == "one":
        scores += torch.arange(most, 0, -1)
    indices = scores.argsort(1, descending=True)[:, : layer.top_k]
    weights = integers((t, layer.top_k), seed + 2, 1, 4) / 2
    return Data(integers((t, layer.k), seed).to(layer.dtype), indices, weights)


def weights_of(layer: Layer, iteration: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """``up`` and ``down`` of all experts."""
    wide = 2 * layer.h if layer.gated else layer.h
    up = integers((layer.experts, layer.k, wide), 7 + iteration, -1, 2)
    down = integers((layer.experts, layer.h, layer.n), 8 + iteration, -1, 2)
    return up.to(layer.dtype), down.to(layer.dtype)


def part(whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    each = whole.shape[0] // world
    return whole[rank * each : (rank + 1) * each].contiguous()


def within_capacity(indices: torch.Tensor, experts: int, capacity: int | None) -> torch.Tensor:
    """Mask of the pairs within the capacity; first choices of an expert precede second choices."""
    seen, room = [0] * experts, torch.zeros_like(indices, dtype=torch.bool)
    for choice in range(indices.shape[1]):
        for token, expert in enumerate(indices[:, choice].tolist()):
            room[token, choice] = capacity is None or seen[expert] < capacity
            seen[expert] += 1
    return room


def plain(
    data: Data,
    up: torch.Tensor,
    down: torch.Tensor,
    capacity: int | None = None,
    activation: str = "relu",
) -> torch.Tensor:
    """The result for one rank's tokens, in float32 or wider."""
    function: Any = getattr(functional, activation)
    room = within_capacity(data.indices, up.shape[0], capacity)
    wide = torch.promote_types(data.tokens.dtype, torch.float32)
    total = data.tokens.new_zeros(data.tokens.shape[0], down.shape[2], dtype=wide)
    for expert in range(up.shape[0]):
        hidden = data.tokens @ up[expert]
        if up.shape[2] == 2 * down.shape[1]:
            gate, rest = hidden.chunk(2, 1)
            active = function(gate) * rest
        else:
            active = function(hidden)
        share = (data.weights.to(wide) * (room & (data.indices == expert))).sum(1, keepdim=True)
        total = total + share * (active @ down[expert]).to(wide)
    return total
