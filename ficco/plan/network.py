"""Writes what goes between hosts as steps that the proof knows.

A network step becomes a signal to each receiver that the data are there, a copy of what each sender
has, once that has said so, and a signal back, without which a sender does not go on. No library
asks for more. Sends follow each other, and so do receives, but a step may send before an earlier
one has received, and receive before its turn: an engine may say at once what it expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ficco.plan.model import Plan, Signal, Step, Transfer

#: The mover of the copies that stand for moves.
MOVER = "network"

#: By sender and receiver, what goes from one to the other, in order.
Moves = dict[tuple[int, int], list[Transfer]]


def networked(plans: Sequence[Plan]) -> list[Plan]:
    """The Plans of all ranks without network steps.

    Raises:
        ValueError: what one rank sends is not what another receives, or a move has a wrong end.
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
    """What ranks send and receive, by sender and receiver."""
    sent: Moves = {}
    received: Moves = {}
    for plan in plans:
        for step in plan.steps:
            other = step.transfer or step.products or step.reduction or not step.whole
            network = step.op == "network"
            if bool(step.moves) != network or (network and other) or step.mover == MOVER:
                what = "holds what its operation does not"
                raise ValueError(f"rank {plan.rank} step {step.label!r} {what}")
            for move in step.moves:
                ends = move.src.rank, move.dst.rank
                if plan.rank not in ends or ends[0] == ends[1]:
                    raise ValueError(f"rank {plan.rank} step {step.label!r} moves between {ends}")
                (sent if plan.rank == ends[0] else received).setdefault(ends, []).append(move)
    return sent, received


class _Words:
    """The signals of all moves: that one is there, and that it was taken. By receiver and sender
    of a signal, they have numbers after those of the Plan."""

    def __init__(self, words: Sequence[int], sent: Moves) -> None:
        self.next = dict(enumerate(words))
        self.there, self.taken = {}, {}
        for (source, target), moves in sent.items():
            self.there[source, target] = self._block("there", source, target, len(moves))
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
        if step.op != "network":
            steps.append(step._replace(after=after))
        else:
            steps += _written(plan.rank, len(steps), step._replace(after=after), words, turns)
        became.append(len(steps) - 1)
    return replace(plan, steps=tuple(steps))


def _written(
    rank: int, at: int, step: Step, words: _Words, turns: dict[tuple[int, int], int]
) -> list[Step]:
    """The steps that stand for one, of which the first has the number ``at``."""
    there, taken, copies, thanks = [], [], [], []
    bare = Step("sync", step.lane, step.label)
    inward, over = (bare._replace(lane=f"{step.lane}/{name}") for name in ("in", "over"))
    for move in step.moves:
        ends = move.src.rank, move.dst.rank
        turn = turns[ends] = turns.get(ends, -1) + 1
        come, gone = words.there[ends][turn], words.taken[ends][turn]
        copy = inward._replace(op="copy", mover=MOVER, transfer=move)
        if rank == ends[0]:
            there.append(come)
            taken.append(gone)
        else:
            waits = (come,)
            copies.append(copy._replace(waits=waits, clears=waits))
            thanks.append(gone)
    begin = bare._replace(
        waits=step.waits, clears=step.clears, after=step.after, posts=tuple(there)
    )
    done = inward._replace(posts=tuple(thanks))
    sent = bare._replace(waits=tuple(taken), clears=tuple(taken))
    both = at + len(copies) + 1, at + len(copies) + 2
    return [begin, *copies, done, sent, over._replace(after=both, posts=step.posts)]
