"""Float8 operands with scales: exact results for every schedule, and errors.

Operands are small integers that depend on the iteration, the rank, the row and the column, and
scales are powers of two, so that every product has one right answer before it is rounded.
``test_fp8_gpu.py`` runs some of these tests on GPUs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import hip_ranks
import pytest
import subjects
import torch
from cases import compare
from hypothesis import given
from hypothesis import strategies as st
from ranks import Rank, caught, on_ranks, ranks, run
from subjects import SUBJECTS, integers, spread
from test_operators import BLOCKS, SUMS, rows_for

import ficco
from ficco.compute.scaled import _padded, lacking_on_cuda, lacking_on_hip
from ficco.heuristics import decide, problem_of_sizes
from ficco.machine import find
from ficco.ops.operands import Scales, plain_scales
from ficco.plan import Transfer
from ficco.problems.products import Problem
from ficco.problems.scaling import CASTS, RECIPES, Scaling
from ficco.proof import check
from ficco.schedules import Schedule, StagingTooSmall, plans
from ficco.schedules.build import TILED_RECIPES

OPERATORS = ("all_gather_matmul", "all_to_all_matmul", *SUMS, "matmul_all_to_all")
SERVED = tuple(name for name, recipe in RECIPES.items() if not recipe.needs)
E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
#: Dtypes of A and B.
DTYPES = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2), (FNUZ, FNUZ))
VALUE, INVALID, MISSING = "ValueError", "InvalidArgument", "NotImplementedError"


@dataclass(frozen=True)
class ScaledCase:
    """One call, the same on every rank; ``rows`` as the operator takes them."""

    operator: str
    rows: tuple[Any, ...]
    k: int
    n: int
    recipe: str
    schedule: str = "auto"
    out: torch.dtype | None = None
    bias: bool = False
    replicated: bool = False
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)
    fast: bool = False

    def on(self, **changes: Any) -> ScaledCase:
        return replace(self, **changes)


@dataclass
class Operands:
    """The arguments of a rank, and the scaled operands in float64."""

    a: torch.Tensor
    b: torch.Tensor
    scales: dict[str, Any]
    wide_a: torch.Tensor
    wide_b: torch.Tensor


def operands(case: ScaledCase, rank: int, iteration: int, device: torch.device) -> Operands:
    subject = SUBJECTS[f"{case.operator}, float8"]
    sizes = subjects.Case(case.rows, (case.k, case.n), recipe=case.recipe)
    unscaled = subject.make(sizes, rank, iteration), subject.constants(sizes, rank, iteration)
    pairs = zip(*unscaled, strict=True)
    wide = [(matrix * spread(factors, matrix.shape)).to(device) for matrix, factors in pairs]
    (a, b), (scale_a, scale_b) = ([tensor.to(device) for tensor in pair] for pair in unscaled)
    scales: dict[str, Any] = {"scale_a": scale_a, "scale_b": scale_b}
    if case.bias:
        bias = integers(4, rank, iteration, 9, shape=(case.n,))
        scales["bias"] = bias.to(device, case.out or torch.bfloat16)
    options = {"out_dtype": case.out, "use_fast_accum": case.fast}
    scales |= {name: value for name, value in options.items() if value}
    a, b = a.to(case.dtypes[0]), b.to(case.dtypes[1]).t().contiguous().t()
    return Operands(a, b, scales, *wide)


def call(case: ScaledCase, operands: Operands, group: Any = None, **changes: Any) -> Any:
    rows = {} if case.operator == "matmul_all_reduce" else {"rows": case.rows}
    arguments = {"schedule": case.schedule, "group": group, **rows, **operands.scales, **changes}
    return getattr(ficco, case.operator)(operands.a, operands.b, **arguments)


def sample(case: ScaledCase, at: Rank, iteration: int) -> tuple[Operands, torch.Tensor]:
    """Return the operands of a rank and its expected result."""
    ranks = [operands(case, rank, iteration, at.device) for rank in range(len(case.rows))]
    own, out = ranks[at.rank], case.out or torch.bfloat16
    if case.replicated:
        own.scales["scale_a"] = torch.cat([peer.scales["scale_a"] for peer in ranks])
    wide = []
    for peer in ranks:
        a, b = peer.wide_a, peer.wide_b
        if case.bias:  # one more column of A and row of B
            a = torch.cat([a, a.new_ones(len(a), 1)], 1)
            b = torch.cat([b, peer.scales["bias"][None]])
        if case.operator in SUMS:  # the sum of rounded products
            a, b = (a @ b).to(out).double(), torch.eye(case.n, dtype=b.dtype, device=b.device)
        wide.append([a, b])
    sizes = subjects.Case(case.rows, (case.k, case.n))
    (result,) = SUBJECTS[case.operator].together(sizes, wide, iteration)[at.rank]
    return own, result.to(out)


def exact(at: Rank, case: ScaledCase, iteration: int, **kwargs: Any) -> None:
    own, wanted = sample(case, at, iteration)
    compare("the result", call(case, own, **kwargs), wanted, f"rank {at.rank}, {iteration}: {case}")


def all_exact(at: Rank, cases: Sequence[ScaledCase]) -> int:
    for iteration, case in enumerate(cases):
        exact(at, case, iteration)
    return len(cases)


def schedules(operator: str) -> list[str]:
    """Return the schedules that serve float8. None of them adds a product to a sum."""
    return SUBJECTS[f"{operator}, float8"].schedules(2)


def every_schedule(operator: str, world: int, device: str, stride: int) -> list[ScaledCase]:
    """Return a case of every ``stride``-th schedule. All other fields are random."""
    chance = random.Random(f"{operator} {world}")
    names = schedules(operator)[chance.randrange(stride) :: stride]
    return [drawn(chance, operator, world, device, name) for name in names]


def drawn(
    chance: random.Random, operator: str, world: int, device: str, schedule: str
) -> ScaledCase:
    recipe = chance.choice(SERVED)
    kind = chance.choice(("equal", "ragged", "few", "sparse"))
    if recipe == "block" and device != "cpu":  # multiples of four rows
        kind = "equal"
    dtypes = chance.choice(DTYPES if device == "cpu" else DTYPES[:3])
    if recipe == "block":
        dtypes = DTYPES[0]
    out, bias = chance.choice((None, torch.bfloat16, torch.float16)), chance.random() < 0.3
    rounds = operator in SUMS and ("collective" in schedule or schedule == "auto")
    if rounds or chance.random() < 0.2:
        out, bias = torch.float32, False  # collectives, which auto may choose, round every sum
    replicated = operator == "all_gather_matmul" and recipe != "tensor" and chance.random() < 0.3
    sizes = (256, 400)[: 2 if device == "cpu" else 1] if recipe == "block" else (16, 48, 144)
    k, n = chance.choice(sizes), chance.choice((16, 48, 272))
    rows = rows_for(operator, world, kind)
    return ScaledCase(operator, rows, k, n, recipe, schedule, out, bias, replicated, dtypes)


@ranks(2)
@pytest.mark.parametrize("operator", OPERATORS)
@on_ranks()
def test_every_schedule_is_exact(at: Rank, operator: str) -> None:
    """Test dtypes that the contract leaves out, biases, and the factors of all rows."""
    all_exact(at, every_schedule(operator, at.world, at.device.type, stride=3))


@ranks(2)
@on_ranks()
def test_tiled_products_have_their_factors(at: Rank) -> None:
    """Tiled products of each recipe, cut into two pieces."""
    for iteration, (operator, recipe) in enumerate(product(OPERATORS, TILED_RECIPES)):
        rows = rows_for(operator, at.world, "equal")
        exact(at, ScaledCase(operator, rows, 48, 16, recipe, "tiled:pieces=2"), iteration)


@ranks(3)
@on_ranks()
def test_memory_keeps_to_its_cap(at: Rank) -> None:
    """Rings of stages, and calls by columns of b with their columns of the factors and the bias."""
    for iteration, (operator, recipe) in enumerate(product(OPERATORS, SERVED)):
        k, n = (256, 544) if recipe == "block" else (144, 272)
        schedule = "hetero-fused-1d:pieces=4"
        case = ScaledCase(operator, rows_for(operator, at.world, "equal"), k, n, recipe, schedule)
        with ficco.options(workspace_bytes=1 << 15):
            exact(at, case.on(bias=True), iteration)


@on_ranks(2)
def test_pieces_are_equal_to_the_whole_product(at: Rank) -> None:
    """Pieces are bitwise equal to the whole product, also for operands whose products round."""
    torch.manual_seed(0)
    world, m, k, n = at.world, 32 * at.world, 64, 48
    a, b = torch.randn(world, m, k).to(E4M3), torch.randn(n, k).to(E4M3).t()
    rows, bias = slice(at.rank * 32, at.rank * 32 + 32), {"bias": torch.randn(n).bfloat16()}
    for s_a, s_b in ((torch.rand(1, 1), torch.rand(1, 1)), (torch.rand(m, 1), torch.rand(1, n))):
        products = [torch._scaled_mm(x, b, s_a, s_b, out_dtype=torch.bfloat16, **bias) for x in a]
        total = torch.stack(products).sum(0, dtype=torch.float32).bfloat16()
        for name in ("serial", "growing", "hetero-fused-1d:pieces=4,tail=2", "uniform-fused-1d"):
            scales: dict[str, Any] = {"scale_b": s_b, "schedule": name, **bias}
            own = s_a[rows] if len(s_a) > 1 else s_a
            y = ficco.all_gather_matmul(a[0][rows], b, scale_a=own, **scales)
            assert torch.equal(y, products[0])
            scales["scale_a"] = s_a
            assert torch.equal(ficco.matmul_all_reduce(a[at.rank], b, **scales), total)
            assert torch.equal(ficco.matmul_reduce_scatter(a[at.rank], b, **scales), total[rows])


@on_ranks(2)
def test_nan_infinity_and_overflow_are_those_of_pytorch(at: Rank) -> None:
    """NaN and infinity stay in their rows. Results that overflow float16 are infinite."""
    for dtype, value in ((E4M3, float("nan")), (E5M2, float("inf")), (E5M2, float("-inf"))):
        a = torch.ones(8, 16).to(dtype)
        if at.rank == 1:
            a[2, 3] = value
        b = torch.ones(16, 16).to(E4M3).t()
        ones = {"scale_a": torch.ones(8, 1), "scale_b": torch.ones(1, 16)}
        y = ficco.all_gather_matmul(a, b, schedule="hetero-fused-1d:pieces=2", **ones)
        expected = torch.full((16, 16), 16.0)
        expected[10] = value
        torch.testing.assert_close(y.float(), expected, rtol=0, atol=0, equal_nan=True)
        big = {"scale_a": torch.full((), 2.0**13), "scale_b": torch.ones(())}
        y = ficco.all_gather_matmul(a, b, out_dtype=torch.float16, **big)
        assert y[0].isinf().all()


@on_ranks(2)
def test_forms_of_operands(at: Rank) -> None:
    case = ScaledCase("all_gather_matmul", (12,) * at.world, 32, 16, "row", "growing:pull")
    own, wanted = sample(case, at, 1)
    a, scale = own.a, own.scales["scale_a"]
    symmetric = ficco.empty(a.shape, dtype=a.dtype, device=at.device)
    symmetric.copy_(a)
    wide = torch.zeros(12, 64, device=at.device).to(a.dtype)[:, ::2]
    wide.copy_(a)
    for form in (a, symmetric, wide, a.view(3, 4, 32)):
        own.a, own.scales["scale_a"] = form, scale.view(*form.shape[:-1], 1)
        y, gathered = call(case, own, return_gathered=True)
        compare("the result", y, wanted, str(form.shape))
        shards = [operands(case, rank, 1, at.device).a for rank in range(at.world)]
        assert torch.equal(gathered.view(torch.uint8), torch.cat(shards).view(torch.uint8))
    with torch.autocast(at.device.type, dtype=torch.bfloat16):
        compare("under autocast", call(case, own), wanted, "")
    strided = torch.zeros(12, 3, device=at.device)
    strided[:, 1] = scale[:, 0]
    own.a, own.scales["scale_a"] = a, strided[:, 1:2]
    compare("with strided scales", call(case, own), wanted, "")
    own.scales |= {"scale_a": 1.1 * scale, "out_dtype": torch.float32}
    y = call(case, own)
    with torch.autocast(at.device.type, dtype=torch.bfloat16):
        assert torch.equal(call(case, own), y)  # autocast would round these factors
    case = case.on(recipe="tensor", schedule="growing")
    own, wanted = sample(case, at, 1)
    scale = own.scales["scale_a"]
    own.scales["scale_a"] = torch.complex(scale, -scale).conj().imag
    compare("with a scale that has the negative bit", call(case, own), wanted, "")


@dataclass(frozen=True)
class Bad:
    """Changes to a valid call scaled by rows, and the error; the group stays usable."""

    words: tuple[str, ...]
    changes: dict[str, Any]
    kind: str = VALUE
    operator: str = "all_gather_matmul"
    n: int = 16
    k: int = 32
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)
    row_major: bool = False


HALF, TILED, WIDE = torch.bfloat16, {"schedule": "tiled"}, {"out_dtype": torch.float32}
ones, powers = torch.ones, torch.ones(128).to(torch.float8_e8m0fnu)
BLOCK = {"scale_a": ones(8, 2), "scale_b": ones(2, 1)}


def casting(*words: str, a: torch.dtype = HALF, b: torch.dtype = E4M3, **changes: Any) -> Bad:
    """Return a bad call with ``quantize``, which casts A."""
    return Bad(words, {"scale_a": None, "quantize": "row"} | changes, dtypes=(a, b))


BAD = (
    Bad(("scale_a", "scale_b", "float8_e4m3fn", "none"), {"scale_a": None, "scale_b": None}),
    Bad(("scale_b", "NoneType", "both"), {"scale_b": None}),
    Bad(("scale_a", "float", "both"), {"scale_a": 1.0}),
    Bad(("scale_a, scale_b", "float32", "float16", ".float()"), {"scale_a": ones(8, 1).half()}),
    Bad(("[8, 1] and [1, 16]", "[16, 1] and [1, 16]", "got [9, 1]"), {"scale_a": ones(9, 1)}),
    Bad(("got [8] and",), {"scale_a": ones(8)}),
    Bad(("scale_a: sparse", ".to_dense()"), {"scale_a": ones(8, 1).to_sparse()}, MISSING),
    Bad(("got [8, 1] and [1, 1]",), {"scale_b": ones(1, 1)}, k=144),
    Bad(("n: required a multiple of 16", "got 24", "pad"), {}, INVALID, n=24),
    Bad(("k: required a multiple of 16", "got 24", "pad"), {}, INVALID, k=24),
    Bad(("b: required columns", "strides [16, 1]", ".t()"), {}, row_major=True),
    Bad(("operands of float8", "bfloat16", "quantize"), {}, dtypes=(E4M3, HALF)),
    Bad(("operands of float8", "bfloat16", "leave the scales out"), {}, dtypes=(HALF, HALF)),
    Bad(("one family", "float8_e4m3fn", "float8_e4m3fnuz"), {}, dtypes=(E4M3, FNUZ)),
    Bad(("bias", "float32", "bfloat16 or float16"), {"bias": ones(16, dtype=HALF), **WIDE}),
    Bad(("bias", "[16]", "torch.float32"), {"bias": ones(16)}),
    Bad(("bias", "[16]", "[8]"), {"bias": ones(8, dtype=HALF)}),
    Bad(("out_dtype", "bfloat16, float16, float32", "float8"), {"out_dtype": E4M3}),
    Bad(("out_dtype", "'bfloat16'"), {"out_dtype": "bfloat16"}),
    Bad(("use_fast_accum", "True or False"), {"use_fast_accum": 1}),
    Bad(("mxfp8", "sm_100 or gfx950"), {"scale_a": powers, "scale_b": powers}, MISSING),
    Bad(("beta", "float8", "another schedule"), {"schedule": "growing:beta"}, operator=SUMS[0]),
    Bad(("ring", "float8", "another schedule"), {"schedule": "ring"}, operator=SUMS[0]),
    Bad(("tiled", "scaled by block", "another schedule"), TILED | BLOCK, k=256),
    Bad(("tiled", "results of float32", "another schedule"), {**TILED, **WIDE}),
    Bad(("got [16, 1]",), {"scale_a": ones(16, 1)}, operator="all_to_all_matmul"),
    casting("'row', 'block'", "'tensor'", "pass scale_a", quantize="tensor"),
    casting("'row', 'block'", "got 1", quantize=1),
    casting("scale_a: required none", "leave out one", scale_a=ones(8, 1)),
    casting("scale_b", "NoneType", scale_b=None),
    casting("scale_b: required [1, 16]", "got [1, 1]", "scale b alike", scale_b=ones(1, 1)),
    casting("torch.float32", "float16", ".float()", scale_b=ones(1, 16).half()),
    casting("bfloat16", "float8_e4m3fn", a=E4M3),
    casting("bfloat16", "float64", a=torch.float64),
    casting("b of float8", "casts only a_shard", b=HALF),
    replace(casting("k: required a multiple of 16", "got 24"), kind=INVALID, k=24),
    replace(casting("return_gathered", "pass scale_a", return_gathered=True), kind=MISSING),
    casting("tiled", "that the call casts", "another schedule", schedule="tiled"),
)


def _refused(at: Rank) -> list[Any]:
    """Return the errors of all bad calls. Valid calls of the group run between them."""
    good, errors = ScaledCase("matmul_all_reduce", (8, 8), 32, 16, "row"), []
    for bad in BAD:
        a = torch.ones(8, bad.k, device=at.device).to(bad.dtypes[0])
        b = torch.ones(bad.n, bad.k, device=at.device).to(bad.dtypes[1]).t()
        b = b.contiguous() if bad.row_major else b
        scales = {"scale_a": ones(8, 1), "scale_b": ones(1, bad.n)} | bad.changes
        arguments = {
            name: value.to(at.device) if isinstance(value, torch.Tensor) else value
            for name, value in scales.items()
        }
        exact(at, good, len(errors))
        errors.append(caught(lambda: getattr(ficco, bad.operator)(a, b, **arguments)))  # noqa: B023
    exact(at, good, 1)
    # A cached valid call does not admit the same call with a row-major b.
    own, _ = sample(good, at, 1)
    own.b = own.b.contiguous()
    errors.append(caught(lambda: call(good, own)))
    return [(error.type, error.text) for error in errors]


def test_wrong_arguments_are_refused(device: str) -> None:
    first, second = run(2, _refused, device=device)
    assert first == second
    for bad, (kind, text) in zip((*BAD, Bad(("b: required columns",), {})), first, strict=True):
        assert kind == bad.kind and all(word in text for word in bad.words), (bad.words, text)


@on_ranks(2)
def test_ranks_with_different_scalings_raise(at: Rank) -> None:
    recipe = ("row", "tensor")[at.rank]
    own, _ = sample(ScaledCase("all_gather_matmul", (8, 8), 32, 16, recipe), at, 0)
    error = caught(lambda: ficco.all_gather_matmul(own.a, own.b, **own.scales))
    at.barrier()
    ficco.close()
    assert error.type == "RankMismatch" and "by row" in error.text and "by tensor" in error.text


@on_ranks(2)
def test_gradients_are_refused(at: Rank) -> None:
    """Gradients of real and of fake operands are refused. Scales stay required under autocast."""
    own, _ = sample(ScaledCase("all_gather_matmul", (8, 8), 32, 16, "row"), at, 0)
    call = partial(ficco.all_gather_matmul, own.a, own.b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "scale_a, scale_b: required" in caught(call).text
    own.scales["scale_a"].requires_grad_()
    errors = [caught(partial(call, **own.scales))]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        errors.append(caught(partial(call, **own.scales)))
    with torch.no_grad():
        call(**own.scales)
    for error in errors:
        assert error.type == MISSING and "scale_a" in error.text and "no gradient" in error.text


def test_transposed_products_take_no_float8() -> None:
    for name in ("all_gather_transposed_matmul", "all_to_all_transposed_matmul"):
        with pytest.raises(NotImplementedError, match="float8"):
            problem_of_sizes(name, 16, 16, 32, "fp8-row", 2)


def test_scales_of_blocks_are_padded_once() -> None:
    """The call pads the scales. Each product reads them in place, unless it takes a part of k."""
    scaling = Scaling("block", "float8_e4m3fn")
    for k, n in ((640, 272), (640, 16), (512, 272), (128, 272)):
        problem = Problem("all_gather_matmul", (8,), n, k, "float8_e4m3fn", scaling=scaling)
        (plan,) = plans(problem, Schedule.parse("serial"))
        scales = torch.rand(-(-k // 128), -(-n // 128))
        plain = plain_scales(Scales(torch.rand(8, -(-k // 128)), scales), plan)["scale_b"]
        padded = _padded(plain)
        assert torch.equal(plain, scales) and padded.stride() == (1, padded.shape[0])
        assert padded.shape[0] % 4 == 0 and not padded[len(scales) :].any()
        if k > 128:
            assert padded.data_ptr() == plain.data_ptr()
        assert torch.equal(_padded(scales)[: len(scales)], scales)
        part = _padded(plain[1:])  # scales of a later part of k
        assert part.shape[0] % 4 == 0 and torch.equal(part[: len(scales) - 1], scales[1:])


def lacks(
    arch: Any, recipe: str, *, rows: int = 8, out: str = "bfloat16", a: str = "e4m3fn", b: str = ""
) -> str:
    scaling = Scaling(recipe, f"float8_{b or a}", out)
    problem = Problem("all_gather_matmul", (rows,) * 2, 128, 128, f"float8_{a}", scaling=scaling)
    if isinstance(arch, str):
        return lacking_on_hip(problem, arch)
    return lacking_on_cuda(problem, *arch)


HOPPER, ADA = ((9, 0), (13, 0)), ((8, 9), (12, 6))
AMPERE, BLACKWELL = ((8, 6), (13, 0)), ((10, 0), (13, 0))
MI300X, MI350X = "gfx942:sramecc+:xnack-", "gfx950"
GFX942 = {"a": "e4m3fnuz"}
LACKS: list[tuple[Any, dict[str, Any], str]] = [
    (HOPPER, {"recipe": "tensor"}, ""),
    (HOPPER, {"recipe": "row", "out": "float32"}, ""),
    (HOPPER, {"recipe": "block", "out": "float16"}, ""),
    (HOPPER, {"recipe": "row", "a": "e5m2", "b": "e4m3fn"}, ""),
    (HOPPER, {"recipe": "block", "rows": 6}, "4 rows or a multiple.*got 6.*pad"),
    (HOPPER, {"recipe": "tensor", "a": "e5m2"}, "no float8_e5m2 by float8_e5m2.*e4m3fn"),
    (HOPPER, {"recipe": "tensor", **GFX942}, "gfx942.*e4m3fn"),
    (AMPERE, {"recipe": "tensor"}, "8.9 or higher, got 8.6; pass bfloat16"),
    (ADA, {"recipe": "row"}, ""),
    (ADA, {"recipe": "row", "out": "float16"}, "in bfloat16, got out_dtype float16; pass bfloat16"),
    (ADA, {"recipe": "block"}, "9.0, CUDA 12.9 or later.*got 8.9, 12.6.*pass those of rows"),
    (BLACKWELL, {"recipe": "block"}, "got 10.0"),
    (MI300X, {"recipe": "row", **GFX942}, ""),
    (MI300X, {"recipe": "tensor", **GFX942, "out": "float32"}, ""),
    (MI300X, {"recipe": "row"}, "gfx942 multiplies float8_e4m3fnuz, got float8_e4m3fn"),
    (MI300X, {"recipe": "row", **GFX942, "out": "float32"}, "bfloat16, got out_dtype float32"),
    (MI300X, {"recipe": "block", **GFX942}, "no factors of blocks; pass those of rows"),
    (MI350X, {"recipe": "row"}, ""),
    (MI350X, {"recipe": "tensor", **GFX942}, "gfx950 multiplies float8_e4m3fn or float8_e5m2"),
    ("gfx90a", {"recipe": "tensor", **GFX942}, "gfx942 or gfx950, got gfx90a; pass bfloat16"),
]


def test_the_error_says_what_a_library_lacks() -> None:
    for where, fields, words in LACKS:
        text = lacks(where, **fields)
        assert re.search(words, text) if words else not text, (where, fields, text)


def _on_hip(at: Rank, cases: Sequence[ScaledCase]) -> str:
    assert all_exact(at, cases) == len(cases)
    case = cases[0].on(dtypes=(E4M3, E4M3))
    own, _ = sample(case, at, 0)
    return str(caught(lambda: call(case, own)).text)


def test_on_a_double_of_hip() -> None:
    """The engine multiplies, copies and signals gfx942's float8, and refuses other float8."""
    kinds = ("tensor", ""), ("row", ""), ("row", "replicated")
    names = "serial", "growing", "hetero-fused-1d:pieces=3,pull", "uniform-fused-2d:tail=2"
    cases = [
        ScaledCase(operator, rows_for(operator, 4, "ragged"), 48, 48, recipe, name).on(
            dtypes=(FNUZ, FNUZ), bias=recipe == "row", replicated=kind == "replicated"
        )
        for operator, (recipe, kind), name in product(OPERATORS, kinds, names)
        if operator == "all_gather_matmul" or not kind
    ]
    texts = hip_ranks.run(4, _on_hip, cases, timeout=120)
    assert all("gfx942 multiplies float8_e4m3fnuz" in text for text in texts), texts


