"""PyTorch's symmetric memory for the ranks of one group, independent of their other groups.

PyTorch numbers the exchanges of its rendezvous per process, over all groups, and writes them to the
group's store under that number. Ranks that have had different numbers of exchanges, in groups that
not all ranks share, never meet (PyTorch 2.11; pytorch #196082). ficco's groups therefore have a
store that renumbers exchanges. In addition, two threads of a process can neither meet their peers
nor allocate memory for a rendezvous at the same time: one thread at a time may fill the pool.
"""

from __future__ import annotations

import itertools
import math
import secrets
import threading
import weakref
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import (
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)

from ficco.dma.driver import drained
from ficco.dma.engine import Engine
from ficco.dma.host import HostMemory, store_of
from ficco.dma.patience import Patience
from ficco.errors import MEETING, SignalTimeout

_lock = threading.Lock()
_filling = threading.Lock()
_names = itertools.count()  # for names of groups, unique within a process


def symmetric(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate memory that peers can map in a rendezvous."""
    with _filling:
        return symm_mem.empty(nbytes, dtype=torch.uint8, device=device)


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
