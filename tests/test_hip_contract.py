"""Interleaved calls, several groups and mismatches on the HIP engine: tests of other modules with
the double of HIP's library. ``tests/contract`` has the tests of each operator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import hip_ranks
import pytest
import ranks
import test_faults
from ranks import Rank
from test_all_gather_matmul import (  # noqa: F401  collected here, on this module's ranks
    test_calls_in_any_order,
    test_subgroups,
    test_workspace_grows_and_is_reused,
)
from test_faults import MISMATCHES
from test_gradients import test_backwards_of_two_groups_at_once  # noqa: F401  likewise
from test_operators import (  # noqa: F401  likewise
    test_memory_keeps_to_its_cap,
    test_operators_in_any_order,
)

import ficco
import ficco.dma.cpu


def _on_the_double(fn: Callable[..., Any], at: Rank, *args: Any) -> Any:
    return hip_ranks._with_library(hip_ranks.compiling, at, _served, fn, *args)


def _served(at: Rank, fn: Callable[..., Any], *args: Any) -> Any:
    """Run ``fn`` with the HIP engine only, in all threads."""
    ficco.dma.cpu.CpuEngine = None
    ficco.set_options(engine="hip", on_timeout="raise", timeout_s=20)
    result = fn(at, *args)
    hip_ranks.spotless()
    return result


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[str]:
    env = {
        hip_ranks.LIBRARY: str(hip_ranks.library()),
        hip_ranks.WHEEL: str(hip_ranks.wheel("10")),
        "HIP_DOUBLE_JITTER_US": "50",
    }
    with ranks.around(_on_the_double, env):
        yield "cpu"


def _examined_late(at: Rank, *args: Any) -> dict[str, Any]:
    """:func:`test_faults._mismatch` on ranks that examine a call only after it is over."""
    from ficco.dma import hip_api as hip

    look = hip.Event.over

    def once_over(event: Any) -> bool:
        end = time.monotonic() + 10
        while not look(event) and time.monotonic() < end:
            time.sleep(1e-3)
        return look(event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hip.Event, "over", once_over)
        return test_faults._mismatch(at, *args)


@pytest.mark.parametrize("fn", [test_faults._mismatch, _examined_late], ids=["", "late"])
def test_mismatch_when_warm(fn: Callable[..., Any]) -> None:
    """A call that is over can mismatch: it ended with data that peers sent for another call."""
    outcomes = ranks.run(3, fn, MISMATCHES["dtype"], 2, "warm", (None, None))
    test_faults.assert_mismatch(outcomes, 2)
