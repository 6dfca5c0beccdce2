"""Attention, its projections and experts as operators of ``torch.library``: opcheck, fake operands,
``torch.compile``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from ranks import Rank, caught, run
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import ficco
import ficco.nn

OPERATORS = "all_gather_attention", "ulysses_attention"
#: Of operators whose gradients have none.
CHECKS = "test_schema", "test_faketensor"


def operands(at: Rank, rows: int = 6, batch: int = 1, kv_heads: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(at.rank)
    shapes = [(batch, heads, rows, 8) for heads in (4, kv_heads, kv_heads)]
    return [torch.randn(shape).requires_grad_() for shape in shapes]


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


def _dynamic(at: Rank, operator: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = getattr(ficco, operator)
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    for rows in (6, 8, 10):
        same(*(trained(one, operands(at, rows, batch=2)) for one in (compiled, function)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("operator", OPERATORS)
def test_dynamic_sizes_compile_once(operator: str) -> None:
    run(2, _dynamic, operator)


def _counted(at: Rank, operator: str) -> None:
    """A rank's queries with every key: two products, and five for the gradients."""
    with FlopCounterMode(display=False) as counter:
        out = getattr(ficco, operator)(*operands(at, rows=6, batch=2), causal=True)
        forward = counter.get_total_flops()
        out.sum().backward()
    batch, heads, rows, size = out.shape
    assert forward == 2 * 2 * batch * heads * rows * rows * at.world * size
    assert counter.get_total_flops() == forward + forward * 5 // 2


@pytest.mark.parametrize("operator", OPERATORS)
def test_operations_of_attention_are_counted(operator: str) -> None:
    run(2, _counted, operator)


# Projections.


def projections(at: Rank, rows: int = 6, batch: int = 2, kv_heads: int = 2) -> list[torch.Tensor]:
    """An input, and the weights of queries, keys, values and of the output: 4 heads of 4."""
    torch.manual_seed(7)  # weights are alike on all ranks
    shapes = (16, 12), (4 * kv_heads, 12), (4 * kv_heads, 12), (12, 16)
    weights = [torch.randn(shape) for shape in shapes]
    torch.manual_seed(at.rank)
    made = torch.randn(batch, rows, 12), *weights
    return [one.to(at.device).requires_grad_() for one in made]


