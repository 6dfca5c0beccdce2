"""Ranks that die, stall, stay away or disagree: never a hang, and everybody learns why."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from cases import Case, call, equal, exact, make
from disturbance import Disturbance, disturb
from ranks import Died, Failure, Rank, caught, gave_up, leave, on_ranks
from test_all_gather_matmul import end_of, start_ranks

import ficco
from ficco.dma.collectives import LibraryExchange
from ficco.dma.cpu import collect
from ficco.dma.engine import Engine
from ficco.errors import BackendError, SignalTimeout
from ficco.heuristics import problem_of_sizes
from ficco.ops import call as calls
from ficco.runtime import workspace
from ficco.runtime.board import LATE_S
from ficco.runtime.workspace import Workspace, workspaces
from ficco.schedules import Schedule, plans

#: Seconds after which the calls of these tests give up on a peer.
PATIENCE_S = 1.0
#: Seconds for which they wait for a peer whose process has ended, unless that is noticed.
LONG_S = 20.0
#: Seconds that a busy machine may take on top.
SLACK_S = 2.5
#: Seconds that anything may take that waits for nobody.
AT_ONCE_S = 1.0
#: Whether a test begins with calls that are right.
WARM = pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])


def run(world: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """As :func:`ranks.run`, but what hangs here is found sooner."""
    return ranks.run(world, fn, *args, timeout=25.0, **kwargs)


def everyone(at: Rank, *cases: Case) -> Any:
    """A group of all ranks, after calls of these cases."""
    group = dist.new_group(list(range(at.world)))
    for iteration, case in enumerate(cases):
        exact(at, case, iteration, group)
    return group


def timed(fn: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returned, or its :class:`Failure`, and its seconds."""
    started = time.monotonic()
    try:
        found = fn()
    except (Exception, KeyboardInterrupt) as error:
        found = ranks.failure(error)
    return found, time.monotonic() - started


def seen(
    group: Any,
    first: Callable[[], Any],
    again: Callable[[], Any] | None = None,
    patience: float = PATIENCE_S,
    end: Callable[[Any], None] = leave,
) -> dict[str, Any]:
    """What a rank sees of a call in which something is wrong, of the next one, and of the end of
    the group."""
    with ficco.options(timeout_s=patience):
        found, waited = timed(first)
        found_again, waited_again = timed(again or first)
    torn, teardown = timed(partial(end, group))
    return {
        "first": found if isinstance(found, Failure) else None,
        "waited": waited,
        "again": found_again if isinstance(found_again, Failure) else None,
        "waited_again": waited_again,
        "torn": torn,
        "teardown": teardown,
    }


def outcome(at: Rank, case: Case, group: Any = None, **how: Any) -> dict[str, Any]:
    """What a rank sees of a call of a case."""
    made = make(at, case.on(a="plain"), 5, group)
    return seen(group, lambda: call(case, made.a, made.b, group), **how)


def assert_timed_out(
    found: dict[str, Any], rank: int, peer: int, case: Case, ended: bool = False
) -> list[dict[str, Any]]:
    """The whole story of one survivor, perhaps of the end of its peer's process; the facts of the
    waits that were given up, by this rank or by another survivor."""
    first = found["first"]
    facts = gave_up(first)
    for one in facts:
        assert one["operator"] == "all_gather_matmul"
        assert one["rank"] == rank if first.type == "SignalTimeout" else one["rank"] != rank
        # A library's collective does not tell for whom it waits.
        told = not ("collective" in case.schedule and one["peer"] is None)
        assert one["peer"] == (peer if told else None), first.text
        assert one["step"]
        assert one["schedule"] == case.schedule or one["schedule"] == "none yet"
        assert 0 < one["seconds"] <= PATIENCE_S + SLACK_S
        assert one["ended"] == ended, first.text
    assert found["waited"] < (AT_ONCE_S if ended else PATIENCE_S) + SLACK_S
    assert_unusable(found)
    return facts


#: How a call begins the error of an earlier one.
EARLIER = "an earlier call of this group failed: "


