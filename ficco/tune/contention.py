"""By how much products and communication slow each other down."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ficco.bench.series import behind, beside
from ficco.bench.stats import geomean
from ficco.machine import Contention
from ficco.tune import fits
from ficco.tune.copies import ONE_BY_ONE
from ficco.tune.site import Site, needs_peers


def contention(site: Site) -> Contention:
    needs_peers(site)
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
            fits.slowdown(
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
            fits.slowdown(
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
