"""Compare the tiled product with the library's; writes ``tiled.csv`` and ``.md`` to a folder.

    python -m benchmarks.tiled_products FOLDER [--next N] [--pieces P ...]

Shuffled rounds time the lists of each shape and layout of B (all tilings and cuts, or the chosen
list and the N next best), the chosen list with gates and with announcements, and the library's
product, with the host ahead. A figure is the median of the rounds. All rows are present; with
``--pieces`` the lists of a gather of 4 ranks, P pieces per shard, are timed, too. Their gates open
when a link would bring the rows (``ficco.dma.tiles.LINK_BYTES_PER_S``). A courier, a kernel of one
warp, opens them. It requests the largest share of shared memory, so that blocks of the product fit.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from cuda.bindings import driver

from benchmarks.gpu_rounds import Staged, rounds
from ficco.compute.tiled.hopper import TARGET, hopper_products, source
from ficco.compute.tiled.products import TiledProducts, TileTypes
from ficco.compute.tiled.worklist import H100, Cut, RowSpan, TileList, Tiling, Work, listed, ranked
from ficco.dma.tiles import work_of
from ficco.hip_kernels.build import compiled
from ficco.hip_kernels.cuda_binding import CudaBinding, check
from ficco.hip_kernels.launch import Packed
from ficco.problems.products import Problem
from ficco.schedules import Schedule, plans
from ficco.tools.bench.frames import cells, describe, markdown
from ficco.tools.bench.report import about_table

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
#: Number of ranges of rows with a gate or an announcement.
RANGES = 4
DTYPE = torch.bfloat16
#: Shortest time of a long product, in microseconds.
LONG_US = 90.0
COURIER = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
__device__ u64 now() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
__device__ void post(u32* at, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
// Opens gate i ns[i] nanoseconds after the start word is set; gives up after 50 ms.
extern "C" __global__ void courier(u32* start, u32* gates, const int* ns, int count) {
  u32 set = 0;
  for (u64 limit = now() + 50000000; !set && now() < limit; __nanosleep(40))
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(set) : "l"(start) : "memory");
  u64 begun = now();
  for (int i = 0; i < count; ++i) {
    while (now() < begun + ns[i]) __nanosleep(40);
    post(gates + i, 1);
  }
  *start = 0;
}
extern "C" __global__ void mark(u32* start) { post(start, 1); }
"""


class Courier:
    """Open the gates of launches: :meth:`line_up`, then :meth:`go` immediately before a launch."""

    def __init__(self) -> None:
        names = "courier", "mark"
        self._kernels = CudaBinding(0).load(compiled(TARGET, text=COURIER), names)
        carveout = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        for kernel in self._kernels.values():
            check("cuFuncSetAttribute", driver.cuFuncSetAttribute(kernel, carveout, 100))
        self._side, self._start = torch.cuda.Stream(), torch.zeros(1, dtype=torch.int32).cuda()

    def line_up(self, gates: torch.Tensor, ns: torch.Tensor) -> None:
        gates.zero_()
        self._side.wait_stream(torch.cuda.current_stream())
        words = [ctypes.c_uint64(tensor.data_ptr()) for tensor in (self._start, gates, ns)]
        self._launch("courier", self._side, *words, ctypes.c_int32(len(ns)))

    def go(self) -> None:
        start = ctypes.c_uint64(self._start.data_ptr())
        self._launch("mark", torch.cuda.current_stream(), start)

    def _launch(self, name: str, stream: torch.cuda.Stream, *arguments: Any) -> None:
        packed, raw = Packed(arguments), stream.cuda_stream
        shape = 1, 1, 1, 1, 1, 1, 0
        launched = driver.cuLaunchKernel(self._kernels[name], *shape, raw, packed.address, 0)
        check("cuLaunchKernel", launched)


