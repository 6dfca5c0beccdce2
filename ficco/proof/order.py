"""Orders of steps: one that all ranks can follow, and relations that hold in every interleaving."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ficco.proof.columns import Bools, Claim, Ints, PlanError, demand
from ficco.proof.signals import SignalColumns
from ficco.proof.steps import Steps


class Order:
    """Steps of all ranks, numbered consecutively rank by rank, and their dependencies.

    Attributes:
        source, target: pairs of steps; the second waits for the first.
        ran: the steps in an order of execution, with each rank's plan as one queue.
        stuck: the first step that cannot run, of each queue with such a step.
        when: index of each step in ``ran``.
    """

    def __init__(self, rank: Ints, lane: Ints, source: Ints, target: Ints) -> None:
        """``rank`` and ``lane`` of every step."""
        self.lane, self.source, self.target = lane, source, target
        self._waits: dict[int, list[int]] = {}  # by step, the steps that it waits for
        for one, two in zip(source.tolist(), target.tolist(), strict=True):
            self._waits.setdefault(two, []).append(one)
        self.ran, self.stuck = self.run(rank)
        self.when = np.full(len(lane), -1)
        self.when[self.ran] = np.arange(len(self.ran))

    def run(self, queue: Ints) -> tuple[list[int], list[int]]:
        """Run queues as far as possible; return the executed steps, and the stuck ones."""
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
        """Whether each first step ends before the second starts, or equals it, in every
        interleaving.

        The vector clock of a lane has, for every lane, 1 + the latest step known to be over, or 0.
        It changes only when a step waits for a step of another lane, whose clock was saved.
        """
        by_second = np.argsort(second, kind="stable")
        first, second = first[by_second], second[by_second]
        queried, begin = np.unique(second, return_index=True)
        begins = begin.tolist()
        parts = map(slice, begins, [*begins[1:], len(second)])
        questions = dict(zip(queried.tolist(), parts, strict=True))
        lane_of_first = self.lane[first]
        answers = np.zeros(len(first), np.bool_)

        relevant = np.unique(np.concatenate([self.source, self.target, queried]))
        lanes, to_come = self.lane.tolist(), Counter(self.source.tolist())
        # int32, because copies of clocks take most of the time.
        clocks: list[Any] = list(np.zeros((max(lanes, default=-1) + 1,) * 2, np.int32))
        saved: dict[int, Any] = {}  # clocks by step, for later waits
        in_use = [False] * len(clocks)  # a saved clock must not change
        for step in relevant[np.argsort(self.when[relevant])].tolist():
            lane = lanes[step]
            for other in self._waits.get(step, ()):
                to_come[other] -= 1
                clock = saved[other] if to_come[other] else saved.pop(other)
                if clocks[lane][lanes[other]] <= other:
                    if in_use[lane]:
                        clocks[lane], in_use[lane] = clocks[lane].copy(), False
                    np.maximum(clocks[lane], clock, out=clocks[lane])
                    clocks[lane][lanes[other]] = other + 1
            if to_come[step]:
                saved[step], in_use[lane] = clocks[lane], True
            if step in questions:
                these = questions[step]
                answers[these] = clocks[lane][lane_of_first[these]] > first[these]
        holds = np.empty(len(answers), np.bool_)
        holds[by_second] = answers | ((self.lane[first] == self.lane[second]) & (first <= second))
        return holds


def order_steps(steps: Steps, signals: SignalColumns) -> Order:
    """Order all steps by their dependencies. Checks that no step waits forever."""
    indices, step = steps.held(steps.of.after)
    after = np.array(indices, np.int64)
    exists = (after >= 0) & (after < np.diff(steps.start)[steps.rank[step]])
    demand(exists, steps.by_step(step), "comes after a step that is not there")
    data = ~signals.released[signals.waits.word]
    posters = signals.poster[signals.waits.word[data]]
    source = np.concatenate([posters, after + steps.start[steps.rank[step]]])
    target = np.concatenate([signals.waits.step[data], step])
    order = Order(steps.rank, steps.lane, source, target)
    if stuck := order.stuck:
        circle = order.run(steps.lane)[1]  # steps that are stuck even with a queue for each lane
        why = "wait for each other in a circle"
        if not circle:
            why = "deadlock where lanes share one hardware queue"
        raise PlanError(f"steps {why}: {'; '.join(map(steps.name, (circle or stuck)[:4]))}")
    return order


def settle(claims: list[Claim], order: Order) -> None:
    """Prove all claims together."""
    first = np.concatenate([claim.first for claim in claims])
    second = np.concatenate([claim.second for claim in claims])
    holds = order.holds(first, second)
    stop = np.cumsum([len(claim.first) for claim in claims])
    for claim, part in zip(claims, np.split(holds, stop[:-1]), strict=True):
        demand(part, claim.who, claim.why)
