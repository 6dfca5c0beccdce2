"""Compare three implementations of the tiled product on Hopper: CUDA C++, Gluon, and QuACK's GEMM.

    python -m benchmarks.tiled_ways FOLDER [--without gluon | quack ...]

Writes ``tiled-ways.csv`` and ``tiled-ways.md``. Products in bfloat16 without gates and with open
gates are compared with the library's, for both layouts of B. All rows are present. CUDA C++ and
Gluon take the work lists with the least predicted times. QuACK (``pip install quack-kernels``,
Apache-2.0) gates shards of full tiles; a few of its tilings are timed. A package that cannot be
imported is left out. First calls include compilation if the folders in FICCO_CACHE_DIR,
TRITON_CACHE_DIR and QUACK_CACHE_DIR are empty.
"""

from __future__ import annotations

import argparse
import inspect
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

from benchmarks.gpu_rounds import rounds
from benchmarks.tiled_products import LONG_US, SHAPES, host_us, launcher
from ficco.compute.tiled import hopper
from ficco.compute.tiled.products import TiledProducts
from ficco.compute.tiled.worklist import H100, RowSpan, TileList, Tiling, Work, ranked
from ficco.tools.bench.frames import cells, markdown

try:
    from benchmarks import tiled_gluon
except ImportError as error:
    print(f"Gluon is left out: {error}")
    tiled_gluon = None
try:
    import quack
    from quack.gemm import AllGatherArguments, gemm
except ImportError as error:
    print(f"QuACK is left out: {error}")
    quack = None

#: Ranks, and pieces per rank; the rows of a piece have one gate.
RANKS, PIECES = 4, 2
#: Number of timed lists without gates, and with gates.
LISTS = 3
GLUON_TILINGS = (Tiling(128, 256, 4), Tiling(128, 128, 6))
#: Rows and columns of a tile, blocks of a cluster in both directions, and pingpong.
QUACK_TILINGS = (
    (128, 256, 1, 2, False),
    (128, 256, 2, 1, False),
    (128, 192, 1, 2, True),
    (128, 192, 2, 1, True),
    (128, 128, 1, 2, True),
    (256, 128, 1, 2, False),
    (256, 192, 1, 2, False),
)
#: Cycles of torch.cuda._sleep before a call, about 0.4 ms: a launch by Triton takes up to 0.2 ms.
AHEAD = 800_000

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Launch = Callable[[], object]


class Variant(NamedTuple):
    """A timed launch; ``image`` names its compiled kernel."""

    way: str
    b_rows: bool
    gated: bool
    name: str
    image: str


Variants = Iterator[tuple[Variant, Callable[[], Launch]]]


