"""Losses: one small run, its rows, its pictures, and what is measured during what."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import pytest
import ranks
import torch
import torch.distributed as dist

import ficco.cli
from ficco.bench import characterize as characterise
from ficco.bench import plots
from ficco.bench.cases import Case, of_dtypes
from ficco.bench.characterize import COLLECTIVE, PIECES, SHARDS
from ficco.bench.frames import LOSSES, append, read_description
from ficco.bench.inputs import GAIN
from ficco.bench.series import MOST_IN_BACKGROUND, MeasuredCalls, calls_to_cover, contended
from ficco.errors import ConfigError
from ficco.options import current
from ficco.scaling import SCALED, operands_of

CPU = torch.device("cpu")


# What is measured during what.


@pytest.mark.parametrize(
    ("front", "back", "count"), [(4.0, 4.0, 2), (4.0, 1.0, 8), (1.0, 9.0, 1), (9.0, 0.01, 0)]
)
def test_what_runs_behind_goes_on_longer_than_what_is_in_front(
    front: float, back: float, count: int
) -> None:
    assert calls_to_cover([front], [back]) == (count or MOST_IN_BACKGROUND)


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


def test_what_is_behind_has_the_options_in_force() -> None:
    limits: list[float] = []
    runner = contended(lambda: None, lambda: limits.append(current().timeout_s), 1, CPU)
    with ficco.options(timeout_s=7), runner.context():
        runner.run()
    assert limits == [7.0]


def test_an_error_behind_is_not_lost() -> None:
    def fail() -> None:
        raise OSError("in the background")

    runner = contended(lambda: None, fail, 1, CPU)
    with pytest.raises(OSError, match="in the background"), runner.context():
        runner.run()


class FakeStream:
    """Stands for streams and events; ``now`` is the stream in force."""

    now = "main"

    def __init__(self, name: str = "side") -> None:
        self.name = name

    def record(self) -> None:
        log.append(f"fork of {FakeStream.now}")

    def wait_event(self, event: FakeStream) -> None:
        log.append(f"{self.name} waits")

    def __enter__(self) -> None:
        FakeStream.now = self.name

    def __exit__(self, *error: object) -> None:
        FakeStream.now = "main"


log: list[str] = []


def test_on_a_gpu_what_is_behind_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    log.clear()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    runner = contended(
        lambda: log.append(f"front on {FakeStream.now}"),
        lambda: log.append(f"back on {FakeStream.now}"),
        3,
        torch.device("cuda"),
    )
    runner.run()
    assert log == [
        "fork of main",
        "side waits",
        "back on side",
        "front on main",
        "back on side",
        "back on side",
    ]


def test_parts_add_up_to_the_whole() -> None:
    made = MeasuredCalls(FakeGroup(), CPU, torch.float32)
    a, b = made.matrix("a", 7, 12), made.matrix("b", 12, 5)
    whole = a @ b
    for parts in (1, 3, 7, 9):
        made.matmul(7, 5, 12, parts=parts)()
        torch.testing.assert_close(made.matrix("out", 7, 5), whole)
    for parts in (2, 4):
        made.accumulated(7, 5, 12, parts)()
        sums = made.memory["sums torch.float32"]
        torch.testing.assert_close(sums[:35].view(7, 5), whole)
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
def test_scaled_parts_add_up_to_the_whole(kind: str) -> None:
    name, scaling = operands_of(kind)
    made = MeasuredCalls(FakeGroup(), CPU, getattr(torch, name), scaling)
    made.matmul(24, 32, 512)()
    whole = made.matrix("out", 24, 32, torch.bfloat16).clone()
    assert whole.isfinite().all() and whole.any(1).all()
    a, b = made.matrix("a", 24, 512).float(), made.matrix("b", 32, 512).float().t()
    torch.testing.assert_close(whole, (a @ b / GAIN**2).bfloat16(), rtol=1e-2, atol=1e-2)
    for parts in (2, 4):
        made.matrix("out", 24, 32, torch.bfloat16).zero_()
        made.matmul(24, 32, 512, parts=parts)()
        assert torch.equal(made.matrix("out", 24, 32, torch.bfloat16), whole)
        made.accumulated(24, 32, 512, parts, rounding=True)()
        out = made.matrix("out", 24, 32, torch.bfloat16)
        torch.testing.assert_close(out, whole, rtol=1e-2, atol=1e-3)
    sums = made.matrix("sums", 24, 32, torch.float32)
    sums.fill_(8.0)
    made.matmul(24, 32, 512, wide=True)()  # is added to
    torch.testing.assert_close(sums - 8, whole.float(), rtol=1e-2, atol=1e-2)


def run_parts(at: ranks.Rank, csv: str, kinds: tuple[str, ...]) -> Any:
    cases = of_dtypes([Case("x", 64, 32, 512)], kinds)
    settings = characterise.LossSettings(
        cases=tuple(cases), sizes=(), parts=4, device="cpu", seconds=1, csv=Path(csv), rounds=3
    )
    return characterise.characterize(settings)


def test_one_rank_measures_products_as_several_cut_them(tmp_path: Path) -> None:
    csv = tmp_path / "losses.csv"
    ranks.run(1, run_parts, str(csv), ("float32", "bfloat16", "fp8-row"))
    read = LOSSES.read(csv)
    assert set(read["status"]) == {"ok"} and set(read["loss"]) == {characterise.GEMM_DIL}
    assert list(read["case"]) == [
        name for name in ("x float32", "x bfloat16", "x fp8-row") for _ in range(4)
    ]
    assert list(read["parts"]) == [4, 16, 4, 16] * 3 and set(read["world"]) == {4}
    assert [path.name for path in plots.draw(read, csv.with_suffix(""), "")] == [
        "losses_gemm-dil.png"
    ]


def test_what_is_said_to_be_left_follows_the_pace_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step takes three times the seconds that it is given: so will the rest."""
    now = [0.0]
    monkeypatch.setattr(characterise.time, "monotonic", lambda: now[0])

    def attempt(self: Any, name: str, action: Any) -> list[Any]:
        *_, seconds = action.args
        now[0] += 3 * seconds
        return []

    monkeypatch.setattr(characterise.LossBench, "attempt", attempt)
    run = object.__new__(characterise.LossBench)
    cases = tuple(Case(name, 32, 8, 16) for name in "xy")
    run.settings = characterise.LossSettings(
        cases=cases, sizes=(), device="cpu", seconds=100, rounds=1, csv=Path("unused.csv")
    )
    run.rank, run.world = 0, 2
    assert list(run._steps()) == [[], [], []]
    said = [line for line in capsys.readouterr().err.splitlines() if "about" in line]
    # 15 s for the communication, 42.5 s for each product.
    assert [line.split("about ")[1] for line in said] == [
        f"{seconds} s left ..." for seconds in (100, 255, 128)
    ]
    assert now == [300.0]


