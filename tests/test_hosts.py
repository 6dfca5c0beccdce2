"""Groups on several hosts: plans that cross them, their proof, calls, and faults.

Ranks of one machine stand for hosts by ``FICCO_HOST``: they share no memory with those of others,
and what goes between them goes through gloo and the group's store.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import slow_wire
import test_gradients
import test_operators
import torch.distributed as dist
from cases import Case, call, equal, make
from cases import exact as exact_gather
from disturbance import Disturbance, disturb, install
from ranks import Failure, Rank, caught, gave_up, run

import ficco
from ficco.dma import host
from ficco.dma.cpu import CpuEngine
from ficco.dma.gloo import PeerExchange
from ficco.dma.host import whereabouts
from ficco.errors import InvalidArgument
from ficco.heuristics import decide, problem_of_sizes
from ficco.heuristics.families import IN_COLUMNS, IN_ROWS
from ficco.machine import Machine, Network, Provenance, Tuned, find
from ficco.plan import Plan, Region, Signal, Step, render
from ficco.problems.products import OPERATORS, Problem
from ficco.proof import PlanError, check
from ficco.schedules import NAMED, Schedule, plans, refusal
from ficco.schedules.gather import StagingTooSmall
from ficco.schedules.groups import peers_in_order, targets_in_order
from ficco.simulate import predict, simulate
from ficco.simulate.mirror import mirrored

#: Hosts, and ranks on each.
TOPOLOGIES = ((2, 2), (3, 2), (2, 1), (1, 4), (2, 3), (3, 1))
SCHEDULES = (
    *NAMED,
    "hetero-fused-1d:pieces=3,tail=2",
    "hetero-unfused-1d:pieces=2,order=peer,copy=3,compute=2",
    "hetero-fused-2d:pieces=3",
    "uniform-unfused-2d:tail=2",
    "uniform-fused-1d:pieces=2,tail=3",
    "shard-overlap:kernel",
)


@contextmanager
def host_of(at: Rank, hosts: int) -> Iterator[None]:
    """This rank on one of so many hosts, until its group is closed."""
    os.environ["FICCO_HOST"] = f"host-{at.rank // (at.world // hosts)}"
    try:
        yield
    finally:
        ficco.close()
        del os.environ["FICCO_HOST"]


# Plans.


def problem_of(operator: str, hosts: int, local: int, kind: str) -> Problem:
    rows = test_operators.rows_for(operator, hosts * local, kind)
    if OPERATORS[operator].blocks:
        return Problem.of_blocks(operator, rows, 16, 24, "bfloat16", hosts=hosts)
    return Problem(operator, rows, 16, 24, "bfloat16", hosts=hosts)


def served(problem: Problem) -> list[Schedule]:
    every = map(Schedule.parse, SCHEDULES)
    return [schedule for schedule in every if not refusal(problem, schedule)]


@pytest.mark.parametrize("operator", OPERATORS)
def test_plans_over_hosts_are_proven(operator: str) -> None:
    for hosts, local in TOPOLOGIES:
        for kind in ("equal", "ragged", "sparse"):
            problem = problem_of(operator, hosts, local, kind)
            schedules = served(problem)
            assert len(schedules) > 10
            for schedule in schedules:
                check(plans(problem, schedule))


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        ("hetero-fused-1d:pull", "read memory of their peers"),
        ("ring", "from rank to rank"),
        ("one-shot", "read memory of their peers"),
        ("tiled", "tiles"),
        ("shard-overlap:beta", "beta"),
    ],
)
def test_schedules_that_cannot_cross_are_refused(schedule: str, why: str) -> None:
    problem = problem_of("matmul_reduce_scatter", 2, 2, "equal")
    assert refusal(replace(problem, hosts=1), Schedule.parse(schedule)) == ""
    instead = "a schedule that pushes" if why.startswith("read") else "another schedule"
    with pytest.raises(ValueError, match=f"{why}.*between hosts; take {instead}"):
        plans(problem, Schedule.parse(schedule))


def test_staging_over_hosts_has_no_ring() -> None:
    problem = problem_of("all_gather_matmul", 2, 2, "equal")
    with pytest.raises(StagingTooSmall):
        plans(problem, Schedule.parse("hetero-fused-1d:pieces=4"), 2000)


def test_hosts_divide_the_ranks() -> None:
    with pytest.raises(InvalidArgument, match="a divisor of 4 ranks, got 3"):
        Problem("all_gather_matmul", (1,) * 4, 8, 8, "float32", hosts=3)


@pytest.mark.parametrize(("hosts", "local"), [(2, 4), (3, 2), (2, 3), (4, 1)])
def test_ranks_receive_from_the_own_host_first_and_from_different_peers(
    hosts: int, local: int
) -> None:
    world = hosts * local
    orders = [peers_in_order(rank, world, hosts) for rank in range(world)]
    for rank, order in enumerate(orders):
        assert sorted([rank, *order]) == list(range(world))
        assert {peer // local for peer in order[: local - 1]} <= {rank // local}
        assert order[local - 1 :: local] == [
            (rank - i * local) % world for i in range(1, hosts)
        ]  # of each other host the one with the same place first
        for turn, target in enumerate(targets_in_order(rank, world, hosts)):
            assert orders[target][turn] == rank
    for turn in range(world - 1):
        assert len({order[turn] for order in orders}) == world


def test_each_byte_crosses_the_network_once_per_host() -> None:
    for operator in ("all_gather_matmul", "matmul_reduce_scatter"):
        problem = problem_of(operator, 3, 2, "equal")
        for plan in plans(problem, Schedule.parse("hetero-fused-1d:pieces=2")):
            sent = [
                move.src.rows
                for step in plan.steps
                for move in step.moves
                if move.src.rank == plan.rank
            ]
            assert sum(sent) == 2 * problem.rows[0]  # to the rail of two other hosts


@pytest.mark.parametrize("name", ["shard-overlap:pieces=4", "hetero-unfused-2d:pieces=4,tail=2"])
@pytest.mark.parametrize("operator", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_sums_over_hosts_wait_for_their_own_piece(operator: str, name: str) -> None:
    problem = Problem(operator, (64,) * 2, 64, 8, "float32", hosts=2)
    steps = plans(problem, Schedule.parse(name))[0].steps
    sums = [i for i, step in enumerate(steps) if step.reduction]
    assert [steps[i].label for i in sums] == [f"sum {turn}" for turn in range(4)]
    arrivals = [[before for before in steps[i].after if steps[before].moves] for i in sums]
    assert [len(some) for some in arrivals] == [1] * 4
    assert arrivals == sorted(arrivals) and len({*map(tuple, arrivals)}) == 4
    if problem.kind.returns:  # the first sum leaves before the last one is made
        sent = next(i for i, step in enumerate(steps) if sums[0] in step.after)
        assert steps[sent].moves and sums[-1] not in steps[sent].after


def test_steps_between_hosts_are_drawn() -> None:
    drawn = render(plans(problem_of("all_gather_matmul", 2, 2, "equal"), NAMED["growing"])[1])
    assert "2 hosts" in drawn
    assert "network0 | 0>3 3.0" in drawn


# Mutants of plans: each breaks what a rule of the proof is for.


def crossing(operator: str, schedule: str = "hetero-fused-1d:pieces=2") -> list[Plan]:
    found = plans(problem_of(operator, 2, 2, "equal"), Schedule.parse(schedule))
    check(found)
    return found


def changed(plan: Plan, change: Callable[[list[Step]], None]) -> Plan:
    steps = list(plan.steps)
    change(steps)
    return replace(plan, steps=tuple(steps))


def network(steps: Sequence[Step]) -> list[int]:
    return [i for i, step in enumerate(steps) if step.op == "network"]


def onward(steps: Sequence[Step]) -> list[int]:
    """The copies of what a network step brought."""
    return [i for i, step in enumerate(steps) if step.op == "copy" and step.after]


def _sends_less(steps: list[Step]) -> None:
    one = network(steps)[0]
    steps[one] = steps[one]._replace(moves=steps[one].moves[1:])


def _swaps(steps: list[Step]) -> None:
    one, two = network(steps)[:2]
    steps[one], steps[two] = steps[two], steps[one]


def _goes_on_at_once(steps: list[Step]) -> None:
    one = onward(steps)[0]
    steps[one] = steps[one]._replace(after=())


def _multiplies_at_once(steps: list[Step]) -> None:
    one = next(i for i, step in enumerate(steps) if step.op == "matmul" and step.after)
    steps[one] = steps[one]._replace(after=())


def _lands_elsewhere(steps: list[Step]) -> None:
    one = network(steps)[0]
    out, move = steps[one].moves
    row = move.dst.row + 1
    dst = move.dst._replace(row=row, row_stop=row + move.dst.rows)
    steps[one] = steps[one]._replace(moves=(out, move._replace(dst=dst)))


def _copies_to_another_host(steps: list[Step]) -> None:
    one = next(i for i, step in enumerate(steps) if step.op == "copy" and not step.after)
    move = steps[one].transfer
    assert move is not None
    dst = move.dst._replace(rank=3 - move.dst.rank)
    steps[one] = steps[one]._replace(transfer=move._replace(dst=dst))


def _signals_another_host(steps: list[Step]) -> None:
    one = next(i for i, step in enumerate(steps) if step.op == "copy" and not step.after)
    (signal,) = steps[one].posts
    steps[one] = steps[one]._replace(posts=(signal._replace(waiter=3 - signal.waiter),))


def _holds_a_copy_too(steps: list[Step]) -> None:
    one, copy = network(steps)[0], next(step for step in steps if step.op == "copy")
    steps[one] = steps[one]._replace(transfer=copy.transfer)


def _calls_a_copy_a_move(steps: list[Step]) -> None:
    one = next(i for i, step in enumerate(steps) if step.op == "copy")
    steps[one] = steps[one]._replace(mover="network")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_sends_less, "rank 0 sends other pieces than rank 2 receives"),
        (_swaps, "rank 0 sends other pieces than rank 2 receives"),
        (_goes_on_at_once, "may read before it is written|reads what nobody has written"),
        (_multiplies_at_once, "may read before it is written|reads what nobody has written"),
        (_lands_elsewhere, "rank 2 sends other pieces than rank 0 receives"),
        (_copies_to_another_host, "not symmetric, or elsewhere"),
        (_signals_another_host, "another rank than it says|never|used twice|another host"),
        (_holds_a_copy_too, "holds what its operation does not"),
        (_calls_a_copy_a_move, "holds what its operation does not"),
    ],
)
def test_mutants_of_gathers_are_caught(change: Callable[[list[Step]], None], why: str) -> None:
    found = crossing("all_gather_matmul")
    found[0] = changed(found[0], change)
    with pytest.raises(PlanError, match=why):
        check(found)


def test_words_are_not_posted_to_another_host() -> None:
    """A signal that is right in all else: posted, waited for and cleared, in a word of its own."""
    found = [replace(plan, words=plan.words + 1) for plan in crossing("all_gather_matmul")]
    check(found)
    signal = Signal("ready", 0, 2, 99, found[0].words - 1)
    post = Step("sync", "network0", "tells", posts=(signal,))
    wait = Step("sync", "network0", "hears", waits=(signal,), clears=(signal,))
    found[0] = changed(found[0], lambda steps: steps.append(post))
    found[2] = changed(found[2], lambda steps: steps.append(wait))
    with pytest.raises(PlanError, match="is for a rank of another host"):
        check(found)


def test_both_sides_may_not_agree_on_another_place() -> None:
    """What lands elsewhere on both sides is still not where it is read."""
    found = crossing("all_gather_matmul")

    def shifted(steps: list[Step]) -> None:
        for one in network(steps):
            moves = [
                move._replace(src=move.src._replace(row=0, row_stop=move.src.rows))
                if (move.src.rank, move.dst.rank) == (2, 0)
                else move
                for move in steps[one].moves
            ]
            steps[one] = steps[one]._replace(moves=tuple(moves))

    found[0], found[2] = (changed(found[rank], shifted) for rank in (0, 2))
    with pytest.raises(PlanError, match="another piece|where others belong"):
        check(found)


def test_a_piece_does_not_come_by_two_rails() -> None:
    """Both sides agree on it, but rank 2 copies the piece on to rank 3, too."""
    found = crossing("all_gather_matmul")
    (one, *_), (two, *_) = network(found[0].steps), network(found[3].steps)
    sent = next(move for move in found[0].steps[one].moves if move.src.rank == 0)
    twice = sent._replace(dst=sent.dst._replace(rank=3))

    def moves_more(at: int, steps: list[Step]) -> None:
        steps[at] = steps[at]._replace(moves=(*steps[at].moves, twice))

    found[0] = changed(found[0], partial(moves_more, one))
    found[3] = changed(found[3], partial(moves_more, two))
    with pytest.raises(PlanError, match="overwritten by an unordered step"):
        check(found)


def test_moves_that_wait_for_each_other_are_a_deadlock() -> None:
    """Two ranks that both receive first, and send behind all else."""
    found = crossing("all_gather_matmul")
    for rank in (0, 2):

        def apart(steps: list[Step], rank: int = rank) -> None:
            for one in network(steps):
                step = steps[one]
                parts = [step._replace(moves=(move,)) for move in step.moves]
                receives = [part for part in parts if part.moves[0].dst.rank == rank]
                sends = [part for part in parts if part.moves[0].src.rank == rank]
                steps[one] = receives[0]
                steps.append(sends[0])  # behind all else

        found[rank] = changed(found[rank], apart)
    with pytest.raises(PlanError, match="wait for each other in a circle|deadlock"):
        check(found)


def test_receives_do_not_wait_for_their_turn() -> None:
    """Engines say at the beginning of a call what they expect: no step of their own comes first."""
    problem = problem_of("all_gather_matmul", 2, 1, "equal")
    found = plans(problem, Schedule.parse("shard-overlap:pieces=2"))
    check(found)

    def in_one_place(steps: list[Step]) -> None:
        one, two = network(steps)
        first, second = (
            next(i for i, step in enumerate(steps) if step.op == "matmul" and step.after == (it,))
            for it in (one, two)
        )
        assert (one, two, first, second) == (one, one + 1, one + 2, one + 3)
        rows = steps[one].moves[0].dst.rows

        def up(region: Region) -> Region:
            return region._replace(row=region.row - rows, row_stop=region.row_stop - rows)

        moves = [move._replace(dst=up(move.dst)) for move in steps[two].moves]
        products = [product._replace(a=up(product.a)) for product in steps[second].products]
        send = steps[two]._replace(moves=tuple(moves), after=(two,))
        steps[two], steps[first] = steps[first], send  # once what was there is multiplied
        steps[second] = steps[second]._replace(products=tuple(products), after=(first,))

    with pytest.raises(PlanError, match="overwrites what may still be read"):
        check([changed(plan, in_one_place) for plan in found])


def _sums_without_waiting(steps: list[Step]) -> None:
    one = next(i for i, step in enumerate(steps) if step.op == "reduce")
    steps[one] = steps[one]._replace(waits=(), after=())


def _sends_before_summing(steps: list[Step]) -> None:
    one = network(steps)[0]
    steps[one] = steps[one]._replace(after=())


def _says_less_than_it_sums(steps: list[Step]) -> None:
    one = next(i for i, step in enumerate(steps) if step.op == "reduce")
    reduction = steps[one].reduction
    assert reduction is not None
    parts, terms = reduction.parts[1:], reduction.terms[1:]
    steps[one] = steps[one]._replace(reduction=reduction._replace(parts=parts, terms=terms))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_sums_without_waiting, "never waited for|read before|nobody has written"),
        (_sends_before_summing, "read before it is written|nobody has written"),
        (_says_less_than_it_sums, "products of other ranks than it says|never waited for"),
        (_swaps, "sends other pieces"),
    ],
)
@pytest.mark.parametrize("operator", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_mutants_of_sums_are_caught(
    operator: str, change: Callable[[list[Step]], None], why: str
) -> None:
    found = crossing(operator, "hetero-unfused-1d:pieces=2,tail=2")
    found[0] = changed(found[0], change)
    with pytest.raises(PlanError, match=why):
        check(found)


# Calls.


def _exact(at: Rank, hosts: int, cases: Sequence[Any], gradients: Sequence[Any]) -> tuple[int, int]:
    with host_of(at, hosts):
        for iteration, case in enumerate(cases):
            whole = exact_gather if isinstance(case, Case) else test_operators.exact
            whole(at, case, iteration)
        for iteration, case in enumerate(gradients):
            test_gradients.exact(at, case, iteration)
    return len(cases), len(gradients)


DTYPES = ("float32", "bfloat16", "float64")


def cases_of(operator: str, hosts: int, local: int, dtypes: Sequence[str] = DTYPES) -> list[Any]:
    """Every schedule that serves a problem; rows, sizes and dtypes in turns."""
    found: list[Any] = []
    for kind in ("equal", "ragged", "sparse"):
        problem = problem_of(operator, hosts, local, kind)
        names = [*map(str, served(problem)), "serial:collective"]
        for turn, name in enumerate(names):
            dtype = dtypes[turn % len(dtypes)]
            rows, sizes = test_operators.rows_for(operator, hosts * local, kind), (24, 40)
            if operator == "all_gather_matmul":
                found.append(Case(rows, *sizes, dtype, name, gathered=turn % 2 == 0))
            else:
                found.append(test_operators.Case(operator, rows, *sizes, dtype, name))
    return found


def exact_over_hosts(
    operator: str, hosts: int, local: int, dtypes: Sequence[str] = DTYPES, **where: Any
) -> None:
    """Every schedule, and gradients; ``where`` they run, as :func:`ranks.run` has it."""
    cases = cases_of(operator, hosts, local, dtypes)
    world = hosts * local
    schedules = ("hetero-fused-1d:pieces=2", "growing", "auto")
    gradients = [
        test_gradients.case_of(operator, world, 4, 8, 8, schedule=schedule)
        for schedule in schedules
    ]
    found = run(world, _exact, hosts, cases, gradients, **where)
    assert found == [(len(cases), len(gradients))] * world


def _jittered(at: Rank, hosts: int, calls: int) -> int:
    with host_of(at, hosts), disturb(Disturbance(delay_s=0.002, seed=7)):
        for iteration in range(calls):
            schedule = ("hetero-fused-1d:pieces=3", "growing", "uniform-fused-2d")[iteration % 3]
            operator = list(OPERATORS)[iteration % len(OPERATORS)]
            if operator == "all_gather_matmul":
                rows = test_operators.rows_for(operator, at.world, "ragged")
                exact_gather(at, Case(rows, 24, 16, schedule=schedule), iteration)
            else:
                rows = test_operators.rows_for(operator, at.world, "ragged")
                case = test_operators.Case(operator, rows, 24, 16, schedule=schedule)
                test_operators.exact(at, case, iteration)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 1)])
def test_calls_out_of_step_over_hosts(hosts: int, local: int) -> None:
    assert run(hosts * local, _jittered, hosts, 140) == [140] * (hosts * local)


def _first_call(at: Rank, operator: str, rows: Sequence[int]) -> None:
    with host_of(at, 2), ficco.options(timeout_s=10):
        test_operators.exact(at, test_operators.Case(operator, tuple(rows), 8, 8), 0)


@pytest.mark.parametrize("operator", ["matmul_reduce_scatter", "all_gather_transposed_matmul"])
def test_ranks_connect_although_some_have_nothing_to_send(operator: str) -> None:
    run(4, _first_call, operator, (0, 0, 11, 0), fresh=True)


# Which ranks share a host.


def _named(at: Rank, names: Sequence[str]) -> Any:
    os.environ["FICCO_HOST"] = names[at.rank]
    try:
        return caught(lambda: exact_gather(at, equal(at.world, 4, 8, 8), 0))
    finally:
        ficco.close()
        del os.environ["FICCO_HOST"]


@pytest.mark.parametrize(
    ("names", "got"),
    [("abab", "a: 1, b: 1, a: 1, b: 1"), ("abbb", "a: 1, b: 3"), ("aaba", "a: 2, b: 1, a: 1")],
)
def test_hosts_that_are_not_served(names: str, got: str) -> None:
    for failure in run(4, _named, names, fresh=True):
        assert failure.type == "NotImplementedError"
        assert f"got by rank {got}; pass a group made by dist.new_group" in failure.text


def _without_an_engine(at: Rank) -> tuple[str, list[str]]:
    """The error where no engine can be made, and the threads that are left."""
    with host_of(at, 2), ficco.options(engine="hip"):
        failure = caught(lambda: exact_gather(at, equal(at.world, 4, 8, 8), 0))
    names = [thread.name for thread in threading.enumerate()]
    return failure.type, [name for name in names if "courier" in name]


def test_an_engine_that_cannot_be_made_leaves_nothing() -> None:
    for kind, threads in run(2, _without_an_engine, fresh=True):
        assert kind in ("ImportError", "BackendError", "NotImplementedError")
        assert threads == []


def _one_host_without(at: Rank) -> tuple[Failure, float]:
    """The last host has no engine."""
    begin = time.monotonic()
    with host_of(at, 2), ficco.options(engine="hip" if at.rank > 1 else None):
        failure = caught(lambda: exact_gather(at, equal(at.world, 4, 8, 8), 0))
    return failure, time.monotonic() - begin


def test_one_host_that_cannot_have_an_engine_is_named_on_all() -> None:
    (first, one), (second, two), *rest = run(4, _one_host_without, fresh=True)
    assert {failure.type for failure, _ in rest} <= {"ImportError", "BackendError"}
    for failure, seconds in ((first, one), (second, two)):
        assert failure.type == "PeerFailed" and seconds < 30  # not the 60 s of a timeout
        told = [f"rank {rank} failed: {one.type}: " for rank, (one, _) in enumerate(rest, start=2)]
        assert any(one in failure.text for one in told) and "host-1" in failure.text


def _other_kinds(at: Rank) -> Failure | None:
    with host_of(at, 2), mock.patch.object(CpuEngine, "packs_columns", at.rank > 1):
        return caught(lambda: exact_gather(at, equal(at.world, 4, 8, 8), 0))


def test_engines_of_different_hosts_that_differ() -> None:
    for failure in run(4, _other_kinds, fresh=True):
        assert failure is not None and failure.type == "RankMismatch"
        assert "ranks 0, 1: the cpu engine" in failure.text
        assert "ranks 2, 3: the cpu engine, which packs columns" in failure.text


@pytest.mark.parametrize("names", ["aabb", "abcd", "aaaa"])
def test_hosts_that_are_served(names: str) -> None:
    assert run(4, _named, names) == [None] * 4


@contextmanager
def _told(**facts: Any) -> Iterator[None]:
    """What this rank tells others of where it is, but for some facts."""

    def told() -> dict[str, Any]:
        return {**whereabouts(), **facts}

    modules = "ficco.dma.host", "ficco.dma.hosts"
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch(f"{module}.whereabouts", told))
        yield


def _in_containers(at: Rank, names: str, containers: str) -> Any:
    """Ranks see the same boot, and processes of their own container only."""
    with _told(pids=containers[at.rank]):
        return _named(at, names)


def test_containers_of_one_boot_are_hosts_if_they_are_named() -> None:
    assert run(4, _in_containers, "aabb", "cczz", fresh=True) == [None] * 4


@pytest.mark.parametrize(
    ("names", "containers", "got"),
    [("aaaa", "cczz", "0 and 2"), ("aaaa", "cccz", "0 and 3"), ("aabb", "ccyz", "2 and 3")],
)
def test_ranks_of_a_host_that_see_no_processes_of_each_other_are_refused_on_all(
    names: str, containers: str, got: str
) -> None:
    for failure in run(4, _in_containers, names, containers, fresh=True):
        assert failure.type == "NotImplementedError"
        assert f"ranks {got} are on one host in containers that do not see" in failure.text
        assert "name a host for each with FICCO_HOST" in failure.text


def _on_boots(at: Rank) -> Any:
    with _told(boot=f"boot {at.rank}", host=f"machine-{at.rank}"):
        return _named(at, "aabb")


def test_machines_that_have_the_name_of_one_host_are_refused_on_all() -> None:
    for failure in run(4, _on_boots, fresh=True):
        assert failure.type == "NotImplementedError"
        assert "rank 0 is on machine-0, rank 1 on machine-1; leave FICCO_HOST out" in failure.text


def _on_clones(at: Rank) -> Any:
    """Ranks 0, 1 and 2, 3 are on two machines that were started from one image of a running one:
    boot and namespaces have the same names there, and processes numbers of their own."""
    with _told(host=f"clone-{at.rank // 2}", pid=os.getpid() + (at.rank // 2) * 10_000_000):
        return _named(at, [""] * at.world)


def test_machines_of_one_boot_are_told_to_name_their_hosts() -> None:
    found = run(4, _on_clones, fresh=True)
    assert {failure.type for failure in found} == {"BackendError"}
    for failure in found[:2]:
        assert "or clone-0 and clone-1 are two machines with one boot id" in failure.text
        assert "name a host for each with FICCO_HOST" in failure.text


def _in_part(at: Rank, members: Sequence[int]) -> Any:
    """Calls of two groups with the same ranks, and of all ranks, by turns."""
    groups = [dist.new_group(list(members)) for _ in range(2)]
    with host_of(at, 2), ficco.options(timeout_s=10):
        outcome = None
        if at.rank in members:
            outcome = caught(lambda: [_all_operators(at, group) for group in groups * 2])
        _all_operators(at, None)
        at.barrier()
    return outcome


def _all_operators(at: Rank, group: Any) -> None:
    world = at.world if group is None else group.size()
    for iteration, operator in enumerate(OPERATORS):
        rows = test_operators.rows_for(operator, world, "ragged")
        if operator == "all_gather_matmul":
            exact_gather(at, Case(rows, 24, 16, schedule="growing"), iteration, group)
        else:
            case = test_operators.Case(operator, rows, 24, 16, schedule="shard-overlap")
            test_operators.exact(at, case, iteration, group)


@pytest.mark.parametrize("members", [(0, 2), (1, 2), (2, 3)])
def test_groups_of_some_ranks_of_hosts_are_served(members: tuple[int, ...]) -> None:
    for rank, outcome in enumerate(run(4, _in_part, members)):
        assert outcome == ([None] * 4 if rank in members else None)


@pytest.mark.parametrize(
    ("members", "got"), [((0, 1, 2), "host-0: 2, host-1: 1"), ((1, 2, 3), "host-0: 1, host-1: 2")]
)
def test_groups_of_one_host_and_part_of_another_are_refused(
    members: tuple[int, ...], got: str
) -> None:
    for rank, outcome in enumerate(run(4, _in_part, members)):
        if rank in members:
            assert outcome.type == "NotImplementedError"
            assert f"as many on each, got by rank {got}; pass a group made by" in outcome.text


@contextmanager
def _clocks_ahead(seconds: float) -> Iterator[None]:
    """What this process reads of any clock is ahead by so much; what it waits for comes in time."""
    timespec = host._timespec
    with ExitStack() as stack:
        for name in ("time", "monotonic", "perf_counter"):
            clock = getattr(time, name)
            ahead = partial(lambda clock: clock() + seconds, clock)
            stack.enter_context(mock.patch.object(time, name, ahead))
        back = mock.patch.object(host, "_timespec", lambda at: timespec(at - seconds))
        stack.enter_context(back)
        yield


def _by_other_clocks(at: Rank, victims: Sequence[int]) -> Any:
    """Hosts have been up for different times, and do not agree on the date."""
    with _clocks_ahead(1e6 * (at.rank // 2)):
        with host_of(at, 2):
            _all_operators(at, None)
            at.barrier()
        return _casualties(at, victims, signal.SIGKILL, 2)


def test_clocks_of_hosts_that_differ() -> None:
    victims = (1,)
    found = run(4, _by_other_clocks, victims, fresh=True, catch=True, lost=victims)
    _assert_they_learn(found, victims)


# Faults.

#: Seconds that a call waits for a peer, and what a busy machine may add.
PATIENCE_S, SLACK_S = 3.0, 6.0


def _disagree(at: Rank) -> Any:
    with host_of(at, 2):
        exact_gather(at, equal(at.world, 4, 8, 8), 0)
        n = 8 if at.rank < 2 else 16
        return caught(lambda: exact_gather(at, equal(at.world, 4, 8, n, schedule="growing"), 1))


def test_ranks_of_different_hosts_that_disagree() -> None:
    for failure in run(4, _disagree, fresh=True):
        assert failure.type == "RankMismatch", failure
        assert "ranks 0, 1: " in failure.text and "ranks 2, 3: " in failure.text
        assert "n=8," in failure.text and "n=16," in failure.text


def _known_disagree(at: Rank) -> list[str]:
    """Calls that each rank knows, in another order: nobody waits for entries before them."""
    with host_of(at, 2), ficco.options(timeout_s=PATIENCE_S):
        cases = [equal(at.world, 4, 8, n, schedule="growing") for n in (8, 16)]
        for iteration in range(4):
            exact_gather(at, cases[iteration % 2], iteration)
        found = []
        for iteration in range(40):
            case = cases[(iteration + (at.rank >= 2)) % 2]
            outcome = caught(lambda case=case, it=iteration: exact_gather(at, case, 100 + it))
            if outcome is not None and outcome.type != "AssertionError":
                found.append(outcome.type)
                break
            time.sleep(0.05)
        return found


def test_known_calls_of_different_hosts_that_disagree_do_not_stay_unnoticed() -> None:
    assert run(4, _known_disagree, fresh=True) == [["RankMismatch"]] * 4


def _casualties(at: Rank, victims: Sequence[int], how: int, hosts: int) -> Any:
    with ficco.options(timeout_s=PATIENCE_S):
        os.environ["FICCO_HOST"] = f"host-{at.rank // (at.world // hosts)}"
        case = equal(at.world, 4, 8, 8, schedule="hetero-fused-1d:pieces=2")
        for iteration in range(3):
            exact_gather(at, case, iteration)
        at.barrier()
        if at.rank in victims:
            os.kill(os.getpid(), how)
        begin = time.monotonic()
        outcome = caught(lambda: [exact_gather(at, case, 3 + i) for i in range(3)])
        return outcome, time.monotonic() - begin


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victims", [(3,), (2, 3), (1,)])
def test_every_survivor_learns_of_a_lost_rank_or_host(victims: tuple[int, ...], how: int) -> None:
    found = run(4, _casualties, victims, how, 2, fresh=True, catch=True, lost=victims)
    _assert_they_learn(found, victims)


def _assert_they_learn(found: Sequence[Any], victims: Sequence[int]) -> None:
    """Every survivor, and some of them of a rank that is lost: the others name one that could not
    go on without it."""
    blamed = set()
    for rank in set(range(4)) - set(victims):
        outcome, seconds = found[rank]
        blamed |= {one["peer"] for one in gave_up(outcome)}
        assert seconds < PATIENCE_S + SLACK_S
        assert "host-" in outcome.text
    assert blamed & set(victims), blamed


def losing(at: Rank, victims: Sequence[int], how: int, calls: Callable[[], Any]) -> Any:
    """Lose ranks, then make calls: what comes of these, after how long, and what closing gives."""
    at.barrier()
    if at.rank in victims:
        os.kill(os.getpid(), how)
    begin = time.monotonic()
    outcome = caught(calls)
    waited = time.monotonic() - begin
    return outcome, waited, caught(ficco.close)


def bereaved(at: Rank, victims: Sequence[int], how: int, hosts: int, group: Any = None) -> Any:
    """What a rank learns of others that are lost, where calls return before they are over."""
    with ficco.options(timeout_s=PATIENCE_S, on_timeout="raise"):
        os.environ["FICCO_HOST"] = f"host-{at.rank // (at.world // hosts)}"
        case = equal(at.world, 4, 8, 8, schedule="hetero-fused-1d:pieces=2")
        for iteration in range(3):
            exact_gather(at, case, iteration, group)
        made = make(at, case, 3, group)
        ficco.synchronize()

        def calls() -> None:
            for _ in range(3):
                call(case, made.a, made.b, group)
            ficco.synchronize()

        return losing(at, victims, how, calls)


def assert_all_learn(found: Sequence[Any], victims: Sequence[int]) -> None:
    """Every survivor gets an error in time, and some of them name who is lost."""
    survivors, blamed = set(range(len(found))) - set(victims), set()
    for rank in survivors:
        outcome, seconds, closed = found[rank]
        blamed |= {one["peer"] for one in gave_up(outcome)}
        assert seconds < PATIENCE_S + SLACK_S
        assert "host-" in outcome.text, outcome
        assert closed is None, closed
    assert blamed & set(victims), [found[rank][0].text for rank in survivors]


def _killed_at(at: Rank, victim: int, step: int, operator: str) -> Any:
    os.environ["FICCO_HOST"] = f"host-{at.rank // 2}"
    problem, schedule = problem_of(operator, 2, 2, "equal"), "hetero-fused-1d:pieces=2"
    step %= len(plans(problem, Schedule.parse(schedule))[victim].steps)
    rows = problem.blocks or problem.rows
    case = test_operators.Case(operator, rows, 8, 8, schedule=schedule)
    install()
    with ficco.options(timeout_s=PATIENCE_S):
        with disturb(Disturbance(delay_s=0.005, seed=step)):
            test_operators.exact(at, case, 0)
        at.barrier()
        begin = time.monotonic()
        with disturb(Disturbance(delay_s=0.005, kill=(victim, step), seed=step)):
            outcome = caught(lambda: [test_operators.exact(at, case, 1 + i) for i in range(3)])
        return outcome, time.monotonic() - begin


#: Ranks, and steps at which they end.
MOMENTS = [(1, 4), (3, 9), (0, 7), (2, 14)]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "step"), MOMENTS)
@pytest.mark.parametrize("operator", ["matmul_all_reduce", "all_to_all_matmul"])
def test_a_rank_that_ends_in_the_middle_of_a_call(operator: str, victim: int, step: int) -> None:
    found = run(4, _killed_at, victim, step, operator, fresh=True, catch=True, lost=[victim])
    for rank in set(range(4)) - {victim}:
        outcome, seconds = found[rank]
        gave_up(outcome)
        assert seconds < PATIENCE_S + SLACK_S


def _once_more(at: Rank) -> Any:
    case = equal(at.world, 4, 8, 8, schedule="growing")
    with host_of(at, 2):
        exact_gather(at, case, 0)
        wrong = equal(at.world, 4, 8, 8 if at.rank < 2 else 16, schedule="growing")
        failure = caught(lambda: exact_gather(at, wrong, 1))
        ficco.close()
        at.barrier()
        exact_gather(at, case, 2)
        return failure and failure.type


def test_a_group_over_hosts_serves_again_once_it_is_closed() -> None:
    assert run(4, _once_more, fresh=True) == ["RankMismatch"] * 4


# The model.

CARD = Network(50e9, 20e-6, Provenance("assumed"))


def _described(name: str, **changes: Any) -> Machine:
    machine = find(name, None)
    assert machine is not None
    return replace(machine, **changes)


@pytest.mark.parametrize("machine", ["h100-8", "mi300x-8"])
@pytest.mark.parametrize("schedule", ["serial", "shard-overlap", "hetero-unfused-1d:pieces=2"])
@pytest.mark.parametrize("operator", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_one_rank_stands_for_those_of_all_hosts(machine: str, schedule: str, operator: str) -> None:
    on = _described(machine, network=CARD)
    problem = Problem(operator, (512,) * 16, 3584, 4096, "bfloat16", hosts=2)
    parsed = Schedule.parse(schedule)
    assert mirrored(problem, parsed, on, "queued")
    whole = simulate(plans(problem, parsed), on, "queued")
    assert predict(problem, parsed, on, "queued") == pytest.approx(whole.stop_s, rel=0.02)


def test_what_crosses_takes_the_time_of_its_bytes() -> None:
    """Where the card is slow, the call takes as long as the rail's bytes and what follows."""
    on = _described("h100-8", network=replace(CARD, bandwidth=1e9))
    for hosts, operator in ((2, "all_gather_matmul"), (4, "matmul_reduce_scatter")):
        problem = Problem(operator, (512,) * 8 * hosts, 1024, 4096, "bfloat16", hosts=hosts)
        nbytes = (hosts - 1) * 512 * problem.moved_bytes
        for name in ("shard-overlap", "hetero-fused-1d:pieces=2", "serial:collective"):
            seconds = predict(problem, Schedule.parse(name), on, "queued")
            assert nbytes / 1e9 < seconds < nbytes / 1e9 * 1.2, (operator, name)
        shared = replace(on, network=replace(CARD, bandwidth=1e9, sharing=8))
        seconds = predict(problem, Schedule.parse("shard-overlap"), shared, "queued")
        assert seconds == pytest.approx(8 * nbytes / 1e9, rel=0.05)


