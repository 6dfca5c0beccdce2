"""GPU tests of streams, graphs, queues, lifetimes, memory and lost ranks, and of eight ranks and
tiled products, which the contract leaves out on GPUs."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import subjects
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from cases import Case, call, equal, exact, make, verify
from ranks import (
    Died,
    Failure,
    Rank,
    backend_on_gpus,
    gave_up,
    leave,
    need_own_gpus,
    on_hopper,
    on_ranks,
    ranks,
    run,
    wider,
)
from subjects import SUBJECTS, reference
from test_all_gather_matmul import (  # noqa: F401  collected here, on GPUs
    end_of,
    random_case,
    start_ranks,
    test_float_error_is_that_of_a_plain_product,
    test_layouts_of_a,
)
from test_faults import assert_unusable, timed
from test_operators import (  # noqa: F401  likewise
    all_exact,
    test_an_all_reduce_is_equal_on_all_ranks_to_the_last_bit,
    test_errors_keep_to_their_bounds,
    test_memory_keeps_to_its_cap,
    test_operators_in_any_order,
    test_sums_repeat_to_the_last_bit,
)

import ficco
from ficco.compute.cublaslt import WORKSPACE, CublasLt
from ficco.dma.gpu import CLOSE_S
from ficco.problems.products import OPERATORS
from ficco.runtime.workspace import SLOTS, workspaces

pytestmark = pytest.mark.multigpu

#: Cycles of torch.cuda._sleep that take about a millisecond.
MILLISECOND = 1_800_000
#: Streams in PyTorch's pool of a priority. PyTorch hands them out round-robin.
POOLED = 32
#: Timeout of calls in the tests of faults, in seconds.
PATIENCE_S = 3.0
#: Limit on the seconds from the timeout to the error: a period of the watchdog, and freeing the
#: streams.
SLACK_S = 6.0
#: Settings of new processes for two threads that each have a group. With lazy loading, CUDA waits
#: for the device before it loads a kernel, and two ranks that do so deadlock.
EAGER: dict[str, Any] = {"fresh": True, "env": {"CUDA_MODULE_LOADING": "EAGER"}}
#: Schedules of one product whose tiles wait for their rows.
TILED = ("tiled", "tiled:pieces=3,order=piece", "tiled:pieces=2,pull", "tiled:pieces=3+1,copy=2")
SUMS = ("matmul_reduce_scatter", "matmul_all_reduce")

hopper = pytest.mark.skipif(not on_hopper(), reason="needs Hopper GPUs")


def on_hopper_only(*parameters: Any) -> list[Any]:
    return [pytest.param(parameter, marks=hopper) for parameter in parameters]


def everyone(at: Rank) -> Any:
    return dist.new_group(list(range(at.world)))


def settle(at: Rank) -> None:
    at.barrier()
    torch.cuda.synchronize()


# Exact results that the contract does not cover.


def drawn(
    name: str, world: int, schedules: Sequence[str], kinds: Sequence[str], **fixed: Any
) -> list[tuple[str, subjects.Case]]:
    """Return a case of a subject for each schedule. All other fields are random."""
    subject, chance = SUBJECTS[name], random.Random(f"{name} {world}")
    cases = []
    for schedule in schedules:
        case = subject.case(chance, world, chance.choice(kinds), "cuda").on(needs=())
        layout = chance.choice(("", *subject.layouts))
        dtype = chance.choice(subject.dtypes("cuda"))
        cases.append((name, case.on(schedule=schedule, layout=layout, dtype=dtype).on(**fixed)))
    return cases


def on_device(at: Rank, name: str, case: subjects.Case, iteration: int) -> list[torch.Tensor]:
    """Return the operands of a rank, then the constants, which have no gradient."""
    dtype, subject = getattr(torch, case.dtype), SUBJECTS[name]
    operands = [x.to(at.device, dtype) for x in subject.make(case, at.rank, iteration)]
    return operands + [x.to(at.device) for x in subject.constants(case, at.rank, iteration)]


def called(
    name: str, case: subjects.Case, tensors: Sequence[torch.Tensor], group: Any = None
) -> list[torch.Tensor]:
    subject, count = SUBJECTS[name], len(SUBJECTS[name].operands)
    operands = subject.laid_out(case, list(tensors[:count]))
    return subject.call(case, operands, list(tensors[count:]), group=group)


def right(
    at: Rank, name: str, case: subjects.Case, iteration: int, results: Sequence[torch.Tensor]
) -> None:
    subject = SUBJECTS[name]
    operands = [subject.make(case, rank, iteration) for rank in range(at.world)]
    wanted = subject.together(case, operands, iteration)[at.rank]
    for result, want in zip(results, wanted, strict=True):
        about = f"rank {at.rank}, iteration {iteration}, {name}, {case}"
        subjects.compare(result, want, subject, about)


@pytest.mark.parametrize("name", SUBJECTS)
def test_eight_ranks(name: str) -> None:
    """The number of GPUs of a large host. On CPUs these tests would take minutes."""
    cases = drawn(name, 8, SUBJECTS[name].schedules(8)[::2], ("equal", "few"))
    assert run(8, all_exact, cases, device="cuda") == [len(cases)] * 8


@hopper
@ranks(1, 2, 4)
def test_tiled_operators_are_exact(world: int) -> None:
    """Each case is run twice: as a first call and, after all others, as a warm call."""
    cases, names = [], [name for name, kind in OPERATORS.items() if not kind.inner]
    for name in (*names, "all_gather_matmul, gathered"):
        schedules = (*subjects.TILED, *(TILED if "gather" in name else ()))
        for k, n, dtype in ((8, 264, "bfloat16"), (24, 8, "float16"), (64, 40, "bfloat16")):
            kinds, fixed = ("equal", "uneven", "few"), {"sizes": (k, n), "dtype": dtype}
            cases += drawn(name, world, schedules, kinds, **fixed)
    cases += cases[::-1]
    assert run(world, all_exact, cases, device="cuda") == [len(cases)] * world


# Refusals.


@pytest.mark.gpu
@on_ranks(1)
def test_refused_on_a_gpu(at: Rank) -> None:
    a, b = torch.ones(4, 8, device=at.device), torch.ones(8, 6, device=at.device)
    narrow = torch.float8_e4m3fn
    for operands, kind, words in (
        ((a.cpu(), b.cpu()), ValueError, ("CUDA tensor", "NCCL", "gloo", "move")),
        ((a, b.cpu()), ValueError, ("one device", "cuda:0", "cpu", "move")),
        ((a.cpu(), b), ValueError, ("cpu",)),
        ((a.double(), b.double()), NotImplementedError, ("float64", "bfloat16")),
        ((a.to(narrow), b.to(narrow)), ValueError, ("float8_e4m3fn", "scale_a, scale_b")),
    ):
        with pytest.raises(kind) as raised:
            ficco.all_gather_matmul(*operands)
        assert all(word in str(raised.value) for word in words), raised.value
        exact(at, equal(at.world, 4, 8, 6), 0)


# Replays of eager calls whose operands keep their addresses.


class Resident:
    """A call whose operands keep their addresses while their contents change."""

    def __init__(self, at: Rank, case: Case, group: Any = None) -> None:
        self.at, self.case, self.group = at, case, group
        sample = make(at, case, 0, group)
        self.a, self.b = sample.a, sample.b

    def exact(self, iteration: int) -> None:
        sample = make(self.at, self.case, iteration, self.group)
        torch.cuda.synchronize()  # otherwise the result may reuse memory freed here
        self.a.copy_(sample.a)
        self.b.copy_(sample.b)
        results = call(self.case, self.a, self.b, self.group)
        self.a.fill_(44)  # a copy still in flight after the call would read 44
        verify(self.case, results, sample, f"rank {self.at.rank}, iteration {iteration}:")


def recorded(group: Any) -> int:
    return sum(len(workspace.engine.replayed) for workspace in workspaces(group))


def _recorded_calls(at: Rank, schedule: str, a: str) -> tuple[int, int]:
    group = everyone(at)
    case = equal(at.world, 48, 64, 40, dtype="bfloat16", schedule=schedule, a=a, gathered=True)
    with ficco.options(replay=False):
        with torch.inference_mode():  # records nothing
            for iteration in range(3):
                exact(at, case.on(a="plain"), iteration, group)
        resident = Resident(at, case, group)
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
    exact(at, bigger, 2, group)  # both slots have grown: recordings are dropped
    for iteration in range(12):
        resident.exact(100 + iteration)
    after = recorded(group)
    del resident
    leave(group)
    return before, after


@pytest.mark.parametrize(
    ("schedule", "a", "fewest"),
    [
        ("growing", "plain", 4),
        ("growing", "symmetric", 4),
        ("hetero-fused-1d:pieces=4,compute=2", "columns", 4),
        ("shrinking:pull,copy=2,compute=2", "plain", 4),
        ("shrinking:pull,copy=2,compute=2", "symmetric", 4),
        ("uniform-fused-2d:pieces=4", "columns", 4),
        # ficco's kernels, and copies that wait for the caller's stream, may stay unrecorded.
        ("growing:kernel", "plain", 0),
        ("serial:kernel", "plain", 0),
        pytest.param("tiled:pieces=2", "plain", 4, marks=hopper),
        pytest.param("tiled:pull", "plain", 0, marks=hopper),
    ],
)
def test_recorded_calls(schedule: str, a: str, fewest: int) -> None:
    for before, after in run(2, _recorded_calls, schedule, a, device="cuda"):
        assert before == 0 and after >= fewest


@on_ranks(2)
def test_recorded_calls_follow_the_settings_of_products(at: Rank) -> None:
    """Results change with a setting of cuBLAS, and are equal once the setting is restored."""
    group = everyone(at)
    generator = torch.Generator(at.device).manual_seed(1)
    a, b = (torch.randn(128, 128, device=at.device, generator=generator) for _ in range(2))
    results: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for tf32 in (False, True, False):
        torch.cuda.synchronize()
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for _ in range(4):
            y = ficco.all_gather_matmul(a, b, group=group, schedule="growing")
            results[tf32].append(y.cpu())
            del y
    leave(group)
    same = {tf32: [torch.equal(results[False][0], y) for y in results[tf32]] for tf32 in results}
    assert all(same[False]) and not any(same[True])


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
    """Return the schedules that a group of a backend can capture; gloo has no such collective."""
    return [name for name in GRAPHED if backend == "nccl" or name != "serial:collective"]


class Graphed(Resident):
    """A call captured in a graph, with operands that change between replays."""

    def __init__(self, at: Rank, case: Case, group: Any = None, stream: Any = None) -> None:
        super().__init__(at, case, group)
        settle(at)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.results = call(case, self.a, self.b, group)

    def replay(self, sample: Any) -> list[torch.Tensor]:
        """Enqueue new operands, a replay, and copies of its results."""
        self.a.copy_(sample.a)
        self.b.copy_(sample.b)
        self.graph.replay()
        # A replay that still waits for peers after its end would read 44.
        self.a.fill_(44)
        return [result.clone() for result in self.results]

    def exact(self, first: int, count: int = 1) -> None:
        """Enqueue ``count`` replays back to back, then check all results."""
        samples = [make(self.at, self.case, first + i, self.group) for i in range(count)]
        replays = [self.replay(sample) for sample in samples]
        torch.cuda.synchronize()
        for i, (results, sample) in enumerate(zip(replays, samples, strict=True)):
            verify(self.case, results, sample, f"rank {self.at.rank}, replay {first + i}:")


def in_one_graph(at: Rank, cases: Sequence[tuple[str, subjects.Case]], group: Any = None) -> None:
    """Capture more calls than there are slots in one graph. Replay it with other operands, between
    eager calls, which ficco records."""

    assert len(cases) > SLOTS
    contents = [[on_device(at, *case, iteration) for case in cases] for iteration in range(20)]
    operands = [[tensor.clone() for tensor in tensors] for tensors in contents[0]]
    torch.mm(*torch.ones(2, 8, 8, device=at.device))  # cuBLAS allocates before the capture
    settle(at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [called(*case, own, group) for case, own in zip(cases, operands, strict=True)]
    history = []
    for iteration, new in enumerate(contents):
        for targets, sources in zip(operands, new, strict=True):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        graph.replay()
        replayed = [[result.clone() for result in tensors] for tensors in results]
        i = iteration % len(cases)
        history.append([*enumerate(replayed), (i, called(*cases[i], operands[i], group))])
        # A replay that still waits for peers after its end would read 44.
        for a, *_ in operands:
            a.view(torch.uint8).fill_(44)
    torch.cuda.synchronize()
    for iteration, calls in enumerate(history):
        for i, tensors in calls:
            right(at, *cases[i], iteration, tensors)


def alike(
    name: str, world: int, schedules: Sequence[str], **fixed: Any
) -> list[tuple[str, subjects.Case]]:
    """Return cases that graphs can capture: equal rows, contiguous operands; GEMMs in bfloat16."""
    if name in OPERATORS:
        fixed = {"sizes": (64, 96), "dtype": "bfloat16", **fixed}
    cases = drawn(name, world, schedules, ("equal",), layout="", **fixed)
    return [(name, SUBJECTS[name].traceable(case)) for name, case in cases]


def first_in_a_graph(at: Rank, cases: Sequence[tuple[str, subjects.Case]]) -> None:
    """Capture the first calls of a group, then later calls."""
    group = everyone(at)
    in_one_graph(at, cases, group)
    in_one_graph(at, cases[::-1], group)
    leave(group)


@ranks(2, 4)
@pytest.mark.parametrize("operator", SUMS)
@pytest.mark.parametrize(
    "schedule",
    [
        *("one-shot", "one-shot:pieces=3,compute=2", "serial:kernel"),
        *on_hopper_only("tiled:pieces=2", "tiled:tail=2,pull"),
    ],
)
def test_sums_in_one_graph(world: int, operator: str, schedule: str) -> None:
    cases = alike(operator, world, [schedule] * (SLOTS + 1))
    run(world, first_in_a_graph, cases, device="cuda")


@ranks(2, 4)
@pytest.mark.parametrize("sizes", [(64, 96), (64, 4096), (64, 12288), (64, 97)])
def test_two_shots_in_one_graph(world: int, sizes: tuple[int, int]) -> None:
    """Sums in one share and in several, and rows of 97 elements, which no launch exchanges."""
    names = ["two-shot", "one-shot", "two-shot", "two-shot:pieces=3", "two-shot"]
    run(
        world,
        first_in_a_graph,
        alike("matmul_all_reduce", world, names, sizes=sizes),
        device="cuda",
    )


@ranks(2, 4)
@pytest.mark.parametrize("schedules", [GRAPHED, *on_hopper_only(TILED)], ids=["library", "tiled"])
def test_gathers_in_one_graph(world: int, schedules: Sequence[str]) -> None:
    names = [name for name in schedules if name in (*graphed_by(backend_on_gpus(world)), *TILED)]
    run(world, first_in_a_graph, alike("all_gather_matmul", world, names), device="cuda")


@hopper
@on_ranks(2)
def test_tiled_calls_captured_on_every_stream(at: Rank) -> None:
    """First calls upload their worklists during a capture, on each stream of PyTorch's pool."""
    group, case = everyone(at), equal(at.world, 64, 64, 48, dtype="bfloat16", schedule="tiled")
    exact(at, case, 0, group)
    for i in range(1, POOLED + 1):
        longer = case.on(rows=(64 + 8 * i,) * at.world)
        Graphed(at, longer, group, torch.cuda.Stream()).exact(i, 1)
    leave(group)


