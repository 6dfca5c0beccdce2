"""Times of calls on all ranks: rounds, modes, clocks, and calls timed during other calls.

=======  ==========================================================================================
mode     what is timed
=======  ==========================================================================================
queued   the GPU sleeps until the host has enqueued the call, as when a host runs ahead
idle     the GPU waits for the host: the time includes what the host takes to enqueue
graph    a replay of ``CALLS_IN_GRAPH`` calls in a row, timed as in queued; seconds of one call
=======  ==========================================================================================

Every round times each call once, in shuffled order, the same order on all ranks. On a GPU, events
around the call measure the time. On a CPU the caller carries out the call, so that idle is the only
mode, measured by the host's clock.
"""

from __future__ import annotations

import gc
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

import ficco
from ficco.accelerator import gpu
from ficco.compute.products import multiply
from ficco.compute.scaled import multiply_scaled
from ficco.dma.host import HostMemory, Hosts, hosts_of
from ficco.dma.messages import gloo_group
from ficco.errors import InvalidArgument
from ficco.problems.products import Problem
from ficco.problems.scaling import Scaling
from ficco.problems.specification import AnyProblem
from ficco.tools.bench.inputs import Operands, draw_normal, factors

MODES = ("queued", "idle", "graph")

#: The collectives from and into one tensor; newer releases of PyTorch renamed them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: A graph of one would be launching and ending more than anything else; those of a model hold many.
CALLS_IN_GRAPH = 8

#: Calls in a row for the host's time, and number of rows.
HOST_CALLS, HOST_ROWS = 5, 5

#: Seconds of a long call: it needs few warm-up calls, and is never host-bound.
LONG_S = 0.05

#: Least number of warm-up calls: one on each slot, which may allocate memory, and one more.
LEAST_WARM = 3

#: Sleep of the GPU: a multiple of the fastest host time, plus a constant, up to a limit. The
#: constant covers the time to enqueue the collective that aligns the ranks.
SLEEP_FACTOR = 2.0
SLEEP_LEAST_S = 200e-6
SLEEP_MOST_S = 5e-3

#: Polls of a waiting rank between two checks of the clock.
LOOK = 1 << 10

#: Seconds that ranks may take to meet at a new barrier, at most.
MEET_S = 600.0


@dataclass
class Runner:
    """One candidate, ready to be called again and again.

    Attributes:
        run: one call; returns its result.
        expected: the right result for operands, by default that of the operator.
        proof: the call whose result is compared, where that is not the timed one.
        context: entered around calls, outside of the timed part.
    """

    run: Call
    expected: Callable[[Operands], torch.Tensor] = Operands.reference
    proof: Call | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def modes_of(device: str, wanted: str | None, graphs: bool = True) -> tuple[str, ...]:
    """The modes that a device has, or those of a list with commas; without ``graphs`` there is no
    mode of that name.

    Raises:
        ValueError: there is no such mode, or the device does not have it.
    """
    available = MODES[: 2 + graphs] if device == "cuda" else ("idle",)
    if wanted is None:
        return available
    chosen = tuple(dict.fromkeys(wanted.split(",")))
    for mode in chosen:
        if mode not in available:
            raise InvalidArgument(
                "mode", f"required one of {', '.join(available)} on {device}, got {mode!r}"
            )
    return chosen


