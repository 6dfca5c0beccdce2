"""From measured seconds to the figures of a Machine. Numbers in, numbers out; no device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from ficco.machine import Gemm
from ficco.machine.model import attention_loads
from ficco.problems.mask import LibraryCall

#: Copies to all peers at once that bring so many times the bytes per second of copies to one peer
#: after the other show a link per pair; a shared port brings no more.
MESH_GAIN = 1.5

#: Largest share of a small copy's time that counts as the gap after it.
MOST_GAP = 0.95

#: A power limit that costs less than this share of the rate is ignored, and so is one that leaves
#: more than this share of the error of a model without a limit.
LEAST_HEAT, MOST_LEFT = 0.03, 0.5


def least_squares(
    matrix: np.ndarray, seconds: np.ndarray, signed: int | None = None
) -> list[float]:
    """The unknowns that give ``seconds`` with the least squares of relative errors.

    All unknowns are at least 0, except for the one at ``signed``. Lawson and Hanson's active-set
    method (Solving Least Squares Problems, 1974, chapter 23), for any number of columns.

    Raises:
        ValueError: a number is not finite, or a measured time is not above 0.
    """
    if not (np.isfinite(matrix).all() and np.isfinite(seconds).all() and (seconds > 0).all()):
        times = f"times from {seconds.min():g} to {seconds.max():g} s"
        raise ValueError(f"fit: required finite numbers and times above 0, got {times}")
    a, y = matrix / seconds[:, None], np.ones(len(seconds))
    count = a.shape[1]
    bounded = np.arange(count) != (-1 if signed is None else signed)
    lengths = np.maximum(np.linalg.norm(a, axis=0), np.finfo(float).tiny)

    def solved(free: np.ndarray) -> np.ndarray:
        values = np.zeros(count)
        if free.any():
            values[free] = np.linalg.lstsq(a[:, free], y, rcond=None)[0]
        return values

    everything = solved(np.ones(count, bool))
    if not (bounded & (everything < 0)).any():
        return [float(value) for value in everything]
    free = ~bounded
    best = solved(free)
    while not free.all():
        left = y - a @ best
        # What a step of each column takes off the squares, for columns of length 1.
        gains = np.where(free, -np.inf, a.T @ left / lengths)
        if gains.max() <= 1e-12 * math.sqrt(len(y)):
            break
        free[gains.argmax()] = True
        tried, trial = best, solved(free)
        while (outside := free & bounded & (trial <= 0)).any():
            # As far towards the trial as all stay at 0 or above; what gets to 0 is bound there.
            steps = tried[outside] / np.maximum(tried[outside] - trial[outside], 1e-300)
            tried = tried + steps.min() * (trial - tried)
            free[np.flatnonzero(outside)[steps <= steps.min()]] = False
            trial = solved(free)
        if np.sum((y - a @ trial) ** 2) >= np.sum(left**2) * (1 - 1e-12):
            break  # only rounding is left
        best = trial
    return [float(value) for value in best]


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
    error: float = 0.0

    def seconds(self, nbytes: float, count: int) -> float:
        """Seconds of copies in a row, for a size of the curve."""
        rate = dict(self.curve)[nbytes]
        return self.latency + count * nbytes / rate + (count - 1) * self.gap


def messages(times: Sequence[CopyTime]) -> tuple[float, float]:
    """Latency and bytes per second of messages, from rows of them: ``count`` messages of s bytes
    take a time of their own and ``count * (latency + s / rate)``.

    Raises:
        ValueError: fewer than two sizes, or rows of one length, or times that do not grow with the
            bytes.
    """
    if min(len({one.nbytes for one in times}), len({one.count for one in times})) < 2:
        raise ValueError(f"messages: required two sizes and rows of two lengths, got {times}")
    matrix = np.array([(1.0, one.count, one.count * one.nbytes) for one in times])
    _, latency, per_byte = least_squares(matrix, np.array([one.seconds for one in times]))
    if per_byte <= 0:
        raise ValueError(f"messages: required times that grow with their bytes, got {times}")
    return latency, 1 / per_byte


def copies(times: Sequence[CopyTime]) -> CopyFit:
    """Latency, gap and rates from rows of copies.

    ``count`` copies of s bytes take ``latency + count * s / rate(s) + (count - 1) * gap``. One size
    does not tell gap from bytes' time: between the two smallest sizes the rate is taken to be
    constant, and no rate is above those of all larger sizes.

    Raises:
        ValueError: fewer than two sizes, or no size with rows of two lengths.
    """
    sizes = sorted({one.nbytes for one in times})
    rows = {size: {one.count for one in times if one.nbytes == size} for size in sizes}
    if len(sizes) < 2 or max(map(len, rows.values())) < 2:
        raise ValueError(
            f"copies: required two sizes and rows of two lengths, got sizes {sizes} and rows "
            f"{sorted(set().union(*rows.values()))}"
        )
    # Unknown are what a copy of each size adds to a row, and the rest: latency - gap.
    matrix = np.zeros((len(times), len(sizes) + 1))
    for i, one in enumerate(times):
        matrix[i, sizes.index(one.nbytes)] = one.count
        matrix[i, -1] = 1.0
    seconds = np.array([one.seconds for one in times])
    *each, rest = least_squares(matrix, seconds, signed=len(sizes))
    floor = min(one.seconds / one.count for one in times) * 1e-3
    each = [max(one, floor) for one in each]
    per_byte = (each[1] - each[0]) / (sizes[1] - sizes[0])
    gap = float(np.clip(each[0] - per_byte * sizes[0], 0.0, MOST_GAP * min(each)))
    rates = [size / (one - gap) for size, one in zip(sizes, each, strict=True)]
    # Noise in small copies, whose time is nearly all gap, would make them the fastest.
    for i in reversed(range(len(rates) - 1)):
        rates[i] = min(rates[i], max(rates[i + 1 :]))
    fit = CopyFit(max(rest + gap, 0.0), gap, tuple(zip(sizes, rates, strict=True)))
    errors = [abs(fit.seconds(one.nbytes, one.count) / one.seconds - 1) for one in times]
    return replace(fit, error=max(errors))


def in_front(seconds: Mapping[float, float], rate: Callable[[float], float]) -> float:
    """What copies, by their bytes, take beyond their bytes' time: the median, at least 0."""
    return max(median(taken - nbytes / rate(nbytes) for nbytes, taken in seconds.items()), 0.0)


