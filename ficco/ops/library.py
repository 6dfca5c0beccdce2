"""The operators of ``torch.library``: the form in which compilers and ``torch.export`` see a call.

For each operator there are, in the namespace ``ficco``:

- ``<name>``: the product;
- ``<name>_gathered``: the product and the gathered A, for ``all_gather_matmul`` and
  ``all_to_all_matmul``;
- ``<name>_backward``: the gradients that are needed, in the order A, B, by
  :mod:`ficco.ops.gradients`. It is one operator, so that the parts that overlap stay together.

A group is passed by its name, as in PyTorch's functional collectives, and a schedule by its name.
``rows`` is a flat list, even for an all-to-all's table. ``options`` are those of a call and its
backward, see :func:`ficco.options.current_text`; the default is those in force at the call.
A call inside a compiled backward thus runs under the options of its compilation, wherever the
backward runs. Eager calls do not come here, see :mod:`ficco.ops.operate`.

PyTorch's ``FlopCounterMode`` counts the products that this rank computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.distributed import distributed_c10d
from torch.utils.flop_counter import register_flop_formula

from ficco.ops.call import Result
from ficco.ops.call import run_unwatched as run
from ficco.ops.gradients import (
    DUAL,
    GATHERS,
    REFUSAL,
    OperatorCall,
    SavedTensors,
    backward,
    matrix,
    rows_multiplied,
    save,
)
from ficco.ops.operands import check_operands, frozen
from ficco.options import carried, current, from_text, saves_gathered, to_text
from ficco.problem import OPERATORS

_CALL = 'str group, str schedule="auto", SymInt[]? rows=None, str options=""'
_FORWARD = f"(Tensor a, Tensor b, {_CALL}) -> "
_BACKWARD = (
    "(Tensor? grad, Tensor? grad_gathered, Tensor? a, Tensor? b, Tensor? gathered, "
    f"SymInt[] shape, bool columns, bool needs_a, bool needs_b, {_CALL}) -> Tensor[]"
)

Rows = Sequence[int] | None


class Registered(NamedTuple):
    """The ``torch.library`` operators of one of ficco's operators."""

    product: OpOverload
    gathered: OpOverload | None
    backward: OpOverload


def call(
    operator: str,
    a: torch.Tensor,
    b: torch.Tensor,
    group: str,
    schedule: str,
    rows: Any,
    options: str,
    return_gathered: bool,
) -> Result:
    """A call through the ``torch.library`` operator; can be traced."""
    if not torch.compiler.is_compiling():
        rows = frozen(rows)
    flat = None if rows is None else _flat(rows)
    ops = OPS[operator]
    saves = saves_gathered(options) and torch.is_grad_enabled() and b.requires_grad
    if ops.gathered and (return_gathered or saves):
        out, gathered = ops.gathered(a, b, group, schedule, flat, options)
        return out, gathered if return_gathered else None
    return ops.product(a, b, group, schedule, flat, options), None


def _flat(rows: Any) -> list[int]:
    """Rows, or a table of rows, as one list."""
    return [number for row in rows for number in (row if isinstance(row, (list, tuple)) else [row])]


def _called(operator: str, group: str, schedule: str, rows: Rows) -> OperatorCall:
    ranks = distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    world = ranks.size()
    if rows is None:
        return OperatorCall(operator, ranks, schedule, None)
    if OPERATORS[operator].blocks and len(rows) == world * world:
        table = tuple(tuple(rows[i : i + world]) for i in range(0, world * world, world))
        return OperatorCall(operator, ranks, schedule, table)
    return OperatorCall(operator, ranks, schedule, tuple(rows))  # checked by the call path


def _forward(
    operator: str,
    return_gathered: bool,
    a: torch.Tensor,
    b: torch.Tensor,
    group: str,
    schedule: str = "auto",
    rows: Rows = None,
    options: str = "",
) -> Any:
    called = _called(operator, group, schedule, rows)
    with carried(from_text(options)) if options else nullcontext():
        result = run(operator, a, b, called.group, schedule, called.rows, return_gathered)
    return result if return_gathered else result[0]


def _fake_forward(
    operator: str,
    return_gathered: bool,
    a: torch.Tensor,
    b: torch.Tensor,
    group: str,
    schedule: str = "auto",
    rows: Rows = None,
    options: str = "",
) -> Any:
    check_operands(operator, a, b)  # the call itself checks the rest
    called = _called(operator, group, schedule, rows)
    m, (_, n), k = prod(a.shape[:-1]), b.shape, a.shape[-1]
    multiplied = rows_multiplied(called, m)
    out = a.new_empty((k if OPERATORS[operator].inner else multiplied, n))
    return (out, a.new_empty((multiplied, k))) if return_gathered else out


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, ctx.group, ctx.schedule, ctx.rows, text = inputs
    ctx.text = text or to_text(current())
    saves = isinstance(output, tuple) and from_text(ctx.text).save_gathered
    save(ctx, a, b, output[1] if saves else None)


def _autograd(
    operator: str, ctx: Any, grad: torch.Tensor | None, grad_gathered: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, ...]:
    a, b, gathered = ctx.saved_tensors
    needs_a = ctx.needs_input_grad[0] and not (grad is None and grad_gathered is None)
    needs_b = ctx.needs_input_grad[1] and grad is not None
    grads: list[torch.Tensor] = []
    if needs_a or needs_b:
        grads = OPS[operator].backward(
            grad,
            grad_gathered,
            a,
            b,
            gathered,
            ctx.shape,
            ctx.columns,
            needs_a,
            needs_b,
            ctx.group,
            ctx.schedule,
            ctx.rows,
            ctx.text,
        )
    rest = iter(grads)
    return next(rest) if needs_a else None, next(rest) if needs_b else None, *[None] * 4


