"""Gradients of the operators: the gradients of the sum over all ranks of <y_r, g_r>. The contract
compares them for all schedules. These tests cover autograd: layouts, options, errors, autocast."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any
from unittest import mock

import pytest
import subjects
import torch
import torch.distributed as dist
from ranks import Failure, Rank, caught, leave, on_ranks
from subjects import SUBJECTS, integers, reference
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import ficco
from ficco.nn import functional
from ficco.ops import gradients
from ficco.options import current

AG, A2A, RS, MA2A, AR, AGT, A2AT = OPERATORS = (
    *("all_gather_matmul", "all_to_all_matmul", "matmul_reduce_scatter", "matmul_all_to_all"),
    *("matmul_all_reduce", "all_gather_transposed_matmul", "all_to_all_transposed_matmul"),
)
GATHERING = OPERATORS[:2]
BLOCKS = A2A, MA2A, A2AT


@dataclass(frozen=True)
class Case:
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
        flat = [size for row in self.rows for size in (row if isinstance(row, tuple) else (row,))]
        return len(set(flat)) == 1 or self.operator == "matmul_all_reduce"

    @property
    def of_subject(self) -> subjects.Case:
        return subjects.Case(self.rows, (self.k, self.n))

    def rows_in(self, rank: int) -> int:
        return len(SUBJECTS[self.operator].make(self.of_subject, rank, 0)[0])

    def rows_of_b(self, rank: int) -> int:
        return len(SUBJECTS[self.operator].make(self.of_subject, rank, 0)[1])


def case_of(operator: str, world: int, rows: int, k: int, n: int, **rest: Any) -> Case:
    each: Any = (rows,) * world
    if operator in BLOCKS:
        each = ((rows,) * world,) * world
    return Case(operator, each, k, n, **rest)


def uneven(operator: str, world: int) -> Any:
    if operator in BLOCKS:
        return tuple(tuple((3 * i + 5 * j + i * j) % 4 for j in range(world)) for i in range(world))
    return (4, 0, 3, 5)[:world]


#: Operands, gradients of results, results, and gradients of operands, of all ranks, in float64.
Sample = namedtuple("Sample", "a b g y grad_a grad_b")


def make(case: Case, world: int, iteration: int = 0) -> Sample:
    subject = SUBJECTS[case.operator]
    leaves, results, grads = reference(subject, case.of_subject, world, iteration)
    a, b = zip(*leaves, strict=True)
    plain = [[x.detach() for x in operand] for operand in (a, b)]
    first = [[x[0] for x in tensors] for tensors in (grads, results)]
    return Sample(*plain, *first, [x.grad for x in a], [x.grad for x in b])


def operands(case: Case, sample: Sample, at: Rank) -> tuple[Any, Any]:
    kind = getattr(torch, case.dtype)
    a, b = (x[at.rank].to(at.device, kind, copy=True) for x in (sample.a, sample.b))
    if case.leading and len(a) % 2 == 0:
        a = a.view(2, len(a) // 2, case.k)
    return a.requires_grad_("a" in case.needs), b.requires_grad_("b" in case.needs)


def product(case: Case, a: torch.Tensor, b: torch.Tensor, group: Any = None) -> torch.Tensor:
    return getattr(ficco, case.operator)(a, b, group=group, **case.arguments())


def exact(at: Rank, case: Case, iteration: int = 0, group: Any = None) -> None:
    members = group.get_group() if isinstance(group, DeviceMesh) else group
    member = replace(at, rank=dist.get_rank(members), world=dist.get_world_size(members))
    whole = case.of_subject.on(needs=(True, True))
    subjects.exact(member, SUBJECTS[case.operator], whole, iteration, group)


def same(result: torch.Tensor | None, want: torch.Tensor, about: str) -> None:
    assert result is not None, f"{about} is missing"
    assert result.shape == want.shape, f"{about}: shape {result.shape}, wanted {want.shape}"
    want = want.detach().to(result.device)
    assert want.numel() == 0 or want.abs().max() <= 256, f"{about}: not exact in bfloat16"
    wrong = (result.detach().double() != want).nonzero()
    assert not len(wrong), f"{about}: {len(wrong)} of {want.numel()} wrong, first {wrong[0]}"


def of_each(check: Callable[..., None]) -> Callable[[Rank], None]:
    """Run a check for every operator."""

    @wraps(check)
    def check_each(at: Rank) -> None:
        for operator in OPERATORS:
            case = case_of(operator, at.world, 4, 6, 8)
            check(at, case, make(case, at.world))

    del check_each.__wrapped__  # type: ignore[attr-defined]
    return check_each


@on_ranks(3)
@of_each
def test_gradients_of_random_data(at: Rank, case: Case, sample: Sample) -> None:
    """Errors of gradients are at most those of rounding: float32 sums of products and, in a narrow
    dtype, one rounding of a partial sum for each rank."""
    subject, rng = SUBJECTS[case.operator], torch.Generator().manual_seed(3)
    kind = (torch.bfloat16, torch.float32)[OPERATORS.index(case.operator) % 2]
    data = [
        [torch.randn(x.shape, generator=rng).to(kind).double() for x in tensors]
        for tensors in (sample.a, sample.b, sample.g)
    ]

    def grads(sign: Any) -> tuple[Any, Any]:
        a, b, g = ([sign(x).requires_grad_() for x in tensors] for tensors in data)
        y = subject.together(case.of_subject, list(zip(a, b, strict=True)), 0)
        sum((result * grad).sum() for (result,), grad in zip(y, g, strict=True)).backward()
        return a[at.rank].grad, b[at.rank].grad

    a, b, g = (tensors[at.rank].to(at.device, kind) for tensors in data)
    product(case, a.requires_grad_(), b.requires_grad_()).backward(g)
    unit = 2.0**-24 * 200  # fewer than 200 terms
    narrow = torch.finfo(kind).eps if kind.itemsize < 4 else 0.0
    for leaf, want, size in zip((a, b), grads(torch.clone), grads(torch.abs), strict=True):
        error = (leaf.grad.cpu().double() - want).abs()
        assert (error <= (unit + narrow) * size).all(), (case, kind)


# Calls of a backward, and tensors saved for it.


@contextmanager
def noted(into: list[Any], module: Any = gradients) -> Iterator[None]:
    """Append the calls of backwards, or of ``module``: operator, product or gather, options."""
    real = module.run

    def spy(operator: str, a: Any, b: Any, *rest: Any, **more: Any) -> Any:
        into.append((operator, "product" if b.shape[1] else "gather", current()))
        return real(operator, a, b, *rest, **more)

    with mock.patch.object(module, "run", spy):
        yield


#: Calls of a backward for the gradient of a, of b and of both: the duals, and a gather of A.
CALLS = {
    AG: {"a": [RS], "b": [AGT], "ab": [f"gather by {AG}", RS]},
    A2A: {"a": [MA2A], "b": [A2AT], "ab": [f"gather by {A2A}", MA2A]},
    RS: {"a": [AG], "b": [AGT], "ab": [AG]},
    MA2A: {"a": [A2A], "b": [A2AT], "ab": [A2A]},
    AR: {needs: [f"gather by {A2A}", dual] for needs, dual in (("a", AG), ("b", AGT), ("ab", AG))},
    AGT: {"a": [RS], "b": [AG], "ab": [RS, AG]},
    A2AT: {"a": [MA2A], "b": [A2A], "ab": [MA2A, A2A]},
}


@on_ranks(3)
def test_only_what_is_needed_is_called(at: Rank) -> None:
    for operator, needs, saves in itertools.product(CALLS, ("a", "b", "ab"), (False, True)):
        case, want = case_of(operator, at.world, 4, 6, 8, needs=needs), CALLS[operator][needs]
        with ficco.options(save_gathered=saves):
            y = product(case, *operands(case, make(case, at.world), at))
        seen: list[Any] = []
        with noted(seen):
            y.sum().backward()
        calls = [name if kind == "product" else f"gather by {name}" for name, kind, _ in seen]
        if saves and operator in GATHERING:  # only the call for the gradient of a
            want = [name for name in want if name in (RS, MA2A)]
        assert calls == want, (operator, needs, saves)


@on_ranks(3)
def test_equal_gradients_need_no_peer(at: Rank) -> None:
    """All ranks compute the same from the result, as in Megatron-LM. The sum over the ranks counts
    their common gradient W times; with "equal" it counts once."""
    case = case_of(AR, at.world, 4, 6, 8)
    a, b = operands(case, make(case, at.world), at)
    with ficco.options(all_reduce_gradients="equal"):
        y = product(case, a, b)
    seen: list[Any] = []
    grad = integers(1, 3, shape=y.shape)
    with noted(seen):
        y.backward(grad.to(y))
    same(a.grad, grad @ b.double().t(), "a")
    same(b.grad, a.double().t() @ grad, "b")
    assert not seen


@on_ranks(3)
def test_only_what_is_needed_is_kept(at: Rank) -> None:
    """Elements saved for the backward, without the weight: m k if the gathered A is saved, m k / W
    if it is gathered again, and none if the weight needs no gradient. Layers with frozen weights
    save only the weights."""
    saved: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    kinds = itertools.product(GATHERING, (("ab", False), ("ab", True), ("a", True)))
    for operator, (needs, saves) in kinds:
        case = case_of(operator, at.world, 8, 16, 8, needs=needs)
        a, b = operands(case, make(case, at.world), at)
        saved.clear()
        with hooks, ficco.options(save_gathered=saves):
            product(case, a, b).sum().backward()
        storages = (tensor.untyped_storage() for tensor in saved)
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        sizes.pop(b.untyped_storage().data_ptr(), None)
        copies = at.world if saves and operator == AG else 1
        assert sum(sizes.values()) == (a.nbytes * copies if needs == "ab" else 0), (operator, saves)
    saved.clear()
    x, weights = torch.ones(4, 8, requires_grad=True), [torch.ones(6, 8), torch.ones(2, 8)]
    for saves in (False, True):
        with hooks, ficco.options(save_gathered=saves):
            functional.gathered_linears(x, weights, [None] * 2)[0].sum().backward()
            functional.reduced_linear(x, weights[0]).sum().backward()
            functional.copied_linear(x, weights[0]).sum().backward()
    assert saved and all(len(tensor) in (6, 2) for tensor in saved)


@pytest.mark.parametrize("save", [False, True])
@on_ranks(3)
def test_gradient_through_the_gathered_a(at: Rank, save: bool) -> None:
    case = Case(AG, rows := (4, 0, 3), 6, 8)
    a, b = operands(case, make(case, at.world), at)
    others = [integers(1, 99, rank, shape=(sum(rows), case.k)) for rank in range(at.world)]
    with ficco.options(save_gathered=save):
        _, gathered = ficco.all_gather_matmul(a, b, return_gathered=True, rows=rows)
    gathered.backward(others[at.rank].to(gathered))
    same(a.grad, sum(others).split(rows)[at.rank], "a")
    assert b.grad is None or not b.grad.any()


@on_ranks(2)
@of_each
def test_gradients_in_any_layout(at: Rank, case: Case, sample: Sample) -> None:
    """An expanded gradient, a transposed one, and one with the negative bit."""
    own = sample.g[at.rank].float()
    negative = torch._neg_view(-own)  # as (-1j * z).conj().imag and the like are
    a, b = operands(case, sample, at)
    y = product(case, a, b)
    for g in (torch.ones(()).expand(own.shape), own.t().contiguous().t(), negative):
        forms = g.to(at.device), g.contiguous().to(at.device).resolve_neg()
        pairs = (torch.autograd.grad(y, (a, b), grad, retain_graph=True) for grad in forms)
        assert all(map(torch.equal, *pairs)), (case, g.stride())


@on_ranks(2)
@of_each
def test_gradients_of_views(at: Rank, case: Case, sample: Sample) -> None:
    plain = [x.detach() for x in operands(case, sample, at)]
    wide = [x.new_full((2 * len(x), x.shape[1] + 5), 77) for x in plain]
    for views in (
        [w[: len(x), 3 : 3 + x.shape[1]] for w, x in zip(wide, plain, strict=True)],
        [w[::2, : x.shape[1]] for w, x in zip(wide, plain, strict=True)],
        [x.t().contiguous().t() for x in plain],
        [torch._neg_view(x.clone()) for x in plain],
    ):
        a, b = (view.copy_(x).requires_grad_() for view, x in zip(views, plain, strict=True))
        y = product(case, a, b)
        same(y, sample.y[at.rank], "the product")
        grad_a, grad_b = torch.autograd.grad(y, (a, b), sample.g[at.rank].to(y))
        same(grad_a, sample.grad_a[at.rank], "a")
        same(grad_b, sample.grad_b[at.rank], "b")
        (only,) = torch.autograd.grad(product(case, a.detach(), b), b, sample.g[at.rank].to(y))
        same(only, sample.grad_b[at.rank], "b, the only gradient")
        # The gradient of a transposed weight has the weight's strides, so that nothing copies it.
        by_columns = (1, len(b))
        strides = by_columns if b.stride() == by_columns else (case.n, 1)
        assert grad_b.stride() == only.stride() == strides


@on_ranks(2)
def test_second_derivatives_are_refused(at: Rank) -> None:
    """Second derivatives by one operand or both raise: :func:`torch.autograd.grad` visits only the
    paths to its inputs. First derivatives with ``create_graph=True`` are right."""
    cases = [case_of(operator, at.world, 4, 6, 8) for operator in OPERATORS]
    samples = [operands(case, make(case, at.world), at) for case in cases]
    calls: list[Any] = [(partial(product, c), *s) for c, s in zip(cases, samples, strict=True)]
    x, w = torch.ones(4, 6, requires_grad=True), torch.ones(8, 6, requires_grad=True)
    calls += [
        (lambda x, w: torch.cat(functional.gathered_linears(x, (w, 2 * w), (None,) * 2)), x, w),
        (functional.reduced_linear, x, w),
        (functional.copied_linear, x, w),
    ]
    for call, a, b in calls:
        y = call(a, b).square()
        first = torch.autograd.grad(y.sum(), (a, b), retain_graph=True)
        again = torch.autograd.grad(y.sum(), (a, b), create_graph=True)
        assert all(map(torch.equal, first, again))
        refused = [caught(grad.sum().backward) for grad in again]
        for leaf, other in ((a, b), (b, a)):
            for saves in (False, True):
                with ficco.options(save_gathered=saves):
                    y = call(2 * a, b) if leaf is a else call(a, 2 * b)
                loss = (y * y.detach()).sum()
                (grad,) = torch.autograd.grad(loss, other, create_graph=True)
                second = partial(torch.autograd.grad, (grad * leaf.sum()).sum(), leaf)
                refused.append(caught(second))
            # The gradient of the only operand that needs one depends on no such operand.
            y = call(a, b.detach()) if leaf is a else call(a.detach(), b)
            (grad,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
            assert not grad.requires_grad
        assert all("second derivatives" in failure.text for failure in refused), refused


@on_ranks(2)
def test_a_dual_call_that_raises(at: Rank) -> None:
    """The backward waits for the gathered A even if the dual call raises."""
    case = case_of(AG, at.world, 4, 6, 8)
    y = product(case, *operands(case, make(case, at.world), at))
    waits: list[Any] = []
    regather = gradients._regather

    def gathered(*args: Any) -> Any:
        wait = regather(*args)
        return lambda: waits.append(wait()) or waits[-1]

    broken = RuntimeError("on purpose")
    with mock.patch.object(gradients, "_dual", side_effect=broken):
        with mock.patch.object(gradients, "_regather", gathered):
            assert caught(lambda: y.sum().backward()).text == "on purpose"
    assert len(waits) == 1


@on_ranks(2)
def test_a_changed_operand_is_refused(at: Rank) -> None:
    case = case_of(RS, at.world, 4, 6, 8)
    a, b = operands(case, make(case, at.world), at)
    operand = a * 1
    y = product(case, operand, b)
    operand.zero_()
    assert "modified by an inplace operation" in caught(lambda: y.sum().backward()).text


# Options, and ranks that disagree.


@on_ranks(2)
@of_each
def test_a_backward_takes_the_options_of_its_forward(at: Rank, case: Case, sample: Sample) -> None:
    """The backward may run in another thread."""
    a, b = operands(case, sample, at)
    with ficco.options(timeout_s=31.5, replay=False) as inside:
        results = [product(case, a, b) for _ in range(2)]
    seen: list[Any] = []

    def back(y: torch.Tensor) -> None:
        with noted(seen), ficco.options(timeout_s=17.0):
            y.backward(sample.g[at.rank].to(y))
            assert current().timeout_s == 17.0

    back(results[0])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(back, results[1]).result()
    assert len(seen) > 1 and all(options == inside for _, _, options in seen), seen
    same(a.grad, 2 * sample.grad_a[at.rank], "a")


@on_ranks(2)
@of_each
def test_ranks_that_need_other_gradients_learn_it(at: Rank, case: Case, sample: Sample) -> None:
    for needs in [("ab", "b"), ("ab", "a"), ("b", "a"), ("ab", "")]:
        group = dist.new_group(list(range(at.world)))
        a, b = operands(case.on(needs=needs[at.rank]), sample, at)

        def step(a: Any = a, b: Any = b, group: Any = group) -> None:
            with ficco.options(timeout_s=5):
                y = product(case, a, b, group)
                if y.requires_grad:
                    y.sum().backward()
                product(case, a, b, group)  # the next step

        failure = caught(step)
        assert isinstance(failure, Failure) and failure.type == "RankMismatch", (needs, failure)
        assert f"of {case.operator}" in failure.text and "for the gradient" in failure.text
        assert failure.text.count("for the gradient") == (2 if needs[1] else 1), failure.text
        ficco.close(group)
        dist.barrier()
        dist.destroy_process_group(group)


# Calls during and inside other calls.


@on_ranks(3)
def test_operators_in_a_checkpointed_block(at: Rank) -> None:
    """A checkpoint recomputes forwards inside a backward, between the calls of other backwards."""
    first = case_of("all_gather_matmul", at.world, 4, 6, 8)
    second = Case("matmul_reduce_scatter", first.rows, 8, 6)
    (a, b), (_, c) = (operands(case, make(case, at.world), at) for case in (first, second))

    def block(a: torch.Tensor) -> torch.Tensor:
        return product(second, product(first, a, b), c)

    grads = []
    for y in (block(a), checkpoint(block, a, use_reentrant=False)):
        grads.append(torch.autograd.grad(y.sum(), (a, b, c)))
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again) and plain.abs().sum() > 0


@on_ranks(2)
@of_each
def test_a_call_inside_a_backward(at: Rank, case: Case, sample: Sample) -> None:
    index = OPERATORS.index(case.operator)

    @torch.enable_grad()
    def hook(grad: torch.Tensor) -> None:
        for step in (0, 1, 3):
            exact(at, case_of(OPERATORS[(index + step) % len(OPERATORS)], at.world, 3, 5, 7), 5)

    a, b = operands(case, sample, at)
    same_a = a.view_as(a)
    y = product(case, same_a, b)
    same_a.register_hook(hook)
    y.register_hook(hook)
    y.backward(sample.g[at.rank].to(y))
    same(a.grad, sample.grad_a[at.rank], "a")
    same(b.grad, sample.grad_b[at.rank], "b")


@on_ranks(4)
def test_tensor_parallel_inside_data_parallel(at: Rank) -> None:
    """The ranks of a row of the mesh share a layer. The ranks of a column have different data."""
    mesh = init_device_mesh(at.device.type, (2, at.world // 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    for operator in OPERATORS:
        case = case_of(operator, tp.size(), 3, 4, 5)
        for group in (tp, tp.get_group()):
            exact(at, case, mesh["dp"].get_local_rank(), group)
    x = torch.ones(2, 2, device=at.device)
    both = caught(lambda: ficco.all_gather_matmul(x, x, group=mesh))
    assert isinstance(both, Failure) and both.type == "ValueError", both
    assert "mesh['tp']" in both.text and "got one of 2" in both.text
    ficco.close(tp.get_group())


@on_ranks(2)
def test_backwards_of_two_groups_at_once(at: Rank) -> None:
    """Each thread has a group: only calls of one group are ordered."""
    groups = [dist.new_group(list(range(at.world))) for _ in range(2)]

    def work(index: int) -> None:
        for iteration, operator in enumerate(OPERATORS[index:] * 2):
            case = case_of(operator, at.world, 2 + index, 5, 6)
            exact(at, case, 100 * index + iteration, groups[index])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    leave(*groups)


@on_ranks(2)
@of_each
def test_gradients_under_autocast(at: Rank, case: Case, sample: Sample) -> None:
    """Operands are cast as by torch.mm; gradients have the operands' dtypes."""
    kind = at.device.type
    narrow = partial(torch.autocast, kind, dtype=torch.bfloat16)
    for dtype_b in (torch.float32, torch.bfloat16):
        a, b = operands(case, sample, at)
        b = b.detach().to(dtype_b).requires_grad_()
        with narrow():
            y = product(case, a, b)
            assert y.dtype == torch.mm(b.t(), b).dtype == torch.bfloat16
        y.backward(sample.g[at.rank].to(y))
        assert a.grad.dtype == torch.float32 and b.grad.dtype == dtype_b
        same(a.grad, sample.grad_a[at.rank], "a")
        same(b.grad, sample.grad_b[at.rank], "b")
        with narrow(), torch.no_grad():
            assert product(case, a, b).dtype == torch.bfloat16
        with torch.autocast(kind, enabled=False), torch.no_grad():
            if dtype_b == torch.float32:
                assert product(case, a, b).dtype == torch.float32
    if kind == "cpu":
        wide = case.on(dtype="float64")
        with narrow():
            assert product(wide, *operands(wide, sample, at)).dtype == torch.float64


@on_ranks(2)
@of_each
def test_backwards_inside_autocast(at: Rank, case: Case, sample: Sample) -> None:
    """A backward under autocast, which PyTorch advises against, loses no precision."""
    results = []
    for enabled in (False, True):
        a, b = operands(case, sample, at)
        with torch.no_grad():
            a *= 1 + 2.0**-20  # not representable in bfloat16
        y = product(case, a, b)
        with torch.autocast(at.device.type, dtype=torch.bfloat16, enabled=enabled):
            y.backward(sample.g[at.rank].to(y))
        results.append((a.grad, b.grad))
    for plain, inside in zip(*results, strict=True):
        assert torch.equal(plain, inside)
