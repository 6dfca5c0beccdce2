"""Rounds: every candidate in every mode once, in shuffled order, the same on all ranks.

=======  ==========================================================================================
mode     what is timed
=======  ==========================================================================================
queued   the GPU sleeps until the host has enqueued the call, as after a host that runs ahead
idle     the GPU waits for the host: what the host takes to enqueue is inside the time
graph    a replay of as many calls as ``CALLS_IN_GRAPH`` in a row, timed as in queued, by call
=======  ==========================================================================================

On a GPU times are those of events around the call. On a CPU a call is carried out by its caller,
and idle is all there is, by the host's clock.
"""

from __future__ import annotations

import gc
import math
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from ficco.accelerator import gpu
from ficco.dma.host import HostMemory, Hosts
from ficco.dma.messages import gloo_group
from ficco.errors import InvalidArgument
from ficco.tools.bench.calls import Runner

MODES = ("queued", "idle", "graph")

#: A graph of one would be launching and ending more than anything else; those of a model hold many.
CALLS_IN_GRAPH = 8

#: Calls in a row of which the host's time is taken, and how often.
HOST_CALLS, HOST_ROWS = 5, 5

#: A call that takes so many seconds needs few calls to warm up, and hides its host whatever that
#: takes.
LONG_S = 0.05

#: Calls to warm up of any candidate: one on each slot, for which memory may be allocated, and one.
LEAST_WARM = 3

#: How long the GPU sleeps: so many times what the host takes at its best, and so many seconds more,
#: in which the collective that lines the ranks up is enqueued; not longer than the last.
SLEEP_FACTOR = 2.0
SLEEP_LEAST_S = 200e-6
SLEEP_MOST_S = 5e-3

#: Turns of a waiting rank between two looks at the clock.
LOOK = 1 << 10

#: Seconds that ranks may take to meet at a new barrier, at most.
MEET_S = 600.0


def modes_of(device: str, wanted: str | None) -> tuple[str, ...]:
    """The modes that a device has, or those of a list with commas.

    Raises:
        ValueError: there is no such mode, or the device does not have it.
    """
    there = MODES if device == "cuda" else ("idle",)
    if wanted is None:
        return there
    chosen = tuple(dict.fromkeys(wanted.split(",")))
    for mode in chosen:
        if mode not in there:
            raise InvalidArgument(
                "mode", f"required one of {', '.join(there)} on {device}, got {mode!r}"
            )
    return chosen


