"""The experts' grouped product behind an all-gather, as one kernel that waits for tokens.

    python examples/arriving_experts.py                      # a rank per GPU, or 4 CPU ranks
    torchrun --nproc-per-node 4 examples/arriving_experts.py

Every rank has a part of the columns of all experts and multiplies the tokens of all ranks, each by
the experts that it was routed to (AG + MoE, TileLink, section 5). The rows of an expert are
sorted by the arrival of their tokens, so that its tiles can begin one by one while the rest
arrives; nothing is permuted in memory. The result is compared with torch's in every element. CPU
ranks run the kernel in Triton's interpreter. PyTorch for CPUs lacks Triton: `pip install triton`.
"""

from __future__ import annotations

import argparse
import os
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ficco
from ficco.tools.launch import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # read when a kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from ficco import tile  # noqa: E402

#: Rates of a GPU like an H100, by which tiles are ordered; the order is right on any GPU. Bytes per
#: second of a link and of the memory, floating-point operations per second, seconds of latency.
LINK, MEMORY, FLOPS, LATENCY_S = 383e9, 3e12, 600e12, 12e-6


@triton.jit
def grouped(
    a, b, c, words, slots, tiles, count, n, columns, k: tl.constexpr, choices: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """``c[s] = a[s // choices] @ b[expert of s]`` for the slots ``s`` of each tile; ``tiles`` has
    first and last place in ``slots``, expert and word of each, ``b`` describes [experts * k, n]."""
    t, seen, end = tl.program_id(0), 0, tl.load(count) * columns
    while t < end:
        at, j = tiles + t // columns * 4, t % columns * BN
        i, last = tl.load(at) + tl.arange(0, BM), tl.load(at + 1)
        depth, first = tl.arange(0, BK), tl.load(at + 2) * k
        slot = tl.load(slots + i, i < last, 0).to(tl.int64)
        word = tl.load(at + 3)
        while seen <= word:  # each program looks at each word once
            tile.wait(words, seen)
            seen += 1
        total = tl.full((BM, BN), 0.0, tl.float32)
        for start in range(0, k, BK):
            x = start + depth[None, :]
            left = tl.load(a + (slot // choices)[:, None] * k + x, x < k, 0.0)
            total = tl.dot(left, b.load([first + start, j]), total, input_precision="ieee")
        cols = j + tl.arange(0, BN)[None, :]
        mask = (i < last)[:, None] & (cols < n)
        tl.store(c + slot[:, None] * n + cols, total.to(c.dtype.element_ty), mask)
        t += tl.num_programs(0)


class Block(NamedTuple):
    """Rows, columns and depth of a tile, and how it is launched."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def block_for(rows: float, device: torch.device) -> Block:
    """The tiles for a mean number of rows of each expert."""
    if device.type == "cpu":
        return Block(16, 16, 16, 4, 1)
    return Block(128, 256, 64, 8, 3) if rows > 192 else Block(64, 256, 64, 4, 3)


class Order(NamedTuple):
    """The products of a rank, in order.

    Attributes:
        slots: int32 [m * choices], sorted by expert, then by the arrival of their tokens.
        tiles: int32 [tiles, 4]: first and last place in ``slots``, expert, and the word until which
            all must be there, -1 for none.
        count: int32 [1], how many tiles have rows.
    """

    slots: torch.Tensor
    tiles: torch.Tensor
    count: torch.Tensor


@lru_cache
def turns(pieces: tuple[Any, ...], m: int, device: torch.device) -> torch.Tensor:
    """By token, the word of its piece; -1 for own tokens."""
    turn = torch.full((m,), -1)
    for word, (first, last, *_) in enumerate(pieces):
        turn[first:last] = word
    return turn.to(device)


def order_of(
    choice: torch.Tensor, turn: torch.Tensor, experts: int, n: int, k: int, block: Block
) -> Order:
    """The order for tokens that were routed to the experts ``choice`` [m, choices].

    Experts follow each other, so that weights are read once. First come as many of the tiles that
    can begin earliest as are done by the time that all tokens should be there; they read their
    weights again. Nothing waits for the device.
    """
    (m, choices), rows = choice.shape, block.rows
    device, most = choice.device, m * choices // rows + experts
    expert = choice.flatten().long()
    token_turn = turn.repeat_interleave(choices)
    slots = (expert * (m + 1) + token_turn + 1).argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.long, device=device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    ends, tile_counts = counts.cumsum(0), (counts + rows - 1) // rows
    tile_ends = tile_counts.cumsum(0)
    t = torch.arange(most, device=device)
    of = torch.searchsorted(tile_ends, t, right=True).clamp_(max=experts - 1)
    first = (ends - counts)[of] + (t - (tile_ends - tile_counts)[of]) * rows
    last = torch.minimum(first + rows, ends[of])
    word = token_turn[slots][(last - 1).clamp_(0)]
    none = t >= tile_ends[-1]
    seconds = max(2 * rows * n * k / FLOPS, 2 * n * k / MEMORY)  # of a row of tiles
    early = round((LATENCY_S + 2 * k * int(len(turn)) / LINK) / seconds)
    rank = torch.where(none, m, word).argsort(stable=True).argsort()  # by arrival
    key = torch.where(rank < early, rank, most + of).masked_fill_(none, most + experts)
    tiles = torch.stack([first, last, of, word], 1)[key.argsort(stable=True)].int()
    return Order(slots.int(), tiles.contiguous(), tile_ends[-1:].int())


def product(
    buffer: torch.Tensor,
    words: torch.Tensor,
    weights: torch.Tensor,
    order: Order,
    block: Block,
    spare: int = 0,
) -> torch.Tensor:
    """The kernel: products [m, choices, n] of the rows of a buffer [m, k], as ``words`` say that
    they are there. ``spare`` multiprocessors are left to others."""
    (experts, k, n), m = weights.shape, len(buffer)
    choices, columns = len(order.slots) // max(m, 1), triton.cdiv(n, block.columns)
    b = TensorDescriptor.from_tensor(weights.view(experts * k, n), [block.depth, block.columns])
    c, programs = buffer.new_empty(m, choices, n), 2
    if buffer.is_cuda:
        programs = torch.cuda.get_device_properties(buffer.device).multi_processor_count - spare
    grouped[(min(programs, len(order.tiles) * columns),)](
        buffer, b, c, words, *order, n, columns, k, choices, *block[:3],
        num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip
    return c


def experts_product(
    tokens: torch.Tensor,
    weights: torch.Tensor,
    choice: torch.Tensor,
    spare: int = 0,
    **ways: Any,
) -> torch.Tensor:
    """The products of the tokens of all ranks with the experts that each was routed to.

    Args:
        tokens: [m/W, k], this rank's.
        weights: [experts, k, n], this rank's columns of all experts; n and k fill whole 16 bytes
            and whole tiles.
        choice: int [m, choices], the experts of the tokens of all ranks.
        spare: multiprocessors that are left to others.
        ways: of :func:`ficco.arriving`.

    Returns:
        [m, choices, n].
    """
    (experts, k, n), (m, choices) = weights.shape, choice.shape
    block = block_for(m * choices / experts, tokens.device)
    if k % block.depth:
        raise ValueError(f"weights: required k to be a multiple of {block.depth}, got {k}")
    with ficco.arriving(tokens, **ways) as rows:
        order = order_of(choice, turns(rows.pieces, m, tokens.device), experts, n, k, block)
        return product(rows.buffer, rows.words, weights, order, block, spare)


def plainly(tokens: torch.Tensor, weights: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """The same from all tokens [m, k], by torch, expert by expert."""
    c = tokens.new_zeros(*choice.shape, weights.shape[2])
    for expert, weight in enumerate(weights):
        chosen = choice == expert
        c[chosen] = (tokens[chosen.any(1)].double() @ weight.double()).to(c.dtype)
    return c


def integers(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """Integers from -2 to 2, whose products are exact in every order."""
    numbers = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def routed(m: int, experts: int, seed: int, device: torch.device) -> torch.Tensor:
    """Two experts for each token, int32 [m, 2]."""
    scores = torch.rand(m, experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(2).indices.to(device, torch.int32)


def run(rows: int, experts: int, n: int, k: int, spare: int = 0) -> float:
    """The share of right elements of a few products; ``rows`` are those of a rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(DEVICE, torch.cuda.current_device() if DEVICE == "cuda" else None)
    right = []
    for iteration in range(3):
        shards = [integers((rows, k), 100 * iteration + peer, device) for peer in range(world)]
        weights = integers((experts, k, n), 100 * iteration + 99 - rank, device)
        choice = routed(rows * world, experts, iteration, device)
        c = experts_product(shards[rank], weights, choice, spare)
        want = plainly(torch.cat(shards), weights, choice)
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
    sizes = (1024, 8, 3584, 4096) if DEVICE == "cuda" else (24, 4, 24, 32)
    for name, size in zip(("rows", "experts", "n", "k"), sizes, strict=True):
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    share = launch(run, args.ranks, args.rows, args.experts, args.n, args.k, device=DEVICE)
    print(f"{share:.0%} of the elements are right on every rank")


if __name__ == "__main__":
    main()
