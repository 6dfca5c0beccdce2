"""Times projections and attention of a sequence that ranks share by heads, a GPU each: by NCCL's
all-to-alls around PyTorch's products, by ``ulysses_attention`` between them, and by
``ulysses_project`` and ``ulysses_output``:
``torchrun --nproc-per-node 4 tests/projections_bench.py``."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch.nn import functional

import ficco

FEATURES, HEADS, KV_HEADS, SIZE = 4096, 32, 8, 128
SEQUENCES = (4 << 10, 16 << 10, 64 << 10)

Layer = Callable[[torch.Tensor], torch.Tensor]


def by_heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(2, (-1, SIZE)).transpose(1, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def exchanged(x: torch.Tensor, world: int, back: bool = False) -> torch.Tensor:
    """[1, S/W, heads, size] as [1, S, heads/W, size], or the reverse, by NCCL."""
    _, rows, heads, size = x.shape
    if back:
        sent = x.view(world, rows // world, heads, size)
    else:
        sent = x.view(rows, world, heads // world, size).transpose(0, 1)
    sent = sent.contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    if back:
        return got.transpose(0, 1).reshape(1, rows // world, heads * world, size)
    return got.view(1, rows * world, heads // world, size)


def layers(weights: list[torch.Tensor], world: int) -> dict[str, Layer]:
    fused, (q, k, v, o) = torch.cat(weights[:3]), weights
    cuts = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]

    def collectives(x: torch.Tensor) -> torch.Tensor:
        made = functional.linear(x, fused).split(cuts, 2)
        heads = [exchanged(one.unflatten(2, (-1, SIZE)), world) for one in made]
        out = attend(*(one.transpose(1, 2) for one in heads))
        out = exchanged(out.transpose(1, 2).contiguous(), world, back=True)
        return functional.linear(out.flatten(2), o)

    def between(x: torch.Tensor) -> torch.Tensor:
        made = [by_heads(one) for one in functional.linear(x, fused).split(cuts, 2)]
        out = ficco.ulysses_attention(*made, causal=True)
        return functional.linear(out.transpose(1, 2).flatten(2), o)

    def beside(x: torch.Tensor) -> torch.Tensor:
        return ficco.ulysses_output(attend(*ficco.ulysses_project(x, q, k, v, size=SIZE)), o)

    return {"collectives": collectives, "ulysses_attention": between, "projections": beside}


def seconds(call: Callable[[], torch.Tensor], calls: int = 10) -> float:
    """Of a call of many in a row, the median of 7, the slowest rank's."""
    for _ in range(5):
        call()
    taken = []
    for _ in range(7):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3 / calls)
    slowest = torch.tensor(median(taken), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def groups(x: torch.Tensor, weights: list[torch.Tensor], rank: int) -> None:
    """``ulysses_attention`` alone, by schedules."""
    q, k, v = (by_heads(functional.linear(x, one)).contiguous() for one in weights[:3])
    name = "uniform-fused-1d:pieces="
    for schedule in ("serial", *(f"{name}{n}{two}" for n in (2, 4) for two in ("", ",compute=2"))):
        call = partial(ficco.ulysses_attention, q, k, v, causal=True, schedule=schedule)
        taken = seconds(call)
        if rank == 0:
            print(f"{x.shape[1]} positions of a rank, {schedule}: {taken * 1e3:.3f} ms")


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    heads = HEADS, KV_HEADS, KV_HEADS
    weights = [torch.randn(some * SIZE, FEATURES, **kind) / FEATURES**0.5 for some in heads]
    weights.append(torch.randn(FEATURES, HEADS * SIZE, **kind) / FEATURES**0.5)
    if rank == 0:
        print(torch.cuda.get_device_name(), torch.__version__, f"{world} ranks, ms")
        print("positions, collectives, ulysses_attention, projections, largest error")
    for length in SEQUENCES:
        torch.manual_seed(1 + rank)
        x = torch.randn(1, length // world, FEATURES, **kind)
        found = layers(weights, world)
        results = [layer(x).float() for layer in found.values()]
        error = max(float((one - results[0]).abs().max()) for one in results)
        times = [seconds(partial(one, x)) for one in found.values()]
        if rank == 0:
            print(length, *(f"{one * 1e3:.3f}" for one in times), f"{error:.4f}", sep=", ")
        if length == SEQUENCES[1]:
            groups(x, weights, rank)
    # The parts of the last length.
    q, k, v = ficco.ulysses_project(x, *weights[:3], size=SIZE)
    out = attend(q, k, v)
    flat = torch.randn(1, x.shape[1], HEADS * SIZE, **kind)
    for name, call in (
        ("ulysses_project", lambda: ficco.ulysses_project(x, *weights[:3], size=SIZE)[0]),
        ("its products alone", lambda: functional.linear(x, torch.cat(weights[:3]))),
        ("attention alone", lambda: attend(q, k, v)),
        ("ulysses_output", lambda: ficco.ulysses_output(out, weights[3])),
        ("its product alone", lambda: functional.linear(flat, weights[3])),
    ):
        taken = seconds(call)
        if rank == 0:
            print(f"{name}: {taken * 1e3:.3f} ms")
    ficco.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
