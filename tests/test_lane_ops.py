"""Fusion of consecutive operations of a lane by the GPU engine, without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficco.compute.program import Call
from ficco.dma.driver import WAIT_32, WRITE_32, WRITE_64, Fused, Lanes, MemOp
from ficco.dma.gpu import GpuEngine
from ficco.dma.lane_ops import Launch, Memops, Posts, Run, Scripted, enqueue, enqueue_beside, parted
from ficco.dma.memories import COUNTED_LANES, SlotWords
from ficco.dma.watch import Watch
from ficco.hip_kernels.launch import MAX_SIGNALS, PEER_BLOCKS, Kernels, ScriptStep
from ficco.plan import Transfer

#: First address of a peer's words. Lower addresses are the rank's own words.
PEER = 2000
#: Largest number of destinations of copies whose blocks may spin.
MAX_PLACES = 8
#: Writes that report the begin and the end of a captured call to the watchdog.
BEGIN, END = MemOp(WRITE_32, 9000, 1), MemOp(WRITE_64, 9000, 1 << 32)


def wait(address: int) -> MemOp:
    return MemOp(WAIT_32, address, 1)


def write(address: int) -> MemOp:
    return MemOp(WRITE_32, address, 1)


class Batch:
    def __init__(self, ops: Any) -> None:
        self.ops = tuple(ops)


class Driver:
    """A driver that enqueues nothing."""

    fuses = True

    def copy(self, dst: int, nbytes: int) -> Any:
        return None


def posts(ops: Any, sources: Any) -> Memops:
    return Memops("compute0", Posts(ops, sources, Driver()))  # type: ignore[arg-type]


def copies(lane: str, places: int = 1) -> Any:
    """The launch that an engine makes for copies to ``places`` destinations."""
    engine = Engine()
    engine._kernels = SimpleNamespace(most_that_spin=PEER_BLOCKS * MAX_PLACES)  # type: ignore[assignment]
    return engine.copies(program_of(lane, places), tuple(range(places)))


def program_of(lane: str, places: int, height: int = 2, counter: int = 5000) -> Any:
    """A program with one step of copies for each of ``places`` destinations."""
    regions = SimpleNamespace(
        place=lambda region: (1, 2),
        source=lambda region: lambda call: (1, 2),
        size=lambda region: (8, region.rows),
    )
    src: Any = SimpleNamespace(rows=height)
    steps = [SimpleNamespace(lane=lane, work=Transfer(src, src, mover="kernel"))] * places
    words = SimpleNamespace(own=range(PEER), counter=lambda lane: counter)
    slot = SimpleNamespace(state=SimpleNamespace(words=words))
    plan = SimpleNamespace(steps=steps, lanes=(lane,))
    return SimpleNamespace(plan=plan, slot=slot, state={"buffers": regions})


class Engine(GpuEngine):
    """An engine that fuses operations and runs none."""

    _kernels_or_none = Kernels.__new__(Kernels)
    _batch = Batch

    def __init__(self) -> None:
        self.driver = Driver()  # type: ignore[assignment]
        self.rank = 0


class FixedWatch(Watch):
    """A watchdog with fixed words for the begin and the end of a call."""

    def __init__(self) -> None:
        pass

    def begin(self, number: int) -> MemOp:
        return BEGIN

    def end(self) -> MemOp:
        return END


def fused(pairs: list[tuple[str, Any]], captured: bool = False) -> Any:
    """The run that an engine makes of operations of lanes. Tuples are waits and writes."""
    ops = [(lane, Memops(lane, Batch(op)) if isinstance(op, tuple) else op) for lane, op in pairs]
    lanes = tuple(dict.fromkeys(lane for lane, _ in pairs))
    words = SimpleNamespace(own=range(PEER))
    state = SimpleNamespace(watch=FixedWatch() if captured else None, words=words)
    slot = SimpleNamespace(captured=captured, state=state, number=lambda program: 1)
    plan = SimpleNamespace(lanes=lanes, words=64)
    program: Any = SimpleNamespace(plan=plan, ops=ops, state={}, slot=slot)
    return Engine()._run(program)


def enqueued(lane: str, *operations: Any) -> list[Any]:
    """The enqueued operations: waits and writes, or the operations fused around a launch."""
    body = fused([(lane, op) for op in operations]).body
    return [op.around if isinstance(op, Launch) else op.ops for op in body]


TOO_MANY = tuple(write(PEER + 4 * i) for i in range(MAX_SIGNALS + 1))


def test_launches_of_copies_take_signals() -> None:
    """A launch before a product takes all signals unless too many blocks would spin. On other lanes
    it takes no waits. It takes all posts by copies or none: the driver refuses a part of them."""
    rear = write(4), write(PEER), wait(8)
    first, posted = (wait(4), write(4)), posts((write(PEER),), (1,))
    whole = Fused((), (wait(4),), rear)
    for count, ops, expected in (
        (1, ((wait(4),), (write(4),), None, (write(PEER),), (wait(8),)), [whole]),
        (MAX_PLACES, (first, None, (write(PEER), wait(8))), [whole]),
        (MAX_PLACES + 1, (first, None, (write(PEER), wait(8))), [(wait(4),), Fused(rear=rear)]),
        (1, (first, None, posted, (wait(8),)), [whole]),
        (1, (None, posts(TOO_MANY, (1,) * len(TOO_MANY))), [Fused(), TOO_MANY]),
    ):
        ops = [copies("compute0", count) if op is None else op for op in ops]
        assert enqueued("compute0", *ops) == expected
    for lane in ("copy0", "copy1", "reduce0"):
        no_waits = Fused(rear=(write(4), write(PEER)))
        ops = first, copies(lane), (write(PEER),), (wait(8),), copies(lane)
        assert enqueued(lane, *ops) == [(wait(4),), no_waits, (wait(8),), Fused()]


LANES = st.sampled_from(["compute0", "compute1", "copy0"])
ACTS = st.lists(st.sampled_from(["copies", "wait", "own", "peer"]), max_size=12)


@given(LANES, ACTS)
def test_launches_keep_the_order_of_a_lane(lane: str, acts: list[str]) -> None:
    """Writes may move after copies, and posts to peers after clears. Other orders stay."""
    ops: list[Any] = []
    for number, act in enumerate(acts):
        single = {"wait": wait, "own": write, "peer": lambda at: write(PEER + at)}
        ops.append(copies(lane) if act == "copies" else (single[act](4 * number),))
    launches = [id(op.work) for op in ops if isinstance(op, Launch)]
    before = [(launches.pop(0), "copies") if act == "copies" else op[0] for act, op in
              zip(acts, ops, strict=True)]  # fmt: skip
    after: list[Any] = []
    for op in fused([(lane, op) for op in ops]).body:
        if isinstance(op, Launch):
            assert not op.around.begin
            after += [*op.around.front, (id(op.work), "copies"), *op.around.rear]
        else:
            after += op.ops
    assert sorted(map(repr, before)) == sorted(map(repr, after))
    place = {repr(op): at for at, op in enumerate(after)}
    for index, op in enumerate(before):
        for later in before[index + 1 :]:
            if place[repr(op)] > place[repr(later)]:
                assert isinstance(op, MemOp) and op.kind == WRITE_32, (op, later)
                posts = op.address >= PEER and isinstance(later, MemOp) and later.address < PEER
                assert later[1] == "copies" or (posts and later.kind == WRITE_32), (op, later)


@pytest.mark.parametrize(
    ("height", "counter", "fuses"), [(2, 5000, True), (0, 5000, True), (2, 0, True), (2, 9, False)]
)
def test_copies_that_take_signals(height: int, counter: int, fuses: bool) -> None:
    """Copies take signals if they have bytes, their lane has a word that counts blocks, and the
    driver's launches carry signals."""
    engine = Engine()
    engine.driver.fuses = fuses  # type: ignore[misc]
    engine._kernels = SimpleNamespace(most_that_spin=MAX_PLACES)  # type: ignore[assignment]
    op: Any = engine.copies(program_of("copy0", 1, height, counter), (0,))
    assert bool(op.arrived) is bool(height and counter and fuses)
    ops = [("copy0", each) for each in ((write(4),), op, (write(PEER),))]
    assert len(fused(ops).body) == (1 if op.arrived else 3)


