"""Gradients of ficco's own: one ``torch.autograd.Function``, which carries out records of a forward
and its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn

import torch

from ficco.options import carried, current

Saved = Sequence["torch.Tensor | None"]
Gradients = Sequence["torch.Tensor | None"]
Needs = Sequence[bool]

#: The text of the error that a second differentiation raises.
REFUSAL = "second derivatives of ficco's operators are not served"


class Differentiable(NamedTuple):
    """A forward, and the backward that belongs to it.

    Attributes:
        forward: of a request, its operands, and which of these need gradients: the results, and
            the tensors that the backward needs.
        backward: of the request, the gradients of the results, the tensors that the forward saved,
            and which operands need gradients: one gradient for each operand, or None. It runs under
            the options of the forward.
        zeros: the gradient of an unused result is a tensor of zeros; otherwise it is None.
    """

    forward: Callable[[Any, Sequence[torch.Tensor], Needs], tuple[tuple[Any, ...], Saved]]
    backward: Callable[[Any, Gradients, Any, Needs], Gradients]
    zeros: bool = True


def differentiable(record: Differentiable, request: Any, *operands: torch.Tensor) -> Any:
    """The results of a call, with gradients if an operand needs one."""
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
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
        ctx.save_for_backward(*saved)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The gradients, which cannot be differentiated again.

        PyTorch's ``once_differentiable`` refuses only if an incoming gradient requires a gradient
        itself, and only where the engine comes by its node. But a gradient also depends on the
        other operand, and ``torch.autograd.grad`` visits only what leads to its inputs: so the node
        that refuses lies between the gradients and all that they depend on.
        """
        refuse_batched(*grads)
        saved = ctx.saved_tensors  # once: a checkpointed block would run for each time
        record, request, needs = ctx.record, ctx.request, ctx.needs_input_grad[2:]
        differentiated = torch.is_grad_enabled()
        with (
            torch.no_grad() if differentiated else nullcontext(),
            nullcontext() if ctx.options is None else carried(ctx.options),
        ):
            results = None, None, *record.backward(request, grads, saved, needs)
        if not differentiated or torch.compiler.is_compiling():  # which refuses by itself
            return results
        sources = [source for source in (*saved, *grads) if source is not None]
        refuse: Any = torch._C._functions.DelayedError(
            REFUSAL.encode(), len(results) + len(sources)
        )
        plain = (None if result is None else result.detach() for result in results)
        refused: tuple[torch.Tensor | None, ...] = refuse(*plain, *sources)
        return refused[: len(results)]


def refuse_batched(*grads: torch.Tensor | None) -> None:
    """``NotImplementedError`` for batched gradients, as ``vmap`` makes them."""
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
    """The gradients of an operator of ``torch.library`` that makes gradients itself."""
    raise NotImplementedError(REFUSAL)
