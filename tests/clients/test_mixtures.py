"""Mixtures of layers, wrappers of other tools, groups and trainers, compared with unsharded models.

A case has one of each. The model trains for three steps, on ranks and unsharded. The test compares
outputs, gradients and parameters. Cases in the table ``REFUSED`` must raise the error of the table
instead. A pair of ranks shares the sequence: two pairs on CPUs, one pair on GPUs.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Failure, Rank, caught, run
from test_changed_layers import CHANGES, Adapter
from test_nn import WORLDS, Scaled
from torch import nn

pytestmark = pytest.mark.clients

HIDDEN, WIDE, SEQUENCE, STEPS = 32, 64, 8, 3

LAYERS = ("layers", "gather_once", "ulysses", "styles")
GROUPS = ("default", "pair", "mesh")
WRAPPERS = (
    *("none", "forward hook", "pre-hook", "parametrization", "fully_shard", "adapter", "peft"),
    *("int8", "float8", "torchao float8", "checkpoint", "reentrant checkpoint", "compile"),
)

TRAINERS = ("SGD", "AdamW", "scaler", "accumulation")

Case = tuple[str, str, str, str]


def cases() -> list[Case]:
    """All layers with all wrappers on all groups. The trainers take turns."""
    mixtures = []
    for turn, case in enumerate(itertools.product(LAYERS, WRAPPERS, GROUPS)):
        # AdamW divides a gradient by its size, which magnifies float8's errors of small gradients.
        trainer = TRAINERS[turn % (1 if "float8" in case[1] else len(TRAINERS))]
        if case[0] != "styles" or case[2] == "mesh":  # parallelize_module takes a mesh
            mixtures.append((*case, trainer))
    return mixtures


OWN, STYLES, PLAIN = ("layers", "gather_once"), ("styles",), ("default", "pair")
MISSING, SHARDED = "NotImplementedError", "dimension 1 being sharded"
MIXED = f"got mixed torch.Tensor and DTensor|{SHARDED}"
INDEXED = f"attempting to run aten.index_select.default|{SHARDED}"
A_MESH = "; give the layer a DeviceMesh"
#: Refused mixtures: layers, wrapper, groups, and regular expressions of the error's type and of its
#: text.
REFUSED = (
    # fully_shard treats the plain shards of all ranks as copies of one parameter.
    (OWN, "fully_shard", PLAIN, MISSING, "as fully_shard makes of it" + A_MESH),
    # clip_grad_norm_ cannot know whether a plain tensor of a parametrization is a shard.
    (OWN, "parametrization", PLAIN, MISSING, "which may be a part or a whole" + A_MESH),
    # An adapter around a layer is not a ColumnParallelLinear; call the layers one by one.
    (OWN[1:], "adapter", GROUPS, "ValueError", "required ColumnParallelLinear layers"),
    # peft adapts nn.Linear and its subclasses; it supports only the styles of Transformers.
    (OWN, "peft", GROUPS, "ValueError", "Target module ColumnParallelLinear"),
    (STYLES, "peft", GROUPS, "RuntimeError", MIXED),
    # PyTorch: PrepareModuleInput passes a DTensor to the plain matrices of the adapter.
    (STYLES, "adapter", GROUPS, "RuntimeError", MIXED),
    # torchao replaces the layer by its Float8Linear, which cannot gather a DTensor; use recipe=.
    (STYLES, "torchao float8", GROUPS, f"{MISSING}|RuntimeError", INDEXED),
)

#: Relative error of each tensor. Ranks sum in another order, over three steps. float8 has 3 bits of
#: mantissa and a scale per shard. Missing communication causes errors above 0.5.
CLOSE, CLOSE_FLOAT32, CLOSE_FLOAT8 = 1e-11, 1e-5, 0.25


class Mlp(nn.Module):
    def __init__(self, once: bool) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(HIDDEN, WIDE), nn.Linear(HIDDEN, WIDE)
        self.down = nn.Linear(WIDE, HIDDEN)
        self.once = once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.once and not isinstance(self.down, nn.Linear):
            from ficco.nn import gather_once

            up, gate = gather_once(x, self.up, self.gate)
        else:
            up, gate = self.up(x), self.gate(x)
        out: torch.Tensor = self.down(torch.tanh(up) * gate)
        return out


class Attention(nn.Module):
    """Unsharded equivalent of ``UlyssesAttention``."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in layers)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        y: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return y


