"""The steps of a tuning run: each measures one block of a Machine, on all ranks together.

Every rank ends a step with the same figures, those of the slowest rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import ficco
from ficco.bench import calls as library
from ficco.bench.calls import Runner
from ficco.bench.inputs import Operands
from ficco.bench.series import Parts, Series, Stopwatch, add, behind, beside
from ficco.bench.stats import geomean
from ficco.heuristics.rule import ROWS, Observation, fit_thresholds
from ficco.machine import (
    Collective,
    Contention,
    Copies,
    Fingerprint,
    Gemm,
    Host,
    Machine,
    Memory,
    Provenance,
    Thresholds,
    Topology,
    nearest,
)
from ficco.machine.fit import Sample, errors, fit
from ficco.plan import Plan, together
from ficco.problem import Problem
from ficco.schedules import Schedule, plan
from ficco.tune import fits
from ficco.tune.effort import Effort, Shape
from ficco.workspace import workspace_of

Tick = Callable[[str], None]

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

#: Schedules with different numbers of products, copies and signals.
ENQUEUED = (
    "serial",
    "shard-overlap",
    "shard-overlap:pull",
    "growing",
    "hetero-unfused-1d:pieces=4",
    "hetero-unfused-1d:pieces=8",
    "hetero-unfused-1d:pieces=8,pull",
    "hetero-fused-1d:pieces=4",
    "hetero-fused-1d:pieces=8",
    "uniform-fused-1d:pieces=4",
)
#: Products in a row that are timed at once, where they are of fewer operations than this.
ROW_OF_PRODUCTS, SMALL_FLOPS = 4, 2e11
#: Of the seconds for products those in which rows heat the device up.
HEAT_SHARE = 0.1
#: As many rounds as fit into the seconds.
MANY = 1 << 20
#: Products in a row whose host time is taken at once.
PRODUCTS = 8
#: Calls before host time is taken: an engine may keep what it does of the first few.
WARM_CALLS = 12
#: Most rounds in which host time is taken, and of its seconds those where the device is idle.
HOST_ROUNDS, HOST_SHARE = 200, 0.6


@dataclass
class Site:
    """Where a step measures: the ranks, the operands, what is known so far, and how much to do.

    Attributes:
        source: makes the provenance of a block, from ``"measured"`` or ``"fitted"`` and a note.
    """

    watch: Stopwatch
    effort: Effort
    machine: Machine
    source: Callable[[str, str], Provenance]
    tick: Tick = lambda what: None

    @property
    def world(self) -> int:
        return self.watch.world

    def provenance(self, kind: str, note: str) -> Provenance:
        """Of a block, with how its times were taken where that is not by the clock."""
        if self.crowded:
            note += f"; what {self.world} ranks take of the {cores()} cores that they share"
        return self.source(kind, note)

    def parts(self) -> Parts:
        dtype = getattr(torch, self.effort.dtype)
        return Parts(self.watch.group, self.watch.device, dtype)

    @property
    def crowded(self) -> bool:
        """Whether ranks share their cores, so that all are busy while a call is under way."""
        return not self.watch.on_gpu and self.world >= cores()

    def time(self, step: str, calls: dict[str, Any], **settings: Any) -> dict[str, Series]:
        """Time calls in the seconds of a step, or a share of them.

        Ranks that share cores are timed by what the cores do: a call takes as long as all threads
        of all ranks together, over the cores. What else runs on the host does not count then; by
        the clock it would, and most where many threads wait for each other.
        """
        share = settings.pop("share", 1.0)
        settings.setdefault("least", self.effort.least)
        settings.setdefault("most", 40)
        settings |= {"seconds": self.effort.seconds[step] * share, "tick": self.tick}
        if not self.crowded:
            return self.watch.time(calls, **settings)
        spent: dict[str, list[float]] = {name: [] for name in calls}
        counted = {name: _counted(call, spent[name]) for name, call in calls.items()}
        found = self.watch.time(counted, **settings)
        rounds = len(next(iter(found.values())).times) if found else 0  # behind those to warm up
        everyone = self.watch.gather({name: times[-rounds:] for name, times in spent.items()})
        return {
            name: replace(
                one,
                times=tuple(
                    sum(by_rank) / cores()
                    for by_rank in zip(*(times[name] for times in everyone), strict=True)
                ),
            )
            for name, one in found.items()
        }


def cores() -> int:
    """Cores that this process can use."""
    return len(os.sched_getaffinity(0))


def _counted(call: Any, spent: list[float]) -> Runner:
    """The call, which notes what all threads of this process took in it."""
    runner = call if isinstance(call, Runner) else Runner(call)

    def run() -> Any:
        begin = time.process_time()
        result = runner.run()
        spent.append(time.process_time() - begin)
        return result

    return replace(runner, run=run)


@dataclass(frozen=True)
class Step:
    """One step: the block that it measures, and how; None leaves the block as it is."""

    name: str
    measure: Callable[[Site], Any]


# Products.


def samples(site: Site, shapes: Sequence[Shape], heat: fits.Heat = fits.COLD) -> list[Sample]:
    """Seconds of products, each in a row of several, less what the device's temperature does to
    all of them and less what ``heat`` does to a row."""
    parts, reference = site.parts(), site.effort.reference
    # The largest first: operands are cut from memory that is grown.
    order = sorted(shapes, key=lambda s: s.batch * s.m * s.k + s.k * s.n, reverse=True)
    largest = {
        "a": max(s.batch * s.m * s.k for s in (*shapes, reference)),
        "b": max(s.k * s.n for s in (*shapes, reference)),
        "out": max(s.batch * s.m * s.n for s in (*shapes, reference)),
    }
    for name, size in largest.items():
        parts.matrix(name, size, 1)

    calls = {str(i): _row(parts, shape, in_a_row(shape)) for i, shape in enumerate(order)}
    references = [f"reference {i}" for i in range(3)]
    calls |= {name: _row(parts, reference, 1) for name in references}
    found = site.time("gemm", calls, share=1.0 - HEAT_SHARE)
    seconds = fits.steadied({name: one.times for name, one in found.items()}, references)
    itemsize = getattr(torch, site.effort.dtype).itemsize
    return [
        Sample(s.m, s.n, s.k, s.batch, itemsize, s.wide, heat.cold(seconds[str(i)]) / in_a_row(s))
        for i, s in enumerate(order)
    ]


def in_a_row(shape: Shape) -> int:
    """How many products are timed at once: what lies between two counts for small ones."""
    return ROW_OF_PRODUCTS if shape.flops < SMALL_FLOPS else 1


def _row(parts: Parts, shape: Shape, count: int) -> Callable[[], Any]:
    call = parts.matmul(shape.m, shape.n, shape.k, batch=shape.batch, wide=shape.wide)

    def run() -> None:
        for _ in range(count):
            call()

    return run


def row_times(site: Site, shapes: Sequence[Shape], rows: Sequence[int]) -> list[fits.RowTime]:
    """Seconds of so many products in a row, few and so many that the device heats up.

    Each row comes again and again for a while, with pauses as between calls that are benched: a
    power limit looks back over many rows, so that shuffled ones would all be as slow as the
    longest. The second half of the times counts.
    """
    parts, found = site.parts(), []
    share = HEAT_SHARE / (len(shapes) * len(rows))
    for shape in shapes:
        for count in rows:
            row = _row(parts, shape, count)
            times = site.time("gemm", {"row": row}, share=share, most=MANY)["row"].times
            steady = median(times[len(times) // 2 :])
            found.append(fits.RowTime(f"{shape.m} x {shape.n} x {shape.k}", count, steady))
    return found


def gemm(site: Site) -> Gemm:
    rows = row_times(site, site.effort.heating, site.effort.rows)
    heat = fits.heat(rows)
    shapes = site.effort.gemms
    if not _adds_wide(site):
        shapes = tuple(shape for shape in shapes if not shape.wide)
    found = samples(site, shapes, heat)
    fitted = fit(found, units=units(site), peak=peak(site), known=known(site))
    error = errors(fitted, found)
    longest = max(one.seconds for one in rows)
    note = (
        f"{len(found)} products of {site.effort.dtype}, errors {error.median:.1%} median, "
        f"{error.mean:.1%} mean, {error.worst:.1%} worst; "
        + ("burst and sustained: " if heat.limited else "no power limit in ")
        + f"{len(rows)} rows of products of up to {longest * 1e3:.3g} ms, errors {heat.error:.1%}"
    )
    source = site.provenance("fitted", note)
    return replace(fitted, burst=heat.burst, sustained=heat.sustained, provenance=source)


def _adds_wide(site: Site) -> bool:
    """Whether half-precision products can add up in float32 here (PyTorch 2.8 and later)."""
    dtype = getattr(torch, site.effort.dtype)
    sums, a = torch.zeros(8, 8, device=site.watch.device), torch.zeros(8, 8, dtype=dtype)
    try:
        add(sums, a.to(sums.device), a.to(sums.device))
    except (RuntimeError, TypeError):
        return False
    return True


def known(site: Site) -> Gemm | None:
    """Products as the file has them or, of a GPU, a file of such a device: in it are the dtypes
    that are not measured."""
    machine = site.machine
    if machine.gemm is not None or not site.watch.on_gpu:
        return machine.gemm
    alike = nearest(Fingerprint(machine.accelerator, machine.ranks))
    return None if alike is None else alike.gemm


def peak(site: Site) -> float | None:
    """Operations per second of the data sheet, as a file of such a device says."""
    found = known(site) if site.watch.on_gpu else None
    return None if found is None else found.peak


def units(site: Site) -> int:
    """Processors that work on a tile each."""
    if not site.watch.on_gpu:
        return 1
    return int(torch.cuda.get_device_properties(site.watch.device).multi_processor_count)


# Copies.


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
            calls[f"{size} {count}"] = _row(parts, Shape(world * rows, n, k), count)
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
    _needs_peers(site)
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
    _needs_peers(site)
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


def all_gather(site: Site) -> Collective:
    _needs_peers(site)
    parts, sizes = site.parts(), site.effort.exchanges or site.effort.sizes
    parts.collective(max(sizes))  # grows the memory that the others share
    found = site.time("all_gather", {str(size): parts.collective(size) for size in sizes})
    curve = tuple((float(size), found[str(size)].seconds) for size in sizes)
    return Collective(curve, site.provenance("measured", "all-gather, bytes per rank"))


def reduce_scatter(site: Site) -> Collective:
    def call(parts: Parts, nbytes: int) -> Callable[[], Any]:
        part, whole = parts.shard(nbytes), _for_all(parts, nbytes)
        return lambda: library.reduce_scatter(part, whole, group=parts.group)

    return _exchange(site, "reduce_scatter", call, "bytes of a rank's part of the sum")


def all_to_all(site: Site) -> Collective:
    def call(parts: Parts, nbytes: int) -> Callable[[], Any]:
        sent = _for_all(parts, nbytes)
        received = parts.matrix("received", *sent.shape)
        return lambda: dist.all_to_all_single(received, sent, group=parts.group)

    return _exchange(site, "all_to_all", call, "bytes of a block")


def all_reduce(site: Site) -> Collective:
    def call(parts: Parts, nbytes: int) -> Callable[[], Any]:
        whole = _for_all(parts, nbytes)  # grows from call to call, which takes no longer
        return lambda: dist.all_reduce(whole, group=parts.group)

    return _exchange(site, "all_reduce", call, "bytes of a rank's part of the sum")


def _for_all(parts: Parts, nbytes: int) -> torch.Tensor:
    """As many bytes for every rank."""
    rows, columns = parts.shard(nbytes).shape
    return parts.matrix("gathered", rows * parts.world, columns)


def _exchange(
    site: Site, step: str, call: Callable[[Parts, int], Callable[[], Any]], unit: str
) -> Collective:
    """The curve of a collective of the library."""
    _needs_peers(site)
    parts, sizes = site.parts(), site.effort.exchanges or site.effort.sizes
    call(parts, max(sizes))  # grows the memory that the others share
    found = site.time(step, {str(size): call(parts, size) for size in sizes})
    curve = tuple((float(size), found[str(size)].seconds) for size in sizes)
    return Collective(curve, site.provenance("measured", f"{step.replace('_', '-')}, {unit}"))


def _needs_peers(site: Site) -> None:
    if site.world < 2:
        raise ValueError("ranks: required two or more to measure what passes between them, got 1")


# Beside each other.


def contention(site: Site) -> Contention:
    _needs_peers(site)
    return _crowded_contention(site) if site.crowded else _contention(site)


def _crowded_contention(site: Site) -> Contention:
    """Two things that run at the same time on cores that are all busy have half of them each, and
    together take a little more than one after the other."""
    parts, shapes, traffic = site.parts(), site.effort.products, site.effort.traffic
    products = {str(shape): parts.matmul(*shape[:3]) for shape in shapes}
    moves = {
        "copies": parts.copies(ONE_BY_ONE, traffic),
        "collective": parts.collective(traffic),
    }
    both = {
        f"{product} and {move}": _together(multiplying, moving)
        for product, multiplying in products.items()
        for move, moving in moves.items()
    }
    found = site.time("contention", {**products, **moves, **both})

    def factor(move: str) -> float:
        more = [
            fits.contention(
                [a + b for a, b in zip(found[name].times, found[move].times, strict=True)],
                found[f"{name} and {move}"].times,
            )
            for name in products
        ]
        return 2 * geomean(more)

    note = f"{len(products)} products, shards of {traffic} bytes; medians of paired ratios"
    copies, collective = factor("copies"), factor("collective")
    return Contention(
        copies, copies, collective, collective, provenance=site.provenance("measured", note)
    )


def _together(front: Callable[[], Any], back: Callable[[], Any]) -> Callable[[], Any]:
    """Both at the same time, until both are over."""

    def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            behind = pool.submit(back)
            front()
            behind.result()

    return run


def _contention(site: Site) -> Contention:
    parts, shapes, traffic = site.parts(), site.effort.products, site.effort.traffic
    moves = {
        "copies": parts.copies(ONE_BY_ONE, traffic),
        "collective": parts.collective(traffic),
    }
    for shape in shapes:
        for name, size in (
            ("a", shape.m * shape.k), ("b", shape.k * shape.n), ("out", shape.m * shape.n)
        ):  # fmt: skip
            parts.matrix(name, size, 1)
    products = {str(shape): parts.matmul(*shape[:3]) for shape in shapes}
    alone = site.time("contention", {**moves, **products}, share=0.2, most=7)
    calls: dict[str, Any] = {**moves, **products}
    device = site.watch.device
    for move, moving in moves.items():
        for product, multiplying in products.items():
            back = behind(alone[product].times, alone[move].times)
            calls[f"{product} under {move}"] = beside(multiplying, moving, back, device)
            back = behind(alone[move].times, alone[product].times)
            calls[f"{move} under {product}"] = beside(moving, multiplying, back, device)
    found = site.time("contention", calls, share=0.8)

    def factor(front: Callable[[str, str], str], move: str) -> float:
        slow = [
            fits.contention(
                found[front(product, move)].times,
                found[_under(front(product, move), product, move)].times,
            )
            for product in products
        ]
        return geomean(slow)

    note = f"{len(products)} products, shards of {traffic} bytes; medians of paired ratios"
    return Contention(
        gemm_under_copies=factor(lambda product, move: product, "copies"),
        copies_under_gemm=factor(lambda product, move: move, "copies"),
        gemm_under_collective=factor(lambda product, move: product, "collective"),
        collective_under_gemm=factor(lambda product, move: move, "collective"),
        provenance=site.provenance("measured", note),
    )


def _under(front: str, product: str, move: str) -> str:
    return f"{front} under {move if front == product else product}"


# Within a rank.


def memory(site: Site) -> Memory:
    device, calls = site.watch.device, {}
    for size in site.effort.moves:
        src = torch.zeros(size, dtype=torch.uint8, device=device)
        calls[str(size)] = _copy_within(src, torch.empty_like(src))
    found = site.time("memory", calls)
    pairs = [(2.0 * size, found[str(size)].seconds) for size in site.effort.moves]
    bandwidth, latency = fits.memory(pairs)
    source = site.provenance("measured", "copies within a rank, bytes read and written")
    return Memory(capacity(site), bandwidth, source, latency)


def _copy_within(src: torch.Tensor, dst: torch.Tensor) -> Callable[[], Any]:
    return lambda: dst.copy_(src)


def capacity(site: Site) -> float:
    """Bytes of a GPU's memory, or a rank's part of the host's."""
    if site.watch.on_gpu:
        return float(torch.cuda.get_device_properties(site.watch.device).total_memory)
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(line.split()[1] for line in lines if line.startswith("MemTotal"))
    return float(int(total) * 1024 // site.world)


# The host.


def counts(whole: Plan) -> tuple[int, int, int]:
    """Products, copies and batches of signals that a host enqueues for a plan, as a simulation
    of the mode "idle" counts them: what is placed or summed as a product."""
    matmuls = copies = signals = 0
    for step in whole.steps:
        matmuls += len(step.products) + (step.op in ("place", "reduce"))
        copies += step.op == "copy"
        signals += bool(step.waits or step.after) + bool(step.posts)
    return matmuls, copies, signals


def host(site: Site) -> Host:
    parts = site.parts()
    rows, n, k = site.effort.tiny
    problem = Problem("all_gather_matmul", (rows,) * site.world, n, k, site.effort.dtype)
    a, b = parts.matrix("a", rows, k), parts.matrix("b", k, n)
    group = site.watch.group

    def call(schedule: str) -> Callable[[], Any]:
        return lambda: ficco.all_gather_matmul(a, b, group=group, schedule=schedule)

    kinds: dict[str, Any] = {name: call(name) for name in (*ENQUEUED, "serial:collective")}
    if not site.watch.on_gpu:
        product = parts.matmul(rows, n, k)
        kinds["products"] = lambda: [product() for _ in range(PRODUCTS)]
        kinds["collective"] = parts.collective(rows * k * a.element_size())
    for kind in kinds.values():
        for _ in range(WARM_CALLS):
            kind()
    taken = _later(site, kinds)
    rows_of = []
    if not site.watch.on_gpu:  # tells a product's time from that of its call
        rows_of += [fits.Enqueued(taken["products"], 0, PRODUCTS, 0, 0)] * 3
    for name in ENQUEUED:
        matmuls, moved, signals = counts(plan(problem, Schedule.parse(name), site.watch.rank))
        rows_of.append(fits.Enqueued(taken[name], 1, matmuls, moved, signals))
    each = fits.host(site.watch.gather(rows_of)[0])
    # A CPU carries the collective out, too, whose own time is in its own block.
    alone = taken.get("collective", 0.0)
    collective_call = max(taken["serial:collective"] - alone - each["matmul"], 0.0)
    note = f"least squares over {len(ENQUEUED)} schedules of {rows} rows per rank; "
    note += (
        "how much later warm calls, which the engine replays, are through on an idle GPU"
        if site.watch.on_gpu
        else "on a CPU a call is carried out by its host"
    )
    source = site.provenance("fitted", note)
    return Host(collective_call=collective_call, provenance=source, **each)


def _later(site: Site, calls: dict[str, Any]) -> dict[str, float]:
    """Seconds by which calls are later through where a device waits for its host.

    Not the host's own time to enqueue them, which is longer behind others, and without what a GPU
    takes to begin.
    """
    idle = site.time("host", calls, mode="idle", share=HOST_SHARE, most=HOST_ROUNDS)
    if not site.watch.on_gpu:
        return {name: one.seconds for name, one in idle.items()}
    queued = site.time("host", calls, mode="queued", share=1 - HOST_SHARE, most=HOST_ROUNDS)
    return {name: max(idle[name].seconds - queued[name].seconds, 0.0) for name in calls}


# The rule.


def thresholds(site: Site) -> Thresholds:
    _needs_peers(site)
    group, device = site.watch.group, site.watch.device
    observed = []
    for m, n, k in site.effort.rule:
        rows = (m // site.world,) * site.world
        problem = Problem("all_gather_matmul", rows, n, k, site.effort.dtype)
        operands = Operands(problem, site.watch.rank, device)
        operands.random(0)

        def call(name: str, o: Operands = operands) -> Callable[[], Any]:
            return lambda: ficco.all_gather_matmul(o.a_LK, o.b_KN, group=group, schedule=name)

        calls = {name: call(name) for name in ROWS}
        found = site.time("thresholds", calls, share=1 / len(site.effort.rule))
        seconds = {name: one.seconds for name, one in found.items()}
        observed.append(Observation(problem, seconds))
        site.watch.release()
    fitted = fit_thresholds(observed)
    return replace(fitted, provenance=site.provenance("fitted", fitted.provenance.note))


#: In this order: what a step needs of the machine comes before it.
STEPS = (
    Step("gemm", gemm),
    Step("copies", copies),
    Step("kernel_copies", kernel_copies),
    Step("topology", topology),
    Step("all_gather", all_gather),
    Step("reduce_scatter", reduce_scatter),
    Step("all_to_all", all_to_all),
    Step("all_reduce", all_reduce),
    Step("memory", memory),
    Step("contention", contention),
    Step("host", host),
    Step("thresholds", thresholds),
)
