"""Steps that time a rank's own work: products, one by one and in rows that heat up the device,
calls of attention, and copies within memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

import torch

from ficco.accelerator import gpu
from ficco.compute.attention import Heads, Result, backward, by_heads
from ficco.compute.attention import attention as attend
from ficco.heuristics import problem_of_sizes
from ficco.machine import (
    SCALED_PRODUCTS,
    AttentionCalls,
    Fingerprint,
    Gemm,
    Machine,
    Memory,
    Provenance,
    nearest,
)
from ficco.problems.mask import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, LibraryCall, Rectangle
from ficco.problems.scaling import MULTIPLE, SCALED
from ficco.runtime.workspace import workspace_of
from ficco.schedules import Schedule
from ficco.tools.bench.measure import MeasuredCalls, Stopwatch
from ficco.tools.tune import fits
from ficco.tools.tune.effort import EFFORTS, Attends, Shape
from ficco.tools.tune.fits import Errors, Sample, errors, fit
from ficco.tools.tune.site import Site

#: The operator and schedule that show whether an engine's library has a recipe.
GATHERS, SERIAL = "all_gather_matmul", Schedule.parse("serial")
#: Share of the seconds of products for rows that heat up the device.
HEAT_SHARE = 0.1
#: Columns of the tiled product's operands are multiples of this.
TMA = 8
#: Rows and columns of its tiles (ficco/compute/tiled/worklist.py); two blocks of 128 rows can share
#: loads.
TILES = (128, 256), (128, 160, 192, 224, 256)
#: Seconds for each kind of product where the rest of a machine is not measured.
REFIT_S = 5.0
#: As many rounds as fit into the seconds.
MANY = 1 << 20


def gemm(site: Site) -> Gemm:
    rows = row_times(site, site.effort.heating, site.effort.rows)
    heat = fits.heat(rows)
    shapes = site.effort.gemms
    measured = samples(site, shapes, row_of, heat)
    known = known_gemm(site)
    peak = known.peak if known is not None and site.watch.on_gpu else None  # of the data sheet
    longest = max(one.seconds for one in rows)
    note = "burst and sustained: " if heat.limited else "no power limit in "
    note += f"{len(rows)} rows of products of up to {longest * 1e3:.3g} ms, "
    note += f"errors {heat.error:.1%}"
    return fitted(site, measured, heat, note, peak=peak, known=known)


def scaled(site: Site, recipe: str) -> Gemm | str:
    """The library's products of float8 operands by a recipe, or the reason to skip them."""
    own = scaled_site(site, recipe)
    if isinstance(own, str):
        return own
    heat = fits.heat_of(site.machine.gemm)
    measured = samples(own, own.effort.gemms, row_of, heat, step=SCALED_PRODUCTS[recipe])
    return fitted(own, measured, heat, "burst and sustained as of gemm")


def scaled_site(site: Site, recipe: str) -> Site | str:
    """The site with float8 operands by a recipe, and the products that the recipe allows, or the
    reason not to measure them."""
    if not site.effort.seconds[SCALED_PRODUCTS[recipe]]:
        return "no rate on CPUs, which emulate float8"
    engine = workspace_of(site.watch.group, site.watch.device).engine
    of_problem = partial(problem_of_sizes, GATHERS, 512, 512, 512, world=site.world)
    names = [name for name in SCALED if name.endswith(f"-{recipe}")]
    served = [one for one in names if not engine.refuses(of_problem(dtype=one), SERIAL)]
    if not served:
        return "the library has no such products on this device"
    rules = SCALED[served[0]][1].rules
    shapes = tuple(
        shape
        for shape in site.effort.gemms
        if shape.batch == 1
        and not (shape.m % rules.rows or shape.n % MULTIPLE or shape.k % MULTIPLE)
    )
    return replace(site, effort=replace(site.effort, dtype=served[0], gemms=shapes))


def tiled(site: Site) -> Gemm | str:
    """The tiled product, without waits, or the reason to skip it."""
    engine = workspace_of(site.watch.group, site.watch.device).engine
    gemm = site.machine.gemm
    if not engine.capabilities().tiles or gemm is None:
        return "no kernel waits for tiles on this device" if gemm else "gemm was not measured"

    def row(parts: MeasuredCalls, shape: Shape, count: int) -> Callable[[], Any]:
        return repeated(engine.tiled_product(*parts.operands(*shape[:3])), count)

    shapes = [one for one in site.effort.gemms if one.plain and not (one.n % TMA or one.k % TMA)]
    heat = fits.heat_of(gemm)
    measured = samples(site, shapes, row, heat)
    known = {"tiles": TILES, "peak": gemm.peak}
    return fitted(site, measured, heat, "burst and sustained as of gemm", **known)


