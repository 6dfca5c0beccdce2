"""Candidates of a bench of products: the table of candidates, and how each is called."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import ficco
from ficco.accelerator import gpu
from ficco.heuristics import Decision, decide
from ficco.heuristics.candidates import BY_KERNEL, READING, candidates, is_serial
from ficco.heuristics.families import movements
from ficco.options import current
from ficco.plan import Plan, aligned
from ficco.problems.products import OPERATORS, Problem
from ficco.runtime.workspace import workspace_of
from ficco.schedules import NAMED, Schedule, plan, refusal, same_plans
from ficco.schedules.groups import cut
from ficco.tools import baselines
from ficco.tools.bench.cases import OPERATOR
from ficco.tools.bench.inputs import Operands
from ficco.tools.bench.measure import Runner, all_gather, reduce_scatter

if TYPE_CHECKING:
    from ficco.dma.engine import Engine


@dataclass(frozen=True)
class BenchCandidate:
    """A call that is timed.

    Attributes:
        name: its name in reports; for ficco the schedule, followed by ``@`` and marks of the call.
        kind: a key of ``ficco.tools.bench.candidates.BUILDERS``.
        schedule: for ficco.
        symmetric: the left operand lies in symmetric memory (``ficco.empty``).
        stages: cap on staging, in steps; 0 for no cap.
        operators: those that have it; none for all of them.
    """

    name: str
    kind: str
    schedule: str = ""
    symmetric: bool = False
    stages: int = 0
    operators: tuple[str, ...] = ()

    @property
    def ours(self) -> bool:
        """Whether it is a call of ficco's."""
        return self.kind == "ficco"

    @property
    def several_lanes(self) -> bool:
        """Whether products run at the same time. On CPUs they share the cores of one product, and
        take 4 to 80 times as long (4 ranks on 2 cores, 2026-11-24)."""
        return self.ours and self.schedule != "auto" and Schedule.parse(self.schedule).compute > 1


#: Stands for the schedules that ``auto`` compares; ``candidates=3`` for three of them.
COMPARED = BenchCandidate("candidates", "compared")


def parse(name: str) -> BenchCandidate:
    """A ficco candidate from its name: ``shard-overlap:pull@symmetric``, ``growing@stages=2``; or
    the one that stands for several, ``candidates`` or ``candidates=3``."""
    if re.fullmatch(r"candidates(=0*[1-9]\d*)?", name):
        return replace(COMPARED, name=name)
    schedule, *marks = name.split("@")
    if schedule != "auto":
        schedule = str(Schedule.parse(schedule))
    stages = 0
    for mark in marks:
        if mark != "symmetric":
            key, _, value = mark.partition("=")
            if key != "stages" or not value.isdecimal() or not int(value):
                raise ValueError(f"{name!r}: required @symmetric or @stages=2, got @{mark}")
            stages = int(value)
    name = "@".join([schedule, *marks])
    return BenchCandidate(name, "ficco", schedule, "symmetric" in marks, stages)


#: Expected of calls that only communicate: the left operand of the whole product.
WHOLE = attrgetter("whole_OK")

#: The schedule whose copies are timed by themselves.
COPIED_BY = "shard-overlap"

#: PyTorch's sums of products in symmetric memory, by candidate.
SHOTS = {
    "pytorch-one-shot": "one_shot_all_reduce",
    "pytorch-two-shot": "two_shot_all_reduce_",
}

#: References of every shape.
REFERENCES = (
    BenchCandidate("gemm", "gemm"),
    BenchCandidate("collective", "collective"),
    BenchCandidate("copies", "copies"),
    BenchCandidate("pytorch-serial", "serial-collective"),
    BenchCandidate("pytorch-pieces", "pieces", operators=(OPERATOR,)),
    BenchCandidate("pytorch-fused", "pytorch", operators=(OPERATOR, "matmul_reduce_scatter")),
    BenchCandidate("pytorch-native", "pytorch-native", operators=(OPERATOR,)),
    BenchCandidate("quack", "quack", operators=(OPERATOR,)),
    BenchCandidate(baselines.PRODUCT, "product-by"),
    *(
        BenchCandidate(
            name,
            "copy-engines",
            operators=tuple(
                operator for operator, kind in OPERATORS.items() if kind.collective in collectives
            ),
        )
        for name, (collectives, _) in baselines.COPY_ENGINES.items()
    ),
    *(BenchCandidate(name, name, operators=("matmul_all_reduce",)) for name in SHOTS),
)

