"""A call that one rank refuses before the call has a number: its peers learn of it at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Failure, Rank, caught, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import ficco
import ficco.nn
from ficco.nn import functional as layers
from ficco.runtime.workspace import workspaces

#: Seconds that a call may wait for a peer: a test that has to wait so long fails.
PATIENCE_S = 20.0
#: Seconds in which the peers learn of a refusal, on a busy machine.
AT_ONCE_S = 8.0

Call = Callable[[], Any]


def _functions(world: int, group: Any) -> dict[str, tuple[Call, Call, str]]:
    """By name: a call, one that is refused, and a word of the refusal."""
    where = {"group": group}
    x, weight = torch.ones(4, 8), torch.ones(3, 8)
    whole = torch.ones(4 * world, 8)
    q = torch.ones(1, 2 * world, 3, 8)
    up, down = torch.ones(2, 8, 12), torch.ones(2, 6, 8)
    index, one = torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
    tokens = torch.ones(3, 8)
    heads = torch.ones(world * 8, 8)
    project = partial(ficco.ulysses_project, k_weight=heads, v_weight=heads, **where)
    linears, scattered = layers.gathered_linears, layers.scattered_linear
    experts = partial(ficco.experts, weights=one, up=up, down=down, **where)

    def block(shard: Any) -> None:
        with ficco.arriving(shard, **where) as rows:
            rows.wait(0)

    def product(**more: Any) -> torch.Tensor:
        return ficco.all_gather_matmul(x, weight.t(), **where, **more)

    return {
        "operator": (product, partial(product, scale_b=1.0), "scale_a"),
        "operator, no tensor": (
            product,
            lambda: ficco.all_gather_matmul(None, weight.t(), **where),
            "a_shard",
        ),
        "empty": (
            lambda: ficco.empty((3, 4), **where),
            lambda: ficco.empty((3, -4), **where),
            "shape",
        ),
        "gathered_linears": (
            lambda: linears(x, (weight,), (None,), **where),
            lambda: linears(x, (weight,), (None,), rows=[3] * world, **where),
            "rows",
        ),
        "scattered_linear": (
            lambda: scattered(whole, weight, **where),
            lambda: scattered(whole[1:], weight, **where),
            "share equally",
        ),
        "reduced_linear": (
            lambda: layers.reduced_linear(x, weight, **where),
            lambda: layers.reduced_linear(x, weight, recipe="fast", **where),
            "recipe",
        ),
        "copied_linears": (
            product,  # the forward of these layers exchanges nothing: the next call does
            lambda: layers.copied_linears(x, (weight,), (None,), recipe="fast", **where),
            "recipe",
        ),
        "experts": (
            lambda: experts(tokens, index),
            lambda: experts(tokens, index.float()),
            "indices",
        ),
        "experts, no tensor": (
            lambda: experts(tokens, index),
            lambda: experts(tokens, [[0]] * 3),
            "indices",
        ),
        "route": (
            lambda: ficco.route(index, 4, **where).capacity,
            lambda: ficco.route(index, 0, **where),
            "experts",
        ),
        "attention": (
            lambda: ficco.all_gather_attention(q, q, q, **where),
            lambda: ficco.all_gather_attention(q, q, None, **where),
            "v_shard",
        ),
        "ulysses": (
            lambda: ficco.ulysses_attention(q, q, q, **where),
            lambda: ficco.ulysses_attention(q, None, q, **where),
            "k: required",
        ),
        "project": (
            lambda: project(tokens[None], heads, size=8),
            lambda: project(tokens[None], heads, size=0),
            "size",
        ),
        "output": (
            lambda: ficco.ulysses_output(
                torch.ones(1, 1, world, 8), heads[:8].repeat(1, world), **where
            ),
            lambda: ficco.ulysses_output(
                torch.ones(1, 1, world, 8), heads[:8].repeat(1, world)[0], **where
            ),
            "weight",
        ),
        "arriving": (lambda: block(x), lambda: block(x.clone().requires_grad_()), "no gradient"),
    }


def _modules(world: int, group: Any) -> dict[str, tuple[Call, Call, str]]:
    column = ficco.nn.ColumnParallelLinear(8, 4 * world, group=group)
    row = ficco.nn.RowParallelLinear(4 * world, 8, group=group)
    attention = ficco.nn.UlyssesAttention(8 * world, world, group=group)
    x, whole, part = torch.ones(4, 8), torch.ones(4 * world, 4), torch.ones(1, 3, 8 * world)
    return {
        "column, features": (lambda: column(x), lambda: column(x[:, 1:]), "this rank's part"),
        "column, no tensor": (lambda: column(x), lambda: column(None), "torch.Tensor"),
        "row, features": (lambda: row(whole), lambda: row(whole[:, 1:]), "this rank's columns"),
        "row, odd sequence": (lambda: row(whole), lambda: row(whole[1:]), "share equally"),
        "gather_once": (
            lambda: ficco.nn.gather_once(x, column, column),
            lambda: ficco.nn.gather_once(x, column, row),
            "ColumnParallelLinear layers",
        ),
        "attention layer": (
            lambda: attention(part),
            lambda: attention(part[0]),
            "x: required",
        ),
    }


def _styles(world: int) -> dict[str, tuple[Call, Call, str]]:
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (world,))
    style = ficco.nn.ColwiseParallel(input_layouts=Shard(0))
    layer = parallelize_module(torch.nn.Linear(8, 4 * world), mesh, style)
    x = torch.ones(4, 8)
    return {"style": (lambda: layer(x), lambda: layer(x[0, 0]), "")}


def _one_refuses(at: Rank, name: str, kind: str, odd: int, warm: bool) -> dict[str, Any]:
    group = dist.new_group(list(range(at.world)))
    if kind == "style":
        calls = _styles(at.world)
        group = dist.group.WORLD
    else:
        calls = {"function": _functions, "module": _modules}[kind](at.world, group)
    good, bad, _ = calls[name]
    if warm:
        good()
    before = _numbered(group)
    with ficco.options(timeout_s=PATIENCE_S):
        begin = time.monotonic()
        first = caught(bad if at.rank == odd else good)
        seconds = time.monotonic() - begin
    numbered = _numbered(group) - before
    at.barrier()
    ficco.close()
    at.barrier()
    usable = not isinstance(caught(good), Failure)
    both = [caught(bad), caught(bad)]  # by all ranks alike, which breaks nothing
    still = not isinstance(caught(good), Failure)
    ficco.close()
    return {
        "first": first,
        "seconds": seconds,
        "usable": usable and still,
        "alike": [one.type for one in both if isinstance(one, Failure)],
        "numbered": numbered,
    }


def _numbered(group: Any) -> int:
    """Calls that this rank has made in a group, those that it has refused included."""
    return sum(workspace.calls for workspace in workspaces(group))


FUNCTIONS = list(_functions(2, None))
MODULES = (
    "column, features",
    "column, no tensor",
    "row, features",
    "row, odd sequence",
    "gather_once",
    "attention layer",
)


def _assert_told(found: list[dict[str, Any]], odd: int, word: str) -> None:
    own = found[odd]["first"]
    assert isinstance(own, Failure) and own.type not in ("RankMismatch", "SignalTimeout"), own
    assert word in own.text, own
    # Told once, however many entries the refusal has come through.
    assert found[odd]["numbered"] == 1, found[odd]
    for rank, mine in enumerate(found):
        assert mine["seconds"] < AT_ONCE_S, (rank, mine)
        assert mine["usable"] and mine["alike"] == [own.type] * 2, (rank, mine)
        if rank != odd:
            first = mine["first"]
            assert isinstance(first, Failure) and first.type == "RankMismatch", (rank, first)
            said = first.fields["values"][odd]
            assert said.startswith(f"{own.type}: ") and own.text.splitlines()[0] in said, first


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_one_rank_refuses(name: str, warm: bool) -> None:
    odd = len(name) % 2
    _assert_told(
        run(2, _one_refuses, name, "function", odd, warm), odd, _functions(2, None)[name][2]
    )


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
@pytest.mark.parametrize("name", MODULES)
def test_a_layer_that_one_rank_refuses(name: str, warm: bool) -> None:
    _assert_told(run(2, _one_refuses, name, "module", 1, warm), 1, "required")


def test_a_style_that_one_rank_refuses() -> None:
    _assert_told(run(2, _one_refuses, "style", "style", 1, True), 1, "")


def _without_a_workspace(at: Rank) -> Any:
    """A refusal of which no rank can be told: it is raised at once, and the group is usable."""
    group = dist.new_group(list(range(at.world)))
    begin = time.monotonic()
    refused = caught(lambda: ficco.all_gather_matmul(None, None, group=group))  # type: ignore
    seconds = time.monotonic() - begin
    product = ficco.all_gather_matmul(torch.ones(4, 8), torch.ones(8, 3), group=group)
    ficco.close(group)
    dist.destroy_process_group(group)
    return refused, seconds, bool((product == 8).all())


def test_a_first_call_without_a_tensor_is_refused_at_once() -> None:
    for refused, seconds, right in run(2, _without_a_workspace):
        assert refused.type == "ValueError" and seconds < AT_ONCE_S and right


def _while_traced(at: Rank) -> Any:
    """A refusal of fake tensors concerns no peer."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    group = dist.new_group(list(range(at.world)))
    x, b = torch.ones(4, 8), torch.ones(8, 3)
    ficco.all_gather_matmul(x, b, group=group)
    before = _numbered(group)
    refused = None
    if at.rank:
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x)
            refused = caught(lambda: ficco.all_gather_matmul(fake, fake, group=group))
    product = ficco.all_gather_matmul(x, b, group=group)
    after = _numbered(group)
    ficco.close(group)
    dist.destroy_process_group(group)
    return refused, after - before, bool((product == 8).all())


