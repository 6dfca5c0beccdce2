"""Attention by heads of a sequence that ranks share (DeepSpeed-Ulysses), as data.

Each rank holds some positions of all heads. An all-to-all brings it all positions of some heads,
attention runs on these, and another all-to-all brings its results back. Rows of the matrices are
heads; columns are elements [position, batch, size], so that heads from all ranks land side by side
as a library reads them. The gradient is the same chain with other matrices.
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

#: What a forward keeps for its gradient, apart from the log-sum-exp: nothing, since there is none;
#: the heads that have arrived; or the shards, which travel again.
SAVES = ("", "heads", "shards")

#: Matrices that have a row for each head of keys; the others have one for each head of queries.
OF_KEYS = ("k", "v", "dk", "dv")


def keys_of(rank: int, world: int, heads: int, kv_heads: int) -> list[int]:
    """The heads of keys that a rank's heads of queries attend to, in order: each once, or, where
    they do not serve equally many, one for each head of queries."""
    each, shared = heads // world, heads // kv_heads
    owners = [head // shared for head in range(rank * each, (rank + 1) * each)]
    distinct = sorted(set(owners))
    return distinct if len({owners.count(one) for one in distinct}) == 1 else owners


@dataclass(frozen=True)
class HeadsProblem(AnyProblem):
    """What one call asks, equal on every rank of the group.

    Attributes:
        attention: of all heads; every rank holds its part of the sequence, in the order of ranks.
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
        """Heads of queries that share one of keys."""
        return self.attention.heads // self.attention.kv_heads

    @property
    def cols(self) -> int:
        """Elements of a head that a rank holds."""
        return self.attention.rows * self.attention.batch * self.attention.size

    def keys(self, rank: int) -> tuple[int, int]:
        """The first and the last head of keys, exclusive, of a rank's queries."""
        first = rank * self.heads
        return first // self.shared, -(-(first + self.heads) // self.shared)

    def rows(self, matrix: str, rank: int, first: int, last: int) -> tuple[int, int]:
        """The rows of a matrix on a rank that some of its heads of queries have to do with."""
        if matrix not in OF_KEYS:
            return first, last
        begin = rank * self.heads
        first, last = (begin + first) // self.shared, -(-(begin + last) // self.shared)
        return first - self.keys(rank)[0], last - self.keys(rank)[0]

    def count(self, matrix: str, rank: int) -> int:
        """Rows of a matrix on a rank."""
        return self.rows(matrix, rank, 0, self.heads)[1]

    def alike(self, rank: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Heads of queries of a rank in runs in which all heads of keys serve equally many."""
        begin = rank * self.heads
        bounds = [
            at - begin
            for at in range(begin + first, begin + last + 1)
            if at in (begin + first, begin + last) or at % self.shared == 0
        ]
        run, size = bounds[0], 0
        for one, two in zip(bounds, bounds[1:], strict=False):
            if size and two - one != size:
                yield run, one
                run = one
            size = two - one
        if run < last:
            yield run, last

    @cached_property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """What a head's queries attend to: all that there are of each document in one."""
        asked = self.attention
        return asked.mask.rectangles(
            *(tuple(asked.mask.segments([Segment(0, 0, asked.length)])),) * 2
        )

    def calls(self, first: int, last: int) -> tuple[LibraryCall, ...]:
        """Those of a library for some heads of queries."""
        asked, products = self.attention, BACKWARD_PRODUCTS if self.backward else FORWARD_PRODUCTS
        heads = (last - first) * asked.batch
        return tuple(one.call(heads, asked.size, products) for one in self.rectangles)

    # Matrices.

    @property
    def function(self) -> str:
        """What is computed of heads."""
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
        """What the function takes, in its order."""
        return ("q", "k", "v", "out", "lse", "grad") if self.backward else ("q", "k", "v")

    @property
    def outs(self) -> tuple[str, ...]:
        """What the function makes, in its order."""
        return self.returns + (("lse",) if self.saves and not self.backward else ())

    @property
    def keeps(self) -> bool:
        """Whether heads that have arrived are kept. Those of one rank are what it has."""
        return self.saves == "heads" and self.world > 1

    @property
    def kept(self) -> tuple[str, ...]:
        """The matrices whose heads a forward hands to its gradient."""
        return ("q", "k", "v", "out") if self.keeps else ()

    def shard(self, matrix: str) -> Buffer:
        """What the caller has or gets of a matrix. A gradient of keys has a row for each rank that
        has attended to the head."""
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
        """The heads of a rank; of results as they leave it."""
        dtype, cols = self.attention.dtype, self.cols * self.world
        if matrix == "lse":
            dtype, cols = SUMS[dtype], cols // self.attention.size
        shapes = tuple((self.count(matrix, rank), cols) for rank in range(self.world))
        leaves = matrix in self.returns
        return Buffer(f"{matrix} heads", matrix, dtype, shapes, memory, leaves=leaves)

    def _kept(self, matrix: str, memory: str) -> Buffer:
        return self.whole(matrix, memory)._replace(name=f"kept {matrix}")

    @cached_property
    def specification(self) -> Specification:
        held = [*self.kept, "lse"] if self.saves else []
        operands = [self.shard(matrix) for matrix in self.arrives]
        results = [self.shard(matrix) for matrix in self.returns]
        if self.backward:
            operands += [self._kept(matrix, "operand") for matrix in held]
        else:
            results += [self._kept(matrix, "result") for matrix in held]
        return Specification(
            operands=tuple(operands),
            results=tuple(results),
            contractions=(),
            exchanges={
                **{matrix: self._gathered(matrix) for matrix in self.arrives},
                **{matrix: self._scattered(matrix) for matrix in self.returns},
            },
            applications=(
                Application(
                    self.function,
                    tuple(map(self._applied, self.inputs)),
                    tuple(map(self._applied, self.outs)),
                    self.rectangles,
                    (self.attention.batch, self.attention.size),
                    self.attention.score_scale,
                    self.alike,
                ),
            ),
        )

    def _applied(self, matrix: str) -> Rows:
        return Rows(matrix, self.whole(matrix, "").shapes[0][1], partial(self.rows, matrix))

    def leaves(self, matrix: str, src: int, dst: int) -> int:
        """The first row of a rank's shard that another gets."""
        return self.keys(dst)[0] if matrix in OF_KEYS else dst * self.heads

    def lands(self, matrix: str, src: int, dst: int) -> int:
        """The first row of a result that comes from a rank."""
        return sum(self.count(matrix, rank) for rank in range(src))

    def _gathered(self, matrix: str) -> Exchange:
        return Exchange(lambda src, dst: self.count(matrix, dst), partial(self.leaves, matrix), _0)

    def _scattered(self, matrix: str) -> Exchange:
        return Exchange(lambda src, dst: self.count(matrix, src), _0, partial(self.lands, matrix))

    def __str__(self) -> str:
        sizes = str(self.attention).partition("(")[2].removesuffix(")")
        flags = ["backward"] * self.backward + [f"saves {self.saves}"] * bool(self.saves)
        return f"{self.operator}({', '.join([sizes, *flags])})"


def _0(src: int, dst: int) -> int:
    return 0
