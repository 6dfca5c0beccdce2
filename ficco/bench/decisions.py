"""Decisions for people: what the rule takes for a list of problems, and pictures of candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ficco.bench.cases import Case
from ficco.bench.report import markdown
from ficco.bench.simulated import BOUNDS, simulate_case
from ficco.heuristics import (
    Decision,
    Observation,
    candidates,
    decide,
    fit_thresholds,
    literal,
    rule,
)
from ficco.heuristics.candidates import suited
from ficco.heuristics.decide import described
from ficco.heuristics.losses import ideal
from ficco.heuristics.rule import COLUMNS, ROWS
from ficco.machine import Machine, Thresholds
from ficco.problem import Problem
from ficco.schedules import Schedule
from ficco.simulate import predict

if TYPE_CHECKING:
    from rich.table import Table


#: Share of the fastest schedule's time within which another is as good.
HIT = 0.02


def observe(problem: Problem, machine: Machine) -> Observation:
    """The rule's four schedules on a problem, as simulated."""
    return Observation(
        problem,
        {
            name: predict(problem, suited(Schedule.parse(name), problem, machine), machine)
            for name in (COLUMNS, *ROWS)
        },
    )


def rule_table(machine: Machine, cases: Sequence[Case]) -> str:
    """What the rule takes in its readings, in Markdown, with what it loses in the simulation."""
    problems = [case.problem(machine.ranks) for case in cases]
    seen = [observe(problem, machine) for problem in problems]
    at_its_word = literal(machine)
    fitted = fit_thresholds(seen)
    # The whole product has as many operations as all ranks together.
    whole = Thresholds(
        at_its_word.low / machine.ranks, at_its_word.high / machine.ranks, at_its_word.provenance
    )
    heads = (
        "",
        "m, n of a rank, k",
        "2mnk of a rank",
        "literal, of a rank",
        "literal, of all ranks",
        "fitted",
        "fastest of the four",
    )
    body = []
    readings = (at_its_word, whole, fitted)
    lost: list[list[float]] = [[] for _ in readings]
    for case, one in zip(cases, seen, strict=True):
        cells = []
        for reading, losses in zip(readings, lost, strict=True):
            name = rule(one.problem, reading)[0]
            losses.append(one.loss(name))
            lost_here = f" (+{losses[-1]:.0%})" if losses[-1] > HIT else ""
            cells.append(f"`{name}`{lost_here}")
        best = min(one.seconds, key=one.seconds.__getitem__)
        sizes = f"{case.m}, {case.n}, {case.k}"
        body.append((case.name, sizes, f"{one.problem.flops:.2g}", *cells, f"`{best}`"))
    hits = [f"{sum(value <= HIT for value in losses)} of {len(losses)}" for losses in lost]
    means = [f"{sum(losses) / len(losses):.1%}" for losses in lost]
    body.append((f"**within {HIT:.0%} of the fastest**", "", "", *hits, ""))
    body.append(("**mean loss**", "", "", *means, ""))
    return (
        f"Simulated on `{machine.name}`; in brackets what is lost to the fastest of the four. "
        f"Literal thresholds: {at_its_word.low:.3g} and {at_its_word.high:.3g} operations, "
        f"the card's peak per second taken as a number. Fitted to the simulated times of this "
        f"table: {fitted.low:.2g} and {fitted.high:.2g} operations of a rank.\n\n"
        + markdown(heads, body)
    )


def table_i(machine: Machine, cases: Sequence[Case]) -> Table:
    """The paper's Table I on a machine, simulated: speed-ups over the better serial composition."""
    from rich.table import Table

    table = Table(
        title=f"Table I of the paper, simulated on {machine.name}: times as fast as serial",
        title_justify="left",
    )
    table.add_column("")
    for head in ("serial", "Async TP", "FiCCO", "ideal"):
        table.add_column(head, justify="right")
    table.add_column("fastest schedule", overflow="fold")
    for case in cases:
        if case.skip:
            continue
        problem = case.problem(machine.ranks)
        schedules = candidates(problem, machine)
        rows = simulate_case(case, machine, machine.ranks, "queued", schedules)
        by_name = {row.candidate: row for row in rows}
        others = [row for row in rows if row.candidate not in (*BOUNDS, "shard-overlap")]
        best = max(others, key=lambda row: row.speedup)
        serial = min(others, key=lambda row: abs(row.speedup - 1.0))
        table.add_row(
            case.name,
            f"{serial.ms:.3g} ms",
            f"{by_name['shard-overlap'].speedup:.2f}",
            f"{best.speedup:.2f}",
            f"{by_name['ideal'].speedup:.2f}",
            best.candidate,
        )
    return table


#: A product of each kind: copies take longer, products take longer, the host takes longest.
EXAMPLES = ((32768, 2048, 8192), (8192, 7168, 8192), (1024, 512, 4096))


def examples(machine: Machine) -> Iterator[str]:
    """Decisions on a machine, in words."""
    for m, n, k in EXAMPLES:
        rows = (m // machine.ranks,) * machine.ranks
        problem = Problem("all_gather_matmul", rows, n, k, "bfloat16")
        decision = decide(problem, machine=machine)
        yield f"{problem}\n  {decision.schedule}\n  {decision.source}: {decision.reason}"


def draw(decision: Decision, measured: Mapping[str, Mapping[str, float]], path: Path) -> Path:
    """Candidates as bars, predicted and, if measured, beside that; the suffix is the format."""
    from matplotlib.figure import Figure

    if not decision.candidates or decision.problem is None or decision.machine is None:
        raise ValueError(f"--draw: required predictions to draw, got none: {decision}")
    shown = decision.candidates[::-1]
    series = {
        "predicted, queued": [one.queued for one in shown],
        "predicted, idle": [one.idle for one in shown],
        "measured, queued": [measured.get(one.schedule, {}).get("queued") for one in shown],
        "measured, idle": [measured.get(one.schedule, {}).get("idle") for one in shown],
    }
    there = {name: values for name, values in series.items() if any(values)}
    colours = ("#2a5d8f", "#9cc0de", "#e08a1e", "#f3cf9f")
    figure = Figure(figsize=(8.0, 0.32 * len(shown) + 1.4), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(there)
    for i, (name, values) in enumerate(there.items()):
        colour = colours[list(series).index(name)]
        places = [row + 0.4 - height * (i + 0.5) for row in range(len(shown))]
        widths = [(value or 0.0) * 1e3 for value in values]
        axes.barh(places, widths, height=height, color=colour, label=name)
    machine = described(decision.machine, decision.problem.world)
    assert machine is not None  # or nothing could have been predicted
    bound = ideal(decision.problem, machine, predict) * 1e3
    axes.axvline(bound, color="#444444", linewidth=1, linestyle="--", label="ideal")
    chosen = str(decision.schedule)
    names = [f"{one.schedule} *" if one.schedule == chosen else one.schedule for one in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("ms", fontsize=8)
    axes.set_title(f"{decision.problem} on {decision.machine.name}", fontsize=8, loc="left")
    axes.legend(fontsize=7, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
