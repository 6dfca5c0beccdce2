"""Groups on several hosts on GPUs. Ranks of one machine stand for hosts by ``FICCO_HOST``.

NCCL moves data between the hosts if each rank has a separate GPU, gloo if ranks share a GPU
(``FICCO_TESTS_RANKS_PER_GPU``). The tests use one machine and no network card.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import call, equal, exact, make, replays, verify
from ranks import Failure, Rank, backend_on_gpus, caught, leave, need_own_gpus, run
from subjects import SUBJECTS, Case
from test_gpu import (
    GRAPHED,
    MILLISECOND,
    alike,
    all_exact,
    drawn,
    in_one_graph,
    jittered,
    known,
    once_known,
)
from test_hosts import assert_all_learn, bereaved, gathers, host_of, problem_of

import ficco
from ficco.problems.products import OPERATORS
from ficco.runtime.workspace import SLOTS
from ficco.schedules import Schedule, refusal

pytestmark = pytest.mark.multigpu

#: Variables that make NCCL's ranks of one machine communicate over sockets.
SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
SIGNALS = pytest.mark.parametrize(
    "sig", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"]
)


def _over(at: Rank, hosts: int, cases: Sequence[tuple[str, Case]]) -> int:
    with host_of(at, hosts):
        return all_exact(at, cases)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("hosts", "local"), [(3, 2), (2, 4)])
def test_more_hosts_and_ranks_than_in_the_contract(name: str, hosts: int, local: int) -> None:
    world = hosts * local
    cases = drawn(name, world, SUBJECTS[name].schedules(world, hosts), ("equal", "few"))
    assert run(world, _over, hosts, cases, device="cuda") == [len(cases)] * world


# In flight.


def _ahead(at: Rank, hosts: int, calls: int, names: Sequence[str]) -> int:
    """Enqueue more calls than a GPU's queues hold, all after a long kernel."""
    with host_of(at, hosts), ficco.options(timeout_s=60, on_timeout="raise"):
        cases = [
            equal(at.world, 8 + 4 * i, 32, 24, dtype="bfloat16", schedule=s)
            for i, s in enumerate(names)
        ]
        operands = [make(at, case, i) for i, case in enumerate(cases)]
        for case, own in zip(cases, operands, strict=True):
            call(case, own.a, own.b)
        torch.cuda.synchronize()
        torch.cuda._sleep(300 * MILLISECOND * (1 + at.rank % 2))
        turns = [number % len(cases) for number in range(calls)]
        results = [call(cases[turn], operands[turn].a, operands[turn].b) for turn in turns]
        ficco.synchronize()
        for turn, outputs in zip(turns, results, strict=True):
            verify(cases[turn], outputs, operands[turn])
    return calls


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("world", [2, 4])
def test_more_calls_than_queues_hold(world: int, connections: int) -> None:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    names = ("hetero-fused-1d:pieces=4", "growing", "uniform-fused-2d", "shard-overlap:pieces=3")
    options: Any = {"device": "cuda", "fresh": True, "env": env, "timeout": 90}
    assert run(world, _ahead, 2, 400, names, **options) == [400] * world


def _jitter(at: Rank, hosts: int, calls: int) -> int:
    kinds = []
    for name in OPERATORS:
        names = ("hetero-fused-1d:pieces=3", "growing", "uniform-fused-2d")
        cases = drawn(name, at.world, names, ("uneven",), layout="", dtype="bfloat16")
        kinds += [known(at, *case, iteration) for iteration, case in enumerate(cases)]
    with host_of(at, hosts):
        return jittered(at, 5, calls, kinds, once_known)


@pytest.mark.parametrize("world", [2, 4])
def test_jittered_calls(world: int) -> None:
    assert run(world, _jitter, 2, 150, device="cuda") == [150] * world


# Graphs.


def _captured(at: Rank, hosts: int, cases: Sequence[tuple[str, Case]]) -> Any:
    with host_of(at, hosts):
        all_exact(at, cases[:1])
        return caught(lambda: in_one_graph(at, cases))


def captured_over_hosts() -> list[str]:
    problem = problem_of("all_gather_matmul", 2, 1, "equal")
    return [name for name in GRAPHED if not refusal(problem, Schedule.parse(name))]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *(("all_gather_matmul", schedule) for schedule in captured_over_hosts()),
        ("all_gather_attention", "growing"),
        ("ulysses_attention", "uniform-fused-1d:pieces=2"),
        ("experts", "auto"),
    ],
)
def test_calls_are_captured_with_nccl_between_hosts(name: str, schedule: str) -> None:
    need_own_gpus(2)
    cases = alike(name, 2, [schedule] * (SLOTS + 1))
    assert run(2, _captured, 2, cases, device="cuda") == [None, None]