def test_counters_of_lanes_follow_the_words_of_the_rank() -> None:
    memory: Any = SimpleNamespace(addresses=[10_000, 20_000])
    words = SlotWords(memory, 6, 1)
    counters = [words.counter(lane) for lane in range(COUNTED_LANES + 1)]
    assert words.own == range(20_000, 20_024)
    assert counters[-1] == 0 and len(set(counters)) == COUNTED_LANES + 1
    unique = [*counters[:-1], words.constant(0), words.constant(1), words.nobodys]
    assert len(set(unique)) == len(unique)
    assert all(at >= words.own.stop and at % 4 == 0 for at in unique)


def test_arguments_of_launches() -> None:
    """A launch without fused signals gets no scripts: its kernel is shorter."""
    passed: list[Any] = []
    call: Any = SimpleNamespace(state={"compute0": "stream"})
    bare = replace(copies("copy0"), work=lambda *arguments: passed.append(arguments))
    bare(call)
    around = Fused((BEGIN,), (wait(4), write(PEER)), (write(PEER + 4), END))
    launch = replace(bare, around=around)
    launch(call)
    (_, no_signals), (passed_call, signals) = passed
    assert launch.signals is launch.signals  # the kernels cache their arguments by its identity
    assert no_signals is None and passed_call is call and signals.arrived == 5000
    assert addresses(signals.front) == [9000, 4, PEER]
    assert addresses(signals.rear) == [PEER + 4, 9000]
    scripts: list[Any] = []
    kernels: Any = SimpleNamespace(script=lambda *arguments: scripts.append(arguments))
    Scripted(kernels, signals.front)(call)
    assert scripts == [(signals.front, "stream")]