@pytest.mark.parametrize("source", ["", "bfloat16"], ids=["as they are", "cast"])
@given(data=st.data())
def test_plans_with_factors_are_proven(source: str, data: st.DataObject) -> None:
    """For any recipe, rows and cuts, pieces begin at a block of a factor. If the call casts A, each
    element is cast once."""
    chance = data.draw(st.randoms(use_true_random=False))
    operator, world = chance.choice(OPERATORS), chance.randint(1, 4)
    name = chance.choice([name for name in schedules(operator) if name != "auto"])
    recipe = chance.choice(CASTS if source else SERVED)
    rules, dtype = RECIPES[recipe], "float8_e4m3fn"
    replicated = operator == "all_gather_matmul" and recipe != "tensor" and chance.random() < 0.3
    kwargs = {"bias": chance.random() < 0.5, "replicated": replicated and not source}
    scaling = Scaling(recipe, dtype, source=source, **kwargs)
    n, k = 16 * chance.randint(1, 40), 16 * chance.randint(0 if source else 1, 40)
    sizes = [[chance.randrange(60) for _ in range(world)] for _ in range(world)]
    if operator in BLOCKS:
        problem = Problem.of_blocks(operator, sizes, n, k, dtype, scaling=scaling)
    else:
        problem = Problem(operator, tuple(sizes[0]), n, k, dtype, scaling=scaling)
    schedule, cap = Schedule.parse(name), chance.choice((None, 1 << 12, 1 << 15))
    with suppress(StagingTooSmall):
        check(plans(problem, schedule, cap))  # a ring of stages if the cap requires one
    rank_plans = plans(problem, schedule)
    check(rank_plans)
    for rank, plan in enumerate(rank_plans):
        work = [step.work for step in plan.steps if isinstance(step.work, Transfer)]
        cast = sum(move.dst.elements for move in work if move.factors is not None)
        assert cast == (problem.left_rows(rank) * k if source else 0)
        for step in plan.steps:
            for term in step.products:
                assert term.b.row % rules.cols == 0 and term.b.col % rules.cols == 0
                assert len(term.factors) == 2
            if (move := step.copy) and "scale" in step.label and not scaling.by_rank:
                first = problem.leaves(move.src.rank, move.dst.rank)
                assert (move.src.row - first) % rules.rows == 0


def test_auto_skips_schedules_without_float8() -> None:
    machine = find("h200-4", None)
    for operator in SUMS:
        problem = problem_of_sizes(operator, 4096, 4096, 4096, "fp8-row", 4)
        decision = decide(problem, machine=machine, offers=("dma", "kernel", "tiled"))
        names = [decision.schedule, *decision.others]
        assert decision.source == "model" and len(names) > 3
        assert not any(name.beta or name.grouping == "tiled" for name in names)
