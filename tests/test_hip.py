"""The HIP engine through the real hip-python, on a strict double of the HIP library.

What is proven here: every schedule enqueues what its Plan says, in an order that is right however
queues are delayed; nothing is used before it is allowed, or after; errors of any call come out.
What is not: memory coherence, copy engines, speed, or anything else of a real GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import hip_ranks
import pytest
import test_operators as operators
import torch
import torch.distributed as dist
from cases import (
    A_LAYOUTS,
    SYMMETRIC_LAYOUTS,
    Case,
    all_exact,
    call,
    equal,
    exact,
    make,
    traced,
    verify,
)
from hip_ranks import SERIES, calls, clean, double, missing, run
from ranks import Died, Failure, Rank, caught, gave_up
from test_all_gather_matmul import KINDS, KNOBS, NAMES, UGLY, _two_groups_at_once, named

import ficco
from ficco.hip_kernels import build
from ficco.problems.products import Problem
from ficco.runtime.workspace import SLOTS, workspaces
from ficco.schedules import Schedule, plans

ROOT = Path(__file__).parent.parent
#: Every knob that moves bytes by copies.
COPIED = tuple(knobs for knobs in KNOBS if "kernel" not in knobs)
#: Knobs whose bytes are moved by ficco's kernel.
LAUNCHED = ("kernel", "kernel,pull", "kernel,pieces=3", "kernel,copy=3,compute=2", "kernel,tail=3")
DTYPES = ("bfloat16", "float16", "float32", "float64")
OPERATORS = operators.OPERATORS
#: A code of the library.
OUT_OF_MEMORY = 2


def engine() -> Any:
    """The engine of this rank's calls."""
    (found,) = (workspace.engine for workspace in workspaces())
    assert found.name == "hip"
    return found


def _exact(at: Rank, cases: list[Case]) -> int:
    with clean():
        all_exact(at, cases)
        ficco.synchronize()
        assert engine().work.index == at.rank
        assert at.world == 1 or calls("hipMemcpyDtoDAsync") > 0
    return len(cases)


# Results.


@pytest.mark.parametrize("series", SERIES)
def test_schedules(series: str) -> None:
    cases = [
        equal(4, 24, 40, 16, dtype=DTYPES[i % 4], schedule=named(name, knobs))
        for name in NAMES
        for i, knobs in enumerate(COPIED)
    ]
    cases += [case.on(rows=(17,) * 4, k=23, n=9, gathered=True) for case in cases[::-1]]
    cases = cases[SERIES.index(series) :: 2]
    assert run(4, _exact, cases, series=series) == [len(cases)] * 4


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_worlds(world: int) -> None:
    cases = [equal(world, 9, 24, 8, schedule=name) for name in (*KINDS, "growing:pull")]
    run(world, _exact, cases, series="10")


def test_ugly_sizes() -> None:
    cases = [
        Case(rows, k, n, dtype=dtype, schedule=named(name, knobs), gathered=gathered)
        for name in NAMES[::3]
        for rows, k, n in UGLY
        for knobs, dtype, gathered in [
            ("", "bfloat16", True),
            ("pull", "float32", False),
            ("pieces=4,tail=2,copy=2,compute=2", "float16", False),
        ]
    ]
    run(4, _exact, cases)


def _memory_while_others_call(at: Rank) -> None:
    ficco.set_options(engine="hip", on_timeout="raise", timeout_s=20)  # of other threads, too
    with clean():
        _two_groups_at_once(at, 25)


def test_memory_is_freed_while_no_thread_has_a_call_in_flight() -> None:
    """hip-python 7.2 keeps the interpreter while hipFree waits for the device, so that calls of
    other threads that are half enqueued would not go on."""
    run(2, _memory_while_others_call, series="7", settings={"JITTER_US": 300})


def test_layouts() -> None:
    cases = [
        case.on(a=layout, schedule=name)
        for layout in A_LAYOUTS + SYMMETRIC_LAYOUTS
        for name in KINDS
        for case in (equal(3, 12, 20, 8, gathered=True), Case((5, 8, 2), 11, 6, dtype="bfloat16"))
    ]
    run(3, _exact, cases, series="10")


# One product whose tiles wait, by Triton's interpreter.

TILED = ("tiled", "tiled:pieces=3,order=piece", "tiled:pieces=2,pull", "tiled:tail=2")


def _tiled(at: Rank, cases: list[Case], scattered: list[operators.Case]) -> int:
    with clean():
        all_exact(at, cases)
        operators.all_exact(at, scattered)
        # A slot's next call of a kind, whose operands lie elsewhere.
        apart = [make(at, cases[0], iteration) for iteration in range(SLOTS + 1)]
        for made in apart:
            verify(cases[0], call(cases[0], made.a, made.b), made, f"rank {at.rank}:")
        ficco.synchronize()
        assert engine().capabilities().tiles
    return len(cases) + len(scattered)


def test_tiled_products() -> None:
    if find_spec("triton") is None:
        missing("triton")
    dtypes = ("bfloat16", "float16")
    cases = [
        Case((33, 7), 72, 40, dtype=dtypes[i % 2], schedule=name, gathered=True)
        for i, name in enumerate(TILED[:3])
    ]
    scattered = [
        operators.Case(operator, operators.rows_for(operator, 2, "ragged"), 24, 40, dtype, name)
        for operator, dtype, name in zip(
            ("matmul_reduce_scatter", "matmul_all_to_all"), dtypes, TILED[2:], strict=True
        )
    ]
    counts = run(2, _tiled, cases, scattered, series="10", timeout=120)
    assert counts == [len(cases) + len(scattered)] * 2


def _untiled(at: Rank) -> Failure:
    with clean():
        case = equal(2, 16, 16, 8, dtype="float32", schedule="tiled")
        return caught(lambda: exact(at, case, 0))


def test_tiled_products_are_refused_by_name() -> None:
    if find_spec("triton") is None:
        missing("triton")
    for found in run(2, _untiled):
        assert found.type == "NotImplementedError" and "bfloat16 or float16" in found.text, found


# The other operators.


def _operators(
    at: Rank, cases: list[operators.Case], jitter: int, gathers: Sequence[Case] = ()
) -> int:
    with clean():
        exact(at, equal(at.world, 4, 4, 4), 0)
        double().double_jitter(jitter)
        operators.all_exact(at, cases)
        all_exact(at, gathers)
        ficco.synchronize()
        double().double_jitter(0)
    return len(cases) + len(gathers)


def _cases(operator: str, world: int, seed: str, kernel: bool = False) -> list[operators.Case]:
    """All schedules of an operator that copies serve, or the kernel, on rows, sizes and dtypes
    drawn for each."""
    chance = random.Random(f"{operator} {world} {seed}")
    return [
        operators.Case(
            operator,
            operators.rows_for(operator, world, chance.choice(("equal", "ragged", "few"))),
            chance.choice((8, 24)),
            chance.choice((1, 8, 40)),
            chance.choice(DTYPES),
            schedule,
            chance.random() < 0.5,
        )
        for schedule in operators.schedules_of(operator)
        if ("kernel" in schedule) == kernel
    ]


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators(operator: str) -> None:
    """Every schedule of the space on 4 ranks while queues are late by chance."""
    cases = _cases(operator, 4, "")
    series = SERIES[OPERATORS.index(operator) % 2]
    assert run(4, _operators, cases, 100, series=series, timeout=120) == [len(cases)] * 4


def test_operators_without_2d_copies() -> None:
    cases = [
        case for one in OPERATORS for case in _cases(one, 3, "packed") if "2d" in case.schedule
    ]
    run(3, _compiling, _operators, cases[::6], 0, settings={"2D": 0})


