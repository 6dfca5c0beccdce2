"""Groups on several hosts that lose a rank, a host or the wire at any moment of their calls.

Ranks are programs of their own, two on each of two hosts, and make one call after the other. Where
the wire is cut, hosts are network namespaces, and packets vanish from then on.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import slow_wire

WORLD, HOSTS = 4, 2
#: Seconds that a call waits for a peer, and what a busy machine may add.
PATIENCE_S, SLACK_S = 3.0, 8.0
#: Seconds of calls in which the moment lies.
SPAN_S = 0.6


def rank_main(rank: int, address: str) -> None:
    import test_operators
    import torch
    import torch.distributed as dist
    from ranks import Rank

    import ficco
    from ficco.problem import OPERATORS

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
    at = Rank(rank, WORLD, torch.device("cpu"))
    names = [one for one in OPERATORS if one != "all_gather_matmul"]
    cases = [
        test_operators.Case(
            name,
            test_operators.rows_for(name, WORLD, "ragged"),
            24,
            16,
            schedule="hetero-fused-1d:pieces=2",
        )
        for name in names
    ]
    with ficco.options(timeout_s=PATIENCE_S):
        for turn in count():
            if turn == len(cases):
                print("calls", flush=True)
            try:
                test_operators.exact(at, cases[turn % len(cases)], turn)
            except ficco.FiccoError as error:
                print(json.dumps([type(error).__name__, str(error), time.monotonic()]), flush=True)
                return


@contextmanager
def calling(wire: bool) -> Iterator[tuple[list[Any], Any]]:
    """Ranks that make calls, and what cuts the wire between their hosts."""
    with ExitStack() as stack:
        inside: list[list[str]] = [[]] * HOSTS
        cut, host, interface = None, "127.0.0.1", "lo"
        if wire:
            hosts = [f"ficco{os.getpid()}-{host}" for host in range(HOSTS)]
            names = [stack.enter_context(slow_wire.namespace(name)) for name in hosts]
            cut = stack.enter_context(slow_wire.slow_wire(names, 200e6, 1e-4))
            inside = [["ip", "netns", "exec", name] for name in names]
            host, interface = "10.77.0.1", "wire"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://{host}:{free.getsockname()[1]}"
        ranks = []
        for rank in range(WORLD):
            place = rank // (WORLD // HOSTS)
            env = {**os.environ, "FICCO_HOST": f"host-{place}", "GLOO_SOCKET_IFNAME": interface}
            program = [*inside[place], sys.executable, __file__, str(rank), address]
            ranks.append(
                subprocess.Popen(
                    program, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            )
            stack.callback(ranks[-1].kill)
        yield ranks, cut


#: What is lost.
LOSSES = {"rank 0": (0,), "rank 3": (3,), "host 0": (0, 1), "host 1": (2, 3), "the wire": ()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("FICCO_TESTS_MOMENTS", "2"))))
@pytest.mark.parametrize("lost", LOSSES)
def test_every_survivor_learns_of_a_loss_at_any_moment(lost: str, seed: int) -> None:
    victims: Sequence[int] = LOSSES[lost]
    if not victims and not slow_wire.usable():
        pytest.skip("needs root and /dev/net/tun")
    with calling(not victims) as (ranks, cut):
        for one in ranks:
            line = one.stdout.readline()
            assert line == "calls\n", (line, one.stderr.read())
        time.sleep(random.Random(f"{lost} {seed}").uniform(0, SPAN_S))
        began = time.monotonic()
        for victim in victims:
            ranks[victim].kill()
        if not victims:
            cut.set()
        blamed = ""
        for rank in sorted({*range(WORLD)} - {*victims}):
            # It also ends by itself.
            out, err = ranks[rank].communicate(timeout=2 * (PATIENCE_S + SLACK_S))
            assert out, (rank, err)
            kind, text, when = json.loads(out)
            assert kind in ("SignalTimeout", "PeerFailed"), (rank, kind, text)
            assert when - began < PATIENCE_S + SLACK_S, (rank, text)
            assert "host-" in text, (rank, text)
            blamed += text
        assert not victims or any(f"rank {victim} on host" in blamed for victim in victims), blamed


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    rank_main(int(sys.argv[1]), sys.argv[2])
