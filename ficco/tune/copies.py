"""What copies between ranks take, by engines and by the kernel, and how their links are shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

import ficco
from ficco.machine import Copies, Topology
from ficco.plan import together
from ficco.problem import Problem
from ficco.schedules import Schedule, plan
from ficco.tune import fits
from ficco.tune.effort import Shape
from ficco.tune.products import row_of
from ficco.tune.site import Site, needs_peers
from ficco.workspace import workspace_of

#: Copies of a shard in pieces: rows of copies on one queue. By copy engines peer after peer; in one
#: piece they visit the peers as a permutation, so that every rank receives from one at a time. By
#: the kernel piece after piece, so that small ones go to all peers in one launch, or none do.
ROWS_OF = {
    "dma": "hetero-unfused-1d:pieces={pieces},order=peer",
    "kernel": "hetero-unfused-1d:pieces={pieces},order=piece,kernel",
}
#: Copies by the kernel in front of a product, where the model may take them; of shards of at most
#: so many bytes, since the times of larger ones vary by more than what is asked. The product has
#: so many columns. In the rest of the step's seconds rows are timed.
IN_FRONT, IN_FRONT_BYTES, IN_FRONT_COLUMNS, IN_FRONT_SHARE = "serial:kernel", 4 << 20, 1024, 0.4
ONE_BY_ONE, AT_ONCE = "shard-overlap", "shard-overlap:copy={peers}"


def copy_times(
    site: Site,
    sizes: Sequence[int],
    pieces: Sequence[int],
    step: str = "copies",
    mover: str = "dma",
    share: float = 1.0,
) -> list[fits.CopyTime]:
    """Seconds of rows of copies between all ranks, taken in a share of the step's own."""
    parts = site.parts()
    parts.shard(max(pieces) * min(max(sizes), site.effort.least_bytes))
    parts.shard(2 * max(sizes))
    rows = {}
    for size in sizes:
        large = size > site.effort.least_bytes
        for count in dict.fromkeys(min(count, 2) if large else count for count in pieces):
            rows[f"{count} x {size}"] = (size, count)
    calls = {
        name: parts.copies(ROWS_OF[mover].format(pieces=count), size * count)
        for name, (size, count) in rows.items()
    }
    found = site.time(step, calls, share=share)
    return [
        fits.CopyTime(*launches(size, count, site.world, mover), found[name].seconds)
        for name, (size, count) in rows.items()
    ]


def launches(size: int, pieces: int, world: int, mover: str) -> tuple[float, int]:
    """Bytes of what is enqueued at once in a row of copies, in the mean, and how often."""
    rows = (max(size * pieces // 2048, 1),) * world
    row = Schedule.parse(ROWS_OF[mover].format(pieces=pieces))
    whole = plan(Problem("all_gather_matmul", rows, 0, 1024, "bfloat16"), row, 0)
    count = sum(whole.steps[first].op == "copy" for first, *_ in together(whole))
    return size * pieces * (world - 1) / count, count


def copies(site: Site) -> Copies:
    return _copies(site, "copies", "dma", engines(site))


def kernel_copies(site: Site) -> Copies | None:
    """Those of the copy kernel, which has no engines to wait for: a queue per peer at most. None
    where no kernel copies, as on a CPU."""
    if not copies_by_kernel(site):
        return None
    share = 1.0 - IN_FRONT_SHARE
    found = _copies(site, "kernel_copies", "kernel", max(site.world - 1, 1), share)
    return replace(found, in_front=in_front(site, found))


def copies_by_kernel(site: Site) -> bool:
    """Whether a kernel of this device can copy."""
    engine = workspace_of(site.watch.group, site.watch.device).engine
    return site.watch.on_gpu and "kernel" in engine.capabilities().movers


def in_front(site: Site, copies: Copies) -> float:
    """Seconds that copies by the kernel add to a product that they come in front of, beside their
    bytes' time. What the product itself takes is what a second one adds to a first."""
    parts, world, n = site.parts(), site.world, IN_FRONT_COLUMNS
    sizes = [size for size in site.effort.sizes if size <= IN_FRONT_BYTES]
    calls: dict[str, Any] = {}
    for size in reversed(sizes):  # the largest first: operands are cut from memory that is grown
        a = parts.shard(size)
        (rows, k), b = a.shape, parts.matrix("b", a.shape[1], n)

        def call(a: torch.Tensor = a, b: torch.Tensor = b) -> Any:
            return ficco.all_gather_matmul(a, b, group=site.watch.group, schedule=IN_FRONT)

        calls[f"{size} in front"] = call
        for count in (1, 2):
            calls[f"{size} {count}"] = row_of(parts, Shape(world * rows, n, k), count)
    found = site.time("kernel_copies", calls, share=IN_FRONT_SHARE)
    added = {
        size: [
            whole - (two - one)
            for whole, one, two in zip(
                *(found[f"{size} {what}"].times for what in ("in front", 1, 2)), strict=True
            )
        ]
        for size in sizes
    }
    return fits.in_front(
        {(world - 1) * size: median(seconds) for size, seconds in added.items()}, copies.rate
    )


def _copies(site: Site, step: str, mover: str, engines: int, share: float = 1.0) -> Copies:
    needs_peers(site)
    sizes = site.effort.sizes
    fit = fits.copies(copy_times(site, sizes, site.effort.pieces, step, mover, share))
    turn = "peer after peer" if mover == "dma" else "small ones to all peers at once"
    note = (
        f"push, one queue, {turn}, {sizes[0]} to {sizes[-1]} bytes; largest error {fit.error:.1%}"
    )
    latency, gap = fit.latency, fit.gap
    if site.crowded:
        latency = gap = 0.0
        note += "; what a copy takes beside its bytes is in the block host"
    return Copies(
        engines=engines,
        latency=latency,
        gap=gap,
        curve=fit.curve,
        provenance=site.provenance("fitted", note),
    )


def engines(site: Site) -> int:
    """Copies that a rank can have in flight: as its engine says, else as the file says."""
    said = workspace_of(site.watch.group, site.watch.device).engine.copy_engines()
    if said:
        return said
    known = site.machine.copies
    return known.engines if known is not None else max(site.world - 1, 1)


def topology(site: Site) -> Topology:
    needs_peers(site)
    parts, size = site.parts(), max(site.effort.sizes)
    peers = site.world - 1
    calls = {"one": parts.copies(ONE_BY_ONE, size)}
    if peers > 1:
        calls["all"] = parts.copies(AT_ONCE.format(peers=peers), size)
    found = site.time("topology", calls)
    one_by_one = peers * size / found["one"].seconds
    known = site.machine.copies
    best = max((rate for _, rate in known.curve), default=0.0) if known else 0.0
    bandwidth = max(best, one_by_one)
    if peers == 1:
        kind, sharing, before = "switch", 1.0, site.machine.topology
        if before is not None:  # what several copies bring together stays what it was
            kind, sharing = before.kind, min(before.bandwidth * before.sharing / bandwidth, 1.0)
        note = "two ranks have one peer each: what several copies at once do was not measured"
    else:
        at_once = peers * size / found["all"].seconds
        kind, sharing = fits.topology(one_by_one, at_once)
        note = (
            f"a rank receives {one_by_one / 1e9:.4g} GB/s from its peers one after the other, "
            f"{at_once / 1e9:.4g} GB/s from all at once"
        )
    provenance = site.provenance("measured", note)
    return Topology(kind, bandwidth, provenance, sharing)
