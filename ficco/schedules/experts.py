"""Plans of expert-parallel layers: tokens arrive in pieces, and results leave piece by piece.

Every rank has ``experts`` of the layer's experts, and room for ``capacity`` tokens of each rank for
each of these experts. The tokens of one rank for the experts of another rank are a block. A block
travels in one strided copy, or in pieces. Tokens land sorted by expert, then by source rank, so
that the tokens of neighbouring sources for all experts are one batch of products. Between hosts,
each piece of a block is one message, and results arrive directly in ``out``.

One Plan has the dispatch, the product with ``b``, the function, the product with ``c`` and the
return. Gradients need only the first half or the second half, so a Plan may have one half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple
from weakref import proxy

from ficco.plan.model import Plan, Product, Products, Region, Signal, Step, Transfer, paused
from ficco.problems.experts import ExpertLayer
from ficco.schedules.builder import REDUCE_LANE, Block, Builder, WordAllocator, remembered
from ficco.schedules.exchange import After, Parcel, Route, Traffic
from ficco.schedules.groups import cut, far_legs, near_targets, peer_sets, sources_of
from ficco.schedules.space import Schedule


class Share(NamedTuple):
    """A piece of every block: a range of a rank's experts, and a range of the rows of each."""

    expert: int
    expert_stop: int
    row: int
    row_stop: int


class _Strided(NamedTuple):
    """``batch`` regions of equal size; ``stride`` rows lie between the starts of two regions."""

    region: Region
    batch: int
    stride: int


class ExpertWorld:
    """Pieces of the blocks, their order, buffers and routes. They are equal on all ranks.

    Attributes:
        shares: the pieces of a block, in order.
        whole: a block as one piece.
        leaving: name of the buffer from which tokens leave.
        out, back: routes of tokens to their experts, and of results to their tokens.
        buffers: buffers of the schedule.
    """

    def __init__(self, layer: ExpertLayer, schedule: Schedule) -> None:
        if why := expert_refusal(layer, schedule):
            raise ValueError(why)
        self.layer, self.schedule = layer, schedule
        self.shares = self.cut(schedule.pieces or layer.world)
        self.whole = Share(0, layer.experts, 0, layer.capacity)
        self.leaving = "leaving" if layer.indexed else "a"
        self.words = WordAllocator(layer.world)
        self.out = DispatchRoute(self, self.words.block(len(self.shares) * layer.dispatches))
        self.back = ReturnRoute(self, self.words.block(len(self.shares) * layer.combines))
        buffers = layer.buffers
        self.buffers = [buffers["gathered"], buffers["hidden"], buffers["active"]]
        if layer.world > 1:
            local = buffers["out"]._replace(memory="local")
            landing, home = (min(rows, layer.rows) for rows in layer.room)
            if layer.dispatches:
                staging = buffers["gathered"]._replace(name="staging", memory="slot", room=landing)
                self.buffers.append(staging)
            if layer.combines:
                self.buffers.append(local._replace(name="partial", leaves=True))
                back = local._replace(name="staging out", memory="slot", room=home)
                self.buffers.append(back)
        if layer.indexed:
            leaving = buffers["a"]._replace(name="leaving", memory="local", indexed=False)
            self.buffers.append(leaving)
        specification = layer.specification  # the caller passes operands and results
        passed = {one.name for one in (*specification.operands, *specification.results)}
        self.buffers = [one for one in self.buffers if one.name not in passed]

    def cut(self, pieces: int | tuple[int, ...]) -> list[Share]:
        """Cut a block into pieces: ranges of experts, or ranges of rows if there are more pieces
        than experts."""
        layer = self.layer
        count = pieces if isinstance(pieces, int) else len(pieces)
        if layer.experts >= count:
            return [Share(*span, 0, layer.capacity) for span in cut(layer.experts, pieces)]
        return [Share(0, layer.experts, *span) for span in cut(layer.capacity, pieces)]

    def sets(self, rank: int) -> list[list[int]]:
        """Sets of sources whose rows a rank multiplies together, in order. The rank itself is in a
        set only if the schedule is uniform."""
        order = sources_of(self.layer, rank)
        sets = [sources for sources in peer_sets(self.schedule, rank, order) if sources]
        if self.schedule.uniform:
            return [[rank, *order]] if self.schedule.grouping == "fused" else [[rank], *sets]
        return sets

    @remembered
    def turns(self, rank: int) -> list[tuple[list[int], int]]:
        """The turns of a rank. Each is the sources and the number of a piece of their blocks, which
        one step multiplies."""
        sets, numbers = self.sets(rank), range(len(self.shares))
        if self.schedule.order == "peer":
            return [(sources, number) for sources in sets for number in numbers]
        return [(sources, number) for number in numbers for sources in sets]

    # Where rows are.

    @cached_property
    def cols(self) -> dict[str, int]:
        """Columns of each buffer."""
        buffers = chain(self.layer.buffers.values(), self.buffers)
        return {one.name: one.shapes[0][1] for one in buffers}

    def landed(self, rank: int, buffer: str, sources: Sequence[int], share: Share) -> _Strided:
        """Rows of a share from neighbouring sources, in a buffer of the rank that multiplies
        them."""
        layer, (expert, stop, row, row_stop) = self.layer, share
        first = layer.landing(sources[0], expert) + row
        last = layer.landing(sources[-1], expert) + row_stop
        return self._strided(buffer, rank, first, last, stop - expert, layer.apart)

    def at_home(self, home: int, buffer: str, owner: int, share: Share) -> _Strided:
        """Rows of a share in a buffer of the tokens' rank, ``home``: tokens for the experts of
        ``owner``, or results of these experts."""
        layer, (expert, stop, row, row_stop) = self.layer, share
        first = (layer.leaving if buffer in ("a", "leaving") else layer.home)(owner, expert)
        ends = first + row, first + row_stop
        return self._strided(buffer, home, *ends, stop - expert, layer.capacity)

    def _strided(
        self, buffer: str, rank: int, first: int, last: int, batch: int, stride: int
    ) -> _Strided:
        if last - first == stride:  # contiguous rows of all experts are one region
            last, batch = first + batch * stride, 1
        region = Region(buffer, rank, first, last, 0, self.cols[buffer])
        return _Strided(region, batch, stride if batch > 1 else 0)


