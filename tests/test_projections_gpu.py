"""The projections around attention by heads on GPUs: exact on whole numbers, layers against
float64, in graphs. With ``FICCO_TESTS_RANKS_PER_GPU=4`` four ranks share a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import equal, exact, replays
from ranks import Rank, ranks, run, wider
from test_projections import SCHEDULES, ProjectionCase, cases, layered, projected

import ficco

pytestmark = pytest.mark.multigpu


def calls(at: Rank) -> None:
    iteration = 0
    for case in cases(at.world):
        for schedule in (*SCHEDULES, "auto"):
            narrow = replace(case, dtype="float32", size=8 * (1 + iteration % 2), features=32)
            projected(at, narrow, iteration := iteration + 1, schedule)


@ranks(2, 4)
def test_exact_on_whole_numbers(world: int) -> None:
    run(world, calls, device="cuda", timeout=280)


def _layers(at: Rank) -> None:
    iteration = 0
    for heads, kv_heads in ((4, 4), (4, 2), (4, 1), (8, 2)):
        for dtype in ("bfloat16", "float16"):
            sizes = 96, heads * at.world, kv_heads, (64, 128)[iteration % 2], 512
            case = ProjectionCase(*sizes, batch=1 + iteration % 2, dtype=dtype)
            iteration += 1
            layered(at, case, iteration, (*SCHEDULES[:4], "auto")[iteration % 5])
            exact(at, equal(at.world, 64, 32, 16, dtype="bfloat16"), iteration)


@ranks(2, 4)
def test_layers_between_other_calls(world: int) -> None:
    run(world, _layers, device="cuda", timeout=280)


def _graphs(at: Rank) -> None:
    case = ProjectionCase(128, 8, 2, 64, 256, dtype="bfloat16")
    mine = slice(at.rank * case.rows, (at.rank + 1) * case.rows)
    *weights, last = (one / 16 for one in case.weights(1, at.device))
    x = case.input(at.world, 0, at.device)[:, mine].contiguous()

    def call() -> torch.Tensor:
        with torch.no_grad():
            q, _, _ = ficco.ulysses_project(x, *weights, size=case.size, schedule="growing")
            return ficco.ulysses_output(q, last, schedule="growing")

    def renew(iteration: int) -> None:
        x.copy_(case.input(at.world, iteration, at.device)[:, mine])

    replays(at, call, renew)


def test_graphs() -> None:
    run(wider(), _graphs, device="cuda", fresh=True, timeout=120)
