"""The base of all builders of Plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ficco.plan.model import Signal, Step
from ficco.problem import Problem
from ficco.schedules.space import Schedule

#: The lane on which what has arrived is summed, or brought to its place, beside products.
REDUCE_LANE = "reduce0"


def released(poster: int, waiter: int) -> Signal:
    """The signal that the poster's slot is free; its word is the waiter's first for that peer."""
    return Signal("released", poster, waiter, 0, poster)


class Builder:
    """Builds the Plan of one rank, ``me``, step by step."""

    def __init__(self, problem: Problem, schedule: Schedule, rank: int) -> None:
        self.problem, self.schedule, self.me = problem, schedule, rank
        self.peers = [peer for peer in range(problem.world) if peer != rank]
        self.lane_of: dict[int, str] = {}  # peer -> the lane of copies from or to it, if any
        self.steps: list[Step] = []

    def add(self, step: Step) -> int:
        """Append a step; returns its index."""
        self.steps.append(step)
        return len(self.steps) - 1

    def copy_lanes(self) -> Iterable[tuple[str, list[int]]]:
        """Copy lanes, each with its peers."""
        by_lane: dict[str, list[int]] = {}
        for peer, lane in self.lane_of.items():
            by_lane.setdefault(lane, []).append(peer)
        return by_lane.items()

    def released_by(self, peers: list[int]) -> tuple[Signal, ...]:
        """The signals to wait for, and clear, before using the slots of peers."""
        return tuple(released(peer, self.me) for peer in peers)

    def acquire(self, tell: Mapping[int, Signal], after: tuple[int, ...] = ()) -> dict[int, int]:
        """Take over the slots of all peers on their copy lanes, and post to some of them what tells
        them that this rank's call has begun; by peer, the step."""
        found: dict[int, int] = {}
        for lane, peers in self.copy_lanes():
            free = self.released_by(peers)
            posts = tuple(tell[peer] for peer in peers if peer in tell)
            step = Step("sync", lane, "acquire", waits=free, clears=free, posts=posts, after=after)
            found.update(dict.fromkeys(peers, self.add(step)))
        return found

    def retire(self, waits: tuple[Signal, ...], after: tuple[int, ...] = ()) -> None:
        """Wait for ``waits``, clear all words that this rank waited for, and hand its slot to the
        peers."""
        waited = [s for step in self.steps for s in step.waits if not s.released]
        posts = tuple(released(self.me, peer) for peer in self.peers)
        self.add(Step("sync", "sync", "retire", waits, posts, (*waited, *waits), after))

    def lasts(self) -> tuple[int, ...]:
        """The last step of each lane."""
        return tuple({step.lane: i for i, step in enumerate(self.steps)}.values())
