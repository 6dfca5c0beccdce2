"""Plans of one product for all pieces: its rows wait for them, or tell when they are complete.

Gathering: the rows of a piece wait for its signal, the own rows for none (Flux, section 4). The
product is enqueued after all copies: where lanes share a hardware queue, a product that waits holds
up whatever comes after it. Scattering: each piece for a peer is signalled once its last row is
multiplied, and its copy waits for that (FlashOverlap, section 3); the own rows come last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from ficco.plan.model import Region, Signal, Step
from ficco.schedules.builder import Builder
from ficco.schedules.gather import NOTHING, OWN, GatherStage, GatherWorld
from ficco.schedules.groups import Unit
from ficco.schedules.runs import contiguous
from ficco.schedules.scatter import ScatterStage, ScatterWorld


class TiledGatherStage(GatherStage):
    """One rank's steps; ``op`` and ``label`` are those of the step whose rows wait."""

    op, label = "matmul", "all"

    def __init__(self, world: GatherWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.arrived = {peer: self._arrived(peer) for peer in self.mine.set_of}
        self.gates = tuple(chain.from_iterable(self.mine.in_groups(self.arrived)))

    def _arrived(self, peer: int) -> list[Signal]:
        """The signals that the pieces of a peer are here, in order."""
        if not self.schedule.pull:
            return self.world.of_units("ready", peer, self.me)
        words, rows = self.world.words_in_turn[self.me][peer], self.mine.rows(peer)
        return [
            Signal("fetched", self.me, self.me, slot, word, *each)
            for slot, (word, each) in enumerate(zip(words, rows, strict=True))
        ]

    def flow(self, tell: Mapping[int, tuple[Signal, ...]] = NOTHING) -> Iterator[int]:
        published = self._publish()
        if own := self._own_is_separate():
            self._keep_own()
        for group, copies in enumerate(self._open(tell, published)):
            self._copy(group, copies)
        pieces = list(chain.from_iterable(self._of_peer(peer) for peer in sorted(self.regions)))
        arrive = contiguous(pieces)
        products = (self._own_product(), *arrive) if own else arrive
        if products:
            step = Step(self.op, "compute0", self.label, products=products, gates=self.gates)
            self.add(step)
        if self.problem.return_gathered:
            for product in arrive:
                rows = product.out.row, product.out.row_stop
                there = Region("gathered", self.me, *rows, 0, self.problem.k)
                self._place("compute0", product.a, there)
        yield from [OWN] * own
        yield from range(len(self.groups))
        if self.schedule.pull:
            self._close_pull()

    def _pull(self, unit: Unit) -> Step:
        step = super()._pull(unit)
        return step._replace(posts=(*step.posts, self.arrived[unit.peer][unit.ordinal]))


class TiledScatterStage(ScatterStage):
    """One rank's steps."""

    def __init__(self, world: ScatterWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.own_is_separate = not (self.sums and self.peers)  # it goes elsewhere than the rest

    def run(self) -> None:
        """Add all steps but the last, which hands over the slot."""
        if self.peers:
            self.acquired = tuple(dict.fromkeys(self.builder.acquire(self.begun()).values()))
            self._multiply_all()
        for copies in self._fetches() if self.schedule.pull else []:
            for peer, step in copies:
                self.fetched[peer].append(self.add(step))
        self.finish()

    def _multiply_all(self) -> None:
        """One product, whose pieces are sent as they are made."""
        leave, stay = [unit for units in self.mine.by_group for unit in units], self.mine.own
        products = contiguous([self._product_of(unit) for unit in sorted([*leave, *stay])])
        if not products:
            return
        pull = self.schedule.pull
        if not pull:  # signals leave no event between this lane and the others
            self.told = {unit: self._made(unit) for unit in [*leave, *(stay if self.sums else [])]}
        told = [self._valid(unit) for unit in leave] if pull else self.told.values()
        after = self.acquired if pull else ()  # peers wait for what it posts
        step = Step("matmul", "compute0", "all", after=after, products=products)
        index = self.add(step._replace(announces=tuple(told)))
        self.made_by = dict.fromkeys([*leave, *stay], index)
        for unit in [] if pull else leave:
            self._push(unit, (), (self.told[unit],))

    def _valid(self, unit: Unit) -> Signal:
        """The signal that a peer may fetch its piece."""
        peer = unit.peer
        return self.world.of_units("valid", self.me, peer, peer)[unit.ordinal]

    def _made(self, unit: Unit) -> Signal:
        """The signal that a piece is made."""
        word, out = self.world.made.first(unit.peer) + unit.ordinal, self._product_of(unit).out
        return Signal("made", self.me, self.me, unit.ordinal, word, out.row, out.row_stop)
