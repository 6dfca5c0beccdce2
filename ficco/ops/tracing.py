"""Calls that are traced or watched, and what is refused then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd import forward_ad

from ficco.schedules import Schedule

#: Tensors that hold data of their own; others (fake ones, wrappers) define what an operator does.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

#: Device types that have an engine. Autocast queries raise for some other types.
_AUTOCAST = frozenset({"cpu", "cuda"})


def watched(*operands: torch.Tensor) -> Any:
    """Whether a call is traced or watched, or has operands other than plain tensors."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or not _PLAIN.issuperset(map(type, operands))
    )


def check_traced(**operands: torch.Tensor) -> bool:
    """Whether a call is traced or watched. ``ValueError`` if an operand is no tensor or, of such a
    call, a DTensor; ``NotImplementedError`` inside ``torch.jit.trace``, or if one has a tangent."""
    for name, tensor in operands.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: required a torch.Tensor, got {type(tensor).__name__}")
    if torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0:
        refuse_other_modes(*operands.values())
    traced = bool(watched(*operands.values()))
    if traced:
        refuse_sharded(**operands)
    return traced


def check_eager(operator: str, **operands: torch.Tensor) -> None:
    """Refuse operands of an operator that is not traced: ``ValueError`` if one is no tensor, or a
    DTensor, ``NotImplementedError`` if the call is traced or watched."""
    if check_traced(**operands):
        raise NotImplementedError(
            f"ficco.{operator} is not traced; keep it out of compiled functions, or decorate its "
            "function with torch.compiler.disable"
        )


def refuse_derivatives(vmap: bool = True) -> None:
    """Refuse transforms of ``torch.func`` that are not served.

    Args:
        vmap: whether ``torch.func.vmap`` is served, too, as by operators of ``torch.library``.

    Raises:
        NotImplementedError: inside ``torch.func.grad`` or a transform built on it, or inside
            ``vmap`` if that is not served.
    """
    if torch.compiler.is_compiling():
        return
    kinds = torch._C._functorch.TransformType
    for transform in torch._C._functorch.get_interpreter_stack() or ():
        if transform.key() == kinds.Grad:
            raise NotImplementedError(
                "torch.func.grad, vjp and jacrev are not served; use backward() or "
                "torch.autograd.grad"
            )
        if transform.key() == kinds.Vmap and not vmap:
            raise NotImplementedError(
                "torch.func.vmap is not served here; call once with the batch as a leading "
                "dimension of x"
            )


def refuse_other_modes(*operands: torch.Tensor) -> None:
    """``NotImplementedError`` inside ``torch.jit.trace``, or if an operand has a tangent."""
    if torch._C._get_tracing_state() is not None:  # in which sizes are tensors
        raise NotImplementedError(
            "torch.jit.trace is not served; use torch.compile or torch.export"
        )
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(operand).tangent is not None for operand in operands
    ):
        raise NotImplementedError(
            "derivatives in forward mode (torch.func.jvp, dual tensors) are not served; use "
            "backward() or torch.autograd.grad"
        )


def refuse_unserved(operands: Mapping[str, torch.Tensor], vmap: bool = False) -> None:
    """Refuse the operands and transforms that a layer does not serve: see
    :func:`refuse_derivatives`, :func:`refuse_other_modes` and :func:`refuse_sharded`."""
    refuse_derivatives(vmap)
    refuse_other_modes(*operands.values())
    refuse_sharded(**operands)


def refuse_sharded(**operands: torch.Tensor) -> None:
    """``ValueError`` for DTensors: operands are plain tensors, this rank's parts."""
    for name, operand in operands.items():
        # Detected by an attribute: importing DTensor takes longer than importing ficco.
        if hasattr(operand, "placements"):
            raise ValueError(
                f"{name}: required a plain tensor, got a DTensor with {operand.placements}; pass "
                f"{name}.to_local()"
            )


def under_autocast(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Operands as ``torch.mm`` would take them: cast under autocast; gradients are cast back."""
    kind = operands[0].device.type
    if kind in _AUTOCAST and torch.is_autocast_enabled(kind):
        return tuple(_cast(one, kind) for one in operands)
    return operands


def _cast(operand: torch.Tensor, kind: str) -> torch.Tensor:
    if operand.device.type != kind or not operand.is_floating_point():
        return operand
    if operand.dtype == torch.float64 or operand.itemsize == 1:  # float8 lacks its scales
        return operand
    return operand.to(torch.get_autocast_dtype(kind))


def name_of_schedule(schedule: Schedule) -> str:
    return str(schedule)


# As torch.compiler.assume_constant_result does, which would import the compiler at once.
name_of_schedule._dynamo_marked_constant = True  # type: ignore[attr-defined]
