"""Host memory that the ranks of a group share, and semaphores in it.

Every rank makes an anonymous file (a memfd) and maps those of its peers. Such a file has no name
in any file system: it is gone with the last process that maps it, however that process ends, and
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
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from ficco.errors import BackendError, RankMismatch, SignalTimeout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

#: Distance of semaphores in bytes: a cache line each. A sem_t takes 32 bytes on 64-bit Linux.
SEMAPHORE_STRIDE = 64
#: Seconds in which a rank that gave up can say so, before its peers report that its memory is gone.
SAYS_S = 0.3

_CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


class Semaphores:
    """POSIX semaphores by address, in memory that processes share.

    POSIX.1-2017, XBD 4.12 'Memory Synchronization', lists sem_post, sem_wait, sem_timedwait and
    sem_trywait among the functions that synchronize memory: what a rank wrote before a post is
    seen behind the wait that the post ends, by other processes and on weakly ordered processors
    (Arm) as well. sem_clockwait does the same (POSIX.1-2024, XBD 4.15.2).

    Calls go through ctypes, which releases the interpreter lock around them.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p
        self._init = libc.sem_init
        self._init.argtypes = [address, ctypes.c_int, ctypes.c_uint]
        self._post = libc.sem_post
        self._post.argtypes = [address]
        self._trywait = libc.sem_trywait
        self._trywait.argtypes = [address]
        self._getvalue = libc.sem_getvalue
        self._getvalue.argtypes = [address, ctypes.POINTER(ctypes.c_int)]
        timespec = ctypes.POINTER(_Timespec)
        # sem_timedwait follows the wall clock, which can be set back; glibc has had a monotonic
        # one since 2.30, other C libraries may not.
        try:
            self._clockwait = libc.sem_clockwait
            self._clockwait.argtypes = [address, ctypes.c_int, timespec]
        except AttributeError:
            self._clockwait = None
            self._timedwait = libc.sem_timedwait
            self._timedwait.argtypes = [address, timespec]

    def init(self, address: int, value: int) -> None:
        """Make a semaphore with a first value; nobody may use it yet."""
        if self._init(address, 1, value):
            raise _failure("sem_init")

    def post(self, address: int) -> None:
        if self._post(address):
            raise _failure("sem_post")

    def try_wait(self, address: int) -> bool:
        """Take one if there is one."""
        return self._trywait(address) == 0

    def wait(self, address: int, seconds: float) -> bool:
        """Take one; False if none came in time, or earlier if a Unix signal came instead."""
        if self._clockwait is not None:
            code = self._clockwait(address, _CLOCK_MONOTONIC, _timespec(time.monotonic() + seconds))
        else:
            code = self._timedwait(address, _timespec(time.time() + seconds))
        if code and ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise _failure("sem_timedwait")
        return code == 0

    def value(self, address: int) -> int:
        found = ctypes.c_int()
        if self._getvalue(address, found):
            raise _failure("sem_getvalue")
        return found.value


@cache
def semaphores() -> Semaphores:
    """The C library's semaphores, looked up once."""
    return Semaphores()


def _timespec(when: float) -> _Timespec:
    seconds = int(when)
    return _Timespec(seconds, int((when - seconds) * 1e9))


def _failure(call: str) -> BackendError:
    code = ctypes.get_errno()
    return BackendError(call, errno.errorcode.get(code, str(code)), os.strerror(code))


