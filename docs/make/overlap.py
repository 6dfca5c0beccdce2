"""Draw README's picture: one call, serial and overlapped, on one time axis.

python -m docs.make.overlap

simulates rank 0 of SHAPE on MACHINE, reads the measured times of both from MEASURED, and writes
docs/overlap.svg.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docs.make import parsed
from ficco.heuristics.families import family_of
from ficco.machine import find
from ficco.schedules import Schedule
from ficco.simulate import simulate
from ficco.simulate.timeline import Bar
from ficco.tools.bench.cases import Case
from ficco.tools.bench.frames import BENCH

DOCS = Path(__file__).resolve().parents[1]
PICTURE = DOCS / "overlap.svg"

MACHINE, WORLD = "h200-4", 4
SHAPE = Case("32768x2048x8192", 32768, 2048, 8192)
MEASURED = DOCS / "results" / "measured-h200-4.csv"

#: The panels from top to bottom: a schedule and its heading.
PANELS = {
    "serial": "serial: gather all shards, then multiply",
    "shard-overlap": "overlapped: multiply each shard as it arrives",
}

#: Colours of the shards of ranks 0 to 3, of the product of all shards, and of text. Each is legible
#: on white and on black.
SHARDS = ("#3d74b8", "#c8741b", "#4d8f54", "#9a5b9b")
WHOLE, TEXT, LINE = "#5f6f82", "#768390", "#8b949e"

#: Pixels: size of the picture, left and right end of the axis, height of a row, and the top of each
#: panel's first row.
WIDTH, HEIGHT, LEFT, RIGHT, ROW = 960, 296, 120, 930, 36
TOPS = (38, 160)

#: End of the axis in milliseconds, and the distance of its ticks.
UNTIL, TICK = 2.5, 0.5


def bars(schedule: str) -> tuple[list[Bar], list[Bar]]:
    """Copies that arrive on rank 0, and products of rank 0, in simulated seconds."""
    machine = find(MACHINE, None)
    assert machine is not None
    problem = SHAPE.problem(WORLD)
    plans = family_of(problem).plans(problem, Schedule.parse(schedule), range(WORLD))
    ranks = simulate(plans, machine, "queued").ranks
    arriving = [bar for rank in ranks for bar in rank if bar.label.endswith(">0")]
    products = [bar for bar in ranks[0] if bar.kind == "matmul"]
    return arriving, products


def measured_ms(schedule: str) -> float:
    """Measured milliseconds of the same call, host ahead."""
    rows = BENCH.read(MEASURED)
    ours = rows["case"].eq(SHAPE.name) & rows["mode"].eq("queued") & rows["candidate"].eq(schedule)
    (ms,) = rows["ms"][ours]
    return float(ms)


def text() -> str:
    """The picture."""
    ends = [max(bar.stop_s for bar in bars(name)[1]) * 1e3 for name in PANELS]
    times = " and ".join(f"{measured_ms(name):.2f} ms" for name in PANELS)
    sizes = f"m {SHAPE.m}, n {SHAPE.n}, k {SHAPE.k}, bfloat16"
    where = f"rank 0 of {WORLD} H200, simulated. Measured: {times}."
    about = f"all-gather + GEMM, {sizes}: {where}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" '
            f'font-size="14" fill="{TEXT}">',
            f"<title>{about}</title>",
            *_axis(),
            *_panel(0, "serial", ends[0]),
            *_panel(1, "shard-overlap", ends[1]),
            *_saved(*ends),
            _words(LEFT, HEIGHT - 8, about, size=12),
            "</svg>\n",
        ]
    )


def _x(ms: float) -> float:
    return LEFT + (RIGHT - LEFT) * ms / UNTIL


def _words(x: float, y: float, words: str, size: int = 14, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" {more}>{words}</text>'


def _axis() -> Iterator[str]:
    bottom = TOPS[1] + 2 * ROW + 12
    for i in range(round(UNTIL / TICK) + 1):
        x = _x(i * TICK)
        line = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOPS[0] - 4}" y2="{bottom}"'
        yield f'<line {line} stroke="{LINE}" stroke-opacity="0.3"/>'
        label = f"{i * TICK:g}" if i else "0 ms"
        yield _words(x, bottom + 16, label, 12, 'text-anchor="middle"')


def _panel(number: int, schedule: str, end_ms: float) -> Iterator[str]:
    """Heading, copies, products and end of a panel."""
    arriving, products = bars(schedule)
    top = TOPS[number]
    yield _words(LEFT, top - 14, PANELS[schedule], 16, 'font-weight="600"')
    for row, name in enumerate(("copy engines", "GEMM")):
        y = top + row * ROW + ROW / 2 + 4
        yield _words(LEFT - 12, y, name, more='text-anchor="end"')
    for bar in sorted(arriving, key=lambda bar: bar.start_s):
        shard = int(bar.label.split(".")[0])
        yield from _bar(bar, top, SHARDS[shard], f"shard {shard}")
    for bar in products:
        whole = " " in bar.label
        shard = 0 if whole or bar.label == "own" else int(bar.label.split(".")[0])
        words = (
            "one GEMM over all shards" if whole else "own shard" if shard == 0 else f"shard {shard}"
        )
        yield from _bar(bar, top + ROW, WHOLE if whole else SHARDS[shard], words)


def _bar(bar: Bar, top: float, colour: str, words: str) -> Iterator[str]:
    left, right = _x(bar.start_s * 1e3), _x(bar.stop_s * 1e3)
    size = f'width="{right - left - 2:.1f}" height="{ROW - 6}"'
    yield f'<rect x="{left + 1:.1f}" y="{top}" {size} rx="3" fill="{colour}"/>'
    more = 'text-anchor="middle" fill="#ffffff"'
    yield _words((left + right) / 2, top + ROW / 2 + 2, words, 13, more)


def _saved(serial_ms: float, ours_ms: float) -> Iterator[str]:
    """An arrow over the time that overlap saves."""
    left, right, y = _x(ours_ms) + 4, _x(serial_ms), TOPS[1] + ROW
    for x in (_x(ours_ms), right):
        line = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOPS[1] - 2}" y2="{TOPS[1] + 2 * ROW - 4}"'
        yield f'<line {line} stroke="{LINE}" stroke-width="1.5"/>'
    yield (
        f'<path d="M{right:.1f} {y} H{left:.1f} m8 -5 l-8 5 l8 5" fill="none" stroke="{LINE}" '
        f'stroke-width="1.5"/>'
    )
    words = f"{serial_ms / ours_ms:.2f} times as fast"
    yield _words((left + right) / 2, y - 8, words, 16, 'text-anchor="middle" font-weight="600"')


def main() -> None:
    PICTURE.write_text(text())
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    parsed(__doc__)
    main()
