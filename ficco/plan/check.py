"""The proof that the Plans of all ranks together compute the product, in any interleaving.

The ranks' steps are executed symbolically, each rank's whole plan as one queue in enqueue order
(streams may share a hardware queue). If that completes, no interleaving of the lanes deadlocks
either, since lanes only take order away. The execution is also a topological order of what happens
before what, and the rules are checked along it. Where a rule takes two steps to be in order, that
is a claim, and is proved for every interleaving: by what a lane has waited for, by way of a third
lane, or, for what these two leave, by vector clocks over the lanes. The rules:

1. every signal has one poster, one waiter, one word, and is cleared by its waiter, after the wait
   and before the word can be posted again;
2. whatever is read was written before, by the step that should have, and is not overwritten while
   it may still be read; a rank reaches no memory of a peer that is not symmetric;
3. every element of the product is written once, by products whose rows of A and of b belong
   together and that cover all that is summed over once, be it k or, where A is transposed, its
   rows, in any order; partial sums add up in a dtype that does not round them.
   Where products of ranks are summed, all who touch a sum say whose products are in it, no product
   is in it twice, and in the end all are;
4. calls compose: a rank touches the shared memory of a peer only after that peer has handed over
   its slot, and all who touch it do so before the peer hands the slot on. The call before and the
   call behind, whatever they are, obey the same rule, so that no pair of calls needs a proof of
   its own. What the peer's caller gave it is read only after the peer has begun this call.

The proof takes two things for granted of whoever runs a plan: its steps start after all steps of
the rank's previous call on the same slot, and what the caller enqueues behind the call starts
after all its steps.

Rows are known by two numbers. Where they leave (``a``, ``publish``, ``partial``) it is that of the
buffer; where they land (all others) it is that of the row among those which the rank gets, as in
:meth:`Problem.lands`. A step that takes rows from the ones to the others takes them from one block,
and goes from the one number to the other. Blocks that are summed have one number everywhere, that
of the row of the product.

Steps are numbered through, rank by rank. Regions, accesses and uses of signals are columns of
numbers, one array for each field: 64 ranks with 64 pieces make a million of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.plan.collector import paused
from ficco.plan.model import (
    SHARED_BUFFERS,
    Plan,
    Product,
    Reduction,
    Region,
    Signal,
    Step,
    Transfer,
)

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: Names the subject of a rule by its index.
Who = Callable[[int], str]

#: Buffers as the columns number them.
BUFFERS = ("a", "publish", "partial", "staging", "sum", "out", "gathered")
A, PUBLISH, PARTIAL, STAGING, SUM, OUT, GATHERED = range(len(BUFFERS))
LEAVING = (A, PUBLISH, PARTIAL)  # hold rows in the order of Problem.leaves
SHARED = tuple(map(BUFFERS.index, sorted(SHARED_BUFFERS)))

#: From which buffer to which a step may move: A on its way to the product, or the product.
GATHER_FLOWS = (
    (A, PUBLISH),
    (A, STAGING),
    (A, GATHERED),
    (PUBLISH, STAGING),
    (PUBLISH, GATHERED),
    (STAGING, GATHERED),
    (SUM, OUT),
)
SCATTER_FLOWS = (
    (PARTIAL, STAGING),
    (PUBLISH, STAGING),
    (STAGING, STAGING),
    (OUT, STAGING),
    (PARTIAL, OUT),
    (PUBLISH, OUT),
    (STAGING, OUT),
)

#: What a step holds: whether a transfer, whether products, whether a reduction.
HOLDS = {
    "copy": (True, False, False),
    "place": (True, False, False),
    "collective": (True, False, False),
    "matmul": (False, True, False),
    "reduce": (False, False, True),
    "sync": (False, False, False),
}


class PlanError(AssertionError):
    """A Plan breaks a rule. That is an error of ficco, never of its caller."""


def check(plans: Sequence[Plan]) -> None:
    """Prove the Plans of all ranks of a Problem, or raise :class:`PlanError`."""
    with paused():
        _Proof(plans).run()


class _Uses(NamedTuple):
    """All posts, all waits or all clears of signals."""

    signals: list[Signal]
    step: Ints
    which: Ints  # of all signals, each once
    word: Ints  # the words of all ranks numbered through, those that are used

    def who(self, index: int) -> str:
        return f"signal {self.signals[index].name}"


class _Regions(NamedTuple):
    buffer: Ints
    rank: Ints
    row: Ints
    row_stop: Ints
    col: Ints
    col_stop: Ints

    @property
    def rows(self) -> Ints:
        return self.row_stop - self.row

    @property
    def cols(self) -> Ints:
        return self.col_stop - self.col

    def at(self, index: Ints) -> _Regions:
        return _Regions(*(column[index] for column in self))

    def down(self, rows: Ints) -> _Regions:
        return self._replace(row=self.row + rows, row_stop=self.row_stop + rows)


class _Accesses(NamedTuple):
    """What steps read and write.

    Attributes:
        row_shift, col_shift: the place of what is there among what leaves or lands, less its place
            in the buffer.
        k_first, k_last: rows of b that a product adds up; -1 where none writes.
        adds: 1 where a product adds the next part of the sum to what is there.
        terms: whose products are summed in what is read or left there, numbered.
        joins: the same of what a write of another sum adds itself to; -1 where it does not.
    """

    step: Ints
    buffer: Ints
    rank: Ints
    row: Ints
    row_stop: Ints
    col: Ints
    col_stop: Ints
    row_shift: Ints
    col_shift: Ints
    k_first: Ints
    k_last: Ints
    adds: Ints
    terms: Ints
    joins: Ints


class _Claim(NamedTuple):
    """Steps of which the first is over before the second starts, in every interleaving."""

    first: Ints
    second: Ints
    who: Who
    why: str  # where that is not so


class _Proof:
    def __init__(self, plans: Sequence[Plan]) -> None:
        if not plans:
            raise PlanError("no plans")
        self.plans = plans
        self.problem = plans[0].problem
        self.world = len(plans)
        self.words = plans[0].words
        self.gathers = plans[0].gathers
        self.steps: list[Step] = list(chain.from_iterable(plan.steps for plan in plans))
        sizes = [len(plan.steps) for plan in plans]
        self.start = np.cumsum([0, *sizes])
        self.rank = np.repeat(np.arange(self.world), sizes)
        self.of = _unzipped(self.steps, Step)
        self.lanes: list[tuple[int, str]] = []
        lane_of: list[int] = []
        for rank, (first, last) in enumerate(pairwise(self.start.tolist())):
            lanes = self.of.lane[first:last]
            number = {lane: len(self.lanes) + i for i, lane in enumerate(dict.fromkeys(lanes))}
            self.lanes += [(rank, lane) for lane in number]
            lane_of += map(number.__getitem__, lanes)
        self.lane = np.array(lane_of, np.int64)
        self.claims: list[_Claim] = []
        self.numbers = {0: 0}  # of the sets of ranks whose products are summed somewhere

    def run(self) -> None:
        self._whole()
        self._blocks()
        self._shapes()
        self._words()
        self._execute()
        self._accesses()
        self._memory()
        self._compose()
        self._cleared()
        self._settle()

    def demand(self, holds: Bools, who: Who, why: str) -> None:
        """A rule: all of these hold."""
        if not holds.all():
            raise PlanError(f"{who(int(holds.argmin()))} {why}")

    def claim(self, first: Ints, second: Ints, who: Who, why: str) -> None:
        """A rule that takes steps to be in order, or to be the same."""
        self.claims.append(_Claim(first, second, who, why))

    def _held(self, column: Sequence[Sequence[Any]]) -> tuple[list[Any], Ints]:
        """What steps hold in one of their fields, and which step each of it belongs to."""
        step = np.repeat(np.arange(len(column)), _ints(map(len, column)))
        return list(chain.from_iterable(column)), step

    def name(self, step: int) -> str:
        rank = int(self.rank[step])
        index, found = step - int(self.start[rank]), self.steps[step]
        return f"rank {rank} step {index} ({found.op} {found.label!r} on {found.lane})"

    def by_step(self, step: Ints) -> Who:
        return lambda index: self.name(int(step[index]))

    def by_access(self, access: Ints) -> Who:
        def who(index: int) -> str:
            columns = (int(column[access[index]]) for column in self.access)
            step, buffer, rank, row, row_stop, col, col_stop, *_ = columns
            return (
                f"{self.name(step)}, at rows {row}:{row_stop} and columns {col}:{col_stop} of "
                f"{BUFFERS[buffer]} of rank {rank},"
            )

        return who

    # Plans and steps by themselves.

    def _whole(self) -> None:
        problem, first = self.problem, self.plans[0]
        if self.world != problem.world:
            raise PlanError(f"{self.world} plans for {problem.world} ranks")
        shared = attrgetter("problem", "schedule", "words", "room")
        for rank, plan in enumerate(self.plans):
            if plan.rank != rank or shared(plan) != shared(first):
                raise PlanError(f"rank {rank} holds a plan of something else")
            if plan.staging[1] != first.staging[1]:
                raise PlanError(f"rank {rank} has another row pitch of staging than rank 0")
            for buffer, room in zip(("staging", "publish"), plan.room, strict=True):
                rows, cols = self._shape(buffer, plan)
                if rows * cols * problem.itemsize > room:
                    raise PlanError(f"rank {rank}: staging or publish is larger than its room")
        for rank, lane in self.lanes:
            if not re.fullmatch(r"(compute|copy|reduce)\d+|sync", lane):
                raise PlanError(f"rank {rank}: there is no lane {lane!r}")

    def _blocks(self) -> None:
        """Where the blocks of all pairs of ranks leave and land, as ``[source, target]``."""
        problem, ranks = self.problem, range(self.world)

        def table(number: Callable[[int, int], int]) -> Ints:
            return np.array([[number(src, dst) for dst in ranks] for src in ranks], np.int64)

        if problem.kind.sums:  # each rank has the whole product
            self.leaves = self.lands = np.zeros((self.world, self.world), np.int64)
            self.block = self.leaves + problem.m
        else:
            self.leaves, self.lands = table(problem.leaves), table(problem.lands)
            self.block = table(problem.block)
        #: By buffer and rank, the first of the rows that land there; of staging, each step says.
        self.begins = np.zeros((len(BUFFERS), self.world), np.int64)
        if problem.kind.sums and not problem.kind.returns:
            self.begins[OUT] = problem.offsets[:-1]

    def _shapes(self) -> None:
        """A step holds what its operation says, and that alone."""
        of = self.of
        held = [map(bool, column) for column in (of.transfer, of.products, of.reduction)]
        shapes = list(zip(of.op, of.mover, *held, strict=True))
        right = {(op, mover, *HOLDS[op]) for op in HOLDS for mover in ("dma", "kernel")}
        found = set(shapes)
        for wrong in found - right:
            step = shapes.index(wrong)
            raise PlanError(f"{self.name(step)} does not hold what its operation says")
        self.operations = {op for op, *_ in found}
        self.collective: list[int] = []
        if "collective" in self.operations:
            self.collective = [i for i, (op, *_) in enumerate(shapes) if op == "collective"]
            self._alike()

    def _alike(self) -> None:
        """All ranks take part in the same collectives, and in nothing else that could wait."""
        whole = [
            [(s.label, s.lane) for s in plan.steps if s.op == "collective"] for plan in self.plans
        ]
        for rank, found in enumerate(whole):
            if found != whole[0]:
                raise PlanError(f"rank {rank} takes part in other collectives than rank 0")
        for number, step in enumerate(self.steps):
            if step.waits or step.posts or step.clears:
                raise PlanError(f"{self.name(number)} mixes signals with collectives")

    # 1. Signals.

    def _uses(self) -> tuple[_Uses, _Uses, _Uses]:
        """All posts, all waits and all clears."""
        columns = self.of.posts, self.of.waits, self.of.clears
        signals, steps = zip(*map(self._held, columns), strict=True)
        every = list(chain.from_iterable(signals))
        # Who posts, waits for and clears a signal holds one tuple of it, as a rule, and a million
        # of them are read once each, in the order in which they lie in memory.
        _, first, which = np.unique(_ints(map(id, every)), return_index=True, return_inverse=True)
        self.signal = _unzipped([every[index] for index in first.tolist()], Signal)
        word, waiter = _ints(self.signal.word)[which], _ints(self.signal.waiter)[which]
        inside = (word >= 0) & (word < self.words) & (waiter >= 0) & (waiter < self.world)
        self.demand(inside, lambda i: f"signal {every[i].name}", "has its word outside the pads")
        word += waiter * self.words
        used = np.zeros(self.world * self.words, np.bool_)
        used[word] = True
        word = (np.cumsum(used) - 1)[word]
        #: Of each word that is used, by its number: whose it is, and which of that rank's it is.
        self.word_of, self.word_at = np.divmod(np.flatnonzero(used), max(self.words, 1))
        ends = np.cumsum([len(found) for found in signals])
        of_uses = (np.split(column, ends[:-1]) for column in (which, word))
        posts, waits, clears = map(_Uses, signals, steps, *of_uses)
        return posts, waits, clears

    def _step_by_word(self, uses: _Uses) -> Ints:
        """The step that uses each word, -1 where none does."""
        if len(uses.word) and (times := np.bincount(uses.word)).max() > 1:
            first, second = np.flatnonzero(uses.word == times.argmax())[:2]
            names = " and ".join(self.name(int(uses.step[use])) for use in (first, second))
            raise PlanError(f"{uses.who(first)} has its word used twice, at {names}")
        table = np.full(len(self.word_of), -1)
        table[uses.word] = uses.step
        return table

    def _words(self) -> None:
        posts, waits, clears = self.posts, self.waits, self.clears = self._uses()
        self.poster, self.waiter, self.clearer = map(self._step_by_word, (posts, waits, clears))
        dirty = "so that its word stays dirty"
        self.demand(self.poster[waits.word] >= 0, waits.who, "is waited for and never posted")
        unread = self.waiter[posts.word] >= 0
        self.demand(unread, posts.who, f"is posted and never waited for, {dirty}")
        self.demand(self.clearer[posts.word] >= 0, posts.who, f"is never cleared, {dirty}")
        unread = self.waiter[clears.word] >= 0
        self.demand(unread, clears.who, "is cleared, and nobody waits for it")
        index = np.empty(len(self.word_of), np.int64)
        index[posts.word] = np.arange(len(posts.word))
        for uses in (waits, clears):
            posted = index[uses.word]
            for use in np.flatnonzero(posts.which[posted] != uses.which).tolist():
                one, two = posts.signals[posted[use]], uses.signals[use]
                if one != two:
                    raise PlanError(f"signal {two.name} shares its word with {one.name}")
        waiter, word = self.word_of[posts.word], self.word_at[posts.word]
        own = self.rank[posts.step] == _ints(self.signal.poster)[posts.which]
        own &= self.rank[self.waiter[posts.word]] == waiter
        own &= self.rank[self.clearer[posts.word]] == waiter
        self.demand(own, posts.who, "is used by another rank than it says")
        # Words that rest at 1 have the same poster whatever the schedule; the others rest at 0.
        released = _bools(map("released".__eq__, self.signal.kind))[posts.which]
        rests = np.where(released, word == self.rank[posts.step], word >= self.world)
        self.demand(rests, posts.who, "has a word that rests at another value")
        self.released = self.word_at < self.world

    def _cleared(self) -> None:
        """A word is cleared after it was waited for, and posted again after it was cleared."""
        posts, clears = self.posts, self.clears
        why = "may be cleared before it was waited for"
        self.claim(self.waiter[clears.word], clears.step, clears.who, why)
        handed = np.flatnonzero(self.released[posts.word])
        word = posts.word[handed]
        why = "may be posted before it is cleared"
        self.claim(self.clearer[word], posts.step[handed], lambda i: posts.who(handed[i]), why)

    # 2. Execution in enqueue order.

    def _execute(self) -> None:
        """Find an order in which every step can run, each rank's plan as one queue."""
        found, step = self._held(self.of.after)
        after = np.array(found, np.int64)
        there = (after >= 0) & (after < np.diff(self.start)[self.rank[step]])
        self.demand(there, self.by_step(step), "comes after a step that is not there")
        data = ~self.released[self.waits.word]
        posters = self.poster[self.waits.word[data]]
        source = np.concatenate([posters, after + self.start[self.rank[step]]])
        target = np.concatenate([self.waits.step[data], step])
        #: What each step waits for: step i for source[j], joins[i] <= j < joins[i + 1].
        by_target = np.argsort(target, kind="stable")
        self.source, self.target = source[by_target], target[by_target]
        self.joins = np.searchsorted(self.target, np.arange(len(self.steps) + 1))
        self.order, stuck = self._order(self.rank)
        if stuck:
            circle = self._order(self.lane)[1]
            kind = (
                "wait for each other in a circle"
                if circle
                else "deadlock where lanes share one hardware queue"
            )
            raise PlanError(f"steps {kind}: {'; '.join(map(self.name, (circle or stuck)[:4]))}")
        self.when = np.empty(len(self.steps), np.int64)
        self.when[self.order] = np.arange(len(self.steps))

    def _order(self, queue: Ints) -> tuple[list[int], list[int]]:
        """Run queues of steps as far as they go: the steps that ran, and those that are stuck."""
        queues = [np.flatnonzero(queue == q).tolist() for q in range(queue.max(initial=-1) + 1)]
        sources, joins = self.source.tolist(), self.joins.tolist()
        done = bytearray(len(self.steps))
        is_done = done.__getitem__
        heads = [0] * len(queues)
        order: list[int] = []
        moved = True
        while moved:
            moved = False
            for number, steps in enumerate(queues):
                head = heads[number]
                while head < len(steps):
                    step = steps[head]
                    first, last = joins[step], joins[step + 1]
                    if first < last and not all(map(is_done, sources[first:last])):
                        break
                    done[step] = 1
                    head += 1
                if head > heads[number]:
                    order += steps[heads[number] : head]
                    heads[number], moved = head, True
        return order, [s[head] for head, s in zip(heads, queues, strict=True) if head < len(s)]

    # What steps read and write.

    def _accesses(self) -> None:
        """All reads, and behind them all writes."""
        found = (self._transfers(), self._products(), self._reductions(), self._collectives())
        # What a product adds to is not read by itself: its write says that it adds.
        reads, writes = zip(*found, strict=True)
        self.access = _Accesses(*map(np.concatenate, zip(*reads, *writes, strict=True)))
        self.reads = sum(len(part.step) for part in reads)
        shapes = [[self._shape(name, plan) for plan in self.plans] for name in BUFFERS]
        access = self.access
        home = access.buffer * self.world + access.rank
        rows, cols = (np.take(size, home) for size in np.moveaxis(np.array(shapes), 2, 0))
        inside = (access.row >= 0) & (access.row <= access.row_stop) & (access.row_stop <= rows)
        inside &= (access.col >= 0) & (access.col <= access.col_stop) & (access.col_stop <= cols)
        self.demand(inside, self.by_access(np.arange(len(inside))), "leaves the buffer")

    def _shape(self, name: str, plan: Plan) -> tuple[int, int]:
        there = {"publish": plan.publish, "sum": plan.sums, "gathered": self.gathers}
        return plan.shape(name) if there.get(name, True) else (0, 0)

    def _regions(self, regions: Sequence[Region], step: Ints) -> _Regions:
        names, *bounds = _unzipped(regions, Region)
        numbers = dict.fromkeys(names, -1) | {name: i for i, name in enumerate(BUFFERS)}
        buffer = _ints(map(numbers.__getitem__, names))
        self.demand(buffer >= 0, self.by_step(step), "names no buffer")
        found = _Regions(buffer, *map(_ints, bounds))
        known = (found.rank >= 0) & (found.rank < self.world)
        self.demand(known, self.by_step(step), "names no rank")
        return found

    def _terms(self, terms: Iterable[int]) -> Ints:
        """Sets of ranks, numbered: 64 bits hold no more than 63 ranks."""
        masks = list(terms)
        for mask in dict.fromkeys(masks):
            self.numbers.setdefault(mask, len(self.numbers))
        return _ints(map(self.numbers.__getitem__, masks))

    def _of_block(self, regions: _Regions, src: Ints, dst: Ints, needs: Bools, who: Who) -> Ints:
        """Rows that leave: how far from there they land. They lie in the block of two ranks."""
        first = self.leaves[src, dst]
        inside = (first <= regions.row) & (regions.row_stop <= first + self.block[src, dst])
        self.demand(inside | ~needs, who, "takes rows of another block")
        return np.where(needs, self.lands[src, dst] - first, 0)

    def _transfers(self) -> tuple[_Accesses, _Accesses]:
        transfers = list(self.of.transfer)
        for number in self.collective:
            transfers[number] = None
        step = np.flatnonzero(_bools(map(bool, transfers)))
        sources, targets, named = _unzipped(list(filter(None, transfers)), Transfer)
        who, me = self.by_step(step), self.rank[step]
        src, dst = self._regions(sources, step), self._regions(targets, step)
        terms = self._terms(named)
        scatters = self.problem.kind.scatters
        self.demand(
            (terms > 0) == scatters, who, "does not say whose products it moves, or says so of A"
        )
        copy = _bools(map("copy".__eq__, self.of.op))[step]
        ends = (src.rank == me).astype(int) + (dst.rank == me)
        self.demand(ends == np.where(copy, 1, 2), who, "moves between the wrong ranks")
        for region in (src, dst):
            reached = np.isin(region.buffer, SHARED) | (region.rank == me)
            reached |= (region.buffer == A) & self.problem.symmetric
            self.demand(reached, who, "reaches memory of a peer that is not symmetric")
        flows = SCATTER_FLOWS if scatters else GATHER_FLOWS
        allowed = [source * len(BUFFERS) + target for source, target in flows]
        flow = np.isin(src.buffer * len(BUFFERS) + dst.buffer, allowed)
        self.demand(flow, who, "moves between the wrong buffers")
        sizes = (src.rows == dst.rows) & (src.cols == dst.cols)
        self.demand(sizes, who, "moves between regions of different sizes")
        # What lies in staging is what its target, or the signal behind the copy, takes it for.
        # The read finds out whether that is so.
        lands = np.isin(src.buffer, LEAVING) & ~np.isin(dst.buffer, LEAVING)
        way = self._of_block(src, src.rank, dst.rank, lands, who)
        down, across = src.row - dst.row, src.col - dst.col
        begins, staged = self.begins[dst.buffer, dst.rank], src.buffer == STAGING
        here = np.where(staged, begins - down, self.begins[src.buffer, src.rank])
        here_across = np.where(staged & (dst.buffer != STAGING), -across, 0)
        on = np.flatnonzero(staged & (dst.buffer == STAGING))
        posts = [self.of.posts[number] for number in step[on]]
        here[on] = _ints(found[0].first if found else 0 for found in posts) - src.row[on]
        there, there_across = here + down + way, here_across + across
        home = (dst.buffer == STAGING) | (there == begins) & (there_across == 0)
        home &= ~np.isin(dst.buffer, LEAVING) | (src.rank == dst.rank)
        self.demand(home, who, "puts rows where others belong")
        self._gates(step[copy], (dst.row + there)[copy], (dst.row_stop + there)[copy])
        none, zero = _same(-1, len(step)), _same(0, len(step))
        return (
            _Accesses(step, *src, here, here_across, none, none, zero, terms, none),
            _Accesses(step, *dst, there, there_across, none, none, zero, terms, none),
        )

    def _gates(self, copy: Ints, row: Ints, row_stop: Ints) -> None:
        """What is posted behind a copy gates the rows copied."""
        at = np.full(len(self.steps), -1)
        at[copy] = np.arange(len(copy))
        at = at[self.posts.step]
        row, row_stop = np.append(row, 0), np.append(row_stop, 0)  # for posts behind no copy
        bounds = self.signal.first, self.signal.last
        first, last = (_ints(column)[self.posts.which] for column in bounds)
        gated = (first <= row[at]) & (row_stop[at] <= last)
        self.demand(gated | (at < 0), self.posts.who, "gates other rows than those copied")

    def _products(self) -> tuple[_Accesses, _Accesses]:
        problem = self.problem
        found, step = self._held(self.of.products)
        made = _unzipped(found, Product)
        who, me = self.by_step(step), self.rank[step]
        a, out = self._regions(made.a, step), self._regions(made.out, step)
        k_first, k_last, adds, batch = map(
            _ints, (made.k_first, made.k_last, made.accumulate, made.batch)
        )
        inner = problem.kind.inner
        turned = _bools(made.transposed)
        self.demand(turned == inner, who, "multiplies A the wrong way round")
        summed, left = (a.rows, a.cols) if inner else (a.cols, a.rows)
        fits = (summed == k_last - k_first) & (left == out.rows)
        fits &= (batch == 1) if inner else (batch > 0)
        self.demand(fits, who, "multiplies regions that do not fit")
        self.demand((a.rank == me) & (out.rank == me), who, "multiplies at a peer")
        if problem.kind.scatters:
            whole = (k_first == 0) & (k_last == problem.k)
            self.demand(whole, who, "multiplies part of k")
            targets = np.where(adds > 0, _among(out.buffer, STAGING, OUT), out.buffer != STAGING)
            buffers = (a.buffer == A) & targets & _among(out.buffer, STAGING, OUT, PARTIAL, PUBLISH)
        else:
            whole = (out.col == 0) & (out.col_stop == problem.n)
            self.demand(whole, who, "multiplies in part of the columns")
            buffers = _among(a.buffer, A, STAGING, GATHERED) & _among(out.buffer, SUM, OUT)
            exact = (adds == 0) | (out.buffer == SUM) | (not problem.rounds)
            self.demand(exact, who, "adds to what has been rounded")
        self.demand(buffers, who, "multiplies in the wrong buffers")
        adds, joins, terms = self._joined(made, adds, me, who)
        which = np.flatnonzero(_bools(map(bool, made.addend)))
        adding = step[which]
        # One access for each product of a batch.
        each = np.repeat(np.arange(len(step)), batch)
        turn = np.arange(len(each)) - np.repeat(np.cumsum(batch) - batch, batch)
        a = a.at(each).down(turn * _ints(made.a_stride)[each])
        out = out.at(each).down(turn * _ints(made.out_stride)[each])
        k_first, k_last, adds, step = k_first[each], k_last[each], adds[each], step[each]
        who, mine, kept = self.by_step(step), a.buffer == A, ~np.isin(out.buffer, LEAVING)
        way = self._of_block(a, a.rank, out.rank, mine & kept, who)
        begins = self.begins[out.buffer, out.rank]
        # Of A as it is gathered: the row and the column at which the product takes its piece.
        row, col = (k_first, out.row) if inner else (out.row + begins, k_first)
        across = col - a.col
        there = np.where(mine, begins + a.row + way - row, begins)
        home = (there == begins) | (out.buffer == STAGING)
        self.demand(home & ((across == 0) | ~mine), who, "multiplies its own rows into a peer's")
        here = np.where(mine, 0, row - a.row)
        none, zero = _same(-1, len(each)), _same(0, len(each))
        read = _Accesses(step, *a, here, across, none, none, zero, zero, none)
        added = self._addends([found[index] for index in which], adding)
        return (
            _Accesses(*map(np.concatenate, zip(read, added, strict=True))),
            _Accesses(step, *out, there, zero, k_first, k_last, adds, terms[each], joins[each]),
        )

    def _addends(self, products: list[Product], step: Ints) -> _Accesses:
        """What products add themselves to without being in the same place."""
        made = _unzipped(products, Product)
        who = self.by_step(step)
        addend, out = self._regions(made.addend, step), self._regions(made.out, step)
        fits = (addend.rows == out.rows) & (addend.col == out.col) & (addend.cols == out.cols)
        fits &= (_ints(made.batch) == 1) & (_ints(made.accumulate) == 0)
        self.demand(fits, who, "adds itself to a region that does not fit")
        local = (addend.rank == self.rank[step]) & _among(addend.buffer, STAGING)
        self.demand(local & (out.buffer == OUT), who, "adds itself to the wrong buffer")
        down = out.row + self.begins[out.buffer, out.rank] - addend.row
        none, zero = _same(-1, len(step)), _same(0, len(step))
        terms = self._terms(made.terms)
        return _Accesses(step, *addend, down, zero, none, none, zero, terms, none)

    def _joined(self, made: Any, adds: Ints, me: Ints, who: Who) -> tuple[Ints, ...]:
        """Which products add a part of k, which sums others add to, and what all leave."""
        added = _bools(map(bool, made.addend))
        if not self.problem.kind.scatters:
            plain = ~(_bools(map(bool, made.terms)) | added)
            self.demand(plain, who, "adds itself to what another rank made")
            return adds, _same(-1, len(adds)), _same(0, len(adds))
        joined = (adds > 0) | added
        said = _bools(mask > 0 for mask in made.terms) == joined
        self.demand(said, who, "does not say whose products it adds itself to")
        own = [1 << rank for rank in me.tolist()]
        pairs = list(zip(made.terms, own, strict=True))
        new = np.array([not mask & mine for mask, mine in pairs], np.bool_)
        self.demand(new, who, "adds itself to a sum that it is in")
        joins = np.where(adds > 0, self._terms(made.terms), -1)
        return np.zeros_like(adds), joins, self._terms(mask | mine for mask, mine in pairs)

    def _reductions(self) -> tuple[_Accesses, _Accesses]:
        made: list[Reduction] = []
        numbers: list[int] = []
        if "reduce" in self.operations:
            made = list(filter(None, self.of.reduction))
            numbers = [number for number, found in enumerate(self.of.reduction) if found]
        step = np.array(numbers, np.int64)
        who, me = self.by_step(step), self.rank[step]
        parts = _ints(len(reduction.parts) for reduction in made)
        named = _ints(len(reduction.terms) for reduction in made)
        some = (parts > 0) & (parts == named) & self.problem.kind.sums
        self.demand(some, who, "does not say whose products it sums")
        left = self._terms(map(self._summed, made, step.tolist()))
        out = self._regions([reduction.out for reduction in made], step)
        each = np.repeat(np.arange(len(made)), parts)
        part_step = step[each]
        part = self._regions([p for reduction in made for p in reduction.parts], part_step)
        who, here = self.by_step(part_step), out.at(each)
        local = (part.rank == me[each]) & (here.rank == me[each])
        local &= _among(part.buffer, PARTIAL, PUBLISH, STAGING) & (here.buffer == OUT)
        self.demand(local, who, "sums in the wrong buffers")
        sizes = (part.rows == here.rows) & (part.cols == here.cols)
        self.demand(sizes, who, "sums regions of different sizes")
        begins = self.begins[out.buffer, out.rank]
        down, across = here.row + begins[each] - part.row, here.col - part.col
        home = (part.buffer == STAGING) | (down == 0) & (across == 0)
        self.demand(home, who, "sums rows that do not belong together")
        terms = self._terms(mask for reduction in made for mask in reduction.terms)
        none, zero = _same(-1, len(each)), _same(0, len(each))
        reads = _Accesses(part_step, *part, down, across, none, none, zero, terms, none)
        none, zero = none[: len(made)], zero[: len(made)]
        return reads, _Accesses(step, *out, begins, zero, none, none, zero, left, none)

    def _summed(self, reduction: Reduction, step: int) -> int:
        """What a reduction leaves: a sum in the order of the ranks, each of them in it once."""
        union = 0
        for mask in reduction.terms:
            if mask & union:
                raise PlanError(f"{self.name(step)} sums the product of a rank twice")
            if mask & -mask < union:
                raise PlanError(f"{self.name(step)} does not sum in the order of the ranks")
            union |= mask
        return union

    def _collectives(self) -> tuple[_Accesses, _Accesses]:
        """What a collective does on each rank: it moves all that there is to where it belongs."""
        reads: list[tuple[int, ...]] = []
        writes: list[tuple[int, ...]] = []
        kind, everyone = self.problem.kind, (1 << self.world) - 1
        for number in self.collective:
            rank, transfer = int(self.rank[number]), self.steps[number].transfer
            ends = ("a", "gathered")
            if kind.scatters:
                ends = ("out" if kind.returns else "partial", "out")
            src, dst = (
                Region(end, rank, 0, rows, 0, cols)
                for end in ends
                for rows, cols in [self._shape(end, self.plans[rank])]
            )
            if transfer != (src, dst, 0):
                raise PlanError(f"{self.name(number)} moves something else than the whole")
            mine, all_terms = (
                int(self._terms([mask if kind.scatters else 0])[0])
                for mask in (1 << rank, everyone)
            )
            source, target = BUFFERS.index(src.buffer), BUFFERS.index(dst.buffer)
            reads.append((number, source, *src[1:], 0, 0, -1, -1, 0, mine, -1))
            rest = int(self.begins[target, rank]), 0, -1, -1, 0
            joins = mine if kind.returns else -1
            writes.append((number, target, *dst[1:], *rest, all_terms, joins))
        return _columns(reads), _columns(writes)

    # 4. Composition with the calls before and behind.

    def _compose(self) -> None:
        access, me = self.access, self.rank[self.access.step]
        shared = np.isin(access.buffer, SHARED) | (access.rank != me)
        found = [(access.step[shared], access.rank[shared])]
        for uses in (self.posts, self.waits, self.clears):
            # The post that hands a slot over is for the next call.
            here = ~self.released[uses.word] | (uses is not self.posts)
            found.append((uses.step[here], self.word_of[uses.word[here]]))
        home, first, last = self._touches(*map(np.concatenate, zip(*found, strict=True)))
        if not self.words:
            self.demand(home < 0, self.by_step(first), "shares memory without a signal")
            return
        # Who posts and who waits for the words that hand slots over, by waiter and poster.
        posts, waits = np.full((2, self.world, self.world), -1)
        at = self.word_of[self.released], self.word_at[self.released]
        posts[at], waits[at] = self.poster[self.released], self.waiter[self.released]
        hand_over = posts.max(axis=0)
        whole = ((posts == hand_over) & (posts >= 0) | np.eye(self.world, dtype=bool)).all(axis=0)
        why = "does not hand its slot to every peer in one step"
        self.demand(whole, lambda rank: f"rank {rank}", why)
        why = "may still use a slot when its rank hands it on"
        self.claim(last, hand_over[home], self.by_step(last), why)
        peer = self.rank[first] != home
        home, first = home[peer], first[peer]
        why = "uses the slot of a peer that has not handed it over"
        self.claim(waits[self.rank[first], home], first, self.by_step(first), why)
        # What the caller of a peer gave it is there once that peer has begun this call.
        inputs = (access.buffer == A) & (access.rank != me)
        home, first, _ = self._touches(access.step[inputs], access.rank[inputs])
        begun, who = self._heard()[self.rank[first], home], self.by_step(first)
        why = "reads the input of a peer that may not have begun this call"
        self.demand(begun >= 0, who, why)
        self.claim(begun, first, who, why)

    def _touches(self, step: Ints, home: Ints) -> tuple[Ints, Ints, Ints]:
        """Of steps that touch what is of a rank: that rank, and the first and last on each lane."""
        pair = self.lane[step] * self.world + home
        first = np.full(len(self.lanes) * self.world, len(self.steps))
        last = np.full(len(self.lanes) * self.world, -1)
        np.minimum.at(first, pair, step)
        np.maximum.at(last, pair, step)
        used = np.flatnonzero(last >= 0)
        return used % self.world, first[used], last[used]

    def _heard(self) -> Ints:
        """By rank and peer, the step that first waits for what the peer posts in this call."""
        data = ~self.released[self.waits.word]
        step, word = self.waits.step[data], self.waits.word[data]
        late_first = np.argsort(-self.when[step], kind="stable")
        step, word = step[late_first], word[late_first]
        heard = np.full((self.world, self.world), -1)
        heard[self.rank[step], self.rank[self.poster[word]]] = step
        return heard

    # 3. Memory.

    def _memory(self) -> None:
        """The rules for every rectangle that no access divides, along the execution."""
        access = self.access
        summed = _ints(map(self.problem.b_rows, range(self.world)))  # by rank
        each, before, behind, cell = self._cells()
        write = each >= self.reads
        k_first, k_last = self._parts(each, cell)

        # What a read finds.
        old, new = each[before[~write]], each[~write]
        who = self.by_access(new)
        late = (before[~write] < 0) & (behind[~write] >= 0)
        self.demand(~late, who, "may read before it is written")
        self.demand(before[~write] >= 0, who, "reads what nobody has written")
        self.demand(self._same_piece(old, new), who, "reads another piece than it should")
        same = access.terms[old] == access.terms[new]
        self.demand(same, who, "finds the products of other ranks than it says")
        done = (access.buffer[new] != SUM) | (k_last[before[~write]] == summed[access.rank[new]])
        self.demand(done, who, "rounds before the last term")
        self.claim(access.step[old], access.step[new], who, "may read before it is written")

        # What a write finds.
        old, new = each[before[write]], each[write]
        who, again = self.by_access(new), before[write] >= 0
        adds, joins = access.adds[new] > 0, access.joins[new]
        first, last, so_far = k_first[write], k_last[write], k_last[before[write]]
        more = adds | (joins >= 0)
        self.demand(again | ~more, who, "adds to what nobody has written")
        self.demand(~again | more | (access.buffer[new] == STAGING), who, "is written twice")
        self.demand(~more | self._same_piece(old, new), who, "adds to another piece than it should")
        same = (joins < 0) | (joins == access.terms[old])
        self.demand(same, who, "adds itself to the products of other ranks than it says")
        once = ~again | ~adds | (first >= so_far)
        self.demand(once, who, "adds the same part of k twice")
        begin = np.where(adds, so_far, 0)
        self.demand((first < 0) | (first == begin), who, "leaves out part of k")
        done = (first < 0) | (behind[write] >= 0) | (last == summed[access.rank[new]])
        self.demand(done, who, "does not cover all of k")
        # Rows of an all-to-all have a place for each rank, so that no more is to be shown for them.
        whole = self.numbers.get((1 << self.world) - 1, -1) if self.problem.kind.sums else -1
        final = (behind[write] < 0) & (access.buffer[new] == OUT) & self.problem.kind.sums
        self.demand(~final | (access.terms[new] == whole), who, "leaves out the product of a rank")
        # Where something is read in between, the rules for that read tell of both writes.
        bare = again & (before[write] == np.flatnonzero(write) - 1)
        old, new = old[bare], new[bare]
        why = "may be overwritten by an unordered step"
        self.claim(access.step[old], access.step[new], self.by_access(new), why)

        # What a read leaves to the write behind it.
        left = ~write & (behind >= 0)
        old, new = each[left], each[behind[left]]
        why = "overwrites what may still be read"
        self.claim(access.step[old], access.step[new], self.by_access(new), why)

    def _parts(self, each: Ints, cell: Ints) -> tuple[Ints, Ints]:
        """Which part of the sum each access adds to a rectangle, as its first and last row of b.

        Rows of A come in any order. Where none comes twice, they are numbered as they come.
        """
        k_first, k_last = self.access.k_first[each], self.access.k_last[each]
        if not self.problem.kind.inner:
            return k_first, k_last
        adding = np.flatnonzero(k_first >= 0)
        home, first, last = cell[adding], k_first[adding], k_last[adding]
        rising = np.lexsort((last, first, home))
        one, two = rising[:-1], rising[1:]
        once = (home[one] != home[two]) | (last[one] <= first[two])
        who = self.by_access(each[adding[two]])
        self.demand(once, who, "adds rows of A that another product adds, too")
        rows = last - first
        count = np.cumsum(rows)
        begin = np.flatnonzero(np.diff(home, prepend=-1))  # the first of each rectangle
        sizes = np.diff(begin, append=len(home))
        count -= np.repeat(count[begin] - rows[begin], sizes)
        k_first[adding], k_last[adding] = count - rows, count
        return k_first, k_last

    def _same_piece(self, one: Ints, two: Ints) -> Bools:
        """Whether accesses to the same place take what is there for the same."""
        rows, cols = self.access.row_shift, self.access.col_shift
        same: Bools = (rows[one] == rows[two]) & (cols[one] == cols[two])
        return same

    def _cells(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Each access once for every rectangle it holds, by rectangle and in order of execution.

        Also returns the indices of the write before it and of the write behind it in the same
        rectangle, -1 where there is none, and the number of the rectangle.
        """
        # The caller's shards are left out: they are never written.
        kept = np.flatnonzero(self.access.buffer != A)
        step, buffer, rank, *bounds = (column[kept] for column in self.access[:7])
        home = buffer * self.world + rank
        rows, row, row_count = _cut(home, *bounds[:2])
        cols, col, col_count = _cut(home, *bounds[2:])
        count = row_count * col_count
        each = np.repeat(np.arange(len(kept)), count)
        turn = np.arange(len(each)) - np.repeat(np.cumsum(count) - count, count)
        row, col = row[each] + turn // col_count[each], col[each] + turn % col_count[each]
        # A step's reads come before its writes, and its writes in their order.
        place = np.empty(len(kept), np.int64)
        place[np.argsort(self.when[step] * len(kept) + np.arange(len(kept)))] = np.arange(len(kept))
        cell = row * len(cols) + col
        order = np.argsort(cell * len(kept) + place[each])
        each, cell = each[order], cell[order]

        index, write = np.arange(len(each)), kept[each] >= self.reads
        before, behind = np.full((2, len(each)), -1)
        before[1:] = np.maximum.accumulate(np.where(write, index, -1))[:-1]
        before[cell[before] != cell] = -1
        next_write = np.where(write, index, len(each) - 1)[::-1]
        behind[:-1] = np.minimum.accumulate(next_write)[::-1][1:]
        behind[(cell[behind] != cell) | ~write[behind]] = -1

        first = order[write & (before < 0)]
        area = np.diff(rows)[row[first]] * np.diff(cols)[col[first]]
        self._covered(home[each[write & (before < 0)]], area)
        return kept[each], before, behind, cell

    def _covered(self, home: Ints, area: Ints) -> None:
        """Every element of the results is written."""
        written = np.zeros(len(BUFFERS) * self.world, np.int64)
        np.add.at(written, home, area)
        for buffer in (OUT, GATHERED):
            for plan in self.plans:
                rows, cols = self._shape(BUFFERS[buffer], plan)
                found = int(written[buffer * self.world + plan.rank])
                if found != rows * cols:
                    raise PlanError(
                        f"rank {plan.rank}: {found} of {rows * cols} elements of "
                        f"{BUFFERS[buffer]} are written"
                    )

    # Proof of the claims.

    def _settle(self) -> None:
        first = np.concatenate([claim.first for claim in self.claims])
        second = np.concatenate([claim.second for claim in self.claims])
        self._history()
        holds = self._heard_of(second, self.lane[first]) >= first
        for settle in (self._by_two, self._by_clocks):
            left = np.flatnonzero(~holds)
            if len(left):
                holds[left] = settle(first[left], second[left])
        stop = np.cumsum([len(claim.first) for claim in self.claims])
        for claim, part in zip(self.claims, np.split(holds, stop[:-1]), strict=True):
            self.demand(part, claim.who, claim.why)
        self.claims.clear()  # what they say of `who` is a cycle, which nobody collects meanwhile

    def _history(self) -> None:
        """What lanes have waited for: by pair of lanes and by step, the latest step until then."""
        pair = (self.lane[self.target] * len(self.lanes) + self.lane[self.source]) * len(self.steps)
        order = np.argsort(pair + self.target)
        self.waits_of_pairs = np.append(-1, (pair + self.target)[order])
        self.heard_by_pairs = np.maximum.accumulate(np.append(-1, (pair + self.source)[order]))

    def _heard_of(self, step: Ints, lane: Ints) -> Ints:
        """The latest step of a lane that a step, or one before it on its own lane, waits for.

        On its own lane that is the step itself; it is -1 where there is none.
        """
        own = self.lane[step]
        pair = (own * len(self.lanes) + lane) * len(self.steps)
        at = np.searchsorted(self.waits_of_pairs, pair + step, side="right") - 1
        heard: Ints = np.where(own == lane, step, self.heard_by_pairs[at] - pair)
        return np.where(step < 0, -1, np.maximum(heard, -1))

    def _by_two(self, first: Ints, second: Ints) -> Bools:
        """Whether a step has heard of another by way of a third lane of the rank of either."""
        holds = np.zeros(len(first), np.bool_)
        of_rank = np.searchsorted([rank for rank, _ in self.lanes], np.arange(self.world + 1))
        for rank in (self.rank[first], self.rank[second]):
            for turn in range(int(np.diff(of_rank).max())):
                between = np.minimum(of_rank[rank] + turn, of_rank[rank + 1] - 1)
                heard = self._heard_of(second, between)
                holds |= self._heard_of(heard, self.lane[first]) >= first
        return holds

    def _by_clocks(self, first: Ints, second: Ints) -> Bools:
        """Whether steps are over before others on other lanes start, in every interleaving.

        The clock of a lane holds for every lane the latest step that is over, as its number plus 1,
        or 0. It changes only where a step waits for one of another lane, whose clock was kept.
        """
        by_second = np.argsort(second, kind="stable")
        first, second = first[by_second], second[by_second]
        asked, begin = np.unique(second, return_index=True)
        ends = zip(begin.tolist(), [*begin[1:].tolist(), len(second)], strict=True)
        questions = dict(zip(asked.tolist(), ends, strict=True))
        lane_of_first = self.lane[first]
        answers = np.zeros(len(first), np.bool_)

        source, reader = self._telling(asked)
        joins: dict[int, list[int]] = {}  # by step, those whose clocks it takes in
        for one, two in zip(source.tolist(), reader.tolist(), strict=True):
            joins.setdefault(two, []).append(one)
        told = np.unique(np.concatenate([source, reader, asked]))
        lanes, to_come = self.lane.tolist(), Counter(source.tolist())
        clocks = list(np.zeros((len(self.lanes), len(self.lanes)), np.int64))
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
        """The waits between lanes that a clock can tell: what is waited for, and who tells first.

        Clocks are read where others wait for a step, or ask. Of what a lane has waited for up to
        there, the latest step of each other lane tells of those before it.
        """
        steps, lanes = len(self.steps), len(self.lanes)
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


def _cut(home: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut lines of equal ``home`` at all their ends.

    Returns the cuts of all homes one behind the other, and for each line the index of its first
    part there and the number of its parts.
    """
    ends = np.concatenate([start, stop]) + np.tile(home * (stop.max(initial=0) + 1), 2)
    order = np.argsort(ends)
    new = np.diff(ends[order], prepend=-1) > 0
    index = np.empty(len(ends), np.int64)
    index[order] = np.cumsum(new) - 1
    first, last = index[: len(home)], index[len(home) :]
    return ends[order][new], first, last - first


def _columns(rows: list[tuple[int, ...]]) -> _Accesses:
    return _Accesses(*np.array(rows, np.int64).reshape(-1, len(_Accesses._fields)).T)


def _among(buffer: Ints, *wanted: int) -> Bools:
    found: Bools = np.isin(buffer, wanted)
    return found


def _same(value: int, count: int) -> Ints:
    """A column of one number, without memory of its own."""
    return np.broadcast_to(np.int64(value), count)


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


def _bools(values: Iterable[object]) -> Bools:
    return np.fromiter(values, np.bool_)


def _unzipped(rows: Sequence[Any], kind: type[Any]) -> Any:
    """The fields of rows of a kind as columns, under the same names.

    It reads few rows at a time, which are then still in a cache for their other fields.
    """
    columns: list[list[Any]] = [[] for _ in kind._fields]
    for start in range(0, len(rows), 4096):
        for column, part in zip(
            columns, zip(*rows[start : start + 4096], strict=True), strict=True
        ):
            column += part
    return kind(*columns)
