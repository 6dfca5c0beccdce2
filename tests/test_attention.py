"""Attention whose keys are gathered: masks, plans and their proof, calls on CPUs, errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import own_group
from edits import Edit, change, down, edited, refused, replaced
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Failure, Rank, caught, on_ranks, run
from subjects import BY_HEADS, SUBJECTS, Case, attended, exact
from test_hosts import TOPOLOGIES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ficco
import ficco.nn
from ficco.compute.attention import Heads, Result, attention, backward
from ficco.heuristics import decide
from ficco.heuristics.families import GATHERED
from ficco.machine import find
from ficco.ops.attention import _packed
from ficco.plan import Plan, Step, render
from ficco.problems.attention import AttentionProblem
from ficco.problems.mask import PLACEMENTS, Mask, Rectangle, Segment
from ficco.proof import check
from ficco.schedules import Schedule
from ficco.schedules.attention import attention_plans

_, *SCHEDULES = SUBJECTS["all_gather_attention"].schedules(4)
_, *OVER_HOSTS = SUBJECTS["all_gather_attention"].schedules(4, hosts=2)


def problem_of(world: int, rows: int, *sizes: int, dtype: str = "bfloat16", **mask: Any) -> Any:
    """``sizes``: batch, heads of queries and of keys, and elements of a head."""
    return AttentionProblem(world, rows, *(sizes or (1, 4, 2, 16)), dtype, **mask)


def whole(case: Case, iteration: int) -> list[torch.Tensor]:
    """Queries, keys and values of a whole sequence."""
    rows, batch, heads, kv_heads, size = case.sizes
    generator, length = torch.Generator().manual_seed(iteration), len(case.rows) * rows
    shapes = [(batch, count, length, size) for count in (heads, kv_heads, kv_heads)]
    dtype = getattr(torch, case.dtype)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


HEAD_TAIL = problem_of(4, 16, causal=True, placement="head-tail")


def dense(rectangles: tuple[Rectangle, ...], queries: int, keys: int) -> torch.Tensor:
    """Count the rectangles that contain each pair, by the masks of attention libraries."""
    count = torch.zeros(queries, keys, dtype=torch.int64)
    for part in rectangles:
        n, m = part.q_stop - part.q, part.k_stop - part.k
        ahead = torch.arange(m)[None] - torch.arange(n)[:, None] - (m - n)
        seen = torch.ones(n, m, dtype=torch.bool)
        assert not part.causal or n == m, "causal masks of libraries begin in different corners"
        assert part.whole or n <= m, "flash attention has another band where queries are more"
        if part.left is not None:
            assert part.left >= 0  # libraries read a negative bound as no bound
            seen &= ahead >= -part.left
        if part.right is not None:
            assert part.right >= 0
            seen &= ahead <= part.right
        assert seen.any(1).all(), f"{part} has queries without a key"
        assert int(seen.sum()) == part.pairs, part
        count[part.q : part.q_stop, part.k : part.k_stop] += seen
    return count


@st.composite
def masked(draw: Any) -> tuple[Mask, list[Segment], list[Segment], int]:
    length = draw(st.integers(1, 40))
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(0, length)) if causal else None
    inner = draw(st.none() | st.lists(st.integers(0, length), max_size=4))
    bounds = () if inner is None else tuple(sorted({0, length, *inner}))
    mask = Mask(causal, window, bounds)

    def rows() -> list[Segment]:
        ends = sorted(draw(st.lists(st.integers(0, length), min_size=2, max_size=6)))
        row, segments = 0, []
        for first, last in zip(ends[::2], ends[1::2], strict=False):
            segments.append(Segment(row, first, last - first))
            row += last - first
        return list(mask.segments(segments))

    return mask, rows(), rows(), length


@given(masked())
@settings(max_examples=300, deadline=None)
def test_rectangles_have_each_pair_once(drawn: Any) -> None:
    mask, queries, keys, length = drawn
    facts = {"causal": mask.causal, "window": mask.window, "cu_seqlens": mask.bounds}
    at = [
        torch.tensor([p for _, first, n in segments for p in range(first, first + n)], dtype=int)
        for segments in (queries, keys)
    ]
    wanted = attended(facts, at[0][:, None], at[1][None])
    counts = dense(mask.rectangles(queries, keys), *wanted.shape)
    assert torch.equal(counts, wanted.to(counts.dtype))


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_plans_of_any_sizes_are_proven(data: st.DataObject) -> None:
    """Plans of forwards, and of backwards that use saved keys and values or gather them again."""
    hosts, local = data.draw(st.sampled_from((*((1, n) for n in range(1, 9)), *TOPOLOGIES)))
    world, half = hosts * local, data.draw(st.integers(0, 10))
    length, causal = 2 * half * world, data.draw(st.booleans())
    window = data.draw(st.none() | st.integers(0, 100)) if causal else None
    inner = data.draw(st.lists(st.integers(0, 160), max_size=5))
    cuts = {0, length, *(min(cut, length) for cut in inner)}
    bounds = tuple(sorted(cuts)) if inner and length else ()
    dtype = data.draw(st.sampled_from(("bfloat16", "float32")))
    placement, keeps = data.draw(st.sampled_from(PLACEMENTS)), data.draw(st.booleans())
    mask: Any = {"causal": causal, "window": window, "cu_seqlens": bounds, "placement": placement}
    schedule = Schedule.parse(data.draw(st.sampled_from(OVER_HOSTS if hosts > 1 else SCHEDULES)))
    problem = problem_of(world, 2 * half, 1, 4, 1, 8, dtype=dtype, hosts=hosts, **mask)
    for kind in (replace(problem, keeps=keeps and world > 1), problem.gradient(keeps)):
        plans = attention_plans(kind, schedule)
        check(plans)
        render(plans[0])
    for plan in plans if keeps and hosts == 1 else ():  # only gradients are sent
        moves = [step.copy for step in plan.steps]
        assert {move.src.buffer for move in moves if move} <= {"leaving"}
        assert "staging" not in plan.buffer


UP, LESS = {"row": lambda row: row + 1}, {"row_stop": lambda row: row - 1}


def attends(step: Step) -> bool:
    return step.op == "attend"


def awaits_keys(step: Step) -> bool:
    return attends(step) and bool(step.waits)


def first(**fields: Any) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that replaces fields of the first item, by :func:`edits.replaced`."""
    return lambda items: (replaced(items[0], fields), *items[1:])


