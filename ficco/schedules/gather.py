"""Plans of gathering operators, which multiply rows as they arrive.

Some products sum over the rows that travel, as the gradient of a weight does
(:class:`InnerGatherStage`). There, arriving rows of A are multiplied by the same rows of the local
B, and each product adds to the whole result. Pieces of rows thus act as pieces of columns do in a
product of A itself, but need no strided copies. Pieces of columns make rows of the result.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import chain
from operator import itemgetter

from ficco.plan.model import PLAIN, Payload, Product, Products, Region, Signal, Step, Transfer, new
from ficco.problems.products import Problem
from ficco.problems.scaling import ALL, factors_of
from ficco.problems.specification import Buffer
from ficco.schedules.builder import (
    Builder,
    EachRank,
    Shapes,
    Stage,
    WordAllocator,
    World,
    joined,
    merged,
    remembered,
)
from ficco.schedules.exchange import (
    LANE,
    LOOKAHEAD,
    NO_SIGNALS,
    After,
    Item,
    Parcel,
    Route,
    Traffic,
)
from ficco.schedules.groups import Arrivals, Unit, legs, names, near_targets, via
from ficco.schedules.space import Schedule

#: The group of the rank's own rows if they have a separate product.
OWN = -1

NOTHING: Mapping[int, tuple[Signal, ...]] = {}

#: First and last row or column, exclusive.
Span = tuple[int, int]
#: Signals to post, and the steps before the post.
Posts = tuple[tuple[Signal, ...], After]
NO_POSTS: Posts = ((), ())


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
        by_columns, self.rank = arrivals.schedule.dims == 2, arrivals.rank
        self.rows, self.cols, self.groups = 0, 0, list[int]()
        #: First row in the stage, rows and columns of a unit, by peer and number.
        self._size: dict[tuple[int, int], tuple[int, int, int]] = {}
        for group, units in enumerate(arrivals.by_group):
            if all(unit.peer == self.rank for unit in units):
                continue
            row = 0
            self.groups.append(group)
            for unit in units:
                rows, cols = unit.stop - unit.start, arrivals.columns
                if by_columns:
                    rows, cols = arrivals.block(unit.peer), rows
                self._size[unit[:2]] = row, rows, cols
                row, self.cols = row + rows, max(self.cols, cols)
            self.rows = max(self.rows, row)

    def set_count(self, most: int) -> None:
        """Set the number of stages: ``most``, or the number of groups if that is smaller."""
        groups, self.count = self.groups, min(most, len(self.groups))
        self._begin = {group: i % self.count * self.rows for i, group in enumerate(groups)}
        self.room_of = dict(zip(groups[self.count :], groups, strict=False))
        self.next_of = dict(zip(groups, groups[self.count :], strict=False))

    def regions(self, buffer: str, units: Iterable[Unit]) -> list[Region]:
        """The regions of units in the stages of their groups."""
        regions = []
        for unit in units:
            row, rows, cols = self._size[unit[:2]]
            row += self._begin[unit.group]
            regions.append(Region(buffer, self.rank, row, row + rows, 0, cols))
        return regions


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

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        words: WordAllocator,
        cap: int | None = None,
        operands: tuple[Buffer, Buffer, Buffer] | None = None,
        suffix: str = "",
        packs_columns: bool = False,
        own_lands: bool = False,
    ) -> None:
        super().__init__(problem, schedule, words, operands, suffix)
        self.arrivals = EachRank(partial(Arrivals, problem, schedule))
        largest = [self.arrivals[rank] for rank in self.largest]
        self.most = max(one.rounds - 1 + one.tail for one in largest)
        self.partial = schedule.dims == 2 and self.most > 1
        per_pair = max(self.most, 2)  # a rank that fetches uses two words: for valid and done
        self.kind, self.data = "valid" if schedule.pull else "ready", words.block(per_pair)
        self.room = words.block(per_pair)
        shares = schedule.uniform and schedule.grouping == "fused"
        self.absent = [
            0 if own_lands or shares else problem.block(rank, rank) for rank in range(self.world)
        ]
        self.staging, self.stages = f"staging{suffix}", list[Stages]()
        shapes = tuple((self._rows(rank, own_lands), problem.k) for rank in range(self.world))
        needed = max(rows for rows, _ in shapes) * problem.k * self.a.itemsize
        if cap is not None and needed > cap:
            shapes = self._take_turns(cap, needed)
        self.source, self._sources = self.a.name, dict[tuple[int, int, int, int], list[Region]]()
        self.factors_from = self.factors_at = "scale_a"
        if self.world > 1:
            self._add_slot_buffers(shapes, packs_columns)
        self.product = self.out
        if (self.partial or problem.kind.inner) and self.out.itemsize < 4:
            self.product = self.buffer("sum", self.out, self.out.shapes, "local", dtype="float32")

    def _rows(self, rank: int, own_lands: bool) -> int:
        """Rows of a rank's staging without a cap: those that land, and own rows if they do."""
        whole, own = self.problem.product_rows(rank), self.problem.block(rank, rank)
        return whole - self.absent[rank] if own_lands or whole > own else 0

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

    def _add_slot_buffers(self, shapes: Shapes, packs_columns: bool) -> None:
        problem, schedule = self.problem, self.schedule
        packs = packs_columns and schedule.dims == 2 and not schedule.pull
        # A tail cuts some rows otherwise than the rest, and stages are shorter.
        packs = packs and schedule.tail == 1 and not self.stages
        layout = "columns" if packs else problem.layout
        self.buffer("staging", self.a, shapes, layout=layout)
        if schedule.pull and not self.a.reachable:
            self.source = self.buffer("publish", self.a, self.a.shapes, leaves=True).name
        if problem.sends_factors:
            factors, landing = problem.factors, problem.gathered_factors("", "slot").shapes
            self.factors_at = self.buffer("staging scale", factors, landing).name
            if schedule.pull and self.a.memory != "slot":
                publish = self.buffer("publish scale", factors, factors.shapes, leaves=True)
                self.factors_from = publish.name

    # Places.

    def sources(self, owner: int, rank: int) -> list[Region]:
        """Source regions of an owner's units for a rank. Receivers share them if possible."""
        arrivals, first = self.arrivals[rank], self.problem.leaves(owner, rank)
        key = owner, first, arrivals.block(owner), arrivals.count(owner)
        regions = self._sources.get(key)
        if regions is None:
            units = arrivals.units(owner)
            regions = self._sources[key] = arrivals.regions(self.source, owner, first, units)
        return regions

    @remembered
    def landings(self, owner: int, rank: int) -> list[Region]:
        """Destination regions of an owner's units at their last receiver."""
        return self.places(owner, rank, self.arrivals[rank].units(owner))

    def places(self, owner: int, rank: int, units: list[Unit], offset: int = 0) -> list[Region]:
        """Regions of an owner's units in a rank's staging. The units may be those of another
        receiver, whose block begins ``offset`` rows after the rank's block."""
        if self.stages:
            return self.stages[rank].regions(self.staging, units)
        row = self.problem.lands(owner, rank) - (self.absent[rank] if owner > rank else 0)
        return self.arrivals[rank].regions(self.staging, rank, row + offset, units)

    def block(self, src: int, dst: int) -> Span:
        """Rows of a rank's block at its receiver."""
        first = self.problem.lands(src, dst)
        return first, first + self.problem.block(src, dst)

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
        units, problem, pull = self.arrivals[dst].units(owner), self.problem, self.schedule.pull
        if src == owner:
            leaving, factors_from = self.sources(owner, dst), self.factors_from
        else:
            skipped = problem.leaves(owner, dst) - problem.leaves(owner, src)
            leaving, factors_from = self.places(owner, src, units, skipped), self.factors_at
        none, free, scaled = NO_SIGNALS, self.room_for(owner, dst), problem.sends_factors
        posts: list[tuple[Signal, ...]] = [none] * len(units)
        if pull and units:
            free, posts[-1] = {units[0].group: (self.begun(src, dst),)}, (self.read(dst, src),)
        elif not pull and self.carrier(dst, owner) != dst:
            posts = [(signal,) for signal in self.signals(owner, dst, owner)]
        ends = zip(
            units, names(owner, len(units)), leaving, self.landings(owner, dst), posts, strict=True
        )
        pieces = list[Parcel]()
        for unit, name, source, landing, signals in ends:
            labels: tuple[str, ...] = (f"{name}>{dst}",)
            moves: tuple[Transfer, ...] = (new(Transfer, (source, landing, 0, *PLAIN)),)
            if scaled and self.brings_factors(unit):
                factors = self.factors(unit, dst, src, factors_from)
                move = Transfer(factors, self.factors(unit, dst, dst, self.factors_at))
                labels, moves = (f"scale {labels[0]}", *labels), (move, *moves)
            waits = free.get(unit.group, none) if free else none
            pieces.append(new(Parcel, (moves, labels, waits, signals, unit.group)))
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
    def room_for(self, owner: int, rank: int) -> Mapping[int, tuple[Signal, ...]]:
        """Signals of a rank to an owner that a stage has room for the owner's units, by group. The
        first group in a stage needs no signal."""
        if not self.stages or self.schedule.pull:
            return NOTHING
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


