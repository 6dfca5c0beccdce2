"""Times of calls between hosts over a wire of a chosen rate, measured on one machine.

    sudo python -m benchmarks.hosts FOLDER

Hosts are network namespaces. Each has a link to a bridge, limited by ``tc tbf``; with a delay
:mod:`tests.slow_wire` joins the hosts, which takes half a core. Ranks of different hosts share no
memory: gloo uses the wire, and copies stay within a host. A rank has one thread. The first results
are compared exactly. Every round calls all candidates in a new order; the time of a round is that
of the slowest rank. Writes ``hosts.csv``: the median of each shape and candidate, also of the
product and of the collective by itself, and two bounds as shares of the median: the longer of
product and collective, and the longer of product and bytes / rate of the wire. Needs ``ip``, ``tc``
and the right to create namespaces.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import ficco
from tests.slow_wire import enter, namespace, sh, slow_wire

#: m, n, k of all-gathers; reduce-scatters exchange n and k. At 200 MB/s and about 70 GFLOP/s per
#: rank the transfer takes about as long as the product.
SHAPES = ((2048, 320, 2048), (4096, 320, 1024), (1024, 320, 4096), (3072, 384, 2048))
COLUMNS = "operator", "m", "n", "k", "candidate", "median_ms", "of_collective", "of_wire"


@contextmanager
def shaped(names: list[str], rate: float) -> Iterator[None]:
    """Connect a device ``wire`` in each namespace to a bridge, at ``rate`` MB/s each way."""
    bridge = f"ficco{os.getpid()}"
    sh(f"ip link add {bridge} type bridge")
    try:
        sh(f"ip link set {bridge} up")
        for host, name in enumerate(names, start=1):
            sh(f"ip link add {name} type veth peer name wire netns {name}")
            sh(f"ip link set {name} master {bridge} up")
            sh(f"ip -n {name} addr add 10.77.0.{host}/24 dev wire")
            sh(f"ip -n {name} link set wire up")
            limit = f"tbf rate {rate * 8}mbit burst 1mb latency 400ms"
            sh(f"ip netns exec {name} tc qdisc add dev wire root {limit}")
        yield
    finally:
        for link in (*names, bridge):  # a namespace ends later, with its last process
            subprocess.run(["ip", "link", "del", link])


def measured(operator: str, shape: tuple[int, int, int], arguments: Any) -> dict[str, float]:
    """Median seconds of the product, of the collective, and of calls by schedule."""
    (m, n, k), gathers = shape, operator == "all_gather_matmul"
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # small integers, whose product is exact
    rows = m // world if gathers else m
    a, b = (torch.randint(-3, 4, size).float() for size in ((rows, k), (k, n)))
    full = torch.empty(m, k) if gathers else a @ b
    part, left = torch.empty(m // world, n), torch.ones(m, k)

    def collective() -> None:
        if gathers:
            dist.all_gather_into_tensor(full, a)
        else:
            dist.reduce_scatter_tensor(part, full)

    function = getattr(ficco, operator)
    names = {name: partial(function, a, b, schedule=name) for name in arguments.schedules}
    collective()
    for call in names.values():
        torch.testing.assert_close(call(), full @ b if gathers else part, rtol=0, atol=0)
    calls = {"product": partial(torch.mm, left, b), "collective": collective, **names}
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for turn in range(arguments.rounds + 1):
        random.Random(turn).shuffle(order)
        for name in order:
            dist.barrier()
            begin = time.perf_counter()
            calls[name]()
            slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name].append(float(slowest))
    return {name: median(seconds[1:]) for name, seconds in times.items()}


def rank_main(rank: int, host: str, arguments: Any) -> None:
    enter(host)
    os.environ.update(FICCO_HOST=host, GLOO_SOCKET_IFNAME="wire")
    torch.set_num_threads(1)
    address, world = "tcp://10.77.0.1:29531", arguments.hosts * arguments.ranks
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    rows = [COLUMNS]
    for operator in ("all_gather_matmul", "matmul_reduce_scatter"):
        for m, n, k in arguments.shapes:
            shape = (m, n, k) if operator == "all_gather_matmul" else (m, k, n)
            seconds = measured(operator, shape, arguments)
            # Bytes that leave a host: each rank sends a block of float32 to every other host.
            nbytes = m // arguments.hosts * k * 4 * (arguments.hosts - 1)
            seconds["wire"] = nbytes / (arguments.rate * 1e6)
            for name, measured_s in seconds.items():
                bounds = (max(seconds["product"], seconds[by]) for by in ("collective", "wire"))
                shares = [f"{bound / measured_s:.3f}" for bound in bounds]
                rows.append((operator, *map(str, shape), name, f"{measured_s * 1e3:.2f}", *shares))
                if rank == 0:
                    print(*rows[-1], flush=True)
    if rank == 0:
        with (Path(arguments.folder) / "hosts.csv").open("w") as file:
            csv.writer(file).writerows(rows)
    ficco.close()
    dist.destroy_process_group()


def sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--rate", type=float, default=200.0, help="MB/s")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds")
    parser.add_argument("--shapes", type=sizes, nargs="+", default=SHAPES, help="m,n,k of gathers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--schedules", nargs="+", default=["auto", "serial:collective", "serial"])
    arguments = parser.parse_args()
    Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    spawn, delay = multiprocessing.get_context("spawn"), arguments.delay * 1e-3
    with ExitStack() as stack:
        names = [f"ficco{os.getpid()}-{host}" for host in range(arguments.hosts)]
        for name in names:
            stack.enter_context(namespace(name))
        stack.enter_context(
            slow_wire(names, arguments.rate * 1e6, delay)
            if delay
            else shaped(names, arguments.rate)
        )
        ranks = [
            spawn.Process(target=rank_main, args=(rank, names[rank // arguments.ranks], arguments))
            for rank in range(arguments.hosts * arguments.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
