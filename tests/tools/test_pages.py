"""Frames of figures: files, and the reports, tables, pictures and pages made from them."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from docs.make import readme, regret
from ficco.errors import ConfigError
from ficco.heuristics import candidates, decide
from ficco.machine import find
from ficco.problems.products import Problem
from ficco.tools.bench import report
from ficco.tools.bench.cases import OPERATOR, Case
from ficco.tools.bench.frames import BENCH, append, records
from ficco.tools.bench.report import lines, modes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
Line = dict[str, Any]


def _rows() -> pd.DataFrame:
    """Two shapes in two modes, of a committed bench."""
    rows = BENCH.read(RESULTS / "measured-h200-4.csv")
    chosen = rows["case"].isin(("32768x2048x8192", "8192x7168x8192")) & (rows["mode"] != "graph")
    return BENCH.frame(rows[chosen].to_dict("records"))


def test_rows_survive_the_file(tmp_path: Path) -> None:
    rows, path = _rows(), tmp_path / "new" / "rows.csv"
    append(path, rows[:5])
    append(path, rows[5:])
    with path.open(newline="") as file:
        assert next(csv.reader(file)) == list(BENCH.columns)
    assert "\n\n" not in path.read_text() and "nan" not in path.read_text()
    # Equal up to the digits that a file holds.
    pd.testing.assert_frame_equal(BENCH.read(path), rows, rtol=1e-5)
    native = records(rows)[25]  # for JSON
    assert native["candidate"] == "pytorch-native" and native["ms"] is None
    assert (native["m"], type(native["m"])) == (32768, int)


def test_a_row_that_is_damaged_is_named(tmp_path: Path) -> None:
    path, columns = tmp_path / "rows.csv", list(BENCH.columns)
    with pytest.raises(ConfigError, match="cannot be read"):
        BENCH.read(path)
    append(path, _rows()[:3])
    intact = path.read_text().rstrip("\n")

    def with_cell(column: str, cell: str) -> str:
        rows = [line.split(",") for line in intact.splitlines()]
        rows[2][columns.index(column)] = cell
        return "\n".join(map(",".join, rows))

    messages = {f"{intact},7": "required a CSV file", "case,m\na,1": "columns"}
    messages[intact[: intact.rindex(",")]] = f"row 3, {columns[-1]}: the row ends before"
    for column, kind, *cells in (("m", "whole number", "-", "", "1.5"), ("ms", "number", "fast")):
        for cell in cells:
            message = f"row 2, {column}: required a {kind}, got '{cell}'"
            messages[with_cell(column, cell)] = message
    for damaged, message in messages.items():
        path.write_text(f"{damaged}\n")
        with pytest.raises(ConfigError, match=re.escape(message)):
            BENCH.read(path)
    with pytest.raises(KeyError, match="tokens"):
        BENCH.frame([{"tokens": 3}])


def test_an_operator_without_measured_shapes_is_named() -> None:
    skipped = {"operator": "matmul_reduce_scatter", "status": "skipped", "note": "out of time"}
    rows = pd.concat([_rows(), _rows().assign(**skipped)], ignore_index=True)
    page = report.report(rows, {}, "name", [])
    assert "skipped: out of time" in page.split("## Not measured")[1]


def test_the_best_schedule_is_chosen_by_the_ratio_that_is_shown() -> None:
    rows = _rows().query("mode == 'queued' and case == '8192x7168x8192' and candidate != 'auto'")
    auto = rows.query("candidate == 'shard-overlap'").assign(candidate="auto", note="is x (model)")
    rows = pd.concat([rows, auto], ignore_index=True)
    schedules = rows["kind"] == "ficco"
    for name, ratio in (("shard-overlap", "share"), ("uniform-fused-2d", "speedup")):
        rows.loc[rows["candidate"] == name, ratio] = 0.99 * rows.loc[schedules, ratio].max() + 0.1
        assert list(lines(rows, "queued", ratio)["best", "candidate"]) == [name]
    # Calls with auto are timed separately, but auto is never reported as faster than the best.
    rows.loc[rows["candidate"] == "auto", "share"] = 2.0
    best = lines(rows, "queued")
    for role in ("auto", "overlap", "best_1d", "best_2d"):
        assert (best["best", "share"] >= best[role, "share"]).all(), role
    assert list(report.schedules(best["best"])) == ["x"]
    assert "| 1.376 | x | 2.00 |" in report.report(rows, {}, "name", [])
    best = lines(rows.assign(share=math.nan), "queued")["best", "candidate"]
    assert list(best) == ["growing"]  # without ratios the medians decide


def test_tables_for_a_terminal(capsys: Any) -> None:
    rows = _rows()
    report.show_shape(rows[rows["case"] == "8192x7168x8192"])
    output = capsys.readouterr().out
    assert "8192x7168x8192: m=8192 n=7168 k=8192 bfloat16, 4 ranks" in output
    row = next(line for line in output.splitlines() if "hetero-fused-1d:pieces=4" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    # For each mode milliseconds, share of the ideal and microseconds of the host; then KiB.
    assert cells[1:] == ["1.463", "0.85", "141", "1.570", "0.84", "93", "192.0"]
    assert output.index("collective") < output.index("shard-overlap")  # fastest first
    assert "pytorch-native on 8192x7168x8192: skipped: applies for 2048" in output
    report.show_best(rows)
    output = capsys.readouterr().out
    assert "all_gather_matmul: best schedule per shape, queued" in output
    assert re.search(r"geometric mean +│ +│ +0.95 │ +1.40 │ +1.06 │", output)
    assert "\nof ideal    ideal over this time; above 1 if" in output
    report.show_best(rows.assign(vs_pytorch=math.nan))
    assert "x PyTorch" not in capsys.readouterr().out


def test_the_readme_keeps_everything_but_the_table(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- results:begin -->\nold\n<!-- results:end -->\nafter\n")
    table = readme.whole_table([(_rows(), {"device": "a device", "ranks": 4}, "docs/x.md")])
    readme.put_between(path, "results", table)
    readme.put_between(path, "results", table)
    page = path.read_text()
    assert page.startswith("before\n") and page.endswith("\nafter\n") and "old" not in page
    assert page.count("| `all_gather_matmul` |") == 2
    path.write_text("no markers")
    with pytest.raises(ConfigError, match="markers"):
        readme.put_between(path, "results", table)


def test_regret_of_a_file_without_kernel_schedules() -> None:
    """The regret is that of ``auto``'s choice without kernels, for all shapes of the file."""
    machine = find("h200-2", None)
    rows = BENCH.read(RESULTS / "unseen-h200-2.csv").query("case == '512x3584x2048'")
    problem = Case("", 512, 3584, 2048).problem(2)
    assert decide(problem, machine=machine).schedule.mover == "kernel"
    assert "serial:kernel" not in set(rows["candidate"])
    losses = [loss for _, loss in regret.regrets(rows, machine) if loss is not None]
    assert len(losses) == 2 and all("kernel" not in loss.auto[0] for loss in losses)
    assert losses[0].best[0] == "shard-overlap:kernel"  # a tuned entry may name it


