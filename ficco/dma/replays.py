"""Recordings of calls, replayed for operands at the same addresses to save host time."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections import deque
from typing import Any

import torch

from ficco.compute.buffers import operands_key
from ficco.compute.program import Call
from ficco.dma.driver import Driver, Lanes, Recording
from ficco.dma.gate import GATE
from ficco.dma.lane_ops import Run, enqueue
from ficco.errors import BackendError

#: Recordings to keep, over all programs. A recording takes about 0.2 MB of the device's memory
#: (H200, 2 ranks, growing).
MAX_RECORDED = 512

#: Getters of the settings that affect which kernels PyTorch picks for the same operands.
_SETTINGS = [
    getter
    for name in (
        "_get_cublas_allow_fp16_accumulation",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_blas_preferred_backend",
        "_get_deterministic_algorithms",
        "_get_sm_carveout_experimental",
    )
    if (getter := getattr(torch._C, name, None)) is not None
]
# In newer releases the old getter raises once the new API has been used.
if hasattr(torch._C, "_get_fp32_precision_getter"):
    _SETTINGS.append(lambda: torch._C._get_fp32_precision_getter("cuda", "matmul"))
else:
    _SETTINGS.append(torch._C._get_cublas_allow_tf32)


class _Recorder:
    """A stream, its lanes and a memory pool to record the calls of one caller's stream. Recordings
    share them, since their replays follow each other on that stream."""

    def __init__(self, driver: Driver) -> None:
        self.stream, self.pool = driver.stream_for("recorded compute0"), torch.cuda.MemPool()
        self.lanes = Lanes(driver, self.stream.handle, {}, "recorded")


class Replays:
    """The recordings of one engine."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._recorders: dict[int, _Recorder] = {}
        self._recorded: deque[tuple[weakref.ref[Run], Any]] = deque()  # the oldest first
        # A graph need not launch its nodes in the order of recording: with a single hardware queue
        # a wait could be queued before the operation that it waits for.
        self.possible = driver.records and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"

    def __len__(self) -> int:
        return len(self._recorded)

    def find(self, run: Run, call: Call, raw: int) -> Recording | None:
        """The recording of a body for the addresses of a call's operands; None at their first use.
        ``raw`` is the caller's stream."""
        key = (raw, *operands_key(call), *[setting() for setting in _SETTINGS])
        recording = run.recorded.get(key)
        if recording is not None:
            return recording
        if key not in run.seen:
            if len(run.seen) >= MAX_RECORDED:
                run.seen.clear()
            run.seen.add(key)
            return None
        with GATE.recording() as allowed:
            recording = self._record(run, call, raw) if allowed else None
        if recording is not None:
            self._evict()
            self._recorded.append((weakref.ref(run), key))
            run.recorded[key] = recording
        return recording

    def close(self) -> None:
        self._recorders.clear()
        self._recorded.clear()

    def _evict(self) -> None:
        """Drop entries of freed programs, then the oldest recordings, once the limit is reached."""
        if len(self._recorded) < MAX_RECORDED:
            return
        self._recorded = deque(entry for entry in self._recorded if entry[0]() is not None)
        while len(self._recorded) >= MAX_RECORDED:
            reference, key = self._recorded.popleft()
            if (run := reference()) is not None:
                del run.recorded[key]
                run.seen.discard(key)

    def _record(self, run: Run, call: Call, raw: int) -> Recording | None:
        """Record the body of a call. If that fails, returns None and disables recordings."""
        lanes = call.state
        collecting = gc.isenabled()
        gc.disable()  # it may free objects that must not be freed during a capture
        try:
            recorder = self._recorders.get(raw)
            if recorder is None:  # fails with allocators of PyTorch that have no pools
                recorder = self._recorders[raw] = _Recorder(self._driver)
            call.state = recorder.lanes
            with torch.cuda.stream(recorder.stream.torch), torch.cuda.use_mem_pool(recorder.pool):
                return self._driver.record(recorder.stream.handle, lambda: enqueue(run, call))
        except (RuntimeError, BackendError) as error:
            warnings.warn(
                f"ficco enqueues calls step by step, since a recording failed: {error}",
                stacklevel=2,
            )
            self.possible = False
            return None
        finally:
            call.state = lanes
            if collecting:
                gc.enable()
