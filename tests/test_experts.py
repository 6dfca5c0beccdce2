"""Expert-parallel layers on CPU ranks: exact results and gradients, routes, faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from cases import own_group
from experts import Data, Layer, data, part, plain, weights_of, within_capacity
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Rank, caught, on_ranks, run
from subjects import SUBJECTS
from torch._subclasses.fake_tensor import FakeTensorMode

import ficco
from ficco.compute import products
from ficco.ops import experts as ops
from ficco.ops.routing import Routing, rounded
from ficco.problems import specification
from ficco.runtime import workspace

SCHEDULES = SUBJECTS["experts"].schedules(2)


def call(at: Rank, layer: Layer, inputs: Data, iteration: int = 0, **options: Any) -> torch.Tensor:
    options = {"activation": "relu", "capacity": 5, "split": "experts"} | options
    up, down = own(weights_of(layer, iteration), at, options["split"])
    indices: Any = inputs.indices
    if isinstance(indices, torch.Tensor):
        indices = indices.to(at.device)
    moved = inputs.tokens.to(at.device), indices, inputs.weights.to(at.device)
    return ficco.experts(*moved, up.to(at.device), down.to(at.device), **options)


def own(whole: Sequence[torch.Tensor], at: Rank, split: str) -> list[torch.Tensor]:
    """Return this rank's parts of ``up`` and ``down``."""
    if split == "experts":
        return [part(weight, at.rank, at.world) for weight in whole]
    up, down = whole
    halves = up.chunk(up.shape[2] // down.shape[1], 2)  # gate and up
    parts = [part(weight.transpose(0, 2), at.rank, at.world).transpose(0, 2) for weight in halves]
    rows = part(down.transpose(0, 1), at.rank, at.world).transpose(0, 1)
    return [torch.cat(parts, 2), rows.contiguous()]


def every_way(at: Rank, layer: Layer, split: str = "experts") -> None:
    for iteration, name in enumerate(SCHEDULES):
        inputs = data(layer, at.rank, iteration)
        again = {"capacity": 3, "on_overflow": "again"}
        for options in ({"capacity": 5}, {"capacity": 2}, again, {"capacity": None}):
            y = call(at, layer, inputs, iteration, schedule=name, split=split, **options)
            drops = options.get("on_overflow") != "again"
            limit = options["capacity"] if drops else None
            wanted = plain(inputs, *weights_of(layer, iteration), limit)
            assert y.dtype == layer.dtype and y.shape == wanted.shape
            assert torch.equal(y.cpu(), wanted.to(layer.dtype)), f"rank {at.rank} {name} {options}"


#: Layers whose tokens go to few experts, by the number of ranks.
LAYERS = {
    2: [Layer((5, 5), experts=6, routes="one", dtype=torch.bfloat16, k=4, h=3)],
    4: [
        Layer((5, 5, 5, 5), experts=4, routes="few", gated=True),
        Layer((19, 5, 0, 8), 8, 2, 8, 16, 24, True, "few", torch.bfloat16),
        Layer((4, 4, 4, 4), experts=8, routes="one"),
    ],
}


@on_ranks(2)
def test_a_nan_token_affects_only_its_own_experts(at: Rank) -> None:
    layer = Layer((6,) * at.world, experts=4, gated=True)
    inputs = data(layer, at.rank)
    inputs.indices[:], inputs.tokens[-1] = torch.tensor([1, 2]), float("nan")
    inputs.indices[-1] = torch.tensor([0, 3])
    up, down = (part(weight, at.rank, 2).requires_grad_() for weight in weights_of(layer))
    for capacity in (9, None):
        arguments: Any = {"capacity": capacity, "activation": "relu"}
        y = ficco.experts(*vars(inputs).values(), up, down, **arguments)
        clean = 1 - at.rank  # the index of the expert whose gradient is finite
        assert y[:-1].isfinite().all() and y[-1].isnan().all()
        for grad in torch.autograd.grad(y[:-1].sum(), (up, down)):
            assert grad[clean].isfinite().all() and grad[clean].any()


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@on_ranks(2)
def test_activations_and_their_derivatives(at: Rank, activation: str) -> None:
    """Compare with float64 in one process."""
    layer = Layer((5, 3), experts=4, gated=activation != "gelu", dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    whole = [
        torch.randn(weight.shape, generator=generator, dtype=torch.float64).requires_grad_()
        for weight in weights_of(layer)
    ]
    inputs = [data(layer, rank).leaves() for rank in range(2)]
    wanted = [plain(rows, *whole, 4, activation) for rows in inputs]
    sum(result.square().sum() for result in wanted).backward()
    parts = [part(weight.detach(), at.rank, 2).requires_grad_() for weight in whole]
    own = data(layer, at.rank).leaves()
    y = ficco.experts(*vars(own).values(), *parts, capacity=4, activation=activation)
    y.square().sum().backward()
    for result, want in (
        (y, wanted[at.rank]),
        *((p.grad, part(w.grad, at.rank, 2)) for p, w in zip(parts, whole, strict=True)),
        (own.tokens.grad, inputs[at.rank].tokens.grad),
    ):
        torch.testing.assert_close(result, want)


def test_every_activation_has_functions() -> None:
    assert tuple(products.ACTIVATIONS) == specification.ACTIVATIONS


def routed(at: Rank, layer: Layer, schedule: str) -> None:
    """Every pair is served or counted as dropped."""
    batch = data(layer, at.rank)
    for capacity, overflow in ((2, "drop"), (2, "again"), (None, "drop")):
        limits = {"capacity": capacity, "on_overflow": overflow}
        routing = ficco.route(chosen := batch.indices.clone(), layer.experts, **limits)
        chosen.zero_()  # the routing keeps its own
        most = 2 if (capacity, overflow) == (2, "drop") else None
        served = within_capacity(batch.indices, layer.experts, most)
        counts = torch.bincount(batch.indices.flatten(), minlength=layer.experts)
        assert torch.equal(routing.counts, counts)
        lost = torch.bincount(batch.indices[~served], minlength=layer.experts)
        assert torch.equal(routing.dropped, lost)
        rows = Data(batch.tokens, routing, batch.weights)
        y = call(at, layer, rows, capacity=None, schedule=schedule)
        wanted = plain(batch, *weights_of(layer), 2 if lost.any() else None)
        assert torch.equal(y, wanted)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_routes(data: st.DataObject) -> None:
    tokens = data.draw(st.tuples(*[st.integers(0, 9)] * 3))
    each, top_k = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    routes, gated = data.draw(st.sampled_from(["spread", "one", "few"])), data.draw(st.booleans())
    layer = Layer(tokens, 3 * each, top_k, 4, 3, 5, gated, routes)
    run(3, routed, layer, data.draw(st.sampled_from(SCHEDULES)))


@on_ranks(2)
def test_counts_are_exchanged_before_other_calls(at: Rank) -> None:
    layer = Layer((3, 40), experts=4)
    inputs = data(layer, at.rank)
    routings = [ficco.route(inputs.indices, 4) for _ in range(3)]
    total = ficco.all_gather_matmul(torch.ones(2, 4), torch.eye(4))
    assert total.shape == (4, 4)
    for routing in reversed(routings):
        y = call(at, layer, Data(inputs.tokens, routing, inputs.weights), capacity=None)
        assert torch.equal(y, plain(inputs, *weights_of(layer)))
        capped = (ficco.route(data(layer, rank).indices, 4, capacity=1) for rank in range(2))
        most = max(int(each.counts.max()) for each in capped)
        assert routing.capacity == rounded(most) > 8 and not routing.dropped.any()


@on_ranks(2)
def test_tokens_leave_before_the_counts_and_a_schedule_is_chosen_once(at: Rank) -> None:
    """A call copies tokens to their rows, then waits for the counts. If all tokens go to two of
    four experts, the schedule is chosen for the mean count of rows."""
    notes: list[Any] = []

    def noting(target: Any, name: str, note: Callable[[Any], Any]) -> Any:
        wrapped = getattr(target, name)

        def noted(subject: Any, *args: Any, **kwargs: Any) -> Any:
            notes.append(note(subject))
            return wrapped(subject, *args, **kwargs)

        return mock.patch.object(target, name, noted)

    rows = noting(ops, "_dispatched", lambda _: "rows")
    with rows, noting(Routing, "settle", lambda _: "counts"):
        layer = Layer((9, 4), experts=4)
        call(at, layer, data(layer, at.rank), capacity=None)
    assert notes[:2] == ["rows", "counts"]
    notes.clear()
    with noting(workspace, "decide", lambda layer: (layer.capacity, layer.exact)):
        layer = Layer((40, 40), experts=4, k=16, routes="one")
        for capacity in (None, 40, None):
            call(at, layer, data(layer, at.rank), capacity=capacity)
    assert notes == [(20, True), (40, False)]


SHAPES = {"tokens": (4, 8), "up": (2, 8, 6), "down": (2, 6, 8)}


def operands(at: Rank) -> dict[str, Any]:
    layer = Layer((4,) * at.world, experts=2 * at.world)
    inputs = data(layer, at.rank)
    up, down = own(weights_of(layer), at, "experts")
    return {**vars(inputs), "up": up, "down": down, "capacity": 4, "activation": "relu"}


#: Changes to a valid call, and a part of the error.
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"indices": torch.full((4, 2), 4)},
        "0 to 3 (4 in all; for ficco.experts, the experts of up on all ranks), got 4",
    ),
    ({"indices": torch.full((4, 2), -1)}, "got -1 to -1"),
    ({"indices": torch.ones(4, 2)}, "whole numbers"),
    ({"indices": torch.ones(3, 2).long()}, "4 tokens"),
    ({"weights": torch.ones(4, 3)}, "4 tokens"),
    ({"weights": torch.ones(4, 2).long()}, "floating-point"),
    ({"capacity": 0}, "at least 1 row"),
    ({"capacity": 1.5}, "at least 1 row"),
    ({"capacity": 10**20}, "at most 274877906944 for each of 4 experts"),
    ({"indices": torch.ones(4, 2).to(torch.uint16)}, "whole numbers"),
    ({"activation": "tanh"}, "relu, silu, gelu"),
    ({"activation": ["relu"]}, "relu, silu, gelu"),
    ({"up": torch.ones(2, 8, 6).to_sparse()}, "up: sparse tensors are not served"),
    ({"indices": torch.ones(4, 2).long().to_sparse()}, "indices: sparse tensors are not served"),
    ({"on_overflow": "keep"}, "drop, again"),
    ({"up": torch.ones(2, 7, 6)}, "one k, h"),
    ({"up": torch.ones(2, 8, 7)}, "one k, h"),
    ({"down": torch.ones(3, 6, 8)}, "number of experts"),
    ({"up": torch.ones(0, 8, 6), "down": torch.ones(0, 6, 8)}, "at least one expert"),
    ({"up": torch.ones(8, 6)}, "reshape"),
    ({"down": torch.ones(2, 6, 8).half()}, "one dtype"),
    ({name: torch.ones(*shape).int() for name, shape in SHAPES.items()}, "int32 is not served"),
    ({"split": "rows"}, "experts, columns"),
    ({"tokens": 3}, "torch.Tensor"),
    ({"schedule": "ring"}, "one that is ring"),
    ({"schedule": "fast"}, "required one of"),
    ({"schedule": [3]}, "schedule: required a name"),
]


