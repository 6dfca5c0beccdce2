"""Calls that one rank refuses before they are numbered: its peers get the error at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

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
from ficco.runtime.workspace import _workspaces as opened
from ficco.runtime.workspace import repeatable, workspaces

#: Timeout of a call in seconds; a test fails if a call reaches it.
PATIENCE_S = 20.0
#: Limit in seconds until the peers raise after a refusal, on a busy machine.
AT_ONCE_S = 8.0

Call = Callable[[], Any]


def _calls(world: int, group: Any) -> dict[str, tuple[Call, Call, str]]:
    """Return by name a valid call, a refused call, and a word of the refusal."""
    options = {"group": group}
    x, weight, even = torch.ones(4, 8), torch.ones(3, 8), torch.ones(4 * world, 8)
    q, tokens = torch.ones(1, 2 * world, 3, 8), torch.ones(3, 8)
    index, gates = torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
    heads, attended = torch.ones(world * 8, 8), torch.ones(1, 1, world, 8)
    product = partial(ficco.all_gather_matmul, x, weight.t(), **options)
    project = partial(
        ficco.ulysses_project, tokens[None], heads, k_weight=heads, v_weight=heads, **options
    )
    output = partial(ficco.ulysses_output, attended, **options)
    odd, wide, flat = even[1:], heads[:8].repeat(1, world), heads[0].repeat(world)
    by_heads = partial(ficco.ulysses_attention, q, v=q, **options)
    no_tensor = partial(ficco.all_gather_matmul, None, weight.t(), **options)
    attention = partial(ficco.all_gather_attention, q, q, **options)
    up, down = torch.ones(2, 8, 12), torch.ones(2, 6, 8)
    experts = partial(ficco.experts, tokens, weights=gates, up=up, down=down, **options)
    route, empty = partial(ficco.route, index, **options), partial(ficco.empty, **options)
    linears = partial(layers.gathered_linears, x, (weight,), (None,), **options)
    scattered = partial(layers.scattered_linear, weight=weight, **options)
    reduced = partial(layers.reduced_linear, x, weight, **options)
    copied = partial(layers.copied_linears, x, (weight,), (None,), recipe="fast", **options)
    column = ficco.nn.ColumnParallelLinear(8, 4 * world, **options)
    row = ficco.nn.RowParallelLinear(4 * world, 8, **options)
    once = partial(ficco.nn.gather_once, x, column)
    layer = ficco.nn.UlyssesAttention(8 * world, world, **options)
    sequence, hidden = torch.ones(4 * world, 4), torch.ones(1, 3, 8 * world)
    mesh = DeviceMesh.from_group(group, "cpu")
    style = ficco.nn.ColwiseParallel(input_layouts=Shard(0))
    styled = parallelize_module(torch.nn.Linear(8, 4 * world), mesh, style)

    def block(shard: Any) -> None:
        with ficco.arriving(shard, **options) as rows:
            rows.wait(0)

    return {
        "operator": (product, lambda: product(scale_b=1.0), "scale_a"),
        "operator, no tensor": (product, no_tensor, "a_shard"),
        "empty": (lambda: empty((3, 4)), lambda: empty((3, -4)), "shape"),
        "gathered_linears": (linears, lambda: linears(rows=[3] * world), "rows"),
        "scattered_linear": (lambda: scattered(even), lambda: scattered(odd), "share equally"),
        "reduced_linear": (reduced, lambda: reduced(recipe="fast"), "recipe"),
        # The forward of these layers has no exchange, so the peers raise in the next call.
        "copied_linears": (product, copied, "recipe"),
        "experts": (lambda: experts(index), lambda: experts(index.float()), "indices"),
        "experts, no tensor": (lambda: experts(index), lambda: experts([[0]] * 3), "indices"),
        "route": (lambda: route(4).capacity, lambda: route(0), "experts"),
        "attention": (lambda: attention(q), lambda: attention(None), "v_shard"),
        "ulysses": (lambda: by_heads(k=q), lambda: by_heads(k=None), "k: required"),
        "project": (lambda: project(size=8), lambda: project(size=0), "size"),
        "output": (lambda: output(wide), lambda: output(flat), "weight"),
        "arriving": (lambda: block(x), lambda: block(x.clone().requires_grad_()), "no gradient"),
        "column, features": (lambda: column(x), lambda: column(x[:, 1:]), "this rank's part"),
        "column, no tensor": (lambda: column(x), lambda: column(None), "torch.Tensor"),
        "row, features": (lambda: row(sequence), lambda: row(sequence[:, 1:]), "rank's columns"),
        "row, odd sequence": (lambda: row(sequence), lambda: row(sequence[1:]), "share equally"),
        "gather_once": (lambda: once(column), lambda: once(row), "ColumnParallelLinear layers"),
        "attention layer": (lambda: layer(hidden), lambda: layer(hidden[0]), "x: required"),
        "style": (lambda: styled(x), lambda: styled(x[0, 0]), ""),
    }


def _numbered(group: Any) -> int:
    """Return the number of calls of this rank in a group, refused calls included."""
    return sum(workspace.calls for workspace in workspaces(group))


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
@on_ranks(2)
def test_a_call_that_one_rank_refuses(at: Rank, warm: bool) -> None:
    """A refusal counts as one call, even if it passes through several public functions."""
    group = dist.new_group(list(range(at.world)))
    calls = list(_calls(at.world, group).items())
    for turn, (name, (valid_call, refused_call, word)) in enumerate(calls if warm else calls[::3]):
        odd = turn % at.world
        if warm:
            valid_call()
        before = _numbered(group)
        with ficco.options(timeout_s=PATIENCE_S):
            begin = time.monotonic()
            failure = caught(refused_call if at.rank == odd else valid_call)
            seconds = time.monotonic() - begin
        assert isinstance(failure, Failure) and seconds < AT_ONCE_S, (name, failure, seconds)
        if at.rank == odd:
            assert failure.type not in ("RankMismatch", "SignalTimeout"), (name, failure)
            assert word in failure.text and _numbered(group) - before == 1, (name, failure)
        messages: list[Any] = [None] * at.world
        dist.all_gather_object(messages, f"{failure.type}: {failure.text.splitlines()[0]}")
        if at.rank != odd:
            assert failure.type == "RankMismatch", (name, failure)
            assert failure.fields["values"][odd].startswith(messages[odd]), (name, failure)
        ficco.close()
        at.barrier()
        assert not isinstance(caught(valid_call), Failure), name
        for _ in range(2):  # a refusal on all ranks leaves the group usable
            assert messages[odd].startswith(f"{caught(refused_call).type}: "), name
        assert not isinstance(caught(valid_call), Failure), name
        ficco.close()
    dist.destroy_process_group(group)


@on_ranks(2)
def test_an_operand_on_the_cpu_in_a_group_of_nccl(at: Rank) -> None:
    """The workspace of the group stands for that of a GPU, which the peers use."""
    x, b = torch.ones(4, 8), torch.ones(8, 3)
    with own_group(at) as group, ficco.options(timeout_s=PATIENCE_S):
        product = partial(ficco.all_gather_matmul, x, b, group=group)
        product()
        if at.rank:
            cpu, gpu = ((group, torch.device(kind), None) for kind in ("cpu", "cuda"))
            opened[gpu] = opened.pop(cpu)
            repeatable.clear()
        with mock.patch("ficco.runtime.workspace.backend_of", lambda group: "nccl"):
            begin, failure = time.monotonic(), caught(product)
        assert time.monotonic() - begin < AT_ONCE_S
        if at.rank:
            assert failure.type == "ValueError" and "got one on cpu" in failure.text, failure
        else:
            assert failure.type == "RankMismatch", failure
            assert "got one on cpu" in failure.fields["values"][1], failure


@on_ranks(2)
def test_refusals_that_are_not_published(at: Rank) -> None:
    """Refusals without a workspace cannot be published; those of fake tensors need not be."""
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
def test_a_second_thread_in_a_group_raises(at: Rank, warm: bool) -> None:
    """Four threads call at once: one call succeeds, and three raise an error with the rule."""
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
        store.get(key)  # blocks until the key is set
        outcomes.append(caught(product))
    else:
        threads = [threading.Thread(target=thread) for _ in range(4)]
        for caller in threads:
            caller.start()
        for caller in threads:
            caller.join()
    at.barrier()
    assert (product() == 8).all()
    leave(group)
    refusals = [outcome.text for outcome in outcomes if isinstance(outcome, Failure)]
    assert (len(outcomes), len(refusals)) == ((1, 0) if at.rank else (4, 3)), refusals
    for text in refusals:
        assert text.startswith("all_gather_matmul: required one thread at a time in a group"), text
        assert "take turns in an order that is the same on all ranks" in text
