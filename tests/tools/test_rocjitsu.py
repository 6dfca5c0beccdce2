"""The script that runs tests under AMD's emulator, with a double that only starts the program."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture
def script(monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "environments"))
    return importlib.import_module("rocjitsu")


def test_missing_requirements(script: Any, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """Messages without an emulator, and with a double that runs the command after ``--``."""
    command, config = tmp_path / "rocjitsu", tmp_path / "config.json"
    assert "required the command rocjitsu" in script.lacking(config)
    command.write_text('#!/bin/sh\n[ "$1" = --daemon ] && [ "$4" = -- ] && shift 4 && exec "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert "No such file" in script.lacking(config)
    for content, message in (('{"vm": {"gpu": {}}}', "got 1"), ("{}", "KeyError"), ("", "JSON")):
        config.write_text(content)
        assert message in script.lacking(config)
    config.write_text('{"vm": {"gpu": {"num_gpus": 2}}}')
    assert script.lacking(config) == ""
    for arguments, message in (([str(config)], "required PyTorch for ROCm, got"), ([], "CONFIG")):
        assert script.main(arguments) == 2 and message in capfd.readouterr().out
    monkeypatch.setattr(torch.version, "hip", "7.15")
    for count, reached, message in (
        (1, {(0, 1), (1, 0)}, "sees 1"),
        (2, {(0, 1)}, "GPU 1 cannot access"),
        (2, {(0, 1), (1, 0)}, ""),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        can = lambda device, peer, pairs=reached: (device, peer) in pairs  # noqa: E731
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", can)
        lacking = script.lacking_inside()
        assert message in lacking and bool(message) == bool(lacking)


def test_parts_run_and_failures_count(script: Any, monkeypatch: Any, capsys: Any) -> None:
    """Two checks and two operators, on CPUs."""
    import subjects

    from ficco.tools.selftest import run

    checks = [check for check in run.CHECKS if check.name in ("memory of peers", *script.SPEEDS)]
    monkeypatch.setattr(run, "CHECKS", tuple(checks))
    monkeypatch.setattr(run, "WAYS", dict(run.WAYS))
    names = ("all_gather_matmul", "matmul_all_reduce")
    monkeypatch.setattr(subjects, "SUBJECTS", {name: subjects.SUBJECTS[name] for name in names})
    monkeypatch.setattr(script, "WAIT_S", 10.0)
    assert script.inside("cpu") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ok: self-test: memory of peers" in lines and "0 failed;" in lines[-1]
    assert {f"skipped: {name}: an emulator has no speed" for name in script.SPEEDS} <= {*lines}
    assert sum(line.startswith("ok: contract: ") for line in lines) == 2
    assert not any("GB/s" in line for line in lines)
    seen = "3 calls exact; 2.0 GB/s; wrong\nmore"
    wrong = SimpleNamespace(check="graphs", verdict="failed", seen=seen)
    monkeypatch.setattr(run, "selftest", lambda *more: SimpleNamespace(results=[wrong]))
    monkeypatch.setattr(script, "contract", lambda device: iter(()))
    assert script.inside("cpu") == 1
    assert "failed: self-test: graphs: 3 calls exact; wrong\n" in capsys.readouterr().out
