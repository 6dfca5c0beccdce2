"""The simulator: every effect by hand, invariants, and one rank that stands for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ficco.errors import ConfigError
from ficco.machine import (
    Collective,
    Contention,
    Copies,
    Gemm,
    Host,
    Machine,
    Memory,
    Provenance,
    Topology,
)
from ficco.machine.flat import flat
from ficco.plan import Plan, Product, Reduction, Region, Signal, Step, Transfer, in_parts
from ficco.problems.products import OPERATORS, Problem
from ficco.schedules import NAMED, Schedule, plan, plans, refusal
from ficco.simulate import MODES, predict, simulate
from ficco.simulate.events import DRIFT, UNFILLED
from ficco.simulate.timeline import Bar, Timeline, dumps, loads, work
from ficco.tools import cli
from ficco.tools.bench import draw as drawing
from ficco.tools.bench.draw import draw, trace

GIVEN = Provenance("assumed")

#: Everything at a rate of 1, so that seconds can be counted: a copy takes its bytes, a product
#: its operations (less what is in its waves), a place its bytes twice.
ONE = flat(1.0, 1.0, 1.0)

#: A machine with every effect, in round numbers.
TOY = Machine(
    name="toy",
    accelerator="toy",
    ranks=4,
    topology=Topology("switch", 400e9, GIVEN, sharing=0.7),
    copies=Copies(3, 12e-6, 3e-6, ((1e5, 6e10), (1e6, 2e11), (1e8, 3.8e11)), GIVEN),
    kernel_copies=Copies(8, 8e-6, 1e-6, ((1e5, 9e10), (1e8, 3.2e11)), GIVEN),
    all_gather=Collective(((1e6, 4e-5), (1e8, 1e-3)), GIVEN),
    gemm=Gemm(
        peak=9e14,
        units=132,
        launch=2e-6,
        efficiency=0.8,
        start=5e-6,
        bandwidth=3e12,
        provenance=GIVEN,
        tile_rows=(128,),
        tile_cols=(256,),
    ),
    memory=Memory(1e11, 4e12, GIVEN),
    contention=Contention(1.06, 1.1, 1.3, 1.2, GIVEN),
    host=Host(3e-5, 2e-5, 9e-6, 2e-6, 1.5e-6, GIVEN),
)
MESH = replace(TOY, topology=Topology("mesh", 64e9, GIVEN, sharing=0.9))

EVERY = (
    *(name for name in NAMED if name not in ("ring", "one-shot")),
    "serial:collective",
    "serial:kernel",
    "shard-overlap:pull,copy=2",
    "shard-overlap:tail=3,compute=2",
    "growing:tail=2,compute=2",
    "hetero-unfused-1d:copy=7,compute=2",
    "uniform-unfused-1d:kernel,compute=2",
    "hetero-unfused-2d:pull,copy=4,compute=3",
    "hetero-fused-1d:pieces=4+2+1,pull",
)


def problem_of(*rows: int, n: int = 1, k: int = 1, dtype: str = "float32") -> Problem:
    return Problem("all_gather_matmul", rows, n, k, dtype)


def seconds(problem: Problem, name: str, machine: Machine, mode: str = "queued") -> float:
    return simulate(plans(problem, Schedule.parse(name)), machine, mode).stop_s


def bars_of(timeline: Timeline, rank: int, kind: str) -> list[tuple[float, float]]:
    return [
        (round(bar.start_s, 9), round(bar.stop_s, 9))
        for bar in timeline.ranks[rank]
        if bar.kind == kind
    ]


# One plan by hand, and plans whose every second can be counted. A shard of one row of 4 bytes
# takes 4 s to copy at a rate of 1; its product takes 2 * n * k operations.


def own_plan(*steps: Step, problem: Problem | None = None) -> Plan:
    problem = problem or problem_of(100, n=100, k=1)
    asked = problem.specification
    a, _, out = *asked.operands, asked.results[0]
    added = (
        a._replace(name="staging", memory="slot", leaves=False),
        a._replace(name="publish", memory="slot"),
        out._replace(name="sum", memory="local", dtype="float32"),
        out._replace(name="partial", memory="local"),
    )
    return Plan(problem, "by hand", 0, steps, (*asked.operands, *asked.results, *added), 0)


def multiply(lane: str, rows: int, n: int = 1, k: int = 1, batch: int = 1, **more: object) -> Step:
    a, out = Region("a", 0, 0, rows, 0, k), Region("out", 0, 0, rows, 0, n)
    product = Product(a, Region("b", 0, 0, k, 0, n), out, batch=batch)
    return Step("matmul", lane, "x", products=(product,), **more)  # type: ignore[arg-type]


def send(lane: str, src: int, dst: int, nbytes: int, terms: int = 0, **more: object) -> Step:
    here = Region("a", src, 0, nbytes // 4, 0, 1)
    there = Region("staging", dst, 0, nbytes // 4, 0, 1)
    return Step("copy", lane, "c", transfer=Transfer(here, there, terms), **more)  # type: ignore[arg-type]


def two(*steps: Step, problem: Problem | None = None) -> list[Plan]:
    """Plans of two ranks of which the second does nothing."""
    problem = problem or problem_of(100, 100)
    first = own_plan(*steps, problem=problem)
    return [first, replace(first, rank=1, steps=())]


#: One tile of 1 x 1 on two units: a product of m rows takes ceil(m / 2) waves of 8 s at k = 2.
TILES = replace(
    ONE,
    gemm=Gemm(
        peak=1.0,
        units=2,
        launch=10.0,
        efficiency=1.0,
        start=0.0,
        bandwidth=float("inf"),
        provenance=GIVEN,
    ),
)


def test_products_of_a_lane_come_one_after_the_other_with_a_launch_between() -> None:
    three = simulate([own_plan(*[multiply("compute0", 3, k=2)] * 3)], TILES)
    # Two waves of two tiles: 2 * (2 tiles * 2 * k operations) = 16 s, and 10 s between products.
    assert bars_of(three, 0, "matmul") == [(0, 16), (16, 42), (42, 68)]


def summing(latency: float) -> tuple[Machine, Step]:
    """A machine on which sums start so late, and one of 6 seconds behind a plan's first step."""
    machine = replace(
        TILES, gemm=replace(TILES.gemm, launch=0.0), memory=Memory(1e9, 10.0, GIVEN, latency)
    )
    part = Region("staging", 0, 0, 5, 0, 1)  # 3 x 20 bytes at 10 a second
    adds = Reduction((part, part), (1, 2), part)
    return machine, Step("reduce", "reduce0", "sum", after=(0,), reduction=adds)


