"""Layers of experts: ficco compared with the collectives and the library's products in turn.

What users do today is an all-to-all, grouped products and an all-to-all back. It is timed with the
same blocks of a fixed capacity as ficco's, and with exactly the rows that there are, whose numbers
the host learns first, as torchtitan does it. The routes are such that no token is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import ProcessGroup

import ficco
from ficco.bench.calls import Runner
from ficco.bench.frames import EXPERTS, RunSettings
from ficco.bench.report import MODE_WORDS, about_table
from ficco.bench.series import Stopwatch
from ficco.bench.stats import fastest, over, spread
from ficco.bench.tables import cells, markdown
from ficco.bench.verify import FATAL
from ficco.launch import local_device
from ficco.ops.experts import spread as spread_rows
from ficco.ops.experts import weighted_sum


@dataclass(frozen=True)
class ExpertCase:
    """A layer.

    Attributes:
        name: how reports call it.
        experts: number of all experts.
        tokens: rows of each rank.
        k: columns of the tokens and of the result.
        inner: columns between the products, on which there is a gate, too.
    """

    name: str
    experts: int
    tokens: int
    k: int
    inner: int
    top_k: int = 2
    dtype: str = "bfloat16"


#: Mixtral's experts, and as many small ones as DeepSeek-V2-Lite has, with more tokens or fewer.
SHAPES = {
    "cuda": tuple(
        ExpertCase(f"{experts} experts", experts, tokens, 4096, inner)
        for experts, inner in ((8, 14336), (64, 1408))
        for tokens in (4096, 16384)
    ),
    "cpu": (
        ExpertCase("8 experts", 8, 256, 64, 128, dtype="float32"),
        ExpertCase("16 experts", 16, 64, 64, 32, dtype="float32"),
    ),
}


@dataclass
class ExpertData:
    """What one rank has of a layer."""

    case: ExpertCase
    group: ProcessGroup
    device: torch.device

    def __post_init__(self) -> None:
        case, world = self.case, self.group.size()
        dtype, each = getattr(torch, case.dtype), case.experts // world
        shapes = (
            (case.tokens, case.k),
            (each, case.k, 2 * case.inner),
            (each, case.inner, case.k),
        )
        self.tokens, self.up, self.down = (
            torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes
        )
        self.activation = "silu"

    @torch.no_grad()
    def fill(self, seed: int, exact: bool = False) -> None:
        """Normal data, or small whole numbers without a smooth function, of which all ways make
        exactly the same; and routes that are spread evenly. Other ones on every rank."""
        case, generator = self.case, torch.Generator(self.device)
        generator.manual_seed(seed * self.group.size() + self.group.rank())
        self.activation = "relu" if exact else "silu"
        for tensor, fan in ((self.tokens, 1), (self.up, case.k), (self.down, case.inner)):
            if exact:
                tensor.random_(-1, 2, generator=generator)
            else:
                tensor.normal_(generator=generator).mul_(fan**-0.5)
        scores = torch.rand(case.tokens, case.experts, device=self.device, generator=generator)
        self.weights, self.indices = scores.topk(case.top_k)
        self.capacity = ficco.route(self.indices, case.experts, group=self.group).capacity

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the second product multiplies."""
        gate, up = hidden.chunk(2, -1)
        active: torch.Tensor = getattr(F, self.activation)(gate) * up
        return active


