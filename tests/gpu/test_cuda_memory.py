"""Sources of the CUDA engine's shared memory, tested without a GPU."""

from __future__ import annotations

import ctypes
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, run
from torch._C._distributed_c10d import _SymmetricMemory

from ficco.dma.host import Hosts, Near
from ficco.dma.memories import SharedMapped
from ficco.errors import BackendError

MIB = 1 << 20


def _chosen(at: Rank) -> None:
    from ficco.dma import cuda_driver

    driver = cuda_driver.CudaDriver.__new__(cuda_driver.CudaDriver)
    driver.index, world, store = 0, dist.group.WORLD, dist.HashStore()

    def memory(
        group: Any, offers: bool = True, hosts: Hosts | None = None, backend: str | None = "CUDA"
    ) -> str:
        engine: Any = SimpleNamespace(group=group, hosts=hosts or Hosts.one(group))
        with pytest.MonkeyPatch.context() as patch:
            served = "IPC_EVENT_SUPPORTED" if offers else ""
            patch.setattr(cuda_driver, "attribute", lambda name, index: int(name == served))
            patch.setattr(_SymmetricMemory, "get_backend", lambda device: backend, raising=False)
            return driver._memory(engine)

    near = Hosts(world, tuple("aabb"), Near(store, at.rank % 2, 2))
    separate = Hosts(world, tuple("abcd"), Near(store, 0, 1))
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][at.rank // 2]
    three, single = dist.new_group([0, 1, 2]), dist.new_group([3])
    assert memory(world) == memory(dist.new_group([0, 1, 2, 3])) == "torch"
    assert (memory(pair), memory(pair, offers=False)) == ("ipc", "torch")
    assert memory(three) == "ipc" if at.rank < 3 else memory(single) == "torch"  # no peers
    assert (memory(world, hosts=near), memory(world, hosts=separate)) == ("ipc", "torch")
    # PyTorch's symmetric memory has another backend, e.g. by FSDPModule.set_symm_mem_for_comm.
    assert (memory(world, backend="NCCL"), memory(world, backend=None)) == ("ipc", "torch")
    # A group of the job's size, with ranks outside the job.
    assert memory(dist.ProcessGroup(store, at.rank, at.world)) == "ipc"


def test_subgroups_share_memory_by_handles(cuda: Any) -> None:
    run(4, _chosen)


class Device:
    """Double of CUDA's functions, on memory of this process. Handles start with a zero byte."""

    def __init__(self, driver: Any) -> None:
        self._ok, self._result = driver.CUresult.CUDA_SUCCESS, driver.CUresult
        self._handle = driver.CUipcMemHandle
        self.room, self.memory, self.opened = 8 * MIB, dict[int, Any](), list[int]()

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, Any]:
        if nbytes > self.room - sum(map(ctypes.sizeof, self.memory.values())):
            return self._result.CUDA_ERROR_OUT_OF_MEMORY, None
        buffer = (ctypes.c_char * nbytes)()
        self.memory[ctypes.addressof(buffer)] = buffer
        return self._ok, ctypes.addressof(buffer)

    def cuMemFree(self, address: int) -> tuple[Any]:
        known = self.memory.pop(address, None) is not None
        return (self._ok if known else self._result.CUDA_ERROR_INVALID_VALUE,)

    def cuGetErrorString(self, error: Any) -> tuple[Any, bytes]:
        return self._ok, error.name.encode()

    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: Any) -> tuple[Any]:
        ctypes.memset(address, value, nbytes)
        return (self._ok,)

    def cuIpcGetMemHandle(self, address: int) -> tuple[Any, Any]:
        handle = self._handle()
        ctypes.memmove(handle.getPtr(), b"\0" * 8 + address.to_bytes(56, "little"), 64)
        return self._ok, handle

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Any, Any]:
        assert flags == 1
        address = int.from_bytes(ctypes.string_at(handle.getPtr(), 64)[8:], "little")
        self.opened.append(address)
        return self._ok, address

    def cuIpcCloseMemHandle(self, address: int) -> tuple[Any]:
        self.opened.remove(address)
        return (self._ok,)


@pytest.fixture
def device(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Device:
    double = Device(cuda.driver)
    for name in dir(Device):
        if name.startswith("cu"):
            monkeypatch.setattr(cuda.driver, name, getattr(double, name))
    return double


def test_allocations_do_not_share_blocks(cuda: Any, device: Device) -> None:
    handles = cuda.CudaDriver.handles
    small, large = handles.malloc(4096, "plain"), handles.malloc(3 * MIB, "plain")
    # Each allocation has separate blocks of 2 MiB.
    assert [ctypes.sizeof(buffer) for buffer in device.memory.values()] == [2 * MIB, 4 * MIB]
    device.memory[large][0] = b"x"
    handles.fill(large, 3 * MIB, None)
    assert device.memory[large][0] == b"\0"
    shared = [handles.share(address) for address in (small, large)]
    assert [len(handle) for handle in shared] == [64, 64]
    assert [handles.open_shared(handle) for handle in shared] == device.opened == [small, large]
    handles.close_shared(small)
    assert device.opened == [large]
    handles.free(small)
    handles.free(large)
    assert not device.memory
    with pytest.raises(BackendError, match="cuMemFree"):
        handles.free(small)


def test_pytorch_frees_its_cache_before_memory_is_out(
    cuda: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles, cached = cuda.CudaDriver.handles, [device.cuMemAlloc(6 * MIB)[1]]

    def empty_cache() -> None:
        while cached:
            device.cuMemFree(cached.pop())

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 * MIB, 8 * MIB))
    handles.malloc(4 * MIB, "plain")
    assert not cached
    # The same class as PyTorch's error, so that programs can catch it.
    with pytest.raises(torch.OutOfMemoryError, match=f"required {6 * MIB} .*there are {4 * MIB}"):
        handles.malloc(5 * MIB, "plain")


def test_closing_waits_for_peers_and_not_for_tensors_of_the_caller() -> None:
    class Keeper:
        pass

    memory, keeper = SharedMapped.__new__(SharedMapped), Keeper()
    assert memory.awaited()  # the constructor may have failed early
    memory.tensor, memory._keeper = torch.ones(8), weakref.ref(keeper)
    memory._open, memory._meeting = {}, None
    assert memory.awaited()
    memory.let_go()
    assert not memory.awaited() and not memory.freeable()
    del keeper
    assert memory.awaited() and memory.freeable()