def unsharded(layer: str, at: Rank, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    inner = Attention() if layer == "ulysses" else Mlp(layer == "gather_once")
    return nn.Sequential(Scaled(HIDDEN, 1), inner).to(at.device, dtype)


def parallel(reference: nn.Sequential, layer: str, group: Any, recipe: str | None) -> nn.Sequential:
    """Copy of the unsharded model with ficco's layers."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from ficco import nn as ficco_nn

    model = copy.deepcopy(reference)
    inner: Any = model[1]
    if layer == "ulysses":
        attention = ficco_nn.UlyssesAttention(HIDDEN, 4, group=group).to(inner.q_proj.weight)
        attention.load_state_dict(inner.state_dict())
        model[1] = attention
    elif layer == "styles":
        colwise, layouts = partial(ficco_nn.ColwiseParallel, recipe=recipe), (Shard(1), Replicate())
        rowwise = ficco_nn.RowwiseParallel(output_layouts=Shard(1), recipe=recipe)
        prepare = ficco_nn.PrepareModuleInput(
            input_layouts=layouts[0], desired_input_layouts=layouts[1]
        )
        plan = {"": prepare, "up": colwise(), "gate": colwise(), "down": rowwise}
        parallelize_module(inner, group, plan)
    else:
        options: dict[str, Any] = {"group": group, "sequence_dim": 1, "recipe": recipe}
        for name in ("up", "gate", "down"):
            kind = ficco_nn.RowParallelLinear if name == "down" else ficco_nn.ColumnParallelLinear
            setattr(inner, name, kind.from_linear(getattr(inner, name), **options))
    return model


def wrapped(
    wrapper: str, layer: str, model: nn.Sequential, group: Any, data: Any, reference: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Apply a wrapper to a model on ranks, or to the unsharded ``reference``. Return the call that
    trains."""
    from ficco.nn import ColumnParallelLinear, replicated

    inner: Any = model[1]
    name = "q_proj" if layer == "ulysses" else "up"
    target: Any = getattr(inner, name)
    if wrapper in CHANGES:
        CHANGES[wrapper](target)
    elif wrapper == "adapter":
        adapter = Adapter(target).to(model[0].weight)
        if not reference and layer in OWN:
            adapter.up = ColumnParallelLinear.from_linear(adapter.up, group=group, sequence_dim=1)
        setattr(inner, name, adapter)
    elif wrapper == "peft":
        from peft import LoraConfig, inject_adapter_in_model

        torch.manual_seed(1)
        lora = LoraConfig(r=2, target_modules=[name], init_lora_weights=False)
        inject_adapter_in_model(lora, model)
    elif wrapper == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, _: module is target)
    # torchao replaces nn.Linear; ficco's layers are no nn.Linear and stay.
    elif wrapper == "torchao float8" and not (reference and layer in OWN):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    if not reference:
        modules = model if wrapper == "fully_shard" else [model]
        for module in modules if layer != "styles" else model[:1]:
            replicated(module, group)
    if wrapper == "fully_shard" and not reference:
        from torch.distributed.fsdp import fully_shard

        children = inner.children() if layer != "ulysses" else ()
        for module in (*children, model):
            fully_shard(module, mesh=data)
    if wrapper.endswith("checkpoint"):
        from torch.utils.checkpoint import checkpoint

        return partial(checkpoint, model, use_reentrant=wrapper.startswith("reentrant"))
    return torch.compile(model, backend="aot_eager") if wrapper == "compile" else model


