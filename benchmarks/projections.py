"""Times of attention by heads with its projections: NCCL's all-to-alls between PyTorch's products,
``ulysses_attention`` between the same products, and ``ulysses_project`` with ``ulysses_output``.
Ranks share the sequence and have one GPU each:
``torchrun --nproc-per-node 4 -m benchmarks.projections``."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

import ficco
from benchmarks.gpu_rounds import Staged, rounds

FEATURES, HEADS, KV_HEADS, SIZE = 4096, 32, 8, 128
SEQUENCES = (4 << 10, 16 << 10, 64 << 10)

Layer = Callable[[torch.Tensor], torch.Tensor]


def by_heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(2, (-1, SIZE)).transpose(1, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def exchanged(x: torch.Tensor, world: int, back: bool = False) -> torch.Tensor:
    """Exchange [1, S/W, heads, size] for [1, S, heads/W, size], or the reverse, by NCCL."""
    _, rows, heads, size = x.shape
    if back:
        sent = x.view(world, rows // world, heads, size)
    else:
        sent = x.view(rows, world, heads // world, size).transpose(0, 1)
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    if back:
        return received.transpose(0, 1).reshape(1, rows // world, heads * world, size)
    return received.view(1, rows * world, heads // world, size)


def layers(weights: list[torch.Tensor], world: int) -> dict[str, Layer]:
    fused, (q, k, v, o) = torch.cat(weights[:3]), weights
    cuts = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]

    def collectives(x: torch.Tensor) -> torch.Tensor:
        qkv = functional.linear(x, fused).split(cuts, 2)
        heads = [exchanged(part.unflatten(2, (-1, SIZE)), world) for part in qkv]
        out = attend(*(part.transpose(1, 2) for part in heads))
        out = exchanged(out.transpose(1, 2).contiguous(), world, back=True)
        return functional.linear(out.flatten(2), o)

    def attention(x: torch.Tensor) -> torch.Tensor:
        qkv = [by_heads(part) for part in functional.linear(x, fused).split(cuts, 2)]
        out = ficco.ulysses_attention(*qkv, causal=True)
        return functional.linear(out.transpose(1, 2).flatten(2), o)

    def fused_calls(x: torch.Tensor) -> torch.Tensor:
        return ficco.ulysses_output(attend(*ficco.ulysses_project(x, q, k, v, size=SIZE)), o)

    return {"collectives": collectives, "ulysses_attention": attention, "projections": fused_calls}


def milliseconds(calls: dict[str, Callable[[], Any]], count: int = 10) -> dict[str, float]:
    """Milliseconds per call of ``count`` in a row: median of 7 rounds on the slowest rank."""

    def in_a_row(call: Callable[[], Any]) -> None:
        for _ in range(count):
            call()

    rows = {name: Staged(partial(in_a_row, call), dist.barrier) for name, call in calls.items()}
    times = rounds(rows, count=8, warm_up=1)
    medians = torch.tensor([median(us) / 1e3 / count for us in times.values()], device="cuda")
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(calls, medians.tolist(), strict=True))


def by_schedule(x: torch.Tensor, weights: list[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """``ulysses_attention`` without projections, by schedule."""
    q, k, v = (by_heads(functional.linear(x, w)).contiguous() for w in weights[:3])
    pieces = [f"uniform-fused-1d:pieces={n}{lanes}" for n in (2, 4) for lanes in ("", ",compute=2")]
    return {
        f"{x.shape[1]} positions of a rank, {schedule}": partial(
            ficco.ulysses_attention, q, k, v, causal=True, schedule=schedule
        )
        for schedule in ("serial", *pieces)
    }


def parts(x: torch.Tensor, weights: list[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Calls of the projections and of attention, each by itself."""
    q, k, v = ficco.ulysses_project(x, *weights[:3], size=SIZE)
    out, flat = attend(q, k, v), x.new_empty(1, x.shape[1], HEADS * SIZE).normal_()
    return {
        "ulysses_project": lambda: ficco.ulysses_project(x, *weights[:3], size=SIZE)[0],
        "its products alone": lambda: functional.linear(x, torch.cat(weights[:3])),
        "attention alone": lambda: attend(q, k, v),
        "ulysses_output": lambda: ficco.ulysses_output(out, weights[3]),
        "its product alone": lambda: functional.linear(flat, weights[3]),
    }


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    heads = HEADS, KV_HEADS, KV_HEADS
    weights = [torch.randn(n * SIZE, FEATURES, **kind) / FEATURES**0.5 for n in heads]
    weights.append(torch.randn(FEATURES, HEADS * SIZE, **kind) / FEATURES**0.5)

    def show(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    show(f"{torch.cuda.get_device_name()}, {torch.__version__}, {world} ranks, ms")
    show("positions, collectives, ulysses_attention, projections, largest error")
    for length in SEQUENCES:
        torch.manual_seed(1 + rank)
        x = torch.randn(1, length // world, FEATURES, **kind)
        calls = {name: partial(layer, x) for name, layer in layers(weights, world).items()}
        first, *others = (call().float() for call in calls.values())
        error = max(float((other - first).abs().max()) for other in others)
        times = [f"{ms:.3f}" for ms in milliseconds(calls).values()]
        show(", ".join([str(length), *times, f"{error:.4f}"]))
        extra = by_schedule(x, weights) if length == SEQUENCES[1] else {}
        extra |= parts(x, weights) if length == SEQUENCES[-1] else {}
        for name, ms in milliseconds(extra).items() if extra else ():
            show(f"{name}: {ms:.3f} ms")
    ficco.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
