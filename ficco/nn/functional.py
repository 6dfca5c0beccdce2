"""Linear layers over a sharded operand, as functions of local tensors.

Weights are [out, in] as in ``nn.Linear``, each rank's own part. Activations are [..., in] with the
sequence at ``sequence_dim``. The operators shard rows, and all dimensions but the last are
flattened into rows, so the sequence must be the first dimension. If it is not, it is moved there:
by a small copy for a shard of activations, by a view for a result.

``group`` is a ProcessGroup, a DeviceMesh of one dimension, or None for WORLD. With ``recipe=``, a
:class:`Float8Recipe` or its name, operands are cast to float8 here; weights that share an input are
cast as one. All functions raise ``ValueError`` for operands that are DTensors or whose shapes do
not fit, and for a group that this rank is not in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ficco.ops import library
from ficco.ops.call import run_unwatched as run
from ficco.ops.entry import (
    name_of_schedule,
    refuse_unserved,
    tells_refusals,
    under_autocast,
    watched,
)
from ficco.ops.gradients import GATHERS, OperatorCall, SavedTensors, backward
from ficco.ops.operands import frozen, not_a_tensor, process_group
from ficco.ops.operators import matmul_all_reduce, operate
from ficco.ops.recipes import Float8Recipe, recipe_of
from ficco.ops.record import Differentiable, Gradients, Needs, differentiable
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
    """Apply linear layers to the gathered sequence: [..., s/W, ..., k] -> [..., s, ..., n] each.

    The sequence is gathered once for all weights [n, k]. ``rows``: the ranks' sequence lengths, if
    they are not equal.
    """
    _check_biases(weights, biases)
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
    call = OperatorCall("all_gather_matmul", group, schedule, cut, recipe=recipe_of(recipe))
    y = _with_weights(flat, call, *weights)
    y = y.view(sum(lengths), *batch, y.shape[1])
    # The columns are split before the sequence is moved, so that gradients are joined as they lie.
    parts = _parts(y, [weight.shape[0] for weight in weights])
    outs = (no_view(part.movedim(0, dim)) for part in parts)
    return tuple(biased(out, bias) for out, bias in zip(outs, biases, strict=True))


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
    """Apply a linear layer, sum over ranks and shard: [..., s, ..., k] -> [..., s/W, ..., n].

    ``weight`` is this rank's [n, k]. The bias [n], equal on all ranks, is added once, to the sum;
    its gradient is summed over ranks. ``rows``: the sequence lengths of the ranks' results.
    """
    _check_biases((weight,), (bias,))
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
    call = OperatorCall("matmul_reduce_scatter", group, schedule, cut, recipe=recipe_of(recipe))
    y = _with_weights(flat, call, weight)
    y = no_view(y.view(lengths[rank], *batch, y.shape[1]).movedim(0, dim))
    return biased(y, None if bias is None else sum_gradient(bias, group))


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
    """Apply a linear layer and sum over ranks, on every rank: [..., k] -> [..., n].

    All ranks must use the result in the same way, so that its gradient is equal on all ranks. The
    backward then needs no communication, as in DTensor, in Megatron, and in
    :func:`ficco.matmul_all_reduce` under ``options(all_reduce_gradients="equal")``.
    """
    if recipe is None and _infers(x, weight):
        return summed_linear(x, weight, bias, group, schedule)
    _check_biases((weight,), (bias,))
    refuse_unserved({"x": x, "weight": weight})
    group = process_group(group)
    call = OperatorCall("matmul_all_reduce", group, schedule, None, recipe=recipe_of(recipe))
    y = _with_weights(_rows(x), call, weight, equal=True)
    return biased(_with_batch(y, x), bias)


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
    """Apply linear layers to an input that every rank has: [..., k] -> [..., n] for each weight
    [n, k].

    The forward needs no communication. The backward sums the gradient of x over ranks by one
    :func:`ficco.matmul_all_reduce` for all weights. If there are several, it concatenates them and
    the gradients, which copies both.
    """
    ranks = process_group(group)
    if recipe is None and _infers(x, *weights):
        outs = tuple(torch.nn.functional.linear(x, weight) for weight in weights)
        return tuple(biased(y, bias) for y, bias in zip(outs, biases, strict=True))
    _check_biases(weights, biases)
    refuse_unserved({"x": x, **{f"weights[{i}]": weight for i, weight in enumerate(weights)}})
    outs = differentiable(
        _LOCAL,
        _Local(recipe_of(recipe), ranks, schedule),
        *under_autocast(_rows(x), *weights),
    )
    return tuple(biased(_with_batch(y, x), bias) for y, bias in zip(outs, biases, strict=True))


def copied_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    schedule: str | Schedule = "auto",
    recipe: Float8Recipe | str | None = None,
) -> torch.Tensor:
    """Apply :func:`copied_linears` with one weight: [..., k] -> [..., n]."""
    (y,) = copied_linears(x, (weight,), (bias,), group=group, schedule=schedule, recipe=recipe)
    return y


def summed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: ProcessGroup | DeviceMesh | None,
    schedule: str | Schedule,
) -> torch.Tensor:
    """Apply :func:`reduced_linear` to plain tensors that need no gradient."""
    y, _ = operate("matmul_all_reduce", _rows(x), weight.t(), group, schedule, None)
    # As :func:`_with_batch`, in fewer calls of Python.
    y = _ALIAS(y, (*x.shape[:-1], *y.shape[1:]))
    return y if bias is None else biased(y, bias)


def partial_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Float8Recipe | None,
) -> torch.Tensor:
    """Apply a linear layer without communication: [..., k] -> [..., n]."""
    if recipe is None:
        return torch.nn.functional.linear(x, weight, bias)
    refuse_unserved({"x": x, "weight": weight})
    (y,) = differentiable(_LOCAL, _Local(recipe), *under_autocast(_rows(x), weight))
    return biased(_with_batch(y, x), bias)


def sum_gradient(
    tensor: torch.Tensor, group: ProcessGroup | DeviceMesh | None = None
) -> torch.Tensor:
    """Return the tensor itself; its gradient is summed over the ranks of a group (default WORLD).

    For a parameter that all ranks hold and each rank applies to its part of the sequence, such as
    the weight of a norm between sequence-parallel layers::

        y = F.rms_norm(x_shard, (hidden,), ficco.nn.sum_gradient(self.weight, group))

    Raises:
        ValueError: ``tensor`` is a DTensor, or ``group`` is not a group that this rank is in.
        NotImplementedError: it is called inside ``torch.func.grad``.
    """
    refuse_unserved({"tensor": tensor})
    out: torch.Tensor = differentiable(_SUM_GRADIENT, process_group(group), tensor)[0]
    return out


def sequence_at(x: torch.Tensor, sequence_dim: int) -> int:
    """Return the dimension of the sequence as a non-negative index."""
    if not isinstance(x, torch.Tensor):
        raise not_a_tensor("x", x)
    dim = sequence_dim + x.dim() if sequence_dim < 0 else sequence_dim
    if not 0 <= dim < x.dim() - 1:
        raise ValueError(
            f"x: required the sequence in dimension {sequence_dim} and the features in the last "
            f"one, got shape {list(x.shape)}; set sequence_dim=0 for [sequence, batch, features] "
            "or [rows, features], 1 for [batch, sequence, features]"
        )
    return dim


def equal_part(x: torch.Tensor, dim: int, world: int) -> int:
    """Return the length of a rank's part of a sequence that the ranks share equally.

    Raises:
        ValueError: the length is not a multiple of the number of ranks.
    """
    if (length := x.shape[dim]) % world:
        raise ValueError(
            f"x: required a sequence (dimension {dim}) that {world} ranks share equally, got "
            f"{length}; pass rows= with the length of every rank's part"
        )
    return length // world


#: An alias that autograd does not consider a view, whose gradient stays as it lies in memory.
_ALIAS = torch.ops.aten._unsafe_view.default


def no_view(y: torch.Tensor) -> torch.Tensor:
    """Return ``y`` as a tensor that autograd does not consider a view, and that may be changed in
    place. Such a change of a view drops its hooks, such as FSDP2's, or is refused."""
    out: torch.Tensor = _ALIAS(y, y.shape)
    return out


