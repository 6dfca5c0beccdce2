"""Problems: the operator and sizes of one call, equal on every rank of the group."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from ficco.errors import InvalidArgument
from ficco.problems.scaling import (
    CAST,
    CASTS,
    FAMILIES,
    MULTIPLE,
    RECIPES,
    RESULTS,
    Scaling,
    factor_count,
    name_of,
)
from ficco.problems.specification import (
    ITEMSIZES,
    SUMS,
    AnyProblem,
    Buffer,
    Contraction,
    Exchange,
    Factors,
    Specification,
    check_name,
    zero,
)

#: Bytes per element of the supported dtypes of operands without scales.
ITEMSIZE = {name: ITEMSIZES[name] for name in SUMS}


class Operator(NamedTuple):
    """The properties that distinguish operators.

    Attributes:
        collective: name of the collective that it overlaps, in words.
        scatters: the product travels (a scattering operator); otherwise A does (gathering).
        sums: the products of all ranks are added up.
        blocks: every pair of ranks has a separate block; otherwise rows belong to one rank.
        returns: the sums travel back to all ranks.
        inner: the product is ``A.T @ B``: it sums over the rows of A that travel.
    """

    collective: str
    scatters: bool
    sums: bool = False
    blocks: bool = False
    returns: bool = False
    inner: bool = False


OPERATORS = {
    "all_gather_matmul": Operator("all-gather", scatters=False),
    "all_gather_transposed_matmul": Operator("all-gather", scatters=False, inner=True),
    "all_to_all_matmul": Operator("all-to-all", scatters=False, blocks=True),
    "all_to_all_transposed_matmul": Operator("all-to-all", scatters=False, blocks=True, inner=True),
    "matmul_reduce_scatter": Operator("reduce-scatter", scatters=True, sums=True),
    "matmul_all_to_all": Operator("all-to-all", scatters=True, blocks=True),
    "matmul_all_reduce": Operator("all-reduce", scatters=True, sums=True, returns=True),
}


@dataclass(frozen=True)
class Problem(AnyProblem):
    """One matrix product, and the exchange of its left operand or of its result.

    Attributes:
        operator: name of the public operator, one of :data:`OPERATORS`.
        rows: number of rows that belong to each rank. All-gather: the rows of A that it holds.
            Reduce-scatter and all-reduce: the rows of the result that it sums. All-to-all: the
            rows that it multiplies.
        n: columns of the local B.
        k: columns of A. B has k rows or, if A is transposed, the result has.
        dtype: name of the dtype of A and, without scales, of B and the product.
        blocks: all-to-all: rows that rank i sends to rank j, as ``blocks[i][j]``; else empty.
        return_gathered: the gathered A is a second result.
        symmetric: A is in symmetric memory, so that peers can read it in place.
        scaling: how float8 operands are scaled; None for other dtypes.
        hosts: number of hosts. Each host has equally many ranks, numbered consecutively.
        transposed: all-to-all: the matrix that travels, A or the product, is stored transposed, so
            its rows are columns in memory. The rank that passes A, or gets the product, has equal
            blocks, each stored transposed: [W, rows, columns] with stride 1 along the rows.

    Raises:
        ValueError: a value is wrong, or two values contradict each other.
        NotImplementedError: the dtype or the recipe is not supported.
    """

    operator: str
    rows: tuple[int, ...]
    n: int
    k: int
    dtype: str
    return_gathered: bool = False
    symmetric: bool = False
    blocks: tuple[tuple[int, ...], ...] = ()
    scaling: Scaling | None = None
    hosts: int = 1
    transposed: bool = False

    def __post_init__(self) -> None:
        check_name("operator", self.operator, OPERATORS)
        if self.scaling is not None:
            self._check_scaling(self.scaling)
        elif self.dtype in FAMILIES:
            raise ValueError(
                f"dtype: required scales for {self.dtype}, got none; pass scale_a and scale_b"
            )
        if not self.rows:
            raise InvalidArgument("rows", "required one number per rank, got none")
        sizes = *(("rows", rows) for rows in self.rows), ("n", self.n), ("k", self.k)
        self._check(self.dtype, 0, sizes)
        square = all(len(row) == self.world for row in (self.blocks, *self.blocks))
        if self.kind.blocks and not (square and self.rows == _row_sums(self.kind, self.blocks)):
            raise ValueError("blocks: required a W x W table that adds up to the rows of each rank")
        if self.transposed:
            self._check_transposed()

    def _check_transposed(self) -> None:
        if not self.kind.blocks or self.scaling is not None:
            raise NotImplementedError(
                f"{self.operator}: transposed rows are served only in all-to-alls without scales"
            )
        by_holder = zip(*self.blocks, strict=True) if self.kind.scatters else self.blocks
        if any(len(set(sizes)) > 1 for sizes in by_holder):
            raise ValueError(
                "blocks: required blocks of equal size on each rank for transposed rows, got "
                f"{[list(row) for row in self.blocks]}"
            )

    def _check_scaling(self, scaling: Scaling) -> None:
        check_name("recipe", scaling.recipe, RECIPES)
        if needs := scaling.rules.needs:
            raise NotImplementedError(
                f"the recipe {scaling.recipe} needs {needs}, which no engine serves yet; quantize "
                "with float32 factors, row by row or in blocks of 128"
            )
        families = [FAMILIES.get(dtype) for dtype in (self.dtype, scaling.right)]
        if None in families:
            raise ValueError(
                f"scale_a, scale_b: required operands of {', '.join(FAMILIES)}, got {self.dtype} "
                f"and {scaling.right}; leave the scales out, or quantize the operands"
            )
        if len(set(families)) > 1:
            raise ValueError(
                f"required operands of one family of float8, got {self.dtype} and "
                f"{scaling.right}, whose bits mean other numbers; quantize both for one device"
            )
        if scaling.out not in RESULTS:
            raise ValueError(f"out_dtype: required one of {', '.join(RESULTS)}, got {scaling.out}")
        if scaling.bias and scaling.out == "float32":
            raise ValueError(
                "bias: required out_dtype bfloat16 or float16 with a bias, got float32; add it to "
                "the result"
            )
        if self.kind.inner or scaling.replicated and self.kind.collective != "all-gather":
            unserved = "replicated factors of A" if scaling.replicated else "float8 operands"
            raise NotImplementedError(f"{self.operator} does not take {unserved}")
        if scaling.source:
            self._check_cast(scaling)
        for name, size in (("n", self.n), ("k", self.k)):
            if size % MULTIPLE:
                raise InvalidArgument(
                    name,
                    f"required a multiple of {MULTIPLE} for float8 operands, got {size}; pad with "
                    "zeros",
                )

    def _check_cast(self, scaling: Scaling) -> None:
        check_name("source", scaling.source, RESULTS)
        if scaling.recipe not in CASTS:
            raise NotImplementedError(
                f"quantize: required one of {', '.join(CASTS)}, got {scaling.recipe!r}: one factor "
                "for all rows is known only when all have been read; cast them yourself and pass "
                "scale_a"
            )
        if scaling.replicated or self.return_gathered or self.symmetric:
            unserved = "return_gathered" if self.return_gathered else "rows that are float8 already"
            raise NotImplementedError(
                f"{self.operator}: quantize does not serve {unserved}; cast them yourself and pass "
                "scale_a"
            )

    @classmethod
    def of_blocks(
        cls, operator: str, blocks: Sequence[Sequence[int]], n: int, k: int, dtype: str, **rest: Any
    ) -> Problem:
        """The Problem of an all-to-all; ``rows`` follow from the table of blocks.

        >>> str(Problem.of_blocks("all_to_all_matmul", [[1, 2], [3, 4]], 8, 8, "float32"))
        'all_to_all_matmul(m=6 (rows=[[1, 2], [3, 4]]), n=8, k=8, float32)'
        """
        table = tuple(tuple(row) for row in blocks)
        rows = _row_sums(OPERATORS[operator], table)
        return cls(operator, rows, n, k, dtype, blocks=table, **rest)

    @cached_property
    def kind(self) -> Operator:
        """The properties of the operator."""
        return OPERATORS[self.operator]

    @cached_property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @cached_property
    def m(self) -> int:
        """Rows that a rank multiplies; all-to-all: the most rows that any rank multiplies."""
        return max(self.rows) if self.kind.blocks else sum(self.rows)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First row that belongs to each rank, and m at the end. Not for an all-to-all."""
        return (0, *accumulate(self.rows))

    # Blocks: the rows that rank `src` sends to rank `dst`.

    def block(self, src: int, dst: int) -> int:
        """Rows of a block."""
        if self.kind.blocks:
            return self.blocks[src][dst]
        return self.rows[dst if self.kind.scatters else src]

    def leaves(self, src: int, dst: int) -> int:
        """First row of a block at its sender: in A, or in the product (scattering operators)."""
        if self.kind.blocks:
            return self._leaves[src][dst]
        return self.offsets[dst] if self.kind.scatters else 0

    def lands(self, src: int, dst: int) -> int:
        """First row of a block at its receiver: in the gathered A, in the result of an all-to-all
        or, if blocks are summed, in the full product."""
        if self.kind.blocks:
            return self._lands[dst][src]
        return self.offsets[dst if self.kind.scatters else src]

    @cached_property
    def _leaves(self) -> list[list[int]]:
        return [[0, *accumulate(row)] for row in self.blocks]

    @cached_property
    def _lands(self) -> list[list[int]]:
        return [[0, *accumulate(column)] for column in zip(*self.blocks, strict=True)]

    def left_rows(self, rank: int) -> int:
        """Rows of the left operand that the caller passes on a rank."""
        if self.kind.scatters:
            return self.product_rows(rank)
        return sum(self.blocks[rank]) if self.kind.blocks else self.rows[rank]

    def product_rows(self, rank: int) -> int:
        """Rows that a rank multiplies."""
        return self.rows[rank] if self.kind.blocks else self.m

    def b_rows(self, rank: int) -> int:
        """Rows of a rank's local B: the length of the dimension that its products sum over."""
        return self.product_rows(rank) if self.kind.inner else self.k

    def out_rows(self, rank: int) -> int:
        """Rows of a rank's result."""
        if self.kind.inner:
            return self.k
        if self.kind.blocks:
            return self._lands[rank][self.world]
        scattered = self.kind.scatters and not self.kind.returns
        return self.rows[rank] if scattered else self.m

    @cached_property
    def equal(self) -> bool:
        """Whether all ranks, and all pairs of ranks, have the same number of rows."""
        return len(set(self.rows)) == 1 and len({size for row in self.blocks for size in row}) <= 1

    @property
    def same_blocks(self) -> bool:
        """Whether the blocks of all pairs of ranks are known to have the same number of rows."""
        return self.equal

    @property
    def masked(self) -> bool:
        """Whether a mask selects the rows that travel between two ranks."""
        return False

    @cached_property
    def evened(self) -> Problem:
        """The problem with the same total of rows, rounded up, shared equally by ranks or pairs.

        >>> str(Problem("all_gather_matmul", (3, 6), 8, 8, "float32").evened)
        'all_gather_matmul(m=10 (5 x 2 ranks), n=8, k=8, float32)'
        """
        if self.equal:
            return self
        equal = -(-sum(self.rows) // (self.world ** (1 + self.kind.blocks)))
        if not self.kind.blocks:
            return replace(self, rows=(equal,) * self.world)
        row = (equal,) * self.world
        return replace(self, rows=(sum(row),) * self.world, blocks=(row,) * self.world)

    @cached_property
    def specification(self) -> Specification:
        """The matrices that its Plans must compute."""
        kind, ranks = self.kind, range(self.world)
        product = "A.T @ B" if kind.inner else "A @ B"

        def shapes(rows: Callable[[int], int], cols: int) -> tuple[tuple[int, int], ...]:
            return tuple((rows(rank), cols) for rank in ranks)

        left, right = shapes(self.left_rows, self.k), shapes(self.b_rows, self.n)
        a = Buffer("a", "A", self.dtype, left, "operand", self.symmetric, leaves=not kind.scatters)
        b = Buffer("b", "B", self.scaling.right if self.scaling else self.dtype, right, "operand")
        first = self.offsets[:-1] if kind.sums and not kind.returns else ()
        shape = shapes(self.out_rows, self.n)
        out = Buffer("out", product, self.out_dtype, shape, "result", first=first)
        if self.transposed:
            blocks: dict[str, Any] = {"layout": self.layout, "matrices": self.world}
            a, out = (a, out._replace(**blocks)) if kind.scatters else (a._replace(**blocks), out)
        results = [out]
        if self.return_gathered:
            results.append(self.gathered("result"))
        exchange = Exchange(self.block, self.leaves, self.lands, terms=kind.scatters)
        if kind.sums:  # every rank has a term of every row of the product
            sums: dict[str, Any] = {"sums": True, "terms": True, "added": self.block}
            exchange = Exchange(lambda src, dst: self.m, zero, zero, **sums)
        contraction = Contraction("A", "B", product, tuple(map(self.b_rows, ranks)), kind.inner)
        unscaled = Specification(
            operands=(a, b),
            results=tuple(results),
            contractions=(contraction,),
            exchanges={product if kind.scatters else "A": exchange},
        )
        return self._scaled(unscaled, self.scaling) if self.scaling else unscaled

    def _scaled(self, unscaled: Specification, scaling: Scaling) -> Specification:
        """Add the factors of A and of B, and the bias, to a specification."""
        (a, b), (contraction,), rules = unscaled.operands, unscaled.contractions, scaling.rules
        names = ("factors of A", "factors of B")
        scaled_shapes, travels = a.shapes, self.sends_factors
        if scaling.replicated:
            scaled_shapes = tuple((self.product_rows(rank), self.k) for rank in range(self.world))

        def buffer(name: str, holds: str, shapes: Sequence[tuple[int, int]], share: Any) -> Buffer:
            counts = tuple(
                (factor_count(m, share[0]), factor_count(n, share[1])) for m, n in shapes
            )
            return Buffer(name, holds, "float32", counts, "operand")

        factors_of_a = buffer("scale_a", names[0], scaled_shapes, rules.a)._replace(leaves=travels)
        operands = [a, b, factors_of_a, buffer("scale_b", names[1], b.shapes, rules.b)]
        functions = {}
        if scaling.source:
            wide = a._replace(name="wide", holds="wide A", dtype=scaling.source)
            operands = [wide, b, operands[3]]
            functions[CAST, wide.holds] = a.holds
        if scaling.bias:
            operands.append(
                Buffer("bias", "bias", scaling.out, ((1, self.n),) * self.world, "operand")
            )
        exchanges = dict(unscaled.exchanges)
        if travels:
            by_rank = Exchange(lambda src, dst: 1, zero, lambda src, dst: src)
            exchanges[names[0]] = by_rank if scaling.by_rank else exchanges["A"]
        factors = tuple(map(Factors, names, (rules.a, rules.b)))
        bias = "bias" if scaling.bias else ""
        return replace(
            unscaled,
            operands=tuple(operands),
            functions=functions,
            contractions=(contraction._replace(factors=factors, bias=bias),),
            exchanges=exchanges,
        )

    @cached_property
    def given(self) -> Problem:
        """The same problem without a cast in the call: the caller passes A as it travels."""
        if not (self.scaling and self.scaling.source):
            return self
        return replace(self, scaling=replace(self.scaling, source=""))

    @cached_property
    def left(self) -> Buffer:
        """A as it travels or is multiplied: an operand, or the result of the call's cast."""
        return self._after_cast(self.given.specification.operands[0])

    @cached_property
    def factors(self) -> Buffer:
        """The factors of :attr:`left`."""
        return self._after_cast(self.given.specification.operands[2])

    def _after_cast(self, buffer: Buffer) -> Buffer:
        return buffer if self.given is self else buffer._replace(memory="local")

    def gathered(self, memory: str) -> Buffer:
        """The buffer of the gathered A."""
        shapes = tuple((self.product_rows(rank), self.k) for rank in range(self.world))
        return Buffer("gathered", "A", self.dtype, shapes, memory, layout=self.layout)

    @cached_property
    def heights(self) -> tuple[int, ...]:
        """Rows of the blocks of all pairs of ranks. Schedules cut the blocks into pieces."""
        ranks = range(self.world)
        return tuple(self.block(src, dst) for src in ranks for dst in ranks)

    @cached_property
    def sends_factors(self) -> bool:
        """Whether the factors of A's rows travel with them."""
        return self.scaling is not None and not (self.kind.scatters or self.scaling.replicated)

    def gathered_factors(self, name: str, memory: str) -> Buffer:
        """A buffer of the factors of the gathered A, by row or by rank."""
        factors, by_rank = self.factors, self.scaling and self.scaling.by_rank
        rows = (self.world if by_rank else self.product_rows(rank) for rank in range(self.world))
        shapes = tuple((count, factors.shapes[0][1]) for count in rows)
        return factors._replace(name=name, shapes=shapes, memory=memory, leaves=False)

    @property
    def layout(self) -> str:
        """Memory layout of the matrix that travels."""
        return "transposed" if self.transposed else "rows"

    @property
    def itemsize(self) -> int:
        """Bytes per element of A."""
        return ITEMSIZES[self.dtype]

    @property
    def out_dtype(self) -> str:
        """Name of the dtype of the product."""
        return self.scaling.out if self.scaling else self.dtype

    @property
    def kind_of_operands(self) -> str:
        """Name of the dtype and the scaling of the operands, as files write it."""
        return name_of(self.dtype, self.scaling)

    @property
    def moved_bytes(self) -> int:
        """Bytes of a row that travels: of A without its factors, or of the product."""
        if self.kind.scatters:
            return self.n * ITEMSIZES[self.out_dtype]
        return self.k * self.itemsize

    @property
    def cuts(self) -> tuple[int, int]:
        """Alignment of pieces: they begin at multiples of these numbers of rows and columns."""
        return self.scaling.rules[2:4] if self.scaling else (1, 1)

    @property
    def flops(self) -> int:
        """Floating-point operations of one rank's product."""
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        rows = f"{self.rows[0]} x {self.world} ranks"
        hosts = f", {self.hosts} hosts" if self.hosts > 1 else ""
        if not self.equal:
            rows = f"rows={[list(row) for row in self.blocks] or list(self.rows)}"
        names = "return_gathered", "symmetric", "transposed"
        flags = "".join(f", {name}" for name in names if getattr(self, name))
        dtype = f"{self.dtype} {self.scaling}" if self.scaling else self.dtype
        sizes = f"m={self.m} ({rows}), n={self.n}, k={self.k}"
        return f"{self.operator}({sizes}, {dtype}{hosts}{flags})"


def _row_sums(kind: Operator, blocks: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Rows that each rank of an all-to-all multiplies."""
    return tuple(map(sum, blocks if kind.scatters else zip(*blocks, strict=True)))


def digest(text: str) -> int:
    """40-bit fingerprint of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "little")
