"""Expert-parallel layers on CPU ranks: exact results and gradients, routes, faults."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from experts import Data, Layer, data, kept, part, plain, weights_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import Failure, Rank, caught, run
from torch._subclasses.fake_tensor import FakeTensorMode

import ficco
from ficco.compute import products
from ficco.ops import expert_rounds as ops
from ficco.ops.routing import Routing, _check_experts, rounded
from ficco.problems import specification

SCHEDULES = (
    "auto",
    "serial",
    "shard-overlap",
    "growing",
    "shrinking:compute=2",
    "hetero-fused-1d:pieces=2",
    "uniform-unfused-1d:pieces=2,copy=2",
    "uniform-fused-1d:pieces=1+3+3+1,copy=3,compute=2",
)


def call(at: Rank, layer: Layer, mine: Data, iteration: int = 0, **ways: Any) -> torch.Tensor:
    ways = {"activation": "relu", "capacity": 5, "split": "experts"} | ways
    up, down = own(weights_of(layer, iteration), at, ways["split"])
    indices: Any = mine.indices
    if isinstance(indices, torch.Tensor):
        indices = indices.to(at.device)
    moved = mine.tokens.to(at.device), indices, mine.weights.to(at.device)
    return ficco.experts(*moved, up.to(at.device), down.to(at.device), **ways)


def own(whole: Sequence[torch.Tensor], at: Rank, split: str) -> list[torch.Tensor]:
    """What of ``up`` and ``down`` a rank has."""
    if split == "experts":
        return [part(one, at.rank, at.world) for one in whole]
    up, down = whole
    halves = up.chunk(up.shape[2] // down.shape[1], 2)  # gate and up
    mine = [part(one.transpose(0, 2), at.rank, at.world).transpose(0, 2) for one in halves]
    rows = part(down.transpose(0, 1), at.rank, at.world).transpose(0, 1)
    return [torch.cat(mine, 2), rows.contiguous()]


def every_way(at: Rank, layer: Layer, split: str = "experts") -> None:
    for iteration, name in enumerate(SCHEDULES):
        given = data(layer, at.rank, iteration)
        for ways in (
            {"capacity": 5},
            {"capacity": 2},
            {"capacity": 3, "on_overflow": "again"},
            {"capacity": None},
        ):
            found = call(at, layer, given, iteration, schedule=name, split=split, **ways)
            drops = ways.get("on_overflow") != "again"
            wanted = plain(
                given, *weights_of(layer, iteration), ways["capacity"] if drops else None
            )
            assert found.dtype == layer.dtype and found.shape == wanted.shape
            assert torch.equal(found.cpu(), wanted.to(layer.dtype)), f"rank {at.rank} {name} {ways}"


LAYERS = {
    1: [Layer((5,)), Layer((0,), gated=True)],
    2: [
        Layer((6, 9)),
        Layer((7, 0), experts=2, top_k=1, gated=True),
        Layer((5, 5), experts=6, routes="one", dtype=torch.bfloat16, k=4, h=3),
        Layer((9, 4), 8, 2, 8, 16, 24, gated=True, dtype=torch.bfloat16),
    ],
    3: [Layer((4, 0, 7), experts=6, gated=True), Layer((0, 0, 1), experts=3, top_k=1)],
    4: [
        Layer((6, 3, 0, 9), experts=8, top_k=3),
        Layer((5, 5, 5, 5), experts=4, routes="few", gated=True),
        Layer((19, 5, 0, 8), 8, 2, 8, 16, 24, True, "few", torch.bfloat16),
        Layer((4, 4, 4, 4), experts=8, routes="one"),
        Layer((0, 0, 0, 0)),
    ],
}


# Gradients.


def gradients(at: Rank, layer: Layer, ways: dict[str, Any]) -> None:
    """Those of each rank, and of its experts, equal those of one process that has all tokens."""
    for iteration in range(2):
        mine = data(layer, at.rank, iteration).leaves()
        whole = [one.requires_grad_() for one in weights_of(layer, iteration)]
        split, losses = ways.get("split", "experts"), []
        mine_of = own([one.detach() for one in whole], at, split)
        moved = [one.to(at.device).requires_grad_() for one in mine_of]
        every = [data(layer, rank, iteration).leaves() for rank in range(at.world)]
        capacity = None if ways.get("on_overflow") == "again" else ways["capacity"]
        for rank, theirs in enumerate(every):
            made = plain(theirs, *whole, capacity)
            losses.append((made * (torch.arange(made.numel()).view_as(made) % 3 + rank)).sum())
        sum(losses).backward()
        given = [one.detach().to(at.device) for one in (mine.tokens, mine.weights)]
        tokens, weights = (one.requires_grad_() for one in given)
        found = ficco.experts(
            tokens, mine.indices.to(at.device), weights, *moved, activation="relu", **ways
        )
        factors = torch.arange(found.numel(), device=at.device).view_as(found) % 3 + at.rank
        (found * factors).sum().backward()
        up, down = own([one.grad for one in whole], at, split)
        for name, one, two in (
            ("tokens", tokens.grad, every[at.rank].tokens.grad),
            ("weights", weights.grad, every[at.rank].weights.grad),
            ("up", moved[0].grad, up),
            ("down", moved[1].grad, down),
        ):
            assert torch.equal(one.cpu(), two), f"rank {at.rank}: {name} of {layer} {ways}"


def some_gradients(at: Rank) -> None:
    """Only those that are asked for, each the same as with the others."""
    layer = Layer((4,) * at.world, experts=2 * at.world, gated=True)
    given = data(layer, at.rank)
    up, down = (part(one, at.rank, at.world) for one in weights_of(layer))
    operands = [given.tokens, given.weights, up, down]

    def made(wanted: set[int]) -> list[torch.Tensor | None]:
        ones = [one.clone().requires_grad_(i in wanted) for i, one in enumerate(operands)]
        y = ficco.experts(ones[0], given.indices, *ones[1:], capacity=4, activation="relu")
        assert y.requires_grad == bool(wanted)
        if wanted:
            y.sum().backward()
        return [one.grad for one in ones]

    every = made({0, 1, 2, 3})
    for wanted in (set(), {0}, {1}, {2}, {3}, {0, 1}, {2, 3}):
        for i, grad in enumerate(made(wanted)):
            assert (grad is None) == (i not in wanted)
            assert grad is None or torch.equal(grad, every[i])


def test_only_the_gradients_that_are_asked_for_are_computed() -> None:
    run(2, some_gradients)


def poisoned(at: Rank) -> None:
    """A token that is no number spoils the gradients of its own experts alone."""
    layer = Layer((6,) * at.world, experts=4, gated=True)
    given = data(layer, at.rank)
    given.indices[:], given.tokens[-1] = torch.tensor([1, 2]), float("nan")
    given.indices[-1] = torch.tensor([0, 3])
    up, down = (part(one, at.rank, 2).requires_grad_() for one in weights_of(layer))
    for capacity in (9, None):
        y = ficco.experts(
            given.tokens, given.indices, given.weights, up, down, capacity=capacity,
            activation="relu",
        )  # fmt: skip
        clean = 1 - at.rank  # of this rank's experts
        assert y[:-1].isfinite().all() and y[-1].isnan().all()
        for grad in torch.autograd.grad(y[:-1].sum(), (up, down)):
            assert grad[clean].isfinite().all() and grad[clean].any()


def test_a_token_that_is_no_number_spoils_its_own_experts_alone() -> None:
    run(2, poisoned)


def smooth(at: Rank, activation: str) -> None:
    """Activations and their derivatives, against float64 in one process."""
    layer = Layer((5, 3), experts=4, gated=activation != "gelu", dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    whole = [
        torch.randn(one.shape, generator=generator, dtype=torch.float64).requires_grad_()
        for one in weights_of(layer)
    ]
    every = [data(layer, rank).leaves() for rank in range(2)]
    wanted = [plain(one, *whole, 4, activation) for one in every]
    sum(one.square().sum() for one in wanted).backward()
    parts = [part(one.detach(), at.rank, 2).requires_grad_() for one in whole]
    mine = data(layer, at.rank).leaves()
    ways = {"capacity": 4, "activation": activation}
    y = ficco.experts(mine.tokens, mine.indices, mine.weights, *parts, **ways)
    y.square().sum().backward()
    # The comparison sums in float32.
    torch.testing.assert_close(y.float(), wanted[at.rank], rtol=1e-5, atol=1e-4)
    for one, two in zip(parts, whole, strict=True):
        torch.testing.assert_close(one.grad, part(two.grad, at.rank, 2), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(mine.tokens.grad, every[at.rank].tokens.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_activations_and_their_derivatives(activation: str) -> None:
    run(2, smooth, activation)


def test_every_activation_has_functions() -> None:
    assert tuple(products.ACTIVATIONS) == specification.ACTIVATIONS


class Mixture(torch.nn.Module):
    """A layer of experts between two others; with a group its experts are those of a rank."""

    def __init__(self, world: int, rank: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.head = torch.nn.Linear(12, 8), torch.nn.Linear(12, 12)
        up, down = torch.randn(8, 12, 32) / 4, torch.randn(8, 16, 12) / 4
        if rank is not None:
            up, down = part(up, rank, world), part(down, rank, world)
        self.up, self.down, self.spread = torch.nn.Parameter(up), torch.nn.Parameter(down), rank

    def forward(self, x: torch.Tensor, capacity: int) -> torch.Tensor:
        weights, indices = self.router(x).softmax(1).topk(2)
        if self.spread is None:
            made = plain(Data(x, indices, weights), self.up, self.down, capacity, "silu")
        else:
            made = ficco.experts(x, indices, weights, self.up, self.down, capacity=capacity)
        return x + self.head(made)


def trained(at: Rank) -> None:
    """Ranks that share router and head have the losses of a process that has all tokens."""
    one, all_of = Mixture(at.world, at.rank), Mixture(at.world, None)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, all_of)]
    seen: list[float] = []
    for _ in range(4):
        inputs = [
            torch.randn(20, 12, generator=torch.Generator().manual_seed(rank))
            for rank in range(at.world)
        ]
        losses = [(all_of(x, 7) - x.roll(1, 1)).square().mean() for x in inputs]
        x = inputs[at.rank]
        loss = (one(x, 7) - x.roll(1, 1)).square().mean()
        loss.backward()
        sum(losses).backward()
        for shared in (*one.router.parameters(), *one.head.parameters()):
            torch.distributed.all_reduce(shared.grad)
        # Float32, in another order of the same sums.
        torch.testing.assert_close(loss, losses[at.rank], rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen.append(loss.item())
    assert seen[-1] < seen[0]


def test_a_model_trains_with_the_losses_of_one_process() -> None:
    run(4, trained)


# Routes.


def routed(at: Rank, layer: Layer, schedule: str) -> None:
    """Every pair is served or counted as dropped."""
    given = data(layer, at.rank)
    for capacity, overflow in ((2, "drop"), (2, "again"), (None, "drop")):
        ways = {"capacity": capacity, "on_overflow": overflow}
        routing = ficco.route(given.indices, layer.experts, **ways)
        room = kept(
            given.indices, layer.experts, 2 if (capacity, overflow) == (2, "drop") else None
        )
        counts = torch.bincount(given.indices.flatten(), minlength=layer.experts)
        assert torch.equal(routing.counts, counts)
        lost = torch.bincount(given.indices[~room], minlength=layer.experts)
        assert torch.equal(routing.dropped, lost)
        found = call(
            at, layer, Data(given.tokens, routing, given.weights), capacity=None, schedule=schedule
        )
        wanted = plain(given, *weights_of(layer), 2 if lost.any() else None)
        assert torch.equal(found, wanted)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    tokens=st.tuples(*[st.integers(0, 9)] * 3),
    each=st.integers(1, 3),
    top_k=st.integers(1, 2),
    routes=st.sampled_from(["spread", "one", "few"]),
    schedule=st.sampled_from(SCHEDULES),
    gated=st.booleans(),
)
def test_any_routes(
    tokens: tuple[int, ...], each: int, top_k: int, routes: str, schedule: str, gated: bool
) -> None:
    layer = Layer(tokens, 3 * each, top_k, 4, 3, 5, gated, routes)
    run(3, routed, layer, schedule)


def again(at: Rank) -> None:
    """Kinds of calls by turns, two of them in flight, find their own rows."""
    layer = Layer((6, 3), experts=4)
    for iteration in range(12):
        given = data(layer, at.rank, iteration)
        capacity = (None, 1, 4)[iteration % 3]
        found = call(at, layer, given, iteration, capacity=capacity)
        assert torch.equal(found, plain(given, *weights_of(layer, iteration), capacity))
        a = torch.full((2, 4), float(at.rank + iteration))
        total = ficco.all_gather_matmul(a, torch.eye(4))
        assert total[0, 0] == iteration and total[2, 0] == iteration + 1


def test_calls_of_several_kinds_take_turns() -> None:
    run(2, again)


def early(at: Rank) -> None:
    """Ranks may exchange their counts before other calls."""
    layer = Layer((3, 40), experts=4)
    given = data(layer, at.rank)
    routings = [ficco.route(given.indices, 4) for _ in range(3)]
    total = ficco.all_gather_matmul(torch.ones(2, 4), torch.eye(4))
    assert total.shape == (4, 4)
    for routing in reversed(routings):
        found = call(at, layer, Data(given.tokens, routing, given.weights), capacity=None)
        assert torch.equal(found, plain(given, *weights_of(layer)))
        most = max(
            int(ficco.route(data(layer, rank).indices, 4, capacity=1).counts.max())
            for rank in range(2)
        )
        assert routing.capacity == rounded(most) > 8 and not routing.dropped.any()


def test_counts_are_exchanged_before_other_calls() -> None:
    run(2, early)


def in_turn(at: Rank) -> list[str]:
    """What a call does first: bring tokens to their rows, or wait for the counts."""
    layer, seen = Layer((9, 4), experts=4), []
    sent, settle = ops._sent, Routing.settle

    def noting_sent(*given: Any) -> Any:
        seen.append("rows")
        return sent(*given)

    def noting_settle(routing: Routing) -> None:
        seen.append("counts")
        settle(routing)

    with (
        mock.patch.object(ops, "_sent", noting_sent),
        mock.patch.object(Routing, "settle", noting_settle),
    ):
        call(at, layer, data(layer, at.rank), capacity=None)
    return seen


def test_tokens_are_on_their_way_to_their_rows_before_a_rank_waits_for_counts() -> None:
    for seen in run(2, in_turn):
        assert seen[:2] == ["rows", "counts"]


def decided(at: Rank) -> list[tuple[int, bool]]:
    """The layers for which a schedule is chosen: all tokens go to two of four experts."""
    seen: list[tuple[int, bool]] = []
    decide = ops.decide

    def noting(layer: Any, *more: Any, **how: Any) -> Any:
        seen.append((layer.capacity, layer.exact))
        return decide(layer, *more, **how)

    with mock.patch.object(ops, "decide", noting):
        layer = Layer((40, 40), experts=4, k=16, routes="one")
        for capacity in (None, 40, None):
            call(at, layer, data(layer, at.rank), capacity=capacity)
    return seen


def test_a_schedule_is_chosen_once_for_blocks_of_the_mean_size() -> None:
    assert run(2, decided) == [[(20, True), (40, False)]] * 2


# Wrong calls.


def operands(at: Rank) -> dict[str, Any]:
    layer = Layer((4,) * at.world, experts=2 * at.world)
    given = data(layer, at.rank)
    up, down = (part(one, at.rank, at.world) for one in weights_of(layer))
    fields = {"tokens": given.tokens, "indices": given.indices, "weights": given.weights}
    return {**fields, "up": up, "down": down, "capacity": 4, "activation": "relu"}


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "experts that do not exist": (
        {"indices": torch.full((4, 2), 4)},
        "ValueError",
        "0 to 3 (4 in all, for ficco.experts those of up on every rank), got 4",
    ),
    "negative experts": ({"indices": torch.full((4, 2), -1)}, "ValueError", "got -1 to -1"),
    "indices of floats": ({"indices": torch.ones(4, 2)}, "ValueError", "whole numbers"),
    "indices of other tokens": ({"indices": torch.ones(3, 2).long()}, "ValueError", "4 tokens"),
    "weights of other tokens": ({"weights": torch.ones(4, 3)}, "ValueError", "4 tokens"),
    "whole weights": ({"weights": torch.ones(4, 2).long()}, "ValueError", "floating-point"),
    "no capacity": ({"capacity": 0}, "ValueError", "at least 1 row"),
    "half a row": ({"capacity": 1.5}, "ValueError", "at least 1 row"),
    "another activation": ({"activation": "tanh"}, "ValueError", "relu, silu, gelu"),
    "another overflow": ({"on_overflow": "keep"}, "ValueError", "drop, again"),
    "up of another k": ({"up": torch.ones(2, 7, 6)}, "ValueError", "one k, h"),
    "up of another h": ({"up": torch.ones(2, 8, 7)}, "ValueError", "one k, h"),
    "down for other experts": ({"down": torch.ones(3, 6, 8)}, "ValueError", "number of experts"),
    "no experts": (
        {"up": torch.ones(0, 8, 6), "down": torch.ones(0, 6, 8)},
        "ValueError",
        "at least one expert",
    ),
    "a matrix": ({"up": torch.ones(8, 6)}, "ValueError", "reshape"),
    "another dtype": ({"down": torch.ones(2, 6, 8).half()}, "ValueError", "one dtype"),
    "whole tokens": (
        {
            "tokens": torch.ones(4, 8).int(),
            "up": torch.ones(2, 8, 6).int(),
            "down": torch.ones(2, 6, 8).int(),
        },
        "NotImplementedError",
        "int32 is not served",
    ),
    "another split": ({"split": "rows"}, "ValueError", "experts, columns"),
    "no tensor": ({"tokens": 3}, "ValueError", "torch.Tensor"),
    "another schedule": ({"schedule": "ring"}, "ValueError", "one that is ring"),
    "no schedule": ({"schedule": "fast"}, "ValueError", "required one of"),
    "a number as a schedule": ({"schedule": 3}, "ValueError", "schedule"),
}


def wrong(at: Rank, what: str) -> Failure:
    """Refused everywhere, and the group goes on."""
    changes, *_ = WRONG[what]
    failure = caught(partial(ficco.experts, **(operands(at) | changes)))
    right = ficco.experts(**operands(at))
    assert right.shape == (4, 8)
    return failure


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_call_is_refused_on_every_rank(what: str) -> None:
    _, kind, text = WRONG[what]
    for failure in run(2, wrong, what):
        assert failure.type == kind and text in failure.text, failure.text
        assert "required" in failure.text or kind == "NotImplementedError"


def one_wrong(at: Rank, what: str) -> Failure:
    changes = WRONG[what][0] if at.rank else {}
    return caught(partial(ficco.experts, **(operands(at) | changes)))


@pytest.mark.parametrize(
    "what",
    ["experts that do not exist", "weights of other tokens", "no capacity", "up of another k"],
)
def test_a_rank_that_refuses_tells_the_others(what: str) -> None:
    first, second = run(2, one_wrong, what, fresh=True)
    assert second.type == WRONG[what][1]
    assert first.type == "RankMismatch" and WRONG[what][2] in first.text


def differ(at: Rank, changes: dict[str, list[Any]]) -> Failure:
    mine = {name: values[at.rank] for name, values in changes.items()}
    return caught(partial(ficco.experts, **(operands(at) | mine)))


@pytest.mark.parametrize(
    "changes",
    [
        {"capacity": [4, 5]},
        {"activation": ["relu", "silu"]},
        {"schedule": ["serial", "growing"]},
        {"capacity": [None, 4]},
        {"on_overflow": ["drop", "again"]},
        {"down": [torch.ones(2, 6, 8), torch.ones(2, 6, 9)]},
        {"up": [torch.ones(2, 8, 6), torch.ones(2, 8, 6).requires_grad_()]},
        {"split": ["experts", "columns"], "indices": [torch.zeros(4, 2).long()] * 2},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_ranks_that_differ_are_named(changes: dict[str, list[Any]]) -> None:
    for failure in run(2, differ, changes, fresh=True):
        assert failure.type == "RankMismatch", failure.text


def refused_routings(at: Rank) -> list[Failure]:
    given = operands(at)
    routing = ficco.route(given["indices"], 4, capacity=4)
    other = ficco.route(given["indices"] * 0, 6, capacity=4)
    twice = given | {"indices": routing}
    return [
        caught(partial(ficco.experts, **twice)),
        caught(partial(ficco.experts, **(twice | {"indices": other, "capacity": None}))),
        caught(partial(ficco.route, given["indices"], 0, capacity=4)),
        caught(partial(ficco.route, given["indices"].tolist(), 4, capacity=4)),
    ]


def test_a_routing_that_does_not_fit_is_refused() -> None:
    texts = (
        "required none with a routing",
        "6 experts in all",
        "at least 1 in all",
        "torch.Tensor",
    )
    for failures in run(2, refused_routings):
        for failure, text in zip(failures, texts, strict=True):
            assert failure.type == "ValueError" and text in failure.text


def of_another_group(at: Rank) -> list[Any]:
    given, other = operands(at), dist.new_group(list(range(at.world)))
    indices = given.pop("indices")
    del given["capacity"]
    exact = ficco.route(indices, 4, group=other)
    limited = ficco.route(indices, 4, capacity=4, group=other)  # has asked nobody
    found = [caught(lambda: ficco.experts(indices=exact, **given))]
    found.append(ficco.experts(indices=limited, **given).shape)
    return found


def test_a_routing_of_another_group_is_refused() -> None:
    for failure, shape in run(2, of_another_group, fresh=True):
        assert failure.type == "ValueError" and "another group" in failure.text, failure
        assert isinstance(shape, torch.Size)


def out_of_memory(at: Rank, step: str, needs: bool) -> Any:
    given = operands(at)
    given["tokens"].requires_grad_()

    def layer() -> None:
        out = ficco.experts(**given)
        if needs:
            out.sum().backward()

    layer()
    failing = mock.patch.object(ops, step, side_effect=RuntimeError("out of memory"))
    with ficco.options(timeout_s=30):
        if at.rank:
            return caught(layer)
        with failing:
            return caught(layer)


@pytest.mark.parametrize(
    ("step", "needs"), [("_sent", False), ("_leaving", True), ("_derived", True)]
)
def test_a_rank_without_memory_tells_the_others(step: str, needs: bool) -> None:
    one, other = run(2, out_of_memory, step, needs, fresh=True)
    assert "out of memory" in one.text
    assert other.type == "RankMismatch" and "out of memory" in other.text, other


def far(at: Rank) -> list[str]:
    """What is said of experts that do not exist."""
    given = operands(at) | {"indices": torch.full((4, 2), 7)}
    columns = {"up": torch.ones(3, 8, 3), "down": torch.ones(3, 3, 8), "split": "columns"}
    said = [
        caught(partial(ficco.experts, **(given | {"capacity": None}))).text,
        caught(partial(ficco.experts, **(given | columns))).text,
        caught(partial(ficco.route, given["indices"], 5, capacity=4)).text,
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_assert_async", lambda cond, text: said.append(text))
        _check_experts(torch.full((4, 2), 7, device="meta"), 5)
    return said


def test_where_the_number_of_experts_is_from_is_told() -> None:
    for said in run(2, far):
        for text, experts in zip(said, (4, 3, 5, 5), strict=True):
            assert text.startswith(
                f"indices: required experts from 0 to {experts - 1} ({experts} in all, for "
                "ficco.experts those of up on every rank)"
            )
        assert all("got 7 to 7; pass the choices of a router" in text for text in said[:3])


def closed_between(at: Rank) -> list[Failure]:
    """Routings that outlive the workspace in which they were made."""
    given, found = operands(at), []
    indices, group = given.pop("indices"), dist.new_group()
    given["group"] = group
    del given["capacity"]
    wanted = ficco.experts(indices=indices, **given)
    for how in ({}, {"capacity": 2, "on_overflow": "again"}):
        waits, used = (ficco.route(indices, 4, group=group, **how) for _ in range(2))
        assert used.capacity
        ficco.close(group)
        for _ in range(2):
            found.append(caught(lambda r=waits: ficco.experts(indices=r, **given)))
        assert torch.equal(ficco.experts(indices=used, **given), wanted)
        again = ficco.route(indices, 4, group=group, **how)
        assert torch.equal(ficco.experts(indices=again, **given), wanted)
    ficco.close(group)
    dist.destroy_process_group(group)
    return found


def test_a_routing_of_a_closed_workspace_says_to_route_again() -> None:
    for failures in run(2, closed_between):
        assert len(failures) == 4
        for failure in failures:
            assert failure.type == "FiccoError" and failure.text.startswith("routing: required one")
            assert failure.text.endswith("call ficco.route again")


def compiled(at: Rank) -> list[Failure]:
    """An exact routing is a graph break in compiled code; refused where tensors have no data, and
    where there may be no break."""
    given = operands(at)
    tokens, indices = given.pop("tokens").requires_grad_(), given.pop("indices")
    del given["capacity"]

    def layer(x: torch.Tensor) -> torch.Tensor:
        routing = ficco.route(indices, 4)
        return ficco.experts(x * 2, routing, **given) + 1

    found, wanted = torch.compile(layer, backend="eager")(tokens), layer(tokens)
    assert torch.equal(found, wanted)
    grads = [torch.autograd.grad(one.sum(), tokens)[0] for one in (found, wanted)]
    assert torch.equal(*grads)
    torch._dynamo.reset()
    whole = caught(lambda: torch.compile(layer, backend="eager", fullgraph=True)(tokens))
    with FakeTensorMode():
        return [whole, caught(partial(ficco.route, torch.ones(4, 2, dtype=torch.int64), 4))]


def test_an_exact_routing_is_a_graph_break() -> None:
    for whole, fake in run(2, compiled):
        assert whole.type == "Unsupported" and "make_routing" in whole.text
        assert fake.type == "NotImplementedError" and "pass indices" in fake.text


def absent(at: Rank) -> Failure | None:
    given = operands(at)
    for _ in range(2):  # one on each slot
        ficco.experts(**given)
    if at.rank:
        return None
    with ficco.options(timeout_s=1):
        return caught(partial(ficco.experts, **given))


def test_a_rank_that_does_not_come_is_named() -> None:
    failure, _ = run(2, absent, fresh=True)
    assert failure.type == "SignalTimeout" and failure.fields["peer"] == 1
    assert failure.text.startswith("experts: rank 0 waited") and "for rank 1" in failure.text


def silent(at: Rank) -> Failure | None:
    """No routing of its own: the others wait for its numbers."""
    given = operands(at)
    ficco.experts(**given)
    if at.rank:
        return None
    with ficco.options(timeout_s=1):
        return caught(lambda: ficco.route(given["indices"], 4).capacity)


def test_a_rank_that_tells_nothing_is_named() -> None:
    failure, _ = run(2, silent, fresh=True)
    assert failure.type == "SignalTimeout" and failure.fields["peer"] == 1
    assert "for rank 1 at step 'agree on what to compute';" in failure.text


def autocast(at: Rank) -> None:
    given = operands(at)
    with torch.autocast("cpu", torch.bfloat16):
        found = ficco.experts(**given)
    assert found.dtype == torch.bfloat16
    given |= {name: given[name].bfloat16() for name in ("tokens", "up", "down")}
    assert torch.equal(found, ficco.experts(**given))


def test_autocast_casts_tokens_and_experts() -> None:
    run(2, autocast)


def bounded(at: Rank) -> Failure:
    with ficco.options(workspace_bytes=512):
        failure = caught(partial(ficco.experts, **operands(at)))
    with ficco.options(workspace_bytes=1 << 20):
        ficco.experts(**operands(at))
    return failure


def test_memory_is_bounded() -> None:
    for failure in run(2, bounded):
        assert failure.type == "ValueError" and "workspace_bytes" in failure.text
