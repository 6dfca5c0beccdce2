"""What is predicted of the candidates, and what was measured of them, as a table of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ficco.amounts import bytes_text, seconds_text

if TYPE_CHECKING:
    from ficco.heuristics.decide import Candidate

#: Modes in the order of their columns.
MODES = ("queued", "idle")

#: Columns that a table does without until it is narrow enough, in this order.
LESS = ("DIL gemm", "DIL copies", "CIL", "of ideal", "memory")

#: Seconds by schedule and mode.
Measured = Mapping[str, Mapping[str, float]]


def table(
    found: Sequence[Candidate], chosen: str, measured: Measured, width: int | None = None
) -> str:
    """A line per candidate, the chosen one marked with a star, in at most ``width`` columns if
    what has to be said allows it; what was left out for that is named below."""
    columns = dict(_columns(found, chosen, measured))
    dropped = []
    for name in LESS:
        if width is None or _width(columns) <= width:
            break
        del columns[name]
        dropped.append(name)
    names = [head for head in columns]
    lines = [_line(names, columns)]
    lines += [_line([cells[i] for cells in columns.values()], columns) for i in range(len(found))]
    if dropped:
        lines.append(f"left out in {width} columns: {', '.join(reversed(dropped))}")
    return "\n".join(lines)


def _columns(
    found: Sequence[Candidate], chosen: str, measured: Measured
) -> Iterable[tuple[str, list[str]]]:
    yield (
        "  schedule",
        [f"{'*' if one.schedule == chosen else ' '} {one.schedule}" for one in found],
    )
    yield "queued", [seconds_text(one.queued) for one in found]
    yield "idle", ["" if one.idle is None else seconds_text(one.idle) for one in found]
    for mode in MODES:
        times = [measured.get(one.schedule, {}).get(mode) for one in found]
        if any(times):
            yield f"measured {mode}", ["" if t is None else seconds_text(t) for t in times]
    yield "of ideal", [f"{one.share:.2f}" for one in found]
    yield "DIL gemm", [f"{one.losses.gemm:.2f}" for one in found]
    yield "DIL copies", [f"{one.losses.copies:.2f}" for one in found]
    yield "CIL", [f"{one.losses.contention:.2f}" for one in found]
    yield "memory", [bytes_text(one.extra_bytes) for one in found]


def _widths(columns: Mapping[str, Sequence[str]]) -> list[int]:
    return [max(map(len, (head, *cells))) for head, cells in columns.items()]


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    return sum(_widths(columns)) + 2 * (len(columns) - 1)


def _line(cells: Sequence[str], columns: Mapping[str, Sequence[str]]) -> str:
    """The first cell to the left, the others to the right."""
    first, *widths = _widths(columns)
    rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths, strict=True)]
    return "  ".join([cells[0].ljust(first), *rest]).rstrip()
