"""Plans as data.

A Plan is the work of one rank for one Problem under one Schedule: Steps in enqueue order, each on a
lane. The lanes of a rank run concurrently. The steps of a lane run one after the other, except for
copies that one launch may carry out (:func:`ficco.plan.together`). Engines execute Plans,
:func:`ficco.plan.check` proves them, :func:`ficco.plan.render` draws them. This module depends on
no device.

A Plan lists its buffers (:class:`Buffer`). The caller's buffers are ``a``, ``b``, ``out`` and, on
request, ``gathered``. Builders add the buffers of a schedule:

=========  ==========================================================================
buffer     contents
=========  ==========================================================================
publish    copy of A for peers to read (pull); for scattering operators, copy of the product
staging    pieces that arrive from peers
sum        float32 sums of pieces, if the dtype is narrower
parts      results of attention steps, each a mean of values and the weight of its keys; kept
           separately until they are merged
partial    the product before it travels (scattering operators)
q heads    in attention by heads, all positions of a rank's heads; likewise for other matrices
gathered   A, gathered by a collective
a, scale_a A in float8 and its factors, if the call casts the caller's A (``wide``)
=========  ==========================================================================
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ficco.problems.mask import LibraryCall
from ficco.problems.specification import ALIGNMENT, AnyProblem, Buffer

#: If more objects than this are new, all move to the oldest generation; else none is touched.
MANY = 1 << 17
#: Python 3.12 freezes some objects itself (375 in 3.12.1); a caller who does freezes all it has.
FROZEN = 1000


@contextmanager
def paused() -> Iterator[None]:
    """No garbage collection within the block.

    The plans of many ranks are millions of tuples without cycles: the collector would walk them
    again and again, and find nothing. It would do so after the block, too, for up to a fifth of the
    time that making them took.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled and gc.get_count()[0] > MANY and gc.get_freeze_count() < FROZEN:
            gc.freeze()
            gc.unfreeze()  # moves all objects to the oldest generation without reading them
        if enabled:
            gc.enable()


#: Names of operations (:attr:`Step.op`). Readers of Plans refuse any other (:func:`unknown`).
OPS = (
    *("copy", "place", "network", "collective"),
    *("matmul", "attend", "apply", "call", "reduce", "sync"),
)

#: Creates a named tuple from all its fields, ``new(Region, (...))``, without checks, in half the
#: time of a call of the class. Only for the few classes with millions of instances.
new = tuple.__new__


class Region(NamedTuple):
    """A rectangle of a buffer of one rank; ``stop`` bounds are exclusive."""

    buffer: str
    rank: int
    row: int
    row_stop: int
    col: int
    col_stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.row_stop - self.row

    @property
    def cols(self) -> int:
        """Number of columns."""
        return self.col_stop - self.col

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows * self.cols


class Signal(NamedTuple):
    """One word with one poster and one waiter, in the memory of the waiter.

    A word rests at 0. In a call it is posted once, waited for once and cleared. Words of the kind
    ``"released"``, with which a rank hands its workspace slot to its peers, rest at 1: they are
    waited for first and posted last, which orders a call after the previous one.

    Attributes:
        slot: distinguishes signals of a kind between the same ranks.
        first, last: bounds of the signal's rows, numbered as its waiter receives them
            (:meth:`Problem.lands`) or, for a product to fetch or send, as rows of the product.
    """

    kind: str
    poster: int
    waiter: int
    slot: int
    word: int
    first: int = 0
    last: int = 0

    @property
    def released(self) -> bool:
        """Whether the signal hands over a slot, and rests at 1."""
        return self.kind == "released"

    @property
    def name(self) -> str:
        """Kind, poster, slot and waiter, as errors print them: ``ready 0.1>2``."""
        slot = "" if self.released else f".{self.slot}"
        return f"{self.kind} {self.poster}{slot}>{self.waiter}"


class Transfer(NamedTuple):
    """Work of a step: a copy of a region to a region of the same size, between ranks (``"copy"``)
    or within a rank (``"place"``); or a strided batch of copies.

    Copy ``i`` of the batch reads ``src`` moved down by ``i * src_stride`` rows and writes ``dst``
    moved down by ``i * dst_stride`` rows.

    Attributes:
        terms: ranks whose products are summed in the moved rows, rank r as bit r; 0 for operands.
        function: name of a function that a place applies; empty for none.
        factors: destination of the factors, if a place casts to float8. A place may also change
            the dtype.
        mover: ``"dma"`` or ``"kernel"``, for a copy between ranks, or for a place that may join
            such copies.
    """

    src: Region
    dst: Region
    terms: int = 0
    function: str = ""
    factors: Region | None = None
    batch: int = 1
    src_stride: int = 0
    dst_stride: int = 0
    mover: str = "dma"

    @property
    def local(self) -> bool:
        """Whether both regions are of one rank."""
        return self.src.rank == self.dst.rank

    @property
    def elements(self) -> int:
        """Number of moved elements."""
        return self.batch * self.src.elements


