"""Kernels that wait, push and notify with ``ficco.tile``. The module needs Triton; set
``TRITON_INTERPRET`` before importing it to run the kernels in the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import ficco
from ficco import tile


@triton.jit
def send(boxes, words, to, values, size: tl.constexpr):
    """Push values to a rank's box, then notify the rank."""
    at = tl.arange(0, size)
    tile.push(boxes, to, at, tl.load(values + at), at < size)
    tile.notify(tile.peer(words, to, tl.int32), 1)


@triton.jit
def receive(words, box, out, size: tl.constexpr):
    """Wait for values that a peer pushes, and copy them."""
    tile.wait(words, 1)
    tl.store(out + tl.arange(0, size), tl.load(box + tl.arange(0, size)))


@triton.jit
def gather(words, rows, out, count, width: tl.constexpr):
    """Copy rows, ``count`` for each word, once the word is set."""
    piece = tl.program_id(0)
    tile.wait(words, piece)
    row = piece * count
    while row < (piece + 1) * count:
        at = row * width + tl.arange(0, width)
        tl.store(out + at, tl.load(rows + at))
        row += 1


def ring(rank: int, world: int, device: torch.device, turns: int = 3) -> None:
    """Each rank pushes to the next rank and waits for the previous rank, within kernels."""
    size = 64
    box = ficco.empty((2, size), dtype=torch.float32, device=device)[1]
    words = ficco.empty((2,), dtype=torch.int32, device=device)
    boxes, words_at = ficco.addresses(box), ficco.addresses(words)
    out = torch.empty(size, device=device)
    for turn in range(turns):
        words.zero_()
        if device.type == "cuda":
            torch.cuda.synchronize()
        torch.distributed.barrier()
        values = torch.arange(size, device=device) + 1000.0 * rank + turn
        send[(1,)](boxes, words_at, (rank + 1) % world, values, size)
        receive[(1,)](words, box, out, size)
        if device.type == "cuda":
            torch.cuda.synchronize()
        want = torch.arange(size, device=device) + 1000.0 * ((rank - 1) % world) + turn
        assert torch.equal(out, want), (rank, turn, out, want)
        torch.distributed.barrier()
