"""Overrides for torchtitan, by its own mechanism::

    --override.imports ficco.integrations.torchtitan.attention \\
      ficco.integrations.torchtitan.feed_forward ficco.integrations.torchtitan.selective

Attention and feed-forward take the sequence shard itself: the all-gather in front of them and the
reduce-scatters behind ``wo`` and ``w2`` become ficco's operators. Parameters, their names and
shardings, and so checkpoints, stay torchtitan's. Tensors are local ones (``spmd_types``) or
DTensors, as ``parallelism.spmd_backend`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ficco.integrations import client
from ficco.nn import gathered_linears, scattered_linear
from ficco.nn.plain import local_of, own_kernel, part_of, placed
from ficco.runtime.counters import stays

with client("torchtitan", "0.3.0"):
    import spmd_types as spmd
    from torchtitan.config.override import derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.distributed.spmd_types import current_spmd_mesh
    from torchtitan.models.common.attention import FusedQKVLinear, GQAttention, QKVLinear
    from torchtitan.models.common.decoder_sharding import (
        dense_activation_placement,
        dense_param_placement,
        dense_sequence_parallel_placement,
    )
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.linear import Linear
    from torchtitan.tools.logging import logger

#: Layouts in torchtitan's words: a sequence shard; the sequence whole, heads or features shared.
_ROWS, _COLUMNS = dense_sequence_parallel_placement(), dense_activation_placement(tp=spmd.S(2))

Tensors = Sequence[torch.Tensor]


def _group(x: torch.Tensor) -> ProcessGroup | None:
    """The ranks of tensor parallelism; None where there is one, which is logged."""
    mesh = x.device_mesh if isinstance(x, DTensor) else current_spmd_mesh()
    group = mesh.get_group("tp") if mesh and "tp" in (mesh.mesh_dim_names or ()) else None
    if group is not None and group.size() > 1:
        return group
    if not torch.compiler.is_compiling():
        _warn_of_one_rank()
    return None


@cache
def _warn_of_one_rank() -> None:
    logger.warning(
        "ficco: attention and feed-forward run torchtitan's own code: required a "
        "parallelism.tensor_parallel_degree of 2 or more, got 1; set it, or leave out the overrides"
    )


def _local(parameter: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """This rank's part; its gradient is Partial where x is sharded and the parameter is not."""
    if not isinstance(parameter, DTensor):
        return parameter
    grads = None
    if isinstance(x, DTensor) and parameter.device_mesh == x.device_mesh:
        names = parameter.device_mesh.mesh_dim_names or ()
        grads = [
            Partial() if own == Replicate() and name != "tp" and isinstance(of_x, Shard) else own
            for own, of_x, name in zip(parameter.placements, x.placements, names, strict=True)
        ]
    return part_of(parameter, grads)


def _require_readable(*layers: Linear) -> None:
    """``ValueError`` if a layer does more than multiply by its weight, as an adapter's does."""
    for layer in layers:
        # Not the hooks, nor the forward that torchtitan sets on a layer: they only shard.
        if type(layer).forward is not nn.Linear.forward or own_kernel(layer.weight):
            raise ValueError(
                "layer: required a torchtitan Linear with a plain weight, which ficco's override "
                f"reads without calling the layer, got {type(layer).__name__}, whose weight is a "
                f"{type(local_of(layer.weight)).__name__}; leave out the override"
            )


def _run(
    product: Callable[[torch.Tensor, Tensors], Tensors],
    x: torch.Tensor,
    layers: Sequence[Linear],
    outputs: int,
    *,
    gathers: bool,
) -> Tensors:
    """A product of local tensors, with its results laid out as x is, except over ``tp``.

    spmd_types is told the types, where it checks them (``--debug.spmd_typechecking``).
    """
    if spmd.is_type_checking():
        received, returned = (_ROWS, _COLUMNS) if gathers else (_COLUMNS, _ROWS)
        weight = dense_param_placement(tp=spmd.S(0 if gathers else 1))
        pairs = [(each.axis_types, each.partition_spec) for each in (received, weight, returned)]
        typed = spmd.no_typecheck(
            in_types=(pairs[0], *[pairs[1]] * len(layers)), out_types=(pairs[2],) * outputs
        )
        called = typed(lambda x, *weights: tuple(product(x, weights)))
    else:
        called = lambda x, *weights: product(x, weights)  # noqa: E731
    weights = [_local(layer.weight, x) for layer in layers]
    if not isinstance(x, DTensor):
        return called(x, *weights)  # type: ignore[no-any-return]
    placements = list(x.placements)
    placements[(x.device_mesh.mesh_dim_names or ()).index("tp")] = Shard(2 if gathers else 1)
    return [placed(y, x.device_mesh, *placements) for y in called(part_of(x), *weights)]


