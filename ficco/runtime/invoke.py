"""The path of every call that has a Plan.

A call is numbered, its kind is looked up or planned, its results are allocated, it is posted on the
board, and it runs. From the second call of a kind on, that is a dictionary look-up, one entry on
the board and the loop over the operations. An operator describes a call by an :class:`Invocation`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.distributed import ProcessGroup

from ficco.compute.program import Call, Program, Symmetric
from ficco.dma.engine import Span
from ficco.options import Options, current
from ficco.plan import Plan
from ficco.runtime import ranges
from ficco.runtime.program import compile
from ficco.runtime.workspace import CachedCall, Workspace, workspace_for


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


#: Type of the cache entry of a kind of call.
Kind = TypeVar("Kind", bound=CachedCall)


def new_kind(
    workspace: Workspace,
    plan: Plan,
    options: Options,
    agreed: Iterable[str] = (),
    single: bool = False,
    source: tuple[Symmetric, int] | None = None,
    kind: type[Kind] = CachedCall,  # type: ignore[assignment]
) -> Kind:
    """Cache entry of a new kind of call.

    The ranks compare the problem, the schedule, the cap on memory and the texts ``agreed``.
    ``single``: all calls of this kind use one slot. ``source``: see :class:`Program`.
    """
    texts = [str(plan.problem), f"schedule {plan.schedule}", *agreed]
    if options.workspace_bytes is not None:
        texts.append(f"workspace_bytes={options.workspace_bytes}")
    return kind(plan, workspace.board.describe(", ".join(texts)), single, source)


def begin(
    workspace: Workspace, invocation: Invocation, options: Options
) -> tuple[CachedCall, Call]:
    """Number a call, look up or plan its kind, and allocate its results. The ranks agree on a call
    whose kind is new. After an exception the caller must call ``workspace.end(error)``."""
    board = workspace.board
    workspace.begin(invocation.operator, options)
    key = invocation.key(workspace, options)
    cached = workspace.programs.get(key)
    if cached is None:
        cached = invocation.plan(workspace, options)
    call = invocation.allocate(cached)
    new, number = not cached.latest, workspace.calls
    cached.latest = number
    if not cached.columns:
        board.post(number, cached.digest)
        if workspace.error or workspace.closed:  # the watchdog's entry may be overwritten
            workspace.raise_error()
        if not cached.programs:  # a new kind, or a freed slot: agree before slots grow
            limit, schedule = workspace.engine.timeout_s, cached.plan.schedule
            board.agree(number, limit, invocation.operator, schedule, invocation.purpose)
    if new:
        workspace.keep(key, cached)
    return cached, call


def invoke(group: ProcessGroup, invocation: Invocation, operand: torch.Tensor, name: str) -> Call:
    """Enqueue a call on a GPU, or run it on the CPU, and return it with its result tensors.

    ``operand``: decides the device. ``name``: of this operand, for errors."""
    options = current()
    workspace = workspace_for(group, operand, name, invocation.operator, options)
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


def execute(workspace: Workspace, cached: CachedCall, call: Call) -> None:
    """Run the latest call: enqueue it (GPU) or carry it out (CPU)."""
    if _records:
        _records[-1].append(_traced(workspace, cached, call))
    else:
        _run(workspace, cached, call)
    workspace.thread = 0


#: Traces of the open blocks of :func:`tracing`, innermost last.
_records: list[list[tuple[Plan, list[Span]]]] = []


@contextmanager
def tracing() -> Iterator[list[tuple[Plan, list[Span]]]]:
    """Trace the calls in a block: each call is synchronous and records the times of its steps on
    this rank. A traced Plan is the one that the engine ran, perhaps split into parts
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
        program = compile(cached.plan, workspace.engine, slot, cached.source)
        cached.programs[id(slot)] = program
    return program


def _run(
    workspace: Workspace, cached: CachedCall, call: Call, program: Program | None = None
) -> None:
    """Run a call by the program of its kind, or by another one."""
    grad = torch.is_grad_enabled()
    program = program or program_of(workspace, cached)
    try:
        if grad:  # inside: Ctrl-C may come right after it
            torch._C._set_grad_enabled(False)  # a tenth of the cost of the context manager
        if ranges.active():
            with ranges.marked(f"ficco: {program.plan.problem}, {program.plan.schedule}"):
                workspace.engine.execute(program, call)
        else:
            workspace.engine.execute(program, call)
    finally:
        if grad:
            torch._C._set_grad_enabled(True)


def _traced(workspace: Workspace, cached: CachedCall, call: Call) -> tuple[Plan, list[Span]]:
    slot = workspace.slot(cached.plan, cached.single)
    program = compile(cached.plan, workspace.engine, slot, cached.source, trace=True)
    try:
        _run(workspace, cached, call, program)
        return program.plan, workspace.engine.spans(program, call)
    finally:
        if slot is not None:
            slot.programs.pop(program.number, None)
        program.clear()
