"""What a workspace keeps, with an engine that only counts."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from ficco.dma.engine import Slot
from ficco.errors import FiccoError
from ficco.plan import Plan
from ficco.problem import Problem
from ficco.schedules import NAMED, plan
from ficco.workspace import GRACE_S, Workspace


class Engine:
    """Memory that cannot be had, and calls that are over at a time."""

    def __init__(self, over_at: float = 0.0) -> None:
        self.over_at = over_at
        self.did: list[str] = []

    def capturing(self) -> int:
        return 0

    def slot_bytes(self, words: int, room: tuple[int, int]) -> int:
        return words

    def retire(self, slot: Slot) -> None:
        self.did.append("retire")

    def synchronize(self) -> None:
        self.did.append("synchronize")

    def discard(self, slot: Slot) -> None:
        self.did.append("discard")

    def symmetric(self, nbytes: int) -> Any:
        raise FiccoError("a peer did not come")

    def idle(self, slots: list[Slot]) -> bool:
        return time.monotonic() >= self.over_at


def workspace_on(engine: Engine, *slots: Slot | None) -> Workspace:
    found = Workspace.__new__(Workspace)
    found.__dict__.update(
        engine=engine,
        calls=0,
        programs={},
        error=None,
        watchdog=SimpleNamespace(timeout_s=0.2),
        _slots=list(slots),
        _captured={},
        _watched={},
        _pinned=[],
    )
    return found


def a_plan() -> Plan:
    return plan(Problem("all_gather_matmul", (8,) * 2, 8, 8, "float32"), NAMED["growing"], 0)


def test_a_slot_that_could_not_grow_is_given_back_once() -> None:
    engine = Engine()
    small = Slot(None, 1, (0, 0), (0, 0))
    workspace = workspace_on(engine, small, None)
    with pytest.raises(FiccoError, match="did not come"):
        workspace.slot(a_plan(), False)
    assert workspace.slots == []
    # Whatever may still be stuck is waited for while the watchdog can see the slot.
    assert engine.did == ["retire", "synchronize", "discard"]


def test_a_process_settles_before_it_ends() -> None:
    engine = Engine(over_at=time.monotonic() + 0.15)
    workspace = workspace_on(engine, None, None)
    workspace.settle()
    assert time.monotonic() >= engine.over_at
    stuck = workspace_on(Engine(over_at=time.monotonic() + 60), None, None)
    stuck.error = FiccoError("the watchdog said so")
    begin = time.monotonic()
    stuck.settle()
    assert time.monotonic() - begin < 0.1
    stuck.error = None
    stuck.settle()
    assert 0.2 + GRACE_S <= time.monotonic() - begin < 0.2 + GRACE_S + 2
