"""Merges products into as few calls as possible: contiguous rows, and batches of equal strides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ficco.plan.model import Product


def merged(products: Sequence[Product]) -> tuple[Product, ...]:
    """The same products in as few calls of a library as possible."""
    if len(products) < 2:
        return tuple(products)
    batches: list[tuple[object, list[Product]]] = []
    for one in contiguous(products):
        kind = _kind(one)
        if batches and kind == batches[-1][0] and _repeats(batches[-1][1], one):
            batches[-1][1].append(one)
        else:
            batches.append((kind, [one]))
    return tuple([_batch(batch) for _, batch in batches])


def _repeats(batch: list[Product], one: Product) -> bool:
    """Whether a product has the same size and distance as those before."""
    first, last = batch[0], batch[-1]
    strides, rows = _strides(last, one), first.a.rows
    if one.a.rows != rows or min(strides) < rows:
        return False
    return first is last or strides == _strides(first, batch[1])


def _strides(one: Product, two: Product) -> tuple[int, int]:
    return two.a.row - one.a.row, two.out.row - one.out.row


def _batch(batch: list[Product]) -> Product:
    a_stride, out_stride = _strides(*batch[:2]) if len(batch) > 1 else (0, 0)
    return batch[0]._replace(batch=len(batch), a_stride=a_stride, out_stride=out_stride)


def contiguous(products: Iterable[Product]) -> tuple[Product, ...]:
    """The same products; those of rows that follow each other become one."""
    runs: list[list[Product]] = []
    for product in products:
        last = runs[-1][-1] if runs else None
        follows = last and (last.a.row_stop, last.out.row_stop) == (product.a.row, product.out.row)
        if last and follows and _kind(last) == _kind(product):
            runs[-1].append(product)
        else:
            runs.append([product])
    return tuple([_to(run[0], run[-1]) if run[1:] else run[0] for run in runs])


def _to(first: Product, last: Product) -> Product:
    """A product with all rows up to the end of another one."""
    a, out = (
        first.a._replace(row_stop=last.a.row_stop),
        first.out._replace(row_stop=last.out.row_stop),
    )
    ends = zip(first.factors[:1], last.factors, strict=False)
    of_a = [one._replace(row_stop=two.row_stop) for one, two in ends]
    return first._replace(a=a, out=out, factors=(*of_a, *first.factors[1:]))


def joined(products: Iterable[Product]) -> list[Product]:
    """The same transposed products; those of contiguous rows of A and of b become one."""
    products_left: list[Product] = []
    for product in products:
        last = products_left[-1] if products_left else None
        if last and last.out == product.out and last.b.row_stop == product.b.row:
            longer = last.a._replace(row_stop=product.a.row_stop)
            if product.a == longer._replace(row=last.a.row_stop):
                rows_of_b = last.b._replace(row_stop=product.b.row_stop)
                products_left[-1] = last._replace(a=longer, b=rows_of_b)
                continue
        products_left.append(product)
    return products_left


def _kind(product: Product) -> tuple[object, ...]:
    """The fields in which products of one call must agree."""
    a, out = product.a, product.out
    factors: tuple[object, ...] = product.factors
    if product.factors:  # those of a follow its rows, if each has one
        left, right = product.factors
        follows = left.rows == a.rows
        factors = (left.buffer, left.row - a.row, left[4:]) if follows else left, right
    return (
        product.b, a[4:], out[4:], a.buffer, out.buffer, product.accumulate, product.terms,
        product.addend, factors, product.bias,
    )  # fmt: skip
