"""Groups on several hosts that lose a rank, a host or the wire at any moment of their calls.

Where the wire is cut, hosts are network namespaces whose packets vanish from then on. More moments
are tried with ``FICCO_TESTS_MOMENTS``.
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
#: Seconds that a call waits for a peer, and what a busy machine may add.
PATIENCE_S, SLACK_S = 2.0, 8.0
#: Seconds of calls in which the moment lies.
SPAN_S = 0.4
#: Ranks that are lost in turns.
VICTIMS = ((3,), (0, 1), (0,), (2, 3))
MOMENTS = range(int(os.environ.get("FICCO_TESTS_MOMENTS", "2")))


def _host_of(rank: int) -> int:
    return rank // (WORLD // HOSTS)


def _loses(at: Rank, senders: Sequence[int], to: int, how: int, seed: int) -> Any:
    """Calls during which some ranks signal a process, by default themselves, at a moment: what
    comes of them, and when, counted from there."""
    os.environ["FICCO_HOST"] = f"host-{_host_of(at.rank)}"
    after = random.Random(f"{senders} {seed}").uniform(0, SPAN_S)
    with ficco.options(timeout_s=PATIENCE_S):
        for _ in range(2):  # with both slots: later no call allocates memory
            all_operators(at)
        dist.barrier()
        if at.rank in senders:
            threading.Timer(after, os.kill, (to or os.getpid(), how)).start()
        began = time.monotonic()
        failure = caught(lambda: [all_operators(at) for _ in count()])
        return failure, time.monotonic() - began - after


def _assert_learned(found: Sequence[Any]) -> None:
    for one in found:
        assert isinstance(one, tuple), one
        failure, seconds = one
        gave_up(failure)
        assert seconds < PATIENCE_S + SLACK_S, (seconds, failure.text)
        assert "host-" in failure.text, failure.text


@pytest.mark.slow
@pytest.mark.parametrize("seed", MOMENTS)
def test_ranks_and_hosts_that_end_at_any_moment(seed: int) -> None:
    victims = VICTIMS[seed % len(VICTIMS)]
    lost: Any = {"fresh": True, "catch": True, "lost": victims}
    found = run(WORLD, _loses, victims, 0, signal.SIGKILL, seed, **lost)
    survivors = [found[rank] for rank in range(WORLD) if rank not in victims]
    _assert_learned(survivors)
    texts = [failure.text for failure, _ in survivors]
    assert any(f"rank {victim} on host" in text for victim in victims for text in texts), texts


def _behind_the_wire(at: Rank, names: Sequence[str], *moment: Any) -> Any:
    """A group whose connections are all made in the namespaces of its hosts."""
    slow_wire.enter(names[_host_of(at.rank)])
    os.environ["GLOO_SOCKET_IFNAME"] = "wire"
    dist.destroy_process_group()
    address = "tcp://10.77.0.1:29531"
    dist.init_process_group("gloo", init_method=address, rank=at.rank, world_size=WORLD)
    return _loses(at, (0,), *moment)


@pytest.mark.skipif(not slow_wire.usable(), reason="needs root and /dev/net/tun")
@pytest.mark.slow
@pytest.mark.parametrize("seed", MOMENTS)
def test_a_wire_that_is_cut_at_any_moment(seed: int) -> None:
    """Until then calls are exact, although packets come 1 ms late."""
    with ExitStack() as stack:
        hosts = [f"ficco{os.getpid()}-{host}" for host in range(HOSTS)]
        names = [stack.enter_context(slow_wire.namespace(name)) for name in hosts]
        cut = stack.enter_context(slow_wire.slow_wire(names, 200e6, 1e-3))
        before = signal.signal(signal.SIGUSR2, lambda *_: cut.set())
        stack.callback(signal.signal, signal.SIGUSR2, before)
        where = names, os.getpid(), signal.SIGUSR2, seed
        _assert_learned(run(WORLD, _behind_the_wire, *where, fresh=True))
