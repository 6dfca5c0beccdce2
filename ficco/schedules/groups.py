"""Order and groups of the pieces that arrive at a rank or leave it.

Sender and receiver compute the same order from the problem and the schedule. So the sender knows
the order of sending and where each piece lands, and the receiver knows which pieces to multiply
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

from ficco.plan.model import Region, new
from ficco.problems.products import Problem
from ficco.problems.specification import AnyProblem, Buffer
from ficco.schedules.builder import World, remembered
from ficco.schedules.space import Schedule

#: Boundaries between pieces are multiples of this if the pieces are long enough: 16 bytes of
#: bfloat16, the alignment that library GEMMs want.
GRANULE = 8

T = TypeVar("T")


class Unit(NamedTuple):
    """One piece of one shard or block: ``[start, stop)`` of its rows (1D) or its columns (2D)."""

    peer: int  # the rank whose shard it is, or whom the block is for
    ordinal: int  # index of the piece in this shard or block
    start: int
    stop: int
    group: int  # units of one group are multiplied together


def cut(length: int, pieces: int | tuple[int, ...], least: int = 1) -> list[tuple[int, int]]:
    """Cut ``[0, length)`` into pieces of equal or given relative sizes, none of them empty, at
    multiples of ``least``.

    >>> cut(100, 4)
    [(0, 24), (24, 48), (48, 72), (72, 100)]
    >>> cut(64, (4, 2, 2)), cut(3, 8), cut(0, 4)
    ([(0, 32), (32, 48), (48, 64)], [(0, 1), (1, 2), (2, 3)], [])
    >>> cut(50, 4, least=16)
    [(0, 16), (16, 32), (32, 50)]
    """
    weights = pieces if isinstance(pieces, tuple) else (1,) * min(pieces, max(length, 1))
    granule = max(GRANULE, least)
    granule = granule if length >= 2 * granule * len(weights) else least
    total = sum(weights)
    parts = accumulate(weights)
    bounds = [min(length, round(length * part / (total * granule)) * granule) for part in parts]
    bounds[-1] = length
    return [(a, b) for a, b in zip([0, *bounds], bounds, strict=False) if a < b]


def siblings(rank: int, world: int) -> list[range]:
    """Neighbouring ranges of ranks, nearest first, that together extend a rank to the whole world.

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


def peers_in_order(rank: int, world: int, hosts: int = 1) -> list[int]:
    """Peers in an order such that at any time all ranks receive from different peers.

    The order is a hypercube (``rank ^ i``) if a host has a power of two of ranks, else a rotation.
    Peers on other hosts follow, nearest host first, and in each host the rank on the same rail
    first. :func:`targets_in_order` is the order in which a rank sends.

    >>> peers_in_order(1, 4), peers_in_order(1, 3), peers_in_order(1, 6, hosts=3)
    ([0, 3, 2], [0, 2], [0, 5, 4, 3, 2])
    """
    return _in_turn(rank, world, hosts, -1)[1:]


def peers_from_halfway(rank: int, world: int) -> list[int]:
    """Order of peers for masks that let ranks send and receive different numbers of rows.

    Such ranks get out of step, and several send to one rank at a time. In each range of
    :func:`siblings` the peer half way round comes first, then lower peers, then higher peers. Under
    a causal mask the last rows arrive earlier than in :func:`peers_in_order`, as simulated
    (docs/results/attention.md). If ``world`` is not a power of two, the result is
    :func:`peers_in_order`.

    >>> peers_from_halfway(0, 8), peers_from_halfway(5, 8), peers_from_halfway(1, 3)
    ([1, 3, 2, 6, 5, 4, 7], [4, 6, 7, 3, 2, 1, 0], [0, 2])
    """
    if world & (world - 1):
        return peers_in_order(rank, world)
    order: list[int] = []
    for peers in siblings(rank, world):
        half, count = len(peers) // 2, len(peers)
        order += sorted(peers, key=lambda peer: (half - peer + rank) % count)
    return order


def targets_in_order(rank: int, world: int, hosts: int = 1) -> list[int]:
    """Peers in the order in which a rank sends to them if all follow :func:`peers_in_order`.

    >>> targets_in_order(1, 4), targets_in_order(1, 3), targets_in_order(1, 6, hosts=3)
    ([0, 3, 2], [2, 0], [0, 3, 2, 5, 4])
    """
    return _in_turn(rank, world, hosts, 1)[1:]


