"""Groups on several hosts: plans of products between hosts, discovery of hosts, faults, and the
model.

``FICCO_HOST`` divides the ranks of one machine into hosts: ranks of different hosts share no memory
and communicate through gloo and the group's store.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import pytest
import subjects
import torch
import torch.distributed as dist
from ranks import Rank, caught, gave_up, on_ranks, run
from subjects import SUBJECTS, block

import ficco
from ficco.dma import host
from ficco.dma.cpu import CpuEngine
from ficco.dma.host import whereabouts
from ficco.dma.messages import PeerExchange
from ficco.errors import InvalidArgument
from ficco.heuristics import decide
from ficco.heuristics.families import IN_COLUMNS, IN_ROWS, crossed
from ficco.machine import Machine, Network, Provenance, Tuned, find
from ficco.plan import Crossing, Step, Transfer
from ficco.problems.products import OPERATORS, Problem
from ficco.proof import check
from ficco.schedules import NAMED, Schedule, plans, refusal
from ficco.schedules.gather import StagingTooSmall
from ficco.simulate import predict

#: Hosts, and ranks per host.
TOPOLOGIES = ((2, 2), (3, 2), (2, 1), (2, 3), (3, 1))
PIECES = "hetero-fused-1d:pieces=2"
SCHEDULES = (
    *(*NAMED, "hetero-fused-1d:pieces=3,tail=2"),
    *("hetero-unfused-1d:pieces=2,order=peer,copy=3,compute=2", "hetero-fused-2d:pieces=3"),
    *("uniform-unfused-2d:tail=2", "uniform-fused-1d:pieces=2,tail=3", "shard-overlap:kernel"),
)
#: Seconds that a call waits for a peer, and seconds that a busy machine may add.
PATIENCE_S, SLACK_S = 3.0, 6.0


def problem_of(
    operator: str, hosts: int, local: int, kind: str, n: int = 16, k: int = 24, **more: Any
) -> Problem:
    """A problem whose rows per rank are of a ``kind`` of :mod:`subjects`."""
    ranks, options = range(hosts * local), {"dtype": "bfloat16", "hosts": hosts, **more}
    rows = [block(kind, rank, 1) for rank in ranks]
    if OPERATORS[operator].blocks:
        table = [[block(kind, rank, peer) for peer in ranks] for rank in ranks]
        return Problem.of_blocks(operator, table, n, k, **options)
    if OPERATORS[operator].returns:  # the operator itself splits m rows like this
        quotient, remainder = divmod(sum(rows), len(ranks))
        rows = [quotient + (rank < remainder) for rank in ranks]
    return Problem(operator, tuple(rows), n, k, **options)


def served(problem: Problem) -> list[Schedule]:
    schedules = map(Schedule.parse, SCHEDULES)
    return [schedule for schedule in schedules if not refusal(problem, schedule)]


@contextmanager
def host_of(at: Rank, hosts: int) -> Iterator[None]:
    """Place this rank on one of ``hosts`` hosts until its group is closed."""
    os.environ["FICCO_HOST"] = f"host-{at.rank // (at.world // hosts)}"
    try:
        yield
    finally:
        ficco.close()
        del os.environ["FICCO_HOST"]


def exact(
    at: Rank, operator: str, turn: int, schedule: str = PIECES, group: Any = None, **changes: Any
) -> None:
    """Make a call with ``changes`` of its case and compare all elements of the result."""
    member = at if group is None else replace(at, rank=group.rank(), world=group.size())
    case = SUBJECTS[operator].case(Random(turn), member.world, "uneven", at.device.type)
    case = case.on(schedule=schedule, needs=(), **changes)
    subjects.exact(member, SUBJECTS[operator], case, turn, group)


def all_operators(at: Rank, group: Any = None) -> None:
    for turn, operator in enumerate(OPERATORS):
        exact(at, operator, turn, ("growing", PIECES)[turn % 2], group)


@pytest.mark.parametrize("operator", OPERATORS)
def test_plans_over_hosts_are_proven(operator: str) -> None:
    for turn, topology in enumerate(TOPOLOGIES):
        problem = problem_of(operator, *topology, ("equal", "uneven", "few")[turn % 3])
        assert len(schedules := served(problem)) > 10
        for schedule in schedules[turn % 2 :: 2]:
            check(plans(problem, schedule))


def test_schedules_that_cannot_cross_hosts_are_refused() -> None:
    problem = problem_of("matmul_reduce_scatter", 2, 2, "equal")
    for schedule, reason, remedy in (
        ("hetero-fused-1d:pull", "read memory of their peers", "a schedule that pushes"),
        ("ring", "from rank to rank", "another schedule"),
        ("one-shot", "read memory of their peers", "a schedule that pushes"),
        ("tiled", "tiles", "another schedule"),
        ("shard-overlap:beta", "beta", "another schedule"),
    ):
        assert refusal(replace(problem, hosts=1), Schedule.parse(schedule)) == ""
        with pytest.raises(ValueError, match=f"{reason}.*between hosts; take {remedy}"):
            plans(problem, Schedule.parse(schedule))
    gather = problem_of("all_gather_matmul", 2, 2, "equal")
    with pytest.raises(StagingTooSmall):  # network steps do not reuse staging as a ring
        plans(gather, Schedule.parse("hetero-fused-1d:pieces=4"), 1000)
    with pytest.raises(InvalidArgument, match="a divisor of 4 ranks, got 3"):
        replace(gather, hosts=3)


def network(steps: Sequence[Step]) -> list[int]:
    return [i for i, step in enumerate(steps) if isinstance(step.work, Crossing)]


def crossing(steps: Sequence[Step]) -> list[Transfer]:
    """The transfers of all network steps."""
    works = (step.work for step in steps)
    return [move for work in works if isinstance(work, Crossing) for move in work.moves]


@on_ranks(4)
def test_ranks_connect_although_some_have_nothing_to_send(at: Rank) -> None:
    for operator in ("matmul_reduce_scatter", "all_gather_transposed_matmul"):
        with host_of(at, 2), ficco.options(timeout_s=60):
            exact(at, operator, 0, "auto", rows=(0, 0, 11, 0))


@pytest.mark.parametrize(
    ("members", "refused"),
    [
        *(((0, 2), ""), ((1, 2), ""), ((2, 3), "")),
        *(((0, 1, 2), "host-0: 2, host-1: 1"), ((1, 2, 3), "host-0: 1, host-1: 2")),
    ],
)
@on_ranks(4)
def test_groups_have_whole_hosts_or_equal_parts(at: Rank, members: Any, refused: str) -> None:
    """Calls of two groups with the same ranks alternate, then all ranks call."""
    groups = [dist.new_group(list(members)) for _ in range(2)]
    with host_of(at, 2), ficco.options(timeout_s=60):
        if at.rank in members:
            outcome = caught(lambda: [all_operators(at, group) for group in groups * 2])
            if refused:
                assert outcome.type == "NotImplementedError"
                words = f"as many on each, got by rank {refused}; pass a group made by"
                assert words in outcome.text, outcome
            else:
                assert outcome == [None] * 4
        all_operators(at)
        at.barrier()


def test_a_send_that_fails_at_once_is_a_failure_of_its_peer() -> None:
    def broken() -> Any:
        raise RuntimeError("Connection closed by peer")

    wait = PeerExchange([(1, lambda: None), (3, broken), (2, lambda: None)], 1.0)
    assert wait.over.is_set() and wait.peer == 3
    assert "closed by peer" in str(wait.error)


NOT_SHARED = "are on one host in containers that do not see.*name a host for each with FICCO_HOST"
GROUP, REFUSED = "pass a group made by dist.new_group", "NotImplementedError"
#: FICCO_HOST by rank; facts that ranks publish in place of their own, the process id as an offset;
#: the type and text of a call's error.
PLACES: dict[str, tuple[Sequence[str], dict[str, Any], str, str]] = {
    "two hosts": ("aabb", {}, "", ""),
    "four hosts": ("abcd", {}, "", ""),
    "one host": ("aaaa", {}, "", ""),
    "hosts of one name": (("",) * 4, {"boot": "0123", "host": "mmmm"}, "", ""),
    "alternating": ("abab", {}, REFUSED, f"got by rank a: 1, b: 1, a: 1, b: 1; {GROUP}"),
    "unequal": ("abbb", {}, REFUSED, f"got by rank a: 1, b: 3; {GROUP}"),
    "split": ("aaba", {}, REFUSED, f"got by rank a: 2, b: 1, a: 1; {GROUP}"),
    "named containers": ("aabb", {"pids": "cczz"}, "", ""),
    "containers": ("aaaa", {"pids": "cczz"}, REFUSED, f"ranks 0 and 2 {NOT_SHARED}"),
    "one rank in a container": ("aaaa", {"pids": "cccz"}, REFUSED, f"ranks 0 and 3 {NOT_SHARED}"),
    "containers of a host": ("aabb", {"pids": "ccyz"}, REFUSED, f"ranks 2 and 3 {NOT_SHARED}"),
    "machines with one name": (
        *("aabb", {"boot": "0123", "host": "mnop"}, REFUSED),
        "rank 0 is on m, rank 1 on n; leave FICCO_HOST out",
    ),
    # Started from one image of a running machine, which has one boot id and one set of namespaces.
    "machines with one boot id": (
        *(("",) * 4, {"host": "ccdd", "pid": (0, 0, 10_000_000, 10_000_000)}, "BackendError"),
        "or c and d are two machines with one boot id: name a host for each with FICCO_HOST",
    ),
}


@pytest.mark.parametrize("case", PLACES)
@on_ranks(4)
def test_hosts_are_identified_or_refused_on_all_ranks(at: Rank, case: str) -> None:
    names, replaced, kind, pattern = PLACES[case]
    facts = whereabouts()
    for name, values in replaced.items():
        facts[name] = values[at.rank] + (facts["pid"] if name == "pid" else "")
    os.environ["FICCO_HOST"] = names[at.rank]
    try:
        with mock.patch("ficco.dma.host.whereabouts", return_value=facts):
            outcome = caught(lambda: exact(at, "all_gather_matmul", 0))
    finally:
        ficco.close()
        del os.environ["FICCO_HOST"]
    assert getattr(outcome, "type", "") == kind, outcome
    if kind and (kind != "BackendError" or at.rank < 2):
        assert re.search(pattern, outcome.text), outcome.text


NO_ENGINE = {"ImportError", "BackendError", "NotImplementedError"}
#: Types of the errors on the first and on the second host, and patterns of the text on the first.
AT_ODDS: dict[str, tuple[set[str], set[str], tuple[str, ...]]] = {
    "no engine": (NO_ENGINE, NO_ENGINE, ()),
    "one host has none": ({"PeerFailed"}, NO_ENGINE, (r"rank [23] failed: \w+Error: ", "host-1")),
    "engines differ": (
        *({"RankMismatch"}, {"RankMismatch"}),
        ("ranks 0, 1: the cpu engine", "ranks 2, 3: the cpu engine, which packs columns"),
    ),
    "calls differ": (
        *({"RankMismatch"}, {"RankMismatch"}),
        ("ranks 0, 1: ", "ranks 2, 3: ", "n=16,", "n=24,"),
    ),
}


@pytest.mark.parametrize("clash", AT_ODDS)
@on_ranks(4, timeout=30)  # below the timeout of 60 s
def test_conflicts_between_hosts_are_raised_at_once(at: Rank, clash: str) -> None:
    """After all ranks have closed the group, calls work again."""
    second, (first_host, second_host, patterns) = at.rank > 1, AT_ODDS[clash]
    engine = "hip" if clash == "no engine" or second and clash == "one host has none" else None
    packs = mock.patch.object(CpuEngine, "packs_columns", second and clash == "engines differ")
    with host_of(at, 2), ficco.options(engine=engine), packs:
        if clash == "calls differ":
            exact(at, "all_gather_matmul", 0)
        sizes = 8, 24 if second and clash == "calls differ" else 16
        failure = caught(lambda: exact(at, "all_gather_matmul", 1, "growing", sizes=sizes))
    assert not [thread for thread in threading.enumerate() if "courier" in thread.name]
    at.barrier()
    with host_of(at, 2):
        exact(at, "all_gather_matmul", 2)
    assert failure.type in (second_host if second else first_host), failure
    for pattern in patterns if not second or first_host == second_host else ():
        assert re.search(pattern, failure.text), failure.text


@on_ranks(4)
def test_warm_calls_that_disagree_between_hosts_are_noticed(at: Rank) -> None:
    """Hosts make warm calls in different orders. Warm calls do not wait for the peers' entries."""
    known, failure = ((24, 8), (24, 16)), None
    with host_of(at, 2):
        for turn in range(4):  # the first call connects the hosts and may be slow
            exact(at, "all_gather_matmul", turn, "growing", sizes=known[turn % 2])
        for turn in range(40):
            sizes = known[(turn + at.rank // 2) % 2]
            call = partial(exact, at, "all_gather_matmul", 100 + turn, "growing", sizes=sizes)
            with ficco.options(timeout_s=PATIENCE_S):
                failure = caught(call)
            if failure is not None and failure.type != "AssertionError":
                break
            time.sleep(0.05)
    assert failure is not None and failure.type == "RankMismatch", failure


def losing(at: Rank, victims: Sequence[int], how: Any, calls: Callable[[], Any]) -> Any:
    """Lose ``victims``, then make calls; return their outcome and seconds, and that of closing."""
    at.barrier()
    if at.rank in victims:
        how() if callable(how) else os.kill(os.getpid(), how)
    begin = time.monotonic()
    outcome = caught(calls)
    waited = time.monotonic() - begin
    return outcome, waited, caught(ficco.close)


def gathers(at: Rank, group: Any) -> None:
    shard, weight = torch.ones(4, 8, device=at.device), torch.ones(8, 8, device=at.device)
    ficco.all_gather_matmul(shard, weight, group=group, schedule=PIECES)


def bereaved(
    at: Rank, victims: Sequence[int], how: Any, hosts: int, group: Any = None, called: Any = gathers
) -> Any:
    """The outcome on a rank of losing ``victims``, with calls that return before they are over."""

    def calls() -> None:
        for _ in range(3):
            called(at, group)
        ficco.synchronize()

    os.environ["FICCO_HOST"] = f"host-{at.rank // (at.world // hosts)}"
    with ficco.options(timeout_s=60, on_timeout="raise"):  # the first calls connect the hosts
        calls()
    with ficco.options(timeout_s=PATIENCE_S, on_timeout="raise"):
        return losing(at, victims, how, calls)


def assert_all_learn(outcomes: Sequence[Any], victims: Sequence[int]) -> None:
    """All survivors get an error in time, which names a lost rank or a survivor that needs one."""
    survivors, blamed = set(range(len(outcomes))) - set(victims), set()
    for rank in survivors:
        outcome, seconds, closed = outcomes[rank]
        blamed |= {entry["peer"] for entry in gave_up(outcome)}
        assert seconds < PATIENCE_S + SLACK_S
        assert "host-" in outcome.text, outcome
        assert closed is None, closed
    assert blamed & set(victims), [outcomes[rank][0].text for rank in survivors]


@contextmanager
def _clocks_ahead(seconds: float) -> Iterator[None]:
    """All clocks that this process reads are ahead by ``seconds``; its timed waits are not."""
    timespec = host._timespec
    with ExitStack() as stack:
        for name in ("time", "monotonic", "perf_counter"):
            clock = getattr(time, name)
            ahead = partial(lambda clock: clock() + seconds, clock)
            stack.enter_context(mock.patch.object(time, name, ahead))
        corrected = mock.patch.object(host, "_timespec", lambda at: timespec(at - seconds))
        stack.enter_context(corrected)
        yield


def _by_other_clocks(at: Rank, victims: Sequence[int], how: int) -> Any:
    """The clocks of the hosts differ by 1e6 s."""
    with _clocks_ahead(1e6 * (at.rank // 2)):
        with host_of(at, 2):
            all_operators(at)
            at.barrier()
        return bereaved(at, victims, how, 2)


@pytest.mark.parametrize(("victims", "how"), [((1,), signal.SIGKILL), ((2, 3), signal.SIGSTOP)])
def test_every_survivor_learns_of_a_lost_rank_or_host(victims: tuple[int, ...], how: int) -> None:
    options: Any = {"fresh": True, "catch": True, "lost": victims}
    assert_all_learn(run(4, _by_other_clocks, victims, how, **options), victims)


CARD = Network(50e9, 20e-6, Provenance("assumed"))


def described(name: str, **changes: Any) -> Machine:
    machine = find(name, None)
    assert machine is not None
    return replace(machine, **changes)


def test_transfers_between_hosts_take_the_time_of_their_bytes() -> None:
    """With a slow network card a call lasts as long as its rail's bytes and the steps after."""
    slow = replace(CARD, bandwidth=1e9)
    on, shared = (described("h100-8", network=replace(slow, sharing=by)) for by in (1, 8))
    for hosts, operator in ((2, "all_gather_matmul"), (4, "matmul_reduce_scatter")):
        problem = Problem(operator, (512,) * 8 * hosts, 1024, 4096, "bfloat16", hosts=hosts)
        wire_s = (hosts - 1) * 512 * problem.moved_bytes / 1e9
        for name in ("shard-overlap", PIECES, "serial:collective"):
            seconds = predict(problem, Schedule.parse(name), on, "queued")
            assert wire_s < seconds < wire_s * 1.2, (operator, name)
        seconds = predict(problem, Schedule.parse("shard-overlap"), shared, "queued")
        assert seconds == pytest.approx(8 * wire_s, rel=0.05)
    # With unequal rows all ranks are simulated. The ranks of a host share its cards.
    rows = (512, 256) * 4
    problem = Problem("all_gather_matmul", rows, 64, 4096, "bfloat16", hosts=2)
    on = described("h100-8", ranks=4, network=replace(slow, sharing=4))
    seconds = predict(problem, Schedule.parse("shard-overlap"), on, "queued")
    assert seconds == pytest.approx(sum(rows[:4]) * problem.moved_bytes / 1e9, rel=0.05)
    # Rank 0 receives the sum of another host, and sums nothing for a rank there without rows.
    problem = Problem("matmul_reduce_scatter", (512, 0, 0, 256), 64, 4096, "bfloat16", hosts=2)
    on, serial = described("h100-8", ranks=2, network=CARD), Schedule.parse("serial")
    assert predict(problem, serial, on, "idle") > predict(problem, serial, on, "queued")
    assert crossed(plans(problem, serial)[0], on) == pytest.approx(20e-6 + 512 * 64 * 2 / 50e9)


def test_choices_over_hosts_need_a_network_and_no_entry_of_one_host() -> None:
    rows, by = (64,) * 8, Provenance("measured")
    names, times = ("growing", "growing"), ((1.0,) * 2, (2.0,) * 2)
    entry = Tuned("all_gather_matmul", rows, 64, 64, "bfloat16", *names, *times, by)
    tuned, no_network = described("h100-8", tuned=(entry,)), described("h100-8", network=None)
    one_host = Problem("all_gather_matmul", rows, 64, 64, "bfloat16")
    assert decide(one_host, machine=tuned, mode="queued").source == "tuned"
    assert decide(replace(one_host, hosts=2), machine=tuned, mode="queued").source == "model"
    problem = Problem("all_gather_matmul", (64,) * 16, 64, 64, "bfloat16", hosts=2)
    decision = decide(problem, machine=no_network, mode="queued")
    assert decision.source in ("rule", "fallback") and "lacks network" in decision.reason
    assert str(decide(problem, mode="idle").schedule) == IN_ROWS
    for n, expected in ((64, IN_ROWS), (65, IN_COLUMNS)):
        scatters = Problem("matmul_reduce_scatter", (64,) * 16, n, 64, "float32", hosts=2)
        assert str(decide(scatters, mode="idle").schedule) == expected
    with pytest.raises(ValueError, match="required the block 'network'"):
        predict(problem, Schedule.parse("growing"), no_network, "queued")
