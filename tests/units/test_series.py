"""Calls that are timed during others, and products that are measured."""

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


def test_what_runs_in_the_background_goes_on_longer_than_what_is_in_front() -> None:
    for front, back, count in ((4.0, 4.0, 2), (4.0, 1.0, 8), (1.0, 9.0, 1)):
        assert calls_to_cover([front], [back]) == count
    assert calls_to_cover([9.0], [0.01]) == MOST_IN_BACKGROUND


def test_a_call_is_timed_while_others_run_and_ends_before_them() -> None:
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
    assert len(done) == 3, "nothing runs on once its context is left"


def test_what_is_in_the_background_has_the_options_in_force_and_its_errors_are_not_lost() -> None:
    limits: list[float] = []

    def noted() -> None:
        limits.append(current().timeout_s)
        raise OSError("in the background")

    runner = contended(lambda: None, noted, 1, CPU)
    with pytest.raises(OSError, match="in the background"):
        with ficco.options(timeout_s=7), runner.context():
            runner.run()
    assert limits == [7.0]


def test_on_a_gpu_what_is_in_the_background_has_a_stream_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, now = [], ["main"]

    def noted(what: str) -> None:
        log.append(f"{what} on {now[-1]}")

    @contextmanager
    def of(stream: Any) -> Iterator[None]:
        now.append("side")
        yield
        now.pop()

    side = SimpleNamespace(wait_event=lambda event: log.append("side waits"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: side)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=partial(noted, "fork")))
    monkeypatch.setattr(torch.cuda, "stream", of)
    contended(partial(noted, "front"), partial(noted, "back"), 3, torch.device("cuda")).run()
    first = ["fork on main", "side waits", "back on side", "front on main"]
    assert log == [*first, "back on side", "back on side"]


def test_products_are_those_of_their_operands() -> None:
    made: Any = MeasuredCalls(TWO, CPU, torch.float32)
    a, b = made.matrix("a", 7, 12), made.matrix("b", 12, 5)
    made.matmul(7, 5, 12)()
    torch.testing.assert_close(made.matrix("out", 7, 5), a @ b)
    sums = made.matrix("sums", 7, 5)
    sums.fill_(8.0)
    made.matmul(7, 5, 12, wide=True)()  # is added to
    torch.testing.assert_close(sums - 8, a @ b)
    made.matmul(3, 5, 12, batch=2)()
    tall = made.matrix("a", 6, 12) @ b
    torch.testing.assert_close(made.matrix("out", 6, 5), tall)
    a3 = made.matrix("a", 6, 12).view(2, 3, 12)
    for turned in (False, True):
        made.matmul(3, 5, 12, batch=2, apart=True, turned=turned)()
        every = made.matrix("b", 24, 5)
        b3 = every.view(2, 5, 12).mT if turned else every.view(2, 12, 5)
        torch.testing.assert_close(made.matrix("out", 6, 5), (a3 @ b3).view(6, 5))


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_products_are_those_of_their_operands(kind: str) -> None:
    name, scaling = operands_of(kind)
    made = MeasuredCalls(TWO, CPU, getattr(torch, name), scaling)
    made.matmul(24, 32, 512)()
    whole = made.matrix("out", 24, 32, torch.bfloat16).clone()
    assert whole.isfinite().all() and whole.any(1).all()
    a, b = made.matrix("a", 24, 512).float(), made.matrix("b", 32, 512).float().t()
    torch.testing.assert_close(whole, (a @ b / GAIN**2).bfloat16(), rtol=1e-2, atol=1e-2)
    sums = made.matrix("sums", 24, 32, torch.float32)
    sums.fill_(8.0)
    made.matmul(24, 32, 512, wide=True)()  # is added to
    torch.testing.assert_close(sums - 8, whole.float(), rtol=1e-2, atol=1e-2)
