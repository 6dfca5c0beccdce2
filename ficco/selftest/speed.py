"""The checks of how fast copies are, alone and beside products."""

from __future__ import annotations

import statistics
import time
from itertools import combinations
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import ficco
from ficco.heuristics.where import where
from ficco.selftest.rank import Found, NotOffered, Rank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: How many times as long as alone products and copies may take beside each other, if the copies
#: look as if they left the compute units alone. By DMA engines the FiCCO paper saw 1.11 and 1.12 in
#: the mean on MI300X; ``ficco tune`` saw 1.05 and 1.02 on 2 H200.
BESIDE = 1.3
#: Share of what is to be expected below which a rate is no longer taken for it. Pairs of 4 H200 lay
#: within 4 % of their median (docs/results/selftest-h200-4.md); 7 lanes that share 4 queues would
#: reach 0.57.
SLOW = 0.7
#: Products, or calls, that are enqueued in front of each other at most.
MANY = 400


def gb_per_s(
    at: Rank,
    group: ProcessGroup | None,
    schedule: str,
    peers: int,
    n: int = 0,
    alone: bool = False,
) -> float:
    """GB/s that each rank of a group receives, by the slowest of them. Collective over all ranks.

    Products have ``n`` columns; ``alone`` is for calls of which none begins before the one in front
    of it is over, as where copies and products of one call are to overlap.
    """
    rows = 1024
    k = at.settings.pair_bytes // (rows * 2)
    seconds = []
    if group is not None:
        shard = torch.ones(rows, k, dtype=torch.bfloat16, device=at.device)
        b = torch.ones(k, max(n, 1), dtype=torch.bfloat16, device=at.device)[:, :n]
    for number in range(at.settings.rounds + 1):
        calls = 5 if number else 3  # to warm up: both slots, and what is recorded
        at.settle()
        began = time.perf_counter()
        if group is not None:
            for _ in range(calls):
                ficco.all_gather_matmul(shard, b, group=group, schedule=schedule)
                if alone:
                    ficco.synchronize(group)
            ficco.synchronize(group)
        seconds.append(max(at.gather((time.perf_counter() - began) / calls)))
    return peers * rows * k * 2 / min(seconds[1:]) / 1e9


def beside(at: Rank, group: ProcessGroup) -> Found:
    """Whether copies seem to leave the compute units to products that fill the device."""
    if at.device.type == "cpu":
        raise NotOffered("there are no DMA engines: on a CPU all work is the cores'")
    if at.world == 1:
        raise NotOffered("one rank has no peer to copy to")
    a = torch.ones(4096, 4096, dtype=torch.bfloat16, device=at.device)
    out = torch.empty_like(a)
    rows, k = 1024, at.settings.pair_bytes // 2048
    shard = torch.ones(rows, k, dtype=torch.bfloat16, device=at.device)
    b = torch.ones(k, 1, dtype=torch.bfloat16, device=at.device)[:, :0]
    beside = torch.cuda.Stream()

    def milliseconds(products: int, calls: int) -> tuple[float, float]:
        """Times of the slowest rank for products and for copies that begin together."""
        at.settle()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        with torch.cuda.stream(beside):
            marks[0].record()
            for _ in range(products):
                torch.mm(a, a, out=out)
            marks[1].record()
        marks[2].record()
        for _ in range(calls):
            ficco.all_gather_matmul(shard, b, group=group, schedule=all_at_once(at))
        marks[3].record()
        torch.cuda.synchronize()
        ficco.synchronize(group)
        mine = marks[0].elapsed_time(marks[1]), marks[2].elapsed_time(marks[3])
        return tuple(map(max, zip(*at.gather(mine), strict=True)))  # type: ignore[return-value]

    def best(products: int, calls: int) -> tuple[float, float]:
        found = zip(*(milliseconds(products, calls) for _ in range(3)), strict=True)
        return tuple(map(min, found))  # type: ignore[return-value]

    products, calls = 50, 20
    milliseconds(products, 3)  # to warm up
    product_ms, copies_ms = best(products, 0)[0], best(0, calls)[1]
    # What is timed is under way for half as long as what it is beside.
    enough = min(MANY, 1 + int(2 * product_ms / copies_ms * calls))
    slower_products = best(products, enough)[0] / product_ms
    enough = min(MANY, 1 + int(2 * copies_ms / product_ms * products))
    slower_copies = best(enough, calls)[1] / copies_ms
    return looks(slower_products, slower_copies)


