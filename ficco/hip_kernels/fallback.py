"""What the kernels do, with PyTorch's operations."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from ficco.hip_kernels.launch import PEER_BLOCKS, address_of, check_place, check_reduce


class _Memory:
    """Rows of a GPU's memory, as PyTorch takes them."""

    def __init__(self, address: int, pitch: int, width: int, height: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (height, width),
            "strides": (pitch, 1),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _rows(address: int, pitch: int, width: int, height: int, on_gpu: bool) -> torch.Tensor:
    """Rows of ``width`` bytes at a distance of ``pitch``, in place."""
    if on_gpu:
        return torch.as_tensor(_Memory(address, pitch, width, height))
    room = (ctypes.c_uint8 * ((height - 1) * pitch + width)).from_address(address)
    flat = torch.frombuffer(room, dtype=torch.uint8)
    return flat.as_strided((height, width), (pitch, 1))


class TorchKernels:
    """:class:`ficco.hip_kernels.Kernels` without kernels. A stream is a handle, or None for the
    current one, also on CPUs."""

    def __init__(self, on_gpu: bool = True) -> None:
        """``on_gpu``: raw addresses are those of a GPU."""
        self._on_gpu = on_gpu

    def copy(
        self,
        dst: int,
        dst_pitch: int,
        src: int,
        src_pitch: int,
        width: int,
        height: int,
        stream: Any,
        blocks: int = PEER_BLOCKS,
    ) -> None:
        """By ``copy_``, which takes as many SMs or CUs as it likes."""
        if width and height:
            with _on(stream):
                to = _rows(dst, dst_pitch, width, height, self._on_gpu)
                to.copy_(_rows(src, src_pitch, width, height, self._on_gpu))

    def place(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        check_place(dst, src)
        address_of(dst), address_of(src)
        with _on(stream):
            dst.copy_(src)

    def reduce(self, out: torch.Tensor, parts: Sequence[torch.Tensor], stream: Any) -> None:
        check_reduce(out, parts)
        with _on(stream):
            total = parts[0].to(torch.float32, copy=True)
            for part in parts[1:]:
                total += part
            out.copy_(total)

    def post(self, words: Sequence[tuple[int, int]], stream: Any) -> None:
        raise NotImplementedError(_NO_SIGNALS)

    def wait(
        self, words: Sequence[tuple[int, int]], seconds: float, late: int, stream: Any
    ) -> None:
        raise NotImplementedError(_NO_SIGNALS)


_NO_SIGNALS = (
    "PyTorch has no operation that posts a signal or waits for one; use stream writes and waits, "
    "or install a compiler for ficco's kernels"
)


def _on(stream: Any) -> Any:
    if stream is None:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(int(stream)))
