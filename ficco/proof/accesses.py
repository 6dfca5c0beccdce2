"""Reads and writes of every step, and the rules for each step's operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ficco.plan import Applied, Attending, Attendings, LibraryMove, Product, Products
from ficco.plan.model import Reduction, Region, Transfer
from ficco.plan.network import MOVER
from ficco.problems.specification import Attention, Contraction, Exchange
from ficco.proof.columns import (
    Accesses,
    Bools,
    Ints,
    PlanError,
    Regions,
    Who,
    bools,
    demand,
    ints,
    repeated,
    unzipped,
)
from ficco.proof.order import SignalColumns
from ficco.proof.steps import Steps

#: Larger than the number of any row.
_NO_END = np.int64(1) << 62


class BufferColumns:
    """Properties of :class:`ficco.problems.specification.Buffer` as columns, by number of buffer.
    Matrices and dtypes are numbers. ``begins``, ``left``: numbers of the first row and column, by
    buffer and rank."""

    def __init__(self, steps: Steps) -> None:
        buffers, world = steps.buffers, steps.world
        self.names = [buffer.name for buffer in buffers]
        matrices = dict.fromkeys(buffer.holds for buffer in buffers)
        for one in steps.specification.contractions:  # a rank without rows may hold none of them
            matrices |= dict.fromkeys((one.a, *(factors.matrix for factors in one.factors)))
        for each in steps.specification.attentions:
            matrices |= dict.fromkeys((*each[:3], *([each.back] if each.back else [])))
        for application in steps.specification.applications:
            rows = *application.inputs, *application.outs
            matrices |= dict.fromkeys(one.matrix for one in rows)
        self.matrix = {name: number for number, name in enumerate(matrices)}
        dtypes = sorted({buffer.dtype for buffer in buffers})
        self.holds = ints(self.matrix[buffer.holds] for buffer in buffers)
        self.operand = bools(buffer.memory == "operand" for buffer in buffers)
        self.result = bools(buffer.memory == "result" for buffer in buffers)
        self.slot = bools(buffer.memory == "slot" for buffer in buffers)
        self.placed = bools(buffer.placed for buffer in buffers)
        self.leaves = bools(buffer.leaves for buffer in buffers)
        self.reachable = bools(buffer.reachable for buffer in buffers)
        self.packed = bools(buffer.layout == "columns" for buffer in buffers)
        self.scaled = bools(buffer.factor != 1 for buffer in buffers)
        self.itemsize = ints(buffer.itemsize for buffer in buffers)
        self.dtype = ints(dtypes.index(buffer.dtype) for buffer in buffers)
        self.begins, self.left = (
            np.array([one or (0,) * world for one in firsts], np.int64).reshape(len(buffers), world)
            for firsts in ([one.first for one in buffers], [one.left for one in buffers])
        )


class _Route:
    """First rows of the blocks of all pairs of ranks, where they leave and where they land, as
    ``[source, target]``."""

    def __init__(self, exchange: Exchange, world: int) -> None:
        ranks = range(world)
        self.leaves, self.lands, self.block = (
            np.array([[number(src, dst) for dst in ranks] for src in ranks], np.int64)
            for number in (exchange.leaves, exchange.lands, exchange.block)
        )
        self.parts = exchange.parts
        self.leaves_apart, self.lands_apart = exchange.leaves_apart, exchange.lands_apart
        #: Whether a row has the same number at all ranks that receive it.
        self.common = all(
            (table == table[:, :1]).all() for table in (self.leaves, self.lands, self.block)
        )

        #: By owner of a block and by its peer: first row at the owner, first row at the peer, and
        #: number of rows.
        self._by_owner = self.leaves, self.lands, self.block
        if exchange.sums:
            self._by_owner = self.lands.T, self.leaves.T, self.block.T

    def passed(self, row: Ints, row_stop: Ints, at: Ints, to: Ints) -> tuple[Ints, Bools]:
        """Offset from row numbers at rank ``at`` to row numbers at rank ``to``, and whether both
        ranks have all these rows in one block of the same owner."""
        way, known = np.zeros(len(row), np.int64), np.zeros(len(row), np.bool_)
        for at_owner, first, block in zip(*self._by_owner, strict=True):
            up = at_owner - first  # by rank, offset from its row numbers to the owner's
            here = (first[at] <= row) & (row_stop <= first[at] + block[at])
            begin, end = row + up[at] - at_owner[to], row_stop + up[at] - at_owner[to]
            here &= (0 <= begin) & (end <= block[to]) & ~known
            way[here] = (up[at] - up[to])[here]
            known |= here
        return way, known


class Footprint:
    """Reads and writes of the steps of all ranks.

    Attributes:
        access: all reads, followed by all writes.
        reads: number of reads.
        buffers: the buffers as columns.
        numbers: number of each set of ranks whose products are summed.
        contraction: by matrix, the product that computes it.
        summed: by matrix and rank, length of the summed dimension.
        attention: by matrix, the attention that computes it.
        senders: by matrix, function for the ranks that send rows to a rank.
        apart: by matrix, whether parts written by different steps are kept separately.
        transposed: by matrix, whether the summed dimension is covered in any order.
        sums: by matrix, whether products of all ranks are summed in it.
        terms: by matrix, whether steps state the ranks whose products they move.
    """

    def __init__(self, steps: Steps, signals: SignalColumns) -> None:
        self.steps, self.signals = steps, signals
        self.specification, self.world = steps.specification, steps.world
        self.buffers = BufferColumns(steps)
        self.numbers = {0: 0}
        self._matrices()
        parts = (
            self._transfers(),
            self._products(),
            self._attends(),
            self._applies(),
            self._reductions(),
            self._collectives(),
        )
        # A product's read of the sum that it adds to is not listed: `adds` of the write implies it.
        reads, writes = zip(*parts, strict=True)
        self.access = Accesses(*map(np.concatenate, zip(*reads, *writes, strict=True)))
        self.reads = sum(len(part.step) for part in reads)
        self._inside(self.access, self.by_access(np.arange(len(self.access.step))))
        self._cuts()
        # Only reductions multiply by the factor of a result.
        step, scaled = (one[self.reads :] for one in (self.access.step, self.access.buffer))
        reduces = bools(isinstance(one.work, Reduction) for one in self.steps.all)[step]
        who = self.steps.by_step(step)
        demand(reduces | ~self.buffers.scaled[scaled], who, "leaves out the factor of a result")

    def by_access(self, which: Ints) -> Who:
        """Function that names accesses in errors."""

        def who(index: int) -> str:
            columns = (int(column[which[index]]) for column in self.access)
            step, buffer, rank, row, row_stop, col, col_stop, *_ = columns
            return (
                f"{self.steps.name(step)}, at rows {row}:{row_stop} and columns {col}:{col_stop} "
                f"of {self.buffers.names[buffer]} of rank {rank},"
            )

        return who

    def _matrices(self) -> None:
        matrix, world = self.buffers.matrix, self.world
        exchanges = {matrix[name]: one for name, one in self.specification.exchanges.items()}
        self.route = {number: _Route(one, world) for number, one in exchanges.items()}
        self.travels, self.common, self.sums, self.terms = np.zeros((4, len(matrix)), np.bool_)
        self.senders = {n: one.senders for n, one in exchanges.items() if one.senders}
        for number, exchange in exchanges.items():
            self.travels[number], self.common[number] = True, self.route[number].common
            self.sums[number], self.terms[number] = exchange.sums, exchange.terms
        self.contraction: dict[int, Contraction] = {}
        self.summed = np.zeros((len(matrix), world), np.int64)
        self.transposed = np.zeros(len(matrix), np.bool_)
        self.share = np.zeros(len(matrix), np.int64)
        for contraction in self.specification.contractions:
            number = matrix[contraction.out]
            self.contraction[number] = contraction
            self.summed[number] = contraction.summed
            self.transposed[number] = contraction.transposed
            self.share[number] = contraction.share
        self.attention: dict[int, Attention] = {}
        self.apart = np.zeros(len(matrix), np.bool_)
        for attention in self.specification.attentions:
            number = matrix[attention.out]
            self.attention[number] = attention
            self.apart[number] = not attention.back
            self.summed[number], self.transposed[number] = attention.landed, True

    @cached_property
    def _sizes(self) -> Ints:
        """Rows and columns of the buffers, by buffer and rank."""
        buffers, plans = self.steps.buffers, self.steps.plans
        shapes = np.array([buffer.shapes for buffer in buffers], np.int64)
        listed = np.array([[one.name in plan.buffer for plan in plans] for one in buffers])
        sizes: Ints = shapes * listed[:, :, None]
        return sizes

    def _inside(self, regions: Accesses | Regions, who: Who) -> None:
        """Check that no region leaves its buffer."""
        rows, cols = self._sizes[regions.buffer, regions.rank].T
        inside = (regions.row >= 0) & (regions.row <= regions.row_stop)
        inside &= (regions.row_stop <= rows) & (regions.col_stop <= cols)
        inside &= (regions.col >= 0) & (regions.col <= regions.col_stop)
        demand(inside, who, "leaves the buffer")

    def _cuts(self) -> None:
        """Check that all accesses to packed columns use the same cuts."""
        access = self.access
        full = (access.row < access.row_stop) & (access.col < access.col_stop)
        packed = np.flatnonzero(self.buffers.packed[access.buffer] & full)
        instance = (access.buffer * self.world + access.rank)[packed]
        col, stop = access.col[packed], access.col_stop[packed]
        order = np.lexsort((stop, col, instance))
        one, two = order[:-1], order[1:]
        right = (instance[one] != instance[two]) | (stop[one] <= col[two])
        right |= (col[one] == col[two]) & (stop[one] == stop[two])
        who = self.by_access(packed[two])
        demand(right, who, "cuts packed columns otherwise than another step")

    def _regions(self, regions: Sequence[Region], step: Ints) -> Regions:
        names, *bounds = unzipped(regions, Region)
        known = {name: i for i, name in enumerate(self.buffers.names)}
        numbers = dict.fromkeys(names, -1) | known
        buffer = ints(map(numbers.__getitem__, names))
        demand(buffer >= 0, self.steps.by_step(step), "names no buffer")
        columns = Regions(buffer, *map(ints, bounds))
        inside = (columns.rank >= 0) & (columns.rank < self.world)
        demand(inside, self.steps.by_step(step), "names no rank")
        return columns

    def _terms(self, terms: Iterable[int]) -> Ints:
        """Numbers of sets of ranks: an int64 has bits for 63 ranks only."""
        masks = list(terms)
        for mask in dict.fromkeys(masks):
            self.numbers.setdefault(mask, len(self.numbers))
        return ints(map(self.numbers.__getitem__, masks))

    def _begins(self, regions: Regions) -> Ints:
        """Numbers of the first rows of the buffers."""
        begins: Ints = self.buffers.begins[regions.buffer, regions.rank]
        return begins

    def _way(
        self, matrix: Ints, row: Ints, row_stop: Ints, src: Ints, dst: Ints, needs: Bools, who: Who
    ) -> Ints:
        """Offset from row numbers where rows leave to their numbers where they land. Checks that
        the rows are in one part of the block of the two ranks."""
        way = np.zeros(len(row), np.int64)
        for number, route in self.route.items():
            here = needs & (matrix == number)
            if not here.any():
                continue
            if self.sums[number] and not route.common:
                far, known = route.passed(row, row_stop, src, dst)
                demand(known | ~here, who, "takes rows of another block")
                way += np.where(here, far, 0)
                continue
            first, lands = route.leaves[src, dst], route.lands[src, dst]
            if route.parts > 1:
                part = np.clip((row - first) // route.leaves_apart, 0, route.parts - 1)
                first, lands = first + part * route.leaves_apart, lands + part * route.lands_apart
            inside = (first <= row) & (row_stop <= first + route.block[src, dst])
            demand(inside | ~here, who, "takes rows of another block")
            way += np.where(here, lands - first, 0)
        return way

    def _transfers(self) -> tuple[Accesses, Accesses]:
        of = self.buffers
        moves, step = self.steps.of_type(Transfer)
        if any(move.batch != 1 for move in moves):
            moves, step = self._each_move(moves, step)
        sources, targets, named, functions, factors, *_, movers = unzipped(moves, Transfer)
        who, me = self.steps.by_step(step), self.steps.rank[step]
        src, dst = self._regions(sources, step), self._regions(targets, step)
        terms = self._terms(named)
        matrix = of.holds[src.buffer]
        says = (terms > 0) == self.terms[matrix]
        demand(says, who, "does not say whose products it moves, or says so of an operand")
        self._own_terms(terms, src, who)
        copy = src.rank != dst.rank
        demand((src.rank == me) | (dst.rank == me), who, "moves between the wrong ranks")
        sent = bools(map(MOVER.__eq__, movers))
        for region in (src, dst):
            reached = of.reachable[region.buffer] & (
                self.steps.host[region.rank] == self.steps.host[me]
            )
            reached |= (region.rank == me) | sent
            demand(reached, who, "reaches memory of a peer that is not symmetric, or elsewhere")
        right = self._written(matrix, functions, copy, who) == of.holds[dst.buffer]
        right &= ~of.operand[dst.buffer] & (of.leaves[src.buffer] | ~of.leaves[dst.buffer])
        # Rows that have landed may go on to another peer that receives them.
        onward = copy & ~of.leaves[src.buffer] & ~self.common[matrix]
        right &= ~copy | self.travels[matrix]
        right &= ~onward | ~of.placed[src.buffer] & ~of.placed[dst.buffer]
        exact = of.itemsize[src.buffer] >= of.itemsize[dst.buffer]
        exact &= ~copy | (of.dtype[src.buffer] == of.dtype[dst.buffer])
        demand(right & exact, who, "moves between the wrong buffers")
        sizes = (src.rows == dst.rows) & (src.cols == dst.cols)
        if any(functions):  # functions of whole rows may change the width
            whole = (src.col == 0) & (src.cols == self._sizes[src.buffer, src.rank, 1])
            whole &= (dst.col == 0) & (dst.cols == self._sizes[dst.buffer, dst.rank, 1])
            sizes |= (src.rows == dst.rows) & whole & bools(functions)
        demand(sizes, who, "moves between regions of different sizes")
        meets = (src.buffer == dst.buffer) & (src.rank == dst.rank)
        meets &= (src.row < dst.row_stop) & (dst.row < src.row_stop)
        meets &= (src.col < dst.col_stop) & (dst.col < src.col_stop)
        demand(~meets, who, "moves to where it still reads")
        # Rows in a buffer without fixed places get their numbers from the target, from the signal
        # after the copy, or else are 0, 1, .... The rules for reads check this assumption.
        lands = of.leaves[src.buffer] & ~of.leaves[dst.buffer]
        leaving = src.row + self._begins(src)
        way = self._way(matrix, leaving, leaving + src.rows, src.rank, dst.rank, lands, who)
        down, across = src.row - dst.row, src.col - dst.col
        begins, loose = self._begins(dst), ~of.placed[src.buffer]
        src_shift = np.where(loose, begins - down, self._begins(src))
        left, dst_left = (of.left[one.buffer, one.rank] for one in (src, dst))
        src_across = np.where(loose, np.where(of.placed[dst.buffer], dst_left - across, 0), left)
        on = np.flatnonzero(loose & ~of.placed[dst.buffer])
        posts = [self.steps.of.posts[number] for number in step[on]]
        gated = ints(signals[0].first if signals else -1 for signals in posts)
        src_shift[on] = np.where(gated < 0, 0, gated - src.row[on])
        for number, route in self.route.items():
            relays = on[which := np.flatnonzero((onward & (matrix == number))[on])]
            ends = gated[which], gated[which] + src.rows[relays], dst.rank[relays], src.rank[relays]
            back, known = route.passed(*ends)
            demand(known, self.steps.by_step(step[relays]), "passes on what is for others")
            src_shift[relays] += back
            way[relays] -= back
        dst_shift, dst_across = src_shift + down + way, src_across + across
        in_place = ~of.placed[dst.buffer] | (dst_shift == begins) & (dst_across == dst_left)
        in_place &= ~of.leaves[dst.buffer] | (src.rank == dst.rank)
        demand(in_place, who, "puts rows where others belong")
        self._announced(step[copy], (dst.row + dst_shift)[copy], (dst.row_stop + dst_shift)[copy])
        writes = Accesses.of(step, dst, dst_shift, dst_across, terms=terms)
        if cast := self._casts(step, dst, functions, factors):
            writes = Accesses(*map(np.concatenate, zip(writes, cast, strict=True)))
        return Accesses.of(step, src, src_shift, src_across, terms=terms), writes

    def _each_move(self, moves: list[Transfer], step: Ints) -> tuple[list[Transfer], Ints]:
        """Transfers of batches, one by one, and their steps."""
        batch = ints(move.batch for move in moves)
        cast = bools(map(bool, (move.factors for move in moves)))
        demand((batch > 0) & ((batch == 1) | ~cast), self.steps.by_step(step), "is no batch")
        each, turn = repeated(batch)
        copies = []
        for index, i in zip(each.tolist(), turn.tolist(), strict=True):
            move = moves[index]
            ends = _down(move.src, i * move.src_stride), _down(move.dst, i * move.dst_stride)
            copies.append(move._replace(src=ends[0], dst=ends[1]))
        return copies, step[each]

    def _casts(
        self, step: Ints, dst: Regions, functions: Sequence[str], factors: Sequence[Region | None]
    ) -> Accesses | None:
        """Writes of the factors of cast operands. Checks that a cast covers whole factors."""
        of, who = self.buffers, self.steps.by_step(step)
        by_matrix = {
            of.matrix[one.a]: one.factors[0] for one in self.contraction.values() if one.factors
        }
        cast = bools(functions) & np.isin(of.holds[dst.buffer], list(by_matrix))
        demand(cast == bools(map(bool, factors)), who, "casts without factors, or the wrong matrix")
        if not (which := np.flatnonzero(cast)).size:
            return None
        step, dst, who = step[which], dst.at(which), self.steps.by_step(step[which])
        region = self._regions([one for one in factors if one], step)
        specified = [by_matrix[each] for each in of.holds[dst.buffer].tolist()]
        right = of.holds[region.buffer] == ints(of.matrix[one.matrix] for one in specified)
        right &= (region.rank == dst.rank) & of.placed[dst.buffer] & of.placed[region.buffer]
        right &= ~of.operand[region.buffer] & (self._begins(dst) == self._begins(region))
        for at, (first, last, begin, end) in enumerate(
            (
                (dst.row, dst.row_stop, region.row, region.row_stop),
                (dst.col, dst.col_stop, region.col, region.col_stop),
            )
        ):
            share = ints(one.share[at] for one in specified)
            whole = self._sizes[dst.buffer, dst.rank, at]
            unit = np.maximum(share, 1)
            right &= (first % unit == 0) & ((last % unit == 0) | (last == whole))
            right &= (share > 0) | ((first == 0) & (last == whole))
            bounds = _shared(first, last, share)
            right &= (begin == bounds[0]) & (end == bounds[1])
        demand(right, who, "casts with factors that do not fit")
        return Accesses.of(step, region, self._begins(region))

    def _written(self, matrix: Ints, functions: Sequence[str], copy: Bools, who: Who) -> Ints:
        """Matrices that transfers write: the moved matrix, or the result of a function of it."""
        written = matrix.copy()
        names = list(self.buffers.matrix)
        for at in np.flatnonzero(bools(functions)).tolist():
            name = functions[at], names[matrix[at]]
            output = self.specification.functions.get(name)
            if output is None or copy[at] or self.terms[matrix[at]]:
                raise PlanError(
                    f"{who(at)} applies the function {name[0]!r}, which is not asked for"
                )
            written[at] = self.buffers.matrix.get(output, -1)
        return written

    def _announced(self, copy: Ints, row: Ints, row_stop: Ints) -> None:
        """Check that the rows of each signal posted after a copy include the copied rows."""
        begin, end = np.full(len(self.steps.all), _NO_END), np.full(len(self.steps.all), -1)
        np.minimum.at(begin, copy, row)
        np.maximum.at(end, copy, row_stop)
        begin, end = begin[self.signals.posts.step], end[self.signals.posts.step]
        bounds = self.signals.signal.first, self.signals.signal.last
        first, last = (ints(column)[self.signals.posts.which] for column in bounds)
        covers = (first <= begin) & (end <= last) | (end < 0)
        demand(covers, self.signals.posts.who, "leaves out copied rows")

    def _each(self, kind: type[Any]) -> tuple[list[Any], Ints]:
        """The products or attentions of all steps, and the step of each."""
        works, step = self.steps.of_type(kind)
        parts, work = self.steps.held([each for each, *_ in works])
        return parts, step[work]

    def _products(self) -> tuple[Accesses, Accesses]:
        of = self.buffers
        products, step = self._each(Products)
        fields = unzipped(products, Product)
        who, me = self.steps.by_step(step), self.steps.rank[step]
        a, b, out = (self._regions(regions, step) for regions in (fields.a, fields.b, fields.out))
        adds, batch = ints(fields.accumulate), ints(fields.batch)
        matrix = of.holds[out.buffer]
        inner = self.transposed[matrix]
        demand(bools(fields.transposed) == inner, who, "multiplies A the wrong way round")
        summed, left = np.where(inner, (a.rows, a.cols), (a.cols, a.rows))
        fits = (summed == b.rows) & (left == out.rows) & (b.cols == out.cols) & (b.col == out.col)
        fits &= np.where(inner, batch == 1, batch > 0)
        demand(fits, who, "multiplies regions that do not fit")
        local = (a.rank == me) & (b.rank == me) & (out.rank == me)
        demand(local, who, "multiplies at a peer")
        # Products convert row numbers only if A is in a buffer with fixed places.
        straight = of.leaves[out.buffer] | self.sums[matrix] | ~self.travels[matrix]
        straight |= of.placed[a.buffer] & ~inner
        demand(self._asked_for(a, b, out) & straight, who, "multiplies in the wrong buffers")
        joined = self.terms[matrix]
        k_first = np.where(of.placed[b.buffer], self._first(b, who), a.col)
        share = self.share[matrix]
        # With several matrices b, rows count from the beginning of each matrix.
        k_first %= np.where(share > 0, np.maximum(self.summed[matrix, me], 1), _NO_END)
        k_last = k_first + b.rows
        whole = (k_first == 0) & (k_last == self.summed[matrix, me])
        demand(whole | ~joined, who, "multiplies part of k")
        exact = (adds == 0) | (of.itemsize[out.buffer] >= 4) | joined
        demand(exact, who, "adds to what has been rounded")
        # Only landed blocks and results are added to; all other outputs are new.
        placed = np.where(adds > 0, ~of.leaves[out.buffer], of.placed[out.buffer])
        demand(~of.operand[out.buffer] & placed, who, "multiplies in the wrong buffers")
        adds, joins, terms = self._joined(fields, adds, joined, me, who)
        which = np.flatnonzero(bools(map(bool, fields.addend)))
        scaled = np.flatnonzero(bools(map(bool, fields.factors)))
        self._scaled(matrix, fields.factors, who)
        if any(fields.bias) or any(one.bias for one in self.contraction.values()):
            self._biased(fields, matrix, k_first, out, who)
        added = self._addends([products[index] for index in which], step[which])
        # One access for each product of a batch.
        each, turn = repeated(batch)
        a = a.at(each).down(turn * ints(fields.a_stride)[each])
        out = out.at(each).down(turn * ints(fields.out_stride)[each])
        b = b.at(each).down(turn * ints(fields.b_stride)[each])
        step, inner, matrix, share = step[each], inner[each], matrix[each], share[each]
        k_first, k_last, adds = k_first[each], k_last[each], adds[each]
        who, fixed = self.steps.by_step(step), of.placed[a.buffer]
        first = self._first(a, who)
        lands = ~of.leaves[out.buffer] & fixed & ~inner
        way = self._way(matrix, first, first + a.rows, out.rank, out.rank, lands, who)
        begins = self._begins(out)
        # Number of the first row and the first column of each piece of A.
        row, col = np.where(inner, (k_first, out.row + begins), (out.row + begins, k_first))
        across = col - a.col
        out_shift = np.where(fixed, begins + first + way - row, begins)
        in_place = (out_shift == begins) | (~of.placed[out.buffer] & ~inner)
        demand(in_place & ((across == 0) | ~fixed), who, "multiplies its own rows into a peer's")
        self._inside(b, who)  # operands are not listed as accesses
        if share.any():
            number, length = np.where(fixed, first, row), self.summed[matrix, out.rank]
            wanted = b.row // np.maximum(length, 1)
            for end in (number, number + np.maximum(a.rows, 1) - 1):
                right = end // np.maximum(share, 1) == wanted
                demand(right | (share == 0), who, "multiplies by the matrix of other rows")
        else:
            demand(ints(fields.b_stride)[each] == 0, who, "reads several matrices b")
        a_shift = np.where(fixed, self._begins(a), row - a.row)
        other = np.flatnonzero(~of.operand[b.buffer])  # operands are never written
        down = np.where(of.placed[b.buffer], self._begins(b), k_first - b.row)
        of_b = Accesses.of(step[other], b.at(other), down[other])
        reads = [Accesses.of(step, a, a_shift, across), added, of_b]
        if len(scaled):
            these = np.flatnonzero(np.isin(each, scaled))
            number = np.where(fixed, first, row)[these]
            chosen = [products[index] for index in each[these].tolist()]
            reads.append(self._factors(chosen, turn[these], step[these], number, k_first[these]))
        return (
            Accesses(*map(np.concatenate, zip(*reads, strict=True))),
            Accesses.of(step, out, out_shift, 0, (k_first, k_last), adds, terms[each], joins[each]),
        )

    def _attends(self) -> tuple[Accesses, Accesses]:
        """Accesses of attends, treated as products that sum over rows of KV."""
        of, matrix = self.buffers, self.buffers.matrix
        held, step = self._each(Attendings)
        fields = unzipped(held, Attending)
        who, me = self.steps.by_step(step), self.steps.rank[step]
        q, kv, out = (self._regions(regions, step) for regions in (fields.q, fields.kv, fields.out))
        adds, first = ints(fields.accumulate), ints(fields.first)
        known = {tuple(matrix[name] for name in one[:3]) for one in self.attention.values()}
        holds = zip(*(of.holds[one.buffer].tolist() for one in (q, kv, out)), strict=True)
        demand(bools(each in known for each in holds), who, "attends in the wrong buffers")
        local = (q.rank == me) & (kv.rank == me) & (out.rank == me)
        demand(local, who, "attends at a peer")
        number = q.row + self._begins(q)
        fits = (q.rows == out.rows) & (number == out.row + self._begins(out))
        for one in (q, kv, out):
            fits &= (one.col == 0) & (one.col_stop == self._sizes[one.buffer, one.rank, 1])
        demand(fits, who, "attends with regions that do not fit")
        right = of.operand[q.buffer] & ~of.operand[out.buffer] & of.placed[out.buffer]
        right &= ~of.leaves[out.buffer] & ((adds == 0) | (of.itemsize[out.buffer] >= 4))
        right &= (adds == 0) | ~self.apart[of.holds[out.buffer]]
        demand(right, who, "attends in the wrong buffers, or adds to what is no sum")
        self._inside(q, who)
        fixed = of.placed[kv.buffer]
        same = ~fixed | (self._first(kv, who) == first)
        demand(same, who, "attends to other rows than it says")
        here = np.where(fixed, self._begins(kv), first - kv.row)
        keys = first, first + kv.rows
        reads = Accesses.of(step, kv, here)
        out_writes = Accesses.of(step, out, self._begins(out), 0, keys, adds)
        back_writes = self._backs(fields.back, step, kv, first, out)
        return reads, Accesses(*map(np.concatenate, zip(out_writes, back_writes, strict=True)))

    def _backs(
        self, backs: Sequence[Region | None], step: Ints, kv: Regions, first: Ints, out: Regions
    ) -> Accesses:
        """Writes of gradients of keys. Gradients of own keys land, all others leave."""
        of, which = self.buffers, np.flatnonzero(bools(map(bool, backs)))
        wanted = [
            of.matrix[self.attention[one].back] if self.attention[one].back else -1
            for one in of.holds[out.buffer].tolist()
        ]
        present = np.zeros(len(step), np.bool_)
        present[which] = True
        demand(present == (ints(wanted) >= 0), self.steps.by_step(step), "leaves out a gradient")
        step, kv, first = step[which], kv.at(which), first[which]
        who, me = self.steps.by_step(step), self.steps.rank[step]
        back = self._regions([one for one in backs if one], step)
        lands = ~of.leaves[back.buffer]
        way = self._way(of.holds[back.buffer], first, first + kv.rows, me, me, lands, who)
        right = (of.holds[back.buffer] == ints(wanted)[which]) & (back.rank == me)
        right &= (back.rows == kv.rows) & of.placed[back.buffer] & ~of.operand[back.buffer]
        right &= (back.col == 0) & (back.col_stop == self._sizes[back.buffer, back.rank, 1])
        right &= back.row + self._begins(back) == first + way
        demand(right, who, "makes a gradient in the wrong place")
        own = self._terms(1 << rank for rank in me.tolist())
        return Accesses.of(step, back, self._begins(back), terms=own)

    def _applies(self) -> tuple[Accesses, Accesses]:
        """Accesses of library functions: whole rows of the matrices in the specification."""
        of, (works, owner) = self.buffers, self.steps.of_type(Applied)
        applied = [
            (step, *each)
            for step, one in zip(owner.tolist(), works, strict=True)
            for each in self._applied(step, one)
        ]
        held = [each[1] for each in applied]
        numbers = np.array([(*each[:1], *each[2:]) for each in applied], np.int64).reshape(-1, 6)
        step, writes, matrix, cols, first, last = numbers.T
        who, me, write = self.steps.by_step(step), self.steps.rank[step], writes > 0
        region = self._regions(held, step)
        demand(region.rank == me, who, "applies a function at a peer")
        right = of.holds[region.buffer] == matrix
        right &= ~write | (~of.operand[region.buffer] & of.placed[region.buffer])
        demand(right, who, "applies a function in the wrong buffers")
        fits = (region.rows == last - first) & (region.col == 0) & (region.col_stop == cols)
        fits &= of.left[region.buffer, region.rank] == 0
        demand(fits, who, "applies a function to regions that do not fit")
        fixed, begins = of.placed[region.buffer], self._begins(region)
        number = np.where(write, begins + region.row, self._first(region, who))
        demand(~fixed | (number == first), who, "applies a function to other rows than it says")
        self._inside(region, who)
        used = Accesses.of(step, region, np.where(fixed, begins, first - region.row))
        reads, written = (Accesses(*(column[side] for column in used)) for side in (~write, write))
        return reads, written

    def _applied(self, step: int, one: Applied) -> Iterator[tuple[Region, int, int, int, int, int]]:
        """Regions of a library function: region, whether it is written, and the specification's
        matrix, columns and bounds of rows."""
        rank = int(self.steps.rank[step])
        known = {each.function: each for each in self.specification.applications}.get(one.function)
        sides = ((known.inputs, one.inputs), (known.outs, one.outs)) if known else ()
        if not known or any(len(wanted) != len(held) for wanted, held in sides):
            raise PlanError(
                f"{self.steps.name(step)} applies the function {one.function!r} as is not asked for"
            )
        for write, (wanted, held) in enumerate(sides):
            for rows, region in zip(wanted, held, strict=True):
                bounds = rows.of(rank, one.first, one.last)
                yield region, write, self.buffers.matrix[rows.matrix], rows.cols, *bounds

    def _first(self, regions: Regions, who: Who) -> Ints:
        """Numbers of the first rows of products' operands, where the rows land."""
        holds, leaves = self.buffers.holds[regions.buffer], self.buffers.leaves[regions.buffer]
        first = self._begins(regions) + regions.row
        ends = first, first + regions.rows, regions.rank, regions.rank
        return first + self._way(holds, *ends, leaves, who)

    def _asked_for(self, a: Regions, b: Regions, out: Regions) -> Bools:
        """Whether the specification has a product of these matrices."""
        of, count = self.buffers, len(self.buffers.matrix)

        def number(a: Any, b: Any, out: Any) -> Any:
            return (a * count + b) * count + out

        wanted = [
            number(*(of.matrix[name] for name in (one.a, one.b, one.out)))
            for one in self.specification.contractions
        ]
        known: Bools = np.isin(number(*(of.holds[one.buffer] for one in (a, b, out))), wanted)
        return known

    def _scaled(self, matrix: Ints, factors: Sequence[tuple[Region, ...]], who: Who) -> None:
        """Check that products use the factors in the specification."""
        of = self.buffers
        names = {name: of.holds[i] for i, name in enumerate(of.names)}
        for number, contraction in self.contraction.items():
            wanted = [of.matrix[one.matrix] for one in contraction.factors]
            for at in np.flatnonzero(matrix == number).tolist() if wanted else ():
                if [names.get(one.buffer, -1) for one in factors[at]] != wanted:
                    raise PlanError(f"{who(at)} is not scaled as asked for")
        bare = bools(bool(self.contraction[number].factors) for number in matrix.tolist())
        demand(bare | ~bools(factors), who, "is scaled, which is not asked for")

    def _factors(
        self, products: list[Product], turn: Ints, step: Ints, number: Ints, k_first: Ints
    ) -> Accesses:
        """Reads of A's factors (b's are operands). ``number``: numbers of A's first rows, where
        they land."""
        of, who = self.buffers, self.steps.by_step(step)
        column = unzipped(products, Product)
        a, b, out = (self._regions(regions, step) for regions in (column.a, column.b, column.out))
        left, right = (self._regions([one.factors[i] for one in products], step) for i in (0, 1))
        left = left.down(turn * ints(one.factor_stride for one in products))
        factors = [self.contraction[each].factors for each in of.holds[out.buffer].tolist()]
        shares = [(*one[0].share, *one[1].share) for one in factors]
        height, width, depth, wide = np.array(shares, np.int64).reshape(-1, 4).T
        k_last, last = k_first + b.rows, number + a.rows
        row, row_stop = _shared(number, last, height)
        for matrix in self.route:  # one factor for all rows of a sender
            here = (of.holds[a.buffer] == matrix) & (height == 0)
            sender, end = (self._sender(matrix, one, a.rank) for one in (number, last - 1))
            row, row_stop = np.where(here, sender, row), np.where(here, end + 1, row_stop)
        fits = (left.rows == row_stop - row) & (left.rank == a.rank)
        for region, bounds in (
            ((left.col, left.col_stop), _shared(k_first, k_last, width)),
            ((right.row, right.row_stop), _shared(k_first, k_last, depth)),
            ((right.col, right.col_stop), _shared(out.col, out.col_stop, wide)),
        ):
            fits &= (region[0] == bounds[0]) & (region[1] == bounds[1])
        for first, share in ((k_first, width), (k_first, depth), (out.col, wide)):
            fits &= first % np.maximum(share, 1) == 0
        fits &= of.operand[right.buffer] & (right.rank == a.rank)
        demand(fits, who, "is scaled by regions that do not fit")
        self._inside(right, who)
        placed = of.placed[left.buffer]
        same = ~placed | (self._first(left, who) == row)
        demand(same, who, "is scaled by factors of other rows")
        return Accesses.of(step, left, np.where(placed, self._begins(left), row - left.row))

    def _sender(self, matrix: int, row: Ints, rank: Ints) -> Ints:
        """Rank that sent rows of a matrix, by the rows' numbers where they land."""
        route, sender = self.route[matrix], np.zeros_like(row)
        for source in range(self.world):
            first = route.lands[source, rank]
            sender[(first <= row) & (row < first + route.block[source, rank])] = source
        return sender

    def _biased(self, fields: Any, matrix: Ints, k_first: Ints, out: Regions, who: Who) -> None:
        """Check that the first product of each sum adds the bias."""
        names = list(self.buffers.names)
        for at, bias in enumerate(fields.bias):
            contraction = self.contraction.get(int(matrix[at]))
            wanted = contraction.bias if contraction and k_first[at] == 0 else ""
            held = self.buffers.holds[names.index(bias.buffer)] if bias else -1
            span = (int(out.rank[at]), 0, 1, int(out.col[at]), int(out.col_stop[at]))
            right = held == self.buffers.matrix[wanted] and bias[1:] == span if wanted else not bias
            if not right:
                raise PlanError(f"{who(at)} does not add the bias once")

    def _addends(self, products: list[Product], step: Ints) -> Accesses:
        """Reads of addends: sums outside ``out``, to which products are added."""
        of, fields = self.buffers, unzipped(products, Product)
        who = self.steps.by_step(step)
        addend, out = self._regions(fields.addend, step), self._regions(fields.out, step)
        fits = (addend.rows == out.rows) & (addend.col == out.col) & (addend.cols == out.cols)
        fits &= (ints(fields.batch) == 1) & (ints(fields.accumulate) == 0)
        demand(fits, who, "adds itself to a region that does not fit")
        right = (addend.rank == self.steps.rank[step]) & ~of.placed[addend.buffer]
        right &= (of.holds[addend.buffer] == of.holds[out.buffer]) & of.result[out.buffer]
        demand(right, who, "adds itself to the wrong buffer")
        down = out.row + self._begins(out) - addend.row
        return Accesses.of(step, addend, down, terms=self._terms(fields.terms))

    def _joined(self, fields: Any, adds: Ints, sums: Bools, me: Ints, who: Who) -> tuple[Ints, ...]:
        """Columns ``adds``, ``joins`` and ``terms`` of products. ``sums``: products that
        are added to products of other ranks."""
        added = bools(map(bool, fields.addend))
        plain = ~(bools(map(bool, fields.terms)) | added)
        demand(plain | sums, who, "adds itself to what another rank made")
        joins = sums & ((adds > 0) | added)
        said = bools(mask > 0 for mask in fields.terms) == joins
        demand(said | ~sums, who, "does not say whose products it adds itself to")
        own = [1 << rank for rank in me.tolist()]
        pairs = list(zip(fields.terms, own, strict=True))
        new = np.array([not mask & mine for mask, mine in pairs], np.bool_)
        demand(new | ~sums, who, "adds itself to a sum that it is in")
        earlier = np.where(sums & (adds > 0), self._terms(fields.terms), -1)
        terms = np.where(sums, self._terms(mask | mine for mask, mine in pairs), 0)
        return np.where(sums, 0, adds), earlier, terms

    def _reductions(self) -> tuple[Accesses, Accesses]:
        of = self.buffers
        reductions, step = self.steps.of_type(Reduction)
        who, me = self.steps.by_step(step), self.steps.rank[step]
        parts = ints(len(reduction.parts) for reduction in reductions)
        named = ints(len(reduction.terms) for reduction in reductions)
        out = self._regions([reduction.out for reduction in reductions], step)
        says = (parts > 0) & (parts == named) & self.sums[of.holds[out.buffer]]
        demand(says, who, "does not say whose products it sums")
        left = self._terms(map(self._union, reductions, step.tolist()))
        each = np.repeat(np.arange(len(reductions)), parts)
        part_step = step[each]
        part = self._regions([p for reduction in reductions for p in reduction.parts], part_step)
        who, here = self.steps.by_step(part_step), out.at(each)
        local = of.reachable[part.buffer] & of.leaves[part.buffer]
        local &= self.steps.host[part.rank] == self.steps.host[me[each]]
        local |= part.rank == me[each]
        local &= of.holds[part.buffer] == of.holds[here.buffer]
        local &= ~of.result[part.buffer]
        local &= (here.rank == me[each]) & of.placed[here.buffer]
        demand(local, who, "sums in the wrong buffers")
        sizes = (part.rows == here.rows) & (part.cols == here.cols)
        demand(sizes, who, "sums regions of different sizes")
        begins = self._begins(out)
        down, across = here.row + begins[each] - part.row, here.col - part.col
        in_place = ~of.placed[part.buffer] | (down == self._begins(part)) & (across == 0)
        demand(in_place, who, "sums rows that do not belong together")
        terms = self._terms(mask for reduction in reductions for mask in reduction.terms)
        self._own_terms(terms, part, who)
        reads = Accesses.of(part_step, part, down, across, terms=terms)
        return reads, Accesses.of(step, out, begins, terms=left)

    def _own_terms(self, terms: Ints, source: Regions, who: Who) -> None:
        """Check that an operand of a summed matrix is read as the term of its rank alone."""
        own = self._terms(1 << rank for rank in source.rank.tolist())
        operand = self.buffers.operand[source.buffer] & (terms > 0)
        demand(~operand | (terms == own), who, "takes an operand for the term of another rank")

    def _union(self, reduction: Reduction, step: int) -> int:
        """Set of ranks that a reduction sums. Checks that each rank occurs once, in order."""
        union = 0
        for mask in reduction.terms:
            if mask & union:
                raise PlanError(f"{self.steps.name(step)} sums the product of a rank twice")
            if mask & -mask < union:
                raise PlanError(f"{self.steps.name(step)} does not sum in the order of the ranks")
            union |= mask
        return union

    def _collectives(self) -> tuple[Accesses, Accesses]:
        """Accesses of collectives. A collective moves whole buffers."""
        of = self.buffers
        works, step = self.steps.of_type(LibraryMove)
        sources, targets = unzipped(works, LibraryMove)
        src, dst = self._regions(sources, step), self._regions(targets, step)
        me, matrix, who = self.steps.rank[step], of.holds[src.buffer], self.steps.by_step(step)
        ends = zip(me.tolist(), src.buffer.tolist(), dst.buffer.tolist(), strict=True)
        for at, (rank, source, target) in enumerate(ends):
            whole = [
                Region(one.buffer, rank, 0, rows, 0, cols)
                for one, number in ((sources[at], source), (targets[at], target))
                for rows, cols in [self.steps.shape(self.steps.buffers[number], rank)]
            ]
            right = of.holds[target] == matrix[at]
            right = right and self._exchanges(int(matrix[at]), source, target)
            if not right or [sources[at], targets[at]] != whole:
                raise PlanError(f"{who(at)} moves something else than the whole")
        said = self.terms[matrix]
        mine = np.where(said, self._terms(1 << rank for rank in me.tolist()), 0)
        everyone = np.where(said, self._terms([(1 << self.world) - 1] * len(step)), 0)
        joins = np.where(src.buffer == dst.buffer, mine, -1)
        reads = Accesses.of(step, src, np.zeros_like(step), terms=mine)
        return reads, Accesses.of(step, dst, self._begins(dst), terms=everyone, joins=joins)

    def _exchanges(self, matrix: int, source: int, target: int) -> bool:
        """Whether a collective of a library can exchange a matrix between two whole buffers: one
        that the matrix leaves and one where it lands. An all-reduce is in place."""
        of, buffers, route = self.buffers, self.steps.buffers, self.route.get(matrix)
        if route is None or of.leaves[target] or of.dtype[source] != of.dtype[target]:
            return False
        (leave, wide), (land, width) = (np.array(buffers[i].shapes).T for i in (source, target))
        lands = (route.lands + route.block).max(axis=0)
        whole = not of.begins[target].any() and np.array_equal(land, lands)
        everywhere = bool(self.sums[matrix] and whole)
        if source == target or everywhere and lands.any():
            return everywhere and source == target
        right = of.leaves[source] and not of.begins[source].any() and np.array_equal(wide, width)
        right &= np.array_equal(leave, (route.leaves + route.block).max(axis=1))
        return bool(right and (of.result[target] or whole and not self.terms[matrix]))


def _down(region: Region, rows: int) -> Region:
    return region._replace(row=region.row + rows, row_stop=region.row_stop + rows)


def _shared(first: Ints, last: Ints, share: Ints) -> tuple[Ints, Ints]:
    """Bounds of the factors of [first, last); ``share`` rows or columns per factor, 0: all."""
    unit = np.maximum(share, 1)
    return np.where(share > 0, first // unit, 0), np.where(share > 0, -(-last // unit), 1)
