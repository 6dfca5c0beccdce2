"""Merges products into as few calls as possible: contiguous rows, and batches of equal strides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ficco.plan.model import Product


def merged(products: Sequence[Product]) -> tuple[Product, ...]:
    """The same products in as few calls of a library as possible."""
    if len(products) < 2:
        return tuple(products)
    batches: list[_RowRun] = []
    for run in _runs(products):
        if not (batches and batches[-1].repeats(run)):
            batches.append(run)
    return tuple([run.whole() for run in batches])


def contiguous(products: Iterable[Product]) -> tuple[Product, ...]:
    """The same products; those of rows that follow each other become one."""
    return tuple([run.whole() for run in _runs(products)])


def _runs(products: Iterable[Product]) -> list[_RowRun]:
    runs: list[_RowRun] = []
    for product in products:
        kind = _kind(product)
        if not (runs and runs[-1].goes_on(product, kind)):
            runs.append(_RowRun(product, kind, product.a.row, product.out.row, product.a.rows))
    return runs


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
    scales = [(s.buffer, s.row - a.row, s[4:]) for s in product.scales[:1]], product.scales[1:]
    return (
        product.b, a[4:], out[4:], a.buffer, out.buffer, product.accumulate, product.terms,
        product.addend, scales,
    )  # fmt: skip


@dataclass(slots=True)
class _RowRun:
    """Contiguous rows of A and of the product, once or as a batch with strides."""

    first: Product
    kind: tuple[object, ...]
    a: int
    out: int
    rows: int
    batch: int = 1
    a_stride: int = 0
    out_stride: int = 0

    def goes_on(self, product: Product, kind: tuple[object, ...]) -> bool:
        """Take in a product if its rows follow directly; returns whether they do."""
        distance = product.a.row - self.a, product.out.row - self.out
        if distance != (self.rows, self.rows) or kind != self.kind:
            return False
        self.rows += product.a.rows
        return True

    def repeats(self, other: _RowRun) -> bool:
        """Take in a run if it has the same size and distance as those before; returns whether."""
        if other.rows != self.rows or other.kind != self.kind:
            return False
        a_stride = other.a - self.a - (self.batch - 1) * self.a_stride
        out_stride = other.out - self.out - (self.batch - 1) * self.out_stride
        strides = a_stride, out_stride
        if self.batch > 1 and strides != (self.a_stride, self.out_stride):
            return False
        if min(strides) < self.rows:
            return False
        self.batch += 1
        self.a_stride, self.out_stride = strides
        return True

    def whole(self) -> Product:
        first = self.first
        if self.rows == first.a.rows and self.batch == 1:
            return first
        return first._replace(
            a=first.a._replace(row_stop=self.a + self.rows),
            out=first.out._replace(row_stop=self.out + self.rows),
            scales=(
                *(s._replace(row_stop=s.row + self.rows) for s in first.scales[:1]),
                *first.scales[1:],
            ),
            batch=self.batch,
            a_stride=self.a_stride,
            out_stride=self.out_stride,
        )
