"""Calls of the operators of products: validate the operands, decide, plan, allocate.

Under ``workspace_bytes``, gathering operators use their staging as a ring of steps, and scattering
operators run by columns of b.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C import _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup

from ficco.compute.buffers import layout_of
from ficco.compute.program import Call, Symmetric
from ficco.dma.engine import Engine
from ficco.errors import FiccoError, warn_once
from ficco.heuristics import Decision
from ficco.ops import problem_log
from ficco.ops.entry import watched
from ficco.ops.operands import (
    LEFT,
    Scales,
    flat,
    frozen,
    no_schedule,
    plain_scales,
    problem_of_operands,
)
from ficco.options import Options, current
from ficco.plan import Buffer, Plan, aligned
from ficco.problems.products import OPERATORS, Problem
from ficco.problems.specification import ALIGNMENT
from ficco.runtime.calls import Invocation, new_kind, perform, repeat
from ficco.runtime.workspace import (
    CachedCall,
    Known,
    Workspace,
    remember,
    repeatable,
    workspace_for,
)
from ficco.schedules import GRANULE, Schedule, StagingTooSmall, plan

Result = tuple[torch.Tensor, torch.Tensor | None]
Rows = Sequence[int] | Sequence[Sequence[int]] | None


def run(
    operator: str,
    a: torch.Tensor,
    b: torch.Tensor,
    group: ProcessGroup,
    schedule: str | Schedule,
    rows: Rows = None,
    return_gathered: bool = False,
    out: torch.Tensor | None = None,
    purpose: str = "",
    scales: Scales | None = None,
    transposed: bool = False,
) -> Result:
    """Run one call of an operator; return its result, and the gathered A if requested.

    ``rows`` is one number per rank, or a W x W table for an all-to-all. The result is written to
    ``out``, if passed. The ranks compare the ``purpose`` of a backward call. ``scales`` belong to
    float8 operands. ``transposed``: see :class:`Problem`; A or the result is then
    [W, rows, columns].
    """
    rows = rows if rows is None else frozen(rows)
    usual = out is None and scales is None and not transposed
    if usual:
        arguments = schedule, rows, return_gathered, purpose
        if (result := repeated(group, operator, a, b, *arguments, cast=True)) is not None:
            return result
    options, shard = current(), a
    workspace = workspace_for(group, a.device, operator, options)
    if usual and a.layout is torch.strided and a.dim() > 2:
        a = a.flatten(0, -2)
    request = schedule, rows, return_gathered, out, purpose, scales, transposed
    invocation = ProductCall(operator, a, b, *request)
    call = perform(workspace, invocation, options)
    if usual and invocation.repeats(workspace.engine, a, b) and (guard := guard_of(shard, b)):
        modes = inert(shard, b), torch._C._is_any_autocast_enabled()
        known = Known(workspace, invocation.cached, options, layout_of(call), guard, *modes)
        remember((group, operator, *arguments, shard.shape, b.shape), known, shard, b)
    return call.tensors["out"], call.tensors["gathered"] if return_gathered else None


def repeated(
    group: Any,
    operator: str,
    a: torch.Tensor,
    b: torch.Tensor,
    schedule: str | Schedule,
    rows: Rows,
    return_gathered: bool,
    purpose: str = "",
    cast: bool = False,
) -> Result | None:
    """Run an eager call by the steps of an earlier one with the same arguments, and operands of the
    same layout under the same modes. None if there was none, or if the call needs other checks.
    ``cast``: autocast has cast the operands."""
    try:
        arguments = schedule, rows, return_gathered, purpose
        kinds = repeatable[group, operator, *arguments, a.shape, b.shape]
    except (AttributeError, KeyError, RuntimeError, TypeError):  # some arguments are refused later
        return None
    for known in kinds:
        if known.guard.check(a, b):
            break
    else:
        return None
    workspace, options, engine = known.workspace, current(), known.workspace.engine
    if known.options is not options and known.options != options:
        return None
    if workspace.error or workspace.closed or workspace.thread or workspace.block_open:
        return None
    if (known.autocast and not cast) or (not known.inert and torch.is_grad_enabled()):
        return None
    if _len_torch_dispatch_stack() or forward_ad._current_level >= 0:
        return None
    if engine.asynchronous and engine.in_capture():
        return None
    if (held := workspace.allocations) and a.untyped_storage().data_ptr() in held:
        return None
    tensors = {known.cached.left: a if a.dim() == 2 else a.flatten(0, -2), "b": b}
    repeat(known, operator, purpose, options, tensors)
    return tensors["out"], tensors["gathered"] if return_gathered else None


def inert(*operands: torch.Tensor) -> bool:
    """Whether no operand requires a gradient."""
    return not any(one.requires_grad for one in operands)


def guard_of(*operands: torch.Tensor) -> Any:
    """Return a check of operands, see :class:`Known`; None if there is none. Subclasses override
    operators, and a guard outlives their types."""
    guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if guards is None or watched(*operands) or len(set(map(id, operands))) < len(operands):
        return None
    sizes, strides = [[*one.shape] for one in operands], [[*one.stride()] for one in operands]
    return guards(*operands, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


#: :func:`run` for backwards and operators of ``torch.library``. Dynamo may be tracing where they
#: run, and would compile this path and everything below it.
run_unwatched = torch._disable_dynamo(run)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return an operand whose memory holds its values. The memory of a view such as
    ``z.conj().imag`` holds negated values."""
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def row_major(a: torch.Tensor) -> torch.Tensor:
    """Return A as :func:`plain` and :func:`flat` do, with contiguous rows: copy engines cannot move
    strided elements, and libraries do not multiply strided float8 elements."""
    if a.layout is not torch.strided or a.dim() < 2:
        return a  # refused by problem_of_operands
    if a.is_neg():
        a = a.resolve_neg()
    if a.dim() > 2:
        a = a.flatten(0, -2)
    if (a.stride(1) != 1 and a.shape[1] > 1) or (a.stride(0) < a.shape[1] and a.shape[0] > 1):
        return a.contiguous()
    return a