def _grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The products of rows with the matrices of their experts, whose last rows are given."""
    grouped: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
    result: torch.Tensor = grouped(rows, weights, offs=ends)
    return result


def by_blocks(data: ExpertData) -> torch.Tensor:
    """One after the other, with blocks of a fixed capacity."""
    world, each = data.group.size(), data.up.shape[0]
    routing = ficco.route(data.indices, data.case.experts, capacity=data.capacity)
    slots, rows = routing.slots(), data.case.experts * data.capacity
    sent = spread_rows(data.tokens, slots, rows)
    moved = torch.empty_like(sent)
    dist.all_to_all_single(moved, sent, group=data.group)

    def turned(blocks: torch.Tensor, first: int, second: int) -> torch.Tensor:
        shape = first, second, data.capacity, blocks.shape[-1]
        return blocks.view(shape).transpose(0, 1).contiguous()

    by_expert = turned(moved, world, each).view(each, -1, data.case.k)
    made = torch.bmm(data.between(torch.bmm(by_expert, data.up)), data.down)
    back = made.new_zeros(rows + 1, data.case.k)
    dist.all_to_all_single(back[:-1], turned(made, each, world).view(rows, -1), group=data.group)
    return weighted_sum(back, slots, data.weights, data.tokens.dtype)


def by_rows(data: ExpertData) -> torch.Tensor:
    """One after the other, with the rows that there are."""
    case, world, each = data.case, data.group.size(), data.up.shape[0]
    choices = data.indices.reshape(-1)
    order = choices.argsort(stable=True)
    counts = torch.zeros_like(choices[:0].new_zeros(case.experts)).scatter_add_(
        0, choices, torch.ones_like(choices)
    )
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=data.group)
    by_source = theirs.view(world, each)
    sent = counts.view(world, each).sum(1).tolist()  # the host waits for the device
    received = by_source.sum(1).tolist()
    rows = data.tokens[order // case.top_k]
    moved = rows.new_empty(sum(received), case.k)
    dist.all_to_all_single(moved, rows, received, sent, group=data.group)
    experts = torch.arange(each, device=rows.device).repeat(world)
    by_expert = experts.repeat_interleave(theirs, output_size=len(moved)).argsort(stable=True)
    ends = by_source.sum(0).cumsum(0).to(torch.int32)
    made = _grouped(data.between(_grouped(moved[by_expert], data.up, ends)), data.down, ends)
    home = torch.empty_like(made)
    home[by_expert] = made
    back = torch.empty_like(rows)
    dist.all_to_all_single(back, home, sent, received, group=data.group)
    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(order), device=order.device)
    slots = slots.view(data.indices.shape)
    return weighted_sum(back, slots, data.weights, data.tokens.dtype)


def by_ficco(data: ExpertData, schedule: str) -> torch.Tensor:
    return ficco.experts(
        data.tokens,
        data.indices,
        data.weights,
        data.up,
        data.down,
        capacity=data.capacity,
        activation=data.activation,
        group=data.group,
        schedule=schedule,
    )


#: The first is what the others must agree with.
WAYS: dict[str, Callable[[ExpertData], torch.Tensor]] = {
    "collectives, blocks": by_blocks,
    "collectives, exact rows": by_rows,
    "ficco": partial(by_ficco, schedule="auto"),
    "ficco, serial": partial(by_ficco, schedule="serial"),
    "ficco, shard-overlap": partial(by_ficco, schedule="shard-overlap"),
}
COLLECTIVES = tuple(way for way in WAYS if way.startswith("collectives"))


@dataclass(frozen=True, kw_only=True)
class ExpertSettings(RunSettings):
    """What is timed."""

    cases: tuple[ExpertCase, ...]
    modes: tuple[str, ...]


@torch.no_grad()
def experts(settings: ExpertSettings) -> pd.DataFrame | None:
    """Measure; collective. The rows on rank 0, None elsewhere."""
    watch = Stopwatch(dist.group.WORLD, local_device(settings.device))
    end = time.monotonic() + settings.seconds

    def steps() -> Iterator[list[dict[str, Any]]]:
        for number, case in enumerate(settings.cases):
            share = (end - time.monotonic()) / (len(settings.cases) - number)
            yield list(_case(case, watch, settings, share))
            watch.free()

    rows = settings.record(EXPERTS, steps(), watch.rank, watch.world)
    watch.close()
    return rows


def _case(
    case: ExpertCase, watch: Stopwatch, settings: ExpertSettings, seconds: float
) -> Iterator[dict[str, Any]]:
    began = time.monotonic()
    shape: dict[str, Any] = {"case": case.name, "world": watch.world}
    shape |= {name: value for name, value in vars(case).items() if name != "name"}
    if case.experts % watch.world:
        note = f"{case.experts} experts for {watch.world} ranks"
        yield {**shape, "status": "skipped", "note": note}
        return
    data = ExpertData(case, watch.group, watch.device)
    runners: dict[str, Runner] = {}
    for way, call in WAYS.items():
        right, why = watch.together(partial(proven, call, data), fatal=FATAL)
        if right is None:
            yield {**shape, "way": way, "status": "failed", "note": why}
        elif wrong := [rank for rank, one in enumerate(watch.gather(right)) if not one]:
            note = f"wrong result on ranks {wrong}"
            yield {**shape, "way": way, "status": "wrong", "note": note}
        else:
            runners[way] = Runner(partial(call, data))
    data.fill(0)
    shape["capacity"] = data.capacity
    rest = max(seconds - (time.monotonic() - began), 0.0) / len(settings.modes)
    for mode in settings.modes:
        series = watch.time(runners, seconds=rest, most=settings.rounds, mode=mode)
        times = pd.DataFrame(series)
        found = spread(times)
        found["speedup"] = over(fastest(times, COLLECTIVES), times)
        for way, own in found.to_dict("index").items():
            timed = {"mode": mode, "way": way, "status": "ok", "rounds": len(times)}
            yield {**shape, **timed, **own}


def proven(call: Callable[[ExpertData], torch.Tensor], data: ExpertData) -> bool:
    """Whether a way makes of whole numbers what the first one does."""
    right = True
    for seed in (1, 2):
        data.fill(seed, exact=True)
        right &= torch.equal(call(data), WAYS[COLLECTIVES[0]](data))
    return right


def report(rows: pd.DataFrame, about: dict[str, Any], name: str) -> str:
    """The rows as Markdown."""
    parts = [f"# {name}", about_table(about), HOW]
    for mode, found in rows[rows["mode"] != ""].groupby("mode", sort=False):
        text = found.astype(str)
        columns = {
            "layer": text["experts"] + " experts, top " + text["top_k"],
            "tokens a rank": text["tokens"],
            "k, inner": text["k"] + ", " + text["inner"],
            "capacity": text["capacity"],
            "way": text["way"],
            "ms": cells(found["ms"], ".3f"),
            "x collectives": cells(found["speedup"]),
        }
        table = pd.DataFrame(columns)
        parts += [f"## {mode.capitalize()}: {MODE_WORDS[mode]}", markdown(list(table), table)]
    missing = rows[rows["note"] != ""]
    if len(missing):
        texts = missing[["way", "case", "status", "note"]].itertuples(index=False)
        lines = [f"- {way} of {case}: {status}: {note}" for way, case, status, note in texts]
        parts += ["## Not measured", "\n".join(lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


HOW = (
    "Forward passes of a layer of experts with gates, tokens spread evenly, none dropped. All ways "
    "run in shuffled order in every round; a round's time is that of its slowest rank, ratios are "
    "medians over the rounds, against the faster of the two by collectives: all-to-all, products "
    "and all-to-all in turn, with the same blocks (`bmm`), or with exactly the rows that there are "
    "(`grouped_mm`), for which the host waits. Before it is timed every way must equal the first, "
    "exactly, on whole numbers."
)
