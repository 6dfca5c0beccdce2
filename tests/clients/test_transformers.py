"""Hugging Face Transformers: its models under ficco's styles, against the same models unsharded."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pages import snippet
from ranks import Rank, caught, counted, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ficco

pytestmark = pytest.mark.clients

#: Of two models whose float32 sums are in other orders.
CLOSE = 2e-5
#: Of all models; heads that 4 ranks share, with fewer for keys and values.
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


def saved(family: str, at: Rank, folder: str, **changes: Any) -> Any:
    """The configuration of a small model with random weights, which rank 0 saves."""
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


def loaded(folder: str, plan: Any = None) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    parallel = {}
    if plan is not None:
        config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan)
        parallel["distributed_config"] = config
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **parallel)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(model: Any, length: int) -> dict[str, torch.Tensor]:
    """The loss, the logits and all gradients of one step."""
    torch.manual_seed(1)
    ids = torch.randint(1, 128, (2, length))
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    grads = {name: full(param.grad) for name, param in model.named_parameters()}
    model.zero_grad()
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **grads}


def generated(model: Any, length: int) -> list[int]:
    torch.manual_seed(2)
    prompt = torch.randint(1, 128, (2, length))
    tokens = model.generate(prompt, max_new_tokens=8, do_sample=False)
    return tokens.flatten().tolist()


def close(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        worst = (found[name] - tensor).abs().max() / tensor.abs().max()
        assert worst < CLOSE, f"{name}: {worst}"


#: Operators of two layers, forward and backward, and of lm_head's backward. Attention and MLP share
#: theirs. A backward gathers once more what its forward gathered.
REPLICATED = {"matmul_all_reduce": 9}
SEQUENCE = {"all_gather_matmul": 12, "matmul_reduce_scatter": 8, "matmul_all_reduce": 1}


def _models(at: Rank, family: str, sequence: bool, folder: str) -> None:
    from ficco.integrations.transformers import plan, register

    register()
    config = saved(family, at, folder)
    whole, rules = loaded(folder), plan(config, sequence_parallel=sequence)
    model = loaded(folder, rules)
    # Also a length that the ranks cannot share.
    for length, calls in ((16, SEQUENCE if sequence else REPLICATED), (15, REPLICATED)):
        want = trained(whole, length)
        with counted() as counts:
            close(trained(model, length), want)
        assert counts == calls, (length, counts)
        assert generated(model, length) == generated(whole, length)
    if family == "llama":
        model.gradient_checkpointing_enable()
        model.train()
        close(trained(model, 16), trained(whole, 16))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt_neox"])
def test_models_are_the_unsharded_ones(family: str, sequence: bool, tmp_path: Path) -> None:
    run(2, _models, family, sequence, str(tmp_path), timeout=120)


def _as_the_page_has_it(at: Rank, folder: str) -> None:
    saved("llama", at, folder)
    names: dict[str, Any] = {"path": folder}
    # As torchrun does.
    os.environ |= {"RANK": f"{at.rank}", "LOCAL_RANK": f"{at.rank}", "WORLD_SIZE": f"{at.world}"}
    exec(snippet("transformers"), names)
    with counted() as counts:
        close(trained(names["model"], 16), trained(loaded(folder), 16))
    assert counts == SEQUENCE, counts


def test_the_page_has_what_runs(tmp_path: Path) -> None:
    run(2, _as_the_page_has_it, str(tmp_path), timeout=120, fresh=True)


def _by_stock_names(at: Rank, folder: str) -> None:
    """``tp_plan="auto"`` on four ranks: a static cache, and a checkpoint that anyone loads."""
    from ficco.integrations.transformers import register

    register(replace=True)
    saved("llama", at, f"{folder}/whole")
    whole, model = loaded(f"{folder}/whole"), loaded(f"{folder}/whole", "auto")
    with counted() as counts:
        close(trained(model, 16), trained(whole, 16))
    # Without rules for attention and MLP the gradients of q, k, v and of gate, up are summed apart.
    assert counts == {"matmul_all_reduce": 15}
    torch.manual_seed(2)
    prompt = torch.randint(1, 128, (1, 5))
    static = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    assert torch.equal(model.generate(prompt, **static), whole.generate(prompt, **static))
    model.save_pretrained(f"{folder}/saved")
    at.barrier()
    again = loaded(f"{folder}/saved").state_dict()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again[name], tensor), name


def test_stock_names_run_ficco(tmp_path: Path) -> None:
    run(4, _by_stock_names, str(tmp_path), timeout=120, fresh=True)


def _compiled(at: Rank, folder: str) -> list[int]:
    from ficco import passes
    from ficco.integrations.transformers import plan, register

    register()
    config = saved("llama", at, folder)
    want = trained(loaded(folder), 16)
    model = loaded(folder, plan(config, sequence_parallel=True))
    model.compile(backend="aot_eager", fullgraph=True)
    close(trained(model, 16), want)
    torch._dynamo.reset()
    model, backend = loaded(folder, "auto"), passes.backend("aot_eager")
    model.compile(backend=backend)
    close(trained(model, 16), want)
    torch._dynamo.reset()
    mlp = loaded(folder, "auto").model.layers[0].mlp
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(torch.compile(mlp, backend="ficco")(x), mlp(x))
    reports = (backend.report, passes.torch_compile.report)
    return [len(part) for report in reports for part in (report.replaced, report.left)]


def test_compiled_models_are_the_unsharded_ones(tmp_path: Path) -> None:
    # Left are the sum of the embedding and the gathering of the logits.
    for replaced_and_left in run(2, _compiled, str(tmp_path), timeout=250):
        assert replaced_and_left == [15, 2, 1, 0]


def _refused(at: Rank) -> list[Any]:
    from transformers import AutoConfig

    from ficco.integrations.transformers import plan

    experts = AutoConfig.for_model("mixtral", **SIZES, num_local_experts=4)
    rules = plan(experts)
    assert rules["model.layers.*.self_attn.o_proj"] == "ficco_rowwise"
    assert not any("experts" in name for name in rules), rules
    without = AutoConfig.for_model("gpt2", n_embd=8, n_head=1, n_layer=1, vocab_size=8)
    model = torch.nn.Module()
    model.tp_plan = {"layers.*.attention": "colwise"}
    named = SimpleNamespace(from_config=lambda config: model)
    return [
        caught(lambda: plan(experts, sequence_parallel=True)),
        caught(lambda: plan(without)),
        caught(lambda: plan(without, auto_class=named)),
    ]


def test_plans_refuse_what_they_do_not_serve() -> None:
    (experts, without, unnamed), _ = run(2, _refused)
    assert experts.type == "NotImplementedError" and "moe_tp_experts" in experts.text
    assert without.type == "ValueError" and "GPT2LMHeadModel has none" in without.text
    assert unnamed.type == "ValueError" and "nn.Linear layers, got Module with col" in unnamed.text


def _heads_refused(at: Rank, folder: str) -> Any:
    from ficco.integrations.transformers import plan, register

    register()
    config = saved("llama", at, folder, num_key_value_heads=1)
    return caught(lambda: loaded(folder, plan(config)))


def test_heads_of_keys_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    for failure in run(2, _heads_refused, str(tmp_path)):
        assert failure.type == "ValueError", failure
        assert "num_key_value_heads that 2 ranks can share, got 1" in failure.text, failure


def _adapted(at: Rank, folder: str) -> Any:
    """Adapters of peft where the ranks share the sequence."""
    from peft import LoraConfig, get_peft_model

    from ficco.integrations.transformers import plan, register

    register()
    config = saved("llama", at, folder)
    model = loaded(folder, plan(config, sequence_parallel=True))
    lora = LoraConfig(r=2, target_modules=["q_proj", "o_proj"])
    adapted = get_peft_model(model, lora)
    return caught(lambda: trained(adapted, 16))


def test_adapters_between_sequence_shards_are_refused(tmp_path: Path) -> None:
    for failure in run(2, _adapted, str(tmp_path)):
        assert failure.type == "NotImplementedError", failure
        assert "such as an adapter of peft" in failure.text, failure


class Own(torch.nn.Linear):
    """A layer that only its own forward multiplies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def _left(at: Rank) -> None:
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


def test_layers_left_to_transformers_are_counted_and_refused() -> None:
    run(2, _left, fresh=True)


def _quantized(at: Rank, folder: str) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig
    from transformers.distributed import DistributedConfig

    from ficco.integrations.transformers import plan, register

    register()
    config, ids = saved("llama", at, folder), torch.arange(1, 17)[None]

    def logits(rules: Any) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            attn_implementation="eager",
            dtype=torch.float32,
            quantization_config=TorchAoConfig(Int8WeightOnlyConfig()),
            distributed_config=DistributedConfig(tp_size=at.world, tp_plan=rules),
        )
        with torch.no_grad():
            out: torch.Tensor = model(input_ids=ids).logits
        return out

    want = logits("auto")
    for sequence in (False, True):
        found = logits(plan(config, sequence_parallel=sequence))
        assert (found - want).abs().max() / want.abs().max() < CLOSE, f"sequence={sequence}"


def test_quantized_models_are_those_of_stock_plans(tmp_path: Path) -> None:
    run(2, _quantized, str(tmp_path), timeout=120)
