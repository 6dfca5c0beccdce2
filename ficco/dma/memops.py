"""Waits and writes of words on a stream, and which of them a kernel launch can carry out."""

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
        """Address and value of each 32-bit word, in the order in which they are written."""
        if self.kind != WRITE_64:
            return ((self.address, self.value),)
        return (self.address + 4, self.value >> 32), (self.address, self.value & 0xFFFFFFFF)


@dataclass(frozen=True)
class Around:
    """Waits and writes that a launch carries out around its work.

    Attributes:
        begin: writes at the start of the launch. No other operation is ordered after them.
        front: carried out before any of the work. Every block carries out the waits at the end of
            ``front``; one block carries out the operations before them.
        rear: carried out once, after all of the work.
    """

    begin: tuple[MemOp, ...] = ()
    front: tuple[MemOp, ...] = ()
    rear: tuple[MemOp, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether one launch has room for the operations."""
        return max(len(self.begin) + len(self.front), len(self.rear)) <= MAX_SIGNALS

    def signals(self, arrived: int, mine: Container[int]) -> Signals:
        """Arguments of a launch; ``mine`` are addresses of this rank's own words."""
        front = script(self.front, mine, everyone=True, aside=self.begin)
        return Signals(arrived, front, script(self.rear, mine))


def in_front(
    ops: Sequence[MemOp], around: Around, mine: Container[int], spins: bool
) -> tuple[tuple[MemOp, ...], Around]:
    """Fold the operations before a launch of copies into it: writes go after its work, since the
    copies need not wait for them; waits go before its work if the launch may spin (``spins``). This
    rank's own words (``mine``) are written before words of peers. Returns the operations that stay
    on the stream before the launch, and those that the launch carries out."""
    # Writes do not move past waits of the launch: a peer may have to see them first.
    writes = [] if around.front else list(takewhile(_writes, reversed(ops)))[::-1]
    rest = ops[: len(ops) - len(writes)]
    waits = list(takewhile(lambda op: spins and not _writes(op), reversed(rest)))[::-1]
    own = [op for op in writes if op.address in mine]
    others = [op for op in writes if op.address not in mine]
    rear_own = list(takewhile(lambda op: _writes(op) and op.address in mine, around.rear))
    rear = (*own, *rear_own, *others, *around.rear[len(rear_own) :])
    folded = replace(around, front=(*waits, *around.front), rear=rear)
    if not folded.fits:
        return tuple(ops), around
    return tuple(rest[: len(rest) - len(waits)]), folded


def behind(ops: Sequence[MemOp], around: Around, spins: bool) -> tuple[Around, tuple[MemOp, ...]]:
    """Fold the operations after a launch of copies into it, but none from the first wait on if the
    launch may not spin. Returns all that the launch carries out, and the rest."""
    taken = tuple(takewhile(lambda op: spins or _writes(op), ops))
    folded = replace(around, rear=(*around.rear, *taken))
    return (folded, tuple(ops[len(taken) :])) if folded.fits else (around, tuple(ops))


def _writes(op: MemOp) -> bool:
    return op.kind != WAIT_32


def script(
    ops: Sequence[MemOp],
    mine: Container[int],
    everyone: bool = False,
    aside: Sequence[MemOp] = (),
) -> Script:
    """Waits and writes of a stream as a script of one launch, after the writes ``aside``, which no
    other step is ordered after. With ``everyone`` every block carries out the waits at the end.

    A run of writes to peers (words that are not in ``mine``) becomes visible after all writes
    before it: its first write is a release.
    """
    steps = [ScriptStep(op.address, op.value, wide=op.kind == WRITE_64) for op in aside]
    released = False  # the step before writes to a peer, too
    for op in ops:
        to_peer = _writes(op) and op.address not in mine
        wide, release = op.kind == WRITE_64, to_peer and not released
        steps.append(ScriptStep(op.address, op.value, not _writes(op), wide, release))
        released = to_peer
    shared = len(list(takewhile(lambda step: step.waits, reversed(steps)))) if everyone else 0
    return Script(tuple(steps), len(aside), len(steps) - shared)
