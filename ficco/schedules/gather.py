"""From a Problem and a Schedule to the Plan of a rank, for operators that consume what arrives."""

from __future__ import annotations

from collections.abc import Iterable

from ficco.plan.model import Plan, Product, Region, Signal, Step, Transfer
from ficco.problem import Problem
from ficco.schedules.arrivals import Arrivals, Unit
from ficco.schedules.space import Schedule

#: Groups whose copies are enqueued before the first product that waits for one: the copy engine
#: never runs dry, and a GPU that waits for its host has its first products early.
LOOKAHEAD = 2


def plan(
    problem: Problem, schedule: Schedule, rank: int, staging_bytes: int | None = None
) -> Plan:
    """The Plan of one rank.

    ``staging_bytes`` caps staging: where the pieces do not fit at once, they use it as a ring.

    Raises:
        ValueError: the cap is too small for the largest step.
    """
    return _Gather(problem, schedule, rank, _layouts(problem, schedule), staging_bytes).build()


def plans(
    problem: Problem, schedule: Schedule, staging_bytes: int | None = None
) -> list[Plan]:
    """The Plans of all ranks."""
    layouts = _layouts(problem, schedule)
    return [
        _Gather(problem, schedule, rank, layouts, staging_bytes).build()
        for rank in range(problem.world)
    ]


def _layouts(problem: Problem, schedule: Schedule) -> list[Arrivals]:
    return [Arrivals(problem, schedule, rank) for rank in range(problem.world)]


