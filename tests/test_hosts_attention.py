"""Attention over a sequence that ranks of several hosts share: plans, calls, gradients, faults."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import test_attention
import test_projections
import test_ulysses
from cases import equal
from cases import exact as exact_gather
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Failure, Rank, caught, gave_up, run
from test_attention import AttentionCase, cases
from test_hosts import CARD, PATIENCE_S, SLACK_S, TOPOLOGIES, host_of, network, onward

import ficco
from ficco.dma.gloo import GlooLinks
from ficco.errors import InvalidArgument
from ficco.heuristics import decide
from ficco.heuristics.families import BY_HEADS, GATHERED
from ficco.machine import Machine, find
from ficco.plan import Plan, Step, render
from ficco.problems.attention import AttentionProblem
from ficco.problems.heads import HeadsProblem
from ficco.problems.mask import PLACEMENTS
from ficco.proof import PlanError, check
from ficco.schedules import Schedule, plans
from ficco.schedules.attention import attention_plans
from ficco.schedules.heads import heads_plans

SCHEDULES = [name for name in test_attention.SCHEDULES if "pull" not in name and name != "ring"]

# Plans.


def asked(case: AttentionCase, hosts: int, local: int) -> list[AttentionProblem]:
    """A call and its gradients, with and without what the forward keeps."""
    one = replace(case, dtype="bfloat16").problem(hosts * local, hosts)
    return [one, replace(one, keeps=True), one.gradient(), one.gradient(True)]


@pytest.mark.parametrize(("hosts", "local"), TOPOLOGIES)
def test_plans_are_proven(hosts: int, local: int) -> None:
    for turn, case in enumerate([*cases(hosts * local), AttentionCase(0)]):
        for problem in asked(case, hosts, local):
            for name in SCHEDULES[turn % 2 :: 2]:
                made = attention_plans(problem, Schedule.parse(name))
                check(made)
                render(made[0])


@given(
    st.sampled_from(TOPOLOGIES),
    st.integers(1, 10),
    st.sampled_from(SCHEDULES),
    st.sampled_from(PLACEMENTS),
    st.none() | st.integers(0, 60),
    st.lists(st.integers(0, 120), max_size=5),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_plans_of_any_sizes_are_proven(
    topology: tuple[int, int],
    half: int,
    schedule: str,
    placement: str,
    window: int | None,
    inner: list[int],
    which: int,
) -> None:
    length = 2 * half * topology[0] * topology[1]
    bounds = tuple(sorted({0, length, *(min(one, length) for one in inner)})) if inner else ()
    causal = window is not None or half % 2 > 0
    case = AttentionCase(2 * half, 4, 1, 8, 1, "bfloat16", causal, window, bounds, placement)
    check(attention_plans(asked(case, *topology)[which], Schedule.parse(schedule)))


@pytest.mark.parametrize(("hosts", "local"), TOPOLOGIES)
def test_plans_by_heads_are_proven(hosts: int, local: int) -> None:
    names = test_ulysses.SCHEDULES
    for turn, case in enumerate(test_ulysses.cases(hosts * local)):
        for kind in test_ulysses.KINDS[turn % 2 :: 2]:
            problem = HeadsProblem(case.problem(hosts * local, hosts), *kind)
            check(heads_plans(problem, Schedule.parse(names[turn % len(names)])))


@pytest.mark.parametrize("schedule", test_projections.SCHEDULES)
@pytest.mark.parametrize("operator", test_projections.OPERATORS)
def test_plans_of_projections_are_proven(operator: str, schedule: str) -> None:
    for hosts, channels in ((2, [8, 8]), (2, [1, 2, 3, 4]), (3, [6] * 6), (2, [8, 4, 12] * 2)):
        problem = test_projections.problem_of(operator, channels, hosts=hosts)
        check(plans(problem, Schedule.parse(schedule)))


@pytest.mark.parametrize("name", ["growing:pull", "serial:pull", "ring"])
def test_schedules_that_cannot_cross_are_refused(name: str) -> None:
    for problem in asked(AttentionCase(8), 2, 2):
        does = "pass rows on" if name == "ring" else "read memory of their peers"
        match = f"ranks {does}.*, which no rank can do between hosts; take growing"
        with pytest.raises(ValueError, match=match):
            attention_plans(problem, Schedule.parse(name))


def test_hosts_divide_the_ranks() -> None:
    with pytest.raises(InvalidArgument, match="a divisor of 4 ranks, got 3"):
        AttentionCase(8).problem(4, 3)


def sent(plan: Plan) -> int:
    """Rows that a rank sends to other hosts."""
    moves = [move for step in plan.steps for move in step.moves]
    return sum(move.src.rows for move in moves if move.src.rank == plan.rank)


def test_what_no_query_of_a_host_attends_to_does_not_cross() -> None:
    """And each row crosses once, with its gradients once back."""

    def rows(backward: bool = False, kept: bool = False, **masks: Any) -> list[int]:
        problem = AttentionCase(16, **masks).problem(6, 3)
        whole = problem.gradient(kept) if backward else problem
        made = attention_plans(whole, Schedule.parse("hetero-fused-1d:pieces=2"))
        check(made)
        return list(map(sent, made))

    for masks, keys in (
        ({}, [32] * 6),
        ({"causal": True}, [32, 32, 16, 16, 0, 0]),
        # To hosts before a rank its first half does, to those after it all.
        ({"causal": True, "placement": "head-tail"}, [16, 16, 24, 24, 32, 32]),
        # The last rows before the next host.
        ({"causal": True, "window": 3}, [0, 3, 0, 3, 0, 0]),
        ({"causal": True, "window": 20}, [4, 16, 4, 16, 0, 0]),
        ({"cu_seqlens": (0, 40, 64, 96)}, [16, 16, 8, 0, 0, 0]),
    ):
        grads = [sum(n) for n in zip(rows(True, True, **masks), rows(**masks), strict=True)]
        assert rows(**masks) == keys, masks
        assert rows(True, **masks) == grads, masks
        assert sum(rows(True, True, **masks)) == sum(keys), masks


# Mutants of plans: each breaks what a rule of the proof is for.


def crossing(backward: bool, **masks: Any) -> list[Plan]:
    problem: Any = AttentionCase(16, dtype="bfloat16", **masks).problem(4, 2)
    problem = problem.gradient() if backward else problem
    found = attention_plans(problem, Schedule.parse("shard-overlap:pieces=2"))
    check(found)
    return found


def changed(made: list[Plan], rank: int, change: Callable[[list[Step]], None]) -> list[Plan]:
    steps = list(made[rank].steps)
    change(steps)
    return [replace(plan, steps=tuple(steps)) if plan.rank == rank else plan for plan in made]


def _goes_on_at_once(steps: list[Step]) -> None:
    one = onward(steps)[0]
    steps[one] = steps[one]._replace(after=())


def _passes_other_rows_on(steps: list[Step]) -> None:
    one = onward(steps)[0]
    move = steps[one].transfer
    assert move is not None
    src = move.src._replace(row=move.src.row + 1, row_stop=move.src.row_stop + 1)
    steps[one] = steps[one]._replace(transfer=move._replace(src=src))


def _says_they_are_others(steps: list[Step]) -> None:
    """Consistently: the signal names the rows of the next piece."""
    one, two = onward(steps)[:2]
    steps[one], steps[two] = (
        steps[one]._replace(posts=steps[two].posts, label=steps[two].label),
        steps[two]._replace(posts=steps[one].posts, label=steps[one].label),
    )


def _sends_less(steps: list[Step]) -> None:
    one = network(steps)[0]
    steps[one] = steps[one]._replace(moves=steps[one].moves[1:])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_goes_on_at_once, "may read before it is written|reads what nobody has written"),
        (_passes_other_rows_on, "another piece|nobody has written|leaves the buffer"),
        (_says_they_are_others, "another piece|gates other rows"),
        (_sends_less, "sends other pieces than rank|holds what its operation does not"),
    ],
)
@pytest.mark.parametrize("window", [None, 20])
def test_wrong_plans_are_found(
    window: int | None, change: Callable[[list[Step]], None], why: str
) -> None:
    # Under a window the ranks of a host get other rows of a shard, by other numbers.
    found = crossing(False, causal=window is not None, window=window)
    with pytest.raises(PlanError, match=why):
        check(changed(found, 3, change))


def _sums_for_others(steps: list[Step]) -> list[int]:
    return [i for i, step in enumerate(steps) if step.op == "reduce" and " for " in step.label]


def _sums_without_waiting(steps: list[Step]) -> None:
    one = _sums_for_others(steps)[0]
    steps[one] = steps[one]._replace(waits=())


def _sends_before_summing(steps: list[Step]) -> None:
    one = next(i for i in network(steps) if steps[i].after)
    steps[one] = steps[one]._replace(after=())


def _leaves_one_out(steps: list[Step]) -> None:
    one = _sums_for_others(steps)[0]
    reduction = steps[one].reduction
    assert reduction is not None and len(reduction.parts) == 2
    parts, terms = reduction.parts[1:], reduction.terms[1:]
    steps[one] = steps[one]._replace(reduction=reduction._replace(parts=parts, terms=terms))


def _sums_its_own_keys(steps: list[Step]) -> None:
    """What came of its own keys in place of what came of those of its rail."""
    one = _sums_for_others(steps)[0]
    own = next(s.reduction for s in steps if s.reduction and s.reduction.out.buffer == "dkv")
    reduction = steps[one].reduction
    assert reduction is not None
    first, second = reduction.parts
    (there,) = [part for part in own.parts if part.buffer == "returned"][:1]
    assert (first.buffer, second.buffer) == ("leaving", "returned") and there.row != second.row
    moved = second._replace(row=there.row, row_stop=there.row + second.rows)
    steps[one] = steps[one]._replace(reduction=reduction._replace(parts=(first, moved)))


def _sends_gradients_elsewhere(steps: list[Step]) -> None:
    """To the place of the rank's own keys, with the signal of the keys of its rail."""
    one = next(i for i, step in enumerate(steps) if step.label.startswith("d2"))
    two = next(i for i, step in enumerate(steps) if step.label.startswith("d0"))
    move, other = steps[one].transfer, steps[two].transfer
    assert move is not None and other is not None
    steps[one] = steps[one]._replace(transfer=move._replace(dst=other.dst))


