"""The backward of attention: keys are gathered again, unless the forward has kept them, and their
gradients go back.

A rank's gradient of rows of KV is sent to the rank of the rows as soon as it is computed. There it
is summed in float32. The gradient of the queries grows as rows arrive.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple
from weakref import proxy

from ficco.plan.model import Attending, Attendings, Reduction, Region, Signal, Step, Transfer
from ficco.problems.attention import AttentionProblem
from ficco.problems.mask import BACKWARD_PRODUCTS
from ficco.problems.specification import Buffer
from ficco.schedules.attention_stage import AttentionStage, AttentionWorld, KeyRun, both
from ficco.schedules.builder import Block, Builder, Shapes, WordAllocator, remembered
from ficco.schedules.exchange import After, Item, Parcel, Route, Traffic
from ficco.schedules.groups import Unit, legs, returning, via
from ficco.schedules.space import Schedule


class Contribution(NamedTuple):
    """Gradients of some rows of a rank's keys that one rank has.

    Attributes:
        first, last: of the rows.
        rank: that has them.
        terms: the ranks whose gradients are summed in them, rank r as bit r.
    """

    first: int
    last: int
    rank: int
    terms: int


class GradientWorld(AttentionWorld):
    """Buffers, sums and signals of the backward, the same on all ranks. The gradient of a rank's
    keys sums terms of its own queries (``own``) and of other ranks (``returned``). Terms for other
    ranks wait in ``leaving``. A rank first sums its host's for its rail (``host sum``)."""

    def __init__(
        self, problem: AttentionProblem, schedule: Schedule, words: WordAllocator, cap: int | None
    ) -> None:
        self.kept = problem.saved
        if problem.saved:  # there is nothing to fetch
            schedule, cap = replace(schedule, pull=False), None
        super().__init__(problem, schedule, words, cap)
        keys, ranks, dkv = problem.keys, range(self.world), problem.specification.results[1]
        cols, hosts = problem.kv_cols, problem.hosts
        counts = [len(self.arrivals[i].units(j)) for i in ranks for j in ranks if i != j]
        #: Most units of a shard, of which there are words for each host: for those of the waiter's
        #: own, then for those that it sums for its rail.
        self.most_back = max(counts, default=0)
        self.back = GradientRoute(self, words.block(self.most_back * hosts))
        #: By rank, then by sender and owner of an arriving block, the first row of the block.
        self.first_rows: list[dict[tuple[int, int], int]] = []
        returned = []
        for rank in ranks:
            blocks = returning(keys, rank)
            ends = [*accumulate((keys.block(to, src) for src, to in blocks), initial=0)]
            self.first_rows.append(dict(zip(blocks, ends, strict=False)))
            returned.append((ends[-1], cols))
        self.buffer("own", dkv, dkv.shapes, "local", first=dkv.first)
        #: By distance of hosts, the sum of a rank's host for the rank on its rail.
        self.host_sums: dict[int, Buffer] = {}
        if self.world > 1:
            leaving = tuple((keys.product_rows(rank), cols) for rank in ranks)
            self.buffer("leaving", dkv, leaving, "local", leaves=True)
            self.buffer("returned", dkv, tuple(returned))
        for distance in range(1, hosts) if keys.local_world > 1 else ():
            owners = [keys.on_host(keys.host(rank) + distance, rank) for rank in ranks]
            pairs = list(zip(owners, ranks, strict=True))
            shapes = tuple((keys.block(*pair), cols) for pair in pairs)
            first, name = tuple(keys.lands(*pair) for pair in pairs), f"host sum {distance}"
            host_sum = self.buffer(name, dkv, shapes, "local", first=first, leaves=True)
            self.host_sums[distance] = host_sum

    def _add_slot_buffers(self, shapes: Shapes, packs_columns: bool) -> None:
        if not self.kept:
            super()._add_slot_buffers(shapes, packs_columns)

    def returned(self, sender: int, rank: int, owner: int, first: int, last: int) -> Region:
        """Region where gradients of rows of an owner's keys arrive at a rank."""
        row = self.first_rows[rank][sender, owner] - self.problem.leaves(owner, sender)
        return Region("returned", rank, row + first, row + last, 0, self.asked.kv_cols)

    def leaving(self, rank: int, owner: int, first: int, last: int, summed: bool) -> Region:
        """Region of gradients that leave: of a rank's queries or, ``summed``, of its host."""
        number, cols = partial(self.problem.number, rank, owner), (0, self.asked.kv_cols)
        buffer, begin = "leaving", 0
        if summed and self.host_sums:
            buffer, *_ = self.host_sums[self.problem.hosts_ahead(rank, owner)]
            begin = self.problem.lands(owner, rank)
        return Region(buffer, rank, number(first) - begin, number(last) - begin, *cols)

    @remembered
    def sums(self, rank: int, owner: int) -> list[tuple[Contribution, list[Contribution]]]:
        """Sums of gradients of an owner's keys at a rank, each with its summands in the order of
        ranks. The same ranks have all rows of a sum; to another host, its rows are in one piece."""
        problem, ends = self.problem, set[int]()
        shares = [
            Contribution(*problem.spans[owner][near], near, 1 << near)
            for near in problem.ranks_of(problem.host(rank))
            if problem.block(owner, near)
        ]
        if rank == owner:
            shares += [one for _, far in legs(problem, rank) for one, _ in self.sums(far, owner)]
        else:
            begin = problem.leaves(owner, rank)
            ends = {begin + unit.stop for unit in self.arrivals[rank].units(owner)}
        ends |= {end for one in shares for end in one[:2]}
        sums = []
        for first, last in pairwise(sorted(ends)):
            summands = [one for one in shares if one.first <= first and last <= one.last]
            terms = sum(one.terms for one in summands)
            by_rank = sorted(summands, key=attrgetter("rank"))
            sums.append((Contribution(first, last, rank, terms), by_rank))
        return sums


