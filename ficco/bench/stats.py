"""Figures from times. Pure: lists of seconds in, numbers out.

All series that are compared have one time per round, and comparisons are made round by round: a
device that gets hot slows down all candidates of a round alike (``paired``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

Times = Sequence[float]

#: What no figure can be given for.
NONE = math.nan


def slowest(by_rank: Sequence[Times]) -> list[float]:
    """The slowest rank's time of every round, from the times of every rank."""
    return [max(times) for times in zip(*by_rank, strict=True)]


def ratios(numerators: Times, denominators: Times) -> list[float]:
    """Ratios of two series, round by round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def paired(numerators: Times | None, denominators: Times | None) -> float:
    """Median of the ratios of two series; NaN where one is missing."""
    if not numerators or not denominators:
        return NONE
    return median(ratios(numerators, denominators))


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers, without those that are NaN; NaN for none."""
    logs = [math.log(value) for value in values if not math.isnan(value)]
    return math.exp(math.fsum(logs) / len(logs)) if logs else NONE


def worst(values: Iterable[float]) -> float:
    """The smallest number that is not NaN; NaN for none."""
    return min((value for value in values if not math.isnan(value)), default=NONE)


def quartiles(times: Times) -> tuple[float, float]:
    """First and third quartile."""
    if len(times) < 2:
        return times[0], times[0]
    low, _, high = quantiles(times, n=4, method="inclusive")
    return low, high


def better(*series: Times | None) -> Times | None:
    """The series with the smallest median, of those that are there."""
    return min((times for times in series if times), key=median, default=None)


def ideal(gemm: Times | None, *communication: Times | None) -> list[float] | None:
    """The longer of the product alone and the fastest communication alone, in every round."""
    there = [times for times in communication if times]
    if not gemm or not there:
        return None
    return [max(g, min(moves)) for g, *moves in zip(gemm, *there, strict=True)]


def overlap_efficiency(times: Times | None, serial: Times | None, gemm: Times | None) -> float:
    """Overlap efficiency as in Flux (arXiv:2406.06858), equations 1 and 2.

    The effective communication time (ECT) of a method is its time less that of the fastest whole
    GEMM. The efficiency is 1 - ECT / ECT of the serial composition with the vendor's collective:
    0 for that composition, 1 where nothing but the GEMM is left, negative below serial. Median
    over the rounds in which serial takes longer than its GEMM.
    """
    if not times or not serial or not gemm:
        return NONE
    found = [1 - (t - g) / (s - g) for t, s, g in zip(times, serial, gemm, strict=True) if s > g]
    return median(found) if found else NONE


@dataclass(frozen=True)
class Summary:
    """What is said about one candidate in one mode.

    Attributes:
        ms: median over the rounds of the slowest rank's milliseconds.
        ms_low, ms_high: their quartiles.
        speedup: over the better serial composition, paired.
        share: of the ideal, paired: the ideal's time over the candidate's.
        efficiency: overlap efficiency.
        vs_pytorch: PyTorch's fused op over the candidate, paired, against its faster path.
        vs_queued: the same candidate's queued time over this one, paired.
    """

    ms: float
    ms_low: float
    ms_high: float
    speedup: float = NONE
    share: float = NONE
    efficiency: float = NONE
    vs_pytorch: float = NONE
    vs_queued: float = NONE


@dataclass(frozen=True)
class Roles:
    """Names of the candidates that others are held against."""

    gemm: str = "gemm"
    collective: str = "collective"
    copies: str = "copies"
    serials: tuple[str, ...] = ("serial-collective", "serial")
    pytorch: tuple[str, ...] = ("pytorch-fused", "pytorch-native")
    ideal: str = "ideal"


ROLES = Roles()


def summarise(
    times: Mapping[str, Times], queued: Mapping[str, Times] | None = None, roles: Roles = ROLES
) -> dict[str, Summary]:
    """What is said about every candidate of one shape in one mode.

    ``times`` holds the slowest rank's seconds by candidate and round. The ideal is added as a
    candidate of its own. ``queued`` holds those of the queued mode, of the same rounds.
    """
    gemm = times.get(roles.gemm)
    bound = ideal(gemm, times.get(roles.collective), times.get(roles.copies))
    serial = better(*(times.get(name) for name in roles.serials))
    pytorch = better(*(times.get(name) for name in roles.pytorch))
    alone = {roles.gemm, roles.collective, roles.copies}
    series = {**times, **({roles.ideal: bound} if bound else {})}
    found: dict[str, Summary] = {}
    for name, own in series.items():
        low, high = quartiles(own)
        whole = Summary(median(own) * 1e3, low * 1e3, high * 1e3)
        if name not in alone:
            whole = Summary(
                ms=whole.ms,
                ms_low=whole.ms_low,
                ms_high=whole.ms_high,
                speedup=paired(serial, own),
                share=paired(bound, own),
                efficiency=overlap_efficiency(own, times.get(roles.serials[0]), gemm),
                vs_pytorch=paired(pytorch, own),
                vs_queued=paired((queued or {}).get(name), own),
            )
        found[name] = whole
    return found