@pytest.mark.parametrize(
    ("rank", "change", "why"),
    [
        (0, _sums_without_waiting, "never waited for|may read before|nobody has written"),
        (0, _sends_before_summing, "may read before it is written|nobody has written"),
        (0, _leaves_one_out, "products of other ranks than it says|never waited for"),
        (0, _sums_its_own_keys, "another piece than it should|other ranks than it says"),
        (
            1,
            _sends_gradients_elsewhere,
            "gates other rows|written twice|nobody has written|another",
        ),
        (0, _sends_less, "sends other pieces than rank"),
    ],
)
def test_wrong_plans_of_gradients_are_found(
    rank: int, change: Callable[[list[Step]], None], why: str
) -> None:
    found = crossing(True)
    with pytest.raises(PlanError, match=why):
        check(changed(found, rank, change))


# Calls.

HERE = [
    pytest.param(2, 2),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in ((3, 2), (2, 1), (1, 4))),
]


def calls(
    at: Rank,
    hosts: int,
    called: Callable[..., None],
    each: Callable[..., Any],
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    **sizes: int,
) -> int:
    """Every mask, with schedules and dtypes in turns."""
    turn, names = 0, (*(SCHEDULES if each is cases else test_ulysses.SCHEDULES), "auto")
    with host_of(at, hosts):
        for case in each(at.world):
            for dtype in dtypes:
                some = replace(case, dtype=dtype, **sizes)
                called(at, some, turn, names[turn % len(names)])
                turn += 1
        for rows in (0, 1):
            called(at, AttentionCase(rows, 12, 6, dtype=dtypes[-1], causal=True), turn)
    return turn


