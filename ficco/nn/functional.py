"""Linear layers over a sharded operand, as functions of local tensors.

Weights are [out, in] as in ``nn.Linear``, each rank's own part. Activations are [..., in] with the
sequence at ``sequence_dim``. The operators shard rows, which all dimensions but the last make up,
so the sequence must be the first dimension. If it is not, it is moved there: for a shard of
activations that is a small copy, for a result it is a view.

``group`` is a ProcessGroup, a DeviceMesh of one dimension, or None for WORLD. With ``recipe=``, a
:class:`Float8Recipe` or its name, products are of float8 operands, cast here; weights that share an
input are cast as one. All functions raise
``ValueError`` for operands that are DTensors or whose shapes do not fit, and for a group that this
rank is not in.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ficco.ops import library
from ficco.ops.call import run_unwatched as run
from ficco.ops.gradients import (
    OperatorCall,
    SavedTensors,
    backward,
    refusing_second,
)
from ficco.ops.operands import frozen, process_group
from ficco.ops.operate import (
    name_of_schedule,
    refuse_derivatives,
    refuse_sharded,
    under_autocast,
    watched,
)
from ficco.ops.operators import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from ficco.ops.recipes import Float8Recipe, recipe_of
from ficco.ops.refusals import tells_refusals
from ficco.options import carried, current, current_text
from ficco.schedules import Schedule


@tells_refusals
def gathered_linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    sequence_dim: int = 0,
    rows: Sequence[int] | None = None,
    recipe: Float8Recipe | str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Linear layers of the gathered sequence: [..., s/W, ..., k] -> [..., s, ..., n] for each.

    The sequence is gathered once for all weights [n, k]. ``rows`` are the ranks' sequence lengths,
    if they are not equal.
    """
    group = process_group(group)
    dim, rank = sequence_at(x, sequence_dim), group.rank()
    length = x.shape[dim]
    lengths = (length,) * group.size() if rows is None else _checked(rows, group.size())
    if lengths[rank] != length:
        raise ValueError(
            f"rows: required rows[{rank}]={length}, the length of this rank's shard of x, got "
            f"{list(lengths)}"
        )
    x = x.movedim(dim, 0)
    batch = x.shape[1:-1]
    cut = None if rows is None else tuple(length * batch.numel() for length in lengths)
    flat = x.flatten(0, -2)
    # Not _Joined where the call is traced or watched: a compiler chooses by itself what to keep,
    # and dispatch modes and tensor wrappers see the backward of operators only.
    if recipe is not None:
        call = OperatorCall("all_gather_matmul", group, schedule, cut, recipe=recipe_of(recipe))
        y = _of_float8(flat, call, *weights)
    elif len(weights) == 1 or watched(x, *weights):
        y = all_gather_matmul(flat, _cat(weights).t(), group=group, schedule=schedule, rows=cut)
    else:
        call = OperatorCall("all_gather_matmul", group, schedule, cut)
        x, *weights = under_autocast(flat, *weights)
        y, _ = _Joined.apply(x, call, *weights)
    y = y.view(sum(lengths), *batch, y.shape[1]).movedim(0, dim)
    outs = _parts(y, [weight.shape[0] for weight in weights])
    return tuple(_biased(out, bias) for out, bias in zip(outs, biases, strict=True))


@tells_refusals
def scattered_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    sequence_dim: int = 0,
    rows: Sequence[int] | None = None,
    recipe: Float8Recipe | str | None = None,
) -> torch.Tensor:
    """Linear layer summed over ranks, its result sharded: [..., s, ..., k] -> [..., s/W, ..., n].

    ``weight`` is this rank's [n, k]. The bias [n], equal on all ranks, is added once, to the sum;
    its gradient is summed over ranks. ``rows`` are the sequence lengths of the ranks' results.
    """
    group, dim = process_group(group), sequence_at(x, sequence_dim)
    length = x.shape[dim]
    world, rank = group.size(), group.rank()
    lengths = (equal_part(x, dim, world),) * world if rows is None else _checked(rows, world)
    if sum(lengths) != length:
        raise ValueError(
            f"rows: required {length} in all, the length of x in dimension {dim}, got "
            f"{list(lengths)}, {sum(lengths)} in all"
        )
    x = x.movedim(dim, 0)
    batch = x.shape[1:-1]
    cut = None if rows is None else tuple(length * batch.numel() for length in lengths)
    flat = x.flatten(0, -2)
    if recipe is not None:
        call = OperatorCall("matmul_reduce_scatter", group, schedule, cut, recipe=recipe_of(recipe))
        y = _of_float8(flat, call, weight)
    else:
        y = matmul_reduce_scatter(flat, weight.t(), group=group, schedule=schedule, rows=cut)
    y = no_view(y.view(lengths[rank], *batch, y.shape[1]).movedim(0, dim))
    return _biased(y, None if bias is None else sum_gradient(bias, group))


