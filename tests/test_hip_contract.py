"""The contract on the HIP engine: tests of other modules, on ranks with the double of its library.

Tensors of the double are the CPU's, so that these are the tests of the CPU engine, in all its
dtypes. What stays out, by names without ``test_``, and why:

* ``test_hip.py`` runs it itself, jittered or with more to look at: schedules, dtypes, ugly_sizes,
  eight_ranks, layouts_of_a, every_schedule_is_exact; mismatch is here in part, as
  ``test_mismatch_when_warm``.
* Caps below a page, which is the least that a GPU shares: auto_keeps_to_a_cap,
  auto_keeps_to_any_cap, any_cap_is_exact_or_refused.
* Nothing on the double ends a collective that a peer does not join, gloo's, inside a function of
  the host's: timeout_is_that_of_the_call, unfinished_collective_does_not_hold_the_process,
  rank_that_never_calls, and the mismatch of movers.
* As on a GPU the next call or ``ficco.synchronize`` tells of a signal that is late, not yet the
  call itself: who_gave_up_waiting_is_not_waited_for, a_group_that_timed_out_is_used_again.
* It closes a group with memory of ``ficco.empty`` in hand, which stays allocated with the caller;
  the double calls that a leak: mismatch_of_symmetric_memory,
  slices_of_symmetric_memory_are_none_on_every_rank.
* It disturbs the CPU engine by that engine's own means: jittered_calls, jittered_backwards,
  limited_bandwidth, stalled_rank, a_stuck_rank_is_named, rank_killed_in_the_middle_of_a_call,
  a_rank_that_fails_alone_is_named_at_once, a_rank_that_fails_between_parts_of_a_call_is_named,
  of_a_lost_connection_the_rank_whose_process_ends_is_named.
* Processes that die or stop, as ``test_killed_peer`` of ``test_hip.py`` has them: killed_rank,
  rank_killed_before_the_call_began, stopped_rank, survivors_end_by_themselves.
* Threads, files and copies of the CPU engine's making: close_ends_threads, exit_leaves_nothing,
  transposed_b_is_not_copied, memory_from_forward_to_backward.
* Of the tests alone: inputs_can_tell_stale_data.
* Arguments, and how ranks tell each other what they call, are no engine's:
  schedule_as_object_and_auto, a_call_may_wait_for_ever, keyboard_interrupt_ends_a_wait,
  ctrl_c_leaves_gradients_enabled, mismatch_names_sizes_and_schedules,
  one_rank_with_wrong_arguments, rows_that_can_be_read_once,
  rows_that_cannot_be_read, ranks_that_call_other_operators_are_told,
  a_rank_without_memory_tells_its_peers, a_rank_that_cannot_remember_a_call_tells_its_peers,
  a_rank_without_memory_for_all_columns_tells_its_peers,
  an_error_that_is_remembered_does_not_keep_the_operands,
  a_part_of_a_call_that_all_ranks_refuse_breaks_nothing,
  a_closed_group_never_takes_data_of_a_call_that_was_broken_off,
  what_a_watchdog_tells_while_a_call_begins_is_not_lost.
* Gradients are calls of the same operators: gradients_are_exact, gradients_under_named_schedules,
  gradients_of_b_alone, gradients_with_what_was_gathered_kept, directional_differences,
  gradients_of_random_data, only_what_is_needed_is_called, all_reduce_with_equal_gradients,
  gradients_in_any_layout, second_derivatives_are_refused,
  transforms_and_batched_gradients_are_refused, gradients_that_are_constant_are_not_refused,
  what_runs_beside_a_call_that_raises_is_waited_for,
  operands_must_not_change_before_the_backward, options_of_the_forward_are_those_of_the_backward,
  ranks_that_need_other_gradients_learn_it, a_call_inside_a_backward,
  threads_that_take_turns_on_a_group, backwards_inside_autocast, gradients_under_autocast,
  layers_keep_and_cast_what_torch_does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import hip_ranks
import pytest
import ranks
import test_all_gather_matmul
import test_faults
import test_gradients
import test_operators
from ranks import Rank
from test_all_gather_matmul import (  # noqa: F401  collected here, on this module's ranks
    test_any_call_behind_any_other,
    test_any_case,
    test_capped_calls_between_others,
    test_capped_memory_is_below_half_of_serial,
    test_column_pieces_round_once,
    test_float_error_is_that_of_a_plain_product,
    test_groups_in_turn,
    test_layouts_of_b,
    test_linear_weight_and_inference_mode,
    test_operands_may_change_after_the_call,
    test_results_stay,
    test_subgroups,
    test_two_groups_at_once,
    test_workspace_grows_and_is_reused,
)
from test_faults import (  # noqa: F401  likewise
    MISMATCHES,
    test_calls_in_another_order,
    test_late_rank_is_no_fault,
    test_mismatch_of_options,
)
from test_gradients import (  # noqa: F401  likewise
    test_backwards_of_two_groups_at_once,
    test_gradient_through_the_gathered_a,
    test_gradients_of_views,
    test_operators_in_a_checkpointed_block,
    test_tensor_parallel_inside_data_parallel,
)
from test_hip import _compiling
from test_operators import (  # noqa: F401  likewise
    test_an_all_reduce_is_equal_on_all_ranks_to_the_last_bit,
    test_errors_keep_to_their_bounds,
    test_memory_keeps_to_its_cap,
    test_operands_with_the_negative_bit,
    test_operators_in_any_order,
    test_several_groups_of_a_mesh,
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
    ranks.used()
    yield
    for world in ranks.used():
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


def test_what_stays_out_is_named() -> None:
    modules = (test_all_gather_matmul, test_faults, test_gradients, test_operators)
    theirs = {name for one in modules for name in vars(one) if name.startswith("test_")}
    said = {f"test_{word}" for word in re.findall(r"\w+", str(__doc__))}
    missing, twice = theirs - globals().keys() - said, theirs & globals().keys() & said
    assert not missing and not twice
