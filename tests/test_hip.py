"""The HIP engine through the real hip-python, on a strict double of the HIP library.

What is proven here and by ``tests/contract``: every schedule enqueues what its Plan says, in an
order that is right however queues are delayed; nothing is used before it is allowed, or after;
errors of any call come out. What is not: memory coherence, copy engines, speed, or anything else of
a real GPU.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import hip_ranks
import pytest
import ranks
import subjects
import test_operators as operators
import torch
import torch.distributed as dist
from cases import (
    Case,
    all_exact,
    call,
    equal,
    exact,
    make,
    timed,
    verify,
)
from hip_ranks import SERIES, asking, calls, clean, compiling, double, on_double, run
from ranks import Died, Failure, Rank, caught, gave_up, missing
from test_all_gather_matmul import KNOBS, NAMES, named
from test_gradients import test_backwards_of_two_groups_at_once

import ficco
import ficco.dma.gpu
from ficco.hip_kernels import build
from ficco.problems.products import Problem
from ficco.runtime.workspace import SLOTS, workspaces
from ficco.schedules import Schedule, plans

#: Every schedule of names and knobs that moves bytes by copies.
COPIED = tuple(named(name, knobs) for name in NAMES for knobs in KNOBS if "kernel" not in knobs)
DTYPES = ("bfloat16", "float16", "float32", "float64")
#: Calls of the library that copy, and that launch a kernel.
COPY, LAUNCH = "hipMemcpyDtoDAsync", "hipModuleLaunchKernel"

#: As :func:`hip_ranks.run`, on ranks that stay for the next test.
pooled = partial(run, fresh=False)


def engine() -> Any:
    (found,) = (workspace.engine for workspace in workspaces())
    assert found.name == "hip"
    return found


def pointer(stream: Any) -> int:
    return int(stream.as_c_void_p().value)


# Results.


@on_double(2)
def test_heads_that_share_memory_are_copied(at: Rank) -> None:
    """No library copies rows that overlap: a head of keys in place of several, gradients alike."""
    q, k, grad = (torch.randn(1, heads, 6, 8) for heads in (4, 1, 1))
    found = []
    for form in (torch.Tensor.expand_as, lambda one, q: one.expand_as(q).contiguous()):
        leaf = q.clone().requires_grad_()
        out = ficco.ulysses_attention(leaf, form(k, q), form(k, q))
        found.append((out, *torch.autograd.grad(out, leaf, form(grad, q))))
    assert all(map(torch.equal, *found))


@on_double(2, fresh=True, series="7", settings={"JITTER_US": 300})
def test_memory_is_freed_while_no_thread_has_a_call_in_flight(at: Rank) -> None:
    """hip-python 7.2 keeps the interpreter while hipFree waits for the device, so that calls of
    other threads that are half enqueued would not go on."""
    ficco.set_options(engine="hip", on_timeout="raise", timeout_s=20)  # of other threads, too
    test_backwards_of_two_groups_at_once.body(at)


def _tiled(at: Rank) -> None:
    with clean():
        cases = [
            Case((33, 7), 72, 40, dtype=dtype, schedule=name, gathered=True)
            for dtype, name in (("bfloat16", "tiled"), ("float16", "tiled:pieces=3,order=piece"))
        ]
        all_exact(at, cases)
        for operator, dtype, name in (
            ("matmul_reduce_scatter", "bfloat16", "tiled:pieces=2,pull"),
            ("matmul_all_to_all", "float16", "tiled:tail=2"),
        ):
            rows = operators.rows_for(operator, 2, "ragged")
            operators.all_exact(at, [(operator, subjects.Case(rows, (24, 40), dtype, name))])
        # A slot's next call of a kind, whose operands lie elsewhere.
        apart = [make(at, cases[0], iteration) for iteration in range(SLOTS + 1)]
        for made in apart:
            verify(cases[0], call(cases[0], made.a, made.b), made, f"rank {at.rank}:")
        ficco.synchronize()
        assert engine().capabilities().tiles
        with pytest.raises(NotImplementedError, match="bfloat16 or float16"):
            exact(at, cases[0].on(dtype="float32"), 0)


def test_tiled_products() -> None:
    """By Triton's interpreter; a dtype that they do not have is refused by name."""
    if find_spec("triton") is None:
        missing("triton")
    pooled(2, _tiled, timeout=120)


# Late queues.


@on_double(3, timeout=120)
def test_jittered(at: Rank) -> None:
    """Calls of any kind while every operation of every queue is late by chance.

    Eight calls are enqueued before anybody waits for them; every other time they share one slot, so
    that each begins while the one before is handing it on.
    """
    choice, count, together = random.Random(8), 96, 8
    schedules = choice.sample(COPIED, count)
    exact(at, equal(3, 8, 8, 8, schedule="growing"), 0)
    engine().work.waits = False
    double().double_jitter(200)
    for first in range(0, count, together):
        under_way = []
        cap = 1 << 16 if first // together % 2 else None
        for iteration in range(first, first + together):
            case = Case(
                tuple(choice.randrange(12) for _ in range(3)),
                choice.choice((1, 7, 16, 40)),
                choice.choice((1, 5, 16)),
                dtype=choice.choice(DTYPES),
                schedule=schedules[iteration],
                gathered=choice.random() < 0.3,
            )
            made = make(at, case, iteration)
            with ficco.options(workspace_bytes=cap):
                under_way.append((case, call(case, made.a, made.b), made))
        ficco.synchronize()
        for case, results, made in under_way:
            verify(case, results, made, f"call {first} and following:")
    double().double_jitter(0)


@on_double(3)
def test_one_queue_is_late(at: Rank) -> None:
    """Queue by queue: late on one rank, while all others are prompt."""
    names = ("growing:pull", "hetero-fused-1d:pieces=2,copy=2,compute=2")
    cases = [equal(3, 12, 16, 8, schedule=name) for name in names]
    all_exact(at, cases)
    queues = engine().work.named
    assert {"caller", "compute1", "copy0", "copy1", "sync"} <= queues.keys()
    for turn, name in enumerate(sorted(queues)):
        mine = turn % 3 == at.rank
        assert not mine or not double().double_delay(pointer(queues[name]), 1000)
        all_exact(at, cases, 10 * (turn + 1))
        double().double_delay(pointer(queues[name]), 0)


