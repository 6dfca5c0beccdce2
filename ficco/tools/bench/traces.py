"""One traced call per schedule, as measured and as planned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ficco.accelerator import gpu
from ficco.dma.engine import Span, fingerprint
from ficco.machine import Machine
from ficco.machine.model import ATTENTION, flat
from ficco.plan import Plan
from ficco.runtime.workspace import tracing
from ficco.simulate import simulate
from ficco.simulate.timeline import Timeline, assemble, dumps, work
from ficco.tools.bench.draw import draw, trace

#: Rate of what took no time that could be measured.
UNSEEN = 1e18

#: About 20 ms of a GPU: a traced call of hundreds of steps is enqueued by then.
SLEEP_CYCLES = 40_000_000


def trace_all(
    calls: Mapping[str, Callable[[], Any]], group: ProcessGroup, device: torch.device
) -> list[Timeline]:
    """The planned and the measured Timeline of every call that is served here, in turn.

    The plan is simulated at the rates that the steps of the measured call reached, so that both
    differ in what waited for what. Collective; the result is the same on every rank.
    """
    timelines: list[Timeline] = []
    for name, call in calls.items():
        with suppress(NotImplementedError), tracing() as seen:
            call()  # first use is slow
            if device.type == "cuda":  # GPUs wait and begin together while their hosts enqueue
                gpu._sleep(SLEEP_CYCLES)
                dist.all_reduce(torch.zeros(1, device=device), group=group)
            call()
            if len(seen) != 2:  # each call is several, that go by columns
                continue
            plan, mine = seen[-1]
            bare: Any = plan.problem  # without what it has made of itself, functions among it
            everyone: list[Any] = [None] * group.size()
            bare_plan = replace(plan, problem=replace(bare)), mine
            dist.all_gather_object(everyone, bare_plan, group=group)
            plans = [plan for plan, _ in everyone]
            here = fingerprint(device, group.size()).accelerator
            spans = [spans for _, spans in everyone]
            real = measured(f"{name}: measured", plans, spans, f"measured on {here}")
            title, source = f"{name}: planned", f"planned at the rates measured on {here}"
            machine = machine_of(plans, real)
            timelines += [simulate(plans, machine, title=title, source=source), real]
    return timelines


def write(timelines: Sequence[Timeline], csv: Path) -> None:
    """Draw timelines next to a CSV file, and write them for Perfetto and for ``ficco plot``."""
    stem = csv.with_suffix("")
    draw(timelines, f"{stem}_timelines.png", columns=2, ranks=[0])
    trace(timelines, f"{stem}_trace.json")
    Path(f"{stem}_timelines.json").write_text(dumps(timelines))


def measured(
    title: str, plans: Sequence[Plan], spans: Sequence[Sequence[Span]], source: str = "measured"
) -> Timeline:
    """The Timeline of a traced call: a Plan and its Spans for every rank."""
    ranks = [
        [(plan.steps[one.step], one.start, one.stop) for one in sorted(mine, key=lambda s: s.start)]
        for plan, mine in zip(plans, spans, strict=True)
    ]
    return assemble(title, plans, ranks, source)


def machine_of(plans: Sequence[Plan], timeline: Timeline) -> Machine:
    """A machine with the mean rates at which the steps of a measured call ran.

    What was shared or in the way of something else is part of these rates.
    """
    spent: dict[str, float] = defaultdict(float)
    done: dict[str, float] = defaultdict(float)
    for bar in (bar for bars in timeline.ranks for bar in bars):
        spent["copy" if bar.kind == "collective" else bar.kind] += bar.stop_s - bar.start_s
    for plan in plans:
        for step in plan.steps:
            done["copy" if step.op == "collective" else step.op] += max(work(plan, step))
    for kind in ("attend", "apply"):  # at a share of the rate of products
        done["matmul"] += done[kind] / ATTENTION
        spent["matmul"] += spent[kind]
    done["place"] = 2 * done["place"] + done["reduce"]  # read and written
    spent["place"] += spent["reduce"]

    rates = [
        done[kind] / spent[kind] if done[kind] and spent[kind] else UNSEEN
        for kind in ("matmul", "copy", "place")
    ]
    # A mesh: copies to one peer come one after the other, so that none share a link.
    return flat(*rates, ranks=len(plans), kind="mesh", source="measured")
