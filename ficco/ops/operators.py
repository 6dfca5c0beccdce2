"""The seven operators of products.

- An eager call that needs no gradient goes straight to the call path, after a few checks.
- A call that needs gradients goes through an ``autograd.Function``.
- A call that is traced or watched becomes an operator of ``torch.library``: under
  ``torch.compile``, with fake tensors, under a dispatch mode such as selective checkpointing, and
  in transforms of ``torch.func``.

:func:`behind_symm_mem` makes them the implementation of ``torch.ops.symm_mem.fused_*``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, overload

import torch
import torch.distributed.distributed_c10d as c10d
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ficco.ops import library
from ficco.ops.call import Result, repeated, run
from ficco.ops.entry import (
    name_of_schedule,
    refuse_derivatives,
    refuse_other_modes,
    refuse_sharded,
    tell_refusal,
    under_autocast,
    watched,
)
from ficco.ops.gradients import CASTING, PRODUCT, OperatorCall, ProductRequest, by_columns
from ficco.ops.operands import LEFT, Scales, check_types, frozen, not_a_tensor, process_group
from ficco.ops.record import differentiable
from ficco.options import current_text
from ficco.runtime.counters import stays
from ficco.schedules import Schedule


@overload
def all_gather_matmul(
    a_shard: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[int] | None = None,
    return_gathered: Literal[False] = False,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    quantize: str | None = None,
) -> torch.Tensor: ...


@overload
def all_gather_matmul(
    a_shard: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[int] | None = None,
    return_gathered: Literal[True],
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    quantize: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def all_gather_matmul(
    a_shard: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[int] | None = None,
    return_gathered: bool,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    quantize: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def all_gather_matmul(
    a_shard: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[int] | None = None,
    return_gathered: bool = False,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    quantize: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multiply the gathered rows of all ranks by a local matrix, while they travel.

    With W ranks, it computes::

        a = torch.empty(W * a_shard.shape[0], k)
        torch.distributed.all_gather_into_tensor(a, a_shard)
        return a @ b

    =============  ==================================================================
    ``a_shard``    [m/W, k]; leading dimensions are flattened into the rows
    ``b``          [k, n], each rank's own; a transposed view costs no copy
    result         [m, n]; with ``return_gathered`` also the gathered A, [m, k]
    =============  ==================================================================

    The result has two dimensions, its rows in the order of the ranks. Put the sequence dimension
    first, ``[s/W, batch, k]``: the gathered rows are then ``[s, batch]``. With
    ``[batch, s/W, k]`` they would be grouped by rank instead of by batch. Layers of ``ficco.nn``
    accept that order with ``sequence_dim=1``.

    Copy engines move pieces of the shards, in the order that the schedule sets, while GEMMs of the
    vendor's library multiply the pieces that have arrived (FiCCO, sections V-A and VI-A). On a GPU
    the call is enqueued on the current stream and returns; it can be captured in a graph. 2D
    schedules add partial products in float32 and round once. Every rank of the group makes the
    same calls in the same order, with the same n.

    Gradients are those of the sum over all ranks of <result, its gradient>:

    - for ``a_shard``, a :func:`ficco.matmul_reduce_scatter`;
    - for ``b`` as well, a product with A, which is gathered again during the first, or kept from
      the forward with ``options(save_gathered=True)``;
    - for only ``b``, a :func:`ficco.all_gather_transposed_matmul`, unless A was kept.

    The same operands must need gradients on every rank. Forward and backward work under
    ``torch.compile`` and autocast.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"hetero-fused-1d:pieces=4,pull"``, or a Schedule.
        rows: rows of every rank's shard, if they are not equal; the same on every rank.
        return_gathered: also return the gathered A, a tensor of its own.
        scale_a, scale_b: float32 factors that multiply float8 operands before the product, as in
            ``torch._scaled_mm``. Their shapes select the scaling (docs/fp8.md):

            ==================  ==========================  ==================
            one for all         any shape of one element    the same
            rows and columns    [m/W, 1], or [m, 1]         [1, n]
            1x128 by 128x128    [m/W, k/128], or [m, ...]   [k/128, n/128]
            ==================  ==========================  ==================

            Each rank passes the scales of its shard, which travel with its rows, or of all rows. A
            single scale may differ between ranks. ``b`` is column-major; n and k are multiples
            of 16.
        bias: [n] of the result's dtype, added to each row; for float8 only.
        out_dtype: dtype of the result: bfloat16 (default), float16 or float32; for float8 only.
        use_fast_accum: let the library accumulate in less than float32; for float8 only.
        quantize: ``"row"`` or ``"block"``: cast ``a_shard`` from bfloat16, float16 or float32 to
            float8, each piece before its copies, instead of passing ``scale_a``. Scales are the
            smallest powers of two that avoid overflow. ``b`` is float8, and ``scale_b`` has the
            same scaling. Eager calls have a gradient for ``a_shard``: the gradient of the product
            with the float8 ``b``.

    Raises:
        ValueError: an argument is wrong. The text names the requirement, the value and a remedy.
        NotImplementedError: the dtype is not bfloat16, float16, float32, float8 with scales or, on
            CPUs, float64; the library or the device lacks the dtype or the scales; operands of
            float8 need a gradient; an operand is sparse; the device has no engine;
            the call is under forward-mode differentiation, ``torch.func.grad`` or
            ``torch.jit.trace``.
        RankMismatch: ranks disagree on the problem, the schedule or the options.
        SignalTimeout: a peer died, is stuck or did not call. On a GPU see ``options(on_timeout)``.
        PeerFailed: a call ended with an error on another rank, which the text names. That can be
            the SignalTimeout of a rank that gave up first; ``timeouts`` has it.
        BackendError: a call of the vendor's library failed.

    Example::

        y = ficco.all_gather_matmul(x_shard, linear.weight.t())
    """
    scales = _scales(scale_a, scale_b, bias, out_dtype, use_fast_accum, quantize)
    arguments = group, schedule, rows, return_gathered, scales
    out, gathered = operate("all_gather_matmul", a_shard, b, *arguments)
    return out if gathered is None else (out, gathered)


