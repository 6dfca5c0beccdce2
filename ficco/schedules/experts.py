"""Plans of expert-parallel layers: tokens arrive in pieces, and leave as soon as they are made.

Every rank has ``experts`` of the layer's experts, and room for ``capacity`` tokens of each rank for
each of them. The tokens of one rank for the experts of another are a block, which travels in one
strided copy, or in pieces. They land expert by expert, and for each expert source by source, so
that the tokens of neighbouring sources for all experts are one batch of products. Blocks from and
for ranks of other hosts are a message for each piece, and come back to their place.

The dispatch, the product with ``b``, the function, the product with ``c`` and the way back are one
Plan; either half can be one of its own, as gradients need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from ficco.plan.model import Plan, Product, Region, Signal, Step, Transfer
from ficco.problems.experts import (
    ExpertLayer,
)
from ficco.schedules.builder import REDUCE_LANE, Builder, WordAllocator
from ficco.schedules.groups import cut, peer_sets, peers_in_order, targets_in_order
from ficco.schedules.network import Sending, add_moves, far_legs
from ficco.schedules.space import Schedule

if TYPE_CHECKING:
    pass


class Share(NamedTuple):
    """A piece of every block: some of the experts of a rank, and some of the rows for each."""

    expert: int
    expert_stop: int
    row: int
    row_stop: int


class _Strided(NamedTuple):
    """A region, and how many, at which distance, follow it."""

    region: Region
    batch: int
    stride: int

    def on(self, rank: int) -> _Strided:
        """The same of another rank."""
        return self._replace(region=self.region._replace(rank=rank))


class ExpertWorld:
    """What all ranks know: how blocks are cut, in which order they come, and the signals."""

    def __init__(self, layer: ExpertLayer, schedule: Schedule) -> None:
        if why := expert_refusal(schedule):
            raise ValueError(
                f"schedule {schedule}: required one that pushes rows, fused, unfused, growing or "
                f"shrinking, for {layer.operator}, got one {why}; take another schedule"
            )
        self.layer, self.schedule = layer, schedule
        self.shares = self.cut(schedule.pieces or layer.world)
        self.words = WordAllocator(layer.world)
        self.arriving = self.words.block(len(self.shares) * layer.dispatches)
        self.returning = self.words.block(len(self.shares) * layer.combines)
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
        own = {one.name for one in (*layer.specification.operands, *layer.specification.results)}
        self.buffers = [one for one in self.buffers if one.name not in own]

    def cut(self, pieces: int | tuple[int, ...]) -> list[Share]:
        """Cut a block into pieces: of experts, if there are as many, or of the rows for all."""
        layer = self.layer
        count = pieces if isinstance(pieces, int) else len(pieces)
        if layer.experts >= count:
            return [Share(*some, 0, layer.capacity) for some in cut(layer.experts, pieces)]
        return [Share(0, layer.experts, *some) for some in cut(layer.capacity, pieces)]

    def sets(self, rank: int) -> list[list[int]]:
        """The sources whose rows are multiplied together at a rank, in order, its own apart from
        those of others unless the schedule is uniform."""
        order = peers_in_order(rank, self.layer.world, self.layer.hosts)
        sets = [some for some in peer_sets(self.schedule, rank, order) if some]
        if self.schedule.uniform:
            return [[rank, *order]] if self.schedule.grouping == "fused" else [[rank], *sets]
        return sets

    def turns(self, rank: int) -> list[tuple[list[int], int]]:
        """The steps of a rank: sources, and the number of the piece of their blocks."""
        sets, numbers = self.sets(rank), range(len(self.shares))
        if self.schedule.order == "peer":
            return [(sources, number) for sources in sets for number in numbers]
        return [(sources, number) for number in numbers for sources in sets]

    def signal(self, kind: str, poster: int, waiter: int, number: int) -> Signal:
        """That a piece has arrived (``ready``), or is back (``returned``)."""
        layer, share = self.layer, self.shares[number]
        arrives = kind == "ready"
        first = layer.landing(poster) if arrives else layer.home(poster)
        apart = layer.apart if arrives else layer.capacity
        last = first + (share.expert_stop - 1) * apart + share.row_stop
        rows = first + share.expert * apart + share.row, last
        words = self.arriving if arrives else self.returning
        return words.signal(kind, poster, waiter, number, rows)


class ExpertStage:
    """One rank's steps."""

    def __init__(self, world: ExpertWorld, rank: int) -> None:
        self.world, self.layer, self.schedule = world, world.layer, world.schedule
        self.builder = Builder(world.layer, rank)
        self.me, self.peers, self.add = rank, self.builder.peers, self.builder.add
        ranks = rank, world.layer.world, world.layer.hosts
        targets, lanes = targets_in_order(*ranks)[: len(self.peers)], self.schedule.copy
        self.builder.lane_of = {peer: f"copy{i % lanes}" for i, peer in enumerate(targets)}
        self.legs = list(far_legs(*ranks))
        self.turn = 0
        self.leaving = "leaving" if world.layer.indexed else "a"
        #: The steps that bring tokens to the rows in which they leave, by target and piece, and
        #: the one that brings own rows to those of others.
        self.brought: dict[tuple[int, int], int] = {}
        self.placed: tuple[int, ...] = ()
        #: By rank of another host and piece, the steps that bring its rows, and that make those
        #: that go back to it.
        self.crossed: dict[tuple[int, int], int] = {}
        self.made: dict[tuple[int, int], int] = {}
        #: Places beside the products, by the turn whose rows they bring: in this order none waits
        #: for a later turn before it brings what is there.
        self.aside: list[tuple[int, Step]] = []

    def plan(self) -> Plan:
        world, layer = self.world, self.layer
        if layer.indexed:
            self._bring_tokens()
        own = [] if self.schedule.uniform or layer.world == 1 else self._own_shares()
        first, last = own[: len(own) // 2], own[len(own) // 2 :]
        if not layer.combines:
            first, last = own, []
        for share in first:
            self._step([self.me], share, f"own {share.expert}.{share.row}")
        self.builder.acquire({})
        if layer.dispatches:
            self._dispatch()
            self._place_own()
        if layer.world > 1:
            for sources, number in world.turns(self.me):
                self._step(sources, world.shares[number], _label(sources, number), number)
        else:
            self._step([self.me], Share(0, layer.experts, 0, layer.capacity), "own")
        for share in last:
            self._step([self.me], share, f"own {share.expert}.{share.row}")
        if layer.combines:
            self._cross_back()
            self._bring_home()
        for _, step in sorted(self.aside, key=lambda one: one[0]):
            self.add(step)
        if self.peers:
            self.builder.retire(())
        return self.builder.plan(str(self.schedule), world.buffers, world.words)

    def _own_shares(self) -> list[Share]:
        """The own block in two: the first half hides the first arrival, the last the last return.
        A half of a layer needs but one of them."""
        return self.world.cut(2 if self.layer.dispatches and self.layer.combines else 1)

    # Where rows are.

    def _landed(self, buffer: str, sources: Sequence[int], share: Share) -> _Strided:
        """The rows of neighbouring sources where they are multiplied."""
        layer, (expert, stop, row, row_stop) = self.layer, share
        first = layer.landing(sources[0], expert) + row
        last = layer.landing(sources[-1], expert) + row_stop
        return self._strided(buffer, self.me, first, last, stop - expert, layer.apart)

    def _at_home(self, buffer: str, home: int, owner: int, share: Share) -> _Strided:
        """The rows of a rank's tokens for the experts of another, or from them."""
        layer, (expert, stop, row, row_stop) = self.layer, share
        first = (layer.leaving if buffer in ("a", "leaving") else layer.home)(owner, expert)
        return self._strided(
            buffer, home, first + row, first + row_stop, stop - expert, layer.capacity
        )

    def _strided(
        self, buffer: str, rank: int, first: int, last: int, batch: int, stride: int
    ) -> _Strided:
        cols = self.cols[buffer]
        whole = last - first == stride  # one region, if the rows of all are contiguous
        if whole:
            last, batch = first + batch * stride, 1
        region = Region(buffer, rank, first, last, 0, cols)
        return _Strided(region, batch, stride if batch > 1 else 0)

    @cached_property
    def cols(self) -> dict[str, int]:
        """Columns of each buffer."""
        buffers = chain(self.layer.buffers.values(), self.world.buffers)
        return {one.name: one.shapes[0][1] for one in buffers}

    def _move(self, src: _Strided, dst: _Strided, function: str = "") -> Transfer:
        """What moves rows to as many; both are cut alike."""
        one, two = _alike(src, dst)
        return Transfer(
            one.region,
            two.region,
            function=function,
            batch=one.batch,
            src_stride=one.stride,
            dst_stride=two.stride,
        )

    # Steps.

    @cached_property
    def mixes(self) -> bool:
        """Whether own rows are multiplied together with those of others."""
        return any(self.me in some and some != [self.me] for some in self.world.sets(self.me))

    def _bring_tokens(self) -> None:
        """Bring tokens to the rows in which they leave, those that are sent first before others:
        piece by piece, or target by target."""
        layer, world = self.layer, self.world
        far = [target for target, _ in self.legs]
        targets = [*far, *self.builder.lane_of, *([] if self.mixes else [self.me])]
        numbers = range(len(world.shares))
        whole = Share(0, layer.experts, 0, layer.capacity)
        if self.schedule.order == "peer" and not layer.gathers:
            turns = [([target], whole, numbers) for target in targets]
        else:
            turns = [(targets, world.shares[i], range(i, i + 1)) for i in numbers]
        for owners, share, some in turns:
            for run in _neighbours(owners) if not layer.gathers else [owners[:1]]:
                src, dst = (self._run_at_home(at, run, share) for at in ("a", "leaving"))
                step = Step("place", "compute0", f"leaving {_label(run, some[0])}")
                index = self.add(step._replace(transfer=self._move(src, dst)))
            # After all of them, also where they are several: else ranks would get out of step.
            self.brought |= {(one, number): index for one in owners for number in some}

    def _dispatch(self) -> None:
        """Send the rank's tokens, in the order in which their receivers expect them."""
        sent: list[tuple[int, int, int]] = []
        for turn, target in enumerate(self.builder.lane_of):
            theirs = self.world.turns(target)
            for place, (sources, number) in enumerate(theirs):
                if self.me in sources:
                    sent.append((place, turn, number))
        targets = list(self.builder.lane_of)
        for _, turn, number in sorted(sent):
            target = targets[turn]
            signal = self.world.signal("ready", self.me, target, number)
            move = self._outward(self.me, target, number)
            self._copy(move, target, signal, self._brought(target, number))
        self.crossed = self._cross(self.legs, self._outward, self._brought)

    def _outward(self, source: int, target: int, number: int) -> Transfer:
        """A piece of a rank's tokens, to the experts of another."""
        share = self.world.shares[number]
        landing = self._landed("staging", [source], share).on(target)
        return self._move(self._at_home(self.leaving, source, target, share), landing)

    def _homeward(self, source: int, home: int, number: int) -> Transfer:
        """What the experts of a rank make of it, back: from another host to its place. One of both
        ranks is this one."""
        crosses = self.builder.lane_of.keys().isdisjoint((source, home))
        share, out = self.world.shares[number], "out" if crosses else "staging out"
        rows = self._landed("partial", [home], share).on(source)
        return self._move(rows, self._at_home(out, home, source, share))

    def _cross(
        self,
        legs: Sequence[tuple[int, int]],
        move: Callable[[int, int, int], Transfer],
        after: Callable[[int, int], tuple[int, ...]],
    ) -> dict[tuple[int, int], int]:
        """Exchange pieces with the ranks of other hosts; by source and piece, the steps that bring
        them."""
        numbers, sent, received = range(len(self.world.shares)), {}, {}
        for target, source in legs:
            sent[target] = [Sending((move(self.me, target, i),), after(target, i)) for i in numbers]
            received[source] = [(move(source, self.me, i),) for i in numbers]
        return add_moves(self.builder, self.schedule, sent, received, direct=True)

    def _cross_back(self) -> None:
        """Exchange what came of pieces with the ranks of other hosts: whose rows came first get
        theirs first."""
        legs = [(source, target) for target, source in self.legs]
        self._cross(legs, self._homeward, lambda home, number: (self.made[home, number],))

    def _brought(self, target: int, number: int) -> tuple[int, ...]:
        """The step after which the rows of a piece are there to leave."""
        return (self.brought[target, number],) if self.brought else ()

    def _place_own(self) -> None:
        """Bring the own rows to those of others that they are multiplied with, before these
        come."""
        if self.mixes:
            whole = Share(0, self.layer.experts, 0, self.layer.capacity)
            here = self._at_home("a", self.me, self.me, whole)
            move = self._move(here, self._landed("staging", [self.me], whole))
            self.placed = (self.add(Step("place", "compute0", "own", transfer=move)),)

    def _copy(self, move: Transfer, peer: int, signal: Signal, after: tuple[int, ...] = ()) -> None:
        lane, label = self.builder.lane_of[peer], f"{signal.kind} {signal.slot}>{peer}"
        self.add(Step("copy", lane, label, posts=(signal,), after=after, transfer=move))

    def _step(self, sources: list[int], share: Share, label: str, number: int = -1) -> None:
        """Multiply what has come from some sources, and send back what becomes of it."""
        layer, me, alone = self.layer, self.me, sources == [self.me]
        lane = f"compute{self.turn % self.schedule.compute if number >= 0 else 0}"
        self.turn += number >= 0
        runs = _runs(sources, share, layer.capacity)
        if layer.dispatches:
            waits = tuple(
                self.world.signal("ready", source, me, number)
                for source in sources
                if source in self.builder.lane_of
            )
            crossed = tuple(
                self.crossed[source, number]
                for source in sources
                if (source, number) in self.crossed
            )
            left = [
                self._at_home(self.leaving, me, me, share)
                if alone
                else self._landed("staging", run, share)
                for run in runs
            ]
            made = [self._landed("hidden", run, share) for run in runs]
            step = self._multiply(left, "b", made, share)
            after: tuple[int, ...] = ()
            if me in sources and lane != "compute0":
                after = self._brought(me, number) if alone else self.placed
            after += crossed
            index = self.add(Step("matmul", lane, label, waits, after=after, products=step))
            if layer.keeps:
                for run, rows in zip(runs, left, strict=True):
                    move = self._move(rows, self._landed("gathered", run, share))
                    self._aside(f"{label} kept", move, index)
        if layer.dispatches and layer.combines:
            for run in runs:
                move = self._move(
                    self._landed("hidden", run, share),
                    self._landed("active", run, share),
                    layer.function,
                )
                self.add(Step("place", lane, f"{label} {layer.function}", transfer=move))
        if layer.combines:
            self._send_back(sources, share, label, number, lane, runs)

    def _aside(self, label: str, move: Transfer, after: int) -> None:
        """Bring rows to their place beside the products, after one of them."""
        step = Step("place", REDUCE_LANE, label, after=(after,), transfer=move)
        self.aside.append((self.turn, step))

    def _send_back(
        self,
        sources: list[int],
        share: Share,
        label: str,
        number: int,
        lane: str,
        runs: list[list[int]],
    ) -> None:
        me, alone = self.me, sources == [self.me]
        left = [self._landed("active", run, share) for run in runs]
        made = [
            self._at_home("out", me, me, share) if alone else self._landed("partial", run, share)
            for run in runs
        ]
        products = self._multiply(left, "c", made, share)
        index = self.add(Step("matmul", lane, f"{label} back", products=products))
        for source in sources if not alone else ():
            rows = self._landed("partial", [source], share)
            if source == me:
                move = self._move(rows, self._at_home("out", me, me, share))
                self._aside(f"{label} own", move, index)
            elif source in self.builder.lane_of:
                signal = self.world.signal("returned", me, source, number)
                self._copy(self._homeward(me, source, number), source, signal, (index,))
            else:
                self.made[source, number] = index

    def _multiply(
        self, left: Sequence[_Strided], right: str, made: Sequence[_Strided], share: Share
    ) -> tuple[Product, ...]:
        """The products of some rows with the matrices of their experts."""
        per = self.layer.k if right == "b" else self.layer.h
        b = Region(right, self.me, share.expert * per, (share.expert + 1) * per, 0, 0)
        b = b._replace(col_stop=self.cols[right])
        experts, products = share.expert_stop - share.expert, []
        for rows, out in zip(left, made, strict=True):
            one, two = _apart(rows, experts), _apart(out, experts)
            products.append(
                Product(
                    one.region,
                    b,
                    two.region,
                    batch=experts,
                    a_stride=one.stride,
                    out_stride=two.stride,
                    b_stride=per if experts > 1 else 0,
                )
            )
        return tuple(products)

    def _bring_home(self) -> None:
        """Copy what comes back to its place, in the order in which it is expected."""
        coming: dict[tuple[int, int], list[int]] = {}  # by turn and piece, from whom
        for peer in self.peers:
            for turn, (sources, number) in enumerate(self.world.turns(peer), 1):
                if self.me in sources:
                    coming.setdefault((turn, number), []).append(peer)
        for (turn, number), peers in coming.items():
            share = self.world.shares[number]
            for run in _neighbours(peers):
                src, dst = (self._run_at_home(at, run, share) for at in ("staging out", "out"))
                waits = tuple(self.world.signal("returned", one, self.me, number) for one in run)
                label = f"{_label(run, number)} home"
                step = Step("place", REDUCE_LANE, label, waits, transfer=self._move(src, dst))
                self.aside.append((turn, step))

    def _run_at_home(self, buffer: str, owners: list[int], share: Share) -> _Strided:
        """The rows of this rank's tokens from the experts of neighbouring ranks."""
        region, batch, stride = self._at_home(buffer, self.me, owners[0], share)
        if len(owners) == 1:
            return _Strided(region, batch, stride)
        apart = self.layer.home(1)
        return _Strided(region, batch * len(owners), stride if batch > 1 else apart)


def _alike(one: _Strided, two: _Strided) -> tuple[_Strided, _Strided]:
    """Two ends of a move, as a batch if one of them is."""
    batch = max(one.batch, two.batch)
    return _apart(one, batch), _apart(two, batch)


def _apart(rows: _Strided, batch: int) -> _Strided:
    """The same as so many regions, if they are contiguous."""
    if rows.batch == batch:
        return rows
    each = rows.region.rows // batch
    region = rows.region._replace(row_stop=rows.region.row + each)
    return _Strided(region, batch, each)


def _runs(sources: Sequence[int], share: Share, capacity: int) -> list[list[int]]:
    """Sources whose rows for an expert are contiguous."""
    whole = share.row_stop - share.row == capacity
    return list(_neighbours(sources)) if whole else [[source] for source in sorted(sources)]


def _neighbours(ranks: Sequence[int]) -> Iterator[list[int]]:
    """Runs of neighbouring ranks."""
    run: list[int] = []
    for rank in sorted(ranks):
        if run and rank != run[-1] + 1:
            yield run
            run = []
        run.append(rank)
    yield run


def _label(sources: Sequence[int], number: int) -> str:
    return " ".join(f"{source}.{number}" for source in sources)


def expert_refusal(schedule: Schedule) -> str:
    """Why a schedule is none for layers of experts; empty if it is one."""
    if schedule.grouping not in ("fused", "unfused", "growing", "shrinking"):
        return f"that is {schedule.grouping}"
    if schedule.dims == 2:
        return "that cuts columns"
    if schedule.mover != "dma":
        return f"whose mover is {schedule.mover}"
    if schedule.pull or schedule.beta or schedule.tail > 1:
        return "with pull, beta or a tail"
    return ""


def expert_plans(
    layer: ExpertLayer, schedule: Schedule, ranks: Sequence[int] | None = None
) -> list[Plan]:
    """The Plans of some ranks, by default of all.

    Raises:
        ValueError: the schedule cannot serve it.
    """
    world = ExpertWorld(layer, schedule)
    return [ExpertStage(world, rank).plan() for rank in (ranks or range(layer.world))]
