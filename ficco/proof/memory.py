"""Rules 2 to 4: order of accesses to memory, completeness of the product, and calls that compose.

Accesses overlap arbitrarily. Their edges cut memory into rectangles that no access divides. The
rules are checked for each rectangle, which accesses visit one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ficco.proof.accesses import Footprint
from ficco.proof.columns import Accesses, Bools, Claim, Ints, PlanError, cut, demand, repeated
from ficco.proof.order import Order, SignalColumns
from ficco.proof.steps import Steps


class _Visits(NamedTuple):
    """One visit for each access and each of its rectangles, by rectangle, in order of execution.

    Attributes:
        each: the access.
        write: whether the access writes.
        before, after: the previous and the next visit that writes to the rectangle; -1 if none.
        k_first, k_last: the part of the sum that the visit adds to the rectangle; -1 if none.
    """

    each: Ints
    write: Bools
    before: Ints
    after: Ints
    k_first: Ints
    k_last: Ints


def memory_claims(footprint: Footprint, order: Order) -> list[Claim]:
    """Check the rules for every rectangle, and return their claims."""
    visits = _visits(footprint, order)
    return [_read(footprint, visits), _written(footprint, visits), _overwritten(footprint, visits)]


def _summed(footprint: Footprint, each: Ints) -> Ints:
    """Length of the summed dimension of the products that compute each access's matrix."""
    access = footprint.access
    lengths: Ints = footprint.summed[
        footprint.buffers.holds[access.buffer[each]], access.rank[each]
    ]
    return lengths


def _read(footprint: Footprint, visits: _Visits) -> Claim:
    """Check each read against the previous write."""
    access, reads = footprint.access, ~visits.write
    before = visits.before[reads]
    old, new = visits.each[before], visits.each[reads]
    who = footprint.by_access(new)
    late = (before < 0) & (visits.after[reads] >= 0)
    demand(~late, who, "may read before it is written")
    demand(before >= 0, who, "reads what nobody has written")
    demand(_same_piece(access, old, new), who, "reads another piece than it should")
    same = access.terms[old] == access.terms[new]
    demand(same, who, "finds the products of other ranks than it says")
    done = (visits.k_first[before] < 0) | (visits.k_last[before] == _summed(footprint, new))
    demand(done, who, "rounds before the last term")
    old, new = _with_parts(footprint, visits, before, np.flatnonzero(reads))
    who = footprint.by_access(new)
    return Claim(access.step[old], access.step[new], who, "may read before it is written")


def _with_parts(footprint: Footprint, visits: _Visits, old: Ints, new: Ints) -> tuple[Ints, Ints]:
    """Accesses of pairs of visits, a write and a read. A read of parts that are kept separately is
    paired with the writes of all parts."""
    apart = footprint.apart[footprint.buffers.holds[footprint.access.buffer]]
    writes, reads = [old], [new]
    while len(old):
        more = (visits.before[old] >= 0) & apart[visits.each[old]]
        old, new = visits.before[old[more]], new[more]
        writes.append(old)
        reads.append(new)
    return visits.each[np.concatenate(writes)], visits.each[np.concatenate(reads)]


