"""From measured seconds to the figures of a Machine. Numbers in, numbers out; no device. All raise
``ValueError`` for seconds that determine too little. Every effort has enough sizes and rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from ficco.machine.model import (
    Gemm,
    Provenance,
    attention_loads,
    both,
    interpolate,
    join_seconds,
    memory_seconds,
    tiles_seconds,
)
from ficco.problems.mask import LibraryCall

#: Gain of concurrent copies to all peers over copies to one peer after the other that shows a link
#: per pair; a shared port has no gain.
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
        # Decrease of the squares by a step of each column, for columns of length 1.
        gains = np.where(free, -np.inf, a.T @ left / lengths)
        if gains.max() <= 1e-12 * math.sqrt(len(y)):
            break
        free[gains.argmax()] = True
        tried, trial = best, solved(free)
        while (outside := free & bounded & (trial <= 0)).any():
            # Go towards the trial until an unknown reaches 0, and bind it there.
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
    """Fitted fields of :class:`ficco.machine.Copies`; ``error``: largest relative error."""

    latency: float
    gap: float
    curve: tuple[tuple[float, float], ...]
    error: float


def messages(times: Sequence[CopyTime]) -> tuple[float, float]:
    """Latency and bytes per second of messages, from rows of them: ``count`` messages of s bytes
    take a time of their own and ``count * (latency + s / rate)``.
    """
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
    """
    sizes = sorted({one.nbytes for one in times})
    # Unknowns: the time that a copy of each size adds to a row, and the rest, latency - gap.
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
    latency, curve = max(rest + gap, 0.0), dict(zip(sizes, rates, strict=True))
    errors = []
    for one in times:
        row = one.count * one.nbytes / curve[one.nbytes] + (one.count - 1) * gap
        errors.append(abs((latency + row) / one.seconds - 1))
    return CopyFit(latency, gap, tuple(curve.items()), max(errors))


def in_front(seconds: Mapping[float, float], rate: Callable[[float], float]) -> float:
    """Median time of copies beyond the time of their bytes, at least 0."""
    return max(median(taken - nbytes / rate(nbytes) for nbytes, taken in seconds.items()), 0.0)


@dataclass(frozen=True)
class Enqueued:
    """Seconds of a host to enqueue a number of calls, products, copies and batches of signals."""

    seconds: float
    calls: int
    matmuls: int
    copies: int
    signals: int


#: Seconds of an operation that cannot be told from none.
NOTHING_S = 1e-7


def host(times: Sequence[Enqueued]) -> dict[str, float]:
    """Seconds of a call, and of each matmul, copy and signal that it enqueues; 0 if it is less than
    :data:`NOTHING_S`."""
    matrix = np.array([(o.calls, o.matmuls, o.copies, o.signals) for o in times], float)
    fitted = least_squares(matrix, np.array([one.seconds for one in times]))
    values = [one * (one >= NOTHING_S) for one in fitted]
    return dict(zip(("call", "matmul", "copy", "signal"), values, strict=True))


def attention(
    units: int, calls: Sequence[LibraryCall], seconds: Sequence[float]
) -> tuple[float, float, float, dict[tuple[bool, int], float]]:
    """Seconds of a call, of a block of queries and, more, of a backward, and the operations per
    second of all processors of forwards and of backwards (True), by the size of heads.
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
    """Bytes per second and latency, from (bytes read and written, seconds)."""
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
    """Power limit of a device for :meth:`ficco.machine.Gemm.heated`; ``error``: mean relative error
    on the rows."""

    burst: float = math.inf
    sustained: float = 1.0
    error: float = 0.0

    @property
    def limited(self) -> bool:
        """Whether the device has a power limit that shows."""
        return self.sustained < 1.0

    def cold(self, seconds: Any) -> Any:
        """Seconds of products one by one, from their seconds in a row: the inverse of ``heated``. A
        number, or an array."""
        return seconds - np.maximum(0.0, seconds - self.burst) * (1.0 - self.sustained)


#: A device whose rows take as long as their products one by one.
COLD = Heat()


def heat_of(gemm: Gemm | None) -> Heat:
    """The power limit of a machine's block; none without it."""
    return Heat(gemm.burst, gemm.sustained) if gemm else COLD


