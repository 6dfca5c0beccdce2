"""Compiles a Plan to the operations of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ficco.dma.engine import Engine, Op, Program, Slot, Symmetric
from ficco.plan import Plan, together


def compile(
    plan: Plan,
    engine: Engine,
    slot: Slot | None,
    source: tuple[Symmetric, int] | None = None,
    trace: bool = False,
) -> Program:
    """Turn a Plan into a Program on a slot; with ``trace``, one that records when its steps ran."""
    program = Program(plan, slot, [], source)
    needed = {earlier for step in plan.steps for earlier in step.after}
    entered: set[str] = set()
    for run in together(plan):
        lane = plan.steps[run[0]].lane
        found = list(_operations(program, engine, run, needed, trace))
        if lane not in entered:
            entered.add(lane)
            found.insert(0, engine.enter(program, lane))
        program.ops += [(lane, op) for op in found if op is not None]
    return program


def _operations(
    program: Program, engine: Engine, run: Sequence[int], needed: set[int], trace: bool
) -> Iterator[Op | None]:
    """The operations of a run of steps that are enqueued together."""
    index, last = run[0], run[-1]
    step = program.plan.steps[index]
    for earlier in step.after:
        yield engine.join(program, index, earlier)
    if step.waits:
        yield engine.wait(program, index, step.waits)
    if step.clears:
        yield engine.clear(program, index, step.clears)
    if trace:
        yield from (engine.stamp(program, one, end=False) for one in run)
    if len(run) > 1:
        yield engine.copies(program, run)
    elif step.op == "copy" and step.transfer and step.transfer.src.elements:
        yield engine.copy(program, index, step.transfer, step.mover)
    if step.op == "collective":
        yield engine.collective(program, index)
    if step.op == "place" and step.transfer and step.transfer.src.elements:
        yield engine.place(program, index, step.transfer)
    if step.products:
        yield engine.matmul(program, index, step.products)
    if step.reduction is not None and step.reduction.out.elements:
        yield engine.reduce(program, index, step.reduction)
    if trace:
        yield from (engine.stamp(program, one, end=True) for one in run)
    if posts := [signal for one in run for signal in program.plan.steps[one].posts]:
        yield engine.post(program, last, posts)
    for one in needed.intersection(run):
        yield engine.record(program, one)
