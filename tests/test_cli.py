"""The command line, the launcher behind it, and the timelines that it draws."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist

import ficco
from ficco.dma.engine import Span
from ficco.errors import ConfigError, InvalidArgument
from ficco.heuristics import decide
from ficco.machine import find
from ficco.plan import Plan
from ficco.problems.products import OPERATORS, Problem
from ficco.problems.scaling import CAST_KINDS, SCALED, operands_of
from ficco.schedules import NAMED, Schedule, plans
from ficco.simulate.timeline import loads
from ficco.tools import cli, doctor
from ficco.tools.bench import demo, ways
from ficco.tools.bench.calls import Runner
from ficco.tools.bench.candidates import BenchCandidate, parse
from ficco.tools.bench.cases import Case
from ficco.tools.bench.demo import verdict
from ficco.tools.bench.draw import draw, trace
from ficco.tools.bench.frames import BENCH
from ficco.tools.bench.traces import machine_of, measured
from ficco.tools.cli import bench as bench_command
from ficco.tools.cli.demo import DEMO_S
from ficco.tools.launch import START_S, RankFailed, check_ranks, launch, own_rank

SIZES = ["--m", "64", "--n", "8", "--k", "32", "--world", "4"]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f'\nversion = "{ficco.__version__}"\n' in project
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"ficco {ficco.__version__}\n"


@pytest.fixture
def no_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder; a command that starts ranks fails the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ficco.tools.launch.launch", lambda *_, **__: pytest.fail("started ranks"))


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    "command",
    [
        ["bench"],
        ["bench", "--layers"],
        ["bench", "--experts"],
        ["bench", "--attention"],
        ["explain", *SIZES, "--measure"],
    ],
    ids=["bench", "layers", "experts", "attention", "explain"],
)
@pytest.mark.parametrize("seconds", ["0", "nan", "inf", "604801"])
def test_no_more_seconds_than_can_be_waited_for(
    command: list[str], seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    device = [] if command[0] == "explain" else ["--device", "cpu"]
    assert cli.run([*command, *device, "--seconds", seconds]) == 2
    said = f"--seconds: required a number above 0 and at most 604800, got {seconds}\n"
    assert said in capsys.readouterr().err


def test_what_is_measured_to_explain_has_the_time_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = []
    monkeypatch.setattr(
        "ficco.tools.launch.launch", lambda *_, timeout_s, **__: limits.append(timeout_s)
    )
    assert cli.run(["explain", *SIZES, "--measure", "--seconds", "3600"]) == 0
    assert limits[0] > 3600


def _row(candidate: str, status: str, note: str) -> dict[str, str]:
    return {"mode": "idle", "candidate": candidate, "status": status, "note": note}


def test_explain_says_what_could_not_be_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [_row("growing", "wrong", "3 elements"), _row("serial", "skipped", "no memory")]
    monkeypatch.setattr("ficco.tools.launch.launch", lambda *_, **__: BENCH.frame(rows))
    asked = ["explain", *SIZES, "--measure"]
    assert cli.run(asked) == 1
    assert "wrong: growing: 3 elements\nskipped: serial: no mem" in capsys.readouterr().err
    del rows[0]
    assert cli.run(asked) == 0
    rows[:] = [_row("", "skipped", "63 rows do not divide by 4 ranks")]
    assert cli.run(asked) == 2
    assert "error: --measure: 63 rows do not divide" in capsys.readouterr().err


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize("command", ["demo", "bench"])
def test_a_folder_that_cannot_be_written_to_is_refused_before_any_rank_starts(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    refused = "--out: required a folder that can be written to, got"
    assert cli.run([command, "--device", "cpu", "--out", str(tmp_path / "file")]) == 2
    assert f"{refused} {tmp_path / 'file'} (File exists)" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda *_: False)  # as for a user who is not root
    assert cli.run([command, "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert f"{refused} {tmp_path}\n" in capsys.readouterr().err


# plan


def test_plan_prints_what_is_proven(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "hetero-fused-1d:pieces=4", *SIZES]) == 0
    found = capsys.readouterr().out
    assert "compute0" in found and "checked for all 4 ranks" in found
    assert found.count("all_gather_matmul(") == found.count("3 KiB") == 1


def test_rows_are_as_equal_as_they_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["plan", "growing"], ["explain", "--machine", "h200-4"]):
        assert cli.run([*command, "--m", "65", *SIZES[2:]]) == 0
        assert "rows=[17, 16, 16, 16]" in capsys.readouterr().out


def test_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "growing", *SIZES, "--rank", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rank"], found["source"], found["problem"]["n"]) == (2, "caller", 8)
    ops = [step["op"] for step in found["steps"]]
    assert ops.count("copy") == 3 and "matmul" in ops
    for operator, of, own in (
        ("all_gather_matmul", "gates", []),
        ("matmul_reduce_scatter", "announces", [[0, 16]]),  # for the sum
    ):
        command = ["plan", "tiled", *SIZES, "--operator", operator, "--json"]
        assert cli.run(command) == 0
        steps = json.loads(capsys.readouterr().out)["steps"]
        (product,) = (step for step in steps if step["op"] == "matmul")
        assert [signal["rows"] for signal in product[of]] == [[16, 32], [32, 48], [48, 64], *own]


def test_plan_says_what_auto_takes_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "auto", *SIZES]) == 0
    assert "(model: " in capsys.readouterr().out


def test_a_plan_is_for_the_ranks_of_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    for machine, ranks in (([], 4), (["--machine", "h200-2"], 2)):
        assert cli.run(["plan", "growing", *SIZES[:-2], *machine]) == 0
        assert f"checked for all {ranks} ranks" in capsys.readouterr().out


def test_plan_draws_and_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, events = tmp_path / "sub" / "plan.png", tmp_path / "plan.json"
    arguments = ["plan", "growing", *SIZES, "--draw", str(picture), "--trace", str(events)]
    assert cli.run(arguments) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    names = {
        e["args"]["name"] for e in json.loads(events.read_text())["traceEvents"] if "args" in e
    }
    assert {"growing rank 3", "compute0", "copy0"} <= names
    assert str(picture) in capsys.readouterr().err


def test_plan_of_unequal_shards_in_a_ring(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "hetero-unfused-1d:pieces=4", *SIZES, "--rows", "30,20,10,4"]
    assert cli.run([*arguments, "--workspace-bytes", "1024"]) == 0
    assert "steps at once" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["slowing", *SIZES], "serial, shard-overlap"),
        (["growing:fast", *SIZES], "not a knob"),
        (["growing", *SIZES, "--rows", "1,2,3,4"], "sum 64"),
        (["growing", *SIZES, "--rows", "a,2,3,4"], "whole numbers"),
        (["growing", *SIZES, "--rank", "4"], "0 to 3"),
        (["growing", *SIZES, "--dtype", "int8"], "int8"),
        (["growing", *SIZES, "--draw", "x.png", "--machine", "abacus"], "abacus"),
        (["growing", *SIZES, "--draw", "x"], "--draw: required a file with one of the suffixes"),
        (["growing", *SIZES, "--workspace-bytes", "1"], "workspace_bytes"),
        (
            ["growing", *SIZES, "--workspace-bytes", "1", "--operator", "matmul_reduce_scatter"],
            "--workspace-bytes: required an operator that gathers",
        ),
        (["growing", *SIZES[:-1], "0"], "--world: required"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["plan", *arguments]) == 2
    found = capsys.readouterr().err.strip().splitlines()
    assert said in found[-1] and "error:" in found[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "--schedules", "slowing"], "slowing"),
        (["bench", "--device", "cpu", "--mode", "queued"], "--mode: required one of idle on cpu"),
        (["bench", "--device", "cpu", "--ranks", "0"], "--ranks: required at least 1"),
        (["bench", "--rounds", "0", "--device", "cpu"], "--rounds"),
        (["bench", "--plot", "nowhere.csv"], "nowhere.csv"),
        (["bench", "--report", "nowhere.csv", "--plot", "nowhere.csv"], "nowhere.csv"),
        (["bench", "--plot", "x.csv", "--json"], "--json: required without --plot, which measures"),
        (["bench", "--report", "x.csv", "--rank", "1"], "--rank: required without --rep"),
        (["bench", "--replay", "4", "--device", "cpu"], "--replay: required a GPU"),
        (["bench", "--replay", "1", "--device", "cuda"], "at least 2 ranks, got 0 of 1"),
        (["bench", "--replay", "4", "--rank", "4", "--device", "cuda"], "got 4 of 4"),
        (["bench", "--replay", "4", "--ranks", "2"], "--replay: required without --ranks"),
        (["bench", "--replay", "4", "--device", "cuda", "--mode", "graph"], "queued or idle"),
        (["bench", "--rank", "1", "--device", "cpu"], "--rank: required with --replay"),
        (["bench", "--products", "--device", "cpu"], "--products: required with --replay"),
        (["bench", "--set", "cpu", "--shapes", "x.csv", "--device", "cpu"], "got both"),
        (["bench", "--set", "experts", "--only", "g1"], "required some of g13, g14, g15, g16, got"),
        (["bench", "--attention", "--experts"], "--experts: required without --attention"),
        (["bench", "--attention", "--set", "cpu"], "--attention: required without --set"),
        (
            ["bench", "--attention", "--only", "1k", "--device", "cpu"],
            "some of 256, got '1k'",
        ),
        (["bench", "--attention", "--schedules", "slowing"], "slowing"),
        (["bench", "--operator", "ulysses_attention"], "is required with --attention"),
        (
            ["bench", "--attention", "--operator", "all_gather_matmul"],
            "required without --attention",
        ),
        (["bench", "--experts", "--operator", "ulysses_attention"], "required with --attention"),
        (["demo", "--ranks", "0"], "--ranks: required at least 1, got 0"),
        *(
            ([*command, "--device", "cpu", "--ranks", "4096"], "got 4096; --oversubscribe starts")
            for command in (["demo"], ["bench"], ["tune"], ["doctor"])
        ),
        (["doctor", "--ranks", "0"], "--ranks: required at least 1, got 0"),
        (["doctor", "--selftest", "--ranks", "0"], "--ranks: required at least 1, got 0"),
        (
            ["simulate", "--m", "8192"],
            "--n: required, since all_gather_matmul needs m, n, k",
        ),
        (
            ["simulate", "--m", "8", "--k", "8"],
            "--n: required, since all_gather_matmul needs m, n, k",
        ),
        (["explain"], "--m: required, since all_gather_matmul needs m, n, k; got none"),
        (["plot", str(Path(__file__)), "--out", "x.png"], "by `ficco bench --plot`"),
        (["nothing"], "nothing"),
        ([], "command"),
    ],
)
def test_other_commands_refuse_bad_input_too(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    draws = {"--plot", "--report"} & set(arguments)  # and writes next to the CSV
    folder = ["--out", str(tmp_path)] if arguments[:1] == ["bench"] and not draws else []
    assert cli.run([*arguments, *folder]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InvalidArgument("world", "required fewer"), "error: --world: required fewer"),
        (InvalidArgument("ranks", "required fewer"), "error: ranks: required fewer"),  # no --ranks
        (ValueError("world: the text begins so"), "error: world: the text begins so"),
        (ValueError("m: n: required"), "error: m: n: required"),
    ],
)
def test_an_error_names_an_option_by_its_type_not_by_its_text(
    error: ValueError,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    for path in ("heuristics.decide", "heuristics.where", "tools.cli.site.problem_of"):
        with monkeypatch.context() as patch:
            patch.setattr(f"ficco.{path}", refuse)
            assert cli.run(["explain", *SIZES]) == 2
        assert f"{said}\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "explain", "simulate"])
def test_the_help_lists_every_dtype(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "--help"]) == 0
    _, _, text = capsys.readouterr().out.partition("  --dtype NAME ")
    listed = re.split(r"[,;]?\s+", text.partition("(default")[0])
    for name in ("bfloat16", *SCALED, *CAST_KINDS):
        assert name in listed, name
        assert operands_of(name)[0] in (name, "float8_e4m3fn", "float8_e4m3fnuz")


def test_an_invalid_argument_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(InvalidArgument("ranks", "required fewer")))
    assert (error.argument, str(error)) == ("ranks", "ranks: required fewer")


def test_the_help_has_every_option_and_its_default() -> None:
    (commands,) = (
        action.choices
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    assert {"bench", "plan"} <= set(commands)
    for name, parser in commands.items():
        for action in parser._actions:
            assert action.help, f"{name} {action.dest}"
            if isinstance(action.default, (int, float, str, Path)) and action.nargs != 0:
                shown = action.default == argparse.SUPPRESS or f"default: {action.default}" in (
                    action.help
                )
                assert shown, f"{name} {action.dest}: {action.help}"


# Operators other than products.

ATTENTION = "--sequence 64 --heads 4 --kv-heads 2 --head-size 8 --causal --world 4".split()
EXPERTS = "--experts 8 --capacity 4 --k 16 --h 8 --n 16 --world 4".split()
OTHERS = {
    "all_gather_attention": (*ATTENTION, "--placement", "head-tail"),
    "ulysses_attention": (*ATTENTION,),
    "experts": (*EXPERTS,),
}


@pytest.mark.parametrize("operator", OTHERS)
def test_attention_and_experts_are_planned_simulated_and_explained(
    operator: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ["--operator", operator, *OTHERS[operator], "--machine", "h200-4"]
    picture, lines = tmp_path / "picture.svg", tmp_path / "lines.json"
    assert cli.run(["plan", "serial", *asked, "--rank", "1", "--draw", str(picture)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{operator}(") and "checked for all 4 ranks" in said
    assert "rank 1 of 4" in said and picture.exists()
    assert cli.run(["plan", "auto", *asked, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    done = [one for one in planned["steps"] if one["attends"] or one["applied"] or one["products"]]
    assert done and planned["source"] == "model"
    if operator == "experts":  # as asked for, and twice the columns for the gate
        assert " h=8," in said and planned["problem"]["h"] == 8
        columns = {buffer["name"]: buffer["shape"][1] for buffer in planned["buffers"]}
        assert (columns["hidden"], columns["active"]) == (16, 8)

    assert cli.run(["simulate", *asked, "--json", "--timelines", str(lines)]) == 0
    rows = {row["candidate"]: row for row in json.loads(capsys.readouterr().out)}
    longer = max(rows["computed"]["ms"], rows["copies"]["ms"])
    assert rows["ideal"]["ms"] == pytest.approx(longer) and rows["ideal"]["m"] == 0
    names = [name for name in rows if name not in ("computed", "copies", "ideal")]
    assert len(loads(lines.read_text(), "lines")) == len(names) > 5
    for name in names:
        assert rows[name]["speedup"] == pytest.approx(rows["serial"]["ms"] / rows[name]["ms"])
        assert rows[name]["share"] == pytest.approx(rows["ideal"]["ms"] / rows[name]["ms"])
        assert 0 < rows[name]["share"] < 1

    picture.unlink()
    explained = ["explain", *asked, "--json", "--draw", str(picture)]
    assert cli.run(explained) == 0 and picture.exists()
    decision = json.loads(capsys.readouterr().out)
    assert decision["schedule"] == planned["schedule"] and decision["reason"] == planned["reason"]
    predicted = {one["schedule"]: one["predicted"]["queued"] for one in decision["candidates"]}
    assert predicted == {name: pytest.approx(rows[name]["ms"] * 1e-3) for name in names}
    assert cli.run(["explain", *asked]) == 0
    table = capsys.readouterr().out
    reason = planned["reason"]
    assert f"  model: {reason}\n" in table and "predicted to" in reason and "serial" in reason
    assert len(reason) < 200 and not re.search(r"hetero|shard-overlap.*growing", reason)
    assert f"* {planned['schedule']} " in table and "memory" in table and "DIL" not in table


@pytest.mark.parametrize("operator", OTHERS)
def test_attention_and_experts_are_planned_over_hosts(
    operator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--operator", operator, *OTHERS[operator], "--machine", "h100-8", "--hosts", "2"]
    assert cli.run(["plan", "auto", *asked, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert any(one["moves"] for one in planned["steps"]) and planned["source"] == "model"
    assert cli.run(["explain", *asked]) == 0
    assert "2 hosts" in capsys.readouterr().out
    assert cli.run(["simulate", *asked, "--json"]) == 0
    rows = {row["candidate"]: row for row in json.loads(capsys.readouterr().out)}
    assert {(row["world"], row["hosts"]) for row in rows.values()} == {(4, 2)}
    assert rows["serial"]["ms"] > 0.02  # the network's latency
    assert cli.run(["simulate", "serial", *asked]) == 0
    table = capsys.readouterr().out
    assert "4 ranks on 2 hosts, queued" in table and table.startswith(f"{operator}(")
    title = "64, 4, 8" if "attention" in operator else "8, 4, 16, 8, 16"
    names = (
        "sequence, heads, head size" if "attention" in operator else "experts, capacity, k, h, n"
    )
    assert f"{names}; candidate " in table and f" {title} " in table


@pytest.mark.parametrize(
    ("operator", "more", "said"),
    [
        ("all_gather_attention", ["--kv-heads", "3"], "--kv-heads: required a divisor of 4 heads"),
        ("all_gather_attention", ["--sequence", "66"], "--sequence: required a multiple of 4"),
        ("all_gather_attention", ["--placement", "x"], "--placement: required one of ranks, head-"),
        ("all_gather_attention", ["--window", "-1"], "--window: required 0 to"),
        ("all_gather_attention", ["--m", "8"], "--m: required none for all_gather_attention"),
        ("all_gather_attention", ["--rows", "1,2,3,4"], "--rows: required none for all_gather_"),
        ("ulysses_attention", ["--placement", "ranks"], "--placement: required none for ulysses_"),
        ("ulysses_attention", ["--world", "8", "--sequence", "64"], "the 8 ranks share equally"),
        ("experts", ["--experts", "6"], "--experts: required a multiple of 4"),
        ("experts", ["--hosts", "3"], "--hosts: required a divisor of --world"),
        ("experts", ["--activation", "tanh"], "--activation: required one of relu, silu"),
        ("experts", ["--measure"], "--measure: required an operator of products, got experts"),
    ],
)
def test_sizes_that_others_cannot_have_are_refused(
    operator: str, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--operator", operator, *OTHERS[operator], "--machine", "h200-4", *more]
    assert cli.run(["explain", *asked]) == 2
    assert said in capsys.readouterr().err
    if "--measure" not in more:
        assert cli.run(["plan", "auto", *asked]) == 2
        assert said in capsys.readouterr().err


def test_what_a_bench_of_attention_and_experts_is_told() -> None:
    def told(*words: str) -> Any:
        arguments = cli._parser().parse_args(["bench", *words])
        bench_command._check_replay(arguments)
        return bench_command._ways(arguments, "cuda")

    what, _, kind, more, _ = told("--attention", "--operator", "ulysses_attention", "--only", "64k")
    assert what == "attention" and [case.sequence for case in more["cases"]] == [64 << 10]
    assert kind is ways.WaySettings and more["modes"] == ("queued", "idle")
    assert "replayed" not in more
    played = ("--replay", "8", "--rank", "3", "--machine", "h200-4", "--device", "cuda")
    what, _, _, more, write = told("--experts", *played, "--schedules", "growing", "auto")
    assert what == "replay-8-experts" and len(more["cases"]) == 7
    assert more["schedules"] == ("growing", "auto")
    replayed = more["replayed"]
    assert (replayed.world, replayed.rank, replayed.machine) == (8, 3, "h200-4")
    assert write.func is ways.report


def test_a_cap_is_for_steps_that_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--operator", "experts", *EXPERTS, "--workspace-bytes", "1"]
    assert cli.run(["plan", "serial", *asked]) == 2
    assert "--workspace-bytes: required none for experts" in capsys.readouterr().err
    asked = ["--operator", "all_gather_attention", *ATTENTION, "--workspace-bytes", "2100"]
    assert cli.run(["plan", "shard-overlap", *asked, "--rank", "3"]) == 0
    assert "2 steps at once" in capsys.readouterr().out


# doctor


def test_doctor_says_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["devices"][0]["cores"] >= 1
    assert found["engines"]["cpu"]["engine"] == "cpu"
    assert "float32" in found["engines"]["cpu"]["accumulate"]
    assert set(found["engines"]) == {"cpu", "cuda", "hip"}
    assert found["use"]["tensors on cpu"].startswith("cpu")


def test_doctor_says_what_so_many_ranks_would_use(capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for ranks in (None, 1, 2):
        options = [] if ranks is None else ["--ranks", str(ranks)]
        assert cli.run(["doctor", "--device", "cpu", "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        said[ranks] = found["use"]["schedule='auto'"]
        call = {"ranks": ranks, "engine": "cpu", "result": "right on every rank"}
        assert found.get("call") == (call if ranks else None)
    assert said[None].startswith("for 4 ranks on cpu: by the figures of cpu (")
    assert said[1].startswith("for 1 rank on cpu: serial, since")
    decision = ficco.explain("all_gather_matmul", m=64, n=64, k=64, world=2, machine="cpu")
    assert decision.source == "fallback"
    assert said[2] == f"for 2 ranks on cpu: {decision.schedule}, since {decision.reason}"
    assert cli.run(["doctor", "--device", "cpu", "--ranks", "2"]) == 0
    assert "right on every rank" in capsys.readouterr().out


def _wrong_call() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ficco, "all_gather_matmul", lambda a, b: torch.full((16, 16), 17.0))
        doctor.after_a_call("cpu")


def test_a_wrong_call_fails_the_doctor() -> None:
    with pytest.raises(RankFailed, match="required 16 everywhere"):
        launch(_wrong_call, 1)


def test_no_advice_of_rocm_to_a_pytorch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ficco.dma.hip_api", None)  # as without hip-python
    monkeypatch.setattr(torch.version, "hip", None)
    assert doctor._why_no_hip() == "this torch is built without ROCm"
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert "hip_api" in doctor._why_no_hip()


def test_doctor_in_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor"]) == 0
    found = capsys.readouterr().out
    assert "Engine cpu" in found and "What would be used" in found


def test_doctor_survives_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no such driver")

    for part in ("versions", "devices", "links", "use"):
        monkeypatch.setattr(doctor, part, broken)
    monkeypatch.setattr(doctor, "capabilities", lambda name: broken())
    found = doctor.report()
    json.dumps(found)
    doctor.show(found)
    assert found["links"] == "cannot be told: OSError: no such driver"
    assert found["engines"]["cpu"] == "cannot be used here: no such driver"


# demo


def test_demo_proves_every_schedule(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ficco", "demo", "--device", "cpu", "--ranks", "2"]
    command += ["--out", str(tmp_path)]
    # It ends by itself once it has hung, and says where.
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEMO_S + START_S)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = (tmp_path / "demo.csv").read_text().splitlines()[2:]
    assert len(rows) > len(NAMED) and all(",True," in row for row in rows)
    assert lines[-1] == f"demo ok: {len(rows)} schedules exact on 2 ranks"
    assert (tmp_path / "timelines.png").stat().st_size > 10_000
    assert str(tmp_path / "timelines.png") in done.stdout
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert done.stdout.count("model: ") == 3  # decisions, with their reasons
    assert "simulated on mi300x-8" in done.stdout
    # The operators' table repeats the times of the schedule that auto takes, and ratios follow.
    tables = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    by_schedule = {row[0]: row[1:] for row in tables if len(row) == 4}
    by_operator = {row[0]: row[1:] for row in tables if row[-1:] == ["exact"] and len(row) == 6}
    assert len(by_operator) == len(OPERATORS) + 3
    schedule, *times, ratio, _ = by_operator["all_gather_matmul"]
    assert by_schedule[f"{schedule} (auto)"] == [times[0], ratio, "exact"]
    assert by_schedule["torch.distributed, then matmul"][0] == times[1]
    for _, ms, torch_ms, ratio, _ in by_operator.values():
        assert float(ratio) == pytest.approx(float(torch_ms) / float(ms), abs=0.02)
    assert f"auto takes {schedule} for all_gather_matmul (" in done.stdout
    assert "copies limited to 300 MB/s, so that they can be seen" in done.stdout
    assert len([line for line in lines if re.match(r"│ g\d", line)]) == 12


@pytest.mark.parametrize(("options", "device"), [([], "cuda"), (["--device", "cpu"], "cpu")])
def test_the_demo_takes_gpus_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, options: list[str], device: str
) -> None:
    taken = []
    monkeypatch.setattr("ficco.tools.launch.default_device", lambda: "cuda")
    monkeypatch.setattr("ficco.tools.launch.launch", lambda *args, **how: taken.append((args, how)))
    assert cli.run(["demo", *options]) == 0
    (((_, _, named, _), how),) = taken
    assert named == how["device"] == device


def _orders() -> list[str]:
    """Which candidate each call of the demo's rounds is of."""
    group, called = dist.group.WORLD, []
    operands = demo._operands("all_gather_matmul", group, torch.device("cpu"))

    def build(candidate: BenchCandidate, *_: object) -> Runner:
        def run() -> torch.Tensor:
            called.append(candidate.name)
            return operands.reference()

        return Runner(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "build", build)
        demo._times([parse("growing"), parse("serial")], operands, group, 20)
    found = [None] * group.size()
    dist.all_gather_object(found, called)
    assert found == [called] * group.size()  # the same on all ranks
    return called