def test_regret_compares_auto_with_its_candidates(tmp_path: Path) -> None:
    machine, pair = find("h200-4", None), find("h200-2", None)
    problem = Problem("all_gather_matmul", (8192,) * 4, 2048, 8192, "bfloat16")
    chosen = str(decide(problem, machine=machine).schedule)
    names, others = map(str, candidates(problem, machine)), (chosen, "serial", "serial:collective")
    slower = next(name for name in names if name not in others)
    excluded = "uniform-unfused-2d:pieces=3,pull"  # not a candidate of auto, however fast
    fields: Line = {"operator": OPERATOR, "case": "a", "m": 32768, "n": 2048, "k": 8192, "world": 4}
    fields |= {"dtype": "bfloat16", "mode": "queued", "kind": "ficco", "status": "ok"}

    def rows_of(times: dict[str, float], **more: Any) -> pd.DataFrame:
        return BENCH.frame({**fields, **more, "candidate": n, "ms": ms} for n, ms in times.items())

    rows = rows_of({chosen: 2.0, slower: 1.6, "serial": 3.0, excluded: 1.0})
    ((mode, shape),) = regret.regrets(rows, machine)
    assert mode == "queued"
    assert (shape.best, shape.auto) == ((slower, 1.6), (chosen, 2.0))
    assert shape.loss == pytest.approx(0.25) and excluded not in shape.errors
    # The even rounds choose the best schedule, and the odd ones time it.
    halves = rows.assign(mode="graph", ms_even=rows["ms"], ms_odd=rows["ms"][::-1].to_numpy())
    ((mode, shape),) = regret.regrets(halves.iloc[:2], machine)
    assert mode == "graph"
    assert (shape.best, shape.auto) == ((slower, 3.0), (chosen, 1.0))
    # Several names of one plan have one time, the median of their times.
    times = {"growing": 2.0, "shrinking": 1.0, "shard-overlap": 3.0, "serial": 1.5}
    both_rows = rows_of(times, m=1536, n=5504, k=4096, world=2)
    ((_, shape),) = regret.regrets(both_rows, pair)
    assert shape.others == 1.5
    # The first candidate's name stands for the plan, with the median time.
    assert (shape.auto, shape.best) == (("growing:compute=2", 2.0), ("serial", 1.5))
    # Another operator has separate decisions and pages.
    scatter = Problem("matmul_reduce_scatter", (8192,) * 4, 8192, 2048, "bfloat16")
    scattered = str(decide(scatter, machine=machine).schedule)
    summed = rows_of({scattered: 2.0, "serial": 3.0}, operator=scatter.operator, n=8192, k=2048)
    page = regret.report(pd.concat([rows, summed]), machine, "name")
    assert "## matmul_reduce_scatter, queued" in page and "## all_gather_matmul, queued" in page
    # The page counts shapes without a measurement of auto's choice.
    without_auto = rows[rows["candidate"] != chosen]
    page = regret.report(pd.concat([rows, without_auto.assign(case="b")]), machine, "name")
    assert "| shapes | 1 |" in page and "was not measured | 1 |" in page
    with pytest.raises(ValueError, match="--schedules candidates"):
        regret.report(without_auto, machine, "name")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="other.csv: header: required columns case"):
        regret.main([str(tmp_path / "other.csv")])


def test_pictures_have_a_bar_for_auto_and_break_into_rows(tmp_path: Path, monkeypatch: Any) -> None:
    figures: list[Any] = []

    @contextmanager
    def recorded(*args: Any, real: Any = report.picture) -> Iterator[Any]:
        with real(*args) as figure:
            figures.append(figure)
            yield figure

    monkeypatch.setattr(report, "picture", recorded)
    for name, shapes, rows in (("measured-h200-4", 8, 1), ("unseen-h200-4", 27, 3)):
        table = BENCH.read(RESULTS / f"{name}.csv")
        shown = modes(table)
        report.shares(table, shown, tmp_path / "share.png", name)
        panels = figures.pop().axes
        assert len(panels) == rows * len(shown)
        assert sum(len(panel.get_xticks()) for panel in panels) == shapes * len(shown)
        assert "ficco, auto" in panels[0].get_legend_handles_labels()[1]
        report.speedups(table, shown, tmp_path / "speedup.png", name)
        assert all(axes.get_legend() is None for axes in figures[-1].axes)  # bars stay visible
        assert len(figures.pop().legends) == 1
