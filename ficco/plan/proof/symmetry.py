"""The proof for many ranks by that of one, where all do the same.

Ranks of several hosts do the same up to names. Rank r calls *h hosts further, at place p* what rank
0 calls rank ``h * G + p``: hosts are counted from its own, modulo their number, and so are places,
or by exclusive or where the ranks of a host are a power of two. Rows have the names of the ranks
whose blocks they are in. :func:`check_symmetric` proves three things.

1. *The Plans are images of one.* Written with these names, the Plan of each rank has the same
   steps, accesses and signals as that of rank 0. A row's place in staging is not compared, which
   depends on the rank, but all Plans have to agree on it, and no other row may have it. They have
   to agree on the word of each signal, likewise.
2. *Each step is right by itself*, for each rank, as in :func:`ficco.plan.check`.
3. *What ranks do at rank 0 is right.* All rules that are about several steps are about the memory
   or the words of one rank, so that it suffices to prove them for those of rank 0. Whatever rank r
   does there rank 0 does at the rank that it calls what r calls rank 0. So the Plan of rank 0 says
   which steps of which ranks meet at rank 0, and the rules for memory, signals and calls are those
   of :func:`ficco.plan.check`.

That steps are in order is proven by the clocks of rank 0 alone: what rank r knows when it begins a
step is what rank 0 knows then, with other names. No rank waits for ever if no step waits for one
that is as far back in its Plan, or further: all ranks can then go through it step by step, at the
same pace. Ranks need not do so, but a Plan that cannot be followed in this way is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np

from ficco.plan.collector import paused
from ficco.plan.model import Plan, Signal
from ficco.plan.network import MOVER
from ficco.plan.proof.accesses import Footprint
from ficco.plan.proof.calls import call_claims
from ficco.plan.proof.columns import Accesses, Bools, Ints, bools, ints, repeated, unzipped
from ficco.plan.proof.execution import settle
from ficco.plan.proof.memory import memory_claims
from ficco.plan.proof.order import Order
from ficco.plan.proof.rules import AsymmetryError, PlanError
from ficco.plan.proof.signals import SignalColumns, SignalUses, Uses
from ficco.plan.proof.steps import Steps


def check_symmetric(plans: Iterable[Plan]) -> None:
    """Prove the Plans of all ranks of a Problem from some of them, which may be made one by one.

    The first is rank 0's. The proof holds for all ranks if the others are those of all other ranks;
    of a rank that is left out it is assumed that its Plan is an image of rank 0's, too.

    Raises:
        PlanError: a Plan breaks a rule.
        AsymmetryError: Plans are not images of one, or a proof by symmetry does not serve them.
            :func:`check` may still prove them.
    """
    every = iter(plans)
    first = next(every, None)
    if first is None or first.rank:
        raise AsymmetryError("the first of the plans is not that of rank 0")
    with paused():
        symmetry = _Symmetry(first)
    for plan in every:  # which may be made only now, and is gone with the next one
        with paused():
            symmetry.compare(plan)
    with paused():
        symmetry.apart()
        symmetry.prove()


class _Names:
    """What ranks call each other; arrays, or numbers, of ranks."""

    def __init__(self, world: int, hosts: int) -> None:
        self.world, self.hosts, self.local = world, hosts, world // hosts
        self._cube = self.local & (self.local - 1) == 0

    def of(self, rank: Any, by: Any) -> Any:
        """What a rank is called by another one."""
        host = (rank // self.local - by // self.local) % self.hosts
        one, two = rank % self.local, by % self.local
        return host * self.local + (one ^ two if self._cube else (one - two) % self.local)

    def of_set(self, mask: int, by: int) -> int:
        """The same for a set of ranks, as bits."""
        if mask == (1 << self.world) - 1 or not by:
            return mask
        ranks = (rank for rank in range(mask.bit_length()) if mask >> rank & 1)
        return sum(1 << self.of(rank, by) for rank in ranks)


class _Numbers(dict[Any, int]):
    """Numbers for things, in the order in which they come."""

    def __missing__(self, thing: Any) -> int:
        number = self[thing] = len(self)
        return number

    def of(self, things: Iterable[Any]) -> Ints:
        return ints(map(self.__getitem__, things))


class _Side:
    """What one Plan says by itself."""

    def __init__(self, plan: Plan) -> None:
        self.rank = plan.rank
        self.steps = Steps([plan], alone=True)
        self.signals = SignalUses(self.steps)
        self.footprint = Footprint(self.steps, self.signals)

    @cached_property
    def sends(self) -> Bools:
        """By step, whether it stands for what a receiver carries out."""
        moves = zip(self.steps.of.mover, self.steps.of.transfer, strict=True)
        return bools(mover == MOVER and one.src.rank == self.rank for mover, one in moves)


class _Pieces(NamedTuple):
    """Accesses with the names that ranks have for blocks: each once for every block in it.

    Attributes:
        access: their numbers.
        block, row, row_stop: the block, and rows of it; block 0 and all rows where there is none.
        k_block, k_first, k_last: the same for what is summed over.
    """

    access: Ints
    block: Ints
    row: Ints
    row_stop: Ints
    k_block: Ints
    k_first: Ints
    k_last: Ints


class _Symmetry:
    """The proof for rank 0, and what the Plans of other ranks are compared with."""

    def __init__(self, first: Plan) -> None:
        self.names = _Names(first.problem.world, first.problem.hosts)
        self.first = _Side(first)
        self.sets, self._kinds = _Numbers({0: 0}), _Numbers()
        self.unit, self.k_unit = self._units()
        self._image = self._image_of(self.first)
        #: Where blocks lie that have no fixed place: by rank, buffer, block and whose products are
        #: in it, the first row and column.
        self._places: dict[tuple[int, ...], tuple[int, int]] = {}
        #: Signals that one of two ranks was seen to use, by all but their word and rows.
        self._half_used: dict[tuple[object, ...], Signal] = {}
        self._agree(self.first)

    def prove(self) -> None:
        """The rules for what any rank does to the memory and the words of rank 0."""
        self._exchanged()
        cover = _Cover(self)
        cover.footprint.cuts()
        order = _Lockstep(cover)
        claims = memory_claims(cover.footprint, order)
        claims += call_claims(cover, cover.signals, cover.footprint, order)
        claims += cover.signals.claims()
        settle(claims, order)

    def compare(self, plan: Plan) -> None:
        """A Plan is an image of rank 0's."""
        side = _Side(plan)
        ours, theirs = self.first.steps, side.steps
        for what in ("problem", "schedule", "words", "offsets", "stages", "buffers"):
            if getattr(ours.plans[0], what) != getattr(theirs.plans[0], what):
                raise AsymmetryError(f"rank {plan.rank}: its plan has other {what} than rank 0's")
        for what, rows in self._image_of(side).items():
            known = self._image[what]
            if not np.array_equal(known, rows):
                step = _different(known, rows)
                there = min(step, len(ours.all) - 1), min(step, len(theirs.all) - 1)
                raise AsymmetryError(
                    f"{theirs.name(there[1])} {what} other things than {ours.name(there[0])}, by "
                    "the names that ranks have for each other"
                )
        self._agree(side)

    def apart(self) -> None:
        """No two blocks are in one place."""
        rows = sorted(
            (rank, buffer, row, row + int(self.unit[buffer]))
            for (rank, buffer, *_), (row, _) in self._places.items()
        )
        for one, two in pairwise(rows):
            if one[:2] == two[:2] and one[3] > two[2]:
                name = self.first.footprint.buffers.names[one[1]]
                raise AsymmetryError(f"rank {one[0]}: two blocks share row {two[2]} of {name}")

    # Blocks.

    def _units(self) -> tuple[Ints, Ints]:
        """By buffer, the rows of a block, or 0 if rows belong to no rank's block; and by matrix,
        the same for what is summed over."""
        footprint, steps = self.first.footprint, self.first.steps
        of, asked = footprint.buffers, steps.asked
        for what, there in (
            ("attention", asked.attentions or asked.applications),
            ("staging that is used in turn", steps.plans[0].stages),
            ("collectives of a library", steps.collective),
            ("a single rank", steps.world == 1),
        ):
            if there:
                raise AsymmetryError(f"a proof by symmetry does not serve {what}")
        lands, leaves = {}, {}
        for matrix, route in footprint.route.items():
            sums = bool(footprint.sums[matrix])
            lands[matrix] = self._unit(route.lands, route.block, sums, by_source=True)
            leaves[matrix] = self._unit(route.leaves, route.block, sums, by_source=False)
        k_unit = np.zeros(len(of.matrix), np.int64)
        for matrix, contraction in footprint.contraction.items():
            moved = lands.get(of.matrix[contraction.a], 0)
            if contraction.transposed:
                k_unit[matrix] = moved
            else:
                lands.setdefault(matrix, moved)
        held = zip(of.holds.tolist(), of.leaves.tolist(), strict=True)
        return ints((leaves if there else lands).get(holds, 0) for holds, there in held), k_unit

    def _unit(self, begins: Ints, blocks: Ints, sums: bool, by_source: bool) -> int:
        world, rows = self.names.world, int(blocks[0, 0])
        turns = np.arange(world) * rows
        if (blocks == rows).all() and rows > 0:
            if sums and not rows % world:
                return rows // world
            if not (sums or begins.any()):
                return 0
            if not sums and (begins == (turns[:, None] if by_source else turns)).all():
                return rows
        raise AsymmetryError("required as many rows for every pair of ranks, and at least one")

    def pieces(self, side: _Side, which: Ints, by: Ints, unit: Ints, k: bool = False) -> _Pieces:
        """Some accesses with the names that the ranks ``by`` have for the blocks of so many rows;
        with ``k``, also for those that are summed over."""
        access = side.footprint.access
        first, last = (
            rows[which] + access.row_shift[which] for rows in (access.row, access.row_stop)
        )
        each, block, row, row_stop = self._split(by, first, last, unit)
        which, by = which[each], by[each]
        first, last = access.k_first[which], access.k_last[which]
        holds = side.footprint.buffers.holds[access.buffer[which]]
        again, *summed = self._split(by, first, last, self.k_unit[holds] * (first >= 0) * k)
        return _Pieces(which[again], block[again], row[again], row_stop[again], *summed)

    def _split(self, by: Ints, first: Ints, last: Ints, unit: Ints) -> tuple[Ints, ...]:
        some, named = np.maximum(unit, 1), unit > 0
        begin = np.where(named, first // some, 0)
        each, turn = repeated(np.where(named, np.maximum(-(-last // some) - begin, 1), 1))
        unit, named, number = unit[each], named[each], begin[each] + turn
        if ((number < 0) | (number >= self.names.world))[named].any():
            raise PlanError("a step takes rows for those of a rank that there is not")
        first, last = first[each] - number * unit, last[each] - number * unit
        block = np.where(named, self.names.of(number, by[each]), 0)
        inside = np.maximum(first, 0), np.minimum(last, unit)
        return (
            each,
            block,
            *(np.where(named, *ends) for ends in zip(inside, (first, last), strict=True)),
        )

    def sets_by(self, side: _Side, numbers: Ints, by: Ints) -> Ints:
        """The numbers of sets of ranks with the names that other ranks have for theirs."""
        masks = list(side.footprint.numbers)
        pairs, place = np.unique(np.stack([numbers, by], axis=1), axis=0, return_inverse=True)
        named = self.sets.of(
            self.names.of_set(masks[number], one) if number >= 0 else -1
            for number, one in pairs.tolist()
        )
        return np.where(numbers < 0, -1, named[place.reshape(-1)])

    # Images.

    def _image_of(self, side: _Side) -> dict[str, Ints]:
        """A Plan with the names that its rank has, as sorted rows that begin with a step."""
        steps, signals, number = side.steps, side.signals, np.arange(len(side.steps.all))
        after, step = steps.held(steps.of.after)
        columns = steps.of.op, steps.of.lane, steps.of.mover
        return {
            "does": _sorted(number, *map(self._kinds.of, columns)),
            "comes after": _sorted(step, ints(after)),
            "posts": self._uses(side, signals.posts),
            "waits for": self._uses(side, signals.waits),
            "clears": self._uses(side, signals.clears),
            "accesses": self._accesses(side),
        }

    def _accesses(self, side: _Side) -> Ints:
        access, me, of = side.footprint.access, side.rank, side.footprint.buffers
        # The rules for single steps say which rows of its operands a rank reads.
        which = np.flatnonzero(~(of.operand[access.buffer] & (access.rank == me)))
        by = np.full(len(which), me)
        at, *blocks = self.pieces(side, which, by, self.unit[access.buffer[which]], k=True)
        step, adds, by = access.step[at], access.adds[at], by[:1].repeat(len(at))
        # Of blocks that are summed over in any order, the first one of a step may begin the sum.
        least = np.ones(len(side.steps.all), np.int64)
        np.minimum.at(least, step, np.where(access.k_first[at] < 0, 1, adds))
        any_order = (self.k_unit[of.holds[access.buffer[at]]] > 0) & (access.k_first[at] >= 0)
        return _sorted(
            step,
            at >= side.footprint.reads,
            access.buffer[at],
            self.names.of(access.rank[at], me),
            *blocks,
            access.col[at] + access.col_shift[at],
            access.col_stop[at] + access.col_shift[at],
            np.where(any_order, least[step], adds),
            self.sets_by(side, access.terms[at], by),
            self.sets_by(side, access.joins[at], by),
        )

    def _uses(self, side: _Side, uses: Uses) -> Ints:
        of, me = side.signals.signal, side.rank
        poster, waiter, slot, first, last = (
            ints(one)[uses.which] for one in (of.poster, of.waiter, of.slot, of.first, of.last)
        )
        ranks = self.names.of(poster, me), self.names.of(waiter, me)
        rows = self.rows_of(first, last, me)
        return _sorted(uses.step, self._kinds.of(of.kind)[uses.which], *ranks, slot, *rows)

    def rows_of(self, first: Ints, last: Ints, by: Ints | int) -> tuple[Ints, Ints, Ints]:
        """Rows of signals with the names that ranks have: a block, and rows of it."""
        block, row = np.divmod(first, max(self.unit.max(), self.k_unit.max()))
        some = first < last
        named = np.where(some, self.names.of(block, by), -1)
        return named, np.where(some, row, first), np.where(some, last - first, last)

    # What is not compared: where blocks without a place lie, and the words of signals.

    def _agree(self, side: _Side) -> None:
        access, of = side.footprint.access, side.footprint.buffers
        which = np.flatnonzero(~of.placed[access.buffer])
        zero, unit = np.zeros(len(which), np.int64), self.unit[access.buffer[which]]
        at, block, *_ = self.pieces(side, which, zero, unit)
        held = self.sets_by(side, access.terms[at], np.zeros(len(at), np.int64))
        begin = block * self.unit[access.buffer[at]] - access.row_shift[at]
        columns = access.rank[at], access.buffer[at], block, held, begin, access.col_shift[at]
        places = np.stack(columns, axis=1)
        found, index = np.unique(places, axis=0, return_index=True)
        for (*key, row, col), number in zip(found.tolist(), at[index].tolist(), strict=True):
            if self._places.setdefault(tuple(key), (row, col)) != (row, col):
                who = side.footprint.by_access(np.array([number]))(0)
                raise AsymmetryError(f"{who} takes another place for a block than other steps")
        self._agree_on_words(side)

    def _agree_on_words(self, side: _Side) -> None:
        me, host, world = side.rank, side.steps.host.tolist(), self.names.world
        uses = side.signals.posts, side.signals.waits, side.signals.clears
        posts, waits, clears = ({_all_but_word(one): one for one in some.signals} for some in uses)
        if waits != clears:
            raise PlanError(f"rank {me} waits for other signals than it clears")
        if len({one.word for one in waits.values()}) < len(waits):
            raise PlanError(f"rank {me} waits for two signals that share a word")
        for mine, signals in (("poster", posts), ("waiter", waits)):
            for key, one in signals.items():
                if getattr(one, mine) != me:
                    raise PlanError(f"signal {one.name} is used by another rank than it says")
                if one.word >= side.steps.own_words:  # the network's
                    continue
                if host[one.poster] != host[one.waiter]:
                    raise PlanError(f"signal {one.name} is for a rank of another host")
                if one.word != one.poster if one.released else one.word < world:
                    raise PlanError(f"signal {one.name} has a word that rests at another value")
                other = self._half_used.pop(key, None)
                if other is None:
                    self._half_used[key] = one
                elif other != one:
                    raise AsymmetryError(f"signal {one.name} is not the same for both its ranks")

    # The proof for rank 0.

    def _exchanged(self) -> None:
        """What senders send is what receivers receive, with the names that senders have."""
        side, access = self.first, self.first.footprint.access
        turns = Counter[tuple[int, int]]()
        ends = np.full((len(side.steps.all), 3), -1)
        for step, move in enumerate(side.steps.of.transfer):
            if side.steps.of.mover[step] == MOVER:
                pair = move.src.rank, move.dst.rank
                ends[step] = *pair, turns[pair]
                turns[pair] += 1
        sides = []
        for sent in (True, False):
            moves = (ends[:, 2] >= 0) & (side.sends == sent)
            which = np.flatnonzero(moves[access.step])
            by, unit = ends[access.step[which], 0], self.unit[access.buffer[which]]
            at, *blocks = self.pieces(side, which, by, unit)
            source, target, turn = ends[access.step[at]].T
            held = self.sets_by(side, access.terms[at], source)
            cols = (some[at] + access.col_shift[at] for some in (access.col, access.col_stop))
            what = at >= side.footprint.reads, access.buffer[at], *blocks, *cols, held
            sides.append(_sorted(turn, self.names.of(target, source), *what))
        if not np.array_equal(sides[0], sides[1]):
            raise PlanError("rank 0 sends other pieces than their receivers receive")


class _Derived:
    """A column of numbers that follow from their index."""

    def __init__(self, of: Callable[[Any], Any]) -> None:
        self._of = of

    def __getitem__(self, index: Any) -> Any:
        return self._of(index)


class _Cover(Steps):
    """What all ranks do at rank 0, in the terms of a proof of all Plans. Step ``s`` of rank ``r``
    has the number ``r * count + s``."""

    def __init__(self, symmetry: _Symmetry) -> None:
        self.symmetry, side = symmetry, symmetry.first
        self.side, self.count, self.homes = side, len(side.steps.all), [0]
        own = side.steps
        self.world, self.words, self.host, self.buffers = (
            own.world,
            own.words,
            own.host,
            own.buffers,
        )
        self.plans = own.plans
        lanes = own.lane.max(initial=0) + 1
        self.rank: Any = _Derived(lambda step: step // self.count)
        self.lane: Any = _Derived(
            lambda step: step // self.count * lanes + own.lane[step % self.count]
        )
        self.signals = _CoverSignals(self)
        self.footprint = copy(side.footprint)
        self.footprint.steps, self.footprint.numbers = self, symmetry.sets
        self._access()

    def name(self, step: int) -> str:
        """As rank 0 has it."""
        rank, own = divmod(step, self.count)
        return f"{self.side.steps.name(own)}{f', as rank {rank} does it,' if rank else ''}"

    def by_step(self, step: Ints) -> Callable[[int], str]:
        return lambda index: self.name(int(step[index]))

    def _access(self) -> None:
        """Accesses at rank 0. Rows have the numbers of what is there. Where they have no place,
        those of each set of ranks whose products are there are apart."""
        symmetry, side = self.symmetry, self.side
        access, of = side.footprint.access, side.footprint.buffers
        which = np.flatnonzero(~side.sends[access.step])
        home = access.rank[which]
        unit = symmetry.unit[access.buffer[which]]
        at, block, row, row_stop, *_ = symmetry.pieces(side, which, home, unit * (home > 0))
        home, buffer = access.rank[at], access.buffer[at]
        held = symmetry.sets_by(side, access.terms[at], home)
        apart = np.where(of.placed[buffer], 0, held) * (
            access.row_stop.max(initial=0) * 2 + 2 * self.world
        )
        begin = block * symmetry.unit[buffer] + apart
        columns = {name: column[at] for name, column in access._asdict().items()}
        columns |= {
            "step": symmetry.names.of(0, home) * self.count + access.step[at],
            "rank": np.zeros_like(at),
            "row": begin + row,
            "row_stop": begin + row_stop,
            "col": access.col[at] + access.col_shift[at],
            "col_stop": access.col_stop[at] + access.col_shift[at],
            "row_shift": np.zeros_like(at),
            "col_shift": np.zeros_like(at),
            "terms": held,
            "joins": symmetry.sets_by(side, access.joins[at], home),
        }
        self.footprint.reads = int((at < side.footprint.reads).sum())
        self.footprint.access = Accesses(**columns)


class _CoverSignals(SignalColumns):
    """The signals that wait in rank 0's memory, then those that rank 0 posts."""

    def __init__(self, cover: _Cover) -> None:
        symmetry, side, count = cover.symmetry, cover.side, cover.count
        names, uses = symmetry.names, side.signals

        def known(some: Uses, by_waiter: bool = False) -> dict[Any, tuple[Signal, int]]:
            found: dict[Any, tuple[Signal, int]] = {}
            of: Any = unzipped(some.signals, Signal)
            by = ints(of.waiter) * by_waiter
            rows = symmetry.rows_of(ints(of.first), ints(of.last), by)
            named = (column.tolist() for column in (names.of(ints(of.poster), by), *rows))
            keys = zip(of.kind, of.slot, *named, strict=True)
            for key, one, step in zip(keys, some.signals, some.step.tolist(), strict=True):
                if found.setdefault(key, (one, step)) != (one, step):
                    raise PlanError(f"signal {one.name} has its word used twice")
            return found

        posts, waits = known(uses.posts, by_waiter=True), known(uses.waits)
        clears = known(uses.clears)
        for some, others, why in (
            (waits, posts, "is waited for and never posted"),
            (posts, waits, "is posted and never waited for, so that its word stays dirty"),
        ):
            if lost := [one for key, (one, _) in some.items() if key not in others]:
                raise PlanError(f"signal {lost[0].name} {why}")
        every = list(waits)
        signals = [waits[key][0] for key in every]
        target = ints(posts[key][0].waiter for key in every)
        post, wait, clear = (ints(some[key][1] for key in every) for some in (posts, waits, clears))
        source, number = names.of(0, target), np.arange(len(every) * 2)
        self.poster = np.concatenate([source * count + post, post])
        self.waiter = np.concatenate([wait, target * count + wait])
        self.clearer = np.concatenate([clear, target * count + clear])
        self.word_of = np.concatenate([np.zeros_like(target), target])
        self.word_at = np.concatenate([source, np.zeros_like(target)])
        self.released = bools(one.released for one in signals * 2)
        self.posts, self.waits, self.clears = (
            Uses(signals * 2, step, number, number)
            for step in (self.poster, self.waiter, self.clearer)
        )


class _Lockstep(Order):
    """The order in which all ranks go through their Plans at the same pace, and the relations that
    are true in every interleaving: see :class:`ficco.plan.proof.order.Order`."""

    def __init__(self, cover: _Cover) -> None:
        self.names, self.count = cover.symmetry.names, cover.count
        steps = cover.side.steps
        self.lane, self.when = steps.lane, cast(Ints, _Derived(lambda step: step % cover.count))
        after, step = steps.held(steps.of.after)
        data = ~cover.signals.released & (cover.signals.word_of == 0)
        data &= np.arange(len(data)) < len(data) // 2
        source = np.concatenate([cover.signals.poster[data], ints(after)])
        target = np.concatenate([cover.signals.waiter[data], step])
        there = (source >= 0) & (source % self.count < target)
        if not there.all():
            at = int(there.argmin())
            raise AsymmetryError(
                f"{cover.name(int(target[at]))} waits for {cover.name(int(source[at]))}, which is "
                "no earlier step: a proof by symmetry does not serve that"
            )
        #: By step of rank 0, the ranks and steps that it waits for.
        self._heard: dict[int, list[tuple[int, int]]] = {}
        for one, two in zip(source.tolist(), target.tolist(), strict=True):
            self._heard.setdefault(two, []).append(divmod(one, self.count))

    def holds(self, first: Ints, second: Ints) -> Bools:
        """Whether steps end before others start, or are the same, in every interleaving.

        Of each lane of rank 0 the clock holds, for every rank and lane, the latest step known to be
        over, as its number plus 1, or 0. Other ranks have the same, with their names.
        """
        source, first = np.divmod(first, self.count)
        target, second = np.divmod(second, self.count)
        source = self.names.of(source, target)
        holds: Bools = (source == 0) & (self.lane[first] == self.lane[second]) & (first <= second)
        by_second = np.argsort(second, kind="stable")
        asked, begin = np.unique(second[by_second], return_index=True)
        parts = dict(zip(asked.tolist(), np.split(by_second, begin[1:]), strict=False))

        ranks, lanes = np.arange(self.names.world), self.lane.tolist()
        to_come = Counter(step for heard in self._heard.values() for _, step in heard)
        shape = self.names.world, max(lanes, default=-1) + 1
        clocks = [np.zeros(shape, np.int32) for _ in range(shape[1])]
        kept: dict[int, Any] = {}
        in_use = [False] * shape[1]  # a kept clock must not change
        for step in sorted({*to_come, *self._heard, *parts}):
            lane = lanes[step]
            for rank, other in self._heard.get(step, ()):
                to_come[other] -= 1
                clock = kept[other] if to_come[other] else kept.pop(other)
                if clocks[lane][rank, lanes[other]] <= other:
                    if in_use[lane]:
                        clocks[lane], in_use[lane] = clocks[lane].copy(), False
                    if rank:
                        clock = clock[self.names.of(ranks, rank)]
                    np.maximum(clocks[lane], clock, out=clocks[lane])
                    clocks[lane][rank, lanes[other]] = other + 1
            if to_come[step]:
                kept[step], in_use[lane] = clocks[lane], True
            if step in parts:
                these = parts[step]
                holds[these] |= clocks[lane][source[these], self.lane[first[these]]] > first[these]
        return holds


def _all_but_word(signal: Signal) -> tuple[object, ...]:
    return signal.kind, signal.poster, signal.waiter, signal.slot


def _sorted(*columns: Any) -> Ints:
    """Columns as rows of numbers, in rising order."""
    order = np.lexsort(columns[::-1])
    return np.stack([np.asarray(column, np.int64)[order] for column in columns], axis=1)


def _different(one: Ints, two: Ints) -> int:
    """The first step of which rows differ."""
    count = min(len(one), len(two))
    unequal = np.flatnonzero((one[:count] != two[:count]).any(axis=1))
    at = int(unequal[0]) if len(unequal) else count
    return min(int(some[at, 0]) for some in (one, two) if at < len(some))
