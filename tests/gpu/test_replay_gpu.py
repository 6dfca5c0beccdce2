"""The replay of arrivals on a GPU: exact results, signals on time, and a missing signal."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest
import ranks
import torch
from links import link
from ranks import Rank
from test_replay import served

import ficco
from ficco.machine import find, save
from ficco.problems.products import OPERATORS, Problem
from ficco.runtime.workspace import workspace_of
from ficco.schedules import Schedule
from ficco.tools.bench import replay
from ficco.tools.bench.candidates import call
from ficco.tools.bench.measure import Item, Runner
from ficco.tools.bench.replay import Replayed, ReplayOperands, ReplayWatch, proven

pytestmark = pytest.mark.gpu

WORLD = 4
#: Tolerance of a signal's time in microseconds: the rank's copies compete with the courier's.
OFF_US = 8.0


def watch_of(at: Rank, rank: int = 0) -> ReplayWatch:
    path, machine = Path(tempfile.mkdtemp()) / "machine.yaml", find("h200-4", None)
    assert machine is not None
    save(link(machine, 383.0, 12.0), path)
    played = Replayed(world=WORLD, rank=rank, machine=str(path))
    return ReplayWatch(played, torch.device("cuda", torch.cuda.current_device()))


def problem_of(operator: str, rows: int, n: int, k: int) -> Problem:
    if OPERATORS[operator].blocks:
        table = [[rows // WORLD] * WORLD] * WORLD
        return Problem.of_blocks(operator, table, n, k, "bfloat16")
    return Problem(operator, (rows,) * WORLD, n, k, "bfloat16")


def caller(operands: ReplayOperands, watch: ReplayWatch, schedule: str) -> Any:
    problem, a, b = operands.problem, operands.a_LK, operands.b_KN
    return partial(call, problem, a, b, watch.group, schedule)


def _exact(at: Rank, rank: int) -> tuple[list[str], bool]:
    proofs, watch = [], watch_of(at, rank)
    for operator in OPERATORS:
        problem = problem_of(operator, 512, 256, 384)
        operands = ReplayOperands(problem, rank, watch.device)
        operands.exact_b()
        watch.free()
        workspace = workspace_of(watch.group, watch.device)
        for knobs in ("", "pull", "pieces=2,copy=2,compute=2"):
            for name in served(problem, knobs):
                if workspace.engine.refuses(problem, Schedule.parse(name)):
                    continue
                for turn in range(2):  # one on each slot
                    operands.exact(2 * len(proofs) + turn)
                    result = proven(caller(operands, watch, name), operands, workspace)
                    wrong = int((result != operands.reference()).sum())
                    assert not wrong, f"{operator} {name}: {wrong} of {result.numel()}"
                proofs.append(f"{operator} {name}")
    tiles = workspace_of(watch.group, watch.device).engine.capabilities().tiles
    watch.close()
    return proofs, tiles


@pytest.mark.parametrize("rank", [0, 2])
def test_every_schedule_is_exact(rank: int) -> None:
    proofs, tiles = ranks.run(1, _exact, rank, device="cuda")[0]
    assert len(proofs) > 100
    for name in ("all_gather_matmul tiled", "matmul_all_to_all tiled:pull"):
        assert (name in proofs) == tiles, proofs


def _times(
    at: Rank, schedule: str, operator: str, mode: str
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of calls; by signal, the error of its time that a quarter of the calls keep, since
    another program on the GPU can delay the others; planned times of the signals."""
    watch = watch_of(at)
    operands = ReplayOperands(problem_of(operator, 2048, 2048, 4096), 0, watch.device)
    operands.random(0)
    item = Item(mode, schedule, Runner(caller(operands, watch, schedule)), sleep_s=2e-3)
    courier = watch.engine.courier
    seconds, errors = [], []
    for _ in range(50):
        seconds.append(watch.clock.time(item)[0])
        errors.append(courier.errors())
    off = [quantiles(map(abs, by_word))[0] for by_word in zip(*errors[5:], strict=True)]
    program = watch.engine.latest
    assert program is not None
    pieces = courier.timetable(program).pieces
    planned = [arrival.at for piece in pieces for arrival in piece.arrivals]
    print(f"{schedule} {mode}: {courier.paces}, {courier.timetable(program).durations()}")
    watch.close()
    return seconds[5:], off, planned


@pytest.mark.parametrize("mode", ["queued", "idle"])
@pytest.mark.parametrize(
    ("schedule", "operator"),
    [
        ("shard-overlap", "all_gather_matmul"),
        ("hetero-fused-1d:pieces=4", "all_gather_matmul"),
        ("shard-overlap:pull", "all_gather_matmul"),
        ("tiled:pieces=2", "all_gather_matmul"),
        ("shard-overlap", "matmul_reduce_scatter"),
        ("tiled:pieces=2", "matmul_all_to_all"),
    ],
)
def test_signals_are_on_time(schedule: str, operator: str, mode: str) -> None:
    seconds, off, planned = ranks.run(1, _times, schedule, operator, mode, device="cuda")[0]
    assert max(off) < OFF_US * 1e-6, (off, planned)
    assert median(seconds) > planned[-1] - OFF_US * 1e-6


def _forgetful(at: Rank, schedule: str) -> Any:
    arrivals = replay.arrivals
    replay.arrivals = lambda *args: [each for each in arrivals(*args) if each.signal.poster != 2]
    watch = watch_of(at)
    with ficco.options(timeout_s=2, on_timeout="raise"):
        operands = ReplayOperands(problem_of("all_gather_matmul", 512, 256, 384), 0, watch.device)
        operands.random(0)
        run = caller(operands, watch, schedule)

        def calls() -> None:
            run()
            torch.cuda.synchronize()
            run()

        return ranks.caught(calls)


@pytest.mark.parametrize("schedule", ["shard-overlap", "tiled"])
def test_a_signal_that_never_comes_is_named(schedule: str) -> None:
    error = ranks.run(1, _forgetful, schedule, device="cuda", fresh=True)[0]
    assert error.type == "SignalTimeout", error
    assert error.fields["peer"] == 2 and schedule in error.text
