"""Workload: forward and backward of tensor-parallel layers, by ficco and by collectives.

A layer is a column-parallel product and the row-parallel one that follows. Between two steps the
sequence is sharded, so that the first gathers it and the second scatters its sums; backward the
second gathers and the first scatters. Between the products is an activation (``mlp``) or nothing
(``attention``: the queries pass, attention itself is not timed).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

import ficco
from ficco.tools.bench.frames import LAYERS
from ficco.tools.bench.harness import CHECKS, Subject, Workload
from ficco.tools.bench.measure import (
    Runner,
    Stopwatch,
    all_gather,
    peak_bytes,
    pytorch_workspace_bytes,
    reduce_scatter,
)
from ficco.tools.bench.report import Series, fastest, over, spread

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
        inner: columns of the second product's left operand, on all ranks together.
    """

    name: str
    tokens: int
    hidden: int
    columns: int
    inner: int
    dtype: str = "bfloat16"

    def between(self, y: torch.Tensor) -> torch.Tensor:
        """The left operand of the second product, from the result of the first."""
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
        saved, weight = ctx.saved_tensors
        if not ctx.again:
            mine, _ = _scatter(grad @ weight, ctx.group)
            return mine, grad.t() @ saved, None, None
        whole, gathered = _gather(saved, ctx.group, wait=False)
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
    """Functional collectives, which the compiler can trace, and fuse with products."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        # Deprecated, but the compiler still requires it for fusion (PyTorch 2.11 and 2.13).
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
class LayerWay:
    """How a step is made.

    Attributes:
        make: gives the forward pass.
        context: entered around steps.
        compiler: options of the compiler; None for an eager step.
        calls: parts of operators' names. A step must call an operator for each, since the compiler
            does not report a fusion that failed.
        kept_bytes: persistent bytes of the way, besides PyTorch's allocations.
        schedule, lacks: as of :class:`ficco.tools.bench.harness.Variant`.
    """

    make: Callable[[Layer, Any], Forward]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    compiler: dict[str, Any] | None = None
    calls: tuple[str, ...] = ()
    kept_bytes: Callable[[ProcessGroup], int] = lambda group: 0
    schedule: str = ""
    lacks: str = ""

    def forward(self, layer: Layer, group: ProcessGroup) -> Any:
        eager = self.make(layer, group)
        if self.compiler is None:
            return eager
        how: dict[str, Any] = {"options": self.compiler}
        if dist.get_backend(group) != "nccl":
            if self.compiler:
                raise NotImplementedError(f"PyTorch has {', '.join(self.compiler)} on GPUs only")
            # Shows that it works, without a C++ compiler.
            how = {"backend": "aot_eager"}
        return torch.compile(eager, fullgraph=True, **how)


#: Ways to compute a step. The first is the reference of the others.
WAYS = {
    "pytorch-serial": LayerWay(partial(_by_collectives, again=False)),
    "pytorch-serial, gathered again": LayerWay(partial(_by_collectives, again=True)),
    "pytorch-serial, compiled": LayerWay(_traceable, compiler={}),
    "pytorch-async-tp": LayerWay(
        _traceable,
        compiler={"_micro_pipeline_tp": True},
        calls=("fused_all_gather_matmul", "fused_matmul_reduce_scatter"),
        kept_bytes=pytorch_workspace_bytes,
    ),
    "auto": LayerWay(_by_ficco, kept_bytes=ficco.memory),
    "auto, gathered A saved": LayerWay(
        _by_ficco, partial(ficco.options, save_gathered=True), kept_bytes=ficco.memory
    ),
    "auto, compiled": LayerWay(
        *(_by_ficco, nullcontext, {}, ("ficco::all_gather_matmul", "ficco::matmul_reduce_scatter")),
        kept_bytes=ficco.memory,
    ),
}
COLLECTIVES = tuple(way for way in WAYS if way.startswith("pytorch-serial"))
ASYNC_TP = "pytorch-async-tp"

# Steps, and their times.

Tensors = tuple[torch.Tensor, ...]
#: Largest difference from the collectives' step, as a share of the root mean square. A result
#: passes four products and two sums over ranks, each rounded. Stale or missing data differ by
#: tenths.
TOLERANCE = {"bfloat16": 2.0**-5, "float16": 2.0**-8, "float32": 1e-4}


class LayerData(Workload):
    """The operands of a layer on one rank, and its steps on them; the variants are ``WAYS``."""

    def __init__(self, case: Layer, watch: Stopwatch, schedules: Sequence[Any] = ()) -> None:
        super().__init__(case, watch, schedules)
        # After another layer's sizes the compiler would compile for dynamic sizes, and after many
        # layers refuse to compile.
        torch.compiler.reset()
        world, dtype = watch.world, getattr(torch, case.dtype)
        rows = case.tokens // world
        shapes = (
            *((rows, case.hidden), (case.columns // world, case.hidden)),
            *((case.hidden, case.inner // world), (rows, case.hidden)),
        )
        *operands, self.grad = (torch.empty(s, dtype=dtype, device=self.device) for s in shapes)
        self.operands = tuple(one.requires_grad_() for one in operands)
        self.offered = dict(WAYS)

    @torch.no_grad()
    def fill(self, seed: int, exact: bool = False) -> None:
        """Normal data of unit variance, other data on every rank."""
        generator = self.generator(seed)
        for tensor in (*self.operands, self.grad):
            tensor.normal_(generator=generator)
        _, first, second = self.operands
        first.mul_(self.case.hidden**-0.5)
        second.mul_(self.case.inner**-0.5)

    def run(self, forward: Forward) -> torch.Tensor:
        """One step; its result. The gradients stay with the operands."""
        for tensor in self.operands:
            tensor.grad = None
        result = forward(*self.operands)
        result.backward(self.grad)
        return result

    def results(self, forward: Forward) -> Tensors:
        """A step's result and gradients."""
        result = self.run(forward)
        return result.detach(), *(tensor.grad for tensor in self.operands)

    def forward_of(self, variant: Any) -> Any:
        """The forward pass of a way."""
        return variant.forward(self.case, self.group)

    @cached_property
    def reference(self) -> Any:
        """The forward pass of the first way."""
        return self.forward_of(next(iter(self.offered.values())))

    def prove(self, variant: Any) -> tuple[Runner, tuple[float, int]]:
        """A way's step, and on this rank its error and the memory that it takes."""
        forward, error, extra = self.forward_of(variant), 0.0, 0
        for turn in range(CHECKS):
            self.fill(turn + 1)
            wanted = self.results(self.reference)
            with variant.context():
                error = max(error, difference(self.results(forward), wanted))
                del wanted
                _, extra = peak_bytes(partial(self.run, forward), self.device)
            extra += variant.kept_bytes(self.group)
        require(variant.calls, partial(self.run, forward))
        return Runner(partial(self.run, forward), context=variant.context), (error, extra)

    def judge(self, everyone: Sequence[tuple[float, int]]) -> tuple[str, dict[str, Any]]:
        error, extra = map(max, zip(*everyone, strict=True))
        limit = TOLERANCE[self.case.dtype]
        if error > limit:
            return f"differs by {error:.2g} of {limit:.2g}", {"error": error}
        extra_bytes = float(extra) if self.watch.on_gpu else math.nan
        return "", {"error": error, "extra_bytes": extra_bytes}

    def figures(self, times: Series, queued: Series | None) -> pd.DataFrame:
        frame = pd.DataFrame(times)
        return spread(frame).assign(
            speedup=over(fastest(frame, COLLECTIVES), frame),
            vs_pytorch=over(frame.get(ASYNC_TP), frame),
        )


