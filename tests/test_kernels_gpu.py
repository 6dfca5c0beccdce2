"""The kernels on NVIDIA GPUs: exact, ordered, fast, and as the mover of an engine."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
from cases import Case, all_exact, equal, exact
from ranks import Rank, run
from test_kernels import (
    ALIKE,
    RECTANGLES,
    at_peers,
    check_casts,
    check_combine,
    check_copy_runs,
    check_gate,
    check_halves,
    check_merge,
    check_place,
    check_reduce,
    check_route,
    rectangle,
)

import ficco
from ficco.dma.memops import WAIT_32, WRITE_32, MemOp
from ficco.hip_kernels import kernels
from ficco.hip_kernels.launch import CASTS, E4M3, REDUCTIONS, Kernels
from ficco.runtime.workspace import workspaces

pytestmark = pytest.mark.gpu

#: Part of the bandwidth of PyTorch's copy that placement and reduction reach at least.
SHARE = 0.8
#: The same of casts: they take at most 1.1 times one pass over what they read and write.
CAST_SHARE = 1 / 1.1
#: The same of a cast in 4 pieces. Each launch but the first begins once the one before has ended:
#: 3.5 us each of the 190 us that the pass takes on an H200, 5 % in all.
PIECES_SHARE = 0.85
#: Dtypes of sums, by name.
SUMS = {
    f"{part} to {out}".replace("torch.", ""): (part, out)
    for part, out in sorted(REDUCTIONS, key=str)
}
#: Cycles of torch.cuda._sleep that take about a millisecond.
MILLISECOND = 1_800_000
#: Sizes at which movers are compared, in bytes.
SIZES = tuple(1 << power for power in range(16, 27))


def loaded(at: Rank) -> tuple[Kernels, int]:
    """The kernels of this rank's device, and its current stream."""
    found = kernels(at.device)
    assert isinstance(found, Kernels), "they could not be compiled here"
    return found, torch.cuda.current_stream().cuda_stream


# Exact.


def _copies(at: Rank) -> None:
    mine, stream = loaded(at)
    for shape in RECTANGLES:
        rectangle(mine, shape, "cuda", stream)
    rng = random.Random(5)
    for _ in range(150):
        width = rng.choice([1, 2, 15, 16, 17, 100, 1000, 4096, 100_000])
        pitches = [width + rng.choice([0, 1, 2, 16, 240]) for _ in range(2)]
        to, begin = rng.randrange(32), rng.randrange(32)
        shape = (to, pitches[0], begin, pitches[1], width, rng.choice([1, 2, 33, 200]))
        blocks = rng.choice([1, 8, 32, 500])
        rectangle(mine, shape, "cuda", stream, blocks)


def test_copies_are_exact() -> None:
    run(1, _copies, device="cuda")


def _place(at: Rank) -> None:
    mine, stream = loaded(at)
    check_place(mine, "cuda", stream)


def test_placement() -> None:
    run(1, _place, device="cuda")


def _reduce(at: Rank) -> None:
    mine, stream = loaded(at)
    check_reduce(mine.reduce, "cuda", stream)
    check_merge(mine.merge, "cuda", stream)
    check_combine(mine.combine, "cuda", stream)
    check_copy_runs(mine.copy_runs, "cuda", stream)
    check_gate(mine.gate, "cuda", stream)
    check_route(mine.route, "cuda", stream)
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
    check_reduce(at_peers(mine, arrived.data_ptr()), "cuda", stream, ALIKE)
    assert arrived.item() == 0
    check_halves(mine, "cuda", stream)


def test_reduction_is_exact() -> None:
    run(1, _reduce, device="cuda")


def _casts(at: Rank) -> None:
    mine, stream = loaded(at)
    for to, dtype in product(E4M3, CASTS):
        check_casts(mine, to, dtype, "cuda", stream)


def test_casts_are_exact() -> None:
    run(1, _casts, device="cuda")


