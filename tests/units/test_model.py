"""The model, the rule and the losses behind schedule="auto", against times worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from docs.make import rule_table
from ficco.heuristics import (
    Observation,
    candidates,
    decide,
    fit_thresholds,
    losses,
    problem_of_sizes,
    rule,
)
from ficco.heuristics.candidates import is_serial, on_mesh
from ficco.heuristics.decide import held_bytes
from ficco.heuristics.model import Prediction, choose, copy_loss, gemm_loss, lacking
from ficco.machine import (
    Collective,
    Contention,
    Copies,
    Gemm,
    Host,
    Machine,
    Memory,
    Provenance,
    Thresholds,
    Topology,
)
from ficco.problems.products import OPERATORS, Problem
from ficco.schedules import Schedule, plan, refusal, same_plans
from ficco.simulate import predict

BY = Provenance("assumed")

#: Round figures: a product of one tile takes 1 ms, 8 MiB take 1 ms on the way.
TILE_S = 1e-3
RATE = 2.0**23 / 1e-3
MACHINE = Machine(
    name="toy",
    accelerator="toy",
    ranks=4,
    topology=Topology("switch", RATE, BY),
    copies=Copies(2, 0.0, 0.0, ((1, RATE), (2**40, RATE)), BY),
    all_gather=Collective(((1, 3e-3), (2**23, 3e-3)), BY),
    gemm=Gemm(
        peak=2.0 * 1024 * 1024 * 4096 / TILE_S, units=1, launch=0.0, efficiency=1.0, start=0.0,
        tile_rows=(1024,), tile_cols=(1024,), bandwidth=1e15, provenance=BY,
    ),
    memory=Memory(1e12, 1e15, BY, 0.0),
    contention=Contention(1.0, 1.0, 1.0, 1.0, BY),
    host=Host(0.0, 0.0, 0.0, 0.0, 0.0, BY),
)  # fmt: skip

#: The same with 8 ranks, each joined to every other by a link of its own.
MESH = replace(MACHINE, name="mesh", ranks=8, topology=Topology("mesh", RATE, BY))

#: Four shards of 8 MiB, one tile each: products take 4 ms, copies 3 ms.
PROBLEM = Problem("all_gather_matmul", (1024,) * 4, 1024, 4096, "bfloat16")


def problem(m: int, n: int, k: int, world: int = 4) -> Problem:
    return Problem("all_gather_matmul", (m // world,) * world, n, k, "bfloat16")


def made_up(**seconds: tuple[float, ...]) -> list[Prediction]:
    """Predictions by name, "_" for what a name cannot hold in Python."""
    names = {"collective": "serial:collective", "overlap": "shard-overlap"}
    return [
        Prediction(
            Schedule.parse(names.get(name, name)),
            dict(zip(("queued", "idle"), times, strict=False)),
        )
        for name, times in seconds.items()
    ]


# Choosing.


def test_the_fastest_is_taken_and_what_loses_least_in_the_worse_mode() -> None:
    one_mode = made_up(collective=(4e-3,), serial=(5e-3,), overlap=(3e-3,), growing=(2e-3,))
    # Between them the two serial forms are better than everything, each in one mode alone.
    serials = made_up(collective=(3e-3, 24e-3), serial=(6e-3, 10e-3), overlap=(5e-3, 9.9e-3))
    # Losses against the best of a mode: 0 and 1/3; 1/10 and 1/15; 1 and 0.
    both = made_up(
        collective=(9e-3, 9e-3), overlap=(2e-3, 4e-3), growing=(2.2e-3, 3.2e-3),
        shrinking=(4e-3, 3e-3),
    )  # fmt: skip
    # Of what is as good as equal the first is taken.
    near, apart = (
        made_up(collective=(4e-3,), overlap=(2e-3,), growing=(seconds,))
        for seconds in (1.985e-3, 1.97e-3)
    )
    for found, mode, taken, serial, said in (
        (one_mode, "queued", "growing", "serial:collective", "2 ms queued on toy, 2.00 times as"),
        (serials, "eager", "shard-overlap", "serial", "1.20 and 1.01 times as fast as serial"),
        (serials, "queued", "serial:collective", "serial:collective", ""),
        (both, "eager", "growing", "serial:collective", ""),
        (near, "queued", "shard-overlap", "serial:collective", ""),
        (apart, "queued", "growing", "serial:collective", ""),
    ):
        choice = choose(found, MACHINE, mode)
        assert (str(choice.chosen.schedule), str(choice.serial.schedule)) == (taken, serial)
        assert said in choice.reason


def test_a_gain_below_the_margin_takes_serial() -> None:
    strict, lax = (replace(MACHINE, margin=margin) for margin in (0.03, 0.01))

    def overlapping(seconds: float) -> list[Prediction]:
        return made_up(collective=(4.1e-3,), serial=(4e-3,), overlap=(seconds,))

    for seconds in (3.91e-3, 3.93e-3):
        choice = choose(overlapping(seconds), strict, "queued")
        assert str(choice.chosen.schedule) == "serial" and "margin of 3.0%" in choice.reason
        choice = choose(overlapping(seconds), lax, "queued")
        assert str(choice.chosen.schedule) == "shard-overlap"
    no_gain = dict.fromkeys((4e-3, 4.0001e-3, 3.9999e-3), "gain nothing")
    for seconds, said in {4.1e-3: "lose 2.4%", **no_gain}.items():
        reason = choose(overlapping(seconds), strict, "queued").reason
        assert reason == f"shard-overlap is predicted to {said} on toy"


def test_an_eager_call_takes_nothing_that_loses_to_serial_in_a_mode() -> None:
    # The fastest when queued loses a tenth to serial when idle.
    found = made_up(
        collective=(4e-3, 4e-3), serial=(6e-3, 6e-3), overlap=(2e-3, 4.4e-3), growing=(3e-3, 3.9e-3)
    )
    assert str(choose(found, MACHINE, "queued").chosen.schedule) == "shard-overlap"
    assert str(choose(found, MACHINE, "idle").chosen.schedule) == "growing"
    assert str(choose(found, MACHINE, "eager").chosen.schedule) == "growing"
    without = found[:3]
    choice = choose(without, MACHINE, "eager")
    assert str(choice.chosen.schedule) == "serial:collective"
    assert "shard-overlap is predicted to take 2 ms queued and 4.4 ms idle" in choice.reason


# Candidates.


def test_candidates_are_what_the_device_serves_and_was_measured() -> None:
    for name, serial in (("serial:pull,copy=7", True), ("serial:tail=4", False)):
        assert is_serial(Schedule.parse(name)) == serial
    on_cpu = replace(MACHINE, accelerator="cpu")
    assert {one.compute for one in candidates(PROBLEM, on_cpu)} == {1}
    measured = replace(MACHINE, kernel_copies=MACHINE.copies)
    for machine, offers, served in (
        (measured, (), False), (MACHINE, ("dma", "kernel"), False),
        (measured, ("dma", "kernel"), True),
    ):  # fmt: skip
        found = candidates(PROBLEM, machine, *([offers] if offers else []))
        assert any(one.mover == "kernel" for one in found) == served


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("machine", [MESH, MACHINE, None], ids=["mesh", "switch", "unknown"])
def test_every_operator_has_candidates_that_it_can_take(
    machine: Machine | None, operator: str
) -> None:
    for world in (2, 3, 4):
        asked = problem_of_sizes(operator, 4096, 2048, 1024, "bfloat16", world)
        found = candidates(asked, machine)
        assert 8 <= len(found) <= 20
        assert set(same_plans(asked, found).values()) == set(found)  # each a plan of its own
        assert str(found[0]) == "serial:collective"
        assert is_serial(found[1]) and not any(map(is_serial, found[2:]))
        for one in found:
            assert refusal(asked, one) == "" and Schedule.parse(str(one)) == one
            plan(asked, one, 0)
    rings = [one for one in found if one.grouping == "ring"]
    assert bool(rings) is (asked.kind.sums and machine is not MESH)


def test_what_comes_first_on_a_switch_and_copies_on_a_mesh() -> None:
    even = dict.fromkeys(map(str, candidates(problem(8192, 4096, 4096, 4), MACHINE)), 1.0)
    even["serial:collective"] = even["serial"] = 2.0
    found = [Prediction(Schedule.parse(name), {"queued": s}) for name, s in even.items()]
    assert str(choose(found, MACHINE, "queued").chosen.schedule) == "growing:compute=2"
    assert on_mesh(MESH) and not on_mesh(MACHINE)
    lanes = {str(one): one for one in candidates(problem(8192, 4096, 4096, 8), MESH)}
    lanes = {name: one for name, one in lanes.items() if one.mover == "dma"}
    assert lanes.pop("shard-overlap").copy == 1  # Async TP as it is
    assert {(one.copy, one.order) for one in lanes.values()} == {(7, "piece")}


# The rule.

MARKS = Thresholds(1e12, 5e12, BY)


def test_the_rule_of_the_paper() -> None:
    for sizes, taken in (
        ((4096, 4096, 4096), "uniform-fused-2d"),  # m = k
        ((4096, 4096, 8192), "uniform-fused-2d"),
        ((8192, 4096, 4096), "uniform-fused-1d"),  # 2.7e11
        ((65536, 2048, 8192), "hetero-fused-1d"),  # 2.2e12
        ((65536, 16384, 8192), "hetero-unfused-1d"),  # 1.8e13
    ):
        name, reason = rule(problem(*sizes), MARKS)
        assert name == taken and f"k={sizes[2]}" in reason
    # It counts the operations of one rank: whoever counted those of all four would be above.
    asked = problem(65536, 2048, 8192)
    for low, high, taken in (
        (asked.flops, 5.0 * asked.flops, "hetero-fused-1d"),  # the threshold is not below itself
        (asked.flops / 5 - 1, asked.flops - 1.0, "hetero-unfused-1d"),
        (asked.flops + 1.0, 2.0 * asked.flops, "uniform-fused-1d"),
    ):
        assert rule(asked, Thresholds(low, high, BY))[0] == taken


def test_the_rule_reads_what_scatters_as_the_gather_that_it_is_the_transpose_of() -> None:
    sizes = (4096, 4096, 512), (8192, 4096, 512), (65536, 8192, 2048), (65536, 8192, 16384)
    operators = [name for name, kind in OPERATORS.items() if kind.scatters]
    for operator, (m, n, k) in product(operators, sizes):
        sent = problem_of_sizes(operator, m, n, k, "bfloat16", 4)
        gathered = problem_of_sizes("all_gather_matmul", m, k, n, "bfloat16", 4)
        name, reason = rule(sent, MARKS)
        assert name == rule(gathered, MARKS)[0]
        assert f"n={n}" in reason and "transpose" in reason
        decision = decide(sent, machine=Machine("ruled", "toy", 4, thresholds=MARKS))
        assert (decision.source, str(decision.schedule)) == ("rule", name)
        assert "transpose" in decision.reason


def test_blocks_that_a_prediction_and_the_literal_rule_need() -> None:
    bare = replace(MACHINE, gemm=None, host=None)
    assert lacking(MACHINE, "eager") == ()
    assert lacking(bare, "eager") == ("gemm", "host") and lacking(bare, "queued") == ("gemm",)
    marks = rule_table.literal(MACHINE)  # which takes the peak as a number
    assert (marks.low, marks.high) == (MACHINE.gemm.peak, 5 * MACHINE.gemm.peak)
    with pytest.raises(ValueError, match="required its block gemm"):
        rule_table.literal(bare)


def test_thresholds_are_fitted_to_what_was_fastest_and_weigh_what_is_lost() -> None:
    names = "uniform-fused-1d", "hetero-fused-1d", "hetero-unfused-1d"
    best = [names[0]] * 3 + [names[1]] * 4 + [names[2]] * 3
    seen = [
        Observation(problem(2**i, 512, 512), {name: 1.0}) for i, name in enumerate(best, start=10)
    ]
    marks = fit_thresholds(seen)
    flops = [one.problem.flops for one in seen]
    assert flops[2] < marks.low < flops[3] and flops[6] < marks.high < flops[7]
    assert marks.provenance.source == "fitted" and "10 problems" in marks.provenance.note
    assert [rule(one.problem, marks)[0] for one in seen] == best
    # One with m <= k says nothing of them.
    assert fit_thresholds([*seen, Observation(problem(512, 8, 1024), {"uniform-fused-2d": 1.0})])
    with pytest.raises(ValueError, match="m > k"):
        fit_thresholds([])
    # Two problems of the same size disagree: a little against a lot.
    small, large = problem(4096, 512, 512), problem(65536, 512, 512)
    times = (small, (1.0, 1.01, 1.02)), (small, (1.5, 1.0, 1.1)), (large, (1.5, 1.2, 1.0))
    marks = fit_thresholds(
        [Observation(asked, dict(zip(names, taken, strict=True))) for asked, taken in times]
    )
    assert [rule(one, marks)[0] for one in (small, large)] == [*names[1:]]


# Losses.


def test_contention_by_hand() -> None:
    busy = replace(MACHINE, contention=replace(MACHINE.contention, gemm_under_copies=2.0))
    for name, least, most in (("shard-overlap", 1.2, 2.0), ("serial", 1.0, 1.0)):
        assert least <= losses(PROBLEM, Schedule.parse(name), busy, predict).contention <= most


def test_decomposition_of_the_product_by_hand() -> None:
    # 4 tiles in a row: whole 4 ms. A piece of half a shard still takes a whole tile's time.
    for name, loss in (
        ("serial:collective", 1.0),
        ("shard-overlap", 1.0),
        ("shard-overlap:pieces=2", (1 + 6) / 4),
        ("uniform-fused-1d", 4.0),  # a batch of four pieces of 256 rows, a tile for each
    ):
        assert gemm_loss(PROBLEM, plan(PROBLEM, Schedule.parse(name), 0), MACHINE) == pytest.approx(
            loss
        ), name


def test_a_rank_that_has_nothing_to_multiply_loses_nothing() -> None:
    for operator, table in (
        ("all_to_all_matmul", [[0, 256], [0, 256]]),
        ("all_to_all_transposed_matmul", [[0, 256], [0, 256]]),
        ("matmul_all_to_all", [[0, 0], [256, 256]]),
    ):
        asked = Problem.of_blocks(operator, table, 1024, 1024, "bfloat16")
        decision = decide(asked, machine=replace(MACHINE, ranks=2))
        assert decision.source == "model"
        assert {one.losses.gemm for one in decision.candidates} == {1.0}, operator


def test_decomposition_of_the_communication_by_hand() -> None:
    slow = replace(MACHINE, copies=replace(MACHINE.copies, gap=1e-3))
    # 3 shards of 1 ms and a gap of 1 ms each; in 4 pieces there are 12 gaps.
    for name, loss in (
        ("hetero-fused-1d:pieces=4", (3 + 12) / 6), ("shard-overlap", 1.0),
        ("serial:collective", 1.0), ("hetero-fused-1d:pieces=4,pull", (3 + 12) / 6),
    ):  # fmt: skip
        assert copy_loss(plan(PROBLEM, Schedule.parse(name), 0), slow) == pytest.approx(loss)
    asked = Problem("all_gather_matmul", (8, 512, 2048, 2048), 64, 4096, "bfloat16")
    made = plan(asked, Schedule.parse("hetero-unfused-1d:pieces=2,pull"), 0)
    # Rank 0 fetches 0.5, 2 and 2 ms, each with a gap of 1 ms, or with two when cut in two.
    assert copy_loss(made, slow) == pytest.approx((2.5 + 4 + 4) / (1.5 + 3 + 3))
    mesh = replace(slow, topology=Topology("mesh", RATE, BY))  # where the longest way counts
    assert copy_loss(made, mesh) == pytest.approx(4 / 3)


def test_decomposition_of_what_scatters_by_hand() -> None:
    slow = replace(MACHINE, copies=replace(MACHINE.copies, gap=1e-3))
    # Blocks of 1024 x 4096, 8 MiB: four tiles of 1 ms each, and copies of 1 ms.
    for operator, copies in (("matmul_reduce_scatter", 1), ("matmul_all_reduce", 2)):
        asked = Problem(operator, (1024,) * 4, 4096, 4096, "bfloat16")
        for name, gemm, gaps in (
            ("serial:collective", 1.0, 0),
            ("shard-overlap", 1.0, 3 * copies),
            ("hetero-unfused-1d:pieces=4", (4 + 3 * 16) / 16, 3 * 4 + 3 * (copies - 1)),
            ("uniform-fused-2d:pieces=4", 1.0, 4 * 3 * copies),
            ("ring:pieces=1,tail=4", (3 * 4 + 4 * 4) / 16, 3 * copies + 3 * 3 * (copies - 1)),
        ):
            made = plan(asked, Schedule.parse(name), 0)
            assert gemm_loss(made.problem, made, MACHINE) == pytest.approx(gemm), name
            lost = (3 * copies + gaps) / (6 * copies) if gaps else 1.0
            assert copy_loss(made, slow) == pytest.approx(lost), (operator, name)


def test_what_a_call_holds_of_each_operator() -> None:
    # A, B and the result of rank 1 of 2, in elements of 2 bytes; m 6, n 5, k 7.
    for operator, held in (
        ("all_gather_matmul", 3 * 7 + 7 * 5 + 6 * 5),
        ("matmul_reduce_scatter", 6 * 7 + 7 * 5 + 3 * 5),
        ("all_to_all_matmul", 3 * 7 + 7 * 5 + 2 * 5),
        ("all_gather_transposed_matmul", 3 * 7 + 6 * 5 + 7 * 5),
    ):
        make, rows = Problem, (3, 3)
        if OPERATORS[operator].blocks:
            make, rows = Problem.of_blocks, ((1, 2), (3, 0))
        asked = make(operator, rows, 5, 7, "bfloat16")
        assert held_bytes(asked, 1, 100) == 2 * held + 100, operator


def test_scaled_products_are_predicted_by_their_recipe() -> None:
    gemm, sizes = MACHINE.gemm, (8192, 4096, 4096)
    machine = replace(MACHINE, fp8_row=replace(gemm, peak=gemm.peak / 10))
    rows, tensor, plain = (
        problem_of_sizes("all_gather_matmul", *sizes, kind, 4)
        for kind in ("fp8-row", "fp8-tensor", "bfloat16")
    )
    assert machine.products(rows) is machine.fp8_row and not machine.unmeasured(rows)
    assert machine.products(tensor) is gemm
    assert machine.unmeasured(tensor) == "fp8_tensor" and not machine.unmeasured(plain)
    serial = Schedule.parse("serial")
    ratio = predict(rows, serial, machine, "queued") / predict(rows, serial, MACHINE, "queued")
    assert 5 < ratio < 11
    assert predict(tensor, serial, machine, "queued") == predict(tensor, serial, MACHINE, "queued")
    said = "lacks fp8_tensor, products are predicted by gemm"
    assert said in decide(tensor, machine=machine).reason
    assert "lacks" not in decide(rows, machine=machine).reason


def test_no_batch_of_scaled_products_is_predicted() -> None:
    late = replace(MACHINE, fp8_row=replace(MACHINE.gemm, start=1.0, launch=0.0))
    problem = problem_of_sizes("all_gather_matmul", 8192, 4096, 4096, "fp8-row", 4)
    schedule = Schedule.parse("uniform-fused-1d")
    made = [step.products for step in plan(problem, schedule, 0).steps if step.products]
    products = sum(product.batch for some in made for product in some)
    assert products > len(made)
    assert predict(problem, schedule, late, "queued") == pytest.approx(products, rel=0.01)
    parts = losses(problem, schedule, late, predict).gemm  # over a whole that has one start, too
    assert products * 0.95 < parts < products
