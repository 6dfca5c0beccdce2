"""Replayed arrivals on the thread driver: exact results, signals in order, and lost signals."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ranks
import thread_driver
import torch
import torch.distributed as dist
from links import link
from ranks import Rank

import ficco
from ficco.dma import ENGINES
from ficco.dma.engine import Capabilities
from ficco.heuristics import problem_of_sizes
from ficco.heuristics.families import family_of, last_arrival
from ficco.machine import find, save
from ficco.machine.model import flat
from ficco.problems.products import OPERATORS, Problem
from ficco.runtime.board import Board
from ficco.runtime.workspace import Workspace, adopt
from ficco.schedules import NAMED, Schedule, plans, refusal
from ficco.tools.bench import attention, experts, harness, measure, replay
from ficco.tools.bench import products as bench_products
from ficco.tools.bench.candidates import caller, choose
from ficco.tools.bench.cases import Case
from ficco.tools.bench.frames import BENCH, REPLAY, read_description, records
from ficco.tools.bench.replay import ROOM, Pace, Paces, ReplayEngine, ReplayOperands, proven
from ficco.tools.bench.report import report
from ficco.tools.tune import products

CPU = torch.device("cpu")
#: Bytes per second between the host and a device of threads.
RATE = 1e9
#: A copy takes at least a quarter of a millisecond, a write no time.
PACES = Paces(copies=Pace(0.0, RATE), own=Pace(0.0, RATE), tick=2.5e-4)
MACHINE = flat(1e12, 1e9, 1e12, ranks=3, start=2e-4)


class PacedDriver(thread_driver.ThreadDriver):
    """A thread driver whose copies between host and device take time."""

    def copy_from_host(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        stream.put(partial(time.sleep, nbytes / RATE))
        stream.put(partial(ctypes.memmove, dst, src, nbytes))

    def copy_to_host(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        if nbytes <= 1 << 12:  # words that a watchdog reads
            return super().copy_to_host(dst, src, nbytes, stream)
        stream.put(partial(time.sleep, nbytes / RATE))


class ThreadReplay(ReplayEngine, thread_driver.ThreadEngine):
    """A replay on threads, which splits products whose rows wait for or post signals."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), partial_signals=True)

    def untiled(self, problem: Problem, schedule: Schedule) -> str:
        return ""


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "threads", (thread_driver.__name__, "engine"))


@contextmanager
def played(rank: int, world: int, machine: Any = MACHINE) -> Iterator[tuple[Any, Workspace]]:
    """A group with only one running rank, and its workspace."""
    group = dist.ProcessGroup(dist.HashStore(), rank, world)
    with ficco.options(engine="threads", on_timeout="raise", timeout_s=20):
        engine = ThreadReplay(group, PacedDriver(CPU, 0), "auto", 20.0)
        engine.courier = replay.ReplayPeers(engine, machine, PACES)
        one_rank = dist.ProcessGroup(dist.HashStore(), 0, 1)
        workspace = adopt(group, CPU, Board(one_rank, 20.0), engine)
        try:
            yield group, workspace
        finally:
            ficco.close(group)


def problem_of(operator: str, world: int, equal: bool = True) -> Problem:
    rows = [8] * world if equal else [5 + 3 * rank for rank in range(world)]
    if OPERATORS[operator].blocks:
        return Problem.of_blocks(operator, [rows] * world, 12, 16, "float32")
    return Problem(operator, tuple(rows), 12, 16, "float32")


def received_s(problem: Any, machine: Any, rank: int) -> float:
    return last_arrival(family_of(problem).received(problem, rank), machine)


def operands_of(problem: Problem, rank: int, number: int = 0) -> ReplayOperands:
    """Integer operands of a rank."""
    operands = ReplayOperands(problem, rank, CPU)
    operands.exact_b()
    operands.exact(number)
    return operands


