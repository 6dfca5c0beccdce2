"""Decisions of schedule="auto", ficco.explain, and ``ficco explain`` on the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import own_group
from ranks import Failure, Rank, caught, on_ranks
from test_model import ASSUMED, MACHINE, PROBLEM, problem

import ficco
from ficco import errors
from ficco.heuristics import Decision, decide, families, problem_of_sizes, where
from ficco.heuristics.candidates import ALL_OFFERS, SERIALS, candidates, is_serial
from ficco.heuristics.decide import _stored, _subfolder, described
from ficco.integrations.vllm import _fewest_rows
from ficco.machine import (
    Collective,
    Fingerprint,
    Machine,
    Provenance,
    Thresholds,
    Tuned,
    digest,
    dumps,
    find,
    loads,
    nearest,
    save,
)
from ficco.problems.products import OPERATORS, Problem
from ficco.runtime.workspace import workspaces
from ficco.schedules import NAMED, Schedule
from ficco.simulate import predict
from ficco.tools import cli

#: A machine that has only the thresholds of the rule.
RULED = Machine("ruled", "toy", 4, thresholds=Thresholds(1e12, 5e12, ASSUMED))

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

TUNED = Tuned(
    PROBLEM.operator, PROBLEM.rows, PROBLEM.n, PROBLEM.k, PROBLEM.dtype, queued="growing:tail=8",
    idle="shrinking:pieces=3", seconds=(2e-3, 3e-3), serial=(4e-3, 4e-3), provenance=ASSUMED,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _forget(monkeypatch: Patch) -> None:
    """Let each test raise the warnings that are raised once per process."""
    monkeypatch.setattr(errors, "_warned", set())


def test_requests_and_trivial_problems_need_no_figures() -> None:
    tuned = replace(MACHINE, tuned=(TUNED,))
    name = "hetero-fused-2d:pull"
    for schedule, machine in ((name, None), (Schedule.parse(name), None), (name, tuned)):
        decision = decide(PROBLEM, schedule, machine=machine)
        assert (decision.source, str(decision)) == ("caller", f"{name} (requested)")
    with pytest.raises(ValueError, match="ring is for operators that sum over ranks"):
        decide(PROBLEM, "ring", machine=MACHINE)
    one_rank = decide(problem(8192, 7168, 8192, world=1), machine=MACHINE)
    assert one_rank.schedule == NAMED["serial"]
    for sizes in ((0, 8, 8), (8, 0, 8), (8, 8, 0)):
        decision = decide(problem(*sizes), machine=MACHINE)
        assert str(decision) == "serial:collective (rule: there is nothing to multiply)"
    with pytest.raises(ValueError, match="required 'auto', a name or a Schedule, got 5"):
        decide(PROBLEM, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode: required one of eager, queued, idle"):
        decide(PROBLEM, mode="graph")


def test_a_tuned_entry_takes_precedence_over_the_model() -> None:
    another = replace(TUNED, k=2 * TUNED.k, queued="serial", idle="serial")
    machine = replace(MACHINE, tuned=(another, TUNED))
    for mode, expected, figures, hidden_s in (
        ("queued", "growing:tail=8", "2 ms, 2.00 times", 2e-3),
        ("idle", "shrinking:pieces=3", "3 ms, 1.33 times", 1e-3),
        ("eager", "shrinking:pieces=3", "3 ms, 1.33 times", 1e-3),
    ):
        decision = decide(PROBLEM, machine=machine, mode=mode)
        assert (str(decision.schedule), decision.source) == (expected, "tuned")
        assert decision.reason == f"measured on toy: {figures} as fast as serial"
        assert decision.hidden_s == pytest.approx(hidden_s)
        model = decide(replace(PROBLEM, n=512), machine=machine, mode=mode)
        times = {c.schedule: getattr(c, mode, c.queued) for c in model.candidates}
        hidden = [times[name] - times[str(model.schedule)] for name in SERIALS]
        assert model.source == "model" and model.hidden_s in hidden
        assert decide(PROBLEM, "growing", machine=machine, mode=mode).hidden_s is None


def test_a_tuned_entry_serves_only_its_operator_and_its_blocks() -> None:
    table = ((1, 2, 3, 4), (4, 3, 2, 1), (2, 2, 2, 2), (3, 3, 3, 3))
    blocks = Problem.of_blocks("all_to_all_matmul", table, 64, 64, "bfloat16")
    sums = Problem("matmul_reduce_scatter", PROBLEM.rows, PROBLEM.n, PROBLEM.k, PROBLEM.dtype)
    first, second = (
        replace(TUNED, operator=p.operator, rows=p.rows, n=p.n, k=p.k, blocks=p.blocks, idle=name)
        for p, name in ((blocks, "growing:tail=3"), (sums, "ring:pieces=3"))
    )
    machine = replace(MACHINE, tuned=(first, second))
    assert str(decide(blocks, machine=machine).schedule) == "growing:tail=3"
    assert str(decide(sums, machine=machine).schedule) == "ring:pieces=3"
    assert decide(PROBLEM, machine=machine).source == "model"
    turned = Problem.of_blocks("all_to_all_matmul", table[::-1], 64, 64, "bfloat16")
    assert turned.rows == blocks.rows and decide(turned, machine=machine).source == "model"
    assert loads(dumps(machine)).tuned == machine.tuned


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("whirling:pieces=2", "required one of"),
        ("growing:kernel", "kernel"),
        ("ring:pieces=3", "ring is for operators that sum"),
        ("tiled:pieces=2", "the engine has no product whose tiles wait"),
    ],
)
def test_a_tuned_entry_that_cannot_run_is_skipped(name: str, why: str) -> None:
    machine = replace(MACHINE, tuned=(replace(TUNED, queued=name),))
    facts: dict[str, Any] = {"machine": machine, "offers": ("dma",)}
    with pytest.warns(UserWarning, match=f"(?s)is skipped: .*{why}.*ficco tune") as warned:
        decision = decide(PROBLEM, mode="queued", **facts)
    assert decision.source == "model" and "toy" in str(warned[0].message)
    with warnings.catch_warnings():  # the warning is raised once
        warnings.simplefilter("error")
        assert decide(PROBLEM, mode="queued", **facts) == decision
        assert decide(PROBLEM, mode="idle", **facts).source == "tuned"
    if name.startswith("tiled"):
        assert str(decide(PROBLEM, machine=machine, mode="queued").schedule) == name


def test_the_rule_decides_without_figures_of_the_model() -> None:
    machine = replace(MACHINE, thresholds=RULED.thresholds)
    assert decide(PROBLEM, machine=machine).source == "model"
    wide = problem(65536, 2048, 8192)
    decision = decide(wide, machine=replace(machine, gemm=None, contention=None))
    assert (str(decision.schedule), decision.source) == ("hetero-fused-1d", "rule")
    for part in ("between the thresholds", "toy lacks gemm, contention", "ficco tune"):
        assert part in decision.reason
    mesh = replace(RULED, topology=replace(MACHINE.topology, kind="mesh"))
    assert str(decide(wide, machine=mesh).schedule) == "hetero-fused-1d:copy=3"  # over all links


def test_the_fallback_is_serial() -> None:
    for machine, why in (
        (None, "nobody described this machine"),
        (Machine("empty", "toy", 4), "empty lacks topology, .* and thresholds"),
        (replace(MACHINE, accelerator="cpu", ranks=8), "toy describes 8 ranks, not 4"),
    ):
        decision = decide(PROBLEM, machine=machine)
        assert (str(decision.schedule), decision.source) == ("serial:collective", "fallback")
        assert re.search(f"{why}.*`ficco tune`", decision.reason)
        assert decide(PROBLEM, machine=machine, mode="idle").schedule.compute == 1


def test_a_machine_of_another_size_serves_by_its_figures_per_rank() -> None:
    collective = Collective(((2**23 / 3, 1e-3), (2**23, 3e-3)), ASSUMED)
    tuned = replace(MACHINE, tuned=(TUNED,), all_gather=collective)
    decision = decide(problem(2048, 1024, 4096, world=2), machine=tuned, mode="queued")
    assert decision.source == "model"
    assert "on toy (as 2 ranks)" in decision.reason
    # Each of two ranks receives 8 MiB in one shard, as each of four does in three shards.
    (serial,) = (c for c in decision.candidates if c.schedule == "serial:collective")
    assert serial.queued == pytest.approx(1e-3 + 2e-3)
    blocks = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
    curve = Collective(((3e6, 1e-3), (9e6, 2e-3)), ASSUMED)
    sized = described(replace(MACHINE, **dict.fromkeys(blocks, curve)), 2)
    for block in blocks:  # one peer instead of three
        assert getattr(sized, block).curve == ((9e6, 1e-3), (27e6, 2e-3))
    for world, name in ((2, "h200-2"), (3, "h200-4"), (8, "h200-4")):
        assert nearest(Fingerprint("nvidia h200", world)).name == name
    assert nearest(Fingerprint("abacus", 4)) is None


_ASK = """
from ficco.heuristics import decide
from ficco.machine import find
from ficco.problems.products import Problem
machine = find("h200-4", None)
for rows, n, k in (([8192] * 4, 2048, 8192), ([2048] * 4, 3584, 4096), ([7, 900, 0, 3], 300, 512)):
    problem = Problem("all_gather_matmul", tuple(rows), n, k, "bfloat16")
    for mode in ("eager", "queued"):
        decision = decide(problem, machine=machine, mode=mode)
        print(decision, *(one.queued.hex() for one in decision.candidates))