def assert_unusable(found: dict[str, Any]) -> None:
    """The next call raises at once, and the group can be torn down."""
    assert isinstance(found["again"], Failure), found["again"]
    assert found["again"].type == found["first"].type
    assert found["again"].text == EARLIER + found["first"].text.removeprefix(EARLIER)
    assert found["again"].text.count("ficco.close(group)") == 1
    assert found["waited_again"] < AT_ONCE_S
    assert found["torn"] is None, found["torn"]
    assert found["teardown"] < 5


# Ranks that die.


def test_of_a_lost_connection_the_rank_whose_process_ends_is_named() -> None:
    """Though another one is behind, and the process is gone only a moment later."""
    _, plan, _ = plans(
        problem_of_sizes("all_gather_matmul", 12, 8, 8, "float32", 3),
        Schedule.parse("serial:collective"),
    )
    step = next(i for i, one in enumerate(plan.steps) if one.op == "collective")
    looks = iter([(2, False)] * 3)
    engine: Any = SimpleNamespace(
        interrupt=lambda: None, group=None, hosts=SimpleNamespace(named=lambda rank: "")
    )
    engine.timed_out = partial(Engine.timed_out, engine)
    state = SimpleNamespace(check=lambda: None, timeout_s=LONG_S)

    def lost() -> Any:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(SignalTimeout) as raised:
        program: Any = SimpleNamespace(plan=plan)
        call: Any = SimpleNamespace(state=state)
        collect(engine, program, call, step, lambda: next(looks, (0, True)), lost)
    assert (raised.value.peer, raised.value.ended) == (0, True)


def _with_a_casualty(at: Rank, case: Case, victim: int, how: str, warm: bool) -> dict[str, Any]:
    """``how``: a signal, or "before" if the process has ended when its peers call."""
    for iteration in range(3 * warm):
        exact(at, case, iteration)
    at.barrier()
    if at.rank == victim:
        # Rank 0 holds the store: it dies with it.
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    if how == "before":
        time.sleep(0.3)
    # The end of a process that has used the group is noticed, however long a call may wait.
    return outcome(at, case, patience=LONG_S if warm and how != "stop" else PATIENCE_S)


@pytest.mark.parametrize(
    ("world", "victim", "schedule", "how", "warm"),
    [
        (3, 0, "serial:collective", "kill", True),
        (3, 0, "serial:collective", "kill", False),
        (3, 1, "growing", "kill", False),
        (3, 0, "shrinking:pull", "before", True),
        # A rank that is there and does nothing, as under a debugger.
        (2, 0, "hetero-fused-2d", "stop", True),
        (2, 1, "hetero-fused-2d", "stop", False),
        (2, 0, "hetero-fused-2d", "stop", False),
    ],
)
def test_lost_rank(world: int, victim: int, schedule: str, how: str, warm: bool) -> None:
    case, stops = equal(world, 8, 8, 8, schedule=schedule), how == "stop"
    lost: Any = {"fresh": True, "catch": True, "lost": {victim} if stops else ()}
    found = run(world, _with_a_casualty, case, victim, how, warm, **lost)
    if not stops:
        assert isinstance(found[victim], Died) and found[victim].exitcode == -signal.SIGKILL
    for rank in {*range(world)} - {victim}:
        first = found[rank]["first"]
        if stops and not warm and victim == 0:
            # The store has stopped, too: what asks it can only give up.
            assert first.type == "SignalTimeout", found[rank]
            continue
        ended = not stops and (warm or bool(gave_up(first)[0]["ended"]))
        assert_timed_out(found[rank], rank, victim, case, ended)


SURVIVOR = """
import os, signal, sys
import torch
import torch.distributed as dist
import ficco

torch.set_num_threads(1)
victim, how = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
a, b = torch.ones(4, 8), torch.ones(8, 4)
for _ in range(3):
    ficco.all_gather_matmul(a, b, schedule="growing")
print("warm", flush=True)
if dist.get_rank() == victim:
    os.kill(os.getpid(), signal.SIGKILL)
with ficco.options(timeout_s=1.5):
    try:
        ficco.all_gather_matmul(a, b, schedule="growing")
    except ficco.SignalTimeout as error:
        print("caught", error, flush=True)
        if how == "uncaught":
            raise
"""


