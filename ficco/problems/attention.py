"""What one call of attention asks, equal on every rank of the group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ficco.errors import InvalidArgument
from ficco.problems.mask import PLACEMENTS, Mask, Rectangle, Segment, Span, merged
from ficco.problems.products import Problem, digest
from ficco.problems.specification import (
    MERGE,
    AnyProblem,
    Attention,
    Buffer,
    Exchange,
    Specification,
    check_name,
)


@dataclass(frozen=True)
class KeyGather(Problem):
    """How rows of KV travel: an all-gather of which each rank gets only what it attends to.

    Attributes:
        spans: ``spans[i][j]``: first and last row, exclusive, of rank i's that rank j gets: for
            its own host, if it gets them from another one.
    """

    spans: tuple[tuple[Span, ...], ...] = ()

    @property
    def same_blocks(self) -> bool:
        return False

    @property
    def masked(self) -> bool:
        return True

    def block(self, src: int, dst: int) -> int:
        first, last = self.spans[src][dst]
        return last - first

    def leaves(self, src: int, dst: int) -> int:
        return self.spans[src][dst][0]

    def lands(self, src: int, dst: int) -> int:
        return self._landings[dst][src]

    def number(self, rank: int, owner: int, row: int) -> int:
        """The number where it lands at a rank of a row of another one's, or of its own."""
        return self.lands(owner, rank) + row - self.leaves(owner, rank)

    def product_rows(self, rank: int) -> int:
        return self._landings[rank][self.world]

    @cached_property
    def _landings(self) -> list[list[int]]:
        ranks = range(self.world)
        return [[0, *accumulate(self.block(src, dst) for src in ranks)] for dst in ranks]


