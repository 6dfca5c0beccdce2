"""The contract on GPUs, and what only a GPU can get wrong: streams, graphs, queues, lifetimes."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_operators as operators
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from cases import (
    A_LAYOUTS,
    B_LAYOUTS,
    Case,
    all_exact,
    call,
    equal,
    exact,
    make,
    product,
    verify,
    weight_of,
)
from ranks import (
    Died,
    Failure,
    Rank,
    caught,
    gave_up,
    most_gpu_ranks,
    need_own_gpus,
    on_hopper,
    ranks,
    run,
)
from test_all_gather_matmul import (  # noqa: F401  collected here, with this module's device
    EAGER,
    KINDS,
    KNOBS,
    NAMES,
    end_of,
    named,
    random_case,
    start_ranks,
    test_any_call_behind_any_other,
    test_any_case,
    test_capped_calls_between_others,
    test_capped_memory_is_below_half_of_serial,
    test_column_pieces_round_once,
    test_dtypes,
    test_eight_ranks,
    test_float_error_is_that_of_a_plain_product,
    test_groups_in_turn,
    test_layouts_of_a,
    test_layouts_of_b,
    test_linear_weight_and_inference_mode,
    test_operands_may_change_after_the_call,
    test_results_stay,
    test_schedule_as_object_and_auto,
    test_schedules,
    test_subgroups,
    test_two_groups_at_once,
    test_ugly_sizes,
    test_workspace_grows_and_is_reused,
)
from test_faults import MISMATCHES, assert_unusable, timed
from test_operators import (  # noqa: F401  likewise
    test_an_all_reduce_is_equal_on_all_ranks_to_the_last_bit,
    test_errors_keep_to_their_bounds,
    test_memory_keeps_to_its_cap,
    test_operators_in_any_order,
    test_several_groups_of_a_mesh,
    test_sums_repeat_to_the_last_bit,
    test_wrong_arguments_are_refused,
)

import ficco
from ficco.compute.cublaslt import WORKSPACE, CublasLt
from ficco.dma.gpu import CLOSE_S
from ficco.errors import BackendError
from ficco.runtime.workspace import SLOTS, workspaces

pytestmark = pytest.mark.multigpu

#: Cycles of torch.cuda._sleep that take about a millisecond.
MILLISECOND = 1_800_000
#: Streams of a priority that PyTorch has, and hands out by turns.
POOLED = 32
#: Seconds that calls wait for a peer in the tests about faults.
PATIENCE_S = 3.0
#: Seconds that a fault may take from the call to the error: the wait, the look of the watchdog,
#: and freeing the streams.
SLACK_S = 6.0


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda"


def everyone(at: Rank) -> Any:
    """A group of all ranks with nothing of ficco's in it yet."""
    return dist.new_group(list(range(at.world)))


def leave(*groups: Any) -> None:
    torch.cuda.synchronize()
    for group in groups:
        ficco.close(group)
        dist.destroy_process_group(group)


def settle(at: Rank) -> None:
    """Every rank is here and its GPU is idle."""
    at.barrier()
    torch.cuda.synchronize()


# One GPU.


@pytest.mark.gpu
def test_one_gpu() -> None:
    cases = [
        equal(1, 24, 40, 16, dtype="bfloat16", schedule=named(name, knobs), gathered=True)
        for name in NAMES
        for knobs in KNOBS
    ]
    run(1, all_exact, cases, device="cuda")


@pytest.mark.parametrize("operator", operators.OPERATORS)
def test_every_schedule_is_exact_on_eight(operator: str) -> None:
    """The ranks that a host of 8 GPUs has. On CPUs so many would take minutes."""
    cases = operators.every_schedule(operator, 8, operators.DTYPES[:3])
    assert run(8, operators.all_exact, cases, device="cuda") == [len(cases)] * 8


@pytest.mark.parametrize("name", NAMES)
def test_gathers_of_eight(name: str) -> None:
    dtypes = operators.DTYPES[:3]
    cases = [
        equal(8, 24, 40, 16, dtype=dtypes[i % 3], schedule=named(name, knobs), gathered=True)
        for i, knobs in enumerate(KNOBS)
    ]
    assert run(8, all_exact, cases, device="cuda") == [len(cases)] * 8


REFUSED = {
    "cpu tensors": ("ValueError", ("CUDA tensor", "NCCL", "gloo", "move")),
    "b on the cpu": ("ValueError", ("one device", "cuda:0", "cpu", "move")),
    "a on the cpu": ("ValueError", ("cpu",)),
    "float64": ("NotImplementedError", ("float64", "bfloat16")),
    "fp8": ("ValueError", ("float8_e4m3fn", "scale_a, scale_b")),
}


def _refused(at: Rank, what: str) -> Any:
    a, b = torch.ones(4, 8, device=at.device), torch.ones(8, 6, device=at.device)
    args, kwargs = {
        "cpu tensors": ((a.cpu(), b.cpu()), {}),
        "b on the cpu": ((a, b.cpu()), {}),
        "a on the cpu": ((a.cpu(), b), {}),
        "float64": ((a.double(), b.double()), {}),
        "fp8": ((a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)), {}),
    }[what]
    found = caught(lambda: ficco.all_gather_matmul(*args, **kwargs))
    exact(at, equal(at.world, 4, 8, 6), 0)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("what", REFUSED)
def test_refused_on_a_gpu(what: str) -> None:
    kind, words = REFUSED[what]
    (found,) = run(1, _refused, what, device="cuda")
    assert isinstance(found, Failure) and found.type == kind, found
    for word in words:
        assert word in found.text


# Replays of eager calls whose operands lie where they lay.


class Resident:
    """A call whose operands and results lie where they lay before, with other contents."""

    def __init__(self, at: Rank, case: Case, group: Any) -> None:
        self.at, self.case, self.group = at, case, group
        made = make(at, case, 0, group)
        self.a, self.b = made.a, made.b

    def exact(self, iteration: int) -> None:
        made = make(self.at, self.case, iteration, self.group)
        torch.cuda.synchronize()  # or what is freed here might be used for the result
        self.a.copy_(made.a)
        self.b.copy_(made.b)
        found = call(self.case, self.a, self.b, self.group)
        self.a.fill_(44)  # a copy that outlived the call would read this
        verify(self.case, found, made, f"rank {self.at.rank}, iteration {iteration}:")


def recorded(group: Any) -> int:
    """How many calls of a group were recorded."""
    return sum(len(workspace.engine.replayed) for workspace in workspaces(group))


def _recorded_calls(at: Rank, schedule: str, a: str) -> tuple[int, int]:
    group = everyone(at)
    case = equal(at.world, 48, 64, 40, dtype="bfloat16", schedule=schedule, a=a, gathered=True)
    resident = Resident(at, case, group)
    with ficco.options(replay=False):
        for iteration in range(6):
            resident.exact(iteration)
    before = recorded(group)
    other = equal(at.world, 31, 24, 8, dtype="float16", schedule="hetero-fused-1d:pieces=3")
    for iteration in range(30):
        resident.exact(10 + iteration)
        if iteration % 7 == 3:
            exact(at, other, iteration, group)
    bigger = equal(at.world, 4096, 128, 8, dtype="bfloat16", schedule=schedule)
    exact(at, bigger, 1, group)
    exact(at, bigger, 2, group)  # both slots have grown: what was recorded is gone
    for iteration in range(12):
        resident.exact(100 + iteration)
    after = recorded(group)
    del resident
    leave(group)
    return before, after