def trained(
    call: Callable[[torch.Tensor], torch.Tensor],
    model: nn.Sequential,
    trainer: str,
    part: Callable[[torch.Tensor], torch.Tensor],
    clip: Callable[[float], Any],
    scaler: type[torch.amp.GradScaler],
) -> dict[str, torch.Tensor]:
    """Outputs of all steps, gradients of the last step, and parameters after it, by name."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    kind, lr = {"AdamW": (torch.optim.AdamW, 0.05)}.get(trainer, (torch.optim.SGD, 1.0))
    optimizer, tensors, micro = kind(params.values(), lr=lr), {}, 1 + (trainer == "accumulation")
    generator, like = torch.Generator().manual_seed(2), model[0].weight
    scales = scaler(like.device.type, init_scale=4.0, enabled=trainer == "scaler")
    for turn in range(STEPS * micro):
        pair = torch.randn(2, 2, SEQUENCE, HIDDEN, generator=generator).to(like.device, like.dtype)
        if trainer == "scaler" and turn == 1:
            pair[1, 0, 0, 0] = float("inf")  # in the shard of one rank
        x, upstream = map(part, pair)
        y = call(x.requires_grad_())  # reentrant checkpoints need an input with a gradient
        tensors[f"output {turn}"] = y.detach().clone()
        if turn % micro == 0:
            optimizer.zero_grad()
        scales.scale((y * upstream).sum()).backward()
        if (turn + 1) % micro == 0:
            scales.unscale_(optimizer)
            clip(0.5)
            scales.step(optimizer)
            scales.update()
    grads = {f"{name}, gradient": param.grad for name, param in params.items()}
    return tensors | grads | {name: param.detach() for name, param in params.items()}


def part_of(full: torch.Tensor, like: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """The unsharded tensor, or this rank's shard of it if ``like`` is smaller."""
    for dim, (size, own) in enumerate(zip(full.shape, like.shape, strict=True)):
        if size != own:
            return full.chunk(world, dim)[rank]
    return full


@cache
def places(at: Rank) -> tuple[dict[str, Any], Any]:
    """The groups of cases by name, and the mesh of data parallelism; cached per process."""
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh(at.device.type, (at.world // 2, 2), mesh_dim_names=("dp", "tp"))
    pairs = [dist.new_group([first, first + 1]) for first in range(0, at.world, 2)]
    return {"default": None, "pair": pairs[at.rank // 2], "mesh": grid["tp"]}, grid["dp"]


def mixed(at: Rank, case: Case) -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    from ficco.nn import clip_grad_norm_

    layer, wrapper, place, trainer = case
    # float64 where the engine and the wrapper support it.
    wide = at.device.type == "cpu" and "float8" not in wrapper and wrapper != "int8"
    limit = CLOSE if wide else CLOSE_FLOAT32
    if "float8" in wrapper and layer in ((*OWN, "styles") if wrapper == "float8" else ("ulysses",)):
        limit = CLOSE_FLOAT8
    groups, data = places(at)
    group, world = groups[place], at.world if place == "default" else 2
    rank = at.rank % world
    reference = unsharded(layer, at, torch.float64 if wide else torch.float32)
    model = parallel(reference, layer, group, "tensor" if wrapper == "float8" else None)
    calls = [wrapped(wrapper, layer, m, group, data, m is reference) for m in (model, reference)]

    def shard(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(world, 1)[rank].contiguous()

    clips = (
        partial(clip_grad_norm_, model),
        partial(nn.utils.clip_grad_norm_, [*reference.parameters()]),
    )
    tensors = trained(calls[0], model, trainer, shard, clips[0], ShardedGradScaler)
    expected = trained(calls[1], reference, trainer, torch.clone, clips[1], torch.amp.GradScaler)
    assert list(tensors) == list(expected)
    for name, tensor in tensors.items():
        local: Any = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        part = part_of(expected[name], local, rank, world)
        error = (local - part).norm() / part.norm().clamp(min=1e-30)
        assert error <= limit, f"{name}: {error}"


def check(at: Rank, case: Case) -> None:
    for layers, wrapper, groups, kind, text in REFUSED:
        if case[0] in layers and case[1] == wrapper and case[2] in groups:
            failure = caught(partial(mixed, at, case))
            assert isinstance(failure, Failure), "required an error, got a result"
            assert re.fullmatch(kind, failure.type) and re.search(text, failure.text), failure
            return
    mixed(at, case)


@pytest.mark.parametrize(("world", "device"), WORLDS)
@pytest.mark.parametrize("case", cases(), ids=", ".join)
def test_a_mixture_is_right_or_refused(case: Case, world: int, device: str) -> None:
    run(world, check, case, device=device, timeout=120)
