"""What the operators beside all_gather_matmul promise, whatever the engine.

Inputs are small integers that depend on the iteration, the rank, the row and the column, so that
every sum has one right answer in every dtype, and a stale, missing or misplaced piece shows.
``test_gpu.py`` runs the tests that ask for ``device`` on GPUs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import _hash, _span, compare
from disturbance import Disturbance, disturb
from ranks import Rank, ranks, run, serves_tiled
from subjects import KNOBS

import ficco
from ficco.errors import FiccoError
from ficco.schedules import NAMED

SUMS = ("matmul_reduce_scatter", "matmul_all_reduce")
BLOCKS = ("all_to_all_matmul", "matmul_all_to_all", "all_to_all_transposed_matmul")
INNER = ("all_gather_transposed_matmul", "all_to_all_transposed_matmul")
OPERATORS = tuple(dict.fromkeys((*SUMS, *BLOCKS, *INNER)))
#: Terms in the sum of one element on one rank, at most: with |a| <= 3 and |b| = 1 the sums of 8
#: ranks stay within [-192, 192], and bfloat16 holds every integer up to 256.
TERMS = 8
#: Most that the signals of a small plan take.
WORDS_BYTES = 1 << 12
#: One product that waits, or tells, inside.
TILED = ("tiled", "tiled:pieces=3,order=piece", "tiled:pieces=2,tail=3,pull", "tiled:pieces=3+1")
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Case:
    """One call, the same on every rank; ``rows`` as the operator takes them."""

    operator: str
    rows: tuple[Any, ...]
    k: int
    n: int
    dtype: str = "float32"
    schedule: str = "auto"
    transposed: bool = False

    def on(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def m(self) -> int:
        return sum(self.rows)

    def held(self, rank: int) -> int:
        """Rows of a rank's a."""
        if self.operator in BLOCKS:
            return sum(self.rows[rank])
        return int(self.rows[rank]) if self.operator in INNER else self.m

    def summed(self, rank: int) -> int:
        """Rows of a rank's b."""
        if self.operator not in INNER:
            return self.k
        return sum(line[rank] for line in self.rows) if self.operator in BLOCKS else self.m

    def arguments(self) -> dict[str, Any]:
        rows = {} if self.operator == "matmul_all_reduce" else {"rows": self.rows}
        return {"schedule": self.schedule, **rows}