class _Staging:
    """Where the pieces of one receiver land in its staging buffer.

    Without a cap every row of the gathered A has its place, less the rank's own shard where that
    is multiplied on its own. With a cap, group g lies in stage g modulo the number of stages, its
    pieces side by side.
    """

    def __init__(self, arrivals: Arrivals, cap: int | None) -> None:
        problem, schedule = arrivals.problem, arrivals.schedule
        self.arrivals = arrivals
        self.by_columns = schedule.dims == 2
        own = problem.rows[arrivals.rank]
        self.own_rows_absent = 0 if schedule.uniform and schedule.grouping == "fused" else own
        rows = problem.m - self.own_rows_absent
        self.stages = 0
        self.shape = (rows, problem.k)
        self._offsets: dict[tuple[int, int], int] = {}
        self.turn: dict[int, int] = {}  # group -> its turn among those that use the ring
        if cap is None or rows * problem.k * problem.itemsize <= cap:
            return
        stage_rows = stage_cols = 0
        for group, units in enumerate(arrivals.by_group()):
            if all(unit.peer == arrivals.rank for unit in units):
                continue
            self.turn[group] = len(self.turn)
            row = 0
            for unit in units:
                if self._lands(unit):
                    self._offsets[unit.peer, group] = row
                    row += self._unit_rows(unit)
                    stage_cols = max(stage_cols, unit.stop - unit.start)
            stage_rows = max(stage_rows, row)
        if not self.by_columns:
            stage_cols = problem.k
        stage_bytes = stage_rows * stage_cols * problem.itemsize
        self.stages = min(cap // max(stage_bytes, 1), len(self.turn))
        if self.stages < 1:
            raise ValueError(
                f"workspace_bytes: required at least {stage_bytes} for one step of schedule "
                f"{schedule} on {problem}, got {cap}; allow more or cut finer (pieces=)"
            )
        self.stage_rows = stage_rows
        self.shape = (self.stages * stage_rows, stage_cols)
        self._groups = list(self.turn)

    def ahead_of(self, group: int) -> int | None:
        """The group whose place in the ring this one takes over."""
        turn = self.turn.get(group, -1) - self.stages
        return self._groups[turn] if self.stages and turn >= 0 else None

    def heir_of(self, group: int) -> int | None:
        """The group that takes over the place of this one."""
        if not self.stages or group not in self.turn:
            return None
        turn = self.turn[group] + self.stages
        return self._groups[turn] if turn < len(self._groups) else None

    def _lands(self, unit: Unit) -> bool:
        return unit.peer != self.arrivals.rank or not self.own_rows_absent

    def _unit_rows(self, unit: Unit) -> int:
        return self.arrivals.problem.rows[unit.peer] if self.by_columns else unit.stop - unit.start

    def region(self, group: int, unit: Unit) -> Region:
        problem, rank = self.arrivals.problem, self.arrivals.rank
        if self.stages:
            stage = self.turn[group] % self.stages
            row = stage * self.stage_rows + self._offsets[unit.peer, group]
            col = 0
        else:
            row = problem.offsets[unit.peer]
            row -= self.own_rows_absent if unit.peer > rank else 0
            row += 0 if self.by_columns else unit.start
            col = unit.start if self.by_columns else 0
        cols = unit.stop - unit.start if self.by_columns else problem.k
        return Region("staging", rank, row, row + self._unit_rows(unit), col, col + cols)


class _Gather:
    """Builds one Plan. ``me`` is its rank; ``group`` counts a receiver's groups of units."""

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        rank: int,
        layouts: list[Arrivals],
        cap: int | None,
    ) -> None:
        self.problem, self.schedule, self.me = problem, schedule, rank
        self.layouts = layouts
        self.mine = layouts[rank]
        self.landing = [_Staging(arrivals, cap) for arrivals in layouts]
        # One row pitch on all ranks, so that a sender need not ask for the receiver's.
        self.pitch = max(staging.shape[1] for staging in self.landing)
        self.staging = self.landing[rank]
        self.peers = [peer for peer in range(problem.world) if peer != rank]
        self.source = "a" if problem.symmetric or not schedule.pull else "publish"
        terms = max(layout.rounds for layout in layouts) - 1 + schedule.tail
        self.slots = max(terms, 2)  # data words per pair of ranks; pull uses two of them
        self.groups = self.mine.by_group()
        self.partial = schedule.dims == 2 and terms > 1
        self.sum = "sum" if self.partial and problem.rounds else "out"
        self.started: set[int] = set()  # shards whose partial sums have a first term
        self.steps: list[Step] = []
        self.product_of: dict[int, int] = {}  # group -> index of the step that consumed it
        self.copied: dict[int, list[int]] = {}  # group -> indices of the copies of this rank
        self.acquired: dict[str, int] = {}  # copy lane -> the step that takes over its peers' slots
        self.lane_of = {
            target: f"copy{i % schedule.copy}" for i, target in enumerate(self._targets())
        }

    def _targets(self) -> list[int]:
        """Peers in the order in which this rank first has to do with them."""
        if self.schedule.pull:
            return [p for members in self.mine.sets for p in members if p != self.me]
        return sorted(
            self.peers,
            key=lambda p: min(
                ((place.group, place.position) for place in self.layouts[p].places(self.me)),
                default=(self.layouts[p].groups, 0),
            )
            + ((p - self.me) % self.problem.world,),
        )

    # Signal words. Every rank has the same layout: first one word per peer that rests at 1, then
    # `slots` words per peer for data, then as many for room in a ring.

    def _released(self, poster: int, waiter: int) -> Signal:
        return Signal("released", poster, waiter, 0, poster)

    def _word(self, kind: str, poster: int, waiter: int, slot: int, rows: tuple[int, int]) -> Signal:
        world = self.problem.world
        block = world * self.slots if kind == "room" else 0
        word = world + block + poster * self.slots + slot
        return Signal(kind, poster, waiter, slot, word, *rows)

    def _rows(self, unit: Unit) -> tuple[int, int]:
        """Rows of the gathered A that a unit holds."""
        base = self.problem.offsets[unit.peer]
        if self.schedule.dims == 2:
            return base, base + self.problem.rows[unit.peer]
        return base + unit.start, base + unit.stop

    def _add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def build(self) -> Plan:
        problem, schedule = self.problem, self.schedule
        publish = schedule.pull and not problem.symmetric and bool(self.peers)
        published = self._publish() if publish and problem.rows[self.me] else ()
        if not schedule.uniform and problem.rows[self.me]:
            self._multiply_own()
        if schedule.pull:
            self._open_pull(published)
            copies = self._pulls()
        else:
            self._open_push()
            copies = self._pushes()
        ahead = self.staging.stages or LOOKAHEAD
        last = max((group for group, _ in copies), default=-1)
        pending = iter(copies)
        held = next(pending, None)
        for group in range(-ahead, max(len(self.groups), last + 1)):
            if group >= 0 and group < len(self.groups):
                self._consume(group)
            while held is not None and held[0] <= group + ahead:
                self.copied.setdefault(held[0], []).append(self._add(self._with_room(*held)))
                held = next(pending, None)
        if schedule.pull:
            self._close_pull()
        if self.peers:
            self._retire()
        return Plan(
            problem=problem,
            schedule=str(schedule),
            rank=self.me,
            steps=tuple(self.steps),
            staging=(self.staging.shape[0], self.pitch) if self.peers else (0, 0),
            room=self._room_bytes(publish) if self.peers else (0, 0),
            publish=publish,
            sums=any(s.transfer is not None and s.transfer.src.buffer == "sum" for s in self.steps),
            words=problem.world * (1 + 2 * self.slots) if self.peers else 0,
            stages=self.staging.stages,
        )

    def _room_bytes(self, publish: bool) -> tuple[int, int]:
        itemsize = self.problem.itemsize
        staging = max(staging.shape[0] for staging in self.landing) * self.pitch * itemsize
        return staging, max(self.problem.rows) * self.problem.k * itemsize * publish

    # Copies: both directions yield (group, Step, unit) sorted by group.

    def _pushes(self) -> list[tuple[int, Step]]:
        sends = sorted(
            (
                (place.group, place.position, (target - self.me) % self.problem.world, target, place)
                for target in self.peers
                for place in self.layouts[target].places(self.me)
            ),
        )
        return [
            (
                group,
                Step(
                    "copy",
                    self.lane_of[target],
                    f"{self.me}.{place.unit.ordinal}>{target}",
                    waits=self._room(target, group, place.unit),
                    posts=(
                        self._word(
                            "ready", self.me, target, place.unit.ordinal, self._rows(place.unit)
                        ),
                    ),
                    transfer=Transfer(
                        self._source(place.unit), self.landing[target].region(group, place.unit)
                    ),
                    mover=self.schedule.mover,
                ),
            )
            for group, _, _, target, place in sends
        ]

    def _pulls(self) -> list[tuple[int, Step]]:
        found = []
        rest = {peer: len(self.mine.units(peer)) for peer in self.peers}
        for group, units in enumerate(self.groups):
            for unit in units:
                peer = unit.peer
                if peer == self.me:
                    continue
                rest[peer] -= 1
                done = () if rest[peer] else (self._done(self.me, peer),)
                valid = () if unit.ordinal else (self._valid(peer, self.me),)
                step = Step(
                    "copy",
                    self.lane_of[peer],
                    f"{peer}.{unit.ordinal}>{self.me}",
                    waits=valid,
                    posts=done,
                    transfer=Transfer(self._source(unit), self.staging.region(group, unit)),
                    mover=self.schedule.mover,
                )
                found.append((group, step))
        return found

    def _with_room(self, group: int, step: Step) -> Step:
        """A pull into a ring also waits until this rank has used up what lay there."""
        before = self.staging.ahead_of(group) if self.schedule.pull else None
        return step if before is None else step._replace(after=(self.product_of[before],))

    def _source(self, unit: Unit) -> Region:
        if self.schedule.dims == 2:
            rows = (0, self.problem.rows[unit.peer], unit.start, unit.stop)
        else:
            rows = (unit.start, unit.stop, 0, self.problem.k)
        return Region(self.source, unit.peer, *rows)

    def _room(self, target: int, group: int, unit: Unit) -> tuple[Signal, ...]:
        """What a push into a ring waits for: the target has used up what lay there."""
        if self.landing[target].ahead_of(group) is None:
            return ()
        return (self._word("room", target, self.me, unit.ordinal, self._rows(unit)),)

    def _valid(self, poster: int, waiter: int) -> Signal:
        return self._word("valid", poster, waiter, 0, self._shard_rows(poster))

    def _done(self, poster: int, waiter: int) -> Signal:
        return self._word("done", poster, waiter, 1, self._shard_rows(waiter))

    def _shard_rows(self, rank: int) -> tuple[int, int]:
        return self.problem.offsets[rank], self.problem.offsets[rank + 1]

    # Opening and closing a call.

    def _lanes(self) -> Iterable[tuple[str, list[int]]]:
        """Copy lanes, each with its peers."""
        by_lane: dict[str, list[int]] = {}
        for peer, lane in self.lane_of.items():
            by_lane.setdefault(lane, []).append(peer)
        return by_lane.items()

    def _open_push(self) -> None:
        for lane, peers in self._lanes():
            mine = tuple(self._released(peer, self.me) for peer in peers)
            # A peer that gets no data still has to know that this rank's call has begun.
            bare = tuple(
                self._word("ready", self.me, peer, 0, (0, 0))
                for peer in peers
                if not self.problem.rows[self.me]
            )
            step = Step("sync", lane, "acquire", waits=mine, clears=mine, posts=bare)
            self.acquired[lane] = self._add(step)

    def _publish(self) -> tuple[int, ...]:
        whole = (0, self.problem.rows[self.me], 0, self.problem.k)
        move = Transfer(Region("a", self.me, *whole), Region("publish", self.me, *whole))
        return (self._add(Step("place", "compute0", "publish", transfer=move)),)

    def _open_pull(self, published: tuple[int, ...]) -> None:
        for lane, peers in self._lanes():
            mine = tuple(self._released(peer, self.me) for peer in peers)
            valid = tuple(self._valid(self.me, peer) for peer in peers)
            self._add(
                Step(
                    "sync", lane, "acquire", waits=mine, clears=mine, posts=valid, after=published
                )
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
            self._word("ready", peer, self.me, 0, (0, 0))
            for peer in self.peers
            if not self.schedule.pull and not self.problem.rows[peer]
        ]
        last = {step.lane: i for i, step in enumerate(self.steps)}
        self._add(
            Step(
                "sync",
                "sync",
                "retire",
                waits=tuple(silent),
                clears=(*waited, *silent),
                posts=tuple(self._released(self.me, peer) for peer in self.peers),
                after=tuple(last.values()),
            )
        )

    # Products.

    def _multiply_own(self) -> None:
        me, k = self.me, self.problem.k
        first, last = self._shard_rows(me)
        src = Region("a", me, 0, last - first, 0, k)
        dst = Region("out", me, first, last, 0, self.problem.n)
        self._add(Step("matmul", "compute0", "own", products=(Product(src, 0, k, dst),)))
        if self.problem.return_gathered:
            self._place("compute0", src, Region("gathered", me, first, last, 0, k))

    def _place(self, lane: str, src: Region, dst: Region, after: tuple[int, ...] = ()) -> int:
        label = f"{src.buffer}>{dst.buffer}"
        return self._add(Step("place", lane, label, transfer=Transfer(src, dst), after=after))

    def _compute_lane(self, group: int, units: list[Unit]) -> str:
        """Groups take turns; those that add to the same sums stay on one lane."""
        turn = group
        if self.schedule.dims == 2:
            turn = self.mine.set_of[units[0].peer]
        return f"compute{turn % self.schedule.compute}"

    def _consume(self, group: int) -> None:
        """Multiply what has arrived of one group, and give its room back."""
        units = self.groups[group]
        if not units:
            return
        lane = self._compute_lane(group, units)
        remote = [unit for unit in units if unit.peer != self.me]
        if remote:
            sources = [self.staging.region(group, unit) for unit in units]
            self._place_own(group, lane, units)
        else:
            sources = [self._source(unit)._replace(buffer="a") for unit in units]
        ready = () if self.schedule.pull else tuple(map(self._ready, remote))
        pulled = self.copied.get(group, ()) if self.schedule.pull else ()
        copied = {self.steps[i].lane: i for i in pulled}
        multiply = Step(
            "matmul",
            lane,
            " ".join(f"{unit.peer}.{unit.ordinal}" for unit in units),
            waits=ready,
            after=tuple(copied.values()),
            products=self._products(list(zip(units, sources, strict=True))),
        )
        self.product_of[group] = self._add(multiply)
        for unit, region in zip(units, sources, strict=True):
            if self.problem.return_gathered:
                first, last = self._rows(unit)
                cols = region.cols if self.schedule.dims == 2 else 0
                col = unit.start if cols else 0
                dst = Region("gathered", self.me, first, last, col, col + region.cols)
                self.product_of[group] = self._place(lane, region, dst)
        self._round(lane, units)
        self._give_room(group)

    def _ready(self, unit: Unit) -> Signal:
        return self._word("ready", unit.peer, self.me, unit.ordinal, self._rows(unit))

    def _place_own(self, group: int, lane: str, units: list[Unit]) -> None:
        """Bring the rank's own piece beside those of its peers."""
        before = self.staging.ahead_of(group)
        used = () if before is None else (self.product_of[before],)
        after = tuple(i for i in used if self.steps[i].lane != lane)
        for unit in units:
            if unit.peer == self.me:
                src = self._source(unit)._replace(buffer="a")
                self._place(lane, src, self.staging.region(group, unit), after)

    def _products(self, pieces: list[tuple[Unit, Region]]) -> tuple[Product, ...]:
        """As few products as there can be: contiguous rows merge, equal distances form a batch."""
        found: list[Product] = []
        for unit, a in sorted(pieces, key=lambda piece: self._rows(piece[0])):
            first, last = self._rows(unit)
            k_first, k_last = (
                (unit.start, unit.stop) if self.schedule.dims == 2 else (0, self.problem.k)
            )
            out = Region(self.sum, self.me, first, last, 0, self.problem.n)
            accumulate = self.partial and unit.peer in self.started
            one = Product(a, k_first, k_last, out, accumulate)
            if found and (merged := _merge(found[-1], one)):
                found[-1] = merged
            else:
                found.append(one)
        self.started.update(unit.peer for unit, _ in pieces)
        batched: list[Product] = []
        for one in found:
            if batched and (merged := _batch(batched[-1], one)):
                batched[-1] = merged
            else:
                batched.append(one)
        return tuple(batched)

    def _round(self, lane: str, units: list[Unit]) -> None:
        """Round the sums whose last term has been added."""
        if self.sum == "out":
            return
        spans: list[tuple[int, int]] = []
        for unit in sorted(units):
            if unit.stop < self.problem.k:
                continue
            first, last = self._rows(unit)
            if spans and spans[-1][1] == first:
                spans[-1] = (spans[-1][0], last)
            else:
                spans.append((first, last))
        for first, last in spans:
            src = Region("sum", self.me, first, last, 0, self.problem.n)
            self._place(lane, src, src._replace(buffer="out"))

    def _give_room(self, group: int) -> None:
        """Tell the peers that write to the same stage next that it is free."""
        heir = self.staging.heir_of(group)
        if self.schedule.pull or heir is None:
            return
        posts = tuple(
            self._word("room", self.me, unit.peer, unit.ordinal, self._rows(unit))
            for unit in self.groups[heir]
            if unit.peer != self.me
        )
        acquired = {self.acquired[self.lane_of[signal.waiter]] for signal in posts}
        index = self.product_of[group]
        step = self.steps[index]
        self.steps[index] = step._replace(posts=posts, after=(*step.after, *sorted(acquired)))


