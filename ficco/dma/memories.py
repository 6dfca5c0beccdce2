"""GPU memory that the ranks of a group share, the signal words in it, and waits for the device.

PyTorch numbers the exchanges of its rendezvous per process, over all groups, and writes them to the
group's store under that number. Ranks that have had different numbers of exchanges, in groups that
not all ranks share, never meet (PyTorch 2.11; pytorch #196082). ficco's groups therefore have a
store that renumbers exchanges. In addition, two threads of a process cannot meet their peers at the
same time.

While a call is recorded as a graph, no thread may wait for the whole device: the wait fails, and
the recording may fail, too (CUDA Programming Guide, "Prohibited and Unhandled Operations").
PyTorch waits for the device to free symmetric memory, and holds the interpreter lock meanwhile. No
call of another thread may then be half enqueued, or in flight: its peers may wait for the rest.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)

from ficco.compute.program import Symmetric
from ficco.dma.driver import WORD, StreamEngine, drained
from ficco.dma.engine import Engine
from ficco.dma.host import HostMemory, Meeting, store_of
from ficco.dma.patience import Patience
from ficco.errors import MEETING, BackendError, SignalTimeout, carry_out

_lock = threading.Lock()
_names = itertools.count()  # for names of groups, unique within a process


class Renumbered(dist.Store):
    """A store in which the exchanges of a rendezvous are numbered from 0.

    PyTorch's key of an exchange is ``name/number/rank``.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store: Any = store
        self._meeting, self._numbers = "", dict[str, int]()

    def begin(self, meeting: str) -> None:
        """Begin to number the exchanges of a rendezvous, whose name is unique in the store."""
        self._meeting, self._numbers = meeting, {}

    def _key(self, key: str) -> str:
        name, number, rank = key.rsplit("/", 2)
        place = self._numbers.setdefault(number, len(self._numbers))
        return f"{name}/{self._meeting}/{place}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(self._key(key))
        return value

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)


