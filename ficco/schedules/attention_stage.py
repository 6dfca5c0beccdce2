"""One rank's steps of attention: those of a gather, whose rows are attended to.

The own rows come first, while the first pieces travel. Partial results of queries are merged in
float32 after the last group that adds to them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from ficco.plan.model import Attending, Attendings, Region, Signal, Step, Transfer
from ficco.problems.attention import AttentionProblem, KeyGather
from ficco.problems.mask import FORWARD_PRODUCTS, Rectangle, Span, merged
from ficco.problems.specification import MERGE, SUMS
from ficco.schedules.builder import Builder, WordAllocator
from ficco.schedules.exchange import Item
from ficco.schedules.gather import OWN, GatherStage, GatherWorld
from ficco.schedules.groups import Unit, cut
from ficco.schedules.space import Schedule


class AttentionWorld(GatherWorld):
    """Buffers and signals of attention, or of its backward, the same on all ranks.

    Attributes:
        function: name of the function that merges partial results; empty if they are one sum.
    """

    problem: KeyGather

    def __init__(
        self, problem: AttentionProblem, schedule: Schedule, words: WordAllocator, cap: int | None
    ) -> None:
        self.asked, whole = problem, problem.specification
        q, kv, *_ = whole.operands
        operands = q, kv, whole.results[0]
        # A tail cuts the queries of the last group, and no keys.
        super().__init__(problem.keys, replace(schedule, tail=1), words, cap, operands)
        self.schedule = schedule
        attention, wide = whole.attentions[0], SUMS[problem.dtype]
        merges = attention.out != self.out.holds
        shapes, holds = self.out.shapes, {"holds": attention.out, "dtype": wide}
        self.product = self.buffer("parts" if merges else "sum", self.out, shapes, "local", **holds)
        self.function = MERGE if merges else ""
        #: That the call of a rank that copies nothing to another has begun.
        self.begins = words.block(int(problem.ring))

    # In a ring, rows go from each rank to the next one, and on from there.

    def carrier(self, receiver: int, owner: int) -> int:
        return (receiver - 1) % self.world if self.asked.ring else super().carrier(receiver, owner)

    def gives(self, src: int, dst: int) -> bool:
        return super().gives(src, dst) and self.carrier(dst, src) == src

    def begun(self, poster: int, waiter: int) -> Signal:
        if not self.asked.ring:
            return super().begun(poster, waiter)
        return self.begins.signal("begun", poster, waiter)


class AttentionStage(GatherStage):
    """One rank's steps. The own rows, each group and the slices of the last one take turns on the
    compute lanes; rows are merged on the lane of what completes them. The queries of the last group
    are cut as ``tail`` says, so that little is left to merge after its last step (query-split
    attention, FlashOverlap)."""

    world: AttentionWorld
    problem: KeyGather

    #: Whether some queries can attend to a group before others do.
    cuts_queries = True
    #: Of each pair of a query and a key.
    products_a_pair = FORWARD_PRODUCTS

    def __init__(self, world: AttentionWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.asked = world.asked

    def _turns(self) -> list[list[Item]]:
        if not self.asked.ring or not self.groups:
            return super()._turns()
        target = self._next_rank()
        # The own rows go to the next rank, and so do those that come, except its own.
        own = chain.from_iterable(self.traffic.leaving([target]))
        turns = self.traffic.coming(peer for peer in self.mine.set_of if peer != target)
        return [[*own, *chain.from_iterable(turns[:1])], *turns[1:]]

    def _copy(self, group: int, items: list[Item]) -> None:
        if not self.asked.ring:
            super()._copy(group, items)
            return
        target = self._next_rank()
        for peer, number, _ in items:
            owner = self.me if peer == target else peer
            if owner != self.me:  # arriving rows are for the next rank and for this one
                label = f"{owner}.{number} is here"
                self.traffic.hear(owner, number, self.lane_of[target], label)
            self.traffic.send(target, number, owner=owner)

    def _next_rank(self) -> int:
        return (self.me + 1) % self.asked.world

    def _own_is_separate(self) -> bool:
        return not self.schedule.uniform and self.asked.rows > 0

    def _multiply_own(self) -> None:
        super()._multiply_own()
        self._round("compute0", OWN)

    def _compute_lane(self, group: int, units: list[Unit]) -> str:
        return self._lane(group)

    def _lane(self, group: int, number: int = 0) -> str:
        """Groups take turns, the own rows first, and so do slices of queries."""
        turn = group + self._own_is_separate() + number
        return self.compute_lanes[turn % len(self.compute_lanes)]

    def _work(self, group: int) -> Attendings | None:
        slices = self.slices(group)  # of several slices each is a step of its own
        attends = self.attends_of(group, slices[0]) if len(slices) == 1 else ()
        return Attendings(attends) if attends else None

    def _round(self, lane: str, group: int) -> None:
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

    def slices(self, group: int) -> list[Span]:
        """The queries that attend to a group, as they are cut."""
        ends = [end for run in self.runs[group] for end in run.queries] or [0]
        first, last = min(ends), max(ends)
        if group in (OWN, *range(len(self.groups) - 1)) or not self.cuts_queries:
            return [(first, last)]
        parts = cut(last - first, self.schedule.tail) or [(0, 0)]
        return [(first + a, first + b) for a, b in parts]

    def _merge(self, lane: str, group: int, queries: Span) -> None:
        """Merge the queries that a group completes, after all steps that attend for them."""
        for first, last in both(self.last[group], queries):
            attending = {
                step.lane: index
                for index, step in enumerate(self.steps)
                if isinstance(step.work, Attendings) and step.work.meets(first, last)
            }
            after = tuple(index for other, index in attending.items() if other != lane)
            src = Region(self.product, self.me, first, last, 0, self.asked.q_cols)
            dst, function = src._replace(buffer=self.world.out.name), self.world.function
            label = function or f"{src.buffer}>{dst.buffer}"
            move = Transfer(src, dst, function=function)
            self.add(Step(move, lane, label, after=after))

    @cached_property
    def runs(self) -> dict[int, list[KeyRun]]:
        """By group, in order, the rows of KV and the queries that attend to them."""
        runs_of = {}
        if self._own_is_separate():
            own = self._run(self._own_rows(), *self.world.block(self.me, self.me))
            runs_of[OWN] = [own] if own else []
        for group, units in enumerate(self.groups):
            runs_of[group] = self._runs_of(units)
        return runs_of

    def _runs_of(self, units: list[Unit]) -> list[KeyRun]:
        """Rows that follow each other, where they are and as they land, are one run."""
        spans: list[tuple[Region, int, int]] = []
        for unit in sorted(units):
            region = self.regions[unit.peer][unit.ordinal]
            first, last = self.mine.rows(unit.peer)[unit.ordinal]
            if spans and spans[-1][0].row_stop == region.row and spans[-1][2] == first:
                before, first, _ = spans.pop()
                region = before._replace(row_stop=region.row_stop)
            spans.append((region, first, last))
        return [run for span in spans if (run := self._run(*span))]

    def _run(self, kv: Region, first: int, last: int) -> KeyRun | None:
        rectangles = self.asked.rectangles(self.me, (0, self.asked.rows), (first, last))
        if not rectangles:
            return None
        queries = min(one.q for one in rectangles), max(one.q_stop for one in rectangles)
        return KeyRun(kv, first, queries, rectangles)

    @cached_property
    def last(self) -> dict[int, list[Span]]:
        """By group, the queries of which it adds the last part."""
        completed, over = {}, list[Span]()
        for group, runs in reversed(self.runs.items()):
            spans = [span for run in runs for span in _without(run.queries, over)]
            completed[group] = merged(spans)
            over = merged(over + spans)
        return completed

    def attends_of(self, group: int, queries: Span) -> tuple[Attending, ...]:
        """Attention of queries to the rows of a group."""
        # Of a sum all queries attend to the first rows: to the own ones, or to all rows at once.
        begun = next((g for g, runs in self.runs.items() if runs), OWN)
        sums, attends = not self.world.function, []
        for number, run in enumerate(self.runs[group]):
            (rows,) = both([run.queries], queries) or [(queries[0], queries[0])]
            if rows != run.queries:
                keys = run.first, run.first + run.kv.rows
                calls = self.asked.rectangles(self.me, rows, keys)
                run = run._replace(queries=rows, calls=calls)
            adds = sums and (group != begun or number > 0)
            attends.append(self._attending(run, adds))
        return tuple(attends)

    def _attending(self, run: KeyRun, adds: bool) -> Attending:
        q = Region("q", self.me, *run.queries, 0, self.asked.q_cols)
        out = q._replace(buffer=self.product)
        pairs, heads = sum(one.pairs for one in run.calls), self.asked.batch * self.asked.heads
        calls = tuple(one.call(heads, self.asked.size, self.products_a_pair) for one in run.calls)
        return Attending(q, run.kv, out, run.first, pairs, adds, calls=calls)


class KeyRun(NamedTuple):
    """Consecutive rows of KV that one step attends to.

    Attributes:
        kv: region of the rows.
        first: number of the first row where it lands.
        queries: from the first to the last own row that attends to any of the rows.
        calls: rectangles of queries and rows.
    """

    kv: Region
    first: int
    queries: Span
    calls: tuple[Rectangle, ...]


def both(spans: list[Span], other: Span) -> list[Span]:
    """Intersections of spans with another span."""
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
