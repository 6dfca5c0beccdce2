"""The ``torch.autograd.Function`` of all ficco operators, which runs pairs of a forward and a
backward."""

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
