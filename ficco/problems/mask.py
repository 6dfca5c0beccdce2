"""Which keys each query attends to, as rectangles of rows that libraries' calls have.

Ranks hold rows of the sequence in segments, whose positions follow each other. A segment ends where
a document of a packed sequence ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

#: Queries that one processor of a GPU attends with, in libraries' attention.
BLOCK = 128

#: How many products of each pair of a query and a key: for the scores and the result; for the
#: scores, the gradients of these and of the weights, and those of q, k and v.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5

#: Which positions a rank holds. ``"ranks"``: the sequence in the order of the ranks.
#: ``"head-tail"``: of 2 W chunks, rank r the chunks r and 2 W - 1 - r, so that under a causal mask
#: all ranks attend to equally many keys.
PLACEMENTS = ("ranks", "head-tail")

#: First and last row or position, exclusive.
Span = tuple[int, int]


class LibraryCall(NamedTuple):
    """A call of a library's attention, as processors share it.

    Attributes:
        blocks: how many blocks of queries, each of which one processor attends with.
        flops: floating-point operations of all, and ``longest`` those of the largest.
        size: of a head.
        back: whether it is the backward.
    """

    blocks: int
    flops: float
    longest: float
    size: int
    back: bool


class Segment(NamedTuple):
    """Rows whose positions in the sequence follow each other, of one document.

    Attributes:
        row: number of the first row, where they are.
        position: its position in the sequence.
        length: how many rows.
    """

    row: int
    position: int
    length: int

    def clipped(self, rows: Span) -> Segment:
        """Those of some rows; perhaps none."""
        first, last = max(rows[0], self.row), min(rows[1], self.row + self.length)
        return Segment(first, self.position + first - self.row, max(last - first, 0))


class Rectangle(NamedTuple):
    """One call of a library: rows of queries by rows of keys, with a band along the diagonal that
    ends in the last row of both.

    Attributes:
        q, q_stop, k, k_stop: first and last rows, exclusive.
        left, right: how many keys before and after its place on that diagonal a query attends to;
            None: all. There are no more queries than keys where one is given: for more, flash
            attention takes ``right=None`` for as many as there are keys, which are too few.
    """

    q: int
    q_stop: int
    k: int
    k_stop: int
    left: int | None = None
    right: int | None = None

    @property
    def whole(self) -> bool:
        """Whether every query attends to every key."""
        return self.left is None and self.right is None

    @property
    def causal(self) -> bool:
        """Whether it is masked as by a causal mask that ends in the last row of both."""
        return self.left is None and self.right == 0

    def moved(self, down: int, across: int) -> Rectangle:
        """The same of rows of queries and of keys that are so many further."""
        q, q_stop, k, k_stop, *band = self
        return Rectangle(q + down, q_stop + down, k + across, k_stop + across, *band)

    @property
    def squared(self) -> tuple[Rectangle, ...]:
        """The same as calls that all libraries have: a causal mask for as many queries as keys."""
        middle = self.k_stop - (self.q_stop - self.q)
        if not self.causal or middle == self.k:
            return (self,)
        return self._replace(k_stop=middle, right=None), self._replace(k=middle)

    def call(self, heads: int, size: int, products: int) -> LibraryCall:
        """The call for heads of a size, each of so many products for every pair."""
        queries, keys = self.q_stop - self.q, self.k_stop - self.k
        each = 2.0 * products * size
        if self.left is not None:  # and those that the block's other queries reach
            keys = min(keys, self.left + (self.right or 0) + BLOCK)
        blocks, most = heads * -(-queries // BLOCK), min(queries, BLOCK) * keys
        back = products == BACKWARD_PRODUCTS
        return LibraryCall(blocks, each * heads * self.pairs, each * most, size, back)

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key it has."""
        queries, keys = self.q_stop - self.q, self.k_stop - self.k
        # From the first query to the last, keys that are too far back rise one by one, and those
        # that are too far ahead fall to none.
        ahead = 0 if self.right is None else _sum(1, queries - 1 - self.right)
        last = 0 if self.left is None else keys - 1 - self.left
        return queries * keys - ahead - _sum(max(last - queries + 1, 1), last)


