"""What layers of float8 round, and what they do not, in all their forms.

Integers up to 40 in magnitude are rounded by the cast, and their sums are exact in float32. So the
results of layers have one right answer, which a cast without factors and a plain product give.
"""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from ranks import Rank, ranks, run
from test_nn import integers, mesh_of, part, plain, same
from torch import nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = ("tensor", "row", "block")
#: Features of layers, and the length of the sequence.
HIDDEN, WIDE, SEQUENCE = 64, 128, 8
large = partial(integers, most=40)


def rounded(x: torch.Tensor, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """As float8 has it, without factors: the integers here need none."""
    return x.to(dtype).to(x.dtype)


def linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs)
    with torch.no_grad():
        for i, param in enumerate(made.parameters()):
            param.copy_(large(*param.shape, seed=100 * seed + i))
    return made


class Plain(torch.autograd.Function):
    """The unsharded product: a forward in float8, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, lower: str | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.lower = lower
        return rounded(x) @ rounded(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        of_x = grad @ weight
        if ctx.lower:
            of_x = rounded(grad, E5M2 if ctx.lower == "tensor" else E4M3) @ rounded(weight)
        return of_x, grad.flatten(0, -2).t() @ x.flatten(0, -2), None


def wanted(x: torch.Tensor, layer: nn.Linear, grad: torch.Tensor, lower: str | None) -> Any:
    """Result, gradient of x and the layer's gradients. ``lower``: the scaling of that of x."""
    x, layer = x.clone().requires_grad_(), copy.deepcopy(layer)
    y = Plain.apply(x, layer.weight, lower) + layer.bias
    y.backward(grad)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


def _functions(at: Rank, scaling: str) -> int:
    from ficco.nn import (
        Float8Recipe,
        copied_linear,
        gathered_linears,
        reduced_linear,
        scattered_linear,
    )

    uneven = {1: [8], 2: [3, 5], 4: [3, 0, 4, 1]}[at.world]
    layer, other = linear(HIDDEN, WIDE, 1), linear(HIDDEN, HIDDEN, 2)
    checked = 0
    for lower, rows, dim in product((None, scaling), (None, uneven), (0, 1)):
        recipe = Float8Recipe(scaling, lower)
        about = f"rank {at.rank}, {recipe}, rows={rows}, sequence_dim={dim}"
        sizes = (SEQUENCE, 3) if dim == 0 else (3, SEQUENCE)
        x, grad = large(*sizes, HIDDEN, seed=3), large(*sizes, WIDE, seed=4)
        more = large(*sizes, HIDDEN, seed=5)
        y, of_x, of_weight, of_bias = wanted(x, layer, grad, lower)
        cut = partial(part, at=at, dim=dim, rows=rows)
        where: dict[str, Any] = {"recipe": recipe, "sequence_dim": dim, "rows": rows}

        # Two weights, gathered once; the gradient of x comes from both.
        joined = nn.Linear(HIDDEN, WIDE + HIDDEN)
        with torch.no_grad():
            joined.weight.copy_(torch.cat([layer.weight, other.weight]))
            joined.bias.copy_(torch.cat([layer.bias, other.bias]))
        _, both, *_ = wanted(x, joined, torch.cat([grad, more], -1), lower)
        weights = [part(one.weight.detach(), at, 0).requires_grad_() for one in (layer, other)]
        biases = [part(one.bias.detach(), at, 0).requires_grad_() for one in (layer, other)]
        shard = cut(x).requires_grad_()
        outs = gathered_linears(shard, weights, biases, **where)
        same(outs[0], part(y, at, -1), f"{about}: gathered")
        torch.autograd.backward(outs, [part(grad, at, -1), part(more, at, -1)])
        same(shard.grad, cut(both), f"{about}: gathered, gradient of x")
        same(weights[0].grad, part(of_weight, at, 0), f"{about}: gathered, of the weight")
        same(biases[0].grad, part(of_bias, at, 0), f"{about}: gathered, of the bias")

        weight = part(layer.weight.detach(), at, 1).requires_grad_()
        bias = layer.bias.detach().clone().requires_grad_()
        features = part(x, at, -1).requires_grad_()
        out = scattered_linear(features, weight, bias, **where)
        same(out, cut(y), f"{about}: scattered")
        out.backward(cut(grad))
        same(features.grad, part(of_x, at, -1), f"{about}: scattered, gradient of x")
        same(weight.grad, part(of_weight, at, 1), f"{about}: scattered, of the weight")
        same(bias.grad, of_bias, f"{about}: scattered, of the bias")

        weight = part(layer.weight.detach(), at, 1).requires_grad_()
        features = part(x, at, -1).requires_grad_()
        out = reduced_linear(features, weight, layer.bias.detach(), recipe=recipe)
        same(out, y, f"{about}: reduced")
        out.backward(grad)
        same(features.grad, part(of_x, at, -1), f"{about}: reduced, gradient of x")
        same(weight.grad, part(of_weight, at, 1), f"{about}: reduced, of the weight")

        weight = part(layer.weight.detach(), at, 0).requires_grad_()
        whole = x.clone().requires_grad_()
        out = copied_linear(whole, weight, biases[0].detach(), recipe=recipe)
        same(out, part(y, at, -1), f"{about}: copied")
        out.backward(part(grad, at, -1))
        same(whole.grad, of_x, f"{about}: copied, gradient of x")
        same(weight.grad, part(of_weight, at, 0), f"{about}: copied, of the weight")
        checked += 1
    return checked


@pytest.mark.parametrize("scaling", SCALINGS)
@ranks(1, 2, 4)
def test_functions_and_their_gradients_are_exact(scaling: str, world: int) -> None:
    assert run(world, _functions, scaling) == [8] * world


