"""Messages of a network step, regions or strided batches of regions, and their exchange by a
separate gloo group.

A call may have only some rows of a region. Both ends of a move know which, so a message holds just
these rows, packed; without rows there is no message.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ficco.compute.buffers import buffers_of
from ficco.compute.program import Call, Program
from ficco.compute.ragged_blocks import EMPTY, filled, moves
from ficco.dma.collectives import LONGEST_S
from ficco.dma.engine import Engine
from ficco.dma.host import Hosts
from ficco.errors import SignalTimeout
from ficco.plan import Crossing, Plan, Region, Transfer

if TYPE_CHECKING:
    from torch.distributed import Work


class Message(NamedTuple):
    """This rank's end of a move between hosts: a region or batch of regions, which is sent to a
    peer (``outward``) or received from it."""

    outward: bool
    peer: int
    region: Region
    move: Transfer


def messages(plan: Plan, step: int) -> list[Message]:
    """The messages of a network step, except those that are always empty."""
    nonempty, crossing = [], plan.steps[step].work
    for move in crossing.moves if isinstance(crossing, Crossing) else ():
        outward = move.src.rank == plan.rank
        mine, peer = (move.src, move.dst.rank) if outward else (move.dst, move.src.rank)
        if move.elements:
            nonempty.append(Message(outward, peer, mine, move))
    return nonempty


def most_bytes(plan: Plan, message: Message) -> int:
    """The most bytes that a message of any call has: at most the destination's capacity, if calls
    have only some of the rows."""
    region, move = message.region, message.move
    rows = move.batch * region.rows
    if filled(plan, region):
        rows = min(rows, plan.buffer[move.dst.buffer].room or rows)
    return rows * region.cols * plan.buffer[region.buffer].itemsize


def parts_of(program: Program, message: Message) -> Callable[[Call], list[torch.Tensor]]:
    """Return a function that lists this rank's tensors of a message in a call; [] without rows."""
    plan, places, (outward, _, region, move) = program.plan, buffers_of(program), message
    if not filled(plan, region):
        stride = move.src_stride if outward else move.dst_stride
        view = places.batch(region, move.batch, stride)
        return lambda call: [view(call)]
    moves_of, rows = moves(plan, move), places.rows(region)

    def parts(call: Call) -> list[torch.Tensor]:
        present = moves_of(call.filled or EMPTY)
        first = (present.src if outward else present.dst).tolist()
        spans = zip(first, present.rows.tolist(), strict=True)
        return [rows(call, at, at + count) for at, count in spans]

    return parts


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of ``parts``, contiguous; without a copy if they are contiguous already."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))


def joint_room(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous memory for the elements of ``parts``: a single contiguous part, else new."""
    if len(parts) == 1 and parts[0].is_contiguous():
        return parts[0]
    return parts[0].new_empty(sum(part.numel() for part in parts))


def put_together(parts: Sequence[torch.Tensor], joint: torch.Tensor) -> None:
    """Copy ``parts`` into contiguous memory."""
    for part, packed in _pairs(parts, joint):
        packed.copy_(part, non_blocking=True)


def take_apart(joint: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy contiguous memory into ``parts``, unless it is the memory of the single part."""
    for part, packed in _pairs(parts, joint) if joint is not parts[0] else ():
        part.copy_(packed, non_blocking=True)


def _pairs(
    parts: Sequence[torch.Tensor], joint: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    pieces = joint.view(-1).split([part.numel() for part in parts])
    return ((part, piece.view(part.shape)) for part, piece in zip(parts, pieces, strict=True))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, whatever the stride of a dimension of size 1."""
    return tensor.view(-1).view(torch.uint8)


def never_freed(unfinished: list[Any]) -> list[Any]:
    """A list whose contents are never freed if it has any at exit, so that the process exits at
    once."""
    atexit.register(lambda: unfinished and ctypes.pythonapi.Py_IncRef(ctypes.py_object(unfinished)))
    return unfinished


#: Groups with messages in flight when their call failed. Freeing a group waits for its messages.
_unfinished: list[object] = never_freed([])


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
