"""Groups on several hosts on GPUs. Ranks of one machine stand for hosts by ``FICCO_HOST``.

Where each rank has a GPU of its own, NCCL goes between the hosts; where ranks share one
(``FICCO_TESTS_RANKS_PER_GPU``), gloo does. No second machine takes part, nor a network card.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import test_fp8
import test_hosts_fp8
import test_operators
import torch
import torch.distributed as dist
from cases import Case, call, equal, exact, make, verify
from ranks import Failure, Rank, backend_on_gpus, caught, need_own_gpus, run
from test_gpu import GRAPHED, MILLISECOND
from test_hosts import assert_all_learn, bereaved, exact_over_hosts, host_of, problem_of

import ficco
from ficco.problems.products import OPERATORS
from ficco.runtime.workspace import SLOTS, workspaces
from ficco.schedules import Schedule, refusal

pytestmark = pytest.mark.multigpu

#: Hosts, and ranks on each.
TOPOLOGIES = ((2, 1), (2, 2), (3, 2), (2, 4))
DTYPES = ("float32", "bfloat16", "float16")
#: What NCCL's ranks of one machine need to meet over sockets, as those of several do.
SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("hosts", "local"), TOPOLOGIES)
def test_every_schedule_is_exact(operator: str, hosts: int, local: int) -> None:
    exact_over_hosts(operator, hosts, local, DTYPES, device="cuda", timeout=300)


@pytest.mark.parametrize("operator", test_fp8.OPERATORS)
@pytest.mark.parametrize("world", [2, 4])
def test_every_schedule_is_exact_in_float8(operator: str, world: int) -> None:
    cases = test_hosts_fp8.cases_of(operator, world, 2, "cuda")
    found = run(world, test_hosts_fp8.exact_over, 2, test_fp8.all_exact, cases, device="cuda")
    assert found == [len(cases)] * world


def _by(at: Rank, hosts: int) -> str:
    with host_of(at, hosts):
        exact(at, equal(at.world, 4, 8, 8, dtype="bfloat16"), 0)
        (found,) = (workspace.engine for workspace in workspaces())
        return found.capabilities().network


@pytest.mark.parametrize("world", [2, 4])
def test_the_library_is_that_of_the_group(world: int) -> None:
    library = {"nccl": "NCCL on at most", "gloo": "gloo through"}[backend_on_gpus(world)]
    for network in run(world, _by, 2, device="cuda"):
        assert network.startswith(library)


# In flight.


def _ahead(at: Rank, hosts: int, calls: int, names: Sequence[str]) -> int:
    """More calls than the queues of a GPU hold, all behind a kernel that takes its time."""
    with host_of(at, hosts), ficco.options(timeout_s=60, on_timeout="raise"):
        cases = [
            equal(at.world, 8 + 4 * i, 32, 24, dtype="bfloat16", schedule=s)
            for i, s in enumerate(names)
        ]
        made = [make(at, case, i) for i, case in enumerate(cases)]
        for case, one in zip(cases, made, strict=True):
            call(case, one.a, one.b)
        torch.cuda.synchronize()
        torch.cuda._sleep(300 * MILLISECOND * (1 + at.rank % 2))
        turns = [number % len(cases) for number in range(calls)]
        found = [call(cases[turn], made[turn].a, made[turn].b) for turn in turns]
        ficco.synchronize()
        for turn, results in zip(turns, found, strict=True):
            verify(cases[turn], results, made[turn])
    return calls


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("world", [2, 4])
def test_more_calls_than_queues_hold(world: int, connections: int) -> None:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    names = ("hetero-fused-1d:pieces=4", "growing", "uniform-fused-2d", "shard-overlap:pieces=3")
    where: Any = {"device": "cuda", "fresh": True, "env": env, "timeout": 90}
    assert run(world, _ahead, 2, 400, names, **where) == [400] * world


def _streams(at: Rank, hosts: int) -> None:
    """Callers' streams take turns on one network lane."""
    with host_of(at, hosts):
        case = equal(at.world, 48, 64, 40, dtype="bfloat16", schedule="hetero-fused-1d:pieces=3")
        streams, kept = [torch.cuda.Stream() for _ in range(3)], []
        made = [make(at, case, i) for i in range(12)]
        torch.cuda.synchronize()
        for i, one in enumerate(made):
            with torch.cuda.stream(streams[i % 3]):
                torch.cuda._sleep((at.rank + i) % 3 * MILLISECOND)
                kept.append(call(case, one.a, one.b))
        ficco.synchronize()
        for one, results in zip(made, kept, strict=True):
            verify(case, results, one)


@pytest.mark.parametrize("world", [2, 4])
def test_calls_of_several_streams(world: int) -> None:
    run(world, _streams, 2, device="cuda")


def _jitter(at: Rank, hosts: int, calls: int) -> int:
    """Ranks whose GPUs are late by turns."""
    with host_of(at, hosts):
        for turn in range(calls):
            operator = list(OPERATORS)[turn % len(OPERATORS)]
            schedule = ("hetero-fused-1d:pieces=3", "growing", "uniform-fused-2d")[turn % 3]
            rows = test_operators.rows_for(operator, at.world, "ragged")
            torch.cuda._sleep((7 * turn + 5 * at.rank) % 4 * MILLISECOND)
            if operator == "all_gather_matmul":
                exact(at, Case(rows, 24, 16, dtype="bfloat16", schedule=schedule), turn)
            else:
                case = test_operators.Case(operator, rows, 24, 16, "bfloat16", schedule)
                test_operators.exact(at, case, turn)
    return calls


