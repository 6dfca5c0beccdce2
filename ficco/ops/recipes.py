"""Float8 recipes: how the operands of a layer are cast, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ficco.compute.scaled import float8_of, multiply_scaled, quantized
from ficco.ops.operands import Scales
from ficco.ops.record import declare
from ficco.problems.scaling import CASTS, MULTIPLE, RECIPES, RESULTS

#: Scalings of devices that have an engine.
_SERVED = tuple(name for name, rules in RECIPES.items() if not rules.needs)


@dataclass(frozen=True)
class Float8Recipe:
    """How a linear layer multiplies in float8.

    The layer casts its input and its weight in every forward, and the gradient of its result in
    the backward. Scales are the smallest powers of two that avoid overflow. A part of a matrix
    with a separate scale is therefore rounded like the whole matrix, except for values about 2**14
    times smaller than the largest. The gradient of the weight is a product in the dtype of the
    input.

    Args:
        forward: granularity of the scales, ``"tensor"``, ``"row"`` or ``"block"`` (see
            ``docs/fp8.md``).
        gradient: the same for the product that computes the gradient of the input; None: a product
            in the dtype of the input. The gradient is cast to e4m3; with ``"tensor"`` to e5m2 if
            the device has it.
        use_fast_accum: the library may accumulate in less than float32, in the forward.

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
        self, a: torch.Tensor, weight: torch.Tensor, backward: bool = False, call: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, Scales]:
        """Return the operands of ``a [m, k] @ weight [n, k].t()`` in float8, and their scales.
        ``call``: an operator gets them, so ``a`` is left for it to cast where it can."""
        scaling = self.gradient if backward else self.forward
        assert scaling is not None
        check_operands_of(a, weight)
        (of_k, of_n), dtype = RECIPES[scaling].b, float8_of(a.device)
        wide = backward and scaling == "tensor" and dtype == torch.float8_e4m3fn
        right, scale_b = quantized(weight, (of_n, of_k), dtype)
        fast = self.use_fast_accum and not backward
        if call and scaling in CASTS:
            return a, right.t(), Scales(None, scale_b.t(), None, a.dtype, fast, scaling)
        left, scale_a = quantized(a, RECIPES[scaling].a, torch.float8_e5m2 if wide else dtype)
        return left, right.t(), Scales(scale_a, scale_b.t(), None, a.dtype, fast)

    def product(
        self, a: torch.Tensor, weight: torch.Tensor, backward: bool = False
    ) -> torch.Tensor:
        """``a [m, k] @ weight [n, k].t()`` in float8, without communication; can be traced."""
        out: torch.Tensor = torch.ops.ficco.float8_product(a, weight, self.text, backward)
        return out

    @property
    def text(self) -> str:
        """The recipe as text, see :func:`recipe_from`; ``torch.compile`` can trace this."""
        return f"{self.forward} {self.gradient} {self.use_fast_accum}"


@cache
def recipe_from(text: str) -> Float8Recipe | None:
    """Return the recipe of a text; None for an empty text."""
    if not text:
        return None
    forward, gradient, fast = text.split()
    return Float8Recipe(forward, None if gradient == "None" else gradient, fast == "True")


def _product(a: torch.Tensor, weight: torch.Tensor, text: str, backward: bool) -> torch.Tensor:
    recipe = recipe_from(text)
    assert recipe is not None
    left, right, scales = recipe.operands(a, weight, backward, call=False)
    assert scales.scale_a is not None and scales.scale_b is not None
    out = a.new_empty((a.shape[0], weight.shape[0]))
    scaling = recipe.gradient if backward else recipe.forward
    factors, fast = (scales.scale_a, scales.scale_b), scales.use_fast_accum
    multiply_scaled(left, right, out, factors, str(scaling), fast=fast)
    return out


def _fake_product(a: torch.Tensor, weight: torch.Tensor, text: str, backward: bool) -> torch.Tensor:
    check_operands_of(a, weight)
    return a.new_empty((a.shape[0], weight.shape[0]))


declare(
    "float8_product",
    "(Tensor a, Tensor weight, str recipe, bool backward) -> Tensor",
    _product,
    _fake_product,
)


def recipe_of(recipe: Any) -> Float8Recipe | None:
    """Return the recipe of an argument: a recipe, None, or the name of a scaling for both passes.

    Raises:
        ValueError: the argument is something else.
    """
    if recipe is None or isinstance(recipe, Float8Recipe):
        return recipe
    if not isinstance(recipe, str) or recipe not in _SERVED:
        raise ValueError(
            f"recipe: required a Float8Recipe, None or one of {', '.join(map(repr, _SERVED))}, got "
            f"{recipe!r}"
        )
    return Float8Recipe(recipe, recipe)


def check_operands_of(a: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise ``ValueError`` for operands of ``a @ weight.t()`` that no recipe casts."""
    if a.dtype != weight.dtype or str(a.dtype).removeprefix("torch.") not in RESULTS:
        raise ValueError(
            f"recipe: required x and weight of one dtype of {', '.join(RESULTS)}, got "
            f"{a.dtype} and {weight.dtype}; convert them"
        )
    check_multiples(*weight.shape)


def check_multiples(outputs: int, inputs: int) -> None:
    """Raise ``ValueError`` if no library multiplies this rank's weight in float8."""
    if outputs % MULTIPLE or inputs % MULTIPLE:
        raise ValueError(
            f"recipe: required a multiple of {MULTIPLE} inputs and outputs on each rank, got "
            f"{inputs} and {outputs}; pad the layer or leave the recipe out"
        )
