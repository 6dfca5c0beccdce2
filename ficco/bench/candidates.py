"""What is compared, as one table, and how each of them is called."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import ficco
from ficco.bench.inputs import Operands
from ficco.heuristics.candidates import BY_KERNEL, SERIALS
from ficco.heuristics.candidates import SWITCH as COMPARED
from ficco.plan import Plan
from ficco.schedules import NAMED, Schedule, plans
from ficco.schedules.arrivals import cut

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Rows of the gathered A for which PyTorch takes its native path: more than the first, up to the
#: second (torch/distributed/_symmetric_memory, PyTorch 2.11).
NATIVE_ROWS = (2048, 4096)
NATIVE_SWITCH = "TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP"


#: The all-gather into one tensor; newer releases of PyTorch renamed it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Candidate:
    """One thing that is timed.

    Attributes:
        name: its name in reports; for ficco the schedule's name and, behind ``@``, what else is
            special about the call.
        kind: how it is called, a key of ``BUILDERS``.
        schedule: for ficco.
        symmetric: the shard lies in symmetric memory (``ficco.empty``).
        stages: staging is capped at so many steps; 0 for no cap.
    """

    name: str
    kind: str
    schedule: str = ""
    symmetric: bool = False
    stages: int = 0

    @property
    def ours(self) -> bool:
        """Whether it is a call of ficco's."""
        return self.kind == "ficco"


def parse(name: str) -> Candidate:
    """A ficco candidate from its name: ``shard-overlap:pull@symmetric``, ``growing@stages=2``."""
    schedule, *marks = name.split("@")
    if schedule != "auto":
        schedule = str(Schedule.parse(schedule))
    symmetric, stages = False, 0
    for mark in marks:
        key, _, value = mark.partition("=")
        if mark == "symmetric":
            symmetric = True
        elif key == "stages" and value.isdigit() and int(value) > 0:
            stages = int(value)
        else:
            raise ValueError(f"{name!r}: required @symmetric or @stages=2, got @{mark}")
    return Candidate("@".join([schedule, *marks]), "ficco", schedule, symmetric, stages)


#: What every shape is held against.
REFERENCES = (
    Candidate("gemm", "gemm"),
    Candidate("collective", "collective"),
    Candidate("copies", "copies", "shard-overlap"),
    Candidate("serial-collective", "serial-collective"),
    Candidate("ficco-rccl", "pieces"),
    Candidate("pytorch-fused", "pytorch"),
    Candidate("pytorch-native", "pytorch-native"),
)

#: The schedules that are benched unless others are named: every named one, then knobs.
SCHEDULES = tuple(
    parse(name)
    for name in (
        *NAMED,
        "serial:collective",
        "auto",
        "shard-overlap:compute=2",
        "shard-overlap:tail=4",
        "shard-overlap:tail=4,compute=2",
        "shard-overlap:pull",
        "shard-overlap:pull@symmetric",
        "growing:tail=4",
        "growing:pieces=2,compute=2",
        "shrinking:tail=2",
        "hetero-unfused-1d:pieces=2,order=peer,compute=2",
        "hetero-fused-1d:pieces=4+2+1",
        "hetero-fused-1d:pieces=4@stages=2",
    )
)


@dataclass
class Runner:
    """One candidate, ready to be called again and again.

    Attributes:
        run: one call; returns its result.
        expected: which of the operands' references the result must equal.
        proof: the call whose result is compared, where that is not the timed one.
        context: what the calls run inside of; entered outside of the timed part.
    """

    run: Callable[[], torch.Tensor]
    expected: str = "product"
    proof: Callable[[], torch.Tensor] | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def choose(names: list[str] | None, without: Sequence[str] = ()) -> tuple[Candidate, ...]:
    """The candidates of a bench: the references but some, and the schedules of these names, or all.

    The name ``candidates`` stands for the schedules that ``auto`` compares on a switch.
    """
    if names is not None:
        every = [
            (*SERIALS, *COMPARED, *BY_KERNEL) if name == "candidates" else (name,) for name in names
        ]
        names = [one for part in every for one in part]
    ours = SCHEDULES if names is None else tuple(dict.fromkeys(map(parse, names)))
    serial = parse("serial")  # it is a reference, too
    references = [one for one in REFERENCES if one.name not in without]
    return (*references, *([] if serial in ours else [serial]), *ours)


def unavailable(candidate: Candidate, operands: Operands) -> str:
    """Why a candidate does not exist for this shape on this device; empty if it does."""
    if candidate.kind in ("pytorch", "pytorch-native"):
        if operands.device.type != "cuda":
            return "PyTorch has it on GPUs only"
        from torch.distributed import _symmetric_memory  # noqa: F401 (it registers the op)

        if not hasattr(torch.ops.symm_mem, "fused_all_gather_matmul"):
            return "this PyTorch does not have it"
    if candidate.kind == "pytorch-native":
        m, world = operands.problem.m, operands.problem.world
        low, high = NATIVE_ROWS
        if not low < m <= high or m % world**2:
            return f"applies for {low} < m <= {high}"
    return ""


def build(candidate: Candidate, operands: Operands, group: ProcessGroup) -> Runner:
    """A candidate on these operands."""
    return BUILDERS[candidate.kind](candidate, operands, group)


