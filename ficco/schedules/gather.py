"""Plans of gathering operators, which multiply rows as they arrive.

:class:`GatherWorld` is the route of the rows. :class:`Gather` has the copies of one rank, and adds
a step for each group of arrived rows. Its users supply the work of these steps.

Some products sum over the rows that travel, as the gradient of a weight does
(:class:`InnerGatherStage`). There, arriving rows of A are multiplied by the same rows of the local
B, and each product adds to the whole result. Pieces of rows thus act as pieces of columns do in a
product of A itself, but need no strided copies. Pieces of columns make rows of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import chain

from ficco.plan.model import PLAIN, Payload, Product, Products, Region, Signal, Step, Transfer, new
from ficco.problems.mask import Span
from ficco.problems.mask import merged as merged_spans
from ficco.problems.scaling import ALL, factors_of
from ficco.schedules.builder import (
    Builder,
    EachRank,
    Shapes,
    Stage,
    World,
    joined,
    merged,
    remembered,
    scaled,
    whole,
)
from ficco.schedules.exchange import LANE, LOOKAHEAD, After, Item, Parcel, Route, Traffic
from ficco.schedules.groups import Arrivals, Unit, legs, names, near_targets, via

#: The group of the rank's own rows if they have a separate product.
OWN = -1

Signals = tuple[Signal, ...]


class StagingTooSmall(ValueError):
    """A cap on staging is below the ``needed`` bytes of the largest step."""

    def __init__(self, text: str, needed: int) -> None:
        super().__init__(text)
        self.needed = needed


class Stages:
    """The stages of a receiver's capped staging. Groups that have units of peers use them in turn.

    Attributes:
        groups: numbers of the groups that have units of peers, in order.
        rows, cols: size of a stage.
        count: number of stages.
        room_of, next_of: previous and next group in the same stage, by group.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals, self.rows, self.cols, self.groups = arrivals, 0, 0, list[int]()
        self._first = dict[Unit, int]()  # first row of a unit in the stage
        for group, units in enumerate(arrivals.by_group):
            row = 0
            for unit in units:
                rows, cols = arrivals.size(unit)
                self._first[unit], row = row, row + rows
            if any(unit.peer != arrivals.rank for unit in units):
                self.groups.append(group)
                self.rows, self.cols = max(self.rows, row), max(self.cols, cols)

    def set_count(self, most: int) -> None:
        """Set the number of stages: ``most``, or the number of groups if that is smaller."""
        groups, self.count = self.groups, min(most, len(self.groups))
        self._begin = {group: i % self.count * self.rows for i, group in enumerate(groups)}
        self.room_of = dict(zip(groups[self.count :], groups, strict=False))
        self.next_of = dict(zip(groups, groups[self.count :], strict=False))

    def region(self, buffer: str, unit: Unit) -> Region:
        """The region of a unit in the stage of its group."""
        rows, cols = self.arrivals.size(unit)
        row = self._first[unit] + self._begin.get(unit.group, 0)
        return Region(buffer, self.arrivals.rank, row, row + rows, 0, cols)


