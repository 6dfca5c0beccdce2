"""The projections around attention by heads: plans and their proof, calls on CPUs, gradients,
errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from ranks import Failure, Rank, caught, ranks, run
from test_attention import MOST_ERROR, reference, root_mean_square
from torch.nn import functional

import ficco
import ficco.nn
from ficco.machine import find
from ficco.problems.heads import keys_of
from ficco.problems.products import Problem
from ficco.proof import check
from ficco.schedules import Schedule, plans

SCHEDULES = (
    "growing",
    "serial",
    "hetero-fused-1d:pieces=4",
    "uniform-fused-1d:pieces=3,copy=2",
    "uniform-fused-2d",
    "shrinking:compute=2",
    "hetero-unfused-1d:pieces=2,tail=2",
    "hetero-fused-2d:pieces=3+1,tail=2",
)
OPERATORS = "matmul_all_to_all", "all_to_all_matmul", "all_to_all_transposed_matmul"


@dataclass(frozen=True)
class ProjectionCase:
    """One layer; ``rows`` positions on every rank."""

    rows: int
    heads: int
    kv_heads: int
    size: int = 4
    features: int = 12
    batch: int = 1
    dtype: str = "float64"

    def weights(self, iteration: int, device: Any, whole: bool = False) -> list[torch.Tensor]:
        """Those of queries, keys, values and the output, alike on all ranks."""
        made = torch.Generator().manual_seed(iteration)
        heads = self.heads, self.kv_heads, self.kv_heads
        shapes = [(some * self.size, self.features) for some in heads]
        return [
            self._made(shape, made, device, whole)
            for shape in (*shapes, (self.features, self.heads * self.size))
        ]

    def input(self, world: int, iteration: int, device: Any, whole: bool = False) -> torch.Tensor:
        """Of all positions."""
        made = torch.Generator().manual_seed(1000 + iteration)
        return self._made((self.batch, world * self.rows, self.features), made, device, whole)

    def _made(
        self, shape: tuple[int, ...], made: torch.Generator, device: Any, whole: bool
    ) -> torch.Tensor:
        """``whole``: small whole numbers, of which products are exact."""
        values = torch.randn(shape, generator=made)
        if whole:
            values = torch.randint(-2, 3, shape, generator=made)
        return values.to(getattr(torch, self.dtype)).to(device)

    def share(self, rank: int, world: int) -> tuple[slice, list[int], list[int]]:
        """A rank's positions, heads of queries, and heads of keys."""
        each = self.heads // world
        mine = list(range(rank * each, (rank + 1) * each))
        keys = keys_of(rank, world, self.heads, self.kv_heads)
        return slice(rank * self.rows, (rank + 1) * self.rows), mine, keys


