"""The CPU engine below the operators: Plans on a slot, semaphores, disturbances, errors.

Inputs are integers and compared with no tolerance. They depend on rank, row, column and iteration,
so that a stale or misplaced piece shows.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import disturbance
import pytest
import torch
import torch.distributed as dist
from cases import gathered_bytes
from disturbance import Disturbance, disturb
from ranks import Died, Rank, caught, ranks, run
from test_all_gather_matmul import named

from ficco.compute.products import library
from ficco.compute.program import Call, Program, Slot
from ficco.dma.cpu import CpuEngine
from ficco.dma.cpu_collectives import collect
from ficco.dma.cpu_lanes import CallState, CpuMemory, Lane
from ficco.dma.host import SEMAPHORE_STRIDE, semaphores
from ficco.errors import RankMismatch
from ficco.plan import Plan
from ficco.problems.products import Problem
from ficco.runtime.program import compile
from ficco.schedules import NAMED, Schedule, plan, refusal

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
#: Enough terms for sums that bfloat16 and float16 must round, once.
LARGE = 8


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


def operands(of: Problem, turn: int, high: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """The gathered A and b, as float64."""
    generator = torch.Generator().manual_seed(turn)
    a = torch.randint(-high, high + 1, (of.m, of.k), generator=generator)
    b = torch.randint(-high, high + 1, (of.k, of.n), generator=generator)
    return a.double(), b.double()


def slot_for(made: CpuEngine, plans: Sequence[Plan]) -> Slot:
    words = max(one.words for one in plans)
    nbytes = max(one.slot_bytes for one in plans)
    memory = made.symmetric(made.slot_bytes(words, nbytes))
    return made.slot(memory, words, nbytes, False)


def call_for(one: Plan, a: torch.Tensor, b: torch.Tensor) -> Call:
    """Operands of this rank, and results that no product has yet touched."""
    of = one.problem
    dtype = getattr(torch, of.dtype)
    nan = float("nan")
    own = {"a": a[of.offsets[one.rank] : of.offsets[one.rank + 1]].to(dtype), "b": b.to(dtype)}
    for buffer in one.buffers:
        if buffer.memory in ("result", "local"):
            shape, kept = one.shape(buffer.name), getattr(torch, buffer.dtype)
            own[buffer.name] = torch.full(shape, nan, dtype=kept)
    return Call(own)


def verify(call: Call, a: torch.Tensor, b: torch.Tensor, what: object) -> None:
    out, gathered = call.tensors["out"], call.tensors.get("gathered")
    assert torch.equal(out, (a @ b).to(out.dtype)), what
    if gathered is not None:
        assert torch.equal(gathered, a.to(gathered.dtype)), what


def execute(made: CpuEngine, program: Program, turns: int, high: int = 4) -> None:
    one = program.plan
    for turn in range(turns):
        a, b = operands(one.problem, turn, high)
        call = call_for(one, a, b)
        made.execute(program, call)
        verify(call, a, b, (one.schedule, str(one.problem), turn))


def words_of(made: CpuEngine, slot: Slot) -> list[int]:
    """The values of this rank's words."""
    assert isinstance(slot.memory, CpuMemory)
    first = slot.memory.addresses[made.rank]
    return [semaphores().value(first + i * SEMAPHORE_STRIDE) for i in range(slot.words)]


def at_rest(made: CpuEngine, slot: Slot) -> None:
    dist.barrier()
    rest = [1] * min(made.world, slot.words) + [0] * (slot.words - made.world)
    assert words_of(made, slot) == rest


def every_schedule(at: Rank, rows: Sequence[int], dtype: str) -> None:
    of = problem(rows, dtype=dtype)
    plans = [plan(of, Schedule.parse(name), at.rank) for name in NAMES]
    with engine() as made:
        slot = slot_for(made, plans)  # one for all: each must leave it as it found it
        for one in plans:
            execute(made, compile(one, made, slot), 3, LARGE)
        if slot.words:
            at_rest(made, slot)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_every_schedule_is_exact(world: int, dtype: str) -> None:
    run(world, every_schedule, [16] * world, dtype)


