"""Which schedule serves a problem."""

from ficco.heuristics.candidates import candidates
from ficco.heuristics.decide import Candidate, Decision, decide
from ficco.heuristics.losses import Losses, losses
from ficco.heuristics.rule import Observation, fit_thresholds, literal, rule
from ficco.heuristics.saved import Saved, warn_once
from ficco.heuristics.search import search

__all__ = [
    "Candidate",
    "Decision",
    "Losses",
    "Observation",
    "Saved",
    "candidates",
    "decide",
    "fit_thresholds",
    "literal",
    "losses",
    "rule",
    "search",
    "warn_once",
]
