"""Hosts of a group, and host memory that the ranks of a host share, with semaphores in it.

Every rank creates an anonymous file (a memfd) and maps the files of its peers. A memfd has no name
in any file system: it is freed with the last process that maps it, however that process ends, and
the size of /dev/shm does not limit it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from ficco.dma.patience import Patience
from ficco.errors import MEETING, BackendError, RankMismatch, SignalTimeout

#: Bytes from one semaphore to the next: a cache line. A sem_t takes 32 bytes on 64-bit Linux.
SEMAPHORE_STRIDE = 64
#: Seconds in which a rank that failed can report why, before its peers report its memory as gone.
REPORT_S = 0.3

_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


class Group(Protocol):
    """Ranks that meet: a process group, or the ranks of a host."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


class Semaphores:
    """POSIX semaphores by address, in memory that processes share.

    POSIX.1-2017, XBD 4.12 'Memory Synchronization', lists sem_post, sem_wait, sem_timedwait and
    sem_trywait among the functions that synchronize memory: writes of a rank before a post are
    visible after the wait that the post ends, also to other processes and on weakly ordered
    processors (Arm). sem_clockwait does the same (POSIX.1-2024, XBD 4.15.2).

    Calls go through ctypes, which releases the interpreter lock around them.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)

        def function(name: str, *arguments: Any) -> Any:
            function = getattr(libc, name)
            function.argtypes = [ctypes.c_void_p, *arguments]
            return function

        self._init = function("sem_init", ctypes.c_int, ctypes.c_uint)
        self._post = function("sem_post")
        #: Decrements the semaphore at an address without waiting; returns 0 on success.
        self.try_wait = function("sem_trywait")
        self._getvalue = function("sem_getvalue", ctypes.POINTER(ctypes.c_int))
        timespec = ctypes.POINTER(_Timespec)
        # sem_timedwait uses the wall clock, which can be set back. glibc offers sem_clockwait, with
        # a monotonic clock, since 2.30; other C libraries may not.
        try:
            self._clockwait = function("sem_clockwait", ctypes.c_int, timespec)
        except AttributeError:
            self._clockwait = None
            self._timedwait = function("sem_timedwait", timespec)

    def init(self, address: int, value: int) -> None:
        """Initialize a semaphore that no rank uses yet."""
        if self._init(address, 1, value):
            raise _failure("sem_init")

    def post(self, address: int) -> None:
        if self._post(address):
            raise _failure("sem_post")

    def wait(self, address: int, seconds: float) -> bool:
        """Decrement; False after a timeout, or earlier if a Unix signal interrupts the wait."""
        if self._clockwait is not None:
            code = self._clockwait(address, _CLOCK_MONOTONIC, _timespec(time.monotonic() + seconds))
        else:
            code = self._timedwait(address, _timespec(time.time() + seconds))
        if code and ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise _failure("sem_timedwait")
        return bool(code == 0)

    def value(self, address: int) -> int:
        value = ctypes.c_int()
        if self._getvalue(address, value):
            raise _failure("sem_getvalue")
        return value.value


@cache
def semaphores() -> Semaphores:
    """The C library's semaphores, looked up once."""
    return Semaphores()


def _timespec(seconds: float) -> _Timespec:
    return _Timespec(int(seconds), int(seconds % 1 * 1e9))


def _failure(call: str) -> BackendError:
    code = ctypes.get_errno()
    return BackendError(call, errno.errorcode.get(code, str(code)), os.strerror(code))


