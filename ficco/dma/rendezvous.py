"""PyTorch's symmetric memory for the ranks of one group, whatever their other groups do.

PyTorch numbers its rendezvous per process, over all groups, and meets under that number: ranks
that have had a different number of them, in groups that not all share, never meet (PyTorch 2.11).
And two threads of a process cannot meet their peers at the same time, nor take memory to meet with:
that comes out of a pool which one thread can fill.
"""

from __future__ import annotations

import math
import threading
import weakref
from functools import partial
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
from ficco.dma.host import HostMemory
from ficco.dma.patience import Patience
from ficco.errors import MEETING, SignalTimeout

_lock = threading.Lock()
_count = 0  # rendezvous of this process
_filling = threading.Lock()
_ALONE: Any = "ficco: a group of one"  # newer releases have a type of their own for names


def symmetric(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that peers can reach once they have met."""
    with _filling:
        return symm_mem.empty(nbytes, dtype=torch.uint8, device=device)


class Rendezvous:
    """Where the ranks of an engine that share a host meet to make symmetric memory. Making one is
    collective."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._meeting = engine, 0
        self._group: Any = engine.group  # or the name of one
        if engine.hosts.count > 1:
            self._group = self._subgroup()
        host = HostMemory(engine.hosts.near, 8, engine.timeout_s, "symmetric memory")
        # One 64-bit word per rank, written whole: number of the meeting, then the rank's count.
        self._words = [np.frombuffer(part, np.int64, 1) for part in host.maps]

    def _subgroup(self) -> Any:
        """The name of the ranks of this host as a group of PyTorch's, which is there as long as
        this is."""
        hosts = self._engine.hosts
        name: Any = f"ficco: {hosts.names[self._engine.rank]} {hosts.session}"
        # Which the registry does not keep.
        self._near = dist.ProcessGroup(hosts.near.store, hosts.near.rank(), hosts.near.size())
        _register_process_group(name, self._near)
        weakref.finalize(self, _unregister_process_group, name).atexit = False
        return name

    def meet(self, tensor: torch.Tensor) -> Any:
        """PyTorch's handle of symmetric memory in which all ranks put their tensor. Collective.

        Raises:
            SignalTimeout: a rank does not come.
        """
        global _count
        engine, self._meeting = self._engine, self._meeting + 1
        patience, limit = Patience(), engine.timeout_s
        me, count = engine.hosts.near.rank(), engine.hosts.near.size()

        def absent(place: int | None, seconds: float) -> SignalTimeout:
            return SignalTimeout(
                operator=engine.operator,
                rank=engine.rank,
                peer=None if place is None else engine.hosts.here[place],
                step=f"share symmetric memory, allocation {self._meeting}",
                schedule=MEETING,
                seconds=seconds,
            )

        def wait_for(place: int) -> None:
            def here() -> bool:
                return int(self._words[place][0]) >> 32 >= self._meeting

            def interrupt() -> None:
                engine.interrupt()
                if late := patience.ends(limit, partial(absent, place)):
                    raise late

            drained(here, math.inf, interrupt)

        # Every rank holds its process's lock meanwhile. They take it in the order of ranks, as
        # all groups do, so that no two groups wait for each other.
        if me:
            wait_for(me - 1)
        rest = max(0.0, limit - patience.seconds)
        if not _lock.acquire(timeout=min(rest, threading.TIMEOUT_MAX)):
            raise absent(None, patience.seconds)
        try:
            self._words[me][0] = self._meeting << 32 | _count
            wait_for(count - 1)
            most = max(int(word[0]) & 0xFFFFFFFF for word in self._words)
            for _ in range(most - _count):
                _meet_alone(tensor.device)
            _count = most + 1
            return symm_mem.rendezvous(tensor, self._group)
        finally:
            _lock.release()


def _meet_alone(device: torch.device) -> None:
    """Count one rendezvous up, with nobody."""
    if not _alone:
        group = dist.ProcessGroup(dist.HashStore(), 0, 1)
        _register_process_group(_ALONE, group)
        _alone.append(group)  # the registry does not keep it
    tensor = symmetric(1, device)
    _SymmetricMemory.rendezvous(tensor, _ALONE)
    _alone.append(tensor)  # freeing it could fall into the capture of a graph


_alone: list[object] = []
