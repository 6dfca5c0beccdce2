"""Steps on ragged blocks (:attr:`ficco.plan.Buffer.block`), and on rows picked by an index.

The Plan is for full blocks. A call fills a prefix of each block, and each operation looks up the
rows of its blocks when it runs. The rows of neighbouring blocks are contiguous, so a batch of
products with one matrix a block becomes one grouped product without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ficco.compute.buffers import buffers_of
from ficco.compute.program import Call, Filled, Groups, Op, Program
from ficco.plan import Plan, Product, Region, Transfer

#: Alignment in bytes of the rows of a grouped product's operands.
ALIGNED = 16
#: Rows of a call without blocks.
EMPTY = Filled({})


class Spans(NamedTuple):
    """First rows and ends of several regions."""

    first: np.ndarray[Any, Any]
    last: np.ndarray[Any, Any]


class Moves(NamedTuple):
    """Several copies: first rows of source and destination, and numbers of rows (at least 1)."""

    src: np.ndarray[Any, Any]
    dst: np.ndarray[Any, Any]
    rows: np.ndarray[Any, Any]


def filled(plan: Plan, region: Region) -> bool:
    """Whether a region is in a buffer of ragged blocks."""
    return plan.buffer[region.buffer].block > 0


def by_copies(plan: Plan, transfer: Transfer) -> bool:
    """Whether a transfer of ragged blocks is plain copies, which the driver can carry out."""
    whole = not (transfer.function or plan.buffer[transfer.src.buffer].indexed)
    return filled(plan, transfer.src) and whole


def spans(plan: Plan, region: Region, count: int, stride: int) -> Callable[[Filled], Spans]:
    """Rows of ``count`` regions, ``stride`` rows apart, as a function of a call's fill."""
    name, rank, block = region.buffer, region.rank, plan.buffer[region.buffer].block
    if not block:
        downs = stride * np.arange(count)
        fixed = Spans(region.row + downs, region.row_stop + downs)
        return lambda at: fixed
    (first, row), (last, stop) = divmod(region.row, block), divmod(region.row_stop, block)
    apart, rest = divmod(stride, block)
    assert not rest, "regions of a batch begin alike in their blocks"

    def every(number: int) -> slice:
        return slice(number, number + count * apart, apart) if apart else slice(number, number + 1)

    begins, ends = every(first), every(last)
    if not (row or stop):

        def of_blocks(at: Filled) -> Spans:
            starts = at.starts[name]
            return Spans(starts[rank, begins], starts[rank, ends])

        return of_blocks
    after_begins, after_ends = every(first + 1), every(last + 1)

    def spans_at(at: Filled) -> Spans:
        starts = at.starts[name][rank]
        begin = np.minimum(starts[begins] + row, starts[after_begins])
        end = np.minimum(starts[ends] + stop, starts[after_ends]) if stop else starts[ends]
        return Spans(begin, end)

    return spans_at


def moves(plan: Plan, transfer: Transfer) -> Callable[[Filled], Moves]:
    """Copies of a transfer in a call. Regions that are adjacent at both ends become one copy."""
    one, two = transfer.src, transfer.dst
    batch, down, across = transfer.batch, transfer.src_stride, transfer.dst_stride
    block = max(plan.buffer[one.buffer].block, 1)
    if one.rows == down == across and not (one.row % block or down % block):
        one = one._replace(row_stop=one.row + batch * down)
        batch, down, across = 1, 0, 0
        two = two._replace(row_stop=two.row + one.rows)
    src, dst = spans(plan, one, batch, down), spans(plan, two, batch, across)

    def moves_of(at: Filled) -> Moves:
        (first, last), (to, _) = src(at), dst(at)
        rows = last - first
        if np.count_nonzero(rows) < len(rows):
            filled_rows = rows > 0
            first, to, rows = first[filled_rows], to[filled_rows], rows[filled_rows]
        return Moves(first, to, rows)

    return moves_of


def move_op(
    program: Program, transfer: Transfer, move: Callable[[torch.Tensor, torch.Tensor], Any]
) -> Op:
    """Move the rows of a transfer, by ``move(dst, src)``."""
    rows = moves(program.plan, transfer)
    src, dst = (buffers_of(program).rows(one) for one in transfer[:2])

    def op(call: Call) -> None:
        assert call.filled is not None
        each = (numbers.tolist() for numbers in rows(call.filled))
        for at, to, count in zip(*each, strict=True):
            move(dst(call, to, to + count), src(call, at, at + count))

    return op


