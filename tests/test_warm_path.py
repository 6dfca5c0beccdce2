"""Host cost of a warm eager call on the caller's thread: calls of ficco's Python functions, their
files, and changes from file to file. Layers decode one token. ``serial:kernel`` is a call of the
GPU engine on threads, from the user to the engine and from there to the driver.

The measured rank begins its call after its peer, so that all signals have arrived when it waits for
them. Otherwise a wait takes three more calls. Comprehensions are not counted: Python 3.12 makes no
calls of them.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import thread_driver
import torch
import torch.distributed as dist
from ranks import Rank, on_ranks, run
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import ficco
from ficco import nn as parallel
from ficco.ops.call import repeated, run_unwatched
from ficco.runtime.workspace import workspaces

PACKAGE = str(Path(ficco.__file__).parent)
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>"}


class Cost(NamedTuple):
    """Files, calls and changes of file of a call."""

    files: int
    calls: int
    changes: int


#: Upper limits of a warm call. Raise a figure only with a reason; lower it with the code.
LIMITS = {
    "all_gather_matmul": Cost(9, 31, 17),
    "matmul_reduce_scatter": Cost(9, 32, 17),
    "all_gather_attention": Cost(12, 80, 32),
    "serial:collective": Cost(11, 25, 17),
    "serial:kernel": Cost(11, 19, 16),
    "ColwiseParallel": Cost(4, 6, 7),
    "RowwiseParallel": Cost(16, 31, 25),
}


def warm(operator: str) -> Callable[[], Any]:
    """A call of an operator or a layer."""
    if operator == "all_gather_attention":
        q = torch.ones(1, 4, 32, 16)
        return partial(ficco.all_gather_attention, q, q, q)
    if operator.endswith("Parallel"):
        style = getattr(parallel, operator)(schedule="serial:collective")
        linear = nn.Linear(32, 32, bias=False)
        layer = parallelize_module(linear, init_device_mesh("cpu", (2,)), style)
        return partial(torch.no_grad()(layer), torch.ones(1, 1, 32 if layer.cut == 0 else 16))
    a, b = torch.ones(64, 32), torch.ones(32, 16)
    if operator.startswith("serial"):
        return partial(ficco.all_gather_matmul, a, b, schedule=operator)
    return partial(getattr(ficco, operator), a, b, schedule="growing")


def cost(call: Callable[[], Any]) -> tuple[Cost, Counter[str]]:
    """The cost of a call, and its calls by file and function."""
    calls: Counter[str] = Counter()
    files: list[str] = []

    def count(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        inside = code.co_filename.startswith(PACKAGE) and code.co_name not in COMPREHENSIONS
        if event == "call" and inside:
            file = code.co_filename[len(PACKAGE) + 1 :]
            calls[f"{file}:{code.co_name}"] += 1
            if not files or files[-1] != file:
                files.append(file)

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Cost(len(set(files)), calls.total(), len(files)), calls


def costs(at: Rank, operator: str, held: bool) -> list[tuple[Cost, Counter[str]]]:
    """The costs of several warm calls of a rank that begins after its peer. ``held``: the group has
    symmetric memory, in which no operand lies."""
    measured = []
    ficco.close()  # the group's symmetric memory of earlier tests
    if held:
        ficco.empty((8,), dtype=torch.float32)
    call, on_gpu = warm(operator), operator == "serial:kernel"
    thread_driver.serve()
    with ficco.options(engine="threads" if on_gpu else None):
        for _ in range(4):
            call()
        for workspace in workspaces() if on_gpu else ():
            workspace.engine.driver.waits = False  # type: ignore[attr-defined]
        for _ in range(5):
            at.barrier()
            if at.rank == 0:
                time.sleep(0.05)
            measured.append(cost(call))
            ficco.synchronize()
    return measured


@pytest.mark.parametrize(
    ("operator", "held"),
    [*[(operator, False) for operator in LIMITS], ("all_gather_matmul", True)],
)
def test_a_warm_call_costs_no_more_than_its_limits(operator: str, held: bool) -> None:
    least, calls = min(run(2, costs, operator, held)[0], key=lambda one: one[0].calls)
    limit = LIMITS[operator]
    above = [name for name in Cost._fields if getattr(least, name) > getattr(limit, name)]
    table = "\n".join(f"  {number:3} {name}" for name, number in sorted(calls.items()))
    assert not above, f"{operator}: {least}, limit {limit}\n{table}"


@pytest.mark.parametrize("schedule", ["serial:collective", "growing"])
@on_ranks(2)
def test_a_repeated_call_reads_its_own_operands(at: Rank, schedule: str) -> None:
    """Shards have the same shape and different layouts in memory."""
    weight = torch.arange(24.0).reshape(4, 6)

    def plain(rank: int) -> torch.Tensor:
        return torch.arange(32.0).reshape(8, 4) + rank

    def negative(rank: int) -> torch.Tensor:
        return torch._neg_view(plain(rank))

    def strided(rank: int) -> torch.Tensor:
        return torch.arange(64.0).reshape(8, 8)[:, ::2] - rank

    def batched(rank: int) -> torch.Tensor:
        return plain(rank).view(2, 4, 4)

    shards = plain, plain, plain, negative, plain, strided, strided, batched, batched, plain
    for turn, shard in enumerate(shards):
        whole = torch.cat([shard(rank).clone().reshape(8, 4) for rank in range(at.world)])
        a, b = shard(at.rank), weight if turn < 4 else weight.t().clone().t()
        out, gathered = ficco.all_gather_matmul(a, b, schedule=schedule, return_gathered=True)
        assert torch.equal(out, whole @ b) and torch.equal(gathered, whole), turn
        assert torch.equal(ficco.all_gather_matmul(a, b, schedule=schedule), whole @ b), turn


@on_ranks(2)
def test_calls_are_repeated_only_for_operands_like_the_earlier_ones_in_the_same_mode(
    at: Rank,
) -> None:
    """Each mode would change what an operator does, or how."""
    ficco.close()
    a, b, group = torch.ones(8, 4), torch.ones(4, 6), dist.group.WORLD

    def again(left: Any = a, right: Any = b, schedule: Any = "growing") -> bool:
        return repeated(group, "all_gather_matmul", left, right, schedule, None, False) is not None

    assert not again()
    ficco.all_gather_matmul(a, b, schedule="growing")
    assert again() and again(a + 1, b.clone())
    leaf, traced = b.clone().requires_grad_(), []

    class Subclass(torch.Tensor):
        pass

    others = {
        "dtype": (a.double(), b.double()),
        "layout": (a, b.t().contiguous().t()),
        "negative": (torch._neg_view(a), b),
        "sparse": (a.to_sparse(), b),
        "meta": (a.to("meta"), b),
        "subclass": (a.as_subclass(Subclass), b),
        "parameter": (a, nn.Parameter(b)),
        "gradient": (a, leaf),
        "uninitialized": (nn.UninitializedParameter(), b),
        "no tensor": (a, [b]),
        "no schedule": (a, b, []),
        "same": (a[:4, :4], a[:4, :4]),
    }
    repeats = [name for name, operands in others.items() if again(*operands)]
    assert not repeats, repeats
    with torch.no_grad():
        ficco.all_gather_matmul(a, leaf, schedule="growing")
        assert again(a, leaf) and again()
    assert again() and not again(a, leaf), "the gradient would be lost"
    modes = {
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "dispatch mode": TorchDispatchMode(),
        "fake tensors": FakeTensorMode(),
        "forward derivatives": forward_ad.dual_level(),
        "other options": ficco.options(timeout_s=77.0),
    }
    for name, mode in modes.items():
        with mode:
            assert not again(), name

    def within(x: torch.Tensor) -> torch.Tensor:
        traced.append(again())
        return x * 2

    torch.vmap(within)(torch.ones(3))
    torch.func.grad(lambda x: within(x).sum())(torch.ones(3))
    torch.jit.trace(within, torch.ones(3), check_trace=False)
    assert traced == [False] * 3 and again()


@on_ranks(2)
def test_repeated_calls_are_cast_as_autocast_says_at_the_call(at: Rank) -> None:
    """PyTorch's guards do not see the dtype of autocast."""
    a, b = torch.ones(8, 4, dtype=torch.bfloat16), torch.ones(4, 6, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            for _ in range(3):
                assert ficco.all_gather_matmul(a, b, schedule="growing").dtype == dtype


@on_ranks(2)
def test_calls_of_subclasses_reach_their_operators_each_time(at: Rank) -> None:
    """In inference mode the operator of ``torch.library`` runs under the modes of its caller."""

    class Subclass(torch.Tensor):
        pass

    b = torch.ones(4, 6)
    with torch.inference_mode():
        for _ in range(3):
            out = ficco.all_gather_matmul(torch.ones(8, 4).as_subclass(Subclass), b)
            assert type(out) is Subclass and torch.equal(out, torch.full((16, 6), 4.0))


@on_ranks(2)
def test_rows_that_only_equal_those_of_an_earlier_call_are_refused(at: Rank) -> None:
    a, b = torch.ones(8, 4), torch.ones(4, 6)
    for _ in range(2):
        ficco.all_gather_matmul(a, b, schedule="growing", rows=(8, 8))
    with pytest.raises(ValueError, match="required 2 numbers of rows"):
        ficco.all_gather_matmul(a, b, schedule="growing", rows=(8.0, 8.0))  # type: ignore[arg-type]
    assert torch.equal(ficco.all_gather_matmul(a, b, rows=(8, 8)), torch.full((16, 6), 4.0))


@on_ranks(2)
def test_repeated_calls_are_profiled_and_may_run_in_gradient_mode(at: Rank) -> None:
    """As a backward does that is itself differentiated."""
    a, b = torch.ones(8, 4), torch.ones(4, 6, requires_grad=True)
    group: Any = dist.group.WORLD
    for _ in range(3):
        out, _ = run_unwatched("all_gather_matmul", a, b, group, "serial:collective")
        assert torch.equal(out, torch.full((16, 6), 4.0)) and torch.is_grad_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            ficco.all_gather_matmul(a, b.detach(), schedule="growing")
    assert sum(event.name.startswith("ficco: all_gather_") for event in profile.events()) == 3


@on_ranks(2)
def test_a_repeated_call_has_its_own_options_and_memory(at: Rank) -> None:
    """A shard in symmetric memory is read in place after calls that copied shards of its shape."""
    ficco.close()  # workspaces of other tests
    a, b = torch.ones(8, 4), torch.ones(4, 6)
    for limit in (None, 77.0, 77.0, 55.0, None):
        for _ in range(2):
            with ficco.options(timeout_s=limit):
                ficco.all_gather_matmul(a, b, schedule="serial:collective")
            (workspace,) = workspaces(dist.group.WORLD)
            assert limit in (None, workspace.engine.timeout_s)
    for _ in range(3):
        ficco.all_gather_matmul(a, b, schedule="growing:pull")
    shard = ficco.empty((8, 4), dtype=a.dtype)
    for turn in range(3):
        shard.fill_(turn + at.rank)
        at.barrier()
        out = ficco.all_gather_matmul(shard, b, schedule="growing:pull")
        expected = torch.cat([torch.full((8, 6), 4.0 * (turn + peer)) for peer in range(at.world)])
        assert torch.equal(out, expected)
        at.barrier()
    assert [cached.source for cached in workspace.programs.values()][-1], "read in place"
    ficco.close()
