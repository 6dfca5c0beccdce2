"""Write the choices of the paper's rule for its Table I between the markers of a page.

python -m docs.make.rule_table [docs/results/choosing.md]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from docs.make import parsed
from docs.make.readme import put_between
from ficco.heuristics import Observation, fit_thresholds, rule
from ficco.heuristics.candidates import suited
from ficco.heuristics.families import RULE_COLUMNS, RULE_RATIO, RULE_ROWS
from ficco.machine import Machine, Provenance, Thresholds, find
from ficco.problems.products import Problem
from ficco.schedules import Schedule
from ficco.simulate import predict
from ficco.tools.bench.cases import Case, scenarios
from ficco.tools.bench.frames import markdown

#: The paper's machine.
MACHINE = "mi300x-8"

#: Share of the fastest schedule's time within which another is as good.
HIT = 0.02


def literal(machine: Machine) -> Thresholds:
    """As the paper says literally: the threshold is the GPU's peak operations per second.

    Raises:
        ValueError: the peak is not known.
    """
    if machine.gemm is None:
        raise ValueError(
            f"machine {machine.name}: required its block gemm for the peak rate, got none"
        )
    peak = machine.gemm.peak
    note = "the number of peak operations per second, as FiCCO, section V-C, says"
    return Thresholds(peak, RULE_RATIO * peak, Provenance("paper", note=note))


def observe(problem: Problem, machine: Machine) -> Observation:
    """The rule's four schedules on a problem, as simulated."""
    return Observation(
        problem,
        {
            name: predict(problem, suited(Schedule.parse(name), problem, machine), machine)
            for name in (RULE_COLUMNS, *RULE_ROWS)
        },
    )


def rule_table(machine: Machine, cases: Sequence[Case]) -> str:
    """Choices of the rule in its readings, with their losses in the simulation, in Markdown."""
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
        f"Simulated on `{machine.name}`; in brackets the loss against the fastest of the four. "
        f"Literal thresholds: {at_its_word.low:.3g} and {at_its_word.high:.3g} operations, "
        f"the card's peak per second taken as a number. Fitted to the simulated times of this "
        f"table: {fitted.low:.2g} and {fitted.high:.2g} operations of a rank.\n\n"
        + markdown(heads, body)
    )


def main(page: Path) -> None:
    machine = find(MACHINE, None)
    assert machine is not None
    put_between(page, "rule-table", rule_table(machine, scenarios()))
    print(f"wrote {page}")


if __name__ == "__main__":
    main(parsed(__doc__, "page", nargs="?", default="docs/results/choosing.md"))
