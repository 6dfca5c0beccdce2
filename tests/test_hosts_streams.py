"""The GPU engine over several hosts, gloo between them, on streams that are threads."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ranks
import test_operators
import thread_driver
from cases import Case, all_exact, call, equal, exact, make, verify
from ranks import Rank, caught, gave_up
from test_hosts import (
    PATIENCE_S,
    SLACK_S,
    assert_all_learn,
    bereaved,
    host_of,
    problem_of,
)
from test_third_vendor import _on_threads

import ficco
from ficco.dma.engine import Missing
from ficco.dma.gloo import GlooLinks
from ficco.dma.gpu_network import NcclNetwork
from ficco.errors import BackendError, SignalTimeout
from ficco.problems.products import OPERATORS
from ficco.runtime.workspace import workspaces
from ficco.schedules import NAMED, plans


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[str]:
    with ranks.around(_on_threads, {}):
        yield "cpu"


def engine() -> Any:
    (found,) = (workspace.engine for workspace in workspaces())
    return found


# Calls.


@contextmanager
def jitter(seed: int) -> Iterator[None]:
    """Whatever a stream does comes late."""
    chance, put = random.Random(seed), thread_driver.Stream.put

    def late(stream: Any, work: Callable[[], Any]) -> None:
        pause = chance.choice((0, 0, 0, chance.uniform(0, 2e-3)))
        put(stream, lambda: (time.sleep(pause), work()))

    with mock.patch.object(thread_driver.Stream, "put", late):
        yield


def _jittered(at: Rank, hosts: int, calls: int) -> int:
    with host_of(at, hosts), jitter(at.rank):
        for turn in range(calls):
            schedule = ("hetero-fused-1d:pieces=3", "growing", "uniform-fused-2d")[turn % 3]
            operator = list(OPERATORS)[turn % len(OPERATORS)]
            rows = test_operators.rows_for(operator, at.world, "ragged")
            if operator == "all_gather_matmul":
                exact(at, Case(rows, 24, 16, schedule=schedule), turn)
            else:
                case = test_operators.Case(operator, rows, 24, 16, schedule=schedule)
                test_operators.exact(at, case, turn)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 1)])
def test_calls_under_jitter(hosts: int, local: int) -> None:
    assert ranks.run(hosts * local, _jittered, hosts, 120) == [120] * (hosts * local)


def _in_flight(at: Rank, names: Sequence[str]) -> int:
    """Calls that are enqueued before anybody waits for them."""
    with host_of(at, 2):
        cases = [equal(at.world, 5 + i, 16, 8, schedule=name) for i, name in enumerate(names)]
        all_exact(at, cases)
        assert engine().capabilities().network == "gloo through pinned host memory"
        engine().work.waits = False
        under_way = []
        for number, case in enumerate(cases * 10):
            made = make(at, case, number)
            if number % 7 == at.rank:
                time.sleep(0.02)
            under_way.append((case, call(case, made.a, made.b), made))
        ficco.synchronize()
        for case, results, made in under_way:
            verify(case, results, made)
    return len(under_way)


def test_calls_in_flight() -> None:
    names = ("hetero-fused-1d:pieces=3", "growing", "uniform-fused-2d", "serial")
    assert ranks.run(4, _in_flight, names) == [40] * 4


def _full(at: Rank, names: Sequence[str], most: int) -> int:
    """Streams that take so many things at a time, and let their caller wait for more."""
    with mock.patch.object(thread_driver, "SimpleQueue", partial(Queue, most)), jitter(at.rank):
        return _in_flight(at, names)


def test_calls_in_flight_on_full_queues() -> None:
    """The caller is kept waiting there, and what goes between hosts must not need it."""
    names = ("hetero-fused-1d:pieces=3", "growing", "uniform-fused-2d", "serial")
    assert ranks.run(4, _full, names, 4) == [40] * 4


def _allocates(at: Rank) -> list[bool]:
    """Symmetric memory that is asked for while a call is under way."""
    with host_of(at, 2), jitter(at.rank):
        case, quiet = equal(2, 8, 16, 8, schedule="growing"), []
        exact(at, case, 0)
        engine().work.waits, allocate = False, engine()._allocate

        def watched(*given: Any) -> Any:
            quiet.append(engine().quiet())
            return allocate(*given)

        engine()._allocate = watched
        for turn in range(4):
            made = make(at, case, turn)
            results = call(case, made.a, made.b)
            ficco.empty((8, 16 + turn), dtype=made.a.dtype, device=made.a.device)
            ficco.synchronize()
            verify(case, results, made)
    return quiet


def test_memory_is_allocated_when_nothing_needs_the_relay() -> None:
    """A rendezvous of PyTorch's waits for the device, and no thread of Python runs meanwhile."""
    for quiet in ranks.run(2, _allocates):  # the second slot, and four tensors
        assert quiet == [True] * 5