def all_to_all_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[Sequence[int]] | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    quantize: str | None = None,
) -> torch.Tensor:
    """Exchange row blocks with all ranks, and multiply them as they arrive.

    With W ranks, it computes::

        x = torch.empty_like(a)
        torch.distributed.all_to_all_single(x, a)
        return x @ b

    ==========  ====================================================================
    ``a``       [W * r, k]; block p goes to rank p; leading dimensions are flattened
    ``b``       [k, n], each rank's own; a transposed view costs no copy
    result      [W * r, n]; block p comes from rank p
    ==========  ====================================================================

    This sends the tokens of an expert-parallel layer to their experts. Pieces travel and are
    multiplied as in :func:`ficco.all_gather_matmul` (FiCCO, Table I, g13 to g16).

    Gradients are as in :func:`ficco.all_gather_matmul`: for ``a`` a
    :func:`ficco.matmul_all_to_all` with the table transposed, for only ``b`` a
    :func:`ficco.all_to_all_transposed_matmul`.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"hetero-fused-1d:pieces=4"``, or a Schedule.
        rows: if blocks are not equal, the W x W table of their rows, ``rows[i][j]`` from rank i to
            rank j; the same on every rank. ``a`` then has sum(rows[rank]) rows, and the result
            has as many as column ``rank`` of the table sums to.
        scale_a, scale_b, bias, out_dtype, use_fast_accum, quantize: of float8, see
            :func:`ficco.all_gather_matmul`; each rank passes the scales of its own rows.

    Raises:
        As :func:`ficco.all_gather_matmul`.

    Example::

        y = ficco.all_to_all_matmul(tokens, expert.weight.t())
    """
    scales = _scales(scale_a, scale_b, bias, out_dtype, use_fast_accum, quantize)
    return operate("all_to_all_matmul", a, b, group, schedule, rows, scales=scales)[0]


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[int] | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    quantize: str | None = None,
) -> torch.Tensor:
    """Multiply over a shard of k, sum the products of all ranks while they travel, and keep this
    rank's rows of the sum.

    With W ranks, it computes::

        y = torch.empty(m // W, n)
        torch.distributed.reduce_scatter_tensor(y, a @ b)
        return y

    ==========  ====================================================================
    ``a``       [m, k], the rank's columns of A; leading dimensions are flattened
    ``b``       [k, n], the rank's rows of B; a transposed view costs no copy
    result      [m/W, n], the rank's rows of the sum
    ==========  ====================================================================

    Copy engines send blocks of the product as they are made. The rank's own block is multiplied
    last, which hides the last copies, too. With ``one-shot``, for small problems, ranks read
    their peers' blocks in place instead. Every product is rounded to its dtype; the products are
    added in float32 in the order of the ranks and rounded once. The result is the same in every
    run, to the last bit.

    Let u be the unit round-off of the dtype, p_r the product of rank r and s the sum of all p_r.
    Apart from the errors of the GEMMs themselves and of adding in float32, the result differs from
    s by at most:

    ============  ==================================================================
    as a rule     u (sum of all abs(p_r) + abs(s))
    ``beta``      u (sum of the others' abs(p_r) + abs(s - own p) + abs(s)): the sum of the others
                  is rounded, and the GEMM of the own product adds to it
    ``ring``      u (abs(t_1) + abs(t_2) + ... + abs(s)), t_i the sum of the first i products on
                  the ring: every rank's GEMM adds to the sum that it received, and rounds
    ============  ==================================================================

    A library may round a product before it adds it to a sum, as cuBLAS does with some small ones.
    Then ``beta`` may be off by another u abs(own p), ``ring`` by u abs(p_r) of every rank but the
    first on the ring.

    Gradients are those of the sum over all ranks of <result, its gradient>: for ``a`` an
    :func:`ficco.all_gather_matmul` of the result's gradient, whose gathered rows serve ``b``, too.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"hetero-fused-1d:pieces=2,tail=4"``, or a Schedule.
        rows: rows of the result on every rank, if they are not equal; the same on every rank.
        scale_a, scale_b, bias, out_dtype, use_fast_accum, quantize: of float8, see
            :func:`ficco.all_gather_matmul`; each rank scales its own ``a``, and adds its bias to
            its own product, so that the sum has the biases of all ranks.

    Raises:
        As :func:`ficco.all_gather_matmul`.

    Example::

        y_shard = ficco.matmul_reduce_scatter(x, linear.weight.t())
    """
    scales = _scales(scale_a, scale_b, bias, out_dtype, use_fast_accum, quantize)
    return operate("matmul_reduce_scatter", a, b, group, schedule, rows, scales=scales)[0]