def _attended(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    *heads, last = weights
    q, k, v = ficco.ulysses_project(x, *heads, size=4)  # type: ignore[call-arg]
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return ficco.ulysses_output(out, last)


def _projected(at: Rank, backend: str) -> None:
    """One graph, forward and backward, whatever the batch, heads of keys, and dtype."""
    for batch, kv_heads, needs in ((1, 2, 5), (2, 4, 5), (2, 1, 5), (1, 2, 1)):
        torch._dynamo.reset()
        first, second = (projections(at, batch=batch, kv_heads=kv_heads) for _ in range(2))
        for given in (first, second):
            for one in given[needs:]:
                one.requires_grad_(False)
        wanted = trained(_attended, first, needs)
        compiled = torch.compile(_attended, fullgraph=True, backend=backend)
        same(trained(compiled, second, needs), wanted)


def test_projections_compiled() -> None:
    run(2, _projected, "aot_eager", timeout=100)
    run(1, _projected, "aot_eager")
    run(4, _projected, "aot_eager")


def _some_of_project(at: Rank) -> None:
    """Of the input, of one weight, of the last one, and none."""
    compiled = torch.compile(_attended, fullgraph=True, backend="aot_eager")
    for only in (0, 2, 4, 5):
        first, second = projections(at), projections(at)
        for given in (first, second):
            for i, one in enumerate(given):
                one.requires_grad_(i == only)
        found, wanted = compiled(*second), _attended(*first)
        same([found], [wanted])
        if only < 5:
            found, wanted = (
                torch.autograd.grad(y.square().sum(), given[only])[0]
                for y, given in ((found, second), (wanted, first))
            )
            same([found], [wanted])


def test_projections_that_need_some_gradients() -> None:
    run(2, _some_of_project, timeout=100)


def _counted_projections(at: Rank) -> None:
    """Each product and each gradient counts once: of 6 positions, 12 features, and 2 of 4 heads of
    queries, one of keys and one of values for each rank, of size 4."""
    x, *weights, last = projections(at, rows=6, batch=2, kv_heads=2)
    with FlopCounterMode(display=False) as counter:
        q, _, _ = ficco.ulysses_project(x, *weights, size=4)  # type: ignore[call-arg]
        projected = counter.get_total_flops()
        ficco.ulysses_output(q, last).sum().backward()
    output = counter.get_total_flops() - 3 * projected
    assert projected == 2 * (6 * 2) * 12 * (2 + 1 + 1) * 4 * at.world
    assert output == 3 * 2 * (6 * 2) * 12 * 16


def test_operations_of_projections_are_counted() -> None:
    run(2, _counted_projections)


def _opcheck_projections(at: Rank) -> None:
    where, ops = (dist.group.WORLD.group_name, "auto", ""), torch.ops.ficco  # type: ignore[union-attr]
    x, *weights, last = projections(at)
    rows, blocks = x.detach().flatten(0, 1), torch.randn(2, 6, 8)
    for name, operands, asked in (
        ("ulysses_project", (rows, *weights), (4, 1)),
        ("ulysses_output", (blocks, last), (2, 1)),
    ):
        given = [one.detach().requires_grad_() for one in operands]
        op, back = (getattr(ops, name + end).default for end in ("", "_backward"))
        torch.library.opcheck(op, (*given, [True] * len(given), *asked, *where))
        with torch.no_grad():
            grad = op(*given, [False] * len(given), *asked, *where)
        for needs in itertools.product((False, True), repeat=len(given)):
            if any(needs):
                saved = [one.detach() for one in given]
                first = saved[0] if any(needs[1:]) else None
                args = grad, first, *saved[1:], None, list(needs), *asked, *where
                torch.library.opcheck(back, args, test_utils=CHECKS)


def test_opcheck_of_projections() -> None:
    run(2, _opcheck_projections)


def _without(at: Rank) -> Any:
    """A call that was traced without gradients, such as an exported one, and then asked for one."""
    where = dist.group.WORLD.group_name, "auto", ""  # type: ignore[union-attr]
    blocks, weight = torch.ones(2, 3, 8, requires_grad=True), torch.ones(12, 16)
    y = torch.ops.ficco.ulysses_output(blocks, weight, [False, False], 2, 1, *where)
    return caught(lambda: y.sum().backward())


def test_gradients_that_nothing_was_kept_for_are_refused() -> None:
    for failure in run(2, _without):
        assert failure.type == "NotImplementedError" and "trace it with gradients" in failure.text


def _dynamic_projections(at: Rank) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_attended, fullgraph=True, backend=counter, dynamic=True)
    for rows, batch in ((6, 2), (8, 2), (10, 3)):
        same(*(trained(one, projections(at, rows, batch)) for one in (compiled, _attended)))
    assert counter.frame_count == 1


def test_dynamic_positions_compile_once() -> None:
    run(2, _dynamic_projections)


