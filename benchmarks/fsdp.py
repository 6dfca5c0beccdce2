"""Times of a step of FSDP2 on stacks of Llama-8B blocks, with one GPU per rank.

``torchrun --nproc-per-node 2 -m benchmarks.fsdp FOLDER`` compares PyTorch's collectives, in any
memory or in NCCL's (``--variants``), with ``ficco.fsdp``: gathers only, or also reduce-scatters.
Writes ``steps.csv``, a row for each variant and shuffled round, and ``products.csv``, products with
and without gathers. A step is timed from an idle GPU, whose host may be the limit, and behind a
kernel that sleeps until its host has enqueued all of it. A variant's losses must equal the
baseline's bitwise; its hooks must be exact.
"""

from __future__ import annotations

import argparse
import csv
import faulthandler
import os
import random
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import ficco
from ficco import fsdp
from ficco.tools.bench.frames import Schema
from ficco.tools.bench.fsdp import BLOCKS, SHAPES, registered, stack, symmetric

#: Sizes of a block.
CASE = SHAPES["cuda"][0]
WIDTH, HIDDEN = CASE.hidden, CASE.inner
BASELINE = "pytorch"
#: The columns of ``steps.csv``, behind the commit in docs/results.
STEPS = Schema(
    {
        "commit": str,
        **dict.fromkeys(("tokens", "round"), int),
        "variant": str,
        **dict.fromkeys(("ms", "host_ms", "queued_ms"), float),
    },
    case="tokens",
    ways=("variant",),
)
#: Cycles that the GPU sleeps before a queued step or queued products, about 70 ms.
AHEAD = 140_000_000
#: Products in a row: few after a pause, or enough that the GPU reaches its limit of power.
PRODUCTS = 5, 40


#: Functions that prepare a model after ``fully_shard``, by name of the variant.
VARIANTS: dict[str, Callable[[Any], Any]] = {
    BASELINE: lambda model: None,
    "registered": registered,
    "symmetric": symmetric,
    "gathers": lambda model: fsdp.use(model, reduce_scatter=False),
    "both": fsdp.use,
}


def step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).float().square().mean()
    loss.backward()
    for weight in model.parameters():
        weight.grad = None
    return loss.detach()


def exact(model: Any, device: torch.device) -> None:
    """Check the hooks of the first block on integers that depend on the turn and the rank."""
    rank, world, count = dist.get_rank(), dist.get_world_size(), 3_000_001
    (group,) = fsdp._param_groups(model[0])
    gathers, sums = group._all_gather_comm, group._reduce_scatter_comm
    ranks = group._all_gather_process_group
    for turn in range(4):
        slices = [
            (torch.arange(count, device=device) * (turn + 3) + 17 * peer) % 251
            for peer in range(world)
        ]
        if isinstance(gathers, fsdp.Gathers):
            out = gathers.allocate((count * world,), dtype=torch.bfloat16, device=device)
            own = out.narrow(0, count * rank, count).copy_(slices[rank])
            gathers(out, own, ranks)
            assert torch.equal(out.float(), torch.cat(slices).float()), f"gather {turn}"
        if isinstance(sums, fsdp.GradientSums):
            source = torch.cat([part + 1000 * rank for part in slices]).float()
            summed = torch.empty(count, device=device)
            sums(summed, source, ranks, dist.ReduceOp.AVG)
            mean = slices[rank].float() + 1000 * (world - 1) / 2
            assert torch.equal(summed, mean), f"sum {turn}"


def largest(seconds: float, device: torch.device) -> float:
    value = torch.tensor([seconds], device=device, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def steps(models: dict[str, Any], tokens: int, rounds: int, device: torch.device) -> list[Any]:
    """Rows of tokens, round, variant, and milliseconds of the slowest rank: of the step, of its
    host, and of the queued step."""
    rank, shuffle, rows = dist.get_rank(), random.Random(tokens), []
    torch.manual_seed(100 + rank)
    x = torch.randn(1, tokens, WIDTH, device=device, dtype=torch.bfloat16)
    losses = {name: [step(model, x).item() for _ in range(3)] for name, model in models.items()}
    for name in list(models):
        same = torch.tensor([losses[name] == losses[BASELINE]], device=device, dtype=torch.int32)
        dist.all_reduce(same, op=dist.ReduceOp.MIN)
        if rank == 0:
            print(
                f"{tokens} tokens, {name}: losses {losses[name]}, equal: {bool(same)}", flush=True
            )
        if not same:
            raise SystemExit(f"{name} computes other losses")
    for turn in range(rounds + 2):
        names = list(models)
        shuffle.shuffle(names)
        for name in names:
            dist.barrier()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            step(models[name], x)
            host = time.perf_counter() - begin
            torch.cuda.synchronize()
            total = time.perf_counter() - begin
            dist.barrier()
            torch.cuda.synchronize()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD)
            first.record()
            step(models[name], x)
            last.record()
            torch.cuda.synchronize()
            queued = first.elapsed_time(last) / 1e3
            times = [largest(seconds, device) * 1e3 for seconds in (total, host, queued)]
            if turn > 1:
                rows.append((tokens, turn - 2, name, *times))
    return rows


