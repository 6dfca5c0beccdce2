"""Tracks the order of a tensor's rows through views, permutations and pieces.

A collective always concatenates along the first dimension. A gather or scatter along another one
is the same collective, with the tensor cut up and joined again before or after it, and each
framework and version writes that in its own way. Here a tensor is a list of *labels* in row-major
order: views keep the list, permutations reorder it. Only the final order of the labels counts, so
that no list of spellings is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import FloorDiv

#: An int, or a symbolic one.
Size = Any


def same(one: Size, other: Size) -> bool:
    """Whether two sizes are equal for all values of the graph's dynamic sizes; adds no guard."""
    return bool(statically_known_true(one == other)) or _same_divided(one, other)


def _same_divided(one: Size, other: Size) -> bool:
    """As :func:`same`, for sizes that contain divisions known to have no remainder."""
    symbolic = next((size for size in (one, other) if isinstance(size, torch.SymInt)), None)
    if symbolic is None:
        return False
    shapes = symbolic.node.shape_env
    rest = (one - other).node.expr
    for divided in rest.atoms(FloorDiv):
        whole, by = divided.args
        more, part = whole.as_coeff_Add()  # (x + by - 1) // by rounds up
        if not (by.is_Integer and 0 <= more < by and part.free_symbols):
            continue
        size = shapes.create_symintnode(part, hint=None)
        if statically_known_true(size % int(by) == 0):
            rest = rest.subs(divided, part / by)
    return bool(rest.expand() == 0)


class Label(NamedTuple):
    """A factor of a dimension: its place in the original order, and its size."""

    key: tuple[int, ...]
    size: Size


Order = tuple[Label, ...]


class Unclear(Exception):
    """The order of the rows cannot be tracked; the text says where it was lost."""


def original(sizes: Sequence[Size]) -> Order:
    """The labels of a tensor in its own order; dimensions of one element have none."""
    return tuple(Label((i,), size) for i, size in enumerate(sizes) if not same(size, 1))


def dimensions(order: Order, shape: Sequence[Size]) -> list[Order]:
    """The labels of each dimension of a shape. A label is split if a dimension ends inside it."""
    rest, dims = order, []
    for size in shape:
        mine, rest = split(rest, size)
        dims.append(mine)
    return dims


def split(order: Order, size: Size) -> tuple[Order, Order]:
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


def permuted(order: Order, shape: Sequence[Size], perm: Sequence[int]) -> Order:
    """The order after ``permute(perm)`` of a tensor of this shape."""
    dims = dimensions(order, shape)
    return joined(dims[i] for i in perm)


def regrouped(order: Order, shape: Sequence[Size], source: int, target: int, pieces: int) -> Order:
    """The order after cutting a dimension into equal pieces and joining them along another."""
    dims = dimensions(order, shape)
    front, dims[source] = split(dims[source], pieces)
    dims[target] = front + dims[target]
    return joined(dims)


def of_ranks(label: Label) -> bool:
    """Whether a label belongs to the first dimension: in a collective's tensor, the ranks."""
    return label.key[0] == 0


def canonical(order: Order) -> Order:
    """The labels in their original order."""
    return tuple(sorted(order))


def rows_of(order: Order, shape: Sequence[Size]) -> Order | None:
    """The labels of a matrix's rows; None if its columns are not whole and in original order."""
    dims = dimensions(order, shape)
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
