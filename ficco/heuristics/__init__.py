"""Choice of the schedule of a problem."""

from ficco.heuristics.candidates import candidates
from ficco.heuristics.decide import Candidate, Decision, Where, decide, where
from ficco.heuristics.families import Observation, fit_thresholds, rule
from ficco.heuristics.model import Losses, losses
from ficco.problems.sizes import problem_of_sizes

__all__ = [
    "Candidate",
    "Decision",
    "Losses",
    "Observation",
    "Where",
    "candidates",
    "decide",
    "fit_thresholds",
    "losses",
    "problem_of_sizes",
    "rule",
    "where",
]