def column_major(a: torch.Tensor) -> torch.Tensor:
    """Return the matrices of a transposed A [W, rows, columns] as :func:`plain` does, with
    contiguous columns, which copies read."""
    a = plain(a)
    if (a.stride(1) != 1 and a.shape[1] > 1) or (a.stride(2) < a.shape[1] and a.shape[2] > 1):
        return a.mT.contiguous().mT
    return a


def _empty(
    a: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, buffer: Buffer
) -> torch.Tensor:
    """Allocate a buffer in its memory layout."""
    if buffer.layout == "rows":
        return a.new_empty(shape, dtype=dtype)
    rows, cols = shape
    if not buffer.matrices:
        return a.new_empty((cols, rows), dtype=dtype).t()
    matrix_rows = rows // buffer.matrices
    return a.new_empty((buffer.matrices, cols, matrix_rows), dtype=dtype).transpose(1, 2)


@dataclass(eq=False)
class ProductCall(Invocation):
    """A call of an operator of products."""

    operator: str
    a: torch.Tensor
    b: torch.Tensor
    schedule: str | Schedule
    rows: Any
    return_gathered: bool
    out: torch.Tensor | None
    purpose: str
    scales: Scales | None
    transposed: bool
    source: tuple[Symmetric, int] | None = None
    mode: str = "idle"
    cached: Any = None

    def repeats(self, engine: Engine, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether :func:`repeat` can run the next call of operands like these. The call was eager,
        has used them as they are without a gradient, and allocated only buffers with contiguous
        rows."""
        if torch.is_grad_enabled() and not inert(a, b):
            return False
        plan = self.cached.plan
        written = [plan.buffer[name] for name, *_ in self.cached.fresh]
        rows = all(buffer.layout == "rows" for buffer in written)
        plain = self.a is a and self.b is b and self.source is None
        eager = not (engine.asynchronous and engine.in_capture())
        return plain and eager and rows and not self.cached.columns

    def key(self, workspace: Workspace, options: Options) -> Hashable:
        engine, schedule, scales = workspace.engine, self.schedule, self.scales
        scatters = OPERATORS[self.operator].scatters
        if not isinstance(schedule, (str, Schedule)):
            raise no_schedule(schedule)
        a, b, place = self.a, plain(self.b), None
        blocks = self.transposed and not scatters
        casts = scales is not None and scales.quantize is not None
        copied = not scatters and not casts and not blocks  # copies read A in place
        if blocks:
            a = column_major(a)
        else:
            a = row_major(a) if copied or scales is not None else flat(plain(a))
        if copied and workspace.allocations and a.layout is torch.strided and a.dim() == 2:
            self.source = workspace.symmetric_source(a)
            place = self.source and (self.source[0].serial, self.source[1])
        self.a, self.b = a, b
        if engine.asynchronous:
            self.mode = "queued" if schedule == "auto" and engine.capturing() else "eager"
        return (
            *(self.operator, a.shape, a.dtype, a.device, a.layout),
            *(b.shape, b.dtype, b.device, b.layout, schedule, self.mode, self.rows),
            *(self.return_gathered, options.workspace_bytes, options.machine, place, self.purpose),
            *(scales and scales.key(b), self.transposed),
        )

    def plan(self, workspace: Workspace, options: Options) -> CachedCall:
        engine, source, purpose = workspace.engine, self.source, self.purpose
        operands = self.a, self.b, self.rows, self.scales
        problem = replace(
            problem_of_operands(workspace.group, self.operator, *operands),
            return_gathered=self.return_gathered,
            symmetric=source is not None,
            transposed=self.transposed,
            **engine.group_facts,
        )
        problem_log.note(options.log_problems, problem, engine.rank)
        known = workspace.known(options.machine)
        offers = engine.capabilities().offers
        decision = workspace.decide(
            problem, self.schedule, options.machine, mode=self.mode, offers=offers
        )
        chosen = decision.schedule
        if decision.source == "fallback" and engine.asynchronous and engine.rank == 0:
            warn_once(f"schedule='auto' takes {chosen}: {decision.reason}")
        if self.schedule == "auto":
            fit = first_fit(workspace, problem, decision, options.workspace_bytes)
            why = engine.refuses(problem, chosen)
            if why and engine.rank == 0:
                warn_once(f"schedule='auto' takes {fit.plan.schedule} in place of {chosen}: {why}")
        else:
            fit = fitted(workspace, problem, chosen, options.workspace_bytes)
        plan = fit.plan
        problem_log.say(options.log, decision, plan.schedule, purpose, engine.rank)
        if fit.columns:
            return CachedCall(plan, 0, 0, None, fit.columns)
        agreed = [known.text]
        parsed = Schedule.parse(plan.schedule)
        if source is not None and (parsed.pull or parsed.own):
            left, (memory, start) = LEFT[problem.operator], source
            agreed.append(f"{left} in symmetric allocation {memory.serial} at byte {start}")
        if purpose:
            agreed.append(purpose)
        read_in_place = None if "publish" in plan.buffer else source
        return new_kind(workspace, plan, options, decision, agreed, source=read_in_place)

    def allocate(self, cached: CachedCall) -> Call:
        a, out, buffers, self.cached = self.a, self.out, cached.plan.buffer, cached
        out = _empty(a, cached.out, cached.dtype, buffers["out"]) if out is None else out
        tensors = {cached.left: a, "b": self.b, "out": out}
        if not cached.columns:  # otherwise the calls by columns allocate the rest
            for name, shape, dtype in cached.allocated:
                if buffers[name].layout == "transposed":
                    tensors[name] = _empty(a, shape, dtype, buffers[name])
                elif dtype != a.dtype and out.stride(0) == 1 and not out.is_contiguous():
                    # In the memory order of the result, so that rounding transposes nothing.
                    tensors[name] = a.new_empty(shape[::-1], dtype=dtype).t()
                else:
                    tensors[name] = a.new_empty(shape, dtype=dtype)
        if self.scales is not None:
            tensors |= plain_scales(self.scales, cached.plan)
        return Call(tensors)

    def by_columns(self, workspace: Workspace, cached: CachedCall, call: Call) -> None:
        scales, n = self.scales, self.b.shape[1]
        for first in range(0, n, cached.columns):
            last = min(first + cached.columns, n)
            part = scales.columns(first, last, n) if scales else None
            request = self.schedule, self.rows, False, None, self.purpose, part, self.transposed
            b, group = self.b[:, first:last], workspace.group
            # Each part has a result of its own, since a two-shot needs contiguous rows.
            call.tensors["out"][..., first:last] = run(self.operator, self.a, b, group, *request)[0]


#: Schedules that ``auto`` tries under a memory cap if no candidate fits.
FINER = tuple(f"hetero-fused-1d:pieces={pieces}" for pieces in (8, 16, 32, 64))


class Fit(NamedTuple):
    """A rank's plan, and how its calls fit under a memory cap.

    Attributes:
        columns: a call runs as several, each on this number of columns of b; 0: as one.
    """

    plan: Plan
    columns: int = 0


class _NoRoom(ValueError):
    """A schedule does not fit under the memory cap."""


def fitted(workspace: Workspace, problem: Problem, schedule: Schedule, cap: int | None) -> Fit:
    """Return a schedule's plan on this rank, with slots of at most ``cap`` bytes (None: no cap).

    Raises:
        ValueError: the plan does not fit under the cap.
        NotImplementedError: the engine lacks the schedule's mover, or a product whose tiles wait.
        FiccoError: the schedule uses a collective, and the group can run no more collectives.
    """
    try:
        return _fitted(workspace, problem, schedule, cap)
    except _NoRoom as error:
        raise ValueError(str(error)) from None


def first_fit(workspace: Workspace, problem: Problem, decision: Decision, cap: int | None) -> Fit:
    """Return the plan of the best schedule that the engine accepts and that fits under the cap, or
    else the plan of the library's collective, where it serves the problem."""
    for schedule in _in_order(decision):
        if not workspace.engine.refuses(problem, schedule):
            with contextlib.suppress(_NoRoom):
                return _fitted(workspace, problem, schedule, cap)
    last = decision.schedule if problem.transposed else Schedule.parse("serial:collective")
    return fitted(workspace, problem, last, cap)


def keep_to_cap(engine: Engine, whole: Plan, cap: int | None) -> None:
    """Refuse a plan that takes slots of more than ``cap`` bytes and has no smaller form.

    Raises:
        ValueError: the plan takes more.
    """
    needed = engine.slot_bytes(whole.words, whole.slot_bytes) if whole.words else 0
    if cap is not None and needed > cap:
        raise ValueError(
            f"workspace_bytes: required at least {needed} for all pieces of {whole.problem}, got "
            f"{cap}; allow more"
        )


def _in_order(decision: Decision) -> Iterator[Schedule]:
    """Yield the schedules to try, the best first."""
    yield decision.schedule
    yield from decision.others  # predicted only when read
    yield from map(Schedule.parse, FINER)


def _fitted(workspace: Workspace, problem: Problem, schedule: Schedule, cap: int | None) -> Fit:
    engine = workspace.engine
    if why := engine.refuses(problem, schedule):
        raise NotImplementedError(why)
    whole = plan(problem, schedule, engine.rank, packs_columns=engine.packs_columns)
    if whole.collective and engine.out_of_step:
        raise FiccoError(
            f"schedule {schedule}: a collective of this group was broken off before, so its ranks "
            "may take old data for data of this call; destroy the group and make a new one, or "
            "use another schedule"
        )
    if cap is None or not whole.words:
        return Fit(whole)
    if schedule.own and not problem.kind.scatters:
        needed = engine.slot_bytes(whole.words, whole.slot_bytes)
        if needed > cap:
            raise _NoRoom(
                f"workspace_bytes: required at least {needed} for schedule {schedule} on "
                f"{problem}, got {cap}; allow more, or use another schedule"
            )
        return Fit(whole)
    if not problem.kind.scatters:
        make = partial(plan, problem, schedule, engine.rank, packs_columns=engine.packs_columns)
        try:
            return Fit(ring(engine, whole, cap, lambda room: make(staging_bytes=room)))
        except ValueError as error:
            raise _NoRoom(str(error)) from None
    words = engine.slot_bytes(whole.words, 0)
    data_bytes = max(0, cap - words)
    if words + whole.slot_bytes <= cap:
        return Fit(whole)
    granule = max(GRANULE, problem.cuts[1])
    columns = problem.n * data_bytes // max(whole.slot_bytes, 1) // granule * granule
    while columns and _bytes_of(whole, columns) > data_bytes:  # buffers are rounded up
        columns -= granule
    if not columns:
        fewest = min(granule, problem.n)
        raise _NoRoom(
            f"workspace_bytes: required at least {words + _bytes_of(whole, fewest)} for "
            f"{fewest} columns of schedule {schedule} on {problem}, got {cap}; allow more, or use "
            "serial:collective"
        )
    return Fit(whole, columns)


def ring(engine: Engine, whole: Plan, cap: int, make: Callable[[int], Plan]) -> Plan:
    """Return the plan of a gather whose staging is a ring if its slot would exceed ``cap`` bytes.
    ``make`` returns the plan for a number of bytes of staging.

    Raises:
        ValueError: the largest step does not fit.
    """
    others = whole.slot_bytes - aligned(whole.buffer["staging"].nbytes(whole.rank))
    other_bytes = engine.slot_bytes(whole.words, others)
    try:
        return make(max(0, cap - other_bytes) // ALIGNMENT * ALIGNMENT)
    except StagingTooSmall as error:
        raise ValueError(
            f"workspace_bytes: required at least {other_bytes + aligned(error.needed)} for one "
            f"step of schedule {whole.schedule} on {whole.problem}, got {cap}; allow more or cut "
            "finer (pieces=)"
        ) from None


def _bytes_of(whole: Plan, columns: int) -> int:
    """Return the bytes of a slot's data for a number of columns of b."""
    n = max(whole.shape("b")[1], 1)
    sizes = (whole.buffer[name].nbytes(whole.rank) for name in whole.offsets)
    return sum(aligned(-(-size * columns // n)) for size in sizes)