def refuted(plans: list[Plan], edit: Edit, words: str) -> None:
    """The proof accepts the plans, and refuses them if rank 1's plan is edited."""
    check(plans)
    refused(edited(plans, 1, edit), words)


@pytest.mark.parametrize(
    ("suits", "fields", "words"),
    [
        (awaits_keys, {"kv": LESS}, "leaves out rows .* of the keys"),
        (awaits_keys, {"accumulate": True}, "adds to what is no sum"),
        (awaits_keys, {"q": LESS}, "regions that do not fit"),
        (attends, {"first": 0}, "other rows than it says"),
        (awaits_keys, {"out": {"buffer": "out"}}, "attends in the wrong buffers"),
        (awaits_keys, {"kv": {"rank": 0}}, "at a peer"),
        # The only step for these rows of queries and of the result.
        (attends, {"q": UP, "out": UP}, "leaves out rows 8:9"),
    ],
)
def test_wrong_plans_are_found(suits: Any, fields: dict[str, Any], words: str) -> None:
    plans = attention_plans(HEAD_TAIL, Schedule.parse("growing"))
    refuted(plans, change(suits, attends=first(**fields)), words)


@pytest.mark.parametrize(
    ("back", "words"),
    [(None, "leaves out a gradient"), (down(-1), "gradient in the wrong place|leaves the")],
)
def test_wrong_plans_of_gradients_are_found(back: Any, words: str) -> None:
    plans = attention_plans(HEAD_TAIL.gradient(), Schedule.parse("growing"))
    refuted(plans, change(awaits_keys, attends=first(back=back)), words)


