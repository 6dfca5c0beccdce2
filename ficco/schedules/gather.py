"""From a Problem and a Schedule to the Plan of a rank, for operators that consume what arrives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

from ficco.plan.model import Plan, Product, Region, Signal, Step, Transfer
from ficco.problem import Problem
from ficco.schedules.groups import Arrivals, Unit
from ficco.schedules.runs import merged
from ficco.schedules.space import Schedule

#: Groups whose copies are enqueued before the first product that waits for one: the copy engine
#: never runs dry, and a GPU that waits for its host has its first products early.
LOOKAHEAD = 2

#: What the last use of a stage of a ring posts, and behind which steps; nothing where none is next.
Room = tuple[tuple[Signal, ...], tuple[int, ...]]
NO_ROOM: Room = ((), ())


class StagingTooSmall(ValueError):
    """No step fits under a cap on staging; the largest takes ``needed`` bytes."""

    def __init__(self, text: str, needed: int) -> None:
        super().__init__(text)
        self.needed = needed


class _Staging:
    """Where the units of one receiver lie when it multiplies them.

    Those of its peers land in staging, and its own are brought there where they share a step with
    theirs. Every row of the gathered A has its place there, less the rank's own shard where that
    is multiplied on its own. As a ring, group g lies in stage g modulo the number of stages, its
    units side by side.
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
        self._row: dict[int, list[int]] = {}  # of each unit of a rank, within its stage
        self._groups: list[int] = []  # those that take turns on the ring
        self._turn: dict[int, int] = {}
        self._regions: dict[int, list[Region]] = {}

    def make_ring(self) -> None:
        """Lay the pieces of each group side by side; :meth:`set_stages` says for how many."""
        self.rows = self.cols = 0  # of one stage
        self._row = {peer: [] for peer in self.arrivals.set_of}
        for group, units in enumerate(self.arrivals.by_group):
            row = 0
            for unit in units:
                self._row[unit.peer].append(row)
                row += self._unit_rows(unit)
            if self._lands(group):
                self._turn[group] = len(self._groups)
                self._groups.append(group)
                self.rows = max(self.rows, row)
                self.cols = max(self.cols, *[unit.stop - unit.start for unit in units])
        if not self.by_columns:
            self.cols = self.arrivals.problem.k

    def set_stages(self, most: int) -> None:
        self.stages, self._stage_rows = min(most, len(self._groups)), self.rows
        self.rows *= self.stages

    def ahead_of(self, group: int) -> int | None:
        """The group whose place in the ring this one takes over."""
        turn = self._turn.get(group, -1) - self.stages
        return self._groups[turn] if self.stages and turn >= 0 else None

    def heir_of(self, group: int) -> int | None:
        """The group that takes over the place of this one."""
        turn = self._turn.get(group, len(self._groups)) + self.stages
        return self._groups[turn] if self.stages and turn < len(self._groups) else None

    def _lands(self, group: int) -> bool:
        """Whether the units of a group lie here: those of the rank itself stay where they are."""
        return any(unit.peer != self.arrivals.rank for unit in self.arrivals.by_group[group])

    def _unit_rows(self, unit: Unit) -> int:
        if self.by_columns:
            return self.arrivals.problem.block(unit.peer, self.arrivals.rank)
        return unit.stop - unit.start

    def regions(self, peer: int) -> list[Region]:
        """Where the units of a peer lie, in order of arrival."""
        if peer not in self._regions:
            self._regions[peer] = self._place(peer)
        return self._regions[peer]

    def _place(self, peer: int) -> list[Region]:
        units = self.arrivals.units(peer)
        if peer != self.arrivals.rank:
            return self._landing(peer, units)
        stays = self.arrivals.in_shard("a", peer)
        return [
            self._landing(peer, [unit])[0] if self._lands(unit.group) else stays[unit.ordinal]
            for unit in units
        ]

    def _landing(self, peer: int, units: list[Unit]) -> list[Region]:
        if self.stages:
            return [self._on_ring(unit) for unit in units]
        rank = self.arrivals.rank
        first = self.arrivals.problem.lands(peer, rank)
        first -= self.own_rows_absent if peer > rank else 0
        return self.arrivals.regions("staging", rank, first, units)

    def _on_ring(self, unit: Unit) -> Region:
        row = self._turn[unit.group] % self.stages * self._stage_rows
        row += self._row[unit.peer][unit.ordinal]
        cols = unit.stop - unit.start if self.by_columns else self.arrivals.problem.k
        return Region("staging", self.arrivals.rank, row, row + self._unit_rows(unit), 0, cols)


