"""What the GPU engine makes of operations that follow each other on a lane, without a GPU."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_kernels import missing

from ficco.compute.program import Call
from ficco.dma.driver import Lanes
from ficco.dma.gpu import GpuEngine
from ficco.dma.lane_ops import (
    Launch,
    Memops,
    Posts,
    Run,
    Scripted,
    enqueue,
    enqueue_beside,
    parted,
)
from ficco.dma.memops import WAIT_32, WRITE_32, WRITE_64, Around, MemOp
from ficco.dma.memories import COUNTED_LANES, SlotWords
from ficco.dma.watch import Watch
from ficco.hip_kernels.launch import MAX_SIGNALS, PEER_BLOCKS, Kernels, ScriptStep

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
    transfer = SimpleNamespace(src=SimpleNamespace(rows=height), dst=None)
    steps = [SimpleNamespace(lane=lane, transfer=transfer)] * places
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


def test_in_front_of_a_product_all_is_one_launch() -> None:
    given = (wait(4),), (write(4),), copies("compute0"), (write(PEER),), (wait(8),)
    rear = write(4), write(PEER), wait(8)
    assert enqueued("compute0", *given) == [Around((), (wait(4),), rear)]


@pytest.mark.parametrize(("places", "spins"), [(MOST, True), (MOST + 1, False)])
def test_so_many_blocks_may_spin_in_front(places: int, spins: bool) -> None:
    """Behind its work a launch spins with one."""
    given = (wait(4), write(4)), copies("compute0", places), (write(PEER), wait(8))
    *front, launch = enqueued("compute0", *given)
    assert front == ([] if spins else [(wait(4),)])
    rear = write(4), write(PEER), wait(8)
    assert launch == Around((), (wait(4),) * spins, rear)


@pytest.mark.parametrize("lane", ["copy0", "copy1", "reduce0"])
def test_beside_products_a_launch_does_not_wait(lane: str) -> None:
    given = (wait(4), write(4)), copies(lane), (write(PEER),), (wait(8),)
    first, launch, second, bare = enqueued(lane, *given, copies(lane))
    assert first == (wait(4),) and launch == Around(rear=(write(4), write(PEER)))
    assert second == (wait(8),) and bare == Around()


def test_posts_by_copies_are_left_to_a_launch_too() -> None:
    copied = posts((write(PEER),), (1,))
    given = (wait(4), write(4)), copies("compute0"), copied, (wait(8),)
    rear = write(4), write(PEER), wait(8)
    assert enqueued("compute0", *given) == [Around((), (wait(4),), rear)]


def test_posts_by_copies_are_not_divided() -> None:
    """What is left of them would be written by the stream, which the driver refuses."""
    many = tuple(write(PEER + 4 * i) for i in range(MAX_SIGNALS + 1))
    copied = posts(many, (1,) * len(many))
    launch, left = made([("compute0", copies("compute0")), ("compute0", copied)]).body
    assert launch.around == Around() and left is copied


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


def test_copies_of_nothing_see_to_nothing() -> None:
    """Nor do those on a lane that has no word to count blocks in, nor where launches carry no
    signals."""
    for height, counter, fuses in ((2, 5000, True), (0, 5000, True), (2, 0, True), (2, 9, False)):
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


def test_what_a_launch_of_copies_is_given() -> None:
    """Nothing where there is nothing around it: the kernel without scripts is the shorter one."""
    given: list[Any] = []
    bare = replace(copies("copy0"), work=lambda call, signals: given.append(signals))
    bare(None)
    replace(bare, around=Around(rear=(write(PEER),)))(None)
    none, signals = given
    launch = replace(bare, around=Around(rear=(write(PEER),)))
    assert launch.signals is launch.signals  # the kernels keep what they prepare for it
    assert none is None and signals.arrived == 5000
    assert [step.address for step in signals.rear.steps] == [PEER] and not signals.front.steps


def one_shot() -> Any:
    return Launch(lambda call, signals: None, arrived=5000, mine=range(PEER), sums=True)


def product(call: Any) -> None:
    pass


@pytest.mark.parametrize("captured", [False, True])
def test_a_sum_at_the_peers_sees_to_the_whole_call(captured: bool) -> None:
    """Posts by copies among it; in a graph to what the watchdog is told, too: of the begin, for
    which nothing waits, beside all else."""
    copied = posts((write(PEER),), (1,))
    body = [product, (wait(4), write(4)), copied, (wait(8),), one_shot()]
    tail = [(write(PEER + 4),), (wait(12), write(8), write(12)), (write(PEER + 8),)]
    given = [("compute0", op) for op in body] + [("sync", op) for op in tail]
    run = made(given, captured)
    first, last = run.body
    assert first is product and run.begin is None and not run.tail
    assert last.around.front == (wait(4), write(4), write(PEER), wait(8))
    end = (END,) if captured else ()
    told = write(PEER + 4), wait(12), write(8), write(12), write(PEER + 8)
    assert last.around.rear == told + end
    front, rear = last.signals.front, last.signals.rear
    assert front.aside == captured and not rear.aside and rear.alone == len(rear.steps)
    assert (front.alone - captured, len(front.steps) - captured) == (3, 4)
    assert front.steps[: front.aside] == (ScriptStep(*BEGIN[1:]),) * captured


@pytest.mark.parametrize("captured", [False, True])
def test_of_several_sums_the_first_begins_and_the_last_ends(captured: bool) -> None:
    body = [product, (wait(4),), one_shot(), product, (wait(8),), one_shot()]
    given = [("compute0", op) for op in body]
    run = made([*given, ("sync", (write(PEER),))], captured)
    _, first, _, last = run.body
    assert first.around == Around((BEGIN,) * captured, (wait(4),))
    assert last.around == Around((), (wait(8),), (write(PEER), END)[: 1 + captured])
    assert run.begin is None and not run.tail


def test_what_waits_in_front_of_a_sum_begins_a_graphs_call() -> None:
    """And a wait alone stays with the stream where nobody has to be told."""
    body = [(wait(4),), product, (wait(8),), one_shot()]
    given = [*[("compute0", op) for op in body], ("sync", (write(PEER),))]
    front, _, last = made(given, captured=True).body
    assert [step.address for step in front.script.steps] == [9000, 4] and front.script.aside == 1
    assert last.around == Around((), (wait(8),), (write(PEER), END))
    front, _, last = made(given).body
    assert front.ops == (wait(4),) and last.around == Around((), (wait(8),), (write(PEER),))


def test_what_is_too_much_for_a_launch_stays_with_the_stream() -> None:
    many = tuple(wait(4 * i) for i in range(MAX_SIGNALS + 1))
    few, last = (wait(4),), one_shot()
    run = made([("compute0", many), ("compute0", last), ("sync", few)])
    assert [op.ops for op in run.body[:1]] == [many] and not run.body[1].around.front
    full = many[:MAX_SIGNALS]
    run = made([("compute0", full), ("compute0", last), ("sync", few)], captured=True)
    assert run.body[0].around == Around((), full) and run.begin.ops == (BEGIN,)
    run = made([("compute0", full), ("compute0", product), ("sync", few)], captured=True)
    assert run.body[0].ops == full and run.begin.ops == (BEGIN,)
    run = made([("compute0", few), ("compute0", last), ("sync", full)])
    assert run.body[0].around == Around((), few, full)
    run = made([("compute0", few), ("compute0", last), ("sync", many)], captured=True)
    assert run.body[0].around == Around((), few)
    assert run.begin.ops == (BEGIN,) and [op.ops for op in run.tail] == [(*many, END)]


def test_a_sum_beside_others_leaves_the_end_to_the_stream() -> None:
    given = [("copy0", product), ("compute0", (wait(4),)), ("compute0", one_shot())]
    run = made([*given, ("sync", (write(PEER),))])
    assert run.lanes == ("copy0",) and run.tail_lane == "sync"
    assert run.body[1].around == Around((), (wait(4),))
    assert [op.ops for op in run.tail] == [(write(PEER),)]


def test_in_a_graph_copies_in_front_of_a_product_tell_that_the_call_begins() -> None:
    body = [(wait(4), write(4)), copies("compute0"), (write(PEER), wait(8)), product]
    given = [*[("compute0", op) for op in body], ("sync", (write(PEER + 4),))]
    run = made(given, captured=True)
    first, last = run.body
    (tail,) = run.tail
    rear = write(4), write(PEER), wait(8)
    assert first.around == Around((BEGIN,), (wait(4),), rear)
    assert last is product and run.begin is None and run.tail_lane == "compute0"
    assert [step.address for step in tail.script.steps] == [PEER + 4, 9000]


def test_in_a_graph_a_call_that_begins_with_a_wait_begins_and_ends_by_launches() -> None:
    """If it has no lanes of its own, which would begin and end there anyhow."""
    body = [(wait(4), write(4)), product]
    given = [("compute0", op) for op in body] + [("sync", (write(PEER),))]
    run = made(given, captured=True)
    front, last = run.body
    (rear,) = run.tail
    assert last is product and run.begin is None and run.tail_lane == "compute0"
    assert [step.address for step in front.script.steps] == [9000, 4, 4]
    assert front.script.aside == 1 and not rear.script.aside
    assert [step.address for step in rear.script.steps] == [PEER, 9000]
    copied = posts((write(PEER),), (1,))
    first = [("compute0", op) for op in (copied, product)]
    for other in ([("copy0", product), *given], given[1:], [*first, *given]):
        run = made(other, captured=True)
        assert run.begin.ops == (BEGIN,) and run.tail_lane == "sync"
        assert [op.ops for op in run.tail] == [(write(PEER), END)]
    run = made(given)
    assert run.begin is None and [op.ops for op in run.tail] == [(write(PEER),)]
    assert product in made([*given, ("sync", product)], captured=True).tail


class Launches:
    """Kernels that note what they are given."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []

    def script(self, *given: Any) -> None:
        self.given.append(given)


