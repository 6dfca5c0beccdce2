"""Figures from times: frames with a row per round and a column per candidate in, figures out.

Times are seconds of the slowest rank. Whatever is compared is compared round by round: a device
that gets hot slows down all candidates of a round alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

#: Candidates that others are compared with: the serial compositions, and PyTorch's fused op.
SERIALS = ("serial-collective", "serial")
PYTORCH = ("pytorch-fused", "pytorch-native")

#: Candidates that are one part of the operator, and the bound that follows from them.
PARTS = ("gemm", "collective", "copies")
IDEAL = "ideal"


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers, without those that are NaN; NaN for none."""
    return float(np.exp(np.log(pd.Series(list(values), dtype=float).dropna()).mean()))


def spread(times: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds by candidate: median ``ms``, and the quartiles ``ms_low`` and ``ms_high``."""
    quartiles = times.quantile([0.5, 0.25, 0.75]).T * 1e3
    return quartiles.set_axis(["ms", "ms_low", "ms_high"], axis=1)


def fastest(times: pd.DataFrame, names: Sequence[str]) -> pd.Series | None:
    """The times with the smallest median, of those of the candidates that are there."""
    there = times[[name for name in names if name in times]]
    return None if there.empty else there[there.median().idxmin()]


def over(reference: pd.Series | None, times: pd.DataFrame) -> pd.Series:
    """How many times as long as each candidate a reference takes: medians of the rounds' ratios;
    NaN without a reference."""
    if reference is None:
        return pd.Series(math.nan, times.columns)
    return times.rdiv(reference, axis=0).median()


def ideal(times: pd.DataFrame) -> pd.Series | None:
    """In every round the longer of the GEMM alone and the fastest communication alone."""
    moves = [name for name in PARTS[1:] if name in times]
    if "gemm" not in times or not moves:
        return None
    return np.maximum(times["gemm"], times[moves].min(axis=1))


def overlap_efficiency(times: pd.DataFrame) -> pd.Series:
    """Overlap efficiency as in Flux (arXiv:2406.06858), equations 1 and 2, by candidate.

    The effective communication time (ECT) of a method is its time less that of the fastest whole
    GEMM. The efficiency is 1 - ECT / ECT of the serial composition with the vendor's collective:
    0 for that composition, 1 where nothing but the GEMM is left, negative below serial. Median
    over the rounds in which serial takes longer than its GEMM.
    """
    if SERIALS[0] not in times or "gemm" not in times:
        return pd.Series(math.nan, times.columns)
    gemm, exposed = times["gemm"], times[SERIALS[0]] - times["gemm"]
    rounds = exposed > 0
    return (1 - times[rounds].sub(gemm[rounds], axis=0).div(exposed[rounds], axis=0)).median()


def summarise(
    times: Mapping[str, Sequence[float]], queued: Mapping[str, Sequence[float]] | None = None
) -> pd.DataFrame:
    """The figures of every candidate of one shape in one mode, as columns of
    ``ficco.bench.frames.BENCH``, indexed by candidate.

    The ideal is added as a candidate of its own. ``queued`` has the times in the queued mode, of
    the same rounds.
    """
    rounds = pd.DataFrame(times)
    bound = ideal(rounds)
    if bound is not None:
        rounds[IDEAL] = bound
    figures = spread(rounds)
    ratios = pd.DataFrame(
        {
            "speedup": over(fastest(rounds, SERIALS), rounds),
            "share": over(bound, rounds),
            "efficiency": overlap_efficiency(rounds),
            "vs_pytorch": over(fastest(rounds, PYTORCH), rounds),
            "vs_queued": (pd.DataFrame(queued or {}) / rounds).median(),
        }
    )
    whole = rounds.columns.difference(PARTS)  # a part has no ratio to the whole operator
    return figures.join(ratios.loc[whole])
