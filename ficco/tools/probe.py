"""Probes of a device below the interface of its engine, by the engine's name, for the self-test.

No probe needs an engine, so that probes run where no engine can be made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from typing import Any, NamedTuple

import torch

from ficco.dma.driver import URGENT
from ficco.errors import BackendError
from ficco.hip_kernels.build import can_compile
from ficco.hip_kernels.launch import Kernels

#: Attributes of a device that engines use, and the fallback for an attribute of 0. Engines that are
#: not in this table or the next ones need none.
ATTRIBUTES: dict[str, dict[str, str]] = {
    "cuda": {
        "CAN_USE_64_BIT_STREAM_MEM_OPS": "schedule='serial:collective': there is no engine without",
        "CAN_FLUSH_REMOTE_WRITES": "waits without a flush of remote writes",
        "ASYNC_ENGINE_COUNT": "copies by multiprocessors",
    },
    "hip": {
        "CanUseStreamWaitValue": "kernels of ficco's that wait: FICCO_HIP=signals=kernel",
        "MultiprocessorCount": "nothing: ficco's kernels cannot be launched",
        "WallClockRate": "100 MHz, for the deadline of a kernel that waits",
    },
}
#: Further attributes of a device that a report holds.
REPORTED = {
    "cuda": "UNIFIED_ADDRESSING HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED COMPUTE_MODE".split(),
    "hip": "AsyncEngineCount UnifiedAddressing FineGrainSupport ComputeMode".split(),
}
#: Kinds of memory that processes share by handles, and the fallback of each kind. On CUDA it is
#: PyTorch's symmetric memory alone.
SHARED: dict[str, dict[str, str]] = {
    "hip": {
        "plain": "PyTorch's symmetric memory: FICCO_HIP=memory=torch",
        "uncached": "signals in signal memory: FICCO_HIP=signals=signal",
        "signal": "signals in uncached memory: FICCO_HIP=signals=uncached",
    },
}
#: Further advice for an engine after a failed check of the self-test, by the name of the check.
ADVICE: dict[str, dict[str, str]] = {
    "hip": {
        "signals, first way": "the variable FICCO_HIP=signals=...",
        "copies of every size": "with the machine file of `ficco doctor --read` the engine cuts "
        "longer copies; if short ones fail, FICCO_HIP=copy=... with a value whose row passes",
        "bandwidth of all pairs": "set GPU_MAX_HW_QUEUES=16 on all ranks",
        "products beside copies": "leave HSA_ENABLE_SDMA and FICCO_HIP=memory=torch out, and try "
        "FICCO_HIP=copy=nocu if its row passes",
    },
}


#: Claims of ``docs/api/amd-claims.md`` about cards, in Markdown, which a self-test proves or
#: refutes, and how the names of their checks begin, after commas; none for a claim that the
#: self-test does not try. Engines that ran on cards have pages of results instead.
CLAIMS: dict[str, dict[str, str]] = {
    "hip": {
        "peers can map each other's memory, and copies reach it": (
            "device and, memory of, sharing of plain, FICCO_HIP=memory=ipc"
        ),
        "copies of 4 bytes to 512 MiB are exact, to and from every peer, by each call": (
            "copies of every, FICCO_HIP=copy="
        ),
        "several copies of a lane take less time in a batch": "batches of",
        "another device sees a word after the data of the copy before it": "order of copy, signals",
        "every schedule and operator is exact": "schedule, operator",
        "streams wait for words": "attribute CanUse",
        "processes can share signal memory": "sharing of signal, FICCO_HIP=signals=signal",
        "streams wait on uncached memory": "sharing of uncached, FICCO_HIP=signals=uncached",
        "copies run on SDMA engines, during GEMMs": "products beside",
        "7 copy lanes fill 7 links": "bandwidth of",
        "the watchdog works while lanes wait": "timeouts",
        "`FICCO_HIP=memory=torch`": "FICCO_HIP=memory=torch",
        "`hipMemcpy2DAsync` between devices is exact and fast": "2D copies, FICCO_HIP=columns=",
        "captured stream writes, waits and copies replay, in the captured order": "graphs",
        "code objects load, a kernel sees another's post, hiprtc compiles": (
            "kernel, copies by, FICCO_HIP=signals=kernel, attribute Multi, attribute Wall"
        ),
        "float8 GEMMs are correct": "",
        "a kernel that waits sees rows copied while it ran (`tiled`)": "product whose",
        "an event after a copy completes when that copy is over": "FICCO_HIP=events=",
        "a summing kernel reads a peer's product (`one-shot`, `two-shot`)": (
            "operator matmul_reduce_scatter, operator matmul_all_reduce"
        ),
        "any speed": "time of, figures of",
    }
}
#: Bytes of an allocation, as much as signal memory has.
_BYTES = 8
#: Seconds that a copy of them may take.
_PATIENCE_S = 5.0


def attribute(engine: str, name: str, device: torch.device, rank: int) -> int:
    """An attribute of this rank's device."""
    index = torch.cuda.current_device() if engine == "cuda" else _device(device, rank)
    # Only the module of this machine's vendor can be imported.
    binding: Any = import_module(f"ficco.dma.{'cuda_driver' if engine == 'cuda' else 'hip_api'}")
    return int(binding.attribute(name, index))


