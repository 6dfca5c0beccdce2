"""Parallel layers, parallel styles and the examples, against what they do unsharded.

Layers and styles are tried with small integers in float32, so that every sum is exact in any
order and results are compared with no tolerance.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from programs import Program
from ranks import Failure, Rank, caught, run, since
from torch import nn

import ficco

ROOT = Path(__file__).parents[1]

#: Sizes that tell dimensions apart; features are multiples of 4 ranks.
HIDDEN, WIDE, SEQUENCE = 12, 20, 8


def integers(*shape: int, seed: int, most: int = 2) -> torch.Tensor:
    """Small integers, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def linear(inputs: int, outputs: int, seed: int, bias: bool = True) -> nn.Linear:
    """An unsharded layer of small integers."""
    made = nn.Linear(inputs, outputs, bias)
    with torch.no_grad():
        for i, param in enumerate(made.parameters()):
            param.copy_(integers(*param.shape, seed=100 * seed + i))
    return made


def same(found: torch.Tensor, want: torch.Tensor, about: str) -> None:
    """Fail unless two plain tensors are equal in every element."""
    if found.shape != want.shape or found.dtype != want.dtype:
        raise AssertionError(f"{about}: {found.dtype} {found.shape}, not {want.dtype} {want.shape}")
    if not torch.equal(found, want):
        wrong = int((found != want).sum())
        raise AssertionError(f"{about}: {wrong} of {want.numel()} elements are wrong")


