"""The contract of every operator on every engine: a matrix of aspects, operators, engines and
numbers of ranks. A new operator is a row of ``tests/subjects.py``, a new engine one of
``engines.py``; either gets the whole matrix.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import own_group
from engines import DOUBLES, ENGINES, Engine
from ranks import SLOW, Failure, Rank, caught, gave_up, since
from subjects import (
    KINDS,
    SUBJECTS,
    Case,
    Subject,
    Tensors,
    compare,
    constants_of,
    exact,
    gradient_of,
    reference,
    root_mean_square,
)
from test_hosts import host_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ficco
from ficco.ops.record import Record
from ficco.problems.products import OPERATORS

#: Seconds that a call of the tests of faults waits for a peer.
PATIENCE_S = 1.0


def all_exact(at: Rank, name: str, cases: Sequence[Case], hosts: int = 1) -> int:
    """Calls one after the other, some of which keep what they gathered."""
    with host_of(at, hosts) if hosts > 1 else nullcontext():
        for iteration, case in enumerate(cases):
            exact(at, SUBJECTS[name], case, iteration, saves=iteration % 3 == 1)
    return len(cases)


# The matrix.


def quick(engine: Engine, where: Any) -> bool:
    """Whether a cell is of those that run before others."""
    return engine.name == "cpu" and where in (2, (2, 2))


def cells(
    over: str = "worlds", only: int = 0, having: str = "", gradients: bool = False
) -> pytest.MarkDecorator:
    """A test for each subject, engine, and number of ranks, or of hosts and ranks on each; ``only``
    one number, engines ``having`` an attribute, and subjects that have ``gradients``."""
    found = []
    for engine in ENGINES:
        if having and not getattr(engine, having):
            continue
        for where in (only,) if only else getattr(engine, over):
            for name, subject in SUBJECTS.items():
                if name in engine.lacks or (gradients and not subject.differentiable):
                    continue
                marks = [*engine.marks, *(() if quick(engine, where) else (SLOW,))]
                if name.endswith("float8") and engine.device == "cpu":
                    marks.append(since("2.13", "multiplies no float8 on CPUs"))
                label = f"{engine.name}-{where}-{name.replace(' ', '')}"
                found.append(pytest.param(engine, where, name, marks=marks, id=label))
    return pytest.mark.parametrize(("engine", "where", "name"), found)


def drawn(
    name: str, engine: Engine, world: int, schedules: Sequence[str], kinds: Sequence[str],
    needs: Callable[[random.Random, Subject], tuple[bool, ...]],
) -> list[Case]:  # fmt: skip
    """A case for each schedule; all else is drawn, the same on every rank."""
    subject = SUBJECTS[name]
    chance = random.Random(f"{name} {engine.name} {world} {len(schedules)}")
    return [
        subject.case(chance, world, chance.choice(kinds), engine.name).on(
            schedule=schedule,
            dtype=chance.choice(subject.dtypes(engine.name)),
            layout=chance.choice(("", *subject.layouts)),
            needs=needs(chance, subject),
        )
        for schedule in schedules
    ]


def none(chance: random.Random, subject: Subject) -> tuple[bool, ...]:
    return ()


def every(chance: random.Random, subject: Subject) -> tuple[bool, ...]:
    return (subject.differentiable,) * len(subject.operands)


def some(chance: random.Random, subject: Subject) -> tuple[bool, ...]:
    """All operands need a gradient, or each of them by chance."""
    picked = tuple(chance.random() < 0.5 for _ in subject.operands)
    return picked if any(picked) and chance.random() < 0.6 else every(chance, subject)


def share(over: str, engine: Engine, where: Any, name: str, parts: int = 3) -> slice:
    """A third of the schedules: for each engine and number of ranks, and each subject, another."""
    every = [(one.name, each) for one in ENGINES for each in getattr(one, over)]
    turn = every.index((engine.name, where)) + [*SUBJECTS].index(name)
    return slice(turn % parts, None, parts)


@cells()
def test_forward(engine: Engine, where: int, name: str) -> None:
    """Every schedule on two ranks of the CPU's engine and of CUDA's, a third of them elsewhere, and
    of gathers that return the gathered A, too; rows, sizes, dtypes and layouts in turns."""
    schedules = SUBJECTS[name].schedules(where, tiled=engine.tiled)
    if where != 2 or engine.name == "hip" or name.endswith("gathered"):
        schedules = schedules[share("worlds", engine, where, name)]
    cases = drawn(name, engine, where, schedules, KINDS, none)
    assert engine.run(where, all_exact, name, cases) == [len(cases)] * where


@cells(gradients=True)
def test_gradient(engine: Engine, where: int, name: str) -> None:
    """Gradients of all operands, and of some."""
    schedules = SUBJECTS[name].schedules(where, tiled=engine.tiled)
    chosen = schedules if len(schedules) < 12 else schedules[:: len(schedules) // 12]
    chosen = chosen * 2 if where == 2 else chosen
    cases = drawn(name, engine, where, chosen, ("equal", "uneven"), some)
    assert engine.run(where, all_exact, name, cases) == [len(cases)] * where


@cells()
def test_few_rows_and_none(engine: Engine, where: int, name: str) -> None:
    """Fewer rows than pieces, and none, with gradients."""
    schedules = SUBJECTS[name].schedules(where)[:4] * 2
    cases = drawn(name, engine, where, schedules, ("few", "none"), every)
    assert engine.run(where, all_exact, name, cases) == [len(cases)] * where


@cells(over="hosts")
def test_over_hosts(engine: Engine, where: tuple[int, int], name: str) -> None:
    """A third of the schedules that cross hosts, and on doubles a sixth; gradients of every third
    call."""
    hosts, local = where
    world = hosts * local
    schedules = SUBJECTS[name].schedules(world, hosts)
    schedules = schedules[share("hosts", engine, where, name, 6 if engine.name in DOUBLES else 3)]
    cases = drawn(name, engine, world, schedules, ("equal", "uneven", "few"), none)
    full = every(random.Random(), SUBJECTS[name])
    cases = [case.on(needs=full) if turn % 3 == 0 else case for turn, case in enumerate(cases)]
    assert engine.run(world, all_exact, name, cases, hosts) == [len(cases)] * world


# Compilers.


class Calls(TorchDispatchMode):
    """The calls of ficco's operators of ``torch.library`` in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ficco":
            self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def trained(
    subject: Subject,
    case: Case,
    operands: Tensors,
    constants: Tensors,
    through: Callable[[Any], Any] = lambda function: function,
) -> Tensors:
    """Results and gradients of a call ``through`` a compiler."""

    def called(*leaves: torch.Tensor) -> Tensors:
        return subject.call(case, list(leaves), constants)

    leaves = [one.detach().clone().requires_grad_(subject.differentiable) for one in operands]
    results = through(called)(*leaves)
    if not subject.differentiable:
        return results
    grads = [gradient_of(one, turn).to(one) for turn, one in enumerate(results)]
    return [*results, *torch.autograd.grad(results, leaves, grads)]


