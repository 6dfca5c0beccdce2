"""The CPU engine below the operators: Plans on a slot, semaphores, memory, errors, lanes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import torch
import torch.distributed as dist
from ranks import Rank, on_ranks

from ficco.compute.products import library
from ficco.compute.program import Call, Slot
from ficco.dma.cpu import CpuEngine, CpuMemory, Lane
from ficco.dma.host import SEMAPHORE_STRIDE, semaphores
from ficco.plan import Plan
from ficco.problems.products import Problem
from ficco.runtime.program import compile
from ficco.schedules import Schedule, plan


@contextmanager
def engine(timeout_s: float = 20.0) -> Iterator[CpuEngine]:
    made = CpuEngine(dist.group.WORLD, torch.device("cpu"))
    made.timeout_s = timeout_s
    try:
        yield made
    finally:
        made.close()


def slot_for(made: CpuEngine, plans: Sequence[Plan]) -> Slot:
    words = max(one.words for one in plans)
    nbytes = max(one.slot_bytes for one in plans)
    memory = made.symmetric(made.slot_bytes(words, nbytes))
    return made.slot(memory, words, nbytes, False)


def at_rest(made: CpuEngine, slot: Slot) -> None:
    """This rank's words are as before the first call."""
    dist.barrier()
    assert isinstance(slot.memory, CpuMemory)
    first = slot.memory.addresses[made.rank]
    words = [semaphores().value(first + i * SEMAPHORE_STRIDE) for i in range(slot.words)]
    assert words == [1] * min(made.world, slot.words) + [0] * (slot.words - made.world)


@on_ranks(2)
def test_a_timed_call_says_when_its_steps_ran(at: Rank) -> None:
    """Of which a copy takes as long as the link is slow."""
    problem = Problem("all_gather_matmul", (8,) * at.world, 5, 24, "float32")
    with engine() as made:
        made.bandwidth = 8 * 24 * 4 / 0.05  # a shard takes 50 ms
        one = plan(problem, Schedule.parse("shard-overlap"), at.rank)
        program = compile(one, made, slot_for(made, [one]), timed=True)
        for _ in range(2):
            call = Call({"a": torch.ones(8, 24), "b": torch.ones(24, 5), "out": torch.zeros(16, 5)})
            made.execute(program, call)
            assert (call.tensors["out"] == 24).all()
            found = made.spans(program, call)
            assert [span.step for span in found] == list(range(len(one.steps)))
            for span in found:
                step = one.steps[span.step]
                assert span.lane == step.lane and 0 <= span.start <= span.stop < 10
                if step.op == "copy":
                    assert span.stop - span.start >= 0.049


@on_ranks(2)
def test_memory_is_freed_under_living_tensors(at: Rank) -> None:
    """Also, what the engine says of itself."""
    with engine() as made:
        capabilities = made.capabilities()
        assert made.name == "cpu" and not capabilities.capture
        assert capabilities.movers == ("dma", "kernel")
        assert capabilities.products == library(made.device)
        assert made.copy_engines() == 1 and made.capturing() == 0
        made.synchronize()
        memory = made.symmetric(64)
        mine = memory.tensor.view(torch.float32)
        memory.free()
        memory.free()
        mine.fill_(3)
        assert mine.sum() == 48
    made.close()


#: A lane's product in a process whose OpenMP and MKL would start four threads for it. Prints the
#: threads that the lane adds to the process, its own included.
PRODUCT_OF_A_LANE = """
import os, threading, torch
from ficco.dma.cpu import Lane
torch.set_num_threads(1)
a, b, out = torch.ones(192, 768), torch.ones(768, 384), torch.empty(192, 384)
torch.mm(a, b, out=out)
before, done = len(os.listdir("/proc/self/task")), threading.Event()
lane = Lane("compute1")
lane.submit(lambda: torch.mm(a, b, out=out))
lane.submit(done.set)
assert done.wait(60)
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_the_product_of_a_lane_keeps_the_limit_on_threads() -> None:
    """A process of its own: OpenMP reads its variables once, and tests set them to one thread."""
    env = {**os.environ, "OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}
    program = [sys.executable, "-c", PRODUCT_OF_A_LANE]
    ended = subprocess.run(program, env=env, capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr


def test_a_lane_takes_the_limit_of_each_caller() -> None:
    limits, before, lane = SimpleQueue[int](), torch.get_num_threads(), Lane("compute1")
    try:
        for limit in (1, 3, 2):
            torch.set_num_threads(limit)
            lane.submit(lambda: limits.put(torch.get_num_threads()))
            assert limits.get(timeout=60) == limit
    finally:
        torch.set_num_threads(before)
        lane.close(join=True)