def test_a_sum_comes_before_products_that_are_not_yet_served() -> None:
    machine, add = summing(0.0)
    product = [multiply(f"compute{lane}", 2, k=2) for lane in (0, 1, 0)]
    found = simulate([own_plan(*product, add)], machine)
    assert bars_of(found, 0, "reduce") == [(8, 16 + 6)]  # behind the product that is served
    assert [stop for _, stop in bars_of(found, 0, "matmul")] == [8, 16, 16 + 6 + 8]


def test_the_next_product_of_a_lane_comes_before_a_sum_of_the_one_before() -> None:
    machine, add = summing(1.0)
    first, second = multiply("compute0", 2, k=2), multiply("compute0", 4, k=2)
    found = simulate([own_plan(first, add, second)], machine)
    assert bars_of(found, 0, "matmul") == [(0, 8), (8, 24)]
    assert bars_of(found, 0, "reduce") == [(8, 24 + 6)]
    # What waits for nobody but the sum comes behind it, a second after it could have begun.
    found = simulate([own_plan(first, add, second._replace(after=(1,)))], machine)
    assert bars_of(found, 0, "matmul") == [(0, 8), (15, 31)]


def test_two_lanes_fill_each_others_last_wave_in_part() -> None:
    both = [multiply("compute0", 3, k=2), multiply("compute1", 3, k=2)]
    # Three tiles take two waves, 16 s, and one and a half of work, 12 s: the second begins between.
    assert UNFILLED == 0.5
    assert bars_of(simulate([own_plan(*both)], TILES), 0, "matmul") == [(0, 16), (0, 30)]
    on_one = [multiply("compute0", 3, k=2)] * 2
    assert simulate([own_plan(*on_one)], TILES).stop_s == pytest.approx(16 + 10 + 16)


def test_of_two_products_that_can_begin_the_one_that_is_sent_is_the_last() -> None:
    both = (multiply("compute0", 2, k=2), multiply("compute1", 4, k=2))
    ends = [
        {
            bar.lane: round(bar.stop_s, 9)
            for bar in simulate(two(*both, *sent), TILES).ranks[0]
            if bar.kind == "matmul"
        }
        for sent in (
            (),
            (send("copy0", 0, 1, 4, after=(0,)),),
            (send("copy0", 0, 1, 4, after=(0,)), send("copy0", 0, 1, 4, after=(1,))),
        )
    ]
    in_order = {"compute0": 8.0, "compute1": 24.0}
    assert ends == [in_order, {"compute0": 24.0, "compute1": 16.0}, in_order]
    # Copies wait for the later one, so that a second lane gains nothing with two products.
    problem = Problem("matmul_reduce_scatter", (1024,) * 2, 1024, 1024, "bfloat16")
    one_lane, two_lanes = (
        predict(problem, Schedule.parse(f"shard-overlap{x}"), TOY) for x in ("", ":compute=2")
    )
    assert two_lanes > one_lane


def test_two_lanes_are_no_faster_than_their_work() -> None:
    lanes = [multiply(f"compute{i}", 2, k=2) for i in range(3)]
    assert simulate([own_plan(*lanes)], TILES).stop_s == pytest.approx(24.0)


def test_a_batch_is_one_product() -> None:
    three = own_plan(multiply("compute0", 3, k=2, batch=3))
    assert simulate([three], TILES).stop_s == pytest.approx(5 * 8.0)


def test_sums_are_read_and_written_in_float32() -> None:
    assert ONE.gemm
    by_memory = replace(ONE, gemm=replace(ONE.gemm, peak=1e30, bandwidth=1.0))
    a, b, out = Region("a", 0, 0, 3, 0, 5), Region("b", 0, 0, 5, 0, 7), Region("out", 0, 0, 3, 0, 7)
    operands = (3 * 5 + 5 * 7) * 2
    for region, more, each in (
        (out, {}, 2),
        (out, {"accumulate": True}, 4),  # what it adds itself to is of the operands' dtype
        (out, {"addend": out._replace(buffer="staging")}, 4),
        (out._replace(buffer="sum"), {}, 8),
    ):
        step = Step("matmul", "compute0", "x", products=(Product(a, b, region, **more),))
        made = own_plan(step, problem=problem_of(3, n=7, k=5, dtype="bfloat16"))
        assert simulate([made], by_memory).stop_s == pytest.approx(operands + 3 * 7 * each)


def test_a_place_reads_and_writes_memory_and_sums_are_wider() -> None:
    machine = replace(ONE, memory=Memory(1e9, 2.0, GIVEN, latency=1.0))
    whole = (0, 10, 0, 1)
    step = Step(
        "place",
        "compute0",
        "round",
        transfer=Transfer(Region("sum", 0, *whole), Region("out", 0, *whole)),
    )
    narrow = problem_of(10, dtype="bfloat16")
    assert simulate([own_plan(step, problem=narrow)], machine).stop_s == 1 + 10 * (4 + 2) / 2
    assert simulate([own_plan(step)], machine).stop_s == 1 + 10 * (4 + 4) / 2


