"""Specifications: the matrices that the Plans of a call must compute, under any schedule.

A specification names matrices such as ``"A"`` and ``"A @ B"``. It lists the buffers of the caller
that hold them, the exchanges of their rows between ranks, and the products. Builders of Plans add
further buffers. :func:`ficco.plan.check` proves the Plans against the specification.
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

#: Largest size of a dimension, and most ranks of a group: more than any host has. Larger, mistyped
#: numbers would overflow, or keep a planner busy for hours.
MOST, MOST_RANKS = 1 << 40, 1024

#: The functions between the products of experts. ``ficco/compute/products.py`` computes them.
ACTIVATIONS = ("relu", "silu", "gelu")


def gated(activation: str) -> str:
    """The name of the gated form of an activation (SwiGLU and similar): the activation of the first
    half of the columns, times the second half."""
    return f"{activation} gated"


#: Functions of rows by name: the activation, and whether it is gated.
FUNCTIONS = {
    **{name: (name, False) for name in ACTIVATIONS},
    **{gated(name): (name, True) for name in ACTIVATIONS},
}

#: The function that merges the partial results of the steps of attention.
MERGE = "merge"

#: The functions that a copy within a rank may apply.
PLACED = (*FUNCTIONS, CAST, MERGE)

#: Slot buffers begin at multiples of these bytes.
ALIGNMENT = 512

#: A number for each pair of ranks, (source, destination).
OfPair = Callable[[int, int], int]


def zero(src: int, dst: int) -> int:
    """0 for each pair of ranks."""
    return 0


class Buffer(NamedTuple):
    """A matrix on every rank that steps read and write.

    Attributes:
        name: its name, used by Regions.
        holds: the matrix of the specification whose rows the buffer holds.
        dtype: name of the dtype of its elements.
        shapes: rows and columns by rank.
        memory: ``"operand"``, the caller's; ``"result"``, returned to the caller; ``"local"``,
            this rank's, for one call; ``"slot"``, symmetric memory that calls on a slot share.
        symmetric: an operand that peers read in place, or a result that they write in place.
        leaves: rows are numbered as they leave a rank, otherwise as they land.
        first: by rank, the number of the first row; empty: 0 everywhere.
        left: by rank, the number of the first column; empty: 0 everywhere.
        layout: ``"rows"``, row by row; ``"columns"``, each copy writes contiguous memory: columns
            ``[c, d)`` of all rows begin at element ``c * rows``, with a row pitch of ``d - c``;
            ``"transposed"``, column by column.
        matrices: number of matrices of a 3-D operand or result [matrices, rows, columns]. The
            buffer stacks them by rows. Each transposed matrix is stored by itself. 0: it is 2-D.
        block: if not 0, rows come in blocks of this size, and a call may have only a prefix of each
            block. The prefixes are packed without gaps. A step processes the present rows among
            the rows that it names. Sender and receiver hold the same prefix of a block, so a proof
            over full blocks covers every prefix.
        room: of a buffer in blocks, the most rows that a call has in all blocks; 0: all rows.
        indexed: the caller passes this operand as another matrix, and an index into the rows of
            that matrix for each row. Only a copy within the rank reads it.
        factor: of a result that reductions write: they multiply their sums by it before they round.
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
    factor: float = 1.0

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
        """Whether each row has a fixed place. In a slot where rows land they have no fixed place:
        each step names its rows, and other rows may overwrite them later in the call."""
        return self.memory != "slot" or self.leaves

    @property
    def rows(self) -> int:
        """Rows on the rank with the most rows."""
        return max(rows for rows, _ in self.shapes)

    def nbytes(self, rank: int) -> int:
        """Bytes on a rank. Symmetric memory has the largest rank's size on every rank."""
        shapes = self.shapes if self.memory == "slot" else self.shapes[rank : rank + 1]
        return max((self.room or rows) * cols for rows, cols in shapes) * self.itemsize


class Exchange(NamedTuple):
    """The transfers of the rows of a matrix: rank ``src`` sends a block to rank ``dst``.

    Attributes:
        block: rows of a block, or of each part if a block has several parts.
        leaves: number of its first row at the sender.
        lands: number of its first row at the receiver.
        sums: the blocks of all ranks are added up. On one rank, a row has the same number whether
            it lands or leaves.
        added: rows of a summed block that the receiver adds up; None: all rows.
        terms: rows of products travel, and steps list the ranks whose products a row contains.
        parts: number of parts of a block.
        leaves_apart, lands_apart: distance in rows between the beginnings of consecutive parts, at
            the sender and at the receiver.
        senders: function of a rank and its rows ``[first, last)``: a bit mask of the ranks that
            send all of these rows, rank r as bit r; 0 if the ranks differ between rows. None: every
            rank sends all rows.
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
        """Rows that a library's collective moves from one rank to another."""
        return (self.added or self.block)(src, dst)


