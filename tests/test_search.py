"""The search for schedules beyond the named ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_model import MACHINE, PROBLEM, problem

import ficco
from ficco.heuristics import candidates, decide, problem_of_sizes
from ficco.heuristics.candidates import predictable
from ficco.heuristics.model import predictions
from ficco.heuristics.search import BUDGET, search, waves
from ficco.machine import Machine, find
from ficco.plan import check
from ficco.problem import OPERATORS, Problem
from ficco.schedules import Schedule, plans, refusal
from ficco.simulate import predict

SIZES = ((32768, 2048, 8192), (8192, 3584, 4096), (4096, 1024, 8192))


def h200() -> Machine:
    machine = find("h200-4", None)
    assert machine is not None
    return machine


#: A schedule that is no candidate, and predictions that lead to it.
HIDDEN = Schedule.parse("growing:pieces=3,tail=2,compute=2")


def away_from_hidden(_: Problem, schedule: Schedule, __: Machine, ___: str) -> float:
    axes = ("grouping", "pieces", "tail", "compute")
    away = sum(getattr(schedule, axis) != getattr(HIDDEN, axis) for axis in axes)
    return 1e-3 * (1 + away + schedule.uniform)


def test_the_search_finds_what_is_hidden_and_spends_no_more_than_its_budget() -> None:
    asked: list[str] = []

    def seconds(problem: Problem, schedule: Schedule, machine: Machine, mode: str) -> float:
        asked.append(str(schedule))
        return away_from_hidden(problem, schedule, machine, mode)

    named = candidates(PROBLEM, MACHINE)
    found = predictions(PROBLEM, named, MACHINE, ("queued",), seconds)
    assert HIDDEN not in named
    asked.clear()
    further = search(PROBLEM, found, MACHINE, "queued", seconds)
    assert HIDDEN in [one.schedule for one in further]
    assert len(asked) == len(set(asked)) == len(further) <= BUDGET
    assert not {one.schedule for one in further} & set(named)
    fewer = search(PROBLEM, found, MACHINE, "queued", seconds, budget=5)
    assert len(fewer) <= 5


def test_the_search_keeps_to_what_the_model_may_take() -> None:
    """Pieces that are summed at the peers beside products are not, nor are copies by kernel."""
    machine = find("h200-2", None)
    assert machine is not None
    asked = problem_of_sizes("matmul_all_reduce", 512, 4096, 1536, "bfloat16", 2)
    named = [one for one in candidates(asked, machine) if predictable(one, asked, machine)]
    one_shot = Schedule.parse("one-shot")
    assert predictable(one_shot, asked, machine)
    for more in ({"pieces": 2}, {"tail": 2}):
        assert not predictable(replace(one_shot, **more), asked, machine)
    found = predictions(asked, [*named, one_shot], machine, ("queued",), predict)
    further = search(asked, found, machine, "queued", predict)
    assert further and all(predictable(one.schedule, asked, machine) for one in further)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("mode", ["eager", "queued"])
def test_a_winner_is_an_ordinary_schedule_and_never_worse(
    sizes: tuple[int, int, int], mode: str
) -> None:
    machine, asked = h200(), problem(*sizes)
    named = decide(asked, machine=machine, mode=mode)
    found = decide(asked, machine=machine, mode=mode, search=True)
    assert Schedule.parse(str(found.schedule)) == found.schedule
    check(plans(asked, found.schedule))
    with_margin = 1 + machine.margin
    worst = "idle" if mode == "eager" else "queued"
    assert predict(asked, found.schedule, machine, worst) <= with_margin * predict(
        asked, named.schedule, machine, worst
    )
    assert found == decide(asked, machine=machine, mode=mode, search=True)


def test_a_search_can_win() -> None:
    # A shard is a tile and a half: an even cut wastes half a wave in both of its parts.
    asked = Problem("all_gather_matmul", (1536,) * 4, 1024, 4096, "bfloat16")
    queued = {"machine": MACHINE, "mode": "queued"}
    named, found = decide(asked, **queued), decide(asked, search=True, **queued)
    assert predict(asked, found.schedule, MACHINE) <= predict(asked, named.schedule, MACHINE)


def test_sizes_that_end_on_whole_waves() -> None:
    # Tiles of 256 rows, one at a time: every sixteenth of 4096 rows ends on a whole wave.
    assert MACHINE.gemm is not None
    fine = replace(MACHINE, gemm=replace(MACHINE.gemm, tile_rows=(256,)))
    asked = Problem("all_gather_matmul", (4096,) * 4, 1024, 4096, "bfloat16")
    schedule = Schedule.parse("shard-overlap")
    assert waves(schedule, asked, fine) == [(3, 1), (11, 5)]
    # Tiles of 1024 rows: 3072 + 1024 and 2048 + 2048 rows do, and other sixteenths do not.
    assert waves(schedule, asked, MACHINE) == [(3, 1), (1, 1)]
    assert waves(schedule, asked, replace(MACHINE, gemm=None)) == []


def test_unequal_and_tiny_shards_can_be_searched() -> None:
    for rows in ((0, 8, 3, 1), (700, 0, 0, 4), (1, 1, 1, 1)):
        asked = Problem("all_gather_matmul", rows, 64, 64, "bfloat16")
        found = decide(asked, machine=h200(), search=True)
        check(plans(asked, found.schedule))


def test_a_search_on_cpus_keeps_to_one_compute_lane() -> None:
    machine = replace(MACHINE, accelerator="cpu")
    found = predictions(PROBLEM, candidates(PROBLEM, machine), machine, ("idle",), predict)
    assert {one.schedule.compute for one in search(PROBLEM, found, machine, "idle", predict)} <= {1}


def test_explain_searches() -> None:
    sizes = {"m": 8192, "n": 3584, "k": 4096, "world": 4, "machine": "h200-4"}
    named, found = (ficco.explain("all_gather_matmul", search=on, **sizes) for on in (False, True))
    assert len(found.candidates) > len(named.candidates)
    assert str(found.schedule) in [one.schedule for one in found.candidates]


@pytest.mark.parametrize("mode", ["eager", "queued", "idle"])
def test_what_a_search_finds_is_among_the_others(mode: str) -> None:
    """So that of what is left under a cap, a call takes the best of all that were compared."""
    how: Any = {"machine": MACHINE, "mode": mode, "predict": away_from_hidden}
    named, found = (decide(PROBLEM, search=on, **how) for on in (False, True))
    assert found.schedule == HIDDEN == found.others[0]
    assert HIDDEN not in named.others and set(named.others) < set(found.others)
    lost = [away_from_hidden(PROBLEM, one, MACHINE, mode) for one in found.others]
    assert lost == sorted(lost)


@pytest.mark.parametrize("mode", ["eager", "queued", "idle"])
@pytest.mark.parametrize("machine", [MACHINE, replace(MACHINE, host=None)], ids=["host", "none"])
def test_what_a_search_finds_is_predicted_as_all_candidates_are(
    mode: str, machine: Machine
) -> None:
    named, found = (
        decide(PROBLEM, machine=machine, mode=mode, search=on).candidates for on in (False, True)
    )
    assert len(named) < len(found) and {one.schedule for one in named} <= {
        one.schedule for one in found
    }
    assert {one.idle is None for one in found} == {machine.host is None}


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_a_search_finds_serves_the_operator_and_is_never_worse(operator: str) -> None:
    machine = h200()
    for sizes in SIZES:
        asked = problem_of_sizes(operator, *sizes, "bfloat16", 4)
        mode = {"machine": machine, "mode": "queued"}
        one = decide(asked, search=True, **mode)
        assert refusal(asked, one.schedule) == ""
        check(plans(asked, one.schedule))
        named = decide(asked, **mode)
        seconds = [predict(asked, schedule, machine) for schedule in (one.schedule, named.schedule)]
        assert seconds[0] <= seconds[1] * (1 + machine.margin)


def test_columns_and_own_products_that_add_themselves_are_found() -> None:
    hidden = Schedule.parse("hetero-fused-2d:pieces=3,tail=2,beta")
    asked = problem_of_sizes("matmul_reduce_scatter", 8192, 4096, 1024, "bfloat16", 4)

    def away(schedule: Schedule) -> int:
        axes = ("uniform", "grouping", "dims", "pieces", "tail", "beta")
        return sum(getattr(schedule, axis) != getattr(hidden, axis) for axis in axes)

    def seconds(_: Problem, schedule: Schedule, __: Machine, ___: str) -> float:
        return 1e-3 * (1 + away(schedule))

    found = predictions(asked, candidates(asked, MACHINE), MACHINE, ("queued",), seconds)
    further = search(asked, found, MACHINE, "queued", seconds, budget=200)
    assert 0 in [away(one.schedule) for one in further]
    gathers = problem_of_sizes("all_gather_matmul", 8192, 4096, 1024, "bfloat16", 4)
    for operator in (
        gathers,
        problem_of_sizes("matmul_all_to_all", 8192, 4096, 1024, "bfloat16", 4),
    ):
        found = predictions(operator, candidates(operator, MACHINE), MACHINE, ("queued",), seconds)
        further = search(operator, found, MACHINE, "queued", seconds, budget=200)
        assert not any(one.schedule.beta for one in further)


def test_unequal_blocks_can_be_searched() -> None:
    table = [[700, 0, 3], [0, 0, 9], [64, 1, 0]]
    for operator in ("all_to_all_matmul", "matmul_all_to_all"):
        asked = Problem.of_blocks(operator, table, 64, 64, "bfloat16")
        check(plans(asked, decide(asked, machine=h200(), search=True).schedule))
    asked = Problem("matmul_all_reduce", (5, 0, 900), 64, 64, "bfloat16")
    check(plans(asked, decide(asked, machine=h200(), search=True).schedule))
