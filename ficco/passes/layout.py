"""Tracks the order of a tensor's rows through views, permutations and pieces.

A collective always concatenates along the first dimension. A gather or scatter along another one
is the same collective, with the tensor cut up and joined again before or after it, and each
framework and version writes that in its own way. Here a tensor is a list of *labels* in row-major
order: views keep the list, permutations reorder it. Only the final order of the labels counts, so
that no list of spellings is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

#: An int, or a symbolic one.
Size = Any
#: Whether two sizes are known to be equal.
Same = Callable[[Size, Size], bool]


class Label(NamedTuple):
    """A factor of a dimension: its place in the original order, and its size."""

    key: tuple[int, ...]
    size: Size


Order = tuple[Label, ...]


class Unclear(Exception):
    """The order of the rows cannot be tracked; the text says where it was lost."""


def original(sizes: Sequence[Size], same: Same) -> Order:
    """The labels of a tensor in its own order; dimensions of one element have none."""
    return tuple(Label((i,), size) for i, size in enumerate(sizes) if not same(size, 1))


def dimensions(order: Order, shape: Sequence[Size], same: Same) -> list[Order]:
    """The labels of each dimension of a shape. A label is split if a dimension ends inside it."""
    rest, dims = order, []
    for size in shape:
        mine, rest = split(rest, size, same)
        dims.append(mine)
    return dims


def split(order: Order, size: Size, same: Same) -> tuple[Order, Order]:
    """The first labels that span ``size`` elements, and the others."""
    rest, mine = list(order), list[Label]()
    while not same(total(mine), size):
        if not rest:
            raise Unclear("a view that cuts rows apart, or whose sizes are not known")
        label = rest.pop(0)
        room = _quotient(size, total(mine))
        if room is not None and isinstance(label.size, int) and label.size > room:
            second = _quotient(label.size, room)
            if second is None:
                raise Unclear("a view that cuts rows apart")
            rest.insert(0, Label((*label.key, 1), second))
            label = Label((*label.key, 0), room)
        mine.append(label)
    return tuple(mine), tuple(rest)


def permuted(order: Order, shape: Sequence[Size], perm: Sequence[int], same: Same) -> Order:
    """The order after ``permute(perm)`` of a tensor of this shape."""
    dims = dimensions(order, shape, same)
    return joined(dims[i] for i in perm)


def regrouped(
    order: Order, shape: Sequence[Size], source: int, target: int, pieces: int, same: Same
) -> Order:
    """The order after cutting a dimension into equal pieces and joining them along another."""
    dims = dimensions(order, shape, same)
    front, dims[source] = split(dims[source], pieces, same)
    dims[target] = front + dims[target]
    return joined(dims)


def of_ranks(label: Label) -> bool:
    """Whether a label belongs to the first dimension: in a collective's tensor, the ranks."""
    return label.key[0] == 0


def canonical(order: Order) -> Order:
    """The labels in their original order."""
    return tuple(sorted(order))


def rows_of(order: Order, shape: Sequence[Size], same: Same) -> Order | None:
    """The labels of a matrix's rows; None if its columns are not whole and in original order."""
    dims = dimensions(order, shape, same)
    columns, rows = dims[-1], joined(dims[:-1])
    return rows if columns == canonical(joined(dims))[len(rows) :] else None


def total(labels: Sequence[Label]) -> Size:
    """The number of elements that labels span."""
    return prod(label.size for label in labels)


def joined(dims: Any) -> Order:
    """The labels of several dimensions in one list."""
    return tuple(label for dim in dims for label in dim)


def _quotient(size: Size, by: Size) -> int | None:
    """size / by if both are known and it is a whole number."""
    if isinstance(size, int) and isinstance(by, int) and by and size % by == 0:
        return size // by
    return None