def addresses(script: Any) -> list[int]:
    return [step.address for step in script.steps]


def one_shot() -> Any:
    return Launch(lambda call, signals: None, arrived=5000, mine=range(PEER), sums=True)


def product(call: Any) -> None:
    pass


def run_of(body: list[Any], *tail: Any, captured: bool = False) -> Any:
    """The run that an engine makes of a product's lane and of the operations after all lanes."""
    operations = [("compute0", op) for op in body] + [("sync", op) for op in tail]
    return fused(operations, captured)


@pytest.mark.parametrize("captured", [False, True])
def test_a_one_shot_sum_takes_the_signals_of_the_whole_call(captured: bool) -> None:
    """The signals include posts by copies and, in a graph, the writes to the watchdog. Another warp
    writes the begin, which no peer awaits. The first of several sums begins, the last ends."""
    copied = posts((write(PEER),), (1,))
    body = [product, (wait(4), write(4)), copied, (wait(8),), one_shot()]
    tail = [(write(PEER + 4),), (wait(12), write(8), write(12)), (write(PEER + 8),)]
    run = run_of(body, *tail, captured=captured)
    first, last = run.body
    assert first is product and run.begin is None and not run.tail
    assert last.around.front == (wait(4), write(4), write(PEER), wait(8))
    expected = write(PEER + 4), wait(12), write(8), write(12), write(PEER + 8)
    assert last.around.rear == expected + (END,) * captured
    front, rear = last.signals.front, last.signals.rear
    assert front.aside == captured and not rear.aside and rear.alone == len(rear.steps)
    assert (front.alone - captured, len(front.steps) - captured) == (3, 4)
    assert front.steps[: front.aside] == (ScriptStep(*BEGIN[1:]),) * captured

    body = [product, (wait(4),), one_shot(), product, (wait(8),), one_shot()]
    run = run_of(body, (write(PEER),), captured=captured)
    _, first, _, last = run.body
    assert first.around == Fused((BEGIN,) * captured, (wait(4),))
    assert last.around == Fused((), (wait(8),), (write(PEER), END)[: 1 + captured])
    assert run.begin is None and not run.tail


def test_signals_that_exceed_a_launch_stay_on_the_stream() -> None:
    too_many = tuple(wait(4 * i) for i in range(MAX_SIGNALS + 1))
    single, last, full = (wait(4),), one_shot(), too_many[:MAX_SIGNALS]
    run = run_of([too_many, last], single)
    assert [op.ops for op in run.body[:1]] == [too_many] and not run.body[1].around.front
    run = run_of([full, last], single, captured=True)
    assert run.body[0].around == Fused((), full) and run.begin.ops == (BEGIN,)
    run = run_of([full, product], single, captured=True)
    assert run.body[0].ops == full and run.begin.ops == (BEGIN,)
    run = run_of([single, last], full)
    assert run.body[0].around == Fused((), single, full)
    run = run_of([single, last], too_many, captured=True)
    assert run.body[0].around == Fused((), single)
    assert run.begin.ops == (BEGIN,) and [op.ops for op in run.tail] == [(*too_many, END)]
    # With work on another lane, a sum leaves the end of the call to the stream.
    lanes = [("copy0", product), ("compute0", single), ("compute0", one_shot())]
    run = fused([*lanes, ("sync", (write(PEER),))])
    assert run.lanes == ("copy0",) and run.tail_lane == "sync"
    assert run.body[1].around == Fused((), single)
    assert [op.ops for op in run.tail] == [(write(PEER),)]


