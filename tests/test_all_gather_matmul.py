"""Tests of all_gather_matmul beyond the contract, for all engines.

These tests run on the CPU engine. Modules of other engines import the tests with a ``device``
argument and run them there. Tests that need the CPU engine come last.
"""

from __future__ import annotations

import os
import random
import socket
import time
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import subjects
import torch
import torch.distributed as dist
from cases import (
    A_LAYOUTS,
    B_LAYOUTS,
    SYMMETRIC_LAYOUTS,
    Case,
    all_exact,
    call,
    equal,
    exact,
    make,
    own_group,
    verify,
)
from programs import Ended, Program
from ranks import Rank, leave, on_ranks, ranks, run
from torch.utils._python_dispatch import TorchDispatchMode

import ficco
from ficco.ops.call import run as ficco_run
from ficco.problems.products import Problem
from ficco.schedules import NAMED, Schedule, refusal

#: Names of schedules of a gather that all engines serve.
NAMES = sorted(
    name
    for name, schedule in NAMED.items()
    if not refusal(Problem("all_gather_matmul", (1,), 1, 1, "float32"), schedule)
    and name != "tiled"
)
#: Options of schedules, one by one and combined.
KNOBS = tuple(knobs for knobs in subjects.KNOBS if "beta" not in knobs)
#: One schedule of each kind, for tests of other features.
KINDS = (
    *("serial", "serial:collective", "serial:pull", "serial:kernel", "growing:tail=2"),
    *("shrinking:pull", "shard-overlap", "hetero-fused-1d:pieces=4"),
    *("uniform-unfused-1d:pull,copy=2", "hetero-unfused-2d:compute=2"),
    "uniform-fused-2d:pieces=3,pull",
)
#: Limit on the bytes of a call's signal words, which take at most a cache line each.
WORDS_BYTES = 1 << 14


def named(name: str, knobs: str) -> str:
    return f"{name}:{knobs}" if knobs else name


def dtypes_on(device: str) -> tuple[str, ...]:
    """Return the dtypes of an engine. Only the CPU engine serves float64."""
    return ("bfloat16", "float16", "float32", "float64")[: 4 if device == "cpu" else 3]


@on_ranks(2)
def test_schedule_as_object_and_auto(at: Rank) -> None:
    """A schedule may be an object or "auto", also in calls without a timeout."""
    case = equal(at.world, 8, 8, 8)
    with ficco.options(timeout_s=float("inf")):
        exact(at, case.on(schedule="auto"), 0)
        for turn, name in enumerate(KINDS):
            exact(at, case.on(schedule=Schedule.parse(name)), turn)


def test_layouts_of_a(device: str) -> None:
    """Test all layouts with all kinds of schedules, cycling through the shapes."""
    shapes = cycle(
        (equal(3, 12, 20, 8, gathered=True), Case((5, 8, 2), 11, 6, "bfloat16"), equal(3, 4, 0, 3))
    )
    layouts = product(A_LAYOUTS + SYMMETRIC_LAYOUTS, KINDS)
    cases = [next(shapes).on(a=layout, schedule=name) for layout, name in layouts]
    run(3, all_exact, cases, device=device)


def random_knobs(rng: random.Random, device: str) -> str:
    cuts = "W", str(rng.randint(1, 9)), "+".join(rng.choices("12345", k=rng.randint(2, 4)))
    values = {name: rng.randint(1, 4) for name in ("tail", "copy", "compute")}
    knobs = [f"pieces={rng.choice(cuts)}", *(f"{name}={n}" for name, n in values.items())]
    knobs += [f"order={rng.choice(('piece', 'peer'))}", "pull", *["kernel"] * (device == "cpu")]
    return ",".join(rng.sample(knobs, rng.randint(0, 4)))


def random_case(rng: random.Random, world: int, device: str) -> Case:
    """Return a random small case."""
    if rng.random() < 0.6:
        rows = (rng.randrange(0, 20),) * world
    else:
        rows = tuple(rng.randrange(0, 20) for _ in range(world))
    return Case(
        rows,
        rng.choice([0, 1, 3, 16, 33, 80]),
        rng.choice([0, 1, 5, 16, 31]),
        dtype=rng.choice(dtypes_on(device)),
        schedule=rng.choice([*KINDS, *(named(name, random_knobs(rng, device)) for name in NAMES)]),
        a=rng.choice(A_LAYOUTS),
        b=rng.choice(B_LAYOUTS),
        gathered=rng.random() < 0.3,
    )


