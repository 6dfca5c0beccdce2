"""What a call asks and its Plans have to compute, independent of any schedule.

A specification names matrices such as ``"A"`` and ``"A @ B"``, and says which buffers of the caller
hold them, how their rows travel between ranks, and what is multiplied to what. Builders of Plans
add buffers of their own; :func:`ficco.plan.check` proves the Plans against the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ficco.errors import InvalidArgument
from ficco.problems.mask import Rectangle, Span
from ficco.problems.scaling import CAST, Scaling

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

#: Dtypes of operands without factors, with the dtype of their sums.
SUMS = dict.fromkeys(("bfloat16", "float16", "float32"), "float32") | {"float64": "float64"}

#: Largest size of a dimension, and most ranks of a group: more than any host has. Beyond them
#: mistyped numbers would overflow, or keep a planner busy for hours.
MOST, MOST_RANKS = 1 << 40, 1024

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
        added: of blocks that are added up, the rows that the receiver adds up; None: all.
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
    added: OfPair | None = None

    def by_collective(self, src: int, dst: int) -> int:
        """Rows that a library's collective brings from one rank to another."""
        return (self.added or self.block)(src, dst)


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
        factors: the factors of ``a`` and ``b``, empty if neither is scaled.
        bias: name of a row that is added once; empty for none.
        share: if not 0, ``b`` is several matrices, one below the other: the first is for so many
            rows of ``a``, by their numbers where they land, the second for as many that follow.
    """

    a: str
    b: str
    out: str
    summed: tuple[int, ...]
    transposed: bool = False
    factors: tuple[Factors, ...] = ()
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
        rectangles: of a rank, some rows of ``q`` and some of ``kv``, what a library's calls have.
        heads: batch, heads of keys and size of a head: of ``kv``, after keys or values.
        scale: by what scores are multiplied.
        back: name of a matrix like ``kv`` that is made, too: of its rows that are attended to.
            ``out`` is then a sum; without, what steps give of it stays side by side until a
            function merges that.
    """

    q: str
    kv: str
    out: str
    landed: tuple[int, ...]
    needs: Callable[[int, int, int], Sequence[Span]]
    rectangles: Callable[[int, Span, Span], Sequence[Rectangle]]
    heads: tuple[int, int, int]
    scale: float
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
    """A function of a library that makes rows of some matrices of rows of others: attention by
    heads, or its gradient. A row is a head, [positions, batch, size].

    Attributes:
        function: its name.
        inputs, outs: what it reads and makes, rows as they land.
        rectangles, scale: as :class:`Attention` has them, of all positions.
        heads: batch and size of a head.
        runs: of a rank and bounds of rows of the first input, those that a library's call can have.
    """

    function: str
    inputs: tuple[Rows, ...]
    outs: tuple[Rows, ...]
    rectangles: Sequence[Rectangle]
    heads: tuple[int, int]
    scale: float
    runs: Callable[[int, int, int], Iterable[Span]]


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

    @property
    def exchange(self) -> Exchange:
        """The first exchange: of a product that of its rows, by which their factors travel, too."""
        return next(iter(self.exchanges.values()))


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is not known."""
    if name not in known:
        raise InvalidArgument(what, f"required one of {', '.join(known)}, got {name!r}")


class AnyProblem:
    """What one call asks, equal on every rank of its group.

    Attributes:
        operator: what is called.
        world: number of ranks.
        specification: what its Plans have to compute.
        hosts: how many hosts the ranks are on, each with as many, which follow each other.
        scaling: how float8 operands are scaled; None for any other.
    """

    scaling: Scaling | None = None

    if TYPE_CHECKING:  # fields of some problems, properties of others

        @property
        def operator(self) -> str: ...

        @property
        def world(self) -> int: ...

        @property
        def hosts(self) -> int: ...

        @property
        def specification(self) -> Specification: ...

    def _check(self, dtype: str, least: int, sizes: Iterable[tuple[str, int]]) -> None:
        """Refuse a dtype, sizes under a least one, and ranks or hosts that no problem has."""
        if self.scaling is None and dtype not in SUMS:
            raise NotImplementedError(f"dtype {dtype} is not served; use one of {', '.join(SUMS)}")
        if self.world > MOST_RANKS:
            raise InvalidArgument("world", f"required at most {MOST_RANKS} ranks, got {self.world}")
        for name, size in sizes:
            if not least <= size <= MOST:
                bounds = f"at least {least}" if size < least else f"at most {MOST}"
                raise InvalidArgument(name, f"required a size of {bounds}, got {size}")
        if self.hosts < 1 or self.world % self.hosts:
            raise InvalidArgument(
                "hosts", f"required a divisor of {self.world} ranks, got {self.hosts}"
            )

    @cached_property
    def local_world(self) -> int:
        """Number of ranks on a host."""
        return self.world // self.hosts

    def host(self, rank: int) -> int:
        """The host of a rank."""
        return rank // self.local_world

    def ranks_of(self, host: int) -> range:
        """The ranks of a host."""
        return range(host * self.local_world, (host + 1) * self.local_world)

    def hosts_ahead(self, rank: int, other: int) -> int:
        """How many hosts further another rank is, counted modulo their number."""
        return (self.host(other) - self.host(rank)) % self.hosts

    def on_host(self, host: int, rank: int) -> int:
        """The rank with another's place on a host, counted modulo their number. These ranks are a
        rail: of each host the one that exchanges with those of the others."""
        return host % self.hosts * self.local_world + rank % self.local_world
