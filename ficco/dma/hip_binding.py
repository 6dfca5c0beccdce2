"""HIP's part in launching ficco's kernels, through hip-python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ficco.dma import hip_api as hip
from ficco.hip_kernels import Target
from ficco.hip_kernels.launch import Packed


class HipBinding:
    """See :class:`ficco.hip_kernels.launch.Binding`."""

    def __init__(self, target: Target, index: int) -> None:
        self.target = target
        self.processors = hip.attribute("MultiprocessorCount", index)
        # In kHz; 100 MHz on every CDNA card.
        self.ticks_per_s = 1e3 * (hip.attribute("WallClockRate", index) or 100_000)
        self._modules: list[Any] = []

    def load(self, image: bytes, names: Sequence[str]) -> Mapping[str, Any]:
        module = hip.load_module(image)
        self._modules.append(module)
        return {name: hip.kernel(module, name.encode()) for name in names}

    def pack(self, arguments: Sequence[Any]) -> Packed:
        return Packed(arguments)

    def launch(
        self, kernel: Any, blocks: int, threads: int, arguments: Packed, stream: Any
    ) -> None:
        hip.launch(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, arguments.address, None)

    def close(self) -> None:
        """Unload the code; no stream uses it any more."""
        while self._modules:
            hip.unload_module(self._modules.pop())