class GatherWorld(World, Route):
    """The route of a gather: rows or columns of A, cut and ordered by their receiver.

    Units of peers land in ``staging``. Own units are copied there if they share a step with units
    of peers, or if ``own_lands``. Otherwise the own shard has a separate product, and staging has a
    place for every other row of the gathered A. Under a cap, groups use the staging in turn.

    Attributes:
        most: maximum number of units of a shard.
        absent: number of a rank's own rows without a place in its staging, by rank.
        stages: stages of a capped staging, by rank; empty if each piece has a place.
        source: name of the buffer that pieces are copied from.
        factors_from, factors_at: names of the source and staging buffers of the factors of A.
        product: buffer of the products.
        partial: whether products of pieces add up.
    """

    own_lands = False

    def lay_out(self) -> None:
        problem, schedule, ranks = self.problem, self.schedule, range(self.world)
        self.arrivals = EachRank(partial(Arrivals, problem, schedule))
        largest = [self.arrivals[rank] for rank in self.largest]
        self.most = max(one.rounds - 1 + one.tail for one in largest)
        self.partial = schedule.dims == 2 and self.most > 1
        per_pair = max(self.most, 2)  # a rank that fetches uses two words: for valid and done
        self.kind, self.data = "valid" if schedule.pull else "ready", self.words.block(per_pair)
        self.room = self.words.block(per_pair)
        lands = self.own_lands or (schedule.uniform and schedule.grouping == "fused")
        self.absent = [0 if lands else problem.block(rank, rank) for rank in ranks]
        self.staging, self.stages = f"staging{self.suffix}", list[Stages]()
        shapes = tuple((self._landed_rows(rank), problem.k) for rank in ranks)
        needed = max(rows for rows, _ in shapes) * problem.k * self.a.itemsize
        if self.cap is not None and needed > self.cap:
            shapes = self._take_turns(self.cap, needed)
        self.source, self.factors_from, self.factors_at = self.a.name, "scale_a", "scale_a"
        if self.world > 1:
            self._add_slot_buffers(shapes)
        self.product = self.out
        if (self.partial or problem.kind.inner) and self.out.itemsize < 4:
            self.product = self.buffer("sum", self.out, self.out.shapes, "local", dtype="float32")

    def _landed_rows(self, rank: int) -> int:
        """Rows of a rank's staging without a cap: those that land, and own rows if they do."""
        rows, own = self.problem.product_rows(rank), self.problem.block(rank, rank)
        return rows - self.absent[rank] if self.own_lands or rows > own else 0

    def _take_turns(self, cap: int, needed: int) -> Shapes:
        """Divide the staging into stages under the cap. Returns the shapes of staging."""
        of, finer, pitch = "all pieces", "", 0
        if self.schedule.grouping not in ("tiled", "ring") and self.problem.hosts == 1:
            self.stages = [Stages(self.arrivals[rank]) for rank in range(self.world)]
            of, finer = "one step", " or cut finer (pieces=)"
            # One row pitch on all ranks, so that a sender knows the receiver's.
            pitch = max(one.cols for one in self.stages)
            needed = max(one.rows for one in self.stages) * pitch * self.a.itemsize
        if needed > cap:
            text = f"workspace_bytes: required at least {needed} for {of} of schedule"
            text = f"{text} {self.schedule} on {self.problem}, got {cap}; allow more{finer}"
            raise StagingTooSmall(text, needed)
        for one in self.stages:
            one.set_count(cap // max(one.rows * pitch * self.a.itemsize, 1))
        return tuple((one.rows * one.count, pitch) for one in self.stages)

    def stage_count(self, rank: int) -> int:
        return self.stages[rank].count if self.stages else 0

    def _add_slot_buffers(self, shapes: Shapes) -> None:
        problem, pull = self.problem, self.schedule.pull
        # A tail cuts some rows otherwise than the rest, and stages are shorter.
        packs = self.packs_columns and self.schedule.tail == 1 and not self.stages
        self.buffer("staging", self.a, shapes, layout="columns" if packs else problem.layout)
        if pull and not self.a.reachable:
            self.source = self.buffer("publish", self.a, self.a.shapes, leaves=True).name
        if problem.sends_factors:
            factors, landing = problem.factors, problem.gathered_factors("", "slot").shapes
            self.factors_at = self.buffer("staging scale", factors, landing).name
            if pull and self.a.memory != "slot":
                publish = self.buffer("publish scale", factors, factors.shapes, leaves=True)
                self.factors_from = publish.name

    # Places.

    @remembered
    def landed(self, owner: int, dst: int, rank: int) -> list[Region]:
        """Regions of an owner's units for a receiver in the staging of a rank: the receiver, or
        the rank that relays them to it."""
        problem, units = self.problem, self.arrivals[dst].units(owner)
        if self.stages:
            return [self.stages[rank].region(self.staging, unit) for unit in units]
        row = problem.lands(owner, rank) - (self.absent[rank] if owner > rank else 0)
        row += problem.leaves(owner, dst) - problem.leaves(owner, rank)
        return self.arrivals[dst].regions(self.staging, rank, row, units)

    def brings_factors(self, unit: Unit) -> bool:
        """Whether factors travel with a unit. Units that share factors send them once."""
        scaling = self.problem.scaling
        if scaling is None or not self.problem.sends_factors:
            return False
        shared = scaling.by_rank or (self.schedule.dims == 2 and scaling.rules.a[1] == ALL)
        return unit.ordinal == 0 or not shared

    def factors(self, unit: Unit, dst: int, rank: int, buffer: str) -> Region:
        """Region of a rank with the factors of a unit for a receiver."""
        problem, owner, landed = self.problem, unit.peer, buffer == self.factors_at
        assert problem.scaling is not None
        rows, cols = (unit.start, unit.stop), (0, problem.k)
        if self.schedule.dims == 2:
            rows, cols = (0, self.arrivals[dst].block(owner)), rows
        first = problem.lands(owner, rank) if landed else problem.leaves(owner, dst)
        if problem.scaling.by_rank:
            first, rows = owner if landed else 0, (0, 1)
        cols = factors_of(cols, problem.scaling.rules.a[1])
        return Region(buffer, rank, first + rows[0], first + rows[1], *cols)

    # The route.

    def carrier(self, receiver: int, owner: int) -> int:
        """The rank that copies an owner's shard to a receiver: the owner, or a relay."""
        return via(self.problem, receiver, owner)

    def pieces(self, src: int, dst: int, owner: int) -> list[Parcel]:
        units, pull = self.arrivals[dst].units(owner), self.schedule.pull
        sends_factors = self.problem.sends_factors
        if src == owner:
            leaving, factors_from = self.arrivals[dst].in_shard(self.source, src), self.factors_from
        else:
            leaving, factors_from = self.landed(owner, dst, src), self.factors_at
        rooms, posts = self.rooms(owner, dst), list[Signals]([()]) * len(units)
        if not pull:
            posts = [(signal,) for signal in self.signals(owner, dst, owner)]
        elif units:  # the first piece waits for the owner's call, and the last one ends the reading
            rooms, posts[-1] = {units[0].group: (self.begun(src, dst),)}, (self.read(dst, src),)
        pieces, landings = list[Parcel](), self.landed(owner, dst, dst)
        ends = zip(units, names(owner, len(units)), leaving, landings, posts, strict=True)
        for unit, name, source, landing, signals in ends:
            labels: tuple[str, ...] = (f"{name}>{dst}",)
            moves: tuple[Transfer, ...] = (new(Transfer, (source, landing, 0, *PLAIN)),)
            if sends_factors and self.brings_factors(unit):
                factors = self.factors(unit, dst, src, factors_from)
                move = Transfer(factors, self.factors(unit, dst, dst, self.factors_at))
                labels, moves = (f"scale {labels[0]}", *labels), (move, *moves)
            room = rooms.get(unit.group, ()) if rooms else ()
            pieces.append(new(Parcel, (moves, labels, room, signals, unit.group)))
        return pieces

    @remembered
    def signals(self, src: int, dst: int, owner: int) -> list[Signal]:
        rows, poster = self.arrivals[dst].rows(owner), self.carrier(dst, owner)
        apart = (owner - poster) % self.world * self.data.per_poster
        first = self.data.first(owner)
        return [
            new(Signal, ("ready", poster, dst, apart + i, first + i, *each))
            for i, each in enumerate(rows)
        ]

    @remembered
    def rooms(self, owner: int, rank: int) -> Mapping[int, Signals]:
        """Signals of a rank to an owner that a stage has room for the owner's units, by group. The
        first group in a stage needs no signal."""
        if not self.stages or self.schedule.pull:
            return {}
        arrivals, later = self.arrivals[rank], self.stages[rank].room_of
        return {
            unit.group: (self.room.signal("room", rank, owner, unit.ordinal, rows),)
            for unit, rows in zip(arrivals.units(owner), arrivals.rows(owner), strict=True)
            if unit.group in later
        }

    def gives(self, src: int, dst: int) -> bool:
        return self.problem.block(src, dst) > 0

    def posts_begun(self, src: int, dst: int) -> bool:
        return self.schedule.pull or not self.gives(src, dst)

    def begun(self, poster: int, waiter: int) -> Signal:
        rows = self.block(poster, waiter) if self.schedule.pull else (0, 0)
        return self.data.signal(self.kind, poster, waiter, 0, rows)

    def read(self, poster: int, waiter: int) -> Signal:
        return self.data.signal("done", poster, waiter, 1, self.block(waiter, poster))


class Gather(Stage):
    """The copies of one rank, and a step for each group of units that have arrived.

    Attributes:
        mine, groups: the units that the rank uses, and these units by group.
        senders: the peers that send units to the rank.
        regions: by rank, the regions of its units when they are used. Own units are in the operand
            or, next to units of peers, in staging.
    """

    world: GatherWorld

    def __init__(self, world: GatherWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.mine = world.arrivals[self.me]
        self.groups = self.mine.by_group
        self.traffic = Traffic(builder, self.schedule, world)
        self.traffic.announce()
        self.stages = world.stages[self.me] if world.stages else None
        self.senders = dict.fromkeys(peer for peer in self.mine.set_of if peer != self.me)
        self.regions = {peer: world.landed(peer, self.me, self.me) for peer in self.senders}
        if self.me in self.mine.set_of:
            self.regions[self.me] = self._own_regions()
        self.published: After = ()  # the steps that copy or cast A for peers
        self.last_use: dict[int, int] = {}  # group -> the step that frees its stage
        self.acquired: dict[int, int] = {}  # peer -> the step that takes over its slot
        self.after_casts = {"compute0"}  # lanes that run after all casts of A
        turns = {peer: self._turn(peer) for peer in self.peers}
        in_turn = sorted(self.peers, key=turns.__getitem__)
        #: Peers in the order of the copies of one group.
        self.in_turn = sorted(self.peers, key=lambda peer: turns[peer][1:])
        builder.assign_lanes(in_turn, self.schedule.copy)
        # Copies by a kernel go on the lane of the product if it waits for all of them and there is
        # no other work meanwhile.
        schedule = self.schedule
        launched = schedule.mover == "kernel" and not schedule.pull and schedule.copy == 1
        most = max(world.arrivals[rank].group_count for rank in world.largest)
        if launched and schedule.uniform and most <= 1:
            builder.lane_of = dict.fromkeys(in_turn, "compute0")

    def _own_regions(self) -> list[Region]:
        """Regions of own units: in staging for groups with units of peers, else in the shard."""
        units, in_shard = self.mine.units(self.me), self.mine.in_shard(self.a, self.me)
        if len(self.mine.sets[self.mine.set_of[self.me]]) == 1:
            return in_shard
        ends = zip(units, in_shard, self.world.landed(self.me, self.me, self.me), strict=True)
        mixed = [any(unit.peer != self.me for unit in units) for units in self.groups]
        return [landed if mixed[unit.group] else region for unit, region, landed in ends]

    def _turn(self, peer: int) -> tuple[int, int, int]:
        """Sort key of a peer: when this rank first copies from it (pull) or to it."""
        if self.schedule.pull:
            return self.mine.set_of[peer], self.mine.place_in_set[peer], 0
        target = self.world.arrivals[peer]
        first = next((unit.group for unit in target.units(self.me)), target.group_count)
        return first, target.place_in_set[self.me], (peer - self.me) % self.problem.world

    def own_rows(self) -> Region:
        """The rank's own rows in its operand."""
        first, rows = self.problem.leaves(self.me, self.me), self.problem.block(self.me, self.me)
        return Region(self.a, self.me, first, first + rows, 0, self.problem.k)

    # Opening a call.

    def publish(self) -> None:
        """Copy A to a buffer that peers can read, unless they read A in place."""
        world, problem = self.world, self.problem
        if not problem.left_rows(self.me):
            return
        if problem.given is not problem:
            self.published = self._cast_all()
            return
        copies = [(world.a, world.source)]
        if problem.sends_factors:
            copies.append((problem.factors, world.factors_from))
        for source, target in copies:
            if target != source.name:
                rows = whole(source, self.me)
                move = Transfer(rows, rows._replace(buffer=target))
                self.published += (self.add(Step(move, "compute0", "publish")),)

    def _cast_all(self) -> After:
        """Cast the pieces of A in the order of their copies, then the other rows. If peers fetch,
        one step casts all of A. Returns the step that peers wait for."""
        far = [target for target, _ in legs(self.problem, self.me)]
        targets = [] if self.schedule.pull else [*far, *self.in_turn]
        for _, _, piece in chain.from_iterable(self.traffic.leaving(targets)):
            self._cast(piece.moves[-1].src, "compute0")
        self._cast(whole(self.world.a, self.me), "compute0")
        return (self.casts[-1][1],) if self.schedule.pull else ()

    def open(self) -> list[list[Item]]:
        """Take over the slots of the peers. Returns the pieces to copy, by group."""
        self.acquired = self.builder.acquire(self.published)
        return self.turns()

    # Copies.

    def turns(self) -> list[list[Item]]:
        """The pieces to copy, by group."""
        if self.schedule.pull:
            return self.traffic.coming(self.senders)
        return self.traffic.leaving(self.in_turn)

    def copy(self, group: int, items: list[Item]) -> None:
        """Enqueue the copies of a group."""
        if self.schedule.pull:  # into a stage once this rank has used the previous contents
            self.traffic.fetch(items, self._room(group))
        else:
            self.traffic.push(items, self._cast_before if self.casts else None)

    def _room(self, group: int) -> After:
        """The step that frees a group's stage; none if the stage is unused."""
        before = self.stages.room_of.get(group) if self.stages else None
        return () if before is None else (self.last_use[before],)

    def _cast_before(self, target: int, number: int) -> After:
        """The step that casts a piece."""
        rows = self.traffic.of(self.me, target)[number].moves[-1].src
        return self._cast(rows, self.lane_of.get(target, LANE))[-1:]

    def cross(self) -> None:
        """Exchange units with other hosts, and relay arrived units to the peers."""
        ways, direct = list(legs(self.problem, self.me)), self.problem.kind.blocks
        self.traffic.cross(ways, self._cast_before, direct)
        if not direct:
            targets = near_targets(self.problem, self.me)
            self.traffic.relay((source for _, source in ways), targets)

    def stream(self) -> Iterator[int]:
        """Add all copies, and yield each group when :meth:`use` is to add its step."""
        turns = self.open()
        if self.problem.hosts > 1:
            for group, items in enumerate(turns):
                self.copy(group, items)
            turns = []
            self.cross()
        ahead = (self.stages and self.stages.count) or LOOKAHEAD
        yield from self.traffic.stream(len(self.groups), turns, self.copy, ahead)
        if self.schedule.pull:
            self.traffic.close()

    # Arrived units.

    def use(self, group: int, lane: str, work: Payload | None) -> int:
        """Add a step that works on the units of a group after their arrival, and release their
        stage. With ``return_gathered`` also copy them to the gathered A. Returns the step."""
        units = self.groups[group]
        coming = [unit[:2] for unit in units if unit.peer in self.senders]
        own = [unit for unit in units if unit.peer == self.me] if len(coming) < len(units) else []
        after = self._after_casts(lane) if own and self.casts else ()
        if own and coming:
            self._place_own(own, lane, after)
            after = ()
        waits, brought = self.traffic.arrivals(coming, lane)
        posts, acquired = self._release(group) if self.stages else ((), ())
        keeps = self.problem.return_gathered
        label = " ".join([f"{unit.peer}.{unit.ordinal}" for unit in units])
        once = (*after, *brought) if keeps else (*after, *brought, *acquired)
        step = self.add(Step(work, lane, label, waits, () if keeps else posts, after=once))
        self.last_use[group] = self._keep(lane, units, posts, acquired) if keeps else step
        return step

    def _after_casts(self, lane: str) -> After:
        """The last cast, for the first step of a lane that reads own rows; none for later steps."""
        if lane in self.after_casts:
            return ()
        self.after_casts.add(lane)
        return (self.casts[-1][1],)

    def _place_own(self, units: list[Unit], lane: str, after: After) -> None:
        """Copy own units and their factors to staging, next to units of peers."""
        room = self._room(units[0].group)
        after += tuple(i for i in room if self.steps[i].lane != lane)
        me, shard, factors_at = self.me, self.mine.in_shard(self.a, self.me), self.world.factors_at
        for unit in units:
            self._place(lane, shard[unit.ordinal], self.regions[me][unit.ordinal], after)
            if self.world.brings_factors(unit) and not self.factors_stay(me):
                src, dst = (self.world.factors(unit, me, me, at) for at in ("scale_a", factors_at))
                self._place(lane, src, dst, after)

    def factors_stay(self, peer: int) -> bool:
        """Whether products read the factors of own rows from the caller's operand."""
        scaling = self.problem.scaling
        return scaling is not None and scaling.by_rank and peer == self.me

    def _release(self, group: int) -> tuple[Signals, After]:
        """Signals that a group's stage is free, to the peers that write to it next, and the steps
        that have acquired the slots of these peers."""
        following = self.stages.next_of.get(group, OWN) if self.stages else OWN
        rooms = (self.world.rooms(peer, self.me).get(following, ()) for peer in self.senders)
        posts = tuple(chain.from_iterable(rooms))
        return posts, tuple(sorted({self.acquired[signal.waiter] for signal in posts}))

    def _keep(self, lane: str, units: list[Unit], posts: Signals, after: After) -> int:
        """Copy arrived units to the gathered A. The last copy comes after the steps ``after``, and
        posts. Returns its index."""
        for unit in units:
            first, last = self.problem.lands(unit.peer, self.me), unit is units[-1]
            gathered = self.mine.region("gathered", self.me, first, unit)
            region, ends = self.regions[unit.peer][unit.ordinal], (after, posts) if last else ()
            index = self._place(lane, region, gathered, *ends)
        return index

    def keep_own(self) -> None:
        """Copy the own rows to the gathered A if the call returns it."""
        if self.problem.return_gathered:
            rows = self.world.block(self.me, self.me)
            own = Region("gathered", self.me, *rows, 0, self.problem.k)
            self._place("compute0", self.own_rows(), own)


class GatherStage(Stage):
    """Products of one rank. ``group`` is the number of a group of units, or ``OWN``.

    Attributes:
        own_is_separate: the own rows have a separate product, before all others.
    """

    world: GatherWorld
    transfers: type[Gather] = Gather

    def __init__(self, world: GatherWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.gather = self.transfers(world, builder)
        self.mine, self.groups = self.gather.mine, self.gather.groups
        self.product = world.product.name
        own_rows = self.problem.block(self.me, self.me)
        self.own_is_separate = not self.schedule.uniform and own_rows > 0

    def run(self) -> None:
        for _ in self.flow():
            pass

    def flow(self) -> Iterator[int]:
        """Add the steps of :meth:`run`, and yield each group after its product."""
        self.gather.publish()
        if self.own_is_separate:
            self.add(Step(Products((self._own_product(),)), "compute0", "own"))
            self.gather.keep_own()
            yield OWN
        for group in self.gather.stream():
            if units := self.groups[group]:
                lane = self._lane(group, units)
                self.gather.use(group, lane, Products(self._products(group)))
                if self.product != self.world.out.name:
                    self._round(lane, group)
            yield group

    def _lane(self, group: int, units: list[Unit]) -> str:
        """The lane of a group. Groups take turns; groups of the same sums share a lane."""
        turn = self.mine.set_of[units[0].peer] if self.schedule.dims == 2 else group
        return f"compute{turn % self.schedule.compute}"

    def _own_product(self) -> Product:
        rows, cols, out = self.world.block(self.me, self.me), (0, self.problem.k), self.world.out
        return self._times(self.me, self.gather.own_rows(), rows, cols, out.name)

    def _products(self, group: int) -> tuple[Product, ...]:
        scaling, products = self.problem.scaling, self.products[group]
        return tuple(products) if scaling and scaling.by_rank else merged(products)

    @cached_property
    def products(self) -> list[list[Product]]:
        """One product for each unit, by group, and within a group in the order of ranks."""
        peers = sorted(self.gather.regions)
        return self.mine.in_groups({peer: self._of_peer(peer) for peer in peers})

    def _of_peer(self, peer: int) -> list[Product]:
        """The products of a peer's units, in order."""
        by_columns, cols, adds = self.schedule.dims == 2, (0, self.problem.k), self.world.partial
        regions, rows, products = self.gather.regions[peer], self.mine.rows(peer), list[Product]()
        for unit, a, span in zip(self.mine.units(peer), regions, rows, strict=True):
            _, ordinal, first, last, _ = unit
            cols = (first, last) if by_columns else cols
            products.append(self._times(peer, a, span, cols, self.product, adds and ordinal > 0))
        return products

    def _times(
        self, peer: int, a: Region, rows: Span, cols: Span, out: str, adds: bool = False
    ) -> Product:
        """The product of an operand ``a`` from a peer, which adds to ``out`` or writes it. ``rows``
        are those of the gathered A, ``cols`` those of A."""
        me, n, scaling, factors = self.me, self.problem.n, self.problem.scaling, None
        right, result = new(Region, (self.b, me, *cols, 0, n)), new(Region, (out, me, *rows, 0, n))
        product = Product(a, right, result, adds)
        if scaling is None:
            return product
        staged = a.buffer != self.a or scaling.replicated
        if staged and not self.gather.factors_stay(peer):
            rows = (peer, peer + 1) if scaling.by_rank else rows
            cols = factors_of(cols, scaling.rules.a[1])
            factors = Region(self.world.factors_at, me, *rows, *cols)
        return scaled(self.problem, product, factors)

    def completed(self, group: int) -> Iterable[Span]:
        """Ranges of rows of the result that a group completes, in rising order."""
        if group == OWN:
            return [self.world.block(self.me, self.me)]
        if self.schedule.dims == 1:
            return [(product.out.row, product.out.row_stop) for product in self.products[group]]
        last = [unit.peer for unit in self.groups[group] if unit.stop == self.problem.k]
        return [self.world.block(peer, self.me) for peer in sorted(last)]

    def _round(self, lane: str, group: int) -> None:
        """Round the sums that a group completes to the result, contiguous rows in one step."""
        for rows in merged_spans(self.completed(group)):
            src = Region(self.product, self.me, *rows, 0, self.problem.n)
            self._place(lane, src, src._replace(buffer=self.world.out.name))


class InnerGatherStage(GatherStage):
    """Steps of one rank for products that sum over the rows that travel. Products that add to the
    same rows stay on one lane in a fixed order, so that results repeat to the last bit."""

    def __init__(self, world: GatherWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        if not self.problem.product_rows(self.me):  # the own product writes a result of zeros
            self.own_is_separate = True
        begun = [(0, self.problem.k)] if self.own_is_separate else []
        self.products = [
            [
                product if _is_first(product, begun) else product._replace(accumulate=True)
                for product in joined(products)
            ]
            for products in self.products
        ]
        self.adds = any(one.accumulate for one in chain.from_iterable(self.products))
        if not self.adds:  # each sum is one product, which rounds itself
            self.product = world.out.name
            self.products = [
                [one._replace(out=one.out._replace(buffer=self.product)) for one in products]
                for products in self.products
            ]
        over = list[Span]()  # a tail's pieces are the last of their rows
        self.last = [
            sorted((one.out.row, one.out.row_stop) for one in products if _is_first(one, over))
            for products in self.products[::-1]
        ][::-1]

    def _of_peer(self, peer: int) -> list[Product]:
        units, by_columns = self.mine.units(peer), self.schedule.dims == 2
        pieces = zip(units, self.gather.regions[peer], self.mine.rows(peer), strict=True)
        return [
            self._inner(a, rows, (unit.start, unit.stop) if by_columns else (0, self.problem.k))
            for unit, a, rows in pieces
        ]

    def _own_product(self) -> Product:
        rows = self.world.block(self.me, self.me)
        return self._inner(self.gather.own_rows(), rows, (0, self.problem.k))

    def _inner(self, a: Region, rows: Span, out: Span) -> Product:
        """The product of ``a`` and the same ``rows`` of B, to rows ``out`` of the result."""
        n = self.problem.n
        result = Region(self.product, self.me, *out, 0, n)
        return Product(a, self._right(*rows, 0, n), result, transposed=True)

    def _lane(self, group: int, units: list[Unit]) -> str:
        return f"compute{0 if self.adds else group % self.schedule.compute}"

    def _products(self, group: int) -> tuple[Product, ...]:
        return tuple(self.products[group])

    def completed(self, group: int) -> Iterable[Span]:
        return [] if group == OWN else self.last[group]


def _is_first(product: Product, spans: list[Span]) -> bool:
    """Whether a product's rows of the result are in no span. Adds them to the spans."""
    row = product.out.row
    for first, last in spans:
        if first <= row < last:
            return False
    spans.append((row, product.out.row_stop))
    return True
