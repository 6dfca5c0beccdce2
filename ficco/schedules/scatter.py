"""Plans of scattering operators, which send pieces of a product and sum or place arriving pieces.

A rank multiplies the blocks of its peers first and its own block last, so that the last copies
overlap with its own product. A separate lane sums arriving units in float32 in the order of the
ranks, or copies them to their place. An all-reduce sends each sum to all ranks.

Hosts exchange sums over their ranks: each rank sums the products of its host for its rail. Blocks
of an all-to-all cross hosts without a sum.
"""

from __future__ import annotations

from functools import cached_property, partial
from itertools import accumulate, chain, zip_longest
from weakref import proxy

from ficco.plan import Product, Products, Reduction, Region, Signal, Step, Transfer
from ficco.plan.model import PLAIN, new
from ficco.problems.specification import Buffer
from ficco.schedules.builder import (
    REDUCE_LANE,
    Block,
    Builder,
    EachRank,
    Stage,
    World,
    merged,
    remembered,
)
from ficco.schedules.exchange import NO_SIGNALS, After, Item, Parcel, Route, Traffic
from ficco.schedules.groups import (
    Departures,
    Unit,
    host_sums,
    legs,
    names,
    returning,
    sources_of,
    via,
)


class ScatterWorld(World, Route):
    """The route of a scatter: blocks of the product, to the ranks that sum or keep them.

    Attributes:
        ring: blocks go from rank to rank, and each rank adds its product to them.
        most: maximum number of units of a block, or of groups in a ring.
        back: route of sums that return to all ranks.
        product: buffer of products for peers.
        host_sums: buffers of the sums of a host for another host, by distance of the hosts.
    """

    returns = True

    def lay_out(self) -> None:
        problem, schedule, words = self.problem, self.schedule, self.words
        self.ring = schedule.grouping == "ring" and self.world > 1
        self.departures = EachRank(partial(Departures, problem, schedule))
        leaving = [self.departures[rank] for rank in self.largest]
        if self.ring:  # if some blocks have fewer pieces than others, some words stay unused
            counts = [one.group_count for one in leaving]
        else:
            counts = [one.count(peer) for one in leaving for peer in one.set_of if peer != one.rank]
        self.most = max([1, *counts])
        # Words of the waiter's own units, then of units that it sums for its rail on each host.
        self.data = words.block(self.most * (problem.hosts if problem.kind.sums else 1))
        self.kind = "valid" if schedule.pull else "ready"
        most = max(len(one.sums) for one in leaving) * problem.kind.returns
        self.back = SumRoute(self, words.block(most * problem.hosts))
        self.reads = words.block(int(schedule.pull))
        self.staging, self.product = "staging" + self.suffix, self.out
        self.host_sums: dict[int, Buffer] = {}
        if self.world > 1:
            self._add_buffers()

    def _add_buffers(self) -> None:
        problem, schedule, ranks = self.problem, self.schedule, range(self.world)
        # A tail cuts some rows otherwise than the rest; the own rows that are summed are whole.
        packs = self.packs_columns and schedule.tail == 1
        packs = packs and (schedule.uniform or not problem.kind.sums)
        rows = [self.rows(rank) for rank in ranks]
        if problem.kind.returns:  # sums come back
            rows = [rows[rank] + problem.m - problem.rows[rank] for rank in ranks]
        shapes = tuple((count, problem.n) for count in rows)
        self.buffer("staging", self.out, shapes, layout="columns" if packs else problem.layout)
        shapes = tuple((problem.product_rows(rank), problem.n) for rank in ranks)
        name, memory = ("publish", "slot") if schedule.pull else ("partial", "local")
        lies = {"leaves": True, "layout": problem.layout}
        self.product = self.buffer(name, self.out, shapes, memory, **lies)
        if problem.kind.sums:
            self.host_sums = host_sums(self, self.out, lambda owner, rank: self.block(rank, owner))

    def host_terms(self, rank: int) -> int:
        """The ranks of a rank's host, rank r as bit r."""
        local = self.problem.local_world
        return _all(local) << self.problem.host(rank) * local

    # Places.

    @remembered
    def _stacked(self, rank: int) -> tuple[dict[tuple[int, int], int], int]:
        """First row in staging of each block that a rank sums, by (sender, owner), and the number
        of rows of all these blocks."""
        blocks = returning(self.problem, rank)
        ends = [*accumulate((self.problem.block(*pair) for pair in blocks), initial=0)]
        return dict(zip(blocks, ends, strict=False)), ends[-1]

    def rows(self, rank: int) -> int:
        """Rows of a rank's staging for products of peers, without rows for returning sums."""
        if self.ring:
            return self.problem.m - self.problem.rows[(rank - 1) % self.world]
        if self.problem.kind.blocks:
            return self.problem.out_rows(rank) - self.problem.block(rank, rank)
        return self._stacked(rank if rank in self.largest else 0)[1]

    def _landing_row(self, src: int, dst: int, owner: int) -> int:
        """First row in staging of an owner's block from a peer."""
        problem = self.problem
        if problem.kind.blocks:  # every block but the receiver's own
            return problem.lands(src, dst) - (problem.block(dst, dst) if src > dst else 0)
        if not self.ring:  # in a ring every block but the sender's own
            return self._stacked(dst)[0][src, owner]
        return problem.offsets[owner] - (problem.rows[src] if owner > src else 0)

    @remembered
    def landings(self, src: int, dst: int, owner: int) -> list[Region]:
        """Regions in staging of the units of an owner's block from a peer, in order."""
        row, departures = self._landing_row(src, dst, owner), self.departures[src]
        return departures.regions(self.staging, dst, row, departures.of(owner))

    def landing(self, src: int, dst: int, unit: Unit) -> Region:
        """Region in staging of the rows or columns of a receiver's unit from a peer."""
        sent = self.departures[src].of(unit.peer)[unit.ordinal : unit.ordinal + 1]
        if sent and (sent[0].start, sent[0].stop) == (unit.start, unit.stop):
            return self.landings(src, dst, unit.peer)[unit.ordinal]
        row = self._landing_row(src, dst, unit.peer)
        return self.departures[src].region(self.staging, dst, row, unit)

    @remembered
    def sources(self, rank: int, owner: int) -> tuple[list[Region], int]:
        """Regions that a rank's products of an owner's block write or add to, one for each unit.
        The second result is the ranks whose products the regions already contain, rank r as bit
        r."""
        one, row = self.departures[rank], self.problem.leaves(rank, owner)
        if not (self.ring and one.set_of.get(owner)):  # the first block of a ring adds to none
            return one.regions(self.product.name, rank, row, one.of(owner)), 0
        left = (rank - 1) % self.world
        terms = sum(1 << (left - i) % self.world for i in range(one.set_of[owner]))
        return self.landings(left, rank, owner), terms

    # The route.

    def pieces(self, src: int, dst: int, owner: int) -> list[Parcel]:
        one, problem, pull = self.departures[src], self.problem, self.schedule.pull
        units, (sources, terms) = one.of(owner), self.sources(src, owner)
        terms |= 1 << src
        if host_sum := self.host_sums.get(problem.hosts_ahead(src, dst)):
            sources, terms = one.regions(host_sum.name, src, 0, units), self.host_terms(src)
        none, read = NO_SIGNALS, (self.read(dst, src),) if pull else NO_SIGNALS
        signals, landings = self.signals(src, dst, owner), self.landings(src, dst, owner)
        pieces, called = list[Parcel](), names(src if pull else owner, len(units))
        ends = zip(units, called, signals, sources, landings, strict=True)
        for unit, name, signal, source, landing in ends:
            moves = (new(Transfer, (source, landing, terms, *PLAIN)),)
            waits, posts = ((signal,), none) if pull else (none, (signal,))
            if pull and unit is units[-1]:
                posts = read
            pieces.append(new(Parcel, (moves, (f"{name}>{dst}",), waits, posts, unit.group)))
        return pieces

    @remembered
    def signals(self, src: int, dst: int, owner: int) -> list[Signal]:
        """Signals that products at ``src`` are ready, one for each unit of an owner's block."""
        departures, problem = self.departures[src], self.problem
        # Where peers fetch, the rows are those of the product at its rank.
        begin = (problem.leaves if self.schedule.pull else problem.lands)(src, owner)
        units, first = departures.of(owner), self.data.first(src)
        first_slot = problem.hosts_ahead(src, owner) * self.most if problem.hosts > 1 else 0
        slots = [first_slot + (unit.group if self.ring else unit.ordinal) for unit in units]
        return [
            new(Signal, (self.kind, src, dst, slot, first + slot, *rows))
            for slot, rows in zip(slots, departures.spans(begin, units), strict=True)
        ]

    def gives(self, src: int, dst: int) -> bool:
        if self.ring:
            return dst == (src + 1) % self.world and any(self.departures[src].by_group)
        owners = [dst]
        if self.problem.kind.sums and self.problem.hosts > 1:
            owners += [owner for owner, _ in legs(self.problem, dst)]
        return any(self.problem.block(src, owner) for owner in owners)

    def read(self, poster: int, waiter: int) -> Signal:
        return self.reads.signal("done", poster, waiter, 0, self.block(waiter, poster))


