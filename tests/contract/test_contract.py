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

#: Timeout of a call in the tests of faults, in seconds.
PATIENCE_S = 1.0


def all_exact(at: Rank, name: str, cases: Sequence[Case], hosts: int = 1) -> int:
    """Compare a sequence of calls, a third with saved gathered operands; return their number."""
    with host_of(at, hosts) if hosts > 1 else nullcontext():
        for iteration, case in enumerate(cases):
            exact(at, SUBJECTS[name], case, iteration, saves=iteration % 3 == 1)
    return len(cases)


# The matrix.


def quick(engine: Engine, where: Any) -> bool:
    """Whether `make quick` runs a cell."""
    return engine.name == "cpu" and where in (2, (2, 2))


def cells(
    over: str = "worlds", only: int = 0, having: str = "", gradients: bool = False
) -> pytest.MarkDecorator:
    """Parametrize a test by engine, number of ranks (or hosts and ranks on each) and subject;
    restrict it to ``only`` one number, engines ``having`` an attribute, or ``gradients``."""
    params = []
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
                params.append(pytest.param(engine, where, name, marks=marks, id=label))
    return pytest.mark.parametrize(("engine", "where", "name"), params)


def drawn(
    name: str, engine: Engine, world: int, schedules: Sequence[str], kinds: Sequence[str],
    needs: Callable[[random.Random, Subject], tuple[bool, ...]],
) -> list[Case]:  # fmt: skip
    """Return a case for each schedule; other properties are random, equal on all ranks."""
    subject = SUBJECTS[name]
    rng = random.Random(f"{name} {engine.name} {world} {len(schedules)}")
    return [
        subject.case(rng, world, rng.choice(kinds), engine.name).on(
            schedule=schedule,
            dtype=rng.choice(subject.dtypes(engine.name)),
            layout=rng.choice(("", *subject.layouts)),
            needs=needs(rng, subject),
        )
        for schedule in schedules
    ]


def none(rng: random.Random, subject: Subject) -> tuple[bool, ...]:
    return ()


def all_operands(rng: random.Random, subject: Subject) -> tuple[bool, ...]:
    return (subject.differentiable,) * len(subject.operands)


def random_subset(rng: random.Random, subject: Subject) -> tuple[bool, ...]:
    """Either all operands need a gradient, or a random subset."""
    picked = tuple(rng.random() < 0.5 for _ in subject.operands)
    return picked if any(picked) and rng.random() < 0.6 else all_operands(rng, subject)


def share(over: str, engine: Engine, where: Any, name: str, parts: int = 3) -> slice:
    """Select one part of the schedules, which differs by engine, number of ranks and subject."""
    columns = [(each.name, size) for each in ENGINES for size in getattr(each, over)]
    turn = columns.index((engine.name, where)) + [*SUBJECTS].index(name)
    return slice(turn % parts, None, parts)


@cells()
def test_forward(engine: Engine, where: int, name: str) -> None:
    """All schedules on two ranks of the CPU and CUDA engines; a third of them on other cells and
    for subjects that return the gathered A. Rows, sizes, dtypes and layouts are random."""
    schedules = SUBJECTS[name].schedules(where, tiled=engine.tiled)
    if where != 2 or engine.name == "hip" or name.endswith("gathered"):
        schedules = schedules[share("worlds", engine, where, name)]
    cases = drawn(name, engine, where, schedules, KINDS, none)
    assert engine.run(where, all_exact, name, cases) == [len(cases)] * where


