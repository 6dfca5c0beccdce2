"""Layers changed by hooks, adapters, parametrizations, FSDP2 and quantization: exact integers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, counted, on_ranks, run
from test_nn import (
    HAS_FSDP2,
    HIDDEN,
    SEQUENCE,
    WIDE,
    integers,
    linear,
    mesh_of,
    over_ranks,
    part,
    plain,
    refuses,
    same,
    same_gradients,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, prune

import ficco
from ficco import nn as parallel
from ficco.nn import (
    ColumnParallelLinear,
    ColwiseParallel,
    RowParallelLinear,
    RowwiseParallel,
    UlyssesAttention,
    gather_once,
)


class Doubled(torch.Tensor):
    """Twice another tensor, like a quantized tensor. Its only kernel is ``linear``."""

    half: torch.Tensor

    @staticmethod
    def __new__(cls, half: torch.Tensor) -> Doubled:
        doubled = torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype)
        doubled.half = half
        return doubled

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["half"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, _: None, size: Any, stride: Any) -> Doubled:
        return Doubled(inner["half"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, *bias = args
            return nn.functional.linear(x, 2 * weight.half, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].half)
        raise NotImplementedError(f"Doubled has no {func}")


class Adapter(nn.Module):
    """A layer and a product of two small matrices, as LoRA adds to a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = linear(base.in_features, 2, 7, bias=False)
        self.up = linear(2, base.out_features, 8, bias=False)

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def _double_forward(layer: nn.Module) -> None:
    forward = layer.forward
    layer.forward = lambda *args: 2 * forward(*args)  # type: ignore[method-assign]


def _prune(layer: nn.Module, parts: int = 1) -> None:
    """Remove a diagonal of each part of a weight."""
    rows, cols = layer.weight.shape
    mask = torch.eye(rows // parts, cols).repeat(parts, 1).logical_not()
    prune.custom_from_mask(layer, "weight", mask)


#: Changes of a layer that take effect in its own call.
CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "forward hook": lambda layer: layer.register_forward_hook(lambda _, args, out: 2 * out),
    "pre-hook": lambda layer: layer.register_forward_pre_hook(lambda _, args: (2 * args[0],)),
    "parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", Twice()),
    "a forward of its own": _double_forward,
    "pruning": _prune,
}


def _gathered_once(at: Rank) -> None:
    """``gather_once`` calls a changed layer. A layer that changes its input gathers separately."""
    x = integers(SEQUENCE, HIDDEN, seed=3)
    grads = [integers(SEQUENCE, WIDE, seed=seed) for seed in (4, 5)]
    for name, change in CHANGES.items():
        wholes = [linear(HIDDEN, WIDE, seed) for seed in (1, 2)]
        layers = [ColumnParallelLinear.from_linear(layer) for layer in wholes]
        own, whole = part(x, at, 0).requires_grad_(), x.clone().requires_grad_()
        change(layers[1])
        (partial(_prune, parts=at.world) if name == "pruning" else change)(wholes[1])
        with counted() as counts:
            outs = gather_once(own, *layers)
        assert counts["all_gather_matmul"] == (1 if name == "forward hook" else 2), name
        wanted = [layer(whole) for layer in wholes]
        for out, want in zip(outs, wanted, strict=True):
            same(out, part(want, at, 1), name)
        torch.autograd.backward(outs, [part(grad, at, 1) for grad in grads])
        torch.autograd.backward(wanted, grads)
        same(own.grad, part(whole.grad, at, 0), f"{name}: gradient of x")
        same_gradients(layers[1], wholes[1], name, at.rank, at.world)
        assert not hasattr(own, "_ficco_shared")