def cases(world: int) -> Iterator[ProjectionCase]:
    """Heads of keys for each rank several, one, or a part; and those that serve unequally many."""
    yield ProjectionCase(5, 2 * world, 2 * world)
    yield ProjectionCase(6, 2 * world, world, batch=2)
    yield ProjectionCase(4, 2 * world, 1, dtype="float32")
    yield ProjectionCase(3, 4 * world, 2, batch=3, dtype="float32")
    yield ProjectionCase(4, 3 * world, 3, features=7)
    yield ProjectionCase(7, 4 * world, 4 * world // 2 if world % 3 else 4)


def _by_heads(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.unflatten(2, (-1, size)).transpose(1, 2)


# Plans.


def problem_of(
    operator: str, channels: list[int], dtype: str = "bfloat16", hosts: int = 1
) -> Problem:
    world = len(channels)
    table = [channels] * world
    if operator != OPERATORS[0]:
        table = [[some] * world for some in channels]
    return Problem.of_blocks(operator, table, 12, 20, dtype, transposed=True, hosts=hosts)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_plans_are_proven(operator: str, schedule: str) -> None:
    for channels in ([8], [8, 8], [8, 4, 12], [6, 6, 6, 6], [1, 2, 3, 4]):
        problem = problem_of(operator, channels)
        made = plans(problem, Schedule.parse(schedule))
        check(made)
        for plan in made:
            for buffer in plan.buffers:
                travels = buffer.holds == ("A @ B" if problem.kind.scatters else "A")
                sums = buffer.name == "sum"
                assert (buffer.layout == "transposed") == (travels and not sums), buffer


def test_what_lies_transposed_is_refused_where_it_is_not_served() -> None:
    problem = problem_of(OPERATORS[0], [4, 4])
    for name in ("serial:collective", "growing:pull", "tiled", "growing:kernel"):
        with pytest.raises(ValueError, match="rows that lie as columns|tiled"):
            plans(problem, Schedule.parse(name))
    with pytest.raises(ValueError, match="equal blocks"):
        Problem.of_blocks(OPERATORS[0], [[1, 2], [2, 1]], 4, 4, "float32", transposed=True)
    with pytest.raises(NotImplementedError, match="all-to-alls"):
        Problem("all_gather_matmul", (4, 4), 4, 4, "float32", transposed=True)


def test_choice() -> None:
    machine = find("h200-4", None)
    for operator in OPERATORS:
        problem = problem_of(operator, [1536] * 4)
        for mode in ("queued", "idle", "eager"):
            for known in (machine, None):
                decision = ficco.heuristics.decide(problem, machine=known, mode=mode)
                assert decision.schedule.mover == "dma" and not decision.schedule.pull
        explained = ficco.heuristics.decide(problem, machine=machine).candidates
        assert len(explained) > 5 and all(0 < one.share <= 1 for one in explained)
        for candidate in explained:
            plans(problem, Schedule.parse(candidate.schedule))


# Calls on CPUs.


def projected(
    at: Rank, case: ProjectionCase, iteration: int, schedule: str = "auto", saves: bool = False
) -> None:
    """Both projections and their gradients, exact on whole numbers."""
    world, (mine, heads, keys) = at.world, case.share(at.rank, at.world)
    whole = case.input(world, iteration, at.device, whole=True)
    weights = case.weights(iteration, at.device, whole=True)
    own = [one.clone().requires_grad_() for one in weights]
    x = whole[:, mine].clone().requires_grad_()
    with ficco.options(save_gathered=saves):
        made = ficco.ulysses_project(x, *own[:3], size=case.size, schedule=schedule)
    wanted = [_by_heads(functional.linear(whole, one), case.size) for one in weights[:3]]
    for one, every, some in zip(made, wanted, (heads, keys, keys), strict=True):
        assert torch.equal(one, every[:, some]), (case, schedule)
    # Gradients that differ between ranks, each that of its own heads.
    grads = [case.input(world, iteration + n, at.device, whole=True) for n in range(1, 4)]
    of_heads = [
        _by_heads(functional.linear(one, weight), case.size)
        for one, weight in zip(grads, weights, strict=False)
    ]
    given = [every[:, some] for every, some in zip(of_heads, (heads, keys, keys), strict=True)]
    torch.autograd.backward(made, given)
    of_x, of_weights = torch.zeros_like(whole), [torch.zeros_like(one) for one in weights[:3]]
    for rank in range(world):
        _, *some = case.share(rank, world)
        for n, chosen in enumerate((some[0], some[1], some[1])):
            for head in chosen:
                rows = slice(head * case.size, (head + 1) * case.size)
                of_head = of_heads[n][:, head]
                of_x += of_head @ weights[n][rows]
                of_weights[n][rows] += of_head[:, mine].flatten(0, 1).T @ whole[:, mine].flatten(
                    0, 1
                )
    assert x.grad is not None and torch.equal(x.grad, of_x[:, mine]), (case, schedule)
    for one, every in zip(own, of_weights, strict=False):
        assert one.grad is not None and torch.equal(one.grad, every), (case, schedule)
        assert one.grad.is_contiguous()
    # The way back.
    every = wanted[0]
    out = every[:, heads].transpose(1, 2).contiguous() if iteration % 2 else every[:, heads]
    out = (out.transpose(1, 2) if iteration % 2 else out).detach().requires_grad_()
    y = ficco.ulysses_output(out, own[3], schedule=schedule)
    flat = every.transpose(1, 2).flatten(2)
    assert torch.equal(y, functional.linear(flat[:, mine], weights[3])), (case, schedule)
    y.backward(grads[0][:, mine])
    back = _by_heads(grads[0] @ weights[3], case.size)[:, heads]
    assert out.grad is not None and torch.equal(out.grad, back), (case, schedule)
    of_weight = grads[0][:, mine].flatten(0, 1).T @ flat[:, mine].flatten(0, 1)
    assert own[3].grad is not None and torch.equal(own[3].grad, of_weight)


def calls(at: Rank) -> None:
    iteration = 0
    for case in cases(at.world):
        for schedule in (*SCHEDULES[iteration % 3 :: 3], "auto"):
            projected(at, case, iteration := iteration + 1, schedule)


def _laid_out(at: Rank) -> None:
    """What arrives is one tensor [S, batch, heads, size], which nobody brings into another order;
    and such a one is read in place."""
    case = ProjectionCase(4, 4, 2, batch=2)
    *weights, last = case.weights(1, at.device)
    x = case.input(at.world, 1, at.device)[:, :4]
    made = ficco.ulysses_project(x, *weights, size=case.size)
    channels, storage = (2 + 1 + 1) * case.size, made[0].untyped_storage()
    for one in made:
        assert one.stride() == (channels, case.size, 2 * channels, 1)
        assert one.untyped_storage().data_ptr() == storage.data_ptr()
    assert storage.nbytes() == 8 * 2 * channels * 8
    out = torch.randn(8, 2, 2, case.size, dtype=torch.float64).permute(1, 2, 0, 3).requires_grad_()
    y = ficco.ulysses_output(out, last.requires_grad_())
    node: Any = y.grad_fn
    while not hasattr(node, "saved_tensors"):  # views of the product
        ((node, _),) = node.next_functions
    assert node.saved_tensors[0].data_ptr() == out.data_ptr()


def test_nothing_is_brought_into_another_order() -> None:
    run(2, _laid_out)


def _some(at: Rank) -> Any:
    """Gradients of some operands only, of some results only, and no second derivatives."""
    case = ProjectionCase(4, 4, 2)
    for wanted in (0, 1, 3):
        x = case.input(2, 1, at.device, whole=True)[:, :4]
        weights = case.weights(1, at.device, whole=True)
        operands = [x, *weights[:3]]
        operands[wanted] = operands[wanted].clone().requires_grad_()
        q, k, v = ficco.ulysses_project(*operands, size=case.size)
        (k.sum() + (q.sum() if wanted < 2 else v.sum())).backward()
        rows = x.flatten(0, 1).sum(0).expand_as(operands[wanted])
        if wanted == 0:  # of q and k, whose heads are all somewhere
            rows = torch.cat(weights[:2]).sum(0).expand_as(x)
        assert torch.equal(operands[wanted].grad, rows), wanted  # type: ignore[arg-type]
    weight = weights[3].requires_grad_()
    y = ficco.ulysses_output(q.detach(), weight)
    (grad,) = torch.autograd.grad(y.square().sum(), weight, create_graph=True)
    return caught(lambda: grad.sum().backward())


def test_gradients_of_some() -> None:
    for failure in run(2, _some):
        assert isinstance(failure, Failure) and "derivative" in failure.text, failure


def _capped(at: Rank) -> Any:
    case = ProjectionCase(64, 8, 4, size=16, features=64)
    with ficco.options(workspace_bytes=60_000):
        for schedule in ("auto", "hetero-fused-1d:pieces=4"):
            projected(at, case, 1, schedule)
    with ficco.options(workspace_bytes=6_000):
        return caught(lambda: projected(at, case, 1))


def test_memory_is_capped() -> None:
    for failure in run(4, _capped):
        assert isinstance(failure, Failure) and failure.type == "ValueError"
        assert "workspace_bytes: required at least" in failure.text


# Layers.


def rotated(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A rotary embedding of all positions."""
    half = torch.arange(q.shape[3] // 2, device=q.device, dtype=q.dtype)
    angles = torch.arange(q.shape[2], device=q.device, dtype=q.dtype)[:, None] * 10.0**-half
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def turned(x: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, -1)
        return x * cos + torch.cat([-two, one], -1) * sin

    return turned(q), turned(k)


def layered(at: Rank, case: ProjectionCase, iteration: int, schedule: str = "auto") -> None:
    """A layer with its gradients: no further from float64 than the same by PyTorch alone."""
    world, (mine, *_) = at.world, case.share(at.rank, at.world)
    layer = ficco.nn.UlyssesAttention(
        case.features,
        case.heads,
        case.kv_heads,
        size=case.size,
        bias=iteration % 2 > 0,
        causal=True,
        schedule=schedule,
        device=at.device,
        dtype=getattr(torch, case.dtype),
    )
    names = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"]
    weights = [one / case.features**0.5 for one in case.weights(iteration, at.device)]
    if iteration % 2:
        names += ["q_proj.bias", "k_proj.bias", "v_proj.bias"]
        weights += [one.mean(1) for one in weights[:3]]
    layer.load_state_dict(dict(zip(names, weights, strict=True)))
    whole, grad = (case.input(world, iteration + n, at.device) for n in range(2))
    x = whole[:, mine].clone().requires_grad_()
    y = layer(x, rotated)
    y.backward(grad[:, mine])

    def plain(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """By PyTorch: result and gradients of the input and the weights, of all ranks."""
        operands = [one.to(dtype).requires_grad_() for one in (whole.clone(), *weights)]
        x, *of_heads = operands[:4]
        o, *biases = operands[4:]
        heads = [
            _by_heads(functional.linear(x, one, bias), case.size)
            for one, bias in zip(of_heads, biases or [None] * 3, strict=True)
        ]
        heads[:2] = rotated(*heads[:2])
        if dtype == torch.float64:
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            out = reference(*heads, causal, None)  # type: ignore[arg-type]
        else:
            out = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        made = functional.linear(out.transpose(1, 2).flatten(2), o)
        made.backward(grad.to(dtype))
        gradients = [one.grad for one in operands if one.grad is not None]
        return [made[:, mine], gradients[0][:, mine]], gradients[1:]

    exact, of_weights = plain(torch.float64)
    near, near_weights = plain(x.dtype)
    assert x.grad is not None
    parameters = dict(layer.named_parameters())
    found = [grad for name in names if (grad := parameters[name].grad) is not None]
    for one in found:  # as data parallelism does
        total = one.float()
        torch.distributed.all_reduce(total)
        one.copy_(total)
    pairs = zip([y, x.grad, *found], exact + of_weights, near + near_weights, strict=True)
    for one, wanted, library in pairs:
        error, least = (root_mean_square(some.double() - wanted) for some in (one, library))
        size = root_mean_square(wanted)
        # Parts of ranks are rounded before they are summed: each by half an ulp at most.
        limit = max(MOST_ERROR * least, torch.finfo(x.dtype).eps * size)
        assert error <= limit, (case, schedule, float(error), float(least))


def _layers(at: Rank) -> None:
    iteration = 0
    for heads, kv_heads in ((4, 4), (4, 2), (4, 1), (8, 2), (3, 3)):
        for dtype in ("float32", "bfloat16"):
            case = ProjectionCase(
                16, heads * at.world, kv_heads, 16, 32, batch=1 + iteration % 2, dtype=dtype
            )
            if case.heads % kv_heads == 0:
                layered(at, case, iteration := iteration + 1)


@ranks(1, 2, 4)
def test_layers(world: int) -> None:
    run(world, _layers, timeout=280)


# Errors.


def _refused(at: Rank) -> list[Any]:
    case, found = ProjectionCase(4, 4, 2), []
    x, (q, k, v, o) = case.input(2, 1, at.device)[:, :4], case.weights(1, at.device)
    out = torch.zeros(1, 2, 8, 4, dtype=x.dtype)
    for operands, how in (
        ((x[0], q, k, v), {}),
        ((x, q[:, :8], k, v), {}),
        ((x, q, k[:6], v[:6]), {}),
        ((x, q, k, v[:4]), {}),
        ((x, q[:12], k[:4], v[:4]), {}),  # three heads
        ((x, q, k.float(), v), {}),
        ((x, q, k, v), {"size": 5}),
        ((x, q, k, v), {"size": 0}),
        ((x, q, k, v), {"size": "4"}),
        ((x, q, k, None), {}),
        ((x, q, k, v), {"schedule": "tiled"}),
        ((x, q, k, v), {"schedule": "serial:collective"}),
        ((x.int(), q.int(), k.int(), v.int()), {}),
    ):
        given = {"size": 4, **how}
        found.append(caught(lambda a=operands, b=given: ficco.ulysses_project(*a, **b)))
        projected(at, case, len(found))  # the group goes on
    for pair in ((out[0], o), (out[:, :, :7], o), (out[:, :1], o), (out, o.t()), (out, o.float())):
        found.append(caught(lambda a=pair: ficco.ulysses_output(*a)))
        projected(at, case, len(found))
    found.append(caught(lambda: ficco.ulysses_output(out, o[:0])))
    found.append(caught(lambda: ficco.nn.UlyssesAttention(12, 3)))
    return found


def test_bad_input_says_what_to_do() -> None:
    for failures in zip(*run(2, _refused), strict=True):
        for failure in failures:
            assert isinstance(failure, Failure), failures
            assert failure.type in ("ValueError", "NotImplementedError", "InvalidArgument"), failure
            assert "required" in failure.text or "not served" in failure.text, failure.text
        assert failures[0].text == failures[1].text


#: Sizes that no layer has, and what their errors begin with.
NO_LAYERS: list[tuple[dict[str, Any], str]] = [
    ({"features": 0}, "features: required a whole number, at least 1, got 0"),
    ({"features": 12.0}, "features: required a whole number, at least 1, got 12.0"),
    ({"heads": 0}, "heads: required a whole number, at least 1, got 0"),
    ({"heads": -4}, "heads: required a whole number, at least 1, got -4"),
    ({"heads": True}, "heads: required a whole number, at least 1, got True"),
    ({"kv_heads": 0}, "kv_heads: required a whole number, at least 1, got 0"),
    ({"kv_heads": 3}, "heads: required a multiple of the 2 ranks and of kv_heads, got 4 and 3"),
    (
        {"features": 2},
        "size: required that of a head, at least 1, got 2 features for 4 heads; pass size=",
    ),
    ({"size": 0}, "size: required a whole number, at least 1, got 0"),
    ({"size": 2.5}, "size: required a whole number, at least 1, got 2.5"),
]


def _no_layers(at: Rank) -> list[Any]:
    usual = {"features": 12, "heads": 4}
    return [
        caught(lambda a=usual | sizes: ficco.nn.UlyssesAttention(**a)) for sizes, _ in NO_LAYERS
    ]


def test_sizes_of_no_layer_are_refused() -> None:
    for failures in run(2, _no_layers):
        for failure, (_, text) in zip(failures, NO_LAYERS, strict=True):
            assert failure.type == "ValueError" and failure.text.startswith(text), failure


def _unlike(at: Rank) -> list[Any]:
    import torch.distributed as dist

    case, found = ProjectionCase(4, 4, 4), []
    x, weights = case.input(2, 1, at.device)[:, :4], case.weights(1, at.device)[:3]
    for which in range(3):
        group = dist.new_group(list(range(at.world)))
        mine, given = x, weights
        if which == 0:
            mine = x[:, : 3 + at.rank]
        elif which == 1:
            given = [weights[0], *(one[: 8 + 8 * at.rank] for one in weights[1:])]
        else:
            mine = x if at.rank else x[:, :, 1:]  # refused on one rank only
        with ficco.options(timeout_s=10):
            found.append(
                caught(
                    lambda m=mine, w=given, g=group: ficco.ulysses_project(m, *w, size=4, group=g)
                )
            )
        at.barrier()
        ficco.close(group)
        dist.destroy_process_group(group)
    return found


def test_ranks_that_differ_are_told() -> None:
    one, other = run(2, _unlike)
    assert [failure.type for failure in one] == ["RankMismatch", "RankMismatch", "ValueError"]
    assert [failure.type for failure in other] == ["RankMismatch"] * 3


def _laid_out_unlike(at: Rank) -> list[Any]:
    import torch.distributed as dist

    x, w, found = torch.ones(1, 8, 8), torch.ones(16, 8), []
    out = torch.ones(1, 2, 16, 4)
    for mine in (
        lambda group: ficco.ulysses_project(x, w, w, w, size=(4, 2)[at.rank], group=group),
        lambda group: ficco.ulysses_project(
            x.view(1 + at.rank, -1, 8), w, w, w, size=4, group=group
        ),
        lambda group: ficco.ulysses_output(
            out.view(1, *((2, 16, 4), (4, 16, 2))[at.rank]), w.t(), group=group
        ),
        lambda group: ficco.ulysses_output(out.view(1 + at.rank, 2, -1, 4), w.t(), group=group),
    ):
        group = dist.new_group(list(range(at.world)))
        with ficco.options(timeout_s=10):
            found.append(caught(lambda m=mine, g=group: m(g)))
        at.barrier()
        ficco.close(group)
        dist.destroy_process_group(group)
    return found


def test_ranks_with_other_heads_or_batches_of_equal_size_are_told() -> None:
    for failures in run(2, _laid_out_unlike):
        for failure, text in zip(
            failures, ("size 2", "batch 2", "4 heads a rank", "batch 2"), strict=True
        ):
            assert failure.type == "RankMismatch" and text in failure.text, failure


def test_keys_of_a_rank() -> None:
    """Each head of queries attends to the head of keys that is its own."""
    for world, heads, kv_heads in ((4, 8, 2), (3, 12, 4), (4, 12, 3), (2, 6, 2), (1, 4, 2)):
        each, every = heads // world, []
        for rank in range(world):
            keys = keys_of(rank, world, heads, kv_heads)
            assert each % len(keys) == 0
            every += [key for key in keys for _ in range(each // len(keys))]
        assert every == [head // (heads // kv_heads) for head in range(heads)]
    assert list(accumulate(len(keys_of(rank, 4, 8, 2)) for rank in range(4))) == [1, 2, 3, 4]
