"""The backward of every operator is its dual operator, overlapped in the same way.

Gradients are those of the sum over all ranks of <result, gradient of the result>: the gradient of
a rank's result accounts for everything that all ranks together do with it. Let dY be the gradient
of a rank's result, and dA and dB those of its operands:

=======================  =================================================  ========================
operator                 dA                                                 dB
=======================  =================================================  ========================
all_gather_matmul        matmul_reduce_scatter(dY, b.t())                   gathered(A).t() @ dY
all_to_all_matmul        matmul_all_to_all(dY, b.t()), rows transposed      exchanged(A).t() @ dY
matmul_reduce_scatter    all_gather_matmul(dY, b.t())                       A.t() @ gathered(dY)
matmul_all_to_all        all_to_all_matmul(dY, b.t()), rows transposed      A.t() @ exchanged(dY)
matmul_all_reduce        all_gather_matmul(s, b.t()), s = rows of sum(dY)   A.t() @ gathered(s)
all_gather_transposed_-  matmul_reduce_scatter(b, dY.t())                   all_gather_matmul(A, dY)
 matmul
all_to_all_transposed_-  matmul_all_to_all(b, dY.t()), rows transposed      all_to_all_matmul(A, dY)
 matmul
=======================  =================================================  ========================

What overlaps with what:

- If only dB is wanted and needs gathered or exchanged rows (of A or dY), it is an
  ``all_gather_transposed_matmul`` or ``all_to_all_transposed_matmul``, which adds up products as
  the rows arrive.
- If dA and dB are wanted, the middle three gather or exchange dY once, under the product for dA,
  and keep it for dB, which is one product of the library.
- If dA and dB are wanted, the upper two need A from the peers once more. By default they gather it
  again, as Megatron-LM does under sequence parallelism. On a GPU those copies are enqueued first,
  on a side stream, and overlap the product for dA and its copies; dB follows, as one
  product of the library.
- With ``options(save_gathered=True)`` the forward of the upper two keeps the gathered A: m k
  elements from forward to backward instead of the m k / W of the shard, and no copies of A in the
  backward.
- A float8 layer (``OperatorCall.recipe``) casts dY and b for dA. dB is a product in the dtype of
  the layer's input; its rows are gathered in that dtype.
- ``matmul_all_reduce``: each rank adds up its rows of all dY in float32, before the gathering
  product starts. ``options(all_reduce_gradients="equal")`` needs no communication.

Only gradients that are needed are computed, and only tensors that they need are saved. Backwards
are calls like any other: all ranks make the same ones in the same order. So the same operands must
need gradients on every rank, and the same results must be used. The ranks compare the purpose of
each call; if it differs, they get ``RankMismatch``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from ficco.accelerator import gpu
from ficco.compute.scaled import dequantized
from ficco.ops.call import Result
from ficco.ops.call import run_unwatched as run
from ficco.ops.operands import LEFT, Scales
from ficco.ops.recipes import Float8Recipe
from ficco.ops.record import Differentiable
from ficco.options import current
from ficco.problems.products import OPERATORS
from ficco.schedules import Schedule

#: Operators that multiply the rows that they gather or exchange: dB needs those rows again.
GATHERS = frozenset({"all_gather_matmul", "all_to_all_matmul"})

#: The operator with the same exchange that sums over the arriving rows, for dB only; and back.
TRANSPOSED = {
    "all_gather_matmul": "all_gather_transposed_matmul",
    "all_to_all_matmul": "all_to_all_transposed_matmul",
    "all_gather_transposed_matmul": "all_gather_matmul",
    "all_to_all_transposed_matmul": "all_to_all_matmul",
}

#: The operator that computes dA and sends it to the rank that it belongs to.
DUAL = {
    "all_gather_matmul": "matmul_reduce_scatter",
    "all_gather_transposed_matmul": "matmul_reduce_scatter",
    "all_to_all_matmul": "matmul_all_to_all",
    "all_to_all_transposed_matmul": "matmul_all_to_all",
    "matmul_reduce_scatter": "all_gather_matmul",
    "matmul_all_to_all": "all_to_all_matmul",
    "matmul_all_reduce": "all_gather_matmul",
}

Rows = Sequence[Any]  # W ints, or a W x W table of them
Gradients = tuple["torch.Tensor | None", "torch.Tensor | None"]


class OperatorCall(NamedTuple):
    """One call of an operator without its operands. ``purpose``: the gradients that it computes;
    ``recipe``: how its operands, and those of the product for dA, are cast to float8."""

    operator: str
    group: ProcessGroup
    schedule: str | Schedule
    rows: Rows | None
    purpose: str = ""
    recipe: Float8Recipe | None = None

    def operands(
        self, a: torch.Tensor, weight: torch.Tensor, backward: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, Scales | None]:
        """Return the operands of ``a @ weight.t()``, cast if there is a recipe, and scales."""
        recipe = self.recipe
        if recipe is None or (backward and recipe.gradient is None):
            return a, weight.t(), None
        return recipe.operands(a, weight, backward)


class SavedTensors(NamedTuple):
    """The tensors that a forward saves for its backward.

    Attributes:
        a, b: the operands; None if no gradient needs them.
        gathered: the rows that the forward gathered or exchanged, if they were saved.
        shape: of ``a``, leading dimensions included.
        columns: b is column-major in memory, so its gradient should be column-major, too.
    """

    a: torch.Tensor | None
    b: torch.Tensor | None
    gathered: torch.Tensor | None
    shape: Sequence[int]
    columns: bool


def backward(
    call: OperatorCall,
    grad: torch.Tensor | None,
    grad_gathered: torch.Tensor | None,
    saved: SavedTensors,
    wanted: Sequence[bool],
) -> Gradients:
    """Return dA and dB, under the options of the forward; None if not wanted or zero.

    Args:
        grad: gradient of the product; None for zero.
        grad_gathered: gradient of the gathered A that the caller got; None for zero.
        wanted: whether dA and dB are wanted.
    """
    grad = None if grad is None else grad.contiguous()
    if saved.a is not None and saved.a.dim() > 2:
        saved = saved._replace(a=saved.a.flatten(0, -2))
    call = call._replace(purpose=_purpose(call.operator, *wanted))
    grad_a = grad_b = None
    if grad is not None:
        grad_a, grad_b = _of_product(call, grad, saved, *wanted)
    if grad_gathered is not None and wanted[0]:
        returned = _returned(call, grad_gathered.contiguous())
        grad_a = returned if grad_a is None else grad_a.add_(returned)
    return None if grad_a is None else grad_a.view(saved.shape), grad_b


@cache
def _purpose(operator: str, to_a: bool, to_b: bool) -> str:
    names = [LEFT[operator]] * to_a + ["b"] * to_b
    return f"for the gradient{'s' * (to_a and to_b)} of {' and '.join(names)} of {operator}"


def _of_product(
    call: OperatorCall, grad: torch.Tensor, saved: SavedTensors, to_a: bool, to_b: bool
) -> Gradients:
    """Return dA as a matrix, and dB, from the gradient of the product."""
    if OPERATORS[call.operator].inner:
        return _of_transposed(call, grad, saved, to_a, to_b)
    if call.operator in GATHERS:
        return _of_gathering(call, grad, saved, to_a, to_b)
    if call.operator != "matmul_all_reduce":
        return _of_scattering(call, grad, saved, to_a, to_b)
    if current().all_reduce_gradients == "equal":
        recipe, grad_a = call.recipe, None
        if to_a and recipe is not None and recipe.gradient:
            grad_a = recipe.product(grad, _required(saved.b), backward=True)
        elif to_a:
            grad_a = _product(grad, _required(saved.b).t())
        return grad_a, weight_gradient(_required(saved.a), grad, saved.columns) if to_b else None
    world, m = call.group.size(), grad.shape[0]
    call = call._replace(rows=tuple(m // world + (rank < m % world) for rank in range(world)))
    return _of_scattering(call, _summed_rows(call, grad), saved, to_a, to_b)


def _of_gathering(
    call: OperatorCall, grad: torch.Tensor, saved: SavedTensors, to_a: bool, to_b: bool
) -> Gradients:
    if not to_a and saved.gathered is None:
        a = _required(saved.a)
        return None, _transposed_product(call, a, grad, a.shape[1], saved.columns)
    gathered, grad_a = saved.gathered, None
    regather = _regather(call, _required(saved.a)) if to_b and gathered is None else None
    try:
        if to_a:
            grad_a, _ = _dual(call, grad, _required(saved.b), False)
    finally:  # the caller's stream waits for the side stream, after an error, too
        gathered = regather() if regather else gathered
    return grad_a, weight_gradient(_required(gathered), grad, saved.columns) if to_b else None


def _of_transposed(
    call: OperatorCall, grad: torch.Tensor, saved: SavedTensors, to_a: bool, to_b: bool
) -> Gradients:
    grad_a = _dual(call, _required(saved.b), grad, False)[0] if to_a else None
    if not to_b:
        return grad_a, None
    a = _required(saved.a)
    height = rows_multiplied(call, a.shape[0])
    return grad_a, _transposed_product(call, a, grad, height, saved.columns)


def _of_scattering(
    call: OperatorCall, grad: torch.Tensor, saved: SavedTensors, to_a: bool, to_b: bool
) -> Gradients:
    # A float8 product for dA gathers cast rows; dB needs rows that are not cast.
    casts = call.recipe is not None and call.recipe.gradient is not None
    grad_a = gathered = None
    if to_a:
        grad_a, gathered = _dual(call, grad, _required(saved.b), to_b and not casts)
    if not to_b:
        return grad_a, None
    if gathered is None:
        a, back = _required(saved.a), _dual_of(call)
        return grad_a, _transposed_product(back, grad, a, grad.shape[1], not saved.columns).t()
    return grad_a, weight_gradient(_required(saved.a), _required(gathered), saved.columns)


def _required(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return a saved tensor, which exists because a wanted gradient needs it."""
    assert tensor is not None
    return tensor


