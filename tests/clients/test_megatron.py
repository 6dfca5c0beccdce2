"""Megatron-core's GPT with ficco's layers, compared with the same model with stock layers."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pages import snippet
from ranks import Rank, caught, counted, on_ranks

import ficco

pytestmark = pytest.mark.clients


class Norm(torch.nn.LayerNorm):
    """LayerNorm of a sequence shard: Megatron's requires Apex or Transformer Engine."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # Megatron sums its gradient


def _spec(replace: Any) -> Any:
    """Two of Megatron's layers with the norm above."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return TransformerBlockSubmodules(layer_specs=[replace(layer)] * 2, layer_norm=Norm)


def _config(at: Rank, sequence: bool) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        tensor_model_parallel_size=at.world,
        sequence_parallel=sequence,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        attention_softmax_in_fp32=True,
        bias_activation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _trained(at: Rank, spec: Any, sequence: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    from megatron.core.models.gpt import GPTModel

    config = _config(at, sequence)
    torch.manual_seed(0)
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(1, 1, 16, 16).tril() < 0.5
    losses = []
    for _ in range(3):
        loss = model(ids, torch.arange(16)[None], mask, labels=ids).mean()
        loss.backward()
        for param in model.parameters():
            if getattr(param, "sequence_parallel", False):  # as finalize_model_grads does
                dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in model.named_parameters()}


@on_ranks(2, timeout=200, fresh=True)
def test_specs_train_as_stock(at: Rank) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.spec_utils import ModuleSpec

    from ficco.integrations.megatron import FiccoRowParallelLinear, _check, ficco_spec

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=at.world)
    # Replace Megatron's calls on GPUs: the device of its buffers, and random states, unused here.
    torch.cuda.current_device = lambda: "cpu"
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    for sequence, calls in (
        (True, {"all_gather_matmul": 4 + 8, "matmul_reduce_scatter": 4 + 4}),
        (False, {"matmul_all_reduce": 4 + 4}),
    ):
        stock, expected = _trained(at, _spec(lambda layer: layer), sequence)
        with counted() as counts:
            losses, params = _trained(at, _spec(ficco_spec), sequence)
        assert counts == {name: 3 * count for name, count in calls.items()}, counts
        assert losses[0] == stock[0] and losses[2] < losses[0]
        torch.testing.assert_close(losses, stock, rtol=1e-6, atol=0)
        for name, param in expected.items():
            torch.testing.assert_close(params[name], param, rtol=0, atol=1e-6, msg=name)
    names: dict[str, Any] = {"config": _config(at, False)}
    exec(snippet("megatron"), names)
    kinds = [type(module).__name__ for module in names["model"].decoder.modules()]
    assert kinds.count("FiccoColumnParallelLinear") == kinds.count("FiccoRowParallelLinear") == 4
    layer = FiccoRowParallelLinear(
        8,
        8,
        config=_config(at, False),
        init_method=torch.nn.init.ones_,
        bias=False,
        input_is_parallel=False,
        skip_bias_add=False,
    )
    assert torch.equal(layer(torch.ones(2, 8))[0], torch.full((2, 8), 8.0))
    with ficco.expect():
        refused = caught(lambda: layer(torch.ones(2, 8)))
    assert refused.type == "NotOverlapped" and "pass input_is_parallel=True" in refused.text
    counts = ficco.counters()[layer.tp_group.group_name, "all-reduce"]
    assert counts.left == 1
    parallel_state.destroy_model_parallel()
    refused = caught(lambda: ficco_spec(ModuleSpec(module=torch.nn.Identity)))
    assert refused.type == "ValueError" and "get_gpt_layer_local_spec" in refused.text
    refused = caught(lambda: _check(SimpleNamespace(gradient_accumulation_fusion=True)))
    assert refused.type == "NotImplementedError" and "required False" in refused.text
