"""Runs calls: compiles Plans to the operations of an engine, once for each kind of call, and marks
profiler ranges.

A call is numbered, its kind is looked up or planned, its results are allocated, it is posted on the
board, and it runs. From the second call of a kind on, that is a dictionary look-up, one entry on
the board and the loop over the operations. An operator describes a call by an :class:`Invocation`.

torch.profiler, NVTX and, on AMD, roctx record ranges of calls and steps.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.autograd import _profiler_enabled
from torch.distributed import ProcessGroup

from ficco.accelerator import gpu
from ficco.compute.program import Call, Op, Program, Slot, Symmetric, callers
from ficco.dma.engine import Engine, Span
from ficco.heuristics import Decision
from ficco.options import Options, current
from ficco.plan import Plan, Reduction, Transfer, in_parts, together, unknown
from ficco.plan.model import Applied, Attendings, Crossing, LibraryMove, Products
from ficco.runtime import counters
from ficco.runtime.workspace import (
    SLOTS,
    CachedCall,
    Known,
    Workspace,
    open_workspace,
    workspace_for,
)

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


class Invocation(ABC):
    """One call of an operator, with its operands and arguments.

    Attributes:
        operator: name of the operator, for errors.
        purpose: role of the call in a backward, for errors; empty in a forward.
    """

    operator: str
    purpose: str

    @abstractmethod
    def key(self, workspace: Workspace, options: Options) -> Hashable:
        """Check the operands, and return the key of this kind of call."""

    @abstractmethod
    def plan(self, workspace: Workspace, options: Options) -> CachedCall:
        """Choose a schedule for a new kind of call, and plan it."""

    @abstractmethod
    def allocate(self, cached: CachedCall) -> Call:
        """Allocate the results and the local buffers of a call."""

    def by_columns(self, workspace: Workspace, cached: CachedCall, call: Call) -> None:
        """Split this call into calls on a few columns each: see :class:`CachedCall`."""
        raise NotImplementedError


def new_kind(
    workspace: Workspace,
    plan: Plan,
    options: Options,
    decision: Decision | None,
    agreed: Iterable[str] = (),
    single: int | None = None,
    source: tuple[Symmetric, int] | None = None,
) -> CachedCall:
    """Cache entry of a new kind of call.

    The ranks compare the problem, the schedule, the cap on memory and the texts ``agreed``.
    ``single``: see :meth:`Workspace.slot`; by default 1 under a cap, which holds for one slot, else
    0. ``source``: see :class:`Program`. ``decision``: of the schedule, None if there was no choice.
    """
    cap = () if options.workspace_bytes is None else (f"workspace_bytes={options.workspace_bytes}",)
    single = int(bool(cap)) if single is None else single
    text = ", ".join((str(plan.problem), f"schedule {plan.schedule}", *agreed, *cap))
    increment, exposure = counters.account_of(workspace.group_name, plan, decision)
    digest = workspace.board.describe(text)
    return CachedCall(plan, digest, single, source, increment=increment, exposure=exposure)


def begin(
    workspace: Workspace, invocation: Invocation, options: Options
) -> tuple[CachedCall, Call]:
    """Number a call, look up or plan its kind, and allocate its results. The ranks agree on a call
    whose kind is new. After an exception the caller must call ``workspace.end(error)``."""
    workspace.begin(invocation.operator, options)
    key = invocation.key(workspace, options)
    cached = workspace.programs.get(key) or invocation.plan(workspace, options)
    call, new = invocation.allocate(cached), not cached.latest
    _announce(workspace, cached, invocation.operator, invocation.purpose)
    if new:
        workspace.keep(key, cached)
    return cached, call


def _announce(workspace: Workspace, cached: CachedCall, operator: str, purpose: str) -> None:
    """Post the latest call to the board and count it. The ranks agree if its kind is new."""
    board, number = workspace.board, workspace.calls
    if counters.blocks and cached.exposure:
        counters.refuse(workspace.group_name, cached.exposure)
    cached.latest = number
    if not cached.columns:
        board.post(number, cached.digest)
        if workspace.error or workspace.closed:  # the watchdog's entry may be overwritten
            workspace.raise_error()
        if not cached.programs:  # a new kind, or a freed slot: agree before slots grow
            limit, schedule = workspace.engine.timeout_s, cached.plan.schedule
            board.agree(number, limit, operator, schedule, purpose)
    sums, hidden_s = cached.increment
    sums.calls += 1
    sums.hidden_s += hidden_s


def invoke(
    group: ProcessGroup, invocation: Invocation, operand: torch.Tensor, options: Options
) -> Call:
    """Enqueue a call on a GPU, or run it on the CPU, and return it with its result tensors.

    ``operand``: decides the device. ``options``: those in force at the call."""
    workspace = open_workspace(group, operand.device, options)
    if workspace is None:
        workspace = workspace_for(group, operand.device, invocation.operator, options)
    return perform(workspace, invocation, options)


def perform(workspace: Workspace, invocation: Invocation, options: Options) -> Call:
    """Run a call as :func:`invoke` does."""
    try:
        cached, call = begin(workspace, invocation, options)
        if cached.columns:
            workspace.calls -= 1  # its parts count as calls instead
            invocation.by_columns(workspace, cached, call)
        else:
            execute(workspace, cached, call)
    except BaseException as error:
        workspace.end(error)
        raise
    return call


def repeat(
    known: Known, operator: str, purpose: str, options: Options, tensors: dict[str, torch.Tensor]
) -> None:
    """Run an eager call of a known kind, as :func:`perform` does in more steps. On a GPU, the call
    is enqueued before it is posted to the board, so that the device starts early.

    Args:
        tensors: the operands, used as they are, and results that exist. The other buffers, which
            must have contiguous rows, are added.
    """
    workspace, cached, begun = known.workspace, known.cached, False
    try:
        workspace.begin(operator, options)
        engine = workspace.engine
        for name, shape, strides, dtype in cached.fresh:
            if name not in tensors:
                tensors[name] = engine.allocate(shape, strides, dtype)
        call, turn = Call(tensors, layout=known.layout), workspace.calls % SLOTS
        program = cached.eager.get(turn)
        watched = counters.blocks or _records or active()
        if program is None or watched or not engine.asynchronous:
            _announce(workspace, cached, operator, purpose)
            if program is None:
                program = cached.eager[turn] = program_of(workspace, cached)
            return execute(workspace, cached, call, program)
        workspace.enqueued, begun = cached, True
        engine.execute(program, call)  # no operand needs a gradient
        _announce(workspace, cached, operator, purpose)
        workspace.enqueued, workspace.thread = None, 0
    except BaseException as error:
        if begun:  # and not another thread, whose call refuses this one
            workspace.post_enqueued()  # peers may wait for what is enqueued
            workspace.enqueued = None
        workspace.end(error)
        raise


#: Timed Plans of the open blocks of :func:`timing_steps`, innermost last.
_records: list[list[tuple[Plan, list[Span]]]] = []


@contextmanager
def timing_steps() -> Iterator[list[tuple[Plan, list[Span]]]]:
    """Time the steps of the calls in a block: each call is synchronous and records the times on
    this rank. The Plan is the one that the engine ran, perhaps split into parts
    (:func:`ficco.plan.in_parts`)."""
    _records.append([])
    try:
        yield _records[-1]
    finally:
        _records.pop()


def program_of(workspace: Workspace, cached: CachedCall) -> Program:
    """The program of the latest call, on its slot."""
    slot = workspace.slot(cached.plan, cached.single)
    program = cached.programs.get(id(slot))
    if program is None:
        program = cached.programs[id(slot)] = _compiled(workspace, cached, slot)
        program.siblings = cached.programs
    return program


def _compiled(
    workspace: Workspace, cached: CachedCall, slot: Slot | None, timed: bool = False
) -> Program:
    """Compile the Plan of the latest call for a slot."""
    engine, machine = workspace.engine, workspace.known(current().machine).machine
    # Graphs capture no batch of copies (ROCm/rocm-systems #10089).
    batched = 0.0 if slot is not None and slot.captured else engine.batched(machine)
    return compile(cached.plan, engine, slot, cached.source, timed, batched)


def execute(
    workspace: Workspace, cached: CachedCall, call: Call, program: Program | None = None
) -> None:
    """Run the latest call: enqueue it (GPU) or carry it out (CPU). ``program``: see
    :func:`program_of`."""
    timed = bool(_records)
    if timed:
        slot = workspace.slot(cached.plan, cached.single)
        program = _compiled(workspace, cached, slot, timed=True)
    elif program is None:
        program = program_of(workspace, cached)
    grad = torch.is_grad_enabled()
    try:
        if grad:  # inside: Ctrl-C may come right after it
            torch._C._set_grad_enabled(False)  # a tenth of the cost of the context manager
        if active():
            with marked(f"ficco: {program.plan.problem}, {program.plan.schedule}"):
                workspace.engine.execute(program, call)
        else:
            workspace.engine.execute(program, call)
        if timed:
            _records[-1].append((program.plan, workspace.engine.spans(program, call)))
    finally:
        if grad:
            torch._C._set_grad_enabled(True)
        if timed:
            if slot is not None:
                slot.programs.pop(program.number, None)
            program.clear()
    workspace.thread = 0
