"""Plans of expert-parallel layers are proven, simulated and drawn; broken ones are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import ficco
from ficco.compute.buffers import Buffers
from ficco.compute.program import Call, Filled, Program
from ficco.compute.ragged_blocks import grouped, moves, spans
from ficco.heuristics import decide
from ficco.heuristics.families import EXPERTS, FAMILIES
from ficco.heuristics.model import TIE
from ficco.machine import find
from ficco.plan import Plan, Step, render
from ficco.plan.model import Region
from ficco.problems.experts import EXPERT_OPERATORS, ExpertLayer, block_starts
from ficco.problems.products import Problem
from ficco.proof import PlanError, check
from ficco.schedules import Schedule
from ficco.schedules.experts import expert_plans
from ficco.simulate import predict, simulate

SCHEDULES = (
    "serial",
    "shard-overlap",
    "growing",
    "shrinking:copy=2,compute=2",
    "hetero-fused-1d:pieces=2",
    "hetero-unfused-1d:pieces=3",
    "uniform-unfused-1d:pieces=2,order=peer",
    "uniform-fused-1d:pieces=1+3+3+1",
    "uniform-fused-1d:pieces=4,compute=2",
)


def layer(operator: str = "experts", world: int = 4, experts: int = 2, **more: Any) -> ExpertLayer:
    sizes = {"capacity": 5, "k": 16, "h": 12, "n": 8, "dtype": "bfloat16"} | more
    function = {"function": "silu gated"} if operator == "experts" else {}
    return ExpertLayer(operator, world, experts, **(function | sizes))


def planned(asked: ExpertLayer, name: str = "shard-overlap") -> list[Plan]:
    return expert_plans(asked, Schedule.parse(name))


@pytest.mark.parametrize("operator", EXPERT_OPERATORS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_they_are_proven(world: int, operator: str) -> None:
    for name in SCHEDULES:
        for experts in (1, 2, 3):
            for keeps in {False, operator != "matmul_combine"}:
                for gathers in (False, True):
                    ways = {"keeps": keeps, "gathers": gathers, "indexed": operator == "experts"}
                    check(planned(layer(operator, world, experts, **ways), name))


def test_they_are_simulated_and_drawn() -> None:
    machine = find("h200-4", None)
    asked = layer(capacity=1024, k=4096, h=14336, n=4096)
    for name in SCHEDULES:
        plans = planned(asked, name)
        for mode in ("queued", "idle"):
            assert 0 < simulate(plans, machine, mode).stop_s < 1
        assert "compute0 |" in render(plans[0])


def test_rows_leave_before_the_last_ones_arrive() -> None:
    machine = find("h200-4", None)
    asked = layer(capacity=2048, k=8192, h=1024, n=8192)
    bars = simulate(planned(asked), machine).ranks[0]
    backs = [bar.start_s for bar in bars if bar.label.startswith("returned")]
    assert min(backs) < max(bar.start_s for bar in bars if bar.label == "3.0")
    serial = simulate(planned(asked, "serial"), machine).stop_s
    assert simulate(planned(asked), machine).stop_s < 0.8 * serial


def test_rows_leave_before_all_tokens_are_in_their_rows() -> None:
    machine = find("h200-4", None)
    for gathers in (False, True):
        asked = layer(experts=8, capacity=4096, k=4096, n=4096, indexed=True, gathers=gathers)
        for name in ("uniform-fused-1d:pieces=4", "hetero-fused-1d:pieces=2", "growing"):
            bars = simulate(planned(asked, name), machine).ranks[2]
            first = min(bar.start_s for bar in bars if bar.kind == "copy")
            ends = [bar.stop_s for bar in bars if bar.label.startswith("leaving")]
            if gathers and name == "growing":  # one piece, that goes to all
                assert ends == [first]
            else:
                assert min(ends) <= first < 0.6 * max(ends)


def test_rows_come_home_while_later_ones_are_multiplied() -> None:
    """Own rows, and those that are kept, are moved in the same turns."""
    machine = find("h200-4", None)
    asked = layer(experts=8, capacity=512, k=4096, h=4096, n=4096, keeps=True)
    for name in ("uniform-fused-1d:pieces=4", "uniform-fused-1d:pieces=2,order=peer", "growing"):
        bars = simulate(planned(asked, name), machine).ranks[0]
        homes = [bar for bar in bars if bar.label.endswith("home") and bar.kind == "place"]
        last = max(bar.start_s for bar in bars if bar.kind == "matmul")
        assert homes[0].stop_s < last < homes[-1].start_s
    # Own rows are among those of others before any of these come.
    bars = simulate(planned(asked, "uniform-fused-1d:pieces=4"), machine).ranks[0]
    (own,) = (bar for bar in bars if bar.label == "own")
    assert own.stop_s < min(bar.start_s for bar in bars if bar.kind == "matmul")


def test_a_plan_has_one_batch_and_one_copy_for_all_experts() -> None:
    for plan in [*planned(layer(experts=3)), *planned(layer(experts=3, gathers=True))]:
        assert {product.batch for step in plan.steps for product in step.products} == {3, 2, 1}
        copies = [step.transfer for step in plan.steps if step.op == "copy" and step.transfer]
        assert len(copies) == 6 and {copy.batch for copy in copies} == {3}


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("name", [*SCHEDULES, "uniform-fused-1d:pieces=2+1"])
def test_exactly_the_rows_that_there_are_travel_and_are_multiplied(
    name: str, gathers: bool
) -> None:
    """Some blocks are empty, and one rank has no rows at all."""
    world, experts = 3, 3
    draw = Random(name)
    of_all = experts * (1 if gathers else world)
    for most in (1, 7):
        counts = [[draw.randint(0, most * some) for _ in range(of_all)] for some in (1, 0, 1)]
        sizes: dict[str, Any] = {"capacity": most, "h": 16, "gathers": gathers, "exact": True}
        asked = layer(world=world, experts=experts, **sizes)
        mine = [range(of_all)] * world if gathers else [range(3 * r, 3 * r + 3) for r in range(3)]
        came = {rank: [sum(row[e] for row in counts) for e in mine[rank]] for rank in range(world)}
        most = max(map(sum, counts)) * (world if gathers else 1)
        room = max(map(sum, came.values())), most
        plans = planned(replace(asked, room=room), name)
        check(plans)
        for buffer, rows in zip(("staging", "staging out"), room, strict=True):
            assert plans[0].buffer[buffer].nbytes(0) == rows * plans[0].shape(buffer)[1] * 2
        landed: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for plan in plans:
            at = Filled(block_starts(asked, np.array(counts)))
            made = {"b": 0, "c": 0}
            for step in plan.steps:
                for one in step.products:
                    first, last = spans(plan, one.a, one.batch, one.a_stride)(at)
                    made[one.b.buffer] += int((last - first).sum())
                    apart = {one.a_stride, one.a.rows, one.out_stride}
                    assert grouped(plan, one) == (one.batch > 1 and len(apart) == 1)
                if step.transfer is not None:
                    _, to, rows = moves(plan, step.transfer)(at)
                    assert (rows > 0).all()
                    end = step.transfer.dst
                    landed.setdefault(end[:2], []).extend(zip(to, to + rows, strict=True))
            assert made == dict.fromkeys("bc", sum(came[plan.rank]))
        for rank in range(world):
            back = sorted(landed.get(("out", rank), []))
            own = sum(counts[rank]) * (world if gathers else 1)
            assert sum(last - first for first, last in back) <= own  # without what is made there
            assert all(one[1] <= two[0] for one, two in pairwise(back))
            active = sorted(landed.get(("active", rank), []))
            assert sum(last - first for first, last in active) == sum(came[rank])
            assert all(one[1] == two[0] for one, two in pairwise(active))
            for buffer, rows in zip(("staging", "staging out"), room, strict=True):
                assert all(last <= rows for _, last in landed.get((buffer, rank), []))
            sent = sorted(landed.get(("staging", rank), []))
            assert all(one[1] <= two[0] for one, two in pairwise(sent))
            others = sum(counts[r][e] for r in range(world) for e in mine[rank] if r != rank)
            assert sum(last - first for first, last in sent) in (others, sum(came[rank]))


def test_copies_read_what_the_library_returned_where_it_lies() -> None:
    """Rows of a buffer that is made in parts, and of one that a call has."""
    (plan, *_) = planned(layer(exact=True), "serial")
    places = Buffers(Program(plan, None, []))
    address = places.row(Region("partial", 0, 0, 5, 0, 8))
    parts = [torch.zeros(rows, 8, dtype=torch.bfloat16) for rows in (3, 4)]
    made = {"partial": [(0, 3, parts[0]), (3, 7, parts[1])]}
    call = Call({}, filled=Filled({}, made=made))
    for row in range(7):
        part, first = (parts[0], 0) if row < 3 else (parts[1], 3)
        assert address(call, row) == part[row - first :].data_ptr()
    whole = torch.zeros(9, 8, dtype=torch.bfloat16)
    assert address(Call({"partial": whole}), 5) == whole[5:].data_ptr()


SIZES: dict[str, Any] = {"experts": 8, "k": 4096, "h": 14336, "n": 4096, "world": 4}


def test_auto_takes_the_fastest_of_a_few() -> None:
    """Narrow experts, whose tokens take as long to come as to be multiplied."""
    sizes = SIZES | {"h": 512}
    decision = ficco.explain("experts", capacity=1024, machine="h200-4", **sizes)
    assert decision.source == "model" and "on h200-4" in decision.reason
    asked = ExpertLayer("experts", 4, 2, 1024, 4096, 512, 4096, "bfloat16", "silu gated")
    machine = find("h200-4", None)
    seconds = {
        name: simulate(planned(asked, name), machine, "queued").stop_s for name in EXPERTS.compared
    }
    assert str(decision.schedule) == min(seconds, key=seconds.__getitem__) != "serial"
    assert seconds["serial"] > (1 + EXPERTS.margin) * min(seconds.values())
    # One decision for capacities that differ little.
    alike = ficco.explain("experts", capacity=1000, machine="h200-4", **sizes)
    assert alike.schedule == decision.schedule and f"(simulated as {asked})" in alike.reason
    gain = seconds["serial"] / min(seconds.values())
    for one in (alike, decision):
        assert f"{gain:.2f} times as fast as serial" in one.reason
        assert not any(f"{name} " in one.reason for name in EXPERTS.compared if name != "serial")
    columns = ficco.explain("experts", capacity=1000, machine="h200-4", split="columns", **sizes)
    assert columns.source == "model" and columns.reason != decision.reason


#: Of 4096 columns and 14336 between the products, by experts and capacity, what was measured on an
#: H100 to be faster than serial by more than others or nearly so (docs/results, 2026-11-26).
MEASURED = {
    (8, 1280): ("growing", "shard-overlap"),
    (8, 5120): ("growing", "shard-overlap"),
    (64, 160): ("uniform-fused-1d:pieces=1+3+3+1,copy=3,compute=2",),
}


@pytest.mark.parametrize(("experts", "capacity"), MEASURED)
def test_auto_takes_what_was_measured_to_be_fast(experts: int, capacity: int) -> None:
    sizes = SIZES | {"experts": experts, "capacity": capacity}
    for machine in ("h200-4", "h100-8"):
        decision = ficco.explain("experts", machine=machine, **sizes)
        assert str(decision.schedule) in MEASURED[experts, capacity], decision.reason


def test_of_predictions_that_are_equal_the_first_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = find("h100-8", None)
    asked = layer(capacity=5120, k=4096, h=14336, n=4096)
    seconds = {name: simulate(planned(asked, name), machine).stop_s for name in EXPERTS.compared}
    first, second = sorted(seconds, key=seconds.__getitem__)[:2]
    apart = seconds[second] / seconds[first] - 1
    assert EXPERTS.compared.index(second) < EXPERTS.compared.index(first) and 0 < apart < TIE
    for tie, taken in ((0.99 * apart, first), (1.01 * apart, second)):
        monkeypatch.setitem(FAMILIES, "experts", replace(EXPERTS, tie=tie))
        decision = decide(asked, machine=machine)
        assert str(decision.schedule) == taken
        assert ("; the first of those within" in decision.reason) == (taken == second)


def test_auto_is_serial_where_little_is_predicted_to_be_gained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decision = ficco.explain("experts", machine="h200-4", capacity=640, **(SIZES | {"h": 114688}))
    assert str(decision.schedule) == "serial"
    assert "less than the margin of 2%" in decision.reason
    monkeypatch.setitem(FAMILIES, "experts", replace(EXPERTS, margin=0.025))
    decision = decide(decision.problem, machine=find("h200-4", None))
    assert "less than the margin of 2.5%" in decision.reason


def test_a_batch_of_copies_takes_as_long_as_all_that_it_moves() -> None:
    machine = find("h200-4", None)
    taken = []
    for experts, capacity in ((1, 4096), (4, 1024)):
        asked = layer(experts=experts, capacity=capacity, k=4096, h=32, n=4096)
        bars = simulate(planned(asked), machine).ranks[0]
        taken.append([bar.stop_s - bar.start_s for bar in bars if bar.kind == "copy"])
    assert taken[0] == pytest.approx(taken[1], rel=0.1)


def test_weights_are_read_by_every_step_that_multiplies_by_them() -> None:
    """Few rows for each of many experts: cut by sources, every step reads all weights."""
    machine = find("h200-4", None)
    asked = layer(experts=16, capacity=160, k=4096, h=14336, n=4096)
    seconds = {name: simulate(planned(asked, name), machine).stop_s for name in EXPERTS.compared}
    assert seconds["shard-overlap"] > 1.15 * seconds["serial"]
    assert seconds["uniform-fused-1d:pieces=2"] < seconds["serial"]


@pytest.mark.parametrize("mode", ["queued", "idle"])
def test_exact_rows_take_longer_where_a_product_is_made_for_each_expert(mode: str) -> None:
    """Rows of all sources are groups that follow each other; those of some are not."""
    machine = find("h200-4", None)
    sizes = {"experts": 16, "capacity": 160, "k": 4096, "h": 1408, "n": 4096}
    exact, blocks = (layer(exact=exact, **sizes) for exact in (True, False))
    for name in EXPERTS.compared:
        one, two = (
            simulate(planned(asked, name), machine, mode).stop_s for asked in (exact, blocks)
        )
        if name.startswith(("uniform", "serial")):  # the host looks rows up for each step
            assert one > two if mode == "idle" else one == pytest.approx(two)
        else:
            assert one > 1.3 * two
    plan = planned(exact)[0]
    products = [one for step in plan.steps for one in step.products if plan.apart(one)]
    assert sum(one.batch for one in products) == 2 * 4 * 16  # of four sources


def test_batches_take_what_the_machine_has_of_experts() -> None:
    """And a product of one expert, or of a shared matrix, what it has of all others."""
    machine = find("h200-4", None)
    assert machine and machine.gemm
    slow = replace(machine, experts=replace(machine.gemm, efficiency=0.1))
    for experts, slower in ((2, True), (1, False)):
        plans = planned(layer(experts=experts, capacity=1024, k=4096, h=2048, n=4096), "serial")
        ratio = simulate(plans, slow).stop_s / simulate(plans, machine).stop_s
        assert ratio > 2 if slower else ratio == 1
    problem = Problem("all_gather_matmul", (4096,) * 4, 4096, 4096, "bfloat16")
    schedule = Schedule.parse("hetero-fused-1d:pieces=2")
    assert predict(problem, schedule, slow) == predict(problem, schedule, machine)


def test_what_cannot_be_simulated_is_told() -> None:
    given = ficco.explain("experts", capacity=8, machine="h200-4", schedule="growing", **SIZES)
    assert str(given) == "growing (requested)"
    alone = ficco.explain("experts", capacity=8, machine="h200-4", **(SIZES | {"world": 1}))
    assert alone.source == "rule"
    for wrong, text in (
        ({"experts": 7}, "multiple of 4"),
        ({"split": "rows"}, "experts, columns"),
        ({"activation": "tanh"}, "required one of"),
        ({"schedule": 3}, "required 'auto'"),
    ):
        with pytest.raises(ValueError, match=text):
            ficco.explain("experts", **({"capacity": 8, "machine": "h200-4"} | SIZES | wrong))


@pytest.mark.parametrize(
    "name", ["ring", "one-shot", "tiled", "hetero-fused-2d", "growing:pull", "serial:collective"]
)
def test_a_schedule_that_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"schedule .* required one that pushes rows"):
        planned(layer(), name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"operator": "expert"},
        {"capacity": 0},
        {"experts": 0},
        {"k": -1},
        {"h": -1},
        {"function": "tanh"},
        {"function": ""},
    ],
)
def test_a_wrong_layer_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="required"):
        replace(layer(), **wrong)


def test_a_dtype_that_is_not_served_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="int8"):
        layer(dtype="int8")


# Broken plans.


def moved(region: Region, rows: int) -> Region:
    return region._replace(row=region.row + rows, row_stop=region.row_stop + rows)


def products(label: str, **fields: Any) -> Callable[[Step], Step]:
    """The first product of a step with other fields; a number moves a region down."""

    def edit(step: Step) -> Step:
        if step.label != label or not step.products:
            return step
        first = step.products[0]
        values = {
            name: moved(getattr(first, name), value) if name in ("a", "b", "out") else value
            for name, value in fields.items()
        }
        return step._replace(products=(first._replace(**values), *step.products[1:]))

    return edit


def transfers(label: str, **fields: Any) -> Callable[[Step], Step]:
    def edit(step: Step) -> Step:
        if not step.label.startswith(label) or step.transfer is None:
            return step
        values = {
            name: moved(getattr(step.transfer, name), value) if name in ("src", "dst") else value
            for name, value in fields.items()
        }
        return step._replace(transfer=step.transfer._replace(**values))

    return edit


def fields(label: str, **values: Any) -> Callable[[Step], Step]:
    return lambda step: step._replace(**values) if step.label.startswith(label) else step


def idle(label: str) -> Callable[[Step], Step]:
    return fields(label, op="sync", transfer=None, products=())


#: Rank 1 multiplies the rows of rank 0 first.
BROKEN: dict[str, tuple[Callable[[Step], Step], str]] = {
    "the matrix of another expert": (products("0.0", b=16), "matrix of other rows|leaves"),
    "one matrix for all experts": (products("0.0", b_stride=0), "matrix of other rows"),
    "the wrong distance of matrices": (products("0.0", b_stride=8), "leaves out|matrix of other"),
    "the last matrix of another expert": (
        products("0.0 back", b_stride=0),
        "matrix of other rows",
    ),
    "fewer experts": (products("0.0", batch=1), "elements of hidden are written"),
    "rows of another source": (products("0.0", a=5), "what nobody has written"),
    "made elsewhere": (products("0.0", out=5), "elements of hidden are written"),
    "at another distance": (products("0.0", out_stride=5), "matrix of other rows"),
    "not waited for": (fields("0.0", waits=()), "never waited for|before"),
    "the product left out": (fields("0.0", products=()), "does not hold|elements of"),
    "without the function": (transfers("0.0 silu", function=""), "wrong buffers"),
    "another function": (transfers("0.0 silu", function="relu gated"), "not asked for"),
    "the function of other rows": (transfers("0.0 silu", src=5), "puts rows|nobody|before"),
    "sent to another place": (transfers("ready 0>0", dst=5), "another piece|other rows|nobody"),
    "rows for another rank": (transfers("ready 0>0", src=10), "another block"),
    "the same rows for all experts": (transfers("ready 0>0", src_stride=0), "piece|nobody|rows"),
    "landing at the wrong distance": (transfers("ready 0>0", dst_stride=5), "rows|piece|nobody"),
    "one copy of two": (transfers("ready 0>0", batch=1), "what nobody has written"),
    "no copies": (transfers("ready 0>0", batch=0), "is no batch"),
    "sent back before it is made": (fields("returned 0>0", after=()), "before it is written"),
    "sent back to another place": (transfers("returned 0>0", dst=5), "rows|piece|nobody"),
    "kept before it has come": (fields("0.0 kept", after=()), "before it is written"),
    "not kept": (idle("0.0 kept"), "elements of gathered are written"),
    "not brought home": (idle("0.0 home"), "elements of out are written"),
}


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("what", BROKEN)
def test_broken_plans_are_found(what: str, gathers: bool) -> None:
    edit, why = BROKEN[what]
    plans = planned(layer(keeps=True, gathers=gathers))
    broken = replace(plans[1], steps=tuple(map(edit, plans[1].steps)))
    assert broken != plans[1]
    with pytest.raises(PlanError, match=why):
        check([plans[0], broken, *plans[2:]])
