"""What is compared, as one table; :mod:`.calls` knows how each of it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ficco.heuristics.candidates import BY_KERNEL, READING, candidates, is_serial
from ficco.problems.products import OPERATORS, Problem
from ficco.schedules import NAMED, Schedule, refusal, same_plans
from ficco.tools.bench.cases import OPERATOR

if TYPE_CHECKING:
    from ficco.dma.engine import Engine


@dataclass(frozen=True)
class BenchCandidate:
    """One thing that is timed.

    Attributes:
        name: its name in reports; for ficco the schedule's name and, after ``@``, what else is
            special about the call.
        kind: how it is called, a key of ``ficco.tools.bench.calls.BUILDERS``.
        schedule: for ficco.
        symmetric: the left operand lies in symmetric memory (``ficco.empty``).
        stages: staging is capped at so many steps; 0 for no cap.
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


def parse(name: str) -> BenchCandidate:
    """A ficco candidate from its name: ``shard-overlap:pull@symmetric``, ``growing@stages=2``."""
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


#: What every shape is held against.
REFERENCES = (
    BenchCandidate("gemm", "gemm"),
    BenchCandidate("collective", "collective"),
    BenchCandidate("copies", "copies", "shard-overlap"),
    BenchCandidate("serial-collective", "serial-collective"),
    BenchCandidate("ficco-rccl", "pieces", operators=(OPERATOR,)),
    BenchCandidate("pytorch-fused", "pytorch", operators=(OPERATOR, "matmul_reduce_scatter")),
    BenchCandidate("pytorch-native", "pytorch-native", operators=(OPERATOR,)),
    BenchCandidate("quack", "quack", operators=(OPERATOR,)),
)

#: Copies by kernel are compared where they are this small at most. Larger ones were nowhere faster
#: than those by the copy engine (2 H200, 12 of the unseen shapes, 2026-11-21, commit 7a76eddfe07e).
KERNEL_BYTES = 4 << 20

#: Stands for the schedules that ``auto`` compares; ``candidates=3`` for three of them.
COMPARED = BenchCandidate("candidates", "compared")

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
    """The candidates of a bench: the references but some, and the schedules of these names, or all
    that are of use on ``"cuda"`` or ``"cpu"``.

    The name ``candidates`` stands for the schedules that ``auto`` compares on a switch, with those
    by kernel where copies are small, and those that sum in the memory of the peers. With a number
    it stands for as many of library products, besides serial, that are predicted to be fastest.
    """
    ours = tuple(one for one in SCHEDULES if device != "cpu" or not one.several_lanes)
    if names is not None:
        ours = tuple(_stands_for(name) or parse(name) for name in names)
    references = [one for one in REFERENCES if one.name not in without]
    references.append(parse("serial"))  # it is a reference, too
    return tuple(dict.fromkeys((*references, *ours)))


def _stands_for(name: str) -> BenchCandidate | None:
    """A candidate that stands for several schedules; None if the name is not of one."""
    head, given, most = name.partition("=")
    if head != COMPARED.name or (given and not (most.isdecimal() and int(most))):
        return None
    return replace(COMPARED, name=name)


def of_problem(
    chosen: Iterable[BenchCandidate],
    problem: Problem,
    engine: Engine | None = None,
    ranked: Callable[[], Sequence[Schedule]] = tuple,
) -> tuple[BenchCandidate, ...]:
    """The candidates that a problem's operator has, of those that an engine offers. ``ranked``
    gives the schedules that were compared for it, the best first, if any were."""
    available: dict[BenchCandidate, None] = {}
    for one in chosen:
        if one.kind == COMPARED.kind and one != COMPARED:
            products = [
                parse(str(schedule))
                for schedule in ranked() or candidates(problem)
                if schedule.grouping != "tiled" and not is_serial(schedule)
            ]
            there = [each for each in products if not refused(each, problem, engine)]
            available |= dict.fromkeys(there[: int(one.name.partition("=")[2])])
        elif one == COMPARED:
            small = block_bytes(problem) <= KERNEL_BYTES
            names = (*map(str, candidates(problem)), *BY_KERNEL * small, *READING)
            on_gpu = engine is None or engine.asynchronous
            every = map(parse, names)
            available |= dict.fromkeys(one for one in every if on_gpu or not one.several_lanes)
        elif problem.operator in (one.operators or OPERATORS):
            available[one] = None
    return tuple(one for one in available if not refused(one, problem, engine))


def named_again(
    candidates: Iterable[BenchCandidate], problem: Problem
) -> dict[BenchCandidate, BenchCandidate]:
    """Those that go through the same steps as one before them, and that one.

    They are timed once: of several clocks on one plan the fastest would win by chance.
    """
    plain = {
        Schedule.parse(one.schedule): one
        for one in candidates
        if one.ours and one.schedule != "auto" and not one.symmetric and not one.stages
    }
    same = same_plans(problem, plain)
    return {plain[one]: plain[first] for one, first in same.items() if one != first}


def refused(candidate: BenchCandidate, problem: Problem, engine: Engine | None = None) -> str:
    """Why a problem cannot be served by a candidate's schedule; empty if it can."""
    if not candidate.ours:
        return ""
    if problem.kind.scatters and (candidate.symmetric or candidate.stages):
        return (
            f"{candidate.name}: @symmetric and @stages are for operators whose left operand travels"
        )
    if candidate.schedule == "auto":
        return ""
    schedule = Schedule.parse(candidate.schedule)
    return refusal(problem, schedule) or (engine.refuses(problem, schedule) if engine else "")


def moved_bytes(problem: Problem) -> int:
    """Bytes of what is exchanged on a rank: the gathered A, or the product."""
    return problem.m * problem.moved_bytes


def block_bytes(problem: Problem) -> int:
    """Bytes of the largest block that a rank sends to another."""
    ranks = range(problem.world)
    rows = [problem.block(src, dst) for src in ranks for dst in ranks if src != dst]
    return max(rows, default=0) * problem.moved_bytes
