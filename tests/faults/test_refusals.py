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
from cases import own_group
from ranks import Failure, Rank, caught, leave, on_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
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


def _calls(world: int, group: Any) -> dict[str, tuple[Call, Call, str]]:
    """By name: a call, one that is refused, and a word of the refusal."""
    where = {"group": group}
    x, weight, whole = torch.ones(4, 8), torch.ones(3, 8), torch.ones(4 * world, 8)
    q, tokens = torch.ones(1, 2 * world, 3, 8), torch.ones(3, 8)
    index, one = torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
    heads, out = torch.ones(world * 8, 8), torch.ones(1, 1, world, 8)
    product = partial(ficco.all_gather_matmul, x, weight.t(), **where)
    project = partial(
        ficco.ulysses_project, tokens[None], heads, k_weight=heads, v_weight=heads, **where
    )
    output = partial(ficco.ulysses_output, out, **where)
    attention = partial(ficco.all_gather_attention, q, q, **where)
    up, down = torch.ones(2, 8, 12), torch.ones(2, 6, 8)
    experts = partial(ficco.experts, tokens, weights=one, up=up, down=down, **where)
    route, empty = partial(ficco.route, index, **where), partial(ficco.empty, **where)
    linears = partial(layers.gathered_linears, x, (weight,), (None,), **where)
    scattered = partial(layers.scattered_linear, **where)
    reduced = partial(layers.reduced_linear, x, weight, **where)
    copied = partial(layers.copied_linears, x, (weight,), (None,), recipe="fast", **where)
    column = ficco.nn.ColumnParallelLinear(8, 4 * world, **where)
    row = ficco.nn.RowParallelLinear(4 * world, 8, **where)
    layer = ficco.nn.UlyssesAttention(8 * world, world, **where)
    sequence, part = torch.ones(4 * world, 4), torch.ones(1, 3, 8 * world)
    mesh = DeviceMesh.from_group(group, "cpu")
    style = ficco.nn.ColwiseParallel(input_layouts=Shard(0))
    styled = parallelize_module(torch.nn.Linear(8, 4 * world), mesh, style)

    def block(shard: Any) -> None:
        with ficco.arriving(shard, **where) as rows:
            rows.wait(0)

    return {
        "operator": (product, lambda: product(scale_b=1.0), "scale_a"),
        "operator, no tensor": (
            product,
            lambda: ficco.all_gather_matmul(None, weight.t(), **where),
            "a_shard",
        ),
        "empty": (lambda: empty((3, 4)), lambda: empty((3, -4)), "shape"),
        "gathered_linears": (linears, lambda: linears(rows=[3] * world), "rows"),
        "scattered_linear": (
            lambda: scattered(whole, weight),
            lambda: scattered(whole[1:], weight),
            "share equally",
        ),
        "reduced_linear": (reduced, lambda: reduced(recipe="fast"), "recipe"),
        # The forward of these layers exchanges nothing: the next call does.
        "copied_linears": (product, copied, "recipe"),
        "experts": (lambda: experts(index), lambda: experts(index.float()), "indices"),
        "experts, no tensor": (lambda: experts(index), lambda: experts([[0]] * 3), "indices"),
        "route": (lambda: route(4).capacity, lambda: route(0), "experts"),
        "attention": (lambda: attention(q), lambda: attention(None), "v_shard"),
        "ulysses": (
            lambda: ficco.ulysses_attention(q, q, q, **where),
            lambda: ficco.ulysses_attention(q, None, q, **where),
            "k: required",
        ),
        "project": (lambda: project(size=8), lambda: project(size=0), "size"),
        "output": (
            lambda: output(heads[:8].repeat(1, world)),
            lambda: output(heads[0].repeat(world)),
            "weight",
        ),
        "arriving": (lambda: block(x), lambda: block(x.clone().requires_grad_()), "no gradient"),
        "column, features": (lambda: column(x), lambda: column(x[:, 1:]), "this rank's part"),
        "column, no tensor": (lambda: column(x), lambda: column(None), "torch.Tensor"),
        "row, features": (
            lambda: row(sequence),
            lambda: row(sequence[:, 1:]),
            "this rank's columns",
        ),
        "row, odd sequence": (lambda: row(sequence), lambda: row(sequence[1:]), "share equally"),
        "gather_once": (
            lambda: ficco.nn.gather_once(x, column, column),
            lambda: ficco.nn.gather_once(x, column, row),
            "ColumnParallelLinear layers",
        ),
        "attention layer": (lambda: layer(part), lambda: layer(part[0]), "x: required"),
        "style": (lambda: styled(x), lambda: styled(x[0, 0]), ""),
    }


