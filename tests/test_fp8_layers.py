"""Layers of float8: exact on small integers, forward and backward, and trained as the unsharded.

Integers up to 16 are exact in e4m3 by scales that are powers of two, and up to 8 in e5m2.
``test_fp8_layers_gpu.py`` runs the tests that ask for ``device`` on GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Rank, caught, run
from torch import nn

import ficco
from ficco.ops.recipes import quantized

SCALINGS = ("tensor", "row", "block")
#: Features are multiples of 16 on each of two ranks; a block is cut short.
HIDDEN, WIDE, SEQUENCE = 160, 288, 16


@pytest.fixture(scope="module")
def device() -> str:
    return "cpu"


def integers(*shape: int, seed: int, every: int = 1) -> torch.Tensor:
    """-1, 0 and 1, the same on every rank; one of ``every`` is not zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-1, 2, shape, generator=generator)
    return (values * (torch.randint(0, every, shape, generator=generator) == 0)).float()


# Casting.


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("share", [(0, 0), (1, 0), (1, 128), (128, 128)])
def test_scales_are_the_smallest_powers_of_two(share: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    matrix = torch.randn(150, 200) * 10.0 ** torch.randint(-9, 9, (150, 1))
    matrix[3], matrix[4, :] = 0.0, torch.finfo(dtype).max  # exactly at the limit: scale 1
    cast, scale = quantized(matrix, share, dtype)
    rows, cols = (one or size for one, size in zip(share, matrix.shape, strict=True))
    assert (torch.frexp(scale).mantissa == 0.5).all()
    for i, j in itertools.product(range(scale.shape[0]), range(scale.shape[1])):
        part = (slice(i * rows, i * rows + rows), slice(j * cols, j * cols + cols))
        most, limit = float(matrix[part].abs().max()), torch.finfo(dtype).max
        assert most <= limit * float(scale[i, j])
        assert most == 0 or most > limit * float(scale[i, j]) / 2
        assert torch.equal(
            cast[part].view(torch.uint8), (matrix[part] / scale[i, j]).to(dtype).view(torch.uint8)
        )


def test_what_is_not_finite_stays_in_its_row() -> None:
    matrix = torch.ones(4, 16)
    matrix[1, 2], matrix[2, 3] = torch.nan, torch.inf
    cast, scale = quantized(matrix, (1, 0), torch.float8_e4m3fn)
    finite = (cast.float() * scale).sum(1).isfinite()
    assert finite.tolist() == [True, False, False, True]


# Layers, exact.


def _layers(at: Rank, recipe: Any, dtype: torch.dtype, schedule: str) -> int:
    """Column and row layer behind one another, with functions between them that keep integers."""
    from ficco.nn import ColumnParallelLinear, RowParallelLinear, gather_once

    how = {"recipe": recipe, "schedule": schedule}
    weights = [
        integers(WIDE, HIDDEN, seed=1, every=16),
        integers(WIDE, HIDDEN, seed=2, every=16),
        integers(HIDDEN, WIDE, seed=3, every=16),
    ]
    whole = []
    for weight in weights:
        linear = nn.Linear(*weight.t().shape).to(at.device, dtype)
        with torch.no_grad():
            linear.weight.copy_(weight)
            linear.bias.fill_(1)
        whole.append(linear)
    up, gate = (ColumnParallelLinear.from_linear(one, **how) for one in whole[:2])
    down = RowParallelLinear.from_linear(whole[2], **how)
    x, grad = (integers(SEQUENCE, HIDDEN, seed=seed) for seed in (4, 5))
    x, grad = x.to(at.device, dtype), grad.to(at.device, dtype)
    mine = slice(at.rank * SEQUENCE // at.world, (at.rank + 1) * SEQUENCE // at.world)
    ours, theirs = x[mine].clone().requires_grad_(), x.clone().requires_grad_()

    def between(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return one.clamp(-2, 2) + two.clamp(-2, 2)

    y = down(between(*gather_once(ours, up, gate)))
    wanted = whole[2](between(whole[0](theirs), whole[1](theirs)))
    assert torch.equal(y, wanted[mine])
    y.backward(grad[mine])
    wanted.backward(grad)
    assert torch.equal(ours.grad, theirs.grad[mine])
    for layer, full, dim in ((up, whole[0], 0), (gate, whole[1], 0), (down, whole[2], 1)):
        part = full.weight.grad.chunk(at.world, dim)[at.rank]
        assert torch.equal(layer.weight.grad, part), layer
    assert torch.equal(down.bias.grad, whole[2].bias.grad)
    return len(weights)


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [*SCALINGS, None])
@pytest.mark.parametrize("forward", SCALINGS)
def test_layers_are_exact(device: str, forward: str, gradient: str | None) -> None:
    from ficco.nn import Float8Recipe

    for schedule in ("auto", "hetero-fused-1d:pieces=2"):
        what = Float8Recipe(forward, gradient), torch.bfloat16, schedule
        assert run(2, _layers, *what, device=device) == [3, 3]


def _functions(at: Rank, recipe: Any) -> list[str]:
    """Functions of an input, or a result, that every rank has; and which operators they call."""
    from ficco.nn import copied_linears, reduced_linear
    from ficco.nn.functional import partial_linear
    from ficco.nn.linear import recipe_of

    weights = [integers(64, 48, seed=s, every=4).to(at.device).bfloat16() for s in (1, 2)]
    x, grad = (integers(8, n, seed=n).to(at.device).bfloat16() for n in (48, 64))

    def run_all(function: Callable[..., Any], **how: Any) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        leaves = [weight.clone().requires_grad_() for weight in weights]
        outs = function(leaf, leaves, **how)
        torch.autograd.backward(outs, [grad] * len(outs))
        return [*outs, leaf.grad, *(one.grad for one in leaves if one.grad is not None)]

    def plain(x: torch.Tensor, weights: Any) -> Any:
        return [F.linear(x, weight) for weight in weights]

    def copied(x: torch.Tensor, weights: Any) -> Any:
        return copied_linears(x, weights, (None, None), recipe=recipe)

    def reduced(x: torch.Tensor, weights: Any) -> Any:
        return [reduced_linear(x, weight, recipe=recipe) for weight in weights]

    def partial(x: torch.Tensor, weights: Any) -> Any:
        return [partial_linear(x, weight, None, recipe_of(recipe)) for weight in weights]

    wanted = run_all(plain)
    several = {"copied": (copied, {2: at.world}), "reduced": (reduced, {0: at.world, 1: at.world})}
    several["partial"] = (partial, {})
    wrong = []
    for name, (function, times) in several.items():
        for i, (found, want) in enumerate(zip(run_all(function), wanted, strict=True)):
            if not torch.equal(found, want * times.get(i, 1)):
                wrong.append(f"{name} {i}")
    return wrong


@pytest.mark.parametrize("recipe", SCALINGS)
def test_functions_are_exact(device: str, recipe: str) -> None:
    assert run(2, _functions, recipe, device=device) == [[], []]


# The gradient's own scaling.

#: Of the gradient's columns half are large, and meet zeros of the weight. By a factor for each row
#: the others vanish, by one for all they are rounded to e5m2, by blocks they stay what they are.
LARGE, SMALL = 2.0**12, 1.125 * 2.0**-7
OF_X = {"row": 0.0, "tensor": 2.0**-7 * 128, "block": SMALL * 128, None: SMALL * 128}


def _gradients_of(at: Rank) -> list[str]:
    """Those of x that are not of the gradient's scaling, whatever that of the forward is."""
    from ficco.nn import Float8Recipe, copied_linear, gathered_linears, reduced_linear
    from ficco.nn.functional import partial_linear, scattered_linear

    weight, grad = torch.ones(256, 16), torch.full((4, 256), LARGE)
    weight[:128], grad[:, 128:] = 0, SMALL
    x, wrong = torch.ones(4, 16), []
    for forward, gradient in itertools.product(SCALINGS, OF_X):
        recipe = Float8Recipe(forward, gradient)
        several: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
            "gathered": (
                lambda x, r=recipe: gathered_linears(x, (weight,), (None,), recipe=r)[0],
                at.world,
            ),
            "scattered": (lambda x, r=recipe: scattered_linear(x, weight, recipe=r), 1),
            "reduced": (lambda x, r=recipe: reduced_linear(x, weight, recipe=r), 1),
            "copied": (lambda x, r=recipe: copied_linear(x, weight, recipe=r), at.world),
            "partial": (lambda x, r=recipe: partial_linear(x, weight, None, r), 1),
        }
        for name, (function, times) in several.items():
            leaf = x.clone().requires_grad_()
            y = function(leaf)
            y.backward(grad[:1].expand(y.shape))
            if not torch.equal(leaf.grad, torch.full((4, 16), times * OF_X[gradient])):
                wrong.append(f"{name} of {recipe}: {leaf.grad[0, 0]}")
    return wrong


def test_gradients_have_a_scaling_of_their_own() -> None:
    assert run(2, _gradients_of) == [[], []]


# Compiled.


def _compiled(at: Rank, inner: str, recipes: list[Any]) -> list[str]:
    """What is not, to the last bit, as without a compiler; in one graph, forward and backward."""
    from ficco.nn import copied_linears, gathered_linears, reduced_linear, scattered_linear
    from ficco.nn.functional import partial_linear
    from ficco.nn.linear import recipe_of

    torch.manual_seed(3)
    weights = [torch.randn(n, 48).bfloat16() for n in (64, 32)]
    x, wrong = (torch.randn(2, 4, 48) * 2.0 ** torch.arange(4)[:, None]).bfloat16(), []

    for recipe in map(recipe_of, recipes):
        several: dict[str, Callable[..., Any]] = {
            "gathered": lambda x, w, v, r=recipe: gathered_linears(
                x, (w, v), (None,) * 2, recipe=r
            ),
            "scattered": lambda x, w, v, r=recipe: scattered_linear(x, w, recipe=r, sequence_dim=1),
            "reduced": lambda x, w, v, r=recipe: reduced_linear(x, w, recipe=r),
            "copied": lambda x, w, v, r=recipe: copied_linears(x, (w, v), (None,) * 2, recipe=r),
            "partial": lambda x, w, v, r=recipe: partial_linear(x, w, None, r),
        }

        def all_of(function: Callable[..., Any]) -> list[torch.Tensor]:
            leaves = [one.clone().requires_grad_() for one in (x, *weights)]
            out = function(*leaves)
            outs = out if isinstance(out, tuple) else (out,)
            torch.autograd.backward(
                outs, [torch.cos(torch.arange(one.numel())).view(one.shape).to(one) for one in outs]
            )
            return [*outs, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

        for name, function in several.items():
            torch._dynamo.reset()
            compiled = torch.compile(function, backend=inner, fullgraph=True)
            pairs = zip(all_of(compiled), all_of(function), strict=True)
            wrong += [
                f"{name} {i} {recipe}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)
            ]
    return wrong


def test_layers_are_traced() -> None:
    from ficco.nn import Float8Recipe

    recipes = ["row", "tensor", "block", Float8Recipe("row", None)]
    assert run(2, _compiled, "aot_eager", recipes, timeout=200) == [[], []]


@pytest.mark.slow
def test_layers_are_compiled_by_the_default_backend() -> None:
    assert run(2, _compiled, "inductor", ["row"], timeout=250) == [[], []]


# Training.


class Reference(torch.autograd.Function):
    """An unsharded layer of float8 by ``torch._scaled_mm``, for a recipe by rows or tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name = name
        return product(x, weight, name)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        wide = torch.float8_e5m2 if ctx.name == "tensor" else torch.float8_e4m3fn
        return product(grad, weight.t(), ctx.name, wide), grad.t() @ x, None


def product(
    a: torch.Tensor, weight: torch.Tensor, name: str, left: torch.dtype = torch.float8_e4m3fn
) -> torch.Tensor:
    def cast(matrix: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        size = matrix.float().abs()
        most = size.amax(1, keepdim=True) if name == "row" else size.max().view(1, 1)
        scale = 2.0 ** (most / torch.finfo(dtype).max).log2().ceil()
        return (matrix.float() / scale).to(dtype), scale

    (qa, sa), (qb, sb) = cast(a, left), cast(weight, torch.float8_e4m3fn)
    return torch._scaled_mm(qa.contiguous(), qb.contiguous().t(), sa, sb.t(), out_dtype=a.dtype)


STEPS, ROWS, SIZE = 200, 32, 32


class Unsharded(nn.Module):
    def __init__(self, name: str | None) -> None:
        super().__init__()
        self.name = name
        torch.manual_seed(7)
        self.up, self.down = nn.Linear(SIZE, 64, bias=False), nn.Linear(64, SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def linear(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
            if self.name is None:
                return F.linear(x, layer.weight)
            return Reference.apply(x, layer.weight, self.name)

        return x + linear(F.silu(linear(x, self.up)), self.down)


def _losses(model: nn.Module, at: Rank | None, device: torch.device) -> list[float]:
    """A regression's losses; ``at``: of this rank's rows, averaged over ranks."""
    torch.manual_seed(11)
    teacher = torch.randn(SIZE, SIZE) / SIZE**0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(ROWS, SIZE)
        target = torch.tanh(x @ teacher)
        if at is not None:
            x, target = (each.chunk(at.world)[at.rank] for each in (x, target))
        difference = model(x.to(device)) - target.to(device)
        loss = difference.float().square().sum() / (ROWS * SIZE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.detach()
        if at is not None:
            torch.distributed.all_reduce(value)
        losses.append(value.item())
    return losses


def _trained(at: Rank, recipe: str) -> tuple[list[float], list[float], list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from ficco.nn import ColwiseParallel, RowwiseParallel

    mesh = init_device_mesh(at.device.type, (at.world,))
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(0), recipe=recipe),
        "down": RowwiseParallel(output_layouts=Shard(0), recipe=recipe),
    }
    model = Unsharded(None).to(at.device)
    model.forward = lambda x: x + model.down(F.silu(model.up(x)))  # type: ignore[method-assign]
    model = parallelize_module(model, mesh, plan)
    whole, wide = (Unsharded(name).to(at.device) for name in (recipe, None))
    losses = [_losses(one, None, at.device) for one in (whole, wide)]
    return _losses(model, at, at.device), losses[0], losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["row", "tensor"])
def test_losses_follow_those_of_the_unsharded(device: str, recipe: str) -> None:
    """The first losses agree: only the second layer's input has scales of its own on each rank,
    powers of two as all are. Sums in another order then flip roundings to float8 now and then, so
    that in the end both runs have independent roundings. Each of them moves a step's loss as far as
    float8 moves it from that of the model in float32, and the mean of all losses by far less."""
    for sharded, whole, wide in run(2, _trained, recipe, device=device):
        assert len(sharded) == STEPS and sharded[-1] < sharded[0] / 4
        apart, by_cast = (
            max(abs(a - b) / b for a, b in zip(one, whole, strict=True)) for one in (sharded, wide)
        )
        assert sharded[:3] == pytest.approx(whole[:3], rel=1e-3)
        assert apart < 2 * by_cast < 0.3, (apart, by_cast)
        assert sum(sharded) == pytest.approx(sum(whole), rel=0.01)


# What is refused.


def _refused(at: Rank) -> list[str]:
    from ficco.nn import (
        ColumnParallelLinear,
        ColwiseParallel,
        Float8Recipe,
        RowParallelLinear,
        gathered_linears,
    )

    x, weight = torch.ones(4, 32), torch.ones(32, 32)
    wrong: list[Callable[[], Any]] = [
        lambda: Float8Recipe("rows"),
        lambda: Float8Recipe(gradient="mxfp8"),
        lambda: Float8Recipe(use_fast_accum=1),
        lambda: ColwiseParallel(recipe="mxfp8"),
        lambda: ColumnParallelLinear(32, 48, recipe="row"),
        lambda: RowParallelLinear(48, 32, recipe="row"),
        lambda: gathered_linears(x, (weight.double(),), (None,), recipe="row"),
        lambda: gathered_linears(x.double(), (weight.double(),), (None,), recipe="row"),
    ]
    texts = [caught(one) for one in wrong]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        texts.append(caught(lambda: gathered_linears(x, (weight.double(),), (None,), recipe="row")))
    return [f"{error.type} {error.text}" for error in texts]


def test_wrong_recipes_are_refused() -> None:
    words = (
        "forward: required one of 'tensor', 'row', 'block', got 'rows'",
        "gradient: required one of 'tensor', 'row', 'block', None, got 'mxfp8'",
        "use_fast_accum: required True or False, got 1",
        "recipe: required a Float8Recipe, None or one of 'tensor', 'row', 'block', got 'mxfp8'",
        "multiple of 16 inputs and outputs on each rank, got 32 and 24",
        "multiple of 16 inputs and outputs on each rank, got 24 and 32",
        "got torch.float32 and torch.float64",
        "got torch.float64 and torch.float64",
        "required one dtype",
    )
    first, second = run(2, _refused)
    assert first == second
    for text, expected in zip(first, words, strict=True):
        assert text.startswith("ValueError") and expected in text, text


def _unlike(at: Rank) -> str:
    layer = ficco.nn.ColumnParallelLinear(32, 64, recipe=("row", "tensor")[at.rank])
    error = caught(lambda: layer(torch.ones(4, 32)))
    at.barrier()
    ficco.close()
    return error.type


def test_ranks_with_other_recipes_disagree() -> None:
    assert run(2, _unlike) == ["RankMismatch"] * 2