def difference(results: Tensors, wanted: Tensors) -> float:
    """Root mean square of the difference, relative to ``wanted``; the largest over the tensors."""
    shares = [
        float((one.double() - other.double()).norm() / other.double().norm())
        for one, other in zip(results, wanted, strict=True)
    ]
    return max(shares) if all(map(math.isfinite, shares)) else math.inf


def require(calls: Sequence[str], step: Callable[[], Any]) -> None:
    """Raise if a step does not call an operator for each of these parts of names."""
    if not calls:
        return
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    names = {event.key for event in seen.key_averages()}
    for call in calls:
        if not any(call in name for name in names):
            raise RuntimeError(f"a step does not call {call}")


def heads(text: pd.DataFrame) -> dict[str, pd.Series]:
    sizes = text[["hidden", "columns", "inner"]].agg(", ".join, axis=1)
    return {"layer": text["layer"] + ": " + text["tokens"] + " tokens, " + sizes}


SHOWN = (
    ("ms", "ms", 1.0, ".3f"),
    ("x collectives", "speedup", 1.0, ".2f"),
    ("x Async TP", "vs_pytorch", 1.0, ".2f"),
    ("extra MiB", "extra_bytes", 2.0**-20, ".0f"),
    ("differs by", "error", 1.0, ".1e"),
)

HOW = (
    "A step is forward and backward of a column-parallel and a row-parallel product with sharded "
    "sequences between layers (hidden width, columns of the first product and of what the second "
    "multiplies, on all ranks together). All ways run in shuffled order in every round; a round's "
    "time is that of its slowest rank, ratios are medians over the rounds. pytorch-serial: the "
    "library's collectives through autograd, with the gathered activation kept, gathered again "
    "beside products in backward, or under `torch.compile`, which fuses what stands between the "
    "products, as it does for Async TP and for `auto, compiled`; ratios are against the fastest "
    "of the three. Before it is timed every way must agree with the first in result and "
    "gradients, within what rounding explains, and must be seen to call the fused operators that "
    "it is named after."
)

SUBJECT = Subject("layers", LAYERS, LayerData, heads, HOW, how="", shown=SHOWN, gradients=True)
