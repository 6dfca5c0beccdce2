"""Markdown from a bench's rows: a report, and the tables of several benches for READMEs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ficco.bench.bounds import moved_bytes
from ficco.bench.lines import Line, lines, mean_and_worst, modes, number
from ficco.bench.stats import ROLES
from ficco.bench.table import ERROR_ROWS, Row, left_out, operators
from ficco.errors import ConfigError
from ficco.problem import OPERATORS

MODE_WORDS = {
    "queued": "the host runs ahead of the GPU, as in a training step",
    "idle": "the GPU waits for the host, as in a decode step",
    "graph": "replayed from a graph, behind a queue",
}


def report(rows: Sequence[Row], about: dict[str, Any], name: str, pictures: Sequence[Path]) -> str:
    """A bench as Markdown."""
    summed = any(OPERATORS[operator].sums for operator in operators(rows))
    parts = [f"# {name}", about_table(about), HOW + SUMS * summed]
    parts += [f"![{path.stem}]({path.name})" for path in pictures]
    several = len(operators(rows)) > 1
    for operator, mine in by_operator(rows):
        for mode in modes(mine):
            heading = f"{operator}, {mode}" if several else mode.capitalize()
            parts += [f"## {heading}: {MODE_WORDS[mode]}", _bounds(mine, mode)]
        if costs := _costs(mine):
            parts += ["## Host cost and memory" + f" of {operator}" * several, costs]
        if accuracy := _accuracy(mine):
            parts += ["## Accuracy" + f" of {operator}" * several, accuracy]
    if missing := left_out(rows):
        parts += ["## Not measured", "\n".join(f"- {text}" for text in missing)]
    return "\n\n".join(part for part in parts if part) + "\n"


def by_operator(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each operator."""
    for operator in operators(rows):
        yield operator, [row for row in rows if row.operator == operator]


HOW = (
    "All candidates of a shape run in shuffled order in every round, so that a GPU that gets hot "
    "slows down all of them alike. A round's time is that of its slowest rank. Milliseconds are "
    "medians over rounds; shares and ratios are medians of the ratios of each round. "
    "ideal = the longer of one whole library GEMM alone and the faster of the vendor's collective "
    "and the copy engines alone. serial = the better of that collective and the copy engines, with "
    "the GEMM behind. overlap = overlap efficiency as in Flux (arXiv:2406.06858, equation 2). "
    "Every result was compared exactly before it was timed."
)

SUMS = (
    " Where products are summed over ranks, the memory traffic of the sum is not in the ideal: "
    "copies are those of the blocks alone, of an all-reduce there and back."
)


def about_table(about: dict[str, Any]) -> str:
    if not about:
        return ""
    versions = about.get("versions", {})
    said = [
        ("machine", f"{about.get('ranks', '?')} ranks, {about.get('device', '')}"),
        ("date", about.get("date", "")),
        ("software", ", ".join(f"{name} {value}" for name, value in versions.items())),
        ("commit", about.get("commit", "")),
        ("command", f"`{about.get('command', '')}`"),
        ("calls in a graph", str(about.get("calls_in_graph", ""))),
        ("note", about.get("note", "")),
    ]
    return markdown(("", ""), [(name, value) for name, value in said if value])


def _bounds(rows: Sequence[Row], mode: str) -> str:
    there = lines(rows, mode)
    with_auto = any(line.auto for line in there)
    figures = ["share", "speedup", "vs_pytorch"] + ["vs_queued"] * (mode == "graph")
    heads = (
        "shape",
        "GEMM",
        "collective",
        "copies",
        "serial",
        "PyTorch",
        "ficco",
        "schedule",
        "of ideal",
        "x serial",
        "x PyTorch",
        *["x queued"] * (mode == "graph"),
        "overlap",
        *[f"auto: {AUTO_HEADS[0]}", *AUTO_HEADS[1:]] * with_auto,
    )
    body = [
        (
            _shape(line.shape),
            *(_ms(row) for row in (line.gemm, line.collective, line.copies)),
            *(_ms(row) for row in (line.serial, line.pytorch, line.best)),
            line.best.candidate if line.best else "",
            *(_figure(line.best, name) for name in figures),
            _figure(line.best, "efficiency"),
            *_auto_cells(line) * with_auto,
        )
        for line in there
    ]
    best = [line.best for line in there]
    for i, name in enumerate(("geometric mean", "worst")):
        means = [mean_and_worst(best, figure)[i] for figure in figures]
        blank = ("",) * 7
        means_of_auto = ["", *_auto_means(there, i)] * with_auto
        body.append(
            (f"**{name}**", *blank, *(number(value) for value in means), "", *means_of_auto)
        )
    sizes = _sizes(there[0].shape.operator)
    return f"Milliseconds; ({sizes}). {HINDSIGHT}\n\n" + markdown(heads, body)