#: Copies by kernel are compared where they are this small at most. Larger ones were nowhere faster
#: than those by the copy engine (2 H200, 12 of the unseen shapes, 2026-11-21, commit 7a76eddfe07e).
KERNEL_BYTES = 4 << 20

#: Kinds of candidates that a replay has.
REPLAYED = ("gemm", "ficco", COMPARED.kind)

#: The schedules that are benched unless others are named: every named one, then knobs. An operator
#: has those that serve it.
SCHEDULES = tuple(
    parse(name)
    for name in [*NAMED]
    + """
    serial:collective auto
    shard-overlap:compute=2 shard-overlap:tail=4 shard-overlap:tail=4,compute=2
    shard-overlap:pull shard-overlap:pull@symmetric shard-overlap:beta
    growing:tail=4 growing:pieces=2,compute=2 shrinking:tail=2 ring:pieces=4
    hetero-unfused-1d:pieces=2,order=peer,compute=2 hetero-fused-1d:pieces=4+2+1
    hetero-fused-1d:pieces=4,beta hetero-fused-1d:pieces=4@stages=2
    """.split()
)


def choose(
    names: list[str] | None, without: Sequence[str] = (), device: str = "cuda"
) -> tuple[BenchCandidate, ...]:
    """The candidates of a bench: the references except ``without``, and the schedules ``names``.
    Default: all schedules of use on the device, ``"cuda"`` or ``"cpu"``.

    The name ``candidates`` stands for the schedules that ``auto`` compares on a switch, schedules
    that copy by kernel if copies are small, and schedules that sum in the memory of the peers.
    ``candidates=N``: the N schedules of library products, except serial, predicted to be fastest.
    """
    ours = tuple(one for one in SCHEDULES if device != "cpu" or not one.several_lanes)
    if names is not None:
        ours = tuple(map(parse, names))
    references = [one for one in REFERENCES if one.name not in without]
    references.append(parse("serial"))  # it is a reference, too
    return tuple(dict.fromkeys((*references, *ours)))


def of_problem(
    chosen: Iterable[BenchCandidate],
    problem: Problem,
    engine: Engine | None = None,
    ranked: Callable[[], Sequence[Schedule]] = tuple,
) -> tuple[BenchCandidate, ...]:
    """The chosen candidates that serve a problem on an engine. ``ranked`` returns the schedules
    that the decision compared, the best first, if there are any."""
    available: dict[BenchCandidate, None] = {}
    for one in chosen:
        if one.kind == COMPARED.kind and one != COMPARED:
            products = [
                parse(str(schedule))
                for schedule in ranked() or candidates(problem)
                if schedule.grouping != "tiled" and not is_serial(schedule)
            ]
            served = [each for each in products if not reason_against(each, problem, engine)]
            available |= dict.fromkeys(served[: int(one.name.partition("=")[2])])
        elif one == COMPARED:
            small = block_bytes(problem) <= KERNEL_BYTES
            names = (*map(str, candidates(problem)), *BY_KERNEL * small, *READING)
            on_gpu = engine is None or engine.asynchronous
            every = map(parse, names)
            available |= dict.fromkeys(one for one in every if on_gpu or not one.several_lanes)
        elif problem.operator in (one.operators or OPERATORS):
            available[one] = None
    return tuple(one for one in available if not reason_against(one, problem, engine))


def named_again(
    candidates: Iterable[BenchCandidate], problem: Problem
) -> dict[BenchCandidate, BenchCandidate]:
    """Candidates with the same steps as an earlier candidate, each with the earlier candidate.

    Equal plans are timed once: of several times of one plan the fastest would win by chance.
    """
    plain = {
        Schedule.parse(one.schedule): one
        for one in candidates
        if one.ours and one.schedule != "auto" and not one.symmetric and not one.stages
    }
    same = same_plans(problem, plain)
    return {plain[one]: plain[first] for one, first in same.items() if one != first}