def compiled(function: Callable[..., Tensors]) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def traced(at: Rank, name: str, case: Case) -> None:
    """A compiled call is equal to an eager one, to the last bit. Fake operands give the same shapes
    and strides. The operators pass PyTorch's own checks."""
    subject, dtype = SUBJECTS[name], getattr(torch, case.dtype)
    operands = [one.to(at.device, dtype) for one in subject.make(case, at.rank, 0)]
    constants = constants_of(at, subject, case, 0)
    eager = trained(subject, case, operands, constants)
    once = trained(subject, case, operands, constants, compiled)
    assert all(map(torch.equal, eager, once)), case
    with Calls() as calls:
        trained(subject, case, operands, constants)
    assert calls.seen, "no operator of torch.library was called"
    for func, args, kwargs in calls.seen:
        # PyTorch's check of the schema compares operands, which it cannot for float8.
        checks = ("test_faketensor", *(("test_schema",) if subject.differentiable else ()))
        torch.library.opcheck(func, args, kwargs, test_utils=checks)
    with FakeTensorMode() as mode:
        fakes = [[mode.from_tensor(one) for one in some] for some in (operands, constants)]
        fake = trained(subject, case, *fakes)
    facts = [[(one.shape, one.stride(), one.dtype) for one in some] for some in (eager, fake)]
    assert facts[0] == facts[1], case


@since("2.13", "compiles no methods of dataclasses")
@cells(only=2, having="traced")
def test_traced(engine: Engine, where: int, name: str) -> None:
    (case,) = drawn(name, engine, where, ("auto",), ("equal", "uneven"), every)
    engine.run(where, traced, name, SUBJECTS[name].traceable(case).on(layout=""))


