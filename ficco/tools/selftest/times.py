"""Checks that measure: times of shapes, and the figures of a machine file."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import ficco
from ficco.dma.engine import fingerprint
from ficco.tools.bench.cases import SETS
from ficco.tools.selftest.checks import (
    NotOffered,
    Passed,
    Rank,
    all_at_once,
    call_times,
    operands_of,
    proven,
)
from ficco.tools.tune.effort import TuneSettings


def shape(at: Rank, group: ProcessGroup, name: str) -> Passed:
    """Time a shape by the library's collective and product, and by ficco's schedules."""
    case = next(one for one in SETS[at.settings.shapes]() if one.name == name)
    problem, lanes = case.problem(at.world), all_at_once(at)
    schedules = ["serial:collective", "serial", lanes, "auto"]
    proven(at, group, schedules, (operands_of(at, problem), 1))
    sizes = problem.rows[at.rank], problem.n, problem.k
    dtype = getattr(torch, problem.dtype)
    series = call_times(at, group, schedules, sizes, dtype, seconds=at.settings.shape_seconds)
    ms = {schedule: 1e3 * statistics.median(times) for schedule, times in series.items()}
    at.note(ms=ms)
    seen = ", ".join(f"{schedule} {one:.3f}" for schedule, one in ms.items())
    gain = ms["serial:collective"] / ms["auto"]
    return Passed(f"exact; ms: {seen}; auto is {gain:.2f} times as fast as the collective")


def figures(at: Rank, group: ProcessGroup) -> Passed:
    """Measure a machine's file by the steps of ``ficco tune --quick``."""
    if at.world == 1:
        raise NotOffered("one rank has no peer")
    try:
        from ficco.tools.tune.run import default_name, tune
    except ImportError as error:
        raise NotOffered(f"{error}; pip install 'ficco[bench]'") from None
    everyone, device = dist.group.WORLD, at.device.type
    settings = TuneSettings(
        path=Path(at.folder, f"{default_name(fingerprint(device, at.world))}.yaml"),
        device=device,
        quick=True,
        only=at.settings.figures,
        command="ficco doctor --selftest",
    )
    outcome = tune(settings)
    at.settle()  # no rank uses the memory of a peer any more
    ficco.close(everyone)
    at.conclude(filter(None, (outcome.error, *map(": ".join, outcome.failures.items()))))
    return Passed(f"{len(outcome.done)} steps of ficco tune --quick: {', '.join(outcome.done)}")