class GatherWorld:
    """What all ranks derive alike: who sends what when, where it lands, which words say so."""

    def __init__(self, problem: Problem, schedule: Schedule, cap: int | None) -> None:
        self.problem, self.schedule = problem, schedule
        self.arrivals = [Arrivals(problem, schedule, rank) for rank in range(problem.world)]
        terms = max(arrivals.rounds - 1 + arrivals.tail for arrivals in self.arrivals)
        self.partial = schedule.dims == 2 and terms > 1
        self.slots = max(terms, 2)  # data words per pair of ranks; pull uses two of them
        self.landing = [_Staging(arrivals) for arrivals in self.arrivals]
        needed = max(staging.rows for staging in self.landing) * problem.k * problem.itemsize
        if cap is not None and needed > cap:
            self._make_rings(cap)
        #: One row pitch on all ranks, so that a sender need not ask for the receiver's.
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
    # `slots` words per peer for data, then as many for room in a ring.

    def words(self) -> int:
        return self.problem.world * (1 + 2 * self.slots)

    def released(self, poster: int, waiter: int) -> Signal:
        return Signal("released", poster, waiter, 0, poster)

    def word(
        self, kind: str, poster: int, waiter: int, slot: int = 0, rows: tuple[int, int] = (0, 0)
    ) -> Signal:
        world = self.problem.world
        block = world * self.slots if kind == "room" else 0
        word = world + block + poster * self.slots + slot
        return Signal(kind, poster, waiter, slot, word, *rows)

    def of_units(self, kind: str, poster: int, waiter: int) -> list[Signal]:
        """Signals of a kind, one for each unit between two ranks, in order of arrival."""
        if (kind, poster, waiter) not in self._of_units:
            sender, receiver = (waiter, poster) if kind == "room" else (poster, waiter)
            first = self.word(kind, poster, waiter).word
            arrivals = self.arrivals[receiver]
            self._of_units[kind, poster, waiter] = [
                Signal(kind, poster, waiter, slot, first + slot, *rows)
                for slot, rows in enumerate(arrivals.rows(sender))
            ]
        return self._of_units[kind, poster, waiter]


