"""What each cluster of the tiled product computes, in which order, and how long that takes.

Pure functions: no device, no clock. :func:`listed` makes the work list of a :class:`Work` for a
:class:`Tiling` and a :class:`Cut`; :func:`best` chooses the two by simulating the lists.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# The same numbers as in hopper.cpp.
MAX_PRODUCTS = 8
MAX_GATES = 128
MAX_ANNOUNCED = 128
#: Columns of A in one step along k.
BK = 64
#: int32 of an :class:`TileItem`.
ITEM_INTS = 12
#: Warps of a block that store, each of which counts its half of a tile.
STORE_WARPS = 2

#: Row blocks whose tiles follow one another column by column, so that B and A stay in L2.
BAND = 8
#: The most parts of a tile, on average, where a remainder is cut at any k, and where into equals.
PARTS, EQUAL_PARTS = 4, 8
#: Steps along k: the fewest of an average part, and of a piece at the end of a tile.
PART_STEPS, EDGE_STEPS = 8, 4
#: Seconds of a call that computes nothing, and bytes per second at which one SM writes or reads
#: parts (H200, driver 580.159.04, 2026-11-23).
CALL_S = 4.4e-6
PART_BYTES_PER_S = 100e9


class Tiling(NamedTuple):
    """Rows and columns of a block's tile, stages of its ring of loads, and blocks of a cluster, one
    below another (``cm``) or side by side (``cn``)."""

    bm: int
    bn: int
    stages: int
    cm: int = 1
    cn: int = 1

    @property
    def blocks(self) -> int:
        """Blocks of a cluster."""
        return self.cm * self.cn

    @property
    def rows(self) -> int:
        """Rows of a cluster's tile."""
        return self.bm * self.cm

    @property
    def columns(self) -> int:
        """Columns of a cluster's tile."""
        return self.bn * self.cn


class RowSpan(NamedTuple):
    """Rows [first, last) of a product."""

    product: int
    first: int
    last: int


class Cut(Enum):
    """Which tiles are cut along k: none, or what does not fill a round of all clusters. Evenly is
    one even share of the remainder for each cluster, wherever tiles end; equally is into as many
    equal parts of each tile as there are clusters for."""

    NONE = "none"
    END_EVENLY = "at the end, evenly"
    END_EQUALLY = "at the end, equally"
    EACH_EVENLY = "of each group, evenly"
    EACH_EQUALLY = "of each group, equally"
    LAST_EVENLY = "of the last group, evenly"
    LAST_EQUALLY = "of the last group, equally"

    @property
    def equally(self) -> bool:
        return self.value.endswith("equally")


@dataclass(frozen=True)
class Work:
    """Products that share B, and what their rows wait for and announce.

    Attributes:
        rows: of each product, at least 1.
        n, k: multiples of 8.
        gates: for each gate the rows that need it, in the order in which gates should open.
        announces: for each announcement its rows, in the order in which they should be complete.
        opens: when the gates are expected to open, in seconds after the start; by default at once.
    """

    rows: tuple[int, ...]
    n: int
    k: int
    gates: tuple[tuple[RowSpan, ...], ...] = ()
    announces: tuple[tuple[RowSpan, ...], ...] = ()
    opens: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.rows) <= MAX_PRODUCTS or min(self.rows) < 1:
            raise ValueError(
                f"rows: required 1 to {MAX_PRODUCTS} positive numbers, got {self.rows}"
            )
        for name in ("n", "k"):
            if getattr(self, name) < 8 or getattr(self, name) % 8:
                raise ValueError(f"{name}: required a multiple of 8, got {getattr(self, name)}")
        for name, most in (("gates", MAX_GATES), ("announces", MAX_ANNOUNCED)):
            if len(getattr(self, name)) > most:
                raise ValueError(f"{name}: required at most {most}, got {len(getattr(self, name))}")
        for product, first, last in (s for spans in self.gates + self.announces for s in spans):
            if not (0 <= product < len(self.rows) and 0 <= first < last <= self.rows[product]):
                raise ValueError(f"required rows of a product, got {product}, {first}, {last}")
        if not all(self.announces):
            raise ValueError("announces: required rows for each, got none for one")
        if self.opens and len(self.opens) != len(self.gates):
            raise ValueError(f"opens: required {len(self.gates)} times, got {len(self.opens)}")


class TileItem(NamedTuple):
    """One entry of a list, as in hopper.cpp; ranges are inclusive and (0, -1) if empty."""

    product: int
    row: int
    column: int
    k0: int
    kn: int
    tile: int
    slot: int
    others: int
    gate_first: int
    gate_last: int
    announce_first: int
    announce_last: int

    @property
    def is_part(self) -> bool:
        """Whether another cluster adds what this one computes."""
        return self.tile >= 0 and not self.others


