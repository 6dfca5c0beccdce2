"""Recipes of float8: how the operands of a layer are cast, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ficco.dma.scaled import float8_of, multiply_scaled
from ficco.ops.operands import Scales
from ficco.scaling import ALL, MULTIPLE, RECIPES, RESULTS, factor_count

#: Scalings that every engine may serve.
_SERVED = tuple(name for name, rules in RECIPES.items() if not rules.needs)


@dataclass(frozen=True)
class Float8Recipe:
    """How a linear layer multiplies in float8.

    The layer casts its input and its weight in every forward, and the gradient of its result in
    the backward. Scales are powers of two, the smallest by which nothing overflows, so that parts
    of a matrix with scales of their own are rounded as the whole is, but for values some 2**14
    times smaller than the largest. The gradient of the weight is a product in the dtype of the
    input.

    Args:
        forward: how fine scales are, ``"tensor"``, ``"row"`` or ``"block"`` (see ``docs/fp8.md``).
        gradient: the same for the product that gives the gradient of the input; None: that is a
            product in the dtype of the input, too. The gradient is cast to e4m3, for ``"tensor"``
            to e5m2 where the device has it.
        use_fast_accum: the library may add up in less than float32, in the forward.

    Raises:
        ValueError: there is no such scaling.
    """

    forward: str = "row"
    gradient: str | None = "row"
    use_fast_accum: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("forward", _SERVED), ("gradient", (*_SERVED, None))):
            if (got := getattr(self, name)) not in allowed:
                raise ValueError(
                    f"{name}: required one of {', '.join(map(repr, allowed))}, got {got!r}"
                )
        if not isinstance(self.use_fast_accum, bool):
            raise ValueError(f"use_fast_accum: required True or False, got {self.use_fast_accum!r}")

    def operands(
        self, a: torch.Tensor, weight: torch.Tensor, backward: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, Scales]:
        """The operands of ``a [m, k] @ weight [n, k].t()`` in float8, and their scales."""
        scaling = self.gradient if backward else self.forward
        assert scaling is not None
        if a.dtype != weight.dtype or str(a.dtype).removeprefix("torch.") not in RESULTS:
            raise ValueError(
                f"recipe: required x and weight of one dtype of {', '.join(RESULTS)}, got "
                f"{a.dtype} and {weight.dtype}; convert them"
            )
        check_multiples(*weight.shape)
        (of_k, of_n), dtype = RECIPES[scaling].b, float8_of(a.device)
        wide = backward and scaling == "tensor" and dtype == torch.float8_e4m3fn
        left, scale_a = quantised(a, RECIPES[scaling].a, torch.float8_e5m2 if wide else dtype)
        right, scale_b = quantised(weight, (of_n, of_k), dtype)
        fast = self.use_fast_accum and not backward
        return left, right.t(), Scales(scale_a, scale_b.t(), None, a.dtype, fast)

    def product(
        self, a: torch.Tensor, weight: torch.Tensor, backward: bool = False
    ) -> torch.Tensor:
        """``a [m, k] @ weight [n, k].t()`` in float8, without communication."""
        left, right, scales = self.operands(a, weight, backward)
        assert scales.scale_a is not None and scales.scale_b is not None
        out = a.new_empty((a.shape[0], weight.shape[0]))
        scaling = self.gradient if backward else self.forward
        factors, fast = (scales.scale_a, scales.scale_b), scales.use_fast_accum
        multiply_scaled(left, right, out, factors, str(scaling), fast=fast)
        return out


def recipe_of(given: Any) -> Float8Recipe | None:
    """The recipe that an argument stands for: one, None, or the name of a scaling for both ways.

    Raises:
        ValueError: it stands for none.
    """
    if given is None or isinstance(given, Float8Recipe):
        return given
    if not isinstance(given, str) or given not in _SERVED:
        raise ValueError(
            f"recipe: required a Float8Recipe, None or one of {', '.join(map(repr, _SERVED))}, got "
            f"{given!r}"
        )
    return Float8Recipe(given, given)


def check_multiples(outputs: int, inputs: int) -> None:
    """``ValueError`` if no library multiplies a weight of this rank's in float8."""
    if outputs % MULTIPLE or inputs % MULTIPLE:
        raise ValueError(
            f"recipe: required a multiple of {MULTIPLE} inputs and outputs on each rank, got "
            f"{inputs} and {outputs}; pad the layer or leave the recipe out"
        )


def quantised(
    matrix: torch.Tensor, share: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in float8, and its scales in float32: so many rows and columns share one.

    Zeros get a scale that is not zero. What shares a scale with NaN or infinity is dequantised to
    NaN.
    """
    sizes = matrix.shape
    counts = [factor_count(size, one) for size, one in zip(sizes, share, strict=True)]
    each = [max(size, 1) if one == ALL else one for size, one in zip(sizes, share, strict=True)]
    spare = [count * one - size for count, one, size in zip(counts, each, sizes, strict=True)]
    padded = F.pad(matrix, (0, spare[1], 0, spare[0])) if any(spare) else matrix
    blocks = padded.reshape(counts[0], each[0], counts[1], each[1])
    largest = blocks.abs().amax((1, 3)).float() / torch.finfo(dtype).max
    # Up to a power of two: with any bit of the significand set, the addition carries into the
    # exponent, and the mask takes the significand off.
    bits = largest.clamp(min=torch.finfo(torch.float32).tiny).view(torch.int32)
    scale = (bits + 0x7FFFFF & 0x7F800000).view(torch.float32)
    cast = (blocks / scale[:, None, :, None]).to(dtype).view(padded.shape)
    return cast[: sizes[0], : sizes[1]].contiguous(), scale
