"""Compile passes that replace a graph's collectives and products by ficco's operators."""

from ficco.passes.compiling import backend, inductor_pass
from ficco.passes.rewrite import Entry, Report, replace

#: ``torch.compile(model, backend="ficco")``: :func:`backend` for all groups, by an entry point of
#: the installed package. ``torch_compile.report`` accumulates all that a process compiles with it.
torch_compile = backend()

__all__ = ["Entry", "Report", "backend", "inductor_pass", "replace", "torch_compile"]
