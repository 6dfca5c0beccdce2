"""One rank's steps of attention: those of a gather, whose rows are attended to.

The own rows come first, while the first pieces travel. What groups of pieces give to queries is
merged, in float32, once no later group gives them anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from ficco.attention.mask import Span, merged
from ficco.attention.problem import MERGE, SUMS, AttentionProblem, KeyGather
from ficco.plan.model import Attending, Region, Step, Transfer
from ficco.schedules.builder import Builder, WordAllocator
from ficco.schedules.gather import OWN, GatherStage, GatherWorld
from ficco.schedules.groups import Unit
from ficco.schedules.space import Schedule
from ficco.specification import Specification


class AttentionWorld(GatherWorld):
    """What all ranks know of attention, or of its backward, as ``whole`` specifies it.

    Attributes:
        function: what makes the result of what attends leave.
    """

    def __init__(
        self,
        asked: AttentionProblem,
        schedule: Schedule,
        words: WordAllocator,
        cap: int | None,
        whole: Specification,
    ) -> None:
        self.asked = asked
        super().__init__(asked.keys, schedule, words, cap, (*whole.operands[:2], whole.results[0]))
        made, wide = whole.attentions[0], SUMS[asked.dtype]
        merges = made.out != self.out.holds
        shapes, holds = self.out.shapes, {"holds": made.out, "dtype": wide}
        self.product = self.buffer("parts" if merges else "sum", self.out, shapes, "local", **holds)
        self.function = MERGE if merges else ""


class AttentionStage(GatherStage):
    """One rank's steps; those that attend are all on one lane."""

    world: AttentionWorld
    problem: KeyGather

    def __init__(self, world: AttentionWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.asked = world.asked
        self.compute_lanes = self.compute_lanes[:1]

    def _own_is_separate(self) -> bool:
        return not self.schedule.uniform and self.asked.rows > 0

    def _multiply_own(self) -> None:
        super()._multiply_own()
        self._round("compute0", OWN)

    def _compute_lane(self, group: int, units: list[Unit]) -> str:
        return self.compute_lanes[0]

    def _work(self, group: int, lane: str, label: str) -> Step:
        return Step("attend", lane, label, attends=tuple(self.attends[group]))

    def completed(self, group: int) -> Iterable[Span]:
        return self.last[group]

    def _round(self, lane: str, group: int) -> None:
        for first, last in self.completed(group):
            src = Region(self.product, self.me, first, last, 0, self.asked.q_cols)
            dst, function = src._replace(buffer=self.world.out.name), self.world.function
            label = function or f"{src.buffer}>{dst.buffer}"
            move = Transfer(src, dst, function=function)
            self.add(Step("place", lane, label, transfer=move))

    @cached_property
    def runs(self) -> dict[int, list[Run]]:
        """By group, in their order, the rows of KV and the queries that attend to them."""
        found = {}
        if self._own_is_separate():
            own = self._run(self._own_rows(), *self._block(self.me, self.me))
            found[OWN] = [own] if own else []
        for group, units in enumerate(self.groups):
            found[group] = self._runs_of(units)
        return found

    def _runs_of(self, units: list[Unit]) -> list[Run]:
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

    def _run(self, kv: Region, first: int, last: int) -> Run | None:
        found = self.asked.rectangles(self.me, (0, self.asked.rows), (first, last))
        if not found:
            return None
        queries = min(one.q for one in found), max(one.q_stop for one in found)
        return Run(kv, first, queries, sum(one.pairs for one in found))

    @cached_property
    def last(self) -> dict[int, list[Span]]:
        """By group, the queries to which it is the last to add."""
        found, over = {}, list[Span]()
        for group, runs in reversed(self.runs.items()):
            spans = [span for run in runs for span in _without(run.queries, over)]
            found[group] = merged(spans)
            over = merged(over + spans)
        return found

    @cached_property
    def attends(self) -> dict[int, list[Attending]]:
        """By group, what is attended to."""
        begun, found = False, {}
        for group, runs in self.runs.items():
            found[group] = list[Attending]()
            for run in runs:
                found[group].append(self._attending(run, begun))
                begun = True  # by all queries: to the own rows, or to all rows at once
        return found

    def _attending(self, run: Run, adds: bool) -> Attending:
        q = Region("q", self.me, *run.queries, 0, self.asked.q_cols)
        out = q._replace(buffer=self.product)
        return Attending(q, run.kv, out, run.first, run.pairs, adds)


class Run(NamedTuple):
    """Rows of KV that follow each other and are attended to together.

    Attributes:
        kv: where they are.
        first: the number of the first where it lands.
        queries: from the first to the last own row that attends to any of them.
        pairs: see :class:`Attending`.
    """

    kv: Region
    first: int
    queries: Span
    pairs: int


def _without(span: Span, others: list[Span]) -> list[Span]:
    """What is left of a span without others, which are in rising order."""
    left, (first, last) = list[Span](), span
    for begin, end in others:
        if first < min(begin, last):
            left.append((first, min(begin, last)))
        first = max(first, end)
    return [*left, (first, last)] if first < last else left
