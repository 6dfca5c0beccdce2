"""Operands of float8 on GPUs: what the library makes of them, graphs, and calls out of step.

With ``FICCO_TESTS_RANKS_PER_GPU=4`` four ranks share a card, which proves results and no speed.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from cases import compare
from ranks import Rank, backend_on_gpus, ranks, run
from test_fp8 import (  # noqa: F401  collected here, with this module's device
    DTYPES,
    OPERATORS,
    SERVED,
    Operands,
    ScaledCase,
    call,
    drawn,
    exact,
    made,
    schedules,
    test_another_order_in_memory_is_another_call,
    test_each_shard_has_its_own_factor,
    test_every_schedule_is_exact,
    test_forms_of_operands,
    test_memory_keeps_to_its_cap,
    test_ranks_that_scale_otherwise_disagree,
    test_rows_that_wait_or_tell_have_their_factors,
    test_wrong_arguments_are_refused,
)
from test_fp8_quantize import (  # noqa: F401  the same
    test_every_schedule_casts_exactly,
    test_forms_of_what_is_cast,
)
from test_gpu import MILLISECOND, settle
from test_operators import rows_for

import ficco
from ficco.runtime.workspace import SLOTS

pytestmark = pytest.mark.multigpu

OUTS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda"


# What the library takes: each recipe with each dtype, on one GPU.


def _one(at: Rank, case: ScaledCase) -> None:
    exact(at, case, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("out", OUTS, ids=str)
@pytest.mark.parametrize("recipe", SERVED)
def test_results(recipe: str, out: torch.dtype, bias: bool) -> None:
    if bias and out == torch.float32:
        pytest.skip("refused: test_wrong_arguments_are_refused")
    case = ScaledCase("all_gather_matmul", (64,), 256, 144, recipe, "serial", out, bias)
    run(1, _one, case, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES[:3], ids=str)
@pytest.mark.parametrize("recipe", ["tensor", "row"])
def test_operands(recipe: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    case = ScaledCase("all_gather_matmul", (64,), 256, 144, recipe, "serial", dtypes=dtypes)
    run(1, _one, case, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", SERVED)
def test_fast_accumulation(recipe: str) -> None:
    """So few terms are exact in whatever the library adds up in."""
    case = ScaledCase("all_gather_matmul", (64,), 256, 144, recipe, "serial", fast=True)
    run(1, _one, case, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(4, 128, 16), (4, 400, 272), (12, 640, 128), (3, 16, 16)])
@pytest.mark.parametrize("recipe", SERVED)
def test_sizes(recipe: str, sizes: tuple[int, int, int]) -> None:
    """Few rows, and blocks that are cut short."""
    m, k, n = sizes
    if recipe == "block" and m % 4:
        pytest.skip("refused: test_what_a_library_lacks_is_said")
    run(1, _one, ScaledCase("all_gather_matmul", (m,), k, n, recipe, "serial"), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", SERVED)
def test_sums_of_parts_of_k(recipe: str) -> None:
    """Cuts of k add up in float32."""
    schedule = "uniform-fused-2d:pieces=3"
    case = ScaledCase("all_gather_matmul", (64,), 512, 144, recipe, schedule)
    run(1, _one, case, device="cuda")


def _random(at: Rank, recipe: str) -> float:
    """The largest difference between pieces of a call and PyTorch's product of the whole."""
    torch.manual_seed(0)
    m, k, n = 64 * at.world, 512, 256
    a = torch.randn(m, k, device=at.device).to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device=at.device).to(torch.float8_e4m3fn).t()
    rows = {"tensor": 1, "row": m}[recipe]
    of_a = torch.rand(rows, 1, device=at.device)
    of_b = torch.rand(1, 1 if rows == 1 else n, device=at.device)
    whole = torch._scaled_mm(a, b, of_a, of_b, out_dtype=torch.bfloat16)
    mine = slice(64 * at.rank, 64 * at.rank + 64)
    own = of_a[mine] if recipe == "row" else of_a
    found = ficco.all_gather_matmul(
        a[mine], b, scale_a=own, scale_b=of_b, schedule="hetero-fused-1d:pieces=2"
    )
    return float(((found.float() - whole.float()).abs() / (whole.float().abs() + 1)).max())


@pytest.mark.parametrize("recipe", ["tensor", "row"])
def test_pieces_are_close_to_the_whole(recipe: str) -> None:
    """The library may take another kernel for fewer rows, which sums in another order: one rounding
    of bfloat16."""
    assert max(run(2, _random, recipe, device="cuda")) <= 2.0**-7


