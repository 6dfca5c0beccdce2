"""The fastest schedules of given problems: all candidates proven right, then timed, paired."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ficco.bench.candidates import parse
from ficco.bench.cases import MEMORY_SHARE, Case
from ficco.bench.inputs import Operands
from ficco.bench.verify import Verifier
from ficco.errors import ConfigError
from ficco.heuristics.candidates import SERIALS, candidates
from ficco.machine import Machine, Tuned, tuned_key
from ficco.problem import Problem
from ficco.tune.site import Site
from ficco.workspace import workspace_of

#: Seconds for one problem.
SECONDS = {"cuda": 12.0, "cpu": 6.0}
QUICK_SHARE = 0.2


@dataclass(frozen=True)
class Found:
    """The entry of a problem, and what was not measured, with the reason."""

    entry: Tuned
    left_out: dict[str, str]


def measure(site: Site, problem: Problem, quick: bool) -> Found:
    """Measure all candidates of a problem; the same on all ranks.

    Raises:
        ValueError: the problem does not fit, or no serial schedule could be timed.
        ArithmeticError: a candidate's result was wrong.
    """
    watch = site.watch
    verifier = Verifier(watch)
    operator = problem.operator
    case = Case("", problem.m, problem.n, problem.k, problem.dtype, operator=operator)
    need = case.memory(problem.world)
    free = verifier.free_bytes()
    if need > MEMORY_SHARE * free:
        raise ValueError(f"{problem} needs {need >> 20} MiB on a rank, {free >> 20} are free")
    movers = workspace_of(watch.group, watch.device).engine.capabilities().movers
    names = [str(schedule) for schedule in candidates(problem, site.machine, movers)]
    operands = Operands(problem, watch.rank, watch.device)
    operands.exact_b()
    checked = []
    for name in names:
        site.tick(f"verify {name}")
        checked.append(verifier.eager(parse(name), operands))
    wrong = [f"{one.candidate.name}: {one.note}" for one in checked if one.status == "wrong"]
    if wrong:
        raise ArithmeticError("; ".join(wrong))
    left_out = {one.candidate.name: one.note for one in checked if one.runner is None}
    verifier.renew(operands, symmetric=False)
    operands.random(0)
    calls = {one.candidate.name: one.runner for one in checked if one.runner is not None}
    seconds = SECONDS[watch.device.type] * (QUICK_SHARE if quick else 1.0)
    modes = ("queued", "idle") if watch.on_gpu else ("idle",)
    times = {}
    for mode in modes:
        found = watch.time(
            calls, seconds=seconds / len(modes), mode=mode, least=site.effort.least, tick=site.tick
        )
        times[mode] = {name: series.seconds for name, series in found.items()}
    return Found(entry(problem, times, site), left_out)


def entry(problem: Problem, times: dict[str, dict[str, float]], site: Site) -> Tuned:
    """The entry from seconds by mode and schedule; a CPU has the one mode for both."""
    queued, idle = times.get("queued", times["idle"]), times["idle"]
    best = [min(by_name, key=by_name.__getitem__) for by_name in (queued, idle)]
    serial = [
        min((by_name[name] for name in SERIALS if name in by_name), default=0.0)
        for by_name in (queued, idle)
    ]
    if not all(serial):
        raise ValueError(f"{problem}: required a serial schedule to compare with, none was timed")
    note = f"the fastest of {len(idle)} candidates"
    return Tuned(
        operator=problem.operator,
        rows=problem.rows,
        n=problem.n,
        k=problem.k,
        dtype=problem.dtype,
        queued=best[0],
        idle=best[1],
        seconds=(queued[best[0]], idle[best[1]]),
        serial=(serial[0], serial[1]),
        provenance=site.source("measured", note),
        blocks=problem.blocks,
    )


def with_entry(machine: Machine, found: Tuned) -> Machine:
    """The machine with an entry, in place of an older one of the same problem."""
    others = [one for one in machine.tuned if tuned_key(one) != tuned_key(found)]
    return replace(machine, tuned=(*others, found))


def name_of(problem: Problem) -> str:
    """How a problem is called as a step of a run."""
    rows = "/".join("+".join(map(str, line)) for line in problem.blocks or (problem.rows,))
    return f"{problem.operator} {rows}x{problem.n}x{problem.k} {problem.dtype}"


def from_log(path: Path, world: int) -> list[Problem]:
    """The problems that a program has seen, for so many ranks, each once, without empty ones.

    Raises:
        ConfigError: the file cannot be read, or a line is not of a problem.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(str(path), "file", f"cannot be read: {error.strerror}") from None
    found = dict.fromkeys(
        _problem(path, number, line) for number, line in enumerate(lines, 1) if line.strip()
    )
    return [problem for problem in found if problem.world == world and problem.flops]


def _problem(path: Path, number: int, line: str) -> Problem:
    try:
        data = json.loads(line)
        return Problem(
            str(data["operator"]),
            tuple(int(rows) for rows in data["rows"]),
            int(data["n"]),
            int(data["k"]),
            str(data["dtype"]),
            blocks=tuple(tuple(int(rows) for rows in line) for line in data.get("blocks", ())),
        )
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            str(path),
            f"line {number}",
            f"required a problem as FICCO_LOG_PROBLEMS writes it: {type(error).__name__}: {error}",
        ) from None


def from_cases(
    cases: Iterable[Case], world: int, device: str, operators: Sequence[str] = ()
) -> list[Problem]:
    """The problems of shapes for so many ranks, of their own operator or of all that are given; a
    CPU takes half precision as float32."""
    found = []
    for case in (one.on(name) for one in cases for name in operators or (one.operator,)):
        problem = case.problem(world)
        if device == "cpu" and getattr(torch, problem.dtype).itemsize < 4:
            problem = replace(problem, dtype="float32")
        found.append(problem)
    return list(dict.fromkeys(found))