@ranks(2, 4)
def test_calls_in_any_order(world: int, device: str) -> None:
    rng = random.Random(world)
    kinds = [random_case(rng, world, device) for _ in range(25)]
    # Each case runs as a first call and as a warm call, after different cases.
    cases = [rng.choice(kinds) for _ in range(80)]
    run(world, all_exact, cases, device=device, timeout=100)


def _growth(at: Rank) -> list[int]:
    """Return the bytes allocated after each call, and after the group is closed."""
    small, sizes = equal(at.world, 4, 8, 8), []
    turns = [small, small.on(rows=(64,) * at.world), small, small.on(k=512), small, small]
    schedules = "hetero-fused-1d", "serial:pull", "uniform-fused-2d"
    cases = [case.on(schedule=name) for name in schedules for case in turns]
    # Once both slots have the largest size, nothing grows.
    cases += [small.on(k=512, schedule="serial")] * 8
    with own_group(at) as group:
        for step, case in enumerate(cases):
            exact(at, case, step, group)
            sizes.append(ficco.memory(group))
        ficco.close(group)
        sizes.append(ficco.memory(group))
        exact(at, small, 99, group)  # a closed group starts again
    return sizes


def test_workspace_grows_and_is_reused(device: str) -> None:
    *sizes, after = run(3, _growth, device=device)[0]
    assert sizes == sorted(sizes), "symmetric memory was given back between calls"
    assert sizes[0] < sizes[-1] and len(set(sizes[-5:])) == 1, sizes
    # A slot holds the largest staging, published shard and words that any of these calls needs.
    staging, publish = 4 * 3 * 512 * 4, 64 * 8 * 4
    assert sizes[-1] <= 2 * (staging + publish + WORDS_BYTES), sizes
    assert after == 0


@on_ranks(4)
def test_subgroups(at: Rank) -> None:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    three = dist.new_group([0, 1, 3])
    alone = dist.new_group([2])
    half = halves[at.rank % 2]
    for iteration, name in enumerate(KINDS):
        # The two halves run different sizes concurrently.
        exact(at, equal(2, 5 + at.rank % 2, 16, 8, schedule=name), iteration, half)
        exact(at, Case((2, 5), 9, 4, schedule=name, a="symmetric"), iteration, half)
        if at.rank == 2:
            exact(at, equal(1, 5, 16, 8, schedule=name), iteration, alone)
        else:
            exact(at, equal(3, 5, 16, 8, schedule=name), iteration, three)
        exact(at, equal(4, 5, 16, 8, schedule=name), iteration)
    leave(half, alone if at.rank == 2 else three)


def _float_error(at: Rank, dtype: str, schedule: str, k: int) -> tuple[float, float]:
    """Return the errors of ficco and of a plain product, divided by the bound of rounding errors.

    In a format of unit roundoff u, the error of a sum of k products, in any order, is at most
    k u / (1 - k u) times the sum of the products' absolute values. The narrow formats add up in
    float32 and round once at the end, by at most half a unit in the last place.
    """
    case = equal(at.world, 24, k, 20, dtype=dtype, schedule=schedule)
    kind = getattr(torch, dtype)
    rng = torch.Generator(at.device).manual_seed(k)
    whole = torch.randn(case.m, k, generator=rng, device=at.device, dtype=torch.float64).to(kind)
    b = torch.randn(k, case.n, generator=rng, device=at.device, dtype=torch.float64).to(kind)
    first = sum(case.rows[: at.rank])
    (result,) = call(case, whole[first : first + 24].clone(), b)
    want = whole.double() @ b.double()
    total = whole.double().abs() @ b.double().abs()
    unit = 2.0**-53 if dtype == "float64" else 2.0**-24
    terms = (k + 8) * unit  # 8 more for the sums of up to 8 pieces
    narrow = torch.finfo(kind).eps / 2 if kind.itemsize < 4 else 0.0
    allowed = terms / (1 - terms) * total + narrow * (want.abs() + terms / (1 - terms) * total)
    if dtype == "float64":  # the reference is rounded, too
        allowed = 2 * allowed
    plain = whole @ b
    return tuple(((y.double() - want).abs() / allowed).max().item() for y in (result, plain))


@on_ranks(3)
def test_float_error_is_that_of_a_plain_product(at: Rank) -> None:
    for arguments in product(dtypes_on(at.device.type), KINDS, (7, 400)):
        error, plain = _float_error(at, *arguments)
        # Some libraries add narrow products less exactly than the bound.
        assert error <= max(1.0, plain), (*arguments, error, plain)


# The CPU engine only.