CALLS = [
    pytest.param(test_attention.attended, cases, id="gathered"),
    pytest.param(test_attention.differentiated, cases, id="gathered-backward"),
    pytest.param(test_ulysses.attended, test_ulysses.cases, id="by-heads"),
    pytest.param(test_ulysses.differentiated, test_ulysses.cases, id="by-heads-backward"),
]


def projections(at: Rank, hosts: int) -> None:
    with host_of(at, hosts):
        test_projections.calls(at)


def _capped(at: Rank) -> Any:
    with host_of(at, 2), ficco.options(workspace_bytes=6_000):
        return caught(lambda: test_attention.attended(at, AttentionCase(16), 1, "growing"))


def test_staging_over_hosts_has_no_ring() -> None:
    for failure in run(4, _capped):
        assert isinstance(failure, Failure) and failure.type == "ValueError"
        assert "workspace_bytes: required at least" in failure.text


# Faults.


def product(at: Rank, turn: int) -> None:
    exact_gather(at, equal(at.world, 4, 8, 8, schedule="hetero-fused-1d:pieces=2"), turn)


def gathered(at: Rank, turn: int) -> None:
    test_attention.differentiated(at, AttentionCase(8), turn, "shard-overlap")


def by_heads(at: Rank, turn: int) -> None:
    test_ulysses.differentiated(at, AttentionCase(4, 8, 4), turn, "serial")


