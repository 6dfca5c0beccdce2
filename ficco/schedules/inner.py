"""Plans of products that sum over the rows that travel, as the gradient of a weight does.

Rows of A that arrive are multiplied by the same rows of the local B, and each product adds to the
whole result. Pieces of rows thus act as pieces of columns do in a product of A itself, but need no
strided copies. Pieces of columns make rows of the result.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from itertools import chain
from operator import itemgetter

from ficco.plan.model import Product, Region
from ficco.schedules.builder import Builder
from ficco.schedules.gather import OWN, GatherStage, GatherWorld
from ficco.schedules.groups import Unit
from ficco.schedules.runs import joined

#: Disjoint ranges of rows of the result, in rising order.
Spans = list[tuple[int, int]]


class InnerGatherStage(GatherStage):
    """Builds one Plan. Products that add to the same rows stay on one lane, in the order in which
    they are enqueued, so that results repeat to the last bit."""

    def __init__(self, world: GatherWorld, builder: Builder) -> None:
        super().__init__(world, builder)
        whole = (0, self.problem.k)
        self.made = self._adding([whole] if self._own_is_separate() else [])
        self.adds = any(product.accumulate for product in chain.from_iterable(self.made))
        out = world.out.name
        if not self.adds and self.product != out:  # each sum is one product, which rounds itself
            self.product = out
            self.made = [
                [one._replace(out=one.out._replace(buffer=out)) for one in products]
                for products in self.made
            ]
        self.last = self._last()

    def _adding(self, begun: Spans) -> list[list[Product]]:
        """The products of each group, which add to the rows that earlier ones have begun."""
        by_group = []
        for pieces in self.products:
            products = joined(pieces)
            for index, product in enumerate(products):
                if _within(product, begun):
                    products[index] = product._replace(accumulate=True)
                else:
                    insort(begun, (product.out.row, product.out.row_stop))
            by_group.append(products)
        return by_group

    def _last(self) -> list[Spans]:
        """By group, the rows of the result to which it is the last to add."""
        over: Spans = []
        by_group: list[Spans] = []
        for products in reversed(self.made):
            spans: Spans = []
            for product in products:
                if not _within(product, over):  # a tail's pieces are the last of their rows
                    spans.append((product.out.row, product.out.row_stop))
                    insort(over, spans[-1])
            by_group.append(sorted(spans))
        return by_group[::-1]

    def _of_peer(self, peer: int) -> list[Product]:
        whole = Region(self.product, self.me, 0, self.problem.k, 0, self.problem.n)
        outs = [whole] * self.mine.count(peer)
        if self.schedule.dims == 2:
            outs = [whole._replace(row=u.start, row_stop=u.stop) for u in self.mine.units(peer)]
        rights = [self._right(*rows, *whole[4:]) for rows in self.mine.rows(peer)]
        pieces = zip(self.regions[peer], rights, outs, strict=True)
        return [Product(*piece, transposed=True) for piece in pieces]

    def _own_is_separate(self) -> bool:
        """Also if no rank has a row for this one: the product makes a result of zeros."""
        return super()._own_is_separate() or not self.problem.product_rows(self.me)

    def _own_product(self) -> Product:
        n, rows = self.problem.n, self.world.block(self.me, self.me)
        out = Region(self.product, self.me, 0, self.problem.k, 0, n)
        return Product(self._own_rows(), self._right(*rows, 0, n), out, transposed=True)

    def _compute_lane(self, group: int, units: list[Unit]) -> str:
        return self.compute_lanes[0 if self.adds else group % self.schedule.compute]

    def _products(self, group: int) -> tuple[Product, ...]:
        return tuple(self.made[group])

    def completed(self, group: int) -> Iterable[tuple[int, int]]:
        return [] if group == OWN else self.last[group]


def _within(product: Product, spans: Spans) -> bool:
    before = bisect_right(spans, product.out.row, key=itemgetter(0)) - 1
    return before >= 0 and product.out.row < spans[before][1]
