"""Attention of a Plan by the libraries of PyTorch.

A library's call returns the weighted mean of the values and the logarithm of the sum of the weights
(log-sum-exp). The log-sum-exp allows several results for the same queries to be merged. All parts
are kept until one merge at the end, because a running float32 sum would read and write more bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ficco.compute.buffers import buffers_of
from ficco.compute.products import release_of_torch
from ficco.compute.program import Call, Op, Part, Program, in_turn
from ficco.plan import Applied, Attending, Attendings, Transfer
from ficco.problems.mask import Documents, Rectangle, packed

#: Merges parts into a result and, if it is not None, a log-sum-exp.
Merge = Callable[[torch.Tensor, torch.Tensor | None, Sequence[Part]], None]
#: Starts of the sequences of queries and of keys, int32 on the device.
Bounds = tuple[torch.Tensor, torch.Tensor]


class Heads(NamedTuple):
    """Queries, keys and values [batch, heads, rows, size]; k and v may have fewer heads."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Result(NamedTuple):
    """Attention over all keys [batch, heads, rows, size], its log-sum-exp, and its gradient."""

    out: torch.Tensor
    lse: torch.Tensor
    grad: torch.Tensor


def attend_op(program: Program, step: int, attends: Sequence[Attending]) -> Op:
    """Run attends, or their backwards, one after the other."""
    return in_turn(
        [
            _attend(program, step, one) if one.back is None else _backward(program, one)
            for one in attends
        ]
    )


class _Rectangles:
    """Operands and library calls of an attend."""

    def __init__(self, program: Program, one: Attending) -> None:
        (request,), places = program.plan.problem.specification.attentions, buffers_of(program)
        first, keys = one.q.row, (one.first, one.first + one.kv.rows)
        rectangles = request.rectangles(program.plan.rank, (first, one.q.row_stop), keys)
        #: Rows are relative to the regions of queries and of keys.
        self.calls = LibraryCalls([each.moved(-first, -keys[0]) for each in rectangles])
        self.shape, self.scale = (2, *request.heads), request.scale
        self._q, self._kv = places.view(one.q), places.view(one.kv)

    def heads(self, call: Call) -> Heads:
        """All queries and keys."""
        kv = self._kv(call).view(-1, *self.shape)
        return Heads(by_heads(self._q(call)), by_heads(kv[:, 0]), by_heads(kv[:, 1]))


def _attend(program: Program, step: int, one: Attending) -> Op:
    reads, first = _Rectangles(program, one), one.q.row

    def op(call: Call) -> None:
        parts = call.parts.setdefault(step, [])
        for part in reads.calls.attended(reads.heads(call), reads.scale):
            parts.append(part._replace(first=first + part.first, last=first + part.last))

    return op


def _backward(program: Program, one: Attending) -> Op:
    assert one.back is not None
    reads, places = _Rectangles(program, one), buffers_of(program)
    sums, back = places.view(one.out), places.view(one.back)
    rows_of = {name: places.view(one.q._replace(buffer=name)) for name in ("o", "grad")}

    def op(call: Call) -> None:
        o, grad = (by_heads(view(call)) for view in rows_of.values())
        of = Result(o, call.tensors["lse"][:, :, one.q.row : one.q.row_stop], grad)
        dq, dkv = by_heads(sums(call)), back(call).view(-1, *reads.shape)
        if not one.accumulate:
            dq.zero_()
        gradients = list(reads.calls.differentiated(reads.heads(call), of, reads.scale))
        apart = [(rows.k, rows.k_stop) for rows, _ in gradients] == [(0, one.kv.rows)]
        wide = dkv  # several calls add to it
        if not apart:
            wide = torch.zeros_like(dkv, dtype=torch.promote_types(dkv.dtype, torch.float32))
        for rows, of_operands in gradients:
            dq[:, :, rows.q : rows.q_stop] += of_operands.q
            for i, gradient in enumerate(of_operands[1:]):
                target = by_heads(wide[rows.k : rows.k_stop, i])
                target.copy_(gradient) if apart else target.add_(gradient)
        if not apart:
            dkv.copy_(wide)

    return op


def by_heads(rows: torch.Tensor) -> torch.Tensor:
    """[rows, batch, heads, size] as [batch, heads, rows, size]."""
    return rows.permute(1, 2, 0, 3)


