"""``ficco plot``: draw timelines, simulated and measured, side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ficco.errors import ConfigError
from ficco.tools.cli.site import FILE, picture

if TYPE_CHECKING:
    from ficco.simulate.timeline import Timeline


def options(parser: Any) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        help="of ficco simulate --timelines and ficco bench --timelines",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("timelines.png"),
        help="png or svg (default: timelines.png)",
    )
    parser.add_argument("--trace", **FILE, help="write a trace for Perfetto")
    parser.add_argument("--only", metavar="TEXT", help="timelines with this in their title")
    parser.add_argument("--ranks", default="0", help="ranks to show: 0, 0,3 or all (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    from ficco.tools.bench.draw import draw, trace

    picture(arguments.out, "--out")
    chosen = [one for path in arguments.files for one in _read(path, arguments.only)]
    if not chosen:
        raise ValueError(f"--only: required part of a title, got {arguments.only!r}")
    timelines, columns = _arrange(chosen)
    ranks = _ranks(arguments.ranks, timelines)
    print(f"wrote {draw(timelines, arguments.out, columns=columns, ranks=ranks)}", file=sys.stderr)
    if arguments.trace:
        print(f"wrote {trace(timelines, arguments.trace)}", file=sys.stderr)
    return 0


def _read(path: Path, only: str | None) -> list[Timeline]:
    from ficco.simulate.timeline import loads

    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "file", f"cannot be read: {error}") from None
    try:
        timelines = loads(text, str(path))
    except ConfigError as error:
        raise ConfigError(
            str(path),
            error.key,
            "required a file of `ficco simulate --timelines` or `ficco bench --timelines`; the CSV "
            f"of a bench is drawn by `ficco bench --plot` ({error.expected})",
        ) from None
    return [one for one in timelines if only is None or only in one.title]


def _arrange(timelines: list[Timeline]) -> tuple[list[Timeline], int]:
    """Row by row, and the number of columns: what shows the same schedule stands side by side."""
    from ficco.simulate.timeline import Timeline

    rows: dict[str, list[Timeline]] = {}
    for one in timelines:
        rows.setdefault(one.title.rpartition(": ")[0] or one.title, []).append(one)
    columns = max(map(len, rows.values()))
    padded = [[*row, *[Timeline("", ())] * (columns - len(row))] for row in rows.values()]
    return [one for row in padded for one in row], columns


def _ranks(text: str, timelines: list[Timeline]) -> list[int] | None:
    if text == "all":
        return None
    ranks = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
    least = min(len(one.ranks) for one in timelines if one.ranks)
    if any(not 0 <= rank < least for rank in ranks):
        raise ValueError(f"--ranks: required all, or ranks from 0 to {least - 1}, got {text!r}")
    return ranks
