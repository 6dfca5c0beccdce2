"""From measured seconds to the figures of a Machine. Numbers in, numbers out; no device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

#: Copies to all peers at once that bring so many times the bytes of copies to one after the other
#: show links of their own; a port that is shared brings no more.
MESH_GAIN = 1.5

#: Largest share of a small copy's time that counts as the gap behind it.
MOST_GAP = 0.95


#: A device that loses less of its rate than this in long rows is at no limit, and a limit that
#: leaves more than this share of the differences unexplained is none.
LEAST_HEAT, MOST_LEFT = 0.03, 0.5


@dataclass(frozen=True)
class CopyTime:
    """Seconds of ``count`` copies of ``nbytes`` in a row on one queue of every rank."""

    nbytes: float
    count: int
    seconds: float


@dataclass(frozen=True)
class CopyFit:
    """What :class:`ficco.machine.Copies` is made of; ``error``: largest relative error."""

    latency: float
    gap: float
    curve: tuple[tuple[float, float], ...]
    error: float

    def seconds(self, nbytes: float, count: int) -> float:
        """Seconds of copies in a row, for a size of the curve."""
        rate = dict(self.curve)[nbytes]
        return self.latency + count * nbytes / rate + (count - 1) * self.gap


def copies(found: Sequence[CopyTime]) -> CopyFit:
    """Latency, gap and rates from rows of copies.

    ``count`` copies of s bytes take ``latency + count * s / rate(s) + (count - 1) * gap``. Which
    part of what a copy adds to a row is gap and which is bytes' time cannot be told apart at one
    size: between the two smallest sizes the rate counts as constant, and no rate is above those of
    all larger sizes.

    Raises:
        ValueError: fewer than two sizes, or no size with rows of two lengths.
    """
    sizes = sorted({one.nbytes for one in found})
    rows = {size: {one.count for one in found if one.nbytes == size} for size in sizes}
    if len(sizes) < 2 or max(map(len, rows.values())) < 2:
        raise ValueError(
            f"copies: required two sizes and rows of two lengths, got sizes {sizes} and rows "
            f"{sorted(set().union(*rows.values()))}"
        )
    # Unknown are what a copy of each size adds to a row, and what is left: latency - gap.
    matrix = np.zeros((len(found), len(sizes) + 1))
    for i, one in enumerate(found):
        matrix[i, sizes.index(one.nbytes)] = one.count
        matrix[i, -1] = 1.0
    seconds = np.array([one.seconds for one in found])
    *each, rest = nonnegative_or_signed(matrix, seconds, signed=len(sizes))
    floor = min(one.seconds / one.count for one in found) * 1e-3
    each = [max(float(one), floor) for one in each]
    per_byte = (each[1] - each[0]) / (sizes[1] - sizes[0])
    gap = float(np.clip(each[0] - per_byte * sizes[0], 0.0, MOST_GAP * min(each)))
    rates = [size / (one - gap) for size, one in zip(sizes, each, strict=True)]
    # Noise in small copies, where little is left beside the gap, would make them the fastest.
    for i in reversed(range(len(rates) - 1)):
        rates[i] = min(rates[i], max(rates[i + 1 :]))
    curve = tuple(zip(sizes, rates, strict=True))
    fit = CopyFit(max(float(rest) + gap, 0.0), gap, curve, 0.0)
    errors = [abs(fit.seconds(one.nbytes, one.count) / one.seconds - 1) for one in found]
    return CopyFit(fit.latency, fit.gap, fit.curve, max(errors))


def in_front(found: Mapping[float, float], rate: Callable[[float], float]) -> float:
    """What is left of the seconds of copies, by their bytes, beside those bytes' time: the median,
    and nothing where they take less."""
    return max(median(seconds - nbytes / rate(nbytes) for nbytes, seconds in found.items()), 0.0)


def nonnegative_or_signed(matrix: np.ndarray, seconds: np.ndarray, signed: int = -1) -> list[float]:
    """Least squares of relative errors with unknowns of at least 0, but for one of any sign.

    All subsets of unknowns that may be 0 are tried: there are few.
    """
    weights = 1.0 / seconds
    a, y = matrix * weights[:, None], np.ones(len(seconds))
    count = matrix.shape[1]
    whole = np.linalg.lstsq(a, y, rcond=None)[0]
    if all(value >= 0 or i == signed for i, value in enumerate(whole)) or count > 12:
        return [float(value) for value in whole]
    best: tuple[float, list[float]] | None = None
    free = [i for i in range(count) if i != signed]
    for size in range(len(free), -1, -1):
        for kept in itertools.combinations(free, size):
            columns = sorted({*kept, *([signed] if signed >= 0 else [])})
            if not columns:
                continue
            part = np.linalg.lstsq(a[:, columns], y, rcond=None)[0]
            values = [0.0] * count
            for i, value in zip(columns, part, strict=True):
                values[i] = float(value)
            if any(values[i] < 0 for i in free):
                continue
            left = float(np.sum((a @ np.array(values) - y) ** 2))
            if best is None or left < best[0]:
                best = left, values
    assert best is not None
    return best[1]


@dataclass(frozen=True)
class Enqueued:
    """Seconds in which a host enqueued so many things."""

    seconds: float
    calls: int
    matmuls: int
    copies: int
    signals: int


def host(found: Sequence[Enqueued]) -> dict[str, float]:
    """Seconds of a call, and of each matmul, copy and signal that it enqueues."""
    if len(found) < 4:
        raise ValueError(f"host: required four measurements or more, got {len(found)}")
    matrix = np.array([(o.calls, o.matmuls, o.copies, o.signals) for o in found], float)
    values = nonnegative_or_signed(matrix, np.array([one.seconds for one in found]))
    return dict(zip(("call", "matmul", "copy", "signal"), values, strict=True))


def memory(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Bytes per second and latency, from (bytes read and written, seconds)."""
    if len(found) < 2:
        raise ValueError(f"memory: required two sizes or more, got {len(found)}")
    matrix = np.array([(nbytes, 1.0) for nbytes, _ in found])
    per_byte, latency = nonnegative_or_signed(matrix, np.array([s for _, s in found]))
    if per_byte <= 0:
        raise ValueError("memory: required larger copies to take longer, got no difference")
    return 1.0 / per_byte, latency


