"""The contract on the HIP engine: tests of other modules, on ranks with the double of its library.

Tensors of the double are the CPU's, so that these are the tests of the CPU engine, in all its
dtypes. What ``test_hip.py`` runs itself, jittered or with more to look at, is not here again:
schedules, dtypes, worlds, odd sizes, layouts of A.

What makes no sense here, and why:

* ``test_any_cap_is_exact_or_refused``: caps below a page, which is the least that a GPU shares.
* ``test_timeout_is_that_of_the_call`` and the mismatch ``mover``: nothing on the double ends a
  collective that a peer does not join, gloo's, inside a function of the host's.
* ``test_mismatch_of_symmetric_memory``: closes a group with memory of ``ficco.empty`` in hand,
  which stays allocated with the caller; the double calls that a leak.
* jittered, slow, stuck and dying ranks: by the CPU engine's own means of disturbing it.
* exits of processes, threads that end, bytes that are copied: of the CPU engine's making.
"""

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
    test_any_case,
    test_capped_calls_between_others,
    test_capped_memory_is_below_half_of_serial,
    test_column_pieces_round_once,
    test_float_error_is_that_of_a_plain_product,
    test_groups_in_turn,
    test_layouts_of_b,
    test_operands_may_change_after_the_call,
    test_results_stay,
    test_subgroups,
    test_two_groups_at_once,
    test_workspace_grows_and_is_reused,
)
from test_faults import MISMATCHES, test_mismatch_of_options  # noqa: F401  likewise
from test_gradients import (  # noqa: F401  likewise
    test_backwards_of_two_groups_at_once,
    test_gradient_through_the_gathered_a,
    test_gradients_of_views,
    test_operators_in_a_checkpointed_block,
    test_tensor_parallel_inside_data_parallel,
)
from test_hip import _compiling
from test_operators import (  # noqa: F401  likewise
    test_errors_keep_to_their_bounds,
    test_memory_keeps_to_its_cap,
    test_operators_in_any_order,
    test_sums_repeat_to_the_last_bit,
    test_wrong_arguments_are_refused,
)

import ficco
import ficco.dma.cpu


def _on_the_double(fn: Callable[..., Any], at: Rank, *args: Any) -> Any:
    return hip_ranks._with_library(_compiling, at, _served, fn, *args)


def _served(at: Rank, fn: Callable[..., Any], *args: Any) -> Any:
    """A call that no other engine serves, not even in a thread of its own."""
    ficco.dma.cpu.CpuEngine = None
    ficco.set_options(engine="hip", on_timeout="raise", timeout_s=20)
    return fn(at, *args)


def _spotless(at: Rank) -> None:
    hip_ranks.spotless()


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[str]:
    env = {
        hip_ranks.LIBRARY: str(hip_ranks.library()),
        hip_ranks.WHEEL: str(hip_ranks.wheel("10")),
        "HIP_DOUBLE_JITTER_US": "50",
    }
    with ranks.around(_on_the_double, env):
        yield "cpu"


@pytest.fixture(autouse=True)
def spotless(device: str) -> Iterator[None]:
    """Behind every test nothing was violated and nothing leaks."""
    yield
    for world in ranks.kept():
        ranks.run(world, _spotless)


@pytest.mark.parametrize("what", [what for what in MISMATCHES if what != "mover"])
def test_mismatch_when_warm(what: str) -> None:
    test_faults.test_mismatch(what, "warm")


def _looked_for_late(at: Rank, *args: Any) -> dict[str, Any]:
    """As :func:`test_faults._mismatch` where a rank looks at a call once that is over."""
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


def test_mismatch_of_calls_that_are_over() -> None:
    """They got through on what was sent for another one."""
    found = ranks.run(3, _looked_for_late, MISMATCHES["dtype"], 2, "warm", (None, None))
    test_faults.assert_mismatch(found, 2)
