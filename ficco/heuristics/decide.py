"""The rule behind ``schedule="auto"``.

It is short and fixed. Its two thresholds were measured on 4 H200 (docs/results) and are a guess
anywhere else; every schedule computes the same product, so that a wrong guess costs time alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ficco.problem import Problem
from ficco.schedules import Schedule

#: Floating-point operations of one rank below which enqueueing an overlapped call takes the host
#: longer than it saves the GPU: about 0.2 ms of an H200. The queue of a captured call is free.
EAGER_FLOPS = 1.5e11

#: Columns of b from which the products take longer than the copies on H200 over NVSwitch, so that
#: few, large products count; below, the copies do, and the first product should start early.
WIDE = 3072


@dataclass(frozen=True)
class Decision:
    """The schedule chosen, who chose it, and why.

    Attributes:
        schedule: the choice.
        source: ``"caller"`` or ``"rule"``.
        reason: in words.
    """

    schedule: Schedule
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.schedule} ({self.source}: {self.reason})"


def decide(
    problem: Problem, wanted: str | Schedule = "auto", *, eager_on_gpu: bool = True
) -> Decision:
    """Choose the schedule, from facts that every rank shares.

    ``eager_on_gpu`` is whether the host enqueues the call while a GPU waits for it: not on the
    CPU engine, and not where a graph captures the call.
    """
    if isinstance(wanted, Schedule):
        return Decision(wanted, "caller", "given")
    if not isinstance(wanted, str):
        raise ValueError(f"schedule: required 'auto', a name or a Schedule, got {wanted!r}")
    if wanted != "auto":
        return Decision(Schedule.parse(wanted), "caller", "given")
    if problem.world == 1:
        return _rule("serial", "one rank has nothing to wait for")
    if eager_on_gpu and problem.flops < EAGER_FLOPS:
        return _rule(
            "serial:collective",
            f"{problem.flops:.1e} operations per rank are over before a host has enqueued an "
            f"overlapped call (less than {EAGER_FLOPS:.1e})",
        )
    if problem.n < WIDE:
        return _rule(
            "shard-overlap:compute=2",
            f"{problem.n} columns: the copies take longer than the products (less than {WIDE})",
        )
    return _rule(
        "growing:compute=2",
        f"{problem.n} columns: the products take longer than the copies ({WIDE} or more)",
    )


def _rule(name: str, reason: str) -> Decision:
    return Decision(Schedule.parse(name), "rule", reason)