def _layer(at: Rank) -> None:
    """A layer with biases and a function of positions, also under autocast."""
    torch.manual_seed(7)
    layer = ficco.nn.UlyssesAttention(12, 4, 2, size=4, bias=True, causal=True)

    def turned(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(q.shape[2], dtype=q.dtype)[:, None]
        return q * angles.cos(), k * angles.cos()

    torch.manual_seed(at.rank)
    x, compiled = torch.randn(2, 6, 12), torch.compile(layer, fullgraph=True, backend="aot_eager")
    for kind in (torch.float32, torch.bfloat16):
        found = []
        for function in (compiled, layer):
            layer.zero_grad()
            given = x.clone().requires_grad_()
            with torch.autocast("cpu", kind, enabled=kind != torch.float32):
                y = function(given, turned)
            y.float().square().sum().backward()
            found.append([y, given.grad, *(one.grad for one in layer.parameters())])
        assert found[0][0].dtype == kind
        same(*found)


def test_a_layer_of_attention_by_heads_compiled() -> None:
    run(2, _layer)


# Experts.

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
    def layer(
        tokens: torch.Tensor,
        weights: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        indices: torch.Tensor,
    ) -> torch.Tensor:
        return 2 * ficco.experts(2 * tokens, indices, weights, up, down, **way)

    return layer


def _experts_compiled(at: Rank, way: dict[str, Any], backend: str) -> None:
    torch._dynamo.reset()
    layer, first, second = expert_layer(**way), experts(at, way=way), experts(at, way=way)
    wanted = trained(layer, first, 4)
    same(trained(torch.compile(layer, fullgraph=True, backend=backend), second, 4), wanted)
    with torch.no_grad():
        same([torch.compile(layer, fullgraph=True, backend=backend)(*first)], wanted[:1])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_experts_compiled(way: dict[str, Any]) -> None:
    run(2, _experts_compiled, way, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_experts_compiled_by_inductor(way: dict[str, Any]) -> None:
    run(2, _experts_compiled, way, "inductor")


def _counted_experts(at: Rank) -> None:
    """Products of every row of the blocks, with empty ones; four for the gradients of all."""
    *given, indices = experts(at)
    capacity, (each, k, wide), (_, h, n) = 3, given[2].shape, given[3].shape
    with FlopCounterMode(display=False) as counter:
        tokens, weights, up, down = given
        y = ficco.experts(tokens, indices, weights, up, down, capacity=capacity)
        forward = counter.get_total_flops()
        y.sum().backward()
    assert forward == 2 * each * capacity * at.world * (k * wide + h * n)
    assert counter.get_total_flops() == 3 * forward


def test_operations_of_experts_are_counted() -> None:
    run(2, _counted_experts)


def _some_of_experts(at: Rank) -> None:
    """Gradients of tokens, of weights or of down only."""
    for capacity, only in ((3, 0), (3, 1), (3, 3), (None, 1)):
        torch._dynamo.reset()
        layer, found = expert_layer(capacity=capacity), []
        for function in (torch.compile(layer, fullgraph=True, backend="aot_eager"), layer):
            given = experts(at)
            for i, one in enumerate(given[:4]):
                one.requires_grad_(i == only)
            y = function(*given)
            found.append([y, *torch.autograd.grad(y.square().sum(), given[only])])
        same(*found)


def test_experts_that_need_some_gradients() -> None:
    run(2, _some_of_experts, timeout=100)


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
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, made = compiled(*operands, indices)
    assert isinstance(made, ficco.Routing) and made.dropped.sum() > 0
    same([found, made.counts, made.dropped], [wanted, routing.counts, routing.dropped])
    same([compiled(*operands, routing)[0]], [wanted])
    every = ficco.route(indices, 4)
    same([compiled(*operands, every)[0]], [layer(*operands, every)[0]])


def test_routings_in_a_graph() -> None:
    run(2, _routed)


def _dynamic_experts(at: Rank) -> None:
    def fewer(*given: torch.Tensor) -> torch.Tensor:
        return expert_layer(capacity=given[0].shape[0] // 3)(*given)

    for layer in (fewer, expert_layer()):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
        for count in (7, 9, 11):  # no sizes of anything else
            given = experts(at, count)
            same(*(trained(one, given, 4) for one in (compiled, layer)))
        assert counter.frame_count == 1


def test_numbers_of_tokens_compile_once() -> None:
    run(2, _dynamic_experts)


def _opcheck_experts(at: Rank, split: str) -> None:
    where, ops = (dist.group.WORLD.group_name, "auto", ""), torch.ops.ficco  # type: ignore[union-attr]
    *given, indices = experts(at, way={"split": split} if split == "columns" else None)
    torch.library.opcheck(ops.route.default, (indices, 4, 3, where[0]), test_utils=CHECKS)
    slots = ops.route(indices, 4, 3, where[0])[1]
    plain = [one.detach() for one in given]
    for name, last, capacity in (("experts", slots, 3), ("experts_all", indices, None)):
        op, back = (getattr(ops, name + end).default for end in ("", "_backward"))
        for some in ("1111", "1000", "0100", "0011"):  # tokens, weights, up and down
            needs = [one == "1" for one in some] + [False]
            asked = needs, capacity, "silu gated", split == "columns", *where
            mine = [one.clone().requires_grad_(n) for one, n in zip(plain, needs, strict=False)]
            checks = CHECKS if not all(needs[:4]) else (*CHECKS, "test_autograd_registration")
            torch.library.opcheck(op, (*mine, last, *asked), test_utils=checks)
            made = op(*plain, last, *asked)
            y, *kept = made if name == "experts" else (made,)
            args = torch.ones_like(y), *plain, last, None, *kept, *asked
            torch.library.opcheck(back, args, test_utils=CHECKS)


@pytest.mark.parametrize("split", ["experts", "columns"])
def test_opcheck_of_experts(split: str) -> None:
    run(2, _opcheck_experts, split)


def _behind(at: Rank) -> None:
    q, k, v = operands(at)

    def model(*given: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            *given, is_causal=True, enable_gqa=True
        )

    with ficco.behind_sdpa(placement="ranks"):
        wanted = trained(model, [q, k, v])
        same(trained(torch.compile(model, fullgraph=True, backend="aot_eager"), [q, k, v]), wanted)
    assert not torch.equal(wanted[0], scaled_dot_product_attention(q, k, v, enable_gqa=True))


def test_models_behind_sdpa_compile() -> None:
    run(2, _behind)


def _refused(at: Rank) -> list[str]:
    q, k, v = operands(at)
    x, *weights = projections(at)
    tokens, factors, up, down, indices = experts(at)

    def project(*given: torch.Tensor) -> Any:
        return ficco.ulysses_project(*given, size=4)  # type: ignore[call-arg]

    texts = []
    for function, given in (
        (ficco.all_gather_attention, (q[0], k, v)),
        (ficco.all_gather_attention, (q, k, v[:, :1])),
        (partial(ficco.all_gather_attention, cu_seqlens=torch.tensor([0, 12])), (q, k, v)),
        (project, (x[0], *weights[:3])),
        (project, (x, *weights[:2], weights[2][:4])),
        (ficco.ulysses_output, (q[0], weights[3])),
        (ficco.ulysses_output, (q, weights[0])),
        (expert_layer(capacity=3), (tokens[0], factors, up, down, indices)),
        (expert_layer(), (tokens, factors, up, down[:1], indices)),
        (expert_layer(capacity=3), (tokens, factors, up, down, indices[:2])),
        (expert_layer(capacity=0), (tokens, factors, up, down, indices)),
        (expert_layer(split="rows"), (tokens, factors, up, down, indices)),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        texts.append(caught(lambda given=given, compiled=compiled: compiled(*given)).text)
    return texts


def test_what_does_not_fit_is_refused_by_name() -> None:
    wanted = (
        "q: required a dense [batch, heads, S/W, size]",
        "v_shard: required [batch, kv_heads, S/W, size]",
        "cu_seqlens: required a list in a compiled function, got a tensor",
        "x: required [batch, S/W, features]",
        "k_weight, v_weight: required as many heads of both",
        "out: required [batch, heads/W, S, size]",
        "weight: required [features, 64]",
        "required tokens [t, k], up [E/W, k, h]",
        "with one k, h and number of experts",
        "required indices and weights [t, top_k] for 7 tokens",
        "capacity: required at least 1 row",
        "split: required one of experts, columns",
    )
    for texts in run(2, _refused):
        for text, part in zip(texts, wanted, strict=True):
            assert part in text
