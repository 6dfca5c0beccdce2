"""What the collectives of the library take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ficco.bench import calls as library
from ficco.bench.series import Parts
from ficco.machine import Collective
from ficco.tune.site import Site, needs_peers


def all_gather(site: Site) -> Collective:
    needs_peers(site)
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
    needs_peers(site)
    parts, sizes = site.parts(), site.effort.exchanges or site.effort.sizes
    call(parts, max(sizes))  # grows the memory that the others share
    found = site.time(step, {str(size): call(parts, size) for size in sizes})
    curve = tuple((float(size), found[str(size)].seconds) for size in sizes)
    return Collective(curve, site.provenance("measured", f"{step.replace('_', '-')}, {unit}"))