def operands(
    case: Case, rank: int, iteration: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = getattr(torch, case.dtype)
    summed = case.summed(rank)
    sizes = (case.held(rank), case.k, summed, case.n)
    rows, width, inner, cols = (_span(0, size, device) for size in sizes)
    a = _hash(rows, width, 101 * iteration + rank) % 7 - 3
    signs = _hash(inner, cols, 31 * iteration + rank + 1) % 2 * 2 - 1
    mine = (inner[:, None] + cols[None, :]) % (-(-summed // TERMS) or 1) == 0
    b = (signs * mine).to(dtype)
    return a.to(dtype), (b.t().contiguous().t() if case.transposed else b)


def wanted(
    case: Case,
    rank: int,
    iteration: int,
    device: torch.device,
    own: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The result on a rank, from the operands of all ranks, in float64; its own may be given."""
    everyone = [
        own if own and r == rank else operands(case, r, iteration, device)
        for r in range(len(case.rows))
    ]
    if case.operator in SUMS:
        total = sum(a.double() @ b.double() for a, b in everyone)
        assert isinstance(total, torch.Tensor)
        ends = [0, *accumulate(case.rows)]
        if case.operator == "matmul_reduce_scatter":
            total = total[ends[rank] : ends[rank + 1]]
        return total.to(everyone[0][0].dtype)
    blocks = [a for a, _ in everyone]
    if case.operator in BLOCKS:
        blocks = [a.split(case.rows[peer])[rank] for peer, a in enumerate(blocks)]
    mine = everyone[rank][1]
    if case.operator in INNER:
        return (torch.cat(blocks).double().t() @ mine.double()).to(mine.dtype)
    weights = [b if case.operator == "matmul_all_to_all" else mine for _, b in everyone]
    parts = [x.double() @ weight.double() for x, weight in zip(blocks, weights, strict=True)]
    return torch.cat(parts).to(mine.dtype)


def exact(at: Rank, case: Case, iteration: int, group: Any = None) -> None:
    rank = at.rank if group is None else group.rank()
    a, b = operands(case, rank, iteration, at.device)
    before = a.clone(), b.clone()
    found = getattr(ficco, case.operator)(a, b, group=group, **case.arguments())
    about = f"rank {rank}, iteration {iteration}: {case}"
    compare("the result", found, wanted(case, rank, iteration, at.device, before), about)
    assert torch.equal(a, before[0]) and torch.equal(b, before[1]), f"{about} changed its operands"


def all_exact(at: Rank, cases: Sequence[Case], first: int = 0) -> int:
    for iteration, case in enumerate(cases, start=first):
        exact(at, case, iteration)
    return len(cases)


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
    found = tuple(sizes(i, 1) for i in range(world))
    if operator == "matmul_all_reduce":  # what the operator itself makes of so many rows
        m = sum(found)
        return tuple(m // world + (rank < m % world) for rank in range(world))
    return found


def schedules_of(operator: str, tiled: bool = False) -> list[str]:
    """Every named schedule with every set of knobs that it takes; ``tiled``: also where a product
    waits inside."""
    found = ["serial:collective", *(TILED if tiled and operator not in INNER else ())]
    for name, base in NAMED.items():
        for knobs in KNOBS if name != "tiled" else ():
            beta = "beta" in knobs or base.beta
            if (beta or name == "one-shot") and operator not in SUMS:
                continue
            if beta and base.uniform:
                continue
            if name == "ring" and ("pull" in knobs or "beta" in knobs):
                continue
            found.append(f"{name}:{knobs}" if knobs else name)
    return found


@pytest.fixture(scope="module")
def device() -> str:
    return "cpu"


def every_schedule(
    operator: str, world: int, dtypes: Sequence[str], tiled: bool = False
) -> list[Case]:
    """A case of each schedule of the space, its rows, sizes and dtype drawn."""
    chance = random.Random(f"{operator} {world}")
    return [
        Case(
            operator,
            rows_for(operator, world, chance.choice(("equal", "ragged", "few", "sparse"))),
            chance.choice((8, 24, 64)),
            chance.choice((1, 8, 40, 64)),
            chance.choice(dtypes),
            schedule,
            chance.random() < 0.5,
        )
        for schedule in schedules_of(operator, tiled)
    ]


def _negative(at: Rank, operator: str) -> None:
    """Operands whose memory holds their negatives, as that of ``z.conj().imag`` does."""
    rows = rows_for(operator, at.world, "ragged")
    for k, cap in ((6, None), (1, None), (6, 1 << 13)):
        case = Case(operator, rows, k, 96, schedule="hetero-fused-1d:pieces=2")
        a, b = (torch._neg_view(-x) for x in operands(case, at.rank, 0, at.device))
        assert a.is_neg() and b.is_neg()
        with ficco.options(workspace_bytes=cap):
            found = getattr(ficco, operator)(a, b, **case.arguments())
        assert not found.is_neg()
        compare("the result", found, wanted(case, at.rank, 0, at.device), f"{case}, {cap}")


@pytest.mark.parametrize("operator", OPERATORS)
def test_operands_with_the_negative_bit(device: str, operator: str) -> None:
    run(2, _negative, operator, device=device)


def _repeats(at: Rank, operator: str, schedule: str) -> list[bool]:
    """Whether calls on the same random operands are equal to the last bit."""
    torch.manual_seed(at.rank)
    case = Case(operator, rows_for(operator, at.world, "equal"), 96, 80)
    a = torch.randn(case.held(at.rank), 96, device=at.device).bfloat16()
    b = torch.randn(case.summed(at.rank), 80, device=at.device).bfloat16()
    first = getattr(ficco, operator)(a, b, schedule=schedule)
    return [
        torch.equal(first, getattr(ficco, operator)(a, b, schedule=schedule)) for _ in range(20)
    ]


@pytest.mark.parametrize(
    "operator, schedule",
    [
        *product(SUMS, ["hetero-fused-1d:pieces=2,tail=2", "growing:beta", "ring", "one-shot"]),
        *product(INNER, ["hetero-fused-1d:pieces=2,tail=2,compute=2", "hetero-unfused-2d"]),
    ],
)
def test_sums_repeat_to_the_last_bit(device: str, operator: str, schedule: str) -> None:
    assert all(map(all, run(2, _repeats, operator, schedule, device=device)))


def _all_reduced(at: Rank, schedule: str) -> torch.Tensor:
    torch.manual_seed(at.rank)
    a, b = torch.randn(67, 96), torch.randn(96, 40)  # what is narrower adds up exactly
    return ficco.matmul_all_reduce(a.to(at.device), b.to(at.device), schedule=schedule).cpu()


@pytest.mark.parametrize("schedule", ["growing", "ring", "one-shot", "one-shot:pieces=3"])
def test_an_all_reduce_is_equal_on_all_ranks_to_the_last_bit(device: str, schedule: str) -> None:
    # Of two numbers the sum is the same in either order.
    first, *others = run(3, _all_reduced, schedule, device=device)
    assert others and all(torch.equal(first, other) for other in others)


def _errors(at: Rank, schedule: str) -> float:
    """The largest error of an element over its bound."""
    # By default PyTorch lets the library round parts of k to bfloat16 before it adds them up.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    world, m, k, n = at.world, 64 * at.world, 256, 48
    generator = torch.Generator().manual_seed(7)
    everyone = [
        (
            torch.randn(m, k, generator=generator).bfloat16(),
            torch.randn(k, n, generator=generator).bfloat16(),
        )
        for _ in range(world)
    ]
    mine = slice(at.rank * 64, at.rank * 64 + 64)
    products = torch.stack([(a.double() @ b.double())[mine] for a, b in everyone])
    right, unit = products.sum(0), 2.0**-8  # of bfloat16
    a, b = (operand.to(at.device) for operand in everyone[at.rank])
    found = ficco.matmul_reduce_scatter(a, b, schedule=schedule).double().cpu()
    rounds_first = at.device.type == "cuda"  # cuBLAS may, before it adds a product this small
    if schedule.startswith("ring"):
        order = [(at.rank + 1 + i) % world for i in range(world)]
        bound = products[order].cumsum(0).abs().sum(0)
        bound += rounds_first * products[order[1:]].abs().sum(0)
    elif "beta" in schedule:
        own, others = products[at.rank], right - products[at.rank]
        bound = products.abs().sum(0) - own.abs() + others.abs() + right.abs()
        bound += rounds_first * own.abs()
    else:
        bound = products.abs().sum(0) + right.abs()
    gemm = k * 2.0**-23 * products.abs().sum(0).max()  # float32 sums inside the library
    return float(((found - right).abs() / (unit * bound + gemm)).max())


@pytest.mark.parametrize(
    "schedule", ["hetero-fused-1d", "hetero-fused-1d:beta", "ring", "one-shot:pieces=2"]
)
def test_errors_keep_to_their_bounds(device: str, schedule: str) -> None:
    """The bounds in the docstring, to first order: 1 % for what is of second order."""
    assert max(run(3, _errors, schedule, device=device)) <= 1.01


REFUSED: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "rows that ranks cannot share": (
        "matmul_reduce_scatter", {}, "ValueError", ("share equally", "7", "rows="),
    ),
    "rows with another sum": (
        "matmul_reduce_scatter", {"rows": [3, 3]}, "ValueError", ("add up", "7", "6"),
    ),
    "blocks that are not equal": (
        "all_to_all_matmul", {}, "ValueError", ("equal blocks", "7", "rows="),
    ),
    "a list in place of a table": (
        "all_to_all_matmul", {"rows": [3, 4]}, "ValueError", ("table of 2 x 2",),
    ),
    "a table with a negative number": (
        "matmul_all_to_all", {"rows": [[8, -1], [3, 4]]}, "ValueError", ("table", "negative"),
    ),
    "a table with another sum": (
        "matmul_all_to_all", {"rows": [[3, 3], [3, 3]]}, "ValueError", ("6 rows", "got 7"),
    ),
    "a ring that sums nothing": (
        "matmul_all_to_all",
        {"rows": [[3, 4], [3, 4]], "schedule": "ring"},
        "ValueError",
        ("ring", "sum over ranks"),
    ),
    "beta without a sum": (
        "all_to_all_matmul",
        {"rows": [[3, 4], [3, 4]], "schedule": "growing:beta"},
        "ValueError",
        ("beta", "sum over ranks"),
    ),
    "rows of b that nobody has of a": (
        INNER[0], {"k": 9}, "ValueError", ("rows of b", "a_shard", "9", "14", "rows="),
    ),
    "rows of b that nobody sends": (
        INNER[1],
        {"k": 9, "rows": [[3, 4], [3, 4]]},
        "ValueError",
        ("rows of b", "receives", "got 9 and", "rows="),
    ),
    "a table of which b has another column": (
        INNER[1],
        {"k": 7, "rows": [[3, 4], [3, 4]]},
        "ValueError",
        ("rows of b", "receives", "got 7 and", "rows="),
    ),
    "blocks of a transposed product that are not equal": (
        INNER[1], {"k": 7}, "ValueError", ("equal blocks", "7", "rows="),
    ),
    "a table of a transposed product with another sum": (
        INNER[1], {"k": 6, "rows": [[3, 3], [3, 3]]}, "ValueError", ("6 rows", "got 7"),
    ),
    "a sum of other columns": (
        "matmul_all_reduce", {"k": 9}, "ValueError", ("columns of a", "k=8", "k=9"),
    ),
}  # fmt: skip


def _refused(at: Rank, what: str) -> None:
    operator, arguments, kind, words = REFUSED[what]
    arguments = dict(arguments)
    a, b = torch.ones(7, 8, device=at.device), torch.ones(arguments.pop("k", 8), 6)
    try:
        getattr(ficco, operator)(a, b.to(at.device), **arguments)
    except Exception as error:
        assert type(error).__name__ == kind, repr(error)
        for word in words:
            assert word in str(error), f"{word!r} is not in {error}"
    else:
        raise AssertionError(f"{what}: accepted")
    exact(at, Case("matmul_all_reduce", (4, 3), 8, 8, schedule="growing"), 1)  # the group lives on


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_arguments_are_refused(device: str, what: str) -> None:
    run(2, _refused, what, device=device)


def _mixed(at: Rank, calls: int, seed: int, tiled: bool) -> int:
    """Operators in any order on the same slots, as ranks must agree on by a common seed; on CPUs
    every copy is late by chance."""
    chance = random.Random(seed)
    with disturb(Disturbance(delay_s=0.002, seed=seed)):
        return _in_any_order(at, calls, chance, tiled)


def _in_any_order(at: Rank, calls: int, chance: random.Random, tiled: bool) -> int:
    for iteration in range(calls):
        operator = chance.choice(OPERATORS)
        rows = rows_for(operator, at.world, chance.choice(("equal", "ragged", "few", "sparse")))
        schedule = chance.choice(schedules_of(operator, tiled))
        sizes = chance.choice((8, 24)), chance.choice((8, 40))
        exact(at, Case(operator, rows, *sizes, "bfloat16", schedule), iteration)
    return calls


@ranks(2, 4)
def test_operators_in_any_order(device: str, world: int) -> None:
    calls = 100 if device == "cpu" else 400
    tiled = serves_tiled(device)
    assert run(world, _mixed, calls, world, tiled, device=device) == [calls] * world


def _capped(at: Rank, operator: str, schedule: str) -> list[int]:
    """Bytes held after calls with ever less memory, each of them exact."""
    wide = (24, 320) if operator.startswith("matmul_") else (320, 24)  # what travels
    case = Case(operator, rows_for(operator, at.world, "ragged"), *wide, "bfloat16", schedule)
    held = []
    for cap in CAPS:
        ficco.close()
        with ficco.options(workspace_bytes=cap):
            for iteration in range(3):
                exact(at, case, iteration)
        held.append(ficco.memory())
    return held


#: Bytes; the first is more than any of the calls needs.
CAPS = (1 << 20, 1 << 15, 1 << 14)


@pytest.mark.parametrize(
    "operator, schedule",
    [
        ("matmul_reduce_scatter", "growing:tail=2,pull"),
        ("matmul_reduce_scatter", "ring"),
        ("matmul_all_reduce", "hetero-unfused-1d:beta"),
        ("matmul_all_reduce", "uniform-fused-2d:pieces=3"),
        ("matmul_all_to_all", "hetero-fused-1d:pieces=2,pull"),
        ("all_to_all_matmul", "hetero-fused-1d:pieces=8"),
        *product(INNER, ["hetero-fused-1d:pieces=8", "uniform-fused-2d:pieces=8"]),
    ],
)
def test_memory_keeps_to_its_cap(device: str, operator: str, schedule: str) -> None:
    for held in run(3, _capped, operator, schedule, device=device):
        assert all(found <= cap for found, cap in zip(held, CAPS, strict=True))
        assert held[0] >= held[1] > held[2]


def _rows_that_pass(at: Rank) -> None:
    """Rows that can be read once, in a call that goes by columns."""
    a, b = torch.ones(7, 8), torch.ones(8, 640)
    with ficco.options(workspace_bytes=3000):
        found = ficco.matmul_reduce_scatter(a, b, rows=iter([3, 4]), schedule="shard-overlap")
    assert torch.equal(found, torch.full((3 + at.rank, 640), 16.0))


def test_rows_that_can_be_read_once() -> None:
    run(2, _rows_that_pass)


def _rows_that_fail(at: Rank) -> None:
    """Rows that cannot be read refuse their call, and nothing else."""
    a, b = torch.ones(4, 8), torch.ones(8, 4)
    for _ in range(2):
        assert torch.equal(ficco.matmul_reduce_scatter(a, b), torch.full((2, 4), 16.0))
        with pytest.raises(ZeroDivisionError):
            ficco.matmul_reduce_scatter(a, b, rows=(1 // 0 for _ in range(2)))


def test_rows_that_cannot_be_read() -> None:
    run(2, _rows_that_fail)


def _auto_under_a_cap(at: Rank, operator: str) -> None:
    """With nothing else set a call keeps to any cap, and so does its backward."""
    shape = {"rows": rows_for(operator, at.world, "equal"), "k": 64}
    ficco.close()  # what others left
    for iteration, cap in enumerate((100, 5000, 9000)):
        for n in (0, 40):
            with ficco.options(workspace_bytes=cap):
                exact(at, Case(operator, n=n, schedule="auto", **shape), iteration)
                assert ficco.memory() <= cap
    ficco.close()
    case = Case(operator, n=40, schedule="auto", **shape)
    a, b = (x.requires_grad_() for x in operands(case, at.rank, 0, at.device))
    with ficco.options(workspace_bytes=5000):
        getattr(ficco, operator)(a, b, **case.arguments()).sum().backward()
    # A slot has the words of the one call and the staging of the other.
    assert ficco.memory() <= 5000 + WORDS_BYTES
    assert a.grad is not None and b.grad is not None
    ficco.close()


@pytest.mark.parametrize("operator", OPERATORS)
def test_auto_keeps_to_any_cap(operator: str) -> None:
    run(3, _auto_under_a_cap, operator)


def _capped_anyhow(at: Rank, operator: str, n: int) -> list[int]:
    """Exact with a cap of any size, or refused; what is then said to be required."""
    case = Case(operator, rows_for(operator, at.world, "ragged"), 8, n, schedule="shard-overlap")
    required = []
    ficco.close()  # what others left
    for iteration, cap in enumerate(range(100, 9000, 131)):
        with ficco.options(workspace_bytes=cap):
            try:
                exact(at, case, iteration)
                assert ficco.memory() <= cap
            except ValueError as error:
                found = re.search(r"workspace_bytes: required at least (\d+) for", str(error))
                assert found is not None, error
                required.append(int(found[1]))
    ficco.close()
    with ficco.options(workspace_bytes=max(required)):
        exact(at, case, 0)
    with ficco.options(workspace_bytes=max(required) - 1), pytest.raises(ValueError):
        exact(at, case, 1)
    return required


@pytest.mark.parametrize("n", [250, 5])
@pytest.mark.parametrize("operator", OPERATORS)
def test_any_cap_is_exact_or_refused(operator: str, n: int) -> None:
    """What a refusal says is required does, and no byte less."""
    one, two = run(2, _capped_anyhow, operator, n)
    assert one == two and len(set(one)) == 1 and len(one) < 40


def _two_groups(at: Rank) -> None:
    """Data parallel times tensor parallel: every rank is in two groups, and uses them in turns."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = rows[at.rank // 2], columns[at.rank % 2]
    for iteration in range(12):
        operator = OPERATORS[iteration % len(OPERATORS)]
        case = Case(operator, rows_for(operator, 2, "ragged"), 24, 24, schedule="growing:pieces=2")
        exact(at, case, iteration, mine[iteration % 2])


def test_several_groups_of_a_mesh(device: str) -> None:
    run(4, _two_groups, device=device)


def _faulty(at: Rank, operator: str, schedule: str) -> list[Any]:
    """What the other ranks say of rank 1, which stops in the middle of a call: at the first step of
    all, and at a product, a copy or a sum."""
    rows = rows_for(operator, at.world, "equal")
    case = Case(operator, rows, 24, 24, schedule=schedule)
    errors = []
    for step in range(3):
        group = dist.new_group(list(range(at.world)))
        exact(at, case, 0, group)
        stall = Disturbance(stall=(1, step))
        with disturb(stall), ficco.options(timeout_s=0.6), pytest.raises(FiccoError) as caught:
            exact(at, case, 1, group)
        with pytest.raises(FiccoError):  # the group is of no use any more
            exact(at, case, 2, group)
        errors.append(caught.value)
        ficco.close(group)
        dist.destroy_process_group(group)
        dist.barrier()
    return errors


@pytest.mark.parametrize(
    ("operator", "schedule"),
    [
        *product([*SUMS, "matmul_all_to_all"], ["hetero-unfused-1d:pieces=2"]),
        ("matmul_all_reduce", "one-shot"),
    ],
)
def test_a_stuck_rank_is_named(operator: str, schedule: str) -> None:
    for errors in zip(*run(3, _faulty, operator, schedule), strict=True):
        first, _, last = (list(error.timeouts.values()) for error in errors)
        for timeout in (*first, *last):
            assert (timeout.operator, timeout.schedule) == (operator, schedule)
        assert 1 in [timeout.peer for timeout in (*first, *last)]


def _disagree(at: Rank) -> str:
    a, b = torch.ones(12, 8), torch.ones(8, 6)
    operator = SUMS[at.rank % 2]
    with pytest.raises(ficco.RankMismatch) as caught:
        getattr(ficco, operator)(a, b, schedule="growing")
    return str(caught.value)


def test_ranks_that_call_other_operators_are_told() -> None:
    for text in run(2, _disagree, fresh=True):
        assert all(operator in text for operator in SUMS)
