"""What a tuning run says: on rank 0, the steps to stderr and the figures to stdout."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ficco.bench.progress import bar
from ficco.machine import Fingerprint, Machine, tuned_key
from ficco.tune.names import STEPS
from ficco.tune.shown import changes
from ficco.tune.site import Tick


class Reporter:
    """Says what a run does, and about how long it still takes.

    ``seconds``: about how long a step takes, by its name.
    """

    def __init__(self, rank: int, seconds: Callable[[str], float]) -> None:
        from rich.console import Console

        self._seconds = seconds
        self._console = Console(stderr=True, quiet=rank != 0)
        self._out = Console(quiet=rank != 0)
        self._taken = self._estimated = 0.0  # seconds of the steps so far

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @property
    def _pace(self) -> float:
        """How much longer than estimated the steps took so far."""
        return self._taken / self._estimated if self._taken else 1.0

    def _left(self, names: Sequence[str]) -> float:
        return self._pace * sum(self._seconds(name) for name in names)

    def plan(
        self, here: Fingerprint, steps: Sequence[str], earlier: Collection[str], path: Path
    ) -> None:
        """What is to be done, and what an earlier run has done."""
        if earlier:
            done = ", ".join(name for name in steps if name in earlier)
            self.say(f"goes on with a run that was interrupted; done: {done}")
        todo = [name for name in steps if name not in earlier]
        self.say(
            f"{here.accelerator}, {here.ranks} ranks: {len(todo)} steps, about "
            f"{self._left(todo):.0f} s; every one is saved to {path}"
        )

    def failed(self, number: int, todo: Sequence[str], taken: float, why: str) -> None:
        self.say(f"[{number + 1}/{len(todo)}] {todo[number]}: failed after {taken:.1f} s: {why}")

    def done(self, number: int, todo: Sequence[str], taken: float) -> None:
        self._taken += taken
        self._estimated += self._seconds(todo[number])
        left = self._left(todo[number + 1 :])
        rest = f"about {left:.0f} s left" if todo[number + 1 :] else "done"
        self.say(f"[{number + 1}/{len(todo)}] {todo[number]}: {taken:.1f} s; {rest}")

    def change(self, name: str, before: Machine, after: Machine) -> None:
        """The figures of a step, old against new."""

        def say(text: str) -> None:
            self._out.print(text, markup=False, highlight=False, soft_wrap=True)

        if name in STEPS:
            for figure, old, new in changes(before, after, name):
                say(f"  {name}.{figure}: {old} -> {new}")
            return
        entry = after.tuned[-1]
        old_entry = next((t for t in before.tuned if tuned_key(t) == tuned_key(entry)), None)
        for i, mode in enumerate(("queued", "idle")):
            old = "-" if old_entry is None else f"{getattr(old_entry, mode)}"
            gain = entry.serial[i] / entry.seconds[i]
            say(
                f"  {name}, {mode}: {old} -> {getattr(entry, mode)}, "
                f"{entry.seconds[i] * 1e3:.3f} ms, {gain:.2f} times as fast as serial"
            )

    @contextmanager
    def progress(self, number: int, todo: Sequence[str]) -> Iterator[Tick]:
        """A bar over the whole run."""
        title = f"[{number + 1}/{len(todo)}] {todo[number]}"
        behind = sum(self._seconds(name) for name in todo[:number])
        whole = sum(self._seconds(name) for name in todo)
        own, began = self._seconds(todo[number]), time.monotonic()
        with bar(self._console, title, whole, behind) as show:

            def tick(what: str) -> None:
                spent = min(time.monotonic() - began, own)
                left = self._pace * (whole - behind - spent)
                show(behind + spent, f"{what}; about {left:.0f} s left")

            yield tick
