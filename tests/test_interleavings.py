"""Plans run right in random interleavings, and so does every spoilt plan that the proof lets by.

The steps of all ranks run here on integers, one small event at a time, in a random order of lanes.
While something is being written it holds nonsense, and what is read is read early or late. Three
calls share a slot as in a captured graph, where words return to their first value.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from ficco.plan import Plan, PlanError, Product, Region, Step, check
from ficco.problem import Problem
from ficco.schedules import NAMED, Schedule, plans

Ints = npt.NDArray[np.int64]

KNOBS = ("", ":pull", ":pieces=2", ":pieces=3,pull,copy=2", ":pieces=2,tail=2,copy=2,compute=2")


class Rank:
    """Memory, words and progress of one rank."""

    def __init__(self, calls: list[Plan], seed: int) -> None:
        self.calls = calls
        self.dice = np.random.default_rng(seed)
        shared = max(plan.room[0] + plan.room[1] for plan in calls)  # bytes: more than enough
        self.memory = {name: np.zeros(shared, np.int64) for name in ("staging", "publish")}
        self.words = {peer: 1 for peer in range(calls[0].problem.world)}
        self.call = -1

    def begin(self, gathered: Ints, one_queue: bool) -> None:
        self.call += 1
        self.plan = self.calls[self.call]
        problem, rank = self.plan.problem, self.plan.rank
        self.b = self.dice.integers(1, 50, (problem.k, problem.n))
        self.memory |= {
            "a": gathered[problem.offsets[rank] : problem.offsets[rank + 1]].copy(),
            "sum": self.nonsense((problem.m, problem.n)),
            "out": self.nonsense((problem.m, problem.n)),
            "gathered": self.nonsense((problem.m, problem.k)),
        }
        self.done: set[int] = set()
        lanes = {step.lane: 0 if one_queue else lane for lane, step in enumerate(self.plan.steps)}
        self.queues = [
            [i for i, step in enumerate(self.plan.steps) if lanes[step.lane] == lane]
            for lane in set(lanes.values())
        ]
        self.running: list[Iterator[bool]] = [iter(()) for _ in self.queues]

    def end(self, gathered: Ints) -> None:
        assert np.array_equal(self.memory["out"], gathered @ self.b), "wrong product"
        if self.plan.problem.return_gathered:
            assert np.array_equal(self.memory["gathered"], gathered), "wrong gathered A"
        self.memory["a"][:] = self.nonsense(self.memory["a"].shape)

    def nonsense(self, shape: tuple[int, ...]) -> Ints:
        return self.dice.integers(10**6, 10**7, shape)


class World:
    """All ranks of a group."""

    def __init__(self, calls: list[list[Plan]], seed: int) -> None:
        self.dice = random.Random(seed)
        self.ranks = [
            Rank(list(found), seed + i) for i, found in enumerate(zip(*calls, strict=True))
        ]
        values = np.random.default_rng(seed)
        problems = [found[0].problem for found in calls]
        self.gathered = [values.integers(1, 50, (p.m, p.k)) for p in problems]

    def run(self) -> None:
        for rank in self.ranks:
            rank.begin(self.gathered[0], self.dice.random() < 0.2)
        busy = list(self.ranks)
        while busy:
            queues = [(rank, queue) for rank in busy for queue in range(len(rank.queues))]
            self.dice.shuffle(queues)
            assert any(self.advance(rank, queue) for rank, queue in queues), "deadlock"
            for rank in [rank for rank in busy if len(rank.done) == len(rank.plan.steps)]:
                rank.end(self.gathered[rank.call])
                if rank.call + 1 == len(rank.calls):
                    busy.remove(rank)
                else:
                    rank.begin(self.gathered[rank.call + 1], self.dice.random() < 0.2)
        for number, rank in enumerate(self.ranks):
            peers = range(len(self.ranks))
            assert all(rank.words[peer] == 1 for peer in peers if peer != number), "dirty word"
            assert not any(value for word, value in rank.words.items() if word not in peers)

    def advance(self, rank: Rank, queue: int) -> bool:
        """Let some events of a queue happen; whether any did."""
        moved = False
        for _ in range(self.dice.choice((1, 1, 2, 5, 50))):
            moves = next(rank.running[queue], None)
            if moves is None:
                if not rank.queues[queue]:
                    return moved
                rank.running[queue] = self.events(rank, rank.queues[queue].pop(0))
                moves = True
            if not moves:
                return moved
            moved = True
        return moved

    def events(self, rank: Rank, index: int) -> Iterator[bool]:
        """The events of a step; False where it has to wait."""
        step = rank.plan.steps[index]
        while not rank.done.issuperset(step.after):
            yield False
        for signal in step.waits:
            while not rank.words.get(signal.word):
                yield False
        for signal in step.clears:
            rank.words[signal.word] = 0
            yield True
        for source, target, make in self.work(rank, step):
            before, early = target.copy(), self.dice.random() < 0.5
            found = source.copy()
            target[...] = rank.nonsense(target.shape)
            yield True
            target[...] = make(found if early else source.copy(), before)
            yield True
        for signal in step.posts:
            words = self.ranks[signal.waiter].words
            assert not words.get(signal.word), "posted twice"
            words[signal.word] = 1
            yield True
        rank.done.add(index)
        yield True

    def work(
        self, rank: Rank, step: Step
    ) -> Iterator[tuple[Ints, Ints, Callable[[Ints, Ints], Ints]]]:
        if step.transfer:
            src, dst = (self.at(region, rank.plan) for region in step.transfer)
            yield src, dst, lambda found, before: found
        for product in step.products:
            for i in range(product.batch):
                a = down(product.a, i * product.a_stride)
                out = down(product.out, i * product.out_stride)
                yield self.at(a, rank.plan), self.at(out, rank.plan), multiply(rank.b, product)

    def at(self, region: Region, plan: Plan) -> Ints:
        """Memory as a step of a plan sees it, wherever its owner is by now."""
        memory = self.ranks[region.rank].memory[region.buffer]
        if region.buffer in ("staging", "publish"):
            pitch = max(plan.staging[1] if region.buffer == "staging" else plan.problem.k, 1)
            memory = memory[: len(memory) // pitch * pitch].reshape(-1, pitch)
        return memory[region.row : region.row_stop, region.col : region.col_stop]


def down(region: Region, rows: int) -> Region:
    return region._replace(row=region.row + rows, row_stop=region.row_stop + rows)


def multiply(b: Ints, product: Product) -> Callable[[Ints, Ints], Ints]:
    def make(a: Ints, before: Ints) -> Ints:
        return a @ b[product.k_first : product.k_last] + (before if product.accumulate else 0)

    return make


def some_plans(dice: random.Random, world: int) -> list[Plan]:
    while True:
        problem = Problem(
            "all_gather_matmul",
            tuple(dice.randrange(5) for _ in range(world)),
            n=dice.choice((1, 2)),
            k=dice.choice((1, 3, 4)),
            dtype=dice.choice(("float32", "bfloat16")),
            return_gathered=dice.random() < 0.3,
            symmetric=dice.random() < 0.5,
        )
        schedule = Schedule.parse(dice.choice(list(NAMED)) + dice.choice(KNOBS))
        try:
            return plans(problem, schedule, dice.choice((None, problem.gathered_bytes // 2)))
        except ValueError:  # not enough for one step
            continue


@pytest.mark.parametrize("seed", range(40))
def test_calls_of_any_schedules_run_right_in_any_order(seed: int) -> None:
    dice = random.Random(seed)
    world = dice.choice((2, 3, 4))
    World([some_plans(dice, world) for _ in range(3)], seed).run()


def spoil(dice: random.Random, found: list[Plan]) -> list[Plan]:
    """Drop or move one thing that puts steps in order."""
    plan = dice.choice(found)
    steps = list(plan.steps)
    i, j = (dice.randrange(len(steps)) for _ in range(2))
    role = dice.choice(("waits", "posts", "clears", "after"))
    holders = [i for i, step in enumerate(steps) if getattr(step, role)]
    if dice.random() < 0.2 or not holders:
        steps[i] = steps[i]._replace(lane=steps[j].lane)
    else:
        i = dice.choice(holders)
        held = getattr(steps[i], role)
        one = dice.choice(held)
        steps[i] = steps[i]._replace(**{role: tuple(x for x in held if x != one)})
        if role != "after":
            steps[j] = steps[j]._replace(**{role: (*getattr(steps[j], role), one)})
            if dice.random() < 0.3:  # take the whole signal out
                return [without(plan, one) for plan in found]
    return [replace(p, steps=tuple(steps)) if p is plan else p for p in found]


def without(plan: Plan, signal: object) -> Plan:
    def rest(step: Step, role: str) -> tuple[object, ...]:
        return tuple(x for x in getattr(step, role) if x != signal)

    steps = [
        step._replace(**{role: rest(step, role) for role in ("waits", "posts", "clears")})
        for step in plan.steps
    ]
    return replace(plan, steps=tuple(steps))


@pytest.mark.parametrize("seed", range(20))
def test_spoilt_plans_that_pass_the_proof_run_right(seed: int) -> None:
    dice = random.Random(seed)
    passed = caught = 0
    for _ in range(40):
        found = some_plans(dice, dice.choice((2, 3)))
        spoilt = spoil(dice, found)
        try:
            check(spoilt)
        except PlanError:
            caught += 1
            continue
        passed += 1
        other = some_plans(dice, len(found))
        World([spoilt, other, spoilt], seed).run()
        World([spoilt, spoilt, spoilt], seed + 1).run()
    assert passed and caught