def _numbered(group: Any) -> int:
    """Calls that this rank has made in a group, those that it has refused included."""
    return sum(workspace.calls for workspace in workspaces(group))


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
@on_ranks(2)
def test_a_call_that_one_rank_refuses(at: Rank, warm: bool) -> None:
    """One rank refuses a call that its peers make, told once, however many entries the refusal has
    come through."""
    group = dist.new_group(list(range(at.world)))
    calls = list(_calls(at.world, group).items())
    for turn, (name, (good, bad, word)) in enumerate(calls if warm else calls[::3]):
        odd = turn % at.world
        if warm:
            good()
        before = _numbered(group)
        with ficco.options(timeout_s=PATIENCE_S):
            begin = time.monotonic()
            first = caught(bad if at.rank == odd else good)
            seconds = time.monotonic() - begin
        assert isinstance(first, Failure) and seconds < AT_ONCE_S, (name, first, seconds)
        if at.rank == odd:
            assert first.type not in ("RankMismatch", "SignalTimeout"), (name, first)
            assert word in first.text and _numbered(group) - before == 1, (name, first)
        said: list[Any] = [None] * at.world
        dist.all_gather_object(said, f"{first.type}: {first.text.splitlines()[0]}")
        if at.rank != odd:
            assert first.type == "RankMismatch", (name, first)
            assert first.fields["values"][odd].startswith(said[odd]), (name, first)
        ficco.close()
        at.barrier()
        assert not isinstance(caught(good), Failure), name
        for _ in range(2):  # by all ranks alike, which breaks nothing
            assert said[odd].startswith(f"{caught(bad).type}: "), name
        assert not isinstance(caught(good), Failure), name
        ficco.close()
    dist.destroy_process_group(group)


@on_ranks(2)
def test_a_refusal_that_nobody_can_or_has_to_be_told(at: Rank) -> None:
    """Refusals of which no rank can be told, without a workspace, or none has to be, of fake
    tensors: they are raised at once, and the group is usable."""
    x, b = torch.ones(4, 8), torch.ones(8, 3)
    with own_group(at) as group:
        product = partial(ficco.all_gather_matmul, group=group)
        begin = time.monotonic()
        refused = caught(lambda: product(None, None))
        assert refused.type == "ValueError" and time.monotonic() - begin < AT_ONCE_S
        assert (product(x, b) == 8).all()
        before = _numbered(group)
        if at.rank:
            with FakeTensorMode() as mode:
                fake = mode.from_tensor(x)
                assert caught(lambda: product(fake, fake)).type == "ValueError"
        assert (product(x, b) == 8).all() and _numbered(group) - before == 1


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
@on_ranks(2)
def test_a_second_thread_in_a_group_is_told_the_rule(at: Rank, warm: bool) -> None:
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
    assert (product() == 8).all()
    leave(group)
    refusals = [one.text for one in outcomes if isinstance(one, Failure)]
    assert (len(outcomes), len(refusals)) == ((1, 0) if at.rank else (4, 3)), refusals
    for text in refusals:
        assert text.startswith("all_gather_matmul: required one thread at a time in a group"), text
        assert "take turns in an order that is the same on all ranks" in text