def _one_gradient(at: Rank) -> None:
    """Only what is wanted is computed, on all ranks alike."""
    from ficco.nn import Float8Recipe, gathered_linears, scattered_linear

    layer = linear(HIDDEN, WIDE, 1)
    x, grad = large(SEQUENCE, HIDDEN, seed=3), large(SEQUENCE, WIDE, seed=4)
    for lower, to_x in product((None, "row"), (False, True)):
        _, of_x, of_weight, _ = wanted(x, layer, grad, lower)
        recipe = Float8Recipe("row", lower)
        shard = part(x, at, 0).requires_grad_(to_x)
        weight = part(layer.weight.detach(), at, 0).requires_grad_(not to_x)
        (y,) = gathered_linears(shard, (weight,), (None,), recipe=recipe)
        y.backward(part(grad, at, 1))
        if to_x:
            same(shard.grad, part(of_x, at, 0), f"gathered, {recipe}")
        else:
            same(weight.grad, part(of_weight, at, 0), f"gathered, {recipe}")
        features = part(x, at, 1).requires_grad_(to_x)
        weight = part(layer.weight.detach(), at, 1).requires_grad_(not to_x)
        scattered_linear(features, weight, recipe=recipe).backward(part(grad, at, 0))
        if to_x:
            same(features.grad, part(of_x, at, 1), f"scattered, {recipe}")
        else:
            same(weight.grad, part(of_weight, at, 1), f"scattered, {recipe}")


def test_one_gradient_alone_is_exact() -> None:
    run(2, _one_gradient)


def _styles(at: Rank) -> int:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from ficco.nn import ColwiseParallel, RowwiseParallel

    mesh, checked = mesh_of(at), 0
    source = linear(HIDDEN, WIDE, 1)
    x, grad = large(2, SEQUENCE, HIDDEN, seed=3), large(2, SEQUENCE, WIDE, seed=4)
    y, of_x, of_weight, of_bias = wanted(x, source, grad, "row")
    for layout in (Shard(1), Replicate()):
        layer = copy.deepcopy(source)
        parallelize_module(layer, mesh, ColwiseParallel(input_layouts=layout, recipe="row"))
        sharded = layout != Replicate()
        given = part(x, at, 1) if sharded else x.clone()
        out = layer(given.requires_grad_())
        same(out, part(y, at, -1), f"columns of {layout}")
        out.backward(part(grad, at, -1))
        same(given.grad, part(of_x, at, 1) if sharded else of_x, f"columns of {layout}: of x")
        same(plain(layer.weight.grad), part(of_weight, at, 0), f"columns of {layout}: of weight")
        checked += 1
    for layout in (Shard(1), Replicate(), Partial()):
        layer = copy.deepcopy(source)
        style = RowwiseParallel(output_layouts=layout, recipe="row", use_local_output=False)
        parallelize_module(layer, mesh, style)
        given = part(x, at, -1).requires_grad_()
        out = layer(given)
        assert isinstance(out, DTensor) and out.placements == (layout,)
        whole = out.full_tensor()
        same(whole, y, f"rows to {layout}")
        whole.backward(grad)
        same(given.grad, part(of_x, at, -1), f"rows to {layout}: of x")
        same(plain(layer.weight.grad), part(of_weight, at, 1), f"rows to {layout}: of weight")
        same(plain(layer.bias.grad), of_bias, f"rows to {layout}: of bias")
        checked += 1
    return checked


def test_styles_take_a_recipe_in_all_layouts() -> None:
    assert run(2, _styles) == [5, 5]


class Attention(nn.Module):
    """Three layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (linear(HIDDEN, WIDE, seed) for seed in (1, 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.wq(x) + self.wk(x) + self.wv(x)
        return out


def _shared(at: Rank) -> list[int]:
    """Gathers of layers with like and unlike recipes."""
    from test_nn import counted
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from ficco.nn import ColwiseParallel, PrepareModuleInput

    calls, x = [], large(SEQUENCE, HIDDEN, seed=4)
    prepare = PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=False
    )
    for recipe in ("row", None):
        model = Attention()
        exact = sum(
            wanted(x, layer, torch.zeros(SEQUENCE, WIDE), None)[0] if each else layer(x).detach()
            for layer, each in ((model.wq, "row"), (model.wk, recipe), (model.wv, "row"))
        )
        plan = {name: ColwiseParallel(recipe="row") for name in ("wq", "wv")}
        plan["wk"] = ColwiseParallel(recipe=recipe)
        parallelize_module(model, mesh_of(at), {"": prepare, **plan})
        with counted("all_gather_matmul") as count:
            y = model(part(x, at, 0))
        same(y, part(exact, at, -1), f"layers with row, {recipe}, row")
        calls.append(count["all_gather_matmul"])
    return calls


def test_layers_of_one_recipe_share_a_gather() -> None:
    assert run(2, _shared) == [[1, 2]] * 2


def _autocast(at: Rank) -> None:
    from ficco.nn import ColumnParallelLinear

    whole = linear(HIDDEN, WIDE, 1)
    layer = ColumnParallelLinear.from_linear(whole, recipe="row")
    x = integers(SEQUENCE, HIDDEN, seed=3)
    y, *_ = wanted(x, whole, torch.zeros(SEQUENCE, WIDE), None)
    x = part(x, at, 0).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    product_alone = (y - whole.bias.detach()).bfloat16() + whole.bias.detach().bfloat16()
    same(out, part(product_alone, at, -1), "under autocast")
    out.sum().backward()
    assert x.grad is not None and x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert "recipe=Float8Recipe(forward='row'" in repr(layer) and copy.deepcopy(layer).recipe


def test_autocast_casts_first() -> None:
    run(2, _autocast)
