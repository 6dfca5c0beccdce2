"""Adapts the steps of a Plan to launches.

:func:`in_parts` splits steps whose signals gate or announce only some of their rows.
:func:`together` groups the copies that one launch of the copy kernel, or one submission to the copy
engines, carries out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from ficco.plan.model import Plan, Product, Products, Reduction, Region, Signal, Step, Transfer


class _Part(NamedTuple):
    """A part as a step, and the numbers of the parts that it comes after."""

    step: Step
    after: tuple[int, ...] = ()


def in_parts(plan: Plan, concurrent: bool = False) -> Plan:
    """Return an equivalent Plan whose signals gate and announce whole steps only.

    A step with ``gates`` or ``announces`` becomes a product for each range of rows between the
    bounds of its signals. The products run in order on the step's lane: rows without a gate, then
    the rows of each gate, and within these in the order of the announcements. With ``concurrent``
    each product, gate and announcement gets a separate lane, such as ``compute0/1``, and waits only
    for its dependencies: a kernel whose tiles wait guarantees no other order.

    Raises:
        NotImplementedError: the step is neither a matmul nor a call, or is a batch or transposed.
        KeyError: a step comes after a step or names a buffer that does not exist.
    """
    if all(step.whole for step in plan.steps):
        return plan
    steps: list[Step] = []
    became: dict[int, tuple[int, ...]] = {}  # by step, the indices of its parts
    latest: dict[str, tuple[int, ...]] = {}  # by lane, the parts of its latest step
    for step in plan.steps:
        after = tuple(i for old in step.after for i in became[old])
        before = latest.get(step.lane, ())
        begin = len(steps)
        if step.whole:
            forked = tuple(i for i in before if steps[i].lane != step.lane)
            steps.append(step._replace(after=after + forked))
        else:
            parts = _parts(plan, step)
            for number, part in enumerate(parts if concurrent else ()):
                lane = f"{step.lane}/{number}"
                local = tuple(begin + i for i in part.after)
                steps.append(part.step._replace(lane=lane, after=after + before + local))
            for number, one in enumerate(() if concurrent else _in_turn(parts)):
                steps.append(one._replace(after=() if number else after, part=number + 1))
        became[len(became)] = latest[step.lane] = tuple(range(begin, len(steps)))
    return replace(plan, steps=tuple(steps))


def _parts(plan: Plan, step: Step) -> list[_Part]:
    """The parts of a step, in a sequential order."""
    work = step.work
    if not isinstance(work, Products) or any(
        one.batch > 1 or one.transposed for one in work.products
    ):
        raise NotImplementedError(
            f"step {step.label!r}: signals gate or announce rows of matrix products that are "
            "neither a batch nor transposed"
        )
    parts: list[_Part] = []
    opened: dict[Signal, int] = {}  # part that waits for each gate
    computed: list[tuple[int, int, int]] = []  # first and end row, and the part that computes them
    bare = Step(None, step.lane, step.label)
    if step.waits or step.clears:
        parts.append(_Part(bare._replace(waits=step.waits, clears=step.clears)))
    first = tuple(range(len(parts)))
    pieces = sorted(_pieces(plan, step, work.products), key=lambda piece: _turn(step, *piece[:2]))
    for row, row_stop, product in pieces:
        gates = [gate for gate in step.gates if _meet(gate, row, row_stop)]
        for gate in gates:
            if gate not in opened:
                opened[gate] = len(parts)
                parts.append(_Part(bare._replace(waits=(gate,)), first))
        computed.append((row, row_stop, len(parts)))
        label = f"{step.label} {row}:{row_stop}"
        product_step = bare._replace(work=work._replace(products=(product,)), label=label)
        parts.append(_Part(product_step, (*first, *(opened[gate] for gate in gates))))
    for gate in step.gates:  # gates without rows are waited for, too
        if gate not in opened:
            parts.append(_Part(bare._replace(waits=(gate,)), first))
    for signal in step.announces:
        ready = tuple(part for *rows, part in computed if _meet(signal, *rows))
        parts.append(_Part(bare._replace(posts=(signal,)), first + ready))
    if step.posts:
        parts.append(_Part(bare._replace(posts=step.posts), tuple(range(len(parts)))))
    return _announced_early(parts, len(step.announces) + bool(step.posts))


def _in_turn(parts: list[_Part]) -> list[Step]:
    """The parts as sequential steps. A product waits for the gates before it and posts the
    announcements after it."""
    steps: list[Step] = []
    gates: tuple[Signal, ...] = ()
    for step, _ in parts:
        if step.work:
            steps.append(step._replace(waits=gates))
            gates = ()
        elif step.posts and steps and steps[-1].work and not gates:
            steps[-1] = steps[-1]._replace(posts=steps[-1].posts + step.posts)
        elif step.posts or step.clears:
            steps.append(step._replace(waits=gates + step.waits))
            gates = ()
        else:
            gates += step.waits
    if gates:
        steps.append(Step(None, parts[0].step.lane, parts[0].step.label, waits=gates))
    return steps


def _announced_early(parts: list[_Part], last: int) -> list[_Part]:
    """The same parts, with each of the ``last`` ones right after those that it comes after."""
    count = len(parts)
    if not last:
        return parts
    key = [
        (i, 0) if i < count - last else (max(parts[i].after, default=0), i) for i in range(count)
    ]
    order = sorted(range(count), key=key.__getitem__)
    place = {old: new for new, old in enumerate(order)}
    return [parts[i]._replace(after=tuple(place[j] for j in parts[i].after)) for i in order]


def product_rows(plan: Plan, product: Product) -> tuple[int, int]:
    """The bounds of a product's rows, by the numbers that signals have for them."""
    first = plan.buffer[product.out.buffer].first
    begin = product.out.row + (first[plan.rank] if first else 0)
    return begin, begin + product.out.rows