class HostMemory:
    """Memory of the same size on every rank of a group on one machine, mapped by all of them.

    Making one is collective and returns once every rank has mapped all parts.

    Attributes:
        maps: the parts, by rank; empty once closed.
        nbytes: usable bytes of each, zeroed at first.
        pids: process of each rank.
    """

    def __init__(
        self,
        group: ProcessGroup,
        nbytes: int,
        timeout_s: float,
        purpose: str,
        operator: str = "ficco",
        interrupt: Callable[[], None] | None = None,
    ) -> None:
        """Allocate and map. ``interrupt`` is called while a rank waits, here and in barriers, and
        may raise.

        Raises:
            SignalTimeout: a rank did not come within ``timeout_s``; ``purpose`` says what for.
            RankMismatch: the ranks want different sizes.
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
            hellos = self._meet(group, self._hello(fd), timeout_s, deadline)
            self._require_shareable(hellos)
            self.maps = [
                mine if rank == self.rank else self._open(rank, hello)
                for rank, hello in enumerate(hellos)
            ]
            self.pids = [hello["pid"] for hello in hellos]
            # All are here; whoever came at the last moment still gets the time to map.
            self.barrier(max(deadline - time.monotonic(), 1.0))
            self._require_equal(hellos)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(fd)  # behind the barrier: every peer has opened it

    def address(self, rank: int) -> int:
        """Where a rank's part begins in this process."""
        return _address(self.maps[rank])

    def barrier(self, timeout_s: float) -> None:
        """Wait for every rank to come here; what it wrote before is seen behind."""
        gates = [self._gates(part)[self.rank] for part in self.maps]
        for rank, gate in enumerate(gates):
            if rank != self.rank:
                semaphores().post(gate)
        deadline = time.monotonic() + timeout_s
        absent = []
        for rank, gate in enumerate(self._gates(self.maps[self.rank])):
            came = rank == self.rank or semaphores().try_wait(gate)
            while not came and (rest := deadline - time.monotonic()) > 0:
                self._interrupt()
                came = semaphores().wait(gate, min(rest, 0.02))  # in slices: Ctrl-C comes through
            if not came:
                absent.append(rank)
        if absent:
            raise self._timeout(absent, timeout_s)

    def close(self) -> None:
        """Give the maps up. Tensors that look into them keep them mapped as long as they live.

        A map is therefore never closed by force: torch.frombuffer keeps the map but no lock on its
        buffer, so that closing it would pull the memory from under a tensor.
        """
        self.maps.clear()

    def _total(self, nbytes: int) -> int:
        """The size of a part: behind the data one semaphore per rank, for barriers."""
        return (-(-nbytes // SEMAPHORE_STRIDE) + self.world) * SEMAPHORE_STRIDE

    def _gates(self, part: mmap.mmap) -> list[int]:
        """Addresses of a part's barrier semaphores: one per rank that comes to the barrier."""
        end = _address(part) + len(part)
        return [end - (rank + 1) * SEMAPHORE_STRIDE for rank in range(self.world)]

    def _timeout(self, absent: list[int] | None, seconds: float) -> SignalTimeout:
        who = "the rank that hosts the store"
        if absent:
            who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
        return SignalTimeout(
            operator=self.operator,
            rank=self.rank,
            peer=absent[0] if absent else None,
            step=f"share host memory for {self.purpose}: {who} absent",
            schedule="none yet",
            seconds=seconds,
        )

    def _hello(self, fd: int) -> dict[str, Any]:
        """What peers must know to map this rank's part."""
        return {
            "host": socket.gethostname(),
            "boot": _read("/proc/sys/kernel/random/boot_id"),
            "pids": os.stat("/proc/self/ns/pid").st_ino,
            "pid": os.getpid(),
            "fd": fd,
            "file": _file(fd),
            "nbytes": self.nbytes,
            "token": secrets.token_hex(8),
        }

    def _meet(
        self, group: ProcessGroup, mine: dict[str, Any], timeout_s: float, deadline: float
    ) -> list[dict[str, Any]]:
        """Exchange hellos through the group's store."""
        found: dict[int, dict[str, Any]] = {self.rank: mine}
        absent = [rank for rank in range(self.world) if rank != self.rank]
        if not absent:
            return [mine]
        from torch.distributed import DistError, distributed_c10d

        try:
            store = distributed_c10d._get_process_group_store(group)
        except KeyError:
            raise ValueError(
                "group: required a process group that exists, got one that was destroyed; pass "
                "another, and call ficco.close(group) before dist.destroy_process_group(group)"
            ) from None
        begin = deadline - timeout_s
        over, stop = threading.Event(), threading.Event()
        errors: list[Exception] = []

        def exchange() -> None:
            try:
                self._exchange(store, mine, found, absent, stop)
            except Exception as error:
                errors.append(error)
            over.set()

        # In a thread: a store whose host is stopped keeps its clients waiting for longer than this.
        threading.Thread(target=exchange, name="ficco meet", daemon=True).start()
        try:
            while not over.wait(0.02):
                self._interrupt()
                if time.monotonic() > deadline:
                    raise self._timeout(list(absent), timeout_s)
        finally:
            stop.set()
        for error in errors:
            if not isinstance(error, DistError):
                raise error
            # The rank that hosts the store is gone.
            raise self._timeout(list(absent) or None, time.monotonic() - begin) from error
        return [found[rank] for rank in range(self.world)]

    def _exchange(
        self,
        store: Store,
        mine: dict[str, Any],
        found: dict[int, dict[str, Any]],
        absent: list[int],
        stop: threading.Event,
    ) -> None:
        """Fill ``found``, and empty ``absent`` while doing so.

        A store can outlive a group, and the names in it are used again. Each rank therefore makes
        up a token and repeats those that it heard: a hello with this rank's token in it is new. The
        barrier behind keeps a rank from coming back before all its peers have left this exchange.
        """
        key = f"ficco/{self.purpose}/"
        said = None
        pause = 0.0005
        while not stop.is_set():
            heard = {str(rank): hello["token"] for rank, hello in found.items()}
            if heard != said:
                store.set(f"{key}{self.rank}", json.dumps({**mine, "heard": heard}))
                said, pause = heard, 0.0005
            if not absent:
                return
            for rank in list(absent):
                if store.check([f"{key}{rank}"]):
                    hello = json.loads(store.get(f"{key}{rank}"))
                    found[rank] = hello
                    if hello["heard"].get(str(self.rank)) == mine["token"]:
                        absent.remove(rank)
            if absent:
                time.sleep(pause)
                pause = min(pause * 1.5, 0.02)

    def _require_shareable(self, hellos: list[dict[str, Any]]) -> None:
        first = hellos[0]
        for rank, hello in enumerate(hellos):
            if hello["boot"] != first["boot"]:
                raise NotImplementedError(
                    f"ficco serves groups whose ranks are on one host; rank 0 is on "
                    f"{first['host']}, rank {rank} on {hello['host']}"
                )
            if hello["pids"] != first["pids"]:
                raise NotImplementedError(
                    f"ranks 0 and {rank} are on one host in containers that do not see each "
                    f"other's processes; run the ranks in one container or with a common PID "
                    f"namespace"
                )

    def _require_equal(self, hellos: list[dict[str, Any]]) -> None:
        if len({hello["nbytes"] for hello in hellos}) > 1:
            raise RankMismatch(
                {
                    rank: f"{hello['nbytes']} bytes of memory for {self.purpose}"
                    for rank, hello in enumerate(hellos)
                }
            )

    def _open(self, rank: int, hello: dict[str, Any]) -> mmap.mmap:
        path = f"/proc/{hello['pid']}/fd/{hello['fd']}"
        ended = f"rank {rank} has just ended or given up"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            # Most often it is not there. Another file in its place may be one that cannot be
            # opened, such as a socket; what is left of a dead process is root's alone to look at.
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
        """That a peer's memory is not there, unless the peer says meanwhile why it gave up."""
        end = time.monotonic() + SAYS_S
        while time.monotonic() < end:
            self._interrupt()
            time.sleep(0.01)
        return BackendError("open", code, why)


def _map(fd: int, nbytes: int) -> mmap.mmap:
    # Older Pythons keep a copy of the descriptor for as long as the map lives.
    options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    return mmap.mmap(fd, nbytes, **options)


def dead(pid: int) -> bool:
    """Whether a peer's process is gone, or only waits for its parent to take note."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _file(at: int | str) -> list[int] | None:
    """What tells a file from any other on this host; None if one may not even look."""
    try:
        found = os.stat(at)
    except PermissionError:
        return None
    except FileNotFoundError:
        return []
    return [found.st_dev, found.st_ino]


def _address(part: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(part))


def _read(path: str) -> str:
    with open(path) as file:
        return file.read().strip()
