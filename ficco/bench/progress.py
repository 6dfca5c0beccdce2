"""A bar over something that takes long; a line where there is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def bar(
    console: Console, title: str, total: float, done: float = 0.0
) -> Iterator[Callable[[float, str], None]]:
    """Show how much of ``total`` is done, of which ``done`` was before.

    Yields:
        a function that takes how much is done, and what is being done in words.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if not console.is_terminal:
        console.print(f"{title} ...", markup=False, highlight=False, soft_wrap=True)
    columns = (
        TextColumn("{task.fields[title]}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task("", total=total, completed=done, title=title)
        yield lambda now, what: shown.update(task, completed=now, description=what)
