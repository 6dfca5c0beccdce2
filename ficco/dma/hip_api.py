"""The HIP runtime's calls that the HIP engine makes, through hip-python.

Two series of the binding are supported, of ROCm 7.2 and of ROCm 10. This module hides differences:

- 7.2 holds the interpreter lock during every call. Waits for a stream therefore poll, or else the
  watchdog would never run. Frees and the unmapping of a handle wait for all streams of the device
  (``SyncAllStreams`` in AMD's ``hip_memory.cpp``), so they need a standstill. Calls that enqueue
  wait only while a hardware queue is full.
- 7.2 truncates a memory handle at its first zero byte. Handles are therefore read from memory.
- Without a library both raise RuntimeError from the first call, not from the import. 7.2 finds the
  library by LD_LIBRARY_PATH only, 10 also by ROCM_PATH, ROCM_HOME and in /opt/rocm.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from ficco.dma.driver import drained
from ficco.errors import BackendError
from ficco.hip_kernels.launch import Numbers

try:
    from hip import HIP_VERSION_TUPLE, hip
except ImportError as error:
    raise ImportError(
        "the HIP engine needs hip-python of your ROCm's version: pip install 'hip-python>=7.2,<11'"
    ) from error

#: The oldest HIP that has all functions, from ROCm 7.2; also the oldest that hip-python may bind.
OLDEST = 7, 2
#: The oldest HIP whose hipMemcpyBatchAsync submits several copies at once, as RCCL requires it
#: (``rocmwrap.h``). HIP 7.2 makes one copy after the other and refuses attributes (ROCm/clr #273).
BATCHES_SINCE = 7, 12
#: Copies of one call. ROCm 7.15 aborted with more than 8192 (vllm-project/vllm #43018).
MAX_BATCH = 4096

_EQUAL = int(hip.hipStreamWaitValueEq)
# 3 is hipDeviceMallocUncached, which the binding does not name.
_FLAGS = {"signal": int(hip.hipMallocSignalMemory), "uncached": 3}
_LAZY_PEER_ACCESS = int(hip.hipIpcMemLazyEnablePeerAccess)
_NO_TIMING = int(hip.hipEventDisableTiming)
_NON_BLOCKING = int(hip.hipStreamNonBlocking)
_COHERENT = int(hip.hipHostMallocCoherent)
_RELAXED = int(hip.hipStreamCaptureMode.hipStreamCaptureModeRelaxed)
_THREAD_LOCAL = hip.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal
_CAPTURING = int(hip.hipStreamCaptureStatus.hipStreamCaptureStatusActive)
_KIND = hip.hipMemcpyKind
#: A kind of hipMemcpyAsync: between devices, by copy engines only.
WITHOUT_UNITS = _KIND.hipMemcpyDeviceToDeviceNoCU

#: Bytes of one signal, the only size of an allocation with hipMallocSignalMemory.
SIGNAL_BYTES = 8
HANDLE_BYTES = 64
#: Seconds that a test of a capability may take.
TRIAL_S = 5.0
_ALL_BITS = 0xFFFFFFFF

#: Remedies for errors that the setup of a machine causes.
_REMEDIES = {
    "hipErrorNoDevice": "no AMD GPU is visible: load the amdgpu driver, join the groups render "
    "and video, and do not leave HIP_VISIBLE_DEVICES empty",
    "hipErrorOutOfMemory": "free memory of the GPU, or cap ficco's by "
    "ficco.options(workspace_bytes=...)",
}


def _failed(call: str, code: Any) -> BackendError:
    name = getattr(code, "name", str(code))
    text = hip.hipGetErrorString(code)[1]
    explanation = bytes(text).decode() if text is not None else "no explanation"
    remedy = _REMEDIES.get(name)
    return BackendError(call, name, f"{explanation}; {remedy}" if remedy else explanation)


def _unavailable(call: str, error: RuntimeError) -> BackendError:
    if "dlsym" in str(error):
        return BackendError(
            call, "missing", "this ROCm does not have the function; install ROCm 7.2 or later"
        )
    return BackendError(
        call,
        "no library",
        "libamdhip64.so cannot be opened; install ROCm 7.2 or later and start with its lib folder "
        f"in LD_LIBRARY_PATH ({error})",
    )


class _Calls:
    """The binding's functions, wrapped on first use: they return their value or raise
    BackendError."""

    def __getattr__(self, call: str) -> Callable[..., Any]:
        function = getattr(hip, call)

        def checked(*args: Any) -> Any:
            try:
                result = function(*args)
            except RuntimeError as error:
                raise _unavailable(call, error) from error
            if result[0]:
                raise _failed(call, result[0])
            return result[1] if len(result) == 2 else None

        vars(self)[call] = checked
        return checked


calls = _Calls()


def tried(call: Callable[..., Any], *args: Any) -> Any:
    """The result of a call, True if it returns None; False if the runtime refuses it."""
    try:
        returned = call(*args)
    except BackendError:
        forgive()
        return False
    return True if returned is None else returned


def forgive() -> None:
    """Clear an expected error, which PyTorch would otherwise report as its own."""
    hip.hipGetLastError()


def _pending(call: str, error: Any) -> bool:
    """Whether a query reports work that is not complete; raises any other error."""
    if not error:
        return False
    if error.name != "hipErrorNotReady":
        raise _failed(call, error)
    forgive()
    return True


load_module = calls.hipModuleLoadData
kernel = calls.hipModuleGetFunction
launch = calls.hipModuleLaunchKernel
unload_module = calls.hipModuleUnload
free = calls.hipFree
free_host = calls.hipHostFree
close_shared = calls.hipIpcCloseMemHandle
destroy_stream = calls.hipStreamDestroy
use = calls.hipSetDevice  # of this thread; called each time, since PyTorch changes it, too
copy = calls.hipMemcpyDtoDAsync  # bytes between or within devices


# The library and its devices.


def start() -> int:
    """Load the library; returns the number of devices.

    Raises:
        BackendError: there is no library, its version is not supported, or there is no device.
    """
    _check_version(*_version())
    _only_library()
    return int(calls.hipGetDeviceCount())


def _version() -> tuple[int, int]:
    version = calls.hipRuntimeGetVersion()
    return version // 10_000_000, version // 100_000 % 100


def _check_version(*version: int) -> None:
    """Refuse a library, or a binding, of an unsupported version."""
    binds, oldest = HIP_VERSION_TUPLE[:2], dotted(OLDEST)
    if binds < OLDEST:
        why = f"the installed hip-python binds HIP {dotted(binds)}, ficco needs {oldest} or later"
        remedy = "pip install 'hip-python>=7.2,<11'"
    elif not any(version):
        why = f"the library does not tell its version, ficco needs HIP {oldest} or later"
        remedy = "install ROCm 7.2 or later and start with its lib folder in LD_LIBRARY_PATH"
    elif version < OLDEST:
        why = f"ficco needs HIP {oldest} or later, the installed hip-python binds HIP {binds[0]}"
        remedy = "install ROCm 7.2 or later and a PyTorch that is built for it"
    elif version[0] != binds[0]:
        why = f"the installed hip-python binds HIP {binds[0]}"
        remedy = f"install ROCm 7.2 or a later one of HIP {binds[0]}, and a PyTorch built for it"
    else:
        return
    raise BackendError("hipRuntimeGetVersion", f"HIP {dotted(version)}", f"{why}; {remedy}")


def dotted(version: tuple[int, ...]) -> str:
    """A version as text."""
    return ".".join(map(str, version))


def _loaded() -> set[str]:
    """Paths of the copies of the library that this process has loaded."""
    with open("/proc/self/maps") as maps:
        return {line.rstrip().split(maxsplit=5)[5] for line in maps if "/libamdhip64.so" in line}


def _only_library() -> None:
    """Refuse two copies of the library: neither accepts streams of the other."""
    paths = _loaded()
    if len(paths) > 1:
        raise BackendError(
            "dlopen libamdhip64.so",
            "two libraries",
            f"{' and '.join(sorted(paths))} are loaded, one of them by PyTorch; start with the "
            "folder of PyTorch's first in LD_LIBRARY_PATH",
        )


def runtime_version() -> str:
    """Version of the library, for example ``7.2``."""
    return dotted(_version())


def attribute(name: str, device: int) -> int:
    """A device attribute; 0 if the runtime does not have it."""
    wanted = getattr(hip.hipDeviceAttribute_t, f"hipDeviceAttribute{name}", None)
    if wanted is None:
        return 0
    error, value = hip.hipDeviceGetAttribute(wanted, device)
    if error:
        forgive()
        return 0
    return int(value)


def bus_id(device: int) -> bytes:
    """The PCI address of a device, which is the same in every process, as 12 bytes."""
    address = (attribute(name, device) for name in ("PciDomainId", "PciBusId", "PciDeviceId"))
    return b"".join(number.to_bytes(4, "little") for number in address)


def reachable(device: int, peer: int) -> bool:
    """Whether a device can access the memory of a peer."""
    return bool(calls.hipDeviceCanAccessPeer(device, peer))


def reach(device: int, peer: int) -> bool:
    """Let this thread's device access the memory of a peer; False if it cannot."""
    if not reachable(device, peer):
        return False
    error = hip.hipDeviceEnablePeerAccess(peer, 0)[0]
    if error:
        if error.name != "hipErrorPeerAccessAlreadyEnabled":
            raise _failed("hipDeviceEnablePeerAccess", error)
        forgive()
    return True