@on_ranks(2)
def test_a_wrong_call_is_refused_on_every_rank(at: Rank) -> None:
    """The group stays usable."""
    for changes, text in WRONG:
        failure = caught(partial(ficco.experts, **(operands(at) | changes)))
        kind = "NotImplementedError" if "not served" in text else "ValueError"
        assert failure.type == kind and text in failure.text, failure
        assert "required" in failure.text or kind == "NotImplementedError"
        assert ficco.experts(**operands(at)).shape == (4, 8)


DIFFERENT: list[dict[str, list[Any]]] = [
    {"capacity": [4, 5]},
    {"activation": ["relu", "silu"]},
    {"schedule": ["serial", "growing"]},
    {"capacity": [None, 4]},
    {"on_overflow": ["drop", "again"]},
    {"down": [torch.ones(2, 6, 8), torch.ones(2, 6, 9)]},
    {"up": [torch.ones(2, 8, 6), torch.ones(2, 8, 6).requires_grad_()]},
    {"split": ["experts", "columns"], "indices": [torch.zeros(4, 2).long()] * 2},
]


@on_ranks(2)
def test_ranks_that_differ_are_named(at: Rank) -> None:
    for changes in DIFFERENT:
        own = {name: values[at.rank] for name, values in changes.items()}
        with own_group(at) as group:
            arguments = operands(at) | own | {"group": group}
            failure = caught(partial(ficco.experts, **arguments))
        assert failure.type == "RankMismatch", (changes, failure)


