"""Batches of copies of a lane on the HIP engine and the double of HIP's library, which executes the
copies of a batch in any order."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cases import all_exact, equal, exact
from experts import Layer
from hip_ranks import asking, calls, clean, double, on_double, run
from ranks import Rank, caught
from test_experts import every_way
from test_hip import COPIED, COPY, GRAPHED, attempted, engine, replayed

import ficco
from ficco.machine import configs, load, save

BATCH = "hipMemcpyBatchAsync"
#: Settings of a HIP release that submits batches, with delayed queues.
NATIVE = {"VERSION": 71526333, "JITTER_US": 150}
#: Schedules with a lane that copies to several peers, and schedules without such a lane.
LANES = ("shard-overlap", "growing", "hetero-fused-1d:pieces=3")
SEPARATE = ("shard-overlap:pull", "hetero-fused-1d:copy=2", "uniform-fused-2d:pieces=2")


def _every_schedule(at: Rank, ways: str) -> None:
    cases = [equal(3, 12, 16, 8, schedule=name, gathered=True) for name in (*LANES, *COPIED[::5])]
    with clean(), asking(ways):
        all_exact(at, [*cases, *(case.on(rows=(5, 0, 7)) for case in cases)])
        ficco.synchronize()
        assert BATCH in engine().capabilities().copy and calls(BATCH) > 20


@pytest.mark.parametrize(("series", "more"), [("7", ""), ("10", ",columns=pack")])
def test_batches_are_exact_in_any_order(series: str, more: str) -> None:
    run(3, _every_schedule, f"copy=batch{more}", series=series, settings=NATIVE)


def _counts(at: Rank, name: str, ways: str = "copy=batch") -> tuple[int, int]:
    """Batches and single copies of a warm call."""
    case = equal(3, 12, 16, 8, schedule=name)
    with clean(), asking(ways):
        all_exact(at, [case] * 4)
        ficco.synchronize()
        before = calls(BATCH), calls(COPY)
        exact(at, case, 9)
        ficco.synchronize()
        return calls(BATCH) - before[0], calls(COPY) - before[1]


@on_double(3, fresh=True, settings=NATIVE)
def test_neighbours_to_several_peers_are_one_call(at: Rank) -> None:
    """Copies that wait for their peer, and lanes that serve one peer, have no neighbours."""
    for copies, name in (2, "shard-overlap"), (6, "hetero-fused-1d:pieces=3"):
        assert _counts(at, name) == (copies // 2, 0)
        assert _counts(at, name, "") == (0, copies)
    for name in SEPARATE:
        assert _counts(at, name)[0] == _counts(at, name, "")[0] == 0


def limited(folder: Path, key: str, limits: Sequence[int]) -> list[str]:
    """Machine files, each with one of the limits of ``key``."""
    base = replace(load(configs() / "mi300x-8.yaml"), ranks=3)
    files = [str(folder / f"{limit}.yaml") for limit in limits]
    for limit, file in zip(limits, files, strict=True):
        machine = replace(base, name=f"limit{limit}", **{key: limit})
        save(machine, file)
        assert load(file) == machine
    return files


def _of_the_machine(at: Rank, files: list[str]) -> list[tuple[int, int]]:
    counts = []
    for file, ways in (*((file, "") for file in files), (files[0], "copy=dtod")):
        with ficco.options(machine=file):
            counts.append(_counts(at, "shard-overlap", ways))
    return counts


def test_the_machine_file_limits_batches(tmp_path: Path) -> None:
    """The copies have 768 bytes. FICCO_HIP overrides the file."""
    files = limited(tmp_path, "batched_copies", (768, 767, 0))
    for counts in run(3, _of_the_machine, files, settings=NATIVE):
        assert counts == [(1, 0), (0, 2), (0, 2), (0, 2)]


@on_double(3, fresh=True)
def test_a_release_without_batches_copies_one_by_one(at: Rank) -> None:
    """In the HIP of ROCm 7.2 the function copies one by one and rejects attributes."""
    case = equal(3, 12, 16, 8, schedule="shard-overlap")
    with warnings.catch_warnings(record=True) as raised, clean(), asking("copy=batch"):
        warnings.simplefilter("always")
        all_exact(at, [case, case.on(n=9), case.on(schedule="growing")])
        ficco.synchronize()
        copy = engine().capabilities().copy
    assert copy.startswith(f"{COPY}, for want of {BATCH}") and not calls(BATCH)
    warned = [str(entry.message) for entry in raised if BATCH in str(entry.message)]
    assert len(warned) == (at.rank == 0)
    for part in ("FICCO_HIP=copy=batch", "required HIP 7.12", "got HIP 7.2", "one by one"):
        assert all(part in warning for warning in warned)


@on_double(3, fresh=True, settings={"VERSION": NATIVE["VERSION"]})
def test_graphs_hold_single_copies(at: Rank) -> None:
    """A batch in a capture is a violation of the double."""
    with asking("copy=batch"):
        replayed(at, (LANES[0], *GRAPHED[1:3]), 6)
    assert calls(BATCH)


@on_double(3, fresh=True, settings=NATIVE, timeout=120)
def test_rows_of_experts_are_batches(at: Rank) -> None:
    """The rows of each expert of a peer are one copy. A call may have no rows for a peer."""
    with asking("copy=batch"):
        every_way(at, Layer((7, 0, 5), experts=6, top_k=2))
    assert calls(BATCH)


def _failing(at: Rank) -> tuple[Any, Any]:
    case = equal(3, 12, 16, 8, schedule="shard-overlap")
    with asking("copy=batch"), ficco.options(timeout_s=8):
        all_exact(at, [case] * 2)
        at.barrier()
        if at.rank == 1:
            double().double_fail(BATCH.encode(), 719, 1, 1)
        outcome = caught(partial(attempted, at, case, None))
        closing = caught(ficco.close)
    return outcome, closing


def test_a_batch_that_fails_is_named() -> None:
    first, second, third = run(3, _failing, settings=NATIVE)
    outcome, closing = second
    assert outcome.type == "BackendError" and closing is None
    assert (outcome.fields["call"], outcome.fields["code"]) == (BATCH, "hipErrorLaunchFailure")
    for outcome, closing in (first, third):
        assert outcome.type == "PeerFailed" and closing is None
        assert BATCH in outcome.fields["reasons"][1]


@on_double(1, fresh=True, settings={"VERSION": NATIVE["VERSION"]})
def test_the_double_refuses_batches_that_depend_on_their_order(at: Rank) -> None:
    import numpy as np
    from hip import hip

    from ficco.dma import hip_api
    from ficco.errors import BackendError

    hip.hipSetDevice(0)
    stream = hip.hipStreamCreateWithPriority(1, 0)[1]
    memory = int(hip.hipMalloc(4096)[1])

    def batch(dst: list[int], src: list[int], sizes: list[int]) -> None:
        ends = [np.array([memory + at for at in offsets], np.int64) for offsets in (dst, src)]
        hip_api.copy_batch(*ends, np.array(sizes, np.int64), stream)

    hip_api.start()
    batch([0, 512], [1024, 1024], [512, 512])  # one source for two copies
    order = "copies 0 and 1 depend on their order"
    for *operands, message in (
        ([0, 511], [1024, 2048], [512, 512], order),  # both write a byte
        ([0, 1024], [1024, 2048], [512, 512], order),  # the second writes the source of the first
        ([0, 512], [1024, 2048], [512, 0], "copy 1 has no bytes"),
    ):
        with pytest.raises(BackendError, match=BATCH):
            batch(*operands)
        assert message in double().double_said().decode()
        double().double_violations()
    while hip.hipStreamQuery(stream)[0]:
        pass
    hip.hipFree(memory)
    hip.hipStreamDestroy(stream)


def _cuts(at: Rank, files: list[str]) -> list[tuple[int, int]]:
    """Contiguous and 2D copies of warm, exact calls under each machine file."""
    counts, cases = [], [equal(3, 12, 16, 8, schedule=name) for name in (LANES[0], SEPARATE[2])]
    for file in files:
        with mock.patch.dict(os.environ, FICCO_MACHINE=file), clean():  # read by a new engine
            all_exact(at, cases * 2)
            ficco.synchronize()
            before = calls(COPY), calls("hipMemcpy2DAsync")
            all_exact(at, cases)
            ficco.synchronize()
            counts.append((calls(COPY) - before[0], calls("hipMemcpy2DAsync") - before[1]))
    return counts


def test_the_machine_file_limits_copies(tmp_path: Path) -> None:
    """Copies of 768 bytes become pieces of at most 512 bytes, 2D copies pieces of whole rows."""
    files = limited(tmp_path, "largest_copy", (0, 512, 128))
    for whole, halves, more in run(3, _cuts, files, settings=NATIVE):
        assert whole[0] < halves[0] < more[0] and whole[1] <= halves[1] < more[1]
