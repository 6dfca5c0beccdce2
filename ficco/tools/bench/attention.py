"""Workload: attention with one right answer, by ficco and by other ways.

The baselines gather keys and values, or exchange heads, by the library's collectives and attend by
the library's kernels. PyTorch's ``context_parallel`` is timed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import ficco
from ficco.accelerator import gpu
from ficco.compute.attention import Heads, Merge, attention, by_heads, merge
from ficco.compute.program import Part
from ficco.hip_kernels.launch import Kernels
from ficco.problems.attention import AttentionProblem, HeadsProblem
from ficco.problems.mask import Rectangle, Segment
from ficco.problems.sizes import problem_of
from ficco.runtime.workspace import workspace_of
from ficco.tools.bench.frames import ATTENTION
from ficco.tools.bench.harness import COMPUTED, MOVED, Subject, Variant, Workload
from ficco.tools.bench.measure import Stopwatch, all_gather

#: The scale of scores: codes that differ in a bit have no weight beside equal ones, in float32.
SCALE = 64.0
#: Number of distinct values, all exact in every dtype.
VALUES = 251


class AttentionOperands(NamedTuple):
    """A rank's queries, keys and values, and the expected result.

    Attributes:
        kv: [S/W, 2, batch, kv_heads, size]; k and v are views of it, as after one projection. None
            if k and v are separate.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    wanted: torch.Tensor
    kv: torch.Tensor | None = None

    def joined(self) -> AttentionOperands:
        """The same with k and v as views of one matrix, so that nobody has to pack them."""
        kv = torch.stack([one.permute(2, 0, 1, 3) for one in (self.k, self.v)], 1)
        k, v = (by_heads(kv[:, i]) for i in range(2))
        return AttentionOperands(self.q, k, v, self.wanted, kv)