@dataclass(frozen=True, eq=False)
class TileList:
    """A work list.

    Attributes:
        items: int32 of shape (rounds, clusters, ``ITEM_INTS``); the last round is empty.
        slots: parts of tiles that are written, each of ``Tiling.rows * Tiling.columns`` float32.
        tiles: that are cut along k.
        targets: for each announcement the number of additions that complete it.
        seconds: what the simulation of the list takes, with the cost of a call.
    """

    work: Work
    tiling: Tiling
    cut: Cut
    items: npt.NDArray[np.int32]
    slots: int
    tiles: int
    targets: tuple[int, ...]
    seconds: float

    @property
    def clusters(self) -> int:
        return int(self.items.shape[1])


class _Block(NamedTuple):
    """Rows of a product that tiles share, with the ranges of their gates and announcements."""

    product: int
    row: int
    gates: tuple[int, int]
    announces: tuple[int, int]


class _Tile(NamedTuple):
    block: _Block
    column: int


def _group(block: _Block) -> tuple[int, int]:
    """Sorts by what arrives first, then by what is announced first, if at all."""
    first, last = block.announces
    return block.gates[1], first if last >= 0 else MAX_ANNOUNCED


def _range(
    spans: Sequence[Iterable[RowSpan]], product: int, first: int, last: int
) -> tuple[int, int]:
    """The range of those that meet rows of a product."""
    met = [
        index
        for index, of in enumerate(spans)
        if any(p == product and begin < last and first < end for p, begin, end in of)
    ]
    return (met[0], met[-1]) if met else (0, -1)


def _groups(work: Work, tiling: Tiling) -> list[tuple[float, list[_Tile]]]:
    """Tiles that can begin at the same time, with that time, in order."""
    blocks = []
    for product, rows in enumerate(work.rows):
        for row in range(0, rows, tiling.rows):
            at = product, row, min(row + tiling.rows, rows)
            ranges = _range(work.gates, *at), _range(work.announces, *at)
            blocks.append(_Block(product, row, *ranges))
    groups = []
    for (gate, _), members in groupby(sorted(blocks, key=_group), _group):
        together = list(members)
        tiles = [
            _Tile(block, column)
            for band in range(0, len(together), BAND)
            for column in range(0, work.n, tiling.columns)
            for block in together[band : band + BAND]
        ]
        opens = max(work.opens[: gate + 1], default=0.0)
        groups.append((opens, tiles))
    return groups


