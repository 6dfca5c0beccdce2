"""Expresses moves between hosts as copies and signals, for the proof and the simulator.

A network step becomes a signal to each receiver that the data are ready, a copy from each sender
after that sender's signal, and a signal back to the waiting sender. No library is stricter.
Sends run in order, and so do receives. A step may send before an earlier step has received, and
receive before its turn, because an engine may post all its receives at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ficco.plan.model import Crossing, Plan, Signal, Step, Transfer

#: The mover of copies that replace moves.
MOVER = "network"

#: Moves by sender and receiver, in order.
Moves = dict[tuple[int, int], list[Transfer]]


def networked(plans: Sequence[Plan]) -> list[Plan]:
    """Replace the network steps in the Plans of all ranks.

    Raises:
        ValueError: the moves of a sender and a receiver differ, or a move has a wrong end.
    """
    sent, received = _moves(plans)
    if sent != received:
        ends = next(pair for pair in {**sent, **received} if sent.get(pair) != received.get(pair))
        raise ValueError(f"rank {ends[0]} sends other pieces than rank {ends[1]} receives")
    if not sent:
        return list(plans)
    words = _Words([plans[0].words] * plans[0].problem.world, sent)
    taken = [_without(plan, words) for plan in plans]
    most = max(words.next.values())
    return [replace(plan, words=most) for plan in taken]


def _moves(plans: Sequence[Plan]) -> tuple[Moves, Moves]:
    """Sent and received moves of all ranks, by sender and receiver."""
    sent: Moves = {}
    received: Moves = {}
    for plan in plans:
        for step in plan.steps:
            moves = step.work.moves if isinstance(step.work, Crossing) else None
            by_network = isinstance(step.work, Transfer) and step.work.mover == MOVER
            if by_network or moves == () or (moves and not step.whole):
                why = "does not move between hosts as a plan may"
                raise ValueError(f"rank {plan.rank} step {step.label!r} {why}")
            for move in moves or ():
                ends = move.src.rank, move.dst.rank
                if plan.rank not in ends or ends[0] == ends[1]:
                    raise ValueError(f"rank {plan.rank} step {step.label!r} moves between {ends}")
                (sent if plan.rank == ends[0] else received).setdefault(ends, []).append(move)
    return sent, received


class _Words:
    """The signals of all moves: the data are ready, the data were taken. Their words follow the
    words of the Plan."""

    def __init__(self, words: Sequence[int], sent: Moves) -> None:
        self.next = dict(enumerate(words))
        self.ready, self.taken = {}, {}
        for (source, target), moves in sent.items():
            self.ready[source, target] = self._block("there", source, target, len(moves))
            self.taken[source, target] = self._block("taken", target, source, len(moves))

    def _block(self, kind: str, poster: int, waiter: int, count: int) -> list[Signal]:
        first = self.next[waiter]
        self.next[waiter] += count
        return [Signal(kind, poster, waiter, i, first + i) for i in range(count)]


def _without(plan: Plan, words: _Words) -> Plan:
    steps: list[Step] = []
    became: list[int] = []
    turns: dict[tuple[int, int], int] = {}
    for step in plan.steps:
        after = tuple(became[i] for i in step.after if 0 <= i < len(became))
        if len(after) < len(step.after):
            raise ValueError(f"rank {plan.rank} step {step.label!r} comes after no earlier step")
        step = step._replace(after=after)
        if isinstance(step.work, Crossing):
            steps += _written(plan.rank, len(steps), step, step.work.moves, words, turns)
        else:
            steps.append(step)
        became.append(len(steps) - 1)
    return replace(plan, steps=tuple(steps))


def _written(
    rank: int,
    at: int,
    step: Step,
    moves: Iterable[Transfer],
    words: _Words,
    turns: dict[tuple[int, int], int],
) -> list[Step]:
    """The steps that replace a network step; the first has the number ``at``."""
    ready, taken, copies, thanks = [], [], [], []
    bare = Step(None, step.lane, step.label)
    inward, over = (bare._replace(lane=f"{step.lane}/{name}") for name in ("in", "over"))
    for move in moves:
        ends = move.src.rank, move.dst.rank
        turn = turns[ends] = turns.get(ends, -1) + 1
        come, gone = words.ready[ends][turn], words.taken[ends][turn]
        copy = inward._replace(work=move._replace(mover=MOVER))
        if rank == ends[0]:
            ready.append(come)
            taken.append(gone)
        else:
            waits = (come,)
            copies.append(copy._replace(waits=waits, clears=waits))
            thanks.append(gone)
    begin = bare._replace(
        waits=step.waits, clears=step.clears, after=step.after, posts=tuple(ready)
    )
    done = inward._replace(posts=tuple(thanks))
    sent = bare._replace(waits=tuple(taken), clears=tuple(taken))
    both = at + len(copies) + 1, at + len(copies) + 2
    return [begin, *copies, done, sent, over._replace(after=both, posts=step.posts)]