@lru_cache(maxsize=4096)
def _in_turn(rank: int, world: int, hosts: int, way: int) -> list[int]:
    """All ranks, ``rank`` first, by growing distance in the direction ``way`` (1 or -1)."""
    local = world // hosts
    host, place = divmod(rank, local)
    cube = local & (local - 1) == 0
    places = [place ^ i if cube else (place + way * i) % local for i in range(local)]
    starts = [(host + way * i) % hosts * local for i in range(hosts)]
    return [start + other for start in starts for other in places]


def via(problem: Problem, rank: int, other: int) -> int:
    """The rank of ``rank``'s host that exchanges pieces with ``other``: on the same host ``other``
    itself, else the rank on the rail of ``other``, or ``rank`` if blocks cross hosts directly."""
    if problem.host(other) == problem.host(rank):
        return other
    return rank if problem.kind.blocks else problem.on_host(problem.host(rank), other)


def legs(problem: Problem, rank: int) -> Iterator[tuple[int, int]]:
    """Pairs (target, source) of ranks on other hosts that a rank exchanges pieces with, in order.
    At each position of the order every rank sends to one rank and receives from one."""
    return far_legs(problem, rank, 1 if problem.kind.blocks else problem.local_world)


def far_legs(problem: AnyProblem, rank: int, apart: int = 1) -> Iterator[tuple[int, int]]:
    """Pairs (target, source) as in :func:`legs`: every ``apart``-th rank of the other hosts."""
    far, where = slice(problem.local_world - 1, None, apart), (problem.world, problem.hosts)
    targets, sources = (order(rank, *where) for order in (targets_in_order, peers_in_order))
    return zip(targets[far], sources[far], strict=True)


def sources_of(problem: AnyProblem, rank: int) -> list[int]:
    """All peers in the order in which a rank receives from them: :func:`peers_in_order`."""
    return peers_in_order(rank, problem.world, problem.hosts)


def near_targets(problem: AnyProblem, rank: int) -> list[int]:
    """The peers of a rank's host in the order in which it sends: :func:`targets_in_order`."""
    return targets_in_order(rank, problem.world, problem.hosts)[: problem.local_world - 1]


def returning(problem: Problem, rank: int) -> list[tuple[int, int]]:
    """Blocks that arrive at a rank, as (sender, owner): own blocks in the order of ranks. If hosts
    sum before they cross, these come from its host and from its rail; then blocks of owners on its
    rail, which the rank sums, come from its host."""
    near = [one for one in problem.ranks_of(problem.host(rank)) if one != rank]
    ways = list(legs(problem, rank))
    own = [(source, rank) for source in sorted([*near, *(source for _, source in ways)])]
    relayed = [] if problem.kind.blocks else ways
    return own + [(source, owner) for owner, _ in relayed for source in near]


def host_sums(
    world: World, like: Buffer, rows: Callable[[int, int], tuple[int, int]], leaves: bool = False
) -> dict[int, Buffer]:
    """Add the buffers of sums that a rank forms of its host's rows for another host, by distance of
    the hosts. ``rows`` returns first and last row of an owner at a rank."""
    problem, ranks, buffers = world.problem, range(world.world), dict[int, Buffer]()
    for distance in range(1, problem.hosts) if problem.local_world > 1 else ():
        owners = [problem.on_host(problem.host(rank) + distance, rank) for rank in ranks]
        spans = [rows(owner, rank) for owner, rank in zip(owners, ranks, strict=True)]
        shapes = tuple((last - first, like.shapes[0][1]) for first, last in spans)
        fields = {"first": tuple(first for first, _ in spans), "leaves": leaves}
        name = f"host sum {distance}"
        buffers[distance] = world.buffer(name, like, shapes, "local", **fields)
    return buffers


def peer_sets(schedule: Schedule, rank: int, order: list[int]) -> list[list[int]]:
    """Sets of peers whose pieces are multiplied together, from peers in a given order."""
    if schedule.grouping == "fused":
        return [order]
    if schedule.grouping in ("unfused", "tiled"):
        return [[peer] for peer in order]
    turn = {peer: i for i, peer in enumerate(order)}
    sets = [sorted(s, key=turn.__getitem__) for s in siblings(rank, len(order) + 1)]
    return sets[::-1] if schedule.grouping == "shrinking" else sets


@lru_cache(maxsize=4096)
def names(peer: int, count: int) -> tuple[str, ...]:
    """Names of the units of a shard or block for labels of steps: ``peer.ordinal``, in order."""
    return tuple([f"{peer}.{ordinal}" for ordinal in range(count)])