def reason_against(
    candidate: BenchCandidate, problem: Problem, engine: Engine | None = None
) -> str:
    """Reason why a candidate's schedule cannot serve a problem; empty if it can."""
    if not candidate.ours:
        return ""
    if problem.kind.scatters and (candidate.symmetric or candidate.stages):
        return (
            f"{candidate.name}: @symmetric and @stages are for operators whose left operand travels"
        )
    if candidate.stages and problem.world == 1:
        return f"{candidate.name}: @stages is for several ranks; a call of one rank has no staging"
    if candidate.schedule == "auto":
        return ""
    schedule = Schedule.parse(candidate.schedule)
    return refusal(problem, schedule) or (engine.refuses(problem, schedule) if engine else "")


def moved_bytes(problem: Problem) -> int:
    """Bytes that a rank exchanges: the gathered A, or the product."""
    return problem.m * problem.moved_bytes


def block_bytes(problem: Problem) -> int:
    """Bytes of the largest block that a rank sends to another."""
    ranks = range(problem.world)
    rows = [problem.block(src, dst) for src in ranks for dst in ranks if src != dst]
    return max(rows, default=0) * problem.moved_bytes


# Calls of candidates.


#: PyTorch takes its native path if the gathered A has more rows than the first number, and no more
#: than the second (torch/distributed/_symmetric_memory, PyTorch 2.11).
NATIVE_ROWS = (2048, 4096)
NATIVE_SWITCH = "TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP"

#: PyTorch's fused operator, where it has one, and that for operands with scales.
FUSED = {
    "all_gather_matmul": ("fused_all_gather_matmul", "fused_all_gather_scaled_matmul"),
    "matmul_reduce_scatter": ("fused_matmul_reduce_scatter", "fused_scaled_matmul_reduce_scatter"),
}

#: Tilings of QuACK's GEMM that are tried for each shape: rows and columns of a tile, blocks of a
#: cluster along both, and whether two tiles of a block take turns. Each was the fastest of some
#: shape (docs/results/tiled-ways-h200-1.csv).
QUACK_TILINGS = (
    (128, 256, 2, 1, False),
    (128, 256, 1, 2, False),
    (128, 128, 1, 2, True),
    (128, 192, 1, 2, True),
    (256, 192, 1, 2, False),
)


def unavailable(candidate: BenchCandidate, operands: Operands, hosts: int = 1) -> str:
    """Reason why a candidate does not exist for a shape, device and number of hosts; empty if it
    exists."""
    problem, kind = operands.problem, candidate.kind
    scaling, on_gpu = problem.scaling, operands.device.type == "cuda"
    if hosts > 1 and kind in ("pytorch", "pytorch-native", "quack", "copy-engines", *SHOTS):
        return "it copies through memory that ranks of one host share"
    if kind in ("copy-engines", "product-by"):
        return baselines.lacking(candidate.name, operands.device, problem.equal)
    if kind == "pieces" and scaling:
        return "PyTorch has no batched product of float8"
    if kind in ("pytorch", "pytorch-native", *SHOTS):
        if not on_gpu:
            return "PyTorch has it on GPUs only"
        from torch.distributed import _symmetric_memory  # noqa: F401 (it registers the op)

        if not hasattr(torch.ops.symm_mem, SHOTS.get(kind) or _fused_name(problem)):
            return "this PyTorch does not have it"
        if scaling and scaling.recipe == "block":
            return "PyTorch's has no factors of blocks"
    if kind in SHOTS and scaling:
        return "PyTorch's product of float8 cannot write to symmetric memory here"
    if kind == "quack":
        if not on_gpu or find_spec("quack") is None:
            return "QuACK is not installed (pip install quack-kernels, for NVIDIA GPUs)"
        if scaling or problem.dtype not in ("bfloat16", "float16"):
            return "QuACK's gather with a product is for bfloat16 and float16 here"
        if not _quack_tilings(problem):
            return "QuACK gates shards of whole tiles"
    if kind == "pytorch-native":
        if scaling:
            return "PyTorch's native path has no scales"
        low, high = NATIVE_ROWS
        if not low < problem.m <= high or problem.m % problem.world**2:
            return f"applies for {low} < m <= {high}"
    return ""


