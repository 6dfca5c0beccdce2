"""Float8 under torch.compile: calls that the contract does not trace, and scaled products that the
pass replaces."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import Rank, on_ranks, run
from test_fp8 import OPERATORS, ScaledCase, sample
from test_library import compiled
from test_nn import refuses
from test_passes import WORLD, collectives, exchange, gather, groups, reduce, scatter, trace
from test_passes import operators as called
from torch._subclasses.fake_tensor import FakeTensorMode

import ficco
from ficco import passes

__all__ = ["groups"]  # a fixture

E4M3 = torch.float8_e4m3fn
AGM, A2AM, MRS, MAR, MA2A = OPERATORS
#: A rank for tests that only trace.
RANK = Rank(0, WORLD, torch.device("cpu"))


def _gathered_too(at: Rank) -> None:
    own, want = sample(ScaledCase(AGM, (8,) * at.world, 32, 128, "row"), at, 3)
    call = compiled(partial(ficco.all_gather_matmul, return_gathered=True))
    out, gathered = call(own.a, own.b, **own.scales)
    assert torch.equal(out, want) and gathered.dtype == own.a.dtype
    assert gathered.shape == (own.a.shape[0] * at.world, own.a.shape[1])


def _refused(at: Rank) -> None:
    """Errors for fake operands, before any call."""
    own, _ = sample(ScaledCase(AGM, (8,) * at.world, 32, 128, "row"), at, 3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        call = partial(ficco.all_gather_matmul, *map(mode.from_tensor, (own.a, own.b)))
        wrong = partial(call, **own.scales | {"scale_a": own.scales["scale_a"][:3]})
        other = partial(call, **own.scales, out_dtype=torch.float64)
        refuses(("[3, 1]", wrong), ("out_dtype: required one of bfloat16", other))


@dataclass(frozen=True)
class ScaledProgram:
    """A function of x [m/W or m, k], w [n, k], their scales, a bias and a group."""

    name: str
    run: Callable[..., Any]
    expected: tuple[str, ...]
    recipe: str = "row"
    left: int = 0  #: collectives that stay
    says: str = ""


def times(
    a: torch.Tensor, w: torch.Tensor, s: Any, t: Any, bias: Any = None, out: Any = torch.bfloat16
) -> torch.Tensor:
    return torch._scaled_mm(a, w.t(), s, t, bias=bias, out_dtype=out)


def as_bytes(x: torch.Tensor, g: Any) -> torch.Tensor:
    """As DTensor and async tensor parallelism gather float8."""
    return gather(x.view(torch.uint8), 0, g).view(x.dtype)


def functional(a: torch.Tensor, w: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    kind = torch.nn.functional.ScalingType.RowWise
    return torch.nn.functional.scaled_mm(a, w.t(), s, kind, t, kind, output_dtype=torch.bfloat16)


def _batches(x: torch.Tensor, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    """Gathered along the second dimension of a batch of two."""
    a = gather(x.view(torch.uint8).view(2, -1, x.shape[1]), 1, g).reshape(-1, x.shape[1])
    return times(a.view(x.dtype), w, gather(s.view(2, -1, 1), 1, g).reshape(-1, 1), t)


def _blocks(a: torch.Tensor, w: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """A product with blocks of scales; the scale of w is padded as the library requires."""
    padded = torch.nn.functional.pad(t.t(), (0, -t.shape[0] % 4)).t()
    scales = [s.t().contiguous().t()], [4], [0], [padded], [5], [0]
    return torch.ops.aten._scaled_mm_v2(a, w.t(), *scales, None, torch.bfloat16)


def scaled(x: Any, w: Any, s: Any, t: Any, g: Any, *bias: Any, mul: Any = times) -> torch.Tensor:
    product: torch.Tensor = mul(gather(x, 0, g), w, gather(s, 0, g), t, *bias)
    return product


def _scales_first(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    scales = gather(s, 0, g)
    return times(gather(x, 0, g), w, scales, t)


def _two(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a, scales = gather(x, 0, g), gather(s, 0, g)
    return times(a, w, scales, t), times(a, w[:16], scales, t[:, :16])


def _rows_apart(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    """Scales computed from gathered scales are passed as they are, and their gather stays."""
    return times(gather(x, 0, g), w, gather(s.flip(0), 0, g).view(WORLD, -1).flip(1).view(-1, 1), t)


P = ScaledProgram
PROGRAMS = [
    P("rows", lambda x, w, s, t, b, g: scaled(x, w, s, t, g), (AGM,)),
    P("scales first", _scales_first, (AGM,)),
    P("bias", lambda x, w, s, t, b, g: scaled(x, w, s, t, g, b), (AGM,)),
    P("bytes", lambda x, w, s, t, b, g: times(as_bytes(x, g), w, gather(s, 0, g), t), (AGM,)),
    P("functional", lambda x, w, s, t, b, g: scaled(x, w, s, t, g, mul=functional), (AGM,)),
    P("batches", _batches, (AGM,), says="put in order by a copy"),
    P("two products", _two, (AGM,), left=1, says="kept for _scaled_mm_1"),
    P("scales of all", _rows_apart, (AGM,), left=1, says="is no product"),
    P("one for all", lambda x, w, s, t, b, g: times(gather(x, 0, g), w, s, t), (AGM,), "tensor"),
    P("exchanged", lambda x, w, s, t, b, g: times(exchange(x, g), w, exchange(s, g), t), (A2AM,)),
    P("scattered", lambda x, w, s, t, b, g: scatter(times(x, w, s, t), 0, g), (MRS,)),
    P("reduced", lambda x, w, s, t, b, g: reduce(times(x, w, s, t), g), (MAR,), "tensor"),
    P("sent", lambda x, w, s, t, b, g: exchange(times(x, w, s, t), g), (MA2A,)),
    P("blocks", lambda x, w, s, t, b, g: scaled(x, w, s, t, g, mul=_blocks), (AGM,), "block"),
]


def operands_of(program: ScaledProgram, at: Rank) -> tuple[list[torch.Tensor], torch.Tensor]:
    (operator,), world = program.expected, at.world
    blocks, n = operator in (A2AM, MA2A), 128 if program.recipe == "block" else 32
    rows: Any = (16 if operator == AGM else 8,) * world
    rows, bias = (rows,) * world if blocks else rows, program.name == "bias"
    case = ScaledCase(operator, rows, 256, n, program.recipe, bias=bias)
    for iteration in itertools.count():
        ranks = [sample(case, Rank(rank, world, at.device), iteration)[0] for rank in range(world)]
        scales = [peer.scales["scale_a"] for peer in ranks]
        # With a scale for the tensor, all ranks need the same scale.
        if program.recipe != "tensor" or all(torch.equal(scale, scales[0]) for scale in scales):
            break
    own, want = sample(case, at, iteration)
    plain = own.a, own.b.t(), scales[at.rank].contiguous(), own.scales["scale_b"]
    return [*plain, own.scales.get("bias", torch.zeros(n).bfloat16())], want


@pytest.mark.parametrize("name", [program.name for program in PROGRAMS])
@on_ranks(WORLD)
def test_scaled_programs_give_the_same_integers(at: Rank, name: str) -> None:
    program = next(program for program in PROGRAMS if program.name == name)
    operands, want = operands_of(program, at)
    graph = trace(program.run, operands, dist.group.WORLD)
    before = graph.graph.find_nodes(op="output", target="output")[0].meta.get("val")
    report = passes.replace(graph)
    assert called(graph) == [f"{op}_scaled" for op in program.expected], f"{report}\n{graph.code}"
    assert collectives(graph) == 2 * program.left, graph.code  # and its wait
    result = graph(*[operand.clone() for operand in operands])
    results, wants = [*result] if isinstance(result, tuple) else [result], [want, want[:, :16]]
    if program.name == "batches":
        wants = [want.view(at.world, 2, -1, want.shape[1]).transpose(0, 1).reshape(want.shape)]
    assert len(results) == 1 + (program.name == "two products")
    for y, want in zip(results, wants, strict=False):
        assert y.dtype == want.dtype and torch.equal(y, want), f"{report}\n{graph.code}"
        assert y.is_contiguous() or before is None
    assert any(program.says in entry.reason for entry in report), str(report)
    assert len(report.left) == program.left
    travels = [entry for entry in report if "scales travel with the rows" in entry.reason]
    assert all(entry.replaced and entry.operator == program.expected[0] for entry in travels)


def _other_order(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    return times(gather(x, 0, g), w, gather(s.view(2, -1, 1), 1, g).reshape(-1, 1), t)


def _scale_of_result(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    options: Any = {"scale_result": t.sum(), "out_dtype": torch.bfloat16}
    return torch._scaled_mm(gather(x, 0, g), w.t(), gather(s, 0, g), t, **options)


def _narrow(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    return times(gather(x, 0, g), w, t.sum(), t.sum(), out=E4M3)


def _sum(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    return scatter(times(x, w, s, t) + times(x, w, s, t * 2), 0, g)


def _scale_from_rows(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    a = gather(x, 0, g)
    return times(a, w, a.float().amax(1, True), t)


def _written_scales(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    of = funcol.wait_tensor(gather(s, 0, g))
    of.view(-1).mul_(2)
    return times(gather(x, 0, g), w, of, t)


LEFT: dict[str, Callable[..., Any]] = {
    "mul_ may write to the scales of the rows": _written_scales,
    "lie in another order": _other_order,
    "do not travel with them": lambda x, w, s, t, b, g: times(exchange(x, g), w, s, t),
    "scale_result": _scale_of_result,
    "product of float8 operands in torch.float8_e4m3fn": _narrow,
    "scales of their own": _sum,
    "bias is added on every rank": lambda x, w, s, t, b, g: scatter(times(x, w, s, t, b), 0, g),
    "computed from the gathered tensor": _scale_from_rows,
}


@pytest.mark.parametrize("says", LEFT)
def test_unreplaced_scaled_products_have_a_reason(says: str, groups: dict[int, Any]) -> None:
    graph = trace(LEFT[says], operands_of(PROGRAMS[0], RANK)[0], groups[2])
    before = graph.code
    report = passes.replace(graph)
    assert not report and graph.code == before
    assert any(says in entry.reason for entry in report), str(report)


RECIPES: dict[str, dict[str, Any]] = {
    "scales by the recipes 5 and 5": {"recipe_a": [5], "recipe_b": [5]},
    "scales of two levels": {"recipe_a": [2, 0], "recipe_b": [2, 0]},
    "swizzled scales": {"swizzle_a": [1]},
    "another dimension than k": {"contraction_dim": [1, 0]},
}


@pytest.mark.parametrize("says", RECIPES)
def test_recipes_that_no_operator_has(says: str, groups: dict[int, Any]) -> None:
    """Recipes that graphs of other devices may have. Fake kernels on CPUs refuse some of them."""
    program = next(program for program in PROGRAMS if program.name == "functional")
    graph = trace(program.run, operands_of(program, RANK)[0], groups[2])
    (node,) = (n for n in graph.graph.nodes if "scaled_mm" in str(n.target))
    names = [argument.name for argument in node.target._schema.arguments]
    node.args, node.kwargs = (), dict(zip(names, node.args, strict=False)) | RECIPES[says]
    report = passes.replace(graph)
    assert not report and any(says in entry.reason for entry in report), str(report)


def _compiled(at: Rank) -> None:
    program, backend = PROGRAMS[0], passes.backend("aot_eager")
    layer = compiled(lambda *inputs: program.run(*inputs, dist.group.WORLD), backend)
    operands, want = operands_of(program, at)
    assert torch.equal(layer(*operands), want)
    assert "2 replaced, 0 left" in str(backend.report)


@pytest.mark.parametrize("check", [_gathered_too, _refused, _compiled])
def test_float8(check: Callable[[Rank], None]) -> None:
    run(WORLD, check)
