"""NVIDIA GPUs: the driver of the GPU engine for CUDA, through cuda-bindings.

A wait requests a flush of remote writes if the device supports it. Otherwise (H100 and H200 over
NVLink) a completed peer copy is visible in the receiver's memory before the word that follows it on
the same path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import ProcessGroup

from ficco.compute.cublaslt import WORKSPACE, CublasLt
from ficco.compute.scaled import cuda_release, lacking_on_cuda
from ficco.dma.driver import (
    URGENT,
    WAIT_32,
    WRITE_64,
    Copies,
    Driver,
    Mechanisms,
    MemOp,
    StreamEngine,
)
from ficco.dma.gpu import GpuEngine
from ficco.dma.host import Hosts
from ficco.dma.memories import LARGE, align
from ficco.errors import BackendError
from ficco.hip_kernels import kernels
from ficco.hip_kernels.build import can_compile
from ficco.hip_kernels.launch import Kernels, Numbers

try:
    from cuda.bindings import driver
except ImportError as error:
    raise ImportError(
        "the CUDA engine needs cuda-bindings of the same major version as your driver: "
        "pip install 'cuda-bindings==13.*', or 12.*"
    ) from error

from ficco.compute.tiled.hopper import hopper_products
from ficco.compute.tiled.products import TiledProducts
from ficco.hip_kernels.cuda_binding import attribute, check
from ficco.problems.products import Problem

_KIND = driver.CUstreamBatchMemOpType
_PEER_ACCESS = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
_WAIT_EQ = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
_WAIT_FLUSH = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_FLUSH)
_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
_THREAD_LOCAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_RECORD_EXTERNAL = int(driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL)
_WAIT_EXTERNAL = int(driver.CUevent_wait_flags.CU_EVENT_WAIT_EXTERNAL)

#: The version of CUDA whose cuMemcpyBatchAsync is called, the first to have it.
COPIES_SINCE = 12080
#: cuStreamBatchMemOp takes fewer than 256 operations.
MAX_BATCH = 255
#: Bytes of a CUipcMemHandle.
HANDLE_BYTES = 64


class Batch:
    """Waits and writes with fixed values, executed in order and enqueued by one call."""

    def __init__(self, ops: Sequence[MemOp], flush: bool = False) -> None:
        """``flush``: waits flush remote writes."""
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
        if self._single is not None:
            call, address, value, flags = self._single
            if (result := call(stream, address, value, flags))[0]:
                check(call.__name__, result)
            return
        for part in self._parts:
            if (result := driver.cuStreamBatchMemOp(stream, len(part), part, 0))[0]:
                check("cuStreamBatchMemOp", result)


class CopiesAtOnce:
    """cuMemcpyBatchAsync: copies in any order, enqueued by one call. Through ctypes, since the
    binding would wrap every address."""

    def __init__(self, address: int) -> None:
        """``address``: address of the function, with the signature of CUDA 12.8."""
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        arrays = pointer, pointer, pointer, size, pointer, pointer, size
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, *arrays, pointer, pointer)(address)
        self._attributes = driver.CUmemcpyAttributes()
        order = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._attributes.srcAccessOrder = order
        self._first, self._failed = size(0), size(0)

    def __call__(self, dst: Numbers, src: Numbers, sizes: Numbers, stream: Any) -> bool:
        """Enqueue copies; False if the driver refuses them."""
        arrays = (numbers.ctypes.data for numbers in (dst, src, sizes))
        first, failed = map(ctypes.addressof, (self._first, self._failed))
        attributes = self._attributes.getPtr(), first, 1
        return not self._call(*arrays, len(sizes), *attributes, failed, int(stream))


class Event:
    """An event for ordering streams, or for timing."""

    def __init__(self, timing: bool = False) -> None:
        flags = 0 if timing else int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._event = check("cuEventCreate", driver.cuEventCreate(flags))

    def record(self, stream: Any) -> None:
        if (result := driver.cuEventRecord(self._event, stream))[0]:
            check("cuEventRecord", result)

    def hold(self, stream: Any) -> None:
        if (result := driver.cuStreamWaitEvent(stream, self._event, 0))[0]:
            check("cuStreamWaitEvent", result)

    def over(self) -> bool:
        """Whether all work before the latest record is complete, or has failed."""
        pending = driver.cuEventQuery(self._event)[0] == driver.CUresult.CUDA_ERROR_NOT_READY
        return not pending

    def seconds_to(self, later: Event) -> float:
        elapsed = driver.cuEventElapsedTime(self._event, later._event)
        return float(check("cuEventElapsedTime", elapsed)) / 1e3

    def __del__(self) -> None:
        if hasattr(self, "_event"):
            driver.cuEventDestroy(self._event)  # enqueued waits for it remain valid


class ExternalEvent(Event):
    """An event as an external event of graphs."""

    def __init__(self, event: Any) -> None:
        self._owner, self._shared = event, event._event

    def record(self, stream: Any) -> None:
        if (result := driver.cuEventRecordWithFlags(self._shared, stream, _RECORD_EXTERNAL))[0]:
            check("cuEventRecordWithFlags", result)

    def hold(self, stream: Any) -> None:
        if (result := driver.cuStreamWaitEvent(stream, self._shared, _WAIT_EXTERNAL))[0]:
            check("cuStreamWaitEvent", result)


class GraphRecording:
    """Recorded work of a stream, as a graph."""

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
        if (result := driver.cuGraphLaunch(self._graph, stream))[0]:
            check("cuGraphLaunch", result)

    def __del__(self) -> None:
        if hasattr(self, "_graph"):
            driver.cuGraphExecDestroy(self._graph)  # takes effect once the graph has ended


class CudaHandles:
    """See :class:`ficco.dma.driver.Handles`. A handle shares the driver's whole block that contains
    an allocation. Each allocation therefore takes separate blocks of 2 MiB (CUDA Programming Guide,
    "Interprocess Communication")."""

    def malloc(self, nbytes: int, kind: str) -> int:
        size, full = align(nbytes, LARGE), driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        if (result := driver.cuMemAlloc(size))[0] == full:
            with contextlib.suppress(RuntimeError):  # PyTorch cannot free memory in a capture
                torch.cuda.empty_cache()
            if (result := driver.cuMemAlloc(size))[0] == full:
                raise torch.OutOfMemoryError(
                    f"required {size} bytes of the GPU that ranks share, there are "
                    f"{torch.cuda.mem_get_info()[0]}; free memory of the GPU, or cap ficco's by "
                    "ficco.options(workspace_bytes=...)"
                )
        return int(check("cuMemAlloc", result))

    def free(self, address: int) -> None:
        check("cuMemFree", driver.cuMemFree(address))

    def fill(self, address: int, nbytes: int, stream: Any) -> None:
        check("cuMemsetD8Async", driver.cuMemsetD8Async(address, 0, nbytes, stream))

    def share(self, address: int) -> bytes:
        handle = check("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(address))
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def open_shared(self, handle: bytes) -> int:
        peer = driver.CUipcMemHandle()
        ctypes.memmove(peer.getPtr(), handle, HANDLE_BYTES)
        return int(check("cuIpcOpenMemHandle", driver.cuIpcOpenMemHandle(peer, _PEER_ACCESS)))

    def close_shared(self, address: int) -> None:
        check("cuIpcCloseMemHandle", driver.cuIpcCloseMemHandle(address))


class uncaptured:
    """Let the thread allocate and synchronize within this block, even while it captures a graph."""

    def __enter__(self) -> None:
        self._before = check(
            "cuThreadExchangeStreamCaptureMode", driver.cuThreadExchangeStreamCaptureMode(_RELAXED)
        )

    def __exit__(self, *_: object) -> None:
        driver.cuThreadExchangeStreamCaptureMode(self._before)


class CudaDriver(Driver):
    """See the module's docstring."""

    name = "cuda"
    rescue = URGENT
    watches_by_events = True
    fuses = True
    records = True
    handles = CudaHandles()
    event, uncaptured = staticmethod(Event), staticmethod(uncaptured)
    record, external = staticmethod(GraphRecording), staticmethod(ExternalEvent)

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(torch.device("cuda", index), index)
        if torch.version.cuda is None:
            raise NotImplementedError(
                "the cuda engine needs a CUDA build of PyTorch; this one has none"
            )
        if not attribute("CAN_USE_64_BIT_STREAM_MEM_OPS", index):
            raise NotImplementedError(
                "the cuda engine needs stream memory operations, which this device or driver "
                "does not offer"
            )
        self._flush = bool(attribute("CAN_FLUSH_REMOTE_WRITES", index))
        # PyTorch's context, to make current in threads without one, such as the watchdog's.
        retained = driver.cuDevicePrimaryCtxRetain(index)
        self._context = check("cuDevicePrimaryCtxRetain", retained)
        self._pinned: list[torch.Tensor] = []

    # The device.

    def use(self) -> None:
        check("cuCtxSetCurrent", driver.cuCtxSetCurrent(self._context))

    def means(self, engine: StreamEngine) -> Mechanisms:
        order = (
            "with a flush of remote writes"
            if self._flush
            else "without a flush, which this device does not offer: relies on a peer's word "
            "arriving after the copy before it"
        )
        version = int(check("cuDriverGetVersion", driver.cuDriverGetVersion()))
        memory = self._memory(engine)
        place = "PyTorch's symmetric" if memory == "torch" else "its own"
        torch.cuda.current_blas_handle()  # a first product within a capture could not create it
        return Mechanisms(
            memory=memory,
            # An event right after a copy completes only once later copies of the stream are
            # complete, too (H200, driver 580). An event after a stream write completes at once.
            writes_before_events=True,
            wait=f"stream wait, {order}; the copy kernel posts by itself and, where no product "
            "runs beside it, waits by itself, as sums at the peers do",
            copy=f"cuMemcpyDtoDAsync on {self.copy_engines()} copy engines, in {place} memory, "
            f"driver {version // 1000}.{version % 1000 // 10}",
        )

    def _memory(self, engine: StreamEngine) -> str:
        """The allocator of symmetric memory of all ranks. After a rendezvous of PyTorch among some
        ranks of a job, a later one of all ranks hangs (pytorch #196082). If the ranks of a host are
        not the whole job, they therefore share memory by handles, if the device supports that."""
        near, ranks = engine.hosts.near.size(), 0
        with contextlib.suppress(KeyError, ValueError):  # the group is not registered in the job
            if len(dist.get_process_group_ranks(engine.group)) == near:
                ranks = dist.get_world_size()
        meets_all = near in (1, ranks)  # a single rank needs no rendezvous
        # PyTorch's symmetric memory has one backend in a process, such as NCCL's after
        # FSDPModule.set_symm_mem_for_comm. ficco was tested with CUDA's.
        backend_of = getattr(_SymmetricMemory, "get_backend", lambda device: None)
        meets_all &= backend_of(torch.device("cuda", self.index)) in (None, "CUDA")
        return "torch" if meets_all or not attribute("IPC_EVENT_SUPPORTED", self.index) else "ipc"

    def copy_engines(self) -> int:
        return attribute("ASYNC_ENGINE_COUNT", self.index)

    def products(self) -> str:
        return f"{super().products()}; cuBLASLt for sums that begin in another buffer"

    # Streams and events.

    def stream(self, raw: int) -> Any:
        return driver.CUstream(raw)  # the binding would wrap an integer in every call

    def make_stream(self, priority: int) -> int:
        flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stream = driver.cuStreamCreateWithPriority(flags, priority)
        return int(check("cuStreamCreateWithPriority", stream))

    def idle(self, stream: Any) -> bool:
        result = driver.cuStreamQuery(stream)
        if result[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check("cuStreamQuery", result)
        return True

    def capture_id(self, stream: Any) -> int:
        if (result := driver.cuStreamGetCaptureInfo(stream))[0]:
            check("cuStreamGetCaptureInfo", result)
        active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return int(result[2]) if result[1] == active else 0

    def join_aside(self, event: Any, stream: Any) -> None:
        """The graph does not end before the event. Unlike after a plain ``hold``, later work of the
        stream does not wait for the event."""
        error, _, _, _, nodes, *edges, count = driver.cuStreamGetCaptureInfo(stream)
        # CUDA 13 returns edges, too, in memory of the driver that may be valid only until the next
        # call.
        plain = not any(e.from_port or e.to_port or e.type for each in edges for e in each or ())
        edges = [[driver.CUgraphEdgeData() for _ in each or ()] for each in edges]
        event.hold(stream)
        if error or not plain:  # dependencies that cannot be restored: keep the plain hold
            return
        flags = driver.CUstreamUpdateCaptureDependencies_flags
        only = int(flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)
        result = driver.cuStreamUpdateCaptureDependencies(stream, nodes, *edges, count, only)
        check("cuStreamUpdateCaptureDependencies", result)

    # Words and copies.

    def batch(self, ops: Sequence[MemOp]) -> Batch:
        return Batch(ops, self._flush)

    def writes_reach(self, stream: Any, address: int) -> bool:
        # Newer drivers refuse writes to a peer's address.
        if driver.cuStreamWriteValue32(stream, address, 0, 0)[0]:
            return False
        return not driver.cuStreamSynchronize(stream)[0]

    def copy(
        self, dst: int, nbytes: int, ranks: tuple[int, int] | None = None
    ) -> Callable[[int, Any], None]:
        to, call = driver.CUdeviceptr(dst), driver.cuMemcpyDtoDAsync

        def copy(src: int, stream: Any) -> None:
            if (result := call(to, src, nbytes, stream))[0]:
                check("cuMemcpyDtoDAsync", result)

        return copy

    def copies(self, ranks: tuple[int, int], batched: float = 0.0) -> Copies:
        one_by_one = super().copies(ranks)
        # Copies within a device are kernels in any case, and may use the legacy default stream,
        # which accepts no batch.
        if ranks[0] == ranks[1]:
            return one_by_one

        def copies(dst: Numbers, src: Numbers, sizes: Numbers, stream: Any) -> None:
            at_once = self._copies_at_once
            if at_once is None or not at_once(dst, src, sizes, stream):
                self._copies_at_once = None  # also after a refusal: the copies below raise errors
                one_by_one(dst, src, sizes, stream)

        return copies

    @cached_property
    def _copies_at_once(self) -> CopiesAtOnce | None:
        """Batched copies, if this driver supports them."""
        error, address, _ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", COPIES_SINCE, 0)
        return None if error or not int(address) else CopiesAtOnce(int(address))

    def rectangle(
        self, dst: int, dst_pitch: int, width: int, height: int
    ) -> Callable[[int, int, Any], None]:
        part, call = driver.CUDA_MEMCPY2D(), driver.cuMemcpy2DAsync
        part.srcMemoryType = part.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        part.WidthInBytes, part.Height, part.dstPitch = width, height, dst_pitch
        to = driver.CUdeviceptr(dst)

        def copy(src: int, pitch: int, stream: Any) -> None:
            part.dstDevice, part.srcDevice, part.srcPitch = to, src, pitch
            if (result := call(part, stream))[0]:
                check("cuMemcpy2DAsync", result)

        return copy

    def copy_to_host(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        check("cuMemcpyDtoHAsync", driver.cuMemcpyDtoHAsync(dst, src, nbytes, stream))

    def copy_from_host(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        check("cuMemcpyHtoDAsync", driver.cuMemcpyHtoDAsync(dst, src, nbytes, stream))

    def host(self, nbytes: int) -> int:
        self._pinned.append(torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True))
        return self._pinned[-1].data_ptr()

    # ficco's kernels, and the vendor's.

    @cached_property
    def has_kernels(self) -> bool:
        with self.aside():
            return can_compile("cuda") and kernels(self.device) is not None

    def kernels(self) -> Kernels:
        compiled = kernels(self.device)
        if compiled is not None:
            return compiled
        raise NotImplementedError(
            "mover 'kernel': ficco's kernels could not be compiled here, as the warning says; "
            "leave the knob out"
        )

    def unscaled(self, problem: Problem) -> str:
        capability = torch.cuda.get_device_capability(self.device)
        return lacking_on_cuda(problem, capability, cuda_release())

    @cached_property
    def untiled(self) -> str:  # type: ignore[override]
        major, minor = torch.cuda.get_device_capability(self.device)
        if (major, minor) != (9, 0):
            return f"a product whose tiles wait needs compute capability 9.0, not {major}.{minor}"
        if not can_compile("cuda"):
            return "a product whose tiles wait could not be compiled: there is no nvrtc, nor nvcc"
        return ""

    @cached_property
    def shared(self) -> bool:  # type: ignore[override]
        # PyTorch refuses ranks that share a GPU unless this variable is set.
        return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"

    @cached_property
    def _tiled(self) -> TiledProducts:
        with self.aside():
            return hopper_products(self.index, self.stream_for("uploads").torch)

    def tiled(self) -> TiledProducts:
        return self._tiled

    @cached_property
    def _adder(self) -> CublasLt | None:
        with contextlib.suppress(OSError, BackendError), self.aside():
            return CublasLt()
        return None

    def add_product(
        self, addend: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, stream: Any
    ) -> bool:
        adder = self._adder
        if adder is None or not adder.serves(addend, a, b, out):
            return False
        # From PyTorch's allocator, like the workspaces of PyTorch: each graph gets its own, so that
        # graphs may run concurrently.
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=self.device)
        return adder.multiply(addend, a, b, out, workspace, stream)


def engine(
    group: ProcessGroup,
    device: torch.device,
    signals: str,
    timeout_s: float,
    hosts: Hosts | None = None,
    kind: type[GpuEngine] = GpuEngine,
) -> GpuEngine:
    """Make the engine of a group's ranks on NVIDIA GPUs, of the class ``kind``."""
    return kind(group, CudaDriver(device), signals, timeout_s, hosts)
