"""Compile passes that replace a graph's collectives and products by ficco's operators."""

from ficco.passes.compiling import backend, inductor_pass
from ficco.passes.report import Entry, Report
from ficco.passes.rewrite import replace

__all__ = ["Entry", "Report", "backend", "inductor_pass", "replace"]
