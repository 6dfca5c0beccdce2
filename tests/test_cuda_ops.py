"""What the CUDA engine makes of operations that follow each other on a lane, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_kernels import missing

from ficco.dma.memops import WAIT_32, WRITE_32, WRITE_64, Around, MemOp
from ficco.dma.streams import KernelCopies
from ficco.hip_kernels import MAX_SIGNALS, PEER_BLOCKS, Kernels, ScriptStep

#: Words below are the rank's own, and these a peer's.
PEER = 2000
#: Places to which copies may spin.
MOST = 8
#: What tells the watchdog that a captured call begins, and that it is over.
BEGIN, END = MemOp(WRITE_32, 9000, 1), MemOp(WRITE_64, 9000, 1 << 32)


@pytest.fixture(scope="module")
def cuda() -> Any:
    try:
        from ficco.dma import cuda
    except ImportError:
        missing("cuda-bindings")
    return cuda


def wait(address: int) -> MemOp:
    return MemOp(WAIT_32, address, 1)


def write(address: int) -> MemOp:
    return MemOp(WRITE_32, address, 1)


def copies(cuda: Any, lane: str, places: int = 1) -> Any:
    kernels: Any = SimpleNamespace(most_that_spin=PEER_BLOCKS * MOST)
    found = KernelCopies(kernels, lane, [(1, 2)] * places, [lambda call: (1, 2)] * places, 8, 2)
    return cuda.Copies(copies=found, arrived=5000, mine=range(PEER))


def made(cuda: Any, given: list[tuple[str, Any]], captured: bool = False) -> Any:
    """What an engine makes of operations of lanes; tuples are waits and writes."""

    class Engine(cuda.CudaEngine):
        _kernels_or_torch = Kernels.__new__(Kernels)

        def __init__(self) -> None:
            self._flush, self.rank = False, 0

        def _own(self, program: Any) -> range:
            return range(PEER)

        def _scratch(self, program: Any, index: int) -> int:
            return 5000 + 4 * index

    ops = [
        (lane, cuda.Memops(lane, cuda.cu.Batch(op)) if isinstance(op, tuple) else op)
        for lane, op in given
    ]
    lanes = tuple(dict.fromkeys(lane for lane, _ in given))
    slot = None
    if captured:
        watch = SimpleNamespace(begin=lambda number: BEGIN, end=lambda: END)
        state = SimpleNamespace(watch=watch)
        slot = SimpleNamespace(captured=True, state=state, number=lambda program: 1)
    plan = SimpleNamespace(lanes=lanes, words=64)
    program = SimpleNamespace(plan=plan, ops=ops, state={}, slot=slot)
    return Engine()._run(program)


def enqueued(cuda: Any, lane: str, *given: Any) -> list[Any]:
    """What is left of operations: waits and writes, or what is around a launch."""
    body = made(cuda, [(lane, op) for op in given]).body
    return [op.around if isinstance(op, cuda.Copies) else op.ops for op in body]


def test_in_front_of_a_product_all_is_one_launch(cuda: Any) -> None:
    given = (wait(4),), (write(4),), copies(cuda, "compute0"), (write(PEER),), (wait(8),)
    rear = write(4), write(PEER), wait(8)
    assert enqueued(cuda, "compute0", *given) == [Around((), (wait(4),), rear)]


@pytest.mark.parametrize(("places", "spins"), [(MOST, True), (MOST + 1, False)])
def test_so_many_blocks_may_spin_in_front(cuda: Any, places: int, spins: bool) -> None:
    """Behind its work a launch spins with one."""
    given = (wait(4), write(4)), copies(cuda, "compute0", places), (write(PEER), wait(8))
    *front, launch = enqueued(cuda, "compute0", *given)
    assert front == ([] if spins else [(wait(4),)])
    rear = write(4), write(PEER), wait(8)
    assert launch == Around((), (wait(4),) * spins, rear)


@pytest.mark.parametrize("lane", ["copy0", "copy1", "reduce0"])
def test_beside_products_a_launch_does_not_wait(cuda: Any, lane: str) -> None:
    given = (wait(4), write(4)), copies(cuda, lane), (write(PEER),), (wait(8),)
    first, launch, second, bare = enqueued(cuda, lane, *given, copies(cuda, lane))
    assert first == (wait(4),) and launch == Around(rear=(write(4), write(PEER)))
    assert second == (wait(8),) and bare == Around()


def test_posts_by_copies_are_left_to_a_launch_too(cuda: Any) -> None:
    posts = cuda.Posts("compute0", (write(PEER),), (1,))
    given = (wait(4), write(4)), copies(cuda, "compute0"), posts, (wait(8),)
    rear = write(4), write(PEER), wait(8)
    assert enqueued(cuda, "compute0", *given) == [Around((), (wait(4),), rear)]


def test_posts_by_copies_are_not_divided(cuda: Any) -> None:
    """What is left of them would be written by the stream, which the driver refuses."""
    many = tuple(write(PEER + 4 * i) for i in range(MAX_SIGNALS + 1))
    posts = cuda.Posts("compute0", many, (1,) * len(many))
    launch, left = made(cuda, [("compute0", copies(cuda, "compute0")), ("compute0", posts)]).body
    assert launch.around == Around() and left is posts


LANES = st.sampled_from(["compute0", "compute1", "copy0"])
ACTS = st.lists(st.sampled_from(["copies", "wait", "own", "peer"]), max_size=12)


@given(LANES, ACTS)
def test_launches_keep_the_order_of_a_lane(cuda: Any, lane: str, acts: list[str]) -> None:
    """But that writes may come behind copies, and what peers are told behind what is cleared."""
    ops: list[Any] = []
    for number, act in enumerate(acts):
        single = {"wait": wait, "own": write, "peer": lambda at: write(PEER + at)}
        ops.append(copies(cuda, lane) if act == "copies" else (single[act](4 * number),))
    launches = [id(op.copies) for op in ops if isinstance(op, cuda.Copies)]
    before = [(launches.pop(0), "copies") if act == "copies" else op[0] for act, op in
              zip(acts, ops, strict=True)]  # fmt: skip
    after: list[Any] = []
    for op in made(cuda, [(lane, op) for op in ops]).body:
        if isinstance(op, cuda.Copies):
            assert not op.around.begin
            after += [*op.around.front, (id(op.copies), "copies"), *op.around.rear]
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


def test_copies_of_nothing_see_to_nothing(cuda: Any) -> None:
    """Nor do those on a lane that has no word to count blocks in."""
    for height, counter in ((2, 5000), (0, 5000), (2, 0)):
        found = replace(copies(cuda, "copy0").copies, height=height)

        class Engine(cuda.CudaEngine):
            def __init__(self, found: Any, counter: int) -> None:
                self._kernel_copies = lambda program, steps: found
                self._counter = lambda program, lane: counter

            def _own(self, program: Any) -> range:
                return range(PEER)

        op = Engine(found, counter).copies(None, (0,))
        assert isinstance(op, cuda.Copies) is bool(height and counter)
        assert getattr(op, "copies", op) is found


def test_lanes_count_in_words_of_their_own_behind_those_of_the_rank(cuda: Any) -> None:
    memory = cuda.CudaMemory.__new__(cuda.CudaMemory)
    memory.addresses = [10_000, 20_000]
    lanes = ("compute0", *(f"copy{i}" for i in range(cuda.COUNTED_LANES)))
    slot = SimpleNamespace(memory=memory, words=6)
    program = SimpleNamespace(slot=slot, plan=SimpleNamespace(lanes=lanes, words=6))
    engine = cuda.CudaEngine.__new__(cuda.CudaEngine)
    engine.rank = 1
    own, counters = engine._own(program), [engine._counter(program, lane) for lane in lanes]
    assert own == range(20_000, 20_024)
    assert counters[-1] == 0 and len(set(counters)) == len(lanes)
    assert all(at >= own.stop and at % 4 == 0 for at in counters[:-1])


def test_what_a_launch_of_copies_is_given(cuda: Any) -> None:
    """Nothing where there is nothing around it: the kernel without scripts is the shorter one."""
    given: list[Any] = []
    bare = replace(copies(cuda, "copy0"), copies=lambda call, signals: given.append(signals))
    bare(None)
    replace(bare, around=Around(rear=(write(PEER),)))(None)
    none, signals = given
    launch = replace(bare, around=Around(rear=(write(PEER),)))
    assert launch.signals is launch.signals  # the kernels keep what they prepare for it
    assert none is None and signals.arrived == 5000
    assert [step.address for step in signals.rear.steps] == [PEER] and not signals.front.steps


def one_shot(cuda: Any) -> Any:
    parts = {"kernels": None, "parts": lambda call: None}
    return cuda.OneShot(**parts, arrived=5000, mine=range(PEER))


def product(call: Any) -> None:
    pass


@pytest.mark.parametrize("captured", [False, True])
def test_a_sum_at_the_peers_sees_to_the_whole_call(cuda: Any, captured: bool) -> None:
    """Posts by copies among it; in a graph to what the watchdog is told, too: of the begin, for
    which nothing waits, beside all else."""
    posts = cuda.Posts("compute0", (write(PEER),), (1,))
    body = [product, (wait(4), write(4)), posts, (wait(8),), one_shot(cuda)]
    tail = [(write(PEER + 4),), (wait(12), write(8), write(12)), (write(PEER + 8),)]
    given = [("compute0", op) for op in body] + [("sync", op) for op in tail]
    run = made(cuda, given, captured)
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
def test_of_several_sums_the_first_begins_and_the_last_ends(cuda: Any, captured: bool) -> None:
    body = [product, (wait(4),), one_shot(cuda), product, (wait(8),), one_shot(cuda)]
    given = [("compute0", op) for op in body]
    run = made(cuda, [*given, ("sync", (write(PEER),))], captured)
    _, first, _, last = run.body
    assert first.around == Around((BEGIN,) * captured, (wait(4),))
    assert last.around == Around((), (wait(8),), (write(PEER), END)[: 1 + captured])
    assert run.begin is None and not run.tail


def test_what_waits_in_front_of_a_sum_begins_a_graphs_call(cuda: Any) -> None:
    """And a wait alone stays with the stream where nobody has to be told."""
    body = [(wait(4),), product, (wait(8),), one_shot(cuda)]
    given = [*[("compute0", op) for op in body], ("sync", (write(PEER),))]
    front, _, last = made(cuda, given, captured=True).body
    assert [step.address for step in front.script.steps] == [9000, 4] and front.script.aside == 1
    assert last.around == Around((), (wait(8),), (write(PEER), END))
    front, _, last = made(cuda, given).body
    assert front.ops == (wait(4),) and last.around == Around((), (wait(8),), (write(PEER),))


def test_what_is_too_much_for_a_launch_stays_with_the_stream(cuda: Any) -> None:
    many = tuple(wait(4 * i) for i in range(MAX_SIGNALS + 1))
    few, last = (wait(4),), one_shot(cuda)
    run = made(cuda, [("compute0", many), ("compute0", last), ("sync", few)])
    assert [op.ops for op in run.body[:1]] == [many] and not run.body[1].around.front
    full = many[:MAX_SIGNALS]
    run = made(cuda, [("compute0", full), ("compute0", last), ("sync", few)], captured=True)
    assert run.body[0].around == Around((), full) and run.begin.ops == (BEGIN,)
    run = made(cuda, [("compute0", full), ("compute0", product), ("sync", few)], captured=True)
    assert run.body[0].ops == full and run.begin.ops == (BEGIN,)
    run = made(cuda, [("compute0", few), ("compute0", last), ("sync", full)])
    assert run.body[0].around == Around((), few, full)
    run = made(cuda, [("compute0", few), ("compute0", last), ("sync", many)], captured=True)
    assert run.body[0].around == Around((), few)
    assert run.begin.ops == (BEGIN,) and [op.ops for op in run.tail] == [(*many, END)]


def test_a_sum_beside_others_leaves_the_end_to_the_stream(cuda: Any) -> None:
    given = [("copy0", product), ("compute0", (wait(4),)), ("compute0", one_shot(cuda))]
    run = made(cuda, [*given, ("sync", (write(PEER),))])
    assert run.lanes == ("copy0",) and run.tail_lane == "sync"
    assert run.body[1].around == Around((), (wait(4),))
    assert [op.ops for op in run.tail] == [(write(PEER),)]


def test_in_a_graph_copies_in_front_of_a_product_tell_that_the_call_begins(cuda: Any) -> None:
    body = [(wait(4), write(4)), copies(cuda, "compute0"), (write(PEER), wait(8)), product]
    given = [*[("compute0", op) for op in body], ("sync", (write(PEER + 4),))]
    run = made(cuda, given, captured=True)
    first, last = run.body
    (tail,) = run.tail
    rear = write(4), write(PEER), wait(8)
    assert first.around == Around((BEGIN,), (wait(4),), rear)
    assert last is product and run.begin is None and run.tail_lane == "compute0"
    assert [step.address for step in tail.script.steps] == [PEER + 4, 9000]


def test_in_a_graph_a_call_that_begins_with_a_wait_begins_and_ends_by_launches(cuda: Any) -> None:
    """If it has no lanes of its own, which would begin and end there anyhow."""
    body = [(wait(4), write(4)), product]
    given = [("compute0", op) for op in body] + [("sync", (write(PEER),))]
    run = made(cuda, given, captured=True)
    front, last = run.body
    (rear,) = run.tail
    assert last is product and run.begin is None and run.tail_lane == "compute0"
    assert [step.address for step in front.script.steps] == [9000, 4, 4]
    assert front.script.aside == 1 and not rear.script.aside
    assert [step.address for step in rear.script.steps] == [PEER, 9000]
    posts = cuda.Posts("compute0", (write(PEER),), (1,))
    first = [("compute0", op) for op in (posts, product)]
    for other in ([("copy0", product), *given], given[1:], [*first, *given]):
        run = made(cuda, other, captured=True)
        assert run.begin.ops == (BEGIN,) and run.tail_lane == "sync"
        assert [op.ops for op in run.tail] == [(write(PEER), END)]
    run = made(cuda, given)
    assert run.begin is None and [op.ops for op in run.tail] == [(write(PEER),)]
    assert product in made(cuda, [*given, ("sync", product)], captured=True).tail


class Launches:
    """Kernels that note what they are given."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []

    def one_shot(self, *given: Any) -> None:
        self.given.append(given)

    def script(self, *given: Any) -> None:
        self.given.append(given)


