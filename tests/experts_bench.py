"""Time layers of experts on one GPU, whose peers' tokens arrive, and are taken back, when a link
would bring them; writes ``experts.csv`` and ``experts.md`` to a folder.

    python tests/experts_bench.py FOLDER [MACHINE]

The GPU is rank 0 of a group that is played (``ficco.bench.replay``). All ways are timed in shuffled
rounds, the host ahead. ``serial`` is the baseline, one after the other: the all-to-all by copy
engines, the products of all rows, and the all-to-all back. ``products`` has everything but copies
between ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

import ficco
from ficco.bench.replay_run import ReplayWatch
from ficco.bench.tables import markdown
from ficco.heuristics.experts import COMPARED
from ficco.machine import save
from ficco.tune.products import refitted

ROOT = Path(__file__).parents[1]
K, TOP_K, SPARE = 4096, 2, 1.25
#: Experts and the columns between their products: many narrow ones, Mixtral's, many wide ones.
LAYERS = ((64, 1408), (8, 14336), (64, 14336))
SHAPES = [(world, *layer, t) for layer in LAYERS for world in (4, 8) for t in (4096, 16384)]
SCHEDULES = ("auto", *COMPARED)
SECONDS = 6.0


def operands(world: int, experts: int, ffn: int, t: int) -> dict[str, Any]:
    """Normal data, and routes that are spread evenly."""
    torch.manual_seed(0)
    each, device = experts // world, torch.device("cuda")

    def normal(*shape: int, fan: int = 1) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16) / fan**0.5

    weights, indices = torch.rand(t, experts, device=device).topk(TOP_K)
    return {
        "tokens": normal(t, K),
        "indices": indices,
        "weights": weights,
        "up": normal(each, K, 2 * ffn, fan=K),
        "down": normal(each, ffn, K, fan=ffn),
        "capacity": -(-int(SPARE * t * TOP_K) // experts),
    }


def products(given: dict[str, Any], world: int) -> None:
    """The same work on one rank, with as many rows: permutation, products, sums."""
    group = dist.group.WORLD
    each, capacity = given["up"].shape[0], given["capacity"]
    routing = ficco.route(given["indices"] % each, each, capacity=world * capacity, group=group)
    rest = {name: given[name] for name in ("tokens", "weights", "up", "down")}
    ficco.experts(rest.pop("tokens"), routing, **rest, group=group, schedule="serial")


def timed(
    world: int, experts: int, ffn: int, t: int, machine: str | None, folder: Path
) -> dict[str, Any]:
    settings = SimpleNamespace(
        rank=0, world=world, machine=machine, link_gb_s=None, latency_us=None, gap_us=None,
        products=partial(refitted, recipes=()),
    )  # fmt: skip
    watch: Any = ReplayWatch(settings, torch.device("cuda", 0))
    path = folder / f"machine-{world}.yaml"
    save(watch.machine, path)
    ficco.set_options(machine=str(path))
    given = operands(world, experts, ffn, t)
    calls: dict[str, Any] = {"products": partial(products, given, world)}
    for name in SCHEDULES:
        calls[name] = partial(ficco.experts, **given, group=watch.group, schedule=name)
    for call in calls.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    times = watch.time(calls, seconds=SECONDS, mode="queued")
    serial = times["serial"]
    row: dict[str, Any] = {"world": world, "experts": experts, "ffn": ffn, "tokens": t}
    row["rounds"] = len(serial)
    row["capacity"] = given["capacity"]
    for name, seconds in times.items():
        row[f"{name} ms"] = round(float(np.median(seconds)) * 1e3, 3)
        row[f"{name} x serial"] = round(float(np.median(serial / seconds)), 3)
    watch.close()
    return row


def main() -> None:
    folder = Path(sys.argv[1])
    machine = sys.argv[2] if len(sys.argv) > 2 else None
    folder.mkdir(parents=True, exist_ok=True)
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ficco.set_options(on_timeout="raise", timeout_s=20)
    rows = []
    for shape in SHAPES:
        try:
            rows.append(timed(*shape, machine, folder))
        except Exception as error:
            print(f"{shape}: {type(error).__name__}: {error}", file=sys.stderr)
            raise
        print(rows[-1], flush=True)
        pd.DataFrame(rows).to_csv(folder / "experts.csv", index=False)
    table = pd.DataFrame(rows).astype(str)
    commit = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    about = (
        f"# Layers of experts, replayed\n\n{torch.cuda.get_device_name(0)}, {date.today()}, "
        f"PyTorch {torch.__version__}, commit {commit}, `python tests/experts_bench.py`. k {K}, "
        f"gate and up 2 x ffn, top {TOP_K}, capacity {SPARE} of the mean, bfloat16; medians, "
        "host ahead.\n"
    )
    (folder / "experts.md").write_text(f"{about}\n{markdown(list(table), table)}\n")


if __name__ == "__main__":
    main()
