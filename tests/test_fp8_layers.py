"""Float8 layers: exact forwards and backwards, styles, compiled layers, errors.

With scales that are powers of two, integers up to 16 are exact in e4m3, and up to 8 in e5m2. The
cast rounds integers up to 40, and float32 sums of the rounded values are exact, so that results
have one right answer, too. ``gpu/test_fp8_gpu.py`` runs some of these tests on GPUs.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import Rank, caught, counted, on_ranks, ranks, run
from test_library import compiled
from test_nn import integers, mesh_of, part, plain, refuses, same
from test_nn import linear as exact_linear
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import ficco
from ficco.nn import Float8Recipe, copied_linear, copied_linears, gathered_linears
from ficco.nn.functional import partial_linear, reduced_linear, scattered_linear
from ficco.nn.linear import ColumnParallelLinear, RowParallelLinear, recipe_of
from ficco.nn.styles import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from ficco.ops.recipes import quantized

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = ("tensor", "row", "block")


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("share", [(0, 0), (1, 0), (1, 128), (128, 128)])
def test_scales_are_the_smallest_powers_of_two(share: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    matrix = torch.randn(150, 200) * 10.0 ** torch.randint(-9, 9, (150, 1))
    matrix[3], matrix[4, :] = 0.0, torch.finfo(dtype).max  # exactly at the limit: scale 1
    cast, scale = quantized(matrix, share, dtype)
    rows, cols = (part or size for part, size in zip(share, matrix.shape, strict=True))
    assert (torch.frexp(scale).mantissa == 0.5).all()
    for i, j in itertools.product(range(scale.shape[0]), range(scale.shape[1])):
        piece = (slice(i * rows, i * rows + rows), slice(j * cols, j * cols + cols))
        most, limit = float(matrix[piece].abs().max()), torch.finfo(dtype).max * float(scale[i, j])
        assert most == 0 or limit / 2 < most <= limit
        wanted = (matrix[piece] / scale[i, j]).to(dtype)
        assert torch.equal(cast[piece].view(torch.uint8), wanted.view(torch.uint8))


def test_nan_and_infinity_stay_in_their_row() -> None:
    matrix = torch.ones(4, 16)
    matrix[1, 2], matrix[2, 3] = torch.nan, torch.inf
    cast, scale = quantized(matrix, (1, 0), E4M3)
    finite = (cast.float() * scale).sum(1).isfinite()
    assert finite.tolist() == [True, False, False, True]


def sparse(*shape: int, seed: int, every: int = 1) -> torch.Tensor:
    """Return -1, 0 and 1, equal on all ranks. One of ``every`` values is not zero."""
    values = integers(*shape, seed=seed, most=1)
    generator = torch.Generator().manual_seed(seed + 1000)
    return values * (torch.randint(0, every, shape, generator=generator) == 0)


#: Half of the gradient's columns are large, and are multiplied by zeros of the weight. The small
#: values become zero with a factor per row, are rounded to e5m2 with a factor per tensor, and are
#: exact with a factor per block.
LARGE, SMALL = 2.0**12, 1.125 * 2.0**-7
OF_X = {"row": 0.0, "tensor": 2.0**-7 * 128, "block": SMALL * 128, None: SMALL * 128}


@on_ranks(2)
def test_gradients_have_a_scaling_of_their_own(at: Rank) -> None:
    """The gradient of x is scaled by the recipe's scaling of gradients, not that of the forward."""
    weight, grad = torch.ones(256, 16), torch.full((4, 256), LARGE)
    weight[:128], grad[:, 128:] = 0, SMALL
    for forward, gradient in itertools.product(SCALINGS, OF_X):
        recipe = Float8Recipe(forward, gradient)
        functions: dict[str, tuple[Callable[..., Any], int]] = {
            "gathered": (lambda x, **kw: gathered_linears(x, (weight,), (None,), **kw)[0], 2),
            "scattered": (partial(scattered_linear, weight=weight), 1),
            "reduced": (partial(reduced_linear, weight=weight), 1),
            "copied": (partial(copied_linear, weight=weight), 2),
            "partial": (partial(partial_linear, weight=weight, bias=None), 1),
        }
        for name, (function, terms) in functions.items():
            leaf = torch.ones(4, 16, requires_grad=True)
            y = function(leaf, recipe=recipe)
            y.backward(grad[:1].expand(y.shape))
            same(leaf.grad, torch.full((4, 16), terms * OF_X[gradient]), f"{name} of {recipe}")


