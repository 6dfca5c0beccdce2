"""Layers that other tools have changed: by hooks, adapters, parametrizations, FSDP2, quantization.

All values are small integers in float32, so that results are compared with no tolerance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import Failure, Rank, caught, run, since
from test_nn import HIDDEN, SEQUENCE, WIDE, integers, linear, mesh_of, part, plain, same
from torch import nn
from torch.nn.utils import parametrize, prune

import ficco


class Doubled(torch.Tensor):
    """Twice another tensor, as a quantized tensor is a multiple of its integers. Its only kernel is
    that of ``linear``."""

    half: torch.Tensor

    @staticmethod
    def __new__(cls, half: torch.Tensor) -> Doubled:
        made = torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype)
        made.half = half
        return made

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
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def _double_forward(layer: nn.Module) -> None:
    forward = layer.forward
    layer.forward = lambda *args: 2 * forward(*args)  # type: ignore[method-assign]


def _prune(layer: nn.Module) -> None:
    prune.custom_from_mask(layer, "weight", torch.eye(*layer.weight.shape).logical_not())


#: Changes of a layer that its own call sees.
CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "forward hook": lambda layer: layer.register_forward_hook(lambda _, args, out: 2 * out),
    "pre-hook": lambda layer: layer.register_forward_pre_hook(lambda _, args: (2 * args[0],)),
    "backward hook": lambda layer: layer.register_full_backward_hook(
        lambda _, grads, of_outputs: tuple(2 * grad for grad in grads)
    ),
    "parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", Twice()),
    "pruning": _prune,
    "a forward of its own": _double_forward,
}


def _changed_layers(at: Rank, name: str) -> None:
    from ficco.nn import ColumnParallelLinear, gather_once

    wholes = [linear(HIDDEN, WIDE, seed) for seed in (1, 2)]
    layers = [ColumnParallelLinear.from_linear(each) for each in wholes]
    x = integers(SEQUENCE, HIDDEN, seed=3)
    mine, whole = part(x, at, 0).requires_grad_(), x.clone().requires_grad_()
    if name == "pruning":  # of parts, whose diagonals are elsewhere
        _prune(layers[1])
        lost = torch.zeros(WIDE, HIDDEN, dtype=torch.bool)
        each = WIDE // at.world
        for rank in range(at.world):
            lost[rank * each : (rank + 1) * each] = torch.eye(each, HIDDEN, dtype=torch.bool)
        prune.custom_from_mask(wholes[1], "weight", lost.logical_not())
    else:
        CHANGES[name](layers[1])
        CHANGES[name](wholes[1])
    outs = gather_once(mine, *layers)
    wanted = [each(whole) for each in wholes]
    grads = [integers(SEQUENCE, WIDE, seed=seed) for seed in (4, 5)]
    for index, (out, want) in enumerate(zip(outs, wanted, strict=True)):
        same(out, part(want, at, 1), f"{name}: layer {index}")
    torch.autograd.backward(outs, [part(grad, at, 1) for grad in grads])
    torch.autograd.backward(wanted, grads)
    same(mine.grad, part(whole.grad, at, 0), f"{name}: gradient of x")
    for one, other in zip(layers[1].parameters(), wholes[1].parameters(), strict=True):
        same(one.grad, part(other.grad, at, 0), f"{name}: gradient of a parameter")


def _all_changed_layers(at: Rank) -> int:
    for name in CHANGES:
        if name != "backward hook":  # of a part: PyTorch gives it the gradient of the shard
            _changed_layers(at, name)
    return len(CHANGES)


def test_gather_once_calls_layers_that_were_changed() -> None:
    assert run(2, _all_changed_layers) == [len(CHANGES)] * 2


def _one_gather_with_hooks(at: Rank) -> tuple[int, int]:
    """Calls that a gather of hooked layers takes, and that one of layers set when called takes."""
    from ficco.nn import ColumnParallelLinear, gather_once
    from ficco.runtime.workspace import workspaces

    layers = [ColumnParallelLinear(HIDDEN, WIDE) for _ in range(3)]
    x = torch.ones(SEQUENCE, HIDDEN)
    gather_once(x, *layers)
    (workspace,) = workspaces()
    counts = []
    for change in ("forward hook", "pre-hook"):
        CHANGES[change](layers[2])
        before = workspace.calls
        gather_once(x, *layers)
        counts.append(workspace.calls - before)
    assert not hasattr(x, "_ficco_shared")
    return counts[0], counts[1]


def test_layers_with_hooks_after_their_forward_share_a_gather() -> None:
    assert run(2, _one_gather_with_hooks) == [(1, 2)] * 2


def _hook_of_one_rank(at: Rank) -> None:
    from ficco.nn import ColumnParallelLinear, gather_once

    layers = [ColumnParallelLinear.from_linear(linear(HIDDEN, WIDE, seed)) for seed in (1, 2)]
    x, seen = torch.ones(SEQUENCE // at.world, HIDDEN), []
    wanted = gather_once(x, *layers)
    if at.rank == 0:
        layers[0].register_forward_hook(lambda _, args, out: seen.append(out))
    for out, want in zip(gather_once(x, *layers), wanted, strict=True):
        same(out, want, "with a hook on rank 0")
    assert len(seen) == (at.rank == 0)


def test_a_forward_hook_on_one_rank_is_served() -> None:
    run(2, _hook_of_one_rank)


def _changed_projections(at: Rank) -> int:
    from ficco.nn import UlyssesAttention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        return q + 2 * k.flip(2) + 3 * v  # of all positions, and exact

    checked = 0
    for kv_heads in (2, 4):
        layer = UlyssesAttention(6, 4, kv_heads, size=3, bias=True)
        with torch.no_grad():
            for seed, param in enumerate(layer.parameters()):
                param.copy_(integers(*param.shape, seed=seed, most=1))
        x = integers(2, SEQUENCE, 6, seed=9, most=1)
        for which in ("q_proj", "k_proj", "v_proj", "o_proj"):
            for change in (Adapter, *CHANGES.values()):
                changed = copy.deepcopy(layer)
                if change is Adapter:
                    setattr(changed, which, Adapter(getattr(changed, which)))
                elif change is CHANGES["backward hook"]:
                    continue
                else:
                    change(getattr(changed, which))
                whole, mine = x.clone().requires_grad_(), part(x, at, 1).requires_grad_()
                q, k, v = (
                    getattr(changed, name)(whole).unflatten(-1, (-1, 3)).transpose(1, 2)
                    for name in ("q_proj", "k_proj", "v_proj")
                )
                want = changed.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))
                out = changed(mine, attend=attend)
                about = f"{which}, {change}, {kv_heads} heads of keys"
                same(out, part(want, at, 1), about)
                params = [each for each in changed.parameters() if each.requires_grad]
                grad = integers(*want.shape, seed=10, most=1)
                wanted = torch.autograd.grad(want, [whole, *params], grad)
                found = torch.autograd.grad(out, [mine, *params], part(grad, at, 1))
                same(found[0], part(wanted[0], at, 1), f"{about}: gradient of x")
                for own, all_of_it in zip(found[1:], wanted[1:], strict=True):
                    torch.distributed.all_reduce(own)
                    same(own, all_of_it, f"{about}: gradient of a parameter")
                checked += 1
    return checked


def test_attention_by_heads_calls_projections_that_were_changed() -> None:
    assert run(2, _changed_projections, timeout=120) == [48] * 2


def _own_kernels(at: Rank) -> int:
    """Layers of a group, layers of a mesh, and styles, whose weights were replaced afterwards."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from ficco.nn import (
        ColumnParallelLinear,
        ColwiseParallel,
        RowParallelLinear,
        RowwiseParallel,
        gather_once,
    )

    mesh, checked = mesh_of(at), 0
    layouts = {"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}
    replicated = {"input_layouts": Replicate()}, {"output_layouts": Replicate()}
    for bias in (True, False):
        up, down = linear(HIDDEN, WIDE, 1, bias), linear(WIDE, HIDDEN, 2, bias)
        x = integers(3, SEQUENCE, HIDDEN, seed=3, most=1)
        middle = nn.functional.linear(x, 2 * up.weight, up.bias)
        want = nn.functional.linear(middle, 2 * down.weight, down.bias)

        def halves(layer: Any, inner: Callable[[torch.Tensor], torch.Tensor] = plain) -> Any:
            layer.weight = nn.Parameter(Doubled(inner(layer.weight.detach())), False)
            return layer

        for group in (None, mesh):
            where: dict[str, Any] = {"group": group, "sequence_dim": 1}
            column = halves(ColumnParallelLinear.from_linear(up, **where))
            row = halves(RowParallelLinear.from_linear(down, **where))
            mine = part(x, at, 1).requires_grad_()
            (out,) = gather_once(mine, column)
            same(out, part(middle, at, 2), "column")
            y = row(out)
            assert not out._is_view() and not y._is_view()
            same(y, part(want, at, 1), "row")
            grad = integers(*want.shape, seed=5, most=1)
            y.backward(part(grad, at, 1))
            of_x = grad @ (2 * down.weight) @ (2 * up.weight)
            same(mine.grad, part(of_x, at, 1), "gradient of x")
            checked += 1
        for before, after in (layouts, replicated):
            for inner in (plain, lambda weight: weight):  # a weight of parts, or of DTensors
                model = nn.Sequential(copy.deepcopy(up), copy.deepcopy(down))
                plan = {"0": ColwiseParallel(**before), "1": RowwiseParallel(**after)}
                parallelize_module(model, mesh, plan)
                halves(model[0], inner), halves(model[1], inner)
                assert isinstance(model[0].weight.half, DTensor) == (inner is not plain)
                sharded = before is layouts[0]
                y = model(part(x, at, 1) if sharded else x)
                same(y, part(want, at, 1) if sharded else want, f"styles, {before}, {inner}")
                checked += 1
    return checked


def test_weights_with_kernels_of_their_own_are_multiplied_by_them() -> None:
    assert run(2, _own_kernels) == [12] * 2


def _own_kernel_refusals(at: Rank) -> list[Failure]:
    from ficco.nn import ColumnParallelLinear, RowParallelLinear

    source = nn.Linear(HIDDEN, WIDE)
    source.weight = nn.Parameter(Doubled(source.weight.detach()), False)
    column, row = ColumnParallelLinear(HIDDEN, WIDE), RowParallelLinear(WIDE, HIDDEN)
    for layer in (column, row):
        layer.weight = nn.Parameter(Doubled(layer.weight.detach()), False)
    return [
        caught(lambda: ColumnParallelLinear.from_linear(source)),
        caught(lambda: column(torch.ones(4, HIDDEN), rows=[4, 4])),
        caught(lambda: row(torch.ones(5, WIDE // 2))),
    ]


def test_what_such_weights_cannot_have_is_refused() -> None:
    for failures in run(2, _own_kernel_refusals):
        assert [failure.type for failure in failures] == [
            "ValueError",
            "NotImplementedError",
            "ValueError",
        ]
        words = ("got one whose weight is a Doubled", "rows: required None", "share equally, got 5")
        for failure, text in zip(failures, words, strict=True):
            assert text in failure.text, failure


def _sharded_by_fsdp(at: Rank) -> tuple[Failure, Failure]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ficco.nn import ColumnParallelLinear, gather_once

    mesh = init_device_mesh(at.device.type, (at.world, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)  # ranks of which each has a part of a weight have the same weight
    layers = (ColumnParallelLinear(HIDDEN, WIDE, group=mesh["tp"]) for _ in range(2))
    model = nn.Sequential(*layers)
    each = copy.deepcopy(model)
    for layer in each:
        fully_shard(layer, mesh=mesh["dp"])
    wants = [layer(torch.ones(4, HIDDEN)) for layer in model]
    for out, want in zip(gather_once(torch.ones(4, HIDDEN), *each), wants, strict=True):
        same(out, want, "of layers that are sharded one by one")
    fully_shard(model, mesh=mesh["dp"])
    model.forward = lambda x: gather_once(x, *model)  # type: ignore[method-assign]
    for out, want in zip(model(torch.ones(4, HIDDEN)), wants, strict=True):
        same(out, want, "within the call of the module")
    model.reshard()
    x = torch.ones(4, HIDDEN)
    return caught(lambda: gather_once(x, *model)), caught(lambda: model[0](x))


@since("2.8", "has no FSDP2 on CPUs")
def test_a_weight_that_fsdp_has_sharded_is_refused() -> None:
    for failures in run(2, _sharded_by_fsdp):
        for failure in failures:
            assert failure.type == "ValueError", failure
            assert "as fully_shard leaves it between calls" in failure.text, failure


def _replaced(at: Rank) -> None:
    from ficco.nn import ColumnParallelLinear, RowParallelLinear

    model = nn.Sequential(ColumnParallelLinear(8, 8), nn.ReLU(), RowParallelLinear(8, 8))
    assert not [layer for layer in model.modules() if isinstance(layer, nn.Linear)]


def test_tools_that_replace_linear_layers_leave_parallel_ones() -> None:
    run(2, _replaced)


def _changed_in_place(at: Rank, shape: tuple[int, ...]) -> int:
    """Outputs are changed in place; layers are also under ``fully_shard``, each by itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from ficco import nn as parallel

    data = init_device_mesh(at.device.type, (1, at.world), mesh_dim_names=("dp", "tp"))
    dim = len(shape) - 2
    x, wide = integers(*shape, seed=1), integers(*shape[:-1], WIDE, seed=1)
    weight = integers(WIDE, HIDDEN, seed=2).requires_grad_()
    calls: dict[str, tuple[Any, torch.Tensor]] = {
        "copied_linear": (partial(parallel.copied_linear, weight=weight), x),
        "reduced_linear": (partial(parallel.reduced_linear, weight=weight), x),
    }
    for group in (None, data["tp"]):
        where: dict[str, Any] = {"bias": False, "group": group, "sequence_dim": dim}
        column, other = (parallel.ColumnParallelLinear(HIDDEN, WIDE, **where) for _ in range(2))
        row = parallel.RowParallelLinear(WIDE * at.world, HIDDEN, **where)
        if group is not None:
            for layer in (column, row, other):
                fully_shard(layer, mesh=data["dp"])
        calls |= {f"column, {group}": (column, x), f"row, {group}": (row, wide)}
        calls[f"gather_once, {group}"] = lambda x, pair=(other, column): _last(x, pair), x
    for layout in (Replicate(), Shard(dim)):
        up, down = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        parallelize_module(up, data["tp"], parallel.ColwiseParallel(input_layouts=layout))
        inputs = {"input_layouts": Replicate(), "output_layouts": layout}
        parallelize_module(down, data["tp"], parallel.RowwiseParallel(**inputs))
        for style, layer in (("Colwise", up), ("Rowwise", down)):
            fully_shard(layer, mesh=data["dp"])
            calls[f"{style}, {layout}"] = layer, x
    for name, (call, operand) in calls.items():
        operand = operand.clone().requires_grad_()
        y = call(operand)
        assert not y._is_view(), f"{name} of {shape}"
        want = y.detach() + 1
        y += 1
        same(y.detach(), want, name)
        y.sum().backward()
        assert operand.grad is not None
    return len(calls)


def _last(x: torch.Tensor, layers: Any) -> torch.Tensor:
    from ficco.nn import gather_once

    return gather_once(x, *layers)[-1]


@since("2.8", "has no FSDP2 on CPUs")
@pytest.mark.parametrize("shape", [(3, SEQUENCE, HIDDEN), (SEQUENCE, HIDDEN)], ids=str)
def test_outputs_are_no_views(shape: tuple[int, ...]) -> None:
    assert run(2, _changed_in_place, shape) == [12] * 2


def _falling_order(at: Rank) -> list[Failure]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = DeviceMesh(at.device.type, list(reversed(range(at.world))))
    x, layer = torch.ones(4, 8), ficco.nn.ColumnParallelLinear
    return [
        caught(lambda: layer(8, 8, group=mesh)),
        caught(lambda: parallelize_module(nn.Linear(8, 8), mesh, ficco.nn.RowwiseParallel())),
        caught(lambda: parallelize_module(nn.Linear(8, 8), mesh, ficco.nn.ColwiseParallel())),
        caught(lambda: ficco.all_gather_matmul(x, torch.ones(8, 3), group=mesh)),
        caught(lambda: ficco.nn.UlyssesAttention(8, 4, group=mesh)),
        caught(lambda: ficco.nn.sum_gradient(x, mesh)),
    ]


def test_meshes_in_falling_order_are_refused_everywhere() -> None:
    for failures in run(2, _falling_order):
        for failure in failures:
            assert failure.type == "ValueError", failure
            assert "required a DeviceMesh with its ranks in rising order" in failure.text, failure
