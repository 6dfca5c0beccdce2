"""Figures from times, and what reports say of them: Markdown, tables for a terminal, and pictures.

Frames with a row per round and a column per candidate become the figures of a bench's rows, and
these one line per shape, by role of candidates. Times are seconds of the slowest rank. Ratios are
taken round by round: a device that gets hot slows down all candidates of a round alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ficco.problems.products import OPERATORS
from ficco.schedules import Schedule
from ficco.tools.baselines import COPY_ENGINES
from ficco.tools.bench.candidates import moved_bytes
from ficco.tools.bench.cases import Case
from ficco.tools.bench.draw import BLACK, BLUE, GREEN, GREY, LIGHT, ORANGE, PURPLE, bars, picture
from ficco.tools.bench.frames import Schema, cells, markdown, place, show, show_meanings

#: Seconds of each round, by candidate.
Series = Mapping[str, Sequence[float]]

#: Baselines: the serial compositions, and PyTorch's fused op.
SERIALS = ("pytorch-serial", "serial", *COPY_ENGINES)
PYTORCH = ("pytorch-fused", "pytorch-native", "pytorch-one-shot", "pytorch-two-shot")

#: Kind of the first serial composition, whose name was ``serial-collective`` in older files.
SERIAL = "serial-collective"

#: Candidates that are one part of the operator, and their bound.
PARTS = ("gemm", "collective", "copies")
IDEAL = "ideal"


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers without NaN; NaN for no number."""
    return float(np.exp(np.log(pd.Series(list(values), dtype=float).dropna()).mean()))


