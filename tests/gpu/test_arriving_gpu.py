"""Rows that arrive for Triton kernels on GPUs: exact, between other calls, in graphs, and when they
never come."""

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
    """Multiprocessors that a kernel that waits leaves to the copies."""
    return SHARED_SPARE if torch.cuda.device_count() < at.world else 0


def copied(at: Rank, case: Case, iteration: int, group: Any = None, **ways: Any) -> None:
    """One block, whose pieces are copied one by one behind waits of the stream."""
    rank = at.rank if group is None else group.rank()
    rows = None if len(set(case.rows)) == 1 else list(case.rows)
    whole = gathered_a(case, iteration, at.device)
    found = torch.full_like(whole, 99.0)
    shard = shard_of(case, rank, iteration, at.device)
    with ficco.arriving(shard, rows=rows, group=group, **ways) as arriving:
        for first, last in arriving:
            found[first:last] = arriving.buffer[first:last]
    assert torch.equal(found, whole), f"rank {at.rank}, {case}, {ways}"


@ranks(1, 2, 4)
@on_ranks()
def test_streams_wait_for_pieces(at: Rank) -> None:
    iteration = 0
    for ways in WAYS:
        for case in (
            equal(at.world, 64, 128, 8, dtype="bfloat16"),
            Case(tuple(range(7, 7 + at.world)), 16, 8),
            Case((0,) * (at.world - 1) + (9,), 16, 8),
            equal(at.world, 0, 16, 8),
        ):
            for _ in range(3):
                copied(at, case, iteration := iteration + 1, **ways)
            exact(at, equal(at.world, 12, 16, 8), iteration)


@ranks(1, 2, 4)
@on_ranks()
def test_kernels_wait_push_and_tell(at: Rank) -> None:
    import arriving_kernels

    matmul, experts = example("arriving_matmul"), example("arriving_experts")
    few = spare(at)
    for sizes in ((130, 200, 264), (64, 128, 64), (256, 512, 4096)):
        assert matmul.run(*sizes, few) == 1.0, sizes
    for sizes in ((100, 4, 256, 128), (256, 8, 520, 512), (40, 64, 64, 64)):
        assert experts.run(*sizes, few) == 1.0, sizes
    rows = [150 * rank + 1 for rank in range(at.world)]
    a = matmul.integers((sum(rows), 64), 7, at.device)
    b = matmul.integers((64, 136), at.rank, at.device)
    shard = a.split(rows)[at.rank]
    want = (a.double() @ b.double()).to(a.dtype)
    for ways in WAYS:
        assert torch.equal(matmul.gathered_matmul(shard, b, few, rows=rows, **ways), want), ways
    arriving_kernels.ring(at.rank, at.world, at.device)


def _many(at: Rank, calls: int) -> None:
    """Blocks between other calls, the host ahead, on two streams, ranks out of step."""
    matmul, few = example("arriving_matmul"), spare(at)
    case = equal(at.world, 96, 128, 8, dtype="bfloat16")
    b = matmul.integers((128, 72), at.rank, at.device)
    other, kept = torch.cuda.Stream(), []
    for iteration in range(calls):
        if (iteration + at.rank) % 5 == 0:
            torch.cuda._sleep(200_000)
        shard = shard_of(case, at.rank, iteration, at.device)
        want = (gathered_a(case, iteration, at.device).double() @ b.double()).to(b.dtype)
        stream = torch.cuda.current_stream() if iteration % 3 else other
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = matmul.gathered_matmul(shard, b, few, **WAYS[iteration % len(WAYS)])
        torch.cuda.current_stream().wait_stream(stream)
        kept.append((found == want).all())
        shard.fill_(99.0)  # the call has read it when the stream comes here
        if iteration % 4 == 0:
            exact(at, case.on(schedule=("growing", "serial")[iteration % 8 // 4]), iteration)
    assert torch.stack(kept).all()


@ranks(2, 4)
def test_many_blocks_between_other_calls(world: int) -> None:
    run(world, _many, 60, device="cuda")


def _replays(at: Rank) -> None:
    """Captured blocks whose shards change, more than there are slots, between eager calls."""
    matmul, few, group = example("arriving_matmul"), spare(at), everyone(at)
    case = equal(at.world, 96, 128, 8, dtype="bfloat16")
    a = shard_of(case, at.rank, 0, at.device)
    b = matmul.integers((128, 72), at.rank, at.device)
    for pull in (False, True):
        matmul.gathered_matmul(a, b, few, group=group, pull=pull)  # compiles; makes the tiles
    settle(at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [
            matmul.gathered_matmul(a, b, few, group=group, pull=pull)
            for pull in (False, True, False)
        ]
    kept = []
    for iteration in range(1, 25):
        a.copy_(shard_of(case, at.rank, iteration, at.device))
        graph.replay()
        found = [result.clone() for result in results]
        if iteration % 3 == 0:
            found.append(matmul.gathered_matmul(a, b, few, group=group))
        want = (gathered_a(case, iteration, at.device).double() @ b.double()).to(b.dtype)
        kept += [(one == want).all() for one in found]
        if iteration % 4 == 0:
            copied(at, case, iteration, group)
    assert torch.stack(kept).all()
    settle(at)
    del graph
    leave(group)


def test_replays() -> None:
    for world in {2, wider()}:
        run(world, _replays, device="cuda")


def _never(at: Rank, in_kernel: bool) -> dict[str, Any] | None:
    """A rank that lives and never enters; the others' kernel, or stream, waits for its rows."""
    import arriving_kernels

    group, case = everyone(at), equal(at.world, 32, 64, 8)
    copied(at, case, 0, group)
    copied(at, case, 1, group)
    shard = shard_of(case, at.rank, 2, at.device)
    out = torch.empty(32 * at.world, 64, device=at.device)
    words = torch.ones(4, dtype=torch.int32, device=at.device)
    arriving_kernels.gather[(4,)](words, out, torch.empty_like(out), 8, 64)  # compiles
    found = None

    def waits() -> None:
        with ficco.arriving(shard, group=group) as rows:
            if in_kernel:
                arriving_kernels.gather[(4,)](rows.words, rows.buffer, out, 8, 64)
            else:
                rows.wait(0)

    if at.rank == 0:
        with ficco.options(timeout_s=PATIENCE_S, on_timeout="raise"):
            found = failed(waits, group, again=lambda: copied(at, case, 3, group))
    settle(at)
    leave(group)
    copied(at, equal(at.world, 4, 4, 4), 1)
    return found


@pytest.mark.parametrize("in_kernel", [True, False], ids=["kernel", "stream"])
def test_rows_that_never_come_end_the_kernels_that_wait(in_kernel: bool) -> None:
    found = run(2, _never, in_kernel, device="cuda")[0]
    first = found["first"]
    assert isinstance(first, Failure) and first.type == "SignalTimeout", first
    assert first.fields["peer"] == 1 and first.fields["rank"] == 0
    assert "step 'caller" in first.text, first.text
    assert_in_time(found)
