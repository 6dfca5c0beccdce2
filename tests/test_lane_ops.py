"""What the GPU engine makes of operations that follow each other on a lane, without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import missing

from ficco.compute.program import Call
from ficco.dma.driver import WAIT_32, WRITE_32, WRITE_64, Fused, Lanes, MemOp
from ficco.dma.gpu import GpuEngine
from ficco.dma.lane_ops import Launch, Memops, Posts, Run, Scripted, enqueue, enqueue_beside, parted
from ficco.dma.memories import COUNTED_LANES, SlotWords
from ficco.dma.watch import Watch
from ficco.hip_kernels.launch import MAX_SIGNALS, PEER_BLOCKS, Kernels, ScriptStep
from ficco.plan import Transfer

#: Words below are the rank's own, and these a peer's.
PEER = 2000
#: Places to which copies may spin.
MOST = 8
#: What tells the watchdog that a captured call begins, and that it is over.
BEGIN, END = MemOp(WRITE_32, 9000, 1), MemOp(WRITE_64, 9000, 1 << 32)


def wait(address: int) -> MemOp:
    return MemOp(WAIT_32, address, 1)


def write(address: int) -> MemOp:
    return MemOp(WRITE_32, address, 1)


class Batch:
    def __init__(self, ops: Any) -> None:
        self.ops = tuple(ops)


class Driver:
    """Enqueues nothing."""

    fuses = True

    def copy(self, dst: int, nbytes: int) -> Any:
        return None


def posts(ops: Any, sources: Any) -> Memops:
    return Memops("compute0", Posts(ops, sources, Driver()))  # type: ignore[arg-type]


def copies(lane: str, places: int = 1) -> Any:
    """As an engine makes them."""
    engine = Engine()
    engine._kernels = SimpleNamespace(most_that_spin=PEER_BLOCKS * MOST)  # type: ignore[assignment]
    return engine.copies(program_of(lane, places), tuple(range(places)))


def program_of(lane: str, places: int, height: int = 2, counter: int = 5000) -> Any:
    """A program of copies from as many steps as there are places."""
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
    """Makes something of operations, and runs nothing."""

    _kernels_or_none = Kernels.__new__(Kernels)
    _batch = Batch

    def __init__(self) -> None:
        self.driver = Driver()  # type: ignore[assignment]
        self.rank = 0


class Told(Watch):
    """Says what tells a watchdog."""

    def __init__(self) -> None:
        pass

    def begin(self, number: int) -> MemOp:
        return BEGIN

    def end(self) -> MemOp:
        return END


def made(given: list[tuple[str, Any]], captured: bool = False) -> Any:
    """What an engine makes of operations of lanes; tuples are waits and writes."""
    ops = [(lane, Memops(lane, Batch(op)) if isinstance(op, tuple) else op) for lane, op in given]
    lanes = tuple(dict.fromkeys(lane for lane, _ in given))
    words = SimpleNamespace(own=range(PEER))
    state = SimpleNamespace(watch=Told() if captured else None, words=words)
    slot = SimpleNamespace(captured=captured, state=state, number=lambda program: 1)
    plan = SimpleNamespace(lanes=lanes, words=64)
    program: Any = SimpleNamespace(plan=plan, ops=ops, state={}, slot=slot)
    return Engine()._run(program)


def enqueued(lane: str, *given: Any) -> list[Any]:
    """What is left of operations: waits and writes, or what is around a launch."""
    body = made([(lane, op) for op in given]).body
    return [op.around if isinstance(op, Launch) else op.ops for op in body]


MANY = tuple(write(PEER + 4 * i) for i in range(MAX_SIGNALS + 1))


def test_what_launches_of_copies_see_to() -> None:
    """In front of a product to all, if not too many blocks would spin; beside products to no waits;
    to posts by copies too, but to all of these or none: the driver refuses what would be left."""
    rear = write(4), write(PEER), wait(8)
    first, posted = (wait(4), write(4)), posts((write(PEER),), (1,))
    whole = Fused((), (wait(4),), rear)
    for count, ops, left in (
        (1, ((wait(4),), (write(4),), None, (write(PEER),), (wait(8),)), [whole]),
        (MOST, (first, None, (write(PEER), wait(8))), [whole]),
        (MOST + 1, (first, None, (write(PEER), wait(8))), [(wait(4),), Fused(rear=rear)]),
        (1, (first, None, posted, (wait(8),)), [whole]),
        (1, (None, posts(MANY, (1,) * len(MANY))), [Fused(), MANY]),
    ):
        ops = [copies("compute0", count) if op is None else op for op in ops]
        assert enqueued("compute0", *ops) == left
    for lane in ("copy0", "copy1", "reduce0"):
        bare = Fused(rear=(write(4), write(PEER)))
        ops = first, copies(lane), (write(PEER),), (wait(8),), copies(lane)
        assert enqueued(lane, *ops) == [(wait(4),), bare, (wait(8),), Fused()]


LANES = st.sampled_from(["compute0", "compute1", "copy0"])
ACTS = st.lists(st.sampled_from(["copies", "wait", "own", "peer"]), max_size=12)


@given(LANES, ACTS)
def test_launches_keep_the_order_of_a_lane(lane: str, acts: list[str]) -> None:
    """But that writes may come behind copies, and what peers are told behind what is cleared."""
    ops: list[Any] = []
    for number, act in enumerate(acts):
        single = {"wait": wait, "own": write, "peer": lambda at: write(PEER + at)}
        ops.append(copies(lane) if act == "copies" else (single[act](4 * number),))
    launches = [id(op.work) for op in ops if isinstance(op, Launch)]
    before = [(launches.pop(0), "copies") if act == "copies" else op[0] for act, op in
              zip(acts, ops, strict=True)]  # fmt: skip
    after: list[Any] = []
    for op in made([(lane, op) for op in ops]).body:
        if isinstance(op, Launch):
            assert not op.around.begin
            after += [*op.around.front, (id(op.work), "copies"), *op.around.rear]
        else:
            after += op.ops
    assert sorted(map(repr, before)) == sorted(map(repr, after))
    place = {repr(one): at for at, one in enumerate(after)}
    for index, one in enumerate(before):
        for other in before[index + 1 :]:
            if place[repr(one)] > place[repr(other)]:
                assert isinstance(one, MemOp) and one.kind == WRITE_32, (one, other)
                told = one.address >= PEER and isinstance(other, MemOp) and other.address < PEER
                assert other[1] == "copies" or (told and other.kind == WRITE_32), (one, other)


@pytest.mark.parametrize(
    ("height", "counter", "fuses"), [(2, 5000, True), (0, 5000, True), (2, 0, True), (2, 9, False)]
)
def test_which_copies_see_to_signals(height: int, counter: int, fuses: bool) -> None:
    """None of nothing, none on a lane that has no word to count blocks in, and none where launches
    carry no signals."""
    engine = Engine()
    engine.driver.fuses = fuses  # type: ignore[misc]
    engine._kernels = SimpleNamespace(most_that_spin=MOST)  # type: ignore[assignment]
    op: Any = engine.copies(program_of("copy0", 1, height, counter), (0,))
    assert bool(op.arrived) is bool(height and counter and fuses)
    ops = [("copy0", one) for one in ((write(4),), op, (write(PEER),))]
    assert len(made(ops).body) == (1 if op.arrived else 3)


def test_lanes_count_in_words_of_their_own_after_those_of_the_rank() -> None:
    memory: Any = SimpleNamespace(addresses=[10_000, 20_000])
    words = SlotWords(memory, 6, 1)
    counters = [words.counter(lane) for lane in range(COUNTED_LANES + 1)]
    assert words.own == range(20_000, 20_024)
    assert counters[-1] == 0 and len(set(counters)) == COUNTED_LANES + 1
    apart = [*counters[:-1], words.constant(0), words.constant(1), words.nobodys]
    assert len(set(apart)) == len(apart)
    assert all(at >= words.own.stop and at % 4 == 0 for at in apart)


def test_what_launches_are_given() -> None:
    """Nothing where there is nothing around: the kernel without scripts is the shorter one."""
    given: list[Any] = []
    call: Any = SimpleNamespace(state={"compute0": "stream"})
    bare = replace(copies("copy0"), work=lambda call, signals: given.append((call, signals)))
    bare(call)
    around = Fused((BEGIN,), (wait(4), write(PEER)), (write(PEER + 4), END))
    launch = replace(bare, around=around)
    launch(call)
    (_, none), (passed, signals) = given
    assert launch.signals is launch.signals  # the kernels keep what they prepare for it
    assert none is None and passed is call and signals.arrived == 5000
    assert addresses(signals.front) == [9000, 4, PEER]
    assert addresses(signals.rear) == [PEER + 4, 9000]
    scripts: list[Any] = []
    kernels: Any = SimpleNamespace(script=lambda *given: scripts.append(given))
    Scripted(kernels, signals.front)(call)
    assert scripts == [(signals.front, "stream")]


def addresses(script: Any) -> list[int]:
    return [step.address for step in script.steps]


def one_shot() -> Any:
    return Launch(lambda call, signals: None, arrived=5000, mine=range(PEER), sums=True)


def product(call: Any) -> None:
    pass


def run_of(body: list[Any], *tail: Any, captured: bool = False) -> Any:
    """What an engine makes of a product's lane and of what comes behind all lanes."""
    given = [("compute0", op) for op in body] + [("sync", op) for op in tail]
    return made(given, captured)


