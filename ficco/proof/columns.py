"""Rows of a proof as columns of numbers, one array for each field; rules and claims about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
#: Names the subject of a rule by its index.
Who = Callable[[int], str]


class PlanError(AssertionError):
    """A Plan breaks a rule. That is a bug of ficco, never an error of its caller."""


class Claim(NamedTuple):
    """Pairs of steps: the first must end before the second starts, in every interleaving."""

    first: Ints
    second: Ints
    who: Who
    why: str  # text of the error


def demand(holds: Bools, who: Who, why: str) -> None:
    """Raise PlanError about the first element of ``holds`` that is False."""
    if not holds.all():
        raise PlanError(f"{who(int(holds.argmin()))} {why}")


class Regions(NamedTuple):
    """As :class:`ficco.plan.model.Region`, with buffers as numbers."""

    buffer: Ints
    rank: Ints
    row: Ints
    row_stop: Ints
    col: Ints
    col_stop: Ints

    @property
    def rows(self) -> Ints:
        return self.row_stop - self.row

    @property
    def cols(self) -> Ints:
        return self.col_stop - self.col

    def at(self, index: Ints) -> Regions:
        return Regions(*(column[index] for column in self))

    def down(self, rows: Ints) -> Regions:
        return self._replace(row=self.row + rows, row_stop=self.row_stop + rows)


class Accesses(NamedTuple):
    """Reads and writes of steps.

    Attributes:
        row_shift, col_shift: offset from rows and columns of the buffer to their numbers among the
            rows and columns that leave or land.
        k_first, k_last: rows of b that a product sums over; -1 if no product writes.
        adds: 1 if a product adds the next part of a sum to the contents.
        terms: number of the set of ranks whose products are in the sum that is read or written.
        joins: number of the set of ranks in the sum that a write adds to; -1 if none.
    """

    step: Ints
    buffer: Ints
    rank: Ints
    row: Ints
    row_stop: Ints
    col: Ints
    col_stop: Ints
    row_shift: Ints
    col_shift: Ints
    k_first: Ints
    k_last: Ints
    adds: Ints
    terms: Ints
    joins: Ints

    @classmethod
    def of(
        cls,
        step: Ints,
        regions: Regions,
        row_shift: Ints,
        col_shift: Ints | int = 0,
        k: tuple[Ints | int, Ints | int] = (-1, -1),
        adds: Ints | int = 0,
        terms: Ints | int = 0,
        joins: Ints | int = -1,
    ) -> Accesses:
        """Accesses to regions. A single number applies to all accesses."""
        rest = (row_shift, col_shift, *k, adds, terms, joins)
        return cls(step, *regions, *(np.broadcast_to(one, step.shape) for one in rest))


def cut(group: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut the intervals of each ``group`` at all ends of intervals of the group.

    Returns the cuts of all groups in one array, and for each interval the index of its first part
    in that array and the number of its parts.
    """
    ends = np.concatenate([start, stop]) + np.tile(group * (stop.max(initial=0) + 1), 2)
    order = np.argsort(ends)
    new = np.diff(ends[order], prepend=-1) > 0
    index = np.empty(len(ends), np.int64)
    index[order] = np.cumsum(new) - 1
    first, last = index[: len(group)], index[len(group) :]
    return ends[order][new], first, last - first


def repeated(counts: Ints) -> tuple[Ints, Ints]:
    """Repeat row i ``counts[i]`` times: row and index of each repetition."""
    each = np.repeat(np.arange(len(counts)), counts)
    return each, np.arange(len(each)) - np.repeat(np.cumsum(counts) - counts, counts)


def ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


def bools(values: Iterable[object]) -> Bools:
    return np.fromiter(values, np.bool_)


def unzipped(rows: Sequence[Any], kind: type[Any]) -> Any:
    """The fields of rows of a kind as columns, under the same names."""
    return kind(*zip(*rows, strict=True)) if rows else kind(*[()] * len(kind._fields))
