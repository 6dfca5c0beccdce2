"""Renders a Plan, seconds and bytes as text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping

from ficco.plan.model import OPS, Plan, unknown
from ficco.plan.parts import in_parts

Units = tuple[tuple[float, str], ...]
SECONDS: Units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
BYTES: Units = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def seconds_text(seconds: float) -> str:
    """Seconds as text.

    >>> seconds_text(0.00123456), seconds_text(4.2e-5), seconds_text(0.9999), seconds_text(1234.5)
    ('1.23 ms', '42 us', '1 s', '1234 s')
    """
    return _text(seconds, SECONDS)


def bytes_text(nbytes: float) -> str:
    """Bytes as text.

    >>> bytes_text(100), bytes_text(1 << 20), bytes_text(5 << 29)
    ('100 B', '1 MiB', '2.5 GiB')
    """
    return _text(nbytes, BYTES)


def column(values: Collection[float | None], units: Units) -> list[str]:
    """Values as text in one unit, with as many decimals as the smallest has in three digits.

    >>> column((0.0042, None, 0.00123456, 0.01, 0), SECONDS)
    ['4.20 ms', '', '1.23 ms', '10.00 ms', '0.00 ms']
    """
    least = min((value for value in values if value), default=0.0)
    size, unit = _unit(least, units)
    decimals = 2 - math.floor(math.log10(max(1.0, min(least / size, 100.0))))
    return ["" if value is None else f"{value / size:.{decimals}f} {unit}" for value in values]


def legend(meanings: Mapping[str, str], width: int = 100) -> str:
    """Meanings of the headings of a table, each on lines of at most ``width`` columns."""
    indent = max(map(len, meanings), default=0) + 2
    return "\n".join(
        textwrap.fill(
            text, width, initial_indent=head.ljust(indent), subsequent_indent=" " * indent
        )
        for head, text in meanings.items()
    )


def _unit(value: float, units: Units) -> tuple[float, str]:
    """The largest unit in which the rounded value is at least 1."""
    return next((one for one in units if value >= 0.9995 * one[0]), units[-1])


def _text(value: float, units: Units) -> str:
    size, unit = _unit(value, units)
    number = value / size
    return f"{number:.0f} {unit}" if number >= 999.5 else f"{number:.3g} {unit}"


#: Operations that wait for what peers send.
CONSUMERS = ("matmul", "attend", "apply", "call", "reduce", "place")


def render(plan: Plan, width: int = 100) -> str:
    """One rank's Plan as a timeline, a line per lane, at most ``width`` columns wide.

    Every step takes one tick. All ranks are assumed to run at the same pace: a step that waits for
    data of a peer begins when this rank has sent as many pieces as it has awaited by then. A step
    whose signals gate or announce some of its rows takes a tick for each part.

    Raises:
        NotImplementedError: a step is of a kind that is not known.
    """
    plan, problem = in_parts(plan), plan.problem
    begin = _ticks(plan)
    cells: dict[tuple[str, int], str] = {}
    for tick, step in zip(begin, plan.steps, strict=True):
        if step.op not in OPS:
            raise unknown(step, "render")
        cells[step.lane, tick] = step.label
    order = ("compute", "copy", "network", "reduce", "sync")
    lanes = sorted(plan.lanes, key=lambda lane: (order.index(lane.rstrip("0123456789")), lane))
    ticks = sorted(set(begin))
    head = max(map(len, lanes), default=0)
    widths = {t: max(len(cells.get((lane, t), "")) for lane in lanes) for t in ticks}
    shown, cut = _fit(ticks, widths, width - head)
    lines = [
        f"{problem}",
        f"{plan.schedule}: rank {plan.rank} of {problem.world}, {bytes_text(plan.extra_bytes)} "
        "besides the operands and the result",
    ]
    for lane in lanes:
        line = [lane.ljust(head)]
        texts = [cells.get((lane, tick), "").ljust(widths[tick]) for tick in shown]
        line += texts if cut is None else [*texts[:cut], "..", *texts[cut:]]
        lines.append(" | ".join(line).rstrip(" |"))
    return "\n".join(lines)


def _ticks(plan: Plan) -> list[int]:
    """Tick of the begin of each step."""
    begin: list[int] = []
    free: dict[str, int] = {}  # by lane, end of its latest step
    sent: list[int] = []  # ends of this rank's copies, in order
    awaited = 0
    for step in plan.steps:
        ready = [free.get(step.lane, 0), *(begin[i] + 1 for i in step.after)]
        awaited += sum(signal.kind in ("ready", "summed") for signal in step.waits)
        if sent and awaited and step.op in CONSUMERS and step.waits:
            ready.append(sorted(sent)[min(awaited, len(sent)) - 1])
        begin.append(max(ready))
        free[step.lane] = begin[-1] + 1
        if step.op == "copy":
            sent.append(begin[-1] + 1)
    return begin


def _fit(ticks: list[int], widths: dict[int, int], room: int) -> tuple[list[int], int | None]:
    """Ticks that fit, from both ends inwards, and how many precede the gap; None without one."""
    if sum(widths[t] + 3 for t in ticks) <= room:
        return ticks, None
    room -= len(" | ..")
    first: list[int] = []
    last: list[int] = []
    rest = list(ticks)
    while rest:
        tick = rest.pop(0 if len(first) <= len(last) else -1)
        room -= widths[tick] + 3
        if room < 0:
            break
        (first if len(first) <= len(last) else last).append(tick)
    last.reverse()
    return first + last, len(first)
