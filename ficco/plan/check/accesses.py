"""What every step reads and writes, and the rules for each step's operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ficco.plan.check.columns import (
    Accesses,
    Bools,
    Ints,
    Regions,
    among,
    bools,
    filled,
    ints,
    unzipped,
)
from ficco.plan.check.rules import PlanError, Who, demand
from ficco.plan.check.signals import Signals
from ficco.plan.check.steps import Steps
from ficco.plan.model import SHARED_BUFFERS, Product, Reduction, Region, Transfer

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


class Footprint:
    """What the steps of all ranks read and write.

    Attributes:
        access: all reads, followed by all writes.
        reads: how many are reads.
        numbers: by set of ranks whose products are summed somewhere, its number.
    """

    def __init__(self, steps: Steps, signals: Signals) -> None:
        self.steps, self.signals = steps, signals
        self.problem, self.world = steps.problem, steps.world
        self.numbers = {0: 0}
        self._blocks()
        found = (self._transfers(), self._products(), self._reductions(), self._collectives())
        # The sum that a product adds to is not listed as a read: the write says that it adds.
        reads, writes = zip(*found, strict=True)
        self.access = Accesses(*map(np.concatenate, zip(*reads, *writes, strict=True)))
        self.reads = sum(len(part.step) for part in reads)
        self._inside()

    def by_access(self, access: Ints) -> Who:
        """Names accesses."""

        def who(index: int) -> str:
            columns = (int(column[access[index]]) for column in self.access)
            step, buffer, rank, row, row_stop, col, col_stop, *_ = columns
            return (
                f"{self.steps.name(step)}, at rows {row}:{row_stop} and columns {col}:{col_stop} "
                f"of {BUFFERS[buffer]} of rank {rank},"
            )

        return who

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

    def _inside(self) -> None:
        """No access leaves its buffer."""
        shapes = [[self.steps.shape(name, plan) for plan in self.steps.plans] for name in BUFFERS]
        access = self.access
        home = access.buffer * self.world + access.rank
        rows, cols = (np.take(size, home) for size in np.moveaxis(np.array(shapes), 2, 0))
        inside = (access.row >= 0) & (access.row <= access.row_stop) & (access.row_stop <= rows)
        inside &= (access.col >= 0) & (access.col <= access.col_stop) & (access.col_stop <= cols)
        demand(inside, self.by_access(np.arange(len(inside))), "leaves the buffer")

    def _regions(self, regions: Sequence[Region], step: Ints) -> Regions:
        names, *bounds = unzipped(regions, Region)
        numbers = dict.fromkeys(names, -1) | {name: i for i, name in enumerate(BUFFERS)}
        buffer = ints(map(numbers.__getitem__, names))
        demand(buffer >= 0, self.steps.by_step(step), "names no buffer")
        found = Regions(buffer, *map(ints, bounds))
        known = (found.rank >= 0) & (found.rank < self.world)
        demand(known, self.steps.by_step(step), "names no rank")
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
        demand(inside | ~needs, who, "takes rows of another block")
        return np.where(needs, self.lands[src, dst] - first, 0)

    def _transfers(self) -> tuple[Accesses, Accesses]:
        transfers = list(self.steps.of.transfer)
        for number in self.steps.collective:
            transfers[number] = None
        step = np.flatnonzero(bools(map(bool, transfers)))
        sources, targets, named = unzipped(list(filter(None, transfers)), Transfer)
        who, me = self.steps.by_step(step), self.steps.rank[step]
        src, dst = self._regions(sources, step), self._regions(targets, step)
        terms = self._terms(named)
        scatters = self.problem.kind.scatters
        demand(
            (terms > 0) == scatters, who, "does not say whose products it moves, or says so of A"
        )
        copy = bools(map("copy".__eq__, self.steps.of.op))[step]
        ends = (src.rank == me).astype(int) + (dst.rank == me)
        demand(ends == np.where(copy, 1, 2), who, "moves between the wrong ranks")
        for region in (src, dst):
            reached = np.isin(region.buffer, SHARED) | (region.rank == me)
            reached |= (region.buffer == A) & self.problem.symmetric
            demand(reached, who, "reaches memory of a peer that is not symmetric")
        flows = SCATTER_FLOWS if scatters else GATHER_FLOWS
        allowed = [source * len(BUFFERS) + target for source, target in flows]
        flow = np.isin(src.buffer * len(BUFFERS) + dst.buffer, allowed)
        demand(flow, who, "moves between the wrong buffers")
        sizes = (src.rows == dst.rows) & (src.cols == dst.cols)
        demand(sizes, who, "moves between regions of different sizes")
        # The contents of staging are assumed to be what the target, or the signal after the copy,
        # takes them for. The rules for reads check that.
        lands = np.isin(src.buffer, LEAVING) & ~np.isin(dst.buffer, LEAVING)
        way = self._of_block(src, src.rank, dst.rank, lands, who)
        down, across = src.row - dst.row, src.col - dst.col
        begins, staged = self.begins[dst.buffer, dst.rank], src.buffer == STAGING
        here = np.where(staged, begins - down, self.begins[src.buffer, src.rank])
        here_across = np.where(staged & (dst.buffer != STAGING), -across, 0)
        on = np.flatnonzero(staged & (dst.buffer == STAGING))
        posts = [self.steps.of.posts[number] for number in step[on]]
        here[on] = ints(found[0].first if found else 0 for found in posts) - src.row[on]
        there, there_across = here + down + way, here_across + across
        home = (dst.buffer == STAGING) | (there == begins) & (there_across == 0)
        home &= ~np.isin(dst.buffer, LEAVING) | (src.rank == dst.rank)
        demand(home, who, "puts rows where others belong")
        self._gates(step[copy], (dst.row + there)[copy], (dst.row_stop + there)[copy])
        none, zero = filled(-1, len(step)), filled(0, len(step))
        return (
            Accesses(step, *src, here, here_across, none, none, zero, terms, none),
            Accesses(step, *dst, there, there_across, none, none, zero, terms, none),
        )

    def _gates(self, copy: Ints, row: Ints, row_stop: Ints) -> None:
        """A signal posted after a copy gates the rows that were copied."""
        at = np.full(len(self.steps.all), -1)
        at[copy] = np.arange(len(copy))
        at = at[self.signals.posts.step]
        row, row_stop = np.append(row, 0), np.append(row_stop, 0)  # for posts not after a copy
        bounds = self.signals.signal.first, self.signals.signal.last
        first, last = (ints(column)[self.signals.posts.which] for column in bounds)
        gated = (first <= row[at]) & (row_stop[at] <= last)
        demand(gated | (at < 0), self.signals.posts.who, "gates other rows than those copied")

    def _products(self) -> tuple[Accesses, Accesses]:
        problem = self.problem
        found, step = self.steps.held(self.steps.of.products)
        made = unzipped(found, Product)
        who, me = self.steps.by_step(step), self.steps.rank[step]
        a, out = self._regions(made.a, step), self._regions(made.out, step)
        k_first, k_last, adds, batch = map(
            ints, (made.k_first, made.k_last, made.accumulate, made.batch)
        )
        inner = problem.kind.inner
        turned = bools(made.transposed)
        demand(turned == inner, who, "multiplies A the wrong way round")
        summed, left = (a.rows, a.cols) if inner else (a.cols, a.rows)
        fits = (summed == k_last - k_first) & (left == out.rows)
        fits &= (batch == 1) if inner else (batch > 0)
        demand(fits, who, "multiplies regions that do not fit")
        demand((a.rank == me) & (out.rank == me), who, "multiplies at a peer")
        if problem.kind.scatters:
            whole = (k_first == 0) & (k_last == problem.k)
            demand(whole, who, "multiplies part of k")
            targets = np.where(adds > 0, among(out.buffer, STAGING, OUT), out.buffer != STAGING)
            buffers = (a.buffer == A) & targets & among(out.buffer, STAGING, OUT, PARTIAL, PUBLISH)
        else:
            whole = (out.col == 0) & (out.col_stop == problem.n)
            demand(whole, who, "multiplies in part of the columns")
            buffers = among(a.buffer, A, STAGING, GATHERED) & among(out.buffer, SUM, OUT)
            exact = (adds == 0) | (out.buffer == SUM) | (not problem.rounds)
            demand(exact, who, "adds to what has been rounded")
        demand(buffers, who, "multiplies in the wrong buffers")
        adds, joins, terms = self._joined(made, adds, me, who)
        which = np.flatnonzero(bools(map(bool, made.addend)))
        adding = step[which]
        # One access for each product of a batch.
        each = np.repeat(np.arange(len(step)), batch)
        turn = np.arange(len(each)) - np.repeat(np.cumsum(batch) - batch, batch)
        a = a.at(each).down(turn * ints(made.a_stride)[each])
        out = out.at(each).down(turn * ints(made.out_stride)[each])
        k_first, k_last, adds, step = k_first[each], k_last[each], adds[each], step[each]
        who, mine, kept = self.steps.by_step(step), a.buffer == A, ~np.isin(out.buffer, LEAVING)
        way = self._of_block(a, a.rank, out.rank, mine & kept, who)
        begins = self.begins[out.buffer, out.rank]
        # The row and the column of the gathered A at which the product's piece begins.
        row, col = (k_first, out.row) if inner else (out.row + begins, k_first)
        across = col - a.col
        there = np.where(mine, begins + a.row + way - row, begins)
        home = (there == begins) | (out.buffer == STAGING)
        demand(home & ((across == 0) | ~mine), who, "multiplies its own rows into a peer's")
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
        who = self.steps.by_step(step)
        addend, out = self._regions(made.addend, step), self._regions(made.out, step)
        fits = (addend.rows == out.rows) & (addend.col == out.col) & (addend.cols == out.cols)
        fits &= (ints(made.batch) == 1) & (ints(made.accumulate) == 0)
        demand(fits, who, "adds itself to a region that does not fit")
        local = (addend.rank == self.steps.rank[step]) & among(addend.buffer, STAGING)
        demand(local & (out.buffer == OUT), who, "adds itself to the wrong buffer")
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
            demand(plain, who, "adds itself to what another rank made")
            return adds, filled(-1, len(adds)), filled(0, len(adds))
        joined = (adds > 0) | added
        said = bools(mask > 0 for mask in made.terms) == joined
        demand(said, who, "does not say whose products it adds itself to")
        own = [1 << rank for rank in me.tolist()]
        pairs = list(zip(made.terms, own, strict=True))
        new = np.array([not mask & mine for mask, mine in pairs], np.bool_)
        demand(new, who, "adds itself to a sum that it is in")
        joins = np.where(adds > 0, self._terms(made.terms), -1)
        return np.zeros_like(adds), joins, self._terms(mask | mine for mask, mine in pairs)

    def _reductions(self) -> tuple[Accesses, Accesses]:
        made: list[Reduction] = []
        numbers: list[int] = []
        if "reduce" in self.steps.operations:
            made = list(filter(None, self.steps.of.reduction))
            numbers = [number for number, found in enumerate(self.steps.of.reduction) if found]
        step = np.array(numbers, np.int64)
        who, me = self.steps.by_step(step), self.steps.rank[step]
        parts = ints(len(reduction.parts) for reduction in made)
        named = ints(len(reduction.terms) for reduction in made)
        some = (parts > 0) & (parts == named) & self.problem.kind.sums
        demand(some, who, "does not say whose products it sums")
        left = self._terms(map(self._summed, made, step.tolist()))
        out = self._regions([reduction.out for reduction in made], step)
        each = np.repeat(np.arange(len(made)), parts)
        part_step = step[each]
        part = self._regions([p for reduction in made for p in reduction.parts], part_step)
        who, here = self.steps.by_step(part_step), out.at(each)
        local = (part.rank == me[each]) & among(part.buffer, PARTIAL, STAGING)
        local |= part.buffer == PUBLISH  # peers may read it
        local &= (here.rank == me[each]) & (here.buffer == OUT)
        demand(local, who, "sums in the wrong buffers")
        sizes = (part.rows == here.rows) & (part.cols == here.cols)
        demand(sizes, who, "sums regions of different sizes")
        begins = self.begins[out.buffer, out.rank]
        down, across = here.row + begins[each] - part.row, here.col - part.col
        home = (part.buffer == STAGING) | (down == 0) & (across == 0)
        demand(home, who, "sums rows that do not belong together")
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
                raise PlanError(f"{self.steps.name(step)} sums the product of a rank twice")
            if mask & -mask < union:
                raise PlanError(f"{self.steps.name(step)} does not sum in the order of the ranks")
            union |= mask
        return union

    def _collectives(self) -> tuple[Accesses, Accesses]:
        """Accesses of collectives: on each rank one moves everything to where it belongs."""
        reads: list[tuple[int, ...]] = []
        writes: list[tuple[int, ...]] = []
        kind, everyone = self.problem.kind, (1 << self.world) - 1
        for number in self.steps.collective:
            rank, transfer = int(self.steps.rank[number]), self.steps.all[number].transfer
            ends = ("a", "gathered")
            if kind.scatters:
                ends = ("out" if kind.returns else "partial", "out")
            src, dst = (
                Region(end, rank, 0, rows, 0, cols)
                for end in ends
                for rows, cols in [self.steps.shape(end, self.steps.plans[rank])]
            )
            if transfer != (src, dst, 0):
                raise PlanError(f"{self.steps.name(number)} moves something else than the whole")
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