# Graphs.


def replayed(at: Rank, name: str, case: Case) -> None:
    """A graph of a call and its gradients serves other operands."""
    subject, dtype = SUBJECTS[name], getattr(torch, case.dtype)
    leaves = [one.to(at.device, dtype) for one in subject.make(case, at.rank, 0)]
    leaves = [one.requires_grad_(subject.differentiable) for one in leaves]
    constants = constants_of(at, subject, case, 0)
    grads: Tensors = []

    def step() -> Tensors:
        results = subject.call(case, leaves, constants)
        if not subject.differentiable:
            return results
        if not grads:
            grads.extend(torch.zeros_like(one) for one in results)
        return [*results, *torch.autograd.grad(results, leaves, grads)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    at.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for iteration in range(1, 6):
        operands, results, given = reference(subject, case, at.world, iteration)
        with torch.no_grad():
            pairs = [*zip(leaves, operands[at.rank], strict=True)]
            pairs += zip(constants, subject.constants(case, at.rank, iteration), strict=True)
            pairs += zip(grads, given[at.rank], strict=False)
            for here, new in pairs:
                here.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        want = [one.detach() for one in results[at.rank]]
        if subject.differentiable:
            want += [one.grad for one in operands[at.rank]]
        size = max(map(root_mean_square, given[at.rank]))
        for turn, (one, two) in enumerate(zip(found, want, strict=True)):
            about = f"rank {at.rank}, replay {iteration}, {turn} of {case}"
            compare(one, two, subject, about, size)
        at.barrier()


@cells(only=2, having="graphs")
def test_graph(engine: Engine, where: int, name: str) -> None:
    subject = SUBJECTS[name]
    alone = [one for one in subject.schedules(where)[1:] if "collective" not in one]
    cases = drawn(name, engine, where, alone[:2], ("equal",), every)
    for case in cases:
        engine.run(where, replayed, name, subject.traceable(case).on(layout=""))


# Faults.


def absent(at: Rank, name: str, case: Case, victim: int) -> Any:
    """What survivors get from a call that one rank does not make."""
    subject, outcome = SUBJECTS[name], None
    with own_group(at) as group:
        exact(at, subject, case, 0, group)
        if at.rank != victim:
            with ficco.options(timeout_s=PATIENCE_S, on_timeout="raise"):
                outcome = caught(lambda: (exact(at, subject, case, 1, group), ficco.synchronize()))
                again = caught(lambda: exact(at, subject, case, 2, group))
            assert isinstance(again, Failure) and "ficco.close(group)" in again.text, again
    return outcome


@cells(only=3)
def test_absent_rank(engine: Engine, where: int, name: str) -> None:
    """Survivors learn who is missing, at which step of which schedule, and for how long."""
    schedule = SUBJECTS[name].schedules(where)[2]
    (case,) = drawn(name, engine, where, (schedule,), ("equal",), none)
    for rank, outcome in enumerate(engine.run(where, absent, name, case, 1)):
        if rank != 1:
            assert 1 in [one["peer"] for one in gave_up(outcome)], outcome


def disagreeing(at: Rank, name: str, cases: Sequence[Case]) -> Any:
    """What ranks get that ask for different schedules."""
    with own_group(at) as group:
        return caught(lambda: exact(at, SUBJECTS[name], cases[at.rank % 2], 0, group))


@cells(only=2)
def test_ranks_that_disagree(engine: Engine, where: int, name: str) -> None:
    """All learn that they do, and over what."""
    schedules = SUBJECTS[name].schedules(where)[1:3]
    (case,) = drawn(name, engine, where, schedules[:1], ("equal",), none)
    cases = [case.on(schedule=schedule) for schedule in schedules]
    for outcome in engine.run(where, disagreeing, name, cases):
        assert isinstance(outcome, Failure) and outcome.type == "RankMismatch", outcome
        assert all(f"schedule {one}" in outcome.text for one in schedules), outcome.text


def test_every_operator_has_its_row() -> None:
    """Every product, and every record."""
    modules = [module for name, module in sys.modules.items() if name.startswith("ficco.ops.")]
    ours = {
        one.name for module in modules for one in vars(module).values() if isinstance(one, Record)
    }
    assert {*OPERATORS, *(name.removesuffix("_all") for name in ours)} <= {
        name.split(",")[0] for name in SUBJECTS
    }
    assert "all_gather_attention" in ours
