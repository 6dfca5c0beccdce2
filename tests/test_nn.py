"""Parallel layers, parallel styles and the examples, compared with unsharded models.

Operands of layers and styles are small integers in float32. Sums are exact in any order, and the
results are compared without a tolerance.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import itertools
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Failure, Rank, caught, counted, on_ranks, run, since
from torch import nn
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ficco.nn import (
    ColumnParallelLinear,
    ColwiseParallel,
    PrepareModuleInput,
    RowParallelLinear,
    RowwiseParallel,
    UlyssesAttention,
    clip_grad_norm_,
    copied_linear,
    copied_linears,
    full_state_dict,
    gather_once,
    gathered_linears,
    reduced_linear,
    replicated,
    scattered_linear,
    sum_gradient,
)
from ficco.nn.plain import local_of, part_of, placed
from ficco.options import options

ROOT = Path(__file__).parents[1]

#: Different sizes for different dimensions. Features are multiples of 4 ranks.
HIDDEN, WIDE, SEQUENCE = 12, 20, 8
HAS_FSDP2 = since("2.8", "has no FSDP2 on CPUs")


def integers(*shape: int, seed: int, most: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def linear(inputs: int, outputs: int, seed: int, bias: bool = True, most: int = 2) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias)
    with torch.no_grad():
        for i, param in enumerate(layer.parameters()):
            param.copy_(integers(*param.shape, seed=100 * seed + i, most=most))
    return layer


def pair(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(linear(HIDDEN, WIDE, 1, bias), linear(WIDE, HIDDEN, 2, bias))


def over_ranks(whole: nn.Sequential, **options: Any) -> nn.Sequential:
    return nn.Sequential(
        ColumnParallelLinear.from_linear(whole[0], **options),
        RowParallelLinear.from_linear(whole[1], **options),
    )


def mesh_of(at: Rank) -> Any:
    return init_device_mesh(at.device.type, (at.world,))


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def part(whole: torch.Tensor, at: Rank, dim: int, rows: list[int] | None = None) -> torch.Tensor:
    return whole.split(rows or whole.shape[dim] // at.world, dim)[at.rank].contiguous()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same(result: torch.Tensor | None, want: torch.Tensor, about: str) -> None:
    assert result is not None, f"{about} is missing"
    assert (result.shape, result.dtype) == (want.shape, want.dtype), about
    assert torch.equal(result, want), f"{about}: {int((result != want).sum())} wrong elements"


def same_gradients(
    model: Any, whole: Any, about: str, rank: int, world: int, times: Any = 1
) -> None:
    """Fail unless parameters have the gradients of the unsharded model, or this rank's parts."""
    for (name, param), full in zip(model.named_parameters(), whole.parameters(), strict=True):
        if full.grad is None:
            assert param.grad is None, f"{about}: {name} has a gradient"
            continue
        assert param.grad is not None, f"{about}: {name} has no gradient"
        grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        expected, sizes = times * full.grad, zip(full.shape, grad.shape, strict=True)
        for dim in [dim for dim, (size, local) in enumerate(sizes) if size != local]:  # at most one
            expected = expected.chunk(world, dim)[rank]
        same(grad, expected, f"{about}: gradient of {name}")


def as_unsharded(
    at: Rank, model: Any, whole: Any, x: Any, grad: Any, cut: Any, about: str, called: Any = None
) -> None:
    """Fail unless a model returns the cut of the unsharded result and computes its gradients."""
    model.zero_grad()
    whole.zero_grad()
    full_x, own_x = x.clone().requires_grad_(), cut(x).clone().requires_grad_()
    expected, y = whole(full_x), (called or model)(own_x)
    same(y, cut(expected), f"{about}: y")
    expected.backward(grad)
    y.backward(cut(grad))
    same(own_x.grad, cut(full_x.grad), f"{about}: gradient of x")
    same_gradients(model, whole, about, at.rank, at.world)


def same_states(state: dict[str, Any], expected: dict[str, Any], about: str) -> None:
    assert list(state) == list(expected), about
    for name, value in expected.items():
        same(state[name], value, f"{name}, {about}")


def refuses(*cases: tuple[str, Callable[[], Any]], kind: str = "ValueError") -> None:
    for text, call in cases:
        failure = caught(call)
        assert isinstance(failure, Failure), f"no error: {text}"
        assert failure.type == kind and text in failure.text, failure.traceback


# Layers.


WORLDS = [(4, "cpu"), pytest.param(2, "cuda", marks=pytest.mark.multigpu)]


@pytest.mark.parametrize(("world", "device"), WORLDS)
@on_ranks()
def test_column_and_row_are_exact(at: Rank) -> None:
    mesh, group = mesh_of(at), dist.new_group(list(range(at.world)))
    uneven = {2: [3, 5], 4: [3, 0, 4, 1]}[at.world]
    shapes = ((), 0), ((3,), 0), ((3,), 1), ((2, 3), 2), ((1,), -2)
    places = itertools.cycle(((None, True), (group, False), (mesh, True)))
    kinds = itertools.product(shapes, (None, uneven))
    for ((shape, dim), rows), (place, bias) in zip(kinds, places, strict=False):
        whole = pair(bias).to(at.device)
        model = over_ranks(whole, group=place, sequence_dim=dim)
        sizes = [*shape]
        sizes.insert(len(shape) if dim == -2 else dim, SEQUENCE)
        x, grad = (integers(*sizes, HIDDEN, seed=seed).to(at.device) for seed in (3, 4))
        cut = partial(part, at=at, dim=dim % x.dim(), rows=rows)
        about = f"{place}, bias={bias}, batch {shape}, dim {dim}, rows={rows}"
        called = partial(lambda model, rows, x: model[1](model[0](x, rows), rows), model, rows)
        as_unsharded(at, model, whole, x, grad, cut, about, called)
        assert all(isinstance(p, DTensor) == (place is mesh) for p in model.parameters())


def _kinds(at: Rank) -> None:
    """Dtypes, autocast, and the text and copies of frozen layers."""
    x, hidden = (integers(SEQUENCE, size, seed=3, most=1) for size in (HIDDEN, WIDE))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):  # exact: at most 12 terms of 2
        whole, inputs = pair().to(dtype), (x.to(dtype), hidden.to(dtype))
        pairs = zip(over_ranks(whole), whole, inputs, ((0, 1), (1, 0)), strict=True)
        for layer, full, operand, dims in pairs:
            result = layer(part(operand, at, dims[0]))
            same(result, part(full(operand), at, dims[1]), f"{dtype}: {layer}")
    frozen = linear(HIDDEN, WIDE, 1).requires_grad_(False).eval()
    column = ColumnParallelLinear.from_linear(frozen, schedule="serial")
    assert not any(param.requires_grad for param in column.parameters()) and not column.training
    assert f"rank {at.rank} of {at.world}" in repr(column) and "schedule='serial'" in repr(column)
    twin = copy.deepcopy(column)
    assert twin.group is column.group
    same(twin(part(x, at, 0)), part(frozen(x), at, 1), "a deep copy")
    with torch.autocast("cpu", torch.bfloat16):
        same(column(part(x, at, 0)), part(frozen(x), at, 1), "autocast")


