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


class _Forward(NamedTuple):
    """The arguments of a product, in the order of its schema."""

    a: torch.Tensor
    b: torch.Tensor
    group: str
    schedule: str = "auto"
    rows: Rows = None
    options: str = ""


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
    flat = None
    if rows is not None:  # an all-to-all's table row by row
        flat = [n for row in rows for n in (row if isinstance(row, (list, tuple)) else [row])]
    ops = OPS[operator]
    saves = saves_gathered(options) and torch.is_grad_enabled() and b.requires_grad
    if ops.gathered and (return_gathered or saves):
        out, gathered = ops.gathered(a, b, group, schedule, flat, options)
        return out, gathered if return_gathered else None
    return ops.product(a, b, group, schedule, flat, options), None


def _called(operator: str, given: _Forward | _Backward) -> OperatorCall:
    ranks = distributed_c10d._resolve_process_group(given.group)  # type: ignore[arg-type]
    world, rows = ranks.size(), given.rows
    table: tuple[Any, ...] | None = None if rows is None else tuple(rows)
    if table is not None and OPERATORS[operator].blocks and len(table) == world * world:
        table = tuple(table[i : i + world] for i in range(0, world * world, world))
    return OperatorCall(operator, ranks, given.schedule, table)  # checked by the call path


def _forward(operator: str, return_gathered: bool, *args: Any, **kwargs: Any) -> Any:
    given = _Forward(*args, **kwargs)
    called = _called(operator, given)
    with carried(from_text(given.options)) if given.options else nullcontext():
        result = run(
            operator, given.a, given.b, called.group, given.schedule, called.rows, return_gathered
        )
    return result if return_gathered else result[0]


def _fake_forward(operator: str, return_gathered: bool, *args: Any, **kwargs: Any) -> Any:
    given = _Forward(*args, **kwargs)
    a, b = given.a, given.b
    check_operands(operator, a, b)  # the call itself checks the rest
    (*m, k), n = a.shape, b.shape[1]
    multiplied = rows_multiplied(_called(operator, given), prod(m))
    out = a.new_empty((k if OPERATORS[operator].inner else multiplied, n))
    return (out, a.new_empty((multiplied, k))) if return_gathered else out


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, *call, text = inputs
    text = text or to_text(current())
    ctx.call = *call, text
    saves = isinstance(output, tuple) and from_text(text).save_gathered
    save(ctx, a, b, output[1] if saves else None)


def _autograd(
    operator: str, ctx: Any, grad: torch.Tensor | None, grad_gathered: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, ...]:
    needs_a = ctx.needs_input_grad[0] and not (grad is None and grad_gathered is None)
    needs_b = ctx.needs_input_grad[1] and grad is not None
    grads: list[torch.Tensor] = []
    if needs_a or needs_b:
        which = ctx.shape, ctx.columns, needs_a, needs_b
        grads = OPS[operator].backward(grad, grad_gathered, *ctx.saved_tensors, *which, *ctx.call)
    rest = iter(grads)
    return next(rest) if needs_a else None, next(rest) if needs_b else None, *[None] * 4


def _backward(operator: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    given = _Backward(*args, **kwargs)
    saved = SavedTensors(given.a, given.b, given.gathered, given.shape, given.columns)
    grads, needed = (given.grad, given.grad_gathered), (given.needs_a, given.needs_b)
    options = from_text(given.options)
    results = backward(_called(operator, given), options, *grads, saved, needed)
    return [gradient for gradient in results if gradient is not None]


def _fake_backward(operator: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    given = _Backward(*args, **kwargs)
    like = given.grad if given.grad is not None else given.grad_gathered
    assert like is not None
    grads = [like.new_empty(tuple(given.shape))] if given.needs_a else []
    if given.needs_b:
        (*m, k), n = given.shape, like.shape[1]
        if OPERATORS[operator].inner:
            k = rows_multiplied(_called(operator, given), prod(m))
        grads.append(like.new_empty((n, k)).t() if given.columns else like.new_empty((k, n)))
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
            f"ficco::{name}", partial(_autograd, operator), setup_context=_setup_context
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


def _forward_flops(operator: str, gathered: bool, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    """Operations of one rank's product: two for each multiplication."""
    given: Any = _Forward(*args, **kwargs)
    a, b = given.a, given.b
    if OPERATORS[operator].inner:
        rows = b[0]
    elif operator in GATHERS:
        rows = (out_shape[0] if gathered else out_shape)[0]
    else:
        rows = prod(a[:-1])
    count: int = 2 * rows * a[-1] * b[1]
    return count


def _backward_flops(operator: str, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    """Operations of one rank's gradients: each takes a product as large as the forward's."""
    given: Any = _Backward(*args, **kwargs)
    if given.grad is None:  # only the gradient of the gathered rows goes back, without a product
        return 0
    if OPERATORS[operator].inner:
        rows = out_shape[-1][0] if given.needs_b else given.b[0]
    elif operator in GATHERS:
        rows = given.grad[0]
    else:
        rows = prod(given.shape[:-1])
    count: int = 2 * rows * given.shape[-1] * given.grad[1] * (given.needs_a + given.needs_b)
    return count


for _operator_name, _ops in OPS.items():
    for _op, _formula in (
        (_ops.product, partial(_forward_flops, _operator_name, False)),
        (_ops.gathered, partial(_forward_flops, _operator_name, True)),
        (_ops.backward, partial(_backward_flops, _operator_name)),
    ):
        if _op:
            register_flop_formula(_op.overloadpacket)(_formula)
