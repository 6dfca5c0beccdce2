"""Operands of float8 on GPUs: what the library makes of them, graphs, and calls out of step.

With ``FICCO_TESTS_RANKS_PER_GPU=4`` four ranks share a card, which proves results and no speed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

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
    test_each_shard_has_its_own_factor,
    test_forms_of_operands,
    test_memory_keeps_to_its_cap,
    test_rows_that_wait_or_tell_have_their_factors,
)
from test_fp8_quantize import (  # noqa: F401  the same
    test_every_schedule_casts_exactly,
    test_forms_of_what_is_cast,
)
from test_gpu import jittered, settle
from test_operators import rows_for

import ficco
from ficco.runtime.workspace import SLOTS

pytestmark = pytest.mark.multigpu


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda"


# What the library takes, on one GPU.


def taken(recipe: str) -> list[ScaledCase]:
    """Each dtype of results, with a bias where one may be; fast sums, of which so few terms are
    exact in whatever the library adds up in; few rows, and blocks that are cut short; cuts of k,
    which add up in float32; dtypes of operands."""
    case = ScaledCase("all_gather_matmul", (64,), 256, 144, recipe, "serial")
    found = [case.on(out=torch.float32), case.on(fast=True)]
    for out in (torch.bfloat16, torch.float16):
        found += [case.on(out=out, bias=bias) for bias in (False, True)]
    for m, k, n in ((4, 128, 16), (4, 400, 272), (12, 640, 128), (3, 16, 16)):
        if recipe != "block" or m % 4 == 0:
            found.append(case.on(rows=(m,), k=k, n=n))
    found.append(case.on(k=512, schedule="uniform-fused-2d:pieces=3"))
    others = DTYPES[1:3] if recipe != "block" else ()
    return found + [case.on(dtypes=dtypes) for dtypes in others]


def _each_exact(at: Rank, cases: Sequence[ScaledCase]) -> None:
    for case in cases:
        exact(at, case, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", SERVED)
def test_what_the_library_takes(recipe: str) -> None:
    run(1, _each_exact, taken(recipe), device="cuda")


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


@pytest.mark.parametrize(
    ("world", "operator", "schedule"),
    [
        *((2, OPERATORS[0], schedule) for schedule in GRAPHED),
        *((4, operator, "hetero-fused-1d:pieces=2") for operator in OPERATORS),
    ],
)
@pytest.mark.parametrize("recipe", SERVED)
def test_replays(recipe: str, world: int, operator: str, schedule: str) -> None:
    run(world, _replays, operator, recipe, schedule, device="cuda")


# Jitter.


def _jitter(at: Rank, seed: int, calls: int) -> int:
    """Calls of all kinds."""
    chance = random.Random(seed)
    by_nccl = backend_on_gpus(at.world) == "nccl"
    names = [
        (operator, name)
        for operator in OPERATORS
        for name in schedules(operator)
        if name != "auto" and (by_nccl or "collective" not in name)
    ]
    kinds = [
        drawn(chance, operator, at.world, "cuda", name)
        for operator, name in chance.sample(names, 40)
    ]

    def once(index: int, case: ScaledCase) -> tuple[torch.Tensor, torch.Tensor]:
        given, wanted = made(case, at, index)
        y = call(case, given)
        given.a.view(torch.uint8).fill_(22)
        given.scales["scale_a"].fill_(3)
        return y, wanted

    return jittered(at, seed, calls, kinds, once)


@ranks(2, 4)
def test_jittered_calls(world: int) -> None:
    calls = 1000 if world == 4 else 300
    assert run(world, _jitter, world, calls, device="cuda", timeout=280) == [calls] * world