def test_a_sum_reads_all_its_parts_and_takes_its_turn() -> None:
    machine = replace(ONE, memory=Memory(1e9, 2.0, GIVEN, latency=1.0))
    whole = (0, 10, 0, 1)
    parts = Region("staging", 0, *whole), Region("staging", 0, *whole), Region("partial", 0, *whole)
    reduction = Reduction(parts, (2, 4, 1), Region("out", 0, *whole))
    add = Step("reduce", "reduce0", "sum", reduction=reduction)
    narrow = problem_of(10, dtype="bfloat16")
    alone = simulate([own_plan(add, problem=narrow)], machine)
    assert bars_of(alone, 0, "reduce") == [(0, 1 + 4 * 10 * 2 / 2)]
    # Beside a product on another lane it waits until that is over, its latency meanwhile.
    both = simulate([own_plan(multiply("compute0", 5), add, problem=narrow)], machine)
    assert bars_of(both, 0, "matmul") == [(0, 10)]
    assert bars_of(both, 0, "reduce") == [(0, 10 + 40)]
    with pytest.raises(ValueError, match="'memory'"):
        simulate([own_plan(add, problem=narrow)], replace(machine, memory=None))


@pytest.mark.parametrize(
    ("operator", "mine", "nbytes"),
    [
        ("all_gather_matmul", "all_gather", 25 * 3 * 4),
        ("matmul_reduce_scatter", "reduce_scatter", 25 * 7 * 4),
        ("matmul_all_reduce", "all_reduce", 25 * 7 * 4),
    ],
)
def test_a_collective_takes_its_own_curve_or_that_of_the_all_gather(
    operator: str, mine: str, nbytes: int
) -> None:
    problem = Problem(operator, (25,) * 4, n=7, k=3, dtype="float32")
    schedule = Schedule.parse("serial:collective")
    fast = replace(flat(1e30, 1.0, 1.0, ranks=4), **{mine: Collective(((1.0, 8.0),), GIVEN)})
    (bar,) = (b for b in simulate(plans(problem, schedule), fast).ranks[3] if b.kind != "matmul")
    assert (bar.kind, bar.stop_s) == ("collective", pytest.approx(8.0 * nbytes))
    if mine != "all_gather":  # three blocks are received, and twice as much to sum and return
        twice = 2 if problem.kind.returns else 1
        found = predict(problem, schedule, replace(fast, **{mine: None}))
        assert found == pytest.approx(twice * 3 * nbytes)
        only = replace(fast, all_gather=None)
        assert predict(problem, schedule, only) == pytest.approx(8.0 * nbytes)
        with pytest.raises(ValueError, match="'all_gather'"):
            predict(problem, schedule, replace(only, **{mine: None}))


def test_an_all_to_all_takes_as_long_as_the_rank_with_most_to_send_or_receive() -> None:
    machine, schedule = flat(1e30, 1.0, 1.0, ranks=3), Schedule.parse("serial:collective")
    # Rank 0 keeps 50 rows and sends 3; rank 2 receives 11.
    table = [[50, 1, 2], [0, 0, 9], [4, 1, 0]]
    for operator, width in (
        ("all_to_all_matmul", 5),
        ("matmul_all_to_all", 2),
        ("all_to_all_transposed_matmul", 5),
    ):
        problem = Problem.of_blocks(operator, table, n=2, k=5, dtype="float32")
        assert predict(problem, schedule, machine) == pytest.approx(11 * width * 4)
        made = plans(problem, schedule)
        brought = [
            sum(work(plan_, step)[1] for step in plan_.steps if step.op == "collective")
            for plan_ in made
        ]
        assert brought == [4 * width * 4, 2 * width * 4, 11 * width * 4]


def test_a_copy_holds_its_queue_for_the_gap_and_is_seen_after_the_latency() -> None:
    machine = replace(ONE, copies=Copies(9, 5.0, 2.0, ((1.0, 1.0),), GIVEN))
    seen = Signal("ready", 0, 0, 0, 0)
    plan_ = two(
        send("copy0", 0, 1, 8, posts=(seen,)),
        send("copy0", 0, 1, 4),
        multiply("compute0", 1, waits=(seen,)),
    )
    found = simulate(plan_, machine)
    assert bars_of(found, 0, "copy") == [(0, 10), (10, 16)]
    assert bars_of(found, 0, "matmul") == [(13, 15)]


@pytest.mark.parametrize(("lane", "in_front", "begin"), [
    ("compute0", 1.0, 9), ("copy0", 1.0, 13), ("compute0", None, 13),
])  # fmt: skip
def test_a_copy_in_front_of_a_product_is_seen_sooner(
    lane: str, in_front: float | None, begin: float
) -> None:
    copies = Copies(9, 5.0, 0.0, ((1.0, 1.0),), GIVEN, in_front)
    seen = Signal("ready", 0, 0, 0, 0)
    plan_ = two(
        send(lane, 0, 1, 8, mover="kernel", posts=(seen,)),
        multiply("compute0", 1, waits=(seen,)),
    )
    found = simulate(plan_, replace(ONE, kernel_copies=copies))
    assert bars_of(found, 0, "matmul") == [(begin, begin + 2)]


def test_copies_over_one_port_share_it_and_over_two_links_do_not() -> None:
    problem = problem_of(100, 100, 100)
    idle_ranks = [replace(own_plan(problem=problem), rank=rank) for rank in (1, 2)]
    apart = [send("copy0", 0, 1, 40), send("copy1", 0, 2, 80)]
    made = [own_plan(*apart, problem=problem), *idle_ranks]
    shared = replace(ONE, topology=Topology("switch", 1.0, GIVEN, sharing=0.8))
    # Both at 0.4 until the first has moved 40 bytes, then 40 bytes at 1.
    assert bars_of(simulate(made, shared), 0, "copy") == [(0, 100), (0, 140)]
    mesh = replace(shared, topology=Topology("mesh", 1.0, GIVEN, sharing=0.8))
    assert bars_of(simulate(made, mesh), 0, "copy") == [(0, 40), (0, 80)]
    together = [send("copy0", 0, 1, 40), send("copy1", 0, 1, 80)]
    made = [own_plan(*together, problem=problem), *idle_ranks]
    assert bars_of(simulate(made, mesh), 0, "copy") == [(0, 100), (0, 140)]


