"""The space of schedules and the Plans it leads to.

docs/schedules.md draws the named ones; ``ficco plan`` draws any, such as ``growing:tail=2``.
"""

from ficco.schedules.build import own_candidates, plan, plans, refusal, register, same_plans
from ficco.schedules.gather import StagingTooSmall
from ficco.schedules.groups import GRANULE
from ficco.schedules.space import KNOBS, NAMED, Schedule

__all__ = [
    "GRANULE",
    "KNOBS",
    "NAMED",
    "Schedule",
    "StagingTooSmall",
    "own_candidates",
    "plan",
    "plans",
    "refusal",
    "register",
    "same_plans",
]
