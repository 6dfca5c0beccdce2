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
)

#: Bytes per element of the supported dtypes of operands without scales.
ITEMSIZE = {name: ITEMSIZES[name] for name in SUMS}


class Operator(NamedTuple):
    """The properties in which operators differ.

    Attributes:
        collective: name of the collective that it overlaps, in words.
        scatters: the product travels (a scattering operator); otherwise A does (gathering).
        sums: the products of all ranks are added up.
        blocks: every pair of ranks has a block of its own; otherwise rows belong to one rank.
        returns: the sums travel back to all ranks.
        inner: the product sums over the rows of A that travel: it multiplies A transposed.
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
        k: columns of A. They are the rows of B or, if A is transposed, of the result.
        dtype: name of the dtype of A and, without scales, of B and the product.
        blocks: all-to-all: rows that rank i sends to rank j, as ``blocks[i][j]``; else empty.
        return_gathered: the gathered A is a second result.
        symmetric: A is in symmetric memory, so that peers can read it in place.
        scaling: how float8 operands are scaled; None for any other.
        hosts: how many hosts the ranks are on, each with as many, which follow each other.
        transposed: all-to-all: what travels, A or the product, lies transposed, so that rows that
            travel are columns in memory. On the rank that passes A, or gets the product, blocks are
            equal and lie so one by one: [W, rows, columns], with contiguous rows.

    Raises:
        ValueError: a value is wrong, or they do not fit together.
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
        if self.kind.blocks and not (square and self.rows == _summed(self.kind, self.blocks)):
            raise ValueError("blocks: required a W x W table that adds up to the rows of each rank")
        if self.transposed:
            self._check_transposed()

    def _check_transposed(self) -> None:
        if not self.kind.blocks or self.scaling is not None:
            raise NotImplementedError(
                f"{self.operator}: what lies transposed is served for all-to-alls without scales"
            )
        by_holder = zip(*self.blocks, strict=True) if self.kind.scatters else self.blocks
        if any(len(set(sizes)) > 1 for sizes in by_holder):
            raise ValueError(
                "blocks: required equal blocks of a rank where they lie transposed, got "
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
            what = "factors of all ranks' rows on each" if scaling.replicated else "float8 operands"
            raise NotImplementedError(f"{self.operator} does not take {what}")
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
            what = "return_gathered" if self.return_gathered else "rows that are float8 already"
            raise NotImplementedError(
                f"{self.operator}: quantize does not serve {what}; cast them yourself and pass "
                "scale_a"
            )

    @classmethod
    def of_blocks(
        cls, operator: str, blocks: Sequence[Sequence[int]], n: int, k: int, dtype: str, **rest: Any
    ) -> Problem:
        """The Problem of an all-to-all, whose ``rows`` follow from its table.

        >>> str(Problem.of_blocks("all_to_all_matmul", [[1, 2], [3, 4]], 8, 8, "float32"))
        'all_to_all_matmul(m=6 (rows=[[1, 2], [3, 4]]), n=8, k=8, float32)'
        """
        table = tuple(tuple(row) for row in blocks)
        rows = _summed(OPERATORS[operator], table)
        return cls(operator, rows, n, k, dtype, blocks=table, **rest)

    @cached_property
    def kind(self) -> Operator:
        """The properties of its operator."""
        return OPERATORS[self.operator]

    @cached_property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @cached_property
    def m(self) -> int:
        """Rows that a rank multiplies; all-to-all: those of the rank that multiplies most."""
        return max(self.rows) if self.kind.blocks else sum(self.rows)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First row that belongs to each rank, and m at the end. Not for an all-to-all."""
        return (0, *accumulate(self.rows))

    # The blocks that travel: the rows that rank `src` has for rank `dst`.

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
        """First row of a block at its receiver: in the gathered A, in the result of an all-to-all,
        or, if blocks are summed, in the product that all ranks share."""
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
        """Rows of a rank's left operand, as its caller passes it."""
        if self.kind.scatters:
            return self.product_rows(rank)
        return sum(self.blocks[rank]) if self.kind.blocks else self.rows[rank]

    def product_rows(self, rank: int) -> int:
        """Rows that a rank multiplies."""
        return self.rows[rank] if self.kind.blocks else self.m

    def b_rows(self, rank: int) -> int:
        """Rows of a rank's local B, which its products sum over."""
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
        """Whether the blocks of all pairs of ranks are known to have as many rows."""
        return self.equal

    @property
    def masked(self) -> bool:
        """Whether a mask says which rows travel between two ranks."""
        return False

    @cached_property
    def evened(self) -> Problem:
        """The same with as many rows in all, rounded up, that every rank, or pair, shares equally.

        >>> str(Problem("all_gather_matmul", (3, 6), 8, 8, "float32").evened)
        'all_gather_matmul(m=10 (5 x 2 ranks), n=8, k=8, float32)'
        """
        if self.equal:
            return self
        each = -(-sum(self.rows) // (self.world ** (1 + self.kind.blocks)))
        if not self.kind.blocks:
            return replace(self, rows=(each,) * self.world)
        row = (each,) * self.world
        return replace(self, rows=(sum(row),) * self.world, blocks=(row,) * self.world)

    @cached_property
    def specification(self) -> Specification:
        """What its Plans have to compute."""
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
            lies: dict[str, Any] = {"layout": self.layout, "matrices": self.world}
            a, out = (a, out._replace(**lies)) if kind.scatters else (a._replace(**lies), out)
        results = [out]
        if self.return_gathered:
            results.append(self.gathered("result"))
        exchange = Exchange(self.block, self.leaves, self.lands, terms=kind.scatters)
        if kind.sums:  # each rank has the whole product
            sums: dict[str, Any] = {"sums": True, "terms": True, "added": self.block}
            exchange = Exchange(self._whole, self._start, self._start, **sums)
        contraction = Contraction("A", "B", product, tuple(map(self.b_rows, ranks)), kind.inner)
        asked = Specification(
            operands=(a, b),
            results=tuple(results),
            contractions=(contraction,),
            exchanges={product if kind.scatters else "A": exchange},
        )
        return self._scaled(asked, self.scaling) if self.scaling else asked

    def _scaled(self, asked: Specification, scaling: Scaling) -> Specification:
        """The same with the factors of A and of B, and the bias."""
        (a, b), (contraction,), rules = asked.operands, asked.contractions, scaling.rules
        names = ("factors of A", "factors of B")
        held, travels = a.shapes, self.sends_factors
        if scaling.replicated:
            held = tuple((self.product_rows(rank), self.k) for rank in range(self.world))

        def buffer(name: str, holds: str, shapes: Sequence[tuple[int, int]], share: Any) -> Buffer:
            counts = tuple(
                (factor_count(m, share[0]), factor_count(n, share[1])) for m, n in shapes
            )
            return Buffer(name, holds, "float32", counts, "operand")

        factors_of_a = buffer("scale_a", names[0], held, rules.a)._replace(leaves=travels)
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
        exchanges = dict(asked.exchanges)
        if travels:
            by_rank = Exchange(self._one, self._start, self._sender)
            exchanges[names[0]] = by_rank if scaling.by_rank else exchanges["A"]
        factors = tuple(Factors(*each) for each in zip(names, (rules.a, rules.b), strict=True))
        bias = "bias" if scaling.bias else ""
        return replace(
            asked,
            operands=tuple(operands),
            functions=functions,
            contractions=(contraction._replace(factors=factors, bias=bias),),
            exchanges=exchanges,
        )

    def _whole(self, src: int, dst: int) -> int:
        return self.m

    def _start(self, src: int, dst: int) -> int:
        return 0

    def _one(self, src: int, dst: int) -> int:
        return 1

    def _sender(self, src: int, dst: int) -> int:
        return src

    @cached_property
    def given(self) -> Problem:
        """The same where the caller has cast A, or need not."""
        if not (self.scaling and self.scaling.source):
            return self
        return replace(self, scaling=replace(self.scaling, source=""))

    @cached_property
    def left(self) -> Buffer:
        """A as it travels, or is multiplied: an operand, or what the call casts."""
        return self._made(self.given.specification.operands[0])

    @cached_property
    def factors(self) -> Buffer:
        """The factors of :attr:`left`."""
        return self._made(self.given.specification.operands[2])

    def _made(self, buffer: Buffer) -> Buffer:
        return buffer if self.given is self else buffer._replace(memory="local")

    def gathered(self, memory: str) -> Buffer:
        """The buffer of the gathered A."""
        shapes = tuple((self.product_rows(rank), self.k) for rank in range(self.world))
        return Buffer("gathered", "A", self.dtype, shapes, memory, layout=self.layout)

    @cached_property
    def heights(self) -> tuple[int, ...]:
        """Rows of the blocks of all pairs of ranks, those that are cut into pieces."""
        ranks = range(self.world)
        return tuple(self.block(src, dst) for src in ranks for dst in ranks)

    @cached_property
    def sends_factors(self) -> bool:
        """Whether the factors of A's rows travel with them."""
        return self.scaling is not None and not (self.kind.scatters or self.scaling.replicated)

    def gathered_factors(self, name: str, memory: str) -> Buffer:
        """A buffer of the factors of the gathered A: of its rows, or of each rank's."""
        factors, by_rank = self.factors, self.scaling and self.scaling.by_rank
        rows = (self.world if by_rank else self.product_rows(rank) for rank in range(self.world))
        shapes = tuple((count, factors.shapes[0][1]) for count in rows)
        return factors._replace(name=name, shapes=shapes, memory=memory, leaves=False)

    @property
    def layout(self) -> str:
        """How what travels lies in memory."""
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
        """Dtype and scales of the operands, by the name that files have for them."""
        return name_of(self.dtype, self.scaling)

    @property
    def moved_bytes(self) -> int:
        """Bytes of a row of what travels: of A, without factors, or of the product."""
        if self.kind.scatters:
            return self.n * ITEMSIZES[self.out_dtype]
        return self.k * self.itemsize

    @property
    def cuts(self) -> tuple[int, int]:
        """Multiples of rows and of columns at which pieces may begin."""
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


def _summed(kind: Operator, blocks: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The rows that each rank of an all-to-all multiplies."""
    return tuple(map(sum, blocks if kind.scatters else zip(*blocks, strict=True)))


def digest(text: str) -> int:
    """40-bit fingerprint of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "little")