def test_launches_are_given_all_that_they_see_to() -> None:
    kernels, call = Launches(), SimpleNamespace(state={"compute0": "stream"})
    told = Around((BEGIN,), (wait(4), write(PEER)), (write(PEER + 4), END))
    seen: list[Any] = []
    work = lambda call, signals: seen.append((call, signals))  # noqa: E731
    Launch(work, arrived=5000, mine=range(PEER), sums=True, around=told)(call)
    ((given, signals),) = seen
    assert given is call and signals.arrived == 5000
    before, behind = signals.front, signals.rear
    assert [step.address for step in before.steps] == [9000, 4, PEER]
    assert [step.address for step in behind.steps] == [PEER + 4, 9000]
    Scripted(kernels, before)(call)
    assert kernels.given == [(before, "stream")]


@pytest.mark.parametrize("edges", [None, [(0, 0, 0)], [(0, 1, 0)], [(0, 0, 1)]])
def test_what_is_joined_aside_leaves_the_stream_as_it_was(
    monkeypatch: pytest.MonkeyPatch, edges: list[tuple[int, ...]] | None
) -> None:
    """By bindings of CUDA 12, which know no edges, and of 13, whose edges do not outlast the next
    call; edges of a kind that nobody gives back are left to a plain hold."""
    try:
        from ficco.dma import cuda_driver
    except ImportError:
        missing("cuda-bindings")
    driver, calls = cuda_driver.driver, []
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
    made = cuda_driver.CudaDriver.__new__(cuda_driver.CudaDriver)
    made.join_aside(event, "stream")
    plain = edges in (None, [(0, 0, 0)])
    edge = [] if edges is None else [[(0, 0, 0)]]
    restored = [("update", "stream", ["node"], *edge, 1, 1)] if plain else []
    assert calls == [("hold", "stream"), *restored]


