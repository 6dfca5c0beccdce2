"""Calls of the CPU engine in flight: memory, lanes as threads, and their failures.

A call raises the error of the lane that fails first. The other lanes stop at their next operation
or wait slice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from ficco.compute.program import Call, Op, Slot, Symmetric
from ficco.dma.engine import Engine
from ficco.dma.host import SEMAPHORE_STRIDE, Meeting
from ficco.dma.patience import Patience
from ficco.plan import Signal

#: Seconds after which a waiting lane checks for failures of other lanes, the timeout and
#: :attr:`Engine.interrupt`.
SLICE_S = 0.02
#: Seconds that closing the engine waits for a lane.
JOIN_S = 1.0


class CpuMemory(Symmetric):
    """Host memory of all ranks of a host. ``parts`` are the ranks' uint8 tensors and ``pids`` their
    process ids, by rank of the group."""

    def __init__(self, engine: Engine, nbytes: int, serial: int) -> None:
        self.serial, self.nbytes = serial, nbytes
        self.host = Meeting(engine, f"allocation {serial}", max(nbytes, 1))
        parts = [
            torch.frombuffer(part, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
            for part in self.host.maps
        ]
        addresses = [self.host.address(place) for place in range(len(parts))]
        # Ranks of other hosts have empty parts.
        self.parts = engine.hosts.spread(parts, torch.empty(0, dtype=torch.uint8, device="cpu"))
        self.addresses = engine.hosts.spread(addresses, 0)
        self.pids = engine.hosts.spread(self.host.pids, 0)
        self.tensor = self.parts[engine.rank]

    def part(self, rank: int) -> torch.Tensor:
        part: torch.Tensor = self.parts[rank]
        return part

    def free(self) -> None:
        """Drop the memory. Tensors of it and calls in flight keep it mapped."""
        self.parts, self.addresses = [], []
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.host.close()


class Stopped(Exception):
    """Stops a lane: another lane of the call has failed."""


class CallState:
    """State shared by the lanes of a call in flight."""

    def __init__(
        self,
        lanes: int,
        recorded: Sequence[int],
        timeout_s: float,
        slot: Slot | None,
        moves: Sequence[int] = (),
    ) -> None:
        # Keep the parts of the slot mapped, since a stuck lane may outlive the slot. After the
        # words come marks, one byte per lane, see CpuEngine._late.
        self.parts: list[torch.Tensor] = []
        if slot is not None:
            assert isinstance(slot.memory, CpuMemory)
            self.parts, self.pids = slot.memory.parts, slot.memory.pids
            marks = slot.words * SEMAPHORE_STRIDE
            self.marks = [part[marks : marks + SEMAPHORE_STRIDE] for part in self.parts]
        self.timeout_s = timeout_s
        self.patience: Patience | None = None  # set by the first wait longer than a slice
        self.recorded = {step: threading.Event() for step in recorded}
        #: By network step: set once it has sent, set once it is complete, and its receives.
        self.sent = {step: threading.Event() for step in moves}
        self.moved = {step: threading.Event() for step in moves}
        self.coming: dict[int, Any] = {}
        self.stamps: list[tuple[int, bool, float]] = []
        #: The gates of the caller's step, if the call has one: as words, and as events for waits.
        self.words: torch.Tensor | None = None
        self.arrived: list[threading.Event] = []
        #: By lane: step, signal, its address and the start of a wait longer than a slice.
        self.blocked: dict[str, tuple[int, Signal, int, float]] = {}
        self.began = time.perf_counter()
        self.failed = threading.Event()
        self.error: BaseException | None = None
        self._lanes = lanes
        self._lock = threading.Lock()
        self.done = threading.Event()

    def run_lane(self, ops: Sequence[Op], call: Call) -> None:
        """Run one lane, or the rest of it."""
        try:
            self.run(ops, call)
        finally:
            with self._lock:
                self._lanes -= 1
                if not self._lanes:
                    self.done.set()

    def run(self, ops: Sequence[Op], call: Call) -> None:
        """Run some operations of a lane."""
        try:
            # Grad and inference mode are per thread, so that each lane sets its own; only in
            # inference mode may it write to inference tensors and to those that require grad.
            with torch.inference_mode():
                for op in ops:
                    if self.failed.is_set():
                        break
                    op(call)
        except Stopped:
            pass
        except BaseException as error:  # also KeyboardInterrupt: the other lanes have to stop
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Keep the first error and stop all lanes."""
        with self._lock:
            self.error = self.error or error
        self.failed.set()

    def check(self) -> None:
        if self.failed.is_set():
            raise Stopped

    def arrives(self, gate: int) -> None:
        """Open a gate of the caller's step: its rows have arrived."""
        assert self.words is not None
        self.words[gate] = 1
        self.arrived[gate].set()


class Lane:
    """A thread that runs the operations of one lane, call after call."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], int] | None] = SimpleQueue()
        # A daemon, so that a stuck lane does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"ficco {name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job in this lane, with PyTorch's thread limit of the calling thread."""
        self._jobs.put((job, torch.get_num_threads()))

    def _work(self) -> None:
        while (submitted := self._jobs.get()) is not None:
            job, threads = submitted
            # OpenMP and MKL have a limit per thread. PyTorch sets the limit of a new thread when
            # the limit is read, but not before a product: MKL would then start its default number
            # of threads, which spin between products.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            job()
            del job, submitted  # both reference the operands of the call

    def close(self, join: bool) -> None:
        self._jobs.put(None)
        if join and threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)
