"""Gradients of the operators: those of the sum over all ranks of <y_r, g_r>.

Every rank knows the operands of all ranks, so that it can compute the same sum alone, in float64,
and let PyTorch differentiate that. ``test_gradients_gpu.py`` runs the tests that ask for ``device``
on GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from disturbance import Disturbance, disturb
from ranks import Failure, Rank, caught, ranks, run
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import ficco
from ficco.nn import functional
from ficco.ops import gradients
from ficco.options import current

OPERATORS = (
    "all_gather_matmul",
    "all_to_all_matmul",
    "matmul_reduce_scatter",
    "matmul_all_to_all",
    "matmul_all_reduce",
    "all_gather_transposed_matmul",
    "all_to_all_transposed_matmul",
)
GATHERING = OPERATORS[:2]
BLOCKS = ("all_to_all_matmul", "matmul_all_to_all", "all_to_all_transposed_matmul")


@pytest.fixture(scope="module")
def device() -> str:
    return "cpu"


@dataclass(frozen=True)
class Case:
    """One call, forward and backward; ``rows`` as the operator takes them."""

    operator: str
    rows: Any
    k: int
    n: int
    dtype: str = "float32"
    schedule: str = "auto"
    leading: bool = False
    transposed: bool = False
    needs: str = "ab"

    def on(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def arguments(self) -> dict[str, Any]:
        rows = {} if self.equal else {"rows": self.rows}
        return {"schedule": self.schedule, **rows}

    @property
    def equal(self) -> bool:
        """Whether the operator can find the rows by itself."""
        flat = [size for row in self.rows for size in (row if isinstance(row, tuple) else (row,))]
        return len(set(flat)) == 1 or self.operator == "matmul_all_reduce"

    def rows_in(self, rank: int) -> int:
        """Rows of the operand A on a rank."""
        if self.operator.startswith("all_gather"):
            return self.rows[rank]
        if self.operator in BLOCKS:
            return sum(self.rows[rank])
        return sum(self.rows)

    def rows_of_b(self, rank: int) -> int:
        """Rows of the operand B on a rank."""
        if not self.operator.endswith("transposed_matmul"):
            return self.k
        if self.operator in BLOCKS:
            return sum(row[rank] for row in self.rows)
        return sum(self.rows)


def case_of(operator: str, world: int, rows: int, k: int, n: int, **rest: Any) -> Case:
    """A case with equal rows for every rank (or pair of ranks)."""
    each: Any = (rows,) * world
    if operator in BLOCKS:
        each = ((rows,) * world,) * world
    return Case(operator, each, k, n, **rest)


def together(case: Case, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> list[Any]:
    """What every rank gets, by one process that has all operands; differentiable."""
    if case.operator == "all_gather_matmul":
        whole = torch.cat(list(a))
        return [whole @ weight for weight in b]
    if case.operator == "all_gather_transposed_matmul":
        whole = torch.cat(list(a))
        return [whole.t() @ weight for weight in b]
    if case.operator == "all_to_all_matmul":
        return [exchanged(case, a, rank) @ weight for rank, weight in enumerate(b)]
    if case.operator == "all_to_all_transposed_matmul":
        return [exchanged(case, a, rank).t() @ weight for rank, weight in enumerate(b)]
    products = [x @ y for x, y in zip(a, b, strict=True)]
    if case.operator == "matmul_all_to_all":
        return [exchanged(case, products, rank) for rank in range(len(a))]
    total = torch.stack(products).sum(0)
    if case.operator == "matmul_all_reduce":
        return [total] * len(a)
    return list(total.split(list(case.rows)))


def exchanged(case: Case, blocks: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """The blocks that a rank gets in an all-to-all."""
    return torch.cat([x.split(list(case.rows[i]))[rank] for i, x in enumerate(blocks)])


def integers(most: int, *seed: int, shape: Sequence[int]) -> torch.Tensor:
    """Integers from -most to most, in float64. Sums of their products in these tests stay below
    256, the last integer up to which bfloat16 holds all."""
    mixed = 0
    for part in seed:
        mixed = mixed * 7919 + part + 1
    rng = torch.Generator().manual_seed(mixed)
    return torch.randint(-most, most + 1, tuple(shape), generator=rng).double()


@dataclass
class Made:
    """Operands and gradients of the results of all ranks, in float64, and what they give."""

    a: list[torch.Tensor]
    b: list[torch.Tensor]
    g: list[torch.Tensor]
    y: list[torch.Tensor]
    grad_a: list[torch.Tensor]
    grad_b: list[torch.Tensor]


def make(case: Case, world: int, iteration: int = 0, share: bool = False) -> Made:
    """``share``: all ranks have the same gradient of their result."""
    a, b, g = [], [], []
    for rank in range(world):
        shape = (case.rows_in(rank), case.k)
        a.append(integers(2, rank, iteration, 0, shape=shape).requires_grad_())
        b.append(
            integers(1, rank, iteration, 1, shape=(case.rows_of_b(rank), case.n)).requires_grad_()
        )
    y = together(case, a, b)
    for rank in range(world):
        g.append(integers(1, 0 if share else rank, iteration, 2, shape=y[rank].shape))
    sum((y[rank] * g[rank]).sum() for rank in range(world)).backward()
    grads = [[x.grad for x in operands] for operands in (a, b)]
    return Made([x.detach() for x in a], [x.detach() for x in b], g, y, *grads)


def operands(case: Case, made: Made, at: Rank, rank: int | None = None) -> tuple[Any, Any]:
    """A rank's operands, in dtype and layout of the case."""
    rank = at.rank if rank is None else rank
    kind = getattr(torch, case.dtype)
    a = made.a[rank].to(at.device, kind, copy=True)
    b = made.b[rank].to(at.device, kind, copy=True)
    if case.leading and len(a) % 2 == 0:
        a = a.view(2, len(a) // 2, case.k)
    return a.requires_grad_("a" in case.needs), b.requires_grad_("b" in case.needs)


def product(case: Case, a: torch.Tensor, b: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The call. A transposed b is the view of a leaf that lies the other way round."""
    return getattr(ficco, case.operator)(a, b, group=group, **case.arguments())


def exact(at: Rank, case: Case, iteration: int = 0, group: Any = None) -> None:
    """Forward and backward of one call, checked in every element."""
    rank, world = (at.rank, at.world) if group is None else (group.rank(), group.size())
    made = make(case, world, iteration)
    a, b = operands(case, made, at, rank)
    leaf = b
    if case.transposed:
        leaf = b.detach().t().contiguous().requires_grad_("b" in case.needs)
        b = leaf.t()
    y = product(case, a, b, group)
    assert y.requires_grad == bool(case.needs)
    about = f"rank {rank}, {case}"
    same(y, made.y[rank], f"{about}: the product")
    if not case.needs:
        return
    y.backward(made.g[rank].to(y))
    for name, operand, grad in (("a", a, made.grad_a[rank]), ("b", leaf, made.grad_b[rank])):
        if name in case.needs:
            want = grad.t() if name == "b" and case.transposed else grad.view(operand.shape)
            same(operand.grad, want, f"{about}: the gradient of {name}")
            assert operand.grad.is_contiguous(), f"{about}: {name}.grad has {operand.grad.stride()}"
        else:
            assert operand.grad is None, f"{about}: {name} has a gradient"


def same(found: torch.Tensor | None, want: torch.Tensor, about: str) -> None:
    """Fail unless all elements are equal."""
    assert found is not None, f"{about} is missing"
    assert found.shape == want.shape, f"{about}: shape {found.shape}, wanted {want.shape}"
    want = want.detach().to(found.device)
    assert want.numel() == 0 or want.abs().max() <= 256, f"{about}: not exact in bfloat16"
    if not torch.equal(found.detach().double(), want):
        wrong = (found.detach().double() != want).nonzero()
        raise AssertionError(f"{about}: {len(wrong)} of {want.numel()} wrong, first {wrong[0]}")


def all_exact(at: Rank, cases: Sequence[Case], **options: Any) -> int:
    with ficco.options(**options):
        for iteration, case in enumerate(cases):
            exact(at, case, iteration)
    return len(cases)


def uneven(operator: str, world: int) -> Any:
    """Rows that differ, some of them none."""
    if operator in BLOCKS:
        return tuple(tuple((3 * i + 5 * j + i * j) % 4 for j in range(world)) for i in range(world))
    return (4, 0, 3, 5)[:world]


#: Schedules of every kind; the last of them are for sums, which no dual of a sum is.
SCHEDULES = (
    "serial",
    "serial:collective",
    "growing:tail=2",
    "hetero-fused-1d:pieces=4,pull",
    "uniform-unfused-1d:copy=2",
    "hetero-fused-2d:pieces=3",
    "ring",
    "hetero-fused-1d:pieces=2,beta",
    "one-shot",
)
#: For forwards, where a product whose tiles wait has any size.
TILED = "tiled:pieces=2"


def _differences(at: Rank, case: Case) -> float:
    """The largest error of a directional derivative, as a share of the sum of its terms.

    One rank's operand moves by +D and -D while the others stay. The sum is linear in each operand,
    so that the difference is the derivative but for rounding.
    """
    worst = 0.0
    rng = torch.Generator().manual_seed(7 + at.rank)
    made = make(case, at.world)
    a, b = (
        torch.randn(x.shape, generator=rng, dtype=torch.float64)
        for x in (made.a[at.rank], made.b[at.rank])
    )
    g = torch.randn(made.g[at.rank].shape, generator=rng, dtype=torch.float64)
    a.requires_grad_()
    b.requires_grad_()
    product(case, a, b).backward(g)

    def total(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            here = (product(case, a, b) * g).sum()
        dist.all_reduce(here)
        return here

    for moved in range(at.world):
        for name, operand in (("a", a), ("b", b)):
            step = torch.randn(operand.shape, generator=rng, dtype=torch.float64)
            step = step if moved == at.rank else torch.zeros_like(step)
            ends = [
                total(*((a + s * step, b) if name == "a" else (a, b + s * step))) for s in (1, -1)
            ]
            terms = torch.stack([(operand.grad * step).sum(), (operand.grad * step).abs().sum()])
            dist.all_reduce(terms)
            worst = max(worst, ((ends[0] - ends[1]) / 2 - terms[0]).abs().item() / terms[1].item())
    return worst


@pytest.mark.parametrize("operator", OPERATORS)
def test_directional_differences(operator: str) -> None:
    case = case_of(operator, 3, 5, 7, 6, dtype="float64")
    # Sums of fewer than 1000 terms, each off by some 2**-53 of totals that may be 10 times larger.
    assert max(run(3, _differences, case)) < 1e4 * 2.0**-53


def _random_error(at: Rank, case: Case) -> tuple[float, float]:
    """Largest errors of dA and dB on random data, as shares of what rounding allows: each of the
    sums of float32 products, and of a narrow dtype one rounding of a partial sum for each rank."""
    kind = getattr(torch, case.dtype)
    rng = torch.Generator().manual_seed(3)
    made = make(case, at.world)
    all_a, all_b, all_g = (
        [torch.randn(x.shape, generator=rng).to(kind).double() for x in tensors]
        for tensors in (made.a, made.b, made.g)
    )

    def grads(sign: Any) -> list[torch.Tensor]:
        a, b = ([sign(x).requires_grad_() for x in tensors] for tensors in (all_a, all_b))
        y = together(case, a, b)
        sum((y[rank] * sign(all_g[rank])).sum() for rank in range(at.world)).backward()
        return [a[at.rank].grad, b[at.rank].grad]

    want, total = grads(torch.clone), grads(torch.abs)
    a, b = (x[at.rank].to(at.device, kind).requires_grad_() for x in (all_a, all_b))
    product(case, a, b).backward(all_g[at.rank].to(at.device, kind))
    unit = 2.0**-24 * 200  # fewer than 200 terms
    narrow = torch.finfo(kind).eps if kind.itemsize < 4 else 0.0
    errors = []
    for found, exact_, size in zip((a.grad.cpu(), b.grad.cpu()), want, total, strict=True):
        errors.append(((found.double() - exact_).abs() / ((unit + narrow) * size)).max().item())
    return errors[0], errors[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_of_random_data(operator: str, dtype: str, device: str) -> None:
    case = case_of(operator, 3, 4, 33, 17, dtype=dtype)
    for errors in run(3, _random_error, case, device=device):
        assert max(errors) <= 1, errors


# What is called, and what is kept.


@contextmanager
def noted(into: list[Any], module: Any = gradients) -> Iterator[None]:
    """Note the calls that backwards make, or another module: operator, columns of b, options."""
    real = module.run

    def spy(operator: str, a: Any, b: Any, *rest: Any, **more: Any) -> Any:
        into.append((operator, "product" if b.shape[1] else "gather", current()))
        return real(operator, a, b, *rest, **more)

    module.run = spy
    try:
        yield
    finally:
        module.run = real


def _calls(at: Rank, case: Case, **options: Any) -> list[str]:
    made = make(case, at.world)
    a, b = operands(case, made, at)
    with ficco.options(**options):
        y = product(case, a, b)
    seen: list[Any] = []
    with noted(seen):
        y.backward(made.g[at.rank].to(y))
    return [f"{operator} {what}" for operator, what, _ in seen]


def _calls_of(at: Rank, case: Case, options: dict[str, Any]) -> list[str]:
    return _calls(at, case, **options)


#: The calls of each backward, by what is needed: the duals, and A gathered again.
CALLS = {
    ("all_gather_matmul", "a"): ["matmul_reduce_scatter product"],
    ("all_gather_matmul", "b"): ["all_gather_transposed_matmul product"],
    ("all_gather_matmul", "ab"): ["all_gather_matmul gather", "matmul_reduce_scatter product"],
    ("all_to_all_matmul", "a"): ["matmul_all_to_all product"],
    ("all_to_all_matmul", "b"): ["all_to_all_transposed_matmul product"],
    ("all_to_all_matmul", "ab"): ["all_to_all_matmul gather", "matmul_all_to_all product"],
    ("matmul_reduce_scatter", "a"): ["all_gather_matmul product"],
    ("matmul_reduce_scatter", "b"): ["all_gather_transposed_matmul product"],
    ("matmul_reduce_scatter", "ab"): ["all_gather_matmul product"],
    ("matmul_all_to_all", "a"): ["all_to_all_matmul product"],
    ("matmul_all_to_all", "b"): ["all_to_all_transposed_matmul product"],
    ("matmul_all_to_all", "ab"): ["all_to_all_matmul product"],
    ("matmul_all_reduce", "a"): ["all_to_all_matmul gather", "all_gather_matmul product"],
    ("matmul_all_reduce", "b"): [
        "all_to_all_matmul gather",
        "all_gather_transposed_matmul product",
    ],
    ("matmul_all_reduce", "ab"): ["all_to_all_matmul gather", "all_gather_matmul product"],
    ("all_gather_transposed_matmul", "a"): ["matmul_reduce_scatter product"],
    ("all_gather_transposed_matmul", "b"): ["all_gather_matmul product"],
    ("all_gather_transposed_matmul", "ab"): [
        "matmul_reduce_scatter product",
        "all_gather_matmul product",
    ],
    ("all_to_all_transposed_matmul", "a"): ["matmul_all_to_all product"],
    ("all_to_all_transposed_matmul", "b"): ["all_to_all_matmul product"],
    ("all_to_all_transposed_matmul", "ab"): [
        "matmul_all_to_all product",
        "all_to_all_matmul product",
    ],
}


def test_only_what_is_needed_is_called() -> None:
    for (operator, needs), want in CALLS.items():
        case = case_of(operator, 2, 4, 6, 8, needs=needs)
        assert run(2, _calls_of, case, {}) == [want] * 2, (operator, needs)
        duals = [name for name in want if name.startswith("matmul_")]
        kept = duals if operator in GATHERING else want
        assert run(2, _calls_of, case, {"save_gathered": True}) == [kept] * 2, (operator, needs)


def _kept_bytes(at: Rank, case: Case, save_gathered: bool) -> int:
    """Bytes that a forward keeps for its backward, beside the weight, which is there anyway."""
    a, b = operands(case, make(case, at.world), at)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != b.untyped_storage().data_ptr():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with ficco.options(save_gathered=save_gathered):
            product(case, a, b).sum().backward()
    return sum(kept.values())


@pytest.mark.parametrize("operator", GATHERING)
def test_memory_from_forward_to_backward(operator: str) -> None:
    """m k elements when what was gathered is kept, m k / W when it is gathered again, and nothing
    for a weight that needs no gradient."""
    world, rows, k = 4, 8, 16
    case = case_of(operator, world, rows, k, 8)
    shard = case.rows_in(0) * k * 4
    gathered = shard * world if operator == "all_gather_matmul" else shard
    assert run(world, _kept_bytes, case, False) == [shard] * world
    assert run(world, _kept_bytes, case, True) == [gathered] * world
    assert run(world, _kept_bytes, case.on(needs="a"), True) == [0] * world


def _gathered_is_used(at: Rank, rows: tuple[int, ...], save: bool) -> None:
    """The gathered A is a result like the product: what is done with it has a gradient."""
    case = Case("all_gather_matmul", rows, 6, 8)
    made = make(case, at.world)
    others = [integers(1, 99, rank, shape=(sum(rows), case.k)) for rank in range(at.world)]
    first = sum(rows[: at.rank])
    extra = sum(others)[first : first + rows[at.rank]]
    for used in ("both", "gathered"):
        a, b = operands(case, made, at)
        with ficco.options(save_gathered=save):
            y, gathered = ficco.all_gather_matmul(a, b, return_gathered=True, rows=rows)
        results, grads = [gathered], [others[at.rank].to(gathered)]
        if used == "both":
            results, grads = [y, *results], [made.g[at.rank].to(y), *grads]
        torch.autograd.backward(results, grads)
        same(a.grad, extra + (made.grad_a[at.rank] if used == "both" else 0), f"{used}: a")
        if used == "both":
            same(b.grad, made.grad_b[at.rank], "b")
        else:
            assert b.grad is None or not b.grad.any()


@pytest.mark.parametrize("save", [False, True])
def test_gradient_through_the_gathered_a(save: bool, device: str) -> None:
    run(2, _gathered_is_used, (4, 4), save, device=device)
    run(3, _gathered_is_used, (4, 0, 3), save, device=device)


def _equal_gradients(at: Rank, case: Case) -> list[str]:
    made = make(case, at.world, share=True)
    a, b = operands(case, made, at)
    with ficco.options(all_reduce_gradients="equal"):
        y = product(case, a, b)
    seen: list[Any] = []
    with noted(seen):
        y.backward(made.g[at.rank].to(y))
    # The sum over the ranks counts what all of them do W times; here it counts once.
    same(a.grad, made.grad_a[at.rank] / at.world, "a")
    same(b.grad, made.grad_b[at.rank] / at.world, "b")
    return [call[0] for call in seen]


def test_all_reduce_with_equal_gradients() -> None:
    """As in Megatron-LM: ranks that do the same with the result, and need no peer to go back."""
    assert run(3, _equal_gradients, case_of("matmul_all_reduce", 3, 4, 6, 8)) == [[]] * 3


# How gradients come in.


def _odd_gradients(at: Rank, operator: str) -> None:
    case = case_of(operator, at.world, 4, 6, 8)
    made = make(case, at.world)
    shape = made.y[at.rank].shape
    mine = made.g[at.rank].float()
    negative = torch._neg_view(-mine)  # as (-1j * z).conj().imag and the like are
    for g in (torch.ones(()).expand(shape), mine.t().contiguous().t(), negative):
        all_a, all_b = ([x.clone().requires_grad_() for x in some] for some in (made.a, made.b))
        y = together(case, all_a, all_b)
        alike = [torch.ones(x.shape) for x in y] if g.stride() == (0, 0) else made.g
        sum((y[rank] * alike[rank]).sum() for rank in range(at.world)).backward()
        a, b = operands(case, made, at)
        product(case, a, b).backward(g.to(at.device))
        same(a.grad, all_a[at.rank].grad, "a")
        same(b.grad, all_b[at.rank].grad, "b")


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_in_any_layout(operator: str, device: str) -> None:
    run(2, _odd_gradients, operator, device=device)


def _layouts(at: Rank, operator: str) -> None:
    """Operands that are views, and gradients that lie as autograd wants them."""
    case = case_of(operator, at.world, 4, 6, 8)
    made = make(case, at.world)
    plain_a, plain_b = (x.detach() for x in operands(case, made, at))
    wide_a, wide_b = (x.new_full((2 * len(x), x.shape[1] + 5), 77) for x in (plain_a, plain_b))
    views_a = [
        wide_a[: len(plain_a), 3 : 3 + case.k],
        wide_a[::2, : case.k],
        plain_a.t().clone().t(),
    ]
    views_b = [
        wide_b[: case.rows_of_b(at.rank), 3 : 3 + case.n],
        wide_b[::2, : case.n],
        plain_b.t().contiguous().t(),
    ]
    views_a.append(torch._neg_view(plain_a.clone()))
    views_b.append(torch._neg_view(plain_b.clone()))
    for a, b in zip(views_a, views_b, strict=True):
        a, b = a.copy_(plain_a).requires_grad_(), b.copy_(plain_b).requires_grad_()
        y = product(case, a, b)
        grad_a, grad_b = torch.autograd.grad(y, (a, b), made.g[at.rank].to(y))
        same(grad_a, made.grad_a[at.rank], "a")
        same(grad_b, made.grad_b[at.rank], "b")
        (alone,) = torch.autograd.grad(product(case, a.detach(), b), b, made.g[at.rank].to(y))
        same(alone, made.grad_b[at.rank], "b alone")
        # That of a transposed weight lies as the weight, so that nothing copies it.
        by_columns = (1, case.rows_of_b(at.rank))
        lies = by_columns if b.stride() == by_columns else (case.n, 1)
        assert grad_b.stride() == alone.stride() == lies


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_of_views(operator: str, device: str) -> None:
    run(2, _layouts, operator, device=device)


def _layers(at: Rank) -> list[Any]:
    """What layers make of x [4, 6] and a weight [8, 6], where it is no operator alone."""
    group: Any = dist.group.WORLD
    return [
        lambda x, w: torch.cat(
            functional.gathered_linears(x, (w, 2 * w), (None, None), group=group)
        ),
        lambda x, w: functional.reduced_linear(x, w, None, group=group),
        lambda x, w: functional.copied_linear(x, w, None, group=group),
    ]


def _second_derivatives(at: Rank) -> list[Any]:
    """First ones are right where second ones may be asked for, which are refused, also where they
    come from the other operand alone."""
    found: list[Any] = []
    for operator in OPERATORS:
        case = case_of(operator, at.world, 4, 6, 8)
        made = make(case, at.world)
        a, b = operands(case, made, at)
        g = made.g[at.rank].to(a)
        for y in (product(case, a, b) * g, product(case, a, b).square()):
            grads = torch.autograd.grad(y.sum(), (a, b), create_graph=True)
            found += [caught(lambda grad=grad: grad.sum().backward()) for grad in grads]
        torch.autograd.backward(product(case, a, b), g, create_graph=True)
        same(a.grad, made.grad_a[at.rank], "a")
        same(b.grad, made.grad_b[at.rank], "b")
    for layer in _layers(at):
        x, w = torch.ones(4, 6, requires_grad=True), torch.ones(8, 6, requires_grad=True)
        grads = torch.autograd.grad(layer(x, w).sum(), (x, w), create_graph=True)
        found += [caught(lambda grad=grad: grad.sum().backward()) for grad in grads]
    return found


def _second_derivatives_towards(at: Rank) -> list[Any]:
    """The same for ``torch.autograd.grad``, which visits only what leads to its inputs: here to the
    leaf that both operands, or one of them, come from."""
    found: list[Any] = []

    def penalty(y: torch.Tensor, wanted: torch.Tensor, leaf: torch.Tensor) -> Any:
        (grad,) = torch.autograd.grad((y * y.detach()).sum(), wanted, create_graph=True)
        return caught(lambda: torch.autograd.grad((grad * leaf.sum()).sum(), leaf))

    for saves in (False, True):
        with ficco.options(save_gathered=saves):
            for operator in OPERATORS:
                case = case_of(operator, at.world, 4, 6, 8)
                for leaf, other in ("ab", "ba"):
                    made = dict(zip("ab", operands(case, make(case, at.world), at), strict=True))
                    scaled = {leaf: 2 * made[leaf], other: made[other]}
                    y = product(case, scaled["a"], scaled["b"])
                    found.append(penalty(y, made[other], made[leaf]))
            for layer in _layers(at):
                x, w = torch.ones(4, 6, requires_grad=True), torch.ones(8, 6, requires_grad=True)
                found += [penalty(layer(2 * x, w), w, x), penalty(layer(x, 2 * w), x, w)]
    x = torch.ones(4, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(functional.sum_gradient(x).square().sum(), x, create_graph=True)
    return [*found, caught(lambda: torch.autograd.grad(grad.sum(), x))]


@pytest.mark.parametrize("asks", [_second_derivatives, _second_derivatives_towards])
def test_second_derivatives_are_refused(asks: Callable[[Rank], list[Any]]) -> None:
    for found in (failure for rank in run(2, asks) for failure in rank):
        assert isinstance(found, Failure) and "second derivatives" in found.text


def _transforms(at: Rank) -> list[Any]:
    """What ``torch.func`` and batched gradients ask for; the group goes on."""
    a, b = torch.ones(at.world, 4), torch.ones(4, 2)
    found = []
    for call in (
        ficco.all_gather_matmul,
        ficco.matmul_reduce_scatter,
        lambda a, b: functional.reduced_linear(a, b.t(), None, group=dist.group.WORLD),
        lambda a, b: functional.copied_linear(a, b.t(), None, group=dist.group.WORLD),
        lambda a, b: functional.sum_gradient(a) @ b,
    ):
        found.append(caught(lambda call=call: torch.func.grad(lambda a: call(a, b).sum())(a)))
        found.append(caught(lambda call=call: torch.func.jacrev(lambda b: call(a, b))(b)))
        x = a.clone().requires_grad_()
        y = call(x, b)
        batched = partial(torch.autograd.grad, y, x, torch.ones(3, *y.shape))
        found.append(caught(partial(batched, is_grads_batched=True)))
        (one,) = torch.autograd.grad(call(x, b).sum(), x)
        assert one.unique().numel() == 1, "the group does not go on"
    return found


def test_transforms_and_batched_gradients_are_refused() -> None:
    for failures in run(2, _transforms):
        assert len(failures) == 15
        for failure, text in zip(failures, ("func.grad", "func.grad", "batched") * 5, strict=True):
            assert isinstance(failure, Failure) and failure.type == "NotImplementedError", failure
            assert text in failure.text, failure


def _constant_gradients(at: Rank) -> None:
    """The gradient of the one operand that needs one depends on nothing that does."""
    for operator in OPERATORS:
        for needs in "ab":
            case = case_of(operator, at.world, 4, 6, 8, needs=needs)
            a, b = operands(case, make(case, at.world), at)
            operand = a if needs == "a" else b
            (grad,) = torch.autograd.grad(product(case, a, b).sum(), operand, create_graph=True)
            assert not grad.requires_grad
    for layer in _layers(at):
        x, w = torch.ones(4, 6), torch.ones(8, 6, requires_grad=True)
        (grad,) = torch.autograd.grad(layer(x, w).sum(), w, create_graph=True)
        assert not grad.requires_grad


def test_gradients_that_are_constant_are_not_refused() -> None:
    run(2, _constant_gradients)


def _broken_dual(at: Rank) -> tuple[str, int]:
    """What is gathered beside the dual call is waited for, although that call raises."""
    case = case_of("all_gather_matmul", at.world, 4, 6, 8)
    a, b = operands(case, make(case, at.world), at)
    y = product(case, a, b)
    waits: list[Any] = []
    real_dual, real_regather = gradients._dual, gradients._regather

    def dual(*args: Any) -> Any:
        raise RuntimeError("on purpose")

    def regather(*args: Any) -> Any:
        wait = real_regather(*args)
        return lambda: waits.append(wait()) or waits[-1]

    gradients._dual, gradients._regather = dual, regather
    try:
        failure = caught(lambda: y.sum().backward())
    finally:
        gradients._dual, gradients._regather = real_dual, real_regather
    return failure.text, len(waits)


def test_what_runs_beside_a_call_that_raises_is_waited_for() -> None:
    assert run(2, _broken_dual) == [("on purpose", 1)] * 2


def _changed_operand(at: Rank) -> Any:
    case = case_of("matmul_reduce_scatter", at.world, 4, 6, 8)
    a, b = operands(case, make(case, at.world), at)
    kept = a * 1
    y = product(case, kept, b)
    kept.zero_()
    return caught(lambda: y.sum().backward())


def test_operands_must_not_change_before_the_backward() -> None:
    for found in run(2, _changed_operand):
        assert isinstance(found, Failure) and "modified by an inplace operation" in found.text


# Options.


def _options_in_backward(at: Rank, operator: str, other_thread: bool) -> None:
    case = case_of(operator, at.world, 4, 6, 8)
    made = make(case, at.world)
    a, b = operands(case, made, at)
    with ficco.options(timeout_s=31.5, replay=False) as inside:
        y = product(case, a, b)
    seen: list[Any] = []

    def back() -> None:
        with noted(seen), ficco.options(timeout_s=17.0):
            y.backward(made.g[at.rank].to(y))
            assert current().timeout_s == 17.0

    if other_thread:
        thread = threading.Thread(target=back)
        thread.start()
        thread.join()
    else:
        back()
    assert seen and all(options == inside for _, _, options in seen), seen
    same(a.grad, made.grad_a[at.rank], "a")


@pytest.mark.parametrize("operator", OPERATORS)
def test_options_of_the_forward_are_those_of_the_backward(operator: str, device: str) -> None:
    run(2, _options_in_backward, operator, False, device=device)
    run(2, _options_in_backward, operator, True, device=device)


# Ranks that disagree.


def _ranks_that_differ(at: Rank, operator: str) -> dict[tuple[str, str], Any]:
    found = {}
    for needs in [("ab", "b"), ("ab", "a"), ("b", "a"), ("ab", "")]:
        group = dist.new_group(list(range(at.world)))
        case = case_of(operator, at.world, 4, 6, 8, needs=needs[at.rank])
        made = make(case, at.world)
        a, b = operands(case, made, at)

        def step(case: Case = case, a: Any = a, b: Any = b, group: Any = group) -> None:
            with ficco.options(timeout_s=5):
                y = product(case, a, b, group)
                if y.requires_grad:
                    y.sum().backward()
                product(case, a, b, group)  # the next step

        found[needs] = caught(step)
        ficco.close(group)
        dist.barrier()
        dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("operator", OPERATORS)
def test_ranks_that_need_other_gradients_learn_it(operator: str) -> None:
    for found in run(2, _ranks_that_differ, operator):
        for needs, failure in found.items():
            assert isinstance(failure, Failure) and failure.type == "RankMismatch", (needs, failure)
            assert f"of {operator}" in failure.text and "for the gradient" in failure.text
            assert failure.text.count("for the gradient") == (2 if needs[1] else 1), failure.text


# Calls beside and inside others.


def _checkpointed(at: Rank) -> None:
    """Forwards that run again inside a backward, between the calls of other backwards."""
    first = case_of("all_gather_matmul", at.world, 4, 6, 8)
    second = Case("matmul_reduce_scatter", first.rows, 8, 6)
    one, two = make(first, at.world), make(second, at.world)
    (a, b), (_, c) = operands(first, one, at), operands(second, two, at)

    def block(a: torch.Tensor) -> torch.Tensor:
        return product(second, product(first, a, b), c)

    grads = []
    for wrapped in (False, True):
        y = checkpoint(block, a, use_reentrant=False) if wrapped else block(a)
        grads.append(torch.autograd.grad(y.sum(), (a, b, c)))
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again)
    assert all(grad.abs().sum() > 0 for grad in grads[0])


def test_operators_in_a_checkpointed_block(device: str) -> None:
    run(3, _checkpointed, device=device)


class _CallsInBackward(torch.autograd.Function):
    """The identity; its backward makes a call with gradients of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, at: Rank, operator: str) -> torch.Tensor:
        ctx.at, ctx.operator = at, operator
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        enabled_exact(ctx.at, case_of(ctx.operator, ctx.at.world, 3, 5, 7), 5)
        return grad, None, None


@torch.enable_grad()
def enabled_exact(at: Rank, case: Case, iteration: int) -> None:
    exact(at, case, iteration)


def _inside(at: Rank, outer: str, inner: str) -> None:
    case = case_of(outer, at.world, 4, 6, 8)
    made = make(case, at.world)
    a, b = operands(case, made, at)
    y = product(case, _CallsInBackward.apply(a, at, inner), b)
    y.register_hook(lambda grad: enabled_exact(at, case_of(inner, at.world, 2, 9, 3), 6))
    y.backward(made.g[at.rank].to(y))
    same(a.grad, made.grad_a[at.rank], "a")
    same(b.grad, made.grad_b[at.rank], "b")


@pytest.mark.parametrize("outer", OPERATORS)
def test_a_call_inside_a_backward(outer: str, device: str) -> None:
    for inner in OPERATORS:
        run(2, _inside, outer, inner, device=device)


def _mesh(at: Rank) -> None:
    """Tensor parallel inside data parallel: the ranks of a row shard a layer, those of a column
    have other data and share their gradients."""
    mesh = init_device_mesh(at.device.type, (2, at.world // 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"], mesh["dp"]
    replica, rank, width = dp.get_local_rank(), tp.get_local_rank(), tp.size()
    up = case_of("all_gather_matmul", width, 3, 4, 5)
    down = Case("matmul_reduce_scatter", up.rows, 5, 4)
    made = [(make(up, width, 10 * i), make(down, width, 10 * i)) for i in range(2)]
    # Weights are those of replica 0; data and gradients of the result are each replica's own.
    want: list[torch.Tensor] = []
    for i in range(2):
        a = [x.detach().requires_grad_() for x in made[i][0].a]
        b = [x.detach().requires_grad_() for x in made[0][0].b]
        c = [x.detach().requires_grad_() for x in made[0][1].b]
        y = together(down, together(up, a, b), c)
        sum((y[r] * made[i][1].g[r]).sum() for r in range(width)).backward()
        want.append(torch.cat([b[rank].grad.flatten(), c[rank].grad.flatten()]))
    for group in (tp, tp.get_group()):
        leaves = (made[replica][0].a, made[0][0].b, made[0][1].b)
        a, b, c = (some[rank].to(at.device, torch.float32).requires_grad_() for some in leaves)
        y = product(down, product(up, a, b, group), c, group)
        y.backward(made[replica][1].g[rank].to(y))
        found = torch.cat([b.grad.flatten(), c.grad.flatten()])
        dist.all_reduce(found, group=dp.get_group())
        assert torch.equal(found.cpu().double(), want[0] + want[1])
    both = caught(lambda: product(up, a, b, mesh))
    assert isinstance(both, Failure) and both.type == "ValueError", both
    assert "mesh['tp']" in both.text and "got one of 2" in both.text
    ficco.close(tp.get_group())


def test_tensor_parallel_inside_data_parallel(device: str) -> None:
    run(4, _mesh, device=device)


def _groups_in_threads(at: Rank, count: int) -> None:
    """One group for each thread: calls of a group keep their order, those of threads do not."""
    groups = [dist.new_group(list(range(at.world))) for _ in range(2)]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for iteration in range(count):
                operator = OPERATORS[(iteration + index) % len(OPERATORS)]
                case = case_of(operator, at.world, 2 + index, 5, 6)
                exact(at, case, 100 * index + iteration, groups[index])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    for group in groups:
        ficco.close(group)
        dist.destroy_process_group(group)


def test_backwards_of_two_groups_at_once() -> None:
    run(2, _groups_in_threads, 15)


def _threads_in_turn(at: Rank, count: int) -> None:
    """Threads that share a group take turns, in the same order on all ranks."""
    turn, ready = [0], threading.Condition()
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for iteration in range(index, count, 2):
                with ready:
                    assert ready.wait_for(lambda it=iteration: turn[0] >= it, 30)
                    operator = OPERATORS[iteration % len(OPERATORS)]
                    exact(at, case_of(operator, at.world, 2 + index, 5, 6), iteration)
                    turn[0] += 1
                    ready.notify_all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def test_threads_that_take_turns_on_a_group() -> None:
    run(3, _threads_in_turn, 20)


def _jitter(at: Rank) -> None:
    with disturb(Disturbance(delay_s=0.003, seed=3)):
        for iteration in range(3):
            for operator in OPERATORS:
                exact(at, case_of(operator, at.world, 4, 6, 8), iteration)


def test_jittered_backwards() -> None:
    run(3, _jitter)


# Autocast.


def _autocast(at: Rank, operator: str) -> None:
    """Operands are cast as those of torch.mm are; gradients come back in the operands' dtypes."""
    case = case_of(operator, at.world, 4, 6, 8)
    made = make(case, at.world)
    kind = at.device.type
    for dtype_b in (torch.float32, torch.bfloat16):
        a, b = operands(case, made, at)
        b = b.detach().to(dtype_b).requires_grad_()
        with torch.autocast(kind, dtype=torch.bfloat16):
            y = product(case, a, b)
            assert y.dtype == torch.mm(b.t(), b).dtype == torch.bfloat16
            if at.world == 2:  # also where the backward is inside, against PyTorch's advice
                y.backward(made.g[at.rank].to(y))
        if at.world != 2:
            y.backward(made.g[at.rank].to(y))
        assert a.grad.dtype == torch.float32 and b.grad.dtype == dtype_b
        same(a.grad, made.grad_a[at.rank], "a")
        same(b.grad, made.grad_b[at.rank], "b")
        with torch.autocast(kind, dtype=torch.bfloat16), torch.no_grad():
            assert product(case, a, b).dtype == torch.bfloat16
        with torch.autocast(kind, enabled=False), torch.no_grad():
            if dtype_b == torch.float32:
                assert product(case, a, b).dtype == torch.float32
    if kind != "cpu":
        return
    wide = case.on(dtype="float64")
    with torch.autocast(kind, dtype=torch.bfloat16):
        assert product(wide, *operands(wide, made, at)).dtype == torch.float64


def _backward_under_autocast(at: Rank, operator: str) -> None:
    """A backward inside a block of autocast, against PyTorch's advice, loses nothing."""
    case = case_of(operator, at.world, 4, 6, 8)
    made = make(case, at.world)
    found = []
    for enabled in (False, True):
        a, b = operands(case, made, at)
        with torch.no_grad():
            a *= 1 + 2.0**-20  # not a number of bfloat16
        y = product(case, a, b)
        with torch.autocast(at.device.type, dtype=torch.bfloat16, enabled=enabled):
            y.backward(made.g[at.rank].to(y))
        found.append((a.grad, b.grad))
    for plain, inside in zip(*found, strict=True):
        assert torch.equal(plain, inside)


def test_backwards_inside_autocast(device: str) -> None:
    for operator in OPERATORS:
        run(2, _backward_under_autocast, operator, device=device)


@ranks(2, 3)
def test_gradients_under_autocast(world: int, device: str) -> None:
    for operator in OPERATORS:
        run(world, _autocast, operator, device=device)


def _layers_of_a_part(at: Rank) -> list[int]:
    """What layers keep whose weights are frozen, and what autocast makes of float64."""
    world = dist.group.WORLD
    x, one, two = torch.ones(4, 8), torch.ones(6, 8), torch.ones(2, 8)
    calls = (
        lambda: functional.gathered_linears(x, [one, two], [None] * 2, group=world)[0],
        lambda: functional.reduced_linear(x, one, None, group=world),
        lambda: functional.copied_linear(x, one, None, group=world),
    )
    for layer in calls:
        with torch.autocast("cpu", torch.bfloat16):
            assert layer().dtype == torch.bfloat16
    x.requires_grad_()
    kept: list[int] = []
    shapes: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: shapes.append(t.shape) or t, lambda t: t
    ):
        for layer in calls:
            for save in (False, True):
                with ficco.options(save_gathered=save):
                    y = layer()
                kept.append(sum(shape[0] not in (len(one), len(two)) for shape in shapes))
                shapes.clear()
                y.sum().backward()
    x, one, two = x.detach().double(), one.double(), two.double()
    for layer in calls:
        with torch.autocast("cpu", torch.bfloat16):
            assert layer().dtype == torch.float64
    return kept


def test_layers_keep_and_cast_what_torch_does() -> None:
    assert run(2, _layers_of_a_part) == [[0] * 6] * 2
