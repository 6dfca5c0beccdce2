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
    """Pairs of steps: the first must end before the second starts, in every interleaving."""

    first: Ints
    second: Ints
    who: Who
    why: str  # text of the error


def demand(holds: Bools, who: Who, why: str) -> None:
    """Raise PlanError about the first element of ``holds`` that is False."""
    if not holds.all():
        raise PlanError(f"{who(int(holds.argmin()))} {why}")
