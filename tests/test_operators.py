"""Behaviour of all operators except all_gather_matmul, beyond the contract and on any engine.

Operands and results come from ``subjects.py``. Modules of other engines also run the tests with an
argument ``device``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from cases import own_group
from disturbance import Disturbance, disturb
from ranks import Rank, on_ranks, ranks, run, serves_tiled
from subjects import KNOBS, SUBJECTS, Case, exact

import ficco

SUMS = ("matmul_reduce_scatter", "matmul_all_reduce")
BLOCKS = ("all_to_all_matmul", "matmul_all_to_all", "all_to_all_transposed_matmul")
INNER = ("all_gather_transposed_matmul", "all_to_all_transposed_matmul")
OPERATORS = tuple(dict.fromkeys((*SUMS, *BLOCKS, *INNER)))
#: Upper bound on the bytes of a small plan's signals.
WORDS_BYTES = 1 << 12
#: Ring schedules of sums, which ``subjects.py`` leaves out.
RINGS = [f"ring:{knobs}" for knobs in KNOBS if "pull" not in knobs and "beta" not in knobs]


def operands(name: str, case: Case, at: Rank) -> list[torch.Tensor]:
    """A rank's operands in the first iteration."""
    wide = SUBJECTS[name].make(case, at.rank, 0)
    return [operand.to(at.device, getattr(torch, case.dtype)) for operand in wide]


