"""Models of Hugging Face Transformers under ficco's styles, compared with the unsharded models."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pages import snippet
from ranks import Rank, caught, counted, on_ranks
from test_nn import refuses
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ficco

pytestmark = pytest.mark.clients

#: Relative error of float32: the two models sum in different orders.
CLOSE = 2e-5
#: Sizes of all models. 4 ranks can share the heads, and the smaller number of heads of keys.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def saved(family: str, at: Rank, folder: Path, **changes: Any) -> Any:
    """Save a small model with random weights from rank 0; return its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **SIZES | changes)
    config._attn_implementation = "eager"
    if at.rank == 0:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(std=0.2) if param.dim() > 1 else param.uniform_(0.5, 1.5)
        model.generation_config.pad_token_id = 0
        model.save_pretrained(folder)
    at.barrier()
    return config


def loaded(folder: Path, plan: Any = None) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    parallel = {}
    if plan is not None:
        config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan)
        parallel["distributed_config"] = config
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **parallel)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(model: Any, *lengths: int) -> dict[str, torch.Tensor]:
    """Loss, the last logits and all gradients of one step."""
    torch.manual_seed(1)
    loss = torch.zeros(())
    for length in lengths:
        ids = torch.randint(1, 128, (2, length))
        out = model(input_ids=ids, labels=ids, use_cache=False)
        loss = loss + out.loss
    loss.backward()
    grads = {name: full(param.grad) for name, param in model.named_parameters()}
    model.zero_grad()
    return {"loss": loss.detach(), "logits": out.logits.detach(), **grads}


def generated(model: Any, length: int, **options: Any) -> list[int]:
    torch.manual_seed(2)
    prompt = torch.randint(1, 128, (2, length))
    tokens = model.generate(prompt, **{"max_new_tokens": 8, "do_sample": False} | options)
    return tokens.flatten().tolist()


def calls_of_a_token(at: Rank, model: Any) -> int:
    """Calls of Python functions of a forward of one token, the fewest of several."""
    token, calls = torch.ones(1, 1, dtype=torch.int64), list[int]()

    def count(frame: Any, event: str, argument: Any) -> None:
        calls[-1] += event == "call"

    for _ in range(8):
        at.barrier()
        if at.rank == 0:  # begins after its peer, and so waits for no signal
            time.sleep(0.05)
        calls.append(0)
        sys.setprofile(count)
        try:
            with torch.no_grad():
                model(input_ids=token, use_cache=False)
        finally:
            sys.setprofile(None)
    return min(calls)


