"""Shapes on a machine, simulated: what ``ficco simulate`` prints and writes."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ficco.bench.cases import Case
from ficco.bench.frames import SIMULATED
from ficco.heuristics.candidates import suited
from ficco.heuristics.losses import bounds as parts_alone
from ficco.machine import Machine
from ficco.problem import Problem
from ficco.schedules import NAMED, Schedule, refusal
from ficco.simulate import predict

#: What every shape is held against: bounds, not schedules.
BOUNDS = ("gemm", "collective", "copies", "ideal")


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
) -> pd.DataFrame:
    """The bounds of a shape, then every schedule, as ``ficco.bench.frames.SIMULATED``.

    As in measured reports, ideal is the longer of one whole GEMM and the faster of the vendor's
    collective and the copies, and serial the better of the two followed by the GEMM.
    """
    problem = case.problem(world)
    by_copies = suited(NAMED["serial"], problem, machine)
    bounds = parts_alone(problem, machine, predict, mode)
    serials = [predict(problem, by_copies, machine, mode)]
    if machine.all_gather:
        serials.append(predict(problem, Schedule.parse("serial:collective"), machine, mode))
    moved = [bounds[name] for name in ("copies", "collective") if name in bounds]
    bounds["ideal"] = max(bounds["gemm"], min(moved, default=0.0))
    seconds = {name: bounds[name] for name in BOUNDS if name in bounds}
    for schedule in schedules or default_schedules(problem, machine):
        seconds[str(schedule)] = predict(problem, schedule, machine, mode)
    shape = {"case": case.name, "label": case.label, "m": problem.m, "n": problem.n, "k": problem.k}
    shape |= {"dtype": problem.dtype, "world": world, "machine": machine.name, "mode": mode}
    return SIMULATED.frame(
        {
            **shape,
            "candidate": name,
            "ms": taken * 1e3,
            "speedup": min(serials) / taken if taken else 1.0,
            "share": bounds["ideal"] / taken if taken else 1.0,
        }
        for name, taken in seconds.items()
    )
