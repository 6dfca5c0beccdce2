"""What is predicted of the candidates, and what was measured of them, as a table of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ficco.heuristics.losses import Losses
from ficco.plan.amounts import bytes_text, seconds_text

#: Modes in the order of their columns.
MODES = ("queued", "idle")

#: Columns that a table that is too wide does without, the first one first.
OPTIONAL = ("DIL gemm", "DIL copies", "CIL", "of ideal", "memory")

#: Seconds by schedule and mode.
Measured = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Candidate:
    """What is predicted of one schedule.

    Attributes:
        schedule: its name.
        queued, idle: seconds where the host runs ahead, and where the GPU waits for it; None
            where the machine lacks the figures.
        share: of the ideal time, queued.
        losses: decomposition and contention loss; None where they are not known.
        extra_bytes: memory besides operands and result, on rank 0.
    """

    schedule: str
    queued: float
    idle: float | None
    share: float
    losses: Losses | None
    extra_bytes: int


def table(
    candidates: Sequence[Candidate], chosen: str, measured: Measured, width: int | None = None
) -> str:
    """A line per candidate, the chosen one marked with a star, in at most ``width`` columns if the
    columns that are not optional allow it; the last line names what was left out for that."""
    columns = {head: [head, *cells] for head, cells in _columns(candidates, chosen, measured)}
    optional, dropped = [head for head in OPTIONAL if head in columns], list[str]()
    while True:
        widths = [max(map(len, cells)) for cells in columns.values()]
        fits = width is None or sum(widths) + 2 * (len(widths) - 1) <= width
        if fits or len(dropped) == len(optional):
            break
        dropped.append(optional[len(dropped)])
        del columns[dropped[-1]]
    lines = [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip()
        for first, *rest in zip(*columns.values(), strict=True)
    ]
    if dropped:
        lines.append(f"left out in {width} columns: {', '.join(reversed(dropped))}")
    return "\n".join(lines)


def _columns(
    candidates: Sequence[Candidate], chosen: str, measured: Measured
) -> Iterable[tuple[str, list[str]]]:
    def times(values: Iterable[float | None]) -> list[str]:
        return ["" if seconds is None else seconds_text(seconds) for seconds in values]

    names = [one.schedule for one in candidates]
    yield "  schedule", [f"{'*' if name == chosen else ' '} {name}" for name in names]
    yield "queued", times(one.queued for one in candidates)
    yield "idle", times(one.idle for one in candidates)
    for mode in MODES:
        seconds = [measured.get(name, {}).get(mode) for name in names]
        if any(seconds):
            yield f"measured {mode}", times(seconds)
    yield "of ideal", [f"{one.share:.2f}" for one in candidates]
    if losses := [one.losses for one in candidates if one.losses]:
        yield "DIL gemm", [f"{one.gemm:.2f}" for one in losses]
        yield "DIL copies", [f"{one.copies:.2f}" for one in losses]
        yield "CIL", [f"{one.contention:.2f}" for one in losses]
    yield "memory", [bytes_text(one.extra_bytes) for one in candidates]