def _parts(y: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Split the last dimension. For autograd a change of one part in place changes no other."""
    if len(sizes) == 1:
        return (y,)
    split: Any = torch.unsafe_split_with_sizes
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack():
        split = torch.split_with_sizes  # torch.func has no rule for the unsafe one
    parts: Sequence[torch.Tensor] = split(y, list(sizes), -1)
    return parts


def _with_batch(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Give a product of the rows of ``x`` the leading dimensions of ``x``."""
    return no_view(y.view(*x.shape[:-1], y.shape[1]))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return [..., k] as a matrix; a vector is one row."""
    return x[None] if x.dim() == 1 else x.flatten(0, -2)


def _infers(*operands: torch.Tensor) -> bool:
    """Whether a call needs none of the steps for gradients, compilers and other modes, which take
    longer than the product of a single token."""
    return not torch.is_grad_enabled() and not watched(*operands)


def _checked(rows: Sequence[int], world: int) -> tuple[int, ...]:
    key = frozen(rows)
    lengths: tuple[int, ...] = key if isinstance(key, tuple) else ()
    if len(lengths) != world or any(
        not isinstance(length, int) or length < 0 for length in lengths
    ):
        raise ValueError(
            f"rows: required {world} sequence lengths, one per rank, none negative, got {rows!r}"
        )
    return lengths


def _check_biases(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
    """Raise ``ValueError`` unless there are weights [n, k], each with a bias [n] or None."""
    pairs = zip(weights, biases, strict=False)
    fits = all(bias is None or bias.shape == weight.shape[:1] for weight, bias in pairs)
    if not (0 < len(weights) == len(biases) and fits):
        shapes = [None if one is None else list(one.shape) for one in (*weights, *biases)]
        raise ValueError(
            f"biases: required None or [n] for each of one or more weights [n, k], got {shapes}"
        )


def biased(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Add a bias to a product, whose dtype is narrower under autocast."""
    return y if bias is None else y + bias.to(y.dtype)


def _with_weights(
    x: torch.Tensor, call: OperatorCall, *weights: torch.Tensor, equal: bool = False
) -> torch.Tensor:
    """Make a call with several weights as one. ``equal``: all ranks use the sum in the same way
    (``options(all_reduce_gradients="equal")``)."""
    operands = {"x": x, **{f"weights[{i}]": weight for i, weight in enumerate(weights)}}
    refuse_unserved(operands, vmap=call.recipe is None and not equal)
    x, *rest = under_autocast(x, *weights)
    if watched(x, *rest):
        schedule, text, recipe = call.schedule, current_text(), call.recipe
        if equal:  # edits the text, which a compiler can trace
            text = (f"{text[:-1]}, " if text else "{") + '"all_reduce_gradients": "equal"}'
        name = schedule if isinstance(schedule, str) else name_of_schedule(schedule)
        request = call.group.group_name, name, call.rows, text, False
        cast = recipe.text if recipe is not None else ""
        return library.call(call.operator, x, _cat(rest).t(), *request, recipe=cast)[0]
    options = current()
    if equal:
        options = replace(options, all_reduce_gradients="equal")
    with carried(options):
        out: torch.Tensor = differentiable(
            _JOINED, _Joining(call, x.shape, _sizes(rest)), x, *rest
        )[0]
    return out


def _cat(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(weights)) if len(weights) > 1 else weights[0]


def _sizes(weights: Sequence[torch.Tensor]) -> list[int]:
    return [weight.shape[0] for weight in weights]


class _Joining(NamedTuple):
    """A call with several weights as one, which needs gradients. ``shape``: of x; ``sizes``: number
    of columns of each weight's result."""

    call: OperatorCall
    shape: Sequence[int]
    sizes: list[int]


def _joined(request: _Joining, operands: Sequence[torch.Tensor], needs: Needs) -> Any:
    """Run an operator with several weights: [m, k] x [n, k] for each -> [m', sum of n].

    The weights are joined anew in each pass: the backward reads the parameters, so that no joined
    copy is kept.
    """
    call, (x, *weights) = request.call, operands
    to_x, to_weights = needs[0], any(needs[1:])
    a, b, scales = call.operands(x, _cat(weights))
    # A float8 product gathers cast rows; gradients of weights need rows that are not cast.
    saves = current().save_gathered and to_weights and scales is None and call.operator in GATHERS
    arguments = call.group, call.schedule, call.rows, saves
    y, gathered = run(call.operator, a, b, *arguments, scales=scales)
    gathered = gathered if saves else None
    saved = x if to_weights and gathered is None else None, gathered, *(weights if to_x else ())
    return (y, gathered), saved  # as a result, so that autograd traces a saved `gathered` to x


def _joined_backward(request: _Joining, grads: Any, tensors: Any, needs: Needs) -> Gradients:
    (call, shape, sizes), (x, gathered, *weights) = request, tensors
    wanted = needs[0], any(needs[1:])
    joined = _cat(weights).t() if wanted[0] else None
    saved = SavedTensors(x, joined, gathered, shape, columns=True)
    grad_x, grad_joined = backward(call, grads[0], None, saved, wanted)
    if grad_joined is None:
        return grad_x, *(None for _ in needs[1:])
    return grad_x, *grad_joined.t().split(sizes)


_JOINED = Differentiable(_joined, _joined_backward, zeros=False)


def _same(group: ProcessGroup | None, operands: Sequence[torch.Tensor], needs: Needs) -> Any:
    (tensor,) = operands
    return (tensor.view_as(tensor),), ()


def _summed_backward(group: ProcessGroup | None, grads: Any, saved: Any, needs: Needs) -> Gradients:
    # A copy: upstream may use the incoming gradient elsewhere, too.
    grad = grads[0].clone(memory_format=torch.contiguous_format)
    dist.all_reduce(grad, group=group)
    return (grad,)


_SUM_GRADIENT = Differentiable(_same, _summed_backward)


class _Local(NamedTuple):
    """A product of an input that every rank has; without a group, of this rank only."""

    recipe: Float8Recipe | None
    group: ProcessGroup | None = None
    schedule: str | Schedule = "auto"


def _local(request: _Local, operands: Sequence[torch.Tensor], needs: Needs) -> Any:
    """Multiply without communication: [m, k] x [n, k] for several weights -> [m, n] for each."""
    x, *weights = operands
    saved = (x if any(needs[1:]) else None, *(weights if needs[0] else ()))
    if request.recipe is None:
        return tuple(x @ weight.t() for weight in weights), saved
    joined = request.recipe.product(x, _cat(weights))
    return tuple(y.contiguous() for y in joined.split(_sizes(weights), 1)), saved


def _local_backward(request: _Local, grads: Any, saved: Any, needs: Needs) -> Gradients:
    """Return the gradients. That of x is summed over the ranks of the group as it is computed."""
    (recipe, group, schedule), (x, *weights), grad_x = request, saved, None
    if needs[0]:
        joined, weight = torch.cat(grads, 1) if len(grads) > 1 else grads[0], _cat(weights)
        scales: dict[str, Any] = {}
        if recipe is not None and recipe.gradient and group is None:
            grad_x = recipe.product(joined, weight.t(), backward=True)
        elif group is None:
            grad_x = joined @ weight
        else:
            if recipe is not None and recipe.gradient:
                joined, weight, fields = recipe.operands(joined, weight.t(), backward=True)
                scales = fields._asdict()
            grad_x = matmul_all_reduce(joined, weight, group=group, schedule=schedule, **scales)
    pairs = zip(grads, needs[1:], strict=True)
    return grad_x, *(grad.t() @ x if need else None for grad, need in pairs)


_LOCAL = Differentiable(_local, _local_backward)