def _jittered(at: Rank, series: str, count: int, together: int) -> int:
    """Calls of any kind, every schedule among them, while every operation of every queue is late by
    chance.

    ``together`` calls are enqueued before anybody waits for them; every other time they share one
    slot, so that each begins while the one before is handing it on.
    """
    choice = random.Random(f"{series} {together}")
    schedules = [named(name, knobs) for name in NAMES for knobs in COPIED]
    choice.shuffle(schedules)
    assert len(schedules) <= count
    with clean():
        exact(at, equal(4, 8, 8, 8, schedule="growing"), 0)
        engine().work.waits = together == 1
        double().double_jitter(200)
        for first in range(0, count, together):
            under_way = []
            cap = 1 << 16 if first // together % 2 else None
            for iteration in range(first, first + together):
                case = Case(
                    tuple(choice.randrange(12) for _ in range(4)),
                    choice.choice((1, 7, 16, 40)),
                    choice.choice((1, 5, 16)),
                    dtype=choice.choice(DTYPES),
                    schedule=schedules[iteration % len(schedules)],
                    gathered=choice.random() < 0.3,
                )
                made = make(at, case, iteration)
                with ficco.options(workspace_bytes=cap):
                    under_way.append((case, call(case, made.a, made.b), made))
            ficco.synchronize()
            for case, results, made in under_way:
                verify(case, results, made, f"call {first} and following:")
        double().double_jitter(0)
    return count


@pytest.mark.parametrize(("series", "together"), [("7", 1), ("10", 8)])
def test_jittered(series: str, together: int) -> None:
    assert run(4, _jittered, series, 264, together, series=series, timeout=120) == [264] * 4


def _one_queue_late(at: Rank) -> None:
    """Queue by queue: late on one rank, while all others are prompt."""
    names = ("growing:pull", "hetero-fused-1d:pieces=2,copy=2,compute=2")
    cases = [equal(3, 12, 16, 8, schedule=name) for name in names]
    with clean():
        all_exact(at, cases)
        queues = engine().work.named
        assert {"caller", "compute1", "copy0", "copy1", "sync"} <= queues.keys()
        for turn, name in enumerate(sorted(queues)):
            mine = turn % 3 == at.rank
            handle = queues[name].as_c_void_p().value
            assert not mine or not double().double_delay(handle, 1000)
            all_exact(at, cases, 10 * (turn + 1))
            double().double_delay(handle, 0)


def test_one_queue_is_late() -> None:
    run(3, _one_queue_late)


def _late_trial(at: Rank) -> None:
    """Rank 0 tries late whether its writes reach a peer, whose first call has begun by then, and
    hands its slot on late: a trial that told the peer the slot is free would be believed."""
    case = equal(2, 8, 8, 8, schedule="shard-overlap:pull")
    with clean(), ficco.options(workspace_bytes=1 << 20, timeout_s=8):
        exact(at, case.on(schedule="serial:collective"), 0)  # the engine, and no words yet
        if at.rank == 0:
            side, sync = engine().side.handle, engine().work.lane("sync")
            for stream, us in ((side, 60_000), (sync, 20_000)):
                assert not double().double_delay(stream.as_c_void_p().value, us)
        for iteration in range(3):
            exact(at, case, iteration)


def test_a_trial_of_signals_disturbs_no_call_that_has_begun() -> None:
    run(2, _late_trial)


def _one_hardware_queue(at: Rank) -> None:
    schedules = [named(name, knobs) for name in NAMES for knobs in COPIED]
    with clean():
        exact(at, equal(4, 8, 8, 8, schedule="growing"), 0)
        double().double_jitter(50)
        all_exact(at, [equal(4, 12, 16, 8, schedule=schedule) for schedule in schedules])
        double().double_jitter(0)


def test_streams_of_a_priority_share_one_hardware_queue() -> None:
    """What waits for a peer holds up all that comes behind it: the peer must not wait for that."""
    run(4, _one_hardware_queue, settings={"HW_QUEUES": 1}, timeout=120)


def _memory(at: Rank, asked: str | None) -> str:
    from ficco.dma.hip_driver import HipDriver

    class Meeting:
        def gather(self, data: bytes) -> list[bytes]:
            return [data]

    torch.version.hip = "7.2"  # type: ignore[assignment]
    if asked:
        os.environ["FICCO_HIP"] = f"memory={asked}"
    driver = HipDriver(torch.device("cuda", 0), 0)
    return driver._memory(Meeting())  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "found"), [(None, "ipc"), ("ipc", "ipc"), ("torch", "torch")])
def test_memory_of_pytorch_only_if_asked_for(asked: str | None, found: str) -> None:
    """Also where PyTorch is built for ROCm and has it: copies in it may go by a kernel."""
    assert run(1, _memory, asked) == [found]


#: As on 8 MI300X, whose every link has a copy queue of its own.
MESH = (
    "hetero-fused-1d:copy=7",
    "hetero-unfused-1d:pieces=4,pull,copy=7",
    "uniform-fused-2d:pieces=2,copy=7",
    "shard-overlap:copy=7",
)


def _mesh(at: Rank) -> list[str]:
    """Of the seven links of a rank one is late, on each rank another one."""
    cases = [equal(8, 16, 24, 8, dtype="bfloat16", schedule=name) for name in MESH]
    sums = operators.Case("matmul_reduce_scatter", (5,) * 8, 16, 8, "bfloat16", MESH[0])
    with clean():
        all_exact(at, cases)
        queues = engine().work.named
        links = sorted(name for name in queues if name.startswith("copy"))
        late = queues[links[at.rank % 7]].as_c_void_p().value
        assert not double().double_delay(late, 2000)
        all_exact(at, cases, 10)
        operators.all_exact(at, [sums, sums.on(rows=tuple(range(8)))], 20)
        double().double_delay(late, 0)
    return links


def test_a_mesh_of_eight_has_a_copy_queue_for_each_link() -> None:
    for name in MESH:
        problem = Problem("all_gather_matmul", (16,) * 8, 8, 24, "bfloat16")
        for plan in plans(problem, Schedule.parse(name)):
            ends = [(step.lane, step.transfer) for step in plan.steps if step.op == "copy"]
            pairs = {
                (lane, ({one.src.rank, one.dst.rank} - {plan.rank}).pop()) for lane, one in ends
            }
            assert len(pairs) == 7 == len({lane for lane, _ in pairs}), "a link shares its queue"
    assert run(8, _mesh, timeout=120) == [[f"copy{i}" for i in range(7)]] * 8


def _delayed(at: Rank) -> None:
    """What is enqueued in two streams, of which the first is late."""
    from hip import hip

    _get(hip.hipSetDevice(0))
    memory = int(_get(hip.hipMalloc(64)))
    late, prompt = (_get(hip.hipStreamCreateWithPriority(1, 0)) for _ in range(2))
    assert not double().double_delay(late.as_c_void_p().value, 500_000)
    began = time.monotonic()
    for stream in (late, prompt):
        _get(hip.hipMemsetAsync(memory, 0, 8, stream))
    while hip.hipStreamQuery(prompt)[0]:
        time.sleep(1e-3)
    assert hip.hipStreamQuery(late)[0].name == "hipErrorNotReady"
    while hip.hipStreamQuery(late)[0]:
        time.sleep(1e-3)
    assert time.monotonic() - began >= 0.5
    assert double().double_delay(0, 1) == 400
    for stream in (late, prompt):
        _get(hip.hipStreamDestroy(stream))
    _get(hip.hipFree(memory))
    assert not double().double_violations()


def test_double_delays_one_queue() -> None:
    run(1, _delayed)