#: Figures of what ``auto`` takes, behind its milliseconds.
AUTO_FIGURES = ("speedup", "vs_pytorch")
AUTO_HEADS = ("ms", "x serial", "x PyTorch")


def _sizes(operator: str) -> str:
    """What the three sizes of a shape are."""
    kind = OPERATORS[operator]
    if kind.blocks:
        return "rows per rank, n, k"
    return "m, n, k per rank" if kind.scatters else "m, n per rank, k"


HINDSIGHT = (
    "The schedule is the fastest that was measured, which is known in hindsight; `auto` is what a "
    "call takes with nothing else set."
)


def _auto_cells(line: Line) -> list[str]:
    return [_ms(line.auto), *(_figure(line.auto, name) for name in AUTO_FIGURES)]


def _auto_means(there: Sequence[Line], which: int) -> list[str]:
    """Geometric means of what ``auto`` reaches, or the worst."""
    rows = [line.auto for line in there]
    return [number(mean_and_worst(rows, name)[which]) for name in AUTO_FIGURES]


def _shape(row: Row) -> str:
    size = f"{row.m}, {row.n}, {row.k}"
    name = "" if row.case == f"{row.m}x{row.n}x{row.k}" else f"{row.case}: "
    return f"{name}{size}" + (f" ({row.label})" if row.label else "")


def _costs(rows: Sequence[Row]) -> str:
    """Host microseconds and memory by candidate, over the shapes."""
    names = list(dict.fromkeys(row.candidate for row in rows if row.ok))
    measured = [mode for mode in modes(rows) if any(_known(r, mode, "host_us") for r in rows)]
    body = []
    for name in names:
        own = [row for row in rows if row.candidate == name and row.ok]
        host = [[r.host_us for r in own if _known(r, mode, "host_us")] for mode in measured]
        extra = [
            row.extra_bytes / gathered
            for row in own
            if not math.isnan(row.extra_bytes) and (gathered := moved_bytes(row.problem))
        ]
        if extra or any(host):
            cells = [f"{median(values):.0f}" if values else "" for values in host]
            body.append((name, *cells, f"{max(extra):.2f}" if extra else ""))
    if not body:
        return ""
    moved = "product" if OPERATORS[rows[0].operator].scatters else "gathered A"
    heads = ("candidate", *(f"host us, {mode}" for mode in measured), f"memory / {moved}")
    text = (
        "Host: microseconds to enqueue one of several calls in a row, slowest rank, median over "
        "the shapes. "
        "Memory beside operands and result, on the rank that takes most, over the bytes of the "
        f"{moved}; largest of the shapes. ficco holds two slots, so that a call need not wait "
        "for the one before, and one where its memory is capped."
    )
    return f"{text}\n\n{markdown(heads, body)}"


def _known(row: Row, mode: str, figure: str) -> bool:
    return row.ok and row.mode == mode and not math.isnan(getattr(row, figure))


def _accuracy(rows: Sequence[Row]) -> str:
    """Errors of sums on random data: ficco's beside those of serial."""
    body, ratios = [], []
    for case in dict.fromkeys(row.case for row in rows):
        found = {row.candidate: row for row in rows if row.case == case and row.error == row.error}
        serial = found.get(ROLES.serials[0])
        ours = [row for row in found.values() if row.kind == "ficco"]
        if not serial or not ours:
            continue
        least, most = (pick(ours, key=lambda row: row.error) for pick in (min, max))
        fused = found.get(ROLES.pytorch[0])
        ratios.append(most.error / serial.error)
        body.append(
            (
                _shape(serial),
                _error(serial),
                _error(fused),
                _error(least),
                _error(most),
                f"`{most.candidate}`",
                f"{ratios[-1]:.3f}",
            )
        )
    if not body:
        return ""
    heads = ("", "serial", "PyTorch", "ficco, least", "ficco, largest", "of", "largest / serial")
    text = (
        "Random operands, as they are timed. Root mean square of the difference from products and "
        f"sums in float64, over that of these, in {ERROR_ROWS} rows of each rank, on the rank "
        "where it is largest. serial is the GEMM with the vendor's collective behind. "
    )
    larger = sum(ratio > 1 for ratio in ratios)
    verdict = (
        f"ficco's largest error is no larger than serial's on {len(ratios) - larger} of "
        f"{len(ratios)} shapes; at most it is {max(ratios):.3f} times serial's."
    )
    return f"{text}{verdict}\n\n{markdown(heads, body)}"


