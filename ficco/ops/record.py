"""Operators as records. From one come the eager call with its gradients, and the operators of
``torch.library`` that compilers see, with their fakes, gradients and counts of operations.

For a record there are ``ficco::<name>``, the result and what it keeps for its gradients (empty
unless one of the operands ``needs`` that), and ``ficco::<name>_backward``. What they return are
tensors of their own: results that share memory are views that are taken of one tensor. Under a
compiler, what an operator has gathered is not kept, and travels again;
``options(save_gathered=True)`` is for eager calls. Products, which have schemas of their own, are
in :mod:`ficco.ops.library`.

An operator is registered when ``torch.ops.ficco.<name>`` is first read: by a call that is traced, a
policy of checkpointing, or a graph that was saved. Until then an operator costs ``import ficco`` no
more than its entry here; nor does Triton, which PyTorch's counter of operations imports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ficco.ops.autograd import (
    Differentiable,
    Function,
    Gradients,
    Needs,
    Saved,
    refuse_second,
)
from ficco.ops.entry import name_of_schedule, refuse_derivatives
from ficco.options import carried, current, current_text, from_text, to_text
from ficco.schedules import Schedule

Tensors = Sequence[torch.Tensor]
Shapes = Sequence[Sequence[int]]

_WHERE = "str group, str schedule, str options"


class Request(NamedTuple):
    """A call without its operands.

    Attributes:
        facts: what the call is asked for beside its operands, by name.
    """

    group: ProcessGroup
    schedule: str | Schedule
    facts: dict[str, Any]


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype that holds one element."""
    return tensor.new_empty(()).expand(tensor.shape)


def by_need(gradients: Tensors, needs: Needs) -> Gradients:
    """One for each operand, of the gradients of those that need one."""
    rest = iter(gradients)
    return tuple(next(rest) if need else None for need in needs)