def test_senders_share_the_port_of_their_receiver() -> None:
    problem = problem_of(100, 100, 100)
    senders = [
        replace(own_plan(send("copy0", rank, 2, 40), problem=problem), rank=rank) for rank in (0, 1)
    ]
    made = [*senders, replace(own_plan(problem=problem), rank=2)]
    assert simulate(made, ONE).stop_s == 80.0


def test_copies_of_products_meet_those_of_ranks_that_are_not_in_step() -> None:
    problem = Problem("matmul_reduce_scatter", (100,) * 3, 100, 1, "float32")

    def copies_of(machine: Machine, problem: Problem) -> list[float]:
        terms = int(problem.kind.scatters)
        steps = (
            multiply("compute0", 350),  # 700 s, so that ranks are 21 s apart
            send("copy0", 0, 1, 40, terms, after=(0,)),
            send("copy0", 0, 1, 40, terms),
            send("copy0", 0, 2, 28, terms),
            send("copy0", 0, 1, 8, terms),
        )
        others = [own_plan(problem=problem) for _ in problem.rows[1:]]
        made = [own_plan(*steps, problem=problem), *others]
        made = [replace(one, rank=rank) for rank, one in enumerate(made)]
        return [stop - start for start, stop in bars_of(simulate(made, machine), 0, "copy")]

    assert DRIFT == 0.03
    shared = replace(ONE, topology=Topology("switch", 1.0, GIVEN, sharing=0.8))
    # The third rank sends to the same peer half of the time, and 0.4 are left then: 0.7 in the
    # mean, so that 21 s take 30. The second copy to a peer goes on where the first one was.
    assert copies_of(shared, problem) == pytest.approx([40 + 9, 40, 28 + 9, 8 * 10 / 7])
    # Nobody is met on links of one's own, and by copies that no product is in front of.
    mesh = replace(shared, topology=Topology("mesh", 1.0, GIVEN, sharing=0.8))
    assert copies_of(mesh, problem) == [40, 40, 28, 8]
    assert copies_of(shared, replace(problem, operator="all_gather_matmul")) == [40, 40, 28, 8]


def test_sums_that_return_in_many_pieces_cost_more_where_ranks_meet() -> None:
    whole, pieces = map(Schedule.parse, ("ring", "ring:pieces=4,tail=4"))
    free = replace(TOY, topology=Topology("mesh", 400e9, GIVEN))
    for operator, more in (("matmul_all_reduce", True), ("matmul_reduce_scatter", False)):
        problem = Problem(operator, (8192,) * 4, 8192, 2048, "bfloat16")
        one, many = (
            predict(problem, schedule, TOY) / predict(problem, schedule, free)
            for schedule in (whole, pieces)
        )
        assert many > 1.05 * one if more else many == pytest.approx(one, rel=0.01)


def test_a_rank_has_no_more_copies_in_flight_than_engines() -> None:
    problem = problem_of(*[100] * 4)
    steps = [send(f"copy{i}", 0, i + 1, 40) for i in range(3)]
    made = [replace(own_plan(problem=problem), rank=rank) for rank in range(4)]
    made[0] = own_plan(*steps, problem=problem)
    few = replace(
        ONE,
        topology=Topology("mesh", 1.0, GIVEN),
        copies=Copies(2, 0.0, 5.0, ((1.0, 1.0),), GIVEN),
    )
    # The third waits until the first has given back its engine, gap included.
    assert bars_of(simulate(made, few), 0, "copy") == [(0, 45), (0, 45), (45, 90)]


def test_products_and_copies_slow_each_other_down_while_both_run() -> None:
    factors = Contention(2.0, 4.0, 3.0, 5.0, GIVEN)
    machine = replace(ONE, contention=factors)
    # Products take twice as long, copies four times, until 10 operations are done at 20 s. By
    # then 5 bytes of 15 have moved; the other 10 take 10 s.
    found = simulate(two(multiply("compute0", 5), send("copy0", 0, 1, 12)), machine)
    assert bars_of(found, 0, "matmul") == [(0, 20)]
    assert bars_of(found, 0, "copy") == [(0, 27)]
    by_kernel = simulate(
        two(multiply("compute0", 5), send("copy0", 0, 1, 12, mover="kernel")), machine
    )
    assert bars_of(by_kernel, 0, "matmul") == [(0, 30)]  # as under a collective
    assert bars_of(by_kernel, 0, "copy") == [(0, 36)]


def test_kernel_copies_have_a_curve_of_their_own() -> None:
    slow = Copies(9, 0.0, 0.0, ((1.0, 0.5),), GIVEN)
    step = send("copy0", 0, 1, 8, mover="kernel")
    assert simulate(two(step), replace(ONE, kernel_copies=slow)).stop_s == 16.0
    assert simulate(two(step), replace(ONE, kernel_copies=None)).stop_s == 8.0


def test_serial_is_copies_then_the_product_and_overlap_hides_them() -> None:
    problem = problem_of(*[16] * 4, n=5, k=1)  # copies of 64 bytes, products of 160 operations
    fast = flat(1.0, 1.0, 1e12)  # what is placed beside the peers' shards takes no time to see
    assert seconds(problem, "serial", fast) == pytest.approx(3 * 64 + 640)
    assert seconds(problem, "shard-overlap", fast) == pytest.approx(640)
    by_collective = seconds(problem, "serial:collective", flat(1.0, 1.0, 1e12, ranks=4))
    assert by_collective == pytest.approx(3 * 64 + 640)