#: The other fields of a transfer that is one plain copy, for :data:`new`.
PLAIN = ("", None, 1, 0, 0, "dma")


class Crossing(NamedTuple):
    """Work of a step: concurrent sends and receives of this rank between hosts (``"network"``).

    The moves between two ranks are sent and received in the same order. The step ends when both
    sides have reached each of its moves.
    """

    moves: tuple[Transfer, ...]


class LibraryMove(NamedTuple):
    """Work of a step: the library's collective for the whole exchange (``"collective"``), between
    two whole buffers of this rank. The label of the step names it."""

    src: Region
    dst: Region


class Product(NamedTuple):
    """``out (+)= a @ b``, or a strided batch of such products.

    Product ``i`` of the batch reads ``a`` moved down by ``i * a_stride`` rows and writes ``out``
    moved down by ``i * out_stride`` rows. All share ``b``, or each reads ``b`` moved down by
    ``i * b_stride`` rows.

    Attributes:
        terms: ranks whose products are in the sum that the product adds to, see :class:`Transfer`.
        addend: region of that sum if it is not ``out``: ``out = addend + a @ b``, without
            ``accumulate``.
        transposed: ``a.T`` is multiplied; never a batch.
        factors: factors of ``a`` and of ``b``, as regions of float32
            (:class:`ficco.problems.specification.Factors`); empty for operands without factors.
            The factors of ``a`` move down with ``a`` if each row has its own.
        bias: row that is added to each row.
    """

    a: Region
    b: Region
    out: Region
    accumulate: bool = False
    batch: int = 1
    a_stride: int = 0
    out_stride: int = 0
    terms: int = 0
    addend: Region | None = None
    transposed: bool = False
    factors: tuple[Region, ...] = ()
    bias: Region | None = None
    b_stride: int = 0

    @property
    def factor_stride(self) -> int:
        """Rows by which the factors of ``a`` move down in a batch."""
        return self.a_stride if self.factors and self.factors[0].rows == self.a.rows else 0


class Products(NamedTuple):
    """Work of a step: matrix products (``"matmul"``).

    ``callers``: the caller's own work on rows as they arrive (:func:`ficco.arriving`), a
    ``"call"``; each product stands for it by a column with one element for each row of A.
    """

    products: tuple[Product, ...]
    callers: bool = False


class Reduction(NamedTuple):
    """Work of a step: ``out = sum of parts`` (``"reduce"``), added in float32 in their order and
    rounded once.

    ``terms``: for each part, the ranks whose products are in it. Parts may be in peers' memory.
    """

    parts: tuple[Region, ...]
    terms: tuple[int, ...]
    out: Region


class Attending(NamedTuple):
    """Attention of rows of queries to rows of keys and values, under the mask of the problem.

    Attributes:
        q, kv, out: regions of whole rows. Rows of ``q`` and ``out`` have the same numbers.
        first: number of the first row of ``kv`` where it lands.
        pairs: number of pairs of a query and a key, for one head.
        accumulate: add to ``out``, a sum over earlier keys; not for parts.
        back: in a backward, the gradient of ``kv``; ``out`` is then the gradient of ``q``.
        calls: the calls of a library.
    """

    q: Region
    kv: Region
    out: Region
    first: int
    pairs: int
    accumulate: bool = False
    back: Region | None = None
    calls: tuple[LibraryCall, ...] = ()


class Attendings(NamedTuple):
    """Work of a step: attention (``"attend"``)."""

    attends: tuple[Attending, ...]

    def meets(self, first: int, last: int) -> bool:
        """Whether queries [first, last) attend in this step."""
        return any(one.out.row < last and first < one.out.row_stop for one in self.attends)


class Applied(NamedTuple):
    """Work of a step: a function of a library, of whole rows (``"apply"``); see
    :class:`ficco.problems.specification.Application`.

    Attributes:
        function: name of the function.
        first, last: bounds of the rows of the first input.
        inputs, outs: regions that the function reads and writes.
        flops: floating-point operations.
        calls: the calls of a library.
    """

    function: str
    first: int
    last: int
    inputs: tuple[Region, ...]
    outs: tuple[Region, ...]
    flops: float = 0.0
    calls: tuple[LibraryCall, ...] = ()


#: Work of a step; None for a step of signals only (``"sync"``).
Payload = Transfer | Crossing | LibraryMove | Products | Attendings | Applied | Reduction | None
#: Operations that the type of the work names.
_OPS = {
    Crossing: "network",
    LibraryMove: "collective",
    Attendings: "attend",
    Applied: "apply",
    Reduction: "reduce",
    type(None): "sync",
}


