"""Signals of all ranks, and the orders of steps that they impose.

Rule 1: every signal has one poster, one waiter and one word, which is cleared in time. An order of
steps is one that all ranks can follow, or a relation that holds in every interleaving.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ficco.plan.model import Signal
from ficco.proof.columns import Bools, Claim, Ints, PlanError, bools, demand, ints, unzipped
from ficco.proof.steps import Steps


class Uses(NamedTuple):
    """All posts, all waits or all clears of signals."""

    signals: list[Signal]
    step: Ints
    which: Ints  # index among all distinct signals
    word: Ints  # index among the used words of all ranks

    def who(self, index: int) -> str:
        return f"signal {self.signals[index].name}"


class SignalColumns:
    """The signals of all ranks, and which steps use their words.

    Attributes:
        signal: the fields of all distinct signals as columns.
        word_of, word_at: by number of each used word, its rank, and its index among that rank's
            words.
        posts, waits, clears: uses of the words.
        poster, waiter, clearer: by word, the step that posts, waits for or clears it.
        released: by word, whether it hands a slot over.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        uses = self.posts, self.waits, self.clears = self._uses()
        self.poster, self.waiter, self.clearer = map(self._step_by_word, uses)
        self.released = self.word_at < steps.world
        self._paired()
        self._same()
        self._at_home()

    def _uses(self) -> tuple[Uses, Uses, Uses]:
        """All posts, all waits and all clears."""
        steps = self.steps
        columns = steps.of.posts, steps.of.waits, steps.of.clears
        signals, users = zip(*map(steps.held, columns), strict=True)
        every = list(chain.from_iterable(signals))
        # The steps that post, wait for and clear a signal usually hold the same tuple. Each of a
        # million tuples is read once, in the order of their addresses.
        _, first, which = np.unique(ints(map(id, every)), return_index=True, return_inverse=True)
        self.signal = unzipped([every[index] for index in first.tolist()], Signal)
        word, waiter = ints(self.signal.word)[which], ints(self.signal.waiter)[which]
        inside = (word >= 0) & (word < steps.words) & (waiter >= 0) & (waiter < steps.world)
        demand(inside, lambda i: f"signal {every[i].name}", "has its word outside the pads")
        word += waiter * steps.words
        used, word = np.unique(word, return_inverse=True)
        self.word_of, self.word_at = np.divmod(used, max(steps.words, 1))
        ends = np.cumsum([len(column) for column in signals])
        of_uses = (np.split(column, ends[:-1]) for column in (which, word))
        posts, waits, clears = map(Uses, signals, users, *of_uses)
        return posts, waits, clears

    def _step_by_word(self, uses: Uses) -> Ints:
        """The step that uses each word, -1 if none does."""
        if len(uses.word) and (times := np.bincount(uses.word)).max() > 1:
            first, second = np.flatnonzero(uses.word == times.argmax())[:2]
            names = " and ".join(self.steps.name(int(uses.step[use])) for use in (first, second))
            raise PlanError(f"{uses.who(first)} has its word used twice, at {names}")
        table = np.full(len(self.word_of), -1)
        table[uses.word] = uses.step
        return table

    def _paired(self) -> None:
        """Check that posted words, and no others, are waited for and cleared."""
        posts, waits, clears = self.posts, self.waits, self.clears
        dirty = "so that its word stays dirty"
        demand(self.poster[waits.word] >= 0, waits.who, "is waited for and never posted")
        unread = self.waiter[posts.word] >= 0
        demand(unread, posts.who, f"is posted and never waited for, {dirty}")
        demand(self.clearer[posts.word] >= 0, posts.who, f"is never cleared, {dirty}")
        unread = self.waiter[clears.word] >= 0
        demand(unread, clears.who, "is cleared, and nobody waits for it")

    def _same(self) -> None:
        """Check that all uses of a word name the same signal."""
        posts = self.posts
        index = np.empty(len(self.word_of), np.int64)
        index[posts.word] = np.arange(len(posts.word))
        for uses in (self.waits, self.clears):
            posted = index[uses.word]
            for use in np.flatnonzero(posts.which[posted] != uses.which).tolist():
                one, two = posts.signals[posted[use]], uses.signals[use]
                if one != two:
                    raise PlanError(f"signal {two.name} shares its word with {one.name}")

    def _at_home(self) -> None:
        """Check that a signal's ranks use it, and that its word rests at the value of its kind."""
        steps, posts = self.steps, self.posts
        waiter, word = self.word_of[posts.word], self.word_at[posts.word]
        own = steps.rank[posts.step] == ints(self.signal.poster)[posts.which]
        own &= steps.rank[self.waiter[posts.word]] == waiter
        own &= steps.rank[self.clearer[posts.word]] == waiter
        demand(own, posts.who, "is used by another rank than it says")
        near = steps.host[steps.rank[posts.step]] == steps.host[waiter]
        demand(near | (word >= steps.own_words), posts.who, "is for a rank of another host")
        # Words that rest at 1 have the same poster whatever the schedule; the others rest at 0.
        released = bools(map("released".__eq__, self.signal.kind))[posts.which]
        rests = np.where(released, word == steps.rank[posts.step], word >= steps.world)
        demand(rests, posts.who, "has a word that rests at another value")

    def claims(self) -> list[Claim]:
        """A word is cleared after it was waited for, and posted again after it was cleared."""
        posts, clears = self.posts, self.clears
        handed = np.flatnonzero(self.released[posts.word])
        again = self.clearer[posts.word[handed]], posts.step[handed]
        return [
            Claim(
                self.waiter[clears.word],
                clears.step,
                clears.who,
                "may be cleared before it was waited for",
            ),
            Claim(*again, lambda i: posts.who(handed[i]), "may be posted before it is cleared"),
        ]


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