@on_double(2)
def test_a_trial_of_signals_disturbs_no_call_that_has_begun(at: Rank) -> None:
    """Rank 0 tries late whether its writes reach a peer, whose first call has begun by then, and
    hands its slot on late: a trial that told the peer the slot is free would be believed."""
    case = equal(2, 8, 8, 8, schedule="shard-overlap:pull")
    with ficco.options(workspace_bytes=1 << 20, timeout_s=8):
        exact(at, case.on(schedule="serial:collective"), 0)  # the engine, and no words yet
        if at.rank == 0:
            side, sync = engine().side.handle, engine().work.lane("sync")
            for stream, us in ((side, 60_000), (sync, 20_000)):
                assert not double().double_delay(pointer(stream), us)
        all_exact(at, [case] * 3)


@on_double(3, fresh=True, settings={"HW_QUEUES": 1}, timeout=120)
def test_streams_of_a_priority_share_one_hardware_queue(at: Rank) -> None:
    """What waits for a peer holds up all that comes behind it: the peer must not wait for that."""
    exact(at, equal(3, 8, 8, 8, schedule="growing"), 0)
    double().double_jitter(50)
    all_exact(at, [equal(3, 12, 16, 8, schedule=schedule) for schedule in COPIED[::3]])
    double().double_jitter(0)


def test_a_mesh_of_eight_has_a_copy_queue_for_each_link() -> None:
    """As on 8 MI300X."""
    for name in (
        *("hetero-fused-1d:copy=7", "hetero-unfused-1d:pieces=4,pull,copy=7"),
        *("uniform-fused-2d:pieces=2,copy=7", "shard-overlap:copy=7"),
    ):
        problem = Problem("all_gather_matmul", (16,) * 8, 8, 24, "bfloat16")
        for plan in plans(problem, Schedule.parse(name)):
            ends = [(step.lane, move) for step in plan.steps if (move := step.copy)]
            pairs = {
                (lane, ({one.src.rank, one.dst.rank} - {plan.rank}).pop()) for lane, one in ends
            }
            assert len(pairs) == 7 == len({lane for lane, _ in pairs}), "a link shares its queue"


@on_double(3)
def test_times_of_steps(at: Rank) -> None:
    case = equal(3, 12, 16, 8, schedule="hetero-fused-2d:pull")
    made = make(at, case, 1)
    out, plan, spans = timed(made, case.schedule)
    verify(case, [out], made)
    assert [span.step for span in spans] == list(range(len(plan.steps)))
    assert all(0 <= span.start <= span.stop < 10 for span in spans), spans
    by_lane: dict[str, float] = {}
    for span in spans:
        assert span.start >= by_lane.get(span.lane, 0), spans
        by_lane[span.lane] = span.stop


# Graphs.

#: Modes of a capture.
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
GRAPHED = (
    "serial",
    "growing",
    "shrinking:pull",
    "shard-overlap:copy=2,compute=2",
    "hetero-fused-1d:pieces=4",
    "uniform-unfused-1d:pull,copy=2",
    "hetero-fused-2d:pieces=4",
    "uniform-unfused-2d:compute=2",
)


def value_of(result: Any) -> Any:
    assert not result[0], result
    return result[1] if len(result) > 1 else None


def drain(stream: Any) -> None:
    from hip import hip

    while (error := hip.hipStreamQuery(stream)[0]) and error.name == "hipErrorNotReady":
        time.sleep(1e-4)
    assert not error


class Graphed:
    """Calls captured in a graph, with operands that change between replays."""

    def __init__(self, at: Rank, cases: list[Case], mode: int) -> None:
        from hip import hip

        self.at, self.cases, self.hip = at, cases, hip
        self.made = [make(at, case, 0) for case in cases]
        self.stream = engine().work.lane("caller")
        value_of(hip.hipStreamBeginCapture(self.stream, hip.hipStreamCaptureMode(mode)))
        self.results = [
            call(case, made.a, made.b) for case, made in zip(cases, self.made, strict=True)
        ]
        graph = value_of(hip.hipStreamEndCapture(self.stream))
        self.graph = value_of(hip.hipGraphInstantiateWithFlags(graph, 0))
        value_of(hip.hipGraphDestroy(graph))

    def exact(self, iteration: int) -> None:
        wanted = [make(self.at, case, iteration) for case in self.cases]
        for mine, new in zip(self.made, wanted, strict=True):
            mine.a.copy_(new.a)
            mine.b.copy_(new.b)
        value_of(self.hip.hipGraphLaunch(self.graph, self.stream))
        drain(self.stream)
        for case, results, new in zip(self.cases, self.results, wanted, strict=True):
            verify(case, results, new, f"rank {self.at.rank}, replay {iteration}:")

    def destroy(self) -> None:
        value_of(self.hip.hipGraphExecDestroy(self.graph))


def replayed(at: Rank, schedules: Sequence[str], count: int, first: int = GLOBAL) -> None:
    """Replays of two graphs between eager calls of the same problem and others; modes of captures
    by turns."""
    choice = random.Random(count)
    with clean():
        exact(at, equal(3, 4, 4, 4), 0)
        double().double_jitter(100)
        for mode, schedule in enumerate(schedules, start=first):
            case = equal(3, 12, 16, 8, dtype="bfloat16", schedule=schedule, gathered=True)
            other = Case((5, 0, 7), 9, 3, schedule="hetero-fused-1d:pieces=3")
            bigger = equal(3, 40, 24, 8, schedule=schedule)
            graphs = [
                Graphed(at, [case], mode % 3),
                Graphed(at, [case.on(rows=(3, 7, 2)), other, bigger, case], mode % 3),
            ]
            for iteration in range(count):
                which = choice.choice((case, other, bigger, *graphs))
                if isinstance(which, Case):
                    exact(at, which, iteration)
                else:
                    which.exact(iteration)
            for graph in graphs:
                graph.destroy()
        double().double_jitter(0)


