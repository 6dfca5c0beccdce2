"""Plans of attention and of its backward.

Forward: the steps of a gather, whose rows are attended to. The own rows come first, while the first
pieces travel. Partial results of queries are merged in float32 after the last group that adds to
them.

Backward: keys are gathered again, unless the forward has saved them. A rank sends its gradient of
rows of KV to the rank of the rows as soon as the gradient is computed. The rank of the rows sums
the gradients in float32. The gradient of the queries grows as rows arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import NamedTuple
from weakref import proxy

from ficco.plan.model import (
    Attending,
    Attendings,
    Plan,
    Reduction,
    Region,
    Signal,
    Step,
    Transfer,
    paused,
)
from ficco.problems.attention import AttentionProblem, KeyGather
from ficco.problems.mask import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, Rectangle, Span, merged
from ficco.problems.specification import MERGE, SUMS
from ficco.schedules.builder import Block, Builder, Shapes, Stage, WordAllocator, remembered
from ficco.schedules.exchange import After, Item, Parcel, Route, Traffic
from ficco.schedules.gather import OWN, Gather, GatherWorld
from ficco.schedules.groups import Unit, cut, host_sums, legs, returning, via
from ficco.schedules.space import Schedule


class AttentionWorld(GatherWorld):
    """The route of the rows of KV, and the buffers of attention. They are equal on all ranks.

    Attributes:
        attention: the problem of attention. ``problem`` is the gather of its keys.
        product: buffer of partial results: ``parts``, one for each step, or their ``sum``.
        function: name of the function that merges parts; empty if partial results are a sum.
        begins: words of the signal that a rank's call has begun, in a ring.
    """

    problem: KeyGather

    def __init__(
        self, problem: AttentionProblem, schedule: Schedule, words: WordAllocator, cap: int | None
    ) -> None:
        self.attention, whole = problem, problem.specification
        q, kv, *_ = whole.operands
        operands = q, kv, whole.results[0]
        # A tail cuts the queries of the last group. It cuts no keys.
        super().__init__(problem.keys, replace(schedule, tail=1), words, operands, cap=cap)
        self.schedule = schedule
        request, wide = whole.attentions[0], SUMS[problem.dtype]
        merges = request.out != self.out.holds
        shapes, holds = self.out.shapes, {"holds": request.out, "dtype": wide}
        self.product = self.buffer("parts" if merges else "sum", self.out, shapes, "local", **holds)
        self.function = MERGE if merges else ""
        self.begins = words.block(int(problem.ring))

    # In a ring, rows go from each rank to the next one, and on from there.

    def carrier(self, receiver: int, owner: int) -> int:
        ring = self.attention.ring
        return (receiver - 1) % self.world if ring else super().carrier(receiver, owner)

    def gives(self, src: int, dst: int) -> bool:
        return super().gives(src, dst) and self.carrier(dst, src) == src

    def begun(self, poster: int, waiter: int) -> Signal:
        if not self.attention.ring:
            return super().begun(poster, waiter)
        return self.begins.signal("begun", poster, waiter)


class RingGather(Gather):
    """Copies of one rank in a ring. Own and arriving rows go to the next rank, except the rows
    that the next rank owns."""

    @cached_property
    def target(self) -> int:
        """The next rank."""
        return (self.me + 1) % self.problem.world

    def turns(self) -> list[list[Item]]:
        if not self.mine.group_count:
            return super().turns()
        own = chain.from_iterable(self.traffic.leaving([self.target]))
        turns = self.traffic.coming(peer for peer in self.mine.set_of if peer != self.target)
        return [[*own, *chain.from_iterable(turns[:1])], *turns[1:]]

    def copy(self, group: int, items: list[Item]) -> None:
        for peer, number, _ in items:
            owner = self.me if peer == self.target else peer
            if owner != self.me:  # arriving rows are for the next rank and for this one
                lane, label = self.lane_of[self.target], f"{owner}.{number} is here"
                self.traffic.hear(owner, number, lane, label)
            self.traffic.send(self.target, number, owner=owner)


class SavedGather(Gather):
    """Rows that the forward has saved, so that none travels."""

    def __init__(self, world: GatherWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.senders = {}
        for unit, (_, gathered) in self.places.items():
            self.places[unit] = gathered._replace(buffer=self.a), gathered

    def turns(self) -> list[list[Item]]:
        return []

    def cross(self) -> None:
        return


class AttentionStage(Stage):
    """Steps of one rank.

    The own rows, each group, and the slices of the last group take turns on the compute lanes.
    Queries are merged on the lane of the step that completes them. The queries of the last group
    are cut into ``tail`` slices, so that little is left to merge after the last step (query-split
    attention, FlashOverlap).
    """

    world: AttentionWorld

    #: Whether the queries of the last group are cut into slices.
    cuts_queries = True
    #: Matrix products for each pair of a query and a key.
    products_per_pair = FORWARD_PRODUCTS

    def __init__(self, world: AttentionWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.attention, self.product = world.attention, world.product.name
        transfers = RingGather if self.attention.ring else Gather
        self.gather = (SavedGather if self.attention.saved else transfers)(world, builder)
        self.mine, self.groups = self.gather.mine, self.gather.groups
        self.compute_lanes = min(self.schedule.compute, self.mine.group_count + 1)

    def run(self) -> None:
        for group in self.gather.stream():
            if self.groups[group]:
                self._use(group)

    def _use(self, group: int) -> int:
        """Attend to the units of a group, and merge the queries that it completes. Returns the step
        that attends."""
        lane = self._lane(group)
        step = self.gather.use(group, lane, self._work(group))
        self._complete(lane, group)
        return step

    def _lane(self, group: int, number: int = 0) -> str:
        """The compute lane of a group's slice. Own rows, groups and slices take turns."""
        turn = group + (OWN in self.groups) + number
        return f"compute{turn % self.compute_lanes}"

    def _work(self, group: int) -> Attendings | None:
        slices = self.slices(group)  # of several slices each is a step of its own
        attends = self.attends_of(group, slices[0]) if len(slices) == 1 else ()
        return Attendings(attends) if attends else None

    def _complete(self, lane: str, group: int) -> None:
        """Attend to the slices of a group if there are several, and merge completed queries."""
        slices, last_step = self.slices(group), len(self.steps) - 1
        if len(slices) == 1:
            self._merge(lane, group, slices[0])
            return
        for number, queries in enumerate(slices):
            turn, label = self._lane(group, number), f"queries {queries[0]}"
            after = (last_step,) if turn != lane else ()
            attends = self.attends_of(group, queries)
            self.add(Step(Attendings(attends), turn, label, after=after))
            self._merge(turn, group, queries)

    @remembered
    def slices(self, group: int) -> list[Span]:
        """Ranges of queries that attend to a group; several for the last group if it is cut."""
        ends = [end for run in self.runs[group] for end in run.queries] or [0]
        first, last = min(ends), max(ends)
        if group in (OWN, *range(self.mine.group_count - 1)) or not self.cuts_queries:
            return [(first, last)]
        parts = cut(last - first, self.schedule.tail) or [(0, 0)]
        return [(first + a, first + b) for a, b in parts]

    def _merge(self, lane: str, group: int, queries: Span) -> None:
        """Add the steps that merge or round the results of the ``queries`` that a group completes,
        after the steps on other lanes that attend to these queries."""
        for first, last in intersections(self.completed_spans[group], queries):
            attending = {
                step.lane: index
                for index, step in enumerate(self.steps)
                if isinstance(step.work, Attendings) and step.work.meets(first, last)
            }
            after = tuple(index for other, index in attending.items() if other != lane)
            src = Region(self.product, self.me, first, last, 0, self.attention.q_cols)
            dst, function = src._replace(buffer=self.world.out.name), self.world.function
            label = function or f"{src.buffer}>{dst.buffer}"
            move = Transfer(src, dst, function=function)
            self.add(Step(move, lane, label, after=after))

    @cached_property
    def runs(self) -> dict[int, list[KeyRun]]:
        """Runs of KV rows of each group, ``OWN`` first, with the queries that attend to them."""
        return {group: self._runs_of(units) for group, units in self.groups.items()}

    def _runs_of(self, units: list[Unit]) -> list[KeyRun]:
        """Runs of a group. Units whose regions and landed rows are contiguous form one run."""
        spans: list[tuple[Region, int, int]] = []
        for unit in sorted(units):
            region, gathered = self.gather.places[unit]
            first, last = gathered[2:4]
            if spans and spans[-1][0].row_stop == region.row and spans[-1][2] == first:
                before, first, _ = spans.pop()
                region = before._replace(row_stop=region.row_stop)
            spans.append((region, first, last))
        return [run for span in spans if (run := self._run(*span))]

    def _run(self, kv: Region, first: int, last: int) -> KeyRun | None:
        rectangles = self.attention.rectangles(self.me, (0, self.attention.rows), (first, last))
        if not rectangles:
            return None
        queries = min(one.q for one in rectangles), max(one.q_stop for one in rectangles)
        return KeyRun(kv, first, queries, rectangles)

    @cached_property
    def completed_spans(self) -> dict[int, list[Span]]:
        """Ranges of queries that each group completes: no later group has a part of them."""
        completed, over = {}, list[Span]()
        for group, runs in reversed(self.runs.items()):
            spans = [span for run in runs for span in _without(run.queries, over)]
            completed[group] = merged(spans)
            over = merged(over + spans)
        return completed

    def attends_of(self, group: int, queries: Span) -> tuple[Attending, ...]:
        """Attention of a range of queries to each run of a group."""
        # A sum begins with the first run, to which all queries attend. Later runs add to the sum.
        begun = next((g for g, runs in self.runs.items() if runs), OWN)
        sums, attends = not self.world.function, []
        for number, run in enumerate(self.runs[group]):
            (rows,) = intersections([run.queries], queries) or [(queries[0], queries[0])]
            if rows != run.queries:
                keys = run.first, run.first + run.kv.rows
                calls = self.attention.rectangles(self.me, rows, keys)
                run = run._replace(queries=rows, calls=calls)
            adds = sums and (group != begun or number > 0)
            attends.append(self._attending(run, adds))
        return tuple(attends)

    def _attending(self, run: KeyRun, adds: bool) -> Attending:
        """Attention of the queries of ``run`` to its keys; ``adds``: to the earlier sum."""
        attention, pairs = self.attention, sum(one.pairs for one in run.calls)
        q = Region("q", self.me, *run.queries, 0, attention.q_cols)
        out, heads = q._replace(buffer=self.product), attention.batch * attention.heads
        calls = tuple(one.call(heads, attention.size, self.products_per_pair) for one in run.calls)
        return Attending(q, run.kv, out, run.first, pairs, adds, calls=calls)


