"""The CUDA driver's calls that the CUDA engine makes, through cuda-bindings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ficco.dma.memops import WAIT_32, WRITE_64, MemOp

try:
    from cuda.bindings import driver
except ImportError as error:
    raise ImportError(
        "the CUDA engine needs cuda-bindings of the same major version as your driver: "
        "pip install 'cuda-bindings==13.*', or 12.*"
    ) from error

from ficco.hip_kernels.cuda_binding import check

_KIND = driver.CUstreamBatchMemOpType
_WAIT_EQ = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
_WAIT_FLUSH = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_FLUSH)
_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
_THREAD_LOCAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

#: cuStreamBatchMemOp takes fewer than 256 operations.
MAX_BATCH = 255


def context() -> Any:
    """The current context of this thread."""
    return check("cuCtxGetCurrent", driver.cuCtxGetCurrent())


def use(context: Any) -> None:
    """Make a context that of this thread."""
    check("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))


def stream(handle: int) -> Any:
    """A stream as the binding likes it best: it wraps plain numbers anew in every call."""
    return driver.CUstream(handle)


def make_stream(priority: int) -> int:
    """A stream that is nobody else's: PyTorch hands its own out again and again."""
    flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    made = check("cuStreamCreateWithPriority", driver.cuStreamCreateWithPriority(flags, priority))
    return int(made)


def address(value: int) -> Any:
    """An address as the binding likes it best."""
    return driver.CUdeviceptr(value)


def attribute(name: str, device: int) -> int:
    """A device attribute, 0 where the driver does not know it."""
    found = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if found is None:
        return 0
    error, value = driver.cuDeviceGetAttribute(found, device)
    return 0 if error else int(value)


class Batch:
    """Waits and writes with fixed values, done in order and enqueued with one call."""

    def __init__(self, ops: Sequence[MemOp], flush: bool = False) -> None:
        """``flush``: waits ask for remote writes to be flushed."""
        self.ops, self.flush = tuple(ops), flush
        params = [self._part(*op) for op in self.ops]
        self._parts = [params[i : i + MAX_BATCH] for i in range(0, len(params), MAX_BATCH)]
        self._single: tuple[Any, ...] | None = None
        if len(self.ops) == 1 and self.ops[0].kind != WRITE_64:
            kind, address, value = self.ops[0]
            wait = kind == WAIT_32
            call = driver.cuStreamWaitValue32 if wait else driver.cuStreamWriteValue32
            flags = self._wait_flags() if wait else 0
            self._single = call, driver.CUdeviceptr(address), driver.cuuint32_t(value), flags

    def __add__(self, other: Batch) -> Batch:
        return Batch(self.ops + other.ops, self.flush)

    def _wait_flags(self) -> int:
        return _WAIT_EQ | (_WAIT_FLUSH if self.flush else 0)

    def _part(self, kind: str, address: int, value: int) -> Any:
        param = driver.CUstreamBatchMemOpParams()
        param.operation = code = getattr(_KIND, f"CU_STREAM_MEM_OP_{kind}")
        part = param.waitValue if kind == WAIT_32 else param.writeValue
        part.operation, part.address = code, address
        part.flags = self._wait_flags() if kind == WAIT_32 else 0
        if kind == WRITE_64:
            part.value64 = value
        else:
            part.value = driver.cuuint32_t(value)
        return param

    def enqueue(self, stream: Any) -> None:
        """Enqueue the batch."""
        if self._single is not None:
            call, address, value, flags = self._single
            result = call(stream, address, value, flags)
            if result[0]:
                check(call.__name__, result)
            return
        for part in self._parts:
            result = driver.cuStreamBatchMemOp(stream, len(part), part, 0)
            if result[0]:
                check("cuStreamBatchMemOp", result)


def copy(dst: Any, src: Any, nbytes: int, stream: Any) -> None:
    """Copy bytes between or within devices."""
    result = driver.cuMemcpyDtoDAsync(dst, src, nbytes, stream)
    if result[0]:
        check("cuMemcpyDtoDAsync", result)


class Copy2D:
    """A copy of rows at a distance, on the same engines as a plain copy."""

    def __init__(self, width: int, height: int, dst_pitch: int):
        part = self._part = driver.CUDA_MEMCPY2D()
        part.srcMemoryType = part.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        part.WidthInBytes, part.Height, part.dstPitch = width, height, dst_pitch

    def enqueue(self, dst: Any, src: Any, src_pitch: int, stream: Any) -> None:
        part = self._part
        part.dstDevice, part.srcDevice, part.srcPitch = dst, src, src_pitch
        result = driver.cuMemcpy2DAsync(part, stream)
        if result[0]:
            check("cuMemcpy2DAsync", result)


