"""Puts what committed results say of the FiCCO paper's claims into pages.

python -m docs.make.reproduced
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from math import nan
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from docs.make import parsed
from docs.make.paper import STUDIED_2D
from docs.make.readme import put_between
from docs.make.regret import NEAR, TITLE, by_plan, plain
from ficco.heuristics import rule
from ficco.machine import find
from ficco.problems.products import Problem
from ficco.schedules import NAMED, Schedule
from ficco.tools.bench.cases import Case
from ficco.tools.bench.frames import BENCH, LOSSES, markdown
from ficco.tools.bench.report import geomean, measured

DOCS = Path(__file__).resolve().parents[1]
RESULTS, SIMULATED = DOCS / "results", DOCS / "results/mi300x-simulated.md"

#: Results of all-gathers that timed the paper's schedules.
GATHERS = tuple(
    f"{shapes}-{place}"
    for place in ("h200-4", "h200-2", "h100-2")
    for shapes in ("measured", "unseen", "small" if place == "h200-4" else "decode")
)
#: The paper's own schedules that these benches have; hetero-unfused-1d is not one of them.
STUDIED_1D = ("uniform-fused-1d", "hetero-fused-1d")
STUDIED_ROLES = {
    **{name: NAMED[name] for name in (*STUDIED_1D, "shard-overlap")},
    "columns": NAMED[STUDIED_2D],
}
STUDIED = tuple(STUDIED_ROLES.values())

#: The line about the paper's rule in a section of regrets, and the heading above the line.
HEADING = re.compile(r"^### (?:(\w+), )?(queued|idle): ", re.MULTILINE | re.IGNORECASE)
RULE = re.compile(r"the paper's rule alone \((\d+) shapes\) \| (\d+)% right(?:, ([\d.]+)% lost)?")


class Ruled(NamedTuple):
    """Outcome of the paper's rule alone in one mode of one bench."""

    bench: str
    operator: str
    mode: str
    shapes: int
    right: int
    lost: float


def ruled() -> Iterator[Ruled]:
    """Outcomes in the committed sections of regrets."""
    for page in sorted(RESULTS.glob("*.md")):
        name, (_, section, text) = page.stem, page.read_text().partition(TITLE)
        if not section:
            continue
        only = BENCH.read(page.with_suffix(".csv"))["operator"].iloc[0]
        heads = list(HEADING.finditer(text))
        for head, after in zip(heads, [*heads[1:], None], strict=True):
            part = text[head.end() : after.start() if after else None]
            if match := RULE.search(part):
                shapes, share = int(match[1]), int(match[2])
                right = round(shapes * share / 100)
                operator = head[1] or only
                yield Ruled(name, operator, head[2].lower(), shapes, right, float(match[3] or 0))


@cache
def gathers(name: str, mode: str = "queued") -> pd.DataFrame:
    """A line per shape of a bench of all-gathers: times as fast as serial, by role.

    The paper's schedules have as many pieces per shard as there are ranks, moved by copy engines.
    A schedule that leads to the plan of another has its time.
    """
    rows = measured(BENCH.read(RESULTS / f"{name}.csv"))
    lines = {}
    for case, mine in rows[rows["mode"] == mode].groupby("case", sort=False):
        one = next(mine.itertuples())
        problem = Case(one.case, one.m, one.n, one.k, one.dtype).problem(one.world)
        speed = mine.set_index("candidate")["speedup"]
        ours = mine["candidate"][(mine["kind"] == "ficco") & mine["candidate"].map(plain)]
        timed = by_plan(problem, {Schedule.parse(one): speed[one] for one in ours}, STUDIED)
        lines[case] = {
            **{role: timed.get(schedule, nan) for role, schedule in STUDIED_ROLES.items()},
            "ideal": speed.get("ideal", nan),
            "auto": speed.get("auto", nan),
            "ficco-rccl": mine["speedup"][mine["kind"] == "pieces"].max(),
            "by columns": one.m <= one.k,
            "rule": _rule(problem, name),
        }
    table = pd.DataFrame.from_dict(lines, orient="index")
    return table.assign(rows=table[[*STUDIED_1D]].max(axis=1))


def _rule(problem: Problem, name: str) -> str:
    """The role of the schedule that the paper's rule takes, by the thresholds of the machine."""
    machine = find(name.partition("-")[2], None)
    assert machine is not None and machine.thresholds is not None
    taken, _ = rule(problem, machine.thresholds)
    return "columns" if taken == STUDIED_2D else taken


def by_shape(lines: pd.DataFrame) -> pd.Series:
    """Whether m <= k tells pieces of columns from pieces of rows, shape by shape."""
    taken = lines["columns"].where(lines["by columns"], lines["rows"])
    return taken * (1 + NEAR) >= lines[["rows", "columns"]].max(axis=1)