def test_many_copies_are_one_call_of_cuda() -> None:
    """Its arguments, as a function of C gets them."""
    try:
        from ficco.dma import cuda_driver
    except ImportError:
        missing("cuda-bindings")
    seen: list[Any] = []
    size, pointer = ctypes.c_size_t, ctypes.c_void_p

    def copies(*given: Any) -> int:
        dst, src, sizes, count, how, first, kinds, failed, stream = given
        for one in (dst, src, sizes):
            seen.append(list((size * count).from_address(one)))
        order = ctypes.c_int.from_address(how).value
        seen.append((order, size.from_address(first).value, kinds, bool(failed), stream))
        return 0 if stream == 9 else 1

    arrays = pointer, pointer, pointer, size, pointer, pointer, size
    function = ctypes.CFUNCTYPE(ctypes.c_int, *arrays, pointer, pointer)(copies)
    address = ctypes.cast(function, pointer).value
    assert address is not None
    at_once = cuda_driver.CopiesAtOnce(address)
    ends = np.array([4096, 1 << 46, 64]), np.array([128, 256, 512]), np.array([16, 32, 48])
    assert at_once(*ends, 9)
    orders = cuda_driver.driver.CUmemcpySrcAccessOrder
    in_order = int(orders.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)
    assert seen == [*(one.tolist() for one in ends), (in_order, 0, 1, True, 9)]
    assert not at_once(*ends, 8)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 1)])
