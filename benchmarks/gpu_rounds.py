"""Timing loop of the benchmarks on GPUs: rounds in shuffled order, with the host ahead."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

#: Cycles of torch.cuda._sleep before each call, about 0.1 ms.
AHEAD = 200_000
ROUNDS, WARM_UP = 12, 2


class Staged(NamedTuple):
    """A call with preparations: ``prepare`` runs before the GPU sleeps and the host gets ahead,
    ``start`` immediately before the clock starts."""

    call: Callable[[], object]
    prepare: Callable[[], object]
    start: Callable[[], object] = lambda: None

    def __call__(self) -> object:
        return self.call()


def rounds(
    calls: Mapping[Any, Callable[[], object]],
    ahead: int = AHEAD,
    count: int = ROUNDS,
    warm_up: int = WARM_UP,
) -> dict[Any, list[float]]:
    """Microseconds of each call in each round after the warm-up. All ranks use the same order."""
    rng, names = random.Random(5), list(calls)
    times: dict[Any, list[float]] = {name: [] for name in names}
    for number in range(count):
        rng.shuffle(names)
        events = []
        for name in names:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call = calls[name]
            if isinstance(call, Staged):
                call.prepare()
            torch.cuda._sleep(ahead)
            if isinstance(call, Staged):
                call.start()
            begin.record()
            call()
            end.record()
            events.append((name, begin, end))
        torch.cuda.synchronize()
        for name, begin, end in events:
            if number >= warm_up:
                times[name].append(begin.elapsed_time(end) * 1e3)
    return times


def replayed(call: Callable[[], object]) -> Callable[[], object]:
    """Capture a call in a graph and return the replay of the graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