def test_a_mesh_wants_a_copy_lane_per_peer() -> None:
    problem = problem_of(*[16] * 4, n=0, k=1)
    machine = replace(ONE, topology=Topology("mesh", 1.0, GIVEN))
    assert seconds(problem, "shard-overlap", machine) == 3 * 64
    assert seconds(problem, "shard-overlap:copy=3", machine) == 64


def test_the_collective_begins_when_the_last_rank_has_reached_it() -> None:
    problem = problem_of(4, 4)
    made = plans(problem, Schedule.parse("serial:collective"))
    late = own_plan(multiply("compute0", 50), *made[0].steps, problem=problem)
    found = simulate([late, made[1]], ONE)
    assert [bars_of(found, rank, "collective")[0][1] for rank in (0, 1)] == [116, 116]


def test_idle_calls_wait_for_their_host_in_enqueue_order() -> None:
    host = Host(
        call=100.0, collective_call=7.0, matmul=10.0, copy=3.0, signal=1.0, provenance=GIVEN
    )
    machine = replace(ONE, host=host)
    seen = Signal("ready", 0, 0, 0, 0)
    made = two(
        multiply("compute0", 2),  # enqueued at 110
        send("copy0", 0, 1, 4, posts=(seen,)),  # at 113, its post at 114
        multiply("compute0", 1, waits=(seen,)),  # at 125
        multiply("compute1", 1),  # at 135
    )
    found = simulate(made, machine, "idle")
    assert bars_of(found, 0, "matmul") == [(110, 114), (125, 127), (135, 137)]
    assert bars_of(found, 0, "copy") == [(113, 117)]
    twice = multiply("compute0", 1)
    both = own_plan(twice._replace(products=twice.products * 2), multiply("compute1", 1))
    both_found = simulate([both], machine, "idle")  # the third product is there at 130
    assert bars_of(both_found, 0, "matmul") == [(110, 114), (130, 132)]
    serial = plans(problem_of(1, 1, n=1), Schedule.parse("serial:collective"))
    assert bars_of(simulate(serial, machine, "idle"), 0, "collective") == [(7, 11)]
    slow = replace(machine, host=replace(host, call=host.call + 20.0))
    assert bars_of(simulate(made, slow, "idle"), 0, "matmul") == [
        (130, 134),
        (145, 147),
        (155, 157),
    ]
    assert simulate(made, slow).stop_s == simulate(made, machine).stop_s


def test_ranks_that_begin_late_meet_at_the_ports_of_their_peers() -> None:
    host = Host(0.0, 0.0, 0.0, 0.0, 0.0, GIVEN, skew=30.0)
    late = replace(ONE, host=host, topology=Topology("switch", 1.0, GIVEN, sharing=0.8))
    made = two(multiply("compute0", 2), problem=problem_of(1, 1))
    made[1] = replace(made[0], rank=1)
    found = simulate(made, late, "idle")
    assert [bars_of(found, rank, "matmul") for rank in (0, 1)] == [[(0, 4)], [(30, 34)]]
    assert simulate(made, late, "queued").stop_s == 4.0
    # Copies of 100 bytes from peer to peer: in step they take turns, else two share a port.
    problem = problem_of(*[25] * 4, n=0, k=1)
    for name in ("shard-overlap", "hetero-unfused-1d"):
        one = predict(problem, Schedule.parse(name), late, "idle")
        assert one == seconds(problem, name, late, "idle") > 300 + 30
    on_mesh = replace(late, topology=Topology("mesh", 1.0, GIVEN))
    assert predict(problem, NAMED["shard-overlap"], on_mesh, "idle") == 300 + 30


def test_a_card_that_multiplies_for_long_gets_slower() -> None:
    assert TILES.gemm
    hot = replace(TILES, gemm=replace(TILES.gemm, launch=0.0, burst=12.0, sustained=0.5))
    found = simulate([own_plan(*[multiply("compute0", 2, k=2)] * 3)], hot)
    # 8 s each; of the second the last 4 s are at half the rate, and all of the third.
    assert bars_of(found, 0, "matmul") == [(0, 8), (8, 20), (20, 36)]


def test_the_caller_waits_for_all_lanes_but_sync() -> None:
    late = Signal("ready", 1, 0, 0, 0)
    problem = problem_of(100, 100)
    first = own_plan(
        multiply("compute0", 1), Step("sync", "sync", "retire", waits=(late,)), problem=problem
    )
    second = replace(own_plan(send("copy0", 1, 0, 40, posts=(late,)), problem=problem), rank=1)
    found = simulate([first, second], ONE)
    assert found.stop_s == 40.0  # the second rank's copy
    only_sync = [Timeline("", (tuple(b for b in found.ranks[0]), ()))]
    assert only_sync[0].stop_s == 2.0


def test_taken_slots_are_free() -> None:
    released = Signal("released", 1, 0, 0, 0)
    assert simulate(two(multiply("compute0", 1, waits=(released,))), ONE).stop_s == 2.0


def test_plans_that_wait_for_ever_are_refused() -> None:
    never = Signal("ready", 1, 0, 0, 0)
    with pytest.raises(ValueError, match="for ever"):
        simulate(two(multiply("compute0", 1, waits=(never,))), ONE)


@pytest.mark.parametrize(
    ("block", "schedule", "mode"),
    [
        ("gemm", "serial", "queued"),
        ("copies", "growing", "queued"),
        ("topology", "growing", "queued"),
        ("contention", "growing", "queued"),
        ("memory", "uniform-fused-2d", "queued"),
        ("all_gather", "serial:collective", "queued"),
        ("host", "growing", "idle"),
    ],
)
def test_a_missing_block_is_named(block: str, schedule: str, mode: str) -> None:
    without = replace(TOY, **{block: None})  # type: ignore[arg-type]
    problem = problem_of(64, 64, n=64, k=64, dtype="bfloat16")
    with pytest.raises(ValueError, match=f"toy.*'{block}'"):
        predict(problem, Schedule.parse(schedule), without, mode)
    others = "growing" if block in ("memory", "all_gather") else "serial:collective"
    if block != "gemm":
        assert predict(problem, Schedule.parse(others), without, "queued") > 0