def gathered(m: int, n: int, k: int, pieces: int) -> Work:
    """The work of one of 4 ranks in a gather with pieces."""
    problem = Problem("all_gather_matmul", (m // 4,) * 4, n, k, "bfloat16")
    plan = plans(problem, Schedule.parse(f"tiled:pieces={pieces}"))[0]
    return work_of(plan, next(step for step in plan.steps if step.gates))


def launcher(
    products: TiledProducts, tiles: TileList, b_rows: bool, operands: Any, late: torch.Tensor
) -> Callable[[], None]:
    """A launch of a list with open gates."""
    (a, b, out), work = operands, tiles.work
    words = torch.zeros(128, dtype=torch.int32, device="cuda")
    words[0] = 1
    prepared = products.prepare(
        tiles,
        TileTypes.of(DTYPE),
        b_rows,
        late=late.data_ptr(),
        limit_s=1.0,
        gates=[words.data_ptr()] * len(work.gates),
        words=[words.data_ptr() + 4 * (1 + i) for i in range(len(work.announces))],
    )
    stream = torch.cuda.current_stream().cuda_stream
    again = prepared.launch(a.split(work.rows), b, out.split(work.rows), stream)
    assert again is not None

    def launch(words: torch.Tensor = words) -> None:  # keeps the words alive
        again(stream)

    return launch


def arriving(
    products: TiledProducts, tiles: TileList, operands: Any, late: torch.Tensor, courier: Courier
) -> Staged:
    """A launch of a list of :func:`gathered` work whose gates the courier opens."""
    work, (a, b, out) = tiles.work, operands
    gates = torch.ones(len(work.gates), dtype=torch.int32, device="cuda")
    words = [gates.data_ptr() + 4 * i for i in range(len(gates))]
    ns = torch.tensor([round(seconds * 1e9) for seconds in work.opens], dtype=torch.int32).cuda()
    prepared = products.prepare(
        tiles, TileTypes.of(DTYPE), b.stride(1) == 1, late=late.data_ptr(), limit_s=1.0, gates=words
    )
    stream = torch.cuda.current_stream().cuda_stream
    again = prepared.launch(a.split(work.rows), b, out.split(work.rows), stream)
    assert again is not None
    return Staged(partial(again, stream), partial(courier.line_up, gates, ns), courier.go)


def host_us(call: Callable[[], object]) -> float:
    samples = []
    for _ in range(50):
        began = time.perf_counter()
        call()
        samples.append((time.perf_counter() - began) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)


def timed_lists(
    shape: tuple[int, int, int], b_rows: bool, processors: int, most: int, pieces: Sequence[int]
) -> dict[tuple[Tiling, Cut, str, int], TileList]:
    """The lists of one shape and layout of B by tiling, cut, "announced" or "gated", and number of
    pieces. The chosen list of each number of pieces comes first."""
    m, n, k = shape
    lists = {}
    for number in (0, *pieces):
        work = gathered(*shape, number) if number else Work((m,), n, k)
        for tiles in ranked(work, H100, processors, b_rows, most):
            lists[tiles.tiling, tiles.cut, "", number] = tiles
    (tiling, cut, *_), chosen = next(iter(lists.items()))
    ends = [m * i // RANGES for i in range(RANGES + 1)]
    spans = tuple((RowSpan(0, *pair),) for pair in zip(ends[:-1], ends[1:], strict=True))
    costs = H100.costs(tiling, n, k, b_rows, chosen.clusters)
    for kind, waits in (("announced", ((), spans)), ("gated", (spans, ()))):
        work = Work((m,), n, k, *waits)
        lists[tiling, cut, kind, 0] = listed(work, tiling, cut, chosen.clusters, costs)
    return lists


def page(frame: pd.DataFrame, command: str) -> str:
    """Shares of the chosen lists and of the best timed lists: time of the library's product, or of
    the last arrival if that is later, divided by the time of the list."""
    lists = frame[(frame.tiling != "library") & (frame.what == "")]
    key = ["b_rows", "m", "n", "k", "pieces"]
    shares = pd.DataFrame(
        {
            "chosen": lists[lists.chosen].groupby(key, sort=False).share.max(),
            "best": lists.groupby(key, sort=False).share.max(),
        }
    ).unstack("pieces")
    for which in ("chosen", "best"):  # the best number of pieces for each shape
        shares[which, "any"] = shares[which].drop(columns=0).max(axis=1)
    library = frame[frame.tiling == "library"].set_index(key[:-1]).us
    extra = frame[frame.what != ""].dropna(subset="what").set_index([*key[:-1], "what"]).share
    extra = extra.unstack("what").reindex(shares.index)
    long = library.reindex(shares.index) >= LONG_US
    heads = ["m x n x k", "B", "library us"]
    heads += [
        f"{f'pieces={pieces}' if pieces else 'all rows there'}: {which}"
        for which, pieces in shares.columns
    ]
    body = [
        [f"{m} x {n} x {k}", "[k, n]" if b_rows else "[n, k]", f"{library[b_rows, m, n, k]:.1f}"]
        + [*cells(row, ".3f"), *cells(extra.loc[(b_rows, m, n, k)], ".3f")]
        for (b_rows, m, n, k), row in shares.iterrows()
    ]
    for name, rows in (("at least", shares[long]), ("less than", shares[~long])):
        means = [f"{statistics.geometric_mean(rows[column]):.3f}" for column in shares.columns]
        means += [
            f"{statistics.geometric_mean(extra.loc[rows.index, w]):.3f}" for w in extra.columns
        ]
        body.append([f"**geometric mean, {name} {LONG_US:.0f} us**", "", "", *means])
    about = about_table(describe("cuda", command))
    method = " ".join(page.__doc__.split())
    return f"# tiled\n\n{about}\n\n{method}\n\n{markdown([*heads, *extra.columns], body)}\n"


def timed(
    shape: tuple[int, int, int],
    products: TiledProducts,
    courier: Courier,
    most: int,
    pieces: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """Time all lists of one shape; yield a row of the table for each."""
    m, n, k = shape
    late = torch.zeros(1, dtype=torch.int32, device="cuda")
    a = torch.randn(m, k, device="cuda").to(DTYPE)
    b = torch.randn(k, n, device="cuda").to(DTYPE)
    out = torch.empty(m, n, device="cuda", dtype=DTYPE)
    expected = torch.mm(a, b).float()
    for b_rows, operand in ((False, b.t().contiguous().t()), (True, b)):
        operands = a, operand, out
        lists = timed_lists(shape, b_rows, products.processors, most, pieces)
        calls: dict[Any, Callable[[], object]] = {
            name: arriving(products, tiles, operands, late, courier)
            if name[-1]
            else launcher(products, tiles, b_rows, operands, late)
            for name, tiles in lists.items()
        }
        calls["library"] = partial(torch.mm, a, operand, out=out)
        wrong = []
        for name, call in calls.items():
            out.fill_(torch.nan)
            call()
            if not float((out.float() - expected).norm() / expected.norm()) < 5e-3:
                wrong.append(name)
        times = rounds(calls)
        row = {"m": m, "n": n, "k": k, "b_rows": b_rows, "pieces": 0, "tiling": "library"}
        library = times.pop("library")
        yield row | {"us": statistics.median(library), "share": 1.0, "wrong": False}
        chosen = {name[-1]: name[:2] for name in reversed(lists)}
        for name, tiles in lists.items():
            tiling, cut, kind, number = name
            last = max(tiles.work.opens, default=0.0) * 1e6
            pairs = zip(library, times[name], strict=True)
            yield (
                row
                | {"pieces": number, "tiling": "x".join(map(str, tiling)), "cut": cut.name}
                | {"what": kind, "chosen": name[:2] == chosen[number]}
                | {"us": statistics.median(times[name]), "last_us": last}
                | {"share": statistics.median(max(x, last) / y for x, y in pairs)}
                | {"predicted_us": tiles.seconds * 1e6, "slots": tiles.slots}
                | {"host_us": host_us(calls[name]), "wrong": name in wrong}
            )
        if wrong or late.item():
            print("WRONG", wrong, "late", late.item(), flush=True)


def main(folder: Path, most: int, pieces: Sequence[int]) -> None:
    products, courier = hopper_products(0), Courier()
    types = TileTypes.of(DTYPE)
    kernels = [(tiling, types, b_rows) for tiling in H100.multiply for b_rows in (False, True)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda kernel: compiled(TARGET, text=source(*kernel)), kernels))
    rows: list[dict[str, Any]] = []
    folder.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES:
        rows += timed(shape, products, courier, most, pieces)
        pd.DataFrame(rows).to_csv(folder / "tiled.csv", index=False, float_format="%.4g")
        print(f"{shape}: {sum(row.get('what') is not None for row in rows)} lists", flush=True)
    text = page(pd.DataFrame(rows), f"python -m benchmarks.tiled_products {' '.join(sys.argv[1:])}")
    (folder / "tiled.md").write_text(text)
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--next", type=int, default=98, metavar="N", help="lists after the chosen")
    parser.add_argument("--pieces", type=int, nargs="+", default=(), metavar="P")
    options = parser.parse_args()
    main(options.folder, 1 + options.next, options.pieces)
