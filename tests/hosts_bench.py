"""Times calls of ranks on several hosts over a wire of a given rate, on one machine.

    sudo python tests/hosts_bench.py FOLDER

Hosts are network namespaces: on a bridge, each one's link limited by ``tc tbf``, or with a delay
behind :mod:`slow_wire`, which takes half a core. Their ranks share no memory with those of others:
gloo goes over the wire, copies inside. Ranks have a thread each. Results are compared exactly
first. Every round calls all candidates in a new order; a round's time is the slowest rank's. Writes
``hosts.csv``: for each shape and candidate the median, that of the product alone and of the
collective alone, and two shares of it: what the longer of product and collective takes, and what
the longer of the product and the bytes over the wire's rate takes. Needs the right to make
namespaces, ``ip`` and ``tc``.
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
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from slow_wire import namespace, sh, slow_wire

#: m, n, k of all-gathers; of reduce-scatters n and k are exchanged. At 200 MB/s and about 70
#: GFLOP/s a rank, what crosses takes about as long as the product.
SHAPES = ((2048, 320, 2048), (4096, 320, 1024), (1024, 320, 4096), (3072, 384, 2048))
TBF = "tbf rate {}mbit burst 1mb latency 400ms"
OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter")


@contextmanager
def namespaces(hosts: int, rate: float, delay: float) -> Iterator[list[str]]:
    """Namespaces 10.77.0.1, .2, ... that reach each other at so many MB/s each way, after a delay
    in milliseconds."""
    with ExitStack() as stack:
        bridge = f"ficco{os.getpid()}"
        names = [stack.enter_context(namespace(f"{bridge}-{host}")) for host in range(hosts)]
        if delay:
            stack.enter_context(slow_wire(names, rate * 1e6, delay * 1e-3))
        else:
            stack.enter_context(shaped(bridge, names, rate))
        yield names


@contextmanager
def shaped(bridge: str, names: list[str], rate: float) -> Iterator[None]:
    """A device ``wire`` in each namespace, on a bridge."""
    sh(f"ip link add {bridge} type bridge")
    try:
        sh(f"ip link set {bridge} up")
        for host, name in enumerate(names):
            sh(f"ip link add {name} type veth peer name wire netns {name}")
            sh(f"ip link set {name} master {bridge} up")
            sh(f"ip -n {name} addr add 10.77.0.{host + 1}/24 dev wire")
            sh(f"ip -n {name} link set wire up")
            sh(f"ip netns exec {name} tc qdisc add dev wire root {TBF.format(rate * 8)}")
        yield
    finally:
        for name in names:
            # A namespace goes later, with its last process; the link would stay as long.
            subprocess.run(["ip", "link", "del", name])
        sh(f"ip link del {bridge}")


def compare(
    operator: str, shape: tuple[int, int, int], rank: int, world: int, schedules: list[str]
) -> None:
    """The results for small integers, which have one right product."""
    import torch

    import ficco

    (m, n, k), part = shape, shape[0] // world
    gathers = operator == "all_gather_matmul"
    size = (part, k) if gathers else (m, k)
    for turn, name in enumerate(schedules):
        torch.manual_seed(turn)
        every = [torch.randint(-3, 4, size).float() for _ in range(world)]
        b = torch.randint(-3, 4, (k, n)).float()
        result = getattr(ficco, operator)(every[rank], b, schedule=name)
        if gathers:
            expected = torch.cat(every) @ b
        else:
            expected = sum(every)[rank * part : (rank + 1) * part] @ b
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


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


def crossing(operator: str, shape: tuple[int, int, int], arguments: Any) -> int:
    """The bytes that leave each host: a block of float32 of each rank for each other host."""
    m, n, k = shape
    columns = k if operator == "all_gather_matmul" else n
    return m // arguments.hosts * columns * 4 * (arguments.hosts - 1)


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
        for m, n, k in arguments.shapes:
            shape = (m, n, k) if operator == "all_gather_matmul" else (m, k, n)
            compare(operator, shape, rank, world, arguments.schedules)
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
            medians["wire"] = crossing(operator, shape, arguments) / (arguments.rate * 1e6)
            for name, seconds in medians.items():
                shares = [
                    max(medians["product"], medians[other]) / seconds
                    for other in ("collective", "wire")
                ]
                row = (
                    operator,
                    *shape,
                    name,
                    f"{seconds * 1e3:.2f}",
                    *map("{:.3f}".format, shares),
                )
                rows.append(row)
                if rank == 0:
                    print(*row, flush=True)
    if rank == 0:
        with (Path(arguments.folder) / "hosts.csv").open("w") as file:
            out = csv.writer(file)
            shares = ("of_collective", "of_wire")
            out.writerow(("operator", "m", "n", "k", "candidate", "median_ms", *shares))
            out.writerows(rows)
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
