"""The rule of FiCCO, section V-C: a schedule from the sizes of a product and two thresholds.

The paper multiplies operations per byte (OTB) by memory traffic (MT), which leaves the number of
operations, and compares it with a threshold of the machine: "its peak compute FLOPs". It leaves
open whose operations are counted and what a rate has to do with a number. Here they are those of
*one rank's* product, ``2 * m * n * k`` with the rank's own n (:attr:`Problem.flops`), and the
thresholds are numbers of operations, fitted to measurements (:func:`fit_thresholds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import sqrt

from ficco.machine import Provenance, Thresholds
from ficco.problems.products import Problem

#: What the rule takes: for m <= k, then from few operations to many.
COLUMNS = "uniform-fused-2d"
ROWS = ("uniform-fused-1d", "hetero-fused-1d", "hetero-unfused-1d")

#: The upper threshold over the lower one, in the paper.
RATIO = 5.0

#: Share of the best time that counts as lost where a schedule was not measured.
NOT_MEASURED = 1.0


def rule(problem: Problem, thresholds: Thresholds) -> tuple[str, str]:
    """The name of the schedule that the rule takes, and the reason in words.

    The paper's rule is for gathers: A [m, k] travels. Where the product [m, n] does, it is applied
    to the transposed problem, whose n and k are exchanged and which gathers as many bytes for as
    many operations; each is the gradient of the other. Where A is transposed, k takes the place of
    m, and columns of A that of rows.
    """
    m, n, k = ("m", problem.m), ("n", problem.n), ("k", problem.k)
    if problem.kind.inner:
        taken, reason = _rule(k, m, problem.flops, thresholds)
        dims = {"1d": "2d", "2d": "1d"}[taken[-2:]]
        return f"{taken[:-2]}{dims}", f"of A transposed, {reason}"
    taken, reason = _rule(m, n if problem.kind.scatters else k, problem.flops, thresholds)
    if problem.kind.scatters:
        reason += ", by the paper's rule for the gather that this is the transpose of"
    return taken, reason


def _rule(
    height: tuple[str, int], width: tuple[str, int], flops: int, thresholds: Thresholds
) -> tuple[str, str]:
    (tall, rows), (wide, columns) = height, width
    if rows <= columns:
        return COLUMNS, (
            f"{tall}={rows} is not above {wide}={columns}, so that columns lose less than rows "
            "when cut"
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
    """What was measured for a problem: seconds by name of schedule, of the rule's four at least
    the best one."""

    problem: Problem
    seconds: Mapping[str, float]

    def loss(self, name: str) -> float:
        """Share of the best time that a schedule takes longer."""
        if name not in self.seconds:
            return NOT_MEASURED
        return self.seconds[name] / min(self.seconds.values()) - 1.0


def fit_thresholds(observations: Iterable[Observation]) -> Thresholds:
    """The thresholds with which the rule loses least on what was measured.

    Problems with m <= k do not depend on them and are left out, as are those of A transposed. Of
    thresholds that lose alike, those whose ratio is nearest to the paper's are taken.

    Raises:
        ValueError: nothing was measured that depends on them.
    """
    observations = [one for one in observations if not one.problem.kind.inner]
    seen = [one for one in observations if one.problem.m > one.problem.k]
    if not seen:
        raise ValueError("fit_thresholds: required a measured problem with m > k, got none")
    flops = sorted({one.problem.flops for one in seen})
    ends = [flops[0] / 2, *flops, flops[-1] * 2]
    marks = [sqrt(a * b) for a, b in pairwise(ends)]  # before, between and after the sizes
    by_row = (
        [sum(o.loss(name) for o in seen if o.problem.flops == size) for size in flops]
        for name in ROWS
    )
    below, among, above = (list(accumulate(losses, initial=0.0)) for losses in by_row)
    # The first `i` sizes are below the lower mark, the first `j` not above the upper one.
    lost = {
        (marks[i], marks[j]): below[i] + among[j] - among[i] + above[-1] - above[j]
        for i in range(len(marks))
        for j in range(i, len(marks))
    }

    def key(pair: tuple[float, float]) -> tuple[float, float, float]:
        low, high = pair
        return round(lost[pair], 9), abs(high / low - RATIO), low

    low, high = min(lost, key=key)
    note = (
        f"to {len(seen)} problems, on which the rule loses {lost[low, high] / len(seen):.1%} "
        "of the best schedule's time"
    )
    return Thresholds(low, high, Provenance("fitted", note=note))