@tells_refusals
def reduced_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    recipe: Float8Recipe | str | None = None,
) -> torch.Tensor:
    """Linear layer summed over ranks, with the result on every rank: [..., k] -> [..., n].

    All ranks must go on with the same result and hand back the same gradient of it. The backward
    then needs no communication, as in DTensor, in Megatron, and in :func:`ficco.matmul_all_reduce`
    under ``options(all_reduce_gradients="equal")``.
    """
    refuse_derivatives(vmap=False)
    refuse_sharded(x=x, weight=weight)
    group = process_group(group)
    if recipe is not None:
        call = OperatorCall("matmul_all_reduce", group, schedule, None, recipe=recipe_of(recipe))
        y = _of_float8(_rows(x), call, weight, equal=True)
    else:
        y = _Reduced.apply(*under_autocast(_rows(x), weight), group, schedule)
    return _biased(_with_batch(y, x), bias)


@tells_refusals
def copied_linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    recipe: Float8Recipe | str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Linear layers of an input that every rank has: [..., k] -> [..., n] for each weight [n, k].

    The forward needs no communication. The backward sums the gradient of x over ranks, once for
    all weights: it is one :func:`ficco.matmul_all_reduce` of the gradients side by side, for which
    they and the weights are copied if there are several.
    """
    refuse_derivatives(vmap=False)
    refuse_sharded(x=x, **{f"weights[{i}]": weight for i, weight in enumerate(weights)})
    call = OperatorCall(
        "matmul_all_reduce", process_group(group), schedule, None, recipe=recipe_of(recipe)
    )
    first, *rest = under_autocast(_rows(x), *weights)
    outs = _Copied.apply(first, call, *rest)
    return tuple(_biased(_with_batch(y, x), bias) for y, bias in zip(outs, biases, strict=True))


def copied_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    recipe: Float8Recipe | str | None = None,
) -> torch.Tensor:
    """:func:`copied_linears` with one weight: [..., k] -> [..., n]."""
    (y,) = copied_linears(x, (weight,), (bias,), group=group, schedule=schedule, recipe=recipe)
    return y


def partial_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Float8Recipe | None,
) -> torch.Tensor:
    """Linear layer without communication: [..., k] -> [..., n]."""
    if recipe is None:
        return torch.nn.functional.linear(x, weight, bias)
    refuse_derivatives(vmap=False)
    refuse_sharded(x=x, weight=weight)
    first, right = under_autocast(_rows(x), weight)
    y = _Partial.apply(first, recipe, right)
    return _biased(_with_batch(y, x), bias)


def sum_gradient(
    tensor: torch.Tensor, group: ProcessGroup | DeviceMesh | None = None
) -> torch.Tensor:
    """The tensor itself; its gradient is summed over the ranks of a group (default WORLD).

    For a parameter that all ranks hold and each rank applies to its own part of the sequence, such
    as the weight of a norm between sequence-parallel layers::

        y = F.rms_norm(x_shard, (hidden,), ficco.nn.sum_gradient(self.weight, group))

    Raises:
        ValueError: ``tensor`` is a DTensor, or ``group`` is not a group that this rank is in.
        NotImplementedError: it is called inside ``torch.func.grad``.
    """
    refuse_derivatives(vmap=False)
    refuse_sharded(tensor=tensor)
    out: torch.Tensor = _SumGradient.apply(tensor, process_group(group))
    return out


def sequence_at(x: torch.Tensor, sequence_dim: int) -> int:
    """The dimension of the sequence as an index that is not negative."""
    dim = sequence_dim + x.dim() if sequence_dim < 0 else sequence_dim
    if not 0 <= dim < x.dim() - 1:
        raise ValueError(
            f"x: required the sequence in dimension {sequence_dim} and the features in the last "
            f"one, got shape {list(x.shape)}; set sequence_dim=0 for [sequence, batch, features] "
            "or [rows, features], 1 for [batch, sequence, features]"
        )
    return dim


def equal_part(x: torch.Tensor, dim: int, world: int) -> int:
    """The length of a rank's part of a sequence that the ranks share equally.

    Raises:
        ValueError: they cannot.
    """
    if (length := x.shape[dim]) % world:
        raise ValueError(
            f"x: required a sequence (dimension {dim}) that {world} ranks share equally, got "
            f"{length}; pass rows= with the length of every rank's part"
        )
    return length // world


def no_view(y: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory nothing else uses, as no view, like the result of ``nn.Linear``:
    autograd refuses in-place changes of views of what a custom function returns."""
    (out,) = _parts(y, [y.shape[-1]])
    return out


