"""The command line: output, refusals, pictures and launches; the doctor and the demo."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import re
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest
import ranks
import torch
import torch.distributed as dist
from programs import Program

import ficco
from ficco.errors import InvalidArgument
from ficco.heuristics import decide
from ficco.machine import find
from ficco.problems.products import OPERATORS
from ficco.problems.scaling import CAST_KINDS, SCALED, operands_of
from ficco.problems.sizes import ASKABLE
from ficco.schedules import NAMED
from ficco.simulate.timeline import loads
from ficco.tools import cli, doctor
from ficco.tools.bench import demo, experts, products
from ficco.tools.bench.candidates import BenchCandidate, parse
from ficco.tools.bench.cases import Case
from ficco.tools.bench.demo import verdict
from ficco.tools.bench.draw import draw
from ficco.tools.bench.frames import BENCH, SIMULATED, append
from ficco.tools.bench.inputs import Operands
from ficco.tools.bench.measure import Runner, Stopwatch
from ficco.tools.cli import measure as commands

SIZED = "--m 64 --n 8 --k 32 --world 4"
SIZES = SIZED.split()
ATTENTION = "--sequence 64 --heads 4 --kv-heads 2 --head-size 8 --causal --world 4".split()
STAGED = f"plan hetero-unfused-1d:pieces=4 {SIZED}"
ATTENDS = f"plan shard-overlap --operator all_gather_attention {' '.join(ATTENTION)}"
EXPERTS = "--experts 8 --capacity 4 --k 16 --h 8 --n 16 --world 4".split()
RESULTS = Path(__file__).parents[2] / "docs/results"
LINES = RESULTS / "timeline-h200-2_timelines.json"


def test_the_version(ran: Any) -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'\nversion = "{ficco.__version__}"\n' in project
    assert ran("--version").out == f"ficco {ficco.__version__}\n"


def test_explain_waits_for_its_measurement_and_lists_failures(monkeypatch: Any, ran: Any) -> None:
    rows = [("growing", "wrong", "3 elements"), ("serial", "skipped", "no memory")]
    limits = []

    def launched(*_: object, timeout_s: float, **__: object) -> pd.DataFrame:
        limits.append(timeout_s)
        names = ("candidate", "status", "note")
        return BENCH.frame([{"mode": "idle", **dict(zip(names, row))} for row in rows])  # noqa: B905

    monkeypatch.setattr("ficco.tools.launch.launch", launched)
    command = f"explain {SIZED} --measure --seconds 3600"
    assert "wrong: growing: 3 elements\nskipped: serial: no mem" in ran(command, code=1).err
    assert limits[0] > 3600
    del rows[0]
    ran(command)
    rows[:] = [("", "skipped", "63 rows do not divide by 4 ranks")]
    assert "error: --measure: 63 rows do not divide" in ran(command, code=2).err


def test_a_folder_that_cannot_be_written_to_is_refused_before_any_rank_starts(
    tmp_path: Path, monkeypatch: Any, ran: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ficco.tools.launch.launch", lambda *_, **__: pytest.fail("started ranks"))
    file = tmp_path / "file"
    file.touch()
    reasons = {file: "File exists", "/proc": "No such file or directory"}
    for (out, reason), command in product(reasons.items(), ("demo", "bench")):
        message = f"--out: required a folder that can be written to, got {out} ({reason})"
        assert message in ran(f"{command} --device cpu --out", out, code=2).err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (f"plan hetero-fused-1d:pieces=4 {SIZED}", ["compute0", "checked for all 4 ranks"]),
        (f"plan growing {SIZED} --m 65", ["rows=[17, 16, 16, 16]"]),
        (f"explain --machine h200-4 {SIZED} --m 65", ["rows=[17, 16, 16, 16]"]),
        (f"plan auto {SIZED}", ["(model: "]),
        ("plan growing --m 64 --n 8 --k 32 --machine h200-2", ["checked for all 2 ranks"]),
        (f"{STAGED} --rows 30,20,10,4 --workspace-bytes 1024", ["steps at once"]),
        (f"{ATTENDS} --workspace-bytes 2100 --rank 3", ["2 steps at once"]),
    ],
)
def test_output_of_plan_and_explain(arguments: str, expected: list[str], ran: Any) -> None:
    output = ran(arguments).out
    assert all(text in output for text in expected)
    assert output.count(f"{output.partition('(')[0]}(") == 1


def test_plan_as_json_and_drawn(tmp_path: Path, ran: Any) -> None:
    plan = json.loads(ran(f"plan growing {SIZED} --rank 2 --json").out)
    assert (plan["rank"], plan["source"], plan["problem"]["n"]) == (2, "caller", 8)
    for operator, signals, of_sum in (
        ("all_gather_matmul", "gates", []),
        ("matmul_reduce_scatter", "announces", [[0, 16]]),  # this rank's rows, for the sum
    ):
        steps = json.loads(ran(f"plan tiled {SIZED} --json --operator", operator).out)["steps"]
        (product,) = (step for step in steps if step["op"] == "matmul")
        rows = [signal["rows"] for signal in product[signals]]
        assert rows == [[16, 32], [32, 48], [48, 64], *of_sum]
    picture, events = tmp_path / "sub" / "plan.png", tmp_path / "plan.json"
    output = ran(f"plan growing {SIZED} --draw", picture, "--trace", events).err
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in output
    traced = json.loads(events.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in traced if "args" in event}
    assert {"growing rank 3", "compute0", "copy0"} <= names


TUNE = "tune --ranks 2 --device cpu --out m.yaml"
OTHER = "--machine h200-4 --operator"
#: Options that commands refuse, and the messages.
REFUSED: dict[str, Sequence[tuple[str, str]]] = {
    "bench": (
        ("--schedules slowing", "slowing"),
        ("--device cpu --mode queued", "--mode: required one of idle on cpu"),
        ("--device cpu --ranks 0", "--ranks: required at least 1"),
        ("--rounds 0 --device cpu", "--rounds"),
        ("--rank 1", "ficco bench: error: unknown argument --rank; `ficco bench --help` lists all"),
        ("tea", "unknown argument tea; required `ficco bench [OPERATOR ...] [options]`, with "),
        ("--ranks 2 experts", "unknown argument experts; required `ficco bench [OPERATOR ...] ["),
        ("--device cpu --name a/b", "--name: required a name without a folder, got 'a/b'"),
        ("--set cpu --shapes x.csv --device cpu", "got both"),
        ("--set experts --only g1", "required some of g13, g14, g15, g16, got"),
        ("attention experts", "required one family, got attention and experts"),
        ("attention --set cpu", "--set: required none for attention"),
        ("layers --schedules auto", "--schedules: required none for layers"),
        ("fsdp --schedules auto", "--schedules: required none for fsdp"),
        ("attention --only 1k --device cpu", "some of 256, got '1k'"),
        ("attention --schedules slowing", "slowing"),
        ("--device cpu --ranks 2 --schedules ring", "schedule ring: ring is for"),
        ("--device cpu --ranks 2 --schedules ring:pieces=3", "ring:pieces=3: ring is for"),
        ("--device cpu --ranks 2 --schedules two-shot", "schedule two-shot: two-shot is for"),
        ("--device x", "ficco bench: error: --device: required one of cpu, cuda, got 'x'"),
    ),
    **{
        f"{command} --seconds": [
            (seconds, f"--seconds: required a number above 0 and at most 604800, got {seconds}")
            for seconds in ("0", "nan", "inf", "604801")
        ]
        for command in ("bench", "bench layers", "bench experts", f"explain {SIZED} --measure")
    },
    f"plan {SIZED}": (
        ("slowing", "serial, shard-overlap"),
        ("growing:fast", "not a knob"),
        ("growing --rows 1,2,3,4", "sum 64"),
        ("growing --rows a,2,3,4", "whole numbers"),
        ("growing --rank 4", "0 to 3"),
        ("growing --dtype int8", "--dtype: required one of bfloat16, float16, float32, fp8-"),
        (f"growing --trace {os.devnull}/x.json", "required a file that can be read or"),
        ("growing --draw x.png --machine abacus", "abacus"),
        ("growing --draw x", "--draw: required a file with one of the suffixes"),
        ("growing --workspace-bytes 1", "workspace_bytes"),
        (
            "growing --workspace-bytes 1 --operator matmul_reduce_scatter",
            "--workspace-bytes: required an operator that gathers",
        ),
        ("growing --world 0", "--world: required"),
        (f"growing --m {1 << 25} --n {1 << 40}", "out: required at most 281474976710656 elements"),
        ("growing --m 6400 --world 64 --promela -", "required at most 255 processes, got 258"),
    ),
    "plan": (
        ("--m x", "ficco plan: error: --m: required a whole number, got 'x'"),
        ("--m", "ficco plan: error: --m: required one argument, got none"),
        ("", "ficco plan: error: required schedule, got none"),
    ),
    "replay": (
        ("", "ficco replay: error: required --world, got none"),
        ("--world 4", "required a GPU, whose copy engines"),
        ("--world 1", "--world: required at least 2 ranks, got 1"),
        ("--world 4 --rank 4", "--rank: required 0 to 3, got 4"),
        ("--world 4 --mode graph", "queued or idle"),
        ("layers --world 4", "required one of a call, got layers"),
        ("fsdp --world 4", "required one of a call, got fsdp"),
    ),
    "demo --ranks": [("0", "--ranks: required at least 1, got 0")],
    **{
        f"{command} --device cpu --ranks": [("4096", "got 4096; --oversubscribe starts")]
        for command in ("demo", "bench", "tune", "doctor")
    },
    "simulate": (
        ("--m 8 --k 8", "--n: required, since all_gather_matmul needs m, n, k"),
        (f"slowing {SIZED}", "shard-overlap"),
        ("--mode graph", "required one of queued, idle, got 'graph'"),
        ("--set nothing", "measured"),
        ("--machine abacus", "abacus"),
        ("--world 0", "--world"),
        (f"--set measured {SIZED}", "one of"),
        ("--draw x.png", "one shape"),
        (f"--draw x {SIZED}", "--draw: required a file with one of the suffixes"),
        ("auto", "got 'auto', which stands for one of them; `ficco explain`"),
    ),
    "explain": (
        ("", "--m: required, since all_gather_matmul needs m, n, k; got none"),
        ("--seconds x", "ficco explain: error: --seconds: required a number, got 'x'"),
    ),
    "plot": (
        (f"{__file__} --out x.png", "or a .csv ("),
        ("nowhere.csv", "nowhere.csv: file: cannot be read: No such file or directory"),
        ("nowhere.json", "nowhere.json: file: cannot be read: No such file or directory"),
        (f"{LINES} --only what --out x.png", "--only"),
        (f"{LINES} --ranks 7 --out x.png", "0 to 1"),
        ("a.csv b.json", "got both"),
        ("a.csv b.csv --out x.png", "--out: required one CSV file, got 2"),
        ("a.csv --only x", "--only: required timelines"),
        ("a.json --report", "--report: required the CSV of a bench"),
    ),
    TUNE: (
        ("--only shapes", "required --shapes or --from-log with them"),
        ("--from-log none", "none"),
        (f"--from-log {os.devnull}", "required a problem of 2 ranks"),
        ("--only tea", "tea"),
        ("--ranks 1", "--ranks: required at least 2"),
        ("--tolerance 0.1", "--tolerance: required with --check"),
        ("--check --tolerance -1", "above 0, got -1.0"),
        ("--check --only gemm", "--check: required without --only"),
        ("--check --fresh", "--check: required without --fresh"),
        ("--operator matmul", "--operator"),
    ),
    "doctor": (
        ("--ranks 0", "--ranks: required at least 1, got 0"),
        ("--selftest --device tpu", "required one of cpu, cuda"),
        ("--report report.md", "required with --selftest"),
        ("--selftest --read report.md", "--read: required without --selftest"),
        ("--report new.md --read old.md", "--read: required without --selftest and --report"),
        ("--read /nowhere/report.md", "got /nowhere/report.json, which cannot be read"),
        ("--selftest --device cpu --report /nowhere/at/all.md", "--report: required"),
        ("--selftest --device cpu --report /", "--report: required"),
        ("--selftest --device cpu --report /proc/at.md", "got /proc/at.md (No such file"),
    ),
    "": (
        ("nothing", "ficco: error: command: required one of demo, explain, plan, "),
        ("", "ficco: error: required command, got none; `ficco --help` lists all"),
    ),
    **{
        f"{command} {OTHER} all_gather_attention {' '.join(ATTENTION)} --placement head-tail": (
            ("--kv-heads 3", "--kv-heads: required a divisor of 4 heads"),
            ("--sequence 66", "--sequence: required a multiple of 4"),
            ("--placement x", "--placement: required one of ranks, head-"),
            ("--window -1", "--window: required 0 to"),
            ("--m 8", "--m: required none for all_gather_attention"),
            ("--rows 1,2,3,4", "--rows: required none for all_gather_"),
        )
        for command in ("explain", "plan auto")
    },
    **{
        f"{command} {OTHER} ulysses_attention {' '.join(ATTENTION)}": (
            ("--placement ranks", "--placement: required none for ulysses_"),
            ("--world 8 --sequence 64", "the 8 ranks share equally"),
            ("--heads 0", "--heads: required at least 1, got 0"),
            ("--head-size 0", "--head-size: required at least 1, got 0"),
        )
        for command in ("explain", "plan auto")
    },
    **{
        f"{command} {OTHER} experts {' '.join(EXPERTS)}": (
            ("--experts 6", "--experts: required a multiple of 4"),
            ("--hosts 3", "--hosts: required a divisor of --world"),
            ("--activation tanh", "--activation: required one of relu, silu"),
            (option, f"{option.split()[0]}: required {required}"),
        )
        for command, option, required in (
            ("explain", "--measure", "an operator of products, got experts"),
            ("plan auto", "--workspace-bytes 1", "none for experts"),
        )
    },
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(f"{name} {options}", text) for name, rows in REFUSED.items() for options, text in rows],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: str, message: str, tmp_path: Path, monkeypatch: Any, ran: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    output = ran(arguments, code=2).err.strip()
    assert message in output and "usage" not in output and output.count("error:") == 1
    assert "error:" in output.splitlines()[-1] and not [*tmp_path.iterdir()]


def test_an_interrupted_command_says_how_to_continue(monkeypatch: Any, ran: Any) -> None:
    interrupt = mock.Mock(side_effect=KeyboardInterrupt)
    for name, message in (("tune", "interrupted; the same command continues"), ("demo", "ted\n")):
        monkeypatch.setattr(f"ficco.tools.cli.measure.run_{name}", interrupt)
        assert message in ran(name, code=130).err


def test_an_error_names_an_option_by_its_type_not_by_its_text(monkeypatch: Any, ran: Any) -> None:
    for error, message in (
        (InvalidArgument("world", "required fewer"), "error: --world: required fewer\n"),
        (InvalidArgument("ranks", "required fewer"), "error: ranks: required fewer\n"),
        (ValueError("world: the text begins so"), "error: world: the text begins so\n"),
    ):
        refuse = mock.Mock(side_effect=pickle.loads(pickle.dumps(error)))
        monkeypatch.setattr("ficco.heuristics.decide", refuse)
        assert message in ran(f"explain {SIZED}", code=2).err


@pytest.mark.parametrize("family", cli.FAMILIES)
def test_the_help_lists_the_sizes_of_a_family(family: str, ran: Any) -> None:
    pages = [ran(f"explain {words} {family} --help").out for words in ("", "--operator")]
    assert pages[0] == pages[1] and f"sizes of {family}:" in pages[0]
    specification = ASKABLE[cli.FAMILIES[family][0]]
    for name in (name for family_sizes in ASKABLE.values() for name in family_sizes.sizes):
        listed = f"  --{name.replace('_', '-')} " in pages[0].replace(",", "").split("\nsizes")[1]
        assert listed == (name in specification.sizes), name
    assert ("--rows" in pages[0]) == (family == "products")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_example_of_the_help_is_a_command(name: str, ran: Any) -> None:
    words = [name, *cli.COMMANDS[name].example.split()]
    assert f"example: ficco {' '.join(words)}" in " ".join(ran(f"{name} --help").out.split())
    assert not cli._parser(words).parse_known_args(cli._named(words))[1]


def test_the_help_has_every_option_and_its_default(ran: Any) -> None:
    subparsers = argparse._SubParsersAction
    (commands,) = (one.choices for one in cli._parser()._actions if isinstance(one, subparsers))
    assert {"bench", "plan"} <= set(commands)
    for name, parser in commands.items():
        for action in parser._actions:
            assert action.help, f"{name} {action.dest}"
            if isinstance(action.default, (int, float, str, Path)) and action.nargs != 0:
                if action.default != argparse.SUPPRESS:
                    assert f"default: {action.default}" in action.help, f"{name} {action.dest}"
    for name in ("plan", "explain", "simulate"):
        _, _, listing = ran(f"{name} --help").out.partition("  --dtype NAME ")
        listed = re.split(r"[,;]?\s+", listing.partition("(default")[0])
        assert {"bfloat16", *SCALED, *CAST_KINDS} <= {*listed}
    for name in ("bfloat16", *SCALED, *CAST_KINDS):
        assert operands_of(name)[0] in (name, "float8_e4m3fn", "float8_e4m3fnuz")


def test_plot_draws_every_kind_of_csv(tmp_path: Path, ran: Any) -> None:
    for name in ("layers-h200-4", "losses-h200-2", "simulated/mi300x-8"):
        picture = tmp_path / f"{Path(name).name}.png"
        output = ran("plot", RESULTS / f"{name}.csv", "--out", picture).err
        assert picture.read_bytes().startswith(b"\x89PNG") and output == f"wrote {picture}\n"
    failed = tmp_path / "failed.csv"
    row = {"case": "x", "candidate": "serial", "world": 2, "hosts": 1, "m": 0, "n": 0, "k": 0}
    append(failed, SIMULATED.frame([row]))
    assert "required a row with a figure, got none" in ran("plot", failed, code=2).err
    failed.write_text("a,b\n1,2\n")
    message = "required the columns of a CSV of bench, replay or simulate"
    assert message in ran("plot", failed, code=2).err


RECORDS = {
    "all_gather_attention": (*ATTENTION, "--placement", "head-tail"),
    "ulysses_attention": (*ATTENTION,),
    "experts": (*EXPERTS,),
}


@pytest.mark.parametrize("command", ["plan growing", "explain", "simulate"])
def test_tables_fit_a_terminal_and_are_explained(command: str, monkeypatch: Any, ran: Any) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    output = ran(f"{command} --m 8192 --n 3584 --k 4096 --machine h200-4").out
    assert max(map(len, output.splitlines())) <= 100
    meanings = {"plan": "2.0>1 its copy to rank 1", "explain": "\nCIL ", "simulate": "\nideal "}
    assert meanings[command.split()[0]] in output


@pytest.mark.parametrize("operator", RECORDS)
def test_attention_and_experts_are_planned_simulated_and_explained(
    operator: str, ran: Any, tmp_path: Path
) -> None:
    def output(*command: str, on: tuple[str, ...] = ("--machine", "h200-4")) -> str:
        return ran(command[0], operator, *command[1:], *RECORDS[operator], *on).out

    picture, lines = tmp_path / "picture.svg", tmp_path / "lines.json"
    printed = output("plan", "serial", "--rank", "1", "--draw", str(picture))
    assert "checked for all 4 ranks" in printed and "rank 1 of 4" in printed and picture.exists()
    planned = json.loads(output("plan", "auto", "--json"))
    assert {step["op"] for step in planned["steps"]} & {"attend", "apply", "matmul"}
    assert planned["source"] == "model"
    if operator == "experts":  # h columns, and twice as many with the gate
        assert " h=8," in printed and planned["problem"]["h"] == 8
        columns = {buffer["name"]: buffer["shape"][1] for buffer in planned["buffers"]}
        assert (columns["hidden"], columns["active"]) == (16, 8)

    simulated = json.loads(output("simulate", "--json", "--timelines", str(lines)))
    rows = {row["candidate"]: row for row in simulated}
    longer = max(rows["computed"]["ms"], rows["copies"]["ms"])
    assert rows["ideal"]["ms"] == pytest.approx(longer) and rows["ideal"]["m"] == 0
    names = [name for name in rows if name not in ("computed", "copies", "ideal")]
    assert len(loads(lines.read_text(), "lines")) == len(names) > 5
    for row in map(rows.get, names):
        ratios = [rows[name]["ms"] / row["ms"] for name in ("serial", "ideal")]
        assert [row["speedup"], row["share"]] == pytest.approx(ratios) and 0 < row["share"] < 1

    picture.unlink()
    decision = json.loads(output("explain", "--json", "--draw", str(picture)))
    assert picture.exists()
    assert decision["schedule"] == planned["schedule"] and decision["reason"] == planned["reason"]
    predicted = {row["schedule"]: row["predicted"]["queued"] for row in decision["candidates"]}
    assert predicted == {name: pytest.approx(rows[name]["ms"] * 1e-3) for name in names}
    table = output("explain")
    assert f" model: {planned['reason']} " in " ".join(table.split())  # the terminal wraps it
    assert f"* {planned['schedule']} " in table and "memory" in table and "DIL" not in table

    over_hosts = ("--machine", "h100-8", "--hosts", "2")
    planned = json.loads(output("plan", "auto", "--json", on=over_hosts))
    crossings = [step["work"]["moves"] for step in planned["steps"] if step["op"] == "network"]
    assert any(crossings) and planned["source"] == "model"
    simulated = json.loads(output("simulate", "serial", "--json", on=over_hosts))
    assert {(row["world"], row["hosts"]) for row in simulated} == {(4, 2)}
    (ms,) = (row["ms"] for row in simulated if row["candidate"] == "serial")
    assert ms > 0.02  # the network's latency
    table = output("simulate", "serial", on=over_hosts)
    assert "4 ranks on 2 hosts, queued" in table and table.startswith(f"{operator}(")


def test_cases_of_a_bench_of_attention_and_experts() -> None:
    def settings(*words: str) -> tuple[Any, dict[str, Any]]:
        arguments = cli._parser().parse_args(words)
        return arguments, commands._others(arguments, "cuda", commands.kind_of(arguments))[1]

    _, attention = settings("bench", "--operator", "attention", "--only", "64k")
    operators = [case.operator for case in attention["cases"]]
    assert operators == ["all_gather_attention", "ulysses_attention"]
    played = "--world 8 --rank 3 --machine h200-4 --schedules growing auto --operator experts"
    arguments, replay = settings("replay", *played.split())
    assert len(replay["cases"]) == 7 and replay["subject"] is experts.SUBJECT
    assert replay["schedules"] == ("growing", "auto")
    replayed = commands._played(arguments, "experts", replay["cases"])
    assert (replayed.world, replayed.rank, replayed.machine) == (8, 3, "h200-4")


def test_doctor_describes_this_machine_and_its_choices_for_a_number_of_ranks(
    capsys: Any, monkeypatch: Any, ran: Any
) -> None:
    uses = {}
    for number in (None, 1, 2):
        options = () if number is None else ("--ranks", number)
        report = json.loads(ran("doctor --device cpu --json", *options).out)
        uses[number] = report["use"]["schedule='auto'"]
        call = {"ranks": number, "engine": "cpu", "result": "right on every rank"}
        assert report.get("call") == (call if number else None)
    assert report["versions"]["python"] == sys.version.split()[0]
    assert report["devices"][0]["cores"] >= 1
    assert "float32" in report["engines"]["cpu"]["accumulate"]
    assert set(report["engines"]) == {"cpu", "cuda", "hip"}
    assert report["use"]["tensors on cpu"].startswith("cpu")
    assert uses[None].startswith("for 4 ranks on cpu: by the figures of cpu (")
    assert uses[1].startswith("for 1 rank on cpu: serial, since")
    decision = ficco.explain("all_gather_matmul", m=64, n=64, k=64, world=2, machine="cpu")
    assert decision.source == "fallback"
    assert uses[2] == f"for 2 ranks on cpu: {decision.schedule}, since {decision.reason}"
    doctor.show(report)
    printed = capsys.readouterr().out
    assert all(t in printed for t in ("Engine cpu", "What would be used", "right on every rank"))
    assert "float8 products" in printed and "partial_signals" not in printed
    assert report["extra"] == dict.fromkeys(cli.EXTRA, "installed")
    monkeypatch.setitem(sys.modules, "rich", None)
    message = "rich        rich: required, and not installed; `pip install"
    assert message in ran("doctor --device cpu").out


def test_doctor_survives_errors(monkeypatch: Any) -> None:
    def broken(*_: object) -> None:
        raise OSError("no such driver")

    with monkeypatch.context() as patch:
        for part in ("versions", "devices", "links", "use"):
            patch.setattr(doctor, part, broken)
        patch.setattr(doctor, "capabilities", lambda name: broken())
        report = doctor.report()
    json.dumps(report)
    doctor.show(report)
    assert report["links"] == "cannot be told: OSError: no such driver"
    assert report["engines"]["cpu"] == "cannot be used here: no such driver"
    # PyTorch without ROCm gets no advice about ROCm.
    monkeypatch.setitem(sys.modules, "ficco.dma.hip_api", None)  # hip-python is not installed
    for version, message in ((None, "this torch is built without ROCm"), ("7.2", "hip_api")):
        monkeypatch.setattr(torch.version, "hip", version)
        assert message in doctor._why_no_hip()


def test_demo_proves_every_schedule(tmp_path: Path) -> None:
    code, output = ranks.run(2, _demo, tmp_path, timeout=300.0)[0]
    lines = output.splitlines()
    rows = (tmp_path / "demo.csv").read_text().splitlines()[2:]
    picture = tmp_path / "timelines.png"
    drawn = {row.split(",")[0] for row in rows}
    assert {*NAMED, *demo.KNOBS[:2]} - drawn == {"ring", "one-shot", "two-shot"}
    assert all(",True," in row for row in rows)
    assert code == 0 and f"demo ok: {len(rows)} schedules exact on 2 ranks" in lines
    assert picture.stat().st_size > 10_000 and lines[-1].startswith(f"open {picture}: ")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert output.count("model: ") == 3  # decisions, with their reasons
    # The operators' table repeats the times of auto's schedule; ratios are quotients of times.
    tables = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    by_schedule = {row[0]: row[1:] for row in tables if len(row) == 4}
    by_operator = {row[0]: row[1:] for row in tables if row[-1:] == ["exact"] and len(row) == 6}
    assert len(by_operator) == len(OPERATORS) + 3
    schedule, *times, ratio, _ = by_operator["all_gather_matmul"]
    assert by_schedule[f"{schedule} (auto)"] == [times[0], ratio, "exact"]
    assert by_schedule["torch.distributed, then matmul"][0] == times[1]
    for _, ms, torch_ms, ratio, _ in by_operator.values():
        assert float(ratio) == pytest.approx(float(torch_ms) / float(ms), abs=0.02)
    assert f"auto takes {schedule} for all_gather_matmul (" in output


def test_the_demo_takes_gpus_where_there_are_any(monkeypatch: Any) -> None:
    launches = []
    monkeypatch.setattr("ficco.tools.launch.default_device", lambda: "cuda")
    monkeypatch.setattr("ficco.tools.launch.launch", lambda *a, **kw: launches.append((a, kw)))
    assert [cli.run(["demo", *options]) for options in ([], ["--device", "cpu"])] == [0, 0]
    devices = [(args[2], kwargs["device"]) for args, kwargs in launches]
    assert devices == [("cuda", "cuda"), ("cpu", "cpu")]


def test_the_demo_explains_auto_and_names_wrong_results() -> None:
    decision = decide(Case("", 768, 384, 768, "float32").problem(4), machine=find("cpu", None))
    assert decision.why in demo.about_times(decision, torch.device("cpu")).replace("\n", " ")
    for exact_schedules, exact_y, message in (
        ([True, True, None], True, "ok: 1 schedules exact on 4 ranks"),
        ([True, True, False], True, "failed: wrong results of b"),
        ([True, True, True], False, "failed: wrong results of y"),
    ):
        operators = pd.DataFrame({"operator": ["x", "y"], "exact": [True, exact_y]})
        results = pd.DataFrame({"schedule": ["torch", "a", "b"], "exact": exact_schedules})
        assert verdict(results, 4, operators) == (f"demo {message}", int("failed" in message))


def _demo(at: ranks.Rank, out: Path) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as output, pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "ROUNDS", 2)
        patch.setattr(demo, "KNOBS", demo.KNOBS[:2])
        patch.setattr(demo, "draw", lambda lines, *args, **kwargs: draw(lines[:4], *args, **kwargs))
        return demo.demo("cpu", out), output.getvalue()


def _wrong_demo(at: ranks.Rank) -> pd.DataFrame:
    """Rows of a demo with a wrong second call on rank 1."""

    def build(candidate: BenchCandidate, operands: Operands, _: object) -> Runner:
        calls = count(1)

        def run() -> torch.Tensor:
            if candidate.name == "hetero-fused-1d":
                raise NotImplementedError("not here")
            result = operands.reference()
            result[0, 0] += at.rank == 1 and candidate.name == "growing" and next(calls) == 2
            return result

        return Runner(run)

    with (
        pytest.MonkeyPatch.context() as patch,
        closing(Stopwatch(dist.group.WORLD, at.device)) as watch,
    ):
        patch.setattr(products, "build", build)
        names = map(parse, ("growing", "serial", "hetero-fused-1d"))
        rows = demo._table(demo._product("all_gather_matmul", watch, *names), 2)
        patch.setattr(ficco, "all_gather_matmul", lambda a, b: torch.full((16, 16), 17.0))
        with pytest.raises(ficco.FiccoError, match="required 16 everywhere"):
            doctor.after_a_call("cpu")
    return rows


def test_demo_and_doctor_see_one_wrong_result_on_one_rank() -> None:
    rows = ranks.run(2, _wrong_demo)[0].iloc[1:].set_index("schedule")
    assert rows["exact"].to_dict() == {"growing": False, "serial": True, "hetero-fused-1d": None}
    assert rows.loc["serial", "ms"] > 0 and "not here" in rows.loc["hetero-fused-1d", "note"]


READER_LEAVES = """
import os, sys
from ficco.tools.cli import main
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(reader)
sys.exit(main())
"""


@pytest.mark.parametrize("command", ["explain", "simulate growing"])
def test_a_reader_that_leaves_is_no_error(command: str, tmp_path: Path) -> None:
    words = f"{command} --m 64 --n 64 --k 64 --machine h200-4".split()
    closed = "import sys; sys.stdout = None; from ficco.tools.cli import main; sys.exit(main())"
    for name, script, code in (("left", READER_LEAVES, 141), ("closed", closed, 0)):
        ended = Program(tmp_path, name, script, words, {}).end(time.monotonic() + 120)
        assert ended == (code, "", "")