@pytest.mark.parametrize("series", SERIES)
def test_replays(series: str) -> None:
    pooled(3, replayed, GRAPHED[SERIES.index(series) :: 2], 10, series=series)


def test_replays_whose_signals_are_copies() -> None:
    run(3, replayed, GRAPHED[1:7:5], 10, settings={"PEER_WRITE": 0})


@on_double(2, fresh=True, settings={"CAPTURE_WRITES": 0})
def test_captures_are_refused_where_stream_writes_are_carried_out_at_once(at: Rank) -> None:
    from hip import hip

    case = equal(2, 8, 8, 8, schedule="growing")
    exact(at, case, 0)
    assert not engine().capabilities().capture
    made, stream = make(at, case, 1), engine().work.lane("caller")
    value_of(hip.hipStreamBeginCapture(stream, hip.hipStreamCaptureMode(GLOBAL)))
    with pytest.raises(NotImplementedError, match="executes stream writes at once") as caught:
        call(case, made.a, made.b)
    assert "FICCO_HIP=signals=kernel" in str(caught.value)
    value_of(hip.hipGraphDestroy(value_of(hip.hipStreamEndCapture(stream))))


@on_double(2)
def test_captures_keep_their_memory(at: Rank) -> None:
    """The first call of all is captured; graphs keep their memory while eager calls grow."""
    exact(at, equal(2, 4, 4, 4), 0)
    graph = Graphed(at, [equal(2, 8, 8, 8, schedule="growing")], GLOBAL)
    for rows in (16, 64, 256):
        graph.exact(rows)
        all_exact(at, [equal(2, rows, 8, 8, schedule="growing")] * 2, rows)
    graph.exact(1000)
    graph.destroy()


@on_double(2)
def test_what_outlives_its_group_is_freed_later(at: Rank) -> None:
    with mock.patch.object(ficco.dma.gpu, "CLOSE_S", 0.1):
        groups = [dist.new_group() for _ in range(3)]
        kept = ficco.empty((4, 4), group=groups[0])
        for group in groups[:2]:
            exact(at, equal(2, 8, 8, 8, schedule="growing"), 0, group)
        for group in groups[:2] if at.rank else groups[1::-1]:  # peers still have it mapped
            ficco.close(group)
            at.barrier()
        del kept
        exact(at, equal(2, 8, 8, 8, schedule="growing"), 0, groups[2])


# Ways of signals and of copies, by what a machine allows and what is asked for.


class Way(NamedTuple):
    """What is asked for by FICCO_HIP or options, a call of the library that this takes, and what
    the engine says of it."""

    asked: str
    call: str
    says: dict[str, str]
    options: dict[str, str] = {}


WAIT, ROWS = "hipStreamWaitValue32", "hipMemcpyAsync"
KERNELS = "a kernel of ficco's"
PACKED = "by packing or ficco's kernel"
ASKED = (
    Way("", WAIT, {"post": "WriteValue32", "wait": "on signal memory"}),
    Way("", WAIT, {"post": "4-byte copy"}, {"signals": "copy"}),
    Way("signals=kernel", LAUNCH, {"post": KERNELS, "wait": KERNELS}),
    Way("copy=dtod", COPY, {"copy": COPY}),
    Way("copy=peer", "hipMemcpyPeerAsync", {"copy": "hipMemcpyPeerAsync"}),
    Way("copy=nocu", ROWS, {"copy": "without compute units"}),
    Way("columns=pack", COPY, {"copy": f"{PACKED} (asked for)"}),
    Way("events=write", "hipStreamWriteValue32", {"copy": "after a stream write"}),
)
#: By what a machine has not.
LEFT: tuple[tuple[dict[str, int], tuple[Way, ...]], ...] = (
    ({"PEER_WRITE": 0}, (Way("", WAIT, {"post": "4-byte copy"}),)),
    (
        {"SIGNAL_IPC": 0, "WAIT_ANY": 1},
        (
            Way("", WAIT, {"post": "uncached", "wait": "does not promise"}),
            Way("signals=uncached", WAIT, {"wait": "does not promise"}),
        ),
    ),
    ({"WAIT": 0}, (Way("", LAUNCH, {"post": KERNELS, "wait": KERNELS}),)),
    ({"2D": 0}, (Way("", COPY, {"copy": f"{PACKED}, for want of a 2D copy"}),)),
)


def _by(at: Rank, ways: Sequence[Way]) -> None:
    schedules = [named(name, knobs) for name in NAMES[::2] for knobs in ("", "pull", "pieces=3")]
    cases = [equal(3, 24, 40, 16, schedule=schedule) for schedule in schedules]
    for way in ways:
        with clean(), asking(way.asked), ficco.options(**way.options):
            before = calls(way.call)
            all_exact(at, cases)
            ficco.synchronize()
            found = engine().capabilities()
            for name, text in way.says.items():
                assert text in getattr(found, name), found
            assert calls(way.call) > before, way
            # PyTorch would report what was tried in vain as an error of its own.
            assert ctypes.CDLL("libamdhip64.so").hipGetLastError() == 0


def test_ways_that_are_asked_for() -> None:
    pooled(3, compiling, _by, ASKED, series="10")


@pytest.mark.parametrize(("settings", "ways"), LEFT, ids=["-".join(one) for one, _ in LEFT])
def test_ways_of_signals(settings: dict[str, int], ways: Sequence[Way]) -> None:
    """And of columns, that a machine leaves."""
    series = SERIES["WAIT" in settings]
    run(3, compiling, _by, ways, series=series, settings=settings)


def _posted(at: Rank) -> str:
    with clean():
        all_exact(at, [equal(3, 8, 12, 8, schedule=s) for s in ("growing", "shard-overlap:pull")])
        return str(engine().capabilities().post)


