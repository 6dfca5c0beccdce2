"""Frames of text as tables, for Markdown and for a terminal, and a bar over what takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table


def cells(values: pd.Series, form: str = ".2f") -> pd.Series:
    """Figures as text; nothing for NaN."""
    return values.map(lambda value: "" if pd.isna(value) else format(value, form)).astype(object)


def markdown(heads: Sequence[str], rows: pd.DataFrame | Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    body = rows.itertuples(index=False) if isinstance(rows, pd.DataFrame) else rows
    lines = [heads, ["---"] * len(heads), *body]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def show(
    title: str,
    rows: pd.DataFrame,
    left: Sequence[int] = (0,),
    bold: Sequence[int] = (),
    sections: Sequence[int] = (),
    width: int = 120,
) -> None:
    """Print a table to the terminal, or so wide where there is none.

    Args:
        rows: text; the names of the columns are the headings.
        left: columns that are aligned to the left.
        bold: rows to stress.
        sections: rows after which a line is drawn.
    """
    table = Table(title=escape(title), title_justify="left")
    for number, heading in enumerate(rows.columns):
        justify, overflow = ("left", "fold") if number in left else ("right", "ellipsis")
        table.add_column(escape(heading), justify=justify, overflow=overflow)
    for number, row in enumerate(rows.itertuples(index=False)):
        style = "bold" if number in bold else ""
        table.add_row(*map(escape, row), style=style, end_section=number in sections)
    console = Console(width=None if sys.stdout.isatty() else width)
    console.print(table, highlight=False)


class Forecast:
    """How long the steps of a run still take: as planned, at the pace of those that are over.

    Attributes:
        rest: seconds that were planned for each step that is not over.
    """

    def __init__(self, planned: Mapping[str, float]) -> None:
        self.rest = dict(planned)
        self._planned, self._taken = 0.0, 0.0

    def over(self, step: str, seconds: float | None) -> None:
        """A step took so long; None where that says nothing of the others."""
        planned = self.rest.pop(step)
        if seconds is not None:
            self._planned, self._taken = self._planned + planned, self._taken + seconds

    @property
    def left(self) -> float:
        """Seconds of the steps that are not over."""
        pace = self._taken / self._planned if self._planned else 1.0
        return pace * sum(self.rest.values())


@contextmanager
def bar(
    console: Console, title: str, total: float, done: float = 0.0
) -> Iterator[Callable[[float, str], None]]:
    """Show how much of ``total`` is done, of which ``done`` was before.

    Yields:
        a function that takes how much is done, and what is being done in words.
    """
    if not console.is_terminal:
        console.print(f"{title} ...", markup=False, highlight=False, soft_wrap=True)
    columns = (
        TextColumn("{task.fields[title]}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task("", total=total, completed=done, title=title)
        yield lambda now, what: shown.update(task, completed=now, description=what)
