"""Calls in turns, of several groups and out of step, on a third vendor's driver
(``thread_driver.py``), with tests of other modules. ``tests/contract`` tests each operator there.

The GPU engine runs as on CUDA: the watchdog uses events, words are in the slot, and launches carry
out the signals before and after them. A new vendor is one file and a row in ``ENGINES``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ranks
import test_faults
import thread_driver
import torch
import torch.distributed as dist
from cases import all_exact, equal, exact, gathered_a, shard_of
from ranks import Died, Rank, leave, on_ranks
from subjects import integers
from test_all_gather_matmul import (  # noqa: F401  collected here, on this module's ranks
    test_calls_in_any_order,
    test_workspace_grows_and_is_reused,
)
from test_faults import MISMATCHES
from test_gradients import test_backwards_of_two_groups_at_once  # noqa: F401  likewise
from test_operators import test_memory_keeps_to_its_cap  # noqa: F401  likewise

import ficco
import ficco.dma.cpu
from ficco import errors
from ficco.runtime.workspace import workspaces


def _on_threads(fn: Callable[..., Any], at: Rank, *args: Any) -> Any:
    thread_driver.serve()
    ficco.dma.cpu.CpuEngine = None  # no other engine can serve a call
    ficco.set_options(engine="threads", on_timeout="raise", timeout_s=20)
    return fn(at, *args)


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[str]:
    with ranks.around(_on_threads, {}):
        yield "cpu"


@on_ranks(3)
def test_one_warning_where_no_file_describes_so_many_ranks(at: Rank) -> None:
    errors._warned.clear()
    group = dist.new_group(list(range(at.world)))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for n in (8, 16, 16):
            ficco.all_gather_matmul(torch.ones(4, 8), torch.ones(8, n), group=group)
    leave(group)
    text = (
        "schedule='auto' takes serial:collective: machine cpu describes 4 ranks, not 3; "
        "`ficco tune` measures this machine"
    )
    assert [str(warning.message) for warning in warned] == [text] * (at.rank == 0)


@on_ranks(3)
def test_signals_by_copies(at: Rank) -> None:
    cases = [equal(3, 12, 16, 8, schedule=name) for name in ("growing", "shard-overlap:pull")]
    ficco.close()
    with ficco.options(signals="copy"):
        all_exact(at, cases)
        post = str(workspaces()[0].engine.capabilities().post)
    ficco.close()
    assert post == "4-byte copy to the peer's memory (asked for)"


@on_ranks(3)
def test_ranks_with_and_without_the_launch_of_a_two_shot_meet(at: Rank) -> None:
    """All ranks launch, then all but one, then those with rows, then none. A call with the launch
    enqueues only the product and the launch."""
    kernels, blocks, counts = thread_driver.ThreadKernels, list[int](), set[tuple[int, int]]()
    original, prepared = kernels.two_shot, thread_driver.ThreadEngine._run

    def counted(self: Any, *arguments: Any) -> None:
        blocks.append(arguments[4])
        original(self, *arguments)

    def prepare(self: Any, program: Any) -> Any:
        run = prepared(self, program)
        counts.add((len(run.body), len(run.tail)))
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "two_shot", counted)
        patch.setattr(thread_driver.ThreadEngine, "_run", prepare)
        for most, rows, n in ((64, 7, 4096), (1, 7, 4096), (64, 2, 4096), (64, 7, 4095)):
            ficco.close()
            patch.setattr(kernels, "most_that_spin", most if at.rank == 1 else 64)
            blocks.clear()
            counts.clear()
            for call in range(6):
                left = [integers(5, call, rank, 0, shape=(rows, 8)).float() for rank in range(3)]
                right = [integers(5, call, rank, 1, shape=(8, n)).float() for rank in range(3)]
                result = ficco.matmul_all_reduce(left[at.rank], right[at.rank], schedule="two-shot")
                expected = sum(a @ b for a, b in zip(left, right, strict=True))
                assert torch.equal(result, expected), (most, rows, n, call)
            sums = at.rank < rows and n % 4 == 0 and (most > 1 or at.rank != 1)
            assert {*blocks} == ({2 * -(-rows // 3)} if sums else set()), (most, rows, n)
            assert (counts == {(2, 0)}) == bool(sums), counts
    ficco.close()


@on_ranks(3)
def test_a_two_shot_by_columns_stores_contiguous_rows(at: Rank) -> None:
    each = [integers(6, rank, 0, shape=(6, 8)).float() for rank in range(3)]
    weights = [integers(6, rank, 1, shape=(8, 256)).float() for rank in range(3)]
    with ficco.options(workspace_bytes=1 << 12):
        result = ficco.matmul_all_reduce(each[at.rank], weights[at.rank], schedule="two-shot")
    (kind,) = [kind for kind in workspaces()[0].programs.values() if kind.columns]
    assert 0 < kind.columns < 256 and kind.plan.schedule == "two-shot"
    assert torch.equal(result, sum(a @ b for a, b in zip(each, weights, strict=True)))


@on_ranks(3)
def test_blocks_of_the_caller(at: Rank) -> None:
    """The caller polls the words in place of its kernels."""
    case = equal(3, 16, 16, 8)
    words: set[int] = set()
    for iteration in range(12):
        for _ in range(iteration % 2):
            exact(at, case.on(schedule="growing"), 100 + iteration)
        shard = shard_of(case, at.rank, iteration, at.device)
        if iteration > 5 and at.rank == iteration % 4:
            time.sleep(0.1)  # the others finish the block before this rank sends
        with ficco.arriving(shard, pieces=2, pull=iteration % 4 > 1) as rows:
            words.add(rows.words.data_ptr())
            end = time.monotonic() + 10
            while iteration % 3 and not rows.words.all() and time.monotonic() < end:
                time.sleep(1e-4)
            if iteration % 3:  # otherwise no word is waited for before the end
                for piece in range(len(rows.pieces)):
                    rows.wait(piece)
                whole = gathered_a(case, iteration, at.device)
                for first, last, _ in rows.pieces:  # the copy of the own rows is queued
                    assert torch.equal(rows.buffer[first:last], whole[first:last])
            at_rest = rows.words
        ficco.synchronize()
        at.barrier()
        assert not at_rest.any()
    assert len(words) > 1  # calls alternate between two slots


@pytest.mark.parametrize(
    ("schedule", "difference"), [("hetero-fused-1d", "rows"), ("serial:collective", "n")]
)
def test_mismatch_when_warm(schedule: str, difference: str) -> None:
    changes, base = MISMATCHES[difference], test_faults.BASE.on(schedule=schedule)
    outcomes = ranks.run(3, test_faults._mismatch, changes, 2, "warm", (None, None), base)
    test_faults.assert_mismatch(outcomes, 2)


@on_ranks(2)
def test_a_peer_that_refuses_is_named_while_a_repeated_call_blocks_its_host(at: Rank) -> None:
    """As with CUDA_LAUNCH_BLOCKING. A repeated call is posted after it is enqueued."""
    group, a, b = dist.new_group([0, 1]), torch.ones(4, 8), torch.ones(8, 4)
    for _ in range(4):
        ficco.all_gather_matmul(a, b, group=group, schedule="growing")
    refused = ValueError if at.rank else errors.RankMismatch
    with pytest.raises(refused, match="required as many columns of a_shard"):
        ficco.all_gather_matmul(a, b[at.rank :], group=group, schedule="growing")
    at.barrier()
    leave(group)


def _with_blocked_queries(at: Rank) -> None:
    case = equal(3, 6, 8, 4, schedule="growing")
    for iteration in range(3):
        exact(at, case, iteration)
    at.barrier()
    if at.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    thread_driver.Event.over = lambda event: threading.Event().wait()  # type: ignore
    with ficco.options(timeout_s=60, on_timeout="abort"):
        exact(at, case, 3)


def test_a_killed_peer_is_named_while_no_query_of_an_event_returns() -> None:
    """Neither the calling thread nor the watchdog gets an answer of the driver."""
    *survivors, _ = ranks.run(3, _with_blocked_queries, fresh=True, catch=True, lost=[2])
    for rank in survivors:
        assert isinstance(rank, Died) and rank.exitcode == 1, rank
        for words in ("for rank 2", "the driver did not answer", "The process of rank 2 has ended"):
            assert words in rank.output


@on_ranks(2, fresh=True)
def test_a_collective_that_a_peer_never_joins_is_reported(at: Rank) -> None:
    group = dist.new_group(list(range(at.world)))
    a, b = torch.ones(4, 8), torch.ones(8, 4)
    for _ in range(4):
        ficco.all_gather_matmul(a, b, group=group, schedule="serial:collective")
    (workspace,) = workspaces(group)
    if at.rank == 0:
        workspace.engine.driver.waits = False
        with ficco.options(timeout_s=0.5):
            ficco.all_gather_matmul(a, b, group=group, schedule="serial:collective")
            end = time.monotonic() + 30
            while workspace.error is None and time.monotonic() < end:
                time.sleep(0.01)
        failure = ranks.caught(lambda: ficco.all_gather_matmul(a, b, group=group))
        assert failure.type == "SignalTimeout" and failure.fields["seconds"] < 30, failure
        step, schedule = failure.fields["step"], failure.fields["schedule"]
        assert (step, schedule) == ("all-gather (collective on compute0)", "serial:collective")
    at.barrier()
