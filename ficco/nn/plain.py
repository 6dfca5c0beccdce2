"""Whether reading a linear layer's weight equals calling the layer.

Other tools change a layer in five ways. They override its forward (adapters), add hooks (FSDP2,
pruning), compute its weight (parametrizations, weight norm), shard its weight once more (FSDP2
outside of its module's call), or give its weight custom kernels (quantization). Code that wants to
read the weight of a layer asks here first, and calls the layer if one of them applies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from ficco.ops.record import Differentiable, differentiable

#: The parameters that a parallel layer shards. Parameters that users add stay as they are.
PARAMETERS = ("weight", "bias")

#: The attributes with a module's hooks. Hooks before the forward may set the weight.
_PRE_HOOKS = ("_forward_pre_hooks",)
_HOOKS = (*_PRE_HOOKS, "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

#: The hooks of all modules, by these names.
_OF_ALL: dict[str, Any] = {kind: getattr(torch_module, f"_global{kind}") for kind in _HOOKS}


def called(layer: nn.Module, args: Any, out: Any) -> None:
    """Do nothing: ficco's own hook. Because a hook exists, ``nn.TransformerEncoderLayer`` calls its
    layers instead of reading their weights."""


def check_module(module: object) -> None:
    """Raise ``ValueError`` for anything but a module, such as its parameters."""
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"module: required a torch.nn.Module, got {type(module).__name__}; pass the model "
            "itself, not its parameters or its state_dict"
        )


def not_linear(module: nn.Module, forward: Callable[..., Any] = nn.Linear.forward) -> str:
    """Return why a layer is not a product by ``forward`` with its parameters; "" if it is."""
    kind = type(module)
    if getattr(kind, "forward", None) is not forward:
        return f"a {kind.__name__}"
    if "forward" in module.__dict__:
        return "one with a forward of its own"
    if any(name not in module._parameters for name in PARAMETERS):
        return f"a {kind.__name__} whose weight is computed"
    weight: Any = module.weight
    if own_kernel(weight):
        return f"one whose weight is a {type(local_of(weight)).__name__}"
    return ""


def hooked(module: nn.Module, kinds: tuple[str, ...] = _HOOKS) -> bool:
    """Return whether hooks other than ficco's own run when a module is called."""
    for kind in kinds:
        hooks = getattr(module, kind)
        if _OF_ALL[kind] or hooks and [*hooks.values()] != [called]:
            return True
    return False


