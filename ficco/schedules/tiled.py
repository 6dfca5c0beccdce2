"""Plans of one product for all pieces. Its rows wait for pieces, or announce finished pieces.

Gathering: the rows of a piece wait for the signal of the piece. Own rows do not wait (Flux, section
4). The product is enqueued after all copies, because on a shared hardware queue a waiting product
delays all later work. Scattering: the product posts a signal once the last row of a piece for a
peer is multiplied, and the copy of the piece waits for the signal (FlashOverlap, section 3). Own
rows are multiplied last.

The caller's own kernel can take the place of a gather's product (:class:`Gathering`; TileLink).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from ficco.plan.model import Plan, Products, Region, Signal, Step
from ficco.problems.products import Problem
from ficco.problems.specification import AnyProblem, Specification
from ficco.schedules.builder import Builder, WordAllocator, contiguous, remembered
from ficco.schedules.exchange import Parcel
from ficco.schedules.gather import OWN, Gather, GatherStage, GatherWorld
from ficco.schedules.groups import Unit
from ficco.schedules.scatter import ScatterStage, ScatterWorld
from ficco.schedules.space import Schedule


class TiledGatherWorld(GatherWorld):
    """The route of a tiled gather. The words of a receiver's pieces are contiguous, in order of
    arrival. A rank that fetches a piece posts the signal of the piece to itself."""

    def lay_out(self) -> None:
        super().lay_out()
        arrived = self.words.block(self.most).base
        #: By receiver, the words of units, by peer and number.
        self.words_of = [
            {unit[:2]: word for word, unit in enumerate(chain.from_iterable(groups), arrived)}
            for groups in (self.arrivals[rank].by_group for rank in range(self.world))
        ]

    @remembered
    def signals(self, src: int, dst: int, owner: int) -> list[Signal]:
        kind, poster = ("fetched", dst) if self.schedule.pull else ("ready", owner)
        words = self.words_of[dst]
        return [
            Signal(kind, poster, dst, slot, words[owner, slot], *region[2:4])
            for slot, region in enumerate(self.arrivals[dst].gathered(owner))
        ]

    def pieces(self, src: int, dst: int, owner: int) -> list[Parcel]:
        pieces = super().pieces(src, dst, owner)
        if not self.schedule.pull:
            return pieces
        arrived = zip(pieces, self.signals(src, dst, owner), strict=True)
        return [piece._replace(posts=(*piece.posts, signal)) for piece, signal in arrived]


class TiledGatherStage(GatherStage):
    """Steps of one rank. The step whose rows wait is the caller's work if ``callers``. It is needed
    even without own rows."""

    callers = False

    def flow(self) -> Iterator[int]:
        gather = self.gather
        gather.publish()
        own = self.groups.get(OWN, [])
        gather.keep("compute0", own)
        for group, items in enumerate(gather.open()):
            gather.copy(group, items)
        arrive = contiguous(map(self._times, sorted(chain.from_iterable(self.mine.by_group))))
        products = (*map(self._times, own), *arrive)
        if products:
            arrived = {peer: self.world.signals(peer, self.me, peer) for peer in gather.senders}
            gates = tuple(chain.from_iterable(self.mine.in_groups(arrived)))
            work = Products(products, self.callers)
            label = "caller" if self.callers else "all"
            self.add(Step(work, "compute0", label, gates=gates))
        if self.problem.return_gathered:
            for product in arrive:
                gathered = Region("gathered", self.me, *product.out[2:4], 0, self.problem.k)
                self._place("compute0", product.a, gathered)
        yield from self.groups
        if self.schedule.pull:
            gather.traffic.close()


class TiledScatterWorld(ScatterWorld):
    """The route of a tiled scatter. By the words ``multiplied`` a product announces pieces to its
    own rank."""

    def lay_out(self) -> None:
        super().lay_out()
        own = max(len(self.departures[rank].own) for rank in self.largest)
        self.multiplied = self.words.block(max(self.most, own) * (not self.schedule.pull))


class TiledScatterStage(ScatterStage):
    """Steps of one rank."""

    world: TiledScatterWorld

    def __init__(self, world: ScatterWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        # A separate own product is written to the result instead of to the buffer for peers.
        self.own_is_separate = not (self.sums and self.peers)

    def run(self) -> None:
        fetches = self._open()
        if self.peers:
            self._multiply_all()
        for items in fetches:
            self.traffic.fetch(items)
        self.finish()

    def _multiply_all(self) -> None:
        """Add one step for all products, and a copy for each piece that waits for its signal."""
        leave, stay = [unit for units in self.mine.by_group for unit in units], self.mine.own
        products = contiguous([self._product_of(unit) for unit in sorted([*leave, *stay])])
        if not products:
            return
        if self.schedule.pull:
            signals = [
                self.world.signals(self.me, one.peer, one.peer)[one.ordinal] for one in leave
            ]
            after = self.acquired.pop("compute0", ())  # peers wait for the posted signal
        else:  # signals leave no event between this lane and the others
            announced = [*leave, *(stay if self.sums else [])]
            self.announced = {unit: self._multiplied(unit) for unit in announced}
            signals, after = list(self.announced.values()), ()
        step = Step(Products(products), "compute0", "all", after=after, announces=tuple(signals))
        index = self.add(step)
        self.step_of = dict.fromkeys([*leave, *stay], index)
        for unit, signal in self.announced.items():
            if unit.peer != self.me:
                self._send(unit, waits=(signal,))

    def _multiplied(self, unit: Unit) -> Signal:
        """The signal that the product of a piece is complete."""
        out = self._product_of(unit).out
        word = self.world.multiplied.first(unit.peer) + unit.ordinal
        return Signal("made", self.me, self.me, unit.ordinal, word, out.row, out.row_stop)


@dataclass(frozen=True)
class Gathering(AnyProblem):
    """An all-gather of A [m/W, k] whose rows the caller consumes.

    The proof treats the caller's work as a product with one column: every row is read where it has
    arrived, and counts once.

    Attributes:
        rows: number of rows of each rank.
        k: columns of A.
        dtype: name of the dtype of A.
        symmetric: A is in symmetric memory, so that peers can read it in place.
    """

    rows: tuple[int, ...]
    k: int
    dtype: str
    symmetric: bool = False

    operator = "arriving"

    @cached_property
    def world(self) -> int:
        return len(self.rows)

    @cached_property
    def product(self) -> Problem:
        """The product that stands for the caller's work."""
        rows, k = self.rows, self.k
        return Problem("all_gather_matmul", rows, 1, k, self.dtype, symmetric=self.symmetric)

    @property
    def specification(self) -> Specification:
        return self.product.specification

    def __str__(self) -> str:
        return str(self.product).replace("all_gather_matmul", "arriving").replace(" n=1,", "")