class Barrier:
    """Lets the ranks of this machine go on within about a microsecond of each other.

    Each rank has a counter in shared memory; the barrier orders no data. Collectives would leave
    the ranks tens of microseconds apart, as long as a timed call. Ranks of several hosts use
    collectives of a separate group, since another thread may run collectives of the caller's group.

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
        # The rank's counter, then two words for decisions.
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
        """The value of rank 0, on every rank."""
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

    Times are seconds of one call on this rank. ``times_s``: of each round. ``host_s``: to enqueue
    one of several calls in a row.
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
        """NaN: the host carries out the call."""
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
        """Keep the GPU busy until the whole call is enqueued."""
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
    # Other threads, such as NCCL's, may use the GPU during the capture.
    mode = gpu.graph(graph, pool=pool, capture_error_mode="thread_local")
    with runner.context(), mode:
        for _ in range(CALLS_IN_GRAPH):
            result = runner.run()
    return graph.replay, result


def rounds(
    items: list[Item],
    clock: HostClock | DeviceClock,
    barrier: Barrier,
    *,
    seconds: float,
    most: int = 25,
    least: int = 3,
    seed: int = 0,
    tick: Callable[[str], None] = lambda action: None,
) -> int:
    """Time all items, ``most`` rounds or as many as fit, at least ``least``; returns how many.

    Every rank calls it with the same items; rank 0's clock decides.
    """
    shuffle = random.Random(seed)
    gc.collect()
    gc.disable()  # not inside timed calls
    try:
        for item in items:
            with item.runner.context():
                _warm(item, clock, barrier)
        rest = max((item.sleep_s for item in items), default=0.0)
        for item in items:
            item.sleep_s = rest  # a longer rest cools the card, which makes it faster
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
    """Make the warm-up calls, and take the host's time."""
    taken = []
    for _ in range(clock.warm_calls):
        taken.append(clock.time(item))
        # The fastest counts: slow ones allocated memory.
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


# Calls timed by all ranks together.


Call = Callable[[], Any]

#: Seconds of the slowest rank, one per round.
Times = np.ndarray

#: Length of the background calls, as a multiple of the timed call, which slows down by less.
COVER = 2.0

#: Most calls in the background: a device's queue holds about a thousand operations, and a call of
#: ficco's is up to fifty of them.
MOST_IN_BACKGROUND = 24

#: Switch interval of Python's threads: the default can exceed the time of a call.
SWITCH_S = 50e-6

#: Seconds that a rank waits for its peers before it takes them to have failed.
PEERS_S = 45.0


def slowest(by_rank: Sequence[Sequence[float]]) -> Times:
    """The slowest rank's time of every round, from the times of every rank."""
    return np.max(by_rank, axis=0)


