"""Workload: a layer of experts, by ficco, and by collectives and grouped products in turn.

The baseline is an all-to-all, grouped products and an all-to-all back. It is timed with blocks of
ficco's fixed capacity, and with exact row counts as in torchtitan, where the host waits for the
counts. No token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ficco
from ficco.heuristics.families import EXPERTS as EXPERTS_FAMILY
from ficco.ops.experts import weighted_sum
from ficco.problems.sizes import problem_of
from ficco.problems.specification import AnyProblem
from ficco.tools.bench.attention import exchanged
from ficco.tools.bench.frames import EXPERTS
from ficco.tools.bench.harness import COMPUTED, MOVED, Subject, Variant, Workload
from ficco.tools.bench.measure import Stopwatch

#: Rows for each expert over those that it gets in the mean, where ranks cannot tell each other how
#: many they need.
SPARE = 1.25


@dataclass(frozen=True)
class ExpertCase:
    """A layer.

    Attributes:
        name: how reports call it.
        experts: number of all experts.
        tokens: rows of each rank.
        k: columns of the tokens and of the result.
        inner: columns between the products, without the gate.
        skew: tokens choose the expert that is the i-th most popular, from 1, with a weight of
            1 / i**skew. Ranks have popular experts by turns.
        capacity: rows of each rank for each expert, once the first tokens are routed.
    """

    name: str
    experts: int
    tokens: int
    k: int
    inner: int
    top_k: int = 2
    dtype: str = "bfloat16"
    skew: float = 0.0
    capacity: int = 0


#: As many narrow experts as DeepSeek-V2-Lite has, Mixtral's, and many wide ones, with fewer tokens
#: and with more; and routes that are skewed.
SHAPES = {
    "cuda": (
        *(
            ExpertCase(f"{experts}x{inner}x{tokens}", experts, tokens, 4096, inner)
            for experts, inner in ((64, 1408), (8, 14336), (64, 14336))
            for tokens in (4096, 16384)
        ),
        ExpertCase("64x1408x4096-skewed", 64, 4096, 4096, 1408, skew=0.5),
    ),
    "cpu": (
        ExpertCase("8x128x256", 8, 256, 64, 128, dtype="float32"),
        ExpertCase("16x32x64-skewed", 16, 64, 64, 32, dtype="float32", skew=0.5),
    ),
}


class ExpertData(Workload):
    """A layer on one rank."""

    def __init__(self, case: ExpertCase, watch: Stopwatch, schedules: Sequence[str] = ()) -> None:
        super().__init__(case, watch, schedules)
        if case.experts % watch.world:
            raise ValueError(f"{case.experts} experts for {watch.world} ranks")
        if case.skew and not watch.has_peers:
            raise ValueError("skewed routes: required all ranks, which agree on a capacity")
        dtype, each = getattr(torch, case.dtype), case.experts // watch.world
        places = torch.arange(case.experts, device=self.device).view(each, watch.world)
        self.rarity = (places.t().flatten() + 1.0) ** case.skew  # by expert
        shapes = ((case.tokens, case.k), (each, case.k, 2 * case.inner), (each, case.inner, case.k))
        self.tokens, self.up, self.down = (
            torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes
        )
        self.activation, self.capacity = "silu", 0
        self.fill(0)
        self.case = replace(case, capacity=self.capacity)

    @property
    def problem(self) -> AnyProblem:  # type: ignore[override]
        sizes = {"experts": self.case.experts, "capacity": self.capacity, "k": self.case.k}
        sizes |= {"h": self.case.inner, "n": self.case.k}
        return problem_of("experts", self.group.size(), self.case.dtype, sizes)

    @torch.no_grad()
    def fill(self, seed: int, exact: bool = False) -> None:
        """Draw normal data and SiLU, or small whole numbers and ReLU, which are exact for all
        variants. Draw routes with the skew of the case. Ranks draw different data."""
        case, generator = self.case, self.generator(seed)
        self.activation = "relu" if exact else "silu"
        for tensor, fan in ((self.tokens, 1), (self.up, case.k), (self.down, case.inner)):
            if exact:
                tensor.random_(-1, 2, generator=generator)
            else:
                tensor.normal_(generator=generator).mul_(fan**-0.5)
        scores = torch.rand(case.tokens, case.experts, device=self.device, generator=generator)
        # The largest are a weighted sample without replacement (Efraimidis and Spirakis, 2006).
        self.weights, self.indices = (scores**self.rarity).topk(case.top_k)
        if self.watch.has_peers:
            self.capacity = ficco.route(self.indices, case.experts, group=self.group).capacity
        else:
            self.capacity = -(-int(SPARE * case.tokens * case.top_k) // case.experts)

    def right(self, result: torch.Tensor) -> bool:
        return torch.equal(result, by_blocks(self))

    def variants(self) -> dict[str, Variant]:
        ours = self.by_ficco(partial(by_ficco, self), ("auto", *EXPERTS_FAMILY.compared))
        collectives = {
            way: Variant(partial(call, self), baseline=True, needs_peers=True)
            for way, call in COLLECTIVES.items()
        }
        parts = {
            "products": Variant(partial(by_blocks, self, travels=False), COMPUTED),
            "all-to-alls": Variant(partial(exchanges, self), MOVED, needs_peers=True),
        }
        exact = Variant(partial(by_ficco, self, "auto", exact=True), needs_peers=True)
        return {**parts, **collectives, **ours, "auto, exact rows": exact}

    def between(self, hidden: torch.Tensor) -> Any:
        """The left operand of the second product."""
        gate, up = hidden.chunk(2, -1)
        return getattr(F, self.activation)(gate) * up


def _grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> Any:
    """Grouped products of rows with the matrices of their experts. ``ends``: end row of each
    expert."""
    grouped: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return grouped(rows, weights, offs=ends)


def by_blocks(data: ExpertData, travels: bool = True) -> torch.Tensor:
    """Exchange and multiply in turn, with blocks of a fixed capacity; without ``travels``, skip
    both exchanges."""
    world, each = data.group.size(), data.up.shape[0]
    how: Any = {"capacity": data.capacity, "group": data.group}
    slots = ficco.route(data.indices, data.case.experts, **how).slots()
    rows = data.case.experts * data.capacity
    blocks_of_rows = data.tokens.new_zeros(rows + 1, data.tokens.shape[1])
    for choice in slots.unbind(1):  # pairs without a row take the last one, which is cut off
        blocks_of_rows.index_copy_(0, choice, data.tokens)
    sent = blocks_of_rows[:-1]
    moved = exchanged(sent, data.group) if travels else sent

    def turned(blocks: torch.Tensor, first: int, second: int) -> torch.Tensor:
        shape = first, second, data.capacity, blocks.shape[-1]
        return blocks.view(shape).transpose(0, 1).contiguous()

    by_expert = turned(moved, world, each).view(each, -1, data.case.k)
    outputs = torch.bmm(data.between(torch.bmm(by_expert, data.up)), data.down)
    home, back = turned(outputs, each, world).view(rows, -1), moved.new_zeros(rows + 1, data.case.k)
    if travels:
        dist.all_to_all_single(back[:-1], home, group=data.group)
    else:
        back[:-1] = home
    return weighted_sum(back, slots, data.weights, data.tokens.dtype)


def exchanges(data: ExpertData) -> torch.Tensor:
    """Only the two exchanges of blocks."""
    rows = data.case.experts * data.capacity
    return exchanged(exchanged(data.tokens.new_empty(rows, data.case.k), data.group), data.group)


def by_rows(data: ExpertData) -> torch.Tensor:
    """Exchange and multiply in turn, with exact row counts."""
    case, world, each = data.case, data.group.size(), data.up.shape[0]
    choices = data.indices.reshape(-1)
    order = choices.argsort(stable=True)
    counts = choices.new_zeros(case.experts).scatter_add_(0, choices, torch.ones_like(choices))
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=data.group)
    by_source = arriving.view(world, each)
    sent = counts.view(world, each).sum(1).tolist()  # the host waits for the device
    received = by_source.sum(1).tolist()
    rows = data.tokens[order // case.top_k]
    moved = rows.new_empty(sum(received), case.k)
    dist.all_to_all_single(moved, rows, received, sent, group=data.group)
    experts = torch.arange(each, device=rows.device).repeat(world)
    by_expert = experts.repeat_interleave(arriving, output_size=len(moved)).argsort(stable=True)
    ends = by_source.sum(0).cumsum(0).to(torch.int32)
    outputs = _grouped(data.between(_grouped(moved[by_expert], data.up, ends)), data.down, ends)
    home = torch.empty_like(outputs)
    home[by_expert] = outputs
    back = torch.empty_like(rows)
    dist.all_to_all_single(back, home, sent, received, group=data.group)
    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(order), device=order.device)
    slots = slots.view(data.indices.shape)
    return weighted_sum(back, slots, data.weights, data.tokens.dtype)


def by_ficco(data: ExpertData, schedule: str, exact: bool = False) -> torch.Tensor:
    """Call ficco with blocks of a fixed capacity, or with exact row counts: the host then waits
    for the counts."""
    operands = data.tokens, data.indices, data.weights, data.up, data.down
    how: Any = {"activation": data.activation, "group": data.group, "schedule": schedule}
    return ficco.experts(*operands, capacity=None if exact else data.capacity, **how)


#: The baselines. The first is the reference of the others.
COLLECTIVES: dict[str, Callable[[ExpertData], torch.Tensor]] = {
    "pytorch-serial, blocks": by_blocks,
    "pytorch-serial, exact rows": by_rows,
}


def heads(text: pd.DataFrame) -> dict[str, pd.Series]:
    skewed = text["skew"].map(lambda skew: f", skew {skew}" if float(skew) else "")
    return {
        "layer": text["experts"] + " experts, top " + text["top_k"] + skewed,
        "tokens a rank": text["tokens"],
        "k, inner": text["k"] + ", " + text["inner"],
        "capacity": text["capacity"],
    }


ABOUT = (
    "Forward passes of a layer of experts with gates, tokens spread evenly; with a *skew* s tokens "
    "choose the i-th most popular expert with a weight of 1 / i**s. The baseline is the faster of "
    "two `pytorch-serial`: all-to-all, products and all-to-all in turn, with the same blocks "
    "(`bmm`) or with exact row counts (`grouped_mm`), for which the host waits; in a replay it is "
    "ficco's `serial`. Ways of ficco have the names of their schedules. `products` is the first "
    "baseline without exchanges, `all-to-alls` are the exchanges alone. The other operations of "
    "both are PyTorch's: moves of tokens to their rows, the activation and the sums. Ficco does "
    "them in fewer passes over memory, so that shares of this ideal can be above 1."
)

SUBJECT = Subject("experts", EXPERTS, ExpertData, heads, ABOUT)