@pytest.mark.parametrize(
    "rows", [(5, 0, 9), (0, 0, 3), (1, 2, 3), (0, 0, 0), (17, 1, 0)], ids=lambda rows: str(rows)
)
def test_uneven_shards_are_exact(rows: tuple[int, ...]) -> None:
    run(3, every_schedule, rows, "bfloat16")


def empty_sizes(at: Rank) -> None:
    with engine() as made:
        for rows, k, n in ((4, 0, 3), (4, 3, 0), (1, 1, 1), (0, 0, 0)):
            for dtype in ("bfloat16", "float32"):
                of = problem([rows] * at.world, k, n, dtype)
                plans = [plan(of, Schedule.parse(name), at.rank) for name in NAMES]
                slot = slot_for(made, plans)
                for one in plans:
                    execute(made, compile(one, made, slot), 2)
                at_rest(made, slot)


def test_nothing_to_multiply_gives_zeros() -> None:
    run(2, empty_sizes)


def with_ring(at: Rank) -> None:
    """Staging as a ring, of other shapes on other ranks."""
    found = 0
    with engine() as made:
        for rows in ([12] * at.world, [3, 20, 8, 1][: at.world]):
            of = replace(problem(rows, dtype="bfloat16"), return_gathered=True)
            plans = []
            for name in NAMES:
                for share in (4, 2):
                    try:
                        one = plan(of, Schedule.parse(name), at.rank, gathered_bytes(of) // share)
                    except ValueError:
                        continue
                    plans.append(one)
                    found += bool(one.stages)
            slot = slot_for(made, plans)
            for one in plans:
                execute(made, compile(one, made, slot), 3)
            at_rest(made, slot)
    assert found > 10


@ranks(2, 4)
def test_staging_as_a_ring_is_exact(world: int) -> None:
    run(world, with_ring)


def with_jitter(at: Rank) -> None:
    of = problem([8] * at.world)
    plans = [plan(of, Schedule.parse(name), at.rank) for name in NAMES]
    jitter = Disturbance(delay_s=0.003, seed=5)
    with engine() as made, disturb(jitter):
        slot = slot_for(made, plans)
        for one in plans:
            execute(made, compile(one, made, slot), 2)
        at_rest(made, slot)
    assert jitter._random.keys() == {at.rank}  # delays were drawn


def test_copies_may_come_in_any_order() -> None:
    run(3, with_jitter)


def layouts(at: Rank) -> None:
    """Operands as they come, and A read by the peers where it lies."""
    of = replace(problem([6] * at.world, dtype="bfloat16"), return_gathered=True)
    with engine() as made:
        slot = slot_for(made, [plan(of, Schedule.parse(name), at.rank) for name in NAMES])
        for name in NAMES:
            one = plan(of, Schedule.parse(name), at.rank)
            program = compile(one, made, slot)
            a, b = operands(of, at.world)
            for turn in range(4):
                call = call_for(one, a, b)
                own = call.tensors
                if turn == 0:  # rows at a distance
                    own["a"] = torch.cat([own["a"], own["a"]], 1)[:, : of.k]
                elif turn == 1:  # neither rows nor columns adjacent
                    own["a"] = own["a"].repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]
                elif turn == 2:
                    own["a"] = own["a"].t().contiguous().t()
                    own["b"] = own["b"].t().contiguous().t()
                else:
                    wide = torch.full((of.m, 2 * of.n), 7.0, dtype=torch.bfloat16)
                    own["out"] = wide[:, : of.n]
                made.execute(program, call)
                verify(call, a, b, (name, turn))
        shared = replace(of, symmetric=True)
        memory = made.symmetric(4096)
        for name in ("serial:pull", "hetero-fused-2d:pull", "hetero-unfused-1d:pull,copy=2"):
            one = plan(shared, Schedule.parse(name), at.rank)
            program = compile(one, made, slot_for(made, [one]), (memory, 128))
            for turn in range(3):
                a, b = operands(of, turn)
                call = call_for(one, a, b)
                call.tensors["a"] = (
                    memory.tensor[128:].view(torch.bfloat16)[: 6 * of.k].view(6, of.k)
                )
                call.tensors["a"].copy_(call_for(one, a, b).tensors["a"])
                made.execute(program, call)
                verify(call, a, b, (name, turn))


