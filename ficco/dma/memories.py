"""Memory of GPUs that the ranks of a group share, and the signal words in it."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ficco.compute.program import Symmetric
from ficco.dma.driver import WORD, StreamEngine
from ficco.dma.gate import GATE
from ficco.dma.host import Meeting
from ficco.dma.rendezvous import Rendezvous, symmetric
from ficco.errors import BackendError

#: Sizes of memory that is shared by handles are multiples of these bytes, of the second if they
#: are larger: handles of more than 2 MiB were refused where they were no multiple of it (ROCm 4).
PAGE, LARGE = 4096, 1 << 21
#: Distance of words that lie in one allocation of their own, in bytes.
WORD_STRIDE = 64
#: Words after the signals of a slot: a 0 and a 1 to copy from, one that nobody reads, and one for
#: each of so many lanes, where the blocks of a launch of copies are counted.
CONSTANTS, COUNTED_LANES = 3, 13
SCRATCH = CONSTANTS + COUNTED_LANES
#: Seconds between two looks at whether calls are over.
PAUSE_S = 1e-4


def align(nbytes: int, to: int = 512) -> int:
    """``nbytes``, rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to


#: Allocates symmetric memory of at least so many bytes, with a serial number. Collective.
Allocate = Callable[[int, int], Symmetric]


# PyTorch's.


class TorchMapped(Symmetric):
    """PyTorch's symmetric memory."""

    def __init__(
        self, engine: StreamEngine, rendezvous: Rendezvous, nbytes: int, serial: int
    ) -> None:
        self._engine, self.serial, self.nbytes = engine, serial, (nbytes := align(nbytes))
        self._handle: Any = None
        # Not on the caller's stream, which may be captured, nor in the caller's mode.
        with torch.cuda.stream(engine.side.torch), torch.inference_mode(False):
            self.tensor = symmetric(nbytes, engine.device)
            self.tensor.zero_()
            engine.settle(engine.side.handle)
            # Every rank has zeroed its part before any rank learns of it.
            addresses = [self.tensor.data_ptr()]
            if engine.hosts.near.size() > 1:
                self._handle = rendezvous.meet(self.tensor)
                addresses = list(self._handle.buffer_ptrs)
        self.addresses = engine.hosts.spread(addresses, 0)

    def part(self, rank: int) -> torch.Tensor:
        if rank == self._engine.rank:
            return self.tensor
        place = rank - self._engine.hosts.first
        part: torch.Tensor = self._handle.get_buffer(place, (self.nbytes,), torch.uint8)
        return part

    def free(self) -> None:
        """At a standstill; where there is none, a later ``free`` does it."""
        unwanted.append(self)
        with standstill(self._engine.timeout_s) as stands:
            # Fails where another thread captures a graph of its own, or the device has.
            with contextlib.suppress(RuntimeError):
                if stands:
                    torch.cuda.synchronize(self._engine.device)
                while stands and unwanted:
                    one = unwanted.pop()
                    del one.tensor, one._handle


def torch_memory(engine: StreamEngine) -> Allocate:
    """PyTorch's symmetric memory for one engine. Collective."""
    return partial(TorchMapped, engine, Rendezvous(engine))


#: PyTorch's memory to be freed once no call is in flight.
unwanted: list[TorchMapped] = []
#: The engines of this process that are not closed; changed and gone through at a closed gate.
open_engines: weakref.WeakSet[StreamEngine] = weakref.WeakSet()


@contextlib.contextmanager
def standstill(timeout_s: float) -> Iterator[bool]:
    """Wait until no call of this process is in flight; none begins within the block. Gives False
    where another thread begins one meanwhile, or some do not end in time.

    To free memory is to wait for the device, and PyTorch and hip-python 7.2 keep the interpreter
    meanwhile: a call that is half enqueued would never get further, nor would its peers.
    """
    passed, end = GATE.passed, time.monotonic() + timeout_s
    while True:
        with GATE.closed() as exclusive:
            stands = exclusive and all(engine.quiet() for engine in open_engines)
            if stands or GATE.passed != passed or time.monotonic() >= end:
                yield stands
                return
        time.sleep(PAUSE_S)


