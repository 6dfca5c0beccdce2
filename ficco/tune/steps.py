"""The steps of a tuning run: each measures one block of a Machine, on all ranks together.

Every rank ends a step with the same figures, those of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ficco.tune import collectives, contention, copies, host, memory, products, thresholds
from ficco.tune.site import Site


@dataclass(frozen=True)
class Step:
    """One step: the block that it measures, and how; None leaves the block as it is."""

    name: str
    measure: Callable[[Site], Any]


#: In this order: what a step needs of the machine comes before it.
STEPS = (
    Step("gemm", products.gemm),
    Step("copies", copies.copies),
    Step("kernel_copies", copies.kernel_copies),
    Step("topology", copies.topology),
    Step("all_gather", collectives.all_gather),
    Step("reduce_scatter", collectives.reduce_scatter),
    Step("all_to_all", collectives.all_to_all),
    Step("all_reduce", collectives.all_reduce),
    Step("memory", memory.memory),
    Step("contention", contention.contention),
    Step("host", host.host),
    Step("thresholds", thresholds.thresholds),
)
