"""Messages between ranks of several hosts, by a separate gloo group."""

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
from ficco.dma.host import Hosts
from ficco.errors import SignalTimeout

if TYPE_CHECKING:
    from torch.distributed import Work

#: Groups with messages in flight when their call failed. Freeing a group waits for its messages.
_unfinished: list[object] = []


@atexit.register
def _leave_unfinished() -> None:
    """Never free the groups, so that the process exits at once."""
    if _unfinished:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_unfinished))


def gloo_group(hosts: Hosts, purpose: str, seconds: float) -> Any:
    """Create a separate gloo group of all ranks, whose operations wait for at most ``seconds``.
    Collective, once for each ``purpose`` in the life of ``hosts``.

    Raises:
        RuntimeError: a rank is absent.
    """
    rank, world = hosts.group.rank(), hosts.group.size()
    limit = timedelta(seconds=min(seconds, LONGEST_S))
    return dist.ProcessGroupGloo(hosts.store(purpose), rank, world, limit)


class PeerExchange:
    """Sends and receives that are started together and then waited for by :meth:`run`.

    Attributes:
        over: set once all works are complete, or one has failed.
        peer: the peer of the work that is waited for, or that failed.
        error: the error of the work that failed.
    """

    def __init__(self, starts: Sequence[tuple[int, Callable[[], Work]]], seconds: float) -> None:
        self.over, self.peer = threading.Event(), starts[0][0] if starts else 0
        self.error: RuntimeError | None = None
        self._limit = timedelta(seconds=min(seconds, LONGEST_S))
        self._works: list[tuple[int, Work]] = []  # a work keeps its tensor alive
        try:  # start all now, so that messages keep their order
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
        broken: an exchange has failed or has been given up.
        expected: exchanges that are waited for later.
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
        self._sent: Counter[int] = Counter()  # messages by peer, whose number is the tag
        self._received: Counter[int] = Counter()
        self._starting = threading.Lock()
        self.broken = False
        self.expected: set[PeerExchange] = set()

    def exchange(
        self, parts: Sequence[tuple[bool, int, torch.Tensor]], seconds: float = LONGEST_S
    ) -> PeerExchange:
        """Start sends and receives. Each part is (whether it is sent, peer, contiguous bytes).
        After ``seconds`` gloo gives up, which breaks all connections of the group."""
        starts: list[tuple[int, Callable[[], Work]]] = []
        for outward, peer, data in parts:
            count = self._sent if outward else self._received
            call = self._group.send if outward else self._group.recv
            starts.append((peer, partial(call, [data], peer, count[peer])))
            count[peer] += 1
        with self._starting:
            return PeerExchange(starts, seconds)

    def close(self) -> None:
        """Leave the group. After a failure messages stay in flight until gloo gives up."""
        if self.broken or self.expected:
            _unfinished.append((self._group, self.expected))