def _traced(at: Rank) -> None:
    case = equal(3, 12, 16, 8, schedule="hetero-fused-2d:pull")
    with clean():
        made = make(at, case, 1)
        out, plan, spans = traced(made, case.schedule)
        verify(case, [out], made)
        assert [span.step for span in spans] == list(range(len(plan.steps)))
        assert all(0 <= span.start <= span.stop < 10 for span in spans), spans
        by_lane: dict[str, float] = {}
        for span in spans:
            assert span.start >= by_lane.get(span.lane, 0), spans
            by_lane[span.lane] = span.stop


def test_times_of_steps() -> None:
    run(3, _traced, series="10")


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


def _get(result: Any) -> Any:
    """The value of a call of the binding."""
    assert not result[0], result
    return result[1] if len(result) > 1 else None


class Graphed:
    """Calls captured in a graph, with operands that change between replays."""

    def __init__(self, at: Rank, cases: list[Case], mode: int) -> None:
        from hip import hip

        self.at, self.cases, self.hip = at, cases, hip
        self.made = [make(at, case, 0) for case in cases]
        self.stream = engine().work.lane("caller")
        _get(hip.hipStreamBeginCapture(self.stream, hip.hipStreamCaptureMode(mode)))
        self.results = [
            call(case, made.a, made.b) for case, made in zip(cases, self.made, strict=True)
        ]
        graph = _get(hip.hipStreamEndCapture(self.stream))
        self.graph = _get(hip.hipGraphInstantiateWithFlags(graph, 0))
        _get(hip.hipGraphDestroy(graph))

    def exact(self, iteration: int) -> None:
        """One replay, checked in every element."""
        wanted = [make(self.at, case, iteration) for case in self.cases]
        for mine, new in zip(self.made, wanted, strict=True):
            mine.a.copy_(new.a)
            mine.b.copy_(new.b)
        _get(self.hip.hipGraphLaunch(self.graph, self.stream))
        while (error := self.hip.hipStreamQuery(self.stream)[0]) and error.value == 600:
            time.sleep(1e-4)
        assert not error
        for case, results, new in zip(self.cases, self.results, wanted, strict=True):
            verify(case, results, new, f"rank {self.at.rank}, replay {iteration}:")

    def destroy(self) -> None:
        _get(self.hip.hipGraphExecDestroy(self.graph))


def _replays(at: Rank, schedules: list[str], mode: int, count: int) -> None:
    """Replays of two graphs between eager calls of the same problem and others."""
    choice = random.Random(mode)
    with clean():
        exact(at, equal(3, 4, 4, 4), 0)
        double().double_jitter(100)
        for schedule in schedules:
            case = equal(3, 12, 16, 8, dtype="bfloat16", schedule=schedule, gathered=True)
            other = Case((5, 0, 7), 9, 3, schedule="hetero-fused-1d:pieces=3")
            bigger = equal(3, 40, 24, 8, schedule=schedule)
            graphs = [
                Graphed(at, [case], mode),
                Graphed(at, [case.on(rows=(3, 7, 2)), other, bigger, case], mode),
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


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_replays(mode: int) -> None:
    run(3, _replays, list(GRAPHED[mode::3]), mode, 24, series=SERIES[mode % 2])


@pytest.mark.parametrize("columns", [0, 1], ids=["packed columns", "4-byte copies"])
def test_replays_by_other_ways(columns: int) -> None:
    settings = {"PEER_WRITE": 0} if columns else {"2D": 0}
    schedules = ["hetero-fused-2d:pieces=2", "growing:pull"]
    run(3, _replays, schedules, GLOBAL, 12, series="10", settings=settings)


def _captured_at_once(at: Rank, refused: bool) -> None:
    case = equal(2, 8, 8, 8, schedule="growing")
    with clean():
        exact(at, case, 0)
        assert engine().capabilities().capture is not refused
        if refused:
            from hip import hip

            made, stream = make(at, case, 1), engine().work.lane("caller")
            _get(hip.hipStreamBeginCapture(stream, hip.hipStreamCaptureMode(GLOBAL)))
            found = caught(partial(call, case, made.a, made.b))
            _get(hip.hipGraphDestroy(_get(hip.hipStreamEndCapture(stream))))
            assert found.type == "NotImplementedError", found
            for part in ("carries stream writes out at once", "FICCO_HIP=signals=kernel"):
                assert part in found.text


@pytest.mark.parametrize("captured", [0, 1])
def test_captures_are_refused_where_stream_writes_are_carried_out_at_once(captured: int) -> None:
    run(2, _captured_at_once, not captured, settings={"CAPTURE_WRITES": captured})


def _captured_growth(at: Rank) -> None:
    """The first call of all is captured; graphs keep their memory while eager calls grow."""
    with clean():
        exact(at, equal(2, 4, 4, 4), 0)
        graph = Graphed(at, [equal(2, 8, 8, 8, schedule="growing")], GLOBAL)
        for rows in (16, 64, 256):
            graph.exact(rows)
            exact(at, equal(2, rows, 8, 8, schedule="growing"), rows)
            exact(at, equal(2, rows, 8, 8, schedule="growing"), rows + 1)
        graph.exact(1000)
        graph.destroy()


def test_captures_keep_their_memory() -> None:
    run(2, _captured_growth)


def _closed_apart(at: Rank) -> None:
    import ficco.dma.gpu

    ficco.dma.gpu.CLOSE_S = 0.1
    with clean():
        groups = [dist.new_group() for _ in range(3)]
        kept = ficco.empty((4, 4), group=groups[0])
        for group in groups[:2]:
            exact(at, equal(2, 8, 8, 8, schedule="growing"), 0, group)
        for group in groups[:2] if at.rank else groups[1::-1]:  # peers still have it mapped
            ficco.close(group)
            at.barrier()
        del kept
        exact(at, equal(2, 8, 8, 8, schedule="growing"), 0, groups[2])


def test_what_outlives_its_group_is_freed_later() -> None:
    run(2, _closed_apart)


# Ways of signals and of copies, by what a machine allows and what is asked for.


def _compiling(at: Rank, fn: Any, *args: Any) -> Any:
    """Kernels of any code: the double knows them by their names."""
    import ficco.dma.hip_driver
    import ficco.hip_kernels.launch

    ficco.dma.hip_driver.can_compile = lambda vendor: True
    ficco.hip_kernels.launch.compiled = lambda target: b"\0"
    return fn(at, *args)


def _by(at: Rank, options: dict[str, Any], expected: dict[str, str], used: str, knobs: str) -> None:
    with clean(), ficco.options(**options):
        cases = [
            equal(3, 24, 40, 16, schedule=named(name, knob))
            for name in NAMES
            for knob in (knobs, f"{knobs},pull".strip(","), f"pieces=3,{knobs}".strip(","))
        ]
        all_exact(at, cases)
        ficco.synchronize()
        found = engine().capabilities()
        for name, text in expected.items():
            assert text in getattr(found, name), found
        assert calls(used) > 0
        # PyTorch would report what was tried in vain as an error of its own.
        assert ctypes.CDLL("libamdhip64.so").hipGetLastError() == 0


def _by_kernels(at: Rank, *args: Any) -> None:
    _compiling(at, _by, *args)


SIGNALS = {
    "stream writes": ({}, {}, {}, {"post": "WriteValue32", "wait": "on signal memory"}),
    "copies asked for": ({}, {"signals": "copy"}, {}, {"post": "4-byte copy"}),
    "writes reach no peer": ({"PEER_WRITE": 0}, {}, {}, {"post": "4-byte copy"}),
    "signals are private": (
        {"SIGNAL_IPC": 0, "WAIT_ANY": 1},
        {},
        {},
        {"post": "uncached", "wait": "does not promise"},
    ),
    "uncached asked for": (
        {"WAIT_ANY": 1},
        {},
        {"FICCO_HIP": "signals=uncached"},
        {"wait": "does not promise"},
    ),
}


@pytest.mark.parametrize("what", SIGNALS)
def test_ways_of_signals(what: str) -> None:
    settings, options, env, expected = SIGNALS[what]
    used = "hipStreamWaitValue32"
    run(3, _by, options, expected, used, "", series="10", settings=settings, env=env)


def _posted(at: Rank, cases: list[Case]) -> str:
    with clean():
        all_exact(at, cases)
        return str(engine().capabilities().post)


def test_writes_have_to_reach_every_peer() -> None:
    """Rank 0's reach the next rank, not the one behind it: it posts by copies, to all."""
    cases = [equal(3, 8, 12, 8, schedule=name) for name in ("growing", "shard-overlap:pull")]
    first, *others = run(3, _posted, cases, settings={"NO_WRITE": "0:2"})
    assert "4-byte copy" in first and all("WriteValue32" in other for other in others)


@pytest.mark.parametrize(
    ("settings", "env"),
    [({"WAIT": 0}, {}), ({}, {"FICCO_HIP": "signals=kernel"})],
    ids=["streams cannot wait", "asked for"],
)
@pytest.mark.parametrize("series", SERIES)
def test_signals_by_kernels(series: str, settings: dict[str, Any], env: dict[str, str]) -> None:
    expected = {"post": "a kernel of ficco's", "wait": "a kernel of ficco's"}
    used = "hipModuleLaunchKernel"
    run(3, _by_kernels, {}, expected, used, "", series=series, settings=settings, env=env)


@pytest.mark.parametrize(
    ("way", "used", "text"),
    [
        ("dtod", "hipMemcpyDtoDAsync", "hipMemcpyDtoDAsync"),
        ("peer", "hipMemcpyPeerAsync", "hipMemcpyPeerAsync"),
        ("nocu", "hipMemcpyAsync", "without compute units"),
    ],
)
def test_ways_of_copies(way: str, used: str, text: str) -> None:
    run(3, _by, {}, {"copy": text}, used, "", env={"FICCO_HIP": f"copy={way}"})


@pytest.mark.parametrize(
    ("settings", "env", "how"),
    [
        ({"2D": 0}, {}, "by packing or ficco's kernel, for want of a 2D copy"),
        ({}, {"FICCO_HIP": "columns=pack"}, "by packing or ficco's kernel (asked for)"),
    ],
    ids=["not there", "asked for"],
)
def test_columns_without_2d_copies(settings: dict[str, Any], env: dict[str, str], how: str) -> None:
    run(3, _by, {}, {"copy": how}, "hipMemcpyDtoDAsync", "", settings=settings, env=env)


def _packs_on_one_rank(at: Rank, value: str) -> str:
    if at.rank == 1:
        os.environ["FICCO_HIP"] = f"columns={value}"
    cases = [equal(3, 24, 40, 16, schedule=name) for name in NAMES if "2d" in name]
    with clean():
        all_exact(at, cases)
        os.environ.pop("FICCO_HIP", None)  # what the engine began with counts
        return str(engine().capabilities().copy)


def test_columns_are_packed_by_all_ranks_or_none() -> None:
    """Otherwise a receiver would read columns where its sender has put others."""
    found = run(3, _packs_on_one_rank, "pack")
    assert all("columns by packing or ficco's kernel (asked for)" in one for one in found)


def _asks_in_vain(at: Rank, values: tuple[str, ...]) -> Any:
    os.environ["FICCO_HIP"] = values[at.rank]
    return caught(lambda: exact(at, equal(2, 8, 8, 8, schedule="growing"), 0))


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        (("columns=2d", "columns=2d"), {"2D": 0}),
        (("columns=2d", "columns=pack"), {}),
        (("", "columns=2d"), {"2D": 0}),
    ],
)
def test_2d_copies_that_cannot_be_had_are_refused(
    values: tuple[str, ...], settings: dict[str, Any]
) -> None:
    """By all ranks, also those that did not ask."""
    for outcome in run(2, _asks_in_vain, values, settings=settings):
        assert outcome.type == "NotImplementedError"
        assert "FICCO_HIP=columns=2d, which a rank asks for, cannot be had" in outcome.text


