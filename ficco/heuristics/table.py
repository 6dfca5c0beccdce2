"""Predictions and measurements of candidates, as a table of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ficco.heuristics.losses import Losses
from ficco.plan.amounts import bytes_text, seconds_text

#: Modes in the order of their columns.
MODES = ("queued", "idle")

#: Columns that are dropped from a table that is too wide, in this order.
OPTIONAL = ("DIL gemm", "DIL copies", "CIL", "of ideal", "memory")

#: Seconds by schedule and mode.
Measured = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Candidate:
    """Predictions for one schedule.

    Attributes:
        schedule: its name.
        queued, idle: seconds if the host runs ahead, and if the GPU waits for it; None if the
            machine lacks the figures.
        share: ideal time over queued time.
        losses: decomposition and contention loss; None if they are not known.
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
    """A line per candidate, the chosen one marked with a star, in at most ``width`` characters if
    the required columns fit. The last line names the optional columns that were left out."""
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

    names = [candidate.schedule for candidate in candidates]
    yield "  schedule", [f"{'*' if name == chosen else ' '} {name}" for name in names]
    yield "queued", times(candidate.queued for candidate in candidates)
    yield "idle", times(candidate.idle for candidate in candidates)
    for mode in MODES:
        seconds = [measured.get(name, {}).get(mode) for name in names]
        if any(seconds):
            yield f"measured {mode}", times(seconds)
    yield "of ideal", [f"{candidate.share:.2f}" for candidate in candidates]
    if losses := [candidate.losses for candidate in candidates if candidate.losses]:
        yield "DIL gemm", [f"{loss.gemm:.2f}" for loss in losses]
        yield "DIL copies", [f"{loss.copies:.2f}" for loss in losses]
        yield "CIL", [f"{loss.contention:.2f}" for loss in losses]
    yield "memory", [bytes_text(candidate.extra_bytes) for candidate in candidates]
