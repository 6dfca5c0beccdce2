"""The parameters of the GEMM model, from measured products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ficco.machine.model import (
    Gemm,
    Provenance,
    both,
    interpolate,
    join_seconds,
    memory_seconds,
    tiles_seconds,
)

#: Tiles that vendor libraries are known to have, and into how many parts they cut k.
TILE_ROWS = (32, 64, 96, 128, 160, 192, 256)
TILE_COLS = (64, 128, 192, 256)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)

#: Samples from which waves are fitted; fewer say no more than a rate, a start and a bandwidth.
ENOUGH = 60

#: What a parameter that e times its first guess costs, as part of the mean error: what samples do
#: not determine stays where it was.
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
    """Relative errors of a model on samples: ``|predicted / measured - 1|``."""

    median: float
    mean: float
    worst: float


def errors(gemm: Gemm, samples: Sequence[Sample]) -> Errors:
    """How far a model is from samples."""
    off = np.abs(_predict(gemm, _columns(samples)) / [s.seconds for s in samples] - 1)
    return Errors(float(np.median(off)), float(off.mean()), float(off.max()))


def fit(
    samples: Sequence[Sample],
    *,
    units: int = 1,
    tiles: tuple[tuple[int, ...], tuple[int, ...]] = (TILE_ROWS, TILE_COLS),
    peak: float | None = None,
    launch: float = 0.0,
    known: Gemm | None = None,
    provenance: Provenance | None = None,
) -> Gemm:
    """The model that fits samples best, by the mean of ``|log(predicted / measured)|``.

    The same samples give the same model. With fewer than :data:`ENOUGH` samples, or one processor,
    tiles are left out, and a rate, a start and a bandwidth are fitted.

    Args:
        samples: measured products; times of a queue of them give a ``start`` that holds what lies
            between two, and ``launch`` is then 0.
        units: processors that work on one tile each.
        tiles: rows and columns that tiles may have.
        peak: operations per second of the smallest dtype that was measured; the highest rate that
            was seen where it is not known.
        launch: seconds between two products that are not in the samples' times.
        known: a model of the same device, for what samples do not tell: the shares of dtypes that
            were not measured, and what the power limit does. They stay as they are there. Samples
            are of a device that is not at its limit.
        provenance: of the block.

    Raises:
        ValueError: there is no sample, or one of no work or no time.
    """
    if not samples:
        raise ValueError("samples: required at least one measured product, got none")
    for sample in samples:
        if min(sample.m, sample.n, sample.k, sample.batch) < 1 or not 0 < sample.seconds < np.inf:
            raise ValueError(f"samples: required sizes and seconds above 0, got {sample}")
    columns, seconds = _columns(samples), np.array([s.seconds for s in samples])
    sizes = sorted({s.itemsize for s in samples})
    m, n, k, batch, itemsize, *_ = columns
    rates = 2.0 * batch * m * n * k / seconds
    fastest = {size: float(rates[itemsize == size].max()) for size in sizes}
    waves = len(samples) >= ENOUGH and units > 1
    peak = peak or max(fastest[sizes[0]], *fastest.values())
    guess = Gemm(
        peak=peak,
        units=units,
        launch=launch,
        efficiency=min(fastest[sizes[0]] / peak, 0.999),
        start=float(seconds.min()) / 2,
        bandwidth=float((_memory(_UNIT, columns) / seconds).max()),
        provenance=provenance or Provenance("fitted"),
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

    def made(x: Any) -> Gemm:
        values: dict[str, Any] = {
            name: float(getattr(guess, name) * np.exp(x[i])) for i, name in enumerate(names)
        }
        values["efficiency"] = min(values["efficiency"], 1.0)
        shares = [
            (size, float(share * np.exp(x[len(names) + i])))
            for i, (size, share) in enumerate(guess.shares[1:])
        ]
        return replace(guess, **values, shares=(guess.shares[0], *shares))

    def loss(x: Any) -> float:
        off = np.abs(np.log(_predict(made(x), columns) / seconds))
        return float(off.mean() + _PULL * np.abs(x).sum())

    fitted = made(_descend(loss, np.zeros(len(names) + len(sizes) - 1)))
    if known is None:
        return fitted
    # Shares are of the smallest dtype that was measured: one of the known model's, too, perhaps.
    scale = dict(fitted.shares)[sizes[0]] / interpolate(known.shares, sizes[0])
    shares = {size: min(1.0, share * scale) for size, share in known.shares if size > sizes[0]}
    shares |= dict(fitted.shares)
    return replace(
        fitted,
        shares=tuple(sorted(shares.items())),
        burst=known.burst,
        sustained=known.sustained,
    )


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