# Memory. Addresses are plain integers.


def malloc(nbytes: int, kind: str = "plain") -> int:
    """Allocate memory of this thread's device. ``"signal"`` memory, of ``SIGNAL_BYTES``, is a word
    that streams can wait for. No device caches ``"uncached"`` memory, so that peers see each
    other's writes while a kernel runs."""
    if kind == "plain":
        return int(calls.hipMalloc(nbytes))
    return int(calls.hipExtMallocWithFlags(nbytes, _FLAGS[kind]))


def malloc_host(nbytes: int) -> int:
    """Allocate pinned host memory with coherent access from the device."""
    return int(calls.hipHostMalloc(nbytes, _COHERENT))


def share(address: int) -> bytes:
    """The handle by which another process opens an allocation."""
    handle = calls.hipIpcGetMemHandle(address)
    return ctypes.string_at(handle.as_c_void_p().value, HANDLE_BYTES)


def open_shared(handle: bytes) -> int:
    """Map an allocation of another process."""
    peer = hip.hipIpcMemHandle_st()
    ctypes.memmove(peer.as_c_void_p().value, handle, HANDLE_BYTES)
    return int(calls.hipIpcOpenMemHandle(peer, _LAZY_PEER_ACCESS))


# Streams and events.


def stream(raw: int) -> Any:
    """The binding's object of a stream, from its integer handle."""
    return hip.ihipStream_t.fromObj(raw)


