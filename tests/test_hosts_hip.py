"""The HIP engine over several hosts, gloo between them, on the double of HIP's library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import test_hosts
from hip_ranks import clean, run
from ranks import Rank
from test_hosts import cases_of

from ficco.problems.products import OPERATORS

#: Ways of signals, and so of the word that a stream waits for while the host sends.
WAYS = ("signal", "uncached", "kernel")


def _exact(at: Rank, cases: Sequence[Any]) -> tuple[int, int]:
    with clean():
        return test_hosts._exact(at, 2, cases, ())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_calls_over_hosts(way: str) -> None:
    cases = [case for operator in OPERATORS for case in cases_of(operator, 2, 2)]
    cases = cases[WAYS.index(way) :: 2 * len(WAYS)]
    settings = {"JITTER_US": 100, "WAIT_ANY": int(way == "uncached")}
    where: Any = {"env": {"FICCO_HIP": f"signals={way}"}, "settings": settings}
    assert run(4, _exact, cases, series="10", **where) == [(len(cases), 0)] * 4


def test_streams_share_one_hardware_queue() -> None:
    """A lane that waits for another host holds up all that comes behind it."""
    cases = [case for operator in list(OPERATORS)[:5:4] for case in cases_of(operator, 2, 2)][::5]
    where: Any = {"settings": {"HW_QUEUES": 1, "JITTER_US": 50}, "timeout": 120}
    assert run(4, _exact, cases, **where) == [(len(cases), 0)] * 4
