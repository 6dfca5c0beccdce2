"""The watchdog, with a double of a GPU: its reports, and the actions that follow."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ficco.compute.program import Program, Slot
from ficco.dma import engine, patience
from ficco.dma.engine import Missing
from ficco.dma.host import Hosts
from ficco.errors import BackendError, FiccoError, RankMismatch, SignalTimeout
from ficco.problems.products import Problem
from ficco.runtime.watchdog import ANSWER_S, ENDED_S, PERIOD_S, DriverThread, Watchdog
from ficco.schedules import NAMED, plan

TIMEOUT_S = 0.4


#: Name in errors of a product that waits for rank 1.
STEP = "1.0 (matmul on compute0)"


class Engine:
    """A GPU whose call ``running`` never ends; if ``ending``, calls end all the time."""

    rank = 0
    operator = "all_gather_matmul"
    hosts = Hosts.one(SimpleNamespace(size=lambda: 4))  # type: ignore[arg-type]
    timed_out = engine.Engine.timed_out

    def __init__(self, running: int, ending: bool) -> None:
        self.running, self.ending, self.lost = running, ending, set[int]()
        self.released: list[Slot] = []
        self.releases = 0

    def pulse(self, slot: Slot) -> tuple[int, bool]:
        return self.running, self.ending

    begun = pulse

    def missing(self, slot: Slot, program: Program) -> Missing:
        return next(
            Missing(index, signal.poster, 1, 0, signal)
            for index, step in enumerate(program.plan.steps)
            for signal in (*step.waits, *step.gates)
            if signal.kind == "ready"
        )

    def idle(self, slots: list[Slot]) -> bool:
        return not self.running

    def release(self, slots: list[Slot], seconds: float) -> bool:
        self.released = list(slots)
        self.releases += 1
        return True


class Board:
    world = 4

    def __init__(self, error: RankMismatch | None) -> None:
        self.error, self.ended_ranks, self.stopped = error, set[int](), list[int]()

    def ended(self, rank: int) -> bool:
        return rank in self.ended_ranks

    def silent(self) -> list[int]:
        return self.stopped

    def close(self) -> None:
        print("left the board", file=sys.stderr, flush=True)

    def mismatch(self, latest: int) -> RankMismatch | None:
        return self.error


class Workspace:
    dog: Watchdog
    calls = 7
    thread = 0

    def __init__(
        self, running: int, ending: bool, error: RankMismatch | None, schedule: str = "growing"
    ) -> None:
        problem = Problem("all_gather_matmul", (8,) * 4, 8, 8, "bfloat16")
        program = Program(plan(problem, NAMED[schedule], 0), None, [])
        self.slots = [Slot(None, programs={7: program})]  # type: ignore[call-arg]
        self.engine, self.board = Engine(running, ending), Board(error)
        self.error: BaseException | None = None

    def post_enqueued(self) -> None:
        pass

    def fail(self, error: FiccoError) -> None:
        self.error = error


Watch = Callable[..., Workspace]
Block = Callable[..., threading.Event]


@pytest.fixture
def watch() -> Iterator[Watch]:
    dogs: list[Watchdog] = []

    def start(
        running: int = 7, ending: bool = False, error: RankMismatch | None = None, **options: Any
    ) -> Workspace:
        workspace = Workspace(running, ending, error, options.pop("schedule", "growing"))
        dog = Watchdog(workspace)  # type: ignore[arg-type]
        vars(dog).update({"timeout_s": TIMEOUT_S, "on_timeout": "raise"} | options)
        dogs.append(dog)
        workspace.dog = dog
        return workspace

    yield start
    for dog in dogs:
        dog.stop()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes passed to ``os._exit``, which does nothing. Request it before ``watch``."""
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    return codes


def until(workspace: Workspace, seconds: float) -> float:
    """Seconds until the workspace fails, at most ``seconds``."""
    begin = time.monotonic()
    while workspace.error is None and time.monotonic() - begin < seconds:
        time.sleep(0.005)
    return time.monotonic() - begin


def soon(condition: Callable[[], object]) -> bool:
    """Whether a condition becomes true within 20 s, for a late thread of the watchdog."""
    begin = time.monotonic()
    while not condition() and time.monotonic() - begin < 20:
        time.sleep(PERIOD_S)
    return bool(condition())


@pytest.mark.parametrize(("rank", "on_another_host"), [(1, False), (2, False), (1, True)])
def test_the_end_of_an_awaited_process_is_reported_at_once(
    watch: Watch, rank: int, on_another_host: bool
) -> None:
    workspace = watch(timeout_s=20)
    # The end of a process on another host shows in its connection.
    (workspace.engine.lost if on_another_host else workspace.board.ended_ranks).add(rank)
    waited = until(workspace, 4 * ENDED_S)
    error = workspace.error
    if rank == 2:  # the first missing signal is of a rank that still runs
        assert error is None
        return
    assert isinstance(error, SignalTimeout) and (error.peer, error.ended) == (1, True)
    assert ENDED_S <= waited < 1.0
    assert "The process of rank 1 has ended; see its output" in str(error)
    assert "timeout_s" not in str(error)