class ArrivingPiece(NamedTuple):
    """Rows that arrive together: ``first`` to ``last``, exclusive, of the gathered A. ``peer`` is
    the rank that sends them."""

    first: int
    last: int
    peer: int


class ArrivingWorld(TiledGatherWorld):
    """The route of arriving rows. All rows are in staging, in the order of the ranks."""

    def absent(self, rank: int) -> int:
        return 0


class ArrivingGather(Gather):
    """Copies of one rank. Own rows are copied to staging."""

    def __init__(self, world: GatherWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.operand, gathered = self.places[self.own]
        if self.peers:
            self.places[self.own] = gathered._replace(buffer="staging"), gathered

    def own_is_separate(self) -> bool:
        return True

    def keep(self, lane: str, units: list[Unit]) -> None:
        region, _ = self.places[self.own]
        if region != self.operand and region.rows:
            self._place(lane, self.operand, region)


class ArrivingStage(TiledGatherStage):
    """Steps of one rank: own rows and copies as for a tiled product, then the caller's step."""

    callers, transfers = True, ArrivingGather


def gathering(problem: Gathering, schedule: Schedule, ranks: Sequence[int]) -> list[Plan]:
    """The Plans of ``ranks`` for a tiled schedule.

    Raises:
        ValueError: the schedule is not tiled.
    """
    if schedule.grouping != "tiled":
        raise ValueError(f"schedule: required a tiled one to gather by, got {schedule}")
    words = WordAllocator(problem.world)
    world = ArrivingWorld(problem.product, schedule, words)
    return [ArrivingStage(world, Builder(problem, rank)).plan() for rank in ranks]


def callers_step(plan: Plan) -> int:
    """Index of the step that stands for the user's own work on arriving rows."""
    return next(
        i
        for i, step in enumerate(plan.steps)
        if isinstance(step.work, Products) and step.work.callers
    )


def own_rows(plan: Plan) -> tuple[int, int]:
    """First and last row, exclusive, of the rank's own rows among those of all."""
    exchange, me = plan.problem.specification.exchange, plan.rank
    first = exchange.lands(me, me)
    return first, first + exchange.block(me, me)


def pieces_of(plan: Plan) -> tuple[ArrivingPiece, ...]:
    """Arriving pieces in the expected order. Piece ``i`` has the ``i``-th word of the gates of the
    caller's step; these words are consecutive."""
    lands, me = plan.problem.specification.exchange.lands, plan.rank
    offsets = [lands(peer, me) for peer in range(plan.problem.world)]
    gates = plan.steps[callers_step(plan)].gates
    return tuple(
        ArrivingPiece(gate.first, gate.last, bisect_right(offsets, gate.first) - 1)
        for gate in gates
    )
