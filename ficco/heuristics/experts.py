"""Which schedule a layer of experts takes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ficco.heuristics.decide import Decision, described
from ficco.heuristics.model import lacking
from ficco.machine import Machine
from ficco.schedules import Schedule
from ficco.schedules.experts import ExpertLayer, expert_plans
from ficco.simulate import simulate

#: What is compared. Capacities that follow from tokens change from step to step, so that a
#: decision is for all capacities up to the next power of two.
#: ``uniform-fused-1d`` cuts by experts, whose weights are then read once; of unequal pieces little
#: is left to wait for before the first products and after the last ones.
COMPARED = (
    "serial",
    "growing",
    "growing:pieces=2",
    "shard-overlap",
    "shrinking",
    "hetero-fused-1d:pieces=2",
    "uniform-fused-1d:pieces=2",
    "uniform-fused-1d:pieces=1+2+1,copy=3",
    "uniform-fused-1d:pieces=1+3+3+1,copy=3",
)

#: Predicted gain over serial below which serial is taken. Measured on one H100 with replayed
#: arrivals (docs/results/experts-replay-h100-1.md): gains of 4 to 6 % that were predicted for 8
#: experts of 4096 x 14336 were losses of 1 to 3 %. There the card is at its power limit: what it
#: waits for tokens it makes up for by higher clocks.
MARGIN = 0.08


def decide_for_experts(
    layer: ExpertLayer, schedule: str | Schedule, machine: Machine | None, mode: str = "queued"
) -> Decision:
    """The schedule that was asked for; for ``"auto"`` the fastest on the machine as simulated,
    unless it gains less than ``MARGIN`` over serial; ``serial`` where not enough is known of it.

    Raises:
        ValueError: this is no schedule.
    """
    if not isinstance(schedule, (str, Schedule)):
        raise ValueError(f"schedule: required 'auto', a name or a Schedule, got {schedule!r}")
    if schedule != "auto":
        parsed = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
        return Decision(parsed, "caller", "given")
    if layer.world == 1:
        return Decision(Schedule.parse("serial"), "rule", "one rank has nothing to wait for")
    known = described(machine, layer.world) if machine else None
    if known is None or (lacks := lacking(known, mode)):
        why = f"lacks {', '.join(lacks)}" if known else "is not described for these ranks"
        return Decision(Schedule.parse("serial"), "fallback", f"the machine {why}")
    octave = 1 << (layer.capacity - 1).bit_length()
    seconds = _simulated(replace(layer, capacity=octave), known, mode)
    names = sorted(seconds, key=seconds.__getitem__)
    chosen, why = names[0], ""
    if chosen != "serial" and seconds["serial"] < (1 + MARGIN) * seconds[chosen]:
        chosen, why = "serial", f"; serial unless others gain {MARGIN:.0%}"
    times = ", ".join(f"{name} {seconds[name] * 1e3:.3f} ms" for name in names)
    reason = f"capacity {octave} simulated on {known.name}: {times}{why}"
    return Decision(Schedule.parse(chosen), "model", reason, machine=known, mode=mode)


@lru_cache(maxsize=1024)
def _simulated(layer: ExpertLayer, machine: Machine, mode: str) -> dict[str, float]:
    """Seconds by schedule."""
    return {
        name: simulate(expert_plans(layer, Schedule.parse(name)), machine, mode).stop_s
        for name in COMPARED
    }
