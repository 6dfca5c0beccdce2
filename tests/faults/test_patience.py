"""Timeouts of the waits for peers, and the warnings of long waits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import equal, exact
from ranks import Rank, gave_up, leave, on_ranks, run
from test_faults import everyone, timed

import ficco
from ficco.dma import patience
from ficco.dma.patience import DEFAULT_S, Patience, limit_of
from ficco.errors import SignalTimeout
from ficco.runtime.workspace import workspaces

CPU = torch.device("cpu")
#: Seconds of a wait before the first warning in these tests.
WARN_S = 0.2


def error(seconds: float) -> SignalTimeout:
    facts: dict[str, Any] = {"operator": "all_gather_matmul", "rank": 0, "peer": 3, "step": "2.0"}
    return SignalTimeout(**facts, schedule="growing", seconds=seconds)


def test_a_wait_warns_at_doubling_intervals_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    wait, late = Patience(), Patience()
    with caplog.at_level(logging.WARNING, "ficco"):
        for seconds in range(0, 601, 5):
            assert wait.ends(600.0, error, float(seconds)) is None
    waited = [60, 120, 240, 480]
    text = "all_gather_matmul: rank 0 waited {}.0 s for rank 3 at step '2.0' of schedule 'growing'"
    assert len(caplog.messages) == len(waited)
    for seconds, message in zip(waited, caplog.messages, strict=True):
        assert message.startswith(text.format(seconds)), message
        assert "600 s in all (ficco.options(timeout_s=...))" in message
    ended = wait.ends(600.0, error, 601.0)
    assert ended is not None and ended.seconds == 601.0
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ficco"):  # of a wait that is checked late
        for seconds in (500.0, 501.0, 959.0):
            assert late.ends(1000.0, error, seconds) is None
    assert len(caplog.messages) == 1


def test_a_backend_without_a_timeout_has_the_default() -> None:
    def no_backend(device: torch.device) -> Any:
        raise RuntimeError("Could not retrieve or create the backend")

    lacking: Any = SimpleNamespace(_get_backend=no_backend)
    without: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace())
    assert limit_of(lacking, CPU) == limit_of(without, CPU) == DEFAULT_S


@on_ranks(2)
def test_a_call_waits_as_long_as_its_group_unless_options_say_otherwise(at: Rank) -> None:
    """A group with a timeout, a group without one, and calls whose options set one."""
    timeouts = []
    for timeout, option in ((timedelta(seconds=77), None), (None, None), (None, 5.0)):
        group = dist.new_group(list(range(at.world)), timeout=timeout)
        for iteration in range(2):
            with ficco.options(timeout_s=option and option + iteration):
                exact(at, equal(at.world, 4, 4, 4), iteration, group)
            (workspace,) = workspaces(group)
            timeouts.append(workspace.engine.timeout_s)
        leave(group)
    assert timeouts == [77.0, 77.0, 1800.0, 1800.0, 5.0, 6.0]


@on_ranks(2)
def test_the_limit_of_the_group_ends_a_call(at: Rank) -> None:
    group = dist.new_group(list(range(at.world)), timeout=timedelta(seconds=1))
    exact(at, equal(at.world, 4, 4, 4), 0, group)
    at.barrier()
    if at.rank == 0:
        outcome, seconds = timed(lambda: exact(at, equal(at.world, 4, 4, 4), 1, group))
        (facts,) = gave_up(outcome)
        assert facts["peer"] == 1 and 1.0 <= seconds < 6.0
    at.barrier()
    leave(group)


# A late rank: every wait for it warns.


@contextmanager
def late_rank(at: Rank, key: str) -> Iterator[list[str]]:
    """Collect this rank's warnings in a block, which rank 1 enters after rank 0 has warned."""
    warnings: list[str] = []
    store = dist.distributed_c10d._get_default_store()

    def emit(record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())
        store.set(key, "warned")

    if at.rank == 1:
        store.get(key)  # blocks until rank 0 sets the key
    handler = logging.Handler(logging.WARNING)
    handler.emit = emit  # type: ignore[method-assign]
    patience.LOGGER.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patience, "WARN_AFTER_S", WARN_S)
        try:
            yield warnings
        finally:
            patience.LOGGER.removeHandler(handler)


#: Operation that a rank begins late, and a part of the warning.
WAITS: dict[str, str] = {
    "first call": "join the first call of this group (find out which ranks share a host)",
    "new kind": "step 'agree on what to compute' of schedule 'growing'",
    "call": "of schedule 'growing'",
    "collective": "step 'all-gather (collective on compute0)' of schedule 'serial:collective'",
    "counts": "step 'agree on what to compute'",
    "memory": "to share host memory for allocation",
    "first call of hosts": "join the first call",
    "call of hosts": "on host host-1",
}


def _late(at: Rank, operation: str) -> list[str]:
    if "hosts" in operation:
        os.environ["FICCO_HOST"] = f"host-{at.rank}"
    schedule = "serial:collective" if operation == "collective" else "growing"
    case, index = equal(at.world, 8, 8, 8, schedule=schedule), torch.zeros(3, 1, dtype=torch.long)
    group = everyone(at, *[case] * 3 * (not operation.startswith("first call")))
    calls: dict[str, Callable[[], Any]] = {
        "counts": lambda: ficco.route(index, 4, group=group).capacity,
        "new kind": partial(exact, at, case.on(n=24), 7, group),
        "memory": lambda: workspaces(group)[0].engine.symmetric(64),
    }
    call = calls.get(operation, partial(exact, at, case, 5, group))
    at.barrier()
    with late_rank(at, operation) as warnings:
        call()
    leave(group)
    return warnings


@pytest.mark.parametrize("operation", WAITS)
def test_a_rank_that_waits_for_a_late_rank_warns(operation: str) -> None:
    warnings, _ = run(2, _late, operation, fresh="hosts" in operation)
    assert WAITS[operation] in warnings[0], warnings
    for message in warnings:
        assert "rank 0 waited" in message and "for rank 1" in message, message
