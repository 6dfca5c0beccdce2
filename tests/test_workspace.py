"""Slots, programs and errors of a workspace; some tests use an engine that only records calls."""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, equal, exact
from ranks import Rank, caught, leave, on_ranks, run
from test_faults import everyone

import ficco
from ficco.compute.program import Program, Slot
from ficco.errors import FiccoError
from ficco.options import Options
from ficco.plan import Plan
from ficco.problems.products import Problem
from ficco.runtime import workspace as workspaces
from ficco.runtime.counters import Sums
from ficco.runtime.workspace import GRACE_S, CachedCall, Known, Workspace, remember, repeatable
from ficco.schedules import NAMED, plan


class Engine:
    """An engine without memory, whose calls are over at a set time."""

    asynchronous = True

    def __init__(self, over_at: float = 0.0) -> None:
        self.over_at = over_at
        self.did: list[str] = []
        for name in ("retire", "synchronize", "discard"):
            setattr(self, name, partial(self.do, name))

    def do(self, name: str, *_: Any) -> None:
        self.did.append(name)

    def capturing(self) -> int:
        return 0

    def slot_bytes(self, words: int, nbytes: int) -> int:
        return words

    def symmetric(self, nbytes: int) -> Any:
        raise FiccoError("a peer did not come")

    def idle(self, slots: list[Slot]) -> bool:
        return time.monotonic() >= self.over_at