def _written(footprint: Footprint, visits: _Visits) -> Claim:
    """Check each write against the previous write."""
    access, write, buffers = footprint.access, visits.write, footprint.buffers
    before, last_of_all = visits.before[write], visits.after[write] < 0
    old, new = visits.each[before], visits.each[write]
    who, again = footprint.by_access(new), before >= 0
    beside = again & footprint.apart[buffers.holds[access.buffer[new]]]
    adds, joins = (access.adds[new] > 0) | beside, access.joins[new]
    first, last, so_far = visits.k_first[write], visits.k_last[write], visits.k_last[before]
    more = adds | (joins >= 0)
    demand(again | ~more, who, "adds to what nobody has written")
    demand(~again | more | ~buffers.placed[access.buffer[new]], who, "is written twice")
    demand(~more | _same_piece(access, old, new), who, "adds to another piece than it should")
    same = (joins < 0) | (joins == access.terms[old])
    demand(same, who, "adds itself to the products of other ranks than it says")
    once = ~again | ~adds | (first >= so_far)
    demand(once, who, "adds the same part of k twice")
    begin = np.where(adds, so_far, 0)
    demand((first < 0) | (first == begin), who, "leaves out part of k")
    done = (first < 0) | ~last_of_all | (last == _summed(footprint, new))
    demand(done, who, "does not cover all of k")
    # Rows of an all-to-all have a place for each rank, so the coverage of results suffices.
    whole = footprint.numbers.get((1 << footprint.world) - 1, -1)
    final = last_of_all & buffers.result[access.buffer[new]]
    final &= footprint.sums[buffers.holds[access.buffer[new]]]
    everyone = np.full(len(new), whole)
    for number, senders in footprint.senders.items():
        for at in np.flatnonzero(final & (buffers.holds[access.buffer[new]] == number)).tolist():
            row, stop = (
                int(column[new[at]] + access.row_shift[new[at]])
                for column in (access.row, access.row_stop)
            )
            mask = senders(int(access.rank[new[at]]), row, stop)
            everyone[at] = footprint.numbers.get(mask, -1)
    demand(~final | (access.terms[new] == everyone), who, "leaves out the product of a rank")
    # With a read in between, the rules for that read cover both writes.
    bare = again & ~beside & (before == np.flatnonzero(write) - 1)
    old, new = old[bare], new[bare]
    why = "may be overwritten by an unordered step"
    return Claim(access.step[old], access.step[new], footprint.by_access(new), why)


def _overwritten(footprint: Footprint, visits: _Visits) -> Claim:
    """Check each read against the next write."""
    access, left = footprint.access, ~visits.write & (visits.after >= 0)
    old, new = visits.each[left], visits.each[visits.after[left]]
    why = "overwrites what may still be read"
    return Claim(access.step[old], access.step[new], footprint.by_access(new), why)


def _visits(footprint: Footprint, order: Order) -> _Visits:
    """Visits of all accesses. Checks that every element of the results is written."""
    # Operands are left out: they are never written.
    live = np.flatnonzero(~footprint.buffers.operand[footprint.access.buffer])
    step, buffer, rank, *bounds = (column[live] for column in footprint.access[:7])
    instance = buffer * footprint.world + rank  # a buffer on one rank
    rows, row, row_count = cut(instance, *bounds[:2])
    cols, col, col_count = cut(instance, *bounds[2:])
    count = row_count * col_count
    each, turn = repeated(count)
    row, col = row[each] + turn // col_count[each], col[each] + turn % col_count[each]
    # A step's reads come before its writes, and its writes in their order.
    place = np.empty(len(live), np.int64)
    place[np.argsort(order.when[step] * len(live) + np.arange(len(live)))] = np.arange(len(live))
    cell = row * len(cols) + col
    by_cell = np.argsort(cell * len(live) + place[each])
    each, cell = each[by_cell], cell[by_cell]

    index, write = np.arange(len(each)), live[each] >= footprint.reads
    before, after = np.full((2, len(each)), -1)
    before[1:] = np.maximum.accumulate(np.where(write, index, -1))[:-1]
    before[cell[before] != cell] = -1
    next_write = np.where(write, index, len(each) - 1)[::-1]
    after[:-1] = np.minimum.accumulate(next_write)[::-1][1:]
    after[(cell[after] != cell) | ~write[after]] = -1

    first = by_cell[write & (before < 0)]
    area = np.diff(rows)[row[first]] * np.diff(cols)[col[first]]
    _covered(footprint, instance[each[write & (before < 0)]], area)
    k_first, k_last = _parts(footprint, live[each], cell)
    if footprint.attention:
        edge = cell // len(cols)
        first = instance[each] * (bounds[1].max(initial=0) + 1)
        _attended(footprint, live[each], cell, rows[edge] - first, rows[edge + 1] - first, k_last)
    return _Visits(live[each], write, before, after, k_first, k_last)


