"""Layers, wrappers of other tools, groups and trainer steps, mixed, against the unsharded model.

A case is one of each. The model trains for three steps on ranks, and unsharded. Outputs, gradients
and parameters are compared, or the case has to be refused in words, by the table ``REFUSED``. Four
ranks on CPUs are two pairs, and two ranks on GPUs are one pair; a pair shares the sequence.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Failure, Rank, caught, run
from torch import nn
from torch.nn.utils import parametrize

pytestmark = pytest.mark.clients

HIDDEN, WIDE, SEQUENCE, RANK, STEPS = 32, 64, 8, 2, 3

LAYERS = ("layers", "gather_once", "ulysses", "styles")
GROUPS = ("default", "pair", "mesh")
WRAPPERS = (
    *("none", "forward hook", "pre-hook", "parametrization", "fully_shard", "adapter", "peft"),
    *("int8", "float8", "torchao float8", "checkpoint", "reentrant checkpoint", "compile"),
)
TRAINERS = ("SGD", "AdamW", "scaler", "accumulation")

Case = tuple[str, str, str, str]

PLAIN, ANY = ("default", "pair"), GROUPS
OWN = ("layers", "gather_once")

#: Mixtures that are refused: layers, wrapper, groups, regular expressions of the error's type and
#: of its words, and why.
REFUSED = (
    (
        OWN,
        "fully_shard",
        PLAIN,
        "NotImplementedError",
        "as fully_shard makes of it; give the layer a DeviceMesh",
        "fully_shard takes the plain parts of all ranks for copies of one parameter",
    ),
    (
        OWN,
        "parametrization",
        PLAIN,
        "NotImplementedError",
        "which may be a part or a whole; give the layer a DeviceMesh",
        "clip_grad_norm_ cannot know whether a plain tensor of a parametrization is a part",
    ),
    (
        ("gather_once",),
        "adapter",
        ANY,
        "ValueError",
        "required ColumnParallelLinear layers",
        "an adapter around a layer is another module; call the layers one by one",
    ),
    (
        OWN,
        "peft",
        ANY,
        "ValueError",
        "Target module ColumnParallelLinear",
        "peft adapts nn.Linear and its subclasses; use the styles of Transformers",
    ),
    (
        ("styles",),
        "adapter",
        ANY,
        "RuntimeError",
        "got mixed torch.Tensor and DTensor|dimension 1 being sharded",
        "PyTorch: PrepareModuleInput passes a DTensor to the plain matrices of the adapter",
    ),
    (
        ("styles",),
        "peft",
        ANY,
        "RuntimeError",
        "got mixed torch.Tensor and DTensor|dimension 1 being sharded",
        "the same; peft knows the styles of Transformers alone",
    ),
    (
        ("styles",),
        "torchao float8",
        ANY,
        "NotImplementedError|RuntimeError",
        "attempting to run aten.index_select.default|dimension 1 being sharded",
        "torchao: its Float8Linear takes the place of the layer and cannot gather a DTensor; "
        "use recipe=",
    ),
)


def refusal(case: Case) -> tuple[str, str] | None:
    """The type and words of the error by which a case is refused; None if it is served."""
    for layers, wrapper, places, kind, words, _ in REFUSED:
        if case[0] in layers and case[1] == wrapper and case[2] in places:
            return kind, words
    return None


#: Relative errors of each tensor. Ranks sum in another order, over three steps. A float8 has 3 bits
#: of mantissa, and its scale is that of a part; lost communication is off by more than 0.5.
CLOSE, CLOSE_FLOAT32, CLOSE_FLOAT8 = 1e-11, 1e-5, 0.25


class Scaled(nn.Module):
    """Stands for a norm: a parameter that all ranks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


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
    """What ``UlyssesAttention`` is, unsharded."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        y: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return y


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Adapter(nn.Module):
    """A layer and a product of two small matrices, as LoRA adds to a layer."""

    def __init__(self, base: nn.Module, into: nn.Module, out_of: nn.Module) -> None:
        super().__init__()
        self.base, self.into, self.out_of = base.requires_grad_(False), into, out_of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.out_of(self.into(x))
        return y


def unsharded(layer: str, at: Rank, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    inner = Attention() if layer == "ulysses" else Mlp(layer == "gather_once")
    return nn.Sequential(Scaled(), inner).to(at.device, dtype)


def parallel(whole: nn.Sequential, layer: str, group: Any, recipe: str | None) -> nn.Sequential:
    """The model of ranks with the values of the unsharded one."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from ficco import nn as ficco_nn

    model = copy.deepcopy(whole)
    inner: Any = model[1]
    if layer == "ulysses":
        like = inner.q_proj.weight
        model[1] = ficco_nn.UlyssesAttention(
            HIDDEN, 4, group=group, device=like.device, dtype=like.dtype
        )
        model[1].load_state_dict(inner.state_dict())
    elif layer == "styles":
        colwise = partial(ficco_nn.ColwiseParallel, recipe=recipe)
        prepare = ficco_nn.PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        )
        rowwise = ficco_nn.RowwiseParallel(output_layouts=Shard(1), recipe=recipe)
        plan = {"": prepare, "up": colwise(), "gate": colwise(), "down": rowwise}
        parallelize_module(inner, group, plan)
    else:
        where: dict[str, Any] = {"group": group, "sequence_dim": 1, "recipe": recipe}
        for name in ("up", "gate", "down"):
            kind = ficco_nn.RowParallelLinear if name == "down" else ficco_nn.ColumnParallelLinear
            setattr(inner, name, kind.from_linear(getattr(inner, name), **where))
    return model


