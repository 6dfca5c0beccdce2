"""Builds the Plan of a rank for gathering operators, which multiply what arrives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from operator import itemgetter
from weakref import proxy

from ficco.plan.model import PLAIN, Product, Region, Signal, Step, Transfer, new
from ficco.problems.products import Problem
from ficco.problems.scaling import ALL, factors_of
from ficco.problems.specification import Buffer
from ficco.schedules.builder import Builder, EachRank, Stage, WordAllocator, World, remembered
from ficco.schedules.groups import Arrivals, Unit, names, targets_in_order
from ficco.schedules.network import LANE, Sending, add_moves, legs, via
from ficco.schedules.runs import merged
from ficco.schedules.space import Schedule

#: Groups whose copies are enqueued before the first product that waits for one. Copy engines then
#: always have work, and a GPU that waits for its host gets its first products early.
LOOKAHEAD = 2

#: The signals that hand a stage of a ring on, and the steps that they come after; empty if no later
#: group uses the stage.
Room = tuple[tuple[Signal, ...], tuple[int, ...]]
NO_ROOM: Room = ((), ())

#: The group of the rank's own rows where those have a product of their own.
OWN = -1

NOTHING: Mapping[int, tuple[Signal, ...]] = {}

#: Rows of the gathered A.
Rows = tuple[int, int]


class StagingTooSmall(ValueError):
    """The largest step, which takes ``needed`` bytes, does not fit under a cap on staging."""

    def __init__(self, text: str, needed: int) -> None:
        super().__init__(text)
        self.needed = needed


class _Staging:
    """The places of one receiver's units when it multiplies them.

    Units of its peers land in staging. Its own units are copied there if they share a step with
    those, or if ``own_lands``. Otherwise the rank's own shard has a product of its own, and every
    other row of the gathered A its place in staging. In a ring, landing groups use the stages in
    turn, and the units of a group are side by side.
    """

    def __init__(self, world: GatherWorld, rank: int, own_lands: bool) -> None:
        problem, schedule = world.problem, world.schedule
        self.world: GatherWorld = proxy(world)  # no circle, which would outlive the plans
        self.rank = rank
        self.by_columns = schedule.dims == 2
        own, whole = problem.block(rank, rank), problem.product_rows(rank)
        shared = schedule.uniform and schedule.grouping == "fused"
        self.own_rows_absent = 0 if own_lands or shared else own
        self.rows = whole - self.own_rows_absent if own_lands or whole > own else 0
        self.cols = problem.k
        self.stages = 0
        #: By group, the previous and the next group in its stage of the ring.
        self.ahead_of: dict[int, int] = {}
        self.heir_of: dict[int, int] = {}
        self._stage: dict[int, int] = {}  # by landing group, its first row
        self._row: dict[int, list[int]] = {}  # by rank, the row of each unit within its stage

    @property
    def arrivals(self) -> Arrivals:
        """What comes."""
        return self.world.arrivals[self.rank]

    def make_ring(self) -> None:
        """Lay the units of each group side by side; :meth:`set_stages` sets how many groups fit."""
        filled = [0] * self.arrivals.group_count
        widest = [0] * self.arrivals.group_count
        for peer in self.arrivals.set_of:
            self._row[peer] = rows = []
            height = self.arrivals.block(peer) if self.by_columns else 0  # else the unit's own
            for _, _, start, stop, group in self.arrivals.units(peer):
                rows.append(filled[group])
                filled[group] += height or stop - start
                widest[group] = max(widest[group], stop - start)
        self.rows = max([filled[group] for group in self._landing_groups], default=0)  # of a stage
        if self.by_columns:
            self.cols = max([widest[group] for group in self._landing_groups], default=0)

    def set_stages(self, most: int) -> None:
        """Let the groups that land here take turns in so many stages, or fewer."""
        groups, rows = self._landing_groups, self.rows
        self.stages = min(most, len(groups))
        self.rows *= self.stages
        self._stage = {group: turn % self.stages * rows for turn, group in enumerate(groups)}
        self.ahead_of = dict(zip(groups[self.stages :], groups, strict=False))
        self.heir_of = dict(zip(groups, groups[self.stages :], strict=False))

    @cached_property
    def _landing_groups(self) -> list[int]:
        """Groups with units of peers. A group of own units only stays where it is."""
        peers = [peer for peer in self.arrivals.set_of if peer != self.arrivals.rank]
        return sorted({unit.group for peer in peers for unit in self.arrivals.units(peer)})

    @remembered
    def regions(self, peer: int) -> list[Region]:
        """The regions of a peer's units when they are multiplied, in order of arrival."""
        units = self.arrivals.units(peer)
        if peer != self.arrivals.rank:
            return self.landing(peer, units)
        stays, there = self.arrivals.in_shard(self.world.a.name, peer), set(self._landing_groups)
        lands = iter(self.landing(peer, [unit for unit in units if unit.group in there]))
        return [
            next(lands) if unit.group in there else region
            for unit, region in zip(units, stays, strict=True)
        ]

    def landing(self, peer: int, units: list[Unit], skipped: int = 0) -> list[Region]:
        """The regions in staging of units of a peer, which another rank may have cut, of a block
        that begins so many rows later."""
        rank, problem, buffer = self.rank, self.world.problem, self.world.staging
        if not self.stages:
            first = problem.lands(peer, rank) - (self.own_rows_absent if peer > rank else 0)
            return self.arrivals.regions(buffer, rank, first + skipped, units)
        regions, by_columns, rows, cols = [], self.by_columns, self.arrivals.block(peer), problem.k
        for _, ordinal, start, stop, group in units:
            row, length = self._stage[group] + self._row[peer][ordinal], stop - start
            size = (rows, length) if by_columns else (length, cols)
            regions.append(Region(buffer, rank, row, row + size[0], 0, size[1]))
        return regions