@pytest.mark.parametrize("captured", [False, True])
def test_a_sum_at_the_peers_sees_to_the_whole_call(captured: bool) -> None:
    """Posts by copies among it; in a graph to what the watchdog is told, too: of the begin, for
    which nothing waits, beside all else. Of several sums the first begins and the last ends."""
    copied = posts((write(PEER),), (1,))
    body = [product, (wait(4), write(4)), copied, (wait(8),), one_shot()]
    tail = [(write(PEER + 4),), (wait(12), write(8), write(12)), (write(PEER + 8),)]
    run = run_of(body, *tail, captured=captured)
    first, last = run.body
    assert first is product and run.begin is None and not run.tail
    assert last.around.front == (wait(4), write(4), write(PEER), wait(8))
    told = write(PEER + 4), wait(12), write(8), write(12), write(PEER + 8)
    assert last.around.rear == told + (END,) * captured
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


def test_what_is_too_much_for_a_launch_stays_with_the_stream() -> None:
    many = tuple(wait(4 * i) for i in range(MAX_SIGNALS + 1))
    few, last, full = (wait(4),), one_shot(), many[:MAX_SIGNALS]
    run = run_of([many, last], few)
    assert [op.ops for op in run.body[:1]] == [many] and not run.body[1].around.front
    run = run_of([full, last], few, captured=True)
    assert run.body[0].around == Fused((), full) and run.begin.ops == (BEGIN,)
    run = run_of([full, product], few, captured=True)
    assert run.body[0].ops == full and run.begin.ops == (BEGIN,)
    run = run_of([few, last], full)
    assert run.body[0].around == Fused((), few, full)
    run = run_of([few, last], many, captured=True)
    assert run.body[0].around == Fused((), few)
    assert run.begin.ops == (BEGIN,) and [op.ops for op in run.tail] == [(*many, END)]
    # A sum beside others leaves the end to the stream, too.
    given = [("copy0", product), ("compute0", few), ("compute0", one_shot())]
    run = made([*given, ("sync", (write(PEER),))])
    assert run.lanes == ("copy0",) and run.tail_lane == "sync"
    assert run.body[1].around == Fused((), few)
    assert [op.ops for op in run.tail] == [(write(PEER),)]


