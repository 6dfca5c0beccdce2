"""Host memory of all ranks as tensors, and the layout of the CPU engine's slots in it."""

from __future__ import annotations

import torch

from ficco.dma.engine import Engine, Symmetric
from ficco.dma.host import SEMAPHORE_STRIDE, HostMemory


class CpuMemory(Symmetric):
    """Host memory of all ranks; ``parts`` are theirs as bytes, by rank."""

    def __init__(self, engine: Engine, nbytes: int, serial: int) -> None:
        self.serial, self.nbytes = serial, nbytes
        self.host = HostMemory(
            engine.group,
            max(nbytes, 1),
            engine.timeout_s,
            f"allocation {serial}",
            engine.operator,
            # If only this rank allocates, here it learns that its call differs from its peers'.
            interrupt=lambda: engine.interrupt(),
        )
        self.parts = [
            torch.frombuffer(part, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
            for part in self.host.maps
        ]
        self.tensor = self.parts[engine.rank]
        self.addresses = [self.host.address(rank) for rank in range(engine.world)]

    def free(self) -> None:
        """Drop it; tensors in it, and calls in flight, keep it mapped."""
        self.parts, self.addresses = [], []
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.host.close()


def data_offset(words: int) -> int:
    """The byte of a slot at which its data begin, after its words and the marks of its lanes."""
    return (words + 1) * SEMAPHORE_STRIDE