def test_a_call_in_a_graph_begins_and_ends_by_launches() -> None:
    """Launches begin and end a call if copies or a wait precede its product and it has no other
    lanes. With other lanes the streams do."""
    body = [(wait(4), write(4)), copies("compute0"), (write(PEER), wait(8)), product]
    run = run_of(body, (write(PEER + 4),), captured=True)
    (first, last), (tail,) = run.body, run.tail
    assert first.around == Fused((BEGIN,), (wait(4),), (write(4), write(PEER), wait(8)))
    assert last is product and run.begin is None and run.tail_lane == "compute0"
    assert addresses(tail.script) == [PEER + 4, 9000]

    ops = [("compute0", (wait(4), write(4))), ("compute0", product), ("sync", (write(PEER),))]
    run = fused(ops, captured=True)
    (front, last), (rear,) = run.body, run.tail
    assert last is product and run.begin is None and run.tail_lane == "compute0"
    assert addresses(front.script) == [9000, 4, 4]
    assert front.script.aside == 1 and not rear.script.aside
    assert addresses(rear.script) == [PEER, 9000]
    first = [("compute0", op) for op in (posts((write(PEER),), (1,)), product)]
    for other in ([("copy0", product), *ops], ops[1:], [*first, *ops]):
        run = fused(other, captured=True)
        assert run.begin.ops == (BEGIN,) and run.tail_lane == "sync"
        assert [op.ops for op in run.tail] == [(write(PEER), END)]
    run = fused(ops)
    assert run.begin is None and [op.ops for op in run.tail] == [(write(PEER),)]
    assert product in fused([*ops, ("sync", product)], captured=True).tail


# Calls of CUDA's driver API, without a driver.


@pytest.mark.parametrize("edges", [None, [(0, 0, 0)], [(0, 1, 0)], [(0, 0, 1)]])
def test_join_aside_restores_the_dependencies_of_the_stream(
    monkeypatch: pytest.MonkeyPatch, cuda: Any, edges: list[tuple[int, ...]] | None
) -> None:
    """The bindings of CUDA 12 have no edges. The edges of CUDA 13 are invalid after the next call.
    Edges of other kinds are not restored, and the event only holds the stream."""
    driver, calls = cuda.driver, []
    names = "from_port", "to_port", "type"
    returned = [SimpleNamespace(**dict(zip(names, edge, strict=True))) for edge in edges or []]
    info = (0, 1, 7, "graph", ["node"], *([] if edges is None else [returned]), 1)
    monkeypatch.setattr(driver, "cuStreamGetCaptureInfo", lambda stream: info)

    def update(stream: str, nodes: list[str], *arguments: Any) -> tuple[int]:
        *copied, count, only = arguments
        kinds = [[(e.from_port, e.to_port, e.type) for e in each] for each in copied]
        assert not copied or copied[0][0] is not returned[0]
        calls.append(("update", stream, nodes, *kinds, count, only))
        return (0,)

    monkeypatch.setattr(driver, "cuStreamUpdateCaptureDependencies", update)
    event = SimpleNamespace(hold=lambda stream: calls.append(("hold", stream)))
    cuda_driver = cuda.CudaDriver.__new__(cuda.CudaDriver)
    cuda_driver.join_aside(event, "stream")
    plain = edges in (None, [(0, 0, 0)])
    edge = [] if edges is None else [[(0, 0, 0)]]
    restored = [("update", "stream", ["node"], *edge, 1, 1)] if plain else []
    assert calls == [("hold", "stream"), *restored]


@pytest.mark.parametrize("ranks", [(0, 1), (1, 1)])
def test_copies_that_the_batch_call_refuses_are_single_copies(
    monkeypatch: pytest.MonkeyPatch, cuda: Any, ranks: tuple[int, int]
) -> None:
    """Copies within a device are never batched: the legacy default stream refuses a batch."""
    calls: list[Any] = []
    answers = [True, False]

    def at_once(*arguments: Any) -> bool:
        calls.append("at once")
        return answers.pop(0)

    def copy(dst: Any, src: int, nbytes: int, stream: Any) -> tuple[int]:
        calls.append((int(dst), src, nbytes, stream))
        return (0,)

    monkeypatch.setattr(cuda.driver, "cuMemcpyDtoDAsync", copy)
    cuda_driver = cuda.CudaDriver.__new__(cuda.CudaDriver)
    vars(cuda_driver)["_copies_at_once"] = at_once
    copies = cuda_driver.copies(ranks)
    ends = np.array([4096, 8192]), np.array([128, 256]), np.array([16, 32])
    for _ in range(3):
        copies(*ends, "stream")
    single = [(4096, 128, 16, "stream"), (8192, 256, 32, "stream")]
    if ranks == (0, 1):  # accepted, refused, and not tried again
        assert calls == ["at once", "at once", *single, *single]
    else:
        assert calls == 3 * single


