"""The proof that the Plans of all ranks together compute the product, in any interleaving.

The ranks' steps are executed symbolically, each rank's whole plan as one queue in enqueue order
(streams may share a hardware queue). If that completes, no interleaving of the lanes deadlocks
either, since lanes only relax the order. The execution is also a topological order of the steps,
along which the rules are checked. If a rule requires that two steps are in order, that is a claim,
which is proved for every interleaving: from the waits of a lane, through a third lane or, where
these two do not suffice, by vector clocks over the lanes. The rules:

1. Every signal has one poster, one waiter and one word. Its waiter clears it, after the wait and
   before the word can be posted again.
2. Whatever is read was written before, by the right step, and is not overwritten while it may
   still be read. A rank accesses no memory of a peer that is not symmetric.
3. Every element of the product is written once, by products whose rows of A and of b belong
   together. Together they cover exactly once the dimension that is summed over: k or, if A is
   transposed, its rows, in any order. Partial sums are kept in a dtype that does not round them.
   If products of ranks are summed, all steps that touch a sum state whose products are in it. No
   product is in it twice, and in the end all are.
4. Calls compose: a rank touches the shared memory of a peer only after that peer has handed over
   its slot, and all who touch it do so before the peer hands the slot on. The previous and the next
   call, whatever they are, obey the same rule, so that no pair of calls needs a proof of its own.
   A peer's input is read only after that peer has begun this call.

The proof assumes two things about whoever runs a plan: its steps start after all steps of the
rank's previous call on the same slot, and work that the caller enqueues after the call starts
after all its steps.

Rows have two numberings. Where they leave (``a``, ``publish``, ``partial``) the number is that of
the buffer. Where they land (all other buffers) it is that of the row among those that the rank
gets, as in :meth:`Problem.lands`. A step that moves rows from the former to the latter takes them
from one block, and converts the numbers. Blocks that are summed have the same number everywhere,
that of the row of the product.

Steps are numbered consecutively, rank by rank. Regions, accesses and uses of signals are columns of
numbers, one array for each field: 64 ranks with 64 pieces make a million of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from ficco.plan.collector import paused
from ficco.plan.columns import (
    Accesses,
    Bools,
    Ints,
    Regions,
    among,
    bools,
    cut,
    filled,
    ints,
    unzipped,
)
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
from ficco.plan.order import Order

#: Names the subject of a rule by its index.
Who = Callable[[int], str]

#: Buffers as the columns number them.
BUFFERS = ("a", "publish", "partial", "staging", "sum", "out", "gathered")
A, PUBLISH, PARTIAL, STAGING, SUM, OUT, GATHERED = range(len(BUFFERS))
LEAVING = (A, PUBLISH, PARTIAL)  # hold rows in the order of Problem.leaves
SHARED = tuple(map(BUFFERS.index, sorted(SHARED_BUFFERS)))

#: The buffers between which a step may move data: A on its way to the product, or the product.
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

#: By operation, whether a step holds a transfer, products, a reduction.
HOLDS = {
    "copy": (True, False, False),
    "place": (True, False, False),
    "collective": (True, False, False),
    "matmul": (False, True, False),
    "reduce": (False, False, True),
    "sync": (False, False, False),
}


class PlanError(AssertionError):
    """A Plan breaks a rule. That is a bug of ficco, never an error of its caller."""


def check(plans: Sequence[Plan]) -> None:
    """Prove the Plans of all ranks of a Problem, or raise :class:`PlanError`."""
    with paused():
        _Proof(plans).run()


class _Uses(NamedTuple):
    """All posts, all waits or all clears of signals."""

    signals: list[Signal]
    step: Ints
    which: Ints  # index among all distinct signals
    word: Ints  # index among the used words of all ranks

    def who(self, index: int) -> str:
        return f"signal {self.signals[index].name}"


class _Claim(NamedTuple):
    """Pairs of steps of which the first ends before the second starts, in every interleaving."""

    first: Ints
    second: Ints
    who: Who
    why: str  # the error if that is not so


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
        self.of = unzipped(self.steps, Step)
        self.lanes: list[tuple[int, str]] = []
        lane_of: list[int] = []
        for rank, (first, last) in enumerate(pairwise(self.start.tolist())):
            lanes = self.of.lane[first:last]
            number = {lane: len(self.lanes) + i for i, lane in enumerate(dict.fromkeys(lanes))}
            self.lanes += [(rank, lane) for lane in number]
            lane_of += map(number.__getitem__, lanes)
        self.lane = np.array(lane_of, np.int64)
        self.claims: list[_Claim] = []
        self.numbers = {0: 0}  # by set of ranks whose products are summed somewhere, its number

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
        """A rule: all of these hold; else an error about the first that does not."""
        if not holds.all():
            raise PlanError(f"{who(int(holds.argmin()))} {why}")

    def claim(self, first: Ints, second: Ints, who: Who, why: str) -> None:
        """A rule: these pairs of steps are in order, or the same step. Proved at the end."""
        self.claims.append(_Claim(first, second, who, why))

    def _held(self, column: Sequence[Sequence[Any]]) -> tuple[list[Any], Ints]:
        """The items of all steps in one of their fields, and the step of each."""
        step = np.repeat(np.arange(len(column)), ints(map(len, column)))
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
        #: By buffer and rank, the first of the rows that land there; for staging each step says.
        self.begins = np.zeros((len(BUFFERS), self.world), np.int64)
        if problem.kind.sums and not problem.kind.returns:
            self.begins[OUT] = problem.offsets[:-1]

    def _shapes(self) -> None:
        """A step holds what its operation requires, and nothing else."""
        of = self.of

        def shapes() -> Iterable[tuple[Any, ...]]:
            held = (map(bool, column) for column in (of.transfer, of.products, of.reduction))
            return zip(of.op, of.mover, *held, strict=True)

        right = {(op, mover, *HOLDS[op]) for op in HOLDS for mover in ("dma", "kernel")}
        found = set(shapes())
        for wrong in found - right:
            step = list(shapes()).index(wrong)
            raise PlanError(f"{self.name(step)} does not hold what its operation says")
        self.operations = {op for op, *_ in found}
        self.collective: list[int] = []
        if "collective" in self.operations:
            self.collective = [i for i, op in enumerate(of.op) if op == "collective"]
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
        # The steps that post, wait for and clear a signal usually hold the same tuple. Each of a
        # million tuples is read once, in the order of their addresses.
        _, first, which = np.unique(ints(map(id, every)), return_index=True, return_inverse=True)
        self.signal = unzipped([every[index] for index in first.tolist()], Signal)
        word, waiter = ints(self.signal.word)[which], ints(self.signal.waiter)[which]
        inside = (word >= 0) & (word < self.words) & (waiter >= 0) & (waiter < self.world)
        self.demand(inside, lambda i: f"signal {every[i].name}", "has its word outside the pads")
        word += waiter * self.words
        used = np.zeros(self.world * self.words, np.bool_)
        used[word] = True
        word = (np.cumsum(used) - 1)[word]
        #: By number of each used word: its rank, and its index among that rank's words.
        self.word_of, self.word_at = np.divmod(np.flatnonzero(used), max(self.words, 1))
        ends = np.cumsum([len(found) for found in signals])
        of_uses = (np.split(column, ends[:-1]) for column in (which, word))
        posts, waits, clears = map(_Uses, signals, steps, *of_uses)
        return posts, waits, clears

    def _step_by_word(self, uses: _Uses) -> Ints:
        """The step that uses each word, -1 if none does."""
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
        own = self.rank[posts.step] == ints(self.signal.poster)[posts.which]
        own &= self.rank[self.waiter[posts.word]] == waiter
        own &= self.rank[self.clearer[posts.word]] == waiter
        self.demand(own, posts.who, "is used by another rank than it says")
        # Words that rest at 1 have the same poster whatever the schedule; the others rest at 0.
        released = bools(map("released".__eq__, self.signal.kind))[posts.which]
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
        self.order = Order(self.rank, self.lane, source, target)
        if stuck := self.order.stuck:
            circle = self.order.run(self.lane)[1]
            kind = (
                "wait for each other in a circle"
                if circle
                else "deadlock where lanes share one hardware queue"
            )
            raise PlanError(f"steps {kind}: {'; '.join(map(self.name, (circle or stuck)[:4]))}")

    # What steps read and write.

    def _accesses(self) -> None:
        """All reads, followed by all writes."""
        found = (self._transfers(), self._products(), self._reductions(), self._collectives())
        # The sum that a product adds to is not listed as a read: the write says that it adds.
        reads, writes = zip(*found, strict=True)
        self.access = Accesses(*map(np.concatenate, zip(*reads, *writes, strict=True)))
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

    def _regions(self, regions: Sequence[Region], step: Ints) -> Regions:
        names, *bounds = unzipped(regions, Region)
        numbers = dict.fromkeys(names, -1) | {name: i for i, name in enumerate(BUFFERS)}
        buffer = ints(map(numbers.__getitem__, names))
        self.demand(buffer >= 0, self.by_step(step), "names no buffer")
        found = Regions(buffer, *map(ints, bounds))
        known = (found.rank >= 0) & (found.rank < self.world)
        self.demand(known, self.by_step(step), "names no rank")
        return found

    def _terms(self, terms: Iterable[int]) -> Ints:
        """Numbers for sets of ranks, since the bits of an int64 hold no more than 63 ranks."""
        masks = list(terms)
        for mask in dict.fromkeys(masks):
            self.numbers.setdefault(mask, len(self.numbers))
        return ints(map(self.numbers.__getitem__, masks))

    def _of_block(self, regions: Regions, src: Ints, dst: Ints, needs: Bools, who: Who) -> Ints:
        """For rows that leave, the distance from there to where they land; checks that they are in
        the block of the two ranks."""
        first = self.leaves[src, dst]
        inside = (first <= regions.row) & (regions.row_stop <= first + self.block[src, dst])
        self.demand(inside | ~needs, who, "takes rows of another block")
        return np.where(needs, self.lands[src, dst] - first, 0)

    def _transfers(self) -> tuple[Accesses, Accesses]:
        transfers = list(self.of.transfer)
        for number in self.collective:
            transfers[number] = None
        step = np.flatnonzero(bools(map(bool, transfers)))
        sources, targets, named = unzipped(list(filter(None, transfers)), Transfer)
        who, me = self.by_step(step), self.rank[step]
        src, dst = self._regions(sources, step), self._regions(targets, step)
        terms = self._terms(named)
        scatters = self.problem.kind.scatters
        self.demand(
            (terms > 0) == scatters, who, "does not say whose products it moves, or says so of A"
        )
        copy = bools(map("copy".__eq__, self.of.op))[step]
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
        # The contents of staging are assumed to be what the target, or the signal after the copy,
        # takes them for. The rules for reads check that.
        lands = np.isin(src.buffer, LEAVING) & ~np.isin(dst.buffer, LEAVING)
        way = self._of_block(src, src.rank, dst.rank, lands, who)
        down, across = src.row - dst.row, src.col - dst.col
        begins, staged = self.begins[dst.buffer, dst.rank], src.buffer == STAGING
        here = np.where(staged, begins - down, self.begins[src.buffer, src.rank])
        here_across = np.where(staged & (dst.buffer != STAGING), -across, 0)
        on = np.flatnonzero(staged & (dst.buffer == STAGING))
        posts = [self.of.posts[number] for number in step[on]]
        here[on] = ints(found[0].first if found else 0 for found in posts) - src.row[on]
        there, there_across = here + down + way, here_across + across
        home = (dst.buffer == STAGING) | (there == begins) & (there_across == 0)
        home &= ~np.isin(dst.buffer, LEAVING) | (src.rank == dst.rank)
        self.demand(home, who, "puts rows where others belong")
        self._gates(step[copy], (dst.row + there)[copy], (dst.row_stop + there)[copy])
        none, zero = filled(-1, len(step)), filled(0, len(step))
        return (
            Accesses(step, *src, here, here_across, none, none, zero, terms, none),
            Accesses(step, *dst, there, there_across, none, none, zero, terms, none),
        )

    def _gates(self, copy: Ints, row: Ints, row_stop: Ints) -> None:
        """A signal posted after a copy gates the rows that were copied."""
        at = np.full(len(self.steps), -1)
        at[copy] = np.arange(len(copy))
        at = at[self.posts.step]
        row, row_stop = np.append(row, 0), np.append(row_stop, 0)  # for posts not after a copy
        bounds = self.signal.first, self.signal.last
        first, last = (ints(column)[self.posts.which] for column in bounds)
        gated = (first <= row[at]) & (row_stop[at] <= last)
        self.demand(gated | (at < 0), self.posts.who, "gates other rows than those copied")

    def _products(self) -> tuple[Accesses, Accesses]:
        problem = self.problem
        found, step = self._held(self.of.products)
        made = unzipped(found, Product)
        who, me = self.by_step(step), self.rank[step]
        a, out = self._regions(made.a, step), self._regions(made.out, step)
        k_first, k_last, adds, batch = map(
            ints, (made.k_first, made.k_last, made.accumulate, made.batch)
        )
        inner = problem.kind.inner
        turned = bools(made.transposed)
        self.demand(turned == inner, who, "multiplies A the wrong way round")
        summed, left = (a.rows, a.cols) if inner else (a.cols, a.rows)
        fits = (summed == k_last - k_first) & (left == out.rows)
        fits &= (batch == 1) if inner else (batch > 0)
        self.demand(fits, who, "multiplies regions that do not fit")
        self.demand((a.rank == me) & (out.rank == me), who, "multiplies at a peer")
        if problem.kind.scatters:
            whole = (k_first == 0) & (k_last == problem.k)
            self.demand(whole, who, "multiplies part of k")
            targets = np.where(adds > 0, among(out.buffer, STAGING, OUT), out.buffer != STAGING)
            buffers = (a.buffer == A) & targets & among(out.buffer, STAGING, OUT, PARTIAL, PUBLISH)
        else:
            whole = (out.col == 0) & (out.col_stop == problem.n)
            self.demand(whole, who, "multiplies in part of the columns")
            buffers = among(a.buffer, A, STAGING, GATHERED) & among(out.buffer, SUM, OUT)
            exact = (adds == 0) | (out.buffer == SUM) | (not problem.rounds)
            self.demand(exact, who, "adds to what has been rounded")
        self.demand(buffers, who, "multiplies in the wrong buffers")
        adds, joins, terms = self._joined(made, adds, me, who)
        which = np.flatnonzero(bools(map(bool, made.addend)))
        adding = step[which]
        # One access for each product of a batch.
        each = np.repeat(np.arange(len(step)), batch)
        turn = np.arange(len(each)) - np.repeat(np.cumsum(batch) - batch, batch)
        a = a.at(each).down(turn * ints(made.a_stride)[each])
        out = out.at(each).down(turn * ints(made.out_stride)[each])
        k_first, k_last, adds, step = k_first[each], k_last[each], adds[each], step[each]
        who, mine, kept = self.by_step(step), a.buffer == A, ~np.isin(out.buffer, LEAVING)
        way = self._of_block(a, a.rank, out.rank, mine & kept, who)
        begins = self.begins[out.buffer, out.rank]
        # The row and the column of the gathered A at which the product's piece begins.
        row, col = (k_first, out.row) if inner else (out.row + begins, k_first)
        across = col - a.col
        there = np.where(mine, begins + a.row + way - row, begins)
        home = (there == begins) | (out.buffer == STAGING)
        self.demand(home & ((across == 0) | ~mine), who, "multiplies its own rows into a peer's")
        here = np.where(mine, 0, row - a.row)
        none, zero = filled(-1, len(each)), filled(0, len(each))
        read = Accesses(step, *a, here, across, none, none, zero, zero, none)
        added = self._addends([found[index] for index in which], adding)
        return (
            Accesses(*map(np.concatenate, zip(read, added, strict=True))),
            Accesses(step, *out, there, zero, k_first, k_last, adds, terms[each], joins[each]),
        )

    def _addends(self, products: list[Product], step: Ints) -> Accesses:
        """Reads of the sums that products add themselves to and that are in another place."""
        made = unzipped(products, Product)
        who = self.by_step(step)
        addend, out = self._regions(made.addend, step), self._regions(made.out, step)
        fits = (addend.rows == out.rows) & (addend.col == out.col) & (addend.cols == out.cols)
        fits &= (ints(made.batch) == 1) & (ints(made.accumulate) == 0)
        self.demand(fits, who, "adds itself to a region that does not fit")
        local = (addend.rank == self.rank[step]) & among(addend.buffer, STAGING)
        self.demand(local & (out.buffer == OUT), who, "adds itself to the wrong buffer")
        down = out.row + self.begins[out.buffer, out.rank] - addend.row
        none, zero = filled(-1, len(step)), filled(0, len(step))
        terms = self._terms(made.terms)
        return Accesses(step, *addend, down, zero, none, none, zero, terms, none)

    def _joined(self, made: Any, adds: Ints, me: Ints, who: Who) -> tuple[Ints, ...]:
        """Which products add a part of k, which sums the others add to, and whose products all
        leave."""
        added = bools(map(bool, made.addend))
        if not self.problem.kind.scatters:
            plain = ~(bools(map(bool, made.terms)) | added)
            self.demand(plain, who, "adds itself to what another rank made")
            return adds, filled(-1, len(adds)), filled(0, len(adds))
        joined = (adds > 0) | added
        said = bools(mask > 0 for mask in made.terms) == joined
        self.demand(said, who, "does not say whose products it adds itself to")
        own = [1 << rank for rank in me.tolist()]
        pairs = list(zip(made.terms, own, strict=True))
        new = np.array([not mask & mine for mask, mine in pairs], np.bool_)
        self.demand(new, who, "adds itself to a sum that it is in")
        joins = np.where(adds > 0, self._terms(made.terms), -1)
        return np.zeros_like(adds), joins, self._terms(mask | mine for mask, mine in pairs)

    def _reductions(self) -> tuple[Accesses, Accesses]:
        made: list[Reduction] = []
        numbers: list[int] = []
        if "reduce" in self.operations:
            made = list(filter(None, self.of.reduction))
            numbers = [number for number, found in enumerate(self.of.reduction) if found]
        step = np.array(numbers, np.int64)
        who, me = self.by_step(step), self.rank[step]
        parts = ints(len(reduction.parts) for reduction in made)
        named = ints(len(reduction.terms) for reduction in made)
        some = (parts > 0) & (parts == named) & self.problem.kind.sums
        self.demand(some, who, "does not say whose products it sums")
        left = self._terms(map(self._summed, made, step.tolist()))
        out = self._regions([reduction.out for reduction in made], step)
        each = np.repeat(np.arange(len(made)), parts)
        part_step = step[each]
        part = self._regions([p for reduction in made for p in reduction.parts], part_step)
        who, here = self.by_step(part_step), out.at(each)
        local = (part.rank == me[each]) & among(part.buffer, PARTIAL, STAGING)
        local |= part.buffer == PUBLISH  # peers may read it
        local &= (here.rank == me[each]) & (here.buffer == OUT)
        self.demand(local, who, "sums in the wrong buffers")
        sizes = (part.rows == here.rows) & (part.cols == here.cols)
        self.demand(sizes, who, "sums regions of different sizes")
        begins = self.begins[out.buffer, out.rank]
        down, across = here.row + begins[each] - part.row, here.col - part.col
        home = (part.buffer == STAGING) | (down == 0) & (across == 0)
        self.demand(home, who, "sums rows that do not belong together")
        terms = self._terms(mask for reduction in made for mask in reduction.terms)
        none, zero = filled(-1, len(each)), filled(0, len(each))
        reads = Accesses(part_step, *part, down, across, none, none, zero, terms, none)
        none, zero = none[: len(made)], zero[: len(made)]
        return reads, Accesses(step, *out, begins, zero, none, none, zero, left, none)

    def _summed(self, reduction: Reduction, step: int) -> int:
        """The ranks whose products a reduction sums: in the order of ranks, each of them once."""
        union = 0
        for mask in reduction.terms:
            if mask & union:
                raise PlanError(f"{self.name(step)} sums the product of a rank twice")
            if mask & -mask < union:
                raise PlanError(f"{self.name(step)} does not sum in the order of the ranks")
            union |= mask
        return union

    def _collectives(self) -> tuple[Accesses, Accesses]:
        """Accesses of collectives: on each rank one moves everything to where it belongs."""
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
        return Accesses.of(reads), Accesses.of(writes)

    # 4. Composition with the previous and the next call.

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
        # The steps that post and wait for the words that hand slots over, by waiter and poster.
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
        # A peer's input is valid once that peer has begun this call.
        inputs = (access.buffer == A) & (access.rank != me)
        home, first, _ = self._touches(access.step[inputs], access.rank[inputs])
        begun, who = self._heard()[self.rank[first], home], self.by_step(first)
        why = "reads the input of a peer that may not have begun this call"
        self.demand(begun >= 0, who, why)
        self.claim(begun, first, who, why)

    def _touches(self, step: Ints, home: Ints) -> tuple[Ints, Ints, Ints]:
        """By lane and rank whose memory its steps touch: the rank, and the first and last step."""
        pair = self.lane[step] * self.world + home
        first = np.full(len(self.lanes) * self.world, len(self.steps))
        last = np.full(len(self.lanes) * self.world, -1)
        np.minimum.at(first, pair, step)
        np.maximum.at(last, pair, step)
        used = np.flatnonzero(last >= 0)
        return used % self.world, first[used], last[used]

    def _heard(self) -> Ints:
        """By rank and peer, the step that first waits for a signal of the peer in this call."""
        data = ~self.released[self.waits.word]
        step, word = self.waits.step[data], self.waits.word[data]
        late_first = np.argsort(-self.order.when[step], kind="stable")
        step, word = step[late_first], word[late_first]
        heard = np.full((self.world, self.world), -1)
        heard[self.rank[step], self.rank[self.poster[word]]] = step
        return heard

    # 3. Memory.

    def _memory(self) -> None:
        """The rules for every rectangle that no access divides, in the order of execution."""
        access = self.access
        summed = ints(map(self.problem.b_rows, range(self.world)))  # by rank
        each, before, behind, cell = self._cells()
        write = each >= self.reads
        k_first, k_last = self._parts(each, cell)

        # Each read, and the write before it.
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

        # Each write, and the write before it.
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
        # Rows of an all-to-all have a place for each rank, so that this need not be shown for them.
        whole = self.numbers.get((1 << self.world) - 1, -1) if self.problem.kind.sums else -1
        final = (behind[write] < 0) & (access.buffer[new] == OUT) & self.problem.kind.sums
        self.demand(~final | (access.terms[new] == whole), who, "leaves out the product of a rank")
        # If there is a read in between, the rules for that read cover both writes.
        bare = again & (before[write] == np.flatnonzero(write) - 1)
        old, new = old[bare], new[bare]
        why = "may be overwritten by an unordered step"
        self.claim(access.step[old], access.step[new], self.by_access(new), why)

        # Each read, and the write after it.
        left = ~write & (behind >= 0)
        old, new = each[left], each[behind[left]]
        why = "overwrites what may still be read"
        self.claim(access.step[old], access.step[new], self.by_access(new), why)

    def _parts(self, each: Ints, cell: Ints) -> tuple[Ints, Ints]:
        """The part of the sum that each access adds to a rectangle, as its first and last row of b.

        Rows of a transposed A come in any order. If none comes twice, they are numbered in the
        order in which they come.
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
        """Whether accesses to the same place agree on what is there."""
        rows, cols = self.access.row_shift, self.access.col_shift
        same: Bools = (rows[one] == rows[two]) & (cols[one] == cols[two])
        return same

    def _cells(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Each access once for every rectangle in it, by rectangle and in order of execution.

        Also returns the indices of the write before it and of the write after it in the same
        rectangle, -1 if there is none, and the number of the rectangle.
        """
        # The caller's shards are left out: they are never written.
        kept = np.flatnonzero(self.access.buffer != A)
        step, buffer, rank, *bounds = (column[kept] for column in self.access[:7])
        home = buffer * self.world + rank
        rows, row, row_count = cut(home, *bounds[:2])
        cols, col, col_count = cut(home, *bounds[2:])
        count = row_count * col_count
        each = np.repeat(np.arange(len(kept)), count)
        turn = np.arange(len(each)) - np.repeat(np.cumsum(count) - count, count)
        row, col = row[each] + turn // col_count[each], col[each] + turn % col_count[each]
        # A step's reads come before its writes, and its writes in their order.
        place = np.empty(len(kept), np.int64)
        place[np.argsort(self.order.when[step] * len(kept) + np.arange(len(kept)))] = np.arange(
            len(kept)
        )
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
        holds = self.order.holds(first, second)
        stop = np.cumsum([len(claim.first) for claim in self.claims])
        for claim, part in zip(self.claims, np.split(holds, stop[:-1]), strict=True):
            self.demand(part, claim.who, claim.why)
        self.claims.clear()  # their `who` refers back here: a cycle, while collection is paused