@dataclass(frozen=True)
class AttentionProblem(AnyProblem):
    """Attention of every rank's queries to the keys and values of all ranks.

    Attributes:
        world: number of ranks.
        rows: positions that a rank holds.
        batch, heads, size: of the queries, size of a head.
        kv_heads: heads of keys and values, a divisor of ``heads``.
        dtype: its name.
        causal, window, cu_seqlens: see :class:`Mask`.
        placement: one of :data:`ficco.problems.mask.PLACEMENTS`.
        scale: by what scores are multiplied; None: 1 / sqrt(size).
        symmetric: keys and values lie in symmetric memory as they travel.
        keeps: the rows of KV that a rank gets, its own among them, are a second result.
        ring: rows go from each rank to the next one, so that every rank gets all.
        hosts: how many hosts the ranks are on, each with as many, which follow each other.
        backward: whether it is the gradient.
        kept: of a gradient, the rows of KV that a rank has got are an operand.

    Raises:
        ValueError: a value is wrong, or they do not fit together.
        NotImplementedError: the dtype is not served.
    """

    world: int
    rows: int
    batch: int
    heads: int
    kv_heads: int
    size: int
    dtype: str
    causal: bool = False
    window: int | None = None
    cu_seqlens: tuple[int, ...] = ()
    placement: str = "ranks"
    scale: float | None = None
    symmetric: bool = False
    keeps: bool = False
    ring: bool = False
    hosts: int = 1
    backward: bool = False
    kept: bool = False

    def __post_init__(self) -> None:
        sizes = "world", "batch", "heads", "kv_heads", "size"
        self._check(self.dtype, 1, ((name, getattr(self, name)) for name in sizes))
        if self.heads % self.kv_heads:
            raise InvalidArgument(
                "kv_heads",
                f"required a number of heads that divides the {self.heads} of q, got "
                f"{self.kv_heads}; repeat them",
            )
        check_name("placement", self.placement, PLACEMENTS)
        if self.placement == "head-tail" and self.rows % 2:
            raise InvalidArgument(
                "q",
                f"required an even number of positions on every rank for head-tail, got "
                f"{self.rows}; pad the sequence",
            )
        if self.window is not None and not self.causal:
            raise InvalidArgument(
                "window", "required causal=True with a window, got causal=False; pass both"
            )
        if self.window is not None and self.window < 0:
            raise InvalidArgument("window", f"required at least 0, got {self.window}")
        if self.cu_seqlens:
            self._check_packed(self.cu_seqlens)

    def _check_packed(self, bounds: tuple[int, ...]) -> None:
        if bounds[0] or list(bounds) != sorted(bounds) or bounds[-1] != self.length:
            raise InvalidArgument(
                "cu_seqlens",
                f"required rising positions from 0 to the {self.length} of the whole sequence, "
                f"got {_brief(bounds)}",
            )
        if self.batch > 1:
            raise InvalidArgument(
                "cu_seqlens",
                f"required a batch of 1 with packed sequences, got {self.batch}; pack them all",
            )

    @cached_property
    def operator(self) -> str:
        return "all_gather_attention" + "_backward" * self.backward

    def gradient(self, kept: bool = False) -> AttentionProblem:
        """The gradients of the call."""
        return replace(self, backward=True, kept=kept)

    @property
    def length(self) -> int:
        """Positions of the whole sequence."""
        return self.world * self.rows

    @property
    def q_cols(self) -> int:
        """Columns of Q and of the result as matrices: [batch, heads, size]."""
        return self.batch * self.heads * self.size

    @property
    def kv_cols(self) -> int:
        """Columns of KV: [keys or values, batch, heads, size]."""
        return 2 * self.batch * self.kv_heads * self.size

    @cached_property
    def mask(self) -> Mask:
        return Mask(self.causal, self.window, self.cu_seqlens)

    @cached_property
    def segments(self) -> tuple[tuple[Segment, ...], ...]:
        """By rank, its rows."""
        return tuple(
            tuple(self.mask.segments(_chunks(rank, self.world, self.rows, self.placement)))
            for rank in range(self.world)
        )

    @cached_property
    def keys(self) -> KeyGather:
        """How KV travels."""
        ranks = range(self.world)
        spans = tuple(tuple(self._span(src, dst) for dst in ranks) for src in ranks)
        rows = (self.rows,) * self.world
        how = "all_gather_matmul", rows, self.q_cols, self.kv_cols, self.dtype
        return KeyGather(*how, self.keeps, self.symmetric, hosts=self.hosts, spans=spans)

    def landing(self, memory: str) -> Buffer:
        """The rows of KV that a rank gets."""
        return self.keys.gathered(memory)._replace(holds="KV")

    def _span(self, src: int, dst: int) -> Span:
        """From the first to the last row of a rank's that another gets: what some of its queries
        attend to, or those of any rank for which it gets the rows from another host."""
        if self.ring:
            return 0, self.rows
        readers: Iterable[int] = [dst]
        if self.host(src) != self.host(dst) and self.on_host(self.host(dst), src) == dst:
            readers = self.ranks_of(self.host(dst))
        queries = [one for rank in readers for one in self.segments[rank]]
        seen = self.seen(queries, self.segments[src])
        return (seen[0][0], seen[-1][1]) if seen else (0, 0)

    def seen(self, queries: Sequence[Segment], keys: Sequence[Segment]) -> list[Span]:
        """The rows of keys that some of the queries attend to, in their order, as few spans."""
        found: list[Span] = []
        for key in keys:
            for query in queries:
                at = query.position, query.position + query.length
                first, last = self.mask.seen(at, key)
                if first < last:
                    found.append((first, last))
        return merged(found)

    @cached_property
    def landed(self) -> tuple[tuple[Segment, ...], ...]:
        """By rank, the rows of KV that it gets, its own among them, as they land."""
        return tuple(
            tuple(
                one._replace(row=one.row - first + self.keys.lands(src, dst))
                for src in range(self.world)
                for first, last in [self.keys.spans[src][dst]]
                for part in self.segments[src]
                if (one := part.clipped((first, last))).length
            )
            for dst in range(self.world)
        )

    def needs(self, rank: int, first: int, last: int) -> list[Span]:
        """The rows of KV, as they land, that some of a rank's queries attend to."""
        return self.seen(clipped(self.segments[rank], (first, last)), self.landed[rank])

    def rectangles(self, rank: int, queries: Span, keys: Span) -> tuple[Rectangle, ...]:
        """What some rows of a rank's queries attend to of some rows of KV, as these land: in the
        numbers of both."""
        mine = clipped(self.segments[rank], queries)
        return self.mask.rectangles(mine, clipped(self.landed[rank], keys))

    @property
    def score_scale(self) -> float:
        """By what scores are multiplied."""
        return self.size**-0.5 if self.scale is None else self.scale

    def senders(self, rank: int, first: int, last: int) -> int:
        """The ranks whose queries may attend to all of a rank's rows of some numbers, rank r as bit
        r; 0 if some attend to a part of them."""
        own = self.keys.lands(rank, rank)
        first, last, found = first - own, last - own, 0
        for other in range(self.world):
            begin, end = self.keys.spans[rank][other]
            if begin <= first and last <= end:
                found |= 1 << other
            elif begin < last and first < end:
                return 0
        return found

    @cached_property
    def specification(self) -> Specification:
        """Of the gradient, what comes back has a place for each rank that may attend to it."""
        shapes = ((self.rows, self.kv_cols),) * self.world
        wide = ((self.rows, self.q_cols),) * self.world
        kv = Buffer("kv", "KV", self.dtype, shapes, "operand", self.symmetric, leaves=True)
        exchange = Exchange(self.keys.block, self.keys.leaves, self.keys.lands)
        landed = tuple(map(self.keys.product_rows, range(self.world)))
        q, out = (Buffer(name, name.upper(), self.dtype, wide, "operand") for name in ("q", "o"))
        heads = self.batch, self.kv_heads, self.size
        how = landed, self.needs, self.rectangles, heads, self.score_scale
        if not self.backward:
            out = out._replace(name="out", memory="result")
            return Specification(
                operands=(kv, q),
                results=(out, *([self.landing("result")] if self.keeps else [])),
                contractions=(),
                exchanges={"KV": exchange},
                functions={(MERGE, "parts of O"): "O"},
                attentions=(Attention("Q", "KV", "parts of O", *how),),
            )
        keys = self.keys
        first = tuple(keys.lands(rank, rank) for rank in range(self.world))
        back = Exchange(
            block=lambda src, dst: keys.block(dst, src),
            leaves=lambda src, dst: keys.lands(dst, src),
            lands=lambda src, dst: keys.number(dst, dst, keys.leaves(dst, src)),
            sums=True,
            terms=True,
            senders=self.senders,
        )
        return Specification(
            operands=(
                *(self.landing("operand") if self.kept else kv, q, out),
                out._replace(name="grad", holds="dO"),
            ),
            results=(
                out._replace(name="dq", holds="dQ", memory="result"),
                Buffer("dkv", "dKV", self.dtype, shapes, "result", first=first),
            ),
            contractions=(),
            exchanges={"dKV": back} if self.kept else {"KV": exchange, "dKV": back},
            attentions=(Attention("Q", "KV", "dQ", *how, back="dKV"),),
        )

    def __str__(self) -> str:
        shared = f" ({self.kv_heads} of keys)" if self.kv_heads != self.heads else ""
        batch = f"batch={self.batch}, " if self.batch > 1 else ""
        flags = [self.dtype] + ["causal"] * self.causal
        flags += [f"window={self.window}"] if self.window is not None else []
        flags += [f"cu_seqlens={_brief(self.cu_seqlens)}"] if self.cu_seqlens else []
        flags += [self.placement] if self.placement != PLACEMENTS[0] else []
        flags += [f"scale={self.scale}"] if self.scale is not None else []
        flags += [f"{self.hosts} hosts"] if self.hosts > 1 else []
        flags += [name for name in ("symmetric", "keeps", "ring", "kept") if getattr(self, name)]
        return (
            f"{self.operator}({batch}sequence={self.length} ({self.rows} x {self.world} ranks), "
            f"{self.heads} heads{shared}, size={self.size}, {', '.join(flags)})"
        )


def _brief(bounds: tuple[int, ...]) -> str:
    """Bounds in words, with a fingerprint where there are many."""
    if len(bounds) <= 8:
        return str(list(bounds))
    return f"[{bounds[0]}, ..., {bounds[-1]}] ({len(bounds)}, {digest(repr(bounds)):010x})"


def _chunks(rank: int, world: int, rows: int, placement: str) -> tuple[Segment, ...]:
    """The rows of a rank, before documents cut them."""
    if placement == "ranks":
        return (Segment(0, rank * rows, rows),)
    half = rows // 2
    tail = (2 * world - 1 - rank) * half
    return Segment(0, rank * half, half), Segment(half, tail, half)


def clipped(segments: Sequence[Segment], rows: Span) -> list[Segment]:
    """Those segments, or parts of them, that are in some rows."""
    parts = [one.clipped(rows) for one in segments]
    return [one for one in parts if one.length]