@dataclass(frozen=True)
class Enqueued:
    """Seconds in which a host enqueued so many calls, products, copies and batches of signals."""

    seconds: float
    calls: int
    matmuls: int
    copies: int
    signals: int


def host(times: Sequence[Enqueued]) -> dict[str, float]:
    """Seconds of a call, and of each matmul, copy and signal that it enqueues.

    Raises:
        ValueError: fewer than four measurements.
    """
    if len(times) < 4:
        raise ValueError(f"host: required four measurements or more, got {len(times)}")
    matrix = np.array([(o.calls, o.matmuls, o.copies, o.signals) for o in times], float)
    values = least_squares(matrix, np.array([one.seconds for one in times]))
    return dict(zip(("call", "matmul", "copy", "signal"), values, strict=True))


def attention(
    units: int, calls: Sequence[LibraryCall], seconds: Sequence[float]
) -> tuple[float, float, float, dict[tuple[bool, int], float]]:
    """Seconds of a call, of a block of queries and, more, of a backward, and the operations per
    second of all processors of forwards and of backwards (True), by the size of heads.

    Raises:
        ValueError: larger calls of a size do not take longer.
    """
    kinds = sorted({(call.back, call.size) for call in calls})
    matrix = np.zeros((len(calls), 3 + len(kinds)))
    for row, (*shared, size, back) in zip(matrix, calls, strict=True):
        waves, work, idle = attention_loads(units, *shared)
        row[:3] = 1.0, waves, back
        row[3 + kinds.index((back, size))] = work + idle
    start, block, more, *each = least_squares(matrix, np.array(seconds))
    if min(each) <= 0:
        raise ValueError("attention: required larger calls to take longer, got no difference")
    return start, block, more, {kind: units / one for kind, one in zip(kinds, each, strict=True)}


