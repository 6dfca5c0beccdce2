"""Plans as data.

A Plan is what one rank does for one Problem under one Schedule: Steps in the order in which they
are enqueued, each on a lane. Lanes of the same rank run beside each other; steps of one lane run
one after the other. Engines execute Plans, :func:`ficco.plan.check` proves them,
:func:`ficco.plan.render` draws them. Nothing here knows a device.

Buffers that a Region can name, with their shapes on rank r:

==========  =====================  ==============================================================
buffer      shape                  what it is
==========  =====================  ==============================================================
a           [rows[r], k]           the caller's shard; peers may read it if it is symmetric
publish     [rows[r], k]           symmetric copy of the shard for peers to read (pull)
staging     plan.staging           symmetric memory where pieces of peers land
sum         [m, n], float32        partial sums of column pieces (2D), where the dtype is narrower
out         [m, n]                 the product
gathered    [m, k]                 the gathered A, if asked for or made by a collective
==========  =====================  ==============================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ficco.problem import Problem

#: Buffers that peers can reach, and that calls on one workspace slot therefore share.
SHARED_BUFFERS = frozenset({"staging", "publish"})


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
    """One word with one poster and one waiter, at home on the waiter.

    A word rests at 0, is posted once, waited for once and cleared before the call ends. The words
    by which a rank hands its workspace slot to its peers (kind ``"released"``) rest at 1 instead:
    they are waited for first and posted last, so that they order one call behind the one before.

    ``slot`` tells apart signals of a kind between the same ranks. ``first`` and ``last`` bound the
    rows of the gathered A that the signal gates.
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
    """One copy of a region to a region of the same size, here or at a peer."""

    src: Region
    dst: Region


class Product(NamedTuple):
    """``out (+)= a @ b[k_first:k_last]``, or a strided batch of such products.

    Product ``i`` of the batch reads ``a`` moved down by ``i * a_stride`` rows and writes ``out``
    moved down by ``i * out_stride`` rows; all share the same rows of b.
    """

    a: Region
    k_first: int
    k_last: int
    out: Region
    accumulate: bool = False
    batch: int = 1
    a_stride: int = 0
    out_stride: int = 0


class Step(NamedTuple):
    """One thing enqueued on a lane: ``waits``, then the operation, then ``posts``.

    Attributes:
        op: ``"copy"`` between ranks, ``"place"`` within a rank, ``"matmul"``, ``"sync"``, or
            ``"gather"``, the library's collective that brings every rank's shard everywhere.
        lane: ``"compute0"``, ``"copy0"``, ..., or ``"sync"``.
        label: what the step does, for people.
        waits: signals waited for before the operation.
        posts: signals posted once the operation is complete.
        clears: words put back to 0 after the waits.
        after: indices of earlier steps of this rank, on other lanes, that must be complete first.
        transfer: what a copy or place moves; a place may change the dtype.
        products: what a matmul computes.
        mover: ``"dma"`` or ``"kernel"``, for a copy.
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


@dataclass(frozen=True)
class Plan:
    """What one rank does.

    Attributes:
        problem, schedule, rank: what it is the plan of.
        steps: in enqueue order.
        staging: rows and columns of the staging buffer on this rank.
        room: bytes of staging and of publish on the rank that needs most; symmetric memory is the
            same everywhere.
        publish: whether the shard is copied to symmetric memory first.
        sums: whether the float32 ``sum`` buffer is used.
        words: number of signal words that any rank of the group uses.
        stages: steps that fit in staging at once, 0 where every step has its own place.
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

    @property
    def collective(self) -> bool:
        """Whether the library's collective moves the bytes, into ``gathered``."""
        return any(step.op == "gather" for step in self.steps)

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes in the order of their first step."""
        return tuple(dict.fromkeys(step.lane for step in self.steps))

    @property
    def extra_bytes(self) -> int:
        """Memory beside the operands and the results: staging, published shard, partial sums."""
        problem = self.problem
        sums = problem.m * problem.n * 4 if self.sums else 0
        gathered = problem.gathered_bytes if self.collective and not problem.return_gathered else 0
        return sum(self.room) + sums + gathered
