"""Copies that one launch carries out: their choice, the enqueued operations, predicted times."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
from test_plan import PROBLEM, SENT, SUMMED, TAKEN, TURNED, served
from test_simulate import GIVEN, ONE, bars_of, multiply, own_plan, problem_of, send

from ficco.hip_kernels.launch import MAX_ENDS
from ficco.machine import Copies, Host
from ficco.plan import Plan, Region, Signal, Step, Transfer, together
from ficco.plan.parts import MOST, TOGETHER_BYTES
from ficco.problems.products import Problem
from ficco.runtime.calls import compile
from ficco.schedules import Schedule, plan, plans
from ficco.simulate import simulate
from ficco.tools.tune.communication import launches
from ficco.tools.tune.effort import GPU


def runs(name: str, problem: Problem = PROBLEM, batched: float = 0) -> list[tuple[str, ...]]:
    rank_plan = plan(problem, Schedule.parse(name), 1)
    joined = [run for run in together(rank_plan, batched) if len(run) > 1]
    return [tuple(rank_plan.steps[i].label for i in run) for run in joined]


def test_one_piece_for_each_peer_is_one_launch() -> None:
    assert runs("serial:kernel") == [("1.0>0", "1.0>3", "1.0>2", "a>staging")]
    assert runs("growing:kernel") == [("1.0>0", "1.0>3", "1.0>2")]
    pieces = [tuple(f"1.{piece}>{peer}" for peer in (0, 3, 2)) for piece in (0, 1)]
    assert runs("hetero-fused-1d:pieces=2,kernel") == pieces
    for problem in (SUMMED, SENT):
        assert [len(run) for run in runs("serial:kernel", problem)] == [3]
    # A launch carries out at most MAX_ENDS copies.
    assert MOST == MAX_ENDS
    problem = replace(PROBLEM, rows=(4,) * (MOST + 3))
    assert [len(run) for run in runs("serial:kernel", problem)] == [MOST, 3]
    # Large copies are launched separately, except before a product that waits for all of them.
    for rows in (0, 1):
        each = TOGETHER_BYTES // (2 * 4096 * 2) + rows  # 8 KiB a row, two peers
        problem = Problem("all_gather_matmul", (each,) * 3, 8, 4096, "bfloat16")
        assert [len(run) for run in runs("growing:kernel", problem)] == [2] * (not rows)
        assert [len(run) for run in runs("serial:kernel", problem)] == [3]


def test_copies_that_are_not_joined() -> None:
    assert runs("serial") == runs("growing") == runs("serial:collective") == []
    assert runs("serial:kernel,copy=3") == []  # a lane for each peer
    assert runs("serial:kernel,pull") == []  # each waits for the peer whose shard it is
    assert runs("serial:kernel", replace(SUMMED, rows=(16, 8, 4, 36))) == []  # of different sizes
    assert runs("ring:kernel", SUMMED) == []  # each waits for the previous one
    # Consecutive pieces for one peer stay separate: the tuner measures single copies with them.
    same = "hetero-unfused-1d:pieces=4,order=peer,kernel"
    assert all(len({label[-1] for label in run}) == len(run) for run in runs(same))
    assert max(map(len, runs(same)), default=0) <= 2


def test_copies_by_engines_are_joined_up_to_a_size() -> None:
    """Blocks of 16 rows of 64 bytes, or less, to different peers."""
    pieces = [tuple(f"1.{piece}>{peer}" for peer in (0, 3, 2)) for piece in (0, 1)]
    assert runs("hetero-fused-1d:pieces=2", batched=512) == pieces
    assert runs("hetero-fused-1d:pieces=2", batched=511) == []
    (several,) = runs("serial", replace(SUMMED, rows=(16, 8, 4, 36)), 1e9)  # of different sizes
    assert len(several) == 3
    for name in ("uniform-fused-2d:pieces=2", "shard-overlap:pull", "shard-overlap:copy=3"):
        assert runs(name, batched=1e9) == [], name
    assert runs("growing:kernel", batched=1e9) == runs("growing:kernel")


def test_copies_that_depend_on_their_order_are_not_joined() -> None:
    def joined(*ends: tuple[str, int, int], lane: str = "copy0") -> bool:
        """Whether two copies on rank 0 are one run. An end: buffer, rank and first row."""
        one, to_one, two, to_two = (Region(name, r, row, row + 4, 0, 1) for name, r, row in ends)
        steps = (Step(Transfer(*pair), lane, "") for pair in ((one, to_one), (two, to_two)))
        return together(own_plan(*steps, problem=problem_of(*[100] * 3)), 16) == ((0, 1),)

    sent = ("a", 0, 0), ("staging", 1, 0)
    received = ("a", 1, 0), ("staging", 0, 8)
    assert joined(*sent, ("a", 0, 0), ("staging", 2, 0))
    # The caller's stream may be the legacy stream, which takes no batch.
    assert not joined(*sent, ("a", 0, 0), ("staging", 2, 0), lane="compute0")
    assert joined(*received, ("a", 2, 0), ("staging", 0, 4))
    assert joined(*received, ("staging", 0, 12), ("staging", 2, 0))
    # The second copy reads a row that the first writes, writes it, or overwrites its source.
    assert not joined(*received, ("staging", 0, 11), ("staging", 2, 0))
    assert not joined(*received, ("a", 2, 0), ("staging", 0, 5))
    assert not joined(*sent, ("a", 2, 0), ("a", 0, 3))


@pytest.mark.parametrize("problem", [PROBLEM, SUMMED, SENT, TURNED, TAKEN])
def test_every_step_once_and_in_order(problem: Problem) -> None:
    schedules = [Schedule.parse(name) for name in served(problem)]
    schedules += [replace(one, mover="kernel") for one in schedules if one.grouping != "tiled"]
    for schedule in schedules:
        own = plan(problem, schedule, 2)
        engines = schedule.mover == "dma"
        grouped = together(own, 1e9 * engines)
        assert sorted(i for run in grouped for i in run) == list(range(len(own.steps)))
        assert [run[0] for run in grouped] == sorted(run[0] for run in grouped)
        for run in grouped:
            steps = [own.steps[i] for i in run]
            lane = [i for i, step in enumerate(own.steps) if step.lane == steps[0].lane]
            first = lane.index(run[0])
            assert tuple(lane[first : first + len(run)]) == run  # nothing is overtaken
            if len(run) > 1:
                assert steps[0].copy is not None
                works = [step.work for step in steps]
                assert all(isinstance(w, Transfer) and w.mover == schedule.mover for w in works)
                assert not engines or {step.lane[:4] for step in steps} == {"copy"}
                assert not any(s.waits or s.clears for s in steps[1:])
                assert all(set(s.after) <= set(steps[0].after) for s in steps)


def test_joined_copies_are_enqueued_once_and_posted_afterwards() -> None:
    rank_plan = plan(PROBLEM, Schedule.parse("growing:kernel"), 1)
    (run,) = (run for run in together(rank_plan) if len(run) > 1)
    engine = mock.MagicMock()
    compile(rank_plan, engine, None, timed=True)
    verbs = [verb for verb, *_ in engine.mock_calls]
    assert verbs.count("copies") == 1 and "copy" not in verbs
    at, stamps = verbs.index("copies"), len(run)
    assert engine.mock_calls[at].args[1:] == (run,)
    assert verbs[at - stamps : at] == verbs[at + 1 : at + 1 + stamps] == ["stamp"] * stamps
    assert verbs[at + 1 + stamps] == "post"
    step, posts = engine.mock_calls[at + 1 + stamps].args[1:]
    assert step == run[-1]
    assert list(posts) == [signal for i in run for signal in rank_plan.steps[i].posts]
    assert {signal.waiter for signal in posts} == {0, 2, 3}


@pytest.mark.parametrize("world", [2, 3, 4, 8, 18])
def test_rows_of_copies_that_the_tuner_fits(world: int) -> None:
    for size, pieces in product(GPU.sizes, GPU.pieces):
        peers = world - 1
        assert launches(size, pieces, world, "dma") == (size, pieces * peers)
        nbytes, count = launches(size, pieces, world, "kernel")
        assert nbytes * count == pytest.approx(size * pieces * peers)
        if peers <= MOST and size * peers <= TOGETHER_BYTES:
            assert (nbytes, count) == (size * peers, pieces)
        elif 2 * size > TOGETHER_BYTES:
            assert (nbytes, count) == (size, pieces * peers)


def three_sends(mover: str = "kernel") -> list[Plan]:
    """Rank 0 sends 8 bytes to each of three peers. The first peer waits for its bytes."""
    problem = problem_of(*[100] * 4)
    signals = [Signal("ready", 0, peer, 0, peer) for peer in (1, 2, 3)]
    steps = [send("copy0", 0, s.waiter, 8, mover=mover, posts=(s,)) for s in signals]
    all_plans = [replace(own_plan(problem=problem), rank=rank) for rank in range(4)]
    all_plans[0] = own_plan(*steps, problem=problem)
    waits = send("copy0", 1, 0, 4, waits=(signals[0],))
    all_plans[1] = replace(own_plan(waits, problem=problem), rank=1)
    return all_plans


def test_joined_copies_are_predicted_as_one() -> None:
    kernel = Copies(8, 3.0, 5.0, ((8.0, 1.0), (24.0, 2.0)), GIVEN)
    machine = replace(ONE, kernel_copies=kernel, topology=replace(ONE.topology, bandwidth=9.0))
    joined = simulate(three_sends(), machine)
    # At the rate of 24 bytes, without gaps; the signal is seen 3 s after the last copy ends.
    assert bars_of(joined, 0, "copy") == [(0, 4), (4, 8), (8, 17)]
    assert bars_of(joined, 1, "copy")[0][0] == 15
    separate = simulate(three_sends("dma"), replace(machine, copies=kernel))
    assert bars_of(separate, 0, "copy") == [(0, 13), (13, 26), (26, 39)]
    assert bars_of(separate, 1, "copy")[0][0] == 11
    # On a CPU no copies are joined.
    machine = replace(machine, accelerator="cpu")
    assert bars_of(simulate(three_sends(), machine), 0, "copy")[2] == (26, 39)


def test_the_host_enqueues_them_once() -> None:
    host = Host(0.0, 0.0, 0.0, 100.0, 10.0, GIVEN)
    quick = Copies(8, 0.0, 0.0, ((1.0, 1.0),), GIVEN)
    machine = replace(ONE, host=host, copies=quick, kernel_copies=quick)
    kernel, dma = (simulate(three_sends(mover), machine, "idle") for mover in ("kernel", "dma"))
    # Joined copies begin once all are enqueued. Separate ones wait for the host, as their posts do.
    assert bars_of(kernel, 0, "copy") == [(100, 108), (108, 116), (116, 124)]
    assert bars_of(dma, 0, "copy") == [(100, 108), (210, 218), (320, 328)]
    # The run is enqueued at its first step, even with steps of other lanes in between.
    slow = replace(machine, host=replace(host, matmul=1000.0))
    first, *others = three_sends()[0].steps
    plan_of_0 = replace(three_sends()[0], steps=(first, multiply("compute0", 1), *others))
    simulated = simulate([plan_of_0, *three_sends()[1:]], slow, "idle")
    assert bars_of(simulated, 0, "copy")[-1] == (116, 124)

    # Own rows that go with copies take no time.
    problem = replace(PROBLEM, rows=(16,) * 4)
    for mode, mover in product(("queued", "idle"), ("", ":kernel")):
        simulated = simulate(plans(problem, Schedule.parse(f"serial{mover}")), machine, mode)
        ((start, stop),) = bars_of(simulated, 0, "place")
        assert start == stop if mover else start < stop
