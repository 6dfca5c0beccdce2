"""Time the tiled product against the library's, all rows there; writes ``tiled.csv`` to a folder.

    python tests/tiled_bench.py FOLDER [--next N]

Each shape's lists (every tiling and cut, or the chosen one and the N next best), for both layouts
of B, the chosen one with gates and with announcements, and the library's product are timed in
shuffled rounds, the host ahead, as the median of the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from ficco.hip_kernels.build import compiled
from ficco.tiled.hopper import TARGET, hopper_products, source
from ficco.tiled.products import TiledProducts
from ficco.tiled.worklist import H100, Cut, RowSpan, TileList, Tiling, Work, listed, ranked

SHAPES = (
    (8192, 3584, 4096),
    (1536, 5504, 4096),
    (512, 2560, 18432),
    (3584, 1376, 16384),
    (12288, 1536, 3584),
    (5632, 1792, 3584),
    (1024, 4096, 12288),
    (2560, 3584, 6144),
    (1536, 2560, 16384),
    (2048, 13312, 2560),
    (8192, 7168, 8192),
    (32768, 2048, 8192),
    (512, 3584, 2048),
    (512, 13312, 2048),
    (2048, 1536, 2048),
)
#: Ranges of rows that are gated or announced.
RANGES = 4
ROUNDS = 12
WARM_UP = 2
#: Cycles of torch.cuda._sleep before a launch, about 0.1 ms.
AHEAD = 200_000
DTYPE = torch.bfloat16
BUDGET_S = 60.0


def launcher(
    products: TiledProducts, tiles: Any, b_rows: bool, operands: Any, late: torch.Tensor
) -> Callable[[], None]:
    words = torch.zeros(128, dtype=torch.int32, device="cuda")
    gates = [words.data_ptr()] * len(tiles.work.gates)
    posts = [words.data_ptr() + 4 * (1 + i) for i in range(len(tiles.work.announces))]
    words[0] = 1
    prepared = products.prepare(
        tiles, DTYPE, b_rows, late=late.data_ptr(), limit_s=1.0, gates=gates, words=posts
    )
    stream = torch.cuda.current_stream().cuda_stream
    a, b, out = operands

    def launch(words: torch.Tensor = words) -> None:  # which must live as long
        prepared.launch([a], b, [out], stream)

    return launch


def rounds(calls: dict[Any, Callable[[], object]], ahead: int = AHEAD) -> dict[Any, list[float]]:
    """Microseconds of each call in each round."""
    rng, names = random.Random(5), list(calls)
    times: dict[Any, list[float]] = {name: [] for name in names}
    for number in range(ROUNDS):
        rng.shuffle(names)
        events = []
        for name in names:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(ahead)
            begin.record()
            calls[name]()
            end.record()
            events.append((name, begin, end))
        torch.cuda.synchronize()
        for name, begin, end in events:
            if number >= WARM_UP:
                times[name].append(begin.elapsed_time(end) * 1e3)
    return times


def host_us(call: Callable[[], object]) -> float:
    samples = []
    for _ in range(50):
        began = time.perf_counter()
        call()
        samples.append((time.perf_counter() - began) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)


def cases(
    m: int, n: int, k: int, b_rows: bool, processors: int, following: int | None
) -> dict[tuple[Tiling, Cut, str], TileList]:
    """The lists to time by tiling, cut and what their rows do, the chosen one first."""
    ends = [m * i // RANGES for i in range(RANGES + 1)]
    spans = tuple((RowSpan(0, *pair),) for pair in zip(ends[:-1], ends[1:], strict=True))
    most = 99 if following is None else 1 + following
    lists = ranked(Work((m,), n, k), H100, processors, b_rows, most)
    timed = {(tiles.tiling, tiles.cut, ""): tiles for tiles in lists}
    tiling, cut = lists[0].tiling, lists[0].cut
    costs = H100.costs(tiling, n, b_rows, lists[0].clusters)
    for what, waits in (("announced", ((), spans)), ("gated", (spans, ()))):
        work = Work((m,), n, k, *waits)
        timed[tiling, cut, what] = listed(work, tiling, cut, lists[0].clusters, costs)
    return timed


def line(times: pd.DataFrame) -> str:
    """One shape and layout of B: the library's time and shares of it."""
    library, rest = times[times.tiling == "library"].iloc[0], times[times.tiling != "library"]
    chosen = rest[rest.chosen & (rest.what == "")].iloc[0]
    top = rest.loc[rest[rest.what == ""].share.idxmax()]
    whats = {what: rest[rest.what == what].share.iloc[0] for what in ("gated", "announced")}
    shape = f"{library.m}x{library.n}x{library.k} {'rows' if library.b_rows else 'columns'}"
    return (
        f"{shape:24} {library.us:7.1f} us  chosen {chosen.share:.3f} {chosen.tiling} {chosen.cut} "
        f"(predicted {chosen.predicted_us / chosen.us:.2f})  best {top.share:.3f} {top.tiling} "
        f"{top.cut}  gated {whats['gated']:.3f}  announced {whats['announced']:.3f}"
    )


