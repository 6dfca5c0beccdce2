"""Messages between ranks of several hosts, by a gloo group of ficco's own."""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ficco.dma.collectives import LONGEST_S
from ficco.dma.engine import Engine
from ficco.dma.hosts import Hosts
from ficco.errors import SignalTimeout

if TYPE_CHECKING:
    from torch.distributed import Work

#: Groups with messages under way when their call failed: to free one would wait for them.
_left: list[object] = []


@atexit.register
def _leave() -> None:
    """Never free them, so that the process exits at once."""
    if _left:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_left))


def gloo_group(hosts: Hosts, purpose: str, seconds: float) -> Any:
    """A gloo group of all ranks of a group, since the caller's has other uses. Collective, once for
    each purpose in the life of ``hosts``. What it does waits for so many seconds at most.

    Raises:
        RuntimeError: a rank did not come.
    """
    rank, world = hosts.group.rank(), hosts.group.size()
    limit = timedelta(seconds=min(seconds, LONGEST_S))
    return dist.ProcessGroupGloo(hosts.store(purpose), rank, world, limit)


class PeerExchange:
    """Starts works and waits for their end.

    Attributes:
        over: all have ended, or one has failed.
        peer: of the work that is waited for, or of the one that failed.
        error: of that one.
    """

    def __init__(self, starts: Sequence[tuple[int, Callable[[], Work]]], seconds: float) -> None:
        self.over, self.peer = threading.Event(), starts[0][0] if starts else 0
        self.error: RuntimeError | None = None
        self._limit = timedelta(seconds=min(seconds, LONGEST_S))
        self._works: list[tuple[int, Work]] = []  # which keep their tensors
        try:  # at once, so that messages keep their order
            for peer, start in starts:
                self.peer = peer
                self._works.append((peer, start()))
        except RuntimeError as error:
            self.error = error
            self.over.set()

    def run(self) -> None:
        if self.over.is_set():
            return
        try:
            for peer, work in self._works:
                self.peer = peer
                work.wait(self._limit)
        except RuntimeError as error:
            self.error = error
        self.over.set()


class GlooLinks:
    """A rank's connections with other hosts. The constructor is collective.

    Attributes:
        broken: an exchange has failed, or was given up.
        expected: exchanges that are to be waited for later.
    """

    def __init__(self, engine: Engine) -> None:
        begin = time.monotonic()
        try:
            self._group = gloo_group(engine.hosts, "network", engine.timeout_s)
        except RuntimeError as error:
            raise SignalTimeout(
                operator=engine.operator,
                rank=engine.rank,
                step=f"connect with the ranks of other hosts: {error}",
                seconds=time.monotonic() - begin,
            ) from error
        self._sent: Counter[int] = Counter()  # by peer: messages have numbers
        self._received: Counter[int] = Counter()
        self._starting = threading.Lock()
        self.broken = False
        self.expected: set[PeerExchange] = set()

    def exchange(
        self, parts: Sequence[tuple[bool, int, torch.Tensor]], seconds: float = LONGEST_S
    ) -> PeerExchange:
        """Start to send and receive; a part is whether it is sent, the peer, and contiguous
        bytes. gloo gives up after so many seconds, and then so do all connections."""
        starts: list[tuple[int, Callable[[], Work]]] = []
        for outward, peer, data in parts:
            count = self._sent if outward else self._received
            call = self._group.send if outward else self._group.recv
            starts.append((peer, partial(call, [data], peer, count[peer])))
            count[peer] += 1
        with self._starting:
            return PeerExchange(starts, seconds)

    def close(self) -> None:
        """Leave the group. After a failure what is under way stays so until gloo gives up."""
        if self.broken or self.expected:
            _left.append((self._group, self.expected))