def test_a_mode_that_is_none() -> None:
    with pytest.raises(ValueError, match="queued, idle"):
        predict(problem_of(1, 1), NAMED["serial"], TOY, "graph")


# Invariants.

SHAPES = ((1000, 3000, 4096), (4096, 512, 2048), (256, 8192, 1024), (8, 8, 8))


@pytest.mark.parametrize("machine", [TOY, MESH], ids=["switch", "mesh"])
@pytest.mark.parametrize("name", EVERY)
def test_never_below_what_the_work_alone_takes(name: str, machine: Machine) -> None:
    schedule, world = Schedule.parse(name), 4
    for rows, n, k in SHAPES:
        problem = problem_of(*[rows] * world, n=n, k=k, dtype="bfloat16")
        queued, idle = (predict(problem, schedule, machine, mode) for mode in MODES)
        assert machine.gemm and machine.topology
        # Full waves of the shapes that are really multiplied, and every byte at full speed.
        least_work = problem.flops / (machine.gemm.peak * machine.gemm.efficiency)
        nbytes = rows * k * 2 * (world - 1)
        links = world - 1 if machine is MESH else 1
        assert queued >= least_work
        if schedule.mover != "collective":
            assert queued >= nbytes / (machine.topology.bandwidth * links)
        assert idle >= queued


@pytest.mark.parametrize("name", EVERY)
def test_more_bandwidth_is_never_slower(name: str) -> None:
    problem = problem_of(*[1000] * 4, n=3000, k=4096, dtype="bfloat16")
    for machine in (TOY, MESH):
        assert machine.topology and machine.copies and machine.kernel_copies
        times = []
        for factor in (1.0, 2.0, 4.0, 100.0):
            faster = [
                replace(one, curve=tuple((size, factor * rate) for size, rate in one.curve))
                for one in (machine.copies, machine.kernel_copies)
            ]
            wide = replace(machine.topology, bandwidth=factor * machine.topology.bandwidth)
            better = replace(machine, topology=wide, copies=faster[0], kernel_copies=faster[1])
            times.append(predict(problem, Schedule.parse(name), better))
        # Products of several lanes may be served in a less lucky order when data comes earlier.
        most = 1.05 if Schedule.parse(name).compute > 1 else 1.0 + 1e-9
        assert all(b <= a * most for a, b in zip(times, times[1:], strict=False)), times


# One rank that stands for all.


@pytest.mark.parametrize("machine", [TOY, MESH], ids=["switch", "mesh"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 8])
def test_one_rank_stands_for_all(world: int, machine: Machine) -> None:
    problem = problem_of(*[1000] * world, n=3000, k=4096, dtype="bfloat16")
    for name in EVERY:
        schedule = Schedule.parse(name)
        # Steps without the own piece fall in two at another place on every rank.
        differs = schedule.grouping == "fused" and not schedule.uniform and world > 2
        every = plans(problem, schedule)
        for mode in MODES:
            whole = simulate(every, machine, mode).stop_s
            rel = 1e-2 if differs else 1e-9
            assert predict(problem, schedule, machine, mode) == pytest.approx(whole, rel=rel), name


#: Names for operators whose product travels, beside those of all.
SENDING = (
    *EVERY,
    "ring",
    "ring:pieces=3,tail=2",
    "shard-overlap:beta",
    "growing:beta,compute=2",
    "uniform-fused-1d:pieces=3,pull",
    "uniform-fused-1d:pieces=2,tail=2,compute=2,copy=3",
    "hetero-fused-1d:pieces=2,beta,tail=2",
)