def main(folder: Path, following: int | None) -> None:
    began = time.perf_counter()
    products = hopper_products(0)
    configurations = [(til, DTYPE, b_rows) for til in H100.multiply for b_rows in (False, True)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda of: compiled(TARGET, text=source(*of)), configurations))
    print(f"compiled in {time.perf_counter() - began:.1f} s, {torch.cuda.get_device_name()}")
    late = torch.zeros(1, dtype=torch.int32, device="cuda")
    rows: list[dict[str, Any]] = []
    folder.mkdir(parents=True, exist_ok=True)
    for m, n, k in SHAPES:
        if time.perf_counter() - began > BUDGET_S:
            print("out of time", flush=True)
            break
        a = torch.randn(m, k, device="cuda").to(DTYPE)
        b = torch.randn(k, n, device="cuda").to(DTYPE)
        out = torch.empty(m, n, device="cuda", dtype=DTYPE)
        right = torch.mm(a, b).float()
        calls: dict[Any, Callable[[], object]] = {}
        lists: dict[Any, TileList] = {}
        for b_rows, operand in ((False, b.t().contiguous().t()), (True, b)):
            calls["library", b_rows] = partial(torch.mm, a, operand, out=out)
            for name, tiles in cases(m, n, k, b_rows, products.processors, following).items():
                lists[name, b_rows] = tiles
                operands = a, operand, out
                calls[name, b_rows] = launcher(products, tiles, b_rows, operands, late)
        wrong = []
        for name, call in calls.items():
            out.fill_(torch.nan)
            call()
            if not float((out.float() - right).norm() / right.norm()) < 5e-3:
                wrong.append(name)
        times = rounds(calls)
        for (name, b_rows), samples in times.items():
            library = times["library", b_rows]
            row = {"m": m, "n": n, "k": k, "b_rows": b_rows, "us": statistics.median(samples)}
            row["share"] = statistics.median(x / y for x, y in zip(library, samples, strict=True))
            row |= {"tiling": "library", "wrong": (name, b_rows) in wrong, "chosen": False}
            if name != "library":
                tiling, cut, what = name
                tiles = lists[name, b_rows]
                row |= {"tiling": "x".join(map(str, tiling)), "cut": cut.name, "what": what}
                row |= {"predicted_us": tiles.seconds * 1e6, "slots": tiles.slots}
                first = next(key for key, other in lists if other == b_rows)
                row["chosen"] = (tiling, cut) == first[:2]
                row["host_us"] = host_us(calls[name, b_rows])
            rows.append(row)
        frame = pd.DataFrame(rows)
        frame.to_csv(folder / "tiled.csv", index=False, float_format="%.4g")
        here = frame[(frame.m == m) & (frame.n == n) & (frame.k == k)]
        for _, times_of in here.groupby("b_rows"):
            print(line(times_of), flush=True)
        if wrong or late.item():
            print("WRONG", wrong, "late", late.item(), flush=True)
    plain = frame[frame.chosen & (frame.what == "")]
    print(f"geometric mean of the chosen: {statistics.geometric_mean(plain.share):.3f}")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--next", type=int, metavar="N", help="lists after the chosen one; all")
    given = parser.parse_args()
    main(given.folder, given.next)