def looks(products: float, copies: float) -> Found:
    """What it looks like if products and copies take so many times as long beside each other."""
    seen = (
        f"beside each other products take {products:.2f} and copies {copies:.2f} times as long as "
        "alone; a profile alone proves it"
    )
    if max(products, copies) > BESIDE:
        raise NotOffered(f"looks like copies by compute units: {seen}")
    return Found(f"looks like copies by DMA engines: {seen}")


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


def bandwidth_of_pairs(at: Rank, group: ProcessGroup) -> Found:
    if at.world == 1:
        raise NotOffered("one rank has no peer")
    return alike(pairs(at), shared=at.device.type == "cpu")


def alike(rates: dict[tuple[int, int], float], shared: bool) -> Found:
    """What rates of pairs say; where pairs share cores, a slow one is chance."""
    middle = statistics.median(rates.values())
    slow = [pair for pair, rate in rates.items() if rate < SLOW * middle]
    seen = f"{middle:.1f} GB/s received per rank, both ways at once"
    if len(rates) > 1:
        least, most = min(rates.values()), max(rates.values())
        seen += f" (median of {len(rates)} pairs, {least:.1f} to {most:.1f})"
    if slow:
        one, two = min(slow, key=lambda pair: rates[pair])
        seen += f"; {len(slow)} below {SLOW} of that, the slowest between ranks {one} and {two}"
    details = "\n".join(
        f"ranks {one} and {two}: {rate:.1f} GB/s" for (one, two), rate in rates.items()
    )
    if slow and not shared:
        raise NotOffered(f"pairs are not alike: {seen}", details)
    return Found(seen, details)


def bandwidth_of_all(at: Rank, group: ProcessGroup) -> Found:
    if at.world == 1:
        raise NotOffered("one rank has no peer")
    peers, lanes = at.world - 1, all_at_once(at)
    rates = {name: gb_per_s(at, group, name, peers) for name in ("shard-overlap", lanes)}
    best = max(rates, key=lambda name: rates[name])
    details = "\n".join(f"{name}: {rate:.1f} GB/s" for name, rate in rates.items())
    seen = f"{rates[best]:.1f} GB/s received per rank from {peers}, by {best}"
    # One peer has one link, whatever lanes there are.
    if peers == 1 or at.device.type == "cpu" or not all(at.gather(_meshed(at, group))):
        return Found(seen, details)
    return filled(seen, details, lanes, rates[lanes], peers, statistics.median(pairs(at).values()))


def _meshed(at: Rank, group: ProcessGroup) -> bool:
    """Whether every pair is taken to have a link of its own: by the machine's description, or,
    where nobody has described it, if the engine cannot tell how many copies run side by side."""
    engine = at.engine(group)
    machine = where(None, at.world, engine.fingerprint()).machine
    if machine is None or machine.topology is None:
        return engine.copy_engines() is None
    return machine.topology.kind == "mesh"


def filled(seen: str, details: str, lanes: str, rate: float, peers: int, pair: float) -> Found:
    """Whether copy lanes for all peers fill so many links, each of which has a pair's rate."""
    share = rate / (peers * pair)
    seen += (
        f"; {lanes} reaches {rate:.1f} GB/s, {share:.2f} of {peers} links of {pair:.1f} GB/s each"
    )
    if share < SLOW:
        raise NotOffered(f"copy lanes do not fill the links: {seen}", details)
    return Found(seen, details)
