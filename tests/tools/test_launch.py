"""The launcher of ranks: its result, the end of ranks, and the number of ranks.

Ranks import this file, so it imports little.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ficco.errors import ConfigError
from ficco.tools.launch import RankFailed, check_ranks, launch, own_rank


def _fail(fault: str) -> None:
    if dist.get_rank() == 1:
        if fault == "raise":
            raise ZeroDivisionError("on purpose")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(100)
    dist.barrier()


def _listeners() -> list[str]:
    """Addresses of the ranks' store, as in /proc/net/tcp."""
    store = dist.distributed_c10d._get_default_store()
    while not hasattr(store, "port"):
        store = store.underlying_store
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
    ends = [line[1].split(":") for line in lines if line[3] == "0A"]  # the state LISTEN
    return [address for address, port in ends if int(port, 16) == store.port]


def _runs(process: str) -> bool:
    try:
        return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _stay(folder: str, deaf: bool = False) -> None:
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(60)


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_the_store_is_reached_from_this_machine_only() -> None:
    assert launch(_listeners, 2) == ["0100007F"]


def test_ranks_that_do_not_end_are_waited_for_together(tmp_path: Path, monkeypatch: Any) -> None:
    began = []

    def collect(*_: object) -> None:
        assert _within(100, lambda: len(os.listdir(tmp_path)) == 3)
        began.append(time.monotonic())
        raise ZeroDivisionError

    monkeypatch.setattr("ficco.tools.launch.TERMINATE_S", 3.0)
    monkeypatch.setattr("ficco.tools.launch._collect", collect)
    with pytest.raises(ZeroDivisionError):
        launch(_stay, 3, str(tmp_path), True)
    assert time.monotonic() - began[0] < 8  # one after the other, they would take 9
    assert not any(map(_runs, os.listdir(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_parent(number: signal.Signals, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    parent = context.Process(target=launch, args=(_stay, 2, str(tmp_path)))
    parent.start()
    assert _within(100, lambda: len(os.listdir(tmp_path)) == 2) and parent.pid is not None
    os.kill(parent.pid, number)
    parent.join(30)
    assert _within(15, lambda: not any(map(_runs, os.listdir(tmp_path))))


@pytest.mark.parametrize(
    ("fault", "seconds", "kind", "message"),
    [
        ("raise", 60.0, "ZeroDivisionError", "on purpose"),
        ("kill", 60.0, "exit", "SIGKILL"),
        ("hang", 1.0, "exit", "exit code 1"),
    ],
)
def test_launch_names_the_failed_rank(fault: str, seconds: float, kind: str, message: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=message) as caught:
        launch(_fail, 2, fault, timeout_s=seconds)
    assert caught.value.kind == kind
    assert fault == "hang" or caught.value.rank == 1
    assert ("_fail" in caught.value.details) == (fault == "raise")
    assert time.monotonic() - began < 30


def test_ranks_come_from_the_launcher_only_if_its_variables_are_complete(monkeypatch: Any) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert (check_ranks(None, "cuda"), check_ranks(None, "cpu")) == (2, 4)
    with pytest.raises(ValueError, match="at most 2"):
        check_ranks(3, "cuda")
    monkeypatch.setenv("RANK", "1")  # a stale variable, or a scheduler's
    assert own_rank() == 0
    for name, value in (("WORLD_SIZE", "3"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert own_rank() == 1 and check_ranks(None, "cpu") == 3
    with pytest.raises(ValueError, match="torchrun"):
        check_ranks(4, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "three")
    with pytest.raises(ConfigError, match="WORLD_SIZE: three: required a number"):
        check_ranks(None, "cpu")
    monkeypatch.setenv("RANK", "")
    with pytest.raises(ConfigError, match="RANK"):
        own_rank()
