"""The rule behind schedule="auto", and ficco.explain."""

from __future__ import annotations

import pytest

import ficco
from ficco.heuristics import decide
from ficco.problem import Problem
from ficco.schedules import NAMED, Schedule


def problem(m: int, n: int, k: int, world: int = 4) -> Problem:
    return Problem("all_gather_matmul", (m // world,) * world, n, k, "bfloat16")


@pytest.mark.parametrize(
    ("sizes", "eager", "captured"),
    [
        ((8192, 7168, 8192), "growing:compute=2", "growing:compute=2"),
        ((32768, 2048, 8192), "shard-overlap:compute=2", "shard-overlap:compute=2"),
        ((2048, 1024, 4096), "serial:collective", "shard-overlap:compute=2"),
        ((2048, 4096, 4096), "serial:collective", "growing:compute=2"),
    ],
)
def test_the_rule(sizes: tuple[int, int, int], eager: str, captured: str) -> None:
    for name, on_gpu in ((eager, True), (captured, False)):
        decision = decide(problem(*sizes), eager_on_gpu=on_gpu)
        assert (str(decision.schedule), decision.source) == (name, "rule")
        assert decision.reason


def test_one_rank_takes_serial() -> None:
    assert decide(problem(8192, 7168, 8192, world=1)).schedule == NAMED["serial"]


def test_the_caller_goes_first() -> None:
    for wanted in ("hetero-fused-2d:pull", Schedule.parse("hetero-fused-2d:pull")):
        decision = decide(problem(2048, 1024, 4096), wanted)
        assert (decision.schedule, decision.source) == (
            Schedule.parse("hetero-fused-2d:pull"),
            "caller",
        )


def test_explain_says_what_a_call_would_take() -> None:
    sizes = {"m": 2048, "n": 1024, "k": 4096, "world": 4}
    assert "serial:collective (rule: " in str(ficco.explain("all_gather_matmul", **sizes))
    captured = ficco.explain("all_gather_matmul", captured=True, **sizes)
    assert str(captured.schedule) == "shard-overlap:compute=2"
    with pytest.raises(ValueError, match="required all_gather_matmul"):
        ficco.explain("matmul", **sizes)
    with pytest.raises(ValueError, match="world >= 1"):
        ficco.explain("all_gather_matmul", **{**sizes, "world": 0})
