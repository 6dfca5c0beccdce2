"""The proof that the Plans of all ranks together compute the product, in any interleaving.

The ranks' steps are executed symbolically, each rank's whole plan as one queue in enqueue order
(streams may share a hardware queue). If that completes, no interleaving of the lanes deadlocks
either, since lanes only take order away. The execution is also a topological order of what happens
before what, in which vector clocks over the lanes decide for any two steps whether they are
ordered. With them:

1. every signal has one poster, one waiter, one word, and is cleared by its waiter, after the wait
   and before the word can be posted again;
2. whatever is read was written before, by the step that should have, and is not overwritten while
   it may still be read; a rank reaches no memory of a peer that is not symmetric;
3. every element of the product is written once, by products whose rows of A and of b belong
   together and that cover all of k once; partial sums add up in a dtype that does not round them;
4. calls compose: all access to a rank's shared memory by a peer comes after that rank has begun
   this call, and all access by anyone comes before that rank hands its slot on. The call before
   and the call behind, whatever they are, obey the same rule, so that no pair of calls needs a
   proof of its own.

The proof takes two things for granted of whoever runs a plan: its steps start after all steps of
the rank's previous call on the same slot, and what the caller enqueues behind the call starts
after all its steps.

Steps are numbered through, rank by rank. Regions, accesses and uses of signals are columns of
numbers, one array for each field: 64 ranks with 64 pieces make a million of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ficco.plan.model import (
    SHARED_BUFFERS,
    Plan,
    Product,
    Region,
    Signal,
    Step,
)

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
T = TypeVar("T")

#: Buffers as the columns number them.
BUFFERS = ("a", "publish", "staging", "sum", "out", "gathered")
A, PUBLISH, STAGING, SUM, OUT, GATHERED = range(len(BUFFERS))
SHARDS = (A, PUBLISH)  # hold the rows of one rank, from row 0
SHARED = tuple(map(BUFFERS.index, sorted(SHARED_BUFFERS)))
RESULTS = (SUM, OUT, GATHERED)  # their elements are written once, or added to in order

#: From which buffer to which a copy or a place may move.
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
    _Proof(plans).run()


class _Uses(NamedTuple):
    """All posts, all waits or all clears of signals."""

    signals: list[Signal]
    step: Ints
    word: Ints  # the words of all ranks numbered through

    def demand(self, holds: Bools, why: str) -> None:
        """Every one of these signals obeys a rule."""
        if not holds.all():
            raise PlanError(f"{self.signals[int(holds.argmin())].name}: {why}")


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

    def at(self, index: Ints | Bools) -> _Regions:
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

    def run(self) -> None:
        self._whole()
        self._shapes()
        self._words()
        self._execute()
        self._clocks()
        self._cleared()
        self._accesses()
        self._compose()
        self._memory()

    def name(self, step: int) -> str:
        rank = int(self.rank[step])
        index, found = step - int(self.start[rank]), self.steps[step]
        return f"rank {rank} step {index} ({found.op} {found.label!r} on {found.lane})"

    def demand(self, holds: Bools, step: Ints, why: str) -> None:
        """Every one of these steps obeys a rule."""
        if not holds.all():
            raise PlanError(f"{self.name(int(step[holds.argmin()]))} {why}")

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
            if [s.label for s in plan.steps if s.op == "gather"] != [
                s.label for s in first.steps if s.op == "gather"
            ]:
                raise PlanError(f"rank {rank} takes part in other collectives than rank 0")
            need = plan.staging[0] * plan.staging[1], plan.publish * problem.rows[rank] * problem.k
            for elements, room in zip(need, plan.room, strict=True):
                if elements * problem.itemsize > room:
                    raise PlanError(f"rank {rank}: staging or publish is larger than its room")
        for rank, lane in self.lanes:
            if not re.fullmatch(r"(compute|copy)\d+|sync", lane):
                raise PlanError(f"rank {rank}: there is no lane {lane!r}")

    def _shapes(self) -> None:
        """A step holds what its operation says, and that alone."""

        def shape(step: Step) -> tuple[str, str, bool, bool]:
            return step.op, step.mover, step.transfer is not None, bool(step.products)

        wrong = {
            (op, mover, *holds)
            for op, mover, *holds in set(map(shape, self.steps))
            if HOLDS.get(op) != tuple(holds) or mover not in ("dma", "kernel")
        }
        for number, step in enumerate(self.steps if wrong else ()):
            if shape(step) in wrong:
                raise PlanError(f"{self.name(number)} does not hold what its operation says")

    # 1. Signals.

    def _uses(self, role: str) -> _Uses:
        signals, step = _flat(map(attrgetter(role), self.steps))
        word, waiter = _column(signals, "word"), _column(signals, "waiter")
        uses = _Uses(signals, step, waiter * self.words + word)
        uses.demand((word >= 0) & (word < self.words), "its word is outside the pad")
        uses.demand((waiter >= 0) & (waiter < self.world), "its waiter is no rank")
        return uses

    def _step_by_word(self, uses: _Uses) -> Ints:
        """The step that uses each word, -1 where none does."""
        size = self.world * self.words
        if len(uses.word) and (times := np.bincount(uses.word)).max() > 1:
            first, second = np.flatnonzero(uses.word == times.argmax())[:2]
            names = " and ".join(self.name(int(uses.step[use])) for use in (first, second))
            raise PlanError(f"{uses.signals[first].name}: its word is used twice, at {names}")
        table = np.full(size, -1)
        table[uses.word] = uses.step
        return table

    def _words(self) -> None:
        posts, waits, clears = map(self._uses, ("posts", "waits", "clears"))
        self.poster, self.waiter, self.clearer = map(self._step_by_word, (posts, waits, clears))
        waits.demand(self.poster[waits.word] >= 0, "waited for and never posted")
        dirty = "its word stays dirty"
        posts.demand(self.waiter[posts.word] >= 0, f"posted and never waited for, {dirty}")
        posts.demand(self.clearer[posts.word] >= 0, f"never cleared, {dirty}")
        clears.demand(self.waiter[clears.word] >= 0, "cleared, and nobody waits for it")
        index = np.empty(self.world * self.words, np.int64)
        index[posts.word] = np.arange(len(posts.word))
        for uses in (waits, clears):
            posted = list(map(posts.signals.__getitem__, index[uses.word].tolist()))
            for one, two in (
                zip(posted, uses.signals, strict=True) if posted != uses.signals else ()
            ):
                if one != two:
                    raise PlanError(f"{two.name}: shares its word with {one.name}")
        waiter, word = np.divmod(posts.word, max(self.words, 1))
        own = self.rank[posts.step] == _column(posts.signals, "poster")
        own &= self.rank[self.waiter[posts.word]] == waiter
        own &= self.rank[self.clearer[posts.word]] == waiter
        posts.demand(own, "used by another rank than it says")
        # Words that rest at 1 have the same poster whatever the schedule; the others rest at 0.
        released = _column(posts.signals, "released") > 0
        rests = np.where(released, word == self.rank[posts.step], word >= self.world)
        posts.demand(rests, "its word rests at another value")
        self.posts, self.waits, self.clears = posts, waits, clears
        self.released = np.arange(self.world * self.words) % max(self.words, 1) < self.world

    # 2. Execution in enqueue order, and clocks.

    def _execute(self) -> None:
        """Find an order in which every step can run, each rank's plan as one queue."""
        found, step = _flat(map(attrgetter("after"), self.steps))
        after = np.array(found, np.int64)
        there = (after >= 0) & (after < np.diff(self.start)[self.rank[step]])
        self.demand(there, step, "comes after a step that is not there")
        data = ~self.released[self.waits.word]
        posters = self.poster[self.waits.word[data]]
        source = np.concatenate([posters, after + self.start[self.rank[step]]])
        target = np.concatenate([self.waits.step[data], step])
        order = np.argsort(target, kind="stable")
        #: Step i waits for sources[joins[i]:joins[i + 1]].
        self.sources: list[int] = source[order].tolist()
        bounds = np.searchsorted(target[order], np.arange(len(self.steps) + 1))
        self.joins: list[int] = bounds.tolist()
        self.order, stuck = self._order(self.rank)
        if stuck:
            circle = self._order(self.lane)[1]
            kind = (
                "wait for each other in a circle"
                if circle
                else "deadlock where lanes share one hardware queue"
            )
            raise PlanError(f"steps {kind}: {'; '.join(map(self.name, (circle or stuck)[:4]))}")

    def _order(self, queue: Ints) -> tuple[list[int], list[int]]:
        """Run queues of steps as far as they go: the steps that ran, and those that are stuck."""
        queues = [np.flatnonzero(queue == q).tolist() for q in range(queue.max(initial=-1) + 1)]
        sources, joins = self.sources, self.joins
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
                    if not all(map(done.__getitem__, sources[joins[step] : joins[step + 1]])):
                        break
                    done[step] = True
                    order.append(step)
                    head += 1
                moved = moved or head > heads[number]
                heads[number] = head
        return order, [s[head] for head, s in zip(heads, queues, strict=True) if head < len(s)]

    def _clocks(self) -> None:
        """For every step the latest step of every other lane that is over before it starts.

        Only a step that waits for others changes the clock of its lane; the steps behind it share
        it. An entry is the number of the step plus 1, and 0 where there is none.
        """
        sources, joins, lanes = self.sources, self.joins, self.lane.tolist()
        count = np.count_nonzero(np.diff(joins))
        self.clocks = np.zeros((count + 1, len(self.lanes)), np.int32)
        clocks = list(self.clocks)
        current = [0] * len(self.lanes)
        row = [0] * len(self.steps)
        last = 0
        for step in self.order:
            lane, begin, end = lanes[step], joins[step], joins[step + 1]
            if begin < end:
                clock = clocks[current[lane]]
                for source in sources[begin:end]:
                    if clock[lanes[source]] <= source:
                        new = clocks[last + 1]
                        np.maximum(clock, clocks[row[source]], out=new)
                        new[lanes[source]] = source + 1
                        clock = new
                if clock is clocks[last + 1]:
                    last += 1
                    current[lane] = last
            row[step] = current[lane]
        self.row = np.array(row, np.int64)
        self.when = np.empty(len(self.steps), np.int64)  # in the execution
        self.when[self.order] = np.arange(len(self.steps))

    def before(self, first: Ints, second: Ints) -> Bools:
        """Whether steps are over before others start, or are the same, in every interleaving."""
        lane = self.lane[first]
        joined = self.clocks[self.row[second], lane] > first
        return np.where(lane == self.lane[second], first <= second, joined)

    def _cleared(self) -> None:
        """A word is cleared after it was waited for, and posted again after it was cleared."""
        word = self.clears.word
        waited = self.before(self.waiter[word], self.clears.step)
        self.clears.demand(waited, "may be cleared before it was waited for")
        word = self.posts.word
        cleared = self.before(self.clearer[word], self.posts.step) | ~self.released[word]
        self.posts.demand(cleared, "may be posted before it is cleared")

    # What steps read and write.

    def _accesses(self) -> None:
        """All reads, and behind them all writes."""
        moved_from, moved_to = self._transfers()
        # What a product adds to is not read by itself: its write says that it adds.
        multiplied, made = self._products()
        parts = (moved_from, multiplied, moved_to, made)
        self.access = _Accesses(*map(np.concatenate, zip(*parts, strict=True)))
        reads = len(moved_from.step) + len(multiplied.step)
        self.writing = np.arange(len(self.access.step)) >= reads
        shapes = [
            [self._shape(buffer, rank) for rank in range(self.world)]
            for buffer in range(len(BUFFERS))
        ]
        access = self.access
        rows, cols = np.array(shapes)[access.buffer, access.rank].T
        inside = (access.row >= 0) & (access.row <= access.row_stop) & (access.row_stop <= rows)
        inside &= (access.col >= 0) & (access.col <= access.col_stop) & (access.col_stop <= cols)
        self.allow(inside, np.arange(len(inside)), "leaves the buffer")

    def _regions(self, regions: list[Region], step: Ints) -> _Regions:
        numbers = {name: number for number, name in enumerate(BUFFERS)}
        buffer = _ints(numbers.get(region.buffer, -1) for region in regions)
        self.demand(buffer >= 0, step, "names no buffer")
        found = _Regions(buffer, *(_column(regions, field) for field in Region._fields[1:]))
        self.demand((found.rank >= 0) & (found.rank < self.world), step, "names no rank")
        return found

    def _transfers(self) -> tuple[_Accesses, _Accesses]:
        moved = [step.transfer for step in self.steps if step.transfer]
        step = np.flatnonzero([step.transfer is not None for step in self.steps])
        src = self._regions([transfer.src for transfer in moved], step)
        dst = self._regions([transfer.dst for transfer in moved], step)
        me = self.rank[step]
        copy = np.array([self.steps[i].op == "copy" for i in step], np.bool_)
        ends = (src.rank == me).astype(int) + (dst.rank == me)
        self.demand(ends == np.where(copy, 1, 2), step, "moves between the wrong ranks")
        for region in (src, dst):
            reached = np.isin(region.buffer, SHARED) | (region.rank == me)
            reached |= (region.buffer == A) & self.problem.symmetric
            self.demand(reached, step, "reaches memory of a peer that is not symmetric")
        flows = [source * len(BUFFERS) + target for source, target in FLOWS]
        flow = np.isin(src.buffer * len(BUFFERS) + dst.buffer, flows)
        self.demand(flow, step, "moves between the wrong buffers")
        # A collective brings all shards to where they belong; it needs no slot and no signal.
        gather = np.array([self.steps[i].op == "gather" for i in step], np.bool_)
        sizes = (src.rows == dst.rows) & (src.cols == dst.cols)
        whole = (src.rows == np.array(self.problem.rows)[me]) & (dst.rows == self.problem.m)
        sizes |= gather & whole
        self.demand(sizes, step, "moves between regions of different sizes")
        # A shard begins `offset` rows down the gathered A. All else lies where it belongs, or is
        # brought there by this transfer.
        shard = np.isin(src.buffer, SHARDS)
        offset = np.array(self.problem.offsets)[src.rank]
        down, across = dst.row - src.row, dst.col - src.col
        there = np.where(shard & ~gather, offset - down, 0), np.where(shard, -across, 0)
        home = ~np.isin(dst.buffer, RESULTS) | ((there[0] == 0) & (there[1] == 0))
        self.demand(home, step, "puts rows where others belong")
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
        self.posts.demand(gated | (at < 0), "gates other rows than those copied")

    def _products(self) -> tuple[_Accesses, _Accesses]:
        problem = self.problem
        made: list[Product]
        made, step = _flat(map(attrgetter("products"), self.steps))
        a = self._regions([product.a for product in made], step)
        out = self._regions([product.out for product in made], step)
        k_first, k_last, adds, batch = (
            _column(made, field) for field in ("k_first", "k_last", "accumulate", "batch")
        )
        fits = (a.cols == k_last - k_first) & (a.rows == out.rows) & (batch > 0)
        self.demand(fits, step, "multiplies regions that do not fit")
        mine = (a.rank == self.rank[step]) & (out.rank == self.rank[step])
        whole = (out.col == 0) & (out.col_stop == problem.n)
        self.demand(mine & whole, step, "multiplies at a peer or in part of the columns")
        buffers = np.isin(a.buffer, (A, STAGING, GATHERED)) & np.isin(out.buffer, (SUM, OUT))
        self.demand(buffers, step, "multiplies in the wrong buffers")
        exact = (adds == 0) | (out.buffer == SUM) | (not problem.rounds)
        self.demand(exact, step, "adds to what has been rounded")
        # One access for each product of a batch.
        each = np.repeat(np.arange(len(made)), batch)
        turn = np.arange(len(each)) - np.repeat(np.cumsum(batch) - batch, batch)
        a = a.at(each).down(turn * _column(made, "a_stride")[each])
        out = out.at(each).down(turn * _column(made, "out_stride")[each])
        k_first, k_last, adds, step = k_first[each], k_last[each], adds[each], step[each]
        down, across = out.row - a.row, k_first - a.col
        own = (down == np.array(problem.offsets)[a.rank]) & (across == 0)
        self.demand(own | (a.buffer != A), step, "multiplies its own rows into a peer's")
        none, zero = np.full(len(each), -1), np.zeros(len(each), np.int64)
        return (
            _Accesses(step, *a, down, across, none, none, zero),
            _Accesses(step, *out, zero, zero, k_first, k_last, adds),
        )

    def _shape(self, buffer: int, rank: int) -> tuple[int, int]:
        problem, plan = self.problem, self.plans[rank]
        return {
            A: (problem.rows[rank], problem.k),
            PUBLISH: (problem.rows[rank] if plan.publish else 0, problem.k),
            STAGING: plan.staging,
            SUM: (problem.m if plan.sums else 0, problem.n),
            OUT: (problem.m, problem.n),
            GATHERED: (problem.m if problem.return_gathered or plan.collective else 0, problem.k),
        }[buffer]

    def allow(self, holds: Bools, access: Ints, why: str) -> None:
        """Every one of these accesses obeys a rule."""
        if not holds.all():
            columns = (int(column[access[holds.argmin()]]) for column in self.access)
            step, buffer, rank, row, row_stop, col, col_stop, *_ = columns
            raise PlanError(
                f"{self.name(step)} {why} ({BUFFERS[buffer]} of rank {rank}, rows {row}:{row_stop},"
                f" columns {col}:{col_stop})"
            )

    # 4. Composition with the calls before and behind.

    def _compose(self) -> None:
        if not self.words:
            step, _ = self._touches()
            self.demand(np.zeros(len(step), np.bool_), step, "shares memory without a signal")
            return
        # Who posts and who waits for the words that hand slots over, by waiter and poster.
        posts = self.poster.reshape(self.world, -1)[:, : self.world]
        waits = self.waiter.reshape(self.world, -1)[:, : self.world]
        hand_over = posts.max(axis=0)
        whole = ((posts == hand_over) & (posts >= 0) | np.eye(self.world, dtype=bool)).all(axis=0)
        if not whole.all():
            rank = whole.argmin()
            raise PlanError(f"rank {rank} does not hand its slot to every peer in one step")
        step, home = self._touches()
        me = self.rank[step]
        begun = (home == me) | self.before(waits[me, home], step)
        late = np.flatnonzero(~begun)
        lane_rank = np.array([rank for rank, _ in self.lanes])
        for rank in set(home[late].tolist()):
            those = late[home[late] == rank]
            clocks = self.clocks[self.row[step[those]]]
            begun[those] = clocks[:, lane_rank == rank].any(axis=1)
        rank = home[begun.argmin()]
        self.demand(begun, step, f"reaches rank {rank} before that has taken over its slot")
        over = self.before(step, hand_over[home])
        rank = home[over.argmin()]
        self.demand(over, step, f"may still use rank {rank}'s slot when that hands it on")

    def _touches(self) -> tuple[Ints, Ints]:
        """Steps that use shared memory or words of a rank in this call, and that rank."""
        access = self.access
        shared = np.isin(access.buffer, SHARED) | (access.rank != self.rank[access.step])
        found = [(access.step[shared], access.rank[shared])]
        for uses in (self.posts, self.waits, self.clears):
            # The post that hands a slot over is for the next call.
            here = ~self.released[uses.word] | (uses is not self.posts)
            found.append((uses.step[here], uses.word[here] // max(self.words, 1)))
        steps, homes = zip(*found, strict=True)
        return np.concatenate(steps), np.concatenate(homes)

    # 3. Memory.

    def _memory(self) -> None:
        """Check the accesses to every rectangle that no access divides."""
        access, k = self.access, self.problem.k
        each, before, behind = self._cells()
        write = self.writing[each]

        old, new = each[before[~write]], each[~write]
        self.allow(before[~write] >= 0, new, "reads what nobody has written")
        ordered = self.before(access.step[old], access.step[new])
        self.allow(ordered, new, "may read before it is written")
        same = access.row_shift[old] == access.row_shift[new]
        same &= access.col_shift[old] == access.col_shift[new]
        self.allow(same, new, "reads another piece than it should")
        done = (access.buffer[new] != SUM) | (access.k_last[old] == k)
        self.allow(done, new, "rounds before the last term")

        old, new = each[~write & (behind >= 0)], each[behind[~write & (behind >= 0)]]
        ordered = self.before(access.step[old], access.step[new])
        self.allow(ordered, new, "overwrites what may still be read")

        old, new = each[before[write & (before >= 0)]], each[write & (before >= 0)]
        ordered = self.before(access.step[old], access.step[new])
        self.allow(ordered, new, "may be overwritten by an unordered step")
        again = (access.adds[new] > 0) | ~np.isin(access.buffer[new], RESULTS)
        self.allow(again, new, "is written twice")
        once = (access.adds[new] == 0) | (access.k_first[new] >= access.k_last[old])
        self.allow(once, new, "adds the same part of k twice")

        old, new = each[before[write]], each[write]
        adds, k_first = access.adds[new] > 0, access.k_first[new]
        self.allow(~adds | (before[write] >= 0), new, "adds to what nobody has written")
        begin = np.where(adds, access.k_last[old], 0)
        self.allow((k_first < 0) | (k_first == begin), new, "leaves out part of k")
        done = (k_first < 0) | (behind[write] >= 0) | (access.k_last[new] == k)
        self.allow(done, new, "does not cover all of k")

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

        index, write = np.arange(len(each)), self.writing[kept][each]
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
            for rank in range(self.world):
                rows, cols = self._shape(buffer, rank)
                found = int(written[buffer * self.world + rank])
                if found != rows * cols:
                    raise PlanError(
                        f"rank {rank}: {found} of {rows * cols} elements of {BUFFERS[buffer]} are "
                        "written"
                    )


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


def _flat(found: Iterable[Sequence[T]]) -> tuple[list[T], Ints]:
    """What steps hold several of, and the number of the step that each belongs to."""
    each = list(found)
    owner = np.repeat(np.arange(len(each)), _ints(map(len, each)))
    return list(chain.from_iterable(each)), owner


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


def _column(rows: Iterable[NamedTuple], field: str) -> Ints:
    return _ints(map(attrgetter(field), rows))