class FakeGroup:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


# A run.

CASE = Case("32x8x16", 32, 8, 16, "float32")
SIZES = (4096, 65536)


def run_small(at: ranks.Rank, csv: str, cases: tuple[Case, ...]) -> pd.DataFrame | None:
    device = at.device.type
    settings = characterise.LossSettings(
        cases=cases,
        sizes=SIZES,
        device=device,
        seconds=1.5,
        csv=Path(csv),
        command="tests",
        rounds=4,
    )
    return characterise.characterize(settings)


def test_all_losses_are_measured_and_follow_from_their_times(tmp_path: Path) -> None:
    csv = tmp_path / "losses.csv"
    skipped = replace(CASE, name="other", skip="waits for another operator")
    found, nothing = ranks.run(2, run_small, str(csv), (CASE, skipped))
    assert nothing is None
    read = LOSSES.read(csv)
    assert list(read["status"]) == ["ok"] * (4 + 4 + 6) + ["skipped"]
    pd.testing.assert_frame_equal(read, found, rtol=1e-5)
    measured = read[read["status"] == "ok"]
    rows = list(measured.itertuples())
    assert {(row.nbytes, row.mover) for row in rows if row.loss == characterise.COPY_DIL} == {
        (size, mover) for size in SIZES for mover in (PIECES, COLLECTIVE)
    }
    assert [(row.cut, row.parts) for row in rows if row.loss == characterise.GEMM_DIL] == [
        ("rows", 2), ("rows", 4), ("columns", 2), ("columns", 4)
    ]  # fmt: skip
    for loss in (characterise.GEMM_CIL, characterise.COPY_CIL):
        movers = [row.mover for row in rows if row.loss == loss]
        assert movers == [PIECES, SHARDS, COLLECTIVE]
    for row in rows:
        alone, times = ([float(t) for t in text.split()] for text in (row.alone_us, row.us))
        assert len(alone) == len(times) == row.rounds >= 3
        ratios = [b / a for a, b in zip(alone, times, strict=True)]
        assert row.ratio == pytest.approx(median(ratios), rel=1e-4)
        assert row.alone_ms == pytest.approx(median(alone) / 1e3, rel=1e-4)
        assert row.ms == pytest.approx(median(times) / 1e3, rel=1e-4)
    about = read_description(csv)
    assert about["command"] == "tests" and about["ranks"] == 2 and about["date"]

    pictures = plots.draw(read, csv.with_suffix(""), "a title")
    assert [path.name for path in pictures] == [
        "losses_gemm-dil.png",
        "losses_communication-dil.png",
        "losses_cil.png",
        "losses_proportion.png",
    ]
    assert all(path.stat().st_size > 5000 for path in pictures)
    for path in pictures:
        path.unlink()
    assert ficco.cli.run(["characterize", "--plot", str(csv)]) == 0
    assert all(path.exists() for path in pictures)