# By handles.


class Shared:
    """Allocations of this rank that its peers can map, and theirs. Making them is collective.

    A rank must not free what a peer still maps. Each therefore says in host memory when it has let
    go of what its peers own.
    """

    def __init__(
        self, engine: StreamEngine, kind: str, count: int, nbytes: int, purpose: str
    ) -> None:
        """``count`` allocations of ``nbytes`` each, zeroed."""
        self._graveyard: Graveyard = engine.graveyard
        self.mine: list[int] = []
        self._handles, self._rank, self._hosts = engine.driver.handles, engine.rank, engine.hosts
        self._open: dict[tuple[int, int], int] = {}
        self._meeting: Meeting | None = None
        side = engine.side.handle
        try:
            for _ in range(count):
                self.mine.append(self._handles.malloc(nbytes, kind))
            for address in self.mine:
                self._handles.fill(address, nbytes, side)
            engine.settle(side)
            shared = b"".join(self._handles.share(address) for address in self.mine)
            self._each, self._flag = len(shared) // max(count, 1), len(shared)
            self._meeting = Meeting(engine, purpose, self._flag + 1)  # the flag: it has let go
            self._shared = self._meeting.gather(shared)
        except BaseException:
            self._meeting = None
            with contextlib.suppress(BackendError):  # the first error tells more
                engine.settle(side)
                self.destroy()
            raise
        self._graveyard.living.append(self)

    def mapped(self, rank: int, index: int) -> int:
        """Where an allocation of a rank is mapped here; a peer's is mapped when first asked for."""
        if rank == self._rank:
            return self.mine[index]
        if (rank, index) not in self._open:
            shared = self._shared[rank - self._hosts.first]
            handle = shared[index * self._each :][: self._each]
            self._open[rank, index] = self._handles.open_shared(handle)
        return self._open[rank, index]

    def free(self) -> None:
        """Once peers let go of it, too."""
        self._graveyard.dead.append(self)

    def let_go(self) -> None:
        """Unmap what is the peers', and tell them."""
        for key, address in list(self._open.items()):
            self._handles.close_shared(address)
            del self._open[key]
        if self._meeting is not None:
            self._meeting.maps[self._meeting.rank][self._flag] = 1

    def awaited(self) -> bool:
        """Whether peers have to let go of it, too: closing waits for them."""
        return True

    def freeable(self) -> bool:
        """Whether all ranks have let go."""
        return self._meeting is None or all(part[self._flag] for part in self._meeting.maps)

    def destroy(self) -> None:
        """Give the memory back; nobody may map it any more."""
        while self.mine:
            self._handles.free(self.mine[-1])
            self.mine.pop()
        if self._meeting is not None:
            self._meeting.close()


class SharedMapped(Shared, Symmetric):
    """One allocation per rank, shared by its handle."""

    #: Gives what lives for as long as any tensor looks into the memory.
    _keeper: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(self, engine: StreamEngine, nbytes: int, serial: int) -> None:
        self._driver = engine.driver
        nbytes = max(align(nbytes, PAGE if nbytes <= LARGE else LARGE), PAGE)
        self.serial, self.nbytes = serial, nbytes
        super().__init__(engine, "plain", 1, nbytes, f"{engine.name} allocation {serial}")
        self.tensor, keeper = self._driver.tensor(self.mine[0], nbytes)
        self._keeper = weakref.ref(keeper)
        mapped = [self.mapped(rank, 0) for rank in engine.hosts.here]
        self.addresses = engine.hosts.spread(mapped, 0)  # none of the ranks of other hosts

    def part(self, rank: int) -> torch.Tensor:
        return self._driver.peers(self.addresses[rank], self.nbytes)

    def let_go(self) -> None:
        """Drop what this rank holds of it; tensors of the caller's keep it."""
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        super().let_go()

    def awaited(self) -> bool:
        """As above, unless the caller still has a tensor of it once this rank has let go."""
        return self._keeper() is None or self.tensor.numel() > 0

    def freeable(self) -> bool:
        """Whether nobody uses it any more, here or at a peer."""
        return self._keeper() is None and super().freeable()


