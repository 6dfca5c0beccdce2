"""The proof that the Plans of all ranks together compute the product, in any interleaving.

The ranks' steps are executed symbolically, each rank's whole plan as one queue in enqueue order
(streams may share a hardware queue). If that completes, no interleaving of the lanes deadlocks
either, since lanes only take order away. The execution is also a topological order of what happens
before what, and the rules are checked along it. Where a rule takes two steps to be in order, that
is a claim, and vector clocks over the lanes prove the claims for every interleaving. The rules:

1. every signal has one poster, one waiter, one word, and is cleared by its waiter, after the wait
   and before the word can be posted again;
2. whatever is read was written before, by the step that should have, and is not overwritten while
   it may still be read; a rank reaches no memory of a peer that is not symmetric;
3. every element of the product is written once, by products whose rows of A and of b belong
   together and that cover all of k once; partial sums add up in a dtype that does not round them;
4. calls compose: a rank touches the shared memory of a peer only after that peer has handed over
   its slot, and all who touch it do so before the peer hands the slot on. The call before and the
   call behind, whatever they are, obey the same rule, so that no pair of calls needs a proof of
   its own. What the peer's caller gave it is read only after the peer has begun this call.

The proof takes two things for granted of whoever runs a plan: its steps start after all steps of
the rank's previous call on the same slot, and what the caller enqueues behind the call starts
after all its steps.

Steps are numbered through, rank by rank. Regions, accesses and uses of signals are columns of
numbers, one array for each field: 64 ranks with 64 pieces make a million of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ficco.plan.collector import paused
from ficco.plan.model import SHARED_BUFFERS, Plan, Product, Region, Signal, Step

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: Names the subject of a rule by its index.
Who = Callable[[int], str]

#: Buffers as the columns number them.
BUFFERS = ("a", "publish", "staging", "sum", "out", "gathered")
A, PUBLISH, STAGING, SUM, OUT, GATHERED = range(len(BUFFERS))
SHARDS = (A, PUBLISH)  # hold the rows of one rank, from row 0
SHARED = tuple(map(BUFFERS.index, sorted(SHARED_BUFFERS)))
RESULTS = (SUM, OUT, GATHERED)  # their elements are written once, or added to in order

#: From which buffer to which a step may move.
FLOWS = (
    (A, PUBLISH),
    (A, STAGING),
    (A, GATHERED),
    (PUBLISH, STAGING),
    (PUBLISH, GATHERED),
    (STAGING, GATHERED),
    (SUM, OUT),
)

#: What a step holds: whether a transfer, whether products.
HOLDS = {
    "copy": (True, False),
    "place": (True, False),
    "gather": (True, False),
    "matmul": (False, True),
    "sync": (False, False),
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
    word: Ints  # the words of all ranks numbered through

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
        row_shift, col_shift: the place in the gathered A, or in the product, of what is there, less
            its place in the buffer.
        k_first, k_last: rows of b that a product adds up; -1 where none writes.
        adds: 1 where a product adds to what is there.
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
        self.steps: list[Step] = list(chain.from_iterable(plan.steps for plan in plans))
        sizes = [len(plan.steps) for plan in plans]
        self.start = np.cumsum([0, *sizes])
        self.rank = np.repeat(np.arange(self.world), sizes)
        self.lanes: list[tuple[int, str]] = []
        lane_of: list[int] = []
        for rank, plan in enumerate(plans):
            number = {lane: len(self.lanes) + i for i, lane in enumerate(plan.lanes)}
            self.lanes += [(rank, lane) for lane in number]
            lane_of += [number[step.lane] for step in plan.steps]
        self.lane = np.array(lane_of, np.int64)
        self.claims: list[_Claim] = []

    def run(self) -> None:
        self._whole()
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

    def _held(self, field: str) -> tuple[list[Any], Ints]:
        """What steps hold in one of their fields, and which step each of it belongs to."""
        numbers = [
            number for number, found in enumerate(map(attrgetter(field), self.steps)) if found
        ]
        found = [getattr(self.steps[number], field) for number in numbers]
        step = np.repeat(np.array(numbers, np.int64), _ints(map(len, found)))
        return list(chain.from_iterable(found)), step

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
            need = plan.staging[0] * plan.staging[1], plan.publish * problem.rows[rank] * problem.k
            for elements, room in zip(need, plan.room, strict=True):
                if elements * problem.itemsize > room:
                    raise PlanError(f"rank {rank}: staging or publish is larger than its room")
        for rank, lane in self.lanes:
            if not re.fullmatch(r"(compute|copy)\d+|sync", lane):
                raise PlanError(f"rank {rank}: there is no lane {lane!r}")

    def _shapes(self) -> None:
        """A step holds what its operation says, and that alone."""

        shapes = [(s.op, s.mover, s.transfer is not None, bool(s.products)) for s in self.steps]
        right = {(op, mover, *HOLDS[op]) for op in HOLDS for mover in ("dma", "kernel")}
        for wrong in set(shapes) - right:
            step = shapes.index(wrong)
            raise PlanError(f"{self.name(step)} does not hold what its operation says")
        self.collective = any(op == "gather" for op, *_ in set(shapes))
        if self.collective:
            self._collectives()

    def _collectives(self) -> None:
        """All ranks take part in the same collectives, and in nothing else that could wait."""
        whole = [[(s.label, s.lane) for s in plan.steps if s.op == "gather"] for plan in self.plans]
        for rank, found in enumerate(whole):
            if found != whole[0]:
                raise PlanError(f"rank {rank} takes part in other collectives than rank 0")
        for number, step in enumerate(self.steps):
            if step.waits or step.posts or step.clears:
                raise PlanError(f"{self.name(number)} mixes signals with collectives")

    # 1. Signals.

    def _uses(self, role: str) -> _Uses:
        signals, step = self._held(role)
        word, waiter = _column(signals, "word"), _column(signals, "waiter")
        uses = _Uses(signals, step, waiter * self.words + word)
        inside = (word >= 0) & (word < self.words) & (waiter >= 0) & (waiter < self.world)
        self.demand(inside, uses.who, "has its word outside the pads")
        return uses

    def _step_by_word(self, uses: _Uses) -> Ints:
        """The step that uses each word, -1 where none does."""
        if len(uses.word) and (times := np.bincount(uses.word)).max() > 1:
            first, second = np.flatnonzero(uses.word == times.argmax())[:2]
            names = " and ".join(self.name(int(uses.step[use])) for use in (first, second))
            raise PlanError(f"{uses.who(first)} has its word used twice, at {names}")
        table = np.full(self.world * self.words, -1)
        table[uses.word] = uses.step
        return table

    def _words(self) -> None:
        posts, waits, clears = map(self._uses, ("posts", "waits", "clears"))
        self.poster, self.waiter, self.clearer = map(self._step_by_word, (posts, waits, clears))
        dirty = "so that its word stays dirty"
        self.demand(self.poster[waits.word] >= 0, waits.who, "is waited for and never posted")
        unread = self.waiter[posts.word] >= 0
        self.demand(unread, posts.who, f"is posted and never waited for, {dirty}")
        self.demand(self.clearer[posts.word] >= 0, posts.who, f"is never cleared, {dirty}")
        unread = self.waiter[clears.word] >= 0
        self.demand(unread, clears.who, "is cleared, and nobody waits for it")
        index = np.empty(self.world * self.words, np.int64)
        index[posts.word] = np.arange(len(posts.word))
        for uses in (waits, clears):
            posted = map(posts.signals.__getitem__, index[uses.word].tolist())
            for one, two in zip(posted, uses.signals, strict=True):
                if one is not two and one != two:
                    raise PlanError(f"signal {two.name} shares its word with {one.name}")
        waiter, word = np.divmod(posts.word, max(self.words, 1))
        own = self.rank[posts.step] == _column(posts.signals, "poster")
        own &= self.rank[self.waiter[posts.word]] == waiter
        own &= self.rank[self.clearer[posts.word]] == waiter
        self.demand(own, posts.who, "is used by another rank than it says")
        # Words that rest at 1 have the same poster whatever the schedule; the others rest at 0.
        released = _ints(signal.released for signal in posts.signals) > 0
        rests = np.where(released, word == self.rank[posts.step], word >= self.world)
        self.demand(rests, posts.who, "has a word that rests at another value")
        self.posts, self.waits, self.clears = posts, waits, clears
        self.released = np.arange(self.world * self.words) % max(self.words, 1) < self.world

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
        found, step = self._held("after")
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
                    if first < last and not all(map(done.__getitem__, sources[first:last])):
                        break
                    done[step] = True
                    order.append(step)
                    head += 1
                moved = moved or head > heads[number]
                heads[number] = head
        return order, [s[head] for head, s in zip(heads, queues, strict=True) if head < len(s)]

    # What steps read and write.

    def _accesses(self) -> None:
        """All reads, and behind them all writes."""
        moved_from, moved_to = self._transfers()
        # What a product adds to is not read by itself: its write says that it adds.
        multiplied, made = self._products()
        parts = (moved_from, multiplied, moved_to, made)
        self.access = _Accesses(*map(np.concatenate, zip(*parts, strict=True)))
        self.reads = len(moved_from.step) + len(multiplied.step)
        shapes = [[self._shape(name, plan) for plan in self.plans] for name in BUFFERS]
        access = self.access
        rows, cols = np.array(shapes)[access.buffer, access.rank].T
        inside = (access.row >= 0) & (access.row <= access.row_stop) & (access.row_stop <= rows)
        inside &= (access.col >= 0) & (access.col <= access.col_stop) & (access.col_stop <= cols)
        self.demand(inside, self.by_access(np.arange(len(inside))), "leaves the buffer")

    def _shape(self, name: str, plan: Plan) -> tuple[int, int]:
        problem, own = self.problem, self.problem.rows[plan.rank]
        if name == "gathered":
            wanted = problem.return_gathered or self.collective
            return (problem.m if wanted else 0), problem.k
        return {
            "a": (own, problem.k),
            "publish": (own if plan.publish else 0, problem.k),
            "staging": plan.staging,
            "sum": (problem.m if plan.sums else 0, problem.n),
            "out": (problem.m, problem.n),
        }[name]

    def _regions(self, regions: list[Region], step: Ints) -> _Regions:
        numbers = {name: number for number, name in enumerate(BUFFERS)}
        buffer = _ints(numbers.get(region.buffer, -1) for region in regions)
        self.demand(buffer >= 0, self.by_step(step), "names no buffer")
        found = _Regions(buffer, *(_column(regions, field) for field in Region._fields[1:]))
        known = (found.rank >= 0) & (found.rank < self.world)
        self.demand(known, self.by_step(step), "names no rank")
        return found

    def _transfers(self) -> tuple[_Accesses, _Accesses]:
        moved = [step.transfer for step in self.steps if step.transfer]
        step = np.flatnonzero([step.transfer is not None for step in self.steps])
        who, me = self.by_step(step), self.rank[step]
        src = self._regions([transfer.src for transfer in moved], step)
        dst = self._regions([transfer.dst for transfer in moved], step)
        op = np.array([list(HOLDS).index(s.op) for s in self.steps if s.transfer], np.int64)
        copy, gather = (op == list(HOLDS).index(name) for name in ("copy", "gather"))
        ends = (src.rank == me).astype(int) + (dst.rank == me)
        self.demand(ends == np.where(copy, 1, 2), who, "moves between the wrong ranks")
        for region in (src, dst):
            reached = np.isin(region.buffer, SHARED) | (region.rank == me)
            reached |= (region.buffer == A) & self.problem.symmetric
            self.demand(reached, who, "reaches memory of a peer that is not symmetric")
        flows = [source * len(BUFFERS) + target for source, target in FLOWS]
        flow = np.isin(src.buffer * len(BUFFERS) + dst.buffer, flows)
        self.demand(flow, who, "moves between the wrong buffers")
        # A collective moves all shards, of which it names its own, to where they belong.
        rows = np.array(self.problem.rows)[me]
        whole = (src.rows == rows) & (dst.rows == self.problem.m) & (dst.buffer == GATHERED)
        whole &= (src.buffer == A) & (src.cols == self.problem.k) & (dst.cols == self.problem.k)
        self.demand(whole | ~gather, who, "gathers something else than all shards")
        sizes = (src.rows == dst.rows) & (src.cols == dst.cols)
        self.demand(sizes | gather, who, "moves between regions of different sizes")
        # A shard begins `offset` rows down the gathered A. All else lies where it belongs, or is
        # brought there by this step.
        shard = np.isin(src.buffer, SHARDS)
        offset = np.array(self.problem.offsets)[src.rank]
        down, across = dst.row - src.row, dst.col - src.col
        there = np.where(shard & ~gather, offset - down, 0), np.where(shard, -across, 0)
        home = ~np.isin(dst.buffer, RESULTS) | ((there[0] == 0) & (there[1] == 0))
        self.demand(home, who, "puts rows where others belong")
        self._gates(step[copy], (dst.row + there[0])[copy], (dst.row_stop + there[0])[copy])
        here = np.where(shard, offset, down), np.where(shard, 0, across)
        none, zero = np.full(len(step), -1), np.zeros(len(step), np.int64)
        return (
            _Accesses(step, *src, *here, none, none, zero),
            _Accesses(step, *dst, *there, none, none, zero),
        )

    def _gates(self, copy: Ints, row: Ints, row_stop: Ints) -> None:
        """What is posted behind a copy gates the rows copied."""
        at = np.full(len(self.steps), -1)
        at[copy] = np.arange(len(copy))
        at = at[self.posts.step]
        row, row_stop = np.append(row, 0), np.append(row_stop, 0)  # for posts behind no copy
        first, last = _column(self.posts.signals, "first"), _column(self.posts.signals, "last")
        gated = (first <= row[at]) & (row_stop[at] <= last)
        self.demand(gated | (at < 0), self.posts.who, "gates other rows than those copied")

    def _products(self) -> tuple[_Accesses, _Accesses]:
        problem = self.problem
        made: list[Product]
        made, step = self._held("products")
        who, me = self.by_step(step), self.rank[step]
        a = self._regions([product.a for product in made], step)
        out = self._regions([product.out for product in made], step)
        k_first, k_last, adds, batch = (
            _column(made, field) for field in ("k_first", "k_last", "accumulate", "batch")
        )
        fits = (a.cols == k_last - k_first) & (a.rows == out.rows) & (batch > 0)
        self.demand(fits, who, "multiplies regions that do not fit")
        whole = (out.col == 0) & (out.col_stop == problem.n) & (a.rank == me) & (out.rank == me)
        self.demand(whole, who, "multiplies at a peer or in part of the columns")
        buffers = np.isin(a.buffer, (A, STAGING, GATHERED)) & np.isin(out.buffer, (SUM, OUT))
        self.demand(buffers, who, "multiplies in the wrong buffers")
        exact = (adds == 0) | (out.buffer == SUM) | (not problem.rounds)
        self.demand(exact, who, "adds to what has been rounded")
        # One access for each product of a batch.
        each = np.repeat(np.arange(len(made)), batch)
        turn = np.arange(len(each)) - np.repeat(np.cumsum(batch) - batch, batch)
        a = a.at(each).down(turn * _column(made, "a_stride")[each])
        out = out.at(each).down(turn * _column(made, "out_stride")[each])
        k_first, k_last, adds, step = k_first[each], k_last[each], adds[each], step[each]
        down, across = out.row - a.row, k_first - a.col
        own = (down == np.array(problem.offsets)[a.rank]) & (across == 0)
        why = "multiplies its own rows into a peer's"
        self.demand(own | (a.buffer != A), self.by_step(step), why)
        none, zero = np.full(len(each), -1), np.zeros(len(each), np.int64)
        return (
            _Accesses(step, *a, down, across, none, none, zero),
            _Accesses(step, *out, zero, zero, k_first, k_last, adds),
        )

    # 4. Composition with the calls before and behind.

    def _compose(self) -> None:
        access, me = self.access, self.rank[self.access.step]
        shared = np.isin(access.buffer, SHARED) | (access.rank != me)
        found = [(access.step[shared], access.rank[shared])]
        for uses in (self.posts, self.waits, self.clears):
            # The post that hands a slot over is for the next call.
            here = ~self.released[uses.word] | (uses is not self.posts)
            found.append((uses.step[here], uses.word[here] // max(self.words, 1)))
        home, first, last = self._touches(*map(np.concatenate, zip(*found, strict=True)))
        if not self.words:
            self.demand(home < 0, self.by_step(first), "shares memory without a signal")
            return
        # Who posts and who waits for the words that hand slots over, by waiter and poster.
        posts = self.poster.reshape(self.world, -1)[:, : self.world]
        waits = self.waiter.reshape(self.world, -1)[:, : self.world]
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
        access, k = self.access, self.problem.k
        each, before, behind = self._cells()
        write = each >= self.reads

        # What a read finds.
        old, new = each[before[~write]], each[~write]
        who = self.by_access(new)
        late = (before[~write] < 0) & (behind[~write] >= 0)
        self.demand(~late, who, "may read before it is written")
        self.demand(before[~write] >= 0, who, "reads what nobody has written")
        same = access.row_shift[old] == access.row_shift[new]
        same &= access.col_shift[old] == access.col_shift[new]
        self.demand(same, who, "reads another piece than it should")
        done = (access.buffer[new] != SUM) | (access.k_last[old] == k)
        self.demand(done, who, "rounds before the last term")
        self.claim(access.step[old], access.step[new], who, "may read before it is written")

        # What a write finds.
        old, new = each[before[write]], each[write]
        who, again = self.by_access(new), before[write] >= 0
        adds, k_first = access.adds[new] > 0, access.k_first[new]
        self.demand(again | ~adds, who, "adds to what nobody has written")
        free = ~np.isin(access.buffer[new], RESULTS)
        self.demand(~again | adds | free, who, "is written twice")
        once = ~again | ~adds | (k_first >= access.k_last[old])
        self.demand(once, who, "adds the same part of k twice")
        begin = np.where(adds, access.k_last[old], 0)
        self.demand((k_first < 0) | (k_first == begin), who, "leaves out part of k")
        done = (k_first < 0) | (behind[write] >= 0) | (access.k_last[new] == k)
        self.demand(done, who, "does not cover all of k")
        old, new = old[again], new[again]
        why = "may be overwritten by an unordered step"
        self.claim(access.step[old], access.step[new], self.by_access(new), why)

        # What a read leaves to the write behind it.
        left = ~write & (behind >= 0)
        old, new = each[left], each[behind[left]]
        why = "overwrites what may still be read"
        self.claim(access.step[old], access.step[new], self.by_access(new), why)

    def _cells(self) -> tuple[Ints, Ints, Ints]:
        """Each access once for every rectangle it holds, by rectangle and in order of execution.

        Also returns the indices of the write before it and of the write behind it in the same
        rectangle, -1 where there is none.
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
        return kept[each], before, behind

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
        same_lane = self.lane[first] == self.lane[second]
        holds = np.where(same_lane, first <= second, self._direct(first, second))
        left = np.flatnonzero(~same_lane & ~holds)
        if len(left):
            holds[left] = self._by_clocks(first[left], second[left])
        stop = np.cumsum([len(claim.first) for claim in self.claims])
        for claim, part in zip(self.claims, np.split(holds, stop[:-1]), strict=True):
            self.demand(part, claim.who, claim.why)

    def _direct(self, first: Ints, second: Ints) -> Bools:
        """Whether the second step waits for the first, or for one behind that on its lane."""
        lanes, steps = len(self.lanes), len(self.steps)
        wait = np.sort((self.target * lanes + self.lane[self.source]) * steps + self.source)
        wait = np.append(-1, wait)
        # The last step of the first one's lane that the second waits for.
        none = (second * lanes + self.lane[first]) * steps
        latest: Ints = wait[np.searchsorted(wait, none + steps) - 1]
        return latest >= none + first

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

        sources, joins, lanes = self.source.tolist(), self.joins.tolist(), self.lane.tolist()
        to_come = np.bincount(self.source, minlength=len(self.steps)).tolist()
        clocks = list(np.zeros((len(self.lanes), len(self.lanes)), np.int64))
        kept: dict[int, Ints] = {}  # by step, for those that will wait for it
        in_use = [False] * len(clocks)  # a kept clock must not change
        for step in self.order:
            lane = lanes[step]
            for source in sources[joins[step] : joins[step + 1]]:
                to_come[source] -= 1
                other = kept[source] if to_come[source] else kept.pop(source)
                if clocks[lane][lanes[source]] <= source:
                    if in_use[lane]:
                        clocks[lane], in_use[lane] = clocks[lane].copy(), False
                    np.maximum(clocks[lane], other, out=clocks[lane])
                    clocks[lane][lanes[source]] = source + 1
            if to_come[step]:
                kept[step], in_use[lane] = clocks[lane], True
            if step in questions:
                these = slice(*questions[step])
                answers[these] = clocks[lane][lane_of_first[these]] > first[these]
        holds = np.empty(len(answers), np.bool_)
        holds[by_second] = answers
        return holds


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


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


def _column(rows: Iterable[NamedTuple], field: str) -> Ints:
    return _ints(map(attrgetter(field), rows))
