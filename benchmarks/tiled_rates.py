"""Fit the costs of tiles on one GPU to measured products, for ``ficco.compute.tiled.worklist``.

    python -m benchmarks.tiled_products FOLDER
    python -m benchmarks.tiled_rates FOLDER/tiled.csv [--processors 132] [--each-left-out]

Prints a ``TileRates`` for the GPU of the file, then for each shape and layout of B the loss of the
list that these rates choose, compared with the best measured list. With ``--each-left-out`` the
rates that choose for a shape are fitted to the other shapes. ``TileRates.cache`` is not fitted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from ficco.compute.tiled.worklist import H100, Cut, TileRates, Tiling, Work, listed
from ficco.dma.tiles import work_of
from ficco.problems.products import Problem
from ficco.schedules import Schedule, plans

#: A list that is slower than the best list of its product by this share has the weight 1 / e.
SCALE = 1 / 3
#: Weight of the level of a product's times, relative to their ratios, which decide the choice.
LEVEL = 0.3
SCALARS = [field.name for field in fields(TileRates) if field.name not in ("multiply", "cache")]
Floats = npt.NDArray[np.float64]


class Product(NamedTuple):
    """``pieces`` is the number of pieces of each of 4 shards; 0 if all rows are present."""

    m: int
    n: int
    k: int
    b_rows: bool
    pieces: int


@cache
def _work(product: Product) -> Work:
    m, n, k, _, pieces = product
    if not pieces:
        return Work((m,), n, k)
    problem = Problem("all_gather_matmul", (m // 4,) * 4, n, k, "bfloat16")
    plan = plans(problem, Schedule.parse(f"tiled:pieces={pieces}"))[0]
    return work_of(plan, next(step for step in plan.steps if step.gates))


class TimedList(NamedTuple):
    product: Product
    tiling: Tiling
    cut: Cut
    us: float

    def predicted_us(self, rates: TileRates, processors: int) -> float:
        work, b_rows = _work(self.product), self.product.b_rows
        clusters = processors // self.tiling.blocks
        tiles = sum(-(-rows // self.tiling.rows) for rows in work.rows)
        active = min(clusters, tiles * -(-work.n // self.tiling.columns))
        active = active if self.cut is Cut.NONE else clusters
        costs = rates.costs(self.tiling, work.n, work.k, b_rows, active)
        return listed(work, self.tiling, self.cut, clusters, costs).seconds * 1e6


def read(path: Path) -> list[TimedList]:
    frame = pd.read_csv(path)
    frame = frame[(frame.tiling != "library") & frame.what.isna() & ~frame.wrong]
    return [
        TimedList(
            Product(row.m, row.n, row.k, row.b_rows, row.pieces),
            Tiling(*map(int, row.tiling.split("x"))),
            Cut[row.cut],
            row.us,
        )
        for row in frame.itertuples()
    ]


def least_squares(residuals: Callable[[Floats], Floats], at: Floats, rounds: int = 12) -> Floats:
    """Minimise the sum of squares of the residuals by Levenberg and Marquardt's method."""
    damping, now = 1e-2, residuals(at)
    for _ in range(rounds):
        nudged = [residuals(at + 1e-3 * row) for row in np.eye(len(at))]
        slope = (np.stack(nudged, 1) - now[:, None]) / 1e-3
        while damping < 1e6:
            square = slope.T @ slope
            step = np.linalg.solve(square + damping * np.eye(len(at)), -slope.T @ now)
            after = residuals(at + step)
            if after @ after < now @ now:
                at, now, damping = at + step, after, damping / 5
                break
            damping *= 5
    return at


def fitted(timed: Sequence[TimedList], processors: int, start: TileRates) -> TileRates:
    """Rates that minimise the squared errors of log time."""
    tilings = sorted({item.tiling for item in timed})
    products = sorted({item.product for item in timed})
    index = np.array([products.index(item.product) for item in timed])
    us = np.array([item.us for item in timed])
    least = np.array([us[index == i].min() for i in range(len(products))])
    weight = np.exp(-(us / least[index] - 1) / SCALE)

    def rates(at: Floats) -> TileRates:
        values = np.exp(at).tolist()
        multiply = dict(zip(tilings, values, strict=False))
        return TileRates(multiply, *values[len(tilings) :])

    def residuals(at: Floats) -> Floats:
        guess = rates(at)
        error = np.log([item.predicted_us(guess, processors) for item in timed]) - np.log(us)
        level = np.bincount(index, weight * error) / np.bincount(index, weight)
        return np.concatenate((weight * (error - level[index]), LEVEL * weight * error))

    begin = [start.multiply.get(tiling, 2.4e-9 * tiling.bn) for tiling in tilings]
    begin += [getattr(start, name) for name in SCALARS]
    return rates(least_squares(residuals, np.log(begin)))


def losses(
    timed: Sequence[TimedList], rates: TileRates, processors: int
) -> dict[Product, tuple[float, TimedList]]:
    """Loss of the list with the least predicted time, for each product, and that list."""
    result = {}
    for product in sorted({item.product for item in timed}):
        lists = [item for item in timed if item.product == product]
        best = min(item.us for item in lists)
        chosen = min(lists, key=lambda item: item.predicted_us(rates, processors))
        result[product] = chosen.us / best - 1, chosen
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--processors", type=int, default=132, help="of the GPU (132)")
    parser.add_argument("--each-left-out", action="store_true", help="check for overfitting")
    options = parser.parse_args(arguments)
    timed, processors = read(options.csv), options.processors
    rates = fitted(timed, processors, H100)
    rounded = {name: float(f"{getattr(rates, name):.3g}") for name in SCALARS}
    multiply = {tiling: float(f"{step:.3g}") for tiling, step in rates.multiply.items()}
    rates = replace(rates, multiply=multiply, **rounded)
    print(rates)
    lost = losses(timed, rates, processors)
    if options.each_left_out:
        for shape in sorted({product[:3] for product in lost}):
            left_out = [item for item in timed if item.product[:3] == shape]
            others = [item for item in timed if item.product[:3] != shape]
            lost |= losses(left_out, fitted(others, processors, rates), processors)
    for product, (loss, chosen) in lost.items():
        name = f"{'x'.join(map(str, chosen.tiling))} {chosen.cut.name}"
        print(f"{product} {name}: loses {loss:.1%} at {chosen.us:.1f} us")
    shares = [loss for loss, _ in lost.values()]
    print(f"loses {np.mean(shares):.2%} in the mean and {max(shares):.2%} at most")


if __name__ == "__main__":
    main()
