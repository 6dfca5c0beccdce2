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
from ranks import Died, Failure, Rank, caught, gave_up
from test_all_gather_matmul import end_of, start_ranks

import ficco
from ficco.compute import products
from ficco.dma import collectives
from ficco.dma.cpu_collectives import collect
from ficco.errors import BackendError, SignalTimeout
from ficco.heuristics import problem_of_sizes
from ficco.ops import call as calls
from ficco.runtime import invoke
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


def run(world: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """As :func:`ranks.run`, but what hangs here is found sooner."""
    return ranks.run(world, fn, *args, timeout=25.0, **kwargs)


def timed(fn: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returned, or its :class:`Failure`, and its seconds."""
    started = time.monotonic()
    return caught(fn), time.monotonic() - started


def outcome(
    at: Rank, case: Case, group: Any = None, patience: float = PATIENCE_S
) -> dict[str, Any]:
    """What a rank sees of a group in which something is wrong, to the end of the group."""
    made = make(at, case.on(a="plain"), 5, group)
    with ficco.options(timeout_s=patience):
        first, waited = timed(lambda: call(case, made.a, made.b, group))
        again, waited_again = timed(lambda: call(case, made.a, made.b, group))

    def tear_down() -> None:
        ficco.close(group)
        dist.destroy_process_group(group)

    torn, teardown = timed(tear_down)
    return {
        "first": first,
        "waited": waited,
        "again": again,
        "waited_again": waited_again,
        "torn": torn,
        "teardown": teardown,
    }


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
    state = SimpleNamespace(check=lambda: None, timeout_s=LONG_S)

    def lost() -> Any:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(SignalTimeout) as raised:
        program: Any = SimpleNamespace(plan=plan)
        call: Any = SimpleNamespace(state=state)
        collect(engine, program, call, step, lambda: next(looks, (0, True)), lost)
    assert (raised.value.peer, raised.value.ended) == (0, True)


def _with_a_casualty(
    at: Rank, case: Case, victim: int, how: str, warm: bool
) -> dict[str, Any] | None:
    if warm:
        for iteration in range(3):
            exact(at, case, iteration)
    at.barrier()
    if at.rank == victim:
        # Rank 0 holds the store: it dies with it.
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    if how == "kill-before":
        time.sleep(0.3)
    # The end of a process that has used the group is noticed, however long a call may wait.
    return outcome(at, case, patience=LONG_S if warm and how != "stop" else PATIENCE_S)


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
@pytest.mark.parametrize(
    ("victim", "schedule"),
    [
        (0, "hetero-fused-1d:pieces=4"),
        (0, "serial:collective"),
        (1, "growing"),
        (2, "uniform-unfused-1d:pull"),
    ],
)
def test_killed_rank(victim: int, schedule: str, warm: bool) -> None:
    case = equal(3, 8, 8, 8, schedule=schedule)
    found = run(3, _with_a_casualty, case, victim, "kill", warm, fresh=True, catch=True)
    assert isinstance(found[victim], Died) and found[victim].exitcode == -signal.SIGKILL
    for rank in {0, 1, 2} - {victim}:
        ended = warm or bool(gave_up(found[rank]["first"])[0]["ended"])
        assert_timed_out(found[rank], rank, victim, case, ended)


def test_rank_killed_before_the_call_began() -> None:
    case = equal(4, 8, 8, 8, schedule="shrinking:pull")
    found = run(4, _with_a_casualty, case, 0, "kill-before", True, fresh=True, catch=True)
    for rank in (1, 2, 3):
        assert_timed_out(found[rank], rank, 0, case, ended=True)


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
@pytest.mark.parametrize("victim", [0, 1])
def test_stopped_rank(victim: int, warm: bool) -> None:
    """A rank that is there and does nothing, as under a debugger."""
    case = equal(2, 8, 8, 8, schedule="hetero-fused-2d")
    found = run(
        2,
        _with_a_casualty,
        case,
        victim,
        "stop",
        warm,
        fresh=True,
        catch=True,
        lost={victim},
    )
    if warm or victim == 1:
        assert_timed_out(found[1 - victim], 1 - victim, victim, case)
    else:
        # The store has stopped, too: what asks it can only give up.
        assert found[1]["first"].type == "SignalTimeout", found[1]


def _killed_at_step(at: Rank, case: Case, victim: int, step: int) -> dict[str, Any]:
    for iteration in range(2):
        exact(at, case, iteration)
    at.barrier()
    with disturb(Disturbance(delay_s=0.005, kill=(victim, step), seed=step)):
        return outcome(at, case, patience=LONG_S)


@pytest.mark.parametrize("step", [0, 2, 4, 6])
@pytest.mark.parametrize(
    ("victim", "schedule"), [(0, "hetero-unfused-1d:pieces=2"), (2, "uniform-fused-1d:pull,copy=2")]
)
def test_rank_killed_in_the_middle_of_a_call(victim: int, schedule: str, step: int) -> None:
    from ficco.problems.products import Problem
    from ficco.schedules import Schedule, plans

    case = equal(3, 8, 8, 8, schedule=schedule)
    steps = plans(
        Problem("all_gather_matmul", case.rows, 8, 8, "float32"), Schedule.parse(schedule)
    )
    assert step < len(steps[victim].steps), "there is no such step to die at"
    found = run(3, _killed_at_step, case, victim, step, fresh=True, catch=True)
    assert isinstance(found[victim], Died) and found[victim].exitcode == -signal.SIGKILL
    timed_out = 0
    for rank in {0, 1, 2} - {victim}:
        # A survivor that had all it needed ends this call well, and fails in the next.
        first = found[rank]["first"]
        if isinstance(first, Failure):
            assert_timed_out(found[rank], rank, victim, case, ended=True)
            timed_out += 1
        else:
            assert {one["peer"] for one in gave_up(found[rank]["again"])} == {victim}
            assert found[rank]["torn"] is None
    if step < 4:
        assert timed_out, "the victim died too late to matter"


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


@pytest.mark.parametrize("how", ["caught", "uncaught"])
@pytest.mark.parametrize("victim", [0, 1])
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


def _stalled(at: Rank, case: Case, victim: int, step: int, warm: bool) -> dict[str, Any]:
    group = dist.new_group(list(range(at.world)))
    if warm:
        exact(at, case, 0, group)
    with disturb(Disturbance(stall=(victim, step))):
        found = outcome(at, case, group)
    exact(at, equal(at.world, 4, 4, 4), 1)  # the rest of the process is well
    return found


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
@pytest.mark.parametrize(
    ("victim", "schedule", "step"),
    [
        (0, "serial", 0),
        (1, "serial:collective", 0),
        (1, "hetero-fused-1d:pieces=4", 1),
        (2, "growing:pull", 2),
        (1, "tiled:pieces=2", 1),
        (1, "tiled:pieces=2,pull", 0),
    ],
)
def test_stalled_rank(victim: int, schedule: str, step: int, warm: bool) -> None:
    case = equal(3, 8, 8, 8, schedule=schedule)
    found = run(3, _stalled, case, victim, step, warm)
    for rank in {0, 1, 2} - {victim}:
        for one in assert_timed_out(found[rank], rank, victim, case):
            if schedule == "tiled:pieces=2":  # the piece that did not come: its rows
                assert re.match(r"all (8:12|12:16) \(", one["step"])
    # The stalled rank itself: its own call ends, too.
    gave_up(found[victim]["first"])
    assert found[victim]["waited"] < 2 * PATIENCE_S + SLACK_S


def _absent(at: Rank, case: Case, victim: int, warm: bool) -> dict[str, Any] | None:
    group = dist.new_group(list(range(at.world)))
    if warm:
        exact(at, case, 0, group)
    found = None
    if at.rank != victim:
        found = outcome(at, case, group)
    at.barrier()
    if at.rank == victim:
        ficco.close(group)
        dist.destroy_process_group(group)
    exact(at, equal(at.world, 4, 4, 4), 1)
    return found


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
@pytest.mark.parametrize(
    ("victim", "schedule"),
    [(0, "shard-overlap"), (2, "hetero-fused-1d"), (2, "serial:collective"), (1, "tiled")],
)
def test_rank_that_never_calls(victim: int, schedule: str, warm: bool) -> None:
    case = equal(3, 8, 8, 8, schedule=schedule)
    found = run(3, _absent, case, victim, warm)
    for rank in {0, 1, 2} - {victim}:
        assert_timed_out(found[rank], rank, victim, case)
        if not warm:
            says = f"s for rank {victim} to join the first call of this group (find out which ranks"
            text = found[rank]["first"].text
            assert says in text and "schedule" not in text, text


def _revived(at: Rank, warm: bool) -> Any:
    """As the text of a timeout says: close the group on every rank, and use it again."""
    group, case = dist.new_group(list(range(at.world))), equal(at.world, 8, 8, 8)
    if warm:
        exact(at, case, 0, group)
    made, found = make(at, case, 1, group), None
    if at.rank != 1:
        with ficco.options(timeout_s=PATIENCE_S):
            found = caught(lambda: call(case, made.a, made.b, group))
    at.barrier()
    ficco.close(group)
    for iteration in (2, 3):
        exact(at, case, iteration, group)
    ficco.close(group)
    dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
def test_a_group_that_timed_out_is_used_again(warm: bool) -> None:
    waited, _, other = run(3, _revived, warm)
    for failure in (waited, other):
        assert {one["peer"] for one in gave_up(failure)} == {1}


def _late(at: Rank, case: Case, warm: bool) -> None:
    group = dist.new_group(list(range(at.world)))
    if warm:
        exact(at, case, 0, group)
    with ficco.options(timeout_s=10):
        for iteration in range(at.world):
            if at.rank == iteration:
                time.sleep(0.5)
            exact(at, case, iteration, group)
    ficco.close(group)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
@pytest.mark.parametrize("schedule", ["hetero-fused-1d", "serial:collective"])
def test_late_rank_is_no_fault(schedule: str, warm: bool) -> None:
    run(3, _late, equal(3, 8, 8, 8, schedule=schedule), warm)


def _timeout_changes(at: Rank, case: Case) -> tuple[float, Any]:
    """The time is that of the call's own options, not of the group's first call."""
    group = dist.new_group(list(range(at.world)))
    with ficco.options(timeout_s=30):
        exact(at, case, 0, group)
    found: tuple[float, Any] = (0.0, None)
    if at.rank == 0:
        made = make(at, case, 0, group)
        with ficco.options(timeout_s=0.5):
            first, waited = timed(lambda: call(case, made.a, made.b, group))
        found = waited, first
    at.barrier()
    ficco.close(group)
    dist.destroy_process_group(group)
    return found


def test_timeout_is_that_of_the_call() -> None:
    waited, first = run(2, _timeout_changes, equal(2, 4, 4, 4))[0]
    assert isinstance(first, Failure) and first.type == "SignalTimeout"
    assert 0.5 <= waited < 0.5 + SLACK_S


def _interrupted(at: Rank, case: Case, warm: bool) -> tuple[str, float]:
    group = dist.new_group(list(range(at.world)))
    if warm:
        exact(at, case, 0, group)
    kind, waited = "", 0.0
    if at.rank == 0:
        made = make(at, case, 1, group)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        try:
            call(case, made.a, made.b, group)
        except KeyboardInterrupt:
            kind = "KeyboardInterrupt"
        waited = time.monotonic() - started
    at.barrier()
    ficco.close(group)
    dist.destroy_process_group(group)
    return kind, waited


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
def test_keyboard_interrupt_ends_a_wait(warm: bool) -> None:
    kind, waited = run(2, _interrupted, equal(2, 4, 4, 4, schedule="growing:copy=2"), warm)[0]
    assert kind == "KeyboardInterrupt"
    assert waited < 0.3 + AT_ONCE_S


def test_ctrl_c_leaves_gradients_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = torch._C._set_grad_enabled

    def pressed(enabled: bool) -> None:
        switch(enabled)
        if not enabled:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch._C, "_set_grad_enabled", pressed)
    with pytest.raises(KeyboardInterrupt):
        invoke._run(*[mock.Mock()] * 4)  # it never gets to them
    assert torch.is_grad_enabled()


# Ranks that disagree.

BASE = equal(3, 8, 8, 8, schedule="hetero-fused-1d")


#: What the ranks have computed before they disagree: nothing; what most of them ask for; or both,
#: so that no rank's call is new to it and asks the others.
BEFORE = ("first", "new here", "warm")


def _mismatch(
    at: Rank, mine: dict[str, Any], odd: int, before: str, caps: tuple[int | None, int | None]
) -> dict[str, Any]:
    group = dist.new_group(list(range(at.world)))
    other = BASE.on(**mine)
    for iteration in range(3 * BEFORE.index(before)):
        is_other = before == "warm" and iteration % 2
        with ficco.options(workspace_bytes=caps[1 if is_other else 0]):
            exact(at, other if is_other else BASE, iteration, group)
    is_odd = at.rank == odd
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
@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch(what: str, before: str) -> None:
    odd = len(what) % 3
    assert_mismatch(run(3, _mismatch, MISMATCHES[what], odd, before, (None, None)), odd)


@pytest.mark.parametrize("before", BEFORE)
def test_mismatch_of_options(before: str) -> None:
    caps = (None, 100_000)
    assert_mismatch(run(3, _mismatch, {}, 1, before, caps), 1)


def test_mismatch_names_sizes_and_schedules() -> None:
    found = run(3, _mismatch, {"k": 9, "schedule": "serial"}, 2, "first", (None, None))
    text = found[0]["first"].text
    for word in ("k=8", "k=9", "hetero-fused-1d", "serial", "ranks 0, 1"):
        assert word in text


def _symmetric_here_only(at: Rank, warm: bool) -> dict[str, Any]:
    group = dist.new_group(list(range(at.world)))
    case = equal(at.world, 8, 8, 8, schedule="growing:pull")
    symmetric = ficco.empty((8, 8), dtype=torch.float32, group=group)
    made = make(at, case, 0, group)
    if warm:
        exact(at, case, 0, group)
        call(case, symmetric.copy_(made.a), made.b, group)
    with ficco.options(timeout_s=PATIENCE_S):
        a = symmetric.copy_(made.a) if at.rank == 1 else made.a
        first, waited = timed(lambda: call(case, a, made.b, group))
    ficco.close(group)
    dist.destroy_process_group(group)
    return {"first": first, "waited": waited}


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
def test_mismatch_of_symmetric_memory(warm: bool) -> None:
    """Peers would read from where one rank's shard is not."""
    for found in run(3, _symmetric_here_only, warm):
        assert found["first"].type == "RankMismatch", found["first"]
        assert found["waited"] < PATIENCE_S + SLACK_S


def _slices_of_symmetric_memory(at: Rank) -> None:
    """A matrix of one row is contiguous at any stride: on one rank, and not on the next."""
    group = dist.new_group(list(range(at.world)))
    rows = (1, 3)[: at.world]
    whole = ficco.empty((max(rows), 16), dtype=torch.float32, group=group).fill_(1.0)
    b = torch.ones(8, 4)
    for schedule in ("growing", "growing:pull"):
        a = whole[: rows[at.rank], :8]
        y = ficco.all_gather_matmul(a, b, rows=rows, schedule=schedule, group=group)
        assert y.shape == (sum(rows), 4) and (y == 8).all()
    ficco.close(group)
    dist.destroy_process_group(group)


def test_slices_of_symmetric_memory_are_none_on_every_rank() -> None:
    run(2, _slices_of_symmetric_memory)


def _unfinished_collective(at: Rank) -> float:
    """Seconds that it takes a rank to be rid of a group on which its peers let it down."""
    group = dist.new_group(list(range(at.world)))
    case = equal(at.world, 8, 8, 8)
    names = ("serial:collective", "growing")
    for iteration in range(4):
        exact(at, case.on(schedule=names[iteration % 2]), iteration, group)
    made = make(at, case, 9, group)
    with ficco.options(timeout_s=PATIENCE_S):
        found = caught(lambda: call(case.on(schedule=names[at.rank]), made.a, made.b, group))
    assert isinstance(found, Failure) and found.type == "RankMismatch", found
    ficco.close(group)
    dist.destroy_process_group(group)
    seconds = 0.0
    if at.rank == 0:  # the peers still have theirs, whose connections stay open
        started = time.monotonic()
        del group
        gc.collect()
        seconds = time.monotonic() - started
    at.barrier()
    return seconds


def test_unfinished_collective_does_not_hold_the_process() -> None:
    """The end of a library's group waits for its operations, inside the garbage collector."""
    assert max(run(2, _unfinished_collective)) < 5


def _other_order(at: Rank) -> dict[str, Any]:
    group = dist.new_group(list(range(at.world)))
    one, two = BASE, BASE.on(n=24)
    for iteration in range(3):
        exact(at, one, iteration, group)
        exact(at, two, iteration, group)
    return outcome(at, two if at.rank == 2 else one, group)


def test_calls_in_another_order() -> None:
    assert_mismatch(run(3, _other_order), 2)


# Ranks whose arguments are wrong.


def _wrong(made: Any, what: str) -> tuple[tuple[Any, Any], dict[str, Any]]:
    a, b = made.a, made.b
    return {
        "k": ((a, b[1:]), {}),
        "rank of tensor": ((a[0], b), {}),
        "dtype": ((a, b.half()), {}),
        "device": ((a, b.to("meta")), {}),
        "schedule": ((a, b), {"schedule": "fastest"}),
        "rows": ((a, b), {"rows": [8, 8]}),
        "sparse": ((a.to_sparse(), b), {}),
        "fp8": ((a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)), {}),
        "workspace": ((a, b), {"cap": 1}),
    }[what]


def _one_wrong(at: Rank, what: str, odd: int, warm: bool) -> dict[str, Any]:
    group = dist.new_group(list(range(at.world)))
    if warm:
        for iteration in range(3):
            exact(at, BASE, iteration, group)
    made = make(at, BASE, 4, group)
    args, kwargs = _wrong(made, what) if at.rank == odd else ((made.a, made.b), {})
    kwargs = {"schedule": BASE.schedule, **kwargs}
    cap = kwargs.pop("cap", None)
    with ficco.options(timeout_s=PATIENCE_S, workspace_bytes=cap):
        first, waited = timed(lambda: ficco.all_gather_matmul(*args, group=group, **kwargs))
    with ficco.options(timeout_s=PATIENCE_S):
        again, waited_again = timed(lambda: call(BASE, made.a, made.b, group))

    def tear_down() -> None:
        ficco.close(group)
        dist.destroy_process_group(group)

    torn, teardown = timed(tear_down)
    exact(at, equal(at.world, 4, 4, 4), 1)
    return {
        "first": first,
        "waited": waited,
        "again": again,
        "waited_again": waited_again,
        "torn": torn,
        "teardown": teardown,
    }


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
@pytest.mark.parametrize(
    "what",
    [
        "k",
        "rank of tensor",
        "dtype",
        "device",
        "schedule",
        "rows",
        "sparse",
        "fp8",
        "workspace",
    ],
)
def test_one_rank_with_wrong_arguments(what: str, warm: bool) -> None:
    odd = len(what) % 3
    found = run(3, _one_wrong, what, odd, warm)
    kind = "NotImplementedError" if what == "sparse" else "ValueError"
    assert found[odd]["first"].type == kind, found[odd]["first"]
    assert found[odd]["waited"] < AT_ONCE_S + SLACK_S
    for rank in {0, 1, 2} - {odd}:
        first = found[rank]["first"]
        assert isinstance(first, Failure) and first.type == "RankMismatch", first
        # The others learn what was wrong there, not only that something was.
        assert kind in first.fields["values"][odd], first.text
        assert found[rank]["waited"] < PATIENCE_S + SLACK_S
        assert_unusable(found[rank])
    # Alone in the group, the rank that was wrong fails as well, and waits for nobody.
    assert isinstance(found[odd]["again"], Failure)
    assert found[odd]["again"].type == "RankMismatch", found[odd]["again"]


# Ranks that fail by themselves, before a call or in it.


#: Whose functions run out of memory, by their names.
OWNERS: dict[str, Any] = {
    "row_major": calls,
    "allocate": calls.ProductCall,
    "execute": invoke,
    "keep": Workspace,
}


def _short_of_memory(at: Rank, case: Case, warm: bool, what: str) -> dict[str, Any]:
    group = dist.new_group(list(range(at.world)))
    if warm:
        for iteration in range(3):
            exact(at, case, iteration, group)
    made = make(at, case, 4, group)

    def refuse(*_: Any) -> Any:
        raise MemoryError("64 GiB are not to be had")

    with pytest.MonkeyPatch.context() as patch:
        if at.rank == 1:
            patch.setattr(OWNERS[what], what, refuse)
        with ficco.options(timeout_s=10 * PATIENCE_S):
            first, waited = timed(lambda: call(case, made.a, made.b, group))
    with ficco.options(timeout_s=PATIENCE_S):
        again, waited_again = timed(lambda: call(case, made.a, made.b, group))
    at.barrier()
    ficco.close(group)
    dist.destroy_process_group(group)
    return {"first": first, "waited": waited, "again": again, "waited_again": waited_again}


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
@pytest.mark.parametrize("what", ["row_major", "allocate", "execute"])
def test_a_rank_without_memory_tells_its_peers(what: str, warm: bool) -> None:
    """At once: none of them waits for as long as a call may take."""
    _without_memory(equal(2, 8, 8, 8, schedule="growing"), warm, what)


def test_a_rank_that_cannot_remember_a_call_tells_its_peers() -> None:
    _without_memory(equal(2, 8, 8, 8, schedule="growing"), False, "keep")


def _without_memory(case: Case, warm: bool, what: str) -> None:
    other, odd = run(2, _short_of_memory, case, warm, what)
    assert odd["first"].type == "MemoryError"
    # One that has not agreed to the call yet may be right: all may say so.
    agreed = what in ("execute", "keep")
    assert other["first"].type == ("PeerFailed" if agreed else "RankMismatch"), other["first"]
    told = other["first"].fields["reasons" if agreed else "values"][1]
    assert told == "MemoryError: 64 GiB are not to be had"
    assert other["waited"] < AT_ONCE_S + SLACK_S
    assert isinstance(other["again"], Failure) and isinstance(odd["again"], Failure)
    assert odd["waited_again"] < PATIENCE_S + SLACK_S


def _operands_behind_an_error(at: Rank) -> list[bool]:
    """Whether operands are still there behind calls that failed, and behind those refused since."""
    group = dist.new_group(list(range(at.world)))
    case = equal(at.world, 8, 8, 8, schedule="growing")
    exact(at, case, 0, group)

    def refuse(*_: Any) -> Any:
        raise BackendError("hipMalloc", "hipErrorOutOfMemory", "no memory")

    there = []
    collecting = gc.isenabled()
    with pytest.MonkeyPatch.context() as patch, ficco.options(timeout_s=PATIENCE_S):
        if at.rank == 1:
            patch.setattr(invoke, "execute", refuse)
        try:
            for iteration in (1, 2, 3):
                made = make(at, case, iteration, group)
                left = weakref.ref(made.a)
                gc.collect()
                gc.disable()
                outcome = caught(partial(call, case, made.a, made.b, group))
                del made
                assert isinstance(outcome, Failure)
                there.append(left() is not None)
                gc.enable()
        finally:
            if collecting:
                gc.enable()
    at.barrier()
    ficco.close(group)
    dist.destroy_process_group(group)
    return there


def test_an_error_that_is_remembered_does_not_keep_the_operands() -> None:
    """Nor does it grow by the frames of every call that is refused for it."""
    here, there = run(2, _operands_behind_an_error)
    assert there == [False] * 3
    # The CPU engine's own error of a call that was under way goes with the next collection.
    assert here[1:] == [False] * 2


def _short_of_memory_for_all_columns(at: Rank, warm: bool) -> tuple[Any, float]:
    group = dist.new_group(list(range(at.world)))
    a, b = torch.ones(16, 8), torch.ones(8, 250)

    def summed() -> torch.Tensor:
        return ficco.matmul_reduce_scatter(a, b, group=group, schedule="shard-overlap")

    def refuse(*_: Any, **__: Any) -> Any:
        raise MemoryError("64 GiB are not to be had")

    with ficco.options(timeout_s=10 * PATIENCE_S, workspace_bytes=6000):
        if warm:
            assert bool((summed() == 16).all())
        with pytest.MonkeyPatch.context() as patch:
            if at.rank == 1:
                patch.setattr(torch.Tensor, "new_empty", refuse)
            found = timed(summed)
    at.barrier()
    ficco.close(group)
    dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
def test_a_rank_without_memory_for_all_columns_tells_its_peers(warm: bool) -> None:
    (other, waited), (odd, _) = run(2, _short_of_memory_for_all_columns, warm)
    assert odd.type == "MemoryError"
    assert other.type == "RankMismatch", other
    assert "MemoryError: 64 GiB are not to be had" in other.fields["values"][1]
    assert waited < AT_ONCE_S + SLACK_S


# Ranks that fail alone in the middle of a call.


def ended(fn: Callable[[], Any]) -> tuple[Any, float]:
    """As :func:`timed`, also for what is no ``Exception``."""
    started = time.monotonic()
    try:
        found = fn()
    except BaseException as error:
        found = ranks.failure(error)
    return found, time.monotonic() - started


#: Where a rank fails, and what is made to raise there.
PLACES: dict[str, tuple[Any, str]] = {
    "copy thread": (ctypes, "memmove"),
    "caller's thread": (products, "multiply"),
    "collective": (collectives, "starts"),
    "memory": (Workspace, "slot"),
    "operations": (invoke, "compile"),
}
ERRORS: dict[str, Callable[[], BaseException]] = {
    "BackendError": lambda: ficco.BackendError("memmove", "EFAULT", "bad\nand more"),
    "MemoryError": lambda: MemoryError("64 GiB\nand more"),
    "KeyboardInterrupt": KeyboardInterrupt,
}
FIRST_LINES = {
    "BackendError": "BackendError: memmove failed with EFAULT: bad",
    "MemoryError": "MemoryError: 64 GiB",
    "KeyboardInterrupt": "KeyboardInterrupt",
}


def _fails_alone(
    at: Rank, schedule: str, place: str, kind: str, warm: bool, victim: int
) -> dict[str, Any]:
    group = dist.new_group(list(range(at.world)))
    case = equal(at.world, 8, 8, 8, schedule=schedule)
    for iteration in range(3 * warm):
        exact(at, case, iteration, group)
    made = make(at, case, 4, group)
    threads: list[bool] = []

    def refuse(*_: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        raise ERRORS[kind]()

    with pytest.MonkeyPatch.context() as patch, ficco.options(timeout_s=20):
        if at.rank == victim:
            patch.setattr(*PLACES[place], refuse)
        first, waited = ended(lambda: call(case, made.a, made.b, group))
        again, waited_again = ended(lambda: call(case, made.a, made.b, group))

    def tear_down() -> None:
        ficco.close(group)
        dist.destroy_process_group(group)

    torn, teardown = timed(tear_down)
    return {
        "first": first if isinstance(first, Failure) else None,
        "waited": waited,
        "again": again,
        "waited_again": waited_again,
        "torn": torn,
        "teardown": teardown,
        "in the caller": threads,
    }


def _all_fail_alone(at: Rank, cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    found = [_fails_alone(at, *case) for case in cases]
    exact(at, equal(at.world, 4, 4, 4), 1)  # the rest of the process is well
    return found


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_alone_is_named_at_once(place: str, victim: int) -> None:
    schedules = ["growing", "hetero-fused-1d:pull"]
    schedules = ["serial:collective"] if place == "collective" else schedules
    cases = [
        (schedule, place, kind, warm, victim)
        for schedule in schedules
        for kind in ERRORS
        for warm in (False, True)
        if not (warm and place == "operations")  # which are there already
    ]
    for case, *found in zip(cases, *run(3, _all_fail_alone, cases), strict=True):
        kind = case[2]
        for rank, mine in enumerate(found):
            text = f"{case}, rank {rank}: {mine}"
            assert mine["waited"] < AT_ONCE_S + SLACK_S, text
            assert mine["waited_again"] < AT_ONCE_S + SLACK_S, text
            assert mine["torn"] is None and mine["teardown"] < 5, text
            if rank == victim:  # it has its own error, and its group is lost
                assert mine["first"] and mine["first"].type == kind, text
                assert mine["again"].type == (kind if kind == "BackendError" else "FiccoError")
                assert FIRST_LINES[kind].split(": ", 1)[-1] in mine["again"].text
                assert mine["in the caller"][0] == (place != "copy thread"), text
                continue
            # A rank that had all it needed ends this call well, and fails in the next.
            error = mine["first"] or mine["again"]
            assert isinstance(error, Failure) and error.type == "PeerFailed", text
            assert error.fields["reasons"] == {victim: FIRST_LINES[kind]}, text
            assert f"rank {victim} failed: {FIRST_LINES[kind]}. " in error.text
            assert "output of rank" in error.text and "ficco.close(group)" in error.text
            assert mine["again"].text == EARLIER * bool(mine["first"]) + error.text
        if place != "caller's thread":
            assert all(mine["first"] for mine in found), case


def _in_one_part_of_several(at: Rank, victim: int) -> list[tuple[Any, float]]:
    """A call that goes by columns: one rank fails between two of its parts."""
    group = dist.new_group(list(range(at.world)))
    a, b = torch.ones(16, 8), torch.ones(8, 250)

    def summed() -> torch.Tensor:
        return ficco.matmul_reduce_scatter(a, b, group=group, schedule="shard-overlap")

    parts, run_part = [0], calls.run

    def run_some(*args: Any, **kwargs: Any) -> Any:
        parts[0] += 1
        if parts[0] == 2:
            raise MemoryError("64 GiB")
        return run_part(*args, **kwargs)

    with ficco.options(timeout_s=20, workspace_bytes=6000):
        assert bool((summed() == 16).all())
        with pytest.MonkeyPatch.context() as patch:
            if at.rank == victim:
                patch.setattr(calls, "run", run_some)
            found = [ended(summed), ended(summed)]
    ficco.close(group)
    dist.destroy_process_group(group)
    assert at.rank != victim or parts[0] >= 2
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails_between_parts_of_a_call_is_named(victim: int) -> None:
    found = run(2, _in_one_part_of_several, victim)
    assert found[victim][0][0].type == "MemoryError"
    assert found[victim][1][0].type == "FiccoError"
    for error, waited in found[1 - victim]:
        assert error.type == "PeerFailed" and error.fields["reasons"] == {
            victim: "MemoryError: 64 GiB"
        }
        assert waited < AT_ONCE_S + SLACK_S


def _all_refuse_a_part(at: Rank) -> tuple[Any, bool]:
    """A call that goes by columns, the second part of which no rank has the memory for."""
    group = dist.new_group(list(range(at.world)))
    a, b = torch.ones(16, 8), torch.ones(8, 250)

    def summed() -> torch.Tensor:
        return ficco.matmul_reduce_scatter(a, b, group=group, schedule="shard-overlap")

    asked, operands = [0], calls.ProductCall.allocate

    def refuse(*args: Any) -> Any:
        asked[0] += 1
        if asked[0] == 3:  # behind those of the whole and of its first part
            raise MemoryError("64 GiB")
        return operands(*args)

    with ficco.options(timeout_s=20, workspace_bytes=6000):
        summed()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calls.ProductCall, "allocate", refuse)
            first = caught(summed)
        again = bool((summed() == 16).all())
    ficco.close(group)
    dist.destroy_process_group(group)
    return first, again


def test_a_part_of_a_call_that_all_ranks_refuse_breaks_nothing() -> None:
    for first, again in run(2, _all_refuse_a_part):
        assert first.type == "MemoryError" and again


def _one_refuses_and_all_close(at: Rank, schedule: str) -> list[str]:
    """Rank 1 refuses a call, and the group is used again as the error says."""
    group = dist.new_group(list(range(at.world)))
    case = equal(at.world, 8, 8, 8, schedule=schedule)
    for iteration in range(3):
        exact(at, case, iteration, group)
    made = make(at, case, 4, group)

    def refuse(*_: Any) -> Any:
        raise MemoryError("64 GiB")

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
    return [one.type if isinstance(one, Failure) else "right" for one in found]


@pytest.mark.parametrize(
    ("schedule", "then"),
    [
        ("shrinking", ["right"] * 3),
        # The library would take what the peers sent before for data of the next call.
        ("serial:collective", ["FiccoError", "RankMismatch", "FiccoError"]),
    ],
)
def test_a_closed_group_never_takes_data_of_a_call_that_was_broken_off(
    schedule: str, then: list[str]
) -> None:
    found = run(3, _one_refuses_and_all_close, schedule)
    first = ["RankMismatch", "MemoryError", "RankMismatch"]
    assert found == [[one, two, "right"] for one, two in zip(first, then, strict=True)]


def _late_in_between(at: Rank) -> list[tuple[Any, float]]:
    """A watchdog finds that an earlier call is stuck just before the next is written down."""
    group = dist.new_group(list(range(at.world)))
    case = equal(at.world, 8, 8, 8)
    for iteration in range(3):
        exact(at, case, iteration, group)
    made, operands = make(at, case, 4, group), calls.ProductCall.allocate
    (workspace,) = workspaces(group)
    late = ficco.SignalTimeout(
        operator="x", rank=1, peer=0, step="x", schedule="x", seconds=1.0, wanted=1, found=0
    )

    def fail(*args: Any) -> Any:
        watchdog = threading.Thread(target=workspace.fail, args=[late])
        watchdog.start()
        watchdog.join()
        return operands(*args)

    with pytest.MonkeyPatch.context() as patch, ficco.options(timeout_s=20):
        if at.rank == 1:
            patch.setattr(calls.ProductCall, "allocate", fail)
        found = [timed(lambda: call(case, made.a, made.b, group)) for _ in range(2)]
    ficco.close(group)
    dist.destroy_process_group(group)
    return found


def test_what_a_watchdog_tells_while_a_call_begins_is_not_lost() -> None:
    found = run(3, _late_in_between)
    for rank, outcomes in enumerate(found):
        assert outcomes[1][0].type == ("SignalTimeout" if rank == 1 else "PeerFailed"), outcomes
        assert sum(seconds for _, seconds in outcomes) < LATE_S + SLACK_S


def _gives_up(at: Rank, case: Case, warm: bool) -> list[tuple[Any, float]]:
    """Rank 0 has little patience with rank 2, the others have a lot."""
    group = dist.new_group(list(range(at.world)))
    for iteration in range(4):
        exact(at, case if warm else case.on(n=24), iteration, group)
    made = make(at, case, 4, group)
    if at.rank == 2:
        time.sleep(PATIENCE_S + LATE_S + 0.5)
    with ficco.options(timeout_s=20 if at.rank else PATIENCE_S):
        found = [timed(lambda: call(case, made.a, made.b, group)) for _ in range(2)]
    ficco.close(group)
    dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize(
    ("schedule", "warm"),
    [("growing", True), ("hetero-fused-1d:pull", False), ("serial:collective", True)],
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