def test_choice() -> None:
    machine = find("h200-4", None)
    assert machine is not None
    sizes = 4, 16384, 1, 32, 8, 128, "bfloat16"
    problem = AttentionProblem(*sizes, causal=True, placement="head-tail")
    chosen = decide(problem, machine=machine)
    seconds = {candidate.schedule: candidate.queued for candidate in chosen.candidates}
    assert seconds.keys() == {*GATHERED.compared} and chosen.source == "model"
    assert seconds[str(chosen.schedule)] == min(seconds.values()) < seconds["serial"]
    slow = replace(machine, topology=replace(machine.topology, bandwidth=1e9))
    assert GATHERED.seconds(problem, Schedule.parse("growing"), slow) > seconds["growing"]
    assert str(decide(problem).schedule) == "growing"
    knobs = ":tail=2,compute=2", ":compute=2", ""  # each is slower than its predecessor, measured
    short = replace(problem, rows=4096)
    times = [GATHERED.seconds(short, Schedule.parse(f"growing{knob}"), machine) for knob in knobs]
    assert times == sorted(set(times))


def test_keys_in_the_layout_of_staging_are_not_copied() -> None:
    for batch in (1, 2):
        kv = torch.empty(8, 2, batch, 2, 16)
        k, v = (kv[:, turn].permute(1, 2, 0, 3) for turn in (0, 1))
        assert _packed(k, v).data_ptr() == kv.data_ptr() != _packed(v, k).data_ptr()


@on_ranks(4)
def test_memory_is_capped(at: Rank) -> None:
    """Calls keep to a cap by a ring of stages. Too low a cap raises, and any cap for "ring"."""
    subject, facts = SUBJECTS["all_gather_attention"], {"causal": True, "placement": "head-tail"}
    case = Case((16,) * at.world, (16, 1, 4, 2, 16), schedule="shard-overlap", facts=facts)
    for turn, cap in enumerate((*(24_000,) * 4, 60_000)):
        with ficco.options(workspace_bytes=cap):
            exact(at, subject, case.on(needs=(cap > 24_000,) * 3), turn)
    by_heads, facts = SUBJECTS["ulysses_attention"], {"causal": True, "scale": 0.5}
    heads = Case(case.rows, (16, 3, 8, 4, 16), facts=facts, needs=(True,) * 3)
    for turn, schedule in enumerate((*BY_HEADS, "auto")):
        with ficco.options(workspace_bytes=180_000):
            exact(at, by_heads, heads.on(schedule=schedule), turn, saves=turn % 2 > 0)
    for operator, small, cap in (
        (subject, case.on(schedule="growing"), 6_000),
        (subject, case.on(schedule="ring"), 4_000),
        (by_heads, heads, 6_000),
    ):
        with ficco.options(workspace_bytes=cap):
            failure = caught(lambda: exact(at, operator, small, 1))  # noqa: B023
        assert failure.type == "ValueError", failure
        assert "workspace_bytes: required at least" in failure.text


