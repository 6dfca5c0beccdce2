"""One rank's steps of attention: those of a gather, whose rows are attended to.

The own rows come first, while the first pieces travel. What groups of pieces give to queries is
merged, in float32, once no later group gives them anything.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from ficco.plan.model import Attending, Region, Signal, Step, Transfer
from ficco.problems.attention import AttentionProblem, KeyGather
from ficco.problems.mask import FORWARD_PRODUCTS, Rectangle, Span, merged
from ficco.problems.specification import MERGE, SUMS
from ficco.schedules.builder import Builder, WordAllocator
from ficco.schedules.gather import OWN, GatherStage, GatherWorld
from ficco.schedules.groups import Unit, cut
from ficco.schedules.space import Schedule


class AttentionWorld(GatherWorld):
    """What all ranks know of attention, or of its backward.

    Attributes:
        function: what makes the result of what attends leave.
    """

    problem: KeyGather

    def __init__(
        self, asked: AttentionProblem, schedule: Schedule, words: WordAllocator, cap: int | None
    ) -> None:
        self.asked, whole = asked, asked.specification
        q, kv, *_ = whole.operands
        operands = q, kv, whole.results[0]
        # A tail cuts the queries of the last group, and no keys.
        super().__init__(asked.keys, replace(schedule, tail=1), words, cap, operands)
        self.schedule = schedule
        made, wide = whole.attentions[0], SUMS[asked.dtype]
        merges = made.out != self.out.holds
        shapes, holds = self.out.shapes, {"holds": made.out, "dtype": wide}
        self.product = self.buffer("parts" if merges else "sum", self.out, shapes, "local", **holds)
        self.function = MERGE if merges else ""
        #: That the call of a rank that copies nothing to another has begun.
        self.begins = words.block(int(asked.ring))

    def carrier(self, receiver: int, sender: int) -> int:
        if not self.asked.ring:
            return super().carrier(receiver, sender)
        return (receiver - 1) % self.world

    def gives(self, src: int, dst: int) -> bool:
        """Whether a rank copies rows of KV to another."""
        return self.carrier(dst, src) == src and self.problem.block(src, dst) > 0


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
        self.passed: dict[Signal, tuple[int, int]] = {}  # in a ring, for the lane of copies

    # A ring: the own rows go to the next rank, and what comes from the one before goes on to it.

    def _pushes(self) -> list[list[Step]]:
        if not self.asked.ring:
            return super()._pushes()
        copies: list[list[Step]] = [[] for _ in self.groups]
        target = (self.me + 1) % self.asked.world
        landing, lane = self.world.landing[target], self.lane_of.get(target, "")

        def copy(source: int, ordinal: int, src: Region) -> Step:
            dst, name = landing.regions(source)[ordinal], f"{source}.{ordinal}"
            posts = (self.world.of_units("ready", source, target)[ordinal],)
            move, mover = Transfer(src, dst), self.schedule.mover
            return Step("copy", lane, f"{name}>{target}", (), posts, transfer=move, mover=mover)

        for ordinal, src in enumerate(self._sources(self.me, landing.arrivals) if copies else ()):
            copies[0].append(copy(self.me, ordinal, src))
        for source in self.mine.set_of:
            if source == target:  # which has these rows
                continue
            heard = self.world.of_units("ready", source, self.me)
            for unit, signal in zip(self.mine.units(source), heard, strict=True):
                self.passed[signal] = source, unit.ordinal
                self.ready[unit.group].remove(signal)
                here = Step("sync", lane, f"{source}.{unit.ordinal} is here", (signal,))
                onward = copy(source, unit.ordinal, self.regions[source][unit.ordinal])
                copies[unit.group] += [here, onward]
        return copies

    def _copy(self, group: int, steps: list[Step]) -> None:
        if not self.passed:
            super()._copy(group, steps)
            return
        for step in steps:  # what comes is for the next rank and for this one
            index = self.add(step)
            if step.op == "sync":
                self.brought[self.passed[step.waits[0]]] = index

    def _begun(self) -> dict[int, tuple[Signal, ...]]:
        if not self.asked.ring:
            return super()._begun()
        return {
            peer: ()
            if self.world.gives(self.me, peer)
            else (self.world.begins.signal("begun", self.me, peer),)
            for peer in self.peers
        }

    def silent(self) -> tuple[Signal, ...]:
        if not self.asked.ring:
            return super().silent()
        return tuple(
            self.world.begins.signal("begun", peer, self.me)
            for peer in self.peers
            if not self.world.gives(peer, self.me)
        )

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

    def _work(self, group: int, lane: str, label: str) -> Step:
        """What is done once a group is there; of several slices each is a step of its own."""
        slices = self.slices(group)
        attends = self.attends_of(group, slices[0]) if len(slices) == 1 else ()
        return Step("attend" if attends else "sync", lane, label, attends=attends)

    def _round(self, lane: str, group: int) -> None:
        slices, there = self.slices(group), len(self.steps) - 1
        if len(slices) == 1:
            self._merge(lane, group, slices[0])
            return
        for number, queries in enumerate(slices):
            turn, label = self._lane(group, number), f"queries {queries[0]}"
            after = (there,) if turn != lane else ()
            attends = self.attends_of(group, queries)
            self.add(Step("attend", turn, label, after=after, attends=attends))
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
        """Merge what of some queries a group completes, after all that attended for them."""
        for first, last in both(self.last[group], queries):
            made = {
                step.lane: index
                for index, step in enumerate(self.steps)
                if any(one.out.row < last and first < one.out.row_stop for one in step.attends)
            }
            after = tuple(index for other, index in made.items() if other != lane)
            src = Region(self.product, self.me, first, last, 0, self.asked.q_cols)
            dst, function = src._replace(buffer=self.world.out.name), self.world.function
            label = function or f"{src.buffer}>{dst.buffer}"
            move = Transfer(src, dst, function=function)
            self.add(Step("place", lane, label, after=after, transfer=move))

    @cached_property
    def runs(self) -> dict[int, list[KeyRun]]:
        """By group, in their order, the rows of KV and the queries that attend to them."""
        found = {}
        if self._own_is_separate():
            own = self._run(self._own_rows(), *self._block(self.me, self.me))
            found[OWN] = [own] if own else []
        for group, units in enumerate(self.groups):
            found[group] = self._runs_of(units)
        return found

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
        found = self.asked.rectangles(self.me, (0, self.asked.rows), (first, last))
        if not found:
            return None
        queries = min(one.q for one in found), max(one.q_stop for one in found)
        return KeyRun(kv, first, queries, found)

    @cached_property
    def last(self) -> dict[int, list[Span]]:
        """By group, the queries to which it is the last to add."""
        found, over = {}, list[Span]()
        for group, runs in reversed(self.runs.items()):
            spans = [span for run in runs for span in _without(run.queries, over)]
            found[group] = merged(spans)
            over = merged(over + spans)
        return found

    def attends_of(self, group: int, queries: Span) -> tuple[Attending, ...]:
        """What some queries do with a group."""
        # Of a sum all queries attend to the first rows: to the own ones, or to all rows at once.
        begun = next((g for g, runs in self.runs.items() if runs), OWN)
        sums, found = not self.world.function, []
        for number, run in enumerate(self.runs[group]):
            (rows,) = both([run.queries], queries) or [(queries[0], queries[0])]
            if rows != run.queries:
                keys = run.first, run.first + run.kv.rows
                calls = self.asked.rectangles(self.me, rows, keys)
                run = run._replace(queries=rows, calls=calls)
            adds = sums and (group != begun or number > 0)
            found.append(self._attending(run, adds))
        return tuple(found)

    def _attending(self, run: KeyRun, adds: bool) -> Attending:
        q = Region("q", self.me, *run.queries, 0, self.asked.q_cols)
        out = q._replace(buffer=self.product)
        pairs, heads = sum(one.pairs for one in run.calls), self.asked.batch * self.asked.heads
        calls = tuple(one.call(heads, self.asked.size, self.products_a_pair) for one in run.calls)
        return Attending(q, run.kv, out, run.first, pairs, adds, calls=calls)


class KeyRun(NamedTuple):
    """Rows of KV that follow each other and are attended to together.

    Attributes:
        kv: where they are.
        first: the number of the first where it lands.
        queries: from the first to the last own row that attends to any of them.
        calls: what they attend to of the rows.
    """

    kv: Region
    first: int
    queries: Span
    calls: tuple[Rectangle, ...]


def both(spans: list[Span], other: Span) -> list[Span]:
    """What spans have in common with another."""
    common = [(max(first, other[0]), min(last, other[1])) for first, last in spans]
    return [(first, last) for first, last in common if first < last]


def _without(span: Span, others: list[Span]) -> list[Span]:
    """What is left of a span without others, which are in rising order."""
    left, (first, last) = list[Span](), span
    for begin, end in others:
        if first < min(begin, last):
            left.append((first, min(begin, last)))
        first = max(first, end)
    return [*left, (first, last)] if first < last else left