def by_rule(lines: pd.DataFrame) -> pd.Series:
    """Whether the rule takes the fastest of the paper's schedules, shape by shape. Shapes for which
    it takes a schedule that was not timed are left out."""
    timed = lines[lines["rule"].isin(lines.columns)]
    taken = timed.apply(lambda line: line[line["rule"]], axis=1)
    return taken * (1 + NEAR) >= timed[["rows", "columns"]].max(axis=1)


def rule_table() -> str:
    """The rule on measured hardware, bench by bench, and all together."""
    every = list(ruled())
    cells: dict[tuple[str, str], dict[str, Ruled]] = {}
    for one in every:
        cells.setdefault((one.bench, one.operator), {})[one.mode] = one
    rows = [
        [
            f"[{bench}]({bench}.md#what-auto-loses-recomputed)",
            f"`{operator}`",
            modes["queued"].shapes,
            *(cell for mode in ("queued", "idle") for cell in _cells(modes[mode])),
        ]
        for (bench, operator), modes in cells.items()
    ]
    whole = [_right(every, mode) for mode in ("queued", "idle")]
    shapes = whole[0].partition(" of ")[2]
    rows.append(["**together**", "", shapes, *(x for one in whole for x in (f"**{one}**", ""))])
    heads = ("bench", "operator", "shapes")
    modes = [f"{mode}: {head}" for mode in ("queued", "idle") for head in ("right", "lost")]
    return markdown((*heads, *modes), rows)


def _cells(one: Ruled) -> tuple[str, str]:
    return f"{one.right}", f"{one.lost:.0f} %" if one.right < one.shapes else ""


def _right(every: Sequence[Ruled], mode: str) -> str:
    mine = [one for one in every if one.mode == mode]
    return f"{sum(one.right for one in mine)} of {sum(one.shapes for one in mine)}"


def speed_table() -> str:
    """The paper's schedules, shard overlap and ``auto`` in every bench of all-gathers."""
    rows = []
    for name in GATHERS:
        lines = gathers(name)
        cells = [_mean(lines, role) for role in ROLES]
        right = [f"{fits.sum()} of {len(fits)}" for fits in (by_shape(lines), by_rule(lines))]
        rows.append([f"[{name}]({name}.md)", len(lines), *cells, *right])
    heads = ("bench", "shapes", *ROLES.values(), "m <= k is right", "the rule is right")
    return markdown(heads, rows)


#: Columns of :func:`gathers` for the table of speeds.
ROLES = {
    "ideal": "ideal",
    "shard-overlap": "shard overlap",
    "rows": "FiCCO, rows",
    "columns": "FiCCO, columns",
    "ficco-rccl": "pieces by NCCL",
    "auto": "`auto`",
}


def _mean(lines: pd.DataFrame, role: str) -> str:
    if role not in lines or lines[role].isna().all():
        return ""
    return f"{geomean(lines[role]):.2f} ({lines[role].max():.2f})"


class Claim(NamedTuple):
    """Something that the paper says, and what stands beside it."""

    text: str
    paper: str
    measured: str
    simulated: str
    verdict: str


def claims() -> list[Claim]:
    """In the order of the paper's sections."""
    every = pd.concat({name: gathers(name) for name in GATHERS})
    simulated = _simulated()
    shapes, taken = by_shape(every), by_rule(every)
    by_mode = {mode: _right(list(ruled()), mode) for mode in ("queued", "idle")}
    wins = every[["rows", "ficco-rccl"]].dropna()
    return [
        Claim(
            "III-C: shard overlap is slower than serial, at worst",
            "3.9 times",
            f"{1 / every['shard-overlap'].min():.1f} times, on a switch",
            simulated["shard overlap's slowdown against serial (III-C)"],
            "agrees in the simulation; a switch is the other case",
        ),
        *_losses(simulated),
        Claim(
            "V-C: pieces of columns where m <= k, else of rows",
            "right on all shapes",
            f"right on {shapes.sum()} of {len(shapes)} shapes",
            simulated["pieces of columns where m <= k, else of rows (V-C)"],
            "**no**",
        ),
        Claim(
            "VI-B: ideal overlap",
            "up to 1.7",
            _most(every, "ideal"),
            simulated["ideal overlap (VI-B)"],
            "agrees: the bound is 2 where GEMM and communication take equally long",
        ),
        Claim(
            "VI-B: shard overlap gains nothing on a mesh",
            "at most 1",
            f"{geomean(every['shard-overlap']):.2f} in the mean on a switch",
            simulated["shard overlap attains no speed-up on the mesh (VI-B)"],
            "agrees in the simulation; a switch is the other case",
        ),
        Claim(
            "VI-C: pieces of rows against serial",
            "up to 1.6",
            _most(every, "rows"),
            simulated["FiCCO with pieces of rows (VI-C)"],
            "agrees for the best shape; the next table has the means",
        ),
        Claim(
            "VI-C: pieces of columns against serial",
            "up to 1.7, emulated",
            _most(every, "columns"),
            simulated["FiCCO with pieces of columns, which the paper emulates (VI-C)"],
            "**no**: sums in float32 cost more than the paper's emulation shows",
        ),
        Claim(
            "VI-D: the rule takes the best schedule, within 2 % here",
            "on all 16 shapes; on 81 % of 16 others, losing 14 % elsewhere",
            f"of the paper's own schedules on {taken.sum()} of {len(taken)} shapes; of all that "
            f"ficco has on {by_mode['queued']}, and {by_mode['idle']} where the GPU waits",
            "[12 to 16 of 16](choosing.md#readings-of-the-papers-rule)",
            "**no**",
        ),
        Claim(
            "VI-E: pieces by copy engines against pieces by the library's collective",
            "figure 14",
            f"faster on {(wins['rows'] > wins['ficco-rccl']).sum()} of {len(wins)} shapes, "
            f"{geomean(wins['rows'] / wins['ficco-rccl']):.2f} times as fast in the mean",
            "",
            "copy engines are faster",
        ),
    ]