def not_finite(at: Rank, value: float, case: Case) -> None:
    """Attend to keys of the last rank that are NaN, or -inf, which masks them."""
    rows, _, heads, kv_heads, size = case.sizes
    wholes = [tensor.to(at.device) for tensor in whole(case, 1)]
    wholes[0].abs_()
    wholes[1][:, :, -rows:] = value
    own = slice(rows * at.rank, rows * (at.rank + 1))
    shards = [tensor[:, :, own].contiguous().requires_grad_() for tensor in wholes]
    out = ficco.all_gather_attention(*shards)
    q, k, v = (tensor.detach().double() for tensor in (shards[0], *wholes[1:]))
    k, v = (tensor.repeat_interleave(heads // kv_heads, 1) for tensor in (k, v))
    wanted = (q @ k.transpose(-1, -2) * size**-0.5).softmax(-1) @ v
    if value == -torch.inf:
        assert (out - wanted).abs().max() < (1e-5 if out.itemsize > 2 else 2e-2)
        return
    assert out.isnan().all() and wanted.isnan().all()
    for grad in torch.autograd.grad(out.sum(), shards):
        assert grad.isnan().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_scores_that_are_not_finite_are_not_merged_as_zeros(dtype: str) -> None:
    for value in (torch.nan, -torch.inf):
        run(2, not_finite, value, Case((8,) * 2, (8, 1, 4, 2, 16), dtype))


@pytest.mark.parametrize("causal", [False, True])
def test_keys_are_repeated_for_old_releases(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch before 2.9 reads beyond the keys of fewer heads on CPUs."""
    heads = Heads(*whole(Case((8,), (8, 2, 4, 2, 16), "float64"), 1))
    rows, seen = Rectangle(0, 8, 0, 8, None, 0 if causal else None), []
    wanted = attention(heads, rows, 0.25)
    back = Result(*wanted, torch.ones_like(wanted[0]))
    gradients = backward(heads, back, rows, 0.25)
    library = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def strict(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(q.shape[1] == k.shape[1])
        return library(q, k, *args, **kwargs)

    monkeypatch.setattr("ficco.compute.attention.release_of_torch", lambda: (2, 8))
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", strict)
    for result, want in zip(attention(heads, rows, 0.25), wanted, strict=True):
        assert torch.equal(result, want)
    assert seen == [True]
    for result, want in zip(backward(heads, back, rows, 0.25), gradients, strict=True):
        assert result.shape == want.shape and (result - want).abs().max() < 1e-12


# Calls of scaled_dot_product_attention that ficco serves.


@on_ranks(4)
def test_behind_pytorchs_context_parallelism(at: Rank) -> None:
    mesh = init_device_mesh("cpu", (at.world,))
    case = Case((8,) * at.world, (8, 1, 4, 2, 16), facts={"placement": "head-tail"})
    q, k, v = (tensor.requires_grad_() for tensor in whole(case, 3))
    wanted = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    (grad,) = torch.autograd.grad(wanted.sum(), q)
    own = SUBJECTS["all_gather_attention"].positions(case, at.rank)
    shards = [tensor.detach().clone() for tensor in (q, k, v)]
    with context_parallel(mesh, buffers=shards, buffer_seq_dims=[2, 2, 2]), ficco.behind_sdpa(mesh):
        call = torch.nn.functional.scaled_dot_product_attention
        assert call is not scaled_dot_product_attention
        leaf = shards[0].detach().clone().requires_grad_()
        out = call(leaf, *shards[1:], is_causal=True, enable_gqa=True)
        (own_grad,) = torch.autograd.grad(out.sum(), leaf)
        assert torch.equal(shards[0], q[:, :, own])
        assert (out - wanted[:, :, own]).abs().max() < 1e-6
        assert (own_grad - grad[:, :, own]).abs().max() < 1e-5
        wrong: Any
        for wrong in ({"dropout_p": 0.1}, {"attn_mask": torch.ones(8, 32)}, {"enable_gqa": False}):
            failure = caught(lambda: call(*shards, **({"enable_gqa": True} | wrong)))  # noqa: B023
            (name,) = wrong
            assert failure.type == "ValueError" and f"{name}: required" in failure.text, failure
    assert torch.nn.functional.scaled_dot_product_attention is scaled_dot_product_attention


@on_ranks(2)
def test_layers_behind_sdpa(at: Rank) -> None:
    """PyTorch's layers are served unless they return weights; ficco's layers are unchanged."""
    torch.manual_seed(1)
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    heads = ficco.nn.UlyssesAttention(16, 4, device=at.device)
    x = torch.randn(1, 4 * at.world, 16)
    own = x[:, 4 * at.rank : 4 * at.rank + 4]
    for trains in (True, False):
        with torch.no_grad():
            layer.train(trains)
            wanted, _ = layer(x, x, x, need_weights=False)
            unwrapped = heads(own)
            with ficco.behind_sdpa(placement="ranks"):
                y, _ = layer(own, own, own, need_weights=False)
                assert torch.equal(heads(own), unwrapped)
                failure = caught(lambda: layer(own, own, own))  # noqa: B023
        assert (y - wanted[:, 4 * at.rank : 4 * at.rank + 4]).abs().max() < 1e-5
        assert torch.backends.mha.get_fastpath_enabled()
        assert failure.type == "ValueError" and "pass need_weights=False" in failure.text, failure
    _, weights = layer(own, own, own)
    assert weights.shape == (1, 4, 4)


@on_ranks(2)
def test_a_checkpoint_is_recomputed_by_ficco(at: Rank) -> None:
    """The backward, with its recomputation, runs after the block."""
    tensors = whole(Case((8,) * at.world, (8, 1, 4, 4, 16)), 3)
    wholes = [tensor.requires_grad_() for tensor in tensors]
    grad = torch.randn(wholes[0].shape, generator=torch.Generator().manual_seed(5))
    out = scaled_dot_product_attention(*wholes, is_causal=True)
    wanted = torch.autograd.grad(out, wholes, grad)
    own = slice(8 * at.rank, 8 * (at.rank + 1))
    functions = checkpoint.CheckpointFunction.forward, checkpoint.checkpoint

    def attend(*operands: torch.Tensor) -> torch.Tensor:
        call = torch.nn.functional.scaled_dot_product_attention
        return call(*operands, is_causal=True)

    for reentrant in (True, False):
        leaves = [tensor.detach()[:, :, own].clone().requires_grad_() for tensor in wholes]
        with ficco.behind_sdpa(placement="ranks"):
            out = checkpoint.checkpoint(attend, *leaves, use_reentrant=reentrant)
        assert torch.nn.functional.scaled_dot_product_attention is scaled_dot_product_attention
        out.backward(grad[:, :, own])
        for leaf, want in zip(leaves, wanted, strict=True):
            assert (leaf.grad - want[:, :, own]).abs().max() < 1e-5
        assert (checkpoint.CheckpointFunction.forward, checkpoint.checkpoint) == functions


# Errors, also of attention by heads.

OPERATORS = "all_gather_attention", "ulysses_attention"
#: Invalid bounds of packed sequences.
BAD_BOUNDS = (16, 0, "16", [], (), [[0, 16]], torch.tensor(16), torch.zeros(3, device="meta"))
ON_THE_HOST = "^cu_seqlens: required a list of whole numbers on the host"
Q, K, ODD = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16), torch.zeros(1, 3, 8, 16)
#: Operands and arguments of invalid calls on two ranks, and a pattern of the error.
WRONG: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((Q, K, None), {}, "v"),
    ((Q, K[0], K), {}, "k"),
    ((Q, K, K[:, :, :4]), {}, "v"),
    ((Q, K[:, :, :4], K[:, :, :4]), {}, "k"),
    ((Q, K.double(), K.double()), {}, "required"),
    ((Q, ODD, ODD), {}, "required a number of heads that divides the 4 of q"),
    ((Q.int(), K.int(), K.int()), {}, "not served"),
    (tuple(torch.cat([one, one]) for one in (Q, K, K)), {"cu_seqlens": [0, 4, 16]}, "required"),
    ((Q, K, K), {"window": 4}, "window"),
    ((Q, K, K), {"window": -1, "causal": True}, "window"),
    ((Q, K, K), {"window": np.float32(4), "causal": True}, "window"),
    ((Q, K, K), {"cu_seqlens": [0, 9, 4, 16]}, "cu_seqlens"),
    ((Q, K, K), {"cu_seqlens": [0, 4]}, "cu_seqlens"),
    ((Q, K, K), {"cu_seqlens": [0.0, 16]}, "cu_seqlens"),
    ((Q, K, K), {"schedule": "tiled"}, "take growing|required serial or uniform-fused-1d"),
    ((Q, K, K), {"schedule": 3}, "schedule"),
    ((Q, K, K), {"scale": "1"}, "scale"),
    ((Q, K, K), {"scale": True}, "scale"),
    ((Q, K, K), {"scale": 10**400}, "scale: required a finite number"),
    ((Q, K, K), {"scale": float("nan")}, "scale: required a finite number"),
    ((Q, K, K), {"scale": -1.0, "causal": True}, "negate q"),
    ((Q, K, K), {"causal": 1}, "causal"),
    *(((Q, K, K), {"cu_seqlens": bounds}, ON_THE_HOST) for bounds in BAD_BOUNDS),
]
#: Invalid calls of one operator.
OWN = {
    "all_gather_attention": [
        ((Q, K, K), {"placement": "zigzag"}, "placement"),
        ((Q, K, K), {"placement": ["ranks"]}, "placement"),
        ((Q[:, :, :7], K[:, :, :7], K[:, :, :7]), {"placement": "head-tail"}, "required"),
    ],
    "ulysses_attention": [((ODD, ODD, ODD), {}, "share equally")],
}


@pytest.mark.parametrize("operator", OPERATORS)
@on_ranks(2)
def test_bad_input_says_what_to_do(at: Rank, operator: str) -> None:
    """The error is the same on all ranks, and the group stays usable."""
    call, texts = getattr(ficco, operator), []
    for operands, arguments, word in [*WRONG, *OWN[operator]]:
        failure = caught(lambda: call(*operands, **arguments))  # noqa: B023
        assert isinstance(failure, Failure), (operands, arguments)
        assert failure.type in ("ValueError", "NotImplementedError", "InvalidArgument"), failure
        assert re.search(word, failure.text), (word, failure.text)
        assert re.search("required|not served|take growing", failure.text), failure.text
        texts.append(failure.text)
        call(Q, K, K)
    with FlopCounterMode(display=False):  # makes the call an operator of the dispatcher
        for operands, arguments, word in WRONG[-len(BAD_BOUNDS) - 3 :]:
            failure = caught(lambda: call(*operands, **arguments))  # noqa: B023
            assert re.search(word, failure.text) and "required" in failure.text, failure
    gathered: list[Any] = [None] * at.world
    dist.all_gather_object(gathered, texts)
    assert gathered == [texts] * at.world


@pytest.mark.parametrize("operator", OPERATORS)
@on_ranks(2)
def test_numbers_of_any_type_are_those_of_python(at: Rank, operator: str) -> None:
    call = getattr(ficco, operator)
    q, k = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    plain = {"causal": True, "window": 3, "scale": 0.25, "cu_seqlens": [0, 5, 16]}
    wanted = call(q, k, k, **plain)
    for changes in (
        {"window": np.int64(3), "scale": np.float32(0.25)},
        {"window": np.uint8(3), "scale": np.float16(0.25), "cu_seqlens": np.array([0, 5, 16])},
        {"scale": Fraction(1, 4), "cu_seqlens": torch.tensor([0, 5, 16], dtype=torch.int32)},
    ):
        assert torch.equal(call(q, k, k, **(plain | changes)), wanted)


@pytest.mark.parametrize("operator", OPERATORS)
@on_ranks(2)
def test_ranks_that_differ_are_named(at: Rank, operator: str) -> None:
    """Ranks differ in the mask, rows, heads, the scale or the gradients that they need."""
    longer, wide = torch.zeros(1, 4, 10, 16), torch.zeros(1, 4, 8, 16)
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((Q, K, K), {"causal": True}),
        ((longer, longer[:, :2], longer[:, :2]), {}),
        ((Q, wide, wide), {}),
        ((Q, K, K), {"scale": 2.0}),
    ]
    if operator == "ulysses_attention":  # a call with gradients saves more
        others.append(((Q.clone().requires_grad_(), K, K), {}))
    for other in others:
        operands, facts = other if at.rank else ((Q, K, K), {})
        with own_group(at) as group:
            arguments = {**facts, "group": group}
            failure = caught(lambda: getattr(ficco, operator)(*operands, **arguments))  # noqa: B023
        assert failure.type == "RankMismatch" and operator in failure.text, failure
        assert ("causal" in failure.text) or "causal" not in other[1], failure