def _initialisation(at: Rank) -> None:
    """Parameters are parts of the unsharded layer's parameters, from the same random numbers, in
    storage of their size. A converted layer shares no memory with its source, also on one rank."""
    kinds = ColumnParallelLinear, RowParallelLinear
    for kind, group in itertools.product(kinds, (None, mesh_of(at))):
        torch.manual_seed(7)
        whole, after = nn.Linear(HIDDEN, WIDE), torch.rand(1)
        torch.manual_seed(7)
        drawn = kind(HIDDEN, WIDE, group=group)
        assert torch.rand(1) == after
        late, loaded = (kind(HIDDEN, WIDE, device="meta", group=group) for _ in range(2))
        late.to_empty(device="cpu")
        torch.manual_seed(7)
        late.reset_parameters()
        loaded.load_state_dict(whole.state_dict(), assign=True)
        for layer in (drawn, late, loaded):
            cuts = (kind.cut, 0 if kind.cut == 0 else None)
            for param, full, cut in zip(layer.parameters(), whole.parameters(), cuts, strict=True):
                own = plain(param.detach())
                same(own, full if cut is None else part(full, at, cut), f"{layer}")
                assert layer is late or own.untyped_storage().nbytes() == own.nbytes
    one_rank = init_device_mesh("cpu", (at.world, 1), mesh_dim_names=("dp", "tp"))["tp"]
    for kind, group in itertools.product(kinds, (one_rank, one_rank.get_group())):
        source = linear(HIDDEN, WIDE, 1)
        for param in kind.from_linear(source, group=group).parameters():
            plain(param.detach()).fill_(7.0)
        assert all(map(torch.equal, source.parameters(), linear(HIDDEN, WIDE, 1).parameters()))