@dataclass(frozen=True)
class Record:
    """An operator with one result.

    Attributes:
        name: in ``torch.ops.ficco``.
        operands: their names.
        facts: names of facts of a request, with the type that each has in a schema.
        kept: names of the tensors that a forward keeps for its backward.
        forward: of a request, its operands, and which of these need gradients: the result and, if
            any does, the tensors that are kept; None for one that these gradients do not need.
        fake_forward: the same shapes, not computed; refuses operands that do not fit.
        saved: of the operands, the result and what is kept, and which gradients are needed: the
            same, None for what the backward does not read.
        backward: of a request, the gradient of the result, what is saved, and which gradients are
            needed: gradients, of which none shares memory with another.
        fake_backward: the same shapes, not computed.
        gradients: one for each operand, None if it needs none, of what ``backward`` returns.
        flops: floating-point operations of a rank: of a request, the shapes of the operands, None
            for one that a backward does not save, that of the result, and which gradients are
            needed; None for the forward. They are those that ``FlopCounterMode`` counts.
    """

    name: str
    operands: tuple[str, ...]
    facts: Mapping[str, str]
    kept: tuple[str, ...]
    forward: Callable[[Request, Tensors, Needs], Saved]
    fake_forward: Callable[[Request, Tensors, Needs], Saved]
    saved: Callable[[Any, Needs], Saved]
    backward: Callable[[Request, torch.Tensor, Any, Needs], Tensors]
    fake_backward: Callable[[Request, torch.Tensor, Any, Needs], Tensors]
    gradients: Callable[[Tensors, Needs], Gradients] = by_need
    flops: Callable[[Request, Shapes, Sequence[int], Needs | None], int] | None = None

    def __post_init__(self) -> None:
        back, real, fake = f"{self.name}_backward", self._real_backward, self._fake_of_backward
        autograd = self._autograd, self._save
        counts = (self._count, self._count_backward) if self.flops else (None, None)
        forward = self._schema, self._real_forward, self._fake_of_forward, autograd, counts[0]
        declare(self.name, Declared(*forward))
        backward = self._backward_schema, real, fake, (refuse_second, None), counts[1]
        declare(back, Declared(*backward))

    @cached_property
    def _eager(self) -> Differentiable:
        """The call with gradients that is not traced."""
        return Differentiable(self._eager_forward, self._eager_backward)

    def __call__(self, request: Request, operands: Tensors, traced: bool) -> torch.Tensor:
        """The result of a call, ``traced`` or eager."""
        if traced:
            return self.trace(request, operands)
        if torch.is_grad_enabled():
            for operand in operands:
                if operand.requires_grad:
                    result: torch.Tensor = Function.apply(self._eager, request, *operands)[0]
                    return result
        out = self.forward(request, operands, (False,) * len(operands))[0]
        assert out is not None
        return out

    def trace(self, request: Request, operands: Tensors) -> torch.Tensor:
        """The result of a call through the ``torch.library`` operator; can be traced."""
        refuse_derivatives()
        group, schedule, facts = request
        text = schedule if isinstance(schedule, str) else name_of_schedule(schedule)
        grad = torch.is_grad_enabled()
        needs = [grad and one.requires_grad for one in operands]
        where = {"group": group.group_name, "schedule": text, "options": current_text()}
        results = overload(self.name)(*operands, needs, **facts, **where)
        out: torch.Tensor = results[0] if self.kept else results
        return out

    def _eager_forward(
        self, request: Request, operands: Tensors, needs: Needs
    ) -> tuple[tuple[Any], Saved]:
        results = self.forward(request, operands, needs)
        return (results[0],), self.saved((*operands, *results), needs)

    def _eager_backward(
        self, request: Request, grads: Gradients, saved: Any, needs: Needs
    ) -> Gradients:
        (grad,) = grads
        assert grad is not None
        return self.gradients(self.backward(request, grad, saved, needs), needs)

    # What compilers see.

    @property
    def _schema(self) -> str:
        operands = ", ".join(f"Tensor {name}" for name in self.operands)
        results = ", ".join(["Tensor"] * (1 + len(self.kept)))
        return f"({operands}, {self._call}) -> {f'({results})' if self.kept else results}"

    @property
    def _backward_schema(self) -> str:
        saved = ", ".join(f"Tensor? {name}" for name in (*self.operands, "result", *self.kept))
        return f"(Tensor grad, {saved}, {self._call}) -> Tensor[]"

    @property
    def _call(self) -> str:
        facts = "".join(f"{kind} {name}, " for name, kind in self.facts.items())
        return f"bool[] needs, {facts}{_WHERE}"

    def _request(self, args: Sequence[Any]) -> Request:
        """The request of the arguments that follow ``needs``."""
        *facts, group, schedule, _ = args
        values = (tuple(one) if isinstance(one, list) else one for one in facts)
        ranks = distributed_c10d._resolve_process_group(group)
        return Request(ranks, schedule, dict(zip(self.facts, values, strict=True)))

    def _of_forward(self, args: Sequence[Any]) -> tuple[Request, Tensors, Needs]:
        count = len(self.operands)
        return self._request(args[count + 1 :]), args[:count], args[count]

    def _of_backward(self, args: Sequence[Any]) -> tuple[Request, torch.Tensor, Any, Needs]:
        count = 2 + len(self.operands) + len(self.kept)
        return self._request(args[count + 1 :]), args[0], args[1:count], args[count]

    def _results(self, results: Saved) -> Any:
        """The results as the schema has them; those that are not kept are empty."""
        result, *kept = results
        assert result is not None
        if not self.kept:
            return result
        kept += [None] * (len(self.kept) - len(kept))
        return result, *(result.new_empty(0) if one is None else one for one in kept)

    def _real_forward(self, *args: Any) -> Any:
        with _in_force(args[-1]):
            return self._results(self.forward(*self._of_forward(args)))

    def _fake_of_forward(self, *args: Any) -> Any:
        return self._results(self.fake_forward(*self._of_forward(args)))

    def _real_backward(self, *args: Any) -> list[torch.Tensor]:
        with _in_force(args[-1]):
            return list(self.backward(*self._of_backward(args)))

    def _fake_of_backward(self, *args: Any) -> list[torch.Tensor]:
        return list(self.fake_backward(*self._of_backward(args)))

    def _count(self, *args: Any, out_shape: Any, **_: Any) -> int:
        assert self.flops is not None
        shapes: Any  # the counter passes them in place of tensors
        request, shapes, _needs = self._of_forward(args)
        return self.flops(request, shapes, out_shape[0] if self.kept else out_shape, None)

    def _count_backward(self, *args: Any, out_shape: Any, **_: Any) -> int:
        assert self.flops is not None
        grad: Any
        request, grad, saved, needs = self._of_backward(args)
        return self.flops(request, saved[: len(self.operands)], grad, needs)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        count = len(self.operands)
        *rest, options = inputs[count + 1 :]
        result, *kept = output if self.kept else (output,)
        ctx.needs, ctx.rest = inputs[count], (*rest, options or to_text(current()))
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(*self.saved((*inputs[:count], result, *kept), ctx.needs))

    def _autograd(
        self, ctx: Any, grad: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        needs, name = ctx.needs, f"{self.name}_backward"
        if any(now and not then for now, then in zip(ctx.needs_input_grad, needs, strict=False)):
            raise NotImplementedError(
                f"{name}: required operands that needed gradients when the call was traced; trace "
                "it with gradients"
            )
        results = overload(name)(grad, *ctx.saved_tensors, needs, *ctx.rest)
        gradients = zip(self.gradients(results, needs), ctx.needs_input_grad, strict=False)
        rest = [None] * (1 + len(ctx.rest))
        return *(one if need else None for one, need in gradients), *rest


@contextmanager
def _in_force(text: str) -> Iterator[None]:
    """Under the options of a text, or those of the caller for an empty one."""
    options = from_text(text) if text else current()
    with carried(replace(options, save_gathered=False)):
        yield


# Registration.

_DECLARED: dict[str, Declared] = {}
_LOCK = RLock()


class Declared(NamedTuple):
    """An operator of ``torch.library``.

    Attributes:
        schema: without its name.
        real: carries it out.
        fake: makes its results, not computed.
        autograd: its gradients, and what keeps for them what they need, as
            ``torch.library.register_autograd`` takes them; None for an operator without gradients.
        operations: how many, of shapes, as ``torch.utils.flop_counter`` counts them.
    """

    schema: str
    real: Callable[..., Any]
    fake: Callable[..., Any]
    autograd: tuple[Callable[..., Any], Callable[..., Any] | None] | None = None
    operations: Callable[..., int] | None = None


def declare(name: str, operator: Declared) -> None:
    """Have an operator registered when it is first asked for."""
    _DECLARED[name] = operator


def overload(name: str) -> OpOverload:
    """The operator of a name; can be traced."""
    op: OpOverload = getattr(torch.ops.ficco, name).default
    return op


def _ask(name: str) -> Any:
    """What the namespace does for a name that it does not have yet."""
    with _LOCK:
        if operator := _DECLARED.pop(name, None):  # PyTorch asks again while it registers
            _register(name, operator)
        if name in vars(torch.ops.ficco):
            return vars(torch.ops.ficco)[name]
    raise AttributeError(name)  # the namespace looks for itself


def _register(name: str, operator: Declared) -> None:
    whole = f"ficco::{name}"
    torch.library.define(whole, operator.schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(whole, "CompositeExplicitAutograd", operator.real)
    torch.library.register_fake(whole, operator.fake)
    if operator.autograd is not None:
        gradients, keep = operator.autograd
        torch.library.register_autograd(whole, gradients, setup_context=keep)
    if operator.operations is not None:
        _count(getattr(torch.ops.ficco, name), operator.operations)


def _count(packet: Any, operations: Callable[..., int]) -> None:
    from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

    register_flop_formula(packet)(operations)
    for mode in _get_current_dispatch_mode_stack():  # counters that count already have a copy
        counter = getattr(mode, "counter", None)
        if isinstance(counter, FlopCounterMode):
            counter.flop_registry[packet] = flop_registry[packet]


vars(torch.ops.ficco)["__getattr__"] = _ask
