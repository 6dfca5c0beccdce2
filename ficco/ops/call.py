"""The path of a call: validate, decide, plan, fit the workspace, run.

Repeating a kind of call takes one dictionary look-up, one entry on the board and the enqueue loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from ficco.compute.program import Call, Symmetric
from ficco.heuristics import decide
from ficco.ops import problem_log
from ficco.ops.fit import first_fit, fitted
from ficco.ops.operands import (
    Scales,
    flat,
    frozen,
    left_of,
    plain,
    plain_scales,
    problem_of_operands,
    process_group,
    readable,
    row_major,
)
from ficco.ops.planned import execute, new_kind, number_call, post_call, workspace_for
from ficco.options import Options
from ficco.plan import Buffer
from ficco.problems.products import OPERATORS, Problem
from ficco.runtime.workspace import CachedCall, Workspace
from ficco.schedules import Schedule
from ficco.warn import warn_once

Result = tuple[torch.Tensor, torch.Tensor | None]
Rows = Sequence[int] | Sequence[Sequence[int]] | None


def run(
    operator: str,
    a: torch.Tensor,
    b: torch.Tensor,
    group: ProcessGroup | None,
    schedule: str | Schedule,
    rows: Rows = None,
    return_gathered: bool = False,
    out: torch.Tensor | None = None,
    purpose: str = "",
    scales: Scales | None = None,
    transposed: bool = False,
) -> Result:
    """One call of an operator: its result, and the gathered A if it was asked for.

    ``rows`` are one number per rank, or a W x W table for an all-to-all. The result goes to
    ``out`` if that is given. What a call of a backward is for, its ``purpose``, is part of what the
    ranks agree on. ``scales`` are those of float8 operands. ``transposed``: see :class:`Problem`; A
    or the result is then [W, rows, columns].
    """
    workspace = _workspace(group, a, b, operator)
    try:
        given = schedule, rows, return_gathered, out, purpose, scales, transposed
        cached, call = _begin(workspace, operator, a, b, *given)
        if cached.columns:
            workspace.calls -= 1  # its parts count as calls instead
            for first in range(0, b.shape[1], cached.columns):
                some = slice(first, first + cached.columns)
                right, into = call.tensors["b"][:, some], call.tensors["out"][..., some]
                left, last = call.tensors[cached.plan.buffers[0].name], first + right.shape[1]
                of = scales.columns(first, last, b.shape[1]) if scales else None
                part = schedule, cached.rows, False, into, purpose, of, transposed
                run(operator, left, right, group, *part)
            return call.tensors["out"], None
        execute(workspace, cached, call)
    except BaseException as error:
        workspace.end(error)
        raise
    return call.tensors["out"], call.tensors["gathered"] if return_gathered else None


#: The same for backwards and operators of ``torch.library``: Dynamo may be tracing where they run,
#: and would compile this path and everything below it.
run_unwatched = torch._disable_dynamo(run)


def _operands(
    cached: CachedCall, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None
) -> Call:
    """A call with its results and local buffers allocated."""
    buffers = cached.plan.buffer
    out = _empty(a, cached.out, cached.dtype, buffers["out"]) if out is None else out
    given = cached.plan.buffers[0].name  # of A: ``a``, or what the call casts to that
    tensors = {given: a, "b": b, "out": out}
    if not cached.columns:  # else its parts allocate the rest
        for name, shape, dtype in cached.allocated:
            if buffers[name].layout == "transposed":
                tensors[name] = _empty(a, shape, dtype, buffers[name])
            elif dtype != a.dtype and out.stride(0) == 1 and not out.is_contiguous():
                # In the memory order of the result, so that rounding transposes nothing.
                tensors[name] = a.new_empty(shape[::-1], dtype=dtype).t()
            else:
                tensors[name] = a.new_empty(shape, dtype=dtype)
    return Call(tensors)


def _empty(
    a: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, buffer: Buffer
) -> torch.Tensor:
    """Memory of a buffer, as it lies there."""
    if buffer.layout == "rows":
        return a.new_empty(shape, dtype=dtype)
    rows, cols = shape
    if not buffer.matrices:
        return a.new_empty((cols, rows), dtype=dtype).t()
    each = rows // buffer.matrices
    return a.new_empty((buffer.matrices, cols, each), dtype=dtype).transpose(1, 2)


def _begin(
    workspace: Workspace,
    operator: str,
    a: torch.Tensor,
    b: torch.Tensor,
    schedule: str | Schedule,
    rows: Rows,
    return_gathered: bool,
    out: torch.Tensor | None = None,
    purpose: str = "",
    scales: Scales | None = None,
    transposed: bool = False,
) -> tuple[CachedCall, Call]:
    """Find or make what is kept for such calls, allocate this call's results and post it on the
    board. A call that goes by columns is not posted; its parts are."""
    engine, options = workspace.engine, number_call(workspace, operator)
    kind = OPERATORS[operator]
    rows = frozen(rows)
    if not isinstance(schedule, (str, Schedule)):
        raise ValueError(
            f"schedule: required a name or a ficco.Schedule, got {schedule!r}; pass one, or 'auto'"
        )
    a, b, source = plain(a), plain(b), None
    blocks = transposed and not kind.scatters
    a = a if blocks else flat(a)
    casts = scales is not None and scales.quantize is not None
    if not kind.scatters and not casts and not blocks:
        a, source = readable(workspace, a)
    elif scales is not None:
        a = row_major(a)
    mode = "eager" if engine.asynchronous else "idle"
    if mode == "eager" and schedule == "auto" and engine.capturing():
        mode = "queued"
    of_a, of_b = (a.shape, a.dtype, a.device, a.layout), (b.shape, b.dtype, b.device, b.layout)
    asked = options.workspace_bytes, options.machine
    place = source and (source[0].serial, source[1])
    of_scales = scales and scales.key(b)
    key = (
        *(operator, of_a, of_b, schedule, mode, rows, return_gathered, asked, place, purpose),
        *(of_scales, transposed),
    )
    cached = workspace.programs.get(key)
    if cached is None:
        group = workspace.group
        problem = problem_of_operands(
            *(group, operator, a, b, rows, return_gathered, source is not None, scales),
            hosts=engine.hosts.count,
            transposed=transposed,
        )
        cached = _cached_call(workspace, problem, schedule, mode, source, options, purpose)
        cached.rows = rows
    call = _operands(cached, a, b, out)
    if scales is not None:
        call.tensors |= plain_scales(scales, cached.plan)
    post_call(workspace, key, cached, options, purpose)
    return cached, call


def _cached_call(
    workspace: Workspace,
    problem: Problem,
    schedule: str | Schedule,
    mode: str,
    source: tuple[Symmetric, int] | None,
    options: Options,
    purpose: str = "",
) -> CachedCall:
    """Decide on and plan a kind of call that is seen for the first time."""
    engine = workspace.engine
    problem_log.note(options.log_problems, problem, engine.rank)
    known = workspace.known(options.machine)
    decision = decide(
        problem,
        schedule,
        machine=known.machine,
        mode=mode,
        offers=engine.capabilities().offers,
    )
    chosen = decision.schedule
    if decision.source == "fallback" and engine.asynchronous and engine.rank == 0:
        warn_once(f"schedule='auto' takes {chosen}: {decision.reason}")
    if schedule == "auto":
        fit = first_fit(workspace, problem, decision, options.workspace_bytes)
        why = engine.refuses(problem, chosen)
        if why and engine.rank == 0:
            warn_once(f"schedule='auto' takes {fit.plan.schedule} in place of {chosen}: {why}")
    else:
        fit = fitted(workspace, problem, chosen, options.workspace_bytes)
    made = fit.plan
    problem_log.say(options.log, decision, made.schedule, purpose, engine.rank)
    if fit.columns:
        return CachedCall(made, 0, fit.single, None, fit.columns)
    agreed = [str(known)]
    parsed = Schedule.parse(made.schedule)
    if source is not None and (parsed.pull or parsed.own):
        left, (memory, start) = left_of(problem.operator), source
        agreed.append(f"{left} in symmetric allocation {memory.serial} at byte {start}")
    if purpose:
        agreed.append(purpose)
    kept = None if "publish" in made.buffer else source
    return new_kind(workspace, made, options, agreed, fit.single, kept)


def _workspace(
    group: ProcessGroup | None, a: torch.Tensor, b: torch.Tensor, operator: str
) -> Workspace:
    """The workspace of a call. Errors raised here come before the call counts as one."""
    group = process_group(group)
    for name, tensor in ((left_of(operator), a), ("b", b)):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: required a torch.Tensor, got {type(tensor).__name__}")
    return workspace_for(group, a, left_of(operator), operator)