def _events(at: Rank, used: str) -> int:
    """Writes of a pull schedule, with small values of its own for the count."""
    with clean():
        exact(at, equal(3, 24, 40, 16, schedule="shard-overlap:pull,pieces=3"), 0)
        before = calls("hipStreamWriteValue32")
        exact(at, equal(3, 24, 40, 16, schedule="shard-overlap:pull,pieces=3"), 1)
        assert f"ends told by {used}" in engine().capabilities().copy
        return calls("hipStreamWriteValue32") - before


def test_ways_of_events() -> None:
    """One write more for each of the copies that a product waits for: 3 pieces of 2 peers."""
    plain = run(3, _events, "an event right behind the copy")
    env = {"FICCO_HIP": "events=write"}
    written = run(3, _events, "an event behind a stream write", env=env)
    assert [more - less for more, less in zip(written, plain, strict=True)] == [6] * 3


def _launched(at: Rank, *args: Any) -> tuple[int, int]:
    return _compiling(at, _operators, *args), calls("hipModuleLaunchKernel")


def test_copy_kernel_and_collectives_while_queues_are_late() -> None:
    """Every schedule whose bytes the kernel moves on 4 ranks, the gather's and the operators', and
    the library's collective of each."""
    cases = [
        case
        for operator in OPERATORS
        for case in (
            *_cases(operator, 4, "launched", kernel=True),
            operators.Case(
                operator,
                operators.rows_for(operator, 4, "ragged"),
                8,
                24,
                schedule="serial:collective",
            ),
        )
    ]
    names = ["serial:collective", *(named(name, knobs) for name in NAMES for knobs in LAUNCHED)]
    gathers = [
        case.on(dtype=DTYPES[i % 4], schedule=name)
        for i, name in enumerate(names)
        for case in (equal(4, 24, 40, 16), Case((5, 0, 8, 2), 11, 6, gathered=True))
    ]
    for count, launches in run(4, _launched, cases, 100, gathers, series="7", timeout=120):
        assert count == len(cases) + len(gathers) and launches > count / 2


def test_copy_kernel() -> None:
    run(3, _by_kernels, {}, {}, "hipModuleLaunchKernel", "kernel", series="10")


# Errors. Each ends in BackendError on the rank where it happens, or is got round; the other rank's
# calls end in time, and what both hold is given back.

#: Codes of the library by number, of which each injected error has one.
CODES = {1: "hipErrorInvalidValue", 2: "hipErrorOutOfMemory", 719: "hipErrorLaunchFailure"}


class Error(NamedTuple):
    """A call of the library that fails: the ``first`` of its calls from now on.

    Attributes:
        schedule: of the ficco calls meanwhile, if it takes a certain one.
        ways: what the environment says meanwhile.
    """

    call: str
    first: int
    schedule: str = ""
    ways: tuple[tuple[str, str], ...] = ()


BY_PEER = (("FICCO_HIP", "copy=peer"),)
BY_NOCU = (("FICCO_HIP", "copy=nocu"),)
BY_KERNEL = (("FICCO_HIP", "signals=kernel"),)

