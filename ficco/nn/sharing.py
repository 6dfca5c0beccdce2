"""One collective for several column-parallel layers that are called with the same input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ficco.nn.plain import local_of

#: The attribute that holds the :class:`SharedInput` of an input.
_ATTRIBUTE = "_ficco_shared"

Outputs = tuple[torch.Tensor, ...]


class SharedInput:
    """The outputs of several layers for one input, computed when the first layer is called.

    The input refers to this object and not the reverse: a cycle would keep activations alive.

    Args:
        layers: layers whose weights may be read before they are called.
        multiply: computes the outputs of all layers from the input.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        multiply: Callable[[torch.Tensor], Outputs],
    ) -> None:
        self.layers, self.multiply = layers, multiply
        self.hooks = _saving_hooks()
        self.outs: dict[nn.Module, torch.Tensor] | None = None
        # Modes and weights when `outs` was computed.
        self.modes: tuple[Any, ...] = ()
        self.weights: dict[nn.Module, list[Any]] = {}

    def serves(self, layer: nn.Module, x: torch.Tensor) -> bool:
        """Return whether this object has, or will have, the output for a layer."""
        # A checkpoint within the module would gather differently when it recomputes.
        if self.hooks != _saving_hooks():
            return False
        if self.outs is None:
            return layer in self.layers
        # A layer gathers separately if it is called a second time, as in recomputation; if its
        # gradient or autocast mode differs from the first layer's call; or if the input or its
        # weight has changed since.
        if layer not in self.outs or self.modes != _modes(x):
            return False
        pairs = zip(self.weights[layer], _weights(layer), strict=True)
        return all(old is new and counts == now for (old, *counts), (new, *now) in pairs)

    def take(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the output for a layer, once."""
        if self.outs is None:
            self.modes = _modes(x)
            self.weights = {member: _weights(member) for member in self.layers}
            self.outs = dict(zip(self.layers, self.multiply(x), strict=True))
        return self.outs.pop(layer)


def shared_output(x: torch.Tensor, layer: nn.Module) -> torch.Tensor | None:
    """Return the output for a layer if the input is shared with others, else None."""
    shared: SharedInput | None = getattr(x, _ATTRIBUTE, None)
    return shared.take(layer, x) if shared is not None and shared.serves(layer, x) else None


def share(x: torch.Tensor, shared: SharedInput) -> None:
    """Let layers that are called with ``x`` from now on share their communication."""
    setattr(x, _ATTRIBUTE, shared)


@contextmanager
def sharing(x: torch.Tensor, shared: SharedInput) -> Iterator[None]:
    """Let layers that are called with ``x`` within the block share their communication."""
    share(x, shared)
    try:
        yield
    finally:
        delattr(x, _ATTRIBUTE)


def _saving_hooks() -> Any:
    """Return the active hooks on tensors saved for a backward, such as checkpointing's."""
    if torch.compiler.is_compiling():
        return None
    # Available from PyTorch 2.8 on.
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)


def _modes(x: torch.Tensor) -> tuple[Any, ...]:
    """Return the modes that affect a product of ``x``, and the versions of ``x``."""
    kind = x.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    grad = torch.is_grad_enabled()
    if torch.compiler.is_compiling():  # compilers do not see version counts
        return grad, autocast
    return grad, autocast, *_versions(x)


def _weights(layer: nn.Module) -> list[tuple[Any, ...]]:
    """Return a layer's weight and bias with their version counts: see :func:`_versions`."""
    if torch.compiler.is_compiling():
        return []
    parameters: list[Any] = [param for param in (layer.weight, layer.bias) if param is not None]
    return [(param, *_versions(param)) for param in parameters]


def _versions(x: torch.Tensor) -> tuple[int | None, int | None]:
    """Return how often a tensor and its local part were changed in place; None for an inference
    tensor, which has no count."""
    own, local = (None if part.is_inference() else part._version for part in (x, local_of(x)))
    return own, local
