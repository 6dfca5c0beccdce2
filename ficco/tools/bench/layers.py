"""Steps of tensor-parallel layers, forward and backward: ficco compared with the collectives.

A layer is a column-parallel product and the row-parallel one that follows. Between two steps the
sequence is sharded, so that the first gathers it and the second scatters its sums; backward the
second gathers and the first scatters. What stands between the products in a model is an activation
here (``mlp``), or nothing (``attention``: the queries go on, attention itself is not timed).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

import ficco
from ficco.tools.bench.calls import Runner, all_gather, reduce_scatter
from ficco.tools.bench.frames import LAYERS, RunSettings
from ficco.tools.bench.measure import peak_bytes, pytorch_workspace_bytes
from ficco.tools.bench.report import MODE_WORDS, about_table
from ficco.tools.bench.series import Stopwatch
from ficco.tools.bench.stats import fastest, over, spread
from ficco.tools.bench.tables import cells, markdown
from ficco.tools.bench.verify import FATAL
from ficco.tools.launch import local_device

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
class LayerWay:
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
    "collectives": LayerWay(partial(_by_collectives, again=False)),
    "collectives, gathered again": LayerWay(partial(_by_collectives, again=True)),
    "collectives, compiled": LayerWay(_traceable, compiler={}),
    "pytorch-async-tp": LayerWay(
        _traceable,
        compiler={"_micro_pipeline_tp": True},
        calls=("fused_all_gather_matmul", "fused_matmul_reduce_scatter"),
    ),
    "ficco": LayerWay(_by_ficco),
    "ficco, gathered A saved": LayerWay(_by_ficco, partial(ficco.options, save_gathered=True)),
    "ficco, compiled": LayerWay(
        _by_ficco, compiler={}, calls=("ficco::all_gather_matmul", "ficco::matmul_reduce_scatter")
    ),
}
COLLECTIVES = tuple(way for way in WAYS if way.startswith("collectives"))
ASYNC_TP = "pytorch-async-tp"

# Steps, and their times.

Tensors = tuple[torch.Tensor, ...]
#: Largest difference from the collectives' step, as a share of the root mean square: a result
#: passes four products and two sums over ranks, each rounded to so many digits. What is stale or
#: missing differs by tenths.
TOLERANCE = {"bfloat16": 2.0**-5, "float16": 2.0**-8, "float32": 1e-4}

#: Steps with fresh operands that must be right before a way is timed.
CHECKS = 2


@dataclass(frozen=True, kw_only=True)
class LayerSettings(RunSettings):
    """What is timed."""

    layers: tuple[Layer, ...]
    modes: tuple[str, ...]


@dataclass
class LayerStep:
    """The operands of a layer on one rank, and its steps on them."""

    layer: Layer
    rank: int
    world: int
    device: torch.device

    def __post_init__(self) -> None:
        layer, world, dtype = self.layer, self.world, getattr(torch, self.layer.dtype)
        rows = layer.tokens // world
        shapes = (
            *((rows, layer.hidden), (layer.columns // world, layer.hidden)),
            *((layer.hidden, layer.inner // world), (rows, layer.hidden)),
        )
        *operands, self.grad = (torch.empty(s, dtype=dtype, device=self.device) for s in shapes)
        self.operands = tuple(one.requires_grad_() for one in operands)

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Normal data of unit variance, other data on every rank."""
        generator = torch.Generator(self.device)
        generator.manual_seed(seed * self.world + self.rank)
        for tensor in (*self.operands, self.grad):
            tensor.normal_(generator=generator)
        _, first, second = self.operands
        first.mul_(self.layer.hidden**-0.5)
        second.mul_(self.layer.inner**-0.5)

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
        grads = [tensor.grad for tensor in self.operands]
        return result.detach(), *(grad for grad in grads if grad is not None)


def difference(results: Tensors, wanted: Tensors) -> float:
    """Root mean square of the difference over that of what is wanted; the largest of several."""
    shares = [
        float((one.double() - other.double()).norm() / other.double().norm())
        for one, other in zip(results, wanted, strict=True)
    ]
    return max(shares) if all(map(math.isfinite, shares)) else math.inf


def layers(settings: LayerSettings) -> pd.DataFrame | None:
    """Measure; collective. The rows on rank 0, None elsewhere."""
    watch = Stopwatch(dist.group.WORLD, local_device(settings.device))
    end = time.monotonic() + settings.seconds

    def steps() -> Iterator[Iterator[dict[str, Any]]]:
        for number, layer in enumerate(settings.layers):
            share = (end - time.monotonic()) / (len(settings.layers) - number)
            yield _layer(layer, watch, settings, share)
            watch.release()

    rows = settings.record(LAYERS, steps(), watch.rank, watch.world)
    watch.close()
    return rows


