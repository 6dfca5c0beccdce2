"""ficco's kernels within a device, as PyTorch operations: a reference for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ficco.hip_kernels.launch import address_of, check_reduce


class TorchKernels:
    """The kernels of :class:`ficco.hip_kernels.Kernels` that PyTorch operations can replace. A
    stream is a handle, or None for the current stream, also on CPUs."""

    def place(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        for tensor in (dst, src):
            address_of(tensor)  # refuses strides that the kernel does not support
        with _on(stream):
            dst.copy_(src)

    def reduce(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor], stream: Any, factor: float = 1.0
    ) -> None:
        check_reduce(out, parts)
        with _on(stream):
            total = parts[0].to(torch.float32, copy=True)
            for part in parts[1:]:
                total += part
            out.copy_(total * factor)


def _on(stream: Any) -> Any:
    if stream is None:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(int(stream)))
