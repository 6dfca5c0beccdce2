"""The space of schedules and the Plans it leads to."""

from ficco.schedules.gather import plan, plans
from ficco.schedules.space import KNOBS, NAMED, Schedule

__all__ = ["KNOBS", "NAMED", "Schedule", "plan", "plans"]
