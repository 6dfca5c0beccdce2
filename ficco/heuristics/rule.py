"""The rule of FiCCO, section V-C: a schedule from the sizes of a product and two thresholds.

The paper multiplies operations per byte (OTB) by memory traffic (MT), which is the number of
operations, and compares it with a threshold of the machine: "its peak compute FLOPs". It does not
say whose operations are counted, or how a number compares with a rate. Here the operations are
those of *one rank's* product, ``2 * m * n * k`` with the rank's n (:attr:`Problem.flops`), and the
thresholds are numbers of operations, fitted to measurements (:func:`fit_thresholds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import sqrt

from ficco.machine import Provenance, Thresholds
from ficco.problems.products import Problem

#: The schedules of the rule: for m <= k; and otherwise, from few operations to many.
COLUMNS = "uniform-fused-2d"
ROWS = ("uniform-fused-1d", "hetero-fused-1d", "hetero-unfused-1d")

#: The upper threshold over the lower one, in the paper.
RATIO = 5.0

#: Loss, as a share of the best time, of a schedule that was not measured.
NOT_MEASURED = 1.0


def rule(problem: Problem, thresholds: Thresholds) -> tuple[str, str]:
    """The name of the schedule that the rule takes, and the reason in words.

    The paper's rule is for gathers: A [m, k] travels. If the product [m, n] travels, the rule is
    applied to the transposed problem: n and k are exchanged, and it gathers as many bytes for as
    many operations; each problem is the gradient of the other. If A is transposed, k replaces m,
    and columns of A replace rows.
    """
    m, n, k = ("m", problem.m), ("n", problem.n), ("k", problem.k)
    if problem.kind.inner:
        name, reason = _rule(k, m, problem.flops, thresholds)
        dims = {"1d": "2d", "2d": "1d"}[name[-2:]]
        return f"{name[:-2]}{dims}", f"for A transposed, {reason}"
    name, reason = _rule(m, n if problem.kind.scatters else k, problem.flops, thresholds)
    if problem.kind.scatters:
        reason += ", by the paper's rule for the transposed problem, a gather"
    return name, reason


def _rule(
    height: tuple[str, int], width: tuple[str, int], flops: int, thresholds: Thresholds
) -> tuple[str, str]:
    (tall, rows), (wide, columns) = height, width
    if rows <= columns:
        return COLUMNS, (
            f"{tall}={rows} is not above {wide}={columns}, so that cutting columns loses less than "
            "cutting rows"
        )
    low, high = thresholds.low, thresholds.high
    count = f"{tall}={rows} is above {wide}={columns}, and {flops:.2g} operations of a rank are"
    if flops < low:
        return ROWS[0], f"{count} below the threshold {low:.2g}"
    if flops > high:
        return ROWS[2], f"{count} above the upper threshold {high:.2g}"
    return ROWS[1], f"{count} between the thresholds {low:.2g} and {high:.2g}"


@dataclass(frozen=True)
class Observation:
    """Measured seconds of a problem by name of schedule; at least those of the best of the rule's
    four schedules."""

    problem: Problem
    seconds: Mapping[str, float]

    def loss(self, name: str) -> float:
        """Excess of a schedule's time over the best time, as a share of the best time."""
        if name not in self.seconds:
            return NOT_MEASURED
        return self.seconds[name] / min(self.seconds.values()) - 1.0


def fit_thresholds(observations: Iterable[Observation]) -> Thresholds:
    """The thresholds with the smallest loss of the rule on measured problems.

    Problems with m <= k do not depend on the thresholds and are left out; so are problems with A
    transposed. Of thresholds with equal loss, the pair with the ratio nearest to the paper's wins.

    Raises:
        ValueError: no measured problem depends on the thresholds.
    """
    observations = [o for o in observations if not o.problem.kind.inner]
    seen = [o for o in observations if o.problem.m > o.problem.k]
    if not seen:
        raise ValueError("fit_thresholds: required a measured problem with m > k, got none")
    flops = sorted({o.problem.flops for o in seen})
    ends = [flops[0] / 2, *flops, flops[-1] * 2]
    marks = [sqrt(a * b) for a, b in pairwise(ends)]  # before, between and after the sizes
    by_row = (
        [sum(o.loss(name) for o in seen if o.problem.flops == size) for size in flops]
        for name in ROWS
    )
    below, between, above = (list(accumulate(losses, initial=0.0)) for losses in by_row)
    # The first `i` sizes are below the lower mark, the first `j` not above the upper one.
    loss = {
        (marks[i], marks[j]): below[i] + between[j] - between[i] + above[-1] - above[j]
        for i in range(len(marks))
        for j in range(i, len(marks))
    }

    def key(pair: tuple[float, float]) -> tuple[float, float, float]:
        low, high = pair
        return round(loss[pair], 9), abs(high / low - RATIO), low

    low, high = min(loss, key=key)
    note = (
        f"to {len(seen)} problems, on which the rule loses {loss[low, high] / len(seen):.1%} "
        "of the best schedule's time"
    )
    return Thresholds(low, high, Provenance("fitted", note=note))