#: Calls that fail when an engine is made, or while it works.
FAILING = (
    Error("hipGetDeviceCount", 1),
    Error("hipRuntimeGetVersion", 1),
    Error("hipSetDevice", 1),
    Error("hipDeviceCanAccessPeer", 1),
    Error("hipDeviceEnablePeerAccess", 1),
    Error("hipMalloc", 1),
    Error("hipMalloc", 2),
    Error("hipExtMallocWithFlags", 1),
    Error("hipExtMallocWithFlags", 5),
    Error("hipHostMalloc", 1),
    Error("hipMemsetAsync", 1),
    Error("hipMemsetAsync", 3),
    Error("hipIpcGetMemHandle", 2),
    Error("hipIpcGetMemHandle", 5),
    Error("hipIpcOpenMemHandle", 2),
    Error("hipIpcOpenMemHandle", 4),
    Error("hipStreamCreateWithPriority", 1),
    Error("hipStreamCreateWithPriority", 4),
    Error("hipEventCreateWithFlags", 1),
    Error("hipEventCreateWithFlags", 6),
    Error("hipEventRecord", 1),
    Error("hipEventRecord", 5),
    Error("hipStreamWaitEvent", 1),
    Error("hipStreamWaitEvent", 4),
    Error("hipEventQuery", 2),
    Error("hipStreamQuery", 1),
    Error("hipStreamQuery", 9),
    Error("hipStreamWriteValue32", 1),
    Error("hipStreamWriteValue32", 5),
    Error("hipStreamWriteValue32", 9),
    Error("hipStreamWaitValue32", 1),
    Error("hipStreamWaitValue32", 4),
    Error("hipMemcpyDtoDAsync", 1),
    Error("hipMemcpyDtoDAsync", 2),
    Error("hipLaunchHostFunc", 1),
    Error("hipLaunchHostFunc", 2),
    Error("hipStreamGetCaptureInfo", 1),
    Error("hipThreadExchangeStreamCaptureMode", 1),
    # The first of a process is tried on a rectangle within 16 bytes.
    Error("hipMemcpy2DAsync", 2, "hetero-fused-2d:pieces=2"),
    Error("hipMemcpy2DAsync", 3, "uniform-fused-2d"),
    Error("hipMemcpyPeerAsync", 1, ways=BY_PEER),
    Error("hipMemcpyPeerAsync", 3, ways=BY_PEER),
    Error("hipMemcpyAsync", 1, ways=BY_NOCU),
    Error("hipMemcpyAsync", 3, ways=BY_NOCU),
    Error("hipModuleLoadData", 1, ways=BY_KERNEL),
    Error("hipModuleLoadData", 1, "growing:kernel"),
    Error("hipModuleGetFunction", 1, ways=BY_KERNEL),
    Error("hipModuleGetFunction", 3, "growing:kernel"),
    Error("hipModuleLaunchKernel", 1, ways=BY_KERNEL),
    Error("hipModuleLaunchKernel", 4, ways=BY_KERNEL),
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
#: Calls by which things are given back, by the way that signals go, and how many things stay when
#: each of them fails once. Memory that peers share is tried again, since they wait for it.
CLOSING = {
    "signal": (("hipFree", "hipHostFree", "hipIpcCloseMemHandle", "hipStreamDestroy"), 2),
    "kernel": (("hipModuleUnload",), 1),
}


def _attempt(at: Rank, case: Case, group: Any) -> None:
    for iteration in range(3):
        made = make(at, case, iteration, group)
        results = call(case, made.a, made.b, group)
        ficco.synchronize(group)  # as on a GPU, results are good behind this alone
        verify(case, results, made)


@contextlib.contextmanager
def _going(ways: Iterable[tuple[str, str]]) -> Iterator[None]:
    """Engines that are made in this block are told these ways."""
    os.environ.update(ways)
    try:
        yield
    finally:
        for variable, _ in ways:
            del os.environ[variable]


def _injected(at: Rank, failing: list[tuple[Error, int]]) -> list[dict[str, Any]]:
    """What each error with its code leads to on this rank; they happen on rank 1."""
    found = []
    for number, (error, code) in enumerate(failing):
        name = error.call.encode()
        group = dist.new_group([0, 1])
        schedule = "hetero-fused-1d:pieces=2" if number % 2 else "growing:pull"
        case = equal(2, 6, 8, 4, schedule=error.schedule or schedule)
        if at.rank == 1:
            double().double_fail(name, code, error.first, 1)
        began = time.monotonic()
        with ficco.options(timeout_s=0.8), _going(error.ways):
            outcome = caught(partial(_attempt, at, case, group))
            seconds = time.monotonic() - began
            at.barrier()
            double().double_fail(name, code, 0, 0)
            ficco.close(group)
        dist.destroy_process_group(group)
        gc.collect()
        found.append(
            {
                "outcome": outcome,
                "seconds": seconds,
                "violations": double().double_violations(),
                "leaks": double().double_leaks(),
                "said": double().double_said().decode(),
            }
        )
    exact(at, equal(2, 8, 8, 8), 0)  # the process is well
    ficco.close()
    return found


def wrong_with(found: dict[str, Any]) -> list[str]:
    """What an injected error left behind on a rank."""
    wrong = [found["said"]] if found["violations"] or found["leaks"] else []
    return wrong + ([f"{found['seconds']:.1f} s"] if found["seconds"] > 6 else [])


@pytest.mark.parametrize("half", [0, 1])
def test_injected_errors(half: int) -> None:
    """Codes by turns, so that a call that fails at several places does so with several."""
    failing = list(zip(FAILING, itertools.cycle(CODES), strict=False))[half::2]
    found = run(2, _compiling, _injected, failing, series=SERIES[half], timeout=150)
    wrong = []
    for ((name, first, *_), code), other, mine in zip(failing, *found, strict=True):
        here, there = mine["outcome"], other["outcome"]
        problems = wrong_with(mine) + wrong_with(other)
        if not isinstance(here, Failure) or here.fields.get("call") != name:
            problems.append(f"here {here}")
        elif here.fields["code"] != CODES[code]:
            problems.append(here.text)
        # It is told the reason, unless this rank failed before there was anything to agree on.
        told = isinstance(there, Failure) and there.type == "PeerFailed"
        if told and (list(there.fields["reasons"]) != [1] or name not in there.text):
            problems.append(f"there {there}")
        if not told and (not isinstance(there, Failure) or there.type != "SignalTimeout"):
            problems.append(f"there {there}")
        if problems:
            wrong.append((name, first, code, problems))
    assert not wrong, "\n".join(map(str, wrong))


#: Calls by which work of a warm call is enqueued.
ENQUEUEING = (
    Error("hipEventRecord", 1),
    Error("hipStreamWaitEvent", 2),
    Error("hipStreamWriteValue32", 1),
    Error("hipStreamWriteValue32", 3),
    Error("hipStreamWaitValue32", 2),
    Error("hipMemcpyDtoDAsync", 1),
    Error("hipLaunchHostFunc", 2),
    Error("hipMemcpy2DAsync", 1, "hetero-fused-2d:pieces=2"),
    Error("hipMemcpyPeerAsync", 1, ways=BY_PEER),
    Error("hipMemcpyAsync", 1, ways=BY_NOCU),
    Error("hipModuleLaunchKernel", 2, ways=BY_KERNEL),
)


def _broken_off(at: Rank, victim: int) -> list[tuple[Any, float, Any, float]]:
    """A warm call breaks off on one rank, and what it takes the other to learn it."""
    found = []
    for name, first, schedule, ways in ENQUEUEING:
        group = dist.new_group([0, 1])
        case = equal(2, 6, 8, 4, schedule=schedule or "hetero-fused-1d:pieces=2")
        with _going(ways):
            _attempt(at, case, group)
        at.barrier()
        if at.rank == victim:
            double().double_fail(name.encode(), OUT_OF_MEMORY, first, 1)
        began = time.monotonic()
        outcome = caught(partial(_attempt, at, case, group))
        seconds = time.monotonic() - began
        double().double_fail(name.encode(), OUT_OF_MEMORY, 0, 0)
        at.barrier()  # memory is freed if the peer lets go of it in time
        closed = time.monotonic()
        closing = caught(partial(ficco.close, group))
        found.append((outcome, seconds, closing, time.monotonic() - closed))
        at.barrier()
        dist.destroy_process_group(group)
    exact(at, equal(2, 8, 8, 8), 0)  # the process is well
    with clean():
        return found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_call_that_breaks_off_is_named_at_once(victim: int) -> None:
    found = run(2, _compiling, _broken_off, victim, series=SERIES[victim])
    for (name, *_), mine, other in zip(ENQUEUEING, found[victim], found[1 - victim], strict=True):
        assert mine[0].type == "BackendError" and mine[0].fields["call"] == name, mine
        assert other[0].type == "PeerFailed", other
        (why,) = other[0].fields["reasons"].values()
        assert list(other[0].fields["reasons"]) == [victim]
        assert why.startswith(f"BackendError: {name} failed with hipErrorOutOfMemory"), why
        for _, seconds, closing, closed in (mine, other):
            assert seconds < 3 and closing is None and closed < 6, (mine, other)


def test_failures_that_are_got_round() -> None:
    failing = list(itertools.product(TRIED, CODES))
    found = run(2, _injected, failing, series="10")
    for mine in (*found[0], *found[1]):
        assert mine["outcome"] is None and not wrong_with(mine), mine


def _untimed(at: Rank) -> Any:
    case = equal(2, 6, 8, 4, schedule="growing")
    made = make(at, case, 0)
    if at.rank == 1:
        double().double_fail(b"hipEventElapsedTime", 1, 3, 1)
    outcome = caught(lambda: traced(made, case.schedule))
    ficco.close()
    assert not double().double_leaks(), double().double_said().decode()
    exact(at, case, 1)
    assert not double().double_violations()
    return outcome


def test_errors_of_timing() -> None:
    other, mine = run(2, _untimed)
    assert (mine.type, mine.fields["call"]) == ("BackendError", "hipEventElapsedTime")
    # The other has its times, unless it was told before it asked for them.
    if isinstance(other, Failure):
        assert other.type == "PeerFailed" and "hipEventElapsedTime" in other.text


def _closing(at: Rank, names: Sequence[str]) -> list[Any]:
    found = []
    for name, code in zip(names, itertools.cycle(CODES), strict=False):
        group = dist.new_group([0, 1])
        _attempt(at, equal(2, 6, 8, 4, schedule="growing"), group)
        at.barrier()
        if at.rank == 1:
            double().double_fail(name.encode(), code, 1, 1)
        outcome = caught(partial(ficco.close, group))
        at.barrier()
        found.append((outcome, double().double_violations()))
        dist.destroy_process_group(group)
    return [found, double().double_leaks()]


@pytest.mark.parametrize("way", CLOSING)
def test_errors_of_closing(way: str) -> None:
    names, left = CLOSING[way]
    env = {"FICCO_HIP": f"signals={way}"}
    (others, theirs), (mine, ours) = run(2, _compiling, _closing, names, env=env)
    for name, (other, their_violations), (outcome, our_violations) in zip(
        names, others, mine, strict=True
    ):
        assert other is None and not their_violations and not our_violations
        assert (outcome.type, outcome.fields["call"]) == ("BackendError", name)
    assert (theirs, ours) == (0, left)


def _all_calls(at: Rank) -> list[str]:
    """What is called whichever way is gone."""
    for ways in ((), BY_PEER, BY_NOCU, BY_KERNEL, (("FICCO_HIP", "events=write"),)):
        with _going(ways):
            for schedule in ("growing:pull", "hetero-fused-2d", "serial", "growing:kernel"):
                exact(at, equal(2, 6, 8, 4, schedule=schedule), 0)
            made = make(at, equal(2, 6, 8, 4), 0)
            traced(made, "growing")
            ficco.close()
    return list(double().double_called().decode().split())


def test_every_call_is_made_to_fail() -> None:
    """What is called and appears in no list above has a test of its own, or is named here with why
    it is not made to fail."""
    named_here = {"hipEventElapsedTime", "hipEventDestroy"}  # the latter to an end that is ignored
    # The double's stream would stay in the capture, and its graph; nothing else comes of either.
    named_here |= {"hipStreamEndCapture", "hipGraphDestroy"}
    listed = {error.call for error in (*FAILING, *TRIED)} | named_here
    listed |= {name for names, _ in CLOSING.values() for name in names}
    assert set(run(2, _compiling, _all_calls)[0]) == listed


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
        outcome = caught(lambda: _attempt(at, case, None))
        seconds = time.monotonic() - began
        if how == "memory":
            at.barrier()
        closing = caught(ficco.close)
    return outcome, closing, seconds, double().double_violations(), double().double_said().decode()


@pytest.mark.parametrize("settings", [{}, {"HW_QUEUES": 1}], ids=["", "hw_queues"])
def test_killed_peer(settings: dict[str, int]) -> None:
    """Also where streams that wait for it block the hardware queues of their priority."""
    *found, dead = run(3, _lost, "killed", lost=[2], catch=True, series="10", settings=settings)
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


# Peers that cannot be reached, and kinds of the library that cannot be used.


def _first(at: Rank) -> Any:
    with ficco.options(timeout_s=3):
        outcome = caught(lambda: exact(at, equal(at.world, 4, 4, 4, schedule="growing"), 0))
    ficco.close()
    return outcome, double().double_leaks()


def _finds_no_compiler(at: Rank) -> Any:
    build.clang.cache_clear()  # the server of ranks has found one
    return _first(at)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"PEER": 0}, "NotImplementedError", ("hipDeviceCanAccessPeer", "GPUs of one host")),
        ({"DEVICES": 0}, "BackendError", ("hipErrorNoDevice", "amdgpu", "HIP_VISIBLE_DEVICES")),
        ({"VERSION": 60443483}, "BackendError", ("HIP 6.4", "binds HIP 7", "hip-python")),
        ({"WAIT": 0}, "NotImplementedError", ("hipStreamWaitValue32", "hiprtc")),
        ({"SIGNAL_IPC": 0, "WAIT": 0}, "NotImplementedError", ("install ROCm's clang",)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("series", SERIES)
def test_machines_that_will_not_do(
    series: str, settings: dict[str, int], kind: str, words: tuple[str, ...]
) -> None:
    hide = {"PATH": "/nowhere", "ROCM_PATH": "/nowhere"}  # no compiler for kernels
    for outcome, leaks in run(2, _finds_no_compiler, series=series, settings=settings, env=hide):
        assert outcome.type == kind, outcome
        assert all(word in outcome.text for word in words), outcome.text
        assert not leaks


# The double is strict.


def _violations(at: Rank) -> dict[str, tuple[str, str]]:
    """What each violation returns and says: by its name."""
    from hip import hip

    found: dict[str, tuple[str, str]] = {}

    def get(result: Any) -> Any:
        assert not result[0], result
        return result[1] if len(result) > 1 else None

    def try_it(what: str, result: Any) -> None:
        count, said = double().double_violations(), double().double_said().decode()
        assert count == 1, (what, result, said)
        found[what] = result[0].name, said

    kind = hip.hipMemcpyKind
    get(hip.hipSetDevice(0))
    stream, other = get(hip.hipStreamCreateWithPriority(1, 0)), None
    event = get(hip.hipEventCreateWithFlags(2))
    device, host = int(get(hip.hipMalloc(4096))), int(get(hip.hipHostMalloc(4096, 0)))
    word, fine = int(get(hip.hipExtMallocWithFlags(8, 2))), get(hip.hipExtMallocWithFlags(8, 1))
    get(hip.hipSetDevice(1))
    far = int(get(hip.hipMalloc(4096)))
    other = get(hip.hipStreamCreateWithPriority(1, 0))
    try_it("stream of another device", hip.hipMemsetAsync(device, 0, 8, stream))
    try_it("event of another device", hip.hipEventRecord(event, other))
    get(hip.hipSetDevice(0))

    wait = (1, 1, 0xFFFFFFFF)
    try_it("wait on device memory", hip.hipStreamWaitValue32(stream, device, *wait))
    try_it("wait on fine-grained memory", hip.hipStreamWaitValue32(stream, int(fine), *wait))
    try_it("wait on host memory", hip.hipStreamWaitValue32(stream, host, *wait))
    try_it("wait inside a signal", hip.hipStreamWaitValue32(stream, word + 4, *wait))
    try_it("wait with no mask", hip.hipStreamWaitValue32(stream, word, 1, 1, 0))
    try_it("signal of another size", hip.hipExtMallocWithFlags(64, 2))
    try_it("copy before peer access", hip.hipMemcpyDtoDAsync(far, device, 64, stream))
    get(hip.hipDeviceEnablePeerAccess(1, 0))
    get(hip.hipMemcpyDtoDAsync(far, device, 64, stream))
    peer = hip.hipMemcpyPeerAsync(far, 2, device, 0, 64, stream)
    try_it("wrong device of a peer copy", peer)
    try_it("copy past the end", hip.hipMemcpyDtoDAsync(device + 64, far, 4096, stream))
    try_it("copy of unknown memory", hip.hipMemcpyDtoDAsync(device, 4096, 64, stream))
    try_it("copy of host memory", hip.hipMemcpyDtoDAsync(device, host, 64, stream))
    backwards = hip.hipMemcpyAsync(host, device, 64, kind.hipMemcpyHostToDevice, stream)
    try_it("wrong direction", backwards)
    pitch = hip.hipMemcpy2DAsync(device, 8, far, 64, 16, 2, kind.hipMemcpyDeviceToDevice, stream)
    try_it("wrong pitch", pitch)
    try_it("unaligned write", hip.hipStreamWriteValue32(stream, device + 2, 1, 0))
    try_it("handle of host memory", hip.hipIpcGetMemHandle(host))
    try_it("handle of a middle", hip.hipIpcGetMemHandle(device + 64))
    own = get(hip.hipIpcGetMemHandle(device))
    try_it("own handle", hip.hipIpcOpenMemHandle(own, 1))
    try_it("free of a middle", hip.hipFree(device + 64))
    try_it("free of host memory as of a device", hip.hipFree(host))
    try_it("close of what is not open", hip.hipIpcCloseMemHandle(device))

    get(hip.hipStreamWriteValue32(stream, word, 0, 0))
    get(hip.hipStreamWaitValue32(stream, word, *wait))
    try_it("free while in use", hip.hipFree(word))
    try_it("destroyed while busy", hip.hipStreamDestroy(stream))
    get(hip.hipSetDevice(1))
    get(hip.hipStreamDestroy(other))
    try_it("destroyed stream", hip.hipMemsetAsync(far, 0, 8, other))
    get(hip.hipFree(far))
    get(hip.hipSetDevice(0))
    get(hip.hipMemcpyDtoDAsync(device, device + 64, 64, stream))
    ctypes.c_uint32.from_address(word).value = 1
    while hip.hipStreamQuery(stream)[0]:
        time.sleep(1e-3)
    try_it("memory that is freed", hip.hipMemcpyDtoDAsync(device, far, 64, stream))

    inside: list[Any] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        lambda _: inside.append(hip.hipMalloc(64))  # what the API forbids
    )
    address = ctypes.cast(function, ctypes.c_void_p).value
    get(hip.hipLaunchHostFunc(stream, address, 0))
    while hip.hipStreamQuery(stream)[0]:
        time.sleep(1e-3)
    try_it("call from a host function", inside[0])

    modes = hip.hipStreamCaptureMode
    outside = get(hip.hipEventCreateWithFlags(2))
    side = get(hip.hipStreamCreateWithPriority(1, 0))
    get(hip.hipEventRecord(outside, side))
    get(hip.hipStreamBeginCapture(stream, modes.hipStreamCaptureModeRelaxed))
    try_it("capture begun twice", hip.hipStreamBeginCapture(stream, modes(2)))
    try_it("event from outside", hip.hipStreamWaitEvent(stream, outside, 0))
    try_it("free in a capture", hip.hipFree(device))
    get(hip.hipEventRecord(event, stream))
    try_it("query of a captured event", hip.hipEventQuery(event))
    get(hip.hipStreamWaitEvent(side, event, 0))
    get(hip.hipMemsetAsync(device, 0, 8, side))
    try_it("capture ended elsewhere", hip.hipStreamEndCapture(side))
    try_it("side stream not joined", hip.hipStreamEndCapture(stream))
    try_it("event of a capture that is over", hip.hipStreamWaitEvent(stream, event, 0))
    get(hip.hipStreamBeginCapture(stream, modes.hipStreamCaptureModeGlobal))
    try_it("allocation in a capture", hip.hipMalloc(64))
    assert hip.hipStreamEndCapture(stream)[0].name == "hipErrorStreamCaptureInvalidated"
    get(hip.hipStreamBeginCapture(stream, modes.hipStreamCaptureModeRelaxed))
    get(hip.hipEventRecord(event, stream))
    get(hip.hipStreamBeginCapture(side, modes.hipStreamCaptureModeRelaxed))
    try_it("two captures in one", hip.hipStreamWaitEvent(side, event, 0))
    for one in (stream, side):
        get(hip.hipGraphDestroy(get(hip.hipStreamEndCapture(one))))
    get(hip.hipStreamBeginCapture(stream, modes.hipStreamCaptureModeRelaxed))
    get(hip.hipMemsetAsync(device, 0, 8, stream))
    graph = get(hip.hipStreamEndCapture(stream))
    try_it("launch of what is not ready", hip.hipGraphLaunch(graph, stream))
    ready = get(hip.hipGraphInstantiateWithFlags(graph, 0))
    for address in (device, word, int(fine)):
        get(hip.hipFree(address))
    try_it("replay on freed memory", hip.hipGraphLaunch(ready, stream))
    get(hip.hipGraphDestroy(graph))
    get(hip.hipGraphExecDestroy(ready))
    try_it("graph that is gone", hip.hipGraphLaunch(ready, stream))
    get(hip.hipEventDestroy(outside))
    while hip.hipStreamQuery(side)[0]:
        time.sleep(1e-3)
    get(hip.hipStreamDestroy(side))
    get(hip.hipHostFree(host))
    get(hip.hipEventDestroy(event))
    try_it("destroyed event", hip.hipEventRecord(event, stream))
    get(hip.hipStreamDestroy(stream))
    assert not double().double_leaks()
    return found