class Rendezvous:
    """Rendezvous of an engine's ranks on one host, to share symmetric memory. The constructor is
    collective."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._meeting = engine, 0
        near = engine.hosts.near
        self._store = Renumbered(dist.PrefixStore("ficco/rendezvous", store_of(near)))
        group: Any = f"ficco {next(_names)}"  # newer releases have a type for names
        self._group = group
        # The registry does not keep the group alive.
        self._near = dist.ProcessGroup(self._store, near.rank(), near.size())
        _register_process_group(group, self._near)
        weakref.finalize(self, _unregister_process_group, group).atexit = False
        # For each rank the number of its rendezvous and a token: 64-bit words, written atomically.
        host = HostMemory(near, 16, engine.timeout_s, "symmetric memory")
        self._words = [np.frombuffer(part, np.int64, 2) for part in host.maps]
        self._words[near.rank()][1] = secrets.randbits(62)

    def meet(self, tensor: torch.Tensor) -> Any:
        """PyTorch's handle of the symmetric memory of all ranks' tensors. Collective.

        Raises:
            SignalTimeout: a rank is absent.
        """
        engine, self._meeting = self._engine, self._meeting + 1
        patience, limit = Patience(), engine.timeout_s
        me, count = engine.hosts.near.rank(), engine.hosts.near.size()

        def absent(seconds: float) -> SignalTimeout:
            """Ranks arrive in order, so that all wait for the first one that is absent."""
            missing = [place for place, words in enumerate(self._words) if words[0] < self._meeting]
            return SignalTimeout(
                operator=engine.operator,
                rank=engine.rank,
                peer=engine.hosts.here[missing[0]] if missing and missing[0] != me else None,
                step=f"share symmetric memory, allocation {self._meeting}",
                schedule=MEETING,
                seconds=seconds,
            )

        def wait_for(place: int) -> None:
            def here() -> bool:
                return int(self._words[place][0]) >= self._meeting

            def interrupt() -> None:
                engine.interrupt()
                if late := patience.ends(limit, absent):
                    raise late

            drained(here, math.inf, interrupt)

        # Every rank holds its process's lock during the rendezvous. The ranks of every group take
        # the lock in rank order, so that no two groups deadlock.
        if me:
            wait_for(me - 1)
        remaining = max(0.0, limit - patience.seconds)
        if not _lock.acquire(timeout=min(remaining, threading.TIMEOUT_MAX)):
            raise absent(patience.seconds)
        try:
            self._words[me][0] = self._meeting
            wait_for(count - 1)
            self._store.begin(f"{self._words[0][1]:x}/{self._meeting}")
            return _SymmetricMemory.rendezvous(tensor, self._group)
        finally:
            _lock.release()


class Gate:
    """Excludes graph recordings while a thread of the process waits for the whole device.

    ``with gate:`` surrounds the code that enqueues a call. A call waits here only while the gate is
    closed, not for other calls, recordings or device-wide waits.

    Attributes:
        passed: changes whenever a call enters.
        inside: an entry for each call within the gate. Calls take no lock, which costs host time:
            a call first adds an entry and then looks whether the gate is shut, while
            :meth:`closed` first shuts the gate and then looks for entries.
        shut: how many blocks of :meth:`closed` are open.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler or a finalizer may take it in the thread that holds it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._recordings = self._waiting = 0
        self.passed = self.shut = 0
        self.inside: list[None] = []

    def __enter__(self) -> None:
        self.inside.append(None)
        try:
            if self.shut:
                self.wait()
            self.passed += 1
        except BaseException:
            self.inside.pop()
            raise

    def __exit__(self, *_: object) -> None:
        self.inside.pop()

    def wait(self) -> None:
        """Wait until a gate that is shut is open. Its entry keeps the call inside meanwhile."""
        with self._lock:
            pass

    @contextmanager
    def recording(self) -> Iterator[bool]:
        """Record a call within this block; yields False if a recording is not allowed now."""
        with self._changed:
            allowed = not self._waiting
            self._recordings += allowed
        try:
            yield allowed
        finally:
            with self._changed:
                self._recordings -= allowed
                self._changed.notify_all()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for recordings to end and exclude new ones, to wait for the device in the block."""
        with self._changed:
            self._waiting += 1
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._recordings)
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    @contextmanager
    def closed(self) -> Iterator[bool]:
        """Let no call begin within this block; yields whether no call is half enqueued."""
        with self._changed:
            self.shut += 1
            try:
                yield not self.inside
            finally:
                self.shut -= 1


#: The gate of this process.
GATE = Gate()


#: Sizes of memory shared by handles are multiples of PAGE bytes; of LARGE bytes if they exceed
#: LARGE. ROCm 4 refused handles of more than 2 MiB whose size was no multiple of 2 MiB.
PAGE, LARGE = 4096, 1 << 21
#: Bytes between the words of a separate allocation.
WORD_STRIDE = 64
#: Words after the signals of a slot: a 0 and a 1 to copy from, a word that is never read, and for
#: each of the first COUNTED_LANES lanes a word that counts the blocks of its launches.
CONSTANTS, COUNTED_LANES = 3, 13
SCRATCH = CONSTANTS + COUNTED_LANES
#: Seconds between two checks for calls in flight.
PAUSE_S = 1e-4


def align(nbytes: int, to: int = 512) -> int:
    """``nbytes``, rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to


#: Allocates symmetric memory of at least the given bytes, with a serial number. Collective.
Allocate = Callable[[int, int], Symmetric]


# PyTorch's symmetric memory.


class TorchMapped(Symmetric):
    """PyTorch's symmetric memory."""

    def __init__(
        self, engine: StreamEngine, rendezvous: Rendezvous, nbytes: int, serial: int
    ) -> None:
        self._engine, self.serial, self.nbytes = engine, serial, (nbytes := align(nbytes))
        self._handle: Any = None
        # Not on the caller's stream, which may be captured, nor in the caller's inference mode.
        with torch.cuda.stream(engine.side.torch), torch.inference_mode(False):
            # PyTorch's Python function would import sympy, which takes more than a second.
            shape = (nbytes,), (1,)
            self.tensor = _SymmetricMemory.empty_strided_p2p(*shape, torch.uint8, engine.device)
            self.tensor.zero_()
            engine.settle(engine.side.handle)
            # Every rank zeroes its part before it publishes the part to its peers.
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
        """Free the memory at a standstill. Without one, a later ``free`` frees it."""
        unwanted.append(self)
        with standstill(self._engine.timeout_s) as stands:
            # Fails if another thread captures a graph, or if the device has failed.
            with contextlib.suppress(RuntimeError):
                if stands:
                    torch.cuda.synchronize(self._engine.device)
                while stands and unwanted:
                    memory = unwanted.pop()
                    del memory.tensor, memory._handle


def torch_memory(engine: StreamEngine) -> Allocate:
    """PyTorch's symmetric memory for one engine. Collective."""
    return partial(TorchMapped, engine, Rendezvous(engine))


