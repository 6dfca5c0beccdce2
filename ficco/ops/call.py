"""The path of a call: validate, decide, plan, fit the workspace, run.

The second call of a kind is one dictionary look-up, one entry on the board and the enqueue loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ficco.dma.engine import Call, Program, Slot, Span, Symmetric
from ficco.errors import FiccoError
from ficco.heuristics import Decision, decide
from ficco.ops import problem_log
from ficco.ops.operands import flat, frozen, left_of, plain, problem_of, process_group, readable
from ficco.options import Options, current
from ficco.plan import Plan
from ficco.problem import OPERATORS, Problem
from ficco.runtime import compile
from ficco.schedules import GRANULE, Schedule, StagingTooSmall, plan
from ficco.warn import warn_once
from ficco.workspace import Known, Workspace, workspace_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Result = tuple[torch.Tensor, torch.Tensor | None]
Rows = Sequence[int] | Sequence[Sequence[int]] | None

#: What ``auto`` tries under a cap on memory when nothing that it compared keeps to it.
FINER = tuple(f"hetero-fused-1d:pieces={pieces}" for pieces in (8, 16, 32, 64))


@dataclass
class Bound:
    """What is kept of a kind of call: its Plan, and a Program per slot.

    ``columns``: if not 0, the call would need more memory than ``workspace_bytes``, and runs as
    several calls of so many columns of b.
    ``rows``: as they were given, which may have been in what can be read once.
    ``latest``: number of the latest call of the kind.
    """

    plan: Plan
    digest: int
    single: bool
    source: tuple[Symmetric, int] | None
    columns: int = 0
    rows: Rows = None
    programs: dict[int, Program] = field(default_factory=dict)
    latest: int = 0

    @cached_property
    def out(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        return self.plan.shape("out")

    def program(self, workspace: Workspace, slot: Slot | None) -> Program:
        found = self.programs.get(id(slot))
        if found is None:
            found = compile(self.plan, workspace.engine, slot, self.source)
            self.programs[id(slot)] = found
        return found

    def forget(self, slot: Slot) -> None:
        """Drop the program of a slot that is about to be freed."""
        program = self.programs.pop(id(slot), None)
        if program is not None:
            program.clear()

    @property
    def captured(self) -> bool:
        """Whether a graph holds a call of the kind, and may be replayed."""
        return any(program.slot and program.slot.captured for program in self.programs.values())

    def drop(self) -> None:
        """Let go of all programs."""
        for program in self.programs.values():
            if program.slot is not None:
                program.slot.programs.pop(program.number, None)
            program.clear()
        self.programs.clear()


def run(
    operator: str,
    a: torch.Tensor,
    b: torch.Tensor,
    group: ProcessGroup | None,
    schedule: str | Schedule,
    rows: Rows = None,
    return_gathered: bool = False,
    out: torch.Tensor | None = None,
) -> Result:
    """One call of an operator: its result, and the gathered A if that was asked for.

    ``rows`` are one number for each rank, or for an all-to-all a table of W x W. ``out`` is where
    the result goes.
    """
    workspace = _workspace(group, a, b, operator)
    try:
        bound, call = _begin(workspace, operator, a, b, schedule, rows, return_gathered, out)
        if bound.columns:
            workspace.calls -= 1  # its parts are calls
            for first in range(0, b.shape[1], bound.columns):
                some = slice(first, first + bound.columns)
                right, into = call.b[:, some], call.out[:, some]
                run(operator, call.a, right, group, schedule, bound.rows, out=into)
            return call.out, None
        slot = workspace.slot(bound.plan, bound.single)
        program = bound.programs.get(id(slot)) or bound.program(workspace, slot)
        _execute(workspace, program, call)
    except BaseException as error:
        workspace.end(error)
        raise
    return call.out, call.gathered if return_gathered else None


#: The same for backwards and operators of the library: Dynamo may look on where they run, and would
#: compile this path and everything below it.
run_unwatched = torch._disable_dynamo(run)


def run_traced(
    operator: str,
    a: torch.Tensor,
    b: torch.Tensor,
    group: ProcessGroup | None,
    schedule: str | Schedule,
    rows: Rows = None,
) -> tuple[torch.Tensor, Plan, list[Span]]:
    """One call that notes when each step of its Plan ran on this rank; waits for it."""
    workspace = _workspace(group, a, b, operator)
    try:
        bound, call = _begin(workspace, operator, a, b, schedule, rows, False)
        if bound.columns:
            raise NotImplementedError(
                f"a call that goes by {bound.columns} columns at a time, to keep to "
                "workspace_bytes, is several; trace it without that cap"
            )
        slot = workspace.slot(bound.plan, bound.single)
        program = compile(bound.plan, workspace.engine, slot, bound.source, trace=True)
        try:
            _execute(workspace, program, call)
            spans = workspace.engine.spans(program, call)
        finally:
            if slot is not None:
                slot.programs.pop(program.number, None)
            program.clear()
    except BaseException as error:
        workspace.end(error)
        raise
    return call.out, bound.plan, spans


def _execute(workspace: Workspace, program: Program, call: Call) -> None:
    grad = torch.is_grad_enabled()
    if grad:
        torch._C._set_grad_enabled(False)  # a tenth of the cost of the context manager
    try:
        workspace.engine.execute(program, call)
    finally:
        if grad:
            torch._C._set_grad_enabled(True)


def _operands(bound: Bound, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Call:
    plan = bound.plan
    call = Call(a, b, a.new_empty(bound.out) if out is None else out)
    if bound.columns:  # the rest is of its parts
        return call
    if plan.gathers:
        call.gathered = a.new_empty(plan.shape("gathered"))
    if plan.partial:
        call.partial = a.new_empty(plan.shape("partial"))
    if plan.sums:
        # As the result lies, so that nothing is transposed when they are rounded.
        columns = call.out.stride(0) == 1 and not call.out.is_contiguous()
        rows, cols = plan.shape("sum")
        shape = (cols, rows) if columns else (rows, cols)
        sums = torch.empty(shape, dtype=torch.float32, device=a.device)
        call.sums = sums.t() if columns else sums
    return call


def _begin(
    workspace: Workspace,
    operator: str,
    a: torch.Tensor,
    b: torch.Tensor,
    schedule: str | Schedule,
    rows: Rows,
    return_gathered: bool,
    out: torch.Tensor | None = None,
) -> tuple[Bound, Call]:
    """Find, or make, what is kept of such calls, allocate this one's results and post it on the
    board. A call that goes by columns is not posted: its parts are."""
    options = current()
    engine, board = workspace.engine, workspace.board
    engine.timeout_s, engine.operator, engine.replays = options.timeout_s, operator, options.replay
    if (watchdog := workspace.watchdog) is not None:
        watchdog.timeout_s, watchdog.on_timeout = options.timeout_s, options.on_timeout
    workspace.calls += 1
    number = workspace.calls
    kind = OPERATORS[operator]
    rows = frozen(rows)
    if not isinstance(schedule, (str, Schedule)):
        raise ValueError(
            f"schedule: required a name or a ficco.Schedule, got {schedule!r}; pass one, or 'auto'"
        )
    a, b, source = flat(plain(a)), plain(b), None
    if not kind.scatters:
        a, source = readable(workspace, a)
    mode = "eager" if engine.asynchronous else "idle"
    if mode == "eager" and schedule == "auto" and engine.capturing():
        mode = "queued"
    key = (
        operator,
        a.shape,
        a.dtype,
        b.shape,
        b.dtype,
        a.device,
        b.device,
        a.layout,
        b.layout,
        schedule,
        mode,
        rows,
        return_gathered,
        options.workspace_bytes,
        options.machine,
        options.search,
        source and (source[0].serial, source[1]),
    )
    bound = workspace.programs.get(key)
    known = bound is not None
    if bound is None:
        group = workspace.group
        problem = problem_of(group, operator, a, b, rows, return_gathered, source is not None)
        bound = _bound(workspace, problem, schedule, mode, source, options)
        bound.rows = rows
    call = _operands(bound, a, b, out)
    bound.latest = number
    if not bound.columns:
        board.post(number, bound.digest)
        workspace.raise_error()  # by the watchdog, whose word of it this may have replaced
        if not bound.programs:  # new, or its slot is gone: growing must begin in agreement
            board.agree(number, options.timeout_s, operator, bound.plan.schedule)
    if not known:
        workspace.keep(key, bound)
    return bound, call


def _bound(
    workspace: Workspace,
    problem: Problem,
    schedule: str | Schedule,
    mode: str,
    source: tuple[Symmetric, int] | None,
    options: Options,
) -> Bound:
    """What is kept of calls that are seen for the first time."""
    engine = workspace.engine
    problem_log.note(options.log_problems, problem, engine.rank)
    known = workspace.known(options.machine)
    decision = decide(
        problem,
        schedule,
        machine=known.machine,
        mode=mode,
        search=options.search,
        movers=engine.capabilities().movers,
        saved=known.saved,
    )
    chosen = decision.schedule
    if decision.source == "fallback" and engine.asynchronous and engine.rank == 0:
        warn_once(f"schedule='auto' takes {chosen}: {decision.reason}")
    if schedule == "auto" and options.workspace_bytes is not None:
        made, single, columns = _plan_that_fits(workspace, problem, decision, options)
    else:
        try:
            made, single, columns = _plan(workspace, problem, chosen, options)
        except _NoRoom as error:
            raise ValueError(str(error)) from None
    if columns:
        return Bound(made, 0, single, None, columns)
    digest = workspace.board.describe(_text(made, options, known, source if chosen.pull else None))
    return Bound(made, digest, single, None if made.publish else source)


def _text(plan: Plan, options: Options, known: Known, source: tuple[Symmetric, int] | None) -> str:
    """What ranks must agree on, in words."""
    parts = [str(plan.problem), f"schedule {plan.schedule}", str(known)]
    if options.workspace_bytes is not None:
        parts.append(f"workspace_bytes={options.workspace_bytes}")
    if source is not None:
        left, (memory, start) = left_of(plan.problem.operator), source
        parts.append(f"{left} in symmetric allocation {memory.serial} at byte {start}")
    return ", ".join(parts)


class _NoRoom(ValueError):
    """A schedule needs more memory than is allowed."""


def _plan_that_fits(
    workspace: Workspace, problem: Problem, decision: Decision, options: Options
) -> tuple[Plan, bool, int]:
    """As :func:`_plan`, of the schedule that was decided on, or else of that which loses least of
    those that keep to the memory that is allowed; by the group's library where none does."""
    with contextlib.suppress(_NoRoom):
        return _plan(workspace, problem, decision.schedule, options)
    for schedule in (*decision.others, *map(Schedule.parse, FINER)):
        with contextlib.suppress(_NoRoom):
            return _plan(workspace, problem, schedule, options)
    return _plan(workspace, problem, Schedule.parse("serial:collective"), options)


