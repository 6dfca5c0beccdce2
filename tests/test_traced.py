"""Attention, its projections and experts under ``torch.compile``, beyond the contract: dynamic
sizes, gradients of some operands, layers, experts without a capacity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, caught, on_ranks, run
from test_library import compiled
from test_nn import refuses
from test_projections import rotated
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import ficco
import ficco.nn


def operands(at: Rank, rows: int = 6, batch: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(at.rank)
    return [torch.randn(batch, heads, rows, 8).requires_grad_() for heads in (4, 2, 2)]


def projections(at: Rank, rows: int = 6, batch: int = 2, kv_heads: int = 2) -> list[torch.Tensor]:
    """An input, and the weights of queries, keys, values and of the output: 4 heads of 4."""
    torch.manual_seed(7)  # the same weights on all ranks
    shapes = (16, 12), (4 * kv_heads, 12), (4 * kv_heads, 12), (12, 16)
    weights = [torch.randn(shape) for shape in shapes]
    torch.manual_seed(at.rank)
    tensors = torch.randn(batch, rows, 12), *weights
    return [tensor.to(at.device).requires_grad_() for tensor in tensors]


def attended(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    *heads, last = weights
    q, k, v = ficco.ulysses_project(x, *heads, size=4)  # type: ignore[call-arg]
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return ficco.ulysses_output(out, last)


#: Layers with a capacity that pairs exceed, split by experts or by columns, and layers of all
#: pairs, in further rounds or with exact rows.
WAYS: tuple[dict[str, Any], ...] = (
    {"capacity": 3},
    {"capacity": 2, "split": "columns", "activation": "gelu"},
    {"capacity": 2, "on_overflow": "again", "activation": "relu"},
    {},
    {"split": "columns"},
)


def experts(at: Rank, count: int = 7, way: dict[str, Any] | None = None) -> list[torch.Tensor]:
    """Tokens, weights, up, down and indices, for 4 experts; gated, columns of 12."""
    torch.manual_seed(7 + at.rank)
    each, wide = (4, 12 // at.world) if way and "split" in way else (4 // at.world, 12)
    gates = 1 if way and way.get("activation") == "relu" else 2
    shapes = (count, 8), (count, 2), (each, 8, gates * wide), (each, wide, 8)
    tensors = [torch.randn(shape).to(at.device).requires_grad_() for shape in shapes]
    indices = torch.rand(count, 4).argsort(1)[:, :2]
    indices[:4] = torch.tensor([0, 1])  # more pairs than a small capacity
    return [*tensors, indices.to(at.device)]


def expert_layer(**way: Any) -> Callable[..., torch.Tensor]:
    def layer(*operands: torch.Tensor) -> torch.Tensor:
        tokens, *rest, indices = operands
        return 2 * ficco.experts(2 * tokens, indices, *rest, **way)

    return layer


def trained(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], needs: int | None = None
) -> list[torch.Tensor]:
    """The result, and gradients of the first ``needs`` inputs, or of all."""
    out = function(*inputs)
    weights = torch.arange(out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return [out, *torch.autograd.grad((out * weights.cos()).sum(), inputs[:needs])]


def same(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for result, want in zip(results, expected, strict=True):
        assert torch.equal(result, want)


def _dynamic(at: Rank) -> None:
    """Functions with dynamic numbers of rows, positions and tokens compile once."""

    def fewer(*inputs: torch.Tensor) -> torch.Tensor:
        return expert_layer(capacity=inputs[0].shape[0] // 3)(*inputs)

    by_rows = [partial(operands, at, rows, batch=2) for rows in (6, 8, 10)]
    by_positions = [partial(projections, at, *sizes) for sizes in ((6, 2), (8, 2), (10, 3))]
    by_tokens = [partial(experts, at, count) for count in (7, 9, 11)]  # unique sizes
    kinds: list[tuple[Any, list[Any], int | None]] = [
        (ficco.all_gather_attention, by_rows, None),
        (attended, by_positions, None),
        (fewer, by_tokens, 4),
        (expert_layer(), by_tokens, 4),
    ]
    for function, draws, needs in kinds:
        counter = CompileCounterWithBackend("aot_eager")
        once = compiled(function, counter, dynamic=True)
        for draw in draws:
            same(trained(once, draw(), needs), trained(function, draw(), needs))
        assert counter.frame_count == 1, function


def _subset(at: Rank) -> None:
    kinds: list[tuple[Any, Any, int]] = [(attended, projections, only) for only in (0, 2, 5)]
    kinds += [(expert_layer(capacity=3), experts, 0), (expert_layer(), experts, 1)]
    for function, draw, only in kinds:
        results = []
        for called in (compiled(function), function):
            inputs = draw(at)
            for i, operand in enumerate(inputs[: 4 if draw is experts else 5]):
                operand.requires_grad_(i == only)
            y = called(*inputs)
            grads = torch.autograd.grad(y.square().sum(), inputs[only]) if only < 5 else ()
            results.append([y, *grads])
        same(*results)


def _flops(at: Rank) -> None:
    for operator in (ficco.all_gather_attention, ficco.ulysses_attention):
        with FlopCounterMode(display=False) as counter:
            out = operator(*operands(at, rows=6, batch=2), causal=True)
            forward = counter.get_total_flops()
            out.sum().backward()
        batch, heads, rows, size = out.shape
        # Two products of a rank's queries with every key, and five for the gradients.
        assert forward == 2 * 2 * batch * heads * rows * rows * at.world * size
        assert counter.get_total_flops() == forward + forward * 5 // 2

    x, *weights, last = projections(at, rows=6, batch=2, kv_heads=2)
    with FlopCounterMode(display=False) as counter:
        q, *_ = ficco.ulysses_project(x, *weights, size=4)  # type: ignore[call-arg]
        projected = counter.get_total_flops()
        ficco.ulysses_output(q, last).sum().backward()
    # Each product and each gradient counts once: 6 positions, 12 features, and for each rank 2 of 4
    # query heads, one key head and one value head of size 4.
    assert projected == 2 * (6 * 2) * 12 * (2 + 1 + 1) * 4 * at.world
    assert counter.get_total_flops() - 3 * projected == 3 * 2 * (6 * 2) * 12 * 16

    tokens, factors, up, down, indices = experts(at)
    (each, k, wide), (_, h, n) = up.shape, down.shape
    with FlopCounterMode(display=False) as counter:
        y = ficco.experts(tokens, indices, factors, up, down, capacity=3)
        forward = counter.get_total_flops()
        y.sum().backward()
    # Products of all rows of the blocks, with empty rows; four products for the gradients.
    assert forward == 2 * each * 3 * at.world * (k * wide + h * n)
    assert counter.get_total_flops() == 3 * forward


def _no_grad(at: Rank) -> None:
    """The error of a backward through a call that was traced without gradients, as by export."""
    where = dist.group.WORLD.group_name, "auto", ""  # type: ignore[union-attr]
    blocks, weight = torch.ones(2, 3, 8, requires_grad=True), torch.ones(12, 16)
    y = torch.ops.ficco.ulysses_output(blocks, weight, [False, False], 2, 1, *where)
    refuses(("trace it with gradients", lambda: y.sum().backward()), kind="NotImplementedError")


def _layer(at: Rank) -> None:
    torch.manual_seed(7)
    layer = ficco.nn.UlyssesAttention(12, 4, 2, size=4, bias=True, causal=True)
    torch.manual_seed(at.rank)
    x, once = torch.randn(2, 6, 12), compiled(layer)
    for kind in (torch.float32, torch.bfloat16):
        results = []
        for function in (once, layer):
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            with torch.autocast("cpu", kind, enabled=kind != torch.float32):
                y = function(leaf, rotated)
            y.float().square().sum().backward()
            results.append([y, leaf.grad, *(weight.grad for weight in layer.parameters())])
        assert results[0][0].dtype == kind
        same(*results)


def _sdpa(at: Rank) -> None:
    inputs = operands(at)

    def model(*inputs: torch.Tensor) -> torch.Tensor:
        functional = torch.nn.functional  # looked up at the time of the call
        return functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

    with ficco.behind_sdpa(placement="ranks"):
        expected = trained(model, inputs)
        same(trained(compiled(model), inputs), expected)
    assert not torch.equal(expected[0], scaled_dot_product_attention(*inputs, enable_gqa=True))


@pytest.mark.parametrize(
    ("ways", "backend"), [(WAYS[2:4], "aot_eager"), (WAYS[4:], "inductor")], ids=str
)
@on_ranks(2, timeout=250)
def test_experts_of_all_pairs(at: Rank, ways: Sequence[dict[str, Any]], backend: str) -> None:
    """Layers of all pairs, in further rounds or with exact rows."""
    for way in ways:
        layer, first, second = expert_layer(**way), experts(at, way=way), experts(at, way=way)
        expected, once = trained(layer, first, 4), compiled(layer, backend)
        same(trained(once, second, 4), expected)
        with torch.no_grad():
            same([once(*first)], expected[:1])


def _routed(at: Rank) -> None:
    """Routings that the graph computes and returns, and routings that it takes as an argument."""

    def layer(*inputs: Any) -> tuple[torch.Tensor, ficco.Routing]:
        *operands, indices = inputs
        routing = indices
        if isinstance(indices, torch.Tensor):
            routing = ficco.route(indices, 4, capacity=3)
        tokens, weights, up, down = operands
        return ficco.experts(tokens, routing, weights, up, down), routing

    *operands, indices = experts(at)
    expected, routing = layer(*operands, indices)
    once = compiled(layer)
    result, returned = once(*operands, indices)
    assert isinstance(returned, ficco.Routing) and returned.dropped.sum() > 0
    same([result, returned.counts, returned.dropped], [expected, routing.counts, routing.dropped])
    same([once(*operands, routing)[0]], [expected])
    unlimited = ficco.route(indices, 4)
    same([once(*operands, unlimited)[0]], [layer(*operands, unlimited)[0]])


def _compiled_autograd(at: Rank) -> None:
    """Compiled autograd does not trace the engine in the backward of an eager call."""
    inputs, again = experts(at), experts(at)
    out, *expected = trained(layer := expert_layer(capacity=3), inputs, 4)
    weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos()
    with torch._dynamo.config.patch(compiled_autograd=True):
        counter = CompileCounterWithBackend("eager")
        torch.compile(lambda out: out.backward(weights), backend=counter)(layer(*again))
        assert counter.frame_count < 5  # 20 with functions of the engine
    same([operand.grad for operand in again[:4] if operand.grad is not None], expected)


def _refused(at: Rank) -> None:
    q, k, v = operands(at)
    x, *weights = projections(at)
    tokens, factors, up, down, indices = experts(at)
    project, output = partial(ficco.ulysses_project, size=4), ficco.ulysses_output
    attend, layer, few = ficco.all_gather_attention, expert_layer, expert_layer(capacity=3)
    packed = partial(attend, cu_seqlens=torch.tensor([0, 12]))
    valid = tokens, factors, up, down, indices
    for words, function, *arguments in (
        ("q: required a dense [batch, heads, S/W, size]", attend, q[0], k, v),
        ("v_shard: required [batch, kv_heads, S/W, size]", attend, q, k, v[:, :1]),
        ("required a list in a compiled function, got a tensor", packed, q, k, v),
        ("x: required [batch, S/W, features]", project, x[0], *weights[:3]),
        ("required as many heads of both", project, x, *weights[:2], weights[2][:4]),
        ("out: required [batch, heads/W, S, size]", output, q[0], weights[3]),
        ("weight: required [features, 64]", output, q, weights[0]),
        ("required tokens [t, k], up [E/W, k, h]", few, tokens[0], *valid[1:]),
        ("with one k, h and number of experts", layer(), *valid[:3], down[:1], indices),
        ("required indices and weights [t, top_k] for 7 tokens", few, *valid[:4], indices[:2]),
        ("capacity: required at least 1 row", layer(capacity=0), *valid),
        ("capacity: required at least 1 row", layer(capacity=0, on_overflow="again"), *valid),
        ("on_overflow: required one of", layer(capacity=3, on_overflow="agian"), *valid),
        ("indices: required whole numbers", layer(), *valid[:4], indices.float()),
        ("split: required one of experts, columns", layer(split="rows"), *valid),
    ):
        assert words in caught(partial(compiled(function, "eager"), *arguments)).text, words


@pytest.mark.parametrize(
    "check",
    [_dynamic, _subset, _flops, _no_grad, _layer, _sdpa, _routed, _compiled_autograd, _refused],
)
def test_traced(check: Callable[[Rank], None]) -> None:
    run(2, check)