def _gathered(
    x: torch.Tensor, layers: Sequence[Linear], group: ProcessGroup, heads: Any = None
) -> Tensors:
    """[b, s/W, k] -> [b, s, n/W] for each layer; ``heads`` cuts these up further, into three."""
    _require_readable(*layers)
    biases = [_local(layer.bias, x) for layer in layers]

    def product(x: torch.Tensor, weights: Tensors) -> Tensors:
        ys = gathered_linears(x, weights, biases, group=group, sequence_dim=1)
        return ys if heads is None else heads(ys)

    return _run(product, x, layers, 3 if heads else len(layers), gathers=True)


class _ContiguousGradient(torch.autograd.Function):
    """The identity, whose gradient is contiguous, as torchtitan's own layers return it. PyTorch
    runs one plan of cuDNN's attention for gradients of all strides, as if they had those of the
    first (2.11, ``MHAParams`` in ``native/cudnn/MHA.cpp``)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.contiguous()


def _scattered(
    x: torch.Tensor, layer: Linear, group: ProcessGroup, after_attention: bool = False
) -> torch.Tensor:
    """[b, s, k/W] -> [b, s/W, n]."""

    def product(x: torch.Tensor, weights: Tensors) -> Tensors:
        if after_attention:
            x = _ContiguousGradient.apply(x)
        return [scattered_linear(x, weights[0], group=group, sequence_dim=1)]

    (y,) = _run(product, x, [layer], 1, gathers=False)
    return y


class FiccoFusedQKV(FusedQKVLinear):
    """One weight for q, k and v, grouped by the heads of k."""

    @dataclass(kw_only=True, slots=True)
    class Config(FusedQKVLinear.Config):
        pass

    def forward(self, x: torch.Tensor) -> Any:
        if (group := _group(x)) is None:
            return super().forward(x)

        def heads(ys: Tensors) -> Tensors:
            qkv = ys[0].unflatten(-1, (-1, self.r_dim, self.head_dim))
            parts = torch.split(qkv, [self.heads_per_kv, 1, 1], dim=-2)
            return [part.flatten(2, 3).contiguous() for part in parts]

        return tuple(_gathered(x, [self.wqkv], group, heads))


class FiccoQKV(QKVLinear):
    """A weight each for q, k and v."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        pass

    def forward(self, x: torch.Tensor) -> Any:
        if (group := _group(x)) is None:
            return super().forward(x)

        def heads(ys: Tensors) -> Tensors:
            return [y.unflatten(-1, (-1, self.head_dim)).contiguous() for y in ys]

        return tuple(_gathered(x, [self.wq, self.wk, self.wv], group, heads))


class FiccoRow(Linear):
    """``wo``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if (group := _group(input)) is None:
            return F.linear(input, self.weight, self.bias)
        return _scattered(input, self, group, after_attention=True)


class FiccoFeedForward(FeedForward):
    """``w1`` and ``w3`` gather once, ``w2`` scatters."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: torch.Tensor) -> Any:
        if (group := _group(x)) is None:
            return super().forward(x)
        _require_readable(self.w2)
        gate, up = _gathered(x, [self.w1, self.w3], group)
        return _scattered(F.silu(gate) * up, self.w2, group)


class _Left:
    """Before a block of torchtitan's among the base classes: at each call its collectives are
    counted as left, or refused within :func:`ficco.expect`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        count = partial(_count, config.collectives, config.refusal)
        self.register_forward_pre_hook(count, with_kwargs=True)  # type: ignore[attr-defined]


def _count(
    collectives: tuple[str, ...], refusal: str, module: Any, args: Any, kwargs: dict[str, Any]
) -> None:
    (x, *_) = args or kwargs.values()
    if not torch.compiler.is_compiling() and (group := _group(x)) is not None:
        for collective in collectives:
            stays(group.group_name, collective, refusal, "see docs/clients/torchtitan.md")


class _LeftAttention(_Left, GQAttention):
    """torchtitan's own attention, counted."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        collectives: tuple[str, ...]
        refusal: str


