"""Tells the peers of a call that this rank refuses before the call has a number.

The peers make the call and would wait for this rank until their limit passes, without the reason.
A refused call counts as one on the board, and so the peers raise ``RankMismatch`` at once, with the
class and the text of the refusal. If all ranks refuse a call, no rank waits, and the group stays
usable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.distributed import ProcessGroup

from ficco.errors import FiccoError
from ficco.ops.operands import process_group
from ficco.options import current, options
from ficco.runtime.workspace import Workspace, is_told, workspace_for, workspaces

#: Seconds that a rank which refuses the first call of a group waits for its peers, to tell them.
JOIN_S = 60.0

P = ParamSpec("P")
R = TypeVar("R")


def tells_refusals(entry: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that makes calls: the peers learn of what the function raises before
    its call has a number.

    The group is the argument ``group``, or the group of a layer or a call among the arguments. The
    workspace is the one on the device of an operand, or the only one of the group. Two kinds of
    refusals are not told: those while a compiler traces, and those in a group without a workspace
    if no argument is a tensor on a device that an engine serves.
    """

    @wraps(entry)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return entry(*args, **kwargs)
        except BaseException as error:
            if not torch.compiler.is_compiling():
                with suppress(Exception):  # the refusal says more than what keeps it from the peers
                    _tell(error, entry, args, kwargs)
            raise

    return told


def _tell(error: BaseException, entry: Callable[..., Any], args: Any, kwargs: Any) -> None:
    if isinstance(error, FiccoError) or is_told(error):
        return  # the peers know, or it is no refusal
    arguments = signature(entry).bind(*args, **kwargs).arguments
    values = list(_values(arguments.values()))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if detect_fake_mode(tensors) is not None:
        return
    of_others = [value.group for value in values if hasattr(value, "group")]
    group = process_group(arguments.get("group", *of_others[:1]))
    operator = arguments.get("operator", entry.__qualname__)
    with options(timeout_s=min(JOIN_S, current().timeout_s or JOIN_S)):
        workspace = _workspace(group, tensors, operator)
    if workspace is not None and not workspace.occupied:
        workspace.raise_error()
        workspace.begin(operator)
        workspace.end(error)


def _values(arguments: Iterable[Any]) -> Iterator[Any]:
    """Arguments, those in tuples and lists, and the parameters of layers."""
    for argument in arguments:
        yield argument
        if isinstance(argument, (tuple, list)):
            yield from _values(argument)
        elif isinstance(argument, nn.Module):
            yield from argument.parameters()


def _workspace(group: ProcessGroup, tensors: list[torch.Tensor], operator: str) -> Workspace | None:
    """The workspace in which the peers make the refused call; None if that is not known. The first
    workspace of a group is made here, together with the peers."""
    known = workspaces(group)
    for tensor in tensors:
        for workspace in known:
            if workspace.engine.device == tensor.device:
                return workspace
        if not known:
            with suppress(ValueError, NotImplementedError):  # no engine serves the device
                return workspace_for(group, tensor, "operand", operator)
    return known[0] if len(known) == 1 else None