def set_before_call(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Return whether the weight has its value before the module is called, so that it can be read
    together with other layers' weights. Hooks after the forward still run in the call."""
    return not not_linear(module, forward) and not hooked(module, _PRE_HOOKS)


def readable(module: nn.Module, forward: Callable[..., Any] = nn.Linear.forward) -> bool:
    """Return whether a product with the module's parameters equals a call of the module."""
    return not not_linear(module, forward) and not hooked(module)


def own_kernel(weight: torch.Tensor) -> bool:
    """Return whether a weight is a tensor subclass with its own kernels, such as torchao's
    quantized tensors. Products with it must use those kernels."""
    kind = type(weight)
    if kind is nn.Parameter or kind is torch.Tensor:
        return False
    local = local_of(weight)
    if type(local) is torch.Tensor:
        return False
    return not isinstance(local, AsyncCollectiveTensor) and is_traceable_wrapper_subclass(local)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, without a gradient; any other tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def of_dtensors(weight: torch.Tensor) -> bool:
    """Return whether a weight is a DTensor, or a subclass whose inner tensors are DTensors."""
    if isinstance(weight, DTensor):
        return True
    names, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    return any(isinstance(getattr(weight, name), DTensor) for name in names)


class _Layout(NamedTuple):
    """Where the parts of a DTensor lie. ``shape``: its own; None if all parts have the same."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size | None = None


def part_of(x: torch.Tensor, gradients: Sequence[Placement] | None = None) -> torch.Tensor:
    """Return ``x.to_local(grad_placements=gradients)`` of a DTensor, whose backward takes less host
    time; any other tensor unchanged."""
    part: torch.Tensor = parts_of([x], [gradients])[0]
    return part


def parts_of(
    tensors: Sequence[Any], gradients: Sequence[Sequence[Placement] | None] | None = None
) -> list[Any]:
    """Return :func:`part_of` of each DTensor, in one step of autograd, and the rest unchanged."""
    pairs = [*zip(tensors, gradients or (None,) * len(tensors), strict=True)]
    dtensors = [(x, own) for x, own in pairs if isinstance(x, DTensor)]
    fast = torch.is_grad_enabled() and not any(
        type(x._local_tensor) is not torch.Tensor or _by_torch(x.placements) for x, _ in dtensors
    )
    if fast and dtensors:
        layouts = [
            _Layout(x.device_mesh, tuple(own or x.placements), x.shape) for x, own in dtensors
        ]
        parts = iter(differentiable(_PARTS, layouts, *[x for x, _ in dtensors]))
    else:
        parts = iter([x.to_local(grad_placements=own) for x, own in dtensors])
    return [next(parts) if isinstance(x, DTensor) else x for x in tensors]


def placed(part: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """Return ``DTensor.from_local(part, mesh, placements, run_check=False)``, in less host time."""
    cut = part.requires_grad and not torch.is_grad_enabled()  # from its graph, by PyTorch
    if cut or type(part) is not torch.Tensor or _by_torch(placements):
        return DTensor.from_local(part, mesh, placements, run_check=False)
    x: DTensor = differentiable(_PLACED, [_Layout(mesh, placements)], part)[0]
    return x


def _by_torch(placements: tuple[Placement, ...]) -> bool:
    """Whether to leave a layout to PyTorch's functions: in compiled code, and for partial sums,
    whose gradients have another layout in newer releases."""
    return torch.compiler.is_compiling() or any(map(Placement.is_partial, placements))


@lru_cache(1024)
def _spec(layout: _Layout, shape: torch.Size, stride: Any, dtype: torch.dtype) -> Any:
    """PyTorch's description of a layout, for parts of this shape and stride."""
    with _disable_current_modes():  # a mode would see these operators in the first call only
        part = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        spec: Any = DTensor.from_local(part, layout.mesh, layout.placements, run_check=False)._spec
    spec.tensor_meta = spec.tensor_meta._replace(shape=layout.shape or spec.shape)
    return spec


def _put(layouts: Sequence[_Layout], parts: Sequence[torch.Tensor | None], *_: Any) -> Any:
    return tuple(
        None if part is None else _dtensor(layout, part)
        for layout, part in zip(layouts, parts, strict=True)
    )


def _dtensor(layout: _Layout, part: torch.Tensor) -> Any:
    shared = _spec(layout, part.shape, part.stride(), part.dtype)
    spec = object.__new__(type(shared))  # a copy, since operators of DTensors may change it
    vars(spec).update(vars(shared))
    if spec.mesh is not layout.mesh:  # an equal one, whose group may be another
        spec.mesh = layout.mesh
    create: Any = DTensor
    return create(part.view_as(part), spec, requires_grad=part.requires_grad)


def _take(tensors: Sequence[Any]) -> Any:
    parts = [None if one is None else local_of(one) for one in tensors]
    return tuple([None if part is None else part.view_as(part) for part in parts])


def _take_gradient(layouts: Sequence[_Layout], grads: Sequence[Any], *_: Any) -> Any:
    (grad,), (layout,) = grads, layouts
    if grad is not None and grad.placements != layout.placements:
        grad = grad.redistribute(placements=layout.placements)
    return _take((grad,))


_PARTS = Differentiable(lambda layouts, tensors, needs: (_take(tensors), ()), _put, zeros=False)
_PLACED = Differentiable(lambda *call: (_put(*call), ()), _take_gradient, zeros=False)