@pytest.mark.parametrize(("victim", "how"), [(0, "caught"), (1, "uncaught")])
def test_survivors_end_by_themselves(victim: int, how: str, tmp_path: Path) -> None:
    """No launcher, no close(), no destroy_process_group(): the process still ends."""
    found = end_of(start_ranks(tmp_path, SURVIVOR, 2, str(victim), how), 40)
    assert found[victim][0] == -signal.SIGKILL
    code, out, err = found[1 - victim]
    assert "caught" in out, err
    assert code == (0 if how == "caught" else 1), err
    assert ("SignalTimeout" in err) == (how == "uncaught")
    assert "Fatal Python error" not in err and "Exception ignored" not in err


# Ranks that stall, stay away, or are late.


@pytest.mark.parametrize(
    ("victim", "schedule", "step", "warm"),
    [
        (1, "serial:collective", 0, False),
        (2, "growing:pull", 2, False),
        (1, "tiled:pieces=2", 1, True),
        (1, "tiled:pieces=2,pull", 0, False),
    ],
)
@on_ranks(3, timeout=25.0)
def test_stalled_rank(at: Rank, victim: int, schedule: str, step: int, warm: bool) -> None:
    case = equal(3, 8, 8, 8, schedule=schedule)
    group = everyone(at, *[case] * warm)
    with disturb(Disturbance(stall=(victim, step))):
        found = outcome(at, case, group)
    exact(at, equal(at.world, 4, 4, 4), 1)  # the rest of the process is well
    if at.rank == victim:  # its own call ends, too
        gave_up(found["first"])
        assert found["waited"] < 2 * PATIENCE_S + SLACK_S
        return
    for one in assert_timed_out(found, at.rank, victim, case):
        if schedule == "tiled:pieces=2":  # the piece that did not come: its rows
            assert re.match(r"all (8:12|12:16) \(", one["step"])


@pytest.mark.parametrize(
    ("victim", "schedule", "warm"),
    [
        (0, "shard-overlap", False),
        (2, "serial:collective", True),
        (2, "serial:collective", False),
        (1, "tiled", True),
    ],
)
@on_ranks(3, timeout=25.0)
def test_rank_that_never_calls(at: Rank, victim: int, schedule: str, warm: bool) -> None:
    """As the text of a timeout says, the group is closed on every rank and used again."""
    case = equal(3, 8, 8, 8, schedule=schedule)
    group, found = everyone(at, *[case] * warm), None
    if at.rank != victim:
        found = outcome(at, case, group, end=ficco.close)
    at.barrier()
    if found is None:
        ficco.close(group)
    for iteration in (2, 3):
        # gloo would go on with the data of the collective that was broken off.
        again = case.on(schedule="growing") if "collective" in case.schedule else case
        exact(at, again, iteration, group)
    leave(group)
    exact(at, equal(at.world, 4, 4, 4), 1)
    if found is None:
        return
    assert_timed_out(found, at.rank, victim, case)
    if not warm:
        text = found["first"].text
        says = f"s for rank {victim} to join the first call of this group (find out which ranks"
        assert says in text and "schedule" not in text, text


@WARM
@on_ranks(2, timeout=25.0)
def test_keyboard_interrupt_ends_a_wait(at: Rank, warm: bool) -> None:
    case = equal(2, 4, 4, 4, schedule="growing:copy=2")
    group = everyone(at, *[case] * warm)
    if at.rank == 0:
        made = make(at, case, 1, group)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        error, waited = timed(lambda: call(case, made.a, made.b, group))
        assert error.type == "KeyboardInterrupt"
        assert waited < 0.3 + AT_ONCE_S
    at.barrier()
    leave(group)


def test_ctrl_c_leaves_gradients_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = torch._C._set_grad_enabled

    def pressed(enabled: bool) -> None:
        switch(enabled)
        if not enabled:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch._C, "_set_grad_enabled", pressed)
    with pytest.raises(KeyboardInterrupt):
        workspace.execute(*[mock.Mock()] * 3)  # it never gets to them
    assert torch.is_grad_enabled()