# Graphs.

GRAPHED = (
    "serial",
    "growing",
    "hetero-fused-1d:pieces=2,tail=2",
    "hetero-fused-1d:pieces=2,pull",
    "uniform-fused-2d:pieces=2",
    "serial:kernel",
)


def _fill(operands: Operands, new: Operands) -> None:
    operands.a.view(torch.uint8).copy_(new.a.view(torch.uint8))
    operands.b.t().view(torch.uint8).copy_(new.b.t().view(torch.uint8))
    for name, tensor in new.scales.items():
        if isinstance(tensor, torch.Tensor):
            operands.scales[name].copy_(tensor)


def _replays(at: Rank, operator: str, recipe: str, schedule: str) -> None:
    """Captured calls, more than there are slots, whose operands and factors change, replayed
    between eager ones; these are recorded."""
    rows = rows_for(operator, at.world, "equal")
    case = ScaledCase(operator, rows, 256, 144, recipe, schedule, bias=recipe != "block")
    given, _ = made(case, at, 0)
    settle(at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call(case, given) for _ in range(SLOTS + 1)]
    kept = []
    for iteration in range(1, 20):
        new, wanted = made(case, at, iteration)
        _fill(given, new)
        graph.replay()
        found = [result.clone() for result in results]
        kept.append((wanted, [*found, call(case, given)]))
        # A replay that still waited for its peers after its end would now read this.
        given.a.view(torch.uint8).fill_(44)
    torch.cuda.synchronize()
    for iteration, (wanted, found) in enumerate(kept, 1):
        for which, one in enumerate(found):
            compare(f"result {which}", one, wanted, f"rank {at.rank}, replay {iteration}, {case}")
    del graph
    ficco.close()


@ranks(2, 4)
@pytest.mark.parametrize("schedule", GRAPHED)
@pytest.mark.parametrize("recipe", SERVED)
def test_replays(world: int, recipe: str, schedule: str) -> None:
    run(world, _replays, "all_gather_matmul", recipe, schedule, device="cuda")


@pytest.mark.parametrize("operator", OPERATORS[1:])
@pytest.mark.parametrize("recipe", SERVED)
def test_replays_of_operators(operator: str, recipe: str) -> None:
    run(4, _replays, operator, recipe, "hetero-fused-1d:pieces=2", device="cuda")


# Jitter.


def _jitter(at: Rank, seed: int, calls: int) -> int:
    """Calls of all kinds on several streams, ranks out of step, each result checked on the GPU."""
    shared, local = random.Random(seed), random.Random(1000 * seed + at.rank)
    streams = [torch.cuda.Stream() for _ in range(3)]
    by_nccl = backend_on_gpus(at.world) == "nccl"
    names = [
        (operator, name)
        for operator in OPERATORS
        for name in schedules(operator)
        if name != "auto" and (by_nccl or "collective" not in name)
    ]
    kinds = [
        drawn(shared, operator, at.world, "cuda", name)
        for operator, name in shared.sample(names, 40)
    ]
    wrong = torch.zeros(calls, dtype=torch.bool, device=at.device)
    settle(at)
    kept: list[tuple[Any, ...]] = []
    told: list[ScaledCase] = []  # by call

    def check(index: int, stream: torch.cuda.Stream, y: torch.Tensor, want: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            wrong[index].copy_((y != want).any())

    for index in range(calls):
        case, stream = kinds[shared.randrange(len(kinds))], streams[shared.randrange(3)]
        with torch.cuda.stream(stream):
            if local.random() < 0.2:
                torch.cuda._sleep(local.randrange(MILLISECOND))
            given, wanted = made(case, at, index)
            y = call(case, given)
            given.a.view(torch.uint8).fill_(22)
            given.scales["scale_a"].fill_(3)
        kept.append((index, stream, y, wanted))
        told.append(case)
        if local.random() < 0.02:
            time.sleep(local.random() * 0.005)
        if len(kept) > 6:  # results must outlast the calls after them
            check(*kept.pop(0))
    for entry in kept:
        check(*entry)
    torch.cuda.synchronize()
    bad = wrong.nonzero().flatten().tolist()
    assert not bad, f"rank {at.rank}: calls {bad[:20]} are wrong: {[told[i] for i in bad[:5]]}"
    return calls


@ranks(2, 4)
def test_jittered_calls(world: int) -> None:
    calls = 1000 if world == 4 else 300
    assert run(world, _jitter, world, calls, device="cuda", timeout=280) == [calls] * world
