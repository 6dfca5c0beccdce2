"""Packed documents in one library call; a double replaces the library on CPUs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Rank, on_ranks, ranks
from subjects import SUBJECTS, Case, exact

from ficco.compute import attention as libraries
from ficco.compute.attention import Heads, Result
from ficco.problems.attention import AttentionProblem
from ficco.problems.mask import Rectangle, packed

CAUSAL = {"causal": True}
MASKS: tuple[dict[str, Any], ...] = ({}, CAUSAL, {**CAUSAL, "window": 2}, {**CAUSAL, "window": 0})


def documents(length: int, seed: int, most: int) -> tuple[int, ...]:
    """First positions of the documents, and the total length."""
    chance = random.Random(seed)
    count = min(chance.randint(1, most), max(length - 1, 0))
    return (0, *sorted(chance.sample(range(1, length), count)), length) if count else (0, length)


@given(
    st.integers(1, 4),
    st.integers(1, 12),
    st.sampled_from(MASKS),
    st.sampled_from(("ranks", "head-tail")),
    st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None)
def test_calls_have_all_rectangles_once(
    world: int, half: int, mask: dict[str, Any], placement: str, seed: int
) -> None:
    bounds = documents(2 * half * world, seed, 12)
    sizes = world, 2 * half, 1, 2, 1, 8, "float32"
    problem = AttentionProblem(*sizes, **mask, cu_seqlens=bounds, placement=placement)
    for rank in range(world):
        keys = 0, problem.keys.product_rows(rank)
        expected = problem.rectangles(rank, (0, problem.rows), keys)
        covered: list[Rectangle] = []
        for call in packed(expected):
            q_bounds, k_bounds = call.bounds
            assert list(q_bounds) == sorted(q_bounds) and list(k_bounds) == sorted(k_bounds)
            ends = zip(q_bounds, q_bounds[1:], k_bounds, k_bounds[1:], strict=False)
            for q, q_stop, k, k_stop in ends:
                if q < q_stop and k < k_stop:
                    rectangle = Rectangle(q, q_stop, k, k_stop, call.band.left, call.band.right)
                    covered.append(rectangle.moved(call.band.q, call.band.k))
                    assert q_stop - q <= call.longest[0] and k_stop - k <= call.longest[1]
            rows = [row for run in call.runs for row in range(run.q, run.q_stop)]
            assert rows == [r for one in call.rectangles for r in range(one.q, one.q_stop)]
        assert sorted(covered, key=repr) == sorted(expected, key=repr)


def test_many_documents_are_few_calls() -> None:
    """At most two more calls for documents that continue on another rank."""
    bounds, sizes = tuple(range(0, 4 * 96 + 1, 3)), (4, 96, 1, 2, 1, 8, "float32")
    for mask, (placement, most) in product(MASKS[:2], (("ranks", 2), ("head-tail", 4))):
        problem = AttentionProblem(*sizes, **mask, cu_seqlens=bounds, placement=placement)
        for rank in range(4):
            keys = 0, problem.keys.product_rows(rank)
            rectangles = problem.rectangles(rank, (0, 96), keys)
            assert len(rectangles) >= 32 and len(packed(rectangles)) <= most


def _heads(rows: torch.Tensor) -> torch.Tensor:
    return rows.transpose(0, 1)[None]


def sequences_of(operands: Any, bounds: Any, longest: Any, causal: bool, window: Any) -> Any:
    """Query rows, key rows, heads and mask of each sequence with queries and keys."""
    q, k, v = operands
    assert all(one.dtype == torch.int32 for one in bounds)
    queries, keys = (one.tolist() for one in bounds)
    left, right = window.get("window_size_left"), window.get("window_size_right")
    band = (None, 0) if causal else (left, right)
    ends = zip(queries, queries[1:], keys, keys[1:], strict=False)
    for begin, end, first, last in ends:
        if begin < end and first < last:
            assert end - begin <= longest[0] and last - first <= longest[1]
            rows, key_rows = slice(begin, end), slice(first, last)
            heads = Heads(_heads(q[rows]), _heads(k[key_rows]), _heads(v[key_rows]))
            yield rows, key_rows, heads, Rectangle(0, end - begin, 0, last - first, *band)


class Varlen:
    """Flash attention of sequences of different lengths, sequence by sequence. Results of queries
    without keys, and gradients of keys without queries, are NaN."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, *operands: Any, scale: float, **window: Any) -> tuple[torch.Tensor, ...]:
        q, k, v, cu_q, cu_k, *longest, dropout, causal, _ = operands
        # If no sequence has two queries, flash attention expects a row of q for each sequence.
        assert longest[0] > 1
        assert dropout == 0 and cu_q[-1] == q.shape[0] and cu_k[-1] == k.shape[0]
        self.calls += 1
        mean = torch.full_like(q, torch.nan)
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=wide)
        sequences = sequences_of((q, k, v), (cu_q, cu_k), longest, causal, window)
        for rows, _, heads, band in sequences:
            result = libraries.attention(heads, band, scale)
            mean[rows], lse[:, rows] = result[0][0].transpose(0, 1), result[1][0]
        return mean, lse

    def backward(self, grad: Any, *saved: Any, scale: float, **window: Any) -> Any:
        q, k, v, out, lse, cu_q, cu_k, *longest, _, causal = saved[:11]
        self.calls += 1
        grads = [torch.full_like(one, torch.nan) for one in (q, k, v)]
        sequences = sequences_of((q, k, v), (cu_q, cu_k), longest, causal, window)
        for rows, keys, heads, band in sequences:
            forward = Result(_heads(out[rows]), lse[None, :, rows], _heads(grad[rows]))
            result = libraries.backward(heads, forward, band, scale)
            for total, gradient, index in zip(grads, result, (rows, keys, keys), strict=True):
                total[index] = gradient[0].transpose(0, 1)
        return tuple(grads)


