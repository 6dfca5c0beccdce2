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

- If dB alone is wanted and needs gathered or exchanged rows (of A or dY), it is an
  ``all_gather_transposed_matmul`` or ``all_to_all_transposed_matmul``, which adds up products as
  the rows arrive.
- If dA and dB are wanted, the middle three gather or exchange dY once, under the product for dA,
  and keep it for dB, which is one product of the library.
- If dA and dB are wanted, the upper two need A from the peers once more. By default they gather it
  again, as Megatron-LM does under sequence parallelism. On a GPU those copies are enqueued first,
  on a stream of their own, and run beside the product for dA and its copies; dB follows, as one
  product of the library.
- With ``options(save_gathered=True)`` the forward of the upper two keeps the gathered A: m k
  elements from forward to backward instead of the m k / W of the shard, and no copies of A in the
  backward.
- ``matmul_all_reduce``: each rank adds up its rows of all dY in float32, before the gathering
  product starts. ``options(all_reduce_gradients="equal")`` needs no communication.

Only gradients that are needed are computed, and only tensors that they need are kept. Backwards are
calls like any other: all ranks make the same ones in the same order. So the same operands must need
gradients on every rank, and the same results must be used; otherwise the ranks get
``RankMismatch``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ficco.ops.call import Result
from ficco.ops.call import run_unwatched as run
from ficco.options import carried, current
from ficco.problem import OPERATORS
from ficco.schedules import Schedule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Operators that multiply the rows that they gather or exchange: dB needs those rows again.
GATHERS = frozenset({"all_gather_matmul", "all_to_all_matmul"})

