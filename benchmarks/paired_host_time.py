"""Host time of calls in two checkouts that take turns on one GPU, which two ranks share.

    export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1
    python benchmarks/paired_host_time.py BASE NEW out.csv

BASE and NEW are checkouts. Each has one process per rank, pinned to its own core. All four
processes stay alive, and the checkouts run rounds in a shuffled order. A figure is the best of 12
calls (captured: one call) of the slower rank. The GPU's speed is not measured.
"""

from __future__ import annotations

import csv
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

WORLD = 2
#: Few, because captured calls keep their graphs and the memory of these graphs.
CAPTURED_ROUNDS = 6
MODES = ("eager", "replayed", "captured")
CASES = (
    ("all_gather_matmul", "growing"),
    ("all_gather_matmul", "hetero-fused-1d:pieces=4"),
    ("all_gather_matmul", "hetero-fused-2d"),
    ("matmul_reduce_scatter", "hetero-fused-1d"),
)

RANK = """
import faulthandler, gc, json, os, sys, time
faulthandler.dump_traceback_later(240, exit=True)
rank, world, port, core = map(int, sys.argv[1:5])
cases = json.loads(sys.argv[5])
os.sched_setaffinity(0, {core})
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
import torch, torch.distributed as dist, ficco
torch.set_num_threads(1)
torch.cuda.set_device(0)
dist.init_process_group("gloo")
torch.manual_seed(rank)
sizes = (256, 512), (512, 512), (512, 256)
shard, whole, b = (torch.randn(size, device="cuda").bfloat16() for size in sizes)
graphs = []

def call(operator, schedule):
    a = shard if operator.startswith("all_gather") else whole
    return getattr(ficco, operator)(a, b, schedule=schedule)

def captured(case):
    graph = torch.cuda.CUDAGraph()
    graphs.append(graph)
    with torch.cuda.graph(graph):
        call(*case)  # takes the memory of the first slot
        begin = time.perf_counter()
        call(*case)
        seconds = time.perf_counter() - begin
    graph.replay()
    return seconds

def best(case):
    times = []
    for _ in range(12):
        begin = time.perf_counter()
        call(*case)
        times.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    return min(times)

for case in cases:
    for replay in (False, True):
        with ficco.options(replay=replay):
            for _ in range(6):
                call(*case)
torch.cuda.synchronize()
dist.barrier()
gc.disable()
print("ready", flush=True)
for line in sys.stdin:
    mode, number = line.split()
    case = cases[int(number)]
    with ficco.options(replay=mode == "replayed"):
        seconds = captured(case) if mode == "captured" else best(case)
    torch.cuda.synchronize()
    dist.barrier()
    print(json.dumps(seconds * 1e6), flush=True)
os._exit(0)
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(
    checkout: str, first_core: int, program: str = RANK, cases: Sequence[Any] = CASES
) -> list[subprocess.Popen[str]]:
    """Start the ranks of a checkout and wait until they are ready."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", program, str(rank), str(WORLD), port),
                *(str(first_core + 2 * rank), json.dumps(cases)),
            ],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": checkout},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        if "ready\n" not in iter(rank.stdout.readline, ""):
            raise SystemExit(f"a rank of {checkout} has ended")
    return ranks


def timed(ranks: list[subprocess.Popen[str]], mode: str, case: int) -> float:
    """Microseconds of a case on the slower rank."""
    for rank in ranks:
        assert rank.stdin is not None
        print(mode, case, file=rank.stdin, flush=True)
    return max(float(json.loads(rank.stdout.readline())) for rank in ranks if rank.stdout)


def main(base: str, new: str, out: str, seconds: float = 50.0) -> None:
    checkouts = {
        name: start(path, 2 * WORLD * i)
        for i, (name, path) in enumerate((("base", base), ("new", new)))
    }
    rows: list[tuple[int, str, int, str, float]] = []
    number, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for mode in MODES[: 3 if number < CAPTURED_ROUNDS else 2]:
            for case in range(len(CASES)):
                for name in random.sample(list(checkouts), len(checkouts)):
                    rows.append((number, mode, case, name, timed(checkouts[name], mode, case)))
        number += 1
    with open(out, "w") as file:
        writer = csv.writer(file)
        writer.writerow(("round", "mode", "case", "commit", "us"))
        writer.writerows(rows)
    for mode in MODES:
        for case, names in enumerate(CASES):
            us = {name: [r[4] for r in rows if r[1:4] == (mode, case, name)] for name in checkouts}
            gain = statistics.median(n - b for n, b in zip(us["new"], us["base"], strict=True))
            least = ", ".join(f"{name} {min(times):.1f}" for name, times in us.items())
            print(f"{mode} {' '.join(names)}: least {least} us; median difference {gain:+.1f} us")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
