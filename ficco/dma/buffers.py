"""Where the Regions of a Program lie on GPUs: addresses for copies, views for PyTorch.

Nothing else in the GPU engine looks into a Plan's buffers, or into a Call for its tensors. What
does not change from call to call is found once, when the Program is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ficco.dma.engine import Call, Program
from ficco.dma.memories import Mapped, align
from ficco.plan import SHARED_BUFFERS, Product, Region
from ficco.schedules import Schedule

#: Address and row pitch in bytes.
Place = tuple[int, int]


def data_bytes(room: tuple[int, int]) -> int:
    """Bytes of a slot's buffers."""
    return sum(map(align, room))


def data_offsets(room: tuple[int, int], first: int) -> tuple[int, int]:
    """Where the buffers of a slot lie in its memory, from ``first`` on."""
    return first, first + align(room[0])


def operands_key(call: Call) -> tuple[Any, ...]:
    """Where the tensors of a call lie, by which calls are alike."""
    sums, gathered, partial = call.sums, call.gathered, call.partial
    return (
        call.a.data_ptr(),
        call.a.stride(),
        call.b.data_ptr(),
        call.b.stride(),
        call.out.data_ptr(),
        call.out.stride(),
        0 if sums is None else sums.data_ptr(),
        0 if gathered is None else gathered.data_ptr(),
        0 if partial is None else partial.data_ptr(),
    )


class Buffers:
    """The buffers of a Program on one rank."""

    def __init__(self, program: Program, rank: int, packs: bool) -> None:
        """``packs``: the columns of a piece lie together where its sender can pack them."""
        # Not the Program: it keeps this, and memory must be free as soon as nobody uses it.
        self._plan, self._slot, self._source = program.plan, program.slot, program.source
        self._rank, self._packs = rank, packs
        self._whole: dict[tuple[str, int], torch.Tensor] = {}  # in symmetric memory

    def row_bytes(self, region: Region) -> int:
        return region.cols * self._plan.problem.itemsize

    def dtype(self, region: Region) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._plan.problem.dtype)
        return dtype

    def cuts_rows(self, region: Region) -> bool:
        """Whether a region is parts of rows."""
        return region.cols < self._plan.shape(region.buffer, region.rank)[1]

    # For copies.

    def place(self, region: Region) -> Place:
        """Where a region of a symmetric buffer of any rank lies."""
        plan, itemsize = self._plan, self._plan.problem.itemsize
        if region.buffer == "a":
            assert self._source is not None
            memory, offset = self._source
        else:
            memory, offset = self._in_slot(region.buffer)
        assert isinstance(memory, Mapped)
        base = memory.addresses[region.rank] + offset
        if (rows := self._block_rows(region)) is not None:
            start = region.col * rows + region.row * region.cols
            return base + start * itemsize, region.cols * itemsize
        pitch = plan.shape(region.buffer, region.rank)[1] * itemsize
        return base + region.row * pitch + region.col * itemsize, pitch

    def source(self, region: Region) -> Callable[[Call], Place]:
        """Where a copy reads: in one of a call's tensors, or in symmetric memory."""
        if region.rank != self._rank or region.buffer in SHARED_BUFFERS:
            place = self.place(region)
            return lambda call: place
        name, itemsize = _field(region.buffer), self._plan.problem.itemsize

        def own(call: Call) -> Place:
            whole = getattr(call, name)
            pitch = whole.stride(0) * itemsize
            return whole.data_ptr() + region.row * pitch + region.col * itemsize, pitch

        return own

    # For PyTorch.

    def view(self, region: Region) -> Callable[[Call], torch.Tensor]:
        """A region as a matrix."""
        if region.buffer in SHARED_BUFFERS or region.rank != self._rank:
            with torch.inference_mode(False):  # calls of other modes use it, too
                part = self._cut(self._shared(region.buffer, region.rank), region)
            return lambda call: part
        name = _field(region.buffer)
        return lambda call: _cut(getattr(call, name), region)

    def batch(self, region: Region, count: int, stride: int) -> Callable[[Call], torch.Tensor]:
        """So many regions, each ``stride`` rows below the one before."""
        first = self.view(region)

        def several(call: Call) -> torch.Tensor:
            one = first(call)
            pitch, step = one.stride()
            shape, strides = (count, *one.shape), (stride * pitch, pitch, step)
            return one.as_strided(shape, strides, one.storage_offset())

        return several

    def right(self, product: Product) -> Callable[[Call], torch.Tensor]:
        """The right operand of a product."""
        problem, out = self._plan.problem, product.out
        terms = slice(product.k_first, product.k_last)
        columns = slice(out.col, out.col_stop)
        whole = product.k_last - product.k_first, out.cols
        if whole == (problem.b_rows(self._plan.rank), problem.n):
            return lambda call: call.b
        return lambda call: call.b[terms, columns]

    def _in_slot(self, name: str) -> tuple[Any, int]:
        assert self._slot is not None
        return self._slot.memory, self._slot.offsets[name == "publish"]

    def _shared(self, name: str, rank: int) -> torch.Tensor:
        """A whole buffer of any rank in a slot's symmetric memory."""
        if (name, rank) not in self._whole:
            plan = self._plan
            memory, start = self._in_slot(name)
            assert isinstance(memory, Mapped)
            shape = plan.shape(name, rank)
            nbytes = shape[0] * shape[1] * plan.problem.itemsize
            part = memory.tensor if rank == self._rank else memory.part(rank)
            flat = part[start : start + nbytes]
            self._whole[name, rank] = flat.view(getattr(torch, plan.problem.dtype)).view(shape)
        return self._whole[name, rank]

    def _cut(self, whole: torch.Tensor, region: Region) -> torch.Tensor:
        if (rows := self._block_rows(region)) is None:
            return _cut(whole, region)
        at = whole.storage_offset() + region.col * rows + region.row * region.cols
        return whole.as_strided((region.rows, region.cols), (region.cols, 1), at)

    def _block_rows(self, region: Region) -> int | None:
        """Where columns are packed those of a piece lie together in staging, all rows of them,
        blocks of columns one after the other. The rows of a block; None for plain staging."""
        if not self._packs or region.buffer != "staging":
            return None
        plan = self._plan
        cols, schedule = plan.staging[1], Schedule.parse(plan.schedule)
        if schedule.dims == 1 or schedule.pull or schedule.tail > 1 or plan.stages:
            return None  # not all rows are cut alike, or the owner does not send
        if plan.problem.kind.sums and not schedule.uniform:
            return None  # whole rows are summed
        return plan.room[0] // max(1, cols * plan.problem.itemsize)


def _field(buffer: str) -> str:
    return "sums" if buffer == "sum" else buffer


def _cut(whole: torch.Tensor, region: Region) -> torch.Tensor:
    view = whole if region.rows == whole.shape[0] else whole[region.row : region.row_stop]
    return view if region.cols == whole.shape[1] else view[:, region.col : region.col_stop]
