"""What ``auto`` compares for a layer of experts."""

from __future__ import annotations

from dataclasses import replace

from ficco.heuristics.family import Family
from ficco.schedules.experts import ExpertLayer, expert_plans

#: Predicted gain over serial below which serial is taken. Measured on one H100 with replayed
#: arrivals (docs/results/experts-replay-h100-4.md): gains of 4 to 6 % that were predicted for 8
#: experts of 4096 x 14336 were losses of 1 to 3 %. There the card is at its power limit: what it
#: waits for tokens it makes up for by higher clocks.
MARGIN = 0.08


def octave(layer: ExpertLayer) -> ExpertLayer:
    """The layer with the next power of two as its capacity. Capacities that follow from tokens
    change from step to step."""
    return replace(layer, capacity=1 << (layer.capacity - 1).bit_length())


#: ``uniform-fused-1d`` cuts by experts, whose weights are then read once; of unequal pieces little
#: is left to wait for before the first products and after the last ones.
EXPERTS = Family(
    expert_plans,
    compared=(
        "serial",
        "growing",
        "growing:pieces=2",
        "shard-overlap",
        "shrinking",
        "hetero-fused-1d:pieces=2",
        "uniform-fused-1d:pieces=2",
        "uniform-fused-1d:pieces=1+2+1,copy=3",
        "uniform-fused-1d:pieces=1+3+3+1,copy=3",
    ),
    default="serial",
    margin=MARGIN,
    alike=octave,
)
