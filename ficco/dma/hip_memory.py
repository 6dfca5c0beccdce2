"""Memory of a GPU that the ranks of a group share through HIP's handles."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ficco.dma import hip_api as hip
from ficco.dma.engine import Symmetric
from ficco.dma.host import HostMemory

if TYPE_CHECKING:
    from ficco.dma.hip import HipEngine


class Shared:
    """Allocations of this rank that its peers can map, and theirs. Making them is collective.

    A rank must not free what a peer still maps. Each therefore says in host memory when it has let
    go of what its peers own; :meth:`free` does nothing until all have.
    """

    def __init__(self, engine: HipEngine, sizes: Sequence[int], purpose: str) -> None:
        """Zeroed memory of some sizes; a size of 0 is one signal."""
        self.mine: list[int] = []
        self._open: dict[tuple[int, int], int] = {}
        self._rank = engine.rank
        self._host: HostMemory | None = None
        try:
            for nbytes in sizes:
                self.mine.append(hip.malloc(nbytes) if nbytes else hip.malloc_signal())
                hip.fill(self.mine[-1], nbytes or hip.SIGNAL_BYTES, engine.side)
            engine.settle(engine.side)
            handles = b"".join([hip.share(address) for address in self.mine])
            self._host = HostMemory(
                engine.group,
                len(handles) + 1,
                engine.timeout_s,
                purpose,
                engine.operator,
                interrupt=lambda: engine.interrupt(),
            )
            self._host.maps[self._rank][: len(handles)] = handles
            self._host.barrier(engine.timeout_s)
        except BaseException:
            self._host = None
            self.free()
            raise

    def address(self, rank: int, index: int) -> int:
        """Where an allocation of a rank is mapped here; a peer's is mapped when first asked for."""
        if rank == self._rank:
            return self.mine[index]
        if (rank, index) not in self._open:
            assert self._host is not None
            start = index * hip.HANDLE_BYTES
            handle = bytes(self._host.maps[rank][start : start + hip.HANDLE_BYTES])
            self._open[rank, index] = hip.open_shared(handle)
        return self._open[rank, index]

    def let_go(self) -> None:
        """Unmap what is the peers', and tell them."""
        while self._open:
            hip.close_shared(self._open.popitem()[1])
        if self._host is not None:
            self._host.maps[self._rank][self._flag] = 1

    @property
    def _flag(self) -> int:
        return len(self.mine) * hip.HANDLE_BYTES

    def unmapped(self) -> bool:
        """Whether all ranks have let go."""
        return self._host is None or all(part[self._flag] for part in self._host.maps)

    def free(self) -> None:
        """Give the memory back; nobody may map it any more."""
        while self.mine:
            hip.free(self.mine.pop())
        if self._host is not None:
            self._host.close()


class HipMemory(Symmetric):
    """One allocation per rank.

    Attributes:
        addresses: those of all ranks, mapped here.
        words: the signals of the slot that lies in it, if one does.
    """

    words: Shared | None = None

    def __init__(self, engine: HipEngine, nbytes: int, serial: int) -> None:
        self.serial, self.nbytes = serial, nbytes
        self._shared = Shared(engine, [nbytes], f"hip allocation {serial}")
        self.addresses = [self._shared.mine[0]] * engine.world
        self.tensor, keeper = engine.work.tensor(self._shared.mine[0], nbytes)
        #: Alive for as long as any tensor looks into the memory.
        self._keeper: weakref.ref[Any] = weakref.ref(keeper)

    def map(self) -> None:
        """Map the peers' allocations."""
        self.addresses = [self._shared.address(rank, 0) for rank in range(len(self.addresses))]

    def let_go(self) -> None:
        """Drop what this rank holds of it; tensors of the caller's keep it."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._shared.let_go()
        if self.words is not None:
            self.words.let_go()

    def freeable(self) -> bool:
        """Whether nobody uses it any more, here or at a peer."""
        words = self.words is None or self.words.unmapped()
        return words and self._keeper() is None and self._shared.unmapped()

    def release(self) -> None:
        """Give it back."""
        self._shared.free()
        if self.words is not None:
            self.words.free()
