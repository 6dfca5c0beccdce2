"""Groups on several hosts that lose a rank, a host or the wire at random moments of their calls.

Hosts whose wire is cut are network namespaces, which lose all packets from then on.
``FICCO_TESTS_MOMENTS`` sets the number of moments.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import pytest
import slow_wire
import torch.distributed as dist
from ranks import Rank, caught, gave_up, run
from test_hosts import all_operators

import ficco

WORLD, HOSTS = 4, 2
#: Timeout of a call in seconds, and the seconds that a busy machine may add.
PATIENCE_S, SLACK_S = 2.0, 8.0
#: The random moment is at most this many seconds after the first call.
SPAN_S = 0.4
#: Ranks that are lost, for each seed in turn.
VICTIMS = ((3,), (0, 1), (0,), (2, 3))
MOMENTS = range(int(os.environ.get("FICCO_TESTS_MOMENTS", "2")))


def _host_of(rank: int) -> int:
    return rank // (WORLD // HOSTS)


def _failure_after_signal(at: Rank, senders: Sequence[int], to: int, sig: int, seed: int) -> Any:
    """Call until a call fails, while ``senders`` signal process ``to`` (0: themselves) at a random
    moment; return the failure and its seconds after that moment."""
    os.environ["FICCO_HOST"] = f"host-{_host_of(at.rank)}"
    delay = random.Random(f"{senders} {seed}").uniform(0, SPAN_S)
    with ficco.options(timeout_s=PATIENCE_S):
        for _ in range(2):  # use both slots, so that no later call allocates memory
            all_operators(at)
        dist.barrier()
        if at.rank in senders:
            threading.Timer(delay, os.kill, (to or os.getpid(), sig)).start()
        began = time.monotonic()
        failure = caught(lambda: [all_operators(at) for _ in count()])
        return failure, time.monotonic() - began - delay


def _assert_reported(results: Sequence[Any]) -> None:
    for result in results:
        assert isinstance(result, tuple), result
        failure, seconds = result
        gave_up(failure)
        assert seconds < PATIENCE_S + SLACK_S, (seconds, failure.text)
        assert "host-" in failure.text, failure.text


@pytest.mark.slow
@pytest.mark.parametrize("seed", MOMENTS)
def test_ranks_and_hosts_that_end_at_any_moment(seed: int) -> None:
    victims = VICTIMS[seed % len(VICTIMS)]
    lost: Any = {"fresh": True, "catch": True, "lost": victims}
    results = run(WORLD, _failure_after_signal, victims, 0, signal.SIGKILL, seed, **lost)
    survivors = [results[rank] for rank in range(WORLD) if rank not in victims]
    _assert_reported(survivors)
    texts = [failure.text for failure, _ in survivors]
    assert any(f"rank {victim} on host" in text for victim in victims for text in texts), texts


def _over_the_wire(at: Rank, names: Sequence[str], *moment: Any) -> Any:
    """Run :func:`_failure_after_signal` in a group that connects over the wire of its hosts."""
    slow_wire.enter(names[_host_of(at.rank)])
    os.environ["GLOO_SOCKET_IFNAME"] = "wire"
    dist.destroy_process_group()
    address = "tcp://10.77.0.1:29531"
    dist.init_process_group("gloo", init_method=address, rank=at.rank, world_size=WORLD)
    return _failure_after_signal(at, (0,), *moment)


@pytest.mark.skipif(not slow_wire.usable(), reason="needs root and /dev/net/tun")
@pytest.mark.slow
@pytest.mark.parametrize("seed", MOMENTS)
def test_a_wire_that_is_cut_at_any_moment(seed: int) -> None:
    """Calls before the cut are exact, although the wire delays packets by 1 ms."""
    with ExitStack() as stack:
        hosts = [f"ficco{os.getpid()}-{host}" for host in range(HOSTS)]
        names = [stack.enter_context(slow_wire.namespace(name)) for name in hosts]
        cut = stack.enter_context(slow_wire.slow_wire(names, 200e6, 1e-3))
        before = signal.signal(signal.SIGUSR2, lambda *_: cut.set())
        stack.callback(signal.signal, signal.SIGUSR2, before)
        arguments = names, os.getpid(), signal.SIGUSR2, seed
        _assert_reported(run(WORLD, _over_the_wire, *arguments, fresh=True))
