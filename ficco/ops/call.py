"""The path of a call: validate, decide, plan, fit the workspace, run.

The second call of a kind is one dictionary look-up, one entry on the board and the enqueue loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ficco.dma.engine import Call, Program, Slot, Span, Symmetric
from ficco.errors import FiccoError
from ficco.heuristics import Decision, decide
from ficco.ops import problem_log
from ficco.options import Options, current
from ficco.plan import Plan
from ficco.problem import ITEMSIZE, OPERATORS, Operator, Problem
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
    a, b, source = _flat(_plain(a)), _plain(b), None
    if not kind.scatters:
        a, source = _readable(workspace, a)
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
        problem = _problem(group, operator, a, b, rows, return_gathered, source is not None)
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
        left, (memory, start) = _left(plan.problem.operator), source
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


def process_group(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup:
    """The group of a call, WORLD by default, that of a mesh of one dimension; ``ValueError`` if
    this rank is in none."""
    if group is None and (group := dist.group.WORLD) is None:
        raise ValueError(
            "group: required an initialised default process group, got none; call "
            "torch.distributed.init_process_group or pass group="
        )
    if isinstance(group, dist.ProcessGroup):  # most calls; the rest costs them a microsecond
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: required a mesh of one dimension, got one of {group.ndim}, "
                f"{group.mesh_dim_names}; pass the dimension that the operands are sharded over, "
                "as mesh['tp']"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group: required a torch.distributed ProcessGroup that this rank is in, got {group!r}"
        )
    return group


def _workspace(
    group: ProcessGroup | None, a: torch.Tensor, b: torch.Tensor, operator: str
) -> Workspace:
    """Where a call runs. What is wrong up to here is wrong before there is a call."""
    group = process_group(group)
    for name, tensor in ((_left(operator), a), ("b", b)):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: required a torch.Tensor, got {type(tensor).__name__}")
    if a.is_cpu and current().engine is None and _backend(group) == "nccl":
        raise ValueError(
            f"{_left(operator)}: required a CUDA tensor for a NCCL group, got one on cpu; move it "
            "to the GPU or use a gloo group"
        )
    workspace = workspace_of(group, a.device, operator)
    workspace.raise_error()
    return workspace


def _backend(group: ProcessGroup) -> str:
    return str(dist.get_backend(group))


def frozen(rows: Any) -> Any:
    """Rows as something that can be a key, whatever they are; whole numbers of any type, those of
    NumPy and of tensors on the CPU among them, as ints."""
    if rows is None:  # most calls; what follows takes microseconds to find that out
        return None
    if isinstance(rows, (list, tuple)):
        return tuple([row if type(row) is int else frozen(row) for row in rows])
    if isinstance(rows, torch.Tensor) and rows.device.type != "cpu":
        return rows  # refused by _problem: to read it would wait for the device
    if hasattr(rows, "tolist"):
        return frozen(rows.tolist())
    if isinstance(rows, Iterable) and not isinstance(rows, str):
        return tuple([frozen(row) for row in rows])
    whole = isinstance(rows, SupportsIndex) and not isinstance(rows, (bool, torch.SymInt))
    return index(rows) if whole else rows


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """An operand whose memory holds its values: that of a view such as ``z.conj().imag`` holds
    their negatives."""
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _flat(a: torch.Tensor) -> torch.Tensor:
    """A with its leading dimensions flattened into rows."""
    return a.flatten(0, -2) if a.dim() > 2 and a.layout is torch.strided else a


def _readable(
    workspace: Workspace, a: torch.Tensor
) -> tuple[torch.Tensor, tuple[Symmetric, int] | None]:
    """A with contiguous rows, for copies to read, and where it lies if that is symmetric."""
    if a.layout is not torch.strided or a.dim() < 2:
        return a, None  # refused by _problem
    if (a.stride(1) != 1 and a.shape[1] > 1) or (a.stride(0) < a.shape[1] and a.shape[0] > 1):
        a = a.contiguous()  # no copy engine moves elements at a distance
    return a, workspace.symmetric_source(a)


def _left(operator: str) -> str:
    """What the operator calls its left operand."""
    return "a_shard" if OPERATORS[operator].collective == "all-gather" else "a"


def _problem(
    group: ProcessGroup,
    operator: str,
    a: torch.Tensor,
    b: torch.Tensor,
    rows: Any,
    return_gathered: bool,
    symmetric: bool,
) -> Problem:
    """The Problem of the operands, or the reason why they are wrong."""
    left, inner = _left(operator), OPERATORS[operator].inner
    for name, tensor in ((left, a), ("b", b)):
        if tensor.layout is not torch.strided:
            raise NotImplementedError(
                f"{name}: sparse tensors are not served; pass a dense one (.to_dense())"
            )
    if isinstance(rows, torch.Tensor):
        raise ValueError(
            f"rows: required numbers on the CPU, got a tensor on {rows.device}; pass its "
            ".tolist(), which waits for the device"
        )
    if a.dim() < 2 or b.dim() != 2:
        shape = "[..., m/W, k]" if left == "a_shard" else "[..., m, k]"
        raise ValueError(
            f"required {left} {shape} and b [{'m' if inner else 'k'}, n], got shapes "
            f"{list(a.shape)} and {list(b.shape)}; reshape them"
        )
    if a.shape[1] != b.shape[0] and not inner:
        raise ValueError(
            f"required as many columns of {left} as rows of b, got k={a.shape[1]} and "
            f"k={b.shape[0]}; pass b as [k, n] (an nn.Linear weight as weight.t())"
        )
    if a.dtype != b.dtype:
        raise ValueError(
            f"required one dtype, got {left} {a.dtype} and b {b.dtype}; convert one of them"
        )
    if a.device != b.device:
        raise ValueError(
            f"required one device, got {left} on {a.device} and b on {b.device}; move one of them"
        )
    dtype = str(a.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE or (dtype == "float64" and a.device.type != "cpu"):
        served = [name for name in ITEMSIZE if name != "float64" or a.device.type == "cpu"]
        raise NotImplementedError(
            f"dtype {a.dtype} is not served on {a.device.type}; use one of {', '.join(served)}"
        )
    sizes = b.shape[1], a.shape[1], dtype
    held, rank, world = a.shape[0], group.rank(), group.size()
    if OPERATORS[operator].blocks:
        table = _blocks(rows, held, rank, world)
        found = Problem.of_blocks(operator, table, *sizes)
        if inner and found.product_rows(rank) != b.shape[0]:
            raise ValueError(
                f"required as many rows of b as rank {rank} receives of all ranks' a, got "
                f"{b.shape[0]} and {found.product_rows(rank)}; pass b with a row for each of them, "
                "and rows= where blocks are not equal"
            )
        return replace(found, symmetric=symmetric, return_gathered=return_gathered)
    each = _rows(OPERATORS[operator], rows, held, rank, world)
    if inner and sum(each) != b.shape[0]:
        raise ValueError(
            f"required as many rows of b as all ranks have of {left}, got {b.shape[0]} and "
            f"{sum(each)}; pass all rows of b, and rows= where ranks have different numbers"
        )
    return Problem(operator, each, *sizes, return_gathered, symmetric)


def _rows(kind: Operator, rows: Any, held: int, rank: int, world: int) -> tuple[int, ...]:
    """Rows that belong to each rank; ``held`` are those of this rank's left operand."""
    if kind.returns:  # nobody but the ranks themselves cares which of them sums what
        return tuple(held // world + (peer < held % world) for peer in range(world))
    if rows is None:
        if not kind.scatters:
            return (held,) * world
        if held % world:
            raise ValueError(
                f"a: required rows that {world} ranks can share equally, got {held}; say by rows= "
                "how many each of them gets"
            )
        return (held // world,) * world
    if not isinstance(rows, tuple):
        raise ValueError(f"rows: required {world} numbers of rows, one per rank, got {rows!r}")
    if len(rows) != world or not all(map(_is_size, rows)):
        raise ValueError(
            f"rows: required {world} numbers of rows, one per rank, none negative, got {list(rows)}"
        )
    if kind.scatters and sum(rows) != held:
        raise ValueError(
            f"rows: required numbers that add up to the {held} rows of a, got {list(rows)} with "
            f"the sum {sum(rows)}"
        )
    if not kind.scatters and rows[rank] != held:
        raise ValueError(
            f"rows: required a_shard to have rows[{rank}]={rows[rank]} rows on rank {rank}, got "
            f"{held}"
        )
    return rows


def _blocks(rows: Any, held: int, rank: int, world: int) -> tuple[tuple[int, ...], ...]:
    """Rows that each rank has for each rank."""
    if rows is None:
        if held % world:
            raise ValueError(
                f"a: required rows for {world} equal blocks, got {held}; say by rows= how many "
                "each rank sends to each"
            )
        return ((held // world,) * world,) * world
    square = isinstance(rows, tuple) and len(rows) == world
    square = square and all(isinstance(row, tuple) and len(row) == world for row in rows)
    if not square or not all(_is_size(size) for row in rows for size in row):
        raise ValueError(
            f"rows: required a table of {world} x {world} numbers of rows, rows[i][j] from rank i "
            f"to rank j, none negative, got {rows!r}"
        )
    if sum(rows[rank]) != held:
        raise ValueError(
            f"rows: required a to have the {sum(rows[rank])} rows of rows[{rank}] on rank {rank}, "
            f"got {held}"
        )
    found: tuple[tuple[int, ...], ...] = rows
    return found


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