def test_a_refusal_of_fake_tensors_is_not_told() -> None:
    for rank, (refused, numbered, right) in enumerate(run(2, _while_traced)):
        assert right and numbered == 1
        assert not rank or refused.type == "ValueError"


# Threads in one group.


def _threads(at: Rank, warm: bool) -> Any:
    """Four threads call at once; then one does."""
    group = dist.new_group(list(range(at.world)))
    x, b = torch.ones(4, 8), torch.ones(8, 3)
    start, outcomes = threading.Barrier(4), []
    store, key = dist.distributed_c10d._get_default_store(), f"three threads are refused, {warm}"

    def product() -> torch.Tensor:
        return ficco.all_gather_matmul(x, b, group=group)

    def thread() -> None:
        start.wait()
        with ficco.options(timeout_s=PATIENCE_S):
            outcomes.append(caught(product))
        if len(outcomes) == 3:  # the fourth thread is inside its call
            store.set(key, "yes")

    if warm:
        product()
    at.barrier()
    if at.rank:
        store.get(key)  # which waits for it
        outcomes.append(caught(product))
    else:
        threads = [threading.Thread(target=thread) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    at.barrier()
    right = bool((product() == 8).all())
    ficco.close(group)
    dist.destroy_process_group(group)
    return [one.text if isinstance(one, Failure) else "" for one in outcomes], right


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
def test_a_second_thread_in_a_group_is_told_the_rule(warm: bool) -> None:
    (ours, right), (theirs, also) = run(2, _threads, warm)
    assert theirs == [""] and right and also
    assert sorted(map(bool, ours)) == [False, True, True, True], ours
    for text in filter(None, ours):
        assert text.startswith("all_gather_matmul: required one thread at a time in a group"), text
        assert "take turns in an order that is the same on all ranks" in text