def _loses(at: Rank, victim: int, how: str, called: Callable[[Rank, int], None]) -> Any:
    """What a rank learns where one ends, or all of its connections with other hosts."""
    wires: list[int] = []
    connect = GlooLinks.__init__

    def connected(links: GlooLinks, engine: Any) -> None:
        before = set(os.listdir("/proc/self/fd"))
        connect(links, engine)
        wires.extend(int(fd) for fd in {*os.listdir("/proc/self/fd")} - before)

    os.environ["FICCO_HOST"] = f"host-{at.rank // 2}"
    with ficco.options(timeout_s=PATIENCE_S), mock.patch.object(GlooLinks, "__init__", connected):
        for turn in range(3):
            called(at, turn)
        at.barrier()
        if at.rank == victim and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        for fd in wires if at.rank == victim else ():
            _cut(fd)
        begin = time.monotonic()
        outcome = caught(lambda: [called(at, 3 + turn) for turn in range(3)])
        return outcome, time.monotonic() - begin


def _cut(fd: int) -> None:
    """Break a connection, if it is one."""
    with contextlib.suppress(OSError):
        one = socket.socket(fileno=os.dup(fd))
        one.getpeername()  # not one that listens, whose thread would end the process
        one.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("how", ["killed", "wire"])
@pytest.mark.parametrize("called", [product, gathered, by_heads])
def test_a_lost_rank_or_wire_is_named(called: Any, how: str) -> None:
    lost = [3] if how == "killed" else []
    found = run(4, _loses, 3, how, called, fresh=True, catch=True, lost=lost)
    survivors, blamed = [found[rank] for rank in range(4) if rank not in lost], set()
    for outcome, seconds in survivors:
        blamed |= {one["peer"] for one in gave_up(outcome)}
        assert "host-" in outcome.text, outcome
        assert seconds < PATIENCE_S + SLACK_S
    assert 3 in blamed, [outcome.text for outcome, _ in survivors]


# The model.


def machine() -> Machine:
    found = find("h100-8", None)
    assert found is not None
    return replace(found, network=CARD)


@pytest.mark.parametrize("hosts", [2, 3])
def test_auto_goes_by_the_network(hosts: int) -> None:
    on = machine()
    for masks in ({}, {"causal": True, "placement": "head-tail"}):
        case = AttentionCase(4096, 32, 8, 128, dtype="bfloat16", **masks)
        problem = case.problem(8 * hosts, hosts)
        decision = decide(problem, machine=on)
        assert decision.source == "model" and not decision.schedule.pull
        seconds = {one.schedule: one.queued for one in decision.candidates}
        assert {*seconds} == {name for name in GATHERED.compared if "pull" not in name}
        assert seconds[str(decision.schedule)] == min(seconds.values())
        assert all(one.share < 1 for one in decision.candidates)
        # Where the card is slow, the call takes as long as what a rank gets from all of its rail.
        slow = replace(machine(), network=replace(CARD, bandwidth=1e8))
        nbytes = (hosts - 1) * case.rows * problem.kv_cols * 2
        bound = GATHERED.bounds(problem, slow, "queued")["copies"]
        assert bound == pytest.approx(nbytes / 1e8, rel=0.01)
        assert bound < GATHERED.seconds(problem, Schedule.parse("growing"), slow) < 1.1 * bound


def test_heads_go_by_the_network() -> None:
    case = AttentionCase(1024, 32, 16, 128, dtype="bfloat16", causal=True)
    problem = HeadsProblem(case.problem(16, 2))
    slow = replace(machine(), network=replace(CARD, bandwidth=1e9))
    decision = decide(problem, machine=slow)
    assert decision.source == "model" and len(decision.candidates) == len(BY_HEADS.compared)
    rows = 8 * (2 + 1 + 1 + 2)  # for each rank of the other host: heads of q, k, v and the result
    nbytes = rows * problem.cols * 2
    assert nbytes / 1e9 < BY_HEADS.seconds(problem, Schedule.parse("serial"), slow)


def test_without_a_network_the_model_says_what_it_lacks() -> None:
    problem = AttentionCase(64, dtype="bfloat16").problem(16, 2)
    decision = decide(problem, machine=replace(machine(), network=None))
    assert decision.source == "fallback" and "lacks network" in decision.reason
    assert str(decision.schedule) == "growing" and decision.candidates == ()
