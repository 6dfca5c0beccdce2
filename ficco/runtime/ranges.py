"""Calls, and steps, as ranges in a profiler: torch.profiler's, and NVTX or, on AMD, roctx."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.autograd import _profiler_enabled

from ficco.accelerator import gpu

#: ``steps``: a range for each step of a call, too, as its host enqueues it or, on CPUs, runs it.
VARIABLE = "FICCO_RANGES"
STEPS = os.environ.get(VARIABLE) == "steps"
#: Tools that record NVTX name their library in a variable before a process starts.
TOOLED = STEPS or "NVTX_INJECTION64_PATH" in os.environ

Given = TypeVar("Given")


def _always() -> bool:
    return True


#: Whether anybody would see a range. A call that asks this takes 0.05 us (x86-64, PyTorch 2.13,
#: 2026-11-24); one with a range 12.
active: Callable[[], bool] = _always if TOOLED else _profiler_enabled


@contextmanager
def marked(text: str) -> Iterator[None]:
    """A range of this name."""
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
    """A function of one argument that is a range where anybody would see it."""

    def run(given: Given) -> None:
        if active():
            with marked(text):
                do(given)
        else:
            do(given)

    return run