def _state_dicts(at: Rank) -> None:
    """Layers load the unsharded state_dict and return it, also if they are wrapped."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    whole = nn.Sequential(linear(HIDDEN, WIDE, 1), nn.LayerNorm(WIDE), linear(WIDE, HIDDEN, 2))
    state = whole.state_dict()
    for group, assign in itertools.product((None, mesh_of(at)), (False, True)):
        model = nn.Sequential(
            ColumnParallelLinear(HIDDEN, WIDE, group=group),
            nn.LayerNorm(WIDE),
            RowParallelLinear(WIDE, HIDDEN, group=group),
        )
        passed = dict(state)
        model.load_state_dict(passed, assign=assign)
        assert all(passed[name] is state[name] for name in state), "the caller's dict was changed"
        for name, dim in (("0.weight", 0), ("0.bias", 0), ("2.weight", 1)):
            same(plain(model.get_parameter(name)), part(state[name], at, dim), name)
        same(plain(model[2].bias), state["2.bias"], "row bias")
        same_states(full_state_dict(model), state, "loaded")
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        for param in model.parameters():
            param.data.zero_()
        model.load_state_dict(saved)
        same_states(full_state_dict(model), state, "after a round trip of parts")
        wrapped = nn.Sequential(*map(checkpoint_wrapper, model))
        same_states(full_state_dict(wrapped), state, "wrapped")
    same(full_state_dict(model[2])["weight"], state["2.weight"], "a single layer")
    wrong = {**state, "0.weight": torch.zeros(WIDE + 4, HIDDEN)}
    refuses(("0.weight", lambda: model.load_state_dict(wrong)), kind="RuntimeError")
    layer, other = ColumnParallelLinear(8, 8), nn.Linear(8, 3).state_dict()
    pickled = "full_state_dict", lambda: torch.save(layer, io.BytesIO())
    refuses(pickled, kind="NotImplementedError")
    shapes = "weight: required shape [8, 8], the unsharded layer's, or [4, 8]"
    for text in (shapes, "bias: required shape [8]", "got [3]"):
        refuses((text, lambda: layer.load_state_dict(other)), kind="RuntimeError")


def _more_than_weights(at: Rank) -> None:
    whole = linear(HIDDEN, WIDE, 1)
    layer = ColumnParallelLinear.from_linear(whole)
    added = {"lora_A": integers(2, HIDDEN, seed=1), "scale": integers(seed=2)}
    added["gain"] = integers(WIDE, seed=3)  # as long as the unsharded bias
    for name, value in added.items():
        layer.register_parameter(name, nn.Parameter(value.clone()))
    layer.load_state_dict(layer.state_dict())
    same_states(full_state_dict(layer), whole.state_dict() | added, "with added parameters")
    pruned = prune.random_unstructured(ColumnParallelLinear.from_linear(whole), "bias", 0.5)
    normed = parametrizations.weight_norm(ColumnParallelLinear.from_linear(whole))
    refuses(
        ("a layer whose bias is computed", lambda: full_state_dict(pruned)),
        ("a layer whose weight is computed", lambda: full_state_dict(normed)),
        ("a layer whose weight is computed", normed.reset_parameters),
        kind="NotImplementedError",
    )


def _unequal(at: Rank) -> None:
    """One element of a parameter differs on one rank, or elements are swapped."""
    names = ["0.weight", "2.bias", "4.o_proj.weight", "5.weight"]
    kinds = (None, torch.float32), (mesh_of(at), torch.bfloat16), (None, torch.float64)
    for group, dtype in kinds:
        model = block(group)[1].to(dtype)
        model[0] = replicated(model[0], group)
        model.append(UlyssesAttention(8, 4))
        model.append(replicated(nn.Linear(3, 2, bias=False).to(torch.complex64), group))
        model[-1].requires_grad_(False)
        for param in (*model[-2].parameters(), *model[-1].parameters()):
            plain(param).data.fill_(1)
        full_state_dict(model)
        for name, swapped in (*((name, False) for name in names), *((n, True) for n in names[:2])):
            param = plain(model.get_parameter(name).detach())
            before = param.clone()
            if at.rank == 1 and swapped:
                param.copy_(param.flip(0))
            elif at.rank == 1:
                param.view(-1)[-1] += 1
            wrong = f"got different {name};", partial(full_state_dict, model)
            refuses(wrong, kind="RuntimeError")
            param.copy_(before)


def _encoder(at: Rank) -> None:
    """Parallel layers in a PyTorch layer whose fast path in eval would read their weights."""
    torch.manual_seed(0)
    whole = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval()
    model = copy.deepcopy(whole)
    model.linear1 = ColumnParallelLinear.from_linear(whole.linear1)
    model.linear2 = RowParallelLinear.from_linear(whole.linear2)
    x = integers(SEQUENCE, 4, 8, seed=3).double()
    with torch.no_grad():
        # float64 sums in another order.
        torch.testing.assert_close(model(part(x, at, 0)), part(whole(x), at, 0))


def _replicated_norm(at: Rank) -> None:
    weight = integers(HIDDEN, seed=1).requires_grad_()
    x, grad = integers(SEQUENCE, HIDDEN, seed=2), integers(SEQUENCE, HIDDEN, seed=3)
    (expected,) = torch.autograd.grad(x * weight, weight, grad)
    for group in (None, dist.group.WORLD, mesh_of(at)):
        y = part(x, at, 0) * sum_gradient(weight, group)
        (grad_weight,) = torch.autograd.grad(y, weight, part(grad, at, 0))
        same(grad_weight, expected, "gradient of a weight that all ranks hold")
    distributed = DTensor.from_local(weight, mesh_of(at))
    refuses(("pass tensor.to_local()", lambda: sum_gradient(distributed)))


class Tripled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


def _more_than_linear(at: Rank) -> None:
    hooked, replaced, added, sharded = (nn.Linear(8, 8) for _ in range(4))
    hooked.register_forward_hook(lambda *_: None)
    replaced.forward = lambda x: x
    added.scale = nn.Parameter(torch.ones(()))
    sharded.weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh_of(at)))
    normed = parametrizations.weight_norm(nn.Linear(8, 8))
    pruned = prune.random_unstructured(nn.Linear(8, 8), "weight", 0.5)
    sources = {
        "got a Tripled": Tripled(8, 8),
        "got a NoneType": None,
        "got a ParametrizedLinear whose weight is computed": normed,
        "got one with hooks": hooked,
        "got a Linear whose weight is computed": pruned,
        "got one with a forward of its own": replaced,
        "got one with weight, bias, scale": added,
        "got one that is sharded, (Replicate(),)": sharded,
    }
    convert = ColumnParallelLinear.from_linear
    refuses(*((text, partial(convert, source)) for text, source in sources.items()))


def _wrong_use(at: Rank) -> None:
    column, row = ColumnParallelLinear(8, 16), RowParallelLinear(8, 16)
    batched = ColumnParallelLinear(8, 16, sequence_dim=1)
    square, turned = grid(), DeviceMesh("cpu", [1, 0, 2, 3])
    whole = distribute_tensor(torch.zeros(4, 8), mesh_of(at))
    x, columns, batch = torch.zeros(4, 8), torch.zeros(4, 2), torch.zeros(6, 4, 2)
    shared = partial(gather_once, torch.zeros(4, 3, 8))
    kinds = "required ColumnParallelLinear layers, each as an argument, got "
    out, last = "required a multiple of the group's 4 ranks, got 6", "required shape [..., 8]"
    refuses(
        (f"out_features: {out}", lambda: ColumnParallelLinear(8, 6)),
        (f"in_features: {out}", lambda: RowParallelLinear(6, 8)),
        ("mesh['tp']", lambda: ColumnParallelLinear(8, 8, group=square)),
        ("an unsharded torch.nn.Linear", lambda: ColumnParallelLinear.from_linear(column)),
        (last, lambda: column(columns)),
        ("required shape [..., 2], this rank's columns", lambda: row(x)),
        (last, lambda: column(torch.zeros(8))),
        ("set sequence_dim=0 for [sequence, batch, features]", lambda: batched(x)),
        ("pass rows=", lambda: row(batch)),
        ("required 6 in all", lambda: row(batch, rows=[1, 2, 2, 2])),
        ("required 4 sequence lengths", lambda: row(batch, rows=[2, 2, 2])),
        ("required rows[", lambda: column(torch.zeros(3, 8), rows=[1, 2, 1, 2])),
        ("required a plain tensor, got a DTensor", lambda: column(whole)),
        ("one group, sequence_dim, in_features and recipe", lambda: shared(column, batched)),
        (f"{kinds}Linear", lambda: gather_once(x, nn.Linear(8, 4))),
        (f"{kinds}list", lambda: gather_once(x, [column, column])),
        ("x: required a torch.Tensor, got NoneType", lambda: column(None)),
        ("tensor: required a torch.Tensor, got int", lambda: sum_gradient(3)),
        ("got generator; pass the model", lambda: clip_grad_norm_(column.parameters(), 1.0)),
        ("got generator; pass the model", lambda: replicated(column.parameters())),
        ("got OrderedDict; pass the model", lambda: full_state_dict(column.state_dict())),
        ("lengths, one per rank, none negative, got 4", lambda: column(x, rows=4)),
        ("got 'slowing'", lambda: ColumnParallelLinear(8, 4, schedule="slowing")),
        ("a name or a Schedule, got None", lambda: ColumnParallelLinear(8, 4, schedule=None)),
        ("required a dimension, got 's'", lambda: ColumnParallelLinear(8, 4, sequence_dim="s")),
        ("in rising order, as their group has them", lambda: RowParallelLinear(8, 8, group=turned)),
    )


def _one_gather(at: Rank) -> None:
    wholes = nn.ModuleList(linear(HIDDEN, 4 * n, n, bias=n != 2) for n in (1, 2, 3))
    wholes[1].requires_grad_(False)
    layers = nn.ModuleList(ColumnParallelLinear.from_linear(one, sequence_dim=1) for one in wholes)
    rows = [3, 0, 4, 1]
    x = integers(3, SEQUENCE, HIDDEN, seed=3).requires_grad_()
    grads = [integers(3, SEQUENCE, 4 * n, seed=n) for n in (1, 2, 3)]
    torch.autograd.backward([whole(x) for whole in wholes], grads)
    shards = [part(grad, at, 2) for grad in grads]
    again = partial(checkpoint, gather_once, use_reentrant=False)
    for gathers, saves in ((gather_once, False), (gather_once, True), (again, False)):
        about = f"rank {at.rank}, {gathers}, save_gathered={saves}"
        own = part(x.detach(), at, 1, rows).requires_grad_()
        layers.zero_grad()
        with counted() as counts, options(save_gathered=saves):
            outs = gathers(own, *layers, rows=rows)
        assert counts == {"all_gather_matmul": 1}
        for out, whole in zip(outs, wholes, strict=True):
            same(out, part(whole(x), at, 2), f"{about}: one of the outputs")
        torch.autograd.backward(outs, shards)
        same(own.grad, part(x.grad, at, 1, rows), f"{about}: gradient of the shared input")
        same_gradients(layers, wholes, about, at.rank, at.world)
    assert gather_once(own) == ()
    # The input is the result of a collective in flight.
    whole = integers(at.world, 2, HIDDEN, seed=3)
    in_flight = all_gather_tensor(part(whole, at, 0), 0, dist.group.WORLD)
    assert isinstance(in_flight, AsyncCollectiveTensor)
    assert all(map(torch.equal, gather_once(in_flight, *layers), gather_once(whole, *layers)))
    # Tensors that the backward does not need may be changed in place.
    layers.zero_grad()
    outs = gather_once(own.detach(), *layers, rows=np.array(rows))
    outs[1].mul_(2)
    with torch.no_grad():
        layers[0].weight.add_(1)
    torch.autograd.backward(outs, shards)
    same_gradients(layers, wholes, "after a change in place", at.rank, at.world)
    # The backward saves only the input and the layers' weights.
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gather_once(own, *layers, rows=rows)
    weights = {layer.weight.data_ptr() for layer in layers}
    others = [tensor for tensor in saved if tensor.data_ptr() not in weights]
    assert [tensor.shape[-1] for tensor in others] == [HIDDEN], [t.shape for t in saved]


class Scaled(nn.Module):
    """A product with a vector. Its gradients are exact; the gradients of a norm are not."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(integers(size, seed=seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def block(group: Any = None) -> tuple[nn.Sequential, nn.Sequential]:
    before, after = Scaled(HIDDEN, 1), linear(HIDDEN, HIDDEN, 4)
    whole = nn.Sequential(before, linear(HIDDEN, WIDE, 2), linear(WIDE, HIDDEN, 3), after)
    parallel = over_ranks(whole[1:3], group=group)
    return whole, nn.Sequential(copy.deepcopy(before), *parallel, copy.deepcopy(after))


