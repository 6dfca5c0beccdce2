"""Plans of attention by heads: an all-to-all, a function of heads and an all-to-all, in pieces.

A piece is a group of heads of every rank. A rank applies the function to a piece once the piece has
arrived from all ranks, while later pieces travel. The results of a piece go back at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from weakref import proxy

from ficco.plan.model import PLAIN, Applied, Plan, Region, Signal, Step, Transfer, new, paused
from ficco.problems.attention import HeadsProblem
from ficco.problems.mask import Span
from ficco.problems.specification import Buffer
from ficco.schedules.builder import REDUCE_LANE, Builder, WordAllocator, remembered
from ficco.schedules.exchange import LOOKAHEAD, After, Item, Parcel, Route, Traffic
from ficco.schedules.groups import cut, far_legs, near_targets, sources_of
from ficco.schedules.space import NAMED, Schedule


def heads_refusal(problem: HeadsProblem, schedule: Schedule) -> str:
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
    """Range of query heads of each piece of a rank. Query heads that share a head of keys are in
    one piece if the rank has at least as many heads of keys as pieces, and always in a gradient,
    which sums over them."""
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


@paused()
def heads_plans(
    problem: HeadsProblem, schedule: Schedule, ranks: Sequence[int] | None = None
) -> list[Plan]:
    """The Plans of ``ranks``, by default of all ranks.

    Raises:
        ValueError: the schedule cannot serve attention by heads.
    """
    if why := heads_refusal(problem, schedule):
        raise ValueError(why)
    world = _HeadsWorld(problem, schedule)
    every = ranks or range(problem.world)
    return [_HeadsStage(world, Builder(problem, rank)).plan() for rank in every]


class _HeadsWorld:
    """Pieces, buffers and routes. They are equal on all ranks.

    Attributes:
        pieces: by rank, the range of query heads of each piece.
        out, back: routes of shards to the ranks of their heads, and of results back.
        buffers: buffers of the schedule.
        heads: by matrix, the buffer with all positions of a rank's heads.
    """

    def __init__(self, problem: HeadsProblem, schedule: Schedule) -> None:
        self.problem, self.schedule = problem, schedule
        self.words = WordAllocator(problem.world)
        self.pieces = [pieces_of(problem, schedule, rank) for rank in range(problem.world)]
        self.out, self.back = _HeadsRoute(self, returns=False), _HeadsRoute(self, returns=True)
        specification = problem.specification
        declared = specification.operands + specification.results
        self.buffers: list[Buffer] = []
        self.heads = {one.holds: one for one in declared}
        if problem.world == 1:
            return
        by_matrix = {one.holds: one for one in declared if one.name == f"kept {one.holds}"}
        for matrix in problem.inputs + problem.outs:
            if matrix in problem.arrives or matrix not in by_matrix:
                memory = "slot" if matrix in problem.arrives else "local"
                by_matrix[matrix] = problem.whole(matrix, memory)
                self.buffers.append(by_matrix[matrix])
            self.heads[matrix] = by_matrix[matrix]
        for matrix in problem.returns:
            shard = problem.shard(matrix)
            self.buffers.append(shard._replace(name=f"returned {matrix}", memory="slot", left=()))

    @remembered
    def new_rows(self, matrix: str, rank: int, piece: int) -> Span:
        """Rows of a matrix at a rank that a piece needs and no earlier piece has needed."""
        first, last = self.problem.rows(matrix, rank, *self.pieces[rank][piece])
        if piece:
            first = max(first, self.problem.rows(matrix, rank, *self.pieces[rank][piece - 1])[1])
        return first, last


#: Name of a buffer, first row and first column.
_Corner = tuple[str, int, int]


class _HeadsRoute(Route):
    """The route of shards to the ranks of their heads or, if it ``returns``, of results back. The
    first matrix travels last.

    Attributes:
        matrices: names of the matrices that travel.
    """

    kind = "ready"

    def __init__(self, world: _HeadsWorld, returns: bool) -> None:
        self.world: _HeadsWorld = proxy(world)  # no circle, which would outlive the plans
        self.problem, self.returns = world.problem, returns
        self.matrices = self.problem.returns if returns else self.problem.arrives
        self.data = world.words.block(max(map(len, world.pieces)))

    @remembered
    def pieces(self, src: int, dst: int, owner: int) -> list[Parcel]:
        cols, at, parcels = self.problem.cols, src if self.returns else dst, list[Parcel]()
        ends = [self._ends(matrix, src, dst) for matrix in reversed(self.matrices)]
        for number, signal in enumerate(self.signals(src, dst, owner)):
            moves, labels = list[Transfer](), list[str]()
            for matrix, (src_name, row, col), (dst_name, dst_row, dst_col) in ends:
                first, last = self.world.new_rows(matrix, at, number)
                if first == last and not self.returns:
                    continue
                source = src_name, src, row + first, row + last, col, col + cols
                rows = dst_row + first, dst_row + last
                landing = new(Region, (dst_name, dst, *rows, dst_col, dst_col + cols))
                moves.append(new(Transfer, (new(Region, source), landing, 0, *PLAIN)))
                labels.append(f"{src_name}>{dst}.{number}")
            parcels.append(Parcel(tuple(moves), tuple(labels), (), (signal,), number))
        return parcels

    def _ends(self, matrix: str, src: int, dst: int) -> tuple[str, _Corner, _Corner]:
        """Name of a matrix, and its buffer and first row and column at the source and at the
        destination."""
        problem, heads = self.problem, self.world.heads[matrix].name
        if not self.returns:
            shard = matrix, problem.leaves(matrix, src, dst), 0
            return matrix, shard, (heads, 0, src * problem.cols)
        name = f"returned {matrix}" if src != dst else matrix
        shard = name, problem.lands(matrix, src, dst), 0
        return matrix, (heads, 0, dst * problem.cols), shard

    @remembered
    def signals(self, src: int, dst: int, owner: int) -> list[Signal]:
        pieces = self.world.pieces[src if self.returns else dst]
        rows = pieces
        if self.returns:  # of the first matrix
            matrix = self.matrices[0]
            down, spans = self.problem.lands(matrix, src, dst), range(len(pieces))
            new_rows = (self.world.new_rows(matrix, src, number) for number in spans)
            rows = [(down + first, down + last) for first, last in new_rows]
        return [self.data.signal(self.kind, src, dst, *one) for one in enumerate(rows)]


class _HeadsStage:
    """Steps of one rank."""

    def __init__(self, world: _HeadsWorld, builder: Builder) -> None:
        self.world, self.problem, self.builder = world, world.problem, builder
        self.me, self.pieces = builder.me, world.pieces[builder.me]
        self.here: list[int] = []  # by piece, the step of its lane after which it has arrived
        self.applied: list[int] = []  # by piece, the step that applies the function
        self.order = sources_of(self.problem, self.me)
        self.legs = list(far_legs(self.problem, self.me))
        self.targets = near_targets(self.problem, self.me)
        builder.assign_lanes(self.targets, world.schedule.copy)
        self.out = Traffic(builder, world.schedule, world.out)
        self.back = Traffic(builder, world.schedule, world.back)

    def plan(self) -> Plan:
        """Add all steps, and return the Plan."""
        world, builder = self.world, self.builder
        if self.problem.world == 1:
            builder.add(self._apply((0, self.problem.heads)))
            return builder.plan(str(world.schedule), world.buffers, world.words)
        builder.acquire()
        turns = self.out.leaving(self.targets)
        # One turn further ahead than without results, so that results do not delay later pieces.
        ahead = len(turns) if self.legs else LOOKAHEAD + 1
        for piece in self.out.stream(len(self.pieces), turns, self._send, ahead):
            if not piece:
                self.out.cross(self.legs)
            self._serve(piece)
        self.back.cross(self.legs, lambda _, piece: (self.applied[piece],))
        for peer, piece, _ in chain.from_iterable(self.back.coming(self.order)):
            self.back.home(peer, piece, REDUCE_LANE, _result)
        if builder.peers:
            builder.retire()
        return builder.plan(str(world.schedule), world.buffers, world.words)

    def _send(self, piece: int, items: list[Item]) -> None:
        """Push a piece to the ranks of its heads, one rank after the other."""
        for peer, number, _ in items:
            self.out.send(peer, number)

    def _place(self, lane: str, move: Transfer, after: After = ()) -> None:
        label = f"{move.src.buffer}>{move.dst.buffer}"
        self.builder.add(Step(move, lane, label, after=after))

    def _serve(self, piece: int) -> None:
        """Apply the function to one of this rank's pieces, and push back the results."""
        me, lane = self.me, f"compute{piece % self.world.schedule.compute}"
        for move in self.out.of(me, me)[piece].moves:
            self._place(lane, move)
        sources = [*self.targets, *(source for _, source in self.legs)]
        waits, after = self.out.arrivals([(source, piece) for source in sources], lane)
        after = self._shared(piece, lane) + after
        onward = self.world.schedule.compute > 1 and piece + 1 < len(self.pieces)
        if onward and self._shares(piece + 1):
            label = f"piece {piece} is here"
            self.here.append(self.builder.add(Step(None, lane, label, waits, after=after)))
            waits, after = (), ()
        else:
            self.here.append(len(self.builder.steps))
        apply = self._apply(self.pieces[piece])._replace(lane=lane, waits=waits, after=after)
        applied = (self.builder.add(apply),)
        self.applied += applied
        for peer in self.targets:
            self.back.send(peer, piece, after=applied)
        for move in self.back.of(me, me)[piece].moves:
            self._place(REDUCE_LANE, move, applied)
        self._keep(piece, applied)

    def _shares(self, piece: int) -> bool:
        """Whether a piece needs rows of keys that arrived with the previous piece."""
        first, _ = self.problem.rows("k", self.me, *self.pieces[piece])
        return first < self.world.new_rows("k", self.me, piece)[0]

    def _shared(self, piece: int, lane: str) -> tuple[int, ...]:
        """The step on another lane after which shared rows of keys have arrived, if any."""
        if not piece or not self._shares(piece):
            return ()
        before = self.here[piece - 1]
        return (before,) if self.builder.steps[before].lane != lane else ()

    def _keep(self, piece: int, after: After) -> None:
        """Copy the new rows of a piece to the buffers that are saved for the gradient."""
        for matrix in self.problem.arrives:
            if matrix not in self.problem.saved_heads:
                continue
            first, last = self.world.new_rows(matrix, self.me, piece)
            if first < last:
                cols = self.problem.cols * self.problem.world
                src = Region(self.world.heads[matrix].name, self.me, first, last, 0, cols)
                self._place(
                    REDUCE_LANE, Transfer(src, src._replace(buffer=f"kept {matrix}")), after
                )

    def _apply(self, heads: Span) -> Step:
        """The step that applies the function to a range of the rank's query heads."""
        problem, me = self.problem, self.me

        def region(matrix: str) -> Region:
            buffer = self.world.heads[matrix]
            rows = problem.rows(matrix, me, *heads)
            return Region(buffer.name, me, *rows, 0, buffer.shapes[me][1])

        inputs, outs = (tuple(map(region, matrices)) for matrices in (problem.inputs, problem.outs))
        calls = problem.calls(*heads)
        flops = sum((call.flops for call in calls), 0.0)
        applied = Applied(problem.function, *heads, inputs, outs, flops, calls)
        first = me * problem.heads
        label = f"heads {first + heads[0]}:{first + heads[1]}"
        return Step(applied, "compute0", label)


def _result(region: Region) -> Region:
    """The region of the result for a region of a buffer of returned rows."""
    return region._replace(buffer=region.buffer.removeprefix("returned "))