def _error(at: Rank) -> None:
    """W parts: each addition is off by 2**-24 of what is being added, the end by half a unit."""
    mine, stream = loaded(at)
    torch.manual_seed(7)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for count in (2, 8, 16):
            parts = [torch.randn(1 << 20, device="cuda").to(dtype) for _ in range(count)]
            found = torch.empty_like(parts[0])
            mine.reduce(found, parts, stream)
            right = sum(part.double() for part in parts)
            size = sum(part.double().abs() for part in parts)
            info = torch.finfo(dtype)
            rounding = right.abs() * info.eps / 2 + info.smallest_normal * info.eps
            bound = rounding * 1.001 + size * (count * 2.0**-24)
            assert bool(((found.double() - right).abs() <= bound).all()), (dtype, count)


def test_reduction_error() -> None:
    run(1, _error, device="cuda")


def _large(at: Rank) -> None:
    """More bytes than 32 bits count."""
    mine, stream = loaded(at)
    nbytes = (5 << 30) + 3
    src = torch.arange(nbytes // 8 + 1, device="cuda").view(torch.uint8)[:nbytes]
    dst = torch.zeros_like(src)
    mine.place(dst, src, stream)
    assert torch.equal(dst, src)
    dst.zero_()
    mine.place(dst[1:], src[:-1], stream)  # by bytes, in several launches
    assert torch.equal(dst[1:], src[:-1]) and dst[0] == 0
    rows = src[: 5 << 30].view(-1, 1 << 16)
    dst = torch.zeros(rows.shape[0], (1 << 16) + 24, dtype=torch.uint8, device="cuda")[:, :-24]
    mine.place(dst, rows, stream)
    assert torch.equal(dst, rows)


def test_large_copies() -> None:
    run(1, _large, device="cuda")


# Signals.


def _signals(at: Rank) -> None:
    mine, _ = loaded(at)
    words = torch.zeros(100, dtype=torch.int32, device="cuda")
    late = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    wanted = [(words.data_ptr() + 4 * i, 1 + i) for i in range(100)]
    data, seen = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    poster, waiter = torch.cuda.Stream(), torch.cuda.Stream()
    over = torch.cuda.Event()
    # Whatever runs beside the waiting kernel is loaded before: loading waits for the device.
    torch.cuda._sleep(1)
    data.fill_(0.0)
    seen.copy_(data)
    mine.post(wanted, waiter.cuda_stream)
    mine.wait(wanted, 20.0, late.data_ptr(), waiter.cuda_stream)
    torch.cuda.synchronize()
    words.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(waiter):
        mine.wait(wanted, 20.0, late.data_ptr(), waiter.cuda_stream)
        seen.copy_(data)
        over.record()
    with torch.cuda.stream(poster):
        torch.cuda._sleep(200 * MILLISECOND)
        data.fill_(5.0)
        mine.post(wanted, poster.cuda_stream)
    time.sleep(0.05)
    assert not over.query(), "the wait ended before its post"
    torch.cuda.synchronize()
    assert late.item() == 0 and seen.item() == 5.0
    assert words.tolist() == list(range(1, 101))


def test_signals_order_streams() -> None:
    run(1, _signals, device="cuda")


def _deadline(at: Rank) -> None:
    mine, stream = loaded(at)
    words = torch.ones(70, dtype=torch.int32, device="cuda")
    words[67] = 0
    late = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    torch.cuda.synchronize()
    begin = time.monotonic()
    some = [(words.data_ptr() + 4 * i, 1) for i in range(70)]
    mine.wait(some, 0.5, late.data_ptr(), stream)
    torch.cuda.synchronize()
    assert 0.45 < time.monotonic() - begin < 3.0
    assert late.item() == 68


def test_wait_has_a_deadline() -> None:
    run(1, _deadline, device="cuda")


def _captured(at: Rank) -> None:
    mine, _ = loaded(at)
    src, dst = torch.zeros(1000, 64, device="cuda"), torch.zeros(1000, 80, device="cuda")
    parts = [torch.zeros(1001, device="cuda") for _ in range(3)]
    total = torch.zeros(1001, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        mine.place(dst[:, 3:67], src, stream)
        mine.reduce(total, parts, stream)
    for i in range(1, 4):
        src.fill_(i)
        parts[1].fill_(i)
        graph.replay()
        assert bool((dst[:, 3:67] == i).all()) and bool((total == i).all())
        assert not dst[:, :3].any() and not dst[:, 67:].any()


def test_captured_in_a_graph() -> None:
    run(1, _captured, device="cuda")


# Speed.


def seconds(candidates: dict[str, Callable[[], None]], rounds: int = 15) -> dict[str, list[float]]:
    """Device times, in rounds of shuffled order, so that a hot GPU is hot for all."""
    rng = random.Random(1)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for index in range(rounds + 2):
        for name in rng.sample(list(candidates), len(candidates)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(MILLISECOND // 2)
            begin.record()
            candidates[name]()
            end.record()
            torch.cuda.synchronize()
            if index >= 2:
                times[name].append(begin.elapsed_time(end) / 1e3)
    return times


def _bandwidth(at: Rank) -> dict[str, float]:
    """Bytes read and written per second, as parts of what PyTorch's copy reaches, paired."""
    mine, stream = loaded(at)
    rows, cols = 32768, 8192  # 512 MiB in half precision: far more than the L2 holds
    a, b = (torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    wide = torch.empty(rows, cols + 64, dtype=torch.bfloat16, device="cuda")
    odd = torch.empty(rows, cols + 1, dtype=torch.bfloat16, device="cuda")
    a.normal_()
    size = a.numel() * 2
    candidates: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy_": (2 * size, lambda: b.copy_(a)),
        "place": (2 * size, lambda: mine.place(b, a, stream)),
        "place rows": (2 * size, lambda: mine.place(wide[:, 32 : 32 + cols], a, stream)),
        "place columns": (
            size,
            lambda: mine.place(b[:, : cols // 2], wide[:, 64:][:, : cols // 2], stream),
        ),
        "place odd rows": (2 * size, lambda: mine.place(odd[:, 1:], a, stream)),
        "take odd rows": (2 * size, lambda: mine.place(b, odd[:, 1:], stream)),
        "place odd columns": (
            size,
            lambda: mine.place(
                odd[:, 5:][:, : cols // 2 - 3], wide[:, 3:][:, : cols // 2 - 3], stream
            ),
        ),
    }
    for name, (part, out) in SUMS.items():
        parts = list(a.view(part).view(4, -1).unbind())
        total = torch.empty(parts[0].shape, dtype=out, device="cuda")
        candidates[f"sum of {name}"] = (
            size + total.nbytes,
            lambda total=total, parts=parts: mine.reduce(total, parts, stream),
        )
    for name in ("bfloat16 to bfloat16", "float32 to bfloat16"):
        part, out = SUMS[name]
        blocks = a.view(part).view(4, 4096, -1)[:, :, :-64]  # rows that lie apart
        total = torch.empty(4096, blocks.shape[2] + 64, dtype=out, device="cuda")[:, :-64]
        candidates[f"rows of {name}"] = (
            blocks.numel() * blocks.element_size() + total.numel() * total.element_size(),
            lambda total=total, parts=[*blocks]: mine.reduce(total, parts, stream),
        )
    for name, length, pieces in (
        ("rows", cols, 1),
        ("rows in 4 pieces", cols, 4),
        ("blocks", 128, 1),
    ):
        out = torch.empty(rows, cols, dtype=E4M3[0], device="cuda")
        factors = torch.empty(rows, cols // length, device="cuda")
        parts = [each.chunk(pieces) for each in (out, factors, a)]

        def cast(parts: Any = parts) -> None:
            for part in zip(*parts, strict=True):
                mine.cast(*part, stream)

        candidates[f"cast {name}"] = size + out.nbytes + factors.nbytes, cast
    times = seconds({name: run_it for name, (_, run_it) in candidates.items()})
    rates = {name: [candidates[name][0] / t for t in found] for name, found in times.items()}
    parts_of = {
        name: statistics.median(x / y for x, y in zip(found, rates["copy_"], strict=True))
        for name, found in rates.items()
    }
    return parts_of | {"copy_": statistics.median(rates["copy_"])}


def test_bandwidth_is_that_of_a_copy(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = run(1, _bandwidth, device="cuda")
    whole = found.pop("copy_")
    with capsys.disabled():
        print(f"\ncopy_ moves {whole / 1e9:.0f} GB/s read and written; parts of that:")
        print("".join(f"  {name:28} {part:.3f}\n" for name, part in found.items()))
    assert min(found.values()) >= SHARE, found
    assert found["cast rows in 4 pieces"] >= PIECES_SHARE, found
    assert min(found["cast rows"], found["cast blocks"]) >= CAST_SHARE, found


def _microseconds(at: Rank, repeat: int = 20) -> dict[tuple[str, int], float]:
    """Times of one push to the next rank, all ranks at once, each followed by a stream write, the
    host far ahead. ``dma``, and the kernel with some numbers of blocks."""
    from ficco.dma.cuda_driver import CudaDriver

    mine, handle = loaded(at)
    memory = symm_mem.empty(2 * SIZES[-1], dtype=torch.uint8, device=at.device)
    group = torch.distributed.group.WORLD
    addresses = symm_mem.rendezvous(memory, group=group).buffer_ptrs
    word = torch.zeros(1, dtype=torch.int32, device=at.device)
    driver = CudaDriver(at.device)
    write = driver.batch([MemOp(WRITE_32, word.data_ptr(), 1)])
    stream = driver.stream(handle)
    begin, end = addresses[at.rank], addresses[(at.rank + 1) % at.world] + SIZES[-1]
    found: dict[tuple[str, int], list[float]] = {}
    for number in range(7):
        for size in SIZES:
            copy = driver.copy(end, size)
            movers: dict[str, Callable[[], None]] = {"dma": lambda copy=copy: copy(begin, stream)}
            for blocks in (4, 8, 16, 32):
                movers[f"kernel {blocks}"] = lambda size=size, blocks=blocks: mine.copies(
                    ((end, begin),), (size, size, size, 1), handle, blocks
                )
            for name, move in movers.items():
                torch.cuda.synchronize()
                at.barrier()
                torch.cuda.synchronize()
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(2 * MILLISECOND)
                first.record()
                for _ in range(repeat):
                    move()
                    write.enqueue(stream)
                last.record()
                torch.cuda.synchronize()
                if number:
                    took = first.elapsed_time(last) * 1e3 / repeat
                    found.setdefault((name, size), []).append(took)
    return {key: statistics.median(times) for key, times in found.items()}


def crossover(times: dict[tuple[str, int], float], kernel: str = "kernel 8") -> int | None:
    """The size from which on the copy engine is the faster, None if it never is."""
    slower = [size for size in SIZES if times["dma", size] > times[kernel, size]]
    after = [size for size in SIZES if not slower or size > slower[-1]]
    return after[0] if after else None


@pytest.mark.multigpu
def test_crossover_of_the_movers(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints a table; which mover wins is for the machine's file to say."""
    ranks = run(2, _microseconds, device="cuda", timeout=200)
    times = {key: max(found[key] for found in ranks) for key in ranks[0]}
    names = list(dict.fromkeys(name for name, _ in times))
    with capsys.disabled():
        print(f"\n{'KiB':>8}" + "".join(f"{name:>12}" for name in names) + "  microseconds")
        for size in SIZES:
            row = "".join(f"{times[name, size]:12.1f}" for name in names)
            print(f"{size >> 10:8}{row}")
        print(f"the copy engine is faster than 8 blocks from {crossover(times)} bytes on")
    assert all(time > 0 for time in times.values())


# The mover of the CUDA engine.

MOVED = (
    "serial:kernel",
    "growing:kernel",
    "shrinking:kernel",
    "shard-overlap:kernel",
    "hetero-fused-1d:pieces=4,kernel",
    "uniform-fused-1d:pieces=3,kernel",
    "hetero-unfused-1d:pull,kernel",
    "uniform-fused-2d:kernel",
    "hetero-fused-2d:pieces=3,pull,kernel",
)


@pytest.mark.multigpu
@pytest.mark.parametrize("schedule", MOVED)
def test_schedules_moved_by_the_kernel(schedule: str) -> None:
    cases = [
        shape.on(dtype=dtype, schedule=schedule)
        for dtype in ("bfloat16", "float16", "float32")
        for shape in (
            equal(2, 24, 40, 16),
            equal(2, 17, 23, 9, gathered=True),
            equal(2, 512, 256, 128),
            Case((5, 18), 33, 7),
            equal(2, 16, 24, 8, a="columns"),
        )
    ]
    run(2, all_exact, cases, device="cuda")


def _again(at: Rank, schedule: str, captured: bool) -> None:
    """The same operands with other contents: replays of what the engine or a graph recorded."""
    a = torch.zeros(64, 48, dtype=torch.bfloat16, device=at.device)
    b = torch.ones(48, 32, dtype=torch.bfloat16, device=at.device)
    y = torch.empty(0)

    def call() -> None:
        nonlocal y
        y = ficco.all_gather_matmul(a, b, schedule=schedule)

    step: Callable[[], None] = call
    if captured:
        torch.mm(a, b)  # cuBLAS allocates on its first call, which no capture allows
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        step = graph.replay
    for i in range(1, 7):
        a.fill_(at.rank + i % 3)
        step()
        torch.cuda.synchronize()
        for rank in range(at.world):
            assert bool((y[64 * rank : 64 * rank + 64] == 48.0 * (rank + i % 3)).all()), i


@pytest.mark.multigpu
@pytest.mark.parametrize("captured", [False, True])
def test_replays_and_graphs(captured: bool) -> None:
    run(2, _again, "serial:kernel", captured, device="cuda")
    run(2, _again, "growing:kernel", captured, device="cuda")
    run(2, _again, "hetero-fused-1d:pieces=4,kernel", captured, device="cuda")


def _enqueued(at: Rank, schedule: str, signals: str) -> list[str]:
    """What a call gives to streams beside products, in order."""
    group = torch.distributed.new_group(list(range(at.world)))
    case = equal(at.world, 64, 48, 32, dtype="bfloat16", schedule=schedule)
    with ficco.options(signals=signals):
        for iteration in range(4):
            exact(at, case, iteration, group)
    (workspace,) = workspaces(group)
    (bound,) = workspace.programs.values()
    program = next(iter(bound.programs.values()))
    run = program.state["run"]
    found = [_told(op) for op in run.body]
    ficco.close(group)
    torch.distributed.destroy_process_group(group)
    return [text for text in found if text]


def _told(op: Any) -> str:
    around = getattr(op, "around", None)
    if around is not None:
        front, rear = (Counter(one.kind for one in ops) for ops in (around.front, around.rear))
        counts = front[WAIT_32], rear[WRITE_32], rear[WAIT_32]
        return "{} waits, a launch, {} writes, {} waits".format(*counts)
    return " ".join(one.kind for one in getattr(op, "ops", ()))


@pytest.mark.multigpu
@pytest.mark.parametrize("signals", ["write", "copy"])
def test_a_launch_sees_to_its_signals(signals: str) -> None:
    """The stream itself waits for nothing but beside products."""
    front = ["1 waits, a launch, 2 writes, 1 waits"]
    assert run(2, _enqueued, "serial:kernel", signals, device="cuda") == [front] * 2
    beside = ["WAIT_VALUE_32", "0 waits, a launch, 2 writes, 0 waits", "WAIT_VALUE_32"]
    assert run(2, _enqueued, "growing:kernel", signals, device="cuda") == [beside] * 2
