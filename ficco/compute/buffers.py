"""Where the Regions of a Program lie: addresses for copies, views for PyTorch.

Nothing else in an engine looks into a Plan's buffers, or into a Call for its tensors. What does not
change from call to call is found once, when the Program is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ficco.compute.program import Call, Program, Symmetric
from ficco.plan import Buffer, Region

#: Address and row pitch in bytes.
Place = tuple[int, int]


def operands_key(call: Call) -> tuple[Any, ...]:
    """Where the tensors of a call lie, by which calls are alike."""
    return tuple([(one.data_ptr(), one.stride()) for one in call.tensors.values()])


def buffers_of(program: Program) -> Buffers:
    """Those of a Program, made once."""
    found: Buffers | None = program.state.get("buffers")
    if found is None:
        found = program.state["buffers"] = Buffers(program)
    return found


class Buffers:
    """The buffers of a Program on its rank."""

    def __init__(self, program: Program) -> None:
        # Not the Program: it keeps this, and memory must be free as soon as nobody uses it.
        self._plan, self._slot, self._source = program.plan, program.slot, program.source
        self._rank = program.plan.rank
        self._whole: dict[tuple[str, int], torch.Tensor] = {}  # in symmetric memory

    def size(self, region: Region) -> tuple[int, int]:
        """Bytes that are contiguous, and how often they follow at equal distances."""
        buffer, (rows, cols) = self._plan.buffer[region.buffer], (region.rows, region.cols)
        if buffer.layout == "transposed":
            rows, cols = cols, rows
        return cols * buffer.itemsize, rows

    def dtype(self, region: Region) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._plan.buffer[region.buffer].dtype)
        return dtype

    def cuts_rows(self, region: Region) -> bool:
        """Whether a region is parts of rows."""
        return region.cols < self._plan.buffer[region.buffer].shapes[region.rank][1]

    # For copies.

    def place(self, region: Region) -> Place:
        """Where a region of a symmetric buffer of any rank lies."""
        buffer = self._plan.buffer[region.buffer]
        memory, offset = self._memory(region.buffer)
        start, (row, col) = _within(buffer, region)
        pitch = col if buffer.layout == "transposed" else row
        base, itemsize = memory.addresses[region.rank] + offset, buffer.itemsize
        return base + start * itemsize, pitch * itemsize

    def source(self, region: Region) -> Callable[[Call], Place]:
        """Where a copy reads: in one of a call's tensors, or in symmetric memory."""
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
            row, col = (stride * itemsize for stride in whole.stride())
            at = whole.data_ptr() + region.row * row + region.col * col
            return at, col if turned else row

        return own

    # For PyTorch.

    def view(self, region: Region) -> Callable[[Call], torch.Tensor]:
        """A region as a matrix."""
        name, buffer = region.buffer, self._plan.buffer[region.buffer]
        if buffer.matrices and buffer.memory != "slot":
            matrix, index = self._in_matrix(region)
            return lambda call: call.tensors[name][matrix][index]
        if region.rank == self._rank and buffer.memory != "slot":
            if (index := _index(buffer.shapes[region.rank], region)) is None:
                return lambda call: call.tensors[name]
            return lambda call: call.tensors[name][index]
        with torch.inference_mode(False):  # calls of other modes use it, too
            part = self._part(region)
        return lambda call: part

    def batch(self, region: Region, count: int, stride: int) -> Callable[[Call], torch.Tensor]:
        """So many regions, each ``stride`` rows below the one before; a matrix if it is one."""
        first = self.view(region)
        if count == 1:
            return first
        name, buffer = region.buffer, self._plan.buffer[region.buffer]
        if buffer.matrices and buffer.memory != "slot":
            matrix, (rows, cols) = self._in_matrix(region)
            step = max(stride * buffer.matrices // buffer.shapes[self._rank][0], 1)
            some = slice(matrix, matrix + count * step, step)
            return lambda call: call.tensors[name][some, rows, cols]

        def several(call: Call) -> torch.Tensor:
            one = first(call)
            pitch, step = one.stride()
            shape, strides = (count, *one.shape), (stride * pitch, pitch, step)
            return one.as_strided(shape, strides, one.storage_offset())

        return several

    def rows(self, region: Region) -> Callable[[Call, int, int], torch.Tensor]:
        """Whole rows of the buffer of a region, as a call has them, from a first to a last one."""
        name, rank, buffer = region.buffer, region.rank, self._plan.buffer[region.buffer]
        if buffer.memory == "slot":
            with torch.inference_mode(False):  # calls of other modes use it, too
                whole = self._part(region._replace(row=0, row_stop=buffer.room or buffer.rows))
            return lambda call, first, last: whole[first:last]

        def own(call: Call, first: int, last: int) -> torch.Tensor:
            made = call.filled.made.get(name, ()) if call.filled else ()
            for begin, end, part in made:
                if begin <= first and last <= end:
                    return part[first - begin : last - begin]
            return call.tensors[name][first:last]

        assert rank == self._rank
        return own

    def row(self, region: Region) -> Callable[[Call, int], int]:
        """The address of a row of an own buffer of whole rows, as a call has it."""
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
        """Which of a buffer's matrices a region is in, and where in that."""
        matrix, row, _ = _matrix(self._plan.buffer[region.buffer], region)
        return matrix, (slice(row, row + region.rows), slice(region.col, region.col_stop))

    def _memory(self, name: str) -> tuple[Symmetric, int]:
        """The symmetric memory with a buffer, and where in it that begins."""
        if self._plan.buffer[name].memory == "slot":
            assert self._slot is not None and self._slot.memory is not None
            return self._slot.memory, self._slot.data + self._plan.offsets[name]
        assert self._source is not None
        return self._source

    def _part(self, region: Region) -> torch.Tensor:
        """A region of symmetric memory."""
        name, rank, buffer = region.buffer, region.rank, self._plan.buffer[region.buffer]
        rows, cols = buffer.shapes[rank]
        if buffer.memory == "slot":  # which has room for the most of any rank
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
    """The rows that a step of the caller's reads, all of A [m, k]: in staging, or as given."""
    if program.slot is None:
        return call.tensors["a"]
    rows, cols = program.plan.shape("staging")
    region = Region("staging", program.plan.rank, 0, rows, 0, cols)
    return buffers_of(program).view(region)(call)


def _matrix(buffer: Buffer, region: Region) -> tuple[int, int, int]:
    """Which of a buffer's matrices a region is in, its first row there, and how many that has."""
    matrices = max(buffer.matrices, 1)
    height = buffer.shapes[region.rank][0] // matrices
    matrix = min(region.row // max(height, 1), matrices - 1)
    return matrix, region.row - matrix * height, height


def _within(buffer: Buffer, region: Region) -> tuple[int, tuple[int, int]]:
    """The element at which a region of symmetric memory begins in its buffer, and the strides of
    its rows and columns."""
    cols = buffer.shapes[region.rank][1]
    if buffer.layout == "columns":
        return region.col * buffer.rows + region.row * region.cols, (region.cols, 1)
    if buffer.layout == "transposed":
        matrix, row, height = _matrix(buffer, region)
        return (matrix * cols + region.col) * height + row, (1, height)
    return region.row * cols + region.col, (cols, 1)


def _index(shape: tuple[int, int], region: Region) -> Any:
    """What cuts a region out of a matrix; None if it is all of it."""
    rows, cols = slice(region.row, region.row_stop), slice(region.col, region.col_stop)
    if region.cols < shape[1]:
        return rows, cols
    return None if region.rows == shape[0] else rows
