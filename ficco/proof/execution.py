"""Execution in enqueue order, and the proof of claims about the order of steps."""

from __future__ import annotations

import numpy as np

from ficco.proof.order import Order
from ficco.proof.rules import Claim, PlanError, demand
from ficco.proof.signals import SignalColumns
from ficco.proof.steps import Steps


def execute(steps: Steps, signals: SignalColumns) -> Order:
    """Find an order in which all steps can run, with each rank's plan as one queue."""
    indices, step = steps.held(steps.of.after)
    after = np.array(indices, np.int64)
    there = (after >= 0) & (after < np.diff(steps.start)[steps.rank[step]])
    demand(there, steps.by_step(step), "comes after a step that is not there")
    data = ~signals.released[signals.waits.word]
    posters = signals.poster[signals.waits.word[data]]
    source = np.concatenate([posters, after + steps.start[steps.rank[step]]])
    target = np.concatenate([signals.waits.step[data], step])
    order = Order(steps.rank, steps.lane, source, target)
    if stuck := order.stuck:
        circle = order.run(steps.lane)[1]
        kind = (
            "wait for each other in a circle"
            if circle
            else "deadlock where lanes share one hardware queue"
        )
        raise PlanError(f"steps {kind}: {'; '.join(map(steps.name, (circle or stuck)[:4]))}")
    return order


def settle(claims: list[Claim], order: Order) -> None:
    """Prove all claims together."""
    first = np.concatenate([claim.first for claim in claims])
    second = np.concatenate([claim.second for claim in claims])
    holds = order.holds(first, second)
    stop = np.cumsum([len(claim.first) for claim in claims])
    for claim, part in zip(claims, np.split(holds, stop[:-1]), strict=True):
        demand(part, claim.who, claim.why)
