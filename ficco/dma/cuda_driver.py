"""The CUDA driver's calls that the CUDA engine makes, through cuda-bindings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ficco.errors import BackendError

try:
    from cuda.bindings import driver
except ImportError as error:
    raise ImportError(
        "the CUDA engine needs cuda-bindings of the same major version as your driver: "
        "pip install 'ficco[cuda]'"
    ) from error

_KIND = driver.CUstreamBatchMemOpType
_WAIT_EQ = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
_WAIT_GEQ = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
_WAIT_FLUSH = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_FLUSH)
_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

#: cuStreamBatchMemOp takes fewer than 256 operations.
MAX_BATCH = 255


def check(call: str, result: Sequence[Any]) -> Any:
    """The value of a driver call, or :class:`BackendError`."""
    if result[0]:
        _, text = driver.cuGetErrorString(result[0])
        raise BackendError(call, result[0].name, text.decode() if text else "no explanation")
    return result[1] if len(result) == 2 else None


def stream(handle: int) -> Any:
    """A stream as the binding likes it best: it wraps plain numbers anew in every call."""
    return driver.CUstream(handle)


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


class Words:
    """Waits for, or writes of, one value at 32-bit words, enqueued with one call.

    A wide word is a pair of words that one write sets to zero and the value.
    """

    def __init__(
        self,
        addresses: Sequence[int],
        *,
        wait: str | None = None,
        flush: bool = False,
        wide: Sequence[int] = (),
    ) -> None:
        """``wait`` is None for writes, else ``"=="`` or ``">="`` (cyclic)."""
        self._flags = 0
        if wait:
            self._flags = (_WAIT_EQ if wait == "==" else _WAIT_GEQ) | (_WAIT_FLUSH * flush)
        name = "WAIT" if wait else "WRITE"
        narrow = getattr(_KIND, f"CU_STREAM_MEM_OP_{name}_VALUE_32")
        single = len(addresses) == 1 and not wide
        self._single = driver.CUdeviceptr(addresses[0]) if single else None
        self._enqueue_one = driver.cuStreamWaitValue32 if wait else driver.cuStreamWriteValue32
        self._params: list[Any] = []
        self._narrow = [self._part(narrow, address, wait) for address in addresses]
        kind = _KIND.CU_STREAM_MEM_OP_WRITE_VALUE_64
        self._wide = [self._part(kind, address, None) for address in wide]

    def _part(self, kind: Any, address: int, wait: str | None) -> Any:
        param = driver.CUstreamBatchMemOpParams()
        param.operation = kind
        part = param.waitValue if wait else param.writeValue
        part.operation, part.address, part.flags = kind, address, self._flags
        self._params.append(param)
        return part

    def enqueue(self, stream: Any, value: int) -> None:
        """Enqueue the batch."""
        value &= 0xFFFFFFFF
        if self._single is not None:
            result = self._enqueue_one(stream, self._single, value, self._flags)
            if result[0]:
                check(self._enqueue_one.__name__, result)
            return
        word = driver.cuuint32_t(value)
        for part in self._narrow:
            part.value = word
        for part in self._wide:
            part.value64 = value << 32
        params = self._params
        if not params:
            return
        if len(params) <= MAX_BATCH:
            result = driver.cuStreamBatchMemOp(stream, len(params), params, 0)
            if result[0]:
                check("cuStreamBatchMemOp", result)
            return
        for first in range(0, len(params), MAX_BATCH):
            part = params[first : first + MAX_BATCH]
            check("cuStreamBatchMemOp", driver.cuStreamBatchMemOp(stream, len(part), part, 0))


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