def _parts(footprint: Footprint, each: Ints, cell: Ints) -> tuple[Ints, Ints]:
    """First and last row of b that each access adds to the sum of a rectangle.

    Rows of a transposed A are added in any order. After a check that no row is added twice, they
    are renumbered in order of execution.
    """
    access = footprint.access
    k_first, k_last = access.k_first[each], access.k_last[each]
    any_order = footprint.transposed[footprint.buffers.holds[access.buffer[each]]]
    adding = np.flatnonzero((k_first >= 0) & any_order)
    if not len(adding):
        return k_first, k_last
    target, first, last = cell[adding], k_first[adding], k_last[adding]
    rising = np.lexsort((last, first, target))
    one, two = rising[:-1], rising[1:]
    once = (target[one] != target[two]) | (last[one] <= first[two])
    who = footprint.by_access(each[adding[two]])
    demand(once, who, "adds rows of A that another product adds, too")
    rows = last - first
    count = np.cumsum(rows)
    begin = np.flatnonzero(np.diff(target, prepend=-1))  # first visit of each rectangle
    sizes = np.diff(begin, append=len(target))
    count -= np.repeat(count[begin] - rows[begin], sizes)
    k_first[adding], k_last[adding] = count - rows, count
    return k_first, k_last


def _attended(
    footprint: Footprint, each: Ints, cell: Ints, row: Ints, row_stop: Ints, k_last: Ints
) -> None:
    """Check that queries attend to all keys that the mask lets them see. The last part of each
    rectangle then counts as the end of the sum, since the mask hides all other keys."""
    access = footprint.access
    matrix = footprint.buffers.holds[access.buffer[each]]
    attends = (access.k_first[each] >= 0) & np.isin(matrix, list(footprint.attention))
    by_cell: dict[int, list[int]] = {}
    for visit in np.flatnonzero(attends).tolist():
        by_cell.setdefault(int(cell[visit]), []).append(visit)
    for visits in by_cell.values():
        last, rank = visits[-1], int(access.rank[each[visits[-1]]])
        attended = sorted(
            zip(access.k_first[each[visits]], access.k_last[each[visits]], strict=True)
        )
        needs = footprint.attention[int(matrix[last])].needs
        for first, end in needs(rank, int(row[last]), int(row_stop[last])):
            for begin, stop in attended:
                first = max(first, stop) if begin <= first else first
            if first < end:
                raise PlanError(
                    f"{footprint.by_access(each)(last)} leaves out rows {first}:{end} of the keys "
                    f"that queries {row[last]}:{row_stop[last]} attend to"
                )
        k_last[last] = footprint.summed[matrix[last], rank]


def _same_piece(access: Accesses, one: Ints, two: Ints) -> Bools:
    """Whether accesses to the same place agree on the rows and columns there."""
    rows, cols = access.row_shift, access.col_shift
    same: Bools = (rows[one] == rows[two]) & (cols[one] == cols[two])
    return same


def _covered(footprint: Footprint, instance: Ints, area: Ints) -> None:
    """Check that every element of the results is written."""
    steps = footprint.steps
    written = np.zeros(len(steps.buffers) * steps.world, np.int64)
    np.add.at(written, instance, area)
    for number, buffer in enumerate(steps.buffers):
        for rank in range(steps.world) if buffer.memory == "result" else ():
            rows, cols = steps.shape(buffer, rank)
            count = int(written[number * steps.world + rank])
            if count != rows * cols:
                raise PlanError(
                    f"rank {rank}: {count} of {rows * cols} elements of {buffer.name} are written"
                )


#: More than the number of any step.
_LATE = np.int64(1) << 62


