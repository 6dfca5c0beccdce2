"""Problems of attention: the sizes and the mask of one call, equal on every rank of the group.

In attention by heads (DeepSpeed-Ulysses) each rank holds some positions of all heads. An all-to-all
gives it all positions of some heads, attention runs on those heads, and another all-to-all returns
the results. Rows of the matrices are heads. Columns are elements [position, batch, size], so that
the parts of a head from all ranks land in the layout that a library reads. The gradient is the same
chain with other matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate

from ficco.errors import InvalidArgument
from ficco.problems.mask import (
    BACKWARD_PRODUCTS,
    FORWARD_PRODUCTS,
    PLACEMENTS,
    LibraryCall,
    Mask,
    Rectangle,
    Segment,
    Span,
    merged,
)
from ficco.problems.products import Problem, digest
from ficco.problems.specification import (
    MERGE,
    SUMS,
    AnyProblem,
    Application,
    Attention,
    Buffer,
    Exchange,
    Rows,
    Specification,
    check_name,
    zero,
)


@dataclass(frozen=True)
class KeyGather(Problem):
    """The all-gather of KV. Each rank receives only the rows that it attends to.

    Attributes:
        spans: ``spans[i][j]``: first and last row, exclusive, of rank i that rank j receives. From
            the rank of its rail on another host, it receives all rows that its host needs.
    """

    spans: tuple[tuple[Span, ...], ...] = ()

    same_blocks, masked = False, True

    def block(self, src: int, dst: int) -> int:
        first, last = self.spans[src][dst]
        return last - first

    def leaves(self, src: int, dst: int) -> int:
        return self.spans[src][dst][0]

    def lands(self, src: int, dst: int) -> int:
        return self._landings[dst][src]

    def number(self, rank: int, owner: int, row: int) -> int:
        """The number that a row of ``owner`` has on the rank where it lands."""
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
        batch, heads, size: of the queries; ``size`` is the head size.
        kv_heads: heads of keys and values, a divisor of ``heads``.
        dtype: name of the dtype.
        causal, window, cu_seqlens: see :class:`Mask`.
        placement: one of :data:`ficco.problems.mask.PLACEMENTS`.
        scale: factor of the scores; None: 1 / sqrt(size).
        symmetric: keys and values are in symmetric memory, in the layout of KV.
        keeps: the rows of KV that land on a rank, its own included, are a second result.
        ring: rows go from each rank to the next one, so that every rank gets all rows.
        hosts: number of hosts. Each host has equally many ranks, numbered consecutively.
        backward: whether it is the gradient.
        saved: gradient only: the rows of KV that the forward gathered are an operand.

    Raises:
        ValueError: a value is wrong, or two values contradict each other.
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
    saved: bool = False

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

    def gradient(self, saved: bool = False) -> AttentionProblem:
        """The problem of the gradients of the call."""
        return replace(self, backward=True, saved=saved)

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
        """The segments of each rank."""
        return tuple(
            tuple(self.mask.segments(_chunks(rank, self.world, self.rows, self.placement)))
            for rank in range(self.world)
        )

    @cached_property
    def keys(self) -> KeyGather:
        """The all-gather of KV."""
        ranks = range(self.world)
        spans = tuple(tuple(self._span(src, dst) for dst in ranks) for src in ranks)
        rows = (self.rows,) * self.world
        sizes = "all_gather_matmul", rows, self.q_cols, self.kv_cols, self.dtype
        return KeyGather(*sizes, self.keeps, self.symmetric, hosts=self.hosts, spans=spans)

    def landing(self, memory: str) -> Buffer:
        """The buffer of the rows of KV that land on a rank."""
        return self.keys.gathered(memory)._replace(holds="KV")

    def _span(self, src: int, dst: int) -> Span:
        """The rows of ``src`` that ``dst`` receives, from the first to the last that its queries
        attend to. From its rail on another host, it receives for all queries of its host."""
        if self.ring:
            return 0, self.rows
        readers: Iterable[int] = [dst]
        if self.host(src) != self.host(dst) and self.on_host(self.host(dst), src) == dst:
            readers = self.ranks_of(self.host(dst))
        queries = [segment for rank in readers for segment in self.segments[rank]]
        seen = self.seen(queries, self.segments[src])
        return (seen[0][0], seen[-1][1]) if seen else (0, 0)

    def seen(self, queries: Sequence[Segment], keys: Sequence[Segment]) -> list[Span]:
        """The rows of keys that any of the queries attends to, as few rising spans."""
        spans: list[Span] = []
        for key in keys:
            for query in queries:
                positions = query.position, query.position + query.length
                first, last = self.mask.seen(positions, key)
                if first < last:
                    spans.append((first, last))
        return merged(spans)

    @cached_property
    def landed(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of KV that each rank has in the end, its own included, as they land."""
        return tuple(
            tuple(
                part._replace(row=part.row - first + self.keys.lands(src, dst))
                for src in range(self.world)
                for first, last in [self.keys.spans[src][dst]]
                for segment in self.segments[src]
                if (part := segment.clipped((first, last))).length
            )
            for dst in range(self.world)
        )

    def needs(self, rank: int, first: int, last: int) -> list[Span]:
        """The rows of KV, as they land, that the queries ``[first, last)`` of a rank attend to."""
        return self.seen(clipped(self.segments[rank], (first, last)), self.landed[rank])

    def rectangles(self, rank: int, queries: Span, keys: Span) -> tuple[Rectangle, ...]:
        """The rectangles of some queries of a rank and some rows of KV, both as they are numbered
        on the rank."""
        query_segments = clipped(self.segments[rank], queries)
        return self.mask.rectangles(query_segments, clipped(self.landed[rank], keys))

    @property
    def score_scale(self) -> float:
        """Factor of the scores."""
        return self.size**-0.5 if self.scale is None else self.scale

    def senders(self, rank: int, first: int, last: int) -> int:
        """Bit mask of the ranks whose queries may attend to all rows ``[first, last)`` of a rank,
        rank r as bit r; 0 if the queries of a rank may attend to a part of the rows."""
        own = self.keys.lands(rank, rank)
        first, last, mask = first - own, last - own, 0
        for other in range(self.world):
            begin, end = self.keys.spans[rank][other]
            if begin <= first and last <= end:
                mask |= 1 << other
            elif begin < last and first < end:
                return 0
        return mask

    @cached_property
    def specification(self) -> Specification:
        """The matrices that its Plans must compute. Every rank that may attend to a row of KV
        contributes a term to its gradient."""
        shapes = ((self.rows, self.kv_cols),) * self.world
        q_shapes = ((self.rows, self.q_cols),) * self.world
        kv = Buffer("kv", "KV", self.dtype, shapes, "operand", self.symmetric, leaves=True)
        exchange = Exchange(self.keys.block, self.keys.leaves, self.keys.lands)
        landed = tuple(map(self.keys.product_rows, range(self.world)))
        q, out = (Buffer(x, x.upper(), self.dtype, q_shapes, "operand") for x in ("q", "o"))
        heads = self.batch, self.kv_heads, self.size
        masked = landed, self.needs, self.rectangles, heads, self.score_scale
        if not self.backward:
            out = out._replace(name="out", memory="result")
            return Specification(
                operands=(kv, q),
                results=(out, *([self.landing("result")] if self.keeps else [])),
                contractions=(),
                exchanges={"KV": exchange},
                functions={(MERGE, "parts of O"): "O"},
                attentions=(Attention("Q", "KV", "parts of O", *masked),),
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
                *(self.landing("operand") if self.saved else kv, q, out),
                out._replace(name="grad", holds="dO"),
            ),
            results=(
                out._replace(name="dq", holds="dQ", memory="result"),
                Buffer("dkv", "dKV", self.dtype, shapes, "result", first=first),
            ),
            contractions=(),
            exchanges={"dKV": back} if self.saved else {"KV": exchange, "dKV": back},
            attentions=(Attention("Q", "KV", "dQ", *masked, back="dKV"),),
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
        flags += [name for name in ("symmetric", "keeps", "ring") if getattr(self, name)]
        flags += ["kept"] * self.saved
        return (
            f"{self.operator}({batch}sequence={self.length} ({self.rows} x {self.world} ranks), "
            f"{self.heads} heads{shared}, size={self.size}, {', '.join(flags)})"
        )


