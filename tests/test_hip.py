"""The HIP engine through the real hip-python, on a strict double of the HIP library.

These tests and ``tests/contract`` show that every schedule enqueues the steps of its Plan, in an
order that is right under any delay of queues; that no handle or memory is used before it is valid
or after it is freed; and that an error of any HIP call is raised. They do not show memory
coherence, copy engines, speed, or any other property of a real GPU.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
from cases import Case, all_exact, call, equal, exact, make, timed, verify
from hip_ranks import SERIES, asking, calls, clean, compiling, double, on_double, run
from ranks import Died, Failure, Rank, caught, gave_up, missing
from test_all_gather_matmul import KNOBS, NAMES, named
from test_gradients import test_backwards_of_two_groups_at_once

import ficco
import ficco.dma.gpu
import ficco.dma.host
from ficco.dma.memories import GATE
from ficco.hip_kernels import build
from ficco.hip_kernels.launch import Packed, SignalWords
from ficco.problems.products import Problem
from ficco.runtime.workspace import SLOTS, workspaces
from ficco.schedules import Schedule, plans

#: All combinations of schedule names and knobs that move bytes by copies.
COPIED = tuple(named(name, knobs) for name in NAMES for knobs in KNOBS if "kernel" not in knobs)
DTYPES = ("bfloat16", "float16", "float32", "float64")
#: HIP calls that copy and that launch a kernel.
COPY, LAUNCH = "hipMemcpyDtoDAsync", "hipModuleLaunchKernel"

#: :func:`hip_ranks.run` on ranks that stay for the next test.
pooled = partial(run, fresh=False)


def engine() -> Any:
    (engine,) = (workspace.engine for workspace in workspaces())
    assert engine.name == "hip"
    return engine


def pointer(stream: Any) -> int:
    return int(stream.as_c_void_p().value)


@on_double(2)
def test_heads_that_share_memory_are_copied(at: Rank) -> None:
    """Expanded keys, values and gradients overlap in memory, and no library copies such rows."""
    q, k, grad = (torch.randn(1, heads, 6, 8) for heads in (4, 1, 1))
    results = []
    for form in (torch.Tensor.expand_as, lambda head, q: head.expand_as(q).contiguous()):
        leaf = q.clone().requires_grad_()
        out = ficco.ulysses_attention(leaf, form(k, q), form(k, q))
        results.append((out, *torch.autograd.grad(out, leaf, form(grad, q))))
    assert all(map(torch.equal, *results))


@on_double(2, fresh=True, series="7", settings={"JITTER_US": 300}, timeout=300)
def test_memory_is_freed_while_no_thread_has_a_call_in_flight(at: Rank) -> None:
    """hip-python 7.2 holds the GIL while hipFree waits: half-enqueued calls could not proceed."""
    ficco.set_options(engine="hip", on_timeout="raise", timeout_s=90)  # for all threads
    test_backwards_of_two_groups_at_once.body(at)


#: HIP functions that wait for the device, and the one that frees what kernels in flight need.
FREEING = ("hipFree", "hipHostFree", "hipIpcCloseMemHandle", "hipModuleUnload")


@on_double(2)
def test_opening_and_closing_free_nothing_beside_a_call(at: Rank) -> None:
    """As above, with a call that stays half enqueued while two groups open, of which one fails."""
    compiling(at, _beside_a_call)


def _beside_a_call(at: Rank) -> None:
    from ficco.dma import hip_api

    def freed() -> list[int]:
        return [calls(name) for name in FREEING]

    x = torch.ones(2, 2)
    ficco.all_gather_matmul(x, x)
    driver, groups = engine().driver, [dist.new_group() for _ in range(2)]
    stream, word = driver.stream_for("late").handle, driver.waitable("signal")
    before = freed()
    with GATE, mock.patch.object(ficco.dma.gpu, "CLOSE_S", 0.1):
        hip_api.wait_equal(stream, word, 1)
        ficco.all_gather_matmul(x, x, group=groups[0], schedule="growing:kernel")
        ficco.close(groups[0])
        double().double_fail(b"hipIpcGetMemHandle", 2, 2, 1)  # the second is of shared memory
        failed = caught(lambda: ficco.all_gather_matmul(x, x, group=groups[1]))
        ficco.close(groups[1])
        assert freed() == before and failed.fields["call"] == "hipIpcGetMemHandle"
        ctypes.c_uint32.from_address(word).value = 1
    assert hip_api.drain(stream)
    engine().graveyard.sweep()  # unmaps the memory of peers, who may then free it
    dist.barrier()
    ficco.close()
    assert all(now > then for now, then in zip(freed(), before, strict=True))


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
        # The second call of a kind in a slot has operands at other addresses.
        separate = [make(at, cases[0], iteration) for iteration in range(SLOTS + 1)]
        for operands in separate:
            verify(cases[0], call(cases[0], operands.a, operands.b), operands, f"rank {at.rank}:")
        ficco.synchronize()
        assert engine().capabilities().tiles
        with pytest.raises(NotImplementedError, match="bfloat16 or float16"):
            exact(at, cases[0].on(dtype="float32"), 0)


def test_tiled_products() -> None:
    """Triton's interpreter runs the kernel. The error of an unsupported dtype names the dtypes."""
    if find_spec("triton") is None:
        missing("triton")
    pooled(2, _tiled, timeout=120)


