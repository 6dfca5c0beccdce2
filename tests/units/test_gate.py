"""What threads of a process may do to a device at the same time: ficco.dma.memories."""

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

#: Seconds in which a thread that is let through gets far enough, also on a loaded machine.
PATIENCE_S = 10.0
#: Seconds in which one that is not would have shown itself.
MOMENT_S = 0.05


def beside(block: AbstractContextManager[Any]) -> threading.Event:
    """Set once a thread of its own is through with a block."""
    over = threading.Event()

    def run() -> None:
        with block:
            pass
        over.set()

    threading.Thread(target=run, daemon=True).start()
    return over


def test_calls_go_in_beside_each_other_and_beside_who_waits_for_the_device() -> None:
    gate = Gate()
    with gate:
        assert beside(gate).wait(PATIENCE_S)
        with gate.waiting():
            assert beside(gate).wait(PATIENCE_S)
    assert gate.passed == 3


def test_nothing_is_recorded_while_somebody_waits_for_the_device() -> None:
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


def test_who_waits_for_the_device_lets_recordings_end() -> None:
    gate = Gate()
    with gate.recording() as first, gate.recording() as second:
        assert first and second
        over = beside(gate.waiting())
        assert not over.wait(MOMENT_S)
        # Those that begin later do not keep it waiting.
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            with gate.recording() as allowed:
                if not allowed:
                    break
        assert not allowed
    assert over.wait(PATIENCE_S)


def test_a_closed_gate_lets_no_call_begin_and_tells_of_those_inside() -> None:
    gate = Gate()
    with gate, gate.closed() as alone:
        assert not alone
    with gate.closed() as alone:
        assert alone
        over = beside(gate)
        assert not over.wait(MOMENT_S) and gate.passed == 1
    assert over.wait(PATIENCE_S)
    assert gate.passed == 2


def test_who_fails_or_is_interrupted_leaves_the_gate() -> None:
    gate = Gate()
    for enter in (lambda: gate, gate.recording, gate.waiting, gate.closed):
        with suppress(ValueError), enter():  # type: ignore[attr-defined]
            raise ValueError
    with gate.closed() as alone:
        assert alone

    def interrupt(condition: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt), gate.waiting():
            pass
    with gate.recording() as allowed:
        assert allowed
    assert beside(gate.waiting()).wait(PATIENCE_S)


def test_a_handler_that_makes_a_call_or_frees_does_not_wait_for_its_own_thread() -> None:
    gate = Gate()

    @contextmanager
    def interrupted() -> Iterator[None]:
        with gate.closed(), gate, gate.closed() as alone:
            assert not alone
        yield

    assert beside(interrupted()).wait(PATIENCE_S)


class Slots:
    """What an engine keeps of a slot, while another thread makes more of them."""

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


def test_a_meeting_may_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Near(dist.HashStore(), 0, 1)
    memory = torch.empty(8, dtype=torch.uint8)
    torchs = SimpleNamespace(rendezvous=lambda tensor, group: tensor)
    monkeypatch.setattr(memories, "_SymmetricMemory", torchs)
    engine: Any = SimpleNamespace(group=alone, hosts=Hosts.one(alone), rank=0, operator="empty")
    engine.timeout_s, engine.interrupt = float("inf"), lambda: None
    assert memories.Rendezvous(engine).meet(memory) is memory


def test_a_rendezvous_is_numbered_by_its_group() -> None:
    """Ranks whose processes have counted differently exchange values, as PyTorch's C++ does."""
    common = dist.HashStore()
    stores = [memories.Renumbered(common) for _ in range(2)]
    for meeting in range(2):
        for store in stores:
            store.begin(f"token/{meeting}")
        for exchange in range(3):
            numbers = [exchange + 10 * meeting, exchange + 17 + 20 * meeting]
            # A PrefixStore is C++ and calls the store below it.
            torchs = [dist.PrefixStore("group", store) for store in stores]
            for rank in range(2):
                value = f"{meeting} {exchange} {rank}"
                torchs[rank].set(f"CUDASymmetricMemory/{numbers[rank]}/{rank}", value)
            for rank in range(2):
                key = f"CUDASymmetricMemory/{numbers[rank]}/{1 - rank}"
                torchs[rank].wait([key])
                assert torchs[rank].get(key) == f"{meeting} {exchange} {1 - rank}".encode()