class SumRoute(Route):
    """The route of sums from the ranks that formed them to all other ranks."""

    kind = "summed"

    def __init__(self, world: ScatterWorld, words: Block) -> None:
        self.data, self.problem = words, world.problem
        self.world: ScatterWorld = proxy(world)  # no circle, which would outlive the plans

    def pieces(self, src: int, dst: int, owner: int) -> list[Parcel]:
        departures, problem, pieces = self.world.departures[owner], self.problem, list[Parcel]()
        name, sources = f"{owner}.", self._landings(src, owner)
        if src == owner:
            row = problem.offsets[owner]
            name, sources = "", departures.regions(self.world.out.name, src, row, departures.sums)
        signals = self.signals(src, dst, owner)
        ends = zip(departures.sums, sources, self._landings(dst, owner), signals, strict=True)
        for unit, source, landing, signal in ends:
            moves = (Transfer(source, landing, _all(problem.world)),)
            labels = (f"sum {name}{unit.ordinal}>{dst}",)
            pieces.append(Parcel(moves, labels, (), (signal,), unit.ordinal))
        return pieces

    def _landings(self, rank: int, owner: int) -> list[Region]:
        problem, departures = self.problem, self.world.departures[owner]
        row = problem.offsets[owner] - (problem.rows[rank] if owner > rank else 0)
        first = self.world.rows(rank) + row
        return departures.regions(self.world.staging, rank, first, departures.sums)

    @remembered
    def signals(self, src: int, dst: int, owner: int) -> list[Signal]:
        problem, departures = self.problem, self.world.departures[owner]
        poster = via(problem, dst, owner)
        first_slot = problem.hosts_ahead(poster, owner) * (self.data.per_poster // problem.hosts)
        spans = departures.spans(problem.lands(poster, owner), departures.sums)
        return [
            self.data.signal(self.kind, poster, dst, slot, rows)
            for slot, rows in enumerate(spans, first_slot)
        ]


class ScatterStage(Stage):
    """Steps of one rank."""

    world: ScatterWorld

    def __init__(self, world: ScatterWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.mine, self.ways = world.departures[self.me], list(legs(self.problem, self.me))
        self.traffic = Traffic(builder, self.schedule, world)
        self.back = Traffic(builder, self.schedule, world.back)
        self.traffic.announce()
        self.sums = self.problem.kind.sums
        self.own_is_separate = not self.schedule.uniform  # the own rows have a separate product
        self.single = world.ring or len(self.peers) == 1  # one peer sends the sum of all others
        self.acquired: After = ()  # the steps that take over the slots of the peers
        self.step_of: dict[Unit, int] = {}  # unit -> the step of its product or of its sum
        self.announced: dict[Unit, Signal] = {}  # unit -> the signal that its rows are multiplied
        #: By own unit and number of a peer's units, the numbers of those that overlap it.
        self.meeting: dict[tuple[Unit, int], list[int]] = {}
        self.posting: set[str] = set()  # compute lanes that have posted to peers that fetch
        groups = self.mine.group_count + (len(self.mine.own) if self.own_is_separate else 0)
        self.compute_lanes = min(self.schedule.compute, groups or 1)
        in_order = [peer for peer in self.mine.set_of if peer in self.peers]
        builder.assign_lanes(in_order, self.schedule.copy)

    def run(self) -> None:
        turns = zip_longest(self.mine.by_group, self._open(), fillvalue=())
        for group, (units, items) in enumerate(turns):
            if units:
                self.multiply(group, units)
            self.traffic.fetch(items)
        self.finish()

    def _open(self) -> list[list[Item]]:
        """Take over the slots of the peers. Returns the pieces to fetch, by group."""
        if self.peers:
            self.acquired = tuple(dict.fromkeys(self.builder.acquire().values()))
        return self.traffic.coming(self.lane_of) if self.schedule.pull else []

    def finish(self) -> None:
        """Sum or place arriving pieces, after all products for peers are enqueued."""
        if self.problem.hosts > 1:
            self._cross()
        if self.sums:
            self._sum()
        else:
            self._keep_blocks()
        if self.problem.kind.returns:
            self._return()
        if self.schedule.pull:
            self.traffic.close()

    # Products.

    def multiply(self, group: int, units: list[Unit]) -> None:
        """Multiply the units of a group, and send them."""
        index = self._matmul(self._lane(group), units)
        for unit in units:
            self.step_of[unit] = index
            self._send(unit, (index,))

    def _send(self, unit: Unit, after: After = (), waits: tuple[Signal, ...] = ()) -> None:
        """Push a unit to its owner, or to the rank that sums it for another host."""
        target = via(self.problem, self.me, unit.peer)
        if target == self.me or self.schedule.pull:
            return
        if self.world.ring:
            target = (self.me + 1) % self.problem.world
        self.traffic.send(target, unit.ordinal, after, waits, unit.peer)

    def _matmul(self, lane: str, units: list[Unit], after: After = ()) -> int:
        """Add one step that multiplies units, and return its index. It posts to the peers that
        fetch the units. It waits for partial sums that its products add to."""
        world, me, left = self.world, self.me, (self.me - 1) % self.problem.world
        waits, posts, products = NO_SIGNALS, list[Signal](), list[Product]()
        for unit in sorted(units):
            product = self._product_of(unit)
            if product.accumulate and product.out.buffer == world.staging:
                waits += (world.signals(left, me, unit.peer)[unit.ordinal],)
            if product.accumulate and unit.peer == me and self.single:
                product = product._replace(accumulate=False, addend=world.landing(left, me, unit))
                heard, earlier = self._arrivals(left, unit, lane)
                waits, after = waits + heard, after + earlier
            products.append(product)
            if self.schedule.pull and unit.peer != me:
                posts.append(world.signals(me, unit.peer, unit.peer)[unit.ordinal])
        if posts and lane not in self.posting:
            self.posting.add(lane)
            after += self.acquired
        for product in products:
            after += tuple(i for i in self._cast(product.a, lane) if i not in after)
        label, calls = " ".join([f"{unit.peer}.{unit.ordinal}" for unit in units]), merged(products)
        return self.add(Step(Products(calls), lane, label, waits, tuple(posts), after=after))

    def _product_of(self, unit: Unit) -> Product:
        """The product of one unit."""
        return self._of_block(unit.peer)[unit.ordinal]

    @remembered
    def _of_block(self, owner: int) -> list[Product]:
        """The products of the units of an owner's block, in order."""
        k, own = self.problem.k, owner == self.me
        if own and self.peers and self.schedule.beta:
            outs, terms = self.results, _all(self.problem.world) ^ 1 << self.me
        elif own and (self.problem.world == 1 or (self.own_is_separate and not self.sums)):
            outs, terms = self.results, 0
        else:
            outs, terms = self.world.sources(self.me, owner)
        return [
            self._product(a, self._right(0, k, *out[4:]), out, terms > 0, terms)
            for a, out in zip(self.mine.in_operand(self.a, owner), outs, strict=True)
        ]

    @cached_property
    def results(self) -> list[Region]:
        """Regions of the result, one for each part of the own block that is summed."""
        row = self.problem.lands(self.me, self.me)
        if self.sums and not self.problem.kind.returns:
            row = 0
        return self.mine.regions(self.world.out.name, self.me, row, self.mine.sums)

    def _lane(self, turn: int) -> str:
        """The compute lane of a group or, after the groups, of a product of an own unit."""
        return f"compute{turn % self.compute_lanes}"

    # Arrivals.

    def _arrivals(
        self, peer: int, summed: Unit, lane: str = REDUCE_LANE
    ) -> tuple[tuple[Signal, ...], After]:
        """Signals and steps to wait for before a step on ``lane`` reads the units of a peer that
        overlap with ``summed``, a unit that this rank sums."""
        sent = self.world.departures[peer].units(summed.peer)
        key = summed, len(sent)  # all peers cut their blocks alike, except for a tail
        if key not in self.meeting:
            self.meeting[key] = [unit.ordinal for unit in sent if _overlap(unit, summed)]
        pieces = [(peer, number) for number in self.meeting[key]]
        return self.traffic.arrivals(pieces, lane, summed.peer)

    def _sum(self) -> None:
        """Multiply the own block where it is separate, and sum each part with the products of the
        peers. In an all-reduce, send each sum to all peers."""
        sums_come_first = self.schedule.beta and bool(self.peers)
        alone = sums_come_first or self.problem.world == 1
        for turn, unit in enumerate(self.mine.own, self.mine.group_count):
            if self.own_is_separate:
                sums = (self._reduce(unit),) if sums_come_first and not self.single else ()
                self.step_of[unit] = self._matmul(self._lane(turn), [unit], sums)
            product = self.step_of[unit]
            for part in [one for one in self.mine.sums if _overlap(one, unit)]:
                self.step_of[part] = product if alone else self._reduce(part, product)
                for peer in self.lane_of if self.problem.kind.returns else ():
                    self.back.send(peer, part.ordinal, (self.step_of[part],))

    def _reduce(self, unit: Unit, own: int | None = None) -> int:
        """Add a step that sums the products of a unit, and return its index. ``own`` is the step of
        this rank's product; None: only the products of the other ranks are summed."""
        me, owner = self.me, unit.peer
        terms = {peer: 1 << peer for peer in self.peers}
        if own is not None:
            terms[me] = 1 << me
        if owner == me:
            terms |= {source: self.world.host_terms(source) for _, source in self.ways}
        terms, parts = dict(sorted(terms.items())), list[Region]()
        waits = [self.announced[unit]] if unit in self.announced else []
        after = [] if own is None or waits else [own]
        for rank in terms:
            if rank == me:
                row = self.problem.leaves(me, owner)
                parts.append(self.mine.region(self.world.product.name, me, row, unit))
                continue
            signals, steps = self._arrivals(rank, unit)
            parts.append(self.world.landing(rank, me, unit))
            waits += signals
            after += steps
        if owner == me:
            out, label = self.results[unit.ordinal], f"sum {unit.ordinal}"
        else:
            out = self.traffic.of(me, owner)[unit.ordinal].moves[0].src
            label = f"sum {unit.ordinal} for {owner}"
        reduction = Reduction(tuple(parts), tuple(terms.values()), out)
        once = tuple(dict.fromkeys(after))
        return self.add(Step(reduction, REDUCE_LANE, label, tuple(waits), after=once))

    def _cross(self) -> None:
        """Exchange blocks with other hosts. An operator that sums sends the sums of this host."""
        step_of, targets = dict(self.step_of), {target for target, _ in self.ways}
        leaving = [unit for unit in chain.from_iterable(self.mine.by_group) if unit.peer in targets]
        for unit in leaving if self.world.host_sums else ():
            step_of[unit] = self._reduce(unit, step_of[unit])
        units, direct = self.mine.units, self.problem.kind.blocks
        self.traffic.cross(self.ways, lambda to, number: (step_of[units(to)[number]],), direct)

    def _keep_blocks(self) -> None:
        """Multiply or copy the own block to the result of an all-to-all, then copy arrived blocks
        in order of arrival."""
        for turn, unit in enumerate(self.mine.own, self.mine.group_count):
            src, dst = self._product_of(unit).out, self.results[unit.ordinal]
            if unit not in self.step_of:
                self._matmul(self._lane(turn), [unit])
            elif src != dst:
                self._place(REDUCE_LANE, src, dst, (self.step_of[unit],), terms=1 << self.me)
        order = sources_of(self.problem, self.me)
        order = list(self.lane_of) if self.schedule.pull else order
        self._home(self.traffic, order, self.problem.block(self.me, self.me), 0)

    def _return(self) -> None:
        """Copy sums of all other ranks to the result, in order of arrival."""
        problem, me, sums = self.problem, self.me, self.mine.sums
        if self.ways:
            self.back.cross(self.ways, lambda _, number: (self.step_of[sums[number]],), False)
            self.back.relay((source for _, source in self.ways), list(self.lane_of))
        others = sources_of(problem, me)[problem.local_world - 1 :]
        self._home(self.back, [*self.lane_of, *others], problem.rows[me], self.world.rows(me))

    def _home(self, traffic: Traffic, sources: list[int], own: int, before: int) -> None:
        """Copy pieces from staging to the result. In staging, ``before`` rows precede the pieces,
        and the ``own`` rows of this rank have no place."""
        for source, number, _ in chain.from_iterable(traffic.coming(sources)):
            down = (own if source > self.me else 0) - before
            traffic.home(source, number, REDUCE_LANE, partial(_lower, self.world.out.name, down))


def _lower(buffer: str, down: int, region: Region) -> Region:
    """The same columns of another buffer, ``down`` rows further down."""
    row, row_stop = region.row + down, region.row_stop + down
    return new(Region, (buffer, region.rank, row, row_stop, region.col, region.col_stop))


def _all(world: int) -> int:
    """The terms of all ranks."""
    return (1 << world) - 1


def _overlap(one: Unit, two: Unit) -> bool:
    """Whether two units of a block share rows or columns; empty ones share with all."""
    if one.start == one.stop or two.start == two.stop:
        return True
    return one.start < two.stop and two.start < one.stop