class Stopwatch:
    """The ranks of a group, which time together.

    ``timeout_s``: seconds that a rank waits for its peers.

    Attributes:
        mode: the mode for times of a device: queued on GPUs, idle on CPUs.
        hosts: hosts of the ranks, determined unless passed. At most one Stopwatch may use the same
            ``hosts``.
        has_peers: whether processes of the other ranks run; false where they are replayed.
        note: remark on the times, for reports.
    """

    has_peers = True
    note = ""

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        timeout_s: float = PEERS_S,
        hosts: Hosts | None = None,
    ) -> None:
        self.group, self.device = group, device
        self.hosts = hosts or hosts_of(group, min(timeout_s, MEET_S), "measurement")
        self.rank, self.world = group.rank(), group.size()
        self.on_gpu = device.type == "cuda"
        self.mode = "queued" if self.on_gpu else "idle"
        self.barrier = Barrier(group, timeout_s, self.hosts)
        self.clock = (DeviceClock if self.on_gpu else HostClock)(group, self.barrier)

    def time(
        self, calls: Mapping[str, Call | Runner], *, mode: str = "", **how: Any
    ) -> dict[str, Times]:
        """Time all calls; by name, the same on every rank. ``how``: as :meth:`rounds`."""
        items = [
            Item(mode or self.mode, name, call if isinstance(call, Runner) else Runner(call))
            for name, call in calls.items()
        ]
        _, timed = self.rounds(items, **how)
        return {item.name: times for item, (times, _) in zip(items, timed, strict=True)}

    def rounds(self, items: list[Item], **how: Any) -> tuple[int, list[tuple[Times, float]]]:
        """Time items in rounds; how many rounds, and of each item the times and the seconds of the
        host, both of the slowest rank. ``how``: as :func:`ficco.tools.bench.measure.rounds`."""
        done = rounds(items, self.clock, self.barrier, **how)
        everyone = self.gather([(item.times_s, item.host_s) for item in items])
        by_item = [zip(*of_ranks, strict=True) for of_ranks in zip(*everyone, strict=True)]
        return done, [(slowest(times), max(hosts)) for times, hosts in by_item]

    def gather(self, value: Any) -> list[Any]:
        """A value of every rank, on every rank."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(
        self, action: Call, *, fatal: tuple[type[Exception], ...] = (), named: bool = False
    ) -> tuple[Any, str]:
        """The result of an action that all ranks carry out, or None and why one of them could not.

        The reason is the same on every rank: class and first line of the error of the lowest rank
        that has one. The GPU is synchronized, so that asynchronous errors count.

        Args:
            fatal: errors that are raised at once instead, and that the peers do not hear of. None
                is without peers: nobody waits, and the next call has a new engine.
            named: say which rank's error it is, unless all ranks have the same.
        """
        value, why = None, ""
        try:
            value = action()
            if self.on_gpu:
                gpu.synchronize()
        except Exception as error:
            if self.has_peers and isinstance(error, fatal):
                raise
            why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        everyone = self.gather(why)
        if not any(everyone):
            return value, ""
        rank, why = next((rank, text) for rank, text in enumerate(everyone) if text)
        return None, f"rank {rank}: {why}" if named and len(set(everyone)) > 1 else why

    def arrivals(self, problem: AnyProblem) -> str:
        """Name of the simulated arrivals of a problem in rows; empty where peers run."""
        return ""

    # Overridden for a rank without peers.

    def operands(self, problem: Problem) -> Operands:
        """Operands of a problem on this rank."""
        return Operands(problem, self.rank, self.device)

    def proof(self, call: Call, operands: Operands) -> Call:
        """A call with the result that has to be right."""
        return call

    def settle(self, calls: Sequence[Runner], dtype: torch.dtype) -> None:
        """Prepare calls of ficco's on operands of a dtype, which are timed next."""

    def figures(self, item: Item, done: int) -> dict[str, float]:
        """Columns of an item besides its times, from the last ``done`` rounds."""
        return {}

    def free(self) -> None:
        """Free ficco's memory on all ranks, once no peer can reach it any more."""
        if self.on_gpu:
            gpu.synchronize()
        self.barrier.wait()
        ficco.close(self.group)
        self.barrier.wait()

    def release(self) -> None:
        """Free ficco's memory, and of a GPU's what PyTorch keeps for later."""
        self.free()
        if self.on_gpu:
            gpu.empty_cache()

    def close(self) -> None:
        self.barrier.close()


def calls_to_cover(front: Times, back: Times) -> int:
    """Number of background calls that outlast a timed call, from their exclusive times."""
    return min(max(math.ceil(COVER * np.median(front) / np.median(back)), 1), MOST_IN_BACKGROUND)


def contended(front: Call, back: Call, count: int, device: torch.device) -> Runner:
    """A call that is timed while ``count`` others run in the background.

    The others run on a second stream of a GPU, or on a second thread of a CPU.
    """
    if device.type != "cuda":
        return _on_thread(front, back, count)
    side, fork = gpu.Stream(), gpu.Event()

    def run() -> Any:
        fork.record()
        side.wait_event(fork)
        with gpu.stream(side):
            back()  # one call has a head start over the call that is timed
        result = front()
        with gpu.stream(side):
            for _ in range(count - 1):
                back()
        return result

    return Runner(run)


def _on_thread(front: Call, back: Call, count: int) -> Runner:
    pool = ThreadPoolExecutor(1, "ficco background")
    running: list[Future[None]] = []

    def work() -> None:
        for _ in range(count):
            back()

    def join() -> None:
        while running:
            running.pop().result()  # raises what went wrong there

    def run() -> Any:
        join()
        running.append(pool.submit(copy_context().run, work))  # with the options in force
        return front()

    @contextmanager
    def context() -> Iterator[None]:
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            yield
        finally:
            sys.setswitchinterval(before)
            join()

    return Runner(run, context=context)