class DispatchRoute(Route):
    """The route of tokens to the ranks of their experts, in the order of their products."""

    kind = "ready"

    def __init__(self, world: ExpertWorld, words: Block) -> None:
        self.world: ExpertWorld = proxy(world)  # no circle, which would outlive the plans
        self.data = words

    def pieces(self, src: int, dst: int, owner: int) -> list[Parcel]:
        turns, parcels = self._turns(src, dst), list[Parcel]()
        ends = zip(self.world.shares, self.signals(src, dst, owner), strict=True)
        for number, (share, signal) in enumerate(ends):
            labels = (f"{self.kind} {number}>{dst}",)
            move = self._move(src, dst, share)
            parcels.append(Parcel((move,), labels, (), (signal,), turns[number]))
        return parcels

    @remembered
    def signals(self, src: int, dst: int, owner: int) -> list[Signal]:
        first, apart = self._places(src)
        signals = []
        for number, (expert, stop, row, row_stop) in enumerate(self.world.shares):
            rows = first + expert * apart + row, first + (stop - 1) * apart + row_stop
            signals.append(self.data.signal(self.kind, src, dst, number, rows))
        return signals

    def _places(self, src: int) -> tuple[int, int]:
        """First row at the receiver of a sender's rows, and the distance between experts."""
        return self.world.layer.landing(src), self.world.layer.apart

    def _turns(self, src: int, dst: int) -> dict[int, int]:
        """By piece, the number of the receiver's turn that multiplies it."""
        turns = enumerate(self.world.turns(dst))
        return {number: turn for turn, (sources, number) in turns if src in sources}

    def _move(self, src: int, dst: int, share: Share) -> Transfer:
        world = self.world
        rows = world.at_home(src, world.leaving, dst, share)
        return _transfer(rows, world.landed(dst, "staging", [src], share))


class ReturnRoute(DispatchRoute):
    """The route of results to the ranks of their tokens. Between hosts, results go directly to
    ``out``."""

    kind, returns = "returned", True

    def _places(self, src: int) -> tuple[int, int]:
        return self.world.layer.home(src), self.world.layer.capacity

    def _turns(self, src: int, dst: int) -> dict[int, int]:
        return {number: number for number in range(len(self.world.shares))}

    def _move(self, src: int, dst: int, share: Share) -> Transfer:
        world, layer = self.world, self.world.layer
        buffer = "staging out" if layer.host(src) == layer.host(dst) else "out"
        rows = world.landed(src, "partial", [dst], share)
        return _transfer(rows, world.at_home(dst, buffer, src, share))


