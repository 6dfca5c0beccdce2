"""Waits and writes of words on a stream, and which of them a kernel in between can see to."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from ficco.hip_kernels import MAX_SIGNALS, Script, ScriptStep, Signals

#: Kinds of MemOp, as CUDA's driver calls them.
WAIT_32, WRITE_32, WRITE_64 = "WAIT_VALUE_32", "WRITE_VALUE_32", "WRITE_VALUE_64"


class MemOp(NamedTuple):
    """A wait for a 32-bit word to equal a value, or a write of a 32-bit or 64-bit word."""

    kind: str
    address: int
    value: int


def with_front(
    signals: Signals, ops: Sequence[MemOp], mine: Container[int]
) -> tuple[tuple[MemOp, ...], Signals]:
    """Leave to a launch of copies what is written in front of it: it has no need to wait for
    that. Words at addresses of this rank's own are cleared, before any peer's is posted. Returns
    what stays in front, and what the launch sees to."""
    behind = list(takewhile(lambda op: op.kind == WRITE_32, reversed(ops)))
    if len(behind) + signals.count > MAX_SIGNALS:
        return tuple(ops), signals
    stays, writes = tuple(ops[: len(ops) - len(behind)]), behind[::-1]
    clears = _words([op for op in writes if op.address in mine])
    posts = _words([op for op in writes if op.address not in mine])
    return stays, replace(
        signals, clears=(*clears, *signals.clears), posts=(*posts, *signals.posts)
    )


def with_rear(
    signals: Signals, ops: Sequence[MemOp], spins: bool
) -> tuple[Signals, tuple[MemOp, ...]]:
    """Leave to a launch of copies what is written right behind it and, if it may spin, what is
    waited for then. Returns what the launch sees to, and what stays behind."""
    writes = [] if signals.waits else list(takewhile(lambda op: op.kind == WRITE_32, ops))
    waits = list(takewhile(lambda op: spins and op.kind == WAIT_32, ops[len(writes) :]))
    seen = [*writes, *waits]
    if len(seen) + signals.count > MAX_SIGNALS:
        return signals, tuple(ops)
    posts, awaited = (*signals.posts, *_words(writes)), (*signals.waits, *_words(waits))
    return replace(signals, posts=posts, waits=awaited), tuple(ops[len(seen) :])


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
        waits, tells = op.kind == WAIT_32, op.kind != WAIT_32 and op.address not in mine
        wide, behind = op.kind == WRITE_64, tells and not told
        steps.append(ScriptStep(op.address, op.value, waits, wide, behind))
        told = tells
    shared = len(list(takewhile(lambda step: step.waits, reversed(steps)))) if everyone else 0
    return Script(tuple(steps), len(aside), len(steps) - shared)


def _words(ops: Sequence[MemOp]) -> tuple[tuple[int, int], ...]:
    return tuple((op.address, op.value) for op in ops)
