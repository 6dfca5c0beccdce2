"""Plans of expert-parallel layers: the proof, which refuses broken plans, and the simulation."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from edits import Edit, change, down, edited, idle, refused

import ficco
from ficco.compute.buffers import Buffers
from ficco.compute.program import Call, Filled, Program
from ficco.compute.ragged_blocks import moves
from ficco.heuristics import decide
from ficco.heuristics.families import EXPERTS, FAMILIES
from ficco.heuristics.model import TIE
from ficco.machine import find
from ficco.plan import Plan, Region, Transfer
from ficco.problems.experts import EXPERT_OPERATORS, ExpertLayer, block_starts
from ficco.problems.products import Problem
from ficco.proof import check
from ficco.schedules import Schedule
from ficco.schedules.experts import expert_plans
from ficco.simulate import predict, simulate

SCHEDULES = (
    *("serial", "shard-overlap", "growing", "shrinking:copy=2,compute=2"),
    *("hetero-fused-1d:pieces=2", "hetero-unfused-1d:pieces=3"),
    *("uniform-unfused-1d:pieces=2,order=peer", "uniform-fused-1d:pieces=1+3+3+1"),
    "uniform-fused-1d:pieces=4,compute=2",
)
MACHINE = find("h200-4", None)
assert MACHINE and MACHINE.gemm


def layer(operator: str = "experts", world: int = 4, experts: int = 2, **rest: Any) -> ExpertLayer:
    sizes = {"capacity": 5, "k": 16, "h": 12, "n": 8, "dtype": "bfloat16"} | rest
    function = {"function": "silu gated"} if operator == "experts" else {}
    return ExpertLayer(operator, world, experts, **(function | sizes))


def planned(problem: ExpertLayer, name: str = "shard-overlap") -> list[Plan]:
    return expert_plans(problem, Schedule.parse(name))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_plans_are_proven(world: int) -> None:
    operators = EXPERT_OPERATORS if world < 8 else ("experts",)
    for (turn, name), operator in product(enumerate(SCHEDULES), operators):
        for keeps in {False, operator != "matmul_combine"}:
            for gathers in (False, True):
                options = {"keeps": keeps, "gathers": gathers, "indexed": operator == "experts"}
                check(planned(layer(operator, world, 1 + (world + turn) % 3, **options), name))


def seconds_of(problem: ExpertLayer, mode: str = "", machine: Any = MACHINE) -> dict[str, float]:
    """Return the simulated seconds of the layer by compared schedule."""
    plans = {name: planned(problem, name) for name in EXPERTS.compared}
    return {name: simulate(each, machine, mode or "queued").stop_s for name, each in plans.items()}


def test_empty_blocks_are_not_copied() -> None:
    problem = replace(layer(world=2, exact=True), room=(6, 6))
    filled = Filled(block_starts(problem, np.array([[0, 2, 0, 1], [0, 0, 3, 0]])))
    works = [(plan, step.work) for plan in planned(problem) for step in plan.steps]
    rows = [moves(plan, work)(filled).rows for plan, work in works if isinstance(work, Transfer)]
    assert any(map(len, rows)) and all((counts > 0).all() for counts in rows)


def test_copies_read_the_results_of_the_library_in_place() -> None:
    """Rows of a buffer in parts that the library returned, and rows of a buffer of the call."""
    (plan, *_) = planned(layer(exact=True), "serial")
    buffers = Buffers(Program(plan, None, []))
    address = buffers.row(Region("partial", 0, 0, 5, 0, 8))
    parts = [torch.zeros(rows, 8, dtype=torch.bfloat16) for rows in (3, 4)]
    returned = {"partial": [(0, 3, parts[0]), (3, 7, parts[1])]}
    call = Call({}, filled=Filled({}, grouped=returned))
    for row in range(7):
        part, first = (parts[0], 0) if row < 3 else (parts[1], 3)
        assert address(call, row) == part[row - first :].data_ptr()
    own = torch.zeros(9, 8, dtype=torch.bfloat16)
    assert address(Call({"partial": own}), 5) == own[5:].data_ptr()


SIZES: dict[str, Any] = {"experts": 8, "k": 4096, "h": 14336, "n": 4096, "world": 4}


def test_auto_takes_the_fastest_of_the_compared_schedules() -> None:
    """Narrow experts, whose tokens take as long to arrive as to be multiplied."""
    sizes = SIZES | {"h": 512, "machine": "h200-4"}
    decision = ficco.explain("experts", capacity=1024, **sizes)
    assert decision.source == "model" and "on h200-4" in decision.reason
    problem = ExpertLayer("experts", 4, 2, 1024, 4096, 512, 4096, "bfloat16", "silu gated")
    seconds = seconds_of(problem)
    gain = seconds["serial"] / min(seconds.values())
    assert str(decision.schedule) == min(seconds, key=seconds.__getitem__) != "serial"
    assert gain > 1 + EXPERTS.margin
    # Close capacities share a decision.
    alike = ficco.explain("experts", capacity=1000, **sizes)
    assert alike.schedule == decision.schedule and f"(simulated as {problem})" in alike.reason
    for reason in (alike.reason, decision.reason):
        assert f"{gain:.2f} times as fast as serial" in reason
        assert not any(f"{name} " in reason for name in EXPERTS.compared if name != "serial")
    columns = ficco.explain("experts", capacity=1000, split="columns", **sizes)
    assert columns.source == "model" and columns.reason != decision.reason


#: Fastest or nearly fastest schedules on an H100, by experts and capacity, for 4096 columns and
#: 14336 between the products (docs/results, 2026-11-26).
MEASURED = {
    (8, 1280): ("growing", "shard-overlap"),
    (8, 5120): ("growing", "shard-overlap"),
    (64, 160): ("uniform-fused-1d:pieces=1+3+3+1,copy=3,compute=2",),
}


@pytest.mark.parametrize("machine", ["h200-4", "h100-8"])
def test_auto_takes_a_schedule_that_was_measured_to_be_fast(machine: str) -> None:
    for (experts, capacity), fast in MEASURED.items():
        sizes = SIZES | {"experts": experts, "capacity": capacity}
        decision = ficco.explain("experts", machine=machine, **sizes)
        assert str(decision.schedule) in fast, decision.reason


def test_auto_takes_the_first_of_equal_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = find("h100-8", None)
    problem = layer(capacity=5120, k=4096, h=14336, n=4096)
    seconds = seconds_of(problem, machine=machine)
    first, second = sorted(seconds, key=seconds.__getitem__)[:2]
    difference = seconds[second] / seconds[first] - 1
    assert EXPERTS.compared.index(second) < EXPERTS.compared.index(first) and 0 < difference < TIE
    for tie, expected in ((0.99 * difference, first), (1.01 * difference, second)):
        monkeypatch.setitem(FAMILIES, "experts", replace(EXPERTS, tie=tie))
        decision = decide(problem, machine=machine)
        assert str(decision.schedule) == expected
        assert ("; the first of those within" in decision.reason) == (expected == second)


def test_auto_is_serial_if_the_predicted_gain_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = ficco.explain("experts", machine="h200-4", capacity=1280, **(SIZES | {"h": 57344}))
    assert str(decision.schedule) == "serial"
    assert "less than the margin of 2%" in decision.reason
    monkeypatch.setitem(FAMILIES, "experts", replace(EXPERTS, margin=0.025))
    decision = decide(decision.problem, machine=MACHINE)
    assert "less than the margin of 2.5%" in decision.reason


@pytest.mark.parametrize("mode", ["queued", "idle"])
def test_exact_rows_take_longer_if_each_expert_needs_its_own_product(mode: str) -> None:
    """Rows of all sources are contiguous groups; rows of a few sources are not."""
    sizes = {"experts": 16, "capacity": 160, "k": 4096, "h": 1408, "n": 4096}
    exact, blocks = (layer(exact=exact, **sizes) for exact in (True, False))
    of_blocks = seconds_of(blocks, mode)
    for name, seconds in seconds_of(exact, mode).items():
        if name.startswith(("uniform", "serial")):  # the host looks up the rows of each step
            as_blocks = pytest.approx(of_blocks[name])
            assert seconds > of_blocks[name] if mode == "idle" else seconds == as_blocks
        else:
            assert seconds > 1.3 * of_blocks[name]
    plan = planned(exact)[0]
    products = [p for step in plan.steps for p in step.products if plan.runs_one_by_one(p)]
    assert sum(product.batch for product in products) == 2 * 4 * 16  # of four sources


def test_batches_of_experts_take_the_expert_rates_of_the_machine() -> None:
    """A product of one expert or of a shared matrix takes the other rates."""
    slow = replace(MACHINE, experts=replace(MACHINE.gemm, efficiency=0.1))
    for experts, slower in ((2, True), (1, False)):
        plans = planned(layer(experts=experts, capacity=1024, k=4096, h=2048, n=4096), "serial")
        ratio = simulate(plans, slow).stop_s / simulate(plans, MACHINE).stop_s
        assert ratio > 2 if slower else ratio == 1
    problem = Problem("all_gather_matmul", (4096,) * 4, 4096, 4096, "bfloat16")
    schedule = Schedule.parse("hetero-fused-1d:pieces=2")
    assert predict(problem, schedule, slow) == predict(problem, schedule, MACHINE)


def test_reasons_of_decisions_without_a_simulation_and_errors() -> None:
    sizes = SIZES | {"capacity": 8, "machine": "h200-4"}
    assert str(ficco.explain("experts", schedule="growing", **sizes)) == "growing (requested)"
    assert ficco.explain("experts", **(sizes | {"world": 1})).source == "rule"
    for invalid, text in (
        ({"experts": 7}, "multiple of 4"),
        ({"split": "rows"}, "experts, columns"),
        ({"activation": "tanh"}, "required one of"),
        ({"schedule": 3}, "required 'auto'"),
        ({"schedule": "ring"}, "one that is ring"),
    ):
        with pytest.raises(ValueError, match=text):
            ficco.explain("experts", **(sizes | invalid))


def test_unsupported_schedules_and_layers_are_refused() -> None:
    fits = r"schedule .* required one that pushes rows"
    for name in ("ring", "one-shot", "tiled", "hetero-fused-2d", "growing:pull"):
        with pytest.raises(ValueError, match=fits):
            planned(layer(), name)
    with pytest.raises(ValueError, match=fits):
        planned(layer(), "serial:collective")
    sizes = {"capacity": 0}, {"experts": 0}, {"k": -1}, {"h": -1}
    names = {"operator": "expert"}, {"function": "tanh"}, {"function": ""}
    for invalid in (*sizes, *names):
        with pytest.raises(ValueError, match="required"):
            replace(layer(), **invalid)
    with pytest.raises(NotImplementedError, match="int8"):
        layer(dtype="int8")


#: Rank 1 multiplies the rows of rank 0 first.
BROKEN: dict[str, tuple[Edit, str]] = {
    "the matrix of another expert": (change("0.0", b=down(16)), "matrix of other rows|leaves"),
    "one matrix for all experts": (change("0.0", b_stride=0), "matrix of other rows"),
    "the last matrix of another": (change("0.0 back", b_stride=0), "matrix of other rows"),
    "fewer experts": (change("0.0", batch=1), "elements of hidden are written"),
    "rows of another source": (change("0.0", a=down(5)), "what nobody has written"),
    "without the function": (change("0.0 silu", function=""), "wrong buffers"),
    "another function": (change("0.0 silu", function="relu gated"), "not asked for"),
    "the function of other rows": (change("0.0 silu", src=down(5)), "puts rows|nobody|before"),
    "sent to another place": (change("ready 0>0", dst=down(5)), "another piece|other rows|nobody"),
    "rows for another rank": (change("ready 0>0", src=down(10)), "another block"),
    "the same rows for all experts": (change("ready 0>0", src_stride=0), "piece|nobody|rows"),
    "landing at the wrong distance": (change("ready 0>0", dst_stride=5), "rows|piece|nobody"),
    "one copy of two": (change("ready 0>0", batch=1), "what nobody has written"),
    "no copies": (change("ready 0>0", batch=0), "is no batch"),
    "returned before it is computed": (change("returned 0>0", after=()), "before it is written"),
    "stored before it arrives": (change("0.0 kept", after=()), "before it is written"),
    "not stored": (idle("0.0 kept"), "elements of gathered are written"),
    "not returned": (idle("0.0 home"), "elements of out are written"),
}


@pytest.mark.parametrize("mutation", BROKEN)
def test_broken_plans_are_refused(mutation: str) -> None:
    edit, message = BROKEN[mutation]
    for gathers in (False, True):
        refused(edited(planned(layer(keeps=True, gathers=gathers)), 1, edit), message)
