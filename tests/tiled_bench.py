"""Time the tiled product against the library's, all rows there; writes ``tiled.csv`` to a folder.

    python tests/tiled_bench.py FOLDER

Each shape's variants (every tiling and cut, both layouts of B, announcements) and the library's
product are timed in shuffled rounds, the host ahead, as the median of the rounds.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from ficco.hip_kernels.build import compiled
from ficco.tiled.kernel import STEP_S, TARGET, TiledProducts, source
from ficco.tiled.worklist import Cut, RowSpan, Work, best, listed

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
ROUNDS = 17
WARM_UP = 2
#: Cycles of torch.cuda._sleep before a launch, about 0.1 ms.
AHEAD = 200_000
DTYPE = torch.bfloat16
BUDGET_S = 200.0


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
    stream = torch.cuda.current_stream()
    a, b, out = operands

    def launch(words: torch.Tensor = words) -> None:  # which must live as long
        prepared.launch([a], b, [out], stream)

    return launch


def rounds(calls: dict[Any, Callable[[], object]]) -> dict[Any, list[float]]:
    """Microseconds of each call in each round."""
    rng, names = random.Random(5), list(calls)
    times: dict[Any, list[float]] = {name: [] for name in names}
    for number in range(ROUNDS):
        rng.shuffle(names)
        events = []
        for name in names:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD)
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


def main(folder: Path) -> None:
    began = time.perf_counter()
    products = TiledProducts(0)
    configurations = [(tiling, DTYPE, b_rows) for tiling in STEP_S for b_rows in (False, True)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda of: compiled(TARGET, text=source(*of)), configurations))
    print(
        f"compiled in {time.perf_counter() - began:.1f} s", torch.cuda.get_device_name(), flush=True
    )
    late = torch.zeros(1, dtype=torch.int32, device="cuda")
    rows = []
    for m, n, k in SHAPES:
        if time.perf_counter() - began > BUDGET_S:
            print("out of time", flush=True)
            break
        a, b = (
            torch.randn(m, k, device="cuda").to(DTYPE),
            torch.randn(k, n, device="cuda").to(DTYPE),
        )
        layouts = {False: b.t().contiguous().t(), True: b}
        out = torch.empty(m, n, device="cuda", dtype=DTYPE)
        right = torch.mm(a, b)
        eighth = [m * i // 8 for i in range(9)]
        spans = tuple((RowSpan(0, *pair),) for pair in zip(eighth[:-1], eighth[1:], strict=True))
        works = {"": Work((m,), n, k), "announced": Work((m,), n, k, (), spans)}
        works["gated"] = Work((m,), n, k, spans)
        lists = {}
        for tiling, step_s in STEP_S.items():
            for cut in (Cut.NONE, Cut.END_EVENLY, Cut.END_EQUALLY):
                tiles = listed(works[""], tiling, cut, products.clusters(tiling), step_s)
                if cut is Cut.NONE or tiles.slots:
                    lists[tiling, cut, ""] = tiles
        planned = time.perf_counter()
        chosen = best(works[""], STEP_S, products.processors)
        planned = time.perf_counter() - planned
        for what in ("announced", "gated"):
            at = products.clusters(chosen.tiling)
            made = listed(works[what], chosen.tiling, chosen.cut, at, STEP_S[chosen.tiling])
            lists[chosen.tiling, chosen.cut, what] = made
        calls: dict[Any, Callable[[], object]] = {}
        for b_rows, operand in layouts.items():
            calls["library", b_rows] = partial(torch.mm, a, operand, out=out)
            for name, tiles in lists.items():
                operands = a, operand, out
                calls[name, b_rows] = launcher(products, tiles, b_rows, operands, late)
        wrong = []
        for name, call in calls.items():
            out.fill_(torch.nan)
            call()
            error = float((out.float() - right.float()).norm() / right.float().norm())
            if not error < 5e-3:
                wrong.append(name)
                print("WRONG", m, n, k, name, error, flush=True)
        times = rounds(calls)
        for (name, b_rows), samples in times.items():
            library = times["library", b_rows]
            row = {"m": m, "n": n, "k": k, "b_rows": b_rows, "us": statistics.median(samples)}
            row["share"] = statistics.median(x / y for x, y in zip(library, samples, strict=True))
            if name == "library":
                row["tiling"] = "library"
            else:
                tiling, cut, what = name
                row |= {"tiling": "x".join(map(str, tiling)), "cut": cut.name, "what": what}
                row |= {"predicted_us": lists[name].seconds * 1e6, "slots": lists[name].slots}
                row["chosen"] = (tiling, cut) == (chosen.tiling, chosen.cut)
                row["host_us"] = host_us(calls[name, b_rows])
            row["wrong"] = (name, b_rows) in wrong
            rows.append(row)
        frame = pd.DataFrame(rows)
        folder.mkdir(parents=True, exist_ok=True)
        frame.to_csv(folder / "tiled.csv", index=False, float_format="%.4g")
        here = frame[(frame.m == m) & (frame.n == n) & (frame.k == k)]
        top = here[here.tiling != "library"].sort_values("share").groupby("b_rows").tail(1)
        picked = here[here.chosen.eq(True)]
        print(f"{m},{n},{k}: chosen in {planned * 1e3:.0f} ms, late {late.item()}", flush=True)
        print(top.to_string(index=False), flush=True)
        print(picked.to_string(index=False, header=False), flush=True)
    frame = pd.DataFrame(rows)
    plain = frame[frame.chosen.eq(True) & frame.what.eq("")]
    print("geometric mean of the chosen:", statistics.geometric_mean(plain.share))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