class Barrier:
    """Lets the ranks of this machine go on within about a microsecond of each other.

    A count per rank in shared memory; no data is ordered by it. Collectives are no substitute:
    they leave the ranks tens of microseconds apart, which is as long as what is timed. Between
    hosts there is nothing better; they are those of a group of its own, since another thread may
    carry out collectives of the caller's, and ranks must begin those of a group in one order.

    ``timeout_s``: seconds after which a rank that waits raises ``TimeoutError``. No two barriers
    have the same ``hosts`` of several.
    """

    def __init__(
        self, group: ProcessGroup, timeout_s: float = math.inf, hosts: Hosts | None = None
    ) -> None:
        hosts = hosts or Hosts.one(group)
        self._rank, self._world = hosts.near.rank(), hosts.near.size()
        self._timeout_s = timeout_s
        self._count = 0
        # The rank's count, then two words of what is decided.
        memory = HostMemory(hosts.near, 24, min(timeout_s, MEET_S), "the barrier of a measurement")
        self._words = [memoryview(part).cast("q") for part in memory.maps]
        memory.close()  # the words keep the maps
        self._between: Any = None  # hosts
        if hosts.count > 1:
            self._between = gloo_group(hosts, "barrier", timeout_s)
        self.wait()

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self._between is not None:
            self._await(self._between.barrier())
        self._count += 1
        words, count = self._words, self._count
        began = time.monotonic()
        words[self._rank][0] = count
        for rank in range(self._world):
            turns = 0
            while words[rank][0] < count:
                turns += 1
                if turns > 100:
                    os.sched_yield()
                if turns % LOOK == 0 and time.monotonic() > began + self._timeout_s:
                    raise TimeoutError(f"rank {rank} did not come within {self._timeout_s:.0f} s")

    def decide(self, value: int) -> int:
        """What rank 0 says, on every rank."""
        if self._between is not None:
            said = torch.tensor([value])
            self._await(self._between.broadcast(said, 0))
            return int(said)
        # Two words take turns: rank 0 is at most one decision ahead of whoever still reads.
        word = 1 + self._count % 2
        if self._rank == 0:
            self._words[0][word] = value
        self.wait()
        return self._words[0][word]

    def _await(self, work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise TimeoutError(f"a rank of another host did not come: {error}") from error

    def close(self) -> None:
        self._words.clear()
        self._between = None


@dataclass(eq=False)
class Item:
    """One candidate in one mode.

    All times are this rank's, in seconds, by call: ``times_s`` of one or a replay's, once a round;
    ``host_s`` what the host takes to enqueue one of several in a row.
    """

    mode: str
    name: str
    runner: Runner
    replay: Callable[[], None] | None = None
    sleep_s: float = SLEEP_LEAST_S
    times_s: list[float] = field(default_factory=list)
    host_s: float = math.nan

    def __post_init__(self) -> None:
        self.call: Callable[[], Any] = self.replay or self.runner.run
        self.calls = 1 if self.replay is None else CALLS_IN_GRAPH  # that ``call`` makes


class HostClock:
    """Times calls that their caller carries out."""

    warm_calls = 2

    def __init__(self, group: ProcessGroup, barrier: Barrier) -> None:
        self._barrier = barrier

    def time(self, item: Item) -> tuple[float, float]:
        """Seconds of the item's calls, and of the host in them."""
        self._barrier.wait()
        start = time.perf_counter()
        item.call()
        seconds = time.perf_counter() - start
        return seconds, seconds

    def host(self, item: Item) -> float:
        """Not told apart from the call's own time."""
        return math.nan


class DeviceClock:
    """Times calls on a GPU.

    Attributes:
        warm_calls: of each candidate before the first round. The fourth is the last that can be
            slow: ficco records calls that come the second time, on each of two slots.
    """

    warm_calls = 6

    def __init__(self, group: ProcessGroup, barrier: Barrier) -> None:
        self._group, self._barrier = group, barrier
        self._start = gpu.Event(enable_timing=True)
        self._stop = gpu.Event(enable_timing=True)
        self._word = torch.zeros(1, device="cuda")
        cycles = 20_000_000
        for _ in range(2):
            self._start.record()
            gpu._sleep(cycles)
            self._stop.record()
            gpu.synchronize()
        # Cycles that a sleeping GPU counts in a second.
        self._hertz = cycles / (self._start.elapsed_time(self._stop) * 1e-3)
        dist.all_reduce(self._word, group=group)

    def time(self, item: Item) -> tuple[float, float]:
        """Seconds of the item's calls, and of the host in them."""
        call = item.call
        gpu.synchronize()
        self._barrier.wait()
        self._line_up(item)
        self._start.record()
        begin = time.perf_counter()
        call()
        end = time.perf_counter()
        self._stop.record()
        gpu.synchronize()
        return self._start.elapsed_time(self._stop) * 1e-3, end - begin

    def _line_up(self, item: Item) -> None:
        """Put in front of a call what keeps the GPU from it until all of it is enqueued."""
        if item.mode != "idle":
            gpu._sleep(int(item.sleep_s * self._hertz))
            dist.all_reduce(self._word, group=self._group)  # clocks differ, and so do sleeps

    def host(self, item: Item) -> float:
        """Seconds that the host takes to enqueue the item's calls once, of several in a row."""
        call = item.call
        taken = []
        for _ in range(HOST_ROWS):
            gpu.synchronize()
            self._barrier.wait()
            gpu._sleep(int(HOST_CALLS * item.sleep_s * self._hertz))
            for _ in range(HOST_CALLS):
                begin = time.perf_counter()
                call()
                taken.append(time.perf_counter() - begin)
        gpu.synchronize()
        return median(taken)


def capture(runner: Runner, pool: Any) -> tuple[Callable[[], None], torch.Tensor]:
    """A runner's calls in a graph: its replay, and the result that the last one writes to.

    Graphs of one ``pool`` share memory: a result holds only until another graph is replayed.
    """
    graph = gpu.CUDAGraph()
    # Other threads, such as NCCL's, may go on with what they do.
    mode = gpu.graph(graph, pool=pool, capture_error_mode="thread_local")
    with runner.context(), mode:
        for _ in range(CALLS_IN_GRAPH):
            result = runner.run()
    return graph.replay, result


def rounds(
    items: list[Item],
    clock: HostClock | DeviceClock,
    barrier: Barrier,
    most: int,
    seconds: float,
    least: int = 3,
    seed: int = 0,
    tick: Callable[[str], None] = lambda what: None,
) -> int:
    """Time all items, ``most`` rounds or as many as fit, at least ``least``; returns how many.

    Every rank calls it with the same items; rank 0's clock decides.
    """
    shuffle = random.Random(seed)
    gc.collect()
    gc.disable()  # out of what is timed
    try:
        for item in items:
            with item.runner.context():
                _warm(item, clock, barrier)
        rest = max((item.sleep_s for item in items), default=0.0)
        for item in items:
            item.sleep_s = rest  # a card that has rested for longer is cooler, and faster
        began = time.monotonic()
        done, late = 0, False
        while done < most and not late:
            tick(f"round {done + 1}")
            for item in shuffle.sample(items, len(items)):
                with item.runner.context():
                    item.times_s.append(clock.time(item)[0] / item.calls)
            done += 1
            spent = time.monotonic() - began
            late = bool(barrier.decide(done >= least and spent + spent / done > seconds))
    finally:
        gc.enable()
    return done


def _warm(item: Item, clock: HostClock | DeviceClock, barrier: Barrier) -> None:
    """Call until nothing is slow for being new, and see what the host takes."""
    taken = []
    for _ in range(clock.warm_calls):
        taken.append(clock.time(item))
        # Not by the slowest ones, for which memory was allocated.
        long = bool(barrier.decide(min(seconds for seconds, _ in taken) > LONG_S * item.calls))
        if long and len(taken) >= LEAST_WARM:
            break
    host = min(host for _, host in taken)
    item.sleep_s = min(SLEEP_LEAST_S + SLEEP_FACTOR * host, SLEEP_MOST_S)
    if not long:
        item.host_s = clock.host(item) / item.calls


def peak_bytes(run: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, int]:
    """A call's result, and the most that it took of PyTorch's memory besides that result.

    On a CPU the second is 0: nothing there keeps count.
    """
    if device.type != "cuda":
        return run(), 0
    gpu.synchronize()
    gpu.reset_peak_memory_stats()
    before = gpu.memory_allocated()
    result = run()
    gpu.synchronize()
    peak = gpu.max_memory_allocated() - before
    return result, peak - result.untyped_storage().nbytes()


def pytorch_workspace_bytes(group: ProcessGroup) -> int:
    """Symmetric memory that PyTorch's fused op keeps for a group."""
    with suppress(ImportError, AttributeError):
        from torch.distributed import _symmetric_memory

        workspace = _symmetric_memory._group_name_to_workspace_tensor.get(group.group_name)
        return 0 if workspace is None else workspace.untyped_storage().nbytes()
    return 0