# Ranks that disagree.

BASE = equal(3, 8, 8, 8, schedule="hetero-fused-1d")


#: What the ranks have computed before they disagree: nothing; what most of them ask for; or both,
#: so that no rank's call is new to it and asks the others.
BEFORE = ("first", "new here", "warm")


def _mismatch(
    at: Rank, mine: dict[str, Any], odd: int, before: str, caps: tuple[int | None, int | None]
) -> dict[str, Any]:
    group, other, is_odd = everyone(at), BASE.on(**mine), at.rank == odd
    for iteration in range(3 * BEFORE.index(before)):
        is_other = before == "warm" and iteration % 2 == 1
        with ficco.options(workspace_bytes=caps[is_other]):
            exact(at, other if is_other else BASE, iteration, group)
    with ficco.options(workspace_bytes=caps[is_odd]):
        found = outcome(at, other if is_odd else BASE, group)
    exact(at, equal(at.world, 4, 4, 4), 1)  # other groups are well
    return found


MISMATCHES = {
    "rows": {"rows": (9, 9, 9)},
    "rows=": {"rows": (8, 10, 6)},
    "k": {"k": 9},
    "n": {"n": 16},
    "dtype": {"dtype": "bfloat16"},
    "schedule": {"schedule": "growing"},
    "knob": {"schedule": "hetero-fused-1d:pull"},
    "mover": {"schedule": "serial:collective"},
    "return_gathered": {"gathered": True},
}


def assert_mismatch(found: list[dict[str, Any]], odd: int) -> None:
    for rank, mine in enumerate(found):
        first = mine["first"]
        assert isinstance(first, Failure) and first.type == "RankMismatch", (rank, first)
        values = first.fields["values"]
        assert sorted(values) == [0, 1, 2]
        same = {value for peer, value in values.items() if peer != odd}
        assert len(same) == 1 and values[odd] not in same, values
        assert f"rank {odd}:" in first.text and "rows=" in first.text
        assert mine["waited"] < PATIENCE_S + SLACK_S
        assert_unusable(mine)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("what", [*MISMATCHES, "workspace_bytes"])
def test_mismatch(what: str, before: str) -> None:
    odd, caps = len(what) % 3, (None, 100_000 if what == "workspace_bytes" else None)
    assert_mismatch(run(3, _mismatch, MISMATCHES.get(what, {}), odd, before, caps), odd)


@WARM
@on_ranks(3)
def test_mismatch_of_symmetric_memory(at: Rank, warm: bool) -> None:
    """Peers would read from where one rank's shard is not."""
    group, case = everyone(at), equal(at.world, 8, 8, 8, schedule="growing:pull")
    symmetric = ficco.empty((8, 8), dtype=torch.float32, group=group)
    made = make(at, case, 0, group)
    if warm:
        exact(at, case, 0, group)
        call(case, symmetric.copy_(made.a), made.b, group)
    a = symmetric.copy_(made.a) if at.rank == 1 else made.a
    found = seen(group, lambda: call(case, a, made.b, group))
    assert found["first"].type == "RankMismatch", found["first"]
    assert found["waited"] < PATIENCE_S + SLACK_S


@on_ranks(2)
def test_slices_of_symmetric_memory_are_none_on_every_rank(at: Rank) -> None:
    """A matrix of one row is contiguous at any stride: on one rank, and not on the next."""
    group = everyone(at)
    rows = (1, 3)
    whole = ficco.empty((3, 16), dtype=torch.float32, group=group).fill_(1.0)
    b = torch.ones(8, 4)
    for schedule in ("growing", "growing:pull"):
        a = whole[: rows[at.rank], :8]
        y = ficco.all_gather_matmul(a, b, rows=rows, schedule=schedule, group=group)
        assert y.shape == (4, 4) and (y == 8).all()
    leave(group)


