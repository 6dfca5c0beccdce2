"""``quantize=``: A is cast to float8 piece by piece, before its copies.

Operands are those of ``test_fp8.py`` with A before the cast: small integers times powers of two,
one for each row or each 1 x 128, so that the cast is exact and a factor of another row changes the
product.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import hip_ranks
import pytest
import torch
from cases import compare
from ranks import Rank, caught, on_ranks, ranks, run
from test_fp8 import E4M3, FNUZ, OPERATORS, Operands, ScaledCase, call, drawn, sample, schedules
from test_library import compiled
from test_operators import SUMS

import ficco
from ficco.compute.scaled import multiply_scaled, quantized
from ficco.heuristics.families import PRODUCTS
from ficco.machine import find
from ficco.plan import Transfer
from ficco.problems.products import Problem
from ficco.problems.scaling import CASTS, RECIPES, Scaling
from ficco.proof import PlanError, check
from ficco.schedules import Schedule, plans
from ficco.simulate import predict, simulate

GATHERING = ("all_gather_matmul", "all_to_all_matmul")
#: Dtypes of A before the cast.
SOURCES = (torch.bfloat16, torch.float16, torch.float32)


def unscaled(case: ScaledCase, at: Rank, iteration: int) -> tuple[Operands, torch.Tensor]:
    """Return the operands of ``sample`` with A before the cast, and their product."""
    own, wanted = sample(case, at, iteration)
    own.a = own.wide_a.to(SOURCES[iteration % len(SOURCES)])
    own.scales["quantize"] = case.recipe
    del own.scales["scale_a"]
    return own, wanted


def cast_exactly(at: Rank, cases: Sequence[ScaledCase]) -> int:
    for iteration, case in enumerate(cases):
        own, wanted = unscaled(case, at, iteration)
        compare("the result", call(case, own), wanted, f"rank {at.rank}, {iteration}: {case}")
    return len(cases)


def every_schedule(operator: str, world: int, device: str, every: int) -> list[ScaledCase]:
    chance, cases = random.Random(f"{operator} {world} cast"), []
    for name in schedules(operator)[chance.randrange(every) :: every]:
        case = drawn(chance, operator, world, device, name)
        case = case.on(replicated=False, recipe="row" if case.recipe == "tensor" else case.recipe)
        right = E4M3 if case.dtypes[1] == FNUZ else case.dtypes[1]
        cases.append(case.on(dtypes=(E4M3, right)))
    return cases


@pytest.mark.parametrize("operator", OPERATORS)
@ranks(1, 2, 3)
@on_ranks()
def test_every_schedule_casts_exactly(at: Rank, operator: str) -> None:
    every = 1 if at.world == 2 else 4
    cast_exactly(at, every_schedule(operator, at.world, at.device.type, every))


@on_ranks(2)
def test_layouts_of_cast_operands(at: Rank) -> None:
    """Layouts of A, a ring of stages, and the family of dtypes of b."""
    case = ScaledCase("all_gather_matmul", (12,) * at.world, 256, 16, "block", "growing")
    own, wanted = unscaled(case, at, 0)
    a = own.a
    symmetric = ficco.empty(a.shape, dtype=a.dtype, device=at.device).copy_(a)
    wide = torch.zeros(12, 512, dtype=a.dtype, device=at.device)[:, ::2].copy_(a)
    odd = torch.zeros(12, 259, dtype=a.dtype, device=at.device)[:, 3:].copy_(a)
    for form in (a, symmetric, wide, odd, a.view(3, 4, 256)):
        own.a = form
        for schedule in ("growing", "growing:pull"):
            y = call(case.on(schedule=schedule), own)
            compare("the result", y, wanted, f"{form.shape} {form.stride()}")
    ring = case.on(schedule="hetero-fused-1d:pieces=3", recipe="row", k=144)
    columns = ScaledCase("matmul_reduce_scatter", (24,) * at.world, 144, 544, "row", "growing")
    with ficco.options(workspace_bytes=1 << 14):
        cast_exactly(at, [ring, columns.on(bias=True), ring])
    if at.device.type == "cpu":
        cast_exactly(at, [columns.on(dtypes=(FNUZ, FNUZ))])


def _rounds(at: Rank) -> None:
    """The sent rows of a random A are bitwise equal to one cast of the whole A."""
    torch.manual_seed(at.rank)
    a, weight = torch.randn(24, 400) * 2.0 ** torch.arange(-12, 12)[:, None], torch.randn(48, 400)
    for recipe in CASTS:
        b, scale_b = quantized(weight, RECIPES[recipe].b[::-1], E4M3)
        cast, scale_a = quantized(a, RECIPES[recipe].a, E4M3)
        rest: dict[str, Any] = {"scale_b": scale_b.t(), "schedule": "hetero-fused-1d:pieces=3"}
        y = ficco.all_gather_matmul(a, b.t(), quantize=recipe, **rest)
        whole = ficco.all_gather_matmul(cast, b.t(), scale_a=scale_a, **rest)
        assert torch.equal(y, whole) and y.abs().sum() > 0


def _gradient(at: Rank) -> None:
    """The gradient of A is a product with the float8 b, with and without gradients enabled."""
    for iteration, operator in enumerate(GATHERING):
        rows: Any = (4, 8) if operator == "all_gather_matmul" else ((4, 8), (8, 4))
        case = ScaledCase(operator, rows, 32, 16, "row", "growing")
        own, wanted = unscaled(case, at, iteration)
        own.a.requires_grad_()
        y = call(case, own)
        assert torch.equal(y, wanted) and y.requires_grad
        # The gradient is the same on all ranks, so that the sum over the ranks is known.
        y.backward(torch.ones_like(y))
        peers = [replace(at, rank=rank) for rank in range(at.world)]
        sums = torch.stack([sample(case, p, iteration)[0].wide_b.sum(1) for p in peers])
        if operator == "all_gather_matmul":
            expected = sums.sum(0).expand(rows[at.rank], -1)
        else:
            expected = sums.repeat_interleave(torch.tensor(rows[at.rank]), 0)
        assert own.a.grad.dtype == own.a.dtype and torch.equal(own.a.grad.double(), expected)
        with torch.no_grad():
            assert not call(case, own).requires_grad


def _empty(at: Rank) -> None:
    """Without rows or columns nothing is cast, or all results are zero."""
    for m, n, k in ((0, 16, 16), (8, 0, 16), (8, 16, 0), (0, 0, 0), (2, 128, 128)):
        for recipe, operator in itertools.product(CASTS, OPERATORS):
            a, b = torch.ones(m, k), torch.ones(n, k).to(E4M3).t()
            scale_b = torch.ones((1, n) if recipe == "row" else (-(-k // 128), -(-n // 128)))
            for name in ("serial", "growing", "hetero-fused-2d:pieces=2", "growing:pull"):
                kwargs: dict[str, Any] = {"scale_b": scale_b, "schedule": name}
                y = getattr(ficco, operator)(a, b, quantize=recipe, **kwargs)
                terms = at.world if operator in SUMS else 1
                assert (y == k * terms).all(), (operator, m, n, k, recipe, name)


def _traced(at: Rank) -> None:
    for iteration, operator in enumerate(GATHERING):
        rows: Any = (8, 8) if operator == "all_gather_matmul" else ((8, 8), (8, 8))
        case = ScaledCase(operator, rows, 32, 16, "row", "growing")
        own, wanted = unscaled(case, at, iteration)
        once = compiled(lambda a, case=case, own=own: call(case, replace(own, a=a)) + 1)
        assert torch.equal(once(own.a), wanted + 1)
        refused = caught(lambda once=once, own=own: once(own.a.requires_grad_()))
        assert "no gradient" in refused.text


def _unlike(at: Rank) -> None:
    """One rank casts in the call, the other passes operands that are already cast."""
    case = ScaledCase("all_gather_matmul", (8, 8), 32, 16, "row")
    own, _ = (sample, unscaled)[at.rank](case, at, 0)
    error = caught(lambda: call(case, own))
    assert error.type == "RankMismatch" and "cast from bfloat16" in error.text
    at.barrier()
    ficco.close()


@pytest.mark.parametrize("check", [_rounds, _gradient, _empty, _traced, _unlike])
def test_casts(check: Callable[[Rank], None]) -> None:
    run(2, check)


def _is_cast(step: Any) -> bool:
    return isinstance(step.work, Transfer) and step.work.factors is not None


def _is_copy_of_scales(step: Any) -> bool:
    return step.op == "copy" and "scale" in step.label and bool(step.after)


def _moves(step: Any, **changes: Any) -> Any:
    return step._replace(work=step.work._replace(**changes))


def _factors(**changes: Any) -> Callable[[Any], Any]:
    return lambda step: _moves(step, factors=step.work.factors._replace(**changes))


def _part_of_a_row(step: Any) -> Any:
    src, dst = (region._replace(col_stop=128) for region in step.work[:2])
    return _moves(step, src=src, dst=dst)


def _copy_with_factors(step: Any) -> Any:
    return _moves(step, factors=step.work.src._replace(buffer="scale_a"))


UNFIT, WITHOUT = "factors that do not fit", "casts without factors"
#: Steps of a plan, a wrong edit of them, and a pattern of the proof's error.
WRONG: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any], str], ...] = (
    (_is_copy_of_scales, lambda step: step._replace(after=()), "before it is written"),
    (_is_cast, lambda step: _moves(step, factors=None), WITHOUT),
    (_is_cast, _factors(row=4, row_stop=20), UNFIT),
    (_is_cast, _factors(row_stop=15), UNFIT),
    (_is_cast, _factors(buffer="scale_b"), UNFIT),
    (_is_cast, _part_of_a_row, UNFIT),
    (_is_cast, lambda step: _moves(step, function=""), "between the wrong buffers"),
    (_is_cast, lambda step: _moves(step, function="relu"), "which is not asked for"),
    (lambda step: step.op == "copy", _copy_with_factors, WITHOUT),
    (_is_cast, lambda step: step._replace(work=None), "nobody has written"),
)


@pytest.mark.parametrize(("selects", "change", "words"), WRONG)
def test_the_proof_refuses_wrong_casts(selects: Any, change: Any, words: str) -> None:
    scaling = Scaling("row", "float8_e4m3fn", source="bfloat16")
    problem = Problem("all_gather_matmul", (64, 64), 32, 256, "float8_e4m3fn", scaling=scaling)
    first, second = plans(problem, Schedule.parse("hetero-fused-1d:pieces=4"))
    check([first, second])
    steps = list(first.steps)
    at = next(index for index, step in enumerate(steps) if selects(step))
    steps[at] = change(steps[at])
    with pytest.raises(PlanError, match=words):
        check([replace(first, steps=tuple(steps)), second])


def test_copies_begin_when_their_piece_is_cast() -> None:
    """The first of four copies begins after a fourth of the cast, or after all if peers pull."""
    machine = find("h200-4", None)
    sizes, scaling = (3584, 8192), Scaling("row", "float8_e4m3fn", source="bfloat16")
    problem = Problem("all_gather_matmul", (8192,) * 4, *sizes, "float8_e4m3fn", scaling=scaling)
    moves = 8192 * (8192 * 3 + 4) / machine.memory.bandwidth  # read and written once
    for name, count, least, most in (("pieces=4", 4, 0.2, 0.35), ("pieces=4,pull", 1, 1.0, 2.0)):
        schedule = Schedule.parse(f"hetero-fused-1d:{name}")
        bars = simulate(plans(problem, schedule), machine).ranks[0]
        casts = [bar for bar in bars if bar.label.startswith("cast")]
        took = max(bar.stop_s for bar in casts)
        first = min(bar.start_s for bar in bars if bar.kind == "copy")
        assert len(casts) == count and least * took <= first < most * took
        assert took == pytest.approx(moves + count * machine.memory.latency, rel=0.05)
        without_cast = predict(problem.given, schedule, machine, "queued")
        assert 0 < predict(problem, schedule, machine, "queued") - without_cast < 1.5 * took
    assert PRODUCTS.ideal(problem, machine) == PRODUCTS.ideal(problem.given, machine)


def test_a_library_on_cpus_writes_contiguous_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 writes wrong values on Intel's CPUs if the result's rows are not contiguous."""
    scaled_mm, unit = torch._scaled_mm, torch.ones(())

    def strict(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
        assert options.get("out", unit).is_contiguous()
        return scaled_mm(*operands, **options)

    monkeypatch.setattr(torch, "_scaled_mm", strict)
    a = torch.arange(48 * 16).remainder(7).float().view(48, 16).to(torch.float8_e4m3fn)
    b = torch.arange(16 * 32).remainder(5).float().view(32, 16).to(torch.float8_e4m3fn).t()
    wide = torch.full((48, 64), -1.0)
    multiply_scaled(a, b, wide[:, 16:48], (unit, unit), "tensor")
    assert torch.equal(wide[:, 16:48], a.float() @ b.float())
    assert (wide[:, :16] == -1).all() and (wide[:, 48:] == -1).all()


def test_on_a_double_of_hip() -> None:
    """ficco's kernel casts to gfx942's float8. The double executes its launches."""
    schedules = ("serial", "growing", "hetero-fused-1d:pieces=3", "uniform-fused-2d:pull")
    cases = [
        ScaledCase(operator, rows, 144, 48, "row", name, dtypes=(FNUZ, FNUZ))
        for operator, rows in zip(GATHERING, ((8, 12, 4, 8), ((4, 8, 0, 12),) * 4), strict=True)
        for name in schedules
    ]
    assert hip_ranks.run(4, cast_exactly, cases, timeout=120) == [len(cases)] * 4