class HostMemory:
    """Memory of the same size on every rank of a group on one machine, mapped by all of them.

    The constructor is collective and returns once every rank has mapped all parts.

    Attributes:
        maps: the parts, by rank; empty once closed.
        nbytes: usable bytes of each part, initially zero.
        pids: process id of each rank.
    """

    def __init__(
        self,
        group: Group,
        nbytes: int,
        timeout_s: float,
        purpose: str,
        operator: str = "ficco",
        interrupt: Callable[[], None] | None = None,
        begins: bool = False,
    ) -> None:
        """Allocate and map. ``interrupt`` is called while a rank waits, here and in barriers, and
        may raise. ``begins``: the memory belongs to the first call of the group.

        Raises:
            SignalTimeout: a rank did not arrive within ``timeout_s``; names the ``purpose``.
            RankMismatch: the ranks request different sizes.
            NotImplementedError: the ranks cannot share memory, or this is not Linux.
        """
        if not hasattr(os, "memfd_create"):
            raise NotImplementedError(
                f"ranks share host memory through memfd_create, which Linux has and "
                f"{sys.platform} does not"
            )
        self.nbytes = nbytes
        self.rank, self.world = group.rank(), group.size()
        self.purpose, self.operator = purpose, operator
        step = f"share host memory for {purpose}"
        self._step = first_call(step) if begins else step
        self._interrupt = interrupt or (lambda: None)
        self.maps: list[mmap.mmap] = []
        self.pids: list[int] = []
        deadline = time.monotonic() + timeout_s
        fd = os.memfd_create(f"ficco {purpose}")
        try:
            os.ftruncate(fd, self._total(nbytes))
            mine = _map(fd, self._total(nbytes))
            for gate in self._gates(mine):
                semaphores().init(gate, 0)
            hellos = meet(
                group, self._hello(fd), purpose, timeout_s, self._timeout, self._interrupt
            )
            require_shareable(dict(enumerate(hellos)))
            self.maps = [
                mine if rank == self.rank else self._open(rank, hello, hellos[self.rank]["host"])
                for rank, hello in enumerate(hellos)
            ]
            self.pids = [hello["pid"] for hello in hellos]
            # A rank that arrived at the last moment still needs time to map.
            self.barrier(max(deadline - time.monotonic(), 1.0))
            sizes = [f"{hello['nbytes']} bytes of memory for {purpose}" for hello in hellos]
            if len(set(sizes)) > 1:
                raise RankMismatch(dict(enumerate(sizes)))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(fd)  # after the barrier, since peers open it through this descriptor

    def address(self, rank: int) -> int:
        """The address of a rank's part in this process."""
        return _address(self.maps[rank])

    def barrier(self, timeout_s: float) -> None:
        """Wait for every rank. Writes of a rank before the barrier are visible after it."""
        gates = [self._gates(part)[self.rank] for part in self.maps]
        for rank, gate in enumerate(gates):
            if rank != self.rank:
                semaphores().post(gate)
        patience, absent = Patience(), []
        for rank, gate in enumerate(self._gates(self.maps[self.rank])):
            arrived = rank == self.rank or not semaphores().try_wait(gate)
            while not arrived and not patience.ends(timeout_s, partial(self._timeout, [rank])):
                self._interrupt()
                ended = dead(self.pids[rank])
                arrived = semaphores().wait(gate, 0.02)  # in slices, for Ctrl-C
                if ended and not arrived:
                    raise self._timeout([rank], patience.seconds, ended)
            if not arrived:
                absent.append(rank)
        if absent:
            raise self._timeout(absent, patience.seconds)

    def close(self) -> None:
        """Drop the maps. Tensors that are views of them keep them mapped.

        A map is never closed explicitly: torch.frombuffer references the map but does not lock its
        buffer, so that closing it would unmap the memory of a live tensor.
        """
        self.maps.clear()

    def _total(self, nbytes: int) -> int:
        """The size of a part: the data, then one semaphore per rank, for barriers."""
        return (-(-nbytes // SEMAPHORE_STRIDE) + self.world) * SEMAPHORE_STRIDE

    def _gates(self, part: mmap.mmap) -> list[int]:
        """Addresses of a part's barrier semaphores, one for each rank that arrives."""
        end = _address(part) + len(part)
        return [end - (rank + 1) * SEMAPHORE_STRIDE for rank in range(self.world)]

    def _timeout(
        self, absent: list[int] | None, seconds: float, ended: bool = False
    ) -> SignalTimeout:
        return SignalTimeout(
            operator=self.operator,
            rank=self.rank,
            peer=absent[0] if absent else None,
            step=f"{self._step}{absentees(absent)}",
            schedule=MEETING,
            seconds=seconds,
            ended=ended,
        )

    def _hello(self, fd: int) -> dict[str, Any]:
        """The facts that peers need to map this rank's part."""
        return {**whereabouts(), "fd": fd, "file": _file(fd), "nbytes": self.nbytes}

    def _open(self, rank: int, hello: dict[str, Any], here: str) -> mmap.mmap:
        path = f"/proc/{hello['pid']}/fd/{hello['fd']}"
        ended = f"rank {rank} has just ended or given up"
        if hello["host"] != here:
            pair = " and ".join(sorted((here, hello["host"])))
            ended += f", or {pair} are two machines with one boot id: name a host for each with "
            ended += "FICCO_HOST"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            # Usually the path does not exist. But the descriptor may have been reused for a file
            # that cannot be opened, such as a socket, and only root may inspect a dead process.
            if dead(hello["pid"]) or _file(path) not in (None, hello["file"]):
                code = errno.errorcode.get(error.errno or 0, str(error.errno))
                raise self._gone(code, f"{path}: {ended}") from None
            if isinstance(error, PermissionError):
                raise NotImplementedError(
                    f"{path}: {error.strerror}; ranks share host memory only if one user runs "
                    "them all"
                ) from error
            raise
        try:
            if _file(fd) != hello["file"]:
                raise self._gone("ESTALE", f"{path} is not its memory any more: {ended}")
            return _map(fd, self._total(hello["nbytes"]))
        finally:
            os.close(fd)

    def _gone(self, code: str, why: str) -> BackendError:
        """The error of a peer whose memory is gone; raises the peer's own error if reported."""
        end = time.monotonic() + REPORT_S
        while time.monotonic() < end:
            self._interrupt()
            time.sleep(0.01)
        return BackendError("open", code, why)


def first_call(step: str) -> str:
    """Description in errors of a step of a group's first call, which a rank has not joined."""
    return f"join the first call of this group ({step})"


def absentees(ranks: list[int] | None) -> str:
    """The list of absent ranks for errors, which name the first absent rank elsewhere."""
    if not ranks:
        return "; the rank that hosts the store is gone"
    return f"; ranks {', '.join(map(str, ranks))} are absent" if len(ranks) > 1 else ""


def whereabouts() -> dict[str, Any]:
    """Identification of this process and its host."""
    return {
        "host": socket.gethostname(),
        "boot": _read("/proc/sys/kernel/random/boot_id"),
        "pids": os.stat("/proc/self/ns/pid").st_ino,
        "pid": os.getpid(),
        "token": secrets.token_hex(8),
    }


def require_shareable(facts: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuse ranks of a host that cannot share memory, by their :func:`whereabouts`.

    Raises:
        NotImplementedError: the ranks have different boot ids, or different PID namespaces.
    """
    (lowest, first), *rest = facts.items()
    for rank, fact in rest:
        if fact["boot"] != first["boot"]:
            raise NotImplementedError(
                f"ranks share memory on one host; rank {lowest} is on {first['host']}, rank {rank} "
                f"on {fact['host']}; leave FICCO_HOST out, or let it differ from host to host"
            )
        if fact["pids"] != first["pids"]:
            raise NotImplementedError(
                f"ranks {lowest} and {rank} are on one host in containers that do not see each "
                f"other's processes; run the ranks in one container or with a common PID "
                f"namespace, or name a host for each with FICCO_HOST"
            )


_DESTROYED = (
    "group: required a process group that exists, got one that was destroyed; pass another, and "
    "call ficco.close(group) before dist.destroy_process_group(group)"
)


def store_of(group: Group) -> Store:
    """The store of a group.

    Raises:
        ValueError: the group was destroyed.
    """
    from torch.distributed import distributed_c10d

    owner: Any = group
    try:
        store: Store = getattr(owner, "store", None) or distributed_c10d._get_process_group_store(
            owner
        )
        return store
    except KeyError:
        raise ValueError(_DESTROYED) from None


def backend_of(group: ProcessGroup) -> str:
    """The name of a group's backend.

    Raises:
        ValueError: the group was destroyed.
    """
    try:
        return str(dist.get_backend(group))
    except ValueError:
        raise ValueError(_DESTROYED) from None


def meet(
    group: Group,
    mine: dict[str, Any],
    purpose: str,
    timeout_s: float,
    timeout: Callable[[list[int] | None, float], SignalTimeout],
    interrupt: Callable[[], None],
) -> list[dict[str, Any]]:
    """Exchange hellos, which have a ``token``, through the group's store.

    A store can outlive a group, and its keys are reused. Each rank therefore sends a random token
    and echoes the tokens that it has received: a hello that echoes this rank's token is new. A
    barrier or another wait for all ranks has to follow, so that no rank calls this function again
    before all its peers have left it.

    Args:
        timeout: makes the error from the absent ranks and the seconds of the wait.
    """
    me, patience = group.rank(), Patience()
    hellos: dict[int, dict[str, Any]] = {me: mine}
    absent = [rank for rank in range(group.size()) if rank != me]
    if not absent:
        return [mine]
    from torch.distributed import DistError

    store, key = store_of(group), f"ficco/{purpose}/"
    done, stop = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def exchange() -> None:
        """Fill ``hellos`` until no rank is ``absent``."""
        sent, pause = None, 0.0005
        try:
            while not stop.is_set():
                heard = {str(rank): hello["token"] for rank, hello in hellos.items()}
                if heard != sent:
                    store.set(f"{key}{me}", json.dumps({**mine, "heard": heard}))
                    sent, pause = heard, 0.0005
                if not absent:
                    break
                for rank in list(absent):
                    if store.check([f"{key}{rank}"]):
                        hello = hellos[rank] = json.loads(store.get(f"{key}{rank}"))
                        if hello["heard"].get(str(me)) == mine["token"]:
                            absent.remove(rank)
                if absent:
                    time.sleep(pause)
                    pause = min(pause * 1.5, 0.02)
        except Exception as error:
            errors.append(error)
        done.set()

    # In a thread: if the store's host is stopped, clients block for longer than this timeout.
    threading.Thread(target=exchange, name="ficco meet", daemon=True).start()
    try:
        while not done.wait(0.02):
            interrupt()
            if late := patience.ends(timeout_s, partial(timeout, list(absent))):
                raise late
    finally:
        stop.set()
    for error in errors:
        if not isinstance(error, DistError):
            raise error
        # The rank that hosts the store is gone.
        raise timeout(list(absent) or None, patience.seconds) from error
    return [hellos[rank] for rank in range(group.size())]


class Meeting(HostMemory):
    """Host memory by which the ranks of an engine on one host exchange small messages."""

    def __init__(self, engine: Any, purpose: str, nbytes: int = 512) -> None:
        self._timeout_s, self._used = engine.timeout_s, 0
        arguments = engine.hosts.near, nbytes, engine.timeout_s, purpose, engine.operator
        # If only this rank allocates, the interrupt reports that its call differs from its peers'.
        super().__init__(*arguments, interrupt=lambda: engine.interrupt())

    def gather(self, data: bytes) -> list[bytes]:
        """All-gather ``data``, which has the same length on all ranks. Collective."""
        first, self._used = self._used, self._used + len(data)
        assert self._used <= self.nbytes
        self.maps[self.rank][first : self._used] = data
        self.barrier(self._timeout_s)
        return [bytes(part[first : self._used]) for part in self.maps]


def _map(fd: int, nbytes: int) -> mmap.mmap:
    # Pythons before 3.13 keep a duplicate of the descriptor open as long as the map.
    options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    return mmap.mmap(fd, nbytes, **options)


def dead(pid: int) -> bool:
    """Whether a peer's process is gone, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _file(at: int | str) -> list[int] | None:
    """Device and inode of a file: empty if it does not exist, None without permission."""
    try:
        status = os.stat(at)
    except PermissionError:
        return None
    except FileNotFoundError:
        return []
    return [status.st_dev, status.st_ino]


def _address(part: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(part))


def _read(path: str) -> str:
    with open(path) as file:
        return file.read().strip()


#: The variable that names the host of a rank, for containers of one host that share no memory.
VARIABLE = "FICCO_HOST"


@dataclass(frozen=True)
class Near:
    """The ranks of one host, numbered from 0, with a separate store."""

    store: Store
    place: int
    count: int

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.count


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group. Ranks of one host are consecutive; all hosts have equally many ranks.

    Attributes:
        group: all ranks.
        names: name of each rank's host.
        near: the ranks of this rank's host.
        session: identifies this group among all groups that have used the same store.
    """

    group: ProcessGroup
    names: tuple[str, ...] = ()
    near: Any = None
    session: str = ""

    @classmethod
    def one(cls, group: ProcessGroup) -> Hosts:
        """Hosts of a group whose ranks all share one host."""
        return cls(group, ("",) * group.size(), group)

    @property
    def count(self) -> int:
        """Number of hosts."""
        return len(set(self.names))

    @property
    def first(self) -> int:
        """The first rank of this rank's host."""
        rank: int = self.group.rank() - self.near.rank()
        return rank

    @property
    def here(self) -> range:
        """The ranks of this rank's host."""
        return range(self.first, self.first + self.near.size())

    @property
    def far(self) -> list[int]:
        """The ranks of other hosts."""
        return [rank for rank in range(len(self.names)) if rank not in self.here]

    @property
    def rail(self) -> list[int]:
        """The ranks at this rank's position on the other hosts."""
        ranks = range(self.near.rank(), len(self.names), self.near.size())
        return [rank for rank in ranks if rank not in self.here]

    def spread(self, near: list[Any], absent: Any) -> list[Any]:
        """Values of this host's ranks, by rank of the group; ``absent`` for all other ranks."""
        rest = len(self.names) - self.first - len(near)
        return [absent] * self.first + near + [absent] * rest

    def named(self, rank: int | None) -> str:
        """The host of a rank, for errors; empty if there is only one host."""
        return "" if rank is None or self.count == 1 else self.names[rank]

    def store(self, purpose: str) -> Store:
        """A separate connection to the group's store, with keys of this session only."""
        store: Any = store_of(self.group)
        if hasattr(store, "clone"):  # not in every release: threads then share a connection
            store = store.clone()
        return PrefixStore(f"ficco/{purpose}/{self.session}", store)


def hosts_of(group: ProcessGroup, timeout_s: float, operator: str) -> Hosts:
    """Determine which ranks share a host, by their boot ids or the variable ``FICCO_HOST``.
    Collective.

    Raises:
        NotImplementedError: the ranks of a host are not consecutive or cannot share memory, or
            hosts have different numbers of ranks.
        SignalTimeout: a rank is absent.
    """

    def absent(ranks: list[int] | None, seconds: float) -> SignalTimeout:
        return SignalTimeout(
            operator=operator,
            rank=group.rank(),
            peer=ranks[0] if ranks else None,
            step=f"{first_call('find out which ranks share a host')}{absentees(ranks)}",
            schedule=MEETING,
            seconds=seconds,
        )

    mine = {**whereabouts(), "named": os.environ.get(VARIABLE, "")}
    facts = meet(group, mine, "hosts", timeout_s, absent, lambda: None)
    by_boot, hosts_named = dict[str, str](), Counter[str]()
    for fact in facts:
        boot, name = fact["boot"], fact["host"]
        if boot not in by_boot:
            hosts_named[name] += 1  # hosts may share a name
            number = hosts_named[name]
            by_boot[boot] = f"{name} ({number})" if number > 1 else name
    names = tuple(fact["named"] or by_boot[fact["boot"]] for fact in facts)
    for name in dict.fromkeys(names):  # on every rank, so that all refuse an unsupported host
        require_shareable({rank: facts[rank] for rank, host in enumerate(names) if host == name})
    if len(set(names)) == 1:
        return Hosts.one(group)
    sizes = [(name, len(list(ranks))) for name, ranks in groupby(names)]
    if len(sizes) > len(set(names)) or len({size for _, size in sizes}) > 1:
        by_rank = ", ".join(f"{name}: {size}" for name, size in sizes)
        raise NotImplementedError(
            "group: required consecutive ranks on each host, as many on each, "
            f"got by rank {by_rank}; pass a group made by dist.new_group of such ranks"
        )
    per_host = sizes[0][1]
    place, session = group.rank() % per_host, "".join(fact["token"] for fact in facts)
    store = PrefixStore(f"{names[group.rank()]}/{session}", store_of(group))
    return Hosts(group, names, Near(store, place, per_host), session)