def _parts(y: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Parts of the last dimension, which are no views."""
    parts: Sequence[torch.Tensor] = torch.unsafe_split_with_sizes(y, list(sizes), -1)
    return parts


def _with_batch(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A product of the rows of ``x`` with the leading dimensions of ``x``."""
    return no_view(y.view(*x.shape[:-1], y.shape[1]))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., k] as a matrix; a vector is one row."""
    return x[None] if x.dim() == 1 else x.flatten(0, -2)


def _checked(rows: Sequence[int], world: int) -> tuple[int, ...]:
    given = frozen(rows)
    lengths: tuple[int, ...] = given if isinstance(given, tuple) else ()
    if len(lengths) != world or any(
        not isinstance(length, int) or length < 0 for length in lengths
    ):
        raise ValueError(
            f"rows: required {world} sequence lengths, one per rank, none negative, got {rows!r}"
        )
    return lengths


def _biased(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # Under autocast the product has a narrower dtype than the bias.
    return y if bias is None else y + bias.to(y.dtype)


def _of_float8(
    x: torch.Tensor, call: OperatorCall, *weights: torch.Tensor, equal: bool = False
) -> torch.Tensor:
    """A call by a recipe, of several weights as one. ``equal``: of a sum all ranks do the same with
    it (``options(all_reduce_gradients="equal")``)."""
    refuse_derivatives(vmap=False)
    refuse_sharded(x=x, **{f"weights[{i}]": weight for i, weight in enumerate(weights)})
    x, *rest = under_autocast(x, *weights)
    if watched(x, *rest):
        schedule, text, recipe = call.schedule, current_text(), call.recipe
        assert recipe is not None
        if equal:  # in words that a compiler can trace
            text = (f"{text[:-1]}, " if text else "{") + '"all_reduce_gradients": "equal"}'
        name = schedule if isinstance(schedule, str) else name_of_schedule(schedule)
        where = call.group.group_name, name, call.rows, text, False
        return library.call(call.operator, x, _cat(rest).t(), *where, recipe=recipe.text)[0]
    options = current()
    if equal:
        options = replace(options, all_reduce_gradients="equal")
    with carried(options):
        out: torch.Tensor = _Joined.apply(x, call, *rest)[0]
    return out


def _cat(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(weights)) if len(weights) > 1 else weights[0]


class _Joined(torch.autograd.Function):
    """An operator's [m, k] x [n, k] for several weights -> [m', sum of n].

    The weights are joined anew in each pass: the backward reads the parameters, so that no joined
    copy is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, call: OperatorCall, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.call, ctx.options, ctx.shape = call, current(), x.shape
        ctx.sizes = [weight.shape[0] for weight in weights]
        some, joined = any(ctx.needs_input_grad[2:]), _cat(weights)
        a, b, scales = call.operands(x, joined)
        # What is gathered in float8 is not what the gradients of weights are made of.
        saves = ctx.options.save_gathered and some and scales is None
        what = call.group, call.schedule, call.rows, saves
        y, gathered = run(call.operator, a, b, *what, scales=scales)
        gathered = gathered if saves else None
        needed = weights if ctx.needs_input_grad[0] else ()
        ctx.save_for_backward(x if some and gathered is None else None, gathered, *needed)
        ctx.set_materialize_grads(False)
        return y, gathered  # what is saved, too: autograd then knows that it comes from x

    @staticmethod
    @refusing_second
    def backward(
        ctx: Any, tensors: Sequence[torch.Tensor], grad: torch.Tensor, _: None
    ) -> tuple[torch.Tensor | None, ...]:
        x, gathered, *weights = tensors
        wanted = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:])
        joined = _cat(weights).t() if wanted[0] else None
        saved = SavedTensors(x, joined, gathered, ctx.shape, columns=True)
        grad_x, grad_joined = backward(ctx.call, ctx.options, grad, None, saved, wanted)
        if grad_joined is None:
            return grad_x, None, *(None for _ in ctx.sizes)
        return grad_x, None, *grad_joined.t().split(ctx.sizes)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @refusing_second
    def backward(
        ctx: Any, tensors: Sequence[torch.Tensor], grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        # A copy: upstream may use the incoming gradient elsewhere, too.
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Reduced(torch.autograd.Function):
    """[m, k] x [n, k] -> [m, n], summed over ranks, whose gradient is the same on all of them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        group: ProcessGroup,
        schedule: str | Schedule,
    ) -> torch.Tensor:
        to_x, to_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if to_weight else None, weight if to_x else None)
        return matmul_all_reduce(x, weight.t(), group=group, schedule=schedule)

    @staticmethod
    @refusing_second
    def backward(
        ctx: Any, tensors: Sequence[torch.Tensor], grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight = tensors
        to_x, to_weight = ctx.needs_input_grad[:2]
        return grad @ weight if to_x else None, grad.t() @ x if to_weight else None, None, None


class _Partial(torch.autograd.Function):
    """[m, k] x [n, k] -> [m, n] in float8, without communication."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, recipe: Float8Recipe, weight: torch.Tensor
    ) -> torch.Tensor:
        to_x, _, to_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if to_weight else None, weight if to_x else None)
        ctx.recipe = recipe
        return recipe.product(x, weight)

    @staticmethod
    @refusing_second
    def backward(
        ctx: Any, tensors: Sequence[torch.Tensor], grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight = tensors
        to_x, _, to_weight = ctx.needs_input_grad
        of_x = None
        if to_x and ctx.recipe.gradient:
            of_x = ctx.recipe.product(grad, weight.t(), backward=True)
        elif to_x:
            of_x = grad @ weight
        return of_x, None, grad.t() @ x if to_weight else None


class _Copied(torch.autograd.Function):
    """[m, k] x [n, k] for several weights -> [m, n] for each; the gradient of x is summed over
    ranks as it is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, call: OperatorCall, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        to_x, _, *to_weights = ctx.needs_input_grad
        needed = weights if to_x else ()
        ctx.save_for_backward(x if any(to_weights) else None, *needed)
        ctx.call = call
        # Compiled code keeps the options of its compilation, forward and backward.
        ctx.options = None if torch.compiler.is_compiling() else current()
        if call.recipe is None:
            return tuple(x @ weight.t() for weight in weights)
        joined = call.recipe.product(x, _cat(weights))
        sizes = [weight.shape[0] for weight in weights]
        return tuple(y.contiguous() for y in joined.split(sizes, 1))

    @staticmethod
    @refusing_second
    def backward(
        ctx: Any, tensors: Sequence[torch.Tensor], *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, *weights = tensors
        call, scales = ctx.call, {}
        to_x, _, *to_weights = ctx.needs_input_grad
        of_x = None
        if to_x:
            joined = torch.cat(grads, 1) if len(grads) > 1 else grads[0]
            weight = _cat(weights)
            if call.recipe is not None and call.recipe.gradient:
                joined, weight, given = call.recipe.operands(joined, weight.t(), backward=True)
                scales = given._asdict()
            where: dict[str, Any] = {"group": call.group, "schedule": call.schedule}
            with nullcontext() if ctx.options is None else carried(ctx.options):
                of_x = matmul_all_reduce(joined, weight, **where, **scales)
        pairs = zip(grads, to_weights, strict=True)
        return of_x, None, *(grad.t() @ x if wanted else None for grad, wanted in pairs)
