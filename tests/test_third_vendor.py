"""The contract on a third vendor's driver (``thread_driver.py``), with tests of other modules.

It is the GPU engine as CUDA has it: calls are watched by events, words lie in the slot, and
launches carry out the signals around them. What a vendor adds is one file and a row in ``choose``.
"""

from __future__ import annotations

import gc
import os
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
from cases import all_exact, call, equal, exact, gathered_a, make, shard_of, traced, verify
from ranks import Rank
from test_all_gather_matmul import (  # noqa: F401  collected here, on this module's ranks
    NAMES,
    named,
    test_any_call_behind_any_other,
    test_any_case,
    test_capped_calls_between_others,
    test_groups_in_turn,
    test_layouts_of_b,
    test_linear_weight_and_inference_mode,
    test_operands_may_change_after_the_call,
    test_results_stay,
    test_subgroups,
    test_two_groups_at_once,
    test_workspace_grows_and_is_reused,
)
from test_experts import (  # noqa: F401  likewise
    test_any_routes,
    test_calls_of_several_kinds_take_turns,
)
from test_faults import (  # noqa: F401  likewise
    MISMATCHES,
    test_calls_in_another_order,
    test_late_rank_is_no_fault,
    test_mismatch_of_options,
)
from test_fp8 import (  # noqa: F401  likewise
    test_each_shard_has_its_own_factor,
    test_forms_of_operands,
)
from test_operators import (  # noqa: F401  likewise
    test_errors_keep_to_their_bounds,
    test_operators_in_any_order,
    test_sums_repeat_to_the_last_bit,
)

import ficco
import ficco.dma.cpu
from ficco import warn
from ficco.runtime.workspace import workspaces


def _on_threads(fn: Callable[..., Any], at: Rank, *args: Any) -> Any:
    thread_driver.serve()
    ficco.dma.cpu.CpuEngine = None  # nobody else serves a call
    ficco.set_options(engine="threads", on_timeout="raise", timeout_s=20)
    return fn(at, *args)


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[str]:
    with ranks.around(_on_threads, {}):
        yield "cpu"


def _not_described(at: Rank) -> list[str]:
    """Warnings of two problems for a number of ranks that no file describes."""
    warn._warned.clear()
    group = dist.new_group(list(range(at.world)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for n in (8, 16, 16):
            ficco.all_gather_matmul(torch.ones(4, 8), torch.ones(8, n), group=group)
    ficco.close(group)
    dist.destroy_process_group(group)
    return [str(one.message) for one in seen]


def test_one_warning_where_no_file_describes_so_many_ranks() -> None:
    (text,), *others = ranks.run(3, _not_described)
    assert others == [[], []]
    assert text == (
        "schedule='auto' takes serial:collective: machine cpu describes 4 ranks, not 3; "
        "`ficco tune` measures this machine"
    )


def _by_copies(at: Rank) -> str:
    with ficco.options(signals="copy"):
        all_exact(
            at, [equal(3, 12, 16, 8, schedule=name) for name in ("growing", "shard-overlap:pull")]
        )
        return str(workspaces()[0].engine.capabilities().post)


def test_signals_by_copies() -> None:
    for post in ranks.run(3, _by_copies, fresh=True):
        assert post == "4-byte copy to the peer's memory (asked for)"


def _traced(at: Rank) -> None:
    case = equal(3, 12, 16, 8, schedule="hetero-fused-2d:pull")
    made = make(at, case, 1)
    out, plan, spans = traced(made, case.schedule)
    verify(case, [out], made)
    assert [span.step for span in spans] == list(range(len(plan.steps)))
    assert all(0 <= span.start <= span.stop < 10 for span in spans), spans


def test_times_of_steps() -> None:
    ranks.run(3, _traced)


def _blocks(at: Rank) -> None:
    """The caller polls the words, as its kernels would."""
    case = equal(3, 16, 16, 8)
    words: set[int] = set()
    for iteration in range(12):
        for _ in range(iteration % 2):
            exact(at, case.on(schedule="growing"), 100 + iteration)
        shard = shard_of(case, at.rank, iteration, at.device)
        if iteration > 5 and at.rank == iteration % 4:
            time.sleep(0.1)  # the others are through with the block before it sends anything
        with ficco.arriving(shard, pieces=2, pull=iteration % 4 > 1) as rows:
            words.add(rows.words.data_ptr())
            end = time.monotonic() + 10
            while iteration % 3 and not rows.words.all() and time.monotonic() < end:
                time.sleep(1e-4)
            if iteration % 3:  # otherwise nobody waits for any word before the end
                for piece in range(len(rows.pieces)):
                    rows.wait(piece)
                whole = gathered_a(case, iteration, at.device)
                for first, last, _ in rows.pieces:  # what brings the own rows is on a queue
                    assert torch.equal(rows.buffer[first:last], whole[first:last])
            at_rest = rows.words
        ficco.synchronize()
        at.barrier()
        assert not at_rest.any()
    assert len(words) > 1  # calls take two slots by turns


def test_blocks_of_the_caller() -> None:
    ranks.run(3, _blocks)


def _pending(at: Rank) -> None:
    """Calls that are enqueued before anybody waits for them."""
    exact(at, equal(3, 8, 8, 8, schedule="growing"), 0)
    (engine,) = {workspace.engine for workspace in workspaces() if workspace.group.size() == 3}
    engine.work.waits = False
    cases = [equal(3, 5 + i, 16, 8, schedule=name) for i, name in enumerate(NAMES)]
    under_way = []
    for number, case in enumerate(cases):
        made = make(at, case, number)
        under_way.append((case, call(case, made.a, made.b), made))
    ficco.synchronize()
    for case, results, made in under_way:
        verify(case, results, made)
    engine.work.waits = True


def test_calls_in_flight() -> None:
    ranks.run(3, _pending)


@pytest.mark.parametrize("what", [what for what in MISMATCHES if what != "mover"])
def test_mismatch_when_warm(what: str) -> None:
    test_faults.test_mismatch(what, "warm")


def _memory_goes(at: Rank) -> tuple[int, int]:
    """Open files before and after groups that come and go."""

    def files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    ficco.close()
    counts = []
    for _ in range(4):
        exact(at, equal(2, 64, 64, 64, schedule="growing"), 0)
        exact(at, equal(2, 256, 64, 64, schedule="growing"), 1)
        at.barrier()
        ficco.close()
        at.barrier()
        counts.append(files())
    return counts[0], counts[-1]


def test_memory_is_given_back() -> None:
    for first, last in ranks.run(2, _memory_goes, fresh=True):
        assert first == last


def test_a_vendor_takes_few_lines() -> None:
    """The driver of a vendor, without what serves tensors on the CPU."""
    with open(thread_driver.__file__) as file:
        assert len(file.readlines()) < 300
