"""Training utilities for models with this package's layers.

PyTorch's own functions are correct for DTensors, the parameters of a layer of a DeviceMesh. They
take plain parameters for parameters of the whole model, but in a layer of a ProcessGroup these are
parts. This module therefore replaces the norm that ``torch.nn.utils.clip_grad_norm_`` computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grad, clip_grads_with_norm_, get_total_norm

from ficco.nn.functional import sum_gradient
from ficco.nn.linear import ColumnParallelLinear, Ranks, RowParallelLinear, plain_layers, ranks_of
from ficco.nn.plain import PARAMETERS, check_module, own_kernel

#: The layers with sharded parameters. They also sum the gradients of replicated parameters.
_LAYERS = (ColumnParallelLinear, RowParallelLinear)

Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the norm of a module's gradients as ``torch.nn.utils.clip_grad_norm_`` would clip those
    of the unsharded module; return the norm. All ranks call it, and all get the same norm.

    The weights and biases that layers of a ProcessGroup shard count once over all ranks of the
    group, DTensors over their mesh. Every other plain parameter counts once, and must have the
    same gradient on all ranks: see :func:`replicated`. It takes one all-gather of a number for each
    group.

    With ``ficco.nn`` imported, ``torch.nn.utils.clip_grad_norm_`` does the same for a list of
    parameters that are all plain or all DTensors. It does not refuse what this function refuses.

    Raises:
        ValueError: ``module`` is no module.
        NotImplementedError: whether a parameter is a part cannot be known, because a user or a
            parametrization added it to a parallel layer as a plain tensor, or because
            ``fully_shard`` sharded a layer of a ProcessGroup.
        RuntimeError: ``error_if_nonfinite`` is set and the norm is infinite or NaN.
    """
    check_module(module)
    norms: list[torch.Tensor] = []
    by_ranks = _by_ranks(module)
    for ranks, params in by_ranks.items():
        grads = [param.grad for param in params if param.grad is not None]
        if not grads and isinstance(ranks, ProcessGroup):  # peers may have gradients
            grads = [torch.zeros((), device=params[0].device)]
        if grads:
            norms.append(_norm(ranks, grads, norm_type))
    total = get_total_norm(norms, norm_type, error_if_nonfinite)
    for params in by_ranks.values():  # foreach kernels cannot mix plain tensors and DTensors
        clip_grads_with_norm_(params, max_norm, total)
    return total


def _norm(
    ranks: ProcessGroup | DeviceMesh | None, grads: list[torch.Tensor], norm_type: float
) -> torch.Tensor:
    """Return the norm of gradients that are sharded over a group, or are DTensors of a mesh, in at
    least float32."""
    norm: Any = get_total_norm(grads, norm_type)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    total: torch.Tensor = norm.to(torch.promote_types(norm.dtype, torch.float32))
    if isinstance(ranks, ProcessGroup):
        parts = total.new_empty(ranks.size())
        dist.all_gather(list(parts.unbind()), total, group=ranks)
        total = torch.linalg.vector_norm(parts, norm_type)
    return total