# AMD's runtime has separate hardware queues for each priority, 4 by default, which the streams of
# that priority share.


def make_stream(priority: int) -> Any:
    """Create a stream of this thread's device that does not wait for the null stream."""
    return calls.hipStreamCreateWithPriority(_NON_BLOCKING, priority)


def idle(stream: Any) -> bool:
    """Whether all work of a stream is complete."""
    return not _pending("hipStreamQuery", hip.hipStreamQuery(stream)[0])


def drain(stream: Any, seconds: float = TRIAL_S) -> bool:
    """Wait until a stream is idle; False if it takes too long."""
    return drained(lambda: idle(stream), seconds)


class Event:
    """An event for ordering streams, or for timing."""

    def __init__(self, timing: bool = False) -> None:
        self._event = calls.hipEventCreateWithFlags(0 if timing else _NO_TIMING)

    def record(self, stream: Any) -> None:
        calls.hipEventRecord(self._event, stream)

    def hold(self, stream: Any) -> None:
        calls.hipStreamWaitEvent(stream, self._event, 0)

    def over(self) -> bool:
        """Whether all work before the latest record is complete."""
        return not _pending("hipEventQuery", hip.hipEventQuery(self._event)[0])

    def seconds_to(self, later: Event) -> float:
        return float(calls.hipEventElapsedTime(self._event, later._event)) / 1e3

    def destroy(self) -> None:
        """Destroy the event, which must not be in use."""
        event, self._event = self._event, None
        if event is not None:
            calls.hipEventDestroy(event)

    def __del__(self) -> None:
        if getattr(self, "_event", None) is not None:
            hip.hipEventDestroy(self._event)


# Graphs.


@cache
def _plain(name: str) -> Any:
    """A function of the library that both bindings wrap incorrectly: one passes an uninitialized
    mode, one reads an uninitialized status after an error, one takes no array of sizes."""
    return getattr(ctypes.CDLL(_loaded().pop()), name)


