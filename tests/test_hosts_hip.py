"""The HIP engine over several hosts with gloo, on the double of HIP's library."""

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
    """All lanes share one hardware queue, so a lane that waits for another host blocks the others.
    Streams wait for the CPU's sends on words in uncached memory."""
    settings = {"JITTER_US": 100, "WAIT_ANY": 1, "HW_QUEUES": 1}
    options: Any = {"env": {"FICCO_HIP": "signals=uncached"}, "settings": settings}
    run(4, _exact, series="10", **options)
