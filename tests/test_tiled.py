"""Predictions and decisions for one product whose tiles wait for pieces, or announce rows."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from math import inf
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from ficco.compute.tiled.worklist import H100, Work, best
from ficco.dma.tiles import work_of
from ficco.heuristics import Decision, decide, problem_of_sizes
from ficco.heuristics.candidates import TILED_MARGIN, TILED_ROWS, predictable
from ficco.heuristics.model import TIE, Prediction, choose
from ficco.machine import Gemm, Machine, find
from ficco.machine.model import flat
from ficco.ops.call import first_fit
from ficco.plan import Plan, Step
from ficco.problems.products import OPERATORS, Problem
from ficco.proof import check
from ficco.schedules import Schedule, plans
from ficco.simulate.events import Simulation
from ficco.tools.bench.cases import SETS
from ficco.tools.tune.effort import GPU
from ficco.tools.tune.fits import Sample, errors, fit
from ficco.tools.tune.products import TILES

PROCESSORS = 132
#: Rates of a card that does not heat up, as Machine.tiled describes it.
RATES = replace(H100, slowdown=0.0)


@cache
def fitted() -> Gemm:
    """Fit of `ficco tune` for a card with these rates."""
    works = [
        Work((s.m,), s.n, s.k)
        for s in GPU.gemms[::2]
        if s.batch == 1 and not s.wide and not (s.n % 8 or s.k % 8)
    ]
    seconds = [best(work, RATES, PROCESSORS, True).seconds for work in works]
    sizes = [(*work.rows, work.n, work.k, 1, 2, False) for work in works]
    samples = [Sample(*size, s) for size, s in zip(sizes, seconds, strict=True)]
    gemm = fit(samples, units=PROCESSORS, tiles=TILES, peak=989e12)
    assert errors(gemm, samples).median < 0.03 and errors(gemm, samples).mean < 0.05
    return gemm


def machine(tiled: Gemm | None = None) -> Machine:
    """Four H200 without contention between products and copies."""
    h200: Any = find("h200-4", None)
    contention = replace(h200.contention, gemm_under_copies=1.0, copies_under_gemm=1.0)
    gemm = replace(h200.gemm, burst=inf)
    return replace(h200, tiled=tiled or fitted(), gemm=gemm, contention=contention)


def ran(problem: Problem, name: str, on: Machine) -> tuple[Plan, Step, Simulation, float]:
    """The plan of rank 0, its product, the simulation, and the end of the product in seconds."""
    all_plans = plans(problem, Schedule.parse(name))
    (product,) = (step for step in all_plans[0].steps if not step.whole)
    simulation = Simulation(all_plans, on, "queued")
    ends = [stop for step, _, stop in simulation.run()[0] if step.op == "matmul"]
    return all_plans[0], product, simulation, max(ends)


@pytest.mark.parametrize("operator", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_products_take_as_long_as_their_lists_say(operator: str) -> None:
    """Fifteen shapes; gates open at simulated times. The median error is 2 %. Shapes with larger
    errors take less than 150 us, so that the cost of cuts is a larger share."""
    off = []
    for number, case in enumerate(SETS["waiting"]()):
        name = "tiled:pieces=2" if number % 2 else "tiled"
        plan, step, simulation, end = ran(case.on(operator).problem(4), name, machine())
        opens = tuple(simulation.known[gate.waiter, gate.word] for gate in step.gates)
        work = replace(work_of(plan, step), opens=opens)
        off.append(end / best(work, RATES, PROCESSORS, True).seconds - 1)
    assert median(map(abs, off)) < 0.03, off
    assert sum(abs(error) < 0.1 for error in off) >= 12 and max(map(abs, off)) < 0.25, off


#: Tiles of 128 x 256 take 100 us; all other costs are zero.
FLAT = flat(2 * 128 * 256 * 4096 * 132 / 100e-6, 1.0, 1.0).gemm
SIMPLE = replace(FLAT, units=132, tile_rows=(128,), tile_cols=(256,))


def test_rows_are_announced_after_whole_waves() -> None:
    """66 tiles in a row: a wave is two rows of tiles, and a piece is one. The own rows are last."""
    problem = problem_of_sizes("matmul_reduce_scatter", 2048, 66 * 256, 4096, "bfloat16", 4)
    _, step, simulation, end = ran(problem, "tiled:pieces=4", machine(SIMPLE))
    announced = [simulation.known[s.waiter, s.word] * 1e6 for s in step.announces]
    assert announced == pytest.approx([*(100.0 * (1 + number // 2) for number in range(12)), 800.0])
    assert end == pytest.approx(800e-6)


def test_late_rows_take_a_separate_product() -> None:
    """A lower bound: idle processors cannot do more than their own tiles."""
    problem = problem_of_sizes("all_gather_matmul", 2048, 256, 4096, "bfloat16", 4)
    _, step, simulation, end = ran(problem, "tiled", machine(SIMPLE))
    last = max(simulation.known[gate.waiter, gate.word] for gate in step.gates)
    assert end == pytest.approx(last + 100e-6)


@pytest.mark.parametrize("operator", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_own_rows_have_words_where_they_are_cut_more_than_those_of_peers(operator: str) -> None:
    check(plans(Problem(operator, (0, 100), 16, 16, "bfloat16"), Schedule.parse("tiled:tail=3")))


def of(name: str, seconds: float) -> Prediction:
    return Prediction(Schedule.parse(name), {"queued": seconds})


@pytest.mark.parametrize(
    ("name", "pieces"), [("tiled", 1), ("tiled:pieces=2,tail=2", 2), ("tiled:pieces=1+3+1", 3)]
)
def test_few_rows_for_a_peer_are_left_to_the_library(name: str, pieces: int) -> None:
    """Where rows arrive, the least number of rows counts for each piece."""
    for operator, least in (("all_gather_matmul", pieces), ("matmul_all_to_all", 1)):
        for rows, world in itertools.product((least * TILED_ROWS - 1, least * TILED_ROWS), (1, 4)):
            problem = problem_of_sizes(operator, rows * world, 1024, 1024, "bfloat16", world)
            served = predictable(Schedule.parse(name), problem, machine())
            assert served == (rows == least * TILED_ROWS)


def test_auto_takes_tiled_where_it_gains_a_margin() -> None:
    enough = 1.0 / (1 + TIE + TILED_MARGIN + 1e-6)
    for tiled, taken in ((enough, "tiled"), (0.98, "growing"), (1.0, "growing")):
        predicted = [of("serial", 2.0), of("growing", 1.0), of("tiled", tiled)]
        assert str(choose(predicted, machine(), "queued").chosen.schedule) == taken, tiled


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_reason_says_what_its_tiles_do(operator: str) -> None:
    kind = OPERATORS[operator]
    sizes = (8192, 4096, 7168) if kind.scatters else (8192, 7168, 4096)
    problem = problem_of_sizes(operator, *sizes, "bfloat16", 4)
    fast = machine(replace(fitted(), efficiency=1.0, start=2e-6))
    decision = decide(problem, machine=fast)
    if kind.inner:  # products that add up are left to other schedules
        assert decision.source == "model" and decision.candidates
        assert not any(one.schedule.startswith("tiled") for one in decision.candidates)
        return
    does = "announce what is done" if kind.scatters else "wait for what arrives"
    assert decision.schedule.grouping == "tiled", decision
    assert f"one product whose tiles {does}, predicted to take" in decision.reason
    library = decide(problem, machine=fast, offers=("dma",)).schedule
    assert f"times as fast as products of the library ({library})" in decision.reason


def test_schedules_that_the_engine_refuses_are_skipped() -> None:
    """For example a tuned entry of another card, or more pieces than a launch can wait for."""
    problem = problem_of_sizes("all_gather_matmul", 8192, 3584, 4096, "bfloat16", 4)
    decision = decide(problem, machine=machine())
    assert decision.schedule.grouping == "tiled"

    def fit(refused: Any) -> str:
        engine: Any = SimpleNamespace(
            refuses=lambda _, schedule: refused(schedule) and "no",
            rank=0, packs_columns=False, out_of_step=False,
        )  # fmt: skip
        workspace: Any = SimpleNamespace(engine=engine)
        return first_fit(workspace, problem, decision, None).plan.schedule

    assert fit(lambda one: False) == str(decision.schedule)
    library = [one for one in decision.others if one.grouping != "tiled"]
    assert fit(lambda one: one.grouping == "tiled") == str(library[0])
    assert isinstance(decision, Decision) and predictable(decision.schedule, problem, machine())
    assert fit(lambda one: one.mover != "collective") == "serial:collective"
