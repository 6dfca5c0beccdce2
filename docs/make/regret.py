"""Time that ``auto`` loses against the fastest measured schedule, and errors of the predictions.

    python -m docs.make.regret docs/results/measured-h200-4.csv [--machine configs/h200-4.yaml]

Reads the rows of a bench and a machine file, and writes the last section of the bench's page.
Nothing is measured: the schedule that ``auto`` takes is decided anew from the machine file, and its
time is the time of the same schedule in the bench. The section names the version of ficco that
decided.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import pandas as pd

from ficco.heuristics import Where, candidates, decide, rule
from ficco.heuristics.candidates import ALL_OFFERS, OFFERS, predictable
from ficco.machine import Fingerprint, Machine, digest, find, nearest
from ficco.problems.products import Problem
from ficco.schedules import Schedule, same_plans
from ficco.simulate import predict
from ficco.tools.bench.cases import Case
from ficco.tools.bench.frames import BENCH, commit, markdown, read_description
from ficco.tools.bench.report import MODE_WORDS, by_operator, measured
from ficco.version import version

#: Kinds of rows that ``auto`` must be no slower than.
OTHERS = (
    *("serial-collective", "pytorch", "pytorch-native", "pytorch-one-shot", "pytorch-two-shot"),
)

#: The other one, by copy engine.
SERIAL = Schedule.parse("serial")

#: A schedule that is so near to the best counts as the best.
NEAR = 0.02

#: Heading of the section.
TITLE = "## What `auto` loses, recomputed"


@dataclass(frozen=True)
class Regret:
    """One shape in one mode.

    Attributes:
        problem, mode: what was measured.
        best: name of the fastest schedule of those that ``auto`` compares or takes from a tuned
            entry, and its milliseconds. It is chosen by the even rounds and timed by the odd ones,
            as are all others, where a file has the halves.
        auto: name and milliseconds of the schedule that ``auto`` takes.
        rule: the same of the paper's rule, where it was measured; else None.
        others: milliseconds of the best of serial and PyTorch's fused op.
        errors: predicted over measured time, minus 1, by schedule.
        first: milliseconds of the schedule that the prediction ranks first.
    """

    problem: Problem
    mode: str
    best: tuple[str, float]
    auto: tuple[str, float]
    rule: tuple[str, float] | None
    others: float
    errors: Mapping[str, float]
    first: float

    @property
    def loss(self) -> float:
        """Share of the best time that ``auto`` takes longer."""
        return self.auto[1] / self.best[1] - 1.0

    @property
    def against_others(self) -> float:
        """Time of the best of the others over that of ``auto``."""
        return self.others / self.auto[1]


def regrets(rows: pd.DataFrame, machine: Machine) -> Iterator[tuple[str, Regret | None]]:
    """The mode and the regret of every measured shape; None if the schedule that ``auto`` takes was
    not measured. Calls that graphs capture are decided as queued ones.

    Raises:
        ValueError: the machine does not describe this number of ranks.
    """
    for (_, _, mode), mine in measured(rows).groupby(["operator", "case", "mode"], sort=False):
        yield mode, _regret(mine, mode, machine)


def _regret(rows: pd.DataFrame, mode: str, machine: Machine) -> Regret | None:
    row = next(rows.itertuples())
    eager = "idle" if machine.accelerator == "cpu" else "eager"
    where = Where(machine, row.world, "queued" if mode == "graph" else eager)
    case = Case(row.case, row.m, row.n, row.k, row.dtype, operator=row.operator)
    problem = case.problem(row.world)
    ours = rows[(rows["kind"] == "ficco") & rows["candidate"].map(plain)]
    schedules = [*map(Schedule.parse, ours["candidate"])]
    halves = ("ms",) * 2 if rows["ms_even"].isna().any() else ("ms_even", "ms_odd")
    choosing, timed = (dict(zip(schedules, ours[half], strict=True)) for half in halves)
    movers = tuple({schedule.mover: None for schedule in timed})
    tiled = ("tiled",) * any(schedule.grouping == "tiled" for schedule in timed)
    # Older files lack the schedules by a copy kernel, which did not exist then.
    by_kernel = [
        one
        for one in candidates(problem, where.simulated, ALL_OFFERS)
        if one.mover == "kernel" and predictable(one, problem, where.simulated)
    ]
    newer = by_kernel and timed.keys() >= set(by_kernel)
    by_model = (*OFFERS, *("kernel",) * bool(newer), *tiled)
    auto = decide(problem, machine=machine, mode=where.mode, offers=by_model).schedule
    names = (*candidates(problem, where.simulated, (*movers, *tiled)), auto)
    times = by_plan(problem, timed, names)
    if auto not in times:
        return None
    compared = {one: times[one] for one in dict.fromkeys(names) if one in times}
    simulated = "queued" if mode == "graph" else mode
    predicted = {one: predict(problem, one, where.simulated, simulated) * 1e3 for one in compared}
    ruled = None
    if machine.thresholds is not None:
        name, _ = rule(problem, machine.thresholds)
        ms = times.get(Schedule.parse(name))
        ruled = (name, ms) if ms else None
    others = [*rows[halves[1]][rows["kind"].isin(OTHERS)], times.get(SERIAL, float("inf"))]
    best = min(compared, key=by_plan(problem, choosing, names).__getitem__)
    return Regret(
        problem,
        mode,
        (str(best), compared[best]),
        (str(auto), times[auto]),
        ruled,
        min(others),
        {str(one): predicted[one] / compared[one] - 1.0 for one in compared},
        times[min(predicted, key=predicted.__getitem__)],
    )


def by_plan(
    problem: Problem, timed: Mapping[Schedule, float], others: Iterable[Schedule]
) -> dict[Schedule, float]:
    """Milliseconds of all schedules whose plan was measured: the median over all names of the plan.
    The minimum of several measurements would have an advantage over a single one."""
    first = same_plans(problem, dict.fromkeys((*timed, *others)))
    by_plan: dict[Schedule, list[float]] = {}
    for schedule, ms in timed.items():
        by_plan.setdefault(first[schedule], []).append(ms)
    return {one: median(by_plan[plan]) for one, plan in first.items() if plan in by_plan}


def plain(candidate: str) -> bool:
    """Whether a row is that of a schedule that ``auto`` could take: nothing special about it."""
    return candidate != "auto" and "@" not in candidate


def summary(regrets_found: Sequence[Regret], left_out: int) -> str:
    """The figures of one mode as Markdown, with how many shapes are not in them."""
    losses = [one.loss for one in regrets_found]
    errors = [abs(error) for one in regrets_found for error in one.errors.values()]
    ranked = [one.first / one.best[1] - 1.0 <= NEAR for one in regrets_found]
    ruled = [one.rule[1] / one.best[1] - 1.0 for one in regrets_found if one.rule]
    lines = [
        ("shapes", str(len(regrets_found))),
        ("shapes left out, since what `auto` takes was not measured", str(left_out)),
        ("`auto` against the best: mean loss", f"{mean(losses):.1%}"),
        ("worst loss", f"{max(losses):.1%}"),
        (f"within {NEAR:.0%} of the best", f"{mean(loss <= NEAR for loss in losses):.0%}"),
        (
            "against the best of serial (collective, copy engine) and PyTorch, worst",
            f"{min(one.against_others for one in regrets_found):.2f}",
        ),
        ("prediction against measurement, mean absolute error", f"{mean(errors):.1%}"),
        (f"predicted best is within {NEAR:.0%} of the best", f"{mean(ranked):.0%}"),
    ]
    if ruled:
        hits = mean(loss <= NEAR for loss in ruled)
        wrong = [loss for loss in ruled if loss > NEAR]
        lost = f", {mean(wrong):.1%} lost where not" if wrong else ""
        lines.append((f"the paper's rule alone ({len(ruled)} shapes)", f"{hits:.0%} right{lost}"))
    return markdown(("", ""), lines)


def table(regrets_found: Sequence[Regret]) -> str:
    """Every shape of one mode as Markdown."""
    body = [
        (
            f"{one.problem.m} x {one.problem.n} x {one.problem.k}",
            one.auto[0],
            f"{one.auto[1]:.3f}",
            one.best[0],
            f"{one.best[1]:.3f}",
            f"{one.loss:.1%}",
            f"{one.against_others:.2f}",
        )
        for one in regrets_found
    ]
    heads = ("m x n x k", "`auto` takes", "ms", "best", "ms", "loss", "x others")
    return markdown(heads, body)


def report(rows: pd.DataFrame, machine: Machine, name: str, date: str = "") -> str:
    """Regret of all modes as a section of a page.

    Args:
        name: of the bench's files.
        date: when the bench was measured, as its description has it.
    """
    parts = [TITLE, _decided(machine, name, date), ABOUT]
    by_mode: dict[tuple[str, str], list[Regret | None]] = {}
    for operator, mine in by_operator(rows):
        for mode, one in regrets(mine, machine):
            by_mode.setdefault((operator, mode), []).append(one)
    several = len({operator for operator, _ in by_mode}) > 1
    if not any(one for every in by_mode.values() for one in every):
        raise ValueError(
            "required a bench with the schedules that auto takes, got none of them; "
            "`ficco bench --schedules candidates` measures all that it compares"
        )
    for (operator, mode), every in by_mode.items():
        known = [one for one in every if one]
        heading = f"{operator}, {mode}" if several else mode.capitalize()
        parts.append(f"### {heading}: {MODE_WORDS[mode]}")
        if known:
            parts += [summary(known, len(every) - len(known)), table(known)]
        else:
            parts.append(f"What `auto` takes was measured on none of {len(every)} shapes.")
    return "\n\n".join(parts) + "\n"


def _decided(machine: Machine, name: str, date: str) -> str:
    """Origin of the decisions and of the times."""
    at = commit()
    return DECIDED.format(
        ficco=f"ficco {version()}" + (f", commit {at}," if at else ""),
        machine=machine.name,
        digest=f"{digest(machine):010x}",
        bench=name,
        date=f", measured {date}" if date else "",
    )


def measured_part(page: str) -> str:
    """The page of a bench without this section."""
    return page.partition(f"\n{TITLE}\n")[0]


DECIDED = (
    "**Recomputed, not measured:** {ficco} decided anew, by the description `{machine}` (digest "
    "{digest}); the times are those of [`{bench}.csv`]({bench}.csv){date}. What `auto` took "
    "in that run, where it was timed, is in the columns `auto` above."
)

ABOUT = (
    "`auto` takes one schedule for eager calls, without knowing whether the host runs ahead "
    "(queued) or the GPU waits for it (idle). The best is the fastest measured of the schedules "
    "that `auto` compares and of those by a copy kernel beside products, which it takes from a "
    "tuned entry alone. In files with `ms_even` and `ms_odd` half of the rounds choose it, and all "
    "times are of the other half; others are the better of serial and PyTorch's fused op."
)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path, help="results of ficco bench")
    parser.add_argument("--machine", help="a name or a file (default: that of the bench)")
    arguments = parser.parse_args(words)
    rows, about = BENCH.read(arguments.csv), read_description(arguments.csv)
    device, ranks = str(about.get("device", "")), int(about.get("ranks", 0))
    fingerprint = Fingerprint(device, ranks)
    machine = find(arguments.machine, fingerprint) or (nearest(fingerprint) if ranks else None)
    if machine is None:
        raise ValueError(f"--machine: required, since no file describes {ranks} ranks of {device}")
    path = arguments.csv.with_suffix(".md")
    section = report(rows, machine, arguments.csv.stem, str(about.get("date", "")))
    path.write_text(measured_part(path.read_text()) + f"\n{section}")
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
