"""Work lists of the tiled product: complete, free of deadlocks and exact."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from ficco.compute.tiled.worklist import (
    BEGIN,
    BK,
    Cut,
    RowSpan,
    TileCosts,
    TileItem,
    TileList,
    TileRates,
    Tiling,
    Work,
    best,
    listed,
    ranked,
)

TILINGS = (Tiling(128, 256, 4), Tiling(128, 256, 4, cm=2), Tiling(128, 128, 6, cn=2))
#: Arbitrary costs, used for every tiling.
COSTS = TileCosts(4e-6, 0.5e-6, 0.4e-6, 1e-6, 0.5e-6)


def items_of(tiles: TileList) -> list[list[TileItem]]:
    """Return the items of each cluster, up to the empty item that ends the list."""
    lists = []
    for cluster in range(tiles.clusters):
        rows = [TileItem(*row) for row in tiles.items[:, cluster].tolist()]
        end = next(index for index, item in enumerate(rows) if not item.kn)
        assert not any(item.kn for item in rows[end:]), "items after the end"
        lists.append(rows[:end])
    return lists


def check(tiles: TileList, seed: int = 0) -> None:
    """Execute a list with gates that open in random order, once all clusters wait or, for odd
    seeds, earlier. Check that no tile reads closed rows, that there is no deadlock, that rows are
    stored before their announcement, that counters end at 0 and that the products are exact."""
    work, tiling = tiles.work, tiles.tiling
    rng = random.Random(seed)
    numbers = np.random.default_rng(seed)
    # Float products of these integers are exact, and faster than integer products.
    a = [numbers.integers(-2, 3, (rows, work.k)).astype(float) for rows in work.rows]
    b = numbers.integers(-2, 3, (work.k, work.n)).astype(float)
    out = [np.full((rows, work.n), np.nan) for rows in work.rows]
    stored = [np.zeros((rows, work.n), int) for rows in work.rows]
    steps = -(-work.k // BK)
    computed = [np.zeros((rows, work.n, steps), int) for rows in work.rows]
    lists, done = items_of(tiles), [0] * tiles.clusters
    parts: dict[int, np.ndarray] = {}
    ready, counters = [0] * tiles.tiles, [0] * len(work.announces)
    posted: list[int] = []
    closed = list(range(len(work.gates)))
    rng.shuffle(closed)

    def runnable(cluster: int) -> bool:
        if done[cluster] == len(lists[cluster]):
            return False
        item = lists[cluster][done[cluster]]
        gated = any(item.gate_first <= gate <= item.gate_last for gate in closed)
        return not gated and (not item.others or ready[item.tile] == item.others)

    def execute(item: TileItem) -> None:
        rows = slice(item.row, item.row + tiling.rows)
        columns = slice(item.column, item.column + tiling.columns)
        for gate in closed:
            for product, first, last in work.gates[gate]:
                disjoint = product != item.product or last <= rows.start or rows.stop <= first
                assert disjoint, f"{item} reads rows of gate {gate}, which is closed"
        ks = slice(item.k0 * BK, (item.k0 + item.kn) * BK)
        computed[item.product][rows, columns, item.k0 : item.k0 + item.kn] += 1
        value = a[item.product][rows, ks] @ b[ks, columns]
        if item.is_part:
            assert item.slot not in parts and 0 <= item.slot < tiles.slots
            parts[item.slot] = value
            ready[item.tile] += 1
            return
        if item.others:
            for slot in range(item.slot, item.slot + item.others):
                value = value + parts.pop(slot)
            ready[item.tile] = 0
        out[item.product][rows, columns] = value
        stored[item.product][rows, columns] += 1
        for index in range(item.announce_first, item.announce_last + 1):
            counters[index] += tiling.blocks
            if counters[index] == tiles.targets[index]:
                counters[index] = 0
                posted.append(index)
                for product, first, last in work.announces[index]:
                    assert (stored[product][first:last] == 1).all(), f"{index} came early"

    while any(done[cluster] < len(lists[cluster]) for cluster in range(tiles.clusters)):
        able = [cluster for cluster in range(tiles.clusters) if runnable(cluster)]
        if closed and (not able or (seed % 2 and rng.random() < 0.1)):
            closed.pop()
            continue
        assert able, "deadlock"
        cluster = rng.choice(able)
        execute(lists[cluster][done[cluster]])
        done[cluster] += 1

    for product, rows in enumerate(work.rows):
        assert (computed[product] == 1).all(), "each step of each tile once"
        assert (stored[product] == 1).all()
        assert np.array_equal(out[product], a[product] @ b), f"product {product} of {rows} rows"
    assert not parts and not any(ready) and not any(counters)
    assert sorted(posted) == list(range(len(work.announces)))


def spans(rng: random.Random, rows: tuple[int, ...], count: int) -> tuple[tuple[RowSpan, ...], ...]:
    """Return random rows for each of ``count`` words, also of two products. Rows can lack one."""
    pieces = []
    for product, height in enumerate(rows):
        ends = sorted({0, height, *(rng.randint(0, height) for _ in range(count))})
        pieces += [RowSpan(product, *pair) for pair in zip(ends[:-1], ends[1:], strict=True)]
    rng.shuffle(pieces)
    parts = (tuple(pieces[index :: count + 1]) for index in range(count))
    return tuple(filter(None, parts))


def random_work(rng: random.Random) -> Work:
    rows = tuple(rng.choice([1, 17, 130, 300, 513]) for _ in range(rng.choice([1, 1, 2, 4, 8])))
    gates = spans(rng, rows, rng.choice([0, 1, 3, 9]))
    opens = tuple(sorted(rng.random() * 1e-4 for _ in gates)) if rng.random() < 0.5 else ()
    announces = spans(rng, rows, rng.choice([0, 1, 3]))
    n, k = rng.choice([8, 200, 520]), rng.choice([8, 72, 1000, 2048])
    return Work(rows, n, k, gates, announces, opens)


@pytest.mark.parametrize("cut", Cut, ids=lambda cut: cut.name)
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_lists_are_complete_and_exact(tiling: Tiling, cut: Cut) -> None:
    rng = random.Random(f"{tiling} {cut}")
    cuts = 0
    for seed in range(12):
        clusters = rng.choice([1, 3, 8, 66, 132])
        tiles = listed(random_work(rng), tiling, cut, clusters, COSTS)
        check(tiles, seed)
        cuts += tiles.slots
    assert bool(cuts) == (cut is not Cut.NONE)


def test_the_order_of_rows() -> None:
    """Rows without gates come first, then gates in order; announced rows in order, others last."""
    places = (512, 0, 768), (512, 0)
    gates, announces = (tuple((RowSpan(0, at, at + 256),) for at in rows) for rows in places)
    for work, order, targets in (
        (Work((1024,), 512, 512, gates), [1, 2, 0, 3], ()),
        (Work((1024,), 512, 512, (), announces), [2, 0, 1, 3], (4, 4)),
    ):
        tiles = listed(work, TILINGS[0], Cut.NONE, 1, COSTS)
        (items,) = items_of(tiles)
        assert list(dict.fromkeys(item.row // 256 for item in items)) == order
        assert tiles.targets == targets


def test_early_gates_do_not_cause_another_read_of_b() -> None:
    """Rows that arrive before their turn are multiplied like rows without gates."""
    quarters = tuple((RowSpan(0, 512 * i, 512 * (i + 1)),) for i in range(4))
    work = Work((2048,), 5120, 2048)
    gated = replace(work, gates=quarters)

    def items(each: Work) -> np.ndarray:
        return listed(each, TILINGS[0], Cut.NONE, 132, COSTS).items

    assert np.array_equal(items(gated)[..., :8], items(work)[..., :8])
    own_first = items(replace(gated, opens=(0.0, 4e-6, 5e-6, 6e-6)))
    in_turn = items(replace(gated, opens=(0.0, 4e-6, 5e-6, 6e-4)))
    late = items(replace(gated, opens=(0.0, 2e-4, 4e-4, 6e-4)))
    for order, groups in ((own_first, (1, 3)), (in_turn, (1, 2, 1)), (late, (1, 1, 1, 1))):
        turns = np.repeat(np.arange(len(groups)), groups)[order[..., 1] // 512]
        computed = order[..., 4] > 0
        assert all((np.diff(turns[computed[:, i], i]) >= 0).all() for i in range(132))
        mixed = any((np.diff(order[computed[:, i], i, 1] // 512) < 0).any() for i in range(132))
        assert mixed == (groups != (1, 1, 1, 1))


def test_predictions() -> None:
    """One round of whole tiles. A late gate delays its rows. Parts are written and added. A B that
    exceeds the cache is read for each group. A GPU that waits does not get hot."""
    tiling = TILINGS[0]
    work = Work((256,), 512, 4096)
    base = listed(work, tiling, Cut.NONE, 4, COSTS)
    tile = 64 * COSTS.step + COSTS.tile
    assert base.seconds == pytest.approx(COSTS.call + tile, rel=1e-6)
    late = replace(work, gates=((RowSpan(0, 128, 256),),), opens=(1e-3,))
    waited = listed(late, tiling, Cut.NONE, 4, COSTS)
    end = (1 - BEGIN) * COSTS.call + 1e-3 + tile
    assert waited.seconds == pytest.approx(end)
    halves = listed(work, tiling, Cut.END, 8, COSTS)
    half = 32 * COSTS.step + COSTS.write + COSTS.add + COSTS.tile
    assert halves.slots == 4
    assert halves.seconds == pytest.approx(COSTS.call + half, abs=COSTS.write)
    hot = replace(COSTS, slowdown=0.1, settles=1e-9)
    share = tile / (BEGIN * COSTS.call + tile)
    slower = base.seconds + 0.1 * share**2 * tile
    assert listed(work, tiling, Cut.NONE, 4, hot).seconds == pytest.approx(slower, rel=1e-6)
    assert listed(late, tiling, Cut.NONE, 4, hot).seconds < 1.001 * waited.seconds
    fetched = replace(COSTS, fetch=2e-3)
    assert listed(late, tiling, Cut.NONE, 4, fetched).seconds == pytest.approx(4e-3, rel=1e-2)


def begins(tiles: TileList) -> dict[int, list[int]]:
    """Return the first steps of the pieces of each row block."""
    steps: dict[int, list[int]] = {}
    for item in chain.from_iterable(items_of(tiles)):
        steps.setdefault(item.row, []).append(item.k0)
    return steps


def test_pieces_of_all_tiles_begin_at_the_same_k() -> None:
    """Exceptions are pieces of helpers, at most two at the end of each tile."""
    helped = 0
    for count, clusters in ((5, 8), (40, 132), (36, 132), (12, 132), (120, 132), (3, 8)):
        tiles = listed(Work((128 * count,), 256, 16384), TILINGS[0], Cut.END, clusters, COSTS)
        pieces = begins(tiles)
        common = set.intersection(*map(set, pieces.values()))
        assert len(pieces) == count and len(common) > 1
        for ks in pieces.values():
            assert sorted(ks)[: len(common)] == sorted(common) and len(ks) <= len(common) + 2
        helped += any(len(ks) > len(common) for ks in pieces.values())
        busy = [sum(item.kn for item in items) for items in items_of(tiles)]
        assert min(filter(None, busy)) > 0.7 * max(busy)
    assert helped


def test_clusters_that_are_free_early_take_more_of_a_tile() -> None:
    """Clusters that wait for rows compute the longest piece of each tile of these rows."""
    gates = ((RowSpan(0, 128, 256),),)
    work = Work((256,), 2048, 16384, gates, opens=(100e-6,))
    tiles = listed(work, TILINGS[0], Cut.LAST, 24, COSTS)
    late = [item for item in chain.from_iterable(items_of(tiles)) if item.row]
    lengths = sorted({item.kn for item in late})
    assert len(late) == 3 * 8 and lengths[-1] > 2 * lengths[0]
    first = {item.k0 for item in late if item.others}
    assert first == {0} and all(item.kn == lengths[-1] for item in late if item.others)


RATES = TileRates(
    multiply={TILINGS[0]: 0.5e-6, TILINGS[1]: 0.52e-6, Tiling(128, 128, 6): 0.27e-6},
    bytes_per_s=12e12,
    memory=3e12,
    cache=1e5,
    call=4e-6,
    tile=0.5e-6,
    write=2e-6,
    add=1e-6,
    slowdown=0.1,
)


@pytest.mark.parametrize("seed", range(6))
def test_the_best_list_is_the_least_of_all(seed: int) -> None:
    work = random_work(random.Random(seed))
    seconds = []
    for tiling in RATES.multiply:
        clusters = 132 // tiling.blocks
        tiles = sum(-(-rows // tiling.rows) for rows in work.rows) * -(-work.n // tiling.columns)
        for cut in Cut if RATES.cuts(tiling, work.n, seed % 2 == 1, clusters) else [Cut.NONE]:
            active = min(tiles, clusters) if cut is Cut.NONE else clusters
            costs = RATES.costs(tiling, work.n, work.k, seed % 2 == 1, active)
            seconds.append(listed(work, tiling, cut, clusters, costs).seconds)
    chosen = ranked(work, RATES, 132, seed % 2 == 1, 3)
    assert best(work, RATES, 132, seed % 2 == 1).seconds == chosen[0].seconds == min(seconds)
    assert [tiles.seconds for tiles in chosen] == sorted(tiles.seconds for tiles in chosen)


def test_rows_of_b_that_split_lines_cost_more() -> None:
    tiling = TILINGS[0]

    def step(n: int, b_rows: bool, clusters: int) -> float:
        return RATES.costs(tiling, n, 64, b_rows, clusters).step

    aligned = step(1344, True, 132)
    assert aligned == step(1376, False, 132)
    assert step(1376, True, 132) > 1.1 * aligned
    assert aligned > step(1344, True, 40) > RATES.multiply[tiling]
    assert RATES.cuts(tiling, 1376, False, 132) and RATES.cuts(tiling, 1344, True, 66)
    assert not RATES.cuts(tiling, 1376, True, 132)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        *(({"rows": ()}, "rows: required"), ({"rows": (0,)}, "rows: required")),
        ({"n": 12}, "n: required a multiple of 8"),
        ({"k": 0}, "k: required a multiple of 8"),
        ({"gates": ((RowSpan(0, 0, 11),),)}, "required rows of a product"),
        ({"gates": ((),) * 129}, "gates: required at most 128"),
        ({"announces": ((),)}, "announces: required rows"),
        ({"opens": (1.0,)}, "opens: required 0"),
    ],
)
def test_invalid_work(change: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Work(**{"rows": (10,), "n": 8, "k": 8, **change})