def family(operator: str, world: int) -> Problem:
    """An equal problem of any operator; the blocks of all-to-alls are smaller."""
    if OPERATORS[operator].blocks:
        return Problem.of_blocks(operator, [[300] * world] * world, 3000, 4096, "bfloat16")
    return Problem(operator, (1000,) * world, 3000, 4096, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("machine", [TOY, MESH], ids=["switch", "mesh"])
@pytest.mark.parametrize("world", [2, 3, 4, 6])
@pytest.mark.parametrize("operator", [name for name in OPERATORS if name != "all_gather_matmul"])
def test_one_rank_stands_for_all_in_the_whole_family(
    operator: str, world: int, machine: Machine
) -> None:
    problem = family(operator, world)
    for schedule in map(Schedule.parse, SENDING):
        if refusal(problem, schedule):
            continue
        differs = schedule.grouping == "fused" and not schedule.uniform and world > 2
        every = plans(problem, schedule)
        for mode in MODES:
            whole = simulate(every, machine, mode).stop_s
            # Products that fall in two at another place on every rank reach the peers at other
            # times. On a switch all ranks are simulated then.
            rel = 3e-2 if differs and machine is MESH else 1e-2 if differs else 1e-9
            found = predict(problem, schedule, machine, mode)
            assert found == pytest.approx(whole, rel=rel), (str(schedule), mode)


@pytest.mark.parametrize("machine", [TOY, MESH], ids=["switch", "mesh"])
@pytest.mark.parametrize("world", [2, 3, 4, 6])
@pytest.mark.parametrize("product", ["matmul", "transposed_matmul"])
def test_equal_blocks_take_as_long_as_shards_of_as_many_rows(
    product: str, world: int, machine: Machine
) -> None:
    """A rank receives and multiplies as much; what it publishes for pulls is more."""
    blocks = family(f"all_to_all_{product}", world)
    rows = (blocks.block(0, 0),) * world
    shards = Problem(f"all_gather_{product}", rows, blocks.n, blocks.k, blocks.dtype)
    for schedule in map(Schedule.parse, SENDING):
        if schedule.pull or schedule.mover == "collective" or refusal(blocks, schedule):
            continue
        one, two = (predict(asked, schedule, machine) for asked in (blocks, shards))
        assert one == pytest.approx(two), str(schedule)


@pytest.mark.parametrize("operator", OPERATORS)
def test_no_operator_is_below_what_its_work_alone_takes(operator: str) -> None:
    problem = family(operator, 4)
    assert TOY.gemm and TOY.topology
    least_work = problem.flops / (TOY.gemm.peak * TOY.gemm.efficiency)
    width = problem.n if problem.kind.scatters else problem.k
    nbytes = 3 * problem.block(0, 1) * width * 2 * (2 if problem.kind.returns else 1)
    for schedule in map(Schedule.parse, SENDING):
        if refusal(problem, schedule):
            continue
        queued, idle = (predict(problem, schedule, TOY, mode) for mode in MODES)
        assert queued >= least_work and idle >= queued
        if schedule.mover != "collective":
            assert queued >= nbytes / TOY.topology.bandwidth


@pytest.mark.parametrize("operator", OPERATORS)
def test_unequal_blocks_of_any_operator_are_all_simulated(operator: str) -> None:
    if OPERATORS[operator].blocks:
        table = [[500, 1, 200], [0, 0, 900], [40, 1, 0]]
        problem = Problem.of_blocks(operator, table, 2000, 1024, "bfloat16")
    else:
        problem = Problem(operator, (3000, 0, 500), 2000, 1024, "bfloat16")
    for name in SENDING:
        if not refusal(problem, Schedule.parse(name)):
            found = predict(problem, Schedule.parse(name), TOY)
            assert found == seconds(problem, name, TOY) > 0, name


def test_unequal_shards_are_all_simulated() -> None:
    problem = problem_of(3000, 10, 0, 500, n=2000, k=4096, dtype="bfloat16")
    for name in EVERY:
        if name == "serial:collective":
            continue
        found = predict(problem, Schedule.parse(name), TOY)
        assert found == seconds(problem, name, TOY)
    few = problem_of(10, 10, 3000, 500, n=2000, k=4096, dtype="bfloat16")
    assert predict(few, NAMED["shard-overlap"], TOY) > 0


@pytest.mark.parametrize("name", EVERY)
def test_nothing_to_do_takes_no_time_but_the_hosts(name: str) -> None:
    schedule = Schedule.parse(name)
    empty = problem_of(0, 0, n=8, k=8)
    assert predict(empty, schedule, TOY) == 0.0
    assert TOY.host and predict(empty, schedule, TOY, "idle") < 20 * TOY.host.call
    for problem in (problem_of(8, 8, n=0, k=8), problem_of(8, 8, n=8, k=0)):
        assert predict(problem, schedule, TOY) == pytest.approx(seconds(problem, name, TOY))
    alone = problem_of(256, n=512, k=512)
    assert TOY.gemm and predict(alone, NAMED["serial"], TOY) == pytest.approx(
        TOY.gemm.seconds(256, 512, 512, itemsize=4)
    )


def test_every_step_is_in_the_timeline() -> None:
    problem = problem_of(*[64] * 4, n=32, k=16)
    for name in EVERY:
        made = plans(problem, Schedule.parse(name))
        found = simulate(made, TOY)
        assert found.title == made[0].schedule
        for plan_, bars in zip(made, found.ranks, strict=True):
            labels = sorted(bar.label for bar in bars if bar.kind != "wait")
            assert labels == sorted(step.label for step in in_parts(plan_).steps)
            starts = [bar.stop_s if bar.kind == "wait" else bar.start_s for bar in bars]
            assert starts == sorted(starts)


# Speed, and the same figures everywhere.


def _best_of(count: int, problem: Problem, schedule: Schedule) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        predict(problem, schedule, TOY)
        times.append(time.perf_counter() - start)
    return min(times)


def test_simulating_is_fast_enough_to_search() -> None:
    large = problem_of(*[4096] * 8, n=2048, k=8192, dtype="bfloat16")
    cut_finely = _best_of(3, large, Schedule.parse("hetero-unfused-1d:pieces=64"))
    usual = _best_of(5, large, Schedule.parse("hetero-fused-1d:pieces=4"))
    print(f"8 ranks x 64 pieces: {cut_finely * 1e3:.1f} ms; 8 x 4: {usual * 1e3:.2f} ms")
    assert cut_finely < 0.4  # 11 ms on a quiet core
    assert usual < 0.02  # 1 ms


@pytest.mark.parametrize(("machine", "links"), [(TOY, 1), (MESH, 3)])
def test_what_is_summed_at_the_peers_travels_as_by_the_copy_kernel(
    machine: Machine, links: int
) -> None:
    """All of it through one port, or over a link from each peer; own part and result stay here."""
    assert machine.kernel_copies is not None and machine.memory is not None
    rows, n = 4096, 1024
    part, copies = rows * n * 2, machine.kernel_copies  # bfloat16
    problem = Problem("matmul_all_reduce", (rows // 4,) * 4, n, 0, "bfloat16")
    far = 3 * part / links
    wanted = copies.latency + far / copies.rate(far) + 2 * part / machine.memory.bandwidth

    def seconds(copies: Copies) -> float:
        return predict(problem, Schedule.parse("one-shot"), replace(machine, kernel_copies=copies))

    assert seconds(copies) == pytest.approx(wanted, rel=1e-6)
    later = seconds(replace(copies, latency=copies.latency + 1e-5))
    assert later == pytest.approx(wanted + 1e-5, rel=1e-6)
    # Nothing is forked and joined around it.
    assert seconds(replace(copies, latency=1.0, in_front=copies.latency + 1e-5)) == later


@pytest.mark.slow
def test_every_process_gets_the_same_bits() -> None:
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import test_simulate as t; print(t.bits())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == bits()


def bits() -> str:
    """Every last bit of some predictions."""
    shapes = (problem_of(*[1000] * 4, n=3000, k=4096), problem_of(7, 900, 0, n=300, k=512))
    return " ".join(
        predict(problem, Schedule.parse(name), machine, mode).hex()
        for problem in shapes
        for name in EVERY
        if name != "serial:collective"
        for machine in (TOY, MESH)
        for mode in MODES
    )


# Files and commands.


def test_timelines_survive_a_file() -> None:
    made = [simulate([plan(problem_of(4, n=2, k=2), NAMED["serial"], 0)], TOY), Timeline("", ())]
    assert loads(dumps(made), "x") == made


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSON"),
        ("[]", "ficco-timelines"),
        ('{"format": "ficco-timelines-1", "timelines": [{"title": "x"}]}', "ranks"),
        (dumps([Timeline("x", ((Bar("l", "l", "nap", 0.0, 1.0),),))]), "nap"),
    ],
)
def test_a_damaged_file_of_timelines_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)broken.json.*{said}"):
        loads(text, "broken.json")


