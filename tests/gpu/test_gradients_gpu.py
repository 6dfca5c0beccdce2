"""Gradients on GPUs: streams, memory, and device-dependent tests of ``test_gradients.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Rank, run
from test_gpu import alike, jittered, known, once_known
from test_gradients import (  # noqa: F401  collected here, with this module's device
    test_a_call_inside_a_backward,
    test_backwards_inside_autocast,
    test_gradients_in_any_layout,
    test_gradients_of_random_data,
    test_gradients_of_views,
    test_gradients_under_autocast,
    test_operators_in_a_checkpointed_block,
    test_tensor_parallel_inside_data_parallel,
)

import ficco
from ficco.problems.products import OPERATORS

pytestmark = pytest.mark.multigpu


def _jitter(at: Rank, save: bool, calls: int) -> int:
    kinds = []
    for iteration, name in enumerate((*OPERATORS, "experts", "ulysses_project") * 2):
        ((_, case),) = alike(name, at.world, ["growing"])
        kinds.append(known(at, name, case, iteration, backward=True))
    with ficco.options(save_gathered=save):
        return jittered(at, 3, calls, kinds, once_known)


@pytest.mark.parametrize("save", [False, True])
def test_one_group_on_several_streams(save: bool) -> None:
    assert run(2, _jitter, save, 100, device="cuda") == [100] * 2


def _peak(at: Rank, save: bool) -> tuple[int, int]:
    """Bytes that PyTorch holds between forward and backward, and their peak in the backward."""
    options: Any = {"device": at.device, "dtype": torch.bfloat16, "requires_grad": True}
    a, b = torch.randn(256, 1024, **options), torch.randn(1024, 64, **options)
    held = peak = 0
    for _ in range(3):
        a.grad = b.grad = None
        torch.cuda.synchronize()
        baseline = torch.cuda.memory_allocated()
        with ficco.options(save_gathered=save):
            y = ficco.all_gather_matmul(a, b)
        loss = y.sum()
        del y
        held = torch.cuda.memory_allocated() - baseline
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - baseline
        del loss
    return held, peak


def test_memory_of_both_options() -> None:
    """With ``save_gathered`` the forward keeps the m k elements of the gathered A. Without it
    only the backward holds them."""
    regathered, saved = (run(2, _peak, save, device="cuda")[0] for save in (False, True))
    gathered = 2 * 256 * 1024 * 2
    assert regathered[0] < gathered / 2 and regathered[1] >= gathered, regathered
    assert gathered <= saved[0] < 1.5 * gathered, saved
