"""Figures from times, and what reports and pictures say of them.

Frames with a row per round and a column per candidate become the figures of a bench's rows, and
these one line per shape, by role of candidates. Times are seconds of the slowest rank. Whatever is
compared is compared round by round: a device that gets hot slows down all candidates of a round
alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ficco.schedules import Schedule

#: Candidates that others are compared with: the serial compositions, and PyTorch's fused op.
SERIALS = ("serial-collective", "serial")
PYTORCH = ("pytorch-fused", "pytorch-native")

#: Candidates that are one part of the operator, and the bound that follows from them.
PARTS = ("gemm", "collective", "copies")
IDEAL = "ideal"


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers, without those that are NaN; NaN for none."""
    return float(np.exp(np.log(pd.Series(list(values), dtype=float).dropna()).mean()))


def spread(times: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds by candidate: median ``ms``, and the quartiles ``ms_low`` and ``ms_high``."""
    quartiles = times.quantile([0.5, 0.25, 0.75]).T * 1e3
    return quartiles.set_axis(["ms", "ms_low", "ms_high"], axis=1)


def fastest(times: pd.DataFrame, names: Sequence[str]) -> pd.Series | None:
    """The times with the smallest median, of those of the candidates that are there."""
    there = times[[name for name in names if name in times]]
    return None if there.empty else there[there.median().idxmin()]


def over(reference: pd.Series | None, times: pd.DataFrame) -> pd.Series:
    """How many times as long as each candidate a reference takes: medians of the rounds' ratios;
    NaN without a reference."""
    if reference is None:
        return pd.Series(math.nan, times.columns)
    return times.rdiv(reference, axis=0).median()


def ideal(times: pd.DataFrame) -> pd.Series | None:
    """In every round the longer of the GEMM alone and the fastest communication alone."""
    moves = [name for name in PARTS[1:] if name in times]
    if "gemm" not in times or not moves:
        return None
    return np.maximum(times["gemm"], times[moves].min(axis=1))


def overlap_efficiency(times: pd.DataFrame) -> pd.Series:
    """Overlap efficiency as in Flux (arXiv:2406.06858), equations 1 and 2, by candidate.

    The effective communication time (ECT) of a method is its time less that of the fastest whole
    GEMM. The efficiency is 1 - ECT / ECT of the serial composition with the vendor's collective:
    0 for that composition, 1 where nothing but the GEMM is left, negative below serial. Median
    over the rounds in which serial takes longer than its GEMM.
    """
    if SERIALS[0] not in times or "gemm" not in times:
        return pd.Series(math.nan, times.columns)
    gemm, exposed = times["gemm"], times[SERIALS[0]] - times["gemm"]
    rounds = exposed > 0
    return (1 - times[rounds].sub(gemm[rounds], axis=0).div(exposed[rounds], axis=0)).median()


def summarise(
    times: Mapping[str, Sequence[float]], queued: Mapping[str, Sequence[float]] | None = None
) -> pd.DataFrame:
    """The figures of every candidate of one shape in one mode, as columns of
    ``ficco.tools.bench.frames.BENCH``, indexed by candidate.

    The ideal is added as a candidate of its own. ``queued`` has the times in the queued mode, of
    the same rounds.
    """
    rounds = pd.DataFrame(times)
    bound = ideal(rounds)
    if bound is not None:
        rounds[IDEAL] = bound
    figures = spread(rounds)
    ratios = pd.DataFrame(
        {
            "speedup": over(fastest(rounds, SERIALS), rounds),
            "share": over(bound, rounds),
            "efficiency": overlap_efficiency(rounds),
            "vs_pytorch": over(fastest(rounds, PYTORCH), rounds),
            "vs_queued": (pd.DataFrame(queued or {}) / rounds).median(),
        }
    )
    whole = rounds.columns.difference(PARTS)  # a part has no ratio to the whole operator
    return figures.join(ratios.loc[whole])


# What reports and pictures say of rows.

#: Modes in the order in which reports take them.
MODES = ("queued", "idle", "graph")

#: What identifies a shape.
SHAPE = ["operator", "case"]

#: Sorts candidates by a ratio: the largest ratio first, equal ratios in their order.
BEST_FIRST: dict[str, Any] = {"ascending": False, "kind": "stable"}

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


def lines(rows: pd.DataFrame, mode: str, by: str = "share") -> pd.DataFrame:
    """A row per shape that was measured in a mode, in their order, and the columns of the fastest
    candidate in every role: ``lines["best", "ms"]``. NaN where nothing in that role was measured.

    The fastest candidate has the largest ratio ``by``, which is the ratio that is then shown: a
    median of paired ratios and a ratio of medians can order candidates differently. Medians of
    milliseconds choose ``serial`` and ``pytorch``, since the ratios are relative to that choice,
    and every role of a shape that has no such ratio. ``best`` is never below a role that it
    contains: a call with ``auto`` counts as a call of the schedule that ``auto`` took.

    ==================  =============================================================
    role                candidate
    ==================  =============================================================
    shape               any
    gemm, collective    parts of the operator
    copies, ideal       a part, and the bound
    serial, pytorch     the better serial composition, and path of PyTorch's fused op
    best                the fastest call of ficco, known in hindsight
    auto                what a call takes with nothing else set
    library, tiled      the fastest schedule of library products, and of one whose tiles wait
    overlap             shard overlap, as PyTorch's Async TP, by a schedule of ficco
    best_1d, best_2d    the fastest schedule with pieces of rows, and of columns
    pieces              the paper's schedules by the vendor's collective
    quack               QuACK's gather and product
    ==================  =============================================================
    """
    there = measured(rows[rows["mode"] == mode])
    there = there.drop_duplicates([*SHAPE, "candidate"], keep="last")
    name, ours = there["candidate"], there["kind"] == "ficco"
    named, tiled = ours & (name != "auto"), name.str.startswith("tiled")
    cut = name.where(ours, "auto").map(dims)
    roles = {
        "shape": name == name,
        **{part: name == part for part in (*PARTS, IDEAL, "auto")},
        "serial": name.isin(SERIALS),
        "pytorch": name.isin(PYTORCH),
        "best": ours,
        "library": named & ~tiled,
        "tiled": named & tiled,
        "overlap": name == "shard-overlap",
        "best_1d": cut == 1,
        "best_2d": cut == 2,
        "pieces": name == "ficco-rccl",
        "quack": name == "quack",
    }
    chosen = {role: there[found].sort_values("ms", kind="stable") for role, found in roles.items()}
    return pd.concat(
        {
            role: (found if role in ("serial", "pytorch") else found.sort_values(by, **BEST_FIRST))
            .drop_duplicates(SHAPE)
            .sort_index()
            .set_index(SHAPE, drop=False)
            for role, found in chosen.items()
        },
        axis=1,
    )


def schedules(role: pd.DataFrame) -> pd.Series:
    """Names of the schedules of a role of :func:`lines`: for ``auto`` the schedule that it took."""
    notes = role["note"].astype(object).fillna("").astype(str)
    took = notes.str.extract(r"^is (\S+)", expand=False)
    return role["candidate"].mask((role["candidate"] == "auto") & took.notna(), took).fillna("")


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
