"""The order of steps: one that all ranks can follow, and relations true in every interleaving."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

import numpy as np

from ficco.plan.check.columns import Bools, Ints


class Order:
    """Steps of all ranks, numbered consecutively rank by rank, and what they wait for.

    Attributes:
        source, target: pairs of a step and one that waits for it, sorted by the latter.
        ran, stuck: the steps in an order in which they can run with each rank's plan as one queue,
            and the first step that cannot run of each queue that is stuck.
        when: the place of each step among those that ran.
    """

    def __init__(self, rank: Ints, lane: Ints, source: Ints, target: Ints) -> None:
        """``rank`` and ``lane`` of every step. Lanes are numbered rank by rank, too."""
        self.rank, self.lane = rank, lane
        self.lanes = int(lane.max(initial=-1)) + 1
        rank_of_lane = np.zeros(self.lanes, np.int64)
        rank_of_lane[lane] = rank
        ranks = np.arange(rank.max(initial=-1) + 2)
        self.lanes_of_rank = np.searchsorted(rank_of_lane, ranks)  # first lanes, and the end
        by_target = np.argsort(target, kind="stable")
        self.source, self.target = source[by_target], target[by_target]
        self.ran, self.stuck = self.run(rank)
        self.when = np.full(len(lane), -1)
        self.when[self.ran] = np.arange(len(self.ran))

    def run(self, queue: Ints) -> tuple[list[int], list[int]]:
        """Run queues as far as they go: the steps that ran, and the stuck one of each queue."""
        steps = [np.flatnonzero(queue == q).tolist() for q in range(queue.max(initial=-1) + 1)]
        # Waits for earlier steps of the same queue always hold.
        apart = (queue[self.source] != queue[self.target]) | (self.source >= self.target)
        source, target = self.source[apart], self.target[apart]
        by_queue = np.argsort(queue[target], kind="stable")
        source, target = source[by_queue], target[by_queue]
        waits = np.searchsorted(queue[target], np.arange(len(steps) + 1)).tolist()
        ends, end = waits[1:], len(queue)
        sources, origins, targets = source.tolist(), queue[source].tolist(), target.tolist()
        reached = [0] * len(steps)  # by queue, the step that it has reached and not run
        order: list[int] = []
        moved = True
        while moved:
            moved = False
            for number, last in enumerate(ends):
                wait = waits[number]
                while wait < last and sources[wait] < reached[origins[wait]]:
                    wait += 1
                waits[number] = wait
                begin, stop = reached[number], targets[wait] if wait < last else end
                if begin < stop:
                    ran = steps[number]
                    order += ran[bisect_left(ran, begin) : bisect_left(ran, stop)]
                    reached[number], moved = stop, True
        stuck = zip(steps, reached, strict=True)
        return order, [ran[bisect_left(ran, stop)] for ran, stop in stuck if stop < end]

    def holds(self, first: Ints, second: Ints) -> Bools:
        """Whether steps end before others start, or are the same, in every interleaving."""
        holds: Bools = (self.lane[first] == self.lane[second]) & (first <= second)
        left = np.flatnonzero(~holds)
        if len(left):
            holds[left] = self._by_clocks(first[left], second[left])
        return holds

    def _by_clocks(self, first: Ints, second: Ints) -> Bools:
        """Whether steps end before others on other lanes start, in every interleaving.

        The clock of a lane holds for every lane the latest step known to be over, as its number
        plus 1, or 0. It changes only where a step waits for one of another lane, whose clock was
        kept.
        """
        by_second = np.argsort(second, kind="stable")
        first, second = first[by_second], second[by_second]
        asked, begin = np.unique(second, return_index=True)
        ends = zip(begin.tolist(), [*begin[1:].tolist(), len(second)], strict=True)
        questions = dict(zip(asked.tolist(), ends, strict=True))
        lane_of_first = self.lane[first]
        answers = np.zeros(len(first), np.bool_)

        source, reader = self._telling(asked)
        joins: dict[int, list[int]] = {}  # by step, those whose clocks it merges
        for one, two in zip(source.tolist(), reader.tolist(), strict=True):
            joins.setdefault(two, []).append(one)
        told = np.unique(np.concatenate([source, reader, asked]))
        lanes, to_come = self.lane.tolist(), Counter(source.tolist())
        clocks = list(np.zeros((self.lanes, self.lanes), np.int64))
        kept: dict[int, Ints] = {}  # by step, for those that will wait for it
        in_use = [False] * len(clocks)  # a kept clock must not change
        for step in told[np.argsort(self.when[told])].tolist():
            lane = lanes[step]
            for other in joins.get(step, ()):
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
                these = slice(*questions[step])
                answers[these] = clocks[lane][lane_of_first[these]] > first[these]
        holds = np.empty(len(answers), np.bool_)
        holds[by_second] = answers
        return holds

    def _telling(self, asked: Ints) -> tuple[Ints, Ints]:
        """The waits between lanes that clocks need: steps waited for, and the first clock read
        after each wait.

        Clocks are read at steps that others wait for or that questions are about. Of the waits of a
        lane up to such a step, only the latest for each other lane counts: it implies the earlier.
        """
        steps, lanes = len(self.lane), self.lanes
        read = np.unique(np.concatenate([self.source, asked]))
        read = np.sort(self.lane[read] * steps + read)
        wait = self.lane[self.target] * steps + self.target
        reader = np.append(read, -1)[np.searchsorted(read, wait)]
        told = np.flatnonzero(reader // steps == self.lane[self.target])
        source, reader = self.source[told], reader[told] % steps
        pair = (reader * lanes + self.lane[source]) * steps + source
        pair = np.sort(pair)
        pair = pair[np.diff(pair // steps, append=-1) != 0]
        return pair % steps, pair // steps // lanes