@dataclass
class MeasuredCalls:
    """Calls to measure on one rank: copies, collectives and products, on constant operands.

    Attributes:
        dtype: of all operands.
        scaling: of operands of float8.
        memory: normal numbers that all operands are cut from; grown as needed.
    """

    group: ProcessGroup
    device: torch.device
    dtype: torch.dtype
    scaling: Scaling | None = None
    memory: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.group.size()

    def matrix(
        self, name: str, rows: int, cols: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A matrix of normal numbers: products take longer on them than on small integers."""
        dtype = dtype or self.dtype
        key = f"{name} {dtype}"
        numbers = self.memory.get(key)
        if numbers is None or numbers.numel() < rows * cols:
            generator = torch.Generator(self.device)
            generator.manual_seed(len(name) + self.group.rank())
            self.memory.pop(key, None)
            drawn = torch.empty(rows * cols, dtype=dtype, device=self.device)
            draw_normal(drawn, generator)
            numbers = self.memory[key] = drawn
        return numbers[: rows * cols].view(rows, cols)

    def shard(self, nbytes: int) -> torch.Tensor:
        """A shard of about ``nbytes``, in whole rows of 2 KiB."""
        return self.matrix("shard", max(nbytes // 2048, 1), 2048 // self.dtype.itemsize)

    def gathered(self, nbytes: int) -> torch.Tensor:
        """Memory for shards of ``nbytes`` of all ranks."""
        rows, cols = self.shard(nbytes).shape
        return self.matrix("gathered", rows * self.world, cols)

    def copies(self, schedule: str, nbytes: int) -> Call:
        """The copies of a schedule for a shard of ``nbytes``, without products."""
        shard = self.shard(nbytes)
        none = shard.new_empty((shard.shape[1], 0))
        return partial(ficco.all_gather_matmul, shard, none, group=self.group, schedule=schedule)

    def collective(self, nbytes: int) -> Call:
        """The vendor's all-gather of shards of ``nbytes``."""
        return partial(all_gather, self.gathered(nbytes), self.shard(nbytes), group=self.group)

    def matmul(
        self,
        m: int,
        n: int,
        k: int,
        *,
        batch: int = 1,
        wide: bool = False,
        apart: bool = False,
        turned: bool = False,
    ) -> Call:
        """A product, or a strided batch of products.

        ``wide``: the result is float32 and is added to. ``apart``: each of the batch has a right
        operand of its own. ``turned``: these lie transposed.
        """
        if self.scaling is not None:
            return self._scaled(m, n, k, wide)
        if wide:
            sums = self.matrix("sums", m, n, torch.float32)
            return partial(multiply, self.matrix("a", m, k), self.matrix("b", k, n), sums, sums)
        a, b, out = self.operands(batch * m, n, k)
        if batch > 1:
            a3, out3 = a.view(batch, m, k), out.view(batch, m, n)
            every = self.matrix("b", batch * k if apart else k, n)
            every = every.view(-1, n, k).mT if turned else every.view(-1, k, n)
            b3 = every.expand(batch, k, n)
            return lambda: torch.bmm(a3, b3, out=out3)
        return partial(torch.mm, a, b, out=out)

    def operands(self, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The operands of a product, and its result."""
        return self.matrix("a", m, k), self.matrix("b", k, n), self.matrix("out", m, n)

    def _scaled(self, m: int, n: int, k: int, wide: bool) -> Call:
        """A product of float8 operands; ``wide``: as in :meth:`matmul`."""
        assert self.scaling is not None
        a, b = self.matrix("a", m, k), self.matrix("b", n, k).t()
        name, dtype = ("sums", torch.float32) if wide else ("out", getattr(torch, self.scaling.out))
        scales = factors(self.scaling.rules, self.device, m, n, k)
        how = {"accumulate": wide}
        into = self.matrix(name, m, n, dtype)
        return partial(multiply_scaled, a, b, into, scales, self.scaling.recipe, **how)
