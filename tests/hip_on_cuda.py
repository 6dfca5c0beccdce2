"""HIP API forwarded to CUDA on NVIDIA: the HIP engine on GPUs, none of them AMD's.

    python tests/hip_on_cuda.py --out build/hip-on-cuda

builds ``hip_forward/forward.cpp`` (g++ and cuda.h) as ``libamdhip64.so`` and runs the HIP engine
through the real hip-python on it, one rank per GPU: real copy engines, streams, graphs and memory
of other processes, but CUDA's. With ``FICCO_TESTS_RANKS_PER_GPU`` ranks share GPUs, where copies
are kernels and times mean nothing: leave out the part "bench". It needs PyTorch for CUDA, pytest,
and hip-python for this Python in ``build/hip-python/``, where ``hip_forward/fetch.sh`` puts it on a
machine with a network.

Parts run one after the other, in processes of their own; what fails does not stop the rest. A rank
that makes no step in 60 s prints its stacks and ends. The report and its CSV go to ``--out``;
the exit status is 1 if any part failed.
"""

from __future__ import annotations

import argparse
import csv
import faulthandler
import json
import os
import random
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
# Processes that are started later begin with this.
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2] + [os.environ.get("PYTHONPATH", "")])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import ficco  # noqa: E402

#: Seconds in which a rank makes a step.
PATIENCE_S = 60
#: Cycles of torch.cuda._sleep that take about 100 us.
MOMENT = 180_000
#: What the title of everything here says.
TITLE = "HIP API forwarded to CUDA on NVIDIA"

PROGRESS = "FICCO_TEST_PROGRESS"
#: The arguments of the program.
GIVEN = "FICCO_TEST_ARGUMENTS"


def step(at: Any, text: str = "") -> None:
    """Say that this rank goes on; rank 0 also says with what."""
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    if text and at.rank == 0:
        with open(os.environ[PROGRESS], "a") as file:
            file.write(f"{text}\n")


def engine() -> Any:
    """The HIP engine of this rank."""
    from ficco.runtime.workspace import workspaces

    (found,) = (one.engine for one in workspaces() if one.name == "hip")
    return found


# Parts. Each runs on every rank, with the HIP engine chosen.


def about(at: Any) -> dict[str, str]:
    """What the engine does here, in its own words, and what it did that on."""
    from cases import equal, exact
    from hip import HIP_VERSION_TUPLE

    from ficco.tools import doctor
    from ficco.tools.bench.frames import commit

    step(at, "first call")
    exact(at, equal(at.world, 8, 8, 8, schedule="growing"), 0)
    ficco.synchronize()
    found = engine().capabilities()
    series = ".".join(map(str, HIP_VERSION_TUPLE[:2]))
    gpus = min(at.world, torch.cuda.device_count())
    shared = ", which share GPUs: copies within one are kernels" if gpus < at.world else ""
    return {
        "GPUs": f"{gpus} x {torch.cuda.get_device_name()}, driver {doctor.driver()}",
        "ranks": f"{at.world}{shared}",
        "commit": commit() or "not a checkout",
        "command": f"`python tests/hip_on_cuda.py {os.environ[GIVEN]}`",
        "versions": f"PyTorch {torch.__version__}, hip-python for HIP {series}",
        **{name: str(getattr(found, name)) for name in ("post", "wait", "copy", "movers")},
    }


def exactly(at: Any, cases: list[Any]) -> str:
    """Calls one behind the other, each compared in every element."""
    import cases as gathers
    import test_operators as operators

    for iteration, case in enumerate(cases):
        step(at, f"{iteration} of {len(cases)}" if iteration % 50 == 0 else "")
        ours = operators if isinstance(case, operators.Case) else gathers
        ours.exact(at, case, iteration)
    ficco.synchronize()
    assert engine().name == "hip"
    return f"{len(cases)} calls exact"


def jittered(at: Any, count: int, together: int = 8) -> str:
    """Calls of any kind, several under way, while queues are late by chance, other ones on every
    rank."""
    from cases import Case, call, equal, exact, make, verify

    exact(at, equal(at.world, 8, 8, 8, schedule="growing"), 0)
    choice, mine = random.Random(11), random.Random(at.rank)
    for first in range(0, count, together):
        step(at, f"{first} of {count}" if first % 200 == 0 else "")
        cases = [_any_case(choice, at.world, Case) for _ in range(together)]
        made = [make(at, case, first + i) for i, case in enumerate(cases)]
        torch.cuda.synchronize()
        cap = choice.choice((None, at.world << 14))  # room for the largest step there can be
        found = []
        for case, one in zip(cases, made, strict=True):
            _delay(mine)
            with ficco.options(workspace_bytes=cap):
                found.append(call(case, one.a, one.b))
        ficco.synchronize()
        for case, results, one in zip(cases, found, made, strict=True):
            verify(case, results, one, f"rank {at.rank}, call {first} and following:")
    return f"{count} calls exact, {together} at a time"


