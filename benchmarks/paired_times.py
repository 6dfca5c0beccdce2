"""Times of calls in two checkouts that take turns on two GPUs, on the shapes of ``--set measured``.

    python benchmarks/paired_times.py BASE NEW out.csv

BASE and NEW are checkouts. Each has one process per GPU. All four processes stay alive, and the
checkouts run rounds in a shuffled order. A figure is that of the slower rank:

- queued: calls in a row after a kernel that sleeps, so that the host runs ahead;
- idle: single calls, each from its start on the host to the end of its work on the GPU;
- graph: replays of a captured call in a row.
"""

from __future__ import annotations

import csv
import random
import statistics
import sys
import time

from paired_host_time import WORLD, start, timed

MODES = ("queued", "idle", "graph")
#: m, n and k of the products of ``ficco bench --set measured``.
SHAPES = (
    (32768, 2048, 8192),
    (8192, 7168, 8192),
    (8192, 3584, 4096),
    (18432, 7168, 4096),
    (16384, 4096, 16384),
    (8192, 2048, 32768),
    (8192, 12288, 12288),
    (16384, 13312, 16384),
)

RANK = """
import faulthandler, gc, json, os, sys, time
faulthandler.dump_traceback_later(400, exit=True)
rank, world, port, core = map(int, sys.argv[1:5])
shapes = json.loads(sys.argv[5])
os.sched_setaffinity(0, {core, core + 1})
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
import torch, torch.distributed as dist, ficco
torch.set_num_threads(1)
torch.cuda.set_device(rank)
dist.init_process_group("gloo")
torch.manual_seed(rank)
CALLS = 6
operands, graphs = [], []
for m, n, k in shapes:
    sizes = (m // world, k), (k, n)
    operands.append([torch.randn(size, device="cuda").bfloat16() for size in sizes])

def call(case):
    return ficco.all_gather_matmul(*operands[case])

def queued(case, run):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(4_000_000)
    begin.record()
    for _ in range(CALLS):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / CALLS

def idle(case, run):
    times = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return sorted(times)[CALLS // 2]

for case in range(len(shapes)):
    for _ in range(6):
        call(case)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(case)
    graphs.append(graph)
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
gc.disable()
print("ready", flush=True)
for line in sys.stdin:
    mode, number = line.split()
    case = int(number)
    dist.barrier()
    run = graphs[case].replay if mode == "graph" else lambda: call(case)
    us = (idle if mode == "idle" else queued)(case, run)
    torch.cuda.synchronize()
    dist.barrier()
    print(json.dumps(us), flush=True)
os._exit(0)
"""


def main(base: str, new: str, out: str, seconds: float = 60.0) -> None:
    checkouts = {
        name: start(path, 2 * WORLD * i, RANK, SHAPES)
        for i, (name, path) in enumerate((("base", base), ("new", new)))
    }
    rows: list[tuple[int, str, int, str, float]] = []
    number, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for case in random.sample(range(len(SHAPES)), len(SHAPES)):
            for mode in MODES:
                for name in random.sample(list(checkouts), len(checkouts)):
                    us = timed(checkouts[name], mode, case)
                    rows.append((number, mode, case, name, us))
        number += 1
    with open(out, "w") as file:
        writer = csv.writer(file)
        writer.writerow(("round", "mode", "case", "commit", "us"))
        writer.writerows(rows)
    print(f"{number} rounds; medians in us, and the median of new / base in a round")
    for case, shape in enumerate(SHAPES):
        for mode in MODES:
            us = {name: [r[4] for r in rows if r[1:4] == (mode, case, name)] for name in checkouts}
            ratios = [n / b for n, b in zip(us["new"], us["base"], strict=True)]
            medians = "  ".join(f"{name} {statistics.median(us[name]):8.1f}" for name in us)
            sizes = "x".join(map(str, shape))
            print(f"{sizes:18} {mode:7} {medians}  ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
