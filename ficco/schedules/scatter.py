"""Plans of scattering operators, which send pieces of a product and sum or place arriving pieces.

A rank multiplies the blocks of its peers first and its own block last, so that the last copies
overlap with its own product. A separate lane sums arriving units in float32 in the order of the
ranks, or copies them to their place. An all-reduce sends each sum to all ranks.

Hosts exchange sums over their ranks: each rank sums the products of its host for its rail. Blocks
of an all-to-all cross hosts without a sum.
"""

from __future__ import annotations

from functools import cached_property, partial
from itertools import accumulate, chain, starmap, zip_longest
from weakref import proxy

from ficco.plan import Product, Products, Reduction, Region, Signal, Step, Transfer
from ficco.plan.model import PLAIN, new
from ficco.problems.specification import Buffer
from ficco.schedules.builder import REDUCE_LANE, Builder, EachRank, Stage, World, merged, remembered
from ficco.schedules.exchange import NO_SIGNALS, After, Item, Parcel, Route, Traffic
from ficco.schedules.groups import Departures, Unit, host_sums, legs, returning, sources_of, via


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
        self.back = SumRoute(self, max(len(one.sums) for one in leaving) * problem.kind.returns)
        self.reads = words.block(int(schedule.pull))
        self.staging = self.product = self.out
        self.host_sums: dict[int, Buffer] = {}
        if self.world > 1:
            self._add_buffers()

    def _add_buffers(self) -> None:
        problem, schedule, ranks = self.problem, self.schedule, range(self.world)
        # A tail cuts some rows otherwise than the rest; the own rows that are summed are whole.
        packs = self.packs_columns and schedule.tail == 1
        packs = packs and (schedule.uniform or not problem.kind.sums)
        rows = {rank: self.staged(rank)[1] for rank in self.largest}
        shapes = tuple((rows.get(rank, rows[0]), problem.n) for rank in ranks)
        layout = "columns" if packs else problem.layout
        self.staging = self.buffer("staging", self.out, shapes, layout=layout)
        shapes = tuple((problem.product_rows(rank), problem.n) for rank in ranks)
        name, memory = ("publish", "slot") if schedule.pull else ("partial", "local")
        lies = {"leaves": True, "layout": problem.layout}
        self.product = self.buffer(name, self.out, shapes, memory, **lies)
        if problem.kind.sums:
            self.host_sums = host_sums(self, self.out, lambda owner, rank: self.block(rank, owner))

    # Places.

    @remembered
    def staged(self, rank: int) -> tuple[dict[tuple[int, int], int], int]:
        """First row in a rank's staging of each block, by (sender, owner), and the number of rows
        of all blocks. The sender of a sum that returns is its owner."""
        if self.ring:
            left = (rank - 1) % self.world
            blocks = [(left, owner) for owner in range(self.world) if owner != left]
        else:
            blocks = returning(self.problem, rank)
        if self.problem.kind.returns:
            blocks += [(owner, owner) for owner in range(self.world) if owner != rank]
        ends = [*accumulate(starmap(self.problem.block, blocks), initial=0)]
        return dict(zip(blocks, ends, strict=False)), ends[-1]

    def regions(self, src: int, dst: int, owner: int, units: list[Unit]) -> list[Region]:
        """Regions of units of an owner's block from a rank ``src``: in its product or, at another
        rank, in staging."""
        buffer, row = self.product, self.problem.leaves(src, owner)
        if src != dst:
            buffer, row = self.staging, self.staged(dst)[0][src, owner]
        return self.departures[src].regions(buffer.name, dst, row, units)

    @remembered
    def sources(self, rank: int, owner: int) -> tuple[list[Region], int]:
        """Regions that a rank's products of an owner's block write or add to, one for each unit.
        The second result is the ranks whose products the regions already contain, rank r as bit
        r."""
        one, left = self.departures[rank], (rank - 1) % self.world
        if not (self.ring and one.set_of.get(owner)):  # the first block of a ring adds to none
            return self.regions(rank, rank, owner, one.of(owner)), 0
        terms = sum(1 << (left - i) % self.world for i in range(one.set_of[owner]))
        return self.regions(left, rank, owner, self.departures[left].of(owner)), terms

    # The route.

    def pieces(self, src: int, dst: int, owner: int) -> list[Parcel]:
        one, problem, pull = self.departures[src], self.problem, self.schedule.pull
        units, (sources, terms) = one.of(owner), self.sources(src, owner)
        terms |= 1 << src
        if host_sum := self.host_sums.get(problem.hosts_ahead(src, dst)):
            terms = _terms(problem.ranks_of(problem.host(src)))
            sources = one.regions(host_sum.name, src, 0, units)
        peer, pieces = src if pull else owner, list[Parcel]()
        signals, landings = self.signals(src, dst, owner), self.regions(src, dst, owner, units)
        ends = zip(units, signals, sources, landings, strict=True)
        for unit, signal, source, landing in ends:
            moves = (new(Transfer, (source, landing, terms, *PLAIN)),)
            labels = (f"{peer}.{unit.ordinal}>{dst}",)
            waits, posts = ((signal,), NO_SIGNALS) if pull else (NO_SIGNALS, (signal,))
            pieces.append(new(Parcel, (moves, labels, waits, posts, unit.group)))
        if pull and pieces:  # the last copy ends the reading
            pieces[-1] = pieces[-1]._replace(posts=(self.read(dst, src),))
        return pieces

    @remembered
    def signals(self, src: int, dst: int, owner: int) -> list[Signal]:
        """Signals that products at ``src`` are ready, one for each unit of an owner's block."""
        departures, problem = self.departures[src], self.problem
        # Where peers fetch, the rows are those of the product at its rank.
        begin = (problem.leaves if self.schedule.pull else problem.lands)(src, owner)
        units, first_slot = departures.of(owner), problem.hosts_ahead(src, owner) * self.most
        slots = [first_slot + (unit.group if self.ring else unit.ordinal) for unit in units]
        return [
            self.data.signal(self.kind, src, dst, slot, rows)
            for slot, rows in zip(slots, departures.spans(begin, units), strict=True)
        ]

    def gives(self, src: int, dst: int) -> bool:
        if self.ring and dst != (src + 1) % self.world:
            return False
        blocks, problem = self.staged(dst)[0], self.problem
        return any(problem.block(src, owner) for rank, owner in blocks if rank == src != owner)

    def read(self, poster: int, waiter: int) -> Signal:
        return self.reads.signal("done", poster, waiter, 0, self.block(waiter, poster))