def build(candidate: BenchCandidate, operands: Operands, group: ProcessGroup) -> Runner:
    return BUILDERS[candidate.kind](candidate, operands, group)


def call(
    problem: Problem,
    a: torch.Tensor,
    b: torch.Tensor,
    group: ProcessGroup,
    schedule: str,
    **more: Any,
) -> Any:
    if not problem.equal and not problem.kind.returns:
        more["rows"] = problem.blocks or problem.rows
    operator = getattr(ficco, problem.operator)
    return operator(a, b, group=group, schedule=schedule, **more)


def caller(
    operands: Operands, group: ProcessGroup, schedule: str, left: str = "a_LK"
) -> Callable[[], Any]:
    """A call of the operator on operands, whose left one has the name ``left`` there."""
    return lambda: call(
        *(operands.problem, getattr(operands, left), operands.b_KN, group, schedule),
        **operands.scales,
    )


def taken(problem: Problem, group: ProcessGroup, device: torch.device, mode: str = "") -> Decision:
    """Decision of ``auto`` for a call of a group; ``mode`` replaces the mode of its device."""
    mode = mode or ("idle" if device.type == "cpu" else "eager")
    workspace = workspace_of(group, device)
    machine, engine = workspace.known(current().machine).machine, workspace.engine
    offers = engine.capabilities().offers
    decision = decide(problem, machine=machine, mode=mode, offers=offers)
    served = (one for one in decision.others if not engine.refuses(problem, one))
    if engine.refuses(problem, decision.schedule):
        return replace(decision, schedule=next(served))
    return decision


