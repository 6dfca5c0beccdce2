"""A third vendor, whose streams are threads and whose memory is the host's. Besides this module the
GPU engine needs only a row in ``ficco.dma``."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch
from host_gpu import HostEngine, HostTensors

from ficco.compute.attention import merge
from ficco.dma import ENGINES
from ficco.dma.driver import WAIT_32, WRITE_32, WRITE_64, Driver, Mechanisms, MemOp
from ficco.dma.gpu import GpuEngine
from ficco.hip_kernels.launch import Kernels, Script, Signals

HANDLE_BYTES = 64
#: Seconds between two looks at a word.
PAUSE_S = 2e-5


class Stream:
    """A thread that runs enqueued operations in order."""

    numbers = count(1)

    def __init__(self) -> None:
        self.raw = next(self.numbers)
        self.enqueued = self.done = 0
        self._queue: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name=f"stream {self.raw}", daemon=True).start()

    def put(self, work: Callable[[], Any]) -> None:
        self.enqueued += 1
        self._queue.put(work)

    def end(self) -> None:
        self._queue.put(None)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            self.done += 1


class Event:
    """An event, over once its stream has reached the latest record."""

    def __init__(self) -> None:
        self._passed: threading.Event | None = None
        self.time = 0.0

    def record(self, stream: Stream) -> None:
        passed = self._passed = threading.Event()

        def passes() -> None:
            self.time = time.perf_counter()
            passed.set()

        stream.put(passes)

    def hold(self, stream: Stream) -> None:
        if self._passed is not None:
            stream.put(self._passed.wait)

    def over(self) -> bool:
        return self._passed is None or self._passed.is_set()

    def seconds_to(self, later: Event) -> float:
        return later.time - self.time


class Batch:
    """Waits and writes, one after the other."""

    def __init__(self, ops: Sequence[MemOp]) -> None:
        self.ops = tuple(ops)

    def enqueue(self, stream: Stream) -> None:
        stream.put(self.carry_out)

    def carry_out(self) -> None:
        for kind, address, value in self.ops:
            word = (ctypes.c_uint64 if kind == WRITE_64 else ctypes.c_uint32).from_address(address)
            if kind != WAIT_32:
                word.value = value
            while kind == WAIT_32 and word.value != value:
                time.sleep(PAUSE_S)


class ThreadDriver(HostTensors, Driver):
    """See the module's docstring."""

    name = "threads"
    watches_by_events = True
    fuses = True
    waits_to_close = True
    has_kernels = True

    def __init__(self, device: torch.device, index: int) -> None:
        super().__init__(device, index)
        self._streams: dict[int, Stream] = {}
        self._hosts: list[Any] = []
        self._files: dict[int, tuple[int, int]] = {}  # by address: descriptor and bytes
        self._maps: dict[int, tuple[mmap.mmap, Any]] = {}

    # The device: this process.

    def use(self) -> None:
        pass

    def uncaptured(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def means(self, engine: GpuEngine) -> Mechanisms:
        return Mechanisms(
            memory="ipc",
            post="write of a thread",
            wait="by a thread that looks again and again",
            copy="memmove",
        )

    def copy_engines(self) -> None:
        return None

    # Streams and events.

    def make_stream(self, priority: int) -> int:
        stream = Stream()
        self._streams[stream.raw] = stream
        return stream.raw

    def stream(self, raw: int) -> Stream:
        return self._streams[raw]

    def raw(self, stream: Stream) -> int:
        return stream.raw

    def idle(self, stream: Stream) -> bool:
        return stream.done == stream.enqueued

    def destroy_stream(self, stream: Stream) -> None:
        stream.end()

    def event(self, timing: bool = False) -> Event:
        return Event()

    def capture_id(self, stream: Stream) -> int:
        return 0

    def host_call(self, stream: Stream, function: Callable[[], None], keep: bool) -> None:
        stream.put(function)

    # Words and copies.

    def batch(self, ops: Sequence[MemOp]) -> Batch:
        return Batch(ops)

    def writes_reach(self, stream: Stream, address: int) -> bool:
        return True

    def copy(
        self, dst: int, nbytes: int, ranks: tuple[int, int] | None = None
    ) -> Callable[[int, Any], None]:
        return lambda src, stream: stream.put(partial(ctypes.memmove, dst, src, nbytes))

    def rectangle(
        self, dst: int, dst_pitch: int, width: int, height: int
    ) -> Callable[[int, int, Any], None]:
        def rows(src: int, pitch: int) -> None:
            for row in range(height):
                ctypes.memmove(dst + row * dst_pitch, src + row * pitch, width)

        return lambda src, pitch, stream: stream.put(partial(rows, src, pitch))

    def copy_to_host(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        stream.put(partial(ctypes.memmove, dst, src, nbytes))

    # Memory: files without a name, which peers open.

    def host(self, nbytes: int) -> int:
        self._hosts.append((ctypes.c_char * nbytes)())
        return ctypes.addressof(self._hosts[-1])

    handles = property(lambda self: self)

    def malloc(self, nbytes: int, kind: str) -> int:
        file = os.memfd_create("threads")
        os.ftruncate(file, nbytes)
        address = self._map(file, nbytes)
        self._files[address] = file, nbytes
        return address

    def _map(self, file: int, nbytes: int) -> int:
        mapped = mmap.mmap(file, nbytes)
        keeper = ctypes.c_char.from_buffer(mapped)
        address = ctypes.addressof(keeper)
        self._maps[address] = mapped, keeper
        return address

    def free(self, address: int) -> None:
        self.close_shared(address)
        os.close(self._files.pop(address)[0])

    def fill(self, address: int, nbytes: int, stream: Stream) -> None:
        stream.put(partial(ctypes.memset, address, 0, nbytes))

    def share(self, address: int) -> bytes:
        file, nbytes = self._files[address]
        return f"{os.getpid()} {file} {nbytes}".encode().ljust(HANDLE_BYTES)

    def open_shared(self, handle: bytes) -> int:
        pid, file, nbytes = map(int, handle.split())
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        try:
            return self._map(opened, nbytes)
        finally:
            os.close(opened)

    def close_shared(self, address: int) -> None:
        del self._maps[address]

    def kernels(self) -> Kernels:
        return ThreadKernels()  # type: ignore[return-value]


class ThreadKernels:
    """ficco's kernels, each an operation of a stream, with the signals before and after it."""

    most_that_spin = 64

    def copies(
        self,
        ends: tuple[tuple[int, int], ...],
        shape: tuple[int, int, int, int],
        stream: Stream,
        signals: Signals | None = None,
    ) -> None:
        dst_pitch, src_pitch, width, height = shape

        def rows() -> None:
            for dst, src in ends:
                for row in range(height):
                    ctypes.memmove(dst + row * dst_pitch, src + row * src_pitch, width)

        self._launch(rows, signals or Signals(0), stream)

    def reduce(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor], stream: Stream, factor: float = 1.0
    ) -> None:
        self.one_shot(out, parts, Signals(0), stream, factor)

    def one_shot(
        self,
        out: torch.Tensor,
        parts: Sequence[torch.Tensor],
        signals: Signals,
        stream: Stream,
        factor: float = 1.0,
    ) -> None:
        def total() -> None:
            wide = torch.float64 if out.dtype == torch.float64 else torch.float32
            with torch.inference_mode():
                out.copy_(torch.stack([part.to(wide) for part in parts]).sum(0) * factor)

        self._launch(total, signals, stream)

    def two_shot(
        self,
        out: torch.Tensor,
        parts: Sequence[torch.Tensor],
        sends: Sequence[tuple[int, int]],
        keeps: Sequence[tuple[int, int, torch.Tensor]],
        blocks: int,
        signals: Signals,
        stream: Stream,
    ) -> None:
        assert all(rows.is_contiguous() for rows in (out, *(rows for _, _, rows in keeps)))
        self.one_shot(out, parts, replace(signals, rear=Script()), stream)
        posts = [MemOp(WRITE_32, word + 4 * i, 1) for _, word in sends for i in range(blocks)]
        waits = [MemOp(WAIT_32, word + 4 * i, 1) for _, word, _ in keeps for i in range(blocks)]
        clears = [MemOp(WRITE_32, op.address, 0) for op in waits]

        def send() -> None:
            for at, _ in sends:
                ctypes.memmove(at, out.data_ptr(), out.nbytes)

        def keep() -> None:
            for at, _, rows in keeps:
                ctypes.memmove(rows.data_ptr(), at, rows.nbytes)

        for work in (send, Batch([*posts, *waits, *clears]).carry_out, keep):
            stream.put(work)
        self.script(signals.rear, stream)

    def script(self, script: Script, stream: Stream) -> None:
        stream.put(partial(_follow, script))

    def _launch(self, work: Callable[[], None], signals: Signals, stream: Stream) -> None:
        stream.put(lambda: (_follow(signals.front), work(), _follow(signals.rear)))


def _follow(script: Script) -> None:
    for step in script.steps:
        kind = WAIT_32 if step.waits else WRITE_64 if step.wide else WRITE_32
        Batch([MemOp(kind, step.address, step.value)]).carry_out()


class ThreadEngine(HostEngine):
    """The GPU engine on threads."""

    _sums_by_kernel, merge = True, staticmethod(merge)


def engine(group: Any, device: torch.device, *options: Any) -> HostEngine:
    """The engine of a group's ranks on threads."""
    return ThreadEngine(group, ThreadDriver(device, group.rank()), *options)


def serve() -> None:
    """Add this vendor's row."""
    ENGINES["threads"] = __name__, "engine"
