"""Times of training steps in other packages, with their own tensor parallelism and with ficco's.

    torchrun --nproc-per-node 2 -m benchmarks.clients_step CLIENT out.csv

CLIENT is torchtitan, megatron or lightning. It trains a Llama of four layers (4096, 14336, 32
heads, 8 of keys) by its own code and with ficco's integration, from the same weights on the same
random tokens. A step is forward, backward and SGD. Variants take turns in shuffled rounds. The
losses of the rounds before 0, which warm up, must agree. The file has a row for each round.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ficco
from examples.train_block_stack import Config, make_model, parallelize
from ficco.tools.bench.frames import Schema, append, describe

SIZES = {"layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 2048}
LLAMA = Config(**SIZES, sequence=4096, batch=2, lr=0.02, dtype=torch.bfloat16)
WARM, ROUNDS = 4, 20
#: Relative difference of losses: variants round sums over ranks in another order.
TOLERANCE = {torch.bfloat16: 2e-3, torch.float32: 1e-5}

#: Milliseconds of the slowest rank; host_ms: until its host has enqueued the step.
ROWS = Schema(
    {"client": str, "variant": str, "round": int, **dict.fromkeys(("ms", "host_ms", "loss"), float)}
)

#: A training step on tokens (batch, sequence); returns the loss before it.
Step = Callable[[torch.Tensor], torch.Tensor]
#: Times the steps of all variants.
Measure = Callable[[dict[str, Step]], None]


def steps(
    models: dict[str, Any],
    config: Config,
    loss_of: Callable[[Any, torch.Tensor], Any],
    backward: Callable[[Any], None] = torch.Tensor.backward,
) -> dict[str, Step]:
    """A training step of each model. All models begin with the weights of the first."""
    first = next(iter(models.values()))

    def step_of(model: Any) -> Step:
        with torch.no_grad():
            for own, source in zip(model.parameters(), first.parameters(), strict=True):
                own.copy_(source)
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)

        def step(ids: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = loss_of(model, ids)
            backward(loss)
            sum_shared_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return {name: step_of(model) for name, model in models.items()}


def torchtitan(config: Config, device: torch.device, measure: Measure) -> None:
    """torchtitan's Llama 3 with sequence parallelism, without checkpointing."""
    from torch.distributed import fsdp

    if not hasattr(fsdp, "DataParallelMeshDims"):  # an annotation here; PyTorch 2.11 lacks it
        fsdp.DataParallelMeshDims = object
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config.configs import ParallelismConfig, TrainingConfig
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.trainer import Trainer

    world, width, backend = dist.get_world_size(), config.hidden, "partial_dtensor"
    set_spmd_backend(backend)
    parallelism = ParallelismConfig(tensor_parallel_degree=world, spmd_backend=backend)
    dims = ParallelDims.from_config(parallelism, world)
    dims.build_mesh()
    dtype = str(config.dtype).removeprefix("torch.")
    training = TrainingConfig(
        seq_len=config.sequence, mixed_precision_param=dtype, disable_cuda_graphs=True
    )

    def build(*overrides: str) -> Any:
        spec = llama3.model_registry("debugmodel")
        debug = spec.model
        layers = llama3._build_llama3_layers(
            n_layers=config.layers,
            dim=width,
            n_heads=config.heads,
            n_kv_heads=config.kv_heads,
            hidden_dim=config.ffn,
            rope=replace(debug.layers[0].attention.rope, dim=width // config.heads),
            attn_backend="flex",
        )
        for layer in layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        words = {"num_embeddings": config.vocab, "embedding_dim": width}
        spec.model = replace(
            debug,
            dim=width,
            vocab_size=config.vocab,
            tok_embeddings=replace(debug.tok_embeddings, **words),
            norm=replace(debug.norm, normalized_shape=width),
            lm_head=replace(debug.lm_head, in_features=width, out_features=config.vocab),
            layers=layers,
        )
        imports = [f"ficco.integrations.torchtitan.{name}" for name in overrides]
        settings = {"training": training, "parallelism": parallelism}
        override = OverrideConfig(imports=imports)
        trainer = Trainer.Config(model_spec=spec, **settings, override=override)
        spec.model.update_from_config(config=trainer)
        apply_overrides(override, trainer)
        with torch.device("meta"):
            model = spec.model.build()
        rest = {"compile_config": trainer.compile, "ac_config": None, "dump_folder": ""}
        model = spec.parallelize_fn(model, parallel_dims=dims, **settings, **rest)
        model.to_empty(device=device)
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        return model

    criterion = CrossEntropyLoss.Config().build(compile_config=None)
    count = torch.tensor(config.batch * config.sequence, device=device)

    def loss_of(model: Any, ids: torch.Tensor) -> Any:
        return criterion(model(ids), ids, count)[0]

    models = {"stock": build(), "ficco": build("attention", "feed_forward")}
    measure(steps(models, config, loss_of))


class Norm(nn.RMSNorm):
    """The norm of a sequence shard. Megatron's requires Apex or Transformer Engine."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class Attention(nn.Module):
    """PyTorch's causal attention (sequence, batch, heads, size). Megatron's stores all scores."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()

    def forward(self, *operands: torch.Tensor, **settings: Any) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in operands[:3])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.permute(2, 0, 1, 3).flatten(2)