def test_operands_of_any_layout() -> None:
    run(3, layouts)


def modes(at: Rank) -> None:
    """Grad and inference mode belong to a thread, and a call has several."""
    of = problem([6] * at.world)
    one = plan(of, Schedule.parse("hetero-unfused-1d:compute=2,pull"), at.rank)
    a, b = operands(of, 0)
    with engine() as made:
        with torch.inference_mode():
            program = compile(one, made, slot_for(made, [one]))
            inside = call_for(one, a, b)
            made.execute(program, inside)
            verify(inside, a, b, "inference")
        outside = call_for(one, a, b)
        outside.tensors["a"].requires_grad_()
        outside.tensors["b"].requires_grad_()
        made.execute(program, outside)
        verify(outside, a, b, "grad")
        assert (
            not outside.tensors["out"].requires_grad and not outside.tensors["out"].is_inference()
        )


def test_calls_work_in_any_grad_mode() -> None:
    run(2, modes)


def large(at: Rank, dtype: str) -> None:
    """Sizes at which other kernels are chosen; in bfloat16 sums leave the range of integers."""
    with engine() as made:
        for name in ("serial", "uniform-fused-1d", "hetero-fused-2d", "uniform-unfused-2d:pull"):
            of = problem([64] * at.world, 256, 96, dtype)
            one = plan(of, Schedule.parse(name), at.rank)
            execute(made, compile(one, made, slot_for(made, [one])), 2, LARGE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_are_rounded_once(dtype: str) -> None:
    run(2, large, dtype)


def spans(at: Rank) -> None:
    of = problem([8] * at.world)
    with engine() as made:
        made.bandwidth = 8 * 24 * 4 / 0.05  # a shard takes 50 ms
        one = plan(of, Schedule.parse("shard-overlap"), at.rank)
        program = compile(one, made, slot_for(made, [one]), trace=True)
        a, b = operands(of, 0)
        for _ in range(2):
            call = call_for(one, a, b)
            made.execute(program, call)
            verify(call, a, b, "traced")
            found = made.spans(program, call)
            assert [span.step for span in found] == list(range(len(one.steps)))
            for span in found:
                step = one.steps[span.step]
                assert span.lane == step.lane and 0 <= span.start <= span.stop < 10
                if step.op == "copy":
                    assert span.stop - span.start >= 0.049


def test_a_traced_call_says_when_its_steps_ran() -> None:
    run(2, spans)


def freed(at: Rank) -> list[int]:
    with engine() as made:
        memory = made.symmetric(64)
        mine = memory.tensor.view(torch.float32)
        memory.free()
        memory.free()
        mine.fill_(3)
        assert mine.sum() == 48
    made.close()
    return sorted(os.listdir("/dev/shm"))


def test_memory_is_freed_under_living_tensors() -> None:
    before = sorted(os.listdir("/dev/shm"))
    assert run(2, freed) == [before] * 2


def first_copy(one: Plan) -> int:
    return next(i for i, step in enumerate(one.steps) if step.op == "copy")


def lonely(at: Rank, name: str, way: str, victim: int, timeout_s: float) -> Any:
    """Two whole calls, then one in which a rank is stuck, dies or is absent.

    With several copy lanes only one peer may miss its piece; the others find out in the next call.
    """
    of = problem([8] * at.world)
    one = plan(of, Schedule.parse(name), at.rank)
    with engine(10.0) as made:
        program = compile(one, made, slot_for(made, [one]))
        execute(made, program, 2)
        dist.barrier()
        made.timeout_s = timeout_s
        step = victim, first_copy(plan(of, Schedule.parse(name), victim))
        a, b = operands(of, 0)
        begin = time.monotonic()
        failure = None
        with disturb(Disturbance(**{} if way == "absent" else {way: step})):
            while failure is None and (way != "absent" or at.rank != victim):
                failure = caught(lambda: made.execute(program, call_for(one, a, b)))
        seconds = time.monotonic() - begin
        begin = time.monotonic()
    closing = time.monotonic() - begin
    if way != "kill":
        dist.barrier()
    return failure, seconds, closing


def collective(at: Rank, alone: Sequence[int]) -> Any:
    """The library's all-gather obeys the time limit of the call, and lets its group go."""
    with engine() as made:
        for rows in ([8] * at.world, [5, 0, 9], [0] * at.world):
            for dtype in ("bfloat16", "float64"):
                one = plan(problem(rows, dtype=dtype), Schedule.parse("serial:collective"), at.rank)
                execute(made, compile(one, made, None), 3)
        dist.barrier()
        one = plan(problem(alone), Schedule.parse("serial:collective"), at.rank)
        a, b = operands(one.problem, 0)
        program = compile(one, made, None)
        made.timeout_s = 0.3
        begin = time.monotonic()
        failure = None
        if at.rank != 1:
            failure = caught(lambda: made.execute(program, call_for(one, a, b)))
        else:
            time.sleep(3)
        seconds = time.monotonic() - begin
    begin = time.monotonic()
    dist.destroy_process_group()
    gc.collect()
    return failure, seconds, time.monotonic() - begin


@pytest.mark.parametrize("rows", [[8, 8, 8], [0, 9, 2]], ids=["equal", "uneven"])
def test_a_collective_is_exact_and_ends(rows: list[int]) -> None:
    results = run(3, collective, rows, fresh=True)
    for failure, seconds, ending in (results[0], results[2]):
        assert ending < 5
        assert failure.type == "SignalTimeout"
        assert failure.fields["step"] == "all-gather (collective on compute0)"
        assert failure.fields["peer"] == 1 and 0.3 <= seconds < 5


LONELY = (
    "serial",
    "uniform-fused-2d:copy=3,compute=2",
    "hetero-unfused-1d:pull,copy=3",
    "shard-overlap:pull",
)


class _Work:
    """A collective that ends behind a slice: what of it is not deprecated."""

    def __init__(self, waits: Sequence[str]) -> None:
        self.waits = list(waits)
        self.over = False

    def is_completed(self) -> bool:
        return self.over

    def wait(self, timeout: Any) -> bool:
        time.sleep(0.02)
        said = self.waits.pop(0)
        self.over = not self.waits or self.waits[0] != "slow"
        if said:
            raise RuntimeError(said)
        return True


def slices(at: Rank) -> list[Any]:
    one = plan(problem([3] * at.world), Schedule.parse("serial:collective"), at.rank)
    found = []
    with engine(0.3) as made:
        program = compile(one, made, None)
        for waits in (["slow", ""], ["slow", "slow", ""], ["slow", "broken"], ["slow"] * 1000):
            work = _Work(waits)
            call = call_for(one, *operands(one.problem, 0))
            call.state = CallState(1, [], made.timeout_s, None)
            began = caught(
                lambda: collect(made, program, call, 0, lambda: (None, False), lambda: work)  # noqa: B023
            )
            found.append(began if began is None else (began.type, "broken" in began.text))
    return found


def test_a_collective_is_looked_at_in_slices() -> None:
    assert run(1, slices) == [[None, None, ("BackendError", True), ("SignalTimeout", False)]]


def blamed(
    results: list[Any], name: str, victim: int, timeout_s: float, ended: bool = False
) -> None:
    """``ended``: the victim's process has, which is noticed without waiting for the timeout."""
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        failure, seconds, closing = result
        assert failure.type == "SignalTimeout", failure
        fields = failure.fields
        assert (fields["operator"], fields["rank"], fields["peer"]) == (
            "all_gather_matmul",
            rank,
            victim,
        )
        assert fields["schedule"] == str(Schedule.parse(name))
        assert (fields["wanted"], fields["found"]) == (1, 0)
        assert fields["step"] and " on c" in fields["step"]
        assert fields["ended"] == ended and closing < 3
        assert seconds < 1 if ended else timeout_s <= seconds < timeout_s + 5


@pytest.mark.parametrize("way", ["stall", "absent"])
@pytest.mark.parametrize("name", LONELY)
def test_a_stuck_or_absent_rank_is_named_by_all_others(name: str, way: str) -> None:
    timeout_s = 1.0  # on a busy host the ranks that do come may be half a second apart
    results = run(4, lonely, name, way, 2, timeout_s)
    blamed(results, name, 2, timeout_s)
    if way == "stall":
        assert results[2][0].type == "SignalTimeout"


@pytest.mark.parametrize("name", LONELY[1:3])
def test_a_killed_rank_is_named_by_all_others(name: str) -> None:
    # Rank 0 hosts the store of the group, which the others do not need any more.
    for victim in (0, 2) if name == LONELY[1] else (1,):
        results = run(3, lonely, name, "kill", victim, 20.0, fresh=True, catch=True)
        assert isinstance(results[victim], Died) and results[victim].exitcode == -9
        blamed(results, name, victim, 20.0, ended=True)


def interrupted(at: Rank) -> Any:
    of = problem([8] * at.world)
    one = plan(of, Schedule.parse("serial"), at.rank)
    with engine(20.0) as made:
        program = compile(one, made, slot_for(made, [one]))
        a, b = operands(of, 0)

        def interrupt() -> None:
            raise RankMismatch({0: "this", 1: "that"})

        made.interrupt = interrupt
        failure = None
        begin = time.monotonic()
        if at.rank == 0:
            failure = caught(lambda: made.execute(program, call_for(one, a, b)))
        seconds = time.monotonic() - begin
        dist.barrier()
        return failure, seconds


def test_a_waiting_call_can_be_interrupted() -> None:
    (failure, seconds), _ = run(2, interrupted)
    assert failure.type == "RankMismatch" and seconds < 5


def broken(at: Rank, name: str) -> Any:
    """An error in one lane ends the others, long before the timeout."""
    of = problem([8] * at.world)
    one = plan(of, Schedule.parse(name), at.rank)
    with engine(2.0) as made:
        program = compile(one, made, slot_for(made, [one]))
        a, b = operands(of, 0)
        call = call_for(one, a, b)
        if at.rank == 1:
            del call.tensors["b"]
        begin = time.monotonic()
        failure = caught(lambda: made.execute(program, call))
        seconds = time.monotonic() - begin
        dist.barrier()
        return failure, seconds


def test_an_error_of_a_lane_is_raised_by_the_call() -> None:
    for name in ("serial", "hetero-unfused-1d:pull,compute=2"):
        failure, seconds = run(2, broken, name)[1]
        assert failure.type == "KeyError" and seconds < 1.5


def seeded(at: Rank) -> list[float]:
    once, again = (Disturbance(delay_s=1.0, seed=3) for _ in range(2))
    delays = [once.delay(at.rank) for _ in range(3)]
    assert once.delay(at.rank) not in delays
    assert [again.delay(at.rank) for _ in range(3)] == delays
    return delays


def test_delays_are_seeded_per_rank() -> None:
    first, second = run(2, seeded)
    assert first != second


def test_disturb_puts_back_what_was() -> None:
    outer, inner = Disturbance(seed=1), Disturbance(seed=2)
    with disturb(outer):
        with disturb(inner):
            assert disturbance._active is inner
        assert disturbance._active is outer
    assert disturbance._active is None


def describe(at: Rank) -> None:
    with engine() as made:
        assert made.name == "cpu" and not made.capabilities().capture
        assert made.capabilities().movers == ("dma", "kernel")
        assert made.capabilities().products == library(made.device)
        assert made.copy_engines() == 1
        assert made.capturing() == 0
        made.synchronize()


def test_it_says_what_it_can_do() -> None:
    run(1, describe)


#: A lane's product in a process whose OpenMP and MKL would start four threads for it. Prints the
#: threads that the lane adds to the process, its own included.
PRODUCT_OF_A_LANE = """
import os, threading, torch
from ficco.dma.cpu_lanes import Lane
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