class GradientRoute(Route):
    """The route of gradients of KV to the rank of the rows or, within a host, to the rank that sums
    the gradients for another host."""

    kind, returns = "returned", True

    def __init__(self, world: GradientWorld, words: Block) -> None:
        self.world: GradientWorld = proxy(world)  # no circle, which would outlive the plans
        self.problem, self.data = world.problem, words

    def pieces(self, src: int, dst: int, owner: int) -> list[Parcel]:
        world, begin, parcels = self.world, self.problem.leaves(owner, src), list[Parcel]()
        crosses = self.problem.host(src) != self.problem.host(dst)
        shares = [Contribution(*self.problem.spans[owner][src], src, 1 << src)]
        if crosses:
            shares = [one for one, _ in world.sums(src, owner)]
        units, signals = world.arrivals[src].units(owner), self.signals(src, dst, owner)
        for unit, signal in zip(units, signals, strict=True):
            rows = begin + unit.start, begin + unit.stop
            moves = tuple(
                Transfer(
                    world.leaving(src, owner, *common, summed=crosses),
                    world.returned(src, dst, owner, *common),
                    share.terms,
                )
                for share in shares
                for common in both([share[:2]], rows)
            )
            labels = (f"d{owner}.{unit.ordinal}>{dst}",)
            parcels.append(Parcel(moves, labels, (), (signal,), unit.group))
        return parcels

    @remembered
    def signals(self, src: int, dst: int, owner: int) -> list[Signal]:
        first, row = self.problem.leaves(owner, src), partial(self.problem.number, dst, owner)
        slot = self.problem.hosts_ahead(dst, owner) * self.world.most_back
        return [
            self.data.signal(
                *(self.kind, src, dst, slot + unit.ordinal),
                (row(first + unit.start), row(first + unit.stop)),
            )
            for unit in self.world.arrivals[src].units(owner)
        ]

    def gives(self, src: int, dst: int) -> bool:
        return self.problem.block(dst, src) > 0

    def begun(self, poster: int, waiter: int) -> Signal:
        return self.world.begun(poster, waiter)


