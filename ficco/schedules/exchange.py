"""Transfers of an exchange of rows: copies to and from peers, network steps, relays and waits.

A :class:`Route` lists the pieces of each pair of ranks, with sources, destinations and signals.
:class:`Traffic` adds the steps of one rank for a Route. Both are independent of the computation. A
builder of Plans consists of its Routes and a computation, which gets the signals to wait for from
:meth:`Traffic.arrivals`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ficco.plan.model import Crossing, Region, Signal, Step, Transfer, new
from ficco.schedules.builder import Block, Builder, remembered
from ficco.schedules.space import Schedule

#: The lane of network steps.
LANE = "network0"

#: Groups whose copies are enqueued before the first product that waits for one. Copy engines then
#: always have work, and a GPU that waits for its host gets its first products early.
LOOKAHEAD = 2

NO_SIGNALS: tuple[Signal, ...] = ()
#: Indices of earlier steps.
After = tuple[int, ...]


class Parcel(NamedTuple):
    """A piece on its way from one rank to another.

    Attributes:
        moves: copies, the copy of the rows last, after the copy of their factors.
        labels: labels of the copies.
        waits: signals to wait for before the first copy.
        posts: signals to post after the last copy.
        turn: position in the order of copies: a group of the receiver or of the sender.
    """

    moves: tuple[Transfer, ...]
    labels: tuple[str, ...]
    waits: tuple[Signal, ...]
    posts: tuple[Signal, ...]
    turn: int


#: The other rank, the number of the piece, and the piece.
Item = tuple[int, int, Parcel]


class Route:
    """The pieces of an exchange, equal on all ranks.

    A piece has an owner: its first sender or, if the route ``returns``, its last receiver. Other
    ranks may relay the piece.

    Attributes:
        kind: kind of the signals.
        data: words of the signals.
        returns: whether the owner of a piece is its last receiver.
    """

    kind: str
    data: Block
    returns = False

    def pieces(self, src: int, dst: int, owner: int) -> Sequence[Parcel]:
        """The pieces of an owner that a rank sends to another, in order."""
        raise NotImplementedError

    def signals(self, src: int, dst: int, owner: int) -> Sequence[Signal]:
        """The signals that pieces of an owner have arrived, in order. The last relay posts them."""
        raise NotImplementedError

    def owner(self, src: int, dst: int) -> int:
        """The owner of the pieces between two ranks without a relay."""
        return dst if self.returns else src

    def gives(self, src: int, dst: int) -> bool:
        """Whether a rank has pieces for a peer."""
        return bool(self.signals(src, dst, self.owner(src, dst)))

    def posts_begun(self, src: int, dst: int) -> bool:
        """Whether a rank posts ``begun`` to a peer: by default if it has no piece for the peer."""
        return not self.gives(src, dst)

    def begun(self, poster: int, waiter: int) -> Signal:
        """The signal that the call of a rank has begun."""
        return self.data.signal(self.kind, poster, waiter)

    def read(self, poster: int, waiter: int) -> Signal:
        """The signal that a rank has fetched all pieces of a peer."""
        raise NotImplementedError


class Traffic:
    """The steps of one rank in an exchange.

    Attributes:
        brought: step of this rank that brings a piece, by sender and number of the piece.
        waited: step that waits for a signal, by word of the signal.
    """

    def __init__(self, builder: Builder, schedule: Schedule, route: Route) -> None:
        self.builder, self.schedule, self.route = builder, schedule, route
        self.me, self.peers, self.steps = builder.me, builder.peers, builder.steps
        self.brought: dict[tuple[int, int], int] = {}
        self.waited: dict[int, int] = {}

    @remembered
    def of(self, src: int, dst: int, owner: int = -1) -> Sequence[Parcel]:
        """The pieces between this rank and another, by default those without a relay."""
        return self.route.pieces(src, dst, self.route.owner(src, dst) if owner < 0 else owner)

    # Opening and closing a call.

    def announce(self) -> None:
        """Signal to peers without data of this rank that its call has begun, and wait for the
        signals of peers without data for this rank."""
        builder, route, me = self.builder, self.route, self.me
        for peer in self.peers:
            if route.posts_begun(me, peer):
                posts = builder.begun.get(peer, ())
                builder.begun[peer] = (*posts, route.begun(me, peer))
        silent = [peer for peer in self.peers if not route.gives(peer, me)]
        builder.silent += tuple(route.begun(peer, me) for peer in silent)

    def close(self) -> None:
        """Wait until the peers have fetched the pieces of this rank."""
        for lane, peers in self.builder.copy_lanes():
            reading = [peer for peer in peers if self.route.gives(self.me, peer)]
            waits = tuple(self.route.read(peer, self.me) for peer in reading)
            if waits:
                self.builder.add(Step(None, lane, "peers have read", waits=waits))

    # Copies.

    def leaving(self, targets: Iterable[int]) -> list[list[Item]]:
        """The pieces from this rank to some ranks, by turn."""
        return _by_turn((target, self.of(self.me, target)) for target in targets)

    def coming(self, sources: Iterable[int]) -> list[list[Item]]:
        """The pieces from some ranks to this rank, by turn."""
        return _by_turn((source, self.of(source, self.me)) for source in sources)

    def stream(
        self,
        count: int,
        turns: Sequence[list[Item]],
        enqueue: Callable[[int, list[Item]], None],
        ahead: int = LOOKAHEAD,
    ) -> Iterator[int]:
        """Yield the groups to consume. Before each group, ``enqueue`` is called for the copies of
        turns up to ``ahead`` turns later."""
        for group in range(-ahead, max(count, len(turns))):
            if 0 <= group < count:
                yield group
            if group + ahead < len(turns):
                enqueue(group + ahead, turns[group + ahead])

    def push(self, items: Iterable[Item], first: Callable[[int, int], After] | None = None) -> None:
        """Copy pieces to peers, the rows of all pieces last. ``first`` returns the steps before a
        piece, given its peer and its number."""
        rows: list[Step] = []
        for target, number, piece in items:
            after = first(target, number) if first else ()
            rows.append(self._copies(target, piece, after))
        self.steps += rows

    def fetch(self, items: Sequence[Item], after: After = ()) -> None:
        """Copy pieces from peers, the rows of all pieces last."""
        rows = [self._copies(source, piece, after) for source, _, piece in items]
        for index, (source, number, _) in enumerate(items, len(self.steps)):
            self.brought[source, number] = index
        self.steps += rows

    def send(
        self,
        target: int,
        number: int,
        after: After = (),
        waits: tuple[Signal, ...] = (),
        owner: int = -1,
        lane: str = "",
    ) -> None:
        """Copy a piece to a peer after steps and signals, by default on the lane of the peer.
        ``owner``: see :meth:`of`."""
        piece = self.of(self.me, target, owner)[number]
        self.steps.append(self._copies(target, piece, after, waits, lane))

    def _copies(
        self,
        peer: int,
        piece: Parcel,
        after: After = (),
        waits: tuple[Signal, ...] = (),
        lane: str = "",
    ) -> Step:
        """Add the copies of a piece except the last one, and return the last one. Only the first
        copy waits, since copies of a lane run in order."""
        moves, labels, room, posts, _ = piece
        waits += room
        lane = lane or self.builder.lane_of[peer]
        if (mover := self.schedule.mover) != "dma":
            moves = tuple([new(Transfer, (*move[:-1], mover)) for move in moves])
        if len(moves) > 1:
            for label, move in zip(labels[:-1], moves, strict=False):
                self.steps.append(Step(move, lane, label, waits, after=after))
                waits, after = (), ()
        return new(Step, (moves[-1], lane, labels[-1], waits, posts, (), after, (), (), 0))

    # Other hosts.

    def cross(
        self,
        legs: Sequence[tuple[int, int]],
        after: Callable[[int, int], After] = lambda target, number: (),
        direct: bool = True,
    ) -> None:
        """Exchange pieces with ranks of other hosts. ``legs``: pairs of a rank to send to and
        a rank to receive from. A step moves a piece both ways. ``after`` returns the steps before a
        piece leaves, given its target and its number.

        If ``direct``, pieces go to all ranks of other hosts, not only to the rail. A step then
        moves all pieces that are multiplied together, so that they wait for the network's latency
        once: the pieces of all ranks or, for groups of neighbours, of a host. If the number of
        ranks of a host is not a power of two, a group has parts of hosts, or several hosts."""
        count, grouping = 1, self.schedule.grouping
        if direct and grouping == "fused":
            count = max(len(legs), 1)
        elif direct and grouping in ("growing", "shrinking"):
            count = len(self.peers) + 1
        sent = {target: self.of(self.me, target) for target, _ in legs}
        received = {source: self.of(source, self.me) for _, source in legs}
        sets = [legs[first : first + count] for first in range(0, len(legs), count)]
        numbers = range(max(map(len, (*sent.values(), *received.values())), default=0))
        turns = [(number, pairs) for number in numbers for pairs in sets]
        if self.schedule.order == "peer":
            turns = [(number, pairs) for pairs in sets for number in numbers]
        for number, pairs in turns:
            targets = [target for target, _ in pairs if number < len(sent[target])]
            sources = [source for _, source in pairs if number < len(received[source])]
            if not (targets or sources):
                continue
            labels = [f"{number}>{_ranks(targets)}"] if targets else []
            labels += [f"{_ranks(sources)}.{number}"] if sources else []
            earlier = chain.from_iterable(after(target, number) for target in targets)
            pieces = [sent[target][number] for target in targets]
            pieces += [received[source][number] for source in sources]
            moves = tuple(chain.from_iterable(piece.moves for piece in pieces))
            once = tuple(dict.fromkeys(earlier))
            index = self.builder.add(Step(Crossing(moves), LANE, " ".join(labels), after=once))
            self.brought |= {(source, number): index for source in sources}

    def relay(self, sources: Iterable[int], targets: Sequence[int]) -> None:
        """Copy pieces from other hosts to peers, in order of arrival."""
        copies: list[tuple[int, int, Parcel]] = []
        for source in sources:
            ends = [piece.moves[-1].dst[3::2] for piece in self.of(source, self.me)]
            for target in targets:
                for piece in self.route.pieces(self.me, target, source):
                    # Pieces come in order: the one that has the last row and column comes last.
                    row, col = piece.moves[-1].src[3::2]
                    holds = (i for i, end in enumerate(ends) if end[0] >= row and end[1] >= col)
                    copies.append((self.brought[source, next(holds)], target, piece))
        for step, target, piece in sorted(copies, key=lambda copy: copy[0]):
            self.builder.add(self._copies(target, piece, (step,)))

    # Arrivals.

    def arrivals(
        self, pieces: Iterable[tuple[int, int]], lane: str, owner: int = -1
    ) -> tuple[tuple[Signal, ...], After]:
        """The signals and the earlier steps that the next step waits for before it reads pieces.

        ``pieces`` are sender and number. The next step is on ``lane``. Earlier steps are on other
        lanes and have brought a piece, or have already waited for its signal."""
        waits, after, index = list[Signal](), dict[str, int](), len(self.steps)
        me, route, brought = self.me, self.route, self.brought
        owner = me if owner < 0 and route.returns else owner
        for piece in pieces:
            step = brought.get(piece)
            if step is None:
                source, number = piece
                signal = route.signals(source, me, source if owner < 0 else owner)[number]
                step = self.waited.setdefault(signal.word, index)
                if step == index:
                    waits.append(signal)
                    continue
            on = self.steps[step].lane
            after[on] = max(step, after.get(on, step))
        after.pop(lane, None)
        return tuple(waits), tuple(after.values())

    def home(self, source: int, number: int, lane: str, place: Callable[[Region], Region]) -> None:
        """Copy a piece from staging to its final place. ``place`` returns the final region of a
        region of staging. The last move comes first: the first step waits, and the signal names the
        rows of the last move."""
        waits, after = self.arrivals([(source, number)], lane)
        for move in reversed(self.of(source, self.me)[number].moves):
            src, dst = move.dst, place(move.dst)
            label, transfer = f"{src.buffer}>{dst.buffer}", Transfer(src, dst, move.terms)
            self.builder.add(Step(transfer, lane, label, waits, after=after))
            waits, after = (), ()

    def hear(self, source: int, number: int, lane: str, label: str) -> None:
        """Add a step that waits for a piece on a lane. Later readers of the piece on other lanes
        come after this step and need not wait for the signal."""
        waits, after = self.arrivals([(source, number)], lane)
        step = Step(None, lane, label, waits, after=after)
        self.brought[source, number] = self.builder.add(step)


def _by_turn(pieces: Iterable[tuple[int, Sequence[Parcel]]]) -> list[list[Item]]:
    """Pieces by their turn; ``pieces`` has those of each rank."""
    turns: list[list[Item]] = []
    for rank, parcels in pieces:
        for number, piece in enumerate(parcels):
            while len(turns) <= piece.turn:
                turns.append([])
            turns[piece.turn].append((rank, number, piece))
    return turns


def _ranks(ranks: Iterable[int]) -> str:
    """Ranks as text for labels: one rank, or the first and the last."""
    first, *rest = sorted(ranks)
    return f"{first}..{rest[-1]}" if rest else str(first)