def _brief(bounds: tuple[int, ...]) -> str:
    """Bounds as text; long lists are abbreviated and identified by a fingerprint."""
    if len(bounds) <= 8:
        return str(list(bounds))
    return f"[{bounds[0]}, ..., {bounds[-1]}] ({len(bounds)}, {digest(repr(bounds)):010x})"


def _chunks(rank: int, world: int, rows: int, placement: str) -> tuple[Segment, ...]:
    """The segments of a rank, before they are cut at documents."""
    if placement == "ranks":
        return (Segment(0, rank * rows, rows),)
    half = rows // 2
    tail = (2 * world - 1 - rank) * half
    return Segment(0, rank * half, half), Segment(half, tail, half)


def clipped(segments: Sequence[Segment], rows: Span) -> list[Segment]:
    """The parts of segments within a range of rows, without empty ones."""
    parts = [segment.clipped(rows) for segment in segments]
    return [part for part in parts if part.length]


#: Matrices with a row for each head of keys; the other matrices have one for each head of queries.
OF_KEYS = ("k", "v", "dk", "dv")


def keys_of(rank: int, world: int, heads: int, kv_heads: int) -> list[int]:
    """The heads of keys that a rank's heads of queries attend to, in order. Each is listed once if
    all serve equally many heads of queries; otherwise there is one entry per head of queries."""
    own, shared = heads // world, heads // kv_heads
    owners = [head // shared for head in range(rank * own, (rank + 1) * own)]
    distinct = sorted(set(owners))
    return distinct if len({owners.count(head) for head in distinct}) == 1 else owners


@dataclass(frozen=True)
class HeadsProblem(AnyProblem):
    """Attention by heads: the sizes of one call, equal on every rank of the group.

    Attributes:
        attention: the attention over all heads. Ranks hold parts of the sequence in rank order.
        backward: whether it is the gradient.
        saves: data that a forward saves for its gradient: ``""``, nothing, since there is no
            gradient; or the log-sum-exp with the ``"heads"`` that arrived, or with the
            ``"shards"``, which travel again.

    Raises:
        ValueError: the heads cannot be shared equally.
    """

    attention: AttentionProblem
    backward: bool = False
    saves: str = ""

    operator = "ulysses_attention"

    def __post_init__(self) -> None:
        if self.attention.heads % self.world:
            raise InvalidArgument(
                "q",
                f"required a number of heads that the {self.world} ranks share equally, got "
                f"{self.attention.heads}; use fewer ranks, or ficco.all_gather_attention",
            )

    @cached_property
    def world(self) -> int:
        return self.attention.world

    @cached_property
    def hosts(self) -> int:
        return self.attention.hosts

    # Heads.

    @property
    def heads(self) -> int:
        """Heads of queries that a rank attends with."""
        return self.attention.heads // self.world

    @property
    def shared(self) -> int:
        """Heads of queries that share a head of keys."""
        return self.attention.heads // self.attention.kv_heads

    @property
    def cols(self) -> int:
        """Elements of a head that a rank holds."""
        return self.attention.rows * self.attention.batch * self.attention.size

    def keys(self, rank: int) -> tuple[int, int]:
        """The heads of keys of a rank's queries, as first and last, exclusive."""
        first = rank * self.heads
        return first // self.shared, -(-(first + self.heads) // self.shared)

    def rows(self, matrix: str, rank: int, first: int, last: int) -> tuple[int, int]:
        """The rows of a matrix on a rank that belong to its heads of queries ``[first, last)``."""
        if matrix not in OF_KEYS:
            return first, last
        begin = rank * self.heads
        first, last = (begin + first) // self.shared, -(-(begin + last) // self.shared)
        return first - self.keys(rank)[0], last - self.keys(rank)[0]

    def count(self, matrix: str, rank: int) -> int:
        """Rows of a matrix on a rank."""
        return self.rows(matrix, rank, 0, self.heads)[1]

    def alike(self, rank: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Runs of a rank's heads of queries. In a run, all heads of keys serve equally many."""
        begin = rank * self.heads
        bounds = [
            head - begin
            for head in range(begin + first, begin + last + 1)
            if head in (begin + first, begin + last) or head % self.shared == 0
        ]
        run, size = bounds[0], 0
        for start, stop in zip(bounds, bounds[1:], strict=False):
            if size and stop - start != size:
                yield run, start
                run = start
            size = stop - start
        if run < last:
            yield run, last

    @cached_property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """The rectangles of one head over the whole sequence, cut into documents."""
        segments = [*self.attention.mask.segments([Segment(0, 0, self.attention.length)])]
        return self.attention.mask.rectangles(segments, segments)

    def calls(self, first: int, last: int) -> tuple[LibraryCall, ...]:
        """The library calls for the heads of queries ``[first, last)``."""
        products = BACKWARD_PRODUCTS if self.backward else FORWARD_PRODUCTS
        heads, size = (last - first) * self.attention.batch, self.attention.size
        return tuple(rectangle.call(heads, size, products) for rectangle in self.rectangles)

    # Matrices.

    @property
    def function(self) -> str:
        """Name of the function of heads."""
        return "attention backward" if self.backward else "attention"

    @property
    def arrives(self) -> tuple[str, ...]:
        """The matrices that travel to the ranks of their heads."""
        if not self.backward:
            return "q", "k", "v"
        return ("grad",) if self.keeps else ("grad", "out", "q", "k", "v")

    @property
    def returns(self) -> tuple[str, ...]:
        """The matrices that travel back."""
        return ("dq", "dk", "dv") if self.backward else ("out",)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs of the function, in its order."""
        return ("q", "k", "v", "out", "lse", "grad") if self.backward else ("q", "k", "v")

    @property
    def outs(self) -> tuple[str, ...]:
        """The results of the function, in its order."""
        return self.returns + (("lse",) if self.saves and not self.backward else ())

    @property
    def keeps(self) -> bool:
        """Whether the forward keeps the heads that arrived. On one rank, they are the shards."""
        return self.saves == "heads" and self.world > 1

    @property
    def saved_heads(self) -> tuple[str, ...]:
        """The matrices whose heads a forward keeps for its gradient."""
        return ("q", "k", "v", "out") if self.keeps else ()

    def shard(self, matrix: str) -> Buffer:
        """The caller's shard of a matrix: an operand or a result. A gradient of keys has a row for
        each rank that attended to the head."""
        travels = matrix in self.arrives
        rows = self.attention.kv_heads if matrix in OF_KEYS else self.attention.heads
        if matrix in self.returns:
            rows = sum(self.count(matrix, rank) for rank in range(self.world))
        left = tuple(rank * self.cols for rank in range(self.world))
        return Buffer(
            *(matrix, matrix, self.attention.dtype, ((rows, self.cols),) * self.world),
            *("operand" if travels else "result", False, travels),
            left=left,
        )

    def whole(self, matrix: str, memory: str) -> Buffer:
        """The buffer of a rank's heads over the sequence; results are numbered as they leave."""
        dtype, cols = self.attention.dtype, self.cols * self.world
        if matrix == "lse":
            dtype, cols = SUMS[dtype], cols // self.attention.size
        shapes = tuple((self.count(matrix, rank), cols) for rank in range(self.world))
        leaves = matrix in self.returns
        return Buffer(f"{matrix} heads", matrix, dtype, shapes, memory, leaves=leaves)

    def _saved(self, matrix: str, memory: str) -> Buffer:
        return self.whole(matrix, memory)._replace(name=f"kept {matrix}")

    @cached_property
    def specification(self) -> Specification:
        saved = [*self.saved_heads, "lse"] if self.saves else []
        operands = [self.shard(matrix) for matrix in self.arrives]
        results = [self.shard(matrix) for matrix in self.returns]
        if self.backward:
            operands += [self._saved(matrix, "operand") for matrix in saved]
        else:
            results += [self._saved(matrix, "result") for matrix in saved]
        return Specification(
            operands=tuple(operands),
            results=tuple(results),
            contractions=(),
            exchanges={
                **{matrix: self._arrival(matrix) for matrix in self.arrives},
                **{matrix: self._return(matrix) for matrix in self.returns},
            },
            applications=(
                Application(
                    self.function,
                    tuple(map(self._rows_of, self.inputs)),
                    tuple(map(self._rows_of, self.outs)),
                    self.rectangles,
                    (self.attention.batch, self.attention.size),
                    self.attention.score_scale,
                    self.alike,
                ),
            ),
        )

    def _rows_of(self, matrix: str) -> Rows:
        return Rows(matrix, self.whole(matrix, "").shapes[0][1], partial(self.rows, matrix))

    def leaves(self, matrix: str, src: int, dst: int) -> int:
        """The first row of a shard of ``src`` that ``dst`` receives."""
        return self.keys(dst)[0] if matrix in OF_KEYS else dst * self.heads

    def lands(self, matrix: str, src: int, dst: int) -> int:
        """The first row of a result that comes from ``src``."""
        return sum(self.count(matrix, rank) for rank in range(src))

    def _arrival(self, matrix: str) -> Exchange:
        leaves = partial(self.leaves, matrix)
        return Exchange(lambda src, dst: self.count(matrix, dst), leaves, zero)

    def _return(self, matrix: str) -> Exchange:
        lands = partial(self.lands, matrix)
        return Exchange(lambda src, dst: self.count(matrix, src), zero, lands)

    def __str__(self) -> str:
        sizes = str(self.attention).partition("(")[2].removesuffix(")")
        flags = ["backward"] * self.backward + [f"saves {self.saves}"] * bool(self.saves)
        return f"{self.operator}({', '.join([sizes, *flags])})"