def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Return the total norm of gradients for ``torch.nn.utils.clip_grad_norm_``. Sharded gradients
    of layers of a ProcessGroup count once over all ranks of the group."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    parts = {
        id(param.grad): layer.group
        for layer in plain_layers
        for name, param in layer._parameters.items()
        if param is not None and (name == "weight" or layer.cut == 0)
    }
    by_group: dict[ProcessGroup | None, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_group.setdefault(parts.get(id(tensor)), []).append(tensor)
    if not any(by_group):
        total: torch.Tensor = _local_total_norm(tensors, norm_type, error_if_nonfinite, foreach)
        return total
    norms = [_norm(ranks, grads, norm_type) for ranks, grads in by_group.items()]
    return get_total_norm(norms, norm_type, error_if_nonfinite)


#: PyTorch's function. ``clip_grad_norm_`` looks the name up when it is called.
_local_total_norm: Any = clip_grad._get_total_norm
clip_grad._get_total_norm = _total_norm


def _by_ranks(module: nn.Module) -> dict[ProcessGroup | DeviceMesh | None, list[nn.Parameter]]:
    """Return trained parameters by the group that shards them, the mesh of DTensors, or None."""
    by_ranks: dict[Any, list[nn.Parameter]] = {}
    seen: set[nn.Parameter] = set()
    layers = {name: child for name, child in module.named_modules() if isinstance(child, _LAYERS)}
    for name, layer in layers.items():
        for inner, param in layer.named_parameters():
            if param in seen:
                continue
            seen.add(param)
            if not param.requires_grad:
                continue
            ranks: Any = None
            if isinstance(param, DTensor):
                if layer.mesh is None:
                    raise NotImplementedError(
                        f"{name}.{inner}: required a plain part in a layer of a ProcessGroup, got "
                        f"a DTensor over {param.device_mesh}, as fully_shard makes of it; give the "
                        "layer a DeviceMesh"
                    )
                ranks = param.device_mesh
            elif inner not in PARAMETERS:
                raise NotImplementedError(
                    f"{name}.{inner}: required a DTensor, or no parameter in a parallel layer but "
                    "its weight and bias, got a plain tensor, which may be a part or a whole; "
                    "give the layer a DeviceMesh, or put the parameter into a module around it"
                )
            elif inner == "weight" or layer.cut == 0:
                ranks = layer.group
            by_ranks.setdefault(ranks, []).append(param)
    for param in module.parameters():
        if param.requires_grad and param not in seen:
            ranks = param.device_mesh if isinstance(param, DTensor) else None
            by_ranks.setdefault(ranks, []).append(param)
    return by_ranks


def replicated(module: Module, group: ProcessGroup | DeviceMesh | None = None) -> Module:
    """Make a module sum the gradients of its parameters over the ranks of a group; return it.

    All ranks hold the parameters, and each rank calls the module with its part of the sequence. For
    a norm between parallel layers, an embedding, :class:`UlyssesAttention`, or a whole model.
    Parameters in :class:`ColumnParallelLinear` and :class:`RowParallelLinear` stay unchanged,
    since these layers sum gradients where necessary::

        model = ficco.nn.replicated(nn.Sequential(nn.RMSNorm(4096), up, nn.SiLU(), down), mesh)

    The module is changed in place; names in its state_dict stay. Call it before the optimizer and
    ``fully_shard`` get the parameters. The forward of the module has to use the parameters: a
    gradient that other code computes with them is not summed. A checkpoint has to call the module
    or modules in it.

    Args:
        module: has equal parameters on all ranks.
        group: as for :class:`ColumnParallelLinear`; with a DeviceMesh the parameters become
            DTensors, ``Replicate()``, like parameters of the layers.

    Raises:
        ValueError: ``module`` is no module, a parameter is a DTensor already, or, when the module
            is called, ``fully_shard`` has sharded it.
    """
    check_module(module)
    ranks = ranks_of(group)
    for name, owner in _own_modules(module):
        for inner, param in owner._parameters.items():
            if isinstance(param, DTensor):
                raise ValueError(
                    f"module: required plain parameters, got {inner} of {name or 'the module'}, a "
                    f"DTensor with {param.placements}; call replicated before parallelize_module "
                    "and fully_shard, or on the modules that these leave"
                )
    if ranks.mesh is not None:
        _distribute(module, ranks.mesh)
    for name, owner in _own_modules(module):  # a checkpoint may call any of them in the backward
        owner.__dict__.setdefault("_before_summed", [])
        owner.register_forward_pre_hook(partial(_use_summed, ranks, not name))
        owner.register_forward_hook(_use_own, always_call=True)
    return module


def _own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and its submodules, with their names, except parallel layers and below."""
    if isinstance(module, _LAYERS):
        return
    yield prefix, module
    for name, child in module.named_children():
        yield from _own_modules(child, f"{prefix}.{name}" if prefix else name)


def _distribute(module: nn.Module, mesh: DeviceMesh) -> None:
    distributed: dict[nn.Parameter, nn.Parameter] = {}
    for _, owner in _own_modules(module):
        for name, param in owner._parameters.items():
            if param is None or own_kernel(param):  # a quantized weight stays plain
                continue
            if param not in distributed:
                tensor = DTensor.from_local(param.detach(), mesh, [Replicate()], run_check=False)
                distributed[param] = nn.Parameter(tensor, param.requires_grad)
            owner._parameters[name] = distributed[param]


def _use_summed(ranks: Ranks, whole: bool, module: nn.Module, args: Any) -> None:
    """Pre-hook: let the forward read tensors whose gradients are summed over the ranks. ``whole``:
    also where the module's caller already reads such tensors."""
    before: list[tuple[nn.Module, str, torch.Tensor | None]] = []
    module._before_summed.append(before)  # type: ignore[operator, union-attr]
    for _, owner in _own_modules(module):
        for name, param in owner._parameters.items():
            # An instance attribute takes precedence over the parameter of the same name.
            if param is None or (name in owner.__dict__ and not whole):
                continue
            tensor: torch.Tensor = param
            if isinstance(param, DTensor):
                if param.device_mesh != ranks.mesh:
                    raise ValueError(
                        f"{name}: required a plain tensor, or a DTensor over {ranks.mesh}, got a "
                        f"DTensor over {param.device_mesh}, as fully_shard leaves it between "
                        "calls; call replicated on each module that fully_shard wraps, or on "
                        "modules in it, and call these within its forward"
                    )
                tensor = param.to_local()
            if param.requires_grad:
                tensor = sum_gradient(tensor, ranks.group)
            before.append((owner, name, owner.__dict__.get(name)))
            owner.__dict__[name] = tensor


def _use_own(module: nn.Module, args: Any, out: Any) -> None:
    """Hook: undo :func:`_use_summed`, also after an error."""
    for owner, name, tensor in reversed(module._before_summed.pop()):  # type: ignore[operator, union-attr]
        if tensor is None:
            owner.__dict__.pop(name, None)
        else:
            owner.__dict__[name] = tensor
