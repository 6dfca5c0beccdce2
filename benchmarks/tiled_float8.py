"""Compare the tiled product of float8 with the library's: writes ``tiled-float8.csv`` and ``.md``.

    python -m benchmarks.tiled_float8 FOLDER

Operands are scaled by row. The chosen list of each accumulation and ``torch._scaled_mm`` run in
shuffled rounds, with the host ahead and all rows present. A share is the median of the ratios of
rounds. *Precise* accumulates in float32 after each 128 of k; so does the library, unless
``use_fast_accum`` is set.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.gpu_rounds import rounds
from benchmarks.tiled_products import SHAPES as SMALL
from ficco.compute.tiled.hopper import hopper_products
from ficco.compute.tiled.products import TileScales, TileTypes
from ficco.compute.tiled.worklist import Work
from ficco.tools.bench.frames import describe, markdown
from ficco.tools.bench.report import about_table

#: The eight shapes of docs/results, and the smaller shapes of benchmarks/tiled_products.py.
SHAPES = (
    (32768, 2048, 8192),
    (8192, 7168, 8192),
    (8192, 3584, 4096),
    (18432, 7168, 4096),
    (16384, 4096, 16384),
    (8192, 2048, 32768),
    (8192, 12288, 12288),
    (16384, 13312, 16384),
    *[shape for shape in SMALL if shape[0] <= 2560],
)
OUT, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
COLUMNS = ("library us", "tiled us", "predicted us", "share")


def timed(m: int, n: int, k: int) -> list[dict[str, Any]]:
    """The rows of one shape."""
    products, stream = hopper_products(0), torch.cuda.current_stream().cuda_stream
    late = torch.zeros(1, dtype=torch.int32, device="cuda")
    a = torch.randn(m, k, device="cuda").to(FLOAT8)
    b = torch.randn(n, k, device="cuda").to(FLOAT8).t()
    scales = TileScales([torch.rand(m, 1, device="cuda")], torch.rand(1, n, device="cuda"))
    out = torch.empty(m, n, device="cuda", dtype=OUT)
    calls: dict[Any, Callable[[], object]] = {}
    lists, launches = {}, []
    for precise in (True, False):
        operands = a, b, scales.a[0], scales.b
        options = {"out_dtype": OUT, "use_fast_accum": not precise, "out": out}
        calls["library", precise] = partial(torch._scaled_mm, *operands, **options)
        types = TileTypes(FLOAT8, FLOAT8, OUT, precise)
        tiles = products.best(Work((m,), n, k // 2), types, False)
        launch = products.prepare(tiles, types, False, late=late.data_ptr(), limit_s=1.0)
        again = launch.launch([a], b, [out], stream, scales)
        assert again is not None, "operands need no copies"
        launches.append(launch)
        calls["tiled", precise], lists[precise] = partial(again, stream), tiles
    expected = torch._scaled_mm(a, b, scales.a[0], scales.b, out_dtype=OUT).float()
    for name, call in calls.items():
        out.fill_(torch.nan)
        call()
        error = float((out.float() - expected).norm() / expected.norm())
        # The instructions of fast sums lose up to 5e-3 of a sum.
        assert error < (1e-4 if name[1] else 1e-2), f"{m} x {n} x {k}, {name}: off by {error}"
    times = rounds(calls)
    rows = []
    for precise, tiles in lists.items():
        pairs = zip(times["library", precise], times["tiled", precise], strict=True)
        row = {"m": m, "n": n, "k": k, "precise": precise, "cut": tiles.cut.name}
        row |= {"tiling": "x".join(map(str, tiles.tiling)), "predicted_us": tiles.seconds * 1e6}
        row |= {f"{name}_us": statistics.median(times[name, precise]) for name, _ in calls}
        rows.append(row | {"share": statistics.median(x / y for x, y in pairs)})
    assert not late.item()
    return rows


def page(frame: pd.DataFrame, command: str) -> str:
    """A table with a line for each shape, as Markdown."""
    heads = ["m x n x k", *[f"{sums}: {name}" for sums in ("precise", "fast") for name in COLUMNS]]
    body = []
    for (m, n, k), rows in frame.groupby(["m", "n", "k"], sort=False):
        row = [f"{m} x {n} x {k}"]
        for precise in (True, False):
            (cells,) = rows[rows.precise == precise].itertuples()
            row += [f"{us:.1f}" for us in (cells.library_us, cells.tiled_us, cells.predicted_us)]
            row.append(f"{cells.share:.3f}")
        body.append(row)
    means = [statistics.geometric_mean(frame[frame.precise == p].share) for p in (True, False)]
    body.append(
        ["**geometric mean**", *(cell for mean in means for cell in ("", "", "", f"{mean:.3f}"))]
    )
    method, about = " ".join(str(__doc__).split()), about_table(describe("cuda", command))
    return f"# tiled-float8\n\n{about}\n\n{method}\n\n{markdown(heads, body)}\n"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        rows += timed(*shape)
        print(*(f"{key}={value}" for key, value in rows[-2].items()), flush=True)
        pd.DataFrame(rows).to_csv(folder / "tiled-float8.csv", index=False, float_format="%.4g")
    text = page(pd.DataFrame(rows), f"python -m benchmarks.tiled_float8 {folder}")
    (folder / "tiled-float8.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