def close(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        worst = (result[name] - tensor).abs().max() / tensor.abs().max()
        assert worst < CLOSE, f"{name}: {worst}"


#: Operators of two layers, forward and backward, and of lm_head's backward. The layers of attention
#: share one gather, and so do those of the MLP. A backward gathers the rows of its forward again.
REPLICATED = {"matmul_all_reduce": 9}
SEQUENCE = {"all_gather_matmul": 12, "matmul_reduce_scatter": 8, "matmul_all_reduce": 1}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt_neox"])
@on_ranks(2, timeout=120)
def test_models_are_the_unsharded_ones(
    at: Rank, family: str, sequence: bool, tmp_path: Path
) -> None:
    from ficco.integrations.transformers import plan, register

    register()
    config = saved(family, at, tmp_path)
    unsharded, rules = loaded(tmp_path), plan(config, sequence_parallel=sequence)
    model = loaded(tmp_path, rules)
    # The ranks can share the first length, but not the second.
    for length, calls in ((16, SEQUENCE if sequence else REPLICATED), (15, REPLICATED)):
        expected = trained(unsharded, length)
        with counted() as counts:
            close(trained(model, length), expected)
        assert counts == calls, (length, counts)
        assert generated(model, length) == generated(unsharded, length)
    if family == "llama":
        model.gradient_checkpointing_enable()
        model.train()
        close(trained(model, 16, 15), trained(unsharded, 16, 15))
        model = loaded(tmp_path, rules)
        kinds = {type(child) for child in model.model.layers[0].children()}
        for each in (model, unsharded):  # both, for the names of the parameters
            apply_activation_checkpointing(each, check_fn=lambda child: type(child) in kinds)
        close(trained(model, 16), trained(unsharded, 16))


@on_ranks(2, timeout=120)
def test_parts_of_the_sequence_lie_as_results_do(at: Rank, tmp_path: Path) -> None:
    """Hidden states [b, s, h] and their gradients lie as [s, b, h], so that no layer copies its
    rows."""
    from ficco.integrations.transformers import plan, register

    lies = list[bool]()

    def see(module: Any, args: Any) -> None:
        x = args[0]
        lies.append(x.to_local().movedim(1, 0).is_contiguous())
        x.register_hook(lambda grad: lies.append(grad.to_local().movedim(1, 0).is_contiguous()))

    register()
    config = saved("llama", at, tmp_path)
    model = loaded(tmp_path, plan(config, sequence_parallel=True))
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_pre_hook(see)
        layer.post_attention_layernorm.register_forward_pre_hook(see)
    trained(model, 16)
    assert len(lies) == 8 and all(lies), lies


@on_ranks(2, timeout=120)
def test_a_token_costs_no_more_calls_of_python_than_with_the_stock_plan(
    at: Rank, tmp_path: Path
) -> None:
    from ficco.integrations.transformers import plan, register

    register()
    config = saved("llama", at, tmp_path)
    plans = {
        "stock": "auto",
        "ficco": plan(config),
        "sequence": plan(config, sequence_parallel=True),
    }
    fewest = {name: calls_of_a_token(at, loaded(tmp_path, rules)) for name, rules in plans.items()}
    if at.rank == 0:
        assert max(fewest["ficco"], fewest["sequence"]) <= fewest["stock"], fewest


@on_ranks(2, timeout=120, fresh=True)
def test_the_program_of_the_page_runs(at: Rank, tmp_path: Path) -> None:
    saved("llama", at, tmp_path)
    names: dict[str, Any] = {"path": tmp_path}
    # torchrun sets these variables.
    os.environ |= {"RANK": f"{at.rank}", "LOCAL_RANK": f"{at.rank}", "WORLD_SIZE": f"{at.world}"}
    exec(snippet("transformers"), names)
    with counted() as counts:
        close(trained(names["model"], 16), trained(loaded(tmp_path), 16))
    assert counts == SEQUENCE, counts


@on_ranks(4, timeout=120, fresh=True)
def test_stock_names_run_ficco(at: Rank, tmp_path: Path) -> None:
    """``tp_plan="auto"`` on four ranks: training, a static cache, and a portable checkpoint."""
    from ficco.integrations.transformers import register

    register(replace=True)
    saved("llama", at, tmp_path / "whole")
    unsharded, model = loaded(tmp_path / "whole"), loaded(tmp_path / "whole", "auto")
    with counted() as counts:
        close(trained(model, 16), trained(unsharded, 16))
    # Without rules for attention and MLP each of q, k, v, gate and up sums its own gradient.
    assert counts == {"matmul_all_reduce": 15}
    static = {"max_new_tokens": 4, "cache_implementation": "static"}
    assert generated(model, 5, **static) == generated(unsharded, 5, **static)
    model.save_pretrained(tmp_path / "saved")
    at.barrier()
    again = loaded(tmp_path / "saved").state_dict()
    for name, tensor in unsharded.state_dict().items():
        assert torch.equal(again[name], tensor), name


@on_ranks(2, timeout=250)
def test_compiled_models_are_the_unsharded_ones(at: Rank, tmp_path: Path) -> None:
    from ficco import passes
    from ficco.integrations.transformers import plan, register

    register()
    config = saved("llama", at, tmp_path)
    unsharded = loaded(tmp_path)
    expected = trained(unsharded, 16)
    model = loaded(tmp_path, plan(config, sequence_parallel=True))
    model.compile(backend="aot_eager", fullgraph=True)
    close(trained(model, 16), expected)
    close(trained(model, 18), trained(unsharded, 18))  # by code for all lengths
    torch._dynamo.reset()
    model, backend = loaded(tmp_path, "auto"), passes.backend("aot_eager")
    model.compile(backend=backend)
    close(trained(model, 16), expected)
    torch._dynamo.reset()
    mlp = loaded(tmp_path, "auto").model.layers[0].mlp
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(torch.compile(mlp, backend="ficco")(x), mlp(x))
    # The pass leaves the sum of the embedding and the gather of the logits.
    for report, counts in ((backend.report, (15, 2)), (passes.torch_compile.report, (1, 0))):
        assert (len(report.replaced), len(report.left)) == counts


@on_ranks(2)
def test_unsupported_models_are_refused(at: Rank, tmp_path: Path) -> None:
    """Plans without rules, heads of keys that ranks cannot share; and where ranks share the
    sequence, layers with other modules than norms, and adapters of peft."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from ficco.integrations.transformers import plan, register

    register()
    experts = AutoConfig.for_model("mixtral", **SIZES, num_local_experts=4)
    rules = plan(experts)
    assert rules["model.layers.*.self_attn.o_proj"] == "ficco_rowwise"
    assert not any("experts" in name for name in rules), rules
    without = AutoConfig.for_model("gpt2", n_embd=8, n_head=1, n_layer=1, vocab_size=8)
    model: Any = torch.nn.Module()
    model.tp_plan = {"layers.*.attention": "colwise"}
    named = SimpleNamespace(from_config=lambda config: model)
    few = saved("llama", at, tmp_path / "few", num_key_value_heads=1)
    config = saved("llama", at, tmp_path / "all")
    lora = LoraConfig(r=2, target_modules=["q_proj", "o_proj"])
    adapted = get_peft_model(loaded(tmp_path / "all", plan(config, sequence_parallel=True)), lora)
    heads = "num_key_value_heads that 2 ranks can share, got 1"

    def mixing(config: Any) -> Any:
        model = AutoModelForCausalLM.from_config(config)
        model.model.layers[0].mix = torch.nn.Conv1d(8, 8, 3)
        return model

    mixed = SimpleNamespace(from_config=mixing)
    refuses(
        ("GPT2LMHeadModel has none", lambda: plan(without)),
        ("nn.Linear layers, got Module with col", lambda: plan(without, auto_class=named)),
        (heads, lambda: loaded(tmp_path / "few", plan(few))),
    )
    refuses(
        ("moe_tp_experts", lambda: plan(experts, sequence_parallel=True)),
        ("mix, a Conv1d", lambda: plan(config, sequence_parallel=True, auto_class=mixed)),
        ("such as an adapter of peft", lambda: trained(adapted, 16)),
        kind="NotImplementedError",
    )


class Own(torch.nn.Linear):
    """A linear layer that overrides ``forward``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@on_ranks(2, fresh=True)
def test_layers_left_to_transformers_are_counted_and_refused(at: Rank) -> None:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    from ficco.integrations.transformers import register

    register()
    mesh, name = init_device_mesh("cpu", (2,)), dist.group.WORLD.group_name
    x = torch.ones(2, 8, requires_grad=True)
    shard = DTensor.from_local(x, mesh, [Shard(0)])
    for style, collective, inputs, quiet in (
        ("colwise", "all-reduce", x, x.detach()),
        ("colwise", "all-gather", shard, x.detach()),
        ("colwise_gather_output", "all-gather", x, None),
        ("rowwise", "all-reduce", x[:, :4], None),
    ):
        layer, rule = Own(8, 8), ALL_PARALLEL_STYLES[f"ficco_{style}"]
        for param in ("weight", "bias"):
            rule.shard_param(layer, param, mesh)
        with warnings.catch_warnings(record=True):
            rule.install_forward(layer, mesh)
        ficco.counters(reset=True)
        layer(inputs)
        with ficco.expect():
            refused = caught(lambda layer=layer, inputs=inputs: layer(inputs))
            if quiet is not None:
                layer(quiet)
        assert refused.type == "NotOverlapped", (style, refused)
        assert refused.text.startswith(f"{collective} of group {name}: required"), refused.text
        assert "Own" in refused.text and "see docs/clients/transformers.md" in refused.text
        assert ficco.counters() == {(name, collective): (0, 0, {}, 1, 0.0)}, style


@on_ranks(2, timeout=120)
def test_quantized_models_are_those_of_stock_plans(at: Rank, tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig
    from transformers.distributed import DistributedConfig

    from ficco.integrations.transformers import plan, register

    register()
    config, ids = saved("llama", at, tmp_path), torch.arange(1, 17)[None]

    def logits(rules: Any) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path,
            attn_implementation="eager",
            dtype=torch.float32,
            quantization_config=TorchAoConfig(Int8WeightOnlyConfig()),
            distributed_config=DistributedConfig(tp_size=at.world, tp_plan=rules),
        )
        with torch.no_grad():
            out: torch.Tensor = model(input_ids=ids).logits
        return out

    expected = logits("auto")
    for sequence in (False, True):
        error = (logits(plan(config, sequence_parallel=sequence)) - expected).abs().max()
        assert error / expected.abs().max() < CLOSE, f"sequence={sequence}"