SIZES = ("--m", "512", "--n", "256", "--k", "128")


@pytest.mark.slow
def test_simulate_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("x.csv", "x.svg", "x.trace.json", "x.json")]
    options = [f"--{o}={f}" for o, f in zip(("csv", "draw", "trace", "timelines"), files)]  # noqa: B905
    command = ["simulate", "growing", "shard-overlap:compute=2", *SIZES, "--world", "4"]
    assert cli.run([*command, *options]) == 0
    said = capsys.readouterr().out
    assert "growing" in said and "of ideal" in said and "simulated on h200-4" in said
    assert all(file.stat().st_size > 100 for file in files)
    assert cli.run([*command, "--mode", "idle", "--json"]) == 0
    rows = {row["candidate"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"gemm", "copies", "ideal", "growing", "shard-overlap:compute=2"} <= rows.keys()
    assert rows["growing"]["ms"] >= rows["ideal"]["ms"] > 0
    picture = tmp_path / "both.svg"
    plot = ["plot", str(files[3]), str(files[3]), "--out", str(picture)]
    assert cli.run([*plot, "--only", "growing", "--trace", str(tmp_path / "t.json")]) == 0
    assert picture.read_text().count("growing") >= 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["slowing", *SIZES], "shard-overlap"),
        (["--mode", "graph"], "'queued'"),
        (["--set", "nothing"], "measured"),
        (["--machine", "abacus"], "abacus"),
        (["--world", "0"], "--world"),
        (["--m", "64"], "--n"),
        (["--set", "measured", *SIZES], "one of"),
        (["--draw", "x.png"], "one shape"),
        (["--draw", "x", *SIZES], "--draw: required a file with one of the suffixes"),
        (["--draw", "x.", *SIZES], "png"),
        (["auto"], "got 'auto', which stands for one of them; `ficco explain`"),
    ],
)
def test_bad_input_of_simulate(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["simulate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_bad_input_of_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "good.json"
    good.write_text(dumps([simulate(plans(problem_of(4, 4, n=2), NAMED["serial"]), TOY)]))
    for arguments, said in (
        ([str(tmp_path / "none.json")], "cannot be read"),
        ([str(good), "--only", "what"], "--only"),
        ([str(good), "--ranks", "7"], "0 to 1"),
        ([str(good), "--ranks", "a"], "0 to 1"),
    ):
        assert cli.run(["plot", *arguments, "--out", str(tmp_path / "x.png")]) == 2
        assert said in capsys.readouterr().err


def test_copies_are_sends_or_receives() -> None:
    for name, way in (("growing", "send"), ("growing:pull", "receive")):
        found = simulate(plans(problem_of(4, 4, 4, n=2), Schedule.parse(name)), TOY)
        ways = {bar.way for bars in found.ranks for bar in bars if bar.kind == "copy"}
        assert ways == {way}
        assert not any(bar.way for bars in found.ranks for bar in bars if bar.kind != "copy")


def test_a_picture_says_what_it_shows_on_one_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales: list[float] = []
    real = drawing._draw_one
    monkeypatch.setattr(
        drawing, "_draw_one", lambda *args: (scales.append(args[3]), real(*args))[1]
    )
    short, long = (problem_of(rows, rows, n=2) for rows in (4, 8))
    made = [simulate(plans(one, NAMED["serial"]), TOY) for one in (short, long)]
    made.append(simulate(plans(long, NAMED["growing"]), TOY, "idle"))
    text = draw(made, tmp_path / "x.svg", ranks=[1]).read_text()
    assert len(scales) == 3 and set(scales) == {max(one.stop_s for one in made)}
    assert text.count(str(short)) == 1 and text.count(str(long)) == 2  # in the panels' titles
    assert text.count("time after the call began on the rank [") == 1 and "rank 1" in text
    text = draw(made[1:], tmp_path / "y.svg", ranks=[1]).read_text()
    assert text.count(str(long)) == 1 and f"{long}, rank 1 of 2" in text
    for mode in ("queued", "idle"):
        assert text.count(f"simulated on {TOY.name}, {mode}") == 1
    assert "simulated" not in draw([replace(made[0], source="")], tmp_path / "z.svg").read_text()


def test_timelines_of_different_calls_stand_side_by_side(tmp_path: Path) -> None:
    made = simulate(plans(problem_of(4, 4, n=2), NAMED["serial"]), TOY)
    empty = Timeline("", ())
    assert draw([made, empty], tmp_path / "x.svg", columns=2).stat().st_size > 1000
    events = json.loads(trace([made], tmp_path / "x.json").read_text())["traceEvents"]
    assert {event.get("cat") for event in events} >= {"matmul", "copy"}