@pytest.mark.parametrize(
    ("schedule", "stopped", "peer", "wanted", "step"),
    [
        ("growing", [], 1, 1, STEP),
        ("tiled", [], 1, 1, "all 8:16 (matmul on compute0)"),
        # A rank that does not answer is named instead of a rank that waits for it.
        ("growing", [2], 2, None, STEP),
        ("growing", [2, 1], 1, 1, STEP),
        # A call whose program is no longer cached is still timed.
        ("unknown", [], None, None, "unknown"),
    ],
)
def test_a_stuck_call_is_named_and_released(
    watch: Watch,
    capfd: pytest.CaptureFixture[str],
    schedule: str,
    stopped: list[int],
    peer: int | None,
    wanted: int | None,
    step: str,
) -> None:
    workspace = watch(schedule="growing" if schedule == "unknown" else schedule)
    workspace.board.stopped = stopped
    if schedule == "unknown":
        workspace.slots[0].programs.clear()
    waited = until(workspace, 10 * TIMEOUT_S)
    error = workspace.error
    assert isinstance(error, SignalTimeout) and not error.ended
    assert TIMEOUT_S <= waited < 5 * TIMEOUT_S
    assert (error.operator, error.rank, error.peer) == ("all_gather_matmul", 0, peer)
    assert (error.wanted, error.step) == (wanted, step)
    assert error.schedule.startswith(schedule) and error.seconds >= TIMEOUT_S
    assert soon(lambda: workspace.engine.releases >= 3)  # later calls are released, too
    assert workspace.engine.released == workspace.slots
    assert str(error) in capfd.readouterr().err