def spread(times: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds by candidate: median ``ms``, and the quartiles ``ms_low`` and ``ms_high``."""
    quartiles = times.quantile([0.5, 0.25, 0.75]).T * 1e3
    return quartiles.set_axis(["ms", "ms_low", "ms_high"], axis=1)


def fastest(times: pd.DataFrame, names: Sequence[str]) -> pd.Series | None:
    """Times of the candidate with the smallest median; None if ``times`` has none of them."""
    present = times[[name for name in names if name in times]]
    return None if present.empty else present[present.median().idxmin()]


def over(reference: pd.Series | None, times: pd.DataFrame) -> pd.Series:
    """Time of a reference over the time of each candidate: medians of the rounds' ratios; NaN
    without a reference."""
    if reference is None:
        return pd.Series(math.nan, times.columns)
    return times.rdiv(reference, axis=0).median()


def ideal(times: pd.DataFrame) -> pd.Series | None:
    """The longer of the exclusive GEMM and the fastest exclusive communication, in every round."""
    moves = [name for name in PARTS[1:] if name in times]
    if "gemm" not in times or not moves:
        return None
    return np.maximum(times["gemm"], times[moves].min(axis=1))


def overlap_efficiency(times: pd.DataFrame) -> pd.Series:
    """Overlap efficiency as in Flux (arXiv:2406.06858), equations 1 and 2, by candidate.

    The effective communication time (ECT) of a method is its time less that of the fastest whole
    GEMM. The efficiency is 1 - ECT / ECT of the serial composition with the vendor's collective:
    0 for that composition, 1 where nothing but the GEMM is left, negative below serial. Median over
    rounds with serial longer than its GEMM.
    """
    if SERIALS[0] not in times or "gemm" not in times:
        return pd.Series(math.nan, times.columns)
    gemm, exposed = times["gemm"], times[SERIALS[0]] - times["gemm"]
    rounds = exposed > 0
    return (1 - times[rounds].sub(gemm[rounds], axis=0).div(exposed[rounds], axis=0)).median()


def summarise(times: Series, queued: Series | None = None) -> pd.DataFrame:
    """The figures of every candidate of one shape in one mode, as columns of
    ``ficco.tools.bench.frames.BENCH``, indexed by candidate.

    The ideal is added as a candidate of its own. ``queued`` has the times in the queued mode, of
    the same rounds.
    """
    rounds = pd.DataFrame(times)
    bound = ideal(rounds)
    if bound is not None:
        rounds[IDEAL] = bound
    ratios = {
        "speedup": over(fastest(rounds, SERIALS), rounds),
        "share": over(bound, rounds),
        "efficiency": overlap_efficiency(rounds),
        "vs_pytorch": over(fastest(rounds, PYTORCH), rounds),
        "vs_queued": (pd.DataFrame(queued or {}) / rounds).median(),
        "ms_even": rounds[::2].median() * 1e3,
        "ms_odd": rounds[1::2].median() * 1e3,
    }
    whole = rounds.columns.difference(PARTS)  # a part has no ratio to the whole operator
    return spread(rounds).join(pd.DataFrame(ratios).loc[whole])


# Figures of rows.

#: Modes in the order of reports.
MODES = ("queued", "idle", "graph")

#: Columns that identify a shape.
SHAPE = ["operator", "case"]

#: Sorts candidates by a ratio: the largest ratio first, equal ratios in their order.
BEST_FIRST: dict[str, Any] = {"ascending": False, "kind": "stable"}

#: Figures with geometric means in reports, and their headings.
RATIOS = {"share": "of ideal", "speedup": "x serial", "vs_pytorch": "x PyTorch"}


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with figures."""
    return rows[rows["status"] == "ok"]


def modes(rows: pd.DataFrame) -> list[str]:
    """The modes that have figures."""
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
    timed = measured(rows[rows["mode"] == mode])
    timed = timed.drop_duplicates([*SHAPE, "candidate"], keep="last")
    name, ours = timed["candidate"], timed["kind"] == "ficco"
    named, tiled = ours & (name != "auto"), name.str.startswith("tiled")
    cut = name.where(ours, "auto").map(dims)
    roles = {
        "shape": name == name,
        **{part: name == part for part in (*PARTS, IDEAL, "auto")},
        "serial": (timed["kind"] == SERIAL) | name.isin(SERIALS),
        "pytorch": name.isin(PYTORCH),
        "best": ours,
        "library": named & ~tiled,
        "tiled": named & tiled,
        "overlap": name == "shard-overlap",
        "best_1d": cut == 1,
        "best_2d": cut == 2,
        "pieces": timed["kind"] == "pieces",
        "quack": name == "quack",
    }
    chosen = {}
    for role, mask in roles.items():
        these = timed[mask].sort_values("ms", kind="stable")
        if role not in ("serial", "pytorch"):
            these = these.sort_values(by, **BEST_FIRST)
        first = these.drop_duplicates(SHAPE).sort_index()
        chosen[role] = first.set_index(SHAPE, drop=False)
    return pd.concat(chosen, axis=1)


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
        m, n, k = row["m"], row["n"], row["k"]
        name = f"{row['case']}: " * (row["case"] != f"{m}x{n}x{k}")
        return f"{name}{m}, {n}, {k}" + f" ({row['label']})" * bool(row["label"])

    return shapes["shape"].apply(text, axis=1)


def left_out(rows: pd.DataFrame) -> list[str]:
    """Lines for candidates without figures: their shapes, and the reason."""
    rest = rows[rows["status"] != "ok"]
    first = rest["operator"] == "all_gather_matmul"
    where = rest["case"].where(first, rest["operator"] + " " + rest["case"])
    names = rest["candidate"].where(rest["candidate"] != "", "the shape")
    why = rest["status"] + ": " + rest["note"]
    return [
        f"{name} on {', '.join(cases.unique())}: {reason}"
        for (name, reason), cases in where.groupby([names, why], sort=False)
    ]


# Reports in Markdown.


MODE_WORDS = {
    "queued": "the host runs ahead of the GPU, as in a training step",
    "idle": "the GPU waits for the host, as in a decode step",
    "graph": "replayed from a graph, behind a queue",
}

HOW = (
    "All candidates of a shape run in shuffled order in every round, so that a GPU that gets hot "
    "slows down all of them alike. A round's time is that of its slowest rank. Milliseconds are "
    "medians over rounds; shares and ratios are medians of the ratios of each round, not ratios of "
    "these medians, so that what slows down a whole round does not count. "
    "ideal = the longer of one whole library GEMM alone and the faster of the vendor's collective "
    "and the copy engines alone. serial = the better of that collective and the copy engines, with "
    "the GEMM behind. A share above 1 is possible, since the parts are timed separately: the "
    "products of a schedule can take less time than the one whole GEMM. "
    "overlap = overlap efficiency as in Flux (arXiv:2406.06858, equation 2). "
    "Every result was compared exactly before it was timed."
)

SUMS = (
    " Where products are summed over ranks, the memory traffic of the sum is not in the ideal: "
    "copies are those of the blocks alone, of an all-reduce there and back."
)

#: Rows of each rank's result that are compared for the error.
ERROR_ROWS = 64

#: Milliseconds of a product that is not short.
LONG_MS = 0.09

HINDSIGHT = (
    "The schedule is the one with the largest median share of the ideal, which is known in "
    "hindsight; `auto` is what a call takes with nothing else set."
)


def report(rows: pd.DataFrame, about: dict[str, Any], name: str, pictures: Sequence[Path]) -> str:
    several = rows["operator"].nunique() > 1
    summed = any(OPERATORS[operator].sums for operator in rows["operator"].unique())
    parts = [f"# {name}", about_table(about), HOW + SUMS * summed, _punctual(rows)]
    parts += [f"![{path.stem}]({path.name})" for path in pictures]
    for operator, mine in by_operator(rows):
        for mode in modes(mine):
            heading = f"{operator}, {mode}" if several else mode.capitalize()
            parts += [f"## {heading}: {MODE_WORDS[mode]}", _bounds(mine, mode), _tiled(mine, mode)]
        if costs := _costs(mine):
            parts += ["## Host cost and memory" + f" of {operator}" * several, costs]
        if accuracy := _accuracy(mine):
            parts += ["## Accuracy" + f" of {operator}" * several, accuracy]
    if missing := left_out(rows):
        parts += ["## Not measured", "\n".join(f"- {text}" for text in missing)]
    return "\n\n".join(part for part in parts if part) + "\n"


def about_table(about: dict[str, Any]) -> str:
    if not about:
        return ""
    versions = about.get("versions", {})
    said = [
        ("machine", place(about)),
        ("date", about.get("date", "")),
        ("software", ", ".join(f"{name} {value}" for name, value in versions.items())),
        ("commit", about.get("commit", "")),
        ("command", f"`{about.get('command', '')}`"),
        ("calls in a graph", str(about.get("calls_in_graph", ""))),
        ("note", about.get("note", "")),
    ]
    return markdown(("", ""), [(name, value) for name, value in said if value])


def with_means(table: pd.DataFrame, ratios: dict[str, pd.Series], bold: str = "{}") -> pd.DataFrame:
    """A table of text with two more rows: geometric mean and least of the columns ``ratios``."""
    ends = pd.DataFrame("", ["geometric mean", "worst"], table.columns, dtype=object)
    for head, values in ratios.items():
        ends[head] = cells(pd.Series([geomean(values), values.min()], ends.index))
    ends[table.columns[0]] = ends.index.map(bold.format)
    return pd.concat([table, ends], ignore_index=True)


#: Headings of roles whose name is another.
HEADINGS = {"gemm": "GEMM", "pytorch": "PyTorch", "quack": "QuACK", "best": "ficco"}


def _bounds(rows: pd.DataFrame, mode: str) -> str:
    shapes = lines(rows, mode)
    figures = RATIOS | {"vs_queued": "x queued"} if mode == "graph" else RATIOS
    quack = ["quack"] * int(shapes["quack", "ms"].notna().any())
    # Columns are named by their headings, except for a heading that occurs twice.
    table = pd.DataFrame({"shape": shape_text(shapes)})
    for role in (*PARTS, "serial", "pytorch", *quack, "best"):
        table[HEADINGS.get(role, role)] = cells(shapes[role, "ms"], ".3f")
    table["schedule"] = schedules(shapes["best"])
    ratios = {head: shapes["best", name] for name, head in figures.items()}
    table = table.assign(**{head: cells(values) for head, values in ratios.items()})
    table["overlap"] = cells(shapes["best", "efficiency"])
    heads = list(table)
    if shapes["auto", "ms"].notna().any():
        table["auto"] = cells(shapes["auto", "ms"], ".3f")
        heads.append("auto: ms")
        for name in ("speedup", "vs_pytorch"):
            ratios[f"auto: {name}"] = shapes["auto", name]
            table[f"auto: {name}"] = cells(shapes["auto", name])
            heads.append(RATIOS[name])
    first = f"Milliseconds; ({_sizes(rows['operator'].iloc[0])}). {HINDSIGHT}"
    return f"{first}\n\n{markdown(heads, with_means(table, ratios, '**{}**'))}"


def _punctual(rows: pd.DataFrame) -> str:
    """Deviations of the signals of a replay."""
    if "off_us" not in rows or rows["off_us"].isna().all():
        return ""
    off, worst = rows["off_us"], rows.loc[rows["off_us"].idxmax()]
    shares = off / rows["ms"] / 1e3
    return (
        "Signals of peers are replayed. The one of a call that is furthest from its planned time "
        f"is off by {off.median():.1f} us, median over calls ({shares.median():.1%} of their "
        f"time); at worst by {worst['off_us']:.1f} us: `{worst['candidate']}` on "
        f"{worst['operator']} {worst['case']}, {worst['mode']}."
    )


def _tiled(rows: pd.DataFrame, mode: str) -> str:
    """One product whose tiles wait compared with the library's products."""
    shapes = lines(rows, mode)
    if shapes["tiled", "ms"].isna().all():
        return ""
    ideal = cells(shapes["ideal", "ms"], ".3f")
    table, ratios = pd.DataFrame({"shape": shape_text(shapes), "ideal": ideal}), {}
    for role in ("serial", "library", "tiled", "auto"):
        if role != "serial":
            table[role] = schedules(shapes[role])
        table[f"{role}: ms"] = cells(shapes[role, "ms"], ".3f")
        ratios[f"{role}: of ideal"] = shapes[role, "share"]
        table[f"{role}: of ideal"] = cells(shapes[role, "share"])
    gain = ratios["tiled x library"] = shapes["library", "ms"] / shapes["tiled", "ms"]
    table = table.assign(**{"tiled x library": cells(gain)}).fillna("")
    long = shapes["gemm", "ms"] >= LONG_MS
    means = [f"{head} {geomean(values[long]):.3f}" for head, values in ratios.items()]
    return (
        "One product whose tiles wait (`tiled`) compared with the fastest schedule of library "
        "products.\n\n"
        + markdown(list(table), with_means(table, ratios, "**{}**"))
        + f"\n\nGeometric means over the {int(long.sum())} shapes whose GEMM takes at least "
        f"{LONG_MS * 1e3:.0f} us: {', '.join(means)}."
    )


def _sizes(operator: str) -> str:
    """Heading of the three sizes of a shape."""
    kind = OPERATORS[operator]
    if kind.blocks:
        return "rows per rank, n, k"
    return "m, n, k per rank" if kind.scatters else "m, n per rank, k"


def _costs(rows: pd.DataFrame) -> str:
    """Host microseconds and memory by candidate, over the shapes."""

    def moved_by(row: pd.Series) -> int:
        case = Case("", row["m"], row["n"], row["k"], row["dtype"], operator=row["operator"])
        return moved_bytes(case.problem(row["world"]))

    timed = measured(rows)
    each = [moved_by(row) for _, row in timed.iterrows()]
    moved = pd.Series(each, index=timed.index, dtype=float)
    timed = timed.assign(memory=(timed["extra_bytes"] / moved).where(moved != 0))
    by_name = timed.groupby("candidate", sort=False)
    host = timed[timed["host_us"].notna()].groupby(["candidate", "mode"])["host_us"].median()
    hosts = host.unstack().reindex(timed["candidate"].unique())
    known = [mode for mode in modes(rows) if mode in hosts]
    table = hosts[known].assign(memory=by_name["memory"].max()).dropna(how="all")
    if table.empty:
        return ""
    text = table[known].apply(cells, form=".0f").assign(memory=cells(table["memory"]))
    moved_name = "product" if OPERATORS[rows["operator"].iloc[0]].scatters else "gathered A"
    heads = ("candidate", *(f"host us, {mode}" for mode in known), f"memory / {moved_name}")
    named = "; ".join(f"`{name}`: {NAMES[name]}" for name in NAMES if name in table.index)
    return (
        "Host: microseconds to enqueue one of several calls in a row, slowest rank, median over "
        "the shapes. "
        "Memory beside operands and result, on the rank that takes most, over the bytes of the "
        f"{moved_name}; largest of the shapes. ficco holds two slots, so that a call need not wait "
        "for the one before, and one where its memory is capped."
        + f" {named}." * bool(named)
        + f"\n\n{markdown(heads, text.reset_index())}"
    )


#: Candidates that need an explanation.
NAMES = {
    **dict.fromkeys(
        ("pytorch-serial", "serial-collective"),
        "the library's collective and the product one after the other, without ficco",
    ),
    "serial:collective": "the same as a schedule of ficco's",
    **dict.fromkeys(
        COPY_ENGINES, "RCCL's collective, which may take copy engines, and then the product"
    ),
    **dict.fromkeys(
        ("pytorch-pieces", "ficco-rccl"),
        "the paper's name for pieces that the library's collectives carry, without ficco",
    ),
}


def _accuracy(rows: pd.DataFrame) -> str:
    """Errors of sums on random data: ficco's compared with those of serial."""
    timed = measured(rows)
    timed = timed.dropna(subset="error").drop_duplicates(["case", "candidate"], keep="last")
    errors = timed.pivot(index="case", columns="candidate", values="error")
    ours = errors[timed["candidate"][timed["kind"] == "ficco"].unique()].dropna(how="all")
    serial = timed[timed["kind"] == SERIAL].set_index("case", drop=False)
    serial = serial[serial.index.isin(ours.index)]
    if serial.empty:
        return ""
    ours = ours.loc[serial.index]
    ratios = ours.max(axis=1) / serial["error"]
    columns = {
        "serial": serial["error"],
        "PyTorch": errors.reindex(columns=PYTORCH[:1]).loc[serial.index, PYTORCH[0]],
        "ficco, least": ours.min(axis=1),
        "ficco, largest": ours.max(axis=1),
    }
    table = pd.DataFrame({head: cells(values, ".3e") for head, values in columns.items()})
    table.insert(0, "", shape_text(pd.concat({"shape": serial}, axis=1)))
    table = table.assign(of="`" + ours.idxmax(axis=1) + "`", ratio=cells(ratios, ".3f"))
    larger = int((ratios > 1).sum())
    return (
        "Random operands, as they are timed. Root mean square of the difference from products and "
        f"sums in float64, over that of these, in {ERROR_ROWS} rows of each rank, on the rank "
        "where it is largest. serial is the GEMM with the vendor's collective behind. "
        f"ficco's largest error is no larger than serial's on {len(ratios) - larger} of "
        f"{len(ratios)} shapes; at most it is {ratios.max():.3f} times serial's."
        f"\n\n{markdown([*table.columns[:-1], 'largest / serial'], table)}"
    )


# For a terminal.

#: Figures of the table of a shape in each mode: heading, column, format.
BY_MODE = (
    ("ms", "ms", ".3f"),
    ("of ideal", "share", ".2f"),
    ("host us", "host_us", ".0f"),
    ("off us", "off_us", ".1f"),
)


def show_shape(rows: pd.DataFrame) -> None:
    """Print one shape's rows: a table, fastest first, and the candidates without figures."""
    first = rows.iloc[0]
    operator = "" if first["operator"] == "all_gather_matmul" else f"{first['operator']} "
    sizes = f"m={first['m']} n={first['n']} k={first['k']} {first['dtype']}"
    title = f"{operator}{first['case']}: {sizes}, {first['world']} ranks"
    title += f"; {first['label']}" * bool(first["label"])
    timed = measured(rows)
    if timed.empty:
        print(f"{title}: {first['status']}: {first['note']}")
        return
    modes_there = timed["mode"].unique()
    turn = timed["mode"].map({mode: number for number, mode in enumerate(modes_there)})
    names = timed.assign(turn=turn).sort_values(["turn", "ms"], kind="stable")["candidate"].unique()
    seen = timed.drop_duplicates("candidate").set_index("candidate").loc[names]
    notes = seen["note"].str.removeprefix("is ")
    named = [f"{name}: {note}" if note else name for name, note in notes.items()]
    table = pd.DataFrame({"candidate": named})
    figures = timed.pivot(index="candidate", columns="mode").reindex(names)
    for mode in modes_there:
        for heading, column, form in BY_MODE:
            if (column, mode) in figures and figures[column, mode].notna().any():
                table[f"{mode}\n{heading}"] = cells(figures[column, mode], form).to_numpy()
    if seen["extra_bytes"].notna().any():
        table["extra MiB"] = cells(seen["extra_bytes"] / 2**20, ".1f").to_numpy()
    bold = [number for number, name in enumerate(names) if name == IDEAL]
    show(title, table, bold=bold, width=140)
    for text in left_out(rows):
        print(f"  {text}")


def show_best(rows: pd.DataFrame) -> None:
    """Print the figures of the best schedule for each shape, a table per operator and mode."""
    print("Times and ratios are medians of the rounds. The best schedule has the largest ratio.")
    for operator, mine in by_operator(rows):
        for mode in modes(mine):
            shapes = lines(mine, mode)
            shapes = shapes[shapes["best", "ms"].notna()]
            if shapes.empty:
                continue
            best = shapes["best"]
            ratios = {head: best[name] for name, head in RATIOS.items()}
            table = pd.DataFrame({"shape": shapes["shape", "case"], "ms": cells(best["ms"], ".3f")})
            ratios = {head: values for head, values in ratios.items() if values.notna().any()}
            table = table.assign(**{head: cells(values) for head, values in ratios.items()})
            table = with_means(table.assign(schedule=schedules(best)), ratios)
            title, last = f"{operator}: best schedule per shape, {mode}", len(table) - 1
            show(title, table, left=(0, table.shape[1] - 1), bold=(last - 1, last))
    shown = (head for name, head in RATIOS.items() if rows[name].notna().any())
    show_meanings([*rows["candidate"], *shown, "extra MiB"])


# Pictures.

#: Names and colours of roles in pictures.
DRAWN = {
    "serial": ("serial", GREY),
    "pytorch": ("PyTorch fused op", ORANGE),
    "overlap": ("shard overlap", GREEN),
    "auto": ("ficco, auto", BLUE),
    "best": ("ficco, best schedule", LIGHT),
    "ideal": ("ideal", BLACK),
    "best_1d": ("ficco 1D", BLUE),
    "best_2d": ("ficco 2D", LIGHT),
    "pieces": ("ficco rccl", PURPLE),
}

#: Roles of the first picture; roles that the second picture draws over the balance of GEMM and
#: communication; roles with geometric means in the second picture.
SHARES = ("serial", "pytorch", "overlap", "auto", "best")
CURVES = ("ideal", "overlap", "best")
MEANS = ("ideal", "overlap", "best_1d", "best_2d", "pieces", "pytorch")

#: Shapes in a row of the first picture.
MOST_SHAPES = 10


def draw(schema: Schema, rows: pd.DataFrame, path: Path, title: str) -> list[Path]:
    """Draw the rows of a file; returns the paths of the pictures. Products have two pictures for
    each operator, whose names begin with that of ``path``."""
    if "kind" not in rows:
        timed, panels = rows.dropna(subset=schema.figure), {}
        ways = timed[[*schema.ways]].astype(str).agg(" ".join, axis=1)
        columns = [name for name in ("operator", schema.case, "mode") if name in rows]
        for names, mine in timed.groupby(columns, sort=False):
            heading = f"{', '.join(map(str, names))}: {schema.figure}"
            panels[heading] = mine[[schema.figure]].set_axis(ways[mine.index])
        return [bars(panels, path, title)] if panels else []
    drawn, several = [], rows["operator"].nunique() > 1
    for operator, mine in by_operator(rows):
        if not (timed_modes := modes(mine)):
            continue
        start = f"{path.stem}_{operator}" if several else path.stem
        for name, function in (("share", shares), ("speedup", speedups)):
            drawn.append(path.with_name(f"{start}_{name}{path.suffix}"))
            function(mine, timed_modes, drawn[-1], f"{title}, {operator}" if several else title)
    return drawn


def shares(rows: pd.DataFrame, modes_there: Sequence[str], path: Path, title: str) -> None:
    """Share of the ideal by shape, a panel per mode."""
    by_mode = {mode: lines(rows, mode) for mode in modes_there}
    shown = [
        (mode, measured, part)
        for mode, shapes in by_mode.items()
        for measured in [[role for role in SHARES if shapes[role, "share"].notna().any()]]
        for part in _in_rows(shapes)
    ]
    widest = max(len(part) for *_, part in shown)
    size = max(6.0, 1.3 * widest + 2), 2.9 * len(shown) + 0.6
    with picture(path, *size, title) as figure:
        panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
        for axes, (mode, measured, shapes) in zip(panels, shown, strict=True):
            names, colours = zip(*(DRAWN[role] for role in measured), strict=True)
            frame = shapes[[(role, "share") for role in measured]].set_axis(names, axis=1)
            frame.index = [_shape(row) for _, row in shapes["shape"].iterrows()]
            frame.plot.bar(ax=axes, width=0.8, rot=0, color=colours, legend=False, xlabel="")
            axes.axhline(1, color=BLACK, linewidth=0.8)
            axes.set_xlim(-0.6, widest - 0.4)
            axes.set_ylabel(f"share of ideal, {mode}")
        _legend_below(figure, panels[0])


def _in_rows(shapes: pd.DataFrame) -> list[pd.DataFrame]:
    """Shapes in rows of about the same length, ``MOST_SHAPES`` at most."""
    rows = -(-len(shapes) // MOST_SHAPES)
    length = -(-len(shapes) // rows)
    return [shapes.iloc[first : first + length] for first in range(0, len(shapes), length)]


def _legend_below(figure: Any, axes: Any) -> None:
    """Draw the legend of ``axes`` below all axes of the figure."""
    handles, names = axes.get_legend_handles_labels()
    how = {"loc": "outside lower center", "ncols": max(len(names), 1), "frameon": False}
    figure.legend(handles, names, **how)


def _shape(row: pd.Series) -> str:
    m, n, k = row["m"], row["n"], row["k"]
    return f"{row['case']}\n" * (row["case"] != f"{m}x{n}x{k}") + f"m {m}\nn {n}\nk {k}"


def speedups(rows: pd.DataFrame, modes_there: Sequence[str], path: Path, title: str) -> None:
    """Speed-up over the better serial composition against the GEMM/communication ratio, and its
    geometric means over the shapes (figures 13 and 14 of the FiCCO paper), a row per mode."""
    with picture(path, 10, 3.2 * len(modes_there) + 0.6, title) as figure:
        widths = {"width_ratios": [1.4, 1]}
        panels = figure.subplots(len(modes_there), 2, squeeze=False, gridspec_kw=widths)
        for (left, right), mode in zip(panels, modes_there, strict=True):
            shapes = lines(rows, mode, "speedup")
            order = balance(shapes).sort_values(kind="stable")
            for name, colour, role in ((*DRAWN[role], role) for role in CURVES):
                points = shapes[role, "speedup"].reindex(order.index).set_axis(order).dropna()
                left.plot(points, "o-", label=name, color=colour)
            left.axhline(1, color=GREY, linewidth=0.8)
            left.set_xscale("log", base=2)
            left.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            left.set_xlabel("time of the GEMM / time of the communication")
            left.set_ylabel(f"speed-up over serial, {mode}")
            means = pd.Series({role: geomean(shapes[role, "speedup"]) for role in MEANS}).dropna()
            names, colours = zip(*(DRAWN[role] for role in means.index), strict=True)
            names = [name.replace(" ", "\n", 1) for name in names]
            right.bar_label(right.bar(names, means, color=colours), fmt="%.2f")
            right.axhline(1, color=GREY, linewidth=0.8)
            right.set_ylabel(f"geometric mean of {len(shapes)} shapes")
        _legend_below(figure, panels[0, 0])