def merge_op(program: Program, step: int, transfer: Transfer, merge: Merge) -> Op:
    """Merge all parts of a range of rows, computed by earlier steps; and the log-sum-exp, if the
    call has a tensor ``lse``."""
    first, last = transfer.dst.row, transfer.dst.row_stop
    out_view = buffers_of(program).view(transfer.dst)
    steps = [
        index
        for index, earlier in enumerate(program.plan.steps[:step])
        if isinstance(earlier.work, Attendings) and earlier.work.meets(first, last)
    ]

    def op(call: Call) -> None:
        out, lse = by_heads(out_view(call)), call.tensors.get("lse")
        parts = [
            piece
            for index in steps
            for part in call.parts[index]
            if (piece := part.within(first, last))
        ]
        merge(out, None if lse is None else lse[:, :, first:last], parts)

    return op


def spans(rows: int, parts: Sequence[Part], most: int = 0) -> Iterator[tuple[slice, list[Part]]]:
    """Ranges of rows, each with the parts that cover it. Neighbouring ranges are joined while at
    most ``most`` parts meet them."""
    inner = {end for part in parts for end in part[:2] if 0 < end < rows}
    if not inner:  # the common case
        yield slice(rows), list(parts)
        return
    ends, begin = [*sorted(inner), rows], 0
    for end, further in zip(ends, [*ends[1:], 0], strict=True):
        if further and sum(part.meets(begin, further) for part in parts) <= most:
            continue
        yield slice(begin, end), [piece for part in parts if (piece := part.within(begin, end))]
        begin = end


def merge(out: torch.Tensor, lse: torch.Tensor | None, parts: Sequence[Part]) -> None:
    """Merge by operations of PyTorch."""
    for rows, covering in spans(out.shape[2], parts):
        _merge_all(out[:, :, rows], None if lse is None else lse[:, :, rows], covering)


def _merge_all(out: torch.Tensor, lse: torch.Tensor | None, parts: Sequence[Part]) -> None:
    """Merge parts that have all rows."""
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

#: Documents with fewer queries on average share one call of flash attention; longer documents get a
#: call of cuDNN each, where cuDNN serves them. One call takes 0.20 of the time of many for
#: documents of 128, 0.96 for 512 and 1.15 for 1024, its gradients 0.30, 0.84 and 1.01 (one H100, 32
#: heads, 8 of keys, size 128, 16384 positions; 2026-11-26, benchmarks/packed_documents.py).
TOGETHER_ROWS = 640

#: Calls whose documents' bounds are cached on devices.
MOST_BOUNDS = 4096


class LibraryCalls:
    """Rectangles of queries by keys, in as few library calls as possible."""

    def __init__(self, rectangles: Sequence[Rectangle]) -> None:
        self._packed = packed(rectangles)
        self._bounds: dict[Documents, Bounds] = {}  # kept alive for graphs that use them

    def attended(self, heads: Heads, scale: float) -> Iterator[Part]:
        """Attention of each rectangle."""
        for documents in self._packed:
            if len(documents.rectangles) > 1 and (bounds := self._together(heads, documents)):
                mean, lse = flash_of_several(heads, documents, bounds, scale)
                whole = Part(documents.band.q, documents.band.q_stop, mean, lse)
                yield from (whole.rows(one.q, one.q_stop) for one in documents.runs)
                continue
            for one in documents.rectangles:
                yield Part(one.q, one.q_stop, *attention(_within(heads, one), one, scale))

    def differentiated(
        self, heads: Heads, of: Result, scale: float
    ) -> Iterator[tuple[Rectangle, Heads]]:
        """Gradients of each rectangle."""
        for documents in self._packed:
            if len(documents.rectangles) > 1 and (bounds := self._together(heads, documents)):
                gradients = flash_backward_of_several(heads, of, documents, bounds, scale)
                q, k = documents.band.q, documents.band.k
                for one in documents.runs:
                    yield one, _within(gradients, one.moved(-q, -k))
                continue
            for one in documents.rectangles:
                yield one, backward(_within(heads, one), _result(of, one), one, scale)

    def _together(self, heads: Heads, documents: Documents) -> Bounds | None:
        """Starts of the documents, if one call serves them all; else None. Libraries pack documents
        of a batch of one."""
        if heads.q.shape[0] > 1 or not serves_several(heads, documents):
            return None
        if documents not in self._bounds and (bounds := bounds_on(documents, heads.q.device)):
            self._bounds[documents] = bounds
        return self._bounds.get(documents)


def _within(heads: Heads, one: Rectangle) -> Heads:
    rows, keys = slice(one.q, one.q_stop), slice(one.k, one.k_stop)
    return Heads(heads.q[:, :, rows], heads.k[:, :, keys], heads.v[:, :, keys])


def _result(of: Result, one: Rectangle) -> Result:
    return Result(*(tensor[:, :, one.q : one.q_stop] for tensor in of))


