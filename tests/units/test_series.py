"""Calls that are timed during background calls, and measured products."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ficco
from ficco.options import current
from ficco.problems.scaling import SCALED, operands_of
from ficco.tools.bench.inputs import GAIN
from ficco.tools.bench.measure import MOST_IN_BACKGROUND, MeasuredCalls, calls_to_cover, contended

CPU = torch.device("cpu")
#: A group of two ranks.
TWO: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)


def test_background_calls_outlast_the_timed_calls() -> None:
    for front, back, count in ((4.0, 4.0, 2), (4.0, 1.0, 8), (1.0, 9.0, 1)):
        assert calls_to_cover([front], [back]) == count
    assert calls_to_cover([9.0], [0.01]) == MOST_IN_BACKGROUND


def test_a_call_is_timed_during_background_calls_and_ends_before_them() -> None:
    done, running = [], threading.Event()

    def back() -> None:
        running.set()
        time.sleep(0.02)
        done.append(1)

    def front() -> int:
        assert running.wait(5)
        return len(done)

    runner = contended(front, back, 3, CPU)
    with runner.context():
        assert runner.run() < 3
    assert len(done) == 3, "no call runs after the context"


def test_background_calls_have_the_options_in_force_and_their_errors_are_raised() -> None:
    limits: list[float] = []

    def failing() -> None:
        limits.append(current().timeout_s)
        raise OSError("in the background")

    runner = contended(lambda: None, failing, 1, CPU)
    with pytest.raises(OSError, match="in the background"):
        with ficco.options(timeout_s=7), runner.context():
            runner.run()
    assert limits == [7.0]


def test_on_a_gpu_background_calls_have_a_separate_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, streams = [], ["main"]

    def added(operation: str) -> None:
        log.append(f"{operation} on {streams[-1]}")

    @contextmanager
    def use_stream(stream: Any) -> Iterator[None]:
        streams.append("side")
        yield
        streams.pop()

    side = SimpleNamespace(wait_event=lambda event: log.append("side waits"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: side)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=partial(added, "fork")))
    monkeypatch.setattr(torch.cuda, "stream", use_stream)
    contended(partial(added, "front"), partial(added, "back"), 3, torch.device("cuda")).run()
    first = ["fork on main", "side waits", "back on side", "front on main"]
    assert log == [*first, "back on side", "back on side"]


def test_products_are_those_of_their_operands() -> None:
    calls: Any = MeasuredCalls(TWO, CPU, torch.float32)
    a, b = calls.matrix("a", 7, 12), calls.matrix("b", 12, 5)
    calls.matmul(7, 5, 12)()
    torch.testing.assert_close(calls.matrix("out", 7, 5), a @ b)
    sums = calls.matrix("sums", 7, 5)
    sums.fill_(8.0)
    calls.matmul(7, 5, 12, wide=True)()  # accumulates
    torch.testing.assert_close(sums - 8, a @ b)
    calls.matmul(3, 5, 12, batch=2)()
    tall = calls.matrix("a", 6, 12) @ b
    torch.testing.assert_close(calls.matrix("out", 6, 5), tall)
    a3 = calls.matrix("a", 6, 12).view(2, 3, 12)
    for turned in (False, True):
        calls.matmul(3, 5, 12, batch=2, apart=True, turned=turned)()
        stacked = calls.matrix("b", 24, 5)
        b3 = stacked.view(2, 5, 12).mT if turned else stacked.view(2, 12, 5)
        torch.testing.assert_close(calls.matrix("out", 6, 5), (a3 @ b3).view(6, 5))


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_products_are_those_of_their_operands(kind: str) -> None:
    name, scaling = operands_of(kind)
    calls = MeasuredCalls(TWO, CPU, getattr(torch, name), scaling)
    calls.matmul(24, 32, 512)()
    out = calls.matrix("out", 24, 32, torch.bfloat16).clone()
    assert out.isfinite().all() and out.any(1).all()
    a, b = calls.matrix("a", 24, 512).float(), calls.matrix("b", 32, 512).float().t()
    torch.testing.assert_close(out, (a @ b / GAIN**2).bfloat16(), rtol=1e-2, atol=1e-2)
    sums = calls.matrix("sums", 24, 32, torch.float32)
    sums.fill_(8.0)
    calls.matmul(24, 32, 512, wide=True)()  # accumulates
    torch.testing.assert_close(sums - 8, out.float(), rtol=1e-2, atol=1e-2)
