"""The operations of a call on a lane, and how those that follow each other become fewer.

A launch of the copy kernel, or of a sum at the peers, can carry out the waits and writes around it.
Nothing here touches the device before an operation is called.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ficco.compute.program import Call, Op, callers
from ficco.dma.driver import WORD, Batch, Driver, Recording
from ficco.dma.memops import WAIT_32, Around, MemOp, behind, in_front, script
from ficco.hip_kernels.launch import Kernels, Script, Signals
from ficco.plan import Step

#: Seconds after which a waiting kernel gives up; the watchdog ends it long before.
KERNEL_WAIT_S = 86400.0


@dataclass(frozen=True)
class Run:
    """A program as :meth:`GpuEngine.execute` goes through it.

    ``before`` is done before anything is enqueued. ``body`` is what the caller's stream waits for,
    ``tail`` what peers are told afterwards, on the lane ``tail_lane``; ``lanes`` run concurrently
    with the caller's stream. Of a call that is watched by words, ``begin`` and ``tail`` tell the
    watchdog, too, where no launch in the body does. ``recorded`` holds recordings of the body, by
    where the operands lie, ``seen`` where they lay once. ``before`` a launch that takes longer in a
    recording, ``parts`` are what is recorded and what is enqueued beside that, if it can be told
    apart.
    """

    body: list[Op]
    begin: Batch | None
    tail: list[Op]
    tail_lane: str
    lanes: tuple[str, ...]
    before: tuple[Op, ...] = ()
    parts: tuple[Run, Run] | None = None
    recorded: dict[Any, Recording] = field(default_factory=dict)
    seen: set[Any] = field(default_factory=set)


@dataclass(frozen=True)
class Memops:
    """An operation that is waits and writes alone; neighbours on a lane become one."""

    lane: str
    batch: Batch

    @property
    def ops(self) -> tuple[MemOp, ...]:
        return self.batch.ops

    @property
    def whole(self) -> bool:
        """Whether it cannot be divided, nor joined by others."""
        return isinstance(self.batch, Posts)

    def __call__(self, call: Call) -> None:
        self.batch.enqueue(call.state[self.lane])


class Posts:
    """Posts by copies, where stream writes do not reach a peer.

    Attributes:
        ops: what would be written.
    """

    def __init__(self, ops: Sequence[MemOp], sources: Sequence[int], driver: Driver) -> None:
        """``sources``: addresses of words that hold the values."""
        self.ops = tuple(ops)
        copies = [driver.copy(op.address, WORD) for op in ops]
        self._copies = list(zip(copies, sources, strict=True))

    def enqueue(self, stream: Any) -> None:
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
class Launch:
    """An operation by one launch, which also carries out what is waited for and written around it.

    Attributes:
        work: launches it, with what it carries out; copies without that, where it is nothing.
        arrived: address of the word where the blocks of the launch are counted; 0 if it can carry
            out nothing.
        mine: addresses of this rank's own words.
        spins: all of its blocks may wait.
        sums: it adds up what lies at the peers, and carries out all in front of it.
    """

    work: Callable[[Call, Any], None]
    arrived: int
    mine: range
    spins: bool = False
    sums: bool = False
    around: Around = Around()

    @cached_property
    def signals(self) -> Signals | None:
        bare = self.around == Around() and not self.sums
        return None if bare else self.around.signals(self.arrived, self.mine)

    def __call__(self, call: Call) -> None:
        self.work(call, self.signals)


@dataclass(frozen=True)
class Scripted:
    """An operation of the caller's stream that is waits and writes, by a launch."""

    kernels: Kernels
    script: Script

    def __call__(self, call: Call) -> None:
        self.kernels.script(self.script, call.state["compute0"])


#: Operations that wait, or may come to.
_MAY_BE_STUCK = Memops, Launch


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


def enqueue_beside(recording: Recording, rest: Run, call: Call) -> None:
    """Enqueue a program of which a part was recorded, on the first lane of the rest."""
    lanes = call.state
    _begin(rest, call)
    lanes.fork.hold(lanes[rest.lanes[0]])
    recording.replay(lanes[rest.lanes[0]])
    for op in rest.body:
        op(call)
    _end(rest, call)


def parted(ops: Sequence[tuple[str, Op]], steps: Sequence[Step]) -> tuple[Run, Run] | None:
    """What a recording may hold of a body, and the rest: the lanes that share an event with the
    caller's stream. None if all do.

    Args:
        ops: the body, with the lanes of its operations.
        steps: of its plan.
    """
    shared = {frozenset((step.lane, steps[index].lane)) for step in steps for index in step.after}
    live = {"compute0"}
    while more := {lane for pair in shared if pair & live for lane in pair} - live - {"sync"}:
        live |= more
    lanes = list(dict.fromkeys(lane for lane, _ in ops))
    apart = [lane for lane in lanes if lane not in live]
    if not apart:
        return None
    recorded = [op for lane, op in ops if lane not in live]
    rest = [op for lane, op in ops if lane in live]
    others = [lane for lane in lanes if lane in live and lane != "compute0"]
    return (
        Run(recorded, None, [], "sync", tuple(apart)),
        Run(rest, None, [], "sync", (apart[0], *others)),
    )


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
    # Parts are merged on any lane. Where they were allocated, nothing may use their memory before.
    attended = [lane for lane in run.lanes if call.parts and lane.startswith("compute")]
    if attended:
        lanes.fork.record(lanes["compute0"])
    for lane in attended:
        lanes.fork.hold(lanes[lane])


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

    # A block that spins takes an SM from products: not where they run meanwhile.
    spins = lane.startswith("compute")
    if isinstance(one, Memops) and isinstance(two, Memops):
        if not (one.whole or two.whole):
            return (Memops(lane, batch((*one.ops, *two.ops))),)
    elif isinstance(one, Memops) and isinstance(two, Launch) and two.arrived:
        if two.sums:
            around = replace(two.around, front=(*one.ops, *two.around.front))
            if around.fits:
                return (replace(two, around=around),)
        elif not one.whole:
            rest, around = in_front(one.ops, two.around, two.mine, spins and two.spins)
            return *left(rest), replace(two, around=around)
    elif isinstance(one, Launch) and isinstance(two, Memops) and one.arrived and not one.sums:
        around, rest = behind(two.ops, one.around, spins)
        if not (two.whole and rest):
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
    told = [one for one in tail if isinstance(one, Memops)]
    rest = tuple(op for one in told for op in one.ops)
    if len(told) < len(tail) or not Around(rear=rest).fits:
        return None
    found: list[Op] = [*body]
    if begin is not None:
        # By the first that can be stuck. A replay that has not come there is none yet to the
        # watchdog, as one that is only enqueued.
        at = next((i for i, op in enumerate(found) if isinstance(op, _MAY_BE_STUCK)), 0)
        first = found[at]
        if isinstance(first, Launch) and first.arrived:
            around = replace(first.around, begin=begin.ops)
            found[at] = replace(first, around=around)
        elif isinstance(first, Memops) and not first.whole:
            around = Around(begin.ops, first.ops)
            found[at] = Scripted(kernels, script(first.ops, mine, aside=begin.ops))
        else:
            return None
        if not around.fits:
            return None
    if isinstance(last := found[-1], Launch) and last.sums:
        found[-1] = replace(last, around=replace(last.around, rear=rest))
        return found, []
    if begin is None:
        return None
    return found, [Scripted(kernels, script(rest, mine))]
