"""Conditions under which calls on a GPU are recorded. Tests of recordings themselves: tests/gpu."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ficco.compute.program import Call, Program
from ficco.dma.lane_ops import PAYING_REPLAYS, Replays, Run, settings_of
from ficco.heuristics.families import family_of
from ficco.problems.sizes import problem_of
from ficco.schedules import Schedule

CUBLAS = torch.backends.cuda.matmul


class Recorded(Replays):
    """Replays whose recordings are the names of runs; ``fails``: no call can be recorded."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(SimpleNamespace(records=True))  # type: ignore[arg-type]
        self.fails, self.attempts, self.parts = fails, 0, list[list[int]]()

    def _record(self, run: Run, call: Call, raw: int) -> Any:
        self.attempts, self.possible = self.attempts + 1, not self.fails
        self.parts.append([*call.parts])
        call.parts[self.attempts] = []  # as a step of attention does
        return None if self.fails else run.tail_lane


def kind(*lanes: str, settings: Sequence[Any] = (int,)) -> list[Program]:
    """Return the programs of a kind of call, one per slot; the name of a run is its lane."""
    slots = {}
    for number, lane in enumerate(lanes):
        run = Run([], None, [], lane, (), recordable=lane != "captured")
        state: dict[Any, Any] = {"run": run, "settings": settings}
        slots[number] = Program(None, None, [], state=state, siblings=slots)  # type: ignore[arg-type]
    return list(slots.values())


def test_the_second_use_of_operands_records_the_calls_of_all_slots() -> None:
    replays, (first, second, _) = Recorded(), kind("first", "second", "captured")
    call, another_call = Call({"a": torch.ones(2, 3)}), Call({"a": torch.ones(2, 3)})
    assert replays.find(first, call, 1) is None and replays.attempts == 0
    assert replays.find(second, call, 1) == "second" and replays.attempts == 2
    for _ in range(2):  # all slots are recorded
        assert replays.find(first, call, 1) == "first"
        assert replays.find(second, call, 1) == "second"
    assert replays.attempts == len(replays) == 2
    assert replays.parts == [[], []] and not call.parts  # a recording merges only its own parts
    assert replays.find(first, another_call, 1) is None  # other addresses
    assert replays.find(first, call, 2) is None  # another stream


#: Names that a setting has in PyTorch, and another value.
SETTINGS: dict[str, tuple[Any, str, Any]] = {
    "float16": (CUBLAS, "allow_fp16_reduced_precision_reduction", False),
    "bfloat16": (CUBLAS, "allow_bf16_reduced_precision_reduction", False),
    "float32": (CUBLAS, "allow_tf32", True),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("operator", ["all_gather_matmul", "all_gather_attention"])
def test_a_recording_serves_calls_under_the_settings_of_its_plan(operator: str, dtype: str) -> None:
    """A product reads those of its dtype, attention reads all: one is whether cuDNN may serve."""
    sizes = {"sequence": 64, "heads": 2, "head_size": 16} if "attention" in operator else {}
    problem = problem_of(operator, 2, dtype, sizes or {"m": 8, "n": 4, "k": 16})
    settings = settings_of(family_of(problem).plans(problem, Schedule.parse("serial"))[0])
    (program,), call, replays = kind("run", settings=settings), Call({}), Recorded()
    assert replays.find(program, call, 1) is None
    for name, (library, attribute, value) in SETTINGS.items():
        assert replays.find(program, call, 1) == "run"
        before = getattr(library, attribute)
        setattr(library, attribute, value)
        replayed = replays.find(program, call, 1) is not None
        setattr(library, attribute, before)
        assert replayed == (not sizes and name != dtype), name
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        assert (replays.find(program, call, 1) is None) == bool(sizes)


def test_a_call_that_cannot_be_recorded_is_tried_once() -> None:
    replays, (first, second) = Recorded(fails=True), kind("first", "second")
    call = Call({"a": torch.ones(2, 3)})
    assert [replays.find(program, call, 1) for program in (first, second)] == [None, None]
    assert replays.attempts == 1 and not replays.possible and len(replays) == 0


def recorded(replays: Recorded, programs: Sequence[Program]) -> list[bool]:
    """Whether a call of each program is a replay at its second use."""
    call = Call({})
    for program in programs:
        replays.find(program, call, 1)
    return [replays.find(program, call, 1) is not None for program in programs]


def test_the_recording_that_no_call_has_used_for_long_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four kinds that take turns keep the three recordings that fit, until one is used no more, or
    until other kinds take turns."""
    monkeypatch.setattr("ficco.dma.lane_ops.MAX_RECORDED", 3)
    monkeypatch.setattr("ficco.dma.lane_ops.UNUSED_CALLS", 20)
    replays, programs = Recorded(), [kind(lane)[0] for lane in ("a", "b", "c", "d")]
    for _ in range(3 * PAYING_REPLAYS):
        assert recorded(replays, programs) == [True, True, True, False]
    assert len(replays) == replays.attempts == 3
    for _ in range(5):
        assert recorded(replays, [programs[0], programs[2]]) == [True, True]
    assert recorded(replays, programs[2:] + programs[:2]) == [True, True, True, False]
    assert replays.attempts == 4
    others = [kind(lane)[0] for lane in ("e", "f", "g")]
    for _ in range(4):
        recorded(replays, others)
    assert recorded(replays, others) == [True, True, True] and len(replays) == 3


def test_a_freed_program_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ficco.dma.lane_ops.MAX_RECORDED", 1)
    replays, programs = Recorded(), [kind(lane)[0] for lane in ("a", "b")]
    for _ in range(PAYING_REPLAYS):
        assert recorded(replays, programs) == [True, False]
    programs.pop(0).siblings.clear()
    gc.collect()
    assert recorded(replays, programs) == [True] and len(replays) == 1


def test_calls_are_recorded_only_if_recordings_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ficco.dma.lane_ops.FREE_RECORDINGS", 2)
    replays, programs = Recorded(), [kind(lane)[0] for lane in ("a", "b", "c", "d")]
    assert recorded(replays, programs) == [True, True, False, False]
    for _ in range(PAYING_REPLAYS):
        assert recorded(replays, programs[1:2]) == [True]
    assert recorded(replays, programs[2:]) == [True, False]
    assert len(replays) == 3