"""


@pytest.mark.slow
def test_every_process_decides_alike(capsys: Capture) -> None:
    """This process, and a process with another hash seed."""
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    command = [sys.executable, "-c", _ASK]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    exec(_ASK, {})
    assert result.stdout == capsys.readouterr().out
    assert result.stdout.count("(model: ") == 6


def test_explain_shows_what_was_compared() -> None:
    decision = ficco.explain(
        "all_gather_matmul", m=4096, n=1024, k=4096, world=4, machine=MACHINE, captured=True
    )
    assert (str(decision.schedule), decision.source) == ("shard-overlap:compute=2", "model")
    queued = [candidate.queued for candidate in decision.candidates]
    assert queued == sorted(queued)
    by_name = {candidate.schedule: candidate for candidate in decision.candidates}
    chosen, serial = by_name["shard-overlap:compute=2"], by_name["serial:collective"]
    assert chosen.queued == pytest.approx(4e-3) and chosen.idle == pytest.approx(4e-3)
    assert (chosen.share, chosen.losses.gemm) == (pytest.approx(1.0), pytest.approx(1.0))
    assert chosen.extra_bytes == 3 * 2**23
    assert serial.share == pytest.approx(4 / 7)
    (line,) = (line for line in decision.table().splitlines() if line.startswith("*"))
    assert line.split()[:4] == ["*", "shard-overlap:compute=2", "4.00", "ms"]


def test_explain_takes_schedules_numbers_and_machines_of_any_kind(tmp_path: Path) -> None:
    sizes = {"m": 4096, "n": 1024, "k": 4096, "world": 4}
    decision = ficco.explain(GATHER, schedule="growing:tail=7", **sizes, machine=MACHINE)
    assert "growing:tail=7" in [candidate.schedule for candidate in decision.candidates]
    assert "* growing:tail=7" in decision.table()
    of_numpy = {name: np.int64(size) for name, size in sizes.items()}
    explained = ficco.explain(GATHER, **of_numpy, machine=MACHINE)
    assert explained.problem == decision.problem and type(explained.problem.n) is int
    assert "h200-4" in ficco.explain(GATHER, machine="h200-4", **sizes).reason
    heads = {"world": 4, "sequence": 64, "heads": 8, "head_size": 16, "machine": MACHINE}
    defaults = ficco.explain("all_gather_attention", **heads, window=None, kv_heads=None)
    assert defaults.problem == ficco.explain("all_gather_attention", **heads).problem
    path = tmp_path / "mine.yaml"
    save(MACHINE, path)
    assert "on toy" in ficco.explain(GATHER, machine=str(path), **sizes).reason


def test_options_and_explain_refuse_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="machine: required a name, a path or None, got 5"):
        ficco.Options(machine=5)  # type: ignore[arg-type]
    sizes: Any = {"operator": GATHER, "m": 2048, "n": 1024, "k": 4096, "world": 4}
    for invalid, message in (
        ({"world": 0}, "at least 1 rank"),
        ({"hosts": 8}, "hosts: required a divisor of 4 ranks, got 8"),
        ({"machine": 5}, "machine: required a Machine, a name.* or None, got 5"),
        ({"machine": "nowhere"}, "nowhere"),
    ):
        with pytest.raises((ValueError, ficco.ConfigError), match=message):
            ficco.explain(**{**sizes, **invalid})


SIZES = ["--m", "8192", "--n", "3584", "--k", "4096", "--machine", "h200-4"]
GATHER = "all_gather_matmul"


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_is_explained_planned_and_simulated(operator: str, capsys: Capture) -> None:
    def output(*command: str) -> str:
        assert cli.run([*command, "--operator", operator]) == 0
        return capsys.readouterr().out

    text = output("explain", *SIZES)
    decision = ficco.explain(operator, m=8192, n=3584, k=4096, world=4, machine="h200-4")
    assert text.startswith(f"{operator}(m=8192 (") and f"* {decision.schedule}" in text
    names = {candidate.schedule for candidate in decision.candidates}
    assert {"serial:collective", "serial", str(decision.schedule)} <= names
    assert all(0 < c.share <= 1.0 and c.losses.gemm >= 0.99 for c in decision.candidates)
    explained = json.loads(output("explain", *SIZES, "--json"))
    assert (explained["schedule"], explained["mode"]) == (str(decision.schedule), "eager")
    first, second = explained["candidates"][0], decision.candidates[0]
    assert first["predicted"]["queued"] == second.queued and first["measured"] == {}

    # `ficco plan auto` decides as a call does.
    planned = json.loads(output("plan", "auto", *SIZES, "--rank", "3", "--json"))
    assert planned["problem"]["operator"] == operator and planned["source"] == "model"
    assert planned["reason"] == explained["reason"] == decision.reason

    rows = {r["candidate"]: r for r in json.loads(output("simulate", "growing", *SIZES, "--json"))}
    assert rows["growing"]["ms"] >= rows["ideal"]["ms"] > 0
    assert (rows["growing"]["n"], rows["growing"]["k"]) == (3584, 4096)
    # A scattering operator takes the shapes of the next layer, whose n and k are exchanged.
    first = json.loads(output("simulate", "growing", "--set", "small", "--json"))[0]
    sends = operator.startswith("matmul_")
    assert (first["n"], first["k"]) == ((4096, 1024) if sends else (1024, 4096))


def test_explain_takes_rows_as_the_operators_do(capsys: Capture) -> None:
    sizes = {"n": 64, "k": 32, "world": 2, "machine": MACHINE}
    table, text = [[1, 2], [3, 4]], "1,2;3,4"
    for operator, m, rows, argument in (
        ("matmul_reduce_scatter", 9, [2, 7], "2,7"),
        ("all_to_all_matmul", 6, table, text),
        ("matmul_all_to_all", 7, table, text),
    ):
        explained = ficco.explain(operator, m=m, rows=rows, **sizes).problem
        make = Problem.of_blocks if rows is table else Problem
        assert explained == make(operator, tuple(rows), 64, 32, "bfloat16")
        options = f"--operator {operator} --m {m} --rows {argument} --n 64 --k 32 --world 2".split()
        for command in (["explain"], ["plan", "serial"]):
            assert cli.run([*command, *options, "--machine", "h200-4"]) == 0
            assert f"rows={rows}" in capsys.readouterr().out
    assert ficco.explain("all_to_all_matmul", m=7, **sizes).problem.rows == (7, 7)
    for operator, m, rows, message in (
        ("matmul_reduce_scatter", 9, [2, 6], "the sum 9, which is m, got 8"),
        ("matmul_reduce_scatter", 9, [9], "required 2 whole numbers"),
        ("all_to_all_matmul", 7, table, "the largest sum 7, which is m, got 6"),
        ("matmul_reduce_scatter", 9, 9, "required 2 whole numbers, got 9; "),
        ("all_to_all_matmul", 6, [2, 4], "a table of 2 x 2 whole numbers"),
        ("all_to_all_matmul", 6, [[1, "2"], [3, 4]], "a table of 2 x 2 whole numbers"),
        ("all_to_all_matmul", 6, [[1, 2, 3], [3, 4, 5]], "a table of 2 x 2 whole numbers"),
        ("matmul_all_reduce", 6, [3, 3], "required none for matmul_all_reduce"),
    ):
        with pytest.raises(ValueError, match=f"rows: .*{message}"):
            ficco.explain(operator, m=m, rows=rows, **sizes)


@pytest.mark.slow
def test_the_command_measures_what_it_predicts(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    schedules = [Schedule.parse(name) for name in ("serial:collective", "serial", "growing")]
    monkeypatch.setattr(families, "candidates", lambda *_: tuple(schedules))
    machine = replace(MACHINE, accelerator="cpu", ranks=2)
    save(machine, tmp_path / "mine.yaml")
    sizes = ["--m", "64", "--n", "16", "--k", "32", "--dtype", "float32"]
    options = ["--machine", str(tmp_path / "mine.yaml"), "--measure", "--seconds", "1", "--json"]
    picture = tmp_path / "sub" / "candidates.png"
    assert cli.run(["explain", *sizes, *options, "--draw", str(picture)]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["mode"] == "idle" and len(explained["candidates"]) == 3
    for candidate in explained["candidates"]:
        assert candidate["measured"]["idle"] > 0 and candidate["predicted"]["idle"] > 0, candidate
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_refuses_invalid_arguments(capsys: Capture) -> None:
    two = ["--world", "2"]
    for arguments, message in (
        (["--schedule", "ring"], "operators that sum"),
        (["--world", "0"], "at least 1 rank, got 0"),
        (["--world", str(10**20)], "--world: required at most 1024 ranks, got 1000000"),
        (["--seconds", "3"], "--measure"),
        (["--measure", "--seconds", "-3"], "above 0 and at most 604800, got -3"),
        (["--operator", "matmul"], "--operator: required one of all_gather_matmul, "),
        ([*two, "--rows", "1,2"], "--rows: required the sum 8192"),
        ([*two, "--rows", "²,2"], "--rows: required whole numbers"),
        ([*two, "--rows", "8191,1", "--measure"], "without --rows"),
    ):
        assert cli.run(["explain", *SIZES, *arguments]) == 2
        assert message in capsys.readouterr().err


def test_the_machine_gives_the_default_number_of_ranks(capsys: Capture, monkeypatch: Patch) -> None:
    host = Fingerprint("nvidia h200", 2)
    facts = where(None, None, host)
    assert facts.machine is not None and (facts.machine.name, facts.world) == ("h200-2", 2)
    modes = [where(None, 3, host, captured=captured).mode for captured in (False, True)]
    assert modes == ["eager", "queued"] and where("cpu", 4, host).mode == "idle"
    if not torch.cuda.is_available():
        assert cli.run(["explain", *SIZES[:6]]) == 0
        assert "(2048 x 4 ranks)" in capsys.readouterr().out  # of cpu.yaml
    for name in ("find", "nearest"):
        monkeypatch.setattr(sys.modules["ficco.heuristics.decide"], name, lambda *_: None)
    assert cli.run(["explain", *SIZES[:6]]) == 2
    message = capsys.readouterr().err
    assert "--world: required" in message and "--machine" in message


def test_simulate_explain_and_plan_rescale_a_machine_alike(tmp_path: Path, capsys: Capture) -> None:
    sizes = ["--m", "512", "--n", "64", "--k", "64"]

    def simulated(world: int) -> dict[str, Any]:
        assert cli.run(["simulate", "growing", *sizes, "--world", str(world), "--json"]) == 0
        return {row["candidate"]: row for row in json.loads(capsys.readouterr().out)}

    row, sized = simulated(8)["growing"], described(find("h200-4", None), 8)
    assert row["machine"] == "h200-4 (as 8 ranks)"
    sized_problem = Problem("all_gather_matmul", (64,) * 8, 64, 64, "bfloat16")
    assert row["ms"] == predict(sized_problem, NAMED["growing"], sized) * 1e3
    assert simulated(1)["collective"]["ms"] == 0.0
    # A machine that explain cannot use is not simulated.
    world = [*sizes, "--world", "8", "--machine", "cpu"]
    assert cli.run(["explain", *world]) == 0
    assert "cpu describes 4 ranks, not 8" in capsys.readouterr().out
    for command in (["simulate"], ["plan", "growing", "--draw", str(tmp_path / "x.png")]):
        assert cli.run([*command, *world]) == 2
        assert "--world: required 4 ranks, got 8" in capsys.readouterr().err
    assert cli.run(["plan", "growing", *world]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_narrow_table_leaves_out_columns_not_names(capsys: Capture, monkeypatch: Patch) -> None:
    decision = ficco.explain(GATHER, m=8192, n=3584, k=4096, world=4, machine="h200-4")
    for width in (60, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        assert cli.run(["explain", *SIZES]) == 0
        text, legend = capsys.readouterr().out.split("\n\n")
        printed = text.splitlines()  # the reason may take several lines
        lines = printed[[line.split()[0] for line in printed].index("schedule") :]
        assert all(len(line) <= width for line in [*lines, *legend.splitlines()]), lines
        heads = ["queued", "idle", *["of ideal", "DIL", "CIL", "memory"] * (width == 120)]
        entries = [line for line in legend.splitlines() if line[0] != " "]
        assert [re.split(r"  +", line)[0] for line in entries] == heads
        figures = [re.findall(r"\d(\.\d+)? ([um]s)", line) for line in lines if " us" in line]
        assert {len(line) for line in figures} == {2}  # one unit and number of decimals per column
        for column in zip(*figures, strict=True):
            assert len({(len(decimals), unit) for decimals, unit in column}) == 1
        assert any(line.startswith(f"* {decision.schedule} ") for line in lines)
        names = [line[2:].split()[0] for line in lines[1 : 1 + len(decision.candidates)]]
        assert names == [candidate.schedule for candidate in decision.candidates]
        assert ("left out" in lines[-1]) == (width < 120)


def test_a_problem_that_exceeds_memory_is_reported(capsys: Capture) -> None:
    sizes = ["--m", "8388608", "--n", "8192", "--k", "32768", "--machine", "h200-4"]
    # 128 GiB of A, 0.5 GiB of B, 128 GiB of the product, and three shards of peers.
    for command in (["explain", "--schedule", "growing"], ["plan", "growing", "--world", "4"]):
        assert cli.run([*command, *sizes]) == 0
        text = capsys.readouterr().out
        assert "would hold 640 GiB with operands and product, h200-4 has 140 GiB" in text


OFFERS = ("dma", "kernel")


def by_kernel(machine: Machine, source: str = "measured") -> Machine:
    """Return a machine whose kernels copy at the engines' rates, and its engines at a quarter."""
    slow = replace(machine.copies, curve=tuple((size, r / 4) for size, r in machine.copies.curve))
    known = replace(machine.copies, latency=1e-6, gap=1e-6, provenance=Provenance(source))
    return replace(machine, copies=slow, kernel_copies=known)


