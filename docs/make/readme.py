"""Write a table of several benches between the markers of a README.

python -m docs.make.readme docs/results/measured-h200-4.csv [...] [--file README.md] [--table all]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ficco.errors import ConfigError
from ficco.tools.bench.frames import BENCH, markdown, read_description
from ficco.tools.bench.report import (
    HINDSIGHT,
    MODE_WORDS,
    RATIOS,
    by_operator,
    geomean,
    lines,
    modes,
)

#: A bench in a table of several: its rows, the description of the machine, a link to its report.
Results = tuple[pd.DataFrame, dict[str, Any], str]

MEANS = "Geometric mean over the shapes, and the worst shape."


def auto_table(benches: Sequence[Results]) -> str:
    """Ratios of ``auto``: a line for each operator of each bench, with both eager modes."""
    eager = ("queued", "idle")
    heads = [f"{mode}: {name}" for mode in eager for name in RATIOS.values()]
    body = []
    for place, operator, mine in _operators(benches):
        by_mode = [lines(mine, mode) for mode in eager]
        if any(one["auto", "ms"].notna().any() for one in by_mode):
            cells = [cell for one in by_mode for cell in _reached(one["auto"])]
            body.append((place, f"`{operator}`", max(map(len, by_mode)), *cells))
    words = "; ".join(f"*{mode}*: {MODE_WORDS[mode]}" for mode in eager)
    return f"{MEANS} {words}.\n\n" + markdown(("measured on", "operator", "shapes", *heads), body)


def whole_table(benches: Sequence[Results]) -> str:
    """Ratios of the fastest schedules and of ``auto``: a line for each operator and mode of each
    bench."""
    heads = ("measured on", "operator", "mode", "shapes", *RATIOS.values())
    of_auto = [f"`auto`: {name}" for name in RATIOS.values()]
    body, seen = [], set()
    for place, operator, mine in _operators(benches):
        for mode in modes(mine):
            if mode != "graph":
                shapes = lines(mine, mode)
                seen.add(mode)
                reached = [*_reached(shapes["best"]), *_reached(shapes["auto"])]
                body.append((place, f"`{operator}`", mode, len(shapes), *reached))
    words = "; ".join(f"*{mode}*: {text}" for mode, text in MODE_WORDS.items() if mode in seen)
    return f"{MEANS} {words}. {HINDSIGHT}\n\n" + markdown((*heads, *of_auto), body)


#: Tables by the value of ``--table``.
TABLES: dict[str, Callable[[Sequence[Results]], str]] = {"auto": auto_table, "all": whole_table}


def _operators(benches: Sequence[Results]) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Where each operator of each bench was measured, as a link, its name, and its rows."""
    for rows, about, link in benches:
        where = f"{about.get('ranks', '?')} x {about.get('device', 'an unnamed machine')}"
        date = str(about.get("date", "")).split(" ")[0]
        for operator, mine in by_operator(rows):
            yield f"[{where}, {date}]({link})", operator, mine


def _reached(role: pd.DataFrame) -> list[str]:
    """The ratios of a role over several shapes: their mean, and the worst."""
    both = [(geomean(role[name]), role[name].min()) for name in RATIOS]
    return ["" if pd.isna(mean) else f"{mean:.2f} ({worst:.2f})" for mean, worst in both]


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


def table(csvs: Sequence[Path], page: Path, which: str) -> str:
    """The table of these results as it stands on a page, whose links begin in its folder."""
    folder = page.resolve().parent
    benches = []
    for csv in csvs:
        link = os.path.relpath(csv.resolve().with_suffix(".md"), folder)
        benches.append((BENCH.read(csv), read_description(csv), link))
    return TABLES[which](benches)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path, nargs="+", help="results of ficco bench")
    parser.add_argument("--file", type=Path, default=Path("README.md"), help="that README")
    parser.add_argument(
        "--table", choices=TABLES, default="auto", help="all: also the fastest schedules"
    )
    arguments = parser.parse_args(words)
    put_between(arguments.file, "results", table(arguments.csv, arguments.file, arguments.table))
    print(f"wrote {arguments.file}")


if __name__ == "__main__":
    main(sys.argv[1:])
