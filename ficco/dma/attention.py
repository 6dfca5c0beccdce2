"""Attention of a Plan by the libraries of PyTorch, whose partial results are merged in float32.

A library's call returns the mean of the values and the logarithm of the sum of the weights
(log-sum-exp), by which two results for the same queries become one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ficco.attention import AttentionProblem, Rectangle
from ficco.dma.buffers import buffers_of
from ficco.dma.engine import Call, Op, Program, in_turn
from ficco.plan import Attending

#: A result and its log-sum-exp.
Partial = tuple[torch.Tensor, torch.Tensor]


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
    queries, keys = (one.q.row, one.q.row_stop), (one.first, one.first + one.kv.rows)
    rectangles = [
        (rectangle, slice(rectangle.q - queries[0], rectangle.q_stop - queries[0]))
        for rectangle in problem.rectangles(program.plan.rank, queries, keys)
    ]
    q_view, kv_view, out_view = map(places.view, (one.q, one.kv, one.out))
    lse_view = places.view(one.lse) if one.lse else None
    shape = 2, problem.batch, problem.kv_heads, problem.size
    scale = problem.scale if problem.scale is not None else problem.size**-0.5
    cells = sorted((rows.start, rows.stop) for _, rows in rectangles)
    apart = all(a[1] <= b[0] for a, b in zip(cells, cells[1:], strict=False))
    fills = apart and sum(stop - start for start, stop in cells) == one.q.rows

    def op(call: Call) -> None:
        q, out = _by_heads(q_view(call)), _by_heads(out_view(call))
        kv = kv_view(call).view(-1, *shape)
        k, v = _by_heads(kv[:, 0]), _by_heads(kv[:, 1])
        lse = None if lse_view is None else lse_view(call).permute(1, 2, 0)
        sums, adds = out, one.accumulate
        if lse is None and not fills:
            sums = torch.empty_like(out, dtype=torch.promote_types(out.dtype, torch.float32))
        if not adds and not fills:  # nothing yet: of weight 0
            adds = True
            sums.zero_()
            lse = sums.new_empty(sums.shape[:-1]) if lse is None else lse
            lse.fill_(-torch.inf)
        for rectangle, rows in rectangles:
            some = slice(rectangle.k - keys[0], rectangle.k_stop - keys[0])
            heads = Heads(q[:, :, rows], k[:, :, some], v[:, :, some])
            part, part_lse = attention(heads, rectangle, scale)
            if adds:
                assert lse is not None
                merge(sums[:, :, rows], lse[:, :, rows], part, part_lse)
            else:
                sums[:, :, rows].copy_(part)
                if lse is not None:
                    lse[:, :, rows].copy_(part_lse)
        if sums is not out:
            out.copy_(sums)

    return op


def _by_heads(rows: torch.Tensor) -> torch.Tensor:
    """[rows, batch, heads, size] as [batch, heads, rows, size]."""
    return rows.permute(1, 2, 0, 3)


def merge(sums: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, more: torch.Tensor) -> None:
    """Include in a result and its log-sum-exp those of other keys."""
    weight = torch.sigmoid(more - lse)
    sums.lerp_(part.to(sums.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, more, out=lse)


# Libraries.


def attention(heads: Heads, rectangle: Rectangle, scale: float) -> Partial:
    """One call of a library; the log-sum-exp is [batch, heads, rows]."""
    if heads.q.device.type == "cpu":
        return _on_cpu(heads, rectangle, scale)
    return _on_gpu(heads, rectangle, scale)


def _on_cpu(heads: Heads, rectangle: Rectangle, scale: float) -> Partial:
    mask, causal = None, rectangle.causal and rectangle.square
    if not (rectangle.whole or causal):
        mask = _band(heads, rectangle)
    try:
        found: Partial = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, 0.0, causal, attn_mask=mask, scale=scale
        )
    except RuntimeError:  # an older PyTorch, or a shape that it does not have
        return plain(heads, _band(heads, rectangle) if causal else mask, scale)
    return found


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


def plain(heads: Heads, mask: torch.Tensor | None, scale: float) -> Partial:
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


def _on_gpu(heads: Heads, rectangle: Rectangle, scale: float) -> Partial:
    for serves, call in _LIBRARIES:
        if serves(heads, rectangle):
            return call(heads, rectangle, scale)
    raise AssertionError("the last library serves all")


def _cudnn_serves(heads: Heads, rectangle: Rectangle) -> bool:
    """Faster than flash attention on Hopper and later; its causal mask begins in the first rows."""
    if torch.version.hip or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    masked = rectangle.whole or (rectangle.causal and rectangle.square)
    return masked and heads.q.shape[-1] <= 128 and _capability(heads.q.device) >= (9, 0)


def _cudnn(heads: Heads, rectangle: Rectangle, scale: float) -> Partial:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads, None, True, 0.0, rectangle.causal, False, scale=scale
    )
    return out, lse.view(out.shape[:-1])


def _flash(heads: Heads, rectangle: Rectangle, scale: float) -> Partial:
    q, k, v = (one.transpose(1, 2) for one in heads)
    window = {"window_size_left": rectangle.left, "window_size_right": rectangle.right}
    given = {} if rectangle.left is None and rectangle.right in (None, 0) else window
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, rectangle.causal, False),
        scale=scale,
        **given,
    )
    return out.transpose(1, 2), lse


_LIBRARIES: tuple[
    tuple[Callable[[Heads, Rectangle], bool], Callable[[Heads, Rectangle, float], Partial]], ...
] = ((_cudnn_serves, _cudnn), (lambda *_: True, _flash))


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