def _pieces(
    plan: Plan, step: Step, products: Iterable[Product]
) -> Iterator[tuple[int, int, Product]]:
    """The products of a step, cut at the bounds of its signals, with the numbers of their rows."""
    bounds = {bound for one in (*step.gates, *step.announces) for bound in (one.first, one.last)}
    for product in products:
        begin, end = product_rows(plan, product)
        if begin >= end:
            yield begin, end, product
            continue
        inside = sorted({begin, end, *(bound for bound in bounds if begin < bound < end)})
        for row, row_stop in pairwise(inside):
            yield row, row_stop, _rows(product, row - begin, row_stop - begin)


def _rows(product: Product, first: int, last: int) -> Product:
    """Some rows of a product."""
    left = product.out.rows - last

    def cut(region: Region) -> Region:
        return region._replace(row=region.row + first, row_stop=region.row_stop - left)

    factors = product.factors
    if factors and factors[0].rows == product.a.rows:
        factors = cut(factors[0]), *factors[1:]
    return product._replace(
        a=cut(product.a),
        out=cut(product.out),
        addend=product.addend and cut(product.addend),
        factors=factors,
    )


def _turn(step: Step, row: int, row_stop: int) -> tuple[int, int]:
    """Sort key of rows: number of their last gate, then number of their first announcement."""
    gates = [i for i, gate in enumerate(step.gates, 1) if _meet(gate, row, row_stop)]
    announced = [i for i, one in enumerate(step.announces) if _meet(one, row, row_stop)]
    return max(gates, default=0), min(announced, default=len(step.announces))


def _meet(signal: Signal, row: int, row_stop: int) -> bool:
    return signal.first < row_stop and row < signal.last


#: Most bytes of one launch on a copy lane. With more, waiting for the first copy would take longer
#: than separate launches do: 6.5 us each (``kernel_copies`` in configs/h200-4.yaml). On a compute
#: lane there is no limit: the product there waits for all copies anyway.
TOGETHER_BYTES = 4 << 20
#: Most copies of one launch.
MOST = 16


def together(
    plan: Plan, batched: float = 0, exchanges: bool = False
) -> tuple[tuple[int, ...], ...]:
    """The runs of steps of a Plan that are enqueued at once, ordered by the first step of each.

    Kernel copies that follow each other on a lane go together if they have one shape, each has
    another peer, and none waits for more than the first; their signals are posted after the last.
    A place of the same shape that follows them joins them. On copy lanes this holds for small
    copies only. With ``exchanges`` so do the steps of :func:`exchanged`. Every other step is a run
    of its own.

    Args:
        batched: bytes of the largest copies by copy engines that go together on a copy lane, in
            any shapes; 0 for an engine that submits each by itself.
        exchanges: whether the engine has the launch of a two-shot.
    """
    runs: list[list[int]] = []
    latest: dict[str, list[int]] = {}
    for index, step in enumerate(plan.steps):
        run = latest.get(step.lane)
        if run is not None and index in run:
            continue
        if exchanges and (steps := exchanged(plan, index)):
            latest[step.lane] = [*steps]
            runs.append(latest[step.lane])
        elif run is not None and _joins(plan, run, step, batched):
            run.append(index)
        else:
            run = latest[step.lane] = [index]
            runs.append(run)
    return tuple(map(tuple, runs))


