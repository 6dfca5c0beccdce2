"""Builds Plans for scattering operators: send pieces as they are made, sum or place what arrives.

A rank multiplies the blocks of its peers first and its own last, so that the last copies travel
while it multiplies what it keeps. Arriving units are summed in float32 in the order of the ranks,
or copied to their place, on a lane of their own. An all-reduce sends the sums on as they are made.

Between hosts travel sums of what a host has: each rank makes those for its rail, from what the
other ranks of its host send it. Blocks of an all-to-all go there as they are.
"""

from __future__ import annotations

from functools import cached_property, partial
from itertools import zip_longest

from ficco.plan.model import PLAIN, Product, Reduction, Region, Signal, Step, Transfer, new
from ficco.problems.products import Problem
from ficco.problems.specification import Buffer
from ficco.schedules.builder import (
    REDUCE_LANE,
    Builder,
    EachRank,
    Stage,
    WordAllocator,
    World,
    remembered,
)
from ficco.schedules.groups import Departures, Unit, names, peers_in_order
from ficco.schedules.network import Sending, add_moves, legs, returning, via
from ficco.schedules.runs import merged
from ficco.schedules.space import Schedule


class ScatterWorld(World):
    """What all ranks know: who sends what when, where it lands, and by which words that is
    signalled."""

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        words: WordAllocator,
        operands: tuple[Buffer, Buffer, Buffer] | None = None,
        suffix: str = "",
        packs_columns: bool = False,
    ) -> None:
        super().__init__(problem, schedule, words, operands, suffix)
        self.ring = schedule.grouping == "ring" and self.world > 1
        ranks = range(self.world)
        self.departures = EachRank(partial(Departures, problem, schedule))
        leaving = [self.departures[rank] for rank in self.largest]
        if not self.ring:
            arriving = [one.count(dst) for one in leaving for dst in ranks if dst != one.rank]
        else:  # if some blocks have fewer pieces than others, some words stay unused
            arriving = [one.group_count for one in leaving]
        returning = [len(one.sums) for one in leaving] if problem.kind.returns else [0]
        self.most = most = max([1, *arriving])
        #: Of the units for each host: the waiter's own, then those that it sums for its rail.
        self.arriving = words.block(most * (problem.hosts if problem.kind.sums else 1))
        self.returned = words.block(max(returning) * problem.hosts)
        self.fetched = words.block(int(schedule.pull))
        units = max(most, *(len(one.own) for one in leaving))
        tiled = schedule.grouping == "tiled"
        self.made = words.block(units * (tiled and not schedule.pull))
        self.staging = "staging" + suffix
        self.product = self.out  # where products that travel go
        if self.world > 1:
            self._add_buffers(packs_columns)

    def _add_buffers(self, packs_columns: bool) -> None:
        problem, schedule, ranks = self.problem, self.schedule, range(self.world)
        packs = packs_columns and schedule.dims == 2 and not schedule.pull
        # A tail cuts some rows otherwise than the rest; the own rows that are summed are whole.
        packs = packs and schedule.tail == 1 and (schedule.uniform or not problem.kind.sums)
        rows = [self.rows(rank) for rank in ranks]
        if problem.kind.returns:  # sums come back
            rows = [rows[rank] + problem.m - problem.rows[rank] for rank in ranks]
        shapes = tuple((some, problem.n) for some in rows)
        layout = "columns" if packs else problem.layout
        self.buffer("staging", self.out, shapes, layout=layout)
        shapes = tuple((problem.product_rows(rank), problem.n) for rank in ranks)
        name, memory = ("publish", "slot") if schedule.pull else ("partial", "local")
        lies = {"leaves": True, "layout": problem.layout}
        self.product = self.buffer(name, self.out, shapes, memory, **lies)
        #: By distance of hosts, what a rank's host sums for the one on its rail.
        self.host_sums: dict[int, Buffer] = {}
        for distance in range(1, problem.hosts) if self.host_sums_needed else ():
            owners = [problem.on_host(problem.host(rank) + distance, rank) for rank in ranks]
            shapes = tuple((problem.rows[owner], problem.n) for owner in owners)
            first = tuple(problem.offsets[owner] for owner in owners)
            self.host_sums[distance] = self.buffer(
                f"host sum {distance}", self.out, shapes, "local", first=first
            )

    @property
    def host_sums_needed(self) -> bool:
        """Whether a host has several products to sum for another."""
        return self.problem.kind.sums and self.problem.hosts > 1 and self.problem.local_world > 1

    @remembered
    def _placed(self, rank: int) -> tuple[dict[tuple[int, int], int], int]:
        """By sender and owner of each block that lands at a rank, its first row in staging; and how
        many rows that makes."""
        row, first = 0, {}
        for source, owner in returning(self.problem, rank):
            first[source, owner] = row
            row += self.problem.block(source, owner)
        return first, row

    @remembered
    def crossing(self, src: int, dst: int) -> list[Transfer]:
        """What one rank sends over the network to another, in order."""
        problem, departures = self.problem, self.departures[src]
        units, buffer, row, terms = departures.units(dst), self.product, 0, 1 << src
        if self.host_sums_needed:
            buffer = self.host_sums[problem.hosts_ahead(src, dst)]
            terms = self.host_terms(src)
        else:
            row = problem.leaves(src, dst)
        sources = departures.regions(buffer.name, src, row, units)
        landings = self.landings(src, dst, dst)
        return [Transfer(*ends, terms) for ends in zip(sources, landings, strict=True)]

    def host_terms(self, rank: int) -> int:
        """The ranks of a rank's host."""
        local = self.problem.local_world
        return _all(local) << self.problem.host(rank) * local

    def gives(self, src: int, dst: int) -> bool:
        """Whether a rank copies anything to a peer, or has something for it to fetch."""
        owners = [dst]
        if self.problem.kind.sums:
            owners += [owner for owner, _ in legs(self.problem, dst)]
        return any(self.sent(src, owner) for owner in owners)

    @remembered
    def received(self, rank: int) -> dict[int, list[Unit]]:
        """The units that a rank receives, by sender, in order."""
        if self.ring:
            left = (rank - 1) % self.world
            return {left: [unit for group in self.departures[left].by_group for unit in group]}
        peers = [peer for peer in range(self.world) if peer != rank]
        return {peer: self.departures[peer].units(rank) for peer in peers}

    def sent(self, src: int, dst: int) -> list[Unit]:
        """The units that one rank sends to another, in order. In a ring they are for others."""
        if self.ring:
            return self.received(dst).get(src, [])
        return self.departures[src].units(dst) if src != dst else []

    def rows(self, rank: int) -> int:
        """Rows of staging without those for returning sums."""
        if self.ring:
            return self.problem.m - self.problem.rows[(rank - 1) % self.world]
        if self.problem.kind.blocks:
            return self.problem.out_rows(rank) - self.problem.block(rank, rank)
        return self._placed(rank if rank in self.largest else 0)[1]

    def _landing_row(self, src: int, dst: int, owner: int) -> int:
        """The row at which a rank's block from a peer begins in staging."""
        problem = self.problem
        if problem.kind.blocks:  # every block but the receiver's own
            return problem.lands(src, dst) - (problem.block(dst, dst) if src > dst else 0)
        if not self.ring:  # in a ring every block but the sender's own
            return self._placed(dst)[0][src, owner]
        return problem.offsets[owner] - (problem.rows[src] if owner > src else 0)

    def landing(self, src: int, dst: int, unit: Unit) -> Region:
        """The staging region of the rows or columns from a peer that a unit of the receiver has."""
        sent = self.departures[src].of(unit.peer)[unit.ordinal : unit.ordinal + 1]
        if sent and (sent[0].start, sent[0].stop) == (unit.start, unit.stop):
            return self.landings(src, dst, unit.peer)[unit.ordinal]
        row = self._landing_row(src, dst, unit.peer)
        return self.departures[src].region(self.staging, dst, row, unit)

    @remembered
    def landings(self, src: int, dst: int, owner: int) -> list[Region]:
        """The staging regions of the units of a rank's block from a peer, in order."""
        row, departures = self._landing_row(src, dst, owner), self.departures[src]
        return departures.regions(self.staging, dst, row, departures.of(owner))

    def returning(self, src: int, dst: int, unit: Unit) -> Region:
        """The staging region of the returning sum of a peer's unit."""
        problem = self.problem
        row = self.rows(dst) + problem.offsets[src] - (problem.rows[dst] if src > dst else 0)
        return self.departures[src].region(self.staging, dst, row, unit)

    @remembered
    def of_units(self, kind: str, poster: int, waiter: int, owner: int) -> list[Signal]:
        """Signals of a kind, one for each unit of a rank's block between two ranks, in order."""
        departures = self.departures[owner if kind == "summed" else poster]
        units = departures.sums if kind == "summed" else departures.of(owner)
        begin = self.problem.lands(poster, owner)
        if kind == "valid":  # of the product at the poster, which the waiter reads there
            begin = self.problem.leaves(poster, owner)
        first = self.arriving.first(poster)
        by_group = self.ring and kind == "ready"
        slots = [unit.group if by_group else unit.ordinal for unit in units]
        if self.problem.hosts > 1:
            slots = self._slots(kind, poster, owner, slots)
        if kind == "summed":
            first = self.returned.first(poster)
        gated = zip(slots, departures.spans(begin, units), strict=True)
        return [
            new(Signal, (kind, poster, waiter, slot, first + slot, *rows)) for slot, rows in gated
        ]

    def _slots(self, kind: str, poster: int, owner: int, slots: list[int]) -> list[int]:
        """The same for units that are summed for another host, or come from one."""
        problem = self.problem
        block = self.returned.per_poster // problem.hosts if kind == "summed" else self.most
        return [problem.hosts_ahead(poster, owner) * block + slot for slot in slots]