def memory(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Bytes per second and latency, from (bytes read and written, seconds).

    Raises:
        ValueError: fewer than two sizes, or all take the same time.
    """
    if len(times) < 2:
        raise ValueError(f"memory: required two sizes or more, got {len(times)}")
    matrix = np.array([(nbytes, 1.0) for nbytes, _ in times])
    per_byte, latency = least_squares(matrix, np.array([seconds for _, seconds in times]))
    if per_byte <= 0:
        raise ValueError("memory: required larger copies to take longer, got no difference")
    return 1.0 / per_byte, latency


def topology(one_by_one: float, at_once: float) -> tuple[str, float]:
    """Kind and sharing, from the bytes per second that a rank receives from its peers one after
    the other, and from all of them at once."""
    gain = at_once / one_by_one
    return ("mesh", 1.0) if gain >= MESH_GAIN else ("switch", min(gain, 1.0))


def slowdown(without: Any, during: Any) -> float:
    """Median of the ratios of times during something else to those without it, round by round; at
    least 1."""
    return max(float(np.median(np.divide(during, without))), 1.0)


@dataclass(frozen=True)
class RowTime:
    """Seconds of ``count`` products of the same sizes in a row, in every call."""

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
        """What products that took so many seconds in a row take one by one: the inverse of
        ``heated``. A number, or an array."""
        return seconds - np.maximum(0.0, seconds - self.burst) * (1.0 - self.sustained)


def heat_of(gemm: Gemm) -> Heat:
    """What the block of a machine says."""
    return Heat(gemm.burst, gemm.sustained)


#: A device whose rows take as long as their products one by one.
COLD = Heat()


def heat(times: Sequence[RowTime]) -> Heat:
    """Seconds after which a device is at its power limit, and the share of its rate left then.

    The right pair gives every product of a row the same time, whatever the length of the row: it is
    the pair for which these times differ least, on a grid and then on a finer one around the best.
    A device without a limit that shows (:data:`LEAST_HEAT`, :data:`MOST_LEFT`) gets infinite and 1.

    Raises:
        ValueError: no product with rows of three lengths, which is the least that shows a bend.
    """
    rows = {one.product: [r for r in times if r.product == one.product] for one in times}
    lengths = {name: sorted({one.count for one in of}) for name, of in rows.items()}
    if max(map(len, lengths.values()), default=0) < 3:
        raise ValueError(f"heat: required rows of three lengths of a product, got {lengths}")
    pairs = [np.array([(one.count, one.seconds) for one in of]).T for of in rows.values()]

    def errors(bursts: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """Mean relative error of every pair of a burst and a share."""
        off = []
        for counts, seconds in pairs:
            over = np.maximum(0.0, seconds - bursts[:, None])
            each = np.log((seconds - over[:, None] * (1.0 - shares[:, None])) / counts)
            off.append(np.abs(each - np.median(each, axis=-1, keepdims=True)))
        return np.concatenate(off, axis=-1).mean(axis=-1)

    def best(bursts: np.ndarray, shares: np.ndarray) -> tuple[float, float, float]:
        off = errors(bursts, shares)
        i, j = np.unravel_index(np.argmin(off), off.shape)
        return float(bursts[i]), float(shares[j]), float(off[i, j])

    ends = min(one.seconds for one in times), max(one.seconds for one in times)
    burst, sustained, _ = best(np.geomspace(*ends, 60), np.linspace(0.4, 1.0, 61))
    finer = np.linspace(-1.0, 1.0, 41)
    shares = np.clip(sustained + 0.01 * finer, 0.01, 1.0)
    burst, sustained, left = best(burst * (ends[1] / ends[0]) ** (finer / 59), shares)
    without = float(errors(np.array([ends[1]]), np.ones(1)).item())
    if sustained > 1 - LEAST_HEAT or left > MOST_LEFT * without:
        return Heat(error=without)
    return Heat(burst, sustained, left)


def steadied(times: Mapping[str, Any], references: Sequence[str]) -> dict[str, float]:
    """Medians over rounds of times, each divided by how much slower the device was in its round:
    the median of the references' times in the round over that median's median over all rounds."""
    by_round = np.median([times[name] for name in references], axis=0)
    pace = by_round / np.median(by_round)
    return {
        name: float(np.median(series / pace))
        for name, series in times.items()
        if name not in references
    }