class GatherWorld(World):
    """What all ranks know: who sends what when, where it lands, and by which words that is
    signalled."""

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
        most = [self.arrivals[rank] for rank in self.largest]
        terms = max(arrivals.rounds - 1 + arrivals.tail for arrivals in most)
        self.partial = schedule.dims == 2 and terms > 1
        per_pair = max(terms, 2)
        self.data = words.block(per_pair)  # pull uses two of the words: for valid and done
        self.room = words.block(per_pair)  # of a ring
        self.tiled = schedule.grouping == "tiled"
        self.arrived = words.block(terms * self.tiled)  # of its pieces, as they arrive
        self.staging = "staging" + suffix
        self.landing = [_Staging(self, rank, own_lands) for rank in range(self.world)]
        needed = max(staging.rows for staging in self.landing) * problem.k * self.a.itemsize
        if cap is not None and needed > cap:
            self._make_rings(cap, needed)
        self.source = self.a  # where copies read
        #: Where copies read the factors of A's rows, and where products find those of rows in
        #: staging: a place for each row of the gathered A, or for each rank, also beside a ring.
        self.factors_from = self.factors_at = "scale_a"
        if self.world > 1:
            self._add_slot_buffers(packs_columns)
            self._add_factors()
        self.product = self.out  # where products go
        if (self.partial or problem.kind.inner) and self.out.itemsize < 4:
            self.product = self.buffer("sum", self.out, self.out.shapes, "local", dtype="float32")

    def _add_slot_buffers(self, packs_columns: bool) -> None:
        schedule = self.schedule
        #: One row pitch on all ranks, so that a sender knows the receiver's.
        pitch = max(staging.cols for staging in self.landing)
        packs = packs_columns and schedule.dims == 2 and not schedule.pull
        # A tail cuts some rows otherwise than the rest, and stages of a ring are shorter.
        packs = packs and schedule.tail == 1 and not self.landing[0].stages
        shapes = tuple((staging.rows, pitch) for staging in self.landing)
        layout = "columns" if packs else self.problem.layout
        self.buffer("staging", self.a, shapes, layout=layout)
        if schedule.pull and not self.a.reachable:
            self.source = self.buffer("publish", self.a, self.a.shapes, leaves=True)

    def _add_factors(self) -> None:
        if not self.problem.sends_factors:
            return
        factors = self.problem.factors
        landing = self.problem.gathered_factors("", "slot").shapes
        self.factors_at = self.buffer("staging scale", factors, landing).name
        if self.schedule.pull and not self.a.memory == "slot":
            shapes = factors.shapes
            self.factors_from = self.buffer("publish scale", factors, shapes, leaves=True).name

    def _make_rings(self, cap: int, needed: int) -> None:
        """Let groups use the staging in turn, since all pieces do not fit under the cap."""
        of, finer, pitch = "all pieces", "", 0
        passed = self.schedule.grouping == "ring"
        rings = not (self.tiled or passed or self.problem.hosts > 1)
        if rings:
            for staging in self.landing:
                staging.make_ring()
            of, finer = "one step", " or cut finer (pieces=)"
            pitch = max(staging.cols for staging in self.landing) * self.a.itemsize
            needed = max(staging.rows for staging in self.landing) * pitch
        if needed > cap:
            text = f"workspace_bytes: required at least {needed} for {of} of schedule"
            text = f"{text} {self.schedule} on {self.problem}, got {cap}; allow more{finer}"
            raise StagingTooSmall(text, needed)
        for staging in self.landing:
            staging.set_stages(cap // max(staging.rows * pitch, 1))

    def carrier(self, receiver: int, sender: int) -> int:
        """The rank that copies a shard to a rank."""
        return via(self.problem, receiver, sender)

    @remembered
    def of_units(self, kind: str, poster: int, waiter: int) -> list[Signal]:
        """Signals of a kind, one for each unit between two ranks, in order of arrival. For units
        from another host they come from the rank that copies them on."""
        sender, receiver, block = poster, waiter, self.data
        if kind == "room":
            sender, receiver, block = waiter, poster, self.room
        first, rows = block.first(poster), self.arrivals[receiver].rows(sender)
        slots = 0
        if kind == "ready":
            poster = self.carrier(receiver, sender)
            slots = (sender - poster) % self.world * block.per_poster
        words: Sequence[int] = range(first, first + len(rows))
        if self.tiled:
            words = self.words_in_turn[receiver][sender]
        return [
            new(Signal, (kind, poster, waiter, slot, word, *each))
            for slot, (word, each) in enumerate(zip(words, rows, strict=True), slots)
        ]

    @cached_property
    def words_in_turn(self) -> list[dict[int, list[int]]]:
        """By receiver and peer, the words of the peer's units. Those of a receiver follow each
        other in the order in which it expects the units."""
        found = []
        for rank in range(self.world):
            words: dict[int, list[int]] = {peer: [] for peer in range(self.world)}
            units = chain.from_iterable(self.arrivals[rank].by_group)
            for word, unit in enumerate(units, start=self.arrived.base):
                words[unit.peer].append(word)
            found.append(words)
        return found


class GatherStage(Stage):
    """One rank's steps; ``group`` counts a receiver's groups of units."""

    def __init__(self, world: GatherWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.world, rank = world, self.me
        self.mine = world.arrivals[rank]
        self.staging = world.landing[rank]
        self.groups = self.mine.by_group
        #: By rank, the regions of its units; by group, the signals for the units that peers push.
        self.regions = {peer: self.staging.regions(peer) for peer in self.mine.set_of}
        pushers = [p for p in self.mine.set_of if via(self.problem, rank, p) != rank]
        if self.schedule.pull:
            pushers = []
        ready = {peer: world.of_units("ready", peer, rank) for peer in pushers}
        self.ready = self.mine.in_groups(ready)
        self.product = world.product.name
        self.last_use: dict[int, int] = {}  # group -> the step that frees its stage of a ring
        self.pulled: dict[int, dict[str, int]] = {}  # group -> copy lane -> its last copy
        self.brought: dict[tuple[int, int], int] = {}  # peer and unit -> its network step
        self.sources: dict[tuple[int, int, int, int], list[Region]] = {}
        self.acquired: dict[int, int] = {}  # peer -> the step that takes over its slot
        self.after_casts = {"compute0"}  # where the call casts A: lanes that run after all of it
        lanes = min(self.schedule.compute, len(self.groups) + 1)
        self.compute_lanes = [f"compute{i}" for i in range(lanes)]
        in_turn = sorted(self.peers, key=self._turn)
        self.assign_lanes(in_turn)
        # Copies go on the product's own lane, before it, if they are kernel launches, the product
        # waits for all of them, and there is no other work meanwhile.
        schedule = self.schedule
        launched = schedule.mover == "kernel" and not schedule.pull and schedule.copy == 1
        most = max(world.arrivals[rank].group_count for rank in world.largest)
        if launched and schedule.uniform and most <= 1:
            builder.lane_of = dict.fromkeys(in_turn, "compute0")

    @cached_property
    def room_for(self) -> list[list[Signal]]:
        """By group, the signals to peers that there is room for their units in a ring."""
        peers = [peer for peer in self.mine.set_of if peer != self.me]
        return self.mine.in_groups({p: self.world.of_units("room", self.me, p) for p in peers})

    @cached_property
    def shard(self) -> list[Region]:
        """The regions of the rank's own units in the operand."""
        return self.mine.in_shard(self.a, self.me)

    def _turn(self, peer: int) -> tuple[int, int, int]:
        """Sort key of peers: when this rank first copies from them (pull) or to them."""
        if self.schedule.pull:
            return self.mine.set_of[peer], self.mine.place_in_set[peer], 0
        target = self.world.arrivals[peer]
        first = next((unit.group for unit in target.units(self.me)), target.group_count)
        return first, target.place_in_set[self.me], (peer - self.me) % self.problem.world

    def run(self) -> None:
        """Add all steps but the last, which hands over the slot."""
        for _ in self.flow():
            pass

    def flow(self, tell: Mapping[int, tuple[Signal, ...]] = NOTHING) -> Iterator[int]:
        """The same group by group, for what follows: yields each group once it is multiplied,
        ``OWN`` for the own rows. ``tell``: what else to post to peers once slots are acquired."""
        published = self._publish()
        if self._own_is_separate():
            self._multiply_own()
            yield OWN
        copies = self._open(tell, published)
        ahead = self.staging.stages or LOOKAHEAD
        if self.problem.hosts > 1:
            for group, steps in enumerate(copies):
                self._copy(group, steps)
            copies = []
            self._relay()
        for group in range(-ahead, max(len(self.groups), len(copies))):
            if 0 <= group < len(self.groups):
                self._consume(group)
                yield group
            if group + ahead < len(copies):
                self._copy(group + ahead, copies[group + ahead])
        if self.schedule.pull:
            self._close_pull()

    def _open(
        self, tell: Mapping[int, tuple[Signal, ...]], published: tuple[int, ...]
    ) -> list[list[Step]]:
        """Take over the slots of the peers; returns the copies of each group."""
        begun = self._begun()
        opening = {peer: begun[peer] + tell.get(peer, ()) for peer in self.peers}
        self.acquired = self.builder.acquire(opening, published)
        return self._pulls() if self.schedule.pull else self._pushes()

    def silent(self) -> tuple[Signal, ...]:
        """The signals that the calls of peers without data for this rank have begun."""
        return tuple(
            self.world.data.signal("ready", peer, self.me)
            for peer in self.peers
            if not self.schedule.pull and not self.problem.block(peer, self.me)
        )

    # Copies: both directions return the copies of each group.

    def _pushes(self) -> list[list[Step]]:
        me, mover, world = self.me, self.schedule.mover, self.world
        groups = max((world.arrivals[target].group_count for target in self.peers), default=0)
        copies: list[list[Step]] = [[] for _ in range(groups)]
        factors: list[list[Step]] = [[] for _ in range(groups)]
        for target in self._in_turn():
            lane, landing = self.lane_of[target], world.landing[target]
            units, sources = landing.arrivals.units(me), self._sources(me, landing.arrivals)
            ready, regions = world.of_units("ready", me, target), landing.regions(me)
            called = names(me, len(units))
            pieces = zip(units, called, self._rooms(target), ready, sources, regions, strict=True)
            for unit, name, room, signal, source, region in pieces:
                move, label = new(Transfer, (source, region, 0, *PLAIN)), f"{name}>{target}"
                copy = Step("copy", lane, label, room, (signal,), transfer=move, mover=mover)
                if self.casts:
                    copy = copy._replace(after=self._cast(source, lane)[-1:])
                ahead = self._factor_copies(copy, landing.arrivals, unit)
                factors[unit.group] += ahead
                copies[unit.group].append(copy._replace(after=()) if ahead else copy)
        return [some + others for some, others in zip(factors, copies, strict=True)]

    def _in_turn(self) -> list[int]:
        """Peers in the order in which pieces of one group leave for them."""
        return sorted(self.peers, key=lambda peer: self._turn(peer)[1:])

    def _relay(self) -> None:
        """Exchange units with other hosts, and copy those that come to the peers."""
        ways = list(legs(self.problem, self.me))
        sources = [source for _, source in ways]
        sent = {}
        for target, _ in ways:
            pieces = self._crossing(self.me, target)
            # What the call casts itself it casts before it sends it.
            sent[target] = [Sending(moves, self._cast(moves[0].src, LANE)[-1:]) for moves in pieces]
        received = {source: self._crossing(source, self.me) for source in sources}
        direct = self.problem.kind.blocks
        self.brought = add_moves(self.builder, self.schedule, sent, received, direct)
        if not direct:
            onward = [one for source in sources for one in self._onward(source)]
            self.steps += sorted(onward, key=lambda step: step.after)

    def _crossing(self, source: int, target: int) -> list[tuple[Transfer, ...]]:
        """What a rank of one host sends to one of another, unit by unit: its rows, and the factors
        that travel with them."""
        landing = self.world.landing[target]
        units, froms = landing.arrivals.units(source), self._sources(source, landing.arrivals)
        found: list[tuple[Transfer, ...]] = []
        for unit, src, dst in zip(units, froms, landing.regions(source), strict=True):
            factors = self._factor_move(landing.arrivals, unit, self.world.factors_from)
            rows = Transfer(src, dst)
            found.append((rows, factors) if factors else (rows,))
        return found

    def _onward(self, source: int) -> Iterator[Step]:
        """The copies of what came from another host to the peers."""
        mine, world, mover = self.mine, self.world, self.schedule.mover
        targets = targets_in_order(self.me, self.problem.world, self.problem.hosts)
        for target in targets[: len(self.peers)]:
            landing, ready = world.landing[target], world.of_units("ready", source, target)
            units = landing.arrivals.units(source)
            skipped = self.problem.leaves(source, target) - self.problem.leaves(source, self.me)
            here, there = self.staging.landing(source, units, skipped), landing.regions(source)
            pieces = zip(units, names(source, len(units)), here, there, ready, strict=True)
            for unit, name, src, dst, signal in pieces:
                # They come in order: what holds the end of a unit is the last of it.
                stop = skipped + unit.stop
                last = next(i for i, one in enumerate(mine.units(source)) if one.stop >= stop)
                after, rows = (self.brought[source, last],), Transfer(src, dst)
                lane, label = self.lane_of[target], f"{name}>{target}"
                copy = Step("copy", lane, label, (), (signal,), (), after, rows, mover=mover)
                came, goes = (
                    self._factor_move(arrivals, unit, world.factors_from)
                    for arrivals in (mine, landing.arrivals)
                )
                if came and goes:
                    factors = Transfer(came.dst, goes.dst)
                    yield copy._replace(label=f"scale {label}", posts=(), transfer=factors)
                yield copy

    def _pulls(self) -> list[list[Step]]:
        groups = []
        for units in self.groups:
            factors, copies = list[Step](), list[Step]()
            for unit in units:
                if unit.peer != self.me:
                    copy = self._pull(unit)
                    ahead = self._factor_copies(copy, self.mine, unit)
                    factors += ahead
                    copies.append(copy._replace(waits=()) if ahead else copy)
            groups.append(factors + copies)
        return groups

    def _factor_copies(self, copy: Step, arrivals: Arrivals, unit: Unit) -> list[Step]:
        """The copy of a unit's factors, before that of its rows, whose signal is for both; none if
        they do not travel, or went with an earlier unit."""
        if not self.problem.sends_factors:
            return []
        if (move := self._factor_move(arrivals, unit, self.world.factors_from)) is None:
            return []
        waits = copy.waits if self.schedule.pull else ()  # a push has room for them, even in a ring
        return [copy._replace(label=f"scale {copy.label}", waits=waits, posts=(), transfer=move)]

    def _factor_move(self, arrivals: Arrivals, unit: Unit, source: str) -> Transfer | None:
        """Where the factors of a unit go from a buffer of its rank; None if they do not travel, or
        went with an earlier unit."""
        scaling, problem = self.problem.scaling, self.problem
        if scaling is None or not problem.sends_factors:
            return None
        by_columns, share_cols = self.schedule.dims == 2, scaling.rules.a[1]
        first = unit.ordinal == 0
        if not first and (scaling.by_rank or by_columns and share_cols == ALL):
            return None
        peer, rank = unit.peer, arrivals.rank
        cols = (unit.start, unit.stop) if by_columns else (0, problem.k)
        cols = factors_of(cols, share_cols)
        begin, end = (0, arrivals.block(peer)) if by_columns else (unit.start, unit.stop)
        leaves, lands = problem.leaves(peer, rank), problem.lands(peer, rank)
        if scaling.by_rank:
            begin, end, leaves, lands = 0, 1, 0, peer
        return Transfer(
            Region(source, peer, leaves + begin, leaves + end, *cols),
            Region(self.world.factors_at, rank, lands + begin, lands + end, *cols),
        )

    def _pull(self, unit: Unit) -> Step:
        peer, ordinal, *_ = unit
        source, landing = self._sources(peer, self.mine)[ordinal], self.regions[peer][ordinal]
        waits = () if ordinal else (self._valid(peer, self.me),)
        last = ordinal == len(self.mine.units(peer)) - 1
        posts = (self._done(self.me, peer),) if last else ()
        lane, label = self.lane_of[peer], f"{peer}.{ordinal}>{self.me}"
        move = Transfer(source, landing)
        return Step("copy", lane, label, waits, posts, transfer=move, mover=self.schedule.mover)

    def _copy(self, group: int, steps: list[Step]) -> None:
        """Enqueue the copies of a group."""
        if not self.schedule.pull:
            self.steps += steps
            return
        # A pull into a ring also waits until this rank has used the previous contents.
        before = self.staging.ahead_of.get(group)
        after = () if before is None else (self.last_use[before],)
        self.pulled[group] = {step.lane: self.add(step._replace(after=after)) for step in steps}

    def _sources(self, peer: int, arrivals: Arrivals) -> list[Region]:
        """The regions that the units of a peer are copied from, which ranks can share."""
        first, rows = self.problem.leaves(peer, arrivals.rank), arrivals.block(peer)
        key = peer, first, rows, len(arrivals.units(peer))
        if key not in self.sources:
            self.sources[key] = arrivals.in_shard(self.world.source.name, peer)
        return self.sources[key]

    def _rooms(self, target: int) -> list[tuple[Signal, ...]]:
        """The signals that each push into a ring waits for: the target has used the previous
        contents."""
        landing = self.world.landing[target]
        units = landing.arrivals.units(self.me)
        if not landing.stages:
            return [()] * len(units)
        room = self.world.of_units("room", target, self.me)
        return [
            (signal,) if unit.group in landing.ahead_of else ()
            for unit, signal in zip(units, room, strict=True)
        ]

    def _valid(self, poster: int, waiter: int) -> Signal:
        return self.world.data.signal("valid", poster, waiter, 0, self._block(poster, waiter))

    def _done(self, poster: int, waiter: int) -> Signal:
        return self.world.data.signal("done", poster, waiter, 1, self._block(waiter, poster))

    def _block(self, src: int, dst: int) -> tuple[int, int]:
        """Rows of a block at its receiver."""
        first = self.problem.lands(src, dst)
        return first, first + self.problem.block(src, dst)

    # Opening and closing a call.

    def _begun(self) -> dict[int, tuple[Signal, ...]]:
        """By peer, what tells it that this rank's call has begun: that it may read, or that it gets
        no data."""
        if self.schedule.pull:
            return {peer: (self._valid(self.me, peer),) for peer in self.peers}
        return {
            peer: ()
            if self.problem.block(self.me, peer)
            else (self.world.data.signal("ready", self.me, peer),)
            for peer in self.peers
        }

    def _publish(self) -> tuple[int, ...]:
        """Copy A to where peers can read it, if they do not read it in place."""
        world = self.world
        if not self.problem.left_rows(self.me):
            return ()
        if self.problem.given is not self.problem:
            return self._cast_all()
        moves = [] if world.source is world.a else [(world.a, world.source.name)]
        if world.factors_from != "scale_a":
            moves.append((self.problem.factors, world.factors_from))
        published = []
        for source, target in moves:
            rows, cols = source.shapes[self.me]
            here, there = (Region(n, self.me, 0, rows, 0, cols) for n in (source.name, target))
            step = Step("place", "compute0", "publish", transfer=Transfer(here, there))
            published.append(self.add(step))
        return tuple(published)

    def _cast_all(self) -> tuple[int, ...]:
        """Cast A, piece by piece in the order in which the pieces leave, then what stays; all of it
        at once where peers read when they are told that it is there."""
        rows, cols = self.world.a.shapes[self.me]
        leaving: list[tuple[int, Region]] = []
        far = [target for target, _ in legs(self.problem, self.me)]
        for target in [] if self.schedule.pull else [*far, *self._in_turn()]:
            arrivals = self.world.landing[target].arrivals
            units = zip(arrivals.units(self.me), self._sources(self.me, arrivals), strict=True)
            leaving += [(unit.group, source) for unit, source in units]
        for _, source in sorted(leaving, key=itemgetter(0)):
            self._cast(source, "compute0")
        self._cast(Region(self.a, self.me, 0, rows, 0, cols), "compute0")
        return (self.casts[-1][1],) if self.schedule.pull else ()

    def _behind_casts(self, lane: str) -> tuple[int, ...]:
        """What the first step of a compute lane that reads own rows comes after."""
        if not self.casts or lane in self.after_casts:
            return ()
        self.after_casts.add(lane)
        return (self.casts[-1][1],)

    def _close_pull(self) -> None:
        for lane, peers in self.builder.copy_lanes():
            empty = [peer for peer in peers if not self.mine.units(peer)]
            waits = tuple(self._valid(peer, self.me) for peer in empty)
            posts = tuple(self._done(self.me, peer) for peer in empty)
            if empty:
                self.add(Step("sync", lane, "nothing to pull", waits=waits, posts=posts))
        for lane, peers in self.builder.copy_lanes():  # apart: no wait comes before a post
            waits = tuple(self._done(peer, self.me) for peer in peers)
            self.add(Step("sync", lane, "peers have read", waits=waits))

    # Products.

    def _own_is_separate(self) -> bool:
        """Whether the rank's own rows have a product of their own, before all others."""
        return not self.schedule.uniform and self.problem.block(self.me, self.me) > 0

    def _multiply_own(self) -> None:
        self.add(self._work(OWN, "compute0", "own"))
        self._keep_own()

    def _work(self, group: int, lane: str, label: str) -> Step:
        """What is done with the own rows, or with a group once it has arrived."""
        products = (self._own_product(),) if group == OWN else self._products(group)
        return Step("matmul", lane, label, products=products)

    def _own_product(self) -> Product:
        rows, n, src = self._block(self.me, self.me), self.problem.n, self._own_rows()
        out = Region(self.world.out.name, self.me, *rows, 0, n)
        factors = self._factors(self.me, src, rows, (0, self.problem.k))
        return self._product(src, self._right(0, self.problem.k, 0, n), out, factors=factors)

    def _own_rows(self) -> Region:
        """The rank's own rows in its operand."""
        first, last = self._block(self.me, self.me)
        there = self.problem.leaves(self.me, self.me)
        return Region(self.a, self.me, there, there + last - first, 0, self.problem.k)

    def _keep_own(self) -> None:
        """Copy the own rows to their place in the gathered A, if that is asked for."""
        if self.problem.return_gathered:
            rows, k = self._block(self.me, self.me), self.problem.k
            own = Region("gathered", self.me, *rows, 0, k)
            self._place("compute0", self._own_rows(), own)

    def _compute_lane(self, group: int, units: list[Unit]) -> str:
        """Groups take turns; those that add to the same sums stay on one lane."""
        turn = self.mine.set_of[units[0].peer] if self.schedule.dims == 2 else group
        return self.compute_lanes[turn % self.schedule.compute]

    def _consume(self, group: int) -> None:
        """Multiply the units of one group once they have arrived, and release their stage."""
        units = self.groups[group]
        if not units:
            return
        lane = self._compute_lane(group, units)
        own = any(unit.peer == self.me for unit in units)
        after = self._behind_casts(lane) if own else ()
        if group in self.own_in_group:
            self._place_own(group, lane, after)
            after = ()
        if self.schedule.pull:
            after += tuple(self.pulled.pop(group).values())
        if self.brought:
            numbers = [(unit.peer, unit.ordinal) for unit in units]
            after += tuple(self.brought[one] for one in numbers if one in self.brought)
        room = self._room_after(group)
        posts, acquired = NO_ROOM if self.problem.return_gathered else room
        label = " ".join([f"{unit.peer}.{unit.ordinal}" for unit in units])
        step = self._work(group, lane, label)
        waits = tuple(self.ready[group])
        last_use = self.add(step._replace(waits=waits, posts=posts, after=after + acquired))
        if self.problem.return_gathered:
            last_use = self._keep(lane, units, room)
        if self.product != self.world.out.name:
            self._round(lane, group)
        if self.staging.stages:
            self.last_use[group] = last_use

    def _keep(self, lane: str, units: list[Unit], room: Room) -> int:
        """Copy arrived units to their place in the gathered A; the last step releases the stage."""
        for unit in units:
            first = self.problem.lands(unit.peer, self.me)
            gathered = self.mine.region("gathered", self.me, first, unit)
            posts, after = room if unit is units[-1] else NO_ROOM
            there = self.regions[unit.peer][unit.ordinal]
            index = self._place(lane, there, gathered, after, posts)
        return index

    @cached_property
    def own_in_group(self) -> dict[int, list[Unit]]:
        """The rank's own units by group, for groups that hold units of peers, too."""
        own = [[unit for unit in units if unit.peer == self.me] for units in self.groups]
        shared = zip(own, self.groups, strict=True)
        return {i: some for i, (some, units) in enumerate(shared) if 0 < len(some) < len(units)}

    def _place_own(self, group: int, lane: str, after: tuple[int, ...]) -> None:
        """Copy the rank's own units next to those of its peers."""
        before = self.staging.ahead_of.get(group)
        used = () if before is None else (self.last_use[before],)
        after += tuple(i for i in used if self.steps[i].lane != lane)
        for unit in self.own_in_group[group]:
            here, there = self.shard[unit.ordinal], self.regions[self.me][unit.ordinal]
            self._place(lane, here, there, after)
            move = self._factor_move(self.mine, unit, "scale_a")
            if move and not self._factors_stay(self.me):
                self._place(lane, move.src, move.dst, after)

    def _products(self, group: int) -> tuple[Product, ...]:
        scaling, products = self.problem.scaling, self.products[group]
        return tuple(products) if scaling and scaling.by_rank else merged(products)

    @cached_property
    def products(self) -> list[list[Product]]:
        """By group, the products of its units, in the order of ranks."""
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

    def _factors(self, peer: int, a: Region, rows: Rows, cols: Rows) -> Region | None:
        """The factors of some rows of the gathered A and columns of A, which come from a peer and
        are multiplied in ``a``; None for those that the caller has with its own rows."""
        scaling, staged = self.problem.scaling, a.buffer != self.a
        if scaling is None or not (staged or scaling.replicated) or self._factors_stay(peer):
            return None
        rows = (peer, peer + 1) if scaling.by_rank else rows
        at = *rows, *factors_of(cols, scaling.rules.a[1])
        return Region(self.world.factors_at, self.me, *at)

    def _factors_stay(self, peer: int) -> bool:
        """Whether the factors of own rows are used where the caller has them, wherever the rows
        are."""
        scaling = self.problem.scaling
        return scaling is not None and scaling.by_rank and peer == self.me

    def completed(self, group: int) -> Iterable[Rows]:
        """Ranges of rows of the result whose last term a group adds, in rising order."""
        if group == OWN:
            return [self._block(self.me, self.me)]
        if self.schedule.dims == 1:
            return [(product.out.row, product.out.row_stop) for product in self.products[group]]
        done = [unit.peer for unit in self.groups[group] if unit.stop == self.problem.k]
        return [self._block(peer, self.me) for peer in sorted(done)]

    def _round(self, lane: str, group: int) -> None:
        """Round the sums whose last term has been added."""
        spans: list[tuple[int, int]] = []
        for first, last in self.completed(group):
            if spans and spans[-1][1] == first:
                spans[-1] = (spans[-1][0], last)
            else:
                spans.append((first, last))
        for first, last in spans:
            src = Region(self.product, self.me, first, last, 0, self.problem.n)
            self._place(lane, src, src._replace(buffer=self.world.out.name))

    def _room_after(self, group: int) -> Room:
        """The signals to the peers that write to the same stage next that it is free."""
        heir = self.staging.heir_of.get(group)
        if heir is None or self.schedule.pull:
            return NO_ROOM
        posts = tuple(self.room_for[heir])
        return posts, tuple(sorted({self.acquired[signal.waiter] for signal in posts}))