class Groups:
    """The pieces of all shards or blocks, in the order and the groups that one rank multiplies.

    Attributes:
        columns: columns of the matrix that travels.
        block: function from a peer to the rows of its shard or block.
        sets: sets of ranks whose pieces share groups.
        set_of, place_in_set: by rank, the number of its set and its position in the set.
        cuts: by rank, bounds of the pieces of its shard or block, along the dimension that is cut.
        rounds: maximum number of pieces of a shard or block.
        regular: number of groups before the tail cuts the last one.
        group_count: number of groups.
        tail: number of groups that the last group is cut into. It is smaller than the schedule's
            tail if the pieces are short.
    """

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        rank: int,
        sets: list[list[int]],
        tail: int,
        columns: int,
        block: Callable[[int], int],
    ) -> None:
        self.problem, self.schedule, self.rank = problem, schedule, rank
        self.columns, self.block, self.least = columns, block, problem.cuts[schedule.dims - 1]
        self.sets = [s for s in sets if s]
        self.set_of = {peer: i for i, s in enumerate(self.sets) for peer in s}
        self.place_in_set = {peer: i for s in self.sets for i, peer in enumerate(s)}
        heights = dict.fromkeys(self.set_of, block(rank))
        if not problem.same_blocks:
            heights = {peer: block(peer) for peer in self.set_of}
        pieces = {rows: self._cut(rows) for rows in set(heights.values())}
        self.cuts = {peer: pieces[rows] for peer, rows in heights.items()}
        self.rounds = max(map(len, pieces.values()), default=0)
        self.regular = len(self.sets) * self.rounds
        ends = [self.cuts[peer][-1] for s in self.sets[-1:] for peer in s if self.cuts[peer]]
        lengths = {b - a for a, b in ends}
        self.tail = max((len(cut(n, tail, self.least)) for n in lengths), default=1) or 1
        self.group_count = self.regular + (self.tail - 1 if self.regular else 0)

    def _cut(self, rows: int) -> list[tuple[int, int]]:
        length = rows if self.schedule.dims == 1 else self.columns
        whole = [(0, length)]  # without columns there is still a product: zeros
        pieces = cut(length, self.schedule.pieces or self.problem.world, self.least) or whole
        return pieces if rows else []

    @remembered
    def units(self, peer: int) -> list[Unit]:
        """All units of a peer, in order; the last one is cut by the tail if it is in the last
        group."""
        first, stride = self.set_of[peer], len(self.sets)
        if self.schedule.order == "peer":
            first, stride = first * self.rounds, 1
        units = [
            new(Unit, (peer, i, start, stop, first + i * stride))
            for i, (start, stop) in enumerate(self.cuts[peer])
        ]
        if self.tail > 1 and units and units[-1].group == self.regular - 1:
            units += finer(units.pop(), self.schedule.tail, self.least)
        return units

    def count(self, peer: int) -> int:
        """Number of units of a peer."""
        return len(self.cuts[peer] if self.tail == 1 else self.units(peer))

    def size(self, unit: Unit) -> tuple[int, int]:
        """Rows and columns of a unit."""
        length = unit.stop - unit.start
        return (
            (length, self.columns) if self.schedule.dims == 1 else (self.block(unit.peer), length)
        )

    def regions(self, buffer: str, rank: int, row: int, units: list[Unit]) -> list[Region]:
        """The regions of units of one block, which begins at ``row`` of the buffer."""
        if self.schedule.dims == 1:
            cols = self.columns
            return [
                new(Region, (buffer, rank, row + a, row + b, 0, cols)) for _, _, a, b, _ in units
            ]
        stop = row + self.block(units[0].peer) if units else row
        return [new(Region, (buffer, rank, row, stop, *cols)) for _, _, *cols, _ in units]

    def spans(self, row: int, units: list[Unit]) -> list[tuple[int, int]]:
        """Row bounds of each unit of a block from ``row`` on; all rows if columns are cut."""
        if self.schedule.dims == 2:
            return [(row, row + self.block(unit.peer)) for unit in units[:1]] * len(units)
        return [(row + first, row + last) for _, _, first, last, _ in units]

    @cached_property
    def by_group(self) -> list[list[Unit]]:
        """The units of every group."""
        return self.in_groups({peer: self.units(peer) for peer in self.set_of})

    def in_groups(self, of_units: Mapping[int, Sequence[T]]) -> list[list[T]]:
        """Items by group. ``of_units`` has one item for each unit, by peer; the order of peers in
        ``of_units`` is the order within a group."""
        groups: list[list[T]] = [[] for _ in range(self.group_count)]
        for peer, column in of_units.items():
            for unit, one in zip(self.units(peer), column, strict=True):
                groups[unit.group].append(one)
        return groups


