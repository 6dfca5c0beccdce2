"""Times calls of ranks on several hosts over a wire of a given rate, on one machine.

    sudo python tests/hosts_bench.py FOLDER

Hosts are network namespaces on a bridge; each one's link has the rate and the delay (``tc netem``;
the rate alone where the kernel lacks that).
Their ranks share no memory with those of others: gloo goes over the wire, copies inside. Ranks have
a thread each. Every round calls all candidates in a new order; a round's time is the slowest
rank's. Writes ``hosts.csv``: for each shape and candidate the median, that of the product alone and
of the collective alone. Needs the right to make namespaces, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

#: m, n, k of all-gathers; of reduce-scatters n and k are exchanged. At 200 MB/s and about 70
#: GFLOP/s a rank, what crosses takes about as long as the product.
SHAPES = ((2048, 320, 2048), (4096, 320, 1024), (1024, 320, 4096), (3072, 384, 2048))
NETEM, TBF = "netem rate {} delay {} limit 100000", "tbf rate {} burst 1mb latency 400ms"
OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter")


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextmanager
def namespaces(hosts: int, rate: str, delay: str) -> Iterator[list[str]]:
    """Namespaces 10.77.0.1, .2, ... that reach each other at a rate each way, after a delay."""
    names = [f"ficco{host}" for host in range(hosts)]
    sh("ip link add ficco type bridge")
    try:
        sh("ip link set ficco up")
        for host, name in enumerate(names):
            sh(f"ip netns add {name}")
            sh(f"ip link add {name} type veth peer name wire netns {name}")
            sh(f"ip link set {name} master ficco up")
            sh(f"ip -n {name} addr add 10.77.0.{host + 1}/24 dev wire")
            sh(f"ip -n {name} link set wire up")
            sh(f"ip -n {name} link set lo up")
            add = f"ip netns exec {name} tc qdisc add dev wire root"
            shaped = subprocess.run([*add.split(), *NETEM.format(rate, delay).split()])
            if shaped.returncode:  # a kernel without netem
                print("no delay: this kernel has no netem", flush=True)
                sh(f"{add} {TBF.format(rate)}")
        yield names
    finally:
        for name in names:
            # A namespace goes later, with its last process; the link would stay as long.
            subprocess.run(["ip", "link", "del", name])
            subprocess.run(["ip", "netns", "del", name])
        sh("ip link del ficco")


def calls_of(
    operator: str, shape: tuple[int, int, int], rank: int, world: int, schedules: list[str]
) -> dict[str, Callable[[], Any]]:
    """The product alone, the collective alone, and calls by schedule."""
    import torch
    import torch.distributed as dist

    import ficco

    gathers = operator == "all_gather_matmul"
    torch.manual_seed(rank)
    (m, n, k), part = shape, shape[0] // world
    a, b = torch.randn(part if gathers else m, k), torch.randn(k, n)
    left, whole = torch.randn(m, k), torch.empty(m, k if gathers else n)

    def collective() -> None:
        if gathers:
            dist.all_gather_into_tensor(whole, a)
        else:
            dist.reduce_scatter_tensor(whole[:part], whole)

    function = getattr(ficco, operator)
    return {
        "product": lambda: torch.mm(left, b),
        "collective": collective,
        **{name: partial(function, a, b, schedule=name) for name in schedules},
    }


def rank_main(rank: int, world: int, arguments: Any) -> None:
    import torch
    import torch.distributed as dist

    import ficco

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method="tcp://10.77.0.1:29531", rank=rank, world_size=world
    )

    def slowest(seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value)

    rows = []
    for operator in OPERATORS:
        for m, n, k in SHAPES:
            shape = (m, n, k) if operator == "all_gather_matmul" else (m, k, n)
            calls = calls_of(operator, shape, rank, world, arguments.schedules)
            times: dict[str, list[float]] = {name: [] for name in calls}
            order = list(calls)
            for turn in range(arguments.rounds + 1):
                random.Random(turn).shuffle(order)
                for name in order:
                    dist.barrier()
                    begin = time.perf_counter()
                    calls[name]()
                    seconds = slowest(time.perf_counter() - begin)
                    if turn:
                        times[name].append(seconds)
            medians = {name: statistics.median(some) for name, some in times.items()}
            ideal = max(medians["product"], medians["collective"])
            for name, seconds in medians.items():
                row = (operator, *shape, name, f"{seconds * 1e3:.2f}", f"{ideal / seconds:.3f}")
                rows.append(row)
                if rank == 0:
                    print(*row, flush=True)
    if rank == 0:
        with (Path(arguments.folder) / "hosts.csv").open("w") as file:
            out = csv.writer(file)
            out.writerow(("operator", "m", "n", "k", "candidate", "median_ms", "of_ideal"))
            out.writerows(rows)
    ficco.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--rate", default="1600mbit")
    parser.add_argument("--delay", default="1ms")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--schedules", nargs="+", default=["auto", "serial:collective", "serial"])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    world = arguments.hosts * arguments.ranks
    if arguments.rank is not None:
        rank_main(arguments.rank, world, arguments)
        return
    Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    with namespaces(arguments.hosts, arguments.rate, arguments.delay) as names:
        ranks = []
        for rank in range(world):
            name = names[rank // arguments.ranks]
            env = {**os.environ, "FICCO_HOST": name, "GLOO_SOCKET_IFNAME": "wire"}
            program = [sys.executable, *sys.argv, "--rank", str(rank)]
            ranks.append(subprocess.Popen(["ip", "netns", "exec", name, *program], env=env))
        codes = [one.wait() for one in ranks]
    print(json.dumps({"exit codes": codes}))
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
