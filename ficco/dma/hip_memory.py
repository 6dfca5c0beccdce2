"""Memory of a GPU that the ranks of a group share through HIP's handles."""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ficco.dma import hip_api as hip
from ficco.dma.host import HostMemory
from ficco.dma.rendezvous import symmetric
from ficco.dma.streams import Mapped
from ficco.errors import BackendError

if TYPE_CHECKING:
    from ficco.dma.hip import HipEngine


#: Distance of words that lie in one allocation, in bytes.
WORD_STRIDE = 64


class Meeting:
    """Where the ranks of a group tell each other little things. Collective throughout."""

    ROOM = 512

    def __init__(self, engine: HipEngine, purpose: str) -> None:
        self._timeout_s, self._rank, self._used = engine.timeout_s, engine.rank, 0
        self._host = HostMemory(
            engine.group,
            self.ROOM,
            engine.timeout_s,
            purpose,
            engine.operator,
            interrupt=lambda: engine.interrupt(),
        )

    def gather(self, data: bytes) -> list[bytes]:
        """``data`` of every rank, by rank; equally long on all."""
        first, self._used = self._used, self._used + len(data)
        assert self._used <= self.ROOM
        self._host.maps[self._rank][first : self._used] = data
        self._host.barrier(self._timeout_s)
        return [bytes(part[first : self._used]) for part in self._host.maps]

    def close(self) -> None:
        self._host.close()


class Shared:
    """Allocations of this rank that its peers can map, and theirs. Making them is collective.

    A rank must not free what a peer still maps. Each therefore says in host memory when it has let
    go of what its peers own.
    """

    def __init__(
        self, engine: HipEngine, allocate: Callable[[], int], count: int, nbytes: int, purpose: str
    ) -> None:
        """``count`` allocations of ``nbytes`` each, zeroed."""
        self.mine: list[int] = []
        self._open: dict[tuple[int, int], int] = {}
        self._rank = engine.rank
        self._flag = count * hip.HANDLE_BYTES  # where a rank says that it has let go
        self._host: HostMemory | None = None
        try:
            for _ in range(count):
                self.mine.append(allocate())
            for address in self.mine:
                hip.fill(address, nbytes, engine.side)
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
            with contextlib.suppress(BackendError):  # the first error tells more
                engine.settle(engine.side)
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
        for key, address in list(self._open.items()):
            hip.close_shared(address)
            del self._open[key]
        if self._host is not None:
            self._host.maps[self._rank][self._flag] = 1

    def unmapped(self) -> bool:
        """Whether all ranks have let go."""
        return self._host is None or all(part[self._flag] for part in self._host.maps)

    def free(self) -> None:
        """Give the memory back; nobody may map it any more."""
        while self.mine:
            hip.free(self.mine[-1])
            self.mine.pop()
        if self._host is not None:
            self._host.close()


class Words:
    """The signal words of a slot, on every rank, at rest."""

    def __init__(self, engine: HipEngine, way: str, count: int, serial: int) -> None:
        purpose = f"hip signals {serial}"
        self.count = count
        self._single = way == "signal"
        if self._single:
            self._shared = Shared(engine, hip.malloc_signal, count, hip.SIGNAL_BYTES, purpose)
        else:
            nbytes = max(count, 1) * WORD_STRIDE
            self._shared = Shared(engine, lambda: hip.malloc_uncached(nbytes), 1, nbytes, purpose)
        self.let_go, self.unmapped = self._shared.let_go, self._shared.unmapped
        self.free = self._shared.free

    def address(self, rank: int, word: int) -> int:
        """Where a word of a rank is mapped here."""
        if self._single:
            return self._shared.address(rank, word)
        return self._shared.address(rank, 0) + word * WORD_STRIDE


class HipMemory(Mapped):
    """Symmetric memory of the HIP engine.

    Attributes:
        words: the signals of the slot that lies in it, if one does.
    """

    words: Words | None = None

    @abstractmethod
    def map(self) -> None:
        """Map the peers' parts."""

    def let_go(self) -> None:
        """Drop what this rank holds of it; tensors of the caller's keep it."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if self.words is not None:
            self.words.let_go()

    def freeable(self) -> bool:
        """Whether nobody uses it any more, here or at a peer."""
        return self.words is None or self.words.unmapped()

    def release(self) -> None:
        """Give it back."""
        if self.words is not None:
            self.words.free()


class IpcMemory(HipMemory):
    """One allocation per rank, shared by its handle."""

    def __init__(self, engine: HipEngine, nbytes: int, serial: int) -> None:
        self.serial, self.nbytes = serial, nbytes
        self._shared = Shared(
            engine, lambda: hip.malloc(nbytes), 1, nbytes, f"hip allocation {serial}"
        )
        self.addresses = [self._shared.mine[0]] * engine.world
        self.tensor, keeper = engine.work.tensor(self._shared.mine[0], nbytes)
        #: Alive for as long as any tensor looks into the memory.
        self._keeper: weakref.ref[Any] = weakref.ref(keeper)
        self._peers = engine.work.peers

    def map(self) -> None:
        self.addresses = [self._shared.address(rank, 0) for rank in range(len(self.addresses))]

    def part(self, rank: int) -> torch.Tensor:
        return self._peers(self.addresses[rank], self.nbytes)

    def let_go(self) -> None:
        super().let_go()
        self._shared.let_go()

    def freeable(self) -> bool:
        return super().freeable() and self._keeper() is None and self._shared.unmapped()

    def release(self) -> None:
        self._shared.free()
        super().release()


class TorchMemory(HipMemory):
    """PyTorch's symmetric memory, which PyTorch frees."""

    def __init__(self, engine: HipEngine, nbytes: int, serial: int) -> None:
        self.serial, self.nbytes = serial, nbytes
        self.tensor = symmetric(nbytes, engine.device)
        hip.fill(self.tensor.data_ptr(), nbytes, engine.side)
        engine.settle(engine.side)
        # Every rank has zeroed its part before any rank learns of it.
        self._handle: Any = engine.rendezvous.meet(
            self.tensor, engine.timeout_s, engine.operator, engine.interrupt
        )
        self.addresses = list(self._handle.buffer_ptrs)

    def map(self) -> None:
        pass  # PyTorch has done it

    def part(self, rank: int) -> torch.Tensor:
        found: torch.Tensor = self._handle.get_buffer(rank, (self.nbytes,), torch.uint8)
        return found

    def let_go(self) -> None:
        super().let_go()
        self._handle = None


#: Where buffers come from, the best first.
MEMORIES: dict[str, type[IpcMemory] | type[TorchMemory]] = {"ipc": IpcMemory, "torch": TorchMemory}
