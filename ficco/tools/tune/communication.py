"""Steps that time communication: copies by engines and by the kernel, links, the library's
collectives, contention of products and communication, and networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import geometric_mean, median
from typing import Any

import torch
import torch.distributed as dist

import ficco
from ficco.machine import Collective, Contention, Copies, Network, Topology
from ficco.plan import together
from ficco.problems.products import Problem
from ficco.runtime.workspace import workspace_of
from ficco.schedules import Schedule, plan
from ficco.tools.bench.measure import (
    MeasuredCalls,
    Times,
    calls_to_cover,
    contended,
    reduce_scatter,
)
from ficco.tools.tune import fits
from ficco.tools.tune.effort import Shape
from ficco.tools.tune.products import reserve, row_of
from ficco.tools.tune.site import Site

Call = Callable[[], Any]

#: Copies of a shard in pieces: rows of copies on one queue. By copy engines peer after peer; in one
#: piece they visit the peers as a permutation, so that every rank receives from one at a time. By
#: the kernel piece after piece, so that small ones go to all peers in one launch, or none do.
ROWS_OF = {
    "dma": "hetero-unfused-1d:pieces={pieces},order=peer",
    "kernel": "hetero-unfused-1d:pieces={pieces},order=piece,kernel",
}
#: Copies by the kernel before a product: the schedule, most bytes of a shard (times of larger
#: shards vary by more than the measured difference), columns of the product, and share of the
#: step's seconds.
IN_FRONT, IN_FRONT_BYTES, IN_FRONT_COLUMNS, IN_FRONT_SHARE = "serial:kernel", 4 << 20, 1024, 0.4
#: Messages of a shard between hosts, in rows of two lengths.
MESSAGES, IN_A_ROW = "hetero-unfused-1d:pieces={count}", (1, 4)
ONE_BY_ONE, AT_ONCE = "shard-overlap", "shard-overlap:copy={peers}"


def copies(site: Site) -> Copies:
    """Copies by copy engines; their number is the engine's, else the file's."""
    said = workspace_of(site.watch.group, site.watch.device).engine.copy_engines()
    known = site.machine.copies
    engines = said or (known.engines if known is not None else site.world - 1)
    return _copies(site, "copies", "dma", engines)


def kernel_copies(site: Site) -> Copies | str:
    """Copies by the kernel, with at most a queue per peer, or the reason to skip them."""
    if not copies_by_kernel(site):
        return "no kernel copies on this device"
    queues, share = site.world - 1, 1.0 - IN_FRONT_SHARE
    block = _copies(site, "kernel_copies", "kernel", queues, share)
    return replace(block, in_front=in_front(site, block))


def copies_by_kernel(site: Site) -> bool:
    """Whether a kernel of this device can copy."""
    engine = workspace_of(site.watch.group, site.watch.device).engine
    return site.watch.on_gpu and "kernel" in engine.capabilities().movers


def _copies(site: Site, step: str, mover: str, engines: int, share: float = 1.0) -> Copies:
    sizes = site.effort.sizes
    fit = fits.copies(copy_times(site, sizes, site.effort.pieces, step, mover, share))
    turn = "peer after peer" if mover == "dma" else "small ones to all peers at once"
    note = f"push, one queue, {turn}, {sizes[0]} to {sizes[-1]} bytes; "
    note += f"largest error {fit.error:.1%}"
    latency, gap = fit.latency, fit.gap
    if site.crowded:
        latency = gap = 0.0
        note += "; what a copy takes beyond its bytes is in the block host"
    return Copies(engines, latency, gap, fit.curve, site.provenance("fitted", note))


def copy_times(
    site: Site,
    sizes: Sequence[int],
    pieces: Sequence[int],
    step: str = "copies",
    mover: str = "dma",
    share: float = 1.0,
) -> list[fits.CopyTime]:
    """Seconds of rows of copies between all ranks, taken in a share of the step's own."""
    parts, least = site.parts(), site.effort.least_bytes
    parts.shard(max(pieces) * min(max(sizes), least))  # grows the memory that all are cut from
    parts.shard(2 * max(sizes))
    rows, calls = {}, {}
    for size in sizes:
        for count in dict.fromkeys(min(count, 2) if size > least else count for count in pieces):
            name = f"{count} x {size}"
            calls[name] = parts.copies(ROWS_OF[mover].format(pieces=count), size * count)
            rows[name] = launches(size, count, site.world, mover)
    times = site.time(step, calls, share=share)
    return [fits.CopyTime(*row, median(times[name])) for name, row in rows.items()]


