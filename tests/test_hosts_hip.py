"""The HIP engine over several hosts, gloo between them, on the double of HIP's library."""

from __future__ import annotations

from typing import Any

import pytest
from hip_ranks import clean, run
from ranks import Rank
from test_hosts import SCHEDULES, exact, host_of, problem_of

from ficco.problems.products import OPERATORS
from ficco.schedules import Schedule, refusal


def _exact(at: Rank) -> None:
    with clean(), host_of(at, 2):
        for turn, operator in enumerate(OPERATORS):
            problem, schedule = problem_of(operator, 2, 2, "uneven"), SCHEDULES[turn]
            if not refusal(problem, Schedule.parse(schedule)):
                exact(at, operator, turn, schedule)


@pytest.mark.slow
def test_calls_over_hosts() -> None:
    """On one queue of the hardware a lane that waits for another host holds up all that comes after
    it. The word that a stream waits for while the host sends is in uncached memory."""
    settings = {"JITTER_US": 100, "WAIT_ANY": 1, "HW_QUEUES": 1}
    where: Any = {"env": {"FICCO_HIP": "signals=uncached"}, "settings": settings}
    run(4, _exact, series="10", **where)