def _gemm(candidate: Candidate, operands: Operands, group: ProcessGroup) -> Runner:
    return Runner(lambda: torch.mm(operands.a_full_MK, operands.b_KN))


def _collective(candidate: Candidate, operands: Operands, group: ProcessGroup) -> Runner:
    def run() -> torch.Tensor:
        gathered = torch.empty_like(operands.a_full_MK)
        all_gather(gathered, operands.a_shard_SK, group=group)
        return gathered

    return Runner(run, "gathered")


def _copies(candidate: Candidate, operands: Operands, group: ProcessGroup) -> Runner:
    """The copies of a schedule alone: a call with a B of no columns, whose products are empty."""

    def call(return_gathered: bool) -> Any:
        return ficco.all_gather_matmul(
            operands.a_shard_SK,
            operands.b_KN[:, :0],
            group=group,
            schedule=candidate.schedule,
            return_gathered=return_gathered,
        )

    return Runner(lambda: call(False), "gathered", proof=lambda: call(True)[1])


def _serial_collective(candidate: Candidate, operands: Operands, group: ProcessGroup) -> Runner:
    gather = _collective(candidate, operands, group).run
    return Runner(lambda: torch.mm(gather(), operands.b_KN))


def _pieces(candidate: Candidate, operands: Operands, group: ProcessGroup) -> Runner:
    """FiCCO-rccl of the paper (section VI-E): W pieces per shard by the vendor's collective.

    The pieces of a step come from all ranks, as an all-gather delivers them (uniform-fused-1d).
    The collective runs on its own stream, and each product waits for its own piece.
    """
    problem = operands.problem
    world, k, n = problem.world, problem.k, problem.n
    rows = problem.rows[0]
    cuts = cut(rows, world)

    def run() -> torch.Tensor:
        shard, b = operands.a_shard_SK, operands.b_KN
        staging = torch.empty_like(operands.a_full_MK)
        out = shard.new_empty((problem.m, n))
        by_shard = out.view(world, rows, n)
        arriving = []
        for first, last in cuts:
            piece = staging[first * world : last * world]
            work = all_gather(piece, shard[first:last], group=group, async_op=True)
            arriving.append((work, piece.view(world, last - first, k)))
        for (work, piece), (first, last) in zip(arriving, cuts, strict=True):
            work.wait()
            torch.bmm(piece, b.expand(world, k, n), out=by_shard[:, first:last])
        return out

    return Runner(run)


def _pytorch(candidate: Candidate, operands: Operands, group: ProcessGroup) -> Runner:
    from torch.distributed import _symmetric_memory

    enable = _symmetric_memory.enable_symm_mem_for_group
    if not hasattr(enable, "__deprecated__"):  # older releases must be told
        enable(group.group_name)
    op = torch.ops.symm_mem.fused_all_gather_matmul

    def run() -> torch.Tensor:
        a, b = operands.a_shard_SK, operands.b_KN
        return op(a, [b], 0, group.group_name, return_A=False)[1][0]

    return Runner(run)


def _pytorch_native(candidate: Candidate, operands: Operands, group: ProcessGroup) -> Runner:
    return Runner(_pytorch(candidate, operands, group).run, context=_native)


@contextmanager
def _native() -> Any:
    """PyTorch's native path, chosen by a variable that it reads in every call."""
    before = os.environ.get(NATIVE_SWITCH)
    os.environ[NATIVE_SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NATIVE_SWITCH]
        else:
            os.environ[NATIVE_SWITCH] = before


def _ficco(candidate: Candidate, operands: Operands, group: ProcessGroup) -> Runner:
    shard = "a_symmetric_SK" if candidate.symmetric else "a_shard_SK"

    def run() -> torch.Tensor:
        return ficco.all_gather_matmul(
            getattr(operands, shard), operands.b_KN, group=group, schedule=candidate.schedule
        )

    if not candidate.stages:
        return Runner(run)
    cap = capped_bytes(candidate, operands, group)
    return Runner(run, context=lambda: ficco.options(workspace_bytes=cap))


def capped_bytes(candidate: Candidate, operands: Operands, group: ProcessGroup) -> int:
    """Symmetric memory for so many steps of a schedule, signals included."""
    from ficco.workspace import workspace_of

    schedule, problem = Schedule.parse(candidate.schedule), operands.problem
    whole = plans(problem, schedule)
    step = step_bytes(whole[0])
    engine = workspace_of(group, operands.device).engine
    words = engine.slot_bytes(whole[0].words, (0, 0))
    return words + whole[0].room[1] + candidate.stages * step


def step_bytes(plan: Plan) -> int:
    """Bytes of staging that the largest step of a plan reads."""
    read = [
        sum(p.batch * p.a.elements for p in step.products if p.a.buffer == "staging")
        for step in plan.steps
    ]
    return max(read, default=0) * plan.problem.itemsize


BUILDERS: dict[str, Callable[[Candidate, Operands, Any], Runner]] = {
    "gemm": _gemm,
    "collective": _collective,
    "copies": _copies,
    "serial-collective": _serial_collective,
    "pieces": _pieces,
    "pytorch": _pytorch,
    "pytorch-native": _pytorch_native,
    "ficco": _ficco,
}