@on_ranks(2)
def test_routings_that_cannot_serve_are_refused(at: Rank) -> None:
    """Routings with other sizes, of another group, or of a workspace that has been closed."""
    arguments = operands(at)
    indices = arguments["indices"]
    routing = ficco.route(indices, 4, capacity=4)
    other = ficco.route(indices * 0, 6, capacity=4)
    twice = arguments | {"indices": routing}
    failures = [
        caught(partial(ficco.experts, **twice)),
        caught(partial(ficco.experts, **(twice | {"indices": other, "capacity": None}))),
        caught(partial(ficco.route, indices, 0, capacity=4)),
        caught(partial(ficco.route, indices.tolist(), 4, capacity=4)),
    ]
    del arguments["capacity"], arguments["indices"]
    with own_group(at) as group:
        exact = ficco.route(indices, 4, group=group)
        limited = ficco.route(indices, 4, capacity=4, group=group)  # needs no counts of peers
        failures.append(caught(lambda: ficco.experts(indices=exact, **arguments)))
        assert ficco.experts(indices=limited, **arguments).shape == (4, 8)
    with own_group(at) as group:
        arguments["group"] = group
        wanted = ficco.experts(indices=indices, **arguments)
        for limits in ({}, {"capacity": 2, "on_overflow": "again"}):
            waits, used = (ficco.route(indices, 4, group=group, **limits) for _ in range(2))
            assert used.capacity
            ficco.close(group)
            for _ in range(2):
                failures.append(caught(lambda r=waits: ficco.experts(indices=r, **arguments)))
            for routing in (used, ficco.route(indices, 4, group=group, **limits)):
                assert torch.equal(ficco.experts(indices=routing, **arguments), wanted)
    texts = (
        *("required none with a routing", "6 experts in all", "at least 1 in all", "torch.Tensor"),
        *("another group", *["call ficco.route again"] * 4),
    )
    for failure, text in zip(failures, texts, strict=True):
        closed = "again" in text
        assert failure.type == ("FiccoError" if closed else "ValueError"), failure
        assert text in failure.text, failure
        assert not closed or failure.text.startswith("routing: required one")


