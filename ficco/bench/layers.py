"""Steps of tensor-parallel layers, forward and backward: ficco compared with the collectives.

A layer is a column-parallel product and the row-parallel one that follows. Between two steps the
sequence is sharded, so that the first gathers it and the second scatters its sums; backward the
second gathers and the first scatters. What stands between the products in a model is an activation
here (``mlp``), or nothing (``attention``: the queries go on, attention itself is not timed).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

import ficco
from ficco.bench.about import RunSettings
from ficco.bench.calls import Runner
from ficco.bench.frames import LAYERS, append
from ficco.bench.measure import peak_bytes, pytorch_workspace_bytes
from ficco.bench.report import MODE_WORDS, about_table
from ficco.bench.series import Stopwatch
from ficco.bench.stats import fastest, over, spread
from ficco.bench.tables import cells, markdown
from ficco.bench.ways import ASYNC_TP, COLLECTIVES, WAYS, Forward, Layer
from ficco.errors import FiccoError
from ficco.launch import local_device

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
        layer, world = self.layer, self.world

        def empty(rows: int, cols: int) -> torch.Tensor:
            dtype = getattr(torch, layer.dtype)
            return torch.empty(rows, cols, dtype=dtype, device=self.device)

        self.x = empty(layer.tokens // world, layer.hidden).requires_grad_()
        self.first = empty(layer.columns // world, layer.hidden).requires_grad_()
        self.second = empty(layer.hidden, layer.inner // world).requires_grad_()
        self.grad = empty(layer.tokens // world, layer.hidden)

    @property
    def operands(self) -> Tensors:
        return self.x, self.first, self.second

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Normal data of unit variance, other data on every rank."""
        generator = torch.Generator(self.device)
        generator.manual_seed(seed * self.world + self.rank)
        for tensor in (*self.operands, self.grad):
            tensor.normal_(generator=generator)
        self.first.mul_(self.layer.hidden**-0.5)
        self.second.mul_(self.layer.inner**-0.5)

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
    group = dist.group.WORLD
    assert group is not None
    watch = Stopwatch(group, local_device(settings.device))
    rows: list[pd.DataFrame] = []
    began = time.monotonic()
    if watch.rank == 0:
        settings.write_description(watch.world)
    for number, layer in enumerate(settings.layers):
        left = settings.seconds - (time.monotonic() - began)
        share = left / (len(settings.layers) - number)
        rows.append(LAYERS.frame(_layer(layer, watch, settings, share)))
        if watch.rank == 0:
            append(settings.csv, rows[-1])
        watch.release()
    watch.close()
    return pd.concat(rows, ignore_index=True) if watch.rank == 0 else None


def _layer(
    layer: Layer, watch: Stopwatch, settings: LayerSettings, seconds: float
) -> Iterator[dict[str, Any]]:
    """The rows of a layer, as columns of ``ficco.bench.frames.LAYERS``."""
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
        times = pd.DataFrame({way: one.times for way, one in series.items()})
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
                extra += _symmetric_bytes(way, watch.group)
        require(WAYS[way].calls, partial(step.run, ours))
        return ours, error, extra

    # After one of ficco's own errors peers may be stuck: there is no way on.
    value, why = watch.together(action, fatal=(FiccoError,))
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


def _symmetric_bytes(way: str, group: ProcessGroup) -> int:
    """What a way takes besides PyTorch's own memory, and keeps."""
    if way == ASYNC_TP:
        return pytorch_workspace_bytes(group)
    return 0 if way in COLLECTIVES else ficco.memory(group)


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
