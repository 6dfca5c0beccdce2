"""Operands of float8 with scales: exact for every schedule, and refused in one voice.

Operands are small integers that depend on the iteration, the rank, the row and the column, and
scales are powers of two, so that every product has one right answer before it is rounded.
``test_fp8_gpu.py`` runs the tests that ask for ``device`` on GPUs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from cases import _hash, _span, compare
from ranks import Rank, ranks, run
from test_operators import BLOCKS, SUMS, TERMS, rows_for, schedules_of

import ficco
from ficco.scaling import RECIPES, factor_count

OPERATORS = ("all_gather_matmul", "all_to_all_matmul", *SUMS, "matmul_all_to_all")
SERVED = tuple(name for name, recipe in RECIPES.items() if not recipe.needs)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


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

    def on(self, **changes: Any) -> ScaledCase:
        return replace(self, **changes)

    @property
    def gathers(self) -> bool:
        return self.operator in ("all_gather_matmul", "all_to_all_matmul")

    def held(self, rank: int) -> int:
        """Rows of a rank's a."""
        if self.operator in BLOCKS:
            return sum(self.rows[rank])
        return self.rows[rank] if self.operator == "all_gather_matmul" else sum(self.rows)


@dataclass
class Operands:
    """What a rank passes, and in float64 what a product is to be of."""

    a: torch.Tensor
    b: torch.Tensor
    scales: dict[str, Any]
    wide_a: torch.Tensor
    wide_b: torch.Tensor


def dequantised(matrix: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The definition, element by element, in float64."""
    shares = [-(-size // count) for size, count in zip(matrix.shape, factors.shape, strict=True)]
    rows, cols = (
        torch.arange(size, device=matrix.device) // (128 if count > 1 and share > 1 else share)
        for size, count, share in zip(matrix.shape, factors.shape, shares, strict=True)
    )
    return matrix.double() * factors.double()[rows][:, cols]


def operands(case: ScaledCase, rank: int, iteration: int, device: torch.device) -> Operands:
    held, rules = case.held(rank), RECIPES[case.recipe]
    rows, width, cols = (_span(0, size, device) for size in (held, case.k, case.n))
    a = (_hash(rows, width, 101 * iteration + rank) % 7 - 3).to(case.dtypes[0])
    signs = _hash(width, cols, 31 * iteration + rank + 1) % 2 * 2 - 1
    mine = (width[:, None] + cols[None, :]) % (-(-case.k // TERMS) or 1) == 0
    b = (signs * mine).to(case.dtypes[1]).t().contiguous().t()

    def powers(share: tuple[int, int], sizes: tuple[int, int], seed: int) -> torch.Tensor:
        counts = (factor_count(size, one) for size, one in zip(sizes, share, strict=True))
        spans = (_span(0, count, device) for count in counts)
        return 2.0 ** (_hash(*spans, 7 * iteration + seed) % 3).float()

    scale_a = powers(rules.a, (held, case.k), rank)
    scale_b = powers(rules.b, (case.k, case.n), 50 + rank)
    wide = dequantised(a, scale_a) if held else a.double(), dequantised(b, scale_b)
    if case.recipe == "block":  # as PyTorch wants them: column by column
        scale_a = scale_a.t().contiguous().t()
    scales: dict[str, Any] = {"scale_a": scale_a, "scale_b": scale_b}
    if case.bias:
        dtype = case.out or torch.bfloat16
        scales["bias"] = (_hash(_span(0, 1, device), cols, iteration + rank) % 9 - 4)[0].to(dtype)
    if case.out is not None:
        scales["out_dtype"] = case.out
    return Operands(a, b, scales, *wide)


def call(case: ScaledCase, given: Operands, group: Any = None, **more: Any) -> Any:
    rows = {} if case.operator == "matmul_all_reduce" else {"rows": case.rows}
    arguments = {"schedule": case.schedule, "group": group, **rows, **given.scales, **more}
    return getattr(ficco, case.operator)(given.a, given.b, **arguments)


def made(case: ScaledCase, at: Rank, iteration: int) -> tuple[Operands, torch.Tensor]:
    """A rank's operands, and its result."""
    everyone = [operands(case, r, iteration, at.device) for r in range(len(case.rows))]
    mine, out = everyone[at.rank], case.out or torch.bfloat16

    def product(a: torch.Tensor, one: Operands) -> torch.Tensor:
        bias = one.scales["bias"].double() if case.bias else 0.0
        return (a @ one.wide_b + bias).to(out)

    if case.replicated:
        mine.scales["scale_a"] = torch.cat([one.scales["scale_a"] for one in everyone])
    if case.operator in SUMS:
        total = torch.zeros(sum(case.rows), case.n, device=at.device)
        for one in everyone:
            total += product(one.wide_a, one)
        ends = [0, *accumulate(case.rows)]
        if case.operator == "matmul_reduce_scatter":
            total = total[ends[at.rank] : ends[at.rank + 1]]
        return mine, total.to(out)
    blocks = [one.wide_a for one in everyone]
    if case.operator in BLOCKS:
        blocks = [a.split(case.rows[peer])[at.rank] for peer, a in enumerate(blocks)]
    if case.gathers:
        return mine, product(torch.cat(blocks), mine)
    parts = [product(block, one) for block, one in zip(blocks, everyone, strict=True)]
    return mine, torch.cat(parts)


def exact(at: Rank, case: ScaledCase, iteration: int, **more: Any) -> None:
    given, wanted = made(case, at, iteration)
    compare("the result", call(case, given, **more), wanted, f"rank {at.rank}, {iteration}: {case}")


def all_exact(at: Rank, cases: Sequence[ScaledCase]) -> int:
    for iteration, case in enumerate(cases):
        exact(at, case, iteration)
    return len(cases)


@pytest.fixture(scope="module")
def device() -> str:
    return "cpu"


def schedules(operator: str) -> list[str]:
    """The schedules that serve float8: none that adds a product to a sum."""
    found = [
        "auto",
        *schedules_of(operator if operator != "all_gather_matmul" else "all_to_all_matmul"),
    ]
    return [name for name in found if "beta" not in name and not name.startswith(("ring", "tiled"))]


def every_schedule(operator: str, world: int) -> list[ScaledCase]:
    """A case of each schedule of the space, with recipe, rows, sizes and dtypes drawn."""
    chance = random.Random(f"{operator} {world}")
    cases = []
    for schedule in schedules(operator):
        recipe, out, bias = chance.choice(SERVED), chance.choice((None, torch.bfloat16)), False
        if chance.random() < 0.2 or operator in SUMS and "collective" in schedule:
            out = torch.float32  # gloo rounds after every term
        else:
            bias = chance.random() < 0.3
        rows = rows_for(operator, world, chance.choice(("equal", "ragged", "few", "sparse")))
        replicated = (
            operator == "all_gather_matmul" and recipe != "tensor" and chance.random() < 0.3
        )
        cases.append(
            ScaledCase(
                operator,
                rows,
                chance.choice((256, 400) if recipe == "block" else (16, 48, 144)),
                chance.choice((16, 48, 272)),
                recipe,
                schedule,
                out,
                bias,
                replicated and world > 1,
            )
        )
    return cases


@pytest.mark.parametrize("operator", OPERATORS)
@ranks(1, 2, 3, 4)
def test_every_schedule_is_exact(device: str, operator: str, world: int) -> None:
    cases = every_schedule(operator, world)
    assert run(world, all_exact, cases, device=device) == [len(cases)] * world