@on_ranks(2)
def test_a_rank_without_memory_tells_the_others(at: Rank) -> None:
    for step in ("_dispatched", "_weighted_rows", "_activation_backward"):
        with own_group(at) as group, ficco.options(timeout_s=30):
            arguments = operands(at) | {"group": group}
            arguments["tokens"].requires_grad_()

            def layer() -> None:
                out = ficco.experts(**arguments)  # noqa: B023
                if step != "_dispatched":  # noqa: B023
                    out.sum().backward()

            layer()
            error = None if at.rank else RuntimeError("out of memory")
            with mock.patch.object(ops, step, wraps=getattr(ops, step), side_effect=error):
                failure = caught(layer)
        assert "out of memory" in failure.text, failure
        assert failure.type == ("RankMismatch" if at.rank else "RuntimeError"), failure


@on_ranks(2)
def test_an_exact_routing_is_a_graph_break(at: Rank) -> None:
    """``fullgraph=True`` and fake tensors, which have no data, are refused."""
    arguments = operands(at)
    tokens, indices = arguments.pop("tokens").requires_grad_(), arguments.pop("indices")
    del arguments["capacity"]

    def layer(x: torch.Tensor) -> torch.Tensor:
        routing = ficco.route(indices, 4)
        return ficco.experts(x * 2, routing, **arguments) + 1

    y, wanted = torch.compile(layer, backend="eager")(tokens), layer(tokens)
    assert torch.equal(y, wanted)
    grads = [torch.autograd.grad(result.sum(), tokens)[0] for result in (y, wanted)]
    assert torch.equal(*grads)
    torch._dynamo.reset()
    whole = caught(lambda: torch.compile(layer, backend="eager", fullgraph=True)(tokens))
    with FakeTensorMode():
        fake = caught(partial(ficco.route, torch.ones(4, 2, dtype=torch.int64), 4))
    assert whole.type == "Unsupported" and "make_routing" in whole.text
    assert fake.type == "NotImplementedError" and "pass indices" in fake.text


@on_ranks(2)
def test_a_rank_that_sends_no_counts_is_named(at: Rank) -> None:
    """One rank makes no routing; its peer waits for its counts."""
    arguments = operands(at)
    with own_group(at) as group:
        ficco.experts(**arguments, group=group)
        if at.rank == 0:
            with ficco.options(timeout_s=1):
                routing = ficco.route(arguments["indices"], 4, group=group)
                failure, again = (caught(lambda: routing.capacity) for _ in range(2))
            assert "an earlier call of this group failed" in again.text, again
            assert failure.type == "SignalTimeout" and failure.fields["peer"] == 1
            assert "for rank 1 at step 'agree on what to compute';" in failure.text


@on_ranks(2)
def test_autocast_and_a_cap_on_memory(at: Rank) -> None:
    """Autocast casts tokens and weights. ``workspace_bytes`` bounds the memory."""
    arguments = operands(at)
    with torch.autocast("cpu", torch.bfloat16):
        y = ficco.experts(**arguments)
    assert y.dtype == torch.bfloat16
    arguments |= {name: arguments[name].bfloat16() for name in ("tokens", "up", "down")}
    assert torch.equal(y, ficco.experts(**arguments))
    with ficco.options(workspace_bytes=512):
        failure = caught(partial(ficco.experts, **operands(at)))
    with ficco.options(workspace_bytes=1 << 20):
        ficco.experts(**operands(at))
    assert failure.type == "ValueError" and "workspace_bytes" in failure.text