@contextmanager
def several_served() -> Iterator[Varlen]:
    """Replace the library by a double that serves several documents per call."""
    double = Varlen()
    aten = torch.ops.aten
    with (
        mock.patch.object(libraries, "serves_several", lambda _, call: len(call.rectangles) > 1),
        mock.patch.object(aten, "_flash_attention_forward", double.forward),
        mock.patch.object(aten, "_flash_attention_backward", double.backward),
    ):
        yield double


def trained(at: Rank, sizes: tuple[int, ...], facts: dict[str, Any], dtype: str, turn: int) -> None:
    """A call of each kind of attention and its gradients; ``sizes`` as in :mod:`subjects`."""
    case = Case((sizes[0],) * at.world, sizes, dtype, facts=facts, needs=(True,) * 3)
    gathered, by_heads = (SUBJECTS[f"{one}_attention"] for one in ("all_gather", "ulysses"))
    for placement, schedule in (("ranks", "growing:tail=2"), ("head-tail", "hetero-fused-1d")):
        placed = case.on(facts={**facts, "placement": placement}, schedule=schedule)
        exact(at, gathered, placed, turn)
    exact(at, by_heads, case.on(schedule=("uniform-fused-1d:pieces=2", "serial")[turn % 2]), turn)


@ranks(1, 3)
@on_ranks(timeout=280)
def test_results_and_gradients(at: Rank) -> None:
    for turn, (mask, dtype) in enumerate(zip(MASKS, ("float64", "bfloat16") * 2, strict=True)):
        facts = {**mask, "cu_seqlens": documents(24 * at.world, turn, 9)}
        with several_served() as double:
            trained(at, (24, 1, 4 * at.world, 2, 16), facts, dtype, turn)
            assert double.calls > 0
    # A batch of two sequences makes no packed call, documents make one for a group of heads.
    with several_served() as double:
        facts = {"causal": True, "window": 5, "placement": "head-tail"}
        case = Case((24,) * at.world, (24, 2, 4, 2, 16), facts=facts, needs=(True,) * 3)
        exact(at, SUBJECTS["all_gather_attention"], case, 0)
        assert double.calls == 0
        facts = {"causal": True, "cu_seqlens": tuple(range(0, 32 * at.world + 1, 4))}
        case = Case((32,) * at.world, (32, 1, 2 * at.world, at.world, 16), facts=facts)
        exact(at, SUBJECTS["ulysses_attention"], case.on(schedule="serial"), 1)
        assert double.calls == 1


def test_cudnn_serves_only_large_rectangles_without_windows() -> None:
    """No CPU library serves several documents; cuDNN serves neither few rows nor windows."""
    short = packed([Rectangle(8 * i, 8 * i + 8, 8 * i, 8 * i + 8, None, 0) for i in range(4)])[0]
    q = torch.zeros(1, 2, 32, 16)
    assert not libraries.serves_several(Heads(q, q, q), short)
    assert short.runs == [short.band]
    with mock.patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0)):
        for rows, keys in ((128, 128), (127, 4096), (4096, 127), (1, 1)):
            q = torch.zeros(1, 2, rows, 128)
            for band in (Rectangle(0, rows, 0, keys), Rectangle(64, 64 + rows, 9, 9 + keys)):
                served = libraries._cudnn_serves(Heads(q, q, q), band)
                assert served == (min(rows, keys) == 128), (rows, keys)
                assert not libraries._cudnn_serves(Heads(q, q, q), band._replace(left=3, right=0))


def test_cudnn_reads_results_and_gradients_in_the_layout_of_queries() -> None:
    """PyTorch's key of a plan has the strides of q, k and v only."""
    values = torch.arange(2.0 * 3 * 8 * 16).view(2, 3, 8, 16)
    orders = ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3))
    of_orders = [
        values.permute(order).contiguous().permute([order.index(i) for i in range(4)])
        for order in orders
    ]
    longer = torch.cat([values, values], 2)[:, :, :8]  # rows of a longer sequence
    lse, band = torch.zeros(2, 3, 8), Rectangle(0, 8, 0, 8)
    with mock.patch.object(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward") as call:
        for q in (*of_orders, longer, values[:, :1].expand_as(values)):
            for grad, out in product((*of_orders, longer), repeat=2):
                call.return_value = values, values, values
                of = Result(out, lse, grad)
                libraries.cudnn_backward(Heads(q, values, values), of, band, 1.0)
                grad_of_call, q_of_call, _, _, out_of_call = call.call_args.args[:5]
                assert torch.equal(q_of_call, q) and 0 not in q_of_call.stride()
                for tensor in (grad_of_call, out_of_call):
                    assert torch.equal(tensor, values) and tensor.stride() == q_of_call.stride()
