"""The projections around attention by heads: plans and their proof, layers, memory, errors. The
contract shows that calls and their gradients are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from cases import own_group
from ranks import Failure, Rank, caught, on_ranks, ranks, run
from subjects import SUBJECTS, Case, by_heads, exact, root_mean_square
from torch.nn import functional

import ficco
import ficco.nn
from ficco.machine import find
from ficco.problems.attention import keys_of
from ficco.problems.products import Problem
from ficco.proof import check
from ficco.schedules import Schedule, plans

#: Of the same by PyTorch alone. Partial results are rounded once more before they are merged: the
#: square root of 2 in the mean.
MOST_ERROR = 1.5
_, *SCHEDULES = SUBJECTS["ulysses_project"].schedules(4)
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

    def weights(self, iteration: int, device: Any) -> list[torch.Tensor]:
        """Those of queries, keys, values and the output, alike on all ranks."""
        heads = self.heads, self.kv_heads, self.kv_heads
        shapes = [(some * self.size, self.features) for some in heads]
        return self._made(iteration, device, *shapes, (self.features, self.heads * self.size))

    def input(self, world: int, iteration: int, device: Any) -> torch.Tensor:
        """Of all positions."""
        shape = self.batch, world * self.rows, self.features
        return self._made(1000 + iteration, device, shape)[0]

    def _made(self, seed: int, device: Any, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
        made, dtype = torch.Generator().manual_seed(seed), getattr(torch, self.dtype)
        return [torch.randn(shape, generator=made).to(device, dtype) for shape in shapes]


# Plans.


def problem_of(
    operator: str, channels: list[int], dtype: str = "bfloat16", hosts: int = 1
) -> Problem:
    world = len(channels)
    table = [channels] * world
    if operator != OPERATORS[0]:
        table = [[some] * world for some in channels]
    return Problem.of_blocks(operator, table, 12, 20, dtype, transposed=True, hosts=hosts)


@pytest.mark.parametrize("operator", OPERATORS)
def test_plans_are_proven(operator: str) -> None:
    for channels in ([8], [8, 8], [8, 4, 12], [6, 6, 6, 6], [1, 2, 3, 4]):
        problem = problem_of(operator, channels)
        travels = "A @ B" if problem.kind.scatters else "A"
        for schedule in SCHEDULES:
            made = plans(problem, Schedule.parse(schedule))
            check(made)
            for buffer in (one for plan in made for one in plan.buffers):
                transposed = buffer.holds == travels and buffer.name != "sum"
                assert (buffer.layout == "transposed") == transposed, buffer


def test_what_lies_transposed_is_refused_where_it_is_not_served() -> None:
    problem = problem_of(OPERATORS[0], [4, 4])
    for name in ("serial:collective", "growing:pull", "tiled", "growing:kernel"):
        with pytest.raises(ValueError, match="rows that lie as columns|tiled"):
            plans(problem, Schedule.parse(name))
    with pytest.raises(ValueError, match="blocks of equal size"):
        Problem.of_blocks(OPERATORS[0], [[1, 2], [2, 1]], 4, 4, "float32", transposed=True)
    with pytest.raises(NotImplementedError, match="all-to-alls"):
        Problem("all_gather_matmul", (4, 4), 4, 4, "float32", transposed=True)


def test_auto_takes_what_serves_them() -> None:
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


def test_keys_of_a_rank() -> None:
    """Each head of queries attends to the head of keys that is its own."""
    for world, heads, kv_heads in ((4, 8, 2), (3, 12, 4), (4, 12, 3), (2, 6, 2), (1, 4, 2)):
        each, every = heads // world, []
        for rank in range(world):
            keys = keys_of(rank, world, heads, kv_heads)
            assert each % len(keys) == 0
            every += [key for key in keys for _ in range(each // len(keys))]
        assert every == [head // (heads // kv_heads) for head in range(heads)]


# Calls on CPUs.


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


def _of_some_results(at: Rank) -> Any:
    """Gradients where not all results are used, and no second derivatives."""
    case = ProjectionCase(4, 4, 2)
    for wanted in (0, 1, 3):
        x, weights = case.input(2, 1, at.device)[:, :4], case.weights(1, at.device)
        operands = [x, *weights[:3]]
        operands[wanted] = operands[wanted].clone().requires_grad_()
        q, k, v = ficco.ulysses_project(*operands, size=case.size)
        (k.sum() + (q.sum() if wanted < 2 else v.sum())).backward()
        rows = x.flatten(0, 1).sum(0).expand_as(operands[wanted])
        if wanted == 0:  # of q and k, whose heads are all somewhere
            rows = torch.cat(weights[:2]).sum(0).expand_as(x)
        torch.testing.assert_close(operands[wanted].grad, rows)
    weight = weights[3].requires_grad_()
    y = ficco.ulysses_output(q.detach(), weight)
    (grad,) = torch.autograd.grad(y.square().sum(), weight, create_graph=True)
    return caught(lambda: grad.sum().backward())


def _capped(at: Rank) -> Any:
    def calls(schedule: str) -> None:
        case = Case((64,) * at.world, (64, 1, 8, 4, 16, 64), "float64", schedule)
        for name in ("ulysses_project", "ulysses_output"):
            needs = (True,) * len(SUBJECTS[name].operands)
            exact(at, SUBJECTS[name], case.on(needs=needs), 1)

    with ficco.options(workspace_bytes=60_000):
        for schedule in ("auto", "hetero-fused-1d:pieces=4"):
            calls(schedule)
    with ficco.options(workspace_bytes=6_000):
        return caught(lambda: calls("auto"))


def _calls(at: Rank) -> list[Any]:
    _laid_out(at)
    return [_of_some_results(at), _capped(at)]


def test_layouts_gradients_of_some_results_and_caps() -> None:
    for second, capped in run(2, _calls):
        assert isinstance(second, Failure) and "derivative" in second.text, second
        assert isinstance(capped, Failure) and capped.type == "ValueError", capped
        assert "workspace_bytes: required at least" in capped.text


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
    mine = slice(at.rank * case.rows, (at.rank + 1) * case.rows)
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
    whole, grad = (case.input(at.world, iteration + n, at.device) for n in range(2))
    x = whole[:, mine].clone().requires_grad_()
    y = layer(x, rotated)
    y.backward(grad[:, mine])

    def plain(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """By PyTorch: result and gradients of the input and the weights, of all ranks."""
        operands = [one.to(dtype).requires_grad_() for one in (whole.clone(), *weights)]
        x, *of_heads = operands[:4]
        o, *biases = operands[4:]
        heads = [
            by_heads(functional.linear(x, one, bias), case.size)
            for one, bias in zip(of_heads, biases or [None] * 3, strict=True)
        ]
        heads[:2] = rotated(*heads[:2])
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


@ranks(1, 2, 4)
@on_ranks(timeout=280)
def test_layers(at: Rank) -> None:
    iteration = 0
    for own, kv_heads in ((4, 4), (4, 2), (4, 1), (8, 2), (3, 3)):
        for dtype in ("float32", "bfloat16"):
            heads, batch = own * at.world, 1 + iteration % 2
            case = ProjectionCase(16, heads, kv_heads, 16, 32, batch=batch, dtype=dtype)
            if heads % kv_heads == 0:
                layered(at, case, iteration := iteration + 1)


# Errors.


WHOLE = "required a whole number, at least 1, got"
#: Sizes that no layer has, and what their errors begin with.
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
    case = ProjectionCase(4, 4, 2)
    x, (q, k, v, o) = case.input(2, 1, at.device)[:, :4], case.weights(1, at.device)
    out = torch.zeros(1, 2, 8, 4, dtype=x.dtype)
    operands = (
        *((x[0], q, k, v), (x, q[:, :8], k, v), (x, q, k[:6], v[:6]), (x, q, k, v[:4])),
        (x, q[:12], k[:4], v[:4]),  # three heads
        *((x, q, k.float(), v), (x, q, k, None), (x.int(), q.int(), k.int(), v.int())),
    )
    outputs = (out[0], o), (out[:, :, :7], o), (out[:, :1], o), (out, o.t()), (out, o.float())
    size, schedule = partial(ficco.ulysses_project, x, q, k, v), ("tiled", "serial:collective")
    failures = [
        *(partial(ficco.ulysses_project, *some, size=4) for some in operands),
        *(partial(size, size=wrong) for wrong in (5, 0, "4")),
        *(partial(size, size=4, schedule=name) for name in schedule),
        *(partial(ficco.ulysses_output, *some) for some in (*outputs, (out, o[:0]))),
        *(
            partial(ficco.nn.UlyssesAttention, **{"features": 12, "heads": 4, **sizes})
            for sizes, _ in NO_LAYERS
        ),
    ]
    found = list(map(caught, failures))
    ficco.ulysses_project(x, q, k, v, size=4)  # the group goes on
    return found


def test_bad_input_says_what_to_do() -> None:
    one, other = run(2, _refused)
    for failure in one:
        assert isinstance(failure, Failure), one
        assert failure.type in ("ValueError", "NotImplementedError", "InvalidArgument"), failure
        assert "required" in failure.text or "not served" in failure.text, failure.text
    assert [failure.text for failure in one] == [failure.text for failure in other]
    for failure, (_, text) in zip(one[-len(NO_LAYERS) :], NO_LAYERS, strict=True):
        assert failure.type == "ValueError" and failure.text.startswith(text), failure


def _unlike(at: Rank) -> list[Any]:
    """What ranks get whose operands differ, each of another group."""
    x, w, out, found = torch.ones(1, 8, 8), torch.ones(16, 8), torch.ones(1, 2, 16, 4), []
    own = w[: 8 + 8 * at.rank]

    def project(x: Any, k: Any = w, size: int = 4) -> Callable[[Any], Any]:
        return lambda group: ficco.ulysses_project(x, w, k, k, size=size, group=group)

    def output(out: Any) -> Callable[[Any], Any]:
        return lambda group: ficco.ulysses_output(out, w.t(), group=group)

    for call in (
        project(x[:, : 3 + at.rank]),
        project(x, own),
        project(x if at.rank else x[:, :, 1:]),  # refused on one rank only
        project(x, size=(4, 2)[at.rank]),
        project(x.view(1 + at.rank, -1, 8)),
        output(out.view(1, *((2, 16, 4), (4, 16, 2))[at.rank])),
        output(out.view(1 + at.rank, 2, -1, 4)),
    ):
        with own_group(at) as group, ficco.options(timeout_s=10):
            found.append(caught(partial(call, group)))
    return found


def test_ranks_that_differ_are_told() -> None:
    """Also where heads or batches differ, but not the sizes of operands."""
    texts = "", "", "", "size 2", "batch 2", "4 heads a rank", "batch 2"
    for rank, failures in enumerate(run(2, _unlike)):
        for turn, (failure, text) in enumerate(zip(failures, texts, strict=True)):
            alone = turn == 2 and rank == 0
            assert failure.type == ("ValueError" if alone else "RankMismatch"), failure
            assert text in failure.text
