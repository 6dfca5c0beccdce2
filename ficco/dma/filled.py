"""Steps on rows that only the call knows: blocks of which it has only the first ones
(:attr:`ficco.plan.Buffer.block`), and rows that are picked from a matrix by their numbers.

The Plan is that of full blocks. What a call has is known when it is made: each operation looks up
where the rows that it names begin and end then. Rows of neighbouring blocks lie one right after the
other, so that a batch of products with a matrix each becomes one grouped product of exactly these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ficco.dma.buffers import buffers_of
from ficco.dma.engine import Call, Filled, Op, Program
from ficco.plan import Plan, Product, Region, Transfer

#: First row here and there, and how many.
Move = tuple[int, int, int]
#: Bytes of which rows of operands of a grouped product are multiples.
ALIGNED = 16
#: What a call has of blocks if there are none.
EMPTY = Filled({}, {})


def filled(plan: Plan, region: Region) -> bool:
    """Whether calls have only some of the rows of a region."""
    return plan.buffer[region.buffer].block > 0


def spans(
    plan: Plan, region: Region, count: int, stride: int
) -> Callable[[Filled], list[tuple[int, int]]]:
    """Where the rows of so many regions, each ``stride`` rows below the one before, lie in a
    call."""
    key, block = (region.buffer, region.rank), plan.buffer[region.buffer].block
    downs = range(0, count * stride, stride) if stride else [0]
    if not block:
        fixed = [(region.row + down, region.row_stop + down) for down in downs]
        return lambda at: fixed
    ends = []
    for down in downs:
        first, row = divmod(region.row + down, block)
        last, before = divmod(region.row_stop + down - 1, block)
        ends.append((first, row, last, before + 1))

    whole = [(first, last + 1) for first, row, last, stop in ends if not row and stop == block]

    def of_blocks(at: Filled) -> list[tuple[int, int]]:
        starts = at.starts[key]
        return [(starts[i], starts[j]) for i, j in whole]

    if len(whole) == len(ends):  # as nearly always, and a call looks up hundreds
        return of_blocks

    def found(at: Filled) -> list[tuple[int, int]]:
        starts = at.starts[key]
        return [
            (min(starts[i] + row, starts[i + 1]), min(starts[j] + stop, starts[j + 1]))
            for i, row, j, stop in ends
        ]

    return found


def moves(plan: Plan, transfer: Transfer) -> Callable[[Filled], list[Move]]:
    """The rows that a transfer moves in a call, as few copies."""
    src = spans(plan, transfer.src, transfer.batch, transfer.src_stride)
    dst = spans(plan, transfer.dst, transfer.batch, transfer.dst_stride)

    def found(at: Filled) -> list[Move]:
        few: list[Move] = []
        before, last, down = -1, -1, 0  # where the latest move begins and ends, and how far it goes
        for (one, end), (two, _) in zip(src(at), dst(at), strict=True):
            if one == last and two - one == down:
                last = end
            elif end > one:
                if last > before:
                    few.append((before, before + down, last - before))
                before, last, down = one, end, two - one
        if last > before:
            few.append((before, before + down, last - before))
        return few

    return found


def move_op(
    program: Program, transfer: Transfer, move: Callable[[torch.Tensor, torch.Tensor], Any]
) -> Op:
    """Moves rows to where they go, ``move(dst, src)``."""
    rows = moves(program.plan, transfer)
    src, dst = (buffers_of(program).rows(one) for one in transfer[:2])

    def op(call: Call) -> None:
        assert call.filled is not None
        for at, to, count in rows(call.filled):
            move(dst(call, to, to + count), src(call, at, at + count))

    return op


def pick_op(program: Program, transfer: Transfer) -> Op:
    """Brings rows of the matrix that an indexed operand is given as to where they go."""
    rows, name = moves(program.plan, transfer), transfer.src.buffer
    dst = buffers_of(program).rows(transfer.dst)

    def op(call: Call) -> None:
        matrix, index = call.tensors[name], call.tensors[index_of(name)]
        for at, to, count in rows(call.filled or EMPTY):
            out = dst(call, to, to + count)
            torch.index_select(matrix, 0, index[at : at + count], out=out)

    return op


def index_of(operand: str) -> str:
    """The name of the tensor of a call that says which rows an indexed operand has."""
    return f"{operand} index"


def grouped(plan: Plan, product: Product) -> bool:
    """Whether a batch of products is one of contiguous rows, in groups of whole blocks, which the
    library multiplies at once."""
    a, out = plan.buffer[product.a.buffer], plan.buffer[product.out.buffer]
    widths = (product.a.cols, product.out.cols)
    return (
        product.batch > 1
        and product.b_stride > 0
        and product.a_stride == product.a.rows == product.out_stride == product.out.rows
        and product.a.row % a.block == product.a.rows % a.block == product.out.row % out.block == 0
        and a.dtype == out.dtype == "bfloat16"
        and all(cols * a.itemsize % ALIGNED == 0 for cols in widths)
        and hasattr(F, "grouped_mm")
    )


def made_whole(plan: Plan) -> frozenset[str]:
    """Local buffers that grouped products on the caller's stream make, all of them. A call need not
    have them: what the library returns is kept as it is."""
    found: dict[str, bool] = {}
    for step in plan.steps:
        for one in step.products:
            name, first = one.out.buffer, step.lane == "compute0"
            local = plan.buffer[name].memory == "local" and plan.buffer[name].block > 0
            whole = local and first and grouped(plan, one)
            found[name] = found.get(name, True) and whole
    return frozenset(name for name, whole in found.items() if whole)


def product_op(program: Program, product: Product) -> Op:
    """Multiplies the rows that a call has, each by the matrix of its block."""
    plan, places = program.plan, buffers_of(program)
    batch, name = product.batch, product.out.buffer
    left = spans(plan, product.a, batch, product.a_stride)
    made = spans(plan, product.out, batch, product.out_stride)
    rows, out = places.rows(product.a), places.rows(product.out)
    right = places.batch(product.b, batch, product.b_stride)

    def one_by_one(call: Call) -> None:
        assert call.filled is not None
        b = right(call)
        pairs = zip(left(call.filled), made(call.filled), strict=True)
        for i, (some, there) in enumerate(pairs):
            if some[1] > some[0]:
                torch.mm(rows(call, *some), b[i] if b.dim() == 3 else b, out=out(call, *there))

    def at_once(call: Call) -> None:
        at = call.filled
        assert at is not None
        some, there = left(at), made(at)
        (begin, _), (_, end) = some[0], some[-1]
        first, apart = (rows_ // block for rows_ in (product.a.row, product.a.rows))
        ends = at.ends[product.a.buffer][first + apart : first + batch * apart + 1 : apart] - begin
        result = F.grouped_mm(rows(call, begin, end), right(call), offs=ends)
        if name in call.tensors:
            out(call, there[0][0], there[-1][1]).copy_(result)
        else:
            at.made.setdefault(name, []).append((there[0][0], there[-1][1], result))

    block = plan.buffer[product.a.buffer].block
    return at_once if grouped(plan, product) else one_by_one
