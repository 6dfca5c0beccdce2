"""The model, the rule and the losses of schedule="auto", compared with times computed by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from docs.make import rule_table
from ficco.heuristics import Observation, candidates, decide, fit_thresholds, problem_of_sizes, rule
from ficco.heuristics.candidates import is_serial, on_mesh
from ficco.heuristics.decide import held_bytes
from ficco.heuristics.model import Prediction, choose, copy_loss, gemm_loss, lacking, losses
from ficco.machine import Collective, Copies, Machine, Memory, Provenance, Thresholds, Topology
from ficco.machine.model import flat
from ficco.problems.products import OPERATORS, Problem
from ficco.schedules import Schedule, plan, refusal, same_plans
from ficco.simulate import predict

ASSUMED = Provenance("assumed")

#: Round figures: a product of one tile takes 1 ms, a copy of 8 MiB takes 1 ms.
TILE_S = 1e-3
RATE = 2.0**23 / 1e-3
FLAT = flat(2.0 * 1024 * 1024 * 4096 / TILE_S, RATE, 1e15, ranks=4)
MACHINE = replace(
    FLAT,
    name="toy",
    accelerator="toy",
    copies=Copies(2, 0.0, 0.0, ((1, RATE), (2**40, RATE)), ASSUMED),
    kernel_copies=None,
    all_gather=Collective(((1, 3e-3), (2**23, 3e-3)), ASSUMED),
    gemm=replace(FLAT.gemm, tile_rows=(1024,), tile_cols=(1024,), bandwidth=1e15),
    memory=Memory(1e12, 1e15, ASSUMED, 0.0),
)

#: The same machine with 8 ranks and a link between each two ranks.
MESH = replace(MACHINE, name="mesh", ranks=8, topology=Topology("mesh", RATE, ASSUMED))

#: Four shards of 8 MiB, one tile each: products take 4 ms, copies 3 ms.
PROBLEM = Problem("all_gather_matmul", (1024,) * 4, 1024, 4096, "bfloat16")


def problem(m: int, n: int, k: int, world: int = 4) -> Problem:
    return Problem("all_gather_matmul", (m // world,) * world, n, k, "bfloat16")


def invented(**seconds: tuple[float, ...]) -> list[Prediction]:
    """Return predictions from seconds per mode, by short name of a schedule."""
    names = {"collective": "serial:collective", "overlap": "shard-overlap"}
    modes = {name: dict(zip(("queued", "idle"), s, strict=False)) for name, s in seconds.items()}
    return [Prediction(Schedule.parse(names.get(name, name)), s) for name, s in modes.items()]


def test_the_fastest_schedule_or_the_smallest_worst_loss_is_taken() -> None:
    one_mode = invented(collective=(4e-3,), serial=(5e-3,), overlap=(3e-3,), growing=(2e-3,))
    # Each of the two serial schedules is fastest in one mode only.
    serials = invented(collective=(3e-3, 24e-3), serial=(6e-3, 10e-3), overlap=(5e-3, 9.9e-3))
    # Losses to the best schedule of each mode: 0 and 1/3; 1/10 and 1/15; 1 and 0.
    two_modes = invented(
        collective=(9e-3, 9e-3), overlap=(2e-3, 4e-3), growing=(2.2e-3, 3.2e-3),
        shrinking=(4e-3, 3e-3),
    )  # fmt: skip
    # The first of nearly equal schedules is taken.
    nearly_equal, faster = (
        invented(collective=(4e-3,), overlap=(2e-3,), growing=(seconds,))
        for seconds in (1.985e-3, 1.97e-3)
    )
    for predictions, mode, expected, serial, message in (
        (one_mode, "queued", "growing", "serial:collective", "2 ms queued on toy, 2.00 times as"),
        (serials, "eager", "shard-overlap", "serial", "1.20 and 1.01 times as fast as serial"),
        (serials, "queued", "serial:collective", "serial:collective", ""),
        (two_modes, "eager", "growing", "serial:collective", ""),
        (nearly_equal, "queued", "shard-overlap", "serial:collective", ""),
        (faster, "queued", "growing", "serial:collective", ""),
    ):
        choice = choose(predictions, MACHINE, mode)
        assert (str(choice.chosen.schedule), str(choice.serial.schedule)) == (expected, serial)
        assert message in choice.reason


def test_a_gain_below_the_margin_takes_serial() -> None:
    strict, lax = (replace(MACHINE, margin=margin) for margin in (0.03, 0.01))

    def overlapping(seconds: float) -> list[Prediction]:
        return invented(collective=(4.1e-3,), serial=(4e-3,), overlap=(seconds,))

    for seconds in (3.91e-3, 3.93e-3):
        choice = choose(overlapping(seconds), strict, "queued")
        assert str(choice.chosen.schedule) == "serial" and "margin of 3.0%" in choice.reason
        choice = choose(overlapping(seconds), lax, "queued")
        assert str(choice.chosen.schedule) == "shard-overlap"
    no_gain = dict.fromkeys((4e-3, 4.0001e-3, 3.9999e-3), "gain nothing")
    for seconds, message in {4.1e-3: "lose 2.4%", **no_gain}.items():
        reason = choose(overlapping(seconds), strict, "queued").reason
        assert reason == f"shard-overlap is predicted to {message} on toy"


def test_an_eager_call_takes_nothing_that_loses_to_serial_in_a_mode() -> None:
    # The fastest when queued loses a tenth to serial when idle.
    predictions = invented(
        collective=(4e-3, 4e-3), serial=(6e-3, 6e-3), overlap=(2e-3, 4.4e-3), growing=(3e-3, 3.9e-3)
    )
    for mode, name in (("queued", "shard-overlap"), ("idle", "growing"), ("eager", "growing")):
        assert str(choose(predictions, MACHINE, mode).chosen.schedule) == name
    choice = choose(predictions[:3], MACHINE, "eager")
    assert str(choice.chosen.schedule) == "serial:collective"
    assert "shard-overlap is predicted to take 2 ms queued and 4.4 ms idle" in choice.reason


def test_candidates_are_served_by_the_device_and_measured() -> None:
    for name, serial in (("serial:pull,copy=7", True), ("serial:tail=4", False)):
        assert is_serial(Schedule.parse(name)) == serial
    on_cpu = replace(MACHINE, accelerator="cpu")
    assert {schedule.compute for schedule in candidates(PROBLEM, on_cpu)} == {1}
    measured = replace(MACHINE, kernel_copies=MACHINE.copies)
    for machine, offers, served in (
        (measured, (), False), (MACHINE, ("dma", "kernel"), False),
        (measured, ("dma", "kernel"), True),
    ):  # fmt: skip
        schedules = candidates(PROBLEM, machine, *([offers] if offers else []))
        assert any(schedule.mover == "kernel" for schedule in schedules) == served


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("machine", [MESH, MACHINE, None], ids=["mesh", "switch", "unknown"])
def test_every_operator_has_valid_candidates(machine: Machine | None, operator: str) -> None:
    for world in (2, 3, 4):
        problem = problem_of_sizes(operator, 4096, 2048, 1024, "bfloat16", world)
        schedules = candidates(problem, machine)
        assert 8 <= len(schedules) <= 20
        assert {*same_plans(problem, schedules).values()} == {*schedules}  # plans differ
        assert str(schedules[0]) == "serial:collective"
        assert is_serial(schedules[1]) and not any(map(is_serial, schedules[2:]))
        for schedule in schedules:
            assert refusal(problem, schedule) == "" and Schedule.parse(str(schedule)) == schedule
            plan(problem, schedule, 0)
    rings = [schedule for schedule in schedules if schedule.grouping == "ring"]
    assert bool(rings) is (problem.kind.sums and machine is not MESH)


def test_the_first_candidate_on_a_switch_and_the_copy_lanes_on_a_mesh() -> None:
    even = dict.fromkeys(map(str, candidates(problem(8192, 4096, 4096, 4), MACHINE)), 1.0)
    even["serial:collective"] = even["serial"] = 2.0
    predictions = [Prediction(Schedule.parse(name), {"queued": s}) for name, s in even.items()]
    assert str(choose(predictions, MACHINE, "queued").chosen.schedule) == "growing:compute=2"
    assert on_mesh(MESH) and not on_mesh(MACHINE)
    lanes = {str(schedule): schedule for schedule in candidates(problem(8192, 4096, 4096, 8), MESH)}
    lanes = {name: schedule for name, schedule in lanes.items() if schedule.mover == "dma"}
    assert lanes.pop("shard-overlap").copy == 1  # the schedule of Async TP
    assert {(schedule.copy, schedule.order) for schedule in lanes.values()} == {(7, "piece")}


MARKS = Thresholds(1e12, 5e12, ASSUMED)


def test_the_rule_of_the_paper() -> None:
    for sizes, expected in (
        ((4096, 4096, 4096), "uniform-fused-2d"),  # m = k
        ((4096, 4096, 8192), "uniform-fused-2d"),
        ((8192, 4096, 4096), "uniform-fused-1d"),  # 2.7e11
        ((65536, 2048, 8192), "hetero-fused-1d"),  # 2.2e12
        ((65536, 16384, 8192), "hetero-unfused-1d"),  # 1.8e13
    ):
        name, reason = rule(problem(*sizes), MARKS)
        assert name == expected and f"k={sizes[2]}" in reason
    # The rule counts the operations of one rank, not of all four.
    wide = problem(65536, 2048, 8192)
    for low, high, expected in (
        (wide.flops, 5.0 * wide.flops, "hetero-fused-1d"),  # a threshold is not below itself
        (wide.flops / 5 - 1, wide.flops - 1.0, "hetero-unfused-1d"),
        (wide.flops + 1.0, 2.0 * wide.flops, "uniform-fused-1d"),
    ):
        assert rule(wide, Thresholds(low, high, ASSUMED))[0] == expected


def test_the_rule_reads_a_scatter_as_the_transposed_gather() -> None:
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
    assert lacking(MACHINE, "eager") == () and lacking(bare, "queued") == ("gemm",)
    assert lacking(bare, "eager") == ("gemm", "host")
    marks = rule_table.literal(MACHINE)  # with the peak of the machine
    assert (marks.low, marks.high) == (MACHINE.gemm.peak, 5 * MACHINE.gemm.peak)
    with pytest.raises(ValueError, match="required its block gemm"):
        rule_table.literal(bare)


def test_thresholds_are_fitted_to_the_fastest_schedules_and_weigh_losses() -> None:
    names = "uniform-fused-1d", "hetero-fused-1d", "hetero-unfused-1d"
    best = [names[0]] * 3 + [names[1]] * 4 + [names[2]] * 3
    observations = [
        Observation(problem(2**i, 512, 512), {name: 1.0}) for i, name in enumerate(best, start=10)
    ]
    marks = fit_thresholds(observations)
    flops = [observation.problem.flops for observation in observations]
    assert flops[2] < marks.low < flops[3] and flops[6] < marks.high < flops[7]
    assert marks.provenance.source == "fitted" and "10 problems" in marks.provenance.note
    assert [rule(observation.problem, marks)[0] for observation in observations] == best
    # An observation with m <= k does not affect the thresholds.
    short = Observation(problem(512, 8, 1024), {"uniform-fused-2d": 1.0})
    assert fit_thresholds([*observations, short])
    with pytest.raises(ValueError, match="m > k"):
        fit_thresholds([])
    # Two observations of one size disagree by a small and by a large loss.
    small, large = problem(4096, 512, 512), problem(65536, 512, 512)
    times = (small, (1.0, 1.01, 1.02)), (small, (1.5, 1.0, 1.1)), (large, (1.5, 1.2, 1.0))
    marks = fit_thresholds(
        [Observation(sized, dict(zip(names, seconds, strict=True))) for sized, seconds in times]
    )
    assert [rule(sized, marks)[0] for sized in (small, large)] == [*names[1:]]


def test_contention_by_hand() -> None:
    busy = replace(MACHINE, contention=replace(MACHINE.contention, gemm_under_copies=2.0))
    for name, least, most in (("shard-overlap", 1.2, 2.0), ("serial", 1.0, 1.0)):
        assert least <= losses(PROBLEM, Schedule.parse(name), busy, predict).contention <= most


def test_decomposition_of_the_product_by_hand() -> None:
    # 4 tiles in sequence take 4 ms. A piece of half a shard takes the time of a whole tile. The
    # last schedule multiplies a batch of four pieces of 256 rows, a tile for each.
    losses = {"serial:collective": 1.0, "shard-overlap": 1.0, "shard-overlap:pieces=2": (1 + 6) / 4}
    for name, loss in (losses | {"uniform-fused-1d": 4.0}).items():
        rank_plan = plan(PROBLEM, Schedule.parse(name), 0)
        assert gemm_loss(PROBLEM, rank_plan, MACHINE) == pytest.approx(loss), name


def test_a_rank_without_products_has_no_loss() -> None:
    sends, takes = [[0, 0], [256, 256]], [[0, 256], [0, 256]]
    for operator in (name for name, kind in OPERATORS.items() if kind.blocks):
        table = sends if OPERATORS[operator].scatters else takes
        blocks = Problem.of_blocks(operator, table, 1024, 1024, "bfloat16")
        decision = decide(blocks, machine=replace(MACHINE, ranks=2))
        assert decision.source == "model"
        assert {candidate.losses.gemm for candidate in decision.candidates} == {1.0}, operator


def test_decomposition_of_the_communication_by_hand() -> None:
    slow = replace(MACHINE, copies=replace(MACHINE.copies, gap=1e-3))
    # 3 shards of 1 ms and a gap of 1 ms each; in 4 pieces there are 12 gaps.
    for name, loss in (
        ("hetero-fused-1d:pieces=4", (3 + 12) / 6), ("shard-overlap", 1.0),
        ("serial:collective", 1.0), ("hetero-fused-1d:pieces=4,pull", (3 + 12) / 6),
    ):  # fmt: skip
        assert copy_loss(plan(PROBLEM, Schedule.parse(name), 0), slow) == pytest.approx(loss)
    uneven = Problem("all_gather_matmul", (8, 512, 2048, 2048), 64, 4096, "bfloat16")
    pulling = plan(uneven, Schedule.parse("hetero-unfused-1d:pieces=2,pull"), 0)
    # Rank 0 reads for 0.5, 2 and 2 ms, with a gap of 1 ms per copy; two pieces have two gaps.
    assert copy_loss(pulling, slow) == pytest.approx((2.5 + 4 + 4) / (1.5 + 3 + 3))
    mesh = replace(slow, topology=Topology("mesh", RATE, ASSUMED))  # where the slowest link counts
    assert copy_loss(pulling, mesh) == pytest.approx(4 / 3)


def test_decomposition_of_scattering_operators_by_hand() -> None:
    slow = replace(MACHINE, copies=replace(MACHINE.copies, gap=1e-3))
    # Blocks of 1024 x 4096, 8 MiB: four tiles of 1 ms each, and copies of 1 ms.
    for operator, copies in (("matmul_reduce_scatter", 1), ("matmul_all_reduce", 2)):
        scattering = Problem(operator, (1024,) * 4, 4096, 4096, "bfloat16")
        for name, gemm, gaps in (
            ("serial:collective", 1.0, 0),
            ("shard-overlap", 1.0, 3 * copies),
            ("hetero-unfused-1d:pieces=4", (4 + 3 * 16) / 16, 3 * 4 + 3 * (copies - 1)),
            ("uniform-fused-2d:pieces=4", 1.0, 4 * 3 * copies),
            ("ring:pieces=1,tail=4", (3 * 4 + 4 * 4) / 16, 3 * copies + 3 * 3 * (copies - 1)),
        ):
            rank_plan = plan(scattering, Schedule.parse(name), 0)
            assert gemm_loss(rank_plan.problem, rank_plan, MACHINE) == pytest.approx(gemm), name
            loss = (3 * copies + gaps) / (6 * copies) if gaps else 1.0
            assert copy_loss(rank_plan, slow) == pytest.approx(loss), (operator, name)


def test_memory_held_by_a_call_of_each_operator() -> None:
    # A, B and the result of rank 1 of 2, in elements of 2 bytes; m 6, n 5, k 7.
    for operator, elements in (
        ("all_gather_matmul", 3 * 7 + 7 * 5 + 6 * 5),
        ("matmul_reduce_scatter", 6 * 7 + 7 * 5 + 3 * 5),
        ("all_to_all_matmul", 3 * 7 + 7 * 5 + 2 * 5),
        ("all_gather_transposed_matmul", 3 * 7 + 6 * 5 + 7 * 5),
    ):
        make, rows = Problem, (3, 3)
        if OPERATORS[operator].blocks:
            make, rows = Problem.of_blocks, ((1, 2), (3, 0))
        problem = make(operator, rows, 5, 7, "bfloat16")
        assert held_bytes(problem, 1, 100) == 2 * elements + 100, operator


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
    message = "lacks fp8_tensor, products are predicted by gemm"
    assert message in decide(tensor, machine=machine).reason
    assert "lacks" not in decide(rows, machine=machine).reason


def test_scaled_products_of_a_batch_are_predicted_one_by_one() -> None:
    late = replace(MACHINE, fp8_row=replace(MACHINE.gemm, start=1.0, launch=0.0))
    problem = problem_of_sizes("all_gather_matmul", 8192, 4096, 4096, "fp8-row", 4)
    schedule = Schedule.parse("uniform-fused-1d")
    steps = [step.products for step in plan(problem, schedule, 0).steps if step.products]
    products = sum(product.batch for step in steps for product in step)
    assert products > len(steps)
    assert predict(problem, schedule, late, "queued") == pytest.approx(products, rel=0.01)
    parts = losses(problem, schedule, late, predict).gemm  # one product also has a start
    assert products * 0.95 < parts < products