class _LeftFeedForward(_Left, FeedForward):
    """torchtitan's own feed-forward, counted."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        collectives: tuple[str, ...]
        refusal: str


class FiccoSelectiveAC(SelectiveAC):
    """Saves what ficco's operators return. torchtitan recomputes operators that it does not know,
    though it saves what reduce-scatters return and every other product."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        ops = torch.ops.ficco
        own = {ops.all_gather_matmul.default, ops.matmul_reduce_scatter.default}
        return own.union(super().get_save_ops())


def _refusal(cfg: Any, name: str, column: Sequence[Any], row: Any) -> str:
    """Why a block with the input ``name`` stays as it is; '' if ficco serves it."""
    blocks = cfg.sharding_config
    if any(type(layer) is not Linear.Config for layer in (*column, row)):
        return (
            "required layers of torchtitan's Linear, got others, as of float8; leave out the "
            "converter, or this override"
        )
    if row.bias:
        return (
            "required a row-parallel layer without bias, got one whose gradient torchtitan sums by "
            "itself; leave out the bias, or this override"
        )
    if (
        blocks is None
        or blocks.in_src_shardings != {name: _ROWS}
        or blocks.in_dst_shardings != {name: dense_activation_placement(tp=spmd.R)}
        or row.sharding_config.out_dst_shardings != _ROWS
    ):
        return (
            "required a sequence shard that it gathers and scatters, got another layout; set "
            "parallelism.enable_sequence_parallel, and not tp_gemm_backend"
        )
    return ""


def _states(layer: Any, kind: Any = None) -> Any:
    """A layer whose parameters are laid out as before; its input and its result are already."""
    none = dict.fromkeys(
        ("in_src_shardings", "in_dst_shardings", "out_src_shardings", "out_dst_shardings")
    )
    sharding = replace(layer.sharding_config, **none)
    return derive(layer, kind or type(layer), sharding_config=sharding)


def _derived(cfg: Any, kind: Any, **parts: Any) -> Any:
    """A block with other parts, whose input is not gathered in front of it."""
    sharding = replace(cfg.sharding_config, in_dst_shardings=None)
    return derive(cfg, kind, sharding_config=sharding, **parts)


def _left(cfg: Any, kind: Any, row: Any, refusal: str) -> Any:
    """The block as torchtitan has it, with its collectives counted; the reason is logged."""
    logger.warning("ficco: %s stays as it is: %s", type(cfg).__qualname__, refusal)
    sharding = row.sharding_config
    scatters = sharding is not None and sharding.out_dst_shardings == _ROWS
    collectives = ("all-gather", "reduce-scatter") if scatters else ("all-reduce",)
    return derive(cfg, kind.Config, collectives=collectives, refusal=refusal)


@override(target=GQAttention.Config, exact=True, description="ficco: all-gather, wo's scatter")
def attention(cfg: Any) -> Any:
    """Grouped-query attention between sequence shards."""
    qkv = cfg.qkv_linear
    kinds = {FusedQKVLinear.Config: FiccoFusedQKV.Config, QKVLinear.Config: FiccoQKV.Config}
    names = [name for name in ("wqkv", "wq", "wkv") if hasattr(qkv, name)]
    refusal = _refusal(cfg, "x_BLD", [getattr(qkv, name) for name in names], cfg.wo)
    if type(qkv) not in kinds:
        refusal = (
            f"required q, k and v of torchtitan's own layers, got {type(qkv).__qualname__}; leave "
            "out this override"
        )
    if refusal:
        return _left(cfg, _LeftAttention, cfg.wo, refusal)
    columns = {name: _states(getattr(qkv, name)) for name in names}
    return _derived(
        cfg,
        type(cfg),
        qkv_linear=derive(qkv, kinds[type(qkv)], **columns),
        wo=_states(cfg.wo, FiccoRow.Config),
    )


@override(target=FeedForward.Config, exact=True, description="ficco: all-gather, w2's scatter")
def feed_forward(cfg: Any) -> Any:
    """The feed-forward of a dense block between sequence shards."""
    if refusal := _refusal(cfg, "x", [cfg.w1, cfg.w3], cfg.w2):
        return _left(cfg, _LeftFeedForward, cfg.w2, refusal)
    layers = {name: _states(getattr(cfg, name)) for name in ("w1", "w2", "w3")}
    return _derived(cfg, FiccoFeedForward.Config, **layers)


@override(target=SelectiveAC.Config, exact=True, description="ficco: its products are saved")
def selective(cfg: Any) -> Any:
    """Selective checkpointing that knows ficco's operators."""
    return derive(cfg, FiccoSelectiveAC.Config)
