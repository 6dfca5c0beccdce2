"""Plans of gathering operators, which multiply rows as they arrive.

:class:`GatherWorld` is the route of the rows. :class:`Gather` has the copies of one rank, and adds
a step for each group of arrived rows. Its users supply the work of these steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain

from ficco.plan.model import PLAIN, Payload, Product, Products, Region, Signal, Step, Transfer, new
from ficco.problems.mask import Span
from ficco.problems.mask import merged as merged_spans
from ficco.problems.scaling import factors_of
from ficco.schedules.builder import (
    Builder,
    EachRank,
    Shapes,
    Stage,
    World,
    factors_in,
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
    of peers. Otherwise the own shard has a separate product, and staging has a place for every
    other row of the gathered A. Under a cap, groups use the staging in turn.

    Attributes:
        most: maximum number of units of a shard.
        stages: stages of a capped staging, by rank; empty if each piece has a place.
        source: name of the buffer that pieces are copied from.
        factors_from, factors_at: names of the source and staging buffers of the factors of A.
        product: buffer of the products.
        partial: whether products of pieces add up.
    """

    def lay_out(self) -> None:
        problem, schedule, ranks = self.problem, self.schedule, range(self.world)
        self.arrivals = EachRank(partial(Arrivals, problem, schedule))
        largest = [self.arrivals[rank] for rank in self.largest]
        self.most = max(one.rounds - 1 + one.tail for one in largest)
        self.partial = schedule.dims == 2 and self.most > 1
        per_pair = max(self.most, 2)  # a rank that fetches uses two words: for valid and done
        self.kind, self.data = "valid" if schedule.pull else "ready", self.words.block(per_pair)
        self.rooms = self.words.block(per_pair)
        self.staging, self.stages = f"staging{self.suffix}", list[Stages]()
        rows = [problem.product_rows(rank) - self.absent(rank) for rank in ranks]
        shapes = tuple((count, problem.k) for count in rows)
        needed = max(rows) * problem.k * self.a.itemsize
        if self.cap is not None and needed > self.cap:
            shapes = self._take_turns(self.cap, needed)
        self.source, self.factors_from, self.factors_at = self.a.name, "scale_a", "scale_a"
        if self.world > 1:
            self._add_slot_buffers(shapes)
        self.product = self.out
        if (self.partial or problem.kind.inner) and self.out.itemsize < 4:
            self.product = self.buffer("sum", self.out, self.out.shapes, "local", dtype="float32")

    def absent(self, rank: int) -> int:
        """Number of a rank's own rows without a place in its staging."""
        own, fused = self.problem.block(rank, rank), self.schedule.grouping == "fused"
        shares = fused and self.schedule.uniform and self.problem.product_rows(rank) > own
        return 0 if shares else own

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
        row = problem.lands(owner, rank) - (self.absent(rank) if owner > rank else 0)
        row += problem.leaves(owner, dst) - problem.leaves(owner, rank)
        return self.arrivals[dst].regions(self.staging, rank, row, units)

    def factors(self, rank: int, owner: int, gathered: Region) -> Region:
        """Region where the factors of a region of the gathered A, from an owner, land at a rank."""
        scaling = self.problem.scaling
        assert scaling is not None
        rows = (owner, owner + 1) if scaling.by_rank else gathered[2:4]
        return Region(self.factors_at, rank, *rows, *factors_of(gathered[4:], scaling.rules.a[1]))

    # The route.

    def carrier(self, receiver: int, owner: int) -> int:
        """The rank that copies an owner's shard to a receiver: the owner, or a relay."""
        return via(self.problem, receiver, owner)

    def pieces(self, src: int, dst: int, owner: int) -> list[Parcel]:
        """The pieces of an owner that a rank sends to another. Those that it sends to itself are
        its own units that are copied to staging."""
        units, pull = self.arrivals[dst].units(owner), self.schedule.pull
        called, a = names(owner, len(units)), self.a.name if src == dst else self.source
        relays = src != owner
        leaving = self.landed(owner, dst, src) if relays else self.arrivals[dst].in_shard(a, src)
        none: Signals = ()
        waits, posts = [none] * len(units), [none] * len(units)
        if not pull:
            waits = [self.room(dst, unit) for unit in units] if self.stages else waits
            posts = [(signal,) for signal in self.signals(owner, dst, owner)]
        elif units:  # the first piece waits for the owner's call, and the last one ends the reading
            waits[0], posts[-1] = (self.begun(src, dst),), (self.read(dst, src),)
        pieces, factors = list[Parcel](), self._factor_moves(src, dst, owner, leaving)
        ends = units, called, leaving, self.landed(owner, dst, dst), factors, waits, posts
        for unit, name, source, landing, factor, wait, post in zip(*ends, strict=True):
            labels: tuple[str, ...] = (f"{name}>{dst}",)
            moves: tuple[Transfer, ...] = (new(Transfer, (source, landing, 0, *PLAIN)),)
            if factor:
                labels, moves = (f"scale {labels[0]}", *labels), (factor, *moves)
            pieces.append(new(Parcel, (moves, labels, wait, post, unit.group)))
        return pieces

    def _factor_moves(
        self, src: int, dst: int, owner: int, leaving: list[Region]
    ) -> list[Transfer | None]:
        """Copies of the factors of units. Units that share factors send them once, and a single
        factor of all own rows is read in the operand."""
        scaling, moves = self.problem.scaling, list[Transfer | None]()
        if scaling is None or scaling.replicated or (scaling.by_rank and src == dst):
            return [None] * len(leaving)
        buffer = "scale_a" if src == dst else self.factors_from
        for rows, gathered in zip(leaving, self.arrivals[dst].gathered(owner), strict=True):
            source = factors_in(buffer, rows, scaling.rules.a)
            if src != owner:
                source = self.factors(src, owner, gathered)
            move = Transfer(source, self.factors(dst, owner, gathered))
            moves.append(move if move not in moves else None)
        return moves

    @remembered
    def signals(self, src: int, dst: int, owner: int) -> list[Signal]:
        regions, poster = self.arrivals[dst].gathered(owner), self.carrier(dst, owner)
        apart = (owner - poster) % self.world * self.data.per_poster
        first = self.data.first(owner)
        return [
            new(Signal, ("ready", poster, dst, apart + i, first + i, *region[2:4]))
            for i, region in enumerate(regions)
        ]

    def room(self, rank: int, unit: Unit) -> Signals:
        """The signal of a rank to a sender that a stage has room for the sender's unit. The first
        group in a stage needs none, nor do receivers that fetch."""
        if self.schedule.pull or unit.group not in self.stages[rank].room_of:
            return ()
        rows = self.arrivals[rank].gathered(unit.peer)[unit.ordinal][2:4]
        return (self.rooms.signal("room", rank, unit.peer, unit.ordinal, rows),)

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
        own: the own shard as one unit of the group ``OWN``.
        groups: the units that the rank uses, by group; ``OWN`` if the own shard has a separate
            product.
        places: by unit, its region when it is used, and its region in the gathered A.
        senders: the peers that send units to the rank.
    """

    world: GatherWorld

    def __init__(self, world: GatherWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.mine = world.arrivals[self.me]
        self.stages = world.stages[self.me] if world.stages else None
        self.senders = dict.fromkeys(peer for peer in self.mine.set_of if peer != self.me)
        self.traffic = Traffic(builder, self.schedule, world)
        self.traffic.announce()
        self.published: After = ()  # the steps that bring A to where peers fetch it
        self.last_use: dict[int, int] = {}  # group -> the step that frees its stage
        self.acquired: dict[int, int] = {}  # peer -> the step that takes over its slot
        self.after_casts = {"compute0"}  # lanes that run after all casts of A
        self._find_places()
        self._assign_lanes()

    def _find_places(self) -> None:
        """Set the groups of units, the place of each unit, and the own shard as a unit."""
        world, problem, me = self.world, self.problem, self.me
        self.groups = dict(enumerate(self.mine.by_group))
        self.places = dict[Unit, tuple[Region, Region]]()
        for peer in self.mine.set_of:
            places = zip(self._regions(peer), self.mine.gathered(peer), strict=True)
            self.places |= zip(self.mine.units(peer), places, strict=True)
        first, rows, k = problem.leaves(me, me), problem.block(me, me), problem.k
        self.own = Unit(me, 0, 0, rows if self.schedule.dims == 1 else k, OWN)
        if self.own_is_separate():
            self.groups = {OWN: [self.own], **self.groups}
            region = Region(self.a, me, first, first + rows, 0, k)
            self.places[self.own] = region, Region("gathered", me, *world.block(me, me), 0, k)

    def own_is_separate(self) -> bool:
        """Whether the own shard is a group of its own. A sum over no rows is zeros, which the
        product of the own rows writes."""
        problem, me = self.problem, self.me
        if problem.kind.inner and not problem.product_rows(me):
            return True
        return not self.schedule.uniform and problem.block(me, me) > 0

    def _regions(self, peer: int) -> list[Region]:
        """Regions of a peer's units when they are used. Own units are in the operand or, next to
        units of peers, in staging."""
        me, landed = self.me, self.world.landed(peer, self.me, self.me)
        if peer != me:
            return landed
        mixed = [any(one.peer != me for one in self.groups[i.group]) for i in self.mine.units(me)]
        ends = zip(self.mine.in_shard(self.a, me), landed, mixed, strict=True)
        return [staged if moves else region for region, staged, moves in ends]

    def _assign_lanes(self) -> None:
        world, schedule, builder = self.world, self.schedule, self.builder
        turns = {peer: self._turn(peer) for peer in self.peers}
        builder.assign_lanes(sorted(turns, key=turns.__getitem__), schedule.copy)
        #: Peers in the order of the copies of one group.
        self.in_turn = sorted(turns, key=lambda peer: turns[peer][1:])
        # Copies by a kernel go on the lane of the product if it waits for all of them and there is
        # no other work meanwhile.
        launched = schedule.mover == "kernel" and not schedule.pull and schedule.copy == 1
        most = max(world.arrivals[rank].group_count for rank in world.largest)
        if launched and schedule.uniform and most <= 1:
            builder.lane_of = dict.fromkeys(builder.lane_of, "compute0")

    def _turn(self, peer: int) -> tuple[int, int, int]:
        """Sort key of a peer: when this rank first copies from it (pull) or to it."""
        if self.schedule.pull:
            return self.mine.set_of[peer], self.mine.place_in_set[peer], 0
        target = self.world.arrivals[peer]
        first = next((unit.group for unit in target.units(self.me)), target.group_count)
        return first, target.place_in_set[self.me], (peer - self.me) % self.problem.world

    # Opening a call.

    def publish(self) -> None:
        """Cast A if the call does, and copy it to a buffer that peers can read, unless they read A
        in place."""
        world, problem, begin = self.world, self.problem, len(self.steps)
        if not problem.left_rows(self.me):
            return
        if problem.given is not problem:
            self._cast_all()
        copies = [(world.a, world.source)]
        if problem.sends_factors:
            copies.append((problem.factors, world.factors_from))
        for source, target in copies:
            if target != source.name:
                rows = whole(source, self.me)
                move = Transfer(rows, rows._replace(buffer=target))
                self.add(Step(move, "compute0", "publish"))
        if self.schedule.pull:
            self.published = tuple(range(begin, len(self.steps)))

    def _cast_all(self) -> None:
        """Cast the pieces of A in the order of their copies, then the other rows. If peers fetch,
        one step casts all of A."""
        far = [target for target, _ in legs(self.problem, self.me)]
        targets = [] if self.schedule.pull else [*far, *self.in_turn]
        for _, _, piece in chain.from_iterable(self.traffic.leaving(targets)):
            self._cast(piece.moves[-1].src, "compute0")
        self._cast(whole(self.world.a, self.me), "compute0")

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
        self.publish()
        if OWN in self.groups:
            yield OWN
        turns = self.open()
        if self.problem.hosts > 1:
            for group, items in enumerate(turns):
                self.copy(group, items)
            turns = []
            self.cross()
        ahead = (self.stages and self.stages.count) or LOOKAHEAD
        yield from self.traffic.stream(self.mine.group_count, turns, self.copy, ahead)
        if self.schedule.pull:
            self.traffic.close()

    # Arrived units.

    def use(self, group: int, lane: str, work: Payload | None) -> int:
        """Add a step that works on the units of a group after their arrival. With
        ``return_gathered`` also copy them to the gathered A. Returns the step that works."""
        units, after = self.groups[group], After()
        own = [unit for unit in units if unit.peer == self.me]
        coming = [unit[:2] for unit in units if unit.peer in self.senders]
        if own and self.casts and lane not in self.after_casts:
            self.after_casts.add(lane)
            after = (self.casts[-1][1],)
        if own and coming:
            self._place_own(own, lane, after)
            after = ()
        waits, brought = self.traffic.arrivals(coming, lane)
        numbers = [f"{unit.peer}.{unit.ordinal}" for unit in units]
        label = "own" if group == OWN else " ".join(numbers)
        step = self.add(Step(work, lane, label, waits, after=(*after, *brought)))
        self.keep(lane, units)
        if self.stages:
            self._release(group, self.stages)
        return step

    def _place_own(self, units: list[Unit], lane: str, after: After) -> None:
        """Copy own units and their factors to staging, next to units of peers."""
        room = self._room(units[0].group)
        after += tuple(i for i in room if self.steps[i].lane != lane)
        for unit in units:
            for move in reversed(self.traffic.of(self.me, self.me)[unit.ordinal].moves):
                self._place(lane, move.src, move.dst, after)

    def keep(self, lane: str, units: list[Unit]) -> None:
        """Copy units to the gathered A if the call returns it."""
        if self.problem.return_gathered:
            for unit in units:
                self._place(lane, *self.places[unit])

    def _release(self, group: int, stages: Stages) -> None:
        """Let the last step free the stage of a group: it posts to the peers that write to the
        stage next, after this rank has acquired their slots."""
        self.last_use[group] = last = len(self.steps) - 1
        coming = self.groups.get(stages.next_of.get(group, OWN), [])
        units = [unit for unit in coming if unit.peer != self.me]
        posts = tuple(chain.from_iterable(self.world.room(self.me, unit) for unit in units))
        acquired, step = {self.acquired[signal.waiter] for signal in posts}, self.steps[last]
        self.steps[last] = step._replace(posts=posts, after=(*step.after, *sorted(acquired)))


class GatherStage(Stage):
    """Products of one rank. ``group`` is the number of a group of units, or ``OWN``."""

    world: GatherWorld
    transfers: type[Gather] = Gather

    def __init__(self, world: GatherWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.gather = self.transfers(world, builder)
        self.mine, self.groups = self.gather.mine, self.gather.groups
        self.product = world.product.name

    def run(self) -> None:
        for _ in self.flow():
            pass

    def flow(self) -> Iterator[int]:
        """Add the steps of :meth:`run`, and yield each group after its product."""
        for group in self.gather.stream():
            if units := self.groups[group]:
                lane = "compute0" if group == OWN else self._lane(group, units)
                self.gather.use(group, lane, Products(self._products(group)))
                if group != OWN and self.product != self.world.out.name:
                    self._round(lane, group)
            yield group

    def _lane(self, group: int, units: list[Unit]) -> str:
        """The lane of a group. Groups take turns; groups of the same sums share a lane."""
        turn = self.mine.set_of[units[0].peer] if self.schedule.dims == 2 else group
        return f"compute{turn % self.schedule.compute}"

    def _products(self, group: int) -> tuple[Product, ...]:
        """The products of the units of a group, in the order of ranks."""
        scaling, products = self.problem.scaling, list(map(self._times, sorted(self.groups[group])))
        return tuple(products) if scaling and scaling.by_rank else merged(products)

    def _times(self, unit: Unit) -> Product:
        """The product of a unit: columns of A by rows of B. Products of columns add up."""
        me, n, world, (a, gathered) = self.me, self.problem.n, self.world, self.gather.places[unit]
        out = world.out.name if unit.group == OWN else self.product
        right = new(Region, (self.b, me, *gathered[4:], 0, n))
        result = new(Region, (out, me, *gathered[2:4], 0, n))
        product = Product(a, right, result, world.partial and unit.ordinal > 0)
        if (scaling := self.problem.scaling) is None:
            return product
        landed = scaling.replicated or a.buffer != self.a
        landed = landed and not (scaling.by_rank and unit.peer == me)
        factors = world.factors(me, unit.peer, gathered) if landed else None
        return scaled(self.problem, product, factors)

    def completed(self, group: int) -> Iterable[Span]:
        """Ranges of rows of the result that a group completes, in rising order."""
        by_columns = self.schedule.dims == 2
        for unit in sorted(self.groups[group]):
            if not by_columns or unit.stop == self.problem.k:
                yield self.gather.places[unit][1][2:4]

    def _round(self, lane: str, group: int) -> None:
        """Round the sums that a group completes to the result, contiguous rows in one step."""
        for rows in merged_spans(self.completed(group)):
            src = Region(self.product, self.me, *rows, 0, self.problem.n)
            self._place(lane, src, src._replace(buffer=self.world.out.name))


class InnerGatherStage(GatherStage):
    """Steps of one rank for products that sum over the rows that travel, as the gradient of a
    weight does. Arriving rows of A are multiplied by the same rows of the local B, and each product
    adds to the whole result. Pieces of columns of A make rows of the result.

    Products that add to the same rows stay on one lane in a fixed order, so that results repeat to
    the last bit."""

    def __init__(self, world: GatherWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.products = self._sums()
        self.adds = any(one.accumulate for one in chain.from_iterable(self.products.values()))
        if not self.adds:  # each sum is one product, which rounds itself
            self.product = world.out.name
            self.products = self._sums()
        over = list[Span]()  # a tail's pieces are the last of their rows
        self.last = {
            group: sorted(one.out[2:4] for one in products if _is_first(one, over))
            for group, products in reversed(self.products.items())
        }

    def _sums(self) -> dict[int, list[Product]]:
        """The products of each group. The first product of rows of the result writes them, and
        later products add to them."""
        begun, products = list[Span](), dict[int, list[Product]]()
        for group, units in self.groups.items():
            of_units = joined(map(self._times, sorted(units)))
            products[group] = [
                one if _is_first(one, begun) else one._replace(accumulate=True) for one in of_units
            ]
        return products

    def _times(self, unit: Unit) -> Product:
        """The product of a unit: its rows, transposed, by the same rows of B."""
        (a, gathered), n = self.gather.places[unit], self.problem.n
        right = self._right(*gathered[2:4], 0, n)
        result = Region(self.product, self.me, *gathered[4:], 0, n)
        return Product(a, right, result, transposed=True)

    def _lane(self, group: int, units: list[Unit]) -> str:
        return f"compute{0 if self.adds else group % self.schedule.compute}"

    def _products(self, group: int) -> tuple[Product, ...]:
        return tuple(self.products[group])

    def completed(self, group: int) -> Iterable[Span]:
        return self.last[group]


def _is_first(product: Product, spans: list[Span]) -> bool:
    """Whether a product's rows of the result are in no span. Adds them to the spans."""
    row = product.out.row
    if any(first <= row < last for first, last in spans):
        return False
    spans.append(product.out[2:4])
    return True