class GradientStage(AttentionStage):
    """One rank's steps: gradients leave on a lane of their own, since they must not hold up the
    keys that others wait for."""

    world: GradientWorld

    #: One step computes the gradients of keys from all queries.
    cuts_queries = False
    products_a_pair = BACKWARD_PRODUCTS

    def __init__(self, world: GradientWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.compute_lanes = ["compute0"]  # all add to the same sums
        self.return_lane = f"copy{self.schedule.copy}"
        self.made: dict[Unit, int] = {}  # unit -> the step that makes the gradients of its rows
        self.back = Traffic(builder, replace(self.schedule, mover="dma"), world.back)

    def run(self) -> None:
        super().run()
        if self.asked.rows:
            arrived = self._cross_back() if self.problem.hosts > 1 else ()
            self._sum(self.me, arrived)

    def _runs_of(self, units: list[Unit]) -> list[KeyRun]:
        """Own rows apart, and first: their gradients stay."""
        own = [unit for unit in units if unit.peer == self.me]
        rest = [unit for unit in units if unit.peer != self.me]
        return super()._runs_of(own) + super()._runs_of(rest)

    def _run(self, kv: Region, first: int, last: int) -> KeyRun:
        """Also of rows that no query attends to: their gradients are zeros."""
        return super()._run(kv, first, last) or KeyRun(kv, first, (0, 0), ())

    def _attending(self, run: KeyRun, adds: bool) -> Attending:
        own, rows = self.world.block(self.me, self.me), run.kv.rows
        row, buffer = run.first, "leaving"
        if (run.first, run.first + rows) == own:
            row, buffer = 0, "own"
        back = Region(buffer, self.me, row, row + rows, 0, self.asked.kv_cols)
        return super()._attending(run, adds)._replace(back=back)

    def _consume(self, group: int) -> None:
        before = len(self.steps)
        super()._consume(group)
        added = enumerate(self.steps[before:], before)
        attending = [i for i, step in added if isinstance(step.work, Attendings)]
        for unit in self.groups[group]:
            self.made[unit] = attending[0]
            if unit.peer != self.me:
                self._send_back(unit)

    def _send_back(self, unit: Unit) -> None:
        """Send the gradients of a unit's rows to where it came from, or to where those of this host
        are summed."""
        peer = via(self.problem, self.me, unit.peer)
        if peer != self.me:
            after = self.made[unit], self.acquired[peer]
            self.back.send(peer, unit.ordinal, after, owner=unit.peer, lane=self.return_lane)

    def _cross_back(self) -> After:
        """Exchange gradients with other hosts. Returns the steps that receive gradients."""
        ways, steps_of = list(legs(self.problem, self.me)), dict[int, list[int]]()
        for target, _ in ways:
            steps_of[target] = [self.made[unit] for unit in self.mine.units(target)]
            if self.world.host_sums:
                steps_of[target] = [self._sum(target)] * len(steps_of[target])
        self.back.cross(ways, lambda target, number: (steps_of[target][number],), direct=False)
        return tuple(self.back.brought.values())

    def _sum(self, owner: int, after: tuple[int, ...] = ()) -> int:
        """Add up the gradients of an owner's keys that this rank has and gets, in the order of
        ranks; the last step."""
        me, world = self.me, self.world
        near = [peer for peer in self.peers if self.problem.block(owner, peer)]
        waits = tuple(s for peer in near for s in world.back.signals(peer, me, owner))
        for one, shares in world.sums(me, owner):
            rows, parts = one[:2], list[Region]()
            for share in shares:
                if share.rank != me:
                    parts.append(world.returned(share.rank, me, owner, *rows))
                elif owner != me:
                    parts.append(world.leaving(me, owner, *rows, summed=False))
                else:
                    parts.append(Region("own", me, *rows, 0, self.asked.kv_cols))
            out = Region("dkv", me, *rows, 0, self.asked.kv_cols)
            if owner != me:
                out = world.leaving(me, owner, *rows, summed=True)
            terms = tuple(share.terms for share in shares)
            label = f"sum {rows[0]}:{rows[1]}" + f" for {owner}" * (owner != me)
            total = Reduction(tuple(parts), terms, out)
            self.add(Step(total, "compute0", label, waits, after=after))
            waits, after = (), ()
        return len(self.steps) - 1


class KeptGradientStage(GradientStage):
    """The same where the forward has kept the rows: they are all there, and only gradients
    travel."""

    def __init__(self, world: GradientWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        cols = (0, self.asked.kv_cols)
        self.regions = {
            peer: [Region(self.a, self.me, *rows, *cols) for rows in self.mine.rows(peer)]
            for peer in self.regions
        }
        self.senders, self.own_in_group = {}, {}  # no row is on its way
        self.begun, self.silent = self.back.begun, self.back.silent

    def _own_rows(self) -> Region:
        return Region(self.a, self.me, *self.world.block(self.me, self.me), 0, self.asked.kv_cols)

    def _turns(self) -> list[list[Item]]:
        return []

    def _cross(self) -> None:
        return