def test_copies_that_are_not_taken_at_once_are_made_one_by_one(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, int]
) -> None:
    """Those within a device never are: the legacy default stream would refuse them."""
    try:
        from ficco.dma import cuda_driver
    except ImportError:
        missing("cuda-bindings")
    calls: list[Any] = []
    answers = [True, False]

    def at_once(*given: Any) -> bool:
        calls.append("at once")
        return answers.pop(0)

    def copy(dst: Any, src: int, nbytes: int, stream: Any) -> tuple[int]:
        calls.append((int(dst), src, nbytes, stream))
        return (0,)

    monkeypatch.setattr(cuda_driver.driver, "cuMemcpyDtoDAsync", copy)
    made = cuda_driver.CudaDriver.__new__(cuda_driver.CudaDriver)
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
    """Says what comes behind what."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record(self, stream: str) -> None:
        self.log.append(f"{self.name} behind {stream}")

    def hold(self, stream: str) -> None:
        self.log.append(f"{stream} behind {self.name}")


def logged_lanes(log: list[str], *events: str) -> Lanes:
    """Lanes whose streams have their names; the caller's is ``caller``."""
    made = iter(events)
    driver: Any = SimpleNamespace(event=lambda: LoggedEvent(next(made), log), aside=nullcontext)
    driver.stream_for = lambda name: SimpleNamespace(handle=name)
    return Lanes(driver, "caller", {})


def test_a_call_beside_its_recording() -> None:
    """The recording begins with the call, and the call ends with it."""
    log: list[str] = []
    steps: Any = [of("copy0"), of("compute0")]
    ops: Any = [("copy0", None), ("compute0", lambda call: log.append("product"))]
    parts = parted(ops, steps)
    assert parts is not None
    recording: Any = SimpleNamespace(replay=lambda stream: log.append(f"copies on {stream}"))
    enqueue_beside(recording, parts[1], Call({}, logged_lanes(log, "fork", "end")))
    assert log == [
        *("fork behind caller", "copy0 behind fork", "copies on copy0", "product"),
        *("end behind copy0", "caller behind end"),
    ]


def test_a_lane_keeps_its_parts_until_they_are_merged() -> None:
    """What comes next on it may use their memory, for another caller's stream, too."""
    log: list[str] = []

    def attend(call: Call) -> None:
        log.append(f"attend on {call.state['compute1']}, copy on {call.state['copy0']}")
        call.parts[0] = []

    run = Run([attend], None, [], "sync", ("compute1", "copy0"))
    enqueue(run, Call({}, logged_lanes(log, "fork", "end of compute1", "end of copy0")))
    assert log == [
        *("fork behind caller", "attend on compute1, copy on copy0"),
        *("end of compute1 behind compute1", "caller behind end of compute1"),
        *("end of copy0 behind copy0", "caller behind end of copy0"),
        *("fork behind caller", "compute1 behind fork"),
    ]