def test_writes_have_to_reach_every_peer() -> None:
    """Rank 0's reach the next rank, not the one behind it: it posts by copies, to all."""
    first, *others = run(3, _posted, settings={"NO_WRITE": "0:2"})
    assert "4-byte copy" in first and all("WriteValue32" in other for other in others)


@on_double(3)
def test_columns_are_packed_by_all_ranks_or_none(at: Rank) -> None:
    """Otherwise a receiver would read columns where its sender has put others."""
    cases = [equal(3, 24, 40, 16, schedule=name) for name in NAMES if "2d" in name]
    with asking("columns=pack" if at.rank == 1 else ""):
        exact(at, cases[0], 0)
    all_exact(at, cases)  # what the engine began with counts
    assert f"columns {PACKED} (asked for)" in str(engine().capabilities().copy)


@on_double(2, fresh=True, settings={"2D": 0})
def test_2d_copies_that_cannot_be_had_are_refused(at: Rank) -> None:
    """By all ranks, also those that did not ask."""
    refusal = "FICCO_HIP=columns=2d, which a rank selects, is not available"
    for ways in ("columns=2d", "columns=2d"), ("", "columns=2d"), ("columns=2d", "columns=pack"):
        with clean(), asking(ways[at.rank]), pytest.raises(NotImplementedError, match=refusal):
            exact(at, equal(2, 8, 8, 8, schedule="growing"), 0)


@on_double(1)
def test_memory_of_pytorch_only_if_asked_for(at: Rank) -> None:
    """Also where PyTorch is built for ROCm and has it: copies in it may go by a kernel."""
    from ficco.dma.hip_driver import HipDriver

    meeting: Any = SimpleNamespace(gather=lambda data: [data])
    for ways, memory in ("", "ipc"), ("memory=ipc", "ipc"), ("memory=torch", "torch"):
        with mock.patch.object(torch.version, "hip", "7.2"), asking(ways):
            assert HipDriver(torch.device("cuda", 0), 0)._memory(meeting) == memory


# Errors. Each ends in BackendError on the rank where it happens, or is got round; the other rank's
# calls end in time, and what both hold is given back.

#: Codes of the library by number, of which each injected error has one.
CODES = {1: "hipErrorInvalidValue", 2: "hipErrorOutOfMemory", 719: "hipErrorLaunchFailure"}


class Error(NamedTuple):
    """A call of the library that fails: the ``first`` of its calls from now on.

    Attributes:
        schedule: of the ficco calls meanwhile, if it takes a certain one.
        ways: what is asked for meanwhile.
    """

    call: str
    first: int
    schedule: str = ""
    ways: str = ""


BY_PEER, BY_NOCU, BY_KERNEL = "copy=peer", "copy=nocu", "signals=kernel"
#: Calls that fail when an engine is made, or while it works, by the first that does.
FIRSTS = {
    (1,): "GetDeviceCount RuntimeGetVersion SetDevice DeviceCanAccessPeer DeviceEnablePeerAccess "
    "HostMalloc StreamGetCaptureInfo ThreadExchangeStreamCaptureMode",
    (1, 2): "Malloc MemcpyDtoDAsync LaunchHostFunc",
    (1, 3): "MemsetAsync",
    (1, 4): "StreamCreateWithPriority StreamWaitEvent StreamWaitValue32",
    (1, 5): "ExtMallocWithFlags EventRecord",
    (1, 6): "EventCreateWithFlags",
    (1, 9): "StreamQuery",
    (1, 5, 9): "StreamWriteValue32",
    (2,): "EventQuery",
    (2, 4): "IpcOpenMemHandle",
    (2, 5): "IpcGetMemHandle",
}
FAILING = (
    *(
        Error(f"hip{name}", first)
        for firsts, names in FIRSTS.items()
        for name in names.split()
        for first in firsts
    ),
    # The first of an engine is tried on a rectangle within 16 bytes.
    Error("hipMemcpy2DAsync", 2, "hetero-fused-2d:pieces=2"),
    Error("hipMemcpyPeerAsync", 1, ways=BY_PEER),
    Error("hipMemcpyAsync", 1, ways=BY_NOCU),
    Error("hipModuleLoadData", 1, ways=BY_KERNEL),
    Error("hipModuleLoadData", 1, "growing:kernel"),
    Error("hipModuleGetFunction", 3, "growing:kernel"),
    Error("hipModuleLaunchKernel", 1, ways=BY_KERNEL),
    Error("hipModuleLaunchKernel", 1, "growing:kernel"),
)
#: Calls that are tried: there is another way. What fails then is the whole call's way round it.
TRIED = (
    Error("hipMemcpy2DAsync", 1),  # columns are packed
    Error("hipDeviceGetAttribute", 1),  # one PCI number of one device is 0
    Error("hipStreamWriteValue32", 3),  # posts are copies
    # None that captures: graphs are refused, and calls are not.
    Error("hipStreamBeginCapture", 1),
    Error("hipStreamWriteValue32", 2),
)
#: Calls by which things are given back, and the way that signals go. Of each, one thing stays when
#: it fails once, but memory that peers share is tried again, since they wait for it.
CLOSING = (
    *(("hipFree", ""), ("hipHostFree", ""), ("hipIpcCloseMemHandle", "")),
    *(("hipStreamDestroy", ""), ("hipModuleUnload", BY_KERNEL)),
)
LEFT_BY_CLOSING = 3


def attempted(at: Rank, case: Case, group: Any) -> None:
    for iteration in range(3):
        made = make(at, case, iteration, group)
        results = call(case, made.a, made.b, group)
        ficco.synchronize(group)  # as on a GPU, results are good behind this alone
        verify(case, results, made)


class Injected(NamedTuple):
    """What an error led to on a rank, after how long, and what is left once its group is closed."""

    outcome: Any
    seconds: float
    closing: Any
    left: tuple[int, int]
    said: str

    def problems(self, most_s: float) -> list[str]:
        left = [self.said] if any(self.left) or self.closing else []
        return left + ([f"{self.seconds:.1f} s"] if self.seconds > most_s else [])


