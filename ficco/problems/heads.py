"""Attention by heads of a sequence that ranks share (DeepSpeed-Ulysses), as data.

Each rank holds some positions of all heads. An all-to-all gives it all positions of some heads,
attention runs on those heads, and another all-to-all returns the results. Rows of the matrices are
heads. Columns are elements [position, batch, size], so that the parts of a head from all ranks land
in the layout that a library reads. The gradient is the same chain with other matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

from ficco.errors import InvalidArgument
from ficco.problems.attention import AttentionProblem
from ficco.problems.mask import (
    BACKWARD_PRODUCTS,
    FORWARD_PRODUCTS,
    LibraryCall,
    Rectangle,
    Segment,
)
from ficco.problems.specification import (
    SUMS,
    AnyProblem,
    Application,
    Buffer,
    Exchange,
    Rows,
    Specification,
)

#: Data that a forward saves for its gradient: ``""``, nothing, since there is no gradient; or the
#: log-sum-exp with the ``"heads"`` that arrived, or with the ``"shards"``, which travel again.
SAVES = ("", "heads", "shards")

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
        saves: one of :data:`SAVES`.

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
    def kept(self) -> tuple[str, ...]:
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
        saved = [*self.kept, "lse"] if self.saves else []
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
        return Exchange(lambda src, dst: self.count(matrix, dst), leaves, _zero)

    def _return(self, matrix: str) -> Exchange:
        lands = partial(self.lands, matrix)
        return Exchange(lambda src, dst: self.count(matrix, src), _zero, lands)

    def __str__(self) -> str:
        sizes = str(self.attention).partition("(")[2].removesuffix(")")
        flags = ["backward"] * self.backward + [f"saves {self.saves}"] * bool(self.saves)
        return f"{self.operator}({', '.join([sizes, *flags])})"


def _zero(src: int, dst: int) -> int:
    return 0
