"""Host time that ficco takes, compared with limits: `make speed`. Run it on a quiet machine.

Prints one line per limit; exits with 1 if a figure exceeds it. Each figure is the best of five.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

import ficco
from ficco.heuristics import decide, problem_of_sizes
from ficco.machine import Machine, find
from ficco.ops import call, operators
from ficco.problems.products import OPERATORS, Problem
from ficco.proof import check
from ficco.runtime.board import Board
from ficco.schedules import Schedule, plans

SIZES = range(8704, 16897, 2048)
IMPORT = """
import time, torch
begin = time.perf_counter()
import ficco
print(time.perf_counter() - begin)
"""


class Limit(NamedTuple):
    """A figure in seconds, and its limit on a quiet core."""

    name: str
    seconds: float
    limit: float


def best(call: Callable[[], object], repeats: int = 5, calls: int = 1) -> float:
    """Seconds per call of the fastest of several repeats."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls)
    return min(times)


def importing() -> Iterator[Limit]:
    program = [sys.executable, "-c", IMPORT]
    times = [float(subprocess.check_output(program, text=True)) for _ in range(5)]
    yield Limit("import ficco, after torch", min(times), 0.3)


def decide_next(problems: Iterator[Problem], machine: Machine) -> None:
    decide(next(problems), machine=machine)


def deciding() -> Iterator[Limit]:
    machine = find("h200-4", None)
    assert machine is not None
    machine = replace(machine, tiled=machine.tiled or machine.gemm)
    for operator in OPERATORS:
        # Each repeat takes a new size, whose decision is not cached.
        new = iter([problem_of_sizes(operator, m, 4096, 4096, "bfloat16", 4) for m in SIZES])
        yield Limit(f"decide: {operator}", best(partial(decide_next, new, machine)), 0.05)


def planning() -> Iterator[Limit]:
    for operator, name in (
        ("all_gather_matmul", "uniform-unfused-2d"),
        ("matmul_reduce_scatter", "hetero-unfused-1d:pull"),
        ("matmul_reduce_scatter", "ring:pieces=64"),
    ):
        problem = Problem(operator, (4096,) * 64, 512, 4096, "bfloat16")
        begin = time.perf_counter()
        check(plans(problem, Schedule.parse(name)))
        yield Limit(
            f"plan and prove 64 ranks: {operator} {name}", time.perf_counter() - begin, 10.0
        )


def calling() -> Iterator[Limit]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    board = Board(group, 10.0)
    numbers = iter(range(1, 10**6))
    yield Limit("board: post", best(lambda: board.post(next(numbers), 12345), calls=10_000), 5e-6)
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    ficco.matmul_all_reduce(a, b)
    vars(operators)["run"] = lambda *_: (a, None)
    seconds = best(lambda: ficco.matmul_all_reduce(a, b), repeats=20, calls=100)
    vars(operators)["run"] = call.run
    yield Limit("the public function, above the call itself", seconds, 10e-6)
    dist.destroy_process_group()


def main() -> int:
    exceeded = 0
    for measure in (importing, deciding, planning, calling):
        for name, seconds, limit in measure():
            exceeded += seconds > limit
            text = f"{seconds * 1e3:10.4f} ms of {limit * 1e3:8.3f}"
            print(f"{text}  {name}{'  EXCEEDED' * (seconds > limit)}", flush=True)
    return min(exceeded, 1)


if __name__ == "__main__":
    sys.exit(main())
