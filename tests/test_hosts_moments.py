"""Groups on several hosts that lose a rank, a host or the wire at any moment of their calls.

Where the wire is cut, hosts are network namespaces whose packets vanish from then on, and ranks are
programs of their own. More moments are tried with ``FICCO_TESTS_MOMENTS``.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, NoReturn

import pytest
import ranks
import slow_wire
import test_operators
import torch
import torch.distributed as dist

import ficco
from ficco.problems.products import OPERATORS

WORLD, HOSTS = 4, 2
#: Seconds that a call waits for a peer, and what a busy machine may add.
PATIENCE_S, SLACK_S = 3.0, 8.0
#: Seconds of calls in which the moment lies.
SPAN_S = 0.4

MOMENTS = range(int(os.environ.get("FICCO_TESTS_MOMENTS", "2")))
OPERATOR_NAMES = [name for name in OPERATORS if name != "all_gather_matmul"]


def moment(lost: Sequence[int], seed: int) -> float:
    return random.Random(f"{lost} {seed}").uniform(0, SPAN_S)


def exact(at: ranks.Rank, turn: int) -> None:
    """A call of each operator by turns."""
    name = OPERATOR_NAMES[turn % len(OPERATOR_NAMES)]
    rows = test_operators.rows_for(name, WORLD, "ragged")
    case = test_operators.Case(name, rows, 24, 16, schedule="hetero-fused-1d:pieces=2")
    test_operators.exact(at, case, turn)


def calls(at: ranks.Rank) -> NoReturn:
    for turn in count():
        exact(at, turn)


def assert_learned(failure: ranks.Failure, seconds: float) -> None:
    ranks.gave_up(failure)
    text = failure.text
    assert seconds < PATIENCE_S + SLACK_S, (seconds, text)
    assert "host-" in text, text


def _loses(at: ranks.Rank, victims: Sequence[int], seed: int) -> Any:
    os.environ["FICCO_HOST"] = f"host-{at.rank // (WORLD // HOSTS)}"
    after = moment(victims, seed)
    with ficco.options(timeout_s=PATIENCE_S):
        for turn in range(len(OPERATOR_NAMES)):
            exact(at, turn)
        at.barrier()
        if at.rank in victims:
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        began = time.monotonic()
        return ranks.caught(lambda: calls(at)), time.monotonic() - began - after


@pytest.mark.slow
@pytest.mark.parametrize("seed", MOMENTS)
@pytest.mark.parametrize("victims", [(0,), (3,), (0, 1), (2, 3)])
def test_ranks_and_hosts_that_end_at_any_moment(victims: tuple[int, ...], seed: int) -> None:
    found = ranks.run(WORLD, _loses, victims, seed, fresh=True, catch=True, lost=victims)
    texts = []
    for rank in sorted({*range(WORLD)} - {*victims}):
        assert isinstance(found[rank], tuple), (rank, found[rank])
        failure, seconds = found[rank]
        assert_learned(failure, seconds)
        texts.append(failure.text)
    assert any(f"rank {victim} on host" in text for victim in victims for text in texts), texts


# A wire that is cut.


def rank_main(rank: int, address: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
    at = ranks.Rank(rank, WORLD, torch.device("cpu"))
    with ficco.options(timeout_s=PATIENCE_S):
        for turn in range(len(OPERATOR_NAMES)):
            exact(at, turn)
        at.barrier()
        print("calls", flush=True)
        failure = ranks.caught(lambda: calls(at))
    print(pickle.dumps((failure, time.monotonic())).hex(), flush=True)


@contextmanager
def behind_a_wire() -> Iterator[tuple[list[Any], threading.Event]]:
    """Ranks that make calls, and what cuts the wire between their hosts."""
    with ExitStack() as stack:
        hosts = [f"ficco{os.getpid()}-{host}" for host in range(HOSTS)]
        names = [stack.enter_context(slow_wire.namespace(name)) for name in hosts]
        cut = stack.enter_context(slow_wire.slow_wire(names, 200e6, 1e-4))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://10.77.0.1:{free.getsockname()[1]}"
        programs = []
        for rank in range(WORLD):
            host = rank // (WORLD // HOSTS)
            env = {**os.environ, "FICCO_HOST": f"host-{host}", "GLOO_SOCKET_IFNAME": "wire"}
            program = ["ip", "netns", "exec", names[host], sys.executable, __file__]
            pipes: Any = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            one = subprocess.Popen([*program, str(rank), address], env=env, **pipes)
            programs.append(stack.enter_context(one))
            stack.callback(one.kill)
        yield programs, cut


@pytest.mark.skipif(not slow_wire.usable(), reason="needs root and /dev/net/tun")
@pytest.mark.slow
@pytest.mark.parametrize("seed", MOMENTS)
def test_a_wire_that_is_cut_at_any_moment(seed: int) -> None:
    with behind_a_wire() as (programs, cut):
        for one in programs:
            line = one.stdout.readline()
            assert line == "calls\n", (line, one.stderr.read())
        time.sleep(moment((), seed))
        cut.set()
        began = time.monotonic()
        for one in programs:  # each also ends by itself
            out, err = one.communicate(timeout=2 * (PATIENCE_S + SLACK_S))
            assert out, err
            failure, when = pickle.loads(bytes.fromhex(out))
            assert_learned(failure, when - began)


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), sys.argv[2])
