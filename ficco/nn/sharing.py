"""One collective for several column-parallel layers that are called with the same input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ficco.nn.plain import local_of

#: The attribute of an input that has its :class:`SharedInput`.
_ATTRIBUTE = "_ficco_shared"

Outputs = tuple[torch.Tensor, ...]


class SharedInput:
    """The outputs of layers for one input, computed when the first of the layers is called.

    The input refers to this object and not the reverse: a cycle would keep activations alive.

    Args:
        layers: may be read before they are called.
        multiply: computes the outputs of the input for all layers.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        multiply: Callable[[torch.Tensor], Outputs],
    ) -> None:
        self.layers, self.multiply = layers, multiply
        self.hooks = _saving_hooks()
        self.outs: dict[nn.Module, torch.Tensor] | None = None
        # The modes and weights with which `outs` were computed.
        self.modes: tuple[Any, ...] = ()
        self.weights: dict[nn.Module, list[Any]] = {}

    def serves(self, layer: nn.Module, x: torch.Tensor) -> bool:
        """Return whether the output for a layer is, or will be, among these outputs."""
        # Inside a checkpoint within the module, a recomputation would gather differently.
        if self.hooks != _saving_hooks():
            return False
        if self.outs is None:
            return layer in self.layers
        # A layer gathers for itself if it is called a second time, as in recomputation; if its
        # gradient or autocast mode is not that of the first layer's call; or if the input or its
        # weight has changed since.
        if layer not in self.outs or self.modes != _modes(x):
            return False
        pairs = zip(self.weights[layer], _weights(layer), strict=True)
        return all(one is other and counts == now for (one, *counts), (other, *now) in pairs)

    def take(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the output for a layer, once."""
        if self.outs is None:
            self.modes = _modes(x)
            self.weights = {each: _weights(each) for each in self.layers}
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
    """The hooks in force on tensors that are saved for a backward, such as checkpointing's."""
    if torch.compiler.is_compiling():
        return None
    # Available from PyTorch 2.8 on.
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)


def _modes(x: torch.Tensor) -> tuple[Any, ...]:
    """What a product of an input depends on, apart from its other operand."""
    kind = x.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    grad = torch.is_grad_enabled()
    if torch.compiler.is_compiling():  # a compiler does not know version counts
        return grad, autocast
    return grad, autocast, *_versions(x)


def _weights(layer: nn.Module) -> list[tuple[Any, ...]]:
    """A layer's weight and bias, and how often each, and its local part, was changed in place."""
    if torch.compiler.is_compiling():
        return []
    parameters: list[Any] = [each for each in (layer.weight, layer.bias) if each is not None]
    return [(each, *_versions(each)) for each in parameters]


def _versions(x: torch.Tensor) -> tuple[int | None, int | None]:
    """How often a tensor and its local part were changed in place; None for an inference tensor,
    which has no count."""
    first, second = (None if one.is_inference() else one._version for one in (x, local_of(x)))
    return first, second
