"""Plans in which each rank reads its peers' products in place and sums them itself.

Nothing is copied before it is summed. In an all-reduce every rank computes the whole sum, so that
one exchange suffices. A reduce-scatter moves as many bytes as with other schedules, an all-reduce
W / 2 times as many. In a two-shot each rank sums its rows only and writes the sums to all peers: a
second exchange, and as many bytes as other schedules. The schedules are for small products.

At the end of a one-shot a rank waits until no peer reads its product any more. It does so within
the call if one launch runs the whole call or a graph captures it, else after the call. In a
two-shot the arrival of the peers' sums tells it. A rank that sums nothing gets one signal from each
peer, for piece 0: the peer's call has begun.
"""

from __future__ import annotations

from ficco.plan.model import Products, Reduction, Region, Signal, Step, Transfer
from ficco.problems.mask import Span
from ficco.schedules.builder import REDUCE_LANE, Builder, Stage, World, merged, remembered
from ficco.schedules.groups import Unit, cut, finer

#: Bytes of sums that a share of a two-shot's piece has at least, and the most shares. Each has a
#: signal to each peer, so that a block of a launch waits for one block of each peer.
SHARE_BYTES, MOST_SHARES = 8192, 48


class OneShotWorld(World):
    """Pieces that each rank sums, and their signals. They are equal on all ranks.

    Attributes:
        summed: by rank, the rows of the product that it sums, piece by piece.
        rounds: maximum number of pieces of a rank.
        two_shot: whether each rank sums its rows only, and sends the sums to all peers.
        product: buffer of a rank's product, which peers read.
    """

    def lay_out(self) -> None:
        problem, schedule, words = self.problem, self.schedule, self.words
        self.two_shot = schedule.grouping == "two-shot"
        self.summed = [self._pieces(rank) for rank in range(self.world)]
        self.rounds = max(map(len, self.summed))
        self.ready = words.block(max(self.rounds, 1))
        rows = max((last - first for pieces in self.summed for first, last in pieces), default=0)
        row_bytes = problem.n * self.out.itemsize
        self.shares = min(max(-(-rows * row_bytes // SHARE_BYTES), 1), MOST_SHARES)
        self.read = words.block(self.shares * self.rounds if self.two_shot else 1)
        self.product = self.out
        if self.world > 1:
            shapes = ((problem.m, problem.n),) * self.world
            self.product = self.buffer("publish", self.out, shapes, leaves=True)
        if self.world > 1 and self.two_shot:
            shapes = tuple((problem.m - rows, problem.n) for rows in problem.rows)
            self.staging = self.buffer("staging", self.out, shapes)

    def _pieces(self, rank: int) -> list[Span]:
        problem, schedule = self.problem, self.schedule
        first, rows = problem.offsets[rank], problem.rows[rank]
        if problem.kind.returns and not self.two_shot:
            first, rows = 0, problem.m
        least = problem.cuts[0]
        cuts = enumerate(cut(rows, schedule.pieces or self.world, least))
        pieces = [Unit(rank, i, start, stop, i) for i, (start, stop) in cuts]
        if pieces:
            pieces += finer(pieces.pop(), schedule.tail, least)
        return [(first + piece.start, first + piece.stop) for piece in pieces]

    def made(self, piece: int) -> list[Span]:
        """Rows of the product for one piece of every rank, in rising order."""
        ranks = self.summed[: 1 if self.problem.kind.returns and not self.two_shot else None]
        return [pieces[piece] for pieces in ranks if piece < len(pieces)]

    @remembered
    def valid(self, poster: int, waiter: int) -> list[Signal]:
        """Signals that the poster's product of each piece is ready for the waiter; at least one."""
        pieces = enumerate(self.summed[waiter] or [(0, 0)])
        return [self.ready.signal("valid", poster, waiter, slot, rows) for slot, rows in pieces]

    def done(self, poster: int, waiter: int) -> Signal:
        pieces = self.summed[poster] or [(0, 0)]
        return self.read.signal("done", poster, waiter, 0, (pieces[0][0], pieces[-1][1]))

    def landing(self, rank: int, owner: int, piece: int) -> Region:
        """Where an owner's sums of a piece arrive at another rank."""
        before = self.problem.rows[rank] if owner > rank else 0
        first, last = (row - before for row in self.summed[owner][piece])
        return Region(self.staging.name, rank, first, last, 0, self.problem.n)

    @remembered
    def returned(self, poster: int, waiter: int, piece: int) -> tuple[Signal, ...]:
        """Signals that the poster's sums of a piece have arrived at the waiter, by share."""
        rows, first = self.summed[poster][piece], piece * self.shares
        slots = range(first, first + self.shares)
        return tuple(self.read.signal("summed", poster, waiter, slot, rows) for slot in slots)


class OneShotStage(Stage):
    """Steps of one rank."""

    world: OneShotWorld

    def __init__(self, world: OneShotWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        self.products: list[int] = []  # by piece, the step of its product
        self.acquired = 0  # the step that takes over the slots of the peers
        #: Whether sums run on a separate lane. On one lane, steps need no ``after``.
        self.separate_sums = world.rounds > 1
        self.sum_lane = REDUCE_LANE if self.separate_sums else "compute0"

    def run(self) -> None:
        """Add products in pieces, each of them summed after the next product, then "has read"."""
        world, me, peers = self.world, self.me, self.peers
        for piece in range(world.rounds):
            self._multiply(piece)
            if peers and piece:  # after the next product, so that a GPU waits less for its host
                self._sum(piece - 1)
        if not peers:
            return
        if not world.rounds:
            self._tell(0)
        self._sum(world.rounds - 1)
        waited = any(not s.released for step in self.steps for s in step.waits)
        begun = () if waited else tuple(world.valid(peer, me)[0] for peer in peers)
        posts = tuple[Signal, ...]()
        if world.two_shot:
            self._keep()
        else:
            posts = tuple(world.done(me, peer) for peer in peers)
            self.builder.silent += tuple(world.done(peer, me) for peer in peers)
        if begun or posts:
            after = self.builder.lasts()
            self.add(Step(None, "sync", "has read", begun, posts=posts, after=after))

    def _multiply(self, piece: int) -> None:
        """Multiply one piece of every rank in one step, and signal it to the peers."""
        me, n, k, out = self.me, self.problem.n, self.problem.k, self.world.product.name
        lane, products = self.compute_lane(piece), []
        for rows in self.world.made(piece):
            left, target = Region(self.a, me, *rows, 0, k), Region(out, me, *rows, 0, n)
            products.append(self._product(left, self._right(0, k, 0, n), target))
            self._cast(left, lane)
        calls, label = merged(products), f"piece {piece}"
        self.products.append(self.add(Step(Products(calls), lane, label)))
        if self.peers:
            self._tell(piece)

    def _tell(self, piece: int) -> None:
        """Signal to the peers that this rank's product of a piece is ready. The first signal takes
        over the slots of the peers."""
        valid = [self.world.valid(self.me, peer) for peer in self.peers]
        posts = tuple(pieces[piece] for pieces in valid if piece < len(pieces))
        lane = self.compute_lane(piece)
        if not piece:
            free = self.builder.released_by(self.peers)
            self.acquired = self.add(Step(None, lane, "acquire, tell 0", free, posts, free))
            return
        after = () if lane == self.compute_lane(0) else (self.acquired,)
        self.add(Step(None, lane, f"tell {piece}", posts=posts, after=after))

    def _sum(self, piece: int) -> None:
        """Sum the products of all ranks for one of this rank's pieces, if it has that piece."""
        rows = self.world.summed[self.me][piece : piece + 1] if piece >= 0 else []
        for first, last in rows:
            n, ranks = self.problem.n, range(self.world.world)
            begin = 0 if self.problem.kind.returns else self.problem.offsets[self.me]
            name = self.world.product.name
            parts = tuple(Region(name, rank, first, last, 0, n) for rank in ranks)
            out = Region(self.world.out.name, self.me, first - begin, last - begin, 0, n)
            reduction = Reduction(parts, tuple(1 << rank for rank in ranks), out)
            waits = tuple(self.world.valid(peer, self.me)[piece] for peer in self.peers)
            after = (self.acquired, self.products[piece]) if self.separate_sums else ()
            label = f"sum {piece}"
            self.add(Step(reduction, self.sum_lane, label, waits, after=after))
            for peer in self.peers if self.world.two_shot else ():
                posts = self.world.returned(self.me, peer, piece)
                move = self._sums(out, self.world.landing(peer, self.me, piece))
                self.add(Step(move, self.sum_lane, f"{label}>{peer}", posts=posts))

    def _keep(self) -> None:
        """Copy the sums of the peers to the result. The last step clears all words, so that a word
        that is not posted names a peer whose sums are missing."""
        world, clears = self.world, tuple[Signal, ...]()
        pieces = [(peer, i) for peer in self.peers for i in range(len(world.summed[peer]))]
        for peer, piece in pieces:
            out = Region(world.out.name, self.me, *world.summed[peer][piece], 0, self.problem.n)
            move = self._sums(world.landing(self.me, peer, piece), out)
            waits = world.returned(peer, self.me, piece)
            clears += waits
            step = Step(move, self.sum_lane, f"keep {peer}.{piece}", waits)
            self.add(step._replace(clears=clears if (peer, piece) == pieces[-1] else ()))

    def _sums(self, src: Region, dst: Region) -> Transfer:
        return Transfer(src, dst, (1 << self.world.world) - 1, mover=self.schedule.mover)
