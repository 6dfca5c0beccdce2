"""The CPU engine below the operators: Plans on a slot, semaphores, memory, errors, lanes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import SimpleQueue

import pytest
import torch
import torch.distributed as dist
from cases import gathered_bytes
from ranks import Rank, on_ranks, run
from test_all_gather_matmul import named

from ficco.compute.products import library
from ficco.compute.program import Call, Program, Slot
from ficco.dma.cpu import CpuEngine, CpuMemory, Lane
from ficco.dma.host import SEMAPHORE_STRIDE, semaphores
from ficco.plan import Plan
from ficco.problems.products import Problem
from ficco.runtime.program import compile
from ficco.schedules import NAMED, Schedule, StagingTooSmall, plan, refusal

KNOBS = (
    "",
    "pull",
    "pieces=3+1,copy=2,compute=2",
    "pieces=2,tail=2,pull,kernel,copy=3,compute=2",
    "order=peer,kernel",
)
NAMES = [
    named(name, knobs)
    for name, schedule in NAMED.items()
    if not refusal(Problem("all_gather_matmul", (1,), 1, 1, "float32"), schedule)
    for knobs in KNOBS
]


@contextmanager
def engine(timeout_s: float = 20.0) -> Iterator[CpuEngine]:
    made = CpuEngine(dist.group.WORLD, torch.device("cpu"))
    made.timeout_s = timeout_s
    try:
        yield made
    finally:
        made.close()


def problem(rows: Sequence[int], k: int = 24, n: int = 5, dtype: str = "float32") -> Problem:
    return Problem("all_gather_matmul", tuple(rows), n, k, dtype)


def operands(of: Problem, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The gathered A and b: whole numbers, as float64."""
    generator = torch.Generator().manual_seed(turn)
    a = torch.randint(-4, 5, (of.m, of.k), generator=generator)
    b = torch.randint(-4, 5, (of.k, of.n), generator=generator)
    return a.double(), b.double()


def slot_for(made: CpuEngine, plans: Sequence[Plan]) -> Slot:
    words = max(one.words for one in plans)
    nbytes = max(one.slot_bytes for one in plans)
    memory = made.symmetric(made.slot_bytes(words, nbytes))
    return made.slot(memory, words, nbytes, False)


def call_for(one: Plan, a: torch.Tensor, b: torch.Tensor, sparse: bool = False) -> Call:
    """Operands of this rank, and results that no product has yet touched. If sparse, neither rows
    nor columns of a are adjacent, b lies transposed, and rows of the result are apart."""
    of = one.problem
    dtype = getattr(torch, of.dtype)
    own = {"a": a[of.offsets[one.rank] : of.offsets[one.rank + 1]].to(dtype), "b": b.to(dtype)}
    for buffer in one.buffers:
        if buffer.memory in ("result", "local"):
            shape, kept = one.shape(buffer.name), getattr(torch, buffer.dtype)
            own[buffer.name] = torch.full(shape, float("nan"), dtype=kept)
    if sparse:
        own["a"] = own["a"].repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]
        own["b"] = own["b"].t().contiguous().t()
        own["out"] = torch.full((of.m, 2 * of.n), 7.0, dtype=dtype)[:, : of.n]
    return Call(own)


def verify(call: Call, a: torch.Tensor, b: torch.Tensor, what: object) -> None:
    out, gathered = call.tensors["out"], call.tensors.get("gathered")
    assert torch.equal(out, (a @ b).to(out.dtype)), what
    if gathered is not None:
        assert torch.equal(gathered, a.to(gathered.dtype)), what


def execute(made: CpuEngine, program: Program) -> None:
    one = program.plan
    for turn, sparse in enumerate((False, True, False)):
        a, b = operands(one.problem, turn)
        call = call_for(one, a, b, sparse)
        made.execute(program, call)
        verify(call, a, b, (one.schedule, str(one.problem), turn))


def at_rest(made: CpuEngine, slot: Slot) -> None:
    """This rank's words are as before the first call."""
    dist.barrier()
    assert isinstance(slot.memory, CpuMemory)
    first = slot.memory.addresses[made.rank]
    words = [semaphores().value(first + i * SEMAPHORE_STRIDE) for i in range(slot.words)]
    assert words == [1] * min(made.world, slot.words) + [0] * (slot.words - made.world)


def every_schedule(at: Rank, of: Problem, share: int) -> int:
    """Plans on one slot, which each must leave as it found it; with a share, staging has no more
    than that part of the gathered A. The number of plans whose staging is a ring."""
    cap = gathered_bytes(of) // share if share else None
    plans = []
    for name in NAMES:
        with suppress(StagingTooSmall):
            plans.append(plan(of, Schedule.parse(name), at.rank, cap))
    with engine() as made:
        slot = slot_for(made, plans)
        for one in plans:
            execute(made, compile(one, made, slot))
        if slot.words:
            at_rest(made, slot)
    return sum(bool(one.stages) for one in plans)


@pytest.mark.parametrize(
    ("of", "share"),
    [
        (problem((16,), dtype="float64"), 0),
        (problem((5, 0, 9), dtype="bfloat16"), 0),
        (problem((4, 4), k=0), 0),
        (replace(problem((12, 12, 12), dtype="bfloat16"), return_gathered=True), 4),
        (replace(problem((3, 20, 8, 1), dtype="bfloat16"), return_gathered=True), 2),
    ],
    ids=str,
)
def test_every_schedule_is_exact(of: Problem, share: int) -> None:
    rings = run(of.world, every_schedule, of, share)
    assert min(rings) > 5 if share else not any(rings)


@on_ranks(2)
def test_a_timed_call_says_when_its_steps_ran(at: Rank) -> None:
    """A timed call says when its steps ran, of which a copy takes as long as the link is slow."""
    of = problem([8] * at.world)
    with engine() as made:
        made.bandwidth = 8 * 24 * 4 / 0.05  # a shard takes 50 ms
        one = plan(of, Schedule.parse("shard-overlap"), at.rank)
        program = compile(one, made, slot_for(made, [one]), timed=True)
        a, b = operands(of, 0)
        for _ in range(2):
            call = call_for(one, a, b)
            made.execute(program, call)
            verify(call, a, b, "timed")
            found = made.spans(program, call)
            assert [span.step for span in found] == list(range(len(one.steps)))
            for span in found:
                step = one.steps[span.step]
                assert span.lane == step.lane and 0 <= span.start <= span.stop < 10
                if step.op == "copy":
                    assert span.stop - span.start >= 0.049


def freed(at: Rank) -> None:
    """What the engine says of itself; memory that it frees under living tensors."""
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


def test_memory_is_freed_under_living_tensors() -> None:
    run(2, freed)


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