def injected(at: Rank, failing: list[tuple[Error, int]], warm: bool = False) -> list[Injected]:
    """What each error with its code leads to on this rank; they happen on rank 1, in its first call
    or a ``warm`` one."""
    found = []
    for number, (error, code) in enumerate(failing):
        name, group = error.call.encode(), dist.new_group([0, 1])
        schedule = "growing:pull" if number % 2 == warm else "hetero-fused-1d:pieces=2"
        case = equal(2, 6, 8, 4, schedule=error.schedule or schedule)
        with ficco.options(timeout_s=8 if warm else 0.8), asking(error.ways):
            if warm:
                attempted(at, case, group)
                at.barrier()
            if at.rank == 1:
                double().double_fail(name, code, error.first, 1)
            began = time.monotonic()
            outcome = caught(partial(attempted, at, case, group))
            seconds = time.monotonic() - began
            at.barrier()
            double().double_fail(name, code, 0, 0)
            closing = caught(partial(ficco.close, group))
        at.barrier()
        dist.destroy_process_group(group)
        gc.collect()
        left = double().double_violations(), double().double_leaks()
        found.append(Injected(outcome, seconds, closing, left, double().double_said().decode()))
    with clean():
        exact(at, equal(2, 8, 8, 8), 0)  # the process is well
    return found


#: Calls by which work of a warm call is enqueued.
ENQUEUEING = (
    Error("hipEventRecord", 1),
    Error("hipStreamWaitEvent", 2),
    *(Error("hipStreamWriteValue32", first) for first in (1, 3)),
    Error("hipStreamWaitValue32", 2),
    Error("hipMemcpyDtoDAsync", 1),
    Error("hipLaunchHostFunc", 2),
    Error("hipMemcpy2DAsync", 1, "hetero-fused-2d:pieces=2"),
    Error("hipMemcpyPeerAsync", 1, ways=BY_PEER),
    Error("hipMemcpyAsync", 1, ways=BY_NOCU),
    Error("hipModuleLaunchKernel", 2, ways=BY_KERNEL),
)


@pytest.mark.parametrize("warm", [False, True], ids=["first calls", "warm calls"])
def test_injected_errors(warm: bool) -> None:
    """Codes by turns, so that a call that fails at several places does so with several. The other
    rank is told the reason, at once, unless this one failed before there was anything to agree
    on."""
    codes = itertools.cycle(CODES)
    failing = list(zip(ENQUEUEING if warm else FAILING, codes, strict=False))
    found = run(2, compiling, injected, failing, warm, timeout=150)
    wrong = []
    for ((name, first, *_), code), other, mine in zip(failing, *found, strict=True):
        here, there = mine.outcome, other.outcome
        problems = mine.problems(3 if warm else 6) + other.problems(3 if warm else 6)
        fields = here.fields if isinstance(here, Failure) else {}
        if (fields.get("call"), fields.get("code")) != (name, CODES[code]):
            problems.append(f"here {here}")
        kind = there.type if isinstance(there, Failure) else ""
        if kind == "PeerFailed":
            ((rank, why),) = there.fields["reasons"].items()
            said = rank == 1 and f"{name} failed with {CODES[code]}" in why
        else:
            said = kind == "SignalTimeout" and not warm
        if not said:
            problems.append(f"there {there}")
        if problems:
            wrong.append((name, first, code, problems))
    assert not wrong, "\n".join(map(str, wrong))


def test_failures_that_are_got_round() -> None:
    failing = list(zip(TRIED, itertools.cycle(CODES), strict=False))
    for mine in itertools.chain(*run(2, injected, failing, series="10")):
        assert mine.outcome is None and not mine.problems(6), mine


def _closing(at: Rank) -> list[Any]:
    found = []
    for (name, ways), code in zip(CLOSING, itertools.cycle(CODES), strict=False):
        group = dist.new_group([0, 1])
        with asking(ways):
            attempted(at, equal(2, 6, 8, 4, schedule="growing"), group)
        at.barrier()
        if at.rank == 1:
            double().double_fail(name.encode(), code, 1, 1)
        outcome = caught(partial(ficco.close, group))
        at.barrier()
        found.append((outcome, double().double_violations()))
        dist.destroy_process_group(group)
    return [found, double().double_leaks()]


def test_errors_of_closing() -> None:
    (others, theirs), (mine, ours) = run(2, compiling, _closing)
    for (name, _), (other, their_violations), (outcome, our_violations) in zip(
        CLOSING, others, mine, strict=True
    ):
        assert other is None and not their_violations and not our_violations
        assert (outcome.type, outcome.fields["call"]) == ("BackendError", name)
    assert (theirs, ours) == (0, LEFT_BY_CLOSING)


def _all_calls(at: Rank) -> list[str]:
    """What is called whichever way is gone."""
    for ways in ("", BY_PEER, BY_NOCU, BY_KERNEL, "events=write"):
        with asking(ways):
            for schedule in ("growing:pull", "hetero-fused-2d", "serial", "growing:kernel"):
                exact(at, equal(2, 6, 8, 4, schedule=schedule), 0)
            made = make(at, equal(2, 6, 8, 4), 0)
            timed(made, "growing")
            ficco.close()
    return list(double().double_called().decode().split())


def test_every_call_is_made_to_fail() -> None:
    """What is called and appears in no list above has a test of its own, or is named here with why
    it is not made to fail."""
    named_here = {"hipEventElapsedTime"}  # which times the steps of timed calls alone
    named_here |= {"hipEventDestroy"}  # to an end that is ignored
    # The double's stream would stay in the capture, and its graph; nothing else comes of either.
    named_here |= {"hipStreamEndCapture", "hipGraphDestroy"}
    listed = {error.call for error in (*FAILING, *TRIED)} | {name for name, _ in CLOSING}
    assert set(run(2, compiling, _all_calls)[0]) == listed | named_here