@pytest.mark.parametrize("series", SERIES)
def test_double_is_strict(series: str) -> None:
    found = run(1, _violations, series=series)[0]
    assert all(code.startswith("hipError") and said for code, said in found.values())
    assert len(found) == 40
    assert found["copy before peer access"][0] == "hipErrorPeerAccessNotEnabled"
    assert found["wait on fine-grained memory"][0] == "hipErrorInvalidValue"
    assert found["destroyed stream"][0] == "hipErrorInvalidHandle"


def _shared(at: Rank) -> dict[str, tuple[str, int]]:
    """Violations with memory of another process."""
    from hip import hip

    found: dict[str, tuple[str, int]] = {}

    def get(result: Any) -> Any:
        assert not result[0], result
        return result[1] if len(result) > 1 else None

    def exchange(data: bytes | None) -> list[Any]:
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, data)
        return everyone

    def note(what: str, result: Any) -> None:
        found[what] = result[0].name, double().double_violations()

    get(hip.hipSetDevice(at.rank))
    stream = get(hip.hipStreamCreateWithPriority(1, 0))
    mine, word = int(get(hip.hipMalloc(4096))), int(get(hip.hipExtMallocWithFlags(8, 2)))
    handles = [get(hip.hipIpcGetMemHandle(address)) for address in (mine, word)]
    raw = b"".join(ctypes.string_at(handle.as_c_void_p().value, 64) for handle in handles)
    theirs = exchange(raw)[1 - at.rank]
    for handle, part in zip(handles, (theirs[:64], theirs[64:]), strict=True):
        ctypes.memmove(handle.as_c_void_p().value, part, 64)
    note("other flags", hip.hipIpcOpenMemHandle(handles[0], 0))
    far = int(get(hip.hipIpcOpenMemHandle(handles[0], 1)))
    far_word = int(get(hip.hipIpcOpenMemHandle(handles[1], 1)))
    note("copy before peer access", hip.hipMemcpyDtoDAsync(far, mine, 64, stream))
    get(hip.hipDeviceEnablePeerAccess(1 - at.rank, 0))
    note("copy behind it", hip.hipMemcpyDtoDAsync(far, mine, 64, stream))
    note("wait at a peer", hip.hipStreamWaitValue32(stream, far_word, 1, 1, 0xFFFFFFFF))
    note("free of a peer's", hip.hipFree(far))
    at.barrier()
    note("free of what is mapped", hip.hipFree(mine))
    at.barrier()
    while hip.hipStreamQuery(stream)[0]:
        time.sleep(1e-3)
    get(hip.hipIpcCloseMemHandle(far))
    note("closed handle", hip.hipMemcpyDtoDAsync(far, mine, 64, stream))
    note("closed twice", hip.hipIpcCloseMemHandle(far))
    get(hip.hipIpcCloseMemHandle(far_word))
    at.barrier()
    get(hip.hipFree(mine))
    get(hip.hipFree(word))
    at.barrier()
    note("handle of freed memory", hip.hipIpcOpenMemHandle(handles[0], 1))
    get(hip.hipStreamDestroy(stream))
    assert not double().double_leaks()
    return found