@on_ranks(2, timeout=25.0)
def test_unfinished_collective_does_not_hold_the_process(at: Rank) -> None:
    """The end of a library's group waits for its operations, inside the garbage collector, on a
    rank that its peers have let down."""
    base = equal(at.world, 8, 8, 8)
    both = [base.on(schedule=name) for name in ("serial:collective", "growing")]
    group = everyone(at, *both * 2)
    made = make(at, base, 9, group)
    with ficco.options(timeout_s=PATIENCE_S):
        found = caught(lambda: call(both[at.rank], made.a, made.b, group))
    assert isinstance(found, Failure) and found.type == "RankMismatch", found
    leave(group)
    if at.rank == 0:  # the peers still have theirs, whose connections stay open
        started = time.monotonic()
        del group
        gc.collect()
        assert time.monotonic() - started < 5
    at.barrier()


# Ranks that fail by themselves, before a call or in it.


def refuse(*_: Any, **__: Any) -> Any:
    raise MemoryError("64 GiB are not to be had")


@on_ranks(2)
def test_an_error_that_is_remembered_does_not_keep_the_operands(at: Rank) -> None:
    """Operands of the call that failed and of those refused since; nor does the error grow by the
    frames of every call that is refused for it."""
    case = equal(at.world, 8, 8, 8, schedule="growing")
    group = everyone(at, case)

    def refuse(*_: Any) -> Any:
        raise BackendError("hipMalloc", "hipErrorOutOfMemory", "no memory")

    there = []
    with pytest.MonkeyPatch.context() as patch, ficco.options(timeout_s=PATIENCE_S):
        if at.rank == 1:
            patch.setattr(workspace, "execute", refuse)
        for iteration in (1, 2, 3):
            made = make(at, case, iteration, group)
            left = weakref.ref(made.a)
            gc.collect()
            gc.disable()
            try:
                outcome = caught(partial(call, case, made.a, made.b, group))
                del made
                assert isinstance(outcome, Failure)
                there.append(left() is not None)
            finally:
                gc.enable()
    at.barrier()
    leave(group)
    # The CPU engine's own error of a call that was under way goes with the next collection.
    assert there[1 - at.rank :] == [False] * (2 + at.rank), there


#: What a call that goes by columns is refused: whose function it is, its name, and which call of
#: it. Operands are allocated for the whole and for each part.
REFUSED = {
    "all columns": (torch.Tensor, "new_empty", 1),
    "a part": (calls, "run", 2),
    "a part of all ranks": (calls.ProductCall, "allocate", 3),
}


def _by_columns(at: Rank, what: str, victims: tuple[int, ...], warm: bool) -> list[Any]:
    group, (owner, name, number) = everyone(at), REFUSED[what]
    a, b = torch.ones(16, 8), torch.ones(8, 250)
    turns, right = count(1), getattr(owner, name)

    def once_refused(*args: Any, **more: Any) -> Any:
        return refuse() if next(turns) == number else right(*args, **more)

    def summed() -> bool:
        y = ficco.matmul_reduce_scatter(a, b, group=group, schedule="shard-overlap")
        return bool((y == 16).all())

    with ficco.options(timeout_s=LONG_S, workspace_bytes=6000):
        assert not warm or summed()
        with pytest.MonkeyPatch.context() as patch:
            if at.rank in victims:
                patch.setattr(owner, name, once_refused)
            found = [timed(summed)]
        found.append(timed(summed))
    at.barrier()
    leave(group)
    return found


@WARM
def test_a_rank_without_memory_for_all_columns_tells_its_peers(warm: bool) -> None:
    ((other, waited), _), ((odd, _), _) = run(2, _by_columns, "all columns", (1,), warm)
    assert odd.type == "MemoryError"
    assert other.type == "RankMismatch", other
    assert "MemoryError: 64 GiB are not to be had" in other.fields["values"][1]
    assert waited < AT_ONCE_S + SLACK_S


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails_between_parts_of_a_call_is_named(victim: int) -> None:
    found = run(2, _by_columns, "a part", (victim,), True)
    assert [error.type for error, _ in found[victim]] == ["MemoryError", "FiccoError"]
    for error, waited in found[1 - victim]:
        assert error.type == "PeerFailed"
        assert error.fields["reasons"] == {victim: "MemoryError: 64 GiB are not to be had"}
        assert waited < AT_ONCE_S + SLACK_S


