"""Times packed documents on one GPU: by one call of flash attention for all, and by one of cuDNN or
flash attention for each, in graphs: ``python tests/packed_bench.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from ficco.compute import attention as libraries
from ficco.compute.attention import Heads, Result
from ficco.problems.mask import Rectangle

HEADS, KV_HEADS, SIZE, LENGTH = 32, 8, 128, 16 << 10
BOTH = True, False


def seconds(call: Callable[[], Any]) -> float:
    """Of a replay, the median of 20."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    taken = []
    for _ in range(23):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return median(taken[3:])


def main() -> None:
    def normal(heads: int) -> torch.Tensor:
        made = torch.randn(LENGTH, heads, SIZE, dtype=torch.bfloat16, device="cuda")
        return made.transpose(0, 1)[None]

    heads = Heads(normal(HEADS), normal(KV_HEADS), normal(KV_HEADS))
    grad, scale = normal(HEADS), SIZE**-0.5
    print("rows of a document, ms: together, each; of gradients: together, each")
    for rows in (128, 256, 512, 1024, 2048, 4096):
        each = [Rectangle(at, at + rows, at, at + rows, None, 0) for at in range(0, LENGTH, rows)]
        calls = libraries.LibraryCalls(each)
        times = [timed(partial(attend, calls, heads, scale), some) for some in BOTH]
        libraries.TOGETHER_ROWS = LENGTH
        (part,) = calls.attended(heads, scale)
        of = Result(part.mean, part.lse, grad)
        times += [timed(partial(back, calls, heads, of, scale), some) for some in BOTH]
        print(rows, *(f"{one * 1e3:.3f}" for one in times), sep=", ", flush=True)


def attend(calls: libraries.LibraryCalls, *given: Any) -> Any:
    return list(calls.attended(*given))


def back(calls: libraries.LibraryCalls, *given: Any) -> Any:
    return list(calls.differentiated(*given))


def timed(call: Callable[[], Any], together: bool) -> float:
    libraries.TOGETHER_ROWS = LENGTH if together else 0
    return seconds(call)


if __name__ == "__main__":
    main()
