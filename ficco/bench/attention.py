"""Attention of the demo and of benches: inputs with one right answer, and gather then attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

import ficco
from ficco.attention import AttentionProblem
from ficco.bench.calls import all_gather

#: The scale of scores: codes that differ in a bit have no weight beside equal ones, in float32.
SCALE = 64.0
#: Values repeat after so many, which all dtypes have.
VALUES = 251


class AttentionOperands(NamedTuple):
    """A rank's queries, keys and values, and the result that there is."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    wanted: torch.Tensor


def exact_operands(
    problem: AttentionProblem, rank: int, iteration: int, device: torch.device
) -> AttentionOperands:
    """Every query finds one key: that of half its own position. Positions are spelt in bits, as 1
    and -1, so that scores are whole numbers and the result is a value, in any dtype."""
    dtype = getattr(torch, problem.dtype)
    at = torch.cat([torch.arange(p, p + n) for _, p, n in problem.segments[rank]]).to(device)
    bits = torch.arange(problem.size, device=device)

    def codes(positions: torch.Tensor, heads: int) -> torch.Tensor:
        spelt = (positions[:, None] >> bits.clamp(max=62) & 1) * 2 - 1
        spelt = spelt.where(bits < problem.length.bit_length(), 0).to(dtype)
        return spelt.expand(problem.batch, heads, -1, -1)

    def values(positions: torch.Tensor, heads: int) -> torch.Tensor:
        head = torch.arange(heads, device=device)[:, None] // (heads // problem.kv_heads)
        each = (7 * positions + 3 * head + iteration) % VALUES
        whole = each.to(dtype)[None, :, :, None]
        return whole.expand(problem.batch, heads, -1, problem.size).contiguous()

    q, k = codes(at // 2, problem.heads), codes(at, problem.kv_heads)
    return AttentionOperands(
        q.contiguous(),
        k.contiguous(),
        values(at, problem.kv_heads),
        values(at // 2, problem.heads),
    )


def gather_then_attend(
    operands: AttentionOperands, group: ProcessGroup, causal: bool = True
) -> torch.Tensor:
    """The collective of the group's library for keys and values, then PyTorch's attention: what a
    program does today that has the sequence in the order of the ranks."""
    q, k, v, _ = operands
    rank, rows, whole = group.rank(), q.shape[2], []
    for shard in (k, v):
        first = shard.permute(2, 0, 1, 3).contiguous()
        gathered = first.new_empty(group.size() * rows, *first.shape[1:])
        all_gather(gathered, first, group=group)
        whole.append(gathered.permute(1, 2, 0, 3))
    mask = None
    if causal:
        keys = torch.arange(group.size() * rows, device=q.device)
        mask = keys <= torch.arange(rank * rows, (rank + 1) * rows, device=q.device)[:, None]
    return scaled_dot_product_attention(
        q, *whole, attn_mask=mask, scale=SCALE, enable_gqa=q.shape[1] != k.shape[1]
    )


def attend(operands: AttentionOperands, group: ProcessGroup, schedule: str) -> torch.Tensor:
    """The same by ficco."""
    return ficco.all_gather_attention(
        *operands[:3], causal=True, scale=SCALE, group=group, schedule=schedule
    )


def slowest(seconds: float, group: ProcessGroup) -> float:
    """Of all ranks."""
    found: list[float] = [0.0] * group.size()
    dist.all_gather_object(found, seconds, group=group)
    return max(found)
