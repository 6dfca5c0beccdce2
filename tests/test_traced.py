"""Attention as operators of ``torch.library``: opcheck, fake operands, ``torch.compile``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from ranks import Rank, caught, run
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

import ficco

OPERATORS = "all_gather_attention", "ulysses_attention"
#: Whole sequences and packed ones, masks, and one head of keys for all.
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True, "window": 3, "scale": 0.5},
    {"causal": True, "cu_seqlens": [0, 5, 12]},
)
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
    weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad((out * weights.cos()).sum(), given[:needs])]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def _compiled(at: Rank, operator: str, backend: str) -> None:
    for kind in KINDS:
        torch._dynamo.reset()

        def layer(*given: torch.Tensor, kind: dict[str, Any] = kind) -> torch.Tensor:
            return 2 * getattr(ficco, operator)(*given, **kind)

        wanted = trained(layer, operands(at))
        same(trained(torch.compile(layer, fullgraph=True, backend=backend), operands(at)), wanted)


@pytest.mark.parametrize("operator", OPERATORS)
def test_compiled(operator: str) -> None:
    run(2, _compiled, operator, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_compiled_by_inductor(operator: str) -> None:
    run(2, _compiled, operator, "inductor")


def _opcheck(at: Rank, operator: str) -> None:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    placed = ("ranks",) if operator == OPERATORS[0] else ()
    asked = [True] * 3, True, None, None, [], *placed, name, "auto", ""
    ops, given = torch.ops.ficco, operands(at, batch=2)
    torch.library.opcheck(getattr(ops, operator).default, (*given, *asked))
    plain = [one.detach() for one in given]
    out, lse = getattr(ops, operator)(*plain, *asked)
    args = torch.ones_like(out), *plain, out, lse, *asked
    torch.library.opcheck(getattr(ops, f"{operator}_backward").default, args)


@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(operator: str) -> None:
    run(2, _opcheck, operator)


def _strides(at: Rank, operator: str) -> None:
    for kv_heads in (1, 4):
        given = operands(at, batch=2, kv_heads=kv_heads)
        real = trained(getattr(ficco, operator), given)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(one).requires_grad_() for one in given]
            fake = trained(getattr(ficco, operator), fakes)
        for one, other in zip(real, fake, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (
                other.shape,
                other.stride(),
                other.dtype,
            )


@pytest.mark.parametrize("operator", OPERATORS)
def test_fake_operands(operator: str) -> None:
    run(2, _strides, operator)


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


# Projections.


def projections(at: Rank, rows: int = 6, batch: int = 2, kv_heads: int = 2) -> list[torch.Tensor]:
    """An input, and the weights of queries, keys, values and of the output: 4 heads of 4."""
    torch.manual_seed(7)  # weights are alike on all ranks
    shapes = (16, 12), (4 * kv_heads, 12), (4 * kv_heads, 12), (12, 16)
    weights = [torch.randn(shape).requires_grad_() for shape in shapes]
    torch.manual_seed(at.rank)
    return [torch.randn(batch, rows, 12).requires_grad_(), *weights]


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
    run(2, _projected, "aot_eager")
    run(1, _projected, "aot_eager")
    run(4, _projected, "aot_eager")


def _some_of_project(at: Rank) -> None:
    """Of one operand each, and without gradients."""
    compiled = torch.compile(_attended, fullgraph=True, backend="aot_eager")
    for only in range(6):
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
    run(2, _some_of_project)


def _opcheck_projections(at: Rank) -> None:
    where, ops = (dist.group.WORLD.group_name, "auto", ""), torch.ops.ficco  # type: ignore[union-attr]
    x, *weights, last = projections(at)
    rows, blocks = x.detach().flatten(0, 1), torch.randn(2, 6, 8)
    for name, operands, asked in (
        ("ulysses_project", (rows, *weights), (4,)),
        ("ulysses_output", (blocks, last), ()),
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


def _dynamic_projections(at: Rank) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_attended, fullgraph=True, backend=counter, dynamic=True)
    for rows, batch in ((6, 2), (8, 2), (10, 3)):
        same(*(trained(one, projections(at, rows, batch)) for one in (compiled, _attended)))
    assert counter.frame_count == 1


def test_dynamic_positions_compile_once() -> None:
    run(2, _dynamic_projections)


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
    texts = []
    for given in ((q[0], k, v), (q, k, v[:, :1])):
        torch._dynamo.reset()
        compiled = torch.compile(ficco.all_gather_attention, fullgraph=True, backend="eager")
        texts.append(caught(lambda one=given, function=compiled: function(*one)).text)
    torch._dynamo.reset()
    packed = torch.compile(ficco.all_gather_attention, fullgraph=True, backend="eager")
    bounds = torch.tensor([0, 12])
    texts.append(caught(lambda: packed(q, k, v, cu_seqlens=bounds)).text)
    return texts


def test_what_does_not_fit_is_refused_by_name() -> None:
    for dims, alike, bounds in run(2, _refused):
        assert "cu_seqlens: required a list in a compiled function, got a tensor" in bounds
        assert "q: required a dense [batch, heads, S/W, size]" in dims
        assert "v_shard: required [batch, kv_heads, S/W, size]" in alike