class Factors(NamedTuple):
    """The factors that scale the elements of an operand.

    Attributes:
        matrix: name of the matrix of factors.
        share: how many rows and columns of the operand share a factor. 0: all of them. If the
            operand's rows travel, 0 rows means all rows of one sender, and factors are numbered by
            sender.
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
        bias: name of a row that is added once; empty: no bias.
        share: if not 0, ``b`` stacks several matrices by rows. Each matrix multiplies the next
            ``share`` rows of ``a``, as numbered where they land.
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
    """Attention under a mask: each row of ``out`` is computed from the same row of ``q`` and the
    rows of ``kv`` that it attends to.

    Attributes:
        q, kv, out: names of matrices.
        landed: by rank, the number of rows of ``kv`` that the rank has in the end.
        needs: function of a rank and rows ``[first, last)`` of ``q``: the rows of ``kv`` that any
            of them attends to, as disjoint ranges, numbered as they land.
        rectangles: function of a rank, rows of ``q`` and rows of ``kv``: the rectangles of the
            library's calls.
        heads: batch, heads of keys and head size: the dimensions of a row of ``kv`` after
            (keys, values).
        scale: factor of the scores.
        back: name of a second result, a matrix like ``kv``, with a term for each row that is
            attended to. ``out`` is then a sum. Without ``back``, the partial results of ``out``
            are stored separately until a function merges them.
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
    """Full rows of a matrix that a function reads or writes.

    Attributes:
        matrix: its name.
        cols: its number of columns.
        of: function of a rank and rows ``[first, last)`` of the function's first input: the
            bounds of the rows of this matrix.
    """

    matrix: str
    cols: int
    of: Callable[[int, int, int], tuple[int, int]]


class Application(NamedTuple):
    """A library function that computes rows of matrices from rows of other matrices: attention by
    heads, or its gradient. A row is a head, [positions, batch, size].

    Attributes:
        function: its name.
        inputs, outs: the matrices that it reads and writes, with rows numbered as they land.
        rectangles, scale: see :class:`Attention`; for all positions.
        heads: batch and head size.
        runs: function of a rank and rows ``[first, last)`` of the first input: these rows, cut into
            runs that one library call can process.
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
    """The matrices of a call, their exchanges between ranks, and the operations that compute them.

    Attributes:
        operands, results: buffers of the caller.
        contractions: the matrix products.
        exchanges: transfers of rows, by matrix. Matrices that are not listed stay on their rank.
        functions: ``functions[name, x]`` is the matrix that function ``name`` makes from x. The
            function is elementwise, or row by row if the number of columns changes. If the matrix
            is a scaled operand, the function casts x and computes the factors, too.
        attentions: attention of queries to keys and values that travel.
        applications: library functions of full rows.
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
        """The first exchange. The rows of a product travel by it, and so do their factors."""
        return next(iter(self.exchanges.values()))


def check_name(argument: str, name: str, known: Iterable[str]) -> None:
    """Raise unless a name is one of the known names."""
    if name not in known:
        raise InvalidArgument(argument, f"required one of {', '.join(known)}, got {name!r}")


class AnyProblem:
    """Base of all problems: the operator and sizes of one call, equal on every rank of its group.

    Attributes:
        operator: name of the operator.
        world: number of ranks.
        specification: the matrices that its Plans must compute.
        hosts: number of hosts. Each host has equally many ranks, numbered consecutively.
        scaling: how float8 operands are scaled; None for other dtypes.
    """

    scaling: Scaling | None = None

    if TYPE_CHECKING:  # fields of some problems, properties of others

        @property
        def operator(self) -> str: ...

        @property
        def world(self) -> int: ...

        @property
        def specification(self) -> Specification: ...

    @property
    def hosts(self) -> int:
        """Number of hosts: 1 if the problem has no such field."""
        return 1

    def _check(self, dtype: str, least: int, sizes: Iterable[tuple[str, int]]) -> None:
        """Raise on an unsupported dtype, a size below ``least``, or impossible ranks or hosts."""
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
        """Distance in hosts from one rank to another, modulo the number of hosts."""
        return (self.host(other) - self.host(rank)) % self.hosts

    def on_host(self, host: int, rank: int) -> int:
        """The rank on a host, modulo the number of hosts, that has the same place as ``rank`` on
        its own host. Such ranks form a rail: ranks exchange data between hosts along their rail."""
        return host % self.hosts * self.local_world + rank % self.local_world