def topology(one_by_one: float, at_once: float) -> tuple[str, float]:
    """Kind and sharing, from the bytes per second that a rank receives from its peers one after
    the other, and from all of them at once."""
    gain = at_once / one_by_one
    return ("mesh", 1.0) if gain >= MESH_GAIN else ("switch", min(gain, 1.0))


def contention(alone: Sequence[float], under: Sequence[float]) -> float:
    """Median of the slowdown round by round; at least 1."""
    ratios = [b / a for a, b in zip(alone, under, strict=True)]
    return max(float(median(ratios)), 1.0)


@dataclass(frozen=True)
class RowTime:
    """Seconds of ``count`` products of the same sizes, one behind the other, in every call."""

    product: str
    count: int
    seconds: float


@dataclass(frozen=True)
class Heat:
    """What :meth:`ficco.machine.Gemm.heated` needs; ``error``: mean relative error on the rows."""

    burst: float = math.inf
    sustained: float = 1.0
    error: float = 0.0

    @property
    def limited(self) -> bool:
        """Whether the device has a power limit that shows."""
        return self.sustained < 1.0

    def cold(self, seconds: Any) -> Any:
        """What products that took so many seconds in a row take one by one; the other way round
        than ``heated``. A number, or an array of them."""
        return seconds - np.maximum(0.0, seconds - self.burst) * (1.0 - self.sustained)


#: A device whose rows take as long as their products one by one.
COLD = Heat()


def heat(found: Sequence[RowTime]) -> Heat:
    """Seconds after which a device is at its power limit, and the share of its rate left then.

    With the right ones every product of a row takes the same time by itself, whatever the length of
    the row: they are those with which these times differ least. All of a grid are tried, then all
    of a finer one about the best. A device that gets little slower, or whose rows say the same
    without a limit (:data:`LEAST_HEAT`, :data:`MOST_LEFT`), has none: infinite and 1.

    Raises:
        ValueError: no product with rows of three lengths, which is the least that shows a bend.
    """
    rows = {one.product: [r for r in found if r.product == one.product] for one in found}
    lengths = {name: sorted({one.count for one in of}) for name, of in rows.items()}
    if max(map(len, lengths.values()), default=0) < 3:
        raise ValueError(f"heat: required rows of three lengths of a product, got {lengths}")
    pairs = [np.array([(one.count, one.seconds) for one in of]).T for of in rows.values()]

    def errors(bursts: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """Of every pair of both."""
        off = []
        for counts, seconds in pairs:
            over = np.maximum(0.0, seconds - bursts[:, None])
            each = np.log((seconds - over[:, None] * (1.0 - shares[:, None])) / counts)
            off.append(np.abs(each - np.median(each, axis=-1, keepdims=True)))
        return np.concatenate(off, axis=-1).mean(axis=-1)

    def best(bursts: np.ndarray, shares: np.ndarray) -> tuple[float, float, float]:
        found = errors(bursts, shares)
        i, j = np.unravel_index(np.argmin(found), found.shape)
        return float(bursts[i]), float(shares[j]), float(found[i, j])

    ends = min(one.seconds for one in found), max(one.seconds for one in found)
    burst, sustained, _ = best(np.geomspace(*ends, 60), np.linspace(0.4, 1.0, 61))
    finer = np.linspace(-1.0, 1.0, 41)
    shares = np.clip(sustained + 0.01 * finer, 0.01, 1.0)
    burst, sustained, left = best(burst * (ends[1] / ends[0]) ** (finer / 59), shares)
    without = float(errors(np.array([ends[1]]), np.ones(1)).item())
    if sustained > 1 - LEAST_HEAT or left > MOST_LEFT * without:
        return Heat(error=without)
    return Heat(burst, sustained, left)


def steadied(times: Mapping[str, Sequence[float]], references: Sequence[str]) -> dict[str, float]:
    """Medians over rounds of times, each divided by how much slower a device was in its round.

    That is the median of the references' times in the round over their median in all rounds.
    """
    by_round = [median(column) for column in zip(*(times[r] for r in references), strict=True)]
    usual = median(by_round)
    pace = [value / usual for value in by_round]
    return {
        name: float(median(t / p for t, p in zip(series, pace, strict=True)))
        for name, series in times.items()
        if name not in references
    }
