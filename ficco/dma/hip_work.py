"""How PyTorch's work gets into the order of HIP streams.

On a GPU PyTorch enqueues it itself. On a double of the HIP library tensors are on the CPU, and a
stream calls back when their turn has come, so that products wait there for what they wait for on a
GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from ficco.dma import hip_api as hip
from ficco.dma.engine import Call, Op
from ficco.hip_kernels import Target


class Work(ABC):
    """Streams, tensors and PyTorch's operations of one device.

    Attributes:
        device: the number of the device.
        streams: those that were made, by name.
        events: how an event is recorded behind a copy, see :data:`ficco.dma.hip.EVENTS`.
    """

    device: int
    events: str = "plain"

    def __init__(self) -> None:
        self.streams: dict[str, Any] = {}

    @abstractmethod
    def caller(self) -> int:
        """The stream that a call belongs to."""

    @abstractmethod
    def stream(self, name: str, priority: int = hip.PLAIN) -> Any:
        """The stream of a name, made when first asked for."""

    @abstractmethod
    def run(self, stream: Any, op: Op, call: Call) -> None:
        """Let PyTorch do something when a stream's turn comes."""

    @abstractmethod
    def target(self) -> Target:
        """What kernels are compiled for."""

    @abstractmethod
    def tensor(self, address: int, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Memory as bytes, and an object that lives as long as a tensor looks into it."""

    @abstractmethod
    def peers(self, address: int, nbytes: int) -> torch.Tensor:
        """Memory of a peer that is mapped here, as bytes."""

    @abstractmethod
    def capturing(self) -> int:
        """A number that tells graph captures of the caller's stream apart, 0 outside of one."""

    @abstractmethod
    def begin(self, call: Call, captured: bool) -> None:
        """Take a call's operands into care; those of a captured one for good."""

    @abstractmethod
    def end(self, call: Call, stream: Any, interrupt: Callable[[], None]) -> None:
        """All of a call is enqueued; it is over when ``stream`` is through with what it holds."""

    @abstractmethod
    def settle(self) -> None:
        """All calls are over."""

    @abstractmethod
    def take(self) -> list[Any]:
        """Forget all streams; those that have to be destroyed."""


#: Streams of engines that are closed, by device and priority: PyTorch keeps a workspace of its
#: products for every stream that it has seen, and so they are used again.
_spare: dict[tuple[int, int], list[torch.cuda.Stream]] = {}


class TorchWork(Work):
    """Tensors on a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device.index
        self._device = device
        # Streams as PyTorch takes them, and their priorities, by the binding's object.
        self._torch: dict[int, tuple[torch.cuda.Stream, int]] = {}
        if not torch.version.hip:
            self.events = "write"

    def caller(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self.device))

    def capturing(self) -> int:
        if not torch.cuda.is_current_stream_capturing():
            return 0
        return hip.capture_id(hip.stream(self.caller()))

    def stream(self, name: str, priority: int = hip.PLAIN) -> Any:
        if name not in self.streams:
            # Not one of PyTorch's own, which it hands out again and again.
            if spare := _spare.get((self.device, priority)):
                made = spare.pop()
            else:
                handle = hip.make_stream(priority).as_c_void_p().value
                made = torch.cuda.ExternalStream(handle, self._device)
            self.streams[name] = found = hip.stream(made.cuda_stream)
            self._torch[id(found)] = made, priority
        return self.streams[name]

    def run(self, stream: Any, op: Op, call: Call) -> None:
        lane = self._torch.get(id(stream))
        if lane is None:  # the caller's own
            op(call)
            return
        before = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(lane[0])
        try:
            op(call)
        finally:
            torch.cuda.set_stream(before)

    def target(self) -> Target:
        properties = torch.cuda.get_device_properties(self._device)
        if torch.version.hip:
            return Target("hip", properties.gcnArchName)
        return Target("cuda", f"sm_{properties.major}{properties.minor}")

    def tensor(self, address: int, nbytes: int) -> tuple[torch.Tensor, Any]:
        keeper = _Bytes(address, nbytes)
        with torch.inference_mode(False):  # calls of other modes use it, too
            return torch.as_tensor(keeper, device=self._device), keeper

    def peers(self, address: int, nbytes: int) -> torch.Tensor:
        # PyTorch takes memory from other libraries for that of the device where it lies.
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, nbytes)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def begin(self, call: Call, captured: bool) -> None:
        pass  # PyTorch's allocator follows the caller's stream, which all lanes end with

    def end(self, call: Call, stream: Any, interrupt: Callable[[], None]) -> None:
        pass

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def take(self) -> list[Any]:
        for made, priority in self._torch.values():
            with contextlib.suppress(RuntimeError):  # of a device that has failed
                if made.query():  # else it is stuck
                    _spare.setdefault((self.device, priority), []).append(made)
        self.streams.clear()
        self._torch.clear()
        return []


class _Bytes:
    """Memory of a GPU, as PyTorch takes it from other libraries."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 2,
        }