class SumRoute(Route):
    """The route of sums from the ranks that formed them to all other ranks. ``most`` is the maximum
    number of sums of a rank."""

    kind = "summed"

    def __init__(self, world: ScatterWorld, most: int) -> None:
        self.problem, self.most = world.problem, most
        self.data = world.words.block(most * world.problem.hosts)
        self.world: ScatterWorld = proxy(world)  # no circle, which would outlive the plans

    def pieces(self, src: int, dst: int, owner: int) -> list[Parcel]:
        problem, world, departures = self.problem, self.world, self.world.departures[owner]
        units, terms, pieces = departures.sums, _terms(range(problem.world)), list[Parcel]()
        name = f"{owner}." if src != owner else ""
        sources = departures.regions(world.out.name, src, problem.offsets[owner], units)
        if src != owner:  # a relay
            sources = world.regions(owner, src, owner, units)
        landings, signals = world.regions(owner, dst, owner, units), self.signals(src, dst, owner)
        ends = zip(units, sources, landings, signals, strict=True)
        for unit, source, landing, signal in ends:
            move, label = Transfer(source, landing, terms), f"sum {name}{unit.ordinal}>{dst}"
            pieces.append(Parcel((move,), (label,), (), (signal,), unit.ordinal))
        return pieces

    @remembered
    def signals(self, src: int, dst: int, owner: int) -> list[Signal]:
        problem, departures = self.problem, self.world.departures[owner]
        poster = via(problem, dst, owner)
        first_slot = problem.hosts_ahead(poster, owner) * self.most
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
        #: By compute lane that has not posted yet, the steps that take over the slots of the peers.
        self.acquired: dict[str, After] = {}
        self.step_of: dict[Unit, int] = {}  # unit -> the step of its product or of its sum
        self.announced: dict[Unit, Signal] = {}  # unit -> the signal that its rows are multiplied
        #: By unit and number of a peer's units, the numbers of those that overlap it.
        self.meeting: dict[tuple[Unit, int], list[int]] = {}
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
            acquired = tuple(dict.fromkeys(self.builder.acquire().values()))
            lanes = map(self.compute_lane, range(self.schedule.compute))
            self.acquired = dict.fromkeys(lanes, acquired)
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
        index = self._matmul(self.compute_lane(group), units)
        for unit in units:
            self.step_of[unit] = index
            self._send(unit, (index,))

    def _send(self, unit: Unit, after: After = (), waits: tuple[Signal, ...] = ()) -> None:
        """Push a unit to its owner, or to the rank that sums it for another host."""
        target = via(self.problem, self.me, unit.peer)
        if self.world.ring:
            target = (self.me + 1) % self.problem.world
        if target != self.me and not self.schedule.pull:
            self.traffic.send(target, unit.ordinal, after, waits, unit.peer)

    def _matmul(self, lane: str, units: list[Unit], after: After = ()) -> int:
        """Add one step that multiplies units, and return its index. It posts to the peers that
        fetch the units. It waits for partial sums that its products add to."""
        world, me, left = self.world, self.me, (self.me - 1) % self.problem.world
        waits, posts, products = NO_SIGNALS, list[Signal](), list[Product]()
        for unit in sorted(units):
            product = self._product_of(unit)
            if product.accumulate and self.single:
                pieces = [(left, unit.ordinal)]  # the ranks of a ring cut a block alike
                if unit.peer == me:
                    pieces = self._overlapping(left, unit)
                    (addend,) = world.regions(left, me, me, [unit])
                    product = product._replace(accumulate=False, addend=addend)
                arrived, brought = self.traffic.arrivals(pieces, lane, unit.peer)
                waits, after = waits + arrived, after + brought
            products.append(product)
            if self.schedule.pull and unit.peer != me:
                posts.append(world.signals(me, unit.peer, unit.peer)[unit.ordinal])
        if posts:
            after += self.acquired.pop(lane, ())
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
            outs, terms = self.results, _terms(range(self.problem.world)) ^ 1 << self.me
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
        stays = self.sums and not self.problem.kind.returns
        row = 0 if stays else self.problem.lands(self.me, self.me)
        return self.mine.regions(self.world.out.name, self.me, row, self.mine.sums)

    # Arrivals.

    def _overlapping(self, peer: int, unit: Unit) -> list[tuple[int, int]]:
        """The units of a peer, as peer and number, that overlap with a unit of the same block."""
        sent = self.world.departures[peer].units(unit.peer)
        key = unit, len(sent)  # all peers cut their blocks alike, except for a tail
        if key not in self.meeting:
            self.meeting[key] = [one.ordinal for one in sent if _overlap(one, unit)]
        return [(peer, number) for number in self.meeting[key]]

    def _sum(self) -> None:
        """Multiply the own block where it is separate, and sum each part with the products of the
        peers. In an all-reduce, send each sum to all peers."""
        sums_come_first = self.schedule.beta and bool(self.peers)
        alone = sums_come_first or self.problem.world == 1
        for turn, unit in enumerate(self.mine.own, self.mine.group_count):
            if self.own_is_separate:
                sums = (self._reduce(unit),) if sums_come_first and not self.single else ()
                self.step_of[unit] = self._matmul(self.compute_lane(turn), [unit], sums)
            product = self.step_of[unit]
            for part in [one for one in self.mine.sums if _overlap(one, unit)]:
                self.step_of[part] = product if alone else self._reduce(part, product)
                for peer in self.lane_of if self.problem.kind.returns else ():
                    self.back.send(peer, part.ordinal, (self.step_of[part],))

    def _reduce(self, unit: Unit, own: int | None = None) -> int:
        """Add a step that sums the products of a unit, and return its index. ``own`` is the step of
        this rank's product; None: only the products of the other ranks are summed."""
        me, owner, problem = self.me, unit.peer, self.problem
        terms = {rank: 1 << rank for rank in (self.peers if own is None else [*self.peers, me])}
        for _, source in self.ways if owner == me else ():
            terms[source] = _terms(problem.ranks_of(problem.host(source)))
        terms = dict(sorted(terms.items()))
        parts = [self.world.regions(rank, me, owner, [unit])[0] for rank in terms]
        pieces = [piece for rank in terms if rank != me for piece in self._overlapping(rank, unit)]
        waits, after = self.traffic.arrivals(pieces, REDUCE_LANE, owner)
        if unit in self.announced:
            waits = (self.announced[unit], *waits)
        elif own is not None:
            after = (own, *after)
        if owner == me:
            out, label = self.results[unit.ordinal], f"sum {unit.ordinal}"
        else:
            out = self.traffic.of(me, owner)[unit.ordinal].moves[0].src
            label = f"sum {unit.ordinal} for {owner}"
        reduction = Reduction(tuple(parts), tuple(terms.values()), out)
        return self.add(Step(reduction, REDUCE_LANE, label, waits, after=after))

    def _cross(self) -> None:
        """Exchange blocks with other hosts. An operator that sums sends the sums of this host."""
        units, step_of, targets = self.mine.units, self.step_of, dict(self.ways)
        for unit in chain.from_iterable(self.mine.by_group) if self.world.host_sums else ():
            if unit.peer in targets:
                step_of[unit] = self._reduce(unit, step_of[unit])
        direct = self.problem.kind.blocks
        self.traffic.cross(self.ways, lambda to, number: (step_of[units(to)[number]],), direct)

    def _keep_blocks(self) -> None:
        """Multiply or copy the own block to the result of an all-to-all, then copy arrived blocks
        in order of arrival."""
        for turn, unit in enumerate(self.mine.own, self.mine.group_count):
            src, dst = self._product_of(unit).out, self.results[unit.ordinal]
            if unit not in self.step_of:
                self._matmul(self.compute_lane(turn), [unit])
            elif src != dst:
                self._place(REDUCE_LANE, src, dst, (self.step_of[unit],), terms=1 << self.me)
        order = [*self.lane_of] if self.schedule.pull else sources_of(self.problem, self.me)
        self._home(self.traffic, order)

    def _return(self) -> None:
        """Copy sums of all other ranks to the result, in order of arrival."""
        sums, far = self.mine.sums, [source for _, source in self.ways]
        self.back.cross(self.ways, lambda _, number: (self.step_of[sums[number]],), False)
        self.back.relay(far, [*self.lane_of])
        others = sources_of(self.problem, self.me)[len(self.peers) :]
        self._home(self.back, [*self.lane_of, *others])

    def _home(self, traffic: Traffic, sources: list[int]) -> None:
        """Copy pieces from staging to the result, in order of arrival."""
        staged, _ = self.world.staged(self.me)
        for source, number, _ in chain.from_iterable(traffic.coming(sources)):
            owner = traffic.route.owner(source, self.me)
            down = self.problem.lands(source, owner) - staged[source, owner]
            traffic.home(source, number, REDUCE_LANE, partial(_lower, self.world.out.name, down))


def _lower(buffer: str, down: int, region: Region) -> Region:
    """The same columns of another buffer, ``down`` rows further down."""
    row, row_stop = region.row + down, region.row_stop + down
    return new(Region, (buffer, region.rank, row, row_stop, region.col, region.col_stop))


def _terms(ranks: range) -> int:
    """Consecutive ranks whose products are summed, rank r as bit r."""
    return (1 << ranks.stop) - (1 << ranks.start)


def _overlap(one: Unit, two: Unit) -> bool:
    """Whether two units of a block share rows or columns; empty ones share with all."""
    if one.start == one.stop or two.start == two.stop:
        return True
    return one.start < two.stop and two.start < one.stop