def launches(size: int, pieces: int, world: int, mover: str) -> tuple[float, int]:
    """Mean bytes of a launch in a row of copies, and the number of launches."""
    rows = (max(size * pieces // 2048, 1),) * world
    row = Schedule.parse(ROWS_OF[mover].format(pieces=pieces))
    whole = plan(Problem("all_gather_matmul", rows, 0, 1024, "bfloat16"), row, 0)
    count = sum(whole.steps[first].copy is not None for first, *_ in together(whole))
    return size * pieces * (world - 1) / count, count


def in_front(site: Site, copies: Copies) -> float:
    """Seconds that copies by the kernel add to a following product, beyond the time of their bytes.
    The product's own time is the difference of two products and one."""
    parts, world, n = site.parts(), site.world, IN_FRONT_COLUMNS
    sizes = [size for size in site.effort.sizes if size <= IN_FRONT_BYTES]
    calls: dict[str, Any] = {}
    for size in reversed(sizes):  # the largest first: operands are cut from memory that grows
        a = parts.shard(size)
        rows, k = a.shape
        (calls[f"{size} in front"],) = site.gathers(a, parts.matrix("b", k, n), [IN_FRONT]).values()
        for count in (1, 2):
            calls[f"{size} {count}"] = row_of(parts, Shape(world * rows, n, k), count)
    series = site.time("kernel_copies", calls, share=IN_FRONT_SHARE)

    def added(size: int) -> float:
        whole, one, two = (series[f"{size} {row}"] for row in ("in front", 1, 2))
        return median(whole - (two - one))

    return fits.in_front({(world - 1) * size: added(size) for size in sizes}, copies.rate)


def topology(site: Site) -> Topology:
    parts, size = site.parts(), max(site.effort.sizes)
    peers = site.world - 1
    calls = {"one": parts.copies(ONE_BY_ONE, size)}
    if peers > 1:
        calls["all"] = parts.copies(AT_ONCE.format(peers=peers), size)
    rates = {name: peers * size / median(t) for name, t in site.time("topology", calls).items()}
    known, before = site.machine.copies, site.machine.topology
    bandwidth = max(rates["one"], *(rate for _, rate in known.curve) if known else ())
    kind, sharing = "switch", 1.0
    if peers > 1:
        kind, sharing = fits.topology(rates["one"], rates["all"])
        note = (
            f"a rank receives {rates['one'] / 1e9:.4g} GB/s from its peers one after the other, "
            f"{rates['all'] / 1e9:.4g} GB/s from all at once"
        )
    else:
        if before is not None:  # keeps the known sharing
            kind, sharing = before.kind, min(before.bandwidth * before.sharing / bandwidth, 1.0)
        note = "two ranks have one peer each: what several copies at once do was not measured"
    return Topology(kind, bandwidth, site.provenance("measured", note), sharing)


def collective(site: Site, name: str) -> Collective:
    """The curve of a collective of the library, by the name of its block."""
    make, unit = EXCHANGES[name]
    parts, sizes = site.parts(), site.effort.exchanges
    make(parts, max(sizes))  # grows the memory that all are cut from
    series = site.time(name, {str(size): make(parts, size) for size in sizes})
    curve = tuple((float(size), median(series[str(size)])) for size in sizes)
    return Collective(curve, site.provenance("measured", f"{name.replace('_', '-')}, {unit}"))


#: The call of each collective on a number of bytes, and the meaning of the bytes.
EXCHANGES: dict[str, tuple[Callable[[MeasuredCalls, int], Call], str]] = {
    "all_gather": (MeasuredCalls.collective, "bytes per rank"),
    "reduce_scatter": (
        lambda its, n: partial(reduce_scatter, its.shard(n), its.gathered(n), group=its.group),
        "bytes of a rank's part of the sum",
    ),
    "all_to_all": (
        lambda its, n: partial(
            dist.all_to_all_single,
            its.matrix("received", *its.gathered(n).shape),
            its.gathered(n),
            group=its.group,
        ),
        "bytes of a block",
    ),
    # The numbers grow from call to call, which takes no longer.
    "all_reduce": (
        lambda its, n: partial(dist.all_reduce, its.gathered(n), group=its.group),
        "bytes of a rank's part of the sum",
    ),
}


def network(site: Site) -> Network | str:
    """The network between hosts, from rows of messages between ranks with equal local ranks: of one
    local rank, and of all at once; or the reason to skip it."""
    watch, hosts = site.watch, site.watch.hosts
    if hosts.count == 1:
        return "all ranks are on one host"
    each = hosts.near.size()
    rails = [list(range(place, watch.world, each)) for place in range(each)]
    groups = [dist.new_group(ranks) for ranks in rails]
    place, rail = hosts.near.rank(), groups[hosts.near.rank()]
    try:
        parts, sizes = replace(site.parts(), group=rail), site.effort.sizes
        parts.shard(max(IN_A_ROW) * max(sizes))
        rows = {
            f"{n} x {size}": (n, size, parts.copies(MESSAGES.format(count=n), n * size))
            for size in sizes
            for n in IN_A_ROW
        }
        calls = {f"all: {name}": call for name, (*_, call) in rows.items()}
        alone = {f"one: {name}": call for name, (*_, call) in rows.items()}
        calls |= alone if not place else dict.fromkeys(alone, lambda: None)
        # By the clock: ranks wait for what their cores do not do.
        seconds, effort = site.effort.seconds["network"], site.effort
        series = watch.time(calls, seconds=seconds, least=effort.least, most=40, tick=site.tick)
        messages = {}
        for who in ("one", "all"):
            times = [
                fits.CopyTime(size, count * (hosts.count - 1), median(series[f"{who}: {name}"]))
                for name, (count, size, _) in rows.items()
            ]
            messages[who] = fits.messages(times)
        by = workspace_of(rail, watch.device).engine.capabilities().network
    finally:
        ficco.close(rail)
        for group in groups:
            dist.destroy_process_group(group)
    (latency, bandwidth), (_, shared) = messages["one"], messages["all"]
    note = (
        f"{hosts.count} hosts, {by}; {min(sizes)} to {max(sizes)} bytes; one rank of a host "
        f"{bandwidth / 1e9:.4g} GB/s, each of {each} at once {shared / 1e9:.4g} GB/s"
    )
    sharing = min(max(round(bandwidth / shared), 1), each)
    return Network(bandwidth, latency, site.source("fitted", note), sharing)


def contention(site: Site) -> Contention:
    parts, shapes, traffic = site.parts(), site.effort.products, site.effort.traffic
    reserve(parts, shapes)
    products = {str(shape): parts.matmul(*shape[:3]) for shape in shapes}
    moves = {"copies": parts.copies(ONE_BY_ONE, traffic), "collective": parts.collective(traffic)}
    time = partial(site.time, "contention")
    if site.crowded:
        slowed = _halved(time, products, moves)
    else:
        slowed = slowdowns(time, products, moves, site.watch.device)
    means = [
        geometric_mean([slowed[pair[::turn]] for pair in ((one, move) for one in products)])
        for move in moves
        for turn in (1, -1)  # of products during a move, and of the move during products
    ]
    note = f"{len(products)} products, shards of {traffic} bytes; medians of paired ratios"
    return Contention(*means, provenance=site.provenance("measured", note))


def slowdowns(
    time: Callable[..., dict[str, Times]],
    products: Mapping[str, Call],
    moves: Mapping[str, Call],
    device: torch.device,
) -> dict[tuple[str, str], float]:
    """By how much each product slows down during each move, and the other way round: ``[front,
    back]`` is the slowdown of the first during the second.

    ``time`` times calls in a ``share`` of the seconds there are.
    """
    pairs = [pair for move in moves for one in products for pair in ((one, move), (move, one))]
    calls = {**moves, **products}
    alone = time(calls, share=0.2, most=7)
    together = {
        f"{front} during {back}": contended(
            calls[front], calls[back], calls_to_cover(alone[front], alone[back]), device
        )
        for front, back in pairs
    }
    series = time({**calls, **together}, share=0.8)
    return {
        (front, back): fits.slowdown(series[front], series[f"{front} during {back}"])
        for front, back in pairs
    }


def _halved(
    time: Callable[..., dict[str, Times]], products: Mapping[str, Call], moves: Mapping[str, Call]
) -> dict[tuple[str, str], float]:
    """Slowdowns if all cores are busy: each of two concurrent calls has half of the cores, and both
    take slightly more than in turn."""
    pairs = list(product(products, moves))
    both = {f"{a} and {b}": _at_once(products[a], moves[b]) for a, b in pairs}
    series = time({**products, **moves, **both})
    more = {
        (a, b): 2 * fits.slowdown(series[a] + series[b], series[f"{a} and {b}"]) for a, b in pairs
    }
    return more | {(b, a): slowed for (a, b), slowed in more.items()}


def _at_once(front: Call, back: Call) -> Call:
    """Both at the same time, until both are over."""

    def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(back)
            front()
            other.result()

    return run