def wrapped(
    wrapper: str, layer: str, model: nn.Sequential, group: Any, data: Any, whole: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Apply a wrapper, in the same way to the model of ranks and to the unsharded one; return what
    is called."""
    from ficco.nn import ColumnParallelLinear, replicated

    inner: Any = model[1]
    name = "q_proj" if layer == "ulysses" else "up"
    target: Any = getattr(inner, name)
    call: Any = model
    if wrapper == "forward hook":
        target.register_forward_hook(lambda module, args, out: 2 * out)
    elif wrapper == "pre-hook":
        target.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    elif wrapper == "parametrization":
        parametrize.register_parametrization(target, "weight", Twice())
    elif wrapper == "adapter":
        torch.manual_seed(1)
        like = {"device": model[0].weight.device, "dtype": model[0].weight.dtype}
        into = nn.Linear(HIDDEN, RANK, bias=False, **like)
        out_of: nn.Module = nn.Linear(RANK, target.out_features, bias=False, **like)
        if not whole and layer in ("layers", "gather_once"):
            where = {"group": group, "sequence_dim": 1}
            out_of = ColumnParallelLinear.from_linear(out_of, **where)
        setattr(inner, name, Adapter(target, into, out_of))
    elif wrapper == "peft":
        from peft import LoraConfig, inject_adapter_in_model

        torch.manual_seed(1)
        inject_adapter_in_model(
            LoraConfig(r=RANK, target_modules=[name], init_lora_weights=False), model
        )
    elif wrapper == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, _: module is target)
    elif wrapper == "torchao float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # It replaces nn.Linear, which layers of ficco's are not: they stay.
        if not whole or layer not in OWN:
            convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    if not whole and layer != "styles":
        for module in model if wrapper == "fully_shard" else [model]:
            replicated(module, group)
    elif not whole:
        replicated(model[0], group)
    if wrapper == "fully_shard" and not whole:
        from torch.distributed.fsdp import fully_shard

        children = inner.children() if layer != "ulysses" else ()
        for module in (*children, model):
            fully_shard(module, mesh=data)
    elif wrapper.endswith("checkpoint"):
        from torch.utils.checkpoint import checkpoint

        call = partial(checkpoint, model, use_reentrant=wrapper.startswith("reentrant"))
    elif wrapper == "compile":
        call = torch.compile(model, backend="aot_eager")
    return call


def batches(at: Rank, dtype: torch.dtype, count: int) -> Iterator[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        pair = (torch.randn(2, SEQUENCE, HIDDEN, generator=generator) for _ in range(2))
        yield tuple(each.to(at.device, dtype) for each in pair)


def trained(
    call: Callable[[torch.Tensor], torch.Tensor],
    model: nn.Module,
    trainer: str,
    at: Rank,
    part: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    whole: bool,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs of all steps, gradients of the last step, and parameters after it."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    from ficco.nn import clip_grad_norm_

    params = [param for param in model.parameters() if param.requires_grad]
    kind = torch.optim.AdamW if trainer == "AdamW" else torch.optim.SGD
    optimizer = kind(params, lr=0.05 if kind is torch.optim.AdamW else 1.0)
    micro = 2 if trainer == "accumulation" else 1
    scaler: Any = None
    if trainer == "scaler":
        kind_of_scaler = torch.amp.GradScaler if whole else ShardedGradScaler
        scaler = kind_of_scaler(at.device.type, init_scale=4.0)
    outs, grads = [], {}
    for index, (x, upstream) in enumerate(batches(at, dtype, STEPS * micro)):
        x.requires_grad_()  # reentrant checkpoints need an input with a gradient
        y = call(part(x))
        outs.append(y.detach().clone())
        if scaler is not None and index == 1:
            upstream[0, 0, 0] = float("inf")  # in the part of one rank
        loss = (y * part(upstream)).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if (index + 1) % micro:
            continue
        if scaler is not None:
            scaler.unscale_(optimizer)
        if whole:
            torch.nn.utils.clip_grad_norm_(params, 0.5)
        else:
            clip_grad_norm_(model, 0.5)
        grads = {
            name: param.grad.detach().clone()
            for name, param in model.named_parameters()
            if param.grad is not None
        }
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    values = {
        name: param.detach() for name, param in model.named_parameters() if param.requires_grad
    }
    return outs, grads, values


def part_of(full: torch.Tensor, like: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """The unsharded tensor, or this rank's part of it if ``like`` is smaller."""
    for dim, (size, wanted) in enumerate(zip(full.shape, like.shape, strict=True)):
        if size != wanted:
            return full.chunk(world, dim)[rank]
    return full


@cache
def places(at: Rank) -> tuple[dict[str, Any], Any]:
    """The groups of cases by name, and the mesh of data parallelism; made once in a process."""
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh(at.device.type, (at.world // 2, 2), mesh_dim_names=("dp", "tp"))
    pairs = [dist.new_group([first, first + 1]) for first in range(0, at.world, 2)]
    return {"default": None, "pair": pairs[at.rank // 2], "mesh": grid["tp"]}, grid["dp"]


def dtype_of(case: Case, device: str) -> torch.dtype:
    """float64 where the engine and the wrapper serve it."""
    wide = device == "cpu" and "float8" not in case[1] and case[1] != "int8"
    return torch.float64 if wide else torch.float32


def tolerance(case: Case, device: str) -> float:
    layer, wrapper, *_ = case
    if dtype_of(case, device) is torch.float64:
        return CLOSE
    served_in_float8 = OWN + ("styles",) if wrapper == "float8" else ("ulysses",)
    return CLOSE_FLOAT8 if "float8" in wrapper and layer in served_in_float8 else CLOSE_FLOAT32


def mixed(at: Rank, case: Case) -> dict[str, float]:
    """The largest relative error of outputs, gradients and parameters."""
    layer, wrapper, place, trainer = case
    dtype = dtype_of(case, at.device.type)
    groups, data = places(at)
    group = groups[place]
    world = at.world if place == "default" else 2
    rank = at.rank % world
    whole = unsharded(layer, at, dtype)
    model = parallel(whole, layer, group, "tensor" if wrapper == "float8" else None)
    calls = [wrapped(wrapper, layer, each, group, data, each is whole) for each in (model, whole)]
    cut = partial(torch.chunk, chunks=world, dim=1)
    outs, grads, values = trained(
        calls[0], model, trainer, at, lambda x: cut(x)[rank].contiguous(), dtype, False
    )
    want = trained(calls[1], whole, trainer, at, lambda x: x, dtype, True)
    errors = {"outputs": 0.0, "gradients": 0.0, "parameters": 0.0}

    def compare(what: str, got: Any, wanted: torch.Tensor) -> None:
        local = got.full_tensor() if hasattr(got, "full_tensor") else got
        wanted = part_of(wanted, local, rank, world)
        assert local.isfinite().all() or not wanted.isfinite().all(), what
        if wanted.isfinite().all():
            error = (local - wanted).norm() / wanted.norm().clamp(min=1e-30)
            errors[what] = max(errors[what], error.item())

    for out, wanted in zip(outs, want[0], strict=True):
        compare("outputs", out, cut(wanted)[rank])
    for what, got, wants in (("gradients", grads, want[1]), ("parameters", values, want[2])):
        assert list(got) == list(wants), (list(got), list(wants))
        for name, value in got.items():
            compare(what, value, wants[name])
    return errors


def cases() -> list[Case]:
    """Every layer with every wrapper, plain and trained in every way, and others by a seed."""
    draw = random.Random(0)
    fixed = [
        (layer, wrapper, place, trainer)
        for layer, wrapper, place, trainer in itertools.product(LAYERS, WRAPPERS, GROUPS, TRAINERS)
        if served(layer, place)
        and (wrapper in ("none", "fully_shard") or place == "mesh")
        and (trainer == "SGD" or (wrapper == "none" and place == "mesh"))
    ]
    rest = set(itertools.product(LAYERS, WRAPPERS, GROUPS, TRAINERS)) - set(fixed)
    # AdamW divides a gradient by its size, and so magnifies what float8 makes of a small one.
    drawn = [
        case
        for case in sorted(rest)
        if served(case[0], case[2]) and not ("float8" in case[1] and case[3] == "AdamW")
    ]
    return fixed + draw.sample(drawn, 40)


def served(layer: str, place: str) -> bool:
    return layer != "styles" or place == "mesh"  # parallelize_module takes a mesh


def check(world: int, device: str, case: Case) -> None:
    outcomes = run(world, _outcome, case, device=device, timeout=120)
    refused = refusal(case)
    for outcome in outcomes:
        if refused is not None:
            assert isinstance(outcome, Failure), f"served: {outcome}"
            kind, words = refused
            assert re.fullmatch(kind, outcome.type) and re.search(words, outcome.text), outcome
        else:
            assert isinstance(outcome, dict), outcome
            for what, error in outcome.items():
                assert error <= tolerance(case, device), f"{what}: {error}"


def _outcome(at: Rank, case: Case) -> dict[str, float] | Failure:
    if refusal(case) is None:
        return mixed(at, case)
    outcome: dict[str, float] | Failure = caught(partial(mixed, at, case))
    return outcome


@pytest.mark.parametrize("case", cases(), ids=", ".join)
def test_a_mixture_is_right_or_refused(case: Case) -> None:
    check(4, "cpu", case)


@pytest.mark.multigpu
@pytest.mark.parametrize("case", cases(), ids=", ".join)
def test_a_mixture_is_right_or_refused_on_gpus(case: Case) -> None:
    check(2, "cuda", case)