class ScatterStage(Stage):
    """One rank's steps."""

    def __init__(self, world: ScatterWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.world = world
        self.mine = world.departures[self.me]
        self.sums = self.problem.kind.sums
        self.own_is_separate = not self.schedule.uniform  # the own rows have a product of their own
        self.single = world.ring or len(self.peers) == 1  # one peer sends the sum of all others
        self.arrived = "valid" if self.schedule.pull else "ready"
        self.acquired: tuple[int, ...] = ()  # the steps that take over the slots of the peers
        self.made_by: dict[Unit, int] = {}  # unit -> its product
        self.told: dict[Unit, Signal] = {}  # unit -> what tells that it is made
        self.posting: set[str] = set()  # compute lanes that have signalled a product
        self.fetched: dict[int, list[int]] = {peer: [] for peer in self.peers}  # copies, in order
        self.heard: dict[int, int] = {}  # word that was waited for -> the step that waited
        self.meeting: dict[tuple[Unit, int], list[int]] = {}  # by own unit and number of units sent
        groups = self.mine.group_count + (len(self.mine.own) if self.own_is_separate else 0)
        self.compute_lanes = [f"compute{i}" for i in range(min(self.schedule.compute, groups or 1))]
        order = list(dict.fromkeys(peer for peers in self.mine.sets for peer in peers))
        self.brought: dict[tuple[int, int], int] = {}  # peer and unit -> its network step
        self.assign_lanes([peer for peer in order if peer in self.peers])

    def run(self) -> None:
        """Add all steps but the last, which hands over the slot."""
        if self.peers:
            self.acquired = tuple(dict.fromkeys(self.builder.acquire(self.begun()).values()))
        fetches = self._fetches() if self.schedule.pull else []
        for group, (units, copies) in enumerate(
            zip_longest(self.mine.by_group, fetches, fillvalue=())
        ):
            if units:
                self.multiply(group, units)
            for peer, step in copies:
                self.fetched[peer].append(self.add(step))
        self.finish()

    def finish(self) -> None:
        """Bring what arrives to the result, once all products for peers are enqueued."""
        if self.problem.hosts > 1:
            self._cross()
        if self.sums:
            self._sum()
        else:
            self._gather_blocks()
        if self.problem.kind.returns:
            self._return()
        for lane, peers in self.builder.copy_lanes():
            read = tuple(self._done(peer, self.me) for peer in peers if self._is_read_by(peer))
            if read:
                self.add(Step("sync", lane, "peers have read", waits=read))

    # Opening and closing a call.

    def begun(self) -> dict[int, tuple[Signal, ...]]:
        """By peer that gets no data, what tells it that this rank's call has begun."""
        return {
            peer: (self.world.arriving.signal(self.arrived, self.me, peer),)
            for peer in self.peers
            if not self.world.gives(self.me, peer)
        }

    def silent(self) -> tuple[Signal, ...]:
        """The signals that the calls of peers without data for this rank have begun."""
        return tuple(
            self.world.arriving.signal(self.arrived, peer, self.me)
            for peer in self.peers
            if not self.world.gives(peer, self.me)
        )

    def _is_read_by(self, peer: int) -> bool:
        """Whether a peer fetches something from this rank."""
        return self.schedule.pull and bool(self.world.sent(self.me, peer))

    def _done(self, poster: int, waiter: int) -> Signal:
        first = self.problem.lands(waiter, poster)
        last = first + self.problem.block(waiter, poster)
        return self.world.fetched.signal("done", poster, waiter, 0, (first, last))

    # Products and copies.

    def multiply(self, group: int, units: list[Unit]) -> None:
        """Multiply the units of a group, and send them."""
        lane = self.compute_lanes[group % len(self.compute_lanes)]
        index = self._matmul(lane, units)
        after = (index,)
        for unit in units:
            self.made_by[unit] = index
            if via(self.problem, self.me, unit.peer) != self.me and not self.schedule.pull:
                self._push(unit, after)

    def _matmul(self, lane: str, units: list[Unit], after: tuple[int, ...] = ()) -> int:
        """The step that makes some units, and says so where peers fetch them."""
        world, me = self.world, self.me
        waits: tuple[Signal, ...] = ()
        posts, products = [], []
        for unit in sorted(units):
            product = self._product_of(unit)
            if product.accumulate and product.out.buffer == world.staging:
                left = (me - 1) % self.problem.world
                waits = (*waits, world.of_units("ready", left, me, unit.peer)[unit.ordinal])
            if product.accumulate and unit.peer == me and self.single:
                addend, heard, earlier = self._addend(unit, lane)
                product = product._replace(accumulate=False, addend=addend)
                waits, after = (*waits, *heard), (*after, *earlier)
            products.append(product)
            if self.schedule.pull and unit.peer != me:
                posts.append(world.of_units("valid", me, unit.peer, unit.peer)[unit.ordinal])
        if posts and lane not in self.posting:
            self.posting.add(lane)
            after = (*after, *self.acquired)
        for product in products:
            after = (*after, *(i for i in self._cast(product.a, lane) if i not in after))
        label, calls = " ".join([f"{unit.peer}.{unit.ordinal}" for unit in units]), merged(products)
        return self.add(
            Step("matmul", lane, label, waits, tuple(posts), after=after, products=calls)
        )

    def _product_of(self, unit: Unit) -> Product:
        """The product of a unit, in a call of its own."""
        return self._of_block(unit.peer)[unit.ordinal]

    @remembered
    def _of_block(self, owner: int) -> list[Product]:
        """The products of the units of a rank's block, in order."""
        (there, terms), k = self._target(owner), self.problem.k
        here = self.mine.in_operand(self.a, owner)
        return [
            self._product(a, self._right(0, k, *out[4:]), out, terms > 0, terms)
            for a, out in zip(here, there, strict=True)
        ]

    def _target(self, owner: int) -> tuple[list[Region], int]:
        """The regions that the products of a rank's block go to, and, as bits, the ranks whose
        products are in the sums that these products add to."""
        problem, me, units = self.problem, self.me, self.mine.of(owner)
        if owner == me and self.peers and self.schedule.beta:
            return self.results, _all(problem.world) ^ 1 << me
        if owner == me and (problem.world == 1 or (self.own_is_separate and not self.sums)):
            return self.results, 0
        if self.world.ring and self.mine.set_of.get(owner):  # not the first block of the ring
            left = (me - 1) % problem.world
            return self.world.landings(left, me, owner), self._ring_terms(left, owner)
        row = problem.leaves(me, owner)
        return self.mine.regions(self.world.product.name, me, row, units), 0

    @cached_property
    def results(self) -> list[Region]:
        """The regions of the result that this rank's own units, or their sums, go to."""
        row = self.problem.lands(self.me, self.me)
        if self.sums and not self.problem.kind.returns:
            row = 0
        return self.mine.regions(self.world.out.name, self.me, row, self.mine.sums)

    def _ring_terms(self, sender: int, owner: int) -> int:
        """The ranks whose products are in a block that ``sender`` sends on: those it has passed."""
        world, steps = self.problem.world, self.world.departures[sender].set_of[owner]
        return sum(1 << (sender - i) % world for i in range(steps + 1))

    def _push(self, unit: Unit, after: tuple[int, ...], waits: tuple[Signal, ...] = ()) -> None:
        self.add(self._pushes(unit.peer)[unit.ordinal]._replace(waits=waits, after=after))

    @remembered
    def _pushes(self, owner: int) -> list[Step]:
        """The copies that send the units of a rank's block, in order."""
        world, me, made = self.world, self.me, self._of_block(owner)
        target = via(self.problem, me, owner)
        if world.ring:
            target = (me + 1) % self.problem.world
        lane, mover, terms = self.lane_of[target], self.schedule.mover, made[0].terms | 1 << me
        landings = world.landings(me, target, owner)
        ready = world.of_units("ready", me, target, owner)
        steps = []
        pieces = zip(names(owner, len(made)), ready, made, landings, strict=True)
        for name, signal, product, landing in pieces:
            move, label = new(Transfer, (product.out, landing, terms, *PLAIN)), f"{name}>{target}"
            steps.append(Step("copy", lane, label, (), (signal,), transfer=move, mover=mover))
        return steps

    def _fetches(self) -> list[list[tuple[int, Step]]]:
        """By group of the peers, the copies of the units that they make, each with its peer."""
        me, world, mover = self.me, self.world, self.schedule.mover
        groups = max((world.departures[peer].group_count for peer in self.peers), default=0)
        copies: list[list[tuple[int, Step]]] = [[] for _ in range(groups)]
        for peer, lane in self.lane_of.items():
            units, there = world.sent(peer, me), self.problem.leaves(peer, me)
            sources = world.departures[peer].regions(world.product.name, peer, there, units)
            valid, landings = world.of_units("valid", peer, me, me), world.landings(peer, me, me)
            called = names(peer, len(units))
            pieces = zip(units, called, valid, sources, landings, strict=True)
            for unit, name, signal, src, dst in pieces:
                posts = (self._done(me, peer),) if unit is units[-1] else ()
                move, label = new(Transfer, (src, dst, 1 << peer, *PLAIN)), f"{name}>{me}"
                step = Step("copy", lane, label, (signal,), posts, transfer=move, mover=mover)
                copies[unit.group].append((peer, step))
        return copies

    # What arrives.

    def _arrival(
        self, peer: int, unit: Unit, lane: str = REDUCE_LANE
    ) -> tuple[tuple[Signal, ...], tuple[int, ...]]:
        """What the next step waits for before it reads a peer's unit: a signal, or a step of this
        rank that fetched the unit or waited for that signal on another lane."""
        if self.schedule.pull:
            return (), (self.fetched[peer][unit.ordinal],)
        if (peer, unit.ordinal) in self.brought:
            return (), (self.brought[peer, unit.ordinal],)
        signal = self.world.of_units("ready", peer, self.me, unit.peer)[unit.ordinal]
        first = self.heard.setdefault(signal.word, len(self.steps))
        if first == len(self.steps):
            return (signal,), ()
        return (), () if self.steps[first].lane == lane else (first,)

    def _sum(self) -> None:
        """Sum each part of the own block once all ranks' products of it have arrived."""
        sums_come_first = self.schedule.beta and bool(self.peers)
        for turn, unit in enumerate(self.mine.own):
            lane = self._own_lane(turn)
            if sums_come_first:
                after = () if self.single else (self._reduce(unit),)
                self.made_by[unit] = self._matmul(lane, [unit], after)
            elif self.own_is_separate:
                self.made_by[unit] = self._matmul(lane, [unit])
            made = self.made_by[unit]
            for part in [one for one in self.mine.sums if _overlap(one, unit)]:
                alone = sums_come_first or self.problem.world == 1
                self.made_by[part] = summed = made if alone else self._reduce(part, made)
                if self.problem.kind.returns:
                    self._send_back(part, summed)

    def _addend(self, unit: Unit, lane: str) -> tuple[Region, tuple[Signal, ...], tuple[int, ...]]:
        """The region of the sum of all others, which comes from one peer, and what to wait for."""
        ((peer, sent),) = self.world.received(self.me).items()
        waits, after = self._arrivals(
            peer, unit, [one for one in sent if one.peer == self.me], lane
        )
        return self.world.landing(peer, self.me, unit), tuple(waits), tuple(dict.fromkeys(after))

    def _arrivals(
        self, peer: int, own: Unit, sent: list[Unit], lane: str = REDUCE_LANE
    ) -> tuple[list[Signal], list[int]]:
        """What to wait for before reading all of a peer's units that share rows or columns with one
        of this rank's."""
        waits: list[Signal] = []
        after: list[int] = []
        for unit in self._meeting(own, sent):
            signals, earlier = self._arrival(peer, unit, lane)
            waits += signals
            after += earlier
        return waits, after

    def _meeting(self, own: Unit, sent: list[Unit]) -> list[Unit]:
        """The units of a peer for this rank that share rows or columns with one of its own.

        All peers cut their blocks alike, except for a tail.
        """
        key = own, len(sent)
        if key not in self.meeting:
            self.meeting[key] = [i for i, unit in enumerate(sent) if _overlap(unit, own)]
        return [sent[i] for i in self.meeting[key]]

    def _reduce(self, unit: Unit, own: int | None = None) -> int:
        """Sum the products of all ranks; if ``own`` is None, of all others."""
        waits = [self.told[unit]] if unit in self.told else []
        after = [] if own is None or waits else [own]
        parts, terms = [], []
        for rank, holds in self._contributions(unit.peer).items():
            if rank != self.me:
                parts.append(self.world.landing(rank, self.me, unit))
                signals, copies = self._arrivals(rank, unit, self.world.sent(rank, unit.peer))
                waits += signals
                after += copies
            elif own is not None:
                parts.append(self._multiplied(unit))
            else:
                continue
            terms.append(holds)
        reduction = Reduction(tuple(parts), tuple(terms), self._summed(unit))
        for_host = "" if unit.peer == self.me else f" for {unit.peer}"
        label, once = f"sum {unit.ordinal}{for_host}", tuple(dict.fromkeys(after))
        step = Step("reduce", REDUCE_LANE, label, tuple(waits), after=once, reduction=reduction)
        return self.add(step)

    def _contributions(self, owner: int) -> dict[int, int]:
        """The ranks that have a part of a block's sum for this rank, itself included, in order, and
        whose products are in each part."""
        problem, me = self.problem, self.me
        found = {rank: 1 << rank for rank in (*self.peers, me)}
        if owner == me:
            found |= {source: self.world.host_terms(source) for _, source in legs(problem, me)}
        return dict(sorted(found.items()))

    def _multiplied(self, unit: Unit) -> Region:
        """Where this rank's product of a unit, or of a part of its own, is before it is summed."""
        row = self.problem.leaves(self.me, unit.peer)
        return self.mine.region(self.world.product.name, self.me, row, unit)

    def _summed(self, unit: Unit) -> Region:
        """Where the sum of a unit's products goes."""
        if unit.peer == self.me:
            return self.results[unit.ordinal]
        return self.world.crossing(self.me, unit.peer)[unit.ordinal].src

    def _cross(self) -> None:
        """Exchange with other hosts: the sums for them of what this one has, or blocks."""
        world, me = self.world, self.me
        ways = list(legs(self.problem, me))
        made = dict(self.made_by)
        if world.host_sums_needed:
            targets = {target for target, _ in ways}
            for unit in [unit for group in self.mine.by_group for unit in group]:
                if unit.peer in targets:
                    made[unit] = self._reduce(unit, made[unit])
        sent, received = {}, {}
        for target, source in ways:
            units = self.mine.units(target)
            moves = zip(world.crossing(me, target), units, strict=True)
            sent[target] = [Sending((move,), (made[unit],)) for move, unit in moves]
            received[source] = [(move,) for move in world.crossing(source, me)]
        direct = self.problem.kind.blocks
        self.brought = add_moves(self.builder, self.schedule, sent, received, direct)

    def _gather_blocks(self) -> None:
        """Copy the blocks of an all-to-all to their places, in order of arrival."""
        for turn, unit in enumerate(self.mine.own):
            made, here = self._product_of(unit).out, self.results[unit.ordinal]
            if unit not in self.made_by:
                self._matmul(self._own_lane(turn), [unit])
            elif made != here:
                self._place(REDUCE_LANE, made, here, (self.made_by[unit],), terms=1 << self.me)
        order = peers_in_order(self.me, self.problem.world, self.problem.hosts)
        if self.schedule.pull:
            order = list(self.lane_of)
        coming = []
        for peer in order:
            units, row = self.world.sent(peer, self.me), self.problem.lands(peer, self.me)
            there = self.world.departures[peer].regions(self.world.out.name, self.me, row, units)
            landings = self.world.landings(peer, self.me, self.me)
            coming += [(peer, *each) for each in zip(units, landings, there, strict=True)]
        for peer, unit, source, out in sorted(coming, key=lambda one: one[1].group):
            waits, after = self._arrival(peer, unit)
            self._place(REDUCE_LANE, source, out, after, waits=waits, terms=1 << peer)

    def _own_lane(self, turn: int) -> str:
        """The lane of a part of the own product if it has a product of its own."""
        return self.compute_lanes[(self.mine.group_count + turn) % len(self.compute_lanes)]

    # Sums that return to all ranks.

    def _send_back(self, unit: Unit, summed: int) -> None:
        source, everyone = self.results[unit.ordinal], _all(self.problem.world)
        mover = self.schedule.mover
        for peer, lane in self.lane_of.items():
            move = Transfer(source, self.world.returning(self.me, peer, unit), everyone)
            posts = (self.world.of_units("summed", self.me, peer, self.me)[unit.ordinal],)
            label = f"sum {unit.ordinal}>{peer}"
            self.add(Step("copy", lane, label, (), posts, (), (summed,), move, mover=mover))

    def _return(self) -> None:
        """Copy the sums of the peers to their places, in order of arrival."""
        problem, me = self.problem, self.me
        crossed = self._cross_back() if problem.hosts > 1 else {}
        others = peers_in_order(me, problem.world, problem.hosts)[problem.local_world - 1 :]
        peers = [*self.lane_of, *others]
        coming = [(unit, p) for p in peers for unit in self.world.departures[p].sums]
        for unit, peer in sorted(coming, key=lambda one: one[0].ordinal):
            waits, after = list[Signal](), list[int]()
            if (through := via(problem, me, peer)) == me:
                after.append(crossed[peer, unit.ordinal])
            else:
                waits.append(self.world.of_units("summed", through, me, peer)[unit.ordinal])
            row = self.problem.offsets[peer]
            out = self.world.departures[peer].region(self.world.out.name, self.me, row, unit)
            source = self.world.returning(peer, self.me, unit)
            terms = _all(self.problem.world)
            self._place(REDUCE_LANE, source, out, tuple(after), waits=tuple(waits), terms=terms)

    def _cross_back(self) -> dict[tuple[int, int], int]:
        """Exchange sums with the rail, and copy those that come to the peers; the steps that bring
        them, by sender and unit."""
        world, me, everyone = self.world, self.me, _all(self.problem.world)
        mover, out = self.schedule.mover, world.out.name

        def moves(src: int, dst: int) -> list[Transfer]:
            departures, row = world.departures[src], self.problem.offsets[src]
            return [
                Transfer(
                    departures.region(out, src, row, unit),
                    world.returning(src, dst, unit),
                    everyone,
                )
                for unit in departures.sums
            ]

        sent, received = {}, {}
        for target, source in legs(self.problem, me):
            made = [(self.made_by[unit],) for unit in self.mine.sums]
            sent[target] = list(map(Sending, zip(moves(me, target)), made))
            received[source] = list(zip(moves(source, me)))
        brought = add_moves(self.builder, self.schedule, sent, received)
        for (source, turn), index in brought.items():
            ((_, here, *_),) = received[source][turn]
            unit = world.departures[source].sums[turn]
            for peer, lane in self.lane_of.items():
                move = Transfer(here, world.returning(source, peer, unit), everyone)
                posts = (world.of_units("summed", me, peer, source)[turn],)
                label = f"sum {source}.{turn}>{peer}"
                self.add(Step("copy", lane, label, (), posts, (), (index,), move, mover=mover))
        return brought


def _all(world: int) -> int:
    """The terms of all ranks."""
    return (1 << world) - 1


def _overlap(one: Unit, two: Unit) -> bool:
    """Whether two units of a block share rows or columns; empty ones share with all."""
    if one.start == one.stop or two.start == two.stop:
        return True
    return one.start < two.stop and two.start < one.stop