def exchange(operands: Operands, group: ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    """The operator's exchange by the vendor's collective: of A, or of a product."""
    problem, rank, ranks = operands.problem, operands.rank, range(operands.problem.world)
    sent = [problem.block(rank, peer) for peer in ranks]
    received = [problem.block(peer, rank) for peer in ranks]

    def move(rows: torch.Tensor) -> torch.Tensor:
        if rows.is_floating_point() and rows.element_size() == 1:  # not every library knows float8
            return move(rows.view(torch.uint8)).view(rows.dtype)
        collective = problem.kind.collective
        if collective == "all-reduce":
            dist.all_reduce(rows, group=group)
            return rows
        arriving = {"all-gather": problem.m, "all-to-all": sum(received)}
        moved = rows.new_empty(arriving.get(collective, problem.rows[rank]), rows.shape[1])
        if collective == "all-to-all":
            dist.all_to_all_single(moved, rows, received, sent, group=group)
        else:
            (all_gather if collective == "all-gather" else reduce_scatter)(moved, rows, group=group)
        return moved

    return move


def _collective(candidate: BenchCandidate, operands: Operands, group: ProcessGroup) -> Runner:
    move = exchange(operands, group)
    kind = operands.problem.kind
    if not kind.scatters:
        return Runner(lambda: move(operands.a_LK), WHOLE)
    problem = operands.problem
    product = operands.empty(problem.product_rows(operands.rank), problem.n, problem.out_dtype)
    product.normal_()

    @contextmanager
    def fresh() -> Iterator[None]:
        """Draw the product again: sums in place would grow from call to call."""
        product.normal_()
        yield

    return Runner(
        lambda: move(product),
        proof=lambda: move(operands.product()),
        context=fresh if kind.returns else nullcontext,
    )


def _copies(candidate: BenchCandidate, operands: Operands, group: ProcessGroup) -> Runner:
    """Only the copies of a call: calls with a B of no columns, whose products are empty."""
    problem, rank, schedule = operands.problem, operands.rank, COPIED_BY
    moved: list[tuple[Problem, torch.Tensor, torch.Tensor]] = []
    for one in movements(problem):
        a = operands.a_LK
        if problem.kind.scatters:
            a = operands.empty(one.left_rows(rank), one.k, one.dtype).normal_()
        moved.append((one, a, operands.empty(one.b_rows(rank), 0, one.dtype)))
    scales = {} if problem.kind.scatters else dict(operands.scales)
    if problem.scaling and scales and not problem.scaling.by_rank:
        scales["scale_b"] = scales["scale_b"][:, :0]

    def run() -> torch.Tensor:
        return [call(*one, group, schedule, **scales) for one in moved][-1]

    if problem.operator == "all_gather_matmul":
        gathered = partial(call, *moved[0], group, schedule, return_gathered=True, **scales)
        return Runner(run, WHOLE, proof=lambda: gathered()[1])
    # The proof makes the same copies with products, which show whether rows arrive.
    return Runner(run, proof=caller(operands, group, schedule))


def _serial_collective(
    candidate: BenchCandidate, operands: Operands, group: ProcessGroup
) -> Runner:
    move, kind, scale = exchange(operands, group), operands.problem.kind, operands.scales
    travels = operands.problem.sends_factors and not operands.problem.scaling.by_rank

    def run() -> torch.Tensor:
        if kind.scatters:
            return move(operands.product())
        whole, of_a = move(operands.a_LK), scale.get("scale_a")
        whole_scale = move(of_a) if of_a is not None and travels else of_a
        return operands.multiplied(whole.t() if kind.inner else whole, whole_scale)

    return Runner(run)


def _copy_engines(candidate: BenchCandidate, operands: Operands, group: ProcessGroup) -> Runner:
    """The library's collective and the product, with all results in memory that it has registered,
    so that it may take copy engines."""
    runner = _serial_collective(candidate, operands, group)
    return replace(runner, context=baselines.registered(group, operands.device, runner.run))


def _pieces(candidate: BenchCandidate, operands: Operands, group: ProcessGroup) -> Runner:
    """FiCCO-rccl of the paper (section VI-E): W pieces per shard by the vendor's collective.

    The pieces of a step come from all ranks, as an all-gather delivers them (uniform-fused-1d). The
    collective runs on its own stream. Each product waits for its piece.
    """
    problem = operands.problem
    world, k, n, rows = problem.world, problem.k, problem.n, problem.rows[0]
    cuts = cut(rows, world)

    def run() -> torch.Tensor:
        shard, b = operands.a_LK, operands.b_KN
        staging = torch.empty_like(operands.whole_OK)
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


def _pytorch(candidate: BenchCandidate, operands: Operands, group: ProcessGroup) -> Runner:
    _enable_symmetric_memory(group)
    op = getattr(torch.ops.symm_mem, _fused_name(operands.problem))
    if operands.problem.scaling:
        return Runner(partial(_pytorch_scaled, op, operands, group.group_name))
    if operands.problem.kind.scatters:
        return Runner(lambda: op(operands.a_LK, operands.b_KN, "sum", 0, group.group_name))

    def run() -> torch.Tensor:
        a, b = operands.a_LK, operands.b_KN
        return op(a, [b], 0, group.group_name, return_A=False)[1][0]

    if candidate.kind == "pytorch":
        return Runner(run)
    # The native path is chosen by a variable that is read in every call.
    return Runner(run, context=partial(environment, **{NATIVE_SWITCH: "1"}))


def _enable_symmetric_memory(group: ProcessGroup) -> None:
    from torch.distributed import _symmetric_memory

    enable = _symmetric_memory.enable_symm_mem_for_group
    if not hasattr(enable, "__deprecated__"):  # older releases must be told
        enable(group.group_name)


def _shot(candidate: BenchCandidate, operands: Operands, group: ProcessGroup) -> Runner:
    """A product in symmetric memory, summed there by PyTorch."""
    from torch.distributed import _symmetric_memory

    problem, op = operands.problem, getattr(torch.ops.symm_mem, SHOTS[candidate.kind])
    dtype = getattr(torch, problem.out_dtype)
    _enable_symmetric_memory(group)
    product = _symmetric_memory.empty((problem.m, problem.n), dtype=dtype, device=operands.device)
    _symmetric_memory.rendezvous(product, group)

    def run() -> Any:
        torch.mm(operands.a_LK, operands.b_KN, out=product)
        return op(product, "sum", group.group_name)

    return Runner(run)


def _fused_name(problem: Problem) -> str:
    return FUSED[problem.operator][problem.scaling is not None]


def _pytorch_scaled(op: Callable[..., Any], operands: Operands, group: str) -> Any:
    """A call of PyTorch's fused operator for operands with scales."""
    a, b, (of_a, of_b) = operands.a_LK, operands.b_KN, operands.scales.values()
    out_dtype: Any = getattr(torch, operands.problem.out_dtype)
    how: Any = (a, b, of_a, of_b, "sum", 0, 0, group, [len(a), b.shape[1]])
    if operands.problem.kind.scatters:
        return op(*how, None, None, out_dtype, False)
    how = (a, [b], of_a, [of_b], 0, group, [None], [None], [out_dtype], [False])
    return op(*how)[1][0]


def _quack_tilings(problem: Problem) -> list[tuple[int, int, int, int, bool]]:
    rows = problem.rows[0] if problem.equal else 1
    return [one for one in QUACK_TILINGS if rows % (one[0] * one[2]) == 0]


def _quack(_: BenchCandidate, operands: Operands, group: ProcessGroup) -> Runner:
    """QuACK's gather by copy engines. The tiles of its GEMM wait for the gather. The tiling is the
    fastest of ``QUACK_TILINGS`` for the whole product."""
    library: Any = import_module("quack.gemm")
    transport: Any = import_module("quack.distributed")
    a, b = operands.a_LK, operands.b_KN
    gathering = transport.AllGatherRunner(*a.shape, a.dtype, group, a.device)
    out = a.new_empty(operands.problem.m, b.shape[1])

    def product(tiling: tuple[Any, ...], whole: torch.Tensor, gates: Any = None) -> None:
        *sizes, turns = tiling
        how = {"pingpong": turns, "b_kn": True, "ag_args": gates}
        library.gemm(whole, b, out, None, None, *sizes, **how)

    def seconds(tiling: tuple[Any, ...]) -> float:
        events = [gpu.Event(enable_timing=True) for _ in range(2)]
        product(tiling, operands.whole_OK)
        for event in events:
            for _ in range(3 * (event is events[1])):
                product(tiling, operands.whole_OK)
            event.record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1])

    fastest = min(_quack_tilings(operands.problem), key=seconds)

    def run() -> torch.Tensor:
        with gathering.gather(a) as (whole, gates):
            product(fastest, whole, gates)
        return out

    @contextmanager
    def quiet() -> Iterator[None]:
        """Keep eager calls and replays of graphs apart."""
        gathering.quiesce()
        yield

    return Runner(run, context=quiet)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set variables of the environment, and restore them afterwards."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


