"""What a rank's calls of the library's attention take, beside its products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, median
from typing import Any

from ficco.compute.attention import Heads, Result, backward, by_heads
from ficco.compute.attention import attention as attend
from ficco.machine import AttentionCalls
from ficco.problems.mask import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, LibraryCall, Rectangle
from ficco.tools.bench.series import MeasuredCalls
from ficco.tools.tune import fits
from ficco.tools.tune.effort import Attends
from ficco.tools.tune.products import cold_seconds, reserve
from ficco.tools.tune.site import Site


def attention(site: Site) -> AttentionCalls:
    """The model of calls of attention.

    Raises:
        ValueError: the products, whose share it is, were never measured.
    """
    gemm = site.machine.gemm
    if gemm is None:
        raise ValueError("attention: required the block 'gemm', whose rate it is a share of")
    asked = site.effort.attends
    counted, seconds = list(map(call_of, asked)), call_seconds(site, asked)
    start, block, more, rates = fits.attention(gemm.units, counted, seconds)
    full = gemm.rate(site.itemsize)
    shares, backwards = (
        tuple((float(size), rate / full) for (back, size), rate in rates.items() if back == one)
        for one in (False, True)
    )
    kept = {"backward": backwards, "backward_start": more}
    model = partial(AttentionCalls, start, block, shares, **kept)
    times = partial(model(site.provenance("fitted", "")).times, gemm, site.itemsize)
    taken = zip(counted, seconds, strict=True)
    errors = [abs(times(*one)[0] / took - 1) for one, took in taken]
    note = f"{len(asked)} calls of {site.effort.dtype}, errors {median(errors):.1%} median, "
    note += f"{mean(errors):.1%} mean, {max(errors):.1%} worst; burst and sustained as of gemm"
    return model(site.provenance("fitted", note))


def call_of(asked: Attends) -> LibraryCall:
    """As plans count it."""
    products = BACKWARD_PRODUCTS if asked.back else FORWARD_PRODUCTS
    return rectangle_of(asked).call(asked.heads, asked.size, products)


def rectangle_of(asked: Attends) -> Rectangle:
    """Its rows and its mask."""
    return Rectangle(0, asked.queries, 0, asked.keys, None, 0 if asked.causal else None)


def call_seconds(site: Site, asked: Sequence[Attends]) -> list[float]:
    """Seconds of calls, without the pace of the device's temperature."""
    parts, gemm = site.parts(), site.machine.gemm
    reserve(parts, (site.effort.reference,))
    parts.matrix("q", max(one.queries * one.heads * one.size for one in asked), 1)
    parts.matrix("kv", max(2 * one.keys * one.kv_heads * one.size for one in asked), 1)
    calls = {str(i): call(parts, one) for i, one in enumerate(asked)}
    heat = fits.heat_of(gemm) if gemm else fits.COLD
    seconds = cold_seconds(site, parts, calls, heat, "attention")
    return [seconds[str(i)] for i in range(len(asked))]


def call(parts: MeasuredCalls, asked: Attends) -> Callable[[], Any]:
    """A call on rows as plans have them: of all heads, keys and values side by side."""
    q = parts.matrix("q", asked.queries, asked.heads * asked.size)
    kv = parts.matrix("kv", asked.keys, 2 * asked.kv_heads * asked.size)
    kv = kv.view(asked.keys, 2, 1, asked.kv_heads, asked.size)
    heads = Heads(
        by_heads(q.view(asked.queries, 1, asked.heads, asked.size)),
        by_heads(kv[:, 0]),
        by_heads(kv[:, 1]),
    )
    rectangle, scale = rectangle_of(asked), asked.size**-0.5
    if not asked.back:
        return partial(attend, heads, rectangle, scale)
    given = Result(*attend(heads, rectangle, scale), grad=heads.q)
    return partial(backward, heads, given, rectangle, scale)