@pytest.mark.multigpu
def test_losses_are_measured_on_gpus(tmp_path: Path) -> None:
    ranks.need_own_gpus(2)
    csv = tmp_path / "losses.csv"
    case = Case("4096x2048x4096", 4096, 2048, 4096)
    ranks.run(2, run_small, str(csv), (case,), device="cuda", timeout=120)
    rows = LOSSES.read(csv)
    assert list(rows["status"]) == ["ok"] * (4 + 4 + 6)
    assert rows["ratio"].between(0.5, 20).all()


def fail_in_the_midst(at: ranks.Rank, csv: str) -> list[dict[str, Any]]:
    before = MeasuredCalls.accumulated

    def fail(self: MeasuredCalls, *sizes: Any, **how: Any) -> Any:
        if at.rank == 1:
            raise RuntimeError("no room\nfor that")
        return before(self, *sizes, **how)

    MeasuredCalls.accumulated = fail  # type: ignore[method-assign]
    try:
        dist.barrier()
        # The rank that is left learns of it from the other's absence in nothing but `gather`.
        settings = characterise.LossSettings(
            cases=(), sizes=SIZES, device="cpu", seconds=0.5, csv=Path(csv), rounds=2
        )
        run = characterise.LossBench(settings)
        rows = run.attempt("x", lambda: list(begin_parts(run)))
        return rows + run.attempt("y", list)
    finally:
        MeasuredCalls.accumulated = before  # type: ignore[method-assign]


def begin_parts(run: Any) -> Iterator[dict[str, Any]]:
    made = MeasuredCalls(run.group, run.device, torch.float32)
    made.accumulated(4, 4, 4, 2)
    yield from ()


def test_a_shape_that_fails_on_one_rank_fails_on_all_and_the_run_goes_on(tmp_path: Path) -> None:
    for rows in ranks.run(2, fail_in_the_midst, str(tmp_path / "x.csv")):
        assert [(row["case"], row["status"], row["note"]) for row in rows] == [
            ("x", "failed", "RuntimeError: no room")
        ]


# Pictures and files.


def row(loss: str, ratio: float, **what: Any) -> dict[str, Any]:
    shape = {"case": "8x8x8", "m": 8, "n": 8, "k": 8, "dtype": "float32", "world": 2}
    figures = {"alone_ms": 1.0, "ms": ratio, "ratio": ratio, "status": "ok"}
    return {"loss": loss, **shape, **figures, **what}


def test_pictures_need_their_rows(tmp_path: Path) -> None:
    assert plots.draw(LOSSES.frame([]), tmp_path / "x", "") == []
    only = LOSSES.frame([row(characterise.GEMM_DIL, 1.1, cut="rows", parts=2)])
    assert [p.name for p in plots.draw(only, tmp_path / "x", "")] == ["x_gemm-dil.png"]
    assert plots.draw(only.assign(status="failed"), tmp_path / "x", "") == []


def test_bars_are_the_ratios_of_their_shapes(tmp_path: Path) -> None:
    rows = [
        row("gemm-dil", 1.5, cut="rows", parts=2),
        row("gemm-dil", 2.5, cut="rows", parts=4),
        row("gemm-dil", 1.25, cut="columns", parts=2),
        row("gemm-dil", 3.5, cut="columns", parts=4),
    ]
    (axes,) = plots.gemm_dil(LOSSES.frame(rows), tmp_path / "x.png", "").axes
    assert [bar.get_height() for bar in axes.patches] == [1.5, 2.5, 1.25, 3.5]
    shares = [
        row("gemm-dil", 1.3, cut="rows", parts=2),
        row("gemm-cil", 1.1, mover=PIECES),
        row("communication-dil", 1.2, mover=PIECES, nbytes=64, m=0),
        row("copy-cil", 1.2, mover=PIECES, nbytes=60),
    ]
    figure = plots.proportion(LOSSES.frame(shares), tmp_path / "y.png", "")
    heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    assert heights == [pytest.approx([0.75, 0.25]), pytest.approx([0.5, 0.5])]


def test_rows_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    rows = LOSSES.frame(
        [
            row("gemm-dil", 1.5, us="1 2"),
            row("gemm-cil", 2.0, status="failed", note="a, b"),
            row("gemm-dil", math.nan),
        ]
    )
    append(path, rows[:1])
    append(path, rows[1:])
    pd.testing.assert_frame_equal(LOSSES.read(path), rows)
    path.write_text("loss,case\n")
    with pytest.raises(ConfigError, match="required columns"):
        LOSSES.read(path)


def test_wrong_arguments_are_refused(capsys: Any) -> None:
    base = ["characterize", "--device", "cpu", "--ranks", "2"]
    assert ficco.cli.run([*base, "--seconds", "0"]) == 2
    assert ficco.cli.run([*base, "--set", "cpu", "--shapes", "x.csv"]) == 2
    assert ficco.cli.run([*base, "--shapes", "none.csv"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert ficco.cli.run(["characterize", "--device", "cpu", "--ranks", "1"]) == 2
    assert "--ranks: required at least 2" in capsys.readouterr().err
