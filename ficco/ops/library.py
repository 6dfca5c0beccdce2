"""The operators of ``torch.library``: the form in which compilers and ``torch.export`` see a call.

For each operator there are, in the namespace ``ficco``:

- ``<name>``: the product. With ``recipe``, the text of a :class:`ficco.ops.recipes.Float8Recipe`,
  the call and its gradients cast the operands to float8;
- ``<name>_gathered``: the product and the gathered A, for ``all_gather_matmul`` and
  ``all_to_all_matmul``;
- ``<name>_scaled`` and ``<name>_scaled_gathered``: the same for float8 operands, without gradients;
- ``<name>_backward``: the gradients that are needed, in the order A, B, by
  :mod:`ficco.ops.gradients`. It is one operator, so that the parts that overlap stay together.

A group is passed by its name, as in PyTorch's functional collectives, and a schedule by its name.
``rows`` is a flat list, even for an all-to-all's table. ``options`` hold for a call and its
backward, see :func:`ficco.options.current_text`; the default is the options in force at the call.
A call inside a compiled backward thus runs under the options of its compilation, wherever the
backward runs. Eager calls bypass this module, see :mod:`ficco.ops.operators`.

PyTorch's ``FlopCounterMode`` counts the products that this rank computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.distributed import distributed_c10d

from ficco.ops.call import Result
from ficco.ops.call import run_unwatched as run
from ficco.ops.gradients import (
    DUAL,
    GATHERS,
    OperatorCall,
    SavedTensors,
    backward,
    by_columns,
    rows_multiplied,
    to_save,
)
from ficco.ops.operands import Scales, check_operands, check_rows, check_scaled, frozen
from ficco.ops.recipes import check_operands_of, recipe_from
from ficco.ops.record import declare, overload, refuse_second
from ficco.options import carried, current, from_text, saves_gathered, to_text
from ficco.problems.products import OPERATORS

_CALL = 'str group, str schedule="auto", SymInt[]? rows=None, str options=""'
_CAST = f'{_CALL}, str recipe=""'
_FORWARD = f"(Tensor a, Tensor b, {_CAST}) -> "
_SCALED = (
    "(Tensor a, Tensor b, Tensor? scale_a, Tensor scale_b, Tensor? bias, ScalarType? out_dtype, "
    f"bool use_fast_accum, {_CALL}, str? quantize=None) -> "
)
_BACKWARD = (
    "(Tensor? grad, Tensor? grad_gathered, Tensor? a, Tensor? b, Tensor? gathered, "
    f"SymInt[] shape, bool columns, bool needs_a, bool needs_b, {_CAST}) -> Tensor[]"
)

Rows = Sequence[int] | None


class _Forward(NamedTuple):
    """The arguments of a product, in the order of its schema."""

    a: torch.Tensor
    b: torch.Tensor
    group: str
    schedule: str = "auto"
    rows: Rows = None
    options: str = ""
    recipe: str = ""


class _Scaled(NamedTuple):
    """The arguments of a product of float8 operands, in the order of its schema."""

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor | None
    scale_b: torch.Tensor
    bias: torch.Tensor | None
    out_dtype: torch.dtype | None
    use_fast_accum: bool
    group: str
    schedule: str = "auto"
    rows: Rows = None
    options: str = ""
    quantize: str | None = None

    @property
    def scales(self) -> Scales:
        return Scales(*self[2:7], self.quantize)


class _Backward(NamedTuple):
    """The arguments of a backward, in the order of its schema."""

    grad: torch.Tensor | None
    grad_gathered: torch.Tensor | None
    a: torch.Tensor | None
    b: torch.Tensor | None
    gathered: torch.Tensor | None
    shape: Sequence[int]
    columns: bool
    needs_a: bool
    needs_b: bool
    group: str
    schedule: str = "auto"
    rows: Rows = None
    options: str = ""
    recipe: str = ""


def product_of(operator: str, scaled: bool = False, gathered: bool = False) -> OpOverload:
    """Return the ``torch.library`` operator of a product; can be traced."""
    return overload(operator + "_scaled" * scaled + "_gathered" * gathered)


def call(
    operator: str,
    a: torch.Tensor,
    b: torch.Tensor,
    group: str,
    schedule: str,
    rows: Any,
    options: str,
    return_gathered: bool,
    scales: Scales | None = None,
    recipe: str = "",
) -> Result:
    """Make a call through its ``torch.library`` operator; can be traced."""
    if not torch.compiler.is_compiling():
        rows = frozen(rows)
        check_rows(rows)
    flat = None
    if rows is not None:  # an all-to-all's table row by row
        flat = [n for row in rows for n in (row if isinstance(row, (list, tuple)) else [row])]
    if scales is not None:
        if OPERATORS[operator].inner:
            raise NotImplementedError(f"{operator} does not take float8 operands; pass bfloat16")
        *others, quantize = scales
        op = product_of(operator, True, return_gathered)
        results = op(a, b, *others, group, schedule, flat, options, quantize)
        return results if return_gathered else (results, None)
    saves = saves_gathered(options) and torch.is_grad_enabled() and b.requires_grad
    # A float8 product gathers cast rows; the gradient of b needs rows that are not cast.
    if operator in GATHERS and (return_gathered or saves) and not recipe:
        out, gathered = product_of(operator, False, True)(a, b, group, schedule, flat, options)
        return out, gathered if return_gathered else None
    return product_of(operator)(a, b, group, schedule, flat, options, recipe), None


def _operator_call(operator: str, inputs: _Forward | _Scaled | _Backward) -> OperatorCall:
    """Return the call that the arguments of a ``torch.library`` operator stand for."""
    ranks = distributed_c10d._resolve_process_group(inputs.group)  # type: ignore[arg-type]
    world, rows = ranks.size(), inputs.rows
    table: tuple[Any, ...] | None = None if rows is None else tuple(rows)
    if table is not None and OPERATORS[operator].blocks and len(table) == world * world:
        table = tuple(table[i : i + world] for i in range(0, world * world, world))
    recipe = None if isinstance(inputs, _Scaled) else recipe_from(inputs.recipe)
    # The rest is checked by the call path.
    return OperatorCall(operator, ranks, inputs.schedule, table, recipe=recipe)


def _forward(
    operator: str,
    return_gathered: bool,
    form: type[_Forward] | type[_Scaled],
    *args: Any,
    **kwargs: Any,
) -> Any:
    inputs = form(*args, **kwargs)
    called = _operator_call(operator, inputs)
    a, b, scales = inputs.a, inputs.b, inputs.scales if isinstance(inputs, _Scaled) else None
    if called.recipe is not None:
        a, b, scales = called.operands(a if a.dim() == 2 else a.flatten(0, -2), b.t())
    request = a, b, called.group, inputs.schedule, called.rows, return_gathered
    with carried(from_text(inputs.options)) if inputs.options else nullcontext():
        result = run(operator, *request, scales=scales)
    return result if return_gathered else result[0]


def _fake_forward(
    operator: str,
    return_gathered: bool,
    form: type[_Forward] | type[_Scaled],
    *args: Any,
    **kwargs: Any,
) -> Any:
    inputs = form(*args, **kwargs)
    a, b, called, kind = inputs.a, inputs.b, _operator_call(operator, inputs), OPERATORS[operator]
    scales = inputs.scales if isinstance(inputs, _Scaled) else None
    check_operands(operator, a, b, scales)  # the call itself checks the rest
    (*m, k), n = a.shape, b.shape[1]
    held = prod(m)
    dtype = a.dtype
    if scales is not None:
        dtype = scales.out_dtype or torch.bfloat16
        shared = not (kind.scatters or kind.blocks)
        by_rank = tuple(called.rows or (held,) * called.group.size()) if shared else ()
        check_scaled(operator, a, b, scales, by_rank)
    if called.recipe is not None:
        check_operands_of(a, b.t())
    multiplied = rows_multiplied(called, held)
    out = a.new_empty((k if kind.inner else multiplied, n), dtype=dtype)
    return (out, a.new_empty((multiplied, k))) if return_gathered else out


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, *call, text, recipe = inputs
    text = text or to_text(current())
    ctx.call = *call, text, recipe
    saves = isinstance(output, tuple) and from_text(text).save_gathered
    ctx.shape, ctx.columns = a.shape, by_columns(b)
    ctx.set_materialize_grads(False)
    needs = ctx.needs_input_grad[:2]
    ctx.save_for_backward(*to_save(a, b, output[1] if saves else None, needs))


def _autograd(
    operator: str, ctx: Any, grad: torch.Tensor | None, grad_gathered: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, ...]:
    needs_a = ctx.needs_input_grad[0] and not (grad is None and grad_gathered is None)
    needs_b = ctx.needs_input_grad[1] and grad is not None
    grads: list[torch.Tensor] = []
    if needs_a or needs_b:
        rest = ctx.shape, ctx.columns, needs_a, needs_b, *ctx.call
        gradients = overload(f"{operator}_backward")
        grads = gradients(grad, grad_gathered, *ctx.saved_tensors, *rest)
    results = iter(grads)
    return next(results) if needs_a else None, next(results) if needs_b else None, *[None] * 5


def _backward(operator: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    inputs = _Backward(*args, **kwargs)
    saved = SavedTensors(inputs.a, inputs.b, inputs.gathered, inputs.shape, inputs.columns)
    grads, needed = (inputs.grad, inputs.grad_gathered), (inputs.needs_a, inputs.needs_b)
    with carried(from_text(inputs.options)):
        results = backward(_operator_call(operator, inputs), *grads, saved, needed)
    return [gradient for gradient in results if gradient is not None]


def _fake_backward(operator: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    inputs = _Backward(*args, **kwargs)
    like = inputs.grad if inputs.grad is not None else inputs.grad_gathered
    assert like is not None
    grads = [like.new_empty(tuple(inputs.shape))] if inputs.needs_a else []
    if inputs.needs_b:
        (*m, k), n = inputs.shape, like.shape[1]
        if OPERATORS[operator].inner:
            k = rows_multiplied(_operator_call(operator, inputs), prod(m))
        grads.append(like.new_empty((n, k)).t() if inputs.columns else like.new_empty((k, n)))
    return grads


# Operations as ``torch.utils.flop_counter`` counts them: it passes shapes instead of tensors.


def _forward_flops(operator: str, gathered: bool, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    """Count the operations of one rank's product: two for each multiplication."""
    a, b = ((kwargs | dict(zip("ab", args, strict=False)))[name] for name in "ab")
    if OPERATORS[operator].inner:
        rows = b[0]
    elif operator in GATHERS:
        rows = (out_shape[0] if gathered else out_shape)[0]
    else:
        rows = prod(a[:-1])
    count: int = 2 * rows * a[-1] * b[1]
    return count