class GatherStage(Stage):
    """Steps of one rank. ``group`` is the number of a group of units, or ``OWN``."""

    world: GatherWorld

    def __init__(self, world: GatherWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.world, self.mine = world, world.arrivals[self.me]
        self.traffic = Traffic(builder, self.schedule, world)
        self.begun, self.silent = self.traffic.begun, self.traffic.silent
        self.groups, self.product = self.mine.by_group, world.product.name
        self.stages = world.stages[self.me] if world.stages else None
        self.stage_count = self.stages.count if self.stages else 0
        #: The rank's own units, by group that also has units of peers.
        self.own_in_group: dict[int, list[Unit]] = {}
        self.senders = dict.fromkeys(peer for peer in self.mine.set_of if peer != self.me)
        #: By rank, the regions of its units when they are multiplied.
        self.regions = {peer: world.landings(peer, self.me) for peer in self.senders}
        if self.me in self.mine.set_of:
            self._add_own()
        self.last_use: dict[int, int] = {}  # group -> the step that frees its stage
        self.acquired: dict[int, int] = {}  # peer -> the step that takes over its slot
        self.after_casts = {"compute0"}  # lanes that run after all casts of A
        lanes = min(self.schedule.compute, len(self.groups) + 1)
        self.compute_lanes = [f"compute{i}" for i in range(lanes)]
        in_turn = sorted(self.peers, key=self._turn)
        builder.assign_lanes(in_turn, self.schedule.copy)
        # Copies by a kernel go on the lane of the product if it waits for all of them and there is
        # no other work meanwhile.
        schedule = self.schedule
        launched = schedule.mover == "kernel" and not schedule.pull and schedule.copy == 1
        most = max(world.arrivals[rank].group_count for rank in world.largest)
        if launched and schedule.uniform and most <= 1:
            builder.lane_of = dict.fromkeys(in_turn, "compute0")

    def _add_own(self) -> None:
        """Set the regions of own units: in the operand, or in staging next to units of peers."""
        me = self.me
        self.regions[me] = self.mine.in_shard(self.a, me)
        for group, units in enumerate(self.groups):
            own = [unit for unit in units if unit.peer == me]
            if 0 < len(own) < len(units):
                self.own_in_group[group] = own
                for unit, region in zip(own, self.world.places(me, me, own), strict=True):
                    self.regions[me][unit.ordinal] = region

    def _turn(self, peer: int) -> tuple[int, int, int]:
        """Sort key of a peer: when this rank first copies from it (pull) or to it."""
        if self.schedule.pull:
            return self.mine.set_of[peer], self.mine.place_in_set[peer], 0
        target = self.world.arrivals[peer]
        first = next((unit.group for unit in target.units(self.me)), target.group_count)
        return first, target.place_in_set[self.me], (peer - self.me) % self.problem.world

    def run(self) -> None:
        for _ in self.flow():
            pass

    def flow(self, tell: Mapping[int, tuple[Signal, ...]] = NOTHING) -> Iterator[int]:
        """Add the steps of :meth:`run`, and yield each group after its product. ``tell``: further
        signals to post as soon as slots are acquired, by peer."""
        published = self._publish()
        if self._own_is_separate():
            self._multiply_own()
            yield OWN
        turns = self._open(tell, published)
        if self.problem.hosts > 1:
            for group, items in enumerate(turns):
                self._copy(group, items)
            turns = []
            self._cross()
        ahead = (self.stages and self.stages.count) or LOOKAHEAD
        for group in self.traffic.stream(len(self.groups), turns, self._copy, ahead):
            self._consume(group)
            yield group
        if self.schedule.pull:
            self.traffic.close()

    # Copies.

    def _open(self, tell: Mapping[int, tuple[Signal, ...]], published: After) -> list[list[Item]]:
        """Take over the slots of the peers. Returns the pieces to copy, by group."""
        begun = self.begun()
        opening = {peer: begun.get(peer, ()) + tell.get(peer, ()) for peer in self.peers}
        self.acquired = self.builder.acquire(opening, published)
        return self._turns()

    def _turns(self) -> list[list[Item]]:
        """The pieces to copy, by group."""
        if self.schedule.pull:
            return self.traffic.coming(self.senders)
        return self.traffic.leaving(self._in_turn())

    def _in_turn(self) -> list[int]:
        """Peers in the order of the copies of one group."""
        return sorted(self.peers, key=lambda peer: self._turn(peer)[1:])

    def _copy(self, group: int, items: list[Item]) -> None:
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

    def _cross(self) -> None:
        """Exchange units with other hosts, and relay arrived units to the peers."""
        ways, direct = list(legs(self.problem, self.me)), self.problem.kind.blocks
        self.traffic.cross(ways, self._cast_before, direct)
        if not direct:
            targets = near_targets(self.problem, self.me)
            self.traffic.relay((source for _, source in ways), targets)

    # Opening a call.

    def _publish(self) -> After:
        """Copy A to a buffer that peers can read, unless they read A in place."""
        world, problem = self.world, self.problem
        if not problem.left_rows(self.me):
            return ()
        if problem.given is not problem:
            return self._cast_all()
        copies = [(world.a, world.source)]
        if problem.sends_factors:
            copies.append((problem.factors, world.factors_from))
        published = []
        for source, target in copies:
            rows, cols = source.shapes[self.me]
            whole = Region(source.name, self.me, 0, rows, 0, cols)
            if target != source.name:
                move = Transfer(whole, whole._replace(buffer=target))
                published.append(self.add(Step(move, "compute0", "publish")))
        return tuple(published)

    def _cast_all(self) -> After:
        """Cast the pieces of A in the order of their copies, then the other rows. If peers fetch,
        one step casts all of A. Returns the step that peers wait for."""
        rows, cols = self.world.a.shapes[self.me]
        far = [target for target, _ in legs(self.problem, self.me)]
        targets = [] if self.schedule.pull else [*far, *self._in_turn()]
        for _, _, piece in chain.from_iterable(self.traffic.leaving(targets)):
            self._cast(piece.moves[-1].src, "compute0")
        self._cast(Region(self.a, self.me, 0, rows, 0, cols), "compute0")
        return (self.casts[-1][1],) if self.schedule.pull else ()

    def _after_casts(self, lane: str) -> After:
        """The last cast, for the first step of a lane that reads own rows; none for later steps."""
        if lane in self.after_casts:
            return ()
        self.after_casts.add(lane)
        return (self.casts[-1][1],)

    # Products.

    def _own_is_separate(self) -> bool:
        """Whether the rank's own rows have a separate product, before all others."""
        return not self.schedule.uniform and self.problem.block(self.me, self.me) > 0

    def _multiply_own(self) -> None:
        self.add(Step(self._work(OWN), "compute0", "own"))
        self._keep_own()

    def _work(self, group: int) -> Payload:
        """Work of the step that consumes a group or the own rows."""
        return Products((self._own_product(),) if group == OWN else self._products(group))

    def _own_product(self) -> Product:
        rows, n, src = self.world.block(self.me, self.me), self.problem.n, self._own_rows()
        out = Region(self.world.out.name, self.me, *rows, 0, n)
        factors = self._factors(self.me, src, rows, (0, self.problem.k))
        return self._product(src, self._right(0, self.problem.k, 0, n), out, factors=factors)

    def _own_rows(self) -> Region:
        """The rank's own rows in its operand."""
        first, rows = self.problem.leaves(self.me, self.me), self.problem.block(self.me, self.me)
        return Region(self.a, self.me, first, first + rows, 0, self.problem.k)

    def _keep_own(self) -> None:
        """Copy the own rows to the gathered A if the call returns it."""
        if self.problem.return_gathered:
            rows = self.world.block(self.me, self.me)
            own = Region("gathered", self.me, *rows, 0, self.problem.k)
            self._place("compute0", self._own_rows(), own)

    def _compute_lane(self, group: int, units: list[Unit]) -> str:
        """The lane of a group. Groups take turns; groups of the same sums share a lane."""
        turn = self.mine.set_of[units[0].peer] if self.schedule.dims == 2 else group
        return self.compute_lanes[turn % self.schedule.compute]

    def _consume(self, group: int) -> None:
        """Multiply the units of a group after their arrival, and release their stage. With
        ``return_gathered`` also copy them to the gathered A; round sums that are complete."""
        units = self.groups[group]
        if not units:
            return
        lane = self._compute_lane(group, units)
        coming = [unit[:2] for unit in units if unit.peer in self.senders]
        after = self._after_casts(lane) if self.casts and len(coming) < len(units) else ()
        if group in self.own_in_group:
            self._place_own(group, lane, after)
            after = ()
        waits, brought = self.traffic.arrivals(coming, lane)
        room = self._release(group) if self.stages else NO_POSTS
        posts, acquired = NO_POSTS if self.problem.return_gathered else room
        label = " ".join([f"{unit.peer}.{unit.ordinal}" for unit in units])
        after += brought + acquired
        last_use = self.add(Step(self._work(group), lane, label, waits, posts, after=after))
        if self.problem.return_gathered:
            last_use = self._keep(lane, units, room)
        if self.product != self.world.out.name:
            self._round(lane, group)
        if self.stages:
            self.last_use[group] = last_use

    def _keep(self, lane: str, units: list[Unit], room: Posts) -> int:
        """Copy arrived units to the gathered A. The last copy posts ``room``. Returns its index."""
        for unit in units:
            first = self.problem.lands(unit.peer, self.me)
            gathered = self.mine.region("gathered", self.me, first, unit)
            posts, after = room if unit is units[-1] else NO_POSTS
            region = self.regions[unit.peer][unit.ordinal]
            index = self._place(lane, region, gathered, after, posts)
        return index

    def _place_own(self, group: int, lane: str, after: After) -> None:
        """Copy the own units and their factors to staging, next to units of peers."""
        after += tuple(i for i in self._room(group) if self.steps[i].lane != lane)
        me, shard = self.me, self.mine.in_shard(self.a, self.me)
        for unit in self.own_in_group[group]:
            self._place(lane, shard[unit.ordinal], self.regions[me][unit.ordinal], after)
            if self.world.brings_factors(unit) and not self._factors_stay(me):
                at = self.world.factors_at
                src, dst = (self.world.factors(unit, me, me, one) for one in ("scale_a", at))
                self._place(lane, src, dst, after)

    def _products(self, group: int) -> tuple[Product, ...]:
        scaling, products = self.problem.scaling, self.products[group]
        return tuple(products) if scaling and scaling.by_rank else merged(products)

    @cached_property
    def products(self) -> list[list[Product]]:
        """One product for each unit, by group, and within a group in the order of ranks."""
        return self.mine.in_groups({peer: self._of_peer(peer) for peer in sorted(self.regions)})

    def _of_peer(self, peer: int) -> list[Product]:
        by_columns, k, n = self.schedule.dims == 2, self.problem.k, self.problem.n
        buffer, me, adds = self.product, self.me, self.world.partial
        pieces = zip(self.mine.units(peer), self.regions[peer], self.mine.rows(peer), strict=True)
        scaled, products = self.problem.scaling is not None, []
        for unit, a, rows in pieces:
            _, ordinal, start, stop, _ = unit
            first, last = (start, stop) if by_columns else (0, k)
            out, right = new(Region, (buffer, me, *rows, 0, n)), self._right(first, last, 0, n)
            factors = self._factors(peer, a, rows, (first, last)) if scaled else None
            products.append(self._product(a, right, out, adds and ordinal > 0, factors=factors))
        return products

    def _factors(self, peer: int, a: Region, rows: Span, cols: Span) -> Region | None:
        """Region of the factors of an operand ``a`` from a peer. ``rows`` are those of the gathered
        A, ``cols`` those of A. None if the product reads the caller's own factors."""
        scaling, staged = self.problem.scaling, a.buffer != self.a
        if scaling is None or not (staged or scaling.replicated) or self._factors_stay(peer):
            return None
        rows = (peer, peer + 1) if scaling.by_rank else rows
        return Region(self.world.factors_at, self.me, *rows, *factors_of(cols, scaling.rules.a[1]))

    def _factors_stay(self, peer: int) -> bool:
        """Whether products read the factors of own rows from the caller's operand."""
        scaling = self.problem.scaling
        return scaling is not None and scaling.by_rank and peer == self.me

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
        spans: list[Span] = []
        for first, last in self.completed(group):
            if spans and spans[-1][1] == first:
                first, _ = spans.pop()
            spans.append((first, last))
        for first, last in spans:
            src = Region(self.product, self.me, first, last, 0, self.problem.n)
            self._place(lane, src, src._replace(buffer=self.world.out.name))

    def _release(self, group: int) -> Posts:
        """Signals that a group's stage is free, to the peers that write to it next, and the steps
        that have acquired the slots of these peers."""
        following = self.stages.next_of.get(group, OWN) if self.stages else OWN
        rooms = (self.world.room_for(peer, self.me).get(following, ()) for peer in self.senders)
        posts = tuple(chain.from_iterable(rooms))
        return posts, tuple(sorted({self.acquired[signal.waiter] for signal in posts}))


#: Disjoint ranges of rows of the result, in rising order.
Spans = list[tuple[int, int]]


class InnerGatherStage(GatherStage):
    """Steps of one rank for products that sum over the rows that travel. Products that add to the
    same rows stay on one lane in a fixed order, so that results repeat to the last bit."""

    def __init__(self, world: GatherWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        whole = (0, self.problem.k)
        self.made = self._adding([whole] if self._own_is_separate() else [])
        self.adds = any(product.accumulate for product in chain.from_iterable(self.made))
        out = world.out.name
        if not self.adds and self.product != out:  # each sum is one product, which rounds itself
            self.product = out
            self.made = [
                [one._replace(out=one.out._replace(buffer=out)) for one in products]
                for products in self.made
            ]
        self.last = self._last()

    def _adding(self, begun: Spans) -> list[list[Product]]:
        """The products of each group. A product adds to rows of the result that an earlier product
        has begun; ``begun`` are the rows that the own product begins."""
        by_group = []
        for pieces in self.products:
            products = joined(pieces)
            for index, product in enumerate(products):
                if _within(product, begun):
                    products[index] = product._replace(accumulate=True)
                else:
                    insort(begun, (product.out.row, product.out.row_stop))
            by_group.append(products)
        return by_group

    def _last(self) -> list[Spans]:
        """By group, the rows of the result to which no later group adds."""
        over: Spans = []
        by_group: list[Spans] = []
        for products in reversed(self.made):
            spans: Spans = []
            for product in products:
                if not _within(product, over):  # a tail's pieces are the last of their rows
                    spans.append((product.out.row, product.out.row_stop))
                    insort(over, spans[-1])
            by_group.append(sorted(spans))
        return by_group[::-1]

    def _of_peer(self, peer: int) -> list[Product]:
        whole = Region(self.product, self.me, 0, self.problem.k, 0, self.problem.n)
        outs = [whole] * self.mine.count(peer)
        if self.schedule.dims == 2:
            outs = [whole._replace(row=u.start, row_stop=u.stop) for u in self.mine.units(peer)]
        rights = [self._right(*rows, *whole[4:]) for rows in self.mine.rows(peer)]
        pieces = zip(self.regions[peer], rights, outs, strict=True)
        return [Product(*piece, transposed=True) for piece in pieces]

    def _own_is_separate(self) -> bool:
        """Whether the own rows have a separate product. Without any row for this rank they have
        one, too: it writes a result of zeros."""
        return super()._own_is_separate() or not self.problem.product_rows(self.me)

    def _own_product(self) -> Product:
        n, rows = self.problem.n, self.world.block(self.me, self.me)
        out = Region(self.product, self.me, 0, self.problem.k, 0, n)
        return Product(self._own_rows(), self._right(*rows, 0, n), out, transposed=True)

    def _compute_lane(self, group: int, units: list[Unit]) -> str:
        return self.compute_lanes[0 if self.adds else group % self.schedule.compute]

    def _products(self, group: int) -> tuple[Product, ...]:
        return tuple(self.made[group])

    def completed(self, group: int) -> Iterable[tuple[int, int]]:
        return [] if group == OWN else self.last[group]


def _within(product: Product, spans: Spans) -> bool:
    before = bisect_right(spans, product.out.row, key=itemgetter(0)) - 1
    return before >= 0 and product.out.row < spans[before][1]
