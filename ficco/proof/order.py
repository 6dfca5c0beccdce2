"""The order of steps: one that all ranks can follow, and relations true in every interleaving."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ficco.proof.columns import Bools, Ints


class Order:
    """Steps of all ranks, numbered consecutively rank by rank, and what they wait for.

    Attributes:
        source, target: pairs of a step and one that waits for it.
        ran, stuck: the steps in an order in which they can run with each rank's plan as one queue,
            and the first step that cannot run of each queue that is stuck.
        when: the place of each step among those that ran.
    """

    def __init__(self, rank: Ints, lane: Ints, source: Ints, target: Ints) -> None:
        """``rank`` and ``lane`` of every step."""
        self.lane, self.source, self.target = lane, source, target
        self._waits: dict[int, list[int]] = {}  # by step, what it waits for
        for one, two in zip(source.tolist(), target.tolist(), strict=True):
            self._waits.setdefault(two, []).append(one)
        self.ran, self.stuck = self.run(rank)
        self.when = np.full(len(lane), -1)
        self.when[self.ran] = np.arange(len(self.ran))

    def run(self, queue: Ints) -> tuple[list[int], list[int]]:
        """Run queues as far as they go: the steps that ran, and the stuck one of each queue."""
        queues = [np.flatnonzero(queue == q).tolist() for q in range(queue.max(initial=-1) + 1)]
        reached, over = [0] * len(queues), bytearray(len(queue))
        order: list[int] = []
        before, waits = -1, self._waits
        while before < len(order):
            before = len(order)
            for number, steps in enumerate(queues):
                at = reached[number]
                while at < len(steps) and all(map(over.__getitem__, waits.get(steps[at], ()))):
                    over[steps[at]] = True
                    order.append(steps[at])
                    at += 1
                reached[number] = at
        stuck = zip(queues, reached, strict=True)
        return order, [steps[at] for steps, at in stuck if at < len(steps)]

    def holds(self, first: Ints, second: Ints) -> Bools:
        """Whether steps end before others start, or are the same, in every interleaving.

        The clock of a lane holds for every lane the latest step known to be over, as its number
        plus 1, or 0. It changes only where a step waits for one of another lane, whose clock was
        kept.
        """
        by_second = np.argsort(second, kind="stable")
        first, second = first[by_second], second[by_second]
        asked, begin = np.unique(second, return_index=True)
        begins = begin.tolist()
        parts = map(slice, begins, [*begins[1:], len(second)])
        questions = dict(zip(asked.tolist(), parts, strict=True))
        lane_of_first = self.lane[first]
        answers = np.zeros(len(first), np.bool_)

        told = np.unique(np.concatenate([self.source, self.target, asked]))
        lanes, to_come = self.lane.tolist(), Counter(self.source.tolist())
        # As narrow as numbers of steps allow: most of the time goes into copies of clocks.
        clocks: list[Any] = list(np.zeros((max(lanes, default=-1) + 1,) * 2, np.int32))
        kept: dict[int, Any] = {}  # by step, for those that will wait for it
        in_use = [False] * len(clocks)  # a kept clock must not change
        for step in told[np.argsort(self.when[told])].tolist():
            lane = lanes[step]
            for other in self._waits.get(step, ()):
                to_come[other] -= 1
                clock = kept[other] if to_come[other] else kept.pop(other)
                if clocks[lane][lanes[other]] <= other:
                    if in_use[lane]:
                        clocks[lane], in_use[lane] = clocks[lane].copy(), False
                    np.maximum(clocks[lane], clock, out=clocks[lane])
                    clocks[lane][lanes[other]] = other + 1
            if to_come[step]:
                kept[step], in_use[lane] = clocks[lane], True
            if step in questions:
                these = questions[step]
                answers[these] = clocks[lane][lane_of_first[these]] > first[these]
        holds = np.empty(len(answers), np.bool_)
        holds[by_second] = answers | ((self.lane[first] == self.lane[second]) & (first <= second))
        return holds