def call_claims(
    steps: Steps, signals: SignalColumns, footprint: Footprint, order: Order
) -> list[Claim]:
    """Check each use of a peer's slot or input, and return the claims of all uses."""
    access, me, host = footprint.access, steps.rank[footprint.access.step], steps.host
    shared = footprint.buffers.slot[access.buffer] | (access.rank != me)
    touched = [(access.step[shared], access.rank[shared])]
    for uses in (signals.posts, signals.waits, signals.clears):
        # The post that hands a slot over is for the next call.
        here = ~signals.released[uses.word] | (uses is not signals.posts)
        touched.append((uses.step[here], signals.word_of[uses.word[here]]))
    step, owner = map(np.concatenate, zip(*touched, strict=True))
    near = host[steps.rank[step]] == host[owner]  # to other hosts both sides take part
    owner, first, last = _touches(steps, step[near], owner[near])
    if not steps.words:
        demand(owner < 0, steps.by_step(first), "shares memory without a signal")
        return []
    # The steps that post and wait for the words that hand slots over, by waiter and poster.
    posts, waits = np.full((2, steps.world, steps.world), -1)
    at = signals.word_of[signals.released], signals.word_at[signals.released]
    posts[at], waits[at] = signals.poster[signals.released], signals.waiter[signals.released]
    hand_over = posts.max(axis=0)
    other = (host[:, None] == host) & ~np.eye(steps.world, dtype=bool)
    whole = ((posts == hand_over) & (posts >= 0) | ~other).all(axis=0)
    why = "does not hand its slot to every peer in one step"
    demand(whole, lambda index: f"rank {index}", why)
    why = "may still use a slot when its rank hands it on"
    final = last[other.any(axis=0)[owner]]  # there is a peer to hand it to
    handed_on = Claim(final, hand_over[owner[other.any(axis=0)[owner]]], steps.by_step(final), why)
    peer = steps.rank[first] != owner
    owner, first = owner[peer], first[peer]
    why = "uses the slot of a peer that has not handed it over"
    handed_over = Claim(waits[steps.rank[first], owner], first, steps.by_step(first), why)
    # Operands and results of a peer belong to this call once that peer has begun the call.
    callers = ~footprint.buffers.slot[access.buffer] & (access.rank != me)
    callers &= host[access.rank] == host[me]
    owner, first, _ = _touches(steps, access.step[callers], access.rank[callers])
    begun, who = _heard(steps, signals, order)[steps.rank[first], owner], steps.by_step(first)
    why = "uses an operand or a result of a peer that may not have begun this call"
    demand(begun >= 0, who, why)
    callers[: footprint.reads] = False
    _awaited(steps, signals, access.step[callers], access.rank[callers])
    return [handed_on, handed_over, Claim(begun, first, who, why)]


def _awaited(steps: Steps, signals: SignalColumns, step: Ints, owner: Ints) -> None:
    """Check that the caller of a rank waits for the writes of peers to its results. After the write
    the peer's lane posts a signal, which the rank waits for on a lane that the caller's stream
    joins: on any lane but ``sync``."""
    joined = np.array([name != "sync" for _, name in steps.lanes], np.bool_)
    waits = joined[steps.lane[signals.waits.step]]
    posts, waiters = signals.poster[signals.waits.word[waits]], signals.waits.step[waits]
    for one, rank in zip(step.tolist(), owner.tolist(), strict=True):
        heard = (posts >= one) & (steps.lane[posts] == steps.lane[one])
        if not (heard & (steps.rank[waiters] == rank)).any():
            raise PlanError(f"{steps.name(one)} writes a result that its rank does not wait for")


def _touches(steps: Steps, step: Ints, owner: Ints) -> tuple[Ints, Ints, Ints]:
    """By lane and rank whose memory its steps touch: the rank, and the first and last step."""
    pairs, pair = np.unique(steps.lane[step] * steps.world + owner, return_inverse=True)
    first, last = np.full(len(pairs), _LATE), np.full(len(pairs), -1)
    np.minimum.at(first, pair, step)
    np.maximum.at(last, pair, step)
    return pairs % steps.world, first, last


def _heard(steps: Steps, signals: SignalColumns, order: Order) -> Ints:
    """By rank and peer, the step that first waits for a signal of the peer in this call."""
    data = ~signals.released[signals.waits.word]
    step, word = signals.waits.step[data], signals.waits.word[data]
    late_first = np.argsort(-order.when[step], kind="stable")
    step, word = step[late_first], word[late_first]
    heard = np.full((steps.world, steps.world), -1)
    heard[steps.rank[step], steps.rank[signals.poster[word]]] = step
    return heard