def test_a_call_in_a_graph_begins_and_ends_by_launches() -> None:
    """If copies or a wait are in front of its product, and it has no lanes of its own, which would
    begin and end there anyhow."""
    body = [(wait(4), write(4)), copies("compute0"), (write(PEER), wait(8)), product]
    run = run_of(body, (write(PEER + 4),), captured=True)
    (first, last), (tail,) = run.body, run.tail
    assert first.around == Fused((BEGIN,), (wait(4),), (write(4), write(PEER), wait(8)))
    assert last is product and run.begin is None and run.tail_lane == "compute0"
    assert addresses(tail.script) == [PEER + 4, 9000]

    given = [("compute0", (wait(4), write(4))), ("compute0", product), ("sync", (write(PEER),))]
    run = made(given, captured=True)
    (front, last), (rear,) = run.body, run.tail
    assert last is product and run.begin is None and run.tail_lane == "compute0"
    assert addresses(front.script) == [9000, 4, 4]
    assert front.script.aside == 1 and not rear.script.aside
    assert addresses(rear.script) == [PEER, 9000]
    first = [("compute0", op) for op in (posts((write(PEER),), (1,)), product)]
    for other in ([("copy0", product), *given], given[1:], [*first, *given]):
        run = made(other, captured=True)
        assert run.begin.ops == (BEGIN,) and run.tail_lane == "sync"
        assert [op.ops for op in run.tail] == [(write(PEER), END)]
    run = made(given)
    assert run.begin is None and [op.ops for op in run.tail] == [(write(PEER),)]
    assert product in made([*given, ("sync", product)], captured=True).tail


# Calls of CUDA's driver, without one.


@pytest.fixture
def cuda() -> Any:
    try:
        from ficco.dma import cuda_driver
    except ImportError:
        missing("cuda-bindings")
    return cuda_driver


