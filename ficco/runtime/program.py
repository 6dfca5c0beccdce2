"""Compiles a Plan to the operations of an engine, and marks profiler ranges.

torch.profiler, NVTX and, on AMD, roctx record ranges of calls and steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.autograd import _profiler_enabled

from ficco.accelerator import gpu
from ficco.compute.program import Call, Op, Program, Slot, Symmetric, callers
from ficco.dma.engine import Engine
from ficco.plan import Plan, Reduction, Transfer, in_parts, together, unknown
from ficco.plan.model import Applied, Attendings, Crossing, LibraryMove, Products

#: With the value ``steps`` each step of a call is a range, too. The range spans the time in which
#: the host enqueues the step or, on CPUs, runs it.
VARIABLE = "FICCO_RANGES"
STEPS = os.environ.get(VARIABLE) == "steps"
#: Tools that record NVTX set NVTX_INJECTION64_PATH before a process starts.
TOOLED = STEPS or "NVTX_INJECTION64_PATH" in os.environ


def _always() -> bool:
    return True


#: Whether a profiler records ranges. This check costs a call 0.05 us, a range costs 12 us (x86-64,
#: PyTorch 2.13, 2026-11-24).
active: Callable[[], bool] = _always if TOOLED else _profiler_enabled


@contextmanager
def marked(text: str) -> Iterator[None]:
    """Mark a block as a range with this name."""
    tooled = TOOLED and gpu.is_available()
    if tooled:
        gpu.nvtx.range_push(text)
    try:
        with torch.profiler.record_function(text):
            yield
    finally:
        if tooled:
            gpu.nvtx.range_pop()


def compile(
    plan: Plan,
    engine: Engine,
    slot: Slot | None,
    source: tuple[Symmetric, int] | None = None,
    timed: bool = False,
    batched: float = 0,
) -> Program:
    """Compile a Plan to a Program on a slot. ``timed``: record the times of the steps.
    ``batched``: see :attr:`Program.batched`.

    Raises:
        NotImplementedError: the engine lacks a capability that the Plan needs.
    """
    plan = _taken_apart(plan, engine)
    program = Program(plan, slot, [], source, batched=batched)
    joined = {earlier for step in plan.steps for earlier in step.after}  # other lanes wait for them
    entered: set[str] = set()
    for run in together(plan, batched, engine.exchanges(plan) and not timed):
        lane = plan.steps[run[0]].lane
        ops = list(_operations(program, engine, run, joined, timed))
        if STEPS or timed:  # a range around each operation but the caller's, a placeholder
            step = plan.steps[run[0]]
            text = f"{step.label} ({step.op} on {lane})"
            ops = [op if op in (None, callers) else _as_range(text, op) for op in ops]
        if lane not in entered:
            entered.add(lane)
            ops.insert(0, engine.enter(program, lane))
        program.ops += [(lane, op) for op in ops if op is not None]
    return program


def _operations(
    program: Program, engine: Engine, run: Sequence[int], joined: set[int], timed: bool
) -> Iterator[Op | None]:
    """Operations of a run of steps, enqueued together. ``joined``: steps that other steps join."""
    index, last = run[0], run[-1]
    step = program.plan.steps[index]
    for earlier in step.after:
        yield engine.join(program, index, earlier)
    if step.waits:
        yield engine.wait(program, index, step.waits)
    if step.clears:
        yield engine.clear(program, index, step.clears)
    if timed:
        yield from (engine.stamp(program, one, end=False) for one in run)
    match step.work:
        case _ if len(run) > 1:
            yield engine.copies(program, run)
        case None:
            pass
        case Transfer() as move:
            if move.src.elements or move.factors:
                yield (engine.place if move.local else engine.copy)(program, index, move)
        case Crossing():
            yield engine.cross(program, index)
        case LibraryMove():
            yield engine.collective(program, index)
        case Products(callers=True):
            yield callers
            yield engine.arrived(program, index) if step.gates else None
        case Products(products) if step.whole:
            yield engine.matmul(program, index, products)
        case Products():
            yield engine.tiled(program, index)
        case Attendings(attends):
            yield engine.attend(program, index, attends)
        case Applied() as applied:
            yield engine.apply(program, index, applied)
        case Reduction() as reduction:
            if reduction.out.elements:
                yield engine.reduce(program, index, reduction)
        case _:
            raise unknown(step, f"the {engine.name} engine")
    if timed:
        yield from (engine.stamp(program, one, end=True) for one in run)
    posts = [signal for one in run for signal in program.plan.steps[one].posts]
    if posts and not (len(run) > 1 and isinstance(step.work, Reduction)):  # else within the launch
        yield engine.post(program, last, posts)
    for one in joined.intersection(run):
        yield engine.record(program, one)


def _taken_apart(plan: Plan, engine: Engine) -> Plan:
    """Split products with gates or announcements into parts, if the engine needs that."""
    steps = plan.steps
    whole = all(step.whole or step.op == "call" for step in steps)
    scaled = any(product.factors for step in steps for product in step.products)
    functions = {step.work.function for step in steps if isinstance(step.work, Transfer)} - {""}
    if whole and not scaled and not functions:
        return plan
    can = engine.capabilities()
    lacks = []
    if not (whole or can.partial_signals):
        lacks.append("signals that gate or announce some rows of a product")
    if scaled and not can.scaled:
        lacks.append("products of scaled operands")
    lacks += [f"the function {name!r}" for name in sorted(functions.difference(can.functions))]
    if lacks:
        raise NotImplementedError(
            f"schedule {plan.schedule}: the {engine.name} engine does not offer {', '.join(lacks)}"
        )
    return plan if can.tiles else in_parts(plan)


def _as_range(text: str, op: Op) -> Op:
    """Wrap an operation in a range, while a profiler records ranges."""

    def run(call: Call) -> None:
        if active():
            with marked(text):
                op(call)
        else:
            op(call)

    return run