@pytest.mark.parametrize("a", ["plain", "columns", "symmetric"])
@pytest.mark.parametrize(
    "schedule",
    [
        "growing",
        "hetero-fused-1d:pieces=4,compute=2",
        "shrinking:pull,copy=2,compute=2",
        "uniform-fused-2d:pieces=4",
    ],
)
def test_recorded_calls(schedule: str, a: str) -> None:
    for before, after in run(2, _recorded_calls, schedule, a, device="cuda"):
        assert before == 0 and after >= 4


def _recorded_on_streams(at: Rank, schedule: str) -> int:
    group = everyone(at)
    cases = [equal(at.world, 48, 64, n, dtype="bfloat16", schedule=schedule) for n in (40, 24)]
    streams = [torch.cuda.Stream() for _ in cases]
    operands, kept = [], []
    for case, stream in zip(cases, streams, strict=True):
        made = make(at, case, 0, group)
        stream.wait_stream(torch.cuda.current_stream())
        operands.append((made.a, made.b))
    wrong = []
    for iteration in range(40):
        turn = iteration % 3 % 2
        case, (a, b) = cases[turn], operands[turn]
        made = make(at, case, iteration, group)
        kept.append(made)  # the allocator knows it as a tensor of another stream
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(streams[turn]):
            a.copy_(made.a)
            b.copy_(made.b)
            (found,) = call(case, a, b, group)
            wrong.append((found != made.out).sum())
            del found
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0] * len(wrong)
    found_recorded = recorded(group)
    leave(group)
    return found_recorded


@pytest.mark.parametrize("schedule", ["growing:compute=2", "hetero-fused-1d:pieces=4,pull"])
def test_recorded_calls_on_two_streams(schedule: str) -> None:
    assert min(run(2, _recorded_on_streams, schedule, device="cuda")) >= 2


def _modes(at: Rank, schedule: str) -> None:
    group = everyone(at)
    case = equal(at.world, 48, 64, 40, dtype="bfloat16", schedule=schedule, gathered=True)
    with torch.inference_mode():
        for iteration in range(3):
            exact(at, case, iteration, group)
    for iteration in range(3, 6):
        exact(at, case, iteration, group)
    leave(group)


@pytest.mark.parametrize("schedule", ["shard-overlap:pull", "uniform-fused-1d:pieces=2"])
def test_inference_mode_leaves_nothing_behind(schedule: str) -> None:
    run(2, _modes, schedule, device="cuda")


def _recorded_settings(at: Rank) -> tuple[bool, bool]:
    group = everyone(at)
    generator = torch.Generator(at.device).manual_seed(1)
    a, b = (torch.randn(128, 128, device=at.device, generator=generator) for _ in range(2))

    def four() -> list[torch.Tensor]:
        torch.cuda.synchronize()
        found = []
        for _ in range(4):
            y = ficco.all_gather_matmul(a, b, group=group, schedule="growing")
            found.append(y.cpu())
            del y
        return found

    exact_products = four()
    torch.backends.cuda.matmul.allow_tf32 = True
    rough = four()
    torch.backends.cuda.matmul.allow_tf32 = False
    again = four()
    leave(group)
    same = all(torch.equal(exact_products[0], y) for y in exact_products + again)
    return same, any(torch.equal(exact_products[0], y) for y in rough)


def test_recorded_calls_follow_the_settings_of_products() -> None:
    assert run(2, _recorded_settings, device="cuda") == [(True, False)] * 2


# Graphs.

GRAPHED = (
    "serial",
    "serial:collective",
    "growing",
    "shrinking:pull",
    "shard-overlap:copy=2,compute=2",
    "hetero-fused-1d:pieces=4",
    "uniform-unfused-1d:pull,copy=2",
    "hetero-fused-2d:pieces=4",
    "uniform-unfused-2d:compute=2",
    "serial:kernel",
    "hetero-fused-1d:pieces=2,kernel",
)


def graphed_by(backend: str) -> list[str]:
    """Those of them that a group of this backend can capture: gloo's collectives cannot be."""
    return [name for name in GRAPHED if backend == "nccl" or name != "serial:collective"]


class Graphed:
    """A call captured in a graph, with operands that change between replays."""

    def __init__(self, at: Rank, case: Case, group: Any = None, stream: Any = None) -> None:
        self.at, self.case, self.group = at, case, group
        made = make(at, case, 0, group)
        self.a, self.b = made.a, made.b
        settle(at)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.results = call(case, self.a, self.b, group)

    def replay(self, made: Any) -> list[torch.Tensor]:
        """Enqueue new operands, a replay, and copies of its results."""
        self.a.copy_(made.a)
        self.b.copy_(made.b)
        self.graph.replay()
        # A replay that still waited for its peers behind its end would now read this.
        self.a.fill_(44)
        return [result.clone() for result in self.results]

    def exact(self, first: int, count: int) -> None:
        """Replays right after each other, then a look at all of them."""
        made = [make(self.at, self.case, first + i, self.group) for i in range(count)]
        found = [self.replay(one) for one in made]
        torch.cuda.synchronize()
        for i, (results, one) in enumerate(zip(found, made, strict=True)):
            verify(self.case, results, one, f"rank {self.at.rank}, replay {first + i}:")


def _replays(at: Rank, schedule: str, warm: bool) -> None:
    group = everyone(at)
    case = equal(at.world, 48, 64, 40, dtype="bfloat16", schedule=schedule, gathered=True)
    if warm:
        exact(at, case, 0, group)
    graphed = Graphed(at, case, group)
    graphed.exact(1, 20)
    graphed.exact(100, 3)
    del graphed
    leave(group)


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize("schedule", GRAPHED)
def test_replays(schedule: str, warm: bool) -> None:
    world = 4 if most_gpu_ranks() >= 4 else 2
    if schedule == "serial:collective":
        need_own_gpus(world)
    run(world, _replays, schedule, warm, device="cuda")


