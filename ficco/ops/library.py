"""The operators of ``torch.library``: the form in which compilers and ``torch.export`` see a call.

For each operator there are, in the namespace ``ficco``:

- ``<name>``: the product; with ``recipe``, the text of a :class:`ficco.ops.recipes.Float8Recipe`,
  of operands that the call casts to float8, its gradients accordingly;
- ``<name>_gathered``: the product and the gathered A, for ``all_gather_matmul`` and
  ``all_to_all_matmul``;
- ``<name>_scaled`` and ``<name>_scaled_gathered``: the same of float8 operands, without gradients;
- ``<name>_backward``: the gradients that are needed, in the order A, B, by
  :mod:`ficco.ops.gradients`. It is one operator, so that the parts that overlap stay together.

A group is passed by its name, as in PyTorch's functional collectives, and a schedule by its name.
``rows`` is a flat list, even for an all-to-all's table. ``options`` are those of a call and its
backward, see :func:`ficco.options.current_text`; the default is those in force at the call.
A call inside a compiled backward thus runs under the options of its compilation, wherever the
backward runs. Eager calls do not come here, see :mod:`ficco.ops.operators`.

PyTorch's ``FlopCounterMode`` counts the products that this rank computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.distributed import distributed_c10d

from ficco.ops.autograd import refuse_second
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
from ficco.ops.operands import Scales, check_operands, check_scaled, frozen
from ficco.ops.recipes import check_operands_of, recipe_from
from ficco.ops.record import Declared, declare, overload
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


@dataclass(frozen=True)
class Registered:
    """The ``torch.library`` operators of one of ficco's operators."""

    operator: str

    @property
    def product(self) -> OpOverload:
        return overload(self.operator)

    @property
    def gathered(self) -> OpOverload | None:
        return overload(f"{self.operator}_gathered") if self.operator in GATHERS else None

    @property
    def backward(self) -> OpOverload:
        return overload(f"{self.operator}_backward")

    @property
    def scaled(self) -> OpOverload | None:
        return None if OPERATORS[self.operator].inner else overload(f"{self.operator}_scaled")

    @property
    def scaled_gathered(self) -> OpOverload | None:
        return overload(f"{self.operator}_scaled_gathered") if self.operator in GATHERS else None


OPS = {operator: Registered(operator) for operator in DUAL}


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
    """A call through the ``torch.library`` operator; can be traced."""
    if not torch.compiler.is_compiling():
        rows = frozen(rows)
    flat = None
    if rows is not None:  # an all-to-all's table row by row
        flat = [n for row in rows for n in (row if isinstance(row, (list, tuple)) else [row])]
    ops = OPS[operator]
    if scales is not None:
        return _call_scaled(ops, a, b, scales, (group, schedule, flat, options), return_gathered)
    saves = saves_gathered(options) and torch.is_grad_enabled() and b.requires_grad
    # What is gathered in float8 is not what the gradient of b is made of.
    if ops.gathered and (return_gathered or saves) and not recipe:
        out, gathered = ops.gathered(a, b, group, schedule, flat, options)
        return out, gathered if return_gathered else None
    return ops.product(a, b, group, schedule, flat, options, recipe), None


def _call_scaled(
    ops: Registered,
    a: torch.Tensor,
    b: torch.Tensor,
    scales: Scales,
    where: tuple[Any, ...],
    return_gathered: bool,
) -> Result:
    *others, quantize = scales
    given = *others, *where, quantize
    if return_gathered and ops.scaled_gathered:
        both: tuple[torch.Tensor, torch.Tensor] = ops.scaled_gathered(a, b, *given)
        return both
    if ops.scaled is None:
        raise NotImplementedError(f"{ops.operator} does not take float8 operands; pass bfloat16")
    return ops.scaled(a, b, *given), None