def products(models: dict[str, Any], rounds: int, device: torch.device) -> list[Any]:
    """Rows of products in a row, round, variant and milliseconds of a product, without gathers or
    during gathers. The first product and the first gather begin together."""
    a = torch.randn(8192, WIDTH, device=device, dtype=torch.bfloat16)
    b = torch.randn(WIDTH, HIDDEN, device=device, dtype=torch.bfloat16)
    side, shuffle, rows = torch.cuda.Stream(priority=-1), random.Random(1), []
    out = torch.empty(8192, HIDDEN, device=device, dtype=torch.bfloat16)
    count = 109_000_000
    names = ["alone", *models]
    for calls, turn in product(PRODUCTS, range(rounds + 1)):
        shuffle.shuffle(names)
        for name in names:
            dist.barrier()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(AHEAD)
            torch.cuda.current_stream().wait_stream(side)
            if name != "alone":
                (group,) = fsdp._param_groups(models[name][0])
                gathers, ranks = group._all_gather_comm, group._all_gather_process_group
                with torch.cuda.stream(side):
                    for _ in range(4 * calls):
                        size = (count * dist.get_world_size(),)
                        gathered = gathers.allocate(size, dtype=torch.bfloat16, device=device)
                        own = gathered.narrow(0, count * dist.get_rank(), count)
                        gathers(output_tensor=gathered, input_tensor=own, group=ranks)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                torch.mm(a, b, out=out)
            end.record()
            torch.cuda.synchronize()
            if turn:
                ms = largest(begin.elapsed_time(end) / calls, device)
                rows.append((calls, turn - 1, name, ms))
    return rows


def write(path: Path, header: Sequence[str], rows: list[Any]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--rounds", type=int, default=9)
    names, default = [*VARIANTS], [BASELINE, "gathers", "both"]
    parser.add_argument("--variants", nargs="+", choices=names, default=default)
    parser.add_argument("--limit", type=float, default=120, help="seconds until stacks are printed")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.limit, exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    ficco.set_options(timeout_s=30)
    models = {}
    for name, prepare in VARIANTS.items():  # the order matters: symmetric memory keeps its backend
        if name in args.variants:
            models[name] = stack(CASE, device, args.blocks)
            report = prepare(models[name])
            if report and dist.get_rank() == 0:
                print(name, *report, sep="\n  ", flush=True)
    for model in models.values():
        exact(model, device)
        torch.cuda.synchronize()
    rows = []
    for tokens in args.tokens:
        rows += steps(models, tokens, args.rounds, device)
    mm_rows = products(models, args.rounds, device)
    if dist.get_rank() == 0:
        args.folder.mkdir(parents=True, exist_ok=True)
        write(args.folder / "steps.csv", [*STEPS.columns][1:], rows)
        write(args.folder / "products.csv", ("calls", "round", "variant", "ms"), mm_rows)
        for tokens in args.tokens:
            for column, mode in ((3, "from an idle GPU"), (5, "queued")):
                times = {(row[2], row[1]): row[column] for row in rows if row[0] == tokens}
                turns = range(args.rounds)
                for name in models:
                    ratio = median(times[name, r] / times[BASELINE, r] for r in turns)
                    middle = median(times[name, r] for r in turns)
                    print(f"{tokens} {mode}, {name}: {middle:.2f} ms, {ratio:.3f} of {BASELINE}")
        by_row = {row[:3]: row[3] for row in mm_rows}
        for calls, name in product(PRODUCTS, ("alone", *models)):
            each = [(by_row[calls, r, name], by_row[calls, r, "alone"]) for r in range(args.rounds)]
            ratio, middle = median(ms / alone for ms, alone in each), median(ms for ms, _ in each)
            print(f"{calls} products, {name}: {middle:.3f} ms, {ratio:.3f}")
        print("symmetric memory:", ficco.memory() >> 20, "MiB", flush=True)
    faulthandler.cancel_dump_traceback_later()
    ficco.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