def experts(site: Site) -> Gemm:
    """Batches of products with a matrix each."""
    known, heat = site.machine.gemm, fits.heat_of(site.machine.gemm)
    measured = samples(site, site.effort.experts, row_of, heat, step="experts")
    peak = known.peak if known is not None and site.watch.on_gpu else None
    return fitted(site, measured, heat, "burst and sustained as of gemm", peak=peak, known=known)


def fitted(site: Site, measured: list[Sample], heat: fits.Heat, note: str, **known: Any) -> Gemm:
    """The model fitted to samples; ``known``: arguments of :func:`ficco.tools.tune.fits.fit`."""
    model = fit(measured, units=units(site), **known)
    error = errors(model, measured)
    note = f"{len(measured)} products of {site.effort.dtype}, errors {error}; {note}"
    source = site.provenance("fitted", note)
    return replace(model, burst=heat.burst, sustained=heat.sustained, provenance=source)


#: Measures a block of products that a machine need not have.
MORE: dict[str, Callable[[Site], Gemm | str]] = {
    **{block: partial(scaled, recipe=recipe) for recipe, block in SCALED_PRODUCTS.items()},
    "experts": experts,
}


def refitted(watch: Stopwatch, machine: Machine, more: Sequence[str] = ()) -> Machine:
    """A machine with products as they are on this device, measured for a few seconds, some blocks
    of :data:`MORE` included."""
    quick = EFFORTS[watch.device.type, True]
    times = dict.fromkeys(("gemm", *more), REFIT_S)
    effort = replace(quick, seconds={**quick.seconds, **times})

    def source(kind: str, note: str) -> Provenance:
        return Provenance(kind, f"{datetime.now(UTC):%Y-%m-%d}", note=note)

    site = Site(watch, effort, machine, source)
    site.machine = replace(machine, gemm=gemm(site))
    measured = {"tiled": tiled(site), **{block: MORE[block](site) for block in more}}
    blocks: dict[str, Any] = {
        name: None if isinstance(block, str) else block for name, block in measured.items()
    }
    return replace(site.machine, **blocks)


Row = Callable[[MeasuredCalls, Shape, int], Callable[[], Any]]


def samples(
    site: Site,
    shapes: Sequence[Shape],
    row: Row,
    heat: fits.Heat = fits.COLD,
    step: str = "gemm",
) -> list[Sample]:
    """Seconds of products, timed several in a row, without the pace of the device's temperature
    and without what ``heat`` adds to a row."""
    parts = site.parts()
    order = sorted(shapes, key=lambda s: s.batch * s.m * s.k + s.k * s.n, reverse=True)
    reserve(parts, (*shapes, site.effort.reference))
    calls = {str(i): row(parts, shape, shape.in_a_row) for i, shape in enumerate(order)}
    seconds = cold_seconds(site, parts, calls, heat, step)
    return [
        Sample(*s[:4], site.itemsize, s.wide, seconds[str(i)] / s.in_a_row, s.rights)
        for i, s in enumerate(order)
    ]


def cold_seconds(
    site: Site,
    parts: MeasuredCalls,
    calls: dict[str, Callable[[], Any]],
    heat: fits.Heat,
    step: str,
) -> dict[str, float]:
    """Seconds of calls as :func:`samples` has those of products."""
    references = [f"reference {i}" for i in range(3)]
    paced = {name: row_of(parts, site.effort.reference, 1) for name in references}
    times = site.time(step, calls | paced, share=1.0 - HEAT_SHARE)
    return {name: heat.cold(taken) for name, taken in fits.steadied(times, references).items()}


def reserve(parts: MeasuredCalls, shapes: Sequence[Shape]) -> None:
    """Grow the memory of all operands before the first is cut from it."""
    parts.matrix("a", max(s.batch * s.m * s.k for s in shapes), 1)
    parts.matrix("b", max(s.rights * s.k * s.n for s in shapes), 1)
    parts.matrix("out", max(s.batch * s.m * s.n for s in shapes), 1)


def row_of(parts: MeasuredCalls, shape: Shape, count: int) -> Callable[[], Any]:
    """A call of ``count`` products in a row."""
    how = ("batch", "wide", "apart", "turned")
    call = parts.matmul(*shape[:3], **{name: getattr(shape, name) for name in how})
    return repeated(call, count)


def repeated(call: Callable[[], Any], count: int) -> Callable[[], Any]:
    def run() -> None:
        for _ in range(count):
            call()

    return run