def _summed(at: Rank, names: tuple[str, ...]) -> None:
    """One call declares replicated parameters. Hooks survive copies, compilation and FSDP."""
    x, grad = (integers(SEQUENCE, HIDDEN, seed=seed, most=1) for seed in (5, 6))
    mesh = mesh_of(at) if at.world == 2 else grid()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, at.world, 2)]
    groups = {"pair": pairs[at.rank // 2], "copied": None}
    for name in names:
        group = mesh["tp"] if name == "fully_shard" else groups.get(name, mesh)
        whole, model = block(group)
        for module in model if name == "fully_shard" else [model]:
            assert replicated(module, group) is module
        own, upstream, expected = (full.chunk(2)[at.rank % 2] for full in (x, grad, whole(x)))
        whole(x).backward(grad)
        changed = copy.deepcopy(model) if name == "copied" else model
        if name == "fully_shard":
            for module in (*model, model):
                fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        elif "compiled" in name:
            changed = torch.compile(model, backend="aot_eager", fullgraph=True)
        with pytest.raises((ValueError, RuntimeError)):  # parameters keep their names after it
            changed(own[:, 1:])
        for _ in range(2):  # gradients accumulate
            y = changed(own)
            y.backward(upstream)
            same(y, expected, name)
        assert "weight" not in vars(model[0])
        same_gradients(changed, whole, name, at.rank % 2, 2, times=2)
        if name in ("mesh", "copied", "pair"):
            same_states(full_state_dict(changed), whole.state_dict(), name)


@HAS_FSDP2
def test_replicated_sums_the_gradients_of_whole_parameters() -> None:
    run(2, _summed, ("mesh", "copied", "compiled, mesh"), timeout=200)
    run(4, _summed, ("pair", "fully_shard"))


class _Recomputed(nn.Sequential):
    """Recomputes its first module in the backward, after a call of itself if ``again``."""

    reentrant = again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again:
            self.again = False
            x = self(x)
        return checkpoint(self[0], x, use_reentrant=self.reentrant)


def _recomputed(at: Rank) -> None:
    """Gradients of parameters that a checkpoint reads again, or that nested declarations share."""
    weight, grad = integers(HIDDEN, seed=1), part(integers(SEQUENCE, HIDDEN, seed=6), at, 0)
    for group, reentrant, nested in itertools.product((None, mesh_of(at)), (0, 1), (0, 1)):
        results = []
        for sums in (False, True):
            model = _Recomputed(Scaled(HIDDEN, 1))
            model.reentrant, model.again = bool(reentrant), bool(nested)
            model[0].weight.data.copy_(weight)
            if sums and nested and group is None:
                replicated(model[0])
            own = replicated(model, group) if sums else model
            x = part(integers(SEQUENCE, HIDDEN, seed=5), at, 0).requires_grad_()
            own(x).backward(grad)
            results.append(plain(model[0].weight.grad).clone())
            assert isinstance(model[0].weight, nn.Parameter)
        dist.all_reduce(results[0])
        same(results[1], results[0], f"{group}, reentrant={reentrant}, nested={nested}")


def _meta(at: Rank) -> None:
    x, grad = (integers(SEQUENCE, HIDDEN, seed=seed) for seed in (5, 6))
    weight = integers(HIDDEN, seed=1)
    for group, assign in itertools.product((None, mesh_of(at)), (False, True)):
        with torch.device("meta"):
            model = replicated(nn.Sequential(Scaled(HIDDEN, 1)), group)
        model.to_empty(device="cpu")
        whole = weight.clone() if group is None else distribute_tensor(weight, group)
        model.load_state_dict({"0.weight": whole}, assign=assign)
        y = model(part(x, at, 0))
        same(y, part(x * weight, at, 0), f"{group}, assign={assign}")
        y.backward(part(grad, at, 0))
        same(plain(model[0].weight.grad), (x * grad).sum(0), f"{group}, assign={assign}")


def _skipped(at: Rank) -> None:
    """If rank 1 has an infinite gradient, the scaler of docs/modules.md skips all steps."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    for group, wrong in itertools.product((None, mesh_of(at)), ("", "0", "1", "3")):
        model = replicated(block(group)[1], group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = ShardedGradScaler(at.device.type, init_scale=4.0, process_group=dist.group.WORLD)
        before = [plain(param.detach()).clone() for param in model.parameters()]
        scaler.scale(model(part(integers(SEQUENCE, HIDDEN, seed=5), at, 0)).sum()).backward()
        if at.rank == 1 and wrong:
            plain(model.get_parameter(f"{wrong}.weight").grad).view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        pairs = zip(before, model.parameters(), strict=True)
        unchanged = all(torch.equal(old, plain(new.detach())) for old, new in pairs)
        assert (unchanged, scaler.get_scale()) == (bool(wrong), 2.0 if wrong else 4.0)


def _norms(at: Rank) -> None:
    from torch.nn.utils import clip_grad_norm_ as unsharded_clip

    two = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][at.rank // 2]
    columns, mesh = grid()["tp"], mesh_of(at)
    x, grad = (integers(SEQUENCE, HIDDEN, seed=seed, most=1) for seed in (5, 6))
    # A norm of the parts' norms rounds differently from a norm of unsharded norms.
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=0)
    groups = ((None,), (None, mesh), (columns, two), (None, two))
    for places, kind in itertools.product(groups, (2.0, float("inf"))):
        wholes, models = nn.ModuleList(), nn.ModuleList()
        for place in places:
            whole, model = block(place)
            for module in (whole, model):
                module[0].requires_grad_(place is not places[0])  # some parameters have no gradient
            world = 2 if place in (two, columns) else 4
            own, upstream = (full.chunk(world)[at.rank % world] for full in (x, grad))
            whole(x).backward(grad)
            replicated(model, place)(own).backward(upstream)
            wholes.append(whole)
            models.append(model)
        models.append(models[0])  # tied parameters count once
        want = unsharded_clip(wholes.parameters(), 0.5, kind)
        if places in ((None,), (None, two)):
            close(unsharded_clip(models.parameters(), float("inf"), kind), want)  # clips nothing
        norm = clip_grad_norm_(models, 0.5, kind)
        close(norm, want, msg=f"{norm}, not {want}: {places}, {kind}")
        dist.all_gather(norms := [torch.empty(()) for _ in range(at.world)], norm)
        assert len({each.item() for each in norms}) == 1, norms
        for model, whole, place in zip(models, wholes, places, strict=False):
            world = 2 if place in (two, columns) else 4
            close(plain(model[2].bias.grad), whole[2].bias.grad)
            close(plain(model[1].weight.grad), whole[1].weight.grad.chunk(world)[at.rank % world])


def _parts_or_wholes(at: Rank) -> None:
    """Gradients and parameters that may be parts or whole are refused."""
    from torch.distributed.tensor import distribute_module

    mesh, x = mesh_of(at), torch.ones(2, HIDDEN)
    added, resharded = ColumnParallelLinear(8, 8), nn.Sequential(ColumnParallelLinear(8, 8))
    added.register_parameter("scale", nn.Parameter(torch.ones(8)))
    fully_shard(resharded, mesh=mesh)
    normed = parametrizations.weight_norm(RowParallelLinear(8, 8))
    infinite = ColumnParallelLinear(8, 8)
    infinite(torch.ones(2, 8)).sum().backward()
    if at.rank == 1:
        infinite.weight.grad[0, 0] = float("inf")
    clip, original = partial(clip_grad_norm_, max_norm=1.0), "0.parametrizations.weight.original0"
    refuses(
        ("0.scale: required a DTensor, or no parameter", lambda: clip(nn.Sequential(added))),
        (f"{original}: required a DTensor", lambda: clip(nn.Sequential(normed))),
        ("0.weight: required a plain part", lambda: clip(resharded)),
        ("not served after fully_shard", lambda: full_state_dict(resharded)),
        kind="NotImplementedError",
    )
    clips = "non-finite", lambda: clip(infinite, error_if_nonfinite=True)
    refuses(clips, kind="RuntimeError")

    distributed = distribute_module(nn.Sequential(Scaled(HIDDEN, 1)), mesh)
    outside = nn.Sequential(replicated(Scaled(HIDDEN, 1)))
    fully_shard(outside, mesh=mesh)
    around = replicated(nn.Sequential(Scaled(HIDDEN, 1)))
    fully_shard(around[0], mesh=mesh)
    remedy = "call replicated on each module that fully_shard wraps"
    refuses(
        ("got weight of 0", lambda: replicated(distributed)),
        *((remedy, lambda: outside[0](x)), (remedy, lambda: around(x))),
    )


def styled(whole: nn.Module, mesh: Any, before: Any, after: Any, **more: Any) -> nn.Module:
    plan = {"0": ColwiseParallel(**before, **more), "1": RowwiseParallel(**after, **more)}
    return parallelize_module(copy.deepcopy(whole), mesh, plan)


def _layouts(at: Rank) -> None:
    mesh, layouts = mesh_of(at), (Replicate(), Shard(0), Shard(1), Shard(-1))
    kinds = itertools.product(layouts, (*layouts, Partial()), (True, False))
    for turn, (before, after, local) in enumerate(kinds):
        sequence = SEQUENCE if local or turn % 3 == 0 else 6  # plain tensors are equal parts
        bias = (before == after) == local
        about = f"rank {at.rank}, bias={bias}, {before} to {after}, {local=}, {sequence=}"
        whole, where = pair(bias), ({"input_layouts": before}, {"output_layouts": after})
        model = styled(whole, mesh, *where, use_local_output=local)
        x = integers(4, sequence, HIDDEN, seed=3).requires_grad_()
        grad = integers(4, sequence, HIDDEN, seed=4)
        expected = whole(x)
        expected.backward(grad)
        operand = distribute_tensor(x.detach(), mesh, [before])
        operand = (operand.to_local() if local else operand).requires_grad_()
        y = model(operand)
        assert isinstance(y, DTensor) != local
        result = DTensor.from_local(y.detach(), mesh, [after]) if local else y
        assert result.placements == (after if after != Shard(-1) else Shard(2),)
        same(result.full_tensor(), expected, f"{about}: y")
        upstream = distribute_tensor(grad, mesh, [Replicate() if after == Partial() else after])
        if local:
            y.backward(upstream.to_local())
        elif after == Partial():
            y.full_tensor().backward(grad)
        else:
            y.backward(upstream)
        grad_x = DTensor.from_local(operand.grad, mesh, [before]) if local else operand.grad
        same(grad_x.full_tensor(), x.grad, f"{about}: gradient of x")
        for (name, param), full in zip(model.named_parameters(), whole.parameters(), strict=True):
            same(param.full_tensor(), full, f"{about}: {name}")
        same_gradients(model, whole, about, at.rank, at.world)


def _vectors(at: Rank) -> None:
    """Vectors, as nn.Linear supports them, and a layout of a missing dimension. Without gradients a
    column layer is one local product, and a row layer is one all-reduce."""
    whole, mesh, x = pair(), mesh_of(at), integers(HIDDEN, seed=3)
    model = styled(whole, mesh, {}, {})
    as_unsharded(at, model, whole, x, x, torch.clone, "a vector")
    cut = styled(whole, mesh, {}, {"output_layouts": Shard(-1)})
    same(cut(x), part(whole(x), at, 0), "a part of a vector")
    wrong = styled(whole, mesh, {}, {"output_layouts": Shard(1)})
    refuses(("Shard(dim=1)", lambda: wrong(x)))
    for turn, shape in enumerate([(HIDDEN,), (3, HIDDEN), (2, 3, HIDDEN)]):
        x = integers(*shape, seed=turn)
        with torch.no_grad(), counted() as counts:
            out = model(x)
        same(out, whole(x).detach(), f"{shape} without gradients")
        assert counts == {"matmul_all_reduce": 1}, counts
    with torch.no_grad():
        refuses(("group: required", lambda: copied_linear(x, x, group="tp")))  # type: ignore[arg-type]
        refuses(("is shorter", lambda: copied_linears(x, (torch.ones(8, HIDDEN),) * 2, (None,))))
    weight, bias = torch.ones(8, HIDDEN), torch.ones(7)
    refuses(
        ("got [[8, 12], [7]]", lambda: copied_linear(x, weight, bias)),
        ("got [[8, 12], [7]]", lambda: reduced_linear(x, weight, bias)),
        ("got [[8, 12], [7]]", lambda: scattered_linear(x, weight, bias)),
        ("got [[8, 12], [8, 12], None]", lambda: gathered_linears(x, (weight,) * 2, (None,))),
    )


def double_weight(layer: nn.Module, args: Any) -> None:
    layer.weight.mul_(2)


class Mlp(nn.Module):
    """Two layers that share an input, and a third. ``variant``: a change of layers or input."""

    def __init__(self, variant: str = "") -> None:
        super().__init__()
        self.variant = variant
        self.up, self.gate = linear(HIDDEN, WIDE, 1), linear(HIDDEN, WIDE, 2)
        self.down = linear(WIDE, HIDDEN, 3)
        if variant == "hook changes the weight":
            self.up.register_forward_pre_hook(double_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.variant == "both recomputed":
            both = checkpoint(lambda x: self.gate(x).relu() + self.up(x), x, use_reentrant=False)
            return self.down(both)
        if self.variant == "first recomputed":
            gate = checkpoint(self.gate, x, use_reentrant=False)
        else:
            with torch.no_grad() if self.variant == "first without gradients" else nullcontext():
                gate = self.gate(x)
        if "input changed" in self.variant:
            (plain(x) if "memory" in self.variant else x).mul_(2)
        if self.variant == "weight changed":
            self.up.weight.mul_(2)
        if self.variant == "called twice":
            gate = gate + self.up(x)
        return self.down(gate.relu() + self.up(x))


def parallelized(module: nn.Module, mesh: Any, layout: Any = None) -> nn.Module:
    """An :class:`Mlp` between parts of the sequence, or another layout, with a shared input.
    ``parallelize_module`` skips the module itself in PyTorch 2.6."""
    layout = layout or Shard(1)
    own = PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate())
    down = RowwiseParallel(output_layouts=layout)
    plan = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": down}
    return parallelize_module(parallelize_module(module, mesh, plan), mesh, own)


#: An input of an :class:`Mlp`, and the gradient of its result.
X, GRAD = (integers(2, SEQUENCE, HIDDEN, seed=seed) for seed in (3, 4))


def _parts(at: Rank) -> None:
    """Parts of DTensors, DTensors of parts and the gradients of both are PyTorch's, also where
    ranks have different shapes, a gradient lies transposed, or it has another placement."""
    mesh, whole = mesh_of(at), torch.arange(20.0).view(5, 4)

    def same(own: Any, expected: Any) -> None:
        for one, other in ((own, expected), (local_of(own), local_of(expected))):
            assert type(one) is type(other) and torch.equal(local_of(one), local_of(other))
            assert (one.shape, one.stride()) == (other.shape, other.stride())
        assert getattr(own, "placements", None) == getattr(expected, "placements", None)

    summing = itertools.product((Replicate(), Partial()), (None, [Replicate()], [Partial()]))
    for placement, gradients in ((Shard(0), None), (Shard(1), None), *summing):
        summed = placement == Partial()
        x: Any = DTensor.from_local(whole, mesh, [placement], run_check=False)
        x = (x if summed else distribute_tensor(whole, mesh, [placement])).detach()
        own, expected = (
            part_of(x.requires_grad_(), gradients),
            x.to_local(grad_placements=gradients),
        )
        same(own, expected)
        grad = torch.ones_like(own) + at.rank
        for each in (grad, grad.t().contiguous().t()):
            same(*(torch.autograd.grad(y, x, each, retain_graph=True)[0] for y in (own, expected)))
    for placement, order in itertools.product(
        (Shard(0), Replicate(), Partial()), (whole, whole.t())
    ):
        x = order.detach().requires_grad_()
        own, expected = placed(x, mesh, placement), DTensor.from_local(x, mesh, [placement])
        same(own, expected)
        assert own._spec is not placed(x, mesh, placement)._spec  # PyTorch changes them in place
        for layout in (Shard(1), Replicate()):
            grad = distribute_tensor(
                torch.arange(own.numel() * 1.0).view(own.shape), mesh, [layout]
            )
            same(*(torch.autograd.grad(y, x, grad, retain_graph=True)[0] for y in (own, expected)))
    with torch.no_grad():
        assert not placed(torch.ones(1, requires_grad=True), mesh, Replicate()).requires_grad
    # Of a shape that only the first call describes; the recomputed operators are the same.
    save = partial(create_selective_checkpoint_contexts, lambda *_: CheckpointPolicy.MUST_SAVE)
    x, square = torch.ones(3, 7, requires_grad=True), lambda x: placed(x, mesh, Shard(0)) ** 2
    checkpoint(square, x, use_reentrant=False, context_fn=save).to_local().sum().backward()
    for other in (mesh, DeviceMesh.from_group(dist.new_group(), at.device.type)):  # equal ones
        assert placed(whole, other, Replicate()).device_mesh is other


def _shared(at: Rank) -> None:
    """Layers of a module share one gather, also if it is recomputed. Layers with a replicated input
    share the sum of its gradient."""
    cut = partial(part, at=at, dim=1)
    kinds = ("", 1, 1), ("called twice", 2, 2), ("first without gradients", 2, 1)
    for variant, gathers, sums in kinds:
        whole, model = Mlp(variant), parallelized(Mlp(variant), mesh_of(at))
        same(copy.deepcopy(model)(cut(X)), cut(whole(X)), "a deep copy")
        model(sharded := DTensor.from_local(cut(X), mesh_of(at), [Shard(1)]))
        torch.save(sharded, io.BytesIO())  # without the layers that share it
        again = partial(checkpoint, model, use_reentrant=False)
        for called in (model, again):
            with counted() as counts:
                called(cut(X).requires_grad_())
            assert counts["all_gather_matmul"] == gathers, variant
            as_unsharded(at, model, whole, X, GRAD, cut, f"{variant}, {called is again}", called)
        model = parallelized(Mlp(variant), mesh_of(at), Replicate())
        as_unsharded(at, model, whole, X, GRAD, torch.clone, f"{variant}, of all ranks")
        y = model(X.clone().requires_grad_())
        with counted() as counts:
            y.backward(GRAD)
        assert counts["matmul_all_reduce"] == sums, variant


def _collective_in_flight(at: Rank) -> None:
    """Layers after an embedding whose collective is in flight when they are called."""
    tokens, grad = torch.arange(16).view(2, 8), integers(2, 8, HIDDEN, seed=4)
    whole = nn.Sequential(nn.Embedding.from_pretrained(integers(16, HIDDEN, seed=3), False), Mlp())
    expected = whole(tokens)
    expected.backward(grad)
    for layout, shares in ((Replicate(), False), (Shard(1), False), (Shard(1), True)):
        about = f"{layout}, {shares=}"
        plan: dict[str, Any] = {
            "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=layout),
            "1.gate": ColwiseParallel(input_layouts=layout),
            "1.up": ColwiseParallel(input_layouts=layout),
            "1.down": RowwiseParallel(output_layouts=Replicate()),
        }
        if shares:
            plan["1"] = PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate())
        model = parallelize_module(copy.deepcopy(whole), mesh_of(at), plan)
        model.zero_grad()
        assert isinstance(model[0](tokens), AsyncCollectiveTensor), about
        y = model(tokens)
        same(y, expected, about)
        y.backward(grad)
        same_gradients(model, whole, about, at.rank, at.world)


def _changed(at: Rank) -> None:
    """A change of a shared input or a weight between the calls of layers causes a second gather. In
    inference mode tensors do not count their changes, and the layers share the gather."""
    changes = "input changed", "memory of the input changed", "weight changed"
    for variant in (*changes, "hook changes the weight", ""):
        with torch.no_grad() if variant else torch.inference_mode():
            x, model = X.clone(), parallelized(Mlp(variant), mesh_of(at))
            own = part(x, at, 1)
            with counted() as counts:
                y = model(own)
            same(y, part(Mlp(variant)(x), at, 1), variant)
            assert counts["all_gather_matmul"] == (2 if variant else 1), variant


def _compiled(at: Rank) -> None:
    """The compiled module is one graph with one gather for both layers, and equals eager."""
    graphs, results = EagerAndRecordGraphs(), []
    model, x = parallelized(Mlp(), mesh_of(at)), part(X, at, 1).requires_grad_()
    for module in (model, torch.compile(model, fullgraph=True, backend=graphs)):
        y = module(x)
        grads = torch.autograd.grad(y, (x, *model.parameters()), y.detach() % 3)
        results.append([y, *map(plain, grads)])
    assert all(map(torch.equal, *results)), f"rank {at.rank}, compiled"
    calls = [str(node.target) for graph in graphs.graphs for node in graph.graph.nodes]
    assert sum("all_gather_matmul" in call for call in calls) == 1, calls


class Named(nn.Linear):
    def doubled(self) -> torch.Tensor:
        return 2 * self.weight


def _subclasses(at: Rank) -> None:
    """Subclasses of nn.Linear with its forward keep their class. Other subclasses are refused."""
    whole, model = Mlp(), Mlp()
    model.up = Named(HIDDEN, WIDE)
    model.up.load_state_dict(whole.up.state_dict())
    column = ColumnParallelLinear.from_linear(model.up, sequence_dim=1)
    same(column(part(X, at, 1)), part(whole.up(X), at, 2), "from_linear of a subclass")
    model = parallelized(model, mesh_of(at))
    with counted() as counts:
        same(model(part(X, at, 1)), part(whole(X), at, 1), "a module with a subclass")
    assert counts["all_gather_matmul"] == 1
    assert isinstance(model.up, Named) and type(model.up).__name__ == "Named"
    same(model.up.doubled().full_tensor(), 2 * whole.up.weight, "a method of the subclass")
    replaced, mesh = nn.Linear(8, 8), mesh_of(at)
    replaced.forward = lambda x: x
    columns = partial(parallelize_module, device_mesh=mesh, parallelize_plan=ColwiseParallel())
    rows = partial(parallelize_module, device_mesh=mesh, parallelize_plan=RowwiseParallel())
    refuses(
        ("torch.distributed.tensor.parallel", lambda: columns(Tripled(8, 8))),
        ("got one with a forward of its own", lambda: columns(replaced)),
        ("only support nn.Linear", lambda: rows(nn.LayerNorm(8))),
        kind="NotImplementedError",
    )
    for call in (lambda: columns(nn.Linear(8, 7)), lambda: rows(nn.Linear(7, 8))):
        refuses(("multiple of", call))


def _recomputed_within(at: Rank) -> None:
    for variant in ("first recomputed", "both recomputed"):
        model, cut = parallelized(Mlp(variant), mesh_of(at)), partial(part, at=at, dim=1)
        as_unsharded(at, model, Mlp(), X, GRAD, cut, variant)


# Other tools, on a mesh of 2 x 2 ranks.


def _other_meshes(at: Rank) -> None:
    mesh = grid()
    for style in (ColwiseParallel(input_layouts=Replicate()), RowwiseParallel()):
        layer = parallelize_module(nn.Linear(8, 8), mesh["tp"], style)
        for other in (mesh, mesh["dp"]):
            failure = caught(partial(layer, distribute_tensor(torch.zeros(4, 8), other)))
            assert isinstance(failure, Failure) and failure.type == "ValueError", failure
            assert re.search(r"the layer's DeviceMesh\(.*tp.*, got one", failure.text), failure
        layer(distribute_tensor(torch.zeros(4, 8), mesh["tp"]))


def _with_fsdp(at: Rank) -> None:
    """Tensor parallelism within pairs, FSDP across pairs: all parameters are DTensors of both."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    script = example("train_block_stack")
    config, cpu, mesh = _tiny(script, batch=1), torch.device("cpu"), grid()
    model, whole = script.make_model(config, cpu), script.make_model(config, cpu)
    script.parallelize(model, mesh["tp"], script.STYLES["ficco"])
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh["dp"])
    tokens = torch.cat(script.batches(config, cpu)[:2])[:, :-1]
    own = tokens[mesh["dp"].get_local_rank()][None]
    for module, batch in ((whole, tokens), (model, own)):
        module(batch).square().mean().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)
    layer, weight = model.layers[0].feed_forward.w1, integers(24, 16, seed=1).double()
    model.reshard()
    layer.load_state_dict({"weight": weight})
    same(layer.weight.full_tensor(), weight, "loaded under FSDP")