def _backward(
    operator: str,
    grad: torch.Tensor | None,
    grad_gathered: torch.Tensor | None,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    gathered: torch.Tensor | None,
    shape: Sequence[int],
    columns: bool,
    needs_a: bool,
    needs_b: bool,
    group: str,
    schedule: str = "auto",
    rows: Rows = None,
    options: str = "",
) -> list[torch.Tensor]:
    called = _called(operator, group, schedule, rows)
    saved = SavedTensors(matrix(a), b, gathered, columns)
    grad = None if grad is None else grad.contiguous()
    grad_gathered = None if grad_gathered is None else grad_gathered.contiguous()
    with carried(from_text(options)):
        grad_a, grad_b = backward(called, grad, grad_gathered, saved, (needs_a, needs_b))
    grads = (None if grad_a is None else grad_a.view(shape), grad_b)
    return [gradient for gradient in grads if gradient is not None]


def _fake_backward(
    operator: str,
    grad: torch.Tensor | None,
    grad_gathered: torch.Tensor | None,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    gathered: torch.Tensor | None,
    shape: Sequence[int],
    columns: bool,
    needs_a: bool,
    needs_b: bool,
    group: str,
    schedule: str = "auto",
    rows: Rows = None,
    options: str = "",
) -> list[torch.Tensor]:
    like = grad if grad is not None else grad_gathered
    assert like is not None
    grads = [like.new_empty(tuple(shape))] if needs_a else []
    if needs_b:
        k, n = shape[-1], like.shape[1]
        if OPERATORS[operator].inner:
            k = rows_multiplied(_called(operator, group, schedule, rows), prod(shape[:-1]))
        grads.append(like.new_empty((n, k)).t() if columns else like.new_empty((k, n)))
    return grads


def _register(
    name: str, schema: str, real: Callable[..., Any], fake: Callable[..., Any]
) -> OpOverload:
    torch.library.define(f"ficco::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"ficco::{name}", "CompositeExplicitAutograd", real)
    torch.library.register_fake(f"ficco::{name}", fake)
    op: OpOverload = getattr(torch.ops.ficco, name).default
    return op


def _operator(operator: str) -> Registered:
    """Define and register the ``torch.library`` operators of one of ficco's operators."""
    forwards = []
    for gathered in (False, True) if operator in GATHERS else (False,):
        name = f"{operator}_gathered" if gathered else operator
        op = _register(
            name,
            _FORWARD + ("(Tensor, Tensor)" if gathered else "Tensor"),
            partial(_forward, operator, gathered),
            partial(_fake_forward, operator, gathered),
        )
        torch.library.register_autograd(
            f"ficco::{name}",
            partial(_autograd, operator),
            setup_context=_setup_context,
        )
        forwards.append(op)
    back = _register(
        f"{operator}_backward",
        _BACKWARD,
        partial(_backward, operator),
        partial(_fake_backward, operator),
    )
    torch.library.register_autograd(f"ficco::{operator}_backward", _second_derivative)
    return Registered(forwards[0], forwards[1] if len(forwards) > 1 else None, back)


def _second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(REFUSAL)


OPS = {operator: _operator(operator) for operator in DUAL}


# Operations as ``torch.utils.flop_counter`` counts them: it passes shapes instead of tensors.


def _forward_flops(
    operator: str,
    gathered: bool,
    a: Sequence[int],
    b: Sequence[int],
    *_: Any,
    out_shape: Any,
    **__: Any,
) -> int:
    """Operations of one rank's product: two for each multiplication."""
    if OPERATORS[operator].inner:
        rows = b[0]
    elif operator in GATHERS:
        rows = (out_shape[0] if gathered else out_shape)[0]
    else:
        rows = prod(a[:-1])
    return 2 * rows * a[-1] * b[1]


def _backward_flops(
    operator: str,
    grad: Sequence[int] | None,
    grad_gathered: Sequence[int] | None,
    a: Sequence[int] | None,
    b: Sequence[int] | None,
    gathered: Sequence[int] | None,
    shape: Sequence[int],
    columns: bool,
    needs_a: bool,
    needs_b: bool,
    *_: Any,
    out_shape: Any,
    **__: Any,
) -> int:
    """Operations of one rank's gradients: each takes a product as large as the forward's."""
    if grad is None:  # only the gradient of the gathered rows goes back, without a product
        return 0
    if OPERATORS[operator].inner:
        rows = out_shape[-1][0] if needs_b else b[0]  # type: ignore[index]
    elif operator in GATHERS:
        rows = grad[0]
    else:
        rows = prod(shape[:-1])
    return 2 * rows * shape[-1] * grad[1] * (needs_a + needs_b)


for _operator_name, _ops in OPS.items():
    for _op, _formula in (
        (_ops.product, partial(_forward_flops, _operator_name, False)),
        (_ops.gathered, partial(_forward_flops, _operator_name, True)),
        (_ops.backward, partial(_backward_flops, _operator_name)),
    ):
        if _op:
            register_flop_formula(_op.overloadpacket)(_formula)