def test_the_model_takes_no_copy_kernels_that_overlap_products() -> None:
    fast = by_kernel(MACHINE)
    decision = decide(PROBLEM, machine=fast, offers=OFFERS)
    assert decision.source == "model" and decision.schedule.mover != "kernel"
    by_kernels = [s for s in candidates(PROBLEM, fast, OFFERS) if s.mover == "kernel"]
    fastest = min(predict(PROBLEM, s, fast, "idle") for s in by_kernels if not is_serial(s))
    assert fastest < predict(PROBLEM, decision.schedule, fast, "idle")


def test_the_model_may_take_copy_kernels_that_overlap_no_product() -> None:
    small, fast = problem(512, 1024, 512), by_kernel(MACHINE)
    decision = decide(small, machine=fast)
    assert (str(decision.schedule), decision.source) == ("serial:kernel", "model")
    assert "serial:kernel" in [candidate.schedule for candidate in decision.candidates]
    for machine, offers in (
        (fast, ("dma",)),  # no compiler
        (by_kernel(MACHINE, "assumed"), OFFERS),
        (replace(fast, kernel_copies=None), OFFERS),
        (replace(fast, accelerator="cpu"), OFFERS),
    ):
        without = decide(small, machine=machine, offers=offers)
        assert without.source == "model" and without.schedule.mover != "kernel"
        assert "serial:kernel" not in [candidate.schedule for candidate in without.candidates]
    # Copies after a product use no kernel, except for the kernel that sums for two ranks.
    for operator in ("matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all"):
        for world, name in ((2, "one-shot"), (4, "serial")):
            sized = problem_of_sizes(operator, 512, 1024, 512, "bfloat16", world)
            schedule = decide(sized, machine=replace(fast, ranks=world)).schedule
            assert str(schedule) == name if sized.kind.sums else schedule.mover != "kernel"