def _plan(
    workspace: Workspace, problem: Problem, schedule: Schedule, options: Options
) -> tuple[Plan, bool, int]:
    """This rank's plan, whether calls of it keep to one slot, and by how many columns of b they go
    where the memory that is allowed does not do for all."""
    rank, cap = workspace.engine.rank, options.workspace_bytes
    if schedule.mover not in (*workspace.engine.capabilities().movers, "collective"):
        raise NotImplementedError(
            f"schedule {schedule}: the {workspace.name} engine has no mover {schedule.mover!r} "
            "yet; leave the knob out"
        )
    whole = plan(problem, schedule, rank)
    if whole.collective and workspace.engine.out_of_step:
        raise FiccoError(
            f"schedule {schedule}: a collective of this group was broken off before, so that its "
            "ranks may take data of that for data of this one; destroy the group and make a new "
            "one, or use another schedule"
        )
    if cap is None or not whole.words:
        return whole, False, 0
    if not problem.kind.scatters:
        return _ring(workspace, whole, schedule, cap), True, 0
    words = workspace.engine.slot_bytes(whole.words, (0, 0))
    left = max(0, cap - words)
    if (needed := workspace.engine.slot_bytes(0, whole.room)) <= left:
        return whole, True, 0
    columns = problem.n * left // needed // GRANULE * GRANULE
    while columns and _room_of(workspace, whole, columns) > left:  # buffers are rounded up
        columns -= GRANULE
    if not columns:
        few = min(GRANULE, problem.n)
        raise _NoRoom(
            f"workspace_bytes: required at least {words + _room_of(workspace, whole, few)} for "
            f"{few} columns of schedule {schedule} on {problem}, got {cap}; allow more, or use "
            "serial:collective"
        )
    return whole, True, columns


