"""Weights beside products of other groups: a mesh of 2 x 2 ranks whose rows multiply, and whose
columns gather weights and sum gradients. Both are simulated in one timeline, and followed in all
orders in which a program can enqueue them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

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
    """The steps of call ``number`` on a rank of the mesh, numbered from ``first``. Their lanes are
    those of their workspace, their words those of this call."""
    (group,) = (one for one in kind.groups if rank in one)

    def moved(region: Region) -> Region:
        return region._replace(buffer=f"{kind.workspace} {region.buffer}", rank=group[region.rank])

    def signals(those: Sequence[Signal]) -> tuple[Signal, ...]:
        return tuple(
            Signal(one.kind, group[one.poster], group[one.waiter], 0, number * 1000 + one.word)
            for one in those
        )

    steps = []
    for step in kind.plans[group.index(rank)].steps:
        work = step.work
        if isinstance(work, Transfer):
            work = work._replace(src=moved(work.src), dst=moved(work.dst))
        elif isinstance(work, Products):
            each = [
                one._replace(a=moved(one.a), b=moved(one.b), out=moved(one.out)) for one in work[0]
            ]
            work = Products(tuple(each))
        elif isinstance(work, Reduction):
            work = Reduction(tuple(map(moved, work.parts)), work.terms, moved(work.out))
        lane = step.lane
        if kind.workspace == "weights":  # FSDP's stream, and streams of another engine
            lane = {"compute0": "reduce8", "sync": "reduce9"}.get(lane) or f"copy1{lane[4:]}"
        uses = map(signals, (step.waits, step.posts, step.clears))
        after = tuple(first + one for one in step.after)
        steps.append(Step(work, lane, f"{kind.workspace} {step.label}", *uses, after))
    return steps


# One timeline.


class Times(NamedTuple):
    """Seconds: when the last step of a workspace ends, the longest that one of its copies takes,
    and the longest that one waits after the copy before on its lane."""

    end: float = 0.0
    copy: float = 0.0
    wait: float = 0.0


def timeline(machine: Machine, *kinds: Kind) -> dict[str, Times]:
    """The times of calls that all ranks of the mesh enqueue together, by workspace."""
    buffers = tuple(
        one._replace(name=f"{kind.workspace} {one.name}", shapes=one.shapes * 2)
        for kind in kinds
        for one in kind.plans[0].buffers
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
    """On one copy engine a copy of a product waits for a piece. On the three engines that were
    measured it waits for nothing, but shares the link."""
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
#: Slots of a workspace, which products take by turns. Gathers have one of them, and sums the other.
SLOTS = 2


def stuck(
    programs: Sequence[Sequence[tuple[str, int]]], reads_weights: bool = False
) -> tuple[bool, bool]:
    """Whether the ranks of the mesh, each with its order of calls, get stuck: if each device is one
    queue, and if each lane is a queue. A call is a kind, and its number in its workspace. If it
    ``reads_weights``, a product waits for the gather before it, and a gather for the products
    before it, whose weights it replaces."""
    steps, queue, lane_of = list[Step](), list[int](), list[int]()
    lanes: dict[tuple[int, str], int] = {}
    after = list[tuple[int, int]]()
    posted, waited = dict[tuple[object, ...], int](), list[tuple[tuple[object, ...], int]]()
    for rank, program in enumerate(programs):
        before = dict.fromkeys(("tensor", "weights"), -1)
        turns = dict[object, int]()  # calls on each slot
        ends = dict[object, int]()  # the last step of the latest one
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
                after += [(one, index) for one in step.after]
                for one in step.posts:  # a released slot is for the next call on that slot
                    later = turn + (one.kind == "released")
                    posted[slot, later, one.poster, one.waiter, one.word] = index
                waited += [
                    ((slot, turn, one.poster, one.waiter, one.word), index) for one in step.waits
                ]
                after += [(end, index) for end in (ends.get(slot, -1),) if end >= 0]
                if reads_weights and other >= 0:
                    after.append((other, index))
            before[kind.workspace] = ends[slot] = len(steps) - 1
    for word, index in waited:
        if word in posted:  # otherwise the slot was never used before
            after.append((posted[word], index))
    source, target = (np.array(column, np.int64) for column in zip(*after, strict=True))
    order = Order(np.array(queue), np.array(lane_of), source, target)
    return bool(order.stuck), bool(order.run(np.array(lane_of))[1])


def programs(seed: int, alike: bool) -> list[list[tuple[str, int]]]:
    """Orders of the same calls: one for all ranks, or one for each, which keeps the order of the
    calls of each workspace."""
    chance, calls = random.Random(seed), dict[str, list[tuple[str, int]]]()
    for names in (("gather", "sum"), ("product", "scatter")):
        chosen = [chance.choice(names) for _ in range(6)]
        calls[names[0]] = [(name, number) for number, name in enumerate(chosen)]

    def merged() -> list[tuple[str, int]]:
        left, order = {name: list(those) for name, those in calls.items()}, list[tuple[str, int]]()
        while any(left.values()):
            order.append(left[chance.choice([name for name in left if left[name]])].pop(0))
        return order

    return [merged()] * 4 if alike else [merged() for _ in MESH]


def test_no_order_of_calls_deadlocks() -> None:
    """In one order on all ranks, each device may even have a single queue for all lanes."""
    for seed in range(30):
        assert stuck(programs(seed, alike=True), reads_weights=True) == (False, False)


def test_ranks_with_different_orders_need_lanes_of_their_own() -> None:
    """Calls of two workspaces in different orders share no lane, so that none waits for another.
    On a single queue they would; that is why a program enqueues in one order."""
    found = [stuck(programs(seed, alike=False)) for seed in range(30)]
    assert not any(by_lane for _, by_lane in found)
    assert any(by_device for by_device, _ in found)
