"""Attention, its projections and experts under ``torch.compile``, beside what the contract has:
sizes that change, gradients of some operands, layers, experts without a capacity."""

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
    torch.manual_seed(7)  # weights are alike on all ranks
    shapes = (16, 12), (4 * kv_heads, 12), (4 * kv_heads, 12), (12, 16)
    weights = [torch.randn(shape) for shape in shapes]
    torch.manual_seed(at.rank)
    made = torch.randn(batch, rows, 12), *weights
    return [one.to(at.device).requires_grad_() for one in made]


def attended(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    *heads, last = weights
    q, k, v = ficco.ulysses_project(x, *heads, size=4)  # type: ignore[call-arg]
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return ficco.ulysses_output(out, last)


#: With a capacity that pairs exceed, of ranks that have experts or columns; and all pairs, in
#: further rounds, or in exactly the rows that there are.
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
    made = [torch.randn(shape).to(at.device).requires_grad_() for shape in shapes]
    indices = torch.rand(count, 4).argsort(1)[:, :2]
    indices[:4] = torch.tensor([0, 1])  # more than a small capacity
    return [*made, indices.to(at.device)]


def expert_layer(**way: Any) -> Callable[..., torch.Tensor]:
    def layer(*given: torch.Tensor) -> torch.Tensor:
        tokens, *rest, indices = given
        return 2 * ficco.experts(2 * tokens, indices, *rest, **way)

    return layer


def trained(
    function: Callable[..., torch.Tensor], given: list[torch.Tensor], needs: int | None = None
) -> list[torch.Tensor]:
    """The result, and gradients of the first operands, or of all."""
    out = function(*given)
    weights = torch.arange(out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return [out, *torch.autograd.grad((out * weights.cos()).sum(), given[:needs])]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def _dynamic(at: Rank) -> None:
    """Numbers of rows, positions and tokens that change compile once."""

    def fewer(*given: torch.Tensor) -> torch.Tensor:
        return expert_layer(capacity=given[0].shape[0] // 3)(*given)

    by_rows = [partial(operands, at, rows, batch=2) for rows in (6, 8, 10)]
    by_positions = [partial(projections, at, *sizes) for sizes in ((6, 2), (8, 2), (10, 3))]
    by_tokens = [partial(experts, at, count) for count in (7, 9, 11)]  # sizes of nothing else
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


def _some(at: Rank) -> None:
    kinds: list[tuple[Any, Any, int]] = [(attended, projections, only) for only in (0, 2, 5)]
    kinds += [(expert_layer(capacity=3), experts, 0), (expert_layer(), experts, 1)]
    for function, draw, only in kinds:
        results = []
        for called in (compiled(function), function):
            given = draw(at)
            for i, one in enumerate(given[: 4 if draw is experts else 5]):
                one.requires_grad_(i == only)
            y = called(*given)
            grads = torch.autograd.grad(y.square().sum(), given[only]) if only < 5 else ()
            results.append([y, *grads])
        same(*results)


def _counted(at: Rank) -> None:
    for operator in (ficco.all_gather_attention, ficco.ulysses_attention):
        with FlopCounterMode(display=False) as counter:
            out = operator(*operands(at, rows=6, batch=2), causal=True)
            forward = counter.get_total_flops()
            out.sum().backward()
        batch, heads, rows, size = out.shape
        # A rank's queries with every key: two products, and five for the gradients.
        assert forward == 2 * 2 * batch * heads * rows * rows * at.world * size
        assert counter.get_total_flops() == forward + forward * 5 // 2

    x, *weights, last = projections(at, rows=6, batch=2, kv_heads=2)
    with FlopCounterMode(display=False) as counter:
        q, *_ = ficco.ulysses_project(x, *weights, size=4)  # type: ignore[call-arg]
        projected = counter.get_total_flops()
        ficco.ulysses_output(q, last).sum().backward()
    # Each product and each gradient once: of 6 positions, 12 features, and 2 of 4 heads of queries,
    # one of keys and one of values for each rank, of size 4.
    assert projected == 2 * (6 * 2) * 12 * (2 + 1 + 1) * 4 * at.world
    assert counter.get_total_flops() - 3 * projected == 3 * 2 * (6 * 2) * 12 * 16

    tokens, factors, up, down, indices = experts(at)
    (each, k, wide), (_, h, n) = up.shape, down.shape
    with FlopCounterMode(display=False) as counter:
        y = ficco.experts(tokens, indices, factors, up, down, capacity=3)
        forward = counter.get_total_flops()
        y.sum().backward()
    # Products of every row of the blocks, with empty ones; four for the gradients of all.
    assert forward == 2 * each * 3 * at.world * (k * wide + h * n)
    assert counter.get_total_flops() == 3 * forward


def _without(at: Rank) -> None:
    """A call that was traced without gradients, such as an exported one, and then asked for one."""
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
            given = x.clone().requires_grad_()
            with torch.autocast("cpu", kind, enabled=kind != torch.float32):
                y = function(given, rotated)
            y.float().square().sum().backward()
            results.append([y, given.grad, *(one.grad for one in layer.parameters())])
        assert results[0][0].dtype == kind
        same(*results)


def _behind(at: Rank) -> None:
    given = operands(at)

    def model(*given: torch.Tensor) -> torch.Tensor:
        functional = torch.nn.functional  # as it is at the time of the call
        return functional.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)

    with ficco.behind_sdpa(placement="ranks"):
        wanted = trained(model, given)
        same(trained(compiled(model), given), wanted)
    assert not torch.equal(wanted[0], scaled_dot_product_attention(*given, enable_gqa=True))


@pytest.mark.parametrize(
    ("ways", "backend"), [(WAYS[2:4], "aot_eager"), (WAYS[4:], "inductor")], ids=str
)
@on_ranks(2, timeout=250)
def test_experts_of_all_pairs(at: Rank, ways: Sequence[dict[str, Any]], backend: str) -> None:
    """In further rounds, or in exactly the rows that there are."""
    for way in ways:
        layer, first, second = expert_layer(**way), experts(at, way=way), experts(at, way=way)
        wanted, once = trained(layer, first, 4), compiled(layer, backend)
        same(trained(once, second, 4), wanted)
        with torch.no_grad():
            same([once(*first)], wanted[:1])


def _routed(at: Rank) -> None:
    """Routings that are made in the graph and leave it, and those that come into it."""

    def layer(*given: Any) -> tuple[torch.Tensor, ficco.Routing]:
        *operands, indices = given
        routing = indices
        if isinstance(indices, torch.Tensor):
            routing = ficco.route(indices, 4, capacity=3)
        tokens, weights, up, down = operands
        return ficco.experts(tokens, routing, weights, up, down), routing

    *operands, indices = experts(at)
    wanted, routing = layer(*operands, indices)
    once = compiled(layer)
    found, made = once(*operands, indices)
    assert isinstance(made, ficco.Routing) and made.dropped.sum() > 0
    same([found, made.counts, made.dropped], [wanted, routing.counts, routing.dropped])
    same([once(*operands, routing)[0]], [wanted])
    every = ficco.route(indices, 4)
    same([once(*operands, every)[0]], [layer(*operands, every)[0]])


def _refused(at: Rank) -> None:
    q, k, v = operands(at)
    x, *weights = projections(at)
    tokens, factors, up, down, indices = experts(at)
    project, output = partial(ficco.ulysses_project, size=4), ficco.ulysses_output
    attend, layer, few = ficco.all_gather_attention, expert_layer, expert_layer(capacity=3)
    packed = partial(attend, cu_seqlens=torch.tensor([0, 12]))
    every = tokens, factors, up, down, indices
    for words, function, *given in (
        ("q: required a dense [batch, heads, S/W, size]", attend, q[0], k, v),
        ("v_shard: required [batch, kv_heads, S/W, size]", attend, q, k, v[:, :1]),
        ("required a list in a compiled function, got a tensor", packed, q, k, v),
        ("x: required [batch, S/W, features]", project, x[0], *weights[:3]),
        ("required as many heads of both", project, x, *weights[:2], weights[2][:4]),
        ("out: required [batch, heads/W, S, size]", output, q[0], weights[3]),
        ("weight: required [features, 64]", output, q, weights[0]),
        ("required tokens [t, k], up [E/W, k, h]", few, tokens[0], *every[1:]),
        ("with one k, h and number of experts", layer(), *every[:3], down[:1], indices),
        ("required indices and weights [t, top_k] for 7 tokens", few, *every[:4], indices[:2]),
        ("capacity: required at least 1 row", layer(capacity=0), *every),
        ("capacity: required at least 1 row", layer(capacity=0, on_overflow="again"), *every),
        ("on_overflow: required one of", layer(capacity=3, on_overflow="agian"), *every),
        ("indices: required whole numbers", layer(), *every[:4], indices.float()),
        ("split: required one of experts, columns", layer(split="rows"), *every),
    ):
        assert words in caught(partial(compiled(function, "eager"), *given)).text, words


@pytest.mark.parametrize(
    "check", [_dynamic, _some, _counted, _without, _layer, _behind, _routed, _refused]
)
def test_traced(check: Callable[[Rank], None]) -> None:
    run(2, check)