class _Rows(NamedTuple):
    """Rows that one step multiplies: a share of the rows of sources, in runs of contiguous rows."""

    sources: list[int]
    share: Share
    label: str
    number: int
    lane: str
    runs: list[list[int]]


class ExpertStage:
    """Steps of one rank.

    Attributes:
        brought: by target and piece, the step that copies tokens to the buffer from which they
            leave.
        placed: the step that copies own rows next to rows of other ranks, if any.
        result_step: by rank of another host and piece, the step that multiplies its results.
        aside: copies to final places on a separate lane, each with the turn that brings its rows.
            They are enqueued in the order of turns, so that none delays rows of an earlier turn.
    """

    def __init__(self, world: ExpertWorld, rank: int) -> None:
        self.world, self.layer, self.schedule = world, world.layer, world.schedule
        self.builder = Builder(world.layer, rank)
        self.me, self.peers, self.add = rank, self.builder.peers, self.builder.add
        self.builder.assign_lanes(near_targets(self.layer, rank), self.schedule.copy)
        self.legs, self.turn = list(far_legs(self.layer, rank)), 0
        self.out = Traffic(self.builder, self.schedule, world.out)
        self.back = Traffic(self.builder, self.schedule, world.back)
        self.brought: dict[tuple[int, int], int] = {}
        self.placed: tuple[int, ...] = ()
        self.result_step: dict[tuple[int, int], int] = {}
        self.aside: list[tuple[int, Step]] = []

    def plan(self) -> Plan:
        """Add all steps, and return the Plan."""
        world, layer = self.world, self.layer
        if layer.indexed:
            self._bring_tokens()
        first, last = list[Share](), list[Share]()
        if not self.schedule.uniform and layer.world > 1:
            # Of a whole layer half of the own block hides the first arrival, the rest the last
            # return. Half a layer has one of these.
            shares = world.cut(2 if layer.dispatches and layer.combines else 1)
            half = len(shares) // 2 if layer.combines else 1
            first, last = shares[:half], shares[half:]
        for share in first:
            self._step([self.me], share, f"own {share.expert}.{share.row}")
        self.builder.acquire()
        if layer.dispatches:
            for items in self.out.leaving(self.builder.lane_of):
                self.out.push(items, self._brought)
            self.out.cross(self.legs, self._brought)
            self._place_own()
        if layer.world > 1:
            for sources, number in world.turns(self.me):
                self._step(sources, world.shares[number], _label(sources, number), number)
        else:
            self._step([self.me], world.whole, "own")
        for share in last:
            self._step([self.me], share, f"own {share.expert}.{share.row}")
        if layer.combines:
            # Results leave in the order in which the tokens came.
            legs = [(source, target) for target, source in self.legs]
            self.back.cross(legs, lambda home, number: (self.result_step[home, number],))
            self._bring_home()
        for _, step in sorted(self.aside, key=lambda one: one[0]):
            self.add(step)
        if self.peers:
            self.builder.retire()
        return self.builder.plan(str(self.schedule), world.buffers, world.words)

    # Steps.

    @cached_property
    def mixes(self) -> bool:
        """Whether own rows are multiplied together with rows of other ranks."""
        return any(self.me in ranks and ranks != [self.me] for ranks in self.world.sets(self.me))

    def _bring_tokens(self) -> None:
        """Copy tokens to the buffer from which they leave, in the order of sending: by piece or by
        target."""
        layer, world = self.layer, self.world
        far = [target for target, _ in self.legs]
        targets = [*far, *self.builder.lane_of, *([] if self.mixes else [self.me])]
        numbers = range(len(world.shares))
        if self.schedule.order == "peer" and not layer.gathers:
            turns = [([target], world.whole, numbers) for target in targets]
        else:
            turns = [(targets, world.shares[i], range(i, i + 1)) for i in numbers]
        for owners, share, pieces in turns:
            for run in _neighbours(owners) if not layer.gathers else [owners[:1]]:
                src, dst = (self._rows_at_home(at, run, share) for at in ("a", "leaving"))
                label = f"leaving {_label(run, pieces[0])}"
                index = self.add(Step(_transfer(src, dst), "compute0", label))
            # Pieces leave after the last copy of a turn: otherwise ranks would get out of step.
            self.brought |= {(one, number): index for one in owners for number in pieces}

    def _brought(self, target: int, number: int) -> tuple[int, ...]:
        """The step after which a piece can leave; none if tokens leave from the operand."""
        return (self.brought[target, number],) if self.brought else ()

    def _place_own(self) -> None:
        """Copy the own rows next to rows of other ranks with which they are multiplied."""
        if self.mixes:
            own = self.world.at_home(self.me, "a", self.me, self.world.whole)
            landed = self.world.landed(self.me, "staging", [self.me], self.world.whole)
            move = _transfer(own, landed)
            self.placed = (self.add(Step(move, "compute0", "own")),)

    def _step(self, sources: list[int], share: Share, label: str, number: int = -1) -> None:
        """Multiply a share of the rows of sources, and send the results back. ``number`` is the
        number of the piece; -1 for own rows."""
        layer = self.layer
        lane = f"compute{self.turn % self.schedule.compute if number >= 0 else 0}"
        self.turn += number >= 0
        runs = _runs(sources, share, layer.capacity)
        rows = _Rows(sources, share, label, number, lane, runs)
        if layer.dispatches:
            self._multiply_tokens(rows)
        if layer.dispatches and layer.combines:
            hidden, active = (self._landed(buffer, rows) for buffer in ("hidden", "active"))
            for src, dst in zip(hidden, active, strict=True):
                move = _transfer(src, dst, layer.function)
                self.add(Step(move, lane, f"{label} {layer.function}"))
        if layer.combines:
            self._send_back(rows)

    def _landed(self, buffer: str, rows: _Rows) -> list[_Strided]:
        """Rows of a step in a buffer of this rank, by run."""
        return [self.world.landed(self.me, buffer, run, rows.share) for run in rows.runs]

    def _multiply_tokens(self, rows: _Rows) -> None:
        """Multiply tokens once they have arrived; if the layer keeps them, copy them."""
        me, (sources, share, label, number, lane, _), after = self.me, rows, After()
        alone, home = sources == [me], self.world.at_home(me, self.world.leaving, me, share)
        left = [home] if alone else self._landed("staging", rows)
        if me in sources and lane != "compute0":
            after = self._brought(me, number) if alone else self.placed
        coming = [(source, number) for source in sources if source != me]
        waits, brought = self.out.arrivals(coming, lane)
        products = self._multiply(left, "b", self._landed("hidden", rows), share)
        index = self.add(Step(products, lane, label, waits, after=after + brought))
        gathered = self._landed("gathered", rows) if self.layer.keeps else []
        for src, dst in zip(left, gathered, strict=False):
            self._aside(f"{label} kept", _transfer(src, dst), index)

    def _aside(self, label: str, move: Transfer, after: int) -> None:
        """Defer a copy to a final place, after the step ``after``."""
        step = Step(move, REDUCE_LANE, label, after=(after,))
        self.aside.append((self.turn, step))

    def _send_back(self, rows: _Rows) -> None:
        """Multiply results of the function, and send the products to the ranks of their tokens."""
        me, (sources, share, label, number, lane, _) = self.me, rows
        home, alone = self.world.at_home(me, "out", me, share), sources == [me]
        outs = [home] if alone else self._landed("partial", rows)
        products = self._multiply(self._landed("active", rows), "c", outs, share)
        index = self.add(Step(products, lane, f"{label} back"))
        for source in sources if not alone else ():
            if source == me:
                own = self.world.landed(me, "partial", [me], share)
                self._aside(f"{label} own", _transfer(own, home), index)
            elif source in self.builder.lane_of:
                self.back.send(source, number, (index,))
            else:
                self.result_step[source, number] = index

    def _multiply(
        self, left: Sequence[_Strided], right: str, outs: Sequence[_Strided], share: Share
    ) -> Products:
        """Batches of products of rows with the matrices of their experts, one for each region of
        ``left``. ``right``: ``"b"`` or ``"c"``."""
        per = self.layer.k if right == "b" else self.layer.h
        experts = share.expert_stop - share.expert
        first, cols = share.expert * per, self.world.cols[right]
        b = Region(right, self.me, first, first + per, 0, cols)
        stride, products = per if experts > 1 else 0, list[Product]()
        for rows, out in zip(left, outs, strict=True):
            (a, _, a_stride), (to, _, out_stride) = _apart(rows, experts), _apart(out, experts)
            product = Product(a, b, to, False, experts, a_stride, out_stride, b_stride=stride)
            products.append(product)
        return Products(tuple(products))

    def _bring_home(self) -> None:
        """Copy returned rows to the result, in the expected order of arrival."""
        coming: dict[tuple[int, int], list[int]] = {}  # by turn and piece, the senders
        for peer in self.peers:
            for turn, (sources, number) in enumerate(self.world.turns(peer), 1):
                if self.me in sources:
                    coming.setdefault((turn, number), []).append(peer)
        for (turn, number), peers in coming.items():
            share = self.world.shares[number]
            for run in _neighbours(peers):
                src, dst = (self._rows_at_home(at, run, share) for at in ("staging out", "out"))
                waits = tuple(self.world.back.signals(one, self.me, self.me)[number] for one in run)
                label = f"{_label(run, number)} home"
                step = Step(_transfer(src, dst), REDUCE_LANE, label, waits)
                self.aside.append((turn, step))

    def _rows_at_home(self, buffer: str, owners: list[int], share: Share) -> _Strided:
        """This rank's rows of a share: tokens for the experts of consecutive ranks, or results of
        these experts."""
        region, batch, stride = self.world.at_home(self.me, buffer, owners[0], share)
        if len(owners) == 1:
            return _Strided(region, batch, stride)
        rows_per_owner = self.layer.home(1)
        stride = stride if batch > 1 else rows_per_owner
        return _Strided(region, batch * len(owners), stride)


