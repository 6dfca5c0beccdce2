"""From a Plan to the operations of an engine."""

from __future__ import annotations

from collections.abc import Iterator

from ficco.dma.engine import Engine, Op, Program, Slot, Symmetric
from ficco.plan import Plan, Step


def compile(
    plan: Plan,
    engine: Engine,
    slot: Slot | None,
    source: tuple[Symmetric, int] | None = None,
    trace: bool = False,
) -> Program:
    """Turn a Plan into a Program on a slot; with ``trace``, one that notes when its steps ran."""
    program = Program(plan, slot, [], source)
    needed = {earlier for step in plan.steps for earlier in step.after}
    entered: set[str] = set()
    for index, step in enumerate(plan.steps):
        found = list(_operations(program, engine, index, step, index in needed, trace))
        if step.lane not in entered:
            entered.add(step.lane)
            found.insert(0, engine.enter(program, step.lane))
        program.ops += [(step.lane, op) for op in found if op is not None]
    return program


def _operations(
    program: Program, engine: Engine, index: int, step: Step, needed: bool, trace: bool
) -> Iterator[Op | None]:
    for earlier in step.after:
        yield engine.join(program, index, earlier)
    if step.waits:
        yield engine.wait(program, index, step.waits)
    if step.clears:
        yield engine.clear(program, index, step.clears)
    if trace:
        yield engine.stamp(program, index, end=False)
    if step.op == "copy" and step.transfer and step.transfer.src.elements:
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
        yield engine.stamp(program, index, end=True)
    if step.posts:
        yield engine.post(program, index, step.posts)
    if needed:
        yield engine.record(program, index)
