"""Steps that time whole calls: host times, thresholds of the rule, and the fastest schedules of
problems."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ficco.heuristics import decide
from ficco.heuristics.candidates import SERIALS, candidates
from ficco.heuristics.families import RULE_ROWS, Observation, fit_thresholds
from ficco.machine import Host, Machine, Thresholds, Tuned, tuned_key
from ficco.plan import Plan
from ficco.problems.products import Problem
from ficco.runtime.workspace import workspace_of
from ficco.schedules import Schedule, plan
from ficco.tools.bench.candidates import parse
from ficco.tools.bench.cases import OPERATOR, SETS, Case, default_sets
from ficco.tools.bench.inputs import Operands
from ficco.tools.bench.measure import Times
from ficco.tools.bench.products import ProductWork
from ficco.tools.tune import fits
from ficco.tools.tune.effort import TuneSettings
from ficco.tools.tune.site import Site

#: Schedules with different numbers of products, copies and signals.
ENQUEUED = """
    serial shard-overlap shard-overlap:pull growing hetero-unfused-1d:pieces=4
    hetero-unfused-1d:pieces=8 hetero-unfused-1d:pieces=8,pull hetero-fused-1d:pieces=4
    hetero-fused-1d:pieces=8 uniform-fused-1d:pieces=4