def heat(times: Sequence[RowTime]) -> Heat:
    """Seconds after which a device is at its power limit, and the share of its rate left then.

    With the right pair, a product takes the same time in rows of any length. The fit takes the pair
    with the smallest differences, on a grid and then on a finer grid around the best. A device
    without a limit that shows (:data:`LEAST_HEAT`, :data:`MOST_LEFT`) gets infinite and 1.
    """
    rows = {one.product: [r for r in times if r.product == one.product] for one in times}
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
    """Medians of times over rounds, corrected for the pace of the device: a time is divided by the
    median of the references' times in its round, relative to the median over all rounds."""
    by_round = np.median([times[name] for name in references], axis=0)
    pace = by_round / np.median(by_round)
    others = times.keys() - {*references}
    return {name: float(np.median(times[name] / pace)) for name in times if name in others}


# Products.

#: Tiles that vendor libraries are known to have, and into how many parts they cut k.
TILE_ROWS = (32, 64, 96, 128, 160, 192, 256)
TILE_COLS = (64, 128, 192, 256)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)

#: Least samples for a fit of waves; fewer determine only a rate, a start and a bandwidth.
ENOUGH = 60

#: Penalty of a parameter of e times its first guess, in units of the mean error: parameters that
#: samples do not determine keep their guess.
_PULL = 3e-4


@dataclass(frozen=True)
class Sample:
    """One product as it was measured, in the terms of :meth:`Gemm.seconds`."""

    m: int
    n: int
    k: int
    batch: int
    itemsize: int
    wide: bool
    seconds: float
    rights: int = 1


@dataclass(frozen=True)
class Errors:
    """Relative errors of predictions: ``|predicted / measured - 1|``."""

    median: float
    mean: float
    worst: float

    @classmethod
    def of(cls, predicted: Any, measured: Sequence[float]) -> Errors:
        off = np.abs(np.divide(predicted, measured) - 1)
        return cls(float(np.median(off)), float(off.mean()), float(off.max()))

    def __str__(self) -> str:
        return f"{self.median:.1%} median, {self.mean:.1%} mean, {self.worst:.1%} worst"


def errors(gemm: Gemm, samples: Sequence[Sample]) -> Errors:
    """How far a model is from samples."""
    return Errors.of(_predict(gemm, _columns(samples)), [s.seconds for s in samples])


