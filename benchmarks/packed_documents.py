"""Times of attention to packed documents on one GPU, in graphs: one call of flash attention for all
or one call of cuDNN or flash attention for each. Run ``python -m benchmarks.packed_documents``."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_rounds import replayed, rounds
from ficco.compute import attention as libraries
from ficco.compute.attention import Heads, Result
from ficco.problems.mask import Rectangle

HEADS, KV_HEADS, SIZE, LENGTH = 32, 8, 128, 16 << 10


def captured(together: bool, attend: Callable[..., Any], *operands: Any) -> Callable[[], object]:
    libraries.TOGETHER_ROWS = LENGTH if together else 0
    return replayed(lambda: list(attend(*operands)))


def main() -> None:
    def normal(heads: int) -> torch.Tensor:
        rows = torch.randn(LENGTH, heads, SIZE, dtype=torch.bfloat16, device="cuda")
        return rows.transpose(0, 1)[None]

    heads = Heads(normal(HEADS), normal(KV_HEADS), normal(KV_HEADS))
    grad, scale = normal(HEADS), SIZE**-0.5
    print("rows of a document, ms: together, each; of gradients: together, each")
    for rows in (128, 256, 512, 1024, 2048, 4096):
        squares = [Rectangle(i, i + rows, i, i + rows, None, 0) for i in range(0, LENGTH, rows)]
        calls = libraries.LibraryCalls(squares)
        libraries.TOGETHER_ROWS = LENGTH
        (part,) = calls.attended(heads, scale)
        result = Result(part.mean, part.lse, grad)
        replays = {
            (name, together): captured(together, *call)
            for name, call in (
                ("results", (calls.attended, heads, scale)),
                ("gradients", (calls.differentiated, heads, result, scale)),
            )
            for together in (True, False)
        }
        times = [f"{median(us) / 1e3:.3f}" for us in rounds(replays, count=23, warm_up=3).values()]
        print(rows, *times, sep=", ", flush=True)


if __name__ == "__main__":
    main()