#: Program of a rank under torchrun. It prints its shared memory, and ends in one of ``WAYS``.
SCRIPT = """
import contextlib, os, re, sys, threading, time
import torch
import torch.distributed as dist
import ficco

torch.set_num_threads(1)
how = sys.argv[1]
dist.init_process_group("gloo")
held = ficco.empty((8, 16), dtype=torch.float32)
held.copy_(torch.ones(8, 16))
results = []
for schedule in ("serial", "hetero-fused-1d:pull,copy=2", "uniform-fused-2d:compute=2"):
    a = held if "pull" in schedule else torch.ones(8, 16)
    y = ficco.all_gather_matmul(a, torch.ones(16, 4), schedule=schedule)
    assert (y == 16).all()
    results.append(y)
places = [open("/proc/self/maps").read()]
for fd in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):
        places.append(os.readlink(f"/proc/self/fd/{fd}") + " ")
maps = set(re.findall(r"/dev/shm/[^\\s]+", "".join(places)))
print("mapped", *sorted(maps))
anonymous = lambda: open("/proc/self/maps").read().count("memfd:ficco")
assert maps or anonymous(), "ranks share no memory that this test knows of"
dist.barrier()
if how == "close":
    del a, held
    ficco.close()
    ficco.close()
    print("left", anonymous())
    print("threads", *(t.name for t in threading.enumerate() if t is not threading.main_thread()))
if how.startswith(("close", "destroy")):
    dist.destroy_process_group()
if how == "destroy-then-close":
    ficco.close()
elif how == "error":
    raise RuntimeError("on purpose")
elif how == "in-flight" and dist.get_rank() == 0:
    # A call of another thread waits for a peer that never calls, or has just ended. It waits in
    # Python: a process that ends while a thread is in a collective of gloo may abort.
    def late():
        with contextlib.suppress(ficco.SignalTimeout):
            ficco.all_gather_matmul(torch.ones(8, 16), torch.ones(16, 4), schedule="growing")
    threading.Thread(target=late, daemon=True).start()
    time.sleep(0.3)
"""


def start_ranks(folder: Path, script: str, world: int, *args: str, env: Any = None) -> list[Any]:
    """Start ranks as torchrun does, without a launcher. One folder has one port."""
    note = folder / "port"
    if not note.exists():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            note.write_text(str(probe.getsockname()[1]))
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": note.read_text()}
    programs = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **common, **(env or {})}
        programs.append(Program(folder, f"rank{rank}", script, args, own))
    return programs


def end_of(programs: list[Program], timeout: float = 200.0) -> list[Ended]:
    """Wait for all programs, and return their exit codes and output."""
    deadline = time.monotonic() + timeout
    try:
        return [program.end(deadline) for program in programs]
    finally:
        for program in programs:
            program.kill()


WAYS = "end", "close", "destroy", "destroy-then-close", "error", "in-flight"


@pytest.mark.parametrize("how", WAYS)
def test_exit_leaves_nothing(how: str, tmp_path: Path) -> None:
    before, mapped = set(os.listdir("/dev/shm")), set()
    code, error = (1, "RuntimeError: on purpose") if how == "error" else (0, "")
    for rank, (returned, out, err) in enumerate(end_of(start_ranks(tmp_path, SCRIPT, 2, how))):
        assert returned == code, f"rank {rank}:\n{out}\n{err}"
        assert "mapped" in out and error in err
        noise = ("Traceback", "leaked", "Exception ignored", "Fatal Python error")
        for word in noise[1:] if error else noise:
            assert word not in err, f"rank {rank}:\n{err}"
        assert how != "close" or ("threads\n" in out and "left 0\n" in out), out
        (line,) = (line for line in out.splitlines() if line.startswith("mapped"))
        mapped |= {name for name in line.split()[1:] if Path(name).exists()}
    # Memory that the ranks unmapped before they printed has ficco in its name.
    assert not mapped | {name for name in set(os.listdir("/dev/shm")) - before if "ficco" in name}


@on_ranks(2)
def test_transposed_b_is_not_copied(at: Rank) -> None:
    """Call the implementation, since a dispatch mode sees only the operator."""
    case = equal(at.world, 16, 32, 24, schedule="hetero-fused-1d", b="transposed")
    sample = make(at, case, 0)
    address, seen = sample.b.untyped_storage().data_ptr(), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            if any(word in str(func) for word in ("clone", "copy", "contiguous")):
                tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
                seen.extend(tensor.untyped_storage().data_ptr() for tensor in tensors)
            return func(*args, **(kwargs or {}))

    call(case, sample.a, sample.b)
    with Watch():
        out, _ = ficco_run("all_gather_matmul", sample.a, sample.b, dist.group.WORLD, case.schedule)
    verify(case, [out], sample)
    assert address not in seen
