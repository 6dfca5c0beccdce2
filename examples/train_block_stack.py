"""Train a small Llama-style model with tensor and sequence parallelism, and without.

    python examples/train_block_stack.py                        # 4 CPU ranks, under a minute
    python examples/train_block_stack.py --device cuda          # one rank per GPU
    torchrun --nproc-per-node 4 examples/train_block_stack.py --device cuda

The model is plain PyTorch and knows nothing of ranks; the plan in `parallelize` shards it. It is
the plan for PyTorch's own styles with another import: `--styles torch` runs that. The model learns
to predict the bytes of this file. Rank 0 then trains the same model unsharded, writes both loss
curves to `loss.csv`, draws them where matplotlib is installed, and says how far they are apart.
"""

from __future__ import annotations

import argparse
import csv
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import ficco.nn
from ficco.tools.launch import launch

STYLES = {"ficco": ficco.nn, "torch": torch.distributed.tensor.parallel}


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of the training."""

    layers: int = 2
    hidden: int = 128
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 384
    vocab: int = 256
    sequence: int = 128
    batch: int = 2
    steps: int = 60
    lr: float = 3e-3
    dtype: torch.dtype = torch.float32


class Attention(nn.Module):
    """Causal attention with rotary positions; a rank has as many heads as its weights make."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.width = config.hidden // config.heads
        self.wq = nn.Linear(config.hidden, config.heads * self.width, bias=False)
        self.wk = nn.Linear(config.hidden, config.kv_heads * self.width, bias=False)
        self.wv = nn.Linear(config.hidden, config.kv_heads * self.width, bias=False)
        self.wo = nn.Linear(config.heads * self.width, config.hidden, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (
            y.view(batch, sequence, -1, self.width).transpose(1, 2)
            for y in (self.wq(x), self.wk(x), self.wv(x))
        )
        q, k = rotated(q, rotation), rotated(k, rotation)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(batch, sequence, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.hidden, bias=False)
        self.w3 = nn.Linear(config.hidden, config.ffn, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.ffn_norm(x))


class Model(nn.Module):
    """Tokens [batch, sequence] to logits [batch, sequence, vocab]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.output = nn.Linear(config.hidden, config.vocab, bias=False)
        rotation = rotations(config.sequence, config.hidden // config.heads)
        self.register_buffer("rotation", rotation, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rotation)
        return self.output(self.norm(x))


def rotations(sequence: int, width: int) -> torch.Tensor:
    """Cosines and sines of the rotary positions, [2, sequence, width / 2]."""
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(sequence, dtype=torch.float64)[:, None] * rates
    return torch.stack([angles.cos(), angles.sin()])


def rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Queries or keys [batch, heads, sequence, width], rotated by their positions."""
    cos, sin = rotation
    one, other = x.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


def parallelize(model: Model, mesh: DeviceMesh, styles: ModuleType) -> None:
    """Shard the model: weights by heads and features, activations between blocks by sequence."""
    block_plan = {
        "attention_norm": styles.SequenceParallel(),
        "attention": styles.PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.wq": styles.ColwiseParallel(),
        "attention.wk": styles.ColwiseParallel(),
        "attention.wv": styles.ColwiseParallel(),
        "attention.wo": styles.RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": styles.SequenceParallel(),
        "feed_forward": styles.PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.w1": styles.ColwiseParallel(),
        "feed_forward.w2": styles.RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": styles.ColwiseParallel(),
    }
    plan = {
        "embeddings": styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **{f"layers.*.{path}": style for path, style in block_plan.items()},
        "norm": styles.SequenceParallel(),
        "output": styles.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def make_model(config: Config, device: torch.device) -> Model:
    """The model, unsharded, the same on every rank."""
    torch.manual_seed(0)
    return Model(config).to(device, config.dtype)


def batches(config: Config, device: torch.device) -> list[torch.Tensor]:
    """Pieces of this file, [batch, sequence + 1] bytes for every step."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    shape = (config.steps, config.batch)
    starts = torch.randint(len(text) - config.sequence - 1, shape, generator=generator)
    offsets = torch.arange(config.sequence + 1)
    return list(text[starts[..., None] + offsets].to(device))


def train(model: Model, config: Config, device: torch.device) -> list[float]:
    """The loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95))
    losses = []
    for tokens in batches(config, device):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def run(config: Config, styles: str, out: str | None) -> tuple[list[float], list[float]]:
    """Both loss curves, on every rank of the default group; only rank 0 makes the unsharded one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    kind = "cuda" if "nccl" in dist.get_backend() else "cpu"
    device = (
        torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )
    model = make_model(config, device)
    parallelize(model, init_device_mesh(kind, (world,)), STYLES[styles])
    began = time.perf_counter()
    sharded = train(model, config, device)
    seconds = time.perf_counter() - began
    if rank:
        dist.barrier()
        return sharded, []
    began = time.perf_counter()
    unsharded = train(make_model(config, device), config, device)
    alone = time.perf_counter() - began
    dist.barrier()
    if out:
        report(Path(out), sharded, unsharded)
        print(f"{config.steps} steps on {world} ranks: {seconds:.1f} s; on one: {alone:.1f} s")
    return sharded, unsharded


def apart(one: list[float], other: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def report(out: Path, sharded: list[float], unsharded: list[float]) -> None:
    """Write the curves, draw them, and say how far they are apart."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "loss.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "sharded", "unsharded"])
        writer.writerows(zip(range(len(sharded)), sharded, unsharded, strict=True))
    print(f"loss: {sharded[0]:.4f} to {sharded[-1]:.4f}; {out / 'loss.csv'}")
    print(f"largest relative difference of the curves: {apart(sharded, unsharded):.1e}")
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(unsharded, label="unsharded", linewidth=4, alpha=0.4)
    axes.plot(sharded, label="sharded", linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(out / "loss.png", dpi=150)
    pyplot.close(figure)


def main() -> None:
    """Read the command line and start the ranks, unless torchrun has started them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, help="default: 4 on CPUs, one per GPU")
    parser.add_argument("--styles", choices=tuple(STYLES), default="ficco")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--out", default="build/train_block_stack", help="folder of the results")
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "sequence", "batch", "steps"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=getattr(Config, name))
    args = vars(parser.parse_args())
    device, ranks, styles, out = (args.pop(name) for name in ("device", "ranks", "styles", "out"))
    config = Config(**{**args, "dtype": getattr(torch, args["dtype"])})
    launch(run, ranks, config, styles, out, device=device)


if __name__ == "__main__":
    main()
