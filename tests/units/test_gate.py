"""Concurrent use of a device by threads of a process: ficco.dma.memories."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ficco.dma import memories
from ficco.dma.gpu import GpuEngine
from ficco.dma.host import Hosts, Near
from ficco.dma.memories import Gate

#: Timeout in seconds of a thread that may pass, on a loaded machine.
PATIENCE_S = 10.0
#: Seconds of a check that a thread has not passed.
MOMENT_S = 0.05


def entered_by_a_thread(block: AbstractContextManager[Any]) -> threading.Event:
    """Enter a block in another thread; the event is set once that thread has left it."""
    left = threading.Event()

    def run() -> None:
        with block:
            pass
        left.set()

    threading.Thread(target=run, daemon=True).start()
    return left


def test_calls_overlap_with_each_other_and_with_waits_for_the_device() -> None:
    gate = Gate()
    with gate:
        assert entered_by_a_thread(gate).wait(PATIENCE_S)
        with gate.waiting():
            assert entered_by_a_thread(gate).wait(PATIENCE_S)
    assert gate.passed == 3


def test_no_call_is_recorded_while_a_thread_waits_for_the_device() -> None:
    gate = Gate()
    with gate.waiting():
        with gate.recording() as allowed:
            assert not allowed
        with gate.waiting():
            pass
        with gate.recording() as allowed:
            assert not allowed
    with gate.recording() as allowed:
        assert allowed


def test_a_wait_for_the_device_lets_recordings_end() -> None:
    gate = Gate()
    with gate.recording() as first, gate.recording() as second:
        assert first and second
        waited = entered_by_a_thread(gate.waiting())
        assert not waited.wait(MOMENT_S)
        # Later recordings do not prolong the wait.
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            with gate.recording() as allowed:
                if not allowed:
                    break
        assert not allowed
    assert waited.wait(PATIENCE_S)


def test_a_closed_gate_admits_no_call_and_reports_calls_inside() -> None:
    gate = Gate()
    with gate, gate.closed() as idle:
        assert not idle
    with gate.closed() as idle:
        assert idle
        entered = entered_by_a_thread(gate)
        assert not entered.wait(MOMENT_S) and gate.passed == 1
    assert entered.wait(PATIENCE_S)
    assert gate.passed == 2


def test_a_thread_that_fails_or_is_interrupted_leaves_the_gate() -> None:
    gate = Gate()
    for enter in (lambda: gate, gate.recording, gate.waiting, gate.closed):
        with suppress(ValueError), enter():  # type: ignore[attr-defined]
            raise ValueError
    with gate.closed() as idle:
        assert idle

    def interrupt(condition: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt), gate.waiting():
            pass
    with gate.recording() as allowed:
        assert allowed
    assert entered_by_a_thread(gate.waiting()).wait(PATIENCE_S)


def test_a_call_that_is_interrupted_at_a_shut_gate_leaves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its entry, and no other, is removed: a call of another thread is half enqueued."""

    class Interrupted:
        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None:
            pass

    gate = Gate()
    gate.shut, gate._lock = 1, Interrupted()  # type: ignore[assignment]
    monkeypatch.setattr("ficco.dma.gpu.GATE", gate)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    engine: Any = object.__new__(GpuEngine)
    engine.device = torch.device("cuda", 0)
    for others in ([], [None]):
        gate.inside = [*others]
        with pytest.raises(KeyboardInterrupt):
            engine.execute(None, None)
        with pytest.raises(KeyboardInterrupt), gate:
            pass
        assert gate.inside == others


def test_a_handler_that_makes_a_call_or_frees_does_not_wait_for_its_own_thread() -> None:
    gate = Gate()

    @contextmanager
    def interrupted() -> Iterator[None]:
        with gate.closed(), gate, gate.closed() as idle:
            assert not idle
        yield

    assert entered_by_a_thread(interrupted()).wait(PATIENCE_S)


class Slots:
    """An engine's state of a slot; another thread adds states meanwhile."""

    def __init__(self, states: set[Slots]) -> None:
        self.states = states

    def idle(self) -> bool:
        self.states.add(Slots(self.states))
        return True


def test_memory_is_freed_while_other_threads_make_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    engine = object.__new__(GpuEngine)
    states: set[Slots] = set()
    states.update(Slots(states) for _ in range(3))
    driver = SimpleNamespace(aside=nullcontext)
    engine.__dict__.update(device=None, timeout_s=PATIENCE_S, _states=states, driver=driver)
    memory = object.__new__(memories.TorchMapped)
    memory.__dict__.update(_engine=engine, tensor=None, _handle=None)
    monkeypatch.setattr(memories, "open_engines", {engine})
    memory.free()
    assert not hasattr(memory, "tensor") and not memories.unwanted


def test_a_rendezvous_may_wait_without_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Near(dist.HashStore(), 0, 1)
    memory = torch.empty(8, dtype=torch.uint8)
    double = SimpleNamespace(rendezvous=lambda tensor, group: tensor)
    monkeypatch.setattr(memories, "_SymmetricMemory", double)
    engine: Any = SimpleNamespace(group=group, hosts=Hosts.one(group), rank=0, operator="empty")
    engine.timeout_s, engine.interrupt = float("inf"), lambda: None
    assert memories.Rendezvous(engine).meet(memory) is memory


def test_a_rendezvous_is_numbered_by_its_group() -> None:
    """Ranks whose processes count rendezvous differently exchange values, as PyTorch's C++ does."""
    common = dist.HashStore()
    stores = [memories.Renumbered(common) for _ in range(2)]
    for meeting in range(2):
        for store in stores:
            store.begin(f"token/{meeting}")
        for exchange in range(3):
            numbers = [exchange + 10 * meeting, exchange + 17 + 20 * meeting]
            # A PrefixStore is C++ and calls the store below it.
            prefixed = [dist.PrefixStore("group", store) for store in stores]
            for rank in range(2):
                value = f"{meeting} {exchange} {rank}"
                prefixed[rank].set(f"CUDASymmetricMemory/{numbers[rank]}/{rank}", value)
            for rank in range(2):
                key = f"CUDASymmetricMemory/{numbers[rank]}/{1 - rank}"
                prefixed[rank].wait([key])
                assert prefixed[rank].get(key) == f"{meeting} {exchange} {1 - rank}".encode()