#: PyTorch's memory to be freed once no call is in flight.
unwanted: list[TorchMapped] = []
#: The open engines of this process. Modified and iterated only while the gate is closed.
open_engines: weakref.WeakSet[StreamEngine] = weakref.WeakSet()


@contextlib.contextmanager
def standstill(timeout_s: float) -> Iterator[bool]:
    """Wait until no call of this process is in flight, and let no call begin within the block.

    Yields False if another thread begins a call meanwhile, or if calls do not end in time. Freeing
    memory, and on AMD unmapping that of a peer, waits for the device while PyTorch and hip-python
    7.2 hold the interpreter lock: a call that is half enqueued would never proceed, nor would its
    peers.
    """
    passed, end = GATE.passed, time.monotonic() + timeout_s
    while True:
        with GATE.closed() as exclusive:
            stands = exclusive and all(engine.quiet() for engine in open_engines)
            if stands or GATE.passed != passed or time.monotonic() >= end:
                yield stands
                return
        time.sleep(PAUSE_S)


# Memory shared by handles.


class Shared:
    """Allocations of all ranks, which can be mapped by peers. The constructor is collective.

    A rank must not free memory that a peer still maps. Each rank therefore sets a flag in host
    memory once it has unmapped the allocations of its peers.
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
            self._handle_bytes, self._flag_offset = len(shared) // max(count, 1), len(shared)
            self._meeting = Meeting(
                engine, purpose, self._flag_offset + 1
            )  # the flag: all is unmapped
            self._shared = self._meeting.gather(shared)
        except BaseException:
            if self._meeting is not None:  # peers may have the handles
                self._graveyard.living.append(self)
                self.free()
                raise
            with contextlib.suppress(BackendError):  # raise the first error
                free_unshared(partial(self._handles.free, address) for address in self.mine)
            raise
        self._graveyard.living.append(self)

    def mapped(self, rank: int, index: int) -> int:
        """Address in this process of an allocation of a rank of this host, mapped at first use."""
        if rank == self._rank:
            return self.mine[index]
        if (rank, index) not in self._open:
            shared = self._shared[rank - self._hosts.first]
            handle = shared[index * self._handle_bytes :][: self._handle_bytes]
            self._open[rank, index] = self._handles.open_shared(handle)
        return self._open[rank, index]

    def free(self) -> None:
        """Free the allocations once all ranks have unmapped them."""
        self._graveyard.dead.append(self)

    def let_go(self) -> None:
        """Unmap the allocations of peers, and set the flag."""
        for key, address in list(self._open.items()):
            self._handles.close_shared(address)
            del self._open[key]
        if self._meeting is not None:
            self._meeting.maps[self._meeting.rank][self._flag_offset] = 1

    def awaited(self) -> bool:
        """Whether closing has to wait for peers to unmap the memory."""
        return True

    def freeable(self) -> bool:
        """Whether all ranks have unmapped the allocations of their peers."""
        return self._meeting is None or all(part[self._flag_offset] for part in self._meeting.maps)

    def destroy(self) -> None:
        """Free the memory; no process may still map it."""
        while self.mine:
            self._handles.free(self.mine[-1])
            self.mine.pop()
        if self._meeting is not None:
            self._meeting.close()


class SharedMapped(Shared, Symmetric):
    """One allocation per rank, shared by its handle."""

    #: A weak reference to an object that lives as long as any tensor of the memory.
    _keeper: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(self, engine: StreamEngine, nbytes: int, serial: int) -> None:
        self._driver = engine.driver
        nbytes = max(align(nbytes, PAGE if nbytes <= LARGE else LARGE), PAGE)
        self.serial, self.nbytes = serial, nbytes
        super().__init__(engine, "plain", 1, nbytes, f"{engine.name} allocation {serial}")
        self.tensor, keeper = self._driver.tensor(self.mine[0], nbytes)
        self._keeper = weakref.ref(keeper)
        mapped = [self.mapped(rank, 0) for rank in engine.hosts.here]
        self.addresses = engine.hosts.spread(mapped, 0)  # 0 for ranks of other hosts

    def part(self, rank: int) -> torch.Tensor:
        return self._driver.peers(self.addresses[rank], self.nbytes)

    def let_go(self) -> None:
        """Drop this rank's tensor and mappings. Tensors of the caller keep the memory."""
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        super().let_go()

    def awaited(self) -> bool:
        """As above, but False while only a tensor of the caller keeps the memory."""
        return self._keeper() is None or self.tensor.numel() > 0

    def freeable(self) -> bool:
        """Whether neither a tensor of this process nor a peer uses the memory."""
        return self._keeper() is None and super().freeable()


