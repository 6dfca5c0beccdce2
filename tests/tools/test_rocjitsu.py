"""The script that runs tests under AMD's emulator, with a stand-in that only starts the program."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "environments" / "rocjitsu.py"


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("rocjitsu_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of two GPUs, and a command ``rocjitsu`` that starts what follows ``--``."""
    command = tmp_path / "bin" / "rocjitsu"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\n[ "$1" = --daemon ] && [ "$4" = -- ] && shift 4 && exec "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")
    path = tmp_path / "two.json"
    path.write_text(json.dumps({"vm": {"gpu": {"num_gpus": 2}}}))
    return path


def test_it_says_what_is_missing_outside(
    script: Any, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert script.lacking(config) == ""
    one = config.with_name("one.json")
    for text, words in (('{"vm": {"gpu": {}}}', "got 1"), ("{}", "KeyError"), ("", "JSON")):
        one.write_text(text)
        assert words in script.lacking(one)
    assert "No such file" in script.lacking(config.with_name("none.json"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert "required the command rocjitsu" in script.lacking(config)


def test_it_says_what_is_missing_inside(
    script: Any, config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Through the stand-in, in a process of its own: this PyTorch is not ROCm's."""
    assert script.main([str(config)]) == 2
    assert "required PyTorch for ROCm, got" in capfd.readouterr().out
    assert script.main([]) == 2 and "CONFIG" in capfd.readouterr().out


def test_peers_that_cannot_be_reached_are_named(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.15")
    reached = {(0, 1), (1, 0)}
    for count, peers, words in ((1, reached, "sees 1"), (2, {(0, 1)}, "GPU 1 cannot access")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        can = lambda one, two, peers=peers: (one, two) in peers  # noqa: E731
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", can)
        assert words in script.lacking_inside()
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: True)
    assert script.lacking_inside() == ""


def test_parts_run_and_failures_count(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two checks and two operators, on CPUs."""
    import subjects

    from ficco.tools.selftest import run

    kept = [one for one in run.CHECKS if one.name in ("memory of peers", *script.SPEEDS)]
    monkeypatch.setattr(run, "CHECKS", tuple(kept))
    monkeypatch.setattr(run, "WAYS", dict(run.WAYS))
    few = {name: subjects.SUBJECTS[name] for name in ("all_gather_matmul", "matmul_all_reduce")}
    monkeypatch.setattr(subjects, "SUBJECTS", few)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(script, "WAIT_S", 10.0)
    assert script.inside("cpu") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ok: self-test: memory of peers" in lines and "0 failed;" in lines[-1]
    assert {f"skipped: {name}: an emulator has no speed" for name in script.SPEEDS} <= {*lines}
    assert sum(line.startswith("ok: contract: ") for line in lines) == 2
    assert not any("GB/s" in line for line in lines)
    wrong = SimpleNamespace(
        check="graphs", verdict="failed", seen="3 calls exact; 2.0 GB/s; wrong\nmore"
    )
    monkeypatch.setattr(run, "selftest", lambda *more: SimpleNamespace(results=[wrong]))
    monkeypatch.setattr(script, "contract", lambda device: iter(()))
    assert script.inside("cpu") == 1
    assert "failed: self-test: graphs: 3 calls exact; wrong\n" in capsys.readouterr().out