def _hook_of_one_rank(at: Rank) -> None:
    layers = [ColumnParallelLinear.from_linear(linear(HIDDEN, WIDE, seed)) for seed in (1, 2)]
    x, seen = torch.ones(SEQUENCE // at.world, HIDDEN), []
    wanted = gather_once(x, *layers)
    if at.rank == 0:
        layers[0].register_forward_hook(lambda _, args, out: seen.append(out))
    for out, want in zip(gather_once(x, *layers), wanted, strict=True):
        same(out, want, "with a hook on rank 0")
    assert len(seen) == (at.rank == 0)


def _changed_projections(at: Rank) -> None:

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return q + 2 * k.flip(2) + 3 * v  # depends on all positions, and is exact

    x = integers(2, SEQUENCE, 6, seed=9, most=1)
    names = "q_proj", "k_proj", "v_proj", "o_proj"
    for turn, change in enumerate(("adapter", *CHANGES) * 2):
        layer = UlyssesAttention(6, 4, (2, 4)[turn % 2], size=3, bias=True)
        for seed, param in enumerate(layer.parameters()):
            param.data.copy_(integers(*param.shape, seed=seed, most=1))
        changed = [names[turn % 4]] if turn < len(names) else names
        for which in changed:
            projection = getattr(layer, which)
            if change == "adapter":
                setattr(layer, which, Adapter(projection))
            else:
                CHANGES[change](projection)
        whole, own = x.clone().requires_grad_(), part(x, at, 1).requires_grad_()
        heads = [getattr(layer, name)(whole).unflatten(-1, (-1, 3)) for name in names[:3]]
        want = layer.o_proj(attend(*(x.transpose(1, 2) for x in heads)).transpose(1, 2).flatten(2))
        out, about = layer(own, attend=attend), f"{changed}, {change}"
        same(out, part(want, at, 1), about)
        params = [param for param in layer.parameters() if param.requires_grad]
        grad = integers(*want.shape, seed=10, most=1)
        grad_whole, *wanted = torch.autograd.grad(want, [whole, *params], grad)
        grad_own, *grads = torch.autograd.grad(out, [own, *params], part(grad, at, 1))
        same(grad_own, part(grad_whole, at, 1), f"{about}: gradient of x")
        for own_grad, want_grad in zip(grads, wanted, strict=True):
            dist.all_reduce(own_grad)
            same(own_grad, want_grad, f"{about}: gradient of a parameter")


def halves(layer: Any, inner: Callable[[torch.Tensor], torch.Tensor] = plain) -> None:
    layer.weight = nn.Parameter(Doubled(inner(layer.weight.detach())), False)


@on_ranks(2)
def test_weights_with_kernels_of_their_own_are_multiplied_by_them(at: Rank) -> None:
    """Layers of a group, layers of a mesh, and styles, with weights replaced after construction."""
    mesh, x = mesh_of(at), integers(3, SEQUENCE, HIDDEN, seed=3, most=1)
    for bias in (True, False):
        whole = nn.Sequential(linear(HIDDEN, WIDE, 1, bias), linear(WIDE, HIDDEN, 2, bias))
        up, down = whole
        middle = nn.functional.linear(x, 2 * up.weight, up.bias)
        want = nn.functional.linear(middle, 2 * down.weight, down.bias)
        for group in (None, mesh):
            column, row = over_ranks(whole, group=group, sequence_dim=1)
            halves(column)
            halves(row)
            own = part(x, at, 1).requires_grad_()
            (out,) = gather_once(own, column)
            same(out, part(middle, at, 2), "column")
            y = row(out)
            same(y, part(want, at, 1), "row")
            grad = integers(*want.shape, seed=5, most=1)
            y.backward(part(grad, at, 1))
            grad_x = grad @ (2 * down.weight) @ (2 * up.weight)
            same(own.grad, part(grad_x, at, 1), "gradient of x")
        inners = plain, lambda weight: weight  # a weight of local parts, or of DTensors
        for layout, inner in itertools.product((Shard(1), Replicate()), inners):
            model, cut = copy.deepcopy(whole), part if layout == Shard(1) else lambda x, at, dim: x
            columns = ColwiseParallel(input_layouts=layout)
            rows = RowwiseParallel(output_layouts=layout)
            parallelize_module(model, mesh, {"0": columns, "1": rows})
            for layer in model:
                halves(layer, inner)
            assert isinstance(model[0].weight.half, DTensor) == (inner is not plain)
            same(model(cut(x, at, 1)), cut(want, at, 1), f"styles, {layout}, {inner}")


def _refused(at: Rank) -> None:
    """Errors of weights with kernels of their own, and of meshes with ranks in falling order."""
    source, x = nn.Linear(HIDDEN, WIDE), torch.ones(4, 8)
    column, row = ColumnParallelLinear(HIDDEN, WIDE), RowParallelLinear(WIDE, HIDDEN)
    for layer in (source, column, row):
        halves(layer)
    rows = "rows: required None", lambda: column(torch.ones(4, HIDDEN), rows=[4, 4])
    refuses(rows, kind="NotImplementedError")
    mesh = DeviceMesh(at.device.type, list(reversed(range(at.world))))
    order = "required a DeviceMesh with its ranks in rising order"
    refuses(
        ("whose weight is a Doubled", lambda: ColumnParallelLinear.from_linear(source)),
        ("share equally, got 5", lambda: row(torch.ones(5, WIDE // 2))),
        (order, lambda: parallelize_module(nn.Linear(8, 8), mesh, RowwiseParallel())),
        (order, lambda: parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel())),
        (order, lambda: ColumnParallelLinear(8, 8, group=mesh)),
        (order, lambda: ficco.all_gather_matmul(x, torch.ones(8, 3), group=mesh)),
        (order, lambda: UlyssesAttention(8, 4, group=mesh)),
        (order, lambda: parallel.sum_gradient(x, mesh)),
    )


def tripled(layer: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return 3 * out


def _inferring(at: Rank) -> None:
    """Layers of styles that need no gradients, changed after their first call."""
    mesh = init_device_mesh(at.device.type, (at.world,))
    changes = {name: change for name, change in CHANGES.items() if name != "pruning"}
    changes["weight"] = lambda layer: layer.weight.data.mul_(3)
    changes["hook of all"] = lambda layer: register_module_forward_hook(tripled)
    x = integers(1, 1, HIDDEN, seed=2)
    for name, change in changes.items():
        for style in (ColwiseParallel(), RowwiseParallel()):
            biased = name != "weight"
            layer, whole = (linear(HIDDEN, HIDDEN, 1, bias=biased) for _ in range(2))
            parallelize_module(layer, mesh, style)
            columns = isinstance(style, ColwiseParallel)
            own, about = x if columns else part(x, at, 2), f"{name}, {type(style).__name__}"
            with torch.no_grad():
                before, _ = whole(x), layer(own)
                changed = [change(layer), change(whole)]
                out, want = layer(own), whole(x)
            for handle in changed if name == "hook of all" else ():
                handle.remove()
            same(out, part(want, at, 2) if columns else want, about)
            assert not torch.equal(want, before), about
            assert not out._is_view(), about


def _replaced(at: Rank) -> None:
    """Parallel layers are no ``nn.Linear``, so that tools that replace linear layers skip them."""
    model = nn.Sequential(ColumnParallelLinear(8, 8), nn.ReLU(), RowParallelLinear(8, 8))
    assert not [layer for layer in model.modules() if isinstance(layer, nn.Linear)]


@pytest.mark.parametrize(
    "check",
    [_gathered_once, _hook_of_one_rank, _changed_projections, _refused, _inferring, _replaced],
)
def test_changed_layers(check: Callable[[Rank], None]) -> None:
    run(2, check)


def _sharded_by_fsdp(at: Rank) -> None:
    """FSDP2's sharded weights are gathered in a call of the module, and refused between calls."""
    mesh = init_device_mesh(at.device.type, (at.world, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)  # all ranks draw the same whole weight
    model = nn.Sequential(*(ColumnParallelLinear(HIDDEN, WIDE, group=mesh["tp"]) for _ in range(2)))
    separate, x = copy.deepcopy(model), torch.ones(4, HIDDEN)
    for layer in separate:
        fully_shard(layer, mesh=mesh["dp"])
    wants = [layer(x) for layer in model]
    for out, want in zip(gather_once(x, *separate), wants, strict=True):
        same(out, want, "layers that are sharded separately")
    fully_shard(model, mesh=mesh["dp"])
    model.forward = lambda x: gather_once(x, *model)  # type: ignore[method-assign]
    for out, want in zip(model(x), wants, strict=True):
        same(out, want, "within the call of the module")
    model.reshard()
    words = "as fully_shard leaves it between calls"
    refuses((words, lambda: gather_once(x, *model)), (words, lambda: model[0](x)))


def _changed_in_place(at: Rank) -> None:
    """Outputs may be changed in place, also under ``fully_shard``: their hooks still run."""
    data = init_device_mesh(at.device.type, (1, at.world), mesh_dim_names=("dp", "tp"))
    weight = integers(WIDE, HIDDEN, seed=2).requires_grad_()
    for shape in ((3, SEQUENCE, HIDDEN), (SEQUENCE, HIDDEN)):
        dim, x = len(shape) - 2, integers(*shape, seed=1)
        functions = parallel.copied_linear, parallel.reduced_linear
        calls: dict[str, Any] = {fn.__name__: partial(fn, weight=weight) for fn in functions}
        float8 = partial(parallel.copied_linear, weight=torch.ones(16, 16), recipe="row")
        calls["float8"] = lambda x, call=float8: call(nn.functional.pad(x, (0, 4)))
        for group in (None, data["tp"]):
            where: dict[str, Any] = {"bias": False, "group": group, "sequence_dim": dim}
            column, other = (ColumnParallelLinear(HIDDEN, WIDE, **where) for _ in range(2))
            row = RowParallelLinear(HIDDEN * at.world, HIDDEN, **where)
            for layer in (column, row, other) if group is not None else ():
                fully_shard(layer, mesh=data["dp"])
            calls |= {f"column, {group}": column, f"row, {group}": row}
            calls[f"gather_once, {group}"] = lambda x, c=column, o=other: gather_once(x, o, c)[1]
        for layout in (Replicate(), Shard(dim)):
            columns = ColwiseParallel(input_layouts=layout)
            rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout)
            for style in (columns, rows):
                layer = nn.Linear(HIDDEN, HIDDEN, bias=False)
                parallelize_module(layer, data["tp"], style)
                calls[f"{style}, {layout}"] = fully_shard(layer, mesh=data["dp"])
        for name, call in calls.items():
            operand = x.clone().requires_grad_()
            y = call(operand)
            want, gradients = y.detach() + 1, list[torch.Tensor]()
            y.register_hook(gradients.append)
            y += 1
            same(y.detach(), want, name)
            y.sum().backward()
            assert operand.grad is not None and len(gradients) == 1, name


@HAS_FSDP2
@pytest.mark.parametrize("check", [_sharded_by_fsdp, _changed_in_place])
def test_layers_under_fsdp(check: Callable[[Rank], None]) -> None:
    run(2, check)
