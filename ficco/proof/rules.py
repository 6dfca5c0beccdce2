"""Rules that hold at once, and claims about the order of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ficco.proof.columns import Bools, Ints

#: Names the subject of a rule by its index.
Who = Callable[[int], str]


class PlanError(AssertionError):
    """A Plan breaks a rule. That is a bug of ficco, never an error of its caller."""


class Claim(NamedTuple):
    """Pairs of steps of which the first ends before the second starts, in every interleaving."""

    first: Ints
    second: Ints
    who: Who
    why: str  # the error if that is not so


def demand(holds: Bools, who: Who, why: str) -> None:
    """A rule: all of these hold; else an error about the first that does not."""
    if not holds.all():
        raise PlanError(f"{who(int(holds.argmin()))} {why}")