def _ficco(candidate: BenchCandidate, operands: Operands, group: ProcessGroup) -> Runner:
    left = "a_symmetric_LK" if candidate.symmetric else "a_LK"
    run = caller(operands, group, candidate.schedule, left)
    if not candidate.stages:
        return Runner(run)
    # Symmetric memory for ``stages`` steps of the schedule, signals included.
    whole = plan(operands.problem, Schedule.parse(candidate.schedule), 0)
    others = whole.slot_bytes - aligned(whole.buffer["staging"].nbytes(0))
    staging = aligned(candidate.stages * step_bytes(whole))
    engine = workspace_of(group, operands.device).engine
    cap = engine.slot_bytes(whole.words, others + staging)
    return Runner(run, context=lambda: ficco.options(workspace_bytes=cap))


def step_bytes(plan: Plan) -> int:
    """Bytes of staging that the largest step of a plan reads."""
    staged = [[one for one in s.products if one.a.buffer == "staging"] for s in plan.steps]
    read = [sum(one.batch * one.a.elements for one in products) for products in staged]
    return max(read, default=0) * plan.buffer["a"].itemsize


BUILDERS: dict[str, Callable[[BenchCandidate, Operands, Any], Runner]] = {
    "gemm": lambda _, operands, __: Runner(operands.product, Operands.reference_product),
    "collective": _collective,
    "copies": _copies,
    "serial-collective": _serial_collective,
    "pieces": _pieces,
    "pytorch": _pytorch,
    "pytorch-native": _pytorch,
    "quack": _quack,
    "product-by": lambda _, operands, __: Runner(
        operands.product, Operands.reference_product, context=baselines.preferred
    ),
    "copy-engines": _copy_engines,
    **dict.fromkeys(SHOTS, _shot),
    "ficco": _ficco,
}