def test_a_part_of_a_call_that_all_ranks_refuse_breaks_nothing() -> None:
    for (first, _), (again, _) in run(2, _by_columns, "a part of all ranks", (0, 1), True):
        assert first.type == "MemoryError" and again is True


# Ranks that fail alone in the middle of a call.

#: Where a rank fails, and what is made to raise there.
PLACES: dict[str, tuple[Any, str]] = {
    "copy thread": (ctypes, "memmove"),
    "caller's thread": (torch, "mm"),
    "collective": (LibraryExchange, "starts"),
    "memory": (Workspace, "slot"),
    "operations": (workspace, "compile"),
    "cache": (Workspace, "keep"),
}
#: Errors, and what their peers are told of them.
ERRORS: dict[str, tuple[Callable[[], BaseException], str]] = {
    "BackendError": (
        lambda: ficco.BackendError("memmove", "EFAULT", "bad\nand more"),
        "BackendError: memmove failed with EFAULT: bad",
    ),
    "MemoryError": (lambda: MemoryError("64 GiB\nand more"), "MemoryError: 64 GiB"),
    "KeyboardInterrupt": (KeyboardInterrupt, "KeyboardInterrupt"),
}


def _fails_alone(
    at: Rank, schedule: str, place: str, kind: str, warm: bool, victim: int
) -> dict[str, Any]:
    case = equal(at.world, 8, 8, 8, schedule=schedule)
    group = everyone(at, *[case] * 3 * warm)
    made = make(at, case, 4, group)
    threads: list[bool] = []

    def fail(*_: Any, **__: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        raise ERRORS[kind][0]()

    with pytest.MonkeyPatch.context() as patch:
        if at.rank == victim:
            patch.setattr(*PLACES[place], fail)
        found = seen(group, lambda: call(case, made.a, made.b, group), patience=LONG_S)
    return {**found, "in the caller": threads}


def _all_fail_alone(at: Rank, cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    found = [_fails_alone(at, *case) for case in cases]
    exact(at, equal(at.world, 4, 4, 4), 1)  # the rest of the process is well
    return found


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_alone_is_named_at_once(place: str) -> None:
    schedules = ["growing", "hetero-fused-1d:pull"]
    schedules = ["serial:collective"] if place == "collective" else schedules
    cases = []
    for turn, (schedule, kind) in enumerate(product(schedules, ERRORS)):
        warm = turn % 2 == 0 and place not in ("operations", "cache")  # there in a warm call
        cases.append((schedule, place, kind, warm, (turn + turn // 3) % 3))
    for case, *found in zip(cases, *run(3, _all_fail_alone, cases), strict=True):
        *_, kind, _, victim = case
        told = ERRORS[kind][1]
        for rank, mine in enumerate(found):
            text = f"{case}, rank {rank}: {mine}"
            assert mine["waited"] < AT_ONCE_S + SLACK_S, text
            assert mine["waited_again"] < AT_ONCE_S + SLACK_S, text
            assert mine["torn"] is None and mine["teardown"] < 5, text
            if rank == victim:  # it has its own error, and its group is lost
                assert mine["first"] and mine["first"].type == kind, text
                assert mine["again"].type == (kind if kind == "BackendError" else "FiccoError")
                assert told.split(": ", 1)[-1] in mine["again"].text
                assert mine["in the caller"][0] == (place != "copy thread"), text
                continue
            # A rank that had all it needed ends this call well, and fails in the next.
            error = mine["first"] or mine["again"]
            assert isinstance(error, Failure) and error.type == "PeerFailed", text
            assert error.fields["reasons"] == {victim: told}, text
            assert f"rank {victim} failed: {told}. " in error.text
            assert "output of rank" in error.text and "ficco.close(group)" in error.text
            assert mine["again"].text == EARLIER * bool(mine["first"]) + error.text
        if place != "caller's thread":
            assert all(mine["first"] for mine in found), case


@pytest.mark.parametrize(
    ("schedule", "then"),
    [
        ("shrinking", ["right"] * 3),
        # The library would take what the peers sent before for data of the next call.
        ("serial:collective", ["FiccoError", "RankMismatch", "FiccoError"]),
    ],
)
@on_ranks(3, timeout=25.0)
def test_a_closed_group_never_takes_data_of_a_call_that_was_broken_off(
    at: Rank, schedule: str, then: list[str]
) -> None:
    """Rank 1 refuses a call, and the group is used again as the error says."""
    case = equal(at.world, 8, 8, 8, schedule=schedule)
    group = everyone(at, *[case] * 3)
    made = make(at, case, 4, group)
    with pytest.MonkeyPatch.context() as patch, ficco.options(timeout_s=PATIENCE_S):
        if at.rank == 1:
            patch.setattr(calls.ProductCall, "allocate", refuse)
        found = [caught(lambda: call(case, made.a, made.b, group))]
    ficco.close(group)
    for name in (schedule, "growing"):
        found.append(caught(lambda name=name: exact(at, case.on(schedule=name), 5, group)))
        if isinstance(found[-1], Failure):
            dist.barrier()
            ficco.close(group)
    dist.destroy_process_group(group)
    kinds = [one.type if isinstance(one, Failure) else "right" for one in found]
    assert kinds == ["MemoryError" if at.rank == 1 else "RankMismatch", then[at.rank], "right"]


@on_ranks(3, timeout=25.0)
def test_what_a_watchdog_tells_while_a_call_begins_is_not_lost(at: Rank) -> None:
    """A watchdog finds that an earlier call is stuck just before the next is written down."""
    case = equal(at.world, 8, 8, 8)
    group = everyone(at, *[case] * 3)
    made, operands = make(at, case, 4, group), calls.ProductCall.allocate
    (workspace,) = workspaces(group)
    late = ficco.SignalTimeout(operator="x", rank=1, peer=0, seconds=1.0)

    def fail(*args: Any) -> Any:
        watchdog = threading.Thread(target=workspace.fail, args=[late])
        watchdog.start()
        watchdog.join()
        return operands(*args)

    with pytest.MonkeyPatch.context() as patch, ficco.options(timeout_s=20):
        if at.rank == 1:
            patch.setattr(calls.ProductCall, "allocate", fail)
        found = [timed(lambda: call(case, made.a, made.b, group)) for _ in range(2)]
    leave(group)
    assert found[1][0].type == ("SignalTimeout" if at.rank == 1 else "PeerFailed"), found
    assert sum(seconds for _, seconds in found) < LATE_S + SLACK_S


def _gives_up(at: Rank, case: Case, warm: bool) -> list[tuple[Any, float]]:
    """Rank 0 has little patience with rank 2, the others have a lot."""
    group = everyone(at, *[case if warm else case.on(n=24)] * 4)
    made = make(at, case, 4, group)
    if at.rank == 2:
        time.sleep(PATIENCE_S + LATE_S + 0.5)
    with ficco.options(timeout_s=20 if at.rank else PATIENCE_S):
        found = [timed(lambda: call(case, made.a, made.b, group)) for _ in range(2)]
    leave(group)
    return found


@pytest.mark.parametrize(
    ("schedule", "warm"), [("hetero-fused-1d:pull", False), ("serial:collective", True)]
)
def test_who_gave_up_waiting_is_not_waited_for(schedule: str, warm: bool) -> None:
    gone, waiting, late = run(3, _gives_up, equal(3, 8, 8, 8, schedule=schedule), warm)
    assert gone[0][0].type == "SignalTimeout" and gone[0][0].fields["peer"] in (2, None)
    # Who comes late may still find all that it needs for this call, and fails in the next.
    told = late[0] if isinstance(late[0][0], Failure) else late[1]
    for error, waited in (waiting[0], told):
        assert isinstance(error, Failure) and error.type == "PeerFailed", error
        assert error.fields["reasons"][0].startswith("SignalTimeout: all_gather_matmul: rank 0 ")
        (facts,) = gave_up(error)
        assert facts == {name: gone[0][0].fields[name] for name in facts}
        assert waited < PATIENCE_S + LATE_S + SLACK_S
