"""Gradients on GPUs: streams, memory, and what of ``test_gradients.py`` depends on the device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ranks import Rank, run
from test_gpu import MILLISECOND
from test_gradients import (  # noqa: F401  collected here, with this module's device
    OPERATORS,
    Case,
    Made,
    case_of,
    make,
    operands,
    product,
    same,
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

pytestmark = pytest.mark.multigpu


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda"


def _two_streams(at: Rank, save: bool) -> None:
    """Forwards and backwards in flight on one group from two streams, both slow to start."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    rng = random.Random(at.rank)
    found: list[tuple[Any, ...]] = []
    made: dict[tuple[str, int], Made] = {
        (operator, i): make(case_of(operator, at.world, 4 + 2 * i, 6, 8), at.world, i)
        for operator in OPERATORS
        for i in range(2)
    }
    # Everything is on the device before: a copy from the host would wait for it.
    kept = {
        key: operands(case_of(key[0], at.world, 4 + 2 * key[1], 6, 8), one, at)
        for key, one in made.items()
    }
    grads = {key: one.g[at.rank].to(at.device, torch.float32) for key, one in made.items()}
    torch.cuda.synchronize()
    for _ in range(4):
        for one, other in zip(OPERATORS, OPERATORS[1:] + OPERATORS[:1], strict=True):
            pair = []
            for i, operator in enumerate((one, other)):
                a, b = (x.detach().requires_grad_() for x in kept[operator, i])
                case = case_of(operator, at.world, 4 + 2 * i, 6, 8)
                with torch.cuda.stream(streams[i]), ficco.options(save_gathered=save):
                    torch.cuda._sleep(rng.randrange(3) * MILLISECOND // 4)
                    pair.append((operator, i, a, b, product(case, a, b)))
            for operator, i, a, b, y in pair:
                with torch.cuda.stream(streams[i]):
                    y.backward(grads[operator, i])
                found.append((operator, i, a, b))
    torch.cuda.synchronize()
    for operator, i, a, b in found:
        same(a.grad, made[operator, i].grad_a[at.rank], f"{operator} on stream {i}: a")
        same(b.grad, made[operator, i].grad_b[at.rank], f"{operator} on stream {i}: b")


@pytest.mark.parametrize("save", [False, True])
def test_one_group_on_two_streams(save: bool) -> None:
    run(2, _two_streams, save, device="cuda")


def _peak(at: Rank, save: bool) -> tuple[int, int]:
    """Bytes that PyTorch holds between forward and backward, and at most in the backward."""
    case = Case("all_gather_matmul", (256,) * at.world, 1024, 64, dtype="bfloat16")
    a, b = (
        torch.randn(*shape, device=at.device, dtype=torch.bfloat16, requires_grad=True)
        for shape in ((256, case.k), (case.k, case.n))
    )
    held = peak = 0
    for _ in range(3):
        a.grad = b.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with ficco.options(save_gathered=save):
            y = product(case, a, b)
        loss = y.sum()
        del y
        held = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
        del loss
    return held, peak


def test_memory_of_both_options() -> None:
    """Kept: the m k elements of the gathered A from forward to backward. Gathered again: none of
    them until the backward, which then holds as many."""
    again, kept = (run(2, _peak, save, device="cuda")[0] for save in (False, True))
    gathered = 2 * 256 * 1024 * 2
    assert again[0] < gathered / 2 < gathered <= kept[0] < 1.5 * gathered, (again, kept)
    assert again[1] >= gathered