def call(name: str, case: Case, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    (result,) = SUBJECTS[name].call(case, list(tensors), [])
    return result


def all_exact(at: Rank, calls: Sequence[tuple[str, Case]], group: Any = None) -> int:
    for iteration, (name, case) in enumerate(calls):
        exact(at, SUBJECTS[name], case, iteration, group)
    return len(calls)


def rows_for(operator: str, world: int, kind: str) -> tuple[Any, ...]:
    """Rows of a kind: equal, ragged, few (fewer than pieces), or sparse (with many zeros)."""
    sizes = {
        "equal": lambda i, j: 24,
        "ragged": lambda i, j: (7 * i + 5 * j + 3) % 29,
        "few": lambda i, j: (i + j) % 3,
        "sparse": lambda i, j: 11 * ((i + 2 * j) % 3 == 1),
        "none": lambda i, j: 0,
    }[kind]
    if operator in BLOCKS:
        return tuple(tuple(sizes(i, j) for j in range(world)) for i in range(world))
    rows = tuple(sizes(i, 1) for i in range(world))
    if operator == "matmul_all_reduce":  # the operator splits m rows like this
        m = sum(rows)
        return tuple(m // world + (rank < m % world) for rank in range(world))
    return rows


def schedules_of(operator: str, tiled: bool = False) -> list[str]:
    """Named schedules with each set of knobs that they take; ``tiled``: also tiled products."""
    _, *names = SUBJECTS[operator].schedules(2, tiled=tiled)
    return names + (RINGS if operator in SUMS else [])


@on_ranks(2)
def test_sums_repeat_to_the_last_bit(at: Rank) -> None:
    torch.manual_seed(at.rank)
    for operator, schedule in (
        *product(SUMS, ["hetero-fused-1d:pieces=2,tail=2", "growing:beta", "ring", "one-shot"]),
        *product(INNER, ["hetero-fused-1d:pieces=2,tail=2,compute=2", "hetero-unfused-2d"]),
    ):
        case = Case(rows_for(operator, at.world, "equal"), (96, 80), schedule=schedule)
        shapes = [operand.shape for operand in operands(operator, case, at)]
        tensors = [torch.randn(shape, device=at.device).bfloat16() for shape in shapes]
        first = call(operator, case, tensors)
        assert all(torch.equal(first, call(operator, case, tensors)) for _ in range(12)), case


def _all_reduced(at: Rank) -> list[torch.Tensor]:
    torch.manual_seed(at.rank)
    a, b = torch.randn(67, 96), torch.randn(96, 640)  # narrower sums are exact
    names = "growing", "ring", "one-shot", "one-shot:pieces=3", "two-shot", "two-shot:pieces=3"
    a, b = a.to(at.device), b.to(at.device)
    return [ficco.matmul_all_reduce(a, b, schedule=name).cpu() for name in names]


def test_an_all_reduce_is_equal_on_all_ranks_to_the_last_bit(device: str) -> None:
    # Three ranks: a sum of two numbers is the same in either order.
    for first, *others in zip(*run(3, _all_reduced, device=device), strict=True):
        assert others and all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    "schedule", ["hetero-fused-1d", "hetero-fused-1d:beta", "ring", "one-shot:pieces=2"]
)
@on_ranks(3)
def test_errors_keep_to_their_bounds(at: Rank, schedule: str) -> None:
    """The bounds of the docstring are first-order; 1 % covers the second order."""
    # By default PyTorch lets the library round partial sums over k to bfloat16.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    world, m, k, n = at.world, 64 * at.world, 256, 48
    generator = torch.Generator().manual_seed(7)
    draw = partial(torch.randn, generator=generator)
    operands_of = [[draw(m, k).bfloat16(), draw(k, n).bfloat16()] for _ in range(world)]
    own_rows = slice(at.rank * 64, at.rank * 64 + 64)
    products = torch.stack([(a.double() @ b.double())[own_rows] for a, b in operands_of])
    expected, unit = products.sum(0), 2.0**-8  # of bfloat16
    a, b = (operand.to(at.device) for operand in operands_of[at.rank])
    result = ficco.matmul_reduce_scatter(a, b, schedule=schedule).double().cpu()
    rounds_first = at.device.type == "cuda"  # cuBLAS may round a product this small before it adds
    if schedule.startswith("ring"):
        order = [(at.rank + 1 + i) % world for i in range(world)]
        bound = products[order].cumsum(0).abs().sum(0)
        bound += rounds_first * products[order[1:]].abs().sum(0)
    elif "beta" in schedule:
        own, others = products[at.rank], expected - products[at.rank]
        bound = products.abs().sum(0) - own.abs() + others.abs() + expected.abs()
        bound += rounds_first * own.abs()
    else:
        bound = products.abs().sum(0) + expected.abs()
    gemm = k * 2.0**-23 * products.abs().sum(0).max()  # float32 sums inside the library
    assert ((result - expected).abs() / (unit * bound + gemm)).max() <= 1.01


def _mixed(at: Rank, calls: int, tiled: bool) -> None:
    """Operators in a random order on the same slots. On CPUs every copy has a random delay."""
    chance = random.Random(at.world)
    requests = [*product(SUMS, RINGS)]
    for _ in range(calls):
        operator = chance.choice((*OPERATORS, "all_gather_matmul"))
        requests.append((operator, chance.choice(schedules_of(operator, tiled))))
    chance.shuffle(requests)
    with disturb(Disturbance(delay_s=0.002, seed=at.world)):
        for iteration, (operator, schedule) in enumerate(requests):
            kind = chance.choice(("equal", "ragged", "few", "sparse"))
            sizes = chance.choice((8, 24)), chance.choice((8, 40))
            case = Case(rows_for(operator, at.world, kind), sizes, "bfloat16", schedule)
            # Calls with a cap take turns on one piece of memory, which only signals hand over.
            with ficco.options(workspace_bytes=None if sizes[1] == 8 else 1 << 22):
                exact(at, SUBJECTS[operator], case, iteration)


@ranks(2, 4)
def test_operators_in_any_order(device: str, world: int) -> None:
    calls = 50 if device == "cpu" else 400
    run(world, _mixed, calls, serves_tiled(device), device=device)


#: Bytes; the first is more than any of the calls needs.
CAPS = (1 << 20, 1 << 15, 1 << 14)


@on_ranks(3)
def test_memory_keeps_to_its_cap(at: Rank) -> None:
    """Exact calls under smaller and smaller caps, and the bytes held after them."""
    for operator, schedule in (
        ("matmul_reduce_scatter", "growing:tail=2,pull"),
        ("matmul_reduce_scatter", "ring"),
        ("matmul_all_reduce", "hetero-unfused-1d:beta"),
        ("matmul_all_reduce", "uniform-fused-2d:pieces=3"),
        ("matmul_all_to_all", "hetero-fused-1d:pieces=2,pull"),
        ("all_to_all_matmul", "hetero-fused-1d:pieces=8"),
        *product(
            ("all_gather_matmul", *INNER), ["hetero-fused-1d:pieces=8", "uniform-fused-2d:pieces=8"]
        ),
    ):
        wide = (24, 320) if operator.startswith("matmul_") else (320, 24)  # wide rows travel
        case = Case(rows_for(operator, at.world, "ragged"), wide, "bfloat16", schedule)
        held = []
        for cap in CAPS:
            ficco.close()
            with ficco.options(workspace_bytes=cap):
                all_exact(at, [(operator, case)] * 2)
            held.append(ficco.memory())
            assert held[-1] <= cap, (operator, case)
        assert held[0] >= held[1] > held[2], (operator, case, held)


@on_ranks(2)
def test_rows_that_can_be_read_once(at: Rank) -> None:
    """An iterator of rows in a call that goes by columns; rows that raise fail only their call."""
    with ficco.options(workspace_bytes=3000):
        a, b, rows = torch.ones(7, 8), torch.ones(8, 640), iter([3, 4])
        result = ficco.matmul_reduce_scatter(a, b, rows=rows, schedule="shard-overlap")
    assert torch.equal(result, torch.full((3 + at.rank, 640), 16.0))
    a, b = torch.ones(4, 8), torch.ones(8, 4)
    for _ in range(2):
        assert torch.equal(ficco.matmul_reduce_scatter(a, b), torch.full((2, 4), 16.0))
        with pytest.raises(ZeroDivisionError):
            ficco.matmul_reduce_scatter(a, b, rows=(1 // 0 for _ in range(2)))


@on_ranks(3)
def test_auto_keeps_to_any_cap(at: Rank) -> None:
    """Without other options a call keeps to any cap, and so does its backward."""
    for operator in (*OPERATORS, "all_gather_matmul"):
        rows, subject = rows_for(operator, at.world, "equal"), SUBJECTS[operator]
        ficco.close()  # memory of earlier tests
        for iteration, (cap, n) in enumerate(product((100, 5000, 9000), (0, 40))):
            with ficco.options(workspace_bytes=cap):
                exact(at, subject, Case(rows, (64, n)), iteration)
                assert ficco.memory() <= cap
        ficco.close()
        with ficco.options(workspace_bytes=5000):
            exact(at, subject, Case(rows, (64, 40), needs=(True, True)), 0)
        # A slot has the words of one call and the staging of the other.
        assert ficco.memory() <= 5000 + WORDS_BYTES, operator
    ficco.close()


@on_ranks(2)
def test_any_cap_is_exact_or_refused(at: Rank) -> None:
    """The cap that the error requires is enough, and one byte less is not."""
    for operator, n in product((*OPERATORS, "all_gather_matmul"), (250, 5)):
        rows = rows_for(operator, at.world, "ragged")
        case, subject = Case(rows, (8, n), schedule="shard-overlap"), SUBJECTS[operator]
        required = []
        ficco.close()  # memory of earlier tests
        for iteration, cap in enumerate(range(100, 9000, 1100)):
            with ficco.options(workspace_bytes=cap):
                try:
                    exact(at, subject, case, iteration)
                    assert ficco.memory() <= cap
                except ValueError as error:
                    match = re.search(r"workspace_bytes: required at least (\d+) for", str(error))
                    assert match is not None, error
                    required.append(int(match[1]))
        ficco.close()
        assert len(set(required)) == 1 and len(required) < 8, (operator, case, required)
        with ficco.options(workspace_bytes=required[0]):
            exact(at, subject, case, 0)
        with ficco.options(workspace_bytes=required[0] - 1), pytest.raises(ValueError):
            exact(at, subject, case, 1)


@on_ranks(2)
def test_ranks_that_call_other_operators_are_told(at: Rank) -> None:
    with own_group(at) as group, pytest.raises(ficco.RankMismatch) as caught:
        call = getattr(ficco, SUMS[at.rank % 2])
        call(torch.ones(12, 8), torch.ones(8, 6), schedule="growing", group=group)
    assert all(operator in str(caught.value) for operator in SUMS)