def exact_operands(
    problem: AttentionProblem, rank: int, iteration: int, device: torch.device
) -> AttentionOperands:
    """Operands whose attention is exact: a query matches only the key at half its position. Bits of
    a position are coded as 1 and -1, so that scores are whole numbers and the result is a value, in
    any dtype."""
    dtype = getattr(torch, problem.dtype)
    at = torch.cat([torch.arange(p, p + n) for _, p, n in problem.segments[rank]]).to(device)
    bits = torch.arange(problem.size, device=device)

    def codes(positions: torch.Tensor, heads: int) -> torch.Tensor:
        spelt = (positions[:, None] >> bits.clamp(max=62) & 1) * 2 - 1
        spelt = spelt.where(bits < problem.length.bit_length(), 0).to(dtype)
        return spelt.expand(problem.batch, heads, -1, -1)

    def values(positions: torch.Tensor, heads: int) -> torch.Tensor:
        head = torch.arange(heads, device=device)[:, None] // (heads // problem.kv_heads)
        each = (7 * positions + 3 * head + iteration) % VALUES
        whole = each.to(dtype)[None, :, :, None]
        return whole.expand(problem.batch, heads, -1, problem.size).contiguous()

    q, k = codes(at // 2, problem.heads), codes(at, problem.kv_heads)
    v, wanted = values(at, problem.kv_heads), values(at // 2, problem.heads)
    return AttentionOperands(q.contiguous(), k.contiguous(), v, wanted)


# By collectives.


def attended(heads: Heads, rectangles: Sequence[Rectangle], scale: float) -> list[Part]:
    """Results of the library's kernels, a part for each rectangle."""
    (q, k, v), parts = heads, []
    for one in rectangles:
        rows, keys = slice(one.q, one.q_stop), slice(one.k, one.k_stop)
        own = Heads(q[:, :, rows], k[:, :, keys], v[:, :, keys])
        parts.append(Part(one.q, one.q_stop, *attention(own, one, scale)))
    return parts


def gather(problem: AttentionProblem, operands: AttentionOperands, group: ProcessGroup) -> Any:
    """Keys and values of all ranks, as their shards follow each other: [S, 2, batch, heads,
    size]."""
    mine = operands.kv
    assert mine is not None
    whole = mine.new_empty(problem.length, *mine.shape[1:])
    all_gather(whole, mine, group=group)
    return whole


def gather_then_attend(
    problem: AttentionProblem,
    operands: AttentionOperands,
    group: ProcessGroup,
    scale: float,
    combine: Merge = merge,
) -> torch.Tensor:
    """Gather keys and values by the library's collective, then attend by its kernels."""
    whole, segments = gather(problem, operands, group), problem.segments
    firsts = {part.position: rank * problem.rows + part.row for rank, mine in enumerate(segments)
              for part in mine}  # fmt: skip
    lengths = {part.position: part.length for mine in segments for part in mine}
    in_order = [whole[firsts[at] : firsts[at] + lengths[at]] for at in sorted(firsts)]
    whole = whole if list(firsts) == sorted(firsts) else torch.cat(in_order)
    heads = Heads(operands.q, *(by_heads(whole[:, i]) for i in range(2)))
    parts = attended(heads, rectangles_of(problem, group.rank()), scale)
    out = torch.empty_like(operands.q)
    combine(out, None, parts)
    return out


def rectangles_of(problem: AttentionProblem, rank: int) -> tuple[Rectangle, ...]:
    """Rectangles of a rank's queries and all keys, in the order of the sequence."""
    whole = list(problem.mask.segments([Segment(0, 0, problem.length)]))
    return problem.mask.rectangles(problem.segments[rank], whole)


def exchanged(rows: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Exchange [W, ...] by the library's all-to-all: a rank receives its part from every rank."""
    moved = torch.empty_like(rows)
    dist.all_to_all_single(moved, rows, group=group)
    return moved


def to_heads(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """[batch, heads, S/W, size] as [batch, heads/W, S, size]."""
    apart = tensor.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    return exchanged(apart, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def to_positions(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The inverse of :func:`to_heads`."""
    apart = tensor.unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3, 4).contiguous()
    return exchanged(apart, group).transpose(0, 1).flatten(1, 2)


@contextmanager
def nothing_merged() -> Iterator[None]:
    """Skip the merge of attention parts in ficco's calls, to time the merge."""
    with (
        mock.patch.object(Kernels, "merge", lambda *_: None),
        mock.patch("ficco.dma.gpu.merge", lambda *_: None),
    ):
        yield


# PyTorch's.


@contextmanager
def context_parallel(
    group: ProcessGroup, device: torch.device, backend: SDPBackend, rotation: str
) -> Iterator[None]:
    """Make PyTorch's attention context-parallel, with the head-tail placement."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel as enabled
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotation)
    mesh = DeviceMesh.from_group(group, device.type)
    shared = torch.zeros(1, 2 * group.size(), device=device)  # it takes at least one buffer
    with enabled(mesh, buffers=[shared], buffer_seq_dims=[1]), sdpa_kernel(backend):
        yield


#: Kernels and key rotations of PyTorch's ``context_parallel``.
BACKENDS = {
    name.partition("_")[0].lower(): backend
    for name, backend in SDPBackend.__members__.items()
    if name.endswith("_ATTENTION") and not name.startswith("EFFICIENT")
}
ROTATIONS = {"all-gather": "allgather", "all-to-all": "alltoall"}


# A case.


@dataclass(frozen=True)
class AttentionCase:
    """Attention.

    Attributes:
        name: how reports call it.
        sequence: positions of all ranks.
    """

    name: str
    operator: str
    sequence: int
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    causal: bool = True
    dtype: str = "bfloat16"

    @property
    def placement(self) -> str:
        return "head-tail" if self.operator == GATHERS and self.causal else "ranks"


GATHERS, BY_HEADS = "all_gather_attention", "ulysses_attention"

#: Heads of Llama 3 8B.
SHAPES = {
    "cuda": tuple(
        AttentionCase(f"{thousands}k", operator, thousands << 10)
        for operator in (GATHERS, BY_HEADS)
        for thousands in (16, 64, 128)
    ),
    "cpu": tuple(
        AttentionCase("256", operator, 256, 8, 4, 16, dtype="float32")
        for operator in (GATHERS, BY_HEADS)
    ),
}

#: The schedules that are benched unless others are named.
SCHEDULES = {
    GATHERS: (
        *("auto", "serial", "growing", "growing:pull", "shard-overlap", "ring"),
        *("hetero-fused-1d:pieces=2", "growing:compute=2", "growing:tail=4,compute=2"),
    ),
    BY_HEADS: (
        *("auto", "serial", "uniform-fused-1d:pieces=2,compute=2"),
        *(f"uniform-fused-1d:pieces={pieces}" for pieces in (2, 4, 8)),
    ),
}

#: Kernels of libraries' attention, by parts of their names.
KERNELS = ("flash", "fmha", "sdpa", "attention")


class AttentionData(Workload):
    """A case on one rank."""

    def __init__(
        self, case: AttentionCase, watch: Stopwatch, schedules: Sequence[str] = ()
    ) -> None:
        super().__init__(case, watch, schedules)
        self.scale = 0.0
        sizes = {name: getattr(case, name) for name in
                 ("sequence", "heads", "kv_heads", "head_size", "causal", "placement")}  # fmt: skip
        self.base = base = problem_of(GATHERS, watch.world, case.dtype, sizes)
        self.problem = base if case.operator == GATHERS else HeadsProblem(base)
        self.fill(0)

    def fill(self, seed: int, exact: bool = False) -> None:
        self.scale = SCALE if exact else self.base.size**-0.5
        self.operands = self._exact(seed) if exact else self._random(seed)
        if self.case.operator == GATHERS:
            self.operands = self.operands.joined()

    def _exact(self, seed: int) -> AttentionOperands:
        return exact_operands(self.base, self.watch.rank, seed, self.watch.device)

    def _random(self, seed: int) -> AttentionOperands:
        base, generator = self.base, self.generator(seed)

        def normal(heads: int) -> torch.Tensor:
            shape, dtype = (base.batch, heads, base.rows, base.size), getattr(torch, base.dtype)
            return torch.empty(shape, dtype=dtype, device=self.device).normal_(generator=generator)

        q, k, v = normal(base.heads), normal(base.kv_heads), normal(base.kv_heads)
        return AttentionOperands(q, k, v, q)

    def right(self, result: torch.Tensor) -> bool:
        return torch.equal(result, self.operands.wanted)

    def variants(self) -> dict[str, Variant]:
        ours = self.by_ficco(self._by_ficco, SCHEDULES[self.case.operator])
        alone = {"attention": Variant(self._alone(), COMPUTED)}
        if self.case.operator == BY_HEADS:
            return {**alone, **self._by_heads(), **ours}
        if self.watch.on_gpu and "auto" in ours:
            call = ours["auto"].call
            ours |= {"auto, nothing merged": Variant(call, "unmerged", context=nothing_merged)}
        return {**alone, **self._gathered(), **ours}

    def _gathered(self) -> dict[str, Variant]:
        base, group, device = self.base, self.watch.group, self.watch.device

        def by_collective() -> torch.Tensor:
            return gather_then_attend(base, self.operands, group, self.scale, self._merge())

        def by_pytorch() -> Any:
            how: Any = {"is_causal": base.causal, "scale": self.scale}
            how["enable_gqa"] = base.heads != base.kv_heads
            return F.scaled_dot_product_attention(*self.operands[:3], **how)

        lacks = "" if self.watch.on_gpu else "PyTorch has it on GPUs only"
        pytorch = {
            f"context_parallel, {kernels}, {rotation}": Variant(
                by_pytorch,
                needs_peers=True,
                context=partial(context_parallel, group, device, backend, ROTATIONS[rotation]),
                lacks=lacks,
            )
            for (kernels, backend), rotation in product(BACKENDS.items(), ROTATIONS)
        }
        moved = Variant(lambda: gather(base, self.operands, group), MOVED, needs_peers=True)
        return {
            "all-gather": moved,
            "pytorch-serial": Variant(by_collective, baseline=True, needs_peers=True),
            **pytorch,
        }

    def _merge(self) -> Any:
        """The merge of ficco's engine, as in ficco's calls."""
        engine = workspace_of(self.watch.group, self.watch.device).engine
        return getattr(engine, "merge", merge)

    def _by_heads(self) -> dict[str, Variant]:
        base, group = self.base, self.watch.group

        def exchanges() -> torch.Tensor:
            q, _, _ = [to_heads(one, group) for one in self.operands[:3]]
            return to_positions(q, group)

        def by_collectives() -> torch.Tensor:
            heads = Heads(*(to_heads(one, group) for one in self.operands[:3]))
            out, _ = attention(heads, self._whole, self.scale)
            return to_positions(out, group)

        lacks = f"{base.kv_heads} heads of keys for {base.world} ranks" if (
            base.kv_heads % base.world) else ""  # fmt: skip
        return {
            "all-to-alls": Variant(exchanges, MOVED, needs_peers=True, lacks=lacks),
            "pytorch-serial": Variant(by_collectives, baseline=True, needs_peers=True, lacks=lacks),
        }

    @property
    def _whole(self) -> Rectangle:
        length = self.base.length
        return Rectangle(0, length, 0, length, None, 0 if self.base.causal else None)

    def _alone(self) -> Callable[[], Any]:
        """The library's attention with all keys local, without merging."""
        base, rank = self.base, self.watch.rank
        if self.case.operator == GATHERS:
            queries, rectangles = base.heads, rectangles_of(base, rank)
            keys, rows = base.kv_heads, base.rows
        else:
            heads = HeadsProblem(base)
            queries, rectangles, rows = heads.heads, (self._whole,), base.length
            keys = heads.count("k", rank)
        like, shape = self.operands.q, (base.batch, queries, rows, base.size)
        q = like.new_empty(shape).normal_()
        kv = like.new_empty(2, base.batch, keys, base.length, base.size).normal_()
        return lambda: attended(Heads(q, kv[0], kv[1]), rectangles, base.size**-0.5)

    def _by_ficco(self, schedule: str) -> Any:
        how: Any = {"causal": self.case.causal, "scale": self.scale, "schedule": schedule}
        if self.case.operator == GATHERS:
            how["placement"] = self.case.placement
        operator: Any = getattr(ficco, self.case.operator)
        return operator(*self.operands[:3], group=self.watch.group, **how)

    def others(self, call: Callable[[], Any]) -> float:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            gpu.synchronize()
        taken = [
            (one.device_time, any(name in one.name.lower() for name in KERNELS))
            for one in seen.events() or ()
            if one.device_type.name == "CUDA" and "mem" not in one.name.lower()[:3]
        ]
        total = sum(seconds for seconds, _ in taken)
        return sum(seconds for seconds, library in taken if not library) / max(total, 1e-9)


def heads(text: pd.DataFrame) -> dict[str, pd.Series]:
    shared = text["heads"] + " (" + text["kv_heads"] + "), " + text["head_size"]
    return {
        "operator": text["operator"],
        "positions": text["sequence"],
        "heads (of keys), size": shared + text["causal"].map({"1": ", causal"}).fillna(""),
    }


ABOUT = (
    "Forward passes. Gathered keys and values are views of one matrix, as those of one projection "
    "are, so that no way has to pack them. `attention` is the library's kernels alone, with all "
    "keys local; `all-gather` and `all-to-alls` are the collectives alone. `pytorch-serial`, the "
    "baseline, is both one after the other, by the same kernels as ficco's, and by its kernel that "
    "merges. `context_parallel` is PyTorch's, by each of its kernels, with keys gathered after the "
    "first step or sent from rank to rank. Ways of ficco have the names of their schedules. "
    "`auto, nothing merged` is `auto` without the kernel that merges: the difference is the time "
    "that merging adds."
)

SUBJECT = Subject("attention", ATTENTION, AttentionData, heads, ABOUT)
