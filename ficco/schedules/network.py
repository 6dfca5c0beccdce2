"""What ranks send to other hosts, and receive from them, piece by piece.

A rank exchanges with its rail, the ranks that have its place on the other hosts, and copies what
comes to the ranks of its own host: each byte crosses the network once per host. The blocks of an
all-to-all have one receiver each and go there directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ficco.plan.model import Step, Transfer
from ficco.problems.products import Problem
from ficco.schedules.builder import Builder
from ficco.schedules.groups import peers_in_order, targets_in_order
from ficco.schedules.space import Schedule

LANE = "network0"


class Sending(NamedTuple):
    """What travels at once, and the steps of its sender that come first."""

    moves: tuple[Transfer, ...]
    after: tuple[int, ...] = ()


def via(problem: Problem, rank: int, other: int) -> int:
    """The rank of its host with which a rank exchanges what is another's: the other one, the one on
    its rail, or itself if it is there that the network is used."""
    if problem.host(other) == problem.host(rank):
        return other
    return rank if problem.kind.blocks else problem.on_host(problem.host(rank), other)


def legs(problem: Problem, rank: int) -> Iterator[tuple[int, int]]:
    """The ranks that a rank sends to and receives from, in an order in which all do the same."""
    return far_legs(
        rank, problem.world, problem.hosts, 1 if problem.kind.blocks else problem.local_world
    )


def far_legs(rank: int, world: int, hosts: int, apart: int = 1) -> Iterator[tuple[int, int]]:
    """The same of all ranks of other hosts, or of those that are so far apart from each other."""
    far = slice(world // hosts - 1, None, apart)
    targets, sources = (order(rank, world, hosts) for order in (targets_in_order, peers_in_order))
    return zip(targets[far], sources[far], strict=True)


def returning(problem: Problem, rank: int) -> list[tuple[int, int]]:
    """The blocks that come to a rank where each host sums what its ranks have for another one, by
    sender and owner: its own from the ranks of its host and from its rail, in the order of ranks,
    then those of its rail from the ranks of its host."""
    near = [one for one in problem.ranks_of(problem.host(rank)) if one != rank]
    ways = list(legs(problem, rank))
    own = [(source, rank) for source in sorted([*near, *(source for _, source in ways)])]
    return own + [(source, owner) for owner, _ in ways for source in near]


def add_moves(
    builder: Builder,
    schedule: Schedule,
    sent: Mapping[int, Sequence[Sending]],
    received: Mapping[int, Sequence[tuple[Transfer, ...]]],
    direct: bool = False,
) -> dict[tuple[int, int], int]:
    """Add network steps for pieces by receiver and by sender, in the order of :func:`legs`; returns
    the step that brings each, by its sender and its number there. A step moves a piece both ways.

    ``direct``: pieces go to all ranks of other hosts, not to the rail alone. Then a step moves all
    that are multiplied together, so that they wait for the network's latency once: those of all
    ranks or, where groups are of neighbours, of a host. If hosts have a number of ranks that is no
    power of two, such a group has parts of hosts, or several hosts."""
    ways, count = list(zip(sent, received, strict=True)), 1
    if direct and schedule.grouping == "fused":
        count = max(len(ways), 1)
    elif direct and schedule.grouping in ("growing", "shrinking"):
        count = len(builder.peers) + 1
    sets = [ways[first : first + count] for first in range(0, len(ways), count)]
    numbers = range(max([len(some) for some in (*sent.values(), *received.values())], default=0))
    turns = [(number, some) for number in numbers for some in sets]
    if schedule.order == "peer":
        turns = [(number, some) for some in sets for number in numbers]
    brought: dict[tuple[int, int], int] = {}
    for number, some in turns:
        at = slice(number, number + 1)
        out = [(target, piece) for target, _ in some for piece in sent[target][at]]
        coming = [(source, moves) for _, source in some for moves in received[source][at]]
        if not (out or coming):
            continue
        labels = [f"{number}>{_ranks(target for target, _ in out)}"] if out else []
        labels += [f"{_ranks(source for source, _ in coming)}.{number}"] if coming else []
        after = dict.fromkeys(chain.from_iterable(piece.after for _, piece in out))
        moves = (*(piece.moves for _, piece in out), *(moves for _, moves in coming))
        step = Step("network", LANE, " ".join(labels), after=tuple(after))
        index = builder.add(step._replace(moves=tuple(chain.from_iterable(moves))))
        brought |= {(source, number): index for source, _ in coming}
    return brought


def _ranks(ranks: Iterable[int]) -> str:
    first, *rest = sorted(ranks)
    return f"{first}..{rest[-1]}" if rest else str(first)