def tiles(machine: Machine, source: str = "measured") -> Machine:
    """Return the machine with a gated tiled product that is as fast as the library."""
    return replace(machine, tiled=replace(machine.gemm, provenance=Provenance(source)))


def test_the_model_takes_gated_tiles_if_they_were_measured() -> None:
    known = replace(find("h200-4", None), tiled=None)
    short = problem_of_sizes(GATHER, 8192, 3584, 4096, "bfloat16", 4)
    fast = tiles(known)
    decision, library = decide(short, machine=fast), decide(short, machine=known)
    assert decision.source == "model" and decision.schedule.grouping == "tiled", decision
    reason = decision.reason
    assert "one product whose tiles wait" in reason and "of the library (" in reason
    assert f"({library.schedule})" in reason and "tiled" in ALL_OFFERS
    for machine, refused, offers in (
        (known, short, ALL_OFFERS),
        (tiles(known, "assumed"), short, ALL_OFFERS),
        (fast, short, OFFERS),
        (fast, replace(short, n=3580), ALL_OFFERS),
        (fast, replace(short, dtype="float32"), ALL_OFFERS),
    ):
        another = decide(refused, machine=machine, offers=offers)
        assert another.source == "model" and another.schedule.grouping != "tiled"
    slow = replace(fast, tiled=replace(fast.tiled, efficiency=fast.tiled.efficiency * 0.7))
    assert decide(short, machine=slow).schedule == library.schedule


