"""Shapes on a machine, simulated: what ``ficco simulate`` prints and writes."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from ficco.bench.cases import Case
from ficco.heuristics.candidates import suited
from ficco.heuristics.losses import bounds as parts_alone
from ficco.machine import Machine
from ficco.problem import Problem
from ficco.schedules import NAMED, Schedule, refusal
from ficco.simulate import predict

#: What every shape is held against: bounds, not schedules.
BOUNDS = ("gemm", "collective", "copies", "ideal")


@dataclass(frozen=True)
class Row:
    """One candidate on one shape.

    Attributes:
        case, label, m, n, k, dtype: the shape.
        world, machine, mode: where and how it is simulated.
        candidate: a schedule's name, or one of ``BOUNDS``.
        ms: simulated milliseconds of the slowest rank.
        speedup: over the better serial composition.
        share: of the ideal.
    """

    case: str
    label: str
    m: int
    n: int
    k: int
    dtype: str
    world: int
    machine: str
    mode: str
    candidate: str
    ms: float
    speedup: float
    share: float


def default_schedules(problem: Problem, machine: Machine) -> list[Schedule]:
    """Every named schedule, and the serial composition with the vendor's collective.

    On a mesh they copy over all links at once, but for Async TP, which goes peer after peer.
    """
    named = [
        schedule if name == "shard-overlap" else suited(schedule, problem, machine)
        for name, schedule in NAMED.items()
        if not refusal(problem, schedule)
    ]
    with_collective = [Schedule.parse("serial:collective")] if machine.all_gather else []
    return [*with_collective, *named]


def simulate_case(
    case: Case, machine: Machine, world: int, mode: str, schedules: Sequence[Schedule] | None = None
) -> list[Row]:
    """The bounds of a shape, then every schedule.

    As in measured reports, ideal is the longer of one whole GEMM and the faster of the vendor's
    collective and the copies alone, and serial the better of the two with the GEMM behind.
    """
    problem = case.problem(world)
    by_copies = suited(NAMED["serial"], problem, machine)
    bounds = parts_alone(problem, machine, predict, mode)
    serials = [predict(problem, by_copies, machine, mode)]
    if machine.all_gather:
        serials.append(predict(problem, Schedule.parse("serial:collective"), machine, mode))
    moved = [bounds[name] for name in ("copies", "collective") if name in bounds]
    bounds["ideal"] = max(bounds["gemm"], min(moved, default=0.0))
    found = {name: bounds[name] for name in BOUNDS if name in bounds}
    for schedule in schedules or default_schedules(problem, machine):
        found[str(schedule)] = predict(problem, schedule, machine, mode)
    return [
        Row(
            case.name,
            case.label,
            problem.m,
            problem.n,
            problem.k,
            problem.dtype,
            world,
            machine.name,
            mode,
            name,
            seconds * 1e3,
            min(serials) / seconds if seconds else 1.0,
            bounds["ideal"] / seconds if seconds else 1.0,
        )
        for name, seconds in found.items()
    ]


def as_csv(rows: Sequence[Row]) -> str:
    """Rows as CSV with a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Row)])
    for row in rows:
        writer.writerow([f"{x:.6g}" if isinstance(x, float) else x for x in astuple(row)])
    return text.getvalue()


def write(path: Path, text: str) -> Path:
    """Write a text file, and the folders that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
