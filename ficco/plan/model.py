"""Plans as data.

A Plan is what one rank does for one Problem under one Schedule: Steps in the order in which they
are enqueued, each on a lane. Lanes of the same rank run concurrently. Steps of one lane run one
after the other, except for copies that one launch may carry out (:func:`ficco.plan.together`).
Engines execute Plans, :func:`ficco.plan.check` proves them, :func:`ficco.plan.render` draws them.
Nothing here depends on a device.

Buffers that a Region can name, with their shapes on rank r:

==========  =====================  ==============================================================
buffer      shape                  what it is
==========  =====================  ==============================================================
a           [left_rows, k]         the caller's operand; peers may read it if it is symmetric
publish     [left_rows, k]         symmetric copy of it for peers to read (pull); for scattering
                                   operators [product_rows, n], the product, for the same purpose
staging     plan.staging           symmetric memory where pieces of peers land
sum         [out_rows, n]          float32 sums of pieces, if the dtype is narrower
partial     [product_rows, n]      the product before it travels (scattering operators)
out         [out_rows, n]          the result
gathered    [product_rows, k]      the gathered A, if asked for or made by a collective
==========  =====================  ==============================================================

``left_rows``, ``product_rows`` and ``out_rows`` of rank r are those of the Problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ficco.problem import Problem

#: Buffers that peers can reach, and that calls on one workspace slot therefore share.
SHARED_BUFFERS = frozenset({"staging", "publish"})

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
        return self.row_stop - self.row

    @property
    def cols(self) -> int:
        return self.col_stop - self.col

    @property
    def elements(self) -> int:
        return self.rows * self.cols


class Signal(NamedTuple):
    """One word with one poster and one waiter, in the memory of the waiter.

    A word rests at 0, is posted once, waited for once and cleared before the call ends. The words
    with which a rank hands its workspace slot to its peers (kind ``"released"``) rest at 1 instead:
    they are waited for first and posted last, which orders a call after the previous one.

    Attributes:
        slot: distinguishes signals of a kind between the same ranks.
        first, last: bounds of the rows that the signal gates, among those that its waiter receives
            (:meth:`Problem.lands`).
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
        return self.kind == "released"

    @property
    def name(self) -> str:
        slot = "" if self.released else f".{self.slot}"
        return f"{self.kind} {self.poster}{slot}>{self.waiter}"


class Transfer(NamedTuple):
    """One copy of a region to a region of the same size, here or at a peer.

    ``terms``, for scattering operators: the ranks whose products are summed in it, rank r as bit r.
    """

    src: Region
    dst: Region
    terms: int = 0


class Product(NamedTuple):
    """``out (+)= a @ b[k_first:k_last]``, or a strided batch of such products.

    Product ``i`` of the batch reads ``a`` moved down by ``i * a_stride`` rows and writes ``out``
    moved down by ``i * out_stride`` rows; all share the same rows of b. The columns of ``out`` are
    those of b.

    Attributes:
        terms: the ranks whose products are in the sum that it adds to, see :class:`Transfer`.
        addend: the region of that sum if it is not in ``out``: ``out = addend + a @ b``, and
            ``accumulate`` is not set.
        transposed: ``a.T`` is multiplied, so that ``k_first`` and ``k_last`` count rows of A among
            those gathered; never a batch.
    """

    a: Region
    k_first: int
    k_last: int
    out: Region
    accumulate: bool = False
    batch: int = 1
    a_stride: int = 0
    out_stride: int = 0
    terms: int = 0
    addend: Region | None = None
    transposed: bool = False


class Reduction(NamedTuple):
    """``out = sum of parts``, added in float32 in their order and rounded once.

    ``terms``: for each part, the ranks whose products are in it. Parts in ``publish`` may be those
    of peers.
    """

    parts: tuple[Region, ...]
    terms: tuple[int, ...]
    out: Region


class Step(NamedTuple):
    """One thing enqueued on a lane: ``waits``, then the operation, then ``posts``.

    Attributes:
        op: ``"copy"`` between ranks, ``"place"`` within a rank, ``"matmul"``, ``"reduce"``,
            ``"sync"``, or ``"collective"``, the library's, which does the whole exchange.
        lane: ``"compute0"``, ``"copy0"``, ``"reduce0"``, ..., or ``"sync"``.
        label: what the step does, for human readers.
        waits: signals waited for before the operation.
        posts: signals posted once the operation is complete.
        clears: words reset to 0 after the waits.
        after: indices of earlier steps of this rank, on other lanes, that must be complete first.
        transfer: what a copy or place moves; a place may change the dtype.
        products: what a matmul computes.
        reduction: what a reduce adds up.
        mover: ``"dma"`` or ``"kernel"``, for a copy, or for a place that may join copies.
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


@dataclass(frozen=True)
class Plan:
    """What one rank does.

    Attributes:
        problem, schedule, rank: what it is a plan for.
        steps: in enqueue order.
        staging: rows and columns of the staging buffer on this rank.
        room: bytes of staging and of publish on the rank that needs most; symmetric memory has the
            same size on all ranks.
        publish: whether there is a ``publish`` buffer.
        sums: whether the float32 ``sum`` buffer is used.
        words: number of signal words that each rank keeps.
        stages: steps that fit in staging at once if it is a ring; 0 if every step has its own
            place.
    """

    problem: Problem
    schedule: str
    rank: int
    steps: tuple[Step, ...]
    staging: tuple[int, int]
    room: tuple[int, int]
    publish: bool
    sums: bool
    words: int
    stages: int = 0

    @cached_property
    def collective(self) -> bool:
        """Whether the library's collective moves the bytes."""
        return any(step.op == "collective" for step in self.steps)

    @cached_property
    def gathers(self) -> bool:
        """Whether there is a gathered A."""
        problem = self.problem
        return problem.return_gathered or (self.collective and not problem.kind.scatters)

    @cached_property
    def partial(self) -> bool:
        """Whether the product is in a buffer of its own before it travels."""
        regions = (product.out for step in self.steps for product in step.products)
        return any(region.buffer == "partial" for region in regions)

    def shape(self, buffer: str, rank: int | None = None) -> tuple[int, int]:
        """Rows and columns of a buffer of this rank; for ``a`` and ``publish`` also of a peer."""
        problem, rank = self.problem, self.rank if rank is None else rank
        if buffer == "staging":
            return self.staging
        if buffer in ("out", "sum"):
            return problem.out_rows(rank), problem.n
        if buffer == "a" or (buffer == "publish" and not problem.kind.scatters):
            return problem.left_rows(rank), problem.k
        return problem.product_rows(rank), problem.k if buffer == "gathered" else problem.n

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes in the order of their first step."""
        return tuple(dict.fromkeys(step.lane for step in self.steps))

    @property
    def extra_bytes(self) -> int:
        """Bytes apart from operands and results: staging, publish, sums, partial, gathered."""
        problem = self.problem
        product = problem.product_rows(self.rank) * problem.n
        sums = problem.out_rows(self.rank) * problem.n * 4 if self.sums else 0
        partial = product * problem.itemsize if self.partial else 0
        inside = self.gathers and not problem.return_gathered
        gathered = problem.product_rows(self.rank) * problem.k * problem.itemsize if inside else 0
        return sum(self.room) + sums + partial + gathered