@dataclass(frozen=True)
class Documents:
    """Rectangles of one band, of documents that follow each other, as one call for variable
    lengths.

    Attributes:
        rectangles: whose rows of queries rise, and those of keys.
    """

    rectangles: tuple[Rectangle, ...]

    @cached_property
    def band(self) -> Rectangle:
        """All rows from the first to the last, with the band of each document."""
        first, last = self.rectangles[0], self.rectangles[-1]
        return first._replace(q_stop=last.q_stop, k_stop=last.k_stop)

    @cached_property
    def bounds(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where sequences of queries and of keys begin, and their ends, from the first row on. Rows
        that no rectangle has are sequences without keys, or without queries."""
        queries, keys = [0], [0]
        for one in self.rectangles:
            q, k = one.q - self.band.q, one.k - self.band.k
            for begin, end in (
                (q, keys[-1]),
                (q, k),
                (one.q_stop - self.band.q, one.k_stop - self.band.k),
            ):
                if (begin, end) != (queries[-1], keys[-1]):
                    queries.append(begin)
                    keys.append(end)
        return tuple(queries), tuple(keys)

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The most queries and keys of a document, and of queries at least two: for one each, flash
        attention takes them to be as many as sequences."""
        queries = max(one.q_stop - one.q for one in self.rectangles)
        return max(queries, 2), max(one.k_stop - one.k for one in self.rectangles)

    @cached_property
    def runs(self) -> list[Rectangle]:
        """The rows of rectangles that follow each other without a gap."""
        found: list[Rectangle] = []
        for one in self.rectangles:
            if found and (found[-1].q_stop, found[-1].k_stop) == (one.q, one.k):
                found[-1] = found[-1]._replace(q_stop=one.q_stop, k_stop=one.k_stop)
            else:
                found.append(one)
        return found


def packed(rectangles: Iterable[Rectangle]) -> list[Documents]:
    """The same rectangles in few calls for variable lengths."""
    found: list[list[Rectangle]] = []
    for one in rectangles:
        for some in found:
            last = some[-1]
            follows = last.q_stop <= one.q and last.k_stop <= one.k
            if follows and (last.left, last.right) == (one.left, one.right):
                some.append(one)
                break
        else:
            found.append([one])
    return [Documents(tuple(some)) for some in found]


def _sum(first: int, last: int) -> int:
    """The sum of the integers from first to last, if there are any."""
    return (first + last) * (last - first + 1) // 2 if first <= last else 0


@dataclass(frozen=True)
class Mask:
    """What queries at a position attend to.

    Attributes:
        causal: nothing after it.
        window: with causal, at most so many positions before it; None: all.
        bounds: where documents of a packed sequence begin, and its end; empty: it is one.
    """

    causal: bool = False
    window: int | None = None
    bounds: tuple[int, ...] = ()

    def segments(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        """Segments cut where documents end."""
        for row, position, length in segments:
            stop, here = position + length, position
            inner = self.bounds[bisect_right(self.bounds, position) :]
            for bound in inner[: bisect_left(inner, stop)]:
                yield Segment(row + here - position, here, bound - here)
                here = bound
            if here < stop:
                yield Segment(row + here - position, here, stop - here)

    def seen(self, queries: Span, keys: Segment) -> Span:
        """The rows of a segment of keys that some query at these positions attends to; the
        positions are of one document, as the keys are."""
        first, last = keys.position, keys.position + keys.length
        if self.bounds and self._document(queries[0]) != self._document(first):
            return keys.row, keys.row
        if self.window is not None:
            first = max(first, queries[0] - self.window)
        if self.causal:
            last = min(last, queries[1])
        last = max(first, last)
        return keys.row + first - keys.position, keys.row + last - keys.position

    def _document(self, position: int) -> int:
        return bisect_right(self.bounds, position)

    def rectangles(
        self, queries: Sequence[Segment], keys: Sequence[Segment]
    ) -> tuple[Rectangle, ...]:
        """What queries attend to of keys, each pair once; segments as :meth:`segments` cuts them,
        in the order of their rows."""
        found: list[Rectangle] = []
        for query in queries:
            found += _joined([one for key in keys for one in self._of(query, key)], _beside)
        apart = (part for one in _joined(found, _below) for part in one.squared)
        return tuple(apart)

    def _of(self, query: Segment, key: Segment) -> Iterator[Rectangle]:
        """The rectangles of two segments."""
        if not query.length or not key.length:
            return
        first, last = self.seen((query.position, query.position + query.length), key)
        if first == last:
            return
        begin = key.position + first - key.row  # positions of the keys that are seen
        end = begin + last - first
        q, q_stop = query.position, query.position + query.length
        if self.causal:
            q = max(q, begin)
        if self.window is not None:
            q_stop = min(q_stop, end + self.window)

        def rectangle(a: int, b: int, left: int | None, right: int | None) -> Rectangle:
            row = query.row - query.position
            return Rectangle(row + a, row + b, first, last, left, right)

        ahead = min(q_stop, end) if self.causal and end - 1 > q else q
        if ahead > q:  # queries among the keys: a diagonal that ends in the last of both
            reaches = self.window is None or ahead - 1 - self.window <= begin
            yield rectangle(q, ahead, None if reaches else self.window, 0)
        far = q_stop if self.window is None else min(q_stop, begin + self.window + 1)
        if ahead < far:
            yield rectangle(ahead, far, None, None)
        if self.window is not None and max(ahead, far) < q_stop:  # the first keys are out of reach
            yield rectangle(max(ahead, far), q_stop, end - q_stop + self.window, None)


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same rows as few spans, in rising order."""
    found: list[Span] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def _joined(
    rectangles: list[Rectangle], join: Callable[[Rectangle, Rectangle], Rectangle | None]
) -> list[Rectangle]:
    """Fewer rectangles with the same pairs: neighbours become one where they can."""
    found: list[Rectangle] = []
    for one in rectangles:
        last = found[-1] if found else None
        joined = None
        if last is not None and last.left is None and one.left is None:
            joined = join(last, one)
        if joined is None:
            found.append(one)
        else:
            found[-1] = joined
    return found


def _beside(one: Rectangle, two: Rectangle) -> Rectangle | None:
    """Keys that follow keys, of the same queries: the first must be seen by all."""
    if one.whole and one[:2] == two[:2] and one.k_stop == two.k:
        return two._replace(k=one.k)
    return None


def _below(one: Rectangle, two: Rectangle) -> Rectangle | None:
    """Queries that follow queries: of the same keys, or along the diagonal."""
    if one.q_stop != two.q or one.k != two.k:
        return None
    if one.whole and two.whole and one.k_stop == two.k_stop:
        return one._replace(q_stop=two.q_stop)
    down, across = two.q_stop - two.q, two.k_stop - one.k_stop
    if one.causal and two.causal and down == across:
        return one._replace(q_stop=two.q_stop, k_stop=two.k_stop)
    return None