@pytest.mark.parametrize("world", [2, 4])
def test_order_under_jitter(world: int) -> None:
    assert run(world, _jitter, 2, 140, device="cuda") == [140] * world


# Graphs.


def _captured(at: Rank, hosts: int, schedule: str, rows: int = 24, k: int = 64) -> Any:
    """Replays of more calls than there are slots, with other operands, between eager calls."""
    with host_of(at, hosts):
        case = equal(at.world, rows, k, 40, dtype="bfloat16", schedule=schedule, gathered=True)
        exact(at, case, 0)
        one = make(at, case, 0)
        a, b = one.a, one.b
        at.barrier()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [call(case, a, b) for _ in range(SLOTS + 1)]
        kept = []
        for iteration in range(1, 12):
            one = make(at, case, iteration)
            torch.cuda.synchronize()
            a.copy_(one.a)
            b.copy_(one.b)
            graph.replay()
            found = [[part.clone() for part in result] for result in results]
            kept.append((one, [*found, call(case, a, b)]))
            a.fill_(44)
        ficco.synchronize()
        for one, found in kept:
            for parts in found:
                verify(case, parts, one)
        del graph, results
        return None


def _capture(at: Rank, hosts: int, schedule: str, *sizes: int) -> Any:
    return caught(lambda: _captured(at, hosts, schedule, *sizes))


def captured_over_hosts() -> list[str]:
    problem = problem_of("all_gather_matmul", 2, 1, "equal")
    return [name for name in GRAPHED if not refusal(problem, Schedule.parse(name))]


@pytest.mark.parametrize("schedule", captured_over_hosts())
def test_calls_are_captured_where_nccl_goes_between(schedule: str) -> None:
    need_own_gpus(2)
    assert run(2, _capture, 2, schedule, device="cuda") == [None, None]


@pytest.mark.parametrize("schedule", ["serial", "hetero-fused-1d:pieces=2", "uniform-fused-2d"])
def test_long_messages_are_captured_where_nccl_goes_between(schedule: str) -> None:
    """NCCL registers the memory of these in a graph, which it has to do on both sides."""
    need_own_gpus(2)
    assert run(2, _capture, 2, schedule, 2048, 2048, device="cuda") == [None, None]


def test_calls_in_a_capture_are_refused_where_gloo_goes_between() -> None:
    if backend_on_gpus(2) == "nccl":
        pytest.skip("NCCL goes between hosts of one rank here; ranks that share a GPU have gloo")
    for found in run(2, _capture, 2, "growing", device="cuda", fresh=True):
        assert found.type == "NotImplementedError", found
        assert "gloo moves what goes between the hosts of this group" in found.text


# Faults.


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victims", [(3,), (2, 3), (1,)])
def test_every_survivor_of_four_learns_of_a_lost_rank(victims: tuple[int, ...], how: int) -> None:
    where: Any = {"device": "cuda", "fresh": True, "catch": True, "lost": victims}
    assert_all_learn(run(4, bereaved, victims, how, 2, **where), victims)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_survivor_of_two_learns_of_a_lost_rank(how: int) -> None:
    where: Any = {"device": "cuda", "fresh": True, "catch": True, "lost": (1,)}
    assert_all_learn(run(2, bereaved, (1,), how, 2, **where), (1,))


# NCCL as between machines: over sockets, since it takes the ranks for those of several.


def _over_sockets(fn: Callable[..., Any], at: Rank, *args: Any) -> Any:
    """Call a function with an NCCL group that was made when the ranks were on different hosts."""
    os.environ["NCCL_HOSTID"] = f"host-{at.rank}"
    return fn(at, *args, dist.new_group(list(range(at.world)), backend="nccl"))


def _exact_in(at: Rank, group: Any) -> int:
    os.environ["FICCO_HOST"] = f"host-{at.rank}"
    cases = []
    for operator in list(OPERATORS):
        for schedule in ("hetero-fused-1d:pieces=3", "growing", "uniform-fused-2d", "serial"):
            rows = test_operators.rows_for(operator, at.world, "ragged")
            if refusal(problem_of(operator, 2, 1, "ragged"), Schedule.parse(schedule)):
                continue
            if operator == "all_gather_matmul":
                cases.append(Case(rows, 24, 16, dtype="bfloat16", schedule=schedule))
                exact(at, cases[-1], len(cases), group)
            else:
                cases.append(test_operators.Case(operator, rows, 24, 16, "bfloat16", schedule))
                test_operators.exact(at, cases[-1], len(cases), group)
    big = equal(at.world, 4096, 1024, 64, dtype="bfloat16", schedule="hetero-fused-1d:pieces=4")
    for iteration in range(3):
        exact(at, big, iteration, group)
    ficco.close(group)
    dist.destroy_process_group(group)
    return len(cases)


WIRE: Any = {"device": "cuda", "backend": "gloo", "fresh": True, "env": SOCKETS}


def test_nccl_over_sockets() -> None:
    need_own_gpus(2)
    first, second = run(2, _over_sockets_exact, timeout=200, **WIRE)
    assert first == second > 20


def _over_sockets_exact(at: Rank) -> Any:
    return _over_sockets(_exact_in, at)


def _over_sockets_bereaved(at: Rank, victims: Sequence[int], how: int) -> Any:
    return _over_sockets(bereaved, at, victims, how, 2)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_lost_behind_sockets(how: int) -> None:
    need_own_gpus(2)
    found = run(2, _over_sockets_bereaved, (1,), how, catch=True, lost=(1,), **WIRE)
    assert isinstance(found[0], tuple) and isinstance(found[0][0], Failure), found[0]
    assert_all_learn(found, (1,))