def matmul_all_to_all(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[Sequence[int]] | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    quantize: str | None = None,
) -> torch.Tensor:
    """Multiply row blocks, and exchange the products with all ranks as they are made.

    With W ranks, it computes::

        y = torch.empty(a.shape[0], n)
        torch.distributed.all_to_all_single(y, a @ b)
        return y

    ==========  ====================================================================
    ``a``       [W * r, k]; the product of block p goes to rank p; leading dimensions
                are flattened
    ``b``       [k, n], each rank's own; a transposed view costs no copy
    result      [W * r, n]; block p comes from rank p
    ==========  ====================================================================

    This brings the tokens of an expert-parallel layer back. Copy engines send blocks of the
    product as they are made. The rank's own block is multiplied last, while the last copies
    travel.

    Gradients are those of the sum over all ranks of <result, its gradient>: for ``a`` an
    :func:`ficco.all_to_all_matmul` of the result's gradient with the table transposed, whose
    exchanged rows serve ``b``, too.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"hetero-fused-1d:pieces=4"``, or a Schedule.
        rows: as for :func:`ficco.all_to_all_matmul`.
        scale_a, scale_b, bias, out_dtype, use_fast_accum, quantize: of float8, see
            :func:`ficco.all_gather_matmul`; each rank scales its own ``a``.

    Raises:
        As :func:`ficco.all_gather_matmul`.

    Example::

        tokens = ficco.matmul_all_to_all(hidden, expert.weight.t())
    """
    scales = _scales(scale_a, scale_b, bias, out_dtype, use_fast_accum, quantize)
    return operate("matmul_all_to_all", a, b, group, schedule, rows, scales=scales)[0]


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    quantize: str | None = None,
) -> torch.Tensor:
    """Multiply over a shard of k, and sum the products of all ranks while they travel.

    It computes::

        y = a @ b
        torch.distributed.all_reduce(y)
        return y

    ==========  ====================================================================
    ``a``       [m, k], the rank's columns of A; leading dimensions are flattened
    ``b``       [k, n], the rank's rows of B; a transposed view costs no copy
    result      [m, n], the sum, equal on all ranks to the last bit
    ==========  ====================================================================

    This is a :func:`ficco.matmul_reduce_scatter` whose sums are sent on to all ranks piece by
    piece as they are made. m may be any number of rows.

    Gradients are those of the sum over all ranks of <result, its gradient>. Each rank's product is
    in the results of all ranks, so the backward first sums their gradients over the ranks. If all
    ranks do the same with the result, and the loss counts it once, set
    ``options(all_reduce_gradients="equal")``: the backward then needs no communication.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"hetero-fused-1d:pieces=2,tail=4"``, or a Schedule.
        scale_a, scale_b, bias, out_dtype, use_fast_accum, quantize: of float8, see
            :func:`ficco.all_gather_matmul`; as in :func:`ficco.matmul_reduce_scatter`.

    Raises:
        As :func:`ficco.all_gather_matmul`.

    Example::

        y = ficco.matmul_all_reduce(x, linear.weight.t())
    """
    scales = _scales(scale_a, scale_b, bias, out_dtype, use_fast_accum, quantize)
    return operate("matmul_all_reduce", a, b, group, schedule, None, scales=scales)[0]


