"""Whether the figures of a machine's file still hold: a few points, measured again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch.distributed as dist

import ficco
from ficco.heuristics.model import lacking
from ficco.machine import COLLECTIVES, SCALED_PRODUCTS, Gemm, Machine, Provenance
from ficco.problems.products import Problem
from ficco.schedules import Schedule
from ficco.simulate import predict
from ficco.tools.bench.series import Stopwatch
from ficco.tools.launch import local_device
from ficco.tools.tune import communication, fits, products
from ficco.tools.tune.effort import EFFORTS, Shape
from ficco.tools.tune.run import TIMEOUT_S
from ficco.tools.tune.site import Site

#: Products that are measured again, of those that a tuning run measures.
PRODUCTS = 4

#: What is predicted as a whole call.
CALLS = ("serial", "shard-overlap")


@dataclass(frozen=True)
class Point:
    """Seconds that the stored figures give for something, and those measured now."""

    block: str
    what: str
    stored: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.measured / self.stored if self.stored > 0 else float("inf")

    def holds(self, tolerance: float) -> bool:
        """Whether neither is more than ``1 + tolerance`` times the other."""
        return 1 / (1 + tolerance) <= self.ratio <= 1 + tolerance


def check(machine: Machine, device: str) -> list[Point]:
    """Measure a few points of a machine on ``"cpu"`` or ``"cuda"``; collective. The same on every
    rank."""
    watch = Stopwatch(dist.group.WORLD, local_device(device))
    site = Site(watch, EFFORTS[device, True], machine, lambda kind, note: Provenance(kind))
    points: list[Point] = []
    with ficco.options(timeout_s=TIMEOUT_S, on_timeout="raise"):
        for some in (_gemm, _scaled, _attention, _experts, _copies, _collective, _memory, _calls):
            points += some(site)
            watch.release()
    watch.close()
    return points


def _gemm(site: Site) -> Iterator[Point]:
    model = site.machine.gemm
    if model is None:
        return
    yield from _products(site, "gemm", model, _plain(site))
    shape, longest = site.effort.heating[0], site.effort.rows[-1]
    (time,) = products.row_times(site, (shape,), (longest,))
    stored = longest * model.seconds(*shape[:3], itemsize=site.itemsize)
    yield Point("gemm", f"{longest} of {time.product} in a row", model.heated(stored), time.seconds)


def _plain(site: Site) -> list[Shape]:
    return [one for one in site.effort.gemms if one.plain]


def _products(site: Site, block: str, model: Gemm, shapes: Sequence[Shape]) -> Iterator[Point]:
    usual = sorted(shapes, key=lambda one: one.flops)
    chosen = usual[len(usual) // 4 :: max(len(usual) // (PRODUCTS + 1), 1)][:PRODUCTS]
    rows = {shape[:4]: shape.in_a_row for shape in chosen}
    for one in products.samples(site, chosen, products.row_of, step=block):
        size = one.m, one.n, one.k
        row = rows[(*size, one.batch)]
        how = {"batch": one.batch, "rights": one.rights, "itemsize": site.itemsize}
        stored = model.heated(row * model.seconds(*size, **how)) / row
        what = f"{one.batch} of " * (one.batch > 1) + "{} x {} x {}".format(*size)
        yield Point(block, what, stored, one.seconds)


def _attention(site: Site) -> Iterator[Point]:
    model, gemm = site.machine.attention, site.machine.gemm
    if model is None or gemm is None:
        return
    chosen = site.effort.attends[2::4]
    for asked, seconds in zip(chosen, products.attention_seconds(site, chosen), strict=True):
        stored, _ = model.times(gemm, site.itemsize, *products.call_of(asked))
        what = f"{asked.queries} x {asked.keys}, size {asked.size}" + ", causal" * asked.causal
        what += ", backward" * asked.back
        yield Point("attention", what, stored, seconds)


def _experts(site: Site) -> Iterator[Point]:
    model = site.machine.experts
    if model is not None:
        yield from _products(site, "experts", model, site.effort.experts)


def _scaled(site: Site) -> Iterator[Point]:
    """Products of float8 operands, by each recipe of which the file has some."""
    for recipe, block in SCALED_PRODUCTS.items():
        model, there = getattr(site.machine, block), products.scaled_site(site, recipe)
        if model is not None and there is not None:
            yield from _products(there, block, model, _plain(there))


def _copies(site: Site) -> Iterator[Point]:
    model, sizes = site.machine.copies, site.effort.sizes
    if model is None or site.world < 2:
        return
    if site.crowded:  # the block has the bytes' time alone; the rest is in the block host
        curve = fits.copies(communication.copy_times(site, sizes, site.effort.pieces)).curve
        for nbytes, rate in curve[1:]:
            what = f"{nbytes / 1024:.0f} KiB"
            yield Point("copies", what, nbytes / model.rate(nbytes), nbytes / rate)
        return
    for one in communication.copy_times(site, (sizes[1], sizes[-1]), (1,)):
        row = one.count * one.nbytes / model.rate(one.nbytes) + (one.count - 1) * model.gap
        what = f"{one.count} of {one.nbytes / 1024:.0f} KiB"
        yield Point("copies", what, model.latency + row, one.seconds)


def _collective(site: Site) -> Iterator[Point]:
    for name in COLLECTIVES.values():
        model = getattr(site.machine, name)
        if model is None or site.world < 2:
            continue
        for nbytes, seconds in communication.collective(site, name).curve[1::2]:
            what = f"{nbytes / 1024:.0f} KiB a rank"
            yield Point(name, what, model.seconds(nbytes), seconds)


def _memory(site: Site) -> Iterator[Point]:
    model = site.machine.memory
    if model is None:
        return
    now, size = products.memory(site), 2 * site.effort.moves[-1]
    stored = model.latency + size / model.bandwidth
    yield Point("memory", f"{size >> 20} MiB", stored, now.latency + size / now.bandwidth)


def _calls(site: Site) -> Iterator[Point]:
    """Whole calls, as the simulation predicts them from all blocks together."""
    mode = site.watch.mode
    if site.world < 2 or lacking(site.machine, mode):
        return
    m, n, k = site.effort.rule[-1]
    rows = (m // site.world,) * site.world
    problem = Problem("all_gather_matmul", rows, n, k, site.effort.dtype)
    parts = site.parts()
    a, b = parts.matrix("a", rows[0], k), parts.matrix("b", k, n)
    names = CALLS
    if site.machine.kernel_copies is not None and communication.copies_by_kernel(site):
        names = (*CALLS, communication.IN_FRONT)
    series = site.time("thresholds", site.gathers(a, b, names), share=0.5)
    for name in names:
        stored = predict(problem, Schedule.parse(name), site.machine, mode)
        yield Point("call", f"{name}, {m} x {n} x {k}", stored, median(series[name]))


def report(points: list[Point], tolerance: float, again: str = "ficco tune") -> str:
    """The points as text, and whether all of them hold; ``again`` measures the machine anew."""
    lines = [f"{'':44} {'stored':>12} {'measured':>12} {'ratio':>6}"]
    for point in points:
        stored, measured = (f"{s * 1e3:.4g} ms" for s in (point.stored, point.measured))
        mark = "" if point.holds(tolerance) else "  off"
        name = f"{point.block} {point.what}"
        lines.append(f"{name:44} {stored:>12} {measured:>12} {point.ratio:6.2f}{mark}")
    off = [point.block for point in points if not point.holds(tolerance)]
    rule = f"no more than {1 + tolerance:g} times as much or as little"
    end = f"all {len(points)} points hold ({rule})"
    if not points:
        end = "the file holds nothing that could be checked"
    elif off:
        blocks = " ".join(dict.fromkeys(block for block in off if block != "call"))
        remedy = f"{again} --only {blocks}" if blocks else again
        end = f"{len(off)} of {len(points)} points are off ({rule} holds); measure again: {remedy}"
    return "\n".join([*lines, end])