def _layer(
    layer: Layer, watch: Stopwatch, settings: LayerSettings, seconds: float
) -> Iterator[dict[str, Any]]:
    """The rows of a layer, as columns of ``ficco.tools.bench.frames.LAYERS``."""
    began = time.monotonic()
    # The compiler would take another layer's sizes for a sign that sizes change, and compile for
    # any; and of many layers it would refuse the last.
    torch.compiler.reset()
    step = LayerStep(layer, watch.rank, watch.world, watch.device)
    sizes = {name: value for name, value in vars(layer).items() if name != "name"}
    shape = {"layer": layer.name, **sizes, "world": watch.world}
    runners: dict[str, Runner] = {}
    figures: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        forward, figures[way], why = _proven(way, step, watch)
        if forward is None:
            yield {**shape, "way": way, **figures[way], "note": why}
        else:
            runners[way] = Runner(partial(step.run, forward), context=WAYS[way].context)
    step.fill(0)
    rest = max(seconds - (time.monotonic() - began), 0.0) / len(settings.modes)
    for mode in settings.modes:
        series = watch.time(runners, seconds=rest, most=settings.rounds, mode=mode)
        times = pd.DataFrame(series)
        found = spread(times)
        found["speedup"] = over(fastest(times, COLLECTIVES), times)
        found["vs_pytorch"] = over(times.get(ASYNC_TP), times)
        for way, own in found.to_dict("index").items():
            timed = {"mode": mode, "way": way, "status": "ok", "rounds": len(times)}
            yield {**shape, **timed, **own, **figures[way]}


def _proven(
    way: str, step: LayerStep, watch: Stopwatch
) -> tuple[Forward | None, dict[str, Any], str]:
    """A way that agrees with the first one, and what was seen; None if it does not, and why."""
    reference = WAYS[COLLECTIVES[0]].forward(step.layer, watch.group)

    def action() -> tuple[Forward, float, int]:
        ours, error, extra = WAYS[way].forward(step.layer, watch.group), 0.0, 0
        for turn in range(CHECKS):
            step.fill(turn + 1)
            wanted = step.results(reference)
            with WAYS[way].context():
                error = max(error, difference(step.results(ours), wanted))
                del wanted
                _, extra = peak_bytes(partial(step.run, ours), watch.device)
            if way == ASYNC_TP:  # what is not PyTorch's own memory, and is kept
                extra += pytorch_workspace_bytes(watch.group)
            elif way not in COLLECTIVES:
                extra += ficco.memory(watch.group)
        require(WAYS[way].calls, partial(step.run, ours))
        return ours, error, extra

    value, why = watch.together(action, fatal=FATAL)
    if value is None:
        status = "skipped" if why.startswith("NotImplementedError") else "failed"
        return None, {"status": status}, why
    forward, *mine = value
    error, extra = map(max, zip(*watch.gather(mine), strict=True))
    limit = TOLERANCE[step.layer.dtype]
    if error > limit:
        return None, {"status": "wrong", "error": error}, f"differs by {error:.2g} of {limit:.2g}"
    on_gpu = watch.device.type == "cuda"
    return forward, {"error": error, "extra_bytes": float(extra) if on_gpu else math.nan}, ""


def require(calls: Sequence[str], step: Callable[[], Any]) -> None:
    """Raise if a step does not call an operator that is named after each of these."""
    if not calls:
        return
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    names = {event.key for event in seen.key_averages()}
    for call in calls:
        if not any(call in name for name in names):
            raise RuntimeError(f"a step does not call {call}")


def report(rows: pd.DataFrame, about: dict[str, Any], name: str) -> str:
    """The rows as Markdown."""
    parts = [f"# {name}", about_table(about), HOW]
    for mode, found in rows[rows["mode"] != ""].groupby("mode", sort=False):
        text = found.astype(str)
        sizes = text[["hidden", "columns", "inner"]].agg(", ".join, axis=1)
        columns = {
            "layer": text["layer"] + ": " + text["tokens"] + " tokens, " + sizes,
            "way": text["way"],
            "ms": cells(found["ms"], ".3f"),
            "x collectives": cells(found["speedup"]),
            "x Async TP": cells(found["vs_pytorch"]),
            "extra MiB": cells(found["extra_bytes"] / 2**20, ".0f"),
            "differs by": cells(found["error"], ".1e"),
        }
        table = pd.DataFrame(columns)
        parts += [f"## {mode.capitalize()}: {MODE_WORDS[mode]}", markdown(list(table), table)]
    missing = rows[rows["note"] != ""]
    if len(missing):
        names = ("way", "layer", "status", "note")
        texts = missing[list(names)].itertuples(index=False)
        lines = [f"- {way} of {layer}: {status}: {note}" for way, layer, status, note in texts]
        parts += ["## Not measured", "\n".join(lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


HOW = (
    "A step is forward and backward of a column-parallel and a row-parallel product with sharded "
    "sequences between layers (hidden width, columns of the first product and of what the second "
    "multiplies, on all ranks together). All ways run in shuffled order in every round; a round's "
    "time is that of its slowest rank, ratios are medians over the rounds. collectives: those of "
    "the vendor's library through autograd, with the gathered activation kept, gathered again "
    "beside products in backward, or under `torch.compile`, which fuses what stands between the "
    "products, as it does for Async TP and for `ficco, compiled`; ratios are against the fastest "
    "of the three. Before it is timed every way must agree with the first in result and "
    "gradients, within what rounding explains, and must be seen to call the fused operators that "
    "it is named after."
)
