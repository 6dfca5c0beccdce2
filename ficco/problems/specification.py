"""What Plans have to compute, independent of any schedule.

A specification names matrices such as ``"A"`` and ``"A @ B"``, and says which buffers of the caller
hold them, how their rows travel between ranks, and what is multiplied to what. Builders of Plans
add buffers of their own; :func:`ficco.plan.check` proves the Plans against the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ficco.problems.scaling import CAST

#: Bytes per element of the dtypes that a buffer can have.
ITEMSIZES = {
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}

#: The functions between the products of experts. ``ficco/compute/products.py`` computes them.
ACTIVATIONS = ("relu", "silu", "gelu")


def gated(activation: str) -> str:
    """The name of the function of rows that applies an activation to the first half of the columns,
    and multiplies the result by the second half (SwiGLU and its kind)."""
    return f"{activation} gated"


#: By the name of a function of rows, its activation, and whether that is gated.
FUNCTIONS = {
    **{name: (name, False) for name in ACTIVATIONS},
    **{gated(name): (name, True) for name in ACTIVATIONS},
}

#: The function that makes the result of what the steps of attention give.
MERGE = "merge"

#: The functions that a place may apply.
PLACED = (*FUNCTIONS, CAST, MERGE)

#: Slot buffers begin at multiples of these bytes.
ALIGNMENT = 512

#: A number for each pair of ranks, (source, destination).
OfPair = Callable[[int, int], int]


class Buffer(NamedTuple):
    """A matrix on every rank that steps read and write.

    Attributes:
        name: what a Region calls it.
        holds: the matrix of the specification whose rows are in it.
        dtype: name of the dtype of its elements.
        shapes: rows and columns by rank.
        memory: ``"operand"``, the caller's; ``"result"``, returned to the caller; ``"local"``,
            this rank's, for one call; ``"slot"``, symmetric memory that calls on a slot share.
        symmetric: an operand that peers can read in place.
        leaves: rows are numbered as they leave a rank, otherwise as they land.
        first: by rank, the number of the first row; empty: 0 everywhere.
        left: by rank, the number of the first column; empty: 0 everywhere.
        layout: ``"rows"``, row by row; ``"columns"``, what one copy brings is contiguous: columns
            ``[c, d)`` of all rows begin at element ``c * rows``, with a row pitch of ``d - c``;
            ``"transposed"``, column by column.
        matrices: of what the caller has as [matrices, rows, columns], how many these are; here one
            is below the other. Transposed ones lie so one by one. 0: it is one matrix.
        block: if not 0, rows are in blocks of so many, of which a call may have only the first
            ones. What it has then lies without gaps, one block right after the other, and a step
            is about what its call has of the rows that it names. Every row that a call has it has
            wherever that row travels, so that what is proven of all rows is true of these.
        room: of a buffer in blocks, the most rows that calls have of them in all; 0: as many as
            there are.
        indexed: of an operand that the caller passes as another matrix and, for each row, which of
            the rows of that it is; only a place within the rank reads it.
    """

    name: str
    holds: str
    dtype: str
    shapes: tuple[tuple[int, int], ...]
    memory: str
    symmetric: bool = False
    leaves: bool = False
    first: tuple[int, ...] = ()
    layout: str = "rows"
    matrices: int = 0
    left: tuple[int, ...] = ()
    block: int = 0
    room: int = 0
    indexed: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZES[self.dtype]

    @property
    def reachable(self) -> bool:
        """Whether peers can access it."""
        return self.memory == "slot" or self.symmetric

    @property
    def placed(self) -> bool:
        """Whether a row has a fixed place. Where rows land in a slot, each step says what they are,
        and others may take their place later in the call."""
        return self.memory != "slot" or self.leaves

    @property
    def rows(self) -> int:
        """Rows on the rank that has most."""
        return max(rows for rows, _ in self.shapes)

    def nbytes(self, rank: int) -> int:
        """Bytes on a rank. Symmetric memory has the same size everywhere: that of the largest."""
        shapes = self.shapes if self.memory == "slot" else self.shapes[rank : rank + 1]
        return max((self.room or rows) * cols for rows, cols in shapes) * self.itemsize


class Exchange(NamedTuple):
    """How the rows of a matrix travel: rank ``src`` has a block of them for rank ``dst``.

    Attributes:
        block: rows of a block; of each of its parts, if it has several.
        leaves: number of its first row at the sender.
        lands: number of its first row at the receiver.
        sums: the blocks of all ranks are added up; a row has one number on a rank, whether it lands
            there or leaves.
        terms: what travels are products, and steps say whose are in it.
        parts: how many parts a block has.
        leaves_apart, lands_apart: rows from the beginning of a part to that of the next one, where
            they leave and where they land.
        senders: of a rank and the first and last of some of its rows, exclusive, the ranks that
            have a block with each of these rows, rank r as bit r, or 0 if rows differ in that;
            None: all ranks have one with all rows.
    """

    block: OfPair
    leaves: OfPair
    lands: OfPair
    sums: bool = False
    terms: bool = False
    parts: int = 1
    leaves_apart: int = 0
    lands_apart: int = 0
    senders: Callable[[int, int, int], int] | None = None


class Factors(NamedTuple):
    """By what the elements of an operand are multiplied.

    Attributes:
        matrix: name of the matrix of factors.
        share: how many rows and columns of the operand share a factor. 0: all of them, or all rows
            of one block where the operand's rows travel; factors are then numbered by its sender.
    """

    matrix: str
    share: tuple[int, int]


class Contraction(NamedTuple):
    """A matrix product, ``out = a @ b`` or ``a.T @ b``.

    Attributes:
        a, b, out: names of matrices.
        summed: by rank, the length of the dimension that is summed over.
        transposed: a is transposed.
        scales: the factors of ``a`` and ``b``, empty if neither is scaled.
        bias: name of a row that is added once; empty for none.
        share: if not 0, ``b`` is several matrices, one below the other: the first is for so many
            rows of ``a``, by their numbers where they land, the second for as many that follow.
    """

    a: str
    b: str
    out: str
    summed: tuple[int, ...]
    transposed: bool = False
    scales: tuple[Factors, ...] = ()
    bias: str = ""
    share: int = 0


class Attention(NamedTuple):
    """Rows of ``out`` that are made of the same rows of ``q`` and of those rows of ``kv`` that a
    mask lets them attend to.

    Attributes:
        q, kv, out: names of matrices.
        landed: by rank, how many rows of ``kv`` it has in the end.
        needs: of a rank and the first and last of some rows of ``q``, exclusive, the rows of ``kv``
            that any of them attends to, as disjoint ranges of their numbers where they land.
        back: name of a matrix like ``kv`` that is made, too: of its rows that are attended to.
            ``out`` is then a sum; without, what steps give of it stays side by side until a
            function merges that.
    """

    q: str
    kv: str
    out: str
    landed: tuple[int, ...]
    needs: Callable[[int, int, int], Sequence[tuple[int, int]]]
    back: str = ""


class Rows(NamedTuple):
    """Whole rows of a matrix that a function reads or makes.

    Attributes:
        matrix: its name.
        cols: how many columns it has.
        of: of a rank and bounds of rows of the function's first input, the bounds of the rows.
    """

    matrix: str
    cols: int
    of: Callable[[int, int, int], tuple[int, int]]


class Application(NamedTuple):
    """A function of a library that makes rows of some matrices of rows of others.

    Attributes:
        function: its name.
        inputs, outs: what it reads and makes, rows as they land.
    """

    function: str
    inputs: tuple[Rows, ...]
    outs: tuple[Rows, ...]


@dataclass(frozen=True)
class Specification:
    """See the module's docstring.

    Attributes:
        operands, results: buffers of the caller.
        contractions: the products that make one matrix of others.
        exchanges: by matrix, how its rows travel; the others stay on their rank.
        functions: ``functions[name, x]`` is the matrix that a function makes of x: elementwise;
            row by row, if it has another number of columns; or, where it is a scaled operand, by
            casting: it then makes the factors, too.
        attentions: what attends to which rows of what.
        applications: the functions of libraries that make matrices.
    """

    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    contractions: tuple[Contraction, ...]
    exchanges: Mapping[str, Exchange]
    functions: Mapping[tuple[str, str], str] = field(default_factory=dict)
    attentions: tuple[Attention, ...] = ()
    applications: tuple[Application, ...] = ()