# Live operations during the replay of a recording.


def of(lane: str, *after: int) -> Any:
    return SimpleNamespace(lane=lane, after=after)


TWO_LANES: Any = [of("copy0"), of("compute0")]


@pytest.mark.parametrize(
    ("steps", "recorded", "live"),
    [
        ([of("copy0"), of("compute0"), of("sync", 0, 1)], ["copy0"], []),
        ([of("copy0"), of("compute0"), of("reduce0")], ["copy0", "reduce0"], []),
        ([of("copy0"), of("compute0"), of("reduce0", 1)], ["copy0"], ["reduce0"]),
        (
            [of("copy0"), of("copy1"), of("reduce0", 1), of("compute0")],
            *(["copy0", "copy1", "reduce0"], []),
        ),
        ([of("compute0"), of("copy0", 0), of("reduce0", 1)], [], []),
    ],
)
def test_recorded_and_live_operations_share_no_event(
    steps: Any, recorded: list[str], live: list[str]
) -> None:
    ops = [(step.lane, step) for step in steps if step.lane != "sync"]
    parts = parted(ops, steps)
    assert bool(parts) == bool(recorded)
    if parts is None:
        return
    replayed, others = parts
    assert replayed.lanes == tuple(recorded) and others.lanes == (recorded[0], *live)
    assert [op.lane for op in replayed.body] == recorded
    assert [op.lane for op in others.body] == ["compute0", *live]


class LoggedEvent:
    def __init__(self, name: str, log: list[str]) -> None:
        self.record = lambda stream: log.append(f"{name} after {stream}")
        self.hold = lambda stream: log.append(f"{stream} after {name}")


def logged_lanes(log: list[str], *events: str) -> Lanes:
    """Lanes whose stream handles are their names. The caller's stream is ``caller``."""
    names = iter(events)
    driver: Any = SimpleNamespace(event=lambda: LoggedEvent(next(names), log), aside=nullcontext)
    driver.stream_for = lambda name: SimpleNamespace(handle=name)
    return Lanes(driver, "caller", {})


def test_graphs_of_several_capturing_streams_share_no_lane() -> None:
    """They may overlap, and products of one stream have one workspace of cuBLAS. Eager calls of all
    streams share their lanes."""
    numbers = iter(range(1, 9))
    driver: Any = SimpleNamespace(event=lambda: None, aside=nullcontext, stream=lambda raw: raw)
    driver.stream_for = lambda name: SimpleNamespace(handle=f"{name} {next(numbers)}")
    engine: Any = SimpleNamespace(driver=driver, _lanes={}, _streams={0: {}})

    def lane(stream: int, captured: bool) -> str:
        driver.caller, call = lambda: stream, Call({})
        program: Any = SimpleNamespace(slot=SimpleNamespace(captured=captured), state={"run": 1})
        GpuEngine._enter(engine, program, call)
        handle: str = call.state["compute1"]
        return handle

    cases = [(stream, captured) for captured in (False, True) for stream in (7, 8, 7)]
    assert [lane(*case) for case in cases] == [
        *["compute1 1"] * 3,
        *("captured compute1 2", "captured compute1 3", "captured compute1 2"),
    ]


def test_the_order_of_streams() -> None:
    """A recording begins at the start of its call, and the call ends after the recording. A lane
    keeps partial results until they are merged: later work on the lane may reuse their memory."""
    log: list[str] = []
    ops: Any = [("copy0", None), ("compute0", lambda call: log.append("product"))]
    parts = parted(ops, TWO_LANES)
    recording: Any = SimpleNamespace(replay=lambda stream: log.append(f"copies on {stream}"))
    assert parts is not None
    enqueue_beside(recording, parts[1], Call({}, logged_lanes(log, "fork", "end")))
    assert log == [
        *("fork after caller", "copy0 after fork", "copies on copy0", "product"),
        *("end after copy0", "caller after end"),
    ]

    def attend(call: Call) -> None:
        log.append(f"attend on {call.state['compute1']}, copy on {call.state['copy0']}")
        call.parts[0] = []

    log.clear()
    run = Run([attend], None, [], "sync", ("compute1", "copy0"))
    enqueue(run, Call({}, logged_lanes(log, "fork", "end of compute1", "end of copy0")))
    assert log == [
        *("fork after caller", "attend on compute1, copy on copy0"),
        *("end of compute1 after compute1", "caller after end of compute1"),
        *("end of copy0 after copy0", "caller after end of copy0"),
        *("fork after caller", "compute1 after fork"),
    ]
