"""Work lists of the tiled product: the items of each cluster in order, and their predicted time.

Pure functions: no device, no clock. :func:`listed` builds the work list of a :class:`Work` for a
:class:`Tiling` and a :class:`Cut`; :func:`best` chooses the two by simulating the lists.

The simulator (:mod:`ficco.simulate.events`) has a coarser model of the same product: it needs times
while arrivals are still unknown, a few hundred times per decision. docs/tiled.md compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# The kernels have the same constants.
MAX_PRODUCTS = 8
MAX_GATES = 128
MAX_ANNOUNCED = 128
#: Columns of A in one step along k, for elements of two bytes.
BK = 64
#: int32 of an :class:`TileItem`.
ITEM_INTS = 12

#: Row blocks of a band. Its tiles are ordered column by column, so that A and B stay in L2.
BAND = 8
#: Maximum of equal parts of a tile.
PARTS = 8
#: Minimum of steps along k of a part, and of a piece at the end of a tile.
PART_STEPS, EDGE_STEPS = 8, 4
#: A gate counts as open when a group begins, if its expected time multiplied by this is earlier.
EARLY = 1.5
#: Share of the time of an empty call before its clusters begin.
BEGIN = 0.7
#: Exponent of the norm that combines the times of multiplying and of loading a step.
_SHARP = 8


class Tiling(NamedTuple):
    """Shape of tiles and clusters.

    ``bm``, ``bn``: rows and columns of a block's tile. ``stages``: stages of its ring of loads.
    ``cm``, ``cn``: blocks of a cluster along the rows and along the columns."""

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
    """Tiles that are cut along k: none, the last incomplete round of clusters, or the incomplete
    round of each group from some group on."""

    NONE = "none"
    END = "at the end"
    EACH = "of each group"
    HALF = "of each group in the second half"
    QUARTER = "of each group in the last quarter"
    LAST = "of the last group"

    def first(self, groups: int) -> int:
        """The first group whose tiles may be cut."""
        parts = {Cut.EACH: 1, Cut.HALF: 2, Cut.QUARTER: 4}.get(self)
        if parts is None:
            return groups - (self is Cut.LAST)
        return groups - -(-groups // parts)


@dataclass(frozen=True)
class Work:
    """Products that share B, with the gates and announcements of their rows.

    Attributes:
        rows: rows of each product, at least 1.
        n, k: multiples of 8. ``k`` counts units of two bytes: one bfloat16 or two float8.
        gates: rows behind each gate, in the expected order of opening.
        announces: rows of each announcement, in the preferred order of completion.
        opens: expected time of each gate's opening, in seconds after the start; by default 0.
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
    """One item of a list, laid out as in the kernels. Ranges are inclusive; (0, -1) is empty."""

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
        """Whether another cluster adds this item's sums."""
        return self.tile >= 0 and not self.others