def _replays_of_sums(at: Rank, operator: str, schedule: str) -> None:
    """Captured calls whose operands change, more than there are slots, replayed between eager ones;
    these are recorded."""
    rows = operators.rows_for(operator, at.world, "equal")
    case = operators.Case(operator, rows, 64, 96, "bfloat16", schedule)
    a, b = operators.operands(case, at.rank, 0, at.device)
    settle(at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [getattr(ficco, operator)(a, b, **case.arguments()) for _ in range(SLOTS + 1)]
    kept = []
    for iteration in range(1, 30):
        for operand, new in zip(
            (a, b), operators.operands(case, at.rank, iteration, at.device), strict=True
        ):
            operand.copy_(new)
        graph.replay()
        found = [result.clone() for result in results]
        kept.append([*found, getattr(ficco, operator)(a, b, **case.arguments())])
        # A replay that still waited for its peers behind its end would now read this.
        a.fill_(44)
    torch.cuda.synchronize()
    for i, found in enumerate(kept, 1):
        right = operators.wanted(case, at.rank, i, at.device)
        same = [torch.equal(one, right) for one in found]
        assert all(same), f"rank {at.rank}, {case}, replay {i}: {same}"
    del graph
    ficco.close()


@ranks(2, 4, 8)
@pytest.mark.parametrize("operator", operators.SUMS)
@pytest.mark.parametrize("schedule", ["one-shot", "one-shot:pieces=3,compute=2", "serial:kernel"])
def test_replays_of_sums(world: int, operator: str, schedule: str) -> None:
    run(world, _replays_of_sums, operator, schedule, device="cuda")


def _graphs_between_calls(at: Rank, seed: int) -> None:
    """Graphs of one and of several calls, eager calls, growth, in a random order."""
    group = everyone(at)
    rng = random.Random(seed)
    small = [
        equal(at.world, 8, 16, 8, dtype="float16", schedule=schedule)
        for schedule in graphed_by(dist.get_backend())[:8]
    ]
    first = Graphed(at, small[seed % 8], group)
    first.exact(0, 3)
    # Eager calls that need more: the graph keeps what it has.
    exact(at, equal(at.world, 300, 256, 64, schedule="growing"), 1, group)
    exact(at, equal(at.world, 300, 256, 64, schedule="serial:pull"), 2, group)
    first.exact(10, 3)
    second = Graphed(at, equal(at.world, 500, 256, 64, schedule="hetero-unfused-1d"), group)
    graphs = [first, second]
    for step in range(60):
        kind = rng.randrange(5)
        if kind == 0 and len(graphs) < 6:
            graphs.append(Graphed(at, rng.choice(small), group))
        elif kind <= 2:
            rng.choice(graphs).exact(100 + 10 * step, rng.randrange(1, 4))
        else:
            case = rng.choice(small).on(rows=(rng.randrange(1, 700),) * at.world)
            exact(at, case, 1000 + step, group)
    del graphs, first, second
    leave(group)


@ranks(2, 4, 8)
def test_graphs_between_eager_calls(world: int) -> None:
    run(world, _graphs_between_calls, world, device="cuda")


def _many_calls_in_one_graph(at: Rank) -> None:
    group = everyone(at)
    cases = [
        equal(at.world, 8 + 4 * i, 32, 24, dtype="bfloat16", schedule=schedule)
        for i, schedule in enumerate(graphed_by(dist.get_backend()))
    ]
    made = [make(at, case, 0, group) for case in cases]
    operands = [(one.a, one.b) for one in made]
    settle(at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call(case, a, b, group) for case, (a, b) in zip(cases, operands, strict=True)]
    for iteration in range(10):
        made = [make(at, case, 50 * iteration + i, group) for i, case in enumerate(cases)]
        for (a, b), one in zip(operands, made, strict=True):
            a.copy_(one.a)
            b.copy_(one.b)
        graph.replay()
        for case, found, one in zip(cases, results, made, strict=True):
            verify(case, found, one, f"rank {at.rank}, replay {iteration}:")
    del graph
    leave(group)


def test_many_calls_in_one_graph() -> None:
    run(2, _many_calls_in_one_graph, device="cuda")


def _replay_beside_eager(at: Rank) -> None:
    """A replay on one stream and an eager call on another, in flight together."""
    group = everyone(at)
    graphed = Graphed(at, equal(at.world, 64, 128, 64, schedule="growing"), group)
    other = equal(at.world, 96, 64, 32, schedule="hetero-fused-1d:pieces=2")
    exact(at, other, 0, group)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    for iteration in range(20):
        made = [make(at, case, iteration, group) for case in (graphed.case, other)]
        torch.cuda.synchronize()
        with torch.cuda.stream(one):
            torch.cuda._sleep((at.rank + 1) * MILLISECOND // 4)
            replayed = graphed.replay(made[0])
        with torch.cuda.stream(two):
            eager = call(other, made[1].a, made[1].b, group)
        torch.cuda.synchronize()
        verify(graphed.case, replayed, made[0], f"rank {at.rank}, replay {iteration}:")
        verify(other, eager, made[1], f"rank {at.rank}, beside replay {iteration}:")
    del graphed
    leave(group)


def test_replay_beside_an_eager_call() -> None:
    run(2, _replay_beside_eager, device="cuda")


# Streams and lifetimes.


def _streams(at: Rank, schedule: str) -> None:
    """A call runs behind what its stream holds already, and before what comes next."""
    case = equal(at.world, 64, 96, 48, dtype="bfloat16", schedule=schedule, gathered=True)
    exact(at, case, 0)
    producer, caller, consumer = (torch.cuda.Stream() for _ in range(3))
    rng = random.Random(at.rank)
    for iteration in range(12):
        made = make(at, case, iteration)
        a, b = torch.full_like(made.a, 99), torch.full_like(made.b, 99)
        torch.cuda.synchronize()
        with torch.cuda.stream(producer):
            torch.cuda._sleep(rng.randrange(4) * MILLISECOND)
            a.copy_(made.a)
            b.copy_(made.b)
        with torch.cuda.stream(caller):
            caller.wait_stream(producer)
            results = call(case, a, b)
            a.fill_(33)
            b.fill_(33)
        consumer.wait_stream(caller)
        with torch.cuda.stream(consumer):
            kept = [result.clone() for result in results]
        consumer.synchronize()
        verify(case, kept, made, f"rank {at.rank}, iteration {iteration}:")


@pytest.mark.parametrize("schedule", GRAPHED)
def test_inputs_of_another_stream(schedule: str) -> None:
    run(2, _streams, schedule, device="cuda")


def _calls_on_many_streams(at: Rank) -> None:
    """Calls of one group in flight on several streams that nothing orders."""
    case = equal(at.world, 32, 64, 32, schedule="growing")
    streams = [torch.cuda.Stream() for _ in range(3)]
    rng = random.Random(7 + at.rank)
    made = [make(at, case.on(schedule=GRAPHED[i % len(GRAPHED)]), i) for i in range(40)]
    settle(at)
    found = []
    for i, one in enumerate(made):
        with torch.cuda.stream(streams[i % 3]):
            torch.cuda._sleep(rng.randrange(3) * MILLISECOND // 2)
            found.append(call(case.on(schedule=GRAPHED[i % len(GRAPHED)]), one.a, one.b))
    torch.cuda.synchronize()
    for i, (results, one) in enumerate(zip(found, made, strict=True)):
        verify(case, results, one, f"rank {at.rank}, call {i}:")


@ranks(2, 4, 8)
def test_calls_on_many_streams(world: int) -> None:
    run(world, _calls_on_many_streams, device="cuda")


def _groups_on_two_streams(at: Rank) -> None:
    """Two groups at once from one thread: their calls run beside each other."""
    groups = [everyone(at) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    cases = [
        equal(at.world, 40, 64, 32, schedule="hetero-fused-1d:pieces=4"),
        equal(at.world, 24, 96, 16, schedule="shrinking:pull"),
    ]
    pairs = list(zip(cases, groups, strict=True))
    made = [[make(at, case, 7 * i, group) for case, group in pairs] for i in range(30)]
    settle(at)
    rng = random.Random(at.rank)
    found = []
    for pair in made:
        for case, group, stream, one in zip(cases, groups, streams, pair, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(rng.randrange(3) * MILLISECOND // 4)
                found.append((case, call(case, one.a, one.b, group), one))
    torch.cuda.synchronize()
    for i, entry in enumerate(found):
        verify(*entry, f"rank {at.rank}, call {i // 2} of group {i % 2}:")
    leave(*groups)


def test_two_groups_on_two_streams() -> None:
    run(2, _groups_on_two_streams, device="cuda")


def _growth_beside_recordings(at: Rank) -> None:
    """One thread's calls are recorded, each at its second sight, while memory of another's, which
    need more every time, is freed behind a wait for the device."""
    from ficco.dma import memories

    groups = [everyone(at) for _ in range(2)]
    errors: list[BaseException] = []

    def recorded(i: int) -> None:
        made = make(at, case := equal(at.world, 16, 32, 24, schedule="growing"), i, groups[0])
        for _ in range(3):
            verify(case, call(case, made.a, made.b, groups[0]), made, f"recorded call {i}:")

    def growing(i: int) -> None:
        exact(at, equal(at.world, 8 * (i + 1), 64, 32, schedule="hetero-fused-1d"), i, groups[1])

    def work(one: Callable[[int], None]) -> None:
        try:
            torch.cuda.set_device(at.device)
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(60):
                    one(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(one,)) for one in (recorded, growing)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    # What could not be freed while the other thread went on is, now.
    exact(at, equal(at.world, 8 * 62, 64, 32, schedule="hetero-fused-1d"), 0, groups[1])
    assert not memories.unwanted
    leave(*groups)


@ranks(2, 4)
def test_memory_is_freed_beside_recorded_calls(world: int) -> None:
    run(world, _growth_beside_recordings, device="cuda", **EAGER)


def _reused_memory(at: Rank, schedule: str, layout: str) -> None:
    """The caching allocator hands an operand's memory out again right behind the call."""
    case = equal(at.world, 256, 512, 256, dtype="bfloat16", schedule=schedule, a=layout)
    exact(at, case, 0)
    wanted, found = [], []
    torch.cuda.synchronize()
    for iteration in range(40):
        made = make(at, case, iteration)
        a, b = made.a, made.b
        wanted.append(made)
        # Let the host run ahead, so that everything below is enqueued before the call begins.
        torch.cuda._sleep((1 + (iteration + at.rank) % 3) * MILLISECOND)
        found.append(call(case, a, b))
        size, other = a.untyped_storage().nbytes(), b.untyped_storage().nbytes()
        made.a = made.b = None  # type: ignore[assignment]
        del a, b
        for nbytes in (size, other):
            torch.empty(nbytes, dtype=torch.uint8, device=at.device).fill_(0x7F)
    torch.cuda.synchronize()
    for iteration, (results, made) in enumerate(zip(found, wanted, strict=True)):
        verify(case, results, made, f"rank {at.rank}, iteration {iteration}:")


@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize(
    "schedule", ["growing", "serial:pull", "hetero-unfused-1d:copy=2,compute=2"]
)
def test_operands_freed_right_after_the_call(schedule: str, layout: str) -> None:
    run(2, _reused_memory, schedule, layout, device="cuda")


def _chain(at: Rank, steps: int) -> None:
    """Each call's shard comes from the call before: one that overtakes changes the end."""
    case = equal(at.world, 16, 24, 24, dtype="float32")
    rng, names = random.Random(at.rank), random.Random(99)
    whole = make(at, case, 3).gathered
    weights = [weight_of(case, rank, 0, at.device) for rank in range(at.world)]
    mine = slice(16 * at.rank, 16 * (at.rank + 1))
    shard = whole[mine].clone()
    for _ in range(steps):
        schedule = names.choice(GRAPHED)
        if rng.random() < 0.3:
            torch.cuda._sleep(rng.randrange(MILLISECOND))
        (y,) = call(case.on(schedule=schedule), shard, weights[at.rank])
        shard = y[mine].remainder(7) - 3
    for _ in range(steps):
        products = [product(whole, weight) for weight in weights]
        whole = torch.cat(
            [y[16 * r : 16 * (r + 1)].remainder(7) - 3 for r, y in enumerate(products)]
        )
    assert torch.equal(shard, whole[mine]), f"rank {at.rank}: the chain broke"


@ranks(2, 4, 8)
def test_order_under_jitter(world: int) -> None:
    run(world, _chain, 200, device="cuda")


# Jitter.


def _jitter(at: Rank, seed: int, calls: int, tiled: Sequence[str] = (), group: Any = None) -> int:
    """Calls and replays on several streams, ranks out of step, each result checked on the GPU;
    many of ``tiled``, if given."""
    shared, local = random.Random(seed), random.Random(1000 * seed + at.rank)
    streams = [torch.cuda.Stream() for _ in range(3)]
    kinds = [random_case(shared, at.world, "cuda") for _ in range(20)]
    kinds += [equal(at.world, 64, 80, 48, dtype="bfloat16", schedule=name) for name in GRAPHED]
    kinds += [
        equal(at.world, rows, 64, 48, dtype="float16", schedule=name)
        for name in tiled
        for rows in (24, 200, 1024)
    ]
    # The gathered A is checked elsewhere; one result per call keeps this simple.
    kinds = [case.on(gathered=False) for case in kinds]
    graphs = [Graphed(at, case, group) for case in kinds[-3:]]
    wrong = torch.zeros(calls, dtype=torch.bool, device=at.device)
    settle(at)
    kept: list[tuple[int, torch.cuda.Stream, torch.Tensor, torch.Tensor]] = []

    def check(index: int, stream: torch.cuda.Stream, y: torch.Tensor, want: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            wrong[index].copy_((y != want).any())

    for index in range(calls):
        which = shared.randrange(len(kinds) + len(graphs))
        stream = streams[(which if which >= len(kinds) else shared.randrange(3)) % 3]
        with torch.cuda.stream(stream):
            if local.random() < 0.2:
                torch.cuda._sleep(local.randrange(MILLISECOND))
            if which >= len(kinds):  # a graph stays on its stream
                graphed = graphs[which - len(kinds)]
                made = make(at, graphed.case, index, group)
                y = graphed.replay(made)[0]
            else:
                made = make(at, kinds[which], index, group)
                y = call(kinds[which], made.a, made.b, group)[0]
                made.a.fill_(22)
        kept.append((index, stream, y, made.out))
        if local.random() < 0.02:
            time.sleep(local.random() * 0.005)
        if len(kept) > 6:  # results must outlast the calls behind them
            check(*kept.pop(0))
        if index % 250 == 249:
            torch.cuda.synchronize()
            bad = wrong.nonzero().flatten().tolist()
            assert not bad, f"rank {at.rank}: calls {bad[:20]} are wrong"
    for entry in kept:
        check(*entry)
    torch.cuda.synchronize()
    bad = wrong.nonzero().flatten().tolist()
    assert not bad, f"rank {at.rank}: calls {bad[:20]} are wrong"
    return calls


@ranks(2, 4, 8)
def test_jittered_calls_and_replays(world: int) -> None:
    calls = 2000 if world == 4 else 500
    assert run(world, _jitter, world, calls, device="cuda") == [calls] * world


# Queues and signals.


def _everything(at: Rank, signals: str) -> None:
    group = everyone(at)
    with ficco.options(signals=signals, timeout_s=20):
        for iteration, schedule in enumerate([*GRAPHED, *KINDS]):
            case = equal(at.world, 40, 64, 24, dtype="bfloat16", schedule=schedule)
            exact(at, case, iteration, group)
        graphed = Graphed(at, equal(at.world, 24, 40, 24, schedule="growing"), group)
        graphed.exact(0, 10)
        _jitter(at, 11, 120, group=group)
        for schedule in ("growing:compute=2", "hetero-fused-1d:pieces=4"):
            case = equal(at.world, 40, 64, 24, dtype="bfloat16", schedule=schedule)
            resident = Resident(at, case, group)
            for iteration in range(8):
                resident.exact(iteration)
    del graphed, resident
    leave(group)


@pytest.mark.parametrize("connections", [1, 8, 32])
def test_hardware_queues(connections: int) -> None:
    """Streams share hardware queues: with one connection all lanes are one FIFO."""
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    world = 4 if most_gpu_ranks() >= 4 else 2
    run(world, _everything, "auto", device="cuda", fresh=True, env=env)


@pytest.mark.parametrize("signals", ["write", "copy"])
@ranks(2, 4, 8)
def test_signals(world: int, signals: str) -> None:
    run(world, _everything, signals, device="cuda")


# Memory.


def _peak(at: Rank, schedule: str) -> tuple[int, int]:
    """Bytes beside operands and result while a capped call runs, and those of the gathered A."""
    group = everyone(at)
    rows, k, n = 2048, 8192, 512
    exact(at, equal(at.world, 8, 64, 8, dtype="bfloat16", schedule=schedule), 0, group)
    a = torch.zeros(rows, k, dtype=torch.bfloat16, device=at.device)
    b = torch.zeros(k, n, dtype=torch.bfloat16, device=at.device)
    torch.mm(a, b)  # the library's own workspace is there already
    whole = rows * at.world * k * 2
    out = rows * at.world * n * 2
    settle(at)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    allocated = torch.cuda.memory_allocated()
    with ficco.options(workspace_bytes=int(0.4 * whole)):
        y = ficco.all_gather_matmul(a, b, group=group, schedule=schedule)
        torch.cuda.synchronize()
    symmetric = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - reserved)
    cached = torch.cuda.max_memory_allocated() - allocated - out
    del y
    leave(group)
    return symmetric + cached, whole


def test_capped_memory_as_the_device_sees_it() -> None:
    world = 4 if torch.cuda.device_count() >= 4 else 2
    need_own_gpus(world)
    for extra, whole in run(world, _peak, "hetero-fused-1d:pieces=4", device="cuda"):
        assert 0 < extra < whole / 2, (extra, whole)


def _rendezvous_counted_apart(at: Rank) -> None:
    """PyTorch counts its rendezvous per process: here rank 0 has more of them than its peers."""
    group, alone = everyone(at), [dist.new_group([rank]) for rank in range(at.world)]
    if at.rank == 0:
        exact(at, equal(1, 64, 64, 64, dtype="bfloat16"), 0, alone[0])
    mine = symm_mem.empty(8, dtype=torch.float32, device=at.device).fill_(at.rank + 1)
    handle = symm_mem.rendezvous(mine, group)  # ficco's group of one has not moved the count
    settle(at)
    before = (at.rank - 1) % at.world
    assert torch.all(handle.get_buffer(before, (8,), torch.float32) == before + 1)
    settle(at)
    if at.rank == 0:
        for nbytes in (64, 1 << 22):
            symm_mem.rendezvous(symm_mem.empty(nbytes, device=at.device), alone[0])
    for iteration, rows in enumerate((64, 4096)):  # the second allocates anew
        exact(at, equal(at.world, rows, 64, 64, dtype="bfloat16"), iteration, group)
    torch.cuda.synchronize()
    if at.rank == 0:
        ficco.close(alone[0])
    ficco.close(group)


def test_rendezvous_of_pytorch_in_other_groups() -> None:
    run(2, _rendezvous_counted_apart, device="cuda", fresh=True)


# Faults.


def _casualty(at: Rank, schedule: str, victim: int, how: str, mode: str) -> dict[str, Any]:
    with ficco.options(timeout_s=PATIENCE_S, on_timeout=mode):
        if schedule == "one-shot":
            return _of_a_sum(at, schedule, victim, how)
        case = equal(at.world, 32, 64, 32, dtype="bfloat16", schedule=schedule)
        for iteration in range(3):
            exact(at, case, iteration)
        if how == "replay":
            graphed = Graphed(at, case)
            graphed.exact(0, 2)
        made = make(at, case, 9)

        def once() -> None:
            call(case, made.a, made.b)

        return _bereaved(
            at, victim, once, lambda: graphed.replay(made) if how == "replay" else once()
        )


def _of_a_sum(at: Rank, schedule: str, victim: int, how: str) -> dict[str, Any]:
    a = torch.ones(64, 32, dtype=torch.bfloat16, device=at.device)
    b = torch.ones(32, 48, dtype=torch.bfloat16, device=at.device)

    def once() -> torch.Tensor:
        return ficco.matmul_all_reduce(a, b, schedule=schedule)

    for _ in range(3):
        assert once().unique().tolist() == [32 * at.world]
    settle(at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = once()
    graph.replay()
    assert result.unique().tolist() == [32 * at.world]
    return _bereaved(at, victim, once, graph.replay if how == "replay" else once)


def _bereaved(
    at: Rank, victim: int, once: Callable[[], Any], fatal: Callable[[], Any]
) -> dict[str, Any]:
    """What survivors are told by a call, and by another one, once a rank has died."""
    settle(at)
    if at.rank == victim:
        # Rank 0 holds the store: it dies with it.
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    started = time.monotonic()

    def fail() -> None:
        fatal()
        ficco.synchronize()

    first = caught(fail)
    waited = time.monotonic() - started
    again, waited_again = timed(once)

    def tear_down() -> None:
        ficco.close()
        # destroy_process_group would wait for the dead in NCCL, which has this for such groups.
        dist.distributed_c10d._abort_process_group()

    torn, teardown = timed(tear_down)
    return {
        "first": first,
        "waited": waited,
        "again": again,
        "waited_again": waited_again,
        "torn": torn,
        "teardown": teardown,
    }


@pytest.mark.parametrize("mode", ["abort", "raise"])
@pytest.mark.parametrize(
    ("victim", "schedule", "how"),
    [
        (0, "growing", "eager"),
        (0, "growing", "replay"),
        (1, "hetero-fused-1d:pieces=4,pull", "eager"),
        (1, "hetero-fused-1d:pieces=4,pull", "replay"),
        (1, "serial:kernel", "eager"),
        (0, "serial:kernel", "replay"),
        (1, "one-shot", "eager"),
        (0, "one-shot", "replay"),
        # NCCL does not give up a communicator that a graph holds.
        (1, "serial:collective", "eager"),
    ],
)
def test_killed_rank(victim: int, schedule: str, how: str, mode: str) -> None:
    world = 4 if most_gpu_ranks() >= 4 else 2
    if schedule == "serial:collective":
        need_own_gpus(world)
    found = run(
        world,
        _casualty,
        schedule,
        victim,
        how,
        mode,
        device="cuda",
        fresh=True,
        catch=True,
        timeout=90,
    )
    assert isinstance(found[victim], Died) and found[victim].exitcode == -signal.SIGKILL
    for rank in set(range(world)) - {victim}:
        mine = found[rank]
        if mode == "abort":
            assert isinstance(mine, Died), mine
            assert mine.exitcode not in (0, None) and mine.exitcode > 0, mine
            text = mine.output
            assert "SignalTimeout" in text and "on_timeout='abort'" in text, text
        else:
            assert isinstance(mine, dict), mine
            for one in gave_up(mine["first"]):
                assert one["rank"] != victim
            assert mine["waited"] < PATIENCE_S + SLACK_S
            assert_unusable(mine)
            text = mine["first"].text
        operator = "matmul_all_reduce" if schedule == "one-shot" else "all_gather_matmul"
        # This rank, or another survivor, of which it has heard first.
        waited = [f"rank {peer} waited" in text for peer in range(world) if peer != victim]
        assert any(waited), text
        for word in (operator, "step", schedule):
            assert word in text, text
        # The dead, or one that waits for it.
        assert "has ended" in text or "timeout_s=" in text, text
        # Whom it waited for: the dead, or a survivor that itself waits for the dead. NCCL keeps
        # that to itself.
        assert "for rank " in text or schedule == "serial:collective", text


def _absent(at: Rank, victim: int, schedule: str) -> dict[str, Any] | None:
    """A rank that lives and never calls: the group fails, others do not."""
    group = everyone(at)
    case = equal(at.world, 32, 64, 32, dtype="bfloat16", schedule=schedule)
    exact(at, case, 0, group)
    exact(at, case, 1, group)
    found = None
    if at.rank != victim:
        made = make(at, case, 2, group)
        with ficco.options(timeout_s=PATIENCE_S, on_timeout="raise"):
            first, waited = timed(
                lambda: (call(case, made.a, made.b, group), ficco.synchronize(group))
            )
            again, waited_again = timed(lambda: call(case, made.a, made.b, group))
        torn, teardown = timed(lambda: ficco.close(group))
        found = {
            "first": first,
            "waited": waited,
            "again": again,
            "waited_again": waited_again,
            "torn": torn,
            "teardown": teardown,
        }
    settle(at)
    leave(group)
    exact(at, equal(at.world, 4, 4, 4), 1)
    return found


@pytest.mark.parametrize("schedule", ["growing", "serial:kernel", "serial:collective"])
def test_rank_that_never_calls(schedule: str) -> None:
    if schedule == "serial:collective":
        need_own_gpus(2)
    found = run(2, _absent, 1, schedule, device="cuda")[0]
    for one in gave_up(found["first"]):
        # Whom NCCL waits for it does not say.
        assert one["peer"] == (None if schedule == "serial:collective" else 1)
        assert one["rank"] == 0
    assert found["waited"] < PATIENCE_S + SLACK_S
    assert_unusable(found)


def _late(at: Rank, schedule: str) -> None:
    """A host that runs far ahead of its peers' is no fault: time counts from the call's begin."""
    group = everyone(at)
    case = equal(at.world, 32, 64, 32, dtype="bfloat16", schedule=schedule)
    exact(at, case, 0, group)
    made = [make(at, case, i, group) for i in range(8)]
    settle(at)
    with ficco.options(timeout_s=2, on_timeout="raise"):
        found = []
        for one in made:
            torch.cuda._sleep(500 * MILLISECOND)  # eight of them outlast the timeout
            found.append(call(case, one.a, one.b, group))
        ficco.synchronize(group)
    for results, one in zip(found, made, strict=True):
        verify(case, results, one, f"rank {at.rank}:")
    leave(group)


@pytest.mark.parametrize("schedule", ["growing", "serial:kernel", "serial:collective"])
def test_host_that_runs_ahead_is_no_fault(schedule: str) -> None:
    run(2, _late, schedule, device="cuda")


def _mismatch(at: Rank, changes: dict[str, Any], odd: int) -> dict[str, Any]:
    group = everyone(at)
    base = equal(at.world, 8, 8, 8, schedule="hetero-fused-1d")
    rows = changes.get("rows")
    other = base.on(**{**changes, **({"rows": rows[: at.world]} if rows else {})})
    for iteration in range(2):
        exact(at, base, iteration, group)
        exact(at, other, iteration, group)
    case = other if at.rank == odd else base
    made = make(at, case, 5, group)
    settle(at)
    with ficco.options(timeout_s=PATIENCE_S, on_timeout="raise"):
        first, waited = timed(lambda: (call(case, made.a, made.b, group), ficco.synchronize(group)))
        again, waited_again = timed(lambda: call(case, made.a, made.b, group))
    torn, teardown = timed(lambda: leave(group))
    exact(at, equal(at.world, 4, 4, 4), 1)  # other groups are well
    return {
        "first": first,
        "waited": waited,
        "again": again,
        "waited_again": waited_again,
        "torn": torn,
        "teardown": teardown,
    }


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch_when_warm(what: str) -> None:
    if what == "mover":
        need_own_gpus(2)  # a collective of gloo that one rank alone has called cannot be ended
    changes = {k: v[:2] if k == "rows" else v for k, v in MISMATCHES[what].items()}
    for found in run(2, _mismatch, changes, 1, device="cuda"):
        first = found["first"]
        assert isinstance(first, Failure) and first.type == "RankMismatch", first
        values = first.fields["values"]
        assert sorted(values) == [0, 1] and values[0] != values[1]
        assert found["waited"] < PATIENCE_S + SLACK_S
        assert_unusable(found)


def _alone(at: Rank, victim: int, how: str) -> dict[str, Any]:
    """One rank's driver refuses a call that all have agreed to, or its memory ends."""
    group = everyone(at)
    case = equal(at.world, 32, 64, 32, schedule="hetero-fused-1d")
    for iteration in range(2):
        exact(at, case, iteration, group)
    made = make(at, case, 2, group)
    if how == "memory":  # of a result that nobody has had yet
        case = equal(at.world, 1 << 16, 32, 1 << 10, schedule="hetero-fused-1d")
        made = make(at, case, 2, group)
    settle(at)
    engine = workspaces(group)[0].engine

    def refuse(*_: Any) -> None:
        raise BackendError("cuMemcpyDtoDAsync", "CUDA_ERROR_UNKNOWN", "made to fail")

    if at.rank == victim:
        torch.cuda.empty_cache()
        if how == "memory":
            torch.cuda.set_per_process_memory_fraction(1e-3)
        else:
            engine.execute = refuse
    with ficco.options(timeout_s=60, on_timeout="raise"):
        first, waited = timed(lambda: (call(case, made.a, made.b, group), ficco.synchronize(group)))
        again = caught(lambda: call(case, made.a, made.b, group))
    torch.cuda.set_per_process_memory_fraction(1.0)
    torn, teardown = timed(lambda: leave(group))
    exact(at, equal(at.world, 4, 4, 4), 1)  # other groups are well
    return {"first": first, "waited": waited, "again": again, "torn": torn, "teardown": teardown}


@pytest.mark.parametrize(
    ("how", "own", "theirs"),
    [
        ("driver", "BackendError", "PeerFailed"),
        ("memory", "OutOfMemoryError", "RankMismatch"),  # it asks before it agrees
    ],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails_alone_is_named_at_once(
    victim: int, how: str, own: str, theirs: str
) -> None:
    for rank, found in enumerate(run(2, _alone, victim, how, device="cuda")):
        first = found["first"]
        assert isinstance(first, Failure), first
        assert first.type == (own if rank == victim else theirs), first
        assert rank == victim or own in first.text, first
        assert found["waited"] < SLACK_S
        assert isinstance(found["again"], Failure)
        assert not isinstance(found["torn"], Failure) and found["teardown"] < SLACK_S


# Memory that is shared by handles.


@contextlib.contextmanager
def counted_handles() -> Iterator[list[int]]:
    """Addresses of this rank's allocations that are shared by handles, as they come and go."""
    from ficco.dma.cuda_driver import CudaDriver, CudaHandles

    live: list[int] = []

    class Counted(CudaHandles):
        def malloc(self, nbytes: int, kind: str) -> int:
            live.append(super().malloc(nbytes, kind))
            return live[-1]

        def free(self, address: int) -> None:
            super().free(address)
            live.remove(address)

    with mock.patch.object(CudaDriver, "handles", Counted()):
        yield live


def memory_of(group: Any) -> str:
    (workspace,) = workspaces(group)
    return str(workspace.engine.means.memory)


def _rendezvous_after_some_ranks(at: Rank) -> None:
    """ficco runs in some ranks of the job only. PyTorch's rendezvous of all of them come after."""
    world = dist.group.WORLD
    for turn, some in enumerate(([0, 1], [0, 2], [1, 2, 3], [3])):
        group = dist.new_group(some)
        if at.rank in some:
            for iteration, rows in enumerate((64, 4096)):  # the second allocates anew
                exact(at, equal(len(some), rows, 64, 64, dtype="bfloat16"), iteration, group)
            assert memory_of(group) == ("ipc" if len(some) > 1 else "torch")
        settle(at)
        mine = symm_mem.empty(8, dtype=torch.float32, device=at.device).fill_(at.rank + turn)
        torch.cuda.synchronize()
        handle = symm_mem.rendezvous(mine, world)
        settle(at)
        before = (at.rank - 1) % at.world
        assert torch.all(handle.get_buffer(before, (8,), torch.float32) == before + turn)
        settle(at)
        exact(at, equal(at.world, 64 << turn, 64, 64, dtype="bfloat16"), turn)
        assert memory_of(world) == "torch"
        if at.rank in some:
            leave(group)
        settle(at)
    ficco.close()


def test_rendezvous_of_pytorch_after_ficco_in_some_ranks() -> None:
    run(4, _rendezvous_after_some_ranks, device="cuda", fresh=True)


def _pairs(at: Rank) -> None:
    """Eager, recorded and captured calls of two pairs at the same time, and what they hold."""
    ficco.close()
    settle(at)
    for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3))):
        groups = [dist.new_group(pair) for pair in pairs]
        (group,) = (one for one, pair in zip(groups, pairs, strict=True) if at.rank in pair)
        with counted_handles() as live:
            for iteration, schedule in enumerate([*KINDS, "serial:kernel", "growing:pull"]):
                case = equal(2, 40, 64, 24, dtype="bfloat16", schedule=schedule, a="symmetric")
                exact(at, case, iteration, group)
            for schedule in ("growing", "serial:kernel", "hetero-fused-1d:pieces=4,pull"):
                case = equal(2, 48, 64, 40, dtype="bfloat16", schedule=schedule, gathered=True)
                graphed, resident = Graphed(at, case, group), Resident(at, case, group)
                graphed.exact(0, 5)
                for iteration in range(6):  # eager calls get other memory, the graph keeps its own
                    exact(at, equal(2, 512 << iteration, 64, 8), iteration, group)
                for iteration in range(12):
                    resident.exact(10 + iteration)
                graphed.exact(20, 5)
                del graphed, resident
            assert recorded(group) and memory_of(group) == "ipc" and live
            size = 1 << 29
            settle(at)
            free = torch.cuda.mem_get_info()[0]
            settle(at)
            tensor = ficco.empty((size,), dtype=torch.uint8, group=group, device=at.device)
            settle(at)
            assert free - torch.cuda.mem_get_info()[0] >= size
            settle(at)
            del tensor
            leave(group)
            assert not live
            settle(at)
            assert torch.cuda.mem_get_info()[0] >= free
            settle(at)


def test_pairs_of_ranks() -> None:
    run(4, _pairs, device="cuda", fresh=True, timeout=200)


def _held(at: Rank) -> None:
    """A tensor that the caller still has when the group is closed."""
    group, other = everyone(at), everyone(at)
    with _handles_everywhere() as live:
        tensor = ficco.empty((1 << 20,), dtype=torch.uint8, group=group, device=at.device)
        tensor.fill_(at.rank)
        settle(at)
        began = time.monotonic()
        leave(group)
        assert time.monotonic() - began < CLOSE_S
        assert live and tensor.unique().tolist() == [at.rank]
        del tensor
        exact(at, equal(at.world, 8, 8, 8), 0, other)
        settle(at)
        leave(other)
        assert not live


@contextlib.contextmanager
def _handles_everywhere() -> Iterator[list[int]]:
    """Groups of all ranks, too, share memory by handles."""
    from ficco.dma.cuda_driver import CudaDriver

    with counted_handles() as live, mock.patch.object(CudaDriver, "_memory", lambda *_: "ipc"):
        yield live


def test_a_tensor_outlives_its_group() -> None:
    run(2, _held, device="cuda", fresh=True)


def _by_handles(at: Rank, ends: bool, work: Callable[..., Any], *args: Any) -> Any:
    """What is tested of groups of all ranks, in memory that is shared by handles. ``ends``: on all
    ranks, and all is well."""
    ficco.close()
    settle(at)
    with _handles_everywhere() as live:
        found = work(at, *args)
        if ends:
            settle(at)
            ficco.close()
            settle(at)
            assert not live
    return found


@pytest.mark.parametrize("signals", ["auto", "write", "copy"])
@ranks(2, 4)
def test_signals_by_handles(world: int, signals: str) -> None:
    run(world, _by_handles, True, _everything, signals, device="cuda", fresh=True)


@pytest.mark.parametrize("work", [_groups_on_two_streams, _growth_beside_recordings])
def test_groups_by_handles(work: Callable[..., Any]) -> None:
    run(2, _by_handles, True, work, device="cuda", **EAGER)


@pytest.mark.parametrize("schedule", ["growing", "serial:kernel"])
def test_rank_that_never_calls_by_handles(schedule: str) -> None:
    found = run(2, _by_handles, False, _absent, 1, schedule, device="cuda", fresh=True)[0]
    for one in gave_up(found["first"]):
        assert (one["rank"], one["peer"]) == (0, 1)
    assert found["waited"] < PATIENCE_S + SLACK_S
    assert_unusable(found)


@pytest.mark.parametrize("how", ["eager", "replay"])
def test_killed_rank_by_handles(how: str) -> None:
    work = _by_handles, False, _casualty, "growing", 1, how, "raise"
    found = run(2, *work, device="cuda", fresh=True, catch=True, timeout=90)
    assert isinstance(found[1], Died) and found[1].exitcode == -signal.SIGKILL
    assert isinstance(found[0], dict), found[0]
    assert {one["rank"] for one in gave_up(found[0]["first"])} == {0}
    assert found[0]["waited"] < PATIENCE_S + SLACK_S
    assert_unusable(found[0])


# One product whose tiles wait.

TILED = ("tiled", "tiled:pieces=3,order=piece", "tiled:pieces=2,pull", "tiled:pieces=3+1,copy=2")

hopper = pytest.mark.skipif(not on_hopper(), reason="needs Hopper GPUs")


def _tiled_gathers(at: Rank) -> int:
    """Gathers of odd rows and usual ones, all layouts, both dtypes, with the gathered A, too."""
    chance = random.Random(7)
    cases = [
        Case(
            rows,
            *chance.choice(((64, 40), (72, 200), (1024, 264), (4096, 8))),
            dtype=chance.choice(("bfloat16", "float16")),
            schedule=schedule,
            a=chance.choice(A_LAYOUTS),
            b=chance.choice(B_LAYOUTS),
            gathered=chance.random() < 0.5,
        )
        for rows in ((16,) * 4, (17, 1, 130, 300), (0, 5, 0, 257), (512,) * 4, (1300, 7, 0, 640))
        for schedule in TILED
        for rows in (rows[: at.world],)
    ]
    # Each comes new, and warm after others.
    return all_exact(at, cases) + all_exact(at, cases[::-1], 3)


@hopper
@ranks(1, 2, 4)
def test_tiled_gathers_are_exact(world: int) -> None:
    assert run(world, _tiled_gathers, device="cuda") == [40] * world


def _tiled_operators(at: Rank) -> int:
    chance = random.Random(at.world)
    kinds = ("equal", "ragged", "few", "sparse")
    cases = [
        operators.Case(
            operator,
            operators.rows_for(operator, at.world, kind),
            chance.choice((8, 24, 64)),
            chance.choice((8, 40, 264)),
            chance.choice(("bfloat16", "float16")),
            schedule,
            chance.random() < 0.5,
        )
        for operator in operators.OPERATORS
        if operator not in operators.INNER
        for schedule in operators.TILED
        for kind in kinds
    ]
    return operators.all_exact(at, cases)


@hopper
@ranks(1, 2, 4)
def test_tiled_operators_are_exact(world: int) -> None:
    assert len(set(run(world, _tiled_operators, device="cuda"))) == 1


@hopper
@pytest.mark.parametrize("schedule", TILED)
def test_replays_of_tiled_products(schedule: str) -> None:
    world = 4 if most_gpu_ranks() >= 4 else 2
    for warm in (False, True):
        run(world, _replays, schedule, warm, device="cuda")


@hopper
@ranks(2, 4)
@pytest.mark.parametrize("schedule", ["tiled:pieces=2", "tiled:tail=2,pull"])
def test_replays_of_tiled_sums(world: int, schedule: str) -> None:
    for operator in operators.SUMS:
        run(world, _replays_of_sums, operator, schedule, device="cuda")


@hopper
@pytest.mark.parametrize(("schedule", "fewest"), [("tiled:pieces=2", 4), ("tiled:pull", 0)])
def test_recorded_tiled_products(schedule: str, fewest: int) -> None:
    """Copies are recorded, but for those that wait for the caller's stream."""
    for before, after in run(2, _recorded_calls, schedule, "plain", device="cuda"):
        assert before == 0 and after >= fewest
    run(2, _recorded_on_streams, schedule, device="cuda")


def _tiled_on_every_stream(at: Rank) -> None:
    """First calls, whose lists go to the device while a caller captures, on each of the streams
    that PyTorch hands out by turns."""
    group, case = everyone(at), equal(at.world, 64, 64, 48, dtype="bfloat16", schedule="tiled")
    exact(at, case, 0, group)
    for i in range(1, POOLED + 1):
        one = case.on(rows=(64 + 8 * i,) * at.world)
        Graphed(at, one, group, torch.cuda.Stream()).exact(i, 1)
    leave(group)


@hopper
def test_tiled_calls_captured_on_every_stream() -> None:
    run(2, _tiled_on_every_stream, device="cuda")


def _tiled_graphs_in_any_order(at: Rank) -> None:
    """Graphs of two groups, each on a stream of its own, which no two ranks replay in one order."""
    local, cases = random.Random(at.rank), [equal(at.world, 512, 2048, 512, dtype="bfloat16")] * 2
    cases = [case.on(schedule=name) for case, name in zip(cases, TILED, strict=False)]
    groups = [everyone(at) for _ in cases]
    graphs = [Graphed(at, case, group) for case, group in zip(cases, groups, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    kept = []
    for graphed in graphs:  # loads kernels, for which CUDA waits for the device
        graphed.exact(1000, 1)
    for iteration in range(40):
        for which in local.sample(range(2), 2):
            made = make(at, cases[which], 2 * iteration + which, groups[which])
            streams[which].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(streams[which]):
                kept.append((cases[which], graphs[which].replay(made), made))
    torch.cuda.synchronize()
    for case, results, made in kept:
        verify(case, results, made, f"rank {at.rank}:")
    graphs.clear()
    leave(*groups)


@hopper
@ranks(2, 4)
def test_tiled_graphs_in_any_order(world: int) -> None:
    run(world, _tiled_graphs_in_any_order, device="cuda")


@hopper
@ranks(2, 4)
def test_jittered_tiled_calls(world: int) -> None:
    calls = 2000 if world == 4 else 500
    assert run(world, _jitter, world, calls, TILED, device="cuda") == [calls] * world


def _tiled_on_one_queue(at: Rank) -> None:
    group = everyone(at)
    _jitter(at, 3, 150, TILED, group)
    leave(group)


@hopper
@pytest.mark.parametrize("connections", [1, 8])
def test_hardware_queues_of_tiled_products(connections: int) -> None:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    world = 4 if most_gpu_ranks() >= 4 else 2
    run(world, _tiled_on_one_queue, device="cuda", fresh=True, env=env)


@hopper
def test_a_piece_that_never_comes() -> None:
    found = run(2, _absent, 1, "tiled", device="cuda")[0]
    first = found["first"]
    assert isinstance(first, Failure) and first.type == "SignalTimeout", first
    assert first.fields["peer"] == 1 and first.fields["rank"] == 0
    assert re.search(r"step 'all \d+:\d+ \(matmul", first.text), first.text
    assert found["waited"] < PATIENCE_S + SLACK_S
    assert_unusable(found)


@hopper
def test_a_host_that_runs_ahead_of_tiles_is_no_fault() -> None:
    run(2, _late, "tiled:pieces=2", device="cuda")


@hopper
@pytest.mark.parametrize(
    ("sizes", "dtype", "words"),
    [((20, 8), "bfloat16", "multiples of 8"), ((16, 8), "float32", "bfloat16 or float16")],
)
def test_tiled_products_are_refused_by_name(sizes: tuple[int, int], dtype: str, words: str) -> None:
    case = equal(2, 16, *sizes, dtype=dtype, schedule="tiled")
    for found in run(2, _refusal, case, device="cuda"):
        assert found.type == "NotImplementedError" and words in found.text, found


def _refusal(at: Rank, case: Case) -> Any:
    made = make(at, case, 0)
    found = caught(lambda: call(case, made.a, made.b))
    exact(at, case.on(schedule="growing"), 1)
    return found


# The end of a process.

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
import ficco

how = sys.argv[1]
rank, gpus = int(os.environ["RANK"]), torch.cuda.device_count()
torch.cuda.set_device(rank % gpus)
if gpus < int(os.environ["WORLD_SIZE"]):  # ranks share GPUs, which NCCL refuses
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    dist.init_process_group("gloo")
else:
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
a, b = torch.ones(8, 16, device="cuda"), torch.ones(16, 4, device="cuda")
for schedule in ("serial", "growing:pull", "hetero-fused-1d:copy=2"):
    y = ficco.all_gather_matmul(a, b, schedule=schedule)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    z = ficco.all_gather_matmul(a, b, schedule="growing")
graph.replay()
torch.cuda.synchronize()
assert (y == 16).all() and (z == 16).all()
dist.barrier()
torch.cuda.synchronize()
print("done", flush=True)
if how == "close":
    ficco.close()
    dist.destroy_process_group()
elif how == "destroy":
    dist.destroy_process_group()
elif how == "error":
    raise RuntimeError("on purpose")
elif how == "in-flight" and rank == 0:
    # The peer will not come, and this process does not wait either.
    with ficco.options(timeout_s=3):
        ficco.all_gather_matmul(a, b, schedule="growing")
"""


@pytest.mark.parametrize(("how", "code"), [("close", 0), ("destroy", 0), ("end", 0), ("error", 1)])
def test_exit(how: str, code: int, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    for rank, (returned, out, err) in enumerate(end_of(start_ranks(tmp_path, SCRIPT, 2, how), 80)):
        assert "done" in out and returned == code, f"rank {rank}:\n{out}\n{err}"
        assert "Fatal Python error" not in err and "Exception ignored" not in err, err
        assert ("on purpose" in err) == (how == "error")
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "ficco" in name}


def test_exit_with_a_call_in_flight(tmp_path: Path) -> None:
    """The process ends, by itself or by the watchdog; it does not wait for the peer for ever."""
    found = end_of(start_ranks(tmp_path, SCRIPT, 2, "in-flight"), 60)
    assert all("done" in out for _, out, _ in found), found
    assert found[0][0] in (0, 1) and found[1][0] == 0, found


def _adds(at: Rank) -> None:
    lt, stream = CublasLt(), torch.cuda.current_stream().cuda_stream
    room = torch.empty(WORKSPACE, dtype=torch.uint8, device=at.device)
    for dtype in (torch.bfloat16, torch.float16):
        for m, n, k in ((64, 48, 32), (7, 9, 5), (130, 264, 72), (4, 6, 1)):
            for transposed in (False, True):
                a = torch.randint(-2, 3, (m, k), device=at.device).to(dtype)
                b = torch.randint(-1, 2, (k, n), device=at.device).to(dtype)
                b = b.t().contiguous().t() if transposed else b
                c = torch.randint(-9, 9, (m, n + 8), device=at.device).to(dtype)[:, :n]
                out = torch.full((m, n + 16), 7.0, device=at.device, dtype=dtype)
                assert CublasLt.serves(c, a, b, out[:, :n])
                assert lt.multiply(c, a, b, out[:, :n], room, stream)
                assert torch.equal(out[:, :n].double(), c.double() + a.double() @ b.double())
                assert (out[:, n:] == 7).all()


def test_the_library_adds_what_lies_elsewhere() -> None:
    run(1, _adds, device="cuda")
