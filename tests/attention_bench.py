"""Times attention whose keys arrive, on one GPU that plays a rank of 4 and of 8, beside gather then
attention: ``python tests/attention_bench.py FOLDER [SECONDS_EACH]``."""

from __future__ import annotations

import csv
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import ficco
from ficco.attention import AttentionProblem, Rectangle, Segment, attention_plans
from ficco.bench.calls import Runner
from ficco.bench.inputs import draw_normal
from ficco.bench.measure import Item
from ficco.bench.replay import last_arrival
from ficco.bench.replay_run import ReplaySettings, ReplayWatch
from ficco.dma.attention import Heads, cudnn, flash
from ficco.schedules import Schedule
from ficco.simulate import simulate
from ficco.workspace import workspace_of

HEADS, KV_HEADS, SIZE = 32, 8, 128
SEQUENCES = (16 << 10, 64 << 10, 128 << 10)
WORLDS = (4, 8)
#: What one port of an NVLink switch carries, and the latency of a copy, as on 4 H200.
GB_S, LATENCY_US = 383.0, 12.0
SCHEDULES = (
    "serial",
    "growing",
    "growing:pull",
    "shard-overlap",
    "hetero-fused-1d:pieces=1",
    "growing:compute=2",
    "growing:tail=4,compute=2",
)
#: Kernels of libraries' attention, by parts of their names.
ATTENTION = ("flash", "fmha", "cudnn", "sdpa", "attention")


def watch_of(world: int, rank: int) -> ReplayWatch:
    settings = ReplaySettings(
        cases=(),
        candidates=(),
        modes=("queued",),
        device="cuda",
        rounds=1,
        seconds=60,
        csv=Path("none.csv"),
        world=world,
        rank=rank,
        machine="h200-4",
        link_gb_s=GB_S,
        latency_us=LATENCY_US,
    )
    return ReplayWatch(settings, torch.device("cuda", torch.cuda.current_device()))


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def alone(problem: AttentionProblem, rank: int) -> dict[str, Callable[[], Any]]:
    """Attention to keys that are all there, in the order of the sequence, by each library."""
    keys, q = normal(2, problem.length, KV_HEADS, SIZE), normal(problem.rows, HEADS, SIZE)
    by_heads = [one.transpose(0, 1)[None] for one in (q, keys[0], keys[1])]
    whole = [Segment(0, 0, problem.length)]
    rectangles = problem.mask.rectangles(problem.segments[rank], whole)

    def run(library: Any, some: list[Rectangle]) -> Callable[[], Any]:
        def call() -> None:
            for one in some:
                q, k, v = by_heads
                rows, cols = slice(one.q, one.q_stop), slice(one.k, one.k_stop)
                library(Heads(q[:, :, rows], k[:, :, cols], v[:, :, cols]), one, SIZE**-0.5)

        return call

    some = list(rectangles)
    return {"flash": run(flash, some), "cudnn": run(cudnn, some)}


def share_of_merges(call: Callable[[], Any]) -> float:
    """Of the time of all kernels, the share of those that are not a library's attention."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    kernels = [one for one in seen.events() if one.device_type.name == "CUDA"]
    taken = [
        (one.device_time, any(name in one.name.lower() for name in ATTENTION))
        for one in kernels
        if "mem" not in one.name.lower()[:3]
    ]
    total = sum(seconds for seconds, _ in taken)
    return sum(seconds for seconds, library in taken if not library) / max(total, 1e-9)


def case(world: int, length: int, seconds: float) -> list[dict[str, Any]]:
    rank, rows = world // 2, length // world
    watch = watch_of(world, rank)
    problem = AttentionProblem(
        *(world, rows, 1, HEADS, KV_HEADS, SIZE, "bfloat16"), causal=True, placement="head-tail"
    )
    q, k, v = (normal(1, heads, rows, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    calls = {f"alone {name}": call for name, call in alone(problem, rank).items()}

    def ours(name: str) -> Callable[[], Any]:
        given = {"causal": True, "placement": "head-tail", "group": watch.group, "schedule": name}
        return lambda: ficco.all_gather_attention(q, k, v, **given)

    calls |= {name: ours(name) for name in SCHEDULES}
    items, notes = [], {}
    for name, call in calls.items():
        try:
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            items.append(Item("queued", name, Runner(call), sleep_s=5e-3))
        except Exception as error:  # the others still count
            notes[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"  {name}: {notes[name]}", flush=True)
    for slot in workspace_of(watch.group, watch.device).slots:
        if slot.memory is not None:
            draw_normal(slot.memory.tensor[slot.data :].view(torch.bfloat16))
    for item in items:
        for _ in range(6):
            watch.clock.time(item)
    began, shuffle = time.monotonic(), random.Random(0)
    while time.monotonic() - began < seconds or len(items[0].times_s) < 5:
        for item in shuffle.sample(items, len(items)):
            item.times_s.append(watch.clock.time(item)[0])
    last = last_arrival(problem, watch.machine, rank)
    taken = {item.name: median(item.times_s) for item in items}
    best = min(taken[name] for name in taken if name.startswith("alone"))
    ideal = max(best, last)
    flops = (
        4
        * HEADS
        * SIZE
        * sum(one.pairs for one in problem.rectangles(rank, (0, rows), (0, 2 * length)))
    )
    found = []
    for item in items:
        name, mine = item.name, taken[item.name]
        ratio = [a / b for a, b in zip(_times(items, "serial"), item.times_s, strict=True)]
        ours_ = name in SCHEDULES
        row = {
            "world": world,
            "sequence": length,
            "candidate": name,
            "us": round(mine * 1e6, 1),
            "tflops": round(flops / mine * 1e-12, 1),
            "last_arrival_us": round(last * 1e6, 1),
            "of_ideal": round(ideal / mine, 3),
            "x_serial": round(median(ratio), 3),
            "x_arrival_then_alone": round((last + best) / mine, 3),
            "others_share": round(share_of_merges(item.call), 4) if ours_ else "",
            "planned_us": "",
        }
        if ours_:
            plans = attention_plans(problem, Schedule.parse(name))
            spans = simulate(plans, watch.machine).ranks[rank]
            stops = [bar.stop_s for bar in spans if bar.lane != "sync"]
            row["planned_us"] = round(max(stops) * 1e6, 1)
        print(" ", row, flush=True)
        found.append(row)
    watch.close()
    return found


def _times(items: list[Item], name: str) -> list[float]:
    return next(item.times_s for item in items if item.name == name)


def main() -> None:
    folder, each = Path(sys.argv[1]), float((sys.argv[2:] or ["8"])[0])
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    ficco.set_options(on_timeout="raise", timeout_s=20.0)
    print(torch.cuda.get_device_name(), torch.__version__, time.strftime("%Y-%m-%d"), flush=True)
    rows = []
    for world in WORLDS:
        for length in SEQUENCES:
            print(f"{world} ranks, {length} positions", flush=True)
            rows += case(world, length, each)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "attention.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
