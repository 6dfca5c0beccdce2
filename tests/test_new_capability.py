"""A new operator, as one specification, one route and one composition::

    out = all_gather(a @ b)            a [rows of the rank, k], b [k, n], out [all rows, n]

``Route`` and ``Traffic`` implement pieces, lanes, movers, ragged rows, and several hosts.
"""

from __future__ import annotations

from functools import partial
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
from ficco.schedules.builder import REDUCE_LANE, Builder, WordAllocator
from ficco.schedules.exchange import Parcel, Route, Traffic
from ficco.schedules.groups import Unit, cut, finer, legs, peers_in_order, targets_in_order, via
from ficco.simulate import simulate

MACHINE = find("h200-4", None)
NAMES = ("serial", "serial:kernel", "serial:pieces=3,tail=2", "serial:pieces=4+2,copy=2,compute=2")
ROWS = (((16,) * 4, 1), ((16,) * 4, 2), ((9, 0, 17), 1), ((9, 20, 0, 31, 16, 5), 2), ((5,) * 3, 3))


def specified(base: Problem) -> Asked:
    """The problem of the new operator. ``base`` is an all-gather of the same rows."""
    (a, b), world, out = base.specification.operands, base.world, "A @ B"
    specification = Specification(
        operands=(a._replace(leaves=False), b),
        results=(Buffer("out", out, base.dtype, ((base.m, base.n),) * world, "result"),),
        contractions=(Contraction("A", "B", out, (base.k,) * world),),
        exchanges={out: Exchange(base.block, base.leaves, base.lands, terms=True)},
    )
    return Asked(specification, world, hosts=base.hosts)


def units_of(problem: Problem, rank: int, schedule: Schedule) -> list[Unit]:
    first, rows = problem.offsets[rank], problem.rows[rank]
    spans = cut(rows, schedule.pieces or problem.world) if rows else []
    units = [Unit(rank, i, first + a, first + b, i) for i, (a, b) in enumerate(spans)]
    return units[:-1] + [part for unit in units[-1:] for part in finer(unit, schedule.tail)]


class ProductRoute(Route):
    """Rows of the product, from the rank that computes them to all other ranks."""

    kind = "ready"

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem, self.words = problem, WordAllocator(problem.world)
        self.units = [units_of(problem, rank, schedule) for rank in range(problem.world)]
        self.slots = max(1, *map(len, self.units))
        self.data = self.words.block(self.slots * problem.hosts)
        own = tuple((rows, problem.n) for rows in problem.rows)
        others = tuple((problem.m - rows, problem.n) for rows in problem.rows)
        local = Buffer("partial", "A @ B", problem.dtype, own, "local", leaves=True)
        self.buffers = [local, Buffer("staging", "A @ B", problem.dtype, others, "slot")]

    def pieces(self, src: int, dst: int, owner: int) -> list[Parcel]:
        parcels = []
        for unit, signal in zip(self.units[owner], self.signals(src, dst, owner), strict=True):
            move = Transfer(self.rows(src, unit), self.rows(dst, unit), 1 << owner)
            parcels.append(Parcel((move,), (f"{owner}>{dst}",), (), (signal,), unit.ordinal))
        return parcels

    def signals(self, src: int, dst: int, owner: int) -> list[Signal]:
        carrier, slot = via(self.problem, dst, owner), self.problem.hosts_ahead(dst, owner)
        return [
            self.data.signal("ready", carrier, dst, slot * self.slots + unit.ordinal, unit[2:4])
            for unit in self.units[owner]
        ]

    def rows(self, rank: int, unit: Unit) -> Region:
        """The region of a piece on a rank. Staging has the rows of all other ranks, in order."""
        own, problem = rank == unit.peer, self.problem
        up = problem.offsets[rank] if own else problem.rows[rank] * (unit.peer > rank)
        at = "partial" if own else "staging", rank, unit.start - up, unit.stop - up
        return Region(*at, 0, problem.n)


def at_home(rows: Region, unit: Unit) -> Region:
    return rows._replace(buffer="out", row=unit.start, row_stop=unit.stop)


def composed(route: ProductRoute, schedule: Schedule, me: int) -> Plan:
    """The Plan of a rank: products, each sent when it is computed, then arrivals placed in out."""
    problem, builder = route.problem, Builder(specified(route.problem), me)
    place, b = (me, problem.world, problem.hosts), Region("b", me, 0, problem.k, 0, problem.n)
    targets, pairs = targets_in_order(*place)[: len(builder.peers)], list(legs(problem, me))
    builder.lane_of = {peer: f"copy{i % schedule.copy}" for i, peer in enumerate(targets)}
    traffic, computed = Traffic(builder, schedule, route), list[int]()
    traffic.announce()
    builder.acquire()
    for unit in route.units[me]:
        lane, out = f"compute{unit.ordinal % schedule.compute}", route.rows(me, unit)
        products = (Product(out._replace(buffer="a", col_stop=problem.k), b, out),)
        computed.append(builder.add(Step(Products(products), lane, f"{unit.ordinal}")))
        for peer in targets:
            traffic.send(peer, unit.ordinal, (computed[-1],))
        move = Transfer(out, at_home(out, unit), 1 << me)
        builder.add(Step(move, REDUCE_LANE, "own", after=(computed[-1],)))
    traffic.cross(pairs, lambda _, number: (computed[number],), direct=False)
    traffic.relay((source for _, source in pairs), targets)
    for source, i, _ in chain.from_iterable(traffic.coming(peers_in_order(*place))):
        traffic.home(source, i, REDUCE_LANE, partial(at_home, unit=route.units[source][i]))
    if builder.peers:
        builder.retire()
    return builder.plan(str(schedule), route.buffers, route.words)


def plans(rows: tuple[int, ...], name: str, hosts: int = 1, size: int = 12) -> list[Plan]:
    base = Problem("all_gather_matmul", rows, size, size, "float32", hosts=hosts)
    route = ProductRoute(base, schedule := Schedule.parse(name))
    return [composed(route, schedule, rank) for rank in range(base.world)]


def test_it_is_proven() -> None:
    for (rows, hosts), name in product(ROWS, NAMES):
        check(plans(rows, name, hosts))


def test_it_is_simulated_and_drawn() -> None:
    whole, pieces = (plans((4096,) * 4, name, 1, 8192) for name in ("serial", "serial:pieces=4"))
    assert simulate(pieces, MACHINE).stop_s < simulate(whole, MACHINE).stop_s
    assert "copy0" in render(pieces[0])


def exact(at: Rank, rows: tuple[int, ...]) -> None:
    own_plans = [plans(rows, name)[at.rank] for name in NAMES if "kernel" not in name]
    own = slice(sum(rows[: at.rank]), sum(rows[: at.rank + 1]))
    with engine() as cpu:
        slot = slot_for(cpu, own_plans)
        for turn, plan in enumerate(own_plans):
            a, b = integers(turn, sum(rows), 12), integers(turn + 9, 12, 12)
            assert torch.equal(on_cpu(cpu, plan, slot, {"a": a[own], "b": b}), a @ b)
        at_rest(cpu, slot)


@ranks(2, 3)
def test_it_is_exact(world: int) -> None:
    run(world, exact, (5, 0, 12)[-world:])
