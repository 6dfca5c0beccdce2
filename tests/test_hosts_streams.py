"""The GPU engine over several hosts with gloo, on streams that are threads."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import ranks
import thread_driver
import torch
from cases import all_exact, call, equal, exact, make, verify
from ranks import Rank, caught, gave_up, on_ranks
from test_hosts import PIECES, assert_all_learn, bereaved, host_of, problem_of
from test_third_vendor import device  # noqa: F401  on this module's ranks, too

import ficco
from ficco.dma.engine import Engine, Missing
from ficco.dma.gpu_network import NcclNetwork
from ficco.dma.messages import GlooLinks
from ficco.errors import BackendError, SignalTimeout
from ficco.runtime.workspace import workspaces
from ficco.schedules import NAMED, plans


def engine() -> Any:
    (engine,) = (workspace.engine for workspace in workspaces())
    return engine


@contextmanager
def jitter(seed: int) -> Iterator[None]:
    """Delay the work of streams at random."""
    chance, put = random.Random(seed), thread_driver.Stream.put

    def late(stream: Any, work: Callable[[], Any]) -> None:
        pause = chance.choice((0, 0, 0, chance.uniform(0, 2e-3)))
        put(stream, lambda: (time.sleep(pause), work()))

    with mock.patch.object(thread_driver.Stream, "put", late):
        yield


@pytest.mark.parametrize("queued", [0, 4])
@on_ranks(4)
def test_calls_in_flight(at: Rank, queued: int) -> None:
    """Calls are enqueued before a rank waits for them. If ``queued``, a stream holds at most that
    many operations and blocks its caller; transfers between hosts must not depend on the caller.
    """
    names = ("hetero-fused-1d:pieces=3", "growing", "uniform-fused-2d", "serial")
    full = mock.patch.object(thread_driver, "SimpleQueue", partial(Queue, queued))
    with host_of(at, 2), full if queued else nullcontext(), jitter(at.rank * queued):
        cases = [equal(at.world, 5 + i, 16, 8, schedule=name) for i, name in enumerate(names)]
        all_exact(at, cases)
        assert engine().capabilities().network == "gloo through pinned host memory"
        engine().work.waits, in_flight = False, []
        for number, case in enumerate(cases * 5):
            operands = make(at, case, number)
            if number % 7 == at.rank:
                time.sleep(0.02)
            in_flight.append((case, call(case, operands.a, operands.b), operands))
        ficco.synchronize()
        for case, results, operands in in_flight:
            verify(case, results, operands)


@on_ranks(2)
def test_memory_is_allocated_when_nothing_needs_the_relay(at: Rank) -> None:
    """PyTorch's rendezvous holds the GIL while it waits for the device, so no thread runs."""
    with host_of(at, 2), jitter(at.rank):
        case, quiet = equal(2, 8, 16, 8, schedule="growing"), []
        exact(at, case, 0)
        engine().work.waits, allocate = False, engine()._allocate

        def watched(*arguments: Any) -> Any:
            quiet.append(engine().quiet())
            return allocate(*arguments)

        engine()._allocate = watched
        for turn in range(4):
            operands = make(at, case, turn)
            results = call(case, operands.a, operands.b)
            ficco.empty((8, 16 + turn), dtype=operands.a.dtype, device=operands.a.device)
            ficco.synchronize()
            verify(case, results, operands)
        assert quiet == [True] * 5  # for the second slot and four tensors


@on_ranks(2)
def test_pinned_memory_is_kept_while_the_group_is_open(at: Rank) -> None:
    """The relay's thread may hold the last view of memory that is no longer used. To free pinned
    memory PyTorch calls the driver, which may wait for a stream that waits for the relay."""
    freed: list[str] = []

    def pinned(driver: Any, nbytes: int) -> torch.Tensor:
        memory = np.empty(nbytes, np.uint8)
        weakref.finalize(memory, lambda: freed.append(threading.current_thread().name))
        return torch.from_numpy(memory)

    with host_of(at, 2), mock.patch.object(thread_driver.ThreadDriver, "pinned", pinned):
        for turn, rows in enumerate((4, 64, 256)):
            exact(at, equal(2, rows, 64, 64, schedule="growing"), turn)
            for cached in workspaces()[0].programs.values():
                cached.forget()
            gc.collect()
            assert not freed