def _lost(at: Rank, how: str) -> Any:
    case = equal(3, 6, 8, 4, schedule="hetero-fused-1d")
    for iteration in range(3):
        exact(at, case, iteration)
    pids = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    if at.rank == 2 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if at.rank == 0 and how == "memory":
        double().double_lose(pids[2])
    with ficco.options(timeout_s=1.0):
        began = time.monotonic()
        outcome = caught(lambda: attempted(at, case, None))
        seconds = time.monotonic() - began
        if how == "memory":
            at.barrier()
        closing = caught(ficco.close)
    return outcome, closing, seconds, double().double_violations(), double().double_said().decode()


def test_killed_peer() -> None:
    """Where streams that wait for it block the hardware queues of their priority."""
    lost: Any = {"lost": [2], "catch": True, "settings": {"HW_QUEUES": 1}}
    *found, dead = run(3, _lost, "killed", series="10", **lost)
    assert isinstance(dead, Died)
    for outcome, closing, seconds, violations, said in found:
        assert {one["peer"] for one in gave_up(outcome)} == {2}
        assert closing is None and not violations, said
        assert seconds < 5


def test_lost_memory_of_a_peer() -> None:
    """A queue meets memory that is gone: nothing works on this rank from then on."""
    found = run(3, _lost, "memory")
    outcome, closing, _, violations, said = found[0]
    assert outcome.type == "BackendError", outcome
    assert outcome.fields["code"] == "hipErrorLaunchFailure"
    assert not violations, said
    for outcome, _, seconds, violations, said in found[1:]:
        assert outcome.type == "PeerFailed", outcome
        assert outcome.fields["reasons"][0].startswith("BackendError: "), outcome
        assert not violations and seconds < 5, said


# Machines and ways of signals that cannot be had.

MISSING = "NotImplementedError"
#: By what a machine has not: signals that are asked for, and the error with words of it.
REFUSED: tuple[tuple[dict[str, int], dict[str, tuple[str, ...]]], ...] = (
    ({"PEER": 0}, {"": (MISSING, "hipDeviceCanAccessPeer", "GPUs of one host")}),
    ({"DEVICES": 0}, {"": ("BackendError", "hipErrorNoDevice", "amdgpu", "HIP_VISIBLE_DEVICES")}),
    (
        {"WAIT": 0},
        {
            "": (MISSING, "hipStreamWaitValue32", "hiprtc"),
            "signal": (MISSING, "CanUseStreamWaitValue"),
        },
    ),
    ({"SIGNAL_IPC": 0, "WAIT": 0}, {"": (MISSING, "install ROCm's clang")}),
    ({"SIGNAL_IPC": 0}, {"signal": (MISSING, "signal memory that processes can share")}),
    (
        {},
        {"uncached": (MISSING, "GPU_STREAMOPS_CP_WAIT=1"), "kernel": (MISSING, "clang or hiprtc")},
    ),
)


def first_calls(at: Rank, asked: Sequence[str]) -> list[tuple[Any, int]]:
    build.clang.cache_clear()  # the server of ranks may have found one
    found = []
    for signals in asked:
        with ficco.options(timeout_s=3), asking(signals and f"signals={signals}"):
            outcome = caught(lambda: exact(at, equal(at.world, 4, 4, 4, schedule="growing"), 0))
        ficco.close()
        found.append((outcome, double().double_leaks()))
    return found


@pytest.mark.parametrize(
    ("settings", "refused"), REFUSED, ids=["-".join(one) for one, _ in REFUSED]
)
def test_machines_that_will_not_do(
    settings: dict[str, int], refused: dict[str, tuple[str, ...]]
) -> None:
    hide = {"PATH": "/nowhere", "ROCM_PATH": "/nowhere"}  # no compiler for kernels
    for found in run(2, first_calls, [*refused], settings=settings, env=hide):
        for (outcome, leaks), (signals, (kind, *words)) in zip(found, refused.items(), strict=True):
            assert outcome.type == kind and not leaks, outcome
            assert all(word in outcome.text for word in words), outcome.text
            if signals:
                assert outcome.text.count(f"FICCO_HIP=signals={signals} is not available") == 1
                assert "leave signals out of the variable" in outcome.text
                # A compiler is the remedy for one way alone.
                assert ("compiler" in outcome.text) == (signals == "kernel")


# The double.


class Violations(dict[str, str]):
    """The name of the error that each violation returns, by what it is."""

    def note(self, what: str, result: Any) -> None:
        count, said = double().double_violations(), double().double_said().decode()
        assert count == 1 and said and result[0], (what, result, said)
        self[what] = result[0].name


#: How a wait asks: for 1, to be equal, in all bits.
FOR_ONE = (1, 1, 0xFFFFFFFF)