def test_a_long_call_is_logged_while_it_runs(
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(patience, "WARN_AFTER_S", 2 * PERIOD_S)
    with caplog.at_level("WARNING", "ficco"):
        workspace = watch(timeout_s=60)
        assert soon(lambda: len(caplog.messages) >= 2)
    assert workspace.error is None and not workspace.engine.releases
    for message in caplog.messages:
        assert "all_gather_matmul: rank 0 waited" in message and "s for rank 1 at" in message
        assert f"step '{STEP}' of schedule 'growing'" in message
        assert "60 s in all" in message
    caplog.clear()
    workspace.engine.ending = True  # calls end all the time
    time.sleep(2 * PERIOD_S)
    caplog.clear()
    time.sleep(10 * PERIOD_S)
    assert not caplog.messages


@pytest.mark.parametrize(("running", "ending"), [(0, False), (7, True)])
def test_idle_slots_and_ending_calls_raise_nothing(
    watch: Watch, running: int, ending: bool
) -> None:
    """The watchdog reports no error, even if a process has ended."""
    workspace = watch(running, ending)
    workspace.board.ended_ranks.add(1)
    longest = max(3 * TIMEOUT_S, 2 * ENDED_S)
    assert until(workspace, longest) >= longest


def test_a_device_that_returns_errors_does_not_end_the_process(
    ended: list[int], watch: Watch
) -> None:
    """The caller already has the error."""
    workspace = watch()

    def lost(slots: list[Slot]) -> bool:
        raise BackendError("hipEventQuery", "hipErrorLaunchFailure", "unspecified launch failure")

    workspace.engine.idle = lost  # type: ignore[method-assign]
    workspace.error = BackendError("hipMemcpyAsync", "hipErrorLaunchFailure", "the same")
    assert soon(lambda: workspace.engine.releases) and not ended


def test_a_new_slot_starts_a_new_timeout(watch: Watch) -> None:
    workspace = watch()
    time.sleep(0.5 * TIMEOUT_S)
    slots, workspace.slots = workspace.slots, []
    time.sleep(3 * PERIOD_S)
    workspace.slots = slots  # the watchdog takes it for a new slot
    assert until(workspace, 10 * TIMEOUT_S) >= TIMEOUT_S - PERIOD_S


def test_a_mismatch_and_an_interrupted_call_are_handled_while_nothing_runs(watch: Watch) -> None:
    """A mismatch, and a call that this rank interrupted before any peer began it."""
    error = RankMismatch({0: "this", 1: "that"})
    workspace = watch(running=0, error=error)
    assert until(workspace, TIMEOUT_S) < TIMEOUT_S
    assert workspace.error is error
    workspace = watch(running=0)
    workspace.error = FiccoError("broken off by MemoryError")
    assert soon(lambda: workspace.engine.releases)


@pytest.mark.parametrize("ends", [True, False])
def test_an_error_that_the_caller_has_ends_no_process(
    ends: bool,
    ended: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("ficco.runtime.watchdog.SETTLE_S", 20.0 if ends else 4 * PERIOD_S)
    workspace = Workspace(7, False, RankMismatch({0: "broken off", 1: "that"}))
    workspace.error = error = FiccoError("broken off by OutOfMemoryError")
    dog = Watchdog(workspace)  # type: ignore[arg-type]  # aborts by default
    time.sleep(3 * PERIOD_S)
    assert not workspace.engine.releases  # earlier calls in flight may end by themselves
    if ends:
        workspace.engine.running = 0
    assert soon(lambda: workspace.engine.releases)
    dog.stop()
    assert workspace.engine.released == workspace.slots
    assert not ended and capfd.readouterr().err == "" and workspace.error is error


def test_a_watchdog_that_fails_reports_it_and_ends_the_calls(
    watch: Watch, capfd: pytest.CaptureFixture[str]
) -> None:
    workspace = watch()

    def unforeseen(slot: Slot) -> None:
        raise KeyError("unforeseen")

    workspace.engine.pulse = unforeseen  # type: ignore[method-assign]
    until(workspace, 10 * TIMEOUT_S)
    assert soon(lambda: workspace.engine.releases)
    assert "watchdog failed with KeyError: 'unforeseen'" in str(workspace.error)
    assert "no longer watched" in capfd.readouterr().err


def test_streams_that_cannot_be_freed_or_an_abort_end_the_process(
    ended: list[int], watch: Watch, capfd: pytest.CaptureFixture[str]
) -> None:
    workspace = watch()

    def refused(slots: list[Slot], seconds: float) -> bool:
        raise RuntimeError("the driver is gone")

    workspace.engine.release = refused  # type: ignore[method-assign]
    assert soon(lambda: ended) and ended == [1]
    output = capfd.readouterr().err
    assert "the driver is gone" in output and "could not be freed" in output
    workspace = watch(on_timeout="abort")
    assert soon(lambda: len(ended) > 1) and ended == [1, 1]
    output = capfd.readouterr().err
    assert "SignalTimeout: all_gather_matmul: rank 0 waited" in output
    assert 0 < output.index("left the board") < output.index("on_timeout='abort'")


# A driver that does not answer, because another thread of the process is inside it.

#: Limits of the watchdog for such a driver, in seconds.
SHORT_S = {"ANSWER_S": 4 * PERIOD_S, "RELEASE_S": 8 * PERIOD_S, "CLOSE_S": PERIOD_S}


@pytest.fixture
def block(ended: list[int], monkeypatch: pytest.MonkeyPatch, watch: Watch) -> Iterator[Block]:
    """Lets methods of an engine block until the process would end, or until the event is set."""
    free = threading.Event()
    for name, seconds in SHORT_S.items():
        monkeypatch.setattr(f"ficco.runtime.watchdog.{name}", seconds)
    monkeypatch.setattr("os._exit", lambda code: (ended.append(code), free.set()))

    def blocked(method: Callable[..., Any], *args: Any) -> Any:
        free.wait()
        return method(*args)

    def block(workspace: Workspace, *names: str) -> threading.Event:
        for name in names:
            setattr(workspace.engine, name, partial(blocked, getattr(workspace.engine, name)))
        return free

    yield block
    free.set()


@pytest.mark.parametrize("first", ["pulse", "missing"])
@pytest.mark.parametrize(("gone", "silent", "peer"), [([1], [2], 1), ([], [2], 2), ([], [], None)])
def test_a_driver_that_does_not_answer_hides_no_stuck_call(
    first: str,
    gone: list[int],
    silent: list[int],
    peer: int | None,
    ended: list[int],
    watch: Watch,
    block: Block,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The error comes first, then the end of the process, whose streams cannot be freed."""
    workspace = watch(running=0, timeout_s=3600 if gone else TIMEOUT_S)
    workspace.board.ended_ranks, workspace.board.stopped = set(gone), silent
    block(workspace, *(("pulse", "missing") if first == "pulse" else ("missing",)), "release")
    workspace.engine.running = 7
    assert soon(lambda: workspace.error)
    error = workspace.error
    assert isinstance(error, SignalTimeout) and (error.peer, error.ended) == (peer, bool(gone))
    assert (error.operator, error.schedule) == ("all_gather_matmul", "growing")
    assert "the driver did not answer" in error.step
    assert "another thread of this process is inside it" in error.step
    assert f"perhaps at {Path(__file__).name}:" in error.step  # this thread waits below
    assert soon(lambda: ended) and ended == [1]
    output = capfd.readouterr().err
    assert 0 < output.index(str(error)) < output.index("the streams could not be freed")


@pytest.mark.parametrize("first", ["pulse", "missing"])
def test_a_driver_that_does_not_answer_stops_neither_warnings_nor_mismatches(
    first: str,
    watch: Watch,
    block: Block,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(patience, "WARN_AFTER_S", 2 * PERIOD_S)
    workspace = watch(timeout_s=3600)
    with caplog.at_level("WARNING", "ficco"):
        block(workspace, first)
        assert soon(lambda: len(caplog.messages) >= 2)
    assert all("the driver did not answer" in message for message in caplog.messages)
    assert workspace.error is None
    workspace.board.error = RankMismatch({0: "this", 1: "that"})
    assert soon(lambda: workspace.error is workspace.board.error)


def test_a_driver_that_answers_late_ends_nothing(
    ended: list[int], monkeypatch: pytest.MonkeyPatch, watch: Watch, block: Block
) -> None:
    """Rank 2 has ended, and the call waits for rank 1."""
    monkeypatch.setattr("ficco.runtime.watchdog.ANSWER_S", 60.0)
    workspace = watch(timeout_s=3600)
    free = block(workspace, "pulse")
    workspace.board.ended_ranks.add(2)
    time.sleep(2 * ENDED_S)
    free.set()
    assert until(workspace, 2 * ENDED_S) >= 2 * ENDED_S and not ended


def test_a_driver_that_had_no_time_to_answer_ends_nothing(ended: list[int], watch: Watch) -> None:
    """The process stands still, with the interpreter lock, for longer than all limits. The call
    ends meanwhile, which only the driver knows."""
    workspace = watch(running=0, timeout_s=ANSWER_S)
    stand_still, pulse = ctypes.PyDLL(None).usleep, workspace.engine.pulse
    workspace.engine.begun = lambda slot: (7, False)  # type: ignore[method-assign]

    def slowly(slot: Slot) -> tuple[int, bool]:
        for _ in range(10):
            time.sleep(PERIOD_S / 2)
        return pulse(slot)

    workspace.engine.pulse = slowly  # type: ignore[method-assign]
    dog, workspace.engine.running = workspace.dog, 7
    assert soon(lambda: dog._waits) and soon(lambda: dog._question)
    workspace.engine.running = 0
    stand_still(int(1.1e6 * ANSWER_S))
    assert soon(lambda: not dog._waits or workspace.error)
    assert workspace.error is None and not ended


@pytest.mark.parametrize("failed", [True, False])
def test_closing_beside_a_driver_that_does_not_answer_ends_the_process(
    failed: bool, ended: list[int], block: Block
) -> None:
    """After an error: closing would wait for the driver. Without one, closing waits."""
    workspace = Workspace(0, False, None)
    block(workspace, "pulse", "idle", "release")
    dog = Watchdog(workspace)  # type: ignore[arg-type]
    assert soon(lambda: dog._question)
    if failed:
        workspace.error = FiccoError("broken off by MemoryError")
    closing = threading.Thread(target=dog.stop)
    closing.start()
    closing.join(20.0 if failed else 10 * PERIOD_S)
    assert closing.is_alive() is not failed and ended == [1] * failed


@pytest.mark.parametrize("running", [7, 0])
def test_later_calls_that_cannot_be_freed_end_the_process(
    running: int, ended: list[int], watch: Watch, block: Block
) -> None:
    """The first release frees the streams. Later calls get stuck while the driver is blocked."""
    workspace = watch()
    assert soon(lambda: workspace.engine.releases)
    workspace.engine.running = running
    block(workspace, "release")
    if running:
        assert soon(lambda: ended) and ended == [1]
    else:
        time.sleep(3 * SHORT_S["RELEASE_S"])
        assert not ended


def test_streams_that_take_long_beside_a_driver_that_answers_end_no_process(
    ended: list[int], monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    """The caller has the error, and work of its own may come first on its streams."""
    monkeypatch.setattr("ficco.runtime.watchdog.RELEASE_S", 2 * PERIOD_S)
    workspace, waits = watch(), list[float]()

    def in_vain(slots: list[Slot], seconds: float) -> bool:
        time.sleep(2 * seconds)
        waits.append(seconds)
        return False

    workspace.engine.release = in_vain  # type: ignore[method-assign]
    workspace.error = FiccoError("broken off by MemoryError")
    assert soon(lambda: len(waits) > 3) and not ended


def test_a_call_of_the_driver_that_comes_too_late_is_not_made() -> None:
    thread, free, late = DriverThread(), threading.Event(), list[int]()
    assert thread.ask(lambda: 5, 20.0) == 5
    thread.begin(free.wait)
    with pytest.raises(TimeoutError):
        thread.ask(lambda: late.append(1), 0.0)
    with pytest.raises(BackendError, match="the device is lost"):
        free.set()
        thread.ask(lost, 20.0)
    thread.stop()
    assert not late


def lost() -> None:
    raise BackendError("hipEventQuery", "hipErrorLaunchFailure", "the device is lost")
