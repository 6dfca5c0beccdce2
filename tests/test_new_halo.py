"""A second new operator, as one specification, one route and one composition::

    out = [last rows of rank - 1; a; first rows of rank + 1] @ b

Each rank multiplies its rows of a sequence and a halo of up to ``HALO`` rows of each neighbour, as
a convolution over a sharded sequence does.
"""

from __future__ import annotations

from itertools import chain, product

import torch
from ranks import Rank, ranks, run
from test_cpu_engine import at_rest, engine, slot_for
from test_stages import Asked, integers, on_cpu

from ficco.machine import find
from ficco.plan import Plan, Product, Products, Region, Signal, Step, Transfer, render
from ficco.problems.products import Problem
from ficco.problems.specification import Buffer, Contraction, Exchange, Specification
from ficco.proof import check
from ficco.schedules import Schedule
from ficco.schedules.builder import Builder, WordAllocator
from ficco.schedules.exchange import Parcel, Route, Traffic
from ficco.schedules.groups import cut
from ficco.simulate import simulate

HALO = 7
MACHINE = find("h200-4", None)
NAMES = ("serial:pieces=1", "serial:kernel,pieces=2", "serial:pieces=3,copy=2,compute=2")
ROWS = ((16,) * 4, (9, 0, 17), (3, 20, 5, 0, 31), (8, 9))


class Halos(Problem):
    """An all-gather whose blocks are the halos of the neighbours and all own rows."""

    def block(self, src: int, dst: int) -> int:
        return self.rows[src] if src == dst else min(HALO, self.rows[src]) * (abs(src - dst) == 1)

    def leaves(self, src: int, dst: int) -> int:
        return self.rows[src] - self.block(src, dst) if dst == src + 1 else 0

    def lands(self, src: int, dst: int) -> int:
        return sum(self.block(rank, dst) for rank in range(max(dst - 1, 0), src))

    def specified(self) -> Asked:
        """The problem with the specification of the new operator."""
        (a, b), ranks = self.specification.operands, range(self.world)
        rows = [sum(self.block(src, dst) for src in ranks) for dst in ranks]
        shapes = tuple((count, self.n) for count in rows)
        specification = Specification(
            operands=(a, b),
            results=(Buffer("out", "A @ B", self.dtype, shapes, "result"),),
            contractions=(Contraction("A", "B", "A @ B", (self.k,) * self.world),),
            exchanges={"A": Exchange(self.block, self.leaves, self.lands)},
        )
        return Asked(specification, self.world, hosts=self.hosts)


class HaloRoute(Route):
    """Pieces of the halos, from each rank to its neighbours."""

    kind = "ready"

    def __init__(self, problem: Halos, schedule: Schedule) -> None:
        self.problem, self.count = problem, schedule.pieces or 1
        self.words = WordAllocator(problem.world)
        self.data = self.words.block(self.count)
        shapes = ((2 * HALO, problem.k),) * problem.world
        self.buffers = [Buffer("staging", "A", problem.dtype, shapes, "slot")]

    def pieces(self, src: int, dst: int, owner: int) -> list[Parcel]:
        problem, leaves, staged = self.problem, self.problem.leaves(src, dst), HALO * (src > dst)
        lands, parcels = problem.lands(src, dst), []
        for signal in self.signals(src, dst, owner):
            begin, end = signal.first - lands, signal.last - lands
            rows = Region("a", src, leaves + begin, leaves + end, 0, problem.k)
            arrived = Region("staging", dst, staged + begin, staged + end, 0, problem.k)
            move = (Transfer(rows, arrived),)
            parcels.append(Parcel(move, (f"{src}>{dst}",), (), (signal,), signal.slot))
        return parcels

    def signals(self, src: int, dst: int, owner: int) -> list[Signal]:
        rows, lands = self.problem.block(src, dst) * (src != dst), self.problem.lands(src, dst)
        bounds = [(lands + a, lands + b) for a, b in (cut(rows, self.count) if rows else [])]
        return [self.data.signal("ready", src, dst, i, span) for i, span in enumerate(bounds)]


def composed(route: HaloRoute, schedule: Schedule, me: int) -> Plan:
    """The Plan of a rank: send halos, multiply own rows, then each piece as it arrives."""
    problem, builder = route.problem, Builder(route.problem.specified(), me)
    peers = sorted(builder.peers, key=lambda peer: abs(peer - me))
    neighbours = [peer for peer in peers if abs(peer - me) == 1]
    builder.lane_of = {peer: f"copy{i % schedule.copy}" for i, peer in enumerate(peers)}
    traffic, b = Traffic(builder, schedule, route), Region("b", me, 0, problem.k, 0, problem.n)

    def multiply(a: Region, first: int, label: str, *needs: tuple[int, int]) -> None:
        lane = f"compute{len(builder.steps) % schedule.compute}"
        waits, after = traffic.arrivals(needs, lane)
        out = Region("out", me, first, first + a.rows, 0, problem.n)
        builder.add(Step(Products((Product(a, b, out),)), lane, label, waits, after=after))

    traffic.announce()
    builder.acquire()
    for items in traffic.leaving(neighbours):
        traffic.push(items)
    if rows := problem.rows[me]:
        multiply(Region("a", me, 0, rows, 0, problem.k), problem.lands(me, me), "own")
    for source, i, piece in chain.from_iterable(traffic.coming(neighbours)):
        multiply(piece.moves[-1].dst, piece.posts[0].first, f"{source}.{i}", (source, i))
    if builder.peers:
        builder.retire()
    return builder.plan(str(schedule), route.buffers, route.words)


def plans(rows: tuple[int, ...], name: str, size: int = 12) -> list[Plan]:
    schedule = Schedule.parse(name)
    route = HaloRoute(Halos("all_gather_matmul", rows, size, size, "float32"), schedule)
    return [composed(route, schedule, rank) for rank in range(len(rows))]


def test_it_is_proven() -> None:
    for rows, name in product(ROWS, NAMES):
        check(plans(rows, name))


def test_it_is_simulated_and_drawn() -> None:
    large = plans((4096,) * 4, NAMES[0], 8192)
    assert simulate(large, MACHINE).stop_s > 0
    assert "copy0" in render(large[0])


def exact(at: Rank, rows: tuple[int, ...]) -> None:
    own_plans = [plans(rows, name)[at.rank] for name in NAMES if "kernel" not in name]
    with engine() as cpu:
        slot = slot_for(cpu, own_plans)
        for turn, plan in enumerate(own_plans):
            parts = integers(turn, sum(rows), 12).split(rows)
            b, own = integers(turn + 9, 12, 12), parts[at.rank]
            before = parts[at.rank - 1][-HALO:] if at.rank and rows[at.rank - 1] else own[:0]
            after = parts[at.rank + 1][:HALO] if at.rank + 1 < at.world else own[:0]
            expected = torch.cat([before, own, after]) @ b
            assert torch.equal(on_cpu(cpu, plan, slot, {"a": own, "b": b}), expected)
        at_rest(cpu, slot)


@ranks(2, 3)
def test_it_is_exact(world: int) -> None:
    run(world, exact, (5, 0, 12, 9)[-world:])