def _transfer(src: _Strided, dst: _Strided, function: str = "") -> Transfer:
    """A transfer between equally many rows. If one end is a batch, the other end is split into
    the same batch."""
    batch = max(src.batch, dst.batch)
    one, two = _apart(src, batch), _apart(dst, batch)
    return Transfer(one.region, two.region, 0, function, None, batch, one.stride, two.stride)


def _apart(rows: _Strided, batch: int) -> _Strided:
    """The rows as ``batch`` regions. A single region is split into contiguous ones."""
    if rows.batch == batch:
        return rows
    each = rows.region.rows // batch
    region = rows.region._replace(row_stop=rows.region.row + each)
    return _Strided(region, batch, each)


def _runs(sources: Sequence[int], share: Share, capacity: int) -> list[list[int]]:
    """Groups of sources whose rows for an expert are contiguous."""
    whole = share.row_stop - share.row == capacity
    return list(_neighbours(sources)) if whole else [[source] for source in sorted(sources)]


def _neighbours(ranks: Sequence[int]) -> Iterator[list[int]]:
    """Yield runs of consecutive ranks, in rising order."""
    run: list[int] = []
    for rank in sorted(ranks):
        if run and rank != run[-1] + 1:
            yield run
            run = []
        run.append(rank)
    yield run