""".split()
#: A schedule whose product waits by tile.
TILED = "tiled"
#: Products in a row whose host time is taken at once.
PRODUCTS = 8
#: Calls before host time is taken: an engine may record the first few.
WARM_CALLS = 12
#: Most rounds of host times, and the share of the seconds for mode "idle".
HOST_ROUNDS, HOST_SHARE = 200, 0.6


def host(site: Site) -> Host:
    parts, on_gpu = site.parts(), site.watch.on_gpu
    rows, n, k = site.effort.tiny
    problem = Problem("all_gather_matmul", (rows,) * site.world, n, k, site.effort.dtype)
    a, b = parts.matrix("a", rows, k), parts.matrix("b", k, n)
    engine = workspace_of(site.watch.group, site.watch.device).engine
    waits = on_gpu and not engine.refuses(problem, Schedule.parse(TILED))
    calls = site.gathers(a, b, (*ENQUEUED, "serial:collective", *[TILED] * waits))
    if not on_gpu:
        product = parts.matmul(rows, n, k)
        calls["products"] = lambda: [product() for _ in range(PRODUCTS)]
        calls["collective"] = parts.collective(rows * k * a.element_size())
    for call in calls.values():
        for _ in range(WARM_CALLS):
            call()
    taken = _later(site, calls)
    times = []
    if not on_gpu:  # tells a product's time from that of its call
        times += [fits.Enqueued(taken["products"], 0, PRODUCTS, 0, 0)] * 3
    for name in ENQUEUED:
        numbers = counts(plan(problem, Schedule.parse(name), site.watch.rank))
        times.append(fits.Enqueued(taken[name], 1, *numbers))
    each = fits.host(site.watch.gather(times)[0])
    # A CPU carries out the collective itself, too, whose own time is in its own block.
    exchange = taken.get("collective", 0.0)
    collective_call = max(taken["serial:collective"] - exchange - each["matmul"], 0.0)
    note = "on a CPU a call is carried out by its host"
    if on_gpu:
        note = "how much later warm calls, which the engine replays, end on an idle GPU"
    note = f"least squares over {len(ENQUEUED)} schedules of {rows} rows per rank; {note}"
    source = site.provenance("fitted", note)
    tiled = max(taken[TILED] - each["call"], 0.0) if waits else None
    return Host(collective_call=collective_call, provenance=source, tiled=tiled, **each)


def counts(whole: Plan) -> tuple[int, int, int]:
    """Products, copies and batches of signals that a host enqueues for a plan, as a simulation
    in mode "idle" counts them: a placement or a sum counts as a product."""
    steps = whole.steps
    matmuls = sum(len(step.products) + (step.op in ("place", "reduce")) for step in steps)
    signals = sum(bool(step.waits or step.after) + bool(step.posts) for step in steps)
    return matmuls, sum(step.op == "copy" for step in steps), signals


def _later(site: Site, calls: dict[str, Any]) -> dict[str, float]:
    """Delay of the end of calls, in seconds, if the device waits for the host.

    The host's time to enqueue is longer with calls in flight. The start latency of a GPU is not
    included.
    """
    idle = site.time("host", calls, mode="idle", share=HOST_SHARE, most=HOST_ROUNDS)
    if not site.watch.on_gpu:
        return _medians(idle)
    queued = site.time("host", calls, mode="queued", share=1 - HOST_SHARE, most=HOST_ROUNDS)
    behind = _medians(queued)
    return {name: max(late - behind[name], 0.0) for name, late in _medians(idle).items()}


def _medians(series: Mapping[str, Times]) -> dict[str, float]:
    return {name: median(times) for name, times in series.items()}


def thresholds(site: Site) -> Thresholds:
    observed = []
    for m, n, k in site.effort.rule:
        rows = (m // site.world,) * site.world
        problem = Problem("all_gather_matmul", rows, n, k, site.effort.dtype)
        operands = Operands(problem, site.watch.rank, site.watch.device)
        operands.random(0)
        calls = site.gathers(operands.a_LK, operands.b_KN, RULE_ROWS)
        series = site.time("thresholds", calls, share=1 / len(site.effort.rule))
        observed.append(Observation(problem, _medians(series)))
        site.watch.release()
    fitted = fit_thresholds(observed)
    return replace(fitted, provenance=site.provenance("fitted", fitted.provenance.note))


def best(site: Site, problem: Problem) -> tuple[Tuned, dict[str, str]]:
    """Measure all candidates of a problem: its entry, and the reason for each candidate that was
    not measured. The same on all ranks.

    Raises:
        ValueError: the problem does not fit, or no serial schedule could be timed.
        ArithmeticError: a candidate's result was wrong.
    """
    watch = site.watch
    sizes = problem.m, problem.n, problem.k, problem.kind_of_operands
    rows = () if problem.kind.returns else problem.blocks or problem.rows
    work = ProductWork(Case("", *sizes, operator=problem.operator, rows=rows), watch)
    offers = workspace_of(watch.group, watch.device).engine.capabilities().offers
    chosen = [parse(str(one)) for one in candidates(problem, site.machine, offers)]
    work.offered = {one.name: one for one in chosen}
    checked = work.checked(False, site.tick)
    if wrong := [f"{one.name}: {one.note}" for one in checked if one.status == "wrong"]:
        raise ArithmeticError("; ".join(wrong))
    work.fill(0)
    calls = {one.name: one.runner for one in checked if one.runner is not None}
    modes = ("queued", "idle") if watch.on_gpu else ("idle",)
    seconds, least = site.effort.shape_seconds / len(modes), site.effort.least
    times = {}
    for mode in modes:
        series = watch.time(calls, seconds=seconds, mode=mode, least=least, tick=site.tick)
        times[mode] = _medians(series)
    left_out = {one.name: one.note for one in checked if one.runner is None}
    return entry(problem, times, site), left_out


def entry(problem: Problem, times: Mapping[str, Mapping[str, float]], site: Site) -> Tuned:
    """The entry from seconds by mode and schedule; a CPU has the one mode for both."""
    by_mode = (times.get("queued", times["idle"]), times["idle"])
    if not all({*SERIALS} & {*seconds} for seconds in by_mode):
        raise ValueError(f"{problem}: required a serial schedule to compare with, none was timed")
    queued, idle = (min(seconds, key=seconds.__getitem__) for seconds in by_mode)
    serial = [min(by[name] for name in SERIALS if name in by) for by in by_mode]
    names = ("operator", "rows", "n", "k", "blocks")
    sizes = {name: getattr(problem, name) for name in names}
    seconds = by_mode[0][queued], by_mode[1][idle]
    source = site.source("measured", f"the fastest of {len(by_mode[1])} candidates")
    best = {"queued": queued, "idle": idle, "seconds": seconds, "serial": (serial[0], serial[1])}
    return Tuned(dtype=problem.kind_of_operands, provenance=source, **sizes, **best)


def with_entry(machine: Machine, new: Tuned) -> Machine:
    """The machine with an entry, in place of an older one of the same problem."""
    others = [one for one in machine.tuned if tuned_key(one) != tuned_key(new)]
    return replace(machine, tuned=(*others, new))


def rechosen(before: Machine, after: Machine, world: int, settings: TuneSettings) -> Iterator[str]:
    """Lines that say for which shapes ``auto`` takes another schedule than before: the shapes of
    the default bench, and the problems of a run."""
    (name,) = default_sets(OPERATOR, settings.device)
    problems = (*from_cases(SETS[name](), world, settings.device), *settings.problems)
    mode, changed = "eager" if settings.device == "cuda" else "idle", []
    for problem in dict.fromkeys(problems):
        decisions = (decide(problem, machine=one, mode=mode) for one in (before, after))
        old, new = (str(one.schedule) for one in decisions)
        if old != new:
            changed.append(f"  {problem}: {old} -> {new}")
    yield f"schedule='auto' changed for {len(changed)} of {len(set(problems))} shapes (set {name})"
    yield from changed


def from_cases(
    cases: Iterable[Case], world: int, device: str, operators: Sequence[str] = ()
) -> list[Problem]:
    """Problems of shapes for ``world`` ranks, of the shapes' operator or of each in ``operators``;
    CPUs use float32 for half precision."""
    problems = [
        case.on(name).problem(world) for case in cases for name in operators or (case.operator,)
    ]
    if device == "cpu":
        problems = [replace(one, dtype="float32") if one.itemsize == 2 else one for one in problems]
    return list(dict.fromkeys(problems))