def test_both_sides_of_a_move_share_a_card_with_others() -> None:
    """All ranks are simulated where rows differ: those of one host share its cards."""
    rows = (512, 256) * 4
    problem = Problem("all_gather_matmul", rows, 64, 4096, "bfloat16", hosts=2)
    slow = replace(CARD, bandwidth=1e9, sharing=4)
    on = _described("h100-8", ranks=4, network=slow)
    seconds = predict(problem, Schedule.parse("shard-overlap"), on, "queued")
    nbytes = sum(rows[:4]) * problem.moved_bytes
    assert seconds == pytest.approx(nbytes / 1e9, rel=0.05)


def test_auto_over_hosts_goes_by_the_network_and_never_loses_to_serial() -> None:
    for machine in ("h100-8", "mi300x-8"):
        on = _described(machine)
        for m, n, k in ((8192, 3584, 4096), (16384, 1024, 8192), (2048, 8192, 1024)):
            for operator in ("all_gather_matmul", "matmul_reduce_scatter", "all_to_all_matmul"):
                problem = problem_of_sizes(operator, m, n, k, "bfloat16", 16, None, 2)
                decision = decide(problem, machine=on, mode="queued")
                assert decision.source == "model"
                chosen, *serials = (
                    predict(problem, schedule, on, "queued")
                    for schedule in (
                        decision.schedule,
                        Schedule.parse("serial"),
                        Schedule.parse("serial:collective"),
                    )
                )
                assert chosen <= min(serials) * 1.02


