"""Plans as data.

A Plan is what one rank does for one Problem under one Schedule: Steps in the order in which they
are enqueued, each on a lane. Lanes of the same rank run concurrently. Steps of one lane run one
after the other, except for copies that one launch may carry out (:func:`ficco.plan.together`).
Engines execute Plans, :func:`ficco.plan.check` proves them, :func:`ficco.plan.render` draws them.
Nothing here depends on a device.

A Plan lists its buffers (:class:`Buffer`). The caller's own are ``a``, ``b``, ``out`` and, if asked
for, ``gathered``. Builders add those that a schedule needs:

=========  ==========================================================================
buffer     what it is
=========  ==========================================================================
publish    copy of A for peers to read (pull); for scattering operators the product
staging    where pieces of peers land
sum        float32 sums of pieces, if the dtype is narrower
parts      of attention: what each step gives, a mean of values and the weight of all these keys.
           An engine keeps one beside the other, whenever they come, until they are merged
partial    the product before it travels (scattering operators)
q heads    of attention by heads: all positions of a rank's heads; and so for other matrices
gathered   the gathered A that a collective makes
a, scale_a A in float8 and its factors, where the caller's A, ``wide``, is cast by the call
=========  ==========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ficco.problems.mask import LibraryCall
from ficco.problems.specification import ALIGNMENT, AnyProblem, Buffer

#: What a step can be. Whoever reads Plans refuses any other by name (:func:`unknown`).
OPS = (
    *("copy", "place", "network", "collective"),
    *("matmul", "attend", "apply", "call", "reduce", "sync"),
)

#: Makes a named tuple from all its fields, ``new(Region, (...))``, in half the time that a call of
#: the class takes. It checks nothing. Only for the few classes with millions of instances.
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
        """How many rows it has."""
        return self.row_stop - self.row

    @property
    def cols(self) -> int:
        """How many columns it has."""
        return self.col_stop - self.col

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return self.rows * self.cols


class Signal(NamedTuple):
    """One word with one poster and one waiter, in the memory of the waiter.

    A word rests at 0, is posted once, waited for once and cleared before the call ends. The words
    with which a rank hands its workspace slot to its peers (kind ``"released"``) rest at 1 instead:
    they are waited for first and posted last, which orders a call after the previous one.

    Attributes:
        slot: distinguishes signals of a kind between the same ranks.
        first, last: bounds of the rows that the signal is about: of those that its waiter receives
            (:meth:`Problem.lands`) or, of a product that it may fetch or send, of those.
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
        """Whether it hands a slot on, and so rests at 1."""
        return self.kind == "released"

    @property
    def name(self) -> str:
        """Kind, poster, slot and waiter, as errors print them: ``ready 0.1>2``."""
        slot = "" if self.released else f".{self.slot}"
        return f"{self.kind} {self.poster}{slot}>{self.waiter}"


class Transfer(NamedTuple):
    """One copy of a region to a region of the same size, here or at a peer; or a strided batch of
    such copies.

    Copy ``i`` of the batch reads ``src`` moved down by ``i * src_stride`` rows and writes ``dst``
    moved down by ``i * dst_stride`` rows.

    Attributes:
        terms: the ranks whose products are summed in it, rank r as bit r; 0 if it moves operands.
        function: name of a function to apply, empty for none; for a place only.
        factors: where a place that casts to float8 writes the factors of what it casts.
    """

    src: Region
    dst: Region
    terms: int = 0
    function: str = ""
    factors: Region | None = None
    batch: int = 1
    src_stride: int = 0
    dst_stride: int = 0

    @property
    def elements(self) -> int:
        """How many elements move."""
        return self.batch * self.src.elements


#: The other fields of a transfer that is one plain copy, for :data:`new`.
PLAIN = ("", None, 1, 0, 0)


