"""What a rank's own memory holds, and what copies within it take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ficco.machine import Memory
from ficco.tune import fits
from ficco.tune.site import Site


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