@dataclass
class _Maker:
    """Gives tiles to the clusters that are free first."""

    work: Work
    tiling: Tiling
    clusters: int
    step_s: float
    free: list[float] = field(init=False)
    lists: list[list[TileItem]] = field(init=False)
    slots: int = 0
    tiles: int = 0

    def __post_init__(self) -> None:
        self.free = [0.0] * self.clusters
        self.lists = [[] for _ in range(self.clusters)]
        self.steps = -(-self.work.k // BK)
        self.part_s = self.tiling.bm * self.tiling.bn * 4 / PART_BYTES_PER_S

    def put(
        self,
        cluster: int,
        tile: _Tile,
        opens: float,
        k0: int,
        kn: int,
        cut: tuple[int, int, int] = (-1, 0, 0),
    ) -> None:
        """One item; ``cut`` is its ``tile``, ``slot`` and ``others``."""
        block = tile.block
        place = block.product, block.row, tile.column, k0, kn
        self.lists[cluster].append(TileItem(*place, *cut, *block.gates, *block.announces))
        parts = (1 + cut[2]) * self.part_s if cut[0] >= 0 else 0.0
        self.free[cluster] = max(self.free[cluster], opens) + self.step_s * kn + parts

    def whole(self, tiles: Iterable[_Tile], opens: float) -> None:
        heap = [(max(s, opens), len(self.lists[c]), c) for c, s in enumerate(self.free)]
        heapq.heapify(heap)
        for tile in tiles:
            cluster = heap[0][2]
            self.put(cluster, tile, opens, 0, self.steps)
            heapq.heapreplace(heap, (self.free[cluster], len(self.lists[cluster]), cluster))

    def cut(self, tiles: Sequence[_Tile], opens: float, equally: bool) -> None:
        """Spread fewer tiles than there are clusters over all of them."""
        if not tiles:
            return
        shares = self._equal(len(tiles)) if equally else self._even(len(tiles))
        if all(len(pieces) == 1 for pieces in shares):
            return self.whole(tiles, opens)
        order = sorted(range(self.clusters), key=lambda c: (self.free[c], c))
        # Tile by tile: a cluster's part of a tile comes before the tile that it owns, so that no
        # circle of owners waits.
        for tile, pieces in zip(tiles, shares, strict=True):
            others = len(pieces) - 1
            for index, (place, k0, kn) in enumerate(pieces):
                part = self.tiles, self.slots + max(0, index - 1), 0 if index else others
                self.put(order[place], tile, opens, k0, kn, part if others else (-1, 0, 0))
            self.slots += others
            self.tiles += others > 0

    def _equal(self, count: int) -> list[list[tuple[int, int, int]]]:
        """Of each tile the pieces: place in the order of clusters, first step, number of steps."""
        parts = max(1, min(EQUAL_PARTS, self.clusters // count, self.steps // PART_STEPS))
        ends = [self.steps * i // parts for i in range(parts + 1)]
        return [
            [(p * count + tile, ends[p], ends[p + 1] - ends[p]) for p in range(parts)]
            for tile in range(count)
        ]

    def _even(self, count: int) -> list[list[tuple[int, int, int]]]:
        """Like :meth:`_equal`; a share goes on in the next tile, but not for few steps."""
        steps = self.steps
        total = count * steps
        shares = min(self.clusters, count * PARTS, max(1, total // PART_STEPS))
        ends = [round(total * (i + 1) / shares) for i in range(shares)]
        ends = [
            end if EDGE_STEPS <= end % steps <= steps - EDGE_STEPS else round(end / steps) * steps
            for end in ends
        ]
        pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
        low = 0
        for place, high in enumerate(ends):
            while low < high:
                tile = low // steps
                end = min(high, (tile + 1) * steps)
                pieces[tile].append((place, low - tile * steps, end - low))
                low = end
        return pieces


def listed(work: Work, tiling: Tiling, cut: Cut, clusters: int, step_s: float) -> TileList:
    """The work list of ``clusters`` clusters; ``step_s`` is the seconds that a cluster takes for
    one step of ``BK`` along k. The same arguments always give the same list."""
    maker = _Maker(work, tiling, clusters, step_s)
    groups = _groups(work, tiling)
    if cut in (Cut.END_EVENLY, Cut.END_EQUALLY):
        left = sum(len(tiles) for _, tiles in groups) % clusters
        rest: list[_Tile] = []
        opens = groups[-1][0]
        for _, tiles in reversed(groups):
            keep = max(0, len(tiles) - left)
            left -= len(tiles) - keep
            rest = tiles[keep:] + rest
            del tiles[keep:]
        for at, tiles in groups:
            maker.whole(tiles, at)
        maker.cut(rest, opens, cut.equally)
    else:
        each = cut in (Cut.EACH_EVENLY, Cut.EACH_EQUALLY)
        last = cut in (Cut.LAST_EVENLY, Cut.LAST_EQUALLY)
        for index, (at, tiles) in enumerate(groups):
            cuts = each or (last and index == len(groups) - 1)
            keep = len(tiles) // clusters * clusters if cuts else len(tiles)
            maker.whole(tiles[:keep], at)
            maker.cut(tiles[keep:], at, cut.equally)
    rounds = max(map(len, maker.lists)) + 1
    items = np.zeros((rounds, clusters, ITEM_INTS), np.int32)
    targets = np.zeros(len(work.announces), int)
    for cluster, of in enumerate(maker.lists):
        if of:
            items[: len(of), cluster] = of
        for item in of:
            if not item.is_part:
                targets[item.announce_first : item.announce_last + 1] += STORE_WARPS * tiling.blocks
    counts = maker.slots, maker.tiles, tuple(targets.tolist())
    seconds = CALL_S + _makespan(maker)
    return TileList(work, tiling, cut, items, *counts, seconds)


def _makespan(maker: _Maker) -> float:
    """Seconds until all clusters have gone through their lists, whose owners wait for parts."""
    opens, step_s, part_s = maker.work.opens, maker.step_s, maker.part_s
    at = [0.0] * maker.clusters
    done = [0] * maker.clusters
    written: dict[int, list[float]] = {}
    waits = list(range(maker.clusters))
    while waits:
        blocked = []
        for cluster in waits:
            for item in maker.lists[cluster][done[cluster] :]:
                if len(written.get(item.tile, ())) < item.others:
                    blocked.append(cluster)
                    break
                begins = (
                    max(at[cluster], *opens[: item.gate_last + 1], 0.0) if opens else at[cluster]
                )
                at[cluster] = begins + step_s * item.kn
                if item.is_part:
                    at[cluster] += part_s
                    written.setdefault(item.tile, []).append(at[cluster])
                elif item.others:
                    at[cluster] = max(at[cluster], *written[item.tile]) + part_s * item.others
                done[cluster] += 1
        if blocked == waits:
            raise AssertionError("owners wait for each other's parts")
        waits = blocked
    return max(at)


def best(
    work: Work, steps_s: Mapping[Tiling, float], processors: int, cuts: Iterable[Cut] = Cut
) -> TileList:
    """The list with the least predicted time.

    Args:
        steps_s: for each tiling the seconds that a cluster takes for one step along k.
        processors: that the kernel may use.
    """
    lists = (
        listed(work, tiling, cut, processors // tiling.blocks, step_s)
        for tiling, step_s in steps_s.items()
        for cut in cuts
    )
    return min(lists, key=lambda made: made.seconds)