class KeyRun(NamedTuple):
    """Consecutive rows of KV, to which one library call per rectangle attends.

    Attributes:
        kv: region of the rows.
        first: number of the first row among all landed rows.
        queries: first and last own query, exclusive, that attends to any of the rows.
        calls: rectangles of queries and rows.
    """

    kv: Region
    first: int
    queries: Span
    calls: tuple[Rectangle, ...]


def intersections(spans: list[Span], other: Span) -> list[Span]:
    """Intersections of spans with another span, without empty ones."""
    common = [(max(first, other[0]), min(last, other[1])) for first, last in spans]
    return [(first, last) for first, last in common if first < last]


def _without(span: Span, others: list[Span]) -> list[Span]:
    """Parts of a span outside other spans, which are in ascending order."""
    left, (first, last) = list[Span](), span
    for begin, end in others:
        if first < min(begin, last):
            left.append((first, min(begin, last)))
        first = max(first, end)
    return [*left, (first, last)] if first < last else left


class Contribution(NamedTuple):
    """A partial gradient of rows of KV.

    Attributes:
        first, last: bounds of the rows in their owner's shard.
        rank: the rank that holds the partial gradient.
        terms: ranks whose queries contributed to it, rank r as bit r.
    """

    first: int
    last: int
    rank: int
    terms: int