def exact(group: Any, workspace: Workspace, problem: Problem, names: list[str]) -> None:
    operands = operands_of(problem, group.rank())
    for number, name in enumerate(names):
        for turn in range(2):  # one call on each slot
            operands.exact(2 * number + turn)
            result = proven(caller(operands, group, name), operands, workspace)
            assert torch.equal(result, operands.reference()), f"{name}, rank {group.rank()}"


def served(problem: Problem, knobs: str) -> list[str]:
    """Named schedules with these knobs that serve the problem and can be replayed."""
    names = []
    for name in NAMED:
        with suppress(ValueError):  # the schedule lacks one of the knobs
            schedule = Schedule.parse(f"{name}:{knobs}" if knobs else name)
            if not schedule.sums_in_place and not refusal(problem, schedule):
                names.append(str(schedule))
    return names


@pytest.mark.parametrize("knobs", ["", "pull", "pieces=3,copy=2,compute=2"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_schedule_is_exact_on_every_rank(operator: str, knobs: str) -> None:
    """Ranks take turns; groups of two ranks, and of three with different numbers of rows."""
    count = 0
    for world, equal in ((2, True), (3, False)):
        problem = problem_of(operator, world, equal)
        names = served(problem, knobs)
        for rank in range(world):
            with played(rank, world) as (group, workspace):
                exact(group, workspace, problem, names[rank::world])
        count += len(names)
    assert count >= 2 * 8


@pytest.mark.parametrize("operator", [name for name, kind in OPERATORS.items() if not kind.inner])
def test_scaled_calls_are_exact(operator: str) -> None:
    for turn, kind in enumerate(("fp8-tensor", "fp8-row", "fp8-block")):
        problem = problem_of_sizes(operator, 64, 32, 256, kind, 2)
        with played(1, 2) as (group, workspace):
            names = served(problem, "")
            assert len(names) >= 5
            exact(group, workspace, problem, names[turn::3])


def check_arrivals(engine: Any, run: Callable[[], Any]) -> list[Any]:
    """Arrivals of three replayed calls, which must be in order and not too early."""
    for _ in range(3):
        began = time.perf_counter()
        run()
        seconds = time.perf_counter() - began
        timetable = engine.courier.timetable(engine.latest)
        expected = [arrival for piece in timetable.pieces for arrival in piece.arrivals]
        errors = engine.courier.errors()
        # An instant transfer would be 100 ms early. A busy machine records the start 10 ms late.
        assert len(errors) == len(expected) and min(errors) > -60e-3, errors
        assert seconds > expected[-1].at > 100e-3
        assert [each.at for each in expected] == sorted(each.at for each in expected)
    return expected


@pytest.mark.parametrize("schedule", ["shard-overlap", "hetero-fused-1d", "ring", "tiled:pull"])
def test_signals_come_in_order_and_not_too_early(schedule: str) -> None:
    operator = "matmul_reduce_scatter" if schedule == "ring" else "all_gather_matmul"
    problem = problem_of(operator, 3)
    # A shard takes 100 ms.
    with played(1, 3, link(MACHINE, 5e-6)) as (group, workspace):
        arrived = check_arrivals(workspace.engine, caller(operands_of(problem, 1), group, schedule))
    waited = {
        signal
        for step in plans(problem, Schedule.parse(schedule))[1].steps
        for signal in (*step.waits, *step.gates)
        if signal.poster != 1 and not signal.released
    }
    assert {arrival.signal for arrival in arrived} == waited


def test_a_layer_of_experts_is_replayed() -> None:
    """Peers' tokens arrive, and this rank's results return, at the times of a link."""
    torch.manual_seed(0)
    weights, indices = torch.rand(20, 6).topk(2)
    operands = torch.ones(20, 16), indices, weights, torch.ones(2, 16, 8), torch.ones(2, 8, 16)
    with played(1, 3, link(MACHINE, 2e-5)) as (group, workspace):
        layer = partial(ficco.experts, *operands, capacity=8, group=group)
        arrived = check_arrivals(workspace.engine, partial(layer, schedule="shard-overlap"))
    kinds = [arrival.signal.kind for arrival in arrived]
    assert kinds.count("ready") == kinds.count("returned") == 2


def test_time_passes_by_copies_or_else_by_writes() -> None:
    paces = Paces(word=3e-6, write=1e-6, copies=Pace(4e-6, 64e9), own=Pace(5e-6, 50e9))
    with played(0, 3) as (_, workspace):
        courier, driver = workspace.engine.courier, workspace.engine.driver
        courier.paces, enqueued = paces, []
        driver.copy_from_host = lambda to, at, nbytes, stream: enqueued.append(("in", nbytes))
        driver.copy_to_host = lambda to, at, nbytes, stream: enqueued.append(("out", nbytes))
        driver.batch = lambda ops: SimpleNamespace(enqueue=lambda stream: enqueued.extend(ops))

        def enqueued_by(passes: Any) -> list[Any]:
            enqueued.clear()
            passes(None)
            return list(enqueued)

        assert enqueued_by(courier.passage(2e-6, 5e-6)) == []
        assert len(enqueued_by(courier.passage(7.5e-6, 5e-6))) == 4  # writes
        for seconds, tick in ((8.2e-6, 5e-6), (1e-3, 5e-6), (1e-3, 100e-6)):
            copies = enqueued_by(courier.passage(seconds, tick))
            assert {direction for direction, _ in copies} == {"in"}
            assert len(copies) == int((seconds - 3e-6) / tick)
            copied_s = sum(4e-6 + nbytes / 64e9 for _, nbytes in copies)
            assert copied_s == pytest.approx(seconds - 3e-6, rel=1e-3)
        long = 5e-6 + 2.5 * ROOM / 50e9
        crossing = enqueued_by(courier.crossing(long + 1e-11))
        assert crossing == [("out", ROOM), ("out", ROOM), ("out", ROOM // 2)]


def test_a_call_has_no_more_copies_than_a_stream_holds() -> None:
    with played(1, 3, link(MACHINE, 1e-5)) as (group, workspace):  # a shard takes 50 ms
        problem, engine = problem_of("all_gather_matmul", 3), workspace.engine
        operands = ReplayOperands(problem, 1, CPU)
        operands.random(0)
        engine.courier.paces = replace(PACES, tick=1e-5)
        caller(operands, group, "shard-overlap")()
        timetable = engine.courier.timetable(engine.latest)
        counts = [seconds / timetable.tick for seconds in timetable.durations()]
        assert replay.TICKS / 2 < sum(counts) <= replay.TICKS


def test_the_courier_learns_what_delays_it() -> None:
    """Late starts and slow copies are compensated, except for a piece due before a copy can end."""
    delays, stamps = (0.2, 0.1, 0.4), [SimpleNamespace(at=0.0) for _ in range(3)]
    begin: Any = SimpleNamespace(seconds_to=lambda stamp: stamp.at)
    ends, unused = (1.0, 1.5, 1.7), cast(Any, None)
    pairs = zip(ends, stamps, strict=True)
    pieces = [replay.Piece(at, (), unused, cast(Any, one)) for at, one in pairs]
    timetable = replay.Timetable(unused, tuple(pieces), 0.1, [0.0] * 3)
    assert timetable.durations() == pytest.approx([1.0, 0.5, 0.2])
    for _ in range(20):
        now = 0.0
        for stamp, duration, delay in zip(stamps, timetable.durations(), delays, strict=True):
            stamp.at = now = now + duration + delay
        timetable.learn(begin)
    assert [stamp.at for stamp in stamps] == pytest.approx([1.0, 1.5, 1.9], abs=1e-4)


def test_calls_take_turns_on_slots_that_are_handed_on() -> None:
    """A call, prepared or not, runs on the slot state that the previous call left."""
    problem = problem_of("matmul_reduce_scatter", 3)
    with played(0, 3) as (group, workspace):
        engine: Any = workspace.engine
        operands = operands_of(problem, 0)
        assert engine.next_slot is None
        for name in ("growing", "ring:pieces=4"):
            run, programs = caller(operands, group, name), {}
            for prepared in (False, False, True, True, False, True, True):
                program = programs[id(engine.next_slot)] if prepared else None
                engine.courier.prepare(program)
                if prepared:
                    engine.courier.go()
                run()
                assert program in (None, engine.latest)
                programs[id(engine.latest.slot)] = engine.latest
            assert len(programs) == 2


@ranks.on_ranks(1, fresh=True)
def test_a_signal_that_never_comes_is_named(at: Rank) -> None:
    thread_driver.serve()
    problem, original = problem_of("all_gather_matmul", 3), replay.arrivals
    replay.arrivals = lambda *args: [a for a in original(*args) if a.signal.poster != 2]
    with played(0, 3) as (group, _), ficco.options(timeout_s=0.5):
        run = caller(operands_of(problem, 0), group, "shard-overlap")
        error = ranks.caught(lambda: (run(), run()))
    assert error.type == "SignalTimeout", error
    assert error.fields["peer"] == 2 and "shard-overlap" in error.text


def test_missing_rows_change_the_result() -> None:
    problem = problem_of("all_gather_matmul", 3)
    with played(0, 3) as (group, workspace):
        operands = operands_of(problem, 0)
        run = caller(operands, group, "growing")
        assert torch.equal(proven(run, operands, workspace), operands.reference())
        operands.exact(1)
        assert not torch.equal(run(), operands.reference())


def test_arrivals_follow_the_link() -> None:
    problem = problem_of("all_gather_matmul", 3)
    machine = link(flat(1e12, 1.0, 1e12, ranks=3), 1e-6, 2e6)  # 1000 bytes a second, 2 s
    shard = 8 * 16 * 4 / 1e3
    all_plans = plans(problem, Schedule.parse("shard-overlap"))
    expected = replay.arrivals(all_plans, machine, "queued", 0)
    assert [arrival.at for arrival in expected] == pytest.approx([2 + shard, 2 + 2 * shard])
    assert [transfer.src.rank for arrival in expected for transfer in arrival.transfers] == [
        arrival.signal.poster for arrival in expected
    ]
    assert received_s(problem, machine, 0) == pytest.approx(expected[-1].at)
    scattered = problem_of("matmul_all_reduce", 3)
    both_ways = 2 * (2 + 2 * 8 * 12 * 4 / 1e3)
    assert received_s(scattered, machine, 0) == pytest.approx(both_ways)
    mesh = link(flat(1e12, 1.0, 1e12, kind="mesh"), 1e-6, 2e6)
    assert received_s(problem, mesh, 0) == pytest.approx(2 + shard)


def test_schedules_that_need_peers_are_refused() -> None:
    problem = problem_of("matmul_reduce_scatter", 2)
    for schedule in ("serial:kernel", "serial:collective", "one-shot"):
        with played(0, 2) as (group, _):
            with pytest.raises(NotImplementedError, match="no peers|no mover"):
                caller(operands_of(problem, 0), group, schedule)()


class HostEvent:
    """An event of a device that finishes each operation as soon as it is enqueued."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: HostEvent) -> float:
        return (later.at - self.at) * 1e3


CASES = (
    (Case("gather", 48, 12, 16, "float32"), "queued"),
    (Case("scatter", 48, 12, 16, "float32", operator="matmul_reduce_scatter"), "idle"),
)
NAMES = "tiled serial:kernel one-shot growing:pull growing shrinking candidates=3 auto".split()


def _played_by_threads(lost: str) -> None:
    """Let benches of a replay use the thread driver; no arrival of the schedule ``lost`` comes."""
    thread_driver.serve()
    real = replay.arrivals
    replay.arrivals = lambda plans, *rest: [] if plans[0].schedule == lost else real(plans, *rest)
    device = SimpleNamespace(
        Event=HostEvent,
        synchronize=lambda: None,
        _sleep=lambda cycles: None,
        get_device_name=lambda device: "NVIDIA H200",
    )

    def clock(self: Any, group: Any, barrier: Any) -> None:
        self._group, self._barrier, self._hertz = group, barrier, 1.0
        self._start, self._stop, self._word = HostEvent(), HostEvent(), torch.zeros(1)

    def engine(name: str, group: Any, *rest: Any, kind: type) -> ThreadReplay:
        assert kind is ReplayEngine
        return ThreadReplay(group, PacedDriver(CPU, 0), "auto", 20.0)

    measure.gpu = replay.gpu = device  # type: ignore[assignment]
    measure.DeviceClock.__init__ = clock  # type: ignore[method-assign]
    replay.make_engine = engine  # type: ignore[assignment]
    replay.PACE_ROWS = 2
    ficco.set_options(engine="threads", on_timeout="raise", timeout_s=20)
    products.REFIT_S, replay.TIMEOUT_S = 0.5, 3.0


@pytest.mark.parametrize(("case", "mode"), CASES, ids=("gather", "scatter"))
@ranks.on_ranks(1, fresh=True, timeout=200)
def test_the_bench_of_a_replay(at: Rank, tmp_path: Path, case: Case, mode: str) -> None:
    _played_by_threads(lost="shrinking")
    replayed = replay.Replayed(world=3, rank=1, machine="h200-4", products=products.refitted)
    options: Any = {"device": "cpu", "rounds": 2, "seconds": 600, "csv": tmp_path / "rows.csv"}
    options |= {"cases": (case,), "modes": (mode,), "schedules": choose(NAMES)}
    subject = replace(bench_products.SUBJECT, schema=REPLAY)
    settings = harness.BenchSettings(subject=subject, replayed=replayed, **options)
    frame = harness.bench(settings)
    assert frame is not None
    rows, about = records(frame), read_description(settings.csv)
    text = report(REPLAY.read(settings.csv), about, "rows", [])
    assert "plays rank 1 of 3" in text and "growing" in text and "its planned time is off" in text
    assert "planned time" not in report(BENCH.read(settings.csv), about, "rows", [])
    machine = find("h200-4", None)
    assert machine is not None
    measured = ["gemm", "copies", "ideal", "serial", "growing", "tiled", "growing:pull"]
    by_name = {r["candidate"]: r for r in rows if (r["case"], r["mode"]) == (case.name, mode)}
    assert [by_name[name]["status"] for name in measured] == ["ok"] * len(measured), by_name
    assert "is " in by_name["auto"]["note"]
    lost = by_name.pop("shrinking")
    assert lost["status"] == "failed" and "SignalTimeout" in lost["note"], lost
    assert all(row["status"] in ("ok", "skipped") for row in by_name.values())
    predicted = {*by_name} - {*NAMES, *measured}
    assert predicted, by_name.keys()  # two of the three may be named schedules
    for row in (by_name[name] for name in (*measured[3:], *predicted)):
        assert row["off_us"] > 0 and row["host_us"] > 0 and row["rounds"] == 2
        # No replay ends before its last arrival.
        assert row["ms_high"] > by_name["copies"]["ms"] and 0 < row["share"]
    last = received_s(case.problem(3), machine, 1)
    assert by_name["copies"]["ms"] == by_name["copies"]["ms_high"] == pytest.approx(last * 1e3)
    about = json.loads((tmp_path / "rows.json").read_text())
    assert "plays rank 1 of 3" in about["note"] and about["ranks"] == 3
    assert "off_us" in (tmp_path / "rows.csv").read_text().splitlines()[0]
    fitted = find(str(tmp_path / "rows_machine.yaml"), None)
    assert fitted is not None and fitted.copies is not None and fitted.gemm is not None
    assert fitted.copies == machine.copies
    assert fitted.gemm != machine.gemm and fitted.gemm.provenance.source == "fitted"


LOST = "hetero-fused-1d:pieces=2"


@ranks.on_ranks(1, fresh=True)
def test_the_bench_of_ways_is_replayed(at: Rank, tmp_path: Path) -> None:
    """No peer's row is sent and no collective is called; the rest is timed against its parts."""
    _played_by_threads(LOST)
    replay.TIMEOUT_S = 0.5
    replay.gpu.get_device_name = lambda device: "NVIDIA H100 80GB HBM3"  # type: ignore[assignment]
    machine, slow = find("h200-4", None), tmp_path / "slow.yaml"
    assert machine is not None
    save(replace(machine, copies=None), slow)
    replayed = replay.Replayed(world=2, rank=1, machine=str(slow))
    with pytest.raises(ValueError, match="'topology' and 'copies'"):
        replay.replayed_watch(replayed, tmp_path / "none.csv", CPU)
    save(link(machine, latency_us=2000.0), slow)
    recorded: list[Any] = []
    for room, schedules in ((attention, ("serial", LOST, "auto")), (experts, ())):
        cases, csv = room.SHAPES["cpu"][: 2 if schedules else 1], f"{room.SUBJECT.name}.csv"
        options: Any = {"device": "cpu", "rounds": 3, "seconds": 600, "csv": tmp_path / csv}
        options |= {"cases": cases, "modes": ("queued",), "schedules": schedules}
        settings = harness.BenchSettings(subject=room.SUBJECT, replayed=replayed, **options)
        rows = harness.bench(settings)
        assert rows is not None
        text = harness.report(room.SUBJECT, rows, read_description(settings.csv), "name")
        assert "plays rank 1 of 2" in text and "| copies | " in text and "SignalTimeout" in text
        recorded += records(rows)
    for case, part, stages in (
        ("all_gather_attention", "attention", 1),
        ("ulysses_attention", "attention", 2),
        ("experts", "products", 2),
    ):
        by_way = {row["way"]: row for row in recorded if row.get("operator", "experts") == case}
        lost = by_way.pop(LOST)
        refused = case == "ulysses_attention"
        assert lost["status"] == ("skipped" if refused else "failed"), lost
        assert ("required serial or" if refused else "SignalTimeout") in lost["note"]
        assert {"copies", part, "serial", "auto", "ideal"} <= by_way.keys()
        assert not any("all-" in way or "collective" in way or "parallel" in way for way in by_way)
        assert {row["status"] for row in by_way.values()} == {"ok"}
        copies, ideal, serial = (by_way[name] for name in ("copies", "ideal", "serial"))
        assert 2.0 * stages < copies["ms"] < 2.0 * stages + 0.1 and serial["speedup"] == 1.0
        # Medians over rounds, in which either part may be the longer one.
        assert ideal["ms"] >= max(copies["ms"], by_way[part]["ms"])
        assert ideal["share"] == 1.0 < ideal["in_turn"] <= 2.0
        # The courier may be early while it learns.
        assert serial["ms"] > copies["ms"] / 2 and 0 < serial["share"] <= serial["in_turn"]
        assert by_way["auto"]["took"] and not serial["took"]
    about = json.loads((tmp_path / "experts.json").read_text())
    assert about["ranks"] == 2 and "from GPUs like those of h100-2" in about["note"]
    # The ranks' topology is that of 4 H200, their GPUs are H100.
    devices, fitted = find("h100-2", None), find(str(tmp_path / "experts_machine.yaml"), None)
    assert fitted and devices and fitted.topology == machine.topology
    for block in ("gemm", "experts", "attention", "memory"):
        assert getattr(fitted, block) == getattr(devices, block)
