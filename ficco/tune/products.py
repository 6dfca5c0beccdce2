"""What products take, alone and so many in a row that the device heats up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from ficco.bench.series import Parts, add
from ficco.machine import Fingerprint, Gemm, nearest
from ficco.machine.fit import Sample, errors, fit
from ficco.tune import fits
from ficco.tune.effort import Shape
from ficco.tune.site import Site

#: Products in a row that are timed at once, where they are of fewer operations than this.
ROW_OF_PRODUCTS, SMALL_FLOPS = 4, 2e11
#: Of the seconds for products those in which rows heat the device up.
HEAT_SHARE = 0.1
#: As many rounds as fit into the seconds.
MANY = 1 << 20


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

    calls = {str(i): row_of(parts, shape, in_a_row(shape)) for i, shape in enumerate(order)}
    references = [f"reference {i}" for i in range(3)]
    calls |= {name: row_of(parts, reference, 1) for name in references}
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


def row_of(parts: Parts, shape: Shape, count: int) -> Callable[[], Any]:
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
            row = row_of(parts, shape, count)
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
