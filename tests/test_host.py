"""Shared host memory: ficco.dma.host."""

from __future__ import annotations

import errno
import gc
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Rank, caught, on_ranks
from torch.distributed import distributed_c10d

from ficco.dma import host
from ficco.dma.host import HostMemory
from ficco.errors import BackendError, RankMismatch, SignalTimeout


def share(nbytes: int = 8, timeout_s: float = 20.0, purpose: str = "test") -> HostMemory:
    return HostMemory(dist.group.WORLD, nbytes, timeout_s, purpose)


@on_ranks(3)
def test_names_in_the_store_can_be_used_again(at: Rank) -> None:
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    for turn in range(10):
        memory = share(64)  # reuses the names of its predecessor in the store
        memory.maps[at.rank][0] = turn
        memory.barrier(10.0)
        assert [part[0] for part in memory.maps] == [turn] * at.world
    # Entries that an earlier group of the same name has left in the store.
    old = {"token": "0", "heard": {str(rank): "1" for rank in range(at.world)}, "pid": 1, "fd": 3}
    store.set(f"ficco/leftover/{at.rank}", json.dumps(old))
    dist.barrier()
    time.sleep(0.1 * at.rank)
    share(64, purpose="leftover").barrier(10.0)


def open_and_mapped() -> tuple[int, int]:
    """Numbers of descriptors and mappings of this process with the purpose "leak"."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/self/maps") as maps:
        counts = [sum("ficco leak" in name for name in lines) for lines in (names, maps)]
    return counts[0], counts[1]


@on_ranks(2)
def test_memory_is_released(at: Rank) -> None:
    memory = share(purpose="leak")
    assert open_and_mapped()[1] == at.world
    memory.close()
    gc.collect()
    assert open_and_mapped() == (0, 0)
    for _ in range(3):
        caught(lambda: share(0 if at.rank else 8, purpose="leak"))
    gc.collect()
    assert open_and_mapped() == (0, 0)
    dist.barrier()


@on_ranks(3)
def test_a_rank_that_is_absent_is_named(at: Rank) -> None:
    for missing in ([1], [0, 2]):
        if at.rank not in missing:
            purpose, absent, begin = f"absence of {missing}", f"rank {missing[0]}", time.monotonic()
            with pytest.raises(SignalTimeout) as raised:
                share(timeout_s=0.4, purpose=purpose)
            error, text = raised.value, str(raised.value)
            assert (error.rank, error.peer) == (at.rank, missing[0])
            others = "; ranks 0, 2 are absent" * (len(missing) > 1)
            expected = f"for {absent} to share host memory for {purpose}{others}. {absent} died"
            assert text.startswith("ficco: rank ") and expected in text, text
            assert error.step in expected and "schedule" not in text
            assert 0.3 < error.seconds < 20 and time.monotonic() - begin < 20
        dist.barrier()
    memory = share()
    if at.rank != 1:
        with pytest.raises(SignalTimeout) as raised:
            memory.barrier(0.3)
        assert raised.value.peer == 1
    dist.barrier()


@on_ranks(3)
def test_different_sizes_and_other_hosts_are_refused(at: Rank) -> None:
    with pytest.raises(RankMismatch, match="(?s)ranks 0, 2: 16 bytes.*rank 1: 8 bytes"):
        share(8 if at.rank == 1 else 16, purpose="sizes")
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_read", lambda path: f"boot {at.rank // 2}")
        patch.setattr(socket, "gethostname", lambda: f"host{at.rank // 2}")
        with pytest.raises(NotImplementedError, match="host0.*host1"):
            share(purpose="hosts")
    dist.barrier()


@on_ranks(2)
def test_a_store_that_hangs_or_an_interrupt_does_not_hang_the_rank(at: Rank) -> None:
    """A store whose host is stopped hangs."""
    with pytest.MonkeyPatch.context() as patch:
        store = SimpleNamespace(set=lambda *args: time.sleep(30))
        patch.setattr(distributed_c10d, "_get_process_group_store", lambda group: store)
        begin = time.monotonic()
        with pytest.raises(SignalTimeout):
            share(timeout_s=0.3)
        assert time.monotonic() - begin < 20

    def interrupt() -> None:
        raise KeyError("enough")

    if at.rank == 0:
        with pytest.raises(KeyError):
            HostMemory(dist.group.WORLD, 8, 20.0, "test", interrupt=interrupt)
    dist.barrier()


def refuse(*_: Any) -> Any:
    raise PermissionError(errno.EACCES, "Permission denied")


OTHERS = "a file of another user"
CODES = {"nothing": "ENOENT", "a file": "ESTALE", "a socket": "ENXIO", OTHERS: "EACCES"}


@pytest.mark.parametrize("explains", [True, False])
@pytest.mark.parametrize("reused", CODES)
@on_ranks(2)
def test_the_reason_of_a_peer_giving_up_is_raised(at: Rank, explains: bool, reused: str) -> None:
    """Rank 1 gives up after it has published its memory and before a peer maps it. ``reused`` is
    the kind of file that its descriptor refers to afterwards."""
    gives_up, opens = at.rank == 1, list[bool]()
    files: list[Any] = []

    class Broken(HostMemory):
        def _open(self, rank: int, hello: dict[str, Any], here: str) -> Any:
            if gives_up:
                raise KeyboardInterrupt
            while (reused == "nothing") == bool(file := descriptor(hello)) or file == hello["file"]:
                time.sleep(1e-3)  # until rank 1 has closed its memory
            opens.append(True)
            return super()._open(rank, hello, here)

    def descriptor(hello: dict[str, Any]) -> Any:
        return host._file(f"/proc/{hello['pid']}/fd/{hello['fd']}")

    def interrupt() -> None:
        if explains and opens:
            raise KeyError("reason of the peer")

    def share() -> None:
        with pytest.MonkeyPatch.context() as patch:
            if reused == OTHERS and not gives_up:
                patch.setattr(os, "open", refuse)
            Broken(dist.group.WORLD, 8, 20.0, "test", interrupt=interrupt)

    if gives_up:
        with pytest.raises(KeyboardInterrupt):
            share()
        if "file" in reused:
            files = [open(os.devnull) for _ in range(8)]
        elif "socket" in reused:
            files = [socket.socket() for _ in range(8)]
    else:
        failure = caught(share)
    dist.barrier()
    for file in files:
        file.close()
    if not gives_up and explains:
        assert failure.type == "KeyError", failure
    elif not gives_up:
        assert failure.type == "BackendError" and failure.fields["code"] == CODES[reused], failure
        assert "rank 1 has just ended or given up" in failure.text


@pytest.mark.parametrize("ended", [True, False])
def test_a_dead_peer_that_is_hidden_is_named(monkeypatch: pytest.MonkeyPatch, ended: bool) -> None:
    """The descriptors of an ended process belong to root, even before its parent waits for it."""
    command = [sys.executable, "-c", "" if ended else "input()"]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE)
    if ended:  # and stays a zombie
        os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WNOWAIT)

    memory = HostMemory.__new__(HostMemory)
    memory._interrupt = lambda: None
    hello = {"host": "here", "pid": peer.pid, "fd": 3, "file": [1, 2], "nbytes": 8}
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        patch.setattr(os, "stat", refuse)
        message = "rank 1 has just ended" if ended else "only if one user runs them all"
        with pytest.raises(BackendError if ended else NotImplementedError, match=message):
            memory._open(1, hello, "here")
    peer.communicate(b"\n")


ONE_RANK: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(NotImplementedError, match="Linux"):
        HostMemory(ONE_RANK, 8, 1.0, "test")
