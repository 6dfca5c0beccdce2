"""The CPU engine without operators: Plans on a slot, semaphores, memory, errors, lanes."""

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
from ficco.runtime.calls import compile
from ficco.schedules import Schedule, plan


@contextmanager
def engine(timeout_s: float = 20.0) -> Iterator[CpuEngine]:
    cpu = CpuEngine(dist.group.WORLD, torch.device("cpu"))
    cpu.timeout_s = timeout_s
    try:
        yield cpu
    finally:
        cpu.close()


def slot_for(cpu: CpuEngine, plans: Sequence[Plan]) -> Slot:
    words = max(plan.words for plan in plans)
    nbytes = max(plan.slot_bytes for plan in plans)
    memory = cpu.symmetric(cpu.slot_bytes(words, nbytes))
    return cpu.slot(memory, words, nbytes, False)


def at_rest(cpu: CpuEngine, slot: Slot) -> None:
    """Assert that this rank's words have the values before the first call."""
    dist.barrier()
    assert isinstance(slot.memory, CpuMemory)
    first = slot.memory.addresses[cpu.rank]
    words = [semaphores().value(first + i * SEMAPHORE_STRIDE) for i in range(slot.words)]
    assert words == [1] * min(cpu.world, slot.words) + [0] * (slot.words - cpu.world)


@on_ranks(2)
def test_a_timed_call_says_when_its_steps_ran(at: Rank) -> None:
    """A timed call returns the span of each step. A copy takes as long as its link needs."""
    problem = Problem("all_gather_matmul", (8,) * at.world, 5, 24, "float32")
    with engine() as cpu:
        cpu.bandwidth = 8 * 24 * 4 / 0.05  # a shard takes 50 ms
        own = plan(problem, Schedule.parse("shard-overlap"), at.rank)
        program = compile(own, cpu, slot_for(cpu, [own]), timed=True)
        for _ in range(2):
            call = Call({"a": torch.ones(8, 24), "b": torch.ones(24, 5), "out": torch.zeros(16, 5)})
            cpu.execute(program, call)
            assert (call.tensors["out"] == 24).all()
            spans = cpu.spans(program, call)
            assert [span.step for span in spans] == list(range(len(own.steps)))
            for span in spans:
                step = own.steps[span.step]
                assert span.lane == step.lane and 0 <= span.start <= span.stop < 10
                if step.op == "copy":
                    assert span.stop - span.start >= 0.049


@on_ranks(2)
def test_memory_may_be_freed_before_its_tensors(at: Rank) -> None:
    """Memory may be freed while a tensor uses it. The capabilities of the engine are right."""
    with engine() as cpu:
        capabilities = cpu.capabilities()
        assert cpu.name == "cpu" and not capabilities.capture
        assert capabilities.movers == ("dma", "kernel")
        assert capabilities.products == library(cpu.device)
        assert cpu.copy_engines() == 1 and cpu.capturing() == 0
        cpu.synchronize()
        memory = cpu.symmetric(64)
        tensor = memory.tensor.view(torch.float32)
        memory.free()
        memory.free()
        tensor.fill_(3)
        assert tensor.sum() == 48
    cpu.close()


#: A product in a lane, in a process whose OpenMP and MKL would use four threads. Prints the number
#: of threads that the lane adds to the process, with its own.
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
    """The test needs a new process: OpenMP reads its variables once, and tests set one thread."""
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