def fit(
    samples: Sequence[Sample],
    *,
    units: int = 1,
    tiles: tuple[tuple[int, ...], tuple[int, ...]] = (TILE_ROWS, TILE_COLS),
    peak: float | None = None,
    known: Gemm | None = None,
) -> Gemm:
    """The model that fits samples best, by the mean of ``|log(predicted / measured)|``.

    The same samples give the same model. With fewer than :data:`ENOUGH` samples, or one processor,
    tiles are left out, and a rate, a start and a bandwidth are fitted.

    Args:
        samples: measured products. From times of a queue of products, ``start`` includes the time
            between two products.
        units: processors that work on one tile each.
        tiles: rows and columns that tiles may have.
        peak: operations per second of the smallest dtype that was measured; the highest rate that
            was seen where it is not known.
        known: a model of the same device, for the shares of dtypes without samples and for the
            power limit. Samples are of a device below its power limit.
    """
    columns, seconds = _columns(samples), np.array([s.seconds for s in samples])
    if not ((seconds > 0) & np.isfinite(seconds)).all():
        raise ValueError(f"samples: required seconds above 0, got {seconds.min():g}")
    sizes = sorted({s.itemsize for s in samples})
    m, n, k, batch, itemsize, *_ = columns
    rates = 2.0 * batch * m * n * k / seconds
    fastest = {size: float(rates[itemsize == size].max()) for size in sizes}
    waves = len(samples) >= ENOUGH and units > 1
    peak = peak or max(fastest[sizes[0]], *fastest.values())
    guess = Gemm(
        peak=peak,
        units=units,
        launch=0.0,
        efficiency=min(fastest[sizes[0]] / peak, 0.999),
        start=float(seconds.min()) / 2,
        bandwidth=float((_memory(_UNIT, columns) / seconds).max()),
        provenance=Provenance("fitted"),
        tile_rows=tiles[0] if waves else (1,),
        tile_cols=tiles[1] if waves else (1,),
        splits=SPLITS if waves else (1,),
        prologue=0.5e-6 if waves else 0.0,
        step=20e-9 if waves else 0.0,
        write=peak / 150 if waves else None,
        join=1e-6 if waves else 0.0,
        shares=tuple((float(s), min(1.0, fastest[s] / fastest[sizes[0]])) for s in sizes),
    )
    names = ["efficiency", "start", "bandwidth"]
    names += ["prologue", "step", "write", "join"] if waves else []

    def gemm_of(x: Any) -> Gemm:
        factors = np.exp(x).tolist()
        values: dict[str, Any] = {
            name: getattr(guess, name) * factor
            for name, factor in zip(names, factors, strict=False)
        }
        values["efficiency"] = min(values["efficiency"], 1.0)
        others = zip(guess.shares[1:], factors[len(names) :], strict=True)
        shares = [(size, share * factor) for (size, share), factor in others]
        return replace(guess, **values, shares=(guess.shares[0], *shares))

    def loss(x: Any) -> float:
        off = np.abs(np.log(_predict(gemm_of(x), columns) / seconds))
        return float(off.mean() + _PULL * np.abs(x).sum())

    fitted = gemm_of(_descend(loss, np.zeros(len(names) + len(sizes) - 1)))
    if known is None:
        return fitted
    # Shares are of the smallest dtype that was measured: one of the known model's, too, perhaps.
    scale = dict(fitted.shares)[sizes[0]] / interpolate(known.shares, sizes[0])
    shares = {size: min(1.0, share * scale) for size, share in known.shares if size > sizes[0]}
    shares |= dict(fitted.shares)
    limit = {"burst": known.burst, "sustained": known.sustained}
    return replace(fitted, shares=tuple(sorted(shares.items())), **limit)


_UNIT = Gemm(1.0, 1, 0.0, 1.0, 0.0, 1.0, Provenance("assumed"))


def _columns(samples: Sequence[Sample]) -> list[Any]:
    """m, n, k, batch, itemsize, wide and rights of all samples."""
    names = ("m", "n", "k", "batch", "itemsize", "wide", "rights")
    return [np.array([getattr(s, name) for s in samples], dtype=float) for name in names]


def _predict(gemm: Gemm, columns: list[Any]) -> Any:
    """:meth:`Gemm.seconds` of many products at once."""
    m, n, k, batch, itemsize, wide, _ = columns
    share = {size: interpolate(gemm.shares, size) for size in set(itemsize)}
    rate = gemm.peak * gemm.efficiency * np.array([share[size] for size in itemsize])
    best = np.full(len(m), np.inf)
    for rows in gemm.tile_rows:
        for cols in gemm.tile_cols:
            tiles = batch * np.ceil(m / rows) * np.ceil(n / cols)
            for split in gemm.splits:
                parts = tiles * split
                busy, _ = tiles_seconds(gemm, rows, cols, parts, k / split, itemsize, wide, rate)
                busy = busy + join_seconds(gemm, m, n, batch, split)
                if split > 1:
                    busy = np.where(parts > gemm.units, np.inf, busy)
                best = np.minimum(best, busy)
    return gemm.start + both(best, _memory(gemm, columns))


def _memory(gemm: Gemm, columns: list[Any]) -> Any:
    """Seconds of the memory for many products at once."""
    m, n, k, batch, itemsize, wide, rights = columns
    return memory_seconds(gemm, m, n, k, batch, itemsize, wide, rights=rights)


def _descend(loss: Callable[[Any], float], x: Any) -> Any:
    """A minimum of a loss, by steps along one axis at a time that grow and shrink."""
    steps, best = np.full(len(x), 0.3), loss(x)
    while steps.max() > 0.01:
        for axis in range(len(x)):
            for step in (steps[axis], -steps[axis]):
                tried = x.copy()
                tried[axis] += step
                new = loss(tried)
                if new < best - 1e-9:
                    x, best = tried, new
                    steps[axis] *= 1.3
                    break
            else:
                steps[axis] /= 2
    return x
