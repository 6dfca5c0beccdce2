"""Rule 1: every signal has one poster, one waiter and one word, which is cleared in time."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np

from ficco.plan.model import Signal
from ficco.proof.columns import Claim, Ints, PlanError, bools, demand, ints, unzipped
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
