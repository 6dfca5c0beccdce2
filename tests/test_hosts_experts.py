"""Expert-parallel layers whose ranks are on several hosts, which share no memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import test_experts
import torch
from experts import Layer
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Rank, caught, run
from test_experts import SCHEDULES
from test_hosts import PATIENCE_S, assert_all_learn, host_of, losing, problem_of

import ficco
from ficco.machine import Machine, find
from ficco.plan import Plan, Step
from ficco.problems.experts import EXPERT_OPERATORS, ExpertLayer
from ficco.proof import PlanError, check
from ficco.schedules import Schedule, plans
from ficco.schedules.experts import expert_plans
from ficco.simulate import simulate
from ficco.simulate.timeline import work

#: Hosts, and ranks of each.
WORLDS = [(2, 2), (3, 2), (2, 1), (1, 4), (4, 1), (2, 3)]


def layer_of(
    operator: str, hosts: int, local: int, experts: int = 2, capacity: int = 4, **more: Any
) -> ExpertLayer:
    dispatches, combines = EXPERT_OPERATORS[operator]
    sizes = experts, capacity, 8 * dispatches, 6, 5 * combines
    function = "silu" if dispatches and combines else ""
    return ExpertLayer(operator, hosts * local, *sizes, "float32", function, hosts=hosts, **more)


# Plans.


@pytest.mark.parametrize(("hosts", "local"), WORLDS)
def test_plans_are_proven(hosts: int, local: int) -> None:
    for operator, gathers in product(EXPERT_OPERATORS, (False, True)):
        for experts, capacity in ((1, 5), (3, 4)):
            for more in ({}, {"exact": True}, {"indexed": operator == "experts", "keeps": True}):
                layer = layer_of(operator, hosts, local, experts, capacity, gathers=gathers, **more)
                for name in (*SCHEDULES[1:], "hetero-unfused-1d:order=peer"):
                    plans = expert_plans(layer, Schedule.parse(name))
                    check(plans)
                    assert crosses_once(plans), layer


def crosses_once(plans: list[Plan]) -> bool:
    """Whether every row of another host is sent to each rank that multiplies it, and comes back,
    once; and whether copies stay within a host."""
    layer = plans[0].problem
    assert isinstance(layer, ExpertLayer)
    local = layer.world // layer.hosts
    ways = layer.dispatches + layer.combines
    each = (layer.world - local) * layer.experts * layer.capacity * ways
    for plan in plans:
        moves = [move for step in plan.steps for move in step.moves]
        for step in plan.steps:
            if step.op == "copy":
                assert step.transfer.dst.rank // local == plan.rank // local
        sent = sum(move.batch * move.src.rows for move in moves if move.src.rank == plan.rank)
        come = sum(move.batch * move.src.rows for move in moves if move.dst.rank == plan.rank)
        if not sent == come == each:
            return False
    return True


@pytest.mark.parametrize("hosts", [1, 2])
def test_timelines_have_the_bytes_of_whole_batches(hosts: int) -> None:
    layer = layer_of("experts", hosts, 4 // hosts)
    for plan in expert_plans(layer, Schedule.parse("growing")):
        sent = [work(plan, step)[1] for step in plan.steps if step.op in ("copy", "network")]
        each = layer.experts * layer.capacity * (layer.k + layer.n) * 4
        assert sum(sent) == (layer.world - 1) * each


@settings(max_examples=40)
@given(
    st.sampled_from(list(EXPERT_OPERATORS)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from(SCHEDULES[1:]),
    st.booleans(),
    st.booleans(),
)
def test_plans_of_any_sizes_are_proven(
    operator: str,
    ranks: tuple[int, int],
    experts: int,
    capacity: int,
    name: str,
    gathers: bool,
    exact: bool,
) -> None:
    layer = layer_of(operator, *ranks, experts, capacity, gathers=gathers, exact=exact)
    check(expert_plans(layer, Schedule.parse(name)))


def _leaves_early(steps: list[Step]) -> None:
    """What goes back does so before it is made."""
    index = next(i for i, s in enumerate(steps) if s.moves and s.after)
    steps[index] = steps[index]._replace(after=())


def _multiplies_early(steps: list[Step]) -> None:
    crossed = {i for i, step in enumerate(steps) if step.op == "network"}
    index = next(i for i, s in enumerate(steps) if s.op == "matmul" and crossed & {*s.after})
    steps[index] = steps[index]._replace(after=())


def _sends_less(steps: list[Step]) -> None:
    index = next(i for i, step in enumerate(steps) if step.moves)
    steps[index] = steps[index]._replace(moves=steps[index].moves[:-1])


def _lands_elsewhere(steps: list[Step]) -> None:
    index = next(i for i, step in enumerate(steps) if step.moves)
    first, *rest = steps[index].moves
    dst = first.dst._replace(row=first.dst.row + 1, row_stop=first.dst.row_stop + 1)
    steps[index] = steps[index]._replace(moves=(first._replace(dst=dst), *rest))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_leaves_early, "before|not ordered|written|read"),
        (_multiplies_early, "before|not ordered|written|read"),
        (_sends_less, "sends other pieces than rank"),
        (_lands_elsewhere, "sends other pieces than rank"),
    ],
)
def test_wrong_plans_are_found(change: Callable[[list[Step]], None], why: str) -> None:
    plans = expert_plans(layer_of("experts", 2, 2), Schedule.parse("growing"))
    check(plans)
    steps = list(plans[1].steps)
    change(steps)
    plans[1] = replace(plans[1], steps=tuple(steps))
    with pytest.raises(PlanError, match=why):
        check(plans)


def test_a_wire_that_is_slow_is_what_a_layer_waits_for() -> None:
    machine = find("h100-8", None)
    assert isinstance(machine, Machine)
    sizes = 4, 512, 4096, 2816, 4096
    one = ExpertLayer("experts", 16, *sizes, "bfloat16", "silu", hosts=2)
    schedule = Schedule.parse("shard-overlap")
    far, near = (
        simulate(expert_plans(layer, schedule), machine).stop_s
        for layer in (one, replace(one, hosts=1))
    )
    assert far > 1.2 * near


#: Network steps of a rank of 3 hosts of 2, each way, and the ranks with which each exchanges.
TOGETHER = {
    "serial": (1, 4),
    "uniform-fused-1d:pieces=2": (2, 4),
    "growing": (2, 2),
    "shard-overlap": (4, 1),
    "uniform-unfused-1d:pieces=2": (8, 1),
    "uniform-unfused-1d:pieces=2,order=peer": (8, 1),
}


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("operator", ["experts", "matmul_all_to_all", "all_to_all_matmul"])
def test_what_is_multiplied_together_crosses_in_one_step(operator: str, name: str) -> None:
    schedule, (steps, peers), ways = Schedule.parse(name), TOGETHER[name], 1
    if operator == "experts":
        made, ways = expert_plans(layer_of(operator, 3, 2), schedule), 2
    else:
        made = plans(replace(problem_of(operator, 3, 2, "equal"), n=64, k=64), schedule)
    check(made)
    for plan in made:
        found = [step.moves for step in plan.steps if step.op == "network"]
        assert [len(moves) for moves in found] == [2 * peers] * steps * ways
        for moves in found:
            assert len({move.dst.rank for move in moves if move.src.rank == plan.rank}) == peers


@pytest.mark.parametrize(("name", "steps"), [("serial", 1), ("shard-overlap", 8)])
def test_moves_of_a_step_wait_for_the_latency_once(name: str, steps: int) -> None:
    machine = find("h100-8", None)
    assert isinstance(machine, Machine) and machine.network is not None
    layer = ExpertLayer("experts", 16, 4, 8, 64, 32, 64, "bfloat16", "silu", hosts=2)
    made = expert_plans(layer, Schedule.parse(name))
    late, soon = (
        simulate(made, replace(machine, network=replace(machine.network, latency=latency))).stop_s
        for latency in (2e-3, 1e-3)
    )
    assert late - soon == pytest.approx(2 * steps * 1e-3, rel=0.01)  # there and back


# Calls.


def over(at: Rank, hosts: int, called: Callable[..., Any], *args: Any) -> None:
    """Call ``called(at, *args)`` on a rank of one of so many hosts."""
    with host_of(at, hosts):
        called(at, *args)


LAYERS = {
    (2, 2): [
        Layer((6, 3, 0, 9), experts=8, top_k=3),
        Layer((19, 5, 0, 8), 8, 2, 8, 16, 24, True, "few", torch.bfloat16),
        Layer((4, 4, 4, 4), experts=4, routes="one"),
    ],
    (3, 2): [Layer((6, 3, 0, 9, 1, 2), experts=6, top_k=2, gated=True)],
    (2, 1): [Layer((7, 0), experts=2, top_k=1, gated=True), Layer((0, 0))],
    (4, 1): [Layer((5, 5, 5, 5), experts=4, routes="few", gated=True)],
    (1, 4): [Layer((6, 3, 0, 9), experts=8, top_k=3)],
}


@pytest.mark.parametrize("routes", ["spread", "one", "few"])
def test_every_pair_is_served_or_counted_as_dropped(routes: str) -> None:
    layer = Layer((5, 0, 9, 1), 8, 2, 4, 3, 5, True, routes)
    for schedule in ("growing", "uniform-fused-1d:pieces=2"):
        run(4, over, 2, test_experts.routed, layer, schedule)


def test_kinds_of_calls_by_turns() -> None:
    run(2, over, 2, test_experts.again)


def _many_routings(at: Rank) -> None:
    """Routings that are made long before they are used."""
    layer = Layer((6, 3, 1, 4), experts=4)
    mine = [test_experts.data(layer, at.rank, i) for i in range(9)]
    made = [ficco.route(one.indices, 4) for one in mine]
    for i, (one, routing) in enumerate(zip(mine, made, strict=True)):
        found = test_experts.call(at, layer, replace(one, indices=routing), i, capacity=None)
        assert torch.equal(found, test_experts.plain(one, *test_experts.weights_of(layer, i)))


def test_routings_that_are_made_before_they_are_used() -> None:
    run(4, over, 2, _many_routings)


def _differs(at: Rank) -> Any:
    layer = Layer((6, 3, 1, 4), experts=4)
    with host_of(at, 2):
        given = test_experts.data(layer, at.rank)
        return caught(lambda: test_experts.call(at, layer, given, capacity=3 + (at.rank == 3)))


def test_ranks_of_different_hosts_that_disagree() -> None:
    for failure in run(4, _differs, fresh=True):
        assert failure.type == "RankMismatch" and "capacity=4" in failure.text, failure


def _bereaved(at: Rank, victims: Sequence[int], capacity: int | None) -> Any:
    """What a rank learns of others that are lost."""
    with ficco.options(timeout_s=PATIENCE_S, on_timeout="raise"):
        os.environ["FICCO_HOST"] = f"host-{at.rank // 2}"
        layer = Layer((6, 3, 1, 4), experts=4)
        mine = test_experts.data(layer, at.rank)
        once = partial(test_experts.call, at, layer, mine, capacity=capacity)
        for _ in range(3):
            once()
        return losing(at, victims, signal.SIGKILL, lambda: [once() for _ in range(3)])


@pytest.mark.parametrize(("victims", "capacity"), [((3,), 5), ((2, 3), None), ((1,), None)])
def test_every_survivor_learns_of_lost_ranks(
    victims: tuple[int, ...], capacity: int | None
) -> None:
    where: Any = {"fresh": True, "catch": True, "lost": victims}
    assert_all_learn(run(4, _bereaved, victims, capacity, **where), victims)