@pytest.mark.parametrize("edges", [None, [(0, 0, 0)], [(0, 1, 0)], [(0, 0, 1)]])
def test_what_is_joined_aside_leaves_the_stream_as_it_was(
    monkeypatch: pytest.MonkeyPatch, cuda: Any, edges: list[tuple[int, ...]] | None
) -> None:
    """By bindings of CUDA 12, which know no edges, and of 13, whose edges do not outlast the next
    call; edges of a kind that nobody gives back are left to a plain hold."""
    driver, calls = cuda.driver, []
    names = "from_port", "to_port", "type"
    found = [SimpleNamespace(**dict(zip(names, edge, strict=True))) for edge in edges or []]
    info = (0, 1, 7, "graph", ["node"], *([] if edges is None else [found]), 1)
    monkeypatch.setattr(driver, "cuStreamGetCaptureInfo", lambda stream: info)

    def update(stream: str, nodes: list[str], *rest: Any) -> tuple[int]:
        *fresh, count, only = rest
        kinds = [[(e.from_port, e.to_port, e.type) for e in each] for each in fresh]
        assert not fresh or fresh[0][0] is not found[0]
        calls.append(("update", stream, nodes, *kinds, count, only))
        return (0,)

    monkeypatch.setattr(driver, "cuStreamUpdateCaptureDependencies", update)
    event = SimpleNamespace(hold=lambda stream: calls.append(("hold", stream)))
    made = cuda.CudaDriver.__new__(cuda.CudaDriver)
    made.join_aside(event, "stream")
    plain = edges in (None, [(0, 0, 0)])
    edge = [] if edges is None else [[(0, 0, 0)]]
    restored = [("update", "stream", ["node"], *edge, 1, 1)] if plain else []
    assert calls == [("hold", "stream"), *restored]


@pytest.mark.parametrize("ranks", [(0, 1), (1, 1)])
def test_copies_that_are_not_taken_at_once_are_made_one_by_one(
    monkeypatch: pytest.MonkeyPatch, cuda: Any, ranks: tuple[int, int]
) -> None:
    """Those within a device never are: the legacy default stream would refuse them."""
    calls: list[Any] = []
    answers = [True, False]

    def at_once(*given: Any) -> bool:
        calls.append("at once")
        return answers.pop(0)

    def copy(dst: Any, src: int, nbytes: int, stream: Any) -> tuple[int]:
        calls.append((int(dst), src, nbytes, stream))
        return (0,)

    monkeypatch.setattr(cuda.driver, "cuMemcpyDtoDAsync", copy)
    made = cuda.CudaDriver.__new__(cuda.CudaDriver)
    vars(made)["_copies_at_once"] = at_once
    copies = made.copies(ranks)
    ends = np.array([4096, 8192]), np.array([128, 256]), np.array([16, 32])
    for _ in range(3):
        copies(*ends, "stream")
    each = [(4096, 128, 16, "stream"), (8192, 256, 32, "stream")]
    if ranks == (0, 1):  # taken, refused, and never tried again
        assert calls == ["at once", "at once", *each, *each]
    else:
        assert calls == 3 * each


# Beside a recording.


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
def test_what_is_recorded_shares_no_event_with_the_rest(
    steps: Any, recorded: list[str], live: list[str]
) -> None:
    ops = [(step.lane, step) for step in steps if step.lane != "sync"]
    parts = parted(ops, steps)
    assert bool(parts) == bool(recorded)
    if parts is None:
        return
    alone, rest = parts
    assert alone.lanes == tuple(recorded) and rest.lanes == (recorded[0], *live)
    assert [op.lane for op in alone.body] == recorded
    assert [op.lane for op in rest.body] == ["compute0", *live]


class LoggedEvent:
    def __init__(self, name: str, log: list[str]) -> None:
        self.record = lambda stream: log.append(f"{name} behind {stream}")
        self.hold = lambda stream: log.append(f"{stream} behind {name}")


def logged_lanes(log: list[str], *events: str) -> Lanes:
    """Lanes whose streams have their names; the caller's is ``caller``."""
    left = iter(events)
    driver: Any = SimpleNamespace(event=lambda: LoggedEvent(next(left), log), aside=nullcontext)
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
    """A recording begins with its call, and the call ends with it. A lane keeps its parts until
    they are merged: what comes next on it may use their memory, also of another caller's stream."""
    log: list[str] = []
    ops: Any = [("copy0", None), ("compute0", lambda call: log.append("product"))]
    parts = parted(ops, TWO_LANES)
    recording: Any = SimpleNamespace(replay=lambda stream: log.append(f"copies on {stream}"))
    assert parts is not None
    enqueue_beside(recording, parts[1], Call({}, logged_lanes(log, "fork", "end")))
    assert log == [
        *("fork behind caller", "copy0 behind fork", "copies on copy0", "product"),
        *("end behind copy0", "caller behind end"),
    ]

    def attend(call: Call) -> None:
        log.append(f"attend on {call.state['compute1']}, copy on {call.state['copy0']}")
        call.parts[0] = []

    log.clear()
    run = Run([attend], None, [], "sync", ("compute1", "copy0"))
    enqueue(run, Call({}, logged_lanes(log, "fork", "end of compute1", "end of copy0")))
    assert log == [
        *("fork behind caller", "attend on compute1, copy on copy0"),
        *("end of compute1 behind compute1", "caller behind end of compute1"),
        *("end of copy0 behind copy0", "caller behind end of copy0"),
        *("fork behind caller", "compute1 behind fork"),
    ]