@on_double(3, timeout=120)
def test_jittered(at: Rank) -> None:
    """Random calls while every operation of every queue is delayed at random.

    Eight calls are enqueued before a rank waits for them. In every other batch they share one slot,
    so each call begins while its predecessor is releasing the slot.
    """
    choice, count, batch = random.Random(8), 96, 8
    schedules = choice.sample(COPIED, count)
    exact(at, equal(3, 8, 8, 8, schedule="growing"), 0)
    engine().work.waits = False
    double().double_jitter(200)
    for first in range(0, count, batch):
        in_flight = []
        cap = 1 << 16 if first // batch % 2 else None
        for iteration in range(first, first + batch):
            case = Case(
                tuple(choice.randrange(12) for _ in range(3)),
                choice.choice((1, 7, 16, 40)),
                choice.choice((1, 5, 16)),
                dtype=choice.choice(DTYPES),
                schedule=schedules[iteration],
                gathered=choice.random() < 0.3,
            )
            operands = make(at, case, iteration)
            with ficco.options(workspace_bytes=cap):
                in_flight.append((case, call(case, operands.a, operands.b), operands))
        ficco.synchronize()
        for case, results, operands in in_flight:
            verify(case, results, operands, f"call {first} and following:")
    double().double_jitter(0)


@on_double(3)
def test_one_queue_is_late(at: Rank) -> None:
    """Each queue in turn is delayed on one rank and prompt on the others."""
    names = ("growing:pull", "hetero-fused-1d:pieces=2,copy=2,compute=2")
    cases = [equal(3, 12, 16, 8, schedule=name) for name in names]
    all_exact(at, cases)
    queues = engine().work.named
    assert {"caller", "compute1", "copy0", "copy1", "sync"} <= queues.keys()
    for turn, name in enumerate(sorted(queues)):
        delayed_here = turn % 3 == at.rank
        assert not delayed_here or not double().double_delay(pointer(queues[name]), 1000)
        all_exact(at, cases, 10 * (turn + 1))
        double().double_delay(pointer(queues[name]), 0)


@on_double(2)
def test_a_trial_of_signals_disturbs_no_call_that_has_begun(at: Rank) -> None:
    """Rank 0 tries writes after rank 1's first call has begun, and releases its slot late."""
    case = equal(2, 8, 8, 8, schedule="shard-overlap:pull")
    with ficco.options(workspace_bytes=1 << 20, timeout_s=8):
        exact(at, case.on(schedule="serial:collective"), 0)  # makes the engine, sends no signals
        if at.rank == 0:
            side, sync = engine().side.handle, engine().work.lane("sync")
            for stream, us in ((side, 60_000), (sync, 20_000)):
                assert not double().double_delay(pointer(stream), us)
        all_exact(at, [case] * 3)


@on_double(3, fresh=True, settings={"HW_QUEUES": 1}, timeout=120)
def test_streams_of_a_priority_share_one_hardware_queue(at: Rank) -> None:
    """A wait for a peer blocks later work of the queue. The peer must not depend on that work."""
    exact(at, equal(3, 8, 8, 8, schedule="growing"), 0)
    double().double_jitter(50)
    all_exact(at, [equal(3, 12, 16, 8, schedule=schedule) for schedule in COPIED[::3]])
    double().double_jitter(0)


def test_a_mesh_of_eight_has_a_copy_queue_for_each_link() -> None:
    """The topology of 8 MI300X."""
    for name in (
        *("hetero-fused-1d:copy=7", "hetero-unfused-1d:pieces=4,pull,copy=7"),
        *("uniform-fused-2d:pieces=2,copy=7", "shard-overlap:copy=7"),
    ):
        problem = Problem("all_gather_matmul", (16,) * 8, 8, 24, "bfloat16")
        for plan in plans(problem, Schedule.parse(name)):
            moves = [(step.lane, move) for step in plan.steps if (move := step.copy)]
            pairs = {(lane, ({m.src.rank, m.dst.rank} - {plan.rank}).pop()) for lane, m in moves}
            assert len(pairs) == 7 == len({lane for lane, _ in pairs}), "two links share a queue"


@on_double(3)
def test_times_of_steps(at: Rank) -> None:
    case = equal(3, 12, 16, 8, schedule="hetero-fused-2d:pull")
    operands = make(at, case, 1)
    out, plan, spans = timed(operands, case.schedule)
    verify(case, [out], operands)
    assert [span.step for span in spans] == list(range(len(plan.steps)))
    assert all(0 <= span.start <= span.stop < 10 for span in spans), spans
    end_of_lane: dict[str, float] = {}
    for span in spans:
        assert span.start >= end_of_lane.get(span.lane, 0), spans
        end_of_lane[span.lane] = span.stop