#: Allocators of symmetric memory: the vendor's allocations, shared by handles, and PyTorch's.
MEMORIES: dict[str, Callable[[StreamEngine], Allocate]] = {
    "ipc": lambda engine: partial(SharedMapped, engine),
    "torch": torch_memory,
}


class Graveyard:
    """Memory to be freed once no peer maps it and no tensor uses it."""

    def __init__(self) -> None:
        self.living: list[Any] = []  # all memory that is not freed
        self.dead: list[Any] = []  # the memory of ``living`` that this rank wants to free

    def sweep(self, timeout_s: float = 0.0) -> None:
        """Free memory that neither this rank nor a peer uses, at a standstill."""
        if self.dead or _leftovers or _frees:
            with standstill(timeout_s) as stands:
                if stands:
                    self._sweep()
                    free_unshared([])

    def _sweep(self) -> None:
        for memory in list(self.dead):
            memory.let_go()
            if memory.freeable():
                memory.destroy()
                self.dead.remove(memory)
                self.living.remove(memory)
        for _ in range(len(_leftovers)):
            # Another thread may sweep, too. Errors were reported when the group was closed.
            with contextlib.suppress(IndexError, BackendError):
                memory = _leftovers.popleft()
                memory.let_go()
                if memory.freeable():
                    memory.destroy()
                else:
                    _leftovers.append(memory)

    def leave(self) -> None:
        """Leave memory that is not freed yet to later engines of the process."""
        _leftovers.extend(self.dead)


#: Memory that closing could not free in time: a peer, a tensor of the caller or a call used it.
_leftovers: deque[Any] = deque()
#: The calls that free memory that no peer maps, and unload code, of closed engines.
_frees: deque[Callable[[], Any]] = deque()


def free_unshared(frees: Iterable[Callable[[], Any]]) -> None:
    """Run calls that free memory that no peer maps, at a standstill. Without one, a later engine
    runs them."""
    _frees.extend(frees)
    with standstill(0.0) as stands:
        if stands:
            carry_out(_frees.popleft() for _ in range(len(_frees)))


# Signal words.


class SlotWords:
    """The signal words of a slot on every rank, in the slot's memory, before the data.

    Attributes:
        count: number of words of each rank.
        own: addresses of this rank's words; empty if they are not one range.
        nobodys: address of a word of this rank that is never read.
    """

    def __init__(self, memory: Symmetric, count: int, rank: int) -> None:
        self.count, self._addresses = count, memory.addresses
        first = memory.addresses[rank]
        self.own = range(first, first + count * WORD)
        self.nobodys = self.constant(2)

    def address(self, rank: int, word: int) -> int:
        """Address of a rank's word in this process; index ``count`` is a word for test writes."""
        return self._addresses[rank] + (word if word < self.count else word + 2) * WORD

    def constant(self, value: int) -> int:
        """Address of a word of this rank that is 0 or 1."""
        return self.own.stop + value * WORD

    def counter(self, lane: int) -> int:
        """Address of the word that counts blocks of a lane's launches; 0 if it has no such word."""
        return self.constant(CONSTANTS + lane) if lane < COUNTED_LANES else 0

    def runs(self, rank: int) -> Sequence[tuple[int, int]]:
        """Address and number of words of each contiguous range."""
        return [(self._addresses[rank], self.count)]


class OwnWords(Shared):
    """As :class:`SlotWords`, in separate allocations: one for each word if they are of the kind
    ``"signal"``, whose allocations hold a single word; else one for all words."""

    own = range(0)

    def __init__(
        self, engine: StreamEngine, kind: str, count: int, serial: int, constants: int
    ) -> None:
        self.count, self._constants = count, constants
        self.nobodys = self.constant(2)
        self._separate = kind == "signal"
        separate = count, engine.driver.word_bytes
        joint = 1, max(count, 1) * WORD_STRIDE
        purpose = f"{engine.name} signals {serial}"
        super().__init__(engine, kind, *(separate if self._separate else joint), purpose)

    def address(self, rank: int, word: int) -> int:
        if self._separate:
            return self.mapped(rank, word)
        return self.mapped(rank, 0) + word * WORD_STRIDE

    def constant(self, value: int) -> int:
        return self._constants + value * WORD

    def counter(self, lane: int) -> int:
        return 0

    def runs(self, rank: int) -> Sequence[tuple[int, int]]:
        return [(self.address(rank, word), 1) for word in range(self.count)]


Words = SlotWords | OwnWords
