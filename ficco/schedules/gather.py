"""Builds the Plan of a rank for gathering operators, which multiply what arrives."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from ficco.plan.model import Plan, Product, Region, Signal, Step, Transfer, new
from ficco.problem import Problem
from ficco.schedules.builder import Builder
from ficco.schedules.groups import Arrivals, Unit, names
from ficco.schedules.runs import merged
from ficco.schedules.space import Schedule

#: Groups whose copies are enqueued before the first product that waits for one. Copy engines then
#: always have work, and a GPU that waits for its host gets its first products early.
LOOKAHEAD = 2

#: The signals that hand a stage of a ring on, and the steps that they come after; empty if no later
#: group uses the stage.
Room = tuple[tuple[Signal, ...], tuple[int, ...]]
NO_ROOM: Room = ((), ())


class StagingTooSmall(ValueError):
    """The largest step, which takes ``needed`` bytes, does not fit under a cap on staging."""

    def __init__(self, text: str, needed: int) -> None:
        super().__init__(text)
        self.needed = needed


class _Staging:
    """The places of one receiver's units when it multiplies them.

    Units of its peers land in staging. Its own units are copied there if they share a step with
    those. Every row of the gathered A has its place in staging, except the rank's own shard if that
    is multiplied alone. In a ring, landing groups use the stages in turn, and the units of a group
    are side by side.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        problem, schedule, rank = arrivals.problem, arrivals.schedule, arrivals.rank
        self.arrivals = arrivals
        self.by_columns = schedule.dims == 2
        own, whole = problem.block(rank, rank), problem.product_rows(rank)
        self.own_rows_absent = 0 if schedule.uniform and schedule.grouping == "fused" else own
        self.rows = whole - self.own_rows_absent if whole > own else 0
        self.cols = problem.k
        self.stages = 0
        #: By group, the previous and the next group in its stage of the ring.
        self.ahead_of: dict[int, int] = {}
        self.heir_of: dict[int, int] = {}
        self._stage: dict[int, int] = {}  # by landing group, its first row
        self._row: dict[int, list[int]] = {}  # by rank, the row of each unit within its stage
        self._regions: dict[int, list[Region]] = {}

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

    def regions(self, peer: int) -> list[Region]:
        """The regions of a peer's units when they are multiplied, in order of arrival."""
        if peer not in self._regions:
            self._regions[peer] = self._place(peer)
        return self._regions[peer]

    def _place(self, peer: int) -> list[Region]:
        units = self.arrivals.units(peer)
        if peer != self.arrivals.rank:
            return self._landing(peer, units)
        stays, there = self.arrivals.in_shard("a", peer), set(self._landing_groups)
        lands = iter(self._landing(peer, [unit for unit in units if unit.group in there]))
        return [
            next(lands) if unit.group in there else region
            for unit, region in zip(units, stays, strict=True)
        ]

    def _landing(self, peer: int, units: list[Unit]) -> list[Region]:
        rank, problem = self.arrivals.rank, self.arrivals.problem
        if not self.stages:
            first = problem.lands(peer, rank) - (self.own_rows_absent if peer > rank else 0)
            return self.arrivals.regions("staging", rank, first, units)
        found, by_columns, rows, cols = [], self.by_columns, self.arrivals.block(peer), problem.k
        for _, ordinal, start, stop, group in units:
            row, length = self._stage[group] + self._row[peer][ordinal], stop - start
            size = (rows, length) if by_columns else (length, cols)
            found.append(Region("staging", rank, row, row + size[0], 0, size[1]))
        return found