def all_gather_transposed_matmul(
    a_shard: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[int] | None = None,
) -> torch.Tensor:
    """Multiply the transposed gathered rows of all ranks by a local matrix, while they travel.

    With W ranks, it computes::

        a = torch.empty(W * a_shard.shape[0], k)
        torch.distributed.all_gather_into_tensor(a, a_shard)
        return a.t() @ b

    =============  ==================================================================
    ``a_shard``    [m/W, k]; leading dimensions are flattened into the rows
    ``b``          [m, n], each rank's own; a transposed view costs no copy
    result         [k, n]
    =============  ==================================================================

    This is the weight gradient of a column-parallel layer: m counts the tokens of all ranks, and
    ``b`` is the gradient of the layer's result (FiCCO, Table I, g1, g3, g5 and g7, read as k
    gathered tokens). The products of pieces of rows are added in float32 and rounded once, in an
    order that the schedule fixes for each rank, so that results repeat to the last bit. Pieces of
    rows are contiguous in memory. Pieces of columns, in 2D schedules, make rows of the result.

    Gradients: for ``a_shard`` a :func:`ficco.matmul_reduce_scatter`, for ``b`` a
    :func:`ficco.all_gather_matmul`.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"growing"``, or a Schedule.
        rows: rows of every rank's shard, if they are not equal; the same on every rank.

    Raises:
        As :func:`ficco.all_gather_matmul`; ``ValueError`` also if ``b`` does not have as many rows
            as all ranks' shards together.

    Example::

        weight_grad = ficco.all_gather_transposed_matmul(x_shard, y_grad).t()
    """
    return operate("all_gather_transposed_matmul", a_shard, b, group, schedule, rows)[0]


def all_to_all_transposed_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    rows: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """Exchange row blocks with all ranks, and multiply their transpose by a local matrix as they
    arrive.

    With W ranks, it computes::

        x = torch.empty_like(a)
        torch.distributed.all_to_all_single(x, a)
        return x.t() @ b

    ==========  ====================================================================
    ``a``       [W * r, k]; block p goes to rank p; leading dimensions are flattened
    ``b``       [W * r, n], each rank's own; block p meets the rows that come from
                rank p; a transposed view costs no copy
    result      [k, n]
    ==========  ====================================================================

    This is the weight gradient of an expert-parallel layer: ``b`` is the gradient of the layer's
    result (FiCCO, Table I, g13 to g16, in the backward). As in
    :func:`ficco.all_gather_transposed_matmul`, the products of pieces are added in float32 and
    rounded once, in an order that the schedule fixes for each rank, so that results repeat to the
    last bit. A rank that receives no rows gets zeros.

    Gradients: for ``a`` a :func:`ficco.matmul_all_to_all` with the table transposed, for ``b`` a
    :func:`ficco.all_to_all_matmul`.

    Args:
        group: the ranks that take part, a process group or a mesh of one dimension; default WORLD.
        schedule: ``"auto"``, a name such as ``"growing"``, or a Schedule.
        rows: as for :func:`ficco.all_to_all_matmul`; the rows of its result are those of ``b``.

    Raises:
        As :func:`ficco.all_to_all_matmul`; ``ValueError`` also if ``b`` does not have as many rows
            as this rank receives.

    Example::

        weight_grad = ficco.all_to_all_transposed_matmul(tokens, y_grad).t()
    """
    return operate("all_to_all_transposed_matmul", a, b, group, schedule, rows)[0]