def sum_shared_gradients(model: nn.Module) -> None:
    """Sum gradients of Megatron's norms over ranks, as its ``finalize_model_grads`` does."""
    shared = [x.grad for x in model.parameters() if getattr(x, "sequence_parallel", False)]
    gradients = [x for x in shared if x is not None]
    if gradients:
        total = torch.cat(gradients)
        dist.all_reduce(total)
        for gradient, part in zip(gradients, total.split(len(gradients[0])), strict=True):
            gradient.copy_(part)


def megatron(config: Config, device: torch.device, measure: Measure) -> None:
    """Megatron-core's GPT, with and without sequence parallelism."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from ficco.integrations.megatron import ficco_spec

    world, on_cpu = dist.get_world_size(), device.type == "cpu"
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    if not on_cpu:
        tensor_parallel.model_parallel_cuda_manual_seed(0)

    def build(replaced: Callable[[Any], Any], sequence: bool) -> Any:
        layer = get_gpt_layer_local_spec()
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        layer.submodules.self_attention.submodules.core_attention = Attention
        settings = TransformerConfig(
            num_layers=config.layers,
            hidden_size=config.hidden,
            num_attention_heads=config.heads,
            num_query_groups=config.kv_heads,
            ffn_hidden_size=config.ffn,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            tensor_model_parallel_size=world,
            sequence_parallel=sequence,
            use_cpu_initialization=on_cpu,
            params_dtype=config.dtype,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            hidden_dropout=0.0,
        )
        blocks = TransformerBlockSubmodules([replaced(layer)] * config.layers, layer_norm=Norm)
        rope = {"position_embedding_type": "rope"}
        return GPTModel(settings, blocks, config.vocab, config.sequence, **rope).to(device)

    models = {
        f"{name}{suffix}": build(replaced, bool(suffix))
        for suffix in ("", ", sequence")
        for name, replaced in {"stock": lambda layer: layer, "ficco": ficco_spec}.items()
    }
    positions = torch.arange(config.sequence, device=device)[None]

    def loss_of(model: Any, ids: torch.Tensor) -> Any:
        return model(ids, positions, None, labels=ids).mean()

    measure(steps(models, config, loss_of))
    parallel_state.destroy_model_parallel()


def lightning(config: Config, device: torch.device, measure: Measure) -> None:
    """``ModelParallelStrategy`` with a plan of styles. One ``training_step`` has all rounds."""
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.tensor import parallel

    def loss_of(model: Any, ids: torch.Tensor) -> Any:
        return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())

    class Variants(LightningModule):
        automatic_optimization = False

        def configure_model(self) -> None:
            for name, styles in {"stock": parallel, "ficco": ficco.nn}.items():
                with device:
                    model = make_model(config, device)
                parallelize(model, self.device_mesh["tensor_parallel"], styles)
                self.add_module(name, model)

        def training_step(self, batch: torch.Tensor) -> None:
            models = dict(self.named_children())
            measure(steps(models, config, loss_of, self.manual_backward))

        def configure_optimizers(self) -> None:
            """None: a step has its own."""

    world = dist.get_world_size()
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=world,
        strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=world),
        plugins=TorchElasticEnvironment(),
        precision="bf16-true" if config.dtype == torch.bfloat16 else "32-true",
        max_epochs=1,
        barebones=True,
    )
    trainer.fit(Variants(), [torch.zeros(1)])


CLIENTS: dict[str, Callable[[Config, torch.device, Measure], None]] = {
    "torchtitan": torchtitan,
    "megatron": megatron,
    "lightning": lightning,
}


def measured(client: str, config: Config, device: torch.device, rounds: int) -> Any:
    """A frame of :data:`ROWS`."""
    rows, order = [], random.Random(0)
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    torch.manual_seed(0)  # the same on all ranks, for the tokens and for replicated weights
    ids = torch.randint(config.vocab, (config.batch, config.sequence)).to(device)

    def measure(variants: dict[str, Step]) -> None:
        names = list(variants)
        for turn in range(-WARM, rounds):
            order.shuffle(names)
            for name in names:
                synchronize()
                dist.barrier()
                synchronize()
                begin = time.perf_counter()
                loss = variants[name](ids)
                host = time.perf_counter() - begin
                synchronize()
                times = time.perf_counter() - begin, host
                slowest = torch.tensor(times, dtype=torch.float64, device=device) * 1e3
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                row = client, name, turn, *slowest.tolist(), loss.item()
                rows.append(dict(zip(ROWS.columns, row, strict=True)))

    CLIENTS[client](config, device, measure)
    return ROWS.frame(rows)


def wrong_losses(frame: Any, tolerance: float) -> list[str]:
    """Variants and rounds before 0 whose loss is not stock's."""
    losses = frame[frame["round"] < 0].pivot(index="round", columns="variant", values="loss")
    off = losses.sub(losses["stock"], axis=0).abs().gt(losses["stock"] * tolerance, axis=0)
    return [f"{name} in round {turn}" for name in off for turn in off.index[off[name]]]