def _call_plain(name: str, *args: Any) -> None:
    try:
        error = _plain(name)(*args)
    except AttributeError as missing:
        raise BackendError(
            name, "missing", "this ROCm does not have the function; install ROCm 7.2 or later"
        ) from missing
    if error:
        raise _failed(name, hip.hipError_t(error))


class uncaptured:
    """Let the thread allocate and query events within this block, even while a graph is
    captured."""

    def __enter__(self) -> None:
        self._mode = ctypes.c_int(_RELAXED)
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    def _swap(self) -> None:
        _call_plain("hipThreadExchangeStreamCaptureMode", ctypes.byref(self._mode))


def capture_id(stream: Any) -> int:
    """Identifier of the capture that a stream is in, 0 if none."""
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    refs = ctypes.byref(status), ctypes.byref(number)
    _call_plain("hipStreamGetCaptureInfo", stream.as_c_void_p(), *refs)
    return number.value if status.value == _CAPTURING else 0


# Operations of streams.


def write_32(stream: Any, address: int, value: int) -> None:
    calls.hipStreamWriteValue32(stream, address, value, 0)


def wait_equal(stream: Any, address: int, value: int) -> None:
    """Let a stream wait until a 32-bit word equals a value."""
    calls.hipStreamWaitValue32(stream, address, value, _EQUAL, _ALL_BITS)


def writes_reach(stream: Any, address: int) -> bool:
    """Whether a stream may write to an address: writes a 0 there and waits for it."""
    return tried(write_32, stream, address, 0) and drain(stream)


def try_capture(stream: Any, address: int) -> bool:
    """Capture a stream write of a 1 and drop the graph; returns whether the runtime allows that. A
    runtime that executes the write immediately, instead of capturing it, leaves the 1 there."""

    def capture() -> None:
        calls.hipStreamBeginCapture(stream, _THREAD_LOCAL)
        try:
            write_32(stream, address, 1)
        finally:
            calls.hipGraphDestroy(calls.hipStreamEndCapture(stream))

    return bool(tried(capture))


def batches() -> bool:
    """Whether :func:`copy_batch` submits several copies at once."""
    return _version() >= BATCHES_SINCE


@cache
def _attributes() -> Any:
    """Attributes of the copies of a batch: sources are read in stream order, and copy engines are
    preferred. RCCL passes the same."""
    attributes = hip.hipMemcpyAttributes()
    attributes.srcAccessOrder = hip.hipMemcpySrcAccessOrder.hipMemcpySrcAccessOrderStream
    attributes.flags = int(hip.hipMemcpyFlags.hipMemcpyFlagPreferOverlapWithCompute)
    return attributes


def copy_batch(dst: Numbers, src: Numbers, sizes: Numbers, stream: Any) -> None:
    """Copy between devices, in any order within the batch, in stream order as a whole. Through
    ctypes: both bindings pass a single size. Sizes must not be 0."""
    size, attributes = ctypes.c_size_t, _attributes().as_c_void_p()
    for first in range(0, len(sizes), MAX_BATCH):
        parts = [numbers[first : first + MAX_BATCH] for numbers in (dst, src, sizes)]
        arrays = [ctypes.c_void_p(part.ctypes.data) for part in parts]
        count, zero = size(len(parts[0])), size(0)  # the attributes hold from copy 0 on
        more = attributes, ctypes.byref(zero), size(1), None, stream.as_c_void_p()
        _call_plain("hipMemcpyBatchAsync", *arrays, count, *more)


def fill(address: int, nbytes: int, stream: Any) -> None:
    """Zero memory."""
    calls.hipMemsetAsync(address, 0, nbytes, stream)


def copy_to_host(dst: int, src: int, nbytes: int, stream: Any) -> None:
    """Copy bytes of a device to pinned host memory. Through ctypes, without the interpreter lock:
    the watchdog reads signal words so, and the call may block."""
    ends = ctypes.c_void_p(dst), ctypes.c_void_p(src), ctypes.c_size_t(nbytes)
    kind = int(_KIND.hipMemcpyDeviceToHost)
    _call_plain("hipMemcpyAsync", *ends, kind, stream.as_c_void_p())


def copy_2d(
    dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, stream: Any
) -> None:
    """Copy rows from one pitch to another."""
    kind = _KIND.hipMemcpyDeviceToDevice
    calls.hipMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, height, kind, stream)