def _with_ddp(at: Rank) -> None:
    mesh = grid()
    across, within = (mesh[name].get_local_rank() for name in ("dp", "tp"))
    whole = pair()
    model = over_ranks(whole, group=mesh["tp"].get_group())
    x, grad = (integers(SEQUENCE, 2, HIDDEN, seed=seed) for seed in (3, 4))
    whole(x).backward(grad)
    own, upstream = (full[:, across].chunk(2, 0)[within] for full in (x, grad))
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    wrapped(own).backward(upstream)
    same_gradients(model, whole, "DDP", within, 2, times=0.5)  # DDP takes the mean


@since("2.13", "has pipelines without scale_grads, or a zero-bubble one that hangs in its own code")
@on_ranks(4)
def test_tensor_parallel_inside_a_pipeline(at: Rank) -> None:
    """Tensor parallelism within pairs; each pair has two of four stages and two micro-batches.
    Zero-bubble schedules compute the gradients of inputs and of weights separately."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

    mesh = grid()  # its rows are stages
    across, within = (mesh[name].get_local_rank() for name in ("dp", "tp"))
    whole, pipes = nn.Sequential(*(pair() for _ in range(4))), mesh["dp"].get_group()
    # Parameters are signs, so that float32 holds all sums exactly.
    for index, param in enumerate(whole.parameters()):
        param.data.copy_(integers(*param.shape, seed=index).sign())
    own = {i: over_ranks(whole[i], group=mesh["tp"]) for i in range(across, 4, 2)}
    x, grad = (integers(2, SEQUENCE, HIDDEN, seed=seed, most=1) for seed in (3, 4))
    for sequence, upstream in zip(x, grad, strict=True):  # a sequence is a micro-batch
        whole(sequence).backward(upstream)
    operand, target = (full.chunk(2, 1)[within].flatten(0, 1) for full in (x, grad))
    cpu = torch.device("cpu")
    parts = [PipelineStage(stage, index, 4, cpu, group=pipes) for index, stage in own.items()]
    options: dict[str, Any] = {"loss_fn": lambda y, upstream: (y * upstream).sum()}
    schedule = ScheduleInterleavedZeroBubble(parts, n_microbatches=2, scale_grads=False, **options)
    schedule.step(*(() if across else (operand,)), **({"target": target} if across else {}))
    for index, stage in own.items():
        same_gradients(stage, whole[index], f"stage {index}", within, 2)


# The examples.


def example(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _tiny(script: ModuleType, **changes: Any) -> Any:
    sizes = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 4, "ffn": 24, "sequence": 16}
    return script.Config(**{**sizes, "steps": 5, "dtype": torch.float64, **changes})


def _styles_of_example(at: Rank) -> None:
    """The example's plan with PyTorch's and with ficco's styles: placements, calls, checkpoints."""
    from torch.distributed.checkpoint import state_dict

    script = example("train_block_stack")
    config, cpu = _tiny(script), torch.device("cpu")
    stock, own = (script.make_model(config, cpu) for _ in range(2))
    script.parallelize(stock, mesh_of(at), script.STYLES["torch"])
    script.parallelize(own, mesh_of(at), script.STYLES["ficco"])
    for (name, param), other in zip(stock.named_parameters(), own.parameters(), strict=True):
        assert other.placements == param.placements, name
    with counted() as counts:
        own(script.batches(config, cpu)[0][:, :-1])
    # Attention and MLP gather once and scatter once in each of two blocks; the output gathers.
    assert counts == {"all_gather_matmul": 5, "matmul_reduce_scatter": 4}, counts
    # A checkpoint of the full model loads, and the saved state is the full model.
    other = script.Model(config).to(config.dtype).state_dict()
    dist.broadcast_object_list(shared := [other])
    full = state_dict.StateDictOptions(full_state_dict=True)
    state_dict.set_model_state_dict(own, dict(shared[0]), options=full)
    same_states(state_dict.get_model_state_dict(own, options=full), shared[0], "saved")