#: For dB alone: the operator with the same exchange that sums over the arriving rows; and back.
TURNED = {
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


class Asked(NamedTuple):
    """One call of an operator, without its operands."""

    operator: str
    group: ProcessGroup
    schedule: str | Schedule
    rows: Rows | None


class Kept(NamedTuple):
    """What a forward leaves to its backward.

    Attributes:
        a, b: the operands, ``a`` as a matrix; None if no gradient needs them.
        gathered: the rows that the forward gathered or exchanged, if they were kept.
        columns: b is column-major in memory, and so its gradient should be.
    """

    a: torch.Tensor | None
    b: torch.Tensor | None
    gathered: torch.Tensor | None
    columns: bool


def backward(
    asked: Asked,
    grad: torch.Tensor | None,
    grad_gathered: torch.Tensor | None,
    kept: Kept,
    wanted: tuple[bool, bool],
) -> Gradients:
    """dA as a matrix, and dB; None for one that is not wanted or is zero.

    Args:
        grad: gradient of the product; None for zero.
        grad_gathered: gradient of the gathered A that the caller got; None for zero.
        wanted: whether dA and dB are wanted.
    """
    if asked.operator == "matmul_all_reduce":
        return _of_all_reduce(asked, grad, kept, wanted)
    if OPERATORS[asked.operator].inner:
        return _of_transposed(asked, grad, kept, wanted)
    if asked.operator in GATHERS:
        return _of_gathering(asked, grad, grad_gathered, kept, wanted)
    return _of_scattering(asked, grad, kept, wanted)


def _of_gathering(
    asked: Asked,
    grad: torch.Tensor | None,
    grad_gathered: torch.Tensor | None,
    kept: Kept,
    wanted: tuple[bool, bool],
) -> Gradients:
    grad_a = grad_b = None
    if grad is not None:
        if not wanted[0] and kept.gathered is None:
            assert kept.a is not None
            return None, _weight(asked, kept.a, grad, kept.columns)
        again = None
        if wanted[1] and kept.gathered is None:
            assert kept.a is not None
            again = _Again(asked, kept.a, beside=wanted[0])
        try:
            if wanted[0]:
                assert kept.b is not None
                grad_a, _ = _dual(asked, grad, kept.b, False)
        finally:  # the caller's stream waits for the side stream, after an error, too
            gathered = again.result() if again else kept.gathered
        if wanted[1]:
            assert gathered is not None
            grad_b = weight_gradient(gathered, grad, kept.columns)
    if grad_gathered is not None and wanted[0]:
        returned = _returned(asked, grad_gathered)
        grad_a = returned if grad_a is None else grad_a.add_(returned)
    return grad_a, grad_b


def _of_transposed(
    asked: Asked, grad: torch.Tensor | None, kept: Kept, wanted: tuple[bool, bool]
) -> Gradients:
    grad_a = grad_b = None
    if grad is not None and wanted[0]:
        assert kept.b is not None
        grad_a, _ = _dual(asked, kept.b, grad, False)
    if grad is not None and wanted[1]:
        assert kept.a is not None
        height = rows_multiplied(asked, kept.a.shape[0])
        grad_b = _turned(asked, kept.a, grad, height, kept.columns)
    return grad_a, grad_b


def _weight(asked: Asked, x: torch.Tensor, b: torch.Tensor, columns: bool) -> torch.Tensor:
    """``gathered(x).t() @ b`` for a gathering operator, while the rows travel; column-major if
    ``columns``."""
    return _turned(asked, x, b, x.shape[1], columns)


def _turned(
    asked: Asked, left: torch.Tensor, right: torch.Tensor, rows: int, columns: bool
) -> torch.Tensor:
    """The product by the operator of ``TURNED``, which has the same exchange; its result has
    ``rows`` rows."""
    operator, schedule = TURNED[asked.operator], _schedule(asked.schedule)
    out = _by_columns(right, rows) if columns else None
    return run(operator, left, right, asked.group, schedule, asked.rows, out=out)[0]


def rows_multiplied(asked: Asked, m: int) -> int:
    """Rows of the product that a call with m rows of A returns on this rank, or of the A that it
    gathers."""
    world, rank, rows = asked.group.size(), asked.group.rank(), asked.rows
    if OPERATORS[asked.operator].collective == "all-gather":
        return m * world if rows is None else sum(rows)
    if asked.operator == "matmul_reduce_scatter":
        return m // world if rows is None else rows[rank]
    return m if rows is None else sum(row[rank] for row in rows)


def _by_columns(like: torch.Tensor, rows: int) -> torch.Tensor:
    """Memory for a column-major matrix that is as wide as another."""
    return like.new_empty((like.shape[1], rows)).t()


def _returned(asked: Asked, grad_gathered: torch.Tensor) -> torch.Tensor:
    """The gradient of the gathered rows, sent back to where the rows came from."""
    if OPERATORS[asked.operator].blocks:
        return _gathered(asked._replace(rows=_back(asked)), grad_gathered)
    # All ranks were given the same rows, so their gradients add up.
    world = asked.group.size()
    rows = asked.rows or (grad_gathered.shape[0] // world,) * world
    return _summed_rows(asked, grad_gathered, rows)


def _of_scattering(
    asked: Asked, grad: torch.Tensor | None, kept: Kept, wanted: tuple[bool, bool]
) -> Gradients:
    if grad is None:
        return None, None
    if not wanted[0]:
        assert kept.a is not None
        return None, _weight(_dual_of(asked), grad, kept.a, not kept.columns).t()
    assert kept.b is not None
    grad_a, gathered = _dual(asked, grad, kept.b, wanted[1])
    if not wanted[1]:
        return grad_a, None
    assert kept.a is not None and gathered is not None
    return grad_a, weight_gradient(kept.a, gathered, kept.columns)


def _of_all_reduce(
    asked: Asked, grad: torch.Tensor | None, kept: Kept, wanted: tuple[bool, bool]
) -> Gradients:
    if grad is None:
        return None, None
    grad_a = grad_b = None
    total: torch.Tensor | None = grad
    if current().all_reduce_gradients == "sum":
        world, m = asked.group.size(), grad.shape[0]
        rows = tuple(m // world + (rank < m % world) for rank in range(world))
        mine = _summed_rows(asked, grad, rows)
        asked = asked._replace(rows=rows)
        if wanted[0]:
            assert kept.b is not None
            grad_a, total = _dual(asked, mine, kept.b, wanted[1])
        else:
            assert kept.a is not None
            return None, _weight(_dual_of(asked), mine, kept.a, not kept.columns).t()
    elif wanted[0]:
        assert kept.b is not None
        grad_a = _product(grad, kept.b.t())
    if wanted[1]:
        assert kept.a is not None and total is not None
        grad_b = weight_gradient(kept.a, total, kept.columns)
    return grad_a, grad_b


def weight_gradient(a: torch.Tensor, grad: torch.Tensor, columns: bool) -> torch.Tensor:
    """``a.t() @ grad``, [k, n], column-major if ``columns``: autograd copies a gradient whose
    layout is not that of its parameter."""
    return _product(grad.t(), a).t() if columns else _product(a.t(), grad)


def by_columns(b: torch.Tensor) -> bool:
    """Whether a matrix is the transposed view of a plain one, as ``weight.t()`` is."""
    return not b.is_contiguous() and b.t().is_contiguous()


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = left.new_empty((left.shape[0], right.shape[1]))
    return torch.mm(left, right, out=out)  # with out=, autocast leaves the dtype alone


def _back(asked: Asked) -> Rows | None:
    """Rows of the call that sends everything back to where it came from."""
    if asked.rows is None or not OPERATORS[asked.operator].blocks:
        return asked.rows
    return tuple(zip(*asked.rows, strict=True))


def _dual_of(asked: Asked) -> Asked:
    """The call that sends everything back, by the dual operator."""
    schedule = _schedule(asked.schedule)
    return Asked(DUAL[asked.operator], asked.group, schedule, _back(asked))


@cache
def _schedule(schedule: str | Schedule) -> str | Schedule:
    """The schedule of a backward: that of the forward, or "auto" if only sums have that one, such
    as a ``one-shot`` or one with ``beta``: the dual of a sum is not a sum."""
    if schedule == "auto":
        return schedule
    parsed = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
    return "auto" if parsed.beta or parsed.grouping == "one-shot" else schedule


def _dual(asked: Asked, grad: torch.Tensor, b: torch.Tensor, return_gathered: bool) -> Result:
    operator, group, schedule, rows = _dual_of(asked)
    return run(operator, grad, b.t(), group, schedule, rows, return_gathered)


def _gathered(asked: Asked, a: torch.Tensor) -> torch.Tensor:
    """The gathered or exchanged A alone, from a call whose ``b`` has no columns."""
    nothing = a.new_empty((a.shape[1], 0))
    schedule = _schedule(asked.schedule)
    _, gathered = run(asked.operator, a, nothing, asked.group, schedule, asked.rows, True)
    assert gathered is not None
    return gathered


def _summed_rows(asked: Asked, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' x, added up in float32 and rounded once."""
    world, rank = asked.group.size(), asked.group.rank()
    table = (tuple(rows),) * world
    blocks = _gathered(asked._replace(operator="all_to_all_matmul", rows=table), x)
    wide = torch.float32 if x.itemsize < 4 else x.dtype
    return blocks.view(world, rows[rank], x.shape[1]).sum(0, dtype=wide).to(x.dtype)


class _Again:
    """A gathered once more; if ``beside``, on a GPU, on a stream beside the caller's."""

    def __init__(self, asked: Asked, a: torch.Tensor, beside: bool) -> None:
        self.caller: torch.cuda.Stream | None = None
        if not (beside and a.is_cuda):
            self.gathered = _gathered(asked, a)
            return
        self.caller = torch.cuda.current_stream(a.device)
        self.side = _side_stream(self.caller)
        self.side.wait_stream(self.caller)
        with torch.cuda.stream(self.side):
            self.gathered = _gathered(asked, a)

    def result(self) -> torch.Tensor:
        if self.caller is not None:
            self.caller.wait_stream(self.side)
            self.gathered.record_stream(self.caller)
        return self.gathered


_side_streams: dict[torch.cuda.Stream, torch.cuda.Stream] = {}


def _side_stream(caller: torch.cuda.Stream) -> torch.cuda.Stream:
    """A stream beside the caller's, always the same one, so that recorded graphs can be reused."""
    if caller not in _side_streams:
        _side_streams[caller] = torch.cuda.Stream(caller.device)
    return _side_streams[caller]


# With autograd.


def keep(ctx: Any, a: torch.Tensor, b: torch.Tensor, gathered: torch.Tensor | None) -> None:
    """Save the tensors of a forward that its backward needs, and no others."""
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.columns, ctx.shape = by_columns(b), a.shape
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        a if needs_b and gathered is None else None,
        b if needs_a else None,
        gathered if needs_b else None,
    )


def refuse_batched(*grads: torch.Tensor | None) -> None:
    """``NotImplementedError`` for batched gradients, as ``vmap`` makes them."""
    if torch.compiler.is_compiling():
        return
    kinds = torch._C._functorch
    for grad in grads:
        if grad is not None and (
            kinds.is_batchedtensor(grad) or kinds.is_legacy_batchedtensor(grad)
        ):
            raise NotImplementedError(
                "batched gradients (vmap over a backward, is_grads_batched=True, "
                "jacobian(vectorize=True)) are not served; go through them one by one"
            )


#: The text of the error that a second differentiation raises.
REFUSAL = "second derivatives of ficco's operators are not served"

Backward = Callable[..., tuple["torch.Tensor | None", ...]]


def refusing_second(backward: Backward) -> Backward:
    """Wrap a backward so that its gradients cannot be differentiated again.

    PyTorch's ``once_differentiable`` refuses only if an incoming gradient requires a gradient
    itself. But the gradient of one operand depends on the other operand, too, and that part of a
    second derivative would be dropped silently.

    Args:
        backward: returns the gradient of the first operand, then those of all others.
    """

    @wraps(backward)
    def refusing(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        refuse_batched(*grads)
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            first, *others = found = backward(ctx, *grads)
        if torch.compiler.is_compiling():  # compiled backwards refuse by themselves
            return found
        both = first is not None and any(other is not None for other in others)
        if not both and not any(grad is not None and grad.requires_grad for grad in grads):
            return found
        refuse = torch._C._functions.DelayedError(REFUSAL.encode(), len(found))
        return refuse(*(None if one is None else one.detach().requires_grad_() for one in found))

    return refusing


class Differentiable(torch.autograd.Function):
    """A call whose operands need gradients."""

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, asked: Asked, return_gathered: bool
    ) -> Any:
        ctx.asked, ctx.options = asked, current()
        saves = ctx.options.save_gathered and asked.operator in GATHERS and ctx.needs_input_grad[1]
        operator, group, schedule, rows = asked
        out, gathered = run(operator, a, b, group, schedule, rows, return_gathered or saves)
        keep(ctx, a, b, gathered if saves else None)
        return (out, gathered) if return_gathered else out

    @staticmethod
    @refusing_second
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_gathered: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        a, b, gathered = ctx.saved_tensors
        kept = Kept(matrix(a), b, gathered, ctx.columns)
        with carried(ctx.options):
            grad_a, grad_b = backward(
                ctx.asked,
                None if grad is None else grad.contiguous(),
                None if grad_gathered is None else grad_gathered.contiguous(),
                kept,
                ctx.needs_input_grad[:2],
            )
        return None if grad_a is None else grad_a.view(ctx.shape), grad_b, None, None


def matrix(a: torch.Tensor | None) -> torch.Tensor | None:
    """A with its leading dimensions flattened."""
    return a if a is None or a.dim() == 2 else a.flatten(0, -2)
