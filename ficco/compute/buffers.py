"""Addresses and views of the Regions of a Program.

Engines read a Plan's buffers and a Call's tensors only through this module. State that all calls
share is computed once, when the Program is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ficco.compute.program import Call, Program, Symmetric
from ficco.plan import Buffer, Region

#: Address and row pitch in bytes.
Place = tuple[int, int]


def layout_of(call: Call) -> tuple[Any, ...]:
    """Strides of a call's tensors."""
    return tuple([one.stride() for one in call.tensors.values()])


def operands_key(call: Call) -> tuple[Any, ...]:
    """Strides and addresses of a call's tensors: equal for calls that can share a recording."""
    layout = call.layout or layout_of(call)
    return layout, *[one.data_ptr() for one in call.tensors.values()]


def buffers_of(program: Program) -> Buffers:
    """The Buffers of a Program, created on first use."""
    buffers: Buffers | None = program.state.get("buffers")
    if buffers is None:
        buffers = program.state["buffers"] = Buffers(program)
    return buffers


class Buffers:
    """The buffers of a Program on its rank."""

    def __init__(self, program: Program) -> None:
        # No reference to the Program, which refers to this: a cycle would delay freeing memory.
        self._plan, self._slot, self._source = program.plan, program.slot, program.source
        self._rank = program.plan.rank
        self._whole: dict[tuple[str, int], torch.Tensor] = {}  # in symmetric memory

    def size(self, region: Region) -> tuple[int, int]:
        """Contiguous bytes of a row, and the number of rows."""
        buffer, (rows, cols) = self._plan.buffer[region.buffer], (region.rows, region.cols)
        if buffer.layout == "transposed":
            rows, cols = cols, rows
        return cols * buffer.itemsize, rows

    def dtype(self, region: Region) -> torch.dtype:
        """Dtype of a region's elements."""
        dtype: torch.dtype = getattr(torch, self._plan.buffer[region.buffer].dtype)
        return dtype

    def cuts_rows(self, region: Region) -> bool:
        """Whether a region has only some columns of its buffer."""
        return region.cols < self._plan.buffer[region.buffer].shapes[region.rank][1]

    # For copies.

    def place(self, region: Region) -> Place:
        """Address and pitch of a region of a symmetric buffer, of any rank."""
        buffer = self._plan.buffer[region.buffer]
        memory, offset = self._memory(region.buffer)
        start, (row, col) = _within(buffer, region)
        pitch = col if buffer.layout == "transposed" else row
        base, itemsize = memory.addresses[region.rank] + offset, buffer.itemsize
        return base + start * itemsize, pitch * itemsize

    def source(self, region: Region) -> Callable[[Call], Place]:
        """Address and pitch of a copy's source, in a tensor of the call or in symmetric memory."""
        buffer = self._plan.buffer[region.buffer]
        if region.rank != self._rank or buffer.memory == "slot":
            place = self.place(region)
            return lambda call: place
        name, itemsize, turned = buffer.name, buffer.itemsize, buffer.layout == "transposed"
        if buffer.matrices:
            matrix, (rows, _) = self._in_matrix(region)
            region = region._replace(row=rows.start, row_stop=rows.stop)

        def own(call: Call) -> Place:
            whole = call.tensors[name]
            if buffer.matrices:
                whole = whole[matrix]
            row, col = whole.stride()
            at = whole.data_ptr() + (region.row * row + region.col * col) * itemsize
            return at, (col if turned else row) * itemsize

        return own

    # For PyTorch.

    def view(self, region: Region) -> Callable[[Call], torch.Tensor]:
        """View of a region as a matrix."""
        name, buffer = region.buffer, self._plan.buffer[region.buffer]
        if buffer.matrices and buffer.memory != "slot":
            matrix, index = self._in_matrix(region)
            return lambda call: call.tensors[name][matrix][index]
        if region.rank == self._rank and buffer.memory != "slot":
            if (index := _index(buffer.shapes[region.rank], region)) is None:
                return lambda call: call.tensors[name]
            return lambda call: call.tensors[name][index]
        with torch.inference_mode(False):  # calls in any mode use the view
            part = self._part(region)
        return lambda call: part

    def batch(self, region: Region, count: int, stride: int) -> Callable[[Call], torch.Tensor]:
        """View of ``count`` regions, ``stride`` rows apart, as a batch; a matrix if count is 1."""
        first = self.view(region)
        if count == 1:
            return first
        name, buffer = region.buffer, self._plan.buffer[region.buffer]
        if buffer.matrices and buffer.memory != "slot":
            matrix, (rows, cols) = self._in_matrix(region)
            step = max(stride * buffer.matrices // buffer.shapes[self._rank][0], 1)
            matrices = slice(matrix, matrix + count * step, step)
            return lambda call: call.tensors[name][matrices, rows, cols]

        def several(call: Call) -> torch.Tensor:
            one = first(call)
            pitch, step = one.stride()
            shape, strides = (count, *one.shape), (stride * pitch, pitch, step)
            return one.as_strided(shape, strides, one.storage_offset())

        return several

    def rows(self, region: Region) -> Callable[[Call, int, int], torch.Tensor]:
        """Function of a call and rows [first, last) of a region's buffer: view of these rows."""
        name, rank, buffer = region.buffer, region.rank, self._plan.buffer[region.buffer]
        if buffer.memory == "slot":
            with torch.inference_mode(False):  # calls in any mode use the view
                whole = self._part(region._replace(row=0, row_stop=buffer.room or buffer.rows))
            return lambda call, first, last: whole[first:last]

        def own(call: Call, first: int, last: int) -> torch.Tensor:
            products = call.filled.grouped.get(name, ()) if call.filled else ()
            for begin, end, part in products:
                if begin <= first and last <= end:
                    return part[first - begin : last - begin]
            return call.tensors[name][first:last]

        assert rank == self._rank
        return own

    def row(self, region: Region) -> Callable[[Call, int], int]:
        """Function of a call and a row of an own buffer: address of the row."""
        name, (pitch, _), rows = region.buffer, self.size(region), self.rows(region)
        if self._plan.buffer[name].memory == "slot":
            base = self.place(region._replace(row=0, row_stop=1))[0]
            return lambda call, row: base + row * pitch

        def own(call: Call, row: int) -> int:
            whole = call.tensors.get(name)
            if whole is None:
                return rows(call, row, row + 1).data_ptr()
            return whole.data_ptr() + row * pitch

        return own

    def _in_matrix(self, region: Region) -> tuple[int, tuple[slice, slice]]:
        """Matrix of a buffer that contains a region, and the region's index in that matrix."""
        matrix, row, _ = _matrix(self._plan.buffer[region.buffer], region)
        return matrix, (slice(row, row + region.rows), slice(region.col, region.col_stop))

    def _memory(self, name: str) -> tuple[Symmetric, int]:
        """Symmetric memory of a buffer, and the buffer's offset in bytes."""
        if self._plan.buffer[name].memory == "slot":
            assert self._slot is not None and self._slot.memory is not None
            return self._slot.memory, self._slot.data + self._plan.offsets[name]
        assert self._source is not None
        return self._source

    def _part(self, region: Region) -> torch.Tensor:
        """View of a region of symmetric memory."""
        name, rank, buffer = region.buffer, region.rank, self._plan.buffer[region.buffer]
        rows, cols = buffer.shapes[rank]
        if buffer.memory == "slot":  # a slot has the rows of the largest rank
            rows = buffer.room or buffer.rows
        if (name, rank) not in self._whole:
            memory, start = self._memory(name)
            flat = memory.tensor if rank == self._rank else memory.part(rank)
            flat = flat[start : start + rows * cols * buffer.itemsize]
            self._whole[name, rank] = flat.view(getattr(torch, buffer.dtype)).view(rows, cols)
        whole = self._whole[name, rank]
        if buffer.layout == "rows":
            index = _index((rows, cols), region)
            return whole if index is None else whole[index]
        at, strides = _within(buffer, region)
        return whole.as_strided((region.rows, region.cols), strides, whole.storage_offset() + at)


def gathered_rows(program: Program, call: Call) -> torch.Tensor:
    """All of A [m, k], as the caller's own step reads it: in staging, or the operand itself."""
    if program.slot is None:
        return call.tensors["a"]
    rows, cols = program.plan.shape("staging")
    region = Region("staging", program.plan.rank, 0, rows, 0, cols)
    return buffers_of(program).view(region)(call)


def _matrix(buffer: Buffer, region: Region) -> tuple[int, int, int]:
    """Matrix of a buffer that contains a region, the region's first row in it, and its height."""
    matrices = max(buffer.matrices, 1)
    height = buffer.shapes[region.rank][0] // matrices
    matrix = min(region.row // max(height, 1), matrices - 1)
    return matrix, region.row - matrix * height, height


def _within(buffer: Buffer, region: Region) -> tuple[int, tuple[int, int]]:
    """Offset in elements of a region in its symmetric buffer, and the strides of its rows and
    columns."""
    cols = buffer.shapes[region.rank][1]
    if buffer.layout == "columns":
        return region.col * buffer.rows + region.row * region.cols, (region.cols, 1)
    if buffer.layout == "transposed":
        matrix, row, height = _matrix(buffer, region)
        return (matrix * cols + region.col) * height + row, (1, height)
    return region.row * cols + region.col, (cols, 1)


def _index(shape: tuple[int, int], region: Region) -> Any:
    """Index of a region in a matrix; None if the region is the whole matrix."""
    rows, cols = slice(region.row, region.row_stop), slice(region.col, region.col_stop)
    if region.cols < shape[1]:
        return rows, cols
    return None if region.rows == shape[0] else rows
