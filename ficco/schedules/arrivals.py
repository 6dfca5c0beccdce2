"""In which order, groups and places the pieces of its peers arrive at a rank.

Both sides of a transfer derive it from the same facts: the receiver to know what to multiply, the
sender to know when to send a piece and where it lands.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ficco.plan.model import Region
from ficco.problem import Problem
from ficco.schedules.space import Schedule

#: Boundaries between pieces fall on multiples of this where the pieces are long enough: 16 bytes
#: of the narrowest dtype, which library GEMMs want of their operands.
GRANULE = 8


class Unit(NamedTuple):
    """One piece of one shard: ``[start, stop)`` of its rows (1D) or of its columns (2D)."""

    peer: int
    ordinal: int  # counts the pieces of this shard in their order of arrival
    start: int
    stop: int
    group: int  # of those that the receiver multiplies together


def cut(length: int, pieces: int | tuple[int, ...]) -> list[tuple[int, int]]:
    """``[0, length)`` in pieces of equal or given relative sizes, none of them empty.

    >>> cut(100, 4)
    [(0, 24), (24, 48), (48, 72), (72, 100)]
    >>> cut(64, (4, 2, 2)), cut(3, 8), cut(0, 4)
    ([(0, 32), (32, 48), (48, 64)], [(0, 1), (1, 2), (2, 3)], [])
    """
    weights = pieces if isinstance(pieces, tuple) else (1,) * min(pieces, max(length, 1))
    granule = GRANULE if length >= 2 * GRANULE * len(weights) else 1
    total = sum(weights)
    parts = accumulate(weights)
    bounds = [min(length, round(length * part / (total * granule)) * granule) for part in parts]
    bounds[-1] = length
    return [(a, b) for a, b in zip([0, *bounds], bounds, strict=False) if a < b]


def siblings(rank: int, world: int) -> list[range]:
    """Neighbouring ranges of ranks, nearest first, that grow rank to the whole world.

    >>> siblings(5, 8)
    [range(4, 5), range(6, 8), range(0, 4)]
    >>> siblings(2, 3)
    [range(0, 2)]
    """
    low, high = 0, world
    path: list[range] = []
    while high - low > 1:
        middle = low + (1 << ((high - low - 1).bit_length() - 1))
        left, right = range(low, middle), range(middle, high)
        path.append(right if rank < middle else left)
        low, high = (low, middle) if rank < middle else (middle, high)
    return path[::-1]


def peers_in_order(rank: int, world: int) -> list[int]:
    """Peers in an order in which every rank receives from another peer at any time.

    A hypercube (``rank ^ i``) where the world is a power of two, else a rotation.

    >>> peers_in_order(1, 4), peers_in_order(1, 3)
    ([0, 3, 2], [0, 2])
    """
    if world & (world - 1) == 0:
        return [rank ^ i for i in range(1, world)]
    return [(rank - i) % world for i in range(1, world)]


class Arrivals:
    """The groups of units that one rank multiplies, in order."""

    def __init__(self, problem: Problem, schedule: Schedule, rank: int) -> None:
        self.problem, self.schedule, self.rank = problem, schedule, rank
        world = problem.world
        order = peers_in_order(rank, world)
        rank_sets: list[list[int]]
        if schedule.grouping == "fused":
            rank_sets = [order]
        elif schedule.grouping == "unfused":
            rank_sets = [[peer] for peer in order]
        else:
            turn = {peer: i for i, peer in enumerate(order)}
            rank_sets = [sorted(s, key=turn.__getitem__) for s in siblings(rank, world)]
            if schedule.grouping == "shrinking":
                rank_sets.reverse()
        if schedule.uniform:
            fused = schedule.grouping == "fused"
            rank_sets = [[rank, *order]] if fused else [[rank], *rank_sets]
        self.sets = [s for s in rank_sets if s]
        self.set_of = {peer: i for i, s in enumerate(self.sets) for peer in s}
        self.place_in_set = {peer: i for s in self.sets for i, peer in enumerate(s)}
        self._cuts: dict[int, list[tuple[int, int]]] = {}
        self.rounds = max((len(self.cuts(p)) for s in self.sets for p in s), default=0)
        self.regular = len(self.sets) * self.rounds  # groups before the tail cuts the last one
        ends = [self.cuts(p)[-1] for p in self.sets[-1] if self.cuts(p)] if self.sets else []
        #: In how many the last group is cut, which short pieces do not allow for as many as asked.
        self.tail = max((len(cut(b - a, schedule.tail)) for a, b in ends), default=1) or 1
        self.groups = self.regular + (self.tail - 1 if self.regular else 0)
        self._units: dict[int, list[Unit]] = {}

    def cuts(self, peer: int) -> list[tuple[int, int]]:
        """Pieces of a peer's shard, along the dimension that is cut."""
        rows = self.problem.rows[peer]
        if rows not in self._cuts:
            length = rows if self.schedule.dims == 1 else self.problem.k
            whole = [(0, length)]  # without columns, the product is still due: zeros
            pieces = cut(length, self.schedule.pieces or self.problem.world) or whole
            self._cuts[rows] = pieces if rows else []
        return self._cuts[rows]

    def units(self, peer: int) -> list[Unit]:
        """All units of a peer, in order of arrival."""
        if peer not in self._units:
            first, stride = self.set_of[peer], len(self.sets)
            if self.schedule.order == "peer":
                first, stride = first * self.rounds, 1
            found = [
                Unit(peer, i, start, stop, first + i * stride)
                for i, (start, stop) in enumerate(self.cuts(peer))
            ]
            if self.schedule.tail > 1 and found and found[-1].group == self.regular - 1:
                last = found.pop()
                length = last.stop - last.start
                found += [
                    Unit(
                        peer,
                        last.ordinal + i,
                        last.start + a,
                        last.start + b,
                        last.group + i,
                    )
                    for i, (a, b) in enumerate(cut(length, self.schedule.tail) or [(0, 0)])
                ]
            self._units[peer] = found
        return self._units[peer]

    def rows(self, unit: Unit) -> tuple[int, int]:
        """Rows of the gathered A that a unit holds."""
        first = self.problem.offsets[unit.peer]
        if self.schedule.dims == 2:
            return first, first + self.problem.rows[unit.peer]
        return first + unit.start, first + unit.stop

    def in_shard(self, buffer: str, unit: Unit) -> Region:
        """Where a unit lies in its shard, or in the published copy of that."""
        if self.schedule.dims == 2:
            rows = self.problem.rows[unit.peer]
            return Region(buffer, unit.peer, 0, rows, unit.start, unit.stop)
        return Region(buffer, unit.peer, unit.start, unit.stop, 0, self.problem.k)

    @cached_property
    def by_group(self) -> list[list[Unit]]:
        """The units of every group, in order of arrival."""
        groups: list[list[Unit]] = [[] for _ in range(self.groups)]
        for members in self.sets:
            for peer in members:
                for unit in self.units(peer):
                    groups[unit.group].append(unit)
        return groups
