"""Projections around attention by heads, beyond the contract: plans, layers, memory, errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import own_group
from ranks import Failure, Rank, caught, on_ranks, ranks, run
from subjects import SUBJECTS, Case, by_heads, exact
from test_nn import refuses
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import ficco
import ficco.nn
from ficco.machine import find
from ficco.problems.products import Problem
from ficco.proof import check
from ficco.schedules import Schedule, plans

_, *SCHEDULES = SUBJECTS["ulysses_project"].schedules(4)
OPERATORS = "matmul_all_to_all", "all_to_all_matmul", "all_to_all_transposed_matmul"


def operands(at: Rank, batch: int = 1) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Operands of both calls on two ranks: 4 positions a rank, 4 query heads and 2 key heads."""
    case = Case((4,) * 2, (4, batch, 4, 2, 4, 12))
    project, output = (SUBJECTS[f"ulysses_{name}"] for name in ("project", "output"))
    return project.make(case, at.rank, 1), output.make(case, at.rank, 1)


def problem_of(operator: str, channels: list[int]) -> Problem:
    table = [channels] * len(channels)
    if operator != OPERATORS[0]:
        table = [[count] * len(channels) for count in channels]
    return Problem.of_blocks(operator, table, 12, 20, "bfloat16", transposed=True)


@pytest.mark.parametrize("operator", OPERATORS)
def test_plans_are_proven(operator: str) -> None:
    for channels in ([8], [8, 8], [8, 4, 12], [6, 6, 6, 6], [1, 2, 3, 4]):
        problem = problem_of(operator, channels)
        travels = "A @ B" if problem.kind.scatters else "A"
        for schedule in SCHEDULES:
            all_plans = plans(problem, Schedule.parse(schedule))
            check(all_plans)
            for buffer in (buffer for plan in all_plans for buffer in plan.buffers):
                transposed = buffer.holds == travels and buffer.name != "sum"
                assert (buffer.layout == "transposed") == transposed, buffer


def test_transposed_rows_are_refused_where_not_served() -> None:
    problem = problem_of(OPERATORS[0], [4, 4])
    for name in ("serial:collective", "growing:pull", "tiled", "growing:kernel"):
        with pytest.raises(ValueError, match="rows that lie as columns|tiled"):
            plans(problem, Schedule.parse(name))
    with pytest.raises(ValueError, match="blocks of equal size"):
        Problem.of_blocks(OPERATORS[0], [[1, 2], [2, 1]], 4, 4, "float32", transposed=True)
    with pytest.raises(NotImplementedError, match="all-to-alls"):
        Problem("all_gather_matmul", (4, 4), 4, 4, "float32", transposed=True)


def test_auto_takes_schedules_that_serve_projections() -> None:
    machine = find("h200-4", None)
    for operator in OPERATORS:
        problem = problem_of(operator, [1536] * 4)
        for mode in ("queued", "idle", "eager"):
            for described in (machine, None):
                decision = ficco.heuristics.decide(problem, machine=described, mode=mode)
                assert decision.schedule.mover == "dma" and not decision.schedule.pull
        explained = ficco.heuristics.decide(problem, machine=machine).candidates
        assert len(explained) > 5 and all(0 < candidate.share <= 1 for candidate in explained)
        for candidate in explained:
            plans(problem, Schedule.parse(candidate.schedule))


@on_ranks(2)
def test_results_arrive_in_the_layout_of_their_reader(at: Rank) -> None:
    """Queries, keys and values arrive in one tensor [S, batch, heads, size], which is not copied to
    another layout. ``ulysses_output`` reads a tensor of this layout in place."""
    project, (_, weight) = operands(at, batch=2)
    arrived = ficco.ulysses_project(*project, size=4)
    storage = arrived[0].untyped_storage()
    for tensor in arrived:  # two heads of queries, one of keys and one of values
        assert tensor.stride() == (16, 4, 32, 1)
        assert tensor.untyped_storage().data_ptr() == storage.data_ptr()
    assert storage.nbytes() == 8 * 32 * 8
    out = torch.randn(8, 2, 2, 4, dtype=torch.float64).permute(1, 2, 0, 3).requires_grad_()
    y = ficco.ulysses_output(out, weight.requires_grad_())
    node: Any = y.grad_fn
    while not hasattr(node, "saved_tensors"):  # views of the product
        ((node, _),) = node.next_functions
    assert node.saved_tensors[0].data_ptr() == out.data_ptr()


