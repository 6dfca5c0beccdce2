"""FSDP2's weights and products on a mesh of 2 x 2 ranks: rows multiply, columns gather weights and
sum gradients. Calls of both are simulated in one timeline, and checked for deadlocks in many orders
of enqueueing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_stages import Asked

from ficco import fsdp
from ficco.fsdp import GATHER, SUM, WeightProblem, weight_plans
from ficco.machine import Machine, find
from ficco.plan import Plan, Products, Reduction, Region, Signal, Step, Transfer
from ficco.problems.products import Problem
from ficco.proof.order import Order
from ficco.schedules import Schedule, plans
from ficco.simulate.events import Simulation

MACHINE = find("h200-4", None)
ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))
MESH = range(4)
#: Elements of a slice of a Llama-8B block on two ranks.
SLICE = 109_000_000


class Kind(NamedTuple):
    """A kind of call: its workspace, the groups of ranks that make it, and the Plans of a group."""

    workspace: str
    groups: tuple[tuple[int, ...], ...]
    plans: list[Plan]


@cache
def products(operator: str = "all_gather_matmul") -> Kind:
    problem = Problem(operator, (1024, 1024), 3584, 4096, "bfloat16")
    return Kind("tensor", ROWS, plans(problem, Schedule.parse("hetero-fused-1d:pieces=4")))


@cache
def weights(operator: str = GATHER, count: int = SLICE, piece: int = fsdp.PIECE_BYTES) -> Kind:
    problem = WeightProblem(operator, 2, count, "bfloat16")
    schedule = Schedule.parse(f"serial:pieces={-(-2 * count // piece)}")
    return Kind("weights", COLUMNS, weight_plans(problem, schedule))


def steps_of(kind: Kind, rank: int, number: int, first: int) -> list[Step]:
    """Return the steps of call ``number`` on a rank, numbered from ``first``."""
    (group,) = (group for group in kind.groups if rank in group)

    def moved(region: Region) -> Region:
        return region._replace(buffer=f"{kind.workspace} {region.buffer}", rank=group[region.rank])

    def signals(items: Sequence[Signal]) -> tuple[Signal, ...]:
        word = number * 1000
        ends = ((s, group[s.poster], group[s.waiter]) for s in items)
        return tuple(Signal(s.kind, *pair, 0, word + s.word) for s, *pair in ends)

    steps = []
    for step in kind.plans[group.index(rank)].steps:
        work = step.work
        if isinstance(work, Transfer):
            work = work._replace(src=moved(work.src), dst=moved(work.dst))
        elif isinstance(work, Products):
            each = [p._replace(a=moved(p.a), b=moved(p.b), out=moved(p.out)) for p in work[0]]
            work = Products(tuple(each))
        elif isinstance(work, Reduction):
            work = Reduction(tuple(map(moved, work.parts)), work.terms, moved(work.out))
        lane = step.lane
        if kind.workspace == "weights":  # FSDP's stream, and streams of another engine
            lane = {"compute0": "reduce8", "sync": "reduce9"}.get(lane) or f"copy1{lane[4:]}"
        uses = map(signals, (step.waits, step.posts, step.clears))
        after = tuple(first + index for index in step.after)
        steps.append(Step(work, lane, f"{kind.workspace} {step.label}", *uses, after))
    return steps


# One timeline.


class Times(NamedTuple):
    """Seconds: the end of the last step, the longest copy, and the longest gap before a copy."""

    end: float = 0.0
    copy: float = 0.0
    wait: float = 0.0


def timeline(machine: Machine, *kinds: Kind) -> dict[str, Times]:
    """Return the times of calls that all ranks of the mesh enqueue together, by workspace."""
    buffers = tuple(
        buffer._replace(name=f"{kind.workspace} {buffer.name}", shapes=buffer.shapes * 2)
        for kind in kinds
        for buffer in kind.plans[0].buffers
    )
    problem, mesh = Asked(kinds[-1].plans[0].problem.specification, 4), list[Plan]()
    for rank in MESH:
        steps = list[Step]()
        for number, kind in enumerate(kinds):
            steps += steps_of(kind, rank, number, len(steps))
        mesh.append(Plan(problem, "both", rank, tuple(steps), buffers, 4000))
    times = {kind.workspace: Times() for kind in kinds}
    for ran in Simulation(mesh, machine, "queued").run():
        free: dict[str, float] = {}
        for step, start, stop in ran:
            name, copies = step.label.split()[0], step.copy is not None
            old, lasts, waits = times[name], (stop - start) * copies, 0.0
            if copies and step.lane in free:
                waits = start - free[step.lane]
            times[name] = Times(max(old.end, stop), max(old.copy, lasts), max(old.wait, waits))
            free[step.lane] = stop
    return times


@pytest.mark.parametrize("operator", [GATHER, SUM])
def test_a_copy_waits_for_one_piece_of_weights(operator: str) -> None:
    """With one copy engine, a copy of a product waits for a piece of weights. With three engines,
    as on the measured machine, it does not wait but shares the link."""
    assert MACHINE is not None and MACHINE.copies is not None and MACHINE.topology is not None
    one_engine = replace(MACHINE, copies=replace(MACHINE.copies, engines=1))
    for machine in (one_engine, MACHINE):
        alone = timeline(machine, products())["tensor"]
        piece = timeline(machine, weights(operator))["weights"].copy
        cut, whole = (
            timeline(machine, weights(operator, piece=size), products())["tensor"]
            for size in (fsdp.PIECE_BYTES, 1 << 40)
        )
        assert alone.wait < 1e-6
        if machine is MACHINE:
            slower = 2 / machine.topology.sharing
            assert max(cut.wait, whole.wait) < 1e-6 and alone.copy < cut.copy < slower * alone.copy
        else:
            assert piece / 2 < cut.wait < 1.1 * piece and whole.wait > 4 * piece
            assert alone.end < cut.end < whole.end


# All orders.


KINDS = {
    "gather": lambda: weights(GATHER, 1000),
    "sum": lambda: weights(SUM, 1000),
    "product": products,
    "scatter": lambda: products("matmul_reduce_scatter"),
}
#: Slots of a workspace. Products alternate between them; gathers have one, sums the other.
SLOTS = 2


def stuck(programs: Sequence[Sequence[Any]], reads_weights: bool = False) -> tuple[bool, bool]:
    """Return whether the programs of the ranks deadlock: with one queue for each device, and with
    one for each lane. A program lists calls: a kind and a number in its workspace. With
    ``reads_weights`` a product waits for the previous gather, and a gather for the previous
    products, whose weights it overwrites."""
    steps, queue, lane_of = list[Step](), list[int](), list[int]()
    lanes: dict[tuple[int, str], int] = {}
    after = list[tuple[int, int]]()
    posted, waited = dict[tuple[object, ...], int](), list[tuple[tuple[object, ...], int]]()
    for rank, program in enumerate(programs):
        before = dict.fromkeys(("tensor", "weights"), -1)
        turns = dict[object, int]()  # index of the latest call of each slot
        ends = dict[object, int]()  # its last step
        for name, number in program:
            kind, first = KINDS[name](), len(steps)
            weighs = kind.workspace == "weights"
            other = before["tensor" if weighs else "weights"]
            slot = kind.workspace, name if weighs else number % SLOTS
            turn = turns[slot] = turns.get(slot, -1) + 1
            for index, step in enumerate(steps_of(kind, rank, 0, first), first):
                steps.append(step)
                queue.append(rank)
                lane_of.append(lanes.setdefault((rank, step.lane), len(lanes)))
                after += [(earlier, index) for earlier in step.after]
                for s in step.posts:  # "released" is for the next call on the slot
                    later = turn + (s.kind == "released")
                    posted[slot, later, s.poster, s.waiter, s.word] = index
                waited += [((slot, turn, s.poster, s.waiter, s.word), index) for s in step.waits]
                after += [(end, index) for end in (ends.get(slot, -1),) if end >= 0]
                if reads_weights and other >= 0:
                    after.append((other, index))
            before[kind.workspace] = ends[slot] = len(steps) - 1
    for word, index in waited:
        if word in posted:  # otherwise this is the first call on the slot
            after.append((posted[word], index))
    source, target = (np.array(column, np.int64) for column in zip(*after, strict=True))
    order = Order(np.array(queue), np.array(lane_of), source, target)
    return bool(order.stuck), bool(order.run(np.array(lane_of))[1])


def programs(seed: int, alike: bool) -> list[list[tuple[str, int]]]:
    """Return random programs of the same calls, in one order if ``alike``, or one for each rank."""
    chance, calls = random.Random(seed), dict[str, list[tuple[str, int]]]()
    for names in (("gather", "sum"), ("product", "scatter")):
        chosen = [chance.choice(names) for _ in range(6)]
        calls[names[0]] = [(name, number) for number, name in enumerate(chosen)]

    def merged() -> list[tuple[str, int]]:
        left, order = {name: list(items) for name, items in calls.items()}, list[tuple[str, int]]()
        while any(left.values()):
            order.append(left[chance.choice([name for name in left if left[name]])].pop(0))
        return order

    return [merged()] * 4 if alike else [merged() for _ in MESH]


def test_no_order_of_calls_deadlocks() -> None:
    """With one order on all ranks, a single queue for all lanes of a device is enough."""
    for seed in range(30):
        assert stuck(programs(seed, alike=True), reads_weights=True) == (False, False)


def test_ranks_with_different_orders_need_lanes_of_their_own() -> None:
    """Calls of two workspaces share no lane, so that their orders may differ between ranks. On a
    single queue such orders deadlock, so a program enqueues in one order."""
    results = [stuck(programs(seed, alike=False)) for seed in range(30)]
    assert not any(by_lane for _, by_lane in results)
    assert any(by_device for by_device, _ in results)