class Step(NamedTuple):
    """An operation on a lane: ``waits``, then the work, then ``posts``.

    Attributes:
        work: what the step does; None if it only waits, posts and clears.
        lane: ``"compute0"``, ``"copy0"``, ``"reduce0"``, ..., or ``"sync"``.
        label: description for human readers; the name of a collective.
        waits: signals waited for before the work.
        posts: signals posted once the work is complete.
        clears: words reset to 0 after the waits.
        after: indices of earlier steps of this rank, on other lanes, that must be complete first.
        gates: signals that each gate rows ``first`` to ``last`` of products. The parts run in this
            order, after the rows without a gate.
        announces: signals posted once their rows of the product are complete, in this order. Rows
            without an announcement are multiplied last.
        part: number of the part of a split step (:func:`ficco.plan.in_parts`), from 1; 0 for a
            whole step.
    """

    work: Payload
    lane: str
    label: str
    waits: tuple[Signal, ...] = ()
    posts: tuple[Signal, ...] = ()
    clears: tuple[Signal, ...] = ()
    after: tuple[int, ...] = ()
    gates: tuple[Signal, ...] = ()
    announces: tuple[Signal, ...] = ()
    part: int = 0

    @property
    def op(self) -> str:
        """Name of the operation, one of :data:`OPS`."""
        work = self.work
        if isinstance(work, Transfer):
            return "place" if work.local else "copy"
        if isinstance(work, Products):
            return "call" if work.callers else "matmul"
        return _OPS.get(type(work)) or type(work).__name__.lower()

    @property
    def copy(self) -> Transfer | None:
        """The transfer of a copy between ranks; None for other steps."""
        work = self.work
        return work if isinstance(work, Transfer) and work.src.rank != work.dst.rank else None

    @property
    def products(self) -> tuple[Product, ...]:
        """The products of the step, if its work is products."""
        return self.work.products if isinstance(self.work, Products) else ()

    @property
    def whole(self) -> bool:
        """Whether no signal gates or announces only some rows."""
        return not (self.gates or self.announces)


def unknown(step: Step, reader: str) -> NotImplementedError:
    """Error of a reader of Plans about an unknown operation."""
    return NotImplementedError(
        f"{reader} does not know the operation {step.op!r} of step {step.label!r} on {step.lane}; "
        f"required one of {', '.join(OPS)}"
    )


@dataclass(frozen=True)
class Plan:
    """The steps of one rank.

    Attributes:
        steps: steps in enqueue order.
        buffers: buffers of all ranks' steps; the same on every rank.
        words: number of signal words of each rank.
        stages: steps that fit in a ring of staging; 0 if each step has a separate place.
    """

    problem: AnyProblem
    schedule: str
    rank: int
    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...]
    words: int
    stages: int = 0

    @cached_property
    def buffer(self) -> dict[str, Buffer]:
        """The buffers by name."""
        return {buffer.name: buffer for buffer in self.buffers}

    @cached_property
    def collective(self) -> bool:
        """Whether the library's collective moves the bytes."""
        return any(isinstance(step.work, LibraryMove) for step in self.steps)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Offset in bytes of each slot buffer in a slot's data, the same on all ranks."""
        offsets, end = {}, 0
        for buffer in self.buffers:
            if buffer.memory == "slot":
                offsets[buffer.name] = end
                end += aligned(buffer.nbytes(self.rank))
        return offsets

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot's data."""
        return sum(aligned(self.buffer[name].nbytes(self.rank)) for name in self.offsets)

    def shape(self, name: str) -> tuple[int, int]:
        """Rows and columns of a buffer of this rank."""
        return self.buffer[name].shapes[self.rank]

    def nbytes(self, region: Region) -> int:
        """Bytes of a region."""
        return region.elements * self.buffer[region.buffer].itemsize

    def moved_bytes(self, transfer: Transfer) -> int:
        """Bytes that a transfer reads."""
        return transfer.batch * self.nbytes(transfer.src)

    def wide(self, product: Product) -> bool:
        """Whether a product is a float32 sum of narrower operands, to be rounded later."""
        a, out = self.buffer[product.a.buffer], self.buffer[product.out.buffer]
        return a.itemsize < 4 <= out.itemsize

    def runs_one_by_one(self, product: Product) -> bool:
        """Whether the products of a batch on buffers with blocks must run one by one. The library's
        grouped product needs products without gaps between them that end at block boundaries."""
        a, out = product.a, product.out
        if product.batch == 1 or not (block := self.buffer[a.buffer].block):
            return False
        rows = {product.a_stride, a.rows, product.out_stride, out.rows}
        return len(rows) > 1 or bool(a.row % block or a.rows % block or out.row % block)

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes in the order of their first step."""
        return tuple(dict.fromkeys(step.lane for step in self.steps))

    @property
    def extra_bytes(self) -> int:
        """Bytes besides operands and results."""
        return sum(
            buffer.nbytes(self.rank)
            for buffer in self.buffers
            if buffer.memory in ("slot", "local")
        )


def aligned(nbytes: int) -> int:
    """Bytes, rounded up to the alignment of slot buffers."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
