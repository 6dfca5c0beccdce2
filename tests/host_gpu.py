"""GPU engines whose tensors are on the CPU: on a double of a vendor's library, or on threads.

A stream calls back when it reaches PyTorch's work, so that products wait for the same operations as
on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from itertools import count
from typing import Any

import torch
from interpreted import HostProducts

from ficco.compute.program import Call, Op, Program
from ficco.compute.tiled.products import TiledProducts
from ficco.dma import ENGINES
from ficco.dma.driver import PLAIN, URGENT, Stream
from ficco.dma.engine import Engine
from ficco.dma.gpu import GpuEngine
from ficco.dma.memories import GATE
from ficco.errors import BackendError
from ficco.hip_kernels.build import Target


class HostTensors:
    """PyTorch's part of a driver, for tensors on the CPU.

    Attributes:
        waits: a call returns when its results are written, as on the CPU. Otherwise callers wait
            with ``ficco.synchronize``.
        error: the first error of an operation after it had been enqueued.
        named: streams by name.
    """

    def __init__(self, device: torch.device, index: int) -> None:
        super().__init__(device, index)  # type: ignore[call-arg]
        self.waits, self.error = True, None
        self.named: dict[str, Any] = {}
        self._calls: list[Call] = []  # in flight
        self._captured: dict[int, Call] = {}  # in graphs

    # The library's part.

    def host_call(self, stream: Any, function: Callable[[], None], keep: bool) -> None:
        """Let a stream call a function; ``keep`` if a graph calls it again."""
        raise NotImplementedError

    def forget_graphs(self) -> None:
        """Drop the functions of all graphs."""

    def adopt(self, storage: torch.UntypedStorage) -> None:
        """Mark memory as a device's."""

    def release(self, storage: torch.UntypedStorage) -> None:
        """Unmark memory of :meth:`adopt`."""

    def destroy_stream(self, stream: Any) -> None:
        """Destroy a stream."""

    # Replacements of PyTorch's part on GPUs.

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        self.use()
        with self.uncaptured():
            yield

    def lane(self, name: str) -> Any:
        if name not in self.named:
            self.named[name] = self.stream(self.make_stream(self._priority(name)))
        return self.named[name]

    def _priority(self, name: str) -> int:
        lane = name.split()[-1]
        if lane == "rescue":
            return int(self.rescue)
        return PLAIN if lane.startswith(("compute", "caller")) else URGENT

    def stream_for(self, name: str) -> Stream:
        self.streams.append(Stream(self.lane(name), None, self._priority(name)))
        return self.streams[-1]

    def caller(self) -> int:
        return self.raw(self.lane("caller"))

    def raw(self, stream: Any) -> int:
        return int(stream.as_c_void_p().value)

    def in_capture(self) -> bool:
        return bool(self.capturing())

    def capturing(self) -> int:
        self.use()
        return self.capture_id(self.lane("caller"))

    def on_lane(self, lane: str, op: Op) -> Op:
        return lambda call: self._run(call.state[lane], op, call)

    def _run(self, stream: Any, op: Op, call: Call) -> None:
        self.host_call(stream, partial(self._serve, op, call), id(call) in self._captured)

    def _serve(self, op: Op, call: Call) -> None:
        try:
            # Grad mode and inference mode are thread-local.
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

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        self.use()
        for stream in list(self.named.values()):
            while not self.idle(stream):
                time.sleep(1e-4)
        while self._calls:
            self._forget(self._calls.pop())

    # Around a call.

    def begin(self, call: Call, captured: bool) -> None:
        """Adopt a call's operands; operands of a captured call stay adopted."""
        for storage in _storages(call):
            self.adopt(storage)
        if captured:
            self._captured[id(call)] = call
        else:
            self._calls.append(call)

    def end(self, call: Call, stream: Any, interrupt: Callable[[], None]) -> None:
        """Wait for the results of a call if :attr:`waits` is set."""
        if not self.waits or id(call) in self._captured:
            return
        over = self.event()
        try:
            over.record(stream)
            pause = 5e-5
            while not over.over():
                interrupt()
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)  # queues need the core of this thread
            interrupt()  # ranks that disagree may have ended their calls
        finally:
            if hasattr(over, "destroy"):
                over.destroy()
        self._forget(self._calls.pop())

    def _forget(self, call: Call) -> None:
        """Release the operands; raise the first error of an operation."""
        self._give_back(call)
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _give_back(self, call: Call) -> None:
        for storage in _storages(call):
            self.release(storage)

    def close(self) -> None:
        # Operands of graphs and of interrupted calls.
        for call in (*self._captured.values(), *self._calls):
            self._give_back(call)
        self._captured.clear()
        self._calls.clear()
        streams = list(self.named.values())
        self.named.clear()
        steps = [super().close, *(partial(self.destroy_stream, stream) for stream in streams)]
        errors = []
        for step in steps:
            try:
                step()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _storages(call: Call) -> list[torch.UntypedStorage]:
    storages = [tensor.untyped_storage() for tensor in call.tensors.values()]
    return [storage for storage in storages if storage.nbytes()]