def _any_case(choice: random.Random, world: int, kind: Any) -> Any:
    from test_all_gather_matmul import KNOBS, named
    from test_hip import NAMES

    return kind(
        tuple(choice.randrange(48) for _ in range(world)),
        choice.choice((1, 7, 64, 128)),
        choice.choice((1, 5, 64)),
        dtype=choice.choice(("bfloat16", "float16", "float32")),
        schedule=named(choice.choice(NAMES), choice.choice(KNOBS)),
        gathered=choice.random() < 0.3,
    )


def _delay(chance: random.Random) -> None:
    """Keep the caller's stream and some lanes busy for a moment."""
    for _, stream in sorted(engine()._streams[False].items()):
        if chance.random() < 0.3:
            with torch.cuda.stream(stream.torch):
                torch.cuda._sleep(chance.randrange(3 * MOMENT))
    torch.cuda._sleep(chance.randrange(3 * MOMENT))


def graphs(at: Any, replays: int) -> str:
    """Captured calls, replayed with new operands between eager ones."""
    from cases import equal, exact
    from test_gpu import Graphed, graphed_by

    count, schedules = 0, graphed_by(dist.get_backend())
    for schedule in schedules:
        step(at, schedule)
        group = dist.new_group(list(range(at.world)))
        case = equal(at.world, 48, 64, 40, dtype="bfloat16", schedule=schedule, gathered=True)
        other = equal(at.world, 31, 24, 8, dtype="float16", schedule="hetero-fused-1d:pieces=3")
        exact(at, case, 0, group)
        graphed = Graphed(at, case, group)
        for first in range(0, replays, 5):
            step(at)
            graphed.exact(first, 5)
            exact(at, other, first, group)
            exact(at, case, first, group)
            count += 5
        del graphed
        torch.cuda.synchronize()
        ficco.close(group)
        dist.destroy_process_group(group)
    return f"{count} replays of {len(schedules)} schedules exact, with eager calls between them"


def faults(at: Any) -> str:
    """A rank stays away: the others say so in time, and what they hold is given back."""
    from cases import call, equal, exact, make
    from ranks import caught, gave_up

    step(at, "one rank stays away")
    group = dist.new_group(list(range(at.world)))
    case = equal(at.world, 16, 16, 16, schedule="hetero-fused-1d")
    for iteration in range(4):
        exact(at, case, iteration, group)
    torch.cuda.synchronize()
    at.barrier()
    outcome, began = None, time.monotonic()
    if at.rank:

        def late() -> None:
            made = make(at, case, 9, group)
            call(case, made.a, made.b, group)
            ficco.synchronize(group)

        with ficco.options(timeout_s=3.0):
            outcome = caught(late)
    seconds = time.monotonic() - began
    at.barrier()
    if at.rank:
        assert {one["peer"] for one in gave_up(outcome)} == {0}
        assert seconds < 12, (outcome, seconds)
    ficco.close(group)
    dist.destroy_process_group(group)
    exact(at, equal(at.world, 8, 8, 8, schedule="growing"), 0)
    return "SignalTimeout names the rank that stayed away; other groups go on"


# The bench.

SHAPES = (
    (8192, 3584, 4096),
    (8192, 7168, 8192),
    (32768, 2048, 8192),
    (18432, 7168, 4096),
    (8192, 2048, 4096),
    (2048, 2048, 4096),
)
SCHEDULES = (
    "serial",
    "shard-overlap",
    "shard-overlap:pull",
    "growing",
    "hetero-fused-1d:pieces=4",
    "uniform-fused-1d",
    "hetero-unfused-2d",
)
#: What is compared, each the same call: the engine and whether it may replay calls from graphs of
#: its own, which the HIP engine does not do.
ENGINES = {"cuda": ("cuda", True), "cuda stepwise": ("cuda", False), "hip": ("hip", False)}