def _transposed_product(
    call: OperatorCall, left: torch.Tensor, right: torch.Tensor, rows: int, columns: bool
) -> torch.Tensor:
    """Return the product of the operator in ``TRANSPOSED``, which has the same exchange. It has
    ``rows`` rows, and is column-major if ``columns``."""
    operator, schedule = TRANSPOSED[call.operator], _schedule(call.schedule, whole_rows=False)
    out = right.new_empty((right.shape[1], rows)).t() if columns else None
    arguments = call.group, schedule, call.rows, False, out, call.purpose
    return run(operator, left, right, *arguments)[0]


def rows_multiplied(call: OperatorCall, m: int) -> int:
    """Return the rows of this rank's result, or of the gathered A if ``inner``, for m rows of A."""
    world, rank, rows = call.group.size(), call.group.rank(), call.rows
    if OPERATORS[call.operator].collective == "all-gather":
        return m * world if rows is None else sum(rows)
    if call.operator == "matmul_reduce_scatter":
        return m // world if rows is None else rows[rank]
    return m if rows is None else sum(row[rank] for row in rows)


def _returned(call: OperatorCall, grad_gathered: torch.Tensor) -> torch.Tensor:
    """Send the gradient of the gathered rows back to the ranks that the rows came from."""
    if OPERATORS[call.operator].blocks:
        return _gathered(call._replace(rows=_rows_back(call)), grad_gathered)
    # All ranks got the same rows, so their gradients add up.
    world = call.group.size()
    rows = call.rows or (grad_gathered.shape[0] // world,) * world
    return _summed_rows(call._replace(rows=rows), grad_gathered)


def weight_gradient(a: torch.Tensor, grad: torch.Tensor, columns: bool) -> torch.Tensor:
    """Return ``a.t() @ grad``, [k, n], column-major if ``columns``: autograd copies a gradient
    whose layout differs from its parameter's."""
    return _product(grad.t(), a).t() if columns else _product(a.t(), grad)


def by_columns(b: torch.Tensor) -> bool:
    """Return whether a matrix is the transpose of a contiguous one, such as ``weight.t()``."""
    return not b.is_contiguous() and b.t().is_contiguous()


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = left.new_empty((left.shape[0], right.shape[1]))
    return torch.mm(left, right, out=out)  # with out=, autocast keeps the dtype


def _rows_back(call: OperatorCall) -> Rows | None:
    """Return ``rows`` of the reverse call, which sends every row back to its origin."""
    if call.rows is None or not OPERATORS[call.operator].blocks:
        return call.rows
    return tuple(zip(*call.rows, strict=True))


def _dual_of(call: OperatorCall) -> OperatorCall:
    """Return the reverse call, by the dual operator."""
    schedule = _schedule(call.schedule)
    rows = _rows_back(call)
    return call._replace(operator=DUAL[call.operator], schedule=schedule, rows=rows)


@cache
def _schedule(schedule: str | Schedule, whole_rows: bool = True) -> str | Schedule:
    """Return the schedule of a backward: the forward's, or "auto" if it suits only the forward. The
    dual of a sum is not a sum, so schedules that sum in place and ``beta`` do not suit it. Neither
    do own schedules, and ``tiled`` if the backward does not multiply ``whole_rows``."""
    if schedule == "auto":
        return schedule
    parsed = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
    unsuited = parsed.beta or parsed.sums_in_place or bool(parsed.own)
    return "auto" if unsuited or (parsed.grouping == "tiled" and not whole_rows) else schedule


def _dual(call: OperatorCall, grad: torch.Tensor, b: torch.Tensor, return_gathered: bool) -> Result:
    operator, group, schedule, rows, purpose, _ = _dual_of(call)
    left, right, scales = call.operands(grad, b, backward=True)
    arguments = group, schedule, rows, return_gathered, None, purpose
    return run(operator, left, right, *arguments, scales=scales)


def _gathered(call: OperatorCall, a: torch.Tensor) -> torch.Tensor:
    """Return only the gathered or exchanged A, by a call whose ``b`` has no columns."""
    empty = a.new_empty((a.shape[1], 0))
    schedule = _schedule(call.schedule, whole_rows=False)
    arguments = call.group, schedule, call.rows, True, None, call.purpose
    return _required(run(call.operator, a, empty, *arguments)[1])


def _summed_rows(call: OperatorCall, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of the sum of all ranks' x, added in float32 and rounded once."""
    world, rank, rows = call.group.size(), call.group.rank(), call.rows
    assert rows is not None
    table = (tuple(rows),) * world
    blocks = _gathered(call._replace(operator="all_to_all_matmul", rows=table), x)
    wide = torch.float32 if x.itemsize < 4 else x.dtype
    return blocks.view(world, rows[rank], x.shape[1]).sum(0, dtype=wide).to(x.dtype)


def _regather(call: OperatorCall, a: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Gather A once more, on a GPU on a side stream; return a function that waits for the rows."""
    if not a.is_cuda:
        gathered = _gathered(call, a)
        return lambda: gathered
    caller = gpu.current_stream(a.device)
    side = _side_stream(caller)
    side.wait_stream(caller)
    with gpu.stream(side):
        gathered = _gathered(call, a)

    def wait() -> torch.Tensor:
        caller.wait_stream(side)
        gathered.record_stream(caller)
        return gathered

    return wait


@cache
def _side_stream(caller: gpu.Stream) -> gpu.Stream:
    """Return a stream's side stream, always the same one, so that recorded graphs can be reused."""
    return gpu.Stream(caller.device)


# With autograd.


def to_save(
    a: torch.Tensor, b: torch.Tensor, gathered: torch.Tensor | None, needs: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the tensors of a forward that its backward needs: see :class:`SavedTensors`."""
    needs_a, needs_b = needs
    return (
        a if needs_b and gathered is None else None,
        b if needs_a else None,
        gathered if needs_b else None,
    )


class ProductRequest(NamedTuple):
    """A call whose operands need gradients.

    Attributes:
        shape: of A.
        columns: see :class:`SavedTensors`.
        gathers: the caller gets the gathered A.
        scales: scales of a float8 B, and of an A that the call casts.
        dtype: of A.
    """

    call: OperatorCall
    shape: Sequence[int]
    columns: bool
    gathers: bool = False
    scales: Scales | None = None
    dtype: torch.dtype | None = None


def _forward(
    request: ProductRequest, operands: Sequence[torch.Tensor], needs: Sequence[bool]
) -> Any:
    (operator, group, schedule, rows, *_), (a, b) = request.call, operands
    saves = current().save_gathered and operator in GATHERS and needs[1]
    out, gathered = run(operator, a, b, group, schedule, rows, request.gathers or saves)
    # The saved tensors are results, too, so that autograd knows that they come from ``a``.
    return (out, gathered), to_save(a, b, gathered if saves else None, needs)


def _backward(
    request: ProductRequest, grads: Any, tensors: Any, needs: Sequence[bool]
) -> Gradients:
    (a, b, gathered), (grad, grad_gathered) = tensors, grads
    saved = SavedTensors(a, b, gathered, request.shape, request.columns)
    return backward(request.call, grad, grad_gathered, saved, needs)


#: The product of A and B, and the gathered A.
PRODUCT = Differentiable(_forward, _backward, zeros=False)


def _casting_forward(
    request: ProductRequest, operands: Sequence[torch.Tensor], needs: Sequence[bool]
) -> Any:
    (operator, group, schedule, rows, *_), (a, b), scales = request.call, operands, request.scales
    assert scales is not None
    out, _ = run(operator, a, b, group, schedule, rows, scales=scales)
    return (out,), (b, scales.scale_b)


def _casting_backward(
    request: ProductRequest, grads: Any, tensors: Any, needs: Sequence[bool]
) -> Gradients:
    (grad,) = grads
    saved = SavedTensors(
        None, dequantized(*tensors).to(grad.dtype), None, request.shape, columns=True
    )
    grad_a, _ = backward(request.call, grad, None, saved, (True, False))
    return _required(grad_a).to(request.dtype), None


#: Products that cast A to float8. The gradient of A ignores the cast: it is a product with the
#: dequantized B in the dtype of the result.
CASTING = Differentiable(_casting_forward, _casting_backward)