def _long(at: Rank, schedule: str) -> None:
    case = equal(at.world, 2048, 2048, 40, dtype="bfloat16", schedule=schedule)
    operands = make(at, case, 0)

    def renew(iteration: int) -> None:
        new = make(at, case, iteration)
        operands.a.copy_(new.a)
        operands.b.copy_(new.b)

    with host_of(at, 2):
        exact(at, case, 0)
        replays(at, lambda: call(case, operands.a, operands.b)[0], renew)


@pytest.mark.parametrize("schedule", ["serial", "hetero-fused-1d:pieces=2", "uniform-fused-2d"])
def test_long_messages_are_captured_with_nccl_between_hosts(schedule: str) -> None:
    """In a graph NCCL registers the memory of long messages, which both sides have to do."""
    need_own_gpus(2)
    run(2, _long, schedule, device="cuda")


def test_calls_in_a_capture_are_refused_with_gloo_between_hosts() -> None:
    if backend_on_gpus(2) == "nccl":
        pytest.skip("NCCL goes between hosts of one rank here; ranks that share a GPU have gloo")
    cases = alike("all_gather_matmul", 2, ["growing"] * (SLOTS + 1))
    for error in run(2, _captured, 2, cases, device="cuda", fresh=True):
        assert error.type == "NotImplementedError", error
        assert "gloo moves the data between the hosts of this group" in error.text


# Faults.


def attends(at: Rank, group: Any) -> None:
    """Attention with gathered keys and by heads, with gradients."""
    options: Any = {"device": at.device, "dtype": torch.bfloat16, "requires_grad": True}
    shards = [torch.ones(1, 8, 64, 64, **options) for _ in "qkv"]
    out = ficco.all_gather_attention(*shards, causal=True, placement="head-tail", group=group)
    out.sum().backward()
    ficco.ulysses_attention(*shards, causal=True, group=group).sum().backward()


@SIGNALS
@pytest.mark.parametrize(
    ("world", "victims", "calls"),
    [
        *((4, victims, gathers) for victims in ((3,), (2, 3), (1,))),
        *((2, (1,), calls) for calls in (gathers, attends)),
        (4, (3,), attends),
    ],
)
def test_every_survivor_learns_of_a_lost_rank(
    world: int, victims: tuple[int, ...], calls: Callable[..., None], sig: int
) -> None:
    options: Any = {"device": "cuda", "fresh": True, "catch": True, "lost": victims}
    assert_all_learn(run(world, bereaved, victims, sig, 2, None, calls, **options), victims)


# NCCL over sockets, as between machines: different host names make it use the network.

WIRE: Any = {"device": "cuda", "backend": "gloo", "fresh": True, "env": SOCKETS}


def _over_sockets(at: Rank, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function with an NCCL group whose ranks have different host names."""
    os.environ["NCCL_HOSTID"] = f"host-{at.rank}"
    return fn(at, *args, dist.new_group(list(range(at.world)), backend="nccl"))


def _exact_in(at: Rank, group: Any) -> int:
    os.environ["FICCO_HOST"] = f"host-{at.rank}"
    count = 0
    for name in OPERATORS:
        schedules = SUBJECTS[name].schedules(2, 2)[::6]
        count += all_exact(at, drawn(name, 2, schedules, ("uneven",), dtype="bfloat16"), group)
    big = equal(at.world, 4096, 1024, 64, dtype="bfloat16", schedule="hetero-fused-1d:pieces=4")
    for iteration in range(3):
        exact(at, big, iteration, group)
    leave(group)
    return count


def test_nccl_over_sockets() -> None:
    need_own_gpus(2)
    first, second = run(2, _over_sockets, _exact_in, **WIRE)
    assert first == second > 20


@SIGNALS
def test_a_rank_lost_over_sockets(sig: int) -> None:
    need_own_gpus(2)
    outcomes = run(2, _over_sockets, bereaved, (1,), sig, 2, catch=True, lost=(1,), **WIRE)
    assert isinstance(outcomes[0], tuple) and isinstance(outcomes[0][0], Failure), outcomes[0]
    assert_all_learn(outcomes, (1,))