class Event:
    """An event for ordering streams."""

    def __init__(self) -> None:
        flags = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._event = check("cuEventCreate", driver.cuEventCreate(flags))

    def record(self, stream: Any) -> None:
        result = driver.cuEventRecord(self._event, stream)
        if result[0]:
            check("cuEventRecord", result)

    def hold(self, stream: Any) -> None:
        """Let a stream wait for the event; at once if it was never recorded."""
        result = driver.cuStreamWaitEvent(stream, self._event, 0)
        if result[0]:
            check("cuStreamWaitEvent", result)

    def synchronize(self) -> None:
        check("cuEventSynchronize", driver.cuEventSynchronize(self._event))

    def over(self) -> bool:
        """Whether everything before the latest record is complete, or failed."""
        return driver.cuEventQuery(self._event)[0] != driver.CUresult.CUDA_ERROR_NOT_READY

    def __del__(self) -> None:
        if hasattr(self, "_event"):
            driver.cuEventDestroy(self._event)  # what waits for it still does


class Recording:
    """What a stream was given, as a graph that gives it again."""

    def __init__(self, stream: Any, enqueue: Callable[[], None]) -> None:
        check("cuStreamBeginCapture", driver.cuStreamBeginCapture(stream, _THREAD_LOCAL))
        try:
            enqueue()
        except BaseException:
            driver.cuStreamEndCapture(stream)
            raise
        graph = check("cuStreamEndCapture", driver.cuStreamEndCapture(stream))
        try:
            self._graph = check("cuGraphInstantiate", driver.cuGraphInstantiate(graph, 0))
        finally:
            driver.cuGraphDestroy(graph)

    def replay(self, stream: Any) -> None:
        """Enqueue everything on a stream."""
        result = driver.cuGraphLaunch(self._graph, stream)
        if result[0]:
            check("cuGraphLaunch", result)

    def __del__(self) -> None:
        if hasattr(self, "_graph"):
            driver.cuGraphExecDestroy(self._graph)  # once it is no longer running


class uncaptured:
    """Within this block the thread may allocate and synchronise although it captures a graph."""

    def __enter__(self) -> None:
        self._before = check(
            "cuThreadExchangeStreamCaptureMode", driver.cuThreadExchangeStreamCaptureMode(_RELAXED)
        )

    def __exit__(self, *_: object) -> None:
        driver.cuThreadExchangeStreamCaptureMode(self._before)


def capture_id(stream: int) -> int:
    """Number of the capture that a stream is in, 0 if none."""
    result = driver.cuStreamGetCaptureInfo(stream)
    if result[0]:
        check("cuStreamGetCaptureInfo", result)
    active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return int(result[2]) if result[1] == active else 0


def join_aside(event: Event, stream: Any) -> None:
    """Make what an event is behind part of the graph that captures a stream. It is over when the
    graph is; what comes on the stream does not wait for it, as it would behind a plain ``hold``."""
    error, _, _, _, nodes, *edges, count = driver.cuStreamGetCaptureInfo(stream)
    # From CUDA 13 on there are edges, which may lie where the driver has them until the next call.
    plain = not any(e.from_port or e.to_port or e.type for found in edges for e in found or ())
    edges = [[driver.CUgraphEdgeData() for _ in found or ()] for found in edges]
    event.hold(stream)
    if error or not plain:  # what could not be given back: the plain hold does
        return
    only = int(driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)
    result = driver.cuStreamUpdateCaptureDependencies(stream, nodes, *edges, count, only)
    check("cuStreamUpdateCaptureDependencies", result)


def writes_reach(address: int, stream: int) -> bool:
    """Whether this driver lets a stream write to an address (a peer's: refused by newer ones)."""
    if driver.cuStreamWriteValue32(stream, address, 0, 0)[0]:
        return False
    return not driver.cuStreamSynchronize(stream)[0]


def driver_version() -> int:
    """For example 13000."""
    return int(check("cuDriverGetVersion", driver.cuDriverGetVersion()))


def read_words(address: int, count: int, stream: torch.cuda.Stream, seconds: float) -> list[int]:
    """Read words of this device from a thread of their own, empty if that takes too long."""
    import time

    target = torch.zeros(count, dtype=torch.int32, pin_memory=True)
    with uncaptured():
        if driver.cuMemcpyDtoHAsync(target.data_ptr(), address, 4 * count, stream.cuda_stream)[0]:
            return []
        end = time.monotonic() + seconds
        while not stream.query():
            if time.monotonic() > end:
                return []
            time.sleep(0.01)
    return target.tolist()