class _Names(TorchDispatchMode):
    """Records the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _gradients_are_not_copied(at: Rank) -> None:
    """Activations [b, s, h] that lie as [s, b, h] in memory: gradients stay as they lie. The
    gradients and the weights of layers that share an input are joined once."""
    column, other = (ColumnParallelLinear(HIDDEN, WIDE, bias=False, sequence_dim=1) for _ in "ab")
    row = RowParallelLinear(WIDE, HIDDEN, bias=False, sequence_dim=1)
    x = part(integers(8, 2, HIDDEN, seed=1), at, 0).movedim(0, 1).requires_grad_()
    left, right = gather_once(x, column, other)
    y = row(left * right)
    grad = integers(*y.movedim(0, 1).shape, seed=2).movedim(0, 1)
    with _Names() as names:
        y.backward(grad)
    copies = [name for name in names.seen if name in ("cat", "clone", "_to_copy")]
    assert copies == ["cat", "cat"], names.seen
    assert x.grad is not None and x.grad.stride() == x.stride()


WITH_FSDP2 = partial(pytest.param, marks=HAS_FSDP2)
RECORDS = since("2.8", "does not tell that a checkpoint is being recorded: CheckpointError")
OF_LAYERS = _kinds, _initialisation, _state_dicts, _more_than_weights, _unequal, _encoder
OF_ALL = _replicated_norm, _recomputed, _meta, _skipped, WITH_FSDP2(_parts_or_wholes)
OF_STYLES = _vectors, _parts, _shared, _collective_in_flight, _changed, _compiled, _subclasses
OTHERS = (
    pytest.param(_recomputed_within, marks=RECORDS),
    *(_more_than_linear, _gradients_are_not_copied),
)


@pytest.mark.parametrize("check", [*OF_LAYERS, *OF_ALL, *OF_STYLES, *OTHERS])
def test_on_two_ranks(check: Callable[[Rank], None]) -> None:
    run(2, check)


OF_FOUR = _wrong_use, _one_gather, _norms, _layouts, _other_meshes, _with_ddp, _styles_of_example


@pytest.mark.parametrize("check", [*OF_FOUR, WITH_FSDP2(_with_fsdp)])
def test_on_four_ranks(check: Callable[[Rank], None]) -> None:
    run(4, check)


def _train(at: Rank, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    script = example("train_block_stack")
    return script.run(_tiny(script, dtype=dtype), "ficco", None)


@pytest.mark.parametrize(("world", "device"), WORLDS)
def test_block_stack_trains_as_unsharded(world: int, device: str) -> None:
    dtype, close = (torch.float64, 1e-6) if device == "cpu" else (torch.float32, 1e-4)
    results = run(world, _train, dtype, device=device)
    sharded, unsharded = results[0]
    assert len({*sharded}) == 5, "each step changes the loss"
    # Sums in another order, and a loss in float32, whose roundings of 1e-7 grow in five steps.
    assert sharded == pytest.approx(unsharded, rel=close)
    assert all(result[0] == sharded for result in results), "ranks have different losses"


def _experts(at: Rank, spare: float) -> tuple[list[float], list[float]]:
    script = example("train_experts")
    sizes = {"hidden": 8, "ffn": 12, "tokens": 24, "steps": 5, "dtype": torch.float64}
    return script.run(script.Config(spare=spare, **sizes))


@pytest.mark.parametrize("spare", [0.5, 1.5])  # the layers drop many tokens, or few
def test_experts_train_as_unsharded(spare: float) -> None:
    sharded, unsharded = run(4, _experts, spare)[0]
    assert len({*sharded}) == 5, "each step changes the loss"
    # float64 sums in another order.
    assert sharded == pytest.approx(unsharded, rel=1e-9)


def test_block_stack_reports(tmp_path: Path) -> None:
    example("train_block_stack").report(tmp_path, [2.0, 1.0], [2.0, 1.5])
    lines = (tmp_path / "loss.csv").read_text().split()
    assert lines == ["step,sharded,unsharded", "0,2.0,2.0", "1,1.0,1.5"]
    assert (tmp_path / "loss.png").stat().st_size
