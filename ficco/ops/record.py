"""Operators as records: a record defines the eager call with its gradients, and the operators of
``torch.library`` that compilers see, with their fakes, gradients and operation counts.

A record declares ``ficco::<name>``, which returns the result and the tensors kept for its gradients
(empty unless an operand ``needs`` one), and ``ficco::<name>_backward``. The returned tensors do not
share memory; results that do are views taken of one returned tensor. Under a compiler gathered
rows are not kept and travel again: ``options(save_gathered=True)`` is for eager calls. Products
have separate schemas, in :mod:`ficco.ops.library`.

An operator is registered when ``torch.ops.ficco.<name>`` is first read: by a traced call, a
checkpointing policy or a saved graph. Until then it costs ``import ficco`` only an entry here, and
Triton, which PyTorch's operation counter imports, is not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from threading import RLock
from typing import Any, NamedTuple, NoReturn

import torch
from torch._ops import OpOverload
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ficco.ops.entry import name_of_schedule, refuse_derivatives
from ficco.options import carried, current, current_text, from_text, to_text
from ficco.schedules import Schedule

Saved = Sequence["torch.Tensor | None"]
Gradients = Sequence["torch.Tensor | None"]
Needs = Sequence[bool]

#: The text of the error that a second differentiation raises.
REFUSAL = "second derivatives of ficco's operators are not served"


class Differentiable(NamedTuple):
    """A forward, and the backward that belongs to it.

    Attributes:
        forward: takes a request, its operands, and which operands need gradients. Returns the
            results, and the tensors that the backward needs.
        backward: takes the request, the gradients of the results, the saved tensors, and which
            operands need gradients. Returns one gradient or None for each operand. It runs under
            the options of the forward.
        zeros: the gradient of an unused result is a tensor of zeros; otherwise it is None.
    """

    forward: Callable[[Any, Sequence[torch.Tensor], Needs], tuple[tuple[Any, ...], Saved]]
    backward: Callable[[Any, Gradients, Any, Needs], Gradients]
    zeros: bool = True


def differentiable(record: Differentiable, request: Any, *operands: torch.Tensor) -> Any:
    """Return the results of a call, with gradients if an operand needs one."""
    if torch.is_grad_enabled():
        for operand in operands:
            if operand.requires_grad:
                return Function.apply(record, request, *operands)
    return record.forward(request, operands, (False,) * len(operands))[0]


class Function(torch.autograd.Function):
    """A call of a :class:`Differentiable` whose operands need gradients."""

    @staticmethod
    def forward(
        ctx: Any, record: Differentiable, request: Any, *operands: torch.Tensor
    ) -> tuple[Any, ...]:
        ctx.record, ctx.request = record, request
        # Compiled code keeps the options of its compilation, forward and backward.
        ctx.options = None if torch.compiler.is_compiling() else current()
        if not record.zeros:
            ctx.set_materialize_grads(False)
        results, saved = record.forward(request, operands, ctx.needs_input_grad[2:])
        if saved:
            ctx.save_for_backward(*saved)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, which refuse a second differentiation.

        PyTorch's ``once_differentiable`` refuses only if an incoming gradient itself requires a
        gradient, and only if the engine visits its node. But a gradient also depends on the other
        operand, and ``torch.autograd.grad`` visits only nodes that lead to its inputs. So the
        refusing node is placed between the gradients and every tensor that they depend on.
        """
        refuse_batched(*grads)
        saved = ctx.saved_tensors  # read once: each read reruns a checkpointed block
        record, request, needs = ctx.record, ctx.request, ctx.needs_input_grad[2:]
        differentiated = torch.is_grad_enabled()
        with (
            torch.no_grad() if differentiated else nullcontext(),
            nullcontext() if ctx.options is None else carried(ctx.options),
        ):
            results = None, None, *record.backward(request, grads, saved, needs)
        if not differentiated or torch.compiler.is_compiling():  # a compiler refuses by itself
            return results
        sources = [source for source in (*saved, *grads) if source is not None]
        refuse: Any = torch._C._functions.DelayedError(
            REFUSAL.encode(), len(results) + len(sources)
        )
        plain = (None if result is None else result.detach() for result in results)
        refused: tuple[torch.Tensor | None, ...] = refuse(*plain, *sources)
        return refused[: len(results)]


def refuse_batched(*grads: torch.Tensor | None) -> None:
    """Raise ``NotImplementedError`` for batched gradients, such as those of ``vmap``."""
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


