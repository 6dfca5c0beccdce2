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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ranks
import thread_driver
import torch
from cases import all_exact, call, equal, exact, make, verify
from ranks import Rank, caught, gave_up, on_ranks
from test_hosts import PIECES, assert_all_learn, bereaved, host_of, problem_of
from test_third_vendor import _on_threads

import ficco
from ficco.dma.engine import Engine, Missing
from ficco.dma.gpu_network import NcclNetwork
from ficco.dma.messages import GlooLinks
from ficco.errors import BackendError, SignalTimeout
from ficco.runtime.workspace import workspaces
from ficco.schedules import NAMED, plans


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[str]:
    with ranks.around(_on_threads, {}):
        yield "cpu"


def engine() -> Any:
    (found,) = (workspace.engine for workspace in workspaces())
    return found


@contextmanager
def jitter(seed: int) -> Iterator[None]:
    """Whatever a stream does comes late."""
    chance, put = random.Random(seed), thread_driver.Stream.put

    def late(stream: Any, work: Callable[[], Any]) -> None:
        pause = chance.choice((0, 0, 0, chance.uniform(0, 2e-3)))
        put(stream, lambda: (time.sleep(pause), work()))

    with mock.patch.object(thread_driver.Stream, "put", late):
        yield


# Calls.


@pytest.mark.parametrize("most", [0, 4])
@on_ranks(4)
def test_calls_in_flight(at: Rank, most: int) -> None:
    """Calls that are enqueued before anybody waits for them. With ``most`` streams take so many
    things at a time, and let their caller wait for more; what goes between hosts must not need it.
    """
    names = ("hetero-fused-1d:pieces=3", "growing", "uniform-fused-2d", "serial")
    full = mock.patch.object(thread_driver, "SimpleQueue", partial(Queue, most))
    with host_of(at, 2), full if most else nullcontext(), jitter(at.rank * most):
        cases = [equal(at.world, 5 + i, 16, 8, schedule=name) for i, name in enumerate(names)]
        all_exact(at, cases)
        assert engine().capabilities().network == "gloo through pinned host memory"
        engine().work.waits, under_way = False, []
        for number, case in enumerate(cases * 5):
            made = make(at, case, number)
            if number % 7 == at.rank:
                time.sleep(0.02)
            under_way.append((case, call(case, made.a, made.b), made))
        ficco.synchronize()
        for case, results, made in under_way:
            verify(case, results, made)


@on_ranks(2)
def test_memory_is_allocated_when_nothing_needs_the_relay(at: Rank) -> None:
    """Memory is asked for while a call is under way. A rendezvous of PyTorch's waits for the
    device, and no thread of Python runs meanwhile."""
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
        assert quiet == [True] * 5  # the second slot, and four tensors


@on_ranks(2)
def test_a_call_in_a_capture_is_refused(at: Rank) -> None:
    case = equal(at.world, 8, 16, 8, schedule="growing")
    with host_of(at, 2):
        exact(at, case, 0)
        engine().driver.capture_id = lambda stream: 7
        found = caught(lambda: exact(at, case, 1))
    why = "gloo moves the data between the hosts of this group.*outside of the capture, or use"
    assert found.type == "NotImplementedError" and re.search(why, found.text), found


@on_ranks(2)
def test_what_a_group_holds_is_given_back(at: Rank) -> None:
    """Open files and threads of ficco's are as many after groups that come and go."""
    counts = []
    for turn in range(3):
        with host_of(at, 2):
            exact(at, equal(2, 64, 64, 64, schedule="growing"), turn)
            exact(at, equal(2, 256, 64, 64, schedule="growing"), turn)
            at.barrier()
        at.barrier()
        time.sleep(0.2)  # threads end by themselves
        gc.collect()
        threads = [one for one in threading.enumerate() if one.name.startswith("ficco")]
        counts.append(len(os.listdir("/proc/self/fd")) + len(threads))
    # Rank 0 hosts the store, whose clients are not all gone at the same time.
    assert at.rank == 0 or counts[-1] == counts[0], counts


# Faults.


def reduces(at: Rank, group: Any) -> None:
    ficco.matmul_all_reduce(torch.ones(96, 8), torch.ones(8, 8), schedule=PIECES)


def _ends_in_an_exchange(turn: int) -> None:
    """This process ends when it has begun to send, in one of its next exchanges."""
    begin, left = GlooLinks.exchange, iter(range(turn - 1, -1, -1))

    def exchange(*given: Any) -> Any:
        found = begin(*given)
        if not next(left):
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    mock.patch.object(GlooLinks, "exchange", exchange).start()


@pytest.mark.parametrize(
    ("victims", "how"),
    [
        *(((1,), signal.SIGKILL), ((2, 3), signal.SIGSTOP)),
        ((3,), partial(_ends_in_an_exchange, 6)),
    ],
    ids=["killed", "stopped", "in an exchange"],
)
def test_every_survivor_learns_of_a_lost_rank_or_host(victims: tuple[int, ...], how: Any) -> None:
    where: Any = {"fresh": True, "catch": True, "lost": victims}
    found = ranks.run(4, bereaved, victims, how, 2, None, reduces, **where)
    assert_all_learn(found, victims)
    survivors = [found[rank][0] for rank in range(4) if rank not in victims]
    if how != signal.SIGSTOP:  # which a connection tells that breaks, before the time is up
        ended = [f"The process of rank {victim} on host" for victim in victims]
        assert any(text in one.text for text in ended for one in survivors), survivors
    if how in (signal.SIGKILL, signal.SIGSTOP):
        for outcome in survivors:
            assert {one["peer"] for one in gave_up(outcome)} <= {*victims}


def test_the_word_of_a_lane_tells_its_step_and_peer() -> None:
    """NCCL, without NCCL: what its step says of a peer."""
    network, word = NcclNetwork.__new__(NcclNetwork), ctypes.c_uint32(0)
    network._at = ctypes.addressof(word)
    hosts = SimpleNamespace(named=lambda rank: "" if rank is None else f"host-{rank}")
    network._engine = engine = SimpleNamespace(hosts=hosts)
    engine.timed_out = partial(Engine.timed_out, engine)
    gone = RuntimeError("NCCL error: ncclRemoteError: it is gone")
    for operator, schedule, peer, words in (
        ("all_gather_matmul", "growing", 3, "The process of rank 3 on host host-3 has ended"),
        # It receives from two ranks.
        ("matmul_all_to_all", "uniform-fused-1d", None, "The process of a peer has ended"),
    ):
        plan = plans(problem_of(operator, 2, 2, "equal"), NAMED[schedule])[1]
        crossing = [i for i, step in enumerate(plan.steps) if step.op == "network"]
        for value in range(len(plan.steps) + 2):
            word.value = value
            missing = Missing(value - 1, peer) if value - 1 in crossing else None
            assert network.missing(plan) == missing
        word.value = crossing[0] + 1
        lost = network._refused(plan, crossing[0], gone)
        assert isinstance(lost, SignalTimeout) and (lost.peer, lost.ended) == (peer, True)
        assert words in str(lost)
    other = network._refused(plan, crossing[0], RuntimeError("NCCL error: ncclInvalidUsage"))
    assert isinstance(other, BackendError) and "ncclInvalidUsage" in str(other)
