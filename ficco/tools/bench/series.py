"""Several calls timed against each other on all ranks, exclusively or during other calls.

All times are those of the slowest rank, one per round; rounds are interleaved and shuffled as in
:mod:`ficco.tools.bench.measure`, so that ratios are taken round by round.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import ficco
from ficco.accelerator import gpu
from ficco.compute.products import multiply
from ficco.compute.scaled import multiply_scaled
from ficco.dma.host import Hosts, hosts_of
from ficco.problems.products import Problem
from ficco.problems.scaling import Scaling
from ficco.problems.specification import AnyProblem
from ficco.tools.bench.calls import Runner, all_gather
from ficco.tools.bench.inputs import Operands, draw_normal, factors
from ficco.tools.bench.measure import MEET_S, Barrier, DeviceClock, HostClock, Item, rounds

Call = Callable[[], Any]

#: Seconds of the slowest rank, one per round.
Times = np.ndarray

#: The calls in the background run for so many times as long as the call that is timed: neither
#: slows the other down by more.
COVER = 2.0

#: Most calls in the background: a device's queue holds about a thousand operations, and a call of
#: ficco's is up to fifty of them.
MOST_IN_BACKGROUND = 24

#: Seconds after which Python's threads take turns while several run: by default they
#: may keep each other waiting for longer than what is timed takes.
SWITCH_S = 50e-6

#: Seconds that a rank waits for its peers before it takes them to have failed.
PEERS_S = 45.0


def slowest(by_rank: Sequence[Sequence[float]]) -> Times:
    """The slowest rank's time of every round, from the times of every rank."""
    return np.max(by_rank, axis=0)


class Stopwatch:
    """The ranks of a group, which time together.

    ``timeout_s``: seconds that a rank waits for its peers, ``PEERS_S`` if it is None.

    Attributes:
        mode: the mode that shows what a device takes: queued on GPUs, idle on CPUs.
        hosts: where the ranks are; found out unless told, which one Stopwatch may be.
        meets: whether the peers are there.
        note: what has to be said of its times.
    """

    meets = True
    note = ""

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        timeout_s: float | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        patience = PEERS_S if timeout_s is None else timeout_s
        self.group, self.device = group, device
        self.hosts = hosts or hosts_of(group, min(patience, MEET_S), "measurement")
        self.rank, self.world = group.rank(), group.size()
        self.on_gpu = device.type == "cuda"
        self.mode = "queued" if self.on_gpu else "idle"
        self.barrier = Barrier(group, patience, self.hosts)
        self.clock = (DeviceClock if self.on_gpu else HostClock)(group, self.barrier)

    def time(
        self,
        calls: Mapping[str, Call | Runner],
        *,
        seconds: float,
        most: int = 25,
        least: int = 3,
        mode: str = "",
        tick: Callable[[str], None] = lambda what: None,
    ) -> dict[str, Times]:
        """Time all calls for about so many seconds; by name, the same on every rank."""
        items = [
            Item(mode or self.mode, name, call if isinstance(call, Runner) else Runner(call))
            for name, call in calls.items()
        ]
        _, found = self.rounds(items, seconds=seconds, most=most, least=least, tick=tick)
        return {item.name: times for item, (times, _) in zip(items, found, strict=True)}

    def rounds(
        self, items: list[Item], *, seconds: float, **how: Any
    ) -> tuple[int, list[tuple[Times, float]]]:
        """Time items in rounds; how many rounds, and of each item the times and the seconds of the
        host, both of the slowest rank. ``how``: as :func:`ficco.tools.bench.measure.rounds`."""
        done = rounds(items, self.clock, self.barrier, seconds=seconds, **how)
        everyone = self.gather([(item.times_s, item.host_s) for item in items])
        by_item = [zip(*of_ranks, strict=True) for of_ranks in zip(*everyone, strict=True)]
        return done, [(slowest(times), max(hosts)) for times, hosts in by_item]

    def gather(self, value: Any) -> list[Any]:
        """A value of every rank, on every rank."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(
        self,
        action: Call,
        *,
        fatal: tuple[type[Exception], ...] = (),
        named: bool = False,
    ) -> tuple[Any, str]:
        """The result of an action that all ranks carry out, or None and why one of them could not.

        The reason is the same on every rank: class and first line of the error of the lowest rank
        that has one. What the action has enqueued on a GPU is waited for, so that its errors count.

        Args:
            fatal: errors that are raised at once instead, and that the peers do not hear of.
            named: say which rank's error it is, unless all ranks have the same.
        """
        value, why = None, ""
        try:
            value = action()
            if self.on_gpu:
                gpu.synchronize()
        except fatal:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        everyone = self.gather(why)
        if not any(everyone):
            return value, ""
        rank, why = next((rank, text) for rank, text in enumerate(everyone) if text)
        return None, f"rank {rank}: {why}" if named and len(set(everyone)) > 1 else why

    def arrivals(self, problem: AnyProblem) -> str:
        """The name of what stands, instead of calls, for all that a problem moves to this rank;
        empty where it can be moved."""
        return ""

    # What a stopwatch of a rank without peers does otherwise.

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
    """How many calls in the background outlast one that is timed, from their exclusive times."""
    return min(max(math.ceil(COVER * np.median(front) / np.median(back)), 1), MOST_IN_BACKGROUND)


def timed_during(
    time: Callable[..., dict[str, Times]],
    calls: Mapping[str, Call],
    pairs: Iterable[tuple[str, str]],
    device: torch.device,
) -> dict[str, Times]:
    """Times of calls and, under ``"one during other"``, of the first of each pair of them during
    the second. ``time`` times calls in a ``share`` of the seconds there are."""
    exclusive = time(calls, share=0.2, most=7)
    together = {
        f"{front} during {back}": contended(
            calls[front], calls[back], calls_to_cover(exclusive[front], exclusive[back]), device
        )
        for front, back in pairs
    }
    return time({**calls, **together}, share=0.8)


def contended(front: Call, back: Call, count: int, device: torch.device) -> Runner:
    """A call that is timed while so many others run in the background.

    On a GPU they run on a stream of their own, on a CPU on a thread of their own.
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
    """The calls that are measured, on one rank: copies and collectives of so many bytes, and
    products, all on operands that stay the same.

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
            made = torch.empty(rows * cols, dtype=dtype, device=self.device)
            draw_normal(made, generator)
            numbers = self.memory[key] = made
        return numbers[: rows * cols].view(rows, cols)

    def shard(self, nbytes: int) -> torch.Tensor:
        """A shard of about so many bytes, in whole rows of 2 KiB."""
        return self.matrix("shard", max(nbytes // 2048, 1), 2048 // self.dtype.itemsize)

    def gathered(self, nbytes: int) -> torch.Tensor:
        """As many bytes of every rank."""
        rows, cols = self.shard(nbytes).shape
        return self.matrix("gathered", rows * self.world, cols)

    def copies(self, schedule: str, nbytes: int) -> Call:
        """The copies of a schedule with a shard of so many bytes, without products."""
        shard = self.shard(nbytes)
        none = shard.new_empty((shard.shape[1], 0))
        return partial(ficco.all_gather_matmul, shard, none, group=self.group, schedule=schedule)

    def collective(self, nbytes: int) -> Call:
        """The vendor's all-gather of shards of so many bytes."""
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
        """Those of a product, and its result."""
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