@cells(gradients=True)
def test_gradient(engine: Engine, where: int, name: str) -> None:
    """Gradients of all operands, and of a random subset."""
    schedules = SUBJECTS[name].schedules(where, tiled=engine.tiled)
    chosen = schedules if len(schedules) < 12 else schedules[:: len(schedules) // 12]
    chosen = chosen * 2 if where == 2 else chosen
    cases = drawn(name, engine, where, chosen, ("equal", "uneven"), random_subset)
    assert engine.run(where, all_exact, name, cases) == [len(cases)] * where


@cells()
def test_few_rows_and_no_rows(engine: Engine, where: int, name: str) -> None:
    """Fewer rows than pieces, and no rows, with gradients."""
    schedules = SUBJECTS[name].schedules(where)[:4] * 2
    cases = drawn(name, engine, where, schedules, ("few", "none"), all_operands)
    assert engine.run(where, all_exact, name, cases) == [len(cases)] * where


@cells(over="hosts")
def test_over_hosts(engine: Engine, where: tuple[int, int], name: str) -> None:
    """A third of the schedules over several hosts, on doubles a sixth. Every third call has
    gradients."""
    hosts, local = where
    world = hosts * local
    schedules = SUBJECTS[name].schedules(world, hosts)
    schedules = schedules[share("hosts", engine, where, name, 6 if engine.name in DOUBLES else 3)]
    cases = drawn(name, engine, world, schedules, ("equal", "uneven", "few"), none)
    full = all_operands(random.Random(), SUBJECTS[name])
    cases = [case.on(needs=full) if turn % 3 == 0 else case for turn, case in enumerate(cases)]
    assert engine.run(world, all_exact, name, cases, hosts) == [len(cases)] * world


# Compilers.


class CallRecorder(TorchDispatchMode):
    """Records the calls of ficco's ``torch.library`` operators in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ficco":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def trained(
    subject: Subject,
    case: Case,
    operands: Tensors,
    constants: Tensors,
    through: Callable[[Any], Any] = lambda function: function,
) -> Tensors:
    """Return the results and gradients of a call ``through`` a compiler."""

    def called(*leaves: torch.Tensor) -> Tensors:
        return subject.call(case, list(leaves), constants)

    leaves = [t.detach().clone().requires_grad_(subject.differentiable) for t in operands]
    results = through(called)(*leaves)
    if not subject.differentiable:
        return results
    grads = [gradient_of(result, i).to(result) for i, result in enumerate(results)]
    return [*results, *torch.autograd.grad(results, leaves, grads)]


def compiled(function: Callable[..., Tensors]) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def traced(at: Rank, name: str, case: Case) -> None:
    """A compiled call is bitwise equal to an eager call. Fake operands give the same shapes and
    strides. The operators pass ``torch.library.opcheck``."""
    subject, dtype = SUBJECTS[name], getattr(torch, case.dtype)
    operands = [t.to(at.device, dtype) for t in subject.make(case, at.rank, 0)]
    constants = constants_of(at, subject, case, 0)
    eager = trained(subject, case, operands, constants)
    by_compiler = trained(subject, case, operands, constants, compiled)
    assert all(map(torch.equal, eager, by_compiler)), case
    with CallRecorder() as recorder:
        trained(subject, case, operands, constants)
    assert recorder.calls, "no operator of torch.library was called"
    for func, args, kwargs in recorder.calls:
        # The check of the schema compares operands, which PyTorch cannot do for float8.
        checks = ("test_faketensor", *(("test_schema",) if subject.differentiable else ()))
        torch.library.opcheck(func, args, kwargs, test_utils=checks)
    with FakeTensorMode() as mode:
        fakes = [[mode.from_tensor(t) for t in tensors] for tensors in (operands, constants)]
        fake = trained(subject, case, *fakes)
    facts = [[(t.shape, t.stride(), t.dtype) for t in tensors] for tensors in (eager, fake)]
    assert facts[0] == facts[1], case


@since("2.13", "compiles no methods of dataclasses")
@cells(only=2, having="traced")
def test_traced(engine: Engine, where: int, name: str) -> None:
    (case,) = drawn(name, engine, where, ("auto",), ("equal", "uneven"), all_operands)
    engine.run(where, traced, name, SUBJECTS[name].traceable(case).on(layout=""))


# Graphs.


def replayed(at: Rank, name: str, case: Case) -> None:
    """A graph of a call and its gradients is exact when replayed with other operands."""
    subject, dtype = SUBJECTS[name], getattr(torch, case.dtype)
    leaves = [t.to(at.device, dtype) for t in subject.make(case, at.rank, 0)]
    leaves = [leaf.requires_grad_(subject.differentiable) for leaf in leaves]
    constants = constants_of(at, subject, case, 0)
    grads: Tensors = []

    def step() -> Tensors:
        results = subject.call(case, leaves, constants)
        if not subject.differentiable:
            return results
        if not grads:
            grads.extend(map(torch.zeros_like, results))
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
        outputs = step()
    for iteration in range(1, 6):
        operands, results, result_grads = reference(subject, case, at.world, iteration)
        with torch.no_grad():
            pairs = [*zip(leaves, operands[at.rank], strict=True)]
            pairs += zip(constants, subject.constants(case, at.rank, iteration), strict=True)
            pairs += zip(grads, result_grads[at.rank], strict=False)
            for captured, new in pairs:
                captured.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        expected = [result.detach() for result in results[at.rank]]
        if subject.differentiable:
            expected += [operand.grad for operand in operands[at.rank]]
        size = max(map(root_mean_square, result_grads[at.rank]))
        for i, (output, want) in enumerate(zip(outputs, expected, strict=True)):
            about = f"rank {at.rank}, replay {iteration}, output {i} of {case}"
            compare(output, want, subject, about, size)
        at.barrier()


@cells(only=2, having="graphs")
def test_graph(engine: Engine, where: int, name: str) -> None:
    subject = SUBJECTS[name]
    schedules = [text for text in subject.schedules(where)[1:] if "collective" not in text]
    cases = drawn(name, engine, where, schedules[:2], ("equal",), all_operands)
    for case in cases:
        engine.run(where, replayed, name, subject.traceable(case).on(layout=""))


# Faults.


def absent(at: Rank, name: str, case: Case, victim: int) -> Any:
    """Return the survivors' failure of a call that one rank does not make."""
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
    """The survivors' errors name the missing rank, the step, the schedule and the seconds."""
    schedule = SUBJECTS[name].schedules(where)[2]
    (case,) = drawn(name, engine, where, (schedule,), ("equal",), none)
    for rank, outcome in enumerate(engine.run(where, absent, name, case, 1)):
        if rank != 1:
            assert 1 in [wait["peer"] for wait in gave_up(outcome)], outcome


def disagreeing(at: Rank, name: str, cases: Sequence[Case]) -> Any:
    """Return the failure of a call whose schedule differs between ranks."""
    with own_group(at) as group:
        return caught(lambda: exact(at, SUBJECTS[name], cases[at.rank % 2], 0, group))


@cells(only=2)
def test_ranks_that_disagree(engine: Engine, where: int, name: str) -> None:
    """All ranks raise ``RankMismatch`` with both schedules."""
    schedules = SUBJECTS[name].schedules(where)[1:3]
    (case,) = drawn(name, engine, where, schedules[:1], ("equal",), none)
    cases = [case.on(schedule=schedule) for schedule in schedules]
    for outcome in engine.run(where, disagreeing, name, cases):
        assert isinstance(outcome, Failure) and outcome.type == "RankMismatch", outcome
        assert all(f"schedule {schedule}" in outcome.text for schedule in schedules), outcome.text


def test_every_operator_has_its_row() -> None:
    """Products and records have a subject."""
    modules = [module for name, module in sys.modules.items() if name.startswith("ficco.ops.")]
    values = [value for module in modules for value in vars(module).values()]
    records = {value.name for value in values if isinstance(value, Record)}
    assert {*OPERATORS, *(name.removesuffix("_all") for name in records)} <= {
        name.split(",")[0] for name in SUBJECTS
    }
    assert "all_gather_attention" in records