def test_no_candidate_of_the_demo_is_always_the_first() -> None:
    called = launch(_orders, 2)
    rounds = [called[i : i + 2] for i in range(0, len(called), 2)]
    assert len(rounds) == 21 and all(sorted(one) == ["growing", "serial"] for one in rounds)
    assert 5 <= sum(one[0] == "serial" for one in rounds) <= 15


@pytest.mark.parametrize("world", [2, 4])
def test_the_demo_says_why_auto_takes_a_schedule(world: int) -> None:
    problem = Case("", 192 * world, 384, 768, "float32").problem(world)
    decision = decide(problem, machine=find("cpu", None), mode="idle")
    text = demo.about_times(decision, torch.device("cpu")).replace("\n", " ")
    assert decision.why in text and "copies and products share the cores" in text
    assert ("less than the margin of 10.0%" in text) == ("The margin stands for" in text)
    assert ("margin" in text) == (world == 4)  # the machine cpu describes four ranks
    assert "CPUs" not in demo.about_times(decision, torch.device("cuda"))


def _others() -> list[dict[str, Any]]:
    return list(demo._others(dist.group.WORLD, torch.device("cpu")))


def test_the_demo_compares_attention_and_experts_on_any_number_of_ranks() -> None:
    rows = launch(_others, 3)
    assert [row["operator"] for row in rows] == [
        "all_gather_attention",
        "ulysses_attention",
        "experts",
    ]
    assert all(row["exact"] and row["ms"] > 0 and row["torch ms"] > 0 for row in rows)