#: Modes of a capture.
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
GRAPHED = (
    *("serial", "growing", "shrinking:pull", "shard-overlap:copy=2,compute=2"),
    *("hetero-fused-1d:pieces=4", "uniform-unfused-1d:pull,copy=2"),
    *("hetero-fused-2d:pieces=4", "uniform-unfused-2d:compute=2"),
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
        self.inputs = [make(at, case, 0) for case in cases]
        self.stream = engine().work.lane("caller")
        value_of(hip.hipStreamBeginCapture(self.stream, hip.hipStreamCaptureMode(mode)))
        pairs = zip(cases, self.inputs, strict=True)
        self.results = [call(case, inputs.a, inputs.b) for case, inputs in pairs]
        graph = value_of(hip.hipStreamEndCapture(self.stream))
        self.graph = value_of(hip.hipGraphInstantiateWithFlags(graph, 0))
        value_of(hip.hipGraphDestroy(graph))

    def exact(self, iteration: int) -> None:
        changed = [make(self.at, case, iteration) for case in self.cases]
        for captured, new in zip(self.inputs, changed, strict=True):
            captured.a.copy_(new.a)
            captured.b.copy_(new.b)
        value_of(self.hip.hipGraphLaunch(self.graph, self.stream))
        drain(self.stream)
        for case, results, new in zip(self.cases, self.results, changed, strict=True):
            verify(case, results, new, f"rank {self.at.rank}, replay {iteration}:")

    def destroy(self) -> None:
        value_of(self.hip.hipGraphExecDestroy(self.graph))


def replayed(at: Rank, schedules: Sequence[str], count: int, first: int = GLOBAL) -> None:
    """Mix replays of two graphs with eager calls. The mode of the captures rotates."""
    choice = random.Random(count)
    with clean():
        exact(at, equal(3, 4, 4, 4), 0)
        double().double_jitter(100)
        for mode, schedule in enumerate(schedules, start=first):
            case = equal(3, 12, 16, 8, dtype="bfloat16", schedule=schedule, gathered=True)
            other = Case((5, 0, 7), 9, 3, schedule="hetero-fused-1d:pieces=3")
            bigger = equal(3, 40, 24, 8, schedule=schedule)
            several = [case.on(rows=(3, 7, 2)), other, bigger, case]
            graphs = [Graphed(at, cases, mode % 3) for cases in ([case], several)]
            for iteration in range(count):
                chosen = choice.choice((case, other, bigger, *graphs))
                if isinstance(chosen, Case):
                    exact(at, chosen, iteration)
                else:
                    chosen.exact(iteration)
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
    operands, stream = make(at, case, 1), engine().work.lane("caller")
    value_of(hip.hipStreamBeginCapture(stream, hip.hipStreamCaptureMode(GLOBAL)))
    with pytest.raises(NotImplementedError, match="executes stream writes at once") as raised:
        call(case, operands.a, operands.b)
    assert "FICCO_HIP=signals=kernel" in str(raised.value)
    value_of(hip.hipGraphDestroy(value_of(hip.hipStreamEndCapture(stream))))


@on_double(2)
def test_captures_keep_their_memory(at: Rank) -> None:
    """The first call is captured. Graphs keep their memory while eager calls grow."""
    exact(at, equal(2, 4, 4, 4), 0)
    graph = Graphed(at, [equal(2, 8, 8, 8, schedule="growing")], GLOBAL)
    for rows in (16, 64, 256):
        graph.exact(rows)
        all_exact(at, [equal(2, rows, 8, 8, schedule="growing")] * 2, rows)
    graph.exact(1000)
    graph.destroy()


@on_double(2)
def test_memory_that_outlives_its_group_is_freed_later(at: Rank) -> None:
    with mock.patch.object(ficco.dma.gpu, "CLOSE_S", 0.1):
        groups = [dist.new_group() for _ in range(3)]
        tensor = ficco.empty((4, 4), group=groups[0])
        for group in groups[:2]:
            exact(at, equal(2, 8, 8, 8, schedule="growing"), 0, group)
        for group in groups[:2] if at.rank else groups[1::-1]:  # peers still map the memory
            ficco.close(group)
            at.barrier()
        del tensor
        exact(at, equal(2, 8, 8, 8, schedule="growing"), 0, groups[2])


@on_double(2)
def test_memory_that_a_peer_may_map_is_not_freed(at: Rank) -> None:
    """Rank 0 fails after rank 1 has got its handle."""
    exact(at, equal(2, 8, 8, 8, schedule="growing"), 0)
    gather = ficco.dma.host.Meeting.gather

    def interrupted(meeting: Any, data: bytes) -> list[bytes]:
        gathered = gather(meeting, data)
        if at.rank == 0:
            raise KeyboardInterrupt
        time.sleep(0.2)
        return gathered

    with mock.patch.object(ficco.dma.host.Meeting, "gather", interrupted):
        with pytest.raises(KeyboardInterrupt) if at.rank == 0 else nullcontext():
            ficco.empty((4, 4))


# Signals and copies, by the features of the machine and the requests in FICCO_HIP.


class Way(NamedTuple):
    """A request in FICCO_HIP or options, its HIP call, and texts of the engine's capabilities."""

    request: str
    call: str
    described: dict[str, str]
    options: dict[str, str] = {}


WAIT, ROWS = "hipStreamWaitValue32", "hipMemcpyAsync"
KERNELS = "a kernel of ficco's"
PACKED = "by packing or ficco's kernel"
REQUESTED = (
    Way("", WAIT, {"post": "WriteValue32", "wait": "on signal memory"}),
    Way("", WAIT, {"post": "4-byte copy"}, {"signals": "copy"}),
    Way("signals=kernel", LAUNCH, {"post": KERNELS, "wait": KERNELS}),
    Way("copy=dtod", COPY, {"copy": COPY}),
    Way("copy=peer", "hipMemcpyPeerAsync", {"copy": "hipMemcpyPeerAsync"}),
    Way("copy=nocu", ROWS, {"copy": "without compute units"}),
    Way("columns=pack", COPY, {"copy": f"{PACKED} (asked for)"}),
    Way("events=write", "hipStreamWriteValue32", {"copy": "after a stream write"}),
)
#: Settings that take features from the double, and the ways that are left.
LACKS: tuple[tuple[dict[str, int], tuple[Way, ...]], ...] = (
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
        with clean(), asking(way.request), ficco.options(**way.options):
            before = calls(way.call)
            all_exact(at, cases)
            ficco.synchronize()
            capabilities = engine().capabilities()
            for name, text in way.described.items():
                assert text in getattr(capabilities, name), capabilities
            assert calls(way.call) > before, way
            # PyTorch would report the error of a failed trial as its own.
            assert ctypes.CDLL("libamdhip64.so").hipGetLastError() == 0


def test_ways_that_are_requested() -> None:
    pooled(3, compiling, _by, REQUESTED, series="10")


@pytest.mark.parametrize(("settings", "ways"), LACKS, ids=["-".join(lacks) for lacks, _ in LACKS])
def test_ways_of_signals(settings: dict[str, int], ways: Sequence[Way]) -> None:
    """Ways of signals and of columns on a machine that lacks a feature."""
    series = SERIES["WAIT" in settings]
    run(3, compiling, _by, ways, series=series, settings=settings)


def _posted(at: Rank) -> str:
    with clean():
        all_exact(at, [equal(3, 8, 12, 8, schedule=s) for s in ("growing", "shard-overlap:pull")])
        return str(engine().capabilities().post)


def test_writes_have_to_reach_every_peer() -> None:
    """Writes of rank 0 reach rank 1 but not rank 2. Rank 0 posts to all peers by copies."""
    first, *others = run(3, _posted, settings={"NO_WRITE": "0:2"})
    assert "4-byte copy" in first and all("WriteValue32" in other for other in others)


@on_double(3)
def test_columns_are_packed_by_all_ranks_or_none(at: Rank) -> None:
    """If only some ranks packed, a receiver would read the columns from the wrong places."""
    cases = [equal(3, 24, 40, 16, schedule=name) for name in NAMES if "2d" in name]
    with asking("columns=pack" if at.rank == 1 else ""):
        exact(at, cases[0], 0)
    all_exact(at, cases)  # the engine keeps the request that it started with
    assert f"columns {PACKED} (asked for)" in str(engine().capabilities().copy)


@on_double(2, fresh=True, settings={"2D": 0})
def test_unavailable_2d_copies_are_refused(at: Rank) -> None:
    """All ranks raise, including ranks that did not request 2D copies."""
    refusal = "FICCO_HIP=columns=2d, which a rank selects, is not available"
    for ways in ("columns=2d", "columns=2d"), ("", "columns=2d"), ("columns=2d", "columns=pack"):
        with clean(), asking(ways[at.rank]), pytest.raises(NotImplementedError, match=refusal):
            exact(at, equal(2, 8, 8, 8, schedule="growing"), 0)


@on_double(2)
def test_wrong_choices_are_refused_at_once(at: Rank) -> None:
    """Ranks whose signals differ would test different mechanisms."""
    ways = ("", "signals=uncached")[at.rank], "copy=peer,copy=nocu", "copy=sdma"
    differ = "signals: required the same value on all ranks, got none on rank 0, uncached on rank 1"
    for way, error in zip(ways, (differ, *["each once, of signals="] * 2), strict=True):
        with clean(), asking(way), pytest.raises(ficco.ConfigError, match=f"FICCO_HIP: .*{error}"):
            exact(at, equal(2, 4, 4, 4, schedule="growing"), 0)


@on_double(1)
def test_memory_of_pytorch_only_on_request(at: Rank) -> None:
    """A PyTorch built for ROCm offers symmetric memory, but copies in it may run as kernels."""
    from ficco.dma.hip_driver import HipDriver

    meeting: Any = SimpleNamespace(gather=lambda data: [data])
    for ways, memory in ("", "ipc"), ("memory=ipc", "ipc"), ("memory=torch", "torch"):
        with mock.patch.object(torch.version, "hip", "7.2"), asking(ways):
            assert HipDriver(torch.device("cuda", 0), 0)._memory(meeting) == memory


# Errors. The rank of an error raises BackendError or works around the error. The calls of the other
# rank end in time, and both ranks release their handles and memory.

#: HIP's error codes that are injected, by number.
CODES = {1: "hipErrorInvalidValue", 2: "hipErrorOutOfMemory", 719: "hipErrorLaunchFailure"}


class Error(NamedTuple):
    """A HIP function that fails at its ``first``-th call after the injection. ``schedule`` and
    ``ways`` are those of the ficco calls."""

    call: str
    first: int
    schedule: str = ""
    ways: str = ""


BY_PEER, BY_NOCU, BY_KERNEL = "copy=peer", "copy=nocu", "signals=kernel"
#: HIP functions that fail while an engine starts or works, by the index of the failing call.
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
    # An engine's first 2D copy is a trial on a rectangle within 16 bytes.
    Error("hipMemcpy2DAsync", 2, "hetero-fused-2d:pieces=2"),
    Error("hipMemcpyPeerAsync", 1, ways=BY_PEER),
    Error("hipMemcpyAsync", 1, ways=BY_NOCU),
    Error("hipModuleLoadData", 1, ways=BY_KERNEL),
    Error("hipModuleLoadData", 1, "growing:kernel"),
    Error("hipModuleGetFunction", 3, "growing:kernel"),
    Error("hipModuleLaunchKernel", 1, ways=BY_KERNEL),
    Error("hipModuleLaunchKernel", 1, "growing:kernel"),
)
#: HIP functions with a fallback: the ficco call succeeds after their failure.
TRIED = (
    Error("hipMemcpy2DAsync", 1),  # columns are packed
    Error("hipDeviceGetAttribute", 1),  # one PCI number of one device is 0
    Error("hipStreamWriteValue32", 3),  # posts are copies
    # After these, captures raise and eager calls work.
    Error("hipStreamBeginCapture", 1),
    Error("hipStreamWriteValue32", 2),
)
#: HIP functions that release resources, and the way of the signals. A failure leaks one resource.
#: Shared memory is the exception: its release is retried, since peers wait for it.
CLOSING = (
    *(("hipFree", ""), ("hipHostFree", ""), ("hipIpcCloseMemHandle", "")),
    *(("hipStreamDestroy", ""), ("hipModuleUnload", BY_KERNEL)),
)
LEFT_BY_CLOSING = 3


def attempted(at: Rank, case: Case, group: Any) -> None:
    for iteration in range(3):
        operands = make(at, case, iteration, group)
        results = call(case, operands.a, operands.b, group)
        ficco.synchronize(group)  # results are valid only after it, as on a GPU
        verify(case, results, operands)


class Injected(NamedTuple):
    """The outcome of an injected error on a rank, its time, and leaks after the group is closed."""

    outcome: Any
    seconds: float
    closing: Any
    counts: tuple[int, int]
    log: str

    def problems(self, most_s: float) -> list[str]:
        left = [self.log] if any(self.counts) or self.closing else []
        return left + ([f"{self.seconds:.1f} s"] if self.seconds > most_s else [])


def injected(at: Rank, failing: list[tuple[Error, int]], warm: bool = False) -> list[Injected]:
    """Inject each error on rank 1, into its first or a ``warm`` call; return a rank's outcomes."""
    outcomes = []
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
        outcomes.append(Injected(outcome, seconds, closing, left, double().double_said().decode()))
    with clean():
        exact(at, equal(2, 8, 8, 8), 0)  # the process still works
    return outcomes


#: HIP functions that enqueue the work of a warm call.
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
    """The codes rotate, so that a function that fails at several places fails with several codes.
    The other rank gets the reason at once, unless the failure precedes the first agreement."""
    codes = itertools.cycle(CODES)
    failing = list(zip(ENQUEUEING if warm else FAILING, codes, strict=False))
    outcomes = run(2, compiling, injected, failing, warm, timeout=150)
    wrong = []
    for ((name, first, *_), code), peer, failed in zip(failing, *outcomes, strict=True):
        own, others = failed.outcome, peer.outcome
        problems = failed.problems(3 if warm else 6) + peer.problems(3 if warm else 6)
        fields = own.fields if isinstance(own, Failure) else {}
        if (fields.get("call"), fields.get("code")) != (name, CODES[code]):
            problems.append(f"on the failing rank: {own}")
        kind = others.type if isinstance(others, Failure) else ""
        if kind == "PeerFailed":
            ((rank, reason),) = others.fields["reasons"].items()
            explained = rank == 1 and f"{name} failed with {CODES[code]}" in reason
        else:
            explained = kind == "SignalTimeout" and not warm
        if not explained:
            problems.append(f"on the other rank: {others}")
        if problems:
            wrong.append((name, first, code, problems))
    assert not wrong, "\n".join(map(str, wrong))


def test_failures_with_a_fallback() -> None:
    failing = list(zip(TRIED, itertools.cycle(CODES), strict=False))
    for result in itertools.chain(*run(2, injected, failing, series="10")):
        assert result.outcome is None and not result.problems(6), result


def _closing(at: Rank) -> list[Any]:
    outcomes = []
    for (name, ways), code in zip(CLOSING, itertools.cycle(CODES), strict=False):
        group = dist.new_group([0, 1])
        with asking(ways):
            attempted(at, equal(2, 6, 8, 4, schedule="growing"), group)
        at.barrier()
        if at.rank == 1:
            double().double_fail(name.encode(), code, 1, 1)
        outcome = caught(partial(ficco.close, group))
        at.barrier()
        outcomes.append((outcome, double().double_violations()))
        dist.destroy_process_group(group)
    return [outcomes, double().double_leaks()]


def test_errors_of_closing() -> None:
    (of_peer, leaks_of_peer), (of_failed, leaks_of_failed) = run(2, compiling, _closing)
    rows = zip(CLOSING, of_peer, of_failed, strict=True)
    for (name, _), (peer, violations_of_peer), (failed, violations) in rows:
        assert peer is None and not violations_of_peer and not violations
        assert (failed.type, failed.fields["call"]) == ("BackendError", name)
    assert (leaks_of_peer, leaks_of_failed) == (0, LEFT_BY_CLOSING)


def _all_calls(at: Rank) -> list[str]:
    """HIP functions that any way of FICCO_HIP calls."""
    for ways in ("", BY_PEER, BY_NOCU, BY_KERNEL, "events=write"):
        with asking(ways):
            for schedule in ("growing:pull", "hetero-fused-2d", "serial", "growing:kernel"):
                exact(at, equal(2, 6, 8, 4, schedule=schedule), 0)
            operands = make(at, equal(2, 6, 8, 4), 0)
            timed(operands, "growing")
            ficco.close()
    return list(double().double_called().decode().split())


def test_every_call_is_made_to_fail() -> None:
    """Each HIP function is in a list above, or here with the reason why no test makes it fail."""
    not_failed = {"hipEventElapsedTime"}  # only times the steps of timed calls
    not_failed |= {"hipEventDestroy"}  # its errors are ignored
    # A failure leaves the double's stream in the capture and leaks its graph, with no other effect.
    not_failed |= {"hipStreamEndCapture", "hipGraphDestroy"}
    listed = {error.call for error in (*FAILING, *TRIED)} | {name for name, _ in CLOSING}
    assert set(run(2, compiling, _all_calls)[0]) == listed | not_failed


def _lost(at: Rank, loss: str) -> Any:
    case = equal(3, 6, 8, 4, schedule="hetero-fused-1d")
    for iteration in range(3):
        exact(at, case, iteration)
    pids = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    if at.rank == 2 and loss == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if at.rank == 0 and loss == "memory":
        double().double_lose(pids[2])
    with ficco.options(timeout_s=1.0):
        began = time.monotonic()
        outcome = caught(lambda: attempted(at, case, None))
        seconds = time.monotonic() - began
        if loss == "memory":
            at.barrier()
        closing = caught(ficco.close)
    return outcome, closing, seconds, double().double_violations(), double().double_said().decode()


def test_killed_peer() -> None:
    """Streams that wait for the killed peer block the hardware queues of their priority."""
    options: Any = {"lost": [2], "catch": True, "settings": {"HW_QUEUES": 1}}
    *survivors, dead = run(3, _lost, "killed", series="10", **options)
    assert isinstance(dead, Died)
    for outcome, closing, seconds, violations, log in survivors:
        assert {entry["peer"] for entry in gave_up(outcome)} == {2}
        assert closing is None and not violations, log
        assert seconds < 5


def _held(at: Rank, how: str) -> Any:
    """The copies by which the watchdogs of the survivors of rank 2 read words block, until the
    group has an error if ``how`` is "for a while"."""
    case = equal(3, 6, 8, 4, schedule="hetero-fused-1d")
    for iteration in range(3):
        exact(at, case, iteration)
    at.barrier()
    if at.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    double().double_hold(b"hipMemcpyAsync")
    (workspace,) = workspaces()

    def let_go() -> None:
        while workspace.error is None:
            time.sleep(0.01)
        double().double_hold(b"")

    if how == "for a while":
        threading.Thread(target=let_go, daemon=True).start()
    with (
        mock.patch("ficco.runtime.watchdog.RELEASE_S", 20.0 if how == "for a while" else 2.0),
        ficco.options(timeout_s=60, on_timeout="abort" if how == "abort" else "raise"),
    ):
        outcome = caught(lambda: attempted(at, case, None))
        closing = caught(ficco.close)
    return outcome, closing, double().double_violations(), double().double_said().decode()


@pytest.mark.parametrize("series", SERIES)
@pytest.mark.parametrize("how", ["for a while", "abort", "raise"])
def test_killed_peer_beside_a_library_that_does_not_answer(how: str, series: str) -> None:
    """No watchdog can read its signal words. Each rank ends with the rank that is missing."""
    options: Any = {"lost": [2], "catch": True, "series": series}
    *survivors, dead = run(3, _held, how, **options)
    assert isinstance(dead, Died)
    if how == "for a while":
        for outcome, closing, violations, log in survivors:
            assert {(entry["peer"], entry["ended"]) for entry in gave_up(outcome)} == {(2, True)}
            assert closing is None and not violations, log
        return
    assert all(isinstance(rank, Died) and rank.exitcode == 1 for rank in survivors), survivors
    # A rank that learns the error from the other one closes the group, which the library blocks.
    unfreed = "the streams could not be freed"
    ends = {"on_timeout='abort'", unfreed} if how == "abort" else {unfreed}
    for rank in survivors:
        assert set(re.findall("ficco: (.*), ending this process", rank.output)) <= ends, rank
    first = next(rank.output for rank in survivors if "ficco: SignalTimeout: " in rank.output)
    for word in ("waited", "for rank 2", "the driver did not answer", "of rank 2 has ended"):
        assert word in first


def test_lost_memory_of_a_peer() -> None:
    """A queue accesses lost memory. The device of the rank does not work afterwards."""
    results = run(3, _lost, "memory")
    outcome, closing, _, violations, log = results[0]
    assert outcome.type == "BackendError", outcome
    assert outcome.fields["code"] == "hipErrorLaunchFailure"
    assert not violations, log
    for outcome, _, seconds, violations, log in results[1:]:
        assert outcome.type == "PeerFailed", outcome
        assert outcome.fields["reasons"][0].startswith("BackendError: "), outcome
        assert not violations and seconds < 5, log


MISSING = "NotImplementedError"
#: Settings that take features from the double; by requested signals, the error and its words.
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


def first_calls(at: Rank, requests: Sequence[str]) -> list[tuple[Any, int]]:
    build.clang.cache_clear()  # the server of ranks may have cached a compiler
    outcomes = []
    for signals in requests:
        with ficco.options(timeout_s=3), asking(signals and f"signals={signals}"):
            outcome = caught(lambda: exact(at, equal(at.world, 4, 4, 4, schedule="growing"), 0))
        ficco.close()
        outcomes.append((outcome, double().double_leaks()))
    return outcomes


@pytest.mark.parametrize(("lacks", "refused"), REFUSED, ids=["-".join(row[0]) for row in REFUSED])
def test_unsupported_machines(lacks: dict[str, int], refused: dict[str, tuple[str, ...]]) -> None:
    env = {"PATH": "/nowhere", "ROCM_PATH": "/nowhere"}  # no compiler for kernels
    for errors in run(2, first_calls, [*refused], settings=lacks, env=env):
        for (error, leaks), (signals, (kind, *words)) in zip(errors, refused.items(), strict=True):
            assert error.type == kind and not leaks, error
            assert all(word in error.text for word in words), error.text
            if signals:
                assert error.text.count(f"FICCO_HIP=signals={signals} is not available") == 1
                assert "leave signals out of the variable" in error.text
                # Only kernels need a compiler.
                assert ("compiler" in error.text) == (signals == "kernel")


class Violations(dict[str, str]):
    """Names of the errors that violations return, by a description of the violation."""

    def note(self, violation: str, result: Any) -> None:
        count, log = double().double_violations(), double().double_said().decode()
        assert count == 1 and log and result[0], (violation, result, log)
        self[violation] = result[0].name


#: Arguments of a wait for equality with 1 in all bits.
FOR_ONE = (1, 1, 0xFFFFFFFF)


def _violations(at: Rank) -> Violations:
    from hip import hip

    violations, get = Violations(), value_of
    note, kind, mode = violations.note, hip.hipMemcpyKind, hip.hipStreamCaptureMode
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

    for name, memory in (("device", device), ("fine-grained", fine), ("host", host)):
        note(f"wait on {name} memory", hip.hipStreamWaitValue32(stream, memory, *FOR_ONE))
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
    note("close of memory that is not mapped", hip.hipIpcCloseMemHandle(device))

    module = get(hip.hipModuleLoadData(b"code"))
    post = get(hip.hipModuleGetFunction(module, b"ficco_post"))
    posted = Packed((SignalWords((fine,), (1,)), ctypes.c_uint32(1)))
    get(hip.hipStreamWriteValue32(stream, word, 0, 0))
    get(hip.hipStreamWaitValue32(stream, word, *FOR_ONE))
    get(hip.hipModuleLaunchKernel(post, 1, 1, 1, 64, 1, 1, 0, stream, posted.address, None))
    note("code unloaded while in use", hip.hipModuleUnload(module))
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
    get(hip.hipModuleUnload(module))
    note("memory that is freed", hip.hipMemcpyDtoDAsync(device, far, 64, stream))

    inside: list[Any] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        lambda _: inside.append(hip.hipMalloc(64))  # which the API forbids
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
    for handle in (stream, side):
        get(hip.hipGraphDestroy(get(hip.hipStreamEndCapture(handle))))
    get(hip.hipStreamBeginCapture(stream, mode(RELAXED)))
    get(hip.hipMemsetAsync(device, 0, 8, stream))
    graph = get(hip.hipStreamEndCapture(stream))
    note("launch of a graph that is not instantiated", hip.hipGraphLaunch(graph, stream))
    executable = get(hip.hipGraphInstantiateWithFlags(graph, 0))
    for address in (device, word, fine):
        get(hip.hipFree(address))
    note("replay on freed memory", hip.hipGraphLaunch(executable, stream))
    get(hip.hipGraphDestroy(graph))
    get(hip.hipGraphExecDestroy(executable))
    note("destroyed graph", hip.hipGraphLaunch(executable, stream))
    drain(side)
    for handle in (outside, event):
        get(hip.hipEventDestroy(handle))
    note("destroyed event", hip.hipEventRecord(event, stream))
    for handle in (side, stream):
        get(hip.hipStreamDestroy(handle))
    get(hip.hipHostFree(host))
    assert not double().double_leaks()
    return violations


def test_double_is_strict() -> None:
    (codes,) = run(1, _violations)
    assert len(codes) == 41 and all(code.startswith("hipError") for code in codes.values())
    assert codes["copy before peer access"] == "hipErrorPeerAccessNotEnabled"
    assert codes["wait on fine-grained memory"] == "hipErrorInvalidValue"
    assert codes["destroyed stream"] == "hipErrorInvalidHandle"


def _shared(at: Rank) -> Violations:
    from hip import hip

    violations, get, gathered = Violations(), value_of, [b"", b""]
    get(hip.hipSetDevice(at.rank))
    stream = get(hip.hipStreamCreateWithPriority(1, 0))
    own, word = int(get(hip.hipMalloc(4096))), int(get(hip.hipExtMallocWithFlags(8, 2)))
    handles = [get(hip.hipIpcGetMemHandle(address)) for address in (own, word)]
    dist.all_gather_object(gathered, b"".join(ctypes.string_at(pointer(h), 64) for h in handles))
    from_peer = gathered[1 - at.rank]
    for handle, part in zip(handles, (from_peer[:64], from_peer[64:]), strict=True):
        ctypes.memmove(pointer(handle), part, 64)
    violations.note("other flags", hip.hipIpcOpenMemHandle(handles[0], 0))
    far, far_word = (int(get(hip.hipIpcOpenMemHandle(handle, 1))) for handle in handles)
    violations.note("copy before peer access", hip.hipMemcpyDtoDAsync(far, own, 64, stream))
    get(hip.hipDeviceEnablePeerAccess(1 - at.rank, 0))
    get(hip.hipMemcpyDtoDAsync(far, own, 64, stream))
    assert not double().double_violations()
    violations.note("wait at a peer", hip.hipStreamWaitValue32(stream, far_word, *FOR_ONE))
    violations.note("free of a peer's memory", hip.hipFree(far))
    at.barrier()
    violations.note("free of memory that a peer maps", hip.hipFree(own))
    at.barrier()
    drain(stream)
    get(hip.hipIpcCloseMemHandle(far))
    violations.note("closed handle", hip.hipMemcpyDtoDAsync(far, own, 64, stream))
    violations.note("closed twice", hip.hipIpcCloseMemHandle(far))
    get(hip.hipIpcCloseMemHandle(far_word))
    at.barrier()
    for address in (own, word):
        get(hip.hipFree(address))
    at.barrier()
    violations.note("handle of freed memory", hip.hipIpcOpenMemHandle(handles[0], 1))
    get(hip.hipStreamDestroy(stream))
    assert not double().double_leaks()
    return violations


def test_double_is_strict_about_shared_memory() -> None:
    assert [len(violations) for violations in run(2, _shared)] == [8, 8]


@pytest.mark.parametrize(
    ("script", "messages"),
    [
        (
            "hip.hipMalloc(64), hip.hipExtMallocWithFlags(8, 2), "
            "hip.hipStreamCreateWithPriority(1, 0), hip.hipEventCreateWithFlags(2)",
            ("64 bytes of device memory", "8 bytes of signal memory", "a stream", "an event"),
        ),
        ("hip.hipFree(4096)", ("1 violations",)),
        ("hip.hipFree(int(hip.hipMalloc(64)[1]))", ()),
    ],
    ids=["leaks", "violation", "clean"],
)
def test_double_aborts_at_exit(script: str, messages: tuple[str, ...]) -> None:
    env = {"LD_LIBRARY_PATH": str(hip_ranks.library().parent)}
    env["PYTHONPATH"] = str(hip_ranks.wheel("10"))
    command = [sys.executable, "-c", f"from hip import hip; {script}"]
    process = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert process.returncode == (-signal.SIGABRT if messages else 0), process
    assert all(message in process.stderr for message in messages), process.stderr


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
    ((known, bound),) = run(1, _codes, series=series, env=env)
    assert len(known) > 10
    assert {name: bound[name] for name in known} == known


def _without(at: Rank, wheel: str, libraries: Sequence[str]) -> str:
    """The HIP engine's error for CPU tensors, and the engines in the doctor's report."""
    if wheel:
        hip_ranks.bind(wheel)
    else:
        sys.modules["hip"] = None  # type: ignore[assignment]
    for library in libraries:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    a = torch.ones(4, 4)
    assert torch.equal(ficco.all_gather_matmul(a, a), a @ a)
    with ficco.options(engine="hip"):
        error = caught(lambda: ficco.all_gather_matmul(a, a))
    from ficco.tools import doctor

    return f"{error.type} {error.text}\n{doctor.report()['engines']}"


NO_LIBRARY = ("BackendError hipRuntimeGetVersion failed with no library", "install ROCm 7.2 or")


@pytest.mark.parametrize(
    ("series", "libraries", "words"),
    [
        ("7", 0, (*NO_LIBRARY, "LD_LIBRARY_PATH", "libamdhip64.so cannot be opened")),
        ("10", 0, (*NO_LIBRARY, "LD_LIBRARY_PATH", "libamdhip64.so cannot be opened")),
        ("", 0, ("pip install 'hip-python>=7.2,<11'", "this torch is built without ROCm")),
        # The engine refuses CPU tensors outside of tests with tests/host_gpu.py.
        ("7", 1, ("Move the tensors to the GPU",)),
        # PyTorch's wheels contain a HIP library. Streams of one library are invalid in another.
        ("7", 2, ("two libraries", "LD_LIBRARY_PATH")),
    ],
)
def test_without_rocm(series: str, libraries: int, words: tuple[str, ...], tmp_path: Path) -> None:
    """The CPU engine works. The HIP engine's error says how to install ROCm."""
    second = tmp_path / "libamdhip64.so.7"
    second.write_bytes(hip_ranks.library().read_bytes())
    loaded = [str(hip_ranks.library()), str(second)][:libraries]
    wheel = str(hip_ranks.wheel(series)) if series else ""
    (report,) = ranks.run(1, _without, wheel, loaded, fresh=True, env={"ROCM_PATH": "/nowhere"})
    assert all(word in report for word in words), report