class GradientWorld(AttentionWorld):
    """Routes, buffers and sums of the backward. They are equal on all ranks.

    A rank computes gradients of all rows of KV that its queries attend to. Gradients of its own
    rows are in the buffer ``own``, and gradients of other ranks' rows in ``leaving``. Gradients of
    its own rows from other ranks arrive in ``returned``. Before gradients cross hosts, one rank of
    a host sums the gradients of all ranks of the host (``host sum``).

    Attributes:
        saved: the forward has saved the gathered rows, so that no rows travel.
        most_back: maximum number of units of a shard. Each host has as many words.
        back: route of the gradients.
        first_rows: by rank, the first row in ``returned`` of a block, by sender and owner.
        host_sums: by distance of hosts, the buffer of a host's sum for the rank on the same rail.
    """

    def __init__(
        self, problem: AttentionProblem, schedule: Schedule, words: WordAllocator, cap: int | None
    ) -> None:
        self.saved = problem.saved
        if problem.saved:  # there is nothing to fetch
            schedule, cap = replace(schedule, pull=False), None
        super().__init__(problem, schedule, words, cap)
        keys, ranks, dkv = problem.keys, range(self.world), problem.specification.results[1]
        cols = problem.kv_cols
        counts = [len(self.arrivals[i].units(j)) for i in ranks for j in ranks if i != j]
        self.most_back = max(counts, default=0)
        self.back = GradientRoute(self, words.block(self.most_back * problem.hosts))
        self.first_rows: list[dict[tuple[int, int], int]] = []
        returned = []
        for rank in ranks:
            blocks = returning(keys, rank)
            ends = [*accumulate((keys.block(to, src) for src, to in blocks), initial=0)]
            self.first_rows.append(dict(zip(blocks, ends, strict=False)))
            returned.append((ends[-1], cols))
        self.buffer("own", dkv, dkv.shapes, "local", first=dkv.first)
        if self.world > 1:
            leaving = tuple((keys.product_rows(rank), cols) for rank in ranks)
            self.buffer("leaving", dkv, leaving, "local", leaves=True)
            self.buffer("returned", dkv, tuple(returned))
        self.host_sums = host_sums(self, dkv, self.block, leaves=True)

    def _add_slot_buffers(self, shapes: Shapes) -> None:
        if not self.saved:
            super()._add_slot_buffers(shapes)

    def gives(self, src: int, dst: int) -> bool:
        return self.back.gives(src, dst) if self.saved else super().gives(src, dst)

    def returned(self, sender: int, rank: int, owner: int, first: int, last: int) -> Region:
        """Region where gradients of rows of an owner's keys arrive at a rank."""
        row = self.first_rows[rank][sender, owner] - self.problem.leaves(owner, sender)
        return Region("returned", rank, row + first, row + last, 0, self.attention.kv_cols)

    def leaving(self, rank: int, owner: int, first: int, last: int, summed: bool) -> Region:
        """Region at a rank of gradients for an owner: from the rank's queries or, if ``summed``,
        from the queries of its host."""
        number, cols = partial(self.problem.number, rank, owner), (0, self.attention.kv_cols)
        buffer, begin = "leaving", 0
        if summed and self.host_sums:
            buffer, *_ = self.host_sums[self.problem.hosts_ahead(rank, owner)]
            begin = self.problem.lands(owner, rank)
        return Region(buffer, rank, number(first) - begin, number(last) - begin, *cols)

    @remembered
    def sums(self, rank: int, owner: int) -> list[tuple[Contribution, list[Contribution]]]:
        """Sums that a rank forms of gradients of an owner's rows, each with its summands in the
        order of ranks. Every summand covers all rows of its sum. A sum for another host lies within
        one unit."""
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
    """The route of gradients of KV to the owner of the rows or, within a host, to the rank that
    sums the gradients for an owner on another host."""

    kind, returns = "returned", True

    def __init__(self, world: GradientWorld, words: Block) -> None:
        self.world: GradientWorld = proxy(world)  # no circle, which would outlive the plans
        self.problem, self.data = world.problem, words

    def pieces(self, src: int, dst: int, owner: int) -> list[Parcel]:
        world, begin, parcels = self.world, self.problem.leaves(owner, src), list[Parcel]()
        crosses = self.problem.host(src) != self.problem.host(dst)
        shares = [Contribution(*self.problem.spans[owner][src], src, 1 << src)]
        if crosses:  # `src` sends the sums of its host, not only its own gradient
            shares = [one for one, _ in world.sums(src, owner)]
        units, signals = world.arrivals[src].units(owner), self.signals(src, dst, owner)
        for unit, signal in zip(units, signals, strict=True):
            rows = begin + unit.start, begin + unit.stop
            moves = tuple(
                Transfer(
                    world.leaving(src, owner, *span, summed=crosses),
                    world.returned(src, dst, owner, *span),
                    share.terms,
                )
                for share in shares
                for span in intersections([share[:2]], rows)  # part of the share in the unit
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
    """Steps of one rank. Gradients leave on a separate copy lane, so that they do not delay rows of
    KV that peers wait for."""

    world: GradientWorld

    #: One step computes the gradients of a group's rows from all queries.
    cuts_queries = False
    products_per_pair = BACKWARD_PRODUCTS

    def __init__(self, world: GradientWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.compute_lanes = 1  # all steps add to the gradient of the queries
        self.return_lane = f"copy{self.schedule.copy}"
        self.gradient_step: dict[Unit, int] = {}  # unit -> the step that computes its gradients
        self.back = Traffic(builder, replace(self.schedule, mover="dma"), world.back)

    def run(self) -> None:
        super().run()
        if self.attention.rows:
            arrived = self._cross_back() if self.problem.hosts > 1 else ()
            self._sum(self.me, arrived)

    def _runs_of(self, units: list[Unit]) -> list[KeyRun]:
        """Runs of a group. Own rows form separate runs, since their gradients stay."""
        own = [unit for unit in units if unit.peer == self.me]
        rest = [unit for unit in units if unit.peer != self.me]
        return super()._runs_of(own) + super()._runs_of(rest)

    def _run(self, kv: Region, first: int, last: int) -> KeyRun:
        """A run, also of rows that no query attends to: their gradients are zeros."""
        return super()._run(kv, first, last) or KeyRun(kv, first, (0, 0), ())

    def _attending(self, run: KeyRun, adds: bool) -> Attending:
        own, rows = self.world.block(self.me, self.me), run.kv.rows
        row, buffer = run.first, "leaving"
        if (run.first, run.first + rows) == own:
            row, buffer = 0, "own"
        back = Region(buffer, self.me, row, row + rows, 0, self.attention.kv_cols)
        return super()._attending(run, adds)._replace(back=back)

    def _use(self, group: int) -> int:
        step = super()._use(group)
        for unit in self.groups[group]:
            self.gradient_step[unit] = step
            if unit.peer != self.me:
                self._send_back(unit)
        return step

    def _send_back(self, unit: Unit) -> None:
        """Send the gradients of a unit's rows to their owner, or to the rank that sums this host's
        gradients for the owner."""
        peer = via(self.problem, self.me, unit.peer)
        if peer != self.me:
            after = self.gradient_step[unit], self.gather.acquired[peer]
            self.back.send(peer, unit.ordinal, after, owner=unit.peer, lane=self.return_lane)

    def _cross_back(self) -> After:
        """Exchange gradients with other hosts. Returns the steps that receive gradients."""
        ways, steps_of = list(legs(self.problem, self.me)), dict[int, list[int]]()
        for target, _ in ways:
            steps_of[target] = [self.gradient_step[unit] for unit in self.mine.units(target)]
            if self.world.host_sums:
                steps_of[target] = [self._sum(target)] * len(steps_of[target])
        self.back.cross(ways, lambda target, number: (steps_of[target][number],), direct=False)
        return tuple(self.back.brought.values())

    def _sum(self, owner: int, after: tuple[int, ...] = ()) -> int:
        """Sum own and arrived gradients of an owner's rows, in the order of ranks. Returns the last
        step."""
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
                    parts.append(Region("own", me, *rows, 0, self.attention.kv_cols))
            out = Region("dkv", me, *rows, 0, self.attention.kv_cols)
            if owner != me:
                out = world.leaving(me, owner, *rows, summed=True)
            terms = tuple(share.terms for share in shares)
            label = f"sum {rows[0]}:{rows[1]}" + f" for {owner}" * (owner != me)
            total = Reduction(tuple(parts), terms, out)
            self.add(Step(total, "compute0", label, waits, after=after))
            waits, after = (), ()
        return len(self.steps) - 1


def refusal(problem: AttentionProblem, schedule: Schedule) -> str:
    """Why a schedule cannot serve attention; empty if it can."""
    name, why = f"schedule {schedule}", ""
    if schedule.own or schedule.sums_in_place or schedule.grouping == "tiled":
        why = "attention gathers rows, in steps of a library's calls"
    elif schedule.dims == 2:
        why = "attention needs whole rows of keys"
    elif schedule.mover == "collective":
        why = "no collective brings each rank only the rows that it attends to"
    elif schedule.uniform and (schedule.grouping, schedule.pieces) != ("fused", 1):
        why = "the own rows are all there before the first piece is"
    elif problem.hosts > 1 and (schedule.pull or schedule.grouping == "ring"):
        does = "read memory of their peers (pull)" if schedule.pull else "pass rows on (ring)"
        why = f"ranks {does}, which no rank can do between hosts"
    return why and f"{name}: {why}; take growing, shard-overlap, hetero-fused-1d or serial"


@paused()
def attention_plans(
    problem: AttentionProblem,
    schedule: Schedule,
    ranks: Sequence[int] | None = None,
    staging_bytes: int | None = None,
) -> list[Plan]:
    """The Plans of ``ranks``, by default of all ranks.

    ``staging_bytes`` caps the memory in which pieces land.

    Raises:
        ValueError: the schedule cannot serve attention, or the cap is too small for the largest
            step.
    """
    if why := refusal(problem, schedule):
        raise ValueError(why)
    if schedule.grouping == "ring":
        problem = replace(problem, ring=True)
    words = WordAllocator(problem.world)
    builders = [Builder(problem, rank) for rank in ranks or range(problem.world)]
    if problem.backward:
        back = GradientWorld(problem, schedule, words, staging_bytes)
        return [GradientStage(back, one).plan() for one in builders]
    world = AttentionWorld(problem, schedule, words, staging_bytes)
    return [AttentionStage(world, one).plan() for one in builders]