def exchanged(plan: Plan, index: int) -> tuple[int, ...]:
    """The steps from a sum on that one launch can carry out: the sum of this rank's rows, copies of
    the sums to peers, and places of the sums of peers in the same buffer. Each copy posts as many
    signals as each place waits for; the places clear these. Empty if the steps are not these, all
    on the caller's lane.
    """
    steps, first = plan.steps, plan.steps[index]
    if not isinstance(first.work, Reduction) or first.lane != "compute0":
        return ()
    out, run, places = first.work.out, [index], 0
    for number, step in enumerate(steps[index + 1 :], index + 1):
        move = step.work
        if not isinstance(move, Transfer) or step.lane != first.lane or step.after:
            break
        sends = not move.local and move.src == out and not (step.waits or step.clears or places)
        keeps = move.local and move.dst.buffer == out.buffer and bool(step.waits)
        if not (sends or keeps and not step.posts) or move.mover != "kernel":
            break
        places += keeps
        run.append(number)
    both = places and places < len(run) - 1
    counts = {len(steps[i].posts or steps[i].waits) for i in run[1:]}
    waits, clears = (
        {s for i in run[1:] for s in getattr(steps[i], of)} for of in ("waits", "clears")
    )
    return tuple(run) if both and len(counts) == 1 and waits == clears else ()


def _joins(plan: Plan, run: list[int], step: Step, batched: float) -> bool:
    """Whether one launch, or one submission, can carry out a step with ``run``, the steps before it
    on its lane, by the conditions of :func:`together`."""
    if not isinstance(step.work, Transfer) or (step.work.mover == "dma" and not batched):
        return False
    steps = [plan.steps[i] for i in run]
    first = steps[0]
    if first.copy is None or len(run) == MOST:
        return False
    if step.waits or step.clears or not set(step.after) <= set(first.after):
        return False
    transfers = [one.work for one in (*steps, step) if isinstance(one.work, Transfer)]
    if {transfer.mover for transfer in transfers} != {first.copy.mover}:
        return False
    peers = {t.src.rank + t.dst.rank - plan.rank for t in transfers}
    if len(peers) < len(transfers):
        return False
    if first.copy.mover == "dma":
        small = max(map(plan.moved_bytes, transfers)) <= batched
        plain = all(_plain(plan, transfer) for transfer in transfers)
        return step.lane.startswith("copy") and small and plain and _apart(transfers)
    shapes = {(t.src.buffer, t.dst.buffer, t.src.rows, t.src.cols) for t in transfers}
    nbytes = sum(plan.nbytes(t.src) for t in transfers)
    few = nbytes <= TOGETHER_BYTES or step.lane.startswith("compute")
    return len(shapes) == 1 and few


def _plain(plan: Plan, transfer: Transfer) -> bool:
    """Whether a transfer is one copy of whole rows, as many in every call."""
    ends = transfer.src, transfer.dst
    whole = all(end.cols == plan.buffer[end.buffer].shapes[end.rank][1] for end in ends)
    ragged = any(plan.buffer[end.buffer].block for end in ends)
    single = transfer.batch == 1 and not transfer.local
    return single and whole and not ragged and transfer.elements > 0


def _apart(transfers: Sequence[Transfer]) -> bool:
    """Whether the last transfer may be carried out before or after each of the others: it writes no
    memory that another reads or writes, and reads no memory that another writes."""
    *others, last = transfers
    return not any(
        _overlap(last.dst, other.src)
        or _overlap(last.dst, other.dst)
        or _overlap(last.src, other.dst)
        for other in others
    )


def _overlap(one: Region, two: Region) -> bool:
    """Whether two regions have an element in common."""
    rows = one.row < two.row_stop and two.row < one.row_stop
    cols = one.col < two.col_stop and two.col < one.col_stop
    return one[:2] == two[:2] and rows and cols
