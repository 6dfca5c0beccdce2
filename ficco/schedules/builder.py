"""The base of all builders of Plans."""

from __future__ import annotations

from ficco.plan.model import Signal, Step
from ficco.problem import Problem
from ficco.schedules.space import Schedule


def released(poster: int, waiter: int) -> Signal:
    """The signal that the poster's slot is free; its word is the waiter's first for that peer."""
    return Signal("released", poster, waiter, 0, poster)


class Builder:
    """Builds the Plan of one rank, ``me``, step by step."""

    def __init__(self, problem: Problem, schedule: Schedule, rank: int) -> None:
        self.problem, self.schedule, self.me = problem, schedule, rank
        self.peers = [peer for peer in range(problem.world) if peer != rank]
        self.steps: list[Step] = []

    def add(self, step: Step) -> int:
        """Append a step; returns its index."""
        self.steps.append(step)
        return len(self.steps) - 1

    def taken(self, peers: list[int]) -> tuple[Signal, ...]:
        """The signals to wait for, and clear, before using the slots of peers."""
        return tuple(released(peer, self.me) for peer in peers)

    def retire(self, waits: tuple[Signal, ...], after: tuple[int, ...] = ()) -> None:
        """Wait for ``waits``, clear all words that this rank waited for, and hand its slot to the
        peers."""
        waited = [s for step in self.steps for s in step.waits if not s.released]
        posts = tuple(released(self.me, peer) for peer in self.peers)
        self.add(Step("sync", "sync", "retire", waits, posts, (*waited, *waits), after))

    def lasts(self) -> tuple[int, ...]:
        """The last step of each lane."""
        return tuple({step.lane: i for i, step in enumerate(self.steps)}.values())
