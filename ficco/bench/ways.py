"""Ways of making a step of a tensor-parallel layer: collectives, PyTorch's Async TP, and ficco."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import ProcessGroup

import ficco
from ficco.bench.calls import all_gather, reduce_scatter

#: From this rank's x, columns and rows of the weights to its part of the result.
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """Two products.

    Attributes:
        name: how reports call it.
        tokens: rows of the whole sequence.
        hidden: columns of x and of the result.
        columns: columns of the first product on all ranks together; twice ``inner`` for a gate.
        inner: columns of what the second multiplies, on all ranks together.
    """

    name: str
    tokens: int
    hidden: int
    columns: int
    inner: int
    dtype: str = "bfloat16"

    def between(self, y: torch.Tensor) -> torch.Tensor:
        """What the second product takes of the first one's result."""
        if self.columns == 2 * self.inner:
            gate, up = y.chunk(2, -1)
            return F.silu(gate) * up
        return y[:, : y.shape[1] * self.inner // self.columns]


#: Llama 3 70B: a feed-forward width of 28672 with a gate; 64 heads and 8 of keys and values.
SHAPES = {
    "cuda": (
        Layer("mlp", 8192, 8192, 2 * 28672, 28672),
        Layer("attention", 8192, 8192, 10240, 8192),
    ),
    "cpu": (
        Layer("mlp", 256, 128, 2 * 256, 256, "float32"),
        Layer("attention", 256, 128, 160, 128, "float32"),
    ),
}


def _gather(x: torch.Tensor, group: ProcessGroup, wait: bool = True) -> tuple[torch.Tensor, Any]:
    whole = x.new_empty(x.shape[0] * group.size(), x.shape[1])
    return whole, all_gather(whole, x.contiguous(), group=group, async_op=not wait)


def _scatter(x: torch.Tensor, group: ProcessGroup, wait: bool = True) -> tuple[torch.Tensor, Any]:
    mine = x.new_empty(x.shape[0] // group.size(), x.shape[1])
    return mine, reduce_scatter(mine, x.contiguous(), group=group, async_op=not wait)


class ColumnParallel(torch.autograd.Function):
    """The first product. ``again``: gathered anew in backward, overlapped with products, as
    Megatron-LM does it; otherwise kept."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: ProcessGroup, again: bool
    ) -> torch.Tensor:
        whole, _ = _gather(x, group)
        ctx.save_for_backward(x if again else whole, weight)
        ctx.group, ctx.again = group, again
        return whole @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        kept, weight = ctx.saved_tensors
        if not ctx.again:
            mine, _ = _scatter(grad @ weight, ctx.group)
            return mine, grad.t() @ kept, None, None
        whole, gathered = _gather(kept, ctx.group, wait=False)
        ours = grad @ weight
        gathered.wait()
        mine, scattered = _scatter(ours, ctx.group, wait=False)
        of_weight = grad.t() @ whole
        scattered.wait()
        return mine, of_weight, None, None


class RowParallel(torch.autograd.Function):
    """The second product."""

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, weight: torch.Tensor, group: ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(a, weight)
        ctx.group = group
        return _scatter(a @ weight.t(), group)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        a, weight = ctx.saved_tensors
        whole, _ = _gather(grad, ctx.group)
        return whole @ weight, whole.t() @ a, None


def _by_collectives(layer: Layer, group: ProcessGroup, again: bool) -> Forward:
    def forward(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        y = ColumnParallel.apply(x, first, group, again)
        return cast(torch.Tensor, RowParallel.apply(layer.between(y), second, group))

    return forward


def _by_ficco(layer: Layer, group: ProcessGroup) -> Forward:
    def forward(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        y = ficco.all_gather_matmul(x, first.t(), group=group)
        return ficco.matmul_reduce_scatter(layer.between(y), second.t(), group=group)

    return forward


def _traceable(layer: Layer, group: ProcessGroup) -> Forward:
    """Functional collectives, which the compiler can see, and fuses with products if told to."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        # Deprecated as needless, and what the compiler still asks for before it fuses (2.11, 2.13).
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)
    names = ("all_gather_single_autograd", "reduce_scatter_single_autograd")
    if not hasattr(functional, names[0]):  # renamed by newer releases
        names = ("all_gather_tensor_autograd", "reduce_scatter_tensor_autograd")
    gather, scatter = (getattr(functional, name) for name in names)

    def forward(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        y = gather(x, 0, group) @ first.t()
        return cast(torch.Tensor, scatter(layer.between(y) @ second.t(), "sum", 0, group))

    return forward


@dataclass(frozen=True)
class Way:
    """How a step is made.

    Attributes:
        make: gives the forward pass.
        context: what the step runs inside of.
        compiler: options of the compiler; None for an eager step.
        calls: parts of names of operators, each of which a step must call: a compiler that does
            not find what it should replace says nothing.
    """

    make: Callable[[Layer, Any], Forward]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    compiler: dict[str, Any] | None = None
    calls: tuple[str, ...] = ()

    def forward(self, layer: Layer, group: ProcessGroup) -> Forward:
        eager = self.make(layer, group)
        if self.compiler is None:
            return eager
        how: dict[str, Any] = {"options": self.compiler}
        if dist.get_backend(group) != "nccl":
            if self.compiler:
                raise NotImplementedError(f"PyTorch has {', '.join(self.compiler)} on GPUs only")
            # Shows that it works, without a C++ compiler.
            how = {"backend": "aot_eager"}
        compiled: Forward = torch.compile(eager, fullgraph=True, **how)
        return compiled


#: The first is what the others must agree with.
WAYS = {
    "collectives": Way(partial(_by_collectives, again=False)),
    "collectives, gathered again": Way(partial(_by_collectives, again=True)),
    "collectives, compiled": Way(_traceable, compiler={}),
    "pytorch-async-tp": Way(
        _traceable,
        compiler={"_micro_pipeline_tp": True},
        calls=("fused_all_gather_matmul", "fused_matmul_reduce_scatter"),
    ),
    "ficco": Way(_by_ficco),
    "ficco, gathered A saved": Way(_by_ficco, partial(ficco.options, save_gathered=True)),
    "ficco, compiled": Way(
        _by_ficco, compiler={}, calls=("ficco::all_gather_matmul", "ficco::matmul_reduce_scatter")
    ),
}
COLLECTIVES = tuple(way for way in WAYS if way.startswith("collectives"))
ASYNC_TP = "pytorch-async-tp"