def row_times(site: Site, shapes: Sequence[Shape], rows: Sequence[int]) -> list[fits.RowTime]:
    """Seconds of rows of products, of few products up to a number that heats up the device.

    Each row is repeated for a while, with pauses as between benchmarked calls: a power limit looks
    back over many rows, so that shuffled ones would all be as slow as the longest. The second half
    of the times counts.
    """
    parts, measured = site.parts(), []
    share = HEAT_SHARE / (len(shapes) * len(rows))
    for shape in shapes:
        for count in rows:
            row = row_of(parts, shape, count)
            times = site.time("gemm", {"row": row}, share=share, most=MANY)["row"]
            steady = median(times[len(times) // 2 :])
            measured.append(fits.RowTime(f"{shape.m} x {shape.n} x {shape.k}", count, steady))
    return measured


def known_gemm(site: Site) -> Gemm | None:
    """The block of the file or, for a GPU, of the nearest machine with this accelerator; it has the
    dtypes that are not measured."""
    machine = site.machine
    if machine.gemm is not None or not site.watch.on_gpu:
        return machine.gemm
    alike = nearest(Fingerprint(machine.accelerator, machine.ranks))
    return None if alike is None else alike.gemm


def units(site: Site) -> int:
    """Processors that work on a tile each."""
    if not site.watch.on_gpu:
        return 1
    return int(gpu.get_device_properties(site.watch.device).multi_processor_count)


def attention(site: Site) -> AttentionCalls:
    """The model of calls of attention.

    Raises:
        ValueError: the products, whose share it is, were never measured.
    """
    gemm = site.machine.gemm
    if gemm is None:
        raise ValueError("attention: required the block 'gemm', whose rate it is a share of")
    calls = site.effort.attends
    counted, seconds = list(map(call_of, calls)), attention_seconds(site, calls)
    start, block, more, rates = fits.attention(gemm.units, counted, seconds)
    full = gemm.rate(site.itemsize)
    shares, backwards = (
        tuple((float(size), rate / full) for (back, size), rate in rates.items() if back == one)
        for one in (False, True)
    )
    backward_of = {"backward": backwards, "backward_start": more}
    model = partial(AttentionCalls, start, block, shares, **backward_of)
    times = partial(model(site.provenance("fitted", "")).times, gemm, site.itemsize)
    error = Errors.of([times(*one)[0] for one in counted], seconds)
    note = f"{len(calls)} calls of {site.effort.dtype}, errors {error}; "
    return model(site.provenance("fitted", note + "burst and sustained as of gemm"))


def call_of(call: Attends) -> LibraryCall:
    """The call as plans count it."""
    products = BACKWARD_PRODUCTS if call.back else FORWARD_PRODUCTS
    return rectangle_of(call).call(call.heads, call.size, products)


def rectangle_of(call: Attends) -> Rectangle:
    return Rectangle(0, call.queries, 0, call.keys, None, 0 if call.causal else None)


def attention_seconds(site: Site, attends: Sequence[Attends]) -> list[float]:
    """Seconds of calls, without the pace of the device's temperature."""
    parts, heat = site.parts(), fits.heat_of(site.machine.gemm)
    reserve(parts, (site.effort.reference,))
    parts.matrix("q", max(one.queries * one.heads * one.size for one in attends), 1)
    parts.matrix("kv", max(2 * one.keys * one.kv_heads * one.size for one in attends), 1)
    calls = {str(i): attention_call(parts, one) for i, one in enumerate(attends)}
    seconds = cold_seconds(site, parts, calls, heat, "attention")
    return [seconds[str(i)] for i in range(len(attends))]


def attention_call(parts: MeasuredCalls, call: Attends) -> Callable[[], Any]:
    """A call on rows as in plans: of all heads, with keys and values in one matrix."""
    q = parts.matrix("q", call.queries, call.heads * call.size)
    kv = parts.matrix("kv", call.keys, 2 * call.kv_heads * call.size)
    kv = kv.view(call.keys, 2, 1, call.kv_heads, call.size)
    heads = Heads(
        by_heads(q.view(call.queries, 1, call.heads, call.size)),
        by_heads(kv[:, 0]),
        by_heads(kv[:, 1]),
    )
    rectangle, scale = rectangle_of(call), call.size**-0.5
    if not call.back:
        return partial(attend, heads, rectangle, scale)
    forward = Result(*attend(heads, rectangle, scale), grad=heads.q)
    return partial(backward, heads, forward, rectangle, scale)


def memory(site: Site) -> Memory:
    calls = {}
    for size in site.effort.moves:
        src = torch.zeros(size, dtype=torch.uint8, device=site.watch.device)
        calls[str(size)] = partial(torch.empty_like(src).copy_, src)
    times = site.time("memory", calls)
    pairs = [(2.0 * size, median(times[str(size)])) for size in site.effort.moves]
    bandwidth, latency = fits.memory(pairs)
    source = site.provenance("measured", "copies within a rank, bytes read and written")
    return Memory(capacity(site), bandwidth, source, latency)


def capacity(site: Site) -> float:
    """Bytes of a GPU's memory, or a rank's part of the host's."""
    if site.watch.on_gpu:
        return float(gpu.get_device_properties(site.watch.device).total_memory)
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // site.world)
