"""Attention of a Plan by the libraries of PyTorch.

A library's call returns the mean of the values and the logarithm of the sum of the weights
(log-sum-exp), by which several results for the same queries become one. They are kept as they are
until then: what a sum in float32 would read and write is more than all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ficco.attention import AttentionProblem, Rectangle
from ficco.dma.buffers import buffers_of
from ficco.dma.engine import Call, Op, Part, Program, in_turn
from ficco.plan import Attending, Transfer

#: Merges parts, each with its log-sum-exp, into a result and, if that is given, its log-sum-exp.
Merge = Callable[[torch.Tensor, torch.Tensor | None, Sequence[Part]], None]


class Heads(NamedTuple):
    """Queries, keys and values as [batch, heads, rows, size]; k and v may have fewer heads."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def attend_op(program: Program, attends: Sequence[Attending]) -> Op:
    """Attends one after the other."""
    return in_turn([_attend(program, one) for one in attends])


def _attend(program: Program, one: Attending) -> Op:
    problem, places = program.plan.problem, buffers_of(program)
    assert isinstance(problem, AttentionProblem)
    first, keys = one.q.row, (one.first, one.first + one.kv.rows)
    rectangles = problem.rectangles(program.plan.rank, (first, one.q.row_stop), keys)
    q_view, kv_view = places.view(one.q), places.view(one.kv)
    shape = 2, problem.batch, problem.kv_heads, problem.size
    scale = problem.scale if problem.scale is not None else problem.size**-0.5

    def op(call: Call) -> None:
        q, kv = _by_heads(q_view(call)), kv_view(call).view(-1, *shape)
        k, v = _by_heads(kv[:, 0]), _by_heads(kv[:, 1])
        for rectangle in rectangles:
            rows = slice(rectangle.q - first, rectangle.q_stop - first)
            some = slice(rectangle.k - keys[0], rectangle.k_stop - keys[0])
            heads = Heads(q[:, :, rows], k[:, :, some], v[:, :, some])
            call.parts.append(
                Part(rectangle.q, rectangle.q_stop, *attention(heads, rectangle, scale))
            )

    return op


def _by_heads(rows: torch.Tensor) -> torch.Tensor:
    """[rows, batch, heads, size] as [batch, heads, rows, size]."""
    return rows.permute(1, 2, 0, 3)


def merge_op(program: Program, transfer: Transfer, merge: Merge) -> Op:
    """Make rows of the result of all parts that there are of them; and, if the call has a tensor
    ``lse``, their log-sum-exp."""
    first, last = transfer.dst.row, transfer.dst.row_stop
    out_view = buffers_of(program).view(transfer.dst)

    def op(call: Call) -> None:
        out, lse = _by_heads(out_view(call)), call.tensors.get("lse")
        ends = {end for part in call.parts for end in part[:2] if first < end < last}
        bounds = [first, *sorted(ends), last]
        for begin, end in zip(bounds, bounds[1:], strict=False):
            some = [part.rows(begin, end) for part in call.parts if part.covers(begin, end)]
            rows = slice(begin - first, end - first)
            merge(out[:, :, rows], None if lse is None else lse[:, :, begin:end], some)

    return op


def merge(out: torch.Tensor, lse: torch.Tensor | None, parts: Sequence[Part]) -> None:
    """By operations of PyTorch."""
    if len(parts) == 1:
        out.copy_(parts[0].mean)
        if lse is not None:
            lse.copy_(parts[0].lse)
        return
    of_parts = torch.stack([part.lse for part in parts])
    total = of_parts.logsumexp(0)
    weights = (of_parts - total).exp_().unsqueeze(-1)
    sums = parts[0].mean.to(total.dtype).mul_(weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        sums.addcmul_(part.mean.to(total.dtype), weight)
    out.copy_(sums)
    if lse is not None:
        lse.copy_(total)


# Libraries.


def attention(
    heads: Heads, rectangle: Rectangle, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One call of a library: the mean of the values and the log-sum-exp [batch, heads, rows]."""
    if heads.q.device.type == "cpu":
        return _on_cpu(heads, rectangle, scale)
    if _cudnn_serves(heads, rectangle):
        try:
            return cudnn(heads, rectangle, scale)
        except RuntimeError:  # has no plan for this shape
            pass
    return flash(heads, rectangle, scale)


def _on_cpu(heads: Heads, rectangle: Rectangle, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    banded = not (rectangle.whole or rectangle.causal)
    mask = _band(heads, rectangle) if banded else None
    try:
        mean, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, 0.0, rectangle.causal, attn_mask=mask, scale=scale
        )
    except RuntimeError:  # an older PyTorch, or a shape that it does not have
        return plain(heads, None if rectangle.whole else _band(heads, rectangle), scale)
    return mean, lse


def _band(heads: Heads, rectangle: Rectangle) -> torch.Tensor:
    """What is added to the scores."""
    n, m = heads.q.shape[2], heads.k.shape[2]
    ahead = torch.arange(m)[None, :] - torch.arange(n)[:, None] - (m - n)
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if rectangle.right is not None:
        hidden |= ahead > rectangle.right
    if rectangle.left is not None:
        hidden |= ahead < -rectangle.left
    return torch.zeros(n, m, dtype=heads.q.dtype).masked_fill_(hidden, -torch.inf)


def plain(
    heads: Heads, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by products and a softmax, in float32 at least."""
    wide = torch.promote_types(heads.q.dtype, torch.float32)
    q, k, v = (one.to(wide) for one in heads)
    shared = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(shared, 1) for one in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def _cudnn_serves(heads: Heads, rectangle: Rectangle) -> bool:
    """1.9 times as fast as flash attention on an H100 (bfloat16, 64k positions, size 128;
    2026-11-25, tests/attention_bench.py)."""
    if torch.version.hip or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    masked = rectangle.whole or rectangle.causal
    capable = torch.cuda.get_device_capability(heads.q.device) >= (9, 0)
    return masked and heads.q.shape[-1] <= 128 and capable


def cudnn(heads: Heads, rectangle: Rectangle, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """By cuDNN, for rectangles without a window."""
    mean, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads, None, True, 0.0, rectangle.causal, False, scale=scale
    )
    return mean, lse.view(mean.shape[:-1])


def flash(heads: Heads, rectangle: Rectangle, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """By the flash attention that PyTorch has."""
    q, k, v = (one.transpose(1, 2) for one in heads)
    window = {"window_size_left": rectangle.left, "window_size_right": rectangle.right}
    given = {} if rectangle.whole or rectangle.causal else window
    mean, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, rectangle.causal, False),
        scale=scale,
        **given,
    )
    return mean.transpose(1, 2), lse
