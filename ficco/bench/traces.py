"""One traced call per schedule, as measured and as planned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ficco.accelerator import gpu
from ficco.bench.inputs import Operands
from ficco.dma.engine import Span, fingerprint
from ficco.machine import Machine
from ficco.machine.flat import flat
from ficco.ops.call import run_traced
from ficco.ops.operands import Scales
from ficco.plan import Plan
from ficco.simulate import simulate
from ficco.timeline import Timeline, assemble, work

#: Rate of what took no time that could be measured.
UNSEEN = 1e18

#: About 20 ms of a GPU: a traced call of hundreds of steps is enqueued by then.
SLEEP_CYCLES = 40_000_000


def trace_all(schedules: Sequence[str], operands: Operands, group: ProcessGroup) -> list[Timeline]:
    """The planned and the measured Timeline of every schedule that is served here, in turn.

    The plan is simulated at the rates that the steps of the measured call reached, so that both
    differ in what waited for what. Collective; the result is the same on every rank.
    """
    timelines: list[Timeline] = []
    for schedule in schedules:
        with suppress(NotImplementedError):
            operator = operands.problem.operator
            a, b = operands.a_LK, operands.b_KN
            how = {"scales": Scales(**operands.scales) if operands.scales else None}
            run_traced(operator, a, b, group, schedule, **how)  # first use is slow
            if a.device.type == "cuda":  # GPUs wait and begin together while their hosts enqueue
                gpu._sleep(SLEEP_CYCLES)
                dist.all_reduce(torch.zeros(1, device=a.device), group=group)
            _, plan, spans = run_traced(operator, a, b, group, schedule, **how)
            everyone: list[Any] = [None] * group.size()
            dist.all_gather_object(everyone, (plan, spans), group=group)
            plans = [plan for plan, _ in everyone]
            here = fingerprint(a.device, group.size()).accelerator
            spans = [spans for _, spans in everyone]
            real = measured(f"{schedule}: measured", plans, spans, f"measured on {here}")
            title, source = f"{schedule}: planned", f"planned at the rates measured on {here}"
            machine = machine_of(plans, real)
            timelines += [simulate(plans, machine, title=title, source=source), real]
    return timelines


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
    done["place"] = 2 * done["place"] + done["reduce"]  # read and written
    spent["place"] += spent["reduce"]

    rates = [
        done[kind] / spent[kind] if done[kind] and spent[kind] else UNSEEN
        for kind in ("matmul", "copy", "place")
    ]
    # A mesh: copies to one peer come one after the other, so that none share a link.
    return flat(*rates, ranks=len(plans), kind="mesh", source="measured")