@on_ranks(2)
def test_a_call_in_a_capture_is_refused(at: Rank) -> None:
    case = equal(at.world, 8, 16, 8, schedule="growing")
    with host_of(at, 2):
        exact(at, case, 0)
        engine().driver.capture_id = lambda stream: 7
        error = caught(lambda: exact(at, case, 1))
    reason = "gloo moves the data between the hosts of this group.*outside of the capture, or use"
    assert error.type == "NotImplementedError" and re.search(reason, error.text), error


@on_ranks(2)
def test_files_and_threads_of_a_group_are_released(at: Rank) -> None:
    """The number of open files and of ficco's threads is the same after each group."""
    counts = []
    for turn in range(3):
        with host_of(at, 2):
            exact(at, equal(2, 64, 64, 64, schedule="growing"), turn)
            exact(at, equal(2, 256, 64, 64, schedule="growing"), turn)
            at.barrier()
        at.barrier()
        time.sleep(0.2)  # threads end by themselves
        gc.collect()
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("ficco")]
        counts.append(len(os.listdir("/proc/self/fd")) + len(threads))
    # Rank 0 hosts the store, whose clients disconnect at different times.
    assert at.rank == 0 or counts[-1] == counts[0], counts


def reduces(at: Rank, group: Any) -> None:
    ficco.matmul_all_reduce(torch.ones(96, 8), torch.ones(8, 8), schedule=PIECES)


def _ends_in_an_exchange(turn: int) -> None:
    """Kill this process after the start of its ``turn``-th next exchange."""
    begin, remaining = GlooLinks.exchange, iter(range(turn - 1, -1, -1))

    def exchange(*arguments: Any) -> Any:
        exchanging = begin(*arguments)
        if not next(remaining):
            os.kill(os.getpid(), signal.SIGKILL)
        return exchanging

    mock.patch.object(GlooLinks, "exchange", exchange).start()


@pytest.mark.parametrize(
    ("victims", "how"),
    [*(((1,), signal.SIGKILL), ((2, 3), signal.SIGSTOP)), ((3,), partial(_ends_in_an_exchange, 6))],
    ids=["killed", "stopped", "in an exchange"],
)
def test_every_survivor_learns_of_a_lost_rank_or_host(victims: tuple[int, ...], how: Any) -> None:
    options: Any = {"fresh": True, "catch": True, "lost": victims}
    outcomes = ranks.run(4, bereaved, victims, how, 2, None, reduces, **options)
    assert_all_learn(outcomes, victims)
    survivors = [outcomes[rank][0] for rank in range(4) if rank not in victims]
    if how != signal.SIGSTOP:  # a broken connection reports the end before the timeout
        ended = [f"The process of rank {victim} on host" for victim in victims]
        assert any(text in outcome.text for text in ended for outcome in survivors), survivors
    if how in (signal.SIGKILL, signal.SIGSTOP):
        for outcome in survivors:
            assert {entry["peer"] for entry in gave_up(outcome)} <= {*victims}


def test_the_word_of_a_lane_tells_its_step_and_peer() -> None:
    """The error text of NCCL's network step, without NCCL."""
    network, word = NcclNetwork.__new__(NcclNetwork), ctypes.c_uint32(0)
    network._at = ctypes.addressof(word)
    hosts = SimpleNamespace(named=lambda rank: "" if rank is None else f"host-{rank}")
    network._engine = engine = SimpleNamespace(hosts=hosts)
    engine.timed_out = partial(Engine.timed_out, engine)
    remote_error = RuntimeError("NCCL error: ncclRemoteError: it is gone")
    for operator, schedule, peer, expected in (
        ("all_gather_matmul", "growing", 3, "The process of rank 3 on host host-3 has ended"),
        # The step receives from two ranks.
        ("matmul_all_to_all", "uniform-fused-1d", None, "The process of a peer has ended"),
    ):
        plan = plans(problem_of(operator, 2, 2, "equal"), NAMED[schedule])[1]
        crossing = [i for i, step in enumerate(plan.steps) if step.op == "network"]
        for value in range(len(plan.steps) + 2):
            word.value = value
            missing = Missing(value - 1, peer) if value - 1 in crossing else None
            assert network.missing(plan) == missing
        word.value = crossing[0] + 1
        lost = network._refused(plan, crossing[0], remote_error)
        assert isinstance(lost, SignalTimeout) and (lost.peer, lost.ended) == (peer, True)
        assert expected in str(lost)
    other = network._refused(plan, crossing[0], RuntimeError("NCCL error: ncclInvalidUsage"))
    assert isinstance(other, BackendError) and "ncclInvalidUsage" in str(other)
