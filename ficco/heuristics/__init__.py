"""Which schedule serves a problem."""

from ficco.heuristics.decide import Decision, decide

__all__ = ["Decision", "decide"]
