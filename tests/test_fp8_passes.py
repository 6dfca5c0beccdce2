"""Float8 under torch.compile: calls that are traced, and the pass on products with scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, caught, run
from test_fp8 import ScaledCase, made
from test_passes import (
    A2AM,
    AGM,
    MA2A,
    MAR,
    MRS,
    WORLD,
    collectives,
    exchange,
    gather,
    groups,
    reduce,
    scatter,
    trace,
)
from test_passes import operators as called
from torch._subclasses.fake_tensor import FakeTensorMode

import ficco
from ficco import passes
from ficco.ops.library import OPS

__all__ = ["groups"]  # a fixture

E4M3 = torch.float8_e4m3fn
SCALED = [name for name, ops in OPS.items() if ops.scaled is not None]


# Calls that are traced.


def _case(operator: str, recipe: str, world: int) -> ScaledCase:
    if ficco.problems.products.OPERATORS[operator].blocks:
        return ScaledCase(operator, ((8,) * world,) * world, 32, 128, recipe)
    return ScaledCase(operator, (8,) * world, 32, 128, recipe)


def _given(at: Rank, operator: str, recipe: str) -> tuple[Any, tuple[Any, ...], torch.Tensor]:
    given, want = made(_case(operator, recipe, at.world), at, 3)
    return getattr(ficco, operator), (given.a, given.b, given.scales), want


def _traced(at: Rank, operator: str, recipe: str, inner: str) -> None:
    torch._dynamo.reset()
    call, (a, b, scales), want = _given(at, operator, recipe)
    compiled = torch.compile(lambda a, b, s: call(a, b, **s) + 1, backend=inner, fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(a, b, scales), want + 1), (operator, recipe)
    if operator in (AGM, A2AM):
        kept = torch.compile(
            lambda a, b, s: ficco.all_gather_matmul(a, b, **s, return_gathered=True),
            backend=inner,
            fullgraph=True,
        )
        if operator == AGM:
            out, gathered = kept(a, b, scales)
            assert torch.equal(out, want) and gathered.dtype == a.dtype
            assert gathered.shape == (a.shape[0] * at.world, a.shape[1])
    # Fake results lie as real ones do.
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = [mode.from_tensor(one) for one in (a, b)]
        fake_scales = {
            name: mode.from_tensor(one) if isinstance(one, torch.Tensor) else one
            for name, one in scales.items()
        }
        result = call(*fake, **fake_scales)
    assert (result.shape, result.stride(), result.dtype) == (want.shape, want.stride(), want.dtype)


def _all_traced(at: Rank, inner: str) -> None:
    for operator in SCALED:
        for recipe in ("tensor", "row", "block"):
            _traced(at, operator, recipe, inner)


def test_calls_are_traced() -> None:
    run(2, _all_traced, "aot_eager")


@pytest.mark.slow
def test_calls_are_compiled_by_the_default_backend() -> None:
    run(2, _traced, AGM, "row", "inductor", timeout=150)


def _checked(at: Rank) -> None:
    group = dist.group.WORLD.group_name
    for operator in SCALED:
        _, (a, b, scales), _ = _given(at, operator, "row")
        rest = scales["scale_a"], scales["scale_b"], None, torch.bfloat16, False, group
        ops = OPS[operator]
        for op in filter(None, (ops.scaled, ops.scaled_gathered)):
            torch.library.opcheck(op, (a, b, *rest), test_utils="test_faketensor")


def test_opcheck_of_scaled_operators() -> None:
    run(2, _checked)


def _dynamic(at: Rank) -> int:
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def layer(a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor) -> Any:
        return ficco.all_gather_matmul(a, b, scale_a=of_a, scale_b=of_b)

    compiled = torch.compile(layer, backend=count, fullgraph=True, dynamic=True)
    for rows in (8, 12, 20):
        given, want = made(ScaledCase(AGM, (rows,) * at.world, 32, 48, "row"), at, rows)
        of = given.scales["scale_a"], given.scales["scale_b"]
        assert torch.equal(compiled(given.a, given.b, *of), want)
    return len(graphs)


def test_rows_may_change_without_compiling_again() -> None:
    assert run(2, _dynamic) == [1, 1]


def _refused(at: Rank) -> list[str]:
    """What is said of fake operands, before any call."""
    _, (a, b, scales), _ = _given(at, AGM, "row")
    texts = []
    for wrong in ({"scale_a": scales["scale_a"][:3]}, {"out_dtype": torch.float64}):
        with FakeTensorMode() as mode:
            given = {
                name: mode.from_tensor(one) if isinstance(one, torch.Tensor) else one
                for name, one in {**scales, **wrong}.items()
            }
            fake = mode.from_tensor(a), mode.from_tensor(b)
            texts.append(str(caught(lambda f=fake, g=given: ficco.all_gather_matmul(*f, **g)).text))
    return texts


def test_wrong_scales_are_refused_while_tracing() -> None:
    for shapes, dtype in run(2, _refused):
        assert "scale_a, scale_b: required" in shapes and "[3, 1]" in shapes
        assert "out_dtype: required one of bfloat16" in dtype


# The pass.


@dataclass(frozen=True)
class ScaledProgram:
    """A function of x [m/W or m, k], w [n, k], their scales, a bias and a group."""

    name: str
    run: Callable[..., Any]
    expected: tuple[str, ...]
    recipe: str = "row"
    left: int = 0  #: collectives that stay
    says: str = ""

    def __str__(self) -> str:
        return self.name


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
    """With the scale of w padded as the library reads it."""
    padded = torch.nn.functional.pad(t.t(), (0, -t.shape[0] % 4)).t()
    how = [s.t().contiguous().t()], [4], [0], [padded], [5], [0]
    return torch.ops.aten._scaled_mm_v2(a, w.t(), *how, None, torch.bfloat16)


def scaled(x: torch.Tensor, w: torch.Tensor, s: Any, t: Any, g: Any, *bias: Any) -> torch.Tensor:
    """The product of gathered rows with gathered scales."""
    return times(gather(x, 0, g), w, gather(s, 0, g), t, *bias)


def _scales_first(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    of = gather(s, 0, g)
    return times(gather(x, 0, g), w, of, t)


def _two(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a, of = gather(x, 0, g), gather(s, 0, g)
    return times(a, w, of, t), times(a, w[:16], of, t[:, :16])


def _rows_apart(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    """Scales of all rows, however they came about, stay as they are."""
    return times(gather(x, 0, g), w, gather(s.flip(0), 0, g).view(WORLD, -1).flip(1).view(-1, 1), t)


P = ScaledProgram
PROGRAMS = [
    P("rows", lambda x, w, s, t, b, g: scaled(x, w, s, t, g), (AGM,)),
    P("scales first", _scales_first, (AGM,)),
    P("bias", lambda x, w, s, t, b, g: scaled(x, w, s, t, g, b), (AGM,)),
    P(
        "bytes",
        lambda x, w, s, t, b, g: times(as_bytes(x, g), w, gather(s, 0, g), t),
        (AGM,),
    ),
    P(
        "functional",
        lambda x, w, s, t, b, g: functional(gather(x, 0, g), w, gather(s, 0, g), t),
        (AGM,),
    ),
    P("batches", _batches, (AGM,), says="put in order by a copy"),
    P("two products", _two, (AGM,), left=1, says="kept for _scaled_mm_1"),
    P("scales of all", _rows_apart, (AGM,), left=1, says="is no product"),
    P("one for all", lambda x, w, s, t, b, g: times(gather(x, 0, g), w, s, t), (AGM,), "tensor"),
    P(
        "exchanged",
        lambda x, w, s, t, b, g: times(exchange(x, g), w, exchange(s, g), t),
        (A2AM,),
    ),
    P("scattered", lambda x, w, s, t, b, g: scatter(times(x, w, s, t), 0, g), (MRS,)),
    P(
        "scattered batches",
        lambda x, w, s, t, b, g: scatter(times(x, w, s, t).view(2, -1, 32), 1, g),
        (MRS,),
    ),
    P("reduced", lambda x, w, s, t, b, g: reduce(times(x, w, s, t), g), (MAR,), "tensor"),
    P("sent", lambda x, w, s, t, b, g: exchange(times(x, w, s, t), g), (MA2A,)),
    P(
        "blocks",
        lambda x, w, s, t, b, g: _blocks(gather(x, 0, g), w, gather(s, 0, g), t),
        (AGM,),
        "block",
    ),
]


def operands(program: ScaledProgram, rank: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    m, n, k = 16, 128 if program.recipe == "block" else 32, 256
    shapes = {"tensor": ((), ()), "row": ((m, 1), (1, n)), "block": ((m, 2), (2, 1))}
    x = torch.randint(-2, 3, (m, k), generator=draw).to(E4M3)
    of_x, of_w = shapes[program.recipe]
    # One scale for all ranks where there is one for all rows.
    one = torch.Generator().manual_seed(9 if program.recipe == "tensor" else rank)
    s = 2.0 ** torch.randint(0, 2, of_x, generator=one).float()
    same = torch.Generator().manual_seed(7)
    w = torch.zeros(n, k).scatter_(1, torch.randint(0, k, (n, 12), generator=same), 1.0).to(E4M3)
    t = 2.0 ** torch.randint(0, 2, of_w, generator=same).float()
    return [x, w, s, t, torch.arange(n).bfloat16()]


def _wide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.dim() == 2 and scale.shape[1] == 2:
        scale = scale.repeat_interleave(128, 1)
    elif scale.dim() == 2 and scale.shape[0] == 1 and x.shape[0] != 1:
        scale = scale.t()
    return x.float() * scale


def wanted(program: ScaledProgram, rank: int, world: int) -> list[torch.Tensor]:
    """What the program gives on a rank, from the operands of all."""
    every = [operands(program, one) for one in range(world)]
    xs = [_wide(one[0], one[2]) for one in every]
    w, t, bias = every[0][1], every[0][3], every[0][4]
    of_w = t.repeat_interleave(128, 0).t() if program.recipe == "block" else t
    right = (w.float() * (of_w if program.recipe != "row" else of_w.t())).t()
    rows = len(xs[0]) // world
    mine = slice(rank * rows, (rank + 1) * rows)
    (operator,) = program.expected
    if program.name == "batches":
        xs = [torch.stack([x.view(2, -1, x.shape[1]) for x in xs], 1).flatten(0, 2)]
    if operator == A2AM:
        xs = [x[mine] for x in xs]
    if operator in (AGM, A2AM):
        out = torch.cat(xs) @ right + (bias.float() if program.name == "bias" else 0)
        results = [out, out[:, :16]] if program.name == "two products" else [out]
    elif operator == MA2A:
        results = [torch.cat([(x @ right)[mine] for x in xs])]
    else:
        total = torch.stack([(x @ right).bfloat16() for x in xs]).float().sum(0)
        if program.name == "scattered batches":
            half = slice(rank * len(total) // 2 // world, (rank + 1) * len(total) // 2 // world)
            results = [total.view(2, -1, 32)[:, half]]
        else:
            results = [total if operator == MAR else total[mine]]
    return [result.bfloat16() for result in results]


def _replaced(at: Rank, name: str) -> list[str]:
    program = next(one for one in PROGRAMS if one.name == name)
    given = operands(program, at.rank)
    graph = trace(program.run, given, dist.group.WORLD)
    before = graph.graph.find_nodes(op="output", target="output")[0].meta.get("val")
    report = passes.replace(graph)
    assert called(graph) == [f"{one}_scaled" for one in program.expected], f"{report}\n{graph.code}"
    assert collectives(graph) == 2 * program.left, graph.code  # and its wait
    found = graph(*[one.clone() for one in given])
    founds: Sequence[torch.Tensor] = found if isinstance(found, tuple) else [found]
    for one, other in zip(founds, wanted(program, at.rank, at.world), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other), f"{report}\n{graph.code}"
        assert one.is_contiguous() or before is None
    assert any(program.says in entry.reason for entry in report), str(report)
    assert len(report.left) == program.left
    travels = [entry for entry in report if "scales travel with the rows" in entry.reason]
    assert all(entry.replaced and entry.operator == program.expected[0] for entry in travels)
    return [str(entry) for entry in report]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_scaled_programs_give_the_same_integers(program: ScaledProgram) -> None:
    told = run(WORLD, _replaced, program.name)
    assert told[0] == told[1]


def _other_order(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    return times(gather(x, 0, g), w, gather(s.view(2, -1, 1), 1, g).reshape(-1, 1), t)


def _scale_of_result(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    how: Any = {"scale_result": t.sum(), "out_dtype": torch.bfloat16}
    return torch._scaled_mm(gather(x, 0, g), w.t(), gather(s, 0, g), t, **how)


def _narrow(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    return times(gather(x, 0, g), w, t.sum(), t.sum(), out=E4M3)


def _sum(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    return scatter(times(x, w, s, t) + times(x, w, s, t * 2), 0, g)


def _scale_from_rows(x: Any, w: Any, s: Any, t: Any, b: Any, g: Any) -> torch.Tensor:
    a = gather(x, 0, g)
    return times(a, w, a.float().amax(1, True), t)


LEFT: list[tuple[str, Callable[..., Any], str]] = [
    ("scales in another order", _other_order, "lie in another order"),
    (
        "own scales",
        lambda x, w, s, t, b, g: times(exchange(x, g), w, s, t),
        "do not travel with them",
    ),
    ("scale of the result", _scale_of_result, "scale_result"),
    ("narrow", _narrow, "product of float8 operands in torch.float8_e4m3fn"),
    ("sum", _sum, "scales of their own"),
    (
        "summed bias",
        lambda x, w, s, t, b, g: scatter(times(x, w, s, t, b), 0, g),
        "bias is added on every rank",
    ),
    ("scale from the rows", _scale_from_rows, "computed from what was gathered"),
]


@pytest.mark.parametrize(("name", "program", "says"), LEFT, ids=[one[0] for one in LEFT])
def test_what_stays_of_scaled_products_has_a_reason(
    name: str, program: Callable[..., Any], says: str, groups: dict[int, Any]
) -> None:
    graph = trace(program, operands(PROGRAMS[0], 0), groups[2])
    before = graph.code
    report = passes.replace(graph)
    assert not report and graph.code == before
    assert any(says in entry.reason for entry in report), str(report)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"recipe_a": [5], "recipe_b": [5]}, "scales by the recipes 5 and 5"),
        ({"recipe_a": [2, 0], "recipe_b": [2, 0]}, "scales of two levels"),
        ({"swizzle_a": [1]}, "swizzled scales"),
        ({"contraction_dim": [1, 0]}, "another dimension than k"),
    ],
)
def test_recipes_that_no_operator_has(
    changes: dict[str, Any], says: str, groups: dict[int, Any]
) -> None:
    """As graphs of other devices have them; fake kernels here refuse some."""
    program = next(one for one in PROGRAMS if one.name == "functional")
    graph = trace(program.run, operands(program, 0), groups[2])
    (node,) = (n for n in graph.graph.nodes if "scaled_mm" in str(n.target))
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | changes
    node.args, node.kwargs = (), given
    report = passes.replace(graph)
    assert not report and any(says in entry.reason for entry in report), str(report)


def _compiled(at: Rank) -> str:
    torch._dynamo.reset()
    program = PROGRAMS[0]
    backend = passes.backend("aot_eager")
    layer = torch.compile(
        lambda *given: program.run(*given, dist.group.WORLD), backend=backend, fullgraph=True
    )
    found = layer(*operands(program, at.rank))
    assert torch.equal(found, wanted(program, at.rank, at.world)[0])
    return str(backend.report)


def test_a_compiled_model_multiplies_what_it_gathers_in_float8() -> None:
    assert all("2 replaced, 0 left" in text for text in run(WORLD, _compiled))