class Gather:
    """Builds one Plan. ``me`` is its rank; ``group`` counts a receiver's groups of units."""

    def __init__(self, world: GatherWorld, rank: int) -> None:
        self.world, self.me = world, rank
        self.problem, self.schedule = world.problem, world.schedule
        self.mine = world.arrivals[rank]
        self.staging = world.landing[rank]
        self.peers = [peer for peer in range(self.problem.world) if peer != rank]
        self.groups = self.mine.by_group
        #: Where the units of each rank lie, and what says so of those that peers push.
        self.regions = {peer: self.staging.regions(peer) for peer in self.mine.set_of}
        pushers = [] if self.schedule.pull else self.peers
        self.ready = {peer: world.of_units("ready", peer, rank) for peer in pushers}
        self.sum = "sum" if world.partial and self.problem.rounds else "out"
        self.steps: list[Step] = []
        self.last_use: dict[int, int] = {}  # group -> the step that frees its stage of a ring
        self.pulled: dict[int, dict[str, int]] = {}  # group -> copy lane -> its last copy
        self.source = "a" if self.problem.symmetric or not self.schedule.pull else "publish"
        self.sources: dict[tuple[int, int, int, int], list[Region]] = {}
        self.acquired: dict[str, int] = {}  # copy lane -> the step that takes over its peers' slots
        self.compute_lanes = [
            f"compute{i}" for i in range(min(self.schedule.compute, len(self.groups) + 1))
        ]
        in_turn = sorted(self.peers, key=self._turn)
        self.lane_of = {peer: f"copy{i % self.schedule.copy}" for i, peer in enumerate(in_turn)}

    @cached_property
    def room(self) -> dict[int, list[Signal]]:
        """What tells each peer that there is room for its units in a ring."""
        return {peer: self.world.of_units("room", self.me, peer) for peer in self.peers}

    @cached_property
    def shard(self) -> list[Region]:
        """Where the own units lie in the operand."""
        return self.mine.in_shard("a", self.me)

    def _turn(self, peer: int) -> tuple[int, int, int]:
        """Sorts peers by when this rank first copies from (pull) or to them."""
        if self.schedule.pull:
            return self.mine.set_of[peer], self.mine.place_in_set[peer], 0
        target = self.world.arrivals[peer]
        first = next((unit.group for unit in target.units(self.me)), target.groups)
        return first, target.place_in_set[self.me], (peer - self.me) % self.problem.world

    def _add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

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
            self._retire()
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

    # Copies: both directions give the copies of each group.

    def _pushes(self) -> list[list[Step]]:
        me, mover, world = self.me, self.schedule.mover, self.world
        groups = max(arrivals.groups for arrivals in world.arrivals)
        found: list[list[Step]] = [[] for _ in range(groups)]
        for target in sorted(self.peers, key=lambda peer: self._turn(peer)[1:]):
            lane, landing = self.lane_of[target], world.landing[target]
            units, sources = landing.arrivals.units(me), self._sources(me, landing.arrivals)
            ready, regions = world.of_units("ready", me, target), landing.regions(me)
            pieces = zip(units, self._rooms(target), ready, sources, regions, strict=True)
            for unit, room, signal, source, region in pieces:
                found[unit.group].append(
                    Step(
                        "copy",
                        lane,
                        f"{me}.{unit.ordinal}>{target}",
                        waits=room,
                        posts=(signal,),
                        transfer=Transfer(source, region),
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
        # A pull into a ring also waits until this rank has used up what lay there.
        before = self.staging.ahead_of(group)
        after = () if before is None else (self.last_use[before],)
        self.pulled[group] = {step.lane: self._add(step._replace(after=after)) for step in steps}

    def _sources(self, peer: int, arrivals: Arrivals) -> list[Region]:
        """Where the units of a peer are copied from; several ranks may get the same."""
        first, rows = self.problem.leaves(peer, arrivals.rank), arrivals.block(peer)
        key = peer, first, rows, len(arrivals.units(peer))
        if key not in self.sources:
            self.sources[key] = arrivals.in_shard(self.source, peer)
        return self.sources[key]

    def _rooms(self, target: int) -> list[tuple[Signal, ...]]:
        """What each push into a ring waits for: the target has used up what lay there."""
        landing = self.world.landing[target]
        units = landing.arrivals.units(self.me)
        if not landing.stages:
            return [()] * len(units)
        room = self.world.of_units("room", target, self.me)
        return [
            () if landing.ahead_of(unit.group) is None else (signal,)
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

    def _lanes(self) -> Iterable[tuple[str, list[int]]]:
        """Copy lanes, each with its peers."""
        by_lane: dict[str, list[int]] = {}
        for peer, lane in self.lane_of.items():
            by_lane.setdefault(lane, []).append(peer)
        return by_lane.items()

    def _open_push(self) -> None:
        for lane, peers in self._lanes():
            mine = tuple(self.world.released(peer, self.me) for peer in peers)
            # A peer that gets no data still has to know that this rank's call has begun.
            bare = tuple(
                self.world.word("ready", self.me, peer)
                for peer in peers
                if not self.problem.block(self.me, peer)
            )
            step = Step("sync", lane, "acquire", waits=mine, clears=mine, posts=bare)
            self.acquired[lane] = self._add(step)

    def _publish(self) -> tuple[int, ...]:
        whole = (0, self.problem.left_rows(self.me), 0, self.problem.k)
        move = Transfer(Region("a", self.me, *whole), Region("publish", self.me, *whole))
        return (self._add(Step("place", "compute0", "publish", transfer=move)),)

    def _open_pull(self, published: tuple[int, ...]) -> None:
        for lane, peers in self._lanes():
            mine = tuple(self.world.released(peer, self.me) for peer in peers)
            valid = tuple(self._valid(self.me, peer) for peer in peers)
            self._add(
                Step("sync", lane, "acquire", waits=mine, clears=mine, posts=valid, after=published)
            )

    def _close_pull(self) -> None:
        for lane, peers in self._lanes():
            empty = [peer for peer in peers if not self.mine.units(peer)]
            waits = tuple(self._valid(peer, self.me) for peer in empty)
            posts = tuple(self._done(self.me, peer) for peer in empty)
            if empty:
                self._add(Step("sync", lane, "nothing to pull", waits=waits, posts=posts))
        for lane, peers in self._lanes():  # a loop of its own: no wait in front of a peer's post
            waits = tuple(self._done(peer, self.me) for peer in peers)
            self._add(Step("sync", lane, "peers have read", waits=waits))

    def _retire(self) -> None:
        """Clear the words this rank waited for and hand the slot to the peers."""
        waited = [s for step in self.steps for s in step.waits if not s.released]
        silent = [
            self.world.word("ready", peer, self.me)
            for peer in self.peers
            if not self.schedule.pull and not self.problem.block(peer, self.me)
        ]
        last = {step.lane: i for i, step in enumerate(self.steps)}
        self._add(
            Step(
                "sync",
                "sync",
                "retire",
                waits=tuple(silent),
                clears=(*waited, *silent),
                posts=tuple(self.world.released(self.me, peer) for peer in self.peers),
                after=tuple(last.values()),
            )
        )

    # Products.

    def _own_is_alone(self) -> bool:
        """Whether the rank's own rows have a product of their own, in front of all others."""
        return not self.schedule.uniform and self.problem.block(self.me, self.me) > 0

    def _multiply_own(self) -> None:
        me, k = self.me, self.problem.k
        first, last = self._block(me, me)
        there = self.problem.leaves(me, me)
        src = Region("a", me, there, there + last - first, 0, k)
        self._add(Step("matmul", "compute0", "own", products=(self._own_product(src),)))
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
        return self._add(Step("place", lane, label, posts=posts, after=after, transfer=move))

    def _compute_lane(self, group: int, units: list[Unit]) -> str:
        """Groups take turns; those that add to the same sums stay on one lane."""
        turn = self.mine.set_of[units[0].peer] if self.schedule.dims == 2 else group
        return self.compute_lanes[turn % self.schedule.compute]

    def _consume(self, group: int) -> None:
        """Multiply what has arrived of one group, and give its room back."""
        units = self.groups[group]
        if not units:
            return
        lane = self._compute_lane(group, units)
        remote = [unit for unit in units if unit.peer != self.me]
        if remote and len(remote) < len(units):
            self._place_own(group, lane, units)
        ready = [self.ready[unit.peer][unit.ordinal] for unit in remote] if self.ready else []
        after = tuple(self.pulled.pop(group).values()) if self.schedule.pull else ()
        room = self._room_behind(group)
        posts, acquired = NO_ROOM if self.problem.return_gathered else room
        last_use = self._add(
            Step(
                "matmul",
                lane,
                " ".join([f"{unit.peer}.{unit.ordinal}" for unit in units]),
                waits=tuple(ready),
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
        """Bring what has arrived to its place in the gathered A; the last step gives room."""
        for unit in units:
            first = self.problem.lands(unit.peer, self.me)
            gathered = self.mine.region("gathered", self.me, first, unit)
            posts, after = room if unit is units[-1] else NO_ROOM
            there = self.regions[unit.peer][unit.ordinal]
            index = self._place(lane, there, gathered, after, posts)
        return index

    def _place_own(self, group: int, lane: str, units: list[Unit]) -> None:
        """Bring the rank's own units beside those of its peers."""
        before = self.staging.ahead_of(group)
        used = () if before is None else (self.last_use[before],)
        after = tuple(i for i in used if self.steps[i].lane != lane)
        for unit in units:
            if unit.peer == self.me:
                there = self.regions[self.me][unit.ordinal]
                self._place(lane, self.shard[unit.ordinal], there, after)

    def _products(self, group: int) -> tuple[Product, ...]:
        units = sorted(self.groups[group])
        return merged([self.products[peer][ordinal] for peer, ordinal, _, _, _ in units])

    @cached_property
    def products(self) -> dict[int, list[Product]]:
        """The product of each unit of each rank, in order of arrival."""
        return {peer: list(self._of_peer(peer)) for peer in self.regions}

    def _of_peer(self, peer: int) -> Iterator[Product]:
        by_columns, k, n = self.schedule.dims == 2, self.problem.k, self.problem.n
        units, rows = self.mine.units(peer), self.mine.rows(peer)
        pieces = zip(units, self.regions[peer], rows, strict=True)
        for (_, ordinal, start, stop, _), a, (row, row_stop) in pieces:
            first, last = (start, stop) if by_columns else (0, k)
            out = Region(self.sum, self.me, row, row_stop, 0, n)
            yield Product(a, first, last, out, self.world.partial and ordinal > 0)

    def _summed(self, group: int) -> Iterable[tuple[int, int]]:
        """Rows of the sums whose last term a group adds, rising."""
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
        """What tells the peers that write to the same stage next that it is free."""
        heir = self.staging.heir_of(group)
        if heir is None or self.schedule.pull:
            return NO_ROOM
        heirs = [unit for unit in self.groups[heir] if unit.peer != self.me]
        posts = tuple([self.room[unit.peer][unit.ordinal] for unit in heirs])
        acquired = {self.acquired[self.lane_of[unit.peer]] for unit in heirs}
        return posts, tuple(sorted(acquired))
