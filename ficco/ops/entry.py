"""Checks at the entry of every operator: the mode of the call, and refusals, which are reported to
the peers.

A rank may refuse a call before the call has a number. Its peers, which make the call, would then
wait until their time limit, without a reason. So a refused call counts as a call on the board: the
peers raise ``RankMismatch`` at once, with the class and the text of the refusal. If all ranks
refuse a call, no rank waits, and the group stays usable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch._guards import detect_fake_mode
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.distributed import ProcessGroup

from ficco.errors import FiccoError
from ficco.ops.operands import not_a_tensor, process_group
from ficco.options import current, options
from ficco.runtime.workspace import Workspace, is_told, workspace_for, workspaces
from ficco.schedules import Schedule

#: Tensor types that hold data. Other types (fake tensors, wrappers) override operators.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

#: Device types that have an engine. Autocast queries raise for some other types.
_AUTOCAST = frozenset({"cpu", "cuda"})


def watched(*operands: torch.Tensor) -> bool:
    """Return whether a call is traced or watched, or has operands that are not plain tensors."""
    if is_dynamo_compiling() or _len_torch_dispatch_stack() or peek_interpreter_stack() is not None:
        return True
    return not _PLAIN.issuperset(map(type, operands))


def check_traced(**operands: torch.Tensor) -> bool:
    """Return whether a call is traced or watched. Raises ``ValueError`` if an operand is not a
    tensor, or is a DTensor in a traced call; ``NotImplementedError`` inside ``torch.jit.trace``, or
    if an operand has a tangent."""
    for name, tensor in operands.items():
        if not isinstance(tensor, torch.Tensor):
            raise not_a_tensor(name, tensor)
    if torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0:
        refuse_other_modes(*operands.values())
    traced = watched(*operands.values())
    if traced:
        refuse_sharded(**operands)
    return traced


def refuse_derivatives(vmap: bool = True) -> None:
    """Refuse transforms of ``torch.func`` that are not served.

    Args:
        vmap: whether ``torch.func.vmap`` is served, as by operators of ``torch.library``.

    Raises:
        NotImplementedError: in derivatives of ``torch.func``, or in ``vmap`` if not served.
    """
    if is_compiling():
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
    """Raise ``NotImplementedError`` inside ``torch.jit.trace``, or if an operand has a tangent."""
    if torch._C._get_tracing_state() is not None:  # sizes are tensors there
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
    """Refuse operands and transforms that layers do not serve, by the functions that it calls.

    Raises:
        ValueError: also if an operand is no tensor.
    """
    for name, operand in operands.items():
        if not isinstance(operand, torch.Tensor):
            raise not_a_tensor(name, operand)
    refuse_derivatives(vmap)
    refuse_other_modes(*operands.values())
    refuse_sharded(**operands)


def refuse_sharded(**operands: torch.Tensor) -> None:
    """Raise ``ValueError`` for a DTensor: operands are plain tensors with this rank's part."""
    for name, operand in operands.items():
        # Detected by an attribute: importing DTensor takes longer than importing ficco.
        if hasattr(operand, "placements"):
            # The compiler of PyTorch 2.14 cannot format them.
            layout = "" if is_compiling() else f" with {operand.placements}"
            raise ValueError(
                f"{name}: required a plain tensor, got a DTensor{layout}; pass {name}.to_local()"
            )


def under_autocast(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return operands as ``torch.mm`` casts them under autocast; gradients are cast back."""
    if not torch._C._is_any_autocast_enabled():  # without the type of the device
        return operands
    kind = operands[0].device.type
    if kind in _AUTOCAST and torch.is_autocast_enabled(kind):
        return tuple(_cast(operand, kind) for operand in operands)
    return operands


def _cast(operand: torch.Tensor, kind: str) -> torch.Tensor:
    if operand.device.type != kind or not operand.is_floating_point():
        return operand
    if operand.dtype == torch.float64 or operand.itemsize == 1:  # a cast of float8 needs its scales
        return operand
    return operand.to(torch.get_autocast_dtype(kind))


def name_of_schedule(schedule: Schedule) -> str:
    return str(schedule)


# Equals torch.compiler.assume_constant_result, which would import the compiler at once.
name_of_schedule._dynamo_marked_constant = True  # type: ignore[attr-defined]


#: Seconds that a rank waits for its peers to report that it refuses the first call of a group.
JOIN_S = 60.0

P = ParamSpec("P")
R = TypeVar("R")


def tells_refusals(entry: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that makes calls: errors raised before its call has a number are
    reported to the peers.

    The group is the argument ``group``, or the group of a layer or a call among the arguments. The
    workspace is that on the device of an operand, or the only workspace of the group. Two kinds of
    refusals are not reported: while a compiler traces, and in a group without a workspace if no
    argument is a tensor on a device that an engine serves.
    """

    @wraps(entry)
    def reporting(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return entry(*args, **kwargs)
        except BaseException as error:
            tell_refusal(error, entry, args, kwargs)
            raise

    return reporting


def tell_refusal(error: BaseException, entry: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Report an error of a call of ``entry``, as :func:`tells_refusals` does."""
    if not is_compiling():
        with suppress(Exception):  # raise the refusal, not an error while reporting it
            _report(error, entry, args, kwargs)


def _report(error: BaseException, entry: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Post a refused call to the board, as a call that ended with ``error``."""
    if isinstance(error, FiccoError) or is_told(error):
        return  # not a refusal, or already reported
    arguments = signature(entry).bind(*args, **kwargs).arguments
    values = list(_values(arguments.values()))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if detect_fake_mode(tensors) is not None:
        return
    groups = [value.group for value in values if hasattr(value, "group")]
    group = process_group(arguments.get("group", *groups[:1]))
    operator = arguments.get("operator", entry.__qualname__)
    with options(timeout_s=min(JOIN_S, current().timeout_s or JOIN_S)):
        workspace = _workspace(group, tensors, operator)
    if workspace is not None and not workspace.occupied:
        workspace.raise_error()
        workspace.begin(operator, current())
        workspace.end(error)


def _values(arguments: Iterable[Any]) -> Iterator[Any]:
    """Yield arguments, the elements of tuples and lists, and the parameters of layers."""
    for argument in arguments:
        yield argument
        if isinstance(argument, (tuple, list)):
            yield from _values(argument)
        elif isinstance(argument, nn.Module):
            yield from argument.parameters()


def _workspace(group: ProcessGroup, tensors: list[torch.Tensor], operator: str) -> Workspace | None:
    """Return the workspace where the peers make the refused call, or None if it is unknown. Creates
    the first workspace of a group, together with the peers."""
    existing = workspaces(group)
    for tensor in tensors:
        for workspace in existing:
            if workspace.engine.device == tensor.device:
                return workspace
        if not existing:
            with suppress(ValueError, NotImplementedError):  # no engine serves the device
                return workspace_for(group, tensor.device, operator, current())
    return existing[0] if len(existing) == 1 else None