@dataclass(frozen=True, eq=False)
class TileList:
    """A work list.

    Attributes:
        items: int32 [rounds, clusters, ``ITEM_INTS``]; the last round is empty.
        slots: written parts of tiles, each ``Tiling.rows * Tiling.columns`` float32.
        tiles: number of tiles that are cut along k.
        targets: for each announcement, the number of stored blocks that completes it.
        seconds: predicted time.
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


@dataclass(frozen=True)
class TileCosts:
    """Costs of a cluster's work with one tiling, in seconds.

    Attributes:
        call: an empty call.
        step: one step of ``BK`` along k.
        tile: overhead of a tile.
        write, add: writing or adding one part of a tile.
        fetch: reading B once from the device's memory; 0 if B stays in L2.
        slowdown: relative slowdown once the GPU has reached its power limit.
        settles: time constant of that slowdown.
    """

    call: float
    step: float
    tile: float = 0.0
    write: float = 0.0
    add: float = 0.0
    fetch: float = 0.0
    slowdown: float = 0.0
    settles: float = 400e-6

    def seconds(self, end: float, busy: float, groups: int) -> float:
        """Seconds of a call.

        Args:
            end: time from the begin of the first cluster to the end of the last.
            busy: average busy time of a cluster.
            groups: number of groups. Each group reads B.
        """
        end = (end**_SHARP + (groups * self.fetch) ** _SHARP) ** (1 / _SHARP)
        # Only busy clusters heat the GPU.
        hot = self.slowdown * (1 - math.exp(-busy / self.settles)) * (busy / end) ** 2
        return (1 - BEGIN) * self.call + end + hot * busy


@dataclass(frozen=True)
class TileRates:
    """Rates of one GPU, the input of :class:`TileCosts`; benchmarks/tiled_rates.py fits them.

    Attributes:
        multiply: seconds of one step with operands in shared memory, by tiling.
        bytes_per_s: total rate at which the processors load operands.
        memory: bandwidth of the device's memory in bytes per second.
        cache: bytes of B that stay in L2.
        call, slowdown: as in :class:`TileCosts`.
        tile, write, add: as in :class:`TileCosts`, for a block of 256 columns.
    """

    multiply: Mapping[Tiling, float]
    bytes_per_s: float
    memory: float
    cache: float
    call: float
    tile: float
    write: float
    add: float
    slowdown: float

    def _loads(self, tiling: Tiling, n: int, b_rows: bool, clusters: int) -> float:
        """Seconds that ``clusters`` clusters take to load the operands of one step."""
        # Rows of B that begin inside a line of 128 bytes touch 1.5 times as many lines.
        split = 1.5 if b_rows and (n * 2 % 128 or tiling.bn * 2 % 128) else 1.0
        return (tiling.rows + tiling.columns * split) * BK * 2 * clusters / self.bytes_per_s

    def cuts(self, tiling: Tiling, n: int, b_rows: bool, clusters: int) -> bool:
        """Whether tiles may be cut: not if loads of B's rows limit the speed. Pieces at different k
        share fewer loads; 128 columns took 27 % longer than predicted."""
        return not b_rows or self._loads(tiling, n, b_rows, clusters) < self.multiply[tiling]

    def costs(self, tiling: Tiling, n: int, k: int, b_rows: bool, clusters: int) -> TileCosts:
        """Costs with ``clusters`` active clusters. ``b_rows``: whether B has contiguous rows."""
        loads = self._loads(tiling, n, b_rows, clusters)
        step = (self.multiply[tiling] ** _SHARP + loads**_SHARP) ** (1 / _SHARP)
        of = tiling.bn / 256
        fetch = n * k * 2 / self.memory if n * k * 2 > self.cache else 0.0
        rest = self.tile * of, self.write * of, self.add * of, fetch, self.slowdown
        return TileCosts(self.call, step, *rest)


#: Useful tilings and their rates (benchmarks/tiled_rates.py; H100 80GB HBM3, driver 580,
#: 2026-11-24, commit f18dd30; memory, cache, add and BEGIN from products whose gates opened one
#: after the other, on an H200). Wide tiles load the fewest bytes per step. The two blocks of
#: ``cm=2`` load half of B each. Narrow tiles are for few rows or columns.
H100 = TileRates(
    multiply={
        Tiling(128, 256, 4): 0.614e-6,
        Tiling(128, 256, 4, cm=2): 0.628e-6,
        Tiling(128, 224, 4): 0.536e-6,
        Tiling(128, 192, 4): 0.462e-6,
        Tiling(128, 160, 4): 0.395e-6,
        Tiling(128, 128, 6): 0.288e-6,
    },
    bytes_per_s=14.1e12,
    memory=3.0e12,
    cache=30e6,
    call=7.85e-6,
    tile=1.13e-6,
    write=3.73e-6,
    add=3.2e-6,
    slowdown=0.178,
)

#: For float8 with float32 sums after each step: the sums and two steps must fit in registers. Tiles
#: of 96 columns took 1.3 times as long (H100, 2026-11-25).
H100_PRECISE = replace(
    H100,
    multiply={
        Tiling(128, 128, 6): 0.35e-6,
        Tiling(128, 128, 6, cm=2): 0.35e-6,
    },
)

#: For the Triton kernel on MI300X. Its only tiling is the largest that spills no registers. All
#: rates are assumed, none is measured: half the peak of a compute unit (data sheet: 1307 TFLOP/s by
#: 304), 256 MB of last-level cache at 17.2 TB/s, memory at 5.3 TB/s, and the times of a call, a
#: tile and its parts as twice those of H100.
MI300X = TileRates(
    multiply={Tiling(128, 128, 2): 0.98e-6},
    bytes_per_s=17.2e12,
    memory=5.3e12,
    cache=256e6,
    call=15.7e-6,
    tile=2.26e-6,
    write=7.46e-6,
    add=6.4e-6,
    slowdown=0.0,
)


def _ranges(
    spans: Sequence[Iterable[RowSpan]], product: int, rows: int, height: int
) -> npt.NDArray[np.int64]:
    """For each block of ``height`` rows of a product, the range of spans that meet it."""
    ranges = np.tile([len(spans), -1], (-(-rows // height), 1))
    for index, of in enumerate(spans):
        for span in of:
            if span.product == product:
                met = ranges[span.first // height : -(-span.last // height)]
                np.minimum(met[:, 0], index, out=met[:, 0])
                met[:, 1] = index
    ranges[ranges[:, 1] < 0, 0] = 0
    return ranges


#: Columns of a block of rows: product, row, range of gates, range of announcements.
_PLACE = slice(0, 2)
_GATES, _ANNOUNCES = slice(2, 4), slice(4, 6)


@dataclass(frozen=True)
class _Group:
    """Tiles of some row blocks that can begin at the time ``opens``."""

    opens: int
    blocks: npt.NDArray[np.int64]
    columns: int

    def __len__(self) -> int:
        return len(self.blocks) * self.columns

    def order(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Block and column index of each tile."""
        block, column = np.divmod(np.arange(len(self)), self.columns)
        order = np.lexsort((block, column, block // BAND))
        return block[order], column[order]


@lru_cache(maxsize=64)
def _groups(work: Work, tiling: Tiling, each: float) -> tuple[_Group, ...]:
    """Groups of tiles in the order of their begin: by gate, then by announcement.

    Gates that are expected to open well before a group begins join that group. Each group reads all
    of B if the product is wide, so fewer groups read less.

    Args:
        each: seconds of a tile, divided by the number of clusters.
    """
    height, columns = tiling.rows, -(-work.n // tiling.columns)
    blocks = []
    for product, rows in enumerate(work.rows):
        first = np.arange(0, rows, height)
        place = np.stack((np.full_like(first, product), first), 1)
        spans = (_ranges(of, product, rows, height) for of in (work.gates, work.announces))
        blocks.append(np.concatenate((place, *spans), 1))
    every = np.concatenate(blocks)
    every = every[np.argsort(every[:, 3], kind="stable")]
    opens = np.maximum.accumulate((0.0, *(work.opens or [0.0] * len(work.gates))))
    turn, begin, end = np.zeros(len(every), int), 0.0, 0.0
    for at, expected in enumerate(opens[every[:, 3] + 1].tolist()):
        begins = not at or (every[at, 3] != every[at - 1, 3] and EARLY * expected > begin)
        turn[at] = turn[at - 1] + 1 if begins else turn[at - 1]
        begin = max(end, expected) if begins else begin
        end = (begin if begins else end) + columns * each
    announced = np.where(every[:, 5] < 0, MAX_ANNOUNCED, every[:, 4])
    order = np.lexsort((announced, turn))
    every, announced, turn = every[order], announced[order], turn[order]
    starts = np.flatnonzero(np.diff(turn) | np.diff(announced)) + 1
    split = np.split(every, starts)
    return tuple(_Group(_ps(opens[of[:, 3].max() + 1]), of, columns) for of in split)


def _ps(seconds: float) -> int:
    """Seconds in integral picoseconds, whose sums are exact."""
    return round(seconds * 1e12)


class _Plan:
    """Assignment of tiles to clusters: each tile goes to the cluster that is free first."""

    def __init__(
        self, work: Work, tiling: Tiling, cut: Cut, clusters: int, costs: TileCosts
    ) -> None:
        self.work, self.tiling, self.cut, self.clusters = work, tiling, cut, clusters
        self.steps = -(-work.k // BK)
        self.step, self.tile = _ps(costs.step), _ps(costs.tile)
        self.write, self.add = _ps(costs.write), _ps(costs.add)
        self.free = np.full(clusters, _ps(BEGIN * costs.call))
        self.count = np.zeros(clusters, np.int64)
        self.slots = self.tiles = self.busy = 0
        each = (self.steps * costs.step + costs.tile) / clusters
        self.groups = _groups(work, tiling, each)
        #: Arrays of items with the rows: group, tile of the group, cluster, index in the cluster's
        #: list, k0, kn, tile, slot and others.
        self.placed: list[npt.NDArray[np.int64]] = []
        keep = [len(group) for group in self.groups]  # by group, number of uncut tiles
        if cut is Cut.END:
            left = sum(keep) % clusters
            for index in reversed(range(len(keep))):
                fewer = min(left, keep[index])
                keep[index], left = keep[index] - fewer, left - fewer
        else:
            for index in range(cut.first(len(keep)), len(keep)):
                keep[index] -= keep[index] % clusters
        rest: list[tuple[int, int]] = []
        for index, (group, end) in enumerate(zip(self.groups, keep, strict=True)):
            self._whole(np.stack((np.full(end, index), np.arange(end))), group.opens)
            rest += ((index, tile) for tile in range(end, len(group)))
            if rest and (cut is not Cut.END or group is self.groups[-1]):
                self._cut(rest, group.opens)
                rest = []
        last, busy = int(self.free.max()) * 1e-12, self.busy * 1e-12 / clusters
        self.seconds = costs.seconds(last, busy, len(self.groups))

    def _whole(self, tiles: npt.NDArray[np.int64], opens: int) -> None:
        total = tiles.shape[1]
        if not total:
            return
        begin, each = np.maximum(self.free, opens), self.steps * self.step + self.tile
        most = min(total, -(-total // self.clusters) + int(begin.max() - begin.min()) // each + 1)
        index, cluster = map(np.ravel, np.mgrid[:most, : self.clusters])
        begins = begin[cluster] + index * each
        order = np.lexsort((cluster, self.count[cluster] + index, begins))[:total]
        cluster = cluster[order]
        whole = np.array([[0], [self.steps], [-1], [0], [0]]).repeat(total, 1)
        at = self.count[cluster] + index[order]
        self.placed.append(np.concatenate((tiles, [cluster, at], whole)))
        taken = np.bincount(cluster, minlength=self.clusters)
        self.free = np.where(taken > 0, begin + taken * each, self.free)
        self.count += taken
        self.busy += total * each

    def _cut(self, tiles: Sequence[tuple[int, int]], opens: int) -> None:
        """Spread tiles over more clusters than there are tiles."""
        count, order = len(tiles), np.argsort(self.free, kind="stable")
        # The owner of a tile computes the first piece and waits for the others. A cluster with
        # another piece owns no tile, so owners never wait in a cycle.
        tile, place, k0, kn = self._pieces(count, np.maximum(self.free[order], opens))
        if len(tile) == count:
            return self._whole(np.array(tiles).T, opens)
        cluster, work = order[place], kn * self.step
        self.busy += int(work.sum())
        first = np.diff(place, prepend=-1) > 0
        start = np.flatnonzero(first)[np.cumsum(first) - 1]  # of the same cluster
        turn, written = np.arange(len(tile)) - start, np.cumsum(work + self.write)
        written -= (written - work - self.write)[start]
        over = np.maximum(self.free[cluster], opens) + written
        last = np.zeros(count, np.int64)
        np.maximum.at(last, tile[count:], over[count:])
        others = np.bincount(tile, minlength=count) - 1
        mine = np.maximum(over[:count] - self.write, last) + self.tile + others * self.add
        self.free[cluster[count:]] = over[count:]
        self.free[cluster[:count]] = mine
        # The slots of a tile are consecutive, in the order of its pieces.
        rank, by_tile = np.empty_like(tile), np.argsort(tile, kind="stable")
        rank[by_tile] = np.arange(len(tile)) - np.repeat(np.cumsum(others) - others, others + 1)
        rank -= tile  # minus the owners of earlier tiles
        slot = self.slots + (np.cumsum(others) - others)[tile] + np.maximum(rank - 1, 0)
        self.placed.append(
            np.stack(
                (
                    *np.array(tiles).T[:, tile],
                    *(cluster, self.count[cluster] + turn, k0, kn),
                    *(self.tiles + tile, slot, np.where(rank, 0, others[tile])),
                )
            )
        )
        self.count += np.bincount(cluster, minlength=self.clusters)
        self.slots += int(others.sum())
        self.tiles += count

    def _pieces(self, count: int, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Cut ``count`` tiles into pieces that all end at the same time.

        The result has a column for each piece: tile, rank of its cluster by free time, k0 and kn.
        The first pieces of all tiles come first; the pieces of a cluster are consecutive.

        Clusters that share rows or columns load them together only if their pieces begin and end at
        the same k. Otherwise L2 is read so much more that products take up to twice as long. So
        piece p has the same length in all tiles, and goes to the p-th ``count`` clusters. Remaining
        clusters may help at the end of each tile.

        Args:
            starts: time at which each cluster is free, in ascending order.
        """
        steps, most = self.steps, max(1, self.clusters // count)
        options: list[tuple[float, int, list[float]]] = []
        for parts in range(1, min(most, PARTS, max(1, steps // PART_STEPS)) + 1):
            begins = starts[: parts * count].reshape(parts, count).max(1).astype(float)
            begins[1:] += self.write
            left = starts[parts * count :][:count]
            for helpers in {0, len(left)}:
                # Work that helpers lose: each begins late and writes a piece of each of its tiles.
                lost = (left[:helpers] + count / max(helpers, 1) * self.write).sum() / count
                work = steps * self.step + begins.sum() + lost
                end = work / (parts + helpers / count)
                lengths = (end - begins) / self.step
                tail = steps - lengths.sum()
                if (parts > 1 and lengths.min() < PART_STEPS) or (helpers and tail < EDGE_STEPS):
                    continue
                over = end + self.tile + (parts - 1 + (helpers > 0)) * self.add
                options.append((over, helpers, lengths.tolist()))
        _, helpers, lengths = min(options)
        parts, tail = len(lengths), round(steps - sum(lengths)) if helpers else 0
        ends = [0, *(round(sum(lengths[: p + 1])) for p in range(parts - 1)), steps - tail]
        pieces = [
            (tile, p * count + tile, ends[p], ends[p + 1] - ends[p])
            for p in range(parts)
            for tile in range(count)
        ]
        total, low = count * tail, 0
        for helper in range(helpers if tail else 0):
            high = round(total * (helper + 1) / helpers)
            if not EDGE_STEPS <= high % tail <= tail - EDGE_STEPS:
                high = round(high / tail) * tail
            while low < high:
                tile, begin = divmod(low, tail)
                kn = min(high - low, tail - begin)
                pieces.append((tile, parts * count + helper, steps - tail + begin, kn))
                low += kn
        return np.array(pieces).T

    def listed(self) -> TileList:
        items = np.zeros((int(self.count.max()) + 1, self.clusters, ITEM_INTS), np.int32)
        group, tile, cluster, at, *cuts = np.concatenate(self.placed, 1)
        targets = np.zeros(len(self.work.announces) + 1, int)
        for index, of in enumerate(self.groups):
            chosen = group == index
            blocks, columns = of.order()
            block, column = of.blocks[blocks[tile[chosen]]], columns[tile[chosen]]
            cut = np.stack(cuts, 1)[chosen]
            fields = (
                block[:, _PLACE],
                column[:, None] * self.tiling.columns,
                cut,
                block[:, _GATES],
                block[:, _ANNOUNCES],
            )
            items[at[chosen], cluster[chosen]] = np.concatenate(fields, 1)
            stored = block[(cut[:, 2] < 0) | (cut[:, 4] > 0), _ANNOUNCES]
            np.add.at(targets, stored[:, 0], self.tiling.blocks)
            np.add.at(targets, stored[:, 1] + 1, -self.tiling.blocks)
        counts = self.slots, self.tiles, tuple(np.cumsum(targets)[:-1].tolist())
        return TileList(self.work, self.tiling, self.cut, items, *counts, self.seconds)


def listed(work: Work, tiling: Tiling, cut: Cut, clusters: int, costs: TileCosts) -> TileList:
    """Work list for ``clusters`` clusters. It depends on the arguments only."""
    return _Plan(work, tiling, cut, clusters, costs).listed()


def _candidates(
    work: Work, rates: TileRates, processors: int, b_rows: bool
) -> list[tuple[float, tuple[Tiling, Cut, int, TileCosts]]]:
    """Candidates with a lower bound on the time of their lists, in ascending order."""
    candidates = []
    for tiling in rates.multiply:
        clusters = processors // tiling.blocks
        tiles = sum(-(-rows // tiling.rows) for rows in work.rows) * -(-work.n // tiling.columns)
        firsts = set()
        for cut in Cut if rates.cuts(tiling, work.n, b_rows, clusters) else [Cut.NONE]:
            active = min(clusters, tiles) if cut is Cut.NONE else clusters
            costs = rates.costs(tiling, work.n, work.k, b_rows, active)
            each, left, busy = -(-work.k // BK) * costs.step + costs.tile, tiles, 0.0
            groups = _groups(work, tiling, each / clusters)
            first = cut.first(len(groups))
            if cut not in (Cut.NONE, Cut.END) and (first in firsts or len(groups) == 1):
                continue  # equal to another cut
            firsts.add(first)
            for group in groups:
                rounds = left / clusters if cut is not Cut.NONE else -(-left // clusters)
                busy = max(busy, group.opens * 1e-12 + rounds * each)
                left -= len(group)
            candidates.append(
                (costs.seconds(max(busy, 1e-9), 0.0, len(groups)), (tiling, cut, clusters, costs))
            )
    return sorted(candidates, key=lambda candidate: candidate[0])


def ranked(
    work: Work, rates: TileRates, processors: int, b_rows: bool, most: int = 1
) -> list[TileList]:
    """The ``most`` lists with the least predicted times, in ascending order.

    Args:
        processors: processors that the kernel may use.
        b_rows: whether B has contiguous rows.
    """
    plans: list[_Plan] = []
    for bound, of in _candidates(work, rates, processors, b_rows):
        if len(plans) == most and bound >= plans[-1].seconds:
            break
        plan = _Plan(work, *of)
        if plan.cut is Cut.NONE or plan.slots:
            plans = sorted((*plans, plan), key=lambda plan: plan.seconds)[:most]
    return [plan.listed() for plan in plans]


def best(work: Work, rates: TileRates, processors: int, b_rows: bool) -> TileList:
    """List with the least predicted time; see :func:`ranked`."""
    return ranked(work, rates, processors, b_rows)[0]