def lists(
    way: str, tilings: Sequence[Tiling], b_rows: bool, operands: Operands
) -> Iterator[tuple[Variant, TileList]]:
    (m, k), (_, n) = operands[0].shape, operands[1].shape
    ends = [m * i // (RANKS * PIECES) for i in range(RANKS * PIECES + 1)]
    gates = tuple((RowSpan(0, *pair),) for pair in zip(ends[:-1], ends[1:], strict=True))
    rates = replace(H100, multiply={tiling: H100.multiply[tiling] for tiling in tilings})
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for spans in ((), gates):
        for tiles in ranked(Work((m,), n, k, spans), rates, processors, b_rows, LISTS):
            tiling = "x".join(map(str, tiles.tiling))
            yield Variant(way, b_rows, bool(spans), f"{tiling} {tiles.cut.name}", tiling), tiles


def library(b_rows: bool, operands: Operands) -> Variants:
    a, b, out = operands
    yield Variant("library", b_rows, False, "", ""), lambda: partial(torch.mm, a, b, out=out)


def cuda(products: TiledProducts, late: torch.Tensor, b_rows: bool, operands: Operands) -> Variants:
    for variant, tiles in lists("CUDA C++", tuple(H100.multiply), b_rows, operands):
        yield variant, partial(launcher, products, tiles, b_rows, operands, late)


def gluon(late: torch.Tensor, b_rows: bool, operands: Operands) -> Variants:
    for variant, tiles in lists("Gluon", GLUON_TILINGS, b_rows, operands):
        yield variant, partial(tiled_gluon.launcher, tiles, b_rows, operands, late)


def quack_gemm(b_rows: bool, operands: Operands) -> Variants:
    a, b, out = operands
    words = torch.ones(RANKS * PIECES + 1, dtype=torch.int32, device=a.device)
    for bm, bn, cm, cn, pingpong in QUACK_TILINGS:
        call = partial(gemm, a, b if b_rows else b.t(), out, None, None, bm, bn, cm, cn)
        call = partial(call, pingpong=pingpong, b_kn=b_rows)
        name = f"{bm}x{bn}x{cm}x{cn}{' in turns' * pingpong}"
        yield Variant("QuACK", b_rows, False, name, name), partial(partial, call)
        for pieces in (PIECES, 1):
            if len(a) % (RANKS * pieces * bm * cm) == 0:
                gates = AllGatherArguments(words[: RANKS * pieces], words[-1:], RANKS, 0, pieces)
                variant = Variant("QuACK", b_rows, True, name, f"{name}, gated")
                yield variant, partial(partial, call, ag_args=gates)
                break


def timed(
    m: int,
    n: int,
    k: int,
    products: TiledProducts,
    images: set[Variant],
    without: Sequence[str],
) -> Iterator[dict[str, object]]:
    """Time all variants of a product; yield a row for each. ``images`` are already compiled."""
    a = torch.randn(m, k, device="cuda").to(torch.bfloat16)
    b = torch.randn(k, n, device="cuda").to(torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    expected = torch.mm(a, b).float()
    late = torch.zeros(1, dtype=torch.int32, device="cuda")
    makers = [library, partial(cuda, products, late)]
    if tiled_gluon and "gluon" not in without:
        makers.append(partial(gluon, late))
    if quack and "quack" not in without:
        makers.append(quack_gemm)
    calls: dict[Variant, Launch] = {}
    firsts: dict[Variant, dict[str, float]] = {}
    for b_rows, operand in ((False, b.t().contiguous().t()), (True, b)):
        for variant, make in (v for maker in makers for v in maker(b_rows, (a, operand, out))):
            out.fill_(torch.nan)
            torch.cuda.synchronize()
            began = time.perf_counter()
            try:
                call = make()
                call()
                torch.cuda.synchronize()
            except Exception as failure:  # of a compiler
                print(f"{m}x{n}x{k} {variant}: {type(failure).__name__}: {str(failure)[:300]}")
                continue
            image = variant._replace(gated=False, name="")
            if image not in images:
                firsts[variant] = {"first_s": time.perf_counter() - began}
                firsts[variant]["host_us"] = host_us(call)
                images.add(image)
            error = float((out.float() - expected).norm() / expected.norm())
            if error < 5e-3 and not late.item():
                calls[variant] = call
            else:
                print(f"{m}x{n}x{k} {variant}: wrong by {error:.2g}, late {late.item()}")
                late.zero_()
    times = rounds(calls, AHEAD)
    bases = {variant.b_rows: us for variant, us in times.items() if variant.way == "library"}
    for variant, us in times.items():
        base = bases[variant.b_rows]
        row = {"m": m, "n": n, "k": k, **variant._asdict(), "us": statistics.median(us)}
        row["library_us"] = statistics.median(base)
        row["share"] = statistics.median(x / y for x, y in zip(base, us, strict=True))
        yield row | firsts.get(variant, {})


def lines_of_code() -> dict[str, int]:
    """Lines of each implementation without empty lines, comments and the work lists."""
    path = Path(hopper.__file__)
    texts = {
        "CUDA C++": path.read_text() + (path.parent / "hopper.cpp").read_text(),
        "Gluon": Path(tiled_gluon.__file__).read_text() if tiled_gluon else "",
        "QuACK": inspect.getsource(quack_gemm),
    }
    return {
        way: sum(not re.match(r"\s*($|//|# |#:)", line) for line in text.splitlines())
        for way, text in texts.items()
    }


def page(frame: pd.DataFrame) -> str:
    """Costs of each implementation; then its best share of the library's speed, by product."""
    frame = frame[frame.way != "library"]
    product = ["m", "n", "k", "b_rows", "library_us"]
    shares = frame.groupby([*product, "way", "gated"], sort=False).share.max()
    shares = shares.unstack(["way", "gated"]).sort_index(level="library_us", ascending=False)
    long = shares.index.get_level_values("library_us") > LONG_US
    costs = []
    for way, lines in lines_of_code().items():
        first = frame[frame.way == way].dropna(subset="first_s")
        row = [way, lines, len(first), f"{first.first_s.median():.2f}"]
        row += [f"{first.first_s.max():.2f}", f"{first.host_us.median():.0f}"]
        for gated in (False, True):
            for rows in (shares[long], shares[~long]):
                best = rows.get((way, gated), pd.Series(dtype=float)).dropna()
                mean = statistics.geometric_mean(best) if len(best) else float("nan")
                row.append(f"{mean:.3f} ({best.min():.3f}), {len(best)}")
        costs.append(row)
    over, below = f"over {LONG_US:.0f} us", "others"
    heads = ["way", "lines", "images", "median first call, s", "longest, s", "host us"]
    heads += [over, below, f"gated, {over}", f"gated, {below}"]
    body = [
        [f"{m} x {n} x {k}", "[k, n]" if b_rows else "[n, k]", f"{us:.1f}", *cells(row, ".3f")]
        for (m, n, k, b_rows, us), row in shares.iterrows()
    ]
    names = [way + ", gated" * gated for way, gated in shares.columns]
    return (
        "Share of the library: geometric mean (least), products.\n\n"
        f"{markdown(heads, costs)}\n\n{markdown(['m x n x k', 'B', 'library us', *names], body)}\n"
    )


def main(folder: Path, without: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    products, images = hopper.hopper_products(0), set[Variant]()
    versions = {"torch": torch.__version__, "triton": version("triton")}
    versions |= {"quack-kernels": quack.__version__} if quack else {}
    machine = f"{torch.cuda.get_device_name()}, {versions}"
    rows: list[dict[str, object]] = []
    for m, n, k in SHAPES:
        rows += timed(m, n, k, products, images, without)
        pd.DataFrame(rows).to_csv(folder / "tiled-ways.csv", index=False, float_format="%.4g")
        print(f"{m}x{n}x{k}", flush=True)
    text = f"{machine}\n\n{page(pd.DataFrame(rows))}"
    (folder / "tiled-ways.md").write_text(text)
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--without", nargs="+", choices=("gluon", "quack"), default=())
    options = parser.parse_args()
    main(options.folder, options.without)