def pick_op(program: Program, transfer: Transfer) -> Op:
    """Gather rows of an indexed operand from its matrix."""
    rows, name = moves(program.plan, transfer), transfer.src.buffer
    dst = buffers_of(program).rows(transfer.dst)

    def op(call: Call) -> None:
        matrix, index = call.tensors[name], call.tensors[index_of(name)]
        each = (numbers.tolist() for numbers in rows(call.filled or EMPTY))
        for at, to, count in zip(*each, strict=True):
            out = dst(call, to, to + count)
            torch.index_select(matrix, 0, index[at : at + count], out=out)

    return op


def index_of(operand: str) -> str:
    """Name of the call's tensor with the row index of an indexed operand."""
    return f"{operand} index"


def grouped(plan: Plan, product: Product) -> bool:
    """Whether the library computes a batch of products as one grouped product: contiguous rows in
    groups of whole blocks."""
    a, out = plan.buffer[product.a.buffer], plan.buffer[product.out.buffer]
    widths = (product.a.cols, product.out.cols)
    return (
        product.batch > 1
        and product.b_stride > 0
        and not plan.runs_one_by_one(product)
        and a.dtype == out.dtype == "bfloat16"
        and all(cols * a.itemsize % ALIGNED == 0 for cols in widths)
        and hasattr(F, "grouped_mm")
    )


def made_whole(plan: Plan) -> frozenset[str]:
    """Local buffers written only by grouped products on the caller's stream. A call does not
    allocate them; it uses the library's output instead."""
    whole_of: dict[str, bool] = {}
    for step in plan.steps:
        for one in step.products:
            name, first = one.out.buffer, step.lane == "compute0"
            local = plan.buffer[name].memory == "local" and plan.buffer[name].block > 0
            whole = local and first and grouped(plan, one)
            whole_of[name] = whole_of.get(name, True) and whole
    return frozenset(name for name, whole in whole_of.items() if whole)


def groups_of(plan: Plan) -> list[Groups]:
    """Groups of all grouped products of a Plan."""
    products = (one for step in plan.steps for one in step.products)
    return list(dict.fromkeys(_groups(plan, one) for one in products if grouped(plan, one)))


def _groups(plan: Plan, product: Product) -> Groups:
    block = plan.buffer[product.a.buffer].block
    return product.a.row // block, product.a.rows // block, product.batch


def ends_of(
    groups: Sequence[Groups], starts: np.ndarray[Any, Any], device: torch.device
) -> dict[Groups, torch.Tensor]:
    """End rows of groups, counted from the first row of their product, by one copy to the device.
    ``starts``: rows before each block, and of all blocks."""
    each = [
        starts[first + apart : first + count * apart + 1 : apart] - starts[first]
        for first, apart, count in groups
    ]
    counts, on_gpu = [count for _, _, count in groups], device.type != "cpu"
    ends = torch.empty(sum(counts), dtype=torch.int32, device="cpu", pin_memory=on_gpu)
    np.concatenate([*each, starts[:0]], out=ends.numpy(), casting="same_kind")
    parts = ends.to(device, non_blocking=True).split(counts)
    return dict(zip(groups, parts, strict=True))


def product_op(program: Program, product: Product) -> Op:
    """Multiply the rows of each block by the block's matrix."""
    plan, places = program.plan, buffers_of(program)
    batch, name = product.batch, product.out.buffer
    left = spans(plan, product.a, batch, product.a_stride)
    out_spans = spans(plan, product.out, batch, product.out_stride)
    rows, out = places.rows(product.a), places.rows(product.out)
    right = places.batch(product.b, batch, product.b_stride)

    def one_by_one(call: Call) -> None:
        assert call.filled is not None
        b = right(call)
        (first, last), (to, end) = left(call.filled), out_spans(call.filled)
        rows_of = zip(*(numbers.tolist() for numbers in (first, last, to, end)), strict=True)
        for i, (at, stop, out_row, out_stop) in enumerate(rows_of):
            if stop > at:
                result = out(call, out_row, out_stop)
                torch.mm(rows(call, at, stop), b[i] if b.dim() == 3 else b, out=result)

    if not grouped(plan, product):
        return one_by_one
    groups = _groups(plan, product)

    def at_once(call: Call) -> None:
        at = call.filled
        assert at is not None
        (first, last), (to, end) = left(at), out_spans(at)
        a, out_rows = rows(call, int(first[0]), int(last[-1])), (int(to[0]), int(end[-1]))
        result = F.grouped_mm(a, right(call), offs=at.ends[groups])
        if name in call.tensors:
            out(call, *out_rows).copy_(result)
        else:
            at.grouped.setdefault(name, []).append((*out_rows, result))

    return at_once
