"""Exact results of plans in random interleavings, and of mutated plans that pass the proof.

The steps of all ranks run on integers, one small event at a time, in a random order of lanes. A
region holds garbage while it is written. Operands are read at the start or at the end of a step.
Three calls share a slot as in a captured graph, where words return to their first value.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from cases import gathered_bytes
from edits import changed, down, mapped, right

from ficco.plan import Plan, Product, Reduction, Region, Step, Transfer, in_parts
from ficco.problems.products import OPERATORS, Problem
from ficco.proof import PlanError, check
from ficco.schedules import NAMED, Schedule, plans

Ints = npt.NDArray[np.int64]

KNOBS = ("", ":pull", ":pieces=2", ":pieces=3,pull,copy=2", ":pieces=2,tail=2,copy=2,compute=2")
BETAS = (":beta", ":pieces=2,tail=2,compute=2,beta", ":pieces=2,pull,beta")


#: Returns the values that a step writes, from its operands and the previous values.
Compute = Callable[[list[Ints], Ints], Ints]


class Inputs:
    """Operands of one call on all ranks, and the expected results."""

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        ranks = range(problem.world)
        self.a = [rng.integers(1, 50, (problem.left_rows(rank), problem.k)) for rank in ranks]
        self.b = [rng.integers(1, 50, (problem.b_rows(rank), problem.n)) for rank in ranks]
        kind = problem.kind
        sent = [a @ b for a, b in zip(self.a, self.b, strict=True)] if kind.scatters else self.a

        def block(src: int, dst: int) -> Ints:
            first = problem.leaves(src, dst)
            return sent[src][first : first + problem.block(src, dst)]

        self.gathered = [np.concatenate([block(src, dst) for src in ranks]) for dst in ranks]
        self.out = self.gathered
        if kind.returns:
            self.out = [sum(sent)] * problem.world
        elif kind.sums:
            self.out = [sum(block(src, dst) for src in ranks) for dst in ranks]
        elif not kind.scatters:
            turned = [a.T if kind.inner else a for a in self.gathered]
            self.out = [a @ b for a, b in zip(turned, self.b, strict=True)]


class Rank:
    """Memory, words and progress of one rank."""

    def __init__(self, calls: list[Plan], seed: int) -> None:
        self.calls = calls
        self.rng = np.random.default_rng(seed)
        shared = max(plan.slot_bytes for plan in calls)  # in bytes, more than needed
        self.memory = {name: np.zeros(shared, np.int64) for name in ("staging", "publish")}
        self.words = {peer: 1 for peer in range(calls[0].problem.world)}
        self.call = -1

    def begin(self, inputs: Inputs, one_queue: bool) -> None:
        self.call += 1
        # Parts of a gated product run in any order that the signals allow.
        self.plan = in_parts(self.calls[self.call], concurrent=not one_queue)
        self.b = inputs.b[self.plan.rank]
        self.memory["a"] = inputs.a[self.plan.rank].copy()
        for buffer in self.plan.buffers:
            if buffer.memory in ("result", "local"):
                self.memory[buffer.name] = self.garbage(self.plan.shape(buffer.name))
        self.done: set[int] = set()
        lanes = {step.lane: 0 if one_queue else lane for lane, step in enumerate(self.plan.steps)}
        steps = [*enumerate(self.plan.steps)]
        each = set(lanes.values())
        self.queues = [[i for i, step in steps if lanes[step.lane] == lane] for lane in each]
        self.running: list[Iterator[bool]] = [iter(()) for _ in self.queues]

    def end(self, inputs: Inputs) -> None:
        rank = self.plan.rank
        assert np.array_equal(self.memory["out"], inputs.out[rank]), "wrong product"
        if self.plan.problem.return_gathered:
            assert np.array_equal(self.memory["gathered"], inputs.gathered[rank]), "wrong A"
        self.memory["a"][:] = self.garbage(self.memory["a"].shape)

    def garbage(self, shape: tuple[int, ...]) -> Ints:
        return self.rng.integers(10**6, 10**7, shape)


class World:
    """All ranks of a group."""

    def __init__(self, calls: list[list[Plan]], seed: int) -> None:
        self.rng = random.Random(seed)
        self.ranks = [Rank(list(each), seed + i) for i, each in enumerate(zip(*calls, strict=True))]
        values = np.random.default_rng(seed)
        self.inputs = [Inputs(plans[0].problem, values) for plans in calls]

    def run(self) -> None:
        for rank in self.ranks:
            rank.begin(self.inputs[0], self.rng.random() < 0.2)
        busy = list(self.ranks)
        while busy:
            queues = [(rank, queue) for rank in busy for queue in range(len(rank.queues))]
            self.rng.shuffle(queues)
            moved = any(self.advance(rank, queue) for rank, queue in queues)
            assert moved or not queues, "deadlock"  # one rank without rows has no steps
            for rank in [rank for rank in busy if len(rank.done) == len(rank.plan.steps)]:
                rank.end(self.inputs[rank.call])
                if rank.call + 1 == len(rank.calls):
                    busy.remove(rank)
                else:
                    rank.begin(self.inputs[rank.call + 1], self.rng.random() < 0.2)
        for number, rank in enumerate(self.ranks):
            peers = range(len(self.ranks))
            assert all(rank.words[peer] == 1 for peer in peers if peer != number), "dirty word"
            assert not any(value for word, value in rank.words.items() if word not in peers)

    def advance(self, rank: Rank, queue: int) -> bool:
        """Run a few events of a queue; return whether any event ran."""
        moved = False
        for _ in range(self.rng.choice((1, 1, 2, 5, 50))):
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
        """Run the events of a step; yield False while the step has to wait."""
        step = rank.plan.steps[index]
        while not rank.done.issuperset(step.after):
            yield False
        for signal in step.waits:
            while not rank.words.get(signal.word):
                yield False
        for signal in step.clears:
            rank.words[signal.word] = 0
            yield True
        for sources, target, compute in self.work(rank, step):
            before, early = target.copy(), self.rng.random() < 0.5
            values = [source.copy() for source in sources]
            target[...] = rank.garbage(target.shape)
            yield True
            target[...] = compute(values if early else [s.copy() for s in sources], before)
            yield True
        for signal in step.posts:
            words = self.ranks[signal.waiter].words
            assert not words.get(signal.word), "posted twice"
            words[signal.word] = 1
            yield True
        rank.done.add(index)
        yield True

    def work(self, rank: Rank, step: Step) -> Iterator[tuple[list[Ints], Ints, Compute]]:
        def at(region: Region) -> Ints:
            return self.at(region, rank.plan)

        if isinstance(step.work, Transfer):
            yield [at(step.work.src)], at(step.work.dst), lambda values, _: values[0]
        if isinstance(step.work, Reduction):
            parts = [at(part) for part in step.work.parts]
            yield parts, at(step.work.out), lambda values, _: sum(values)
        for product in step.products:
            for i in range(product.batch):
                a = down(i * product.a_stride)(product.a)
                out = down(i * product.out_stride)(product.out)
                matrix = product.b
                b = rank.b[matrix.row : matrix.row_stop, matrix.col : matrix.col_stop]
                sources = [a] if product.addend is None else [a, product.addend]
                yield list(map(at, sources)), at(out), multiply(b, product)

    def at(self, region: Region, plan: Plan) -> Ints:
        """Return a region as a step of a plan sees it, whichever call its owner has reached."""
        memory = self.ranks[region.rank].memory[region.buffer]
        if region.buffer in ("staging", "publish"):
            pitch = max(plan.shape(region.buffer)[1], 1)
            memory = memory[: len(memory) // pitch * pitch].reshape(-1, pitch)
        return memory[region.row : region.row_stop, region.col : region.col_stop]


def multiply(b: Ints, product: Product) -> Compute:
    def compute(values: list[Ints], before: Ints) -> Ints:
        a, *addend = values
        a = a.T if product.transposed else a
        return a @ b + sum(addend) + (before if product.accumulate else 0)

    return compute


def random_plans(rng: random.Random, world: int, operator: str = "") -> list[Plan]:
    operator = operator or rng.choice(list(OPERATORS))
    kind = OPERATORS[operator]
    n, k = rng.choice((1, 2, 4)), rng.choice((1, 3, 4))
    dtype = rng.choice(("float32", "bfloat16"))
    if kind.blocks:
        table = [[rng.randrange(4) for _ in range(world)] for _ in range(world)]
        problem = Problem.of_blocks(operator, table, n, k, dtype)
    else:
        problem = Problem(operator, tuple(rng.randrange(5) for _ in range(world)), n, k, dtype)
    if not kind.scatters:
        gathered = rng.random() < 0.3 and not kind.blocks
        problem = replace(problem, return_gathered=gathered, symmetric=rng.random() < 0.5)
    while True:
        name = rng.choice(list(NAMED)) + rng.choice(KNOBS + BETAS * kind.sums)
        try:
            cap = rng.choice((None, gathered_bytes(problem) // 2))
            return plans(problem, Schedule.parse(name), cap)
        except ValueError:  # a cap too small for one step, or incompatible knobs
            continue


@pytest.mark.parametrize("seed", range(24))
def test_calls_of_any_schedules_run_right_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    world = rng.choice((1, 2, 3, 4))
    World([random_plans(rng, world) for _ in range(3)], seed).run()


def with_moved_region(rng: random.Random, step: Step) -> Step:
    """Return the step with a moved region, or a sum without one of its parts."""
    distance = rng.choice((-1, 1))
    nudge = rng.choice((down, right))(distance)
    if isinstance(step.work, Transfer):
        return changed(step, **{rng.choice(("src", "dst")): nudge})
    if step.products:
        ends = ("a", "out", "addend") if step.products[0].addend else ("a", "out")
        return changed(step, **{rng.choice(ends): nudge})
    if isinstance(step.work, Reduction):
        parts, terms, _ = step.work
        i = rng.randrange(len(parts))
        if rng.random() < 0.5:
            return changed(step, parts=parts[:i] + parts[i + 1 :], terms=terms[:i] + terms[i + 1 :])
        return changed(step, parts=(*parts[:i], nudge(parts[i]), *parts[i + 1 :]))
    return step


def mutate(rng: random.Random, originals: list[Plan]) -> list[Plan]:
    """Drop, move or change one property, mostly an ordering of steps, else their work."""
    plan = rng.choice(originals)
    steps = list(plan.steps)
    i, j = (rng.randrange(len(steps)) for _ in range(2))
    role = rng.choice(("waits", "posts", "clears", "after"))
    holders = [i for i, step in enumerate(steps) if getattr(step, role)]
    if rng.random() < 0.15:
        steps[i], steps[j] = (
            value._replace(work=swapped.work)
            for value, swapped in ((steps[i], steps[j]), (steps[j], steps[i]))
        )
    elif rng.random() < 0.15:
        steps[i] = with_moved_region(rng, steps[i])
    elif rng.random() < 0.2 or not holders:
        steps[i] = steps[i]._replace(lane=steps[j].lane)
    else:
        i = rng.choice(holders)
        values = getattr(steps[i], role)
        value = rng.choice(values)
        steps[i] = steps[i]._replace(**{role: tuple(x for x in values if x != value)})
        if role != "after":
            steps[j] = steps[j]._replace(**{role: (*getattr(steps[j], role), value)})
            if rng.random() < 0.3:  # remove the signal from all steps
                return mapped(originals, lambda signal: None if signal == value else signal)
    return [replace(p, steps=tuple(steps)) if p is plan else p for p in originals]


@pytest.mark.parametrize("seed", range(12))
def test_mutated_plans_that_pass_the_proof_run_right(seed: int) -> None:
    rng = random.Random(seed)
    passed = caught = 0
    for _ in range(40):
        originals = random_plans(rng, rng.choice((2, 3)))
        mutated = mutate(rng, originals)
        try:
            check(mutated)
        except PlanError:
            caught += 1
            continue
        passed += 1
        others = random_plans(rng, len(originals))
        World([mutated, others, mutated], seed).run()
        World([mutated, mutated, mutated], seed + 1).run()
    assert passed and caught