def operate(
    operator: str,
    a: torch.Tensor,
    b: torch.Tensor,
    group: ProcessGroup | DeviceMesh | None,
    schedule: str | Schedule,
    rows: Sequence[Any] | None,
    return_gathered: bool = False,
    scales: Scales | None = None,
) -> Result:
    """Return the product of one call, and the gathered A or None."""
    try:  # in place of the decorator `tells_refusals`, which would be one more call
        if rows is None and scales is None and not is_dynamo_compiling():
            ranks: Any = c10d._world.default_pg if group is None else group
            result = repeated(ranks, operator, a, b, schedule, None, return_gathered)
            if result is not None:
                return result
        traced = watched(a, b)
        if traced and not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            raise not_a_tensor(*("b", b) if isinstance(a, torch.Tensor) else (LEFT[operator], a))
        ranks = c10d._world.default_pg if group is None and not traced else group
        if not isinstance(ranks, ProcessGroup):
            ranks = process_group(group)
        if torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0:
            refuse_other_modes(a, b)
        if scales is not None:
            return _scaled(operator, a, b, ranks, schedule, rows, return_gathered, scales)
        if torch._C._is_any_autocast_enabled():
            a, b = under_autocast(a, b)
        if traced:
            refuse_derivatives()
            refuse_sharded(a=a, b=b)
            name = ranks.group_name
            text = schedule if isinstance(schedule, str) else name_of_schedule(schedule)
            return library.call(operator, a, b, name, text, rows, current_text(), return_gathered)
        if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
            call = OperatorCall(operator, ranks, schedule, frozen(rows))
            request = ProductRequest(call, a.shape, by_columns(b), return_gathered)
            out, gathered = differentiable(PRODUCT, request, a, b)
            return out, gathered if return_gathered else None
        return run(operator, a, b, ranks, schedule, rows, return_gathered)
    except BaseException as error:
        every = operator, a, b, group, schedule, rows, return_gathered, scales
        tell_refusal(error, operate, every, {})
        raise


def _scales(a: Any, b: Any, bias: Any, out_dtype: Any, fast: Any, quantize: Any) -> Scales | None:
    """Return the arguments of a call that concern float8 operands; None if none was passed."""
    if a is b is bias is out_dtype is quantize is None and fast is False:
        return None
    return Scales(a, b, bias, out_dtype, fast, quantize)


def _scaled(
    operator: str,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: ProcessGroup,
    schedule: str | Schedule,
    rows: Sequence[Any] | None,
    return_gathered: bool,
    scales: Scales,
) -> Result:
    """Return the same for float8 operands, which autocast does not cast."""
    check_types(scales)
    tensors = {LEFT[operator]: a, "b": b, **scales.tensors}
    traced = watched(*tensors.values())
    if traced:
        refuse_sharded(**tensors)
    if torch.is_grad_enabled():
        casts = scales.quantize is not None and not traced
        for name, tensor in tensors.items():
            if tensor.requires_grad and not (tensor is a and casts):
                raise NotImplementedError(
                    f"{name}: products of float8 operands have no gradient yet; pass "
                    f"{name}.detach(), or call under torch.no_grad()"
                )
    if traced:
        name = ranks.group_name
        text = schedule if isinstance(schedule, str) else name_of_schedule(schedule)
        arguments = operator, a, b, name, text, rows, current_text(), return_gathered
        return library.call(*arguments, scales=scales)
    if torch.is_grad_enabled() and a.requires_grad:
        call = OperatorCall(operator, ranks, schedule, frozen(rows))
        request = ProductRequest(call, a.shape, True, scales=scales, dtype=a.dtype)
        (out,) = differentiable(CASTING, request, a, b)
        return out, None
    return run(operator, a, b, ranks, schedule, rows, return_gathered, scales=scales)


#: Dispatch keys of CPUs, and of GPUs of any vendor. PyTorch has kernels only for GPUs.
_KEYS = ("CPU", "CUDA")