def _two_groups(at: Rank, schedules: Sequence[str], in_order: bool) -> None:
    """Replay graphs of two groups on two streams: in one order with eager calls, or without, in an
    order that differs between ranks."""
    local, case = random.Random(at.rank), equal(at.world, 512, 2048, 512, dtype="bfloat16")
    cases = [case.on(schedule=name) for name in schedules]
    groups = [everyone(at) for _ in cases]
    graphs = [Graphed(at, case, group) for case, group in zip(cases, groups, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    history = []
    for graphed in graphs:  # loads kernels; CUDA waits for the device before it loads one
        graphed.exact(1000, 1)
    for iteration in range(40):
        for which in range(2) if in_order else local.sample(range(2), 2):
            sample = make(at, cases[which], 2 * iteration + which, groups[which])
            streams[which].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(streams[which]):
                history.append((cases[which], graphs[which].replay(sample), sample))
                if in_order:
                    torch.cuda._sleep(local.randrange(3) * MILLISECOND // 4)
                    eager = call(cases[which], sample.a, sample.b, groups[which])
                    history.append((cases[which], eager, sample))
    torch.cuda.synchronize()
    for case, results, sample in history:
        verify(case, results, sample, f"rank {at.rank}:")
    graphs.clear()
    leave(*groups)


def test_two_groups_on_two_streams() -> None:
    run(2, _two_groups, ("hetero-fused-1d:pieces=4", "shrinking:pull"), True, device="cuda")


@hopper
@ranks(2, 4)
def test_graphs_of_two_groups_in_any_order(world: int) -> None:
    run(world, _two_groups, TILED[:2], False, device="cuda")


# Streams and lifetimes.


def _growth_beside_recordings(at: Rank) -> None:
    """One thread's calls are recorded, while growing calls of another thread free memory after they
    wait for the device."""
    from ficco.dma import memories

    groups = [everyone(at) for _ in range(2)]

    def recorded(i: int) -> None:
        sample = make(at, case := equal(at.world, 16, 32, 24, schedule="growing"), i, groups[0])
        for _ in range(3):
            verify(case, call(case, sample.a, sample.b, groups[0]), sample, f"recorded call {i}:")

    def growing(i: int) -> None:
        exact(at, equal(at.world, 8 * (i + 1), 64, 32, schedule="hetero-fused-1d"), i, groups[1])

    def work(body: Callable[[int], None]) -> None:
        torch.cuda.set_device(at.device)
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(60):
                body(i)

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(work, body) for body in (recorded, growing)]:
            future.result()
    # This call frees the memory whose release was postponed while the other thread ran.
    exact(at, equal(at.world, 8 * 62, 64, 32, schedule="hetero-fused-1d"), 0, groups[1])
    assert not memories.unwanted
    leave(*groups)


@ranks(2, 4)
def test_memory_is_freed_beside_recorded_calls(world: int) -> None:
    run(world, _growth_beside_recordings, device="cuda", **EAGER)


@pytest.mark.parametrize("layout", ["plain", "transposed"])
@pytest.mark.parametrize(
    "schedule", ["growing", "serial:pull", "hetero-unfused-1d:copy=2,compute=2"]
)
@on_ranks(2)
def test_operands_freed_right_after_the_call(at: Rank, schedule: str, layout: str) -> None:
    """The caching allocator may reuse the memory of an operand as soon as the call returns."""
    case = equal(at.world, 256, 512, 256, dtype="bfloat16", schedule=schedule, a=layout)
    exact(at, case, 0)
    samples, outputs = [], []
    torch.cuda.synchronize()
    for iteration in range(40):
        sample = make(at, case, iteration)
        a, b = sample.a, sample.b
        samples.append(sample)
        # The host runs ahead: all operations below are enqueued before the call begins.
        torch.cuda._sleep((1 + (iteration + at.rank) % 3) * MILLISECOND)
        outputs.append(call(case, a, b))
        size, other = a.untyped_storage().nbytes(), b.untyped_storage().nbytes()
        sample.a = sample.b = None  # type: ignore[assignment]
        del a, b
        for nbytes in (size, other):
            torch.empty(nbytes, dtype=torch.uint8, device=at.device).fill_(0x7F)
    torch.cuda.synchronize()
    for iteration, (results, sample) in enumerate(zip(outputs, samples, strict=True)):
        verify(case, results, sample, f"rank {at.rank}, iteration {iteration}:")


# Jitter.


def jittered(
    at: Rank,
    seed: int,
    calls: int,
    kinds: Sequence[Any],
    once: Callable[[int, Any], tuple[torch.Tensor, torch.Tensor]],
) -> int:
    """Run calls of ``kinds`` on three streams, with ranks out of step. ``once`` takes the number
    and the kind of a call, and returns its result and the right one. The GPU compares the results
    after six later calls. Graphs and resident calls stay on one stream."""
    shared, local = random.Random(seed), random.Random(1000 * seed + at.rank)
    streams = [torch.cuda.Stream() for _ in range(3)]
    wrong = torch.zeros(calls, dtype=torch.bool, device=at.device)
    pending: list[tuple[int, torch.cuda.Stream, torch.Tensor, torch.Tensor]] = []
    log: list[Any] = []

    def look(index: int, stream: torch.cuda.Stream, y: torch.Tensor, want: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            wrong[index].copy_((y != want).any())

    def none_is_wrong() -> None:
        torch.cuda.synchronize()
        bad = wrong.nonzero().flatten().tolist()
        assert not bad, f"rank {at.rank}: calls {bad[:20]} are wrong: {[log[i] for i in bad[:5]]}"

    settle(at)
    for index in range(calls):
        which = shared.randrange(len(kinds))
        kind, turn = kinds[which], shared.randrange(3)
        stream = streams[which % 3 if isinstance(kind, Resident) else turn]
        with torch.cuda.stream(stream):
            if local.random() < 0.2:
                torch.cuda._sleep(local.randrange(MILLISECOND))
            pending.append((index, stream, *once(index, kind)))
        log.append(kind)
        if local.random() < 0.02:
            time.sleep(local.random() * 0.005)
        if len(pending) > 6:
            look(*pending.pop(0))
        if index % 250 == 249:
            none_is_wrong()
    for entry in pending:
        look(*entry)
    none_is_wrong()
    return calls


def known(
    at: Rank, name: str, case: subjects.Case, iteration: int, backward: bool = False
) -> tuple[Any, ...]:
    """Return a kind of calls for :func:`once_known`: subject, case, operands, gradients of the
    results if ``backward``, and the right results or gradients as one flat tensor."""
    leaves, results, grads = reference(SUBJECTS[name], case, at.world, iteration)
    operands = on_device(at, name, case, iteration)
    wanted = [tensor.grad for tensor in leaves[at.rank]] if backward else results[at.rank]
    flat = torch.cat([tensor.detach().flatten() for tensor in wanted if tensor is not None])
    own = [tensor.to(operands[0]) for tensor in grads[at.rank]] if backward else []
    return name, case, operands, own, flat.to(operands[0])


def once_known(index: int, kind: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    name, case, operands, grads, wanted = kind
    count = len(SUBJECTS[name].operands)
    leaves = [tensor.clone().requires_grad_(bool(grads)) for tensor in operands[:count]]
    results: Sequence[torch.Tensor] = called(name, case, [*leaves, *operands[count:]])
    if grads:
        results = torch.autograd.grad(results, leaves, grads)
    else:
        for leaf in leaves:  # a copy still in flight after the call would read 22
            leaf.fill_(22)
    return torch.cat([tensor.flatten() for tensor in results]), wanted


def _jitter(at: Rank, seed: int, calls: int, tiled: Sequence[str] = (), group: Any = None) -> int:
    """Run jittered calls and replays of graphs, many of them of the schedules in ``tiled``."""
    chance = random.Random(seed)
    kinds = [random_case(chance, at.world, "cuda") for _ in range(20)]
    kinds += [equal(at.world, 64, 80, 48, dtype="bfloat16", schedule=name) for name in GRAPHED]
    kinds += [
        equal(at.world, rows, 64, 48, dtype="float16", schedule=name)
        for name in tiled
        for rows in (24, 200, 1024)
    ]
    # The gathered A is checked elsewhere; one result per call keeps this simple.
    kinds = [case.on(gathered=False) for case in kinds]

    def once(index: int, kind: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(kind, Graphed):
            sample = make(at, kind.case, index, group)
            return kind.replay(sample)[0], sample.out
        if isinstance(kind, Resident):
            sample = make(at, kind.case, index, group)
            kind.a.copy_(sample.a)
            kind.b.copy_(sample.b)
            sample.a, sample.b, case = kind.a, kind.b, kind.case
        else:
            sample, case = make(at, kind, index, group), kind
        y = call(case, sample.a, sample.b, group)[0]
        sample.a.fill_(22)
        return (y.clone() if index % 2 else y), sample.out  # read now, or only by the comparison

    graphs = [Graphed(at, case, group) for case in kinds[-3:]]
    # More rows than all cases above: graphs keep the smaller memory that they captured.
    kinds += [equal(at.world, rows, 64, 48, schedule="growing:pull") for rows in (300, 700, 1500)]
    residents = [
        Resident(at, equal(at.world, 48, 64, 40, dtype="bfloat16", schedule=name), group)
        for name in tiled or ("growing:compute=2", "hetero-fused-1d:pieces=4,pull")
    ]
    return jittered(at, seed, calls, [*kinds, *graphs, *residents], once)


@ranks(2, 4, 8)
def test_jittered_calls_and_replays(world: int) -> None:
    calls = 2000 if world == 4 else 500
    assert run(world, _jitter, world, calls, device="cuda") == [calls] * world


@hopper
@ranks(2, 4)
def test_jittered_tiled_calls(world: int) -> None:
    calls = 2000 if world == 4 else 500
    assert run(world, _jitter, world, calls, TILED, device="cuda") == [calls] * world


# Queues and signals.


def _everything(at: Rank, signals: str, tiled: Sequence[str] = ()) -> None:
    group = everyone(at)
    with ficco.options(signals=signals, timeout_s=20):
        for iteration, schedule in enumerate([*GRAPHED, "growing:tail=2", "hetero-unfused-2d"]):
            case = equal(at.world, 40, 64, 24, dtype="bfloat16", schedule=schedule)
            exact(at, case.on(a=("plain", "symmetric")[iteration % 2]), iteration, group)
        graphed = Graphed(at, equal(at.world, 24, 40, 24, schedule="growing"), group)
        graphed.exact(0, 10)
        _jitter(at, 11, 120, tiled, group)
        resident = Resident(at, equal(at.world, 40, 64, 24, schedule="growing:compute=2"), group)
        for iteration in range(8):
            resident.exact(iteration)
    del graphed, resident
    leave(group)


@pytest.mark.parametrize("tiled", [(), *on_hopper_only(TILED)], ids=["library", "tiled"])
@pytest.mark.parametrize("connections", [1, 8, 32])
def test_hardware_queues(connections: int, tiled: Sequence[str]) -> None:
    """Streams share hardware queues: with one connection all lanes are one FIFO."""
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    run(wider(), _everything, "auto", tiled, device="cuda", fresh=True, env=env)


@pytest.mark.parametrize("signals", ["write", "copy"])
@ranks(2, 4, 8)
def test_signals(world: int, signals: str) -> None:
    run(world, _everything, signals, device="cuda")


# Memory.


def _peak(at: Rank, schedule: str) -> tuple[int, int]:
    """Return the peak bytes of a capped call, without operands and result, and the gathered A's."""
    group = everyone(at)
    rows, k, n = 2048, 8192, 512
    exact(at, equal(at.world, 8, 64, 8, dtype="bfloat16", schedule=schedule), 0, group)
    a = torch.zeros(rows, k, dtype=torch.bfloat16, device=at.device)
    b = torch.zeros(k, n, dtype=torch.bfloat16, device=at.device)
    torch.mm(a, b)  # the library has allocated its workspace
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


def _meet(at: Rank, value: int, group: Any) -> None:
    """Run a PyTorch rendezvous, after which each rank reads the memory of the previous rank."""
    own = symm_mem.empty(8, dtype=torch.float32, device=at.device).fill_(at.rank + value)
    torch.cuda.synchronize()
    handle = symm_mem.rendezvous(own, group)
    settle(at)
    peer = (at.rank - 1) % at.world
    assert torch.all(handle.get_buffer(peer, (8,), torch.float32) == peer + value)
    settle(at)


def _exact_twice(at: Rank, group: Any, world: int) -> None:
    for iteration, rows in enumerate((64, 4096)):  # the second call allocates anew
        exact(at, equal(world, rows, 64, 64, dtype="bfloat16"), iteration, group)


@on_ranks(2, fresh=True)
def test_rendezvous_of_pytorch_in_other_groups(at: Rank) -> None:
    """PyTorch counts its rendezvous per process. Rank 0 runs more of them than its peers."""
    group, alone = everyone(at), [dist.new_group([rank]) for rank in range(at.world)]
    if at.rank == 0:
        exact(at, equal(1, 64, 64, 64, dtype="bfloat16"), 0, alone[0])
    _meet(at, 1, group)  # ficco's group of one rank has not changed the count
    if at.rank == 0:
        for nbytes in (64, 1 << 22):
            symm_mem.rendezvous(symm_mem.empty(nbytes, device=at.device), alone[0])
    _exact_twice(at, group, at.world)
    torch.cuda.synchronize()
    if at.rank == 0:
        ficco.close(alone[0])
    ficco.close(group)


def memory_of(group: Any) -> str:
    (workspace,) = workspaces(group)
    return str(workspace.engine.means.memory)


@on_ranks(4, fresh=True)
def test_rendezvous_of_pytorch_after_ficco_in_some_ranks(at: Rank) -> None:
    """Only some ranks use ficco. PyTorch's rendezvous of all ranks follow."""
    world = dist.group.WORLD
    for turn, members in enumerate(([0, 1], [0, 2], [1, 2, 3], [3])):
        group = dist.new_group(members)
        if at.rank in members:
            _exact_twice(at, group, len(members))
            assert memory_of(group) == ("ipc" if len(members) > 1 else "torch")
        settle(at)
        _meet(at, turn, world)
        exact(at, equal(at.world, 64 << turn, 64, 64, dtype="bfloat16"), turn)
        assert memory_of(world) == "torch"
        if at.rank in members:
            leave(group)
        settle(at)
    ficco.close()


# Faults.


def failed(
    once: Callable[[], Any],
    group: Any = None,
    again: Callable[[], Any] | None = None,
    close: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """Return the outcomes and seconds of a failing call, the next call and the end of the group."""

    def first() -> None:
        once()
        ficco.synchronize(group)

    steps = first, again or once, close or partial(ficco.close, group)
    names = "first", "waited", "again", "waited_again", "torn", "teardown"
    return dict(zip(names, (result for step in steps for result in timed(step)), strict=True))


def assert_in_time(outcome: dict[str, Any]) -> None:
    assert outcome["waited"] < PATIENCE_S + SLACK_S
    assert_unusable(outcome)


def _casualty(at: Rank, schedule: str, victim: int, how: str, mode: str) -> dict[str, Any]:
    """Return each survivor's :func:`failed` for a call, or a replay of its graph, after ``victim``
    is killed."""
    sums = schedule.endswith("-shot")
    operator = ficco.matmul_all_reduce if sums else ficco.all_gather_matmul
    a = torch.ones(64, 32, dtype=torch.bfloat16, device=at.device)
    b = torch.ones(32, 48, dtype=torch.bfloat16, device=at.device)

    def once() -> torch.Tensor:
        return operator(a, b, schedule=schedule)

    def tear_down() -> None:
        ficco.close()
        # destroy_process_group would wait for the dead rank in NCCL; NCCL provides an abort.
        dist.distributed_c10d._abort_process_group()

    with ficco.options(timeout_s=PATIENCE_S, on_timeout=mode):
        for _ in range(3):
            operator(a.clone(), b.clone(), schedule=schedule)
        fatal: Callable[[], Any] = once
        if how == "replay":
            settle(at)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                once()
            graph.replay()
            fatal = graph.replay
        settle(at)
        if at.rank == victim:
            # The store is in rank 0's process, and dies with it.
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)
        return failed(fatal, again=once, close=tear_down)


KILLED = (
    (0, "growing", "eager"),
    (0, "growing", "replay"),
    (1, "hetero-fused-1d:pieces=4,pull", "eager"),
    (1, "hetero-fused-1d:pieces=4,pull", "replay"),
    (1, "serial:kernel", "eager"),
    (0, "serial:kernel", "replay"),
    (1, "one-shot", "eager"),
    (0, "one-shot", "replay"),
    (1, "two-shot", "eager"),
    (0, "two-shot", "replay"),
    # Not by replay: NCCL does not abort a communicator that a graph holds.
    (1, "serial:collective", "eager"),
)


@pytest.mark.parametrize(
    ("victim", "schedule", "how", "mode", "handles"),
    [
        *((*killed, mode, False) for killed in KILLED for mode in ("abort", "raise")),
        *((1, "growing", how, "raise", True) for how in ("eager", "replay")),
    ],
)
def test_killed_rank(victim: int, schedule: str, how: str, mode: str, handles: bool) -> None:
    world, work = (2, (_by_handles, False, _casualty)) if handles else (wider(), (_casualty,))
    if schedule == "serial:collective":
        need_own_gpus(world)
    options: dict[str, Any] = {"device": "cuda", "fresh": True, "catch": True, "timeout": 90}
    outcomes = run(world, *work, schedule, victim, how, mode, **options)
    assert isinstance(outcomes[victim], Died) and outcomes[victim].exitcode == -signal.SIGKILL
    for rank in set(range(world)) - {victim}:
        outcome = outcomes[rank]
        if mode == "abort":
            assert isinstance(outcome, Died), outcome
            assert outcome.exitcode not in (0, None) and outcome.exitcode > 0, outcome
            text = outcome.output
            assert "SignalTimeout" in text and "on_timeout='abort'" in text, text
        else:
            assert isinstance(outcome, dict), outcome
            for facts in gave_up(outcome["first"]):
                assert facts["rank"] != victim
            assert_in_time(outcome)
            text = outcome["first"].text
        operator = "matmul_all_reduce" if schedule.endswith("-shot") else "all_gather_matmul"
        # The rank that waited is this rank or another survivor, whose error arrived first.
        waited = [f"rank {peer} waited" in text for peer in range(world) if peer != victim]
        assert any(waited), text
        for word in (operator, "step", schedule):
            assert word in text, text
        # The victim has ended, or a survivor's wait for the victim has timed out.
        assert "has ended" in text or "timeout_s=" in text, text
        # The peer is the victim, or a survivor that waits for the victim. NCCL does not name it.
        assert "for rank " in text or schedule == "serial:collective", text


def _absent(at: Rank, victim: int, schedule: str) -> dict[str, Any] | None:
    """One live rank never calls: its group fails, and other groups stay usable."""
    group = everyone(at)
    case = equal(at.world, 32, 64, 32, dtype="bfloat16", schedule=schedule)
    exact(at, case, 0, group)
    exact(at, case, 1, group)
    outcome = None
    if at.rank != victim:
        sample = make(at, case, 2, group)
        with ficco.options(timeout_s=PATIENCE_S, on_timeout="raise"):
            outcome = failed(lambda: call(case, sample.a, sample.b, group), group)
    settle(at)
    leave(group)
    exact(at, equal(at.world, 4, 4, 4), 1)
    return outcome


@pytest.mark.parametrize(
    ("schedule", "handles"),
    [
        *product(("growing", "serial:kernel"), (False, True)),
        ("serial:collective", False),
        pytest.param("tiled", False, marks=hopper),
    ],
)
def test_rank_that_never_calls(schedule: str, handles: bool) -> None:
    if schedule == "serial:collective":
        need_own_gpus(2)
    work = (_by_handles, False, _absent) if handles else (_absent,)
    outcome = run(2, *work, 1, schedule, device="cuda", fresh=handles)[0]
    for facts in gave_up(outcome["first"]):
        # NCCL does not name the peer.
        assert facts["peer"] == (None if schedule == "serial:collective" else 1)
        assert facts["rank"] == 0
    if schedule == "tiled":
        first = outcome["first"]
        assert first.type == "SignalTimeout"
        assert re.search(r"step 'all \d+:\d+ \(matmul", first.text), first.text
    assert_in_time(outcome)


@pytest.mark.parametrize(
    "schedule",
    ["growing", "serial:kernel", "serial:collective", *on_hopper_only("tiled:pieces=2")],
)
@on_ranks(2)
def test_host_that_runs_ahead_is_no_fault(at: Rank, schedule: str) -> None:
    """A host that runs far ahead is no fault: the timeout counts from the begin of a call."""
    group = everyone(at)
    case = equal(at.world, 32, 64, 32, dtype="bfloat16", schedule=schedule)
    exact(at, case, 0, group)
    samples = [make(at, case, i, group) for i in range(8)]
    settle(at)
    with ficco.options(timeout_s=2, on_timeout="raise"):
        outputs = []
        for sample in samples:
            torch.cuda._sleep(500 * MILLISECOND)  # eight sleeps exceed the timeout
            outputs.append(call(case, sample.a, sample.b, group))
        ficco.synchronize(group)
    for results, sample in zip(outputs, samples, strict=True):
        verify(case, results, sample, f"rank {at.rank}:")
    leave(group)


def _out_of_memory(at: Rank, victim: int) -> dict[str, Any]:
    group = everyone(at)
    exact(at, equal(at.world, 32, 64, 32, schedule="hetero-fused-1d"), 0, group)
    case = equal(at.world, 1 << 16, 32, 1 << 10, schedule="hetero-fused-1d")
    sample = make(at, case, 2, group)

    def close() -> None:
        torch.cuda.set_per_process_memory_fraction(1.0)
        leave(group)

    settle(at)
    if at.rank == victim:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-4)  # the result has 128 MiB
    with ficco.options(timeout_s=60, on_timeout="raise"):
        outcome = failed(lambda: call(case, sample.a, sample.b, group), group, close=close)
    exact(at, equal(at.world, 4, 4, 4), 1)  # other groups stay usable
    return outcome


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_without_memory_is_named_at_once(victim: int) -> None:
    """A rank allocates before it agrees with its peers."""
    for rank, outcome in enumerate(run(2, _out_of_memory, victim, device="cuda", fresh=True)):
        first = outcome["first"]
        assert isinstance(first, Failure), first
        assert first.type == ("OutOfMemoryError" if rank == victim else "RankMismatch"), first
        assert "OutOfMemoryError" in first.text or rank == victim, first
        assert outcome["waited"] < SLACK_S
        assert isinstance(outcome["again"], Failure)
        assert not isinstance(outcome["torn"], Failure) and outcome["teardown"] < SLACK_S


# Memory that is shared by handles.


@contextlib.contextmanager
def _handles_everywhere() -> Iterator[list[int]]:
    """Make groups of all ranks share memory by handles. Yield the addresses of live allocations."""
    from ficco.dma.cuda_driver import CudaDriver, CudaHandles

    live: list[int] = []

    class Counted(CudaHandles):
        def malloc(self, nbytes: int, kind: str) -> int:
            live.append(super().malloc(nbytes, kind))
            return live[-1]

        def free(self, address: int) -> None:
            super().free(address)
            live.remove(address)

    by_handles = {"handles": Counted(), "_memory": lambda *_: "ipc"}
    with mock.patch.multiple(CudaDriver, **by_handles):
        yield live


@on_ranks(2, fresh=True)
def test_a_tensor_outlives_its_group(at: Rank) -> None:
    """A tensor stays readable after its group is closed. Its memory is freed after the tensor."""
    group, other, size = everyone(at), everyone(at), 1 << 29
    with _handles_everywhere() as live:
        settle(at)
        free = torch.cuda.mem_get_info()[0]
        settle(at)
        tensor = ficco.empty((size,), dtype=torch.uint8, group=group, device=at.device)
        assert memory_of(group) == "ipc"
        settle(at)
        assert free - torch.cuda.mem_get_info()[0] >= size
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
        settle(at)
        torch.cuda.empty_cache()  # unique() took memory
        assert free - torch.cuda.mem_get_info()[0] < size
        settle(at)


def _by_handles(at: Rank, ends: bool, work: Callable[..., Any], *args: Any) -> Any:
    """Run ``work`` with memory that is shared by handles. ``ends``: all ranks succeed, and closing
    frees all memory."""
    ficco.close()
    settle(at)
    with _handles_everywhere() as live:
        result = work(at, *args)
        if ends:
            settle(at)
            ficco.close()
            settle(at)
            assert not live
    return result


@pytest.mark.parametrize("signals", ["auto", "write", "copy"])
@ranks(2, 4)
def test_signals_by_handles(world: int, signals: str) -> None:
    run(world, _by_handles, True, _everything, signals, device="cuda", fresh=True)


def test_growth_by_handles() -> None:
    run(2, _by_handles, True, _growth_beside_recordings, device="cuda", **EAGER)


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
    # The peer never calls, and this process exits without waiting for it.
    with ficco.options(timeout_s=3):
        ficco.all_gather_matmul(a, b, schedule="growing")
"""


@pytest.mark.parametrize(
    ("how", "codes"),
    [
        ("close", ((0,), (0,))),
        ("destroy", ((0,), (0,))),
        ("end", ((0,), (0,))),
        ("error", ((1,), (1,))),
        ("in-flight", ((0, 1), (0,))),  # rank 0 ends by itself or by the watchdog
    ],
)
def test_exit(how: str, codes: tuple[tuple[int, ...], ...], tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    for rank, (returned, out, err) in enumerate(end_of(start_ranks(tmp_path, SCRIPT, 2, how), 80)):
        assert "done" in out and returned in codes[rank], f"rank {rank}:\n{out}\n{err}"
        if how != "in-flight":
            assert "Fatal Python error" not in err and "Exception ignored" not in err, err
        assert ("on purpose" in err) == (how == "error")
    left = {name for name in set(os.listdir("/dev/shm")) - before if "ficco" in name}
    assert not left or how == "in-flight"


@on_ranks(1)
def test_cublaslt_adds_a_separate_addend(at: Rank) -> None:
    lt, stream = CublasLt(), torch.cuda.current_stream().cuda_stream
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=at.device)
    for dtype in (torch.bfloat16, torch.float16):
        for m, n, k in ((64, 48, 32), (7, 9, 5), (130, 264, 72), (4, 6, 1)):
            for transposed in (False, True):
                a = torch.randint(-2, 3, (m, k), device=at.device).to(dtype)
                b = torch.randint(-1, 2, (k, n), device=at.device).to(dtype)
                b = b.t().contiguous().t() if transposed else b
                c = torch.randint(-9, 9, (m, n + 8), device=at.device).to(dtype)[:, :n]
                out = torch.full((m, n + 16), 7.0, device=at.device, dtype=dtype)
                assert CublasLt.serves(c, a, b, out[:, :n])
                assert lt.multiply(c, a, b, out[:, :n], workspace, stream)
                assert torch.equal(out[:, :n].double(), c.double() + a.double() @ b.double())
                assert (out[:, n:] == 7).all()
