"""The benchmark of training steps in other packages, with small models on CPU ranks."""

from __future__ import annotations

import contextlib
import os
from functools import wraps
from typing import Any

import pytest
import titan
import torch
from ranks import Rank, counted, run

from benchmarks import clients_step
from examples.train_block_stack import Config

pytestmark = pytest.mark.clients

SMALL = Config(layers=2, hidden=64, heads=8, kv_heads=4, ffn=96, vocab=64, sequence=32, lr=0.1)
ROUNDS = 2

#: Calls in a step of each client's variants with ficco.
CALLS = {
    "torchtitan": {"all_gather_matmul": 12, "matmul_reduce_scatter": 8},
    "megatron": {"all_gather_matmul": 12, "matmul_reduce_scatter": 8, "matmul_all_reduce": 8},
    # Its plan has the output layer, too.
    "lightning": {"all_gather_matmul": 14, "matmul_reduce_scatter": 9},
}


def expect_contiguous_gradients() -> None:
    """Fail if the gradient of a result of attention is not contiguous, in any variant."""
    from torchtitan.models.common.attention import ScaledDotProductAttention as Attention

    attend: Any = Attention.forward

    @wraps(attend)  # torchtitan reads the names of its arguments
    def forward(*args: Any, **kwargs: Any) -> Any:
        out = attend(*args, **kwargs)
        out.register_hook(lambda grad: torch._assert(grad.is_contiguous(), f"{grad.stride()}"))
        return out

    Attention.forward = forward


def _measured(at: Rank, client: str) -> tuple[Any, dict[str, int]]:
    os.environ |= {"RANK": f"{at.rank}", "LOCAL_RANK": f"{at.rank}", "WORLD_SIZE": f"{at.world}"}
    if client == "torchtitan":
        titan.cpu_device()
        expect_contiguous_gradients()
    elif client == "megatron":
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        torch.cuda.current_device = lambda: "cpu"
        CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    with counted() as counts:
        frame = clients_step.measured(client, SMALL, at.device, ROUNDS)
    return frame, counts


@pytest.mark.parametrize("client", clients_step.CLIENTS)
def test_variants_train_alike_and_are_timed(client: str) -> None:
    for frame, counts in run(2, _measured, client, fresh=True, timeout=250):
        turns = clients_step.WARM + ROUNDS
        assert counts == {name: count * turns for name, count in CALLS[client].items()}
        variants = 4 if client == "megatron" else 2
        assert len(frame) == variants * turns and (frame["ms"] >= frame["host_ms"]).all()
        assert clients_step.wrong_losses(frame, 1e-5) == []
        assert len(clients_step.summary(frame)) == variants
        stock = frame[frame["variant"] == "stock"]["loss"]
        assert stock.iloc[-1] < stock.iloc[0]
        frame.loc[(frame["variant"] == "ficco") & (frame["round"] == -1), "loss"] *= 1.001
        assert clients_step.wrong_losses(frame, 1e-5) == ["ficco in round -1"]
