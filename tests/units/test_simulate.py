"""The simulator: effects computed by hand, invariants, and one rank as representative of all."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ranks import SLOW

from ficco.errors import ConfigError
from ficco.machine import Collective, Contention, Copies, Gemm, Host, Machine, Memory, Topology
from ficco.machine.model import flat
from ficco.plan import Plan, Product, Products, Reduction, Region, Signal, Step, Transfer, in_parts
from ficco.problems.products import OPERATORS, Problem
from ficco.schedules import NAMED, Schedule, plan, plans, refusal
from ficco.simulate import MODES, predict, simulate
from ficco.simulate.events import LIVE
from ficco.simulate.timeline import Bar, Timeline, dumps, loads, work
from ficco.tools.bench import draw as drawing
from ficco.tools.bench.draw import draw

#: All rates are 1, so that seconds can be counted: a copy takes its bytes, a product its
#: operations, a placement its bytes twice.
ONE = flat(1.0, 1.0, 1.0)
GIVEN = ONE.topology.provenance

TOY = Machine(
    name="toy",
    accelerator="toy",
    ranks=4,
    topology=Topology("switch", 400e9, GIVEN, sharing=0.7),
    copies=Copies(3, 12e-6, 3e-6, ((1e5, 6e10), (1e6, 2e11), (1e8, 3.8e11)), GIVEN),
    kernel_copies=Copies(8, 8e-6, 1e-6, ((1e5, 9e10), (1e8, 3.2e11)), GIVEN),
    all_gather=Collective(((1e6, 4e-5), (1e8, 1e-3)), GIVEN),
    gemm=Gemm(
        peak=9e14, units=132, launch=2e-6, efficiency=0.8, start=5e-6, bandwidth=3e12,
        provenance=GIVEN, tile_rows=(128,), tile_cols=(256,),
    ),
    memory=Memory(1e11, 4e12, GIVEN),
    contention=Contention(1.06, 1.1, 1.3, 1.2, GIVEN),
    host=Host(3e-5, 2e-5, 9e-6, 2e-6, 1.5e-6, GIVEN),
)  # fmt: skip
MESH = replace(TOY, topology=Topology("mesh", 64e9, GIVEN, sharing=0.9))

COMMON = (
    *(name for name in NAMED if name != "ring" and not NAMED[name].sums_in_place),
    *("serial:collective", "serial:kernel", "growing:tail=2,compute=2"),
    *("shard-overlap:pull,copy=2", "shard-overlap:tail=3,compute=2"),
    *("hetero-unfused-1d:copy=7,compute=2", "uniform-unfused-1d:kernel,compute=2"),
    *("hetero-unfused-2d:pull,copy=4,compute=3", "hetero-fused-1d:pieces=4+2+1,pull"),
)


def problem_of(*rows: int, n: int = 1, k: int = 1, dtype: str = "float32") -> Problem:
    return Problem("all_gather_matmul", rows, n, k, dtype)


def seconds(problem: Problem, name: str, machine: Machine, mode: str = "queued") -> float:
    return simulate(plans(problem, Schedule.parse(name)), machine, mode).stop_s


def bars_of(timeline: Timeline, rank: int, kind: str) -> list[tuple[float, float]]:
    bars = (bar for bar in timeline.ranks[rank] if bar.kind == kind)
    return [(round(bar.start_s, 9), round(bar.stop_s, 9)) for bar in bars]


# Plans whose seconds can be counted. A shard of one row of 4 bytes takes 4 s to copy at a rate
# of 1; its product takes 2 * n * k operations.


def own_plan(*steps: Step, problem: Problem | None = None) -> Plan:
    problem = problem or problem_of(100, n=100, k=1)
    spec = problem.specification
    a, _, out = *spec.operands, spec.results[0]
    extra = (
        a._replace(name="staging", memory="slot", leaves=False),
        a._replace(name="publish", memory="slot"),
        out._replace(name="sum", memory="local", dtype="float32"),
        out._replace(name="partial", memory="local"),
    )
    return Plan(problem, "by hand", 0, steps, (*spec.operands, *spec.results, *extra), 0)


def multiply(lane: str, rows: int, n: int = 1, k: int = 1, batch: int = 1, **rest: object) -> Step:
    a, out = Region("a", 0, 0, rows, 0, k), Region("out", 0, 0, rows, 0, n)
    product = Product(a, Region("b", 0, 0, k, 0, n), out, batch=batch)
    return Step(Products((product,)), lane, "x", **rest)  # type: ignore[arg-type]


def send(
    lane: str, src: int, dst: int, nbytes: int, terms: int = 0, mover: str = "dma", **rest: object
) -> Step:
    source = Region("a", src, 0, nbytes // 4, 0, 1)
    target = Region("staging", dst, 0, nbytes // 4, 0, 1)
    return Step(Transfer(source, target, terms, mover=mover), lane, "c", **rest)  # type: ignore[arg-type]


def two(*steps: Step, problem: Problem | None = None) -> list[Plan]:
    """Return plans of two ranks, the second without steps."""
    problem = problem or problem_of(100, 100)
    first = own_plan(*steps, problem=problem)
    return [first, replace(first, rank=1, steps=())]


TILES = replace(ONE, gemm=Gemm(1.0, 2, 10.0, 1.0, 0.0, float("inf"), GIVEN))


def test_sums_take_turns_with_products() -> None:
    """A sum of 6 s starts after the running product. It also starts after the next product of its
    lane, unless that product waits for the sum."""
    part = Region("staging", 0, 0, 5, 0, 1)  # 3 x 20 bytes at 10 a second
    add = Step(Reduction((part, part), (1, 2), part), "reduce0", "sum", after=(0,))
    first, second = (multiply("compute0", rows, k=2) for rows in (2, 4))
    three = [multiply(f"compute{lane}", 2, k=2) for lane in (0, 1, 0)]
    for latency, steps, summed, multiplied in (
        (0.0, (*three, add), 16 + 6, [8, 16, 16 + 6 + 8]),
        (1.0, (first, add, second), 24 + 6, [8, 24]),
        (1.0, (first, add, second._replace(after=(1,))), 9 + 6, [8, 9 + 6 + 16]),
    ):
        machine = replace(
            TILES, gemm=replace(TILES.gemm, launch=0.0), memory=Memory(1e9, 10.0, GIVEN, latency)
        )
        timeline = simulate([own_plan(*steps)], machine)
        assert bars_of(timeline, 0, "reduce") == [(8, summed)]
        assert [stop for _, stop in bars_of(timeline, 0, "matmul")] == multiplied


def test_a_product_whose_result_is_sent_runs_after_another_ready_product() -> None:
    products = (multiply("compute0", 2, k=2), multiply("compute1", 4, k=2))
    sends = [send("copy0", 0, 1, 4, after=(number,)) for number in range(2)]
    in_order = [(0, 8), (0, 24)]
    for sent, ends in (((), in_order), (sends[:1], [(0, 24), (0, 16)]), (sends, in_order)):
        assert bars_of(simulate(two(*products, *sent), TILES), 0, "matmul") == ends
    # Copies wait for the later product, so a second lane gains nothing with two products.
    problem = Problem("matmul_reduce_scatter", (1024,) * 2, 1024, 1024, "bfloat16")
    one_lane, two_lanes = (
        predict(problem, Schedule.parse(f"shard-overlap{x}"), TOY) for x in ("", ":compute=2")
    )
    assert two_lanes > one_lane


def test_a_copy_right_before_a_product_is_noticed_sooner() -> None:
    ready = Signal("ready", 0, 0, 0, 0)
    for lane, noticed, begin in (("compute0", 1.0, 9), ("copy0", 1.0, 13), ("compute0", None, 13)):
        copies = Copies(9, 5.0, 0.0, ((1.0, 1.0),), GIVEN, noticed)
        copy = send(lane, 0, 1, 8, mover="kernel", posts=(ready,))
        two_plans = two(copy, multiply("compute0", 1, waits=(ready,)))
        timeline = simulate(two_plans, replace(ONE, kernel_copies=copies))
        assert bars_of(timeline, 0, "matmul") == [(begin, begin + 2)]
    # Kernel copies have a separate curve.
    step = send("copy0", 0, 1, 8, mover="kernel")
    for slow, seconds in ((Copies(9, 0.0, 0.0, ((1.0, 0.5),), GIVEN), 16), (None, 8)):
        assert simulate(two(step), replace(ONE, kernel_copies=slow)).stop_s == seconds


def on_ranks(*rank_plans: Plan) -> list[Plan]:
    return [replace(rank_plan, rank=rank) for rank, rank_plan in enumerate(rank_plans)]


def test_a_rank_has_no_more_copies_in_flight_than_engines() -> None:
    problem = problem_of(*[100] * 4)
    steps = [send(f"copy{i}", 0, i + 1, 40) for i in range(3)]
    all_plans = on_ranks(own_plan(*steps, problem=problem), *[own_plan(problem=problem)] * 3)
    copies = Copies(2, 0.0, 5.0, ((1.0, 1.0),), GIVEN)
    machine = replace(ONE, topology=Topology("mesh", 1.0, GIVEN), copies=copies)
    # The third copy waits until the first copy and its gap end.
    assert bars_of(simulate(all_plans, machine), 0, "copy") == [(0, 45), (0, 45), (45, 90)]


def test_products_and_copies_slow_each_other_down_while_both_run() -> None:
    factors = Contention(2.0, 4.0, 3.0, 5.0, GIVEN)
    machine = replace(ONE, contention=factors)
    # Products take twice as long and copies four times, until 10 operations are done at 20 s. By
    # then 5 of 12 bytes have moved; the rest takes 7 s. Kernel copies slow down as collectives do.
    for mover, multiplied, copied in (("dma", 20, 27), ("kernel", 30, 36)):
        two_plans = two(multiply("compute0", 5), send("copy0", 0, 1, 12, mover=mover))
        timeline = simulate(two_plans, machine)
        assert bars_of(timeline, 0, "matmul") == [(0, multiplied)]
        assert bars_of(timeline, 0, "copy") == [(0, copied)]


def test_a_collective_begins_when_the_last_rank_reaches_it() -> None:
    problem = problem_of(4, 4)
    all_plans = plans(problem, Schedule.parse("serial:collective"))
    late = own_plan(multiply("compute0", 50), *all_plans[0].steps, problem=problem)
    timeline = simulate([late, all_plans[1]], ONE)
    assert [bars_of(timeline, rank, "collective")[0][1] for rank in (0, 1)] == [116, 116]


def test_a_collective_takes_its_own_curve_or_that_of_the_all_gather() -> None:
    schedule = Schedule.parse("serial:collective")
    blocks = {"all_gather_matmul": "all_gather", "matmul_reduce_scatter": "reduce_scatter"}
    for name, block in (blocks | {"matmul_all_reduce": "all_reduce"}).items():
        problem = Problem(name, (25,) * 4, n=7, k=3, dtype="float32")
        nbytes = 25 * (problem.n if problem.kind.scatters else problem.k) * 4
        fast = replace(flat(1e30, 1.0, 1.0, ranks=4), **{block: Collective(((1.0, 8.0),), GIVEN)})
        assert predict(problem, schedule, fast) == pytest.approx(8.0 * nbytes)
        if block != "all_gather":  # receives three blocks, or six to sum and return
            twice = 2 if problem.kind.returns else 1
            predicted = predict(problem, schedule, replace(fast, **{block: None}))
            assert predicted == pytest.approx(twice * 3 * nbytes)
            only = replace(fast, all_gather=None)
            assert predict(problem, schedule, only) == pytest.approx(8.0 * nbytes)
            with pytest.raises(ValueError, match="'all_gather'"):
                predict(problem, schedule, replace(only, **{block: None}))


def test_an_all_to_all_takes_as_long_as_the_rank_with_most_to_send_or_receive() -> None:
    machine, schedule = flat(1e30, 1.0, 1.0, ranks=3), Schedule.parse("serial:collective")
    # Rank 0 keeps 50 rows and sends 3; rank 2 receives 11.
    table = [[50, 1, 2], [0, 0, 9], [4, 1, 0]]
    for name in (name for name, kind in OPERATORS.items() if kind.blocks):
        width = 2 if OPERATORS[name].scatters else 5
        problem = Problem.of_blocks(name, table, n=2, k=5, dtype="float32")
        assert predict(problem, schedule, machine) == pytest.approx(11 * width * 4)
        received = [
            sum(work(plan_, step)[1] for step in plan_.steps if step.op == "collective")
            for plan_ in plans(problem, schedule)
        ]
        assert received == [4 * width * 4, 2 * width * 4, 11 * width * 4]


def test_idle_calls_wait_for_their_host_in_enqueue_order() -> None:
    host = Host(100.0, 7.0, matmul=10.0, copy=3.0, signal=1.0, provenance=GIVEN)
    machine = replace(ONE, host=host)
    ready = Signal("ready", 0, 0, 0, 0)
    two_plans = two(
        multiply("compute0", 2),  # enqueued at 110
        send("copy0", 0, 1, 4, posts=(ready,)),  # at 113, its post at 114
        multiply("compute0", 1, waits=(ready,)),  # at 125
        multiply("compute1", 1),  # at 135
    )
    timeline = simulate(two_plans, machine, "idle")
    assert bars_of(timeline, 0, "matmul") == [(110, 114), (125, 127), (135, 137)]
    assert bars_of(timeline, 0, "copy") == [(113, 117)]
    twice = multiply("compute0", 1)
    three = own_plan(twice._replace(work=Products(twice.products * 2)), multiply("compute1", 1))
    # The third product is enqueued at 130.
    assert bars_of(simulate([three], machine, "idle"), 0, "matmul") == [(110, 114), (130, 132)]
    serial = plans(problem_of(1, 1, n=1), Schedule.parse("serial:collective"))
    assert bars_of(simulate(serial, machine, "idle"), 0, "collective") == [(7, 11)]
    slow = replace(machine, host=replace(host, call=host.call + 20.0))
    late = [(130, 134), (145, 147), (155, 157)]
    assert bars_of(simulate(two_plans, slow, "idle"), 0, "matmul") == late
    assert simulate(two_plans, slow).stop_s == simulate(two_plans, machine).stop_s


def test_a_host_that_replays_calls_delays_all_steps_alike() -> None:
    """But for products whose tiles wait, which are launched after the rest."""
    problem = problem_of(*[4096] * 4, n=2048, k=4096)
    alone = Host(1e-3, 3e-3, 0.0, 0.0, 0.0, GIVEN)
    replays = replace(TOY, host=alone)
    for name in ("serial:collective", "growing", "hetero-fused-1d:pieces=2", "tiled"):
        predicted = predict(problem, Schedule.parse(name), replays, "idle")
        assert predicted == pytest.approx(seconds(problem, name, replays, "idle"), rel=1e-12), name
    late = {
        tiled: predict(
            problem, NAMED["tiled"], replace(TOY, host=replace(alone, tiled=tiled)), "idle"
        )
        for tiled in (None, 0.0, LIVE * alone.call, 2e-3)
    }
    assert late[None] == late[LIVE * alone.call] and late[0.0] < late[None] < late[2e-3]


def test_ranks_that_begin_late_meet_at_the_ports_of_their_peers() -> None:
    host = Host(0.0, 0.0, 0.0, 0.0, 0.0, GIVEN, skew=30.0)
    late = replace(ONE, host=host, topology=Topology("switch", 1.0, GIVEN, sharing=0.8))
    two_plans = two(multiply("compute0", 2), problem=problem_of(1, 1))
    two_plans[1] = replace(two_plans[0], rank=1)
    timeline = simulate(two_plans, late, "idle")
    assert [bars_of(timeline, rank, "matmul") for rank in (0, 1)] == [[(0, 4)], [(30, 34)]]
    assert simulate(two_plans, late, "queued").stop_s == 4.0
    # Copies of 100 bytes between peers take turns if the ranks are in step; else two share a port.
    problem = problem_of(*[25] * 4, n=0, k=1)
    for name in ("shard-overlap", "hetero-unfused-1d"):
        predicted = predict(problem, Schedule.parse(name), late, "idle")
        assert predicted == seconds(problem, name, late, "idle") > 300 + 30
    on_mesh = replace(late, topology=Topology("mesh", 1.0, GIVEN))
    assert predict(problem, NAMED["shard-overlap"], on_mesh, "idle") == 300 + 30


def test_waits_of_the_caller_and_of_slots() -> None:
    """The caller waits for all lanes except sync. Slots cost no wait. Deadlocks are refused."""
    problem, late = problem_of(100, 100), Signal("ready", 1, 0, 0, 0)
    retire = Step(None, "sync", "retire", waits=(late,))
    first = own_plan(multiply("compute0", 1), retire, problem=problem)
    second = own_plan(send("copy0", 1, 0, 40, posts=(late,)), problem=problem)
    timeline = simulate(on_ranks(first, second), ONE)
    assert timeline.stop_s == 40.0  # the second rank's copy
    assert Timeline("", (timeline.ranks[0], ())).stop_s == 2.0
    released = Signal("released", 1, 0, 0, 0)
    assert simulate(two(multiply("compute0", 1, waits=(released,))), ONE).stop_s == 2.0
    with pytest.raises(ValueError, match="for ever"):
        simulate(two(multiply("compute0", 1, waits=(late,))), ONE)


def test_a_missing_block_of_a_machine_is_named() -> None:
    problem = problem_of(64, 64, n=64, k=64, dtype="bfloat16")
    for block, schedule, mode in (
        ("gemm", "serial", "queued"), ("copies", "growing", "queued"),
        ("topology", "growing", "queued"), ("contention", "growing", "queued"),
        ("memory", "uniform-fused-2d", "queued"), ("all_gather", "serial:collective", "queued"),
        ("host", "growing", "idle"),
    ):  # fmt: skip
        without = replace(TOY, **{block: None})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"toy.*'{block}'"):
            predict(problem, Schedule.parse(schedule), without, mode)
        served = "growing" if block in ("memory", "all_gather") else "serial:collective"
        assert block == "gemm" or predict(problem, Schedule.parse(served), without, "queued") > 0
    with pytest.raises(ValueError, match="queued, idle"):
        predict(problem, NAMED["serial"], TOY, "graph")


@pytest.mark.parametrize("machine", [TOY, MESH], ids=["switch", "mesh"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_times_are_never_below_those_of_the_work(operator: str, machine: Machine) -> None:
    for first, sizes in enumerate(((1000, 3000, 4096), (8, 8, 8))):
        problem = family(operator, 4, *sizes)
        # Full waves of the multiplied shapes, and all bytes at full bandwidth.
        least_work = problem.flops / (machine.gemm.peak * machine.gemm.efficiency)
        width = problem.n if problem.kind.scatters else problem.k
        nbytes = 3 * problem.block(0, 1) * width * 2 * (2 if problem.kind.returns else 1)
        links = 3 if machine is MESH else 1
        for schedule in schedules_of(problem)[first::2]:
            queued, idle = (predict(problem, schedule, machine, mode) for mode in MODES)
            assert queued >= least_work and idle >= queued, str(schedule)
            if schedule.mover != "collective":
                assert queued >= nbytes / (machine.topology.bandwidth * links), str(schedule)


def test_more_bandwidth_is_never_slower() -> None:
    problem = family("all_gather_matmul", 4)
    for machine, schedule in product((TOY, MESH), map(Schedule.parse, COMMON)):
        times = []
        for factor in (1.0, 2.0, 4.0, 100.0):
            faster = [
                replace(copies, curve=tuple((size, factor * rate) for size, rate in copies.curve))
                for copies in (machine.copies, machine.kernel_copies)
            ]
            wide = replace(machine.topology, bandwidth=factor * machine.topology.bandwidth)
            better = replace(machine, topology=wide, copies=faster[0], kernel_copies=faster[1])
            times.append(predict(problem, schedule, better))
        # Earlier data may lead to a slower order of products on several lanes.
        tolerance = 1.05 if schedule.compute > 1 else 1.0 + 1e-9
        assert all(b <= a * tolerance for a, b in pairwise(times)), (str(schedule), times)


#: Names for operators that send products, and the names for all operators.
SENDING = (
    *(*COMMON, "ring", "ring:pieces=3,tail=2", "shard-overlap:beta", "growing:beta,compute=2"),
    *("uniform-fused-1d:pieces=3,pull", "uniform-fused-1d:pieces=2,tail=2,compute=2,copy=3"),
    "hetero-fused-1d:pieces=2,beta,tail=2",
)


def family(operator: str, world: int, rows: int = 1000, n: int = 3000, k: int = 4096) -> Problem:
    if OPERATORS[operator].blocks:
        table = [[rows * 3 // 10] * world] * world
        return Problem.of_blocks(operator, table, n, k, "bfloat16")
    return Problem(operator, (rows,) * world, n, k, "bfloat16")


def schedules_of(problem: Problem) -> list[Schedule]:
    return [schedule for schedule in map(Schedule.parse, SENDING) if not refusal(problem, schedule)]


@pytest.mark.parametrize(("world", "machine"), [
    (1, TOY), (2, TOY), pytest.param(3, TOY, marks=SLOW), pytest.param(3, MESH, marks=SLOW),
], ids=["1", "2", "3", "3 on a mesh"])  # fmt: skip
@pytest.mark.parametrize("operator", OPERATORS)
def test_one_rank_is_representative_of_all(operator: str, world: int, machine: Machine) -> None:
    problem = family(operator, world)
    half = slice(int(machine is MESH), None, 2 if world > 2 else 1)  # of each machine
    for schedule in schedules_of(problem)[half]:
        differs = schedule.grouping == "fused" and not schedule.uniform and world > 2
        all_plans = plans(problem, schedule)
        for mode in MODES:
            simulated = simulate(all_plans, machine, mode).stop_s
            # Ranks whose products are split at different places send at different times. On a
            # switch all ranks of such a schedule are simulated.
            rel = 3e-2 if differs and machine is MESH else 1e-2 if differs else 1e-9
            predicted = predict(problem, schedule, machine, mode)
            assert predicted == pytest.approx(simulated, rel=rel), (str(schedule), mode)


@pytest.mark.parametrize("operator", OPERATORS)
def test_unequal_blocks_of_any_operator_are_all_simulated(operator: str) -> None:
    if OPERATORS[operator].blocks:
        table = [[500, 1, 200], [0, 0, 900], [40, 1, 0]]
        problem = Problem.of_blocks(operator, table, 2000, 1024, "bfloat16")
    else:
        problem = Problem(operator, (3000, 0, 500), 2000, 1024, "bfloat16")
    for schedule in schedules_of(problem):
        predicted = predict(problem, schedule, TOY)
        assert predicted == seconds(problem, str(schedule), TOY) > 0, str(schedule)


def test_empty_calls_take_only_time_of_the_host() -> None:
    for name, schedule in ((name, Schedule.parse(name)) for name in COMMON):
        empty = problem_of(0, 0, n=8, k=8)
        assert predict(empty, schedule, TOY) == 0.0
        assert predict(empty, schedule, TOY, "idle") < 20 * TOY.host.call
        for problem in (problem_of(8, 8, n=0, k=8), problem_of(8, 8, n=8, k=0)):
            assert predict(problem, schedule, TOY) == pytest.approx(seconds(problem, name, TOY))
    single = predict(problem_of(256, n=512, k=512), NAMED["serial"], TOY)
    assert single == pytest.approx(TOY.gemm.seconds(256, 512, 512, itemsize=4))


def test_every_step_is_in_the_timeline() -> None:
    problem = problem_of(*[64] * 4, n=32, k=16)
    for name in COMMON:
        all_plans = plans(problem, Schedule.parse(name))
        timeline = simulate(all_plans, TOY)
        assert timeline.title == all_plans[0].schedule
        directions = {(bar.kind == "copy", bar.way) for bars in timeline.ranks for bar in bars}
        direction = "receive" if Schedule.parse(name).pull else "send"
        assert directions <= {(False, ""), (True, direction)}, name
        for plan_, bars in zip(all_plans, timeline.ranks, strict=True):
            labels = sorted(bar.label for bar in bars if bar.kind != "wait")
            assert labels == sorted(step.label for step in in_parts(plan_).steps)
            starts = [bar.stop_s if bar.kind == "wait" else bar.start_s for bar in bars]
            assert starts == sorted(starts)


def test_timelines_survive_a_file_and_damaged_files_raise() -> None:
    saved = [simulate([plan(problem_of(4, n=2, k=2), NAMED["serial"], 0)], TOY), Timeline("", ())]
    assert loads(dumps(saved), "x") == saved
    nap = Timeline("x", ((Bar("l", "l", "nap", 0.0, 1.0),),))
    no_ranks = '{"format": "ficco-timelines-1", "timelines": [{"title": "x"}]}'
    damaged = {"{": "JSON", "[]": "ficco-timelines", no_ranks: "ranks", dumps([nap]): "nap"}
    for text, message in damaged.items():
        with pytest.raises(ConfigError, match=f"(?s)broken.json.*{message}"):
            loads(text, "broken.json")


def test_a_picture_has_titles_and_one_scale(tmp_path: Path, monkeypatch: Any) -> None:
    one = mock.Mock(side_effect=drawing._draw_one)
    monkeypatch.setattr(drawing, "_draw_one", one)
    short, long = (problem_of(rows, rows, n=2) for rows in (4, 8))
    timelines = [simulate(plans(problem, NAMED["serial"]), TOY) for problem in (short, long)]
    timelines.append(simulate(plans(long, NAMED["growing"]), TOY, "idle"))
    text = draw(timelines, tmp_path / "x.svg", ranks=[1]).read_text()
    scales = [call.args[3] for call in one.call_args_list]
    assert scales == [max(timeline.stop_s for timeline in timelines)] * 3
    assert text.count(str(short)) == 1 and text.count(str(long)) == 2  # in the panels' titles
    assert text.count("time after the call began on the rank [") == 1 and "rank 1" in text
    for mode in ("queued", "idle"):
        assert f"simulated on {TOY.name}, {mode}" in text
    nameless = [replace(timelines[0], source=""), Timeline("", ())]
    assert "simulated" not in draw(nameless, tmp_path / "z.svg", columns=2).read_text()