@on_ranks(2)
def test_transposed_operands_are_copied(at: Rank) -> None:
    case = Case((4,) * 2, (4, 1, 4, 2, 4, 12), layout="transposed")
    for name in ("ulysses_project", "ulysses_output"):
        needs = (True,) * len(SUBJECTS[name].operands)
        exact(at, SUBJECTS[name], case.on(needs=needs), 1)


@on_ranks(2)
def test_gradients_of_some_results(at: Rank) -> None:
    """Gradients where only some results are used. Second derivatives are refused."""
    (x, *weights), (out, weight) = operands(at)
    for index in (0, 1, 3):
        leaves = [x, *weights]
        leaves[index] = leaves[index].clone().requires_grad_()
        q, k, v = ficco.ulysses_project(*leaves, size=4)
        (k.sum() + (q.sum() if index < 2 else v.sum())).backward()
        expected = x.flatten(0, 1).sum(0).expand_as(leaves[index])
        if index == 0:  # all heads of q and k are on one of the ranks
            expected = torch.cat(weights[:2]).sum(0).expand_as(x)
        assert torch.equal(leaves[index].grad, expected)
    y = ficco.ulysses_output(out, weight.requires_grad_())
    (grad,) = torch.autograd.grad(y.square().sum(), weight, create_graph=True)
    assert "derivative" in caught(lambda: grad.sum().backward()).text


@on_ranks(2)
def test_memory_is_capped(at: Rank) -> None:
    """Caps, and calls in a narrower dtype than the contract's."""

    def calls(case: Case) -> None:
        for name in ("ulysses_project", "ulysses_output"):
            needs = (True,) * len(SUBJECTS[name].operands)
            exact(at, SUBJECTS[name], case.on(needs=needs), 1)

    calls(Case((4,) * 2, (4, 2, 4, 2, 4, 12), "bfloat16"))
    case = Case((64,) * at.world, (64, 1, 8, 4, 16, 64), "float64")
    with ficco.options(workspace_bytes=60_000):
        for schedule in ("auto", "hetero-fused-1d:pieces=4"):
            calls(case.on(schedule=schedule))
    with ficco.options(workspace_bytes=6_000):
        refuses(("workspace_bytes: required at least", lambda: calls(case)))


