"""What reports and pictures say of a bench's rows: one line per shape, by role of candidates."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from ficco.bench import stats
from ficco.schedules import Schedule

#: Modes in the order in which reports take them.
MODES = ("queued", "idle", "graph")

#: What identifies a shape.
SHAPE = ["operator", "case"]

#: Figures of which reports give geometric means, with their headings.
RATIOS = {"share": "of ideal", "speedup": "x serial", "vs_pytorch": "x PyTorch"}


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of what was measured."""
    return rows[rows["status"] == "ok"]


def modes(rows: pd.DataFrame) -> list[str]:
    """The modes in which something was measured."""
    return [mode for mode in MODES if (measured(rows)["mode"] == mode).any()]


def by_operator(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of each operator, in their order."""
    for operator in rows["operator"].unique():
        yield operator, rows[rows["operator"] == operator]


def dims(candidate: str) -> int:
    """Whether a schedule of ficco cuts shards by rows, 1, or by columns, 2; 0 for ``auto``."""
    name = candidate.partition("@")[0]
    return 0 if name == "auto" else Schedule.parse(name).dims


def lines(rows: pd.DataFrame, mode: str) -> pd.DataFrame:
    """A row per shape that was measured in a mode, in their order, and the columns of the fastest
    candidate in every role: ``lines["best", "ms"]``. NaN where nothing in that role was measured.

    ==================  =============================================================
    role                candidate
    ==================  =============================================================
    shape               any
    gemm, collective    parts of the operator
    copies, ideal       a part, and the bound
    serial, pytorch     the better serial composition, and path of PyTorch's fused op
    best                the fastest schedule of ficco, known in hindsight
    auto                what a call takes with nothing else set
    overlap             shard overlap, as PyTorch's Async TP, by a schedule of ficco
    best_1d, best_2d    the fastest schedule with pieces of rows, and of columns
    pieces              the paper's schedules by the vendor's collective
    ==================  =============================================================
    """
    there = measured(rows[rows["mode"] == mode])
    there = there.drop_duplicates([*SHAPE, "candidate"], keep="last")
    name, ours = there["candidate"], there["kind"] == "ficco"
    # auto is one of the others, under another name.
    others = (ours & (name != "auto")).groupby([there[key] for key in SHAPE]).transform("any")
    ours &= (name != "auto") | ~others
    cut = name[ours].map(dims).reindex(name.index)
    roles = {
        "shape": name == name,
        **{part: name == part for part in (*stats.PARTS, stats.IDEAL, "auto")},
        "serial": name.isin(stats.SERIALS),
        "pytorch": name.isin(stats.PYTORCH),
        "best": ours,
        "overlap": name == "shard-overlap",
        "best_1d": cut == 1,
        "best_2d": cut == 2,
        "pieces": name == "ficco-rccl",
    }
    return pd.concat(
        {
            role: there[chosen]
            .sort_values("ms", kind="stable")
            .drop_duplicates(SHAPE)
            .sort_index()
            .set_index(SHAPE, drop=False)
            for role, chosen in roles.items()
        },
        axis=1,
    )


def balance(shapes: pd.DataFrame) -> pd.Series:
    """The GEMM's time over that of the fastest communication, of each line."""
    moves = pd.concat([shapes["collective", "ms"], shapes["copies", "ms"]], axis=1)
    return shapes["gemm", "ms"] / moves.min(axis=1)


def shape_text(shapes: pd.DataFrame) -> pd.Series:
    """The sizes of each line's shape in words, with its name and origin if it has some."""

    def text(row: pd.Series) -> str:
        named = row["case"] != f"{row['m']}x{row['n']}x{row['k']}"
        return (
            f"{row['case']}: " * named
            + f"{row['m']}, {row['n']}, {row['k']}"
            + f" ({row['label']})" * bool(row["label"])
        )

    return shapes["shape"].apply(text, axis=1)


def left_out(rows: pd.DataFrame) -> list[str]:
    """What was not measured, on which shapes, and why."""
    rest = rows[rows["status"] != "ok"]
    first = rest["operator"] == "all_gather_matmul"
    where = rest["case"].where(first, rest["operator"] + " " + rest["case"])
    what = rest["candidate"].where(rest["candidate"] != "", "the shape")
    why = rest["status"] + ": " + rest["note"]
    return [
        f"{name} on {', '.join(cases.unique())}: {reason}"
        for (name, reason), cases in where.groupby([what, why], sort=False)
    ]
