"""PyTorch's symmetric memory for the ranks of one group, whatever their other groups do.

PyTorch numbers its rendezvous per process, over all groups, and meets under that number: ranks
that have had a different number of them, in groups that not all share, never meet (PyTorch 2.11).
And two threads of a process cannot meet their peers at the same time, nor take memory to meet with:
that comes out of a pool which one thread can fill.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

from ficco.dma.driver import drained
from ficco.dma.host import HostMemory
from ficco.errors import SignalTimeout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_lock = threading.Lock()
_count = 0  # rendezvous of this process
_filling = threading.Lock()
_ALONE: Any = "ficco: a group of one"  # newer releases have a type of their own for names


def symmetric(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that peers can reach once they have met."""
    with _filling:
        return symm_mem.empty(nbytes, dtype=torch.uint8, device=device)


class Rendezvous:
    """Where the ranks of a group meet to make symmetric memory. Making one is collective."""

    def __init__(self, group: ProcessGroup, timeout_s: float) -> None:
        self._group = group
        self.rank, self.world = group.rank(), group.size()
        host = HostMemory(group, 8, timeout_s, "symmetric memory")
        # One 64-bit word per rank, written whole: number of the meeting, then the rank's count.
        self._words = [np.frombuffer(part, np.int64, 1) for part in host.maps]
        self._meeting = 0
        self._operator = "ficco"

    def meet(
        self,
        tensor: torch.Tensor,
        timeout_s: float,
        operator: str,
        interrupt: Callable[[], None],
    ) -> Any:
        """PyTorch's handle of symmetric memory in which all ranks put their tensor. Collective.

        Raises:
            SignalTimeout: a rank does not come.
        """
        global _count
        self._meeting += 1
        self._operator = operator
        deadline = time.monotonic() + timeout_s
        # Every rank holds its process's lock meanwhile. They take it in the order of ranks, as
        # all groups do, so that no two groups wait for each other.
        if self.rank:
            self._await(self.rank - 1, deadline, timeout_s, interrupt)
        rest = max(0.0, deadline - time.monotonic())
        if not _lock.acquire(timeout=min(rest, threading.TIMEOUT_MAX)):
            raise self._timeout(None, timeout_s)
        try:
            self._words[self.rank][0] = self._meeting << 32 | _count
            self._await(self.world - 1, deadline, timeout_s, interrupt)
            most = max(int(word[0]) & 0xFFFFFFFF for word in self._words)
            for _ in range(most - _count):
                _meet_alone(tensor.device)
            _count = most + 1
            return symm_mem.rendezvous(tensor, self._group)
        finally:
            _lock.release()

    def _await(
        self, peer: int, deadline: float, timeout_s: float, interrupt: Callable[[], None]
    ) -> None:
        def come() -> bool:
            return int(self._words[peer][0]) >> 32 >= self._meeting

        if not drained(come, deadline - time.monotonic(), interrupt):
            raise self._timeout(peer, timeout_s)

    def _timeout(self, peer: int | None, seconds: float) -> SignalTimeout:
        return SignalTimeout(
            operator=self._operator,
            rank=self.rank,
            peer=peer,
            step=f"symmetric memory, allocation {self._meeting}",
            schedule="none yet",
            seconds=seconds,
        )


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