class HostEngine(GpuEngine):
    """The GPU engine on a driver with :class:`HostTensors`."""

    _sums_by_kernel = False
    allocate = Engine.allocate  # the device's memory is the host's
    keeps_made = False  # values exist only once the stream has computed them

    @property
    def work(self) -> Any:
        return self.driver

    def execute(self, program: Program, call: Call) -> None:
        driver, slot = self.work, program.slot
        driver.use()
        captured = bool(slot and slot.captured) or (slot is None and bool(driver.capturing()))
        driver.begin(call, captured)
        with GATE:
            self._execute(program, call)
        driver.end(call, call.state["compute0"], self.interrupt)

    @contextlib.contextmanager
    def around(self, program: Program, call: Call) -> Iterator[None]:
        driver, slot = self.work, program.slot
        driver.use()
        driver.begin(call, bool(slot and slot.captured))
        with super().around(program, call):
            yield
        driver.end(call, call.state["compute0"], self.interrupt)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def close(self) -> None:
        self.work.forget_graphs()  # graphs use memory that is freed next
        super().close()


# Engine on a double of HIP's library.


def adopter() -> tuple[Callable[[int, int], None], Callable[[int], None]] | None:
    """The double's functions that mark and unmark host memory as a device's; None for a library."""
    try:
        library = ctypes.CDLL("libamdhip64.so")
        adopt, forget = library.double_adopt, library.double_forget
    except (OSError, AttributeError):
        return None
    adopt.argtypes, forget.argtypes = [ctypes.c_void_p, ctypes.c_size_t], [ctypes.c_void_p]
    return adopt, forget


@cache
def _hip_on_host() -> type:
    from ficco.dma import hip_api as hip
    from ficco.dma.hip_driver import HipDriver

    launch = hip.calls.hipLaunchHostFunc

    class HipOnHost(HostTensors, HipDriver):
        usual_events = "plain"

        def __init__(self, device: torch.device, index: int, adopted: Any) -> None:
            super().__init__(device, index)
            self._adopt, self._release = adopted
            self._waiting: dict[int, tuple[Callable[[], None], bool]] = {}
            self._tickets = count(1)
            self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._called)
            self._address = int(ctypes.cast(self._function, ctypes.c_void_p).value or 0)

        def host_call(self, stream: Any, function: Callable[[], None], keep: bool) -> None:
            ticket = next(self._tickets)
            self._waiting[ticket] = function, keep
            try:
                launch(stream, self._address, ticket)
            except BackendError:
                del self._waiting[ticket]
                raise

        @cached_property
        def _tiled(self) -> TiledProducts:
            return HostProducts()

        def forget_graphs(self) -> None:
            captured = [ticket for ticket, (_, keep) in self._waiting.items() if keep]
            for ticket in captured:
                del self._waiting[ticket]

        def _called(self, ticket: int) -> None:
            function, keep = self._waiting[ticket]
            if not keep:
                del self._waiting[ticket]
            function()

        def adopt(self, storage: torch.UntypedStorage) -> None:
            self._adopt(storage.data_ptr(), storage.nbytes())

        def release(self, storage: torch.UntypedStorage) -> None:
            self._release(storage.data_ptr())

        def destroy_stream(self, stream: Any) -> None:
            hip.destroy_stream(stream)

    return HipOnHost


def hip_engine(
    group: Any, device: torch.device, signals: str, timeout_s: float, hosts: Any = None
) -> GpuEngine:
    from ficco.dma import hip_api as hip
    from ficco.dma import hip_driver

    adopted = adopter() if device.type == "cpu" else None
    if adopted is None:
        return hip_driver.engine(group, device, signals, timeout_s, hosts)
    driver = _hip_on_host()(device, group.rank() % hip.start(), adopted)
    return HostEngine(group, driver, signals, timeout_s, hosts)


def serve_cpu_tensors() -> None:
    ENGINES["hip"] = __name__, "hip_engine"
