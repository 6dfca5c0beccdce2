"""Shapes on a machine, simulated, and decisions for people: examples, Table I, and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ficco.heuristics import Decision, decide
from ficco.heuristics.candidates import is_serial
from ficco.heuristics.decide import described
from ficco.heuristics.families import family_of
from ficco.machine import Machine
from ficco.problems.products import Problem
from ficco.schedules import Schedule
from ficco.tools.bench.cases import Case
from ficco.tools.bench.draw import bars
from ficco.tools.bench.frames import SIMULATED

#: References of every shape: bounds, not schedules.
BOUNDS = ("gemm", "computed", "collective", "copies", "ideal")


def shape_of(case: Case, problem: Problem) -> dict[str, Any]:
    sizes = {"m": problem.m, "n": problem.n, "k": problem.k}
    return {"case": case.name, "label": case.label, **sizes, "dtype": problem.dtype}


def simulate_problem(
    problem: Any,
    shape: Mapping[str, Any],
    machine: Machine,
    mode: str,
    schedules: Sequence[Schedule] | None = None,
) -> pd.DataFrame:
    """The bounds of a problem, then every schedule, as ``ficco.tools.bench.frames.SIMULATED``.

    As in measured reports, ideal is the longer of the whole product and the faster communication:
    the vendor's collective or the copies. Serial is the faster communication followed by the
    product.
    """
    family = family_of(problem)
    bounds, usual = family.bounds(problem, machine, mode), family.schedules(problem, machine)
    serials = [family.seconds(problem, one, machine, mode) for one in usual if is_serial(one)]
    bounds["ideal"] = family.ideal(problem, machine, mode)
    seconds = {name: bounds[name] for name in BOUNDS if name in bounds}
    for schedule in schedules or usual:
        seconds[str(schedule)] = family.seconds(problem, schedule, machine, mode)
    where = {"world": problem.world, "hosts": problem.hosts}
    where |= {"machine": machine.name, "mode": mode}
    return SIMULATED.frame(
        {
            **shape,
            **where,
            "candidate": name,
            "ms": taken * 1e3,
            "speedup": min(serials) / taken if taken else 1.0,
            "share": bounds["ideal"] / taken if taken else 1.0,
        }
        for name, taken in seconds.items()
    )


#: A product of each kind: copies take longer, products take longer, the host takes longest.
EXAMPLES = ((32768, 2048, 8192), (8192, 7168, 8192), (1024, 512, 4096))


def examples(machine: Machine) -> Iterator[str]:
    """Decisions on a machine, in words."""
    for m, n, k in EXAMPLES:
        rows = (m // machine.ranks,) * machine.ranks
        problem = Problem("all_gather_matmul", rows, n, k, "bfloat16")
        decision = decide(problem, machine=machine)
        yield f"{problem}\n  {decision.schedule}\n  {decision.why}"


def draw(decision: Decision, measured: Mapping[str, Mapping[str, float]], path: Path) -> Path:
    """Candidates as bars, predicted and, if known, measured; the suffix is the format."""
    if not decision.candidates or decision.problem is None or decision.machine is None:
        raise ValueError(f"--draw: required predictions to draw, got none: {decision}")
    shown, chosen = decision.candidates, str(decision.schedule)
    figures = {
        "predicted, queued": [one.queued for one in shown],
        "predicted, idle": [one.idle for one in shown],
        "measured, queued": [measured.get(one.schedule, {}).get("queued") for one in shown],
        "measured, idle": [measured.get(one.schedule, {}).get("idle") for one in shown],
    }
    names = [one.schedule + " *" * (one.schedule == chosen) for one in shown]
    seconds = pd.DataFrame(figures, names, dtype=float)
    machine = described(decision.machine, decision.problem.world // decision.problem.hosts)
    assert machine is not None  # or nothing could have been predicted
    bound = family_of(decision.problem).ideal(decision.problem, machine) * 1e3
    title = f"{decision.problem} on {decision.machine.name}"
    return bars({"ms": seconds.dropna(axis=1, how="all") * 1e3}, path, title, bound)