def _backward_flops(operator: str, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    """Count the operations of one rank's gradients, each a product as large as the forward's."""
    inputs: Any = _Backward(*args, **kwargs)
    if inputs.grad is None:  # only the gradient of the gathered rows goes back, without a product
        return 0
    if OPERATORS[operator].inner:
        rows = out_shape[-1][0] if inputs.needs_b else inputs.b[0]
    elif operator in GATHERS:
        rows = inputs.grad[0]
    else:
        rows = prod(inputs.shape[:-1])
    count: int = 2 * rows * inputs.shape[-1] * inputs.grad[1] * (inputs.needs_a + inputs.needs_b)
    return count


def _declare(operator: str) -> None:
    """Declare the ``torch.library`` operators of one of ficco's operators."""
    forms: tuple[type[_Forward] | type[_Scaled], ...] = (_Forward, _Scaled)
    for gathered, form in product((False, True), forms):
        scaled = form is _Scaled
        if gathered and operator not in GATHERS or scaled and OPERATORS[operator].inner:
            continue
        schema = (_SCALED if scaled else _FORWARD) + ("(Tensor, Tensor)" if gathered else "Tensor")
        declare(
            operator + "_scaled" * scaled + "_gathered" * gathered,
            schema,
            partial(_forward, operator, gathered, form),
            partial(_fake_forward, operator, gathered, form),
            None if scaled else (partial(_autograd, operator), _setup_context),
            partial(_forward_flops, operator, gathered),
        )
    declare(
        f"{operator}_backward",
        _BACKWARD,
        partial(_backward, operator),
        partial(_fake_backward, operator),
        (refuse_second, None),
        partial(_backward_flops, operator),
    )


for _operator in DUAL:
    _declare(_operator)
