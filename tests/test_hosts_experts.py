"""Expert-parallel layers over several hosts, which share no memory."""

from __future__ import annotations

import signal
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Rank, on_ranks, run
from subjects import SUBJECTS, Case, compare
from test_hosts import assert_all_learn, bereaved, crossing, host_of

import ficco
from ficco.problems.experts import EXPERT_OPERATORS, ExpertLayer
from ficco.proof import check
from ficco.schedules import Schedule
from ficco.schedules.experts import expert_plans
from ficco.simulate.timeline import work

SUBJECT = SUBJECTS["experts"]
SCHEDULES = [*SUBJECT.schedules(4, hosts=2)[1:], "hetero-unfused-1d:order=peer"]


def layer_of(
    operator: str, hosts: int, local: int, experts: int = 2, capacity: int = 4, **more: Any
) -> ExpertLayer:
    dispatches, combines = EXPERT_OPERATORS[operator]
    sizes = experts, capacity, 8 * dispatches, 6, 5 * combines
    function = "silu" if dispatches and combines else ""
    return ExpertLayer(operator, hosts * local, *sizes, "float32", function, hosts=hosts, **more)


@settings(max_examples=40)
@given(data=st.data())
def test_plans_of_any_sizes_are_proven(data: st.DataObject) -> None:
    """Each row for another host is sent once to each rank that multiplies it, and returns once."""
    operator = data.draw(st.sampled_from(list(EXPERT_OPERATORS)))
    hosts, local = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    sizes = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    facts = ["gathers", "exact", "keeps", *(["indexed"] if operator == "experts" else [])]
    options = dict.fromkeys(data.draw(st.sets(st.sampled_from(facts))), True)
    layer = layer_of(operator, hosts, local, *sizes, **options)
    proven = expert_plans(layer, Schedule.parse(data.draw(st.sampled_from(SCHEDULES))))
    check(proven)
    rows = (layer.world - local) * layer.experts * layer.capacity
    for plan in proven if hosts > 1 else ():
        copies = [move for step in plan.steps if (move := step.copy)]
        assert all(copy.dst.rank // local == plan.rank // local for copy in copies)
        moves = crossing(plan.steps)
        sent = sum(move.batch * move.src.rows for move in moves if move.src.rank == plan.rank)
        received = sum(move.batch * move.src.rows for move in moves if move.dst.rank == plan.rank)
        assert sent == received == rows * (layer.dispatches + layer.combines), layer


@pytest.mark.parametrize("hosts", [1, 2])
def test_timelines_have_the_bytes_of_whole_batches(hosts: int) -> None:
    layer = layer_of("experts", hosts, 4 // hosts)
    for plan in expert_plans(layer, Schedule.parse("growing")):
        sent = [work(plan, step)[1] for step in plan.steps if step.op in ("copy", "network")]
        expected = layer.experts * layer.capacity * (layer.k + layer.n) * 4
        assert sum(sent) == (layer.world - 1) * expected


def over(at: Rank, hosts: int, called: Callable[..., Any], *args: Any) -> None:
    """Call ``called(at, *args)`` on a rank of one of ``hosts`` hosts."""
    with host_of(at, hosts):
        called(at, *args)


def _case(at: Rank) -> Case:
    """A case without a capacity: ranks exchange row counts, through the store between hosts."""
    case = SUBJECT.case(Random(0), at.world, "uneven", "cpu")
    return case.on(facts={"capacity": None, "activation": "relu"})


@on_ranks(4)
def test_routings_made_before_their_calls(at: Rank) -> None:
    case, turns = _case(at), range(9)
    with host_of(at, 2):
        indices = [SUBJECT.constants(case, at.rank, turn) for turn in turns]
        routings = [ficco.route(tensor, case.sizes[0] * at.world) for (tensor,) in indices]
        for turn, routing in enumerate(routings):
            operands_of_ranks = [SUBJECT.make(case, rank, turn) for rank in range(at.world)]
            operands = [tensor.to(torch.float32) for tensor in operands_of_ranks[at.rank]]
            (result,) = SUBJECT.call(case, operands, [routing])
            expected = SUBJECT.together(case, operands_of_ranks, turn)[at.rank][0]
            compare(result, expected, SUBJECT, f"turn {turn}")


def layered(at: Rank, group: Any) -> None:
    case = _case(at)
    operands = [operand.to(torch.float32) for operand in SUBJECT.make(case, at.rank, 0)]
    SUBJECT.call(case, operands, SUBJECT.constants(case, at.rank, 0))


def test_every_survivor_learns_of_a_lost_host() -> None:
    victims = (2, 3)
    options: Any = {"fresh": True, "catch": True, "lost": victims}
    outcomes = run(4, bereaved, victims, signal.SIGKILL, 2, None, layered, **options)
    assert_all_learn(outcomes, victims)