@cache
def behind_symm_mem() -> None:
    """Make ficco the implementation of PyTorch's fused operators, for the rest of the process.

    Programs that call ``torch.ops.symm_mem.fused_all_gather_matmul`` and
    ``fused_matmul_reduce_scatter`` run ficco unchanged: Inductor's Async TP, torchtitan's
    ``tp_gemm_backend="dist_gemm"``. On CPUs, where PyTorch has no kernels, the operators run, too.
    Of several products of one gathered tensor, the widest is ficco's; the others are plain
    products. PyTorch still serves calls that gather or scatter the last dimension, have no elements
    or have no right operand. The scaled (fp8) operators are not replaced.

    Raises:
        NotImplementedError: this PyTorch has no such operators, or its kernels cannot be replaced.
    """
    try:
        import torch.distributed._symmetric_memory as stock  # which defines the operators

        kernels = {
            "fused_all_gather_matmul": _gathering(stock._fused_all_gather_matmul_fallback),
            "fused_matmul_reduce_scatter": _scattering(stock._fused_matmul_reduce_scatter_fallback),
        }
        library = torch.library.Library("symm_mem", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name, kernel in kernels.items():
                for key in _KEYS:
                    library.impl(name, kernel, key, allow_override=True)
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        raise NotImplementedError(
            f"PyTorch {torch.__version__}: its fused operators cannot be replaced ({error}); use "
            "ficco.passes or ficco.nn"
        ) from error
    _LIBRARIES.append(library)


#: Libraries of the registered kernels: a registration ends with its library.
_LIBRARIES: list[torch.library.Library] = []


def _gathering(stock: Any) -> Any:
    def fused_all_gather_matmul(
        A: torch.Tensor,
        Bs: Sequence[torch.Tensor],
        gather_dim: int,
        group_name: Any,
        *,
        return_A: bool = True,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        if gather_dim % A.dim() == A.dim() - 1 or not Bs or not A.numel():
            _stays("all-gather", A, group_name)
            results: tuple[torch.Tensor, list[torch.Tensor]]
            results = stock(A, Bs, gather_dim, group_name, return_A=return_A)
            return results
        x, group = A.movedim(gather_dim, 0), c10d._resolve_process_group(group_name)
        keeps = return_A or len(Bs) > 1
        widest = max(range(len(Bs)), key=lambda i: Bs[i].shape[1])
        with torch.no_grad():
            name, rows = "all_gather_matmul", x.flatten(0, -2)
            pair: Any = operate(name, rows, Bs[widest], group, "auto", None, keeps)
            y, gathered = pair
            outs = [y if i == widest else gathered @ B for i, B in enumerate(Bs)]

        def back(rows: torch.Tensor) -> torch.Tensor:
            return rows.view(-1, *x.shape[1:-1], rows.shape[1]).movedim(0, gather_dim)

        return back(gathered) if return_A else None, [back(out) for out in outs]

    return fused_all_gather_matmul


def _stays(collective: str, A: torch.Tensor, group_name: Any) -> None:
    """Count a call that PyTorch serves, or refuse it within :func:`ficco.expect`."""
    if A.numel():
        name = c10d._resolve_process_group(group_name).group_name
        stays(name, collective, "a fused operator of PyTorch's in a form that ficco does not serve")


def _scattering(stock: Any) -> Any:
    def fused_matmul_reduce_scatter(
        A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: Any
    ) -> torch.Tensor:
        in_rows = scatter_dim % A.dim() < A.dim() - 1
        if not in_rows or reduce_op not in ("sum", "avg") or not A.numel():
            _stays("reduce-scatter", A, group_name)
            out: torch.Tensor = stock(A, B, reduce_op, scatter_dim, group_name)
            return out
        x, group = A.movedim(scatter_dim, 0), c10d._resolve_process_group(group_name)
        with torch.no_grad():
            y = matmul_reduce_scatter(x.flatten(0, -2), B, group=group)
        if reduce_op == "avg":
            y /= group.size()
        # Contiguous, as PyTorch's meta function says: compilers rely on it.
        return y.view(-1, *x.shape[1:-1], y.shape[1]).movedim(0, scatter_dim).contiguous()

    return fused_matmul_reduce_scatter