def attributes(device: torch.device) -> dict[str, int]:
    """Attributes of a GPU for a report; none of a CPU."""
    if device.type == "cpu":
        return {}
    vendor = "hip" if torch.version.hip else "cuda"
    names = *ATTRIBUTES[vendor], *REPORTED[vendor]
    return {name: attribute(vendor, name, device, device.index or 0) for name in names}


def own_kernels(device: torch.device) -> tuple[Kernels, Any]:
    """ficco's kernels for a GPU, compiled if need be, and its current stream as they take it.

    Raises:
        NotImplementedError: no compiler is here, or the device is no GPU.
        BackendError: the code cannot be compiled or loaded.
    """
    if device.type == "cpu":
        raise NotImplementedError("ficco's kernels run on GPUs")
    if not can_compile("hip" if torch.version.hip else "cuda"):
        raise NotImplementedError("no compiler for ficco's kernels is here")
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.version.hip:
        from ficco.dma import hip_api
        from ficco.dma.hip_driver import HipBinding, target_of

        hip_api.start()
        hip_api.use(index)
        target = target_of(torch.device("cuda", index))
        return Kernels(HipBinding(target, index)), hip_api.stream(stream)
    from ficco.hip_kernels.cuda_binding import CudaBinding

    return Kernels(CudaBinding(index)), stream


def _device(device: torch.device, rank: int) -> int:
    """The number of this rank's device; a double of the driver has a device for each rank."""
    from ficco.dma import hip_api

    count = hip_api.start()
    index = rank % count if device.type == "cpu" else torch.cuda.current_device()
    hip_api.use(index)
    return index


class Seen(NamedTuple):
    """Refused calls and wrong data of a rank."""

    refused: list[str]
    wrong: list[str]


def share(kind: str, device: torch.device, rank: int, gather: Callable[[Any], list[Any]]) -> Seen:
    """Test that ranks map each other's memory of a kind, read the owner's data there, and write
    data that the owner reads. Collective; ``gather`` returns the values of all ranks."""
    from ficco.dma import hip_api as hip

    outcome = Seen([], [])
    index = _device(device, rank)
    owned: list[int] = []  # memory of this rank
    mapped: dict[int, int] = {}  # memory of peers, by rank
    taken = ExitStack()  # released in the end
    host = stream = 0

    def settle() -> None:
        if not hip.drain(stream, _PATIENCE_S):
            raise BackendError("hipStreamQuery", "hipErrorNotReady", "a stream does not end")

    def read(address: int) -> list[int]:
        hip.copy(owned[0], address, _BYTES, stream)
        hip.copy_to_host(host, owned[0], _BYTES, stream)
        settle()
        return list((ctypes.c_uint32 * 2).from_address(host))

    def steps() -> Iterator[None]:
        """All ranks finish a step, without a refused call, before the next step."""
        nonlocal host, stream
        stream, host = hip.make_stream(URGENT), hip.malloc_host(_BYTES)
        taken.callback(hip.destroy_stream, stream)
        taken.callback(hip.free_host, host)
        for one in ("plain", kind):  # the first is the source and target of copies
            owned.append(hip.malloc(_BYTES, one))
            taken.callback(hip.free, owned[-1])
        for address in owned:
            hip.fill(address, _BYTES, stream)
            hip.write_32(stream, address, _mark(rank))
        settle()
        yield
        handle = hip.share(owned[1])
        yield
        met = gather((hip.bus_id(index), handle))
        numbers = {hip.bus_id(number): number for number in range(hip.start())}
        for peer, (place, handle) in enumerate(met):
            other = numbers.get(place, index)
            if other != index and not hip.reach(index, other):
                raise BackendError("hipDeviceCanAccessPeer", "0", f"no access to rank {peer}'s")
            if peer != rank:
                mapped[peer] = hip.open_shared(handle)
        yield
        for peer, address in mapped.items():
            if (seen := read(address)[0]) != _mark(peer):
                wrong = f"{seen:#x} in the memory of rank {peer}, not {_mark(peer):#x}"
                outcome.wrong.append(wrong)
        yield
        hip.write_32(stream, owned[0], _mark(rank))
        hip.copy(mapped[(rank + 1) % len(met)] + 4, owned[0], 4, stream)
        settle()
        yield
        before = (rank - 1) % len(met)
        if (seen := read(owned[1])[1]) != _mark(before):
            outcome.wrong.append(f"{seen:#x} by rank {before}, not {_mark(before):#x}")

    try:
        all_steps, over = steps(), False
        while not over:
            try:
                over = next(all_steps, True) is True
            except BackendError as error:
                outcome.refused.append(str(error))
            if any(gather(bool(outcome.refused))):
                break
        return outcome
    finally:
        for address in mapped.values():
            hip.close_shared(address)
        gather(None)  # no peer maps this rank's memory any more
        taken.close()


def _mark(rank: int) -> int:
    return 0x5EED0000 + rank