def _called(operator: str, given: _Forward | _Scaled | _Backward) -> OperatorCall:
    ranks = distributed_c10d._resolve_process_group(given.group)  # type: ignore[arg-type]
    world, rows = ranks.size(), given.rows
    table: tuple[Any, ...] | None = None if rows is None else tuple(rows)
    if table is not None and OPERATORS[operator].blocks and len(table) == world * world:
        table = tuple(table[i : i + world] for i in range(0, world * world, world))
    recipe = None if isinstance(given, _Scaled) else recipe_from(given.recipe)
    # The rest is checked by the call path.
    return OperatorCall(operator, ranks, given.schedule, table, recipe=recipe)


def _forward(
    operator: str,
    return_gathered: bool,
    form: type[_Forward] | type[_Scaled],
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = form(*args, **kwargs)
    called = _called(operator, given)
    a, b, scales = given.a, given.b, given.scales if isinstance(given, _Scaled) else None
    if called.recipe is not None:
        a, b, scales = called.operands(a if a.dim() == 2 else a.flatten(0, -2), b.t())
    where = a, b, called.group, given.schedule, called.rows, return_gathered
    with carried(from_text(given.options)) if given.options else nullcontext():
        result = run(operator, *where, scales=scales)
    return result if return_gathered else result[0]


def _fake_forward(
    operator: str,
    return_gathered: bool,
    form: type[_Forward] | type[_Scaled],
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = form(*args, **kwargs)
    a, b, called, kind = given.a, given.b, _called(operator, given), OPERATORS[operator]
    scales = given.scales if isinstance(given, _Scaled) else None
    check_operands(operator, a, b, scales)  # the call itself checks the rest
    (*m, k), n = a.shape, b.shape[1]
    held = prod(m)
    dtype = a.dtype
    if scales is not None:
        dtype = scales.out_dtype or torch.bfloat16
        shared = not (kind.scatters or kind.blocks)
        each = tuple(called.rows or (held,) * called.group.size()) if shared else ()
        check_scaled(operator, a, b, scales, each)
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
        which = ctx.shape, ctx.columns, needs_a, needs_b
        grads = OPS[operator].backward(grad, grad_gathered, *ctx.saved_tensors, *which, *ctx.call)
    rest = iter(grads)
    return next(rest) if needs_a else None, next(rest) if needs_b else None, *[None] * 5


def _backward(operator: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    given = _Backward(*args, **kwargs)
    saved = SavedTensors(given.a, given.b, given.gathered, given.shape, given.columns)
    grads, needed = (given.grad, given.grad_gathered), (given.needs_a, given.needs_b)
    with carried(from_text(given.options)):
        results = backward(_called(operator, given), *grads, saved, needed)
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


# Operations as ``torch.utils.flop_counter`` counts them: it passes shapes instead of tensors.


def _forward_flops(operator: str, gathered: bool, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    """Operations of one rank's product: two for each multiplication."""
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


def _declare(operator: str) -> None:
    """The ``torch.library`` operators of one of ficco's operators."""
    forms: tuple[type[_Forward] | type[_Scaled], ...] = (_Forward, _Scaled)
    for gathered, form in product((False, True), forms):
        scaled = form is _Scaled
        if gathered and operator not in GATHERS or scaled and OPERATORS[operator].inner:
            continue
        schema = (_SCALED if scaled else _FORWARD) + ("(Tensor, Tensor)" if gathered else "Tensor")
        declare(
            operator + "_scaled" * scaled + "_gathered" * gathered,
            Declared(
                schema,
                partial(_forward, operator, gathered, form),
                partial(_fake_forward, operator, gathered, form),
                None if scaled else (partial(_autograd, operator), _setup_context),
                partial(_forward_flops, operator, gathered),
            ),
        )
    declare(
        f"{operator}_backward",
        Declared(
            _BACKWARD,
            partial(_backward, operator),
            partial(_fake_backward, operator),
            (refuse_second, None),
            partial(_backward_flops, operator),
        ),
    )


for _operator in DUAL:
    _declare(_operator)
