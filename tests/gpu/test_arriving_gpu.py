"""Arriving rows in Triton kernels on GPUs: exact, between other calls, in graphs, and missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case, equal, exact, gathered_a, shard_of
from ranks import Failure, Rank, leave, on_ranks, ranks, run, wider
from test_arriving import WAYS
from test_gpu import PATIENCE_S, assert_in_time, everyone, failed, settle
from test_nn import example

import ficco
from ficco.dma.tiles import SHARED_SPARE

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def triton() -> Any:
    return pytest.importorskip("triton")


def spare(at: Rank) -> int:
    """Multiprocessors that a waiting kernel leaves to copies."""
    return SHARED_SPARE if torch.cuda.device_count() < at.world else 0


def copied(at: Rank, case: Case, iteration: int, group: Any = None, **options: Any) -> None:
    """Copy the pieces of a block one by one, each after a wait of the stream, and verify them."""
    rank = at.rank if group is None else group.rank()
    rows = None if len(set(case.rows)) == 1 else list(case.rows)
    expected = gathered_a(case, iteration, at.device)
    gathered = torch.full_like(expected, 99.0)
    shard = shard_of(case, rank, iteration, at.device)
    with ficco.arriving(shard, rows=rows, group=group, **options) as arriving:
        for start, stop in arriving:
            gathered[start:stop] = arriving.buffer[start:stop]
    assert torch.equal(gathered, expected), f"rank {at.rank}, {case}, {options}"


@ranks(1, 2, 4)
@on_ranks()
def test_streams_wait_for_pieces(at: Rank) -> None:
    iteration = 0
    for options in WAYS:
        for case in (
            equal(at.world, 64, 128, 8, dtype="bfloat16"),
            Case(tuple(range(7, 7 + at.world)), 16, 8),
            Case((0,) * (at.world - 1) + (9,), 16, 8),
            equal(at.world, 0, 16, 8),
        ):
            for _ in range(3):
                copied(at, case, iteration := iteration + 1, **options)
            exact(at, equal(at.world, 12, 16, 8), iteration)


@ranks(1, 2, 4)
@on_ranks()
def test_kernels_wait_push_and_tell(at: Rank) -> None:
    import arriving_kernels

    matmul, experts = example("arriving_matmul"), example("arriving_experts")
    spared = spare(at)
    for sizes in ((130, 200, 264), (64, 128, 64), (256, 512, 4096)):
        assert matmul.run(*sizes, spared) == 1.0, sizes
    for sizes in ((100, 4, 256, 128), (256, 8, 520, 512), (40, 64, 64, 64)):
        assert experts.run(*sizes, spared) == 1.0, sizes
    rows = [150 * rank + 1 for rank in range(at.world)]
    a = matmul.integers((sum(rows), 64), 7, at.device)
    b = matmul.integers((64, 136), at.rank, at.device)
    shard = a.split(rows)[at.rank]
    expected = (a.double() @ b.double()).to(a.dtype)
    for options in WAYS:
        product = matmul.gathered_matmul(shard, b, spared, rows=rows, **options)
        assert torch.equal(product, expected), options
    arriving_kernels.ring(at.rank, at.world, at.device)


def _many(at: Rank, calls: int) -> None:
    """Blocks between other calls on two streams, with the host ahead and ranks out of step."""
    matmul, spared = example("arriving_matmul"), spare(at)
    case = equal(at.world, 96, 128, 8, dtype="bfloat16")
    b = matmul.integers((128, 72), at.rank, at.device)
    side, correct = torch.cuda.Stream(), []
    for iteration in range(calls):
        if (iteration + at.rank) % 5 == 0:
            torch.cuda._sleep(200_000)
        shard = shard_of(case, at.rank, iteration, at.device)
        expected = (gathered_a(case, iteration, at.device).double() @ b.double()).to(b.dtype)
        stream = torch.cuda.current_stream() if iteration % 3 else side
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            product = matmul.gathered_matmul(shard, b, spared, **WAYS[iteration % len(WAYS)])
        torch.cuda.current_stream().wait_stream(stream)
        correct.append((product == expected).all())
        shard.fill_(99.0)  # on this stream the call has read the shard
        if iteration % 4 == 0:
            exact(at, case.on(schedule=("growing", "serial")[iteration % 8 // 4]), iteration)
    assert torch.stack(correct).all()


@ranks(2, 4)
def test_many_blocks_between_other_calls(world: int) -> None:
    run(world, _many, 60, device="cuda")


def _replays(at: Rank) -> None:
    """Replay more captured blocks than slots, between eager calls, with new shards each time."""
    matmul, spared, group = example("arriving_matmul"), spare(at), everyone(at)
    case = equal(at.world, 96, 128, 8, dtype="bfloat16")
    a = shard_of(case, at.rank, 0, at.device)
    b = matmul.integers((128, 72), at.rank, at.device)
    for pull in (False, True):
        matmul.gathered_matmul(a, b, spared, group=group, pull=pull)  # compiles; allocates tiles
    settle(at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [
            matmul.gathered_matmul(a, b, spared, group=group, pull=pull)
            for pull in (False, True, False)
        ]
    correct = []
    for iteration in range(1, 25):
        a.copy_(shard_of(case, at.rank, iteration, at.device))
        graph.replay()
        products = [result.clone() for result in results]
        if iteration % 3 == 0:
            products.append(matmul.gathered_matmul(a, b, spared, group=group))
        expected = (gathered_a(case, iteration, at.device).double() @ b.double()).to(b.dtype)
        correct += [(product == expected).all() for product in products]
        if iteration % 4 == 0:
            copied(at, case, iteration, group)
    assert torch.stack(correct).all()
    settle(at)
    del graph
    leave(group)


def test_replays() -> None:
    for world in {2, wider()}:
        run(world, _replays, device="cuda")


def _never(at: Rank, in_kernel: bool) -> dict[str, Any] | None:
    """Rank 1 lives but never calls; the kernel or stream of rank 0 waits for rank 1's rows."""
    import arriving_kernels

    group, case = everyone(at), equal(at.world, 32, 64, 8)
    copied(at, case, 0, group)
    copied(at, case, 1, group)
    shard = shard_of(case, at.rank, 2, at.device)
    out = torch.empty(32 * at.world, 64, device=at.device)
    words = torch.ones(4, dtype=torch.int32, device=at.device)
    arriving_kernels.gather[(4,)](words, out, torch.empty_like(out), 8, 64)  # compiles
    outcome = None

    def waits() -> None:
        with ficco.arriving(shard, group=group) as rows:
            if in_kernel:
                arriving_kernels.gather[(4,)](rows.words, rows.buffer, out, 8, 64)
            else:
                rows.wait(0)

    if at.rank == 0:
        with ficco.options(timeout_s=PATIENCE_S, on_timeout="raise"):
            outcome = failed(waits, group, again=lambda: copied(at, case, 3, group))
    settle(at)
    leave(group)
    copied(at, equal(at.world, 4, 4, 4), 1)
    return outcome


@pytest.mark.parametrize("in_kernel", [True, False], ids=["kernel", "stream"])
def test_missing_rows_end_waiting_kernels(in_kernel: bool) -> None:
    outcome = run(2, _never, in_kernel, device="cuda")[0]
    error = outcome["first"]
    assert isinstance(error, Failure) and error.type == "SignalTimeout", error
    assert error.fields["peer"] == 1 and error.fields["rank"] == 0
    assert "step 'caller" in error.text, error.text
    assert_in_time(outcome)