def _label(sources: Sequence[int], number: int) -> str:
    return " ".join(f"{source}.{number}" for source in sources)


def expert_refusal(layer: ExpertLayer, schedule: Schedule) -> str:
    """Why a schedule cannot serve layers of experts; empty if it can."""
    if schedule.grouping not in ("fused", "unfused", "growing", "shrinking"):
        got = f"that is {schedule.grouping}"
    elif schedule.dims == 2:
        got = "that cuts columns"
    elif schedule.mover != "dma":
        got = f"whose mover is {schedule.mover}"
    elif schedule.pull or schedule.beta or schedule.tail > 1:
        got = "with pull, beta or a tail"
    else:
        return ""
    return (
        f"schedule {schedule}: required one that pushes rows, fused, unfused, growing or "
        f"shrinking, for {layer.operator}, got one {got}; take another schedule"
    )


@paused()
def expert_plans(
    layer: ExpertLayer, schedule: Schedule, ranks: Sequence[int] | None = None
) -> list[Plan]:
    """The Plans of ``ranks``, by default of all ranks.

    Raises:
        ValueError: the schedule cannot serve layers of experts.
    """
    world = ExpertWorld(layer, schedule)
    return [ExpertStage(world, rank).plan() for rank in (ranks or range(layer.world))]