def _merge(left: Product, right: Product) -> Product | None:
    """Two products on adjacent rows as one."""
    if (left.k_first, left.k_last, left.accumulate) != (
        right.k_first,
        right.k_last,
        right.accumulate,
    ):
        return None
    a, out = left.a, left.out
    if a.row_stop != right.a.row or a.col != right.a.col or out.row_stop != right.out.row:
        return None
    return left._replace(
        a=a._replace(row_stop=right.a.row_stop), out=out._replace(row_stop=right.out.row_stop)
    )


def _batch(left: Product, right: Product) -> Product | None:
    """Two products at equal distances as one strided batch."""
    if (left.k_first, left.k_last, left.accumulate, left.a.rows, left.a.col) != (
        right.k_first,
        right.k_last,
        right.accumulate,
        right.a.rows,
        right.a.col,
    ):
        return None
    a_stride, out_stride = right.a.row - left.a.row, right.out.row - left.out.row
    if left.batch > 1:
        a_stride -= (left.batch - 1) * left.a_stride
        out_stride -= (left.batch - 1) * left.out_stride
        if (a_stride, out_stride) != (left.a_stride, left.out_stride):
            return None
    if min(a_stride, out_stride) < left.a.rows:
        return None
    return left._replace(batch=left.batch + 1, a_stride=a_stride, out_stride=out_stride)