class Failing(Engine):
    """An engine that fails to release each of its resources."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("discard", "free", "synchronize", "close"):
            setattr(self, name, partial(self.fail, name))

    def fail(self, name: str, *_: Any) -> None:
        self.did.append(name)
        raise FiccoError(f"{name} failed")


def workspace_on(engine: Engine, *slots: Slot | None, **more: Any) -> Workspace:
    workspace = Workspace.__new__(Workspace)
    watchdog, held = SimpleNamespace(timeout_s=0.2), {0: list(slots)}
    workspace.__dict__.update(engine=engine, watchdog=watchdog, calls=0, programs={}, error=None)
    workspace.__dict__.update({"_slots": held, "_watched": {}, "_pinned": [], "held": [], **more})
    return workspace


def a_plan() -> Plan:
    return plan(Problem("all_gather_matmul", (8,) * 2, 8, 8, "float32"), NAMED["growing"], 0)


@pytest.mark.parametrize(
    ("entries", "read"),
    [("workspace._workspaces", workspaces.workspaces), ("counters._sums", ficco.counters)],
)
def test_a_thread_may_add_a_group_while_another_lists_all(
    entries: str, read: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Key(tuple[str, ...]):
        def __iter__(self) -> Any:  # an entry is read: meanwhile another thread adds one
            existing["another", "", ""] = Sums(1)
            return super().__iter__()

    existing = {Key(("a group", "", "")): Sums(1)}
    monkeypatch.setattr(f"ficco.runtime.{entries}", existing)
    assert len(read()) == 1


def test_a_slot_that_could_not_grow_is_given_back_once() -> None:
    engine = Engine()
    workspace = workspace_on(engine, Slot(None, 1), None)
    with pytest.raises(FiccoError, match="did not come"):
        workspace.slot(a_plan(), False)
    assert workspace.slots == []
    # The workspace waits for pending work while the watchdog still has the slot.
    assert engine.did == ["retire", "synchronize", "discard"]


def test_a_call_that_meets_another_thread_inside_takes_no_number() -> None:
    """The other thread begins between the look-up of the workspace and the begin of the call."""
    inside: Any = SimpleNamespace(engine=Engine(), thread=-1, calls=7, limit_s=1.0, watchdog=None)
    with pytest.raises(FiccoError, match="one thread at a time in a group") as refused:
        Workspace.begin(inside, "all_gather_matmul", Options())
    inside.thread = 0  # the other call ends first
    Workspace.end(inside, refused.value)
    assert inside.calls == 7


def test_a_process_settles_before_it_ends() -> None:
    engine = Engine(over_at=time.monotonic() + 0.15)
    workspace = workspace_on(engine, None, None)
    workspace.settle()
    assert time.monotonic() >= engine.over_at
    stuck = workspace_on(Engine(over_at=time.monotonic() + 60), None, None)
    stuck.error = FiccoError("the watchdog said so")
    begin = time.monotonic()
    stuck.settle()
    assert time.monotonic() - begin < 10
    stuck.error = None
    stuck.settle()
    assert 0.2 + GRACE_S <= time.monotonic() - begin < 30


def _on_failing(error: FiccoError | None) -> tuple[Workspace, list[str]]:
    engine = Failing()
    calls = {"close": partial(engine.do, "board"), "post": partial(engine.do, "post")}
    board = SimpleNamespace(**calls, describe=lambda text, same_as: 1)
    more = {"closed": False, "error": error, "allocations": dict.fromkeys((1, 2), engine)}
    stop = SimpleNamespace(stop=partial(engine.do, "stop"))
    slots = Slot(None, 1), Slot(None, 1)
    return workspace_on(engine, *slots, board=board, watchdog=stop, **more), engine.did


def test_a_failed_release_does_not_stop_the_others() -> None:
    workspace, did = _on_failing(FiccoError("broken off"))
    with pytest.raises(FiccoError, match="discard failed"):
        workspace.close()
    assert did == ["stop", "discard", "discard", "free", "free", "close", "board"]
    assert not workspace.slots and workspace.closed
    workspace.close()
    assert len(did) == 7


def test_a_group_that_cannot_close_does_not_stop_others(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [_on_failing(None) for _ in range(2)]
    by_number = {number: workspace for number, (workspace, _) in enumerate(both)}
    monkeypatch.setattr(workspaces, "_workspaces", by_number)
    with pytest.raises(FiccoError, match="synchronize failed"):
        workspaces.close()
    assert not by_number
    for workspace, did in both:
        # Running work may be stuck: the error is posted to the peers, and the watchdog frees it.
        assert did[:3] == ["synchronize", "post", "stop"] and did[-1] == "board"
        assert workspace.closed and str(workspace.error) == "synchronize failed"


def test_kinds_of_calls_not_met_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "KINDS", 4)
    repeatable.clear()
    slot, graphs = Slot(None, 1), Slot(None, 1, captured=True)
    engine = Engine()
    workspace = workspace_on(engine, slot, None)
    cached_calls = {}
    for name, at, latest in (
        ("in a graph", graphs, 1),
        ("seldom", slot, 2),
        ("often", slot, 9),
        ("now and then", slot, 5),
        ("new", slot, 10),
        ("newer", slot, 11),
    ):
        program = Program(a_plan(), at, [("compute0", lambda call: None)])
        at.number(program)
        programs = {id(at): program}
        cached_calls[name] = CachedCall(a_plan(), 0, False, None, programs=programs, latest=latest)
    for name, cached in cached_calls.items():
        workspace.keep(name, cached)
        remember(name, Known(workspace, cached, Options(), ()))
    # The watchdog reads running programs from their slots: the engine is idle when one is removed.
    assert engine.did == ["synchronize"] * 2
    assert list(workspace.programs) == ["in a graph", "often", "new", "newer"]
    assert cached_calls["seldom"].programs == {} and cached_calls["often"].programs
    left = [cached_calls[name].programs[id(slot)] for name in ("often", "new", "newer")]
    assert set(map(id, slot.programs.values())) == set(map(id, left))
    assert len(graphs.programs) == 1
    assert list(repeatable) == ["newer"], "a kind without memory could be called"
    for strides in ("other strides", "others", "many strides", "too many"):
        remember(strides, Known(workspace, cached_calls["newer"], Options(), ()))
    assert list(repeatable) == ["too many"]


def test_a_closed_group_is_forgotten_where_another_engine_has_the_same_calls() -> None:
    """The key of a call names neither the engine nor the device."""
    repeatable.clear()
    guard = SimpleNamespace(check=lambda *operands: False)  # the layouts differ
    closed, open_ = workspace_on(Engine()), workspace_on(Engine())
    for workspace in (closed, open_):
        cached = CachedCall(a_plan(), 0, False, None)
        remember("kind", Known(workspace, cached, Options(), (), guard))
    closed._forget()
    assert not any(known.workspace is closed for kinds in repeatable.values() for known in kinds)


def _in_child(fn: Any) -> Any:
    """The result of a function in a forked process, which then ends as interpreters do."""
    read_end, write_end = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(write_end, pickle.dumps(caught(fn)))
            workspaces._close_at_exit()
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as answers:
        answer = answers.read() if select.select([answers], [], [], 60)[0] else b""
    if not answer:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return pickle.loads(answer) if answer else "no answer"


@pytest.mark.parametrize("schedule", ["growing", "serial:collective"])
@on_ranks(2)
def test_a_forked_process_leaves_the_group_to_its_parent(at: Rank, schedule: str) -> None:
    case = Case((4,) * at.world, 8, 8, schedule=schedule)
    group = everyone(at, case)
    held = ficco.memory(group)

    def in_child() -> Any:
        with ficco.options(timeout_s=60):
            call = caught(lambda: exact(at, case, 1, group))
            memory = caught(lambda: ficco.empty((4, 4), group=group))
        ficco.synchronize()
        ficco.close()
        return [call, memory, caught(lambda: exact(at, case, 1, group))], ficco.memory()

    assert _in_child(lambda: sum(range(10))) == 45  # like a worker of a data loader
    failures, left = _in_child(in_child)
    for iteration in range(3):  # the parent's ranks are in step, its memory is intact
        exact(at, case, iteration, group)
    assert ficco.memory(group) >= held and left == 0
    leave(group)
    for failure in failures:
        assert failure.type == "FiccoError" and "forked after ficco was used" in failure.text


@on_ranks(2)
def test_a_process_forked_during_a_first_call_is_not_taken_for_its_parent(at: Rank) -> None:
    group, case = everyone(at), equal(at.world, 4, 8, 8)
    if at.rank:
        time.sleep(0.6)
        exact(at, case, 0, group)
    else:
        waiting = threading.Thread(target=exact, args=(at, case, 0, group))
        waiting.start()
        time.sleep(0.2)
        with ficco.options(timeout_s=2):
            failure = _in_child(lambda: exact(at, case, 0, group))
        waiting.join()
        assert failure.type == "FiccoError" and "forked after ficco was used" in failure.text
    exact(at, case, 1, group)
    leave(group)


def _many_kinds(at: Rank, rounds: int) -> list[int]:
    """Calls with different rows, on ranks that cache different numbers of kinds."""
    group = everyone(at)
    before, workspaces.KINDS = workspaces.KINDS, (4, 7, 64)[at.rank]
    try:
        for iteration in range(rounds):
            rows = [(iteration % 11 + 3 * rank) % 6 for rank in range(at.world)]
            schedule = ("growing", "hetero-fused-1d:pieces=2,pull")[iteration % 3 == 0]
            exact(at, Case(tuple(rows), 8, 8, schedule=schedule), iteration, group)
        (workspace,) = workspaces.workspaces(group)
        slots = {id(slot) for slot in (None, *workspace.slots)}
        assert all(cached.programs.keys() <= slots for cached in workspace.programs.values())
        return [len(workspace.programs), sum(len(slot.programs) for slot in workspace.slots)]
    finally:
        workspaces.KINDS = before
        leave(group)


def test_ranks_may_remember_other_kinds_of_calls() -> None:
    counts = run(3, _many_kinds, 22)
    assert counts[0][0] <= 4 and counts[1][0] <= 7 < counts[2][0]


@pytest.mark.parametrize("victims", [(2,), (0, 1, 2)])
@on_ranks(3)
def test_a_rank_that_gets_no_memory_is_named(at: Rank, victims: tuple[int, ...]) -> None:
    """ficco.empty without memory on some ranks; then again, after closing if ranks differed."""
    case = Case((4,) * at.world, 8, 8)
    group = everyone(at, case)
    (workspace,) = workspaces.workspaces(group)

    def none(nbytes: int) -> Any:
        time.sleep(0.1 * at.rank)  # the first rank to fail does not go on before its peers
        raise MemoryError(f"no {nbytes} bytes")

    with ficco.options(timeout_s=20), pytest.MonkeyPatch.context() as patch:
        if at.rank in victims:
            patch.setattr(workspace.engine, "symmetric", none)
        begin = time.monotonic()
        first = caught(lambda: ficco.empty((4, 4), dtype=torch.float32, group=group))
        assert time.monotonic() - begin < 15
    assert first.type == ("MemoryError" if at.rank in victims else "RankMismatch"), first
    assert "no 64 bytes" in first.text
    if len(victims) < at.world:
        at.barrier()
        ficco.close(group)
        at.barrier()
    assert ficco.empty((4, 4), dtype=torch.float32, group=group).shape == (4, 4)
    exact(at, case, 1, group)
    leave(group)


@on_ranks(2)
def test_ranks_that_ask_for_memory_in_another_order_or_shape_are_told(at: Rank) -> None:
    """A rank asks for memory while its peer multiplies, asks for another shape, or does nothing."""
    a = torch.ones(4, 4)
    calls = {
        "memory": lambda group: ficco.empty((4, 4), group=group),
        "other": lambda group: ficco.empty((8, 2), group=group),
        "product": lambda group: ficco.all_gather_matmul(a, a, group=group),
        "nothing": lambda group: None,
    }
    for names, timeout_s, kind, words in (
        (("product", "memory"), 20, "RankMismatch", ("all_gather_matmul", "empty(shape=(4, 4)")),
        (("memory", "other"), 20, "RankMismatch", ("empty(shape=(4, 4)", "empty(shape=(8, 2)")),
        (("memory", "nothing"), 1, "SignalTimeout", ("empty: rank 0 waited 1.0 s",)),
    ):
        group = everyone(at)
        with ficco.options(timeout_s=timeout_s):
            failure = caught(partial(calls[names[at.rank]], group))
        at.barrier()
        leave(group)
        if names[at.rank] != "nothing":
            assert failure.type == kind and all(word in failure.text for word in words), failure


@on_ranks(2)
def test_memory_is_on_the_gpu_of_a_group_with_nccl(at: Rank) -> None:
    """With NCCL in the group's backends memory is on a GPU, which the ranks of this test lack."""
    for config in ("cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo", "cpu:gloo,cuda:gloo"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_backend_config", lambda group, config=config: config)
            outcome = caught(lambda: ficco.empty((2,)).device.type)
        if "nccl" in config:
            assert "got cuda" in outcome.text and "none is seen" in outcome.text, outcome
        else:
            assert outcome == "cpu"