@on_ranks(2)
def test_calls_with_different_machines_decide_separately(at: Rank, tmp_path: Path) -> None:
    """A repeated call with the same machine is the same kind of call."""
    entry = replace(TUNED, rows=(8, 8), n=8, k=16, dtype="float32")
    machines = [
        replace(MACHINE, ranks=2, tuned=(replace(entry, idle=schedule),))
        for schedule in ("shrinking:tail=2", "growing:pieces=2")
    ]
    paths = [str(tmp_path / f"{at.rank} {turn}.yaml") for turn in range(2)]
    for machine, path in zip(machines, paths, strict=True):
        save(machine, path)
    with own_group(at) as group:
        for name in (*paths, None, *paths):
            with ficco.options(machine=name, timeout_s=10.0):
                ficco.all_gather_matmul(torch.ones(8, 16), torch.ones(16, 8), group=group)
        (workspace,) = workspaces(group)
        schedules = [bound.plan.schedule for bound in workspace.programs.values()]
    assert schedules == ["shrinking:tail=2", "growing:pieces=2", "growing"]


# Choices that are stored for later processes.


def test_a_later_process_takes_the_stored_choice(tmp_path: Path) -> None:
    """The file is changed, to tell a stored choice from a new one. A later process starts with no
    choice in memory."""

    def later(folder: Path = tmp_path, machine: Machine = MACHINE, **how: Any) -> Decision:
        _stored.cache_clear()
        return decide(PROBLEM, machine=machine, folder=folder, **how)

    chosen = decide(PROBLEM, machine=MACHINE)
    assert later() == chosen
    (path,) = (file for file in tmp_path.rglob("*") if file.is_file())
    text = path.read_text()
    key, name, _, _ = text.splitlines()
    assert name == str(chosen.schedule) and repr(PROBLEM) in key
    path.write_text("\n".join((key, "ring:pieces=3", "0.5", "stored")))
    assert str(later()) == "ring:pieces=3 (model: stored)" and later().hidden_s == 0.5
    # Nothing that the choice depends on may differ.
    assert later(mode="queued").reason != "stored"
    assert later(machine=replace(MACHINE, margin=0.03)).reason != "stored"
    files = sorted(tmp_path.rglob("*"))
    assert later(predict=predict).reason != "stored"
    with pytest.MonkeyPatch.context() as patch:  # the code of own schedules is not in a key
        patch.setattr(sys.modules["ficco.heuristics.decide"], "own_candidates", lambda: ("own",))
        assert later().reason != "stored"
    assert sorted(tmp_path.rglob("*")) == files
    other = text.replace(repr(PROBLEM), "another problem").replace(name, "serial")
    for damaged in ("", text[: len(text) // 2], text.replace(name, "no schedule"), other):
        path.write_text(damaged)
        assert later() == chosen and path.read_text() == text
    path.write_bytes(b"\xff" * 64)
    assert later() == chosen
    assert later(path) == chosen  # a file is no folder: nothing is stored
    for name, value in (("MOST_STORED", 0), ("_IMPORTED", [])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules["ficco.heuristics.decide"], name, value)
            assert later(tmp_path / name) == chosen and not (tmp_path / name).exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["ficco.heuristics.decide"], "_IMPORTED", [("other.py", 1, 1)])
        _subfolder.cache_clear()
        path.write_text("\n".join((key, "ring:pieces=3", "0.5", "stored")))
        assert later().reason != "stored"
    _subfolder.cache_clear()


@on_ranks(2)
def test_calls_store_their_choices_in_the_users_cache(at: Rank, tmp_path: Path) -> None:
    path = tmp_path / f"{at.rank}.yaml"
    save(replace(MACHINE, ranks=2), path)
    with own_group(at) as group, ficco.options(machine=str(path), timeout_s=10.0):
        ficco.all_gather_matmul(torch.ones(24, 16), torch.ones(16, 40), group=group)
    folder = Path(os.environ["FICCO_CACHE_DIR"]) / "decisions"
    texts = [file.read_text() for file in folder.rglob("*") if file.is_file()]
    assert any("rows=(24, 24), n=40, k=16, dtype='float32'" in text for text in texts)


@on_ranks(2)
def test_ranks_with_other_machine_files_raise_before_they_enqueue(at: Rank, tmp_path: Path) -> None:
    machine = replace(MACHINE, ranks=2)
    changed = replace(machine, margin=0.5)
    path = str(tmp_path / f"{at.rank}.yaml")

    def outcome(contents: tuple[str, str], schedule: str = "auto") -> Any:
        """Call with a new group and a machine file whose contents differ by rank."""
        Path(path).write_text(contents[at.rank])
        with own_group(at) as group, ficco.options(machine=path, timeout_s=10.0):
            a, b = torch.full((8, 16), float(at.rank + 1)), torch.ones(16, 8)
            return caught(partial(ficco.all_gather_matmul, a, b, schedule=schedule, group=group))

    text, other_text = dumps(machine), dumps(changed)
    for schedule in ("auto", "growing"):
        failure = outcome((text, other_text), schedule)
        assert isinstance(failure, Failure) and failure.type == "RankMismatch", failure
        values = failure.fields["values"]
        assert f"machine toy ({digest(machine):010x})" in values[0]
        assert f"machine toy ({digest(changed):010x})" in values[1]
        assert "machine file" in failure.text
    damaged = outcome((text, "name: ["))
    assert damaged.type == ("RankMismatch", "ConfigError")[at.rank]
    assert "1.yaml" in damaged.text
    assert outcome((text, text)).sum() == 8 * 8 * 16 * 3.0


# Unequal rows: all ranks are simulated, so only a few schedules are.

UNEQUAL = Problem(GATHER, (700, 900, 1100, 1300, 1000, 1000, 900, 1100), 1024, 2048, "bfloat16")


class _Spy:
    """Predictions from a table; the spy records the predicted schedules."""

    def __init__(self, as_equal: dict[str, float], as_it_is: dict[str, float]) -> None:
        self.tables = {True: as_equal, False: as_it_is}
        self.predicted: dict[bool, set[str]] = {True: set(), False: set()}

    def __call__(self, problem: Problem, schedule: Schedule, _: Machine, __: str) -> float:
        self.predicted[problem.equal].add(str(schedule))
        return self.tables[problem.equal].get(str(schedule), 9.0)


def test_few_schedules_are_predicted_for_unequal_rows() -> None:
    ranked = ("growing", "shard-overlap", "shrinking", "growing:compute=2", "uniform-fused-2d")
    spy = _Spy(
        {name: 1.0 + i for i, name in enumerate(ranked)},
        {"shrinking": 2.0, "hetero-fused-1d": 1.0},  # the latter is not fast with equal rows
    )
    decision = decide(UNEQUAL, machine=MACHINE, predict=spy)
    assert str(decision.schedule) == "shrinking"
    named = {str(schedule) for schedule in candidates(UNEQUAL, MACHINE)}
    assert spy.predicted[True] == named and set(ranked) < named
    assert spy.predicted[False] == {*ranked, *SERIALS}
    # Any of the schedules may still fit under a memory cap.
    assert {str(schedule) for schedule in decision.others} == named - {"serial:collective"}
    assert decision.others[0] == decision.schedule
    for serial in SERIALS:  # serial is always predicted
        spy = _Spy({"growing": 1.0}, {"growing": 2.0, serial: 1.0})
        assert str(decide(UNEQUAL, machine=MACHINE, predict=spy).schedule) == serial
    # The best schedule of another grouping is predicted, too.
    knobs_of = ("", ":compute=2", ":tail=4", ":tail=4,compute=2", ":pieces=2,compute=2")
    alike = [f"shard-overlap{knobs}" for knobs in knobs_of]
    as_equal = {name: 1.0 + i for i, name in enumerate((*alike, "growing"))}
    spy = _Spy(as_equal, {"growing": 1.0, "shard-overlap": 2.0})
    assert set(as_equal) <= named
    assert str(decide(UNEQUAL, machine=MACHINE, predict=spy).schedule) == "growing"
    # Two ranks: three schedules. Four ranks: all schedules with the actual rows.
    fewer = replace(UNEQUAL, rows=(4096, 4095))
    spy = _Spy({}, {})
    decide(fewer, machine=MACHINE, predict=spy)
    assert len(spy.predicted[False] - set(SERIALS)) == 3
    fewer = replace(UNEQUAL, rows=UNEQUAL.rows[:4])
    spy = _Spy({}, {})
    decide(fewer, machine=MACHINE, predict=spy)
    assert spy.predicted == {True: set(), False: {*map(str, candidates(fewer, MACHINE))}}


@pytest.mark.parametrize("operator", OPERATORS)
def test_unequal_rows_become_as_many_equal_ones(operator: str) -> None:
    table = [[3, 0, 5], [1, 2, 9], [4, 4, 4]]
    if OPERATORS[operator].blocks:
        uneven = Problem.of_blocks(operator, table, 8, 16, "float16")
        even = Problem.of_blocks(operator, [[4] * 3] * 3, 8, 16, "float16")  # 32 rows in 9 blocks
    else:
        uneven = Problem(operator, (5, 0, 2), 8, 16, "float16", symmetric=True)
        even = Problem(operator, (3, 3, 3), 8, 16, "float16", symmetric=True)
    assert uneven.evened == even and even.evened is even


@pytest.mark.parametrize(
    "machine, n, k, fewest",
    [("h200-2", 8192, 4096, 2048), ("h200-4", 4096, 2048, 8192), ("mi300x-8", 4096, 2048, 0)],
)
def test_vllm_keeps_batches_without_hidden_communication(
    monkeypatch: Patch, machine: str, n: int, k: int, fewest: int
) -> None:
    monkeypatch.setenv("FICCO_MACHINE", machine)
    sizes, rows_of = (int(machine[-1]), n, k, torch.bfloat16), _fewest_rows.__wrapped__
    assert rows_of(*sizes) == fewest
    for rows in filter(None, (fewest, fewest // 2)):
        facts = {"world": sizes[0], "m": rows, "n": n, "k": k, "captured": True}
        schedule = ficco.explain("matmul_all_reduce", **facts).schedule
        exposed = schedule.mover == "collective" or schedule.grouping == "one-shot"
        assert exposed == (rows < fewest)
    monkeypatch.setenv("FICCO_VLLM_ROWS", "48")
    assert rows_of(*sizes) == 48
    for text in ("0", "-1", "many", ""):
        monkeypatch.setenv("FICCO_VLLM_ROWS", text)
        with pytest.raises(ValueError, match="FICCO_VLLM_ROWS: required a whole number"):
            rows_of(*sizes)
