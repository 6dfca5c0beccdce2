"""One traced call per schedule, as measured and as planned."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ficco.bench.inputs import Operands
from ficco.ops.all_gather_matmul import traced
from ficco.timeline import Rates, Timeline, measured, planned

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def trace_all(schedules: Sequence[str], operands: Operands, group: ProcessGroup) -> list[Timeline]:
    """The planned and the measured Timeline of every schedule that is served here, in turn.

    The plan is executed on paper at the rates that the steps of the measured call reached, so that
    both differ in what waited for what. Collective; the result is the same on every rank.
    """
    found: list[Timeline] = []
    for schedule in schedules:
        with suppress(NotImplementedError):
            a, b = operands.a_shard_SK, operands.b_KN
            traced(a, b, group=group, schedule=schedule)  # first use is slow
            _, plan, spans = traced(a, b, group=group, schedule=schedule)
            everyone: list[Any] = [None] * group.size()
            dist.all_gather_object(everyone, (plan, spans), group=group)
            plans = [plan for plan, _ in everyone]
            real = measured(f"{schedule}: measured", plans, [spans for _, spans in everyone])
            rates = Rates.of(plans, real)
            found += [planned(f"{schedule}: planned", plans, rates), real]
    return found