def _violations(at: Rank) -> Violations:
    from hip import hip

    found, get = Violations(), value_of
    note, kind, mode = found.note, hip.hipMemcpyKind, hip.hipStreamCaptureMode
    get(hip.hipSetDevice(0))
    stream, side = (get(hip.hipStreamCreateWithPriority(1, 0)) for _ in range(2))
    event, outside = (get(hip.hipEventCreateWithFlags(2)) for _ in range(2))
    device, host = int(get(hip.hipMalloc(4096))), int(get(hip.hipHostMalloc(4096, 0)))
    word, fine = (int(get(hip.hipExtMallocWithFlags(8, flag))) for flag in (2, 1))
    get(hip.hipSetDevice(1))
    far = int(get(hip.hipMalloc(4096)))
    other = get(hip.hipStreamCreateWithPriority(1, 0))
    note("stream of another device", hip.hipMemsetAsync(device, 0, 8, stream))
    note("event of another device", hip.hipEventRecord(event, other))
    get(hip.hipSetDevice(0))

    for what, memory in (("device", device), ("fine-grained", fine), ("host", host)):
        note(f"wait on {what} memory", hip.hipStreamWaitValue32(stream, memory, *FOR_ONE))
    note("wait inside a signal", hip.hipStreamWaitValue32(stream, word + 4, *FOR_ONE))
    note("wait with no mask", hip.hipStreamWaitValue32(stream, word, 1, 1, 0))
    note("signal of another size", hip.hipExtMallocWithFlags(64, 2))
    note("copy before peer access", hip.hipMemcpyDtoDAsync(far, device, 64, stream))
    get(hip.hipDeviceEnablePeerAccess(1, 0))
    get(hip.hipMemcpyDtoDAsync(far, device, 64, stream))
    peer = hip.hipMemcpyPeerAsync(far, 2, device, 0, 64, stream)
    note("wrong device of a peer copy", peer)
    note("copy past the end", hip.hipMemcpyDtoDAsync(device + 64, far, 4096, stream))
    note("copy of unknown memory", hip.hipMemcpyDtoDAsync(device, 4096, 64, stream))
    note("copy of host memory", hip.hipMemcpyDtoDAsync(device, host, 64, stream))
    backwards = hip.hipMemcpyAsync(host, device, 64, kind.hipMemcpyHostToDevice, stream)
    note("wrong direction", backwards)
    pitch = hip.hipMemcpy2DAsync(device, 8, far, 64, 16, 2, kind.hipMemcpyDeviceToDevice, stream)
    note("wrong pitch", pitch)
    note("unaligned write", hip.hipStreamWriteValue32(stream, device + 2, 1, 0))
    note("handle of host memory", hip.hipIpcGetMemHandle(host))
    note("handle of a middle", hip.hipIpcGetMemHandle(device + 64))
    own = get(hip.hipIpcGetMemHandle(device))
    note("own handle", hip.hipIpcOpenMemHandle(own, 1))
    note("free of a middle", hip.hipFree(device + 64))
    note("free of host memory as of a device", hip.hipFree(host))
    note("close of what is not open", hip.hipIpcCloseMemHandle(device))

    get(hip.hipStreamWriteValue32(stream, word, 0, 0))
    get(hip.hipStreamWaitValue32(stream, word, *FOR_ONE))
    note("free while in use", hip.hipFree(word))
    note("destroyed while busy", hip.hipStreamDestroy(stream))
    get(hip.hipSetDevice(1))
    get(hip.hipStreamDestroy(other))
    note("destroyed stream", hip.hipMemsetAsync(far, 0, 8, other))
    get(hip.hipFree(far))
    get(hip.hipSetDevice(0))
    get(hip.hipMemcpyDtoDAsync(device, device + 64, 64, stream))
    ctypes.c_uint32.from_address(word).value = 1
    drain(stream)
    note("memory that is freed", hip.hipMemcpyDtoDAsync(device, far, 64, stream))

    inside: list[Any] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        lambda _: inside.append(hip.hipMalloc(64))  # what the API forbids
    )
    get(hip.hipLaunchHostFunc(stream, ctypes.cast(function, ctypes.c_void_p).value, 0))
    drain(stream)
    note("call from a host function", inside[0])

    get(hip.hipEventRecord(outside, side))
    get(hip.hipStreamBeginCapture(stream, mode(RELAXED)))
    note("capture begun twice", hip.hipStreamBeginCapture(stream, mode(RELAXED)))
    note("event from outside", hip.hipStreamWaitEvent(stream, outside, 0))
    note("free in a capture", hip.hipFree(device))
    get(hip.hipEventRecord(event, stream))
    note("query of a captured event", hip.hipEventQuery(event))
    get(hip.hipStreamWaitEvent(side, event, 0))
    get(hip.hipMemsetAsync(device, 0, 8, side))
    note("capture ended elsewhere", hip.hipStreamEndCapture(side))
    note("side stream not joined", hip.hipStreamEndCapture(stream))
    note("event of a capture that is over", hip.hipStreamWaitEvent(stream, event, 0))
    get(hip.hipStreamBeginCapture(stream, mode(GLOBAL)))
    note("allocation in a capture", hip.hipMalloc(64))
    assert hip.hipStreamEndCapture(stream)[0].name == "hipErrorStreamCaptureInvalidated"
    get(hip.hipStreamBeginCapture(stream, mode(RELAXED)))
    get(hip.hipEventRecord(event, stream))
    get(hip.hipStreamBeginCapture(side, mode(RELAXED)))
    note("two captures in one", hip.hipStreamWaitEvent(side, event, 0))
    for one in (stream, side):
        get(hip.hipGraphDestroy(get(hip.hipStreamEndCapture(one))))
    get(hip.hipStreamBeginCapture(stream, mode(RELAXED)))
    get(hip.hipMemsetAsync(device, 0, 8, stream))
    graph = get(hip.hipStreamEndCapture(stream))
    note("launch of what is not ready", hip.hipGraphLaunch(graph, stream))
    ready = get(hip.hipGraphInstantiateWithFlags(graph, 0))
    for address in (device, word, fine):
        get(hip.hipFree(address))
    note("replay on freed memory", hip.hipGraphLaunch(ready, stream))
    get(hip.hipGraphDestroy(graph))
    get(hip.hipGraphExecDestroy(ready))
    note("graph that is gone", hip.hipGraphLaunch(ready, stream))
    drain(side)
    for one in (outside, event):
        get(hip.hipEventDestroy(one))
    note("destroyed event", hip.hipEventRecord(event, stream))
    for one in (side, stream):
        get(hip.hipStreamDestroy(one))
    get(hip.hipHostFree(host))
    assert not double().double_leaks()
    return found


def test_double_is_strict() -> None:
    (found,) = run(1, _violations)
    assert len(found) == 40 and all(code.startswith("hipError") for code in found.values())
    assert found["copy before peer access"] == "hipErrorPeerAccessNotEnabled"
    assert found["wait on fine-grained memory"] == "hipErrorInvalidValue"
    assert found["destroyed stream"] == "hipErrorInvalidHandle"