class GatherWorld:
    """Facts that all ranks derive alike: who sends what when, where it lands, and by which words
    that is signalled."""

    def __init__(self, problem: Problem, schedule: Schedule, cap: int | None) -> None:
        self.problem, self.schedule = problem, schedule
        self.arrivals = [Arrivals(problem, schedule, rank) for rank in range(problem.world)]
        terms = max(arrivals.rounds - 1 + arrivals.tail for arrivals in self.arrivals)
        self.partial = schedule.dims == 2 and terms > 1
        self.words_per_pair = max(terms, 2)  # of data; pull uses two of them
        self.landing = [_Staging(arrivals) for arrivals in self.arrivals]
        needed = max(staging.rows for staging in self.landing) * problem.k * problem.itemsize
        if cap is not None and needed > cap:
            self._make_rings(cap)
        #: One row pitch on all ranks, so that a sender knows the receiver's.
        self.pitch = max(staging.cols for staging in self.landing)
        self._of_units: dict[tuple[str, int, int], list[Signal]] = {}

    def _make_rings(self, cap: int) -> None:
        for staging in self.landing:
            staging.make_ring()
        pitch = max(staging.cols for staging in self.landing)
        stage_bytes = max(staging.rows for staging in self.landing) * pitch * self.problem.itemsize
        if stage_bytes > cap:
            raise StagingTooSmall(
                f"workspace_bytes: required at least {stage_bytes} for one step of schedule "
                f"{self.schedule} on {self.problem}, got {cap}; allow more or cut finer (pieces=)",
                stage_bytes,
            )
        for staging in self.landing:
            staging.set_stages(cap // max(staging.rows * pitch * self.problem.itemsize, 1))

    def room(self, publish: bool) -> tuple[int, int]:
        """Bytes of staging and of published shards on the rank that needs most."""
        staging = max(staging.rows for staging in self.landing) * self.pitch
        most = max(map(self.problem.left_rows, range(self.problem.world)))
        published = most * self.problem.k * publish
        return staging * self.problem.itemsize, published * self.problem.itemsize

    # Signal words. Every rank has the same layout: first one word per peer that rests at 1, then
    # `words_per_pair` of them per peer for data, then as many for room in a ring.

    def words(self) -> int:
        return self.problem.world * (1 + 2 * self.words_per_pair)

    def word(
        self, kind: str, poster: int, waiter: int, slot: int = 0, rows: tuple[int, int] = (0, 0)
    ) -> Signal:
        world = self.problem.world
        block = world * self.words_per_pair if kind == "room" else 0
        word = world + block + poster * self.words_per_pair + slot
        return Signal(kind, poster, waiter, slot, word, *rows)

    def of_units(self, kind: str, poster: int, waiter: int) -> list[Signal]:
        """Signals of a kind, one for each unit between two ranks, in order of arrival."""
        if (kind, poster, waiter) not in self._of_units:
            sender, receiver = (waiter, poster) if kind == "room" else (poster, waiter)
            first = self.word(kind, poster, waiter).word
            rows = self.arrivals[receiver].rows(sender)
            self._of_units[kind, poster, waiter] = [
                new(Signal, (kind, poster, waiter, slot, first + slot, row, row_stop))
                for slot, (row, row_stop) in enumerate(rows)
            ]
        return self._of_units[kind, poster, waiter]


class Gather(Builder):
    """Builds one Plan. ``me`` is its rank; ``group`` counts a receiver's groups of units."""

    def __init__(self, world: GatherWorld, rank: int) -> None:
        super().__init__(world.problem, world.schedule, rank)
        self.world = world
        self.mine = world.arrivals[rank]
        self.staging = world.landing[rank]
        self.groups = self.mine.by_group
        #: By rank, the regions of its units; by group, the signals for the units that peers push.
        self.regions = {peer: self.staging.regions(peer) for peer in self.mine.set_of}
        pushers = [] if self.schedule.pull else [peer for peer in self.mine.set_of if peer != rank]
        ready = {peer: world.of_units("ready", peer, rank) for peer in pushers}
        self.ready = self.mine.in_groups(ready)
        self.sum = "sum" if world.partial and self.problem.rounds else "out"
        self.last_use: dict[int, int] = {}  # group -> the step that frees its stage of a ring
        self.pulled: dict[int, dict[str, int]] = {}  # group -> copy lane -> its last copy
        self.source = "a" if self.problem.symmetric or not self.schedule.pull else "publish"
        self.sources: dict[tuple[int, int, int, int], list[Region]] = {}
        self.acquired: dict[int, int] = {}  # peer -> the step that takes over its slot
        self.compute_lanes = [
            f"compute{i}" for i in range(min(self.schedule.compute, len(self.groups) + 1))
        ]
        in_turn = sorted(self.peers, key=self._turn)
        self.lane_of = {peer: f"copy{i % self.schedule.copy}" for i, peer in enumerate(in_turn)}
        if self._in_line():
            self.lane_of = dict.fromkeys(in_turn, "compute0")

    def _in_line(self) -> bool:
        """Whether copies go on the product's own lane, before it: they are kernel launches, the
        product waits for all of them, and there is no other work meanwhile."""
        schedule = self.schedule
        launched = schedule.mover == "kernel" and not schedule.pull and schedule.copy == 1
        most = max(arrivals.group_count for arrivals in self.world.arrivals)
        return launched and schedule.uniform and most <= 1

    @cached_property
    def room(self) -> list[list[Signal]]:
        """By group, the signals to peers that there is room for their units in a ring."""
        peers = [peer for peer in self.mine.set_of if peer != self.me]
        return self.mine.in_groups({p: self.world.of_units("room", self.me, p) for p in peers})

    @cached_property
    def names(self) -> list[list[str]]:
        """By group, the names of its units."""
        return self.mine.in_groups({p: names(p, self.mine.count(p)) for p in self.mine.set_of})

    @cached_property
    def shard(self) -> list[Region]:
        """The regions of the rank's own units in the operand."""
        return self.mine.in_shard("a", self.me)

    def _turn(self, peer: int) -> tuple[int, int, int]:
        """Sort key of peers: when this rank first copies from them (pull) or to them."""
        if self.schedule.pull:
            return self.mine.set_of[peer], self.mine.place_in_set[peer], 0
        target = self.world.arrivals[peer]
        first = next((unit.group for unit in target.units(self.me)), target.group_count)
        return first, target.place_in_set[self.me], (peer - self.me) % self.problem.world

    def build(self) -> Plan:
        problem, schedule = self.problem, self.schedule
        publish = schedule.pull and not problem.symmetric and bool(self.peers)
        published = self._publish() if publish and problem.left_rows(self.me) else ()
        if self._own_is_alone():
            self._multiply_own()
        if schedule.pull:
            self._open_pull(published)
            copies = self._pulls()
        else:
            self._open_push()
            copies = self._pushes()
        ahead = self.staging.stages or LOOKAHEAD
        for group in range(-ahead, max(len(self.groups), len(copies))):
            if 0 <= group < len(self.groups):
                self._consume(group)
            if group + ahead < len(copies):
                self._copy(group + ahead, copies[group + ahead])
        if schedule.pull:
            self._close_pull()
        if self.peers:
            self.retire(self._silent(), self.lasts())
        return Plan(
            problem=problem,
            schedule=str(schedule),
            rank=self.me,
            steps=tuple(self.steps),
            staging=(self.staging.rows, self.world.pitch) if self.peers else (0, 0),
            room=self.world.room(publish) if self.peers else (0, 0),
            publish=publish,
            sums=self.sum == "sum" and any(self.groups),
            words=self.world.words() if self.peers else 0,
            stages=self.staging.stages,
        )

    # Copies: both directions return the copies of each group.

    def _pushes(self) -> list[list[Step]]:
        me, mover, world = self.me, self.schedule.mover, self.world
        groups = max(arrivals.group_count for arrivals in world.arrivals)
        found: list[list[Step]] = [[] for _ in range(groups)]
        for target in sorted(self.peers, key=lambda peer: self._turn(peer)[1:]):
            lane, landing = self.lane_of[target], world.landing[target]
            units, sources = landing.arrivals.units(me), self._sources(me, landing.arrivals)
            ready, regions = world.of_units("ready", me, target), landing.regions(me)
            called = names(me, len(units))
            pieces = zip(units, called, self._rooms(target), ready, sources, regions, strict=True)
            for unit, name, room, signal, source, region in pieces:
                found[unit.group].append(
                    Step(
                        "copy",
                        lane,
                        f"{name}>{target}",
                        waits=room,
                        posts=(signal,),
                        transfer=new(Transfer, (source, region, 0)),
                        mover=mover,
                    )
                )
        return found

    def _pulls(self) -> list[list[Step]]:
        return [
            [self._pull(unit) for unit in units if unit.peer != self.me] for units in self.groups
        ]

    def _pull(self, unit: Unit) -> Step:
        peer = unit.peer
        last = unit.ordinal == len(self.mine.units(peer)) - 1
        return Step(
            "copy",
            self.lane_of[peer],
            f"{peer}.{unit.ordinal}>{self.me}",
            waits=() if unit.ordinal else (self._valid(peer, self.me),),
            posts=(self._done(self.me, peer),) if last else (),
            transfer=Transfer(
                self._sources(peer, self.mine)[unit.ordinal], self.regions[peer][unit.ordinal]
            ),
            mover=self.schedule.mover,
        )

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
            self.sources[key] = arrivals.in_shard(self.source, peer)
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
        return self.world.word("valid", poster, waiter, 0, self._block(poster, waiter))

    def _done(self, poster: int, waiter: int) -> Signal:
        return self.world.word("done", poster, waiter, 1, self._block(waiter, poster))

    def _block(self, src: int, dst: int) -> tuple[int, int]:
        """Rows of a block at its receiver."""
        first = self.problem.lands(src, dst)
        return first, first + self.problem.block(src, dst)

    # Opening and closing a call.

    def _open_push(self) -> None:
        # A peer that gets no data must still learn that this rank's call has begun.
        bare = {
            peer: self.world.word("ready", self.me, peer)
            for peer in self.peers
            if not self.problem.block(self.me, peer)
        }
        self.acquired = self.acquire(bare)

    def _publish(self) -> tuple[int, ...]:
        whole = (0, self.problem.left_rows(self.me), 0, self.problem.k)
        move = Transfer(Region("a", self.me, *whole), Region("publish", self.me, *whole))
        return (self.add(Step("place", "compute0", "publish", transfer=move)),)

    def _open_pull(self, published: tuple[int, ...]) -> None:
        self.acquire({peer: self._valid(self.me, peer) for peer in self.peers}, published)

    def _close_pull(self) -> None:
        for lane, peers in self.copy_lanes():
            empty = [peer for peer in peers if not self.mine.units(peer)]
            waits = tuple(self._valid(peer, self.me) for peer in empty)
            posts = tuple(self._done(self.me, peer) for peer in empty)
            if empty:
                self.add(Step("sync", lane, "nothing to pull", waits=waits, posts=posts))
        for lane, peers in self.copy_lanes():  # a separate loop: no wait comes before a post
            waits = tuple(self._done(peer, self.me) for peer in peers)
            self.add(Step("sync", lane, "peers have read", waits=waits))

    def _silent(self) -> tuple[Signal, ...]:
        """The signals that the calls of peers without data for this rank have begun."""
        return tuple(
            self.world.word("ready", peer, self.me)
            for peer in self.peers
            if not self.schedule.pull and not self.problem.block(peer, self.me)
        )

    # Products.

    def _own_is_alone(self) -> bool:
        """Whether the rank's own rows have a product of their own, before all others."""
        return not self.schedule.uniform and self.problem.block(self.me, self.me) > 0

    def _multiply_own(self) -> None:
        me, k = self.me, self.problem.k
        first, last = self._block(me, me)
        there = self.problem.leaves(me, me)
        src = Region("a", me, there, there + last - first, 0, k)
        self.add(Step("matmul", "compute0", "own", products=(self._own_product(src),)))
        if self.problem.return_gathered:
            self._place("compute0", src, Region("gathered", me, first, last, 0, k))

    def _own_product(self, src: Region) -> Product:
        dst = Region("out", self.me, *self._block(self.me, self.me), 0, self.problem.n)
        return Product(src, 0, self.problem.k, dst)

    def _place(
        self,
        lane: str,
        src: Region,
        dst: Region,
        after: tuple[int, ...] = (),
        posts: tuple[Signal, ...] = (),
    ) -> int:
        label, move = f"{src.buffer}>{dst.buffer}", Transfer(src, dst)
        mover = self.schedule.mover if src.buffer == "a" else "dma"
        return self.add(
            Step("place", lane, label, posts=posts, after=after, transfer=move, mover=mover)
        )

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
        if group in self.beside:
            self._place_own(group, lane)
        after = tuple(self.pulled.pop(group).values()) if self.schedule.pull else ()
        room = self._room_behind(group)
        posts, acquired = NO_ROOM if self.problem.return_gathered else room
        last_use = self.add(
            Step(
                "matmul",
                lane,
                " ".join(self.names[group]),
                waits=tuple(self.ready[group]),
                posts=posts,
                after=after + acquired,
                products=self._products(group),
            )
        )
        if self.problem.return_gathered:
            last_use = self._keep(lane, units, room)
        if self.sum == "sum":
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
    def beside(self) -> dict[int, list[Unit]]:
        """The rank's own units by group, for groups that hold units of peers, too."""
        own = self.mine.units(self.me) if self.me in self.mine.set_of else []
        found: dict[int, list[Unit]] = {}
        for unit in own:
            found.setdefault(unit.group, []).append(unit)
        return {group: us for group, us in found.items() if len(us) < len(self.groups[group])}

    def _place_own(self, group: int, lane: str) -> None:
        """Copy the rank's own units next to those of its peers."""
        before = self.staging.ahead_of.get(group)
        used = () if before is None else (self.last_use[before],)
        after = tuple(i for i in used if self.steps[i].lane != lane)
        for unit in self.beside[group]:
            there = self.regions[self.me][unit.ordinal]
            self._place(lane, self.shard[unit.ordinal], there, after)

    def _products(self, group: int) -> tuple[Product, ...]:
        return merged(self.products[group])

    @cached_property
    def products(self) -> list[list[Product]]:
        """By group, the products of its units, in the order of ranks."""
        return self.mine.in_groups({peer: self._of_peer(peer) for peer in sorted(self.regions)})

    def _of_peer(self, peer: int) -> list[Product]:
        by_columns, k, n = self.schedule.dims == 2, self.problem.k, self.problem.n
        buffer, me, adds = self.sum, self.me, self.world.partial
        pieces = zip(self.mine.units(peer), self.regions[peer], self.mine.rows(peer), strict=True)
        found = []
        for (_, ordinal, start, stop, _), a, (row, row_stop) in pieces:
            first, last = (start, stop) if by_columns else (0, k)
            out = new(Region, (buffer, me, row, row_stop, 0, n))
            found.append(Product(a, first, last, out, adds and ordinal > 0))
        return found

    def _summed(self, group: int) -> Iterable[tuple[int, int]]:
        """Ranges of rows of the sums whose last term a group adds, in rising order."""
        done = [unit.peer for unit in self.groups[group] if unit.stop == self.problem.k]
        return [self._block(peer, self.me) for peer in sorted(done)]

    def _round(self, lane: str, group: int) -> None:
        """Round the sums whose last term has been added."""
        spans: list[tuple[int, int]] = []
        for first, last in self._summed(group):
            if spans and spans[-1][1] == first:
                spans[-1] = (spans[-1][0], last)
            else:
                spans.append((first, last))
        for first, last in spans:
            src = Region("sum", self.me, first, last, 0, self.problem.n)
            self._place(lane, src, src._replace(buffer="out"))

    def _room_behind(self, group: int) -> Room:
        """The signals to the peers that write to the same stage next that it is free."""
        heir = self.staging.heir_of.get(group)
        if heir is None or self.schedule.pull:
            return NO_ROOM
        posts = tuple(self.room[heir])
        return posts, tuple(sorted({self.acquired[signal.waiter] for signal in posts}))