class Product(NamedTuple):
    """``out (+)= a @ b``, or a strided batch of such products.

    Product ``i`` of the batch reads ``a`` moved down by ``i * a_stride`` rows and writes ``out``
    moved down by ``i * out_stride`` rows. All share ``b``, or each reads ``b`` moved down by
    ``i * b_stride`` rows.

    Attributes:
        terms: the ranks whose products are in the sum that it adds to, see :class:`Transfer`.
        addend: the region of that sum if it is not in ``out``: ``out = addend + a @ b``, and
            ``accumulate`` is not set.
        transposed: ``a.T`` is multiplied; never a batch.
        factors: the factors of ``a`` and of ``b``, as regions of float32
            (:class:`ficco.problems.specification.Factors`); none for operands without factors.
            ``a``'s move down with ``a`` if they are as many as its rows.
        bias: a row that is added to each row.
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


class Reduction(NamedTuple):
    """``out = sum of parts``, added in float32 in their order and rounded once.

    ``terms``: for each part, the ranks whose products are in it. Parts may be those of peers.
    """

    parts: tuple[Region, ...]
    terms: tuple[int, ...]
    out: Region


class Attending(NamedTuple):
    """Rows of queries attend to rows of keys and values, as far as the mask of the problem lets
    them.

    Attributes:
        q, kv, out: regions of whole rows. Rows of ``q`` and ``out`` have the same numbers.
        first: number of the first row of ``kv`` where it lands.
        pairs: how many pairs of a query and a key, for one head.
        accumulate: ``out`` is a sum that holds what earlier keys gave, and this is added; parts are
            not summed.
        back: of a backward, the gradient of ``kv``; ``out`` is then that of ``q``.
        calls: those of a library that it is.
    """

    q: Region
    kv: Region
    out: Region
    first: int
    pairs: int
    accumulate: bool = False
    back: Region | None = None
    calls: tuple[LibraryCall, ...] = ()


class Applied(NamedTuple):
    """A function of a library, of whole rows: see
    :class:`ficco.problems.specification.Application`.

    Attributes:
        function: its name.
        first, last: bounds of the rows of its first input.
        inputs, outs: what it reads and writes.
        flops: floating-point operations.
        calls: those of a library that it is.
    """

    function: str
    first: int
    last: int
    inputs: tuple[Region, ...]
    outs: tuple[Region, ...]
    flops: float = 0.0
    calls: tuple[LibraryCall, ...] = ()


class Step(NamedTuple):
    """One thing enqueued on a lane: ``waits``, then the operation, then ``posts``.

    Attributes:
        op: ``"copy"`` between ranks of a host, ``"place"`` within a rank, ``"network"`` between
            hosts, ``"matmul"``, ``"attend"``, ``"apply"``, ``"reduce"``, ``"sync"``,
            ``"collective"``, the library's, which does the whole exchange, or ``"call"``, what the
            caller does with rows as they arrive (:func:`ficco.arriving`).
        lane: ``"compute0"``, ``"copy0"``, ``"reduce0"``, ..., or ``"sync"``.
        label: what the step does, for human readers; of a collective its name.
        waits: signals waited for before the operation.
        posts: signals posted once the operation is complete.
        clears: words reset to 0 after the waits.
        after: indices of earlier steps of this rank, on other lanes, that must be complete first.
        gates: signals that each hold back a part of a matmul or a call: the rows ``first`` to
            ``last`` of the product. The parts run in this order, rows that no signal holds back
            first.
        announces: signals that are posted as soon as those rows of the product are complete, in
            this order; rows that none is about are multiplied last.
        transfer: what a copy or place moves; a place may change the dtype, or cast to float8.
        products: what a matmul computes. Of a call they stand for what the caller computes: a
            column of which each row is made of one row of A, once.
        reduction: what a reduce adds up.
        attends: what an attend computes.
        applied: the function that an apply computes.
        mover: ``"dma"`` or ``"kernel"``, for a copy, or for a place that may join copies.
        moves: what this rank sends and receives in a network step, all at once. What one rank sends
            to another is received in the same order, and a step is over when both sides have
            reached each of its moves.
        part: of a step that was taken apart (:func:`ficco.plan.in_parts`), which part it is, from 1
            on; 0 for a step that is whole.
    """

    op: str
    lane: str
    label: str
    waits: tuple[Signal, ...] = ()
    posts: tuple[Signal, ...] = ()
    clears: tuple[Signal, ...] = ()
    after: tuple[int, ...] = ()
    transfer: Transfer | None = None
    products: tuple[Product, ...] = ()
    mover: str = "dma"
    reduction: Reduction | None = None
    gates: tuple[Signal, ...] = ()
    announces: tuple[Signal, ...] = ()
    moves: tuple[Transfer, ...] = ()
    part: int = 0
    attends: tuple[Attending, ...] = ()
    applied: Applied | None = None

    @property
    def whole(self) -> bool:
        """Whether signals are waited for and posted for the step as a whole."""
        return not (self.gates or self.announces)


def unknown(step: Step, reader: str) -> NotImplementedError:
    """The error that a reader of Plans raises for an operation that it does not know."""
    return NotImplementedError(
        f"{reader} does not know the operation {step.op!r} of step {step.label!r} on {step.lane}; "
        f"required one of {', '.join(OPS)}"
    )


@dataclass(frozen=True)
class Plan:
    """What one rank does.

    Attributes:
        problem, schedule, rank: what it is a plan for.
        steps: in enqueue order.
        buffers: all that the steps of any rank use; the same on every rank.
        words: number of signal words that each rank keeps.
        stages: steps that fit in staging at once if it is a ring; 0 if every step has its own
            place.
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
        return any(step.op == "collective" for step in self.steps)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The byte at which each slot buffer begins in a slot's data, the same on all ranks."""
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

    def apart(self, product: Product) -> bool:
        """Whether a batch is one product after the other: of rows in blocks, of which calls have
        only some, a library multiplies groups at once that follow each other without gaps."""
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
        """Bytes apart from operands and results."""
        return sum(
            buffer.nbytes(self.rank)
            for buffer in self.buffers
            if buffer.memory in ("slot", "local")
        )


def aligned(nbytes: int) -> int:
    """Bytes, rounded up to where the next slot buffer may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