@dataclass
class Timed:
    """One schedule on one shape in one mode: seconds of the slowest rank, round by round, and what
    the host takes for a call, by engine."""

    shape: tuple[int, int, int]
    schedule: str
    mode: str
    times_s: dict[str, list[float]]
    host_s: dict[str, float]

    def ms(self, name: str) -> float:
        return median(self.times_s[name]) * 1e3

    def ratio(self, name: str, to: str) -> float:
        """Median of the ratios of two engines' times, round by round."""
        pairs = zip(self.times_s[name], self.times_s[to], strict=True)
        return median(one / other for one, other in pairs)


def bench(at: Any, seconds: float, shapes: int) -> list[Timed]:
    """All engines in shuffled order in every round."""
    from ficco.tools.bench.measure import Barrier, DeviceClock

    barrier = Barrier(dist.group.WORLD, PATIENCE_S)
    clock = DeviceClock(dist.group.WORLD, barrier)
    found = []
    for shape in SHAPES[:shapes]:
        step(at, "x".join(map(str, shape)))
        found += list(_shape(at, shape, seconds / shapes, barrier, clock))
        ficco.close()
        torch.cuda.empty_cache()
        at.barrier()
    barrier.close()
    return found if at.rank == 0 else []


def _shape(
    at: Any, shape: tuple[int, int, int], seconds: float, barrier: Any, clock: Any
) -> Iterator[Timed]:
    from ficco.tools.bench.measure import MODES, Item, Runner, capture, rounds
    from ficco.tools.bench.series import slowest

    m, n, k = shape
    generator = torch.Generator(at.device).manual_seed(at.rank)
    a = torch.randn(m // at.world, k, device=at.device, generator=generator).bfloat16()
    b = torch.randn(k, n, device=at.device, generator=generator).bfloat16()

    def runner(schedule: str, name: str) -> Runner:
        chosen, replay = ENGINES[name]
        return Runner(
            lambda: ficco.all_gather_matmul(a, b, schedule=schedule),
            context=lambda: ficco.options(engine=chosen, replay=replay),
        )

    pool = torch.cuda.graph_pool_handle()
    items, first = [], {}
    for schedule in SCHEDULES:
        for name in ENGINES:
            step(at)
            made = runner(schedule, name)
            with made.context():
                result = made.run()
            # Random data: what other kernels of the library make of it differs by roundings.
            want = first.setdefault(schedule, result)
            most = float(want.abs().max()) * 2**-6
            torch.testing.assert_close(result, want, rtol=2**-6, atol=most)
            for mode in MODES:
                replay = None
                if mode == "graph":
                    torch.cuda.synchronize()
                    at.barrier()
                    replay = capture(made, pool)[0]
                items.append((schedule, name, Item(mode, f"{schedule} {name}", made, replay)))
    first.clear()
    step(at, f"  {len(items)} candidates")
    timed = [item for _, _, item in items]
    done = rounds(timed, clock, barrier, 60, seconds, tick=lambda _: step(at))
    step(at, f"  {done} rounds")
    mine = [(item.times_s, item.host_s) for item in timed]
    everyone: list[Any] = [None] * at.world
    dist.all_gather_object(everyone, mine)
    for schedule in SCHEDULES:
        for mode in MODES:
            times, host = {}, {}
            for index, (other, name, item) in enumerate(items):
                if (other, item.mode) == (schedule, mode):
                    times[name] = slowest([one[index][0] for one in everyone])
                    host[name] = max(one[index][1] for one in everyone)
            yield Timed(shape, schedule, mode, times, host)
    items.clear()
    timed.clear()


# The report.


def write_csv(path: Path, found: list[Timed], world: int) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        names = [name.replace(" ", "_") for name in ENGINES]
        head = ["m", "n", "k", "dtype", "world", "schedule", "mode", "rounds"]
        head += [f"{name}_ms" for name in names] + ["hip_over_cuda", "hip_over_cuda_stepwise"]
        rows.writerow(head + [f"{name}_host_us" for name in names])
        for one in found:
            values = [*one.shape, "bfloat16", world, one.schedule, one.mode]
            values += [len(one.times_s["hip"])]
            values += [f"{one.ms(name):.4f}" for name in ENGINES]
            values += [f"{one.ratio('hip', to):.4f}" for to in ("cuda", "cuda stepwise")]
            rows.writerow(values + [f"{one.host_s[name] * 1e6:.1f}" for name in ENGINES])


def report(
    title: str,
    parts: dict[str, tuple[bool, str]],
    words: dict[str, str],
    found: list[Timed],
) -> Iterator[str]:
    """The report, line by line."""
    yield f"# {title}: {TITLE}"
    yield ""
    yield (
        "`ficco/dma/hip_driver.py` through hip-python on a `libamdhip64.so` that hands HIP's calls "
        "to the CUDA driver (`tests/hip_forward/forward.cpp`). No AMD GPU took part: what this "
        "shows is the engine's own code on real queues, copy engines and graphs, not HIP's or an "
        "AMD GPU's "
        f"behaviour. Made by `tests/hip_on_cuda.py`, {date.today()}."
    )
    yield from ("", "| | |", "|---|---|")
    for name, text in words.items():
        yield f"| {name} | {text} |"
    yield from ("", "| part | outcome |", "|---|---|")
    for name, (good, text) in parts.items():
        first = text.strip().splitlines()[0] if text.strip() else ""
        yield f"| {name} | {'passed' if good else '**failed**'}: {first} |"
    if not found:
        return
    yield from ("", "## Times beside the CUDA engine's", "")
    yield (
        "Milliseconds of the slowest rank, all candidates in shuffled order in every round; ratios "
        "round by round, their median. *stepwise*: the CUDA engine without replays of its own, "
        "which is what the HIP engine does. Host: microseconds to enqueue a call, queued."
    )
    yield ""
    head = "m, n, k|schedule|mode|cuda|stepwise|hip|hip / cuda|hip / stepwise|host".split("|")
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for one in found:
        times = " | ".join(f"{one.ms(name):.3f}" for name in ENGINES)
        ratios = " | ".join(f"{one.ratio('hip', to):.3f}" for to in ("cuda", "cuda stepwise"))
        host = " / ".join(f"{one.host_s[name] * 1e6:.0f}" for name in ENGINES)
        shape = ", ".join(map(str, one.shape))
        yield f"| {shape} | {one.schedule} | {one.mode} | {times} | {ratios} | {host} |"
    yield ""
    for mode in dict.fromkeys(one.mode for one in found):
        for to in ("cuda", "cuda stepwise"):
            ratios = sorted(one.ratio("hip", to) for one in found if one.mode == mode)
            inside = sum(abs(ratio - 1) <= 0.05 for ratio in ratios)
            yield (
                f"- {mode}: HIP over {to}: median {median(ratios):.3f}, {ratios[0]:.3f} to "
                f"{ratios[-1]:.3f}; {inside} of {len(ratios)} within 5 %"
            )


# In the parent.


def _follow(path: Path, over: threading.Event) -> None:
    """Print what rank 0 says."""
    seen = 0
    while not over.wait(0.5):
        text = path.read_text() if path.exists() else ""
        for line in text[seen:].splitlines():
            print(f"    {line}", flush=True)
        seen = len(text)


def _wheel() -> Path:
    """The folder of hip-python for this Python."""
    found = HERE.parent / "build" / "hip-python"
    for folder in (found / f"cp{sys.version_info[0]}{sys.version_info[1]}", found / "10"):
        if (folder / "hip").exists():
            return folder
    raise SystemExit(f"no hip-python in {found}: run tests/hip_forward/fetch.sh, and carry it here")


def _jobs(world: int, seconds: float, calls: int, shapes: int) -> dict[str, Any]:
    """Parts: function, arguments, variables, seconds."""
    import test_operators as operators
    from cases import Case, equal
    from test_all_gather_matmul import KINDS, KNOBS, UGLY, named
    from test_hip import NAMES, OPERATORS

    from ficco.dma.ways import WAYS

    dtypes = ("bfloat16", "float16", "float32")
    every = [
        equal(world, 24, 40, 16, dtype=dtypes[i % 3], schedule=named(name, knobs))
        for name in NAMES
        for i, knobs in enumerate(KNOBS)
    ]
    every += [case.on(rows=(17,) * world, k=23, n=9, gathered=True) for case in every[::-1]]
    ugly = [
        Case((rows * 2)[:world], k, n, dtype=dtypes[i % 3], schedule=name, gathered=True)
        for i, (rows, k, n) in enumerate(UGLY)
        for name in KINDS
    ]
    chance = random.Random(5)
    others = [
        operators.Case(
            operator,
            operators.rows_for(operator, world, chance.choice(("equal", "ragged", "few"))),
            chance.choice((8, 24, 64)),
            chance.choice((1, 8, 40)),
            chance.choice(dtypes),
            schedule,
            chance.random() < 0.5,
        )
        for operator in OPERATORS
        for schedule in operators.schedules_of(operator)
    ]
    large = [equal(world, 1024, 2048, 512, dtype="bfloat16", schedule=name) for name in KINDS]
    found: dict[str, Any] = {
        "about": (about, (), {}, 90),
        "exact": (exactly, (every,), {}, 200),
        "ugly": (exactly, (ugly + large,), {}, 120),
        "operators": (exactly, (others,), {}, 200),
        "jittered": (jittered, (calls,), {}, 200),
        "graphs": (graphs, (20,), {}, 150),
        "faults": (faults, (), {}, 90),
    }
    usual = {"signal", "dtod", "ipc", "2d", "write"}  # which all other parts take
    for what, values in WAYS["hip"].items():
        for value in sorted(values.keys() - usual):
            # To load a kernel may wait for those that run, and some of these wait for peers.
            eager = {"CUDA_MODULE_LOADING": "EAGER"} if value == "kernel" else {}
            env = {"FICCO_HIP": f"{what}={value}", **eager}
            found[f"FICCO_HIP={what}={value}"] = (exactly, (every[::7],), env, 90)
    found["bench"] = (bench, (seconds, shapes), {}, 2 * seconds + 90)
    return found


def main() -> int:
    import hip_ranks

    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--out", type=Path, default=Path("build/hip-on-cuda"))
    parser.add_argument("--name", default="hip-on-cuda", help="of the report and its CSV")
    parser.add_argument("--world", type=int, default=torch.cuda.device_count(), help="ranks")
    parser.add_argument("--parts", default="", help="names with commas, FICCO for its variables")
    parser.add_argument("--calls", type=int, default=2000, help="jittered calls")
    parser.add_argument("--seconds", type=float, default=150.0, help="of the bench")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="of the bench")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    env = {hip_ranks.LIBRARY: str(hip_ranks.forward()), hip_ranks.WHEEL: str(_wheel())}
    print(f"{TITLE}: {given.world} ranks, {env}", flush=True)
    wanted = tuple(filter(None, given.parts.split(",")))
    # A later run of other parts adds to the report.
    kept = given.out / "parts.json"
    parts, words = json.loads(kept.read_text()) if kept.exists() else ({}, {})
    timed: list[Timed] = []
    jobs = _jobs(given.world, given.seconds, given.calls, given.shapes)
    for name, (fn, args, more, seconds) in jobs.items():
        if wanted and not name.startswith(wanted):
            continue
        progress = Path(tempfile.gettempdir(), f"ficco-hip-on-cuda-{os.getpid()}-{name}")
        settings = {**env, **more, PROGRESS: str(progress), GIVEN: shlex.join(sys.argv[1:])}
        good, found = _run(name, fn, args, settings, given.world, seconds)
        if good and name == "about":
            words, text = found, "the engine's first call"
        elif good and name == "bench":
            timed, text = found, f"{len(found)} rows"
        else:
            text = str(found)
        parts[name] = good, text
        print(f"  {'passed' if good else 'FAILED'}: {text}", flush=True)
        # After each part: a run that is cut off leaves what there was.
        kept.write_text(json.dumps([parts, words]))
        lines = report(given.name, parts, words, timed)
        (given.out / f"{given.name}.md").write_text("\n".join(lines) + "\n")
        if timed:
            write_csv(given.out / f"{given.name}.csv", timed, given.world)
    print((given.out / f"{given.name}.md").read_text(), flush=True)
    return 0 if all(good for good, _ in parts.values()) else 1


def _run(
    name: str, fn: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], world: int,
    seconds: float,
) -> tuple[bool, Any]:  # fmt: skip
    """One part: whether it passed, and what rank 0 returned or what went wrong."""
    import hip_ranks
    import pytest

    print(f"{name} (at most {seconds:.0f} s)", flush=True)
    over, began = threading.Event(), time.monotonic()
    follower = threading.Thread(target=_follow, args=(Path(env[PROGRESS]), over), daemon=True)
    follower.start()
    try:
        found = hip_ranks.run(world, fn, *args, env=env, device="cuda", timeout=seconds)
        return True, found[0]
    except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
        return False, f"{type(error).__name__}: {error}"
    finally:
        over.set()
        follower.join()
        print(f"  {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    import hip_on_cuda  # so that the ranks find its functions under a name of their own

    try:
        status = hip_on_cuda.main()
    finally:
        import ranks

        ranks.close()
    sys.exit(status)
