"""The checks of how fast copies are, by themselves and during products, as the tuner times them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import closing
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import ficco
from ficco.heuristics.decide import where
from ficco.tools.bench.series import MeasuredCalls, Stopwatch
from ficco.tools.selftest.rank import NotOffered, Passed, Rank
from ficco.tools.tune.communication import slowdowns
from ficco.tools.tune.effort import GPU

#: How many times as long products and copies may take during each other as without, if the copies
#: look as if they left the compute units free. With DMA engines the FiCCO paper saw 1.11 and 1.12
#: in the mean on MI300X; ``ficco tune`` saw 1.05 and 1.02 on 2 H200.
SLOWER = 1.3
#: Share of what is to be expected below which a rate is no longer taken for it. Pairs of 4 H200 lay
#: within 4 % of their median (docs/results/selftest-h200-4.md); 7 lanes that share 4 queues would
#: reach 0.57.
SLOW = 0.7
#: Seconds in which products and copies are timed during each other.
OVERLAP_S = 5.0


def gb_per_s(at: Rank, group: ProcessGroup | None, schedule: str, peers: int, n: int = 0) -> float:
    """GB/s that each rank of a group receives in a call, by the slowest of them. Collective over
    all ranks, of which those outside of the group wait.

    Products have ``n`` columns.
    """
    at.settle()
    rows, k, seconds = 1024, at.settings.pair_bytes // 2048, 0.0
    if group is not None:
        parts = MeasuredCalls(group, at.device, torch.bfloat16)
        a, b = parts.matrix("a", rows, k), parts.matrix("b", k, max(n, 1))[:, :n]

        def call() -> None:
            ficco.all_gather_matmul(a, b, group=group, schedule=schedule)
            if not watch.on_gpu:  # where the host's clock runs until the call is over
                ficco.synchronize(group)

        rounds = at.settings.rounds
        with closing(Stopwatch(group, at.device, at.settings.limit_s / 2)) as watch:
            series = watch.time({schedule: call}, seconds=0.0, least=rounds, most=rounds)
        seconds = min(series[schedule])
    return peers * rows * k * 2 / max(at.gather(seconds)) / 1e9


def overlap(at: Rank, group: ProcessGroup) -> Passed:
    """Whether copies seem to leave the compute units to products that fill the device."""
    if at.device.type == "cpu":
        raise NotOffered("there are no DMA engines: on a CPU the cores do all work")
    if at.world == 1:
        raise NotOffered("one rank has no peer to copy to")
    parts = MeasuredCalls(group, at.device, torch.bfloat16)
    products = {"product": parts.matmul(*GPU.products[0][:3])}
    copies = {"copies": parts.copies(all_at_once(at), at.settings.pair_bytes)}
    with closing(Stopwatch(group, at.device, at.settings.limit_s / 2)) as watch:

        def time(calls: dict[str, Callable[[], Any]], share: float, most: int = 40) -> Any:
            return watch.time(calls, seconds=OVERLAP_S * share, most=most)

        slowed = slowdowns(time, products, copies, at.device)
    return looks(slowed["product", "copies"], slowed["copies", "product"])


def looks(products: float, copies: float) -> Passed:
    """What it looks like if products and copies take so many times as long during each other."""
    seen = (
        f"during each other products take {products:.2f} and copies {copies:.2f} times as long as "
        "without; only a profile proves it"
    )
    if max(products, copies) > SLOWER:
        raise NotOffered(f"looks like copies by compute units: {seen}")
    return Passed(f"looks like copies by DMA engines: {seen}")


def all_at_once(at: Rank) -> str:
    """A schedule in which every peer has a copy lane."""
    return f"hetero-fused-1d:pieces=4,copy={max(1, at.world - 1)}"


def pairs(at: Rank) -> dict[tuple[int, int], float]:
    """GB/s that each rank of a pair receives. Collective; measured once, if ranks live on."""
    if all(at.gather(bool(at.pairs))):
        return at.pairs
    rates = {}
    for pair in combinations(range(at.world), 2):
        made = dist.new_group(list(pair))
        mine = made if at.rank in pair else None
        rates[pair] = gb_per_s(at, mine, "shard-overlap", 1)
        at.settle()
        if mine is not None:
            ficco.close(mine)
        at.gather(None)
        if mine is not None:
            dist.destroy_process_group(mine)
    at.pairs = rates
    return rates


def bandwidth_of_pairs(at: Rank, group: ProcessGroup) -> Passed:
    if at.world == 1:
        raise NotOffered("one rank has no peer")
    return alike(pairs(at), shared=at.device.type == "cpu")


def alike(rates: dict[tuple[int, int], float], shared: bool) -> Passed:
    """What rates of pairs say; where pairs share cores, a slow one is chance."""
    middle = statistics.median(rates.values())
    slow = [pair for pair, rate in rates.items() if rate < SLOW * middle]
    seen = f"{middle:.1f} GB/s received per rank, both ways at once"
    if len(rates) > 1:
        least, most = min(rates.values()), max(rates.values())
        seen += f" (median of {len(rates)} pairs, {least:.1f} to {most:.1f})"
    if slow:
        one, two = min(slow, key=rates.__getitem__)
        seen += f"; {len(slow)} below {SLOW} of that, the slowest between ranks {one} and {two}"
    lines = (f"ranks {one} and {two}: {rate:.1f} GB/s" for (one, two), rate in rates.items())
    details = "\n".join(lines)
    if slow and not shared:
        raise NotOffered(f"pairs are not alike: {seen}", details)
    return Passed(seen, details)


def bandwidth_of_all(at: Rank, group: ProcessGroup) -> Passed:
    if at.world == 1:
        raise NotOffered("one rank has no peer")
    peers, lanes = at.world - 1, all_at_once(at)
    rates = {name: gb_per_s(at, group, name, peers) for name in ("shard-overlap", lanes)}
    best = max(rates, key=rates.__getitem__)
    details = "\n".join(f"{name}: {rate:.1f} GB/s" for name, rate in rates.items())
    seen = f"{rates[best]:.1f} GB/s received per rank from {peers}, by {best}"
    # One peer has one link, whatever lanes there are.
    if peers == 1 or at.device.type == "cpu" or not all(at.gather(_meshed(at, group))):
        return Passed(seen, details)
    pair = statistics.median(pairs(at).values())
    share = rates[lanes] / (peers * pair)
    seen += (
        f"; {lanes} reaches {rates[lanes]:.1f} GB/s, {share:.2f} of {peers} links of {pair:.1f} "
        "GB/s each"
    )
    if share < SLOW:
        raise NotOffered(f"copy lanes do not fill the links: {seen}", details)
    return Passed(seen, details)


def _meshed(at: Rank, group: ProcessGroup) -> bool:
    """Whether every pair is taken to have a link of its own: by the machine's description, or,
    where nobody has described it, if the engine cannot tell how many copies run at once."""
    engine = at.engine(group)
    machine = where(None, at.world, engine.fingerprint()).machine
    if machine is None or machine.topology is None:
        return engine.copy_engines() is None
    return machine.topology.kind == "mesh"