def _error(row: Row | None) -> str:
    return "" if row is None else f"{row.error:.3e}"


#: A bench for a table of several: its rows, what is known of the machine, a link to its report.
Bench = tuple[Sequence[Row], dict[str, Any], str]

FIGURES = {"share": "of ideal", "speedup": "x serial", "vs_pytorch": "x PyTorch"}


def auto_table(benches: Sequence[Bench]) -> str:
    """What ``auto`` reaches: a line for each operator of each bench, both eager modes in it."""
    modes_there = ("queued", "idle")
    heads = [f"{mode}: {name}" for mode in modes_there for name in FIGURES.values()]
    body = []
    for place, operator, mine in _operators(benches):
        by_mode = {mode: [line.auto for line in lines(mine, mode)] for mode in modes_there}
        if any(one for found in by_mode.values() for one in found):
            shapes = max(map(len, by_mode.values()))
            cells = [cell for found in by_mode.values() for cell in _reached(found)]
            body.append((place, f"`{operator}`", shapes, *cells))
    words = "; ".join(f"*{mode}*: {MODE_WORDS[mode]}" for mode in modes_there)
    return f"{MEANS} {words}.\n\n" + markdown(("measured on", "operator", "shapes", *heads), body)


def whole_table(benches: Sequence[Bench]) -> str:
    """What the fastest schedules and ``auto`` reach: a line for each operator and mode of each
    bench."""
    heads = ("measured on", "operator", "mode", "shapes", *FIGURES.values())
    of_auto = [f"`auto`: {name}" for name in FIGURES.values()]
    body, seen = [], set()
    for place, operator, mine in _operators(benches):
        for mode in modes(mine):
            if mode != "graph" and (found := lines(mine, mode)):
                seen.add(mode)
                best = _reached([line.best for line in found])
                auto = _reached([line.auto for line in found])
                body.append((place, f"`{operator}`", mode, len(found), *best, *auto))
    words = "; ".join(f"*{mode}*: {text}" for mode, text in MODE_WORDS.items() if mode in seen)
    return f"{MEANS} {words}. {HINDSIGHT}\n\n" + markdown((*heads, *of_auto), body)


#: Tables of several benches, by what they tell of.
TABLES = {"auto": auto_table, "all": whole_table}

MEANS = "Geometric mean over the shapes, and the worst shape."


def _operators(benches: Sequence[Bench]) -> Iterator[tuple[str, str, list[Row]]]:
    """Where each operator of each bench was measured, as a link, its name, and its rows."""
    for rows, about, link in benches:
        where = f"{about.get('ranks', '?')} x {about.get('device', 'an unnamed machine')}"
        date = str(about.get("date", "")).split(" ")[0]
        for operator, mine in by_operator(rows):
            yield f"[{where}, {date}]({link})", operator, mine


def _reached(found: Sequence[Row | None]) -> list[str]:
    """The figures of several shapes: their mean, and the worst."""
    both = [mean_and_worst(found, figure) for figure in FIGURES]
    return ["" if math.isnan(mean) else f"{mean:.2f} ({worst:.2f})" for mean, worst in both]


def put_between(path: Path, name: str, text: str) -> None:
    """Replace what stands between the two markers of a name in a Markdown file.

    Raises:
        ConfigError: it does not have both markers, in order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    try:
        whole = path.read_text()
    except OSError as error:
        raise ConfigError(str(path), "file", f"cannot be read: {error.strerror}") from None
    start, stop = whole.find(begin), whole.find(end)
    if start < 0 or stop < start:
        raise ConfigError(str(path), "markers", f"required {begin} and then {end}")
    path.write_text(f"{whole[: start + len(begin)]}\n{text}\n{whole[stop:]}")


def markdown(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [heads, ["---"] * len(heads), *body]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _ms(row: Row | None) -> str:
    return "" if row is None else f"{row.ms:.3f}"


def _figure(row: Row | None, name: str) -> str:
    return "" if row is None else number(getattr(row, name))
