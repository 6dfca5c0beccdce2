"""The kernels on NVIDIA GPUs: exact, ordered, and as the mover of an engine."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import equal, exact
from ranks import Rank, run
from test_kernels import CHECKS, RECTANGLES, rectangle

import ficco
from benchmarks.kernel_rates import loaded
from ficco.dma.driver import WAIT_32, WRITE_32
from ficco.runtime.workspace import workspaces

pytestmark = pytest.mark.gpu

#: Cycles of torch.cuda._sleep that take about a millisecond.
MILLISECOND = 1_800_000


def _exact(at: Rank) -> None:
    kernels, stream = loaded(at.device)
    for shape in RECTANGLES:
        rectangle(kernels, shape, "cuda", stream)
    rng = random.Random(5)
    for _ in range(150):
        width = rng.choice([1, 2, 15, 16, 17, 100, 1000, 4096, 100_000])
        pitches = [width + rng.choice([0, 1, 2, 16, 240]) for _ in range(2)]
        to, begin = rng.randrange(32), rng.randrange(32)
        shape = (to, pitches[0], begin, pitches[1], width, rng.choice([1, 2, 33, 200]))
        rectangle(kernels, shape, "cuda", stream, rng.choice([1, 8, 32, 500]))
    for check in CHECKS:
        check(kernels, "cuda", stream)


def _large(at: Rank) -> None:
    """Copies of more bytes than 32 bits count."""
    kernels, stream = loaded(at.device)
    nbytes = (5 << 30) + 3
    src = torch.arange(nbytes // 8 + 1, device="cuda").view(torch.uint8)[:nbytes]
    dst = torch.zeros_like(src)
    kernels.place(dst, src, stream)
    assert torch.equal(dst, src)
    dst.zero_()
    kernels.place(dst[1:], src[:-1], stream)  # by bytes, in several launches
    assert torch.equal(dst[1:], src[:-1]) and dst[0] == 0
    rows = src[: 5 << 30].view(-1, 1 << 16)
    dst = torch.zeros(rows.shape[0], (1 << 16) + 24, dtype=torch.uint8, device="cuda")[:, :-24]
    kernels.place(dst, rows, stream)
    assert torch.equal(dst, rows)


def _signals(at: Rank) -> None:
    kernels, _ = loaded(at.device)
    words = torch.zeros(100, dtype=torch.int32, device="cuda")
    late = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    words_and_values = [(words.data_ptr() + 4 * i, 1 + i) for i in range(100)]
    data, copied = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    poster, waiter = torch.cuda.Stream(), torch.cuda.Stream()
    waited = torch.cuda.Event()
    # Load all kernels before the waiting kernel runs: loading a kernel waits for the device.
    torch.cuda._sleep(1)
    data.fill_(0.0)
    copied.copy_(data)
    kernels.post(words_and_values, waiter.cuda_stream)
    kernels.wait(words_and_values, 20.0, late.data_ptr(), waiter.cuda_stream)
    torch.cuda.synchronize()
    words.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(waiter):
        kernels.wait(words_and_values, 20.0, late.data_ptr(), waiter.cuda_stream)
        copied.copy_(data)
        waited.record()
    with torch.cuda.stream(poster):
        torch.cuda._sleep(200 * MILLISECOND)
        data.fill_(5.0)
        kernels.post(words_and_values, poster.cuda_stream)
    time.sleep(0.05)
    assert not waited.query(), "the wait ended before its post"
    torch.cuda.synchronize()
    assert late.item() == 0 and copied.item() == 5.0
    assert words.tolist() == list(range(1, 101))


def _deadline(at: Rank) -> None:
    kernels, stream = loaded(at.device)
    words = torch.ones(70, dtype=torch.int32, device="cuda")
    words[67] = 0
    late = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    torch.cuda.synchronize()
    begin = time.monotonic()
    words_and_values = [(words.data_ptr() + 4 * i, 1) for i in range(70)]
    kernels.wait(words_and_values, 0.5, late.data_ptr(), stream)
    torch.cuda.synchronize()
    assert 0.45 < time.monotonic() - begin < 3.0
    assert late.item() == 68


@pytest.mark.parametrize("check", [_exact, _large, _signals, _deadline])
def test_kernels(check: Callable[[Rank], None]) -> None:
    run(1, check, device="cuda")


# The mover of the CUDA engine.


def _enqueued(at: Rank, schedule: str, signals: str) -> list[str]:
    group = torch.distributed.new_group(list(range(at.world)))
    case = equal(at.world, 64, 48, 32, dtype="bfloat16", schedule=schedule)
    with ficco.options(signals=signals):
        for iteration in range(4):
            exact(at, case, iteration, group)
    (workspace,) = workspaces(group)
    (bound,) = workspace.programs.values()
    program = next(iter(bound.programs.values()))
    run = program.state["run"]
    descriptions = [_described(op) for op in run.body]
    ficco.close(group)
    torch.distributed.destroy_process_group(group)
    return [description for description in descriptions if description]


def _described(op: Any) -> str:
    around = getattr(op, "around", None)
    if around is not None:
        front, rear = (Counter(each.kind for each in ops) for ops in (around.front, around.rear))
        counts = front[WAIT_32], rear[WRITE_32], rear[WAIT_32]
        return "{} waits, a launch, {} writes, {} waits".format(*counts)
    return " ".join(operation.kind for operation in getattr(op, "ops", ()))


@pytest.mark.multigpu
@pytest.mark.parametrize("signals", ["write", "copy"])
def test_a_launch_includes_its_signals(signals: str) -> None:
    """The stream itself waits only if products run at the same time."""
    front = ["1 waits, a launch, 2 writes, 1 waits"]
    assert run(2, _enqueued, "serial:kernel", signals, device="cuda") == [front] * 2
    overlapped = ["WAIT_VALUE_32", "0 waits, a launch, 2 writes, 0 waits", "WAIT_VALUE_32"]
    assert run(2, _enqueued, "growing:kernel", signals, device="cuda") == [overlapped] * 2
