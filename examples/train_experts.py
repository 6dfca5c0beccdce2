"""Train a mixture of experts with an expert on every rank, and without ranks.

    python examples/train_experts.py                        # 4 CPU ranks, seconds
    python examples/train_experts.py --device cuda          # one rank per GPU
    torchrun --nproc-per-node 4 examples/train_experts.py --device cuda

Tokens travel to the experts while the experts multiply the tokens that have arrived
(`ficco.all_to_all_matmul`), and results travel back while others are computed
(`ficco.matmul_all_to_all`). Every expert takes the same number of tokens from every rank, its
capacity, so all calls are one problem that is planned once. Tokens beyond the capacity skip the
layer. Rank 0 then trains the same model on all tokens, and prints how far the losses differ.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ficco
from ficco.nn import sum_gradient
from ficco.tools.launch import launch


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of the training; tokens are those of one rank."""

    hidden: int = 32
    ffn: int = 64
    tokens: int = 256
    spare: float = 1.5
    steps: int = 60
    lr: float = 1e-2
    dtype: torch.dtype = torch.float32


class Experts(nn.Module):
    """Each token's best expert, weighted by the router's trust in it.

    With ``rank`` this is one rank's part: the router, which all ranks hold, and one expert.
    """

    def __init__(self, config: Config, world: int, rank: int | None = None) -> None:
        super().__init__()
        self.capacity = round(config.spare * config.tokens / world)
        shape = (world, config.hidden, config.ffn)
        # All experts are drawn, so that every rank's is the one that the whole model has.
        drawn = torch.randn(world, config.hidden), torch.randn(shape), torch.randn(shape).mT
        router, up, down = (weight * weight.shape[-1] ** -0.5 for weight in drawn)
        own = slice(None) if rank is None else slice(rank, rank + 1)
        self.sharded = rank is not None
        self.router = nn.Parameter(router)
        self.up, self.down = nn.Parameter(up[own].clone()), nn.Parameter(down[own].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        router = sum_gradient(self.router) if self.sharded else self.router
        trust, expert = F.softmax(x @ router.t(), dim=-1).max(dim=-1)
        chosen = F.one_hot(expert, len(router))
        place = (chosen.cumsum(0) * chosen).sum(-1) - 1
        served = (place < self.capacity).nonzero().flatten()
        slots = (expert * self.capacity + place)[served]
        sent = x.new_zeros(len(router) * self.capacity, x.shape[1]).index_copy(0, slots, x[served])
        results = self.experts(sent)
        return x.index_add(0, served, results[slots] * trust[served, None])

    def experts(self, sent: torch.Tensor) -> torch.Tensor:
        """Block j of the tokens, through expert j."""
        if self.sharded:
            hidden = F.silu(ficco.all_to_all_matmul(sent, self.up[0]))
            return ficco.matmul_all_to_all(hidden, self.down[0])
        blocks = sent.view(len(self.up), self.capacity, -1)
        return (F.silu(blocks @ self.up) @ self.down).flatten(0, 1)


def batches(config: Config, world: int, device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """Tokens of all ranks, [world, tokens, hidden], and their targets, for every step.

    There are as many kinds of tokens as experts. A target is its token, rotated by its kind.
    """
    generator = torch.Generator().manual_seed(1)
    centres = 2 * torch.randn(world, config.hidden, generator=generator)
    turns = torch.randn(world, config.hidden, config.hidden, generator=generator)
    turns = torch.linalg.qr(turns).Q
    steps = []
    for _ in range(config.steps):
        kinds = torch.randint(world, (world, config.tokens), generator=generator)
        x = centres[kinds] + torch.randn(*kinds.shape, config.hidden, generator=generator)
        y = torch.einsum("rth,rthg->rtg", x, turns[kinds])
        steps.append((x.to(device, config.dtype), y.to(device, config.dtype)))
    return steps


def train(config: Config, world: int, ranks: range, model: Experts) -> list[float]:
    """The mean loss of all ranks' tokens in every step; this process computes that of ``ranks``."""
    device = model.router.device
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    losses = []
    for x, y in batches(config, world, device):
        loss = sum(F.mse_loss(model(x[rank]), y[rank]) / world for rank in ranks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    curve = torch.stack(losses)
    if model.sharded:
        dist.all_reduce(curve)
    return curve.tolist()


def make_model(config: Config, world: int, rank: int | None, device: torch.device) -> Experts:
    """The whole model, or a rank's part of it."""
    torch.manual_seed(0)
    return Experts(config, world, rank).to(device, config.dtype)


def run(config: Config) -> tuple[list[float], list[float]]:
    """Both loss curves, on every rank of the default group; only rank 0 makes the unsharded one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    on_gpu = "nccl" in dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    sharded = train(config, world, range(rank, rank + 1), make_model(config, world, rank, device))
    unsharded = []
    if rank == 0:
        unsharded = train(config, world, range(world), make_model(config, world, None, device))
    dist.barrier()
    return sharded, unsharded


def main() -> None:
    """Read the command line and start the ranks, unless torchrun has started them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, help="default: 4 on CPUs, one per GPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    for name in ("hidden", "ffn", "tokens", "steps"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Config, name))
    args = vars(parser.parse_args())
    device, ranks = args.pop("device"), args.pop("ranks")
    config = Config(**{**args, "dtype": getattr(torch, args["dtype"])})
    sharded, unsharded = launch(run, ranks, config, device=device)
    if unsharded:
        for step in range(0, config.steps, max(1, config.steps // 10)):
            print(f"step {step:4}: loss {sharded[step]:.4f}, unsharded {unsharded[step]:.4f}")
        apart = max(abs(a - b) / abs(b) for a, b in zip(sharded, unsharded, strict=True))
        print(f"largest relative difference of the curves: {apart:.1e}")


if __name__ == "__main__":
    main()
