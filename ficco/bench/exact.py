"""Calls in shuffled order on integers that have one right result: compared exactly, and timed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ficco.accelerator import gpu
from ficco.bench.inputs import Operands

Call = Callable[[], torch.Tensor]

#: Makes a call; its result, and a figure of it such as its seconds.
Measure = Callable[[Call], tuple[torch.Tensor, float]]


class ExactCall(NamedTuple):
    """One call.

    Attributes:
        name: of what was called.
        wrong: how many elements of the result are wrong, on its device, which is not waited for:
            what ``compare`` gave.
        figure: what ``measure`` gave.
    """

    name: str
    wrong: torch.Tensor
    figure: float


def enqueue(call: Call) -> tuple[torch.Tensor, float]:
    """Make a call and wait for nothing."""
    return call(), 0.0


def seconds(group: ProcessGroup, device: torch.device) -> Measure:
    """Times calls by the host's clock, each begun by all ranks together and waited for."""

    def wait() -> None:
        if device.type == "cuda":
            gpu.synchronize()

    def measure(call: Call) -> tuple[torch.Tensor, float]:
        wait()
        dist.barrier(group)
        start = time.perf_counter()
        result = call()
        wait()
        return result, time.perf_counter() - start

    return measure


def wrong_elements(result: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """How many elements differ from what is wanted, on the device; all, where the shapes do."""
    if result.shape != wanted.shape:
        return torch.tensor(max(result.numel(), wanted.numel(), 1), device=wanted.device)
    return (result != wanted).sum()


def exact_calls(
    calls: Mapping[str, Call],
    operands: Operands,
    count: int,
    *,
    first: int = 0,
    compare: Callable[[torch.Tensor], torch.Tensor] | None = None,
    measure: Measure = enqueue,
    seed: int = 0,
) -> Iterator[ExactCall]:
    """Make all calls ``count`` times, in an order that is shuffled anew each time: the first has
    it easiest. Every call has integers of its own, so that stale data shows.

    All ranks must pass the same names, ``count``, ``first`` and ``seed``: inputs and order follow
    from them. Nothing but ``measure`` waits: the left operand is overwritten as soon as a call is
    enqueued, so that data that is read too late shows, too.

    Args:
        calls: by name, calls that read ``operands``, whose B must be exact already.
        first: number of the first inputs; each call takes the next, ``count * len(calls)`` in all.
        compare: gives the number of wrong elements of a result; by default those that differ from
            ``operands.reference()``.
    """
    order = random.Random(seed)
    iteration = first
    for _ in range(count):
        for name in order.sample(list(calls), len(calls)):
            operands.exact(iteration)
            iteration += 1
            result, figure = measure(calls[name])
            wrong = compare(result) if compare else wrong_elements(result, operands.reference())
            yield ExactCall(name, wrong, figure)
