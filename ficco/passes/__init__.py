"""Compile passes: ficco's operators in place of a graph's collectives and products."""

from ficco.passes.compiling import backend, inductor_pass
from ficco.passes.report import Entry, Report
from ficco.passes.rewrite import replace

__all__ = ["Entry", "Report", "backend", "inductor_pass", "replace"]
