"""Plans of attention by heads: an all-to-all, a function of heads and an all-to-all, in pieces.

A piece is a group of heads of every rank. The function takes it once it has come from all ranks,
while the next pieces travel, and what it makes goes back at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from ficco.plan.collector import paused
from ficco.plan.model import Applied, Plan, Region, Signal, Step, Transfer
from ficco.problems.heads import HeadsProblem
from ficco.problems.mask import Span
from ficco.problems.specification import Buffer
from ficco.schedules.builder import REDUCE_LANE, Builder, WordAllocator
from ficco.schedules.gather import LOOKAHEAD
from ficco.schedules.groups import cut, peers_in_order, targets_in_order
from ficco.schedules.network import Sending, add_moves, far_legs
from ficco.schedules.space import NAMED, Schedule


def heads_refusal(schedule: Schedule) -> str:
    """Why a schedule cannot serve attention by heads; empty if it can."""
    knobs = {name: getattr(schedule, name) for name in ("pieces", "copy", "compute")}
    if schedule == replace(NAMED["serial"], **knobs):
        return ""
    return (
        f"schedule {schedule}: all ranks push groups of heads by copy engines, and each group is "
        "attended to at once; required serial or uniform-fused-1d with the knobs pieces, copy and "
        "compute, such as uniform-fused-1d:pieces=4,compute=2"
    )


def pieces_of(problem: HeadsProblem, schedule: Schedule, rank: int) -> list[Span]:
    """The heads of queries of each piece of a rank. Heads that share one of keys stay together if
    there are as many of those as pieces, and in a gradient, which sums over them."""
    first, last = problem.keys(rank)
    pieces = schedule.pieces or problem.world
    count = pieces if isinstance(pieces, int) else len(pieces)
    if count > last - first and not problem.backward:
        return cut(problem.heads, pieces)
    if count > last - first:
        pieces = last - first
    begin = rank * problem.heads
    return [
        (
            max((first + one) * problem.shared - begin, 0),
            min((first + two) * problem.shared - begin, problem.heads),
        )
        for one, two in cut(last - first, pieces)
    ]


def heads_plans(
    problem: HeadsProblem, schedule: Schedule, ranks: Sequence[int] | None = None
) -> list[Plan]:
    """The Plans of some ranks, or of all.

    Raises:
        ValueError: the schedule cannot serve attention by heads.
    """
    if why := heads_refusal(schedule):
        raise ValueError(why)
    with paused():
        world = _HeadsWorld(problem, schedule)
        every = range(problem.world) if ranks is None else ranks
        return [_HeadsStage(world, Builder(problem, rank)).plan() for rank in every]


class _HeadsWorld:
    """What all ranks know: pieces, buffers and words."""

    def __init__(self, problem: HeadsProblem, schedule: Schedule) -> None:
        self.problem, self.schedule = problem, schedule
        self.words = WordAllocator(problem.world)
        self.pieces = [pieces_of(problem, schedule, rank) for rank in range(problem.world)]
        most = max(map(len, self.pieces))
        self.ready, self.back = self.words.block(most), self.words.block(most)
        asked = problem.specification
        given = asked.operands + asked.results
        self.buffers: list[Buffer] = []
        #: By matrix, the buffer of a rank's heads.
        self.heads = {one.holds: one for one in given}
        if problem.world == 1:
            return
        kept = {one.holds: one for one in given if one.name == f"kept {one.holds}"}
        for matrix in problem.inputs + problem.outs:
            if matrix in problem.arrives or matrix not in kept:
                memory = "slot" if matrix in problem.arrives else "local"
                kept[matrix] = problem.whole(matrix, memory)
                self.buffers.append(kept[matrix])
            self.heads[matrix] = kept[matrix]
        for matrix in problem.returns:
            shard = problem.shard(matrix)
            self.buffers.append(shard._replace(name=f"returned {matrix}", memory="slot", left=()))

    def new_rows(self, matrix: str, rank: int, piece: int) -> Span:
        """The rows of a matrix on a rank that a piece is the first to have to do with."""
        first, last = self.problem.rows(matrix, rank, *self.pieces[rank][piece])
        if piece:
            first = max(first, self.problem.rows(matrix, rank, *self.pieces[rank][piece - 1])[1])
        return first, last


class _HeadsStage:
    """One rank's steps."""

    def __init__(self, world: _HeadsWorld, builder: Builder) -> None:
        self.world, self.problem, self.builder = world, world.problem, builder
        self.me, self.pieces = builder.me, world.pieces[builder.me]
        self.here: list[int] = []  # by piece, the step of its lane after which its rows are there
        self.applied: list[int] = []  # by piece, the step that applies the function
        self.brought: dict[tuple[int, int], int] = {}  # source and piece -> its network step
        ranks = self.me, self.problem.world, self.problem.hosts
        self.order, self.legs = peers_in_order(*ranks), list(far_legs(*ranks))
        self.targets = targets_in_order(*ranks)[: len(builder.peers)]
        builder.lane_of = {
            peer: f"copy{turn % world.schedule.copy}" for turn, peer in enumerate(self.targets)
        }

    def plan(self) -> Plan:
        world, builder = self.world, self.builder
        if self.problem.world == 1:
            builder.add(self._apply((0, self.problem.heads)))
            return builder.plan(str(world.schedule), world.buffers, world.words)
        builder.acquire({})
        most = max(map(len, world.pieces))
        ahead = most if self.legs else LOOKAHEAD
        for piece in range(min(ahead, most)):
            self._send(piece)
        self._cross()
        for piece in range(most):
            if piece + ahead < most:
                self._send(piece + ahead)
            if piece < len(self.pieces):
                self._serve(piece)
        self._finish(most)
        if builder.peers:
            builder.retire(())
        return builder.plan(str(world.schedule), world.buffers, world.words)

    def _send(self, piece: int) -> None:
        """Push a piece's rows to the ranks of its heads."""
        for peer in self.targets:
            if piece >= len(self.world.pieces[peer]):
                continue
            moves = self._moves(self.me, peer, piece)
            rows = self.world.pieces[peer][piece]
            signal = self.world.ready.signal("ready", self.me, peer, piece, rows)
            for move in moves:
                posts = (signal,) if move is moves[-1] else ()
                self._copy(peer, f"{move.src.buffer}>{peer}.{piece}", move, posts)

    def _cross(self) -> None:
        """Exchange pieces with the ranks of other hosts."""
        sent, received = {}, {}
        for target, source in self.legs:
            theirs = self.world.pieces[target]
            sent[target] = [Sending(self._moves(self.me, target, i)) for i in range(len(theirs))]
            received[source] = [self._moves(source, self.me, i) for i in range(len(self.pieces))]
        self.brought = add_moves(self.builder, self.world.schedule, sent, received, direct=True)

    def _moves(self, me: int, peer: int, piece: int) -> tuple[Transfer, ...]:
        """What a piece of a rank's needs of another one's shards: rows of queries come last."""
        cols, moves = self.problem.cols, list[Transfer]()
        for matrix in reversed(self.problem.arrives):
            first, last = self.world.new_rows(matrix, peer, piece)
            if first == last:
                continue
            up = self.problem.leaves(matrix, me, peer)
            src = Region(matrix, me, up + first, up + last, 0, cols)
            left, name = me * cols, self.world.heads[matrix].name
            moves.append(Transfer(src, Region(name, peer, first, last, left, left + cols)))
        return tuple(moves)

    def _copy(
        self,
        peer: int,
        label: str,
        move: Transfer,
        posts: tuple[Signal, ...],
        after: tuple[int, ...] = (),
    ) -> None:
        lane = self.builder.lane_of[peer]
        self.builder.add(Step("copy", lane, label, posts=posts, after=after, transfer=move))

    def _place(
        self,
        lane: str,
        move: Transfer,
        waits: tuple[Signal, ...] = (),
        after: tuple[int, ...] = (),
    ) -> None:
        label = f"{move.src.buffer}>{move.dst.buffer}"
        self.builder.add(Step("place", lane, label, waits, after=after, transfer=move))

    def _serve(self, piece: int) -> None:
        """Apply the function to a piece of this rank's, and push back what it makes."""
        lane = f"compute{piece % self.world.schedule.compute}"
        for move in self._moves(self.me, self.me, piece):
            self._place(lane, move)
        waits = tuple(
            self.world.ready.signal("ready", peer, self.me, piece, self.pieces[piece])
            for peer in self.targets
        )
        after = self._shared(piece, lane)
        after += tuple(self.brought[source, piece] for _, source in self.legs)
        onward = self.world.schedule.compute > 1 and piece + 1 < len(self.pieces)
        if onward and self._shares(piece + 1):
            label = f"piece {piece} is here"
            self.here.append(self.builder.add(Step("sync", lane, label, waits, after=after)))
            waits, after = (), ()
        else:
            self.here.append(len(self.builder.steps))
        apply = self._apply(self.pieces[piece])._replace(lane=lane, waits=waits, after=after)
        applied = self.builder.add(apply)
        self.applied.append(applied)
        for peer in self.targets:
            moves, after = (
                self._back(self.me, peer, piece),
                (applied,),
            )  # which holds for the rest of a lane
            for move in moves:
                posts = (self._returned(self.me, peer, piece),) if move is moves[-1] else ()
                self._copy(peer, f"{move.src.buffer}>{peer}.{piece}", move, posts, after)
                after = ()
        for move in self._back(self.me, self.me, piece):
            dst = move.dst._replace(buffer=move.dst.buffer.removeprefix("returned "))
            self._place(REDUCE_LANE, move._replace(dst=dst), (), (applied,))
        self._keep(piece, applied)

    def _shares(self, piece: int) -> bool:
        """Whether a piece needs rows of keys that came with the one before."""
        first, _ = self.problem.rows("k", self.me, *self.pieces[piece])
        return first < self.world.new_rows("k", self.me, piece)[0]

    def _shared(self, piece: int, lane: str) -> tuple[int, ...]:
        """What comes before a piece that needs such rows, and is on another lane."""
        if not piece or not self._shares(piece):
            return ()
        before = self.here[piece - 1]
        return (before,) if self.builder.steps[before].lane != lane else ()

    def _keep(self, piece: int, applied: int) -> None:
        """Hand heads to the gradient."""
        for matrix in self.problem.arrives:
            if matrix not in self.problem.kept:
                continue
            first, last = self.world.new_rows(matrix, self.me, piece)
            if first < last:
                cols = self.problem.cols * self.problem.world
                src = Region(self.world.heads[matrix].name, self.me, first, last, 0, cols)
                kept = src._replace(buffer=f"kept {matrix}")
                self._place(REDUCE_LANE, Transfer(src, kept), (), (applied,))

    def _apply(self, heads: Span) -> Step:
        problem, me = self.problem, self.me

        def region(matrix: str) -> Region:
            buffer = self.world.heads[matrix]
            rows = problem.rows(matrix, me, *heads)
            return Region(buffer.name, me, *rows, 0, buffer.shapes[me][1])

        inputs, outs = (tuple(map(region, some)) for some in (problem.inputs, problem.outs))
        calls = problem.calls(*heads)
        flops = sum((call.flops for call in calls), 0.0)
        made = Applied(problem.function, *heads, inputs, outs, flops, calls)
        first = me * problem.heads
        label = f"heads {first + heads[0]}:{first + heads[1]}"
        return Step("apply", "compute0", label, applied=made)

    def _back(self, me: int, peer: int, piece: int) -> tuple[Transfer, ...]:
        """What a piece of one rank made for another: its columns."""
        cols, moves = self.problem.cols, list[Transfer]()
        for matrix in reversed(self.problem.returns):
            first, last = self.world.new_rows(matrix, me, piece)
            down = self.problem.lands(matrix, me, peer)
            left = peer * cols
            src = Region(self.world.heads[matrix].name, me, first, last, left, left + cols)
            name = f"returned {matrix}"
            moves.append(Transfer(src, Region(name, peer, down + first, down + last, 0, cols)))
        return tuple(moves)

    def _returned(self, poster: int, waiter: int, piece: int) -> Signal:
        """The signal after the last result of a piece, which is the first that it returns."""
        matrix = self.problem.returns[0]
        down = self.problem.lands(matrix, poster, waiter)
        first, last = self.world.new_rows(matrix, poster, piece)
        return self.world.back.signal("ready", poster, waiter, piece, (down + first, down + last))

    def _finish(self, most: int) -> None:
        """Bring what returns to the results."""
        back = self._cross_back()
        for piece, peer in product(range(most), self.order):
            if piece >= len(self.world.pieces[peer]):
                continue
            waits: tuple[Signal, ...] = ()
            after = (back[peer, piece],) if (peer, piece) in back else ()
            if not after:
                waits = (self._returned(peer, self.me, piece),)
            for matrix in self.problem.returns:
                down = self.problem.lands(matrix, peer, self.me)
                first, last = self.world.new_rows(matrix, peer, piece)
                src = Region(
                    *(f"returned {matrix}", self.me, down + first, down + last),
                    *(0, self.problem.cols),
                )
                self._place(REDUCE_LANE, Transfer(src, src._replace(buffer=matrix)), waits, after)
                waits, after = (), ()

    def _cross_back(self) -> dict[tuple[int, int], int]:
        """Exchange what pieces made with the ranks of other hosts; by source and piece, the steps
        that bring it."""
        sent, received = {}, {}
        for target, source in self.legs:
            sent[target] = [
                Sending(self._back(self.me, target, piece), (applied,))
                for piece, applied in enumerate(self.applied)
            ]
            received[source] = [
                self._back(source, self.me, piece)
                for piece in range(len(self.world.pieces[source]))
            ]
        return add_moves(self.builder, self.world.schedule, sent, received, direct=True)