class CallbackWork(Work):
    """Tensors on the CPU, streams of a double.

    Attributes:
        waits: a call returns when its results are there, as calls on the CPU do. Without it only
            ``ficco.synchronize`` tells when.
        error: what went wrong in an operation after it had been enqueued.
    """

    waits: bool
    error: BaseException | None

    def __init__(self, device: int, adopt: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self.device = device
        self._adopt, self._release = adopt
        self.waits, self.error = True, None
        self._calls: list[Call] = []  # under way
        self._captured: dict[int, Call] = {}  # in graphs
        self._waiting: dict[int, tuple[Op, Call]] = {}
        self._tickets = count(1)
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._serve)
        self._address = int(ctypes.cast(self._function, ctypes.c_void_p).value or 0)

    def caller(self) -> int:
        return int(self.stream("caller").as_c_void_p().value)

    def capturing(self) -> int:
        hip.use(self.device)
        return hip.capture_id(self.stream("caller"))

    def stream(self, name: str, priority: int = hip.PLAIN) -> Any:
        if name not in self.streams:
            self.streams[name] = hip.make_stream(priority)
        return self.streams[name]

    def run(self, stream: Any, op: Op, call: Call) -> None:
        ticket = next(self._tickets)
        self._waiting[ticket] = op, call
        hip.call(stream, self._address, ticket)

    def _serve(self, ticket: int) -> None:
        op, call = self._waiting[ticket]
        if id(call) not in self._captured:  # a replay serves it again
            del self._waiting[ticket]
        try:
            # Grad and inference mode belong to a thread.
            with torch.inference_mode():
                op(call)
        except BaseException as error:
            self.error = self.error or error

    def target(self) -> Target:
        return Target("hip", "gfx942")

    def tensor(self, address: int, nbytes: int) -> tuple[torch.Tensor, Any]:
        keeper = (ctypes.c_char * nbytes).from_address(address)
        return torch.frombuffer(keeper, dtype=torch.uint8), keeper

    def peers(self, address: int, nbytes: int) -> torch.Tensor:
        return self.tensor(address, nbytes)[0]

    def begin(self, call: Call, captured: bool) -> None:
        for storage in _storages(call):
            self._adopt(storage.data_ptr(), storage.nbytes())
        if captured:
            self._captured[id(call)] = call
        else:
            self._calls.append(call)

    def end(self, call: Call, stream: Any, interrupt: Callable[[], None]) -> None:
        """Results have to be there when a call returns, unless :attr:`waits` says otherwise."""
        if not self.waits or id(call) in self._captured:
            return
        over = hip.Event()
        try:
            over.record(stream)
            pause = 5e-5
            while not over.over():
                interrupt()
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)  # queues want the core that this thread looks from
            interrupt()  # ranks that disagree may be through with their calls
        finally:
            over.destroy()
        self._forget(self._calls.pop())

    def settle(self) -> None:
        while self._calls:
            self._forget(self._calls.pop())

    def _forget(self, call: Call) -> None:
        """Give the operands back; raises what went wrong in an operation."""
        self._give_back(call)
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _give_back(self, call: Call) -> None:
        for storage in _storages(call):
            self._release(storage.data_ptr())

    def take(self) -> list[Any]:
        # Those of graphs, and of calls that were broken off.
        for call in (*self._captured.values(), *self._calls):
            self._give_back(call)
        self._captured.clear()
        self._calls.clear()
        found = list(self.streams.values())
        self.streams.clear()
        return found


def _storages(call: Call) -> list[torch.UntypedStorage]:
    """Memory of a call that copies read."""
    found = [tensor.untyped_storage() for tensor in call.tensors.values()]
    return [storage for storage in found if storage.nbytes()]