def _captured(at: Rank) -> Any:
    case = equal(at.world, 8, 16, 8, schedule="growing")
    with host_of(at, 2):
        exact(at, case, 0)
        engine().driver.capture_id = lambda stream: 7
        return caught(lambda: exact(at, case, 1))


def test_a_call_in_a_capture_is_refused() -> None:
    for found in ranks.run(2, _captured):
        assert found.type == "NotImplementedError"
        assert "gloo moves what goes between the hosts of this group" in found.text
        assert "outside of the capture, or use an NCCL group" in found.text


def _comes_and_goes(at: Rank) -> tuple[int, int]:
    """Open files, and threads of ficco's, before and after groups that come and go."""

    def held() -> int:
        gc.collect()
        threads = [one for one in threading.enumerate() if one.name.startswith("ficco")]
        return len(os.listdir("/proc/self/fd")) + len(threads)

    counts = []
    for turn in range(4):
        with host_of(at, 2):
            exact(at, equal(4, 64, 64, 64, schedule="growing"), turn)
            exact(at, equal(4, 256, 64, 64, schedule="growing"), turn)
            at.barrier()
        at.barrier()
        time.sleep(0.2)  # threads end by themselves
        counts.append(held())
    return counts[0], counts[-1]


def test_what_a_group_holds_is_given_back() -> None:
    # Rank 0 hosts the store, whose clients are not all gone at the same time.
    for first, last in ranks.run(4, _comes_and_goes, fresh=True)[1:]:
        assert last == first


# Faults.


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victims", [(3,), (2, 3), (1,)])
def test_every_survivor_learns_of_a_lost_rank_or_host(victims: tuple[int, ...], how: int) -> None:
    found = ranks.run(4, bereaved, victims, how, 2, fresh=True, catch=True, lost=victims)
    assert_all_learn(found, victims)
    if how == signal.SIGKILL:  # which a connection tells that breaks, before the time is up
        texts = [found[rank][0].text for rank in {*range(4)} - {*victims}]
        ended = [f"The process of rank {victim} on host" for victim in victims]
        assert any(text in one for text in ended for one in texts), texts
    for rank in {*range(4)} - {*victims}:
        assert {one["peer"] for one in gave_up(found[rank][0])} <= {*victims}


def _ends_in_an_exchange(at: Rank, victim: int, turn: int) -> Any:
    """A rank ends when it has begun to send, in one of its exchanges."""
    exchanges, begin = [0], GlooLinks.exchange

    def exchange(links: GlooLinks, parts: Any, *more: Any) -> Any:
        found = begin(links, parts, *more)
        exchanges[0] += 1
        if at.rank == victim and exchanges[0] == turn:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    os.environ["FICCO_HOST"] = f"host-{at.rank // 2}"
    rows = test_operators.rows_for("matmul_all_reduce", at.world, "equal")
    case = test_operators.Case("matmul_all_reduce", rows, 8, 8, schedule="hetero-fused-1d:pieces=2")
    a, b = test_operators.operands(case, at.rank, 0, at.device)
    with mock.patch.object(GlooLinks, "exchange", exchange):
        begun = time.monotonic()
        with ficco.options(timeout_s=PATIENCE_S):
            outcome = caught(
                lambda: [ficco.matmul_all_reduce(a, b, **case.arguments()) for _ in range(9)]
            )
        return outcome, time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "turn"), [(1, 1), (0, 4), (3, 9), (2, 6)])
