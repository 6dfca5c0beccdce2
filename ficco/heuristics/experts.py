"""What ``auto`` compares for a layer of experts."""

from __future__ import annotations

from dataclasses import replace

from ficco.heuristics.family import Family
from ficco.heuristics.model import TIE
from ficco.problems.experts import ExpertLayer
from ficco.schedules.experts import expert_plans

#: Predicted gain over serial below which serial is taken. What was taken for 12 layers on one H100
#: with replayed arrivals (docs/results/experts-replay-h100-4.md and -8.md), with predicted gains of
#: 3 % and more, was 1.03 to 1.44 times as fast as serial.
MARGIN = 0.02


def alike(layer: ExpertLayer) -> ExpertLayer:
    """The layer for which a decision is that for this one: of a capacity that is at most an eighth
    larger, one of eight for each power of two. Those that follow from tokens change from step to
    step."""
    step = 1 << max((layer.capacity - 1).bit_length() - 4, 0)
    return replace(layer, capacity=-(-layer.capacity // step) * step)


#: ``uniform-fused-1d`` cuts by experts, whose weights are then read once; of unequal pieces little
#: is left to wait for before the first products and after the last ones. Of those layers, what is
#: fastest as simulated, or first of what is within 1 % of that, loses 0.4 % of the fastest of the
#: seven that were measured in the mean, 1.3 % at worst; without these ties 0.5 and 2.3 %. A second
#: lane gains 1 to 4 % with wide experts and loses 1 to 4 % with narrow ones, as is simulated.
EXPERTS = Family(
    expert_plans,
    compared=(
        "serial",
        "growing",
        "shard-overlap",
        "hetero-fused-1d:pieces=2",
        "uniform-fused-1d:pieces=2",
        "uniform-fused-1d:pieces=1+3+3+1,copy=3",
        "uniform-fused-1d:pieces=1+3+3+1,copy=3,compute=2",
    ),
    default="serial",
    margin=MARGIN,
    tie=TIE,
    alike=alike,
)
