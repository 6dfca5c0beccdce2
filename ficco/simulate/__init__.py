"""When the steps of Plans run on a Machine, without a device.

The model is in :mod:`.events`. Where all ranks do the same, one stands for all (:mod:`.mirror`).
The result depends on the arguments only, to the last bit, so that ranks that simulate for
themselves agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ficco.machine import Machine
from ficco.plan import Plan
from ficco.plan.model import paused
from ficco.problems.products import Problem
from ficco.problems.sizes import MODES
from ficco.schedules import Schedule, plan, plans
from ficco.simulate.events import Simulation
from ficco.simulate.mirror import delay_of_host, mirrored, slowest
from ficco.simulate.timeline import SYNC_LANE, Timeline, assemble

__all__ = ["MODES", "predict", "simulate"]


def simulate(
    plans: Sequence[Plan],
    machine: Machine,
    mode: str = "queued",
    title: str = "",
    source: str = "",
) -> Timeline:
    """When the steps of all ranks run.

    Args:
        plans: of all ranks, in their order.
        machine: what it runs on; a group of another size is simulated at the same rates.
        mode: ``"queued"`` or ``"idle"``.
        title, source: of the Timeline; the schedule's name, and that of the machine, if empty.

    Raises:
        ValueError: the machine lacks a block that the plans need, the mode is none, or the plans
            wait for each other for ever.
    """
    source = source or f"simulated on {machine.name}, {mode}"
    with paused():
        ranks = Simulation(plans, machine, mode).run()
    return assemble(title or plans[0].schedule, plans, ranks, source)


def predict(problem: Problem, schedule: Schedule, machine: Machine, mode: str = "queued") -> float:
    """Seconds of a call: until the caller's stream of the slowest rank is done.

    Where shards and blocks are equal and no copies collide, one rank stands for all, with every
    signal taken from its mirror image among the rank's own. That is exact but for steps with pieces
    of all peers and not the own one (hetero-fused), whose products fall in two at another place on
    every rank: there the ranks with the longest products stand for all, which leaves out that the
    others' copies meet a little less contention. On a mesh all ranks are as late as the last one.
    Where such a product is sent over a switch, ranks that get out of step meet at each other's
    ports, so that all are simulated. A host that delays all steps alike is added, not simulated.

    Raises:
        ValueError: as :func:`simulate`.
    """
    delay = delay_of_host(problem, schedule, machine) if mode == "idle" else None
    if delay is not None:
        return _predict(problem, schedule, machine, "queued") + delay
    return _predict(problem, schedule, machine, mode)


@lru_cache(maxsize=4)
def _predict(problem: Problem, schedule: Schedule, machine: Machine, mode: str) -> float:
    with paused():
        mirror = mirrored(problem, schedule, machine, mode)
        if mirror is None:
            simulations = [Simulation(_plans(problem, schedule), machine, mode)]
        else:
            simulations = [
                Simulation([_plan(problem, schedule, rank)], machine, mode, mirror)
                for rank in slowest(problem, schedule, machine)
            ]
        ran = (steps for simulation in simulations for steps in simulation.run())
        stops = (stop for steps in ran for step, _, stop in steps if step.lane != SYNC_LANE)
        return max(stops, default=0.0)


# The same call is often predicted in one mode, then in the other.
_plan = lru_cache(maxsize=8)(plan)
_plans = lru_cache(maxsize=4)(plans)
