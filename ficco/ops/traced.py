"""The operators of ``torch.library`` for attention, beside those of :mod:`ficco.ops.library`.

For each kind of attention there are ``ficco::<name>``, the result and its log-sum-exp (empty unless
it ``keeps`` what a gradient needs), and ``ficco::<name>_backward``. What they return are tensors of
their own: gradients that share memory are views that the autograd formula takes of one result.

Shards are kept for the gradient and travel again; ``options(save_gathered=True)`` is for eager
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.distributed import ProcessGroup, distributed_c10d

from ficco.ops.gradients import REFUSAL
from ficco.ops.library import register
from ficco.ops.operands import frozen
from ficco.ops.operate import name_of_schedule, refuse_derivatives
from ficco.options import carried, current, current_text, from_text, to_text
from ficco.schedules import Schedule

Tensors = tuple[torch.Tensor, ...]

_ASKED = (
    "bool causal, float? scale, str placement, int? window, int[] cu_seqlens, str group, "
    'str schedule="auto", str options=""'
)
_QKV = "Tensor q, Tensor k, Tensor v"
_FORWARD = f"({_QKV}, bool keeps, {_ASKED}) -> (Tensor, Tensor)"
_BACKWARD = f"(Tensor grad, {_QKV}, Tensor out, Tensor lse, {_ASKED}) -> Tensor[]"


class TracedAttention(NamedTuple):
    """How a kind of attention is carried out, and what it makes.

    Attributes:
        forward: of q, k, v, whether it keeps, group, schedule and what is asked: the result, and
            the log-sum-exp if it keeps.
        backward: of the gradient, q, k, v, the result, the log-sum-exp, and the same: gradients, of
            which none shares memory with another.
        fake_forward: of q, k, v and the number of ranks: the result and the log-sum-exp, not
            computed.
        fake_backward: of q and k: the gradients, not computed.
        gradients: dq, dk and dv of what ``backward`` returns.
        check: refuses q, k and v that do not fit together.
    """

    forward: Callable[..., Tensors]
    backward: Callable[..., Sequence[torch.Tensor]]
    fake_forward: Callable[[torch.Tensor, torch.Tensor, int], Tensors]
    fake_backward: Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]
    gradients: Callable[[Sequence[torch.Tensor]], Tensors]
    check: Callable[..., None]


class _Asked(NamedTuple):
    """What a call is, in the order of its schema."""

    causal: bool
    scale: float | None
    placement: str
    window: int | None
    cu_seqlens: Sequence[int]
    group: str
    schedule: str = "auto"
    options: str = ""

    def given(self) -> tuple[ProcessGroup, str, dict[str, Any]]:
        asked = {**self._asdict(), "cu_seqlens": tuple(self.cu_seqlens)}
        for name in ("group", "schedule", "options"):
            del asked[name]
        ranks = distributed_c10d._resolve_process_group(self.group)  # type: ignore[arg-type]
        return ranks, self.schedule, asked

    @contextmanager
    def in_force(self) -> Iterator[None]:
        options = from_text(self.options) if self.options else current()
        with carried(replace(options, save_gathered=False)):
            yield


def trace(
    op: OpOverload,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: ProcessGroup,
    schedule: str | Schedule,
    asked: dict[str, Any],
) -> torch.Tensor:
    """A call through the ``torch.library`` operator; can be traced."""
    refuse_derivatives()
    text = schedule if isinstance(schedule, str) else name_of_schedule(schedule)
    keeps = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    kind = asked["causal"], asked["scale"], asked.get("placement", "ranks"), asked["window"]
    bounds = asked["cu_seqlens"]
    if not torch.compiler.is_compiling():
        bounds = frozen(bounds)
    elif isinstance(bounds, torch.Tensor):
        raise ValueError("cu_seqlens: required a list in a compiled function, got a tensor")
    bounds = list(bounds or ())
    out: torch.Tensor = op(q, k, v, keeps, *kind, bounds, group.group_name, text, current_text())[0]
    return out


def define(name: str, calls: TracedAttention) -> OpOverload:
    """Define and register the operators of a kind of attention; the forward one."""
    forward = register(name, _FORWARD, partial(_forward, calls), partial(_fake_forward, calls))
    backward = register(
        f"{name}_backward", _BACKWARD, partial(_backward, calls), partial(_fake_backward, calls)
    )
    torch.library.register_autograd(
        f"ficco::{name}", partial(_autograd, backward, calls), setup_context=_setup_context
    )
    torch.library.register_autograd(f"ficco::{name}_backward", _second_derivative)
    return forward


def _forward(calls: TracedAttention, *args: Any) -> Tensors:
    *qkv, keeps = args[:4]
    asked = _Asked(*args[4:])
    with asked.in_force():
        out, *lse = calls.forward(*qkv, keeps, *asked.given())
    return out, lse[0] if keeps else out.new_empty(0)


def _fake_forward(calls: TracedAttention, *args: Any) -> Tensors:
    q, k, v, keeps = args[:4]
    group, schedule, asked = _Asked(*args[4:]).given()
    calls.check({"q": q, "k": k, "v": v}, schedule, asked)
    out, lse = calls.fake_forward(q, k, group.size())
    return out, lse if keeps else q.new_empty(0)


def _backward(calls: TracedAttention, *args: Any) -> list[torch.Tensor]:
    asked = _Asked(*args[6:])
    with asked.in_force():
        return list(calls.backward(*args[:6], *asked.given()))


def _fake_backward(calls: TracedAttention, *args: Any) -> list[torch.Tensor]:
    return calls.fake_backward(args[1], args[2])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    q, k, v, _, *asked, text = inputs
    ctx.asked = *asked, text or to_text(current())
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output)


def _autograd(
    op: OpOverload, calls: TracedAttention, ctx: Any, grad: torch.Tensor, _: Any
) -> tuple[torch.Tensor | None, ...]:
    made = calls.gradients(op(grad, *ctx.saved_tensors, *ctx.asked))
    needed = zip(made, ctx.needs_input_grad, strict=False)
    return *(one if needs else None for one, needs in needed), *[None] * 9


def _second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(REFUSAL)