def rotated(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A stand-in for a rotary embedding of all positions."""
    factors = torch.arange(q.shape[2], device=q.device, dtype=q.dtype)[:, None].cos()
    return q * factors, k * factors


@ranks(1, 2, 4)
@on_ranks(timeout=280)
def test_layers(at: Rank) -> None:
    """Compare with PyTorch's: float64 sums in another order differ by rounding."""
    sizes = [(own * at.world, kv) for own, kv in ((4, 4), (4, 2), (4, 1), (8, 2), (3, 3))]
    for turn, (heads, kv_heads) in enumerate(pair for pair in sizes if pair[0] % pair[1] == 0):
        torch.manual_seed(turn)  # the same on all ranks
        how: dict[str, Any] = {"bias": turn % 2 > 0, "device": at.device, "dtype": torch.float64}
        layer = ficco.nn.UlyssesAttention(32, heads, kv_heads, size=16, causal=True, **how)
        if turn % 4 == 1:  # the biases of Whisper's attention
            layer.k_proj.bias = None
            layer.o_proj = nn.Linear(heads * 16, 32).to(at.device, torch.float64)
        whole, grad = torch.randn(2, 1 + turn % 2, 16 * at.world, 32).to(at.device, torch.float64)
        whole.requires_grad_()
        x = whole.detach().chunk(at.world, 1)[at.rank].requires_grad_()
        y, parameters = layer(x, rotated), [*layer.parameters()]
        grad_x, *grads = torch.autograd.grad(y, [x, *parameters], grad.chunk(at.world, 1)[at.rank])
        q, k, v = (by_heads(proj(whole), 16) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
        out = scaled_dot_product_attention(*rotated(q, k), v, is_causal=True, enable_gqa=True)
        want = layer.o_proj(out.transpose(1, 2).flatten(2))
        grad_whole, *expected = torch.autograd.grad(want, [whole, *parameters], grad)
        for one, other in ((y, want), (grad_x, grad_whole)):
            torch.testing.assert_close(one, other.chunk(at.world, 1)[at.rank], rtol=0, atol=1e-12)
        for total, right in zip(grads, expected, strict=True):
            torch.distributed.all_reduce(total)  # as data parallelism does
            torch.testing.assert_close(total, right, rtol=0, atol=1e-12)


WHOLE = "required a whole number, at least 1, got"
#: Invalid sizes of a layer, and the beginning of the error.
NO_LAYERS: list[tuple[dict[str, Any], str]] = [
    *(({name: 0}, f"{name}: {WHOLE} 0") for name in ("features", "heads", "kv_heads", "size")),
    ({"features": 12.0}, f"features: {WHOLE} 12.0"),
    ({"size": 2.5}, f"size: {WHOLE} 2.5"),
    ({"heads": -4}, f"heads: {WHOLE} -4"),
    ({"heads": True}, f"heads: {WHOLE} True"),
    ({"heads": 3}, "heads: required a multiple of the 2 ranks"),
    ({"kv_heads": 3}, "heads: required a multiple of the 2 ranks and of kv_heads, got 4 and 3"),
    ({"features": 2}, "size: required that of a head, at least 1, got 2 features for 4 heads"),
]


def _refused(at: Rank) -> list[Any]:
    (x, q, k, v), (out, o) = operands(at)
    projections = (
        *((x[0], q, k, v), (x, q[:, :8], k, v), (x, q, k[:6], v[:6]), (x, q, k, v[:4])),
        (x, q[:12], k[:4], v[:4]),  # three heads
        *((x, q, k.float(), v), (x, q, k, None), (x.int(), q.int(), k.int(), v.int())),
    )
    outputs = (out[0], o), (out[:, :, :7], o), (out[:, :1], o), (out, o.t()), (out, o.float())
    size, schedule = partial(ficco.ulysses_project, x, q, k, v), ("tiled", "serial:collective")
    failures = [
        *(partial(ficco.ulysses_project, *wrong, size=4) for wrong in projections),
        *(partial(size, size=wrong) for wrong in (5, 0, "4")),
        *(partial(size, size=4, schedule=name) for name in schedule),
        *(partial(ficco.ulysses_output, *wrong) for wrong in (*outputs, (out, o[:0]))),
        *(
            partial(ficco.nn.UlyssesAttention, **{"features": 12, "heads": 4, **sizes})
            for sizes, _ in NO_LAYERS
        ),
    ]
    outcomes = list(map(caught, failures))
    ficco.ulysses_project(x, q, k, v, size=4)  # the group goes on
    return outcomes


def test_bad_input_says_what_to_do() -> None:
    first, second = run(2, _refused)
    for failure in first:
        assert isinstance(failure, Failure), first
        assert failure.type in ("ValueError", "NotImplementedError", "InvalidArgument"), failure
        assert "required" in failure.text or "not served" in failure.text, failure.text
    assert [failure.text for failure in first] == [failure.text for failure in second]
    for failure, (_, text) in zip(first[-len(NO_LAYERS) :], NO_LAYERS, strict=True):
        assert failure.type == "ValueError" and failure.text.startswith(text), failure


@on_ranks(2)
def test_ranks_that_differ_are_told(at: Rank) -> None:
    """Mismatches of sizes, and of heads or batches where the sizes of operands are equal."""
    x, w, out = torch.ones(1, 8, 8), torch.ones(16, 8), torch.ones(1, 2, 16, 4)
    own = w[: 8 + 8 * at.rank]

    def project(x: Any, k: Any = w, size: int = 4) -> Callable[[Any], Any]:
        return lambda group: ficco.ulysses_project(x, w, k, k, size=size, group=group)

    def output(out: Any) -> Callable[[Any], Any]:
        return lambda group: ficco.ulysses_output(out, w.t(), group=group)

    one_sided = ("ValueError", "RankMismatch")[at.rank]  # refused on one rank only
    for kind, text, call in (
        ("RankMismatch", "", project(x[:, : 3 + at.rank])),
        ("RankMismatch", "", project(x, own)),
        (one_sided, "", project(x if at.rank else x[:, :, 1:])),
        ("RankMismatch", "size 2", project(x, size=(4, 2)[at.rank])),
        ("RankMismatch", "batch 2", project(x.view(1 + at.rank, -1, 8))),
        ("RankMismatch", "4 heads a rank", output(out.view(1, *((2, 16, 4), (4, 16, 2))[at.rank]))),
        ("RankMismatch", "batch 2", output(out.view(1 + at.rank, 2, -1, 4))),
    ):
        with own_group(at) as group, ficco.options(timeout_s=10):
            refuses((text, partial(call, group)), kind=kind)