def summary(frame: Any) -> list[str]:
    """A line for each variant: medians, quartiles, ratio to stock's variant by rounds, losses."""
    timed, lines = frame[frame["round"] >= 0], []
    ms, host = (timed.pivot(index="round", columns="variant", values=x) for x in ("ms", "host_ms"))
    for name in sorted(ms, reverse=True):
        low, middle, high = ms[name].quantile([0.25, 0.5, 0.75])
        ratio = (ms[name] / ms[name.replace("ficco", "stock")]).median()
        losses = frame[frame["variant"] == name]["loss"]
        lines.append(
            f"{name}: {middle:.2f} ms ({low:.2f} to {high:.2f}), {ratio:.3f} of stock's, host "
            f"{host[name].median():.2f} ms, losses {losses.iloc[0]:.6f} to {losses.iloc[-1]:.6f}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--limit", type=float, default=55, help="seconds until stacks are printed")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.limit, exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    ficco.set_options(timeout_s=30)
    frame = measured(args.client, LLAMA, device, args.rounds)
    wrong = wrong_losses(frame, TOLERANCE[LLAMA.dtype])
    if dist.get_rank() == 0:
        append(args.out, frame)
        command = f"torchrun --nproc-per-node 2 -m benchmarks.clients_step {args.client}"
        counts = {operator: each._asdict() for (_, operator), each in ficco.counters().items()}
        about = {**describe("cuda", command, dist.get_world_size()), "calls": counts}
        args.out.with_suffix(".json").write_text(json.dumps(about, indent=1))
        print(*summary(frame), json.dumps(counts), sep="\n", flush=True)
    ficco.close()
    dist.destroy_process_group()
    if wrong:
        sys.exit(f"losses: required stock's, got others for {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