def _most(every: pd.DataFrame, role: str) -> str:
    bench, case = every[role].idxmax()
    return f"up to {every[role].max():.2f} ([{case}]({bench}.md))"


def _losses(simulated: dict[str, str]) -> list[Claim]:
    """Section IV, by the losses on two ranks."""
    rows = measured(LOSSES.read(RESULTS / "losses-h200-2.csv"))

    def ratios(loss: str, mover: str = "", cut: str = "rows") -> pd.Series:
        mine = rows[(rows["loss"] == loss) & (rows["cut"] == cut)]
        mine = mine[mine["mover"] == mover] if mover else mine[mine["parts"] == mine["parts"].max()]
        return mine.set_index("case")["ratio"]

    def mean(*which: str) -> str:
        return f"{geomean(ratios(*which)):.2f}"

    products = rows[rows["loss"] == "gemm-dil"].groupby("case")[["m", "k"]].first()
    by_rows = ratios("gemm-dil") < ratios("gemm-dil", cut="columns")
    wide = products[products["m"] < products["k"]].index
    above = ratios("gemm-cil", "collective") > ratios("gemm-cil", "dma-pieces")
    pieces, shards = "dma-pieces", "dma-shards"
    return [
        Claim(
            "IV-C1: a GEMM loses more when cut by rows if m < k, by columns if m > k",
            "on all shapes",
            f"by rows on {(~by_rows[wide]).sum()} of {len(wide)} with m < k. In 4 parts, all "
            f"products: {mean('gemm-dil')} by rows, {mean('gemm-dil', '', 'columns')} by columns",
            "",
            "**no**: columns lose more on every product, by their sums in float32",
        ),
        Claim(
            "IV-C2: communication in pieces takes longer",
            "about 1.10",
            f"{mean('communication-dil', pieces)}, in 2 pieces",
            simulated["communication in pieces, slower than whole (IV-C2, geometric mean)"],
            "agrees",
        ),
        Claim(
            "IV-D1: a GEMM beside copies by DMA, in pieces and in shards",
            "1.11 and 1.07",
            f"{mean('gemm-cil', pieces)} and {mean('gemm-cil', shards)}",
            "assumed as the paper's",
            "less on H200",
        ),
        Claim(
            "IV-D1: a GEMM beside the library's collective loses more than beside DMA",
            "on all shapes",
            f"on {above.sum()} of {len(above)}: {mean('gemm-cil', 'collective')} in the mean",
            "",
            "agrees but for one product",
        ),
        Claim(
            "IV-D2: copies by DMA beside a GEMM, in pieces and in shards",
            "1.12 and 1.03",
            f"{mean('copy-cil', pieces)} and {mean('copy-cil', shards)}",
            "assumed as the paper's",
            "nothing is lost on H200",
        ),
    ]


def _simulated() -> dict[str, str]:
    """Figures of the page of the simulation, by claim."""
    rows = re.findall(r"^\| (.+?) \| .+? \| (.+?) \|", SIMULATED.read_text(), re.MULTILINE)
    return dict(rows)


def tables() -> dict[tuple[str, str], str]:
    """The tables, by the page and the markers that they stand between."""
    heads = ("claim", "paper, 8 MI300X", "measured, NVIDIA", "simulated, 8 MI300X", "verdict")
    return {
        ("results/paper.md", "claims"): markdown(heads, claims()),
        ("results/paper.md", "speeds"): speed_table(),
        ("results/choosing.md", "rule"): rule_table(),
    }


def main() -> None:
    for (name, marker), text in tables().items():
        page = Path("docs", name)
        put_between(page, marker, text)
        print(f"wrote {page}")


if __name__ == "__main__":
    parsed(__doc__)
    main()