def test_a_rank_that_ends_in_an_exchange(victim: int, turn: int) -> None:
    found = ranks.run(4, _ends_in_an_exchange, victim, turn, fresh=True, catch=True, lost=[victim])
    for rank in {*range(4)} - {victim}:
        outcome, seconds = found[rank]
        gave_up(outcome)
        assert seconds < PATIENCE_S + SLACK_S


def _disagree(at: Rank) -> Any:
    with host_of(at, 2):
        exact(at, equal(at.world, 4, 8, 8), 0)
        n = 8 if at.rank < 2 else 16
        return caught(lambda: exact(at, equal(at.world, 4, 8, n, schedule="growing"), 1))


def test_ranks_of_different_hosts_that_disagree() -> None:
    for failure in ranks.run(4, _disagree, fresh=True):
        assert failure.type == "RankMismatch", failure
        assert "ranks 0, 1: " in failure.text and "ranks 2, 3: " in failure.text


def _one_host_without_access(at: Rank) -> tuple[Any, list[str]]:
    """The error of a call, and the threads that are left."""
    why = "device 0 of rank 3 cannot access the memory of device 1 of rank 2"

    def means(driver: Any, engine: Any) -> Any:
        if at.rank > 1:
            raise NotImplementedError(why)
        return known(driver, engine)

    known = thread_driver.ThreadDriver.means
    with host_of(at, 2), mock.patch.object(thread_driver.ThreadDriver, "means", means):
        failure = caught(lambda: exact(at, equal(at.world, 4, 8, 8), 0))
    names = [thread.name for thread in threading.enumerate()]
    return failure, [name for name in names if name.startswith("ficco")]


def test_one_host_without_peer_access_is_named_on_all() -> None:
    found = ranks.run(4, _one_host_without_access, fresh=True)
    for rank, (failure, threads) in enumerate(found):
        assert failure.type == ("PeerFailed" if rank < 2 else "NotImplementedError"), failure
        assert "device 0 of rank 3 cannot access the memory of device 1" in failure.text
        # Which of the two is first varies.
        told = re.search("rank [23] failed", failure.text) and "host-1" in failure.text
        assert rank > 1 or told, failure
        assert not threads, threads


# NCCL, without NCCL: what its step says of a peer.


def _nccl() -> tuple[NcclNetwork, ctypes.c_uint32]:
    network, word = NcclNetwork.__new__(NcclNetwork), ctypes.c_uint32(0)
    network._at = ctypes.addressof(word)
    hosts = SimpleNamespace(named=lambda rank: "" if rank is None else f"host-{rank}")
    network._engine = SimpleNamespace(hosts=hosts)
    return network, word


def test_the_word_of_a_lane_tells_its_step_and_peer() -> None:
    network, word = _nccl()
    plan = plans(problem_of("all_gather_matmul", 2, 2, "equal"), NAMED["growing"])[1]
    step = next(i for i, one in enumerate(plan.steps) if one.op == "network")
    assert network.missing(plan) is None
    for value in range(len(plan.steps) + 2):
        word.value = value
        missing = network.missing(plan)
        if value - 1 in range(len(plan.steps)) and plan.steps[value - 1].op == "network":
            assert missing is not None and (missing.step, missing.peer) == (value - 1, 3)
        else:
            assert missing is None
    lost = network._refused(plan, step, RuntimeError("NCCL error: ncclRemoteError: it is gone"))
    assert isinstance(lost, SignalTimeout) and (lost.peer, lost.ended) == (3, True)
    assert "The process of rank 3 on host host-3 has ended" in str(lost)
    fused = plans(problem_of("matmul_all_to_all", 2, 2, "equal"), NAMED["uniform-fused-1d"])[1]
    step = next(i for i, one in enumerate(fused.steps) if one.op == "network")
    word.value = step + 1  # it receives from two ranks
    assert network.missing(fused) == Missing(step, None)
    lost = network._refused(fused, step, RuntimeError("NCCL error: ncclRemoteError: it is gone"))
    assert isinstance(lost, SignalTimeout) and (lost.peer, lost.ended) == (None, True)
    assert "The process of a peer has ended" in str(lost)
    other = network._refused(plan, step, RuntimeError("NCCL error: ncclInvalidUsage"))
    assert isinstance(other, BackendError) and "ncclInvalidUsage" in str(other)