def test_launches_are_given_all_that_they_see_to(cuda: Any) -> None:
    from ficco.dma.cuda_ops import Scripted

    kernels, call = Launches(), SimpleNamespace(state={"compute0": "stream"})
    told = Around((BEGIN,), (wait(4), write(PEER)), (write(PEER + 4), END))
    own = {"kernels": kernels, "parts": lambda call: ("out", ["parts"])}
    cuda.OneShot(**own, arrived=5000, mine=range(PEER), around=told)(call)
    ((out, parts, signals, stream),) = kernels.given
    assert (out, parts, signals.arrived, stream) == ("out", ["parts"], 5000, "stream")
    before, behind = signals.front, signals.rear
    assert [step.address for step in before.steps] == [9000, 4, PEER]
    assert [step.address for step in behind.steps] == [PEER + 4, 9000]
    kernels.given.clear()
    Scripted(kernels, before)(call)
    assert kernels.given == [(before, "stream")]


@pytest.mark.parametrize("edges", [None, [(0, 0, 0)], [(0, 1, 0)], [(0, 0, 1)]])
def test_what_is_joined_aside_leaves_the_stream_as_it_was(
    cuda: Any, monkeypatch: pytest.MonkeyPatch, edges: list[tuple[int, ...]] | None
) -> None:
    """By bindings of CUDA 12, which know no edges, and of 13, whose edges do not outlast the next
    call; edges of a kind that nobody gives back are left to a plain hold."""
    driver, calls = cuda.cu.driver, []
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
    cuda.cu.join_aside(event, "stream")
    plain = edges in (None, [(0, 0, 0)])
    edge = [] if edges is None else [[(0, 0, 0)]]
    restored = [("update", "stream", ["node"], *edge, 1, 1)] if plain else []
    assert calls == [("hold", "stream"), *restored]
