"""The operations of a call on CUDA, and how those that follow each other on a lane become fewer.

A launch of the copy kernel, or of a sum at the peers, can carry out the waits and writes around it.
Nothing here touches the device before an operation is called.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ficco.dma import cuda_driver as cu
from ficco.dma.engine import Call, Op
from ficco.dma.memops import Around, MemOp, behind, in_front, script
from ficco.dma.streams import WORD, KernelCopies
from ficco.hip_kernels import PEER_BLOCKS, Kernels, Script, Signals


class Memops:
    """An operation that is waits and writes alone; neighbours on a lane become one."""

    def __init__(self, lane: str, batch: cu.Batch) -> None:
        self.lane, self.batch = lane, batch

    @property
    def ops(self) -> tuple[MemOp, ...]:
        return self.batch.ops

    def __call__(self, call: Call) -> None:
        self.batch.enqueue(call.state[self.lane])


@dataclass
class Posts:
    """An operation that posts by copies, for a driver that refuses stream writes to a peer.

    Attributes:
        ops: what would be written.
        sources: addresses of words that hold the values.
    """

    lane: str
    ops: tuple[MemOp, ...]
    sources: tuple[int, ...]

    def __call__(self, call: Call) -> None:
        for op, source in zip(self.ops, self.sources, strict=True):
            cu.copy(op.address, source, WORD, call.state[self.lane])


@dataclass(frozen=True, kw_only=True)
class Launch:
    """An operation by one launch that also carries out what is waited for and written around it.

    Attributes:
        arrived: address of the word where the blocks of the launch are counted.
        mine: addresses of this rank's own words.
    """

    arrived: int
    mine: range
    around: Around = Around()

    @cached_property
    def signals(self) -> Signals:
        return self.around.signals(self.arrived, self.mine)


@dataclass(frozen=True, kw_only=True)
class Copies(Launch):
    """By the copy kernel."""

    copies: KernelCopies

    @property
    def may_spin(self) -> bool:
        """Whether all of its blocks may."""
        copies = self.copies
        return PEER_BLOCKS * len(copies.targets) <= copies.kernels.most_that_spin

    def __call__(self, call: Call) -> None:
        self.copies(call, None if self.around == Around() else self.signals)


@dataclass(frozen=True, kw_only=True)
class OneShot(Launch):
    """A sum of what lies at the peers.

    Attributes:
        parts: result and parts of a call.
    """

    kernels: Kernels
    parts: Callable[[Call], tuple[torch.Tensor, list[torch.Tensor]]]

    def __call__(self, call: Call) -> None:
        self.kernels.one_shot(*self.parts(call), self.signals, call.state["compute0"])


@dataclass(frozen=True)
class Scripted:
    """An operation of the caller's stream that is waits and writes, by a launch."""

    kernels: Kernels
    script: Script

    def __call__(self, call: Call) -> None:
        self.kernels.script(self.script, call.state["compute0"])


#: Operations that wait, or may come to.
_MAY_BE_STUCK = Memops, Posts, Launch, KernelCopies


def joined(given: Iterable[tuple[str, Op]], flush: bool) -> list[tuple[str, Op]]:
    """The operations of lanes, neighbours on a lane joined where that is possible.

    Args:
        flush: whether waits ask for remote writes to be flushed.
    """
    ops: list[tuple[str, Op]] = []
    for lane, op in given:
        found: tuple[Op, ...] = (op,)
        while len(found) == 1 and ops and ops[-1][0] == lane:
            found = _joined(lane, ops.pop()[1], found[0], flush)
        ops += [(lane, one) for one in found]
    return ops


def _joined(lane: str, one: Op, two: Op, flush: bool) -> tuple[Op, ...]:
    """Two operations that follow each other on a lane, by as few calls of the driver, and as
    little of the stream's time, as may be."""

    def left(ops: tuple[MemOp, ...]) -> tuple[Op, ...]:
        return (Memops(lane, cu.Batch(ops, flush)),) if ops else ()

    if isinstance(one, Memops) and isinstance(two, Memops):
        return (Memops(lane, one.batch + two.batch),)
    # A block that spins takes an SM from products: not where they run meanwhile.
    spins = lane.startswith("compute")
    if isinstance(one, (Memops, Posts)) and isinstance(two, OneShot):
        around = replace(two.around, front=(*one.ops, *two.around.front))
        if around.fits:
            return (replace(two, around=around),)
    if isinstance(one, Memops) and isinstance(two, Copies):
        rest, around = in_front(one.ops, two.around, two.mine, spins and two.may_spin)
        return *left(rest), replace(two, around=around)
    if isinstance(one, Copies) and isinstance(two, (Memops, Posts)):
        around, rest = behind(two.ops, one.around, spins)
        if isinstance(two, Memops) or not rest:  # posts by copies are not divided
            return replace(one, around=around), *left(rest)
    return one, two


def by_launches(
    body: Sequence[Op],
    begin: cu.Batch | None,
    tail: Sequence[Op],
    kernels: Kernels,
    mine: Container[int],
) -> tuple[list[Op], list[Op]] | None:
    """A call of one lane whose launches also carry out what surrounds its body; None where that is
    not possible, or takes longer than to do it beside.

    Args:
        body: operations of the caller's stream; at least one.
        begin: tells the watchdog that a captured call begins.
        tail: operations behind the body.
        mine: addresses of this rank's own words.

    Returns:
        Body and tail, both for the caller's stream.
    """
    told = [one for one in tail if isinstance(one, (Memops, Posts))]
    rest = tuple(op for one in told for op in one.ops)
    if len(told) < len(tail) or not Around(rear=rest).fits:
        return None
    found: list[Op] = [*body]
    if begin is not None:
        # By the first that can be stuck. A replay that has not come there is none yet to the
        # watchdog, as one that is only enqueued.
        at = next((i for i, op in enumerate(found) if isinstance(op, _MAY_BE_STUCK)), 0)
        first = found[at]
        if isinstance(first, Launch):
            around = replace(first.around, begin=begin.ops)
            found[at] = replace(first, around=around)
        elif isinstance(first, Memops):
            around = Around(begin.ops, first.ops)
            found[at] = Scripted(kernels, script(first.ops, mine, aside=begin.ops))
        else:
            return None
        if not around.fits:
            return None
    if isinstance(last := found[-1], OneShot):
        found[-1] = replace(last, around=replace(last.around, rear=rest))
        return found, []
    if begin is None:
        return None
    return found, [Scripted(kernels, script(rest, mine))]
