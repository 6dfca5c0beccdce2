"""The operators of ``torch.library`` beside those of :mod:`ficco.ops.library`: attention, its
projections, and layers of experts.

For each kind of call there are ``ficco::<name>``, the result and what it keeps for its gradients
(empty unless one of the operands ``needs`` that), and ``ficco::<name>_backward``. What they return
are tensors of their own: results that share memory are views that are taken of one tensor.

What a gathering operator has gathered is not kept, and travels again;
``options(save_gathered=True)`` is for eager calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup, distributed_c10d

from ficco.ops.gradients import refuse_second
from ficco.ops.operands import bounds_of, check_bounds
from ficco.ops.operate import name_of_schedule, refuse_derivatives
from ficco.ops.registration import Declared, declare, overload
from ficco.options import carried, current, current_text, from_text, to_text
from ficco.schedules import Schedule

Tensors = Sequence[torch.Tensor]
Needs = Sequence[bool]

_WHERE = "str group, str schedule, str options"


class TracedCall(NamedTuple):
    """What a call is, without its operands."""

    group: ProcessGroup
    schedule: str | Schedule
    asked: dict[str, Any]


def needed(made: Tensors, needs: Needs) -> tuple[torch.Tensor | None, ...]:
    """One for each operand, of gradients of those that need one."""
    rest = iter(made)
    return tuple(next(rest) if needs_it else None for needs_it in needs)


class TracedOperator(NamedTuple):
    """How a kind of call is carried out, and what it makes.

    Attributes:
        operands: their names.
        asked: what a call is asked for, and the type that each has in a schema.
        kept: the names of what it keeps.
        forward: of a call, its operands, and which of these need gradients: the result and, if any
            does, what is kept, None for what these gradients do not need.
        fake_forward: the same, not computed; refuses operands that do not fit.
        saved: of the operands, the result and what is kept, and which gradients are needed: the
            same, None for what they are not made of.
        backward: of a call, the gradient of the result, what is saved, and which gradients are
            needed: gradients, of which none shares memory with another.
        fake_backward: the same, not computed.
        gradients: one for each operand, None if it needs none, of what ``backward`` returns.
    """

    operands: tuple[str, ...]
    asked: Mapping[str, str]
    kept: tuple[str, ...]
    forward: Callable[[TracedCall, Tensors, Needs], Sequence[torch.Tensor | None]]
    fake_forward: Callable[[TracedCall, Tensors, Needs], Sequence[torch.Tensor | None]]
    saved: Callable[[Tensors, Needs], Sequence[torch.Tensor | None]]
    backward: Callable[[TracedCall, torch.Tensor, Any, Needs], Tensors]
    fake_backward: Callable[[TracedCall, torch.Tensor, Any, Needs], Tensors]
    gradients: Callable[[Tensors, Needs], Sequence[torch.Tensor | None]] = needed

    @property
    def schema(self) -> str:
        operands = ", ".join(f"Tensor {name}" for name in self.operands)
        results = ", ".join(["Tensor"] * (1 + len(self.kept)))
        return f"({operands}, {self._call}) -> {f'({results})' if self.kept else results}"

    @property
    def schema_of_backward(self) -> str:
        saved = ", ".join(f"Tensor? {name}" for name in (*self.operands, "result", *self.kept))
        return f"(Tensor grad, {saved}, {self._call}) -> Tensor[]"

    @property
    def _call(self) -> str:
        asked = "".join(f"{kind} {name}, " for name, kind in self.asked.items())
        return f"bool[] needs, {asked}{_WHERE}"

    def declare(self, name: str) -> None:
        """Have both operators registered when they are first asked for."""
        back = f"{name}_backward"
        declare(
            name,
            Declared(
                self.schema,
                partial(_forward, self),
                partial(_fake_forward, self),
                (partial(_autograd, self, back), partial(_keep, self)),
            ),
        )
        real, fake = partial(_backward, self), partial(_fake_backward, self)
        declare(back, Declared(self.schema_of_backward, real, fake, (refuse_second, None)))

    def given(self, args: Sequence[Any]) -> TracedCall:
        """The call of what follows ``needs``."""
        *asked, group, schedule, _ = args
        values = (tuple(one) if isinstance(one, list) else one for one in asked)
        ranks = distributed_c10d._resolve_process_group(group)
        return TracedCall(ranks, schedule, dict(zip(self.asked, values, strict=True)))


def trace(
    name: str,
    operands: Tensors,
    group: ProcessGroup,
    schedule: str | Schedule,
    asked: Mapping[str, Any],
) -> torch.Tensor:
    """The result of a call through the ``torch.library`` operator; can be traced."""
    refuse_derivatives()
    text = schedule if isinstance(schedule, str) else name_of_schedule(schedule)
    grad = torch.is_grad_enabled()
    needs = [grad and one.requires_grad for one in operands]
    where = {"group": group.group_name, "schedule": text, "options": current_text()}
    made = overload(name)(*operands, needs, **asked, **where)
    result: torch.Tensor = made if isinstance(made, torch.Tensor) else made[0]
    return result


def listed(bounds: Sequence[int] | torch.Tensor | None) -> list[int]:
    """``cu_seqlens`` as an operator takes them; can be traced.

    Raises:
        ValueError: they are none.
    """
    if not torch.compiler.is_compiling():
        found = bounds_of(bounds)
        check_bounds(found)
        return list(found)
    if isinstance(bounds, torch.Tensor):
        raise ValueError("cu_seqlens: required a list in a compiled function, got a tensor")
    if isinstance(bounds, (int, float, str)) or bounds is not None and not len(bounds):
        raise ValueError(f"cu_seqlens: required a list or None, got {bounds!r}; pass one")
    return list(bounds or ())


@contextmanager
def _in_force(text: str) -> Iterator[None]:
    options = from_text(text) if text else current()
    with carried(replace(options, save_gathered=False)):
        yield


def _results(calls: TracedOperator, made: Sequence[torch.Tensor | None]) -> Any:
    """What an operator returns: nothing of what is not kept."""
    result, *kept = made
    assert result is not None
    if not calls.kept:
        return result
    kept += [None] * (len(calls.kept) - len(kept))
    return result, *(result.new_empty(0) if one is None else one for one in kept)


def _forward(calls: TracedOperator, *args: Any) -> Any:
    count = len(calls.operands)
    with _in_force(args[-1]):
        made = calls.forward(calls.given(args[count + 1 :]), args[:count], args[count])
    return _results(calls, made)


def _fake_forward(calls: TracedOperator, *args: Any) -> Any:
    count = len(calls.operands)
    made = calls.fake_forward(calls.given(args[count + 1 :]), args[:count], args[count])
    return _results(calls, made)


def _backward(calls: TracedOperator, *args: Any) -> list[torch.Tensor]:
    with _in_force(args[-1]):
        return list(calls.backward(*_of_backward(calls, args)))


def _fake_backward(calls: TracedOperator, *args: Any) -> list[torch.Tensor]:
    return list(calls.fake_backward(*_of_backward(calls, args)))


def _of_backward(
    calls: TracedOperator, args: Sequence[Any]
) -> tuple[TracedCall, torch.Tensor, Sequence[Any], Needs]:
    count = 2 + len(calls.operands) + len(calls.kept)
    return calls.given(args[count + 1 :]), args[0], args[1:count], args[count]


def _keep(calls: TracedOperator, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    count = len(calls.operands)
    *asked, text = inputs[count + 1 :]
    result, *kept = output if calls.kept else (output,)
    ctx.needs, ctx.asked = inputs[count], (*asked, text or to_text(current()))
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*calls.saved((*inputs[:count], result, *kept), ctx.needs))


def _autograd(
    calls: TracedOperator, name: str, ctx: Any, grad: torch.Tensor, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    needs = ctx.needs
    if any(asked and not kept for asked, kept in zip(ctx.needs_input_grad, needs, strict=False)):
        raise NotImplementedError(
            f"{name}: required operands that needed gradients when the call was traced; trace it "
            "with gradients"
        )
    made = calls.gradients(overload(name)(grad, *ctx.saved_tensors, needs, *ctx.asked), needs)
    wanted = zip(made, ctx.needs_input_grad, strict=False)
    rest = [None] * (1 + len(ctx.asked))
    return *(one if wants else None for one, wants in wanted), *rest