def test_entries_tuned_on_one_host_are_not_for_several() -> None:
    rows, n, k, by = (64,) * 8, 64, 64, Provenance("measured")
    entry = Tuned(
        "all_gather_matmul",
        rows,
        n,
        k,
        "bfloat16",
        "growing",
        "growing",
        (1.0,) * 2,
        (2.0,) * 2,
        by,
    )
    on = _described("h100-8", tuned=(entry,))
    one = Problem("all_gather_matmul", rows, n, k, "bfloat16")
    assert decide(one, machine=on, mode="queued").source == "tuned"
    assert decide(replace(one, hosts=2), machine=on, mode="queued").source == "model"


def test_without_a_network_the_model_says_what_it_lacks() -> None:
    on = _described("h100-8", network=None)
    problem = Problem("all_gather_matmul", (64,) * 16, 64, 64, "bfloat16", hosts=2)
    decision = decide(problem, machine=on, mode="queued")
    assert decision.source in ("rule", "fallback") and "lacks network" in decision.reason
    assert str(decide(problem, mode="idle").schedule) == IN_ROWS
    for n, expected in ((64, IN_ROWS), (65, IN_COLUMNS)):
        scatters = Problem("matmul_reduce_scatter", (64,) * 16, n, 64, "float32", hosts=2)
        assert str(decide(scatters, mode="idle").schedule) == expected
    with pytest.raises(ValueError, match="required the block 'network'"):
        predict(problem, Schedule.parse("growing"), on, "queued")


@pytest.mark.skipif(not slow_wire.usable(), reason="needs root and /dev/net/tun")
@pytest.mark.slow
def test_calls_are_exact_over_a_wire_with_a_delay(tmp_path: Path) -> None:
    bench = Path(__file__).with_name("hosts_bench.py")
    wire = ["--hosts", "3", "--delay", "1", "--rounds", "1", "--shapes", "192,8,24"]
    names = ["auto", "serial", "hetero-fused-2d:pieces=3", "shard-overlap:pieces=32,order=peer"]
    program = [sys.executable, str(bench), str(tmp_path), *wire, "--schedules", *names]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "hosts.csv").read_text().count("\n") == 1 + 2 * (3 + len(names))


def test_a_send_that_fails_at_once_is_a_failure_of_its_peer() -> None:
    def broken() -> Any:
        raise RuntimeError("Connection closed by peer")

    wait = PeerExchange([(1, lambda: None), (3, broken), (2, lambda: None)], 1.0)
    assert wait.over.is_set() and wait.peer == 3
    assert "closed by peer" in str(wait.error)