def _shared(at: Rank) -> Violations:
    from hip import hip

    found, get, everyone = Violations(), value_of, [b"", b""]
    get(hip.hipSetDevice(at.rank))
    stream = get(hip.hipStreamCreateWithPriority(1, 0))
    mine, word = int(get(hip.hipMalloc(4096))), int(get(hip.hipExtMallocWithFlags(8, 2)))
    handles = [get(hip.hipIpcGetMemHandle(address)) for address in (mine, word)]
    dist.all_gather_object(everyone, b"".join(ctypes.string_at(pointer(h), 64) for h in handles))
    theirs = everyone[1 - at.rank]
    for handle, part in zip(handles, (theirs[:64], theirs[64:]), strict=True):
        ctypes.memmove(pointer(handle), part, 64)
    found.note("other flags", hip.hipIpcOpenMemHandle(handles[0], 0))
    far, far_word = (int(get(hip.hipIpcOpenMemHandle(handle, 1))) for handle in handles)
    found.note("copy before peer access", hip.hipMemcpyDtoDAsync(far, mine, 64, stream))
    get(hip.hipDeviceEnablePeerAccess(1 - at.rank, 0))
    get(hip.hipMemcpyDtoDAsync(far, mine, 64, stream))
    assert not double().double_violations()
    found.note("wait at a peer", hip.hipStreamWaitValue32(stream, far_word, *FOR_ONE))
    found.note("free of a peer's", hip.hipFree(far))
    at.barrier()
    found.note("free of what is mapped", hip.hipFree(mine))
    at.barrier()
    drain(stream)
    get(hip.hipIpcCloseMemHandle(far))
    found.note("closed handle", hip.hipMemcpyDtoDAsync(far, mine, 64, stream))
    found.note("closed twice", hip.hipIpcCloseMemHandle(far))
    get(hip.hipIpcCloseMemHandle(far_word))
    at.barrier()
    for address in (mine, word):
        get(hip.hipFree(address))
    at.barrier()
    found.note("handle of freed memory", hip.hipIpcOpenMemHandle(handles[0], 1))
    get(hip.hipStreamDestroy(stream))
    assert not double().double_leaks()
    return found


def test_double_is_strict_about_shared_memory() -> None:
    assert [len(found) for found in run(2, _shared)] == [8, 8]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "hip.hipMalloc(64), hip.hipExtMallocWithFlags(8, 2), "
            "hip.hipStreamCreateWithPriority(1, 0), hip.hipEventCreateWithFlags(2)",
            ("64 bytes of device memory", "8 bytes of signal memory", "a stream", "an event"),
        ),
        ("hip.hipFree(4096)", ("1 violations",)),
        ("hip.hipFree(int(hip.hipMalloc(64)[1]))", ()),
    ],
    ids=["leaks", "violates", "is well"],
)
def test_double_aborts_at_exit(script: str, said: tuple[str, ...]) -> None:
    env = {"LD_LIBRARY_PATH": str(hip_ranks.library().parent)}
    env["PYTHONPATH"] = str(hip_ranks.wheel("10"))
    command = [sys.executable, "-c", f"from hip import hip; {script}"]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == (-signal.SIGABRT if said else 0), done
    assert all(words in done.stderr for words in said), done.stderr


def _codes(at: Rank) -> tuple[dict[str, int], dict[str, int]]:
    from hip import hip

    library = ctypes.CDLL(os.environ[hip_ranks.LIBRARY])
    library.hipGetErrorName.restype = ctypes.c_char_p
    names = [library.hipGetErrorName(code).decode() for code in range(1000)]
    known = {name: code for code, name in enumerate(names) if name != "hipErrorUnknown"}
    return known, {code.name: int(code) for code in hip.hipError_t}


@pytest.mark.parametrize(
    ("series", "library"),
    [("7", hip_ranks.library), ("10", hip_ranks.library), ("10", hip_ranks.forward)],
    ids=["7", "10", "forward"],
)
def test_codes_are_those_of_the_binding(series: str, library: Callable[[], Path]) -> None:
    env = {hip_ranks.LIBRARY: str(library())}
    ((known, theirs),) = run(1, _codes, series=series, env=env)
    assert len(known) > 10
    assert {name: theirs[name] for name in known} == known


# Without ROCm.


def _without(at: Rank, wheel: str, libraries: Sequence[str]) -> str:
    """What the engine says to CPU tensors, or the doctor of the engines."""
    if wheel:
        hip_ranks.bind(wheel)
    else:
        sys.modules["hip"] = None  # type: ignore[assignment]
    for library in libraries:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    a = torch.ones(4, 4)
    assert torch.equal(ficco.all_gather_matmul(a, a), a @ a)
    with ficco.options(engine="hip"):
        found = caught(lambda: ficco.all_gather_matmul(a, a))
    from ficco.tools import doctor

    return f"{found.type} {found.text}\n{doctor.report()['engines']}"


NO_LIBRARY = ("BackendError hipRuntimeGetVersion failed with no library", "install ROCm 7.2 or")


@pytest.mark.parametrize(
    ("series", "libraries", "words"),
    [
        ("7", 0, (*NO_LIBRARY, "LD_LIBRARY_PATH", "libamdhip64.so cannot be opened")),
        ("10", 0, (*NO_LIBRARY, "LD_LIBRARY_PATH", "libamdhip64.so cannot be opened")),
        ("", 0, ("pip install 'hip-python>=7.2,<11'", "this torch is built without ROCm")),
        # The engine refuses CPU tensors; tests alone let it serve them (tests/host_gpu.py).
        ("7", 1, ("Move the tensors to the GPU",)),
        # PyTorch's wheels bring a library of their own; streams of one are none of the other's.
        ("7", 2, ("two libraries", "LD_LIBRARY_PATH")),
    ],
)
def test_without_rocm(series: str, libraries: int, words: tuple[str, ...], tmp_path: Path) -> None:
    """The CPU engine works, the HIP engine says what to do."""
    second = tmp_path / "libamdhip64.so.7"
    second.write_bytes(hip_ranks.library().read_bytes())
    given = [str(hip_ranks.library()), str(second)][:libraries]
    wheel = str(hip_ranks.wheel(series)) if series else ""
    (found,) = ranks.run(1, _without, wheel, given, fresh=True, env={"ROCM_PATH": "/nowhere"})
    assert all(word in found for word in words), found
