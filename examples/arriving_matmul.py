"""A matrix product in Triton whose tiles wait for the rows that they read, while these arrive.

    python examples/arriving_matmul.py                      # a rank per GPU, or 4 CPU ranks
    torchrun --nproc-per-node 4 examples/arriving_matmul.py

`ficco.arriving` gathers the rows of all ranks. The kernel is an ordinary one but for one line,
`tile.wait`. Own rows wait for nothing and come first, then pieces in the order of arrival. The
result is compared with torch's in every element. CPU ranks run the kernel in Triton's interpreter.
PyTorch for CPUs comes without Triton: `pip install triton`.
"""

from __future__ import annotations

import argparse
import os
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

import ficco
from ficco.tools.launch import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # read when a kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from ficco import tile  # noqa: E402

#: Rows, columns and depth of a tile.
BLOCK = (128, 128, 64) if DEVICE == "cuda" else (16, 16, 32)


@triton.jit
def matmul(
    a, b, c, words, tiles, count, n, k: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``c = a @ b``, all row-major; ``tiles`` has first and last row, column and word of each."""
    t = tl.program_id(0)
    while t < count:
        i = tl.load(tiles + 4 * t).to(tl.int64) + tl.arange(0, BM)[:, None]
        last, word = tl.load(tiles + 4 * t + 1), tl.load(tiles + 4 * t + 3)
        j, depth = tl.load(tiles + 4 * t + 2) + tl.arange(0, BN)[None, :], tl.arange(0, BK)
        if word >= 0:
            tile.wait(words, word)
        total = tl.full((BM, BN), 0.0, tl.float32)
        for start in range(0, k, BK):
            x, y = start + depth[None, :], start + depth[:, None]
            left = tl.load(a + i * k + x, (i < last) & (x < k), 0.0)
            right = tl.load(b + y.to(tl.int64) * n + j, (y < k) & (j < n), 0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        tl.store(c + i * n + j, total.to(c.dtype.element_ty), (i < last) & (j < n))
        t += tl.num_programs(0)


@lru_cache
def table(rows: tuple[tuple[int, int, int], ...], n: int, device: torch.device) -> torch.Tensor:
    """The tiles of some rows, each with its word: int32 [tiles, 4]."""
    tiles = [
        (row, last, col, word)
        for first, last, word in rows
        for row in range(first, last, BLOCK[0])
        for col in range(0, n, BLOCK[1])
    ]
    return torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 4)


def programs(device: torch.device, spare: int = 0) -> int:
    """Programs that are resident at a time; ``spare`` multiprocessors are left to others."""
    if device.type == "cpu":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count - spare


def gathered_matmul(
    a_shard: torch.Tensor, b: torch.Tensor, spare: int = 0, **ways: Any
) -> torch.Tensor:
    """The product of the rows of all ranks [m, k] and b [k, n], both row-major.

    ``ways``: of :func:`ficco.arriving`. To capture it in a graph, call it once before.
    """
    k, n = b.shape
    with ficco.arriving(a_shard, **ways) as rows:
        waits = [(*rows.own, -1), *((p.first, p.last, i) for i, p in enumerate(rows.pieces))]
        tiles = table(tuple(waits), n, b.device)
        c = b.new_empty(len(rows.buffer), n)
        if len(tiles):
            grid = (min(programs(b.device, spare), len(tiles)),)
            operands = rows.buffer, b, c, rows.words, tiles, len(tiles), n, k
            matmul[grid](*operands, *BLOCK, num_warps=8, num_stages=3)
    return c


def integers(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """Integers from -2 to 2, whose products are exact in every order."""
    numbers = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def run(rows: int, n: int, k: int, spare: int = 0) -> float:
    """The share of right elements of a few products."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(DEVICE, torch.cuda.current_device() if DEVICE == "cuda" else None)
    right = []
    for iteration in range(3):
        shards = [integers((rows, k), 100 * iteration + peer, device) for peer in range(world)]
        b = integers((k, n), 100 * iteration + 99 - rank, device)
        c = gathered_matmul(shards[rank], b, spare)
        want = (torch.cat(shards).double() @ b.double()).to(c.dtype)
        right.append((c == want).double().mean())
    share = torch.stack(right).min()
    dist.all_reduce(share, dist.ReduceOp.MIN)
    return float(share)


def main() -> None:
    """Read the command line and start the ranks, unless torchrun has started them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="default: 4 on CPUs, one per GPU")
    sizes = (2048, 3584, 4096) if DEVICE == "cuda" else (40, 24, 48)
    for name, size in zip(("rows", "n", "k"), sizes, strict=True):
        parser.add_argument(f"--{name}", type=int, default=size, help="rows: of a rank")
    args = parser.parse_args()
    share = launch(run, args.ranks, args.rows, args.n, args.k, device=DEVICE)
    print(f"{share:.0%} of the elements are right on every rank")


if __name__ == "__main__":
    main()
