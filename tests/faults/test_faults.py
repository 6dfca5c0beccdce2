"""Ranks that die, stall, never call or disagree: no call hangs, and every rank gets the reason."""

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
from ficco.runtime import calls as runtime
from ficco.runtime.board import LATE_S
from ficco.runtime.workspace import Workspace, workspaces
from ficco.schedules import Schedule, plans

#: Timeout of the calls of these tests, in seconds.
PATIENCE_S = 1.0
#: Timeout that a call reaches only if it does not notice that a peer's process has ended.
LONG_S = 20.0
#: Seconds that a busy machine may add; fewer than LONG_S.
SLACK_S = 10.0
#: Limit in seconds of an operation that waits for no peer.
AT_ONCE_S = 1.0
#: Whether a test begins with successful calls.
WARM = pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])


def run(world: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """As :func:`ranks.run`, with a shorter timeout."""
    return ranks.run(world, fn, *args, timeout=25.0, **kwargs)


def everyone(at: Rank, *cases: Case) -> Any:
    """Return a group of all ranks that has run the cases."""
    group = dist.new_group(list(range(at.world)))
    for iteration, case in enumerate(cases):
        exact(at, case, iteration, group)
    return group


def timed(fn: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call, or its :class:`Failure`, and its seconds."""
    started = time.monotonic()
    try:
        result = fn()
    except (Exception, KeyboardInterrupt) as error:
        result = ranks.failure(error)
    return result, time.monotonic() - started


def report_of(
    group: Any, first: Any, again: Any = None, patience: float = PATIENCE_S, end: Any = leave
) -> dict[str, Any]:
    """Run a faulty call, the next call and the end of the group; return failures and seconds."""
    with ficco.options(timeout_s=patience):
        outcomes = [*timed(first), *timed(again or first)]
    results = [value if isinstance(value, Failure | float) else None for value in outcomes]
    names = "first", "waited", "again", "waited_again", "torn", "teardown"
    return dict(zip(names, (*results, *timed(partial(end, group))), strict=True))


def report_of_case(at: Rank, case: Case, group: Any = None, **options: Any) -> dict[str, Any]:
    """Run a case on a rank; return the report of :func:`report_of`."""
    operands = make(at, case.on(a="plain"), 5, group)
    return report_of(group, lambda: call(case, operands.a, operands.b, group), **options)


def assert_timed_out(report: Any, rank: int, peer: int, case: Case, ended: bool = False) -> Any:
    """Check a survivor's report; return the facts of the waits that survivors gave up."""
    first = report["first"]
    facts = gave_up(first)
    for wait in facts:
        assert wait["operator"] == "all_gather_matmul"
        assert wait["rank"] == rank if first.type == "SignalTimeout" else wait["rank"] != rank
        # A library's collective does not report which rank it waits for.
        names_peer = not ("collective" in case.schedule and wait["peer"] is None)
        assert wait["peer"] == (peer if names_peer else None), first.text
        assert wait["step"]
        assert wait["schedule"] == case.schedule or wait["schedule"] == "none yet"
        assert 0 < wait["seconds"] <= PATIENCE_S + SLACK_S
        assert wait["ended"] == ended, first.text
    assert report["waited"] < (AT_ONCE_S if ended else PATIENCE_S) + SLACK_S
    assert_unusable(report)
    return facts


#: Prefix of the error of an earlier call.
EARLIER = "an earlier call of this group failed: "


def assert_unusable(report: dict[str, Any]) -> None:
    """Check that the next call raises at once and that the group can be torn down."""
    assert isinstance(report["again"], Failure), report["again"]
    assert report["again"].type == report["first"].type
    assert report["again"].text == EARLIER + report["first"].text.removeprefix(EARLIER)
    assert report["again"].text.count("ficco.close(group)") == 1
    assert report["waited_again"] < AT_ONCE_S + SLACK_S
    assert report["torn"] is None, report["torn"]
    assert report["teardown"] < 5


# Ranks that die.


def test_a_lost_connection_names_the_rank_whose_process_ends() -> None:
    """Although rank 2 is late, too, and the end of rank 0 shows only at a later check."""
    problem = problem_of_sizes("all_gather_matmul", 12, 8, 8, "float32", 3)
    _, plan, _ = plans(problem, Schedule.parse("serial:collective"))
    step = next(i for i, step in enumerate(plan.steps) if step.op == "collective")
    looks = iter([(2, False)] * 3)
    hosts = SimpleNamespace(named=lambda rank: "")
    engine: Any = SimpleNamespace(interrupt=lambda: None, group=None, hosts=hosts)
    engine.timed_out = partial(Engine.timed_out, engine)
    state = SimpleNamespace(check=lambda: None, timeout_s=LONG_S)

    def lost() -> Any:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(SignalTimeout) as raised:
        program: Any = SimpleNamespace(plan=plan)
        call: Any = SimpleNamespace(state=state)
        collect(engine, program, call, step, lambda: next(looks, (0, True)), lost)
    assert (raised.value.peer, raised.value.ended) == (0, True)


def _with_a_lost_rank(at: Rank, case: Case, victim: int, loss: str, warm: bool) -> dict[str, Any]:
    """``loss``: "kill" or "stop", or "before" if the process has ended before its peers call."""
    for iteration in range(3 * warm):
        exact(at, case, iteration)
    at.barrier()
    if at.rank == victim:
        # Rank 0 holds the store, which dies with it.
        os.kill(os.getpid(), signal.SIGSTOP if loss == "stop" else signal.SIGKILL)
    if loss == "before":
        time.sleep(0.3)
    # The end of a process that has used the group is noticed at any timeout.
    return report_of_case(at, case, patience=LONG_S if warm and loss != "stop" else PATIENCE_S)


@pytest.mark.parametrize(
    ("world", "victim", "schedule", "loss", "warm"),
    [
        (3, 0, "serial:collective", "kill", True),
        (3, 0, "serial:collective", "kill", False),
        (3, 1, "growing", "kill", False),
        (3, 0, "shrinking:pull", "before", True),
        # A stopped process, as under a debugger.
        (2, 0, "hetero-fused-2d", "stop", True),
        (2, 1, "hetero-fused-2d", "stop", False),
        (2, 0, "hetero-fused-2d", "stop", False),
    ],
)
def test_lost_rank(world: int, victim: int, schedule: str, loss: str, warm: bool) -> None:
    case, stops = equal(world, 8, 8, 8, schedule=schedule), loss == "stop"
    lost: Any = {"fresh": True, "catch": True, "lost": {victim} if stops else ()}
    reports = run(world, _with_a_lost_rank, case, victim, loss, warm, **lost)
    if not stops:
        assert isinstance(reports[victim], Died) and reports[victim].exitcode == -signal.SIGKILL
    for rank in {*range(world)} - {victim}:
        first = reports[rank]["first"]
        if stops and not warm and victim == 0:
            # The store has stopped, too: requests to it time out.
            assert first.type == "SignalTimeout", reports[rank]
            continue
        ended = not stops and (warm or bool(gave_up(first)[0]["ended"]))
        assert_timed_out(reports[rank], rank, victim, case, ended)


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
    """A process ends without a launcher, close() or destroy_process_group()."""
    processes = end_of(start_ranks(tmp_path, SURVIVOR, 2, str(victim), how), 40)
    assert processes[victim][0] == -signal.SIGKILL
    code, out, err = processes[1 - victim]
    assert "caught" in out, err
    assert code == (0 if how == "caught" else 1), err
    assert ("SignalTimeout" in err) == (how == "uncaught")
    assert "Fatal Python error" not in err and "Exception ignored" not in err


# Ranks that stall, never call, or are late.


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
        report = report_of_case(at, case, group)
    exact(at, equal(at.world, 4, 4, 4), 1)  # other groups still work
    if at.rank == victim:  # its own call ends, too
        gave_up(report["first"])
        assert report["waited"] < 2 * PATIENCE_S + SLACK_S
        return
    for wait in assert_timed_out(report, at.rank, victim, case):
        if schedule == "tiled:pieces=2":  # the step names the rows of the missing piece
            assert re.match(r"all (8:12|12:16) \(", wait["step"])


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
    """The group is closed on every rank and used again, as the error advises."""
    case = equal(3, 8, 8, 8, schedule=schedule)
    group, report = everyone(at, *[case] * warm), None
    if at.rank != victim:
        report = report_of_case(at, case, group, end=ficco.close)
    at.barrier()
    if report is None:
        ficco.close(group)
    for iteration in (2, 3):
        # gloo would continue with the data of the interrupted collective.
        next_case = case.on(schedule="growing") if "collective" in case.schedule else case
        exact(at, next_case, iteration, group)
    leave(group)
    exact(at, equal(at.world, 4, 4, 4), 1)
    if report is None:
        return
    assert_timed_out(report, at.rank, victim, case)
    if not warm:
        text = report["first"].text
        message = f"s for rank {victim} to join the first call of this group (find out which ranks"
        assert message in text and "schedule" not in text, text


@WARM
@on_ranks(2, timeout=25.0)
def test_keyboard_interrupt_ends_a_wait(at: Rank, warm: bool) -> None:
    case = equal(2, 4, 4, 4, schedule="growing:copy=2")
    group = everyone(at, *[case] * warm)
    if at.rank == 0:
        operands = make(at, case, 1, group)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        error, waited = timed(lambda: call(case, operands.a, operands.b, group))
        assert error.type == "KeyboardInterrupt"
        assert waited < AT_ONCE_S + SLACK_S
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
        runtime.execute(*[mock.Mock()] * 3)  # never used
    assert torch.is_grad_enabled()


# Ranks that disagree.

BASE = equal(3, 8, 8, 8, schedule="hetero-fused-1d")


#: Calls before the mismatch: none, those of most ranks, or those of all. New calls wait for peers.
BEFORE = ("first", "new here", "warm")


def _mismatch(at: Rank, changes: Any, odd: int, before: str, caps: Any, base: Case = BASE) -> Any:
    group, odd_case, is_odd = everyone(at), base.on(**changes), at.rank == odd
    for iteration in range(3 * BEFORE.index(before)):
        uses_odd_case = before == "warm" and iteration % 2 == 1
        with ficco.options(workspace_bytes=caps[uses_odd_case]):
            exact(at, odd_case if uses_odd_case else base, iteration, group)
    with ficco.options(workspace_bytes=caps[is_odd]):
        report = report_of_case(at, odd_case if is_odd else base, group)
    exact(at, equal(at.world, 4, 4, 4), 1)  # other groups still work
    return report


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


def assert_mismatch(reports: list[dict[str, Any]], odd: int) -> None:
    for rank, report in enumerate(reports):
        first = report["first"]
        assert isinstance(first, Failure) and first.type == "RankMismatch", (rank, first)
        values = first.fields["values"]
        assert sorted(values) == [0, 1, 2]
        same = {value for peer, value in values.items() if peer != odd}
        assert len(same) == 1 and values[odd] not in same, values
        assert f"rank {odd}:" in first.text and "rows=" in first.text
        assert report["waited"] < PATIENCE_S + SLACK_S
        assert_unusable(report)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("difference", [*MISMATCHES, "workspace_bytes"])
def test_mismatch(difference: str, before: str) -> None:
    odd, caps = len(difference) % 3, (None, 100_000 if difference == "workspace_bytes" else None)
    assert_mismatch(run(3, _mismatch, MISMATCHES.get(difference, {}), odd, before, caps), odd)


@WARM
@on_ranks(3)
def test_mismatch_of_symmetric_memory(at: Rank, warm: bool) -> None:
    """Peers would read one rank's shard from the wrong memory."""
    group, case = everyone(at), equal(at.world, 8, 8, 8, schedule="growing:pull")
    symmetric = ficco.empty((8, 8), dtype=torch.float32, group=group)
    operands = make(at, case, 0, group)
    if warm:
        exact(at, case, 0, group)
        call(case, symmetric.copy_(operands.a), operands.b, group)
    a = symmetric.copy_(operands.a) if at.rank == 1 else operands.a
    report = report_of(group, lambda: call(case, a, operands.b, group))
    assert report["first"].type == "RankMismatch", report["first"]
    assert report["waited"] < PATIENCE_S + SLACK_S


@on_ranks(2)
def test_slices_of_symmetric_memory_are_plain_operands_on_every_rank(at: Rank) -> None:
    """The slice is contiguous only on rank 0, whose matrix has one row."""
    group = everyone(at)
    rows = (1, 3)
    memory = ficco.empty((3, 16), dtype=torch.float32, group=group).fill_(1.0)
    b = torch.ones(8, 4)
    for schedule in ("growing", "growing:pull"):
        a = memory[: rows[at.rank], :8]
        y = ficco.all_gather_matmul(a, b, rows=rows, schedule=schedule, group=group)
        assert y.shape == (4, 4) and (y == 8).all()
    leave(group)


@on_ranks(2, timeout=25.0)
def test_unfinished_collective_does_not_hold_the_process(at: Rank) -> None:
    """The garbage collector deletes a group and so waits for its operations."""
    base = equal(at.world, 8, 8, 8)
    cases = [base.on(schedule=name) for name in ("serial:collective", "growing")]
    group = everyone(at, *cases * 2)
    operands = make(at, base, 9, group)
    with ficco.options(timeout_s=PATIENCE_S):
        failure = caught(lambda: call(cases[at.rank], operands.a, operands.b, group))
    assert isinstance(failure, Failure) and failure.type == "RankMismatch", failure
    leave(group)
    if at.rank == 0:  # the peers keep the group, so its connections stay open
        started = time.monotonic()
        del group
        gc.collect()
        assert time.monotonic() - started < 5
    at.barrier()


# Ranks that raise an error of their own, before a call or in it.


def refuse(*_: Any, **__: Any) -> Any:
    raise MemoryError("cannot allocate 64 GiB")


@on_ranks(2)
def test_a_stored_error_does_not_keep_the_operands(at: Rank) -> None:
    """Operands of failed and refused calls are freed. The error's traceback does not grow."""
    case = equal(at.world, 8, 8, 8, schedule="growing")
    group = everyone(at, case)

    def refuse(*_: Any) -> Any:
        raise BackendError("hipMalloc", "hipErrorOutOfMemory", "no memory")

    alive = []
    with pytest.MonkeyPatch.context() as patch, ficco.options(timeout_s=PATIENCE_S):
        if at.rank == 1:
            patch.setattr(runtime, "execute", refuse)
        for iteration in (1, 2, 3):
            operands = make(at, case, iteration, group)
            shard = weakref.ref(operands.a)
            gc.collect()
            gc.disable()
            try:
                failure = caught(partial(call, case, operands.a, operands.b, group))
                del operands
                assert isinstance(failure, Failure)
                alive.append(shard() is not None)
            finally:
                gc.enable()
    at.barrier()
    leave(group)
    # The garbage collector frees the CPU engine's own error of a call that was running.
    assert alive[1 - at.rank :] == [False] * (2 + at.rank), alive


#: Function that raises in a call split by columns: its owner, its name, and the number of the call
#: that raises. The whole call and each part are announced, after they allocate operands.
REFUSED = {
    "all columns": (torch.Tensor, "new_empty", 1),
    "a part": (calls, "run", 2),
    "a part of all ranks": (runtime, "_announce", 3),
}


def _by_columns(at: Rank, refusal: str, victims: tuple[int, ...], warm: bool) -> list[Any]:
    group, (owner, name, number) = everyone(at), REFUSED[refusal]
    a, b = torch.ones(16, 8), torch.ones(8, 250)
    calls_so_far, original = count(1), getattr(owner, name)

    def once_refused(*args: Any, **kwargs: Any) -> Any:
        return refuse() if next(calls_so_far) == number else original(*args, **kwargs)

    def result_is_exact() -> bool:
        y = ficco.matmul_reduce_scatter(a, b, group=group, schedule="shard-overlap")
        return bool((y == 16).all())

    with ficco.options(timeout_s=LONG_S, workspace_bytes=6000):
        assert not warm or result_is_exact()
        with pytest.MonkeyPatch.context() as patch:
            if at.rank in victims:
                patch.setattr(owner, name, once_refused)
            results = [timed(result_is_exact)]
        results.append(timed(result_is_exact))
    at.barrier()
    leave(group)
    return results


@WARM
def test_a_rank_without_memory_for_all_columns_tells_its_peers(warm: bool) -> None:
    ((peer_error, waited), _), ((own_error, _), _) = run(2, _by_columns, "all columns", (1,), warm)
    assert own_error.type == "MemoryError"
    assert peer_error.type == "RankMismatch", peer_error
    assert "MemoryError: cannot allocate 64 GiB" in peer_error.fields["values"][1]
    assert waited < AT_ONCE_S + SLACK_S


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails_between_parts_of_a_call_is_named(victim: int) -> None:
    results = run(2, _by_columns, "a part", (victim,), True)
    assert [error.type for error, _ in results[victim]] == ["MemoryError", "FiccoError"]
    for error, waited in results[1 - victim]:
        assert error.type == "PeerFailed"
        assert error.fields["reasons"] == {victim: "MemoryError: cannot allocate 64 GiB"}
        assert waited < AT_ONCE_S + SLACK_S


def test_a_part_of_a_call_that_all_ranks_refuse_breaks_nothing() -> None:
    for (first, _), (again, _) in run(2, _by_columns, "a part of all ranks", (0, 1), True):
        assert first.type == "MemoryError" and again is True


# One rank that fails in the middle of a call.

#: Where a rank fails, and the function that raises there.
PLACES: dict[str, tuple[Any, str]] = {
    "copy thread": (ctypes, "memmove"),
    "caller's thread": (torch, "mm"),
    "collective": (LibraryExchange, "starts"),
    "memory": (Workspace, "slot"),
    "operations": (runtime, "compile"),
    "cache": (Workspace, "keep"),
}
#: Errors, and their texts on the peers.
ERRORS: dict[str, tuple[Callable[[], BaseException], str]] = {
    "BackendError": (
        lambda: ficco.BackendError("memmove", "EFAULT", "bad\nand more"),
        "BackendError: memmove failed with EFAULT: bad",
    ),
    "MemoryError": (lambda: MemoryError("64 GiB\nand more"), "MemoryError: 64 GiB"),
    "KeyboardInterrupt": (KeyboardInterrupt, "KeyboardInterrupt"),
}


def _fails_alone(at: Rank, schedule: str, place: str, kind: str, warm: bool, victim: int) -> Any:
    case = equal(at.world, 8, 8, 8, schedule=schedule)
    group = everyone(at, *[case] * 3 * warm)
    inputs = make(at, case, 4, group)
    in_main_thread: list[bool] = []

    def fail(*_: Any, **__: Any) -> Any:
        in_main_thread.append(threading.current_thread() is threading.main_thread())
        raise ERRORS[kind][0]()

    with pytest.MonkeyPatch.context() as patch:
        if at.rank == victim:
            patch.setattr(*PLACES[place], fail)
        report = report_of(group, lambda: call(case, inputs.a, inputs.b, group), patience=LONG_S)
    return {**report, "in the caller": in_main_thread}


def _all_fail_alone(at: Rank, cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    reports = [_fails_alone(at, *case) for case in cases]
    exact(at, equal(at.world, 4, 4, 4), 1)  # other groups still work
    return reports


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_alone_is_named_at_once(place: str) -> None:
    schedules = ["growing", "hetero-fused-1d:pull"]
    schedules = ["serial:collective"] if place == "collective" else schedules
    cases = []
    for turn, (schedule, kind) in enumerate(product(schedules, ERRORS)):
        warm = turn % 2 == 0 and place not in ("operations", "cache")  # not built in a warm call
        cases.append((schedule, place, kind, warm, (turn + turn // 3) % 3))
    for case, *reports in zip(cases, *run(3, _all_fail_alone, cases), strict=True):
        *_, kind, _, victim = case
        message = ERRORS[kind][1]
        for rank, report in enumerate(reports):
            text = f"{case}, rank {rank}: {report}"
            assert report["waited"] < AT_ONCE_S + SLACK_S, text
            assert report["waited_again"] < AT_ONCE_S + SLACK_S, text
            assert report["torn"] is None and report["teardown"] < 5, text
            if rank == victim:  # it raises its own error, and its group is unusable
                assert report["first"] and report["first"].type == kind, text
                assert report["again"].type == (kind if kind == "BackendError" else "FiccoError")
                assert message.split(": ", 1)[-1] in report["again"].text
                assert report["in the caller"][0] == (place != "copy thread"), text
                continue
            # A rank that already had all data completes this call and fails in the next.
            error = report["first"] or report["again"]
            assert isinstance(error, Failure) and error.type == "PeerFailed", text
            assert error.fields["reasons"] == {victim: message}, text
            assert f"rank {victim} failed: {message}. " in error.text
            assert "output of rank" in error.text and "ficco.close(group)" in error.text
            assert report["again"].text == EARLIER * bool(report["first"]) + error.text
        if place != "caller's thread":
            assert all(report["first"] for report in reports), case


@pytest.mark.parametrize(
    ("schedule", "outcomes"),
    [
        ("shrinking", ["right"] * 3),
        # The library would take earlier data of the peers for data of the next call.
        ("serial:collective", ["FiccoError", "RankMismatch", "FiccoError"]),
    ],
)
@on_ranks(3, timeout=25.0)
def test_a_closed_group_never_takes_data_of_an_interrupted_call(
    at: Rank, schedule: str, outcomes: list[str]
) -> None:
    """Rank 1 refuses a call, and the group is closed and used again as the error advises."""
    case = equal(at.world, 8, 8, 8, schedule=schedule)
    group = everyone(at, *[case] * 3)
    operands = make(at, case, 4, group)
    with pytest.MonkeyPatch.context() as patch, ficco.options(timeout_s=PATIENCE_S):
        if at.rank == 1:
            patch.setattr(calls.ProductCall, "allocate", refuse)
        results = [caught(lambda: call(case, operands.a, operands.b, group))]
    ficco.close(group)
    for name in (schedule, "growing"):
        results.append(caught(lambda name=name: exact(at, case.on(schedule=name), 5, group)))
        if isinstance(results[-1], Failure):
            dist.barrier()
            ficco.close(group)
    dist.destroy_process_group(group)
    kinds = [error.type if isinstance(error, Failure) else "right" for error in results]
    assert kinds == ["MemoryError" if at.rank == 1 else "RankMismatch", outcomes[at.rank], "right"]


@on_ranks(3, timeout=25.0)
def test_a_failure_that_a_watchdog_reports_while_a_call_begins_is_not_lost(at: Rank) -> None:
    """A watchdog reports a stuck earlier call just before the next call is posted."""
    case = equal(at.world, 8, 8, 8)
    group = everyone(at, *[case] * 3)
    operands, allocate = make(at, case, 4, group), calls.ProductCall.allocate
    (workspace,) = workspaces(group)
    timeout = ficco.SignalTimeout(operator="x", rank=1, peer=0, seconds=1.0)

    def fail(*args: Any) -> Any:
        watchdog = threading.Thread(target=workspace.fail, args=[timeout])
        watchdog.start()
        watchdog.join()
        return allocate(*args)

    with pytest.MonkeyPatch.context() as patch, ficco.options(timeout_s=20):
        if at.rank == 1:
            patch.setattr(calls.ProductCall, "allocate", fail)
        results = [timed(lambda: call(case, operands.a, operands.b, group)) for _ in range(2)]
    leave(group)
    assert results[1][0].type == ("SignalTimeout" if at.rank == 1 else "PeerFailed"), results
    assert sum(seconds for _, seconds in results) < LATE_S + SLACK_S


def _gives_up(at: Rank, case: Case, warm: bool) -> list[tuple[Any, float]]:
    """Rank 2 is late: rank 0 has a short timeout, and rank 1 a long one."""
    group = everyone(at, *[case if warm else case.on(n=24)] * 4)
    operands = make(at, case, 4, group)
    if at.rank == 2:
        time.sleep(PATIENCE_S + LATE_S + 0.5)
    with ficco.options(timeout_s=20 if at.rank else PATIENCE_S):
        results = [timed(lambda: call(case, operands.a, operands.b, group)) for _ in range(2)]
    leave(group)
    return results


@pytest.mark.parametrize(
    ("schedule", "warm"), [("hetero-fused-1d:pull", False), ("serial:collective", True)]
)
def test_peers_do_not_wait_for_a_rank_that_timed_out(schedule: str, warm: bool) -> None:
    impatient, waiting, late = run(3, _gives_up, equal(3, 8, 8, 8, schedule=schedule), warm)
    assert impatient[0][0].type == "SignalTimeout" and impatient[0][0].fields["peer"] in (2, None)
    # The late rank may still complete this call, and then fails in the next.
    late_failure = late[0] if isinstance(late[0][0], Failure) else late[1]
    for error, waited in (waiting[0], late_failure):
        assert isinstance(error, Failure) and error.type == "PeerFailed", error
        assert error.fields["reasons"][0].startswith("SignalTimeout: all_gather_matmul: rank 0 ")
        (facts,) = gave_up(error)
        assert facts == {name: impatient[0][0].fields[name] for name in facts}
        assert waited < PATIENCE_S + LATE_S + SLACK_S