def test_double_is_strict_about_shared_memory() -> None:
    for found in run(2, _shared):
        assert found.pop("copy behind it") == ("hipSuccess", 0)
        assert all(code != "hipSuccess" and count == 1 for code, count in found.values()), found
        assert len(found) == 8


def python(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, without what tests/hip_ranks.py prepares."""
    kept = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    path = os.pathsep.join([env.pop("wheel", ""), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**kept, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("hip.hipMalloc(64)", "64 bytes of device memory"),
        ("hip.hipExtMallocWithFlags(8, 2)", "8 bytes of signal memory"),
        ("hip.hipStreamCreateWithPriority(1, 0)", "a stream"),
        ("hip.hipEventCreateWithFlags(2)", "an event"),
        ("hip.hipFree(4096)", "1 violations"),
        ("hip.hipFree(int(hip.hipMalloc(64)[1]))", ""),
    ],
)
def test_double_aborts_at_exit(script: str, words: str) -> None:
    wheel = str(hip_ranks.wheel("10"))
    folder = str(hip_ranks.library().parent)
    done = python(f"from hip import hip; {script}", wheel=wheel, LD_LIBRARY_PATH=folder)
    assert done.returncode == (-signal.SIGABRT if words else 0), done
    assert words in done.stderr


# Without ROCm.

CALL = """
import torch, torch.distributed as dist, ficco
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
a = torch.ones(4, 4)
assert torch.equal(ficco.all_gather_matmul(a, a), a @ a)
with ficco.options(engine="hip"):
    try:
        ficco.all_gather_matmul(a, a)
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("series", SERIES)
def test_without_rocm(series: str) -> None:
    """The wheel alone: the CPU engine works, the HIP engine says what to do."""
    done = python(CALL, wheel=str(hip_ranks.wheel(series)), ROCM_PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("BackendError hipRuntimeGetVersion failed with no library")
    for word in ("install ROCm 7.2 or later", "LD_LIBRARY_PATH"):
        assert word in done.stdout


def test_without_hip_python() -> None:
    done = python("import sys; sys.modules['hip'] = None\n" + CALL)
    assert done.returncode == 0, done.stderr
    assert "pip install 'hip-python>=7.2,<11'" in done.stdout


def test_two_libraries(tmp_path: Path) -> None:
    """PyTorch's wheels bring a library of their own; streams of one are none of the other's."""
    second = tmp_path / "libamdhip64.so.7"
    second.write_bytes(hip_ranks.library().read_bytes())
    script = f"import ctypes; ctypes.CDLL({str(second)!r})\n" + CALL
    # The second has the first's name inside: found by its path, it is loaded once more.
    env = {"ROCM_PATH": str(tmp_path / "rocm")}
    (tmp_path / "rocm" / "lib").mkdir(parents=True)
    (tmp_path / "rocm" / "lib" / "libamdhip64.so").symlink_to(hip_ranks.library())
    done = python(script, wheel=str(hip_ranks.wheel("10")), **env)
    assert done.returncode == 0, done.stderr
    assert "two libraries" in done.stdout and "LD_LIBRARY_PATH" in done.stdout


def test_cpu_tensors_need_a_double() -> None:
    """The engine refuses CPU tensors; tests alone let it serve them (tests/host_gpu.py)."""
    env = {"LD_LIBRARY_PATH": str(hip_ranks.library().parent)}
    done = python(CALL, wheel=str(hip_ranks.wheel("7")), **env)
    assert done.returncode == 0, done.stderr
    assert "Move the tensors to the GPU" in done.stdout


@pytest.mark.parametrize("wheel", [True, False])
def test_doctor_without_rocm(wheel: bool) -> None:
    found = {"wheel": str(hip_ranks.wheel("10"))} if wheel else {}
    found["ROCM_PATH"] = "/nowhere"
    done = python("import ficco.tools.doctor as d; print(d.report()['engines'])", **found)
    assert done.returncode == 0, done.stderr
    text = "libamdhip64.so cannot be opened" if wheel else "this torch is built without ROCm"
    assert text in done.stdout


def test_numbers_are_those_of_the_binding() -> None:
    """The double's error names are the wheels'."""
    script = (
        "import ctypes, hip; from hip import hip\n"
        "for code in hip.hipError_t:\n"
        "    name = hip.hipGetErrorName(code)[0]\n"
        "    print(int(code), code.name)\n"
    )
    library = ctypes.CDLL(str(hip_ranks.library()))
    library.hipGetErrorName.restype = ctypes.c_char_p
    for series in SERIES:
        env = {"LD_LIBRARY_PATH": str(hip_ranks.library().parent)}
        done = python(script, wheel=str(hip_ranks.wheel(series)), **env)
        assert done.returncode == 0, done.stderr
        theirs = dict(line.split()[::-1] for line in done.stdout.splitlines())
        known = [library.hipGetErrorName(code).decode() for code in range(1000)]
        ours = {name: code for code, name in enumerate(known) if name != "hipErrorUnknown"}
        assert len(ours) > 10
        assert {name: int(theirs[name]) for name in ours} == ours