def part(whole: torch.Tensor, at: Rank, dim: int, rows: list[int] | None = None) -> torch.Tensor:
    """A rank's part of a tensor."""
    return whole.split(rows or whole.shape[dim] // at.world, dim)[at.rank].contiguous()


def mesh_of(at: Rank) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(at.device.type, (at.world,))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, of a DTensor or of a plain tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# Layers.


def _pair(at: Rank) -> int:
    """Column and row layer behind one another, forward and backward, in all forms."""
    from ficco.nn import ColumnParallelLinear, RowParallelLinear

    mesh, group = mesh_of(at), dist.new_group(list(range(at.world)))
    uneven = {2: [3, 5], 4: [3, 0, 4, 1]}[at.world]
    checked = 0
    for (place, bias), (shape, dim), rows in itertools.product(
        ((None, True), (group, False), (mesh, True)),
        (((), 0), ((3,), 0), ((3,), 1), ((2, 3), 2), ((1,), -2)),
        (None, uneven),
    ):
        about = f"rank {at.rank}, {place}, bias={bias}, batch {shape}, dim {dim}, rows={rows}"
        up = linear(HIDDEN, WIDE, 1, bias).to(at.device)
        down = linear(WIDE, HIDDEN, 2, bias).to(at.device)
        sizes = [*shape]
        sizes.insert(len(shape) if dim == -2 else dim, SEQUENCE)
        whole = integers(*sizes, HIDDEN, seed=3).to(at.device).requires_grad_()
        grad = integers(*sizes, HIDDEN, seed=4).to(at.device)
        want = down(up(whole))
        want.backward(grad)

        options = {"group": place, "sequence_dim": dim}
        column = ColumnParallelLinear.from_linear(up, **options)
        row = RowParallelLinear.from_linear(down, **options)
        at_dim = dim % whole.dim()
        x = part(whole.detach(), at, at_dim, rows).requires_grad_()
        y = row(column(x, rows), rows)
        same(y, part(want, at, at_dim, rows), f"{about}: y")
        y.backward(part(grad, at, at_dim, rows))
        same(x.grad, part(whole.grad, at, at_dim, rows), f"{about}: gradient of x")
        for layer, unsharded, cuts in ((column, up, (0, 0)), (row, down, (1, None))):
            for (name, param), (_, full), cut in zip(
                layer.named_parameters(), unsharded.named_parameters(), cuts, strict=False
            ):
                wanted = full.grad if cut is None else part(full.grad, at, cut)
                same(plain(param.grad), wanted, f"{about}: gradient of {layer} {name}")
                assert hasattr(param, "placements") == (place is mesh)
        checked += 1
    return checked


def test_column_and_row_are_exact() -> None:
    assert run(4, _pair, timeout=90) == [30] * 4


@pytest.mark.multigpu
def test_column_and_row_are_exact_on_gpus() -> None:
    assert run(2, _pair, device="cuda") == [30] * 2


def _kinds(at: Rank) -> None:
    from ficco.nn import ColumnParallelLinear, RowParallelLinear

    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        up, down = linear(HIDDEN, WIDE, 1).to(dtype), linear(WIDE, HIDDEN, 2).to(dtype)
        whole = integers(SEQUENCE, HIDDEN, seed=3, most=1).to(dtype)
        found = ColumnParallelLinear.from_linear(up)(part(whole, at, 0))
        # At most 12 terms of 2: exact in every dtype.
        same(found, part(up(whole), at, 1), f"{dtype}: column")
        hidden = integers(SEQUENCE, WIDE, seed=5, most=1).to(dtype)
        found = RowParallelLinear.from_linear(down)(part(hidden, at, 1))
        same(found, part(down(hidden), at, 0), f"{dtype}: row")
    frozen = linear(HIDDEN, WIDE, 1).requires_grad_(False).eval()
    made = ColumnParallelLinear.from_linear(frozen, schedule="serial")
    assert not any(param.requires_grad for param in made.parameters()) and not made.training
    assert f"rank {at.rank} of 4" in repr(made) and "schedule='serial'" in repr(made)
    with torch.autocast("cpu", torch.bfloat16):
        whole = integers(SEQUENCE, HIDDEN, seed=3, most=1)
        found = ColumnParallelLinear.from_linear(linear(HIDDEN, WIDE, 1))(part(whole, at, 0))
        same(found, part(linear(HIDDEN, WIDE, 1)(whole), at, 1), "autocast")
    twin = copy.deepcopy(made)
    assert twin.group is made.group
    same(twin(part(whole, at, 0)), made(part(whole, at, 0)), "a deep copy")


def test_dtypes_repr_and_copies() -> None:
    run(4, _kinds)


def _initialisation(at: Rank) -> None:
    from ficco.nn import ColumnParallelLinear, RowParallelLinear

    for kind, cuts in ((ColumnParallelLinear, (0, 0)), (RowParallelLinear, (1, None))):
        for group in (None, mesh_of(at)):
            torch.manual_seed(7)
            want = nn.Linear(HIDDEN, WIDE)
            after = torch.rand(1)
            torch.manual_seed(7)
            made = kind(HIDDEN, WIDE, group=group)
            assert torch.rand(1) == after
            late = kind(HIDDEN, WIDE, device="meta", group=group).to_empty(device="cpu")
            torch.manual_seed(7)
            late.reset_parameters()
            for layer in (made, late):
                for name, cut in zip(("weight", "bias"), cuts, strict=True):
                    full = getattr(want, name)
                    wanted = full if cut is None else part(full, at, cut)
                    same(plain(getattr(layer, name)), wanted, f"{kind.__name__} {name}")
            for param in made.parameters():
                local = plain(param.detach())
                assert local.untyped_storage().nbytes() == local.nbytes, "keeps the whole alive"


def test_initialisation_is_that_of_the_unsharded_layer() -> None:
    run(4, _initialisation)


def _sources_stay(at: Rank) -> None:
    from ficco.nn import ColumnParallelLinear, RowParallelLinear

    for kind, group in itertools.product(
        (ColumnParallelLinear, RowParallelLinear), (None, mesh_of(at))
    ):
        source = linear(HIDDEN, WIDE, 1)
        made = kind.from_linear(source, group=group)
        with torch.no_grad():
            for param in made.parameters():
                param.fill_(7.0)
        same(source.bias, linear(HIDDEN, WIDE, 1).bias, "the bias of the source")
        same(source.weight, linear(HIDDEN, WIDE, 1).weight, "the weight of the source")


@pytest.mark.parametrize("world", [1, 2])
def test_conversion_leaves_the_source_alone(world: int) -> None:
    run(world, _sources_stay)


def _state_dicts(at: Rank) -> None:
    from ficco.nn import ColumnParallelLinear, RowParallelLinear, full_state_dict

    whole = nn.Sequential(linear(HIDDEN, WIDE, 1), nn.LayerNorm(WIDE), linear(WIDE, HIDDEN, 2))
    state = whole.state_dict()
    for group, assign in itertools.product((None, mesh_of(at)), (False, True)):
        model = nn.Sequential(
            ColumnParallelLinear(HIDDEN, WIDE, group=group),
            nn.LayerNorm(WIDE),
            RowParallelLinear(WIDE, HIDDEN, group=group),
        )
        given = dict(state)
        model.load_state_dict(given, assign=assign)
        assert all(given[name] is state[name] for name in state), "the caller's dict was changed"
        same(plain(model[0].weight), part(whole[0].weight, at, 0), "column weight")
        same(plain(model[0].bias), part(whole[0].bias, at, 0), "column bias")
        same(plain(model[2].weight), part(whole[2].weight, at, 1), "row weight")
        same(plain(model[2].bias), whole[2].bias, "row bias")
        found = full_state_dict(model)
        assert list(found) == list(state)
        for name in state:
            same(found[name], state[name], f"{name} of the full state_dict")
        # Its own state_dict, which has parts, comes back as well.
        own = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(own)
        for name, value in full_state_dict(model).items():
            same(value, state[name], f"{name} after a round trip of parts")
    same(full_state_dict(model[2])["weight"], state["2.weight"], "a layer by itself")
    wrong = {**state, "0.weight": torch.zeros(WIDE + 4, HIDDEN)}
    error = caught(lambda: model.load_state_dict(wrong))
    assert "0.weight" in error.text, error


def test_state_dict_of_the_unsharded_model() -> None:
    run(4, _state_dicts)


def _assigned(at: Rank) -> None:
    """Parts that are taken from a state_dict as they are do not keep all of it alive."""
    from ficco.nn import ColumnParallelLinear, RowParallelLinear

    state = linear(HIDDEN, WIDE, 1).state_dict()
    for kind, group in itertools.product(
        (ColumnParallelLinear, RowParallelLinear), (None, mesh_of(at))
    ):
        layer = kind(HIDDEN, WIDE, group=group, device="meta")
        layer.load_state_dict(state, assign=True)
        same(plain(layer.weight), part(state["weight"], at, kind.cut), "weight")
        for param in layer.parameters():
            local = plain(param)
            assert local.untyped_storage().nbytes() == local.nbytes


def test_assigned_parts_do_not_keep_the_whole() -> None:
    run(2, _assigned)


def _encoder(at: Rank) -> None:
    """Parallel layers in one of PyTorch's, which would read their weights by itself in eval."""
    from ficco.nn import ColumnParallelLinear, RowParallelLinear

    torch.manual_seed(0)
    whole = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval()
    model = copy.deepcopy(whole)
    model.linear1 = ColumnParallelLinear.from_linear(whole.linear1)
    model.linear2 = RowParallelLinear.from_linear(whole.linear2)
    x = integers(SEQUENCE, 4, 8, seed=3).double()
    with torch.no_grad():
        # float64 sums in another order.
        torch.testing.assert_close(model(part(x, at, 0)), part(whole(x), at, 0))


def test_an_encoder_layer_calls_its_layers_in_eval() -> None:
    run(2, _encoder)


def _more_than_weights(at: Rank) -> list[Failure]:
    """The unsharded state_dict where layers are wrapped, and where they hold more or less."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.nn.utils import parametrizations, prune

    from ficco.nn import ColumnParallelLinear, RowParallelLinear, full_state_dict

    whole = nn.Sequential(linear(HIDDEN, WIDE, 1), linear(WIDE, HIDDEN, 2))
    for group in (None, mesh_of(at)):
        model = nn.Sequential(
            checkpoint_wrapper(ColumnParallelLinear.from_linear(whole[0], group=group)),
            checkpoint_wrapper(RowParallelLinear.from_linear(whole[1], group=group)),
        )
        found = full_state_dict(model)
        assert list(found) == list(whole.state_dict())
        for name, value in whole.state_dict().items():
            same(found[name], value, f"{name} of wrapped layers")

    layer = ColumnParallelLinear.from_linear(whole[0])
    added = {"lora_A": integers(2, HIDDEN, seed=1), "scale": integers(seed=2)}
    added["gain"] = integers(WIDE, seed=3)  # as long as the unsharded bias
    for name, value in added.items():
        layer.register_parameter(name, nn.Parameter(value.clone()))
    layer.load_state_dict(layer.state_dict())
    found = full_state_dict(layer)
    for name, value in {**whole[0].state_dict(), **added}.items():
        same(found.pop(name), value, f"{name} beside what was added")
    assert not found

    pruned = prune.random_unstructured(ColumnParallelLinear.from_linear(whole[0]), "bias", 0.5)
    normed = parametrizations.weight_norm(ColumnParallelLinear.from_linear(whole[0]))
    calls = (*(lambda x=x: full_state_dict(x) for x in (pruned, normed)), normed.reset_parameters)
    return [caught(call) for call in calls]


def test_full_state_dict_knows_what_is_a_layers() -> None:
    for failures in run(2, _more_than_weights):
        for failure, name in zip(failures, ("bias", "weight", "weight"), strict=True):
            assert failure.type == "NotImplementedError", failure
            assert f"a layer whose {name} is computed" in failure.text


def _more_than_linear(at: Rank) -> list[Failure]:
    from torch.distributed.tensor import distribute_tensor
    from torch.nn.utils import parametrizations, prune

    from ficco.nn import ColumnParallelLinear

    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    hooked, replaced, added, sharded = (nn.Linear(8, 8) for _ in range(4))
    hooked.register_forward_hook(lambda *_: None)
    replaced.forward = lambda x: x
    added.scale = nn.Parameter(torch.ones(()))
    sharded.weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh_of(at)))
    sources = (
        Own(8, 8),
        parametrizations.weight_norm(nn.Linear(8, 8)),
        hooked,
        prune.random_unstructured(nn.Linear(8, 8), "weight", 0.5),
        replaced,
        added,
        sharded,
    )
    return [caught(lambda x=source: ColumnParallelLinear.from_linear(x)) for source in sources]


def test_from_linear_refuses_what_it_would_lose() -> None:
    words = (
        "got a Own",
        "got a ParametrizedLinear whose weight is computed",
        "got one with hooks",
        "got a Linear whose weight is computed",
        "got one with a forward of its own",
        "got one with weight, bias, scale",
        "got one that is sharded, (Replicate(),)",
    )
    for failures in run(2, _more_than_linear):
        for failure, text in zip(failures, words, strict=True):
            assert failure.type == "ValueError" and text in failure.text, failure


def _wrong_use(at: Rank) -> list[Failure]:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    from ficco.nn import ColumnParallelLinear, ColwiseParallel, RowParallelLinear, gather_once

    column, row = ColumnParallelLinear(8, 16), RowParallelLinear(8, 16)
    batched = ColumnParallelLinear(8, 16, sequence_dim=1)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    turned = DeviceMesh("cpu", [1, 0, 2, 3])
    wrong: list[Callable[[], Any]] = [
        lambda: ColumnParallelLinear(8, 6),
        lambda: RowParallelLinear(6, 8),
        lambda: ColumnParallelLinear(8, 8, group=square),
        lambda: ColumnParallelLinear.from_linear(column),
        lambda: column(torch.zeros(4, 2)),
        lambda: row(torch.zeros(4, 8)),
        lambda: column(torch.zeros(8)),
        lambda: batched(torch.zeros(4, 8)),
        lambda: row(torch.zeros(6, 4, 2)),
        lambda: row(torch.zeros(6, 4, 2), rows=[1, 2, 2, 2]),
        lambda: row(torch.zeros(6, 4, 2), rows=[2, 2, 2]),
        lambda: column(torch.zeros(3, 8), rows=[1, 2, 1, 2]),
        lambda: column(distribute_tensor(torch.zeros(4, 8), mesh_of(at))),
        lambda: gather_once(torch.zeros(4, 3, 8), column, batched),
        lambda: gather_once(torch.zeros(4, 8), nn.Linear(8, 4)),
        lambda: gather_once(torch.zeros(4, 8), [column, column]),
        lambda: column(None),
        lambda: column(torch.zeros(4, 8), rows=4),
        lambda: ColumnParallelLinear(8, 4, schedule="slowing"),
        lambda: ColumnParallelLinear(8, 4, schedule=None),
        lambda: ColwiseParallel(schedule="slowing"),
        lambda: ColumnParallelLinear(8, 4, sequence_dim="s"),
        lambda: ColumnParallelLinear.from_linear(nn.Linear(8, 8), group=turned),
    ]
    return [caught(call) for call in wrong]


def test_wrong_use_says_what_is_required() -> None:
    words = (
        "out_features: required a multiple of the group's 4 ranks, got 6",
        "in_features: required a multiple of the group's 4 ranks, got 6",
        "mesh['tp']",
        "required an unsharded torch.nn.Linear",
        "required shape [..., 8]",
        "required shape [..., 2], this rank's columns",
        "required shape [..., 8]",
        "set sequence_dim=0 for [sequence, batch, features]",
        "pass rows=",
        "required 6 in all",
        "required 4 sequence lengths",
        "required rows[",
        "required a plain tensor, got a DTensor",
        "required one group, sequence_dim, in_features and recipe",
        "required ColumnParallelLinear layers, each as an argument, got Linear",
        "required ColumnParallelLinear layers, each as an argument, got list",
        "x: required a torch.Tensor, got NoneType",
        "required 4 sequence lengths, one per rank, none negative, got 4",
        "got 'slowing'",
        "schedule: required 'auto', a name or a Schedule, got None",
        "got 'slowing'",
        "sequence_dim: required a dimension, got 's'",
        "ranks in rising order, as their group has them, got [1, 0, 2, 3]",
    )
    for failures in run(4, _wrong_use):
        for failure, text in zip(failures, words, strict=True):
            assert isinstance(failure, Failure), f"no error: {text}"
            assert failure.type == "ValueError" and text in failure.text, failure.traceback


def _cannot_be_kept(at: Rank) -> list[Failure]:
    import io

    from ficco.nn import ColumnParallelLinear

    layer = ColumnParallelLinear(8, 4 * at.world)
    return [
        caught(lambda: torch.save(layer, io.BytesIO())),
        caught(lambda: layer.load_state_dict(nn.Linear(8, 3).state_dict())),
    ]


def test_what_is_kept_is_the_state_dict() -> None:
    for pickled, loaded in run(2, _cannot_be_kept):
        assert pickled.type == "NotImplementedError" and "full_state_dict" in pickled.text
        assert "weight: required shape [8, 8], the unsharded layer's, or [4, 8]" in loaded.text
        assert "bias: required shape [8]" in loaded.text and "got [3]" in loaded.text


@contextmanager
def counted(*names: str) -> Iterator[dict[str, int]]:
    """How often the layers call operators, beside what backwards call."""
    from ficco.nn import functional
    from ficco.ops import library, operators

    counts = dict.fromkeys(names, 0)
    with ExitStack() as stack:
        for module, name in ((functional, "run"), (operators, "run"), (library, "call")):
            real = getattr(module, name)

            def call(operator: str, *args: Any, real: Any = real, **kwargs: Any) -> Any:
                if operator in counts:
                    counts[operator] += 1
                return real(operator, *args, **kwargs)

            stack.enter_context(mock.patch.object(module, name, call))
        yield counts


def _one_gather(at: Rank) -> None:
    from torch.utils.checkpoint import checkpoint

    from ficco.nn import ColumnParallelLinear, gather_once

    wholes = [linear(HIDDEN, 4 * n, n, bias=n != 2) for n in (1, 2, 3)]
    wholes[1].requires_grad_(False)
    layers = [ColumnParallelLinear.from_linear(whole, sequence_dim=1) for whole in wholes]
    rows = [3, 0, 4, 1]
    x = integers(3, SEQUENCE, HIDDEN, seed=3).requires_grad_()
    grads = [integers(3, SEQUENCE, 4 * n, seed=n) for n in (1, 2, 3)]
    torch.autograd.backward([whole(x) for whole in wholes], grads)
    shards = [part(grad, at, 2) for grad in grads]
    for how, saves in (("plain", False), ("plain", True), ("recomputed", False)):
        about = f"rank {at.rank}, {how}, save_gathered={saves}"
        mine = part(x.detach(), at, 1, rows).requires_grad_()
        for layer in layers:
            layer.zero_grad()
        with counted("all_gather_matmul") as counts, ficco.options(save_gathered=saves):
            if how == "plain":
                outs = gather_once(mine, *layers, rows=rows)
            else:
                outs = checkpoint(gather_once, mine, *layers, rows=rows, use_reentrant=False)
        assert counts == {"all_gather_matmul": 1}
        for out, whole in zip(outs, wholes, strict=True):
            same(out, part(whole(x), at, 2), f"{about}: one of the outputs")
        torch.autograd.backward(outs, shards)
        same(mine.grad, part(x.grad, at, 1, rows), f"{about}: gradient of the shared input")
        for layer, whole in zip(layers, wholes, strict=True):
            for param, full in zip(layer.parameters(), whole.parameters(), strict=True):
                if not full.requires_grad:
                    assert param.grad is None
                else:
                    same(param.grad, part(full.grad, at, 0), f"{about}: gradient of a parameter")
    assert gather_once(mine) == ()
    # What nothing needs may be changed in place.
    for layer in layers:
        layer.zero_grad()
    outs = gather_once(mine.detach(), *layers, rows=np.array(rows))
    outs[1].mul_(2)
    with torch.no_grad():
        layers[0].weight.add_(1)
    torch.autograd.backward(outs, shards)
    same(layers[0].weight.grad, part(wholes[0].weight.grad, at, 0), "gradient of what changed")
    # Between forward and backward nothing is kept but the input and the layers' own weights.
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gather_once(mine, *layers, rows=rows)
    own = {layer.weight.data_ptr() for layer in layers}
    others = [tensor for tensor in kept if tensor.data_ptr() not in own]
    assert [tensor.shape[-1] for tensor in others] == [HIDDEN], [t.shape for t in kept]


def test_one_gather_for_several_layers() -> None:
    run(4, _one_gather)


def _wrapped(at: Rank) -> None:
    """An input that holds no data of its own, since a collective still brings it."""
    import torch.distributed._functional_collectives as collectives

    from ficco.nn import ColumnParallelLinear, gather_once

    layers = [ColumnParallelLinear.from_linear(linear(HIDDEN, WIDE, seed)) for seed in (1, 2)]

    def run_on(x: torch.Tensor) -> list[torch.Tensor]:
        outs = gather_once(x, *layers)
        return [*outs, *torch.autograd.grad(sum(out.sum() for out in outs), layers[0].weight)]

    # All ranks have the same rows, which an all-gather brings from their parts.
    x = integers(SEQUENCE, HIDDEN, seed=3)
    want = run_on(x)
    under_way = collectives.all_gather_tensor(part(x, at, 0), 0, dist.group.WORLD)
    assert isinstance(under_way, collectives.AsyncCollectiveTensor)
    for found, wanted in zip(run_on(under_way), want, strict=True):
        same(found, wanted, "of a tensor that is under way")


def test_inputs_that_wrap_their_data_share_a_gather() -> None:
    run(2, _wrapped)


def _replicated_norm(at: Rank) -> None:
    from torch.distributed.tensor import DTensor

    from ficco.nn import sum_gradient

    weight = integers(HIDDEN, seed=1).requires_grad_()
    x, grad = integers(SEQUENCE, HIDDEN, seed=2), integers(SEQUENCE, HIDDEN, seed=3)
    (want,) = torch.autograd.grad(x * weight, weight, grad)
    for group in (None, dist.group.WORLD, mesh_of(at)):
        y = part(x, at, 0) * sum_gradient(weight, group)
        (found,) = torch.autograd.grad(y, weight, part(grad, at, 0))
        same(found, want, "gradient of a weight that all ranks hold")
    distributed = DTensor.from_local(weight, mesh_of(at))
    refused = caught(lambda: sum_gradient(distributed))
    assert refused.type == "ValueError" and "pass tensor.to_local()" in refused.text, refused


def test_sum_gradient() -> None:
    run(4, _replicated_norm)


class Scaled(nn.Module):
    """A product with a vector, whose gradients are exact, as those of a norm are not."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(integers(size, seed=seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def block(group: Any = None) -> tuple[nn.Sequential, nn.Sequential]:
    """An unsharded block with parameters of all kinds, and its layers over a group."""
    from ficco.nn import ColumnParallelLinear, RowParallelLinear

    before, after = Scaled(HIDDEN, 1), nn.Linear(HIDDEN, HIDDEN)
    after.load_state_dict(linear(HIDDEN, HIDDEN, 4).state_dict())
    whole = nn.Sequential(before, linear(HIDDEN, WIDE, 2), linear(WIDE, HIDDEN, 3), after)
    parallel = nn.Sequential(
        copy.deepcopy(before),
        ColumnParallelLinear.from_linear(whole[1], group=group),
        RowParallelLinear.from_linear(whole[2], group=group),
        copy.deepcopy(after),
    )
    return whole, parallel


def _summed(at: Rank) -> int:
    """Gradients of a block of which one call says what is replicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ficco.nn import full_state_dict, replicated

    x, grad = (integers(SEQUENCE, HIDDEN, seed=seed, most=1) for seed in (5, 6))
    pairs = [list(range(first, first + 2)) for first in (0, 2)]
    pair = [dist.new_group(ranks) for ranks in pairs][at.rank // 2]
    grid = init_device_mesh(at.device.type, (2, 2), mesh_dim_names=("dp", "tp"))

    def sharded(model: nn.Module) -> None:
        for module in (*model, model):
            fully_shard(module, mesh=grid["dp"], reshard_after_forward=False)

    # Hooks stay where a module is copied, made again, or under another tool.
    changes: dict[str, tuple[Any, Callable[[nn.Module], Any]]] = {
        "default": (None, lambda model: model),
        "pair": (pair, lambda model: model),
        "mesh": (mesh_of(at), lambda model: model),
        "copied": (None, copy.deepcopy),
        "compiled": (None, lambda model: torch.compile(model, backend="aot_eager", fullgraph=True)),
        "compiled, mesh": (
            mesh_of(at),
            lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
        ),
        "fully_shard": (grid["tp"], sharded),
    }
    for name, (group, change) in changes.items():
        whole, model = block(group)
        for module in model if name == "fully_shard" else [model]:
            assert replicated(module, group) is module
        ranks = pair if name == "pair" else grid["tp"] if name == "fully_shard" else None
        at_group, of = (dist.get_rank(), 4) if ranks is None else (at.rank % 2, 2)
        mine, upstream = (each.chunk(of)[at_group] for each in (x, grad))
        changed = change(model) or model
        want = whole(x)
        want.backward(grad)
        with pytest.raises((ValueError, RuntimeError)):  # the names are the parameters' after it
            changed(mine[:, 1:])
        for _ in range(2):  # accumulates
            y = changed(mine)
            y.backward(upstream)
            same(y, want.chunk(of)[at_group], name)
        assert "weight" not in vars(model[0])
        for (key, param), full in zip(changed.named_parameters(), whole.parameters(), strict=True):
            layer = model[int(key.replace("_orig_mod.", "")[0])]
            found = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
            wanted = 2 * full.grad
            if found.shape != wanted.shape:
                cut = layer.cut if "weight" in key else 0
                wanted = wanted.chunk(of, cut)[at_group]
            same(found, wanted, f"{name}: gradient of {key}")
        if name not in ("fully_shard", "compiled", "compiled, mesh"):
            for key, value in full_state_dict(changed).items():
                same(value, whole.state_dict()[key], f"{name}: {key}")
    return len(changes)


@since("2.8", "has no FSDP2 on CPUs")
def test_replicated_sums_gradients_of_what_is_no_part() -> None:
    assert run(4, _summed, timeout=90) == [7] * 4


def _meta(at: Rank) -> None:
    """A module that is made on the meta device, and gets its parameters by assignment."""
    from ficco.nn import replicated

    x, grad = (integers(SEQUENCE, HIDDEN, seed=seed) for seed in (5, 6))
    whole = Scaled(HIDDEN, 1)
    whole(x).backward(grad)
    for group, assign in itertools.product((None, mesh_of(at)), (False, True)):
        with torch.device("meta"):
            model = replicated(nn.Sequential(Scaled(HIDDEN, 1)), group)
        model.to_empty(device="cpu")
        state = {"0.weight": integers(HIDDEN, seed=1)}
        if group is not None:
            from torch.distributed.tensor import distribute_tensor

            state = {name: distribute_tensor(value, group) for name, value in state.items()}
        model.load_state_dict(state, assign=assign)
        model(part(x, at, 0)).backward(part(grad, at, 0))
        same(plain(model[0].weight.grad), whole.weight.grad, f"{group}, assign={assign}")


def test_replicated_serves_modules_of_the_meta_device() -> None:
    run(2, _meta)


def _norms(at: Rank) -> int:
    """The norm and the clipped gradients, of layers of several groups, meshes and placements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.utils import clip_grad_norm_ as unsharded_clip

    from ficco.nn import clip_grad_norm_, replicated

    pair = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][at.rank // 2]
    columns = init_device_mesh(at.device.type, (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    x, grad = (integers(SEQUENCE, HIDDEN, seed=seed, most=1) for seed in (5, 6))
    checked = 0
    for places, kind in itertools.product(
        ((None,), (mesh_of(at),), (None, mesh_of(at)), (pair,), (columns, pair), (None, pair)),
        (2.0, float("inf")),
    ):
        wholes, models, about = nn.ModuleList(), nn.ModuleList(), f"{places}, {kind}"
        for place in places:
            whole, model = block(place)
            for each in (whole, model):
                each[0].requires_grad_(place is not places[0])  # some have no gradient
            replicated(model, place)
            world = 2 if place in (pair, columns) else 4
            mine, upstream = (each.chunk(world)[at.rank % world] for each in (x, grad))
            whole(x).backward(grad)
            model(mine).backward(upstream)
            wholes.append(whole)
            models.append(model)
        models.append(models[0])  # parameters that are tied count once
        want = unsharded_clip(wholes.parameters(), 0.5, kind)
        # The norm of parts' norms is rounded otherwise than the norm of wholes' norms.
        close = partial(torch.testing.assert_close, rtol=1e-6, atol=0)
        if places in ((None,), (None, pair)):
            close(unsharded_clip(models.parameters(), float("inf"), kind), want)  # clips nothing
        found = clip_grad_norm_(models, 0.5, kind)
        close(found, want, msg=f"{found}, not {want}: {about}")
        every = [torch.empty(()) for _ in range(at.world)]
        dist.all_gather(every, found)
        assert len({one.item() for one in every}) == 1, every
        for model, whole, place in zip(models, wholes, places, strict=False):
            world = 2 if place in (pair, columns) else 4
            close(plain(model[2].bias.grad), whole[2].bias.grad)
            close(plain(model[1].weight.grad), whole[1].weight.grad.chunk(world)[at.rank % world])
        checked += 1
    return checked


def test_the_norm_is_that_of_the_unsharded_gradients() -> None:
    assert run(4, _norms, timeout=90) == [12] * 4


def _clipping_refusals(at: Rank) -> list[Failure]:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.utils import parametrizations

    from ficco.nn import ColumnParallelLinear, RowParallelLinear, clip_grad_norm_, full_state_dict

    added, resharded = ColumnParallelLinear(8, 8), nn.Sequential(ColumnParallelLinear(8, 8))
    added.register_parameter("scale", nn.Parameter(torch.ones(8)))
    fully_shard(resharded, mesh=mesh_of(at))
    normed = parametrizations.weight_norm(RowParallelLinear(8, 8))
    infinite = ColumnParallelLinear(8, 8)
    infinite(torch.ones(2, 8)).sum().backward()
    if at.rank == 1:
        infinite.weight.grad[0, 0] = float("inf")
    return [
        caught(lambda: clip_grad_norm_(nn.Sequential(added), 1.0)),
        caught(lambda: clip_grad_norm_(nn.Sequential(normed), 1.0)),
        caught(lambda: clip_grad_norm_(resharded, 1.0)),
        caught(lambda: full_state_dict(resharded)),
        caught(lambda: clip_grad_norm_(infinite, 1.0, error_if_nonfinite=True)),
    ]


@since("2.8", "has no FSDP2 on CPUs")
def test_gradients_that_may_be_parts_or_wholes_are_refused() -> None:
    words = (
        "0.scale: required a DTensor, or no parameter",
        "0.parametrizations.weight.original0: required a DTensor",
        "0.weight: required a plain part",
        "not served after fully_shard",
        "non-finite",
    )
    for failures in run(2, _clipping_refusals):
        for failure, text in zip(failures, words, strict=True):
            assert text in failure.text, failure
        kinds = [failure.type for failure in failures]
        assert kinds == ["NotImplementedError"] * 4 + ["RuntimeError"]


def _replicated_refusals(at: Rank) -> list[Failure]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_module

    from ficco.nn import replicated

    distributed = distribute_module(nn.Sequential(Scaled(HIDDEN, 1)), mesh_of(at))
    outside = nn.Sequential(replicated(Scaled(HIDDEN, 1)))
    fully_shard(outside, mesh=mesh_of(at))
    around = replicated(nn.Sequential(Scaled(HIDDEN, 1)))
    fully_shard(around[0], mesh=mesh_of(at))
    x = torch.ones(2, HIDDEN)
    calls = partial(replicated, distributed), partial(outside[0], x), partial(around, x)
    return [caught(call) for call in calls]


@since("2.8", "has no FSDP2 on CPUs")
def test_replicated_refuses_parameters_that_are_sharded() -> None:
    words = "got weight of 0", *["call replicated on each module that fully_shard wraps"] * 2
    for failures in run(2, _replicated_refusals):
        for failure, text in zip(failures, words, strict=True):
            assert failure.type == "ValueError" and text in failure.text, failure


def _unequal(at: Rank, name: str, kind: str, dtype: torch.dtype) -> Failure | None:
    """The unsharded state_dict where one element of one parameter differs on one rank."""
    from ficco.nn import UlyssesAttention, full_state_dict, replicated

    group = mesh_of(at) if kind == "mesh" else None
    model = block(group)[1].to(dtype)
    model[0] = replicated(model[0], group)
    model.append(UlyssesAttention(8, 4))
    model.append(replicated(nn.Linear(3, 2, bias=False).to(torch.complex64), group))
    model[-1].requires_grad_(False)
    with torch.no_grad():
        for each in (*model[-2].parameters(), *model[-1].parameters()):
            plain(each).fill_(1)
    if at.rank == 1 and name:
        param: Any = plain(model.get_parameter(name).detach())
        if kind == "swapped":
            param.copy_(param.flip(0))
        else:
            param.view(-1)[-1] += 1
    return caught(lambda: full_state_dict(model)) if name else full_state_dict(model) and None


@pytest.mark.parametrize("kind", ["group", "mesh", "swapped"])
def test_full_state_dict_refuses_parameters_that_differ(kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert run(2, _unequal, "", kind, dtype) == [None] * 2
        for name in ("0.weight", "2.bias", "4.o_proj.weight", "5.weight"):
            if kind == "swapped" and name[0] in "45":  # all of their elements are equal
                continue
            for failure in run(2, _unequal, name, kind, dtype):
                assert failure.type == "RuntimeError", failure
                assert f"got different {name};" in failure.text, failure


def _skipped(at: Rank, kind: str) -> list[tuple[bool, float]]:
    """Whether steps of a scaler are skipped, and its scale, if rank 1 has an infinite gradient."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    from ficco.nn import replicated

    group, outcomes = mesh_of(at) if kind == "mesh" else None, []
    for wrong in (None, "0", "1", "3"):
        _, model = block(group)
        model = replicated(model, group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = ShardedGradScaler(at.device.type, init_scale=4.0, process_group=dist.group.WORLD)
        before = [plain(param.detach()).clone() for param in model.parameters()]
        scaler.scale(model(part(integers(SEQUENCE, HIDDEN, seed=5), at, 0)).sum()).backward()
        if at.rank == 1 and wrong is not None:
            plain(model.get_parameter(f"{wrong}.weight").grad).view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        pairs = zip(before, model.parameters(), strict=True)
        stayed = all(torch.equal(old, plain(new.detach())) for old, new in pairs)
        outcomes.append((stayed, scaler.get_scale()))
    return outcomes


@pytest.mark.parametrize("kind", ["group", "mesh"])
def test_steps_of_a_sharded_scaler_are_skipped_on_all_ranks(kind: str) -> None:
    """What docs/modules.md advises."""
    for outcomes in run(2, _skipped, kind):
        assert outcomes == [(False, 4.0), *[(True, 2.0)] * 3]


# Styles.


def _layouts(at: Rank) -> int:
    """Two layers between all layouts, against the unsharded layers."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    from ficco.nn import ColwiseParallel, RowwiseParallel

    mesh = mesh_of(at)
    layouts = (Replicate(), Shard(0), Shard(1), Shard(-1))
    checked = 0
    for bias, before, after, local, sequence in itertools.product(
        (True, False), layouts, layouts, (True, False), (SEQUENCE, 6)
    ):
        if local and sequence == 6 and Shard(1) in (before, after):
            continue  # plain tensors are parts of equal size
        about = f"rank {at.rank}, bias={bias}, {before} to {after}, {local=}, {sequence=}"
        whole = nn.Sequential(linear(HIDDEN, WIDE, 1, bias), linear(WIDE, HIDDEN, 2, bias))
        model = parallelize_module(
            copy.deepcopy(whole),
            mesh,
            {
                "0": ColwiseParallel(input_layouts=before, use_local_output=local),
                "1": RowwiseParallel(output_layouts=after, use_local_output=local),
            },
        )
        x = integers(4, sequence, HIDDEN, seed=3).requires_grad_()
        grad = integers(4, sequence, HIDDEN, seed=4)
        want = whole(x)
        want.backward(grad)
        given = distribute_tensor(x.detach(), mesh, [before])
        given = (given.to_local() if local else given).requires_grad_()
        y = model(given)
        assert isinstance(y, DTensor) != local
        upstream = distribute_tensor(grad, mesh, [after])
        y.backward(upstream.to_local() if local else upstream)
        found = DTensor.from_local(y.detach(), mesh, [after]) if local else y
        assert found.placements == (after if after != Shard(-1) else Shard(2),)
        same(found.full_tensor(), want, f"{about}: y")
        back = DTensor.from_local(given.grad, mesh, [before]) if local else given.grad
        same(back.full_tensor(), x.grad, f"{about}: gradient of x")
        for (name, param), full in zip(model.named_parameters(), whole.parameters(), strict=True):
            same(param.full_tensor(), full, f"{about}: {name}")
            same(param.grad.full_tensor(), full.grad, f"{about}: gradient of {name}")
        checked += 1
    return checked


def test_styles_serve_all_layouts() -> None:
    assert len(set(run(4, _layouts, timeout=90))) == 1


def _one_dimension(at: Rank) -> list[Failure]:
    """A vector, as nn.Linear takes it; and a layout of dimensions that it has not."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from ficco.nn import ColwiseParallel, RowwiseParallel

    failures = []
    for after in (None, Shard(-1), Shard(1)):
        whole = nn.Sequential(linear(HIDDEN, WIDE, 1), linear(WIDE, HIDDEN, 2))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=after)}
        model = parallelize_module(copy.deepcopy(whole), mesh_of(at), plan)
        x, y = (integers(HIDDEN, seed=3).requires_grad_() for _ in range(2))
        want = whole(x)
        want.sum().backward()
        if after == Shard(1):
            failures.append(caught(partial(model, y)))
            continue
        found = model(y)
        same(found, want if after is None else part(want, at, 0), f"y, {after}")
        found.sum().backward()
        same(y.grad, x.grad, f"gradient of x, {after}")
    return failures


def test_styles_take_vectors() -> None:
    for (failure,) in run(2, _one_dimension):
        assert failure.type == "ValueError" and "Shard(dim=1)" in failure.text, failure


def _partial_sums(at: Rank) -> None:
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor.parallel import parallelize_module

    from ficco.nn import ColwiseParallel, RowwiseParallel

    for local in (True, False):
        whole = nn.Sequential(linear(HIDDEN, WIDE, 1), linear(WIDE, HIDDEN, 2))
        row = RowwiseParallel(output_layouts=Partial(), use_local_output=local)
        plan = {"0": ColwiseParallel(), "1": row}
        model = parallelize_module(copy.deepcopy(whole), mesh_of(at), plan)
        x, y = (integers(2, 4, HIDDEN, seed=3).requires_grad_() for _ in range(2))
        grad = integers(2, 4, HIDDEN, seed=4)
        want = whole(x)
        want.backward(grad)
        found = model(y)
        total = found.detach() if local else found.full_tensor()
        if local:
            dist.all_reduce(total)
        same(total, want, f"sum of y, {local=}")
        (found if local else total).backward(grad)
        same(y.grad, x.grad, f"gradient of x, {local=}")
        for (name, param), full in zip(model.named_parameters(), whole.parameters(), strict=True):
            same(param.grad.full_tensor(), full.grad, f"gradient of {name}, {local=}")


def test_rowwise_hands_out_partial_sums() -> None:
    run(2, _partial_sums)


def example(name: str) -> ModuleType:
    """A script of examples/, as a module that ranks find, too."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _tiny(script: ModuleType, **changes: Any) -> Any:
    sizes = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 4, "ffn": 24, "sequence": 16}
    return script.Config(**{**sizes, "steps": 5, "dtype": torch.float64, **changes})


def _one_changed_line(at: Rank) -> None:
    """The same plan with PyTorch's styles and with ficco's: parameters, gradients, optimizer."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    script = example("train_block_stack")
    config, cpu = _tiny(script), torch.device("cpu")
    tokens = script.batches(config, cpu)[0]
    whole = script.made(config, cpu)
    models = [whole]
    for styles in script.STYLES.values():
        models.append(script.made(config, cpu))
        script.parallelize(models[-1], mesh_of(at), styles)
    for (name, theirs), ours in zip(
        models[1].named_parameters(), models[2].parameters(), strict=True
    ):
        assert ours.placements == theirs.placements, name
    full = StateDictOptions(full_state_dict=True)
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with counted("all_gather_matmul", "matmul_reduce_scatter") as counts:
            model(tokens[:, :-1]).square().mean().backward()
        # Attention and MLP gather once and scatter once in each of two blocks; the output gathers.
        if model is models[list(script.STYLES).index("ficco") + 1]:
            assert counts == {"all_gather_matmul": 5, "matmul_reduce_scatter": 4}, counts
        total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = total.full_tensor() if hasattr(total, "full_tensor") else total
        if model is whole:
            want = norm
        # float64 sums in another order: 1e-9 leaves a factor of a million.
        torch.testing.assert_close(norm, want, rtol=1e-9, atol=0)
        optimizer.step()
        state = get_model_state_dict(model, options=full)
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)
    # A checkpoint of the full model loads, and what is saved of it is the full model.
    other = script.Model(config).to(config.dtype).state_dict()
    dist.broadcast_object_list(shared := [other])
    set_model_state_dict(models[2], dict(shared[0]), options=full)
    found = get_model_state_dict(models[2], options=full)
    assert list(found) == list(shared[0])
    for name, value in shared[0].items():
        same(found[name], value, name)


@since("2.13", "sums norms of gradients in several layouts wrongly, with its own styles, too")
def test_a_plan_needs_another_import_and_nothing_else() -> None:
    run(4, _one_changed_line)


class Mlp(nn.Module):
    """Two layers that share an input, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = linear(HIDDEN, WIDE, 1), linear(HIDDEN, WIDE, 2)
        self.down = linear(WIDE, HIDDEN, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(x).relu() + self.up(x))


class Twice(Mlp):
    """Calls one of the layers that share an input once more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(x) + self.up(x) + self.up(x))


class Frozen(Mlp):
    """Calls the first of the layers that share an input without gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            up = self.up(x)
        return self.down(self.gate(x) + up)


def sequence_plan() -> dict[str, Any]:
    """The plan of an :class:`Mlp` between parts of the sequence."""
    from torch.distributed.tensor import Replicate, Shard

    from ficco.nn import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    return {
        "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "gate": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }


def parallelized(module: nn.Module, mesh: Any, plan: dict[str, Any]) -> nn.Module:
    """By ``parallelize_module``, which leaves out the module itself in PyTorch 2.6."""
    from torch.distributed.tensor.parallel import parallelize_module

    rest = dict(plan)
    own = rest.pop("")
    return parallelize_module(parallelize_module(module, mesh, rest), mesh, own)


def _shared(at: Rank) -> None:
    from torch.utils.checkpoint import checkpoint

    for kind, gathers in ((Mlp, 1), (Twice, 2), (Frozen, 2)):
        whole = kind()
        x = integers(2, SEQUENCE, HIDDEN, seed=3).requires_grad_()
        grad = integers(2, SEQUENCE, HIDDEN, seed=4)
        want = whole(x)
        want.backward(grad)
        model = parallelized(kind(), mesh_of(at), sequence_plan())
        twin = copy.deepcopy(model)
        same(twin(part(x.detach(), at, 1)), part(want, at, 1), "a deep copy")
        for recomputed in (False, True):
            about = f"rank {at.rank}, {kind.__name__}, {recomputed=}"
            mine = part(x.detach(), at, 1).requires_grad_()
            model.zero_grad()
            with counted("all_gather_matmul") as counts:
                y = checkpoint(model, mine, use_reentrant=False) if recomputed else model(mine)
            assert counts == {"all_gather_matmul": gathers}, about
            same(y, part(want, at, 1), f"{about}: y")
            y.backward(part(grad, at, 1))
            same(mine.grad, part(x.grad, at, 1), f"{about}: gradient of x")
            for (name, param), full in zip(
                model.named_parameters(), whole.parameters(), strict=True
            ):
                if full.grad is None:
                    assert param.grad is None, f"{about}: gradient of {name}"
                else:
                    same(param.grad.full_tensor(), full.grad, f"{about}: gradient of {name}")


def test_layers_of_a_module_share_its_gather() -> None:
    run(4, _shared)


def _shared_by_all(at: Rank) -> None:
    """Every rank has the input; the gradients of its layers are one sum over ranks."""
    from torch.distributed.tensor import Replicate

    from ficco.nn import PrepareModuleInput, RowwiseParallel

    plan = sequence_plan() | {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "down": RowwiseParallel(),
    }
    for kind, sums in ((Mlp, 1), (Twice, 2), (Frozen, 1)):
        whole, model = kind(), parallelized(kind(), mesh_of(at), plan)
        x = integers(2, SEQUENCE, HIDDEN, seed=3)
        grad = integers(2, SEQUENCE, HIDDEN, seed=4)
        mine = x.clone().requires_grad_()
        want, y = whole(x.requires_grad_()), model(mine)
        same(y, want, f"{kind.__name__}: y")
        want.backward(grad)
        with counted("matmul_all_reduce") as counts:
            y.backward(grad)
        assert counts == {"matmul_all_reduce": sums}, kind
        same(mine.grad, x.grad, f"{kind.__name__}: gradient of x")
        for (name, param), full in zip(model.named_parameters(), whole.parameters(), strict=True):
            if full.grad is not None:
                same(param.grad.full_tensor(), full.grad, f"{kind.__name__}: gradient of {name}")


def test_layers_of_an_input_that_all_have_share_the_sum_of_its_gradient() -> None:
    run(4, _shared_by_all)


def _under_way(at: Rank) -> None:
    """Layers behind an embedding whose rows a collective still brings when they are called."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from ficco.nn import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    tokens, grad = torch.arange(16).view(2, 8), integers(2, 8, HIDDEN, seed=4)
    whole = nn.Sequential(nn.Embedding.from_pretrained(integers(16, HIDDEN, seed=3), False), Mlp())
    want = whole(tokens)
    want.backward(grad)
    for layout, shares in ((Replicate(), False), (Shard(1), False), (Shard(1), True)):
        about = f"{layout}, {shares=}"
        embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout)
        plan: dict[str, Any] = {
            "0": embedding,
            "1.gate": ColwiseParallel(input_layouts=layout),
            "1.up": ColwiseParallel(input_layouts=layout),
            "1.down": RowwiseParallel(output_layouts=Replicate()),
        }
        if shares:
            plan["1"] = PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate())
        model = parallelize_module(copy.deepcopy(whole), mesh_of(at), plan)
        assert isinstance(model[0](tokens), AsyncCollectiveTensor), about
        y = model(tokens)
        same(y, want, about)
        y.backward(grad)
        for (name, param), full in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert param.grad is not None, f"{about}: no gradient of {name}"
            same(param.grad.full_tensor(), full.grad, f"{about}: gradient of {name}")


def test_gradients_reach_what_is_under_way() -> None:
    run(2, _under_way)


class Recomputed(Mlp):
    """Checkpoints within: both layers that share an input together, or the first alone."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        if self.alone:
            gate = checkpoint(self.gate, x, use_reentrant=False)
            return self.down(gate.relu() + self.up(x))
        both = checkpoint(lambda x: self.gate(x).relu() + self.up(x), x, use_reentrant=False)
        return self.down(both)


def _recomputed_within(at: Rank) -> None:

    whole = Mlp()
    x = integers(2, SEQUENCE, HIDDEN, seed=3).requires_grad_()
    want = whole(x)
    want.sum().backward()
    for alone in (True, False):
        model = parallelized(Recomputed(alone), mesh_of(at), sequence_plan())
        mine = part(x.detach(), at, 1).requires_grad_()
        y = model(mine)
        same(y, part(want, at, 1), f"y, {alone=}")
        y.sum().backward()
        same(mine.grad, part(x.grad, at, 1), f"gradient of x, {alone=}")
        for (name, param), full in zip(model.named_parameters(), whole.parameters(), strict=True):
            same(param.grad.full_tensor(), full.grad, f"gradient of {name}, {alone=}")


@since("2.8", "does not tell that a checkpoint is being recorded: CheckpointError")
def test_checkpointing_within_a_module_whose_layers_share_an_input() -> None:
    run(2, _recomputed_within)


class Changing(Mlp):
    """Changes the input that layers share in place, between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        self.change(x)
        return self.down(gate + self.up(x))

    def change(self, x: torch.Tensor) -> None:
        x.mul_(2)


class ChangingLocal(Changing):
    """The same, by way of the memory of the DTensor."""

    def change(self, x: torch.Tensor) -> None:
        (x.to_local() if hasattr(x, "to_local") else x).mul_(2)


class ChangingWeight(Changing):
    """Changes the weight of a layer before it is called."""

    def change(self, x: torch.Tensor) -> None:
        self.up.weight.mul_(2)


def _changed(at: Rank) -> None:

    for kind in (Changing, ChangingLocal, ChangingWeight):
        x = integers(2, SEQUENCE, HIDDEN, seed=3)
        with torch.no_grad():
            model = parallelized(kind(), mesh_of(at), sequence_plan())
            mine = part(x, at, 1)
            with counted("all_gather_matmul") as counts:
                y = model(mine)
            same(y, part(kind()(x), at, 1), kind.__name__)
            assert counts == {"all_gather_matmul": 2}
    with torch.inference_mode():  # where tensors do not count their changes
        x = integers(2, SEQUENCE, HIDDEN, seed=3)
        model = parallelized(Mlp(), mesh_of(at), sequence_plan())
        with counted("all_gather_matmul") as counts:
            y = model(part(x, at, 1))
        same(y, part(Mlp()(x), at, 1), "in inference mode")
        assert counts == {"all_gather_matmul": 1}


def test_a_shared_input_that_is_changed_is_gathered_anew() -> None:
    run(2, _changed)


def _set_when_called(at: Rank) -> None:
    """A layer whose weight is set when it is called: by a hook, as in pruning, or computed."""
    from torch.nn.utils.parametrize import register_parametrization

    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    def double(layer: nn.Module, args: Any) -> None:
        with torch.no_grad():
            layer.weight.mul_(2)

    def hooked(module: Mlp) -> None:
        module.up.register_forward_pre_hook(double)

    def parametrized(module: Mlp) -> None:
        register_parametrization(module.up, "weight", Doubled())

    for change in (hooked, parametrized):
        whole = Mlp()
        model = parallelized(Mlp(), mesh_of(at), sequence_plan())
        for module in (whole, model):
            change(module)
        x = integers(2, SEQUENCE, HIDDEN, seed=3)
        for _ in range(2):
            same(model(part(x, at, 1)), part(whole(x), at, 1), f"{change.__name__}: y")


def test_a_layer_whose_weight_is_set_when_it_is_called_gathers_for_itself() -> None:
    run(2, _set_when_called)


def _compiled(at: Rank) -> None:
    """Whole graphs, with one gather for both layers, and the numbers of the eager module."""

    calls: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    model = parallelized(Mlp(), mesh_of(at), sequence_plan())
    x = part(integers(2, SEQUENCE, HIDDEN, seed=3), at, 1).requires_grad_()
    found = []
    for module in (model, torch.compile(model, fullgraph=True, backend=backend)):
        y = module(x)
        grads = torch.autograd.grad(y, (x, *model.parameters()), y.detach() % 3)
        found.append([y, *map(plain, grads)])
    for eager, compiled in zip(*found, strict=True):
        same(compiled, eager, f"rank {at.rank}, compiled")
    assert sum("all_gather_matmul" in call for call in calls) == 1, calls


def test_styles_compile_without_a_break() -> None:
    run(2, _compiled)


def _refusals(at: Rank) -> list[Failure]:
    from torch.distributed.tensor.parallel import parallelize_module

    from ficco.nn import ColwiseParallel, RowwiseParallel

    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    mesh, replaced = mesh_of(at), nn.Linear(8, 8)
    replaced.forward = lambda x: x
    return [
        caught(lambda: parallelize_module(Own(8, 8), mesh, ColwiseParallel())),
        caught(lambda: parallelize_module(replaced, mesh, ColwiseParallel())),
        caught(lambda: parallelize_module(nn.Linear(8, 6), mesh, ColwiseParallel())),
        caught(lambda: parallelize_module(nn.Linear(6, 8), mesh, RowwiseParallel())),
        caught(lambda: parallelize_module(nn.LayerNorm(8), mesh, RowwiseParallel())),
    ]


def test_styles_refuse_what_they_do_not_serve() -> None:
    own, wrong = "NotImplementedError", "ValueError"
    for failures in run(4, _refusals):
        assert [failure.type for failure in failures] == [own, own, wrong, wrong, own]
        assert "torch.distributed.tensor.parallel" in failures[0].text
        assert "got one with a forward of its own" in failures[1].text


def _subclasses(at: Rank) -> None:
    """Layers that clients derive without another forward stay what they are."""

    from ficco.nn import ColumnParallelLinear

    class Named(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)

        def doubled(self) -> torch.Tensor:
            return 2 * self.weight

    x = integers(2, SEQUENCE, HIDDEN, seed=3)
    whole, model = Mlp(), Mlp()
    model.up = Named(HIDDEN, WIDE)
    model.up.load_state_dict(whole.up.state_dict())
    column = ColumnParallelLinear.from_linear(model.up, sequence_dim=1)
    same(column(part(x, at, 1)), part(whole.up(x), at, 2), "from_linear of a subclass")
    model = parallelized(model, mesh_of(at), sequence_plan())
    with counted("all_gather_matmul") as counts:
        same(model(part(x, at, 1)), part(whole(x), at, 1), "a module with a subclass")
    assert counts == {"all_gather_matmul": 1}
    assert isinstance(model.up, Named) and type(model.up).__name__ == "Named"
    same(model.up.doubled().full_tensor(), 2 * whole.up.weight, "a method of the subclass")
    model.up.reset_parameters()
    same(plain(model.up.weight), torch.ones(WIDE // at.world, HIDDEN), "its initialisation")


def test_a_subclass_with_the_same_forward_stays_what_it_is() -> None:
    run(2, _subclasses)


def _other_meshes(at: Rank) -> list[Failure]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    from ficco.nn import ColwiseParallel, RowwiseParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for style in (ColwiseParallel(input_layouts=Replicate()), RowwiseParallel()):
        layer = parallelize_module(nn.Linear(8, 8), mesh["tp"], style)
        for other in (mesh, mesh["dp"]):
            x = distribute_tensor(torch.zeros(4, 8), other)
            found.append(caught(lambda layer=layer, x=x: layer(x)))
        layer(distribute_tensor(torch.zeros(4, 8), mesh["tp"]))
    return found


def test_styles_refuse_inputs_on_other_meshes() -> None:
    for failures in run(4, _other_meshes):
        assert len(failures) == 4
        for failure in failures:
            assert isinstance(failure, Failure) and failure.type == "ValueError", failure
            assert re.search(r"the layer's DeviceMesh\(.*tp.*, got one", failure.text), failure


def _with_fsdp(at: Rank) -> None:
    """Tensor-parallel within pairs, FSDP across: every parameter is a DTensor of both."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    script = example("train_block_stack")
    config, cpu = _tiny(script, batch=1), torch.device("cpu")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, whole = script.made(config, cpu), script.made(config, cpu)
    script.parallelize(model, mesh["tp"], script.STYLES["ficco"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    tokens = torch.cat(script.batches(config, cpu)[:2])[:, :-1]
    whole(tokens).square().mean().backward()
    model(tokens[mesh["dp"].get_local_rank()][None]).square().mean().backward()
    for one in (model, whole):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)
    layer = model.layers[0].feed_forward.w1
    model.reshard()
    layer.load_state_dict({"weight": integers(24, 16, seed=1).double()})
    same(layer.weight.full_tensor(), integers(24, 16, seed=1).double(), "loaded under FSDP")


@since("2.8", "has no FSDP2 on CPUs")
def test_tensor_parallel_inside_fsdp() -> None:
    run(4, _with_fsdp)


def _fsdp_of_each_layer(at: Rank) -> None:
    """Weights that FSDP gathers when each layer is called, also of layers that share an input."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelized(Mlp(), mesh["tp"], sequence_plan())
    for module in (*model.children(), model):
        fully_shard(module, mesh=mesh["dp"])
    x = integers(2, SEQUENCE, HIDDEN, seed=3)
    mine, want = (each.chunk(2, 1)[mesh["tp"].get_local_rank()] for each in (x, Mlp()(x)))
    same(model(mine), want, "y")
    with torch.no_grad():
        same(model(mine), want, "y without gradients")


@since("2.8", "has no FSDP2 on CPUs")
def test_fsdp_of_layers_that_share_an_input() -> None:
    run(4, _fsdp_of_each_layer)


def _in_a_pipeline(at: Rank, name: str, stages_each: int) -> None:
    """Tensor-parallel within pairs, which are stages of a pipeline, two micro-batches at a time."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, schedules

    from ficco.nn import ColumnParallelLinear, RowParallelLinear

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    across, within = (mesh[name].get_local_rank() for name in ("pp", "tp"))
    count, pipes = 2 * stages_each, mesh["pp"].get_group()
    whole = nn.Sequential(
        *[nn.Sequential(linear(HIDDEN, WIDE, i), linear(WIDE, HIDDEN, i + 9)) for i in range(count)]
    )
    # Signs alone, so that no sum of a deeper pipeline leaves what float32 holds exactly.
    for param in whole.parameters():
        param.data.sign_()
    mine = {
        index: nn.Sequential(
            ColumnParallelLinear.from_linear(block[0], group=mesh["tp"]),
            RowParallelLinear.from_linear(block[1], group=mesh["tp"]),
        )
        for index, block in enumerate(whole)
        if index % 2 == across
    }
    x, grad = (integers(2, SEQUENCE, HIDDEN, seed=seed, most=1) for seed in (3, 4))
    for one, upstream in zip(x, grad, strict=True):  # a sequence is a micro-batch
        whole(one).backward(upstream)
    part, target = (each.chunk(2, 1)[within].flatten(0, 1) for each in (x, grad))
    parts = [
        PipelineStage(stage, index, count, torch.device("cpu"), group=pipes)
        for index, stage in mine.items()
    ]
    schedule = getattr(schedules, name)(
        parts if stages_each > 1 else parts[0],
        n_microbatches=2,
        loss_fn=lambda y, upstream: (y * upstream).sum(),
        scale_grads=False,
    )
    schedule.step(*(() if across else (part,)), **({"target": target} if across else {}))
    for index, stage in mine.items():
        wanted = dict(whole[index].named_parameters())
        for key, param in stage.named_parameters():
            same(param.grad.full_tensor(), wanted[key].grad, f"{name}: stage {index}, {key}")


@since("2.13", "has pipelines without scale_grads, or a zero-bubble one that hangs in its own code")
@pytest.mark.parametrize(
    ("name", "stages_each"), [("Schedule1F1B", 1), ("ScheduleInterleavedZeroBubble", 2)]
)
def test_tensor_parallel_inside_a_pipeline(name: str, stages_each: int) -> None:
    """Zero-bubble schedules take the gradients of inputs and of weights apart."""
    run(4, _in_a_pipeline, name, stages_each)


def _with_ddp(at: Rank) -> None:
    """Tensor-parallel within pairs, DistributedDataParallel across, with plain parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    from ficco.nn import ColumnParallelLinear, RowParallelLinear

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    across, within = (mesh[name].get_local_rank() for name in ("dp", "tp"))
    group = mesh["tp"].get_group()
    whole = nn.Sequential(linear(HIDDEN, WIDE, 1), linear(WIDE, HIDDEN, 2))
    model = nn.Sequential(
        ColumnParallelLinear.from_linear(whole[0], group=group),
        RowParallelLinear.from_linear(whole[1], group=group),
    )
    x, grad = (integers(SEQUENCE, 2, HIDDEN, seed=seed) for seed in (3, 4))
    whole(x).backward(grad)
    mine, upstream = (each[:, across].chunk(2, 0)[within] for each in (x, grad))
    replicated = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    replicated(mine).backward(upstream)
    for layer, unsharded in zip(model, whole, strict=True):
        for name, param in layer.named_parameters():
            full = getattr(unsharded, name).grad / 2  # DDP takes the mean
            cut = layer.cut if name == "weight" or layer.cut == 0 else None
            wanted = full if cut is None else full.chunk(2, cut)[within]
            same(param.grad, wanted, f"gradient of {layer} {name}")


def test_tensor_parallel_inside_data_parallel() -> None:
    run(4, _with_ddp)


# The package and the examples.


def test_import_is_lazy(tmp_path: Path) -> None:
    text = (
        "import sys, ficco\n"
        "assert not {'ficco.nn', 'torch.distributed.tensor'} & set(sys.modules)\n"
        "assert ficco.nn.ColumnParallelLinear and 'ficco.nn' in sys.modules"
    )
    ended = Program(tmp_path, "lazy", text, (), {}).end(time.monotonic() + 60)
    assert ended.code == 0, ended.err


def _train(
    at: Rank, styles: str, dtype: torch.dtype = torch.float64
) -> tuple[list[float], list[float]]:
    script = example("train_block_stack")
    return script.run(_tiny(script, dtype=dtype), styles, None)


@pytest.mark.parametrize("styles", ["ficco", "torch"])
def test_block_stack_trains_as_unsharded(styles: str) -> None:
    results = run(4, _train, styles)
    sharded, unsharded = results[0]
    assert len(sharded) == 5 and sharded[-1] < sharded[0]
    # float64 sums in another order; the loss itself is taken in float32.
    assert sharded == pytest.approx(unsharded, rel=1e-6)
    assert all(result[0] == sharded for result in results), "ranks have different losses"


@pytest.mark.multigpu
def test_block_stack_trains_as_unsharded_on_gpus() -> None:
    sharded, unsharded = run(2, _train, "ficco", torch.float32, device="cuda")[0]
    assert sharded[-1] < sharded[0]
    # Roundings of 1e-7 grow a little in each of five steps.
    assert sharded == pytest.approx(unsharded, rel=1e-4)


def _experts(at: Rank, spare: float) -> tuple[list[float], list[float]]:
    script = example("train_experts")
    sizes = {"hidden": 8, "ffn": 12, "tokens": 24, "steps": 5, "dtype": torch.float64}
    return script.run(script.Config(spare=spare, **sizes))


@pytest.mark.parametrize("spare", [0.5, 1.5])
def test_experts_train_as_unsharded(spare: float) -> None:
    """With few tokens passed by and with many."""
    sharded, unsharded = run(4, _experts, spare)[0]
    assert len(sharded) == 5 and sharded[-1] < sharded[0]
    # float64 sums in another order.
    assert sharded == pytest.approx(unsharded, rel=1e-9)


def test_block_stack_reports(tmp_path: Path) -> None:
    script = example("train_block_stack")
    script.report(tmp_path, [2.0, 1.0], [2.0, 1.5])
    assert (tmp_path / "loss.csv").read_text().split() == [
        "step,sharded,unsharded",
        "0,2.0,2.0",
        "1,1.0,1.5",
    ]
    assert (tmp_path / "loss.png").stat().st_size
    assert script.apart([2.0, 1.0], [2.0, 1.5]) == pytest.approx(1 / 3)