def test_a_wrong_result_fails_the_demo() -> None:
    right, wrong = {"exact": True}, {"exact": False}
    names = ["torch", "a", "b"]
    operators = pd.DataFrame([{"operator": "x", **right}])
    results = pd.DataFrame({"schedule": names, "exact": [True, True, None]})
    assert verdict(results, 4, operators) == ("demo ok: 1 schedules exact on 4 ranks", 0)
    results["exact"] = [True, True, False]
    assert verdict(results, 4, operators) == ("demo failed: wrong results of b", 1)
    results["exact"] = True
    operators = pd.DataFrame([{"operator": "x", **right}, {"operator": "y", **wrong}])
    assert verdict(results, 4, operators) == ("demo failed: wrong results of y", 1)


def _one_off(number: int) -> pd.DataFrame:
    """The demo's rows where the last call of rank 1 is wrong in so many elements."""
    group, operands = dist.group.WORLD, None
    operands = demo._operands("all_gather_matmul", group, torch.device("cpu"))
    calls = []

    def build(candidate: BenchCandidate, *_: object) -> Runner:
        def run() -> torch.Tensor:
            if candidate.name == "serial":
                raise NotImplementedError("not here")
            calls.append(1)
            result = operands.reference()
            if group.rank() == 1 and len(calls) == 6 and candidate.name == "growing":
                result[0, :number] += 1
            return result

        return Runner(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "build", build)
        return demo._times([parse("growing"), parse("serial")], operands, group, 5)


