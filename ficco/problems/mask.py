"""Attention masks: the keys that each query attends to, as rectangles for the calls of a library.

A rank holds rows of the sequence in segments of consecutive positions. A segment ends where a
document of a packed sequence ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

#: Queries that one processor of a GPU handles at a time, in libraries' attention.
BLOCK = 128

#: Products per pair of a query and a key. Forward: scores and result. Backward: scores, and the
#: gradients of weights, q, k and v.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5

#: Placements of positions on ranks. ``"ranks"``: the sequence in the order of the ranks.
#: ``"head-tail"``: rank r holds the chunks r and 2 W - 1 - r of 2 W chunks. Under a causal mask all
#: ranks then attend to equally many keys.
PLACEMENTS = ("ranks", "head-tail")

#: First and last row or position, exclusive.
Span = tuple[int, int]


class LibraryCall(NamedTuple):
    """The work of one call of a library's attention, in blocks of queries.

    Attributes:
        blocks: number of blocks of queries. One processor handles one block.
        flops: floating-point operations of all blocks.
        longest: floating-point operations of the largest block.
        size: head size.
        back: whether it is the backward.
    """

    blocks: int
    flops: float
    longest: float
    size: int
    back: bool


class Segment(NamedTuple):
    """Rows at consecutive positions of the sequence, of one document.

    Attributes:
        row: number of the first row in the matrix that holds the rows.
        position: position of the first row in the sequence.
        length: number of rows.
    """

    row: int
    position: int
    length: int

    def clipped(self, rows: Span) -> Segment:
        """The part of the segment within a range of rows; its length may be 0."""
        first, last = max(rows[0], self.row), min(rows[1], self.row + self.length)
        return Segment(first, self.position + first - self.row, max(last - first, 0))


class Rectangle(NamedTuple):
    """One call of a library: rows of queries by rows of keys, masked by a band along the diagonal
    that ends in the last row of both.

    Attributes:
        q, q_stop, k, k_stop: first and last rows, exclusive.
        left, right: number of keys before and after its place on the diagonal that a query attends
            to; None: all keys. If either is set there are no more queries than keys: for more
            queries, flash attention reads ``right=None`` as the number of keys, which is too small.
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
        """Whether the mask is a causal one that ends in the last row of queries and keys."""
        return self.left is None and self.right == 0

    def moved(self, down: int, across: int) -> Rectangle:
        """The rectangle moved by ``down`` rows of queries and ``across`` rows of keys."""
        q, q_stop, k, k_stop, *band = self
        return Rectangle(q + down, q_stop + down, k + across, k_stop + across, *band)

    @property
    def squared(self) -> tuple[Rectangle, ...]:
        """Calls that every library serves: causal masks cover as many queries as keys."""
        middle = self.k_stop - (self.q_stop - self.q)
        if not self.causal or middle == self.k:
            return (self,)
        return self._replace(k_stop=middle, right=None), self._replace(k=middle)

    def call(self, heads: int, size: int, products: int) -> LibraryCall:
        """The work of the call for heads of a size, with ``products`` products per pair."""
        queries, keys = self.q_stop - self.q, self.k_stop - self.k
        per_pair = 2.0 * products * size
        if self.left is not None:  # the bands of all queries of a block span BLOCK more keys
            keys = min(keys, self.left + (self.right or 0) + BLOCK)
        blocks, most_pairs = heads * -(-queries // BLOCK), min(queries, BLOCK) * keys
        back = products == BACKWARD_PRODUCTS
        return LibraryCall(blocks, per_pair * heads * self.pairs, per_pair * most_pairs, size, back)

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key in the band."""
        queries, keys = self.q_stop - self.q, self.k_stop - self.k
        # From each query to the next, the keys before the band grow by one, and the keys after the
        # band shrink by one, to 0.
        ahead = 0 if self.right is None else _sum_of_range(1, queries - 1 - self.right)
        last = 0 if self.left is None else keys - 1 - self.left
        return queries * keys - ahead - _sum_of_range(max(last - queries + 1, 1), last)


@dataclass(frozen=True)
class Documents:
    """Rectangles of successive documents with the same band, as one variable-length call.

    Attributes:
        rectangles: in rising order of their rows of queries and of keys.
    """

    rectangles: tuple[Rectangle, ...]

    @cached_property
    def band(self) -> Rectangle:
        """All rows from the first to the last, with the band of the documents."""
        first, last = self.rectangles[0], self.rectangles[-1]
        return first._replace(q_stop=last.q_stop, k_stop=last.k_stop)

    @cached_property
    def bounds(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bounds of the sequences of queries and of keys, counted from the first row of each. Rows
        outside all rectangles become sequences without keys, or without queries."""
        queries, keys = [0], [0]
        for rectangle in self.rectangles:
            q, k = rectangle.q - self.band.q, rectangle.k - self.band.k
            for q_bound, k_bound in (
                (q, keys[-1]),
                (q, k),
                (rectangle.q_stop - self.band.q, rectangle.k_stop - self.band.k),
            ):
                if (q_bound, k_bound) != (queries[-1], keys[-1]):
                    queries.append(q_bound)
                    keys.append(k_bound)
        return tuple(queries), tuple(keys)

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The most queries and the most keys of a document. At least two queries are returned: with
        one, flash attention assumes as many queries as sequences."""
        queries = max(q_stop - q for q, q_stop, *_ in self.rectangles)
        return max(queries, 2), max(k_stop - k for _, _, k, k_stop, *_ in self.rectangles)

    @cached_property
    def runs(self) -> list[Rectangle]:
        """The rectangles, those without a gap between them joined into one."""
        joined: list[Rectangle] = []
        for rectangle in self.rectangles:
            if joined and (joined[-1].q_stop, joined[-1].k_stop) == (rectangle.q, rectangle.k):
                joined[-1] = joined[-1]._replace(q_stop=rectangle.q_stop, k_stop=rectangle.k_stop)
            else:
                joined.append(rectangle)
        return joined


def packed(rectangles: Iterable[Rectangle]) -> list[Documents]:
    """Pack rectangles into few variable-length calls."""
    calls: list[list[Rectangle]] = []
    for rectangle in rectangles:
        for call in calls:
            last = call[-1]
            follows = last.q_stop <= rectangle.q and last.k_stop <= rectangle.k
            if follows and (last.left, last.right) == (rectangle.left, rectangle.right):
                call.append(rectangle)
                break
        else:
            calls.append([rectangle])
    return [Documents(tuple(call)) for call in calls]


def _sum_of_range(first: int, last: int) -> int:
    """The sum of the integers from first to last; 0 if last is below first."""
    return (first + last) * (last - first + 1) // 2 if first <= last else 0


@dataclass(frozen=True)
class Mask:
    """The keys that a query attends to, by its position.

    Attributes:
        causal: no keys after the query.
        window: with causal, at most this many positions before the query; None: all.
        bounds: where documents of a packed sequence begin, and its end; empty: one document.
    """

    causal: bool = False
    window: int | None = None
    bounds: tuple[int, ...] = ()

    def segments(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        """Cut segments where documents end."""
        for row, position, length in segments:
            stop, start = position + length, position
            later = self.bounds[bisect_right(self.bounds, position) :]
            for bound in later[: bisect_left(later, stop)]:
                yield Segment(row + start - position, start, bound - start)
                start = bound
            if start < stop:
                yield Segment(row + start - position, start, stop - start)

    def seen(self, queries: Span, keys: Segment) -> Span:
        """The rows of a segment of keys that any query of a range of positions attends to. The
        queries are of one document, and so are the keys."""
        first, last = keys.position, keys.position + keys.length
        if self.bounds and self._document_at(queries[0]) != self._document_at(first):
            return keys.row, keys.row
        if self.window is not None:
            first = max(first, queries[0] - self.window)
        if self.causal:
            last = min(last, queries[1])
        last = max(first, last)
        return keys.row + first - keys.position, keys.row + last - keys.position

    def _document_at(self, position: int) -> int:
        return bisect_right(self.bounds, position)

    def rectangles(
        self, queries: Sequence[Segment], keys: Sequence[Segment]
    ) -> tuple[Rectangle, ...]:
        """Rectangles that cover every pair of a query and a key that it attends to, once. Segments
        must be cut by :meth:`segments`, and in the order of their rows."""
        rectangles: list[Rectangle] = []
        for query in queries:
            by_key = [part for key in keys for part in self._rectangles(query, key)]
            rectangles += _join(by_key, _join_keys)
        return tuple(part for joined in _join(rectangles, _join_queries) for part in joined.squared)

    def _rectangles(self, query: Segment, key: Segment) -> Iterator[Rectangle]:
        """The rectangles of a segment of queries and a segment of keys."""
        if not query.length or not key.length:
            return
        first, last = self.seen((query.position, query.position + query.length), key)
        if first == last:
            return
        begin = key.position + first - key.row  # positions of the keys that are attended to
        end = begin + last - first
        q, q_stop = query.position, query.position + query.length
        if self.causal:
            q = max(q, begin)
        if self.window is not None:
            q_stop = min(q_stop, end + self.window)

        def rectangle(a: int, b: int, left: int | None, right: int | None) -> Rectangle:
            row = query.row - query.position
            return Rectangle(row + a, row + b, first, last, left, right)

        causal_stop = min(q_stop, end) if self.causal and end - 1 > q else q
        if causal_stop > q:  # queries at the positions of keys: a diagonal up to the last of both
            reaches = self.window is None or causal_stop - 1 - self.window <= begin
            yield rectangle(q, causal_stop, None if reaches else self.window, 0)
        whole_stop = q_stop if self.window is None else min(q_stop, begin + self.window + 1)
        if causal_stop < whole_stop:
            yield rectangle(causal_stop, whole_stop, None, None)
        start = max(causal_stop, whole_stop)
        if self.window is not None and start < q_stop:  # the window excludes the first keys
            yield rectangle(start, q_stop, end - q_stop + self.window, None)


def merged(spans: Iterable[Span]) -> list[Span]:
    """Merge overlapping and adjacent spans; the result is in rising order."""
    disjoint: list[Span] = []
    for first, last in sorted(spans):
        if disjoint and first <= disjoint[-1][1]:
            disjoint[-1] = disjoint[-1][0], max(last, disjoint[-1][1])
        else:
            disjoint.append((first, last))
    return disjoint


def _join(
    rectangles: list[Rectangle], pair: Callable[[Rectangle, Rectangle], Rectangle | None]
) -> list[Rectangle]:
    """Join neighbouring rectangles where ``pair`` can; the covered pairs stay the same."""
    joined: list[Rectangle] = []
    for rectangle in rectangles:
        last = joined[-1] if joined else None
        both = None
        if last is not None and last.left is None and rectangle.left is None:
            both = pair(last, rectangle)
        if both is None:
            joined.append(rectangle)
        else:
            joined[-1] = both
    return joined


def _join_keys(first: Rectangle, second: Rectangle) -> Rectangle | None:
    """Join adjacent keys of the same queries, if every query attends to all of the first keys."""
    if first.whole and first[:2] == second[:2] and first.k_stop == second.k:
        return second._replace(k=first.k)
    return None


def _join_queries(first: Rectangle, second: Rectangle) -> Rectangle | None:
    """Join adjacent queries: of the same keys, or along the diagonal."""
    if first.q_stop != second.q or first.k != second.k:
        return None
    if first.whole and second.whole and first.k_stop == second.k_stop:
        return first._replace(q_stop=second.q_stop)
    down, across = second.q_stop - second.q, second.k_stop - first.k_stop
    if first.causal and second.causal and down == across:
        return first._replace(q_stop=second.q_stop, k_stop=second.k_stop)
    return None
