"""Waits and writes of words on a stream, and which of them a launch can see to."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from ficco.hip_kernels.launch import MAX_SIGNALS, Script, ScriptStep, Signals

#: Kinds of MemOp, as CUDA's driver calls them.
WAIT_32, WRITE_32, WRITE_64 = "WAIT_VALUE_32", "WRITE_VALUE_32", "WRITE_VALUE_64"


class MemOp(NamedTuple):
    """A wait for a 32-bit word to equal a value, or a write of a 32-bit or 64-bit word."""

    kind: str
    address: int
    value: int

    @property
    def words(self) -> tuple[tuple[int, int], ...]:
        """The same as 32-bit words, in the order in which they are written: address and value."""
        if self.kind != WRITE_64:
            return ((self.address, self.value),)
        return (self.address + 4, self.value >> 32), (self.address, self.value & 0xFFFFFFFF)


@dataclass(frozen=True)
class Around:
    """What a launch sees to around its work.

    Attributes:
        begin: writes at its begin, for which nothing waits.
        front: carried out in front of all work. What is waited for at its end every block waits
            for, the rest is carried out once.
        rear: carried out once, behind all work.
    """

    begin: tuple[MemOp, ...] = ()
    front: tuple[MemOp, ...] = ()
    rear: tuple[MemOp, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether a launch can see to so much."""
        return max(len(self.begin) + len(self.front), len(self.rear)) <= MAX_SIGNALS

    def signals(self, arrived: int, mine: Container[int]) -> Signals:
        """The same for a launch; ``mine`` are addresses of this rank's own words."""
        front = script(self.front, mine, everyone=True, aside=self.begin)
        return Signals(arrived, front, script(self.rear, mine))


def in_front(
    ops: Sequence[MemOp], around: Around, mine: Container[int], spins: bool
) -> tuple[tuple[MemOp, ...], Around]:
    """Leave to a launch of copies what comes in front of it: what is written, for which it has no
    need to wait, and so does behind its work, and in front of that, if it may spin, what is waited
    for. Words of this rank's own are written before any peer's. Returns what stays in front, and
    what the launch sees to."""
    # Not in front of what it waits for already: a peer may need that first.
    writes = [] if around.front else list(takewhile(_writes, reversed(ops)))[::-1]
    rest = ops[: len(ops) - len(writes)]
    waits = list(takewhile(lambda op: spins and not _writes(op), reversed(rest)))[::-1]
    own = [op for op in writes if op.address in mine]
    others = [op for op in writes if op.address not in mine]
    before = list(takewhile(lambda op: _writes(op) and op.address in mine, around.rear))
    rear = (*own, *before, *others, *around.rear[len(before) :])
    found = replace(around, front=(*waits, *around.front), rear=rear)
    if not found.fits:
        return tuple(ops), around
    return tuple(rest[: len(rest) - len(waits)]), found


def behind(ops: Sequence[MemOp], around: Around, spins: bool) -> tuple[Around, tuple[MemOp, ...]]:
    """Leave to a launch of copies what comes behind it, up to what is waited for, if it may not
    spin. Returns what the launch sees to, and what stays behind."""
    taken = tuple(takewhile(lambda op: spins or _writes(op), ops))
    found = replace(around, rear=(*around.rear, *taken))
    return (found, tuple(ops[len(taken) :])) if found.fits else (around, tuple(ops))


def _writes(op: MemOp) -> bool:
    return op.kind != WAIT_32


def script(
    ops: Sequence[MemOp],
    mine: Container[int],
    everyone: bool = False,
    aside: Sequence[MemOp] = (),
) -> Script:
    """What a stream would carry out, as one launch does. What is written elsewhere is seen behind
    all that comes before. With ``everyone`` each block carries out the waits at the end. For the
    writes of ``aside`` nothing waits."""
    steps = [ScriptStep(op.address, op.value, wide=op.kind == WRITE_64) for op in aside]
    told = False  # the step before writes elsewhere, too
    for op in ops:
        tells = _writes(op) and op.address not in mine
        wide, seen = op.kind == WRITE_64, tells and not told
        steps.append(ScriptStep(op.address, op.value, not _writes(op), wide, seen))
        told = tells
    shared = len(list(takewhile(lambda step: step.waits, reversed(steps)))) if everyone else 0
    return Script(tuple(steps), len(aside), len(steps) - shared)