def finer(unit: Unit, pieces: int, least: int = 1) -> list[Unit]:
    """A unit, cut into ``pieces`` parts. Ordinals and groups of the parts are consecutive."""
    peer, ordinal, start, stop, group = unit
    cuts = cut(stop - start, pieces, least) or [(0, 0)]
    return [
        Unit(peer, ordinal + i, start + a, start + b, group + i) for i, (a, b) in enumerate(cuts)
    ]


class Arrivals(Groups):
    """Shards of A in the order in which one rank receives and multiplies them."""

    def __init__(self, problem: Problem, schedule: Schedule, rank: int) -> None:
        order = sources_of(problem, rank)
        if problem.masked and problem.hosts == 1:
            order = peers_from_halfway(rank, problem.world)
        sets = peer_sets(schedule, rank, order)
        if schedule.grouping == "ring":  # shards come from the left one after the other
            sets = [[(rank - 1 - i) % problem.world] for i in range(problem.world - 1)]
        if schedule.uniform:
            fused = schedule.grouping == "fused"
            sets = [[rank, *order]] if fused else [[rank], *sets]
        tail, columns = schedule.tail, problem.k
        super().__init__(
            problem, schedule, rank, sets, tail, columns, lambda peer: problem.block(peer, rank)
        )

    @remembered
    def gathered(self, peer: int) -> list[Region]:
        """The regions of a peer's units in the gathered A, in order."""
        first = self.problem.lands(peer, self.rank)
        return self.regions("gathered", self.rank, first, self.units(peer))

    def in_shard(self, buffer: str, peer: int) -> list[Region]:
        """The regions of units in their rank's operand, or in its published copy, in order."""
        return self.regions(buffer, peer, self.problem.leaves(peer, self.rank), self.units(peer))


class Departures(Groups):
    """Blocks of a product in the order in which one rank multiplies and sends them; its own block
    is last."""

    def __init__(self, problem: Problem, schedule: Schedule, rank: int) -> None:
        world = problem.world
        if schedule.grouping == "ring":  # blocks from the left go on to the right
            sets = [[(rank - 1 - i) % world] for i in range(world - 1)]
        else:
            order = targets_in_order(rank, world, problem.hosts)
            local = problem.local_world - 1  # pieces that peers relay to other hosts come first
            sets = peer_sets(schedule, rank, order[local:] + order[:local])
        if schedule.uniform:
            fused = schedule.grouping == "fused"
            sets = [[*sets[0], rank]] if fused else [*sets, [rank]]
        tail = schedule.tail if schedule.uniform else 1
        block = partial(problem.block, rank)
        super().__init__(problem, schedule, rank, sets, tail, problem.n, block)

    @cached_property
    def own(self) -> list[Unit]:
        """The units of the own block. If it has a separate product, that is one unit, cut by the
        tail."""
        if self.schedule.uniform:
            return self.units(self.rank)
        rows = self.block(self.rank)
        if not rows:
            return []
        length = rows if self.schedule.dims == 1 else self.columns
        whole = Unit(self.rank, 0, 0, length, self.group_count)
        return finer(whole, self.schedule.tail, self.least)

    @cached_property
    def sums(self) -> list[Unit]:
        """The parts in which the own block is summed and, in an all-reduce, sent back: the units of
        :attr:`own`. Over several hosts these are cut into about as many parts as a block has
        pieces, so that only the last part waits for the last arrival."""
        if self.schedule.uniform or self.problem.hosts == 1 or not self.problem.kind.sums:
            return self.own
        parts = -(-self.rounds // max(len(self.own), 1)) or 1
        finest = [part for unit in self.own for part in finer(unit, parts, self.least)]
        return [one._replace(ordinal=i, group=self.group_count) for i, one in enumerate(finest)]

    def of(self, peer: int) -> list[Unit]:
        """The units of a peer's block, or of the own block, in order."""
        return self.own if peer == self.rank else self.units(peer)

    def in_operand(self, buffer: str, peer: int) -> list[Region]:
        """The rows of A that are multiplied for each unit of a rank, in order."""
        rows = self.spans(self.problem.leaves(self.rank, peer), self.of(peer))
        return [new(Region, (buffer, self.rank, *each, 0, self.problem.k)) for each in rows]
