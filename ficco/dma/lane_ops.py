"""The operations of a call on a lane, and how those that follow each other become fewer.

A launch of the copy kernel, or of a sum at the peers, can carry out the waits and writes around it.
Nothing here touches the device before an operation is called.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ficco.dma.driver import WORD, Batch, Driver, Recording
from ficco.dma.engine import Call, Op, callers
from ficco.dma.memops import WAIT_32, Around, MemOp, behind, in_front, script
from ficco.hip_kernels import PEER_BLOCKS, Kernels, Script, Signals

#: Seconds after which a waiting kernel gives up; the watchdog ends it long before.
KERNEL_WAIT_S = 86400.0


@dataclass(frozen=True)
class Run:
    """A program as :meth:`GpuEngine.execute` goes through it.

    ``before`` is done before anything is enqueued. ``body`` is what the caller's stream waits for,
    ``tail`` what peers are told afterwards, on the lane ``tail_lane``; ``lanes`` run concurrently
    with the caller's stream. Of a call that is watched by words, ``begin`` and ``tail`` tell the
    watchdog, too, where no launch in the body does. ``recorded`` holds recordings of the body, by
    where the operands lie, ``seen`` where they lay once.
    """

    body: list[Op]
    begin: Batch | None
    tail: list[Op]
    tail_lane: str
    lanes: tuple[str, ...]
    before: tuple[Op, ...] = ()
    recorded: dict[Any, Recording] = field(default_factory=dict)
    seen: set[Any] = field(default_factory=set)


class Memops:
    """An operation that is waits and writes alone; neighbours on a lane become one."""

    def __init__(self, lane: str, batch: Batch) -> None:
        self.lane, self.batch = lane, batch

    @property
    def ops(self) -> tuple[MemOp, ...]:
        return self.batch.ops

    def __call__(self, call: Call) -> None:
        self.batch.enqueue(call.state[self.lane])


class Posts:
    """An operation that posts by copies, where stream writes do not reach a peer.

    Attributes:
        ops: what would be written.
    """

    def __init__(
        self, lane: str, ops: Sequence[MemOp], sources: Sequence[int], driver: Driver
    ) -> None:
        """``sources``: addresses of words that hold the values."""
        self.lane, self.ops = lane, tuple(ops)
        copies = [driver.copy(op.address, WORD) for op in ops]
        self._copies = list(zip(copies, sources, strict=True))

    def __call__(self, call: Call) -> None:
        stream = call.state[self.lane]
        for copy, source in self._copies:
            copy(source, stream)


class KernelBatch:
    """Waits and writes by kernels of ficco's, a launch for each run of either. While one waits, a
    block of the device spins."""

    def __init__(self, ops: Sequence[MemOp], kernels: Kernels, late: int) -> None:
        """``late``: address of a word that is written when a kernel gives up."""
        self.ops, self._kernels, self._late = tuple(ops), kernels, late
        self._runs: list[tuple[bool, list[tuple[int, int]]]] = []
        for op in self.ops:
            waits = op.kind == WAIT_32
            if not self._runs or self._runs[-1][0] != waits:
                self._runs.append((waits, []))
            self._runs[-1][1].extend(op.words)

    def enqueue(self, stream: Any) -> None:
        for waits, words in self._runs:
            if waits:
                self._kernels.wait(words, KERNEL_WAIT_S, self._late, stream)
            else:
                self._kernels.post(words, stream)


@dataclass(frozen=True)
class KernelCopies:
    """An operation that copies rows of one shape by the kernel.

    Attributes:
        targets, sources: address and row pitch in bytes of both ends of each copy; a source may be
            another one in each call.
        width, height: bytes of a row, and how many.
    """

    kernels: Kernels
    lane: str
    targets: list[tuple[int, int]]
    sources: list[Callable[[Call], tuple[int, int]]]
    width: int
    height: int

    def __call__(self, call: Call, signals: Signals | None = None) -> None:
        """With ``signals`` there must be something to copy."""
        places = [source(call) for source in self.sources]
        ends = tuple((to, at) for (to, _), (at, _) in zip(self.targets, places, strict=True))
        pitches = self.targets[0][1], places[0][1]
        stream = call.state[self.lane]
        self.kernels.copies(ends, *pitches, self.width, self.height, stream, signals=signals)


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


def enqueue(run: Run, call: Call) -> None:
    """Enqueue the body of a program; the lanes begin and end with the caller's stream."""
    _begin(run, call)
    for op in run.body:
        op(call)
    _end(run, call)


def enqueue_first(run: Run, call: Call) -> None:
    """Enqueue what comes before the step of the caller's."""
    _begin(run, call)
    for op in run.body[: run.body.index(callers)]:
        op(call)


def enqueue_rest(run: Run, call: Call) -> None:
    """Enqueue what comes after it."""
    for op in run.body[run.body.index(callers) :]:
        op(call)
    _end(run, call)


def _begin(run: Run, call: Call) -> None:
    lanes = call.state
    stream = lanes["compute0"]
    if run.begin is not None or run.lanes:
        lanes.fork.record(stream)
    if run.begin is not None:  # before anything can be stuck
        lanes.fork.hold(lanes["sync"])
        run.begin.enqueue(lanes["sync"])


def _end(run: Run, call: Call) -> None:
    lanes = call.state
    for lane in run.lanes:
        event = lanes.joins[lane]
        event.record(lanes[lane])
        event.hold(lanes["compute0"])


MakeBatch = Callable[[Sequence[MemOp]], Batch]


def joined(given: Iterable[tuple[str, Op]], batch: MakeBatch) -> list[tuple[str, Op]]:
    """The operations of lanes, neighbours on a lane joined where that is possible."""
    ops: list[tuple[str, Op]] = []
    for lane, op in given:
        found: tuple[Op, ...] = (op,)
        while len(found) == 1 and ops and ops[-1][0] == lane:
            found = _joined(lane, ops.pop()[1], found[0], batch)
        ops += [(lane, one) for one in found]
    return ops


def _joined(lane: str, one: Op, two: Op, batch: MakeBatch) -> tuple[Op, ...]:
    """Two operations that follow each other on a lane, by as few calls of the driver, and as
    little of the stream's time, as may be."""

    def left(ops: tuple[MemOp, ...]) -> tuple[Op, ...]:
        return (Memops(lane, batch(ops)),) if ops else ()

    if isinstance(one, Memops) and isinstance(two, Memops):
        return (Memops(lane, batch((*one.ops, *two.ops))),)
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
    begin: Batch | None,
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
