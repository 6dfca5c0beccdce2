"""Profiler ranges of calls and steps, for torch.profiler, NVTX and, on AMD, roctx."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.autograd import _profiler_enabled

from ficco.accelerator import gpu

#: With the value ``steps`` each step of a call is a range, too. The range spans the time in which
#: the host enqueues the step or, on CPUs, runs it.
VARIABLE = "FICCO_RANGES"
STEPS = os.environ.get(VARIABLE) == "steps"
#: Tools that record NVTX set NVTX_INJECTION64_PATH before a process starts.
TOOLED = STEPS or "NVTX_INJECTION64_PATH" in os.environ

Given = TypeVar("Given")


def _always() -> bool:
    return True


#: Whether a profiler records ranges. This check costs a call 0.05 us, a range costs 12 us (x86-64,
#: PyTorch 2.13, 2026-11-24).
active: Callable[[], bool] = _always if TOOLED else _profiler_enabled


@contextmanager
def marked(text: str) -> Iterator[None]:
    """Mark a block as a range with this name."""
    tooled = TOOLED and gpu.is_available()
    if tooled:
        gpu.nvtx.range_push(text)
    try:
        with torch.profiler.record_function(text):
            yield
    finally:
        if tooled:
            gpu.nvtx.range_pop()


def as_range(text: str, do: Callable[[Given], None]) -> Callable[[Given], None]:
    """Wrap a function of one argument in a range, while a profiler records ranges."""

    def run(argument: Given) -> None:
        if active():
            with marked(text):
                do(argument)
        else:
            do(argument)

    return run