def serves_several(heads: Heads, documents: Documents) -> bool:
    """Whether one call for several rectangles is supported, and faster than a call for each."""
    if not heads.q.is_cuda or torch.version.hip:
        return False
    count = len(documents.rectangles)
    short = sum(one.q_stop - one.q for one in documents.rectangles) < TOGETHER_ROWS * count
    return short or not _cudnn_serves(heads, documents.band)


_bounds_by_key: dict[tuple[Documents, torch.device], Bounds] = {}


def bounds_on(documents: Documents, device: torch.device) -> Bounds | None:
    """Starts of documents on a device; None in a capture before the first copy. The copy runs on a
    separate stream, so that the host does not wait for work that waits for peers."""
    key = documents, device
    if key not in _bounds_by_key:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None
        if len(_bounds_by_key) >= MOST_BOUNDS:
            del _bounds_by_key[next(iter(_bounds_by_key))]
        side = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.cuda.stream(side):
            queries, keys = (
                torch.tensor(ends, dtype=torch.int32, device=device) for ends in documents.bounds
            )
        _bounds_by_key[key] = queries, keys
    return _bounds_by_key[key]


def attention(
    heads: Heads, rectangle: Rectangle, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by one library call: mean of the values and log-sum-exp [batch, heads, rows]."""
    if heads.q.device.type == "cpu":
        return _on_cpu(heads, rectangle, scale)
    if _cudnn_serves(heads, rectangle):
        try:
            return cudnn(heads, rectangle, scale)
        except RuntimeError:  # cuDNN has no plan for this shape
            pass
    return flash(heads, rectangle, scale)


def _on_cpu(heads: Heads, rectangle: Rectangle, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    fused = _flash_on_cpu(_for_cpu(heads), rectangle, scale)
    if fused is not None and fused[1].all():
        return fused
    whole = plain(heads, None if rectangle.whole else _band(heads, rectangle), scale)
    if fused is None:
        return whole
    # If the largest score is infinite or NaN, the library returns zeros, which a merge would use.
    (mean, lse), (of_plain, lse_of_plain) = fused, whole
    wrong = (lse == 0) & ~lse_of_plain.isfinite()
    mean = torch.where(wrong.unsqueeze(-1), of_plain.to(mean.dtype), mean)
    return mean, torch.where(wrong, lse_of_plain.to(lse.dtype), lse)


def _flash_on_cpu(
    heads: Heads, rectangle: Rectangle, scale: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    band = rectangle.left, rectangle.right
    mask = None if band in ((None, 0), (None, None)) else _band(heads, rectangle)
    try:
        mean, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, 0.0, band == (None, 0), attn_mask=mask, scale=scale
        )
    except RuntimeError:  # an older PyTorch, or an unsupported shape
        return None
    return mean, lse


def _for_cpu(heads: Heads) -> Heads:
    """Repeat shared heads of keys and values before PyTorch 2.9: its flash attention on CPUs reads
    beyond the keys if they have fewer heads than the queries (pytorch/pytorch#157893)."""
    shared = heads.q.shape[1] // heads.k.shape[1]
    if shared == 1 or release_of_torch() >= (2, 9):
        return heads
    return Heads(heads.q, *(one.repeat_interleave(shared, 1) for one in (heads.k, heads.v)))


def _band(heads: Heads, rectangle: Rectangle) -> torch.Tensor:
    """Additive mask of a rectangle."""
    n, m = heads.q.shape[2], heads.k.shape[2]
    own: Any = {"device": heads.q.device}
    ahead = torch.arange(m, **own)[None, :] - torch.arange(n, **own)[:, None] - (m - n)
    hidden = torch.zeros(n, m, dtype=torch.bool, **own)
    if rectangle.right is not None:
        hidden |= ahead > rectangle.right
    if rectangle.left is not None:
        hidden |= ahead < -rectangle.left
    return torch.zeros(n, m, dtype=heads.q.dtype, **own).masked_fill_(hidden, -torch.inf)


def plain(
    heads: Heads, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by products and a softmax, in float32 or wider."""
    wide = torch.promote_types(heads.q.dtype, torch.float32)
    q, k, v = (one.to(wide) for one in heads)
    shared = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(shared, 1) for one in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    mean = (scores - lse.unsqueeze(-1)).exp() @ v
    return mean.masked_fill_((lse == -torch.inf).unsqueeze(-1), 0), lse


#: Fewest rows of queries and of keys for cuDNN. With fewer rows its backward can end a process with
#: a segmentation fault (PyTorch 2.11, H100, 2026-11-26, tests/gpu/test_packed_gpu.py). The exact
#: limit is unknown.
CUDNN_ROWS = 128


def _cudnn_serves(heads: Heads, rectangle: Rectangle) -> bool:
    """Whether cuDNN serves a rectangle. It is 1.9 times as fast as flash attention on an H100
    (bfloat16, 64k positions, size 128; 2026-11-25, docs/results/attention-h100-1.md)."""
    if torch.version.hip or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    masked = rectangle.whole or rectangle.causal
    rows = rectangle.q_stop - rectangle.q, rectangle.k_stop - rectangle.k
    if not masked or heads.q.shape[-1] > 128 or min(rows) < CUDNN_ROWS:
        return False
    return torch.cuda.get_device_capability(heads.q.device) >= (9, 0)


def cudnn(heads: Heads, rectangle: Rectangle, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by cuDNN, for rectangles without a window."""
    mean, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads, None, True, 0.0, rectangle.causal, False, scale=scale
    )
    return mean, lse.view(mean.shape[:-1])


def flash(heads: Heads, rectangle: Rectangle, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by PyTorch's flash attention."""
    q, k, v = (one.transpose(1, 2) for one in heads)
    mean, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, rectangle.causal, False),
        scale=scale,
        **_window(rectangle),
    )
    return mean.transpose(1, 2), lse


def _window(rectangle: Rectangle) -> dict[str, int | None]:
    window = {"window_size_left": rectangle.left, "window_size_right": rectangle.right}
    return {} if rectangle.whole or rectangle.causal else window


def flash_of_several(
    heads: Heads, documents: Documents, bounds: Bounds, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by one call for documents of different lengths."""
    band, longest = documents.band, documents.longest
    q, k, v = (one[0].transpose(0, 1) for one in _within(heads, band))
    mean, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, *bounds, *longest, 0.0, band.causal, False), scale=scale, **_window(band)
    )
    return mean.transpose(0, 1)[None], lse[None]


# Backward.


def backward(heads: Heads, of: Result, rectangle: Rectangle, scale: float) -> Heads:
    """Gradients of the operands of one call. ``of``: the result over the keys of all calls."""
    if heads.q.device.type == "cpu":
        return _backward_on_cpu(heads, of, rectangle, scale)
    if _cudnn_serves(heads, rectangle):
        try:
            return cudnn_backward(heads, of, rectangle, scale)
        except RuntimeError:  # cuDNN has no plan for this shape
            pass
    return flash_backward(heads, of, rectangle, scale)


def _backward_on_cpu(heads: Heads, of: Result, rectangle: Rectangle, scale: float) -> Heads:
    mask = None if rectangle.whole else _band(heads, rectangle)
    bare = mask if not rectangle.causal else None
    alike = _for_cpu(heads)
    try:
        dq, *of_keys = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(of.grad, *alike, of.out, of.lse, 0.0, rectangle.causal),
            attn_mask=bare,
            scale=scale,
        )
    except RuntimeError:  # an older PyTorch, or a shape that it does not have
        return plain_backward(heads, of, mask, scale)
    if alike is not heads:
        wide, keys = torch.promote_types(dq.dtype, torch.float32), heads.k.shape[1]
        each = (one.unflatten(1, (keys, -1)).sum(2, dtype=wide) for one in of_keys)
        of_keys = [one.to(dq.dtype) for one in each]
    return Heads(dq, *of_keys)


def plain_backward(heads: Heads, of: Result, mask: torch.Tensor | None, scale: float) -> Heads:
    """Gradient of :func:`plain`, in float32 or wider."""
    wide = torch.promote_types(heads.q.dtype, torch.float32)
    q, k, v, out, grad = (one.to(wide) for one in (*heads, of.out, of.grad))
    shared = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(shared, 1) for one in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores += mask
    weights = (scores - of.lse.unsqueeze(-1)).exp()
    means = (out * grad).sum(-1, keepdim=True)
    of_scores = weights * (grad @ v.transpose(-1, -2) - means) * scale
    dk, dv = of_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad
    dk, dv = (one.unflatten(1, (-1, shared)).sum(2) for one in (dk, dv))
    return Heads(of_scores @ k, dk, dv)


def cudnn_backward(heads: Heads, of: Result, rectangle: Rectangle, scale: float) -> Heads:
    """Gradients by cuDNN, for rectangles without a window."""
    q = heads.q.contiguous() if 0 in heads.q.stride() else heads.q
    out, grad = _laid_out(of.out, q), _laid_out(of.grad, q)
    n, m, lse = q.shape[2], heads.k.shape[2], of.lse.contiguous().unsqueeze(-1)
    none = torch.empty(0, dtype=torch.int64, device=q.device)  # of dropout
    return Heads(
        *torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(grad, q, heads.k, heads.v, out, lse, none, none, None, None, None, n, m, 0.0),
            rectangle.causal,
            scale=scale,
        )
    )


def _laid_out(tensor: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape of q with the strides of q.

    PyTorch runs the plan of an earlier backward with equal strides of q, k and v. The plan also
    has the strides of the result and of its gradient, which PyTorch does not compare (2.11,
    ``MHAParams`` in ``native/cudnn/MHA.cpp``).
    """
    each = zip(q.shape, q.stride(), tensor.stride(), strict=True)
    if all(size == 1 or wanted == own for size, wanted, own in each):
        return tensor
    return tensor.new_empty_strided(q.shape, q.stride()).copy_(tensor)


def flash_backward(heads: Heads, of: Result, rectangle: Rectangle, scale: float) -> Heads:
    """Gradients by PyTorch's flash attention."""
    q, k, v, out, grad = (one.transpose(1, 2) for one in (*heads, of.out, of.grad))
    none = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout
    gradients = torch.ops.aten._flash_attention_backward(
        *(grad, q, k, v, out, of.lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0),
        *(rectangle.causal, none, none),
        scale=scale,
        **_window(rectangle),
    )
    return Heads(*(one.transpose(1, 2) for one in gradients))


def flash_backward_of_several(
    heads: Heads, of: Result, documents: Documents, bounds: Bounds, scale: float
) -> Heads:
    """Gradients by one call for documents of different lengths."""
    band = documents.band
    heads, of = _within(heads, band), _result(of, band)
    q, k, v, out, grad = (one[0].transpose(0, 1) for one in (*heads, of.out, of.grad))
    none = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout
    gradients = torch.ops.aten._flash_attention_backward(
        *(grad, q, k, v, out, of.lse[0].contiguous(), *bounds, *documents.longest, 0.0),
        *(band.causal, none, none),
        scale=scale,
        **_window(band),
    )
    return Heads(*(one.transpose(0, 1)[None] for one in gradients))


#: By matrix, tensors [batch, heads, positions, size]; without a size for the log-sum-exp.
Tensors = Mapping[str, torch.Tensor]


def apply_op(program: Program, one: Applied) -> Op:
    """Attention of heads, or its gradient: one library call for each run of heads and document."""
    (applies,), rank = program.plan.problem.specification.applications, program.plan.rank
    rows_of = {row.matrix: row.of for row in applies.inputs + applies.outs}
    views = dict(zip(rows_of, map(buffers_of(program).view, one.inputs + one.outs), strict=True))
    function = _heads_backward if "dq" in rows_of else _heads_forward
    calls = LibraryCalls(applies.rectangles)
    begin = {name: rows(rank, one.first, one.last)[0] for name, rows in rows_of.items()}
    runs = [
        {
            name: slice(*(row - begin[name] for row in rows(rank, *run)))
            for name, rows in rows_of.items()
        }
        for run in applies.runs(rank, one.first, one.last)
    ]

    def op(call: Call) -> None:
        tensors = {name: _by_batch(name, view(call), applies.heads) for name, view in views.items()}
        for heads in runs:
            of_run = {name: one[:, heads[name]] for name, one in tensors.items()}
            function(of_run, calls, applies.scale)

    return op


def _by_batch(name: str, matrix: torch.Tensor, heads: tuple[int, int]) -> torch.Tensor:
    """Rows of a matrix as [batch, heads, positions, size]."""
    if name == "lse":  # [heads, batch, positions]
        return matrix.view(matrix.shape[0], heads[0], -1).transpose(0, 1)
    return matrix.view(matrix.shape[0], -1, *heads).permute(2, 0, 1, 3)


def _heads_forward(of: Tensors, calls: LibraryCalls, scale: float) -> None:
    heads = Heads(of["q"], of["k"], of["v"])
    for part in calls.attended(heads, scale):
        of["out"][:, :, part.first : part.last].copy_(part.mean)
        if "lse" in of:
            of["lse"][:, :, part.first : part.last].copy_(part.lse)


def _heads_backward(of: Tensors, calls: LibraryCalls, scale: float) -> None:
    heads, result = Heads(of["q"], of["k"], of["v"]), Result(of["out"], of["lse"], of["grad"])
    for rows, gradients in calls.differentiated(heads, result, scale):
        for name, one in zip(("dq", "dk", "dv"), gradients, strict=True):
            of[name][:, :, rows.q : rows.q_stop].copy_(one)