#: Where buffers come from, by name: the vendor's allocations, which are shared by handles, or
#: PyTorch's.
MEMORIES: dict[str, Callable[[StreamEngine], Allocate]] = {
    "ipc": lambda engine: partial(SharedMapped, engine),
    "torch": torch_memory,
}


class Graveyard:
    """What is freed once no peer maps it any more, and no tensor looks into it."""

    def __init__(self) -> None:
        self.living: list[Any] = []  # all that is not freed
        self.dead: list[Any] = []  # of these, what this rank wants to free

    def sweep(self, timeout_s: float = 0.0) -> None:
        """Free what is no longer used, here or by peers, at a standstill."""
        if self.dead or _left:
            with standstill(timeout_s) as stands:
                if stands:
                    self._sweep()

    def _sweep(self) -> None:
        for one in list(self.dead):
            one.let_go()
            if one.freeable():
                one.destroy()
                self.dead.remove(one)
                self.living.remove(one)
        for _ in range(len(_left)):
            # Another thread sweeps, too; whoever closed the group has been told what fails.
            with contextlib.suppress(IndexError, BackendError):
                one = _left.popleft()
                if one.freeable():
                    one.destroy()
                else:
                    _left.append(one)

    def leave(self) -> None:
        """Leave what is not freed yet to later engines of the process."""
        _left.extend(self.dead)


#: What a peer, or a tensor of the caller's, used for longer than closing waits.
_left: deque[Any] = deque()


# Signal words.


class SlotWords:
    """The signal words of a slot, on every rank, at rest. They lie in the slot's own memory, in
    front of the data.

    Attributes:
        count: how many.
        own: addresses of this rank's, as far as they are one range.
        nobodys: address of a word of this rank that nobody reads.
    """

    def __init__(self, memory: Symmetric, count: int, rank: int) -> None:
        self.count, self._addresses = count, memory.addresses
        first = memory.addresses[rank]
        self.own = range(first, first + count * WORD)
        self.nobodys = self.constant(2)

    def address(self, rank: int, word: int) -> int:
        """Where a word of a rank is mapped here; after the last one, a word to try writes on."""
        return self._addresses[rank] + (word if word < self.count else word + 2) * WORD

    def constant(self, value: int) -> int:
        """Address of a word of this rank that is 0 or 1."""
        return self.own.stop + value * WORD

    def counter(self, lane: int) -> int:
        """Address of the word where blocks of a lane's launches are counted; 0 if there is none."""
        return self.constant(CONSTANTS + lane) if lane < COUNTED_LANES else 0

    def runs(self, rank: int) -> Sequence[tuple[int, int]]:
        """Address and number of those that lie together."""
        return [(self._addresses[rank], self.count)]


class OwnWords(Shared):
    """As :class:`SlotWords`, in allocations of their own: one of the kind ``"signal"`` for each,
    since such memory comes by a word, or one for all."""

    own = range(0)

    def __init__(
        self, engine: StreamEngine, kind: str, count: int, serial: int, constants: int
    ) -> None:
        self.count, self._constants = count, constants
        self.nobodys = self.constant(2)
        self._single = kind == "signal"
        each = count, engine.driver.word_bytes
        one = 1, max(count, 1) * WORD_STRIDE
        purpose = f"{engine.name} signals {serial}"
        super().__init__(engine, kind, *(each if self._single else one), purpose)

    def address(self, rank: int, word: int) -> int:
        if self._single:
            return self.mapped(rank, word)
        return self.mapped(rank, 0) + word * WORD_STRIDE

    def constant(self, value: int) -> int:
        return self._constants + value * WORD

    def counter(self, lane: int) -> int:
        return 0

    def runs(self, rank: int) -> Sequence[tuple[int, int]]:
        return [(self.address(rank, word), 1) for word in range(self.count)]


Words = SlotWords | OwnWords
