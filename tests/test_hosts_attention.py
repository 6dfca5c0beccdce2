"""Attention to a sequence sharded over several hosts: plans, faults, and the model."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Rank, gave_up, run
from subjects import SUBJECTS
from test_attention import problem_of
from test_hosts import CARD, assert_all_learn, bereaved, described

import ficco
from ficco.dma.messages import GlooLinks
from ficco.errors import InvalidArgument
from ficco.heuristics import decide, families
from ficco.problems.products import OPERATORS, Problem
from ficco.proof import check
from ficco.schedules import Schedule, StagingTooSmall, plans
from ficco.schedules.attention import attention_plans

PROJECTED = [name for name in SUBJECTS["ulysses_project"].schedules(4, hosts=2) if name != "auto"]


@pytest.mark.parametrize("operator", [name for name, facts in OPERATORS.items() if facts.blocks])
def test_plans_of_projections_are_proven(operator: str) -> None:
    channels = [8, 8], [1, 2, 3, 4], [6] * 6, [8, 4, 12] * 2
    for turn, schedule in enumerate(PROJECTED):
        own, hosts = channels[turn % 4], (2, 2, 3, 2)[turn % 4]
        wide = operator == "matmul_all_to_all"
        table = [own if wide else [count] * len(own) for count in own]
        options: Any = {"transposed": True, "hosts": hosts}
        problem = Problem.of_blocks(operator, table, 12, 20, "bfloat16", **options)
        check(plans(problem, Schedule.parse(schedule)))


def test_schedules_that_cannot_cross_hosts_are_refused() -> None:
    forward = problem_of(4, 8, hosts=2)
    for name in ("growing:pull", "serial:pull", "ring"):
        action = "pass rows on" if name == "ring" else "read memory of their peers"
        reason = f"ranks {action}.*, which no rank can do between hosts; take growing"
        for problem in (forward, forward.gradient()):
            with pytest.raises(ValueError, match=reason):
                attention_plans(problem, Schedule.parse(name))
    with pytest.raises(StagingTooSmall, match="workspace_bytes: required at least"):
        attention_plans(forward, Schedule.parse("growing"), staging_bytes=2_000)
    with pytest.raises(InvalidArgument, match="a divisor of 4 ranks, got 3"):
        replace(forward, hosts=3)


def attends(at: Rank, group: Any) -> None:
    """Attention and its gradients."""
    shards = [torch.ones(1, 4, 8, 16, requires_grad=True) for _ in "qkv"]
    ficco.all_gather_attention(*shards, schedule="shard-overlap").sum().backward()


def _loses(at: Rank) -> Any:
    """The outcome on a rank when all connections of rank 3 with other hosts end."""
    connect = GlooLinks.__init__

    def connected(links: GlooLinks, engine: Any) -> None:
        before = set(os.listdir("/proc/self/fd"))
        connect(links, engine)
        wires.extend({*os.listdir("/proc/self/fd")} - before)

    with mock.patch.object(GlooLinks, "__init__", connected):
        return bereaved(at, (3,), _cut, 2, None, attends)


#: Descriptors that were opened to connect to other hosts.
wires: list[str] = []


def _cut() -> None:
    """Shut down the connections among ``wires``."""
    for descriptor in wires:
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=os.dup(int(descriptor)))
            connection.getpeername()  # spares a listening socket: its thread would end the process
            connection.shutdown(socket.SHUT_RDWR)


def test_a_lost_wire_is_named() -> None:
    outcomes = run(4, _loses, fresh=True, catch=True)
    assert_all_learn(outcomes, [3])
    assert gave_up(outcomes[3][0])


@pytest.mark.parametrize(
    ("hosts", "masks"), [(2, {}), (3, {"causal": True, "placement": "head-tail"})]
)
def test_auto_goes_by_the_network(hosts: int, masks: dict[str, Any]) -> None:
    on, family = described("h100-8", network=CARD, ranks=4), families.GATHERED
    problem = problem_of(4 * hosts, 4096, 1, 32, 8, 128, hosts=hosts, **masks)
    decision = decide(problem, machine=on)
    assert decision.source == "model" and not decision.schedule.pull
    seconds = {candidate.schedule: candidate.queued for candidate in decision.candidates}
    assert {*seconds} == {name for name in family.compared if "pull" not in name}
    assert seconds[str(decision.schedule)] == min(seconds.values())
    assert all(candidate.share < 1 for candidate in decision.candidates)
    # With a slow network card a call takes as long as the rows that a rank receives on its rail.
    slow = replace(on, network=replace(CARD, bandwidth=1e8))
    wire_s = (hosts - 1) * problem.rows * problem.kv_cols * 2 / 1e8
    bound = family.bounds(problem, slow, "queued")["copies"]
    assert bound == pytest.approx(wire_s, rel=0.01)
    assert bound < family.seconds(problem, Schedule.parse("growing"), slow) < 1.1 * bound


def test_without_a_network_the_model_says_what_it_lacks() -> None:
    decision = decide(problem_of(16, 64, hosts=2), machine=described("h100-8", network=None))
    assert decision.source == "fallback" and "lacks network" in decision.reason
    assert str(decision.schedule) == "growing" and decision.candidates == ()