large = partial(integers, most=40)


def rounded(x: torch.Tensor, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """Round to float8 without factors, which these integers do not need."""
    return x.to(dtype).to(x.dtype)


linear = partial(exact_linear, 64, 128, most=40)


def unsharded(
    x: torch.Tensor, weight: Any, bias: Any, grad: torch.Tensor, lower: str | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the result, and gradients of x, weight and bias. ``lower``: the gradient's scaling."""
    grad_x = grad @ weight
    if lower:
        grad_x = rounded(grad, E5M2 if lower == "tensor" else E4M3) @ rounded(weight)
    grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
    return rounded(x) @ rounded(weight).t() + bias, grad_x, grad_weight, grad.flatten(0, -2).sum(0)


@pytest.mark.parametrize("scaling", SCALINGS)
@ranks(1, 2, 4)
@on_ranks()
def test_functions_are_exact(at: Rank, scaling: str) -> None:
    """Functions and their gradients. On GPUs, whose float8 sums are not exact, the integers need
    no rounding."""
    on_cpu, uneven = at.device.type == "cpu", {1: [8], 2: [3, 5], 4: [3, 0, 4, 1]}[at.world]

    def draw(*shape: int, seed: int) -> torch.Tensor:
        x = large(*shape, seed=seed) if on_cpu else sparse(*shape, seed=seed, every=4).bfloat16()
        return x.to(at.device)

    # Two weights; the second is gathered together with the first.
    weights, bias = [draw(128, 64, seed=1), draw(64, 64, seed=2)], draw(128, seed=6)
    cases = itertools.product((None, scaling), (None, uneven), (0, 1))
    for (lower, rows, dim), needs in zip(cases, itertools.cycle(("xwb", "x", "w")), strict=False):
        recipe, sizes = Float8Recipe(scaling, lower), (8, 4) if dim == 0 else (4, 8)
        about = f"rank {at.rank}, {recipe}, rows={rows}, sequence_dim={dim}, {needs}"
        x, grad, more = (draw(*sizes, n, seed=s) for n, s in ((64, 3), (128, 4), (64, 5)))
        y, *wanted = unsharded(x, weights[0], bias, grad, lower)
        cut, last = partial(part, at=at, dim=dim, rows=rows), partial(part, at=at, dim=-1)
        where: dict[str, Any] = {"recipe": recipe, "sequence_dim": dim, "rows": rows}

        def gathered(x: Any, w: Any, b: Any, where: Any = where) -> torch.Tensor:
            return gathered_linears(x, (w,), (b,), **where)[0]

        # Layout of x, dimension of the weight that is cut, and layout of the result.
        forms: dict[str, tuple[Callable[..., torch.Tensor], Any, int, Any]] = {
            "gathered": (gathered, cut, 0, last),
            "scattered": (partial(scattered_linear, **where), last, 1, cut),
            "reduced": (partial(reduced_linear, recipe=recipe), last, 1, torch.clone),
            "copied": (partial(copied_linear, recipe=recipe), torch.clone, 0, last),
        }
        for name, (function, cut_x, weight_dim, cut_y) in forms.items():
            cut_bias = torch.clone if weight_dim else partial(part, at=at, dim=0)
            cuts = cut_x, partial(part, at=at, dim=weight_dim), cut_bias
            leaves = [
                cut_of(whole).clone().requires_grad_(letter in needs)
                for cut_of, whole, letter in zip(cuts, (x, weights[0], bias), "xwb", strict=True)
            ]
            out = function(*leaves)
            same(out, cut_y(y), f"{about}: {name}")
            out.backward(cut_y(grad))
            for leaf, cut_of, want, letter in zip(leaves, cuts, wanted, "xwb", strict=True):
                if letter in needs:
                    same(leaf.grad, cut_of(want), f"{about}: {name}, gradient of {letter}")
                assert letter in needs or leaf.grad is None

        # The gradient of x comes from both weights.
        both = torch.cat([grad, more], -1)
        _, grad_x, *_ = unsharded(x, torch.cat(weights), torch.cat([bias, bias[:64]]), both, lower)
        shard, parts = cut(x).clone().requires_grad_(), [part(weight, at, 0) for weight in weights]
        outs = gathered_linears(shard, parts, (None, None), **where)
        torch.autograd.backward(outs, [last(grad), last(more)])
        same(shard.grad, cut(grad_x), f"{about}: gradient of x from two weights")


def _styles(at: Rank) -> None:
    mesh, source = mesh_of(at), linear(1)
    x, grad = large(2, 8, 64, seed=3), large(2, 8, 128, seed=4)
    weight, bias = (param.detach() for param in source.parameters())
    y, grad_x, *grad_params = unsharded(x, weight, bias, grad, "row")
    sequence, last = partial(part, at=at, dim=1), partial(part, at=at, dim=-1)
    uncut, first = torch.clone, partial(part, at=at, dim=0)
    # Cuts of x, of the result, and of the parameters.
    columns, rows = (last, (first, first)), (last, uncut)
    where: dict[str, Any] = {"sequence_dim": 1, "recipe": "row"}
    kinds: list[tuple[Any, Any, Any, Any]] = [
        (ColumnParallelLinear.from_linear(source, **where), sequence, *columns),
        (RowParallelLinear.from_linear(source, **where), last, sequence, rows),
    ]
    for layout, cut in ((Shard(1), sequence), (Replicate(), uncut)):
        style = ColwiseParallel(input_layouts=layout, recipe="row")
        kinds.append((parallelize_module(copy.deepcopy(source), mesh, style), cut, *columns))
    for layout, cut in ((Shard(1), sequence), (Replicate(), uncut), (Partial(), uncut)):
        style = RowwiseParallel(output_layouts=layout, recipe="row", use_local_output=False)
        kinds.append((parallelize_module(copy.deepcopy(source), mesh, style), last, cut, rows))
    for layer, cut_input, cut_output, cut_weights in kinds:
        leaf = cut_input(x).requires_grad_()
        out = layer(leaf)
        if isinstance(out, DTensor):
            assert out.placements == layer.style.output_layouts
            out, cut_output = out.full_tensor(), uncut
        same(out, cut_output(y), f"{layer}")
        out.backward(cut_output(grad))
        grads = leaf.grad, *(plain(param.grad) for param in layer.parameters())
        cuts = zip((grad_x, *grad_params), (cut_input, *cut_weights), strict=True)
        for own_grad, (whole, cut) in zip(grads, cuts, strict=True):
            same(own_grad, cut(whole), f"a gradient of {layer}")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (linear(seed) for seed in (1, 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.wq(x) + self.wk(x) + self.wv(x)
        return out


def _shared(at: Rank) -> None:
    """Layers share a gather if all have one recipe."""
    x, none = large(8, 64, seed=4), torch.zeros(8, 128)
    layouts = {"input_layouts": Shard(0), "desired_input_layouts": Replicate()}
    for recipe, gathers in (("row", 1), (None, 2)):
        model, recipes, wanted = Attention(), {"wq": "row", "wk": recipe, "wv": "row"}, 0
        for name, own_recipe in recipes.items():
            weight, bias = (param.detach() for param in getattr(model, name).parameters())
            y = unsharded(x, weight, bias, none)[0] if own_recipe else x @ weight.t() + bias
            wanted = wanted + y
        plan = {name: ColwiseParallel(recipe=own) for name, own in recipes.items()}
        plan[""] = PrepareModuleInput(use_local_output=False, **layouts)
        parallelize_module(model, mesh_of(at), plan)
        with counted() as counts:
            y = model(part(x, at, 0))
        same(y, part(wanted, at, -1), f"layers with row, {recipe}, row")
        assert counts == {"all_gather_matmul": gathers}


def _autocast(at: Rank) -> None:
    whole, x = linear(1), integers(8, 64, seed=3)
    layer = ColumnParallelLinear.from_linear(whole, recipe="row")
    weight, bias = (param.detach() for param in whole.parameters())
    y = rounded(x) @ rounded(weight).t()
    x = part(x, at, 0).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    same(out, part(y.bfloat16() + bias.bfloat16(), at, -1), "under autocast")
    out.sum().backward()
    assert x.grad is not None and x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert "recipe=Float8Recipe(forward='row'" in repr(layer) and copy.deepcopy(layer).recipe


@pytest.mark.parametrize(
    ("inner", "recipes", "count"),
    [
        ("aot_eager", ["block", Float8Recipe("row", None)], 7),
        pytest.param("inductor", ["tensor"], 1, marks=pytest.mark.slow),
    ],
)
@on_ranks(2, timeout=250)
def test_layers_are_compiled(at: Rank, inner: str, recipes: list[Any], count: int) -> None:
    """The first ``count`` results and gradients, in one graph, are bitwise those of eager calls."""
    torch.manual_seed(3)
    weights = [torch.randn(n, 48).bfloat16() for n in (64, 32)]
    x = (torch.randn(2, 4, 48) * 2.0 ** torch.arange(4)[:, None]).bfloat16()
    for recipe in map(recipe_of, recipes):

        def called(x: Any, w: Any, v: Any, recipe: Any = recipe) -> list[torch.Tensor]:
            results = [
                *gathered_linears(x, (w, v), (None,) * 2, recipe=recipe),
                scattered_linear(x, w, recipe=recipe, sequence_dim=1),
                reduced_linear(x, w, recipe=recipe),
                *copied_linears(x, (w, v), (None,) * 2, recipe=recipe),
                partial_linear(x, w, None, recipe),
            ]
            return results[:count]

        once = compiled(called, inner)
        for turn in range(count):
            results = []
            for function in (once, called):
                leaves = [leaf.clone().requires_grad_() for leaf in (x, *weights)]
                y = function(*leaves)[turn]
                cosines = torch.cos(torch.arange(y.numel())).view(y.shape).to(y)
                grads = torch.autograd.grad(y, leaves, cosines, materialize_grads=True)
                results.append([y, *grads])
            assert all(map(torch.equal, *results)), (turn, recipe)


def _refused(at: Rank) -> None:
    x, weight = torch.ones(4, 32), torch.ones(32, 32)
    scalings = "required one of 'tensor', 'row', 'block'"
    sizes = "multiple of 16 inputs and outputs on each rank, got"

    def gathered(x: torch.Tensor) -> Any:
        return gathered_linears(x, (weight.double(),), (None,), recipe="row")

    refuses(
        (f"forward: {scalings}, got 'rows'", lambda: Float8Recipe("rows")),
        (f"gradient: {scalings}, None, got 'mxfp8'", lambda: Float8Recipe(gradient="mxfp8")),
        ("required True or False, got 1", lambda: Float8Recipe(use_fast_accum=1)),
        ("required a Float8Recipe, None or one of", lambda: ColwiseParallel(recipe="mxfp8")),
        (f"{sizes} 32 and 24", lambda: ColumnParallelLinear(32, 48, recipe="row")),
        (f"{sizes} 24 and 32", lambda: RowParallelLinear(48, 32, recipe="row")),
        ("got torch.float32 and torch.float64", lambda: gathered(x)),
        ("got torch.float64 and torch.float64", lambda: gathered(x.double())),
    )
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        refuses(("required one dtype", lambda: gathered(x)))


def _unlike(at: Rank) -> None:
    """Ranks with different recipes raise."""
    layer = ColumnParallelLinear(32, 64, recipe=("row", "tensor")[at.rank])
    assert caught(lambda: layer(torch.ones(4, 32))).type == "RankMismatch"
    at.barrier()
    ficco.close()


@pytest.mark.parametrize("check", [_styles, _shared, _autocast, _refused, _unlike])
def test_recipes(check: Callable[[Rank], None]) -> None:
    run(2, check)
