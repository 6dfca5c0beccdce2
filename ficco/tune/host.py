"""What the host takes to enqueue a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ficco
from ficco.machine import Host
from ficco.plan import Plan
from ficco.problem import Problem
from ficco.schedules import Schedule, plan
from ficco.tune import fits
from ficco.tune.site import Site

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
#: Products in a row whose host time is taken at once.
PRODUCTS = 8
#: Calls before host time is taken: an engine may keep what it does of the first few.
WARM_CALLS = 12
#: Most rounds in which host time is taken, and of its seconds those where the device is idle.
HOST_ROUNDS, HOST_SHARE = 200, 0.6


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