def refuse_second(ctx: Any, *grads: Any) -> NoReturn:
    """Refuse to differentiate a ``torch.library`` operator that computes gradients."""
    raise NotImplementedError(REFUSAL)


Tensors = Sequence[torch.Tensor]
Shapes = Sequence[Sequence[int]]

_WHERE = "str group, str schedule, str options"


class Request(NamedTuple):
    """A call without its operands.

    Attributes:
        facts: arguments of the call other than its operands, by name.
    """

    group: ProcessGroup
    schedule: str | Schedule
    facts: dict[str, Any]


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype that stores one element."""
    return tensor.new_empty(()).expand(tensor.shape)


def by_need(gradients: Tensors, needs: Needs) -> Gradients:
    """Spread the gradients of operands that need one over all operands, with None for the rest."""
    remaining = iter(gradients)
    return tuple(next(remaining) if need else None for need in needs)


@dataclass(frozen=True)
class Record:
    """An operator with one result.

    Attributes:
        name: in ``torch.ops.ficco``.
        operands: their names.
        facts: names of a request's facts, with their types in the schema.
        intermediates: names of the tensors that a forward keeps for its backward.
        forward: (request, operands, needs) -> the result and, if an operand needs a gradient, the
            kept tensors; None for a tensor that the needed gradients do not read.
        fake_forward: the same shapes, not computed; refuses operands that do not fit.
        saved: ((*operands, result, *intermediates), needs) -> the same tensors, None for those that
            the backward does not read.
        backward: (request, gradient of the result, saved tensors, needs) -> gradients, which do
            not share memory.
        fake_backward: the same shapes, not computed.
        gradients: (results of ``backward``, needs) -> one gradient or None for each operand.
        flops: (request, shapes of the operands, shape of the result, needs) -> floating-point
            operations of a rank, for ``FlopCounterMode``. A shape is None for an operand that a
            backward does not save; ``needs`` is None for the forward.
    """

    name: str
    operands: tuple[str, ...]
    facts: Mapping[str, str]
    intermediates: tuple[str, ...]
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
        declare(self.name, *forward)
        backward = self._backward_schema, real, fake, (refuse_second, None), counts[1]
        declare(back, *backward)

    @cached_property
    def _eager(self) -> Differentiable:
        """The eager call with gradients."""
        return Differentiable(self._eager_forward, self._eager_backward)

    def __call__(self, request: Request, operands: Tensors, traced: bool) -> torch.Tensor:
        """Return the result of a call, ``traced`` or eager."""
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
        """Return the result of a call through the ``torch.library`` operator; can be traced."""
        refuse_derivatives()
        group, schedule, facts = request
        text = schedule if isinstance(schedule, str) else name_of_schedule(schedule)
        grad = torch.is_grad_enabled()
        needs = [grad and operand.requires_grad for operand in operands]
        context = {"group": group.group_name, "schedule": text, "options": current_text()}
        results = overload(self.name)(*operands, needs, **facts, **context)
        out: torch.Tensor = results[0] if self.intermediates else results
        return out

    def _eager_forward(
        self, request: Request, operands: Tensors, needs: Needs
    ) -> tuple[tuple[Any], Saved]:
        results = self.forward(request, operands, needs)
        return (results[0],), self.saved((*operands, *results), needs)

    @torch._disable_dynamo  # compiled autograd would trace it, and the engine below it
    def _eager_backward(
        self, request: Request, grads: Gradients, saved: Any, needs: Needs
    ) -> Gradients:
        (grad,) = grads
        assert grad is not None
        return self.gradients(self.backward(request, grad, saved, needs), needs)

    # The operators of torch.library.

    @property
    def _schema(self) -> str:
        operands = ", ".join(f"Tensor {name}" for name in self.operands)
        results = ", ".join(["Tensor"] * (1 + len(self.intermediates)))
        return f"({operands}, {self._call}) -> {f'({results})' if self.intermediates else results}"

    @property
    def _backward_schema(self) -> str:
        saved = ", ".join(
            f"Tensor? {name}" for name in (*self.operands, "result", *self.intermediates)
        )
        return f"(Tensor grad, {saved}, {self._call}) -> Tensor[]"

    @property
    def _call(self) -> str:
        facts = "".join(f"{kind} {name}, " for name, kind in self.facts.items())
        return f"bool[] needs, {facts}{_WHERE}"

    def _request(self, args: Sequence[Any]) -> Request:
        """Return the request of the arguments that follow ``needs``."""
        *facts, group, schedule, _ = args
        values = (tuple(fact) if isinstance(fact, list) else fact for fact in facts)
        ranks = distributed_c10d._resolve_process_group(group)
        return Request(ranks, schedule, dict(zip(self.facts, values, strict=True)))

    def _of_forward(self, args: Sequence[Any]) -> tuple[Request, Tensors, Needs]:
        count = len(self.operands)
        return self._request(args[count + 1 :]), args[:count], args[count]

    def _of_backward(self, args: Sequence[Any]) -> tuple[Request, torch.Tensor, Any, Needs]:
        count = 2 + len(self.operands) + len(self.intermediates)
        return self._request(args[count + 1 :]), args[0], args[1:count], args[count]

    def _results(self, results: Saved) -> Any:
        """Return results as in the schema, with empty tensors for those that are not kept."""
        result, *intermediates = results
        assert result is not None
        if not self.intermediates:
            return result
        intermediates += [None] * (len(self.intermediates) - len(intermediates))
        return result, *(
            result.new_empty(0) if tensor is None else tensor for tensor in intermediates
        )

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
        return self.flops(request, shapes, out_shape[0] if self.intermediates else out_shape, None)

    def _count_backward(self, *args: Any, out_shape: Any, **_: Any) -> int:
        assert self.flops is not None
        grad: Any
        request, grad, saved, needs = self._of_backward(args)
        return self.flops(request, saved[: len(self.operands)], grad, needs)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        count = len(self.operands)
        *rest, options = inputs[count + 1 :]
        result, *intermediates = output if self.intermediates else (output,)
        ctx.needs, ctx.rest = inputs[count], (*rest, options or to_text(current()))
        ctx.mark_non_differentiable(*intermediates)
        ctx.save_for_backward(*self.saved((*inputs[:count], result, *intermediates), ctx.needs))

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
        return *(gradient if need else None for gradient, need in gradients), *rest


@contextmanager
def _in_force(text: str) -> Iterator[None]:
    """Run a block under the options of a text, or the caller's if it is empty, but without
    ``save_gathered``."""
    options = from_text(text) if text else current()
    with carried(replace(options, save_gathered=False)):
        yield


# Registration.

#: By name, the registration of a declared operator.
_DECLARED: dict[str, Callable[[], None]] = {}
_LOCK = RLock()


def declare(
    name: str,
    schema: str,
    real: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: tuple[Callable[..., Any], Callable[..., Any] | None] | None = None,
    operations: Callable[..., int] | None = None,
) -> None:
    """Have an operator of ``torch.library`` registered when it is first used.

    Args:
        schema: without the name.
        real: the implementation.
        fake: allocates the results without computing them.
        autograd: backward and ``setup_context`` for ``torch.library.register_autograd``; None for
            an operator without gradients.
        operations: number of operations, from shapes, for ``torch.utils.flop_counter``.
    """

    def register() -> None:
        qualified = f"ficco::{name}"
        torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(qualified, "CompositeExplicitAutograd", real)
        torch.library.register_fake(qualified, fake)
        if autograd is not None:
            gradients, save = autograd
            torch.library.register_autograd(qualified, gradients, setup_context=save)
        if operations is not None:
            _count(getattr(torch.ops.ficco, name), operations)

    _DECLARED[name] = register


def overload(name: str) -> OpOverload:
    """Return the operator of a name; can be traced."""
    op: OpOverload = getattr(torch.ops.ficco, name).default
    return op


def _load(name: str) -> Any:
    """Return an operator that the namespace does not have yet, after registering it."""
    with _LOCK:
        if register := _DECLARED.pop(name, None):  # popped: registration looks the name up again
            register()
        if name in vars(torch.ops.ficco):
            return vars(torch.ops.ficco)[name]
    raise AttributeError(name)  # the namespace then searches PyTorch's registry


def _count(packet: Any, operations: Callable[..., int]) -> None:
    from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

    register_flop_formula(packet)(operations)
    for mode in _get_current_dispatch_mode_stack():  # active counters have copied the registry
        counter = getattr(mode, "counter", None)
        if isinstance(counter, FlopCounterMode):
            counter.flop_registry[packet] = flop_registry[packet]


vars(torch.ops.ficco)["__getattr__"] = _load