@pytest.mark.parametrize("number", [0, 1])
def test_one_wrong_element_on_one_rank_is_seen(number: int) -> None:
    found = launch(_one_off, 2, number).set_index("schedule")
    assert found["exact"].to_dict() == {"growing": number == 0, "serial": None}
    assert found.loc["growing", "ms"] > 0 and found["note"].to_dict()["serial"] == "not here"


# launch


def _rank_and_world(more: int) -> tuple[int, int, int]:
    dist.barrier()
    return dist.get_rank(), dist.get_world_size(), more


def _fail(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "raise":
            raise ZeroDivisionError("on purpose")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(100)
    dist.barrier()


def _stay(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(60)


def _runs(process: str) -> bool:
    try:
        return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _deaf(folder: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _stay(folder)


def test_ranks_that_do_not_end_are_waited_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ficco.tools.launch.TERMINATE_S", 1.0)
    monkeypatch.setattr("ficco.tools.launch._collect", lambda *_: _wait_for(tmp_path, 3))
    with pytest.raises(ZeroDivisionError):
        launch(_deaf, 3, str(tmp_path))
    began = float((tmp_path / "began").read_text())
    assert time.monotonic() - began < 2.5
    assert not any(map(_runs, set(os.listdir(tmp_path)) - {"began"}))


def _wait_for(folder: Path, ranks: int) -> None:
    while len(os.listdir(folder)) < ranks:
        time.sleep(0.02)
    (folder / "began").write_text(str(time.monotonic()))
    raise ZeroDivisionError


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_whoever_started_them(how: signal.Signals, tmp_path: Path) -> None:
    script = f"from test_cli import _stay, launch; launch(_stay, 2, {str(tmp_path)!r})"
    started = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parent)

    def within(seconds: float, true: Callable[[], bool]) -> bool:
        end = time.monotonic() + seconds
        while not true() and time.monotonic() < end:
            time.sleep(0.05)
        return true()

    assert within(60, lambda: len(os.listdir(tmp_path)) == 2)
    started.send_signal(how)
    started.wait(30)
    ranks = os.listdir(tmp_path)
    assert within(15, lambda: not any(map(_runs, ranks)))


def test_launch_returns_what_rank_0_returns() -> None:
    assert launch(_rank_and_world, 3, 5) == (0, 3, 5)


@pytest.mark.parametrize(
    ("how", "seconds", "kind", "said"),
    [
        ("raise", 60.0, "ZeroDivisionError", "on purpose"),
        ("kill", 60.0, "exit", "SIGKILL"),
        ("hang", 1.0, "exit", "exit code 1"),
    ],
)
def test_launch_says_which_rank_failed_and_how(
    how: str, seconds: float, kind: str, said: str
) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=said) as caught:
        launch(_fail, 2, how, timeout_s=seconds)
    assert caught.value.kind == kind
    assert how == "hang" or caught.value.rank == 1
    assert ("_fail" in caught.value.details) == (how == "raise")
    assert time.monotonic() - began < 30


def test_a_reader_that_leaves_is_no_error() -> None:
    command = ["explain", "--m", "64", "--n", "64", "--k", "64", "--machine", "h200-4"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "ficco", *command],
        stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_ranks_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert (check_ranks(None, "cuda"), check_ranks(None, "cpu")) == (2, 4)
    with pytest.raises(ValueError, match="at most 2"):
        check_ranks(3, "cuda")
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "3"),
        ("MASTER_ADDR", "x"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    assert check_ranks(None, "cpu") == 3
    with pytest.raises(ValueError, match="torchrun"):
        check_ranks(4, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "three")
    with pytest.raises(ConfigError, match="WORLD_SIZE: three: required a number"):
        check_ranks(None, "cpu")


def test_a_rank_is_what_a_whole_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")  # left over, or a scheduler's own
    assert own_rank() == 0
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    assert own_rank() == 1
    monkeypatch.setenv("RANK", "")
    with pytest.raises(ConfigError, match="RANK"):
        own_rank()


# timeline


def _plans(name: str) -> list[Plan]:
    problem = Problem("all_gather_matmul", (64,) * 4, 32, 16, "float32")
    return plans(problem, Schedule.parse(name))


def test_measured_spans_give_rates_and_waits(tmp_path: Path) -> None:
    made = _plans("serial")
    product = next(i for i, step in enumerate(made[0].steps) if step.op == "matmul")
    spans = [[Span(product, "compute0", 3.0, 5.0)] for _ in made]
    found = measured("serial", made, spans)
    assert [bar.kind for bar in found.ranks[0]] == ["wait", "matmul"]
    gemm = machine_of(made, found).gemm
    assert gemm and gemm.seconds(256, 32, 16, itemsize=4) == pytest.approx(2.0)
    assert draw([found, found], tmp_path / "two.svg", columns=2).read_text().count("<svg") == 1
    assert json.loads(trace([found], tmp_path / "t.json").read_text())["traceEvents"]