def _ring(workspace: Workspace, whole: Plan, schedule: Schedule, cap: int) -> Plan:
    """A plan of what gathers, its staging a ring where needed, so that a slot keeps to a cap.

    Raises:
        ValueError: the cap is too small for its largest step.
    """

    def nbytes(staging: int) -> int:
        return workspace.engine.slot_bytes(whole.words, (staging, whole.room[1]))

    staging = max(0, cap - nbytes(0))
    while staging and nbytes(staging) > cap:  # buffers are rounded up
        staging -= 1
    try:
        return plan(whole.problem, schedule, whole.rank, staging)
    except StagingTooSmall as error:
        raise _NoRoom(
            f"workspace_bytes: required at least {nbytes(error.needed)} for one step of schedule "
            f"{schedule} on {whole.problem}, got {cap}; allow more or cut finer (pieces=)"
        ) from None


def _room_of(workspace: Workspace, whole: Plan, columns: int) -> int:
    """Bytes of a slot, less its words, for some of a plan's columns."""
    staging, publish = (-(-room * columns // max(whole.problem.n, 1)) for room in whole.room)
    return workspace.engine.slot_bytes(0, (staging, publish))


def _workspace(
    group: ProcessGroup | None, a: torch.Tensor, b: torch.Tensor, operator: str
) -> Workspace:
    """Where a call runs. What is wrong up to here is wrong before there is a call."""
    group = process_group(group)
    for name, tensor in ((left_of(operator), a), ("b", b)):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: required a torch.Tensor, got {type(tensor).__name__}")
    if a.is_cpu and current().engine is None and _backend(group) == "nccl":
        raise ValueError(
            f"{left_of(operator)}: required a CUDA tensor for a NCCL group, got one on cpu; move "
            "it to the GPU or use a gloo group"
        )
    workspace = workspace_of(group, a.device, operator)
    workspace.raise_error()
    return workspace


def _backend(group: ProcessGroup) -> str:
    return str(dist.get_backend(group))
