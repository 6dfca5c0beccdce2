"""Operators of ``torch.library`` in the namespace ``ficco``, each registered when first asked for.

Whoever asks, a call that is traced, a policy of checkpointing or a graph that was saved, asks for
``torch.ops.ficco.<name>``. Until then an operator costs ``import ficco`` no more than its entry
here; nor does Triton, which PyTorch's counter of operations imports.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

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
