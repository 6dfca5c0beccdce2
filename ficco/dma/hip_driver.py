"""AMD GPUs: the driver of the GPU engine for HIP, through hip-python.

Copies are the runtime's. ``ficco.dma.WAYS`` lists the alternatives for the memory of signal words,
waits, copies and so on. The ranks determine together which of them the machine supports.

``hipStreamBatchMemOp``, which both series of the binding have, would enqueue several words by one
call. It is not used: its documentation promises no order among its operations, and until July 2026
AMD's runtime executed them concurrently (ROCm/rocm-systems #8911 says so).

Written without an AMD card. ``docs/amd.md`` lists the tests and the machines they ran on.
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ficco.compute.scaled import cuda_release, lacking_on_cuda, lacking_on_hip
from ficco.compute.tiled.portable import TritonKernel, lacking
from ficco.compute.tiled.products import TiledProducts
from ficco.dma import WAYS, selected, variable
from ficco.dma import hip_api as hip
from ficco.dma.driver import WAIT_32, WORD, Copies, Driver, Mechanisms, MemOp, StreamEngine
from ficco.dma.gpu import GpuEngine
from ficco.dma.host import Hosts, Meeting
from ficco.dma.memories import Shared, free_unshared
from ficco.errors import ConfigError, carry_out
from ficco.hip_kernels.build import Target, can_compile
from ficco.hip_kernels.launch import Kernels, Numbers, Packed
from ficco.machine import find, nearest
from ficco.problems.products import Problem

#: Requirements of each signal mechanism.
_NEEDS = {
    "signal": "stream waits (hipDeviceAttributeCanUseStreamWaitValue) on signal memory that "
    "processes can share",
    "uncached": "stream waits on memory that is no signal, which AMD's runtime has unless "
    "GPU_STREAMOPS_CP_WAIT=1 is set",
    "kernel": "a compiler for ficco's kernels, ROCm's clang or hiprtc",
}


class HipBinding:
    """See :class:`ficco.hip_kernels.launch.Binding`."""

    def __init__(self, target: Target, index: int) -> None:
        self.target = target
        self.processors = hip.attribute("MultiprocessorCount", index)
        # In kHz; 100 MHz on every CDNA card.
        self.ticks_per_s = 1e3 * (hip.attribute("WallClockRate", index) or 100_000)
        self._modules: list[Any] = []

    def load(self, image: bytes, names: Sequence[str], shared: int = 0) -> Mapping[str, Any]:
        module = hip.load_module(image)
        self._modules.append(module)
        return {name: hip.kernel(module, name.encode()) for name in names}

    def launch(
        self,
        kernel: Any,
        blocks: int,
        threads: int,
        arguments: Packed,
        stream: Any,
        shared: int = 0,
    ) -> None:
        hip.launch(kernel, blocks, 1, 1, threads, 1, 1, shared, stream, arguments.address, None)

    def close(self) -> None:
        """Unload the code, which no stream may still use. The runtime does not wait for it."""
        while self._modules:
            hip.unload_module(self._modules.pop())


class Batch:
    """See :class:`ficco.dma.driver.Batch`; one call of the runtime for each word."""

    def __init__(self, ops: Sequence[MemOp]) -> None:
        self.ops = tuple(ops)
        self._calls = [
            (hip.wait_equal if op.kind == WAIT_32 else hip.write_32, address, value)
            for op in self.ops
            for address, value in op.words
        ]

    def enqueue(self, stream: Any) -> None:
        for call, address, value in self._calls:
            call(stream, address, value)


class HipDriver(Driver):
    """See the module's docstring."""

    name = "hip"
    word_bytes = hip.SIGNAL_BYTES
    waits_to_close = True
    handles = hip
    batch = staticmethod(Batch)
    capture_id = staticmethod(hip.capture_id)
    copy_to_host = staticmethod(hip.copy_to_host)
    forgive = staticmethod(hip.forgive)
    idle = staticmethod(hip.idle)
    stream = staticmethod(hip.stream)
    uncaptured = staticmethod(hip.uncaptured)
    writes_reach = staticmethod(hip.writes_reach)

    def __init__(self, device: torch.device, index: int) -> None:
        super().__init__(device, index)
        self._selected = selected(self.name)
        self._copy = self._selected.get("copy", "dtod")
        self._largest = 0  # bytes of a copy; 0: no limit
        self._indices: list[int] = []  # device index in this process of each rank's device
        self._locals: list[int] = []
        self._hosts: list[int] = []
        self._events: weakref.WeakSet[hip.Event] = weakref.WeakSet()
        self._binding: HipBinding | None = None

    def target(self) -> Target:
        """The compilation target of kernels."""
        return target_of(self.device)

    @property
    def usual_events(self) -> str:
        """The default of the option ``events`` of ``FICCO_HIP``."""
        return "plain" if torch.version.hip else "write"

    # Capabilities of the machine, which the ranks determine together.

    def means(self, engine: StreamEngine) -> Mechanisms:
        side, here = engine.side.handle, engine.fingerprint()
        machine = find(None, here) or nearest(here)
        self._largest = machine.largest_copy if machine else 0
        # A 0 and a 1 to copy from, memory to test a 2D copy, and a word to test a capture.
        constants, _ = self.local(64)
        hip.fill(constants, 64, side)
        hip.write_32(side, constants + WORD, 1)
        ends = constants + 40, 4, constants + 32, 4, 2, 2
        rectangles = hip.tried(hip.copy_2d, *ends, side) and hip.drain(side)
        engine.settle(side)
        uncaptured = self._uncaptured(engine, constants + 56)
        meeting = Meeting(engine, "hip engine")
        indices = self._device_indices(engine, meeting.gather(hip.bus_id(self.index)))
        self._indices = engine.hosts.spread(indices, self.index)
        mechanism = self._mechanism(engine, meeting)
        memory = self._memory(meeting)
        rectangles, columns = self._agree_on_columns(meeting, rectangles)
        meeting.close()
        kernels, names = mechanism == "kernel", WAYS[self.name]
        events = self._selected.get("events", self.usual_events)
        cut = f", in pieces of {self._largest} bytes" if self._largest else ""
        on_shader = os.environ.get("GPU_STREAMOPS_CP_WAIT", "0") in ("", "0")
        by = "a kernel of the runtime's" if on_shader else "the command processor"
        return Mechanisms(
            memory=memory,
            words="signal" if mechanism == "signal" else "uncached",
            kernels=kernels,
            rectangles=rectangles,
            uncaptured="" if kernels else uncaptured,
            writes_before_events=events == "write",
            constants=constants,
            post="hipStreamWriteValue32",
            place="peer's signal memory" if mechanism == "signal" else "peer's uncached memory",
            wait=names["signals"][mechanism]
            + ("" if kernels else f", by {by} (GPU_STREAMOPS_CP_WAIT)")
            + "; relies on a peer's word arriving after the copy before it",
            copy=f"{self._copies_by()}{cut} in memory of {names['memory'][memory]}, "
            f"columns by {columns}, ends told by {names['events'][events]}; "
            f"HIP {hip.runtime_version()}",
        )

    def _copies_by(self) -> str:
        """Description of the calls that copy between devices."""
        names, (_, warning) = WAYS[self.name]["copy"], self.batched(0.0)
        if warning:
            return f"{names['dtod']}, for want of {names['batch']}"
        return names[self._copy]

    def _uncaptured(self, engine: StreamEngine, word: int) -> str:
        """Why graphs do not capture stream writes, and so waits; empty if they do. Until July 2026
        AMD's runtime executed them at once instead of capturing them (ROCm/rocm-systems #8911), so
        that captured calls would have no signals."""
        side, written = engine.side.handle, ctypes.c_uint32.from_address(engine.watched)
        if hip.try_capture(side, word):
            hip.copy_to_host(engine.watched, word, WORD, side)  # the words are not in use yet
            engine.settle(side)
            if not written.value:
                return ""
            written.value = 0
        return (
            "this ROCm executes stream writes at once instead of capturing them in a graph; "
            f"set {variable(self.name)}=signals=kernel on all ranks, so that kernels signal, "
            "update ROCm, or make the call outside of the capture"
        )

    def _device_indices(self, engine: StreamEngine, bus_ids: list[bytes]) -> list[int]:
        """The device index in this process of every rank of this host. A device that this process
        does not see has this rank's index."""
        known = {hip.bus_id(index): index for index in range(hip.start())}
        indices = [known.get(bus_id, self.index) for bus_id in bus_ids]
        for rank, index in zip(engine.hosts.here, indices, strict=True):
            if index != self.index and not hip.reach(self.index, index):
                raise NotImplementedError(
                    f"device {self.index} of rank {engine.rank} cannot access the memory of device "
                    f"{index} of rank {rank}; run on GPUs of one host that are linked, with no "
                    "partition or IOMMU setting between them (hipDeviceCanAccessPeer)"
                )
        return indices

    def _mechanism(self, engine: StreamEngine, meeting: Meeting) -> str:
        """The first signal mechanism that all ranks support."""
        wanted, mechanisms = self._selected.get("signals"), WAYS[self.name]["signals"]
        values = meeting.gather((wanted or "none").ljust(max(map(len, mechanisms))).encode())
        if len(set(values)) > 1:  # the ranks would test different mechanisms
            pairs = zip(engine.hosts.here, values, strict=True)
            each = ", ".join(f"{value.decode().strip()} on rank {rank}" for rank, value in pairs)
            expected = f"required the same value on all ranks, got {each}"
            raise ConfigError(variable(self.name), "signals", expected)
        tests = {
            "signal": self._shares_signals,
            "uncached": self._waits_on_uncached,
            "kernel": lambda engine, meeting: self.has_kernels,
        }
        for mechanism in mechanisms if wanted is None else [wanted]:
            if all(map(any, meeting.gather(bytes([tests[mechanism](engine, meeting)])))):
                return mechanism
        if wanted is not None:
            raise NotImplementedError(
                f"{variable(self.name)}=signals={wanted} is not available on all ranks: it needs "
                f"{_NEEDS[wanted]}; provide that on all ranks, or leave signals out of the "
                "variable and the hip engine takes what works"
            )
        raise NotImplementedError(
            f"the hip engine cannot signal by {' or by '.join(mechanisms)} here: on some rank "
            "hipStreamWaitValue32 is missing or does not serve memory that processes share, and on "
            "some rank there is no compiler for ficco's kernels; install ROCm's clang, or hiprtc, "
            "on all ranks"
        )

    def _stream_waits(self) -> bool:
        return bool(hip.attribute("CanUseStreamWaitValue", self.index))

    def _shares_signals(self, engine: StreamEngine, meeting: Meeting) -> bool:
        """Whether this rank can wait on signal memory and map the next rank's."""
        word = self._stream_waits() and self._word("signal")
        shares = word and hip.tried(hip.share, word)
        if not all(map(any, meeting.gather(bytes([bool(shares)])))):
            return False
        here = engine.hosts.here
        after = here[(here.index(engine.rank) + 1) % len(here)]
        # Closing frees the words: another thread may have a call in flight now.
        words = Shared(engine, "signal", 1, hip.SIGNAL_BYTES, "hip probe")
        return bool(hip.tried(words.mapped, after, 0))

    def _waits_on_uncached(self, engine: StreamEngine, meeting: Meeting) -> bool:
        if not self._stream_waits():
            return False
        side, word = engine.side.handle, self._word("uncached")
        try:
            hip.fill(word, hip.SIGNAL_BYTES, side)
            return hip.tried(hip.wait_equal, side, word, 0) and hip.drain(side)
        finally:
            engine.settle(side)

    def _word(self, kind: str) -> int:
        self._locals.append(hip.malloc(hip.SIGNAL_BYTES, kind))
        return self._locals[-1]

    def _memory(self, meeting: Meeting) -> str:
        """The allocator of all ranks. PyTorch's only if selected: until July 2026 it mapped memory
        twice on ROCm (pytorch/pytorch #188673), and until April 2026 AMD's runtime copied memory
        with such mappings by a kernel (ROCm/rocm-systems #4784)."""
        wanted = self._selected.get("memory") == "torch"
        return "torch" if all(map(any, meeting.gather(bytes([wanted])))) else "ipc"

    def _agree_on_columns(self, meeting: Meeting, supported: bool) -> tuple[bool, str]:
        """Whether the ranks use 2D copies for columns, and a description. All ranks must agree: the
        layout of a receiver's staging depends on whether its senders pack."""
        wanted = self._selected.get("columns")
        mine = bytes([supported, wanted == "2d", wanted == "pack"])
        supports, rectangles, packs = zip(*meeting.gather(mine), strict=True)
        supported = all(supports) and not any(packs)
        if any(rectangles) and not supported:
            raise NotImplementedError(
                f"{variable(self.name)}=columns=2d, which a rank selects, is not available on "
                "all: on some rank the runtime has no 2D copies, or the variable has another "
                "value; leave columns out of it on all ranks"
            )
        why = "" if supported else ", for want of a 2D copy"
        if any(rectangles + packs):
            why = " (asked for)"
        return supported, WAYS[self.name]["columns"]["2d" if supported else "pack"] + why

    # The device, streams and events.

    def use(self) -> None:
        hip.use(self.index)

    def synchronize(self) -> None:
        self.use()
        for stream in list(self.streams):  # poll: a wait of the binding holds the interpreter lock
            hip.drain(stream.handle, float("inf"))
        super().synchronize()

    def copy_engines(self) -> None:
        # AsyncEngineCount does not help: AMD's runtime returns 8 for every device.
        return None

    def make_stream(self, priority: int) -> int:
        return int(hip.make_stream(priority).as_c_void_p().value)

    def event(self, timing: bool = False) -> hip.Event:
        event = hip.Event(timing)
        self._events.add(event)
        return event

    def lasting_event(self) -> hip.Event:
        return hip.Event()

    # Words and copies.

    def batched(self, measured: float) -> tuple[float, str]:
        chosen = self._selected.get("copy")
        most = math.inf if chosen == "batch" else measured if chosen is None else 0.0
        if not most or hip.batches():
            return most, ""
        key = (
            f"{variable(self.name)}=copy=batch" if chosen else "batched_copies in the machine file"
        )
        return 0.0, (
            f"{key}: required HIP {hip.dotted(hip.BATCHES_SINCE)} or later, whose "
            f"hipMemcpyBatchAsync submits several copies at once, got HIP {hip.runtime_version()}; "
            "copies are submitted one by one. Update ROCm, or leave the key out"
        )

    def copies(self, ranks: tuple[int, int], batched: float = 0.0) -> Copies:
        one_by_one = super().copies(ranks)
        if ranks[0] == ranks[1] or not batched:
            return one_by_one
        most = min(batched, self._largest or batched)

        def copies(dst: Numbers, src: Numbers, sizes: Numbers, stream: Any) -> None:
            # The legacy stream, which may be the caller's, takes no batch.
            if len(sizes) > 1 and sizes.max() <= most and not stream.is_ptr_null:
                hip.copy_batch(dst, src, sizes, stream)
            else:
                one_by_one(dst, src, sizes, stream)

        return copies

    def copy(
        self, dst: int, nbytes: int, ranks: tuple[int, int] | None = None
    ) -> Callable[[int, Any], None]:
        most = self._largest
        if ranks is not None and most and nbytes > most:
            starts = range(0, nbytes, most)
            pieces = [(at, self.copy(dst + at, min(most, nbytes - at), ranks)) for at in starts]

            def in_pieces(src: int, stream: Any) -> None:
                for at, piece in pieces:
                    piece(src + at, stream)

            return in_pieces
        if ranks is not None and self._copy == "peer":
            to, at = (self._indices[rank] for rank in ranks)
            peer = hip.calls.hipMemcpyPeerAsync
            return lambda src, stream: peer(dst, to, src, at, nbytes, stream)
        if ranks is not None and self._copy == "nocu":
            plain, kind = hip.calls.hipMemcpyAsync, hip.WITHOUT_UNITS
            return lambda src, stream: plain(dst, src, nbytes, kind, stream)
        return lambda src, stream: hip.copy(dst, src, nbytes, stream)

    def rectangle(
        self, dst: int, dst_pitch: int, width: int, height: int
    ) -> Callable[[int, int, Any], None]:
        most = max(self._largest // width, 1) if self._largest else height

        def copy(src: int, pitch: int, stream: Any) -> None:
            for row in range(0, height, most):
                to, at, rows = dst + row * dst_pitch, src + row * pitch, min(most, height - row)
                hip.copy_2d(to, dst_pitch, at, pitch, width, rows, stream)

        return copy

    # Memory.

    def host(self, nbytes: int) -> int:
        self._hosts.append(hip.malloc_host(nbytes))
        ctypes.memset(self._hosts[-1], 0, nbytes)
        return self._hosts[-1]

    def waitable(self, kind: str) -> int:
        if kind != "signal":
            return self.host(WORD)
        word = self._word(kind)
        ctypes.memset(word, 0, hip.SIGNAL_BYTES)  # the host can access it, too
        return word

    def local(self, nbytes: int) -> tuple[int, torch.Tensor]:
        self._locals.append(hip.malloc(nbytes))
        return self._locals[-1], self.tensor(self._locals[-1], nbytes)[0]

    # ficco's kernels.

    @property
    def has_kernels(self) -> bool:
        return can_compile(self.target().vendor)

    def kernels(self) -> Kernels:
        return Kernels(self.binding)

    @property
    def binding(self) -> HipBinding:
        # Keep the binding, so that closing unloads its code even after an error.
        self._binding = self._binding or HipBinding(self.target(), self.index)
        return self._binding

    def unscaled(self, problem: Problem) -> str:
        target = self.target()
        if target.vendor == "cuda":  # HIP forwards its calls to CUDA
            capability = torch.cuda.get_device_capability(self.device)
            return lacking_on_cuda(problem, capability, cuda_release())
        return lacking_on_hip(problem, target.arch)

    @cached_property
    def untiled(self) -> str:  # type: ignore[override]
        return lacking(self.target())

    @cached_property
    def _tiled(self) -> TiledProducts:
        with self.aside():
            kernel, uploads = TritonKernel(self.binding), self.stream_for("uploads").torch
            return TiledProducts(self.device, self.binding.processors, kernel, uploads)

    def tiled(self) -> TiledProducts:
        return self._tiled

    # Closing.

    def close(self) -> None:
        frees = [partial(hip.free, address) for address in self._locals]
        frees += [partial(hip.free_host, address) for address in self._hosts]
        # Unloading does not wait for kernels: only after a free has waited for the device.
        frees += [partial(binding.close) for binding in [self._binding] if binding]
        steps = [partial(free_unshared, frees)]
        steps += [partial(event.destroy) for event in self._events]
        carry_out([*steps, super().close])


def target_of(device: torch.device) -> Target:
    """The compilation target of kernels on a GPU."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Target("hip", properties.gcnArchName)
    return Target("cuda", f"sm_{properties.major}{properties.minor}")


def engine(
    group: ProcessGroup,
    device: torch.device,
    signals: str,
    timeout_s: float,
    hosts: Hosts | None = None,
) -> GpuEngine:
    """Make the engine of a group's ranks on AMD GPUs."""
    hip.start()
    if device.type == "cpu":
        raise NotImplementedError(
            "the hip engine serves tensors on a GPU; those on the CPU only on a double of the "
            "HIP library, for tests. Move the tensors to the GPU or use the cpu engine"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    driver = HipDriver(torch.device("cuda", index), index)
    return GpuEngine(group, driver, signals, timeout_s, hosts)
