"""How a call of anything that has a Plan begins and runs, once its operands are known to be right.

A room that makes Plans of its own calls these in turn: :func:`workspace_for`, :func:`number_call`,
a look-up of its key in ``workspace.programs`` or else :func:`new_kind`, :func:`post_call`, then
:func:`execute`. What raises from :func:`number_call` on ends the call with
``workspace.end(error)``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TypeVar

import torch
from torch.distributed import ProcessGroup

from ficco.compute.products import refuse_overrides
from ficco.compute.program import Call, Program, Symmetric
from ficco.dma.engine import Span
from ficco.dma.host import backend_of
from ficco.options import Options, current
from ficco.plan import Plan
from ficco.runtime import ranges
from ficco.runtime.program import compile
from ficco.runtime.workspace import CachedCall, Workspace, workspace_of


def workspace_for(group: ProcessGroup, a: torch.Tensor, name: str, operator: str) -> Workspace:
    """The workspace of a call with an operand of that name."""
    if a.is_cpu and current().engine is None and backend_of(group) == "nccl":
        raise ValueError(
            f"{name}: required a CUDA tensor for a NCCL group, got one on cpu; move "
            "it to the GPU or use a gloo group"
        )
    workspace = workspace_of(group, a.device, operator)
    workspace.raise_error()
    return workspace


def number_call(workspace: Workspace, operator: str) -> Options:
    """Begin the next call of a workspace, under the options in force."""
    engine, options = workspace.engine, current()
    limit = options.timeout_s or workspace.limit_s
    engine.timeout_s, engine.operator, engine.replays = limit, operator, options.replay
    if (watchdog := workspace.watchdog) is not None:
        watchdog.timeout_s, watchdog.on_timeout = limit, options.on_timeout
    workspace.calls += 1
    workspace.thread = get_ident()
    refuse_overrides(engine.device)
    return options


#: What is kept for a kind of call.
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
    """What is kept for a kind of call that is seen for the first time.

    The ranks compare its problem, its schedule, the cap on its memory and, as texts, what else is
    ``agreed``. ``single``: its calls take one slot. ``source``: see :class:`Program`.
    """
    texts = [str(plan.problem), f"schedule {plan.schedule}", *agreed]
    if options.workspace_bytes is not None:
        texts.append(f"workspace_bytes={options.workspace_bytes}")
    return kind(plan, workspace.board.describe(", ".join(texts)), single, source)


def post_call(
    workspace: Workspace, key: Hashable, cached: CachedCall, options: Options, purpose: str = ""
) -> None:
    """Post the latest call on the board, and agree on it with the other ranks if need be; then
    remember its kind by its key."""
    number, board, new = workspace.calls, workspace.board, not cached.latest
    cached.latest = number
    if not cached.columns:
        board.post(number, cached.digest)
        workspace.raise_error()  # the post may have overwritten the watchdog's entry of a failure
        if not cached.programs:  # new, or its slot is gone: ranks must agree before slots grow
            engine = workspace.engine
            board.agree(number, engine.timeout_s, engine.operator, cached.plan.schedule, purpose)
    if new:
        workspace.keep(key, cached)


def execute(workspace: Workspace, cached: CachedCall, call: Call) -> None:
    """Run the latest call: enqueue it (GPU) or carry it out (CPU)."""
    if _records:
        _records[-1].append(_traced(workspace, cached, call))
    else:
        _run(workspace, program_of(workspace, cached), call)
    workspace.thread = 0


#: What blocks of :func:`tracing` have seen, the inner ones last.
_records: list[list[tuple[Plan, list[Span]]]] = []


@contextmanager
def tracing() -> Iterator[list[tuple[Plan, list[Span]]]]:
    """Within it, calls are waited for, and record when each of their steps ran on this rank. A Plan
    is as the engine carried it out, perhaps in parts (:func:`ficco.plan.in_parts`)."""
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


def _run(workspace: Workspace, program: Program, call: Call) -> None:
    grad = torch.is_grad_enabled()
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
        _run(workspace, program, call)
        return program.plan, workspace.engine.spans(program, call)
    finally:
        if slot is not None:
            slot.programs.pop(program.number, None)
        program.clear()
